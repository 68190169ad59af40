"""Connections of a hub from their acceptance to their proof: hello, challenge, parking, and which installation they belong to.

A connection says hello and gets a challenge at once; the hub needs no secret for that. The secret that verifies the daemon's
proof decides which installation the connection belongs to. Where one listener serves many installations (``shared``) and none
of its secrets verifies the proof, the connection is parked: its installation may not have shown its secret yet.

Guarantees: an unproven connection costs one hello of at most ``RELAY_HELLO_BYTES`` and is heard on nothing but its hello, its
proof and pings; what it says is parsed only as far as that. At most ``RELAY_PARKED`` connections are in their handshake and
as many parked, ``RELAY_PARKED_PER_ADDRESS`` of one address, and the oldest give way (of those in their handshake, the oldest of
the largest crowd), so that strangers never keep a daemon out. The hub proves itself to nobody whose proof it has not verified.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from pkg import limits
from pkg.relay_auth import (
    NONCE_BYTES,
    PROTOCOL,
    Installation,
    Secrets,
    Transcript,
    challenge_frame,
    daemon_id_of,
    fingerprint,
    proof_of,
    transcript,
)
from pkg.relay_events import CLOSE_FATAL, CLOSE_PROTOCOL, CLOSE_RETRY, RelayTimes
from pkg.relay_frames import (
    Channel,
    Counters,
    FrameError,
    Json,
    Message,
    PlainChannel,
    decode_object,
    encode,
    names_of,
    number_of,
    text_of,
)
from pkg.relay_streams import Streamed

if TYPE_CHECKING:
    from pkg.relay_jobs import Link

Key = TypeVar("Key")

Stage = Literal["hello", "proof", "parked", "state", "probing", "live", "closed"]

REASONS: Final[Mapping[str, str]] = {
    "protocol_unsupported": f"this hub speaks {PROTOCOL}; upgrade the daemon, or the plugin if it is older",
    "hello_invalid": "the first message must be a daemon.hello of at most 4 KiB; upgrade the daemon",
    "handshake_timeout": "the handshake took too long; check the network",
    "daemon_token_rejected": "use the daemon-token of the plugin's settings, or a key made from it for this id",
    "daemon_token_conflict": "two installations have this daemon-token; give each its own",
    "daemon_token_sent": "a token may not be sent here; use a daemon that proves it",
    "daemon_token_changed": "the plugin's daemon-token was changed; give the daemon the new one",
    "parking_full": "too many unknown daemons wait here; the daemon tries again",
    "daemon_id_in_use": "another daemon with this id is connected; give each its own daemon_id",
    "daemon_fenced": "jobs on this machine are not proven to have ended; the daemon ends them and tries again",
    "connections_full": "too many of this installation's connections are not ready yet; the daemon tries again",
    "daemons_full": "this installation has 128 daemons connected; stop some",
    "daemons_unproven": "jobs on too many other machines are not proven to have ended; let their daemons connect first",
    "daemon_replaced": "the same daemon has connected again",
    "daemon_silent": "nothing was heard for too long; the daemon tries again",
    "installation_revoked": "the plugin's installation was removed or changed; the daemon tries again",
    "daemon_not_reading": "too much waits to be read; the daemon tries again",
    "hub_stopped": "the plugin stops; the daemon tries again",
}
"""Close reasons: the code, then what to do. Each fits, with its code, into the 123 bytes of a close frame."""


def reason_text(code: str, detail: str = "") -> str:
    """A close reason: ``code: what to do``."""
    text = f"{code}: {detail or REASONS[code]}"
    return text.encode("ascii", "replace")[: limits.RELAY_REASON_BYTES].decode("ascii")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a hello says about its daemon; believed only as far as the proof covers it."""

    daemon_id: str
    incarnation: str
    features: tuple[str, ...]
    metadata: Mapping[str, Json]


