"""Processes of the relay that a test tells what to do, a JSON line at a time: hubs in any worker's place, daemons, a flood."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from pkg import limits, runtime_support
from pkg.daemon_relay import AgentRuntimeDaemonError, AgentRuntimeDaemonHub, Job, state_directory
from pkg.errors import ProcessCleanupUnconfirmed
from pkg.runtime_support import WorkerShape, worker_shape
from testkit.relay_rig import LEASE, TIMES, TOKEN, WAIT, FileTable, ScriptedDaemon
from testkit.relay_socket import SocketDaemon

Json = Any
PREFIX = "coding"
HELD_BACK = 0.3
"""Seconds an event has to wait before a daemon process says that it is held back."""


class Refusal(Exception):
    """What a process answered instead of a result; ``str()`` is the code without its prefix."""


class Process:
    """One process with its requests and answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._news: asyncio.Queue[Json] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def resident(self) -> int:
        """Its resident memory in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    async def ask(self, verb: str, bound: float = WAIT, **arguments: Json) -> Json:
        """One request and its answer; raises :class:`Refusal`."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, verb, arguments]).encode() + b"\n")
        async with asyncio.timeout(bound):
            said = await answer
        if "refused" in said:
            raise Refusal(said["refused"])
        return said["result"]

    async def told(self, key: str, bound: float = WAIT) -> Json:
        """The next line that the process says by itself and that has this key."""
        async with asyncio.timeout(bound):
            while key not in (news := await self._news.get()):
                pass
        return news[key]

    async def kill(self) -> None:
        """SIGKILL, and reaped."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            value = json.loads(line)
            if "answer" in value:
                self._waiting.pop(value["answer"]).set_result(value)
            else:
                self._news.put_nowait(value)
        for waiting in self._waiting.values():
            waiting.set_result({"refused": "the process has ended"})


@contextlib.asynccontextmanager
async def started(kind: str, environment: Mapping[str, str] | None = None, **options: Json) -> AsyncIterator[Process]:
    """A ``hub``, ``daemon`` or ``flood`` process, killed afterwards; its options go over its stdin."""
    root = Path(__file__).resolve().parent.parent
    source = Path(sys.modules["pkg"].__file__ or "").resolve().parent.parent
    paths = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": f"{source}{os.pathsep}{root}"}
    process = Process(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "testkit.relay_processes", kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=paths | dict(environment or {}),
        )
    )
    try:
        assert process._process.stdin is not None
        process._process.stdin.write(json.dumps(options).encode() + b"\n")
        yield process
    finally:
        await process.kill()


# ------------------------------------------------------------------ inside of them


def _say(value: Json) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Hub:
    """A hub's process: what it is asked, it does."""

    def __init__(self, hub: AgentRuntimeDaemonHub) -> None:
        self.hub = hub
        self.jobs: dict[str, Job] = {}
        self.streams: dict[str, Any] = {}

    async def wait(self, daemon: str = "laptop", seconds: float = WAIT) -> None:
        """Wait for a daemon."""
        await self.hub.wait_for_daemon(daemon, seconds)

    async def open(self, payload: Json, daemon: str = "laptop") -> str:
        """Open a job."""
        job = await self.hub.open_job(daemon, payload)
        self.jobs[job.job_id] = job
        self.streams[job.job_id] = job.events()
        return job.job_id

    async def take(self, job: str, count: int) -> list[int]:
        """The next events' numbers."""
        return [(await anext(self.streams[job]))["n"] for _ in range(count)]

    async def count(self, job: str, first: int = 0) -> int:
        """How many of the remaining events come in order, beginning with ``first``; all of them, or it is an error."""
        expected = first
        async for event in self.streams[job]:
            assert event["n"] == expected, (event, expected)
            expected += 1
        return expected

    async def cancel(self, job: str) -> bool:
        """End a job; whether that is proven."""
        try:
            await self.jobs[job].cancel()
        except ProcessCleanupUnconfirmed:
            return False
        return True


