"""How fast one chat takes messages: a token bucket without I/O, and one of them for each chat.

Chat services limit how many messages and edits a bot makes in one chat, and nothing between a run and the service waits or
tries again: what comes too fast is lost. Time is passed in, in seconds of one clock that never runs back. Guarantees, as long
as nothing is taken before :meth:`Pace.ready_at`:

- in any stretch of time at most ``burst`` plus ``per_second`` times its length calls are made;
- after :meth:`Pace.hold` none is made until the service's own pause is over, and no burst follows it;
- runs in the same chat share its bucket (:class:`Paces`), one after the other or at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pkg import limits


@dataclass(frozen=True, slots=True)
class Allowance:
    """``burst`` messages and edits at once, ``per_second`` in the long run."""

    burst: int
    per_second: float


@dataclass(slots=True)
class Pace:
    """One chat's bucket; with no allowance only the service's own pauses count."""

    allowance: Allowance | None = None
    _level: float = field(init=False, default=math.inf)
    _at: float = field(init=False, default=-math.inf)
    _not_before: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        if self.allowance is not None:
            self._level = self.allowance.burst

    def ready_at(self, calls: int, now: float) -> float:
        """When that many calls may be made, never before ``now``; at most a burst of them is asked for at once."""
        if calls <= 0:
            return now
        start = max(now, self._not_before)
        if self.allowance is None:
            return start
        missing = calls - self._filled(start)
        return start if missing <= _ROUNDING else start + missing / self.allowance.per_second

    def take(self, calls: int, now: float) -> None:
        """They are made now; before :meth:`ready_at` that is a debt the next ones wait for."""
        if self.allowance is not None and calls > 0:
            self._level = self._filled(now) - calls
            self._at = now

    def hold(self, seconds: float, now: float) -> None:
        """The service asked for a pause: nothing is ready before it is over, and then one call at a time."""
        self._not_before = max(self._not_before, now + seconds)
        if self.allowance is not None:
            self._level = min(self._filled(now), 1 - seconds * self.allowance.per_second)
            self._at = now

    def full(self, now: float) -> bool:
        """Whether nothing is left of what happened here."""
        return now >= self._not_before and (self.allowance is None or self._filled(now) >= self.allowance.burst)

    def _filled(self, now: float) -> float:
        assert self.allowance is not None
        if now <= self._at:
            return self._level
        passed = 0.0 if self._at == -math.inf else now - self._at
        return min(float(self.allowance.burst), self._level + passed * self.allowance.per_second)


_ROUNDING: Final = 1e-6
"""Tokens that may be missing: what waiting exactly long enough leaves open in floating point."""


class Paces:
    """The buckets of an installation's chats; a chat that rested is forgotten."""

    def __init__(self) -> None:
        """No chat has been written to."""
        self._chats: dict[str, Pace] = {}

    def __len__(self) -> int:
        return len(self._chats)

    def of(self, chat: str, allowance: Allowance | None, now: float) -> Pace:
        """The chat's bucket; ``chat`` is any name that no other chat has."""
        found = self._chats.get(chat)
        if found is not None and found.allowance == allowance:
            return found
        if len(self._chats) >= limits.PACED_CHATS:
            self._chats = {name: pace for name, pace in self._chats.items() if not pace.full(now)}
        while len(self._chats) >= limits.PACED_CHATS:
            del self._chats[next(iter(self._chats))]
        made = self._chats[chat] = Pace(allowance)
        return made
