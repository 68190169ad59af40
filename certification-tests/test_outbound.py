"""What is called from a worker or a workstation is the address that was written down, and no other."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
import urllib.request

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage, InvalidStatus

from pkg import mcp_stdio_shim, relay_sockets
from testkit.elsewhere import elsewhere
from tooling import ROOT, packages

BOUND = 20.0
"""Seconds any single wait may take; never the verdict itself."""
INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}


async def forwarded(url: str, environment: dict[str, str]) -> dict[str, object]:
    """What the forwarding process answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", mcp_stdio_shim.__file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**mcp_stdio_shim.environment(url, {"Authorization": "Bearer canary"}), **environment},
    )
    async with asyncio.timeout(BOUND):
        answer, _ = await process.communicate(json.dumps(INITIALIZE).encode() + b"\n")
    answered: dict[str, object] = json.loads(answer)
    return answered


@pytest.mark.asyncio
async def test_the_forwarder_of_tool_calls_follows_no_redirect() -> None:
    """Our rule: a bearer goes to the server it was given for."""
    async with elsewhere() as seen:
        answer = await forwarded(f"http://127.0.0.1:{seen.port}/mcp", {})
        assert "error" in answer
        assert (seen.asked, seen.gone) == (1, 0)


@pytest.mark.asyncio
async def test_the_forwarder_of_tool_calls_ignores_proxies_of_the_environment() -> None:
    """Our rule: the environment of a worker or an agent is nobody's network policy."""
    async with elsewhere() as seen:
        await forwarded(f"http://127.0.0.1:{seen.port}/mcp", seen.proxies)
        assert (seen.asked, seen.gone) == (1, 0)


@pytest.mark.asyncio
async def test_a_daemon_follows_no_redirect() -> None:
    """Library fact: the client of websockets follows ten; our rule: a daemon's hub is where its owner said it is."""
    async with elsewhere("ws") as seen:
        with pytest.raises(InvalidStatus):
            await relay_sockets.dial(f"ws://127.0.0.1:{seen.port}", context=None, pin="", timeout=BOUND)
        assert (seen.asked, seen.gone) == (1, 0)
        with pytest.raises(InvalidMessage):
            await connect(f"ws://127.0.0.1:{seen.port}", proxy=None, open_timeout=BOUND)
        assert seen.gone == 1, "without our rule it would have been followed"


@pytest.mark.asyncio
async def test_a_daemon_ignores_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Library fact: the client of websockets takes the environment's proxy; our rule: a daemon connects by itself."""
    async with elsewhere() as seen:
        for name, value in seen.proxies.items():
            monkeypatch.setenv(name, value)
        assert urllib.request.getproxies()["http"].endswith(str(seen.other)), "the environment does name a proxy"
        with pytest.raises(InvalidStatus):
            await relay_sockets.dial(f"ws://127.0.0.1:{seen.port}", context=None, pin="", timeout=BOUND)
        assert (seen.asked, seen.gone) == (1, 0)


CLIENTS = {
    "ACPAgentRunner": {"pkg/mcp_stdio_shim.py": {"http.client"}, "pkg/relay_sockets.py": {"websockets.asyncio.client.connect"}},
    "ClaudeCodeAgent": {},
    "CodexAgent": {"agent/tools.py": {"aiohttp"}},
}
"""Every module that can call an address, and with what: the ones looked at here and in Codex's own test."""
LIBRARIES = ("aiohttp", "httpx", "http.client", "requests", "urllib.request", "urllib3", "websockets")
NO_CLIENTS = (
    "aiohttp.web",
    "aiohttp.web_protocol",
    "websockets.asyncio.client.ClientConnection",
    "websockets.asyncio.server",
    "websockets.exceptions",
    "websockets.protocol",
)
"""What of these libraries calls nobody by itself."""


def clients(source: str) -> set[str]:
    """What a source imports that can call an address."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{each.name}" for each in node.names}
    return {name for name in names if below(name, LIBRARIES) and not below(name, NO_CLIENTS)}


def below(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a name is one of these or in one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("package", packages.NAMES)
def test_nothing_else_can_call_an_address(package: str) -> None:
    """Our rule: no other module has an HTTP or WebSocket client in its hands."""
    rooms = ("agent", "components", "pkg") if package == packages.SOURCE else ("agent", "components")
    found: dict[str, set[str]] = {}
    for path in sorted(path for room in rooms for path in (ROOT / package / room).rglob("*.py")):
        if used := clients(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT / package).as_posix()] = used
    assert found == CLIENTS[package]


def test_a_client_would_be_seen() -> None:
    """The other side of the test above."""
    assert clients("import aiohttp\nfrom aiohttp import web") == {"aiohttp"}
    assert clients("def f():\n    from urllib.request import urlopen") == {"urllib.request.urlopen"}
    assert clients("from websockets import connect") == {"websockets.connect"}
    assert clients("from websockets.asyncio.server import serve") == set()
