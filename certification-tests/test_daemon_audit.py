"""The workstation's record of what ran there and what its policy refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pkg import limits
from pkg.agent_api import Answer, ApprovalRequested, Choice, ChoiceKind, QuestionAsked, SessionSpec, to_json
from pkg.daemon_audit import Audit
from pkg.errors import CodingError, ProcessCleanupUnconfirmed, Refused

HUB = "wss://chat.example.org:8766"
CANARY = "canary-Vb7nM2qW9eR4tY6u"

WRITER = f"""
import sys
from pathlib import Path
from pkg import limits
from pkg.daemon_audit import Audit
limits.DAEMON_AUDIT_BYTES, limits.DAEMON_AUDIT_FILES = 4000, 200
for number in range(100):
    Audit(Path(sys.argv[1])).write("{HUB}", f"{{sys.argv[2]}}{{number}}", "recovered")
"""


def payload(**fields: Any) -> dict[str, Any]:
    """A job as a hub sends it, full of things that are nobody's business afterwards."""
    spec = to_json(
        SessionSpec(
            command=(),
            cwd="project",
            policy="ask",
            env={"KEY": CANARY},
            resume_session_id=CANARY,
            options={"model": CANARY},
        )
    )
    return {"agent": "claude", "driver": "acp", "actor": "lb_" + "a" * 64, "spec": spec, "note": CANARY, **fields}


def lines(file: Path) -> list[dict[str, str]]:
    """A file's lines, each one JSON object."""
    return [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]


