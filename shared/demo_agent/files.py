"""Work on the files of one directory and nothing outside it.

Every path is resolved with its symbolic links first; one that ends outside the root is refused. Reading and searching are
bounded; what is left out is said. Nothing here asks for permission: that is the server's part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READ_CHARS = 4_000
"""Characters of a file that are shown; a chat is no editor."""
SEARCH_BYTES = 1024 * 1024
"""Bytes of a file up to which it is searched."""
LISTED = 100
"""Entries of a directory that are shown."""
MATCHES = 50
"""Matching lines that are shown."""
SKIPPED = frozenset({".git", "node_modules", ".venv", "__pycache__"})
"""Directories that a search leaves out."""


class FileProblem(Exception):
    """Why a file cannot be worked on, for people."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a write would do: ``before`` is ``None`` when the file is new."""

    path: Path
    before: str | None
    after: str


class Workspace:
    """The one directory this session works in."""

    def __init__(self, root: str) -> None:
        """``root`` must be an existing directory."""
        self.root = Path(os.path.realpath(root))

    def resolve(self, name: str) -> Path:
        """The real path of ``name`` inside the root; raises :class:`FileProblem` when it lies outside."""
        real = Path(os.path.realpath(self.root / name))
        if not real.is_relative_to(self.root):
            raise FileProblem(f"{name} is outside the workspace, I do not go there")
        return real

    def name(self, path: Path) -> str:
        """``path`` as people see it, relative to the root."""
        return str(path.relative_to(self.root))

    def listing(self, name: str) -> list[str]:
        """The names in a directory, sorted, directories with a slash at the end."""
        directory = self.resolve(name)
        try:
            entries = sorted(directory.iterdir())
        except OSError as exc:
            raise FileProblem(f"{name} cannot be listed: {exc.strerror}") from None
        names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
        left = len(names) - LISTED
        return [*names[:LISTED], f"... and {left} more"] if left > 0 else names

    def text(self, name: str) -> str:
        """The whole text of a file."""
        path = self.resolve(name)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise FileProblem(f"{name} is not a text file") from None
        except OSError as exc:
            raise FileProblem(f"{name} cannot be read: {exc.strerror}") from None

    def excerpt(self, name: str) -> str:
        """The beginning of a file, with a last line that says how much is left out."""
        text = self.text(name)
        left = len(text) - READ_CHARS
        return f"{text[:READ_CHARS]}\n... and {left} more characters" if left > 0 else text

    def matches(self, text: str, name: str) -> list[str]:
        """``path:line: text`` of every line that holds ``text``, upper and lower case alike."""
        wanted = text.lower()
        found: list[str] = []
        for path in self._files(self.resolve(name)):
            try:
                lines = path.read_text(encoding="utf-8").splitlines() if path.stat().st_size <= SEARCH_BYTES else []
            except (UnicodeDecodeError, OSError):
                continue
            for number, line in enumerate(lines, 1):
                if wanted in line.lower():
                    if len(found) == MATCHES:
                        return [*found, "... and more"]
                    found.append(f"{self.name(path)}:{number}: {line.strip()[:200]}")
        return found

    def _files(self, top: Path) -> Iterator[Path]:
        if top.is_file():
            yield top
            return
        if not top.exists():
            raise FileProblem(f"{self.name(top)} does not exist")
        for directory, names, files in os.walk(top):
            names[:] = sorted(name for name in names if name not in SKIPPED)
            for name in sorted(files):
                path = Path(directory, name)
                if path.is_file() and not path.is_symlink():
                    yield path

    def change(self, name: str, after: str) -> Change:
        """The change that puts ``after`` into a file."""
        path = self.resolve(name)
        if path.is_dir():
            raise FileProblem(f"{name} is a directory")
        return Change(path, self.text(name) if path.exists() else None, after)

    def apply(self, change: Change) -> None:
        """Write a change; directories on the way are made."""
        if self.resolve(str(change.path)) != change.path:
            raise FileProblem(f"{change.path.name} has become a link, I do not follow it")
        try:
            change.path.parent.mkdir(parents=True, exist_ok=True)
            change.path.write_text(change.after, encoding="utf-8")
        except OSError as exc:
            raise FileProblem(f"{self.name(change.path)} cannot be written: {exc.strerror}") from None
