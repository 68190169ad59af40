"""LangBot's tools over loopback MCP: whose authority a call has, when a bearer ends, and what a client may do to the listener.

The SDK's real ``Runner``, proxy, tools and invocation scopes run in process; only the RPC handler below them is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import io
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.api.proxies.invocation import bind_invocation, current_binding
from langbot_plugin.entities.io.actions.enums import PluginToRuntimeAction
from langbot_plugin.entities.io.context import InstallationBinding
from langbot_plugin.runtime.io.handler import MAX_INFLIGHT_ACTIONS

from pkg import host_calls, langbot_tools, limits, tools_listener
from pkg.agent_api import McpServer
from pkg.errors import Refused
from pkg.fair_slots import FairSlots
from pkg.langbot_tools import AddressedTools, open_session_tools, open_tools

pytestmark = pytest.mark.asyncio
SOON = 20.0


def binding(name: str) -> InstallationBinding:
    return InstallationBinding(
        instance_uuid="instance",
        workspace_uuid=f"workspace-{name}",
        placement_generation=1,
        installation_uuid=f"installation-{name}",
        runtime_revision=1,
        artifact_digest="a" * 64,
    )


def context(run_id: str = "run", **changes: Any) -> RunnerContext:
    data: dict[str, Any] = {
        "run_id": run_id,
        "trigger": {"type": "message.received"},
        "event": {"event_id": "e1", "event_type": "message.received", "source": "test"},
        "actor": {"actor_type": "user", "actor_id": "7"},
        "input": {"text": "hello"},
        "delivery": {"automatic_reply": True, "surface": "platform"},
        "resources": {
            "tools": [{"tool_name": "weather", "operations": ["detail", "call"]}],
            "knowledge_bases": [{"kb_id": "kb-1", "kb_name": "One"}, {"kb_id": "kb-2", "kb_name": "Two"}],
        },
        "context": {"available_apis": {"history_page": True}},
        "state": {"conversation": {"session": "STATE-CANARY"}},
        "runtime": {"deadline_at": time.time() + 600},
    }
    return RunnerContext.model_validate({**data, **changes})


class Host:
    """The RPC boundary: notes with which installation each action left, and answers or waits as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, dict[str, Any]]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.reached = asyncio.Queue[str]()
        self.cancelled: list[str] = []
        self.unwilling: asyncio.Event | None = None
        """When set: a cancelled action only ends once this happens."""
        self.active = 0
        self.most = 0
        self.answer: Callable[[dict[str, Any]], Any] = lambda parameters: {"echo": parameters}

    async def call_action(
        self, action: PluginToRuntimeAction, data: dict[str, Any], timeout: float = 15.0, **_: Any
    ) -> dict[str, Any]:
        bound = current_binding(self)
        self.calls.append((action.value, bound.installation_uuid if bound else None, data))
        self.active += 1
        self.most = max(self.most, self.active)
        key = str(data.get("parameters", {}).get("gate", ""))
        self.reached.put_nowait(key)
        try:
            if key in self.gates:
                await self.gates[key].wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            if self.unwilling is not None:
                await self.unwilling.wait()
            raise
        finally:
            self.active -= 1
        if action is PluginToRuntimeAction.CALL_TOOL:
            return {"result": self.answer(data["parameters"])}
        if action is PluginToRuntimeAction.RETRIEVE_KNOWLEDGE_BASE:
            return {"results": [{"kb": data.get("kb_id")}]}
        return {"items": [], "has_more": False}


