"""What a turn costs through the product, beside the same agent driven bare over its pipe.

Phases, each with a limit of its own and each repeated; every row is the median of the repetitions:

- *first text*: a live session in a real worker of the SDK's runtime. Time from the run's start to the first result that
  carries text of the agent, less the time the bare agent takes from prompt to first text; for an agent that writes at once
  and for one that thinks for a moment first, so that a status line is already shown;
- *long answer*: 1,000,000 characters in chunks of 20, one write each, through the same worker. What goes to the host is
  counted as ASCII-escaped JSON of every result. The agent takes the time of its own writes, through us and into a reader
  that only reads. *Blocked* is what they take longer through us, as a share of the whole answer's time at the pace of a very
  fast model. As fast as it can, with nothing to wait for but its reader, an agent is held back by any reader that looks at
  what it reads; how much is shown without a goal;
- *sessions in process*: 200 sessions of the ACP driver on 200 local agents, read by the driver's own event stream (no run
  loop, which would refuse more than its limit), all in a turn at once; every event of every turn is accounted for;
- *runs in one worker*: 100 runs of 100 conversations in one real worker, all in a turn at the same moment, each with its own
  agent. Memory is the worker's peak over what it had before its first run; agents and supervisors are shown apart.

Linux only: memory and children are read from ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from agent.driver import AcpDriver
from agent.session import AcpSession
from benches.bare import BareAgent
from benches.phases import Phases
from benches.table import Row, counted
from pkg.agent_api import Prompt, SessionSpec, TextDelta, ToolFinished, ToolStarted, TurnEnded
from pkg.launch import LocalLauncher
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, sdk_worker

AGENT: Final = Path(__file__).with_name("agent.py")
REPEATS: Final = 5
MEGABYTE: Final = 1024 * 1024

FIRST_TEXT_GOAL: Final = 30.0
"""Milliseconds the first text may take longer than bare."""
BYTES_GOAL: Final = 12.0
"""Bytes to the host per byte of the answer."""
BLOCKED_GOAL: Final = 5.0
"""Percent of a fast model's time that its agent may spend waiting in writes, beyond what they take into a bare reader."""
RSS_GOAL: Final = 64.0
"""MiB that 100 runs may add to the worker."""

ANSWER_CHUNKS: Final = 50_000
CHUNK: Final = 20
FAST_MODEL: Final = 10_000
"""Chunks per second: 200 kB of text each second, more than ten times what models write."""
SESSIONS: Final = 200
RUNS: Final = 100
NUMBERED: Final = 200
"""Chunks of a numbered turn; every tenth comes with a tool call."""
OPENING_AT_ONCE: Final = 16


def command() -> tuple[str, ...]:
    """The agent's command line."""
    return (sys.executable, "-I", "-S", str(AGENT), "{}")


def form(workspace: Path) -> dict[str, Any]:
    """The runner form of every run: nothing but the agent and its workspace, all else as it comes."""
    return {"provider": "custom", "acp-command": shlex.join(command()), "workspace": str(workspace)}


# ------------------------------------------------------------------ first text


async def first_text(base: Path, repeats: int) -> list[Row]:
    """Time to the first text on a live session, through a worker and bare."""
    workspace = _made(base / "workspace")
    scripts = {
        "first text, agent writes at once": 'say "first "\npause 0.4\nsay second',
        "first text, agent thinks 100 ms first": 'think hm\npause 0.1\nsay "first "\npause 0.4\nsay second',
    }
    rows: list[Row] = []
    async with sdk_worker(built(), base / "runtime") as worker, _bare(workspace) as bare:
        await worker.run("say warm", config=form(workspace))
        for name, script in scripts.items():
            later, alone, ends = [], [], []
            for number in range(repeats * 3):
                apart, bare_end = await asyncio.to_thread(bare.turn, script)
                first, end, outcome = await _timed(worker, script, run_id=f"{name} {number}", config=form(workspace))
                if outcome.shown != ["first second"]:
                    raise AssertionError(f"not the answer: {outcome.shown}")
                alone.append(apart * 1000)
                later.append((first - apart) * 1000)
                ends.append((end - bare_end) * 1000)
            rows += [
                Row(f"{name}: over bare", _medians(later), "ms", FIRST_TEXT_GOAL),
                Row("    bare", _medians(alone), "ms"),
                Row("    end of the run, over bare", _medians(ends), "ms"),
            ]
    return rows


async def _timed(worker: SdkWorker, text: str, **more: Any) -> tuple[float, float, Outcome]:
    """Seconds to the first result that carries "first", and to the end, of one run."""
    results: list[RunnerResult] = []
    first = 0.0
    began = time.perf_counter()
    async for result in worker.stream(text, **more):
        if not first and result.type in ("message.delta", "message.completed") and "first" in json.dumps(result.data):
            first = time.perf_counter() - began
        results.append(result)
    return first, time.perf_counter() - began, Outcome(results)


