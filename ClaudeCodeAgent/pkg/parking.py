"""Turns that wait for a person after their run has ended: each is a live agent in the middle of a turn, with one open request.

A run that must ask shows the request, parks its turn here and ends, so that the chat is free. The answer comes as another run,
which takes the turn back and goes on in the same process.

Guarantees:

- a parked turn keeps its session, its locks and its messages; it is in no pool and pushed out by nothing;
- it is taken back by one run, once; whoever comes later finds nothing, not even in what the host's state still says of it;
- what the agent says meanwhile is kept up to ``limits.PARKED_EVENT_BYTES``; then text and progress are left out, told by one
  notice, while requests and the turn's end are kept;
- on its deadline the turn is cancelled, and so it is when it is stopped or its installation ends; a session that ended its turn
  in time is kept as any other, else it is closed. When the agent ends by itself its session is released at once;
- what became of a turn that nobody answered is told at once where there is a way, else it is the first line of the next run;
- a request that expired, was stopped or was not needed any more is answered by nothing any more (:meth:`ParkedTurns.settle`);
  only where the agent itself is gone may a later answer still resume its session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    ApprovalRequested,
    Notice,
    Prompt,
    QuestionAsked,
    SessionStarted,
    TextDelta,
    TurnEnded,
    to_json,
)
from pkg.interactions import OpenRequest
from pkg.warm_sessions import Adopt, Channel

if TYPE_CHECKING:
    from pkg.identity import Actor, Conversation

log = logging.getLogger(__name__)

WITHDRAWN: Final = "agent.request_withdrawn"
"""The code of the notice by which a driver says that the agent took a request (its text) back."""
_ALWAYS_KEPT: Final = (ApprovalRequested, QuestionAsked, SessionStarted, TurnEnded)


class HeldTurn(Protocol):
    """The session in hand, as far as a parked turn needs it: :class:`pkg.held_session.Held`."""

    channel: Channel[AgentEvent]
    turn_open: bool
    early: deque[AgentEvent]


class Carried(Protocol):
    """What keeps the session while no run does: :class:`pkg.run_session.RunSession`."""

    async def cancel_parked(self, *, revoked: bool) -> None:
        """Cancel the turn and release the session and its locks."""
        ...


class State(Enum):
    """Where a parked turn is."""

    WAITING = "waiting"
    TAKEN = "taken"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a turn nobody answered, as a text of the catalogue: its key and what was asked."""

    text_key: str
    asked: str
    said: str = ""
    """The beginning of what the agent said after it had asked."""


