"""Whether what a policy file names can be used: a line for each thing, before anything is started.

Guarantees: nothing is started, sent or changed; a hub is dialled (address, certificate, WebSocket) and left before anything is
said, so that a daemon that is running meanwhile is not disturbed; no secret is in a line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from websockets.exceptions import WebSocketException

from pkg import limits, relay_sockets, runtime_support
from pkg.daemon_policy import AgentEntry, HubEntry, Policy, SecretError
from pkg.errors import CommandNotFound, LaunchError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``problem`` is empty for one that can be used, which ``detail`` may say more of."""

    subject: str
    problem: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """The line for the owner."""
        return f"{self.subject}: {self.problem or 'ok'}{f' ({self.detail})' if self.detail and not self.problem else ''}"


async def findings(policy: Policy, secret_of: Callable[[HubEntry], str]) -> list[Finding]:
    """Everything a policy names; ``secret_of`` tries a hub's secret, returns its source and raises ``SecretError``."""
    reached = await asyncio.gather(*(reachable(hub) for hub in policy.hubs))
    found = [Finding(f"policy file {policy.file}", detail=f"this machine is {policy.daemon_id}")]
    for hub, connection in zip(policy.hubs, reached, strict=True):
        found += [_secret(hub, secret_of), connection]
    found += [_agent(agent, policy.path) for agent in policy.agents.values()]
    roots = dict.fromkeys((*policy.workspaces, *(root for agent in policy.agents.values() for root in agent.workspaces)))
    found += [_workspace(directory) for directory in roots]
    return [*found, _state(policy.state_dir)]


def _secret(hub: HubEntry, secret_of: Callable[[HubEntry], str]) -> Finding:
    try:
        return Finding(f"key for {hub.url}", detail=secret_of(hub))
    except SecretError as exc:
        return Finding(f"key for {hub.url}", str(exc))


async def reachable(hub: HubEntry) -> Finding:
    """Whether a hub's address, certificate and WebSocket are there; whether it knows this machine's key, only ``run`` shows."""
    subject = f"hub {hub.url}"
    try:
        connection = await relay_sockets.dial(hub.url, context=None, pin=hub.certificate_sha256, timeout=limits.RELAY_HANDSHAKE)
    except (OSError, TimeoutError, WebSocketException) as exc:
        return Finding(subject, relay_sockets.trouble(exc))
    await relay_sockets.close(connection, 1000, "", limits.RELAY_CLOSE)
    return Finding(subject, detail="answers")


def _agent(agent: AgentEntry, path: str) -> Finding:
    subject = f"agent {agent.name} ({agent.driver})"
    try:
        searched = runtime_support.search_path(recorded=path)
        return Finding(subject, detail=runtime_support.find_executable(agent.command[0], searched, cwd=agent.workspaces[0]))
    except CommandNotFound as exc:
        return Finding(subject, f"the command {exc.params['name']} was not found in {', '.join(exc.places)}")
    except LaunchError as exc:
        return Finding(subject, str(exc))


def _workspace(directory: Path) -> Finding:
    subject = f"workspace {directory}"
    if not os.access(directory, os.R_OK | os.X_OK):
        return Finding(subject, "this account may not read it")
    if not os.access(directory, os.W_OK):
        return Finding(subject, detail="read only for this account")
    return Finding(subject)


def _state(directory: Path) -> Finding:
    subject = f"state {directory}"
    existing = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    if not existing.is_dir():
        return Finding(subject, f"{existing} is no directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(subject, f"this account may not write to {existing}")
    return Finding(subject)
