"""What a release candidate is checked and frozen with: one small module for each kind of proof.

:mod:`evidence.candidate` goes through them in order; ``certification-tests/verify_coding_candidates.py`` is the command.
"""

from __future__ import annotations


class Refused(Exception):
    """Nothing was begun; the text says what is wrong with what was asked for. The command exits with 2."""


class Failed(Exception):
    """A proof does not hold; the text says which and why. The command exits with 1."""