class Act(Runner):
    """A runner whose run is whatever the test says."""

    def __init__(self, host: Host, body: Callable[[Act, RunnerContext], Awaitable[None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.body = body
        self.bind_runtime(plugin_runtime_handler=host, plugin_config={})  # type: ignore[no-untyped-call]

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override]
        await self.body(self, ctx)
        yield RunnerResult.run_completed(ctx.run_id)


async def invoke(
    host: Host,
    body: Callable[[Act, RunnerContext], Awaitable[None]],
    *,
    ctx: RunnerContext | None = None,
    bound: InstallationBinding | None = None,
) -> None:
    """One run as a worker drives it: in its own task and invocation scope."""

    async def drive() -> None:
        with bind_invocation(host, config={}, binding=bound):
            results = [result.type async for result in Act(host, body).invoke(ctx or context())]
        assert results == ["run.completed"]

    await asyncio.wait_for(asyncio.create_task(drive(), context=contextvars.Context()), SOON)


class Client:
    """A plain MCP client over HTTP, outside of every run."""

    def __init__(self, server: McpServer, http: aiohttp.ClientSession) -> None:
        self.server, self.http = server, http

    async def post(self, payload: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(
            self.server.url,
            data=json.dumps(payload),
            headers={"Content-Type": "application/json", **self.server.headers, **headers},
            timeout=aiohttp.ClientTimeout(SOON),
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def rpc(self, method: str, params: Any = None, request_id: Any = 1) -> Any:
        status, body = await self.post({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}})
        assert status == 200, (status, body)
        return body

    async def call(self, tool: str, request_id: Any = 1, **arguments: Any) -> Any:
        return (await self.rpc("tools/call", {"name": tool, "arguments": arguments}, request_id))["result"]

    async def weather(self, request_id: Any = 1, **parameters: Any) -> Any:
        return await self.call("langbot_call_tool", request_id, tool_name="weather", parameters=parameters)


@contextlib.asynccontextmanager
async def client(server: McpServer) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield Client(server, http)


def text_of(result: dict[str, Any]) -> str:
    return str(result["content"][0]["text"])


@pytest_asyncio.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """After every test: no listener, no thread and no task that was not there before."""
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    yield
    gc.collect()
    assert not [each for each in tools_listener._LISTENERS.values() if each._runner is not None], "the listener is still open"
    assert set(threading.enumerate()) <= threads
    for slots in (langbot_tools._host, host_calls._cancelling):
        assert (slots._taken, slots._waiting) == ({}, {}), "nobody is remembered"
    left = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=5)
    assert not [task for task in left if not task.done()]


# ------------------------------------------------------------------ authority


async def test_a_call_leaves_the_worker_as_the_installation_whose_run_is_asking() -> None:
    """Our rule: two installations' runs with the same run id, at the same time, each call under its own binding."""
    host = Host()
    ready: asyncio.Queue[tuple[str, McpServer]] = asyncio.Queue()
    finish = asyncio.Event()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools:
            bound = current_binding()
            assert bound is not None
            await ready.put((bound.installation_uuid, tools.server))
            await finish.wait()

    runs = [
        asyncio.create_task(invoke(host, body, ctx=context("same-run"), bound=binding(name)), context=contextvars.Context())
        for name in ("a", "b")
    ]
    servers = dict([await asyncio.wait_for(ready.get(), SOON), await asyncio.wait_for(ready.get(), SOON)])
    async with client(servers["installation-a"]) as first, client(servers["installation-b"]) as second:
        await asyncio.gather(*(who.weather(i, who=name) for i in range(10) for who, name in ((first, "a"), (second, "b"))))
    finish.set()
    await asyncio.gather(*runs)
    assert len(host.calls) == 20
    assert all(installation == f"installation-{data['parameters']['who']}" for _, installation, data in host.calls)


async def test_one_installations_bearer_opens_nothing_on_anothers_path() -> None:
    """Our rule: bearer and path belong together; the listener is shared, the endpoints are not."""
    host = Host()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as one, open_tools(runner, ctx) as two, client(one.server) as caller:
            assert one.server.url.split("/")[2] == two.server.url.split("/")[2]
            assert one.server.url != two.server.url
            status, _ = await caller.post({"jsonrpc": "2.0", "id": 1, "method": "ping"}, **two.server.headers)
            assert status == 401
            status, _ = await caller.post({"jsonrpc": "2.0", "id": 1, "method": "ping"})
            assert status == 200

    await invoke(host, body)


async def test_a_session_never_takes_another_installations_run() -> None:
    """Authority table: a live process belongs to its binding; a run of another (or after the close) is refused."""
    host = Host()
    tools = await open_session_tools(binding("a"))

    async def fits(runner: Act, ctx: RunnerContext) -> None:
        async with tools.attach(runner, ctx):
            assert tools.attached

    async def foreign(runner: Act, ctx: RunnerContext) -> None:
        with pytest.raises(Refused, match="not available"):
            async with tools.attach(runner, ctx):
                pytest.fail("attached")

    try:
        await invoke(host, fits, bound=binding("a"))
        await invoke(host, foreign, bound=binding("b"))
    finally:
        await tools.close()
    await invoke(host, foreign, bound=binding("a"))


async def test_the_listener_runs_with_nobodys_authority() -> None:
    """Measured: a server started inside a run carries that run's invocation into every later request; ours does not."""
    host = Host()
    seen: list[Any] = []
    marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="none")

    async def body(runner: Act, ctx: RunnerContext) -> None:
        marker.set("the run")

        async def handler(payload: Any) -> Any:
            seen.append((current_binding(), marker.get()))
            return {"jsonrpc": "2.0", "id": 1, "result": {}}

        endpoint = await tools_listener.open_endpoint(handler)
        try:
            server = McpServer("x", "http", endpoint.url, {"Authorization": f"Bearer {endpoint.bearer}"})
            async with client(server) as caller:
                await caller.post({})
        finally:
            await endpoint.close()

    await invoke(host, body, bound=binding("a"))
    assert seen == [(None, "none")]


# ------------------------------------------------------------------ life of a bearer


async def test_a_bearer_is_refused_from_the_moment_its_run_ends() -> None:
    """Authority table: MCP bearer, ends at run end; another run's keeps working on the same listener."""
    host = Host()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as still, client(still.server) as other:
            async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
                assert (await caller.weather())["structuredContent"] == {"echo": {}}
            async with client(tools.server) as late:
                status, body = await late.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
                assert (status, body["error"]) == (401, "the bearer is missing or no longer valid")
            assert (await other.weather())["structuredContent"] == {"echo": {}}

    await invoke(host, body)


async def test_a_call_in_flight_at_the_runs_end_is_cancelled_and_says_so() -> None:
    """Our rule: the host call is cancelled and awaited, the agent reads why, and nothing of it runs on."""
    host = Host()
    host.gates["slow"] = asyncio.Event()
    waiting: list[asyncio.Task[Any]] = []
    clients = contextlib.AsyncExitStack()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools:
            caller = await clients.enter_async_context(client(tools.server))
            waiting.append(asyncio.create_task(caller.weather(gate="slow"), context=contextvars.Context()))
            assert await asyncio.wait_for(host.reached.get(), SOON) == "slow"

    async with clients:
        await invoke(host, body)
        assert host.cancelled == ["slow"]
        assert host.active == 0
        result = await asyncio.wait_for(waiting[0], SOON)
        assert result["isError"] is True
        assert "run has ended" in text_of(result)


async def test_a_session_keeps_its_address_and_answers_only_while_a_run_is_attached() -> None:
    """DESIGN 7: an agent that cannot replace its servers keeps one address; between runs it reads that no run is active."""
    host = Host()
    tools = await open_session_tools(None)
    address = tools.server

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with tools.attach(runner, ctx), client(address) as caller:
            assert not (await caller.weather(run=ctx.run_id)).get("isError")

    try:
        async with client(address) as caller:
            assert (await caller.rpc("tools/list"))["result"] == {"tools": []}
            for run_id in ("one", "two"):
                await invoke(host, body, ctx=context(run_id))
                assert tools.server == address
                result = await caller.weather()
                assert result["isError"] is True
                assert "No LangBot run is active" in text_of(result)
                names = {tool["name"] for tool in (await caller.rpc("tools/list"))["result"]["tools"]}
                assert "langbot_call_tool" in names
    finally:
        await tools.close()
    assert [data["run_id"] for _, _, data in host.calls] == ["one", "two"]


async def test_closing_a_session_while_a_run_is_attached_ends_its_calls() -> None:
    """Revocation closes sessions under running runs: the bearer is refused and no call stays."""
    host = Host()
    host.gates["slow"] = asyncio.Event()
    tools = await open_session_tools(None)

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with tools.attach(runner, ctx), client(tools.server) as caller:
            call = asyncio.create_task(caller.weather(gate="slow"), context=contextvars.Context())
            await asyncio.wait_for(host.reached.get(), SOON)
            await tools.close()
            assert host.cancelled == ["slow"]
            assert (await asyncio.wait_for(call, SOON))["isError"] is True

    await invoke(host, body)
    await tools.close()


async def test_a_closed_session_refuses_before_its_calls_have_ended() -> None:
    """A revoked bearer opens nothing, also while a call that it started is slow to go."""
    host = Host()
    host.gates["slow"], host.unwilling = asyncio.Event(), asyncio.Event()
    tools = await open_session_tools(None)

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with tools.attach(runner, ctx), client(tools.server) as caller:
            call = asyncio.create_task(caller.weather(gate="slow"), context=contextvars.Context())
            await asyncio.wait_for(host.reached.get(), SOON)
            closing = asyncio.create_task(tools.close())
            await asyncio.sleep(0)
            assert (await caller.post({"jsonrpc": "2.0", "id": 1, "method": "ping"}))[0] == 401
            assert not closing.done()
            assert host.unwilling is not None
            host.unwilling.set()
            await asyncio.wait_for(closing, SOON)
            assert (await asyncio.wait_for(call, SOON))["isError"] is True

    await invoke(host, body)


async def test_a_second_run_cannot_attach_to_a_session_in_use() -> None:
    """Our rule: one run at a time per live session; the first one keeps its tools."""
    host = Host()
    tools = await open_session_tools(None)

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with tools.attach(runner, ctx), client(tools.server) as caller:
            with pytest.raises(RuntimeError, match="another run"):
                async with tools.attach(runner, ctx):
                    pytest.fail("attached twice")
            assert not (await caller.weather()).get("isError")

    try:
        await invoke(host, body)
    finally:
        await tools.close()


async def test_a_cancelled_run_leaves_neither_bearer_nor_call() -> None:
    """The host cancels a run by cancelling its task, here twice while calls are in flight."""
    host = Host()
    host.gates["slow"] = asyncio.Event()
    started: asyncio.Future[AddressedTools] = asyncio.get_running_loop().create_future()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools:
            started.set_result(tools)
            await asyncio.Event().wait()

    run = asyncio.create_task(invoke(host, body), context=contextvars.Context())
    tools = await asyncio.wait_for(started, SOON)
    async with client(tools.server) as caller:
        call = asyncio.create_task(caller.weather(gate="slow"))
        await asyncio.wait_for(host.reached.get(), SOON)
        run.cancel()
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert (await asyncio.wait_for(call, SOON))["isError"] is True
    assert host.cancelled == ["slow"]


async def test_the_bearer_appears_in_no_repr_and_not_in_the_address() -> None:
    """Secrets: the bearer is in the header only; the objects that hold it print without it."""
    tools = await open_session_tools(None)
    try:
        bearer = tools.server.headers["Authorization"].removeprefix("Bearer ")
        assert len(bearer) >= 43
        for shown in (repr(tools.server), repr(tools), repr(tools._endpoint), tools.server.url):
            assert bearer not in shown
    finally:
        await tools.close()


# ------------------------------------------------------------------ what the tools show


async def test_the_current_event_has_no_state_and_no_attachment_bodies() -> None:
    """Measured: the SDK's own answer shows the stored state to the model; ours leaves it and large bodies out."""
    host = Host()
    body64 = "data:image/png;base64," + "QUFB" * 2000
    given = {
        "text": "look",
        "contents": [{"type": "text", "text": "w" * 3000}, {"type": "image_base64", "image_base64": body64}],
        "attachments": [{"ref": "a0", "type": "image", "name": "x.png", "content": body64}],
    }

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            result = await caller.call("langbot_get_current_event")
            shown = json.dumps(result)
            assert "STATE-CANARY" not in shown
            assert "QUFBQUFB" not in shown
            assert f"({len(body64)} characters left out)" in shown
            assert "w" * 3000 in shown
            assert result["structuredContent"]["actor"]["actor_id"] == "7"

    await invoke(host, body, ctx=context(input=given))


async def test_only_the_chosen_knowledge_bases_are_listed_and_searched() -> None:
    """The form narrows what the host granted; asking for another one is refused before anything is sent."""
    host = Host()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx, knowledge_bases=["kb-2"]) as tools, client(tools.server) as caller:
            listed = await caller.call("langbot_list_assets")
            assert [each["kb_id"] for each in listed["structuredContent"]["knowledge_bases"]] == ["kb-2"]
            refused = await caller.call("langbot_retrieve_knowledge", kb_id="kb-1", query_text="x")
            assert refused["isError"] is True
            assert host.calls == []
            found = await caller.call("langbot_retrieve_knowledge", kb_id="kb-2", query_text="x")
            assert found["structuredContent"] == {"result": [{"kb": "kb-2"}]}
        async with open_tools(runner, ctx, knowledge_bases=[]) as tools, client(tools.server) as caller:
            names = {tool["name"] for tool in (await caller.rpc("tools/list"))["result"]["tools"]}
            assert "langbot_retrieve_knowledge" not in names
            assert "langbot_history_page" in names

    await invoke(host, body)


