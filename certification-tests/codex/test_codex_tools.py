"""LangBot's tools over the app-server's own connection, answered from a real endpoint of the core."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from codex_harness import log_of, of, opened, received, text, turn

from agent.tools import HostTools, ToolsUnavailable
from pkg.agent_api import Json, McpServer, ToolFinished
from pkg.tools_listener import Endpoint, open_endpoint

pytestmark = pytest.mark.asyncio

NAME = "langbot_agent"
TOOL = {"name": "langbot_echo", "description": "Says it again.", "inputSchema": {"type": "object", "properties": {"q": {}}}}


class Tools:
    """A tool server of two tools; local protocol fixture behind the core's own listener."""

    def __init__(self, label: str, names: tuple[str, ...] = ("langbot_echo",)) -> None:
        self.label = label
        self.names = names
        self.calls: list[Any] = []

    async def answer(self, message: Json) -> Json:
        """One MCP message."""
        if "id" not in message:
            return None
        match message["method"]:
            case "initialize":
                result: Any = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}}
            case "tools/list":
                result = {"tools": [{**TOOL, "name": name} for name in self.names]}
            case "tools/call":
                self.calls.append(message["params"])
                if message["params"]["arguments"].get("q") == "fail":
                    result = {"isError": True, "content": [{"type": "text", "text": "it failed"}]}
                elif message["params"]["arguments"].get("q") == "much":
                    result = {"content": [{"type": "image", "data": "A" * 3_000_000, "mimeType": "image/png"}]}
                elif message["params"]["arguments"].get("q") == "picture":
                    result = {"content": [{"type": "image", "data": "iVBORw==", "mimeType": "image/png"}]}
                else:
                    result = {"content": [{"type": "text", "text": f"{self.label}: {message['params']['arguments']}"}]}
            case _:
                return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no such method"}}
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def server_of(endpoint: Endpoint) -> McpServer:
    """The endpoint as the run loop describes it."""
    return McpServer(NAME, "http", url=endpoint.url, headers={"Authorization": f"Bearer {endpoint.bearer}"})


@contextlib.asynccontextmanager
async def serving(tools: Tools) -> AsyncIterator[McpServer]:
    """An endpoint with a bearer of its own."""
    endpoint = await open_endpoint(tools.answer)
    try:
        yield server_of(endpoint)
    finally:
        await endpoint.close()


def call(**arguments: Any) -> str:
    """A step that calls the tool."""
    return f"request item/tool/call {json.dumps({'callId': 'c', 'tool': 'langbot_echo', 'arguments': arguments})}"


def replied(events: list[Any]) -> Any:
    """What the app-server was answered."""
    return json.loads(text(events).removeprefix("answered "))


async def test_tools_go_over_the_connection_without_a_bearer(tmp_path: Path) -> None:
    """Codex gets names and schemas, and asks us; it knows neither address nor bearer."""
    tools = Tools("one")
    async with serving(tools) as server, opened(tmp_path, mcp_servers=(server,)) as session:
        assert replied(await turn(session, call(q="hi"))) == {
            "success": True,
            "contentItems": [{"type": "inputText", "text": "one: {'q': 'hi'}"}],
        }
        assert tools.calls == [{"name": "langbot_echo", "arguments": {"q": "hi"}}]
        (params,) = received(tmp_path, "thread/start")
        (offered,) = params["dynamicTools"]
        assert offered == {"type": "function", **TOOL}
        assert "mcp_servers" not in params["config"]
        bearer = server.headers["Authorization"].removeprefix("Bearer ")
        assert bearer not in json.dumps(log_of(tmp_path))
        assert server.url not in json.dumps(log_of(tmp_path))


@pytest.mark.parametrize(
    ("given", "success", "item"),
    [
        ("fail", False, {"type": "inputText", "text": "it failed"}),
        ("picture", True, {"type": "inputImage", "imageUrl": "data:image/png;base64,iVBORw=="}),
    ],
)
async def test_what_a_tool_says_arrives(given: str, success: bool, item: dict[str, str], tmp_path: Path) -> None:
    """Errors as errors of the tool, pictures as pictures."""
    async with serving(Tools("one")) as server, opened(tmp_path, mcp_servers=(server,)) as session:
        assert replied(await turn(session, call(q=given))) == {"success": success, "contentItems": [item]}