class ParkedTurn:
    """One turn that waits."""

    def __init__(
        self,
        *,
        key: str,
        conversation: Conversation,
        requester: Actor,
        approvers: tuple[str, ...],
        carried: Carried,
        held: HeldTurn,
        request: OpenRequest,
        language: str,
        until: float,
        expires_at: int,
        interaction_id: str = "",
        messages: Iterable[Prompt] = (),
        tell: Callable[[Outcome], Awaitable[None]] | None = None,
        write: Callable[[str, str], None] | None = None,
        allowance: str = "",
    ) -> None:
        """``until`` is a moment of the monotonic clock, ``expires_at`` the same one as the host is told it.

        ``messages`` have waited for their own turn since before the question; ``tell`` speaks to the chat outside a run and
        may raise anything. ``write`` writes down an end without an answer: what was decided, and by what. ``allowance`` is the
        name of what an answer allows (:func:`pkg.session_grants.placed`).
        """
        self.key = key
        self.conversation = conversation
        self.requester = requester
        self.approvers = approvers
        self.carried = carried
        self.held = held
        self.request = request
        self.language = language
        self.until = until
        self.expires_at = expires_at
        self.interaction_id = interaction_id or uuid.uuid4().hex
        self.messages = tuple(messages)
        self.tell = tell
        self.write = write
        self.allowance = allowance
        self.state = State.WAITING
        self.withdrawn = False
        """The agent took its request back and works on, unheard."""
        self.broken = False
        """The turn was ended by something else than the agent: it failed, or was cancelled by nobody here."""
        self.answering: Actor | None = None
        """Whoever has begun to answer: the next message of theirs belongs to it."""
        self._bytes = 0
        self._gap = False
        self._requests = 0
        for event in held.early:
            # What was said behind this request before it was shown.
            self._noticed(event)

    @property
    def seconds(self) -> int:
        """Seconds until its deadline, rounded up."""
        return max(1, math.ceil(self.until - time.monotonic()))

    def may_answer(self, actor: Actor, approvers: tuple[str, ...]) -> bool:
        """Whether ``actor`` is the requester, or an approver since it was asked who is one (``approvers``) still."""
        if actor.sender_id and actor.sender_id in self.approvers and actor.sender_id in approvers:
            return True
        return actor == self.requester and actor.sender_id == self.requester.sender_id

    @property
    def waits(self) -> bool:
        """Whether the agent still waits for the answer."""
        return self.held.turn_open and not self.withdrawn

    @property
    def overflows(self) -> bool:
        """Whether more requests wait behind the one that is shown than anybody could answer."""
        return self._requests > limits.PARKED_REQUEST_BYTES

    @property
    def agent_gone(self) -> bool:
        """Whether the agent has ended in the middle of the turn, however its end was told."""
        return self.held.channel.ended and not self.withdrawn and (self.held.turn_open or self.broken)

    def _noticed(self, event: AgentEvent) -> None:
        if isinstance(event, Notice) and event.code == WITHDRAWN and event.text == self.request.event.request_id:
            self.withdrawn = True
        if isinstance(event, TurnEnded):
            self.held.turn_open = False
            self.broken = event.error is not None or event.stop_reason == "cancelled"
        if isinstance(event, _ALWAYS_KEPT):
            self._requests += len(json.dumps(to_json(event)))

    def keep(self, event: AgentEvent) -> None:
        """Take what the agent said meanwhile."""
        self._noticed(event)
        if not isinstance(event, _ALWAYS_KEPT):
            self._bytes += len(json.dumps(to_json(event)))
            if self._bytes > limits.PARKED_EVENT_BYTES:
                if not self._gap:
                    self._gap = True
                    self.held.early.append(Notice("approval.parked_gap", level="warning"))
                return
        self.held.early.append(event)

    def renewed(self) -> None:
        """Another step of the same request is shown: what was shown before answers nothing any more."""
        self.interaction_id = uuid.uuid4().hex


