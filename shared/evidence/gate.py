"""Before anything begins: a clean tree of one commit, and a fresh directory outside of it.

Git is asked about this tree and no other: what the environment, the repository's own configuration or replacements of objects
could put in its place, or have it run, is left out. Nothing is written, not even git's index.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path

from evidence import Refused

ANSWERED_WITHIN = 300.0
"""Seconds git may take for one question; it reads every file once, from a slow disk, too."""
SHOWN = 5
"""Paths of a dirty tree that are named."""
ENVIRONMENTS = (".venv", ".vendor")
"""What this machine's own lists of ignored files may hide, and nothing else; nothing is read from there by name."""
CACHES = frozenset({*ENVIRONMENTS, "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist"})
"""Directories that the committed lists hide and that are not read: what is compiled is neither (the command sees to that)."""
ARCHIVE = ".lbpkg"
HASHES = {40: "sha1", 64: "sha256"}
"""Git's names of objects, by their length."""


def git(root: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """What git prints; raises :class:`evidence.Refused` with its own words."""
    # The tree is only read, so it does not matter to whom it belongs (git refuses others' by default).
    settings = ["-c", f"safe.directory={root}", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"]
    command = ["git", "--no-optional-locks", "--no-replace-objects", *settings, "-C", str(root), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, env=environment, timeout=ANSWERED_WITHIN)
    except FileNotFoundError:
        raise Refused("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise Refused(f"git {arguments[0]}: no answer within {ANSWERED_WITHIN:g} s") from None
    if done.returncode != 0:
        words = " ".join(done.stderr.decode(errors="replace").split())
        raise Refused(f"git {arguments[0]}: {words}")
    return done.stdout


def commit(root: Path) -> str:
    """The commit that the whole tree is at; raises :class:`evidence.Refused` for a tree with anything else in it.

    What git is told not to look at counts as well: a file marked as unchanged, and whatever only this machine's own lists of
    ignored files hide (the committed ones may hide caches). Nothing is asked of git that would have it run a filter: that each
    file is the commit's is found from its own bytes.
    """
    if Path(os.fsdecode(git(root, "rev-parse", "--show-toplevel")).removesuffix("\n")).resolve() != root.resolve():
        raise Refused("this copy is no git working tree of its own: use a git clone")
    found = git(root, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    dirty = [f"staged {path}" for path in _lines(git(root, "diff-index", "--cached", "--name-only", "-z", "HEAD", "--"))]
    dirty += [f"new {path}" for path in _lines(git(root, "ls-files", "-z", "--others", "--exclude-standard"))]
    # The tag of a file whose changes git does not look for is a lower-case letter, or S.
    dirty += [f"unseen {line[2:]}" for line in _lines(git(root, "ls-files", "-v", "-z")) if line[0].islower() or line[0] == "S"]
    dirty += [f"hidden {path}" for path in _hidden(root)]
    dirty += [f"changed {path}" for path in _other_bytes(root)]
    if dirty:
        more = f" and {len(dirty) - SHOWN} more" if len(dirty) > SHOWN else ""
        raise Refused(f"the tree is dirty, so its bytes are no commit's: {', '.join(map(_plain, dirty[:SHOWN]))}{more}")
    return found


def tracked(root: Path) -> list[str]:
    """Every file of the tree that git knows, relative to it."""
    return _lines(git(root, "ls-files", "-z"))


def fresh(root: Path, given: str) -> Path:
    """The directory for the evidence, made now; raises :class:`evidence.Refused` when it cannot be that."""
    path = Path(given)
    if not path.is_absolute():
        raise Refused(f"the evidence needs an absolute directory: {_plain(given)}")
    try:
        if path.is_symlink() or path.exists():
            raise Refused(f"the evidence needs a directory that does not exist yet: {_plain(given)}")
        parent = path.parent.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop of links is either
        raise Refused(f"there is no directory to make it in: {_plain(str(path.parent))}") from None
    own = [root.resolve()]
    own += [
        Path(os.fsdecode(line)).resolve()
        for line in git(root, "rev-parse", "--path-format=absolute", "--git-common-dir").splitlines()
    ]
    # Every other working tree of the same repository is a part of it, too.
    trees = _lines(git(root, "worktree", "list", "--porcelain", "-z"))
    own += [Path(line.removeprefix("worktree ")).resolve() for line in trees if line.startswith("worktree ")]
    # A directory may be mounted in a second place.
    same = {(each.stat().st_dev, each.stat().st_ino) for each in own if each.exists()}
    if any(parent.is_relative_to(each) for each in own) or any(
        (each.stat().st_dev, each.stat().st_ino) in same for each in (parent, *parent.parents)
    ):
        raise Refused(f"the evidence belongs outside of the repository: {_plain(given)}")
    made = parent / path.name
    try:
        made.mkdir(mode=0o755)
    except OSError as exc:
        raise Refused(f"the evidence cannot be made there: {_plain(given)}: {exc.strerror}") from None
    return made


def _hidden(root: Path) -> list[str]:
    """Untracked paths that git does not speak of, and that are not what the committed lists of ignored files are for."""
    others, committed = ("ls-files", "-z", "--others"), ("--exclude-per-directory=.gitignore",)
    shown = set(_lines(git(root, *others, "--exclude-standard")))
    listed = [path for path in _lines(git(root, *others, *committed)) if path not in shown]
    found = [path for path in listed if path.partition("/")[0] not in ENVIRONMENTS]
    # Whole directories of ignored files stand here by their own names.
    ignored = _lines(git(root, *others, "--directory", "--no-empty-directory", *committed, "--ignored"))
    return found + [path for path in ignored if Path(path).name not in CACHES and not path.endswith(ARCHIVE)]


def _other_bytes(root: Path) -> list[str]:
    """Tracked files that are not, as they are on the disk, what the index and so the commit has: bytes, kind and mode."""
    wrong: list[str] = []
    for line in _lines(git(root, "ls-files", "--stage", "-z")):
        kind, _, path = line.partition("\t")
        mode, digest, _ = kind.split()
        file = root / path
        try:
            found = file.lstat().st_mode
            data = os.fsencode(file.readlink()) if stat.S_ISLNK(found) else file.read_bytes()
        except OSError:
            wrong.append(path)
            continue
        kinds = {"120000": stat.S_ISLNK(found), "100755": _runs(found), "100644": stat.S_ISREG(found) and not _runs(found)}
        blob = hashlib.new(HASHES[len(digest)], b"blob %d\0" % len(data) + data, usedforsecurity=False)
        if not kinds.get(mode) or blob.hexdigest() != digest:
            wrong.append(path)
    return wrong


def _runs(mode: int) -> bool:
    return stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)


def _plain(text: str) -> str:
    """A name as it can be shown: some have line ends and worse in them."""
    return text if text.isprintable() else ascii(text)


def _lines(output: bytes) -> list[str]:
    return [os.fsdecode(line) for line in output.split(b"\0") if line]
