"""One typed account of an agent's end, whichever of its process and its output goes first.

Guarantees: the account carries the exit code and the last lines of stderr, without secrets; an agent whose own process ended
while something else holds its output counts as ended once that output has been silent for ``limits.ACP_EXIT_DRAIN``; what it
wrote before is delivered first.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from pkg import limits
from pkg.errors import AgentDied, CodingError
from pkg.launch import AgentProcess
from pkg.redaction import Redactor


class Output(Protocol):
    """An agent's output as its reader knows it."""

    @property
    def ended(self) -> asyncio.Event:
        """Set when the output has ended."""
        ...

    @property
    def reading_since(self) -> float | None:
        """The loop's time at which the current read began; ``None`` while nothing is being read."""
        ...


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


class AgentEnd:
    """Watches one agent; the process itself is its owner's to stop."""

    def __init__(self, process: AgentProcess, transport: Output, redact: Redactor) -> None:
        self._process = process
        self._transport = transport
        self._redact = redact
        self._account: asyncio.Future[AgentDied] = asyncio.get_running_loop().create_future()

    async def account(self) -> AgentDied:
        """The account of the end, as soon as it is known; a new exception for each who asks."""
        died = await asyncio.shield(self._account)
        return type(died)(died.code, detail=died.detail, retryable=died.retryable, params=died.params)

    def closed(self) -> None:
        """The session was closed: that is the account, unless there is one."""
        if not self._account.done():
            self._account.set_result(AgentDied("coding.session_closed"))

    async def watch(self, dying: Callable[[], None]) -> None:
        """Wait until the agent has ended and its account is known; ``dying`` is called when no call can succeed any more."""
        exited = asyncio.create_task(self._exit())
        ended = asyncio.create_task(self._transport.ended.wait())
        try:
            await asyncio.wait({exited, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                dying()
                await asyncio.wait({exited}, timeout=limits.ACP_EXIT_DRAIN)
            else:
                await self._drain(ended)
                dying()
            self._account.set_result(self._told(exited.result() if exited.done() else None))
        finally:
            exited.cancel()
            ended.cancel()
            await asyncio.wait({exited, ended})

    async def _drain(self, ended: asyncio.Task[bool]) -> None:
        """Wait until an ended agent's output has ended too, or has been silent while we were reading."""
        loop = asyncio.get_running_loop()
        while not ended.done():
            since = self._transport.reading_since
            silent = 0.0 if since is None else loop.time() - since
            if silent >= limits.ACP_EXIT_DRAIN:
                return
            await asyncio.wait({ended}, timeout=max(limits.ACP_EXIT_DRAIN - silent, 0.05))

    async def _exit(self) -> int | CodingError:
        try:
            return (await self._process.wait()).code
        except CodingError as exc:
            return exc

    def _told(self, ended: int | CodingError | None) -> AgentDied:
        detail = last_lines(self._process.stderr_tail(), self._redact)
        if ended is None:
            return AgentDied("coding.agent_output_closed", detail=detail, retryable=True)
        if isinstance(ended, CodingError):
            return AgentDied(ended.code, detail=ended.detail or detail, retryable=ended.retryable, params=ended.params)
        return AgentDied("coding.agent_exited", detail=detail, retryable=True, params={"code": exit_text(ended)})
