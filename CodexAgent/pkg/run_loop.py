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
- a stored session id is replaced when another session was opened and kept by every failure;
- a turn that fails costs its own message: it is told, and the next one goes to the session as long as that lives, else to a
  new process that resumes it (one attempt per message). Messages that are not worked on any more are counted and told;
- between a person's last possible message and the terminal result nothing is awaited but the end of a session that isn't kept.

Which session a run uses, and how that is opened and released, is :mod:`pkg.run_session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast, overload

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from pkg import arrival, asking, attachments, controls, identity, installations, limits, overflow, steering, texts
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    Answer,
    ApprovalRequested,
    Prompt,
    QuestionAsked,
    SessionStarted,
    TurnEnded,
)
from pkg.answering import Further, Late, Resumed, Told
from pkg.approval_policy import Decision
from pkg.errors import AgentDied, CodingError, DaemonFenced, ProcessCleanupUnconfirmed, Refused, referenced
from pkg.held_session import Held, ended
from pkg.installations import Installation
from pkg.interactions import Decided, answer_like
from pkg.message_queue import MessageQueue
from pkg.parking import ParkedTurn
from pkg.product import Product, SpecInputs
from pkg.results import Delivery, reply_lost
from pkg.run_clock import RunClock
from pkg.run_scope import run_scope
from pkg.run_session import Asked, RunSession
from pkg.session_store import SessionStore
from pkg.settings import RunnerSettings, parse
from pkg.warm_sessions import Channel

__all__ = ["Product", "SpecInputs", "run"]

log = logging.getLogger(__name__)

Value = TypeVar("Value")

MESSAGE: Final = "message.received"
INTERACTION: Final = "interaction.submitted"
STARTING: Final = "starting"
"""What the clock calls the time before the first prompt; the agent can't be idle yet."""
SENDING: Final = "sending"
"""What the clock calls the time in which the chat takes what was said; the agent has nothing to do then."""
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
            log.warning("run %s (%s) ended: coding.revoked", ctx.run_id, this.correlation)
            yield this.failed(Refused("coding.revoked"))
    finally:
        outbox.close()
        work.cancel()
        await asyncio.wait({work})


class _Stopped(Exception):
    """Somebody who may wrote ``/stop`` while the run was not in a turn."""


class _NotTaken(Exception):
    """The session had died before it took the prompt."""


class _Asks(Exception):
    """The agent waits for a person; its turn is open."""

    def __init__(self, event: ApprovalRequested | QuestionAsked) -> None:
        self.event = event
        super().__init__("a person is asked")


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
        self._arrived: Installation | None = None
        """Where it can be revoked; it begins to work, and to hold anything, as one of :attr:`_installation`."""
        self._installation: Installation | None = None
        self._settings: RunnerSettings | None = None
        self._delivery: Delivery | None = None
        self._clock: RunClock | None = None
        self._over = asyncio.Event()
        self._ticked = 0.0
        self._session = RunSession(self)
        self._side: set[asyncio.Task[Any]] = set()
        self._release: asyncio.Task[None] | None = None
        self._messages: MessageQueue | None = None
        self._recovering: asyncio.Task[list[str]] | None = None
        self._told: set[str] = set()
        self._questions: asking.Questions | None = None
        self._parking: ParkedTurn | None = None
        self._answers: set[asyncio.Task[bool]] = set()
        self._detached: Callable[[str], Awaitable[None]] | None = None
        self._streams = True

    # ---- as its installation and other runs see it

    def revoke(self) -> None:
        """End now, because the installation is gone."""
        self.revoked = True
        if self.task is not None:
            self.task.cancel()

    async def ended(self) -> None:
        """Wait until nothing of the run is left."""
        await self._over.wait()

    @property
    def over(self) -> bool:
        """Whether nothing of the run is left."""
        return self._over.is_set()

    @property
    def parks(self) -> bool:
        """Whether it is about to end with its turn parked."""
        return self._parking is not None

    def stop(self) -> None:
        """Stop what is running and what waits, as ``/stop`` does."""
        if self._messages is not None:
            self._messages.stop()

    def shows(self, key: str, interaction_id: str) -> bool:
        """Whether it is showing this request, or with an empty id any of ``key``, and has neither an answer nor ended."""
        asks = self._questions
        return asks is not None and asks.open and (asks.shown == interaction_id if interaction_id else asks.key == key)

    # ---- from start to terminal result

    async def work(self) -> None:
        """Everything; ends with the terminal result in the outbox unless cancelled."""
        try:
            failure = await self._guarded(self._steps())
            failure = await self._guarded(self._tell_left()) or failure
            await self._session.saved()
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
                if self._arrived is not None:
                    self._arrived.arriving.pop(self.ctx.run_id, None)
                    self._arrived.runs.pop(self.ctx.run_id, None)
                self._over.set()

    async def _guarded(self, steps: Coroutine[Any, Any, None]) -> CodingError | None:
        """The boundary: whatever goes wrong becomes one error with a code, and never its own text in the chat."""
        try:
            await steps
        except CodingError as exc:
            log.warning("run %s (%s) ended: %s", self.ctx.run_id, self.correlation, exc.for_log)
            return exc
        except DaemonFenced as exc:
            log.error("run %s (%s): %s", self.ctx.run_id, self.correlation, exc)
            return Refused("coding.daemon_fenced", retryable=True, daemon=exc.daemon)
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
            await self._emit(self.failed(error))

    def failed(self, error: CodingError) -> RunnerResult:
        """The terminal result where the run has no voice of its own any more."""
        text = referenced(error.text(self.language), self.language, self.correlation)
        return RunnerResult.run_failed(self.ctx.run_id, text, error.code, error.retryable)

    @property
    def delivery(self) -> Delivery:
        """What people see; made on first use, with what is known of the form by then."""
        if self._delivery is None:
            settings = self._settings
            if settings is None:
                mode, progress = str(self.ctx.config.get("reply-mode") or "stream"), "off"
            else:
                mode = settings.reply_mode if settings.streaming and self._streams else "single"
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
                paces=None if self._installation is None else self._installation.paces,
                chat="\n".join(self.conversation.parts()),
                send_until=lambda: math.inf if self._clock is None else self._clock.send_until,
            )
        return self._delivery

    async def _send_detached(self, text: str) -> None:
        if self._detached is None:
            raise Refused("coding.internal")
        await self._detached(text)

    async def _write_overflow(self, text: str) -> str:
        held = self._session.held
        if held is None or not held.place.launcher.local:
            raise Refused("coding.internal")
        return await overflow.writer(held.place.workspace, self.correlation)(text)

    async def _emit(self, result: RunnerResult) -> None:
        self.terminated = self.terminated or result.type in TERMINAL
        await self.outbox.put(result)

    async def tell(self, key: str, params: Mapping[str, str] | None = None) -> None:
        """Tell the person a text of the catalogue."""
        await self.delivery.notice(texts.render(key, self.language, params))

    async def _steps(self) -> None:
        authority = identity.authority_of(self.runner)
        settings = self._parsed()
        actor = identity.trusted_actor(self.ctx, settings.user_id_source)
        approves = bool(actor.sender_id) and actor.sender_id in settings.approvers
        if not approves:
            identity.check_allowed(actor, settings.allowed_actors)
        installation = installations.installation(authority.binding)
        installation.check()
        # From here on its revocation ends this run, whatever it waits for.
        self._arrived, installation.arriving[self.ctx.run_id] = installation, self
        self._detached = overflow.sender(self.runner, self.ctx, authority, installation)
        pressed = self.ctx.input.interaction if self.ctx.event.event_type == INTERACTION else None
        if pressed is None and controls.parse(self.text) is controls.Control.STOP:
            await self.tell(await arrival.stopped(self.ctx, self.conversation, authority, settings, installation, actor))
            return
        if pressed is not None and self._detached is not None and reply_lost(self.ctx):
            # A button is there whether the bot streams or not, and what is streamed to one that does not is lost then.
            self._streams = await overflow.streams(self.runner, self.ctx, installation)
        plugin = parse(self.product.plugin_settings, self.runner.get_plugin_config())
        asked = Asked(authority, actor, installation, settings, plugin)
        meant = await arrival.understood(self.ctx, self.text, self.conversation, asked, pressed)
        if isinstance(meant, Resumed):
            if not installation.parked.take(meant.turn):
                await self.tell("approval.over")
                return
            # Whatever happens to this run from now on, it ends the turn.
            self._installation, self._session = installation, cast(RunSession, meant.turn.carried)
        if meant is None or isinstance(meant, Late):
            identity.check_allowed(actor, settings.allowed_actors)
        if meant is None and self.ctx.event.event_type == INTERACTION:
            meant = Told("approval.over")
        if isinstance(meant, Told):
            await self.tell(meant.text_key, meant.params)
            return
        if isinstance(meant, (Further, Resumed)) and settings.language == "auto":
            # A press has no words of its own, and a number no language.
            self.language = meant.turn.language
        if isinstance(meant, Further):
            await asking.show_further(self, meant.turn, asked, meant.wrong)
            return
        if installations.busy(installation, pooled=authority.pooled) and not isinstance(meant, Resumed):
            raise Refused("coding.busy", retryable=True)
        if isinstance(meant, Resumed):
            # Whoever answers, the turn stays the requester's.
            asked = dataclasses.replace(asked, actor=meant.turn.requester)
        self._installation = installation
        installation.runs[self.ctx.run_id] = installation.arriving.pop(self.ctx.run_id)
        self.judge = judge = steering.Judge(asked.actor, settings.allowed_actors)
        self._questions = asking.Questions(self, asked)
        self._messages = MessageQueue(self.ctx, judge, self, self._steer)
        self._clock = self._started(settings)
        if installation.take_unconfirmed():
            log.error("run %s (%s): an earlier cleanup could not be confirmed", self.ctx.run_id, self.correlation)
            told = texts.render("coding.cleanup_unconfirmed", self.language)
            await self.delivery.notice(referenced(told, self.language, self.correlation))
        outcome = installation.parked.take_outcome(self._questions.key)
        if outcome is not None:
            await self.delivery.notice(asking.told_outcome(outcome, self.language))
        cursor = identity.session_key(
            authority, self.conversation, asked.actor, agent="steering-cursor", machine="", workspace=""
        )
        self._recovering = self.spawn(steering.recover(self.ctx, judge, SessionStore(self.ctx, cursor)))
        if isinstance(meant, Resumed):
            await self._resume(meant, actor, asked)
            return
        if isinstance(meant, Late):
            self._messages.put(await self._questions.taken_late(meant))
        else:
            self._messages.put(await self._prompt(settings))
        await self._converse(asked, self._messages)

    async def _resume(self, meant: Resumed, who: identity.Actor, asked: Asked) -> None:
        """Go on with a parked turn, then with what waited for its own turn meanwhile."""
        turn, messages = meant.turn, self._messages
        assert messages is not None
        held = await self._session.resume(self, asked)
        # The stream has its end to come, whether the turn has ended by now or not.
        held.turn_open = True
        self.delivery.go_on_with(held.calls)
        messages.put_all([*turn.messages, *await self._missed_meanwhile()])
        if meant.decided is not None:
            await self._converse(asked, messages, partial(self._decided_by, who, turn.request.event, meant.decided, held))
            return
        assert self._questions is not None and self._settings is not None
        await self._questions.forget()
        if self.ctx.event.event_type == INTERACTION or answer_like(self.text):
            await self.tell("approval.not_open")
        else:
            messages.put(await self._prompt(self._settings))
        await self._converse(asked, messages, partial(self._turn, _nothing(), held, heard=True))

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

    async def _prompt(self, settings: RunnerSettings) -> Prompt:
        collected = attachments.collect(self.ctx.input)
        await self.tell_refused(collected.refused)
        if not self.text.strip() and not collected.attachments:
            raise Refused("coding.empty_message")
        context = run_scope(self.ctx) if settings.append_run_scope_prompt else ""
        return Prompt(self.text, collected.attachments, context)

    async def tell_refused(self, refused: tuple[attachments.Refusal, ...]) -> None:
        """Tell the person which attachments were left out."""
        if refused:
            await self.delivery.notice("\n".join(texts.render(each.key, self.language, each.params) for each in refused))

    # ---- waiting, with everything that goes on meanwhile

    def spawn(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run ``work`` beside the loop; it ends, or is ended, before the run's session is released."""
        task = asyncio.get_running_loop().create_task(work)
        self._side.add(task)
        return task

    async def during(self, work: Coroutine[Any, Any, Value]) -> Value:
        """The result of ``work``, as :meth:`until` waits for it."""
        task = self.spawn(work)
        return await self.until(task)

    @overload
    async def until(self, task: asyncio.Future[Value]) -> Value: ...

    @overload
    async def until(self, task: asyncio.Future[Value], timeout: float) -> Value | None: ...

    async def until(self, task: asyncio.Future[Value], timeout: float | None = None) -> Value | None:
        """The task's result, while the clock runs and messages are heard; ``None`` after ``timeout`` seconds.

        Raises :class:`_Stopped` or the limit that is reached; the task then still belongs to whoever started it.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not task.done():
            await asyncio.wait({task}, timeout=limits.LOOP_TICK)
            await self._tick()
            if task.done():
                break
            if self._messages is not None and self._messages.stopping:
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
        if self._messages is not None:
            await self._messages.tick(now)

    # ---- messages

    async def _steer(self, prompt: Prompt) -> bool:
        """Put a message into the running turn, never past a request that is shown; whether the agent took it."""
        if self._questions is not None and self._questions.open:
            return False
        held = self._session.held
        if held is None or not held.turn_open or not held.live.session.capabilities.steer:
            return False
        taken = await held.live.session.steer(prompt)
        if taken and self._clock is not None:
            self._clock.touched(time.monotonic())
        return taken

    async def _with_missed(self, prompt: Prompt) -> Prompt:
        """The run's first message, behind those that the host dropped at the end of an earlier run."""
        if self._recovering is None:
            return prompt
        missed = await self.until(self._recovering, limits.RECOVERY_WAIT)
        if missed is None:
            return prompt
        self._recovering = None
        return dataclasses.replace(prompt, text="\n\n".join([*missed, prompt.text])) if missed else prompt

    async def _missed_meanwhile(self) -> list[Prompt]:
        """Messages that the host dropped when the turn was parked; what looks like an answer came too early to be one."""
        if self._recovering is None:
            return []
        missed = await self.until(self._recovering, limits.RECOVERY_WAIT)
        if missed is None:
            return []
        self._recovering = None
        return [Prompt(text) for text in missed if not answer_like(text)]

    def _stopped_text(self) -> str:
        """What a person is told who wrote ``/stop``, with the number of waiting messages that were dropped."""
        count = 0 if self._messages is None else self._messages.take_dropped()
        return texts.render("turn.cancelled_waiting" if count else "turn.cancelled", self.language, {"count": str(count)})

    async def _tell_left(self) -> None:
        """Say how many messages nobody will work on, when the run ends before its messages do."""
        if self._messages is None:
            return
        count = await self._messages.left()
        missed = self._recovering
        if missed is not None and missed.done() and not missed.cancelled():
            count += len(missed.result())
        if count:
            await self.tell("steering.not_worked_on", {"count": str(count)})

    # ---- turns

    async def _converse(self, asked: Asked, messages: MessageQueue, begun: Callable[[], Awaitable[None]] | None = None) -> None:
        """Every message in order, each with its own turn, behind one that has ``begun``; raises what ends the whole run.

        Ends early, with the turn to be parked, when a person has to be asked.
        """
        first = True
        while begun is not None or await self._more(messages):
            if not first:
                await self.delivery.begin_turn()
            first = False
            work, begun = begun or partial(self._answered, messages.take(), asked), None
            try:
                if not await self._worked(work, asked):
                    return
            except _Stopped:
                messages.stopping = False
                await self.delivery.notice(self._stopped_text())
            except CodingError as exc:
                if exc.code == "coding.time_limit":
                    raise
                await self._failed(exc)
            if self._questions is not None:
                self._questions.turn_over(self._session.held)
            if self._session.held is not None and not self._session.held.prompts:
                # What the agent still had to take waits for its own turn now.
                await self._session.held.live.close()

    async def _worked(self, work: Callable[[], Awaitable[None]], asked: Asked) -> bool:
        """One turn to its end, through whatever a person decides at once; false when it is to be parked."""
        while True:
            try:
                await work()
            except _Asks as asks:
                decided = await self._ask(asks.event, asked)
                if decided is None:
                    return False
                work = decided
            else:
                return True

    async def _ask(self, event: ApprovalRequested | QuestionAsked, asked: Asked) -> Callable[[], Awaitable[None]] | None:
        """Show a request; what to go on with when it is decided in this moment, else ``None`` with the turn to be parked."""
        held, messages, questions = self._session.held, self._messages, self._questions
        assert held is not None and messages is not None and questions is not None
        if self._answers:
            # What was decided before must have reached the agent.
            await asyncio.wait(set(self._answers), timeout=limits.CANCEL_GRACE)
        # What the host had before anybody could see the request is no answer to it.
        questions.open = True
        await messages.gather()
        if messages.stopping:
            questions.open = False
            return partial(self._decided_by, asked.actor, event, Decided(Answer(), "cancelled"), held)
        waiting = messages.take_all()
        opened = await questions.show(event, held)
        decided = await questions.linger(opened, messages)
        if decided is None and self._session.may_park:
            held.calls = self.delivery.open_calls
            self._parking = questions.parked(opened, held, self._session, waiting, self._detached)
        else:
            # Elsewhere than where turns can be parked the answer will resume the session.
            messages.put_all(waiting)
        return None if decided is None else partial(self._decided_by, opened.answerer or asked.actor, event, decided, held)

    async def _sent(self, messages: MessageQueue) -> None:
        """Let the chat take what was said, until a message or the time limit comes; ``/stop`` shortens it."""
        clock = self._clock
        if clock is None or not self.delivery.sending:
            return
        clock.pause(SENDING)
        while self.delivery.sending and not messages.waiting and clock.due(time.monotonic()) is None:
            if messages.stopping:
                messages.stopping = False
                await self.delivery.cut_short()
                await self.delivery.notice(self._stopped_text())
                break
            await asyncio.sleep(limits.LOOP_TICK)
            await self._tick()
        clock.answered(SENDING, time.monotonic())

    async def _more(self, messages: MessageQueue) -> bool:
        await self._sent(messages)
        more = await messages.more()
        if messages.stopping:
            # It came when nothing was running any more.
            messages.stopping = False
            count = messages.take_dropped()
            await self.tell("turn.cancelled_waiting" if count else "control.nothing_running", {"count": str(count)})
        return more

    async def _ready(self, asked: Asked) -> Held:
        held = self._session.held
        if held is not None and held.prompts:
            return held
        assert self._clock is not None
        self._clock.pause(STARTING)
        return await self._session.open(asked)

    async def _answered(self, prompt: Prompt, asked: Asked) -> None:
        """One message and its turn; a session that had died before it took the message is opened again, once."""
        held = await self._ready(asked)
        prompt = await self._with_missed(prompt)
        try:
            await self._turn(held.live.session.prompt(prompt), held)
        except _NotTaken:
            held.broken = True
            try:
                held = await self._ready(asked)
                await self._turn(held.live.session.prompt(prompt), held)
            except _NotTaken:
                raise AgentDied("coding.agent_died", retryable=True) from None

    async def _decided_by(
        self, who: identity.Actor, event: ApprovalRequested | QuestionAsked, decided: Decided, held: Held
    ) -> None:
        """Go on with the open turn, with what a person decided."""
        assert self._questions is not None
        decided = await self._questions.decided(event, decided, held, who)
        await self._turn(self._answer(event, decided, held), held, heard=True)

    async def _answer(self, event: ApprovalRequested | QuestionAsked, decided: Decided, held: Held) -> None:
        """Give the agent a person's answer, and the reason of a denial where the answer itself can't carry it."""
        session = held.live.session
        if not await session.answer(event.request_id, decided.answer):
            if held.turn_open:
                await self.tell("approval.not_open")
            return
        reason = asking.denial_of(decided)
        if reason and not session.capabilities.denial_reason and not await self._steer(Prompt(reason)):
            assert self._messages is not None
            self._messages.put(Prompt(reason))

    async def _failed(self, problem: CodingError) -> None:
        """A turn that failed: told before the next one begins, else by the run's end."""
        log.warning("run %s (%s): a turn ended: %s", self.ctx.run_id, self.correlation, problem.for_log)
        error = AgentError(problem.code, problem.detail, problem.params, problem.retryable)
        ended = TurnEnded("error", error)
        if self._session.held is not None and self._session.held.turn_open:
            self._session.held.broken = True
        if self._clock is not None:
            self._clock.event(ended, time.monotonic())
        await self.delivery.end_turn(ended)

    async def _turn(self, begin: Coroutine[Any, Any, None], held: Held, *, heard: bool = False) -> None:
        """One turn from its prompt, or the answer with which it goes on (``heard``), to its end.

        Raises the limit that ended it, the error it failed with, or :class:`_Asks`.
        """
        clock, messages = self._clock, self._messages
        assert clock is not None and messages is not None
        session = held.live.session
        held.turn_open = True
        clock.answered(STARTING, time.monotonic())
        sending = self.spawn(begin)
        ending: CodingError | None = None
        end_by = math.inf
        while held.turn_open:
            event = held.take()
            if event is not None:
                heard = heard or not isinstance(event, SessionStarted)
                clock.event(event, time.monotonic())
                await self._event(event, held, ending=end_by < math.inf)
            elif held.ended:
                _raise_from(sending, heard)
                raise AgentDied("coding.agent_died", retryable=True)
            else:
                await held.channel.wait(limits.LOOP_TICK)
                if not held.channel.waiting:
                    _raise_from(sending, heard)
            if held.turn_open:
                await self._tick()
                if end_by < math.inf:
                    if time.monotonic() >= end_by:
                        held.broken = True
                        await self.delivery.end_turn(TurnEnded("cancelled"), sentence=self._stopped_text())
                        break
                    continue
                ending = self._limit_reached()
                if ending is not None or messages.stopping:
                    self.spawn(session.interrupt())
                    end_by = time.monotonic() + limits.CANCEL_GRACE
        if end_by < math.inf:
            if messages.stopping:
                await self.delivery.cut_short()
            messages.stopping = False
        if ending is not None:
            raise ending

    async def _event(self, event: AgentEvent, held: Held, *, ending: bool) -> None:
        match event:
            case TurnEnded():
                held.turn_open = False
                cancelled = event.stop_reason == "cancelled"
                await self.delivery.end_turn(event, sentence=self._stopped_text() if cancelled else None)
                return
            case SessionStarted(session_id=session_id):
                self._session.save(session_id)
            case ApprovalRequested() | QuestionAsked() if ending:
                assert self._questions is not None
                await self._decided(event.request_id, Decision(self._questions.not_asked(event, held), False), held)
                return
            case ApprovalRequested() | QuestionAsked():
                await self.delivery.event(event)
                assert self._questions is not None
                decision = self._questions.judged(event, held)
                if decision is None:
                    raise _Asks(event)
                await self._decided(event.request_id, decision, held)
                return
            case _:
                pass
        await self.delivery.event(event)

    async def _decided(self, request_id: str, decision: Decision, held: Held) -> None:
        answering = self.spawn(held.live.session.answer(request_id, decision.answer))
        self._answers.add(answering)
        answering.add_done_callback(self._answers.discard)
        if self._clock is not None:
            self._clock.answered(request_id, time.monotonic())
        if decision.text_key and decision.text_key not in self._told:
            self._told.add(decision.text_key)
            await self.tell(decision.text_key, decision.params)

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
            if self._parking is not None and not self.revoked:
                steps.callback(installation.parked.put, self._parking)
                steps.push_async_callback(self._session.park, installation)
            else:
                steps.push_async_callback(self._session.release, installation, revoked=self.revoked)
            steps.push_async_callback(ended, self._side)


async def _nothing() -> None:
    """What a turn that goes on by itself begins with."""


def _raise_from(sending: asyncio.Task[Any], heard: bool) -> None:
    """Raise what sending a prompt failed with; :class:`_NotTaken` where the agent had died and nothing was heard of a turn."""
    if sending.done() and not sending.cancelled() and (problem := sending.exception()) is not None:
        if isinstance(problem, AgentDied) and not heard:
            raise _NotTaken from problem
        raise problem
