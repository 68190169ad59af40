"""What people see of a run, on every surface: the whole answer once, in order, nothing stuck, nothing cut.

The surfaces are the page-long model in ``testkit.host_model``; the results are the SDK's own objects.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.interaction import InteractionRequest
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from pkg import limits, texts
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    FileDiff,
    Notice,
    PlanEntry,
    PlanUpdated,
    SessionStarted,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    UsageReported,
)
from pkg.errors import CodingError
from pkg.results import Delivery
from pkg.text_clean import is_blank
from testkit import host_model
from testkit.host_model import Screen

Step = tuple[float, AgentEvent | str]
"""Seconds to wait (ticking), then an event of the agent or a notice."""


def context(
    *,
    adapter: str = "WebSocketAdapter",
    automatic: bool = True,
    surface: str = "platform",
    event: str = "message.received",
    **delivery: Any,
) -> RunnerContext:
    """A run's context as the host gives it."""
    return RunnerContext.model_validate(
        {
            "run_id": "run-1",
            "trigger": {"type": event},
            "event": {"event_id": "e", "event_type": event, "event_time": 1, "source": "platform"},
            "input": {"text": "hi"},
            "delivery": {
                "surface": surface,
                "automatic_reply": automatic,
                "supports_streaming": True,
                "platform_capabilities": {"adapter": adapter},
                **delivery,
            },
            "resources": {"tools": [{"tool_name": "event_reply", "tool_type": "platform", "operations": ["call"]}]},
            "context": {"available_apis": {"reply_stream": True}},
            "runtime": {},
        }
    )


class Run:
    """One run under a clock that only the test moves; ``results`` and the times they were sent at are recorded."""

    def __init__(self, ctx: RunnerContext | None = None, **options: Any) -> None:
        self.now = 1000.0
        self.results: list[RunnerResult] = []
        self.times: list[float] = []
        settings = {"reply_mode": "stream", "show_progress": "status", "language": "en_US", "correlation_id": "ab12cd"}
        given = {**settings, "sleep": self._sleep, **options}
        self.delivery = Delivery(ctx or context(), emit=self._emit, clock=lambda: self.now, **given)

    async def _emit(self, result: RunnerResult) -> None:
        self.results.append(result)
        self.times.append(self.now)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        """Time passes, with a tick each 100 ms as in the run loop."""
        until = self.now + seconds
        while self.now + 0.1 <= until:
            self.now += 0.1
            await self.delivery.tick()
        self.now = until

    async def steps(self, steps: Sequence[Step]) -> None:
        """Play a script of events and notices."""
        for pause, step in steps:
            await self.wait(pause)
            await (self.delivery.notice(step) if isinstance(step, str) else self.delivery.event(step))

    def of(self, kind: str) -> list[RunnerResult]:
        """The results of one type."""
        return [result for result in self.results if result.type == kind]

    @property
    def deltas(self) -> list[str]:
        return [result.data["chunk"]["content"] for result in self.of("message.delta")]

    @property
    def messages(self) -> list[str]:
        return [result.data["message"]["content"] for result in self.of("message.completed")]

    @property
    def logs(self) -> list[dict[str, str]]:
        return [result.data for result in self.of("processor.log")]


async def play(steps: Sequence[Step], *, error: CodingError | None = None, end: TurnEnded | None = None, **options: Any) -> Run:
    """A whole run: the script, the turn's end, the terminal result."""
    run = Run(options.pop("ctx", None), **options)
    await run.steps(steps)
    await run.delivery.end_turn(end or TurnEnded("end_turn"))
    await run.delivery.finish(error)
    return run


def ink(text: str) -> str:
    """A text as far as splitting must keep it: without whitespace and without lines that are only a code fence's marks."""
    lines = [line for line in text.split("\n") if not re.fullmatch(r"\s*(`{3,}|~{3,})\w*\s*", line)]
    return visible("".join(lines))


def visible(text: str) -> str:
    """The characters a person can see."""
    return "".join(char for char in text if not is_blank(char))


SURFACES: dict[str, tuple[str, Callable[[Sequence[RunnerResult]], Screen]]] = {
    "web": ("WebSocketAdapter", host_model.web_stream),
    "telegram": ("TelegramAdapter", host_model.telegram_stream),
    "lark": ("LarkAdapter", host_model.web_stream),
    "unknown": ("", host_model.web_stream),
}

