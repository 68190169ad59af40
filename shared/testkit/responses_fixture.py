"""A loopback server of the OpenAI Responses API for the real Codex: local protocol fixture, no model, no vendor's behaviour.

The last script ``[[ step ;; step ]]`` of a user message decides: step *n* answers the model call that has *n* tool results
after that message; when the steps are used up, the answer is ``done: `` and the end of the last result. Without a script the
answer is ``echo: `` and the message. Only requests with a known key (:data:`KEY`) are answered, others get 401. Steps:

- ``say TEXT``, ``slow COUNT SECONDS``, ``huge BYTES``: a message; ``recall``: what earlier user messages say;
- ``hold PATH``: ``holding``, then nothing until a file exists at the path, then ``released``;
- ``reason TEXT | TEXT``: a reasoning summary and a message; ``comment TEXT | STEP``: a message on the way, then a tool step;
- ``run COMMAND``: a call of the shell tool, ``escalate COMMAND`` one that asks to leave the sandbox;
- ``add FILE | TEXT``, ``change FILE | OLD | NEW``: a patch; ``custom NAME TEXT``: any freeform tool (``\\n`` is a newline);
- ``call NAME JSON``: a function call; ``NAMESPACE/NAME`` for one in a namespace;
- ``http STATUS``, ``http STATUS SECONDS``: an HTTP error, the second with a ``Retry-After``; ``httpn STATUS COUNT``: one the
  first times; ``failed CODE | MESSAGE``: a failed response; ``drop``: the stream is cut; ``hang``: nothing more comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

KEY: Final = "sk-fake-canary-7c20de"
"""The credential the server takes. It opens nothing else; tests also use it to find leaks."""
KEY_VARIABLE: Final = "FIXTURE_API_KEY"
"""Where an account of :func:`codex_home` has it that is not signed in."""
BODY_BYTES: Final = 64 * 1024 * 1024
HOLD_SECONDS: Final = 90.0
REQUESTS: Final = 2000
BODIES: Final = 64
"""How many of the newest requests are kept whole."""
USAGE: Final = {
    "input_tokens": 120,
    "input_tokens_details": {"cached_tokens": 20},
    "output_tokens": 30,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 150,
}
"""What every answer costs."""

_SCRIPT: Final = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_HOST: Final = re.compile(r"<host-context>.*?</host-context>", re.DOTALL)
_WORDS: Final = re.compile(r"\S+\s*|\s+")
_CODES: Final = {"401": "invalid_api_key", "404": "model_not_found", "429": "rate_limit_exceeded"}
_ids = itertools.count(1)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{next(_ids):08d}"


def _text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str))


def _output(item: Mapping[str, Any]) -> str:
    output = item.get("output")
    return output if isinstance(output, str) else json.dumps(output)


def tool_names(body: Mapping[str, Any]) -> set[str]:
    """The tools a request offers, those of a namespace as ``NAMESPACE/NAME``."""
    names: set[str] = set()

    def take(tools: Any, space: str) -> None:
        for tool in tools or ():
            name = str(tool.get("name") or tool.get("type"))
            if tool.get("type") == "namespace":
                take(tool.get("tools"), f"{name}/")
            else:
                names.add(space + name)

    take(body.get("tools"), "")
    for item in body.get("input") or ():
        if item.get("type") == "additional_tools":
            take(item.get("tools"), "")
    return names


class _Stream:
    """The events of one answer."""

    def __init__(self, response: web.StreamResponse, pace: float) -> None:
        self._response = response
        self._pace = pace
        self._id = _new_id("resp")
        self._sequence = itertools.count()
        self._items: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        """One event."""
        data = json.dumps({"type": kind, "sequence_number": next(self._sequence), **fields})
        await self._response.write(f"event: {kind}\ndata: {data}\n\n".encode())

    def described(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response as the API describes it."""
        return {"id": self._id, "object": "response", "status": status, "output": self._items, **fields}

    async def begin(self) -> None:
        """The first event."""
        await self.send("response.created", response=self.described("in_progress"))

    async def done(self) -> None:
        """The last one."""
        await self.send("response.completed", response=self.described("completed", usage=USAGE))

    async def item(self, item: dict[str, Any]) -> None:
        """A whole item."""
        index = len(self._items)
        await self.send("response.output_item.added", output_index=index, item={**item, "status": "in_progress"})
        self._items.append({**item, "status": "completed"})
        await self.send("response.output_item.done", output_index=index, item=self._items[-1])

    @contextlib.asynccontextmanager
    async def message(self, phase: str = "") -> AsyncIterator[_Message]:
        """A message written piece by piece."""
        base = {"type": "message", "id": _new_id("msg"), "role": "assistant", **({"phase": phase} if phase else {})}
        index = len(self._items)
        await self.send("response.output_item.added", output_index=index, item={**base, "status": "in_progress", "content": []})
        written = _Message(self, str(base["id"]), index)
        await written.start()
        yield written
        content = [{"type": "output_text", "text": "".join(written.said), "annotations": []}]
        self._items.append({**base, "status": "completed", "content": content})
        await self.send("response.output_item.done", output_index=index, item=self._items[-1])

    async def say(self, text: str, phase: str = "") -> None:
        """A message, word by word."""
        async with self.message(phase) as message:
            for word in _WORDS.findall(text) if len(text) < 100_000 else [text]:
                await message.write(word)
                await asyncio.sleep(self._pace)

    async def reason(self, text: str) -> None:
        """A reasoning summary."""
        where = {"item_id": _new_id("rs"), "output_index": len(self._items), "summary_index": 0}
        base = {"type": "reasoning", "id": where["item_id"]}
        await self.send("response.output_item.added", output_index=where["output_index"], item={**base, "summary": []})
        await self.send("response.reasoning_summary_part.added", **where, part={"type": "summary_text", "text": ""})
        for word in _WORDS.findall(text):
            await self.send("response.reasoning_summary_text.delta", **where, delta=word)
        await self.send("response.reasoning_summary_text.done", **where, text=text)
        self._items.append({**base, "summary": [{"type": "summary_text", "text": text}], "encrypted_content": "ZmFrZQ=="})
        await self.send("response.output_item.done", output_index=where["output_index"], item=self._items[-1])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A function call."""
        space, _, plain = name.rpartition("/")
        named = {"namespace": space, "name": plain} if space else {"name": plain}
        ids = {"id": _new_id("fc"), "call_id": _new_id("call")}
        await self.item({"type": "function_call", **ids, **named, "arguments": json.dumps(arguments)})

    async def custom(self, name: str, given: str) -> None:
        """A freeform tool call."""
        ids = {"id": _new_id("ctc"), "call_id": _new_id("call")}
        await self.item({"type": "custom_tool_call", **ids, "name": name, "input": given})


class _Message:
    def __init__(self, stream: _Stream, item_id: str, index: int) -> None:
        self._stream = stream
        self._where = {"item_id": item_id, "output_index": index, "content_index": 0}
        self.said: list[str] = []

    async def start(self) -> None:
        part = {"type": "output_text", "text": "", "annotations": []}
        await self._stream.send("response.content_part.added", **self._where, part=part)

    async def write(self, text: str) -> None:
        """One piece."""
        self.said.append(text)
        await self._stream.send("response.output_text.delta", **self._where, delta=text)


class _Dropped(Exception):
    """The server itself has cut the stream."""


class ResponsesFixture:
    """A running server; made by :func:`responses_fixture`."""

    def __init__(self, pace: float = 0.0) -> None:
        """``pace`` is the seconds between two words."""
        self._pace = pace
        self.url = ""
        """``http://127.0.0.1:PORT``, without a path."""
        self.keys: set[str] = {KEY}
        """The keys that are taken."""
        self.bodies: deque[Mapping[str, Any]] = deque(maxlen=BODIES)
        """The newest requests with a key, whole, in order."""
        self.bearers: deque[str] = deque(maxlen=BODIES)
        """The key that each of them came with."""
        self.refused = 0
        """Requests without the key."""
        self.gone = 0
        """Answers whose client went away before they were whole."""
        self._count = 0
        self._tries: Counter[str] = Counter()

    def application(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/{tail:.*}", self._post)
        return app

    @property
    def shown(self) -> str:
        """Everything the model was given, as text."""
        return json.dumps([body.get("input") for body in self.bodies])

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self._count += 1
        if self._count > REQUESTS:
            return _error(400, "too many requests of one test run")
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self.keys:
            self.refused += 1
            return _error(401, "a key that is not the fixture's")
        if not request.path.endswith("/responses"):
            return _error(404, "not a model's path")
        body = await request.json()
        self.bodies.append(body)
        self.bearers.append(key)
        step, key = self._step(body)
        verb, _, rest = step.partition(" ")
        if verb == "http":
            status, _, seconds = rest.partition(" ")
            return _error(int(status), "the fixture refuses this request", **({"Retry-After": seconds} if seconds else {}))
        if verb == "httpn":
            status, times = rest.split()
            self._tries[key] += 1
            if self._tries[key] <= int(times):
                return _error(int(status), "the fixture refuses this request")
            verb, rest = "say", f"ok after {self._tries[key]} tries"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            with contextlib.suppress(_Dropped):
                await self._play(_Stream(response, self._pace), verb, rest.strip(), body, request)
        except ConnectionResetError:
            self.gone += 1
        return response

    def unscripted(self, text: str) -> str:
        """The answer to a user message without a script."""
        return f"echo: {text[-300:]}"

    def _step(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """The step that answers a request, and what names its script."""
        items = [item for item in body.get("input") or () if isinstance(item, dict)]
        users = [(at, _HOST.sub("", _text(item)).strip()) for at, item in enumerate(items) if item.get("role") == "user"]
        scripted = [(at, found[-1]) for at, text in users if (found := _SCRIPT.findall(text))]
        if not scripted:
            return f"say {self.unscripted(users[-1][1] if users else '')}", ""
        at, script = scripted[-1]
        after = [text for place, text in users if place > at and not text.startswith("<")]
        results = [_output(item) for item in items[at + 1 :] if str(item.get("type", "")).endswith("_output")]
        if after:
            return f"say heard: {after[-1][-300:]}", script
        steps = [step.strip() for step in script.split(";;")]
        if len(results) < len(steps):
            if steps[len(results)] == "recall":
                said = [_SCRIPT.sub("", text).strip() for place, text in users if place < at and _SCRIPT.search(text)]
                return f"say recalled: {' | '.join(said)}", script
            return steps[len(results)], script
        return f"say done: {results[-1][-2000:]}" if results else "say done", script

    async def _play(self, stream: _Stream, verb: str, rest: str, body: Mapping[str, Any], request: web.Request) -> None:
        await stream.begin()
        match verb:
            case "drop":
                async with stream.message() as message:
                    await message.write("partial ")
                    assert request.transport is not None
                    request.transport.close()
                    raise _Dropped
            case "hang":
                await _until(None, request)
                return
            case "failed":
                code, _, said = rest.partition("|")
                error = {"code": code.strip(), "message": said.strip() or code.strip()}
                await stream.send("response.failed", response=stream.described("failed", error=error))
                return
            case "slow":
                count, seconds = rest.split()
                async with stream.message() as message:
                    for number in range(int(count)):
                        await message.write(f"w{number} ")
                        await asyncio.sleep(float(seconds))
            case "hold":
                async with stream.message() as message:
                    await message.write("holding")
                    if not await _until(Path(rest), request):
                        raise ConnectionResetError
                    await message.write(" released")
            case "huge":
                await stream.say("x" * int(rest))
            case "reason":
                thought, _, said = rest.partition("|")
                await stream.reason(thought.strip())
                await stream.say(said.strip())
            case "comment":
                said, _, then = rest.partition("|")
                await stream.say(said.strip(), "commentary")
                then_verb, _, then_rest = then.strip().partition(" ")
                if then_verb == "say":
                    await stream.say(then_rest, "final_answer")
                else:
                    await self._tool(stream, then_verb, then_rest, body)
            case "say":
                await stream.say(rest)
            case _:
                await self._tool(stream, verb, rest, body)
        await stream.done()

    async def _tool(self, stream: _Stream, verb: str, rest: str, body: Mapping[str, Any]) -> None:
        offered = tool_names(body)
        match verb:
            case "run" | "escalate":
                more = {"sandbox_permissions": "require_escalated", "justification": "the script wants it"}
                await stream.call("exec_command", {"cmd": rest, **(more if verb == "escalate" else {})})
            case "add":
                name, _, said = rest.partition("|")
                lines = "".join(f"+{line}\n" for line in said.strip().split("\\n"))
                await self._patch(stream, f"*** Add File: {name.strip()}\n{lines}", offered)
            case "change":
                name, old, new = (part.strip() for part in rest.split("|"))
                await self._patch(stream, f"*** Update File: {name}\n@@\n-{old}\n+{new}\n", offered)
            case "custom":
                name, _, given = rest.partition(" ")
                await stream.custom(name, given.replace("\\n", "\n"))
            case "call":
                name, _, arguments = rest.partition(" ")
                await stream.call(name, json.loads(arguments or "{}"))
            case _:
                await stream.say(f"unknown step: {verb} {rest}")

    async def _patch(self, stream: _Stream, body: str, offered: set[str]) -> None:
        if "apply_patch" in offered:
            await stream.custom("apply_patch", f"*** Begin Patch\n{body}*** End Patch\n")
        else:
            await stream.say(f"apply_patch is not offered, only: {', '.join(sorted(offered))}")


def _error(status: int, message: str, **headers: str) -> web.Response:
    error = {"message": message, "type": "fixture_error", "code": _CODES.get(str(status), "server_error")}
    return web.json_response({"error": error}, status=status, headers=headers)


async def _until(path: Path | None, request: web.Request) -> bool:
    """Wait until the file exists (or the bound is over); false when the client goes away before."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HOLD_SECONDS
    while (path is None or not path.exists()) and loop.time() < end:
        if request.transport is None or request.transport.is_closing():
            return False
        await asyncio.sleep(0.02)
    return True


@contextlib.asynccontextmanager
async def responses_fixture() -> AsyncIterator[ResponsesFixture]:
    """A server on a free loopback port, gone afterwards with every answer it still holds."""
    async with serving(ResponsesFixture()) as fixture:
        yield fixture


@contextlib.asynccontextmanager
async def serving(fixture: ResponsesFixture) -> AsyncIterator[ResponsesFixture]:
    """The same for a server of another kind."""
    runner = web.AppRunner(fixture.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fixture.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fixture
    finally:
        await runner.cleanup()


CONFIG: Final = """
model = "{model}"
model_provider = "fixture"
check_for_update_on_startup = false

[analytics]
enabled = false

[features]
plugins = false
apps = false

[model_providers.fixture]
name = "fixture"
base_url = "{url}/v1"
wire_api = "responses"
{sign_in}
{retries}
"""
"""A home's settings whose only model is the fixture. Neither approvals nor the sandbox are set: that is the driver's to do."""

NO_RETRIES: Final = "request_max_retries = 0\nstream_max_retries = 0"


def codex_home(
    home: Path, url: str, *, model: str = "gpt-5.5", retries: str = NO_RETRIES, key: str = KEY, sign_in: str = ""
) -> dict[str, str]:
    """Make ``home`` an account whose model is the server at ``url``; returns the environment of a session in it.

    The key is in the environment, or in the account's own sign-in with ``sign_in``, which is the real program.
    """
    directory = home / ".codex"
    for each in (home, directory, home / "tmp"):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    way = "requires_openai_auth = true" if sign_in else f'env_key = "{KEY_VARIABLE}"'
    (directory / "config.toml").write_text(CONFIG.format(url=url, model=model, retries=retries, sign_in=way))
    environment = {"HOME": str(home), "CODEX_HOME": str(directory), "TMPDIR": str(home / "tmp")}
    if not sign_in:
        return {**environment, KEY_VARIABLE: key}
    command = [sign_in, "login", "--with-api-key"]
    subprocess.run(command, env=environment, input=key.encode(), capture_output=True, check=True, timeout=60)
    return environment
