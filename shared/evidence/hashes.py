"""The last word of the evidence: a hash of every file of it, and whether they all still hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evidence import Failed

NAME = "SHA256SUMS"


def write(directory: Path) -> str:
    """Write the list; its own hash."""
    lines = [f"{_sha256(file)}  {file.relative_to(directory).as_posix()}\n" for file in _files(directory)]
    (directory / NAME).write_text("".join(lines), encoding="utf-8")
    return _sha256(directory / NAME)


def check(directory: Path) -> int:
    """How many files are as they were; raises :class:`evidence.Failed` with each that is not."""
    listed = directory / NAME
    if not listed.is_file():
        raise Failed(f"there is no {NAME}: the evidence is incomplete, or was never finished")
    try:
        text = listed.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Failed(f"{NAME} cannot be read") from None
    expected: dict[str, str] = {}
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise Failed(f"{NAME} cannot be read")
        expected[name] = digest
    found = {file.relative_to(directory).as_posix(): file for file in _files(directory)}
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} was added" for name in found.keys() - expected.keys()]
    wrong += [f"{name} is changed" for name in expected.keys() & found.keys() if _sha256(found[name]) != expected[name]]
    if wrong:
        raise Failed("; ".join(sorted(wrong)))
    return len(expected)


def _files(directory: Path) -> list[Path]:
    entries = sorted(directory.rglob("*"))
    if links := [each for each in entries if each.is_symlink()]:
        raise Failed(f"{links[0].relative_to(directory)} is a link")
    return [each for each in entries if each.is_file() and each != directory / NAME]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
