"""Package archives as they are on disk: members, and whether anything is signed.

Standard library only, so that evidence can be looked at again without the SDK.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

from evidence import Failed

END: bytes = b"PK\x05\x06"
END_SIZE = 22
"""Bytes of a ZIP archive's last record without its comment (APPNOTE 4.3.16)."""


def read(package: Path) -> dict[str, bytes]:
    """The members of a package; raises :class:`evidence.Failed` for one that stands twice, or that is not all there is."""
    try:
        with zipfile.ZipFile(package) as archive:
            names = [each.filename for each in archive.infolist() if not each.is_dir()]
            if len(set(names)) != len(names):
                raise Failed(f"{package.name}: a member stands twice")
            if any(each.is_dir() and each.file_size for each in archive.infolist()):
                raise Failed(f"{package.name}: a directory holds bytes")
            if min((each.header_offset for each in archive.infolist()), default=0) != 0:
                raise Failed(f"{package.name}: something stands before its members")
            return {name: archive.read(name) for name in names}
    # zipfile reads what anybody may have written, and says so in many ways (CPython 3.13, zipfile and its decompressors).
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, LookupError, RuntimeError, MemoryError) as exc:
        raise Failed(f"{package.name} is no readable archive: {type(exc).__name__}") from None


def comment(data: bytes) -> bytes:
    """The comment of an archive, where an envelope would be, or whatever else follows its last record.

    Raises :class:`evidence.Failed` for bytes that are no archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = archive.comment
    except (zipfile.BadZipFile, ValueError):
        raise Failed("no ZIP archive") from None
    # An archive without a comment ends with its last record; zipfile itself does not mind what follows.
    return found or (b"" if data[-END_SIZE:].startswith(END) else data[-END_SIZE:])
