"""Five ways in which a coding agent's plugin fails its users when it is built the obvious way; this design has none of them.

They are shown with the SDK's stock relay (``langbot_plugin.api.agent_tools.daemon``) and with the patterns that a plugin falls
into. Nothing here is a rule of ours: a test passes when the blocker is there, so a passing file says nothing about this
product, and what goes away in a later SDK fails here and may be deleted. Ordinary runs never collect it (its name is no
test's), and nothing counts its assertions. By hand:

``python3 scripts/test.py certification-tests/historical_coding_runner_shared_blockers.py``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import websockets
from langbot_plugin.api.agent_tools.daemon import (
    AgentRuntimeDaemonClient,
    AgentRuntimeDaemonError,
    AgentRuntimeDaemonHub,
    get_agent_runtime_daemon_hub,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOKEN = "stock-relay-token"
BOUND = 10.0
"""Seconds any single wait may take."""


@pytest_asyncio.fixture
async def hub() -> AsyncIterator[AgentRuntimeDaemonHub]:
    """The stock hub on a free port."""
    made = AgentRuntimeDaemonHub()
    await made.start(host="127.0.0.1", port=0, token=TOKEN)
    try:
        yield made
    finally:
        await made.stop()


class Daemon:
    """A daemon that says on the wire what it is told to."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket

    async def receive(self) -> dict[str, Any]:
        """The next message of the hub."""
        async with asyncio.timeout(BOUND):
            message: dict[str, Any] = json.loads(await self.socket.recv())
            return message

    async def send(self, **message: Any) -> None:
        """A message to the hub."""
        await self.socket.send(json.dumps(message))

    async def event(self, job_id: str, text: str) -> None:
        """One event of a job."""
        await self.send(type="run.event", job_id=job_id, event={"text": text})


@contextlib.asynccontextmanager
async def daemon(hub: AgentRuntimeDaemonHub, daemon_id: str = "laptop") -> AsyncIterator[Daemon]:
    """A daemon that is ready."""
    async with websockets.connect(hub.endpoint) as socket:
        made = Daemon(socket)
        await made.send(type="daemon.hello", daemon_id=daemon_id, token=TOKEN)
        assert (await made.receive())["type"] == "daemon.ready"
        yield made


class Run:
    """One job and what it brought."""

    def __init__(self, hub: AgentRuntimeDaemonHub, **payload: Any) -> None:
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.get_running_loop().create_task(self._read(hub, payload))

    async def _read(self, hub: AgentRuntimeDaemonHub, payload: dict[str, Any]) -> None:
        async for item in hub.run_job(daemon_id="laptop", payload=payload, tools=None, timeout=30):
            self.got.put_nowait(item)

    async def cancel(self) -> None:
        """As when the chat's run is cancelled."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=BOUND)


# ------------------------------------------------------------------ 1


async def test_what_a_runner_keeps_of_its_configuration_is_the_next_installation_s() -> None:
    """Pattern: a runner that reads its settings once and keeps them on ``self`` works for everybody with the first one's."""

    class Naive:
        config: dict[str, str] | None = None

        async def run(self, config: dict[str, str]) -> str:
            self.config = self.config or config
            await asyncio.sleep(0)
            return self.config["api-key"]

    shared = Naive()  # SDK fact: the pool has one object of a component for all installations
    used = await asyncio.gather(shared.run({"api-key": "key of A"}), shared.run({"api-key": "key of B"}))
    assert list(used) == ["key of A", "key of A"]


# ------------------------------------------------------------------ 2


async def test_another_connection_takes_a_live_daemon_s_place_and_ends_its_jobs(hub: AgentRuntimeDaemonHub) -> None:
    """SDK fact: whoever says a daemon's id replaces it, and the hub takes every socket's word on every job."""
    async with daemon(hub) as honest:
        run = Run(hub)
        job = (await honest.receive())["job_id"]
        async with daemon(hub) as intruder:
            with pytest.raises(websockets.ConnectionClosed):
                await honest.receive()
            await intruder.event(job, "made up")
            assert await asyncio.wait_for(run.got.get(), BOUND) == {"text": "made up"}
            await intruder.send(type="run.finished", job_id=job)
            await asyncio.wait_for(run.task, BOUND)  # completed, as if its own daemon had finished it


# ------------------------------------------------------------------ 3


async def test_a_lost_connection_is_a_lost_run(hub: AgentRuntimeDaemonHub) -> None:
    """SDK fact: a connection that breaks ends its runs at once; what the agent says after it is back is dropped."""
    async with daemon(hub) as before:
        run = Run(hub)
        job = (await before.receive())["job_id"]
        await before.event(job, "half of the ans")
    await asyncio.wait_for(run.task, BOUND)
    assert run.got.get_nowait() == {"text": "half of the ans"}
    assert run.got.get_nowait()["data"]["code"] == "agent_runtime.daemon_disconnected"
    async with daemon(hub) as back:
        await back.event(job, "wer")
        await back.send(type="daemon.ping")
        assert (await back.receive())["type"] == "daemon.pong"  # everything before it was handled
    assert run.got.empty()


# ------------------------------------------------------------------ 4

TREE = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, 1); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""


class NaiveClient(AgentRuntimeDaemonClient):
    """A daemon as the stock client invites: a subprocess per job, terminated when the job's task is cancelled."""

    async def run_job(self, job_id: str, payload: dict[str, Any]) -> None:
        """Start the agent and wait for it."""
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", TREE, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        grandchild = int(await process.stdout.readline())
        await self.emit_event(job_id, {"pids": [process.pid, grandchild]})
        try:
            await process.wait()
        finally:
            process.terminate()
            await process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_a_cancelled_run_goes_on_and_a_cancelled_job_is_finished_before_its_tree_is(hub: AgentRuntimeDaemonHub) -> None:
    """SDK fact: the hub tells a daemon nothing of a cancelled run, only ``run.cleanup``, which the client ignores.

    Even a ``run.cancel``, which the hub never sends, is acknowledged while what the agent had started is alive.
    """
    client = NaiveClient(url=hub.endpoint, daemon_id="laptop", token=TOKEN)
    working = asyncio.get_running_loop().create_task(client.run_forever())
    pids: list[int] = []
    try:
        await hub.wait_for_daemon("laptop", BOUND)
        run = Run(hub)
        pids += (await asyncio.wait_for(run.got.get(), BOUND))["pids"]
        await run.cancel()
        (job,) = client._job_tasks
        assert all(map(alive, pids)), "the run is over, and its agent works on"
        session = client._job_tasks[job]
        await client._handle_message(json.dumps({"type": "run.cancel", "job_id": job}))
        await asyncio.wait({session}, timeout=BOUND)
        assert session.done()
        assert not alive(pids[0])
        assert alive(pids[1]), "finished, and the grandchild is alive"
    finally:
        working.cancel()
        await asyncio.wait({working})
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------ 5


async def test_one_hub_serves_all_installations_as_the_first_one_configured_it() -> None:
    """SDK fact: the hub is a process's; a second installation's settings are a conflict, and equal ones share every daemon."""
    hub = get_agent_runtime_daemon_hub("coding")
    try:
        await hub.start(host="127.0.0.1", port=0, token=TOKEN)
        same = get_agent_runtime_daemon_hub("coding")
        with pytest.raises(AgentRuntimeDaemonError) as conflict:
            await same.start(host="127.0.0.1", port=0, token="the second installation's")
        assert conflict.value.code.endswith("daemon_hub_conflict")
        async with daemon(hub, "laptop of A"):
            assert [each["daemon_id"] for each in await same.list_daemons()] == ["laptop of A"]
    finally:
        await hub.stop()
