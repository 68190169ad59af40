"""What somebody else can do to the relay on its sockets: foreign bytes, false rejections, wrong certificates, set clocks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import signal
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection

from pkg import relay_sockets
from pkg.daemon_relay import AgentRuntimeDaemonClient, AgentRuntimeDaemonHub
from pkg.relay_client import UNSEALED
from pkg.relay_frames import Counters
from pkg.relay_protocol import Backoff
from testkit.cutting_proxy import CuttingProxy, messages_of
from testkit.relay_processes import Process, started
from testkit.relay_rig import (
    LEASE,
    OTHER_TOKEN,
    TIMES,
    TOKEN,
    WAIT,
    ScriptedDaemon,
    free_port,
    markers,
    numbers,
    port_of,
    refusal,
    running_daemon,
    running_hub,
    until,
)
from testkit.relay_socket import SocketDaemon, hub_by_hand
from testkit.tls_front import TlsFront

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def hub(tmp_path: Path) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub with durable fences."""
    async with running_hub(state_dir=tmp_path / "state") as hub:
        yield hub


def counted(hub: AgentRuntimeDaemonHub) -> Counters:
    """What all of a hub's connections had dropped so far."""
    assert hub._listener is not None
    protocol = hub._listener.protocol
    every = [protocol.dropped, *(socket.counters for socket in protocol._sockets.values())]
    names = [field.name for field in dataclasses.fields(Counters)]
    return Counters(**{name: sum(getattr(one, name) for one in every) for name in names})


def elsewhere(address: str) -> str:
    """The same listener by an address of which nobody can know that it is this machine's."""
    return address.replace("127.0.0.1", "0.0.0.0")


def _lost_twice(daemon: ScriptedDaemon) -> bool:
    return len(told(daemon, "lost")) >= 2


