"""One LangBot run from the host's context to its single terminal result.

The package's ``Runner.run`` hands over to :func:`run`; the package describes itself by a :class:`Product`. One loop owns the
run: it opens or takes a session, prompts, turns the session's events into what people see (:class:`pkg.results.Delivery`),
answers approvals by policy, lets messages that arrive meanwhile into the turn, and watches the clock.

Guarantees:

- exactly one terminal result, after everything else; a failure is first told in words a person can act on; only
  ``message.received`` and ``interaction.submitted`` start anything;
- nothing is started or sent before the host's authority and actor are known and allowed;
- a run that is cancelled (by the host, its deadline or a revocation) leaves its session consistent: the turn is interrupted
  and the session kept when the turn has ended in time, else closed; that ending belongs to the installation, goes on when the
  caller is cancelled again, and is awaited by whoever waits for the installation or the next run of the session;
- one run at a time uses a vendor session; the next one waits and says so;
- a stored session id is replaced when another session was opened and kept by every failure;
- between a person's last possible message and the terminal result nothing is awaited but the end of a session that isn't kept.

What a run holds, in its order of release: LangBot's tools (revoked at once), the session (back to the pool or closed), the
locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar, overload

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.api.entities.builtin.runner.steering import SteeringInputItem

from pkg import attachments, controls, identity, installations, interactions, limits, overflow, steering, texts
from pkg.agent_api import (
    AgentEvent,
    ApprovalRequested,
    Prompt,
    QuestionAsked,
    SessionSpec,
    SessionStarted,
    TurnEnded,
)
from pkg.errors import AgentDied, CodingError, ProcessCleanupUnconfirmed, Refused
from pkg.held_session import Held, discarded, ended, fingerprint, interrupted, start, stored
from pkg.installations import Installation, Lease
from pkg.langbot_tools import SessionTools, open_session_tools
from pkg.places import Place, inside_of, place_of
from pkg.product import Product, SpecInputs
from pkg.results import Delivery
from pkg.run_clock import RunClock
from pkg.run_scope import run_scope
from pkg.session_store import SessionStore
from pkg.settings import PluginSettings, RunnerSettings, parse
from pkg.warm_sessions import Channel, LiveSession
from pkg.worktrees import worktree

__all__ = ["Product", "SpecInputs", "run"]

log = logging.getLogger(__name__)

Value = TypeVar("Value")

MESSAGE: Final = "message.received"
INTERACTION: Final = "interaction.submitted"
STARTING: Final = "starting"
"""What the clock calls the time before the first prompt; the agent can't be idle yet."""
TERMINAL: Final = frozenset({"run.completed", "run.failed"})


# ------------------------------------------------------------------ the entry


async def run(runner: Runner, ctx: RunnerContext, product: Product) -> AsyncGenerator[RunnerResult, None]:
    """The results of one run; see the module's guarantees."""
    if ctx.event.event_type not in (MESSAGE, INTERACTION):
        yield RunnerResult.run_completed(ctx.run_id)
        return
    outbox: Channel[RunnerResult] = Channel(limits.OUTBOX)
    this = _Run(runner, ctx, product, outbox)
    work = asyncio.get_running_loop().create_task(this.work(), name="run")
    work.add_done_callback(lambda _: outbox.end())
    this.task = work
    try:
        while True:
            result = outbox.take()
            if result is not None:
                yield result
            elif outbox.ended:
                break
            else:
                await outbox.wait()
        if not work.cancelled():
            work.result()
        if this.revoked and not this.terminated:
            yield RunnerResult.run_failed(ctx.run_id, texts.render("coding.revoked", this.language), "coding.revoked")
    finally:
        outbox.close()
        work.cancel()
        await asyncio.wait({work})


class _Stopped(Exception):
    """Somebody who may wrote ``/stop`` while the run was not in a turn yet."""


