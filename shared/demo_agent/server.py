"""The agent's side of the Agent Client Protocol on stdin and stdout.

Guarantees: one response per request; every tool call that was announced is finished, also when the turn is cancelled; a write
or a command happens only after the client allowed exactly that call; the end of stdin ends the process and the commands it
started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from demo_agent import sentences
from demo_agent.files import Change, FileProblem, Workspace

Json = Any

PIECE = 16
"""Characters of the answer per chunk, about what a model's token stream looks like."""
PIECE_SECONDS = 0.01
"""Pause between two chunks, so that streaming can be seen."""
OUTPUT_CHARS = 4_000
"""Characters of a command's output that are kept, from its end."""
BACKGROUND_SECONDS = 0.3
"""Seconds to wait for the rest of the output once a command has ended."""
LINE_BYTES = 64 * 1024 * 1024
"""Bytes of one message; prompts may carry pictures."""

INTRODUCTION = """I am the demo agent: a small program that really works on files, without any language model. I understand:
- list the files, list the files in DIR
- read FILE
- search for TEXT, search for TEXT in FILE
- create FILE, create FILE with "TEXT", append "TEXT" to FILE, replace "A" with "B" in FILE
- run: COMMAND
Several at once work too: list the files, then create hello.txt
For a real coding agent start the demo with --agent acp:claude-code, another name that --help lists, or a command."""

PERMISSIONS = (
    {"optionId": "once", "name": "Allow once", "kind": "allow_once"},
    {"optionId": "session", "name": "Allow for this session", "kind": "allow_always"},
    {"optionId": "no", "name": "Deny", "kind": "reject_once"},
)


class RpcError(Exception):
    """A JSON-RPC error to answer a request with."""

    def __init__(self, code: int, message: str) -> None:
        """``code`` is JSON-RPC's or the protocol's."""
        self.code = code
        super().__init__(message)


class Denied(Exception):
    """The client did not allow the action."""


class Session:
    """One conversation in one directory: its grants and its running turn."""

    def __init__(self, session_id: str, workspace: Workspace) -> None:
        """A session without grants."""
        self.session_id = session_id
        self.workspace = workspace
        self.granted: set[str] = set()
        self.turn: asyncio.Task[None] | None = None


