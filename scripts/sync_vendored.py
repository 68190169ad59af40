#!/usr/bin/env python3
"""Copy the shared core from ``ACPAgentRunner`` into its two siblings, byte for byte.

``pkg/`` and ``daemon.py`` are edited only in ``ACPAgentRunner``; ``ClaudeCodeAgent`` and ``CodexAgent`` ship identical copies,
because a plugin package can hold only what lies inside its own directory. Without options the copies are brought up to date:
changed and missing files are written, files the source does not have are deleted. With ``--check`` nothing is touched:
every file that differs, is missing or is extra is named, and the exit code is 1 when there is one.

Byte code and tool caches are no part of the copy and are ignored on both sides. A symbolic link in the shared core is an
error (exit code 2): the package format does not carry it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "ACPAgentRunner"
SIBLINGS = ("ClaudeCodeAgent", "CodexAgent")
SHARED = ("pkg", "daemon.py")
IGNORED_NAMES = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".DS_Store"})
IGNORED_SUFFIXES = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class Difference:
    """One file of one sibling that is not as in the source; ``kind`` is ``differs``, ``missing`` or ``extra``."""

    kind: str
    sibling: str
    path: str

    def __str__(self) -> str:
        """The line people read: what is wrong with which file, relative to the repository."""
        return f"{self.kind:8} {self.sibling}/{self.path}"


def _files(package: Path) -> Iterator[str]:
    """Paths of the shared files below one package, relative to it."""
    pending = [package / name for name in reversed(SHARED)]
    while pending:
        entry = pending.pop()
        if entry.name in IGNORED_NAMES or entry.name.endswith(IGNORED_SUFFIXES):
            continue
        if entry.is_symlink():
            print(f"a symbolic link cannot be shared: {entry.relative_to(package.parent)}", file=sys.stderr)
            raise SystemExit(2)
        if entry.is_dir():
            pending.extend(sorted(entry.iterdir(), reverse=True))
        elif entry.exists():
            yield entry.relative_to(package).as_posix()


def differences(root: Path = ROOT) -> list[Difference]:
    """Every file in which a sibling's shared core is not the source's, in the order of the siblings and of the paths."""
    wanted = {path: (root / SOURCE / path).read_bytes() for path in _files(root / SOURCE)}
    found: list[Difference] = []
    for sibling in SIBLINGS:
        present = set(_files(root / sibling))
        for path in sorted(wanted.keys() | present):
            if path not in present:
                found.append(Difference("missing", sibling, path))
            elif path not in wanted:
                found.append(Difference("extra", sibling, path))
            elif (root / sibling / path).read_bytes() != wanted[path]:
                found.append(Difference("differs", sibling, path))
    return found


def repair(difference: Difference, root: Path = ROOT) -> None:
    """Make one file of a sibling what it is in the source; the file is replaced in one step, never half written."""
    target = root / difference.sibling / difference.path
    if difference.kind == "extra":
        target.unlink()
        _remove_empty_directories(target.parent, root / difference.sibling)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    staged.write_bytes((root / SOURCE / difference.path).read_bytes())
    staged.chmod(0o644)
    staged.replace(target)


def _remove_empty_directories(directory: Path, stop: Path) -> None:
    while directory != stop and all(entry.name in IGNORED_NAMES for entry in directory.iterdir()):
        shutil.rmtree(directory)
        directory = directory.parent


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code is 0 when the copies are (now) identical, 1 when ``--check`` found a difference."""
    parser = argparse.ArgumentParser(description="Copy the shared core of ACPAgentRunner into its siblings, byte for byte.")
    parser.add_argument("--check", action="store_true", help="change nothing; name what differs and exit 1 if anything does")
    options = parser.parse_args(arguments)
    found = differences()
    for difference in found:
        print(difference)
    if options.check:
        if found:
            print(f"{len(found)} file(s) differ from {SOURCE}. Edit only there, then run: python3 scripts/sync_vendored.py")
        else:
            print(f"{', '.join(SIBLINGS)}: shared core identical to {SOURCE}")
        return 1 if found else 0
    for difference in found:
        repair(difference)
    print(f"{len(found)} file(s) brought up to date" if found else "nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
