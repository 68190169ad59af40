"""Messages that arrive while a run is active: pulled, judged by their own actor, and recovered when the host dropped them.

Guarantees: only the requester and ``allowed-actors`` reach the agent or stop it, whoever else wrote is named once;
``/stop`` is a control and never text for the agent; messages keep their order; a pull that fails is repeated at the next
interval and never ends the run.

A host forgets messages that arrive between a run's last pull and its unregistering, but records each as a
``steering.dropped`` event. :func:`recover` finds those newer than a stored cursor and takes their texts from the history
(LangBot 4.11.2: ``metadata.steering.original_event_id`` is the ``event_id`` of the history's item).
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.event import ActorContext
from langbot_plugin.api.entities.builtin.runner.page_results import AgentEventRecord
from langbot_plugin.api.entities.builtin.runner.steering import SteeringInputItem

from pkg import attachments, controls, identity, limits
from pkg.agent_api import Prompt
from pkg.session_store import HOST_PROBLEMS, SessionStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody who may wrote ``/stop``."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message for the agent, and what of it was left out."""

    prompt: Prompt
    refused: tuple[attachments.Refusal, ...] = ()
    sender: str = ""
    """The id of whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """Somebody wrote who may not; told once per run."""

    name: str


Judged = Stop | Message | Stranger


class Judge:
    """Decides about each message of one run."""

    def __init__(self, requester: identity.Actor, allowed_actors: tuple[str, ...]) -> None:
        """``allowed_actors`` as in the form; empty lets only the requester in."""
        self._requester = requester
        self._allowed = allowed_actors
        self._told: set[str] = set()

    def may(self, actor: ActorContext | None) -> bool:
        """Whether a message of ``actor`` counts."""
        return identity.may_steer(self._requester, actor, self._allowed)

    def judge(self, items: Iterable[SteeringInputItem]) -> list[Judged]:
        """What each message means; strangers named already and empty messages are left out."""
        judged: list[Judged] = []
        for item in items:
            if not self.may(item.actor):
                judged.extend(self._stranger(item.actor))
                continue
            text = item.input.to_text()
            if controls.parse(text) is controls.Control.STOP:
                judged.append(Stop())
                continue
            collected = attachments.collect(item.input)
            if text.strip() or collected.attachments or collected.refused:
                judged.append(Message(Prompt(text, collected.attachments), collected.refused, identity.sender_of(item.actor)))
        return judged

    def _stranger(self, actor: ActorContext | None) -> Sequence[Stranger]:
        who = (actor.actor_id or "") if actor is not None else ""
        if who in self._told or len(self._told) >= limits.STEERING_QUEUE:
            return ()
        self._told.add(who)
        name = (actor.actor_name or who) if actor is not None else who
        return (Stranger(name),)


def first_pull_after(run_id: str) -> float:
    """Seconds until a run's first pull: spread evenly over the interval so that many runs do not pull at once."""
    return limits.STEERING_INTERVAL * (zlib.crc32(run_id.encode("utf-8", "surrogatepass")) % 1000) / 1000


async def pull(ctx: RunnerContext) -> list[SteeringInputItem]:
    """What is waiting at the host; nothing when it offers no steering or fails."""
    if not ctx.context.available_apis.steering_pull:
        return []
    try:
        return list((await ctx.steering_pull("all")).items)
    except HOST_PROBLEMS as exc:
        log.warning("steering not pulled: %s", type(exc).__name__)
        return []


async def recover(ctx: RunnerContext, judge: Judge, cursor: SessionStore) -> list[str]:
    """Texts the host dropped at the end of an earlier run, oldest first; moves the stored ``cursor`` behind them."""
    apis = ctx.context.available_apis
    if not (apis.event_page and apis.history_page and apis.state):
        return []
    try:
        seen = _number(await cursor.load())
        page = await ctx.event_page(event_types=["steering.dropped"], limit=limits.STEERING_RECOVERY_COUNT)
        fresh = [record for record in page.items if _is_fresh(record, seen)]
        if not fresh:
            return []
        wanted = [
            _original(record)
            for record in sorted(fresh, key=_position)
            if judge.may(ActorContext(actor_type=record.actor_type or "", actor_id=record.actor_id))
        ]
        texts: dict[str, str] = {}
        if wanted:
            history = await ctx.history_page(limit=100)
            texts = {item.event_id: item.content or "" for item in history.items if item.role == "user"}
        await cursor.save(str(max(map(_position, fresh))))
    except HOST_PROBLEMS as exc:
        log.warning("dropped messages not recovered: %s", type(exc).__name__)
        return []
    found = (texts.get(event_id, "") for event_id in wanted)
    return [text for text in found if text.strip() and controls.parse(text) is None]


def _is_fresh(record: AgentEventRecord, seen: int | None) -> bool:
    if record.event_type != "steering.dropped":
        return False
    if seen is not None:
        return _position(record) > seen
    when = record.created_at or record.event_time or _number(str(_steering(record).get("claimed_at") or "")) or 0
    return time.time() - when <= limits.STEERING_RECOVERY_AGE


def _position(record: AgentEventRecord) -> int:
    return record.seq if record.seq is not None else (_number(record.cursor or "") or 0)


def _steering(record: AgentEventRecord) -> dict[str, object]:
    found = record.metadata.get("steering")
    return found if isinstance(found, dict) else {}


def _original(record: AgentEventRecord) -> str:
    return str(_steering(record).get("original_event_id") or "")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
