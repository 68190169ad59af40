"""Ask the person at the terminal before an ACP agent does something: a program between the agent and its client.

``python gate.py SOCKET -- AGENT...`` starts the agent and passes every line on, both ways, with two exceptions:

- a ``session/request_permission`` of the agent does not reach the client. It is put to the person who listens on the Unix
  socket, and the agent gets that answer. When the client cancels the turn or closes the session, its open questions are
  withdrawn and answered as cancelled. With nobody listening every request is denied;
- the client's offer of files and terminals (``clientCapabilities``) is left out, so that the agent uses tools of its own, for
  which it asks.

The talk on the socket is one JSON object per line: ``{"ask": N, "request": params}`` and ``{"withdraw": N}`` to the person,
``{"answer": N, "option": id or null}`` back (``null`` denies).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any

LINE_BYTES = 64 * 1024 * 1024
"""Bytes of one message; agents embed whole files."""

_ASKING = b"session/request_permission"
_ENDING = (b"session/cancel", b"session/close")
_GREETING = b"clientCapabilities"


def denial(options: Json) -> Json:
    """The outcome that denies once, whatever the agent calls it."""
    for option in options if isinstance(options, list) else ():
        if isinstance(option, dict) and option.get("kind") == "reject_once":
            return {"outcome": "selected", "optionId": option.get("optionId")}
    return {"outcome": "cancelled"}


@dataclass(slots=True)
class Question:
    """One open permission request."""

    request_id: Json
    session_id: str
    options: Json


@dataclass(slots=True)
class Gate:
    """The open questions and the four pipe ends they travel on."""

    client_in: asyncio.StreamReader
    client_out: asyncio.StreamWriter
    agent_in: asyncio.StreamWriter
    agent_out: asyncio.StreamReader
    person_in: asyncio.StreamReader | None
    person_out: asyncio.StreamWriter | None
    questions: dict[int, Question] = field(default_factory=dict)
    asked: int = 0

    async def from_agent(self) -> None:
        """Pass the agent's lines on until it closes its stdout; keep its permission requests."""
        while line := await self.agent_out.readline():
            message = _parse(line) if _ASKING in line else None
            if message is not None and message.get("method") == _ASKING.decode() and "id" in message:
                await self._ask(message["id"], message.get("params"))
            else:
                self.client_out.write(line)
                await self.client_out.drain()

    async def from_client(self) -> None:
        """Pass the client's lines on until it closes our stdin; then close the agent's."""
        while line := await self.client_in.readline():
            if any(word in line for word in _ENDING):
                await self._withdraw(_parse(line))
            self.agent_in.write(_without_offers(line) if _GREETING in line else line)
            await self.agent_in.drain()
        self.agent_in.close()

    async def from_person(self) -> None:
        """Answer the agent with what the person says; when nobody is there (any more), deny what is open."""
        while self.person_in is not None and (line := await self.person_in.readline()):
            message = _parse(line)
            question = self.questions.pop(message.get("answer", 0), None) if message is not None else None
            if message is not None and question is not None:
                option = message.get("option")
                chosen = {"outcome": "selected", "optionId": option} if option is not None else denial(question.options)
                await self._answer(question, chosen)
        self.person_out = None
        for number in list(self.questions):
            question = self.questions.pop(number)
            await self._answer(question, denial(question.options))

    async def _ask(self, request_id: Json, params: Json) -> None:
        given = params if isinstance(params, dict) else {}
        question = Question(request_id, str(given.get("sessionId")), given.get("options"))
        if self.person_out is None:
            await self._answer(question, denial(question.options))
            return
        self.asked += 1
        self.questions[self.asked] = question
        await self._tell({"ask": self.asked, "request": given})

    async def _withdraw(self, ending: Mapping[str, Json] | None) -> None:
        if ending is None or str(ending.get("method")).encode() not in _ENDING:
            return
        params = ending.get("params")
        session_id = str(params.get("sessionId")) if isinstance(params, dict) else ""
        for number in [number for number, question in self.questions.items() if question.session_id == session_id]:
            await self._answer(self.questions.pop(number), {"outcome": "cancelled"})
            await self._tell({"withdraw": number})

    async def _answer(self, question: Question, outcome: Json) -> None:
        answer = {"jsonrpc": "2.0", "id": question.request_id, "result": {"outcome": outcome}}
        self.agent_in.write(json.dumps(answer).encode() + b"\n")
        await self.agent_in.drain()

    async def _tell(self, message: Json) -> None:
        if self.person_out is not None:
            with contextlib.suppress(ConnectionError):
                self.person_out.write(json.dumps(message).encode() + b"\n")
                await self.person_out.drain()


def _without_offers(line: bytes) -> bytes:
    message = _parse(line)
    params = message.get("params") if message is not None and message.get("method") == "initialize" else None
    offers = params.get("clientCapabilities") if isinstance(params, dict) else None
    if not isinstance(offers, dict):
        return line
    for name in ("fs", "terminal"):
        offers.pop(name, None)
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Json] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


async def _connect(path: str) -> tuple[asyncio.StreamReader | None, asyncio.StreamWriter | None]:
    try:
        return await asyncio.open_unix_connection(path, limit=LINE_BYTES)
    except OSError:
        return None, None


async def _run(path: str, command: list[str]) -> int:
    loop = asyncio.get_running_loop()
    agent = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES
    )
    if agent.stdin is None or agent.stdout is None:
        raise RuntimeError("pipes were asked for")
    client_in = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(client_in), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sys.stdout.buffer)
    client_out = asyncio.StreamWriter(transport, protocol, None, loop)
    gate = Gate(client_in, client_out, agent.stdin, agent.stdout, *await _connect(path))
    others = [asyncio.create_task(gate.from_client()), asyncio.create_task(gate.from_person())]
    try:
        with contextlib.suppress(ConnectionError):
            await gate.from_agent()
        return await agent.wait()
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def main(arguments: list[str]) -> int:
    """``SOCKET -- AGENT...``; ends as the agent ends."""
    code = asyncio.run(_run(arguments[0], arguments[2:]))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