class _Run:
    """One run; its installation sees it as an :class:`installations.Run`."""

    def __init__(self, runner: Runner, ctx: RunnerContext, product: Product, outbox: Channel[RunnerResult]) -> None:
        self.runner = runner
        self.ctx = ctx
        self.product = product
        self.outbox = outbox
        self.text = ctx.input.to_text()
        self.language = texts.guess_language(self.text)
        self.correlation = uuid.uuid4().hex[:12]
        self.terminated = False
        self.revoked = False
        self.task: asyncio.Task[None] | None = None
        self.conversation = identity.conversation_of(ctx)
        self.judge: steering.Judge | None = None
        self._installation: Installation | None = None
        self._settings: RunnerSettings | None = None
        self._delivery: Delivery | None = None
        self._clock: RunClock | None = None
        self._over = asyncio.Event()
        self._ticked = 0.0
        # The session and what is released with it.
        self._held: Held | None = None
        self._leases: list[Lease] = []
        self._tools = contextlib.AsyncExitStack()
        self._loose: SessionTools | None = None
        self._opening: asyncio.Task[LiveSession] | None = None
        self._acquiring: asyncio.Task[Lease] | None = None
        self._store: SessionStore | None = None
        self._side: set[asyncio.Task[Any]] = set()
        self._saves: set[asyncio.Task[None]] = set()
        self._saving = ""
        self._release: asyncio.Task[None] | None = None
        # Messages: at the host, on their way into the turn, waiting for their own turn.
        self._pulling: asyncio.Task[list[SteeringInputItem]] | None = None
        self._next_pull = time.monotonic() + steering.first_pull_after(ctx.run_id)
        self._inbox: deque[Prompt] = deque()
        self._steering: asyncio.Task[None] | None = None
        self._queue: deque[Prompt] = deque()
        self._stop = False
        self._told: set[str] = set()
        self._detached: Callable[[str], Awaitable[None]] | None = None

    # ---- as its installation and other runs see it

    def revoke(self) -> None:
        """End now, because the installation is gone."""
        self.revoked = True
        if self.task is not None:
            self.task.cancel()

    async def ended(self) -> None:
        """Wait until nothing of the run is left."""
        await self._over.wait()

    def stop(self) -> None:
        """Interrupt the turn, as ``/stop`` does."""
        self._stop = True

    # ---- from start to terminal result

    async def work(self) -> None:
        """Everything; ends with the terminal result in the outbox unless cancelled."""
        try:
            failure = await self._guarded(self._steps())
            if self._saves:
                await asyncio.wait(self._saves, timeout=limits.CLOSE_WAIT)
            failure = await self._guarded(self._leave()) or failure
            await self._finish(failure)
        finally:
            try:
                if self._release is None or not self._release.done():
                    # Unconfirmed cleanups are kept by the installation, and told in its next run.
                    with contextlib.suppress(ProcessCleanupUnconfirmed):
                        await self._leave()
                if self._delivery is not None:
                    await self._delivery.aclose()
            finally:
                if self._installation is not None:
                    self._installation.runs.pop(self.ctx.run_id, None)
                self._over.set()

    async def _guarded(self, steps: Coroutine[Any, Any, None]) -> CodingError | None:
        """The boundary: whatever goes wrong becomes one error with a code, and never its own text in the chat."""
        try:
            await steps
        except CodingError as exc:
            log.warning("run %s (%s) ended: %s", self.ctx.run_id, self.correlation, exc.code)
            return exc
        except ProcessCleanupUnconfirmed as exc:
            log.error("run %s (%s): %s", self.ctx.run_id, self.correlation, exc)
            if self._installation is not None:
                self._installation.take_unconfirmed()
            return CodingError("coding.cleanup_unconfirmed")
        except Exception:
            log.exception("run %s (%s) failed", self.ctx.run_id, self.correlation)
            return CodingError("coding.internal")
        return None

    async def _finish(self, failure: CodingError | None) -> None:
        try:
            await self.delivery.finish(failure)
        except Exception:
            log.exception("run %s (%s): its end could not be delivered", self.ctx.run_id, self.correlation)
        if not self.terminated:
            error = failure or CodingError("coding.internal")
            await self._emit(RunnerResult.run_failed(self.ctx.run_id, error.text(self.language), error.code))

    @property
    def delivery(self) -> Delivery:
        """What people see; made on first use, with what is known of the form by then."""
        if self._delivery is None:
            settings = self._settings
            if settings is None:
                mode, progress = str(self.ctx.config.get("reply-mode") or "stream"), "off"
            else:
                mode = settings.reply_mode if settings.streaming else "single"
                progress = settings.show_progress
            self._delivery = Delivery(
                self.ctx,
                reply_mode=mode,
                show_progress=progress,
                language=self.language,
                emit=self._emit,
                correlation_id=self.correlation,
                detached_send=self._send_detached,
                write_overflow=self._write_overflow,
            )
        return self._delivery

    async def _send_detached(self, text: str) -> None:
        if self._detached is None:
            raise Refused("coding.internal")
        await self._detached(text)

    async def _write_overflow(self, text: str) -> str:
        if self._held is None or not self._held.place.launcher.local:
            raise Refused("coding.internal")
        return await overflow.writer(self._held.place.workspace, self.correlation)(text)

    async def _emit(self, result: RunnerResult) -> None:
        self.terminated = self.terminated or result.type in TERMINAL
        await self.outbox.put(result)

    async def _tell(self, key: str, params: Mapping[str, str] | None = None) -> None:
        await self.delivery.notice(texts.render(key, self.language, params))

    async def _steps(self) -> None:
        authority = identity.authority_of(self.runner)
        settings = self._parsed()
        actor = identity.trusted_actor(self.ctx, settings.user_id_source)
        identity.check_allowed(actor, settings.allowed_actors)
        installation = installations.installation(authority.binding)
        installation.check()
        if self.ctx.event.event_type == INTERACTION:
            raise Refused("coding.interaction_closed")
        if controls.parse(self.text) is controls.Control.STOP:
            await self._stop_others(installation)
            return
        if installations.busy():
            raise Refused("coding.busy", retryable=True)
        self._installation = installation
        installation.runs[self.ctx.run_id] = self
        self._detached = overflow.sender(self.runner, self.ctx, authority, installation)
        self.judge = judge = steering.Judge(actor, settings.allowed_actors)
        self._clock = self._started(settings)
        if installation.take_unconfirmed():
            await self._tell("coding.cleanup_unconfirmed")
        plugin = parse(self.product.plugin_settings, self.runner.get_plugin_config())
        cursor = identity.session_key(authority, self.conversation, actor, agent="steering-cursor", machine="", workspace="")
        recovering = self._spawn(steering.recover(self.ctx, judge, SessionStore(self.ctx, cursor)))
        try:
            prompt = await self._prompt(settings)
            await self._open(authority, actor, installation, settings, plugin)
            missed = await self._until(recovering, limits.RECOVERY_WAIT)
        except _Stopped:
            await self._tell("turn.cancelled")
            return
        if missed:
            prompt = dataclasses.replace(prompt, text="\n\n".join([*missed, prompt.text]))
        self._queue.appendleft(prompt)
        await self._converse()

    def _parsed(self) -> RunnerSettings:
        settings = parse(self.product.settings, self.ctx.config)
        self._settings = settings
        if settings.language != "auto":
            self.language = settings.language
        return settings

    def _started(self, settings: RunnerSettings) -> RunClock:
        deadline = self.ctx.runtime.deadline_at
        remaining = None if deadline is None else deadline - time.time()
        clock = RunClock(time.monotonic(), timeout=settings.timeout, deadline_in=remaining, idle=settings.idle_timeout)
        clock.pause(STARTING)
        return clock

    async def _stop_others(self, installation: Installation) -> None:
        """``/stop`` that came as a run of its own: for the active runs of this chat that its sender may stop."""
        here = [
            each for each in installation.runs.values() if isinstance(each, _Run) and each.conversation == self.conversation
        ]
        mine = [each for each in here if each.judge is not None and each.judge.may(self.ctx.actor)]
        for each in mine:
            each.stop()
        await self._tell("control.stopping" if mine else "control.not_yours" if here else "control.nothing_running")

    async def _prompt(self, settings: RunnerSettings) -> Prompt:
        collected = attachments.collect(self.ctx.input)
        await self._tell_refused(collected.refused)
        if not self.text.strip() and not collected.attachments:
            raise Refused("coding.empty_message")
        context = run_scope(self.ctx) if settings.append_run_scope_prompt else ""
        return Prompt(self.text, collected.attachments, context)

    async def _tell_refused(self, refused: tuple[attachments.Refusal, ...]) -> None:
        if refused:
            await self.delivery.notice("\n".join(texts.render(each.key, self.language, each.params) for each in refused))

    # ---- the session

    async def _open(
        self,
        authority: identity.Authority,
        actor: identity.Actor,
        installation: Installation,
        settings: RunnerSettings,
        plugin: PluginSettings,
    ) -> None:
        place = place_of(settings, plugin, authority)
        if settings.workspace_mode == "worktree":
            place = await self._in_worktree(place, authority, installation)
        spec = self.product.spec(
            settings,
            SpecInputs(
                workspace=place.workspace,
                location=settings.location,
                env=settings.environment(plugin.secrets),
                mcp_servers=settings.mcp_servers(plugin.secrets),
            ),
        )
        owner = None if settings.share_session == "conversation" else actor
        key = identity.conversation_key(authority, self.conversation, owner)
        stored_key = identity.session_key(
            authority,
            self.conversation,
            owner,
            agent=f"{self.product.name} {self.product.agent(settings)}",
            machine=place.launcher.machine,
            workspace=place.workspace,
        )
        for name in (f"session {stored_key}", *place.locks):
            await self._lock(installation, name)
        opened_with = fingerprint(spec, place.launcher.machine, assets=settings.langbot_assets_enabled)
        store = SessionStore(self.ctx, stored_key)
        keep = settings.keep_warm if settings.reuse_session and place.may_keep else 0.0
        live = installation.warm.take(key, opened_with) if settings.reuse_session else None
        if live is not None:
            self._held = Held(live, live.attach(), place, keep, broken=True)
            await self._renew_tools(live, spec, place, authority, settings)
            self._held.broken = False
        else:
            await self._during(installation.warm.settled(key))
            resume = await self._during(store.load()) if settings.reuse_session else ""
            spec = dataclasses.replace(spec, resume_session_id=resume or "")
            tools = await self._new_tools(authority, settings) if settings.langbot_assets_enabled else None
            opening = installation.adopt(
                start(
                    self.product.driver, spec, place, tools, partial(LiveSession, key, opened_with, adopt=installation.adopt)
                ),
                name="session open",
            )
            self._opening = opening
            live = await self._until(opening)
            self._opening, self._loose = None, None
            self._held = Held(live, live.channel, place, keep)
        if settings.reuse_session:
            self._store = store
            self._save(live.session.session_id)

    async def _in_worktree(self, place: Place, authority: identity.Authority, installation: Installation) -> Place:
        """The same place with a working directory of this chat's own."""
        launcher, workspace = place.launcher, place.workspace
        name = identity.session_key(
            authority, self.conversation, None, agent="worktree", machine=launcher.machine, workspace=workspace
        )
        await self._lock(installation, f"worktree {name}")
        try:
            path = await self._during(worktree(launcher, workspace, name[:15]))
        finally:
            self._leases.pop().release()
        return dataclasses.replace(place, workspace=path, inside=inside_of(launcher, path))

    def _save(self, session_id: str) -> None:
        if self._store is None or self._held is None or session_id in (self._held.live.stored_id, self._saving):
            return
        self._saving = session_id
        self._saves.add(self._spawn(stored(self._store, self._held.live, session_id)))

    async def _lock(self, installation: Installation, name: str) -> None:
        self._acquiring = asyncio.ensure_future(installation.locks.acquire(name))
        lease = await self._until(self._acquiring, limits.WAIT_NOTICE)
        if lease is None:
            await self._tell("status.waiting_for_turn")
            lease = await self._until(self._acquiring)
        self._leases.append(lease)
        self._acquiring = None

    async def _new_tools(self, authority: identity.Authority, settings: RunnerSettings) -> SessionTools:
        """An address of their own for LangBot's tools, answering for this run; closed with the session it is given to."""
        tools = self._loose = await open_session_tools(authority.binding)
        await self._attach_tools(tools, settings)
        return tools

    async def _attach_tools(self, tools: SessionTools, settings: RunnerSettings) -> None:
        chosen = settings.knowledge_bases or None
        await self._tools.enter_async_context(tools.attach(self.runner, self.ctx, knowledge_bases=chosen))

    async def _renew_tools(
        self, live: LiveSession, spec: SessionSpec, place: Place, authority: identity.Authority, settings: RunnerSettings
    ) -> None:
        """This run's tools for a session that was kept: with a bearer of its own where the agent can take one."""
        kept = live.companion
        if not isinstance(kept, SessionTools):
            return
        if live.session.capabilities.live_mcp and place.launcher.local:
            fresh = await self._new_tools(authority, settings)
            if await self._during(live.session.renew_mcp((*spec.mcp_servers, fresh.server))):
                live.companion, self._loose = fresh, None
                await kept.close()
                return
            await self._tools.aclose()
            await fresh.close()
        await self._attach_tools(kept, settings)

    # ---- waiting, with everything that goes on meanwhile

    def _spawn(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run ``work`` beside the loop; it ends, or is ended, before the run's session is released."""
        task = asyncio.get_running_loop().create_task(work)
        self._side.add(task)
        return task

    async def _during(self, work: Coroutine[Any, Any, Value]) -> Value:
        task = self._spawn(work)
        return await self._until(task)

    @overload
    async def _until(self, task: asyncio.Future[Value]) -> Value: ...

    @overload
    async def _until(self, task: asyncio.Future[Value], timeout: float) -> Value | None: ...

    async def _until(self, task: asyncio.Future[Value], timeout: float | None = None) -> Value | None:
        """The task's result, while the clock runs and messages are heard; ``None`` after ``timeout`` seconds.

        Raises :class:`_Stopped` or the limit that is reached; the task then still belongs to whoever started it.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not task.done():
            await asyncio.wait({task}, timeout=limits.LOOP_TICK)
            await self._tick()
            if task.done():
                break
            if self._stop:
                raise _Stopped
            self._check_clock()
            if time.monotonic() >= until:
                return None
        return task.result()

    def _check_clock(self) -> None:
        ending = self._limit_reached()
        if ending is not None:
            raise ending

    def _limit_reached(self) -> CodingError | None:
        clock = self._clock
        due = None if clock is None else clock.due(time.monotonic())
        if clock is None or due is None:
            return None
        if due == "time":
            return CodingError("coding.time_limit", seconds=f"{clock.limit:.0f}", field="timeout")
        return CodingError("coding.idle_limit", seconds=f"{clock.idle:.0f}", field="idle-timeout")

    async def _tick(self) -> None:
        """What happens ten times a second, whatever the agent does."""
        now = time.monotonic()
        if now - self._ticked < limits.LOOP_TICK:
            return
        self._ticked = now
        await self.delivery.tick()
        for task in [each for each in self._side if each.done()]:
            self._side.discard(task)
            problem = None if task.cancelled() else task.exception()
            if isinstance(problem, CodingError):
                log.info("run %s (%s): %s", self.ctx.run_id, self.correlation, problem.code)
            elif problem is not None:
                raise problem
        if self._pulling is not None:
            if self._pulling.done():
                await self._heard(self._pulling.result())
                self._pulling, self._next_pull = None, now + limits.STEERING_INTERVAL
        elif now >= self._next_pull and self.ctx.context.available_apis.steering_pull:
            self._pulling = self._spawn(steering.pull(self.ctx))

    # ---- messages that arrive meanwhile

    async def _heard(self, items: list[SteeringInputItem]) -> None:
        assert self.judge is not None
        for judged in self.judge.judge(items):
            match judged:
                case steering.Stop():
                    self._stop = True
                    self._inbox.clear()
                    self._queue.clear()
                case steering.Stranger(name):
                    await self._tell("steering.not_yours", {"name": name})
                case steering.Message(prompt, refused):
                    await self._tell_refused(refused)
                    if not prompt.text.strip() and not prompt.attachments:
                        continue
                    if len(self._inbox) + len(self._queue) >= limits.STEERING_QUEUE:
                        await self._tell("steering.too_many")
                        continue
                    self._inbox.append(prompt)
        if self._inbox and (self._steering is None or self._steering.done()):
            self._steering = self._spawn(self._steer())

    async def _steer(self) -> None:
        """Messages into the running turn, in order; from the first that the agent does not take on, they wait for their own."""
        while self._inbox:
            prompt = self._inbox.popleft()
            held = self._held
            taken = False
            if held is not None and held.turn_open and not self._queue and held.live.session.capabilities.steer:
                with contextlib.suppress(CodingError):
                    taken = await held.live.session.steer(prompt)
                if taken and self._clock is not None:
                    self._clock.touched(time.monotonic())
            if not taken:
                self._queue.append(prompt)

    async def _settled(self) -> None:
        """Wait until every message heard so far is in the turn or in the queue."""
        if self._steering is not None and not self._steering.done():
            await self._until(self._steering)

    async def _more(self) -> bool:
        """Whether there is another message: what waits already, then what the host has, then what it gets in a moment."""
        await self._settled()
        if self._queue or not self.ctx.context.available_apis.steering_pull:
            return bool(self._queue)
        for pause in (0.0, limits.STEERING_LINGER):
            await asyncio.sleep(pause)
            if self._pulling is not None:
                pending, self._pulling = self._pulling, None
                await self._heard(await pending)
            else:
                await self._heard(await steering.pull(self.ctx))
            await self._settled()
            self._stop = False
            if self._queue:
                return True
        return False

    # ---- turns

    async def _converse(self) -> None:
        first = True
        while self._queue or await self._more():
            if not first:
                await self.delivery.begin_turn()
            first = False
            await self._turn(self._queue.popleft())
            if self._held is not None and self._held.broken:
                return

    async def _turn(self, prompt: Prompt) -> None:
        """One turn from its prompt to its end; raises the limit that ended it, or the error it failed with."""
        held, clock = self._held, self._clock
        assert held is not None and clock is not None
        session = held.live.session
        if not held.live.usable:
            raise AgentDied("coding.agent_died", retryable=True)
        held.turn_open = True
        clock.answered(STARTING, time.monotonic())
        sending = self._spawn(session.prompt(prompt))
        ending: CodingError | None = None
        end_by = math.inf
        while held.turn_open:
            event = held.channel.take()
            if event is not None:
                clock.event(event, time.monotonic())
                await self._event(event, held)
            elif held.channel.ended:
                _raise_from(sending)
                raise AgentDied("coding.agent_died", retryable=True)
            else:
                await held.channel.wait(limits.LOOP_TICK)
                if not held.channel.waiting:
                    _raise_from(sending)
            if held.turn_open:
                await self._tick()
                if end_by < math.inf:
                    if time.monotonic() >= end_by:
                        held.broken = True
                        await self.delivery.end_turn(TurnEnded("cancelled"))
                        break
                    continue
                ending = self._limit_reached()
                if ending is not None or self._stop:
                    self._spawn(session.interrupt())
                    end_by = time.monotonic() + limits.CANCEL_GRACE
        self._stop = False
        if ending is not None:
            raise ending

    async def _event(self, event: AgentEvent, held: Held) -> None:
        match event:
            case TurnEnded():
                held.turn_open = False
                await self.delivery.end_turn(event)
                return
            case SessionStarted(session_id=session_id):
                self._save(session_id)
            case ApprovalRequested():
                assert self._settings is not None
                decision = interactions.decide(self._settings.approval_policy, event, held.place.inside)
                await self.delivery.event(event)
                await self._decided(event.request_id, decision, held)
                return
            case QuestionAsked():
                await self.delivery.event(event)
                await self._decided(event.request_id, interactions.unanswered(event), held)
                return
            case _:
                pass
        await self.delivery.event(event)

    async def _decided(self, request_id: str, decision: interactions.Decision, held: Held) -> None:
        self._spawn(held.live.session.answer(request_id, decision.answer))
        if self._clock is not None:
            self._clock.answered(request_id, time.monotonic())
        if decision.text_key and decision.text_key not in self._told:
            self._told.add(decision.text_key)
            await self._tell(decision.text_key, decision.params)

    # ---- the release

    async def _leave(self) -> None:
        """Release everything the run holds; the releasing goes on under the installation when the caller is cancelled."""
        if self._release is None:
            if self._installation is None:
                return
            self._release = self._installation.adopt(self._released(self._installation), name="run release")
        await asyncio.shield(self._release)

    async def _released(self, installation: Installation) -> None:
        # Last in, first out; each is done whatever the others raise.
        async with contextlib.AsyncExitStack() as steps:
            if self._acquiring is not None:
                steps.push_async_callback(_given_back, self._acquiring)
            for lease in self._leases:
                steps.callback(lease.release)
            if self._held is not None:
                steps.push_async_callback(self._let_go, self._held, installation)
            if self._loose is not None:
                steps.push_async_callback(self._loose.close)
            if self._opening is not None:
                steps.push_async_callback(discarded, self._opening)
            steps.push_async_callback(self._tools.aclose)
            steps.push_async_callback(ended, self._side)

    async def _let_go(self, held: Held, installation: Installation) -> None:
        if held.turn_open and not held.broken and not self.revoked and held.live.usable:
            held.broken = not await interrupted(held)
        if held.keep > 0 and not held.broken and not self.revoked and held.live.usable:
            installation.warm.put(held.live, held.keep)
        else:
            await held.live.close()


async def _given_back(acquiring: asyncio.Task[Lease]) -> None:
    acquiring.cancel()
    await asyncio.wait({acquiring})
    if not acquiring.cancelled():
        acquiring.result().release()


def _raise_from(task: asyncio.Task[Any]) -> None:
    """Raise what a finished task failed with."""
    if task.done() and not task.cancelled() and (problem := task.exception()) is not None:
        raise problem
