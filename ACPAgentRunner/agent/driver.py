"""Agents of the Agent Client Protocol, in any place a launcher reaches."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from collections.abc import Awaitable, Callable

from agent.opening import OUR_POLICIES, RecentlyOpened
from agent.presets import NPM_ENVIRONMENT, asking_environment
from agent.session import AcpSession
from pkg import runtime_support, traceless
from pkg.agent_api import SessionSpec
from pkg.errors import LaunchError
from pkg.launch import Command, Launcher
from pkg.redaction import Redactor


class AcpDriver:
    """Opens ACP sessions, one process each.

    ``SessionSpec.options`` may hold ``mode``, ``model`` (ids or labels as the agent offers them) and ``config`` (an object of
    config option id to value). A ``policy`` that is none of ours is taken for a mode of the agent.
    """

    def __init__(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """``sleep`` waits out the pause before a reload that would destroy a session."""
        self._recently_opened = RecentlyOpened()
        self._sleep = sleep

    @property
    def name(self) -> str:
        """``acp``."""
        return "acp"

    async def open(self, spec: SessionSpec, launcher: Launcher) -> AcpSession:
        """Start the agent and open or resume its session; the first event is :class:`pkg.agent_api.SessionStarted`.

        Raises :class:`pkg.errors.CodingError` (``coding.agent_login_required``, ``coding.agent_start_timeout``,
        ``coding.agent_exited``, ``coding.session_missing``, ``coding.session_unavailable``, ``coding.agent_setting_unknown``
        among others, and what the launcher raises); by then every process it started is proven gone.
        """
        # Timers keep their context until they would have fired, so the whole opening runs in an empty one.
        return await asyncio.create_task(self._open(spec, launcher), name="acp-open", context=contextvars.Context())

    async def _open(self, spec: SessionSpec, launcher: Launcher) -> AcpSession:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.startup_timeout
        env = {**NPM_ENVIRONMENT, **spec.env}
        if spec.policy in OUR_POLICIES:
            env = asking_environment(spec.cwd, env)
        command = Command(spec.command, spec.cwd, env)
        try:
            async with traceless.until(deadline):
                process = await launcher.start(command)
        except TimeoutError:
            seconds = f"{spec.startup_timeout:g}"
            raise LaunchError("coding.agent_start_timeout", seconds=seconds, step="start", retryable=True) from None
        # Agents demand an absolute directory; an empty one or ``~`` only has a meaning in its place.
        spec = dataclasses.replace(spec, cwd=process.directory)
        secrets = [*runtime_support.secret_values(spec.env)]
        for server in spec.mcp_servers:
            # A header's credential is shown without its scheme, too ("Bearer …").
            secrets += [part for value in server.headers.values() for part in (value, value.rpartition(" ")[2])]
            secrets += server.env.values()
        session = AcpSession(spec, launcher, process, Redactor(secrets), self._recently_opened, self._sleep)
        try:
            await session.open(min(spec.initialize_timeout, max(deadline - loop.time(), 0.001)))
        except BaseException:
            await session.close()
            raise
        return session
