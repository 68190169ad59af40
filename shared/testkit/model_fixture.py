"""A loopback model server that does what the prompt says: local protocol fixture, no model and no vendor's behaviour.

One server speaks, streaming and not, what the real agents of the suite speak to their models: Anthropic Messages
(``/v1/messages``), OpenAI Responses (``/v1/responses``) and chat completions (``/v1/chat/completions``), and Gemini's
``generateContent``. Only requests that carry :data:`KEY` are answered; everything else gets 401.

The last script ``[[ step ;; step ]]`` of a user message decides: step *n* answers the model call that has *n* tool
results after that message; when the steps are used up, the answer is ``done: `` and the last tool result. Steps:

- ``say TEXT``: the text, word by word;
- ``recall``: what earlier user messages say outside of their scripts, oldest first;
- ``hold PATH``: ``holding``, then nothing until a file exists at the path, then ``released``;
- ``run COMMAND``: a call of whatever shell tool the request offers; where that tool has a sandbox (Codex), the call asks to
  leave it, as models do for commands that write; ``sandboxed COMMAND`` does not ask;
- ``call NAME JSON``: a call of the offered tool whose name is ``NAME`` or ends with it;
- ``fail STATUS``: an HTTP error with :data:`REFUSAL` as its message.

Requests that offer no tools (agents ask for titles, summaries and routes on the side) are answered :data:`ASIDE`, or with the
smallest object of the JSON schema they want, whatever they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web

KEY: Final = "sk-fake-canary-5b1e90"
"""The only credential the server takes. It opens nothing else; tests also use it to find leaks."""
REFUSAL: Final = "the fixture refuses this request"
ASIDE: Final = "Aside"
BODY_BYTES: Final = 16 * 1024 * 1024
HOLD_SECONDS: Final = 90.0
"""After this long a held answer is released by itself, so that nothing waits for ever."""
REQUESTS: Final = 2000
"""How many requests one server answers before it refuses: a loop of an agent ends here."""

_SCRIPT: Final = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_TAGGED: Final = re.compile(r"<([\w-]+)>.*?</\1>", re.DOTALL)
_SHELLS: Final = ("Bash", "bash", "run_shell_command", "exec_command", "shell_command", "shell")
TOKENS: Final = {"in": 12, "out": 9, "all": 21}
"""What an answer costs."""
PIECE: Final = 32 * 1024
"""Characters of a call's arguments in one event."""


# ------------------------------------------------------------------ what is asked


