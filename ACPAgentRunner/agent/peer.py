"""The agent as a peer: calls and notifications over its process, and one typed account of its death.

Guarantees: every pending call of an agent that dies fails with :class:`pkg.errors.AgentDied`, which carries the exit code and
the last lines of stderr; an agent whose own process ended while something else holds its output counts as dead once that
output has been silent for ``limits.ACP_EXIT_DRAIN``; what it wrote before is delivered first.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from acp.connection import Connection

from pkg import limits
from pkg.agent_api import Json
from pkg.errors import AgentDied, CodingError
from pkg.launch import AgentProcess
from pkg.redaction import Redactor
from pkg.rpc_transport import Inbound, Message, RpcTransport


def last_lines(text: str, redact: Redactor) -> str:
    """The end of an agent's stderr as shown to people."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return redact("\n".join(lines[-limits.ACP_STDERR_LINES :]))[-limits.ACP_ERROR_CHARS :]


def exit_text(code: int) -> str:
    """An exit code as people know it: the number, or the signal's name."""
    if code >= 0:
        return str(code)
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(code)


class Peer:
    """One connection over one process. The process itself is its owner's to stop."""

    def __init__(
        self,
        process: AgentProcess,
        redact: Redactor,
        *,
        handle: Callable[[str, Inbound], Awaitable[Json]],
        on_notification: Callable[[str, Message], None],
        on_oversized: Callable[[int], None],
        on_sent: Callable[[str], None],
        on_death: Callable[[], None],
        pause: Callable[[], Awaitable[None] | None],
    ) -> None:
        self._process = process
        self._redact = redact
        self._handle = handle
        self._on_death = on_death
        self.transport = RpcTransport(
            process, on_notification=on_notification, on_oversized=on_oversized, on_sent=on_sent, pause=pause
        )
        self._death: asyncio.Future[AgentDied] = asyncio.get_running_loop().create_future()
        self._connection: Connection | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.alive = True
        """Whether calls can still succeed."""

    def start(self) -> None:
        """Start reading, writing and watching; :meth:`close` ends all three."""
        self.transport.start()
        empty = contextvars.Context()
        self._connection = empty.run(Connection, self._dispatch, self.transport)
        self._watcher = asyncio.create_task(self._watch(), name="acp-watcher", context=contextvars.Context())

    async def call(self, method: str, params: Json, timeout: float | None = None) -> Any:
        """The result of a request.

        Raises ``acp.exceptions.RequestError`` (the agent's answer), :class:`pkg.errors.AgentDied`, or ``TimeoutError``.
        """
        if self._connection is None or not self.alive:
            raise await self.death()
        try:
            async with asyncio.timeout(timeout):
                return await self._connection.send_request(method, params)
        except ConnectionError:
            raise await self.death() from None

    async def notify(self, method: str, params: Json) -> None:
        """Send a notification. Raises :class:`pkg.errors.AgentDied`."""
        if self._connection is None or not self.alive:
            raise await self.death()
        try:
            await self._connection.send_notification(method, params)
        except ConnectionError:
            raise await self.death() from None

    async def death(self) -> AgentDied:
        """The account of the agent's death, as soon as it is known."""
        died = await asyncio.shield(self._death)
        return type(died)(died.code, detail=died.detail, retryable=died.retryable, params=died.params)

    async def close(self) -> None:
        """End reading, writing and watching, and fail whatever is pending. Never waits for the agent."""
        self.alive = False
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        if not self._death.done():
            self._death.set_result(AgentDied("coding.session_closed"))
        if self._connection is not None:
            await self._connection.close()

    async def _dispatch(self, method: str, params: Any, is_notification: bool) -> Json:
        return await self._handle(method, params if isinstance(params, Inbound) else Inbound(params, None))

    async def _watch(self) -> None:
        exited = asyncio.create_task(self._exit())
        ended = asyncio.create_task(self.transport.ended.wait())
        try:
            await asyncio.wait({exited, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.alive = False
                await asyncio.wait({exited}, timeout=limits.ACP_EXIT_DRAIN)
            else:
                await self._drain(ended)
                self.alive = False
            self._death.set_result(self._account(exited.result() if exited.done() else None))
            if not ended.done() and self._connection is not None:
                await self._connection.close()
            self._on_death()
        finally:
            exited.cancel()
            ended.cancel()
            await asyncio.wait({exited, ended})

    async def _drain(self, ended: asyncio.Task[bool]) -> None:
        """Wait until an ended agent's output has ended too, or has been silent while we were reading."""
        loop = asyncio.get_running_loop()
        while not ended.done():
            since = self.transport.reading_since
            silent = 0.0 if since is None else loop.time() - since
            if silent >= limits.ACP_EXIT_DRAIN:
                return
            await asyncio.wait({ended}, timeout=max(limits.ACP_EXIT_DRAIN - silent, 0.05))

    async def _exit(self) -> int | CodingError:
        try:
            return (await self._process.wait()).code
        except CodingError as exc:
            return exc

    def _account(self, ended: int | CodingError | None) -> AgentDied:
        detail = last_lines(self._process.stderr_tail(), self._redact)
        if ended is None:
            return AgentDied("coding.agent_output_closed", detail=detail, retryable=True)
        if isinstance(ended, CodingError):
            return AgentDied(ended.code, detail=ended.detail or detail, retryable=ended.retryable, params=ended.params)
        return AgentDied("coding.agent_exited", detail=detail, retryable=True, params={"code": exit_text(ended)})
