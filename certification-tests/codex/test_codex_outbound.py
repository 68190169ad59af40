"""Codex's own client of a run's tools calls the address it was given, and no other."""

from __future__ import annotations

import pytest

from agent.tools import HostTools, ToolsUnavailable
from pkg.agent_api import McpServer
from testkit.elsewhere import elsewhere


@pytest.mark.asyncio
@pytest.mark.parametrize("proxied", [False, True], ids=["plain", "with proxies in the environment"])
async def test_no_redirect_is_followed_and_no_proxy_obeyed(proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: a bearer goes to the endpoint of its run, whatever that answers and whatever the environment says."""
    async with elsewhere() as seen:
        for name, value in seen.proxies.items() if proxied else ():
            monkeypatch.setenv(name, value)
        server = McpServer(
            name="langbot",
            transport="http",
            url=f"http://127.0.0.1:{seen.port}/mcp",
            headers={"Authorization": "Bearer canary"},
        )
        tools = HostTools(server)
        try:
            with pytest.raises(ToolsUnavailable):
                await tools.listed()
        finally:
            await tools.close()
        assert (seen.asked, seen.gone) == (1, 0)
