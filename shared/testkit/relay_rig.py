"""Hubs and scripted daemons for the relay's suites: real sockets, real processes, times that the suites scale."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from pkg import limits
from pkg.daemon_relay import AgentRuntimeDaemonClient, AgentRuntimeDaemonError, AgentRuntimeDaemonHub, Job
from pkg.errors import CodingError, ProcessCleanupUnconfirmed
from pkg.relay_protocol import RelayTimes

Json = Any

SCALE = 20.0
"""How much faster the suites' relay lives than the product's."""

TOKEN = "canary-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0pS"
OTHER_TOKEN = "canary-aB7cD2eF9gH4iJ6kL1mN8oP3qR5sT0uV"
WAIT = 30.0
"""Seconds after which a test that waits has failed."""


def scaled(seconds: float) -> float:
    """A time of the product in the suites' relay."""
    return seconds / SCALE


TIMES = RelayTimes(
    heartbeat=scaled(limits.RELAY_HEARTBEAT),
    dead=scaled(limits.RELAY_DEAD),
    handshake=limits.RELAY_HANDSHAKE,
    probe=scaled(limits.RELAY_PROBE),
    cancel=scaled(limits.RELAY_CANCEL) * 2,
    ack_delay=scaled(limits.RELAY_ACK_DELAY),
)
LEASE = scaled(limits.RELAY_LEASE)


class FileTable:
    """A job table in a file, as small as one can be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept: Json = json.loads(path.read_text()) if path.exists() else {"table": os.urandom(8).hex(), "jobs": {}}
        self.table: str = kept["table"]
        self.jobs: dict[str, str] = kept["jobs"]
        self._write()

    def started(self, job_id: str) -> None:
        self.jobs[job_id] = "started"
        self._write()

    def quiesced(self, job_id: str) -> None:
        if job_id in self.jobs:
            self.jobs[job_id] = "quiesced"
            self._write()

    def forgotten(self, job_id: str) -> None:
        self.jobs.pop(job_id, None)
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps({"table": self.table, "jobs": self.jobs}))


class ScriptedDaemon(AgentRuntimeDaemonClient):
    """A daemon whose jobs do what their payload says; ``ran`` and ``ended`` remember the truth."""

    def __init__(self, **named: Any) -> None:
        named.setdefault("times", TIMES)
        named.setdefault("reconnect_delay", 0.05)
        named.setdefault("token", TOKEN)
        named.setdefault("daemon_id", "laptop")
        super().__init__(**named)
        self.ran: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.states: list[tuple[str, str]] = []
        self.emitted: dict[str, int] = {}
        self.let_go = asyncio.Event()
        """Lets stubborn jobs end."""
        self.news = asyncio.Condition()
        self.spoken: dict[str, asyncio.Queue[tuple[str, Json]]] = {}

    def on_state(self, state: str, detail: str = "") -> None:
        self.states.append((state, detail))

    async def handle_command(self, job_id: str, verb: Any, value: Json) -> Json:
        if value == "refuse":
            raise CodingError("coding.busy")
        if value == "leave":
            raise ProcessCleanupUnconfirmed("a child is left", (1,))
        return {"verb": verb, "value": value}

    async def run_job(self, job_id: str, payload: Json) -> None:
        self.ran.append(job_id)
        try:
            await self._script(job_id, payload)
        except asyncio.CancelledError:
            self.cancelled.append(job_id)
            if payload.get("stubborn"):
                await self._stubborn()
            if payload.get("slow_end"):
                await asyncio.sleep(payload["slow_end"])
            if payload.get("unproven"):
                raise ProcessCleanupUnconfirmed("a child is left", (1,)) from None
            raise
        finally:
            self.ended.append(job_id)

    async def _stubborn(self) -> None:
        while not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()

    async def _script(self, job_id: str, payload: Json) -> None:
        for number in range(payload.get("count", 0)):
            await self.emit_event(job_id, {"n": number, "pad": "x" * payload.get("pad", 0)})
            self.emitted[job_id] = number + 1
            if payload.get("pause"):
                await asyncio.sleep(payload["pause"])
        if payload.get("big"):
            await self.emit_event(job_id, {"big": "y" * payload["big"]})
        if payload.get("fail"):
            raise CodingError(payload["fail"])
        if payload.get("crash"):
            raise RuntimeError(f"a secret of this machine: {TOKEN}")
        if payload.get("tool") is not None:
            await self._use_tool(job_id, payload["tool"])
        if payload.get("hold"):
            await asyncio.Event().wait()
        await self.finish_job(job_id)

    async def _use_tool(self, job_id: str, call: Json) -> None:
        proxy = self.create_mcp_proxy(job_id)
        proxy.start()
        config = proxy.server_config()
        await self.emit_event(job_id, {"config": config})
        async with aiohttp.ClientSession() as session:
            async with session.post(config["url"], json=call) as bare:
                await self.emit_event(job_id, {"bare": bare.status})
            async with session.post(config["url"], json=call, headers=config["headers"]) as answered:
                await self.emit_event(job_id, {"status": answered.status, "answer": await answered.json()})


@contextlib.asynccontextmanager
async def running_hub(**named: Any) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A started hub on a free port; ``token``, ``port`` and whatever its constructor takes."""
    token, port = named.pop("token", TOKEN), named.pop("port", 0)
    named.setdefault("times", TIMES)
    hub = AgentRuntimeDaemonHub(error_code_prefix="coding", **named)
    hub.lease_seconds = LEASE
    await hub.start("127.0.0.1", port, token)
    try:
        yield hub
    finally:
        await hub.stop()