class TestJobs:
    """One line at the start and one at the end of each."""

    def test_a_job_that_ran(self, tmp_path: Path) -> None:
        """The lines say when, for which hub and person, what ran where under which policy, and how it ended; nothing else."""
        audit = Audit(tmp_path / "state")
        with audit.job(HUB, "j1", payload()) as record:
            record.started("claude", "/home/u/project")
            assert [line["outcome"] for line in lines(audit.file)] == ["started"]
        first, last = lines(audit.file)
        assert first.pop("time") <= last.pop("time")
        expected = {
            "hub": HUB,
            "job": "j1",
            "actor": "lb_" + "a" * 64,
            "agent": "claude",
            "workspace": "/home/u/project",
            "policy": "ask",
            "code": "",
        }
        assert (first, last) == (expected | {"outcome": "started"}, expected | {"outcome": "completed"})
        assert CANARY not in audit.file.read_text()

    @pytest.mark.parametrize(
        ("error", "outcome", "code"),
        [
            (CodingError("coding.agent_exited", detail=CANARY, params={"code": CANARY}), "failed", "coding.agent_exited"),
            (Refused("coding.no_actor"), "failed", "coding.no_actor"),
            (asyncio.CancelledError(), "closed", ""),
            (ProcessCleanupUnconfirmed(CANARY, (1,)), "unproven", ""),
            (ZeroDivisionError(CANARY), "failed", ""),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
    )
    def test_however_it_ends(self, tmp_path: Path, error: BaseException, outcome: str, code: str) -> None:
        """The end is written and the error goes on; what it says besides its code is not written."""
        audit = Audit(tmp_path)
        with pytest.raises(type(error)), audit.job(HUB, "j1", payload()) as record:
            record.started("claude", "/home/u/project")
            raise error
        assert [(line["outcome"], line["code"]) for line in lines(audit.file)] == [("started", ""), (outcome, code)]
        assert CANARY not in audit.file.read_text()

    def test_what_the_policy_refused(self, tmp_path: Path) -> None:
        """One line with what was asked for; no start."""
        audit = Audit(tmp_path)
        with pytest.raises(Refused), audit.job(HUB, "j1", payload(agent="root")):
            raise Refused("coding.policy_agent_unknown", agent="root", known="claude")
        (line,) = lines(audit.file)
        assert (line["outcome"], line["code"]) == ("refused", "coding.policy_agent_unknown")
        assert (line["agent"], line["workspace"]) == ("root", "project")

    @pytest.mark.parametrize(
        "what", [None, 7, [], {}, {"agent": 7, "spec": 9, "actor": {"x": CANARY}}, {"spec": {"cwd": [CANARY]}}]
    )
    def test_what_is_no_job(self, tmp_path: Path, what: Any) -> None:
        """Fields that are no text are left empty."""
        audit = Audit(tmp_path)
        with pytest.raises(CodingError), audit.job(HUB, "j1", what):
            raise CodingError("coding.daemon_payload_invalid")
        (line,) = lines(audit.file)
        assert (line["agent"], line["workspace"], line["actor"], line["outcome"]) == ("", "", "", "failed")
        assert CANARY not in audit.file.read_text()


class TestAnswers:
    """What the hub answered."""

    @pytest.mark.parametrize(
        ("answer", "choice"),
        [
            (Answer("y"), "allow_once"),
            (Answer("n", message=CANARY), "reject_once"),
            (Answer("s"), "allow_session"),
            (Answer(), "cancelled"),
            (Answer("other"), "unknown"),
        ],
    )
    def test_a_choice_is_told_by_its_kind(self, tmp_path: Path, answer: Answer, choice: str) -> None:
        """With the action, cut, and a digest of the whole; a late one says so."""
        kinds: tuple[tuple[str, ChoiceKind], ...] = (("y", "allow_once"), ("n", "reject_once"), ("s", "allow_session"))
        choices = tuple(Choice(name, CANARY, kind) for name, kind in kinds)
        asked = ApprovalRequested("r7", "Run", "execute", choices, command="make " + "x" * 9000, reason=CANARY)
        audit = Audit(tmp_path)
        with audit.job(HUB, "j1", payload()) as record:
            record.answered(asked, answer, in_time=True)
            record.answered(asked, answer, in_time=False)
        first, second, _ = lines(audit.file)
        assert (first["outcome"], second["outcome"]) == ("answered", "too_late")
        assert (first["request"], first["kind"], first["choice"]) == ("r7", "execute", choice)
        assert first["action"].startswith("make xxx") and len(first["action"]) <= limits.DAEMON_AUDIT_CHARS
        assert first["actor"] == "lb_" + "a" * 64 and len(first["digest"]) == 64
        assert CANARY not in audit.file.read_text()

    def test_an_answer_in_words_is_not_written(self, tmp_path: Path) -> None:
        """That there was one is."""
        audit = Audit(tmp_path)
        with audit.job(HUB, "j1", payload()) as record:
            record.answered(QuestionAsked("q", "Which port?"), Answer(values={"a": CANARY}), in_time=True)
            record.answered(QuestionAsked("q", "Which port?"), Answer(), in_time=True)
        told = [(line["kind"], line["action"], line["choice"]) for line in lines(audit.file)[:2]]
        assert told == [("question", "Which port?", "answered"), ("question", "Which port?", "cancelled")]
        assert CANARY not in audit.file.read_text()


class TestFile:
    """The file itself."""

    @pytest.mark.parametrize("name", ['a\n{"outcome": "completed"}', "\x00\x1b[2J\x85\u2028", "\ud800", "名" * 5000, '"', "\\"])
    def test_a_name_of_the_hub_s_making_stays_in_its_line(self, tmp_path: Path, name: str) -> None:
        """Line breaks, control characters, quotes, lone surrogates and endless names change neither lines nor fields."""
        audit = Audit(tmp_path)
        hostile = {"spec": {"cwd": name, "policy": name}}
        with audit.job(HUB, name, payload(agent=name, actor=name, **hostile)):
            pass
        data = audit.file.read_bytes()
        assert data.count(b"\n") == 1 and data.endswith(b"\n")
        assert all(0x20 <= byte < 0x7F for byte in data[:-1])
        (line,) = lines(audit.file)
        assert {line[field] for field in ("job", "agent", "actor", "workspace", "policy")} == {
            name[: limits.DAEMON_AUDIT_CHARS]
        }

    def test_it_is_the_account_s_alone(self, tmp_path: Path) -> None:
        """0600 in a directory of 0700, and made so again where it was not."""
        audit = Audit(tmp_path / "state")
        audit.write(HUB, "j1", "recovered")
        assert audit.file.stat().st_mode & 0o777 == 0o600
        assert audit.file.parent.stat().st_mode & 0o777 == 0o700
        audit.file.chmod(0o644)
        audit.write(HUB, "j2", "recovered")
        assert audit.file.stat().st_mode & 0o777 == 0o600
        assert [line["job"] for line in lines(audit.file)] == ["j1", "j2"]

    def test_a_link_in_its_place_is_not_followed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing of somebody else's is written to; the log says so."""
        target = tmp_path / "target"
        target.write_text("mine")
        (tmp_path / "audit.jsonl").symlink_to(target)
        Audit(tmp_path).write(HUB, "j1", "recovered")
        assert target.read_text() == "mine"
        assert "could not be written" in caplog.text

    def test_it_is_set_aside_when_it_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No file grows beyond the bound, the newest lines stay in order, the oldest file goes."""
        monkeypatch.setattr(limits, "DAEMON_AUDIT_BYTES", 2000)
        audit = Audit(tmp_path)
        for number in range(200):
            audit.write(HUB, f"j{number}", "recovered")
        files = [audit.file, *(tmp_path / f"audit.jsonl.{number}" for number in range(1, limits.DAEMON_AUDIT_FILES + 1))]
        assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock") == sorted(files)
        assert all(0 < file.stat().st_size <= 2000 and file.stat().st_mode & 0o777 == 0o600 for file in files)
        kept = [line["job"] for file in reversed(files) for line in lines(file)]
        assert kept == [f"j{number}" for number in range(200 - len(kept), 200)]
        assert len(kept) > 20

    def test_daemons_that_share_it_lose_no_line(self, tmp_path: Path) -> None:
        """Four processes write at once through many changes of the file: every line is there, once and whole."""
        root = Path(sys.modules["pkg"].__file__ or "").parent.parent
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, name], cwd=root) for name in "abcd"]
        for writer in writers:
            assert writer.wait(60) == 0
        files = list(tmp_path.glob("audit.jsonl*"))
        assert len(files) > 4
        told = [line["job"] for file in files for line in lines(file)]
        assert sorted(told) == sorted(f"{name}{number}" for name in "abcd" for number in range(100))

    def test_what_a_full_disk_cut_off_spoils_no_other_line(self, tmp_path: Path) -> None:
        """The next line begins on a line of its own."""
        audit = Audit(tmp_path)
        audit.write(HUB, "j1", "recovered")
        with audit.file.open("ab") as file:
            file.write(b'{"time": "2026-')
        audit.write(HUB, "j2", "recovered")
        first, broken, last = audit.file.read_text().splitlines()
        assert (json.loads(first)["job"], broken, json.loads(last)["job"]) == ("j1", '{"time": "2026-', "j2")

    def test_a_full_disk_stops_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The job goes on, the daemon's log names the lines that are missing, and afterwards lines are whole again."""
        audit = Audit(tmp_path)
        audit.write(HUB, "j1", "recovered")
        with no_file_grows_beyond(audit.file.stat().st_size + 10), audit.job(HUB, "j7", payload()) as record:
            record.started("claude", "/home/u/project")
        assert caplog.text.count("the audit line of job j7") == 2
        assert CANARY not in caplog.text
        audit.write(HUB, "j8", "recovered")
        first, broken, last = audit.file.read_text().splitlines()
        assert (json.loads(first)["job"], len(broken), json.loads(last)["job"]) == ("j1", 10, "j8")


@contextlib.contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """This process writes no file beyond ``size`` bytes (Python ignores the signal, the write fails)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
