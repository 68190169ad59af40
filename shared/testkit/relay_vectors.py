"""The golden vectors of ``coding-relay-v1``: one conversation between both roles, with every frame as it goes over the wire.

``python -m testkit.relay_vectors`` (with ``ACPAgentRunner`` and ``shared`` on the path) prints the file
``shared/coding-relay-v1.vectors.json``. Nonces are fixed here and random everywhere else; the token is an example.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from pkg import limits
from pkg import relay_protocol as relay
from pkg.relay_auth import transcript
from testkit.relay_world import DiskTable

Json = Any
TOKEN = "example-token-0123456789-abcdefghijkl"
DAEMON_ID = "ana's laptop"


def counting(first: int) -> Callable[[int], bytes]:
    """Bytes that stand for random ones: each call starts one higher."""
    starts = count(first)

    def random(size: int) -> bytes:
        start = next(starts)
        return bytes((start + at) % 256 for at in range(size))

    return random


class Story:
    """Both roles on a perfect line, with everything they say written down."""

    def __init__(self) -> None:
        self.hub = relay.HubProtocol(epoch="hub-epoch-1", random=counting(100))
        self.hub.put_secret("installation", TOKEN, 0.0)
        self.daemon = self._daemon()
        self.frames: list[Json] = []
        self.number = 0

    def _daemon(self) -> relay.DaemonProtocol:
        return relay.DaemonProtocol(
            daemon_id=DAEMON_ID,
            key=relay.daemon_key(TOKEN, DAEMON_ID),
            incarnation="incarnation-1",
            random=counting(1),
            table=DiskTable("table-1"),
            metadata={"agents": ["acp"]},
            features=("mcp",),
        )

    def note(self, sender: str, frame: bytes) -> None:
        """Write a frame down."""
        text = frame.decode("ascii")
        value = json.loads(text)
        sealed = isinstance(value, list)
        self.frames.append({"from": sender, "frame": text, "messages": value[2:] if sealed else [value]})

    def connect(self) -> None:
        """Open a connection."""
        self.number += 1
        self.frames.append({"connection": self.number})
        self.hub.accept(self.number, "192.0.2.1", 0.0)
        self.daemon.connect(0.0)
        self.exchange()

    def cut(self) -> None:
        """Lose the connection."""
        self.hub.disconnected(self.number, 0.0)
        self.daemon.disconnected(0.0)

    def exchange(self) -> None:
        """Let everything arrive that waits."""
        moved = True
        while moved:
            moved = False
            while (frame := self.daemon.next_frame()) is not None:
                self.note("daemon", frame)
                self.hub.receive(self.number, frame, 0.0)
                moved = True
            while (frame := self.hub.next_frame(self.number)) is not None:
                self.note("hub", frame)
                self.daemon.receive(frame, 0.0)
                moved = True


def vectors() -> Json:
    """The whole file."""
    story = Story()
    hub, daemon = story.hub, story.daemon
    story.connect()
    job = hub.start_job("installation", DAEMON_ID, {"driver": "acp", "text": "héllo"}, lease=120)
    story.exchange()
    hub.command(job, "steer", {"text": "and the tests, please"})
    daemon.emit(job, {"type": "TextDelta", "text": "Hello 👋", "message_id": "m1"})
    daemon.emit(job, {"type": "TextDelta", "text": " world", "message_id": "m1"})
    daemon.mcp_request(job, {"jsonrpc": "2.0", "id": 7, "method": "tools/list"})
    story.exchange()
    daemon.command_done(job, 1, True, True)
    hub.mcp_response(job, 1, {"jsonrpc": "2.0", "id": 7, "result": {"tools": []}})
    for event in hub.events():
        if isinstance(event, relay.JobEvents):
            hub.consumed(job, event.seq, 0.0)
    story.exchange()
    before, small = (limits.RELAY_RECORD_BYTES, limits.RELAY_PART_CHARS), (64, 40)
    limits.RELAY_RECORD_BYTES, limits.RELAY_PART_CHARS = small  # type: ignore[misc]
    try:
        daemon.emit(job, {"type": "TextDelta", "text": 'a "large" message in parts', "message_id": "m2"})
    finally:
        limits.RELAY_RECORD_BYTES, limits.RELAY_PART_CHARS = before  # type: ignore[misc]
    story.cut()
    daemon.emit(job, {"type": "TextDelta", "text": "said while nobody listened", "message_id": "m3"})
    story.connect()
    daemon.finish(job, "completed")
    story.exchange()
    cancelled = hub.start_job("installation", DAEMON_ID, {"driver": "acp", "text": "never mind"}, lease=0)
    story.exchange()
    hub.cancel(cancelled, 0.0)
    story.exchange()
    daemon.finish(cancelled, "cancelled")
    story.exchange()
    connections = []
    key = relay.daemon_key(TOKEN, DAEMON_ID)
    for at, item in enumerate(story.frames):
        if "connection" not in item:
            continue
        hello, challenge = (story.frames[at + step]["frame"] for step in (1, 2))
        handshake = transcript(hello.encode(), challenge.encode())
        connections.append(
            {
                "connection": item["connection"],
                "hello": hello,
                "challenge": challenge,
                "daemon_proof": handshake.proof(key, "daemon"),
                "hub_proof": handshake.proof(key, "hub"),
                "key_of_the_daemon_s_frames": handshake.derive(key, b"frames of the daemon").hex(),
                "key_of_the_hub_s_frames": handshake.derive(key, b"frames of the hub").hex(),
            }
        )
    return {
        "protocol": relay.PROTOCOL,
        "keys": {"token": TOKEN, "daemon_id": DAEMON_ID, "daemon_key": key.hex(), "key_file": relay.format_key(key)},
        "handshakes": connections,
        "frames": story.frames,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(vectors(), indent=1) + "\n")