@dataclass(frozen=True, slots=True)
class Asked:
    """One model call in terms that all dialects share: the conversation as (role, text), and the tools' parameters."""

    dialect: str
    model: str
    streaming: bool
    history: tuple[tuple[str, str], ...]
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema that the answer must have, if any (Gemini)."""


def _smallest(schema: Mapping[str, Any]) -> Any:
    """The smallest value of a JSON schema of the kind that agents send on the side."""
    if schema.get("enum"):
        return schema["enum"][0]
    match str(schema.get("type", "")).lower():
        case "object":
            properties = schema.get("properties", {})
            return {name: _smallest(properties.get(name, {})) for name in schema.get("required", properties)}
        case "array":
            return []
        case "number" | "integer":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return ASIDE


def flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "\n".join(block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str))


def _anthropic_history(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    history: list[tuple[str, str]] = []
    for message in body.get("messages", ()):
        content = message["content"]
        if isinstance(content, list):
            results = [block for block in content if block.get("type") == "tool_result"]
            history += [("tool", flat(block.get("content"))) for block in results]
        if text := flat(content):
            history.append((speaker(message["role"], text), text))
    return history


def speaker(role: str, text: str) -> str:
    """Who says this in an Anthropic conversation: Claude Code hands on what people say during a turn as a system message."""
    return "user" if role == "system" and _SCRIPT.search(text) else role


def _responses_history(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    history: list[tuple[str, str]] = []
    for item in body.get("input") or ():
        if str(item.get("type", "")).endswith("_output"):
            output = item.get("output")
            history.append(("tool", output if isinstance(output, str) else flat(output) or json.dumps(output)))
        elif item.get("role"):
            history.append((item["role"], flat(item.get("content"))))
    return history


def _chat_history(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], flat(message.get("content"))) for message in body.get("messages", ())]


def _gemini_history(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    history: list[tuple[str, str]] = []
    for content in body.get("contents", ()):
        for part in content.get("parts", ()):
            if "functionResponse" in part:
                history.append(("tool", json.dumps(part["functionResponse"].get("response"))))
            elif part.get("text"):
                history.append((content.get("role", "user"), part["text"]))
    return history


def _tools(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in body.get("tools") or ():
        for item in tool.get("functionDeclarations") or [tool.get("function") or tool]:
            schema = item.get("input_schema") or item.get("parameters") or item.get("parametersJsonSchema") or {}
            found[str(item.get("name") or item.get("type"))] = schema.get("properties") or {}
    return found


# ------------------------------------------------------------------ what is answered


@dataclass(frozen=True, slots=True)
class Say:
    """An answer of text."""

    text: str


@dataclass(frozen=True, slots=True)
class Hold:
    """An answer that does not end before a file exists."""

    path: Path


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fail:
    """An HTTP error."""

    status: int


Step = Say | Hold | Call | Fail


def step_for(asked: Asked) -> Step:
    """What the script in the conversation says to this call."""
    if not asked.tools:
        return Say(json.dumps(_smallest(asked.schema)) if asked.schema else ASIDE)
    if (scripted := last_script(asked.history)) is None:
        return Say("there is no script in this conversation")
    at, script = scripted
    results = [text for role, text in asked.history[at + 1 :] if role == "tool"]
    steps = [step.strip() for step in script.split(";;")]
    if len(results) >= len(steps):
        return Say(f"done: {results[-1].strip()[-2000:]}" if results else "done")
    return _step(steps[len(results)], asked, [text for role, text in asked.history[:at] if role == "user"])


def last_script(history: Sequence[tuple[str, str]]) -> tuple[int, str] | None:
    """The script that counts: the index of the last user message with one, and that message's last script."""
    for at in range(len(history) - 1, -1, -1):
        role, text = history[at]
        if role == "user" and (scripts := _SCRIPT.findall(text)):
            return at, scripts[-1].strip()
    return None


def _step(written: str, asked: Asked, earlier: list[str]) -> Step:
    verb, _, rest = written.partition(" ")
    match verb:
        case "say":
            return Say(rest)
        case "recall":
            said = [_TAGGED.sub("", _SCRIPT.sub("", text)).strip() for text in earlier if _SCRIPT.search(text)]
            return Say(f"recalled: {' | '.join(said)}")
        case "hold":
            return Hold(Path(rest))
        case "run" | "sandboxed":
            return _shell_call(rest, asked.tools, sandboxed=verb == "sandboxed")
        case "call":
            name, _, arguments = rest.partition(" ")
            found = name if name in asked.tools else next((tool for tool in asked.tools if tool.endswith(name)), "")
            if not found:
                return Say(f"{name} is not offered, only: {', '.join(asked.tools)}")
            return Call(found, json.loads(arguments))
        case "fail":
            return Fail(int(rest))
    return Say(f"unknown step: {written}")


def _shell_call(command: str, tools: Mapping[str, Mapping[str, Any]], *, sandboxed: bool) -> Step:
    name = next((shell for shell in _SHELLS if shell in tools), "")
    if not name:
        return Say(f"no shell is offered, only: {', '.join(tools)}")
    properties = tools[name]
    key = "cmd" if "cmd" in properties else "command"
    listed = properties.get(key, {}).get("type") == "array"
    arguments: dict[str, Any] = {key: ["bash", "-c", command] if listed else command}
    if "description" in properties:
        arguments["description"] = "what the script says"
    if "sandbox_permissions" in properties and not sandboxed:
        arguments |= {"sandbox_permissions": "require_escalated", "justification": "the script wants it"}
    return Call(name, arguments)