@contextlib.asynccontextmanager
async def running_daemon(daemon: ScriptedDaemon) -> AsyncIterator[asyncio.Task[None]]:
    """The daemon at work while the block runs."""
    task = asyncio.create_task(daemon.run_forever())
    try:
        yield task
    finally:
        daemon.let_go.set()
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is true that nobody announces."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def numbers(job: Job) -> list[int]:
    """Every event's number, to the job's end."""
    async with asyncio.timeout(WAIT):
        return [event["n"] async for event in job.events()]


async def refusal(awaitable: Awaitable[object]) -> AgentRuntimeDaemonError:
    """The error an awaitable ends with."""
    try:
        async with asyncio.timeout(WAIT):
            await awaitable
    except AgentRuntimeDaemonError as exc:
        return exc
    raise AssertionError("nothing was refused")


def markers(state: Path) -> list[Path]:
    """A hub's durable fences below its state directory."""
    return sorted(state.rglob("*.pending"))


def free_port() -> int:
    """A loopback port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_of(hub: AgentRuntimeDaemonHub) -> tuple[str, int]:
    """Where a hub listens."""
    host, _, port = hub.endpoint.removeprefix("ws://").rpartition(":")
    return host, int(port)


async def daemon_main(url: str, table: str, token: str) -> None:
    """A daemon process: its jobs are scripted, its table is a file."""
    kept = FileTable(Path(table))
    left = list(kept.jobs)
    daemon = ScriptedDaemon(url=url, token=token, table=kept, quiesced=left)
    await daemon.run_forever()


async def hub_main(port: int, state_dir: str, token: str, payload: Json) -> None:
    """A hub process that opens one job on the first daemon and says so."""
    async with running_hub(port=port, token=token, state_dir=state_dir) as hub:
        print(json.dumps({"endpoint": hub.endpoint}), flush=True)
        await hub.wait_for_daemon("laptop", WAIT)
        job = await hub.open_job("laptop", payload)
        print(json.dumps({"job": job.job_id}), flush=True)
        async for event in job.events():
            print(json.dumps({"event": event}), flush=True)


async def start_process(kind: str, *arguments: Json) -> asyncio.subprocess.Process:
    """``hub`` or ``daemon`` in a process of its own; the arguments go over its stdin, never on its command line."""
    root = Path(__file__).resolve().parent.parent
    source = Path(sys.modules["pkg"].__file__ or "").resolve().parent.parent
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": f"{source}{os.pathsep}{root}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "testkit.relay_rig",
        kind,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    await process.stdin.drain()
    return process


async def said(process: asyncio.subprocess.Process, key: str) -> Json:
    """The next line of a process that has this key."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT):
        while line := await process.stdout.readline():
            value = json.loads(line)
            if key in value:
                return value[key]
    raise AssertionError(f"the process ended without {key}")


async def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL a process of ours and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.readline())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run((hub_main if sys.argv[1] == "hub" else daemon_main)(*arguments))
