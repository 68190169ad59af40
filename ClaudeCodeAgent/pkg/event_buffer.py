"""The buffer between an agent's reader and the session's one consumer: bounded, in order, never losing an event.

Its size is an estimate of the events' text. Pieces of text that wait behind each other are joined: an agent may write tens of
thousands of them per second, and whoever reads does the same work for each event, however short.

A full buffer makes the reader wait, except while a turn is being cancelled or the session closed: then what the agent must
still be heard for comes through, and text over the bound is dropped and counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

from pkg import limits
from pkg.agent_api import AgentEvent, Notice, TextDelta, ThoughtDelta, TurnEnded

_EVENT_OVERHEAD = 200
_PIECES = 256
"""Pieces held apart before they become one text, so that short ones cost no more memory than they say."""

_Text = TextDelta | ThoughtDelta


class _Entry:
    """One waiting event; ``more`` are the texts joined to its own."""

    __slots__ = ("event", "more", "size")

    def __init__(self, event: AgentEvent, size: int) -> None:
        self.event = event
        self.size = size
        self.more: list[str] = []

    def takes(self, event: _Text) -> bool:
        """Whether ``event`` continues this one's text."""
        mine = self.event
        if type(mine) is not type(event) or self.size + len(event.text) > limits.EVENT_JOINED_CHARS:
            return False
        return getattr(mine, "message_id", "") == getattr(event, "message_id", "")

    def join(self, text: str) -> None:
        """Take the text of an event that continues this one's."""
        self.more.append(text)
        self.size += len(text)
        if len(self.more) == _PIECES:
            self.more = ["".join(self.more)]

    def whole(self) -> AgentEvent:
        """The event with all of its text."""
        if not self.more or not isinstance(self.event, _Text):
            return self.event
        return dataclasses.replace(self.event, text="".join([self.event.text, *self.more]))


def weight(value: object) -> int:
    """About how many bytes a value keeps in memory."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(weight(key) + weight(item) for key, item in value.items()) + _EVENT_OVERHEAD
    if isinstance(value, tuple | list):
        return sum(map(weight, value)) + _EVENT_OVERHEAD
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(weight(getattr(value, item.name)) for item in dataclasses.fields(value)) + _EVENT_OVERHEAD
    return 16


class EventBuffer:
    """A queue of events with a bound in bytes."""

    def __init__(self, limit: int = limits.EVENT_BUFFER_BYTES) -> None:
        self._limit = limit
        self._events: deque[_Entry] = deque()
        self._size = 0
        self._dropped = 0
        self._lifted = False
        self._finished = False
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether the reader has to wait before it may add more."""
        return self._size >= self._limit and not self._lifted

    def put(self, event: AgentEvent) -> None:
        """Add an event; never waits."""
        if isinstance(event, _Text):
            self._put_text(event)
            return
        if self._dropped and isinstance(event, TurnEnded):
            self._append(Notice("coding.events_dropped", params={"count": str(self._dropped)}), _EVENT_OVERHEAD)
            self._dropped = 0
        self._append(event, weight(event))

    def _put_text(self, event: _Text) -> None:
        if self._lifted and self._size >= self._limit:
            self._dropped += 1
            return
        last = self._events[-1] if self._events else None
        if last is None or not last.takes(event):
            self._append(event, len(event.text) + _EVENT_OVERHEAD)
            return
        last.join(event.text)
        self._grow(len(event.text))

    def _append(self, event: AgentEvent, size: int) -> None:
        self._events.append(_Entry(event, size))
        self._grow(size)
        self._filled.set()

    def _grow(self, size: int) -> None:
        self._size += size
        if self.full:
            self._room.clear()

    def lift(self, lifted: bool) -> None:
        """Let the reader go on although the buffer is full, or bind it again."""
        self._lifted = lifted
        if self.full:
            self._room.clear()
        else:
            self._room.set()

    async def room(self) -> None:
        """Wait until the reader may go on."""
        await self._room.wait()

    async def get(self) -> AgentEvent | None:
        """The next event, ``None`` after the last one. Cancelling it loses nothing."""
        while not self._events:
            if self._finished:
                return None
            self._filled.clear()
            await self._filled.wait()
        entry = self._events.popleft()
        self._size -= entry.size
        if not self.full:
            self._room.set()
        return entry.whole()

    def take_late_text(self) -> str:
        """Remove the unread answer text that came after the last turn's end and return it, joined."""
        kept: list[_Entry] = []
        late: list[str] = []
        while self._events and not isinstance(self._events[-1].event, TurnEnded):
            entry = self._events.pop()
            if isinstance(event := entry.whole(), TextDelta):
                late.append(event.text)
                self._size -= entry.size
            else:
                kept.append(entry)
        self._events.extend(reversed(kept))
        if not self.full:
            self._room.set()
        return "".join(reversed(late))

    def finish(self) -> None:
        """Say that no event will follow."""
        self._finished = True
        self._filled.set()
        self._room.set()