# ------------------------------------------------------------------ the dialects, outwards


_ids = itertools.count(1)


def new_id(prefix: str) -> str:
    return f"{prefix}{next(_ids):08d}"


class _Stream:
    """Server-sent events of one answer."""

    def __init__(self, response: web.StreamResponse, asked: Asked) -> None:
        self.response = response
        self.asked = asked
        self.whole: list[str] = []
        self._sequence = itertools.count()
        self._id = new_id("item_")

    async def event(self, data: Any, name: str = "") -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.response.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())

    async def begin(self, call: Call | None) -> None:
        """What comes before the first text, or the whole call."""

    async def text(self, text: str) -> None:
        """One piece of text."""

    async def end(self, call: Call | None) -> None:
        """What comes after the last text or the call."""


class AnthropicStream(_Stream):
    """Server-sent events of the Anthropic Messages API."""

    async def send(self, kind: str, **fields: Any) -> None:
        await self.event({"type": kind, **fields}, kind)

    async def started(self, usage: Mapping[str, int]) -> None:
        message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"output_tokens": 1, **usage},
        }
        await self.send("message_start", message=message)

    async def opened(self, index: int, call: Call | None) -> None:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if call is not None:
            block = {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": {}}
        await self.send("content_block_start", index=index, content_block=block)

    async def said(self, index: int, text: str) -> None:
        await self.send("content_block_delta", index=index, delta={"type": "text_delta", "text": text})

    async def called(self, index: int, call: Call) -> None:
        written = json.dumps(call.arguments)
        for at in range(0, len(written), PIECE):
            delta = {"type": "input_json_delta", "partial_json": written[at : at + PIECE]}
            await self.send("content_block_delta", index=index, delta=delta)

    async def ended(self, stop: str, usage: Mapping[str, int]) -> None:
        await self.send("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage=usage)
        await self.send("message_stop")

    async def begin(self, call: Call | None) -> None:
        await self.started({"input_tokens": TOKENS["in"]})
        await self.opened(0, call)
        if call is not None:
            await self.called(0, call)

    async def text(self, text: str) -> None:
        await self.said(0, text)

    async def end(self, call: Call | None) -> None:
        await self.send("content_block_stop", index=0)
        await self.ended("end_turn" if call is None else "tool_use", {"output_tokens": TOKENS["out"]})


class _Responses(_Stream):
    async def _send(self, kind: str, **fields: Any) -> None:
        await self.event({"type": kind, "sequence_number": next(self._sequence), **fields}, kind)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {"id": self._id.replace("item", "resp"), "object": "response", "status": status, **fields}

    def _item(self, call: Call | None, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "status": status}
        if call is not None:
            arguments = json.dumps(call.arguments) if status == "completed" else ""
            return item | {"type": "function_call", "call_id": f"call_{self._id}", "name": call.name, "arguments": arguments}
        content = [{"type": "output_text", "text": "".join(self.whole), "annotations": []}] if status == "completed" else []
        return item | {"type": "message", "role": "assistant", "content": content}

    async def begin(self, call: Call | None) -> None:
        await self._send("response.created", response=self._response("in_progress", output=[]))
        await self._send("response.output_item.added", output_index=0, item=self._item(call, "in_progress"))
        where = {"item_id": self._id, "output_index": 0}
        if call is not None:
            arguments = json.dumps(call.arguments)
            await self._send("response.function_call_arguments.delta", **where, delta=arguments)
            await self._send("response.function_call_arguments.done", **where, arguments=arguments)
        else:
            part = {"type": "output_text", "text": "", "annotations": []}
            await self._send("response.content_part.added", **where, content_index=0, part=part)

    async def text(self, text: str) -> None:
        await self._send("response.output_text.delta", item_id=self._id, output_index=0, content_index=0, delta=text)

    async def end(self, call: Call | None) -> None:
        item = self._item(call, "completed")
        await self._send("response.output_item.done", output_index=0, item=item)
        usage = {
            "input_tokens": TOKENS["in"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": TOKENS["out"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": TOKENS["all"],
        }
        await self._send("response.completed", response=self._response("completed", output=[item], usage=usage))


class _Chat(_Stream):
    async def _send(self, delta: Mapping[str, Any] | None, finish: str | None = None, **fields: Any) -> None:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
        base = {"id": self._id, "object": "chat.completion.chunk", "created": 1, "model": self.asked.model}
        await self.event({**base, "choices": choices, **fields})

    async def begin(self, call: Call | None) -> None:
        await self._send({"role": "assistant", "content": ""})
        if call is not None:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            await self._send({"tool_calls": [{"index": 0, "id": new_id("call_"), "type": "function", "function": function}]})

    async def text(self, text: str) -> None:
        await self._send({"content": text})

    async def end(self, call: Call | None) -> None:
        await self._send({}, "stop" if call is None else "tool_calls")
        usage = {"prompt_tokens": TOKENS["in"], "completion_tokens": TOKENS["out"], "total_tokens": TOKENS["all"]}
        await self._send(None, usage=usage)
        await self.event("[DONE]")


_GEMINI_USAGE: Final = {
    "promptTokenCount": TOKENS["in"],
    "candidatesTokenCount": TOKENS["out"],
    "totalTokenCount": TOKENS["all"],
}


class _Gemini(_Stream):
    async def _send(self, part: Mapping[str, Any], **fields: Any) -> None:
        candidate = {"content": {"role": "model", "parts": [part]}, "index": 0, **fields}
        await self.event({"candidates": [candidate], "usageMetadata": _GEMINI_USAGE})

    async def begin(self, call: Call | None) -> None:
        if call is not None:
            await self._send({"functionCall": {"name": call.name, "args": call.arguments}}, finishReason="STOP")

    async def text(self, text: str) -> None:
        await self._send({"text": text})

    async def end(self, call: Call | None) -> None:
        if call is None:
            await self._send({"text": ""}, finishReason="STOP")


_STREAMS: Final[Mapping[str, type[_Stream]]] = {
    "anthropic": AnthropicStream,
    "responses": _Responses,
    "chat": _Chat,
    "gemini": _Gemini,
}
_HISTORIES: Final = {
    "anthropic": _anthropic_history,
    "responses": _responses_history,
    "chat": _chat_history,
    "gemini": _gemini_history,
}


def _whole(asked: Asked, text: str) -> dict[str, Any]:
    """A text answer that is not streamed."""
    match asked.dialect:
        case "anthropic":
            usage = {"input_tokens": TOKENS["in"], "output_tokens": TOKENS["out"]}
            message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": asked.model}
            content = [{"type": "text", "text": text}]
            return {**message, "content": content, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        case "responses":
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"id": new_id("item_"), "type": "message", "role": "assistant", "status": "completed", "content": [part]}
            return {"id": new_id("resp_"), "object": "response", "status": "completed", "output": [item]}
        case "chat":
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            base = {"id": new_id("c"), "object": "chat.completion", "created": 1, "model": asked.model}
            return base | {"choices": [choice]}
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP", "index": 0}
    return {"candidates": [candidate], "usageMetadata": _GEMINI_USAGE}


# ------------------------------------------------------------------ the server


class ModelFixture:
    """A running server; made by :func:`model_fixture`."""

    def __init__(self) -> None:
        self.url = ""
        """``http://127.0.0.1:PORT``, without a path."""
        self.asked: list[Asked] = []
        """Every model call that offered tools, in order."""
        self.keys = {KEY}
        """The keys that are taken."""
        self.used: list[str] = []
        """The key of every request that was taken, in order."""
        self.refused = 0
        """Requests without the key."""
        self.dropped = 0
        """Held answers whose client has gone away before they were released."""
        self._count = 0

    def application(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/{tail:.*}", self._get)
        app.router.add_post("/{tail:.*}", self._post)
        return app

    async def _get(self, request: web.Request) -> web.StreamResponse:
        model = {"id": "fixture-1", "object": "model", "created": 1, "owned_by": "fixture"}
        return web.json_response({"object": "list", "data": [model], "models": []})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self._count += 1
        if self._count > REQUESTS:
            return web.json_response({"error": {"message": "too many requests of one test run"}}, status=400)
        given = [request.headers.get(name, "") for name in ("x-api-key", "x-goog-api-key", "authorization")]
        known = [value for value in (each.removeprefix("Bearer ") for each in given) if value in self.keys]
        if not known:
            self.refused += 1
            return web.json_response({"error": {"message": "a key that is not the fixture's"}}, status=401)
        self.used.append(known[0])
        body = await request.json()
        if "count" in request.path and "okens" in request.path:
            return web.json_response({"input_tokens": TOKENS["in"], "totalTokens": TOKENS["in"]})
        if (dialect := _dialect(request.path)) is None:
            return web.json_response({"error": {"message": "not a model's path"}}, status=404)
        asked = Asked(
            dialect,
            str(body.get("model") or "fixture-1"),
            bool(body.get("stream")) or "streamGenerateContent" in request.path,
            tuple(_HISTORIES[dialect](body)),
            _tools(body),
            (body.get("generationConfig") or {}).get("responseJsonSchema") or {},
        )
        if asked.tools:
            self.asked.append(asked)
        return await self.answer(request, asked, body)

    async def answer(self, request: web.Request, asked: Asked, body: Mapping[str, Any]) -> web.StreamResponse:
        """Answer a model call as its script says."""
        step = step_for(asked)
        if isinstance(step, Fail):
            error = {"type": "invalid_request_error", "code": step.status, "status": "INVALID_ARGUMENT", "message": REFUSAL}
            return web.json_response({"type": "error", "error": error}, status=step.status)
        if not asked.streaming:
            return web.json_response(_whole(asked, step.text if isinstance(step, Say) else ASIDE))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the agent has cancelled
            await self._stream(_STREAMS[asked.dialect](response, asked), step, request)
        return response

    async def _stream(self, stream: _Stream, step: Step, request: web.Request) -> None:
        call = step if isinstance(step, Call) else None
        await stream.begin(call)
        text = "holding" if isinstance(step, Hold) else step.text if isinstance(step, Say) else ""
        for word in re.findall(r"\S+\s*|\s+", text):
            stream.whole.append(word)
            await stream.text(word)
        if isinstance(step, Hold):
            if not await released(step.path, request):
                self.dropped += 1
                return
            stream.whole.append(" released")
            await stream.text(" released")
        await stream.end(call)


Served = TypeVar("Served", bound=ModelFixture)


def _dialect(path: str) -> str | None:
    endings = {"/messages": "anthropic", "/responses": "responses", "/chat/completions": "chat"}
    found = next((dialect for ending, dialect in endings.items() if path.endswith(ending)), None)
    return found or ("gemini" if path.lower().endswith("generatecontent") else None)


async def released(path: Path, request: web.Request) -> bool:
    """Wait until the file exists (or the bound is over); false when the client goes away before."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    while not path.exists() and loop.time() < end:
        if request.transport is None or request.transport.is_closing():
            return False
        await asyncio.sleep(0.02)
    return True


@contextlib.asynccontextmanager
async def serving(fixture: Served) -> AsyncIterator[Served]:
    """A server on a free loopback port, gone afterwards with every answer it still holds."""
    runner = web.AppRunner(fixture.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        fixture.url = f"http://127.0.0.1:{port}"
        yield fixture
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def model_fixture() -> AsyncIterator[ModelFixture]:
    """A server that answers in every dialect."""
    async with serving(ModelFixture()) as fixture:
        yield fixture
