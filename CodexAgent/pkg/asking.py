"""How one run answers what its agent asks: by policy, by what was granted, or by a person, for whom the turn is parked.

Guarantees:

- every request is answered once: by a rule or the policy at once, or by a person, or as cancelled;
- a person is asked only where the answer can come back: in a chat that is named, while there is room for another parked turn;
  elsewhere the request is refused, and the text says how it can be allowed;
- a grant, for once or for the session, turns "ask" into "allow" and nothing else: what rules or the policy deny stays denied;
- what they deny by the time a person allows it stays denied, too;
- a message is an answer only when the host had it after the request was shown, and only from whoever may answer;
- every decision is written to the log of decisions.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from pkg import approval_policy, identity, texts
from pkg.agent_api import Answer, ApprovalRequested, Prompt, QuestionAsked
from pkg.answering import Late, Told
from pkg.approval_policy import Decision, Verdict
from pkg.decision_log import Action, DecisionLine, DecisionLog
from pkg.held_session import Held
from pkg.interactions import Decided, FormSurface, OpenRequest, Unclear
from pkg.message_queue import MessageQueue
from pkg.open_record import Kind, OpenRecord
from pkg.parking import Carried, Outcome, ParkedTurn, State
from pkg.places import inside_of, names_of
from pkg.redaction import Redactor
from pkg.results import Delivery
from pkg.run_session import Asked
from pkg.session_grants import placed
from pkg.session_store import SessionStore
from pkg.settings import RunnerSettings

Request = ApprovalRequested | QuestionAsked

_CONFIRMED: Final[Mapping[str, str]] = {
    "allow_once": "approval.done_allow_once",
    "allow_session": "approval.done_allow_session",
    "deny": "approval.done_deny",
    "answered": "approval.done_answered",
    "cancelled": "approval.done_cancelled",
}
_ALLOWED_LATE: Final = (
    "The action you last asked permission for has now been allowed. The connection was interrupted in between, so do it again "
    "now; then go on with what you were doing."
)
_DENIED_LATE: Final = (
    "The action you last asked permission for was not allowed. The connection was interrupted in between; go on without it."
)


class Owner(Protocol):
    """The run, as its questions need it."""

    ctx: RunnerContext
    conversation: identity.Conversation
    language: str

    @property
    def delivery(self) -> Delivery:
        """What people see."""
        ...

    async def tell(self, key: str, params: Mapping[str, str] | None = None) -> None:
        """Tell the person a text of the catalogue."""
        ...


@dataclass(slots=True)
class Opened:
    """A request that is shown to a person now."""

    event: Request
    request: OpenRequest
    interaction_id: str
    until: float
    expires_at: int
    allowance: str
    """The name of what an answer allows (:func:`pkg.session_grants.placed`)."""
    answerer: identity.Actor | None = None
    """Whoever decided it while the run still went on."""


class Questions:
    """The requests of one run."""

    def __init__(self, run: Owner, asked: Asked) -> None:
        """For a run that was asked for by ``asked``."""
        self._run = run
        self._asked = asked
        self._log = DecisionLog.for_worker(asked.authority)
        self._redact = Redactor(secret.get_secret_value() for secret in asked.plugin.secrets.values())
        self.open = False
        """A request is shown, and nothing reaches the agent past it."""
        self.shown = ""
        """The id under which the last request was shown."""
        self._once = ""
        """The name of an action that is allowed in the next turn, because the answer came when its own was gone."""
        self.key = open_key(run.conversation, asked)
        self._store = record_store(run.ctx, run.conversation, asked)

    # ---- without a person

    def judged(self, event: Request, held: Held) -> Decision | None:
        """The answer of rules, policy and grants, or that nobody can be asked; ``None`` when a person has to be asked."""
        if isinstance(event, QuestionAsked):
            if self._can_ask():
                return None
            self._write(event, held, "cancelled", "nobody to ask")
            return approval_policy.unanswered(event)
        if self._once:
            held.live.grants.once, self._once = self._once, ""
        verdict = self._verdict(event, held)
        by = verdict.by
        if verdict.verdict == "ask":
            if held.live.grants.take_once(_allowance(event, held)):
                by = "grant once"
            elif held.live.grants.covers(self._asked.actor, event):
                by = "grant for this session"
            elif self._can_ask():
                return None
            else:
                decision = approval_policy.refusal(event, verdict)
                self._write(event, held, "deny", by)
                return decision
        elif verdict.verdict == "deny":
            self._write(event, held, "deny", by)
            return approval_policy.refusal(event, verdict)
        answer = approval_policy.grant(event)
        if answer is None:
            self._write(event, held, "deny", "no single grant")
            return approval_policy.refusal(event, verdict)
        self._write(event, held, "allow", by)
        return Decision(answer, allowed=True)

    def _verdict(self, event: ApprovalRequested, held: Held) -> Verdict:
        settings = self._asked.settings
        launcher, directory = held.place.launcher, held.live.session.directory
        inside, names = inside_of(launcher, directory), names_of(launcher, directory)
        return approval_policy.judge(settings.approval_policy, settings.approval_rules, event, inside, names)

    def not_asked(self, event: Request, held: Held) -> Answer:
        """The answer to what comes from a turn that is being ended."""
        self._write(event, held, "cancelled", "the end of its turn")
        return Answer()

    def turn_over(self, held: Held | None) -> None:
        """A turn has ended, and with it what was allowed once."""
        self._once = ""
        if held is not None:
            held.live.grants.once = ""

    def _can_ask(self) -> bool:
        named = self._run.ctx.conversation is not None and bool(self._run.ctx.conversation.conversation_id)
        return named and not self._asked.installation.parked.full

    # ---- with a person

    async def show(self, event: Request, held: Held) -> Opened:
        """Show the request and remember with the host that it is open."""
        self.open = True
        timeout = self._asked.settings.approval_timeout
        request = OpenRequest(
            event,
            machine=held.place.launcher.label,
            directory=held.live.session.directory,
            limit=self._run.delivery.units,
        )
        opened = Opened(
            event,
            request,
            uuid.uuid4().hex,
            until=time.monotonic() + timeout,
            expires_at=math.ceil(time.time() + timeout),
            allowance=_allowance(event, held),
        )
        await self._show(opened)
        return opened

    async def _show(self, opened: Opened) -> None:
        self.shown = opened.interaction_id
        await self._remember(opened)
        seconds = math.ceil(opened.until - time.monotonic())
        await show_step(self._run, opened.request, opened.interaction_id, opened.expires_at, seconds)

    async def linger(self, opened: Opened, messages: MessageQueue) -> Decided | None:
        """What was decided by a message that was typed before the run could end; what comes behind it waits for its turn.

        A ``/stop`` cancels the request and is left to be obeyed.
        """
        decided: Decided | None = None
        later: list[Prompt] = []
        while decided is None and not messages.stopping and (heard := await messages.apart()):
            for message in heard:
                if decided is not None:
                    later.append(message.prompt)
                    continue
                if not self._may_answer(message.sender):
                    await self._run.tell("approval.not_yours")
                    continue
                match opened.request.understand(message.prompt.text):
                    case Decided() as decided:
                        opened.answerer = self._named(message.sender)
                    case Unclear(text_key, params):
                        await self._run.tell(text_key, params)
                    case _:
                        # The host takes an id once in a run, and what was shown before answers nothing any more.
                        self._asked.installation.parked.settle(opened.interaction_id)
                        opened.interaction_id = uuid.uuid4().hex
                        await self._show(opened)
        messages.put_all(later)
        if messages.stopping:
            decided = Decided(Answer(), "cancelled")
        if decided is not None:
            self._asked.installation.parked.settle(opened.interaction_id)
        self.open = decided is None
        return decided

    def _may_answer(self, sender: str) -> bool:
        return sender == self._asked.actor.sender_id or sender in self._asked.settings.approvers

    def _named(self, sender: str) -> identity.Actor:
        actor = self._asked.actor
        return replace(actor, actor_id=sender if actor.kind == "user" else actor.actor_id, sender_id=sender)

    async def _remember(self, opened: Opened) -> None:
        who = identity.lasting_name(self._asked.authority, self._asked.actor)
        await self._store.save(_record(opened.request, opened.interaction_id, opened.allowance, who, opened.expires_at))

    def parked(
        self,
        opened: Opened,
        held: Held,
        carried: Carried,
        messages: Iterable[Prompt],
        send: Callable[[str], Awaitable[None]] | None,
    ) -> ParkedTurn:
        """The turn that waits for the answer; ``send`` speaks to the chat outside the run."""
        language = self._run.language

        async def tell(outcome: Outcome) -> None:
            assert send is not None
            await send(told_outcome(outcome, language))

        return ParkedTurn(
            key=self.key,
            conversation=self._run.conversation,
            requester=self._asked.actor,
            approvers=self._asked.settings.approvers,
            carried=carried,
            held=held,
            request=opened.request,
            language=language,
            until=opened.until,
            expires_at=opened.expires_at,
            interaction_id=opened.interaction_id,
            messages=messages,
            tell=None if send is None else tell,
            write=lambda decision, by: self._write(opened.event, held, decision, by),
            allowance=opened.allowance,
        )

    async def decided(self, event: Request, decided: Decided, held: Held, who: identity.Actor) -> Decided:
        """What becomes of a person's decision: remembered where it counts for longer, written down, confirmed in the chat.

        It is a denial where rules or policy deny by now what was allowed.
        """
        if isinstance(event, ApprovalRequested) and decided.decision in ("allow_once", "allow_session"):
            verdict = self._verdict(event, held)
            if verdict.verdict == "deny":
                self._write(event, held, "deny", verdict.by)
                await self._store.save("")
                await self._run.tell(verdict.text_key, verdict.params)
                return Decided(approval_policy.refusal(event, verdict).answer, "deny")
        if decided.decision == "allow_session" and isinstance(event, ApprovalRequested):
            held.live.grants.add(self._asked.actor, event)
        self._write(event, held, decided.decision, "person", who)
        await self._store.save("")
        await self._run.delivery.notice(texts.render(_CONFIRMED[decided.decision], self._run.language))
        return decided

    async def forget(self) -> None:
        """Have the host remember no open request any more."""
        await self._store.save("")

    async def taken_late(self, late: Late) -> Prompt:
        """What the agent is told when the answer came after its turn was gone."""
        await self._store.save("")
        self._write_late(late)
        if late.record.kind == "question":
            return Prompt(late.text)
        if late.allowed:
            self._once = late.record.digest
            return Prompt(_ALLOWED_LATE)
        return Prompt(f"{_DENIED_LATE}\n{late.text}" if late.text else _DENIED_LATE)

    def _write(self, event: Request, held: Held, decision: str, by: str, who: identity.Actor | None = None) -> None:
        action, directory = Action.of(event, self._redact), held.live.session.directory
        self._write_line(action, decision, by, who, held.place.launcher.machine, directory)

    def _write_late(self, late: Late) -> None:
        decision = "answered" if late.record.kind == "question" else "allow_once" if late.allowed else "deny"
        self._write_line(Action(late.record.kind, "", late.record.digest), decision, "person", self._asked.actor)

    def _write_line(
        self, action: Action, decision: str, by: str, who: identity.Actor | None, machine: str = "", directory: str = ""
    ) -> None:
        line = DecisionLine(
            action,
            decision,
            by,
            conversation=self.key,
            actor=identity.scoped_name(self._asked.authority, self._asked.actor),
            answerer="" if who is None else identity.scoped_name(self._asked.authority, who),
            machine=machine,
            directory=directory,
        )
        self._log.write(line, self._redact)


def told_outcome(outcome: Outcome, language: str) -> str:
    """What became of a parked turn, for people."""
    told = texts.render(outcome.text_key, language, {"action": outcome.asked})
    return f"{told}\n\n{outcome.said}" if outcome.said.strip() else told


async def show_step(run: Owner, request: OpenRequest, interaction_id: str, expires_at: int, seconds: int) -> None:
    """Show the current step of a request, with buttons or as a form where the surface has them."""
    capable = run.ctx.delivery.interactions
    surface = None if capable is None else FormSurface(frozenset(capable.field_types), capable.max_fields)
    shown = request.shown(run.language, seconds, surface)
    result = None
    if capable is not None and shown.rich:
        result = RunnerResult.interaction_requested(run.ctx.run_id, shown.request(interaction_id, expires_at))
    await run.delivery.ask(shown.text, result)


async def show_further(run: Owner, turn: ParkedTurn, asked: Asked, wrong: Told | None = None) -> None:
    """Show the next step of a parked turn's request; what was shown before answers nothing any more.

    With ``wrong``, which is told, that is the same step again.
    """
    if wrong is not None:
        await run.tell(wrong.text_key, wrong.params)
    if turn.state is not State.WAITING:
        await run.tell("approval.over")
        return
    asked.installation.parked.settle(turn.interaction_id)
    turn.renewed()
    requester = identity.lasting_name(asked.authority, turn.requester)
    store = record_store(run.ctx, turn.conversation, replace(asked, actor=turn.requester))
    await store.save(_record(turn.request, turn.interaction_id, turn.allowance, requester, turn.expires_at))
    await show_step(run, turn.request, turn.interaction_id, turn.expires_at, turn.seconds)


def _record(request: OpenRequest, interaction_id: str, allowance: str, who: str, expires_at: int) -> str:
    approval, offers = isinstance(request.event, ApprovalRequested), request.offers
    allows = approval and offers in ("all", "once")
    kind: Kind = "approval" if approval else "question"
    return OpenRecord(interaction_id, kind, offers, allowance if allows else "", who, expires_at).to_text()


def _allowance(event: Request, held: Held) -> str:
    """The name of what an answer allows; ``""`` for a question and for what is not known whole."""
    if isinstance(event, QuestionAsked):
        return ""
    return placed(event, held.place.launcher.machine, held.live.session.directory)


def open_key(conversation: identity.Conversation, asked: Asked) -> str:
    """Where a turn of this person (or of this shared session) is parked."""
    owner = None if asked.settings.share_session == "conversation" else asked.actor
    return identity.conversation_key(asked.authority, conversation, owner)


def record_store(ctx: RunnerContext, conversation: identity.Conversation, asked: Asked) -> SessionStore:
    """Where the host remembers the open request of :func:`open_key`."""
    return _store(ctx, conversation, asked.authority, asked.settings, asked.actor)


async def forget(ctx: RunnerContext, authority: identity.Authority, settings: RunnerSettings, turn: ParkedTurn) -> None:
    """Have the host remember nothing of a parked turn's request any more."""
    await _store(ctx, turn.conversation, authority, settings, turn.requester).save("")


def _store(
    ctx: RunnerContext,
    conversation: identity.Conversation,
    authority: identity.Authority,
    settings: RunnerSettings,
    actor: identity.Actor,
) -> SessionStore:
    owner = None if settings.share_session == "conversation" else actor
    name = identity.session_key(authority, conversation, owner, agent="open-request", machine="", workspace="")
    return SessionStore(ctx, name)


def denial_of(decided: Decided) -> str:
    """The reason a person gave with a denial, ``""`` for none."""
    return decided.answer.message if decided.decision == "deny" else ""
