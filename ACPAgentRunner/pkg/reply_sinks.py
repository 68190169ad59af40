"""The two ways a message reaches a person, behind one interface; both keep the run alive when a message cannot be sent.

*Pipelines* (``ctx.delivery.automatic_reply``) send the results a run yields and refuse every explicit send. *Agent bots*
show nothing but explicit replies. The agent debug page of the dashboard shows results, as a pipeline does, and the real
text of ``run.failed``.

Each says how many calls of the chat's service the next thing costs: a streamed message is a placeholder and an edit, an update
that the surface does not show is none. A service that refuses a message for coming too fast is answered with
:class:`TryLater`; only explicit sends hear of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from langbot_plugin.api.entities.builtin.provider.message import Message, MessageChunk
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from pkg import limits
from pkg.bubbles import MARKER
from pkg.surfaces import SEQUENCE_STEP

if TYPE_CHECKING:
    from langbot_plugin.api.entities.builtin.runner.context import RunnerContext

Emit = Callable[[RunnerResult], Awaitable[None]]

PLACEHOLDER_AND_EDIT: Final = 2
"""Calls of a streamed message's first text."""

_TOO_FAST: Final = re.compile(
    r"\b429\b|too many requests|flood ?control|flood_?wait|rate.?limit|retry (?:after|in)\b", re.IGNORECASE
)
_PAUSE: Final = re.compile(r"(?:retry[ _]?(?:after|in)|wait(?: of)?)\D{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE)


class TryLater(Exception):
    """The service refused a message for coming too fast; the same call may be made again after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` is the pause the service named, or a usual one."""
        self.seconds = seconds
        super().__init__(f"too fast, again in {seconds:.0f} s")


def too_fast(problem: Exception) -> TryLater | None:
    """What a refused send says about time: the Bot API's "Too Many Requests: retry after 5", its client's "Flood control
    exceeded. Retry in 5 seconds", Discord's "429 Too Many Requests"; ``None`` when it was refused for another reason."""
    if isinstance(problem, TryLater):
        return problem
    text = str(problem)
    if not _TOO_FAST.search(text):
        return None
    named = _PAUSE.search(text)
    return TryLater(min(float(named[1]), limits.REPLY_RETRY_MAX) if named else limits.REPLY_RETRY_SECONDS)


class ReplySink(Protocol):
    """Where bubbles go. Calls come one at a time."""

    @property
    def every_message_arrives(self) -> bool:
        """Whether each completed message reaches the person even where nothing is streamed."""
        ...

    @property
    def shows_failure(self) -> bool:
        """Whether the person reads the text of ``run.failed``, so that no message is needed for it."""
        ...

    @property
    def failure_is_quiet(self) -> bool:
        """Whether ``run.failed`` leaves everything already shown as it is."""
        ...

    @property
    def show_cost(self) -> int:
        """Calls of the service that the next :meth:`show` makes."""
        ...

    @property
    def complete_cost(self) -> int:
        """Calls that the next :meth:`complete` makes."""
        ...

    @property
    def message_cost(self) -> int:
        """Calls of a :meth:`complete` when no bubble is open."""
        ...

    async def show(self, text: str, sequence: int) -> None:
        """Show an unfinished text in the open bubble, opening one where there is none.

        Raises :class:`TryLater` when the service wants a pause; this text is not shown then.
        """
        ...

    async def complete(self, text: str) -> None:
        """Close the open bubble with its whole text, or send it as a message of its own.

        Raises :class:`TryLater` when the service wants a pause; nothing of it was sent then, and the same call follows.
        """
        ...

    async def aclose(self) -> None:
        """Give up an open bubble when the run is torn down; idempotent."""
        ...


class PipelineSink:
    """Bubbles as results of the run: ``message.delta`` with the text so far, ``message.completed`` with the whole."""

    every_message_arrives = False

    def __init__(self, run_id: str, emit: Emit, *, shows_failure: bool = False, streams: bool = True) -> None:
        """``shows_failure`` is true on the debug page only: in a chat ``run.failed`` overwrites the answer.

        ``streams`` says whether messages are sent as streamed ones are.
        """
        self._run_id = run_id
        self._open = False
        self.message_cost = PLACEHOLDER_AND_EDIT if streams else 1
        self._emit = emit
        self.shows_failure = shows_failure
        self.failure_is_quiet = shows_failure

    @property
    def show_cost(self) -> int:
        """An edit, for the first one a placeholder too."""
        return 1 if self._open else self.message_cost

    @property
    def complete_cost(self) -> int:
        """The same: the host closes a bubble by an edit."""
        return self.show_cost

    async def show(self, text: str, sequence: int) -> None:
        """One cumulative delta; ``content`` and ``all_content`` are the same text."""
        self._open = True
        chunk = MessageChunk(role="assistant", content=text, all_content=text, msg_sequence=sequence)
        await self._emit(RunnerResult.message_delta(self._run_id, chunk))

    async def complete(self, text: str) -> None:
        """One completed message."""
        self._open = False
        await self._emit(RunnerResult.message_completed(self._run_id, Message(role="assistant", content=text)))

    async def aclose(self) -> None:
        """Nothing is held."""


class AgentBotSink:
    """Bubbles as explicit replies: a reply stream while it is being written, a plain reply otherwise.

    A reply stream's last update repeats nothing the surface shows: the host sends the text once more when the stream is
    finished, and Telegram refuses an edit without a change. So the whole text goes into an update that Telegram skips
    (it shows the first and each eighth) and appears with the finish.
    """

    every_message_arrives = True
    shows_failure = False
    failure_is_quiet = True

    message_cost = 1

    def __init__(self, ctx: RunnerContext, log: Callable[[str, str], Awaitable[None]], *, shown_every: int = 1) -> None:
        """``log`` takes a text without secrets and a level; of so many updates the surface shows one."""
        self._ctx = ctx
        self._log = log
        self._shown_every = shown_every
        self._manager: AbstractAsyncContextManager[Any] | None = None
        self._stream: Any = None
        self._updates = 0
        self._displayed = ""
        self._streams_left = limits.REPLY_STREAMS_PER_RUN
        self._broken = False

    @property
    def show_cost(self) -> int:
        """An edit where the update is shown, for a new stream a placeholder too, nothing where there is no stream."""
        if self._broken or (self._stream is None and self._streams_left == 0):
            return 0
        if self._stream is None:
            return PLACEHOLDER_AND_EDIT
        return int(self._updates % self._shown_every == 0)

    @property
    def complete_cost(self) -> int:
        """A reply, or a stream's last edit and the shown update that may have to come before it."""
        return 1 if self._stream is None else 1 + int(self._updates % self._shown_every == 0)

    async def show(self, text: str, sequence: int) -> None:
        """Update the reply stream; without one (refused, used up, broken) progress is not shown."""
        del sequence
        if self._broken or (self._stream is None and not await self._open()):
            return
        try:
            await self._update(text)
        except Exception as exc:  # noqa: BLE001 - progress is worth a log line, never the run
            await self._failed("progress", exc)
            await self._abort()
            self._broken = True
            if (later := too_fast(exc)) is not None:
                raise later from None

    async def complete(self, text: str) -> None:
        """Finish the stream with ``text``; where that fails, or nothing was streamed, reply with it."""
        if self._stream is not None and await self._finish(text):
            return
        self._broken = False
        try:
            await self._ctx.reply(text)
        except Exception as exc:  # noqa: BLE001 - nobody can be told; the ledger says what was lost
            if (later := too_fast(exc)) is not None:
                raise later from None
            await self._failed("message", exc)

    async def aclose(self) -> None:
        """Abort a stream left open; the host closes what is visible of it."""
        await self._abort()

    async def _open(self) -> bool:
        if self._streams_left == 0:
            return False
        manager = self._ctx.api.reply_stream()
        try:
            self._stream = await manager.__aenter__()
        except Exception as exc:  # noqa: BLE001 - a surface without live replies still gets whole ones
            self._streams_left = 0
            await self._failed("progress", exc)
            return False
        self._manager = manager
        self._streams_left -= 1
        self._updates = 0
        self._displayed = ""
        return True

    async def _update(self, text: str) -> None:
        await self._stream.update(text)
        if self._updates % SEQUENCE_STEP == 0:
            self._displayed = text
        self._updates += 1

    async def _finish(self, text: str) -> bool:
        manager = self._manager
        assert manager is not None
        try:
            while self._updates % SEQUENCE_STEP == 0 or self._displayed.strip() == text.strip():
                await self._update(f"{text} {MARKER}")
            await self._update(text)
            self._manager = self._stream = None
            await manager.__aexit__(None, None, None)
        except Exception as exc:  # noqa: BLE001 - the caller replies with the whole text instead
            await self._failed("reply stream", exc)
            await self._abort()
            if (later := too_fast(exc)) is not None:
                raise later from None
            return False
        return True

    async def _abort(self) -> None:
        manager, self._manager, self._stream = self._manager, None, None
        if manager is None:
            return
        try:
            raise _GaveUp
        except _GaveUp as reason:
            try:
                await manager.__aexit__(type(reason), reason, sys.exc_info()[2])
            except _GaveUp:
                return
            except Exception as exc:  # noqa: BLE001 - the host ends the stream with the run
                await self._failed("reply stream", exc)

    async def _failed(self, what: str, exc: Exception) -> None:
        await self._log(f"coding.reply_failed: {what} not delivered ({type(exc).__name__})", "warning")


class _GaveUp(Exception):
    """Leaves a reply stream without finishing it."""
