"""The relay between a hub inside the plugin and daemons on users' machines, under the names of the SDK's own relay.

``from langbot_plugin.api.agent_tools.daemon import …`` becomes ``from pkg.daemon_relay import …``; ``RELAY-NOTICE.md`` says
which file of the SDK the names and call shapes are compatible with. The protocol is :mod:`pkg.relay_protocol`, the hub's shell
:mod:`pkg.relay_hub_shell`, the daemon's :mod:`pkg.relay_client`.

What is different on purpose: a token is always needed and never travels; ``run_job`` of a client proves with its return that
nothing of the job is left; cancelling a job waits for that proof; :class:`LocalMCPProxy` demands its own bearer.
"""

from __future__ import annotations

from pkg.relay_client import AgentRuntimeDaemonClient, MemoryJobTable
from pkg.relay_errors import AgentRuntimeDaemonError
from pkg.relay_hub_shell import (
    AgentRuntimeDaemonHub,
    DaemonHubConfig,
    DaemonInfo,
    agent_runtime_daemon_config_from_plugin_config,
    get_agent_runtime_daemon_hub,
    handle_agent_runtime_mcp_payload,
    revoke,
)
from pkg.relay_job import Job
from pkg.relay_markers import state_directory
from pkg.relay_mcp_proxy import LocalMCPProxy

__all__ = [
    "AgentRuntimeDaemonClient",
    "AgentRuntimeDaemonError",
    "AgentRuntimeDaemonHub",
    "DaemonHubConfig",
    "DaemonInfo",
    "Job",
    "LocalMCPProxy",
    "MemoryJobTable",
    "agent_runtime_daemon_config_from_plugin_config",
    "get_agent_runtime_daemon_hub",
    "handle_agent_runtime_mcp_payload",
    "revoke",
    "state_directory",
]
