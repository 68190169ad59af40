"""What was decided is written down where the operator finds it, without secrets, and never at a run's expense."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import limits
from pkg.agent_api import ApprovalRequested, Choice, FileDiff, QuestionAsked
from pkg.decision_log import Action, DecisionLine, DecisionLog, without_secrets
from pkg.identity import Authority
from pkg.redaction import Redactor
from pkg.runtime_support import WorkerShape

CANARY = "canary-Vb7nM2qW9eR4tY6u"
BINDING = InstallationBinding(
    instance_uuid="i",
    workspace_uuid="w",
    placement_generation=1,
    installation_uuid="n",
    runtime_revision=2,
    artifact_digest="a" * 64,
)
ASKED = ApprovalRequested(
    "r", "Run make", "execute", (Choice("y", "Yes", "allow_once"),), command="make test", cwd="/ws", reason=CANARY
)


def lines(file: Path | None) -> list[dict[str, str]]:
    """A file's lines, each one JSON object."""
    assert file is not None
    return [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]


def decision(asked: ApprovalRequested | QuestionAsked = ASKED, **more: str) -> DecisionLine:
    """A line about ``asked``."""
    return DecisionLine(Action.of(asked), **{"decision": "allow_once", "by": "person", **more})


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """This process writes no file beyond ``size`` bytes (Python ignores the signal, the write fails)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestLines:
    """One JSON object a decision."""

    def test_a_line_says_who_what_when_where_and_by_what(self, tmp_path: Path) -> None:
        """And nothing else: not the agent's reason, not a person's words."""
        log = DecisionLog(tmp_path / "state", "n1")
        more = {"conversation": "lb_c", "actor": "lb_a", "answerer": "lb_b", "machine": "laptop", "directory": "/ws"}
        log.write(decision(ASKED, by="rule 3: allow execute(make *)", **more))
        (line,) = lines(log.file)
        assert line.pop("time").endswith("Z")
        assert line == {
            **more,
            "installation": "n1",
            "kind": "execute",
            "action": "make test",
            "digest": Action.of(ASKED).digest,
            "decision": "allow_once",
            "by": "rule 3: allow execute(make *)",
        }
        assert len(line["digest"]) == 64

    def test_the_digest_tells_actions_apart_that_look_alike(self) -> None:
        """It is of the whole action, of nothing that changes from request to request."""

        def digest(**more: object) -> str:
            fields = {"command": "make", "cwd": "/ws", **more}
            return Action.of(ApprovalRequested("r1", "t", "execute", (), **fields)).digest  # type: ignore[arg-type]

        same = ApprovalRequested(
            "r2", "t", "execute", ASKED.choices, command="make", cwd="/ws", reason="other", tool_call_id="c"
        )
        assert digest() == Action.of(same).digest
        different = {
            *(digest(), digest(command="make x"), digest(cwd="/"), digest(paths=("a",)), digest(command="x" * 9000 + "a")),
            *(
                digest(command="x" * 9000 + "b"),
                digest(diffs=(FileDiff("a", None, "x"),)),
                digest(diffs=(FileDiff("a", None, "y"),)),
            ),
        }
        assert len(different) == 8

    def test_files_and_questions_have_a_name_too(self) -> None:
        """The files of an edit, a question's own words."""
        edit = ApprovalRequested("r", "Edit", "edit", (), paths=("a",), diffs=(FileDiff("b", None, "x"),))
        assert (Action.of(edit).kind, Action.of(edit).described) == ("edit", "a, b")
        asked = Action.of(QuestionAsked("q", "Which\nport?"))
        assert (asked.kind, asked.described) == ("question", "Which port?")
        assert Action.of(ApprovalRequested("r", "", "fetch", ())).described == "fetch"

    @pytest.mark.parametrize("hostile", ['a\n{"decision": "deny"}', "\x00\x1b[2J\x85\u2028", "\ud800", "名" * 5000, '"', "\\"])
    def test_names_stay_in_their_line(self, tmp_path: Path, hostile: str) -> None:
        """Whatever an agent or a chat calls things; each value has a bound."""
        log = DecisionLog(tmp_path)
        named = ApprovalRequested("r", hostile, "execute", (), command=hostile)
        log.write(decision(named, machine=hostile, directory=hostile, actor=hostile))
        assert log.file is not None
        data = log.file.read_bytes()
        assert data.count(b"\n") == 1 and all(0x20 <= byte < 0x7F for byte in data[:-1])
        (line,) = lines(log.file)
        assert all(len(value) <= limits.DECISION_CHARS for value in line.values())

    @pytest.mark.parametrize(
        "command",
        [
            f"curl -H 'Authorization: Bearer {CANARY}' https://example.org",
            f"curl -H 'Authorization: {CANARY}' https://example.org",
            f"git clone https://user:{CANARY}@example.org/x",
            f"export GITHUB_TOKEN={CANARY}; make",
            f"mysql --password {CANARY} -u x",
            f"login --api-key='{CANARY} x'",
            f'{{"clientSecret": "{CANARY}"}}',
            f"echo {CANARY}",
            "x" * (limits.DECISION_CHARS - 30) + f" --token {CANARY}",
        ],
    )
    def test_no_secret_is_in_a_line(self, tmp_path: Path, command: str) -> None:
        """Those the worker knows, credentials in addresses, and what is named as one, also where a line is cut."""
        log = DecisionLog(tmp_path)
        redact = Redactor([CANARY])
        asked = ApprovalRequested("r", "t", "execute", (), command=command)
        log.write(DecisionLine(Action.of(asked, redact), "deny", "person", directory=f"/ws/{CANARY}"), redact)
        assert log.file is not None
        text = log.file.read_text()
        assert not any(CANARY[:size] in text for size in range(9, len(CANARY)))
        if command != f"echo {CANARY}":
            assert CANARY[:9] not in Action.of(asked).described
        assert without_secrets("tokenize the basic files of passwords.txt") == "tokenize the basic files of passwords.txt"


