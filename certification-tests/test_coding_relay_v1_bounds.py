"""The relay's bounds, measured on real processes: memory, floods, full disks, crowds, and where a worker keeps its fences."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg import limits
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.relay_markers import DiskMarkers
from testkit.cutting_proxy import CuttingProxy
from testkit.relay_processes import PREFIX, Refusal, started
from testkit.relay_rig import (
    OTHER_TOKEN,
    WAIT,
    ScriptedDaemon,
    free_port,
    markers,
    numbers,
    port_of,
    running_daemon,
    running_hub,
    until,
)
from testkit.relay_socket import SocketDaemon

MB = 1 << 20


@pytest_asyncio.fixture
async def hub(tmp_path: Path) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub with durable fences."""
    async with running_hub(state_dir=tmp_path / "state") as hub:
        yield hub


def unnamed_files(pid: int, directory: Path) -> int:
    """Bytes of the files that a process has open below a directory in which they have no name."""
    total = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(f"{directory}/") and entry.stat().st_nlink == 0:
                total += entry.stat().st_size
    return total


@pytest.mark.asyncio
class TestMemory:
    """What a process may hold."""

    async def test_a_consumer_that_stops_costs_neither_side_more_than_its_bound(self, tmp_path: Path) -> None:
        """Our rule: of 200 MB the hub holds two windows and the daemon 16 MiB, more than before."""
        size, count = 100_000, 2000
        async with (
            started("hub", state_dir=str(tmp_path / "state"), lease=600) as hub,
            started("daemon", url=await hub.told("endpoint"), table=str(tmp_path / "table")) as daemon,
        ):
            await hub.ask("wait")
            warm = await hub.ask("open", payload={"count": 5000})
            assert await hub.ask("count", job=warm) == 5000
            before = hub.resident(), daemon.resident()
            slow = await hub.ask("open", payload={"count": count, "pad": size})
            assert await hub.ask("take", job=slow, count=1) == [0]
            held_back = await daemon.told("held_back")
            assert held_back * size <= limits.RELAY_JOURNAL_MEMORY + 2 * limits.RELAY_WINDOW_BYTES + 2 * size
            for _ in range(5):
                other = await hub.ask("open", payload={"count": 500})
                assert await hub.ask("count", job=other) == 500
            grown = hub.resident() - before[0], daemon.resident() - before[1]
            assert grown[0] < 10 * MB, "two windows of 2 MiB, and what an allocator keeps"
            assert grown[1] < 24 * MB, "a journal of 16 MiB, and what an allocator keeps"
            assert await hub.ask("count", job=slow, first=1, bound=60) == count

    @pytest.mark.timeout(240)
    async def test_a_million_tiny_frames_are_a_million_events_in_bounded_memory(self, tmp_path: Path) -> None:
        """Our rule: each in a WebSocket message of its own; none is lost or repeated, nothing of them stays, others get on."""
        count = 1_000_000
        async with started("hub", state_dir=str(tmp_path)) as hub:
            url = await hub.told("endpoint")
            async with running_daemon(ScriptedDaemon(url=url)), started("flood", url=url, count=count) as flood:
                await hub.ask("wait")
                await hub.ask("wait", daemon="flood")
                before = hub.resident()
                job = await hub.ask("open", payload={}, daemon="flood")
                assert await hub.ask("take", job=job, count=1000) == list(range(1000))
                rest = asyncio.create_task(hub.ask("count", job=job, first=1000, bound=200))
                for _ in range(3):
                    other = await hub.ask("open", payload={"count": 500})
                    assert await hub.ask("count", job=other) == 500
                assert not rest.done(), "the other jobs were done in the middle of the flood"
                assert await rest == count
                assert await flood.told("sent") == count
                assert hub.resident() - before < 12 * MB

    async def test_a_full_disk_under_the_journal_holds_the_agent_back_and_loses_nothing(self, tmp_path: Path) -> None:
        """Our rule: where the kernel takes no more bytes the journal is full, and all of it arrives after the outage."""
        size, count, disk = 100_000, 400, 3 * MB
        async with running_hub(state_dir=tmp_path / "state") as hub, CuttingProxy(port_of(hub)) as proxy:
            hub.lease_seconds = WAIT * 2
            options: dict[str, Any] = {"url": proxy.url, "table": str(tmp_path / "table"), "journal": str(tmp_path / "journal")}
            async with started("daemon", **options, file_limit=disk) as daemon:
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"count": count, "pad": size, "pause": 0.001})
                async with asyncio.timeout(WAIT), contextlib.aclosing(job.events()) as events:
                    assert (await anext(events))["n"] == 0
                proxy.cut()
                held_back = await daemon.told("held_back")
                assert disk - size <= unnamed_files(daemon.pid, tmp_path / "journal") <= disk
                assert held_back * size > limits.RELAY_JOURNAL_MEMORY + disk - 2 * size
                assert held_back * size < limits.RELAY_JOURNAL_MEMORY + disk + 2 * limits.RELAY_WINDOW_BYTES
                proxy.restore()
                assert await numbers(job) == list(range(1, count))
                assert job.outcome == "completed"
            assert markers(tmp_path / "state") == []


