"""The processes on the other side of the relay's measurements, and the jobs that all three kinds of relay run.

``python -m benches.relay_ends KIND``, settings as one JSON object on stdin, news as JSON lines on stdout. The kinds ``bare``,
``stock`` and ``ours`` are a daemon each; ``stock-hub`` and ``our-hub`` a hub that says how much memory it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import connect

from pkg.agent_api import Json
from pkg.daemon_relay import AgentRuntimeDaemonClient, AgentRuntimeDaemonHub

LIFETIME: Final = 150.0
"""Seconds after which a process of this module ends by itself."""
DAEMON: Final = "bench"
BESIDE_TEXT: Final = 42
"""Bytes of an event's JSON that are not its text."""
CONNECT: Final = 30.0


@functools.cache
def text_of(size: int) -> str:
    """Plain words for an event whose JSON is about ``size`` bytes, the same at every call."""
    chosen = random.Random(size)
    letters = "etaoinshrdlu"
    words = ("".join(chosen.choices(letters, k=chosen.randint(2, 9))) for _ in range(size))
    return " ".join(words)[: size - BESIDE_TEXT]


def say(**news: Json) -> None:
    """One line for the process that measures."""
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


class Script:
    """The jobs of one daemon: they wait for each other, and then say what their specification says.

    ``{"jobs", "count", "size", "pause", "round"}``: how many jobs begin together, how many events of how many bytes each of
    them gives, the seconds before each event, and a name of its own for every such group.
    """

    def __init__(self) -> None:
        """No group is known yet."""
        self._groups: dict[str, asyncio.Barrier] = {}

    async def speak(self, spec: Json, emit: Callable[[Json], Awaitable[None]]) -> None:
        """Give one job's events to ``emit``."""
        text, pause = text_of(spec["size"]), spec["pause"]
        await self._groups.setdefault(spec["round"], asyncio.Barrier(spec["jobs"])).wait()
        for number in range(spec["count"]):
            if pause:
                await asyncio.sleep(pause)
            await emit({"n": number, "at": time.monotonic(), "text": text})


class OurDaemon(AgentRuntimeDaemonClient):
    """Runs scripts; ``{"offline": count, "size"}`` gives one event, and ``count`` more while it has no connection."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self._script = Script()
        self._lost = asyncio.Event()

    def on_state(self, state: str, detail: str = "") -> None:
        if state == "lost":
            self._lost.set()
        else:
            self._lost.clear()

    async def run_job(self, job_id: str, payload: Json) -> None:
        if payload.get("hold"):
            await asyncio.Event().wait()
        if not payload.get("offline"):
            await self._script.speak(payload, lambda event: self.emit_event(job_id, event))
            return
        text = text_of(payload["size"])
        await self.emit_event(job_id, {"n": 0, "at": time.monotonic(), "text": text})
        await self._lost.wait()
        for number in range(payload["offline"]):
            await self.emit_event(job_id, {"n": number + 1, "at": time.monotonic(), "text": text})
        say(journaled=payload["offline"], connected=self.connected)


def stock_daemon(url: str, token: str, daemon_id: str) -> Any:
    """A daemon of the SDK's own relay that runs scripts."""
    from langbot_plugin.api.agent_tools import daemon as stock

    class StockDaemon(stock.AgentRuntimeDaemonClient):
        script = Script()

        async def run_job(self, job_id: str, payload: dict[str, Any]) -> None:
            await self.script.speak(payload, lambda event: self.emit_event(job_id, event))

    return StockDaemon(url=url, daemon_id=daemon_id, token=token)


async def bare_daemon(url: str) -> None:
    """One JSON frame for each event and nothing else: what websockets and json cost alone."""
    script = Script()
    async with connect(url, compression=None) as socket, asyncio.TaskGroup() as group:

        async def run(job: int, spec: Json) -> None:
            async def emit(event: Json) -> None:
                await socket.send(json.dumps({"job": job, "event": event}, separators=(",", ":")))

            await script.speak(spec, emit)
            await socket.send(json.dumps({"job": job, "end": True}))

        async for frame in socket:
            start = json.loads(frame)
            for job in range(start["jobs"]):
                group.create_task(run(job, start))


@contextlib.asynccontextmanager
async def our_hub(state_dir: Path, token: str) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub of ours on a free loopback port, with the product's times and durable fences."""
    hub = AgentRuntimeDaemonHub(error_code_prefix="coding", state_dir=state_dir)
    await hub.start("127.0.0.1", 0, token)
    try:
        yield hub
    finally:
        await hub.stop()


@contextlib.asynccontextmanager
async def stock_hub(token: str) -> AsyncIterator[Any]:
    """A hub of the SDK's relay on a free loopback port."""
    from langbot_plugin.api.agent_tools import daemon as stock

    hub = stock.AgentRuntimeDaemonHub()
    await hub.start(host="127.0.0.1", port=0, token=token)
    try:
        yield hub
    finally:
        await hub.stop()


def _resident() -> int:
    """KiB of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def _hub_memory(hub: Any, daemons: int, open_job: Callable[[str], Awaitable[object]] | None) -> None:
    """Say the memory with one daemon, with ``daemons`` more, and with a job on each; the first of each warms the way."""
    say(endpoint=hub.endpoint)
    await hub.wait_for_daemon("d0", CONNECT)
    if open_job is not None:
        await open_job("d0")
    say(warm=_resident())
    for number in range(daemons):
        await hub.wait_for_daemon(f"d{number + 1}", CONNECT)
    say(idle=_resident())
    if open_job is not None:
        for number in range(daemons):
            await open_job(f"d{number + 1}")
        say(working=_resident())
    await asyncio.Event().wait()


async def _main(kind: str, settings: Json) -> None:
    token = settings.get("token", "")
    if kind == "bare":
        await bare_daemon(settings["url"])
    elif kind == "stock":
        await stock_daemon(settings["url"], token, DAEMON).run_forever()
    elif kind == "ours":
        await OurDaemon(url=settings["url"], token=token, daemon_id=DAEMON, reconnect_delay=0.05).run_forever()
    elif kind == "stock-hub":
        async with stock_hub(token) as hub:
            await _hub_memory(hub, settings["daemons"], None)
    else:
        async with our_hub(Path(settings["state"]), token) as ours:
            kept: list[object] = []

            async def open_job(daemon_id: str) -> None:
                kept.append(await ours.open_job(daemon_id, {"hold": True}))

            await _hub_memory(ours, settings["daemons"], open_job)


async def _bounded(kind: str, settings: Json) -> None:
    async with asyncio.timeout(LIFETIME):
        await _main(kind, settings)


if __name__ == "__main__":
    asyncio.run(_bounded(sys.argv[1], json.loads(sys.stdin.readline())))
