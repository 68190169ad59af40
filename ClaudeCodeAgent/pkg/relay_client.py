"""The daemon's side of the relay: a program on a user's machine that dials out to a hub and runs its jobs there.

Subclass :class:`AgentRuntimeDaemonClient`, override :meth:`~AgentRuntimeDaemonClient.run_job` (and
:meth:`~AgentRuntimeDaemonClient.handle_command` for an interactive session), and await
:meth:`~AgentRuntimeDaemonClient.run_forever`. The names are those of the SDK's relay.

Guarantees: a lost connection is invisible to a job within its lease; a job has ended for the hub only when its ``run_job`` has
returned (that is the proof that nothing of it is left; one that ends with
:class:`pkg.errors.ProcessCleanupUnconfirmed` is reported as not proven); a job the hub has cancelled, lost or does not know is
cancelled once; :meth:`~AgentRuntimeDaemonClient.emit_event` waits while the job's journal is full; every task, file and
address of a job ends with it, and all of them with :meth:`~AgentRuntimeDaemonClient.run_forever`; a credential or protocol
that the hub rejects ends it with the hub's reason. On plain ``ws://`` to another machine anybody on the way can say that, so
there it is told (``refused``) and tried again, slowly, and no job ends of it before its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import secrets
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from pkg import limits, relay_sockets
from pkg.agent_api import Json
from pkg.errors import CodingError, ProcessCleanupUnconfirmed
from pkg.relay_auth import daemon_key, nonce_text
from pkg.relay_daemon import DaemonProtocol
from pkg.relay_errors import AgentRuntimeDaemonError, relay_error
from pkg.relay_events import (
    Backoff,
    Command,
    Connected,
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
from pkg.relay_journal import DiskSpill
from pkg.relay_mcp_proxy import LocalMCPProxy
from pkg.relay_streams import MessageTooLarge
from pkg.tools_listener import Endpoint, PayloadHandler, open_endpoint, to_the_end

log = logging.getLogger(__name__)

_PREFIX: Final = "coding"

UNSEALED: Final = "anybody on the way can say so on plain ws://; trying again, slowly"
"""What is told with a rejection that need not be the hub's."""


class MemoryJobTable:
    """A job table for a daemon that keeps nothing: what a crashed one left can't be proven by the next."""

    def __init__(self) -> None:
        """A new table."""
        self.table = secrets.token_urlsafe(16)

    def started(self, job_id: str) -> None:
        """Keep nothing."""

    def quiesced(self, job_id: str) -> None:
        """Keep nothing."""

    def forgotten(self, job_id: str) -> None:
        """Keep nothing."""


@dataclass(slots=True, eq=False)
class _Running:
    """One job at work."""

    job_id: str
    task: asyncio.Task[None] | None = None
    commands: set[asyncio.Task[None]] = field(default_factory=set)
    calls: dict[int, asyncio.Future[tuple[Json, str]]] = field(default_factory=dict)
    endpoints: list[Endpoint] = field(default_factory=list)
    writable: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome = "completed"
    error: Json = None
    unproven: bool = False
    """Whether something of it may be left."""
    begun: bool = False
    emitted: int = 0
    stopped: bool = False

    def stop(self) -> None:
        """Cancel its task, or keep it from beginning: a task that is cancelled before its first step never gets to its end."""
        self.stopped = True
        if self.begun and self.task is not None:
            self.task.cancel()