async def test_a_result_too_long_is_cut_and_says_so() -> None:
    """Bounded everything: what exceeds a bound is a typed, visible truncation."""
    host = Host()
    host.answer = lambda parameters: {"text": "é" * parameters["size"]}

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            whole = await caller.weather(size=limits.MCP_RESULT_CHARS - 100)
            assert whole["structuredContent"]["text"] == "é" * (limits.MCP_RESULT_CHARS - 100)
            cut = await caller.weather(size=limits.MCP_RESULT_CHARS * 3)
            assert "structuredContent" not in cut
            assert cut["_meta"]["langbot/truncated"]["kept"] == limits.MCP_RESULT_CHARS
            whole_size = limits.MCP_RESULT_CHARS * 3 + len(json.dumps({"text": ""}))
            assert text_of(cut).endswith(f"of {whole_size} characters]")

    await invoke(host, body)


async def test_what_the_host_refuses_is_a_tool_error_the_model_can_read() -> None:
    """MCP: a failing tool answers with ``isError``, so that the model can react; the connection lives on."""
    host = Host()

    def broken(parameters: dict[str, Any]) -> Any:
        raise ValueError("no such city")

    host.answer = broken

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            assert text_of(await caller.weather()) == "no such city"
            for name, arguments in (
                ("langbot_call_tool", {"tool_name": "other"}),
                ("langbot_call_tool", {"nonsense": 1}),
                ("missing", {}),
            ):
                assert (await caller.call(name, **arguments))["isError"] is True

    await invoke(host, body)


