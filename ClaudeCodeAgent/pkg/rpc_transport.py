"""An agent's two pipes as a stream of JSON-RPC messages, for every driver whose agent speaks it in lines.

Guarantees:

- a line may be as long as ``limits.AGENT_LINE_BYTES``; a longer one is dropped up to its newline, reported as
  :class:`Oversized`, and answered in the place of whoever waits for it, so the connection and every other call live on;
- what is no protocol message (npm chatter, scalars, ``null``, control codes, broken UTF-8) is counted and skipped; arrays
  are taken apart; a byte-order mark, ``\\r``, NUL and text before the first brace are tolerated; malformed ids, methods and
  errors never reach the reader, and neither does what is nested deeper than ``limits.ACP_JSON_DEPTH``: its call fails, its
  request is refused;
- notifications are handed over inside :meth:`RpcTransport.receive`, in wire order, and everything its reader has to
  dispatch is dispatched before the next message is looked at; nothing is read while the owner says to pause;
- one writer owns stdin, so a cancelled sender never leaves half a line behind, and closing never waits for the agent; an
  agent that asks and does not read is not heard while ``limits.ACP_UNREAD_BYTES`` of answers wait for it;
- whatever goes wrong while a message is handed over ends the output, so nobody waits for an agent that is not read.
"""

from __future__ import annotations

import asyncio
import codecs
import contextvars
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pkg import limits
from pkg.agent_api import Json
from pkg.errors import CodingError
from pkg.launch import AgentProcess

Message = dict[str, Any]

_BLANK: Final = b" \t\r\n\x00"
_MESSAGE_START: Final = re.compile(r'\{\s*"(?:jsonrpc|id|method|result|error|params)"\s*:')
_DECODER: Final = json.JSONDecoder(strict=False)
_PEEK_ID: Final = re.compile(rb'"id"\s*:\s*(\d+|"(?:[^"\\]|\\.){1,200}")')
_CONTAINERS: Final = (dict, list)
_PEEK_METHOD: Final = re.compile(rb'"method"\s*:\s*"')


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line over the limit: its size and both of its ends."""

    size: int
    head: bytes
    tail: bytes


class LineAssembler:
    """Cuts a byte stream into lines; holds at most one line and never more than ``limit`` bytes of it."""

    __slots__ = ("_buffer", "_head", "_limit", "_size", "_tail")

    def __init__(self, limit: int = limits.AGENT_LINE_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._size = 0
        """Size of the oversized line being dropped, zero when none is."""
        self._head = b""
        self._tail = b""

    def feed(self, data: bytes) -> Iterator[bytes | Oversized]:
        """The lines that ``data`` completes, without their newline."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start:end])
            yield self._line()
            start = end + 1
        if start < len(data):
            self._take(data[start:])

    def finish(self) -> Iterator[bytes | Oversized]:
        """The unterminated line at the end of the stream, if any."""
        if self._size or self._buffer:
            yield self._line()

    def _take(self, piece: bytes) -> None:
        if self._size:
            self._size += len(piece)
            self._tail = (self._tail + piece)[-limits.ACP_PEEK_BYTES :]
        elif len(self._buffer) + len(piece) <= self._limit:
            self._buffer += piece
        else:
            self._size = len(self._buffer) + len(piece)
            self._head = bytes((self._buffer[: limits.ACP_PEEK_BYTES] + piece)[: limits.ACP_PEEK_BYTES])
            self._tail = bytes((self._buffer[-limits.ACP_PEEK_BYTES :] + piece)[-limits.ACP_PEEK_BYTES :])
            self._buffer = bytearray()

    def _line(self) -> bytes | Oversized:
        if self._size:
            line: bytes | Oversized = Oversized(self._size, self._head, self._tail)
            self._size, self._head, self._tail = 0, b"", b""
            return line
        line = bytes(self._buffer)
        self._buffer = bytearray()
        return line


class Inbound(dict[str, Any]):
    """The parameters of an agent's request, together with the request's id (``acp``'s connection drops it)."""

    __slots__ = ("request_id",)

    def __init__(self, params: Json, request_id: Json) -> None:
        super().__init__(params if isinstance(params, dict) else {})
        self.request_id = request_id