@dataclass(slots=True, eq=False)
class Socket:
    """One accepted connection."""

    number: int
    address: str
    since: float
    """When its stage began."""
    heard: float
    """When it last said something that counts."""
    stage: Stage = "hello"
    plain: deque[bytes] = field(default_factory=deque)
    """Frames to send before (or without) the sealed ones."""
    controls: deque[bytes] = field(default_factory=deque)
    ready: deque[Streamed] = field(default_factory=deque)
    channel: Channel | None = None
    close: tuple[int, str] | None = None
    """How to close it, once everything above is sent."""
    handshake: Transcript | None = None
    proof: str = field(default="", repr=False)
    identity: Identity | None = None
    installation: Installation = None
    key: bytes = field(default=b"", repr=False)
    """A fingerprint of the key that proved it."""
    state: Message | None = None
    """The job table of a daemon that spoke it early: in a plain hello, or while an older connection is probed."""
    link: Link | None = None
    """Its daemon, while it is that daemon's connection of the moment."""
    counters: Counters = field(default_factory=Counters)


def identity_of(hello: Message) -> Identity:
    """What a hello says; raises :class:`FrameError`."""
    metadata = hello.get("metadata", {})
    if type(metadata) is not dict:
        raise FrameError("bad field metadata")
    features = names_of(hello, "features", 64, 64)
    return Identity(daemon_id_of(hello), text_of(hello, "daemon_incarnation", 64), features, metadata)


def gives_way(waiting: Mapping[Key, str]) -> Key:
    """Which of those that wait has to go, given their addresses in order of arrival: the oldest of the largest crowd."""
    crowds = Counter(waiting.values())
    largest = max(crowds.values())
    return next(key for key, address in waiting.items() if crowds[address] == largest)


