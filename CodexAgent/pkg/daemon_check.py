"""Whether what a policy file names can be used: a line for each thing, before anything is started.

Guarantees: nothing is started, sent or changed; a hub is dialled (address, certificate, WebSocket) and left before anything is
said, so that a daemon that is running meanwhile is not disturbed; no secret is in a line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from websockets.exceptions import InvalidStatus, WebSocketException

from pkg import limits, relay_sockets, runtime_support
from pkg.daemon_policy import AgentEntry, HubEntry, Policy, SecretError
from pkg.errors import LaunchError

NOT_YET: Final = (
    "The plugin opens its hub with the first message to a runner whose location is daemon; the daemon goes on trying until then"
)


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
        return Finding(subject, _trouble(exc))
    await relay_sockets.close(connection, 1000, "", limits.RELAY_CLOSE)
    return Finding(subject, detail="answers")


def _trouble(exc: BaseException) -> str:
    if isinstance(exc, relay_sockets.WrongCertificate):
        return "its certificate is another one than certificate_sha256 says"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({exc.verify_message}); see certificate_sha256"
    if isinstance(exc, ssl.SSLError | ConnectionResetError):
        return "what listens there hangs up; are ws:// and wss:// mixed up?"
    if isinstance(exc, socket.gaierror):
        return "the name is not known"
    if isinstance(exc, ConnectionRefusedError):
        return f"nobody listens there. {NOT_YET}"
    if isinstance(exc, TimeoutError):
        return f"no answer within {limits.RELAY_HANDSHAKE:g} seconds"
    if isinstance(exc, InvalidStatus) and exc.response.status_code in (502, 503, 504):
        return f"the proxy there reaches no hub. {NOT_YET}"
    if isinstance(exc, InvalidStatus):
        return f"the server answers {exc.response.status_code} instead of a WebSocket; does the proxy pass those on to the hub?"
    if isinstance(exc, WebSocketException | EOFError):
        return "what answers there is no WebSocket"
    return f"cannot be reached ({exc.strerror or type(exc).__name__})" if isinstance(exc, OSError) else type(exc).__name__


def _agent(agent: AgentEntry, path: str) -> Finding:
    subject = f"agent {agent.name} ({agent.driver})"
    try:
        searched = runtime_support.search_path(recorded=path)
        return Finding(subject, detail=runtime_support.find_executable(agent.command[0], searched, cwd=agent.workspaces[0]))
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
