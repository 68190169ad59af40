"""A package's members are the commit's files, byte for byte.

The builder gets what ``git archive`` exports, which attributes can change on the way; so members are compared with the
objects of the commit themselves.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import yaml

from evidence import Failed, archives
from evidence.gate import git
from tooling import packages

MANIFEST = "manifest.yaml"


def exported(root: Path, commit: str, package: str) -> dict[str, bytes]:
    """What ``git archive`` makes of a package's directory in a commit, by the path in it."""
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


def committed(root: Path, commit: str, package: str) -> dict[str, bytes]:
    """The files of a package's directory in a commit, from git's own objects; raises :class:`evidence.Failed` for a link."""
    names: list[str] = []
    objects: list[str] = []
    for line in git(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{package}/").split(b"\0"):
        if line:
            kind, _, name = line.decode().partition("\t")
            if kind.split()[0] not in ("100644", "100755"):
                raise Failed(f"{name} is neither a file nor a directory")
            names.append(name.removeprefix(f"{package}/"))
            objects.append(kind.split()[2])
    content = io.BytesIO(git(root, "cat-file", "--batch", stdin="".join(f"{each}\n" for each in objects).encode()))
    found: dict[str, bytes] = {}
    for name in names:
        size = int(content.readline().split()[2])
        found[name] = content.read(size)
        content.read(1)
    return found


def export(root: Path, commit: str, package: str) -> dict[str, bytes]:
    """What the builder gets; raises :class:`evidence.Failed` unless that is the commit's, and the core the shared one."""
    sent, kept = exported(root, commit, package), committed(root, commit, package)
    if wrong := sorted(name for name in sent.keys() | kept.keys() if sent.get(name) != kept.get(name)):
        raise Failed(f"{package}: git archive changes {', '.join(wrong)}")
    core = _core(committed(root, commit, packages.SOURCE))
    if wrong := sorted(name for name in core.keys() | _core(kept).keys() if core.get(name) != kept.get(name)):
        raise Failed(f"{package}: {', '.join(wrong)} is not the shared core's; run python3 scripts/sync_vendored.py")
    return kept


def stage(files: dict[str, bytes], target: Path) -> None:
    """Write exported files into a new directory."""
    for path, data in files.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def compare(package: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Each member with its size and hash; raises :class:`evidence.Failed` with whatever is not the commit's.

    The builder writes the manifest anew (comments are lost, an empty list of pages is added), so that one is compared by
    what it says, and both hashes are recorded.
    """
    found = archives.read(package)
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


def _core(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.split("/", 1)[0] in packages.SHARED}
