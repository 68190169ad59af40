"""The relay between a hub and its daemons, on real sockets and with real processes, over a network that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg import limits
from pkg.daemon_relay import (
    AgentRuntimeDaemonError,
    AgentRuntimeDaemonHub,
    Job,
)
from pkg.relay_protocol import RelayTimes
from testkit.cutting_proxy import CuttingProxy
from testkit.relay_rig import (
    LEASE,
    TOKEN,
    WAIT,
    ScriptedDaemon,
    markers,
    numbers,
    port_of,
    refusal,
    running_daemon,
    running_hub,
    scaled,
    until,
)

pytestmark = pytest.mark.asyncio

ROOM = contextvars.ContextVar("ROOM", default="nobody's")


@pytest_asyncio.fixture
async def hub(tmp_path: Path) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub with durable fences."""
    async with running_hub(state_dir=tmp_path / "state") as hub:
        yield hub


@pytest_asyncio.fixture
async def proxy(hub: AgentRuntimeDaemonHub) -> AsyncIterator[CuttingProxy]:
    """The network between daemon and hub."""
    async with CuttingProxy(port_of(hub)) as proxy:
        yield proxy


class TestJobs:
    """What a job is, without trouble."""

    async def test_events_come_once_in_order_and_the_job_leaves_nothing(
        self, hub: AgentRuntimeDaemonHub, tmp_path: Path
    ) -> None:
        """Our rule: the consumer's sequence is the producer's; no marker outlives a proven end."""
        daemon = ScriptedDaemon(url=hub.endpoint, metadata={"name": "desk"}, features=("sessions",))
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            [info] = await hub.list_daemons()
            assert (info["daemon_id"], info["metadata"], info["features"], info["fenced"]) == (
                "laptop",
                {"name": "desk"},
                ["sessions"],
                False,
            )
            found = [event["n"] async for event in hub.run_job("laptop", {"count": 5000}, None, WAIT)]
            assert found == list(range(5000))
            assert daemon.ended == daemon.ran
            assert markers(tmp_path / "state") == []

    async def test_a_marker_is_on_the_disk_before_the_job_and_private(self, hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
        """Our rule: a hub that is killed after the dispatch leaves a fence."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            [marker] = markers(tmp_path / "state")
            assert marker.stat().st_mode & 0o777 == 0o600
            assert marker.parent.stat().st_mode & 0o777 == 0o700
            await job.cancel()
            assert markers(tmp_path / "state") == []

    async def test_an_unwritable_marker_starts_nothing(self, tmp_path: Path) -> None:
        """Our rule: without a durable fence nothing is dispatched, and the error says why."""
        (tmp_path / "state").write_text("in the way")
        async with running_hub(state_dir=tmp_path / "state") as hub:
            daemon = ScriptedDaemon(url=hub.endpoint)
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                error = await refusal(hub.open_job("laptop", {"count": 1}))
                assert error.code == "coding.daemon_state_unwritable"
                assert daemon.ran == []

    async def test_commands_are_answered_in_order_or_refused_in_words(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: every command ends with the daemon's answer or a typed error."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            answers = await asyncio.gather(*(job.command("steer", number) for number in range(20)))
            assert answers == [{"verb": "steer", "value": number} for number in range(20)]
            assert (await refusal(job.command("prompt", "refuse"))).code == "coding.busy"
            waiting = asyncio.create_task(job.command("answer", 1))
            await waiting
            await job.cancel()
            assert (await refusal(job.command("steer", 1))).code == "coding.daemon_job_gone"

    async def test_failures_have_codes_and_keep_the_machine_s_words_to_themselves(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a known failure keeps its code, an unknown one says nothing of what the machine said."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            known = await refusal(numbers(await hub.open_job("laptop", {"fail": "coding.busy"})))
            assert known.code == "coding.busy"
            unknown = await refusal(numbers(await hub.open_job("laptop", {"crash": True})))
            assert unknown.code == "coding.daemon_job_failed"
            assert TOKEN not in str(unknown)

    async def test_a_message_far_above_a_frame_arrives_whole(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: 20 MiB travel in parts; 40 MiB are a visible error of that job, and the connection lives on."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"big": 20 * 1024 * 1024, "padding": "z" * 3_000_000})
            async with asyncio.timeout(WAIT):
                assert [len(event["big"]) async for event in job.events()] == [20 * 1024 * 1024]
            error = await refusal(numbers(await hub.open_job("laptop", {"big": 40 * 1024 * 1024})))
            assert error.code == "coding.daemon_message_too_large"
            assert await numbers(await hub.open_job("laptop", {"count": 3})) == [0, 1, 2]

    async def test_a_hundred_and_twenty_eight_jobs_at_once_and_no_more(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: ``RELAY_JOBS`` jobs go on side by side, the next is refused in words, on whichever daemon it would be."""
        daemon, other = ScriptedDaemon(url=hub.endpoint), ScriptedDaemon(url=hub.endpoint, daemon_id="desk")
        async with running_daemon(daemon), running_daemon(other):
            for name in ("laptop", "desk"):
                await hub.wait_for_daemon(name, WAIT)
            held = [await hub.open_job("laptop", {"count": 50, "hold": True}) for _ in range(limits.RELAY_JOBS)]
            for name in ("laptop", "desk"):
                assert (await refusal(hub.open_job(name, {}))).code == "coding.daemon_jobs_full"

            async def some(job: Job) -> list[int]:
                found: list[int] = []
                async with contextlib.aclosing(job.events()) as events:
                    async for event in events:
                        found.append(event["n"])
                        if len(found) == 50:
                            break
                return found

            async with asyncio.timeout(WAIT):
                assert await asyncio.gather(*map(some, held)) == [list(range(50))] * limits.RELAY_JOBS
                await asyncio.gather(*(job.cancel() for job in held))
            assert sorted(daemon.ended) == sorted(job.job_id for job in held)

    async def test_a_timeout_is_a_typed_error_after_a_proven_end(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: ``run_job`` never leaves its job running behind a timeout."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)

            async def run() -> None:
                async for _ in hub.run_job("laptop", {"hold": True}, None, 0.2):
                    pass

            error = await refusal(run())
            assert (error.code, error.retryable) == ("coding.daemon_timeout", True)
            assert daemon.ended == daemon.ran


class TestNetwork:
    """What a network does, and what nobody may notice of it."""

    @pytest.mark.parametrize("seconds", [0.5, 5, 29, 65])
    async def test_a_cut_in_mid_stream_changes_nothing(
        self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy, seconds: float
    ) -> None:
        """Our rule: within the lease a cut is invisible, whether the daemon notices it at once or not."""
        async with running_daemon(ScriptedDaemon(url=proxy.url)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 400, "pause": 0.002, "pad": 200})
            found: list[int] = []
            async with asyncio.timeout(WAIT):
                async for event in job.events():
                    found.append(event["n"])
                    if len(found) == 100:
                        proxy.cut()
                        asyncio.get_running_loop().call_later(scaled(seconds), proxy.restore)
            assert found == list(range(400))
            assert len(proxy.pipes) > 1

    async def test_a_black_hole_in_mid_stream_changes_nothing(self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy) -> None:
        """Our rule: a connection that carries nothing any more is given up after ``dead`` seconds and replaced."""
        hub.lease_seconds = LEASE * 2
        async with running_daemon(ScriptedDaemon(url=proxy.url)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 400, "pause": 0.002})
            found: list[int] = []
            async with asyncio.timeout(WAIT):
                async for event in job.events():
                    found.append(event["n"])
                    if len(found) == 100:
                        proxy.black_hole()
            assert found == list(range(400))

    async def test_many_cuts_one_after_the_other_change_nothing(self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy) -> None:
        """Our rule: exactly once and in order, whatever was under way at each cut; commands too."""
        async with running_daemon(ScriptedDaemon(url=proxy.url)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 3000, "pad": 2000})
            found: list[int] = []
            answers: list[asyncio.Task[Any]] = []
            async with asyncio.timeout(WAIT):
                async for event in job.events():
                    found.append(event["n"])
                    if len(found) % 300 == 0 and len(found) < 2900:
                        answers.append(asyncio.create_task(job.command("steer", len(found))))
                        proxy.cut()
                        asyncio.get_running_loop().call_later(0.05, proxy.restore)
                results = await asyncio.gather(*answers, return_exceptions=True)
            assert found == list(range(3000))
            assert len(proxy.pipes) >= 3
            for number, result in enumerate(results, 1):
                gone = isinstance(result, AgentRuntimeDaemonError) and result.reason == "daemon_job_gone"
                assert gone or result == {"verb": "steer", "value": 300 * number}

    async def test_an_end_during_the_outage_is_told_afterwards(self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy) -> None:
        """Our rule: what a job said and how it ended waits for the hub."""
        daemon = ScriptedDaemon(url=proxy.url)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 50, "pause": 0.005})
            await until(lambda: daemon.ran)
            proxy.cut()
            await until(lambda: daemon.ended)
            proxy.restore()
            assert await numbers(job) == list(range(50))
            assert job.outcome == "completed"

    async def test_past_its_lease_both_sides_agree_that_a_job_is_lost(
        self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy, tmp_path: Path
    ) -> None:
        """Our rule: the daemon ends the job by itself, the hub says lost, and the proof at the reconnect lifts the fence."""
        daemon = ScriptedDaemon(url=proxy.url)
        hub.lease_seconds = 0.3
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            await until(lambda: daemon.ran)
            proxy.cut()
            error = await refusal(numbers(job))
            assert (error.code, error.retryable) == ("coding.daemon_lost", True)
            await until(lambda: daemon.ended)
            assert daemon.cancelled == [job.job_id]
            assert len(markers(tmp_path / "state")) == 1
            assert (await refusal(hub.wait_for_daemon("laptop", 0.05))).code == "coding.daemon_fenced"
            proxy.restore()
            await hub.wait_for_daemon("laptop", WAIT)
            assert markers(tmp_path / "state") == []
            assert await numbers(await hub.open_job("laptop", {"count": 2})) == [0, 1]

    async def test_without_a_lease_a_disconnection_cancels(self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy) -> None:
        """Our rule: ``lease_seconds = 0`` is the plain behaviour."""
        daemon = ScriptedDaemon(url=proxy.url)
        hub.lease_seconds = 0
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            await until(lambda: daemon.ran)
            proxy.cut()
            assert (await refusal(numbers(job))).code == "coding.daemon_lost"
            await until(lambda: daemon.ended)

    async def test_an_injected_frame_changes_nothing(self, hub: AgentRuntimeDaemonHub, proxy: CuttingProxy) -> None:
        """Our rule: a frame without the connection's own seal is dropped and counted, in both directions."""
        daemon = ScriptedDaemon(url=proxy.url)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 1, "hold": True})
            await until(lambda: daemon.ran)
            # Quiet: what was under way has arrived, so that the injected frame stands between two whole ones.
            assert await job.command("steer", 1)
            await asyncio.sleep(scaled(limits.RELAY_ACK_DELAY) * 4)
            message = {"type": "run.finished", "job_id": job.job_id, "outcome": "completed", "last": 0, "quiescent": True}
            body = b'["AAAAAAAAAAAAAAAAAAAAAA",7,' + json.dumps(message).encode() + b"]"
            proxy.inject_up(body)
            proxy.inject_down(body.replace(b"run.finished", b"run.cancel"))
            assert await job.command("steer", 2) == {"verb": "steer", "value": 2}
            assert daemon.cancelled == []
            assert job.outcome is None
            assert daemon._protocol.counters.injected == 1
            assert hub._listener is not None
            [socket] = hub._listener.protocol._sockets.values()
            assert socket.counters.injected == 1
            assert len(proxy.pipes) == 1
            await job.cancel()

    async def test_a_cut_of_65_seconds_at_full_length(self, tmp_path: Path) -> None:
        """Our rule: nothing of the above holds only because the suites' relay lives faster."""
        hub = AgentRuntimeDaemonHub(error_code_prefix="coding", state_dir=tmp_path)
        await hub.start("127.0.0.1", 0, TOKEN)
        async with CuttingProxy(port_of(hub)) as proxy:
            daemon = ScriptedDaemon(url=proxy.url, times=RelayTimes(), reconnect_delay=None)
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"count": 700, "pause": 0.1})
                found: list[int] = []
                async with asyncio.timeout(110):
                    async for event in job.events():
                        found.append(event["n"])
                        if len(found) == 20:
                            proxy.cut()
                            asyncio.get_running_loop().call_later(65, proxy.restore)
                assert found == list(range(700))
            await hub.stop()
