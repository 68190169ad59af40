"""LangBot's tools for a coding agent: a run-scoped MCP server, bound to the invocation that the run belongs to.

How to use it (``open_tools`` and ``attach`` inside ``Runner.run`` or a task that it started)::

    async with open_tools(runner, ctx, knowledge_bases=chosen) as tools:      # one run, one bearer
        spec = SessionSpec(..., mcp_servers=(tools.server,))

    tools = await open_session_tools(binding)                                 # once per live agent session
    async with tools.attach(runner, ctx, knowledge_bases=chosen):             # once per run on it
        ...
    await tools.close()                                                       # session closed, installation revoked

``server`` is a :class:`pkg.agent_api.McpServer` (HTTP, the bearer in its headers). An agent whose MCP servers can be replaced
between turns gets a fresh :func:`open_tools` per run; one that cannot keeps the stable address of its
:class:`SessionTools`, behind which only the attached run's tools answer. Elsewhere than on this machine the
address is what ``Launcher.reach(server.url)`` says: ``dataclasses.replace(server, url=...)``.

Guarantees:

- a tool call runs in the context of the run that is attached *now*: its installation binding, its grants, its deadline. A
  session opened under one binding never takes a run of another (:class:`pkg.errors.Refused`);
- at most ``MCP_CALLS_AT_ONCE`` calls of a run are on their way to the host, ``MCP_CALLS_WAITING`` more wait, the next is told
  to try again; a slow call delays no other, and the SDK's own timeouts end it;
- at most ``MCP_CALLS_PER_INSTALLATION`` of an installation and ``MCP_CALLS_PER_PROCESS`` of all of them are on their way, whose
  connection takes 128 actions of every kind; no installation waits behind another's calls, and ``MCP_CALL_WAIT`` at most;
- when the run ends its bearer (or its attachment) is worthless at once, calls in flight are cancelled and awaited, here and
  with the host, and the agent reads that the run has ended; between runs a session's address answers that no run is active,
  while its turn is parked after waiting for the next run;
- a result longer than ``MCP_RESULT_CHARS`` is cut and says so in words and in ``_meta``; the current event carries neither the
  stored state nor the bodies of attachments;
- nothing of a run is kept after it, except the names and schemas of the tools it had (an agent may list them between runs).

Protocol: MCP over HTTP, revisions 2025-11-25, 2025-06-18 and 2025-03-26; an unknown revision is answered with the newest.
An unknown method is a JSON-RPC error, never an HTTP error (clients probe for methods of later revisions).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import json
import types
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final, Protocol

from langbot_plugin.api.agent_tools import LANGBOT_AGENT_MCP_SERVER_NAME, AgentRunExternalTools, agent_tool
from langbot_plugin.api.agent_tools.external_tools import EmptyArgs, RetrieveKnowledgeArgs
from langbot_plugin.api.agent_tools.mcp_protocol import handle_mcp_payload, jsonrpc_error, mcp_tool_error
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.proxies.invocation import current_binding
from langbot_plugin.api.proxies.runner import RunnerAPIProxy
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import host_calls, limits, traceless
from pkg.agent_api import Json, McpServer
from pkg.errors import Refused
from pkg.fair_slots import FairSlots
from pkg.tools_listener import Endpoint, open_endpoint, to_the_end

PROTOCOL_REVISIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Accepted MCP revisions, newest first."""

_SERVER_INFO: Final[Mapping[str, str]] = types.MappingProxyType({"name": LANGBOT_AGENT_MCP_SERVER_NAME, "version": "1"})
_INSTRUCTIONS: Final = (
    "Tools of the chat platform LangBot for the message that is being answered now. "
    "Start with langbot_list_assets to see what this run may use."
)
_NO_RUN: Final = "No LangBot run is active for this session. These tools work only while a message is being answered."
_RUN_ENDED: Final = "The LangBot run has ended, and this call was cancelled with it."
_CALL_CANCELLED: Final = "The call was cancelled."
_BUSY: Final = "Too many LangBot tool calls are waiting already. Wait for some of them, then try again."
_NO_TURN: Final = "LangBot is busy with other tool calls: the turn of this one did not come, it was not made. Try again later."

_host: Final = FairSlots(limits.MCP_CALLS_PER_PROCESS, limits.MCP_CALLS_PER_INSTALLATION)
"""Calls on their way to the host, by the installation's binding; empty when none is."""


