"""Claude Code in any place a launcher reaches: one process per session, over its stream-json protocol."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import uuid

from agent import command
from agent.session import ClaudeSession, SessionMissing
from pkg import runtime_support, traceless
from pkg.agent_api import SessionSpec
from pkg.errors import LaunchError, SessionUnavailable
from pkg.launch import Command, Launcher
from pkg.redaction import Redactor


class ClaudeCodeDriver:
    """Opens Claude Code sessions; what ``SessionSpec.options`` may hold is said in :mod:`agent.command`."""

    @property
    def name(self) -> str:
        """``claude-code``."""
        return "claude-code"

    async def open(self, spec: SessionSpec, launcher: Launcher) -> ClaudeSession:
        """Start the program and open or resume its session; the first event is :class:`pkg.agent_api.SessionStarted`.

        A stored session that the program proves to be missing becomes a new one, and is said to be lost. Raises
        :class:`pkg.errors.CodingError` (``coding.agent_not_found``, ``coding.agent_start_timeout``, ``coding.agent_exited``,
        ``coding.session_missing``, ``coding.session_unavailable`` among others, and what the launcher raises); by then every
        process it started is proven gone.
        """
        # Timers keep their context until they would have fired, so the whole opening runs in an empty one.
        return await asyncio.create_task(self._open(spec, launcher), name="claude-open", context=contextvars.Context())

    async def _open(self, spec: SessionSpec, launcher: Launcher) -> ClaudeSession:
        program = (spec.command or (command.PROGRAM,))[0]
        if launcher.local and ("/" not in program or program.startswith(("/", "~/"))):
            # Said before anything starts: where keys are handed over, what starts is a shell.
            runtime_support.find_executable(program, runtime_support.search_path(spec.env.get("PATH", "")))
        stored = spec.resume_session_id
        if stored and command.valid_session_id(stored):
            try:
                return await self._started(spec, launcher, stored, resume=True, lost=False)
            except SessionMissing:
                pass
        if stored and not spec.create_if_missing:
            raise SessionUnavailable("coding.session_missing")
        return await self._started(spec, launcher, str(uuid.uuid4()), resume=False, lost=bool(stored))

    async def _started(
        self, spec: SessionSpec, launcher: Launcher, session_id: str, *, resume: bool, lost: bool
    ) -> ClaudeSession:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.startup_timeout
        begin = command.start(spec, session_id, resume=resume)
        try:
            async with traceless.until(deadline):
                process = await launcher.start(Command(begin.argv, spec.cwd, begin.env))
        except TimeoutError:
            seconds = f"{spec.startup_timeout:g}"
            raise LaunchError("coding.agent_start_timeout", seconds=seconds, step="start", retryable=True) from None
        spec = dataclasses.replace(spec, cwd=process.directory)
        secrets = [*runtime_support.secret_values(spec.env)]
        for server in spec.mcp_servers:
            # A header's credential is shown without its scheme, too ("Bearer …").
            secrets += [part for value in server.headers.values() for part in (value, value.rpartition(" ")[2])]
            secrets += server.env.values()
        session = ClaudeSession(spec, launcher, process, Redactor(secrets), begin, session_id, resumed=resume, lost=lost)
        try:
            await session.open(max(min(spec.initialize_timeout, deadline - loop.time()), 0.001))
        except BaseException:
            await session.close()
            raise
        return session
