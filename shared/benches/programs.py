"""What a turn of a program with a package of its own costs through the product, beside the same program driven bare.

The program is the real one, pinned, and its model a loopback server that answers at once. Phases:

- *first text*: time from the run's start to the first result that carries text, through the built package in a real worker,
  less the time the bare program takes from the message (or from its own start) to the first text. *Live*: the program is
  already there. *Cold*: it is started for the message. *Cold with LangBot's tools* adds the handshake with the tool server,
  and has no goal;
- *sessions*: resident memory of our side for each live session: what the worker grows by, and each session's supervisor.

Linux only: memory is read from ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from benches.phases import Phases
from benches.table import Row
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, sdk_worker
from tooling import agents

SAMPLES: Final = 3
"""Samples behind each repetition's median."""
LIVE_GOAL: Final = 30.0
"""Milliseconds the first text may take longer than bare in a live session."""
COLD_GOAL: Final = 60.0
"""Milliseconds it may take longer where the program is started for it."""
SESSIONS: Final = 8
SCRIPT: Final = "[[ say first second ]]"


class Bare(Protocol):
    """The program with the arguments we give it and the least that can stand on the other side; every call blocks."""

    began: float
    """When it was started."""

    def turn(self, text: str) -> float:
        """The time at which the first text of the answer is there; returns when the turn is over."""
        ...

    def close(self) -> None:
        """End the program."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """One program, its package and its model."""

    package: str
    agents: agents.Agents
    path: Callable[[], Path]
    """The installed program."""
    fixture: Callable[[Path], AbstractAsyncContextManager[Mapping[str, str]]]
    """The model while it runs, for an account with this home: the environment for talking to it."""
    bare: Callable[[Path, Path, Mapping[str, str]], Bare]
    """Starts the program by itself in a directory, with an environment."""


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a bare program by closing its input, and by force when that is not enough."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Bench:
    """A home, a workspace, a model and a worker."""

    def __init__(self, program: Program, workspace: Path, env: Mapping[str, str], worker: SdkWorker) -> None:
        self.worker = worker
        self._program = program
        self._workspace = workspace
        self._env = dict(env)

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form: the program and its workspace, all else as it comes."""
        base = {"command": str(self._program.path()), "workspace": str(self._workspace), "env-json": self._env}
        return {**base, "langbot-assets-enabled": False, **fields}

    async def first(self, conversation: str, number: int, **fields: Any) -> float:
        """Seconds from a run's start to the first result that carries text."""
        began, first = time.perf_counter(), 0.0
        results: list[RunnerResult] = []
        run_id, config = f"{conversation} {number}", self.form(**fields)
        async for result in self.worker.stream(SCRIPT, run_id=run_id, conversation=conversation, config=config):
            if not first and result.type in ("message.delta", "message.completed") and "first" in json.dumps(result.data):
                first = time.perf_counter() - began
            results.append(result)
        if Outcome(results).shown != ["first second"]:
            raise AssertionError(f"not the answer: {Outcome(results).shown}")
        return first

    def bare(self) -> Bare:
        """The program by itself."""
        return self._program.bare(self._program.path(), self._workspace, self._env)


@contextlib.asynccontextmanager
async def _bench(program: Program, base: Path) -> AsyncIterator[Bench]:
    await asyncio.to_thread(program.agents.ensure)
    package = await asyncio.to_thread(built, program.package)
    home, workspace = base / "home", base / "workspace"
    for each in (home, workspace):
        each.mkdir()
    account = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    async with program.fixture(home) as env, sdk_worker(package, base / "runtime", name=program.package) as worker:
        yield Bench(program, workspace, {**account, "HOME": str(home), **env}, worker)


async def first_text(program: Program, base: Path, repeats: int) -> list[Row]:
    """Time to the first text, live and cold, through a worker and bare."""
    async with _bench(program, base) as bench:
        live, alone, cold, started, tools = [], [], [], [], []
        bare = await asyncio.to_thread(bench.bare)
        try:
            await asyncio.to_thread(bare.turn, SCRIPT)
            await bench.first("live", -1)
            for number in range(repeats * SAMPLES):
                began = time.perf_counter()
                apart = await asyncio.to_thread(bare.turn, SCRIPT) - began
                alone.append(apart * 1000)
                live.append((await bench.first("live", number) - apart) * 1000)
        finally:
            await asyncio.to_thread(bare.close)
        for number in range(repeats * SAMPLES):
            single = await asyncio.to_thread(bench.bare)
            try:
                apart = await asyncio.to_thread(single.turn, SCRIPT) - single.began
            finally:
                await asyncio.to_thread(single.close)
            started.append(apart * 1000)
            once = {"reuse-session": False, "keep-warm": 0}
            cold.append((await bench.first(f"cold {number}", number, **once) - apart) * 1000)
            with_tools = await bench.first(f"tools {number}", number, **once, **{"langbot-assets-enabled": True})
            tools.append((with_tools - apart) * 1000)
    return [
        Row("first text, live session: over bare", _medians(live), "ms", LIVE_GOAL),
        Row("    bare", _medians(alone), "ms"),
        Row("first text, cold: over bare", _medians(cold), "ms", COLD_GOAL),
        Row("    bare, from its start", _medians(started), "ms"),
        Row("    cold with LangBot's tools: over bare", _medians(tools), "ms"),
    ]


async def sessions(program: Program, base: Path, repeats: int) -> list[Row]:
    """Memory of our side for each live session."""
    grown, supervisors = [], []
    for number in range(repeats):
        place = base / f"{number}"
        place.mkdir()
        async with _bench(program, place) as bench:
            pid = bench.worker.pid()
            await bench.first("warm", 0)
            before, counted = _memory(pid), len(_supervisors(pid))
            for each in range(SESSIONS):
                await bench.first(f"session {each}", each)
            grown.append((_memory(pid) - before) / SESSIONS / 1024)
            living = _supervisors(pid)
            if len(living) - counted != SESSIONS:
                raise AssertionError(f"{len(living) - counted} sessions live, not {SESSIONS}")
            supervisors.append(sum(map(_memory, living)) / len(living) / 1024)
    return [
        Row("a live session: what the worker grows by", tuple(grown), "MiB"),
        Row("    its supervisor (shared pages counted)", tuple(supervisors), "MiB"),
    ]


def phases_of(program: Program) -> Phases:
    """Each phase and the seconds it may take with five repetitions on two busy cores."""
    return {
        "first-text": (functools.partial(first_text, program), 300.0),
        "sessions": (functools.partial(sessions, program), 600.0),
    }


def _medians(samples: Sequence[float]) -> tuple[float, ...]:
    """The median of every few in a row: one hiccup of the machine is no measurement."""
    return tuple(sorted(samples[at : at + SAMPLES])[SAMPLES // 2] for at in range(0, len(samples), SAMPLES))


def _memory(pid: int) -> int:
    """Resident KiB of a process, zero when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def _supervisors(pid: int) -> list[int]:
    """The supervisors below a worker."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"process_supervisor" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found
