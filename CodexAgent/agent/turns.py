"""Which turn of a thread is ours and when it has ended: a state machine without I/O.

Guarantees: a turn ends only with ``turn/completed`` for its own id, or when its start was refused; what belongs to a turn that
has ended, or to one nobody started here, never counts for the open one. Codex answers ``turn/start`` before it tells of
the turn (0.171), but nothing here relies on that order: an end that overtakes the answer waits for it.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from pkg import limits
from pkg.agent_api import Json
from pkg.lenient import as_dict, as_str


@dataclass(frozen=True, slots=True)
class End:
    """How Codex ended a turn: ``completed``, ``failed``, ``interrupted`` or a word of its own; ``error`` as it came."""

    status: str
    error: Json = None
    items: Json = None


class _State(enum.Enum):
    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"


class TurnTracker:
    """The turns of one thread."""

    def __init__(self) -> None:
        self._state = _State.IDLE
        self._former: deque[str] = deque(maxlen=limits.CODEX_OLD_TURNS)
        self._held: End | None = None
        self.turn_id = ""
        """The open turn's id, empty while none is open or Codex has not told it."""

    @property
    def open(self) -> bool:
        """Whether a turn is starting or running."""
        return self._state is not _State.IDLE

    def start(self) -> None:
        """``turn/start`` is about to be sent."""
        self._state, self.turn_id, self._held = _State.STARTING, "", None

    def named(self, turn_id: str) -> End | None:
        """The answer to ``turn/start`` names the turn; returns its end when that came first."""
        if self._state is not _State.STARTING:
            return None
        held = self._held if turn_id == self.turn_id else None
        self._state, self.turn_id, self._held = _State.RUNNING, turn_id, None
        if held is not None:
            self.close()
        return held

    def close(self) -> None:
        """The open turn is over, whatever Codex still says about it."""
        if self.turn_id:
            self._former.append(self.turn_id)
        self._state, self.turn_id, self._held = _State.IDLE, "", None

    def belongs(self, turn_id: str) -> bool:
        """Whether something Codex says of the turn ``turn_id`` is about the open one."""
        if self._state is _State.RUNNING:
            return turn_id == self.turn_id
        if self._state is _State.IDLE or not turn_id or turn_id in self._former:
            return False
        # Of a thread that has one turn at a time, and whose last one is known to have ended, this is the new one.
        self.turn_id = self.turn_id or turn_id
        return turn_id == self.turn_id

    def completed(self, turn: Json) -> End | None:
        """``turn/completed`` came; the end, when it is the open turn's and its start has been answered."""
        item = as_dict(turn)
        if not self.belongs(as_str(item.get("id"))):
            return None
        end = End(as_str(item.get("status")) or "completed", item.get("error"), item.get("items"))
        if self._state is _State.STARTING:
            self._held = self._held or end
            return None
        self.close()
        return end
