"""The benchmarks' table and verdict, their agent, and that a numbered turn's account notices what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benches import claude, codex, programs, relay, relay_ends, table, turn
from benches.bare import BareAgent
from benches.table import Row
from testkit import acp_harness as acp
from tooling import ROOT


@pytest.mark.parametrize(
    ("samples", "goal", "verdict"),
    [
        ((30.0,), 30.0, "met"),
        ((-5.0,), 30.0, "met"),
        ((30.1,), 30.0, "missed"),
        ((60.0,), 30.0, "missed"),
        ((60.1,), 30.0, "failed"),
        ((0.0,), 0.0, "met"),
        ((1.0,), 0.0, "failed"),
        ((1e9,), None, ""),
        ((), 30.0, "failed"),
        ((), None, "failed"),
    ],
)
def test_a_number_may_miss_its_goal_up_to_twice(samples: tuple[float, ...], goal: float | None, verdict: str) -> None:
    """Our rule: worse than twice the goal fails; what could not be measured fails; information cannot."""
    row = Row("x", samples, "ms", goal)
    assert row.verdict == verdict
    assert table.passed([Row("y", (1.0,), "", 1.0), row]) is (verdict != "failed")


@pytest.mark.parametrize(
    ("samples", "verdict"), [((2.5,), "met"), ((9.0,), "met"), ((2.4,), "missed"), ((1.25,), "missed"), ((1.24,), "failed")]
)
def test_a_number_that_should_be_large_may_miss_its_goal_down_to_half(samples: tuple[float, ...], verdict: str) -> None:
    """Our rule: worse than twice the goal means less than half of it where more is better; nothing measured fails here, too."""
    assert Row("x", samples, "×", 2.5, at_least=True).verdict == verdict
    assert Row("x", (), "×", 2.5, at_least=True).verdict == "failed"


def test_the_median_of_the_samples_is_judged() -> None:
    """Our rule: one hiccup of the machine decides nothing, a count of lost events does."""
    assert Row("x", (1.0, 900.0, 2.0, 1.0, 3.0), "ms", 2.0).verdict == "met"
    assert table.counted("lost", [0.0, 0.0, 1.0, 0.0, 0.0]).verdict == "failed"
    assert table.counted("lost", [0.0] * 5).verdict == "met"


def test_the_table_shows_the_goal_beside_each_number() -> None:
    """One line per row: what, median, goal, spread, verdict."""
    rows = [
        Row("first", (10.0, 20.0, 1234.5), "ms", 30.0),
        Row("bare", (0.5,), "ms"),
        Row("runs", (), "MiB", 64.0),
        Row("relay", (3.0,), "×", 2.5, at_least=True),
    ]
    lines = table.render(rows).splitlines()
    assert lines[0].split() == ["measured", "median", "goal", "least", "to", "most"]
    assert lines[2].split() == ["first", "20", "ms", "≤", "30", "ms", "10", "to", "1,234", "met"]
    assert lines[3].split() == ["bare", "0.50", "ms"]
    assert lines[4].split() == ["runs", "not", "measured", "≤", "64", "MiB", "failed"]
    assert lines[5].split() == ["relay", "3", "×", "≥", "2.50", "×", "met"]


def test_a_lost_doubled_or_moved_event_is_counted() -> None:
    """Our rule: the account of a turn is complete in both directions, and in order."""
    whole = turn.expected_events()
    assert len(whole) == len(set(whole)) == turn.NUMBERED * 12 // 10 + 1
    assert turn.difference(whole, whole) == 0
    assert turn.difference(whole, whole[:7] + whole[8:]) == 1
    assert turn.difference(whole, [*whole[:7], *whole[6:]]) == 1
    assert turn.difference(whole, [*whole[:5], whole[6], whole[5], *whole[7:]]) == 2


@pytest.mark.asyncio
async def test_a_numbered_turn_of_a_real_session_is_whole(tmp_path: Path) -> None:
    """The benchmarks' agent says, through the driver, exactly what is expected of it."""
    async with acp.opened(tmp_path, command=turn.command()) as session:
        assert turn.difference(turn.expected_events(), await turn.numbered_turn(session)) == 0


def test_a_bare_agent_answers_and_times_its_own_writes(tmp_path: Path) -> None:
    """The comparison's other side: first text within the turn, the agent's writing time within its span, no process left."""
    agent = BareAgent(turn.command(), tmp_path)
    try:
        first, end = agent.turn("say one\npause 0.05\nsay two")
        assert 0 < first < end
        timings = tmp_path / "timings"
        agent.turn(f"answer 100 0 {timings}")
        measured = json.loads(timings.read_text())
        assert 0 < measured["longest"] <= measured["total"] <= measured["span"]
    finally:
        agent.close()


@pytest.mark.asyncio
@pytest.mark.sdk_worker
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(claude.PROGRAM, marks=pytest.mark.real_claude, id="claude-code"),
        pytest.param(codex.PROGRAM, marks=pytest.mark.real_codex, id="codex"),
    ],
)
async def test_a_real_program_is_measured_beside_itself(program: programs.Program, tmp_path: Path) -> None:
    """Live and cold, each over the same program driven bare in the same minute; how fast it is is no verdict."""
    rows = await programs.first_text(program, tmp_path, 1)
    assert [(row.goal, len(row.samples)) for row in rows] == [(30.0, 1), (None, 1), (60.0, 1), (None, 1), (None, 1)]
    live, alone, cold, started, tools = (row.samples[0] for row in rows)
    assert 0 < alone < started
    assert alone + live > 0 and started + cold > 0 and started + tools > 0


@pytest.mark.asyncio
async def test_the_three_relays_run_the_same_jobs_between_two_processes(tmp_path: Path) -> None:
    """The relay's comparison is of equals: each brings every event of every job, and an event has the size that is said."""
    async with relay.bare() as bare, relay.stock() as stock, relay.ours(tmp_path) as ours:
        for run in (bare, stock, ours):
            accounts = await run(3, 40, 200, 0.0)
            assert [each.count for each in accounts] == [40, 40, 40]
            assert relay.missing(accounts, 40) == 0
            assert all(late > 0 for each in accounts for late in each.late)
    event = {"n": 1234, "at": time.monotonic(), "text": relay_ends.text_of(200)}
    assert 190 <= len(json.dumps(event)) <= 210


def test_a_relayed_event_that_is_lost_doubled_or_moved_is_counted() -> None:
    """Our rule: the account of a job is complete in both directions, and in order."""
    for numbers in ([0, 1, 3], [0, 1, 1, 2], [1, 0, 2], [0, 1]):
        account = relay.Account()
        for number in numbers:
            account.take({"n": number, "at": 0.0})
        assert relay.missing([account], 3) > 0, numbers
    whole = relay.Account()
    for number in range(3):
        whole.take({"n": number, "at": 0.0})
    assert relay.missing([whole], 3) == 0


def test_the_command_lists_its_benchmarks() -> None:
    """``scripts/bench.py`` without a benchmark says what there is, and measures nothing."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "turn" in done.stderr
    assert "relay" in done.stderr
