"""The command that freezes a release candidate: what it refuses, what each proof would catch, and what the evidence says.

The command itself runs once, without the test suites (which is said in the evidence and is never complete), on a clone of the
working copy made for this file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import langbot_plugin
import pytest
from langbot_plugin import certification

from evidence import (
    Failed,
    Refused,
    archives,
    candidate,
    envelopes,
    gate,
    hashes,
    members,
    recheck,
    sbom,
    scan,
    sdk_record,
    store,
    suites,
    summary,
)
from testkit import hostile_trees, sdk_worker
from tooling import ROOT, jail, packages

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(300)]

COMMAND = "certification-tests/verify_coding_candidates.py"
SOMEBODY = 65534
"""The number of another account."""
IDENTITY = ("-c", "user.name=suite", "-c", "user.email=suite@localhost", "-c", "commit.gpgsign=false")


def commit_all(directory: Path) -> None:
    """Make a repository of a directory, or add everything new to it."""
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", *IDENTITY, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the working copy's files, all committed, and the development environment beside them."""
    base = tmp_path_factory.mktemp("clone") / "repository"
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, base / name
        if source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    commit_all(base)
    (base / ".git" / "info" / "exclude").write_text(".venv\n.vendor\n")
    (base / ".venv").symlink_to(ROOT / ".venv")
    if os.geteuid() == 0:
        # As in a container: root works on what somebody else has checked out.
        for each in (base, *base.rglob("*")):
            os.lchown(each, SOMEBODY, SOMEBODY)
    return base