def _medians(samples: Sequence[float]) -> tuple[float, ...]:
    """The median of every three in a row: one hiccup of the machine is no measurement."""
    return tuple(sorted(samples[at : at + 3])[1] for at in range(0, len(samples), 3))


# ------------------------------------------------------------------ a long answer


async def long_answer(base: Path, repeats: int) -> list[Row]:
    """What a megabyte in small pieces costs the host, and whether the agent is held back."""
    workspace = _made(base / "workspace")
    timings = base / "timings"
    expected = "".join(f"{number:019d}" for number in range(ANSWER_CHUNKS))
    sent, wrong = [], []
    blocked: list[float] = []
    ratios: dict[str, list[float]] = {"fast model": [], "unbounded": []}
    longest: dict[str, list[float]] = {name: [] for name in (*ratios, "bare fast model", "bare unbounded")}
    spans: list[float] = []
    async with sdk_worker(built(), base / "runtime") as worker, _bare(workspace) as bare:
        await worker.run("say warm", config=form(workspace))
        for number in range(repeats):
            for name, rate in (("fast model", FAST_MODEL), ("unbounded", 0)):
                script = f"answer {ANSWER_CHUNKS} {rate} {timings}"
                await asyncio.to_thread(bare.turn, script)
                alone = json.loads(timings.read_text())
                outcome = await worker.run(script, run_id=f"{name} {number}", config=form(workspace))
                ours = json.loads(timings.read_text())
                sent.append(sum(len(json.dumps(each.model_dump(mode="json"))) for each in outcome.results))
                wrong.append(float("".join(outcome.text.split()) != expected))
                ratios[name].append(ours["total"] / alone["total"])
                longest[name].append(ours["longest"] * 1000)
                longest[f"bare {name}"].append(alone["longest"] * 1000)
                if name == "unbounded":
                    spans.append(ours["span"] / alone["span"])
                else:
                    blocked.append(100 * (ours["total"] - alone["total"]) / alone["span"])
    return [
        Row("1 MB answer: bytes to the host", tuple(size / (ANSWER_CHUNKS * CHUNK) for size in sent), "× answer", BYTES_GOAL),
        counted("1 MB answer: answers not whole", wrong),
        Row(f"agent blocked, at {FAST_MODEL:,} chunks per second", tuple(blocked), "% of its time", BLOCKED_GOAL),
        Row("    its writing", tuple(ratios["fast model"]), "× bare"),
        Row("    its longest write", tuple(longest["fast model"]), "ms"),
        Row("    bare", tuple(longest["bare fast model"]), "ms"),
        Row("agent's writing as fast as it can", tuple(ratios["unbounded"]), "× bare"),
        Row("    its longest write", tuple(longest["unbounded"]), "ms"),
        Row("    bare", tuple(longest["bare unbounded"]), "ms"),
        Row("    from first to last write", tuple(spans), "× bare"),
    ]


# ------------------------------------------------------------------ many sessions in process


async def sessions_in_process(base: Path, repeats: int) -> list[Row]:
    """200 sessions of the driver at once: every event of every turn."""
    workspace = _made(base / "workspace")
    driver, launcher = AcpDriver(), LocalLauncher()
    spec = SessionSpec(command=command(), cwd=str(workspace), startup_timeout=300.0, initialize_timeout=300.0)
    gate = asyncio.Semaphore(OPENING_AT_ONCE)
    sessions: list[AcpSession] = []
    wrong: list[float] = []
    rates: list[float] = []

    async def opened() -> None:
        async with gate:
            sessions.append(await driver.open(spec, launcher))

    before = _memory(os.getpid(), "VmRSS")
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(SESSIONS):
                group.create_task(opened())
        for _ in range(repeats):
            began = time.perf_counter()
            found = await asyncio.gather(*map(numbered_turn, sessions))
            rates.append(SESSIONS * len(expected_events()) / (time.perf_counter() - began))
            wrong.append(float(sum(difference(expected_events(), each) for each in found)))
        grown = _memory(os.getpid(), "VmRSS") - before
    finally:
        await asyncio.gather(*(_closed(session, gate) for session in sessions))
    return [
        counted(f"{SESSIONS} sessions in process: events lost, doubled or out of order", wrong),
        Row("    events per second, all sessions", tuple(rates)),
        Row("    memory per session", (grown / SESSIONS,), "KiB"),
    ]


async def _closed(session: AcpSession, gate: asyncio.Semaphore) -> None:
    async with gate:
        await session.close()


async def numbered_turn(session: AcpSession) -> list[str]:
    """One numbered turn of a session, event by event."""
    await session.prompt(Prompt(f"numbered {NUMBERED}"))
    found: list[str] = []
    async for event in session.events():
        match event:
            case TextDelta():
                found += event.text.split()
            case ToolStarted():
                found.append(f"start {event.tool_call_id.partition('#')[0]}")
            case ToolFinished():
                found.append(f"{event.status} {event.tool_call_id.partition('#')[0]}")
            case TurnEnded():
                found.append(event.stop_reason)
                return found
    return found