class AgentRuntimeDaemonClient:
    """One daemon's connection to one hub, and its jobs."""

    def __init__(
        self,
        *,
        url: str,
        daemon_id: str,
        token: str = "",
        reconnect_delay: float | None = None,
        metadata: Mapping[str, Json] | None = None,
        key: bytes = b"",
        features: tuple[str, ...] = (),
        table: JobTable | None = None,
        quiesced: Iterable[str] = (),
        unproven: Iterable[str] = (),
        journal_dir: Path | None = None,
        insecure_plaintext: bool = False,
        ssl_context: ssl.SSLContext | None = None,
        certificate_sha256: str = "",
        times: RelayTimes | None = None,
    ) -> None:
        """``token`` is the installation's, or ``key`` this daemon's own (:func:`pkg.relay_auth.daemon_key`).

        ``reconnect_delay`` is the longest pause in seconds before connecting again. ``table`` with ``quiesced`` and
        ``unproven`` is what the jobs of an earlier process became; ``journal_dir`` takes what a job's memory can't hold.
        Raises ``ValueError`` for an address, id or credential that can't be used.
        """
        problem = relay_sockets.address_problem(url, insecure_plaintext=insecure_plaintext)
        if problem:
            raise ValueError(problem)
        if not token and not key:
            raise ValueError("a daemon needs the installation's token or a key of its own")
        self.url = url
        self.daemon_id = daemon_id
        self.reconnect_delay = reconnect_delay
        self.metadata = dict(metadata or {})
        self.times = times or RelayTimes()
        self._ssl_context = ssl_context
        self._pin = certificate_sha256
        self._journal_dir = journal_dir
        self._protocol = DaemonProtocol(
            daemon_id=daemon_id,
            key=key or daemon_key(token, daemon_id),
            incarnation=nonce_text(secrets.token_bytes(16)),
            random=secrets.token_bytes,
            table=table or MemoryJobTable(),
            quiesced=quiesced,
            unproven=unproven,
            spill=None if journal_dir is None else lambda _job_id: DiskSpill(journal_dir),
            metadata=self.metadata,
            features=features,
            authentic=relay_sockets.authentic(url, context=ssl_context, pin=certificate_sha256),
            times=self.times,
        )
        self._jobs: dict[str, _Running] = {}
        self._anchor: Endpoint | None = None
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._refusal: Refused | None = None
        self._backoff = Backoff(random.random)
        self._running = False
        self._orphans: set[asyncio.Task[None]] = set()
        self._untold: set[str] = set()
        """Jobs that have ended and of which the hub has not taken note."""
        self._noted = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.daemon_id!r})"

    # -------------------------------------------------------------- for subclasses

    async def run_job(self, job_id: str, payload: Json) -> None:
        """Run one job; override it. When it returns, nothing of the job may be left running.

        A raised :class:`pkg.errors.CodingError` or :class:`AgentRuntimeDaemonError` is the job's error at the hub.
        """
        raise NotImplementedError

    async def handle_command(self, job_id: str, verb: Verb, value: Json) -> Json:
        """Do what the hub says to a running job and return the answer; override it for an interactive session."""
        raise relay_error(_PREFIX, "daemon_command_failed", verb=verb)

    async def on_orphan(self, job_id: str, reason: str) -> None:
        """End what an earlier process left of ``job_id``, then call :meth:`orphan_ended`; override it with a durable table."""

    def on_state(self, state: str, detail: str = "") -> None:
        """The connection is ``connected``, ``parked``, ``refused`` or ``lost``; override it to tell somebody."""

    async def emit_event(self, job_id: str, event: Mapping[str, Json]) -> None:
        """Send one event of a job; waits while its journal is full. An event of a job that is over is dropped.

        Raises :class:`AgentRuntimeDaemonError` (``daemon_message_too_large``) and ``ValueError`` for what is no JSON object.
        """
        running = self._jobs.get(job_id)
        while running is not None:
            running.writable.clear()
            try:
                taken = self._protocol.emit(job_id, dict(event))
            except MessageTooLarge as exc:
                raise relay_error(_PREFIX, "daemon_message_too_large", size=exc.size, most=exc.most) from None
            self._wake.set()
            if taken:
                running.emitted += 1
                if running.emitted % limits.RELAY_BATCH == 0:
                    # A job that never waits for anything else must not keep the loop from sending what it says.
                    await asyncio.sleep(0)
                return
            await running.writable.wait()

    async def finish_job(self, job_id: str, outcome: Outcome = "completed", error: Json = None) -> None:
        """Say how the job ends; it has ended when its :meth:`run_job` returns."""
        running = self._jobs.get(job_id)
        if running is not None:
            running.outcome, running.error = outcome, error

    def create_mcp_proxy(
        self,
        job_id: str,
        *,
        request_timeout: float = limits.RELAY_MCP_SECONDS,
        server_name: str = "langbot_agent",
    ) -> LocalMCPProxy:
        """A loopback MCP address for the job's agent; :meth:`LocalMCPProxy.start` opens it."""
        return LocalMCPProxy(self, job_id, request_timeout=request_timeout, server_name=server_name)

    async def request_mcp(self, job_id: str, payload: Json, timeout: float) -> Json:
        """Bring one MCP payload to LangBot's tools and return the answer.

        Raises ``TimeoutError``, and :class:`AgentRuntimeDaemonError` (``daemon_job_gone``, ``daemon_tool_failed``,
        ``daemon_message_too_large``).
        """
        running = self._jobs.get(job_id)
        try:
            number = 0 if running is None else self._protocol.mcp_request(job_id, payload)
        except MessageTooLarge as exc:
            raise relay_error(_PREFIX, "daemon_message_too_large", size=exc.size, most=exc.most) from None
        if running is None or not number:
            raise relay_error(_PREFIX, "daemon_job_gone")
        answer: asyncio.Future[tuple[Json, str]] = asyncio.get_running_loop().create_future()
        running.calls[number] = answer
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                value, error = await answer
        finally:
            running.calls.pop(number, None)
        if error:
            raise relay_error(_PREFIX, "daemon_tool_failed", problem=error)
        return value

    def open_job_endpoint(self, job_id: str, handler: PayloadHandler) -> Endpoint:
        """A loopback endpoint that ends with the job; raises ``RuntimeError`` when the job is over."""
        running = self._jobs.get(job_id)
        if running is None or self._anchor is None:
            raise RuntimeError("the job is over")
        endpoint = self._anchor.sibling(handler)
        running.endpoints.append(endpoint)
        return endpoint

    @property
    def connected(self) -> bool:
        """Whether the hub has admitted this daemon now."""
        return self._protocol.live

    def jobs(self) -> tuple[str, ...]:
        """The jobs at work."""
        return tuple(self._jobs)

    def orphan_ended(self, job_id: str) -> None:
        """Nothing of a job that an earlier process left is running any more."""
        self._protocol.finish(job_id, "lost")
        self._pump()

    # -------------------------------------------------------------- life

    async def run_forever(self) -> None:
        """Stay connected until cancelled; raises :class:`AgentRuntimeDaemonError` (``daemon_rejected``) for a fatal refusal."""
        if self._running:
            raise RuntimeError("this daemon runs already")
        self._running = True
        self._ticked = relay_sockets.relay_clock()
        self._anchor = await open_endpoint(_nothing)
        try:
            self._tick()
            while True:
                slowly = await self._connection()
                if self._refusal is not None and self._refusal.fatal:
                    raise relay_error(_PREFIX, "daemon_rejected", problem=self._refusal.reason)
                pause = self._backoff.next(network=slowly)
                if self.reconnect_delay is not None:
                    pause = min(pause, self.reconnect_delay)
                await asyncio.sleep(pause)
        finally:
            await to_the_end(self._shut_down())

    async def _shut_down(self) -> None:
        """End every job and every address; the connection is gone already."""
        tasks = self._stop_jobs()
        for orphan in self._orphans:
            orphan.cancel()
        tasks += self._orphans
        if tasks:
            await asyncio.wait(tasks)
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._anchor is not None:
            await self._anchor.close()
            self._anchor = None

    async def _connection(self) -> bool:
        """One connection from its dialling to its end; whether it takes a person: names, certificates or a credential."""
        self._refusal = None
        try:
            connection = await relay_sockets.dial(
                self.url, context=self._ssl_context, pin=self._pin, timeout=self.times.handshake
            )
        except (OSError, TimeoutError, WebSocketException) as exc:
            self.on_state("lost", relay_sockets.trouble(exc))
            return relay_sockets.network_trouble(exc)
        protocol = self._protocol
        protocol.connect(relay_sockets.relay_clock())
        writer = asyncio.create_task(self._write(connection))
        self._pump()
        try:
            await self._read(connection)
        except asyncio.CancelledError:
            await self._say_goodbye(connection)
            raise
        finally:
            writer.cancel()
            await asyncio.wait({writer})
            relay_sockets.cut(connection)
            closed = connection.protocol.close_rcvd if connection.protocol.close_rcvd_then_sent else None
            code, reason = (0, "") if closed is None else (int(closed.code), closed.reason)
            protocol.disconnected(relay_sockets.relay_clock(), code, reason)
            self._pump()
        return self._refusal is not None and self._refusal.claimed

    async def _read(self, connection: ClientConnection) -> None:
        protocol = self._protocol
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = await connection.recv(decode=False)
                now = relay_sockets.relay_clock()
                if now - self._ticked > limits.RELAY_CLOCK_STEP:
                    self._ticked = now
                    protocol.tick(now)
                protocol.receive(bytes(frame), now)
                self._pump()

    async def _write(self, connection: ClientConnection) -> None:
        protocol = self._protocol
        with contextlib.suppress(ConnectionClosed):
            while True:
                while (frame := protocol.next_frame()) is not None:
                    await relay_sockets.send(connection, frame, self.times.dead)
                self._tell()
                if (close := protocol.closing()) is not None:
                    await relay_sockets.close(connection, *close, self.times.dead / limits.RELAY_CLOSE_SHARE)
                    return
                self._wake.clear()
                await self._wake.wait()

    async def _say_goodbye(self, connection: ClientConnection) -> None:
        """The daemon stops: end its jobs and let the hub know, as long as it listens."""

        async def end() -> None:
            for running in self._jobs.values():
                running.outcome, running.error = "failed", {"code": f"{_PREFIX}.daemon_stopped", "retryable": True}
            tasks = self._stop_jobs()
            if tasks:
                await asyncio.wait(tasks)
            if tasks and self._protocol.live:
                self._wake.set()
                await self._drained(connection)
            await relay_sockets.close(connection, 1000, "daemon_stopped", self.times.dead / limits.RELAY_CLOSE_SHARE)

        await to_the_end(end())

    async def _drained(self, connection: ClientConnection) -> None:
        """Wait until the hub has taken note of every job, a moment at most."""
        reader = asyncio.create_task(self._read(connection))
        try:
            async with asyncio.timeout(limits.RELAY_DRAIN):
                while self._untold and not reader.done():
                    self._noted.clear()
                    await self._noted.wait()
        except TimeoutError:
            log.info("the hub did not take note of every job's end")
        finally:
            reader.cancel()
            await asyncio.wait({reader})

    # -------------------------------------------------------------- the protocol's news

    def _pump(self) -> None:
        self._tell()
        self._wake.set()
        self._tick_within(self.times.ack_delay)

    def _tick_within(self, delay: float) -> None:
        loop = asyncio.get_running_loop()
        if self._running and (self._timer is None or self._timer.when() > loop.time() + delay):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(delay, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        now = self._ticked = relay_sockets.relay_clock()
        self._protocol.tick(now)
        wait = min(limits.RELAY_CLOCK_STEP, max(0.005, self._protocol.deadline() - now))
        self._timer = asyncio.get_running_loop().call_later(wait, self._tick, context=contextvars.Context())
        self._tell()
        self._wake.set()

    def _tell(self) -> None:
        for event in self._protocol.events():
            if isinstance(event, StartJob):
                self._start(event)
            elif isinstance(event, Command):
                self._command(event)
            elif isinstance(event, McpResponse):
                running = self._jobs.get(event.job_id)
                answer = None if running is None else running.calls.pop(event.request_id, None)
                if answer is not None and not answer.done():
                    answer.set_result((event.payload, event.error))
            elif isinstance(event, EndJob):
                self._end(event)
            elif isinstance(event, Writable):
                if (running := self._jobs.get(event.job_id)) is not None:
                    running.writable.set()
            elif isinstance(event, Connected):
                self._backoff.reset()
                self.on_state("connected")
            elif isinstance(event, Parked):
                self._backoff.reset()
                self.on_state("parked")
            elif isinstance(event, Refused):
                self._refusal = event
                reason = f"{event.reason} ({UNSEALED})" if event.claimed else event.reason
                self.on_state("refused", reason)
            elif isinstance(event, JobForgotten):
                self._untold.discard(event.job_id)
                self._noted.set()

    # -------------------------------------------------------------- jobs

    def _stop_jobs(self) -> list[asyncio.Task[None]]:
        """Tell every job to end now; the tasks to wait for."""
        for running in self._jobs.values():
            running.stop()
        return [running.task for running in self._jobs.values() if running.task is not None]

    def _task(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())
        return task

    def _start(self, event: StartJob) -> None:
        running = self._jobs[event.job_id] = _Running(event.job_id)
        running.task = self._task(self._run(running, event.payload), "relay job")

    def _end(self, event: EndJob) -> None:
        running = self._jobs.get(event.job_id)
        if running is None:
            self._orphans.add(task := self._task(self.on_orphan(event.job_id, event.reason), "relay orphan"))
            task.add_done_callback(self._orphans.discard)
            return
        _give_up(running.calls)
        running.stop()

    async def _run(self, running: _Running, payload: Json) -> None:
        """One job from its start to the proof of its end."""
        job_id = running.job_id
        running.begun = True
        try:
            if running.stopped:
                raise asyncio.CancelledError
            await self.run_job(job_id, payload)
        except asyncio.CancelledError:
            # Only the daemon cancels a job, and it needs to be told how the job ended more than that it was cancelled.
            if running.outcome == "completed":
                running.outcome = "cancelled"
        except ProcessCleanupUnconfirmed as exc:
            running.unproven = True
            log.error("the end of a job is not proven: %s", exc)
        except (CodingError, AgentRuntimeDaemonError) as exc:
            running.outcome, running.error = "failed", _described(exc)
        except Exception:
            # The boundary of a job: the hub is told that it failed, and the words stay on this machine.
            log.exception("a job failed")
            running.outcome, running.error = "failed", {"code": f"{_PREFIX}.daemon_job_failed"}
        try:
            await to_the_end(self._settle(running))
        finally:
            if not running.unproven:
                self._untold.add(job_id)
            self._protocol.finish(job_id, running.outcome, quiescent=not running.unproven, error=running.error)
            self._jobs.pop(job_id, None)
            self._pump()

    async def _settle(self, running: _Running) -> None:
        """End what belongs to a job besides its own task."""
        for command in running.commands:
            command.cancel()
        if running.commands:
            await asyncio.wait(set(running.commands))
        _give_up(running.calls)
        for endpoint in running.endpoints:
            await endpoint.close()
        running.endpoints.clear()

    def _command(self, event: Command) -> None:
        running = self._jobs.get(event.job_id)
        if running is None:
            return
        task = self._task(self._do(running, event), "relay command")
        running.commands.add(task)
        task.add_done_callback(running.commands.discard)

    async def _do(self, running: _Running, event: Command) -> None:
        ok = True
        value: Json
        try:
            value = await self.handle_command(event.job_id, event.verb, event.value)
        except (CodingError, AgentRuntimeDaemonError) as exc:
            ok, value = False, _described(exc)
        except ProcessCleanupUnconfirmed as exc:
            log.error("a command left something behind: %s", exc)
            running.unproven = True
            ok, value = False, {"code": f"{_PREFIX}.cleanup_unconfirmed"}
        except Exception:
            # The boundary of a command: the hub is told that it failed, and the words stay on this machine.
            log.exception("a command failed")
            ok, value = False, {"code": f"{_PREFIX}.daemon_command_failed"}
        self._protocol.command_done(event.job_id, event.command_id, ok, value)
        self._pump()


def _described(exc: CodingError | AgentRuntimeDaemonError) -> Json:
    """An error as the hub is told of it."""
    return {"code": exc.code, "params": dict(exc.params), "retryable": exc.retryable, "message": str(exc)[:2000]}


def _give_up(calls: Mapping[int, asyncio.Future[tuple[Json, str]]]) -> None:
    """Answer open tool calls: their job has ended."""
    for answer in calls.values():
        if not answer.done():
            answer.set_result((None, "ended"))


async def _nothing(payload: Json) -> Json:
    """The anchor endpoint answers nothing; it only keeps the listener open for those of the jobs."""
    return None
