"""The copies of the shared core: made byte for byte, checked file by file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tooling import ROOT

pytestmark = pytest.mark.static

SIBLINGS = ("ClaudeCodeAgent", "CodexAgent")


def sync(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tree's own copy of the script."""
    command = [sys.executable, str(tree / "scripts" / "sync_vendored.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small monorepo with the real script, in sync."""
    (tmp_path / "scripts").mkdir()
    shutil.copyfile(ROOT / "scripts" / "sync_vendored.py", tmp_path / "scripts" / "sync_vendored.py")
    for name, data in {
        "pkg/__init__.py": b"",
        "pkg/a.py": b"A = 1\r\n",
        "pkg/locales/x.json": b"{}",
        "daemon.py": b"# entry\n",
    }.items():
        path = tmp_path / "ACPAgentRunner" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for sibling in SIBLINGS:
        (tmp_path / sibling).mkdir()
    assert sync(tmp_path).returncode == 0
    return tmp_path


def shared_files(package: Path) -> dict[str, bytes]:
    """Every file of one package, by its path."""
    return {str(path.relative_to(package)): path.read_bytes() for path in sorted(package.rglob("*")) if path.is_file()}


def test_the_repository_s_own_copies_are_identical() -> None:
    """What is committed for the siblings is the shared core, byte for byte (our rule)."""
    done = sync(ROOT, "--check")
    assert done.returncode == 0, done.stdout


def test_copies_are_byte_identical(tree: Path) -> None:
    """A sync copies every file of pkg/ and daemon.py as it is, line endings included."""
    source = shared_files(tree / "ACPAgentRunner")
    assert [shared_files(tree / sibling) for sibling in SIBLINGS] == [source, source]
    assert sync(tree, "--check").returncode == 0


def test_check_names_each_file_that_differs_and_changes_nothing(tree: Path) -> None:
    """One changed byte, a missing file and an extra file are each named, and --check leaves them as they are."""
    changed = tree / "ClaudeCodeAgent" / "pkg" / "a.py"
    changed.write_bytes(b"A = 2\r\n")
    (tree / "CodexAgent" / "daemon.py").unlink()
    (tree / "CodexAgent" / "pkg" / "stray.py").write_bytes(b"")
    done = sync(tree, "--check")
    assert done.returncode == 1
    assert [line.split() for line in done.stdout.splitlines()[:3]] == [
        ["differs", "ClaudeCodeAgent/pkg/a.py"],
        ["missing", "CodexAgent/daemon.py"],
        ["extra", "CodexAgent/pkg/stray.py"],
    ]
    assert changed.read_bytes() == b"A = 2\r\n"
    assert (tree / "CodexAgent" / "pkg" / "stray.py").exists()


def test_sync_restores_what_was_changed_and_deletes_what_is_extra(tree: Path) -> None:
    """After a sync the copies are identical again; a directory that only held extra files is gone, byte code or not."""
    (tree / "ClaudeCodeAgent" / "pkg" / "a.py").write_bytes(b"")
    extra = tree / "ClaudeCodeAgent" / "pkg" / "old" / "deep"
    (extra / "__pycache__").mkdir(parents=True)
    (extra / "__pycache__" / "x.pyc").write_bytes(b"x")
    (extra / "x.py").write_bytes(b"")
    done = sync(tree)
    assert done.returncode == 0
    assert not (tree / "ClaudeCodeAgent" / "pkg" / "old").exists()
    assert shared_files(tree / "ClaudeCodeAgent") == shared_files(tree / "ACPAgentRunner")
    assert sync(tree).stdout == "nothing to do\n"


def test_a_file_removed_from_the_source_is_removed_from_the_copies(tree: Path) -> None:
    """The source decides what exists, for daemon.py too."""
    (tree / "ACPAgentRunner" / "daemon.py").unlink()
    assert sync(tree, "--check").returncode == 1
    assert sync(tree).returncode == 0
    assert not any((tree / sibling / "daemon.py").exists() for sibling in SIBLINGS)


def test_byte_code_and_caches_are_no_part_of_the_copy(tree: Path) -> None:
    """A __pycache__ on either side is neither a difference nor copied."""
    for package, name in (("ACPAgentRunner", "a"), ("CodexAgent", "b")):
        cache = tree / package / "pkg" / "__pycache__"
        cache.mkdir()
        (cache / f"{name}.cpython-311.pyc").write_bytes(b"code")
    assert sync(tree, "--check").returncode == 0
    assert not (tree / "ClaudeCodeAgent" / "pkg" / "__pycache__").exists()


def test_only_the_shared_core_is_touched(tree: Path) -> None:
    """A sibling's own agent/ and components/ are its own."""
    own = tree / "CodexAgent" / "agent" / "driver.py"
    own.parent.mkdir()
    own.write_bytes(b"own")
    assert sync(tree).returncode == 0
    assert own.read_bytes() == b"own"


def test_a_symbolic_link_in_the_shared_core_is_an_error(tree: Path) -> None:
    """The package format carries no links, so sharing one would break a package silently."""
    (tree / "ACPAgentRunner" / "pkg" / "link.py").symlink_to("a.py")
    done = sync(tree, "--check")
    assert done.returncode == 2
    assert "ACPAgentRunner/pkg/link.py" in done.stderr
