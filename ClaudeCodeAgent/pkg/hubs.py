"""The way from a run to a user's machine: the installation's hub as the plugin's form wants it, and one daemon behind it.

Guarantees: an installation has one hub for each package in a process, whichever of its runs comes first; settings that differ
from those the hub runs with are taken over when no job runs and are a ``coding.daemon_hub_conflict`` otherwise; in the shared
pool the worker's own environment says nothing about a tenant's hub, and the secret is kept no longer than
:meth:`pkg.daemon_relay.AgentRuntimeDaemonHub.in_use` keeps it.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pkg import installations
from pkg.daemon_relay import (
    AgentRuntimeDaemonError,
    AgentRuntimeDaemonHub,
    agent_runtime_daemon_config_from_plugin_config,
    get_agent_runtime_daemon_hub,
    state_directory,
)
from pkg.errors import Refused, SettingsError
from pkg.identity import Authority
from pkg.remote_session import RemoteDriver, coding_error
from pkg.runtime_support import WorkerShape, worker_shape
from pkg.settings import PluginSettings, RunnerSettings


@dataclass(frozen=True, slots=True)
class DaemonWay:
    """One agent on one daemon, and the hub it is reached through."""

    hub: AgentRuntimeDaemonHub
    host: str
    port: int
    token: str = field(repr=False)
    daemon_id: str
    agent: str
    """The agent's name in the daemon's policy file; ``""``: the only one there."""
    connect_timeout: float

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """The hub runs, and goes on running, while the block does; raises :class:`pkg.errors.CodingError`."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.hub.in_use(self.host, self.port, self.token))
            except AgentRuntimeDaemonError as exc:
                raise coding_error(exc) from None
            yield

    async def connected(self) -> None:
        """Wait until the daemon takes jobs, ``connect_timeout`` seconds at most; raises :class:`pkg.errors.CodingError`."""
        try:
            await self.hub.wait_for_daemon(self.daemon_id, self.connect_timeout)
        except AgentRuntimeDaemonError as exc:
            raise coding_error(exc) from None

    def driver(self, name: str, *, actor: str, worktree: str, tools: Any) -> RemoteDriver:
        """The driver of that name over there, for one session of ``actor``; see :class:`pkg.remote_session.RemoteDriver`."""
        return RemoteDriver(self.hub, self.daemon_id, self.agent, name, actor=actor, worktree=worktree, tools=tools)


def daemon_way(
    settings: RunnerSettings, plugin: PluginSettings, config: Mapping[str, Any], authority: Authority, product: str
) -> DaemonWay:
    """The daemon that the runner's form names, behind the hub that the plugin's form (``config`` as it is stored) describes.

    Raises :class:`pkg.errors.CodingError`: ``coding.setting_invalid`` without a daemon id, ``coding.daemon_hub_not_started``
    where the plugin's form has no hub.
    """
    if not settings.daemon_id:
        raise SettingsError("coding.setting_invalid", field="daemon-id", problem="problem.needed")
    environ: Mapping[str, str] = types.MappingProxyType({}) if authority.pooled else os.environ
    wanted = agent_runtime_daemon_config_from_plugin_config(config, default_port=plugin.daemon_port, environ=environ)
    if not wanted["enabled"]:
        raise Refused("coding.daemon_hub_not_started")
    shape = WorkerShape.POOL if authority.pooled else worker_shape()
    hub = get_agent_runtime_daemon_hub(
        product,
        error_code_prefix="coding",
        state_dir=state_directory(product, shape),
        installation=installations.UNBOUND if authority.binding is None else authority.binding,
        shared=authority.pooled,
    )
    return DaemonWay(
        hub,
        wanted["host"],
        wanted["port"],
        token=wanted["token"],
        daemon_id=settings.daemon_id,
        agent=settings.daemon_agent,
        connect_timeout=settings.daemon_connect_timeout,
    )
