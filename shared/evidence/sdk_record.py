"""The installed SDK is whole, and the one that is imported: every file of it against its own RECORD.

What Python has compiled has no hash in a RECORD; it must be what the recorded source compiles to, because Python runs it in the
source's place.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import marshal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from evidence import Failed
from evidence.recheck import SDK

CACHE = "__pycache__"
HEADER = 16
"""Bytes before the code in a compiled file (PEP 552)."""
STARTERS = ("sitecustomize", "usercustomize")
"""Modules that Python imports by itself (library reference, ``site``)."""
SHOWN = 5
"""Files that are named."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A distribution whose files are the recorded ones."""

    name: str
    version: str
    files: int
    compiled: int
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
    rows = list(csv.reader(text.splitlines()))
    recorded = {(base / relative).resolve() for relative, *_ in rows}
    wrong: list[str] = []
    checked = 0
    for relative, digest, size in rows:
        file = base / relative
        if CACHE in file.parts:
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
        elif file.name != "RECORD":
            wrong.append(f"{relative} has no hash in the RECORD")
    tops = sorted({Path(relative).parts[0] for relative, *_ in rows if not relative.startswith("..")})
    compiled = 0
    for file in sorted(each for top in tops for each in [base / top, *(base / top).rglob("*")] if each.is_file()):
        shown = file.relative_to(base).as_posix()
        if CACHE in file.parts:
            compiled += 1
            wrong += [f"{shown} {reason}"] if (reason := _not_of_its_source(file)) else []
        elif file.resolve() not in recorded:
            wrong.append(f"{shown} is in no RECORD")
    wrong += [f"{each} runs at every start and is in no RECORD" for each in _unrecorded_starters(base)]
    if path is None:
        wrong += [f"{top} is imported from elsewhere" for top in _modules(distribution) if not _is_imported(top, recorded)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise Failed(f"the installed {name} is not the published one: {'; '.join(wrong[:SHOWN])}{more}")
    return Verified(name, distribution.version, checked, compiled, hashlib.sha256(text.encode()).hexdigest())


def _not_of_its_source(file: Path) -> str:
    """What is wrong with a compiled file, empty for one that no other than this Python would run."""
    name, _, tag = file.name.removesuffix(".pyc").partition(".")
    if file.suffix != ".pyc":
        return "is no compiled file"
    if tag != sys.implementation.cache_tag:
        return ""
    source = file.parent.parent / f"{name}.py"
    if not source.is_file():
        return "has no source"
    try:
        code = marshal.loads(file.read_bytes()[HEADER:])
    except (ValueError, EOFError, TypeError):
        return "cannot be read"
    same = isinstance(code, CodeType) and code == compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    return "" if same else "is compiled from another source"


def _unrecorded_starters(site_packages: Path) -> list[str]:
    """What Python runs from this directory whenever it starts, and no distribution has put there."""
    recorded = {
        Path(str(each)).parts[0]
        for distribution in importlib.metadata.distributions(path=[str(site_packages)])
        for each in distribution.files or ()
    }
    return sorted(
        each.name
        for each in site_packages.iterdir()
        if (each.suffix == ".pth" or each.name.split(".")[0] in STARTERS) and each.name not in recorded
    )


def _modules(distribution: importlib.metadata.Distribution) -> list[str]:
    files = distribution.files or []
    return sorted(
        {each.parts[0] for each in files if len(each.parts) > 1 and each.name == "__init__.py" and len(each.parts) == 2}
    )


def _is_imported(module: str, recorded: set[Path]) -> bool:
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None and Path(found.origin).resolve() in recorded
