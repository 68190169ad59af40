"""A package's members are the commit's files, byte for byte."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from evidence import Failed
from evidence.gate import git

MANIFEST = "manifest.yaml"


def exported(root: Path, commit: str, package: str) -> dict[str, bytes]:
    """The files of a package's directory in a commit, by their path in it."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", "--format=tar", commit, "--", package))) as archive:
        for member in archive:
            if member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                found[member.name.removeprefix(f"{package}/")] = content.read()
            elif not member.isdir():
                raise Failed(f"{member.name} is neither a file nor a directory")
    return found


def stage(files: dict[str, bytes], target: Path) -> None:
    """Write exported files into a new directory."""
    for path, data in files.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def read(package: Path) -> dict[str, bytes]:
    """The members of a package; raises :class:`evidence.Failed` for one that stands twice."""
    with zipfile.ZipFile(package) as archive:
        names = [each.filename for each in archive.infolist() if not each.is_dir()]
        if len(set(names)) != len(names):
            raise Failed(f"{package.name}: a member stands twice")
        return {name: archive.read(name) for name in names}


def compare(package: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Each member with its size and hash; raises :class:`evidence.Failed` with whatever is not the commit's.

    The builder writes the manifest anew (comments are lost, an empty list of pages is added), so that one is compared by
    what it says, and both hashes are recorded.
    """
    found = read(package)
    wrong = [f"{name} is missing" for name in files.keys() - found.keys() if name != ".gitignore"]
    wrong += [f"{name} is not the commit's" for name in found.keys() - files.keys()]
    inventory: dict[str, Any] = {}
    for name in sorted(found.keys() & files.keys()):
        entry: dict[str, Any] = {"sha256": hashlib.sha256(found[name]).hexdigest(), "size": len(found[name])}
        if name == MANIFEST:
            entry["source_sha256"] = hashlib.sha256(files[name]).hexdigest()
            entry["rewritten_by_the_builder"] = found[name] != files[name]
            if _said(found[name]) != _said(files[name]):
                wrong.append(f"{name} says something else")
        elif found[name] != files[name]:
            wrong.append(f"{name} is changed")
        inventory[name] = entry
    if wrong:
        raise Failed(f"{package.name}: {'; '.join(sorted(wrong))}")
    return inventory


def _said(text: bytes) -> Any:
    manifest = yaml.safe_load(text)
    if isinstance(manifest, dict) and isinstance(manifest.get("spec"), dict) and not manifest["spec"].get("pages"):
        manifest["spec"].pop("pages", None)
    return manifest


def manifest(files: dict[str, bytes]) -> Any:
    """A package's manifest as it stands in the commit."""
    return yaml.safe_load(files[MANIFEST])
