"""A file of JSON lines that several processes may share: one object a line, of this account alone, begun anew when it is full.

Guarantees: a line is ASCII and stays one line whatever its values hold; it is appended with one write, and what a full disk cut
off spoils no other line; the file is 0600 in a directory of 0700, and a link in its place is not followed; no file grows
beyond its bound, and a bounded number of older ones (``NAME.1`` is the newest) is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pkg.agent_api import Json


def now() -> str:
    """The time of a line: UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonLines:
    """One such file."""

    def __init__(self, file: Path) -> None:
        """Nothing is made before the first line; beside the file there is a lock (``audit.lock`` of ``audit.jsonl``)."""
        self.file = file

    def append(self, line: Mapping[str, Json], *, most: int, kept: int) -> None:
        """Write a line; a file of ``most`` bytes is set aside before, with ``kept`` older ones. Raises :class:`OSError`."""
        data = json.dumps(line).encode("ascii") + b"\n"
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self.file.stat(follow_symlinks=False).st_size + len(data) > most:
                self._set_aside(most, kept)
        descriptor = _opened(self.file, os.O_APPEND)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _set_aside(self, most: int, kept: int) -> None:
        """Begin a new file, unless another process that shares it does so just now."""
        lock = _opened(self.file.with_suffix(".lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.file.stat().st_size > most // 2:
                for number in range(kept - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        self._old(number).replace(self._old(number + 1))
                self.file.replace(self._old(1))
        except (BlockingIOError, FileNotFoundError):
            return  # a line more in the full file does no harm
        finally:
            os.close(lock)

    def _old(self, number: int) -> Path:
        return self.file.with_name(f"{self.file.name}.{number}")


def _opened(file: Path, flags: int = 0) -> int:
    """The file, made if need be, of this account alone."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(file, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