# ------------------------------------------------------------------ many calls


async def test_a_flood_of_calls_is_bounded_and_a_slow_call_delays_no_other() -> None:
    """Our rule: 8 at the host, 64 waiting, the rest told to try again; other runs are not touched."""
    host = Host()
    host.gates["slow"] = asyncio.Event()
    room = limits.MCP_CALLS_AT_ONCE + limits.MCP_CALLS_WAITING

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with (
            open_tools(runner, ctx) as tools,
            open_tools(runner, ctx) as others,
            client(tools.server) as caller,
            client(others.server) as other,
        ):
            wanted = {"name": "langbot_call_tool", "arguments": {"tool_name": "weather", "parameters": {"gate": "slow"}}}
            message = {"jsonrpc": "2.0", "method": "tools/call", "params": wanted}
            calls = [asyncio.create_task(tools.answer({**message, "id": i})) for i in range(200)]
            first_done = asyncio.as_completed(calls, timeout=SOON)
            for _ in range(200 - room):
                assert "Too many" in text_of((await next(first_done))["result"])
            assert host.most == limits.MCP_CALLS_AT_ONCE
            assert (await caller.rpc("ping"))["result"] == {}
            assert not (await other.weather(who="other")).get("isError")
            host.gates["slow"].set()
            results = [answer["result"] for answer in await asyncio.wait_for(asyncio.gather(*calls), SOON)]
            assert sum(1 for result in results if not result.get("isError")) == room
            assert host.most <= limits.MCP_CALLS_AT_ONCE + 1

    await invoke(host, body)


async def greedy(host: Host, name: str, end: asyncio.Event) -> list[dict[str, Any]]:
    """Three runs of one installation with eight calls each, which the host answers never; what the agents read in the end."""
    answers: list[dict[str, Any]] = []

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with contextlib.AsyncExitStack() as clients:
            async with open_tools(runner, ctx) as tools:
                caller = await clients.enter_async_context(client(tools.server))
                calls = [asyncio.create_task(caller.weather(n, gate="never")) for n in range(limits.MCP_CALLS_AT_ONCE)]
                await end.wait()
            answers.extend(await asyncio.gather(*calls))

    await asyncio.gather(*(invoke(host, body, ctx=context(f"run {n}"), bound=binding(name)) for n in range(3)))
    return answers


