"""When a run must end although its agent goes on: a clock without I/O."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pkg import limits
from pkg.agent_api import AgentEvent, ApprovalRequested, TextDelta, ThoughtDelta, ToolFinished, ToolStarted, TurnEnded
from pkg.run_clock import RunClock


def clock(*, timeout: float = 1800.0, deadline: float | None = None, idle: float = 900.0) -> RunClock:
    return RunClock(0.0, timeout=timeout, deadline_in=deadline, idle=idle)


@pytest.mark.parametrize(
    ("timeout", "deadline", "ends"),
    [(1800, None, 1785), (1800, 300, 285), (100, 300, 85), (20, None, 10), (1800, 6, 3), (1800, -5, 0)],
)
def test_the_earlier_limit_counts_and_a_margin_is_left(timeout: float, deadline: float | None, ends: float) -> None:
    """Our rule: 15 s before the limit, half of it when it is short."""
    made = clock(timeout=timeout, deadline=deadline, idle=0)
    assert made.due(ends - 0.01) is None
    assert made.due(ends) == "time"


def test_any_event_resets_the_idle_time() -> None:
    """Our rule: silence is not failure, and a thought is not silence."""
    made = clock(idle=10)
    made.event(ThoughtDelta("hm"), 9)
    assert made.due(18.9) is None
    assert made.due(19) == "idle"


def test_idle_time_does_not_pass_while_a_tool_runs_or_a_question_is_open() -> None:
    """Our rule."""
    made = clock(idle=10)
    made.event(ToolStarted("a", "make"), 1)
    made.event(ToolStarted("b", "test"), 2)
    made.event(ToolFinished("a", "completed"), 3)
    assert made.due(500) is None
    made.event(ToolFinished("b", "completed"), 500)
    made.event(ApprovalRequested("q", "Do", "edit", ()), 501)
    assert made.due(1000) is None
    made.answered("q", 1000)
    assert made.due(1009.9) is None
    assert made.due(1010) == "idle"


def test_a_turns_end_closes_what_was_left_open() -> None:
    """Our rule: nothing pending outlives its turn."""
    made = clock(idle=10)
    made.event(ToolStarted("a", "make"), 1)
    made.event(TurnEnded("cancelled"), 2)
    assert not made.paused
    assert made.due(12) == "idle"


def test_before_the_first_prompt_nobody_is_idle() -> None:
    """Our rule: starting and waiting have limits of their own."""
    made = clock(idle=10)
    made.pause("starting")
    assert made.due(100) is None
    made.answered("starting", 100)
    assert made.due(110) == "idle"


def test_an_idle_time_of_zero_never_ends_a_run() -> None:
    """The form's own meaning."""
    assert clock(idle=0).due(1784) is None


@given(
    timeout=st.floats(1, 1e5),
    deadline=st.none() | st.floats(-10, 1e5),
    idle=st.floats(0, 1e4),
    steps=st.lists(st.tuples(st.floats(0, 500), st.sampled_from(["text", "tool", "done", "end"])), max_size=20),
)
def test_the_soft_end_is_never_after_the_limit_and_never_moved_by_events(
    timeout: float, deadline: float | None, idle: float, steps: list[tuple[float, str]]
) -> None:
    """Our rule, over all combinations."""
    made = clock(timeout=timeout, deadline=deadline, idle=idle)
    limit = min(timeout, math.inf if deadline is None else max(deadline, 0))
    now = 0.0
    events: dict[str, AgentEvent] = {
        "text": TextDelta("x"),
        "tool": ToolStarted("t", "t"),
        "done": ToolFinished("t", "completed"),
        "end": TurnEnded("x"),
    }
    for wait, kind in steps:
        now += wait
        made.event(events[kind], now)
    assert made.due(max(now, limit)) == "time"
    if limit > 2 * limits.SOFT_END_MARGIN:
        assert clock(timeout=timeout, deadline=deadline, idle=0).due(limit - limits.SOFT_END_MARGIN - 0.01) is None
