"""What the relay costs, beside bare websockets and beside the SDK's own relay.

The two ends of every connection are two processes on one machine; this one is the hub, except where its memory is measured.
*Bare* is one JSON frame for each event over websockets without compression, written and read by the least that can stand on
either side; *stock* is the SDK's relay as it is. All three run the same scripted jobs in short slices, in turn and each time
another one first, so that whatever else the machine does meets all of them alike. A ratio is taken between neighbours, and the
median of many decides. Clocks are the machine's monotonic one, which its processes share.

Phases:

- *rate*: from the first event's birth to the last one's arrival, 200 bytes and 4 KiB, one job and 32 jobs;
- *latency*: from an event's birth to its arrival, with a pause before each event that is long enough for all to be quiet; the
  99th of 100 is compared between the very slices in which the three took turns;
- *replay*: a daemon whose connection is cut journals 10,000 events; from the moment it can connect again to the last event;
- *memory*: a hub alone in its process, with one daemon, with 120 more, and with a job on each of them.

Linux only: memory is read from ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Final

from websockets.asyncio.server import ServerConnection, serve

import pkg
from benches import relay_ends
from benches.phases import Phases
from benches.relay_ends import CONNECT, DAEMON
from benches.table import Row, counted
from pkg.agent_api import Json
from testkit.cutting_proxy import CuttingProxy

REPEATS: Final = 5
"""Repetitions of replay and memory; rates and latencies are taken in many slices for each."""

RATE_GOALS: Final = {200: 2.5, 4096: 1.5}
"""Times as many events per second as bare, by the size of an event in bytes."""
STOCK_GOAL: Final = 4.0
"""Times as many events per second as the SDK's relay."""
LATENCY_GOAL: Final = 1.5
"""Times the bare latency that 99 of 100 paced events may take."""
IDLE_GOAL: Final = 40_000 / 1024
"""KiB of the hub for each idle daemon."""

EVENTS: Final = {200: 12_800, 4096: 3_200}
"""Events of all jobs together in one slice, by size: a tenth of a second or so."""
STOCK_SHARE: Final = 4
"""How many times fewer of them the SDK's relay gets: it takes the longest, and its rate does not depend on it."""
SLICES: Final = 5
"""Slices of each of the three for one repetition of a rate."""
JOBS: Final = (1, 32)
PACED: Final = 20
"""Events of one slice of latency."""
STRETCHES: Final = 20
"""Slices of each of the three for one repetition of latency: 400 events, four of which are beyond the 99th of 100."""
LEAD: Final = 5
"""Events of a slice that come first and are not counted: the start of their job is still on its way with them."""
PAUSE: Final = 0.003
JOURNALED: Final = 10_000
DAEMONS: Final = 120
RUN_LIMIT: Final = 60.0
"""Seconds that one run of one relay may take."""

_rounds: Final = itertools.count()


class Account:
    """What arrived of one job."""

    __slots__ = ("began", "count", "last", "late", "wrong")

    def __init__(self) -> None:
        """Nothing has."""
        self.count = self.wrong = 0
        self.began = self.last = 0.0
        self.late: list[float] = []

    def take(self, event: Json) -> None:
        """The next event: in its place or not, and how long it took."""
        self.last = time.monotonic()
        if not self.count:
            self.began = event["at"]
        self.late.append(self.last - event["at"])
        self.wrong += event["n"] != self.count
        self.count += 1


Run = Callable[[int, int, int, float], Awaitable[list[Account]]]
"""Runs so many jobs of so many events of so many bytes with a pause in seconds before each."""


def _spec(jobs: int, count: int, size: int, pause: float) -> Json:
    return {"jobs": jobs, "count": count, "size": size, "pause": pause, "round": str(next(_rounds))}


# ------------------------------------------------------------------ processes


@contextlib.asynccontextmanager
async def _process(kind: str, settings: Json) -> AsyncIterator[asyncio.subprocess.Process]:
    """The other end; its settings go over its stdin, never on its command line."""
    source, shared = Path(pkg.__path__[0]).parent, Path(__file__).parent.parent
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benches.relay_ends",
        kind,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": f"{source}{os.pathsep}{shared}"},
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await process.stdin.drain()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _said(process: asyncio.subprocess.Process, key: str) -> Json:
    """The next line of a process, which must have this key."""
    assert process.stdout is not None
    async with asyncio.timeout(RUN_LIMIT):
        line = await process.stdout.readline()
    if not line or key not in (news := json.loads(line)):
        raise RuntimeError(f"the other process said no {key}")
    return news[key]


# ------------------------------------------------------------------ the three relays