ANSWERS = {
    "instant": "OK",
    "5000 ascii": "The quick brown fox. " * 238,
    "3000 emoji": "😀" * 3000,
    "100000 CJK": "漢字の文章。" * 16_667,
    "5000-character fence": "Look:\n\n```python\n" + "print('a line of code in a long block')\n" * 128 + "```\n\nThat is all.",
    "1 MB": "Some words of a very long answer, line after line.\n" * 20_000,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("streamed", [True, False], ids=["in pieces", "at once"])
async def test_every_answer_arrives_whole_once_in_order(surface: str, name: str, streamed: bool) -> None:
    """The sizes that break hosts, on each streaming surface: nothing lost, doubled, stuck or cut."""
    adapter, host = SURFACES[surface]
    answer = ANSWERS[name]
    size = max(20, len(answer) // 200) if streamed else len(answer)
    steps: list[Step] = [(0, SessionStarted("s"))]
    steps += [(0.1 if streamed else 0, TextDelta(answer[at : at + size])) for at in range(0, len(answer), size)]
    run = await play(steps, ctx=context(adapter=adapter))
    screen = host(run.results)
    assert ink("".join(screen.messages)) == ink(answer)
    assert screen.unfinished == []
    assert screen.finish_reason == "stop"
    assert all(host_model.result_bytes(result) <= limits.RESULT_JSON_BYTES for result in run.results)


@pytest.mark.asyncio
async def test_progress_is_seen_on_telegram() -> None:
    """Each delta is edited into the message there: the adapter shows numbers that are 1 plus a multiple of 8."""
    steps: list[Step] = [(1.0, TextDelta(f"word{n} ")) for n in range(10)]
    run = await play(steps, ctx=context(adapter="TelegramAdapter"))
    (trail,) = host_model.telegram_stream(run.results).trail
    assert len(trail) == 1 + len(run.deltas) + 1
    assert len(run.deltas) == 10
    assert [result.data["chunk"]["msg_sequence"] for result in run.of("message.delta")] == list(range(1, 81, 8))


@pytest.mark.asyncio
async def test_progress_is_seen_on_lark() -> None:
    """The Lark adapter shows multiples of 8."""
    run = await play(
        [(0.3, TextDelta("a ")), (0.3, TextDelta("b ")), (0.3, TextDelta("c "))], ctx=context(adapter="LarkAdapter")
    )
    assert [result.data["chunk"]["msg_sequence"] for result in run.of("message.delta")] == [8, 16, 24]


@pytest.mark.asyncio
@pytest.mark.parametrize(("target", "least"), [("person", 1.0), ("group", 3.0)])
async def test_telegram_is_edited_no_faster_than_it_allows(target: str, least: float) -> None:
    """A refused edit at the end would be sent as a second message, so edits stay under the service's rate."""
    ctx = context(adapter="TelegramAdapter", reply_target={"target_type": target})
    run = await play([(0.05, TextDelta("word ")) for _ in range(200)], ctx=ctx)
    times = [at for at, result in zip(run.times, run.results, strict=True) if result.type == "message.delta"]
    assert len(times) > 2
    assert all(later - earlier >= least - 1e-6 for earlier, later in itertools.pairwise(times))


@pytest.mark.asyncio
async def test_the_first_words_replace_a_progress_line_at_once() -> None:
    """A person waits for the first words, not for the surface's interval; the delta after them keeps the average rate."""
    run = Run(context())
    await run.steps([(0, ThoughtDelta("hm")), (0.1, TextDelta("First ")), *[(0.05, TextDelta("word "))] * 20])
    times = [at - run.times[0] for at, result in zip(run.times, run.results, strict=True) if result.type == "message.delta"]
    interval = limits.DELTA_INTERVAL
    assert times[:2] == pytest.approx([0.0, 0.1])
    assert 2 * interval - 1e-6 <= times[2] <= 3 * interval
    assert run.deltas[1].startswith("First ")


# ------------------------------------------------------------------ random runs

_TEXT = st.one_of(
    st.sampled_from(
        ["word ", "line\n", "para\n\n", "漢字。", "😀", "…", " …", "\n", "Working…", "x" * 900, "漢" * 3000, "\u200b"]
    ),
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=40),
)
_EVENT: st.SearchStrategy[AgentEvent | str] = st.one_of(
    _TEXT.map(TextDelta),
    _TEXT.map(TextDelta),
    _TEXT.map(TextDelta),
    st.just(ThoughtDelta("SECRETTHOUGHT")),
    st.builds(ToolStarted, st.sampled_from("abc"), st.just("TOOLTITLE")),
    st.builds(ToolFinished, st.sampled_from("abc"), st.sampled_from(["completed", "failed"]), output=st.just("TOOLOUTPUT")),
    st.just(PlanUpdated((PlanEntry("PLANSTEP", "in_progress"),))),
    st.integers(0, 5).map(lambda number: f"<notice {number}>"),
)
_STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 3.0]), _EVENT), max_size=40)


def _answer(steps: Sequence[Step]) -> str:
    return "".join(step.text for _, step in steps if isinstance(step, TextDelta))


def _without_notices(text: str) -> str:
    return re.sub(r"<notice[0-9]>", "", text)


@settings(max_examples=400, deadline=None)
@given(_STEPS, st.sampled_from(sorted(SURFACES)), st.sampled_from(["off", "status", "tools"]))
def test_any_run_shows_the_answer_once_and_nothing_else(steps: list[Step], surface: str, show_progress: str) -> None:
    """Whatever comes when: answer and notices once each, the answer in order, no thought, tool, plan or progress line left."""
    assume(not any(mark in _answer(steps) for mark in ("```", "~~~")))  # splitting closes and opens fences
    adapter, host = SURFACES[surface]
    run = asyncio.run(play(steps, ctx=context(adapter=adapter), show_progress=show_progress))
    screen = host(run.results)
    assert screen.unfinished == []
    shown = visible("".join(screen.messages))
    answer, notices = ink(_answer(steps)), {"".join(step.split()) for _, step in steps if isinstance(step, str)}
    for notice in notices:
        assert shown.count(notice) == 1
    rest = _without_notices(shown)
    sentences = {
        "".join(texts.render("turn.no_text", "en_US").split()),
        *(f"Done(toolcalls:{n}).Theagentgavenotextasananswer." for n in range(1, 41)),
    }
    if answer:
        assert rest.removesuffix("Done.") == answer.removesuffix("Done.")
    else:
        assert rest in sentences
    assert all(message.strip() for message in run.messages)


