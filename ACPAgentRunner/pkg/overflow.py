"""Two ways for text that does not fit into the one message a surface shows, or that it loses: ahead of it, or into a file.

:func:`sender` speaks to the chat outside the run, which only a worker of one installation may and a web chat can't receive;
:func:`writer` stores the text in a local workspace under a name of the runner's own, never following a link and never
replacing a file. Both raise when they can't; the caller then takes its next way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.platform.message import MessageChain, Plain
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext

from pkg import limits, traceless
from pkg.identity import Authority
from pkg.installations import Installation
from pkg.surfaces import STREAM_SETTING

log = logging.getLogger(__name__)


def sender(
    runner: Runner, ctx: RunnerContext, authority: Authority, installation: Installation
) -> Callable[[str], Awaitable[None]] | None:
    """Sends one message to the run's chat from an empty context; ``None`` where this can't be."""
    target = ctx.delivery.reply_target or {}
    kind, to = target.get("target_type"), target.get("target_id")
    bot = ctx.conversation.bot_id if ctx.conversation is not None else None
    if authority.pooled or not bot or not kind or to in (None, ""):
        return None
    plugin = runner.plugin

    async def send(text: str) -> None:
        chain = MessageChain([Plain(text=text)])
        async with traceless.within(limits.DETACHED_SEND_WAIT):
            await installation.adopt(plugin.send_message(bot, str(kind), str(to), chain), name="detached send")

    return send


async def streams(runner: Runner, ctx: RunnerContext, installation: Installation) -> bool:
    """Whether the run's bot streams, by the host's settings of it; false when the host does not say.

    For a run for which there is a :func:`sender`.
    """
    assert ctx.conversation is not None and ctx.conversation.bot_id
    try:
        async with traceless.within(limits.DETACHED_SEND_WAIT):
            asking = runner.plugin.get_bot_info(ctx.conversation.bot_id)
            bot = await installation.adopt(asking, name="bot's settings")
    except Exception as exc:  # noqa: BLE001 - what is sent outside the run arrives either way
        log.info("whether the bot streams is not known (%s)", type(exc).__name__)
        return False
    chosen = bot.get("adapter_config")
    return isinstance(chosen, dict) and chosen.get(STREAM_SETTING) is True


def writer(workspace: str, correlation: str) -> Callable[[str], Awaitable[str]]:
    """Writes a text into ``workspace`` and returns the new file's name; each call makes another file."""
    written = 0

    async def write(text: str) -> str:
        nonlocal written
        written += 1
        name = f"answer-{correlation}.md" if written == 1 else f"answer-{correlation}-{written}.md"
        descriptor = os.open(Path(workspace) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return name

    return write
