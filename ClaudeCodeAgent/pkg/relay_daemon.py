"""The daemon's role in the relay: one hub, one connection at a time, jobs that outlive it. No I/O, no clock.

The shell calls :meth:`DaemonProtocol.connect` when a connection is open, gives it every frame, sends what
:meth:`DaemonProtocol.next_frame` gives, closes when :meth:`DaemonProtocol.closing` says so, reports the end of the connection
with :meth:`DaemonProtocol.disconnected`, and acts on :meth:`DaemonProtocol.events`. ``now`` is seconds of a clock that never
goes back and counts through a suspend.

Guarantees:

- nothing but the handshake is heard before the hub has proven that it has this daemon's key;
- a rejection, which is never sealed, is final only where nobody but the hub can answer (``authentic``); elsewhere it ends the
  connection, as anybody on the way could, and no job;
- what a job emits while nobody is connected is kept, in order, and sent from where the hub says it stands; when the journal is
  full the producer is held back, never the connection or another job;
- every command of the hub reaches the shell at most once, in order, and a bounded number of a job's are open at once;
- a job whose lease ran out, that the hub does not know, or that was cancelled is ended (:class:`EndJob`), nothing more of it is
  sent, and it is reported as quiesced only after :meth:`DaemonProtocol.finish` said so;
- a job is in the durable table before the shell is told to start it.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, cast

from pkg import limits
from pkg.relay_auth import NONCE_BYTES, PROTOCOL, Transcript, nonce_of, nonce_text, proof_of, transcript, valid_daemon_id
from pkg.relay_events import (
    CLOSE_FATAL,
    CLOSE_PROTOCOL,
    VERBS,
    Command,
    Connected,
    DaemonEvent,
    EndJob,
    JobForgotten,
    JobTable,
    McpResponse,
    Outcome,
    Parked,
    Refused,
    RelayTimes,
    StartJob,
    Verb,
    Writable,
)
from pkg.relay_frames import (
    Channel,
    Counters,
    FrameError,
    Json,
    Message,
    decode_object,
    encode,
    job_id_of,
    names_of,
    number_of,
    objects_of,
    seconds_of,
    text_of,
)
from pkg.relay_streams import Incoming, MessageTooLarge, Outgoing, Spill, SpillError, Streamed, pack
from pkg.relay_table import Entry, EntryState, Table

_ID_CHARS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")

Stage = Literal["offline", "challenge", "proof", "parked", "state", "live"]


class DaemonJob(Streamed):
    """One job that this daemon has."""

    __slots__ = (
        "ack_waits",
        "commands",
        "ended",
        "epoch",
        "error",
        "incoming",
        "lease",
        "mcp_open",
        "mcp_sent",
        "outcome",
        "started",
    )

    def __init__(self, job_id: str, epoch: str, lease: float, spill: Spill | None) -> None:
        """``epoch`` is the hub's; ``lease`` is seconds the job outlives its connection."""
        super().__init__("run.event", job_id, Outgoing(limits.RELAY_JOURNAL_MEMORY, spill))
        self.epoch = epoch
        self.lease = lease
        self.incoming = Incoming()
        self.started = False
        """Whether the shell was told to start it."""
        self.ended = ""
        """Why the shell was told to end it."""
        self.outcome: Outcome | None = None
        """How it ended, once nothing of it is left running."""
        self.error: Json = None
        self.commands: set[int] = set()
        self.mcp_sent = 0
        self.mcp_open: set[int] = set()
        self.ack_waits = False

    @property
    def running(self) -> bool:
        """Whether anything it says or hears still counts."""
        return not self.ended and self.outcome is None

    @property
    def state(self) -> EntryState:
        """As its hub is told."""
        return "finished" if self.outcome is not None else "ending" if self.ended else "running"


