"""Before anything begins: a clean tree of one commit, and a fresh directory outside of it.

Git is asked about this tree and no other: what the environment, the repository's own configuration or replacements of objects
could put in its place, or have it run, is left out. Nothing is written, not even git's index.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from evidence import Refused

ANSWERED_WITHIN = 300.0
"""Seconds git may take for one question; it reads every file once, from a slow disk, too."""
SHOWN = 5
"""Paths of a dirty tree that are named."""
SOURCES = (".py", ".pyi", ".pth", ".so", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".sh", ".txt", ".in", ".md")
"""Endings of files that a build or a test could read."""


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

    What git is told not to look at counts as well: a file marked as unchanged, and one that only this machine's own lists of
    ignored files hide (the committed ones may), when it looks like a source and stands among the sources. So does a file that a
    filter, or a time that was set back, makes look like the commit's: in the end each one's own bytes are compared.
    """
    if Path(os.fsdecode(git(root, "rev-parse", "--show-toplevel")).removesuffix("\n")).resolve() != root.resolve():
        raise Refused("this copy is no git working tree of its own: use a git clone")
    found = git(root, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    dirty = [line.strip() for line in _lines(git(root, "status", "--porcelain", "--untracked-files=all", "-z"))]
    # The tag of a file whose changes git does not look for is a lower-case letter, or S.
    dirty += [f"unseen {line[2:]}" for line in _lines(git(root, "ls-files", "-v", "-z")) if line[0].islower() or line[0] == "S"]
    dirty += [f"hidden {path}" for path in _hidden(root)]
    dirty = dirty or [f"filtered {path}" for path in _other_bytes(root)]
    if dirty:
        more = f" and {len(dirty) - SHOWN} more" if len(dirty) > SHOWN else ""
        raise Refused(f"the tree is dirty, so its bytes are no commit's: {', '.join(dirty[:SHOWN])}{more}")
    return found


def tracked(root: Path) -> list[str]:
    """Every file of the tree that git knows, relative to it."""
    return _lines(git(root, "ls-files", "-z"))


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
    own = [root.resolve()]
    own += [
        Path(os.fsdecode(line)).resolve()
        for line in git(root, "rev-parse", "--path-format=absolute", "--git-common-dir").splitlines()
    ]
    # Every other working tree of the same repository is a part of it, too.
    trees = _lines(git(root, "worktree", "list", "--porcelain", "-z"))
    own += [Path(line.removeprefix("worktree ")).resolve() for line in trees if line.startswith("worktree ")]
    if any(parent.is_relative_to(each) for each in own):
        raise Refused(f"the evidence belongs outside of the repository: {given}")
    made = parent / path.name
    try:
        made.mkdir(mode=0o755)
    except OSError as exc:
        raise Refused(f"the evidence cannot be made there: {given}: {exc.strerror}") from None
    return made


def _hidden(root: Path) -> list[str]:
    """Untracked files among the sources that no committed list of ignored files names."""
    known = tracked(root)
    rooms = {path.split("/", 1)[0] for path in known if "/" in path}
    others = ("ls-files", "-z", "--others")
    shown = set(_lines(git(root, *others, "--exclude-standard")))
    listed = [path for path in _lines(git(root, *others, "--exclude-per-directory=.gitignore")) if path not in shown]
    return [path for path in listed if path.endswith(SOURCES) and ("/" not in path or path.split("/", 1)[0] in rooms)]


def _other_bytes(root: Path) -> list[str]:
    """Tracked files whose bytes, as they are on the disk, are not those that the index and so the commit has."""
    wrong: list[str] = []
    expected: dict[str, str] = {}
    for line in _lines(git(root, "ls-files", "--stage", "-z")):
        kind, _, path = line.partition("\t")
        mode, digest, _ = kind.split()
        if mode in ("100644", "100755"):
            expected[path] = digest
            if (root / path).is_symlink() or "\n" in path:
                wrong.append(path)
    paths = [path for path in expected if path not in wrong]
    # Paths on stdin are relative to where git works, which is the tree.
    names = b"".join(os.fsencode(path) + b"\n" for path in paths)
    hashed = git(root, "hash-object", "--no-filters", "--stdin-paths", stdin=names).decode().split()
    return wrong + [path for path, digest in zip(paths, hashed, strict=True) if digest != expected[path]]


def _lines(output: bytes) -> list[str]:
    return [os.fsdecode(line) for line in output.split(b"\0") if line]
