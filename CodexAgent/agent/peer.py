"""The app-server as a peer: calls with their answers, what it says and asks by itself, and one typed account of its death.

Guarantees:

- every call of an app-server that dies fails with :class:`pkg.errors.AgentDied`; an answer nobody waits for is ignored;
- notifications and the server's requests are handed over in wire order, before the next message is looked at;
- a request is answered at most once, and one that the handler fails on is answered with an error.

Codex (0.171) leaves the ``jsonrpc`` field out of what it sends and accepts both; its requests have an id space of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from pkg import traceless
from pkg.agent_api import Json
from pkg.agent_end import AgentEnd
from pkg.errors import AgentDied
from pkg.launch import AgentProcess
from pkg.lenient import as_dict, as_int, as_str
from pkg.redaction import Redactor
from pkg.rpc_transport import Inbound, Message, RpcTransport

log = logging.getLogger(__name__)

METHOD_NOT_FOUND: Final = -32601
INTERNAL_ERROR: Final = -32603
RequestId = int | float | str


class RpcError(Exception):
    """The app-server refused a call: its code and its own words (Codex separates causes by text alone)."""

    def __init__(self, error: Json) -> None:
        item = as_dict(error)
        self.code = as_int(item.get("code")) or 0
        self.message = as_str(item.get("message"))
        super().__init__(self.message)


class Peer:
    """One connection over one process. The process itself is its owner's to stop."""

    def __init__(
        self,
        process: AgentProcess,
        redact: Redactor,
        *,
        on_notification: Callable[[str, Message], None],
        on_request: Callable[[RequestId, str, Message], None],
        on_oversized: Callable[[int], None],
        on_death: Callable[[], None],
        pause: Callable[[], Awaitable[None] | None],
    ) -> None:
        self._on_request = on_request
        self._on_death = on_death
        self.transport = RpcTransport(
            process, on_notification=on_notification, on_oversized=on_oversized, on_sent=lambda method: None, pause=pause
        )
        self._end = AgentEnd(process, self.transport, redact)
        self._waiting: dict[int, tuple[asyncio.Future[Json], Callable[[Json], None] | None]] = {}
        self._last_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: tuple[asyncio.Task[None], ...] = ()
        self.alive = True
        """Whether calls can still succeed."""

    def start(self) -> None:
        """Start reading, writing and watching; :meth:`close` ends all three."""
        self.transport.start()
        empty = contextvars.Context
        self._main = (
            asyncio.create_task(self._read(), name="codex-reader", context=empty()),
            asyncio.create_task(self._watch(), name="codex-watcher", context=empty()),
        )

    async def call(
        self,
        method: str,
        params: Json,
        timeout: float | None = None,
        *,
        sent: asyncio.Event | None = None,
        answered: Callable[[Json], None] | None = None,
    ) -> Json:
        """The result of a request.

        ``sent`` is set when the server's pipe took it; ``answered`` is called with the result before any later message is
        looked at. Raises :class:`RpcError` (the server's answer), :class:`pkg.errors.AgentDied`, or ``TimeoutError``.
        """
        if not self.alive:
            raise await self.death()
        self._last_id += 1
        call_id = self._last_id
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (answer, answered)
        try:
            async with traceless.within(timeout):
                await self.transport.send({"id": call_id, "method": method, "params": params})
                if sent is not None:
                    sent.set()
                message = await answer
        except ConnectionError:
            raise await self.death() from None
        finally:
            del self._waiting[call_id]
        if "error" in message:
            raise RpcError(message["error"])
        return message.get("result")

    async def notify(self, method: str) -> None:
        """Send a notification without parameters. Raises :class:`pkg.errors.AgentDied`."""
        try:
            await self.transport.send({"method": method})
        except ConnectionError:
            raise await self.death() from None

    def respond(self, request_id: RequestId, result: Json) -> None:
        """Answer one of the server's requests; dropped when the server cannot be written to any more."""
        self._later({"id": request_id, "result": result})

    def refuse(self, request_id: RequestId, code: int, message: str) -> None:
        """Answer one of the server's requests with an error, which Codex treats as a refusal."""
        self._later({"id": request_id, "error": {"code": code, "message": message}})

    async def death(self) -> AgentDied:
        """The account of the server's death, as soon as it is known."""
        return await self._end.account()

    async def close(self) -> None:
        """End reading, writing and watching, and fail whatever is pending. Never waits for the server."""
        self.alive = False
        tasks = {*self._main, *self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (problem := task.exception()) is not None:
                log.error("the app-server's messages could not be handled", exc_info=problem)
        self._end.closed()
        self._fail()
        await self.transport.close()

    def _later(self, message: Message) -> None:
        # The reader may be the one that answers, and it must not wait for the server to read.
        task = asyncio.create_task(self.transport.send(message), name="codex-answer", context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        while (message := await self.transport.receive()) is not None:
            method = message.get("method")
            if method is None:
                self._answered(message)
                continue
            params = message.get("params")
            request_id = message["id"]
            if request_id is None:
                continue
            try:
                self._on_request(request_id, method, dict(params) if isinstance(params, Inbound) else {})
            except Exception:
                log.exception("a request of the app-server (%s) could not be handled", method)
                self.refuse(request_id, INTERNAL_ERROR, "The client could not handle this request")

    def _answered(self, message: Message) -> None:
        waiting, hook = self._waiting.get(message["id"], (None, None)) if isinstance(message["id"], int) else (None, None)
        if waiting is None or waiting.done():
            return
        waiting.set_result(message)
        if hook is not None and "error" not in message:
            hook(message.get("result"))

    async def _watch(self) -> None:
        await self._end.watch(self._dying)
        self._fail()
        self._on_death()

    def _dying(self) -> None:
        self.alive = False

    def _fail(self) -> None:
        for waiting, _ in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the app-server has ended"))
