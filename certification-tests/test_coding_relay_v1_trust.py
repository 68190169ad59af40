"""Who may do what over the relay, how a job ends for certain, and what pressure does: real sockets and real processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import gc
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import types
import urllib.parse
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin

from pkg import installations, limits, relay_hub_shell
from pkg.daemon_relay import (
    AgentRuntimeDaemonClient,
    AgentRuntimeDaemonError,
    AgentRuntimeDaemonHub,
    Job,
    agent_runtime_daemon_config_from_plugin_config,
    get_agent_runtime_daemon_hub,
    handle_agent_runtime_mcp_payload,
    revoke,
    state_directory,
)
from pkg.errors import ProcessCleanupUnconfirmed
from pkg.relay_journal import DiskSpill
from pkg.relay_markers import DiskMarkers
from pkg.relay_protocol import PROTOCOL, RelayTimes, daemon_key, format_key
from pkg.runtime_support import WorkerShape
from testkit.cutting_proxy import CuttingProxy
from testkit.relay_rig import (
    LEASE,
    OTHER_TOKEN,
    TIMES,
    TOKEN,
    WAIT,
    ScriptedDaemon,
    free_port,
    kill,
    markers,
    numbers,
    port_of,
    refusal,
    running_daemon,
    running_hub,
    said,
    start_process,
    until,
)
from testkit.relay_socket import SocketDaemon

ROOM = contextvars.ContextVar("ROOM", default="nobody's")
ROOT = Path(__file__).resolve().parent.parent
PKG = Path(installations.__file__).resolve().parent


_NOT_ENTERED = (type, types.ModuleType, types.FunctionType, types.FrameType, asyncio.AbstractEventLoop, asyncio.Future)


def secrets_held(start: object, token: str) -> set[str]:
    """Which of a token and what is made of it can be reached from ``start``, without what the loop or a module leads to."""
    wanted = {"token": token.encode(), "daemon's key": daemon_key(token, "laptop")}
    found: set[str] = set()
    seen: dict[int, object] = {}
    waiting = [start]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _NOT_ENTERED):
            continue
        seen[id(each)] = each
        if isinstance(each, str | bytes | bytearray):
            data = each.encode(errors="surrogatepass") if isinstance(each, str) else bytes(each)
            found |= {name for name, secret in wanted.items() if secret in data}
        waiting += gc.get_referents(each)
    return found


def has_ipv6() -> bool:
    """Whether this machine's IPv6 loopback address can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