async def at_the_host(host: Host, count: int) -> None:
    """Wait until so many calls are there at once."""
    async with asyncio.timeout(SOON):
        while host.active < count:
            await host.reached.get()


async def test_nobodys_calls_take_every_action_of_the_connection() -> None:
    """Our rule: 16 of an installation, however many runs it has, and 64 of all; what waits ends with its run."""
    host, end = Host(), asyncio.Event()
    host.gates["never"] = asyncio.Event()
    each, most = limits.MCP_CALLS_PER_INSTALLATION, limits.MCP_CALLS_PER_PROCESS
    assert most * 2 <= MAX_INFLIGHT_ACTIONS

    async def modest(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            assert not (await caller.weather()).get("isError")

    runs = [asyncio.create_task(greedy(host, "0", end))]
    await at_the_host(host, each)
    await invoke(host, modest, bound=binding("modest"))
    assert host.most == each + 1
    runs += [asyncio.create_task(greedy(host, str(number), end)) for number in range(1, most // each + 1)]
    await at_the_host(host, most)
    end.set()
    answers = await asyncio.wait_for(asyncio.gather(*runs), SOON)
    assert host.most == most
    assert {text_of(answer) for installation in answers for answer in installation} == {langbot_tools._RUN_ENDED}
    assert (host.active, sum(map(len, answers))) == (0, len(runs) * 3 * limits.MCP_CALLS_AT_ONCE)


async def test_a_call_whose_turn_does_not_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: waiting is bounded, and the agent reads that the call was not made."""
    host, end = Host(), asyncio.Event()
    host.gates["never"] = asyncio.Event()
    monkeypatch.setattr(limits, "MCP_CALL_WAIT", 0.3)
    run = asyncio.create_task(greedy(host, "a", end))
    await at_the_host(host, limits.MCP_CALLS_PER_INSTALLATION)

    async def late(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            result = await caller.weather(who="late")
            assert (result["isError"], "was not made" in text_of(result)) == (True, True)

    await invoke(host, late, bound=binding("a"))
    assert not [data for _, _, data in host.calls if data["parameters"].get("who") == "late"]
    end.set()
    await run


async def test_a_free_slot_goes_to_whoever_has_the_fewest() -> None:
    """Our rule: nobody waits behind another's queue, and whoever stops waiting is in nobody's way."""
    slots, order = FairSlots(2, 2), list[str]()
    ends = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")}

    async def use(name: str) -> None:
        async with slots.one(name[0]):
            order.append(name)
            await ends[name].wait()

    wanted = ["a1", "a2", "b1", "c1", "b2", "a4"]
    tasks = {name: asyncio.create_task(use(name)) for name in ends}
    await asyncio.sleep(0)
    tasks["a3"].cancel()
    for number, ended in enumerate(("a1", "b1", "c1", "b2", "a2", "a4")):
        assert order == wanted[: number + 2]
        ends[ended].set()
        await asyncio.wait({tasks[ended]}, timeout=SOON)
        await asyncio.sleep(0)
    assert tasks["a3"].cancelled()
    assert (slots._taken, slots._waiting) == ({}, {})


async def test_a_client_can_cancel_its_own_call() -> None:
    """MCP ``notifications/cancelled``: the named call ends, another stays; an id used twice is left alone."""
    host = Host()
    host.gates = {name: asyncio.Event() for name in ("one", "two", "twin")}

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            calls = {name: asyncio.create_task(caller.weather(name, gate=name)) for name in ("one", "two")}
            twins = [asyncio.create_task(caller.weather("same", gate="twin")) for _ in range(2)]
            for _ in range(4):
                await asyncio.wait_for(host.reached.get(), SOON)
            for name in ("one", "same", "unknown"):
                note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": name}}
                assert await caller.post(note) == (202, None)
            assert text_of(await asyncio.wait_for(calls["one"], SOON)) == "The call was cancelled."
            assert host.cancelled == ["one"]
            for gate in host.gates.values():
                gate.set()
            rest = await asyncio.wait_for(asyncio.gather(calls["two"], *twins), SOON)
            assert not any(result.get("isError") for result in rest)

    await invoke(host, body)


# ------------------------------------------------------------------ protocol


@pytest.mark.parametrize("asked", [*langbot_tools.PROTOCOL_REVISIONS, "2099-01-01", None, 7])
async def test_initialize_answers_the_asked_revision_or_the_newest(asked: Any) -> None:
    """MCP lifecycle: the asked revision when supported, otherwise another supported one."""
    tools = await open_session_tools(None)
    try:
        async with client(tools.server) as caller:
            result = (await caller.rpc("initialize", {"protocolVersion": asked, "capabilities": {}}))["result"]
            known = asked in langbot_tools.PROTOCOL_REVISIONS
            assert result["protocolVersion"] == (asked if known else "2025-11-25")
            assert result["capabilities"] == {"tools": {"listChanged": False}}
            assert result["serverInfo"]["name"] == "langbot_agent"
            assert await caller.post({"jsonrpc": "2.0", "method": "notifications/initialized"}) == (202, None)
    finally:
        await tools.close()


@pytest.mark.parametrize(
    ("payload", "status", "code"),
    [
        ({"jsonrpc": "2.0", "id": 1, "method": "server/discover"}, 200, -32601),
        ({"jsonrpc": "2.0", "id": "x", "method": "resources/list"}, 200, -32601),
        ([], 200, -32600),
        (17, 200, -32600),
        (None, 200, -32600),
        ("ping", 200, -32600),
        ({"jsonrpc": "2.0", "id": {"a": 1}, "method": "ping"}, 200, -32600),
        ({"jsonrpc": "2.0", "id": 1}, 200, -32601),
        ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}] * (limits.MCP_BATCH + 1), 200, -32600),
    ],
)
async def test_what_is_not_understood_is_a_json_rpc_error(payload: Any, status: int, code: int) -> None:
    """Clients probe (claude 0.101 asks for ``server/discover``): an HTTP error would make them give the server up."""
    tools = await open_session_tools(None)
    try:
        async with client(tools.server) as caller:
            got, body = await caller.post(payload)
            assert (got, body["error"]["code"]) == (status, code)
            assert (await caller.rpc("ping"))["result"] == {}
    finally:
        await tools.close()


async def test_a_batch_is_answered_message_by_message() -> None:
    """JSON-RPC 2.0 batches (MCP 2025-03-26): answers for requests only, none for notifications and answers."""
    host = Host()
    host.gates["slow"] = asyncio.Event()

    async def body(runner: Act, ctx: RunnerContext) -> None:
        async with open_tools(runner, ctx) as tools, client(tools.server) as caller:
            call = {"name": "langbot_call_tool", "arguments": {"tool_name": "weather"}}
            status, answers = await caller.post(
                [
                    {"jsonrpc": "2.0", "id": 1, "method": "ping"},
                    {"jsonrpc": "2.0", "method": "notifications/initialized"},
                    {"jsonrpc": "2.0", "id": 9, "result": {}},
                    {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
                    5,
                ]
            )
            assert status == 200
            assert [answer.get("id") for answer in answers] == [1, 2, None]
            assert await caller.post([{"jsonrpc": "2.0", "method": "notifications/initialized"}]) == (202, None)

    await invoke(host, body)


# ------------------------------------------------------------------ the listener against bad clients


async def raw(server: McpServer, data: bytes, *, end: bool = False) -> bytes:
    """Send bytes to the listener and read until it closes or the first answer is whole."""
    port = int(server.url.split("/")[2].split(":")[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            if end:
                writer.write_eof()
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON)
        return b""
    except asyncio.IncompleteReadError as exc:
        return exc.partial
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def head(server: McpServer, method: str = "POST", path: str = "", **headers: str) -> bytes:
    """A request head with the right bearer and host unless told otherwise (a value of ``-`` leaves a header out)."""
    place = server.url.split("/", 3)
    fields = {"Host": place[2], "Authorization": server.headers["Authorization"], "Content-Length": "2"}
    fields.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"{method} {path or '/' + place[3]} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v != "-")]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "", {}, 202),
        ("POST", "", {"Host": "localhost:1"}, 202),
        ("POST", "", {"Host": "[::1]:99"}, 202),
        ("POST", "", {"Origin": "http://127.0.0.1:9999"}, 202),
        ("POST", "", {"Host": "evil.example:80"}, 403),
        ("POST", "", {"Host": "127.0.0.1.evil.example"}, 403),
        ("POST", "", {"Host": "127.0.0.1:x"}, 403),
        ("POST", "", {"Host": "-"}, 400),
        ("POST", "", {"Host": ""}, 403),
        ("POST", "", {"Origin": "https://evil.example"}, 403),
        ("POST", "", {"Origin": "null"}, 403),
        ("POST", "", {"Origin": "file://localhost"}, 403),
        ("GET", "", {"Content_Length": "-"}, 405),
        ("DELETE", "", {"Content_Length": "-"}, 405),
        ("OPTIONS", "", {"Content_Length": "-"}, 405),
        ("POST", "/.well-known/oauth-protected-resource", {}, 404),
        ("GET", "/", {"Content_Length": "-"}, 404),
        ("POST", "/mcp/other", {}, 401),
        ("POST", "", {"Authorization": "-"}, 401),
        ("POST", "", {"Authorization": "Bearer wrong"}, 401),
        ("POST", "", {"Authorization": "Bearer " + "\udce9".encode("utf-8", "surrogateescape").decode("latin-1")}, 401),
        ("POST", "", {"Authorization": "Basic eDp5"}, 401),
        ("POST", "", {"Content_Encoding": "gzip"}, 415),
        ("POST", "", {"Content_Length": str(limits.MCP_BODY_BYTES + 1)}, 413),
    ],
)
async def test_every_request_is_judged_before_its_body_is_read(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """Host and Origin against DNS rebinding (MCP transport rules), GET 405 (no event stream), then bearer, then size."""
    tools = await open_session_tools(None)
    try:
        answer = await raw(tools.server, head(tools.server, method, path, **headers) + (b"{}" if status == 202 else b""))
        assert answer.split(b" ")[1] == str(status).encode(), answer
        if status == 405:
            assert b"Allow: POST" in answer
    finally:
        await tools.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_one_mebibyte_is_refused_while_it_arrives(chunked: bool) -> None:
    """The cap holds for announced and for chunked bodies; one byte less is read and answered."""
    tools = await open_session_tools(None)
    try:
        async with client(tools.server) as caller:
            for size, status in ((limits.MCP_BODY_BYTES, 200), (limits.MCP_BODY_BYTES + 1, 413)):
                body = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{}'
                body = body + b" " * (size - len(body) - 1) + b"}"

                async def pieces(whole: bytes = body) -> AsyncIterator[bytes]:
                    for start in range(0, len(whole), 65536):
                        yield whole[start : start + 65536]

                with contextlib.suppress(aiohttp.ClientOSError):
                    async with caller.http.post(
                        tools.server.url, data=pieces() if chunked else io.BytesIO(body), headers=dict(tools.server.headers)
                    ) as answer:
                        assert answer.status == status
    finally:
        await tools.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b"{}{}"])
async def test_a_body_that_is_not_json_is_a_parse_error(text: bytes) -> None:
    """JSON-RPC -32700, also for nesting that exhausts the decoder and for bytes that are no text."""
    tools = await open_session_tools(None)
    try:
        async with (
            client(tools.server) as caller,
            caller.http.post(tools.server.url, data=text, headers=dict(tools.server.headers)) as answer,
        ):
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == -32700
    finally:
        await tools.close()


async def test_a_body_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled client holds one connection for a bounded time; others are served meanwhile."""
    monkeypatch.setattr(limits, "MCP_BODY_SECONDS", 0.3)
    tools = await open_session_tools(None)
    try:
        stalled = asyncio.create_task(raw(tools.server, head(tools.server, Content_Length="500") + b"{"))
        async with client(tools.server) as caller:
            assert (await caller.rpc("ping"))["result"] == {}
        assert b" 408 " in await stalled
    finally:
        await tools.close()


async def test_connections_that_prove_nothing_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any local user can connect: silent connections end, their number is capped, an agent's own connection stays."""
    monkeypatch.setattr(limits, "MCP_UNPROVEN_SECONDS", 0.3)
    monkeypatch.setattr(limits, "MCP_CONNECTIONS", 5)
    tools = await open_session_tools(None)
    port = int(tools.server.url.split("/")[2].split(":")[1])
    request = head(tools.server) + b"{}"
    try:
        agent_reads, agent_writes = await asyncio.open_connection("127.0.0.1", port)
        agent_writes.write(request)
        assert (await asyncio.wait_for(agent_reads.readuntil(b"\r\n\r\n"), SOON)).startswith(b"HTTP/1.1 202")
        for reader, writer in [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), SOON) == b""
            writer.close()
        agent_writes.write(request)
        assert (await asyncio.wait_for(agent_reads.readuntil(b"\r\n\r\n"), SOON)).startswith(b"HTTP/1.1 202")
        agent_writes.close()
    finally:
        await tools.close()


@contextlib.asynccontextmanager
async def endpoints(handler: Callable[[Any], Awaitable[Any]], *owners: str) -> AsyncIterator[list[McpServer]]:
    """An endpoint for each of these owners, as an agent is given it."""
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for owner in owners:
            endpoint = await tools_listener.open_endpoint(handler, owner=owner)
            stack.push_async_callback(endpoint.close)
            servers.append(McpServer("x", "http", endpoint.url, {"Authorization": f"Bearer {endpoint.bearer}"}))
        yield servers


def port_of(server: McpServer) -> int:
    """Where the listener is."""
    return int(server.url.split("/")[2].split(":")[1])


async def asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: McpServer) -> None:
    """A request over a connection that stays open."""
    writer.write(head(server) + b"{}")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON)).startswith(b"HTTP/1.1 202")


