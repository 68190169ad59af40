"""On agent bots nothing is shown but explicit replies: the same answers, through the SDK's own runner and reply streams.

The runner, its context and proxies are the SDK's; only the runtime connection's far end is a model of the host on Telegram.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import assume, given, settings
from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from test_results import _STEPS, ANSWERS, Step, _answer, _without_notices, context, ink, visible

from pkg import limits, texts
from pkg.agent_api import SessionStarted, TextDelta, ThoughtDelta, ToolStarted, TurnEnded
from pkg.errors import CodingError
from pkg.results import Delivery
from testkit.host_model import PLACEHOLDER, AgentBotHost, Rejected


class ScriptedRunner(Runner):
    """Plays a script through a delivery, under a clock that only the script moves."""

    def __init__(self, steps: Sequence[Step], error: CodingError | None, reply_mode: str, finish: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps, self._error, self._mode, self._finish = steps, error, reply_mode, finish

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override]
        """The results the delivery emits, one after the other."""
        queue: asyncio.Queue[RunnerResult | None] = asyncio.Queue()
        now = [0.0]

        async def sleep(seconds: float) -> None:
            now[0] += seconds
            await asyncio.sleep(0)

        delivery = Delivery(
            ctx,
            reply_mode=self._mode,
            show_progress="status",
            language="en_US",
            emit=queue.put,
            correlation_id="ab12cd",
            clock=lambda: now[0],
            sleep=sleep,
        )

        async def script() -> None:
            try:
                for pause, step in self._steps:
                    for _ in range(int(pause * 10)):
                        now[0] += 0.1
                        await delivery.tick()
                    await (delivery.notice(step) if isinstance(step, str) else delivery.event(step))
                if self._finish:
                    await delivery.end_turn(TurnEnded("end_turn"))
                    await delivery.finish(self._error)
                else:
                    await delivery.aclose()
            finally:
                await queue.put(None)

        task = asyncio.create_task(script())
        try:
            while (result := await queue.get()) is not None:
                yield result
        finally:
            await task


async def play(
    steps: Sequence[Step],
    host: AgentBotHost,
    *,
    error: CodingError | None = None,
    reply_mode: str = "stream",
    ctx: RunnerContext | None = None,
    finish: bool = True,
) -> list[RunnerResult]:
    """A whole run on an agent bot; what the SDK's runner yields."""
    runner = ScriptedRunner(steps, error, reply_mode, finish)
    runner.bind_runtime(plugin_runtime_handler=host)  # type: ignore[no-untyped-call]
    ctx = ctx or context(adapter="TelegramAdapter", automatic=False)
    return [result async for result in runner.invoke(ctx)]


def kinds(results: Sequence[RunnerResult]) -> set[str]:
    """The types of the results, as strings."""
    return {str(getattr(result.type, "value", result.type)) for result in results}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ANSWERS)