class Pauses(Backoff):
    """Pauses as short as a test wants them, and of which kind they were."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.slow: list[bool] = []

    def next(self, *, network: bool = False) -> float:
        self.slow.append(network)
        super().next(network=network)
        return 0.02


def impatient(**named: Any) -> tuple[ScriptedDaemon, Pauses]:
    """A daemon that tells which pauses it would have made."""
    daemon = ScriptedDaemon(reconnect_delay=None, **named)
    daemon._backoff = pauses = Pauses()
    return daemon, pauses


def told(daemon: ScriptedDaemon, state: str) -> list[str]:
    """The details of one state, so far."""
    return [detail for said, detail in daemon.states if said == state]


class TestForeignBytes:
    """Whoever writes on the wire."""

    async def test_what_has_passed_already_passes_on_no_connection_again(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a recorded frame is dropped and counted, on its own connection and on another daemon's, both ways."""
        async with CuttingProxy(port_of(hub)) as proxy, SocketDaemon(hub.endpoint) as mallory:
            daemon = ScriptedDaemon(url=proxy.url)
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                await mallory.join()
                job = await hub.open_job("laptop", {"count": 3, "hold": True})
                await until(lambda: daemon.ran)
                assert await job.command("steer", 1)
                await asyncio.sleep(TIMES.ack_delay * 4)  # what is acknowledged late has arrived, too
                pipe = proxy.pipes[-1]
                up = [frame for frame in messages_of(bytes(pipe.up)) if frame.startswith(b'["')]
                down = [frame for frame in messages_of(bytes(pipe.down)) if frame.startswith(b'["')]
                assert any(b"run.event" in frame for frame in up)
                assert any(b"run.command" in frame for frame in down)
                for frame in up:
                    proxy.inject_up(frame)
                    await mallory.push(frame)
                for frame in down:
                    proxy.inject_down(frame)
                await until(lambda: counted(hub).replayed == len(up) and counted(hub).injected == len(up))
                await until(lambda: daemon._protocol.counters.replayed == len(down))
                assert await job.command("steer", 2) == {"verb": "steer", "value": 2}
                assert len(proxy.pipes) == 1
                assert [event["n"] for event in await _three(job)] == [0, 1, 2]
                await job.cancel()
                assert daemon.ended == daemon.ran

    @pytest.mark.parametrize("same", [True, False], ids=["its own installation", "another one"])
    async def test_a_guessed_job_id_is_worth_nothing(self, same: bool) -> None:
        """Our rule: what a proven daemon says about another's job is counted and changes nothing, wherever it belongs."""
        port = free_port()
        async with (
            running_hub(shared=True, installation="east", port=port) as east,
            running_hub(shared=True, installation="west", port=port, token=OTHER_TOKEN),
            SocketDaemon(east.endpoint, token=TOKEN if same else OTHER_TOKEN) as mallory,
        ):
            daemon = ScriptedDaemon(url=east.endpoint)
            async with running_daemon(daemon):
                await east.wait_for_daemon("laptop", WAIT)
                await mallory.join()
                job = await east.open_job("laptop", {"count": 3, "hold": True})
                await until(lambda: daemon.ran)
                about = {"job_id": job.job_id}
                forged = [
                    {"type": "run.event", **about, "seq": 4, "records": [{"n": "forged"}]},
                    {"type": "run.event", **about, "seq": 4, "records": [["mcp", 1, {"forged": True}]]},
                    {"type": "run.ack", **about, "seq": 1},
                    {"type": "run.finished", **about, "outcome": "completed", "last": 3, "quiescent": True, "error": None},
                ]
                for message in forged:
                    await mallory.say(message)
                await until(lambda: counted(east).foreign == len(forged))
                assert [event["n"] for event in await _three(job)] == [0, 1, 2]
                assert job.outcome is None
                assert await job.command("steer", 1) == {"verb": "steer", "value": 1}
                await job.cancel()
                assert daemon.ended == daemon.ran

    async def test_a_message_of_forty_megabytes_is_not_taken_from_the_wire(self, tmp_path: Path) -> None:
        """Our rule: whole or in pieces it ends its own connection with 1009, costs no memory, and hurts nobody else."""
        async with started("hub", state_dir=str(tmp_path)) as hub:
            url = await hub.told("endpoint")
            async with running_daemon(ScriptedDaemon(url=url)):
                await hub.ask("wait")
                job = await hub.ask("open", payload={"count": 2000})
                assert await hub.ask("count", job=job) == 2000
                before = hub.resident()
                job = await hub.ask("open", payload={"count": 5, "hold": True})
                for pieces in (False, True):
                    async with SocketDaemon(url) as mallory:
                        await mallory.join()
                        await _large(mallory, 40 << 20, pieces=pieces)
                        code, _ = await mallory.closed()
                        assert code in (1009, 0)
                assert hub.resident() - before < 20 << 20
                assert await hub.ask("take", job=job, count=5) == [0, 1, 2, 3, 4]
                assert await hub.ask("cancel", job=job) is True

    @pytest.mark.parametrize(
        "part",
        [
            b'{"type":"run.ack","job_id":"\xff\xfe"}',
            b'{"type":"daemon.pong","n":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            b'{"type":"daemon.pong","n":NaN}',
            b'"daemon.pong"',
        ],
        ids=["no UTF-8", "nested deeply", "no JSON number", "no message"],
    )
    async def test_a_proven_daemon_that_speaks_no_json_loses_its_connection_only(
        self, hub: AgentRuntimeDaemonHub, part: bytes
    ) -> None:
        """Our rule: 1002 with the reason for whoever sends it; another daemon's job does not notice."""
        async with running_daemon(ScriptedDaemon(url=hub.endpoint)), SocketDaemon(hub.endpoint) as mallory:
            await hub.wait_for_daemon("laptop", WAIT)
            await mallory.join()
            job = await hub.open_job("laptop", {"count": 200, "pause": 0.001})
            await mallory.push(mallory.sealed(part))
            code, reason = await mallory.closed()
            assert code == 1002
            assert reason.startswith("protocol_error:")
            assert await numbers(job) == list(range(200))

    async def test_half_a_frame_and_then_silence_costs_its_own_connection_only(self, tmp_path: Path) -> None:
        """Our rule: before the proof the handshake's time ends it, after the proof the silence; other jobs go on."""
        times = dataclasses.replace(TIMES, handshake=1.0, dead=2.0, heartbeat=0.5)
        async with (
            running_hub(state_dir=tmp_path, times=times) as hub,
            running_daemon(ScriptedDaemon(url=hub.endpoint, times=times)),
            SocketDaemon(hub.endpoint) as stranger,
            SocketDaemon(hub.endpoint, "silent") as silent,
        ):
            await hub.wait_for_daemon("laptop", WAIT)
            await silent.join()
            half = b"\x81\xfe" + (5000).to_bytes(2, "big") + b"\0\0\0\0" + b'["'
            for one in (stranger, silent):
                one.write(half)
            job = await hub.open_job("laptop", {"count": 400, "pause": 0.005})
            (first, why), (second, how) = await asyncio.gather(stranger.closed(), silent.closed())
            assert (first, second) == (1013, 1013)
            assert why.startswith("handshake_timeout:")
            assert how.startswith("daemon_silent:")
            assert await numbers(job) == list(range(400))
            assert [info["daemon_id"] for info in await hub.list_daemons()] == ["laptop"]

    @pytest.mark.parametrize("said", ["run.event", "hello again", "5 KiB"])
    async def test_a_parked_connection_is_heard_on_pings_only(self, said: str) -> None:
        """Our rule: before its installation has shown its secret a daemon hears ``parked`` and ``pong``, and says no more."""
        async with running_hub(shared=True, installation="host", token=OTHER_TOKEN) as hub, SocketDaemon(hub.endpoint) as one:
            assert await one.prove() == {"type": "daemon.parked"}
            for number in range(3):
                await one.push(json.dumps({"type": "daemon.ping", "n": number}).encode())
                assert json.loads(await one.pull()) == {"type": "daemon.pong", "n": number}
            message: dict[str, Any] = {"type": "daemon.ping", "n": 4, "pad": "x" * 5000}
            if said == "run.event":
                message = {"type": "run.event", "job_id": "x", "seq": 1, "records": [{"n": 1}]}
            elif said == "hello again":
                message = {"type": "daemon.hello", "protocol": "coding-relay-v1", "daemon_id": "x", "token": OTHER_TOKEN}
            await one.push(json.dumps(message).encode())
            code, reason = await one.closed()
            assert (code, reason.partition(":")[0]) == (1002, "protocol_error")
            assert await hub.list_daemons() == []

    @pytest.mark.parametrize("kind", ["large", "binary", "no UTF-8", "nested", "half", "sealed", "silent"])
    async def test_what_is_no_hub_gets_nothing_and_stops_nobody(self, kind: str, tmp_path: Path) -> None:
        """Our rule: a daemon leaves whoever does not prove to be its hub, says so, and is there when the real one is back."""
        port = free_port()
        heard: list[bytes] = []
        visits = 0

        async def junk(connection: ServerConnection) -> None:
            nonlocal visits
            visits += 1
            heard.append(bytes(await connection.recv(decode=False)))
            if kind == "large":
                await connection.send("y" * (40 << 20))
            elif kind == "binary":
                await connection.send(b"\x00\x01\x02")
            elif kind == "no UTF-8":
                await connection.send(b'{"type":"\xff"}', text=True)
            elif kind == "nested":
                await connection.send("[" * 4000)
            elif kind == "half":
                connection.transport.write(b'\x81\x7e\x10\x00{"type":')
            elif kind == "sealed":
                await connection.send('["AAAAAAAAAAAAAAAAAAAAAA",1,{"type":"run.start","job_id":"x","lease":1}]')
            heard.append(bytes(await connection.recv(decode=False)))

        daemon = ScriptedDaemon(url=f"ws://127.0.0.1:{port}", times=dataclasses.replace(TIMES, handshake=0.3))
        async with running_daemon(daemon) as task:
            async with hub_by_hand(junk, port):
                await until(lambda: visits >= 3)
                assert not task.done()
            assert not daemon.ran
            assert all(json.loads(frame)["type"] == "daemon.hello" for frame in heard)
            assert "connected" not in [state for state, _ in daemon.states]
            async with running_hub(port=port, state_dir=tmp_path) as hub:
                await hub.wait_for_daemon("laptop", WAIT)
                assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]

    async def test_a_connection_that_has_ended_can_be_cut(self) -> None:
        """Our rule: one that closed by itself once its buffer was empty is over for a daemon as it is for anybody else."""
        reading = asyncio.Event()

        async def late(connection: ServerConnection) -> None:
            connection.transport.pause_reading()
            await reading.wait()
            connection.transport.resume_reading()
            await connection.wait_closed()

        async with hub_by_hand(late) as port:
            connection = await relay_sockets.dial(f"ws://127.0.0.1:{port}", context=None, pin="", timeout=WAIT)
            connection.transport.write(b"\x81\xff" + (32 << 20).to_bytes(8, "big") + bytes(4) + bytes(32 << 20))
            assert connection.transport.get_write_buffer_size()
            connection.transport.close()
            reading.set()
            async with asyncio.timeout(WAIT):
                await connection.wait_closed()
            relay_sockets.cut(connection)

    async def test_nothing_is_compressed(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a client that offers compression gets none, so that no secret's length shows in what is near it."""
        async with connect(hub.endpoint, proxy=None) as raw:
            assert raw.request is not None
            assert "permessage-deflate" in raw.request.headers["Sec-WebSocket-Extensions"]
            assert raw.response is not None
            assert "Sec-WebSocket-Extensions" not in raw.response.headers

        async with CuttingProxy(port_of(hub)) as proxy, running_daemon(ScriptedDaemon(url=proxy.url)):
            await hub.wait_for_daemon("laptop", WAIT)
            assert b"sec-websocket-extensions" not in bytes(proxy.pipes[0].up).lower()


async def _three(job: Any) -> list[Any]:
    async with asyncio.timeout(WAIT), contextlib.aclosing(job.events()) as events:
        return [await anext(events) for _ in range(3)]


async def _large(mallory: SocketDaemon, size: int, *, pieces: bool) -> None:
    """One message of ``size`` bytes, in one frame or in many, as far as anybody reads it."""
    piece = b"x" * (512 << 10)
    transport = mallory.socket.transport
    for number in range(size // len(piece)):
        if pieces or number == 0:
            first, last = number == 0, number == size // len(piece) - 1
            length = len(piece) if pieces else size
            mallory.write(bytes([(0x80 if last or not pieces else 0) | (1 if first else 0), 0xFF]) + length.to_bytes(8, "big"))
            mallory.write(b"\0\0\0\0")
        mallory.write(piece)
        await until(lambda: transport.get_write_buffer_size() < 1 << 20 or transport.is_closing())
        if transport.is_closing() or mallory.socket.protocol.close_rcvd is not None:
            return


class TestRejections:
    """Who can stop a daemon for good."""

    async def test_where_anybody_could_reject_it_a_daemon_says_so_and_tries_again_slowly(self, tmp_path: Path) -> None:
        """Our rule: on plain ws:// to another machine a rejection is unproven; when it is right again, the daemon is there."""
        port = free_port()
        daemon, pauses = impatient(url=elsewhere(f"ws://127.0.0.1:{port}"), insecure_plaintext=True)
        async with running_daemon(daemon) as task:
            async with running_hub(port=port, token=OTHER_TOKEN, state_dir=tmp_path) as wrong:
                await until(lambda: len(told(daemon, "refused")) >= 3)
                assert not task.done()
                assert all(detail.startswith("daemon_token_rejected: use the") for detail in told(daemon, "refused"))
                assert all(detail.endswith(f"({UNSEALED})") for detail in told(daemon, "refused"))
                assert pauses.slow.count(True) >= 2
                assert await wrong.list_daemons() == []
            async with running_hub(port=port, state_dir=tmp_path) as right:
                await right.wait_for_daemon("laptop", WAIT)
                await until(lambda: not pauses._tries)  # an admission ends the long pauses

    async def test_another_protocol_is_no_more_final_than_its_sender_is_known(self) -> None:
        """Our rule: a challenge of another protocol stops a daemon of this machine's hub, and no other over plain ws://."""

        async def other(connection: ServerConnection) -> None:
            await connection.recv()
            await connection.send('{"type":"hub.challenge","protocol":"coding-relay-v9","nonce":"x","epoch":"e"}')
            await connection.recv()

        async with hub_by_hand(other) as port:
            stopped = await refusal(ScriptedDaemon(url=f"ws://127.0.0.1:{port}").run_forever())
            assert stopped.code == "coding.daemon_rejected"
            assert "upgrade" in str(stopped)
            daemon, pauses = impatient(url=elsewhere(f"ws://127.0.0.1:{port}"), insecure_plaintext=True)
            async with running_daemon(daemon) as task:
                await until(lambda: len(told(daemon, "refused")) >= 3)
                assert not task.done()
            assert "upgrade" in told(daemon, "refused")[0]
            assert all(pauses.slow)

    async def test_a_close_frame_of_somebody_else_ends_no_job(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: a forged 1008 in mid-stream is a cut like any other, with its words made harmless."""
        async with CuttingProxy(port_of(hub)) as proxy:
            daemon, _ = impatient(url=elsewhere(proxy.url), insecure_plaintext=True)
            async with running_daemon(daemon) as task:
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"count": 400, "pause": 0.002})
                found: list[int] = []
                async with asyncio.timeout(WAIT):
                    async for event in job.events():
                        found.append(event["n"])
                        if len(found) in (100, 200):
                            proxy.inject_close(1008, "daemon_token_rejected: \x1b[2Jgo home\r\n")
                assert found == list(range(400))
                assert len(proxy.pipes) == 3
                assert told(daemon, "refused") == [f"daemon_token_rejected: ?[2Jgo home?? ({UNSEALED})"] * 2
                assert not task.done()
                assert daemon.cancelled == []

    async def test_where_only_the_hub_can_say_it_a_rejection_is_final(self, tmp_path: Path) -> None:
        """Our rule: behind a checked certificate, pinned or of a trusted authority, a wrong token stops the daemon."""
        async with running_hub(state_dir=tmp_path) as hub, TlsFront(port_of(hub), tmp_path) as front:
            unverified = ssl.create_default_context()
            unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
            pinned: dict[str, Any] = {"certificate_sha256": front.pin}
            for named in (pinned, {"ssl_context": front.trusting()}, pinned | {"ssl_context": unverified}):
                error = await refusal(ScriptedDaemon(url=front.url, token=OTHER_TOKEN, **named).run_forever())
                assert error.code == "coding.daemon_rejected"
                assert "daemon_token_rejected" in str(error)
                assert UNSEALED not in str(error)
            daemon, _ = impatient(url=front.url, token=OTHER_TOKEN, ssl_context=unverified)
            async with running_daemon(daemon) as task:
                await until(lambda: len(told(daemon, "refused")) >= 2)
                assert not task.done(), "TLS with anybody is no better than none"


class TestCertificates:
    """``wss://``."""

    @pytest.mark.parametrize("case", ["pinned", "pinned with colons", "trusted", "pinned and trusted", "pinned, other name"])
    async def test_a_hub_with_the_right_certificate_is_talked_to(self, tmp_path: Path, case: str) -> None:
        """Our rule: the owner's pin is enough, whoever signed it and whatever its name; so is an authority with the name."""
        names = ("hub.example",) if case == "pinned, other name" else ("127.0.0.1",)
        async with running_hub(state_dir=tmp_path) as hub, TlsFront(port_of(hub), tmp_path, names) as front:
            pin = ":".join(front.pin[at : at + 2] for at in range(0, 64, 2)).upper() if "colons" in case else front.pin
            daemon = ScriptedDaemon(
                url=front.url,
                certificate_sha256=pin if "pinned" in case else "",
                ssl_context=front.trusting() if "trusted" in case else None,
            )
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                assert await numbers(await hub.open_job("laptop", {"count": 100})) == list(range(100))

    @pytest.mark.parametrize("case", ["unknown authority", "wrong pin", "trusted, wrong pin", "trusted, other name"])
    async def test_a_hub_with_another_certificate_hears_nothing(self, tmp_path: Path, case: str) -> None:
        """Our rule: not even a hello leaves; the daemon says what failed and goes on trying with the long pauses."""
        names = ("hub.example",) if case == "trusted, other name" else ("127.0.0.1",)
        async with running_hub(state_dir=tmp_path) as hub, TlsFront(port_of(hub), tmp_path, names) as front:
            daemon, pauses = impatient(
                url=front.url,
                certificate_sha256="0" * 64 if "wrong pin" in case else "",
                ssl_context=front.trusting() if "trusted" in case else None,
            )
            async with running_daemon(daemon) as task:
                await until(lambda: len(told(daemon, "lost")) >= 3)
                assert not task.done()
            wrong = "another one than certificate_sha256" if "wrong pin" in case else "not trusted here ("
            assert [wrong in each for each in told(daemon, "lost")] == [True] * len(told(daemon, "lost"))
            assert pauses.slow[:3] == [True, True, True]
            assert b"daemon.hello" not in front.passed
            assert b"coding-relay-v1" not in front.passed

    async def test_a_name_that_nobody_knows_is_tried_slowly_and_a_closed_door_is_not(self) -> None:
        """Our rule: names take a person, so their pauses grow to 30 seconds; a hub that is away may be back in a moment."""
        for url, slow in (("wss://hub.invalid:1", True), (f"ws://127.0.0.1:{free_port()}", False)):
            daemon, pauses = impatient(url=url)
            async with running_daemon(daemon):
                await until(functools.partial(_lost_twice, daemon))
            assert set(pauses.slow) == {slow}

    @pytest.mark.parametrize("url", ["ws://hub.example:1", "ws://192.0.2.1", "ws://0.0.0.0:1", "ws://[2001:db8::1]:1"])
    async def test_plain_ws_off_this_machine_is_not_even_dialled(self, url: str) -> None:
        """Our rule: the owner of the machine has to insist, in so many words; the mend is in the refusal."""
        with pytest.raises(ValueError) as refused:
            AgentRuntimeDaemonClient(url=url, daemon_id="laptop", token=TOKEN)
        assert "insecure_plaintext" in str(refused.value)
        AgentRuntimeDaemonClient(url=url, daemon_id="laptop", token=TOKEN, insecure_plaintext=True)

    @pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "ws://localhost:1", "ws://[::1]:1", "ws://127.9.8.7:1", "wss://chat"])
    async def test_what_stays_on_this_machine_or_is_sealed_needs_no_word(self, url: str) -> None:
        """Our rule: loopback and ``wss://`` are as they are."""
        AgentRuntimeDaemonClient(url=url, daemon_id="laptop", token=TOKEN)


class TestClocks:
    """Time that is not what it was."""

    async def test_a_wall_clock_that_jumps_changes_no_lease_and_no_connection(
        self, hub: AgentRuntimeDaemonHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: a year forwards, then ten back, in mid-stream and in an outage: nobody is silent, nothing is lost."""
        shift = 0.0
        real, real_ns, real_gettime = time.time, time.time_ns, time.clock_gettime
        monkeypatch.setattr(time, "time", lambda: real() + shift)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(shift * 1e9))
        monkeypatch.setattr(
            time, "clock_gettime", lambda clock: real_gettime(clock) + (shift if clock == time.CLOCK_REALTIME else 0)
        )
        year = 365 * 86400.0
        async with CuttingProxy(port_of(hub)) as proxy:
            daemon = ScriptedDaemon(url=proxy.url)
            async with running_daemon(daemon):
                await hub.wait_for_daemon("laptop", WAIT)
                job = await hub.open_job("laptop", {"count": 600, "pause": 0.002})
                found: list[int] = []
                async with asyncio.timeout(WAIT):
                    async for event in job.events():
                        found.append(event["n"])
                        if len(found) == 100:
                            shift = year
                        elif len(found) == 200:
                            shift = -10 * year
                        elif len(found) == 300:
                            proxy.cut()
                            shift = year
                            asyncio.get_running_loop().call_later(0.3, proxy.restore)
                assert found == list(range(600))
                assert len(proxy.pipes) == 2
                assert not told(daemon, "refused")
                hub.lease_seconds = 0.3
                lost = await hub.open_job("laptop", {"hold": True})
                await until(lambda: len(daemon.ran) == 2)
                proxy.cut()
                shift = -20 * year
                assert (await refusal(numbers(lost))).code == "coding.daemon_lost"
                await until(lambda: daemon.cancelled == [lost.job_id])


class TestTwoMachines:
    """Two daemons with one id, as real processes."""

    async def test_a_daemon_that_answers_no_more_makes_room_for_another(self, tmp_path: Path) -> None:
        """Our rule: long before its silence counts, a failed probe lets the second in; the first waits when it wakes."""
        times = dataclasses.replace(TIMES, dead=WAIT * 10)
        async with (
            running_hub(state_dir=tmp_path / "state", times=times) as hub,
            started("daemon", url=hub.endpoint, table=str(tmp_path / "first")) as first,
            started_later("daemon", url=hub.endpoint, table=str(tmp_path / "second")) as start_second,
        ):
            await _in_state(first, "connected")
            first.signal(signal.SIGSTOP)
            second = await start_second()
            await _in_state(second, "connected")
            assert await numbers(await hub.open_job("laptop", {"count": 3})) == [0, 1, 2]
            job = await hub.open_job("laptop", {"count": 200, "pause": 0.005})
            first.signal(signal.SIGCONT)
            while not (await first.told("detail")).startswith("daemon_id_in_use:"):
                pass
            assert await numbers(job) == list(range(200))

    async def test_what_the_first_may_still_run_keeps_the_second_out(self, hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
        """Our rule: the other machine's table proves nothing about the job; it is fenced until the first one has spoken."""
        hub.lease_seconds = LEASE * 10
        async with (
            started("daemon", url=hub.endpoint, table=str(tmp_path / "first")) as first,
            started_later("daemon", url=hub.endpoint, table=str(tmp_path / "second")) as start_second,
        ):
            await _in_state(first, "connected")
            job = await hub.open_job("laptop", {"count": 1, "hold": True})
            async with asyncio.timeout(WAIT):
                await anext(job.events())
            first.signal(signal.SIGSTOP)
            second = await start_second()
            while not (await second.told("detail")).startswith("daemon_fenced:"):
                pass
            assert (await refusal(numbers(job))).code == "coding.daemon_lost"
            assert (await refusal(hub.wait_for_daemon("laptop", 0.1))).reason in ("daemon_fenced", "daemon_offline")
            assert len(markers(tmp_path / "state")) == 1
            await second.kill()
            first.signal(signal.SIGCONT)
            await hub.wait_for_daemon("laptop", WAIT)
            assert markers(tmp_path / "state") == []
            assert await numbers(await hub.open_job("laptop", {"count": 1})) == [0]


@contextlib.asynccontextmanager
async def started_later(kind: str, **options: Any) -> AsyncIterator[Any]:
    """A process that the test starts when it wants to; killed afterwards."""
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> Process:
            return await stack.enter_async_context(started(kind, **options))

        yield start


async def _in_state(process: Process, state: str) -> None:
    while await process.told("state") != state:
        pass


class TestWayOut:
    """Where a daemon connects to: the hub of its policy file, and nowhere else."""

    async def test_no_proxy_of_the_environment_is_used(
        self, hub: AgentRuntimeDaemonHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: what the relay carries goes to its hub by itself, whatever other programs of the machine are told."""
        visited = asyncio.Event()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            visited.set()
            writer.close()

        async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
                monkeypatch.setenv(name, address)
                monkeypatch.setenv(name.upper(), address)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with running_daemon(ScriptedDaemon(url=hub.endpoint)) as task:
                waiting = asyncio.create_task(hub.wait_for_daemon("laptop", WAIT))
                asked = asyncio.create_task(visited.wait())
                await asyncio.wait({waiting, asked, task}, return_when=asyncio.FIRST_COMPLETED)
                assert not visited.is_set()
                await waiting
                asked.cancel()

    async def test_no_redirect_is_followed(self, hub: AgentRuntimeDaemonHub) -> None:
        """Our rule: whoever answers at the hub's address sends no daemon anywhere else, not even to a hub it knows."""

        async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {hub.endpoint}\r\nContent-Length: 0\r\n\r\n".encode())
            writer.close()

        async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as server:
            daemon = ScriptedDaemon(url=f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with running_daemon(daemon):
                await until(lambda: len(daemon.states) >= 2)
            assert {state for state, _ in daemon.states} == {"lost"}
            assert await hub.list_daemons() == []
