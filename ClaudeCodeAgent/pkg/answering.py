"""What a message or a press means for the requests that are open in its chat: pure lookups, and one look into the host's state.

Guarantees: only the requester and the approvers answer; a press counts for the request it was shown with and for no other; a
message that is no answer never reaches the agent past an open request of its writer; an approver's message that is no answer is
a message of its own.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from langbot_plugin.api.entities.builtin.runner.interaction import InteractionSubmission

from pkg.agent_api import ApprovalRequested, Choice, Json
from pkg.identity import Actor, Conversation
from pkg.interactions import Again, Decided, OpenRequest, Outcome, Unclear, answer_like
from pkg.open_record import Offers, OpenRecord, record_from
from pkg.parking import ParkedTurn, ParkedTurns
from pkg.session_store import SessionStore


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run for a parked turn: with the answer to its request, or to hear what became of one that waits for none any more."""

    turn: ParkedTurn
    decided: Decided | None


@dataclass(frozen=True, slots=True)
class Told:
    """Nothing changes, and the person is told so."""

    text_key: str
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Further:
    """The request has another step, to be shown now; or the same one again, for what is ``wrong`` with what was sent."""

    turn: ParkedTurn
    wrong: Told | None = None


@dataclass(frozen=True, slots=True)
class Late:
    """The answer to a request whose turn is gone, within its time; ``text`` answers a question."""

    record: OpenRecord
    allowed: bool
    text: str


Meaning = Resumed | Further | Told

_ANY: Final = ApprovalRequested(
    "", "-", "other", (Choice("allow", "", "allow_once"), Choice("deny", "", "reject_once")), cwd="-", command="-"
)
_OFFERED: Final[Mapping[Offers, ApprovalRequested]] = types.MappingProxyType(
    {
        "all": _ANY,
        "once": dataclasses.replace(_ANY, kind="mode"),
        "denial": dataclasses.replace(_ANY, complete=False),
        "reason": dataclasses.replace(_ANY, complete=False),
    }
)
"""Stand for requests of which only the choices are known, so that a number means what it meant when it was shown."""


def meaning(
    parked: ParkedTurns,
    conversation: Conversation,
    actor: Actor,
    key: str,
    submission: InteractionSubmission | None,
    text: str,
    approvers: tuple[str, ...] = (),
) -> Meaning | None:
    """What a press (``submission``) or a message says about the parked turns of its chat; ``None``: nothing.

    ``key`` is where a turn of the actor would be parked, ``approvers`` are those of the form as it is now.
    """
    if submission is not None:
        turn = parked.shown_as(submission.interaction_id)
        if turn is None or turn.conversation != conversation:
            return None
        if not turn.may_answer(actor, approvers):
            return Told("approval.not_yours")
        if not turn.waits:
            return Resumed(turn, None)
        outcome = turn.request.pressed(submission.action_id or "", submission.values)
        if isinstance(outcome, Unclear) and not turn.request.answered:
            # The host takes a submission once, so that nothing can be pressed or sent again that is not shown again.
            return Further(turn, Told(outcome.text_key, outcome.params))
        return _of(turn, actor, outcome)
    turn = parked.of(key)
    if turn is not None and not turn.may_answer(actor, approvers):
        return Told("approval.waiting_for_other", {"action": turn.request.described()})
    if turn is not None and not turn.waits:
        return Resumed(turn, None)
    if turn is not None:
        return _of(turn, actor, turn.request.understand(text))
    others = [each for each in parked.in_chat(conversation) if each.waits and each.may_answer(actor, approvers)]
    writing = next((each for each in others if _same(each.answering, actor)), None)
    if writing is not None:
        return _of(writing, actor, writing.request.understand(text))
    if not others or not answer_like(text):
        return None
    if len(others) > 1:
        return Told("approval.several_open")
    outcome = others[0].request.understand(text)
    return None if isinstance(outcome, Unclear) else _of(others[0], actor, outcome)


def _same(one: Actor | None, other: Actor) -> bool:
    """Whether that is one person; an actor may be a whole chat."""
    return one == other and one is not None and one.sender_id == other.sender_id


def _of(turn: ParkedTurn, actor: Actor, outcome: Outcome) -> Meaning:
    match outcome:
        case Decided():
            return Resumed(turn, outcome)
        case Again():
            turn.answering = actor
            return Further(turn)
        case Unclear(text_key, params):
            return Told(text_key, params)


async def late(store: SessionStore, who: str, submission: InteractionSubmission | None, text: str) -> Late | Told | None:
    """What a press or a message says about a request that nobody knows any more but the host's state (``store``).

    ``who`` names the person as :class:`OpenRecord` has it.
    """
    if submission is None and not answer_like(text):
        return None
    record = record_from(await store.load())
    known = record is not None and record.who == who and not record.expired
    if record is None or not known or (submission is not None and record.interaction_id != submission.interaction_id):
        return None if submission is None else Told("approval.over")
    if record.kind == "question":
        said = text if submission is None else _written(submission.values)
        return Late(record, allowed=False, text=said) if said.strip() else Told("approval.over")
    if record.offers == "reason":
        return Late(record, allowed=False, text=text if submission is None else "")
    request = OpenRequest(_OFFERED[record.offers], machine="-", directory="-", limit=None)
    outcome = request.understand(text) if submission is None else request.pressed(submission.action_id or "", submission.values)
    allowed = isinstance(outcome, Decided) and outcome.decision in ("allow_once", "allow_session")
    return Late(record, allowed, outcome.answer.message if isinstance(outcome, Decided) else "")


def _written(values: Mapping[str, Json]) -> str:
    """What was sent with a form that nobody knows any more: one value as it is, several by their names."""
    lines = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return "\n".join(lines.values() if len(lines) == 1 else (f"{name}: {value}" for name, value in lines.items()))