def parse_line(line: bytes) -> tuple[list[Message], str]:
    """The protocol messages of one line, and what of it is noise (the empty string when nothing is)."""
    body = line.removeprefix(codecs.BOM_UTF8).strip(_BLANK)
    if not body:
        return [], ""
    text = body.decode("utf-8", "replace")
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        start = _MESSAGE_START.search(text)
        if start is None:
            return [], text
        try:
            value, _ = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return [], text
    items = value if isinstance(value, list) else [value]
    messages = [message for item in items if (message := _well_formed(item)) is not None]
    return messages, "" if len(messages) == len(items) else text


def answer_to_oversized(line: Oversized) -> tuple[Message | None, Message | None]:
    """What an oversized line would have been answered with: a message to receive, a message to send, or neither.

    A dropped response fails the call that waits for it; a dropped request is refused. The id is looked for at both ends
    (agents order keys as they like).
    """
    found = _PEEK_ID.search(line.head) or _PEEK_ID.search(line.tail)
    if found is None:
        return None, None
    try:
        request_id = json.loads(found[1])
    except ValueError:
        return None, None
    error = {"code": -32600, "message": "Message too large", "data": {"bytes": line.size, "limit": limits.AGENT_LINE_BYTES}}
    message: Message = {"jsonrpc": "2.0", "id": request_id, "error": error}
    if _PEEK_METHOD.search(line.head) or _PEEK_METHOD.search(line.tail):
        return None, message
    return message, None


def nested_deeper(value: Json, limit: int) -> bool:
    """Whether more than ``limit`` containers stand in each other; walks level by level, so nothing is too deep for it."""
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(limit):
        if not level:
            return False
        inside: list[Any] = []
        for item in level:
            if item:  # most containers of a hostile message are empty
                inside.extend(item.values() if type(item) is dict else item)
        level = [item for item in inside if isinstance(item, _CONTAINERS)]
    return bool(level)


def answer_to_nested(message: Message) -> tuple[Message | None, Message | None]:
    """What stands for a message that is nested too deeply: a message to receive, a message to send, or neither."""
    if "id" not in message:
        return None, None
    error = {"code": -32600, "message": "Message nested too deeply", "data": {"limit": limits.ACP_JSON_DEPTH}}
    reply: Message = {"jsonrpc": "2.0", "id": message["id"], "error": error}
    return (None, reply) if message.get("method") is not None else (reply, None)


def _well_formed(item: Json) -> Message | None:
    if not isinstance(item, dict):
        return None
    message: Message = item
    if "id" in message and (isinstance(message["id"], bool) or not isinstance(message["id"], str | int | float | None)):
        return None
    if message.get("method") is not None:
        return message if isinstance(message["method"], str) else None
    if "id" not in message:
        return None
    error = message.get("error")
    if error is None:
        message.pop("error", None)
        return message
    message.pop("result", None)
    if not isinstance(error, dict):
        message["error"] = error = {"message": str(error)}
    if isinstance(error.get("code"), bool) or not isinstance(error.get("code"), int):
        error["code"] = -32603
    error["message"] = str(error.get("message") or "Error")
    return message


