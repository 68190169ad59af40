"""The program's two pipes as lines of JSON, and its requests and ours matched to their answers.

Guarantees:

- a line may be as long as ``limits.AGENT_LINE_BYTES``; a longer one is dropped up to its newline and reported, and where it was
  a request it is refused, so that nothing waits for ever; what is no message (chatter, scalars, control codes) is counted and
  skipped;
- messages are handed over one by one, in wire order, and none while the owner says to pause; answers to our requests are
  handed to whoever waits for them in the same order;
- one writer owns stdin, so a cancelled sender never leaves half a line behind, and closing never waits for the program;
- when the program ends, every pending request fails with one account of its end (:mod:`pkg.agent_end`).
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from agent import wire
from agent.wire import Message
from pkg import limits, traceless
from pkg.agent_end import AgentEnd
from pkg.errors import AgentDied, CodingError
from pkg.launch import AgentProcess
from pkg.lenient import as_dict, as_str
from pkg.redaction import Redactor
from pkg.rpc_transport import LineAssembler, Oversized

_YIELD_BYTES: Final = 64 * 1024


class ControlRefused(Exception):
    """The program refused a control request; ``code`` is its own name for the reason."""

    def __init__(self, text: str, code: str) -> None:
        self.text = text
        self.code = code
        super().__init__(code or "refused")


class Transport:
    """One connection over one process. The process itself is its owner's to stop."""

    def __init__(
        self,
        process: AgentProcess,
        redact: Redactor,
        *,
        on_message: Callable[[Message], None],
        on_oversized: Callable[[int], None],
        on_death: Callable[[], None],
        pause: Callable[[], Awaitable[None] | None],
        line_limit: int = limits.AGENT_LINE_BYTES,
    ) -> None:
        """``pause`` is asked before every message: ``None`` to go on, else something to wait for (then asked again)."""
        self._process = process
        self._on_message = on_message
        self._on_oversized = on_oversized
        self._on_death = on_death
        self._pause = pause
        self._lines = LineAssembler(line_limit)
        self._outbox: asyncio.Queue[tuple[bytes, asyncio.Future[None] | None]] = asyncio.Queue()
        self._writable = True
        self._unread = 0
        """Bytes of answers that the program's pipe has not taken."""
        self._room = asyncio.Event()
        self._room.set()
        self._pending: dict[str, asyncio.Future[Message]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        """Set when the program's output has ended."""
        self.reading_since: float | None = None
        """The loop's time at which the current read began; ``None`` while messages are handled or reading pauses."""
        self.alive = True
        """Whether requests can still succeed."""
        self.noise: deque[str] = deque(maxlen=limits.ACP_NOISE_LINES)
        self.noise_count = 0
        self._end = AgentEnd(process, self, redact)

    # ---- life

    def start(self) -> None:
        """Start reading, writing and watching; :meth:`close` ends all three."""
        for work, name in ((self._read(), "reader"), (self._write(), "writer"), (self._watch(), "watcher")):
            self._tasks.append(asyncio.create_task(work, name=f"claude-{name}", context=contextvars.Context()))

    async def death(self) -> AgentDied:
        """The account of the program's end, as soon as it is known."""
        return await self._end.account()

    async def close(self) -> None:
        """End reading, writing and watching, and fail whatever is pending. Never waits for the program."""
        self.alive = self._writable = False
        self._room.set()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()
        self._tasks.clear()
        self._end.closed()
        self._fail_pending()

    async def _watch(self) -> None:
        await self._end.watch(self._dying)
        self._fail_pending()
        self._on_death()

    def _dying(self) -> None:
        self.alive = False

    def _fail_pending(self) -> None:
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.cancel()

    # ---- writing

    async def send(self, message: Message) -> None:
        """Write one message and return when the program's pipe took it. Raises :class:`pkg.errors.AgentDied`."""
        if not self._writable or not self.alive:
            raise await self.death()
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait((wire.encoded(message), written))
        try:
            await written
        except ConnectionError:
            raise await self.death() from None

    def post(self, message: Message) -> None:
        """Write one message some time; dropped where the program cannot be written to any more.

        The program is not read while ``limits.ACP_UNREAD_BYTES`` of such messages wait for it.
        """
        if not self._writable:
            return
        data = wire.encoded(message)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unread += len(data)
        if self._unread >= limits.ACP_UNREAD_BYTES:
            self._room.clear()
        written.add_done_callback(lambda done: self._taken(len(data), done))
        self._outbox.put_nowait((data, written))

    def _taken(self, size: int, done: asyncio.Future[None]) -> None:
        done.cancelled() or done.exception()
        self._unread -= size
        if self._unread < limits.ACP_UNREAD_BYTES:
            self._room.set()

    async def control(self, subtype: str, timeout: float | None = None, /, **fields: object) -> Message:
        """The program's answer to one control request.

        Raises :class:`ControlRefused`, :class:`pkg.errors.AgentDied`, or ``TimeoutError`` after ``timeout`` seconds.
        """
        request_id = f"host-{next(self._ids)}"
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answered
        try:
            async with traceless.within(timeout):
                await self.send(wire.control_request(request_id, subtype, dict(fields)))
                await asyncio.wait({answered})
        finally:
            del self._pending[request_id]
        if answered.cancelled():
            raise await self.death()
        response = answered.result()
        if response.get("subtype") != "success":
            raise ControlRefused(as_str(response.get("error")), as_str(response.get("error_code")))
        return as_dict(response.get("response"))

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

    async def _read(self) -> None:
        try:
            while True:
                self.reading_since = asyncio.get_running_loop().time()
                try:
                    data = await self._process.read(limits.ACP_READ_BYTES)
                except CodingError:
                    data = b""
                self.reading_since = None
                for line in self._lines.feed(data) if data else self._lines.finish():
                    await self._line(line)
                if not data:
                    return
                await asyncio.sleep(0)
        finally:
            self.reading_since = None
            self.ended.set()

    async def _line(self, line: bytes | Oversized) -> None:
        if isinstance(line, Oversized):
            self._on_oversized(line.size)
            if (refusal := wire.refusal_of_oversized(line)) is not None:
                self.post(refusal)
            return
        message, noise = wire.parse_line(line)
        if noise:
            self.noise_count += 1
            self.noise.append(noise[: limits.ACP_NOISE_CHARS])
        if message is None:
            return
        if message["type"] == "control_response":
            self._answered(as_dict(message.get("response")))
            return
        while (pause := self._pause()) is not None:
            await pause
        await self._room.wait()
        self._on_message(message)
        if len(line) > _YIELD_BYTES:
            await asyncio.sleep(0)

    def _answered(self, response: Message) -> None:
        waiting = self._pending.get(as_str(response.get("request_id")))
        if waiting is not None and not waiting.done():
            waiting.set_result(response)