async def ends(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed the connection."""
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), SOON)


async def test_one_installations_requests_leave_room_for_the_others() -> None:
    """Our rule: 32 at a time behind one bearer, 64 of one installation; more are refused in words, and nobody else is."""
    held, let = asyncio.Semaphore(0), asyncio.Event()

    async def handler(payload: Any) -> Any:
        if payload == "hang":
            held.release()
            await let.wait()
        return payload

    async with endpoints(handler, "a", "a", "a", "b") as (*greedy, modest), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(each)) for each in greedy]
        other = await stack.enter_async_context(client(modest))
        calls = [asyncio.create_task(caller.post("hang")) for caller in clients[:2] for _ in range(32)]
        for _ in calls:
            await asyncio.wait_for(held.acquire(), SOON)
        for caller in clients:
            status, body = await caller.post("more")
            assert (status, "too many requests" in body["error"]) == (503, True)
        assert await other.post("hello") == (200, "hello")
        let.set()
        assert await asyncio.gather(*calls) == [(200, "hang")] * 64
        assert [await caller.post("again") for caller in clients] == [(200, "again")] * 3


async def test_of_too_many_idle_connections_the_one_that_is_idle_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: what an agent keeps open and does not use is no reason to refuse it anything."""
    monkeypatch.setattr(limits, "MCP_CONNECTIONS_PER_ENDPOINT", 2)
    monkeypatch.setattr(limits, "MCP_CONNECTIONS_PER_INSTALLATION", 3)

    async def handler(payload: Any) -> Any:
        return None

    async with endpoints(handler, "a", "a", "b") as (one, two, other):
        kept = [await asyncio.open_connection("127.0.0.1", port_of(one)) for _ in range(6)]
        for number, server in ((0, one), (1, one), (0, one), (5, other), (2, one)):
            await asks(*kept[number], server)
        await ends(kept[1][0])
        for number, server in ((3, two), (4, two)):
            await asks(*kept[number], server)
        await ends(kept[0][0])
        for number, server in ((2, one), (3, two), (4, two), (5, other)):
            await asks(*kept[number], server)
        for _, writer in kept:
            writer.close()


async def test_strangers_make_room_for_whoever_comes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Our rule: of the connections that prove nothing the oldest goes, and the log, which is everybody's, is not filled."""
    monkeypatch.setattr(limits, "MCP_UNPROVEN", 5)
    monkeypatch.setattr(limits, "MCP_CONNECTIONS", 8)

    async def handler(payload: Any) -> Any:
        return payload

    async with endpoints(handler, "a") as (server,):
        strangers = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port_of(server)) for _ in range(30)))
        async with client(server) as caller:
            assert await caller.post("hello") == (200, "hello")
        closed = [asyncio.create_task(ends(reader)) for reader, _ in strangers]
        for each in itertools.islice(asyncio.as_completed(closed, timeout=SOON), len(strangers) - limits.MCP_UNPROVEN):
            await each
        async with client(server) as caller:
            assert await caller.post("hello") == (200, "hello")
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*closed)
    gc.collect()
    assert caplog.text == ""