@settings(max_examples=400, deadline=None)
@given(_STEPS, st.sampled_from(sorted(SURFACES)))
def test_any_run_keeps_the_delivery_rules(steps: list[Step], surface: str) -> None:
    """Per bubble: deltas paced, cumulative in both fields, never equal to each other or to the final text, bytes bounded."""
    run = asyncio.run(play(steps, ctx=context(adapter=SURFACES[surface][0])))
    assert [
        result.type
        for result in run.results
        if str(result.type.value if hasattr(result.type, "value") else result.type).startswith("run.")
    ] == ["run.completed"]
    assert run.results[-1].type == "run.completed"
    assert run.results[-1].data.get("message") is None
    bubble: list[str] = []
    sent = 0
    due = float("-inf")
    early = False
    for at, result in zip(run.times, run.results, strict=True):
        if result.type == "message.delta":
            chunk = result.data["chunk"]
            assert chunk["content"] == chunk["all_content"]
            assert not bubble or bubble[-1].strip() != chunk["content"].strip()
            assert not chunk["is_final"]
            if not chunk["content"].strip("… "):
                due = max(due, at + limits.DELTA_INTERVAL)
            else:
                if at < due - 1e-6:
                    assert bubble, "only what replaces a progress line may be early"
                    assert not early, "once in a bubble"
                    early = True
                due = max(due, at) + limits.DELTA_INTERVAL
            bubble.append(chunk["content"])
            sent += host_model.result_bytes(result)
        elif result.type == "message.completed":
            text = result.data["message"]["content"]
            assert not bubble or bubble[-1].strip() != text.strip()
            sent += host_model.result_bytes(result)
            length = host_model.result_bytes(result)
            assert sent <= max(limits.MESSAGE_BYTES_FACTOR * length, limits.MESSAGE_BYTES_FREE)
            bubble, sent, early = [], 0, False
    assert bubble == []


@settings(max_examples=200, deadline=None)
@given(_STEPS, st.sampled_from(["", "TelegramAdapter", "WebSocketAdapter"]), st.booleans())
def test_single_mode_puts_everything_into_the_last_message(steps: list[Step], adapter: str, with_error: bool) -> None:
    """A pipeline that does not stream shows only the last message: it holds answer, notices and failure, or names the file."""
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "answer.md"

    error = CodingError("coding.no_actor") if with_error else None
    run = asyncio.run(play(steps, error=error, ctx=context(adapter=adapter), reply_mode="single", write_overflow=write))
    host = host_model.telegram_last if adapter == "TelegramAdapter" else host_model.web_last
    (message,) = host(run.results).messages
    assert run.deltas == []
    assert len(run.messages) == 1
    whole = files[0] if files else message
    assert ink(_answer(steps)) in _without_notices(ink(whole))
    assert not files or "answer.md" in message
    if error is not None:
        assert "Reference: ab12cd" in message


# ------------------------------------------------------------------ bytes


@pytest.mark.asyncio
@pytest.mark.parametrize("piece", ["twenty characters ok ", "漢字二十文字の断片を続けて送る試験です。。", "😀" * 20])
async def test_a_megabyte_in_small_pieces_costs_at_most_twelve_times_its_length(piece: str) -> None:
    """Cumulative deltas grow with the square of a text; they become rarer as it grows, and do not stop altogether."""
    run = Run()
    count = 1_000_000 // len(json.dumps(piece))
    for number in range(count):
        await run.delivery.event(TextDelta(piece))
        run.now += 0.005
        if number % 20 == 0:
            await run.delivery.tick()
    await run.delivery.end_turn(TurnEnded("end_turn"))
    await run.delivery.finish()
    total = sum(host_model.result_bytes(result) for result in run.results)
    assert total <= limits.MESSAGE_BYTES_FACTOR * count * (len(json.dumps(piece)) - 2)
    assert len(run.deltas) > 20
    assert "".join(run.messages) == piece * count


@pytest.mark.asyncio
async def test_what_was_shown_at_a_high_price_stays_in_its_bubble() -> None:
    """A notice that breaks off a long text does not leave a short message behind that cost as much as the long one."""
    steps: list[Step] = [(0, TextDelta("漢" * 3000 + "\n")), (0, TextDelta("漢" * 3000))]
    steps += [(0.3, TextDelta("word ")) for _ in range(20)]
    run = await play([*steps, (0, "Note")])
    spent = sum(host_model.result_bytes(result) for result in run.of("message.delta"))
    first = host_model.result_bytes(run.of("message.completed")[0])
    assert spent + first <= max(limits.MESSAGE_BYTES_FREE, limits.MESSAGE_BYTES_FACTOR * first)
    assert visible("".join(run.messages)) == "漢" * 6000 + "word" * 20 + "Note"


