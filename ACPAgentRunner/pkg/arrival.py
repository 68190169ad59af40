"""What arrives in a chat before it is a run of its own: the answer to an open request, a stop for others, or a message.

Guarantees: whoever answers or stops at once is as early as the turn that is about to be parked, because its run is waited for,
``CLOSE_WAIT`` at the longest; a stop reaches what its sender may stop, parked or running, and nothing else.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol, runtime_checkable

from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.interaction import InteractionSubmission

from pkg import asking, identity, limits, traceless
from pkg.answering import Further, Late, Resumed, Told, late, meaning
from pkg.installations import Installation
from pkg.run_session import Asked
from pkg.settings import RunnerSettings
from pkg.steering import Judge


@runtime_checkable
class ChatRun(Protocol):
    """A run of a chat, as whatever arrives beside it sees it."""

    conversation: identity.Conversation
    judge: Judge | None

    @property
    def over(self) -> bool:
        """Whether nothing of it is left."""
        ...

    @property
    def parks(self) -> bool:
        """Whether it is about to end with its turn parked."""
        ...

    def shows(self, key: str, interaction_id: str) -> bool:
        """Whether it is showing this request, or with an empty id any of ``key``."""
        ...

    def stop(self) -> None:
        """Stop what is running and what waits."""
        ...

    async def ended(self) -> None:
        """Wait until nothing of it is left."""
        ...


async def understood(
    ctx: RunnerContext, text: str, conversation: identity.Conversation, asked: Asked, pressed: InteractionSubmission | None
) -> Resumed | Further | Told | Late | None:
    """What a press or a message says about a request that is open in its chat; ``None``: nothing."""
    parked, key = asked.installation.parked, asking.open_key(conversation, asked)
    await _parked_by_now(asked.installation, key, "" if pressed is None else pressed.interaction_id)
    meant = meaning(parked, conversation, asked.actor, key, pressed, text, asked.settings.approvers)
    if meant is not None:
        return meant
    if pressed is not None and parked.of(key) is not None:
        return Told("approval.over")
    who = identity.lasting_name(asked.authority, asked.actor)
    said = await late(asking.record_store(ctx, conversation, asked), who, pressed, text)
    if isinstance(said, Late) and not parked.settle(said.record.interaction_id):
        return Told("approval.over")
    return said


async def stopped(
    ctx: RunnerContext,
    conversation: identity.Conversation,
    authority: identity.Authority,
    settings: RunnerSettings,
    installation: Installation,
    actor: identity.Actor,
) -> str:
    """Do what a stop that came as a run of its own asks for; the key of what its sender is told."""
    await _all_parked_by_now(installation, conversation)
    parked = installation.parked.in_chat(conversation)
    stopped = [turn for turn in parked if turn.may_answer(actor, settings.approvers) and installation.parked.stop(turn)]
    for turn in stopped:
        await asking.forget(ctx, authority, settings, turn)
    here = [each for each in _runs(installation) if each.conversation == conversation]
    mine = [each for each in here if each.judge is not None and each.judge.may(ctx.actor)]
    for each in mine:
        each.stop()
    if stopped and not mine:
        return "turn.cancelled"
    return "control.stopping" if mine else "control.not_yours" if here or parked else "control.nothing_running"


def _runs(installation: Installation) -> list[ChatRun]:
    return [each for each in installation.runs.values() if isinstance(each, ChatRun)]


async def _parked_by_now(installation: Installation, key: str, interaction_id: str) -> None:
    """Let the run that shows the request end first: whoever answers at once is as early as the turn is parked."""
    end = time.monotonic() + limits.CLOSE_WAIT
    for each in _runs(installation):
        while each.shows(key, interaction_id) and not each.over and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                async with traceless.within(limits.LOOP_TICK):
                    await each.ended()


async def _all_parked_by_now(installation: Installation, conversation: identity.Conversation) -> None:
    """Let every run of this chat that is about to park its turn end first."""
    end = time.monotonic() + limits.CLOSE_WAIT
    for each in _runs(installation):
        if each.conversation == conversation and each.parks:
            with contextlib.suppress(TimeoutError):
                async with traceless.within(end - time.monotonic()):
                    await each.ended()
