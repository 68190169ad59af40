"""A session on a user's machine as the run loop sees it: :class:`pkg.agent_api.AgentSession` over a job of the relay.

The other end is :mod:`pkg.daemon_program`. One job is one live session; keeping it warm between runs is keeping its job open.

Guarantees: the events are the daemon's, each once and in order; every :meth:`RemoteSession.prompt` is followed by exactly one
``TurnEnded``, made here when the daemon, the connection or the job is lost in between (with the reason as its error) or the
session is closed (``cancelled``), and a turn's end nobody asked for is dropped; what a daemon says that is no event is
passed over as a notice; :meth:`RemoteSession.close` ends the job and returns when the daemon has proven that nothing is left,
else it raises :class:`pkg.errors.DaemonFenced`. Nothing of the hub's side is ever a
command line: the daemon has its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import types
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeGuard

from pkg import limits, texts
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    Answer,
    CodecError,
    Json,
    McpServer,
    Notice,
    Prompt,
    SessionCapabilities,
    SessionSpec,
    TurnEnded,
    event_from_json,
    to_json,
)
from pkg.errors import AgentDied, AgentProtocolError, CodingError, TurnInProgress
from pkg.launch import AgentProcess, Command, Launcher
from pkg.relay_errors import AgentRuntimeDaemonError
from pkg.relay_events import Verb
from pkg.relay_hub_shell import AgentRuntimeDaemonHub
from pkg.relay_job import Job
from pkg.text_clean import one_line

_OPENED: Final = "SessionOpened"


class DaemonPlace:
    """A daemon's machine as a place: a name for keys, and no way to start anything but through its daemon."""

    local = False

    def __init__(self, daemon_id: str) -> None:
        """``daemon_id`` as the form has it."""
        self._daemon_id = daemon_id

    @property
    def machine(self) -> str:
        """``daemon-`` and a digest of the daemon id."""
        return "daemon-" + hashlib.sha256(self._daemon_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def label(self) -> str:
        """The daemon id."""
        return self._daemon_id

    async def start(self, command: Command) -> AgentProcess:
        """Raises :class:`pkg.errors.LaunchError`'s parent always: command lines live on the daemon's machine."""
        raise CodingError("coding.policy_command_refused")

    async def reach(self, url: str) -> str:
        """The same address; LangBot's own tools travel over the relay instead."""
        return url

    async def close(self) -> None:
        """Nothing to give up."""


class RemoteDriver:
    """An :class:`pkg.agent_api.AgentDriver` whose sessions run on one daemon, under one of its named agents."""

    def __init__(
        self,
        hub: AgentRuntimeDaemonHub,
        daemon_id: str,
        agent_name: str,
        driver_name: str,
        *,
        actor: str = "",
        worktree: str = "",
        tools: Any = None,
        connect_timeout: float = 0.0,
    ) -> None:
        """``agent_name`` is one of the daemon's policy file, ``""`` the only one there; ``actor`` who the job is for.

        ``worktree`` names a git worktree of the workspace to work in, ``tools`` answer the agent's calls of LangBot's tools
        (:func:`pkg.relay_hub_shell.tools_of`; ``None`` gives none), ``connect_timeout`` is seconds to wait for the daemon.
        """
        self._hub = hub
        self._daemon_id = daemon_id
        self._agent_name = agent_name
        self._driver_name = driver_name
        self._actor = actor
        self._worktree = worktree
        self._tools = tools
        self._connect_timeout = connect_timeout

    @property
    def name(self) -> str:
        """The driver's name on the daemon."""
        return self._driver_name

    async def open(self, spec: SessionSpec, launcher: Launcher | None = None) -> RemoteSession:
        """Start a job on the daemon and wait until its session is open; ``spec.command`` and ``launcher`` do not count.

        Raises :class:`pkg.errors.CodingError`: what the daemon's policy and driver say, or what the relay says about the way
        there; the job is then proven gone. Raises :class:`pkg.errors.DaemonFenced` when it is not.
        """
        payload = {
            "agent": self._agent_name,
            "driver": self._driver_name,
            "actor": self._actor,
            "worktree": self._worktree,
            "tools": self._tools is not None,
            "spec": to_json(dataclasses.replace(spec, command=())),
        }
        try:
            await self._hub.wait_for_daemon(self._daemon_id, self._connect_timeout)
            job = await self._hub.open_job(self._daemon_id, payload, self._tools)
        except AgentRuntimeDaemonError as exc:
            raise coding_error(exc) from None
        try:
            return RemoteSession(job, await _opened(job))
        except BaseException:
            await job.cancel()
            raise


async def open(
    hub: AgentRuntimeDaemonHub,
    spec: SessionSpec,
    daemon_id: str,
    agent_name: str,
    driver_name: str,
    *,
    tools: Any = None,
    connect_timeout: float = 0.0,
) -> RemoteSession:
    """One session on a daemon; see :meth:`RemoteDriver.open`."""
    driver = RemoteDriver(hub, daemon_id, agent_name, driver_name, tools=tools, connect_timeout=connect_timeout)
    return await driver.open(spec)


async def _opened(job: Job) -> Mapping[str, Json]:
    """A job's first event."""
    try:
        async with contextlib.aclosing(job.events()) as events:
            async for event in events:
                if isinstance(event, dict) and event.get("type") == _OPENED:
                    return event
                raise AgentProtocolError("coding.daemon_protocol")
    except AgentRuntimeDaemonError as exc:
        raise coding_error(exc) from None
    raise AgentDied("coding.daemon_job_gone", retryable=True)


class RemoteSession:
    """One live session on a daemon's machine."""

    def __init__(self, job: Job, opened: Mapping[str, Json]) -> None:
        """``opened`` is the job's first event. Raises :class:`pkg.errors.AgentProtocolError`."""
        self.job = job
        names = {field.name for field in dataclasses.fields(SessionCapabilities)}
        session_id, directory, said = opened.get("session_id"), opened.get("directory"), opened.get("capabilities")
        if not (_bounded(session_id) and _bounded(directory) and isinstance(said, dict)):
            raise AgentProtocolError("coding.daemon_protocol")
        self._session_id = session_id
        self._directory = directory
        self._capabilities = SessionCapabilities(**{name: said.get(name) is True for name in names})
        self._turn = False
        self._over = False
        self._closed = False

    def __repr__(self) -> str:
        return f"RemoteSession({self.job!r})"

    @property
    def session_id(self) -> str:
        """The vendor's id."""
        return self._session_id

    @property
    def directory(self) -> str:
        """The working directory on the daemon's machine."""
        return self._directory

    @property
    def capabilities(self) -> SessionCapabilities:
        """What the session on the daemon can do."""
        return self._capabilities

    @property
    def alive(self) -> bool:
        """Whether another turn can be prompted."""
        return not (self._over or self._closed or self.job.ended.is_set())

    async def events(self) -> AsyncIterator[AgentEvent]:
        """The session's events; a new iterator goes on where the last one stopped."""
        failure: AgentError | None = None
        if not self._over:
            try:
                async with contextlib.aclosing(self.job.events()) as values:
                    async for value in values:
                        event = _event(value)
                        if isinstance(event, TurnEnded):
                            if not self._turn:
                                continue
                            self._turn = False
                        yield event
            except AgentRuntimeDaemonError as exc:
                told = coding_error(exc)
                failure = AgentError(told.code, told.detail, types.MappingProxyType(told.params), told.retryable)
            self._over = True
        if self._turn:
            self._turn = False
            if self._closed and failure is None:
                yield TurnEnded("cancelled")
            else:
                yield TurnEnded("error", failure or AgentError("coding.daemon_job_gone", retryable=True))

    async def prompt(self, prompt: Prompt) -> None:
        """Start a turn; raises :class:`pkg.errors.TurnInProgress` and :class:`pkg.errors.CodingError`."""
        if self._turn:
            raise TurnInProgress("the turn before has not ended")
        if self._over or self.job.ended.is_set():
            raise AgentDied("coding.daemon_job_gone", retryable=True)
        # From now on the turn's end may come, before the answer to this command, too.
        self._turn = True
        try:
            await self.job.command("prompt", to_json(prompt))
        except AgentRuntimeDaemonError as exc:
            self._turn = False
            raise coding_error(exc) from None

    async def steer(self, prompt: Prompt) -> bool:
        """Put a message into the running turn; false when that can't be."""
        return await self._asked("steer", to_json(prompt))

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open (any more)."""
        return await self._asked("answer", {"request_id": request_id, "answer": to_json(answer)})

    async def interrupt(self) -> None:
        """Ask for the end of the running turn; one that is lost already has its end on the stream."""
        await self._asked("interrupt", None)

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Replace the session's further MCP servers between turns; LangBot's tools stay."""
        return await self._asked("renew_mcp", {"servers": to_json(servers)})

    async def _asked(self, verb: Verb, value: Json) -> bool:
        try:
            return await self.job.command(verb, value) is True
        except AgentRuntimeDaemonError as exc:
            if exc.reason == "daemon_job_gone":
                return False
            raise coding_error(exc) from None

    async def close(self) -> None:
        """End the job and wait for the daemon's proof; idempotent, safe under repeated cancellation."""
        self._closed = True
        await self.job.cancel()


def _bounded(text: Json) -> TypeGuard[str]:
    return isinstance(text, str) and len(text) <= limits.REMOTE_NAME_CHARS


def _event(value: Json) -> AgentEvent:
    """What a daemon says, with nothing that would read as a sentence of ours but the catalogue's own."""
    try:
        event = event_from_json(value)
    except CodecError:
        return Notice("agent.unknown_event")
    if isinstance(event, Notice) and event.params:
        return dataclasses.replace(event, params=_lines(event.params))
    if isinstance(event, TurnEnded) and event.error is not None:
        error = event.error
        known = error.code in texts.catalogue(texts.DEFAULT_LANGUAGE)
        code = error.code if known else "coding.daemon_job_failed"
        return dataclasses.replace(event, error=dataclasses.replace(error, code=code, params=_lines(error.params)))
    return event


def _lines(params: Mapping[str, str]) -> Mapping[str, str]:
    some = itertools.islice(params.items(), limits.RELAY_PARAMETERS)
    return types.MappingProxyType({name: one_line(value, limits.RELAY_PARAMETER_CHARS) for name, value in some})


def coding_error(exc: AgentRuntimeDaemonError) -> CodingError:
    """What the relay or a daemon says as an error of the core, the agent's own words below it."""
    error = exc.coding_error()
    params = dict(error.params)
    detail = params.pop("detail", "")
    return CodingError(error.code, detail=detail, retryable=error.retryable, params=params)


__all__ = ["DaemonPlace", "RemoteDriver", "RemoteSession", "coding_error", "open"]