@pytest_asyncio.fixture
async def hub(tmp_path: Path) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub with durable fences."""
    async with running_hub(state_dir=tmp_path / "state") as hub:
        yield hub


@pytest.mark.asyncio
class TestEnds:
    """A job that is said to be stopped is stopped."""

    async def test_however_often_its_caller_is_cancelled_a_job_is_ended_first(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: cancelling again and again during the cleanup shortens nothing."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)

            async def consume() -> None:
                async with contextlib.aclosing(
                    hub.run_job("laptop", {"count": 1, "hold": True, "slow_end": 0.4}, None, WAIT)
                ) as run:
                    async for _ in run:
                        started.set()

            started = asyncio.Event()
            task = asyncio.create_task(consume())
            await started.wait()
            cancels = 0
            async with asyncio.timeout(WAIT):
                while not task.done():
                    task.cancel()
                    cancels += 1
                    await asyncio.sleep(0.02)
            assert cancels > 5
            assert task.cancelled()
            assert daemon.ended == daemon.ran != []

    async def test_a_child_that_will_not_die_is_said_so_and_fences_its_daemon(
        self, hub: AgentRuntimeDaemonHub, tmp_path: Path
    ) -> None:
        """Our rule: no proof, no success and no further job; the proof, when it comes, lifts the fence by itself."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True, "stubborn": True})
            await until(lambda: daemon.ran)
            with pytest.raises(ProcessCleanupUnconfirmed):
                async with asyncio.timeout(WAIT):
                    await job.cancel()
            assert daemon.ended == []
            assert len(markers(tmp_path / "state")) == 1
            assert (await refusal(hub.open_job("laptop", {}))).code == "coding.daemon_fenced"
            assert (await refusal(hub.wait_for_daemon("laptop", 0.05))).code == "coding.daemon_fenced"
            daemon.let_go.set()
            await hub.wait_for_daemon("laptop", WAIT)
            assert markers(tmp_path / "state") == []
            assert await numbers(await hub.open_job("laptop", {"count": 2})) == [0, 1]

    async def test_an_end_that_the_daemon_itself_cannot_prove_fences_too(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a daemon that says "not quiescent" is believed; an operator may vouch for it."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True, "unproven": True})
            await until(lambda: daemon.ran)
            with pytest.raises(ProcessCleanupUnconfirmed):
                await job.cancel()
            assert (await refusal(hub.open_job("laptop", {}))).code == "coding.daemon_fenced"
            hub.lift_fence("laptop")
            assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]

    async def test_what_a_command_leaves_behind_counts_at_the_end(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a cleanup that could not be confirmed is never forgotten, wherever in the job it happened."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            await until(lambda: daemon.ran)
            assert (await refusal(job.command("close", "leave"))).code == "coding.cleanup_unconfirmed"
            with pytest.raises(ProcessCleanupUnconfirmed):
                await job.cancel()
            assert (await refusal(hub.open_job("laptop", {}))).code == "coding.daemon_fenced"

    async def test_a_killed_hub_leaves_a_fence_that_the_daemon_s_proof_lifts(self, tmp_path: Path) -> None:
        """Our rule: the next hub of the installation takes up the marker, and the daemon ends the job it does not know."""
        port = free_port()
        daemon = ScriptedDaemon(url=f"ws://127.0.0.1:{port}")
        async with running_daemon(daemon):
            process = await start_process("hub", port, str(tmp_path / "state"), TOKEN, {"count": 1, "hold": True})
            try:
                job_id = await said(process, "job")
                await said(process, "event")
            finally:
                await kill(process)
            assert len(markers(tmp_path / "state")) == 1
            async with running_hub(port=port, state_dir=tmp_path / "state") as hub:
                await hub.wait_for_daemon("laptop", WAIT)
                assert daemon.ended == daemon.cancelled == [job_id]
                assert markers(tmp_path / "state") == []
                assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]

    async def test_a_killed_daemon_s_job_is_lost_and_its_successor_proves_the_end(
        self, hub: AgentRuntimeDaemonHub, tmp_path: Path
    ) -> None:
        """Our rule: another process of the same daemon never goes on with a job; its table is the proof."""
        table = str(tmp_path / "table.json")
        process = await start_process("daemon", hub.endpoint, table, TOKEN)
        try:
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 1, "hold": True})
            async with asyncio.timeout(WAIT):
                assert await anext(job.events()) == {"n": 0, "pad": ""}
        finally:
            await kill(process)
        process = await start_process("daemon", hub.endpoint, table, TOKEN)
        try:
            assert (await refusal(numbers(job))).code == "coding.daemon_lost"
            await hub.wait_for_daemon("laptop", WAIT)
            assert markers(tmp_path / "state") == []
            assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]
        finally:
            await kill(process)

    async def test_a_job_cancelled_as_it_starts_never_runs_and_is_proven(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: start and cancel that arrive together leave nothing, and nobody waits for them."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            for _ in range(20):
                job = await hub.open_job("laptop", {"hold": True})
                async with asyncio.timeout(WAIT):
                    await job.cancel()
            assert daemon.ended == daemon.ran
            assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]

    @pytest.mark.parametrize("asleep", [5.0, 7.5], ids=["within the lease", "past it"])
    async def test_a_machine_that_slept_goes_on_or_agrees_that_its_job_is_lost(
        self, hub: AgentRuntimeDaemonHub, tmp_path: Path, asleep: float
    ) -> None:
        """Our rule: a long gap is judged by the lease when the machine wakes, not by timers that stood still."""
        process = await start_process("daemon", hub.endpoint, str(tmp_path / "table.json"), TOKEN)
        within = asleep < LEASE
        hub.lease_seconds = LEASE * 4 if within else LEASE
        try:
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 300, "pause": 0.01})
            found: list[int] = []
            async with asyncio.timeout(WAIT), contextlib.aclosing(job.events()) as events:
                async for event in events:
                    found.append(event["n"])
                    if len(found) == 50:
                        break
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(asleep)
                process.send_signal(signal.SIGCONT)
                if within:
                    found += [event["n"] async for event in events]
                    assert found == list(range(300))
                else:
                    with pytest.raises(AgentRuntimeDaemonError) as lost:
                        found += [event["n"] async for event in events]
                    assert lost.value.code == "coding.daemon_lost"
                    assert found == list(range(len(found)))
            await hub.wait_for_daemon("laptop", WAIT)
            assert markers(tmp_path / "state") == []
        finally:
            await kill(process)

    async def test_stopping_either_side_ends_the_jobs_in_words(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a daemon that is stopped says so; a hub that is stopped ends its jobs first."""
        first = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(first):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            await until(lambda: first.ran)
        assert (await refusal(numbers(job))).code == "coding.daemon_stopped"
        assert first.ended == [job.job_id]
        second = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(second):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"hold": True})
            await until(lambda: second.ran)
            await hub.stop()
            assert second.ended == [job.job_id]
            assert (await refusal(numbers(job))).code == "coding.daemon_job_gone"
            assert (hub.is_running, hub.endpoint) == (False, "")


@pytest.mark.asyncio
class TestTrust:
    """Whom hub and daemon believe."""

    async def test_a_wrong_token_stops_the_daemon_with_the_reason(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: no loop on a credential that a person has to change."""
        error = await refusal(ScriptedDaemon(url=hub.endpoint, token=OTHER_TOKEN).run_forever())
        assert error.code == "coding.daemon_rejected"
        assert "daemon_token_rejected" in str(error)
        assert OTHER_TOKEN not in str(error)
        assert await hub.list_daemons() == []

    async def test_a_key_of_its_own_lets_a_daemon_be_itself_only(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: the key derived for one daemon id opens no other."""
        key = daemon_key(TOKEN, "laptop")
        async with running_daemon(ScriptedDaemon(url=hub.endpoint, token="", key=key)):
            await hub.wait_for_daemon("laptop", WAIT)
        other = ScriptedDaemon(url=hub.endpoint, token="", key=key, daemon_id="desk")
        assert "daemon_token_rejected" in str(await refusal(other.run_forever()))

    async def test_a_hub_without_the_secret_gets_nothing_from_a_daemon(self) -> None:
        """Our rule: authentication is mutual; an impostor is left, and tried again in case it was a mistake."""
        async with running_hub(token=OTHER_TOKEN, shared=True, installation="impostor") as hub:
            daemon = ScriptedDaemon(url=hub.endpoint)
            async with running_daemon(daemon):
                await until(lambda: ("parked", "") in daemon.states)
                assert await hub.list_daemons() == []
                assert not daemon.connected

    async def test_the_hello_of_another_protocol_is_told_what_to_upgrade(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: the reason fits into the close frame and says what to do."""
        for hello in (b'{"type":"daemon.hello","daemon_id":"old","token":"x"}', b"{nonsense", b"[" * 4000, b'"\xff\xfe"'):
            async with connect(hub.endpoint, compression=None, proxy=None) as raw:
                await raw.send(hello, text=True)
                with pytest.raises(ConnectionClosed) as closed:
                    async with asyncio.timeout(WAIT):
                        await raw.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1008
                assert "upgrade" in closed.value.rcvd.reason

    async def test_half_a_frame_and_silence_keeps_nobody_out(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a connection that stalls costs only itself."""
        reader, writer = await asyncio.open_connection(*port_of(hub))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        await writer.drain()
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
        writer.transport.abort()
        del reader

    async def test_a_page_in_a_browser_gets_no_connection(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: whatever sends an ``Origin`` is not a daemon."""
        with pytest.raises(InvalidStatus) as refused:
            async with connect(hub.endpoint, origin=Origin("http://127.0.0.1"), proxy=None):
                pass
        assert refused.value.response.status_code == 403

    @pytest.mark.parametrize("shared", [False, True])
    async def test_a_token_in_the_hello_is_taken_outside_the_shared_profile_only(self, shared: bool) -> None:
        """Our rule: the plain hello of simple clients is no way into a worker that others use."""
        hello = {"type": "daemon.hello", "protocol": PROTOCOL, "daemon_id": "plain", "daemon_incarnation": "i1", "token": TOKEN}
        async with running_hub(shared=shared, installation="plain") as hub, connect(hub.endpoint, proxy=None) as raw:
            await raw.send(json.dumps(hello))
            async with asyncio.timeout(WAIT):
                if shared:
                    with pytest.raises(ConnectionClosed) as closed:
                        await raw.recv()
                    assert closed.value.rcvd is not None
                    assert "daemon_token_sent" in closed.value.rcvd.reason
                else:
                    assert json.loads(await raw.recv())["type"] == "daemon.ready"
                    assert [info["daemon_id"] for info in await hub.list_daemons()] == ["plain"]

    async def test_a_second_daemon_with_the_same_id_waits_for_the_first_to_go(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a live daemon is never replaced; its jobs notice nothing."""
        first, second = ScriptedDaemon(url=hub.endpoint), ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(second), contextlib.AsyncExitStack() as stack:
            await until(lambda: second.connected)
            await stack.enter_async_context(running_daemon(first))
            job = await hub.open_job("laptop", {"count": 100, "pause": 0.002})
            assert await numbers(job) == list(range(100))
            await until(lambda: any("daemon_id_in_use" in detail for _, detail in first.states))
            assert (first.connected, second.connected, len(second.ran)) == (False, True, 1)
        async with running_daemon(first):
            await until(lambda: first.connected)

    async def test_another_daemon_of_the_same_installation_has_no_say_about_a_job(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: events, ends and acknowledgements count from the job's own connection only."""
        laptop, mallory = ScriptedDaemon(url=hub.endpoint), ScriptedDaemon(url=hub.endpoint, daemon_id="mallory")
        async with running_daemon(laptop), running_daemon(mallory):
            await hub.wait_for_daemon("laptop", WAIT)
            await hub.wait_for_daemon("mallory", WAIT)
            job = await hub.open_job("laptop", {"count": 1, "hold": True})
            await until(lambda: laptop.ran)
            for message in (
                {"type": "run.event", "job_id": job.job_id, "seq": 2, "records": [{"n": "forged"}]},
                {"type": "run.event", "job_id": job.job_id, "seq": 2, "records": [["mcp", 1, {"forged": True}]]},
                {"type": "run.ack", "job_id": job.job_id, "seq": 1},
                {"type": "run.finished", "job_id": job.job_id, "outcome": "completed", "last": 1, "quiescent": True},
            ):
                mallory._protocol._control(message)
            own = await hub.open_job("mallory", {"count": 1})
            assert await numbers(own) == [0]
            assert await job.command("steer", 1) == {"verb": "steer", "value": 1}
            assert job.outcome is None
            found: list[Any] = []
            reading = asyncio.create_task(_collect(job, found))
            await job.cancel()
            await reading
            assert [event["n"] for event in found] in ([], [0])

    async def test_plaintext_off_this_machine_needs_its_owner_s_word(self) -> None:
        """Our rule: ``ws://`` to another machine is refused unless the daemon's own settings insist."""
        for url in ("ws://192.0.2.1:8766", "http://127.0.0.1", "ws://user:secret@127.0.0.1:1", "ws://127.0.0.1:1/?token=x"):
            with pytest.raises(ValueError) as refused:
                AgentRuntimeDaemonClient(url=url, daemon_id="laptop", token=TOKEN)
            assert TOKEN not in str(refused.value)
        AgentRuntimeDaemonClient(url="ws://192.0.2.1:8766", daemon_id="laptop", token=TOKEN, insecure_plaintext=True)
        with pytest.raises(ValueError):
            AgentRuntimeDaemonClient(url="ws://127.0.0.1:1", daemon_id="laptop")

    async def test_no_secret_is_on_the_wire_in_logs_or_in_files(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Our rule: the token and the keys made from it are nowhere, in no encoding."""
        caplog.set_level(logging.DEBUG)
        table = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with running_hub(state_dir=tmp_path / "state") as hub, CuttingProxy(port_of(hub)) as proxy:
            daemon = ScriptedDaemon(url=proxy.url, journal_dir=tmp_path / "journal")
            wrong = ScriptedDaemon(url=proxy.url, token=OTHER_TOKEN, daemon_id="wrong")
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                await refusal(wrong.run_forever())
                job = await hub.open_job("laptop", {"tool": table, "hold": True}, _echo)
                async with contextlib.aclosing(job.events()) as events:
                    async for event in events:
                        if "answer" in event:
                            break
                fence = await hub.open_job("laptop", {"hold": True, "unproven": True})
                await until(lambda: len(daemon.ran) == 2)
                with pytest.raises(ProcessCleanupUnconfirmed):
                    await fence.cancel()
                kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
                await refusal(numbers(await _failing(hub)))
                await job.cancel()
            recorded = proxy.recorded()
        assert b"daemon.hello" in recorded
        assert b"run.command" in recorded
        assert b"laptop" in kept
        words = caplog.text.encode() + repr((daemon, hub, job)).encode()
        for secret in (
            TOKEN.encode(),
            OTHER_TOKEN.encode(),
            daemon_key(TOKEN, "laptop"),
            format_key(daemon_key(TOKEN, "laptop")).encode(),
        ):
            for form in (
                secret,
                base64.b64encode(secret).rstrip(b"="),
                base64.urlsafe_b64encode(secret).rstrip(b"="),
                secret.hex().encode(),
                urllib.parse.quote(secret).encode(),
            ):
                assert form not in recorded
                assert form not in words
                assert form not in kept


async def _failing(hub: AgentRuntimeDaemonHub) -> Job:
    hub.lift_fence("laptop")
    return await hub.open_job("laptop", {"fail": "coding.busy"})


async def _collect(job: Job, found: list[Any]) -> None:
    with contextlib.suppress(AgentRuntimeDaemonError):
        found += [event async for event in job.events()]


async def _echo(payload: Any) -> Any:
    return {"jsonrpc": "2.0", "id": payload["id"], "result": {"room": ROOM.get(), "method": payload["method"]}}


@pytest.mark.asyncio
class TestTools:
    """LangBot's tools over the relay."""

    CALL: Any = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "x"}}  # noqa: RUF012

    async def test_a_call_runs_in_its_run_s_context_behind_a_bearer(
        self, hub: AgentRuntimeDaemonHub, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Our rule: without the bearer 401; the call acts with the authority of the run that opened the job."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            for room in ("east", "west"):
                ROOM.set(room)
                job = await hub.open_job("laptop", {"tool": self.CALL}, _echo)
                ROOM.set("another")
                async with asyncio.timeout(WAIT):
                    config, bare, answered = [event async for event in job.events()]
                assert bare == {"bare": 401}
                assert answered["status"] == 200
                assert answered["answer"] == {"jsonrpc": "2.0", "id": 7, "result": {"room": room, "method": "tools/call"}}
                url = config["config"]["url"]
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+/mcp/\S{16,}", url)
                async with aiohttp.ClientSession() as session:
                    try:
                        async with session.post(url, json=self.CALL, headers=config["config"]["headers"]) as late:
                            assert late.status == 401
                    except aiohttp.ClientConnectionError:
                        pass

    async def test_the_address_takes_its_own_path_its_bearer_and_bounded_bodies(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: whoever finds the port on the machine gets nowhere, and nothing but a good call reaches the hub."""
        calls: list[Any] = []

        async def counting(payload: Any) -> Any:
            calls.append(payload)
            return await _echo(payload)

        async with running_daemon(ScriptedDaemon(url=hub.endpoint)), aiohttp.ClientSession() as session:
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"tool": self.CALL, "hold": True}, counting)
            async with asyncio.timeout(WAIT), contextlib.aclosing(job.events()) as events:
                config = (await anext(events))["config"]
                while "answer" not in await anext(events):
                    pass
            assert calls == [self.CALL]
            url, headers = config["url"], config["headers"]
            root = url.rpartition("/")[0]
            large = io.BytesIO(b"[" + b" " * limits.MCP_BODY_BYTES + b"]")
            for address, sent, body, wanted in (
                (root, headers, b"{}", {401, 404}),
                (f"{root}/{'A' * 22}", headers, b"{}", {401, 404}),
                (url, {}, b"{}", {401}),
                (url, {"Authorization": "Bearer " + "A" * 43}, b"{}", {401}),
                (url, headers, large, {413}),
            ):
                async with session.post(address, data=body, headers=sent) as answered:
                    assert answered.status in wanted, address
            assert calls == [self.CALL]
            await job.cancel()
            with pytest.raises(aiohttp.ClientResponseError, match="401"):
                async with session.post(url, json=self.CALL, headers=headers, raise_for_status=True):
                    pass
            assert calls == [self.CALL]

    async def test_a_slow_tool_delays_nothing_and_ends_with_its_job(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: calls are answered beside the receive loop, and a cancel ends them at once."""
        reached, ended = asyncio.Event(), asyncio.Event()

        async def slow(_payload: Any) -> Any:
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"tool": self.CALL}, slow)
            async with asyncio.timeout(WAIT):
                await reached.wait()
            assert await numbers(await hub.open_job("laptop", {"count": 100})) == list(range(100))
            await job.cancel()
            assert ended.is_set()

    async def test_a_job_without_tools_and_a_tool_that_fails_are_answered(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: an agent's call is never left open, and reads nothing of what failed."""

        async def broken(_payload: Any) -> Any:
            raise RuntimeError(f"inside: {TOKEN}")

        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            for tools in (None, broken):
                job = await hub.open_job("laptop", {"tool": self.CALL}, tools)
                async with asyncio.timeout(WAIT):
                    events = [event async for event in job.events()]
                assert events[-1]["answer"]["error"]["code"] == -32603
                assert events[-1]["answer"]["id"] == 7
                assert TOKEN not in json.dumps(events)

    async def test_the_sdk_s_external_tools_answer_as_they_are(self) -> None:
        """The SDK's rule: whatever has its ``mcp_tools`` and ``call_mcp_tool`` can be given to a job."""

        class External:
            def mcp_tools(self, **_: Any) -> list[dict[str, Any]]:
                return [{"name": "x", "description": "", "inputSchema": {"type": "object"}}]

            async def call_mcp_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
                return {"content": [{"type": "text", "text": name}], "isError": False}

        listed = await handle_agent_runtime_mcp_payload(External(), {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["x"]
        called = await handle_agent_runtime_mcp_payload(External(), self.CALL)
        assert called["result"]["content"][0]["text"] == "x"

    async def test_the_hub_never_acts_in_the_context_of_a_run(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Our rule: whoever starts the listener, its connections are handled in an empty context."""
        rooms: list[str] = []

        class Listening(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                rooms.append(ROOM.get())

        caplog.set_level(logging.INFO, logger="pkg.relay_listener")
        handler = Listening()
        logging.getLogger("pkg.relay_listener").addHandler(handler)
        try:
            ROOM.set("a tenant's")
            async with running_hub(state_dir=tmp_path) as hub, running_daemon(ScriptedDaemon(url=hub.endpoint)):
                await hub.wait_for_daemon("laptop", WAIT)
        finally:
            logging.getLogger("pkg.relay_listener").removeHandler(handler)
        assert rooms
        assert set(rooms) == {"nobody's"}


@pytest.mark.asyncio
class TestListener:
    """Addresses, installations and their secrets."""

    async def test_the_same_settings_are_the_same_hub_and_others_a_conflict(self) -> None:
        """Our rule: nothing is silently reused with settings that nobody asked for."""
        async with running_hub() as hub:
            host, port = port_of(hub)
            await asyncio.gather(*(hub.start("127.0.0.1", 0, TOKEN) for _ in range(5)))
            assert port_of(hub) == (host, port)
            for settings in (("127.0.0.1", 0, OTHER_TOKEN), ("127.0.0.1", free_port(), TOKEN)):
                assert (await refusal(hub.start(*settings))).code == "coding.daemon_hub_conflict"
            async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"hold": True})
                assert (await refusal(hub.reconfigure("127.0.0.1", 0, OTHER_TOKEN))).code == "coding.daemon_hub_conflict"
                await job.cancel()
            await hub.reconfigure("127.0.0.1", 0, OTHER_TOKEN)
            assert hub.is_running

    async def test_who_waits_while_the_settings_change_goes_on_waiting(self) -> None:
        """Our rule: a run that waits is neither ended nor told that there is no hub; the new settings' daemon serves it."""
        async with running_hub(token=OTHER_TOKEN) as hub:
            waiting = asyncio.create_task(hub.wait_for_daemon("laptop", WAIT))
            await until(lambda: hub._users == 1)
            await hub.reconfigure("127.0.0.1", 0, TOKEN)
            async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
                await waiting
            await hub.stop()
            assert (await refusal(hub.wait_for_daemon("laptop", WAIT))).reason == "daemon_hub_not_started"

    async def test_a_port_that_is_taken_is_an_error_that_names_the_field(self) -> None:
        """Our rule: the person reads which field to change."""
        async with running_hub() as hub:
            error = await refusal(AgentRuntimeDaemonHub(error_code_prefix="coding").start(*port_of(hub), TOKEN))
            assert error.code == "coding.daemon_bind_failed"
            assert "daemon-port" in str(error)
            named = await refusal(AgentRuntimeDaemonHub(error_code_prefix="coding").start("hub.invalid", 0, TOKEN))
            assert named.code == "coding.daemon_bind_failed"

    @pytest.mark.parametrize("port", [65536, 99999999])
    async def test_what_is_no_port_is_the_same_error(self, port: int) -> None:
        """Bad input: the environment's value, which no form has checked."""
        error = await refusal(AgentRuntimeDaemonHub(error_code_prefix="coding").start("127.0.0.1", port, TOKEN))
        assert error.code == "coding.daemon_bind_failed"

    async def test_a_token_is_needed_and_in_the_shared_profile_a_good_one(self) -> None:
        """Our rule: no hub without authentication; the error has the command that makes a token."""
        assert (await refusal(AgentRuntimeDaemonHub().start("127.0.0.1", 0, ""))).code == "agent_runtime.daemon_token_required"
        for weak in ("", "tiny", "a" * 40, f" {TOKEN}"):
            error = await refusal(AgentRuntimeDaemonHub(shared=True, installation="weak").start("127.0.0.1", 0, weak))
            assert "secrets.token_urlsafe" in str(error)
            assert not weak or weak not in str(error)

    async def test_two_installations_share_an_address_and_nothing_else(self) -> None:
        """Our rule: the secret decides whose a daemon is; equal daemon ids never meet; revocation drops exactly one."""
        port = free_port()
        east = get_agent_runtime_daemon_hub("t", error_code_prefix="coding", installation="east", shared=True)
        west = get_agent_runtime_daemon_hub("t", error_code_prefix="coding", installation="west", shared=True)
        assert east is get_agent_runtime_daemon_hub("t", installation="east")
        east.times = west.times = TIMES
        east.lease_seconds = west.lease_seconds = LEASE
        async with east.in_use("127.0.0.1", port, TOKEN), west.in_use("127.0.0.1", port, OTHER_TOKEN):
            assert east.endpoint == west.endpoint
            eastern, western = ScriptedDaemon(url=east.endpoint), ScriptedDaemon(url=west.endpoint, token=OTHER_TOKEN)
            async with running_daemon(eastern), running_daemon(western):
                await east.wait_for_daemon("laptop", WAIT)
                await west.wait_for_daemon("laptop", WAIT)
                jobs = [await east.open_job("laptop", {"hold": True}), await west.open_job("laptop", {"hold": True})]
                await until(lambda: eastern.ran and western.ran)
                assert (eastern.ran, western.ran) == ([jobs[0].job_id], [jobs[1].job_id])
                listed = [each["active_jobs"] for hub in (east, west) for each in await hub.list_daemons()]
                assert listed == [[jobs[0].job_id], [jobs[1].job_id]]
                await installations.revoke("east")
                assert (await refusal(numbers(jobs[0]))).code == "coding.revoked"
                await until(lambda: eastern.ended)
                assert not east.is_running
                assert await jobs[1].command("steer", 1) == {"verb": "steer", "value": 1}
                assert not western.ended
                await until(lambda: ("parked", "") in eastern.states)
                await jobs[1].cancel()
                revoke("west")
        assert not west.is_running
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("127.0.0.1", "localhost"),
            ("localhost", "127.0.0.1"),
            pytest.param("::1", "0:0:0:0:0:0:0:1", marks=NEEDS_IPV6),
            ("0.0.0.0", "127.0.0.1"),
            pytest.param("::", "::1", marks=NEEDS_IPV6),
        ],
    )
    async def test_one_address_is_one_listener_however_it_is_written(self, first: str, second: str) -> None:
        """Our rule: no installation's way of naming this machine keeps another from its address."""
        port = free_port()
        one, two = (
            AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation=name, times=TIMES)
            for name in ("one", "two")
        )
        async with one.in_use(first, port, TOKEN), two.in_use(second, port, OTHER_TOKEN):
            assert one._listener is two._listener
            async with running_daemon(ScriptedDaemon(url=f"ws://{'[::1]' if ':' in first else '127.0.0.1'}:{port}")):
                await one.wait_for_daemon("laptop", WAIT)
            assert await two.list_daemons() == []

    async def test_an_address_that_includes_anothers_is_refused_with_what_is_in_the_way(self) -> None:
        """Our rule: the person reads which address the other installation has, and that it can be shared."""
        port = free_port()
        two = AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation="two", times=TIMES)
        async with running_hub(shared=True, installation="one", port=port):
            error = await refusal(two.start("0.0.0.0", port, OTHER_TOKEN))
            assert error.code == "coding.daemon_address_overlaps"
            assert f"port {port}" in str(error)
            assert '"daemon-host" to 127.0.0.1' in str(error)
            await two.start("127.0.0.2", port, OTHER_TOKEN)
            await two.stop()

    async def test_a_hub_is_of_one_package_and_one_installation(self) -> None:
        """Our rule: whoever asks for a hub gets none that another installation, or another package, has set up."""
        asked = [(product, installation) for product in ("one", "other") for installation in ("east", "west")]
        hubs = [get_agent_runtime_daemon_hub(product, installation=installation) for product, installation in asked]
        assert len({id(each) for each in hubs}) == len(asked)
        assert hubs == [get_agent_runtime_daemon_hub(product, installation=installation) for product, installation in asked]
        revoke("east")
        revoke("west")

    async def test_a_shared_worker_keeps_a_secret_only_while_it_is_needed(self) -> None:
        """Our rule: without a run and without a connected daemon nothing of an installation is in a shared worker.

        Neither the secret nor what is made of it can be reached from the hub, or from the listener that serves others.
        """
        port = free_port()
        hub = AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation="brief", times=TIMES)
        async with running_hub(shared=True, installation="host", token=OTHER_TOKEN, port=port) as other:
            listener = other._listener
            assert secrets_held(listener, OTHER_TOKEN)
            daemon = ScriptedDaemon(url=f"ws://127.0.0.1:{port}")
            async with running_daemon(daemon):
                async with hub.in_use("127.0.0.1", port, TOKEN):
                    await hub.wait_for_daemon("laptop", WAIT)
                    assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]
                assert hub.is_running
                assert daemon.connected
                assert secrets_held(listener, TOKEN), "the daemon is connected, and may be needed"
            await until(lambda: not hub.is_running)
            assert not secrets_held([hub, listener], TOKEN)
            async with hub.in_use("127.0.0.1", port, TOKEN):
                assert hub.is_running
                assert secrets_held(listener, TOKEN)
                assert (await refusal(hub.wait_for_daemon("laptop", 0.05))).code == "coding.daemon_offline"
            assert not hub.is_running
            assert not secrets_held([hub, listener], TOKEN)
            assert secrets_held(listener, OTHER_TOKEN), "the other's daemons may still come"

    async def test_a_run_that_fails_or_is_cancelled_as_it_starts_leaves_no_secret(self) -> None:
        """Our rule: however a run ends, and while it still waits for its turn too, its installation's hub is let go of."""
        hub = AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation="brief", times=TIMES)
        settings = ("127.0.0.1", free_port(), TOKEN)

        async def run() -> None:
            async with hub.in_use(*settings):
                raise EOFError

        with pytest.raises(EOFError):
            await run()
        assert not hub.is_running
        async with relay_hub_shell._turn():
            running = asyncio.create_task(run())
            await until(lambda: hub._users == 1)
            running.cancel()
        async with asyncio.timeout(WAIT):
            await asyncio.wait({running})
        assert running.cancelled()
        assert not hub.is_running

    @pytest.mark.parametrize("revoked", [False, True])
    async def test_a_secret_that_two_had_is_let_go_of_when_one_has_left(self, revoked: bool) -> None:
        """Our rule: who kept a secret for nothing but the conflict is told that it has ended."""
        port = free_port()
        one, two = (
            AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation=name, times=TIMES)
            for name in ("one", "two")
        )
        await one.start("127.0.0.1", port, TOKEN)

        async def run() -> None:
            async with two.in_use("127.0.0.1", port, TOKEN):
                raise AssertionError("it was started")

        assert (await refusal(run())).code == "coding.daemon_token_conflict"
        assert two.is_running, "neither has daemons while both have the secret"
        await (installations.revoke("one") if revoked else one.stop())
        assert not two.is_running
        await installations.revoke("two")
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)

    async def test_a_hub_that_stands_still_goes_with_its_installation(self) -> None:
        """Authority table: nothing is kept under a revoked installation's key."""
        hub = get_agent_runtime_daemon_hub("acp", installation="gone", shared=True)
        async with hub.in_use("127.0.0.1", free_port(), TOKEN):
            assert hub.is_running
        assert not hub.is_running
        assert get_agent_runtime_daemon_hub("acp", installation="gone", shared=True) is hub
        await installations.revoke("gone")
        assert get_agent_runtime_daemon_hub("acp", installation="gone", shared=True) is not hub
        await installations.revoke("gone")

    async def test_two_installations_with_one_secret_are_both_without_daemons(self) -> None:
        """Our rule: a proof that could mean either means neither."""
        port = free_port()
        async with (
            running_hub(shared=True, installation="one", port=port) as one,
            one.in_use("127.0.0.1", port, TOKEN),
            running_daemon(ScriptedDaemon(url=one.endpoint)),
        ):
            await one.wait_for_daemon("laptop", WAIT)
            two = AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation="two", times=TIMES)
            assert (await refusal(two.start("127.0.0.1", port, TOKEN))).code == "coding.daemon_token_conflict"
            for hub in (one, two):
                assert (await refusal(hub.wait_for_daemon("laptop", WAIT))).code == "coding.daemon_token_conflict"
                assert (await refusal(hub.start("127.0.0.1", port, TOKEN))).code == "coding.daemon_token_conflict"
            await installations.revoke("two")
            await one.wait_for_daemon("laptop", WAIT)

    async def test_nobody_waits_for_the_end_of_anothers_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our rule: a listener that closes frees its address at once; who does not let go of it delays nobody else's start."""
        monkeypatch.setattr(limits, "RELAY_CLOSE", WAIT * 2)
        port, patient = free_port(), RelayTimes(dead=WAIT * 2 * limits.RELAY_CLOSE_SHARE)
        leaver = AgentRuntimeDaemonHub(error_code_prefix="coding", shared=True, installation="leaver", times=patient)
        await leaver.start("127.0.0.1", port, TOKEN)
        listener = leaver._listener
        assert listener is not None
        async with SocketDaemon(leaver.endpoint) as deaf:
            deaf.socket.transport.pause_reading()
            await until(lambda: listener._connections)
            leaving = asyncio.create_task(leaver.stop())
            await until(lambda: not listener.open)
            async with running_hub(shared=True, installation="comer", port=port) as comer:
                async with running_daemon(ScriptedDaemon(url=comer.endpoint)):
                    await comer.wait_for_daemon("laptop", WAIT)
                assert not leaving.done()
                assert listener._connections
        async with asyncio.timeout(WAIT):
            await leaving
        assert not listener._connections

    async def test_what_runs_already_waits_for_no_turn(self) -> None:
        """Our rule: a run whose installation's hub is up does not queue behind those that start or stop theirs."""
        async with running_hub() as hub, relay_hub_shell._turn(), asyncio.timeout(WAIT):
            await hub.start("127.0.0.1", 0, TOKEN)
            assert (await refusal(hub.start("127.0.0.1", 0, OTHER_TOKEN))).code == "coding.daemon_hub_conflict"

    async def test_daemons_that_come_and_go_fill_nobodys_log(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Our rule: an installation's daemons cause so many lines and no more, and no other installation's are left out."""
        monkeypatch.setattr(limits, "RELAY_NOTES", 6)
        monkeypatch.setattr(limits, "RELAY_NOTES_PER_SECOND", 1e-9)
        caplog.set_level(logging.INFO, "pkg.relay_listener")
        port = free_port()
        async with (
            running_hub(shared=True, installation="busy", port=port) as busy,
            running_hub(shared=True, installation="calm", token=OTHER_TOKEN, port=port) as calm,
            busy.in_use("127.0.0.1", port, TOKEN),
        ):
            for _ in range(10):
                async with SocketDaemon(busy.endpoint, "restless") as one:
                    await one.join()
            async with SocketDaemon(calm.endpoint, "desk", OTHER_TOKEN) as one:
                await one.join()
        lines = [record.getMessage() for record in caplog.records]
        assert sum("restless" in line for line in lines) == 6
        assert "DaemonReady: 'desk'" in lines

    async def test_settings_come_from_the_form_then_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The SDK's rule: ``daemon-*`` fields, and ``<PREFIX>_*`` variables where a field says nothing."""
        read = agent_runtime_daemon_config_from_plugin_config
        assert read({}) == {"enabled": False, "host": "127.0.0.1", "port": 8766, "token": ""}
        form = {"daemon-enabled": "on", "daemon-host": "::1", "daemon-port": "9000", "daemon-token": "t"}
        assert read(form) == {"enabled": True, "host": "::1", "port": 9000, "token": "t"}
        for name, value in (("ENABLED", "true"), ("HOST", "127.0.0.2"), ("PORT", "9001"), ("TOKEN", "e")):
            monkeypatch.setenv(f"X_{name}", value)
        assert read({"daemon-host": ""}, env_prefix="X", default_port=8767) == {
            "enabled": True,
            "host": "127.0.0.2",
            "port": 9001,
            "token": "e",
        }
        assert read({"daemon-enabled": False}, env_prefix="X")["enabled"] is False
        for no_number in ("²", "-1", "1e3", "9" * 5000):
            assert read({"daemon-port": no_number})["port"] == 8766


@pytest.mark.asyncio
class TestPressure:
    """Bounds, and who is held back by them."""

    async def test_a_slow_consumer_holds_back_its_own_agent_only(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: two windows at the hub, the journal's memory at the daemon, then the producer waits."""
        daemon = ScriptedDaemon(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            slow = await hub.open_job("laptop", {"count": 600, "pad": 100_000})
            async with contextlib.aclosing(slow.events()) as events:
                async with asyncio.timeout(WAIT):
                    assert (await anext(events))["n"] == 0
                await until(lambda: daemon._protocol.held(slow.job_id) >= limits.RELAY_JOURNAL_MEMORY - 200_000)
                assert await numbers(await hub.open_job("laptop", {"count": 500})) == list(range(500))
                assert daemon.emitted[slow.job_id] < 400
                assert daemon._protocol.held(slow.job_id) <= limits.RELAY_JOURNAL_MEMORY
                waiting = sum(len(event["pad"]) for batch in slow._batches for event in batch.events)
                assert waiting <= 2 * limits.RELAY_WINDOW_BYTES + limits.RELAY_FRAME_BYTES
                async with asyncio.timeout(WAIT):
                    assert [event["n"] async for event in events] == list(range(1, 600))

    async def test_an_outage_fills_memory_then_disk_and_nothing_is_lost(
        self, hub: AgentRuntimeDaemonHub, tmp_path: Path
    ) -> None:
        """Our rule: the journal goes on in files without names, and all of it arrives afterwards."""
        async with CuttingProxy(port_of(hub)) as proxy:
            daemon = ScriptedDaemon(url=proxy.url, journal_dir=tmp_path / "journal")
            hub.lease_seconds = WAIT
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"count": 300, "pad": 100_000})
                await until(lambda: daemon.ran)
                proxy.cut()
                await until(lambda: daemon.ended)
                assert daemon._protocol.held(job.job_id) > limits.RELAY_JOURNAL_MEMORY + 5_000_000
                assert list((tmp_path / "journal").iterdir()) == []
                assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
                proxy.restore()
                assert await numbers(job) == list(range(300))

    async def test_many_tiny_events_stay_bounded_and_in_order(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a flood of the smallest events loses and repeats nothing."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)):
            await hub.wait_for_daemon("laptop", WAIT)
            job = await hub.open_job("laptop", {"count": 200_000})
            expected = 0
            async with asyncio.timeout(WAIT * 2):
                async for event in job.events():
                    assert event["n"] == expected
                    expected += 1
            assert expected == 200_000


class TestJournal:
    """A job's journal on disk, by itself."""

    def test_what_is_read_is_what_was_written_and_segments_are_given_back(self, tmp_path: Path) -> None:
        """Our rule: acknowledged files are closed; a broken journal is an ``OSError``."""
        spill = DiskSpill(tmp_path)
        records = {number: os.urandom(300_000) for number in range(10, 60)}
        assert all(spill.append(number, record) for number, record in records.items())
        assert all(spill.read(number) == record for number, record in records.items())
        before = spill.held
        spill.discard(40)
        assert spill.held < before
        assert all(spill.read(number) == records[number] for number in range(41, 60))
        assert spill.append(59, b"again")
        assert spill.read(59) == b"again"
        assert spill.read(58) == records[58]
        with pytest.raises(OSError):
            spill.read(60)
        spill.close()
        assert spill.held == 0

    def test_a_full_disk_is_a_refusal_and_breaks_nothing(self, tmp_path: Path) -> None:
        """Our rule: where the kernel takes no more bytes the record is refused, and the ones before stay readable."""
        script = """
import resource, sys
from pathlib import Path
from pkg.relay_journal import DiskSpill
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
spill = DiskSpill(Path(sys.argv[1]))
kept = 0
while spill.append(kept + 1, bytes([kept]) * 300_000):
    kept += 1
assert kept == 3, kept
assert [spill.read(n + 1)[:1] for n in range(kept)] == [b"\\0", b"\\1", b"\\2"]
assert spill.append(4, b"small")
assert spill.read(4) == b"small"
"""
        environment = {"PYTHONPATH": str(PKG.parent), "PATH": os.environ.get("PATH", "")}
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Binding:
    """As much of an installation's binding as its fences are filed under."""

    instance_uuid: str
    workspace_uuid: str
    installation_uuid: str
    runtime_revision: int = 1


class TestFences:
    """Where fences are kept, and for whom."""

    def test_another_revision_finds_them_and_another_installation_does_not(self, tmp_path: Path) -> None:
        """Our rule: a settings change makes a new binding, and what may still run is still fenced."""
        DiskMarkers(tmp_path).mark(Binding("i", "w", "a"), "laptop", "job", "table")
        later = DiskMarkers(tmp_path)
        assert later.pending(Binding("i", "w", "a", 2)) == {"laptop": {"job": "table"}}
        for other in (Binding("i", "w", "b"), Binding("i", "x", "a"), Binding("j", "w", "a"), installations.UNBOUND):
            assert later.pending(other) == {}
        later.mark(Binding("i", "w", "a", 2), "laptop", "job", "new table")
        assert later.pending(Binding("i", "w", "a")) == {"laptop": {"job": "new table"}}
        later.clear(Binding("i", "w", "a", 3), "laptop", "job")
        assert markers(tmp_path) == []

    def test_a_fence_is_of_one_daemon_and_one_job(self, tmp_path: Path) -> None:
        """Our rule: the proof for one lifts no other, of the same machine or of the same job's name on another."""
        installation, fences = Binding("i", "w", "a"), DiskMarkers(tmp_path)
        for daemon_id, job_id in (("laptop", "one"), ("laptop", "two"), ("desk", "one")):
            fences.mark(installation, daemon_id, job_id, "table")
        assert fences.pending(installation) == {"laptop": {"one": "table", "two": "table"}, "desk": {"one": "table"}}
        fences.clear(installation, "laptop", "one")
        assert fences.pending(installation) == {"laptop": {"two": "table"}, "desk": {"one": "table"}}

    def test_each_worker_shape_has_its_place_and_the_pool_none(self) -> None:
        """Our rule: ``/data`` in a jail, the account's state directory else; two packages never share."""
        assert state_directory("coding", WorkerShape.POOL) is None
        assert state_directory("coding", WorkerShape.JAIL) == Path("/data/.coding-relay-v1/coding")
        for shape in (WorkerShape.DEBUG, WorkerShape.DEDICATED):
            place = state_directory("coding", shape)
            assert place is not None
            assert place.is_absolute()
            assert place != state_directory("other", shape)


class TestRooms:
    """What the relay needs, and what it owes the SDK."""

    def test_the_relay_is_importable_without_the_sdk(self) -> None:
        """Our rule: a workstation needs three libraries, and the SDK is none of them."""
        script = "import sys; sys.modules['langbot_plugin'] = None; import pkg.daemon_relay"
        environment = {"PYTHONPATH": str(PKG.parent), "PATH": os.environ.get("PATH", "")}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

    def test_nothing_depends_on_the_wall_clock(self) -> None:
        """Our rule: a clock that is set changes no lease, heartbeat or limit."""
        modules = [*PKG.glob("relay_*.py"), PKG / "daemon_relay.py"]
        assert len(modules) > 15
        for module in modules:
            assert not re.search(r"\btime\.time\b|\bdatetime\b", module.read_text(encoding="utf-8")), module.name

    def test_the_notice_is_true_of_the_installed_sdk(self) -> None:
        """Our rule: another SDK version is a warning, another file at a recorded version a failure."""
        notice = (PKG / "RELAY-NOTICE.md").read_text(encoding="utf-8")
        recorded = dict(re.findall(r"\| langbot-plugin (\S+) \| `[^`]+` \| `([0-9a-f]{64})` \|", notice))
        assert recorded
        sdk = importlib.metadata.distribution("langbot-plugin")
        source = Path(str(sdk.locate_file("langbot_plugin/api/agent_tools/daemon.py")))
        found = hashlib.sha256(source.read_bytes()).hexdigest()
        if sdk.version in recorded:
            assert recorded[sdk.version] == found
        elif found not in recorded.values():
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.warn(f"RELAY-NOTICE.md does not record langbot-plugin {sdk.version}", UserWarning, stacklevel=1)

    def test_the_sdk_s_licence_is_its_own(self) -> None:
        """Our rule: ``LICENSE-sdk.txt`` is the file the recorded SDK is distributed with."""
        sdk = importlib.metadata.distribution("langbot-plugin")
        [licence] = [path for path in sdk.files or () if path.name == "LICENSE" and "dist-info" in str(path)]
        assert (PKG / "LICENSE-sdk.txt").read_bytes() == Path(str(licence.locate())).read_bytes()

    def test_the_names_are_those_of_the_sdk(self) -> None:
        """The SDK's rule: code written for its relay moves over with its import."""
        import langbot_plugin.api.agent_tools.daemon as theirs

        import pkg.daemon_relay as ours

        names = {
            "AgentRuntimeDaemonHub": (
                "start",
                "stop",
                "endpoint",
                "is_running",
                "ensure_started_from_config",
                "list_daemons",
                "wait_for_daemon",
                "run_job",
            ),
            "AgentRuntimeDaemonClient": ("run_forever", "run_job", "emit_event", "finish_job", "create_mcp_proxy"),
            "LocalMCPProxy": ("start", "stop", "endpoint", "http_mcp_endpoint", "mcp_server", "server_config"),
            "AgentRuntimeDaemonError": (),
            "agent_runtime_daemon_config_from_plugin_config": (),
            "handle_agent_runtime_mcp_payload": (),
            "get_agent_runtime_daemon_hub": (),
        }
        for name, members in names.items():
            for module in (theirs, ours):
                assert all(hasattr(getattr(module, name), member) for member in members), (module, name)
