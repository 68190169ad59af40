"""A job as the hub's side of a run sees it: its events in order, commands with answers, tools, and an end that is told truly.

A :class:`Job` drives a remote session: :meth:`Job.events` is its one stream, :meth:`Job.command` says something to it,
:meth:`Job.cancel` ends it. Tool calls of its agent run as tasks in a copy of the context in which the job was opened, so they
act with that run's authority and end with it; nothing else of a job has a context.

Guarantees: events come once and in order, and the daemon is told that one batch is done when the next is asked for, so a slow
consumer holds back its own agent and nothing else; every command ends with an answer or an error; :meth:`Job.cancel` returns
when the daemon has proven that nothing of the job is left, however often the caller is cancelled meanwhile, and raises
:class:`pkg.errors.DaemonFenced` when it cannot.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

from pkg import limits, traceless
from pkg.errors import DaemonFenced
from pkg.relay_errors import AgentRuntimeDaemonError, relay_error
from pkg.relay_events import CommandResult, JobEvents, JobFinished, JobLost, JobUnconfirmed, McpRequest, Outcome, Verb
from pkg.relay_frames import Json
from pkg.text_clean import clean, one_line

if TYPE_CHECKING:
    from pkg.relay_listener import Listener

log = logging.getLogger(__name__)

Tools = Callable[[Json], Awaitable[Json]]
"""Answers one decoded MCP payload; ``None`` means that nothing is to be answered."""

_MCP_INTERNAL: Final = -32603


class Job:
    """One job on one daemon, from its dispatch to its proven end; made by ``AgentRuntimeDaemonHub.open_job``."""

    def __init__(self, listener: Listener, prefix: str, daemon_id: str, tools: Tools | None) -> None:
        """The dispatch itself is the listener's."""
        self.job_id = ""
        self.daemon_id = daemon_id
        self.outcome: Outcome | None = None
        """How it ended; ``None`` while it runs, and when its end is not confirmed."""
        self.error: Json = None
        """What the daemon said about a failure."""
        self.ended = asyncio.Event()
        """Nothing more of this job will happen."""
        self.unconfirmed = False
        """Whether it is over without a proof that nothing of it is left."""
        self.reason = ""
        """Why it was lost, or is going to be."""
        self._listener = listener
        self._prefix = prefix
        self._tools = tools
        self._context = contextvars.copy_context()
        self._batches: deque[JobEvents] = deque()
        self._news = asyncio.Event()
        self._commands: dict[int, asyncio.Future[Json]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._cancelled = False

    def __repr__(self) -> str:
        return f"Job({self.job_id!r} on {self.daemon_id!r})"

    # -------------------------------------------------------------- for the run

    async def events(self, deadline: float | None = None) -> AsyncGenerator[Json, None]:
        """The job's events; a new iterator goes on where the last one stopped.

        Ends when the job has completed or was cancelled here; raises :class:`AgentRuntimeDaemonError` for every other end, and
        ``TimeoutError`` at ``deadline`` (the loop's time), which does not end the job.
        """
        loop = asyncio.get_running_loop()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            self._news.set()

        # One timer for the whole iteration; one for each wait would cost more than most events.
        timer = None if deadline is None else loop.call_at(deadline, expire, context=contextvars.Context())
        try:
            while True:
                while self._batches:
                    if deadline is not None and loop.time() >= deadline:
                        raise TimeoutError
                    batch = self._batches[0]
                    while batch.events:
                        yield batch.events.pop(0)
                    if self._batches and self._batches[0] is batch:
                        self._batches.popleft()
                        self._listener.consumed(self.job_id, batch.seq)
                if self.ended.is_set():
                    self._raise_end()
                    return
                if expired:
                    raise TimeoutError
                self._news.clear()
                await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def command(self, verb: Verb, value: Json = None) -> Json:
        """Say something to the running job and return the daemon's answer.

        Delivered at most once and in the order of the calls. Raises :class:`AgentRuntimeDaemonError`: ``daemon_job_gone`` when
        the job ends before the answer, ``daemon_message_too_large``, ``daemon_commands_full``, or what the daemon says.
        """
        if self._cancelled or self.ended.is_set():
            raise relay_error(self._prefix, "daemon_job_gone")
        number = self._listener.command(self, verb, value, self._prefix)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._commands[number] = answer
        try:
            return await answer
        finally:
            self._commands.pop(number, None)

    async def cancel(self) -> None:
        """End the job: its tools at once, its agent provenly.

        Idempotent. A cancellation of the caller is raised after the end. Raises
        :class:`pkg.errors.DaemonFenced` when the daemon did not prove the end (it gets no job until it does).
        """
        cancelled: asyncio.CancelledError | None = None
        self._stop()
        while not self.ended.is_set() or self._calls:
            try:
                if self._calls:
                    await asyncio.wait(set(self._calls))
                else:
                    await self.ended.wait()
            except asyncio.CancelledError as exc:
                cancelled = exc
        if self.unconfirmed:
            raise DaemonFenced(self.daemon_id)
        if cancelled is not None:
            raise cancelled

    def _stop(self) -> None:
        self._cancelled = True
        for call in self._calls:
            call.cancel()
        self._batches.clear()
        if not self.ended.is_set():
            self._listener.cancel(self.job_id)
        self._news.set()

    def _raise_end(self) -> None:
        if self._cancelled or self.outcome == "completed":
            return
        if self.reason == "revoked":
            raise relay_error(self._prefix, "revoked")
        if self.unconfirmed or self.outcome is None or self.outcome == "lost":
            raise relay_error(self._prefix, "daemon_lost", retryable=True, daemon=self.daemon_id)
        if self.outcome == "cancelled":
            raise relay_error(self._prefix, "daemon_job_gone")
        raise self._failure(self.error, "daemon_refused" if self.outcome == "refused" else "daemon_job_failed")

    def _failure(self, error: Json, reason: str) -> AgentRuntimeDaemonError:
        """What a daemon says about a failure: a code of ours with its parameters, or nothing that is shown."""
        said = error if isinstance(error, dict) else {"code": error}
        code, params = said.get("code"), said.get("params")
        if isinstance(code, str) and code:
            reason = code.rpartition(".")[2][:64]
        given = itertools.islice(params.items(), limits.RELAY_PARAMETERS) if isinstance(params, dict) else ()
        # A parameter stands in the middle of a sentence of ours; only the agent's own words below it may have lines.
        most = limits.RELAY_PARAMETER_CHARS
        shown = {
            str(key)[:64]: clean(str(value)[:most]) if key == "detail" else one_line(str(value), most) for key, value in given
        }
        shown.pop("retryable", None)
        failure = relay_error(
            self._prefix, reason, retryable=said.get("retryable") is True, **{"daemon": self.daemon_id, **shown}
        )
        message = said.get("message")
        if isinstance(message, str) and message:
            failure.message = message[:2000]
            failure.args = (failure.message,)
        return failure

    # -------------------------------------------------------------- for the listener

    def told(self, event: JobEvents | CommandResult | McpRequest | JobFinished | JobLost | JobUnconfirmed) -> None:
        """Something happened to this job."""
        if isinstance(event, JobEvents):
            if not self._cancelled:
                self._batches.append(event)
                self._news.set()
        elif isinstance(event, CommandResult):
            answer = self._commands.pop(event.command_id, None)
            if answer is not None and not answer.done():
                if event.ok:
                    answer.set_result(event.value)
                else:
                    answer.set_exception(self._failure(event.value, "daemon_command_failed"))
        elif isinstance(event, McpRequest):
            if not self._cancelled:
                call = asyncio.get_running_loop().create_task(
                    self._call(event.request_id, event.payload), context=self._context.copy()
                )
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        else:
            self._end(event)

    def _end(self, event: JobFinished | JobLost | JobUnconfirmed) -> None:
        if isinstance(event, JobFinished):
            self.outcome, self.error = event.outcome, event.error
        elif isinstance(event, JobLost):
            self.outcome, self.reason = "lost", self.reason or event.reason
            self.unconfirmed = not event.proven
        else:
            self.unconfirmed = True
        self.ended.set()
        self._news.set()
        for call in self._calls:
            call.cancel()
        for answer in self._commands.values():
            if not answer.done():
                answer.set_exception(relay_error(self._prefix, "daemon_job_gone"))
        self._commands.clear()

    async def _call(self, request_id: int, payload: Json) -> None:
        """Answer one tool call of the job's agent."""
        if self._tools is None:
            answer = _refused(payload, "LangBot's tools are not available to this job.")
        else:
            try:
                async with traceless.within(limits.RELAY_MCP_SECONDS):
                    answer = await self._tools(payload)
            except TimeoutError:
                answer = _refused(payload, "The call took too long and was cancelled.")
            except Exception:
                # The boundary of the agent's request: whatever went wrong is an answer, without its words.
                log.warning("a tool call over the relay failed", exc_info=True)
                answer = _refused(payload, "The call failed.")
        self._listener.mcp_response(self.job_id, request_id, answer)


def _refused(payload: Json, text: str) -> Json:
    number = payload.get("id") if isinstance(payload, dict) else None
    return {"jsonrpc": "2.0", "id": number, "error": {"code": _MCP_INTERNAL, "message": text}}