async def test_a_connection_that_finds_no_room_is_cut_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Our rule: agents that have shown their bearers stay; the log, which is everybody's, has nothing of who came too late."""
    monkeypatch.setattr(limits, "MCP_CONNECTIONS", 2)

    async def handler(payload: Any) -> Any:
        return None

    async with endpoints(handler, "a", "b") as servers:
        agents = []
        for server in servers:
            agents.append(await asyncio.open_connection("127.0.0.1", port_of(server)))
            await asks(*agents[-1], server)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(servers[0]))
            await ends(reader)
            writer.close()
        for agent, server in zip(agents, servers, strict=True):
            await asks(*agent, server)
            agent[1].close()
    gc.collect()
    assert caplog.text == ""


async def test_a_closed_endpoint_keeps_no_connection() -> None:
    """Our rule: what belonged to a run leaves with it, also while others have the listener open."""

    async def handler(payload: Any) -> Any:
        return None

    async with endpoints(handler, "a") as (still,):
        async with endpoints(handler, "a") as (server,):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            await asks(reader, writer, server)
        await ends(reader)
        writer.close()
        async with client(still) as other:
            assert await other.post({}) == (202, None)


async def test_closing_does_not_wait_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that stops reading its answer cannot hold a run's end: the connection is cut after a short grace."""
    monkeypatch.setattr(limits, "MCP_STOP_SECONDS", 0.3)
    tools = await open_session_tools(None)
    port = int(tools.server.url.split("/")[2].split(":")[1])

    answering = asyncio.Event()

    async def endless(payload: Any) -> Any:
        answering.set()
        return {"jsonrpc": "2.0", "id": 1, "result": "x" * 50_000_000}

    tools._endpoint.handler = endless
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head(tools.server) + b"{}")
        async with asyncio.timeout(SOON):
            await answering.wait()
            await tools.close()