class ParkedTurns:
    """The parked turns of one installation."""

    def __init__(self, adopt: Adopt, capacity: int = limits.PARKED_TURNS) -> None:
        """None is parked."""
        self._adopt = adopt
        self._capacity = capacity
        self._turns: dict[str, ParkedTurn] = {}
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()
        self._shut = False

    def __len__(self) -> int:
        """Turns waiting now."""
        return len(self._turns)

    @property
    def full(self) -> bool:
        """Whether no further turn can be parked."""
        return self._shut or len(self._turns) >= self._capacity

    def of(self, key: str) -> ParkedTurn | None:
        """The turn of one person (or one shared session) in one chat."""
        return self._turns.get(key)

    def in_chat(self, conversation: Conversation) -> list[ParkedTurn]:
        """Every parked turn of a chat, the longest waiting first."""
        return [turn for turn in self._turns.values() if turn.conversation == conversation]

    def shown_as(self, interaction_id: str) -> ParkedTurn | None:
        """The turn whose open request is shown under this id."""
        return next((turn for turn in self._turns.values() if turn.interaction_id == interaction_id), None)

    def put(self, turn: ParkedTurn) -> None:
        """Let the turn wait; its end is this object's from now on."""
        if self._shut or turn.key in self._turns:
            self.settle(turn.interaction_id)
            self._end(turn, None, by="the end of its run", revoked=self._shut)
            return
        self._turns[turn.key] = turn
        task = self._adopt(self._watch(turn), name="parked turn")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def take(self, turn: ParkedTurn) -> bool:
        """Take the turn back for a run; false when it has ended or another run was first."""
        if turn.state is not State.WAITING:
            return False
        self.settle(turn.interaction_id)
        self._leave(turn, State.TAKEN)
        return True

    def stop(self, turn: ParkedTurn) -> bool:
        """Cancel the turn because somebody who may wants it; false when it has ended already."""
        if turn.state is not State.WAITING:
            return False
        self.settle(turn.interaction_id)
        self._end(turn, None, by="stop")
        return True

    def settle(self, interaction_id: str) -> bool:
        """Let what was shown under this id be answered for the last time; false when it was already."""
        if interaction_id in self._settled:
            return False
        self._settled[interaction_id] = None
        while len(self._settled) > limits.SETTLED_REQUESTS:
            self._settled.popitem(last=False)
        return True

    def take_outcome(self, key: str) -> Outcome | None:
        """What became of the turn that was parked under ``key`` last, if nobody was told yet; told once."""
        return self._outcomes.pop(key, None)

    async def end_all(self) -> None:
        """Cancel every turn because the installation ends; returns when each is released."""
        self._shut = True
        for turn in list(self._turns.values()):
            self._end(turn, None, by="the end of the installation", revoked=True)
        while self._ending:
            await asyncio.wait(set(self._ending))

    # ---- inside

    def _leave(self, turn: ParkedTurn, state: State) -> None:
        turn.state = state
        if self._turns.get(turn.key) is turn:
            del self._turns[turn.key]
        turn.held.channel.wake()

    def _end(self, turn: ParkedTurn, outcome: Outcome | None, *, by: str, revoked: bool = False) -> None:
        self._leave(turn, State.ENDING)
        if turn.write is not None:
            turn.write("expired" if by == "time" else "cancelled", by)
        task = self._adopt(self._ended(turn, outcome, revoked=revoked), name="parked turn's end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _watch(self, turn: ParkedTurn) -> None:
        channel = turn.held.channel
        while turn.state is State.WAITING:
            event = channel.take()
            if event is not None:
                turn.keep(event)
                if turn.overflows:
                    self.settle(turn.interaction_id)
                    self._end(turn, Outcome("approval.too_many", turn.request.described()), by="its size")
            elif channel.ended or (left := turn.until - time.monotonic()) <= 0:
                if not turn.agent_gone:
                    self.settle(turn.interaction_id)
                self._end(turn, _outcome(turn), by="agent" if channel.ended or not turn.waits else "time")
            else:
                await channel.wait(left)

    async def _ended(self, turn: ParkedTurn, outcome: Outcome | None, *, revoked: bool) -> None:
        if outcome is not None:
            self._remember(turn.key, outcome)
        await turn.carried.cancel_parked(revoked=revoked)
        if outcome is None or turn.tell is None or self._outcomes.get(turn.key) is not outcome:
            return
        del self._outcomes[turn.key]
        try:
            await turn.tell(outcome)
        except Exception as exc:  # noqa: BLE001 - the next run tells it
            log.info("the end of a parked turn is left to the next run (%s)", type(exc).__name__)
            self._remember(turn.key, outcome)

    def _remember(self, key: str, outcome: Outcome) -> None:
        """Have the next run of ``key`` tell it, unless it can be told before."""
        self._outcomes[key] = outcome
        while len(self._outcomes) > limits.PARKED_OUTCOMES:
            self._outcomes.popitem(last=False)


def _outcome(turn: ParkedTurn) -> Outcome:
    said = "".join(event.text for event in turn.held.early if isinstance(event, TextDelta))[: limits.NOTICE_CHARS // 2]
    if turn.agent_gone:
        return Outcome("approval.agent_gone", turn.request.described(), said)
    key = "approval.expired" if turn.waits else "approval.not_needed"
    return Outcome(key, turn.request.described(), said)
