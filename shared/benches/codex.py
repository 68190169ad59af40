"""What a turn of Codex costs through the product, beside the same app-server driven bare over its pipe.

The program is the real one, pinned, and its model a loopback server that answers at once. *First text*: time from the run's
start to the first result that carries text, through the built package in a real worker, less the time the bare program takes
from the message (or from its own start) to the first text. *Live*: the program is already there. *Cold*: it is started for the
message. *Cold with LangBot's tools* adds the handshake with the tool server, and has no goal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from benches.phases import Phases
from benches.table import Row
from testkit.responses_fixture import ResponsesFixture, codex_home, responses_fixture
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, sdk_worker
from tooling import agents

REPEATS: Final = 5
PACKAGE: Final = "CodexAgent"
SAMPLES: Final = 3
"""Samples behind each repetition's median."""
LIVE_GOAL: Final = 30.0
"""Milliseconds the first text may take longer than bare in a live session."""
COLD_GOAL: Final = 60.0
"""Milliseconds it may take longer where the program is started for it."""
SCRIPT: Final = "[[ say first second ]]"


class BareCodex:
    """The app-server as we start it and the least that can stand on the other side; every call blocks."""

    def __init__(self, program: Path, workspace: Path, env: Mapping[str, str]) -> None:
        """Start the program and a thread."""
        flags = ["-c", "features.instant_interrupt=false", "-c", "features.unbounded_connection_retries=false"]
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(program), *flags, "app-server"],
            cwd=workspace,
            env={**env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._count = 0
        info = {"name": "bench", "title": "bench", "version": "1"}
        self._call("initialize", {"clientInfo": info, "capabilities": {"experimentalApi": True}})
        self._send({"method": "initialized"})
        started = self._call(
            "thread/start", {"cwd": str(workspace), "approvalPolicy": "untrusted", "sandbox": "workspace-write"}
        )
        self._thread = started["thread"]["id"]

    def turn(self, text: str) -> float:
        """The time at which the first text of the answer is there; returns when the turn is over."""
        self._count += 1
        params = {"threadId": self._thread, "input": [{"type": "text", "text": text}]}
        self._send({"id": self._count, "method": "turn/start", "params": params})
        first = 0.0
        while True:
            message = self._read()
            if not first and message.get("method") == "item/agentMessage/delta":
                first = time.perf_counter()
            if message.get("method") == "turn/completed":
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

    def _call(self, method: str, params: Any) -> Any:
        self._count += 1
        self._send({"id": self._count, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self._count and "method" not in message:
                return message["result"]

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the program has ended")
        message: dict[str, Any] = json.loads(line)
        return message


class Bench:
    """A home, a workspace, a model and a worker."""

    def __init__(self, base: Path, program: Path, fixture: ResponsesFixture, worker: SdkWorker) -> None:
        self.base, self.program, self.worker = base, program, worker
        self.workspace = base / "workspace"
        self.workspace.mkdir()
        account = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.env = {**account, **codex_home(base / "home", fixture.url)}

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

    def bare(self) -> BareCodex:
        """The program by itself."""
        return BareCodex(self.program, self.workspace, self.env)


@contextlib.asynccontextmanager
async def _bench(base: Path) -> AsyncIterator[Bench]:
    await asyncio.to_thread(agents.CODEX.ensure)
    package = await asyncio.to_thread(built, PACKAGE)
    async with responses_fixture() as fixture, sdk_worker(package, base / "runtime", name=PACKAGE) as worker:
        yield Bench(base, agents.codex(), fixture, worker)


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


def _medians(samples: Sequence[float]) -> tuple[float, ...]:
    """The median of every few in a row: one hiccup of the machine is no measurement."""
    return tuple(sorted(samples[at : at + SAMPLES])[SAMPLES // 2] for at in range(0, len(samples), SAMPLES))


PHASES: Final[Phases] = {"first-text": (first_text, 300.0)}
"""Each phase and the seconds it may take with ``REPEATS`` repetitions on two busy cores."""
