"""When a run must end although its agent goes on: the idle watchdog and the absolute limit, as a clock without I/O.

All times are seconds of one monotonic clock that the caller reads. Silence is not failure: any event resets the idle time,
and it does not pass at all while a tool call is running or an approval is open. The absolute limit is the earlier of the
form's ``timeout`` and the host's deadline; it is *due* a margin before, so that the end can still be delivered
(:data:`pkg.limits.SOFT_END_MARGIN`, half of the limit when that is less than twice the margin), and what is delivered must be
on its way a little before it (:data:`pkg.limits.FINISH_MARGIN`, a quarter of the limit when that is less).
"""

from __future__ import annotations

import math
from typing import Literal

from pkg import limits
from pkg.agent_api import AgentEvent, ApprovalRequested, QuestionAsked, ToolFinished, ToolStarted, TurnEnded

Due = Literal["time", "idle"]


class RunClock:
    """The two limits of one run."""

    def __init__(self, now: float, *, timeout: float, deadline_in: float | None, idle: float) -> None:
        """``deadline_in`` seconds remain to the host (``None``: it has no deadline); ``idle`` of zero never ends a run."""
        self.limit = min(timeout, math.inf if deadline_in is None else max(deadline_in, 0.0))
        self.idle = idle
        self._soft_end = now + max(self.limit - limits.SOFT_END_MARGIN, self.limit / 2)
        self.send_until = now + max(self.limit - limits.FINISH_MARGIN, 0.75 * self.limit)
        """When the last message must be on its way."""
        self._last = now
        self._tools: set[str] = set()
        self._asked: set[str] = set()

    def event(self, event: AgentEvent, now: float) -> None:
        """Something arrived from the agent."""
        self._last = now
        match event:
            case ToolStarted(tool_call_id=name):
                self._tools.add(name)
            case ToolFinished(tool_call_id=name):
                self._tools.discard(name)
            case ApprovalRequested(request_id=name) | QuestionAsked(request_id=name):
                self._asked.add(name)
            case TurnEnded():
                self._tools.clear()
                self._asked.clear()
            case _:
                pass

    def pause(self, name: str) -> None:
        """Something else than the agent is waited for, until :meth:`answered` is told the same name."""
        self._asked.add(name)

    def answered(self, request_id: str, now: float) -> None:
        """An approval or question is answered: the agent is at work again."""
        self._asked.discard(request_id)
        self._last = now

    def touched(self, now: float) -> None:
        """The agent was given something to do."""
        self._last = now

    @property
    def paused(self) -> bool:
        """Whether idle time does not pass now."""
        return bool(self._tools or self._asked)

    def due(self, now: float) -> Due | None:
        """Which limit is reached, if any."""
        if now >= self._soft_end:
            return "time"
        if self.idle > 0 and not self.paused and now - self._last >= self.idle:
            return "idle"
        return None