@pytest.mark.asyncio
class TestCrowds:
    """Many at once."""

    async def test_a_thousand_strangers_that_keep_coming_do_not_keep_a_daemon_out(self) -> None:
        """Our rule: 4 parked of an address and 256 in all; a daemon is in 5 seconds after its installation's first run."""
        port = free_port()
        turned_away: Counter[str] = Counter()
        addresses = [f"127.0.{number // 25 + 1}.{number % 25 + 1}" for number in range(100)]
        parked_at_once: list[int] = []
        most_of_one: list[int] = []
        async with (
            running_hub(shared=True, installation="host", token=OTHER_TOKEN, port=port) as host,
            contextlib.AsyncExitStack() as crowd,
        ):
            assert host._listener is not None
            admission = host._listener.protocol._admission

            def look() -> None:
                crowds = Counter(socket.address for socket in admission._parked.values())
                parked_at_once.append(crowds.total())
                most_of_one.append(max(crowds.values(), default=0))

            async def stranger(number: int) -> SocketDaemon:
                # Every second one from one of five addresses, the others from all over.
                address = addresses[number // 2 % (len(addresses) if number % 2 else 5)]
                one = SocketDaemon(host.endpoint, "laptop", f"stranger-{number}", address=address)
                await crowd.enter_async_context(one)
                assert (await one.prove())["type"] == "daemon.parked"
                look()
                return one

            daemon = ScriptedDaemon(url=host.endpoint, reconnect_delay=None)
            async with running_daemon(daemon):
                await until(lambda: ("parked", "") in daemon.states)
                strangers = []
                for batch in range(20):
                    async with asyncio.timeout(WAIT):
                        strangers += await asyncio.gather(*(stranger(batch * 50 + each) for each in range(50)))
                assert len(strangers) == 1000
                assert (max(parked_at_once), max(most_of_one)) == (256, 4)
                assert any(detail.startswith("parking_full:") for _, detail in daemon.states)
                for one in strangers[:100]:
                    turned_away[(await one.closed())[1].partition(":")[0]] += 1
                assert turned_away == {"parking_full": 100}
                more = itertools.count(1000)

                async def pushing() -> None:
                    while True:
                        with contextlib.suppress(OSError, EOFError):
                            await stranger(next(more))

                pushers = [asyncio.create_task(pushing()) for _ in range(4)]
                try:
                    async with running_hub(shared=True, installation="guest", port=port) as guest:
                        await guest.wait_for_daemon("laptop", 5.0)
                        assert await numbers(await guest.open_job("laptop", {"count": 3})) == [0, 1, 2]
                finally:
                    for pusher in pushers:
                        pusher.cancel()
                    await asyncio.wait(pushers)
                assert all(pusher.cancelled() for pusher in pushers), "the crowd never stopped"
                assert (max(parked_at_once), max(most_of_one)) == (256, 4)

    async def test_a_parked_daemon_is_admitted_on_the_connection_it_waits_on(self) -> None:
        """Our rule: its installation's first run lets it in at once, not its next attempt."""
        port = free_port()
        async with (
            running_hub(shared=True, installation="host", token=OTHER_TOKEN, port=port) as host,
            CuttingProxy(port_of(host)) as proxy,
        ):
            daemon = ScriptedDaemon(url=proxy.url)
            async with running_daemon(daemon):
                await until(lambda: ("parked", "") in daemon.states)
                async with running_hub(shared=True, installation="guest", port=port) as guest:
                    await guest.wait_for_daemon("laptop", WAIT)
                    assert await numbers(await guest.open_job("laptop", {"count": 3})) == [0, 1, 2]
                    assert len(proxy.pipes) == 1
                    assert await host.list_daemons() == []

    async def test_strangers_hold_little_of_the_hubs_memory(self, tmp_path: Path) -> None:
        """Our rule: before the proof a message is not taken from the wire beyond what a hello may have, whatever it says."""
        huge = b"\x81\xff" + (MB - 1).to_bytes(8, "big") + bytes(4) + bytes(MB - 2)
        async with started("hub", state_dir=str(tmp_path)) as hub, contextlib.AsyncExitStack() as crowd:
            url = await hub.told("endpoint")
            async with SocketDaemon(url):
                before = hub.resident()
            for _ in range(60):
                one = SocketDaemon(url)
                await crowd.enter_async_context(one)
                one.write(huge)
                assert (await one.closed())[0] in (0, 1009), "cut, or told that it is too much"
            assert hub.resident() - before < 10 * MB
            async with running_daemon(ScriptedDaemon(url=url)):
                await hub.ask("wait")

    async def test_connections_that_never_say_what_they_want_cost_few_descriptors(self, tmp_path: Path) -> None:
        """Our rule: the oldest gives way, and a daemon is in while they keep coming."""
        async with started("hub", state_dir=str(tmp_path)) as hub:
            url = await hub.told("endpoint")
            host, port = url.removeprefix("ws://").split(":")
            most = hub.descriptors() + limits.RELAY_OPENING
            crowd: list[asyncio.StreamWriter] = []
            try:
                for _ in range(12):
                    for _ in range(50):
                        _, writer = await asyncio.open_connection(host, int(port))
                        writer.write(b"GET / HTTP/1.1\r\n")
                        crowd.append(writer)
                async with running_daemon(ScriptedDaemon(url=url)) as task:
                    await hub.ask("wait")
                    await until(lambda: hub.descriptors() <= most + 1)
                    assert not task.done()
            finally:
                for writer in crowd:
                    writer.transport.abort()

    async def test_all_connections_together_leave_the_worker_half_of_its_descriptors(self, tmp_path: Path) -> None:
        """Our rule: past that the larger crowd loses one, so that neither strangers nor a tenant push out anybody's daemons."""
        async with started("hub", state_dir=str(tmp_path)) as hub, contextlib.AsyncExitStack() as crowd:
            url = await hub.told("endpoint")
            before = hub.descriptors()
            resource.prlimit(hub.pid, resource.RLIMIT_NOFILE, (256, 256))
            live = []
            for number in range(50):
                one = SocketDaemon(url, f"desk{number}")
                await crowd.enter_async_context(one)
                live.append(await one.join())
            for number in range(150):
                await crowd.enter_async_context(SocketDaemon(url, address=f"127.0.1.{number + 1}"))
            await until(lambda: hub.descriptors() <= before + 128 + 1)
            async with running_daemon(ScriptedDaemon(url=url)):
                await hub.ask("wait")
                for one in live:
                    await one.say({"type": "daemon.ping", "n": 1})
                    assert (await one.hear("daemon.pong"))["n"] == 1
                for number in range(76):
                    one = SocketDaemon(url, f"late{number}")
                    await crowd.enter_async_context(one)
                    await one.join()
                assert hub.descriptors() <= before + 128 + 1
                for number in range(10):
                    await crowd.enter_async_context(SocketDaemon(url, address=f"127.0.2.{number + 1}"))
                await until(lambda: hub.descriptors() <= before + 128 + 1)
                for one in live:
                    await one.say({"type": "daemon.ping", "n": 2})
                    assert (await one.hear("daemon.pong"))["n"] == 2

    async def test_refused_connections_that_do_not_leave_cost_few_descriptors(self, tmp_path: Path) -> None:
        """Our rule: an answer to a close frame is waited for from some of a crowd, and not from all."""
        async with started("hub", state_dir=str(tmp_path)) as hub, contextlib.AsyncExitStack() as crowd:
            url = await hub.told("endpoint")
            before = hub.descriptors()
            deaf = []
            for _ in range(200):
                one = SocketDaemon(url)
                await crowd.enter_async_context(one)
                one.socket.transport.pause_reading()
                await one.push(b"{}")
                deaf.append(one)
            await until(lambda: hub.descriptors() <= before + limits.RELAY_LEAVING + 1)

    async def test_a_parked_daemon_may_have_a_long_table_once_it_is_proven(self) -> None:
        """Our rule: the narrow bound ends with the proof, whenever that comes."""
        port = free_port()
        many = [f"job-{number:060d}" for number in range(1000)]
        async with running_hub(shared=True, installation="host", token=OTHER_TOKEN, port=port) as host:
            daemon = ScriptedDaemon(url=host.endpoint, quiesced=many)
            async with running_daemon(daemon):
                await until(lambda: ("parked", "") in daemon.states)
                async with running_hub(shared=True, installation="guest", port=port):
                    await until(lambda: daemon.connected)
                    assert [state for state, _ in daemon.states] == ["parked", "connected"]

    async def test_an_installation_has_128_daemons_and_the_next_waits_its_turn(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: the 129th is told so and comes back; it is in as soon as one has left."""
        async with contextlib.AsyncExitStack() as stack:
            for number in range(127):
                one = await stack.enter_async_context(SocketDaemon(hub.endpoint, f"desk{number}"))
                await one.join()
            daemon, last = ScriptedDaemon(url=hub.endpoint), SocketDaemon(hub.endpoint, "last")
            async with last:
                await last.join()
                await stack.enter_async_context(running_daemon(daemon))
                await until(lambda: any(detail.startswith("daemons_full:") for _, detail in daemon.states))
                assert len(await hub.list_daemons()) == 128
                assert not daemon.connected
            await hub.wait_for_daemon("laptop", WAIT)


@dataclass(frozen=True)
class Worker:
    """A worker as its environment describes it."""

    shape: str
    environment: dict[str, str]
    data: str
    """What stands for ``/data`` there."""
    fences: Path | None
    """Where its fences have to be."""


def worker(shape: str, directory: Path) -> Worker:
    """One of each shape, all below one directory."""
    home, data = directory / "home", directory / "data"
    profile = "LANGBOT_PLUGIN_RUNTIME_PROFILE"
    home.mkdir()
    if shape == "jail":
        data.mkdir()
        return Worker("JAIL", {profile: "shared", "HOME": "/home"}, str(data), data / ".coding-relay-v1" / PREFIX)
    if shape == "pool":
        return Worker("POOL", {profile: "shared", "HOME": "/tmp"}, str(data), None)
    state = home / ".local" / "state" / "coding-relay-v1" / PREFIX
    if shape == "debug":
        return Worker("DEBUG", {"HOME": str(home)}, str(data), state)
    return Worker("DEDICATED", {profile: "oss_dev", "HOME": str(home)}, str(data), state)


class TestFences:
    """A hub that was killed, and the next one of the same worker."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shape", ["debug", "dedicated", "jail", "pool"])
    async def test_a_killed_hub_s_stubborn_job_keeps_its_daemon_without_jobs(self, tmp_path: Path, shape: str) -> None:
        """Our rule: in each shape's own storage; the daemon is told to end it, comes back till it is ended, others work on."""
        place = worker(shape, tmp_path)
        port = free_port()
        options: dict[str, Any] = {"environment": place.environment, "port": port, "worker": place.data}
        laptop, desk = (ScriptedDaemon(url=f"ws://127.0.0.1:{port}", daemon_id=name) for name in ("laptop", "desk"))
        async with running_daemon(laptop), running_daemon(desk):
            async with started("hub", **options) as killed:
                assert await killed.told("shape") == place.shape
                await killed.ask("wait")
                job = await killed.ask("open", payload={"count": 1, "hold": True, "stubborn": True})
                assert await killed.ask("take", job=job, count=1) == [0]
                await killed.kill()
            left = markers(tmp_path)
            if place.fences is None:
                assert left == []
            else:
                assert [marker.parent.parent for marker in left] == [place.fences]
                assert left[0].stat().st_mode & 0o777 == 0o600
                assert left[0].parent.stat().st_mode & 0o777 == 0o700
                assert job in left[0].read_text()
            async with started("hub", **options) as after:
                assert await after.told("shape") == place.shape
                await until(lambda: laptop.cancelled == [job])
                for request in (after.ask("wait", seconds=0.5), after.ask("open", payload={"count": 1})):
                    with pytest.raises(Refusal) as refused:
                        await request
                    assert str(refused.value) in ("daemon_fenced", "daemon_offline")
                await after.ask("wait", daemon="desk")
                other = await after.ask("open", payload={"count": 1}, daemon="desk")
                assert await after.ask("count", job=other) == 1
                if place.fences is not None:
                    assert any(said.startswith("daemon_fenced:") for _, said in laptop.states)
                    assert markers(tmp_path) == left
                assert (laptop.ran, laptop.ended) == ([job], [])
                laptop.let_go.set()
                await after.ask("wait")
                again = await after.ask("open", payload={"count": 1})
                assert await after.ask("count", job=again) == 1
                assert laptop.ran == [job, again]
                assert markers(tmp_path) == []

    def test_a_marker_is_synced_with_its_directories_before_anything_is_sent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: a machine that loses its power right after the dispatch has the fence on its disk."""
        synced: list[str] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        base = tmp_path / "made" / "now"
        DiskMarkers(base).mark("installation", "laptop", "job", "table")
        [marker] = markers(base)
        file, *directories = synced
        assert Path(file).parent == marker.parent
        assert {str(marker.parent), str(base), str(base.parent)} <= set(directories)
