"""The hub's listener: one bound address, its connections and jobs, and the protocol between them.

One listener may serve many installations (``shared``); what belongs to one of them is reachable only with its key. Its tasks
run in an empty context, whoever opened it: no frame is ever handled with some run's authority.

Guarantees: strangers cost a bounded number of connections of a bounded size each; one task per connection reads and one writes,
both ended and awaited with the connection; a connection whose other side takes nothing is cut; a job is told everything that
concerns it on the loop's own turn, in order; :meth:`Listener.shut` frees the address at once; :meth:`Listener.close` returns
when no task, connection or socket of the listener is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import ConnectionClosed

from pkg import limits, relay_sockets, traceless
from pkg.pacing import Allowance, Pace
from pkg.relay_auth import Installation, nonce_text
from pkg.relay_entrance import Entrance, address_of, proven
from pkg.relay_errors import relay_error
from pkg.relay_events import (
    CommandResult,
    DaemonGone,
    DaemonReady,
    Fenced,
    FenceLifted,
    JobEvents,
    JobFinished,
    JobLost,
    JobUnconfirmed,
    McpRequest,
    PendingMarkers,
    RelayRefused,
    RelayTimes,
    Verb,
)
from pkg.relay_frames import Json
from pkg.relay_hub import HubProtocol
from pkg.relay_job import Job
from pkg.relay_streams import MessageTooLarge

log = logging.getLogger(__name__)

_JOB_ENDS = (JobFinished, JobLost, JobUnconfirmed)
_JOB_NEWS = (JobEvents, CommandResult, McpRequest, JobFinished, JobLost, JobUnconfirmed)

REFUSALS: Final = {
    "daemon_offline": "daemon_offline",
    "daemon_fenced": "daemon_fenced",
    "daemon_jobs_full": "daemon_jobs_full",
    "job_gone": "daemon_job_gone",
    "commands_full": "daemon_commands_full",
}


class Listener:
    """One listening socket with its daemons; made by :func:`open_listener`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        shared: bool,
        markers: PendingMarkers | None,
        times: RelayTimes,
    ) -> None:
        """Not listening yet."""
        self.host = host
        self.port = port
        self.shared = shared
        self.times = times
        self.users: dict[Installation, Callable[[], None]] = {}
        """The installations that have shown their secret, and whom to tell when something about their daemons has changed."""
        self.protocol = HubProtocol(
            epoch=nonce_text(secrets.token_bytes(16)), random=secrets.token_bytes, shared=shared, markers=markers, times=times
        )
        self._notes: dict[Installation, _Notes] = {}
        self._markers = markers
        self._jobs: dict[str, Job] = {}
        self._owners: dict[str, Installation] = {}
        self._server: Server | None = None
        self._closing = asyncio.Lock()
        self._wakes: dict[int, asyncio.Event] = {}
        self._connections: dict[int, ServerConnection] = {}
        self._entrance = Entrance()
        self._leaving = 0
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = relay_sockets.relay_clock()
        self._disk: ThreadPoolExecutor | None = None

    # -------------------------------------------------------------- life

    @property
    def address(self) -> tuple[str, int]:
        """The bound address."""
        if self._server is None or not self._server.sockets:
            return self.host, self.port
        name = next(iter(self._server.sockets)).getsockname()
        return str(name[0]), int(name[1])

    @property
    def open(self) -> bool:
        """Whether it listens."""
        return self._server is not None and self._server.is_serving()

    async def start(self) -> None:
        """Bind and listen; raises ``OSError``. Must run in an empty context."""
        self._server = await relay_sockets.listen(
            self._serve, self.host, self.port, connection=self._entrance.connection, max_size=limits.RELAY_UNPROVEN_BYTES
        )
        if self._markers is not None:
            self._disk = ThreadPoolExecutor(1, thread_name_prefix="relay-markers")
        self._tick()

    def shut(self) -> None:
        """Stop listening: the address is free for another listener. :meth:`close` does the rest, which takes time."""
        if self._server is not None:
            self._server.server.close()

    async def close(self) -> None:
        """Stop listening, end every job as far as that can be done in time, and close every connection."""
        async with self._closing:
            await self._close()

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.close(close_connections=False)
        self.protocol.cancel_all(relay_sockets.relay_clock())
        self.pump()
        with contextlib.suppress(TimeoutError):
            async with traceless.within(limits.RELAY_STOP):
                for job in list(self._jobs.values()):
                    await job.ended.wait()
        self.protocol.close_all()
        self.pump()
        cutting = traceless.call_later(limits.RELAY_CLOSE, self._cut_all)
        await server.wait_closed()
        cutting.cancel()
        for job in list(self._jobs.values()):
            job.told(JobLost(job.job_id, "stopped"))
        self._jobs.clear()
        self._owners.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._disk is not None:
            self._disk.shutdown()

    def _cut_all(self) -> None:
        for connection in self._connections.values():
            relay_sockets.cut(connection)

    # -------------------------------------------------------------- installations

    def register(self, installation: Installation, token: str, told: Callable[[], None]) -> None:
        """Admit the daemons of an installation; ``told()`` is called when something about them has changed."""
        with self._rivals_told(installation):
            self.users[installation] = told
            self._notes.setdefault(installation, _Notes())
            self.protocol.put_secret(installation, token, relay_sockets.relay_clock())
            self.pump()

    @contextlib.contextmanager
    def _rivals_told(self, installation: Installation) -> Iterator[None]:
        """Tell those that have the same secret before or after the block: they wait for daemons in vain, or do so no more."""
        rivals = dict.fromkeys(self.protocol.rivals(installation))
        yield
        rivals.update(dict.fromkeys(self.protocol.rivals(installation)))
        for told in [self.users[rival] for rival in rivals if rival in self.users]:
            told()

    def forbid(self, installation: Installation) -> None:
        """Forget an installation's secret and begin the end of its jobs, which are told that it is revoked."""
        for job in self.jobs_of(installation):
            job.reason = "revoked"
        with self._rivals_told(installation):
            self.protocol.forbid(installation, relay_sockets.relay_clock())
            self.pump()

    def drop(self, installation: Installation) -> None:
        """Forget an installation: its secret, its daemons, its jobs."""
        with self._rivals_told(installation):
            self.users.pop(installation, None)
            self._notes.pop(installation, None)
            self.protocol.revoke(installation, relay_sockets.relay_clock())
            self.pump()

    def jobs_of(self, installation: Installation) -> list[Job]:
        """The installation's jobs that are not over."""
        return [job for job_id, job in self._jobs.items() if self._owners[job_id] == installation]

    # -------------------------------------------------------------- jobs

    async def open_job(self, job: Job, installation: Installation, payload: Json, lease: float, prefix: str) -> None:
        """Dispatch a job; raises :class:`pkg.relay_errors.AgentRuntimeDaemonError` when nothing was started."""
        job_id = self.protocol.new_job_id()
        marked = False
        try:
            table = self.protocol.daemon_table(installation, job.daemon_id)
            if self._markers is not None and self._disk is not None and table is not None:
                marked = True
                mark = functools.partial(self._markers.mark, installation, job.daemon_id, job_id, table)
                await asyncio.get_running_loop().run_in_executor(self._disk, mark)
            self.protocol.start_job(installation, job.daemon_id, payload, lease=lease, job_id=job_id)
        except BaseException as exc:
            if marked and self._markers is not None and self._disk is not None:
                # Behind the marking itself, which may still be on its way.
                self._disk.submit(self._markers.clear, installation, job.daemon_id, job_id)
            if isinstance(exc, RelayRefused):
                raise relay_error(prefix, REFUSALS[exc.code], retryable=exc.retryable, daemon=job.daemon_id) from None
            if isinstance(exc, MessageTooLarge):
                raise relay_error(prefix, "daemon_message_too_large", size=exc.size, most=exc.most) from None
            if isinstance(exc, OSError):
                raise relay_error(prefix, "daemon_state_unwritable") from None
            raise
        job.job_id = job_id
        self._jobs[job_id] = job
        self._owners[job_id] = installation
        self.pump()

    def command(self, job: Job, verb: Verb, value: Json, prefix: str) -> int:
        """Queue a command; raises :class:`pkg.relay_errors.AgentRuntimeDaemonError`."""
        try:
            number = self.protocol.command(job.job_id, verb, value)
        except RelayRefused as exc:
            raise relay_error(prefix, REFUSALS[exc.code], retryable=exc.retryable, daemon=job.daemon_id) from None
        except MessageTooLarge as exc:
            raise relay_error(prefix, "daemon_message_too_large", size=exc.size, most=exc.most) from None
        self.pump()
        return number

    def mcp_response(self, job_id: str, request_id: int, payload: Json) -> None:
        """Answer a tool call."""
        try:
            self.protocol.mcp_response(job_id, request_id, payload)
        except (ValueError, TypeError):
            self.protocol.mcp_response(job_id, request_id, None, "not_json")
        self.pump()

    def consumed(self, job_id: str, seq: int) -> None:
        """The consumer is done with a batch."""
        self.protocol.consumed(job_id, seq, relay_sockets.relay_clock())
        self.pump()

    def cancel(self, job_id: str) -> None:
        """Begin the end of a job."""
        self.protocol.cancel(job_id, relay_sockets.relay_clock())
        self.pump()

    # -------------------------------------------------------------- the protocol's news

    def pump(self) -> bool:
        """Tell everybody what happened, wake the writers, and see to the next tick; whether a job was given events."""
        given = self._tell()
        self._tick_within(self.times.ack_delay)
        return given

    def _tell(self) -> bool:
        given = False
        changed: dict[Installation, None] = {}
        noted: set[tuple[type, Installation, str]] = set()
        for event in self.protocol.events():
            if isinstance(event, _JOB_NEWS):
                job = self._jobs.get(event.job_id)
                if job is not None:
                    if isinstance(event, JobEvents):
                        given = True
                    elif isinstance(event, _JOB_ENDS):
                        changed[self._owners.pop(event.job_id)] = None
                        del self._jobs[event.job_id]
                    job.told(event)
            else:
                changed[event.installation] = None
                what = (type(event), event.installation, event.daemon_id)
                if what not in noted:  # a daemon may be fenced for a thousand jobs at once
                    noted.add(what)
                    if event.installation in self._notes:
                        self._notes[event.installation].note(event)
        for number in self.protocol.output():
            wake = self._wakes.get(number)
            if wake is not None:
                wake.set()
        for installation in changed:
            told = self.users.get(installation)
            if told is not None:
                told()
        return given

    def _tick_within(self, delay: float) -> None:
        if self._server is None and not self._wakes:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + delay:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(delay, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        self._timer = None
        now = self._ticked = relay_sockets.relay_clock()
        self.protocol.tick(now)
        wait = min(limits.RELAY_CLOCK_STEP, max(0.005, self.protocol.deadline() - now))
        self._timer = asyncio.get_running_loop().call_later(wait, self._tick, context=contextvars.Context())
        self._tell()

    # -------------------------------------------------------------- connections

    async def _serve(self, connection: ServerConnection) -> None:
        self._entrance.leave(connection)
        self._numbers += 1
        number = self._numbers
        wake = self._wakes[number] = asyncio.Event()
        self._connections[number] = connection
        protocol = self.protocol
        protocol.accept(number, address_of(connection), relay_sockets.relay_clock())
        self.pump()
        sending = relay_sockets.Sending(connection, self.times.dead)
        writer = asyncio.create_task(self._write(connection, sending, number, wake))
        try:
            while True:
                frame = await connection.recv(decode=False)
                now = relay_sockets.relay_clock()
                if now - self._ticked > limits.RELAY_CLOCK_STEP:
                    # Timers stood still while the machine slept; what ran out meanwhile has run out.
                    self._ticked = now
                    protocol.tick(now)
                protocol.receive(number, bytes(frame), now)
                if self.pump():
                    # Whoever waits for these events gets them before the next frame is looked at, which may be there already.
                    await asyncio.sleep(0)
        except ConnectionClosed:
            return
        except Exception:
            # The boundary of a connection: a defect here costs one connection, and its jobs go on with the next.
            log.exception("a relay connection failed")
        finally:
            del self._wakes[number], self._connections[number]
            protocol.disconnected(number, relay_sockets.relay_clock())
            self.pump()
            writer.cancel()
            await asyncio.wait({writer})
            sending.stop()
            if not writer.cancelled() and (problem := writer.exception()) is not None:
                log.error("a relay connection's writer failed", exc_info=problem)

    async def _write(
        self, connection: ServerConnection, sending: relay_sockets.Sending, number: int, wake: asyncio.Event
    ) -> None:
        protocol = self.protocol
        narrow = True
        with contextlib.suppress(ConnectionClosed):
            while True:
                while (frame := protocol.next_frame(number)) is not None:
                    if narrow and protocol.proven(number):
                        narrow = False
                        proven(connection, protocol.installation_of(number))
                    await sending.send(frame)
                if (close := protocol.closing(number)) is not None:
                    await self._dismiss(connection, *close)
                    return
                wake.clear()
                await wake.wait()

    async def _dismiss(self, connection: ServerConnection, code: int, reason: str) -> None:
        """Close a connection; a crowd that does not answer that is not waited for."""
        patience = 0.0 if self._leaving >= limits.RELAY_LEAVING else self.times.dead / limits.RELAY_CLOSE_SHARE
        self._leaving += 1
        try:
            await relay_sockets.close(connection, code, reason, patience)
        finally:
            self._leaving -= 1


async def open_listener(
    host: str,
    port: int,
    *,
    shared: bool,
    markers: PendingMarkers | None,
    times: RelayTimes,
) -> Listener:
    """A new listener on ``host`` and ``port`` (0: any free one); raises ``OSError``. Call it in an empty context."""
    listener = Listener(host, port, shared=shared, markers=markers, times=times)
    await listener.start()
    return listener


class _Notes:
    """What the log, which everybody shares, is told of one installation's daemons: not more than they may cause."""

    def __init__(self) -> None:
        self._pace = Pace(Allowance(limits.RELAY_NOTES, limits.RELAY_NOTES_PER_SECOND))
        self._left_out = 0

    def note(self, event: DaemonReady | DaemonGone | Fenced | FenceLifted) -> None:
        now = relay_sockets.relay_clock()
        if self._pace.ready_at(1, now) > now:
            self._left_out += 1
            return
        self._pace.take(1, now)
        if self._left_out:
            log.info("%d lines about daemons of the same installation as the next were left out", self._left_out)
            self._left_out = 0
        if isinstance(event, Fenced):
            log.warning("daemon %r gets no job until one is proven to have ended", event.daemon_id)
        else:
            log.info("%s: %r", type(event).__name__, event.daemon_id)