def expected_events() -> list[str]:
    """A numbered turn, event by event."""
    expected: list[str] = []
    for number in range(NUMBERED):
        if number % 10 == 0:
            expected += [f"start t{number}", f"completed t{number}"]
        expected.append(str(number))
    return [*expected, "end_turn"]


def difference(expected: Sequence[str], found: Sequence[str]) -> int:
    """How many are missing or too many; where none is, how many stand in another place."""
    wanted, got = Counter(expected), Counter(found)
    amount = (wanted - got).total() + (got - wanted).total()
    return amount or sum(one != other for one, other in zip(expected, found, strict=True))


# ------------------------------------------------------------------ many runs in one worker


async def runs_in_one_worker(base: Path, repeats: int) -> list[Row]:
    """100 runs at once in one worker: its memory, and every event."""
    workspace = _made(base / "workspace")
    grown, waiting, wrong, agents, supervisors = [], [], [], [], []
    for number in range(repeats):
        async with sdk_worker(built(), base / f"runtime-{number}") as worker:
            pid = worker.pid()
            idle = _memory(pid, "VmRSS")
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again at what it is now
            release = base / f"release-{number}"
            script = f'say "ready "\nuntil {release}\nnumbered {NUMBERED}'
            ready = asyncio.Semaphore(0)
            async with asyncio.TaskGroup() as group:
                runs = [
                    group.create_task(
                        _until_ready(worker, ready, script, run_id=f"r{each}", conversation=f"c{each}", workspace=workspace)
                    )
                    for each in range(RUNS)
                ]
                for _ in range(RUNS):
                    await ready.acquire()
                resting = _children_memory(pid)
                waiting.append((_memory(pid, "VmRSS") - idle) / 1024)
                release.touch()
            agents.append(resting[0] / 1024)
            supervisors.append(resting[1] / 1024)
            grown.append((_memory(pid, "VmHWM") - idle) / 1024)
            wrong.append(float(sum(_wrong(run.result()) for run in runs)))
    return [
        Row(f"{RUNS} runs in one worker: its peak over idle", tuple(grown), "MiB", RSS_GOAL),
        Row("    while all agents think", tuple(waiting), "MiB"),
        counted(f"{RUNS} runs in one worker: events lost, doubled or out of order", wrong),
        Row("    memory of their agents (shared pages counted each time)", tuple(agents), "MiB"),
        Row("    memory of their supervisors (likewise)", tuple(supervisors), "MiB"),
    ]


async def _until_ready(worker: SdkWorker, ready: asyncio.Semaphore, script: str, *, workspace: Path, **more: Any) -> Outcome:
    """One run; releases ``ready`` when its agent's first word is shown, or when it ends without."""
    results: list[RunnerResult] = []
    shown = False
    try:
        async for result in worker.stream(script, config=form(workspace), **more):
            results.append(result)
            if not shown and "ready" in json.dumps(result.data):
                shown = True
                ready.release()
    finally:
        if not shown:
            ready.release()
    return Outcome(results)


def _wrong(outcome: Outcome) -> int:
    """What is missing, too much or in another place in the answer and in the ledger of one run."""
    answer = difference(["ready", *map(str, range(NUMBERED))], "".join(outcome.shown).split())
    calls = [f"t{number}" for number in range(0, NUMBERED, 10)]
    recorded = {
        kind: [str(each.data["tool_call_id"]) for each in outcome.results if each.type == f"tool.call.{kind}"]
        for kind in ("started", "completed")
    }
    unrecorded = sum(
        int(line.split()[1]) for line in outcome.log.splitlines() if line.startswith("coding.tool_calls_not_recorded")
    )
    started = recorded["started"]
    ledger = abs(len(calls) - len(started) - unrecorded) + (started != [call for call in calls if call in started])
    return answer + ledger + (recorded["completed"] != started) + (outcome.reason != "stop")


# ------------------------------------------------------------------ the machine


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@contextlib.asynccontextmanager
async def _bare(workspace: Path) -> AsyncIterator[BareAgent]:
    agent = await asyncio.to_thread(BareAgent, command(), workspace)
    try:
        yield agent
    finally:
        await asyncio.to_thread(agent.close)


def _memory(pid: int, field: str) -> int:
    """One memory number of a process in KiB, zero when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0


def _children_memory(pid: int) -> tuple[int, int]:
    """KiB of a worker's agents and of their supervisors."""
    agents = supervisors = 0
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"process_supervisor" in Path(f"/proc/{child}/cmdline").read_bytes():
                supervisors += _memory(child, "VmRSS")
            else:
                agents += _memory(child, "VmRSS")
    return agents, supervisors


# ------------------------------------------------------------------ all of it

PHASES: Final[Phases] = {
    "first-text": (first_text, 180.0),
    "long-answer": (long_answer, 600.0),
    "sessions": (sessions_in_process, 600.0),
    "runs": (runs_in_one_worker, 900.0),
}
"""Each phase and the seconds it may take with ``REPEATS`` repetitions on two busy cores."""
