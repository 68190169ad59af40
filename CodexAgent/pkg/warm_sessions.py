"""Sessions that stay alive between messages: one reader per session, a bounded pool, and an end for each.

A :class:`LiveSession` reads its session's event stream from opening to close, so that the agent's pipe never fills while
nobody listens and its death is noticed at once. A run *attaches* and gets every event from then on through a
:class:`Channel`; what arrives while nobody is attached has no voice and is dropped.

Guarantees of :class:`WarmSessions`: a session is taken by one run at a time (it leaves the pool when taken); it is handed
out only for the very key and settings fingerprint it was opened with, and one with another fingerprint is closed; an
expired, surplus or dead session is closed by a task of its installation; :meth:`WarmSessions.close_all` returns when none
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pkg import limits, traceless
from pkg.agent_api import AgentEvent, AgentSession, Json
from pkg.session_grants import SessionGrants


class Adopt(Protocol):
    """Starts background work with an owner: :meth:`pkg.installations.Installation.adopt`."""

    def __call__(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work`` in an empty context."""
        ...


class Companion(Protocol):
    """Something that ends together with a session."""

    async def close(self) -> None:
        """End it; idempotent."""
        ...


Item = TypeVar("Item")


class Channel(Generic[Item]):
    """Items on their way from one task to another: bounded, in order, closable from either side."""

    def __init__(self, capacity: int = limits.EVENT_CHANNEL) -> None:
        """An open, empty channel of ``capacity`` items."""
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self.ended = False
        """Nothing comes after what is still inside."""

    @property
    def waiting(self) -> int:
        """Items inside."""
        return len(self._items)

    async def put(self, item: Item) -> None:
        """Add an item, waiting for room; drops it when the channel is closed."""
        while len(self._items) >= self._capacity and not self._closed:
            self._room.clear()
            await self._room.wait()
        if not self._closed:
            self._items.append(item)
            self._changed.set()

    def end(self) -> None:
        """Say that nothing comes any more."""
        self.ended = True
        self._changed.set()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()

    def close(self) -> None:
        """The consumer is gone: forget what is inside and let a waiting :meth:`put` go."""
        self._closed = True
        self._items.clear()
        self._room.set()

    def take(self) -> Item | None:
        """The next item, or ``None`` when there is none now."""
        if not self._items:
            return None
        item = self._items.popleft()
        self._room.set()
        return item

    async def wait(self, timeout: float | None = None) -> None:
        """Return when there is an item or the end, after ``timeout`` seconds at the latest."""
        if self._items or self.ended:
            return
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with traceless.within(timeout):
                await self._changed.wait()


class LiveSession:
    """An open session with its reader, and the companion that ends together with it."""

    def __init__(self, key: str, fingerprint: str, session: AgentSession, adopt: Adopt) -> None:
        """Start reading; ``key`` says who may use the session, ``fingerprint`` with which settings it was opened.

        A channel is attached from the first event on: :attr:`channel`.
        """
        self.key = key
        self.fingerprint = fingerprint
        self.session = session
        self.companion: Companion | None = None
        """Closed before the session."""
        self.guards = contextlib.AsyncExitStack()
        """Closed after the session."""
        self.options: Mapping[str, Json] = types.MappingProxyType({})
        """The options it goes on with."""
        self.grants = SessionGrants()
        """What people allowed for as long as the session lives."""
        self.stored_id = ""
        """The vendor's id as it is known to be stored by the host."""
        self.gone = asyncio.Event()
        """The event stream has ended."""
        self.channel: Channel[AgentEvent] = Channel()
        """The channel attached last."""
        self._attached = True
        self._adopt = adopt
        self._reader = adopt(self._read(), name="session reader")
        self._closing: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether another turn can be prompted."""
        return self.session.alive and not self.gone.is_set() and self._closing is None

    def attach(self) -> Channel[AgentEvent]:
        """A new channel that gets every event from now on; the one attached before is closed."""
        self.detach()
        self.channel = Channel()
        self._attached = True
        if self.gone.is_set():
            self.channel.end()
        return self.channel

    def detach(self) -> None:
        """Nobody listens any more."""
        self._attached = False
        self.channel.close()

    def begin_close(self) -> asyncio.Task[None]:
        """Start ending the session and everything that belongs to it; the task is its installation's and awaited there."""
        if self._closing is None:
            self._closing = self._adopt(self._close(), name="session close")
        return self._closing

    async def close(self) -> None:
        """End the session and wait for it; the ending goes on when the caller is cancelled.

        Raises :class:`pkg.errors.ProcessCleanupUnconfirmed`.
        """
        await asyncio.shield(self.begin_close())

    async def _close(self) -> None:
        async with self.guards:
            self.detach()
            try:
                if self.companion is not None:
                    await self.companion.close()
            finally:
                try:
                    await self.session.close()
                finally:
                    self._reader.cancel()
                    await asyncio.wait({self._reader})

    async def _read(self) -> None:
        try:
            async for event in self.session.events():
                if self._attached:
                    await self.channel.put(event)
        finally:
            self.gone.set()
            self.channel.end()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    live: LiveSession
    left: asyncio.Event


