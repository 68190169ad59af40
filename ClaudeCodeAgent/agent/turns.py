"""Where a turn begins and ends, decided by the uuids of its messages: a state machine without I/O.

The program answers one message with one ``result`` when nothing else happens. A message that is written while it works is
either absorbed into the running answer or answered in a further one, and background work makes answers nobody asked for, so
results are never counted. What decides is ``command_lifecycle``, which names each message's uuid as ``queued``, ``started``,
and at last ``completed`` or ``cancelled`` (also after an error): our turn is over when that has been said of every message in
it and a result has come since the first of them was started.

Programs that do not tell lifecycles are taken at their word about being idle, and those that tell neither end a turn with its
result (Claude Code before 2.1).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final, Literal

_TERMINAL: Final = frozenset({"completed", "cancelled"})
_KNOWN: Final = frozenset({"queued", "started", *_TERMINAL})

Fate = Literal["absorbed", "own_turn", "cancelled"]
"""What became of a message that was put into a running turn."""


class State(enum.Enum):
    """What the program is doing, as it says itself."""

    IDLE = "idle"
    RUNNING = "running"
    REQUIRES_ACTION = "requires_action"


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a message put into a running turn."""

    message_id: str
    fate: Fate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one line means for the turn: settled messages, a result the turn goes on after, and whether it is over."""

    settled: tuple[Settled, ...] = ()
    passed: dict[str, Any] | None = None
    """The result before the last one, of a turn that went on."""
    over: bool = False


@dataclass(slots=True)
class _Turn:
    states: dict[str, str] = field(default_factory=dict)
    steered: set[str] = field(default_factory=set)
    result: dict[str, Any] | None = None
    begun: bool = False
    """Whether the program has begun to work on one of the messages."""


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self._turn: _Turn | None = None
        self._answering = False
        """Whether the program is between a start of work and its result."""
        self._starting = False
        """Whether work on waiting messages begins: more of them may follow before it has begun."""
        self._tells_lifecycles = False
        self._tells_states = False

    @property
    def open(self) -> bool:
        """Whether a turn of ours is open."""
        return self._turn is not None

    @property
    def begun(self) -> bool:
        """Whether the program works on the open turn, and not on something of its own before it."""
        return self._turn is not None and (self._turn.begun or not self._tells_lifecycles)

    @property
    def result(self) -> dict[str, Any]:
        """The open turn's last result; empty when there was none."""
        return (self._turn.result if self._turn is not None else None) or {}

    def begin(self, message_id: str) -> None:
        """A prompt is about to be written."""
        self._turn = _Turn({message_id: "sent"})

    def steer(self, message_id: str) -> None:
        """Another message is about to be written into the open turn."""
        assert self._turn is not None
        self._turn.states[message_id] = "sent"
        self._turn.steered.add(message_id)

    def end(self) -> None:
        """The open turn is over, whatever the program says."""
        self._turn = None

    def line(self, message: dict[str, Any]) -> Outcome:
        """What one line of the program means for the open turn."""
        match message.get("type"):
            case "command_lifecycle":
                return self._lifecycle(str(message.get("command_uuid")), str(message.get("state")))
            case "result":
                return self._result(message)
            case "system" if message.get("subtype") == "session_state_changed":
                return self._state(str(message.get("state")))
            case "system" if message.get("subtype") == "init":
                self._answering, self._starting = True, False
        return Outcome()

    def _lifecycle(self, message_id: str, state: str) -> Outcome:
        self._tells_lifecycles = True
        turn = self._turn
        if turn is None or state not in _KNOWN or turn.states.get(message_id) in (None, *_TERMINAL):
            return Outcome()
        settled: tuple[Settled, ...] = ()
        steered = message_id in turn.steered and turn.states[message_id] != "started"
        turn.states[message_id] = state
        if state == "started":
            self._starting = self._starting or not self._answering
            if steered:
                settled = (Settled(message_id, "own_turn" if self._starting else "absorbed"),)
            turn.begun = self._answering = True
        elif state == "cancelled" and steered:
            settled = (Settled(message_id, "cancelled"),)
        return Outcome(settled, over=self._over(turn))

    def _result(self, message: dict[str, Any]) -> Outcome:
        self._answering = self._starting = False
        turn = self._turn
        if turn is None or not (turn.begun or not self._tells_lifecycles):
            return Outcome()
        passed, turn.result = turn.result, message
        blind = not self._tells_lifecycles and not self._tells_states
        return Outcome(passed=passed, over=blind or self._over(turn))

    def _state(self, name: str) -> Outcome:
        self._tells_states = True
        try:
            self.state = State(name)
        except ValueError:
            return Outcome()
        turn = self._turn
        if self.state is not State.IDLE or turn is None:
            return Outcome()
        if turn.result is None:
            # It was too long to be read, or never written; every message of the turn is done with all the same.
            return Outcome(over=turn.begun and all(state in _TERMINAL for state in turn.states.values()))
        unread = {"queued", "sent"} if self._tells_lifecycles else {"queued"}
        return Outcome(over=not unread.intersection(turn.states.values()))

    def _over(self, turn: _Turn) -> bool:
        if not all(state in _TERMINAL for state in turn.states.values()):
            return False
        return turn.result is not None or not turn.begun
