"""The installed SDK is the published one: every file of it against its own RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from evidence import Failed

SDK = "langbot-plugin"
CACHES = ("__pycache__",)


@dataclass(frozen=True, slots=True)
class Verified:
    """A distribution whose files are the recorded ones."""

    name: str
    version: str
    files: int
    record_sha256: str


def verify(name: str = SDK, *, path: list[str] | None = None) -> Verified:
    """Check an installed distribution; raises :class:`evidence.Failed` with each file that is missing, changed or unknown."""
    found = list(importlib.metadata.distributions(name=name, path=sys.path if path is None else path))
    if len(found) != 1:
        raise Failed(f"{name}: {len(found)} installed distributions of this name")
    distribution = found[0]
    text = distribution.read_text("RECORD")
    if text is None:
        raise Failed(f"{name} has no RECORD")
    base = Path(str(distribution.locate_file("")))
    wrong: list[str] = []
    recorded: set[Path] = set()
    checked = 0
    for relative, digest, size in csv.reader(text.splitlines()):
        file = base / relative
        recorded.add(file.resolve())
        if any(part in CACHES for part in file.parts):
            continue
        if not file.is_file():
            wrong.append(f"{relative} is missing")
        elif digest:
            algorithm, _, expected = digest.partition("=")
            data = file.read_bytes()
            actual = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
            if actual != expected or (size and len(data) != int(size)):
                wrong.append(f"{relative} is changed")
            checked += 1
    tops = {Path(relative).parts[0] for relative, *_ in csv.reader(text.splitlines()) if not relative.startswith("..")}
    for top in sorted(tops):
        for file in sorted((base / top).rglob("*")) if (base / top).is_dir() else ():
            if file.is_file() and file.resolve() not in recorded and not any(part in CACHES for part in file.parts):
                # What an installer notes beside the files it has unpacked.
                if file.parent.suffix == ".dist-info":
                    continue
                wrong.append(f"{file.relative_to(base)} is in no RECORD")
    if wrong:
        raise Failed(f"the installed {name} is not the published one: {'; '.join(wrong)}")
    return Verified(name, distribution.version, checked, hashlib.sha256(text.encode()).hexdigest())
