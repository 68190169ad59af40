"""The hub's durable fences: one small file for each job that was sent to a daemon and is not proven to have ended.

Guarantees: a marker is on the disk (file and directory synced) before anything of its job leaves; it goes only with the proof;
a worker that is killed in between leaves it, and the next one of the same installation, whatever its revision, takes it up.
The files are 0600 in a directory of 0700, and hold ids only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pkg import runtime_support
from pkg.relay_auth import Installation
from pkg.runtime_support import WorkerShape

DIRECTORY: Final = ".coding-relay-v1"
SUFFIX: Final = ".pending"
_LONGEST: Final = 4096


def state_directory(prefix: str, shape: WorkerShape | None = None) -> Path | None:
    """Where this worker's fences outlive it: ``/data`` in a jail, the account's state directory else, none in the pool."""
    shape = shape or runtime_support.worker_shape()
    if shape is WorkerShape.POOL:
        return None
    if shape is WorkerShape.JAIL:
        return runtime_support.DATA_DIRECTORY / DIRECTORY / prefix
    return Path(runtime_support.home_directory()) / ".local" / "state" / DIRECTORY.lstrip(".") / prefix


def scope_of(installation: Installation) -> str:
    """What an installation's fences are filed under: the same for each of its revisions."""
    names = ("instance_uuid", "workspace_uuid", "installation_uuid")
    parts = [str(getattr(installation, name, "")) for name in names]
    text = "\0".join(parts) if any(parts) else f"constant\0{installation!s}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class DiskMarkers:
    """The fences below one directory; a :class:`pkg.relay_protocol.PendingMarkers`."""

    def __init__(self, directory: Path) -> None:
        """Nothing is made before the first marker."""
        self._directory = directory

    def mark(self, installation: Installation, daemon_id: str, job_id: str, table: str) -> None:
        """Make the marker durable before this returns; nothing to do when the same one exists. Raises ``OSError``."""
        path = self._path(installation, daemon_id, job_id)
        data = json.dumps({"daemon_id": daemon_id, "job_id": job_id, "table": table}).encode("ascii")
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                return
        folder = path.parent
        made = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        for each in (folder, folder.parent, folder.parent.parent) if made else (folder,):
            _sync(each)

    def clear(self, installation: Installation, daemon_id: str, job_id: str) -> None:
        """Remove the marker; one that can't be removed only costs another proof."""
        with contextlib.suppress(OSError):
            self._path(installation, daemon_id, job_id).unlink(missing_ok=True)

    def pending(self, installation: Installation) -> Mapping[str, Mapping[str, str]]:
        """What is not proven: daemon id to job id to the table it was dispatched to."""
        found: dict[str, dict[str, str]] = {}
        folder = self._directory / scope_of(installation)
        try:
            paths = sorted(folder.glob(f"*{SUFFIX}"))
        except OSError:
            return found
        for path in paths:
            try:
                with path.open("rb") as file:
                    value = json.loads(file.read(_LONGEST))
                daemon_id, job_id, table = (str(value[name]) for name in ("daemon_id", "job_id", "table"))
            except (OSError, ValueError, TypeError, KeyError):
                continue
            found.setdefault(daemon_id, {})[job_id] = table
        return found

    def _path(self, installation: Installation, daemon_id: str, job_id: str) -> Path:
        name = hashlib.sha256(f"{daemon_id}\0{job_id}".encode("utf-8", "surrogatepass")).hexdigest()[:40]
        return self._directory / scope_of(installation) / (name + SUFFIX)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
