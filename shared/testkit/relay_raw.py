"""Both ends of a relay connection by hand: a daemon that says whatever a test wants, and a hub role to say it to.

Hello, challenge and proofs are put together here, so that a test can leave any of them out or make it wrong.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from pkg import relay_protocol as relay
from pkg.relay_auth import Transcript
from pkg.relay_frames import Counters, SealedChannel

TOKEN = "north-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0pS"
OTHER_TOKEN = "south-aB7cD2eF9gH4iJ6kL1mN8oP3qR5sT0uV"

Json = Any


class Line:
    """A hub role and its connections; ``now`` moves only by :meth:`wait`."""

    def __init__(self, *, shared: bool = False, markers: relay.PendingMarkers | None = None, epoch: str = "epoch1") -> None:
        self.now = 0.0
        self.hub = relay.HubProtocol(epoch=epoch, random=Random(1).randbytes, shared=shared, markers=markers)
        self.numbers = 0

    def wait(self, seconds: float) -> None:
        """Let time pass, with the hub's deadlines kept."""
        end = self.now + seconds
        while self.now < end:
            self.now = max(self.now, min(end, self.hub.deadline()))
            self.hub.tick(self.now)

    def events(self, kind: type[Any]) -> list[Any]:
        """What the hub told, of one kind; the rest is dropped."""
        return [event for event in self.hub.events() if isinstance(event, kind)]


class RawDaemon:
    """One connection of a daemon made by hand."""

    def __init__(
        self,
        line: Line,
        daemon_id: str = "raw",
        token: str = TOKEN,
        *,
        incarnation: str = "raw-1",
        key: bytes = b"",
        address: str = "192.0.2.1",
    ) -> None:
        line.numbers += 1
        self.line = line
        self.number = line.numbers
        self.daemon_id = daemon_id
        self.incarnation = incarnation
        self.key = key or relay.daemon_key(token, daemon_id)
        self.channel: SealedChannel | None = None
        self.heard: list[Json] = []
        """Every message of the hub, the handshake included."""
        self.sent: list[bytes] = []
        line.hub.accept(self.number, address, line.now)

    # ------------------------------------------------------------------ bytes

    def push(self, frame: bytes) -> None:
        """Send a frame as it is."""
        self.sent.append(frame)
        self.line.hub.receive(self.number, frame, self.line.now)

    def pull(self) -> list[bytes]:
        """The hub's frames, with sealed ones opened into :attr:`heard`."""
        frames = []
        while (frame := self.line.hub.next_frame(self.number)) is not None:
            frames.append(frame)
            if self.channel is None:
                self.heard.append(json.loads(frame))
            else:
                self.heard += self.channel.open(frame) or []
        return frames

    @property
    def closed(self) -> tuple[int, str] | None:
        """How the hub closes this connection, if it does."""
        self.pull()
        return self.line.hub.closing(self.number)

    def gone(self) -> None:
        """The connection ends."""
        self.line.hub.disconnected(self.number, self.line.now)

    # ------------------------------------------------------------------ the protocol

    def hello(self, **more: Json) -> None:
        """Say hello; ``more`` replaces fields, and removes those that are ``None``."""
        fields = {
            "type": "daemon.hello",
            "protocol": "coding-relay-v1",
            "daemon_id": self.daemon_id,
            "daemon_incarnation": self.incarnation,
            "nonce": "bm9uY2Utbm9uY2Utbm9uY2UtMDE",
            "features": [],
            **more,
        }
        self.push(json.dumps({name: value for name, value in fields.items() if value is not None}).encode())

    def transcript(self) -> Transcript:
        """The handshake so far, from what went over the wire."""
        challenge = self.pull()[0]
        hello = json.loads(self.sent[0])
        return Transcript(hello["daemon_id"], hello["nonce"], json.loads(challenge)["nonce"], self.sent[0], challenge)

    def prove(self, proof: str = "") -> Transcript:
        """Send the proof (or a given one) and check the hub's, when it answers with one."""
        handshake = self.transcript()
        self.push(json.dumps({"type": "daemon.proof", "proof": proof or handshake.proof(self.key, "daemon")}).encode())
        if (frame := self.line.hub.next_frame(self.number)) is not None:
            self.heard.append(json.loads(frame))
            if self.heard[-1]["type"] == "hub.proof":
                assert handshake.proves(self.key, "hub", self.heard[-1]["proof"])
                self.channel = handshake.channel(self.key, "daemon", Counters())
        return handshake

    def say(self, *messages: Json) -> None:
        """Send messages in one sealed frame."""
        assert self.channel is not None
        self.push(self.channel.seal([json.dumps(message).encode() for message in messages]))

    def state(self, resume: list[Json] | None = None, quiesced: list[str] | None = None, table: str = "table") -> None:
        """Report the job table."""
        self.say({"type": "daemon.state", "table": table, "resume": resume or [], "quiesced": quiesced or []})

    def join(self, **state: Any) -> RawDaemon:
        """Everything up to and with the job table."""
        self.hello()
        self.prove()
        self.state(**state)
        self.pull()
        return self

    def finished(self, job_id: str, **more: Json) -> None:
        """Report the end of a job."""
        self.say(
            {
                "type": "run.finished",
                "job_id": job_id,
                "outcome": "completed",
                "last": 0,
                "quiescent": True,
                "error": None,
                **more,
            }
        )

    def types(self) -> list[str]:
        """The types of everything heard."""
        self.pull()
        return [message["type"] for message in self.heard]
