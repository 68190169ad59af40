"""Everything a person sees of one run, and everything the host's ledger learns of it.

:class:`Delivery` turns :mod:`pkg.agent_api` events into messages through one of the sinks of :mod:`pkg.reply_sinks` and into
results for the ledger. Guarantees:

- the answer appears once, whole, in order; tool calls, plans and progress stand only under a text being written, thoughts
  nowhere; every bubble is completed, none is empty, and a run that ends well without a text says so;
- a failure never overwrites what was shown: it is a short message of its own with a reference number, which the ledger has
  too, with the code. On pipelines the run then ends with ``run.completed`` and ``finish_reason`` ``error`` (``run.failed``
  would replace the answer by the host's own sentence); on agent bots, where it is not shown, and on the debug page, where its
  real text is, it ends with ``run.failed`` and the code;
- ``reply-mode`` ``stream``: bubbles as they grow (:mod:`pkg.bubbles`), notices as bubbles of their own. ``single``: nothing
  is streamed, and all a person must read is in the last message of the run, because a pipeline that does not stream sends
  only that one. What does not fit goes ahead by ``detached_send``, else into a file of the workspace that the message names.
  The last message itself goes that way, too, where the host would lose it (:attr:`pkg.surfaces.Surface.press_reply_lost`) or
  send it behind the request that follows it;
- nothing is sent faster than its chat takes it (:mod:`pkg.outbound`): progress is left out first, then messages wait.
  :attr:`Delivery.sending` says that some do; :meth:`Delivery.finish` waits for them until the run's time is nearly over. Then,
  after a stop, and beyond ``limits.MESSAGES_PER_RUN`` messages the rest goes into a file that the last message names;
- exactly one terminal result, with token usage where the agent reported it;
- a log result at debug level when nothing else went out for ``limits.HEARTBEAT_SILENCE`` seconds.

Calls may come from several tasks; they are served one after the other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, cast

from langbot_plugin.api.entities.builtin.runner.result import ProcessorLogPayload, RunnerResult, RunnerResultType

from pkg import limits, texts
from pkg.agent_api import AgentEvent, Notice, SessionStarted, TextDelta, ToolFinished, ToolStarted, TurnEnded, UsageReported
from pkg.bubbles import Action, Bubbles, Complete
from pkg.errors import CodingError, referenced
from pkg.outbound import Outbound
from pkg.pacing import Pace, Paces
from pkg.progress import MODES, Progress
from pkg.reply_sinks import AgentBotSink, Emit, PipelineSink, ReplySink, too_fast
from pkg.surfaces import surface_for
from pkg.telemetry import Rate, Usage, bounded, tool_result
from pkg.text_clean import TextCleaner, clean, is_blank, one_line
from pkg.text_split import Fence, FenceTracker, Limit, Part, cut

if TYPE_CHECKING:
    from langbot_plugin.api.entities.builtin.runner.context import RunnerContext

_STOP_TEXTS: Final[Mapping[str, str]] = {
    "cancelled": "turn.cancelled",
    "max_tokens": "turn.max_tokens",
    "max_turn_requests": "turn.max_turn_requests",
    "refusal": "turn.refusal",
}
_LogLevel = Literal["debug", "info", "warning", "error"]


class Delivery:
    """One run's voice. Feed it events and :meth:`tick`; end it with :meth:`finish`."""

    def __init__(
        self,
        ctx: RunnerContext,
        *,
        reply_mode: str,
        show_progress: str,
        language: str,
        emit: Emit,
        correlation_id: str,
        adapter: str | None = None,
        detached_send: Callable[[str], Awaitable[None]] | None = None,
        write_overflow: Callable[[str], Awaitable[str]] | None = None,
        paces: Paces | None = None,
        chat: str = "",
        send_until: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``adapter`` is the host's name of it, by default what ``ctx.delivery`` says.

        ``paces`` has the pace of ``chat``, shared with its other runs; ``send_until`` says until when :meth:`finish` may send,
        in the clock's time. ``sleep`` lets that time pass.

        ``detached_send`` sends one message outside the run; ``write_overflow`` stores a text in the workspace and returns
        the name to tell. Both may raise anything: the next way is taken. ``clock`` gives seconds and never runs back.
        """
        delivery = ctx.delivery
        named = adapter if adapter is not None else str(delivery.platform_capabilities.get("adapter") or "")
        explicit = not delivery.automatic_reply and delivery.surface != "webui"
        self._surface = surface_for(
            named,
            reply_target=delivery.reply_target,
            max_message_size=delivery.max_message_size,
            live_reply=explicit,
        )
        self._reply_lost = reply_lost(ctx)
        self._run_id = ctx.run_id
        self._emit_result = emit
        self._language = language
        self._correlation_id = correlation_id
        self._single = reply_mode == "single"
        self._detached_send = detached_send
        self._write_overflow = write_overflow
        self._clock = clock
        self._sleep = sleep
        self._send_until = send_until
        self._lock = asyncio.Lock()
        self._sink: ReplySink
        if explicit:
            self._sink = AgentBotSink(ctx, self._log, shown_every=self._surface.shown_every)
        else:
            shows_failure = not delivery.automatic_reply
            self._sink = PipelineSink(ctx.run_id, self._emit, shows_failure=shows_failure, streams=not self._single)
        allowance = self._surface.allowance
        self._pace = Pace(allowance) if paces is None else paces.of(chat, allowance, clock())
        self._out = Outbound(self._sink, self._pace, clock, self._log)
        self._progress = Progress(show_progress if show_progress in MODES else "status", language)
        self._bubbles = Bubbles(self._surface)
        self._sections: list[list[str]] = []
        """In single mode: what the last message will hold, notices and answers in order, each in pieces."""
        self._section_open = False
        self._ahead = 0
        """Characters of the sections, joined, that went ahead of the last message."""
        self._ahead_fence: Fence | None = None
        self._ahead_tries = 0
        self._ahead_over = False
        self._cleaner = TextCleaner()
        self._message_id = ""
        self._gap = False
        self._tail = ""
        self._fences = FenceTracker()
        self._turn_has_text = False
        self._said_anything = False
        self._question = ""
        """In single mode: what the last message ends with, never cut."""
        self._request: RunnerResult | None = None
        """In single mode: what the host is to show behind the last message."""
        self._notices: list[str] = []
        self._noticed: set[str] = set()
        self._notice_since = 0.0
        self._rate = Rate()
        self._recorded: dict[str, str] = {}
        self._unrecorded = 0
        self._usage = Usage()
        self._stop_reason = ""
        self._turn_error: CodingError | None = None
        self._last_result_at = clock()
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the terminal result is out; whatever comes later is ignored."""
        return self._finished

    @property
    def sending(self) -> bool:
        """Whether something said waits for its chat to take it; :meth:`tick` sends it."""
        if self._finished:
            return False
        if self._single:
            return self._next_ahead() is not None
        return self._out.waiting and not self._out.capped

    # ---- what the loop calls

    async def event(self, event: AgentEvent) -> None:
        """Take one event of the agent, at once; a :class:`TurnEnded` ends the turn as :meth:`end_turn` does."""
        async with self._lock:
            if self._finished:
                return
            if isinstance(event, TurnEnded):
                await self._end_turn(event, None)
                return
            self._progress.event(event, self._clock())
            match event:
                case TextDelta():
                    await self._text(event)
                case ToolStarted():
                    await self._tool_started(event)
                case ToolFinished():
                    await self._tool_finished(event)
                case UsageReported():
                    self._usage.report(event)
                case Notice():
                    await self._agent_notice(event)
                case SessionStarted(lost_history=True):
                    await self._notice(texts.render("session.lost_history", self._language))
                case _:
                    pass
            if not self._finished:
                await self._poll()

    @property
    def open_calls(self) -> Mapping[str, str]:
        """The tool calls whose start is recorded and whose end is not: their ids and names."""
        return dict(self._recorded)

    def go_on_with(self, calls: Mapping[str, str]) -> None:
        """Record the ends of these calls, too, which began in an earlier run of the same turn."""
        self._recorded.update(calls)

    async def notice(self, text: str) -> None:
        """Tell the person something in a bubble of its own (in single mode: in the last message); the same text once."""
        async with self._lock:
            if not self._finished:
                await self._notice(text)
                await self._poll()

    @property
    def units(self) -> int | None:
        """UTF-16 units that one message may hold; ``None`` where the surface sets no limit."""
        return self._surface.limit.units

    async def ask(self, text: str, request: RunnerResult | None) -> None:
        """Show what a person must decide, whole and behind everything said so far.

        ``request`` has the host show it with buttons; without one ``text`` is a message of its own (in single mode the end of
        the last message, which is shortened before it). Both are shown again when asked again.
        """
        async with self._lock:
            if self._finished:
                return
            await self._feed(self._cleaner.flush())
            await self._flush_notices(force=True)
            self._said_anything = True
            if self._single:
                self._section_open = False
                self._question = text if request is None else ""
                self._request = request
                return
            now = self._clock()
            if self._bubbles.has_text:
                await self._perform(self._bubbles.close(now), ends=True)
            if request is None:
                await self._perform(self._bubbles.message(text, now), ends=True, must=True)
                return
            if self._bubbles.open:
                below = texts.render("approval.see_below", self._language)
                await self._perform(self._bubbles.close(now, below), ends=True)
            await self._drain()
            await self._emit_request(request)

    async def _emit_request(self, request: RunnerResult) -> None:
        self._pace.take(1, self._clock())
        await self._emit(request)

    async def tick(self) -> None:
        """Send what pacing held back and, after a long silence, a heartbeat; call it about ten times a second."""
        async with self._lock:
            if self._finished:
                return
            await self._poll()
            await self._beat()

    async def begin_turn(self) -> None:
        """Another turn of the same run begins (the first needs no call); the failure of the last one is told before it."""
        async with self._lock:
            if self._turn_error is not None:
                told, self._turn_error = self._error_text(self._turn_error), None
                await self._notice(told)
                await self._flush_notices(force=True)
            self._progress.begin_turn(self._clock())
            self._turn_has_text = False

    async def end_turn(self, ended: TurnEnded, *, sentence: str | None = None) -> None:
        """Complete the turn's bubble and say why it ended where that needs saying.

        ``sentence`` replaces the catalogue's sentence for the stop reason; ``""`` says nothing of it. The error of a failed
        turn is told by :meth:`finish`.
        """
        async with self._lock:
            if not self._finished:
                await self._end_turn(ended, sentence)

    async def cut_short(self) -> None:
        """The person wants no more of it: what would still take long to send goes into a file, and a message says so."""
        async with self._lock:
            if self._finished:
                return
            if self._single:
                self._ahead_over = self._ahead_over or self._next_ahead() is not None
            elif self._out.backlog > limits.STOP_BACKLOG:
                await self._shorten()

    async def finish(self, error: CodingError | None = None, *, finish_reason: str = "") -> None:
        """Complete whatever is open, wait until it is sent, and send the one terminal result; later calls do nothing.

        Without ``error`` the error of the last failed turn counts, if there is one. ``finish_reason`` replaces the last
        turn's stop reason in the terminal result.
        """
        async with self._lock:
            if self._finished:
                return
            await self._feed(self._cleaner.flush())
            problem = error or self._turn_error
            told = "" if problem is None else self._error_text(problem)
            if self._single:
                await self._finish_single("" if self._sink.shows_failure else told)
            else:
                await self._finish_stream(told)
            self._finished = True
            await self._terminal(problem, told, finish_reason)

    async def aclose(self) -> None:
        """Give up what is open when the run is torn down without :meth:`finish`; idempotent, sends nothing to the host."""
        self._finished = True
        await self._sink.aclose()

    # ---- the answer

    async def _text(self, event: TextDelta) -> None:
        if event.message_id != self._message_id:
            self._gap = self._gap or bool(event.message_id and self._message_id)
            self._message_id = event.message_id or self._message_id
        for start in range(0, len(event.text), limits.TEXT_SLICE_CHARS):
            if start:
                # Other runs take their steps between two slices.
                await asyncio.sleep(0)
                if self._finished:
                    return
            await self._said(event.text[start : start + limits.TEXT_SLICE_CHARS])

    async def _said(self, text: str) -> None:
        piece = self._cleaner.feed(text)
        if self._gap and piece:
            self._gap = False
            if self._turn_has_text and self._fences.now is None:
                before = len(self._tail) - len(self._tail.rstrip("\n"))
                after = len(piece[:2]) - len(piece[:2].lstrip("\n"))
                piece = "\n" * max(0, 2 - before - after) + piece
        await self._feed(piece)

    async def _feed(self, piece: str) -> None:
        if not piece:
            return
        self._tail = (self._tail + piece[-2:])[-2:]
        self._fences.feed(piece)
        if not is_blank(piece):
            self._turn_has_text = self._said_anything = True
        if not self._single:
            await self._perform(self._bubbles.append(piece, self._clock()))
            return
        if not self._section_open:
            self._sections.append([])
            self._section_open = True
        self._sections[-1].append(piece)

    async def _end_turn(self, ended: TurnEnded, sentence: str | None) -> None:
        await self._feed(self._cleaner.flush())
        if self._turn_error is not None:
            await self._notice(self._error_text(self._turn_error))
        tool_calls = self._progress.tool_calls
        self._progress.event(ended, self._clock())
        self._usage.end_turn()
        self._stop_reason = ended.stop_reason
        error = ended.error
        self._turn_error = None
        if error is not None:
            self._turn_error = CodingError(error.code, detail=error.detail, retryable=error.retryable, params=error.params)
            sentence = ""
        elif sentence is None:
            sentence = self._closing_sentence(ended.stop_reason, tool_calls)
        await self._flush_notices(force=True)
        if sentence:
            self._said_anything = True
        if self._single:
            if sentence:
                self._sections.append([sentence])
            self._section_open = False
        else:
            if self._bubbles.has_text:
                await self._perform(self._bubbles.close(self._clock()), ends=True)
            if sentence:
                await self._perform(self._bubbles.message(sentence, self._clock()), ends=True, must=True)
            elif self._bubbles.open and error is None:
                await self._perform(self._bubbles.close(self._clock(), self._last_words()), ends=True)
        self._turn_has_text = self._gap = False
        self._message_id = self._tail = ""
        self._fences = FenceTracker()

    def _closing_sentence(self, stop_reason: str, tool_calls: int) -> str:
        if stop_reason in _STOP_TEXTS:
            return texts.render(_STOP_TEXTS[stop_reason], self._language)
        if self._turn_has_text:
            return ""
        if tool_calls:
            return texts.render("turn.only_tools", self._language, {"count": tool_calls})
        return texts.render("turn.no_text", self._language)

    # ---- notices

    async def _agent_notice(self, event: Notice) -> None:
        known = event.code in texts.catalogue(texts.DEFAULT_LANGUAGE)
        if event.level == "info":
            if self._rate.take(1, self._clock()):
                await self._log(f"{event.code} {event.text}".strip(), "info")
            return
        await self._notice(texts.render(event.code, self._language, event.params) if known else event.text or event.code)

    async def _notice(self, text: str) -> None:
        text = clean(text[: 2 * limits.NOTICE_CHARS]).strip()[: limits.NOTICE_CHARS]
        if is_blank(text) or text in self._noticed:
            return
        if len(self._noticed) >= limits.NOTICES_PER_RUN:
            if self._rate.take(1, self._clock()):
                await self._log(f"coding.notice_not_shown {text}", "warning")
            return
        self._noticed.add(text)
        self._said_anything = True
        if self._single:
            self._sections.append([text])
            self._section_open = False
            return
        if not self._notices:
            self._notice_since = self._clock()
        self._notices.append(text)
        await self._flush_notices()

    async def _flush_notices(self, *, force: bool = False) -> None:
        while self._notices:
            now = self._clock()
            begun = self._bubbles.break_off(now, anywhere=force or now - self._notice_since >= limits.NOTICE_HOLD)
            if begun is None:
                return
            await self._perform(begun, ends=True)
            await self._perform(self._bubbles.message(self._notices.pop(0), now), ends=True)

    # ---- sending

    async def _poll(self) -> None:
        if self._single:
            await self._go_ahead()
            return
        await self._flush_notices()
        await self._out.pump()
        if self._out.may_show():
            now = self._clock()
            await self._perform(self._bubbles.poll(now, self._progress.lines(now)))

    async def _perform(self, actions: list[Action], *, ends: bool = False, must: bool = False) -> None:
        self._out.put(actions, ends=ends, must=must)
        await self._out.pump()

    async def _drain(self) -> None:
        """Wait until everything is sent; what the time left does not allow goes another way."""
        until = self._send_until()
        while True:
            await self._out.pump()
            if not self._out.waiting:
                return
            if self._out.capped or not self._out.fits(until):
                await self._shorten()
                if not self._out.capped and not self._out.fits(until):
                    await self._out.force()
            else:
                await self._wait(self._out.wait)

    async def _wait(self, seconds: float) -> None:
        await self._sleep(min(seconds, limits.HEARTBEAT_SILENCE / 3))
        await self._beat()

    async def _beat(self) -> None:
        if self._clock() - self._last_result_at >= limits.HEARTBEAT_SILENCE:
            await self._log("coding.heartbeat", "debug")

    async def _emit(self, result: RunnerResult) -> None:
        self._last_result_at = self._clock()
        await self._emit_result(result)

    async def _log(self, text: str, level: str) -> None:
        entry = ProcessorLogPayload(
            text=clean(f"{text[: limits.LOG_CHARS]} [{self._correlation_id}]"),
            level=cast(_LogLevel, level),
        )
        await self._emit(
            RunnerResult(run_id=self._run_id, type=RunnerResultType.PROCESSOR_LOG, data=entry.model_dump(mode="json"))
        )

    # ---- the end

    def _error_text(self, error: CodingError) -> str:
        text = clean(error.text(self._language)[: 2 * limits.NOTICE_CHARS]).strip()[: limits.NOTICE_CHARS]
        return referenced(text, self._language, self._correlation_id)

    async def _finish_stream(self, told: str) -> None:
        await self._flush_notices(force=True)
        now = self._clock()
        if self._bubbles.has_text:
            await self._perform(self._bubbles.close(now), ends=True)
        if told:
            if self._bubbles.open or not self._sink.shows_failure:
                await self._perform(self._bubbles.message(told, now), ends=True, must=True)
        elif self._bubbles.open or not self._said_anything:
            await self._perform(self._bubbles.close(now, self._last_words()), ends=True)
        await self._drain()

    def _last_words(self) -> str:
        """For a progress line that must become something, and for a run that said nothing at all."""
        return texts.render("turn.done" if self._said_anything else "turn.no_text", self._language)

    async def _shorten(self) -> None:
        """One message instead of all that waits: its beginning, what must be read, and the file with the rest."""
        rest = self._out.rest()
        name = await self._stored(rest.text)
        if not name and self._out.capped:
            self._out.uncap()
            return
        note = self._note("reply.rest_file" if name else "reply.rest_cut", name, rest.text)
        self._out.replace(_shortened(rest.text, rest.must, note, self._surface.limit))

    async def _stored(self, text: str) -> str:
        """The name of a new file with ``text``, ``""`` where there can be none."""
        if self._write_overflow is None:
            return ""
        try:
            return clean(await self._write_overflow(text))
        except Exception as exc:  # noqa: BLE001 - the message then says that it was cut
            await self._log(f"coding.reply_failed: overflow file ({type(exc).__name__})", "warning")
            return ""

    def _note(self, key: str, name: str, text: str) -> str:
        return texts.render(key, self._language, {"name": name, "characters": len(text)})

    # ---- single mode

    async def _finish_single(self, told: str) -> None:
        if told:
            self._sections.append([told])
            self._section_open = False
        until = self._send_until()
        cost = self._ahead_cost
        while self._next_ahead() is not None:
            if self._pace.ready_at(2 * cost, self._clock()) > until:
                self._ahead_over = True
                break
            await self._go_ahead()
            if self._next_ahead() is not None:
                await self._wait(self._pace.ready_at(cost, self._clock()) - self._clock())
        whole = self._whole()
        silent = self._ahead or self._question or self._request is not None
        rest = whole[self._ahead :] or ("" if silent else self._last_words())
        behind = f"\n\n{self._question}" if self._question and not is_blank(rest) else self._question
        part, more, _ = cut(rest, self._single_limit.less(behind) if behind else self._single_limit, self._ahead_fence)
        text = part.text
        if not is_blank(more) and behind:
            name = await self._stored(rest)
            text = self._note("reply.rest_file" if name else "reply.rest_cut", name, rest)
        elif not is_blank(more):
            name = await self._stored(rest)
            keys = ("reply.rest_file", "reply.rest_cut") if self._ahead else ("reply.overflow_file", "reply.cut")
            text = _shortened(rest, told, self._note(keys[0] if name else keys[1], name, rest), self._single_limit)
        text += behind
        if not is_blank(text) and not await self._sent_outside(text, until):
            self._out.put([Complete(text, rest + behind)])
            await self._drain()
        if self._request is not None:
            await self._emit_request(self._request)

    async def _sent_outside(self, text: str, until: float) -> bool:
        """Whether the last message went outside the run, which is tried where the host would lose or misplace it."""
        misplaced = self._reply_lost or self._request is not None
        if not misplaced or self._detached_send is None or self._sink.every_message_arrives:
            return False
        self._ahead_over = False
        while not self._ahead_over:
            ready = self._pace.ready_at(1, self._clock())
            while ready <= until and self._clock() < ready:
                await self._wait(ready - self._clock())
            if await self._sent_ahead(text):
                return True
        return False

    @property
    def _single_limit(self) -> Limit:
        return Limit(self._surface.limit.units, limits.RESULT_JSON_BYTES - 2 * limits.RESULT_ENVELOPE_BYTES)

    @property
    def _ahead_cost(self) -> int:
        return self._sink.message_cost if self._sink.every_message_arrives else 1

    def _whole(self) -> str:
        for pieces in self._sections:
            pieces[:] = ["".join(pieces)]
        sections = [pieces[0].strip("\n") for pieces in self._sections]
        return "\n\n".join(section for section in sections if not is_blank(section))

    def _next_ahead(self) -> tuple[Part, Fence | None] | None:
        """What must go ahead next because the last message cannot hold it, if it can."""
        if self._ahead_over or (self._detached_send is None and not self._sink.every_message_arrives):
            return None
        part, rest, fence = cut(self._whole()[self._ahead :], self._single_limit, self._ahead_fence)
        return None if is_blank(rest) else (part, fence)

    async def _go_ahead(self) -> None:
        """Send ahead what its chat takes now."""
        while self._pace.ready_at(self._ahead_cost, self._clock()) <= self._clock():
            following = self._next_ahead()
            if following is None:
                return
            part, fence = following
            if is_blank(part.body) or await self._sent_ahead(part.text):
                self._ahead += len(part.body)
                self._ahead_fence = fence
                self._ahead_tries = 0

    async def _sent_ahead(self, text: str) -> bool:
        self._pace.take(self._ahead_cost, self._clock())
        try:
            if self._sink.every_message_arrives:
                await self._sink.complete(text)
            else:
                assert self._detached_send is not None
                await self._detached_send(text)
        except Exception as exc:  # noqa: BLE001 - what was not sent goes into a file instead
            later = too_fast(exc)
            if later is not None:
                self._pace.hold(later.seconds, self._clock())
                self._ahead_tries += 1
            if later is None or self._ahead_tries > limits.REPLY_RETRIES:
                await self._log(f"coding.reply_failed: message ahead of the last ({type(exc).__name__})", "warning")
                self._ahead_over = True
            return False
        return True

    # ---- the terminal result

    async def _terminal(self, problem: CodingError | None, told: str, finish_reason: str) -> None:
        if self._unrecorded:
            await self._log(f"coding.tool_calls_not_recorded {self._unrecorded}", "info")
        usage = self._usage.result()
        if problem is None:
            reason = finish_reason or ("stop" if self._stop_reason in ("", "end_turn") else self._stop_reason)
            await self._emit(RunnerResult.run_completed(self._run_id, finish_reason=clean(reason)[:64], usage=usage))
            return
        await self._log(f"{problem.code} {problem.detail}".strip(), "error")
        if self._sink.failure_is_quiet:
            result = RunnerResult.run_failed(self._run_id, told, problem.code, problem.retryable, usage=usage)
        else:
            result = RunnerResult.run_completed(self._run_id, finish_reason="error", usage=usage)
        await self._emit(result)

    # ---- the ledger

    async def _tool_started(self, event: ToolStarted) -> None:
        self._gap = self._gap or not self._message_id
        if not self._rate.take(2, self._clock()):
            self._unrecorded += 1
            return
        name = one_line(event.title, limits.STATUS_CHARS) or event.kind
        self._recorded[event.tool_call_id] = name
        while len(self._recorded) > limits.TELEMETRY_OPEN_CALLS:
            del self._recorded[next(iter(self._recorded))]
        parameters = {"kind": event.kind, "input": bounded(event.input)}
        await self._emit(RunnerResult.tool_call_started(self._run_id, event.tool_call_id, name, parameters))

    async def _tool_finished(self, event: ToolFinished) -> None:
        name = self._recorded.pop(event.tool_call_id, None)
        if name is None:
            return
        error = None if event.status == "completed" else event.status
        result = tool_result(event)
        await self._emit(RunnerResult.tool_call_completed(self._run_id, event.tool_call_id, name, result, error))


def reply_lost(ctx: RunnerContext) -> bool:
    """Whether the host loses what this run replies unless its bot streams."""
    adapter = str(ctx.delivery.platform_capabilities.get("adapter") or "")
    pressed = ctx.event.event_type == "interaction.submitted"
    return pressed and ctx.delivery.automatic_reply and surface_for(adapter).press_reply_lost


def _shortened(text: str, must: str, note: str, limit: Limit) -> str:
    """The beginning of ``text``, what must be read in any case, and a note, in one message."""
    tail = f"\n\n{must[: limit.units and limit.units // 4]}\n\n{note}" if must else f"\n\n{note}"
    part, _, _ = cut(text, limit.less(tail))
    return part.text.rstrip("\n") + tail