class Server:
    """Everything the agent says and hears."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> None:
        """The ends of the client's pipe pair; ``pause`` is seconds between the begin of a tool call or text and the rest."""
        self._pause = pause
        self._reader = reader
        self._writer = writer
        self._sessions: dict[str, Session] = {}
        self._asked: dict[int, asyncio.Future[Json]] = {}
        self._turns: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until stdin ends, then end every turn."""
        try:
            while line := await self._reader.readline():
                await self._receive(line)
        finally:
            for turn in self._turns:
                turn.cancel()
            await asyncio.gather(*self._turns, return_exceptions=True)

    async def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            await self._send({"id": None, "error": {"code": -32700, "message": "not JSON"}})
            return
        if not isinstance(message, dict):
            await self._send({"id": None, "error": {"code": -32600, "message": "not a request"}})
        elif "method" in message:
            await self._handle(message)
        elif (waiting := self._asked.pop(message.get("id", -1), None)) is not None and not waiting.done():
            waiting.set_result(message.get("result"))

    async def _handle(self, message: Mapping[str, Json]) -> None:
        request_id, params = message.get("id"), message.get("params")
        try:
            result = self._call(str(message["method"]), params if isinstance(params, dict) else {}, request_id)
        except RpcError as exc:
            if request_id is not None:
                await self._send({"id": request_id, "error": {"code": exc.code, "message": str(exc)}})
            return
        if request_id is not None and result is not None:
            await self._send({"id": request_id, "result": result})

    def _call(self, method: str, params: Mapping[str, Json], request_id: Json) -> Json:
        if method == "initialize":
            return {
                "protocolVersion": 1,
                "agentCapabilities": {
                    "loadSession": False,
                    "promptCapabilities": {"image": False, "audio": False, "embeddedContext": True},
                    "sessionCapabilities": {"close": {}},
                },
                "agentInfo": {"name": "demo-agent", "title": "Demo agent (no model)", "version": "1"},
                "authMethods": [],
            }
        if method == "session/new":
            cwd = params.get("cwd")
            if not isinstance(cwd, str) or not os.path.isabs(cwd) or not os.path.isdir(cwd):  # noqa: PTH112, PTH117
                raise RpcError(-32602, "cwd must be an existing directory")
            session = Session(str(uuid.uuid4()), Workspace(cwd))
            self._sessions[session.session_id] = session
            return {"sessionId": session.session_id}
        if method not in {"session/prompt", "session/cancel", "session/close"}:
            raise RpcError(-32601, f"unknown method {method}")
        known = self._sessions.get(str(params.get("sessionId")))
        if known is None:
            raise RpcError(-32002, "no such session")
        running = known.turn is not None and not known.turn.done()
        if method == "session/prompt":
            if running:
                raise RpcError(-32600, "a turn is running in this session")
            known.turn = asyncio.create_task(self._turn(known, _prompt_text(params.get("prompt")), request_id))
            self._turns.add(known.turn)
            known.turn.add_done_callback(self._turns.discard)
            return None
        if running and known.turn is not None:
            known.turn.cancel()
        if method == "session/close":
            del self._sessions[known.session_id]
        return {}

    # -------------------------------------------------------------- one turn

    async def _turn(self, session: Session, text: str, request_id: Json) -> None:
        try:
            for number, step in enumerate(sentences.understand(text)):
                await self._say(session, "\n\n" if number else "")
                await self._say(session, await self._do(session, step))
        except asyncio.CancelledError:
            await self._send({"id": request_id, "result": {"stopReason": "cancelled"}})
            raise
        await self._send({"id": request_id, "result": {"stopReason": "end_turn"}})

    async def _do(self, session: Session, step: sentences.Step) -> str:
        try:
            return await self._step(session, step)
        except FileProblem as exc:
            return f"That did not work: {exc}."
        except Denied:
            return "I was not allowed to do that, so I left it."

    async def _step(self, session: Session, step: sentences.Step) -> str:
        files = session.workspace
        match step:
            case sentences.ListFiles(path):
                async with self._tool(session, f"List {path}", "search", path) as tool:
                    names = files.listing(path)
                    tool.output = "\n".join(names)
                where = "The workspace" if path == "." else path
                return f"{where} holds:\n" + "\n".join(f"- {name}" for name in names) if names else f"{where} is empty."
            case sentences.ReadFile(path):
                async with self._tool(session, f"Read {path}", "read", path) as tool:
                    tool.output = files.excerpt(path)
                return f"{path}:\n{_fenced(tool.output)}"
            case sentences.SearchText(wanted, path):
                async with self._tool(session, f"Search for {wanted!r}", "search", path) as tool:
                    found = files.matches(wanted, path)
                    tool.output = "\n".join(found)
                return f"Found {wanted!r}:\n{_fenced(tool.output)}" if found else f"Nothing holds {wanted!r}."
            case sentences.WriteFile(path, text):
                return await self._write(session, files.change(path, text))
            case sentences.AppendText(path, text):
                before = files.text(path) if files.resolve(path).exists() else ""
                separator = "\n" if before and not before.endswith("\n") else ""
                return await self._write(session, files.change(path, before + separator + text))
            case sentences.ReplaceText(path, old, new):
                before = files.text(path)
                if old not in before:
                    return f"{path} does not hold {old!r}, so there is nothing to replace."
                return await self._write(session, files.change(path, before.replace(old, new)))
            case sentences.RunCommand(command):
                return await self._run(session, command)
            case sentences.Unknown(text):
                return f"I have no language model, so I did not understand {text!r}. Say help to see what I understand."
            case sentences.Help():
                return INTRODUCTION

    async def _write(self, session: Session, change: Change) -> str:
        name = session.workspace.name(change.path)
        if change.before == change.after:
            return f"{name} already holds exactly that."
        diff = {"type": "diff", "path": str(change.path), "oldText": change.before, "newText": change.after}
        title = f"{'Create' if change.before is None else 'Edit'} {name}"
        async with self._tool(session, title, "edit", name, content=[diff]) as tool:
            await self._ask(session, tool, grant="edit")
            session.workspace.apply(change)
        return f"{'Created' if change.before is None else 'Changed'} {name} ({len(change.after.encode())} bytes)."

    async def _run(self, session: Session, command: str) -> str:
        async with self._tool(session, command, "execute", raw_input={"command": command}) as tool:
            await self._ask(session, tool, grant=f"run {command}")
            code, tool.output = await _shell(command, session.workspace.root)
            tool.failed = code != 0
        ended = "ended well" if code == 0 else f"ended with exit code {code}"
        return f"`{command}` {ended}" + (f":\n{_fenced(tool.output)}" if tool.output.strip() else ", it printed nothing.")

    async def _ask(self, session: Session, tool: Tool, grant: str) -> None:
        """Ask the client to allow a tool call; raises :class:`Denied`."""
        if grant not in session.granted:
            number = len(self._asked) + 1 + max(self._asked, default=0)
            answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
            self._asked[number] = answer
            params = {"sessionId": session.session_id, "toolCall": tool.described(), "options": list(PERMISSIONS)}
            try:
                await self._send({"id": number, "method": "session/request_permission", "params": params})
                result = await answer
            finally:
                self._asked.pop(number, None)
            outcome = result.get("outcome") if isinstance(result, dict) else None
            chosen = outcome.get("optionId") if isinstance(outcome, dict) else None
            if chosen not in {"once", "session"}:
                raise Denied
            if chosen == "session":
                session.granted.add(grant)
        await self._update(session, {"sessionUpdate": "tool_call_update", "toolCallId": tool.call_id, "status": "in_progress"})

    @contextlib.asynccontextmanager
    async def _tool(
        self,
        session: Session,
        title: str,
        kind: str,
        path: str | None = None,
        *,
        content: list[Json] | None = None,
        raw_input: Json = None,
    ) -> AsyncIterator[Tool]:
        """Announce a tool call and finish it however its block ends."""
        tool = Tool(title, kind, [{"path": str(session.workspace.resolve(path))}] if path else [], content or [], raw_input)
        await self._update(session, {"sessionUpdate": "tool_call", **tool.described()})
        status = "failed"
        try:
            await asyncio.sleep(self._pause)
            yield tool
            status = "failed" if tool.failed else "completed"
        finally:
            done: dict[str, Json] = {"sessionUpdate": "tool_call_update", "toolCallId": tool.call_id, "status": status}
            if tool.output:
                done["content"] = [{"type": "content", "content": {"type": "text", "text": tool.output}}]
            await self._update(session, done)

    # -------------------------------------------------------------- sending

    async def _say(self, session: Session, text: str) -> None:
        for start in range(0, len(text), PIECE):
            content = {"type": "text", "text": text[start : start + PIECE]}
            await self._update(session, {"sessionUpdate": "agent_message_chunk", "content": content})
            begins = not start and text.strip()
            await asyncio.sleep(PIECE_SECONDS + self._pause if begins else PIECE_SECONDS)

    async def _update(self, session: Session, update: Json) -> None:
        await self._send({"method": "session/update", "params": {"sessionId": session.session_id, "update": update}})

    async def _send(self, message: Mapping[str, Json]) -> None:
        self._writer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await self._writer.drain()


class Tool:
    """A tool call while it is being made."""

    def __init__(self, title: str, kind: str, locations: list[Json], content: list[Json], raw_input: Json) -> None:
        """What is known when it is announced; ``output`` and ``failed`` are filled in while it runs."""
        self.call_id = str(uuid.uuid4())
        self.output = ""
        self.failed = False
        self._described = {"title": title, "kind": kind, "locations": locations, "content": content, "rawInput": raw_input}

    def described(self) -> dict[str, Json]:
        """The tool call as the protocol writes it, before it runs."""
        return {"toolCallId": self.call_id, "status": "pending", **self._described}


def _prompt_text(blocks: Json) -> str:
    """What the person wrote; text that a client added for the agent alone says so in its annotations and is left out."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RpcError(-32602, "prompt must be a list of content blocks")
    own = [block for block in blocks if (block.get("annotations") or {}).get("audience") != ["assistant"]]
    return "\n".join(str(block.get("text", "")) for block in own if block.get("type") == "text")


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"


