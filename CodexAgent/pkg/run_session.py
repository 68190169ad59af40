"""The session one run uses: which one it is, how it is opened and opened again, and its release.

Guarantees:

- one run at a time uses a vendor session; the next one waits and says so;
- a session that was kept is used only for its very key and settings; otherwise the stored id is resumed. A session that broke
  inside the run is ended first and then resumed by its own id;
- LangBot's tools answer for this run as long as it holds the session, and no longer;
- what the run holds is released last in, first out, each whatever the others raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, overload

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext

from pkg import identity, limits
from pkg.agent_api import AgentDriver, LiveOptions, SessionSpec
from pkg.approval_policy import session_policy
from pkg.errors import Refused
from pkg.held_session import Held, discarded, fingerprint, interrupted, start, stored
from pkg.installations import Installation, Lease
from pkg.langbot_tools import AddressedTools, SessionTools, open_session_tools
from pkg.places import Place, place_of
from pkg.product import Product, SpecInputs
from pkg.session_store import SessionStore, storable
from pkg.settings import PluginSettings, RunnerSettings
from pkg.warm_sessions import LiveSession
from pkg.worktrees import worktree

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class Owner(Protocol):
    """The run, as its session needs it."""

    runner: Runner
    ctx: RunnerContext
    product: Product
    conversation: identity.Conversation

    def spawn(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run ``work`` beside the loop; it ends, or is ended, with the run."""
        ...

    async def during(self, work: Coroutine[Any, Any, Value]) -> Value:
        """The result of ``work``, while the run goes on living."""
        ...

    @overload
    async def until(self, task: asyncio.Future[Value]) -> Value: ...

    @overload
    async def until(self, task: asyncio.Future[Value], timeout: float) -> Value | None: ...

    async def tell(self, key: str, params: Mapping[str, str] | None = None) -> None:
        """Tell the person a text of the catalogue."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run was asked for, and by whom."""

    authority: identity.Authority
    actor: identity.Actor
    installation: Installation
    settings: RunnerSettings
    plugin: PluginSettings


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which session a run uses, and how it is opened."""

    place: Place
    spec: SessionSpec
    key: str
    opened_with: str
    store_key: str
    keep: float


class RunSession:
    """The session of one run, from its key to its release."""

    def __init__(self, run: Owner) -> None:
        """Nothing is held yet."""
        self._run = run
        self.held: Held | None = None
        """The session in hand; may be broken or dead."""
        self._former = ""
        """The id of the session that was in hand before; the next one resumes it."""
        self._plan: _Plan | None = None
        self._leases: dict[str, Lease] = {}
        self._tools = contextlib.AsyncExitStack()
        self._hub = contextlib.AsyncExitStack()
        self._loose: SessionTools | None = None
        self._opening: asyncio.Task[LiveSession] | None = None
        self._acquiring: asyncio.Task[Lease] | None = None
        self._state: SessionStore | None = None
        """Where the host keeps the session's id."""
        self._store: SessionStore | None = None
        """The same, where sessions are reused."""
        self._saver: asyncio.Task[None] | None = None
        self._installation: Installation | None = None
        """Set while parked."""
        self._wanted: tuple[LiveSession, str] | None = None
        """The id to store next."""
        self._named = ""
        """The id that was named last."""

    async def open(self, asked: Asked) -> Held:
        """A session that can be prompted, in place of the one in hand: one that was kept, else one that is opened now.

        Raises what the run's waiting raises and :class:`pkg.errors.CodingError`; may be tried again.
        """
        await self._abandon()
        if self._plan is None:
            self._plan = await self._planned(asked)
        plan, settings, installation = self._plan, asked.settings, asked.installation
        await self._connected(plan.place)
        live = installation.warm.take(plan.key, plan.opened_with) if settings.reuse_session else None
        held = None if live is None else await self._kept(live, plan, asked)
        if held is None:
            await self._abandon()
            await self._run.during(installation.warm.settled(plan.key))
            resume = self._former
            if not resume and settings.reuse_session:
                assert self._state is not None
                resume = await self._run.during(self._state.load()) or ""
            spec = dataclasses.replace(plan.spec, resume_session_id=resume)
            tools = await self._new_tools(asked, plan.place) if settings.langbot_assets_enabled else None
            made = partial(LiveSession, plan.key, plan.opened_with, adopt=installation.adopt)
            driver = self._driver(plan.place, tools, asked)
            self._opening = installation.adopt(start(driver, spec, plan.place, tools, made), name="session open")
            live = await self._run.until(self._opening)
            self._opening, self._loose = None, None
            held = self.held = Held(live, live.channel, plan.place, plan.keep)
        if settings.reuse_session:
            self._store = self._state
            self.save(held.live.session.session_id)
        return held

    async def _kept(self, live: LiveSession, plan: _Plan, asked: Asked) -> Held | None:
        """A session that was kept, as this run wants it; ``None`` when it has to be opened again for that."""
        held = self.held = Held(live, live.attach(), plan.place, plan.keep, broken=True)
        if live.options != plan.spec.options:
            session = live.session
            if not isinstance(session, LiveOptions) or not await self._run.during(session.set_options(plan.spec.options)):
                return None
            live.options = plan.spec.options
        await self._renew_tools(live, plan, asked)
        held.broken = False
        return held

    def save(self, session_id: str) -> None:
        """Have the host store the session's id, beside the run, where sessions are reused and it isn't stored yet.

        However often an agent names another one, the host is asked once at a time, and for the last one in the end.
        """
        if self._store is None or self.held is None or session_id == (self._named or self.held.live.stored_id):
            return
        if not storable(session_id):
            log.warning("run %s: the agent's name for its session can't be stored", self._run.ctx.run_id)
            return
        self._named = session_id
        self._wanted = self.held.live, session_id
        if self._saver is None or self._saver.done():
            self._saver = self._run.spawn(self._save(self._store))

    async def _save(self, store: SessionStore) -> None:
        while self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            await stored(store, *wanted)

    async def saved(self) -> None:
        """Wait until the id is stored, ``limits.CLOSE_WAIT`` seconds at most."""
        if self._saver is not None:
            await asyncio.wait({self._saver}, timeout=limits.CLOSE_WAIT)

    # ---- while no run has it

    @property
    def may_park(self) -> bool:
        """Whether the session may live on between runs in its place."""
        return self._plan is not None and self._plan.place.may_keep

    async def park(self, installation: Installation) -> None:
        """Give up everything of the run but the session in hand and its locks; :meth:`resume` or :meth:`cancel_parked` follows.

        LangBot's tools wait for the next run.
        """
        assert self.held is not None
        self._installation = installation
        if isinstance(self.held.live.companion, SessionTools):
            await self.held.live.companion.park()
        await self._tools.aclose()
        self._state = self._store = None
        del self._run

    async def resume(self, run: Owner, asked: Asked) -> Held:
        """Go on in ``run`` with the session that was parked."""
        self._run = run
        assert self.held is not None and self._plan is not None
        self._state = SessionStore(run.ctx, self._plan.store_key)
        if asked.settings.reuse_session:
            self._store = self._state
            self.save(self.held.live.session.session_id)
        if isinstance(self.held.live.companion, SessionTools):
            await self._attach_tools(self.held.live.companion, asked.settings)
        return self.held

    async def cancel_parked(self, *, revoked: bool) -> None:
        """Cancel the turn of the parked session and give everything back."""
        assert self._installation is not None
        await self.release(self._installation, revoked=revoked)

    async def release(self, installation: Installation, *, revoked: bool) -> None:
        """Give everything back: the tools, the session (kept or closed), the locks. For the run's end, once."""
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._hub.aclose)
            if self._acquiring is not None:
                steps.push_async_callback(_given_back, self._acquiring)
            for lease in self._leases.values():
                steps.callback(lease.release)
            if self.held is not None:
                steps.push_async_callback(_let_go, self.held, installation, revoked)
            if self._loose is not None:
                steps.push_async_callback(self._loose.close)
            if self._opening is not None:
                steps.push_async_callback(discarded, self._opening)
            steps.push_async_callback(self._tools.aclose)

    async def _planned(self, asked: Asked) -> _Plan:
        """Decide on the session and take its locks; may be tried again."""
        authority, settings, plugin = asked.authority, asked.settings, asked.plugin
        product = self._run.product
        place = place_of(settings, plugin, self._run.runner.get_plugin_config(), authority, product.name)
        if place.daemon is not None:
            await self._hub.aclose()
            await self._hub.enter_async_context(place.daemon.in_use())
        if settings.workspace_mode == "worktree":
            place = await self._in_worktree(place, asked)
        spec = product.spec(
            settings,
            SpecInputs(
                workspace=place.workspace,
                location=settings.location,
                env=settings.environment(plugin.secrets),
                mcp_servers=settings.mcp_servers(plugin.secrets),
            ),
        )
        spec = dataclasses.replace(spec, policy=session_policy(spec.policy, settings.approval_rules))
        owner = None if settings.share_session == "conversation" else asked.actor
        stored_key = identity.session_key(
            authority,
            self._run.conversation,
            owner,
            agent=f"{product.name} {product.agent(settings) if place.daemon is None else f'named {settings.daemon_agent}'}",
            machine=place.launcher.machine,
            workspace=f"{place.workspace} worktree {place.worktree}" if place.worktree else place.workspace,
        )
        key = identity.conversation_key(authority, self._run.conversation, owner)
        for name in (f"session {stored_key}", *place.locks):
            await self._lock(asked.installation, name, key)
        self._state = SessionStore(self._run.ctx, stored_key)
        return _Plan(
            place,
            spec,
            key=key,
            opened_with=fingerprint(spec, place, assets=settings.langbot_assets_enabled),
            store_key=stored_key,
            keep=settings.keep_warm if settings.reuse_session and place.may_keep else 0.0,
        )

    async def _abandon(self) -> None:
        """End a session, or an opening, that is of no use any more."""
        await self._tools.aclose()
        if self._opening is not None:
            await discarded(self._opening)
            self._opening = None
        if self._loose is not None:
            await self._loose.close()
            self._loose = None
        if self.held is not None:
            self._former = self.held.live.session.session_id
            await self.held.live.close()
            self.held = None

    async def _in_worktree(self, place: Place, asked: Asked) -> Place:
        """The same place with a working directory of this chat's own."""
        launcher, workspace = place.launcher, place.workspace
        name = identity.session_key(
            asked.authority, self._run.conversation, None, agent="worktree", machine=launcher.machine, workspace=workspace
        )
        name = name[:15]
        if place.daemon is not None:
            return dataclasses.replace(place, worktree=name)
        lock = f"worktree {name}"
        await self._lock(asked.installation, lock, key="")
        try:
            path = await self._run.during(worktree(launcher, workspace, name))
        finally:
            self._leases.pop(lock).release()
        return dataclasses.replace(place, workspace=path)

    async def _lock(self, installation: Installation, name: str, key: str) -> None:
        """Wait for a lock; ``key`` is where this run's own turn would be parked."""
        if self._acquiring is not None:
            await _given_back(self._acquiring)
            self._acquiring = None
        if name in self._leases:
            return
        self._acquiring = asyncio.ensure_future(installation.locks.acquire(name))
        lease = await self._run.until(self._acquiring, limits.WAIT_NOTICE)
        if lease is None:
            await self._run.tell("status.waiting_for_turn")
        while lease is None:
            lease = await self._run.until(self._acquiring, limits.WAIT_NOTICE)
            turn = installation.parked.of(key)
            if lease is None and turn is not None:
                # It has the lock until somebody answers it, which this run can't.
                raise Refused("coding.turn_is_asking", action=turn.request.described())
        self._leases[name] = lease
        self._acquiring = None

    async def _connected(self, place: Place) -> None:
        """Wait for the daemon, where the session is on one; told when that takes longer."""
        if place.daemon is None:
            return
        waiting = self._run.spawn(place.daemon.connected())
        await self._run.until(waiting, limits.DAEMON_WAIT_NOTICE)
        if not waiting.done():
            await self._run.tell("status.waiting_for_daemon", {"daemon": place.daemon.daemon_id})
            await self._run.until(waiting)

    def _driver(self, place: Place, tools: SessionTools | None, asked: Asked) -> AgentDriver:
        """What opens sessions there."""
        driver = self._run.product.driver
        if place.daemon is None:
            return driver
        actor = identity.scoped_name(asked.authority, asked.actor)
        return place.daemon.driver(driver.name, actor=actor, worktree=place.worktree, tools=tools)

    async def _new_tools(self, asked: Asked, place: Place) -> SessionTools:
        """A way of their own to LangBot's tools, answering for this run; closed with the session it is given to."""
        binding = asked.authority.binding
        tools = self._loose = SessionTools(binding) if place.daemon is not None else await open_session_tools(binding)
        await self._attach_tools(tools, asked.settings)
        return tools

    async def _attach_tools(self, tools: SessionTools, settings: RunnerSettings) -> None:
        chosen = settings.knowledge_bases or None
        await self._tools.enter_async_context(tools.attach(self._run.runner, self._run.ctx, knowledge_bases=chosen))

    async def _renew_tools(self, live: LiveSession, plan: _Plan, asked: Asked) -> None:
        """This run's tools for a session that was kept: with a bearer of its own where the agent can take one."""
        kept = live.companion
        if not isinstance(kept, SessionTools):
            return
        if live.session.capabilities.live_mcp and plan.place.launcher.local:
            fresh = await self._new_tools(asked, plan.place)
            own = (fresh.server,) if isinstance(fresh, AddressedTools) else ()
            if await self._run.during(live.session.renew_mcp((*plan.spec.mcp_servers, *own))):
                live.companion, self._loose = fresh, None
                await kept.close()
                return
            await self._tools.aclose()
            await fresh.close()
        await self._attach_tools(kept, asked.settings)


async def _let_go(held: Held, installation: Installation, revoked: bool) -> None:
    held.live.grants.once = ""
    if held.turn_open and not held.broken and not revoked and held.live.usable:
        held.broken = not await interrupted(held)
    if held.keep > 0 and not held.broken and not revoked and held.live.usable:
        installation.warm.put(held.live, held.keep)
    else:
        await held.live.close()


async def _given_back(acquiring: asyncio.Task[Lease]) -> None:
    acquiring.cancel()
    await asyncio.wait({acquiring})
    if not acquiring.cancelled():
        acquiring.result().release()