class HasRunApi(Protocol):
    """The part of the SDK's ``Runner`` that is needed here."""

    def get_run_api(self, ctx: RunnerContext) -> RunnerAPIProxy:
        """The run's own, untraced proxy (agents report their tool calls themselves)."""
        ...


# ------------------------------------------------------------------ what a caller holds


class SessionTools:
    """LangBot's tools for one live agent session; they answer only for the run that is attached."""

    def __init__(self, binding: InstallationBinding | None, surface: _Surface | None = None) -> None:
        """For an agent session of ``binding``'s installation (``None`` where there is none), whose runs alone may attach.

        There is no address: :meth:`answer` is the way to them. Its owner must close it.
        """
        self._binding = binding
        self._surface = surface or _Surface()

    @property
    def attached(self) -> bool:
        """Whether a run is attached now."""
        return self._surface.run is not None

    @contextlib.asynccontextmanager
    async def attach(
        self, runner: HasRunApi, ctx: RunnerContext, *, knowledge_bases: Collection[str] | None = None
    ) -> AsyncIterator[None]:
        """Let this run's tools answer on the session's address until the block ends.

        ``knowledge_bases`` narrows what the host granted to these ids; ``None`` keeps all of it. Raises
        :class:`pkg.errors.Refused` for another installation's run or a closed session, ``RuntimeError`` when a run is attached.
        """
        invoked = current_binding()
        if self._surface.closed or (invoked is not None and invoked != self._binding):
            raise Refused("coding.tools_unavailable")
        if self._surface.run is not None:
            raise RuntimeError("another run is attached to this session")
        api = host_calls.cancelled_there(runner.get_run_api(ctx), self._binding)
        offered = _RunTools(api, _narrowed(ctx, knowledge_bases))
        run = _Run(offered, contextvars.copy_context(), self._binding)
        self._surface.run = run
        self._surface.listed = run.listed()
        self._surface.unpark()
        try:
            yield
        finally:
            if self._surface.run is run:
                self._surface.run = None
            await run.end()

    async def park(self) -> None:
        """Until the next run is attached let calls wait for it, ``limits.PARKED_TOOL_WAIT`` seconds at most.

        Returns when those that are under way have ended, ``limits.PARKED_CALLS_END`` seconds later at most.
        """
        self._surface.parked = asyncio.Event()
        if self._surface.run is not None:
            await self._surface.run.quiet(limits.PARKED_CALLS_END)

    async def answer(self, payload: Json) -> Json:
        """Answer one decoded MCP payload, for another way than HTTP to the same tools; ``None`` when nothing is to be said."""
        return await self._surface.answer(payload)

    async def close(self) -> None:
        """Cancel what an attached run has in flight; idempotent, finished even under cancellation."""
        self._surface.closed = True
        self._surface.unpark()
        run, self._surface.run = self._surface.run, None
        if run is not None:
            await run.end()


class AddressedTools(SessionTools):
    """The same with a stable MCP address on the loopback listener."""

    def __init__(self, binding: InstallationBinding | None, surface: _Surface, endpoint: Endpoint) -> None:
        """Made by :func:`open_session_tools` only."""
        super().__init__(binding, surface)
        self._endpoint = endpoint
        self._server = McpServer(
            name=LANGBOT_AGENT_MCP_SERVER_NAME,
            transport="http",
            url=endpoint.url,
            headers=types.MappingProxyType({"Authorization": f"Bearer {endpoint.bearer}"}),
        )

    @property
    def server(self) -> McpServer:
        """What the agent is given."""
        return self._server

    async def close(self) -> None:
        """Drop the bearer, too."""
        self._endpoint.revoke()
        try:
            await super().close()
        finally:
            await self._endpoint.close()


async def open_session_tools(binding: InstallationBinding | None) -> AddressedTools:
    """A stable address for a new agent session; see :class:`SessionTools`."""
    surface = _Surface()
    return AddressedTools(binding, surface, await open_endpoint(surface.answer, owner=binding))


@contextlib.asynccontextmanager
async def open_tools(
    runner: HasRunApi, ctx: RunnerContext, *, knowledge_bases: Collection[str] | None = None
) -> AsyncIterator[AddressedTools]:
    """LangBot's tools for this run only, on an address and with a bearer of their own; gone when the block ends."""
    tools = await open_session_tools(current_binding())
    try:
        async with tools.attach(runner, ctx, knowledge_bases=knowledge_bases):
            yield tools
    finally:
        await tools.close()