# ------------------------------------------------------------------ sentences


@pytest.mark.asyncio
async def test_a_turn_of_only_tool_calls_says_what_was_done() -> None:
    """Silence is no answer: the number of tool calls is."""
    run = await play(
        [
            (0, ToolStarted("1", "ls")),
            (0, ToolFinished("1", "completed")),
            (0, ToolStarted("2", "ls")),
            (5, ToolFinished("2", "completed")),
        ]
    )
    assert run.messages == ["Done (tool calls: 2). The agent gave no text as an answer."]
    assert host_model.telegram_stream(run.results).unfinished == []


@pytest.mark.asyncio
async def test_an_empty_answer_says_so() -> None:
    """An empty success is a sentence, in the language of the run."""
    assert (await play([])).messages == [texts.render("turn.no_text", "en_US")]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("reason", "key"), [("cancelled", "turn.cancelled"), ("max_tokens", "turn.max_tokens"), ("refusal", "turn.refusal")]
)
async def test_a_stop_reason_worth_knowing_is_told(reason: str, key: str) -> None:
    """A turn that did not end by itself says why, after what it said; it is a normal end."""
    run = await play([(0, TextDelta("So far"))], end=TurnEnded(reason))
    assert run.messages == ["So far", texts.render(key, "en_US")]
    assert run.results[-1].data["finish_reason"] == reason


@pytest.mark.asyncio
async def test_the_loop_can_say_the_end_in_its_own_words() -> None:
    """A turn ended for a reason the loop knows better is told once, in the loop's words."""
    run = Run()
    await run.delivery.event(TextDelta("Half"))
    await run.delivery.end_turn(TurnEnded("cancelled"), sentence="Time is up.")
    await run.delivery.finish()
    assert run.messages == ["Half", "Time is up."]


@pytest.mark.asyncio
async def test_a_lost_session_is_told_before_the_answer() -> None:
    """A fresh session instead of the old one is never silent."""
    run = await play([(0, SessionStarted("s", lost_history=True)), (0, TextDelta("Hello"))])
    assert run.messages == [texts.render("session.lost_history", "en_US"), "Hello"]


@pytest.mark.asyncio
async def test_text_after_the_end_of_the_turn_is_a_bubble_of_its_own() -> None:
    """A sub-agent that reports late is still heard."""
    run = Run()
    await run.steps([(0, TextDelta("Answer")), (0, TurnEnded("end_turn")), (1, TextDelta("Late")), (1, TextDelta(" news"))])
    await run.delivery.finish()
    assert run.messages == ["Answer", "Late news"]
    assert host_model.web_stream(run.results).unfinished == []


@pytest.mark.asyncio
async def test_two_turns_of_one_run_are_two_bubbles() -> None:
    """A follow-up that became the next turn gets its own answer."""
    run = Run()
    await run.steps([(0, TextDelta("One")), (0, TurnEnded("end_turn"))])
    await run.delivery.begin_turn()
    await run.steps([(0, TextDelta("Two")), (0, TurnEnded("end_turn"))])
    await run.delivery.finish()
    assert run.messages == ["One", "Two"]


@pytest.mark.asyncio
async def test_text_around_a_tool_call_is_two_paragraphs() -> None:
    """Agents end a thought before they act: the next one starts a paragraph, but not in the middle of code."""
    tool: list[Step] = [(0.0, ToolStarted("1", "ls")), (0.0, ToolFinished("1", "completed"))]
    run = await play([(0, TextDelta("I look.")), *tool, (0, TextDelta("Found."))])
    assert run.messages == ["I look.\n\nFound."]
    run = await play([(0, TextDelta("```\na = 1\n")), *tool, (0, TextDelta("b = 2\n```"))])
    assert run.messages == ["```\na = 1\nb = 2\n```"]
    run = await play([(0, TextDelta("wo", "m1")), *tool, (0, TextDelta("rd", "m1")), (0, TextDelta("next", "m2"))])
    assert run.messages == ["word\n\nnext"]


@pytest.mark.asyncio
async def test_a_delta_is_within_the_limit_with_its_progress_line() -> None:
    """A text just under the limit is shown shortened while its progress line stands under it, and whole in the end."""
    run = await play([(0, SessionStarted("s")), (2, TextDelta("x" * 3995))], ctx=context(adapter="TelegramAdapter"))
    assert [len(delta) for delta in run.deltas] == [len("Working…"), 4000]
    assert run.messages == ["x" * 3995]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["stream", "single"])
async def test_pages_of_line_breaks_are_no_messages(mode: str) -> None:
    """Whitespace longer than a message is left out: services refuse such a message."""
    run = await play([(0, TextDelta("Hi" + "\n" * 9000))], ctx=context(adapter="TelegramAdapter"), reply_mode=mode)
    assert [message.strip() for message in run.messages] == ["Hi"]


