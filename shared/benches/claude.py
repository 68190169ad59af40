"""What a turn of Claude Code costs through the product, beside the same program driven bare over its pipe.

The program is the real one, pinned, and its model a loopback server that answers at once. Phases:

- *first text*: time from the run's start to the first result that carries text, through the built package in a real worker,
  less the time the bare program takes from the message (or from its own start) to the first text. *Live*: the program is
  already there. *Cold*: it is started for the message. *Cold with LangBot's tools* adds the program's handshake with the tool
  server, which is the program's own work, and has no goal;
- *sessions*: resident memory of our side for each live session: what the worker grows by, and each session's supervisor.

Linux only: memory is read from ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from benches.phases import Phases
from benches.table import Row
from testkit.anthropic_fixture import AnthropicFixture, anthropic_fixture
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, sdk_worker
from tooling import agents

REPEATS: Final = 5
PACKAGE: Final = "ClaudeCodeAgent"
SAMPLES: Final = 3
"""Samples behind each repetition's median."""
LIVE_GOAL: Final = 30.0
"""Milliseconds the first text may take longer than bare in a live session."""
COLD_GOAL: Final = 60.0
"""Milliseconds it may take longer where the program is started for it."""
SESSIONS: Final = 8
SCRIPT: Final = "[[ say first second ]]"
_FIRST: Final = b'"text_delta","text":"first'


class BareClaude:
    """The program with the arguments we give it and the least that can stand on the other side; every call blocks."""

    def __init__(self, program: Path, workspace: Path, env: Mapping[str, str]) -> None:
        """Start the program."""
        flags = ["-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
        flags += ["--include-partial-messages", "--permission-prompt-tool", "stdio", "--system-prompt-snapshot", "off"]
        flags += ["--setting-sources", "user", "--strict-mcp-config", f"--session-id={uuid.uuid4()}"]
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(program), *flags], cwd=workspace, env={**env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def turn(self, text: str) -> float:
        """The time at which the first text of the answer is there; returns when the program is idle again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        message = {"type": "user", "message": {"role": "user", "content": text}, "client_composed": True}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        first, tail = 0.0, b""
        while True:
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the program has ended")
            tail = tail[-4096:] + data
            if not first and _FIRST in tail.replace(b" ", b""):
                first = time.perf_counter()
            if b'"type":"result"' in tail.replace(b" ", b""):
                return first

    def close(self) -> None:
        """End the program by closing its input, and by force when that is not enough."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Bench:
    """A home, a workspace, a model and a worker."""

    def __init__(self, base: Path, program: Path, fixture: AnthropicFixture, worker: SdkWorker) -> None:
        self.base, self.program, self.worker = base, program, worker
        self.workspace = base / "workspace"
        self.workspace.mkdir()
        (base / "home").mkdir()
        account = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.env = {**account, **fixture.environment(), "HOME": str(base / "home")}

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form: the program and its workspace, all else as it comes."""
        base = {"command": str(self.program), "workspace": str(self.workspace), "env-json": self.env}
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

    def bare(self) -> BareClaude:
        """The program by itself."""
        return BareClaude(self.program, self.workspace, self.env)


@contextlib.asynccontextmanager
async def _bench(base: Path) -> AsyncIterator[Bench]:
    await asyncio.to_thread(agents.CLAUDE_CODE.ensure)
    package = await asyncio.to_thread(built, PACKAGE)
    async with anthropic_fixture() as fixture, sdk_worker(package, base / "runtime", name=PACKAGE) as worker:
        yield Bench(base, agents.claude_code(), fixture, worker)


async def first_text(base: Path, repeats: int) -> list[Row]:
    """Time to the first text, live and cold, through a worker and bare."""
    rows: list[Row] = []
    async with _bench(base) as bench:
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
        rows += [
            Row("first text, live session: over bare", _medians(live), "ms", LIVE_GOAL),
            Row("    bare", _medians(alone), "ms"),
            Row("first text, cold: over bare", _medians(cold), "ms", COLD_GOAL),
            Row("    bare, from its start", _medians(started), "ms"),
            Row("    cold with LangBot's tools: over bare", _medians(tools), "ms"),
        ]
    return rows


async def sessions(base: Path, repeats: int) -> list[Row]:
    """Memory of our side for each live session."""
    grown, supervisors = [], []
    for number in range(repeats):
        place = base / f"{number}"
        place.mkdir()
        async with _bench(place) as bench:
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


PHASES: Final[Phases] = {"first-text": (first_text, 300.0), "sessions": (sessions, 600.0)}
"""Each phase and the seconds it may take with ``REPEATS`` repetitions on two busy cores."""