# ------------------------------------------------------------------ the tools of one run


class _RunTools(AgentRunExternalTools):
    """The SDK's tools with a current event that is safe to show and the form's choice of knowledge bases."""

    @agent_tool(
        name="langbot_get_current_event",
        description="Return the current LangBot event: input, actor, subject, conversation, and what this run may use.",
        args_model=EmptyArgs,
        read_only=True,
    )
    async def get_current_event(self, args: EmptyArgs) -> dict[str, Any]:
        event: dict[str, Any] = await super().get_current_event(args)
        event.pop("state", None)
        shortened: dict[str, Any] = _without_bodies(event)
        return shortened

    @agent_tool(
        name="langbot_retrieve_knowledge",
        description="Retrieve documents from an authorized LangBot knowledge base for the current run.",
        args_model=RetrieveKnowledgeArgs,
        read_only=True,
    )
    async def retrieve_knowledge(self, args: RetrieveKnowledgeArgs) -> list[dict[str, Any]]:
        if args.kb_id not in {item.kb_id for item in self.ctx.resources.knowledge_bases}:
            raise ValueError(f"Knowledge base {args.kb_id} is not available to this run")
        found: list[dict[str, Any]] = await super().retrieve_knowledge(args)
        return found


def _narrowed(ctx: RunnerContext, knowledge_bases: Collection[str] | None) -> RunnerContext:
    if knowledge_bases is None:
        return ctx
    kept = [item for item in ctx.resources.knowledge_bases if item.kb_id in knowledge_bases]
    return ctx.model_copy(update={"resources": ctx.resources.model_copy(update={"knowledge_bases": kept})})


_BODY_KEYS: Final = frozenset({"content", "image_base64", "file_base64", "base64", "url"})