class DaemonProtocol:
    """One daemon's connection to one hub, and its jobs for it."""

    def __init__(
        self,
        *,
        daemon_id: str,
        key: bytes,
        incarnation: str,
        random: Callable[[int], bytes],
        table: JobTable,
        quiesced: Iterable[str] = (),
        unproven: Iterable[str] = (),
        spill: Callable[[str], Spill | None] | None = None,
        metadata: Mapping[str, Json] | None = None,
        features: tuple[str, ...] = (),
        authentic: bool = True,
        times: RelayTimes | None = None,
    ) -> None:
        """``key`` is the daemon key (:func:`pkg.relay_auth.daemon_key`), ``incarnation`` this process's own id.

        ``quiesced`` and ``unproven`` are the jobs an earlier process left in the table: those of which nothing is left, and
        those that could not be ended. ``spill(job_id)`` makes a job's disk journal. ``authentic``: nobody but the hub can
        answer on a connection, whatever its seals. Raises ``ValueError`` for an impossible daemon id, and for metadata and
        features that do not fit into a hello.
        """
        if not valid_daemon_id(daemon_id):
            raise ValueError("a daemon id has 1 to 128 characters and no control characters")
        self.daemon_id = daemon_id
        self.incarnation = incarnation
        self.times = times or RelayTimes()
        self.counters = Counters()
        self._key = key
        self._authentic = authentic
        self._random = random
        self._table = table
        self._spill = spill
        self._hello: Message = {
            "type": "daemon.hello",
            "protocol": PROTOCOL,
            "daemon_id": daemon_id,
            "daemon_incarnation": incarnation,
            "nonce": nonce_text(bytes(NONCE_BYTES)),
            "metadata": dict(metadata or {}),
            "features": list(features),
        }
        if len(encode(self._hello)) > limits.RELAY_HELLO_BYTES:
            raise ValueError(f"a hello has at most {limits.RELAY_HELLO_BYTES} bytes")
        self._jobs: dict[str, DaemonJob] = {}
        self._quiesced: dict[str, Outcome] = dict.fromkeys(quiesced, "lost")
        """Jobs of which nothing is left, until the hub has taken note."""
        self._unproven: dict[str, None] = dict.fromkeys(unproven)
        self._events: list[DaemonEvent] = []
        self._stage: Stage = "offline"
        self._plain: deque[bytes] = deque()
        self._controls: deque[bytes] = deque()
        self._ready: deque[Streamed] = deque()
        self._channel: Channel | None = None
        self._close: tuple[int, str] | None = None
        self._sent_hello = b""
        self._handshake: Transcript | None = None
        self._epoch = ""
        self._now = 0.0
        self._since = 0.0
        self._heard = 0.0
        self._lost_at = 0.0
        self._ping_at = math.inf
        self._ping = 0
        self._fresh = self._fresh_bytes = 0
        """Events emitted since a frame was last asked for, and their bytes."""
        self._acks: list[DaemonJob] = []
        self._ack_at = math.inf

    # -------------------------------------------------------------- what the shell reads

    @property
    def live(self) -> bool:
        """Whether the hub has admitted this daemon on the present connection."""
        return self._stage == "live"

    @property
    def waiting(self) -> bool:
        """Whether :meth:`next_frame` may give something now."""
        return bool(self._plain or self._controls or self._ready)

    @property
    def full(self) -> bool:
        """Whether what was emitted since a frame was last asked for fills one."""
        return self._fresh >= limits.RELAY_BATCH or self._fresh_bytes >= limits.RELAY_FRAME_TARGET

    def events(self) -> list[DaemonEvent]:
        """What happened since the last call, in order."""
        told, self._events = self._events, []
        return told

    def next_frame(self) -> bytes | None:
        """The next frame to send, made of all that waits; ``None`` when nothing does."""
        if self._plain:
            return self._plain.popleft()
        if self._channel is None:
            return None
        self._fresh = self._fresh_bytes = 0
        if self._acks and (self._controls or self._ready):
            self._flush_acks()
        while True:
            try:
                return pack(self._channel, self._controls, self._ready)
            except SpillError as exc:
                self._end(self._jobs[exc.job_id], "journal")

    def closing(self) -> tuple[int, str] | None:
        """How to close the connection (code and reason), after its last frame."""
        return None if self._plain or self._controls else self._close

    def deadline(self) -> float:
        """When :meth:`tick` has something to do next, if nothing else happens before; infinite when never."""
        if self._stage == "live":
            return min(self._ping_at, self._heard + self.times.dead, self._ack_at)
        leases = min((self._lost_at + job.lease for job in self._jobs.values() if not job.ended), default=math.inf)
        if self._stage == "offline" or self._close is not None:
            return leases
        if self._stage in ("parked", "state"):
            return min(leases, self._ping_at, self._heard + self.times.dead)
        return min(leases, self._since + self.times.handshake)

    def jobs(self) -> tuple[str, ...]:
        """The jobs that run."""
        return tuple(job_id for job_id, job in self._jobs.items() if job.running)

    def held(self, job_id: str) -> int:
        """Bytes a job's journal holds."""
        job = self._jobs.get(job_id)
        return 0 if job is None else job.out.held

    # -------------------------------------------------------------- the connection

    def connect(self, now: float) -> None:
        """A new connection is open; the one before must have been reported as gone."""
        self._now = self._since = self._heard = now
        self._stage = "challenge"
        self._plain.clear()
        self._controls.clear()
        self._close = None
        self._sent_hello = encode(self._hello | {"nonce": nonce_text(self._random(NONCE_BYTES))})
        self._plain.append(self._sent_hello)

    def receive(self, frame: bytes, now: float) -> None:
        """A frame (a whole WebSocket text message, undecoded) arrived on the present connection."""
        if self._stage == "offline" or self._close is not None:
            return
        self._now = now
        try:
            if self._channel is None:
                self._handshake_frame(frame)
                return
            messages = self._channel.open(frame)
            if messages is None:
                return
            self._heard = now
            size = len(frame) // len(messages)
            for message in messages:
                if message["type"] == "run.command" and self._stage == "live":
                    self._stream(message, size)
                else:
                    self._message(message)
        except FrameError as exc:
            self._shut(CLOSE_PROTOCOL, exc.reason)

    def disconnected(self, now: float, code: int = 0, reason: str = "") -> None:
        """The connection is gone. ``code`` and ``reason`` are those of the hub's close frame, when there was one."""
        if self._stage == "offline":
            return
        was_live = self._stage == "live"
        rejected = code == CLOSE_FATAL
        fatal = rejected and self._authentic
        self._now = now
        self._stage = "offline"
        self._channel = self._handshake = None
        self._ping_at = self._ack_at = math.inf
        for waiting in (self._plain, self._controls, self._ready, self._acks):
            waiting.clear()
        if was_live:
            self._lost_at = self._heard if now >= self._heard + self.times.dead else now
        for job in list(self._jobs.values()):
            job.queued = job.ack_waits = False
            if fatal or (was_live and job.lease == 0):
                self._expire(job, "disconnected")
        if code:
            self._events.append(Refused(_printable(reason), fatal=fatal, claimed=rejected and not fatal))

    def tick(self, now: float) -> None:
        """Let time pass: heartbeats, a silent hub, leases, late acknowledgements."""
        self._now = now
        if self._stage in ("challenge", "proof") and now >= self._since + self.times.handshake:
            self._shut(CLOSE_PROTOCOL, "the hub did not answer")
        elif self._stage not in ("offline", "challenge", "proof") and now >= self._heard + self.times.dead:
            self._shut(CLOSE_PROTOCOL, "the hub is silent")
        elif now >= self._ping_at and self._close is None:
            self._ping += 1
            self._ping_at = now + self.times.heartbeat
            ping = {"type": "daemon.ping", "n": self._ping}
            if self._channel is None:
                self._plain.append(encode(ping))
            else:
                self._control(ping)
        if now >= self._ack_at:
            self._flush_acks()
        if self._stage != "live":
            for job in list(self._jobs.values()):
                if not job.ended and now >= self._lost_at + job.lease:
                    self._expire(job, "lost")

    def _shut(self, code: int, reason: str) -> None:
        if self._close is None:
            self._close = (code, f"protocol_error: {reason}"[: limits.RELAY_REASON_BYTES])
            self._events.append(Refused(reason, fatal=False))

    def _handshake_frame(self, frame: bytes) -> None:
        message = decode_object(frame, limits.RELAY_HELLO_BYTES)
        kind = message.get("type")
        if self._stage == "challenge" and kind == "hub.challenge":
            if message.get("protocol") != PROTOCOL:
                self._close = (CLOSE_FATAL, "protocol_unsupported")
                reason = f"the hub does not speak {PROTOCOL}; upgrade the plugin or this daemon"
                self._events.append(Refused(reason, fatal=self._authentic, claimed=not self._authentic))
                return
            self._epoch = text_of(message, "epoch", 64)
            nonce_of(message)
            self._handshake = transcript(self._sent_hello, frame)
            self._plain.append(encode({"type": "daemon.proof", "proof": self._handshake.proof(self._key, "daemon")}))
            self._stage, self._since = "proof", self._now
        elif self._stage == "proof" and kind == "daemon.parked":
            self._stage = "parked"
            self._ping_at, self._heard = self._now + self.times.heartbeat, self._now
            self._events.append(Parked())
        elif self._stage == "parked" and kind == "daemon.pong":
            self._heard = self._now
        elif self._stage in ("proof", "parked") and kind == "hub.proof":
            assert self._handshake is not None
            if not self._handshake.proves(self._key, "hub", proof_of(message)):
                raise FrameError("the hub does not have this daemon's key")
            self._channel = self._handshake.channel(self._key, "daemon", self.counters)
            self._handshake = None
            self._stage, self._heard = "state", self._now
            self._ping_at = self._now + self.times.heartbeat
            self._plain.clear()
            self._control(self._report().message())
        else:
            raise FrameError("not expected now")

    def _report(self) -> Table:
        entries = {job.job_id: self._entry(job) for job in self._jobs.values()}
        entries |= {job_id: Entry(job_id, "", "ending", 0, 0) for job_id in self._unproven}
        finished = (job.job_id for job in self._jobs.values() if job.outcome is not None)
        return Table(entries, frozenset((*self._quiesced, *finished)), self._table.table)

    def _entry(self, job: DaemonJob) -> Entry:
        return Entry(job.job_id, job.epoch, job.state, job.out.last, job.incoming.received)

    def _message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "daemon.pong":
            return
        if kind == "daemon.ping":
            self._control({"type": "daemon.pong", "n": number_of(message, "n")})
        elif self._stage == "state" and kind == "daemon.ready":
            self._admitted(message)
        elif self._stage == "state" and kind == "daemon.fenced":
            self._end_and_forget(message)
        elif self._stage != "live":
            raise FrameError("not expected now")
        elif kind == "run.start":
            self._start(job_id_of(message), seconds_of(message, "lease"))
        elif kind == "run.ack":
            self._acked(job_id_of(message), number_of(message, "seq"))
        elif kind == "run.cancel":
            self._cancel(job_id_of(message))
        elif kind == "run.forget":
            self._forget(job_id_of(message))
        else:
            raise FrameError("unknown message")

    def _admitted(self, message: Message) -> None:
        if text_of(message, "epoch", 64) != self._epoch:
            raise FrameError("bad field epoch")
        resumed = {
            job_id_of(item): (number_of(item, "received"), number_of(item, "acked"))
            for item in objects_of(message, "resumed", limits.RELAY_JOBS)
        }
        self._stage = "live"
        self._end_and_forget(message)
        for job in list(self._jobs.values()):
            stands = resumed.get(job.job_id)
            if job.ended:
                continue
            if stands is None or not job.out.can_resume(*stands):
                self._expire(job, "unknown")
                continue
            job.out.resume(*stands)
            job.incoming.acked = job.incoming.received
            if job.outcome is not None:
                self._tell_finished(job)
            self._queue(job)
            self._room(job)
        self._events.append(Connected(self._epoch))

    def _end_and_forget(self, message: Message) -> None:
        for job_id in names_of(message, "forget", 4 * limits.RELAY_TABLE, 64):
            self._forget(job_id)
        for job_id in names_of(message, "end", 4 * limits.RELAY_TABLE, 64):
            if (job := self._jobs.get(job_id)) is not None:
                self._expire(job, "unknown")
            elif job_id in self._unproven:
                self._events.append(EndJob(job_id, "unknown"))

    def _control(self, message: Message) -> None:
        if self._channel is not None and self._close is None:
            self._controls.append(encode(message))
            if len(self._controls) > limits.RELAY_CONTROLS:
                self._controls.clear()
                self._shut(CLOSE_PROTOCOL, "the hub does not read")

    def _queue(self, job: DaemonJob) -> None:
        if not job.queued and self._stage == "live" and job.out.sendable:
            job.queued = True
            self._ready.append(job)

    # -------------------------------------------------------------- what the hub says about jobs

    def _start(self, job_id: str, lease: float) -> None:
        if job_id in self._jobs:
            return
        if not _ID_CHARS.issuperset(job_id):
            raise FrameError("bad field job_id")
        if job_id in self._quiesced or job_id in self._unproven:
            return
        if len(self._jobs) >= limits.RELAY_JOBS:
            self._refuse(job_id, "daemon_jobs_full")
            return
        try:
            self._table.started(job_id)
        except OSError:
            self._refuse(job_id, "job_table")
            return
        spill = None if self._spill is None else self._spill(job_id)
        self._jobs[job_id] = DaemonJob(job_id, self._epoch, lease, spill)

    def _refuse(self, job_id: str, code: str) -> None:
        message = {"type": "run.finished", "job_id": job_id, "outcome": "refused", "last": 0, "quiescent": True, "error": code}
        self._control(message)

    def _stream(self, message: Message, size: int) -> None:
        job = self._jobs.get(job_id_of(message))
        records = message.get("records")
        if job is None:
            self.counters.foreign += 1
            return
        if type(records) is not list:
            raise FrameError("bad field records")
        for item in job.incoming.accept(number_of(message, "seq", 1), records, size, self.counters):
            self._record(job, item)
        job.incoming.settle()
        self._ack(job)

    def _record(self, job: DaemonJob, item: Json) -> None:
        if type(item) is not list or not item:
            raise FrameError("unknown record")
        if not job.running:
            return
        kind = item[0]
        if kind == "start" and len(item) == 2 and not job.started:
            job.started = True
            self._events.append(StartJob(job.job_id, item[1]))
        elif not job.started or len(item) < 3 or type(item[1]) is not int:
            raise FrameError("unknown record")
        elif kind == "mcp" and len(item) == 4 and type(item[3]) is str:
            if item[1] in job.mcp_open:
                job.mcp_open.discard(item[1])
                self._events.append(McpResponse(job.job_id, item[1], item[2], item[3]))
        elif kind in VERBS and len(item) == 3:
            if len(job.commands) >= limits.RELAY_COMMANDS:
                raise FrameError("too many commands")
            job.commands.add(item[1])
            self._events.append(Command(job.job_id, item[1], cast(Verb, kind), item[2]))
        else:
            raise FrameError("unknown record")

    def _acked(self, job_id: str, seq: int) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.ended:
            self.counters.foreign += 1
            return
        job.out.ack(seq)
        self._queue(job)
        self._room(job)

    def _room(self, job: DaemonJob) -> None:
        if job.out.refused and job.out.roomy:
            job.out.refused = False
            self._events.append(Writable(job.job_id))

    def _cancel(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            if job_id in self._unproven:
                self._events.append(EndJob(job_id, "cancelled"))
                return
            message = {"type": "run.finished", "job_id": job_id, "outcome": "lost", "last": 0, "quiescent": True}
            self._control(message)
        elif job.outcome is not None:
            self._tell_finished(job)
        else:
            self._end(job, "cancelled")

    def _forget(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None and job.outcome is None:
            return
        if job is None and job_id not in self._quiesced:
            return
        self._drop(job_id)
        self._quiesced.pop(job_id, None)
        with contextlib.suppress(OSError):  # the next process reports it once more
            self._table.forgotten(job_id)
        self._events.append(JobForgotten(job_id))

    def _drop(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._unqueue(job)
            job.out.clear()

    def _unqueue(self, job: DaemonJob) -> None:
        if job.queued:
            self._ready.remove(job)
            job.queued = False

    def _ack(self, job: DaemonJob) -> None:
        incoming = job.incoming
        behind = incoming.received - incoming.acked
        if not behind:
            return
        if not job.ack_waits:
            job.ack_waits = True
            self._acks.append(job)
        if behind >= limits.RELAY_ACK_RECORDS or incoming.freed >= limits.RELAY_ACK_BYTES:
            self._flush_acks()
        else:
            self._ack_at = min(self._ack_at, self._now + self.times.ack_delay)

    def _flush_acks(self) -> None:
        jobs, self._acks, self._ack_at = self._acks, [], math.inf
        for job in jobs:
            job.ack_waits = False
            incoming = job.incoming
            if job.job_id in self._jobs and incoming.received > incoming.acked:
                incoming.acked, incoming.freed = incoming.received, 0
                self._control({"type": "run.ack", "job_id": job.job_id, "seq": incoming.acked})

    # -------------------------------------------------------------- ends of jobs

    def _end(self, job: DaemonJob, reason: str) -> None:
        """Nothing of a running job counts any more; the shell ends it and then calls :meth:`finish`."""
        if not job.running:
            return
        job.ended = reason
        self._unqueue(job)
        if job.out.refused:
            self._events.append(Writable(job.job_id))
        job.out.clear()
        job.commands.clear()
        job.mcp_open.clear()
        if job.started:
            self._events.append(EndJob(job.job_id, reason))
        else:
            self.finish(job.job_id, "lost")

    def _expire(self, job: DaemonJob, reason: str) -> None:
        """The hub does not go on with this job."""
        if job.outcome is None:
            self._end(job, reason)
        else:
            outcome = job.outcome
            if self._stage == "live":
                self._tell_finished(job)
            self._drop(job.job_id)
            self._note(job.job_id, outcome)

    def _note(self, job_id: str, outcome: Outcome) -> None:
        """Report a job as quiesced until the hub has taken note."""
        self._quiesced[job_id] = outcome
        while len(self._quiesced) > limits.RELAY_TABLE:
            oldest = next(iter(self._quiesced))
            del self._quiesced[oldest]
            with contextlib.suppress(OSError):
                self._table.forgotten(oldest)

    def _tell_finished(self, job: DaemonJob, *, quiescent: bool = True) -> None:
        self._control(
            {
                "type": "run.finished",
                "job_id": job.job_id,
                "outcome": job.outcome or "failed",
                "last": job.out.last,
                "quiescent": quiescent,
                "error": job.error,
            }
        )

    # -------------------------------------------------------------- what the shell says about jobs

    def emit(self, job_id: str, event: Json) -> bool:
        """Send one event (a JSON object) of a job; false when its journal is full: hold it, and try again at :class:`Writable`.

        An event of a job that has ended is dropped. Raises ``ValueError`` for what is no JSON object, and
        :class:`pkg.relay_streams.MessageTooLarge` over 32 MiB.
        """
        job = self._jobs.get(job_id)
        if job is None or job.ended or job.outcome is not None:
            return True
        if type(event) is not dict:
            raise ValueError("an event is a JSON object")
        encoded = encode(event)
        if not job.out.push(encoded):
            return False
        self._fresh += 1
        self._fresh_bytes += len(encoded)
        if not job.queued:
            self._queue(job)
        return True

    def mcp_request(self, job_id: str, payload: Json) -> int:
        """Send a tool call of the job's agent; the :class:`McpResponse` carries the returned number.

        0 when the job has ended or has too many open calls. Raises :class:`pkg.relay_streams.MessageTooLarge` over 1 MiB.
        """
        job = self._jobs.get(job_id)
        if job is None or not job.running or len(job.mcp_open) >= limits.RELAY_MCP_OPEN:
            return 0
        number = job.mcp_sent + 1
        job.out.push(encode(["mcp", number, payload]), always=True, most=limits.RELAY_MCP_REQUEST_BYTES)
        job.mcp_sent = number
        job.mcp_open.add(number)
        self._queue(job)
        return number

    def command_done(self, job_id: str, command_id: int, ok: bool, value: Json = None) -> None:
        """Answer a command, once; an answer over 1 MiB becomes a failure by itself."""
        job = self._jobs.get(job_id)
        if job is None or not job.running or command_id not in job.commands:
            return
        job.commands.discard(command_id)
        try:
            encoded = encode(["result", command_id, ok, value])
            job.out.push(encoded, always=True, most=limits.RELAY_MCP_REQUEST_BYTES)
        except MessageTooLarge:
            job.out.push(encode(["result", command_id, False, "too_large"]), always=True)
        self._queue(job)

    def finish(self, job_id: str, outcome: Outcome, *, quiescent: bool = True, error: Json = None) -> None:
        """A job has ended. ``quiescent``: nothing of it is left running; a later call may still say so.

        What the job emitted before is delivered first, unless it was ended by :class:`EndJob`; then ``outcome`` is what that
        reason says.
        """
        if job_id in self._unproven:
            if quiescent:
                del self._unproven[job_id]
                self._quiet(job_id)
                self._note(job_id, "lost")
                if self._stage == "live":
                    message = {"type": "run.finished", "job_id": job_id, "outcome": "lost", "last": 0, "quiescent": True}
                    self._control(message)
            return
        job = self._jobs.get(job_id)
        if job is None or job.outcome is not None:
            return
        job.error = "journal" if error is None and job.ended == "journal" else error
        if not quiescent:
            job.ended = job.ended or "unconfirmed"
            self._unqueue(job)
            job.out.clear()
            if self._stage == "live":
                self._tell_finished(job, quiescent=False)
            return
        self._quiet(job_id)
        job.outcome = outcome if not job.ended else "cancelled" if job.ended == "cancelled" else "lost"
        if self._stage == "live":
            self._tell_finished(job)
        if job.ended or outcome not in ("completed", "failed"):
            self._drop(job_id)
            self._note(job_id, job.outcome)

    def _quiet(self, job_id: str) -> None:
        # A table that cannot be written still lists the job, and the next process proves it again.
        with contextlib.suppress(OSError):
            self._table.quiesced(job_id)


def _printable(reason: str) -> str:
    """A close reason without what a terminal or a log would act on."""
    return "".join(character if character.isprintable() else "?" for character in reason)