async def _shell(command: str, cwd: os.PathLike[str]) -> tuple[int, str]:
    """Run a command to its end; its whole process group is killed when the turn is cancelled."""
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = bytearray()
    reading = asyncio.create_task(_collect(process.stdout, output))
    try:
        code = await process.wait()
        # What the command left running in the background may hold its output open for ever.
        await asyncio.wait([reading], timeout=BACKGROUND_SECONDS)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    text = output.decode(errors="replace")
    return code, text if len(text) <= OUTPUT_CHARS else f"...{text[-OUTPUT_CHARS:]}"


async def _collect(stream: asyncio.StreamReader | None, output: bytearray) -> None:
    while stream is not None and (piece := await stream.read(65536)):
        output += piece
        del output[: -4 * OUTPUT_CHARS]


async def _serve(pause: float) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sys.stdout.buffer)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    with contextlib.suppress(ConnectionError):
        await Server(reader, writer, pause).serve()


def main(arguments: Sequence[str]) -> None:
    """Serve on stdin and stdout until stdin ends; ``--pause SECONDS`` makes it slow enough to be watched."""
    parser = argparse.ArgumentParser(prog="demo_agent", description="A coding agent without a language model, over ACP.")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between the begin of a tool call or text and the rest"
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args(arguments).pause))