@contextlib.asynccontextmanager
async def bare() -> AsyncIterator[Run]:
    """Websockets and JSON alone."""
    connected: asyncio.Future[ServerConnection] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def served(connection: ServerConnection) -> None:
        connected.set_result(connection)
        await over.wait()

    async with serve(served, "127.0.0.1", 0, compression=None) as server:
        url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        async with _process("bare", {"url": url}):
            async with asyncio.timeout(CONNECT):
                socket = await connected

            async def run(jobs: int, count: int, size: int, pause: float) -> list[Account]:
                await socket.send(json.dumps(_spec(jobs, count, size, pause)))
                accounts = [Account() for _ in range(jobs)]
                left = jobs
                while left:
                    frame = json.loads(await socket.recv())
                    if "event" in frame:
                        accounts[frame["job"]].take(frame["event"])
                    else:
                        left -= 1
                return accounts

            try:
                yield run
            finally:
                over.set()


def _jobs_of(opened: Callable[[Json], AsyncGenerator[Json, None]]) -> Run:
    async def account(spec: Json) -> Account:
        found = Account()
        async with contextlib.aclosing(opened(spec)) as events:
            async for event in events:
                found.take(event)
        return found

    async def run(jobs: int, count: int, size: int, pause: float) -> list[Account]:
        spec = _spec(jobs, count, size, pause)
        return list(await asyncio.gather(*(account(spec) for _ in range(jobs))))

    return run


@contextlib.asynccontextmanager
async def stock() -> AsyncIterator[Run]:
    """The SDK's relay."""
    token = secrets.token_urlsafe(32)
    async with relay_ends.stock_hub(token) as hub, _process("stock", {"url": hub.endpoint, "token": token}):
        await hub.wait_for_daemon(DAEMON, CONNECT)
        yield _jobs_of(lambda spec: hub.run_job(daemon_id=DAEMON, payload=spec, tools=None, timeout=RUN_LIMIT))


@contextlib.asynccontextmanager
async def ours(base: Path) -> AsyncIterator[Run]:
    """The product's relay."""
    token = secrets.token_urlsafe(32)
    async with relay_ends.our_hub(base / "state", token) as hub, _process("ours", {"url": hub.endpoint, "token": token}):
        await hub.wait_for_daemon(DAEMON, CONNECT)
        yield _jobs_of(lambda spec: hub.run_job(DAEMON, spec, None, RUN_LIMIT))


@contextlib.asynccontextmanager
async def _all_three(base: Path) -> AsyncIterator[dict[str, Run]]:
    """The three, warm."""
    async with bare() as first, stock() as second, ours(base) as third:
        runs = {"bare": first, "stock": second, "ours": third}
        for run in runs.values():
            await run(2, 500, 200, 0.0)
        yield runs


def missing(accounts: Sequence[Account], count: int) -> int:
    """How many events of jobs of ``count`` events each are lost, too many or in another place."""
    return sum(each.wrong + abs(each.count - count) for each in accounts)


# ------------------------------------------------------------------ phases


def _in_turn(runs: dict[str, Run], slices: int) -> Iterator[list[tuple[str, Run]]]:
    """The three in another order for each slice, so that none is always behind the same other."""
    for number in range(slices):
        order = list(runs.items())
        cut = number % len(order)
        yield order[cut:] + order[:cut]


async def rate(base: Path, repeats: int) -> list[Row]:
    """Events per second of the three."""
    rows: list[Row] = []
    wrong: list[float] = []
    async with _all_three(base) as runs:
        for (size, events), jobs in itertools.product(EVENTS.items(), JOBS):
            found: dict[str, list[float]] = {name: [] for name in runs}
            for order in _in_turn(runs, repeats * SLICES):
                for name, run in order:
                    count = events // jobs // (STOCK_SHARE if name == "stock" else 1)
                    accounts = await run(jobs, count, size, 0.0)
                    wrong.append(float(missing(accounts, count)))
                    span = max(each.last for each in accounts) - min(each.began for each in accounts)
                    found[name].append(jobs * count / span)
            label = f"{size} B, {'one job' if jobs == 1 else f'{jobs} jobs'}"
            over = _ratios(found["ours"], found["bare"])
            rows += [
                Row(f"events of {label}: over bare", over, "×", RATE_GOALS[size], at_least=True),
                Row("    over stock", _ratios(found["ours"], found["stock"]), "×", STOCK_GOAL, at_least=True),
                *(Row(f"    {name}", tuple(samples), "events/s") for name, samples in found.items()),
            ]
    return [*rows, counted("events lost, doubled or out of order", wrong)]


