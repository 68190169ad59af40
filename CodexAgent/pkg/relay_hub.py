"""The hub's role in the relay: many connections of many installations in, jobs and their events out. No I/O, no clock.

The shell gives every frame to :meth:`HubProtocol.receive`, sends what :meth:`HubProtocol.next_frame` gives for the connections
named by :meth:`HubProtocol.output`, closes those that :meth:`HubProtocol.closing` names once nothing is left to send, and acts
on :meth:`HubProtocol.events`. ``now`` is seconds of a clock that never goes back and counts through a suspend.

Guarantees:

- a job belongs to one installation, one daemon and that daemon's connection of the moment; what any other connection says about
  it is counted and changes nothing;
- each event of a job is told once and in order, across any number of connections, until the job ends;
- a job is over for the shell exactly once: :class:`JobFinished`, :class:`JobLost` or :class:`JobUnconfirmed`;
- a daemon with a job that ended without proof is fenced: no job is started on it before the proof;
- a live daemon id is replaced only by the same incarnation with the same key, or after the old connection failed a probe;
- an installation has at most ``RELAY_CONNECTIONS`` proven connections; of those that are not live the oldest of the largest
  crowd of one daemon id gives way;
- the marker of a job is durable before anything of the job is sent, and goes only with the proof.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import cast

from pkg import limits
from pkg.relay_admission import Admission, Socket, gives_way, reason_text
from pkg.relay_auth import Installation, Secrets, nonce_text, token_problem
from pkg.relay_events import (
    CLOSE_GOING_AWAY,
    CLOSE_PROTOCOL,
    CLOSE_REPLACED,
    CLOSE_RETRY,
    OUTCOMES,
    DaemonGone,
    DaemonReady,
    Fenced,
    FenceLifted,
    HubEvent,
    JobFinished,
    JobLost,
    JobUnconfirmed,
    NoMarkers,
    Outcome,
    PendingMarkers,
    RelayRefused,
    RelayTimes,
    Verb,
)
from pkg.relay_frames import Counters, FrameError, Json, Message, encode, flag_of, job_id_of, number_of
from pkg.relay_jobs import HubJob, Link, fate_of
from pkg.relay_streams import pack, shares
from pkg.relay_table import Table, table_of


class HubProtocol:
    """One listener with its connections, daemons and jobs."""

    def __init__(
        self,
        *,
        epoch: str,
        random: Callable[[int], bytes],
        shared: bool = False,
        markers: PendingMarkers | None = None,
        times: RelayTimes | None = None,
    ) -> None:
        """``epoch`` is this hub process's own id; ``random(n)`` gives n unguessable bytes.

        ``shared``: one listener for many installations; unknown daemons are parked, and a hello with a token in it is refused.
        """
        self.epoch = epoch
        self.times = times or RelayTimes()
        self.dropped = Counters()
        """What connections that have ended had dropped."""
        self._random = random
        self._shared = shared
        self._markers = markers or NoMarkers()
        self._secrets = Secrets()
        self._admission = Admission(self._secrets, epoch, random, self.times, shared, self._close)
        self._sockets: dict[int, Socket] = {}
        self._connected: dict[Installation, dict[int, Socket]] = {}
        """Proven connections that are not being closed, in the order of their proofs."""
        self._links: dict[Installation, dict[str, Link]] = {}
        self._jobs: dict[str, HubJob] = {}
        self._events: list[HubEvent] = []
        self._output: set[int] = set()
        self._now = 0.0

    # -------------------------------------------------------------- what the shell reads

    def events(self) -> list[HubEvent]:
        """What happened since the last call, in order."""
        told, self._events = self._events, []
        return told

    def output(self) -> set[int]:
        """The connections that may have something to send or have to be closed, since the last call."""
        numbers, self._output = self._output, set()
        return numbers

    def next_frame(self, number: int) -> bytes | None:
        """The next frame to send on a connection, made of all that waits for it; ``None`` when nothing does."""
        socket = self._sockets.get(number)
        if socket is None:
            return None
        if socket.plain:
            return socket.plain.popleft()
        if socket.channel is None:
            return None
        link = socket.link
        if link is not None and link.acks and (socket.controls or socket.ready):
            self._flush_acks(link)
        return pack(socket.channel, socket.controls, socket.ready)

    def closing(self, number: int) -> tuple[int, str] | None:
        """How to close a connection (code and reason), after its last frame; the shell then calls :meth:`disconnected`."""
        socket = self._sockets.get(number)
        return None if socket is None or socket.plain or socket.controls else socket.close

    def counters(self, number: int) -> Counters:
        """What an open connection had dropped."""
        return self._sockets[number].counters

    def proven(self, number: int) -> bool:
        """Whether an open connection has shown its installation's secret."""
        socket = self._sockets.get(number)
        return socket is not None and socket.channel is not None

    def installation_of(self, number: int) -> Installation:
        """Whose a proven connection is."""
        return self._sockets[number].installation

    @property
    def parked(self) -> int:
        """How many connections wait for their installation's secret."""
        return self._admission.parked

    def daemons(self, installation: Installation) -> list[DaemonReady]:
        """The installation's connected daemons."""
        links = self._links.get(installation, {}).values()
        return [ready for link in links if (ready := link.ready()) is not None]

    def daemon_table(self, installation: Installation, daemon_id: str) -> str | None:
        """The id of a connected daemon's job table, for a shell that marks a job by itself; ``None`` without a connection."""
        link = self._links.get(installation, {}).get(daemon_id)
        return None if link is None or link.socket is None else link.table

    def fences(self, installation: Installation, daemon_id: str) -> tuple[str, ...]:
        """The jobs that keep a daemon fenced."""
        link = self._links.get(installation, {}).get(daemon_id)
        return () if link is None else tuple(link.fences)

    def deadline(self) -> float:
        """When :meth:`tick` has something to do next, if nothing else happens before; infinite when never."""
        times = [self._admission.deadline()]
        for links in self._links.values():
            for link in links.values():
                times += (link.ack_at, link.probe_until)
                times += (job.cancel_at for job in link.jobs.values())
                if link.socket is not None:
                    times.append(link.socket.heard + self.times.dead)
                else:
                    times += (link.lost_at + job.lease for job in link.jobs.values() if not job.cancelled)
        times += (socket.since + self.times.handshake for socket in self._sockets.values() if socket.stage == "state")
        return min(times)

    # -------------------------------------------------------------- installations

    def put_secret(self, installation: Installation, token: str, now: float) -> None:
        """An installation shows its token: its daemons are admitted from now on, those of an earlier token are closed.

        Raises :class:`RelayRefused` (``daemon_token_required``) for an empty token, and where one listener serves many
        installations for one that :func:`pkg.relay_auth.token_problem` finds too weak.
        """
        if not token or (self._shared and token_problem(token)):
            raise RelayRefused("daemon_token_required")
        self._now = now
        known = self._secrets.has(installation)
        changed = self._secrets.put(installation, token)
        if not known:
            for daemon_id, jobs in self._markers.pending(installation).items():
                link = self._link(installation, daemon_id)
                link.fences.update({job_id: table for job_id, table in jobs.items() if job_id not in link.jobs})
                self._tidy(link)
        if changed:
            self._close_all(installation, "daemon_token_changed")
        if self._secrets.conflicting(installation):
            self._close_all(installation, "daemon_token_conflict")
        if not known or changed:
            for socket in self._admission.retry(installation, now):
                self._proven(socket)

    def conflicting(self, installation: Installation) -> bool:
        """Whether another installation has shown the same token, so that neither can have daemons."""
        return self._secrets.conflicting(installation)

    def rivals(self, installation: Installation) -> list[Installation]:
        """The other installations that have shown the same token."""
        return self._secrets.rivals(installation)

    def forbid(self, installation: Installation, now: float) -> None:
        """Admit no daemon of this installation any more and begin the end of its jobs; its connections may still prove it."""
        self._now = now
        self._secrets.drop(installation)
        for link in list(self._links.get(installation, {}).values()):
            for job_id in list(link.jobs):
                self.cancel(job_id, now)

    def revoke(self, installation: Installation, now: float) -> None:
        """Drop exactly this installation: its secret, its connections, its jobs. What was dispatched stays marked."""
        self._now = now
        self._secrets.drop(installation)
        for link in self._links.pop(installation, {}).values():
            link.candidate = None
            for job in list(link.jobs.values()):
                if link.socket is not None:
                    self._control(link.socket, {"type": "run.cancel", "job_id": job.job_id})
                self._forget_job(job)
                self._events.append(JobLost(job.job_id, "revoked"))
        self._close_all(installation, "installation_revoked")

    def cancel_all(self, now: float) -> None:
        """End every job, before the hub goes away; the shell goes on until the cancels are answered or their time is up."""
        for job_id in list(self._jobs):
            self.cancel(job_id, now)

    def close_all(self) -> None:
        """Close every connection because the hub goes away."""
        for socket in list(self._sockets.values()):
            self._close(socket, CLOSE_GOING_AWAY, reason_text("hub_stopped"))

    # -------------------------------------------------------------- connections

    def accept(self, number: int, address: str, now: float) -> None:
        """A connection was accepted; ``number`` is new and never used again, ``address`` is the peer's without its port."""
        self._now = now
        socket = Socket(number, address, now, now)
        self._sockets[number] = socket
        self._admission.add(socket)

    def receive(self, number: int, frame: bytes, now: float) -> None:
        """A frame (a whole WebSocket text message, undecoded) arrived."""
        socket = self._sockets.get(number)
        if socket is None or socket.close is not None:
            return
        self._now = now
        if socket.channel is None:
            self._output.add(number)
            if self._admission.receive(socket, frame, now):
                self._proven(socket)
            return
        try:
            messages = socket.channel.open(frame)
            if messages is None:
                return
            socket.heard = now
            sizes = shares(frame, messages, "run.event") if len(messages) > 1 else None
            for message in messages:
                if message["type"] == "run.event" and socket.stage == "live":
                    self._stream(socket, message, len(frame) if sizes is None else next(sizes))
                else:
                    self._message(socket, message)
                if socket.close is not None:
                    return
        except FrameError as exc:
            self._close(socket, CLOSE_PROTOCOL, reason_text("protocol_error", exc.reason))

    def disconnected(self, number: int, now: float) -> None:
        """A connection is gone, whoever ended it."""
        socket = self._sockets.pop(number, None)
        if socket is None:
            return
        self._now = now
        self._output.discard(number)
        self._admission.remove(socket)
        self._leave(socket)
        socket.stage = "closed"
        for name in ("injected", "replayed", "duplicate", "foreign"):
            setattr(self.dropped, name, getattr(self.dropped, name) + getattr(socket.counters, name))

    def tick(self, now: float) -> None:
        """Let time pass: dead connections, leases, probes, unanswered cancels, late acknowledgements."""
        self._now = now
        self._admission.tick(now)
        for socket in list(self._sockets.values()):
            if socket.close is not None or socket.channel is None:
                continue
            if now >= socket.heard + self.times.dead:
                self._close(socket, CLOSE_RETRY, reason_text("daemon_silent"))
            elif socket.stage == "state" and now >= socket.since + self.times.handshake:
                self._close(socket, CLOSE_RETRY, reason_text("handshake_timeout"))
        for links in list(self._links.values()):
            for link in list(links.values()):
                self._tick(link, now)

    def _tick(self, link: Link, now: float) -> None:
        if now >= link.ack_at:
            self._flush_acks(link)
        if now >= link.probe_until and link.socket is not None:
            self._close(link.socket, CLOSE_RETRY, reason_text("daemon_silent"))
        for job in list(link.jobs.values()):
            if now >= job.cancel_at:
                self._unconfirmed(job)
            elif link.socket is None and not job.cancelled and now >= link.lost_at + job.lease:
                self._lose(job, "lease")
        self._tidy(link)

    def _proven(self, socket: Socket) -> None:
        self._output.add(socket.number)
        others = self._connected.get(socket.installation, {})
        if len(others) >= limits.RELAY_CONNECTIONS:
            # Whoever holds one daemon's key only crowds out itself.
            waiting = {number: each.identity.daemon_id for number, each in others.items() if each.identity and not each.link}
            self._close(others[gives_way(waiting)], CLOSE_RETRY, reason_text("connections_full"))
        self._connected.setdefault(socket.installation, {})[socket.number] = socket
        if socket.state is not None:
            self._state(socket, socket.state)

    def _message(self, socket: Socket, message: Message) -> None:
        kind = message["type"]
        if kind == "daemon.ping":
            self._control(socket, {"type": "daemon.pong", "n": number_of(message, "n")})
        elif socket.stage == "state" and kind == "daemon.state":
            self._state(socket, message)
        elif socket.stage != "live":
            raise FrameError("not expected now")
        elif kind == "run.ack":
            self._acked(socket, message)
        elif kind == "run.finished":
            self._finished(socket, message)
        elif kind == "daemon.pong":
            self._pong(socket, number_of(message, "n"))
        else:
            raise FrameError("unknown message")

    def _control(self, socket: Socket, message: Message) -> None:
        if socket.close is not None:
            return
        socket.controls.append(encode(message))
        self._output.add(socket.number)
        if len(socket.controls) > limits.RELAY_CONTROLS:
            socket.controls.clear()
            self._close(socket, CLOSE_RETRY, reason_text("daemon_not_reading"))

    def _close(self, socket: Socket, code: int, reason: str) -> None:
        """Say goodbye; what was queued still goes out. Its jobs have until their leases end."""
        if socket.close is None:
            socket.close = (code, reason)
            self._output.add(socket.number)
            self._admission.remove(socket)
            self._leave(socket)

    def _close_all(self, installation: Installation, code: str) -> None:
        for socket in list(self._sockets.values()):
            if socket.identity is None:
                continue
            shared = code == "daemon_token_conflict" and self._secrets.conflicting(socket.installation)
            if shared or socket.installation == installation:
                self._close(socket, CLOSE_RETRY, reason_text(code))

    def _leave(self, socket: Socket) -> None:
        """The connection does not count any more; leases of its jobs run from now, or from when it fell silent."""
        socket.ready.clear()
        others = self._connected.get(socket.installation, {})
        if others.pop(socket.number, None) is not None and not others:
            del self._connected[socket.installation]
        link, socket.link = socket.link, None
        if link is None and socket.identity is not None:
            link = self._links.get(socket.installation, {}).get(socket.identity.daemon_id)
        if link is None:
            return
        if link.candidate is socket:
            link.candidate, link.probe_until = None, math.inf
        elif link.socket is socket:
            link.socket = None
            link.lost_at = socket.heard if self._now >= socket.heard + self.times.dead else self._now
            link.acks.clear()
            link.ack_at = math.inf
            for job in list(link.jobs.values()):
                job.queued = job.ack_waits = False
                if job.lease == 0 and not job.cancelled:
                    self._lose(job, "disconnected")
            self._events.append(DaemonGone(link.installation, link.daemon_id))
            candidate, link.candidate, link.probe_until = link.candidate, None, math.inf
            if candidate is not None and candidate.state is not None:
                candidate.stage = "state"
                self._state(candidate, candidate.state)
        self._tidy(link)

    def _link(self, installation: Installation, daemon_id: str) -> Link:
        links = self._links.setdefault(installation, {})
        if daemon_id not in links:
            links[daemon_id] = Link(installation, daemon_id)
        return links[daemon_id]

    def _tidy(self, link: Link) -> None:
        links = self._links.get(link.installation, {})
        if link.idle and links.get(link.daemon_id) is link:
            del links[link.daemon_id]
            if not links:
                del self._links[link.installation]

    # -------------------------------------------------------------- admission of a proven daemon

    def _state(self, socket: Socket, message: Message) -> None:
        """A proven daemon has said which jobs it has: admit it, probe the connection it would replace, or send it away."""
        identity = socket.identity
        assert identity is not None
        try:
            table = table_of(message)
        except FrameError as exc:
            self._close(socket, CLOSE_PROTOCOL, reason_text("protocol_error", exc.reason))
            return
        known = self._links.get(socket.installation, {})
        if identity.daemon_id not in known and len(known) >= limits.RELAY_KNOWN_DAEMONS:
            full = sum(other.socket is not None for other in known.values()) >= limits.RELAY_DAEMONS
            self._close(socket, CLOSE_RETRY, reason_text("daemons_full" if full else "daemons_unproven"))
            return
        link = self._link(socket.installation, identity.daemon_id)
        if link.socket is not None:
            if link.incarnation != identity.incarnation or link.key != socket.key:
                self._probe(link, link.socket, socket, message)
                return
            if link.candidate is not None:
                self._close(link.candidate, CLOSE_RETRY, reason_text("daemon_id_in_use"))
            self._close(link.socket, CLOSE_REPLACED, reason_text("daemon_replaced"))
            link = self._link(socket.installation, identity.daemon_id)
        if sum(other.socket is not None for other in self._links[socket.installation].values()) >= limits.RELAY_DAEMONS:
            self._close(socket, CLOSE_RETRY, reason_text("daemons_full"))
            self._tidy(link)
            return
        self._settle(link, table, same=link.incarnation == identity.incarnation)
        forget = [job_id for job_id in table.quiesced if job_id not in link.jobs]
        for job_id, dispatched in list(link.fences.items()):
            if job_id in table.quiesced or (job_id not in table.jobs and dispatched and dispatched == table.table):
                self._prove(link, job_id)
        if link.fences:
            end = list(link.fences)[: limits.RELAY_TABLE]
            self._control(socket, {"type": "daemon.fenced", "end": end, "forget": forget})
            self._close(socket, CLOSE_RETRY, reason_text("daemon_fenced"))
            return
        link.socket, link.identity, link.table = socket, identity, table.table
        link.incarnation, link.key = identity.incarnation, socket.key
        socket.link, socket.stage, socket.since, socket.state = link, "live", self._now, None
        self._welcome(link, socket, table, forget)

    def _probe(self, link: Link, old: Socket, new: Socket, message: Message) -> None:
        if link.candidate is not None:
            self._close(new, CLOSE_RETRY, reason_text("daemon_id_in_use"))
            return
        new.stage, new.state = "probing", message
        link.candidate, link.probe_until = new, self._now + self.times.probe
        link.probe = int.from_bytes(self._random(6), "big")
        self._control(old, {"type": "daemon.ping", "n": link.probe})

    def _pong(self, socket: Socket, number: int) -> None:
        link = socket.link
        if link is not None and link.candidate is not None and number == link.probe:
            self._close(link.candidate, CLOSE_RETRY, reason_text("daemon_id_in_use"))

    def _settle(self, link: Link, table: Table, *, same: bool) -> None:
        """Decide about every job that this daemon (the ``same`` incarnation or another) does not go on with."""
        for job in list(link.jobs.values()):
            fate = fate_of(job, table, self.epoch, same=same)
            if fate == "unconfirmed":
                self._unconfirmed(job)
            elif fate == "quiet" and job.cancelled:
                self._finish(job, "cancelled", None)
            elif fate in ("quiet", "lost"):
                entry = table.jobs.get(job.job_id)
                ending = job.job_id in table.quiesced or (entry is not None and entry.state == "ending")
                reason = "restarted" if not same else "lease" if ending else "unknown"
                self._lose(job, reason, proven=fate == "quiet")

    def _welcome(self, link: Link, socket: Socket, table: Table, forget: list[str]) -> None:
        """Tell an admitted daemon where its jobs stand, and send again what it may not have got."""
        unknown = [job_id for job_id in table.jobs if job_id not in link.jobs and job_id not in table.quiesced]
        for job_id in unknown:
            self._fence(link, job_id, table.table)
        resumed = []
        for job in link.jobs.values():
            entry = table.jobs.get(job.job_id)
            if entry is None or job.cancelled:
                continue
            incoming = job.incoming
            job.out.resume(entry.received, entry.received)
            incoming.acked, incoming.freed = incoming.acknowledgeable, 0
            resumed.append({"job_id": job.job_id, "received": incoming.received, "acked": incoming.acked})
        cancelled = [job.job_id for job in link.jobs.values() if job.cancelled]
        ready = {"type": "daemon.ready", "epoch": self.epoch, "resumed": resumed, "end": cancelled + unknown, "forget": forget}
        self._control(socket, ready)
        for job in link.jobs.values():
            if job.job_id not in table.jobs:
                job.out.resume(0, 0)
                self._control(socket, {"type": "run.start", "job_id": job.job_id, "lease": job.lease})
            if not job.cancelled:
                self._queue(job)
        told = link.ready()
        assert told is not None
        self._events.append(told)

    # -------------------------------------------------------------- fences

    def _fence(self, link: Link, job_id: str, table: str) -> None:
        if job_id not in link.fences:
            link.fences[job_id] = table
            self._events.append(Fenced(link.installation, link.daemon_id, job_id))

    def _prove(self, link: Link, job_id: str) -> None:
        if link.fences.pop(job_id, None) is not None:
            self._unmark(link, job_id)
            if not link.fences:
                self._events.append(FenceLifted(link.installation, link.daemon_id))

    def _unmark(self, link: Link, job_id: str) -> None:
        # A marker that cannot be removed costs the next hub one more proof.
        with contextlib.suppress(OSError):
            self._markers.clear(link.installation, link.daemon_id, job_id)

    def lift(self, installation: Installation, daemon_id: str, job_id: str) -> None:
        """An operator vouches that the job has ended, where nothing can prove it."""
        link = self._links.get(installation, {}).get(daemon_id)
        if link is not None:
            self._prove(link, job_id)
            self._tidy(link)

    # -------------------------------------------------------------- jobs

    def start_job(
        self, installation: Installation, daemon_id: str, payload: Json, *, lease: float = limits.RELAY_LEASE, job_id: str = ""
    ) -> str:
        """Start a job on a connected daemon and return its id.

        ``lease`` is seconds the job outlives its connection. Raises :class:`RelayRefused` (``daemon_offline``,
        ``daemon_fenced``, ``daemon_jobs_full``), :class:`pkg.relay_streams.MessageTooLarge` for a payload over 32 MiB, and
        ``OSError`` when the marker cannot be made durable; nothing has happened then.
        """
        link = self._links.get(installation, {}).get(daemon_id)
        if link is None or link.socket is None:
            raise RelayRefused("daemon_offline", retryable=True)
        if link.fences:
            raise RelayRefused("daemon_fenced", retryable=True)
        if sum(len(other.jobs) for other in self._links[installation].values()) >= limits.RELAY_JOBS:
            raise RelayRefused("daemon_jobs_full", retryable=True)
        job = HubJob(job_id or self.new_job_id(), link, float(lease))
        if job.job_id in self._jobs:
            raise ValueError("this job id is in use")
        job.out.push(encode(["start", payload]))
        self._markers.mark(installation, daemon_id, job.job_id, link.table)
        link.jobs[job.job_id] = self._jobs[job.job_id] = job
        self._control(link.socket, {"type": "run.start", "job_id": job.job_id, "lease": job.lease})
        self._queue(job)
        return job.job_id

    def new_job_id(self) -> str:
        """An unguessable id; a shell that marks the job by itself before the start takes it from here."""
        return nonce_text(self._random(16))

    def command(self, job_id: str, verb: Verb, value: Json = None) -> int:
        """Say something to a running job; its :class:`CommandResult` carries the returned id.

        Delivered at most once, in the order of the calls. Raises :class:`RelayRefused` (``job_gone``, ``commands_full``) and
        :class:`pkg.relay_streams.MessageTooLarge`.
        """
        job = self._jobs.get(job_id)
        if job is None or job.cancelled or job.finish is not None:
            raise RelayRefused("job_gone")
        if len(job.commands) >= limits.RELAY_COMMANDS or not job.out.push(encode([verb, job.last_command + 1, value])):
            raise RelayRefused("commands_full", retryable=True)
        job.last_command += 1
        job.commands.add(job.last_command)
        self._queue(job)
        return job.last_command

    def mcp_response(self, job_id: str, request_id: int, payload: Json, error: str = "") -> bool:
        """Answer a tool call; false when nobody waits for it (any more). An answer over 4 MiB becomes an error by itself."""
        job = self._jobs.get(job_id)
        if job is None or request_id not in job.mcp_open:
            return False
        encoded = encode(["mcp", request_id, None if error else payload, error])
        if len(encoded) > limits.RELAY_MCP_RESPONSE_BYTES:
            encoded = encode(["mcp", request_id, None, "too_large"])
        job.mcp_open.discard(request_id)
        job.out.push(encoded, always=True)
        self._queue(job)
        return True

    def consumed(self, job_id: str, seq: int, now: float) -> None:
        """The consumer is done with the job's events up to and with the :class:`JobEvents` of this ``seq``."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._now = now
            job.incoming.consume(seq)
            self._ack(job)

    def cancel(self, job_id: str, now: float) -> bool:
        """End a job; false when it is over already. Its tools are gone and its events stop at once.

        What follows is :class:`JobFinished` when the daemon has proven that nothing is left, else :class:`JobUnconfirmed` and a
        fence after ``times.cancel`` seconds.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return False
        self._now = now
        if job.finish is not None:
            self._finish(job, "cancelled", None)
        elif not job.cancelled:
            job.cancel(now + self.times.cancel)
            self._unqueue(job)
            job.out.clear()
            if job.link.socket is not None:
                self._control(job.link.socket, {"type": "run.cancel", "job_id": job_id})
        return True

    def _queue(self, job: HubJob) -> None:
        socket = job.link.socket
        if socket is not None and not job.queued and job.out.sendable:
            job.queued = True
            socket.ready.append(job)
            self._output.add(socket.number)

    def _unqueue(self, job: HubJob) -> None:
        if job.queued and job.link.socket is not None:
            job.link.socket.ready.remove(job)
        job.queued = False

    def _stream(self, socket: Socket, message: Message, size: int) -> None:
        link = socket.link
        job = None if link is None else link.jobs.get(job_id_of(message))
        if link is None or job is None:
            socket.counters.foreign += 1
            return
        try:
            job.receive(message, size, socket.counters, self._events)
            if job.incoming.assembling and link.assembling > limits.RELAY_ASSEMBLY_BYTES:
                raise FrameError("too many large messages at once")
        except FrameError:
            self._break(job)
            return
        if job.incoming.consumed >= job.incoming.delivered:
            self._ack(job)
        if job.finish is not None:
            self._try_finish(job)
        elif job.out.sendable:
            self._queue(job)

    def _acked(self, socket: Socket, message: Message) -> None:
        seq = number_of(message, "seq")
        job = None if socket.link is None else socket.link.jobs.get(job_id_of(message))
        if job is None:
            socket.counters.foreign += 1
            return
        if job.cancelled:
            return
        try:
            job.out.ack(seq)
        except FrameError:
            self._break(job)
            return
        self._queue(job)

    def _ack(self, job: HubJob) -> None:
        """Acknowledge soon: at once when much was consumed, else with the next frame, or after ``times.ack_delay``."""
        incoming, link = job.incoming, job.link
        behind = incoming.acknowledgeable - incoming.acked
        if link.socket is None or not behind or job.cancelled:
            return
        if not job.ack_waits:
            job.ack_waits = True
            link.acks.append(job)
        if behind >= limits.RELAY_ACK_RECORDS or incoming.freed >= limits.RELAY_ACK_BYTES:
            self._flush_acks(link)
        else:
            link.ack_at = min(link.ack_at, self._now + self.times.ack_delay)

    def _flush_acks(self, link: Link) -> None:
        jobs, link.acks, link.ack_at = link.acks, [], math.inf
        for job in jobs:
            job.ack_waits = False
            incoming = job.incoming
            if link.socket is not None and job.job_id in link.jobs and incoming.acknowledgeable > incoming.acked:
                incoming.acked, incoming.freed = incoming.acknowledgeable, 0
                self._control(link.socket, {"type": "run.ack", "job_id": job.job_id, "seq": incoming.acked})

    # -------------------------------------------------------------- ends of jobs

    def _finished(self, socket: Socket, message: Message) -> None:
        link = socket.link
        job_id, outcome = job_id_of(message), message.get("outcome")
        last, quiescent, error = number_of(message, "last"), flag_of(message, "quiescent"), message.get("error")
        if type(outcome) is not str or outcome not in OUTCOMES:
            raise FrameError("bad field outcome")
        job = None if link is None else link.jobs.get(job_id)
        if link is None or job is None:
            if link is None or job_id not in link.fences:
                socket.counters.foreign += 1
            elif quiescent:
                self._prove(link, job_id)
                self._control(socket, {"type": "run.forget", "job_id": job_id})
        elif not quiescent:
            self._unconfirmed(job)
        elif job.cancelled:
            self._finish(job, "cancelled", error)
        elif outcome in ("completed", "failed"):
            job.finish = (cast(Outcome, outcome), last, error)
            self._try_finish(job)
        else:
            self._finish(job, cast(Outcome, outcome), error)

    def _try_finish(self, job: HubJob) -> None:
        """Finish a job as soon as the last of its records is here."""
        assert job.finish is not None
        outcome, last, error = job.finish
        if job.incoming.received >= last:
            self._finish(job, outcome, error)

    def _finish(self, job: HubJob, outcome: Outcome, error: Json) -> None:
        """The proven end of a job."""
        link = job.link
        self._forget_job(job)
        self._unmark(link, job.job_id)
        if link.socket is not None:
            self._control(link.socket, {"type": "run.forget", "job_id": job.job_id})
        self._events.append(JobFinished(job.job_id, outcome, error))

    def _lose(self, job: HubJob, reason: str, *, proven: bool = False) -> None:
        link = job.link
        proven = proven or job.finish is not None
        self._forget_job(job)
        self._events.append(JobLost(job.job_id, reason, proven))
        if proven:
            self._unmark(link, job.job_id)
        else:
            self._fence(link, job.job_id, link.table)

    def _break(self, job: HubJob) -> None:
        """The daemon breaks the protocol within one job: that job ends, the connection and the others go on."""
        if job.cancelled:
            return
        self._lose(job, "protocol")
        if job.link.socket is not None:
            self._control(job.link.socket, {"type": "run.cancel", "job_id": job.job_id})

    def _unconfirmed(self, job: HubJob) -> None:
        self._forget_job(job)
        self._events.append(JobUnconfirmed(job.job_id))
        self._fence(job.link, job.job_id, job.link.table)

    def _forget_job(self, job: HubJob) -> None:
        self._unqueue(job)
        job.link.jobs.pop(job.job_id, None)
        self._jobs.pop(job.job_id, None)
        job.out.clear()