# ------------------------------------------------------------------ notices


@pytest.mark.asyncio
async def test_a_notice_comes_between_lines_never_inside_one() -> None:
    """It closes the bubble at the end of a line; the begun line goes on in the next bubble."""
    run = await play([(0, TextDelta("First line.\nSecond ")), (0.5, "Watch out"), (0.5, TextDelta("line."))])
    assert run.messages == ["First line.\n", "Watch out", "Second line."]


@pytest.mark.asyncio
async def test_a_notice_waits_for_a_line_but_not_for_long() -> None:
    """Without a line to end it waits two seconds, then comes all the same."""
    run = Run()
    await run.steps([(0, TextDelta("Half a sen")), (0.5, "Watch out")])
    assert run.messages == []
    await run.wait(2.2)
    assert run.messages == ["Half a sen", "Watch out"]


@pytest.mark.asyncio
async def test_the_same_notice_is_told_once() -> None:
    """A driver that repeats a warning does not flood the chat."""
    run = await play([(0, Notice("agent.x", "Careful", "warning")) for _ in range(50)])
    assert run.messages.count("Careful") == 1


@pytest.mark.asyncio
async def test_a_flood_of_notices_is_cut_off_and_logged() -> None:
    """Twenty different ones are shown, the rest is in the log."""
    run = await play([(0.3, Notice("agent.x", f"Careful {n}", "warning")) for n in range(60)])
    assert sum("Careful" in message for message in run.messages) == limits.NOTICES_PER_RUN
    assert sum("coding.notice_not_shown" in log["text"] for log in run.logs) == 60 - limits.NOTICES_PER_RUN


@pytest.mark.asyncio
async def test_an_informing_notice_is_only_logged() -> None:
    """What nobody needs to read in the chat is in the ledger."""
    run = await play([(0, Notice("agent.mode", "mode is now plan")), (0, TextDelta("Hi"))])
    assert run.messages == ["Hi"]
    assert any("mode is now plan" in log["text"] for log in run.logs)


@pytest.mark.asyncio
async def test_a_known_notice_is_told_in_the_catalogues_words() -> None:
    """A notice with a code of ours is rendered with its parameters."""
    run = await play([(0, Notice("attachment.unreadable", "raw", "warning", {"name": "a.png"})), (0, TextDelta("Hi"))])
    assert run.messages[0] == texts.render("attachment.unreadable", "en_US", {"name": "a.png"})


@pytest.mark.asyncio
async def test_a_progress_line_after_the_last_text_ends_in_a_word() -> None:
    """A notice closed the answer and the agent only thought on: its progress line becomes "Done.", not a false sentence."""
    run = await play([(0, TextDelta("Answer.\n")), (0, "Note"), (3, ThoughtDelta("hm")), (3, ThoughtDelta("hm"))])
    assert run.messages == ["Answer.\n", "Note", "Done."]


@pytest.mark.asyncio
async def test_an_answer_that_equals_its_own_progress_is_not_sent_twice() -> None:
    """An agent that writes exactly what the last delta showed: another delta comes between, so that the edit is a change."""
    steps: list[Step] = [(0, TextDelta("Hi")), (0.3, TextDelta("\n\n…"))]
    run = await play(steps, ctx=context(adapter="TelegramAdapter"), show_progress="off")
    assert host_model.telegram_stream(run.results).messages == ["Hi\n\n…"]


# ------------------------------------------------------------------ failures


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", ["web", "telegram"])
async def test_a_failure_leaves_the_answer_and_tells_what_happened(surface: str) -> None:
    """On pipelines: the shown text stays, the failure is a message with a reference, and the run completes with "error"."""
    adapter, host = SURFACES[surface]
    run = Run(context(adapter=adapter))
    await run.steps([(0, TextDelta("Half an answer"))])
    await run.delivery.finish(CodingError("coding.no_actor", detail="SOMEDETAIL"))
    screen = host(run.results)
    assert screen.messages[0] == "Half an answer"
    assert screen.messages[1].endswith("Reference: ab12cd")
    assert texts.render("coding.no_actor", "en_US") in screen.messages[1]
    assert (screen.unfinished, screen.failed, screen.finish_reason) == ([], "", "error")
    assert any(log["level"] == "error" and "coding.no_actor" in log["text"] and "ab12cd" in log["text"] for log in run.logs)


@pytest.mark.asyncio
async def test_a_failure_before_any_text_takes_the_place_of_the_progress_line() -> None:
    """No "Working…" stays behind, and nothing says that the agent gave no text."""
    run = Run(context(adapter="TelegramAdapter"))
    await run.steps([(0, SessionStarted("s"))])
    await run.delivery.finish(CodingError("coding.no_actor"))
    screen = host_model.telegram_stream(run.results)
    assert len(screen.messages) == 1
    assert screen.messages[0].endswith("Reference: ab12cd")


@pytest.mark.asyncio
async def test_a_failed_turn_is_told_by_the_end_of_the_run() -> None:
    """The error of a turn needs no second telling; its code is in the log."""
    run = await play([(0, TextDelta("Half"))], end=TurnEnded("error", AgentError("coding.no_actor")))
    assert run.messages[0] == "Half"
    assert len(run.messages) == 2
    assert "ab12cd" in run.messages[1]
    assert run.results[-1].data["finish_reason"] == "error"


