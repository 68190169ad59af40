"""The buffer between an agent's reader and the session's one consumer: bounded, in order, never losing an event.

Its size is an estimate of the events' text. A full buffer makes the reader wait, except while a turn is being cancelled or the
session closed: then what the agent must still be heard for comes through, and text over the bound is dropped and counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

from pkg import limits
from pkg.agent_api import AgentEvent, Notice, TextDelta, ThoughtDelta, TurnEnded

_EVENT_OVERHEAD = 200


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
        self._events: deque[tuple[AgentEvent, int]] = deque()
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
        size = len(event.text) + _EVENT_OVERHEAD if isinstance(event, TextDelta | ThoughtDelta) else weight(event)
        if self._lifted and self._size >= self._limit and isinstance(event, TextDelta | ThoughtDelta):
            self._dropped += 1
            return
        if self._dropped and isinstance(event, TurnEnded):
            self._append(Notice("coding.events_dropped", params={"count": str(self._dropped)}), _EVENT_OVERHEAD)
            self._dropped = 0
        self._append(event, size)

    def _append(self, event: AgentEvent, size: int) -> None:
        self._events.append((event, size))
        self._size += size
        self._filled.set()
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
        event, size = self._events.popleft()
        self._size -= size
        if not self.full:
            self._room.set()
        return event

    def take_late_text(self) -> str:
        """Remove the unread answer text that came after the last turn's end and return it, joined."""
        kept: list[tuple[AgentEvent, int]] = []
        late: list[str] = []
        while self._events and not isinstance(self._events[-1][0], TurnEnded):
            event, size = self._events.pop()
            if isinstance(event, TextDelta):
                late.append(event.text)
                self._size -= size
            else:
                kept.append((event, size))
        self._events.extend(reversed(kept))
        if not self.full:
            self._room.set()
        return "".join(reversed(late))

    def finish(self) -> None:
        """Say that no event will follow."""
        self._finished = True
        self._filled.set()
        self._room.set()
