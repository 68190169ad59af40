"""A number of slots that everybody in this process shares: nobody gets all of them, and nobody waits behind another's queue.

Guarantees: at most ``total`` slots are taken at a time, at most ``each`` of them under one key; a slot that is free goes to the
waiting key that has the fewest, and under one key to whoever waited longest; whoever stops waiting leaves nothing behind. A key
is held only while something of it has a slot or waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable


class FairSlots:
    """The slots."""

    def __init__(self, total: int, each: int) -> None:
        """All are free."""
        self._total = total
        self._each = each
        self._taken: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def one(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for a slot under ``key`` and have it until the block ends."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._hand_out()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._give_back(key)
            else:
                self._leave(key, turn)

    def _hand_out(self) -> None:
        while sum(self._taken.values()) < self._total:
            fitting = [key for key in self._waiting if self._taken.get(key, 0) < self._each]
            if not fitting:
                return
            key = min(fitting, key=lambda waiting: self._taken.get(waiting, 0))
            turn = self._waiting[key][0]
            self._leave(key, turn)
            if not turn.done():
                self._taken[key] = self._taken.get(key, 0) + 1
                turn.set_result(None)

    def _leave(self, key: Hashable, turn: asyncio.Future[None]) -> None:
        """No longer wait; the key goes behind the others that wait."""
        queue = self._waiting.pop(key, deque())
        with contextlib.suppress(ValueError):
            queue.remove(turn)
        if queue:
            self._waiting[key] = queue

    def _give_back(self, key: Hashable) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._hand_out()