@pytest.mark.asyncio
async def test_a_failed_turn_followed_by_another_is_still_told() -> None:
    """A later success does not hide an earlier failure."""
    run = Run()
    await run.steps(
        [(0, TurnEnded("error", AgentError("coding.no_actor"))), (0, TextDelta("Better")), (0, TurnEnded("end_turn"))]
    )
    await run.delivery.finish()
    assert any("ab12cd" in message for message in run.messages)
    assert "Better" in run.messages
    assert run.results[-1].data["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_the_debug_page_gets_the_real_failure() -> None:
    """Where ``run.failed`` is shown as it is, it carries text and code, and no message repeats it."""
    run = Run(context(adapter="debug", automatic=False, surface="webui"))
    await run.steps([(0, TextDelta("Half"))])
    await run.delivery.finish(CodingError("coding.no_actor", retryable=True))
    assert run.messages == ["Half"]
    last = run.results[-1]
    assert (last.type, last.data["code"], last.data["retryable"]) == ("run.failed", "coding.no_actor", True)
    assert "ab12cd" in last.data["error"]


@pytest.mark.asyncio
async def test_nothing_follows_the_terminal_result() -> None:
    """Late events, ticks and a second finish are ignored."""
    run = await play([(0, TextDelta("Hi"))])
    count = len(run.results)
    await run.steps([(20, TextDelta("late")), (20, "late")])
    await run.delivery.end_turn(TurnEnded("end_turn"))
    await run.delivery.finish(CodingError("coding.no_actor"))
    assert len(run.results) == count
    assert run.delivery.finished


# ------------------------------------------------------------------ the ledger


@pytest.mark.asyncio
async def test_silence_is_broken_by_a_heartbeat() -> None:
    """15 s without a result: a debug log, so that the host notices a cancel and does not give up."""
    run = Run()
    await run.steps([(0, SessionStarted("s")), (0, ToolStarted("1", "sleep"))])
    before = len(run.logs)
    await run.wait(61)
    beats = run.logs[before:]
    assert {beat["level"] for beat in beats} == {"debug"}
    gaps = [later - earlier for earlier, later in itertools.pairwise(run.times)]
    assert max(gaps) <= 15.2


@pytest.mark.asyncio
async def test_tool_calls_are_telemetry_of_bounded_size() -> None:
    """The ledger gets parameters and outcome; megabytes of them become kilobytes."""
    big = {"content": "x" * 1_000_000, "deep": [[[[[[[["y"]]]]]]]], "list": list(range(10_000))}
    diffs = (FileDiff("a.py", "1\n", "1\n2\n"),)
    run = await play(
        [
            (0, ToolStarted("1", "Write a.py", "edit", big)),
            (0, ToolFinished("1", "completed", output="o" * 1_000_000, diffs=diffs)),
        ]
    )
    (started,), (completed,) = run.of("tool.call.started"), run.of("tool.call.completed")
    assert started.data["tool_name"] == "Write a.py"
    assert completed.data["result"]["files"] == [{"path": "a.py", "old_lines": 1, "new_lines": 2}]
    assert all(host_model.result_bytes(result) < 16_384 for result in (started, completed))


@pytest.mark.asyncio
async def test_a_failed_tool_call_is_recorded_as_failed() -> None:
    """Status failed or cancelled is the ledger's error."""
    run = await play([(0, ToolStarted("1", "ls")), (0, ToolFinished("1", "failed", output="no"))])
    assert run.of("tool.call.completed")[0].data["error"] == "failed"


@pytest.mark.asyncio
async def test_a_flood_of_tool_calls_does_not_delay_the_answer() -> None:
    """1,000 calls at once: few are recorded, each with its end, the rest is counted."""
    steps: list[Step] = []
    for number in range(1000):
        steps += [(0, ToolStarted(str(number), "ls")), (0, ToolFinished(str(number), "completed"))]
    run = await play([*steps, (0, TextDelta("Done."))])
    recorded = len(run.of("tool.call.started"))
    assert recorded == len(run.of("tool.call.completed")) == limits.TELEMETRY_BURST // 2
    assert any(f"coding.tool_calls_not_recorded {1000 - recorded}" in log["text"] for log in run.logs)


@pytest.mark.asyncio
async def test_usage_is_reported_only_when_known() -> None:
    """Missing numbers are unknown, never zero; a total is computed only from both halves; turns add up."""
    assert (await play([(0, TextDelta("Hi"))])).results[-1].usage is None
    partial = (await play([(0, UsageReported(input_tokens=3)), (0, TextDelta("Hi"))])).results[-1].usage
    assert partial is not None
    assert (partial.prompt_tokens, partial.completion_tokens, partial.total_tokens) == (3, None, None)
    run = Run()
    await run.steps([(0, UsageReported(1, 1)), (0, UsageReported(3, 4, cached_input_tokens=2)), (0, TurnEnded("end_turn"))])
    await run.steps([(0, UsageReported(10, 20, total_tokens=31, context_used=5, context_size=9)), (0, TurnEnded("end_turn"))])
    await run.delivery.finish()
    usage = run.results[-1].usage
    assert usage is not None
    assert usage.model_dump() == {
        "prompt_tokens": 13,
        "completion_tokens": 24,
        "total_tokens": 38,
        "cached_input_tokens": 2,
        "context_used": 5,
        "context_size": 9,
    }


# ------------------------------------------------------------------ progress


@pytest.mark.asyncio
async def test_progress_says_what_runs() -> None:
    """Default: one line under the text, naming the running tool or the plan's step; never in the completed text."""
    steps: list[Step] = [
        (0, SessionStarted("s")),
        (3, ThoughtDelta("hm")),
        (3, ToolStarted("1", "npm\ntest", "execute")),
        (3, ToolFinished("1", "completed")),
        (3, PlanUpdated((PlanEntry("read", "completed"), PlanEntry("write", "in_progress")))),
        (3, TextDelta("All good.")),
        (3, TurnEnded("end_turn")),
    ]
    run = Run()
    await run.steps(steps)
    await run.delivery.finish()
    assert run.deltas == [
        "Working…",
        "Thinking…",
        "Working… (running: npm test)",
        "Working…",
        "Step 2 of 2: write",
        "All good.\n\nStep 2 of 2: write",
    ]
    assert run.messages == ["All good."]


@pytest.mark.asyncio
async def test_progress_off_shows_only_that_more_is_coming() -> None:
    """No tool is named; the text being written carries a mark, so that its end differs from it."""
    run = await play([(0, SessionStarted("s")), (1, ToolStarted("1", "npm test")), (1, TextDelta("Hi"))], show_progress="off")
    assert run.deltas == ["Hi\n\n…"]


@pytest.mark.asyncio
async def test_progress_tools_lists_the_last_calls_with_their_outcome() -> None:
    """The last calls with a mark each, under a working line."""
    run = Run(show_progress="tools")
    await run.steps(
        [
            (0, ToolStarted("1", "ls")),
            (3, ToolFinished("1", "failed")),
            (3, ToolStarted("2", "cat a")),
            (3, SessionStarted("s")),
        ]
    )
    assert run.deltas[-1] == "✗ ls\n▸ cat a\nWorking…"


# ------------------------------------------------------------------ single mode


async def _nothing(text: str) -> None:
    raise OSError("PLATFORMTEXT")


def _collector(into: list[str]) -> Callable[[str], Awaitable[None]]:
    async def send(text: str) -> None:
        into.append(text)

    return send


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ANSWERS)
async def test_single_mode_sends_ahead_what_the_last_message_cannot_hold(name: str) -> None:
    """With a send outside the run: everything before the last part goes ahead, in order."""
    sent: list[str] = []
    ctx = context(adapter="TelegramAdapter")
    run = await play([(0, TextDelta(ANSWERS[name]))], ctx=ctx, reply_mode="single", detached_send=_collector(sent))
    screen = host_model.telegram_last(run.results)
    assert ink("".join([*sent, *screen.messages])) == ink(ANSWERS[name])