async def test_every_answer_arrives_whole_once_in_order(name: str) -> None:
    """The same sizes as on pipelines, in pieces: streamed in up to 16 live replies, the rest as plain ones."""
    answer = ANSWERS[name]
    size = max(20, len(answer) // 200)
    host = AgentBotHost()
    steps: list[Step] = [(0, SessionStarted("s"))]
    steps += [(0.2, TextDelta(answer[at : at + size])) for at in range(0, len(answer), size)]
    results = await play(steps, host)
    assert ink("".join(host.chat.messages)) == ink(answer)
    assert PLACEHOLDER not in host.chat.messages
    assert set(host.bubbles) == host.closed
    assert not kinds(results) & {"message.delta", "message.completed"}
    assert "coding.reply_failed" not in str([result.data for result in results])
    assert results[-1].type == "run.completed"


@settings(max_examples=200, deadline=None)
@given(_STEPS)
def test_any_run_shows_the_answer_once_and_nothing_else(steps: list[Step]) -> None:
    """Whatever comes when, the chat holds the answer once and no progress line; no edit is refused for changing nothing."""
    assume(not any(mark in _answer(steps) for mark in ("```", "~~~")))  # splitting closes and opens fences
    host = AgentBotHost()
    results = asyncio.run(play(steps, host))
    assert set(host.bubbles) == host.closed
    assert "coding.reply_failed" not in str([result.data for result in results])
    shown = _without_notices(visible("".join(host.chat.messages)))
    answer = ink(_answer(steps))
    if answer:
        assert shown.removesuffix("Done.") == answer.removesuffix("Done.")
    else:
        assert shown.startswith("Done")


@pytest.mark.asyncio
async def test_progress_becomes_visible_although_telegram_shows_each_eighth_update() -> None:
    """A status that fell on a hidden update is repeated until one is shown."""
    host = AgentBotHost()
    await play(
        [(0, SessionStarted("s")), (0.5, TextDelta("Text.")), (0.5, ToolStarted("1", "npm test")), (10, ThoughtDelta(""))], host
    )
    assert "Text.\n\nWorking… (running: npm test)" in host.chat.trail[0]


@pytest.mark.asyncio
async def test_updates_are_bounded_like_deltas() -> None:
    """One message costs at most 12 times its length or 256 KB, repeats included."""
    host = AgentBotHost()
    await play([(0.3, TextDelta("漢字の文 ")) for _ in range(500)], host)
    assert host.bytes_sent <= limits.MESSAGE_BYTES_FREE


@pytest.mark.asyncio
@pytest.mark.parametrize("failing", ["update", "finish"])
async def test_a_broken_live_reply_becomes_a_plain_one(failing: str) -> None:
    """The platform refuses an update or the end of a stream: the whole text is sent as a reply, and the run goes on."""
    host = AgentBotHost(failing=frozenset({failing}))
    results = await play([(0, SessionStarted("s")), (1, TextDelta("The answer"))], host)
    assert host.chat.messages[-1] == "The answer"
    assert any("coding.reply_failed" in str(result.data) for result in results if result.type == "processor.log")
    assert results[-1].type == "run.completed"


@pytest.mark.asyncio
async def test_a_refused_reply_is_logged_and_ends_nothing() -> None:
    """Where nothing can be sent at all the ledger says so; the platform's own words stay out of the log."""
    host = AgentBotHost(failing=frozenset({"update", "finish", "abort", "reply"}))
    results = await play([(0, SessionStarted("s")), (1, TextDelta("The answer"))], host)
    logs = [result.data["text"] for result in results if result.type == "processor.log"]
    assert any(log.startswith("coding.reply_failed: message not delivered") for log in logs)
    assert not any("failed for" in log for log in logs)
    assert results[-1].type == "run.completed"


class BusyHost(AgentBotHost):
    """A service that refuses the first replies for coming too fast, in the words its client has for it."""

    refusals = 2

    def _may(self, operation: str) -> None:
        super()._may(operation)
        if operation == "reply" and self.refusals > 0:
            self.refusals -= 1
            raise Rejected("Flood control exceeded. Retry in 4 seconds")


@pytest.mark.asyncio
@pytest.mark.parametrize("reply_mode", ["stream", "single"])
async def test_a_reply_that_came_too_fast_is_sent_again(reply_mode: str) -> None:
    """Vendor's rule: 429 with a pause; the host passes it on and does not try again. We do: whole, once, in order."""
    host = BusyHost()
    results = await play([(0, TextDelta(ANSWERS["100000 CJK"]))], host, reply_mode=reply_mode)
    assert host.refusals == 0
    assert ink("".join(host.chat.messages)) == ink(ANSWERS["100000 CJK"])
    assert "coding.reply_failed" not in str([result.data for result in results])
    assert results[-1].type == "run.completed"


@pytest.mark.asyncio
async def test_a_live_reply_refused_for_speed_becomes_a_plain_one_after_the_pause() -> None:
    """A stream that failed once is closed at the host; the text comes as a reply of its own."""

    class BusyStream(AgentBotHost):
        def _may(self, operation: str) -> None:
            super()._may(operation)
            if operation == "finish":
                raise Rejected("Too Many Requests: retry after 9")

    host = BusyStream()
    await play([(0, SessionStarted("s")), (1, TextDelta("The answer"))], host)
    assert host.chat.messages[-1] == "The answer"
    assert host.calls.count("reply") == 1


@pytest.mark.asyncio
async def test_without_live_replies_the_answer_comes_whole() -> None:
    """A host that grants no reply stream still gets replies."""
    host = AgentBotHost()
    ctx = context(adapter="TelegramAdapter", automatic=False)
    ctx.context.available_apis.reply_stream = False
    await play([(0, SessionStarted("s")), (1, TextDelta("The answer")), (3, TextDelta("."))], host, ctx=ctx)
    assert host.calls == ["reply"]
    assert host.chat.messages == ["The answer."]


@pytest.mark.asyncio
async def test_a_failure_is_a_reply_and_a_failed_run() -> None:
    """People read the text with its reference; the ledger gets ``run.failed`` with the code, which is not shown here."""
    host = AgentBotHost()
    results = await play([(0, TextDelta("Half"))], host, error=CodingError("coding.no_actor"))
    assert host.chat.messages[0] == "Half"
    assert host.chat.messages[1].endswith("Reference: ab12cd")
    assert (results[-1].type, results[-1].data["code"]) == ("run.failed", "coding.no_actor")


@pytest.mark.asyncio
async def test_single_mode_replies_once_in_as_many_messages_as_needed() -> None:
    """Every reply arrives on an agent bot, so nothing needs a file."""
    host = AgentBotHost()
    await play([(0, TextDelta(ANSWERS["5000 ascii"])), (1, "Note")], host, reply_mode="single")
    assert ink("".join(host.chat.messages)) == ink(ANSWERS["5000 ascii"]) + "Note"
    assert set(host.calls) == {"reply"}


@pytest.mark.asyncio
async def test_a_torn_down_run_leaves_no_live_reply_open() -> None:
    """``aclose`` aborts the stream that was being written."""
    host = AgentBotHost()
    await play([(0, SessionStarted("s")), (1, TextDelta("Half"))], host, finish=False)
    assert set(host.bubbles) == host.closed
    assert host.calls[-1] == "abort"


@pytest.mark.asyncio
async def test_an_empty_answer_says_so() -> None:
    """As on pipelines."""
    host = AgentBotHost()
    await play([], host)
    assert host.chat.messages == [texts.render("turn.no_text", "en_US")]