def _without_bodies(value: Any, key: str = "") -> Any:
    """The value with the bodies of attachments replaced by a note of their size; other text stays."""
    if isinstance(value, dict):
        return {name: _without_bodies(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_bodies(item, key) for item in value]
    if isinstance(value, str) and key in _BODY_KEYS and len(value) > limits.MCP_INLINE_CHARS:
        return f"({len(value)} characters left out)"
    return value


class _Run:
    """One attached run: its calls are tasks in its context, bounded in number, all ended with it."""

    def __init__(self, tools: AgentRunExternalTools, context: contextvars.Context, binding: InstallationBinding | None) -> None:
        self._tools = tools
        self._context = context
        self._binding = binding
        self._slots = asyncio.Semaphore(limits.MCP_CALLS_AT_ONCE)
        self._calls: dict[asyncio.Task[dict[str, Json]], Json] = {}
        self._ended = False

    def listed(self) -> list[dict[str, Json]]:
        """The tools this run may use, as MCP describes them."""
        tools: list[dict[str, Json]] = self._tools.mcp_tools()
        return tools

    async def call(self, name: str, arguments: dict[str, Json], request_id: Json) -> dict[str, Json]:
        """One tool call, as its MCP result; what goes wrong is a result too."""
        if self._ended:
            return _tool_error(_RUN_ENDED)
        if len(self._calls) >= limits.MCP_CALLS_AT_ONCE + limits.MCP_CALLS_WAITING:
            return _tool_error(_BUSY)
        task = asyncio.create_task(self._perform(name, arguments), context=self._context.copy())
        self._calls[task] = request_id
        task.add_done_callback(self._forget)
        await asyncio.wait({task})
        if task.cancelled():
            return _tool_error(_RUN_ENDED if self._ended else _CALL_CANCELLED)
        return task.result()

    def cancel(self, request_id: Json) -> None:
        """Cancel the call of that JSON-RPC id, unless several clients of the session use the same id."""
        matching = [task for task, known in self._calls.items() if known == request_id]
        if len(matching) == 1:
            matching[0].cancel()

    async def quiet(self, timeout: float) -> None:
        """Wait until no call is under way, ``timeout`` seconds at most."""
        if self._calls:
            await asyncio.wait(tuple(self._calls), timeout=timeout)

    async def end(self) -> None:
        """Cancel every call and wait until each is gone; idempotent."""
        self._ended = True
        await to_the_end(self._settle())

    async def _settle(self) -> None:
        while self._calls:
            for task in self._calls:
                task.cancel()
            await asyncio.wait(tuple(self._calls))

    async def _perform(self, name: str, arguments: dict[str, Json]) -> dict[str, Json]:
        async with contextlib.AsyncExitStack() as held:
            try:
                async with traceless.within(limits.MCP_CALL_WAIT):
                    await held.enter_async_context(self._slots)
                    await held.enter_async_context(_host.one(self._binding))
            except TimeoutError:
                return _tool_error(_NO_TURN)
            result: dict[str, Json] = await self._tools.call_mcp_tool(name, arguments)
        return _bounded(result)

    def _forget(self, task: asyncio.Task[dict[str, Json]]) -> None:
        del self._calls[task]
        if not task.cancelled():
            task.exception()


def _tool_error(text: str) -> dict[str, Json]:
    result: dict[str, Json] = mcp_tool_error(text)
    return result


def _bounded(result: dict[str, Json]) -> dict[str, Json]:
    """The result, or its beginning with a note when it is longer than ``MCP_RESULT_CHARS``."""
    parts = [str(part.get("text", "")) if part.get("type") == "text" else json.dumps(part) for part in result["content"]]
    size = sum(map(len, parts))
    if size <= limits.MCP_RESULT_CHARS:
        return result
    kept = "\n".join(parts)[: limits.MCP_RESULT_CHARS]
    note = f"[cut by LangBot: the first {len(kept)} of {size} characters]"
    return {
        "content": [{"type": "text", "text": f"{kept}\n{note}"}],
        "isError": bool(result.get("isError", False)),
        "_meta": {"langbot/truncated": {"characters": size, "kept": len(kept)}},
    }


# ------------------------------------------------------------------ the protocol


class _Surface:
    """What an address answers: the attached run's tools, or that there is none."""

    def __init__(self) -> None:
        self.run: _Run | None = None
        self.listed: list[dict[str, Json]] = []
        self.closed = False
        self.parked: asyncio.Event | None = None
        """Set when the next run is there, while a turn waits for it."""

    def unpark(self) -> None:
        """Let the waiting calls go on."""
        parked, self.parked = self.parked, None
        if parked is not None:
            parked.set()

    async def active(self) -> _Run | None:
        """The attached run, waited for while a turn is parked."""
        if self.parked is not None:
            with contextlib.suppress(TimeoutError):
                async with traceless.within(limits.PARKED_TOOL_WAIT):
                    await self.parked.wait()
        return self.run

    async def answer(self, payload: Json) -> Json:
        """The JSON-RPC answer to one payload; ``None`` for notifications and answers."""
        if not isinstance(payload, list):
            return await self._message(payload)
        if not payload:
            return jsonrpc_error(None, -32600, "Invalid request: an empty batch")
        if len(payload) > limits.MCP_BATCH:
            return jsonrpc_error(None, -32600, f"Invalid request: a batch may have {limits.MCP_BATCH} messages")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._message(item)) for item in payload]
        return [answer for task in tasks if (answer := task.result()) is not None] or None

    async def _message(self, message: Json) -> Json:
        if not isinstance(message, dict) or isinstance(message.get("id"), dict | list | bool):
            return jsonrpc_error(None, -32600, "Invalid request")
        method = message.get("method")
        params = message.get("params")
        if method is None and ("result" in message or "error" in message):
            return None
        if message.get("id") is None:
            if method == "notifications/cancelled" and self.run is not None and isinstance(params, dict):
                self.run.cancel(params.get("requestId"))
            return None
        if method == "initialize":
            message = {**message, "params": {**(params if isinstance(params, dict) else {})}}
            if message["params"].get("protocolVersion") not in PROTOCOL_REVISIONS:
                message["params"]["protocolVersion"] = PROTOCOL_REVISIONS[0]
        answer: Json = await handle_mcp_payload(
            message, _Resolver(self, message["id"]), server_info=dict(_SERVER_INFO), instructions=_INSTRUCTIONS
        )
        return answer


@dataclasses.dataclass(frozen=True, slots=True)
class _Resolver:
    """The SDK's view of one request on a surface."""

    surface: _Surface
    request_id: Json

    async def list_tools(self) -> list[dict[str, Any]]:
        return self.surface.listed

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        run = await self.surface.active()
        if run is None:
            return _tool_error(_NO_RUN)
        return await run.call(name, arguments, self.request_id)