@pytest.mark.asyncio
async def test_single_mode_writes_a_file_when_nothing_can_be_sent_ahead() -> None:
    """A refused send is no loss: the whole text is in a file that the last message names, with the failure's text."""
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "answer.md"

    run = await play(
        [(0, TextDelta(ANSWERS["5000 ascii"]))],
        error=CodingError("coding.no_actor"),
        ctx=context(adapter="TelegramAdapter"),
        reply_mode="single",
        detached_send=_nothing,
        write_overflow=write,
    )
    (message,) = host_model.telegram_last(run.results).messages
    assert message.startswith("The quick brown fox.")
    assert "answer.md" in message
    assert "Reference: ab12cd" in message
    assert ANSWERS["5000 ascii"].strip() in files[0]
    assert not any("PLATFORMTEXT" in str(result.data) for result in run.results)


@pytest.mark.asyncio
async def test_single_mode_says_so_when_it_must_cut() -> None:
    """Without any other way the message says that it is only the beginning."""
    run = await play([(0, TextDelta(ANSWERS["3000 emoji"]))], ctx=context(adapter="TelegramAdapter"), reply_mode="single")
    (message,) = host_model.telegram_last(run.results).messages
    assert message.startswith("😀" * 100)
    assert "3000 characters" in message


@pytest.mark.asyncio
@pytest.mark.parametrize("adapter", ["TelegramAdapter", "DiscordAdapter"])
async def test_single_mode_answers_a_press_outside_the_run_where_the_host_loses_it(adapter: str) -> None:
    """Host fact: Telegram without streaming can't reply to a press; the answer is sent to the chat itself, once."""
    sent: list[str] = []
    ctx = context(adapter=adapter, event="interaction.submitted")
    run = await play([(0, TextDelta("It is done."))], ctx=ctx, reply_mode="single", detached_send=_collector(sent))
    replied = [] if adapter == "TelegramAdapter" else ["It is done."]
    assert (sent == ["It is done."], host_model.web_last(run.results).messages) == (not replied, replied)