async def test_the_socket_is_bound_to_loopback_only_and_closed_with_the_last_endpoint() -> None:
    """Our rule: literal 127.0.0.1, a free port, open only while somebody needs it."""
    first, second = await open_session_tools(None), await open_session_tools(None)
    port = int(first.server.url.split("/")[2].split(":")[1])
    listening = {
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    assert f"0100007F:{port:04X}" in listening
    assert not {each for each in listening if each.endswith(f":{port:04X}")} - {f"0100007F:{port:04X}"}
    await first.close()
    async with client(second.server) as caller:
        assert (await caller.rpc("ping"))["result"] == {}
    await second.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_sessions_that_open_and_close_at_the_same_time_share_one_listener_safely() -> None:
    """Starting and stopping the listener is serialized; nobody gets a closed port."""

    async def once(i: int) -> None:
        tools = await open_session_tools(None)
        try:
            async with client(tools.server) as caller:
                assert (await caller.rpc("ping", request_id=i))["result"] == {}
        finally:
            await tools.close()

    for _ in range(5):
        await asyncio.wait_for(asyncio.gather(*(once(i) for i in range(10))), SOON)


async def test_nothing_a_client_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Secrets: not the bearer, not the body, not even of a request that cannot be parsed."""
    caplog.set_level(0)
    tools = await open_session_tools(None)
    try:
        bearer = tools.server.headers["Authorization"].encode()
        await raw(tools.server, b"NONSENSE CANARY-1\r\n" + bearer + b"\r\n\r\n", end=True)
        await raw(tools.server, head(tools.server, X="a\x00CANARY-2") + b"{}", end=True)
        await raw(tools.server, head(tools.server) + b"CANARY-3")
        assert b" 202 " in await raw(tools.server, head(tools.server, X="CANARY-4") + b"{}")
        assert b" 401 " in await raw(tools.server, head(tools.server, Authorization="Bearer CANARY-5") + b"{}")
    finally:
        await tools.close()
    assert "CANARY" not in caplog.text
    assert tools.server.headers["Authorization"].split()[1] not in caplog.text
