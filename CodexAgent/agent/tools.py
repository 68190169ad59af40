"""LangBot's tools over the app-server's own connection: no listener of Codex's, no bearer in its hands.

Codex (0.171) takes ``dynamicTools`` when a thread is started and calls them as requests of its own. They are answered here from
the run's MCP endpoint; a next run brings another endpoint, and the thread goes on with it. A tool that cannot be reached
answers the agent in words, never with an error of the connection.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Final

import aiohttp

from pkg import limits
from pkg.agent_api import Json, McpServer
from pkg.lenient import as_dict, as_list, as_str, bounded, compact

_VERSION: Final = "2025-06-18"


class ToolsUnavailable(Exception):
    """The endpoint did not answer as an MCP server does."""


class HostTools:
    """A small MCP client of one endpoint at a time."""

    def __init__(self, server: McpServer) -> None:
        """Nothing is sent before :meth:`listed`."""
        self._server = server
        self._ids = itertools.count(1)
        self._http: aiohttp.ClientSession | None = None
        self._session = ""

    async def listed(self) -> list[dict[str, Any]]:
        """The tools as ``dynamicTools``. Raises :class:`ToolsUnavailable`."""
        await self._initialize()
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            result = await self._call("tools/list", {"cursor": cursor} if cursor else {})
            for tool in map(as_dict, as_list(result.get("tools"))):
                if name := as_str(tool.get("name")):
                    schema = tool.get("inputSchema")
                    found.append(
                        {
                            "type": "function",
                            "name": name,
                            "description": as_str(tool.get("description")),
                            "inputSchema": schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
                        }
                    )
            cursor = as_str(result.get("nextCursor"))
            if not cursor or len(found) >= limits.CODEX_TOOLS:
                return found[: limits.CODEX_TOOLS]

    async def renewed(self, server: McpServer) -> bool:
        """Another run's endpoint takes the place of the last one; whether it answers."""
        before = self._server
        self._server, self._session = server, ""
        try:
            await self._initialize()
        except ToolsUnavailable:
            self._server, self._session = before, ""
            return False
        return True

    async def call(self, tool: str, arguments: Json) -> dict[str, Any]:
        """What a tool says, as the answer to ``item/tool/call``; never raises for what the endpoint does."""
        params = {"name": tool, "arguments": arguments if isinstance(arguments, dict) else {}}
        try:
            result = await self._call("tools/call", params)
        except ToolsUnavailable as exc:
            return _answer(False, [{"type": "inputText", "text": str(exc)}])
        items: list[dict[str, str]] = []
        for block in map(as_dict, as_list(result.get("content"))):
            if block.get("type") == "image" and as_str(block.get("data")):
                mime = as_str(block.get("mimeType")) or "image/png"
                items.append({"type": "inputImage", "imageUrl": f"data:{mime};base64,{as_str(block.get('data'))}"})
            elif text := as_str(block.get("text")):
                items.append({"type": "inputText", "text": bounded(text, limits.MCP_RESULT_CHARS)[0]})
        if not items and result.get("structuredContent") is not None:
            items.append({"type": "inputText", "text": compact(result["structuredContent"], limits.MCP_RESULT_CHARS)[0]})
        return _answer(result.get("isError") is not True, items or [{"type": "inputText", "text": ""}])

    async def close(self) -> None:
        """Give up the connection; idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _initialize(self) -> None:
        params = {
            "protocolVersion": _VERSION,
            "capabilities": {},
            "clientInfo": {"name": "langbot-coding-runner", "version": "0.1.0"},
        }
        await self._call("initialize", params)
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _call(self, method: str, params: Json) -> dict[str, Any]:
        call_id = next(self._ids)
        answers = await self._post({"jsonrpc": "2.0", "id": call_id, "method": method, "params": params})
        answer = next((each for each in answers if each.get("id") == call_id), {})
        if "error" in answer:
            said = as_str(as_dict(answer["error"]).get("message"))
            raise ToolsUnavailable(said or "The tool server refused the call.")
        if not isinstance(answer.get("result"), dict):
            raise ToolsUnavailable("The tool server did not answer.")
        return as_dict(answer["result"])

    async def _post(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=limits.CODEX_TOOL_SECONDS, connect=limits.CODEX_FILE_SECONDS)
            self._http = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        headers = {
            **self._server.headers,
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "MCP-Protocol-Version": _VERSION,
        }
        if self._session:
            headers["Mcp-Session-Id"] = self._session
        try:
            async with self._http.post(self._server.url, json=message, headers=headers, allow_redirects=False) as response:
                self._session = response.headers.get("Mcp-Session-Id", self._session)
                if response.status >= 400:
                    raise ToolsUnavailable(f"The tool server refused the call ({response.status}).")
                return _messages(await _body(response), response.content_type)
        except (TimeoutError, aiohttp.ClientError, OSError):
            # Never the exception's own text: it may name the address.
            raise ToolsUnavailable("The tool server cannot be reached.") from None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limits.AGENT_LINE_BYTES:
            raise ToolsUnavailable("The tool server's answer is too large.")
    return bytes(body)


def _answer(success: bool, items: list[dict[str, str]]) -> dict[str, Any]:
    return {"success": success, "contentItems": items}


def _messages(body: bytes, kind: str) -> list[dict[str, Any]]:
    text = body.decode("utf-8", "replace")
    pieces = [text]
    if kind == "text/event-stream":
        pieces = [line[5:] for line in text.split("\n") if line.startswith("data:")]
    found: list[dict[str, Any]] = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        found += [as_dict(each) for each in (value if isinstance(value, list) else [value])]
    return found
