"""What a user's own machine has for the daemon program: an environment with the packages of ``requirements-daemon.txt`` alone.

It lies in ``.vendor`` in a directory named by the fingerprint of its lock, which pins what those ranges allow.
"""

from __future__ import annotations

from pathlib import Path

from tooling import ROOT, WORK, steps, venv

LOCK = ROOT / "scripts" / "lock" / "daemon.txt"


def directory() -> Path:
    """Where this lock's environment is or will be."""
    return WORK / f"daemon-{steps.fingerprint(LOCK.read_bytes())}"


def ensure() -> Path:
    """The interpreter of the environment, which is made first if need be. Raises :class:`tooling.SetupError`."""
    target = directory()
    return venv.ensure(target, LOCK, "the daemon program's environment", target.with_suffix(".lock"))