def command(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in the clone, to its end."""
    return subprocess.run(
        [sys.executable, str(clone / COMMAND), *arguments],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} | {"LANGBOT_PLUGIN_FILE_STORAGE_DIR": ""},
    )


@pytest.fixture(scope="module")
def frozen(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evidence of the clone, without the suites."""
    target = tmp_path_factory.mktemp("evidence") / "candidate"
    done = command(clone, "--evidence", str(target), "--suites", "none")
    assert done.returncode == 3, done.stderr
    return target


@pytest.fixture(scope="module")
def inventory(frozen: Path) -> dict[str, Any]:
    """What the evidence says of itself."""
    found: dict[str, Any] = json.loads((frozen / "inventory.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package as the SDK's builder makes it from the working copy."""
    return packages.build("CodexAgent", tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """What it was made of."""
    return {name: path.read_bytes() for name, path in packages.sources("CodexAgent").items()}


# ------------------------------------------------------------------ what is refused


class TestRefusals:
    """Nothing is begun, and the reason is one line."""

    @pytest.fixture
    def repository(self, tmp_path: Path) -> Path:
        """A small one of its own."""
        made = tmp_path / "repository"
        made.mkdir()
        (made / "file").write_text("as committed")
        commit_all(made)
        return made

    def test_a_clean_tree_is_a_commit(self, repository: Path) -> None:
        """The other side of the tests below."""
        assert re.fullmatch(r"[0-9a-f]{40}", gate.commit(repository))

    @pytest.mark.parametrize("name", ["file", "new"], ids=["changed", "untracked"])
    def test_a_dirty_tree(self, repository: Path, name: str) -> None:
        """Our rule: bytes that are no commit's are no candidate's; what is meant is named."""
        (repository / name).write_text("not committed")
        with pytest.raises(Refused, match=rf"dirty.*{name}"):
            gate.commit(repository)

    @pytest.mark.parametrize("how", ["unseen", "hidden"])
    def test_what_git_is_told_to_overlook_is_dirty_too(self, repository: Path, how: str) -> None:
        """Our rule: neither a flag in the index nor this machine's own list of ignored files makes a tree clean."""
        if how == "unseen":
            gate.git(repository, "update-index", "--assume-unchanged", "file")
            (repository / "file").write_text("not committed")
        else:
            (repository / ".git" / "info" / "exclude").write_text("conftest.py\n.venv\n")
            (repository / ".venv").symlink_to(repository.parent)
            assert gate.commit(repository)
            (repository / "conftest.py").write_text("not committed")
        assert gate.git(repository, "status", "--porcelain") == b""
        with pytest.raises(Refused, match=rf"dirty.*{how}"):
            gate.commit(repository)

    @pytest.mark.parametrize(
        "how", ["a module", "a compiled module", "a package of compiled modules", "a link", "a repository of its own", "a mode"]
    )
    def test_whatever_could_be_read_and_is_no_commits_is_dirty(self, repository: Path, how: str) -> None:
        """Our rule: only caches may be hidden, by the committed list, and only the two environments by a machine's own."""
        (repository / ".gitignore").write_text("__pycache__/\n*.pyc\n.venv/\ndist/\n*.lbpkg\n")
        (repository / "shared").mkdir()
        (repository / "shared" / "one.py").write_text("")
        commit_all(repository)
        for harmless in ("shared/__pycache__/one.cpython-311.pyc", ".venv/lib/x.pyc", "dist/x.lbpkg", "x.lbpkg"):
            (repository / harmless).parent.mkdir(parents=True, exist_ok=True)
            (repository / harmless).write_text("")
        exclude = repository / ".git" / "info" / "exclude"
        exclude.write_text("/pytest\n/shared/xml\n/shared/linked\n.vendor\n")
        (repository / ".vendor").symlink_to(repository.parent)
        assert gate.commit(repository)
        match how:
            case "a module":
                (repository / "pytest").mkdir()
                (repository / "pytest" / "__main__.py").write_text("")
            case "a compiled module":
                (repository / "pytest.pyc").write_text("")
            case "a package of compiled modules":
                (repository / "other").mkdir()
                (repository / "other" / "__main__.pyc").write_text("")
            case "a link":
                (repository / "shared" / "linked").symlink_to(repository.parent)
            case "a repository of its own":
                (repository / "shared" / "xml").mkdir()
                (repository / "shared" / "xml" / "__init__.py").write_text("")
                commit_all(repository / "shared" / "xml")
            case _:
                gate.git(repository, "config", "core.fileMode", "false")
                (repository / "shared" / "one.py").chmod(0o755)
        assert gate.git(repository, "status", "--porcelain") == b""
        with pytest.raises(Refused, match="dirty"):
            gate.commit(repository)

    def test_a_name_that_paints_is_named_in_plain_letters(self, repository: Path) -> None:
        """Our rule: the reason is one line, whatever a file is called."""
        (repository / "a\nb\x1b[31m").write_text("")
        with pytest.raises(Refused) as refused:
            gate.commit(repository)
        assert str(refused.value).isprintable()

    def test_another_repository_cannot_be_put_in_its_place(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: the tree that is asked about is this one, whatever the environment names, and not one around it."""
        clean = gate.commit(repository)
        built = packages.sources("CodexAgent")
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "no repository"))
        monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
        assert packages.sources("CodexAgent") == built
        assert gate.commit(repository) == clean
        (repository / "below").mkdir()
        with pytest.raises(Refused, match="no git working tree of its own"):
            gate.commit(repository / "below")

    @pytest.mark.parametrize("how", ["filter", "time set back"])
    def test_what_only_looks_like_the_commits_is_dirty_too(self, repository: Path, how: str) -> None:
        """Our rule: bytes decide, not what a machine's own filter makes of them nor when they were written."""
        file = repository / "file"
        if how == "filter":
            gate.git(repository, "config", "filter.own.clean", "sed s/tampered/committed/")
            (repository / ".git" / "info" / "attributes").write_text("file filter=own\n")
            file.write_text("as tampered")
            gate.git(repository, "add", "file")
        else:
            for setting in ("trustctime", "checkStat"):
                gate.git(repository, "config", f"core.{setting}", "false" if setting == "trustctime" else "minimal")
            os.utime(file, (1, 1))
            subprocess.run(["git", "update-index", "-q", "--refresh"], cwd=repository, check=True)
            file.write_text("as tampered!"[: len("as committed")])
            os.utime(file, (1, 1))
        assert gate.git(repository, "status", "--porcelain") == b""
        with pytest.raises(Refused, match=r"dirty.*changed file"):
            gate.commit(repository)

    def test_an_object_that_is_put_in_anothers_place_is_not_taken_for_it(self, repository: Path) -> None:
        """Git's rule: ``git replace`` has it show another commit by the first one's name; ours: the name is the bytes' own."""
        honest = gate.commit(repository)
        (repository / "file").write_text("something else")
        commit_all(repository)
        other = gate.commit(repository)
        subprocess.run(["git", "replace", honest, other], cwd=repository, check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", honest], cwd=repository, check=True)
        assert (repository / "file").read_text() == "something else"
        with pytest.raises(Refused, match=r"dirty.*file"):
            gate.commit(repository)
        assert gate.git(repository, "show", f"{honest}:file") == b"as committed"

    def test_looking_changes_nothing_and_runs_nothing(self, repository: Path, tmp_path: Path) -> None:
        """Our rule: a tree of somebody else's is only read: its index stays theirs, its configured program does not run."""
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexec cat\n")
        program.chmod(0o755)
        gate.git(repository, "config", "core.fsmonitor", str(program))
        gate.git(repository, "config", "filter.own.clean", str(program))
        (repository / ".git" / "info" / "attributes").write_text("file filter=own\n")
        os.utime(repository / "file", (1, 1))
        before = (repository / ".git" / "index").stat()
        gate.commit(repository)
        after = (repository / ".git" / "index").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert not (tmp_path / "ran").exists()

    def test_a_worktree_and_somebody_elses_clone_are_trees_as_well(self, repository: Path, tmp_path: Path) -> None:
        """Our rule: where ``.git`` is a file, and as root another account's clone; evidence goes into no part of either."""
        gate.git(repository, "worktree", "add", "-q", "--detach", str(tmp_path / "worktree"))
        assert gate.commit(tmp_path / "worktree") == gate.commit(repository)
        with pytest.raises(Refused, match="outside"):
            gate.fresh(tmp_path / "worktree", str(repository / ".git" / "evidence"))
        with pytest.raises(Refused, match="outside"):
            gate.fresh(tmp_path / "worktree", str(repository / "evidence"))
        if os.geteuid() == 0:
            for each in (repository, *repository.rglob("*")):
                os.chown(each, SOMEBODY, SOMEBODY)
            assert gate.commit(repository)

    @pytest.mark.parametrize(
        "given", ["relative", "existing", "link", "loop", "long", "inside", "inside by a link", "no parent"]
    )
    def test_a_directory_that_cannot_hold_it(self, repository: Path, tmp_path: Path, given: str) -> None:
        """Our rule: fresh, absolute, outside of the repository, whatever links lead there."""
        (tmp_path / "existing").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        (tmp_path / "way").symlink_to(repository)
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        paths = {
            "relative": "evidence",
            "existing": str(tmp_path / "existing"),
            "link": str(tmp_path / "link"),
            "loop": str(tmp_path / "loop" / "evidence"),
            "long": str(tmp_path / ("x" * 300)),
            "inside": str(repository / "evidence"),
            "inside by a link": str(tmp_path / "way" / "evidence"),
            "no parent": str(tmp_path / "no" / "evidence"),
        }
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(Refused):
            gate.fresh(repository, paths[given])
        assert sorted(tmp_path.rglob("*")) == before

    def test_the_command_says_so_and_leaves_nothing(self, clone: Path, tmp_path: Path) -> None:
        """Our rule: exit code 2, one line, no directory."""
        stray = clone / "stray.py"
        stray.write_text("x = 1\n")
        try:
            done = command(clone, "--evidence", str(tmp_path / "new"))
        finally:
            stray.unlink()
        assert (done.returncode, done.stdout) == (2, "")
        assert "stray.py" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("given", ["", "loop", "no such", "x" * 300])
    def test_no_evidence_to_look_at_is_said_in_a_line(self, clone: Path, tmp_path: Path, given: str) -> None:
        """Our rule: exit code 2, for nothing was looked at."""
        (tmp_path / "loop").symlink_to("loop")
        done = command(clone, "--check", given and str(tmp_path / given))
        assert done.returncode in ((1, 2) if not given else (2,))
        assert len(done.stderr.splitlines()) == 1, done.stderr

    @pytest.mark.parametrize("how", ["a module on the path", "compiled code in the tree"])
    def test_nobodys_code_is_run_in_the_tools_place(self, clone: Path, tmp_path: Path, how: str) -> None:
        """Our rule: neither an environment variable nor what was compiled before says what a clean tree is."""
        theirs = tmp_path / "theirs"
        shutil.copytree(clone, theirs, symlinks=True)
        stray = theirs / "README.md"
        stray.write_text("changed")
        environment = dict(os.environ)
        if how == "a module on the path":
            (tmp_path / "sitecustomize.py").write_text("import os\nprint('all is well', flush=True)\nos._exit(0)\n")
            environment["PYTHONPATH"] = str(tmp_path)
        else:
            source = (theirs / "shared" / "evidence" / "gate.py").read_text(encoding="utf-8")
            other = tmp_path / "gate.py"
            other.write_text(source.replace("    if dirty:", "    if False:"), encoding="utf-8")
            cache = importlib.util.cache_from_source(str(theirs / "shared" / "evidence" / "gate.py"))
            py_compile.compile(str(other), cache, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        # The first line of the command is Python's own start, which nobody can take from a caller.
        program = [sys.executable, "-I", str(theirs / COMMAND), "--evidence", str(tmp_path / "new"), "--suites", "none"]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "README.md" in done.stderr

    @pytest.mark.parametrize(
        "numbers", [(signal.SIGHUP,), (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)], ids=["lost", "impatient"]
    )
    def test_whoever_ends_it_finds_nothing_of_it(
        self, clone: Path, tmp_path: Path, numbers: tuple[signal.Signals, ...]
    ) -> None:
        """Our rule: no process and no directory of its work is left, also when it is told again before it has ended."""
        (tmp_path / "scratch").mkdir()
        program = subprocess.Popen(
            [sys.executable, str(clone / COMMAND), "--evidence", str(tmp_path / "new"), "--suites", "none"],
            env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert program.stderr is not None
        for line in program.stderr:
            if "rebuilt twice" in line:
                break
        began = sdk_worker.descendants(program.pid)
        for number in numbers:
            program.send_signal(number)
        assert program.wait(60) in {128 + number for number in numbers}
        program.stderr.close()
        assert hostile_trees.gone(began, 30)
        assert not list((tmp_path / "scratch").iterdir())
        assert not (tmp_path / "new" / hashes.NAME).exists()

    def test_a_proof_that_does_not_hold_leaves_nothing_that_could_pass(self, clone: Path, tmp_path: Path) -> None:
        """Our rule: exit code 1, the step and the file by name on the last line, and no list of hashes, so no check holds."""
        wrong = tmp_path / "wrong"
        shutil.copytree(clone, wrong, symlinks=True)
        (wrong / ".gitattributes").write_text("CodexAgent/main.py export-ignore\nACPAgentRunner/main.py export-ignore\n")
        commit_all(wrong)
        target = tmp_path / "new"
        done = command(wrong, "--evidence", str(target), "--suites", "none")
        assert (done.returncode, done.stdout) == (1, "")
        assert "ACPAgentRunner: git archive changes main.py" in done.stderr.splitlines()[-1]
        assert not (target / hashes.NAME).exists()
        again = command(wrong, "--check", str(target))
        assert (again.returncode, again.stdout) == (1, "")
        assert "incomplete" in again.stderr


# ------------------------------------------------------------------ what each proof would catch


class TestTheSdk:
    """Every file against its RECORD."""

    @pytest.fixture
    def installed(self, tmp_path: Path) -> Path:
        """A small distribution, installed as pip does."""
        files = {
            "small/__init__.py": b"x = 1\n",
            "small-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: small\nVersion: 1.0\n",
        }
        rows = []
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
        rows.append("small-1.0.dist-info/RECORD,,")
        (tmp_path / "small-1.0.dist-info" / "RECORD").write_text("\n".join(rows) + "\n")
        return tmp_path

    def test_what_is_as_published_holds(self, installed: Path) -> None:
        """Ours is, too."""
        assert sdk_record.verify("small", path=[str(installed)]).files == 2
        assert sdk_record.verify().version.startswith("0.7.")

    @pytest.mark.parametrize("how", ["changed", "missing", "in no RECORD", "compiled from another source", "no hash"])
    def test_one_wrong_file_is_named(self, installed: Path, how: str) -> None:
        """Our rule: an SDK that somebody has touched proves nothing about the published one."""
        file = installed / "small" / "__init__.py"
        if how == "changed":
            file.write_bytes(b"x = 2\n")
        elif how == "missing":
            file.unlink()
        elif how == "compiled from another source":
            compiled = importlib.util.cache_from_source(str(file))
            py_compile.compile(str(file), compiled, doraise=True)
            assert sdk_record.verify("small", path=[str(installed)]).compiled == 1
            other = installed.parent / "other.py"
            other.write_text("x = 3\n")
            py_compile.compile(str(other), compiled, doraise=True)
        elif how == "no hash":
            record = installed / "small-1.0.dist-info" / "RECORD"
            first, *others = record.read_text().splitlines()
            record.write_text("\n".join((first.split(",")[0] + ",,", *others)))
        else:
            (installed / "small" / "more.py").write_text("")
        with pytest.raises(Failed, match=how):
            sdk_record.verify("small", path=[str(installed)])


class TestPackages:
    """Members, bytes and signatures."""

    def test_the_builders_package_holds_the_commits_files(self, built: Path, files: dict[str, bytes]) -> None:
        """The builder rewrites the manifest and nothing else; both hashes of it are recorded."""
        listed = members.compare(built, files)
        assert [name for name, entry in listed.items() if entry.get("rewritten_by_the_builder")] == ["manifest.yaml"]

    @pytest.mark.parametrize("how", ["changed", "missing", "not the commit's", "says something else"])
    def test_one_wrong_member_is_named(self, built: Path, files: dict[str, bytes], how: str) -> None:
        """Our rule: nothing gets into a package that is not in the commit, and nothing is lost."""
        wanted = dict(files)
        if how == "changed":
            wanted["main.py"] += b"#"
        elif how == "missing":
            wanted["one more.py"] = b""
        elif how == "not the commit's":
            del wanted["main.py"]
        else:
            wanted["manifest.yaml"] = wanted["manifest.yaml"].replace(b"shared-runtime-v1", b"dedicated")
        with pytest.raises(Failed, match=how):
            members.compare(built, wanted)

    @pytest.mark.parametrize("how", ["export-subst", "export-ignore", "another core"])
    def test_what_the_builder_gets_is_the_commits(self, tmp_path: Path, how: str) -> None:
        """Our rule: attributes that make git export something else are found, and a shared core that is not shared."""
        for name in ("ACPAgentRunner", "CodexAgent"):
            (tmp_path / name / "pkg").mkdir(parents=True)
            (tmp_path / name / "pkg" / "one.py").write_text("1")
            (tmp_path / name / "main.py").write_text("$Format:%H$")
        commit_all(tmp_path)
        assert set(members.export(tmp_path, gate.commit(tmp_path), "CodexAgent")) == {"pkg/one.py", "main.py"}
        if how == "another core":
            (tmp_path / "CodexAgent" / "pkg" / "one.py").write_text("2")
        else:
            (tmp_path / ".gitattributes").write_text(f"CodexAgent/main.py {how}\n")
        commit_all(tmp_path)
        with pytest.raises(Failed, match=r"main\.py" if how.startswith("export") else r"pkg/one\.py"):
            members.export(tmp_path, gate.commit(tmp_path), "CodexAgent")

    def test_the_same_sources_make_the_same_bytes(self, built: Path, tmp_path: Path) -> None:
        """Our rule: fixed times and order, the builder's members; the builder itself writes both times and order of the day."""
        first = packages.build("CodexAgent", tmp_path / "first", reproducible=True)
        second = packages.build("CodexAgent", tmp_path / "second", reproducible=True)
        assert first.read_bytes() == second.read_bytes()
        assert archives.read(first) == archives.read(built)
        with zipfile.ZipFile(first) as archive:
            names = archive.namelist()
            assert {each.date_time for each in archive.infolist()} == {packages.FIRST_TIME}
        assert names == sorted(names)

    def test_every_kind_of_envelope_is_told_apart(self, built: Path) -> None:
        """The SDK's rule: eight statuses; ours: the archive is in the second."""
        data = built.read_bytes()
        envelopes.unsigned(data)
        assert set(envelopes.trial(data).statuses) == set(recheck.STATUSES)

    def test_the_lines_of_the_page_sign_a_copy(self, built: Path, tmp_path: Path) -> None:
        """Our rule: what an operator copies from the page works as it stands."""
        page = (ROOT / "certification-tests" / "CODING-CANDIDATES.md").read_text(encoding="utf-8")
        (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        shutil.copyfile(built, tmp_path / "candidate.lbpkg")
        (tmp_path / "signing.key").write_bytes(os.urandom(32))
        done = subprocess.run(
            [sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
        )
        assert (done.returncode, done.stdout) == (0, "valid\n"), done.stderr
        assert certification.verify_archive((tmp_path / "signed.lbpkg").read_bytes(), lambda _: None).status == "unknown_key"

    def test_a_signed_archive_is_no_candidate(self, built: Path) -> None:
        """The other side: an archive with an envelope, or any other comment, is refused."""
        data = built.read_bytes()
        envelope = certification.create_envelope(data, "somebody", lambda _: b"signature")
        for wrong in (certification.write_envelope(data, envelope), envelopes.commented(data, b"note")):
            with pytest.raises(Failed, match="not unsigned"):
                envelopes.unsigned(wrong)

    def test_one_changed_byte_in_a_store_is_found_and_put_back(self, tmp_path: Path) -> None:
        """The SDK's rule: it trusts its marker; ours: every file is hashed, whatever its time and size say."""
        (tmp_path / "one.py").write_text("x = 1\n")
        (tmp_path / "two.py").write_text("")
        before = store.tree(tmp_path)
        with store.flipped(tmp_path) as changed:
            assert store.differing(store.tree(tmp_path), before) == [changed] == ["one.py"]
        assert store.tree(tmp_path) == before

    def test_an_sdk_inside_a_package_would_be_a_workers(self, tmp_path: Path) -> None:
        """The SDK's rule: a worker starts in the package's directory, which Python looks at first."""
        ours = Path(langbot_plugin.__file__ or "").resolve().parent
        assert store.sdk_of_a_worker(tmp_path, [ours.parent]) == ours / "__init__.py"
        (tmp_path / "langbot_plugin").mkdir()
        (tmp_path / "langbot_plugin" / "__init__.py").write_text("")
        assert store.sdk_of_a_worker(tmp_path, [ours.parent]).is_relative_to(tmp_path)

    def test_a_second_sdk_in_an_environment_is_seen(self, tmp_path: Path) -> None:
        """Our rule: the runtime's SDK is the only one; a package must not bring its own."""
        (tmp_path / "langbot_plugin").mkdir()
        (tmp_path / "langbot_plugin-9.9.dist-info").mkdir()
        (tmp_path / "aiohttp").mkdir()
        assert store.shadows(tmp_path) == ["langbot_plugin", "langbot_plugin-9.9.dist-info"]


class TestTheEvidenceItself:
    """Hashes over everything, and nothing of the builder in it."""

    @pytest.fixture
    def small(self, tmp_path: Path) -> Path:
        """Some files with their list."""
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "one").write_bytes(b"1")
        (tmp_path / "two").write_bytes(b"2")
        hashes.write(tmp_path)
        return tmp_path

    def test_what_is_unchanged_holds(self, small: Path) -> None:
        """The other side of the test below."""
        assert hashes.check(small) == 2

    @pytest.mark.parametrize(
        "how", ["is changed", "is missing", "was added", "is a link", "neither", "empty", "cannot be read", "incomplete"]
    )
    def test_one_changed_byte_is_found(self, small: Path, how: str) -> None:
        """Our rule: of any file, of the list, and what was taken away or added."""
        match how:
            case "is changed":
                (small / "a" / "one").write_bytes(b"x")
            case "is missing":
                (small / "two").unlink()
            case "was added":
                (small / "three").write_bytes(b"")
            case "is a link":
                (small / "three").symlink_to("two")
            case "neither":
                os.mkfifo(small / "three")
            case "empty":
                (small / "three").mkdir()
            case "cannot be read":
                (small / hashes.NAME).write_text("nonsense\n")
            case _:
                (small / hashes.NAME).unlink()
        with pytest.raises(Failed, match=how):
            hashes.check(small)

    def test_every_byte_of_the_list_counts(self, small: Path) -> None:
        """Our rule: also line ends, which readers of text take for one another."""
        file = small / hashes.NAME
        before = file.read_bytes()
        for place in range(len(before)):
            for bit in range(8):
                file.write_bytes(before[:place] + bytes([before[place] ^ (1 << bit)]) + before[place + 1 :])
                with pytest.raises(Failed):
                    hashes.check(small)
        for more in (b"\n", b"\0", b"#"):
            file.write_bytes(before + more)
            with pytest.raises(Failed):
                hashes.check(small)

    @pytest.mark.parametrize(
        "what",
        [
            "the repository",
            "the temporary directory",
            "the home directory",
            "the secret PLANTED_TOKEN",
            "a key",
            "a signature",
            "a trace",
        ],
    )
    def test_what_must_not_be_in_it_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        """Our rule: whoever gets the evidence learns nothing of the machine, and can sign nothing with it."""
        (tmp_path / "fine").write_text("nothing")
        monkeypatch.setenv("PLANTED_TOKEN", "canary-of-the-environment")
        private = scan.private_texts(ROOT)
        traces = (b"bytes of a key",)
        scan.scan(tmp_path, private, tmp_path / "extracted", traces)
        if what.startswith(scan.SECRET):
            # Wherever it is: a package is no place for it either.
            (tmp_path / "extracted").mkdir()
            (tmp_path / "extracted" / "main.py").write_text(f"x = {private[what]!r}")
        elif what == "a trace":
            (tmp_path / "x.lbpkg").write_bytes(b"..." + traces[0])
        elif what in private:
            (tmp_path / "log").write_text(f"made in {private[what].rstrip('/')}/x")
        elif what == "a key":
            body = "A" * 64
            (tmp_path / "log").write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}\n")
        else:
            built = packages.build("CodexAgent", tmp_path / "made")
            data = built.read_bytes()
            envelope = certification.create_envelope(data, "somebody", lambda _: b"signature")
            built.write_bytes(certification.write_envelope(data, envelope))
        with pytest.raises(Failed, match=r"names|private key|signed|throwaway") as failure:
            scan.scan(tmp_path, private, tmp_path / "extracted", traces)
        assert "canary" not in str(failure.value)

    def test_a_programs_words_lose_what_is_private(self) -> None:
        """Our rule: outputs are kept, places are not."""
        private = {"the repository": str(ROOT), "the temporary directory": "/tmp/", "the machine": "codex"}
        said = f"in {ROOT}/pkg, /tmp/x, <runtime>/tmp/x and /data/tmp/x on codex, not of codexes"
        kept = "in <repository>/pkg, <temporary directory>/x, <runtime>/tmp/x and /data/tmp/x on <machine>, not of codexes"
        assert scan.public(said, private) == kept
        assert "the machine" not in scan.private_texts(ROOT) or not scan._is_a_word(
            ROOT, scan.private_texts(ROOT)["the machine"]
        )


class TestSuites:
    """Test runs as the evidence has them."""

    def test_outcomes_are_recorded_by_test_with_reasons(self, tmp_path: Path) -> None:
        """Our rule: a skip is named with its reason, a failure makes the run fail."""
        lines = ("import pytest", "def test_a(): pass", "@pytest.mark.skip(reason='not here')", "def test_b(): pass")
        (tmp_path / "test_three.py").write_text("\n".join((*lines, "def test_c(): assert 0", "")))
        ran = suites.tests(["-c", os.devnull, str(tmp_path / "test_three.py")], tmp_path, tmp_path, {}, {})
        assert ran["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
        assert ran["exit_code"] == 1
        assert ran["skipped"][0]["reason"] == "not here"
        made = candidate.Candidate(tmp_path, "0" * 40, suites="all", private={})
        with pytest.raises(Failed, match="test_c"):
            made._green(["-c", os.devnull, str(tmp_path / "test_three.py")], tmp_path, {})

    def test_nobodys_shell_decides_what_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our rule: filters, plugins and source roots of the caller's environment reach no run; what is asked for does."""
        monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
        monkeypatch.setenv("CODING_RUNNER_SOURCE_ROOT", "elsewhere")
        monkeypatch.setenv("PYTHONPATH", "elsewhere")
        lines = ("import os", "def test_a():", "    assert os.environ['CODING_RUNNER_SOURCE_ROOT'] == 'here'")
        (tmp_path / "test_one.py").write_text("\n".join((*lines, "    assert 'PYTHONPATH' not in os.environ", "")))
        more = {"CODING_RUNNER_SOURCE_ROOT": "here"}
        ran = suites.tests(["-c", os.devnull, str(tmp_path / "test_one.py")], tmp_path, tmp_path, {}, more)
        assert (ran["exit_code"], ran["counts"]["passed"]) == (0, 1), ran["last_lines"]

    @pytest.mark.parametrize("said", ["everything", "one cell less", "one cell twice", "one bad cell", "no cells"])
    def test_a_probe_is_believed_when_it_tells_of_every_cell(self, tmp_path: Path, said: str) -> None:
        """Our rule: a probe that says that all is well has to have tried every transport with every shape."""
        cells: list[dict[str, Any]] = [{"transport": how, "shape": shape, "ok": True} for how, shape in recheck.CELLS]
        match said:
            case "one cell less":
                cells.pop()
            case "one cell twice":
                cells.append(cells[0])
            case "one bad cell":
                cells[0]["ok"] = False
        report = {"ok": True} if said == "no cells" else {"ok": True, "cells": cells}
        program = tmp_path / "program.py"
        program.write_text(f"print({json.dumps(json.dumps(report))})\n")
        if said == "everything":
            found = suites.probes(program, {"one": tmp_path, "two": tmp_path}, tmp_path, {})
            assert [each["cells"] for each in found.values()] == [cells, cells]
        else:
            with pytest.raises(Failed, match="every transport and shape"):
                suites.probes(program, {"one": tmp_path}, tmp_path, {})

    def test_a_suite_of_which_nothing_passed_is_a_gap(self) -> None:
        """Our rule: a file whose tests were all skipped has shown nothing, whatever the other files have."""
        first, *others = sorted(recheck.ESTABLISHED)
        more = "certification-tests/codex/test_coding_a.py"
        dotted = [each.removesuffix(".py").replace("/", ".") for each in others]
        ran: dict[str, Any] = {"suites": [more], "skipped": [], "passed": [f"{each}.TestX::test_y[1.2::3]" for each in dotted]}
        jails: dict[str, Any] = {"ran": True, "passed": ["one"], "skipped": []}
        assert recheck.problems({"suites": ran, "jails": jails}) == [
            f"no test of {each} passed on the extraction" for each in sorted((first, more))
        ]
        ran["passed"] += [
            f"{first.removesuffix('.py').replace('/', '.')}::test_y",
            "certification-tests.codex.test_coding_a::test_z",
        ]
        ran["skipped"] = jails["skipped"] = [{"test": "one", "reason": "not here"}]
        assert recheck.problems({"suites": ran, "jails": jails}) == [
            "skipped on the extraction: one",
            "skipped of the jailed workers: one",
        ]
        ran["skipped"] = jails["skipped"] = []
        assert recheck.problems({"suites": ran, "jails": jails}) == []
        assert recheck.problems({"suites": ran, "jails": {"ran": True, "passed": []}}) == ["no test of a jailed worker passed"]

    def test_every_suite_of_the_sources_is_established(self) -> None:
        """Our rule: evidence itself does not say which suites make it complete."""
        assert set(suites.chosen(ROOT)) == recheck.ESTABLISHED

    def test_half_an_account_of_jailed_workers_is_none(self) -> None:
        """Our rule: both shapes, each with its arguments, mounts, names, limits, accounts, process and network."""
        whole = {shape: dict.fromkeys(recheck.FACTS, 1) for shape in recheck.JAILED}
        assert recheck.jailed({"shapes": whole})
        assert not recheck.jailed({"shapes": {"jail": whole["jail"]}})
        for fact in recheck.FACTS:
            less = {**whole, "jail": dict.fromkeys(recheck.FACTS - {fact}, 1)}
            assert not recheck.jailed({"shapes": less})

    def test_whatever_stops_a_step_is_a_failure_with_its_name(self, tmp_path: Path) -> None:
        """Our rule: exit code 1 and what was being done, not a trace of calls; and nothing is recorded as holding."""
        made = candidate.Candidate(tmp_path, "0" * 40, suites="all", private={})

        def broken() -> None:
            raise OSError("no space left")

        with pytest.raises(Failed, match=r"the step: OSError: no space left"):
            made.step("the step", broken)
        assert made.inventory["steps"] == []

    @pytest.mark.parametrize("what", ["a package is missing", "a place is named"])
    def test_what_does_not_hold_gets_no_list_of_hashes(self, tmp_path: Path, what: str) -> None:
        """Our rule: evidence that failed is no evidence, even when the last look at it is what fails."""
        made = candidate.Candidate(tmp_path, "0" * 40, suites="none", private=scan.private_texts(ROOT))
        made.inventory["sdk"] = {"version": "0.7.18"}
        if what == "a place is named":
            made.inventory["note"] = str(ROOT / "x")
        with pytest.raises(Failed, match=r"is not about|names the repository"):
            made.freeze()
        assert (tmp_path / "inventory.json").is_file()
        with pytest.raises(Failed, match="incomplete"):
            hashes.check(tmp_path)

    def test_an_interrupt_ends_what_was_started(self, tmp_path: Path) -> None:
        """Our rule: nothing runs on when the command is told to end, however much it had started."""
        started = [tmp_path / "one", tmp_path / "two"]
        sleep = "import pathlib, time; pathlib.Path({!r}).touch(); time.sleep(600)"
        commands = [[sys.executable, "-c", sleep.format(str(each))] for each in started]
        program = (
            "import signal, sys\n"
            "from evidence import suites\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
            f"suites.run_all({commands!r}, {str(tmp_path)!r}, {{}}, 600.0)\n"
        )
        path = os.pathsep.join(str(ROOT / each) for each in ("shared", "scripts"))
        outer = subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE
        )
        while not all(each.exists() for each in started):
            assert outer.poll() is None
            time.sleep(0.02)
        inner = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        began = {pid: hostile_trees.start_time(pid) for pid in inner}
        assert len(began) == len(commands)
        outer.terminate()
        assert outer.wait(60) == 143
        assert outer.stderr is not None
        outer.stderr.close()
        assert all(hostile_trees.start_time(pid) != time_of for pid, time_of in began.items())

    def test_what_never_ends_is_a_failure_and_runs_no_more(self, tmp_path: Path) -> None:
        """Our rule: every program of the evidence has a bound; the others started with it end, too."""
        commands = [[sys.executable, "-c", f"import time; time.sleep({seconds})"] for seconds in (600, 601)]
        with pytest.raises(Failed, match=r"did not end within 0\.2 s"):
            suites.run_all(commands, tmp_path, {}, 0.2)
        living = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        assert not [each for each in living if b"time.sleep(60" in Path(f"/proc/{each}/cmdline").read_bytes()]

    def test_a_git_that_never_answers_is_a_refusal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our rule: the tree is not waited for without end."""
        program = tmp_path / "git"
        program.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(gate, "ANSWERED_WITHIN", 0.2)
        with pytest.raises(Refused, match=r"no answer within 0\.2 s"):
            gate.commit(tmp_path)

    def test_every_established_suite_is_chosen(self) -> None:
        """Our rule: whatever is called ``test_coding_*`` runs on the extraction."""
        found = {Path(each).name for each in suites.chosen(ROOT)}
        assert {"test_coding_relay_v1.py", "test_coding_native_lifecycle.py", "test_coding_approvals.py"} <= found


# ------------------------------------------------------------------ the command, once


class TestFrozen:
    """What one run of the command leaves."""

    def test_it_is_complete_but_for_the_suites_and_says_so(self, frozen: Path, inventory: dict[str, Any]) -> None:
        """Our rule: without the suites the exit code is 3, and the evidence calls itself incomplete: it passes for nothing."""
        assert inventory["complete"] is False
        summary = (frozen / "SUMMARY.md").read_text(encoding="utf-8")
        assert "Incomplete" in summary
        assert len(inventory["gaps"]) == 2
        assert all(gap in summary for gap in inventory["gaps"])

    @pytest.mark.parametrize("account", ["whole", "half", "none"])
    def test_with_the_suites_and_the_jails_it_is_complete(
        self, clone: Path, frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: str
    ) -> None:
        """Our rule: the suites run on the extraction, jailed workers tell what they are, and then alone the exit code is 0.

        The suites are stand-ins of a line each here; the real ones run with the command itself.
        """
        copy, root, scratch = tmp_path / "copy", tmp_path / "root", tmp_path / "scratch"
        shutil.copytree(frozen, copy)
        (copy / hashes.NAME).unlink()
        scratch.mkdir()
        told = {"whole": dict.fromkeys(recheck.JAILED, dict.fromkeys(recheck.FACTS, "1")), "half": {"jail": {}}}.get(account)
        lines = {
            **dict.fromkeys(
                recheck.ESTABLISHED, "assert os.environ['CODING_RUNNER_SOURCE_ROOT'] == " + repr(str(copy / "extracted"))
            ),
            "certification-tests/test_jails.py": "assert os.environ['REQUIRE_NSJAIL'] == '1'"
            + (f"; open(os.environ['CODING_TOPOLOGY_FILE'], 'w').write({json.dumps({'shapes': told})!r})" if told else ""),
        }
        for name, line in lines.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            mark = "@pytest.mark.nsjail\n" if "jails" in name else ""
            (root / name).write_text(f"import os, pytest\n{mark}def test_it():\n    {line}\n", encoding="utf-8")
        (root / "pytest.ini").write_text("[pytest]\nmarkers = nsjail: jailed\n")
        commit_all(root)
        monkeypatch.setattr(candidate, "ROOT", root)
        monkeypatch.setattr(jail, "impossible", lambda: "")
        monkeypatch.setattr(jail, "site_packages", lambda: Path(langbot_plugin.__file__).parent.parent)
        said = json.loads((copy / "inventory.json").read_text(encoding="utf-8"))
        made = candidate.Candidate(copy, said["commit"], suites="all", private={"the place": str(tmp_path)})
        made.inventory |= {**said, "steps": said["steps"][:-1]}
        if account != "whole":
            with pytest.raises(Failed, match="no account" if account == "none" else "lacks one"):
                made.run_suites(scratch)
            return
        made.run_suites(scratch)
        made.step(recheck.TREE_STEP, lambda: None)
        made.freeze()
        assert made.inventory["complete"] is True
        done = command(clone, "--check", str(copy))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["complete"] is True

    def test_jails_that_did_not_run_are_a_gap_in_the_account_of_them(self, frozen: Path, inventory: dict[str, Any]) -> None:
        """Our rule: what jailed workers are is told from a run of theirs, or said not to be known."""
        topology = json.loads((frozen / "topology-reassessment.json").read_text(encoding="utf-8"))
        assert (topology["shapes"], topology["reason"]) == ({}, inventory["jails"]["reason"])
        assert topology["reason"] in (frozen / "topology-reassessment.md").read_text(encoding="utf-8")

    def test_it_is_about_the_commit(self, clone: Path, inventory: dict[str, Any]) -> None:
        """Our rule: one commit, and nothing that is not in it."""
        assert inventory["commit"] == gate.commit(clone)

    def test_nobody_has_signed_reviewed_or_accepted_it(self, inventory: dict[str, Any]) -> None:
        """Our rule: every gate that takes a person is open, and so is the network."""
        assert inventory["gates"] == dict.fromkeys(recheck.GATES, "open")
        assert inventory["signed"] is False
        assert inventory["egress_policy"] == "not provided"

    def test_it_claims_neither_vendors_nor_production(self, inventory: dict[str, Any]) -> None:
        """Our rule: agents are labelled fixtures; what is not claimed is listed."""
        assert inventory["fixtures"].startswith("local protocol fixtures")
        assert len(inventory["not_claimed"]) == 4
        assert all("local protocol fixture" in each["rpc"]["agent"] for each in inventory["packages"].values())

    def test_every_package_was_built_installed_and_spoken_to(self, frozen: Path, inventory: dict[str, Any]) -> None:
        """Our rule: all three, in every transport and shape, with the versions of what they were installed with."""
        assert set(inventory["packages"]) == set(packages.NAMES)
        for name, each in inventory["packages"].items():
            assert hashlib.sha256((frozen / each["file"]).read_bytes()).hexdigest() == each["sha256"]
            assert each["envelopes"]["statuses"] == {status: status for status in recheck.STATUSES}
            assert each["installed"]["second_sdk"] == "none"
            assert each["installed"]["flipped_byte"]["found_by"] == "a hash of every file"
            assert each["members"]["manifest.yaml"]["source_sha256"]
            assert each["runner"]["id"] == f"plugin:langbot-team/{name}/default"
            cells = {(cell["transport"], cell["shape"]): cell["ok"] for cell in each["rpc"]["cells"]}
            assert cells == {(how, shape): True for how in ("stdio", "websocket") for shape in ("dedicated", "pool")}

    def test_every_environment_has_its_bill_of_materials(self, frozen: Path, inventory: dict[str, Any]) -> None:
        """CycloneDX 1.5: what was installed, each with a package address, and the SDK as what the runtime brings."""
        for each in inventory["packages"].values():
            bill = json.loads((frozen / each["sbom"]).read_text(encoding="utf-8"))
            assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
            named = {part["name"]: part for part in bill["components"]}
            assert len(named) == len(bill["components"])
            assert set(each["installed"]["dependencies"]) | {recheck.SDK} == set(named)
            assert all(part["type"] == "library" and part["purl"] == part["bom-ref"] for part in named.values())
            assert named[recheck.SDK]["scope"] == "excluded"
            # The schema's own demands: known members, unique references, addresses of packages, licences as expressions.
            assert bill.keys() == {"bomFormat", "specVersion", "version", "metadata", "components"}
            application = bill["metadata"]["component"]
            assert (application["type"], application["version"]) == ("application", each["version"])
            assert application["bom-ref"] not in {part["bom-ref"] for part in named.values()}
            for part in named.values():
                assert part.keys() <= {"type", "bom-ref", "name", "version", "purl", "licenses", "scope", "description"}
                assert re.fullmatch(r"pkg:pypi/[a-z0-9]+(-[a-z0-9]+)*@[^@/\s]+", part["purl"]), part["purl"]
                assert part.get("scope", "required") in ("required", "optional", "excluded")
                assert all(licence.keys() == {"expression"} for licence in part.get("licenses", []))
                assert len(part.get("licenses", [])) <= 1

    def test_it_is_found_again_offline(self, clone: Path, frozen: Path, tmp_path: Path) -> None:
        """Our rule: the check needs neither network nor SDK nor any environment, on a clone that has never prepared one."""
        bare = tmp_path / "bare"
        shutil.copytree(clone, bare, ignore=shutil.ignore_patterns(".git", ".venv"))
        alone = [sys.executable, "-I", "-S", str(bare / COMMAND), "--check", str(frozen)]
        done = subprocess.run(alone, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 3, done.stderr
        assert not (bare / ".venv").exists()
        found = json.loads(done.stdout)
        assert found["files"] > 300
        assert found["SHA256SUMS_sha256"] == hashlib.sha256((frozen / hashes.NAME).read_bytes()).hexdigest()

    @pytest.mark.parametrize("which", ["a member of a package", "an extracted file", "the inventory", "the page", "the list"])
    def test_one_flipped_byte_is_found(self, clone: Path, frozen: Path, tmp_path: Path, which: str) -> None:
        """Our rule: exit code 1 and the file, whatever it is."""
        copy = tmp_path / "copy"
        shutil.copytree(frozen, copy)
        files: dict[str, Callable[[], Path]] = {
            "a member of a package": lambda: next((copy / "packages").glob("*.lbpkg")),
            "an extracted file": lambda: copy / "extracted" / "CodexAgent" / "main.py",
            "the inventory": lambda: copy / "inventory.json",
            "the page": lambda: copy / "SUMMARY.md",
            "the list": lambda: copy / hashes.NAME,
        }
        file = files[which]()
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        done = command(clone, "--check", str(copy))
        assert done.returncode == 1
        assert file.name in done.stderr or which == "the list"

    @pytest.mark.parametrize(
        ("how", "reason"),
        [
            ("complete", "claims to be complete"),
            ("signed", "claims a signature"),
            ("egress", "claims a signature or a network policy"),
            ("fewer packages", "is not about"),
            ("other dependencies", "lists other packages"),
            ("other digest", "not what was installed"),
            ("a page of its own", "SUMMARY.md says something else"),
            ("jails", "topology-reassessment"),
            ("one file more", "in no inventory"),
            ("a comment", "is signed"),
            ("a status less", "every status"),
            ("a shape less", "every way to speak"),
            ("jailed by word only", "does not have every proof"),
            ("jailed without an account", "differ about jailed workers"),
            ("nonsense", "does not say what it must"),
            ("a gate closed", "closes a gate"),
            ("a claim less open", "closes a gate, or claims"),
            ("a proof less", "does not have every proof"),
            ("a proof that failed", "does not have every proof"),
            ("no SDK", "what the packages were tried with"),
            ("another SDK", "something else was spoken to"),
            ("a second SDK", "installed as it must be"),
            ("another runner", "something else was spoken to"),
            ("another version", "something else was spoken to"),
            ("an excluded library", "lists other packages"),
            ("another name in the bill", "lists other packages"),
            ("a rebuild of its own", "not what its members make"),
            ("bytes in front", "stands before its members"),
            ("a key twice", "not written as facts are"),
            ("too deep", "does not say what it must: RecursionError"),
        ],
    )
    def test_hashes_made_anew_do_not_hide_another_story(self, frozen: Path, tmp_path: Path, how: str, reason: str) -> None:
        """Our rule: whoever changes what the evidence says and hashes it again has to change all of it alike."""
        copy = tmp_path / "copy"
        shutil.copytree(frozen, copy)
        file = copy / "inventory.json"
        said = json.loads(file.read_text(encoding="utf-8"))
        entry = said["packages"]["CodexAgent"]
        match how:
            case "complete":
                said["complete"] = True
            case "signed":
                said["signed"] = True
            case "egress":
                said["egress_policy"] = "provided"
            case "fewer packages":
                del said["packages"]["CodexAgent"]
            case "other dependencies":
                entry["installed"]["dependencies"]["another"] = "1"
            case "other digest":
                entry["installed"]["artifact_digest"] = "0" * 64
            case "a page of its own":
                (copy / "SUMMARY.md").write_text("All is well.\n")
            case "jails":
                (copy / "topology-reassessment.md").write_text("All is well.\n")
            case "one file more":
                (copy / "packages" / "more.lbpkg").write_bytes(b"")
            case "a comment":
                package = copy / entry["reproducible"]["file"]
                package.write_bytes(envelopes.commented(package.read_bytes(), b"x"))
                entry["reproducible"]["sha256"] = hashlib.sha256(package.read_bytes()).hexdigest()
            case "a status less":
                del entry["envelopes"]["statuses"]["unknown_key"]
            case "a shape less":
                entry["rpc"]["cells"].pop()
            case "jailed by word only":
                said["jails"] = {"ran": True, "exit_code": 0, "passed": [], "failed": [], "skipped": []}
                said["jails"]["counts"] = {"passed": 0, "failed": 0, "skipped": 0}
                said["gaps"] = recheck.problems(said)
                (copy / "SUMMARY.md").write_text(summary.human(said), encoding="utf-8")
            case "jailed without an account":
                said["jails"] = {"ran": True, "exit_code": 0, "passed": ["one"], "failed": [], "skipped": []}
                said["jails"]["counts"] = {"passed": 1, "failed": 0, "skipped": 0}
                said["steps"][-1:-1] = [{"step": each, "result": "holds"} for each in recheck.JAILS_STEPS]
                said["gaps"] = recheck.problems(said)
            case "a gate closed":
                said["gates"][recheck.GATES[0]] = "closed"
            case "a claim less open":
                said["not_claimed"].pop()
            case "a proof less":
                del said["steps"][3]
            case "a proof that failed":
                said["steps"][3]["result"] = "does not hold"
            case "no SDK":
                said["sdk"]["files"] = 0
            case "another SDK":
                said["sdk"]["version"] = "9.9.9"
            case "a second SDK":
                entry["installed"]["second_sdk"] = "langbot_plugin"
            case "another runner":
                entry["runner"]["id"] = "plugin:somebody/Another/default"
            case "another version":
                entry["version"] = "9.9"
            case "an excluded library" | "another name in the bill":
                bill = json.loads((copy / entry["sbom"]).read_text(encoding="utf-8"))
                if how == "an excluded library":
                    bill["components"].append({**bill["components"][0], "name": "another", "scope": "excluded"})
                else:
                    bill["components"][0]["purl"] = "pkg:pypi/another@1"
                (copy / entry["sbom"]).write_text(recheck.canonical(bill), encoding="utf-8")
            case "a rebuild of its own":
                package = copy / entry["reproducible"]["file"]
                found = archives.read(package)
                with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as again:
                    for name in reversed(found):
                        again.writestr(name, found[name])
                entry["reproducible"]["sha256"] = hashlib.sha256(package.read_bytes()).hexdigest()
            case "bytes in front":
                package = copy / entry["file"]
                package.write_bytes(b"#!" + b" " * 1000 + package.read_bytes())
                entry["size"] += 1002
                entry["sha256"] = entry["installed"]["artifact_digest"] = hashlib.sha256(package.read_bytes()).hexdigest()
            case "a key twice" | "too deep":
                text = "[" * 200_000 if how == "too deep" else '{"commit": "another", ' + recheck.canonical(said)[1:]
                file.write_text(text, encoding="utf-8")
            case _:
                del entry["members"]
        if how not in ("a page of its own", "jails", "one file more", "a key twice", "too deep"):
            file.write_text(recheck.canonical(said), encoding="utf-8")
            with contextlib.suppress(KeyError):
                if how != "a page of its own":
                    (copy / "SUMMARY.md").write_text(summary.human(json.loads(recheck.canonical(said))), encoding="utf-8")
        hashes.write(copy)
        with pytest.raises(Failed, match=reason):
            recheck.check(copy)

    def test_hashes_made_anew_do_not_hide_another_package(self, frozen: Path, tmp_path: Path) -> None:
        """Our rule: package, extraction, rebuild and inventory have to agree as well."""
        copy = tmp_path / "copy"
        shutil.copytree(frozen, copy)
        (copy / "extracted" / "CodexAgent" / "main.py").write_text("")
        hashes.write(copy)
        with pytest.raises(Failed, match="extracted/CodexAgent"):
            recheck.check(copy)

    def test_the_clone_was_not_changed(self, clone: Path, frozen: Path) -> None:
        """Our rule: nothing is written into the repository; no publication, no signature, no change of the SDK."""
        assert frozen.is_dir()
        assert gate.git(clone, "status", "--porcelain") == b""
        # Git sees no empty directory.
        assert {each.name for each in clone.iterdir()} == {path.partition("/")[0] for path in gate.tracked(clone)} | {
            ".git",
            ".venv",
        }
        assert sdk_record.verify().files > 100


def test_a_bill_is_the_same_for_the_same_environment(tmp_path: Path) -> None:
    """Our rule: no time and no number of its own, so that two bills can be compared."""
    info = tmp_path / "a-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a\nVersion: 1\n")
    bills: Iterator[str] = (json.dumps(sbom.bill("x", "1", tmp_path, ("langbot-plugin", "0.7.18"))) for _ in range(2))
    assert len(set(bills)) == 1
