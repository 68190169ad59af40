"""A job's journal on disk: what its memory cannot hold while nobody is connected, oldest first.

The journal is worth nothing to another process (a restarted daemon has no job that goes on), so its files have no name: they
are made 0600 in a directory of this account, unlinked at once, and gone with the process however it ends. They are segments of
``RELAY_SEGMENT_BYTES``, and each is given back as soon as everything in it is acknowledged.

Guarantees: a record is kept whole or refused (a full disk is a refusal, never an exception); what is read is what was written,
or ``OSError``.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from pathlib import Path

from pkg import limits


class _Segment:
    """One file and the records in it."""

    __slots__ = ("descriptor", "first", "places", "size")

    def __init__(self, directory: Path, first: int) -> None:
        self.descriptor, name = tempfile.mkstemp(dir=directory, prefix=".journal-")
        os.unlink(name)  # noqa: PTH108
        self.first = first
        self.places: list[tuple[int, int]] = []
        self.size = 0

    def close(self) -> None:
        os.close(self.descriptor)


class DiskSpill:
    """One job's records on disk; a :class:`pkg.relay_protocol.Spill`."""

    def __init__(self, directory: Path) -> None:
        """Nothing is made before the first record."""
        self._directory = directory
        self._segments: deque[_Segment] = deque()

    @property
    def held(self) -> int:
        """Bytes on the disk."""
        return sum(segment.size for segment in self._segments)

    def append(self, sequence: int, record: bytes) -> bool:
        """Keep a record behind the others; false when there is no room. The same sequence again replaces what it was."""
        self._forget_from(sequence)
        try:
            last = self._segments[-1] if self._segments else None
            if last is None or last.size >= limits.RELAY_SEGMENT_BYTES or sequence != last.first + len(last.places):
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                last = _Segment(self._directory, sequence)
                self._segments.append(last)
            written = 0
            while written < len(record):
                written += os.pwrite(last.descriptor, record[written:], last.size + written)
        except OSError:
            return False
        last.places.append((last.size, len(record)))
        last.size += len(record)
        return True

    def read(self, sequence: int) -> bytes:
        """A kept record; raises ``OSError`` when it cannot be read back."""
        for segment in self._segments:
            index = sequence - segment.first
            if 0 <= index < len(segment.places):
                at, size = segment.places[index]
                record = os.pread(segment.descriptor, size, at)
                if len(record) != size:
                    raise OSError("a journal's file is shorter than it was")
                return record
        raise OSError("the journal does not hold this record")

    def discard(self, through: int) -> None:
        """Give back the files of which everything is at or below ``through``."""
        while self._segments:
            first = self._segments[0]
            if first.first + len(first.places) - 1 > through:
                return
            self._segments.popleft().close()

    def close(self) -> None:
        """Give back everything."""
        while self._segments:
            self._segments.popleft().close()

    def _forget_from(self, sequence: int) -> None:
        while self._segments and self._segments[-1].first >= sequence:
            self._segments.pop().close()
        if self._segments:
            last = self._segments[-1]
            del last.places[max(0, sequence - last.first) :]
            last.size = sum(size for _, size in last.places[-1:]) + (last.places[-1][0] if last.places else 0)
