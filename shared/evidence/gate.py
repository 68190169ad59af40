"""Before anything begins: a clean tree of one commit, and a fresh directory outside of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from evidence import Refused

SHOWN = 5
"""Paths of a dirty tree that are named."""


def git(root: Path, *arguments: str) -> bytes:
    """What git prints; raises :class:`evidence.Refused` with its own words."""
    # The tree is only read, so it does not matter to whom it belongs (git refuses others' by default).
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise Refused("git is not installed") from None
    if done.returncode != 0:
        raise Refused(f"git: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def commit(root: Path) -> str:
    """The commit that the whole tree is at; raises :class:`evidence.Refused` for a tree with anything else in it."""
    found = git(root, "rev-parse", "HEAD").decode().strip()
    if dirty := git(root, "status", "--porcelain", "--untracked-files=all").decode().splitlines():
        shown = ", ".join(line.strip() for line in dirty[:SHOWN])
        more = f" and {len(dirty) - SHOWN} more" if len(dirty) > SHOWN else ""
        raise Refused(f"the tree is dirty, so its bytes are no commit's: {shown}{more}")
    return found


def fresh(root: Path, given: str) -> Path:
    """The directory for the evidence, made now; raises :class:`evidence.Refused` when it cannot be that."""
    path = Path(given)
    if not path.is_absolute():
        raise Refused(f"the evidence needs an absolute directory: {given}")
    if path.exists() or path.is_symlink():
        raise Refused(f"the evidence needs a directory that does not exist yet: {given}")
    try:
        parent = path.parent.resolve(strict=True)
    except OSError:
        raise Refused(f"there is no directory to make it in: {path.parent}") from None
    if parent.is_relative_to(root.resolve()):
        raise Refused(f"the evidence belongs outside of the repository: {given}")
    made = parent / path.name
    made.mkdir(mode=0o755)
    return made
