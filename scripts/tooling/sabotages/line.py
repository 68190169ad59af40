"""One wrong line, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One wrong line that somebody might write, and the tests that must not let it pass.

    ``old`` and ``new`` are lines without their indentation; ``old`` stands in ``file`` once, or once in the block that the line
    beginning with ``within`` opens. ``tests`` are ids below ``certification-tests``, of one package; one of them must fail.
    ``red`` is a pattern for what else than a failed assertion is the right failure: an error that says what the line broke, or
    :data:`HANGS`.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    within: str = ""
    red: str = ""


HANGS = r"^Failed: Timeout \(>"
"""The test waits until its bound runs out (pytest-timeout); else that is a slow machine's word, not the test's."""


def pkg(module: str) -> str:
    """The path of a module of the shared core."""
    return f"ACPAgentRunner/pkg/{module}.py"
