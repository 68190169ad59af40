"""What makes the relay quick is still right: long texts quoted our way, lone events sent at once, many events in few frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from pkg import limits
from pkg.relay_frames import encode
from pkg.relay_sockets import Sending
from testkit.relay_rig import WAIT, ScriptedDaemon, running_daemon, running_hub
from testkit.relay_socket import SocketDaemon

LONG = "so it is said, " * 100


def usual(value: object) -> bytes:
    """The standard library's compact ASCII form."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


@pytest.mark.parametrize("extra", [*map(chr, range(0x100)), "\u4f60", "\ud800", "\U0001f600", '\\"\\n', "\\", '"', "\\u0041"])
def test_a_long_text_is_written_as_the_standard_library_writes_it(extra: str) -> None:
    """Our rule: the quick way for long texts gives the same bytes, whatever stands at either end or in the middle."""
    for text in (LONG + extra, extra + LONG, LONG + extra + LONG, extra * limits.RELAY_BATCH + LONG):
        assert encode({"text": text, "in": [{text: [text, 1]}]}) == usual({"text": text, "in": [{text: [text, 1]}]})


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(max_codepoint=0x7F), min_size=1000, max_size=1100))
def test_any_ascii_text_is_written_as_the_standard_library_writes_it(text: str) -> None:
    """Our rule: shorter than the quick way begins with or longer, full of characters that need escapes or without."""
    assert encode(text) == usual(text)
    assert encode(text.translate({code: None for code in range(0x20) if code not in (9, 10, 13)})) == usual(
        text.translate({code: None for code in range(0x20) if code not in (9, 10, 13)})
    )


class Counting(ScriptedDaemon):
    """Knows how many frames it has sent."""

    @property
    def frames(self) -> int:
        channel: Any = self._protocol._channel
        return int(channel._sent)

    async def run_job(self, job_id: str, payload: Any) -> None:
        before = self.frames
        if payload["way"] == "one by one":
            for number in range(payload["count"]):
                # Three turns of the loop: the daemon has had nothing to do for one of them.
                for _ in range(5):
                    await asyncio.sleep(0)
                sent = self.frames
                await self.emit_event(job_id, {"n": number})
                assert self.frames == sent + 1, "it waits for something"
        elif payload["way"] == "large":
            for _ in range(5):
                await asyncio.sleep(0)
            await self.emit_event(job_id, {"pad": "x" * payload["size"]})
            assert self.frames == before + 1
            assert self._protocol.waiting
            assert self._wake.is_set(), "nobody sees to the rest"
        else:
            for number in range(payload["count"]):
                await self.emit_event(job_id, {"n": number, "pad": "x" * payload["pad"]})
        await self.emit_event(job_id, {"frames": self.frames - before})


@pytest.mark.asyncio
async def test_a_lone_event_is_on_its_way_when_emitting_it_returns() -> None:
    """Our rule: batching never waits for more events; a lone one does not even wait for the loop's next turn."""
    async with running_hub() as hub:
        daemon = Counting(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            payload = {"way": "one by one", "count": 20}
            events = [event async for event in hub.run_job("laptop", payload, None, WAIT)]
            assert [event.get("n") for event in events[:-1]] == list(range(20))


@pytest.mark.asyncio
@pytest.mark.parametrize(("pad", "in_a_frame"), [(0, 64), (4000, 64), (40_000, 6)])
async def test_what_a_job_says_in_one_go_travels_in_few_frames(pad: int, in_a_frame: int) -> None:
    """Our rule: what there is goes together, up to 64 events or the size of a frame, though a lone one would go at once."""
    count = 10 * in_a_frame
    async with running_hub() as hub:
        daemon = Counting(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            payload = {"way": "at once", "count": count, "pad": pad}
            *events, last = [event async for event in hub.run_job("laptop", payload, None, WAIT)]
            assert [event["n"] for event in events] == list(range(count))
            assert last["frames"] <= 2 * 10 + 2


@pytest.mark.asyncio
async def test_a_lone_event_of_many_frames_is_sent_to_its_end() -> None:
    """Our rule: whoever sends a lone event's first frame sees to the rest of it; nothing waits for a timer."""
    async with running_hub() as hub:
        daemon = Counting(url=hub.endpoint)
        async with running_daemon(daemon):
            await hub.wait_for_daemon("laptop", WAIT)
            payload = {"way": "large", "size": 1_900_000}
            events = [event async for event in hub.run_job("laptop", payload, None, WAIT)]
            assert len(events[0]["pad"]) == 1_900_000


@contextlib.asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """The address of somebody who accepts a connection and never reads from it."""
    over = asyncio.Event()

    async def served(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await over.wait()

    async with serve(served, "127.0.0.1", 0, compression=None, close_timeout=0.1) as server:
        try:
            yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        finally:
            over.set()


@pytest.mark.asyncio
async def test_a_connection_whose_other_side_takes_nothing_is_cut() -> None:
    """Our rule: one frame waits so long and no longer, however many went out before it, and meanwhile no other is begun."""
    async with deaf() as url, connect(url, compression=None, write_limit=1024) as connection:
        inner = connection.transport.get_extra_info("socket")
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sending = Sending(connection, 0.5)
        assert sending.free
        loop = asyncio.get_running_loop()
        took = []
        with pytest.raises(ConnectionClosed):
            async with asyncio.timeout(WAIT):
                while True:
                    began = loop.time()
                    waiting = asyncio.create_task(sending.send(b"x" * 500_000))
                    await asyncio.sleep(0)
                    assert waiting.done() or not sending.free
                    await waiting
                    took.append(loop.time() - began)
        assert took[-1] >= 0.45
        assert not sending.free
        sending.stop()


@pytest.mark.asyncio
async def test_an_event_is_consumed_before_the_next_frame_is_looked_at() -> None:
    """Our rule: the end of a job, which may be there already, does not come between an event and its consumer."""
    async with running_hub() as hub, SocketDaemon(hub.endpoint) as daemon:
        await daemon.join()
        job = await hub.open_job(daemon.daemon_id, {})
        about = {"job_id": (await daemon.hear("run.start"))["job_id"]}

        async def consume() -> list[tuple[int, bool]]:
            return [(event["n"], job.ended.is_set()) async for event in job.events()]

        consumer = asyncio.create_task(consume())
        await daemon.say({"type": "run.event", **about, "seq": 1, "records": [{"n": 1}]})
        await daemon.say({"type": "run.event", **about, "seq": 2, "records": [{"n": 2}]})
        await daemon.say(
            {"type": "run.finished", **about, "outcome": "completed", "last": 2, "quiescent": True, "error": None},
        )
        async with asyncio.timeout(WAIT):
            assert await consumer == [(1, False), (2, False)]
