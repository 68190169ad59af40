"""Codex in any place a launcher reaches: one ``codex app-server`` per session, opened on its thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from pathlib import Path

from agent import confinement, home, keys, opening, program
from agent.failures import Place
from agent.files import SessionFiles
from agent.opening import Opening
from agent.server import AppServer
from agent.session import CodexSession
from agent.tools import HostTools, ToolsUnavailable
from pkg import runtime_support, traceless
from pkg.agent_api import SessionSpec
from pkg.errors import AgentDied, CodingError, CommandNotFound, LaunchError
from pkg.launch import AgentProcess, Command, Launcher
from pkg.redaction import Redactor

NAME = "codex"


class CodexDriver:
    """An :class:`pkg.agent_api.AgentDriver`.

    ``SessionSpec.command`` is the program and further arguments before its subcommand. ``options`` may hold ``sandbox`` (one of
    :data:`agent.confinement.SANDBOXES`), ``model``, ``effort``, ``network`` (whether the sandbox lets commands into the
    network), ``writable_roots`` (further directories the sandbox lets commands write to), ``private`` (names of variables no
    command may see), ``trust_workspace`` (whether the workspace's own ``.codex`` is obeyed) and ``bridge`` (how LangBot's tools
    reach Codex: ``auto``, ``http``, ``stdio``).
    """

    def __init__(self) -> None:
        self._sandboxed: set[str] = set()
        """Machines whose sandbox is known to work."""

    @property
    def name(self) -> str:
        """``codex``."""
        return NAME

    async def open(self, spec: SessionSpec, launcher: Launcher) -> CodexSession:
        """Start the app-server and open or resume its thread; the first event is :class:`pkg.agent_api.SessionStarted`.

        Raises :class:`pkg.errors.CodingError` (``coding.agent_login_required``, ``coding.agent_start_timeout``,
        ``coding.agent_exited``, ``coding.session_busy``, ``coding.session_missing``, ``coding.session_unavailable`` among
        others, and what the launcher raises); by then every process it started is proven gone.
        """
        # Timers keep their context until they would have fired, so the whole opening runs in an empty one.
        return await asyncio.create_task(self._open(spec, launcher), name="codex-open", context=contextvars.Context())

    async def _open(self, spec: SessionSpec, launcher: Launcher) -> CodexSession:
        deadline = asyncio.get_running_loop().time() + spec.startup_timeout
        held = keys.held_back(spec.env, spec.options.get("private"))
        attempt = await self._greeted(spec, launcher, held, deadline)
        try:
            if needed := await attempt.needed():
                # Only now it is known what the settings name, and a process keeps the environment it has.
                await attempt.server.end()
                attempt = await self._greeted(spec, launcher, held - needed, deadline)
            return await self._session(attempt, attempt.spec, launcher)
        except BaseException:
            await attempt.server.end()
            raise

    async def _greeted(self, spec: SessionSpec, launcher: Launcher, held: frozenset[str], deadline: float) -> Opening:
        """A started app-server that has shaken hands, without the variables ``held``."""
        process = await _started(dataclasses.replace(spec, env=keys.masked(spec.env, held)), launcher, deadline)
        server = AppServer(process, Redactor(_secrets(spec)))
        try:
            server.peer.start()
            # An empty directory or ``~`` only has a meaning in its place.
            spec = dataclasses.replace(spec, cwd=process.directory)
            place = Place(f"{Path(spec.command[0]).name} login", launcher.label)
            attempt = Opening(spec, server, local=launcher.local, place=place, held=held)
            left = max(deadline - asyncio.get_running_loop().time(), 0.001)
            try:
                await attempt.handshake(min(spec.initialize_timeout, left))
            except AgentDied as exc:
                raise _never_started(exc, spec, launcher) from None
        except BaseException:
            await server.end()
            raise
        return attempt

    async def _session(self, attempt: Opening, spec: SessionSpec, launcher: Launcher) -> CodexSession:
        """The open session of an app-server that has shaken hands; what it takes is given back where that fails."""
        server, sandbox = attempt.server, confinement.sandbox_of(spec.options, spec.policy)
        async with contextlib.AsyncExitStack() as held:
            tools = await _host_tools(attempt, launcher)
            if tools is not None:
                held.push_async_callback(tools.close)
            guards = await held.enter_async_context(contextlib.AsyncExitStack())
            if launcher.local and spec.resume_session_id:
                await guards.enter_async_context(home.writer_guard(spec.env, spec.resume_session_id))
            await attempt.thread()
            thread_id = attempt.opened.thread_id
            if launcher.local and thread_id != spec.resume_session_id:
                await guards.enter_async_context(home.writer_guard(spec.env, thread_id, wait=0.0))
            files = SessionFiles(server, spec.cwd, local=launcher.local)
            session = CodexSession(attempt, sandbox=sandbox, files=files, tools=tools, guards=guards.pop_all())
            held.pop_all()
        if sandbox != confinement.FULL_ACCESS and launcher.machine not in self._sandboxed:
            session.check_sandbox(sandbox, self._sandboxed, launcher.machine)
        return session


async def _started(spec: SessionSpec, launcher: Launcher, deadline: float) -> AgentProcess:
    arguments = spec.command[1:]
    found, env = spec.command[0], spec.env
    if launcher.local:
        env = home.environment(spec.env, home.prepared(spec.env))
        path = runtime_support.child_environment(env)["PATH"]
        found = program.native(runtime_support.find_executable(found, path, cwd=Path(spec.cwd)))
    line = program.command_line(found, arguments)
    command = Command(line if launcher.local else program.elsewhere(line), spec.cwd, env)
    try:
        async with traceless.until(deadline):
            return await launcher.start(command)
    except TimeoutError:
        seconds = f"{spec.startup_timeout:g}"
        raise LaunchError("coding.agent_start_timeout", seconds=seconds, step="start", retryable=True) from None


async def _host_tools(attempt: Opening, launcher: Launcher) -> HostTools | None:
    """LangBot's tools as tools of the connection, where they can be reached from here and the form does not say otherwise."""
    spec = attempt.spec
    server = next((each for each in spec.mcp_servers if each.name == opening.LANGBOT and each.transport == "http"), None)
    if server is None or spec.options.get("bridge", "auto") != "auto" or not launcher.local:
        return None
    tools = HostTools(server)
    try:
        attempt.offered = await tools.listed()
    except ToolsUnavailable:
        await tools.close()
        return None
    return tools


def _secrets(spec: SessionSpec) -> list[str]:
    secrets = [*runtime_support.secret_values(spec.env)]
    for server in spec.mcp_servers:
        # A header's credential is shown without its scheme, too ("Bearer …").
        secrets += [part for value in server.headers.values() for part in (value, value.rpartition(" ")[2])]
        secrets += server.env.values()
    return secrets


def _never_started(exc: AgentDied, spec: SessionSpec, launcher: Launcher) -> CodingError:
    """A shell's way of saying that there is no such program is said in our words."""
    name = Path(spec.command[0]).name
    if exc.code == "coding.agent_exited" and exc.params.get("code") == "127":
        return CommandNotFound(name, (f"PATH of {launcher.label}",))
    return exc
