"""The real LangBot host of the suite, in a virtual environment of its own outside the working copy.

It is large (1.6 GB), so it is shared by all working copies: ``$XDG_CACHE_HOME/langbot-coding-runners`` (``~/.cache`` by
default), in a directory named by the fingerprint of its lock.
"""

from __future__ import annotations

import os
from pathlib import Path

from tooling import ROOT, steps, venv

LOCK = ROOT / "scripts" / "lock" / "host.txt"


def cache() -> Path:
    """The directory with everything that working copies share."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "langbot-coding-runners"


def directory() -> Path:
    """Where this lock's host is or will be."""
    return cache() / f"host-{steps.fingerprint(LOCK.read_bytes())}"


def ensure() -> Path:
    """The interpreter with the host installed, installed first if need be. Raises :class:`tooling.SetupError`."""
    target = directory()
    return venv.ensure(target, LOCK, "the real LangBot host", target.with_suffix(".lock"))
