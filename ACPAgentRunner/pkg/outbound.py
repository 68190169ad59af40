"""What is said but not sent yet: a queue between the bubbles and their sink that keeps to the pace of the chat.

Guarantees:

- things leave in the order in which they came, each once, none before its chat takes it (:class:`pkg.pacing.Pace`), except
  the last message of a run whose time is over;
- a message that the service refused for coming too fast stays first and is tried again after the service's pause,
  ``limits.REPLY_RETRIES`` times; progress refused that way is dropped;
- what is taken back (:meth:`Outbound.rest`) is the text as it was written, without the fence lines that splitting adds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pkg import limits
from pkg.bubbles import Action, Complete, Show
from pkg.pacing import Pace
from pkg.reply_sinks import ReplySink, TryLater

_RESERVE = 1
"""Calls that progress leaves for the message it is progress of."""


@dataclass(slots=True)
class _Item:
    action: Action
    apart: bool
    """Begins another message than the one before, rather than going on in it."""
    must: bool
    """Has to be read whatever else is left out."""
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """What was not sent: the text, and the last thing that has to be read anyway (``""`` for none), which is in it too."""

    text: str
    must: str


class Outbound:
    """One run's queue; its calls come one at a time."""

    def __init__(
        self,
        sink: ReplySink,
        pace: Pace,
        clock: Callable[[], float],
        log: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """``log`` takes a text without secrets and a level."""
        self._sink = sink
        self._pace = pace
        self._clock = clock
        self._log = log
        self._queue: deque[_Item] = deque()
        self._apart = True
        self._messages = 0
        self._cap = limits.MESSAGES_PER_RUN if pace.allowance is not None else None

    # ---- what it knows

    @property
    def waiting(self) -> bool:
        """Whether anything is not sent yet."""
        return bool(self._queue)

    @property
    def capped(self) -> bool:
        """Whether so much was sent that what waits should go another way."""
        return self._cap is not None and self._messages >= self._cap and len(self._queue) > 1

    @property
    def backlog(self) -> float:
        """Seconds until everything that waits can be sent."""
        if not self._queue:
            return 0.0
        now = self._clock()
        calls = self._cost(self._queue[0].action) + (len(self._queue) - 1) * self._sink.message_cost
        return self._pace.ready_at(calls, now) - now

    def may_show(self) -> bool:
        """Whether progress can be shown without making the message itself wait."""
        if self._queue:
            return False
        cost, now = self._sink.show_cost, self._clock()
        return cost == 0 or self._pace.ready_at(cost + _RESERVE, now) <= now

    @property
    def wait(self) -> float:
        """Seconds until the next thing may be sent, 0 when nothing waits."""
        if not self._queue:
            return 0.0
        now = self._clock()
        return self._pace.ready_at(self._cost(self._queue[0].action), now) - now

    def fits(self, until: float) -> bool:
        """Whether the next thing, and a last message after it where more waits, can be sent by then."""
        if not self._queue:
            return True
        after = self._sink.message_cost if len(self._queue) > 1 else 0
        return self._pace.ready_at(self._cost(self._queue[0].action) + after, self._clock()) <= until

    # ---- what happens

    def put(self, actions: list[Action], *, ends: bool = False, must: bool = False) -> None:
        """Take what is to be sent; ``ends`` says that the message is over, ``must`` that it has to be read in any case."""
        for action in actions:
            self._queue.append(_Item(action, self._apart, must))
            if isinstance(action, Complete):
                self._apart = False
        self._apart = self._apart or ends

    async def pump(self) -> None:
        """Send what may be sent now."""
        while self._queue and not self.capped and self.wait <= 0:
            await self._send()

    async def force(self) -> None:
        """Send what is first now, whatever the pace: there is no later."""
        if self._queue:
            await self._send()

    def uncap(self) -> None:
        """Send everything however much it is, because there is no other way."""
        self._cap = None

    def rest(self) -> Rest:
        """What waits, as one text."""
        must = ""
        pieces: list[str] = []
        for item in self._queue:
            if not isinstance(item.action, Complete):
                continue
            if item.apart and pieces:
                pieces[-1] = pieces[-1].rstrip("\n") + "\n\n"
            pieces.append(item.action.body)
            must = item.action.text if item.must else must
        return Rest("".join(pieces), must)

    def replace(self, text: str) -> None:
        """One message instead of everything that waits."""
        self._queue.clear()
        self._queue.append(_Item(Complete(text, text), apart=True, must=True))
        self._apart = True

    # ---- inside

    def _cost(self, action: Action) -> int:
        return self._sink.show_cost if isinstance(action, Show) else self._sink.complete_cost

    async def _send(self) -> None:
        item = self._queue[0]
        self._pace.take(self._cost(item.action), self._clock())
        try:
            if isinstance(item.action, Show):
                await self._sink.show(item.action.text, item.action.sequence)
            else:
                await self._sink.complete(item.action.text)
        except TryLater as later:
            self._pace.hold(later.seconds, self._clock())
            item.tries += 1
            if isinstance(item.action, Complete):
                if item.tries <= limits.REPLY_RETRIES:
                    return
                await self._log("coding.reply_failed: message refused for coming too fast", "warning")
        self._messages += isinstance(item.action, Complete)
        self._queue.popleft()