class Admission:
    """The unproven connections of one listener."""

    def __init__(
        self,
        secrets: Secrets,
        epoch: str,
        random: Callable[[int], bytes],
        times: RelayTimes,
        shared: bool,
        refuse: Callable[[Socket, int, str], None],
    ) -> None:
        """``refuse(socket, code, reason)`` closes a connection; ``random(n)`` gives n unguessable bytes."""
        self._secrets = secrets
        self._epoch = epoch
        self._random = random
        self._times = times
        self._shared = shared
        self._refuse = refuse
        self._handshaking: dict[int, Socket] = {}
        self._parked: dict[int, Socket] = {}

    @property
    def parked(self) -> int:
        """How many connections are parked."""
        return len(self._parked)

    def add(self, socket: Socket) -> None:
        """A connection was accepted."""
        if len(self._handshaking) >= limits.RELAY_PARKED:
            oldest = gives_way({number: each.address for number, each in self._handshaking.items()})
            self._refuse(self._handshaking[oldest], CLOSE_RETRY, reason_text("parking_full"))
        self._handshaking[socket.number] = socket

    def remove(self, socket: Socket) -> None:
        """A connection is gone, or proven."""
        self._handshaking.pop(socket.number, None)
        self._parked.pop(socket.number, None)

    def receive(self, socket: Socket, frame: bytes, now: float) -> bool:
        """Take a frame of an unproven connection; whether it is proven now."""
        try:
            message = decode_object(frame, limits.RELAY_HELLO_BYTES)
            kind = message.get("type")
            if socket.stage == "hello":
                if kind != "daemon.hello":
                    raise FrameError("not a hello")
                return self._hello(socket, message, frame, now)
            if socket.stage == "proof" and kind == "daemon.proof":
                socket.proof = proof_of(message)
                return self._proven(socket, now)
            if kind == "daemon.ping":
                socket.heard = now
                socket.plain.append(encode({"type": "daemon.pong", "n": number_of(message, "n")}))
                if len(socket.plain) > 4:
                    raise FrameError("too many pings")
                return False
            raise FrameError("not expected now")
        except FrameError as exc:
            if socket.stage == "hello":
                self._refuse(socket, CLOSE_FATAL, reason_text("hello_invalid"))
            else:
                self._refuse(socket, CLOSE_PROTOCOL, reason_text("protocol_error", exc.reason))
            return False

    def retry(self, installation: Installation, now: float) -> list[Socket]:
        """After an installation has shown its secret: the parked connections that are proven now.

        Only that secret is tried: no other one has made their proofs, and each costs time that everybody waits.
        """
        proven = []
        for socket in list(self._parked.values()):
            assert socket.handshake is not None
            found = self._secrets.proven_by(installation, socket.handshake, socket.proof)
            if found is not None:
                self._accept(socket, *found, now)
                proven.append(socket)
        return proven

    def tick(self, now: float) -> None:
        """Close what took too long."""
        for socket in list(self._handshaking.values()):
            if now >= socket.since + self._times.handshake:
                self._refuse(socket, CLOSE_RETRY, reason_text("handshake_timeout"))
        for socket in list(self._parked.values()):
            if now >= socket.heard + self._times.dead:
                self._refuse(socket, CLOSE_RETRY, reason_text("daemon_silent"))

    def deadline(self) -> float:
        """When :meth:`tick` has something to do next."""
        handshakes = (socket.since + self._times.handshake for socket in self._handshaking.values())
        parked = (socket.heard + self._times.dead for socket in self._parked.values())
        return min(min(handshakes, default=float("inf")), min(parked, default=float("inf")))

    def _hello(self, socket: Socket, hello: Message, frame: bytes, now: float) -> bool:
        if hello.get("protocol") != PROTOCOL:
            self._refuse(socket, CLOSE_FATAL, reason_text("protocol_unsupported"))
            return False
        identity = identity_of(hello)
        if "token" in hello:
            return self._plain(socket, hello, identity, now)
        challenge = challenge_frame(self._random(NONCE_BYTES), self._epoch)
        socket.handshake = transcript(frame, challenge)
        socket.plain.append(challenge)
        socket.stage, socket.since, socket.heard = "proof", now, now
        return False

    def _plain(self, socket: Socket, hello: Message, identity: Identity, now: float) -> bool:
        if self._shared:
            self._refuse(socket, CLOSE_FATAL, reason_text("daemon_token_sent"))
            return False
        found = self._secrets.holding(identity.daemon_id, text_of(hello, "token", 1024))
        if len(found) != 1:
            self._refuse(socket, CLOSE_FATAL, reason_text("daemon_token_conflict" if found else "daemon_token_rejected"))
            return False
        installation, key = found[0]
        socket.state = {name: hello[name] for name in ("resume", "quiesced", "table") if name in hello}
        self._admit(socket, identity, installation, key, PlainChannel(), now)
        return True

    def _proven(self, socket: Socket, now: float) -> bool:
        handshake = socket.handshake
        assert handshake is not None
        found = self._secrets.proven(handshake, socket.proof)
        if len(found) > 1:
            self._refuse(socket, CLOSE_RETRY, reason_text("daemon_token_conflict"))
        elif not found and not self._shared:
            self._refuse(socket, CLOSE_FATAL, reason_text("daemon_token_rejected"))
        elif not found:
            self._park(socket, now)
        else:
            self._accept(socket, *found[0], now)
            return True
        return False

    def _accept(self, socket: Socket, installation: Installation, key: bytes, now: float) -> None:
        handshake = socket.handshake
        assert handshake is not None
        identity = identity_of(decode_object(handshake.hello, limits.RELAY_HELLO_BYTES))
        socket.plain.append(encode({"type": "hub.proof", "proof": handshake.proof(key, "hub")}))
        self._admit(socket, identity, installation, key, handshake.channel(key, "hub", socket.counters), now)

    def _admit(
        self, socket: Socket, identity: Identity, installation: Installation, key: bytes, channel: Channel, now: float
    ) -> None:
        self.remove(socket)
        socket.identity, socket.installation, socket.key = identity, installation, fingerprint(key)
        socket.channel = channel
        socket.handshake, socket.proof = None, ""
        socket.stage, socket.since, socket.heard = "state", now, now

    def _park(self, socket: Socket, now: float) -> None:
        self._handshaking.pop(socket.number, None)
        same = [other for other in self._parked.values() if other.address == socket.address]
        for crowd, most in ((same, limits.RELAY_PARKED_PER_ADDRESS), (list(self._parked.values()), limits.RELAY_PARKED)):
            if len(crowd) >= most:
                self._refuse(crowd[0], CLOSE_RETRY, reason_text("parking_full"))
                break
        self._parked[socket.number] = socket
        socket.stage, socket.since, socket.heard = "parked", now, now
        socket.plain.append(encode({"type": "daemon.parked"}))
