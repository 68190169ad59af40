"""A session in a run's hands: how it is opened, what identifies its settings, how its turn is stopped when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import types
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pkg import limits, runtime_support, traceless
from pkg.agent_api import AgentDriver, AgentEvent, AgentSession, SessionSpec, TurnEnded, to_json
from pkg.errors import ProcessCleanupUnconfirmed, SessionUnavailable
from pkg.langbot_tools import AddressedTools, SessionTools
from pkg.places import Place
from pkg.session_store import SessionStore
from pkg.warm_sessions import Channel, LiveSession


@dataclass(slots=True)
class Held:
    """A session in a run's hands."""

    live: LiveSession
    channel: Channel[AgentEvent]
    place: Place
    keep: float
    turn_open: bool = False
    """A prompt was sent and its end has not come."""
    broken: bool = False
    """The turn did not end in time: only a new process can be trusted."""
    early: deque[AgentEvent] = field(default_factory=deque)
    """What the agent said while the turn was parked, before what is in the channel."""
    calls: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))
    """The tool calls of the parked turn that the run recorded the start of and not the end."""

    def take(self) -> AgentEvent | None:
        """The next event, or ``None`` when there is none now."""
        return self.early.popleft() if self.early else self.channel.take()

    @property
    def ended(self) -> bool:
        """Whether nothing comes after what was taken and what still waits in the channel."""
        return not self.early and self.channel.ended

    @property
    def prompts(self) -> bool:
        """Whether the session can be given the next message."""
        return not self.broken and self.live.usable


async def start(
    driver: AgentDriver,
    spec: SessionSpec,
    place: Place,
    tools: SessionTools | None,
    live: Callable[[AgentSession], LiveSession],
) -> LiveSession:
    """An open session that nobody else on this machine and account writes to.

    Runs in an empty context, so that nothing the driver starts can act with a run's authority. Raises what the launcher and
    the driver raise, and :class:`pkg.errors.SessionUnavailable` (``coding.session_busy``) when another process has the session.
    """
    async with contextlib.AsyncExitStack() as guards:
        if place.launcher.local and spec.resume_session_id:
            await guards.enter_async_context(_guard(spec, spec.resume_session_id))
        try:
            if isinstance(tools, AddressedTools):
                url = await place.launcher.reach(tools.server.url)
                server = dataclasses.replace(tools.server, url=url)
                spec = dataclasses.replace(spec, mcp_servers=(*spec.mcp_servers, server))
            session = await driver.open(spec, place.launcher)
        finally:
            await place.launcher.close()
        opened = live(session)
        opened.options = spec.options
        opened.companion = tools
        try:
            if place.launcher.local and session.session_id != spec.resume_session_id:
                # A new session's name can only be taken where an agent names sessions of different processes alike.
                try:
                    await guards.enter_async_context(_guard(spec, session.session_id, wait=0.0))
                except SessionUnavailable as exc:
                    if exc.code != "coding.session_busy":
                        raise
        except BaseException:
            await opened.close()
            raise
        opened.guards = guards.pop_all()
        return opened


def _guard(spec: SessionSpec, session_id: str, *, wait: float = limits.SESSION_GUARD_WAIT) -> AbstractAsyncContextManager[None]:
    """The session's lock, kept with the account whose home the agent uses: another account stays independent."""
    home = spec.env.get("HOME") or runtime_support.home_directory()
    return runtime_support.session_guard(Path(home) / limits.STATE_DIRECTORY / "sessions", spec.cwd, session_id, wait=wait)


async def stored(store: SessionStore, live: LiveSession, session_id: str) -> None:
    """Have the host store the session's id, and remember with the session that it has."""
    if await store.save(session_id):
        live.stored_id = session_id


async def interrupted(held: Held) -> bool:
    """Cancel the open turn of a session that nobody listens to any more; whether its end came in time."""
    interrupting = asyncio.ensure_future(held.live.session.interrupt())
    try:
        async with traceless.within(limits.CANCEL_GRACE):
            while True:
                event = held.take()
                if isinstance(event, TurnEnded):
                    return True
                if event is None:
                    if held.ended:
                        return False
                    await held.channel.wait()
    except TimeoutError:
        return False
    finally:
        await ended({interrupting})


async def discarded(opening: asyncio.Task[LiveSession]) -> None:
    """End an opening that nobody waits for any more, and the session when there is one after all."""
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()


async def ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, wait until each is over, and empty the set; of what they failed with only one thing counts.

    Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` when one of them did.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
    problems = [task.exception() for task in tasks if not task.cancelled()]
    tasks.clear()
    for problem in problems:
        if isinstance(problem, ProcessCleanupUnconfirmed):
            raise problem


def fingerprint(spec: SessionSpec, place: Place, *, assets: bool) -> str:
    """A digest of what a session was opened with, but for its options; another one can't be reused."""
    spec = dataclasses.replace(spec, options=types.MappingProxyType({}))
    described = json.dumps([to_json(spec), place.launcher.machine, place.way, place.worktree, assets], sort_keys=True)
    return hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()