async def test_an_answer_of_many_pieces_arrives_whole() -> None:
    """A picture of some megabytes is more than one read of the connection gives."""
    async with serving(Tools("one")) as server:
        tools = HostTools(server)
        try:
            answer = await tools.call("langbot_echo", {"q": "much"})
        finally:
            await tools.close()
    assert answer["success"] is True
    assert answer["contentItems"] == [{"type": "inputImage", "imageUrl": "data:image/png;base64," + "A" * 3_000_000}]


async def test_the_next_run_s_endpoint_takes_over(tmp_path: Path) -> None:
    """A live thread is given another bearer without Codex noticing; the old one is gone."""
    async with contextlib.AsyncExitStack() as stack:
        first = await open_endpoint(Tools("first").answer)
        session = await stack.enter_async_context(opened(tmp_path, mcp_servers=(server_of(first),)))
        assert session.capabilities.live_mcp
        assert "first" in text(await turn(session, call(q="x")))
        second = await stack.enter_async_context(serving(Tools("second")))
        assert await session.renew_mcp((second,))
        await first.close()
        assert "second" in text(await turn(session, call(q="x")))
        third = McpServer(NAME, "http", url="http://127.0.0.1:1/mcp")
        assert not await session.renew_mcp((third,))
        assert "second" in text(await turn(session, call(q="x")))
        assert not await session.renew_mcp(())


async def test_an_endpoint_that_is_gone_answers_in_words(tmp_path: Path) -> None:
    """The connection to Codex and the turn live on; no address is told."""
    endpoint = await open_endpoint(Tools("one").answer)
    async with opened(tmp_path, mcp_servers=(server_of(endpoint),)) as session:
        await turn(session, "say x")
        await endpoint.close()
        reply = replied(await turn(session, call(q="x")))
        assert reply["success"] is False
        assert "127.0.0.1" not in json.dumps(reply)
        assert of(await turn(session, "cmd ls => x"), ToolFinished)


async def test_a_stored_thread_s_tools_are_ours_again(tmp_path: Path) -> None:
    """Codex keeps a thread's tools and takes no others on resume: they are used where they are all of ours."""
    rollout = tmp_path / "rollout.jsonl"
    line = {"type": "session_meta", "payload": {"id": "t-1", "dynamic_tools": [{"name": "langbot_echo"}]}}
    rollout.write_text(json.dumps(line) + "\n")
    config = {"known": ["t-1"], "rollout": str(rollout)}
    async with serving(Tools("again")) as server:
        async with opened(tmp_path, config, mcp_servers=(server,), resume_session_id="t-1") as session:
            assert session.capabilities.live_mcp
            assert "again" in text(await turn(session, call(q="x")))
        (params,) = received(tmp_path, "thread/resume")
        assert "mcp_servers" not in params["config"]


@pytest.mark.parametrize("content", ["", "not json\n", '{"payload": {"dynamic_tools": [{"name": "other"}]}}\n'])
async def test_a_stored_thread_without_them_is_given_the_endpoint(content: str, tmp_path: Path) -> None:
    """One that began another way, or when there were fewer: the server is sent again, with a bearer of this run."""
    rollout = tmp_path / "rollout.jsonl"
    rollout.write_text(content)
    config = {"known": ["t-1"], "rollout": str(rollout)}
    async with serving(Tools("again")) as server:
        async with opened(tmp_path, config, mcp_servers=(server,), resume_session_id="t-1") as session:
            assert not session.capabilities.live_mcp
            await turn(session, "say x")
        (params,) = received(tmp_path, "thread/resume")
        assert params["config"]["mcp_servers"][NAME]["http_headers"] == dict(server.headers)


async def test_a_wrong_bearer_is_no_endpoint() -> None:
    """The client says so in its own words."""
    async with serving(Tools("one")) as server:
        tools = HostTools(McpServer(NAME, "http", url=server.url, headers={"Authorization": "Bearer wrong"}))
        with pytest.raises(ToolsUnavailable) as caught:
            await tools.listed()
        await tools.close()
    assert "401" in str(caught.value)
