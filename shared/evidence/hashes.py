"""The last word of the evidence: a hash of every file of it, and whether they all still hold."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from evidence import Failed

NAME = "SHA256SUMS"
LONGEST = 16 * 1024 * 1024
"""Bytes of the list; three packages have some hundred lines."""
LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")


def write(directory: Path) -> str:
    """Write the list; its own hash."""
    (directory / NAME).write_bytes(_list({_name(directory, file): _sha256(file) for file in _files(directory)}))
    return own(directory)


def own(directory: Path) -> str:
    """The hash of the list itself, by which all of the evidence can be named."""
    return _sha256(directory / NAME)


def check(directory: Path) -> int:
    """How many files are as they were; raises :class:`evidence.Failed` with each that is not."""
    listed = directory / NAME
    if listed.is_symlink() or not listed.is_file():
        raise Failed(f"there is no {NAME}: the evidence is incomplete, or was never finished")
    if listed.stat().st_size > LONGEST:
        raise Failed(f"{NAME} is longer than any list of evidence")
    content = listed.read_bytes()
    lines = content.decode("utf-8", errors="replace").split("\n")
    expected = {match[2]: match[1] for line in lines if (match := LINE.fullmatch(line))}
    found = {_name(directory, file): file for file in _files(directory)}
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} was added" for name in found.keys() - expected.keys()]
    wrong += [f"{name} is changed" for name in expected.keys() & found.keys() if _sha256(found[name]) != expected[name]]
    # The list has exactly one form, so that no byte of it can change unseen either.
    if content != _list(expected):
        wrong.insert(0, f"{NAME} cannot be read as it was written")
    if wrong:
        raise Failed("; ".join(sorted(wrong)))
    return len(expected)


def _list(hashed: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(hashed.items())).encode()


def _name(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()


def _files(directory: Path) -> list[Path]:
    found: list[Path] = []
    for each in sorted(directory.rglob("*")):
        if each.is_symlink():
            raise Failed(f"{_name(directory, each)} is a link")
        if each.is_file():
            found.append(each)
        elif not each.is_dir():
            raise Failed(f"{_name(directory, each)} is neither a file nor a directory")
        elif not any(each.iterdir()):
            raise Failed(f"{_name(directory, each)} is an empty directory")
    return [each for each in found if each != directory / NAME]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
