"""Evidence looked at again, offline: every file is as it was frozen, and what it says of itself is still so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from evidence import Failed, envelopes, hashes, members


def check(directory: Path) -> dict[str, Any]:
    """Counts of what was checked; raises :class:`evidence.Failed` with the first thing that does not hold."""
    if not directory.is_dir():
        raise Failed("there is no such directory")
    files = hashes.check(directory)
    inventory = json.loads((directory / "inventory.json").read_text(encoding="utf-8"))
    counted = 0
    for name, entry in inventory["packages"].items():
        package = directory / entry["file"]
        data = package.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise Failed(f"{entry['file']} is not the package of the inventory")
        envelopes.unsigned(data)
        found = members.read(package)
        listed = {member: each["sha256"] for member, each in entry["members"].items()}
        if {member: hashlib.sha256(content).hexdigest() for member, content in found.items()} != listed:
            raise Failed(f"{entry['file']} has other members than the inventory")
        extracted = {
            file.relative_to(directory / "extracted" / name).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in (directory / "extracted" / name).rglob("*")
            if file.is_file()
        }
        if extracted != listed:
            raise Failed(f"extracted/{name} is not what the package holds")
        rebuilt = directory / entry["reproducible"]["file"]
        if hashlib.sha256(rebuilt.read_bytes()).hexdigest() != entry["reproducible"]["sha256"]:
            raise Failed(f"{entry['reproducible']['file']} is not the one of the inventory")
        if members.read(rebuilt) != found:
            raise Failed(f"{entry['reproducible']['file']} has other members than {entry['file']}")
        if not (directory / entry["sbom"]).is_file():
            raise Failed(f"{name} has no bill of materials")
        counted += len(listed)
    return {
        "files": files,
        "members": counted,
        "commit": inventory["commit"],
        "complete": inventory["complete"],
        "packages": {name: entry["sha256"] for name, entry in inventory["packages"].items()},
    }
