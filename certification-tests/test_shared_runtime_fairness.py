"""One installation's flood, crash or stall, and how long another one in the same process waits for its first words.

The measured machine is the daemon program's own in this process, whose agent says its first word after ``PACE``. The
disturbing one is a real daemon with scripted agents (local protocol fixture) in processes of its own. Both are measured in one
run and by turns, quiet, disturbed and quiet again, so that what else the machine does is on both sides of the comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pkg.agent_api import Prompt, TextDelta
from testkit.daemon_sites import Site, plugin_form, until_shown
from testkit.machines import machine
from testkit.relay_rig import free_port
from testkit.scripted_driver import ScriptedSession
from testkit.sdk_worker import SdkWorker, built, sdk_worker

pytestmark = [pytest.mark.shared_runtime, pytest.mark.sdk_worker, pytest.mark.timeout(240)]

BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
PACE = 0.3
"""Seconds until the measured agent's first word: as long as agents take at least, so that a person's wait is compared, and not
how two busy cores share their time."""
TIMES = 20
MOST = 2.0
"""How many times as long as undisturbed the median first word may take."""


async def paced(session: ScriptedSession, _: Prompt) -> str | None:
    """A first word after a while, then the end."""
    await asyncio.sleep(PACE)
    session.emit(TextDelta("first word"))
    return None


class Bench:
    """The worker with the disturbing and the measured installation."""

    def __init__(self, worker: SdkWorker, loud: Site) -> None:
        self.worker, self.loud = worker, loud
        self.troubles = 0
        """Results of the disturbing installation that were seen while the other one was measured."""
        self.begun = asyncio.Event()
        """Set once the disturbing installation is what it is meant to be."""
        self.rounds = itertools.count()
        """How often it was started."""
        self._numbers = itertools.count()

    async def first_word(self) -> float:
        """Seconds from a message of the measured installation to the first result with its agent's words."""
        form = {"provider": "custom", "location": "daemon", "daemon-id": "laptop", "keep-warm": 300}
        began = time.monotonic()
        found = 0.0
        async with asyncio.timeout(BOUND):
            async for result in self.worker.stream("go", uid="B", run_id=f"b{next(self._numbers)}", config=form):
                if not found and "first word" in json.dumps(result.data):
                    found = time.monotonic() - began
        assert found >= PACE
        return found

    async def measured(self, times: int) -> list[float]:
        """That many, one after the other."""
        return [await self.first_word() for _ in range(times)]


@contextlib.asynccontextmanager
async def bench(directory: Path) -> AsyncIterator[Bench]:
    """Both installations at work."""
    port = free_port()
    tokens = {uid: secrets.token_hex(32) for uid in "AB"}
    forms = {uid: plugin_form(port, tokens[uid]) for uid in tokens}
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sdk_worker(built(), directory / "runtime", "pool", installations=forms))
        loud = Site(worker, directory / "A", port, tokens["A"], uid="A")
        stack.push_async_callback(loud.stop_daemon)
        await loud.join()
        await stack.enter_async_context(machine(directory / "B", f"ws://127.0.0.1:{port}", tokens["B"], paced))
        made = Bench(worker, loud)
        await made.first_word()
        yield made


async def read(at: Bench, stream: Any) -> None:
    """Take every result, as a host does."""
    async for _ in stream:
        at.troubles += 1
        at.begun.set()


async def flood(at: Bench, number: int) -> None:
    """Hundred thousand pieces and a message of a megabyte, as fast as they come, again and again."""
    await read(at, at.loud.stream("many 100000 20\nhuge 1000000", run_id=f"flood-{number}", conversation=f"flood-{number}"))


async def crash(at: Bench, number: int) -> None:
    """An agent that dies in its turn, and every third time its daemon with it."""
    chat = f"crash-{number}"
    await read(at, at.loud.stream("say begun\nexit 3", run_id=chat, form={"keep_warm": 0}, conversation=chat))
    if number % 3 == 2:
        assert at.loud.daemon is not None
        await at.loud.daemon.kill()
        await at.loud.start_daemon()


async def stall(at: Bench, number: int) -> None:
    """A host that takes the first results of a flood and then none for as long as it is measured."""
    stream = at.loud.stream("many 100000 20\nhuge 1000000", run_id=f"stall-{number}", conversation=f"stall-{number}")
    at.troubles += len(await until_shown(stream, "message"))
    at.begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        await stream.aclose()


async def deaf(at: Bench, number: int) -> None:
    """A machine that stops reading, and messages of a megabyte for sessions that are open there, until it is lost."""
    assert at.loud.daemon is not None
    chats = [f"deaf-{number}-{each}" for each in range(4)]
    form = {"keep_warm": 300}
    for chat in chats:
        opened = await at.loud.run("say here", run_id=f"{chat}-opens", conversation=chat, form=form)
        at.troubles += len(opened.results)
    os.kill(at.loud.daemon.pid, signal.SIGSTOP)
    try:
        streams = [at.loud.stream("think " + "x" * 1_000_000, run_id=chat, conversation=chat, form=form) for chat in chats]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(read(at, stream))
            at.begun.set()
    finally:
        os.kill(at.loud.daemon.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def troubled(at: Bench, disturb: Callable[[Bench, int], Any]) -> AsyncIterator[None]:
    """The disturbing installation is what it is meant to be, again and again, while the block runs."""

    async def again_and_again() -> None:
        while True:
            await disturb(at, next(at.rounds))

    at.begun.clear()
    disturbing, begun = asyncio.create_task(again_and_again()), asyncio.create_task(at.begun.wait())
    try:
        async with asyncio.timeout(BOUND):
            await asyncio.wait({disturbing, begun}, return_when=asyncio.FIRST_COMPLETED)
        assert begun.done(), disturbing
        yield
        assert not disturbing.done(), disturbing
    finally:
        for task in (disturbing, begun):
            task.cancel()
        await asyncio.wait({disturbing, begun})


@pytest.mark.asyncio
@pytest.mark.parametrize("disturb", [flood, crash, stall, deaf])
async def test_a_neighbours_trouble_at_most_doubles_the_wait_for_the_first_word(disturb: Any, tmp_path: Path) -> None:
    """Our rule: each installation has its own buffers and its own turn in the loop; the medians of twenty are compared."""
    async with bench(tmp_path) as at:
        quiet = await at.measured(TIMES // 4)
        disturbed: list[float] = []
        for times in (TIMES // 2, TIMES // 4):
            async with troubled(at, disturb):
                disturbed += await at.measured(TIMES // 2)
            await at.first_word()  # what was given up leaves before it is quiet again
            quiet += await at.measured(times)
        assert len(quiet) == len(disturbed) == TIMES
        assert at.troubles > 0
        shown = f"quiet {statistics.median(quiet):.3f} s, disturbed {statistics.median(disturbed):.3f} s"
        print(f"{disturb.__name__}: {shown}")
        assert statistics.median(disturbed) <= MOST * statistics.median(quiet), shown
