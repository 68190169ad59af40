"""The agent as a peer: calls and notifications over its process, and one typed account of its death.

Guarantees: every pending call of an agent that dies fails with :class:`pkg.errors.AgentDied`, which carries the exit code and
the last lines of stderr; an agent whose own process ended while something else holds its output counts as dead once that
output has been silent for ``limits.ACP_EXIT_DRAIN``; what it wrote before is delivered first.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from acp.connection import Connection

from pkg import traceless
from pkg.agent_api import Json
from pkg.agent_end import AgentEnd
from pkg.errors import AgentDied
from pkg.launch import AgentProcess
from pkg.redaction import Redactor
from pkg.rpc_transport import Inbound, Message, RpcTransport


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
        self._handle = handle
        self._on_death = on_death
        self.transport = RpcTransport(
            process, on_notification=on_notification, on_oversized=on_oversized, on_sent=on_sent, pause=pause
        )
        self._end = AgentEnd(process, self.transport, redact)
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
            async with traceless.within(timeout):
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
        return await self._end.account()

    async def close(self) -> None:
        """End reading, writing and watching, and fail whatever is pending. Never waits for the agent."""
        self.alive = False
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        self._end.closed()
        if self._connection is not None:
            await self._connection.close()

    async def _dispatch(self, method: str, params: Any, is_notification: bool) -> Json:
        return await self._handle(method, params if isinstance(params, Inbound) else Inbound(params, None))

    async def _watch(self) -> None:
        await self._end.watch(self._dying)
        if not self.transport.ended.is_set() and self._connection is not None:
            await self._connection.close()
        self._on_death()

    def _dying(self) -> None:
        self.alive = False
