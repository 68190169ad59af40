"""Looks at a worker's memory from outside: whether the bytes of a text are anywhere in it, whatever they belong to.

An allocator leaves in freed memory what was there, and nobody can say when it is used again: in a worker with its usual
allocators, secrets are seen long after the last object that had them. So :data:`WIPING` lets a worker's allocators overwrite
what is freed, CPython's and the C library's (which extensions use). What is still there then is held by something, also by what
:mod:`testkit.object_graph` cannot ask. That freed memory is wiped is a property of such a worker only.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from testkit.object_graph import Needles

WIPING: Final[Mapping[str, str]] = {
    "PYTHONMALLOC": "malloc_debug",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=165",
}
"""Environment of a worker that wipes what is freed; the C library does not wipe what it has in a thread's cache."""

UNKNOWN: Final = None if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else "only glibc wipes what is freed"
"""Why this cannot be asked here."""


def in_memory(pid: int, needles: Needles) -> set[str]:
    """The names of those that are in the memory the process can write to, in any of their forms.

    Raises ``OSError`` if the memory may not be read.
    """
    found: set[str] = set()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            places, rights, *_ = line.split()
            if rights.startswith("rw"):
                first, end = (int(place, 16) for place in places.split("-"))
                with contextlib.suppress(OSError):  # given back since it was listed
                    memory.seek(first)
                    found |= needles.inside(memory.read(end - first))
    return found