@pytest.mark.asyncio
async def test_single_mode_replies_to_a_press_when_nothing_can_be_sent_outside() -> None:
    """A bot that does stream shows it then; nothing is held back for a bot that may not."""
    ctx = context(adapter="TelegramAdapter", event="interaction.submitted")
    run = await play([(0, TextDelta("It is done."))], ctx=ctx, reply_mode="single", detached_send=_nothing)
    assert host_model.telegram_last(run.results).messages == ["It is done."]


@pytest.mark.asyncio
async def test_single_mode_waits_for_the_chat_before_it_answers_a_press() -> None:
    """A send refused for coming too fast is made again after the service's pause."""
    sent: list[str] = []

    async def send(text: str) -> None:
        sent.append(text)
        if len(sent) == 1:
            raise RuntimeError("Flood control exceeded. Retry in 5 seconds")

    ctx = context(adapter="TelegramAdapter", event="interaction.submitted")
    run = Run(ctx, reply_mode="single", detached_send=send)
    began = run.now
    await run.steps([(0, TextDelta("It is done."))])
    await run.delivery.finish()
    assert sent == ["It is done."] * 2
    assert run.now - began >= 5
    assert run.of("message.completed") == []


@pytest.mark.asyncio
async def test_single_mode_says_what_was_said_before_it_asks() -> None:
    """Host fact: without streaming the last message is sent when the run is over, so behind the request of the same run."""
    order: list[str] = []

    async def send(text: str) -> None:
        order.append(text)

    run = Run(context(adapter="DiscordAdapter"), reply_mode="single", detached_send=send)
    await run.steps([(0, TextDelta("I need to build."))])
    payload = {"interaction_id": "i", "title": "May I?", "actions": [{"id": "a", "label": "Yes"}], "fallback_text": "May I?"}
    await run.delivery.ask("May I?", RunnerResult.interaction_requested("run-1", InteractionRequest.model_validate(payload)))
    await run.delivery.finish()
    assert order == ["I need to build."]
    assert run.of("message.completed") == []
    assert len(run.of("action.requested")) == 1


@pytest.mark.asyncio
async def test_single_mode_on_a_streaming_surface_is_one_bubble() -> None:
    """The mode works everywhere; it only does not stream."""
    run = await play([(0, TextDelta("Hi ")), (1, "Note"), (1, TextDelta("there"))], reply_mode="single")
    assert host_model.web_stream(run.results).messages == ["Hi \n\nNote\n\nthere"]


# ------------------------------------------------------------------ hygiene


@pytest.mark.asyncio
async def test_terminal_escapes_and_broken_unicode_never_reach_the_chat() -> None:
    """An escape sequence or an emoji cut in two by the agent's chunks is read as one."""
    run = await play([(0, TextDelta("\x1b[3")), (0, TextDelta("1mred\x1b[0m \ud83d")), (0, TextDelta("\ude00\x00!"))])
    assert run.messages == ["red 😀!"]


@pytest.mark.asyncio
async def test_concurrent_calls_are_served_one_after_the_other() -> None:
    """Events, ticks and notices from several tasks never interleave inside one message."""
    run = Run()

    async def feed(letter: str) -> None:
        for _ in range(50):
            await run.delivery.event(TextDelta(letter * 3 + " "))
            await run.delivery.tick()
            run.now += 0.01
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for letter in "ab":
            group.create_task(feed(letter))
    await run.delivery.end_turn(TurnEnded("end_turn"))
    await run.delivery.finish()
    assert sorted("".join(run.messages).split()) == ["aaa"] * 50 + ["bbb"] * 50


# ------------------------------------------------------------------ everybody's loop


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["stream", "single"])
@pytest.mark.parametrize("text", ["a\n", "```\n", "\r", "x", "漢"], ids=["lines", "fences", "returns", "one line", "CJK"])
async def test_others_take_their_steps_while_a_long_text_is_worked_on(text: str, mode: str) -> None:
    """Our rule: of one long piece of text only a slice is worked on at once, and it arrives as if it had come in pieces."""
    slices, steps = 12, 0
    long = text * (slices * limits.TEXT_SLICE_CHARS // len(text))

    async def other() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    run, pieces = Run(reply_mode=mode), Run(reply_mode=mode)
    others = asyncio.create_task(other())
    await run.delivery.event(TextDelta(long))
    others.cancel()
    assert steps >= slices - 1
    for start in range(0, len(long), 5_000):
        await pieces.delivery.event(TextDelta(long[start : start + 5_000]))
    for each in (run, pieces):
        await each.delivery.event(TurnEnded("end_turn"))
        await each.delivery.finish()
    assert "".join(run.messages) == "".join(pieces.messages)


@pytest.mark.asyncio
async def test_a_run_torn_down_within_a_long_text_says_no_more() -> None:
    """Our rule: between two slices a run may be given up; nothing is sent after that."""
    run = Run()
    saying = asyncio.create_task(run.delivery.event(TextDelta("a line\n" * 20_000)))
    await asyncio.sleep(0)
    await run.delivery.aclose()
    sent = len(run.results)
    await saying
    assert len(run.results) == sent
