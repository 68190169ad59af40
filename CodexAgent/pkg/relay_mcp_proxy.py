"""A job's MCP address on the daemon's machine: what the agent says there travels over the relay to LangBot's tools.

Guarantees: the address is on the loopback, behind a bearer and an unguessable path of its own (:mod:`pkg.tools_listener` has
the rules); it answers from :meth:`LocalMCPProxy.start` to :meth:`LocalMCPProxy.stop`, and never longer than its job; a call
that the relay can't bring through is answered with an error, never left open.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Final

from pkg import limits
from pkg.agent_api import Json, McpServer
from pkg.relay_errors import AgentRuntimeDaemonError
from pkg.tools_listener import Endpoint

if TYPE_CHECKING:
    from pkg.relay_client import AgentRuntimeDaemonClient

_UNAVAILABLE: Final = "LangBot's tools can't be reached now."


class LocalMCPProxy:
    """One loopback MCP address for one job; made by ``AgentRuntimeDaemonClient.create_mcp_proxy``."""

    def __init__(
        self,
        daemon: AgentRuntimeDaemonClient,
        job_id: str,
        *,
        request_timeout: float = limits.RELAY_MCP_SECONDS,
        server_name: str = "langbot_agent",
    ) -> None:
        """``request_timeout`` is seconds for one call; ``server_name`` what the agent calls the server."""
        self.daemon = daemon
        self.job_id = job_id
        self.request_timeout = request_timeout
        self.server_name = server_name
        self._endpoint: Endpoint | None = None

    def __repr__(self) -> str:
        return f"LocalMCPProxy({self.job_id!r})"

    def start(self) -> None:
        """Answer from now on; idempotent. Raises ``RuntimeError`` when the job is over."""
        if self._endpoint is None:
            self._endpoint = self.daemon.open_job_endpoint(self.job_id, self._answer)

    def stop(self) -> None:
        """Make the bearer worthless at once; its job closes the rest. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.revoke()

    @property
    def endpoint(self) -> str:
        """The address without its path; raises ``RuntimeError`` before :meth:`start`."""
        return self._opened.url.removesuffix(self._opened.path)

    @property
    def http_mcp_endpoint(self) -> str:
        """The whole address; useless without the bearer of :meth:`server_config`."""
        return self._opened.url

    @property
    def _opened(self) -> Endpoint:
        if self._endpoint is None:
            raise RuntimeError("the MCP proxy is not started")
        return self._endpoint

    def mcp_server(self) -> McpServer:
        """What a driver is given."""
        headers = {"Authorization": f"Bearer {self._opened.bearer}"}
        return McpServer(self.server_name, "http", self._opened.url, types.MappingProxyType(headers))

    def server_config(self) -> dict[str, Json]:
        """The same as plain JSON."""
        server = self.mcp_server()
        return {"name": server.name, "type": server.transport, "url": server.url, "headers": dict(server.headers)}

    async def _answer(self, payload: Json) -> Json:
        try:
            return await self.daemon.request_mcp(self.job_id, payload, self.request_timeout)
        except (AgentRuntimeDaemonError, TimeoutError):
            number = payload.get("id") if isinstance(payload, dict) else None
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32000, "message": _UNAVAILABLE}}