class TestPlaces:
    """Where the file is, by the kind of worker."""

    def test_beside_a_worker_of_one_installation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The account's state directory; 0600 in 0700."""
        monkeypatch.setenv("HOME", str(tmp_path))
        for shape in (WorkerShape.DEBUG, WorkerShape.DEDICATED):
            log = DecisionLog.for_worker(Authority(None), shape)
            assert log.file == tmp_path / limits.STATE_DIRECTORY / "decisions.jsonl"
            log.write(decision())
            assert log.file.stat().st_mode & 0o777 == 0o600 and log.file.parent.stat().st_mode & 0o777 == 0o700
            assert lines(log.file)[-1]["installation"] == ""

    def test_in_a_jail(self) -> None:
        """The one directory that outlives it; lines name the installation by a digest of all of its binding."""
        log = DecisionLog.for_worker(Authority(BINDING), WorkerShape.JAIL)
        assert log.file == Path("/data/.langbot-coding-agents/decisions.jsonl")

    @pytest.mark.parametrize(
        ("authority", "shape"), [(Authority(BINDING, pooled=True), WorkerShape.JAIL), (Authority(BINDING), WorkerShape.POOL)]
    )
    def test_in_the_pool_there_is_no_file_and_no_content(
        self,
        authority: Authority,
        shape: WorkerShape,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The host's log says that something was decided, by a policy, a rule or a person, and not what, where or for whom."""
        monkeypatch.setenv("HOME", str(tmp_path))
        log = DecisionLog.for_worker(authority, shape)
        assert log.file is None
        with caplog.at_level(logging.INFO):
            log.write(decision(by=f"rule 3: deny execute({CANARY})", actor=CANARY, directory=f"/{CANARY}", conversation=CANARY))
        (record,) = caplog.records
        assert "execute" in record.getMessage() and "rule 3" in record.getMessage() and "allow_once" in record.getMessage()
        assert CANARY not in caplog.text and "make" not in caplog.text
        assert list(tmp_path.rglob("*")) == []

    def test_every_part_of_a_binding_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lines of two installations are never taken for one's."""
        monkeypatch.setenv("HOME", str(tmp_path))
        bindings = [
            BINDING,
            *(BINDING.model_copy(update={name: "x"}) for name in ("instance_uuid", "workspace_uuid", "installation_uuid")),
        ]
        bindings += [BINDING.model_copy(update={"runtime_revision": 3})]
        for binding in bindings:
            DecisionLog.for_worker(Authority(binding), WorkerShape.DEDICATED).write(decision())
        names = [line["installation"] for line in lines(tmp_path / limits.STATE_DIRECTORY / "decisions.jsonl")]
        assert len(set(names)) == len(bindings) and all(len(name) == 64 for name in names)


class TestFile:
    """The file costs no run anything."""

    def test_a_link_in_its_place_is_not_followed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing of somebody else's is written to."""
        target = tmp_path / "target"
        target.write_text("mine")
        (tmp_path / "decisions.jsonl").symlink_to(target)
        DecisionLog(tmp_path).write(decision())
        assert target.read_text() == "mine"
        assert "can not be written down" in caplog.text

    @pytest.mark.timeout(20)
    def test_a_pipe_in_its_place_holds_nobody_up(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """It is no file."""
        os.mkfifo(tmp_path / "decisions.jsonl")
        DecisionLog(tmp_path).write(decision())
        assert "can not be written down" in caplog.text

    def test_a_full_disk_is_told_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Until a line can be written again; that one is whole, and the next trouble is told again."""
        log = DecisionLog(tmp_path)
        log.write(decision())
        assert log.file is not None
        for _ in range(2):
            caplog.clear()
            with no_file_grows_beyond(log.file.stat().st_size + 10):
                for _ in range(5):
                    DecisionLog(tmp_path).write(decision())
            assert caplog.text.count("can not be written down") == 1
            assert "make" not in caplog.text
            log.write(decision(decision="deny"))
            assert json.loads(log.file.read_text().splitlines()[-1])["decision"] == "deny"

    def test_a_directory_that_cannot_be_is_no_failure(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A file stands where the directory should be."""
        (tmp_path / "state").write_text("x")
        for _ in range(3):
            DecisionLog(tmp_path / "state").write(decision())
        assert caplog.text.count("can not be written down") == 1

    def test_it_is_set_aside_when_it_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No file grows beyond the bound; the newest lines stay in order."""
        monkeypatch.setattr(limits, "DECISION_BYTES", 4000)
        log = DecisionLog(tmp_path)
        for number in range(100):
            log.write(decision(actor=f"a{number}"))
        assert log.file is not None
        files = [log.file, *(tmp_path / f"decisions.jsonl.{number}" for number in range(1, limits.DECISION_FILES + 1))]
        assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock") == sorted(files)
        assert all(0 < file.stat().st_size <= 4000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
        kept = [line["actor"] for file in reversed(files) for line in lines(file)]
        assert kept == [f"a{number}" for number in range(100 - len(kept), 100)] and len(kept) > 20