class WarmSessions:
    """The sessions of one installation that wait for their next message."""

    def __init__(self, adopt: Adopt, capacity: int = limits.WARM_SESSIONS) -> None:
        """An empty pool of at most ``capacity`` sessions."""
        self._adopt = adopt
        self._capacity = capacity
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._closing: dict[str, set[asyncio.Task[None]]] = {}
        self._shut = False

    def __len__(self) -> int:
        """Sessions waiting now."""
        return len(self._waiting)

    def take(self, key: str, fingerprint: str) -> LiveSession | None:
        """The waiting session of ``key``; ``None`` when there is none that can be used with these settings.

        One that can't be used is being closed when this returns: :meth:`settled` waits for it.
        """
        live = self._leave(key)
        if live is None:
            return None
        if live.usable and live.fingerprint == fingerprint:
            return live
        self._end(live)
        return None

    async def settled(self, key: str) -> None:
        """Return when no session of ``key`` is being closed here, so that another may open the same vendor session."""
        while self._closing.get(key):
            await asyncio.wait(set(self._closing[key]))

    def put(self, live: LiveSession, keep: float) -> None:
        """Keep ``live`` for ``keep`` seconds; it is closed when it expires, dies or is pushed out by newer ones."""
        live.detach()
        if self._shut or keep <= 0 or not live.usable:
            self._end(live)
            return
        replaced = self._leave(live.key)
        if replaced is not None:
            self._end(replaced)
        entry = _Waiting(live, asyncio.Event())
        self._waiting[live.key] = entry
        self._adopt(self._expire(entry, keep), name="session keep-warm")
        while len(self._waiting) > self._capacity:
            oldest = self._leave(next(iter(self._waiting)))
            if oldest is not None:
                self._end(oldest)

    async def close_all(self) -> None:
        """Close every waiting session and wait for those being closed; nothing put afterwards is kept."""
        self._shut = True
        for key in list(self._waiting):
            live = self._leave(key)
            if live is not None:
                self._end(live)
        for key in list(self._closing):
            await self.settled(key)

    def _leave(self, key: str) -> LiveSession | None:
        entry = self._waiting.pop(key, None)
        if entry is None:
            return None
        entry.left.set()
        return entry.live

    def _end(self, live: LiveSession) -> None:
        task = live.begin_close()
        ending = self._closing.setdefault(live.key, set())
        ending.add(task)

        def forget(_: asyncio.Task[None]) -> None:
            ending.discard(task)
            if not ending and self._closing.get(live.key) is ending:
                del self._closing[live.key]

        task.add_done_callback(forget)

    async def _expire(self, entry: _Waiting, keep: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (entry.left, entry.live.gone)]
        try:
            await asyncio.wait(waits, timeout=keep, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)
        if not entry.left.is_set() and self._waiting.get(entry.live.key) is entry:
            self._leave(entry.live.key)
            self._end(entry.live)
