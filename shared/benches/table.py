"""Measured numbers beside their goals, as a table and as a verdict. No I/O.

Every number with a goal is a ratio or difference taken within one run, or a count. The smaller the better, unless the row says
that its goal is the least it should reach. A row is *met* when it is no worse than its goal, *missed* when no worse than twice
(or half) its goal, *failed* else; a row without a goal is information. What could not be measured has failed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

TOLERANCE: Final = 2.0
"""How many times worse than its goal a number may be before the whole benchmark fails."""

Verdict = Literal["met", "missed", "failed", ""]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity: a sample per repetition, in ``unit``; no sample at all where it could not be measured."""

    name: str
    samples: tuple[float, ...]
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    """Whether the goal is the least that is good, not the most."""

    @property
    def value(self) -> float | None:
        """The median of the samples; ``None`` without any."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def verdict(self) -> Verdict:
        """What the goal says of the value; the empty string where there is no goal."""
        value = self.value
        if value is None:
            return "failed"
        if self.goal is None:
            return ""
        reached, due = (self.goal, value) if self.at_least else (value, self.goal)
        if reached <= due:
            return "met"
        return "missed" if reached <= TOLERANCE * due else "failed"


def counted(name: str, samples: Iterable[float]) -> Row:
    """A count that must be zero in every repetition, so its worst sample stands for all."""
    return Row(name, (max(samples, default=0.0),), "", 0.0)


def passed(rows: Iterable[Row]) -> bool:
    """Whether no row has failed."""
    return all(row.verdict != "failed" for row in rows)


def render(rows: Sequence[Row]) -> str:
    """The table: what was measured, its median, the goal, the samples' range, the verdict."""
    lines = [("measured", "median", "goal", "least to most", "")]
    for row in rows:
        spread = f"{_number(min(row.samples))} to {_number(max(row.samples))}" if len(row.samples) > 1 else ""
        value = "not measured" if row.value is None else f"{_number(row.value)} {row.unit}".strip()
        goal = "" if row.goal is None else f"{'≥' if row.at_least else '≤'} {_number(row.goal)} {row.unit}".strip()
        lines.append((row.name, value, goal, spread, row.verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = [
        "  ".join(
            cell.ljust(width) if column in (0, len(widths) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([shown[0], "─" * max(map(len, shown)), *shown[1:]])


def _number(value: float) -> str:
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