class RpcTransport:
    """JSON-RPC over one :class:`pkg.launch.AgentProcess`; see the module's guarantees. Also ``acp``'s transport protocol."""

    def __init__(
        self,
        process: AgentProcess,
        *,
        on_notification: Callable[[str, Message], None],
        on_oversized: Callable[[int], None],
        on_sent: Callable[[str], None],
        pause: Callable[[], Awaitable[None] | None],
        line_limit: int = limits.AGENT_LINE_BYTES,
    ) -> None:
        """``pause`` is asked before every message: ``None`` to go on, else something to wait for (then asked again)."""
        self._process = process
        self._on_notification = on_notification
        self._on_oversized = on_oversized
        self._on_sent = on_sent
        self._pause = pause
        self._lines = LineAssembler(line_limit)
        self._unparsed: deque[bytes | Oversized] = deque()
        self._inbox: deque[Message] = deque()
        self._dispatching = False
        self._outbox: asyncio.Queue[tuple[bytes, asyncio.Future[None] | None]] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._writable = True
        self._unread = 0
        """Bytes of answers that the agent's pipe has not taken."""
        self._room = asyncio.Event()
        self._room.set()
        self.ended = asyncio.Event()
        """Set when the agent's output has ended."""
        self.reading_since: float | None = None
        """The loop's time at which the current read began; ``None`` while messages are being handled or reading pauses."""
        self.noise: deque[str] = deque(maxlen=limits.ACP_NOISE_LINES)
        self.noise_count = 0

    # ---- writing

    def start(self) -> None:
        """Start the writer, owned by this object until :meth:`close`."""
        self._writer = asyncio.create_task(self._write(), name="rpc-writer", context=contextvars.Context())

    async def send(self, message: Message) -> None:
        """Write one message and return when the agent's pipe took it.

        Raises ``ConnectionError`` when it cannot be written any more; a response that cannot be is dropped instead,
        because its request died with the agent.
        """
        is_call = "method" in message
        if self._writable:
            data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._outbox.put_nowait((data, written))
            self._answers(0 if is_call else len(data))
            try:
                await written
            except ConnectionError:
                if is_call:
                    raise
                return
            finally:
                self._answers(0 if is_call else -len(data))
            if is_call:
                self._on_sent(message["method"])
        elif is_call:
            raise ConnectionError("the agent's input is closed")

    def _answers(self, size: int) -> None:
        self._unread += size
        if self._unread < limits.ACP_UNREAD_BYTES:
            self._room.set()
        else:
            self._room.clear()

    async def _write(self) -> None:
        written: asyncio.Future[None] | None = None
        try:
            while True:
                data, written = await self._outbox.get()
                await self._process.write(data)
                if written is not None and not written.done():
                    written.set_result(None)
        except CodingError:
            return
        finally:
            self._writable = False
            self._refuse(written)
            while not self._outbox.empty():
                self._refuse(self._outbox.get_nowait()[1])

    @staticmethod
    def _refuse(written: asyncio.Future[None] | None) -> None:
        if written is not None and not written.done():
            written.set_exception(ConnectionError("the agent's input is closed"))

    # ---- reading

    async def receive(self) -> Message | None:
        """The next request or response, ``None`` at the end of the agent's output. Notifications are handed over here."""
        try:
            return await self._receive()
        except Exception:
            self.ended.set()
            raise

    async def _receive(self) -> Message | None:
        while True:
            if self._dispatching:
                self._dispatching = False
                await asyncio.sleep(0)
            while (pause := self._pause()) is not None:
                await pause
            await self._room.wait()
            # A parsed message is about six times its line, and every session in a turn may hold a pipe's content.
            while self._unparsed and not self._inbox:
                self._parse(self._unparsed.popleft())
            if self._inbox:
                message = self._inbox.popleft()
                method = message.get("method")
                if method is not None and "id" not in message:
                    params = message.get("params")
                    self._on_notification(method, params if isinstance(params, dict) else {})
                    continue
                if method is not None:
                    message["params"] = Inbound(message.get("params"), message["id"])
                self._dispatching = True
                return message
            if self.ended.is_set():
                return None
            await self._fill()

    async def _fill(self) -> None:
        self.reading_since = asyncio.get_running_loop().time()
        try:
            data = await self._process.read(limits.ACP_READ_BYTES)
        except CodingError:
            data = b""
        finally:
            self.reading_since = None
        self._unparsed.extend(self._lines.feed(data) if data else self._lines.finish())
        if data:
            await asyncio.sleep(0)
        else:
            self.ended.set()

    def _parse(self, line: bytes | Oversized) -> None:
        if isinstance(line, Oversized):
            self._skip(line)
            return
        messages, noise = parse_line(line)
        if line.count(b"{") + line.count(b"[") > limits.ACP_JSON_DEPTH:
            messages, noise = self._shallow(messages, noise)
        self._inbox.extend(messages)
        if noise:
            self.noise_count += 1
            self.noise.append(noise[: limits.ACP_NOISE_CHARS])

    def _shallow(self, messages: list[Message], noise: str) -> tuple[list[Message], str]:
        kept: list[Message] = []
        for message in messages:
            if nested_deeper(message, limits.ACP_JSON_DEPTH):
                self._stand_in(*answer_to_nested(message))
                noise = noise or "(nested too deeply)"
            else:
                kept.append(message)
        return kept, noise

    def _skip(self, line: Oversized) -> None:
        self._on_oversized(line.size)
        self._stand_in(*answer_to_oversized(line))

    def _stand_in(self, received: Message | None, reply: Message | None) -> None:
        if received is not None:
            self._inbox.append(received)
        if reply is not None and self._writable:
            self._outbox.put_nowait((json.dumps(reply, separators=(",", ":")).encode() + b"\n", None))

    async def close(self) -> None:
        """Stop the writer and refuse what it has not written; never waits for the agent."""
        self._writable = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.cancel()
            await asyncio.wait({writer})
