"""What the scripts and the suite share: preparing environments. Standard library only; Linux and macOS."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.platform == "win32":
    sys.exit("The scripts of this repository run on Linux and macOS. On Windows, use WSL.")

ROOT = Path(__file__).resolve().parent.parent.parent
"""The repository."""

WORK = ROOT / ".vendor"
"""Everything that is downloaded or locked for this working copy; ignored by git, may be deleted at any time."""


class SetupError(Exception):
    """Something that must be there before anything can run is missing; the text says what to do. Scripts exit with 2."""