async def hub_main(
    port: int = 0, token: str = TOKEN, worker: Json = None, state_dir: str = "", lease: float = LEASE, journal: Json = None
) -> None:
    """A hub. ``worker``: where its fences are is decided as in a worker of this environment, ``/data`` being this directory."""
    named: dict[str, Any] = {"state_dir": state_dir or None}
    shape = ""
    if worker is not None:
        runtime_support.DATA_DIRECTORY = Path(worker)  # type: ignore[misc]
        found = worker_shape(data=Path(worker))
        shape = found.name
        named["state_dir"] = state_directory(PREFIX, found)
        if found is WorkerShape.POOL:
            named |= {"shared": True, "installation": "tenant"}
    hub = AgentRuntimeDaemonHub(error_code_prefix=PREFIX, times=TIMES, **named)
    hub.lease_seconds = lease
    await hub.start("127.0.0.1", port, token)
    _say({"endpoint": hub.endpoint, "shape": shape})
    await _served(Hub(hub))


async def _served(what: object) -> None:
    """Do what the lines on stdin say, each by itself, until they end."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            number, verb, arguments = json.loads(line)
            group.create_task(_answered(number, getattr(what, verb)(**arguments)))


async def _answered(number: int, doing: Any) -> None:
    try:
        result = await doing
    except AgentRuntimeDaemonError as exc:
        _say({"answer": number, "refused": exc.reason})
    else:
        _say({"answer": number, "result": result})


class TellingDaemon(ScriptedDaemon):
    """A daemon that says when an event of it is held back, and how often it was started and stopped."""

    def on_state(self, state: str, detail: str = "") -> None:
        super().on_state(state, detail)
        _say({"state": state, "detail": detail})

    async def emit_event(self, job_id: str, event: Mapping[str, Json]) -> None:
        number = event.get("n")
        timer = asyncio.get_running_loop().call_later(HELD_BACK, lambda: _say({"held_back": number}))
        try:
            await super().emit_event(job_id, event)
        finally:
            timer.cancel()


async def daemon_main(url: str, table: str, token: str = TOKEN, journal: str = "", file_limit: int = 0) -> None:
    """A daemon with scripted jobs. ``file_limit``: the kernel takes no more bytes of any file than these."""
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    kept = FileTable(Path(table))
    daemon = TellingDaemon(
        url=url, token=token, table=kept, quiesced=list(kept.jobs), journal_dir=Path(journal) if journal else None
    )
    await daemon.run_forever()


def _masked(frame: bytes) -> bytes:
    """A client's text message of less than 64 KiB in its WebSocket framing, masked with zeros."""
    size = b"\xfe" + len(frame).to_bytes(2, "big") if len(frame) > 125 else bytes([0x80 | len(frame)])
    return b"\x81%b\0\0\0\0%b" % (size, frame)


async def flood_main(url: str, count: int, daemon_id: str = "flood", token: str = TOKEN) -> None:
    """A daemon by hand whose only job sends ``count`` events, each in a WebSocket message of its own."""
    async with SocketDaemon(url, daemon_id, token) as daemon:
        await daemon.join()
        job_id = (await daemon.hear("run.start"))["job_id"]
        acked, room = 0, asyncio.Event()

        async def listen() -> None:
            nonlocal acked
            while (message := await daemon.hear("run.ack", "run.forget"))["type"] == "run.ack":
                acked = message["seq"]
                room.set()

        async def beat() -> None:
            for number in itertools.count(1):
                await asyncio.sleep(TIMES.heartbeat)
                daemon.write(_masked(daemon.sealed(b'{"type":"daemon.ping","n":%d}' % number)))

        hearing, beating = asyncio.create_task(listen()), asyncio.create_task(beat())
        most = limits.RELAY_WINDOW_BYTES // 4 // 160
        head = b'{"type":"run.event","job_id":"%b","seq":' % job_id.encode()
        for first in range(0, count, 500):
            while first - acked > most:
                room.clear()
                await room.wait()
            frames = bytearray()
            for number in range(first, min(first + 500, count)):
                frames += _masked(daemon.sealed(b'%b%d,"records":[{"n":%d}]}' % (head, number + 1, number)))
            daemon.write(bytes(frames))
            await asyncio.sleep(0)
        await daemon.say(
            {"type": "run.finished", "job_id": job_id, "outcome": "completed", "last": count, "quiescent": True, "error": None}
        )
        await hearing
        _say({"sent": count})
        await beating


if __name__ == "__main__":
    KINDS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"hub": hub_main, "daemon": daemon_main, "flood": flood_main}
    asyncio.run(KINDS[sys.argv[1]](**json.loads(sys.stdin.readline())))