async def latency(base: Path, repeats: int) -> list[Row]:
    """How long one event takes when nothing else is on its way."""
    middle: dict[str, list[float]] = {}
    tail: dict[str, list[float]] = {}
    wrong: list[float] = []
    async with _all_three(base) as runs:
        for _ in range(repeats):
            late: dict[str, list[float]] = {name: [] for name in runs}
            for order in _in_turn(runs, STRETCHES):
                for name, run in order:
                    (account,) = await run(1, LEAD + PACED, 200, PAUSE)
                    late[name] += account.late[LEAD:]
                    wrong.append(float(missing([account], LEAD + PACED)))
            for name, samples in late.items():
                samples.sort()
                middle.setdefault(name, []).append(samples[len(samples) // 2] * 1000)
                tail.setdefault(name, []).append(samples[len(samples) * 99 // 100] * 1000)
    return [
        Row("paced event, 99 of 100 within: over bare", _ratios(tail["ours"], tail["bare"]), "×", LATENCY_GOAL),
        *(Row(f"    {name}", tuple(samples), "ms") for name, samples in tail.items()),
        Row("paced event, half within: over bare", _ratios(middle["ours"], middle["bare"]), "×"),
        *(Row(f"    {name}", tuple(samples), "ms") for name, samples in middle.items()),
        counted("paced events lost, doubled or out of order", wrong),
    ]


async def replay(base: Path, repeats: int) -> list[Row]:
    """How soon 10,000 events of an outage are there."""
    token = secrets.token_urlsafe(32)
    first, whole, wrong = [], [], []
    async with relay_ends.our_hub(base / "state", token) as hub:
        host, _, port = hub.endpoint.removeprefix("ws://").rpartition(":")
        async with CuttingProxy((host, int(port))) as proxy, _process("ours", {"url": proxy.url, "token": token}) as daemon:
            for _ in range(repeats):
                await hub.wait_for_daemon(DAEMON, CONNECT)
                spec = {"offline": JOURNALED, "size": 200}
                account = Account()
                restored = 0.0
                async with contextlib.aclosing(hub.run_job(DAEMON, spec, None, RUN_LIMIT)) as events:
                    async for event in events:
                        account.take(event)
                        if account.count == 1:
                            proxy.cut()
                            await _said(daemon, "journaled")
                            restored = time.monotonic()
                            proxy.restore()
                        elif account.count == 2:
                            first.append((account.last - restored) * 1000)
                whole.append((account.last - restored) * 1000)
                wrong.append(float(missing([account], JOURNALED + 1)))
    return [
        Row(f"replay of {JOURNALED:,} events: to the last one", tuple(whole), "ms"),
        Row("    to the first one", tuple(first), "ms"),
        counted("    events lost, doubled or out of order", wrong),
    ]


async def memory(base: Path, repeats: int) -> list[Row]:
    """What a daemon and a job cost a hub that is alone in its process."""
    idle, working, stock_idle = [], [], []
    for number in range(min(repeats, 3)):
        token = secrets.token_urlsafe(32)
        state = str(base / f"state-{number}")
        async with _process("our-hub", {"daemons": DAEMONS, "token": token, "state": state}) as hub:
            grown = await _grown(hub, token, _our_daemon, working=True)
            idle.append(grown[0])
            working.append(grown[1])
        async with _process("stock-hub", {"daemons": DAEMONS, "token": token}) as hub:
            grown = await _grown(hub, token, _stock_daemon, working=False)
            stock_idle.append(grown[0])
    return [
        Row("hub's memory for each idle daemon", tuple(idle), "KiB", IDLE_GOAL),
        Row("    stock", tuple(stock_idle), "KiB"),
        Row("hub's memory for each job", tuple(working), "KiB"),
    ]


Daemon = Callable[[str, str, str], Coroutine[None, None, None]]
"""Runs a daemon, given the hub's address, its token and the daemon's id."""


async def _our_daemon(url: str, token: str, name: str) -> None:
    await relay_ends.OurDaemon(url=url, token=token, daemon_id=name).run_forever()


async def _stock_daemon(url: str, token: str, name: str) -> None:
    await relay_ends.stock_daemon(url, token, name).run_forever()


async def _grown(hub: asyncio.subprocess.Process, token: str, daemon: Daemon, *, working: bool) -> tuple[float, ...]:
    """KiB for each idle daemon, and for each job."""
    url = await _said(hub, "endpoint")
    tasks = [asyncio.create_task(daemon(url, token, "d0"))]
    try:
        sizes = [await _said(hub, "warm")]
        tasks += [asyncio.create_task(daemon(url, token, f"d{number + 1}")) for number in range(DAEMONS)]
        sizes.append(await _said(hub, "idle"))
        if working:
            sizes.append(await _said(hub, "working"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            hub.kill()  # first: daemons that end one by one need not tell it
        await hub.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return tuple((after - before) / DAEMONS for before, after in itertools.pairwise(sizes))


def _ratios(samples: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other for one, other in zip(samples, others, strict=True))


PHASES: Final[Phases] = {
    "rate": (rate, 140.0),
    "latency": (latency, 90.0),
    "replay": (replay, 60.0),
    "memory": (memory, 60.0),
}
"""Each phase and the seconds it may take with ``REPEATS`` repetitions on two busy cores."""
