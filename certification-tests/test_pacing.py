"""Nothing is sent faster than its chat takes it, and what the time does not allow is in a named file: never silently lost.

The clock is the test's: waiting costs nothing. What the service would do is counted by its rule, not by ours.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_results import _STEPS, ANSWERS, Run, Step, _answer, _without_notices, context, ink, play, visible

from pkg import limits, texts
from pkg.agent_api import TextDelta, ThoughtDelta, TurnEnded
from pkg.bubbles import Complete, Show
from pkg.errors import CodingError
from pkg.outbound import Outbound
from pkg.pacing import Allowance, Pace, Paces
from pkg.reply_sinks import TryLater, too_fast
from pkg.surfaces import surface_for
from testkit import host_model

# ------------------------------------------------------------------ the bucket

_ALLOWANCE = st.builds(Allowance, st.integers(3, 20), st.sampled_from([0.25, 0.3, 1.0, 4.0]))


def busiest(times: Sequence[float], seconds: float) -> int:
    """The most calls in any stretch of that length."""
    return max((sum(start <= at < start + seconds for at in times) for start in times), default=0)


@given(_ALLOWANCE, st.lists(st.tuples(st.integers(0, 3), st.floats(0, 30)), max_size=60))
def test_no_stretch_of_time_has_more_than_the_burst_and_the_rate(allowance: Allowance, wishes: list[tuple[int, float]]) -> None:
    """Our rule, for any wishes at any times: what waits until it is ready never exceeds the allowance."""
    pace, now = Pace(allowance), 100.0
    made: list[float] = []
    for calls, pause in wishes:
        now = pace.ready_at(calls, now + pause)
        pace.take(calls, now)
        made += [now] * calls
    for first, last in itertools.combinations(range(len(made)), 2):
        span = made[last] - made[first]
        assert last - first + 1 <= allowance.burst + allowance.per_second * span + 1e-3


@given(_ALLOWANCE, st.lists(st.integers(1, 3), min_size=1, max_size=40))
def test_nothing_waits_longer_than_the_rate_asks(allowance: Allowance, wishes: list[int]) -> None:
    """A backlog is over after the time its calls beyond the burst take: no allowance is wasted."""
    pace, now = Pace(allowance), 0.0
    for calls in wishes:
        now = pace.ready_at(calls, now)
        pace.take(calls, now)
    assert now <= max(0.0, sum(wishes) - allowance.burst) / allowance.per_second + 1e-3


@given(_ALLOWANCE, st.floats(0.1, 60), st.integers(1, 3))
def test_a_pause_the_service_asks_for_is_kept_and_no_burst_follows(allowance: Allowance, seconds: float, calls: int) -> None:
    """Vendors' rule: calls during the pause make it longer."""
    pace = Pace(allowance)
    pace.hold(seconds, 10.0)
    assert pace.ready_at(1, 10.0) == pytest.approx(10.0 + seconds, abs=1e-3)
    again = pace.ready_at(1 + calls, 10.0)
    assert again == pytest.approx(10.0 + seconds + calls / allowance.per_second, abs=1e-2)


def test_without_an_allowance_only_the_services_own_pause_counts() -> None:
    """The web chat and the debug page are no services."""
    pace = Pace(None)
    pace.take(1000, 5.0)
    assert pace.ready_at(1000, 5.0) == 5.0
    pace.hold(3.0, 5.0)
    assert pace.ready_at(1, 5.0) == 8.0


def test_what_had_to_be_sent_too_early_is_made_up_for() -> None:
    """The last message of a run may be a debt; the next run of the chat waits for it."""
    pace = Pace(Allowance(5, 1.0))
    pace.take(8, 0.0)
    assert pace.ready_at(1, 0.0) == pytest.approx(4.0)


def test_runs_of_one_chat_share_its_pace_and_chats_do_not() -> None:
    """A person who writes again at once gets no second burst."""
    paces, allowance = Paces(), Allowance(5, 1.0)
    paces.of("one", allowance, 0.0).take(5, 0.0)
    assert paces.of("one", allowance, 0.0).ready_at(1, 0.0) == 1.0
    assert paces.of("two", allowance, 0.0).ready_at(1, 0.0) == 0.0


def test_remembered_chats_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that rested go first; what is still paced is kept as long as there is room."""
    monkeypatch.setattr(limits, "PACED_CHATS", 4)
    paces, allowance = Paces(), Allowance(5, 1.0)
    for number in range(10):
        paces.of(f"rested {number}", allowance, 0.0)
    busy = paces.of("busy", allowance, 0.0)
    busy.take(5, 0.0)
    for number in range(3):
        paces.of(f"other {number}", allowance, 1.0)
    assert paces.of("busy", allowance, 1.0) is busy
    assert len(paces) <= 4


@pytest.mark.parametrize(
    ("adapter", "kind", "per_minute"),
    [
        ("TelegramAdapter", "person", 60),
        ("TelegramAdapter", "group", 18),
        ("DiscordAdapter", "person", 60),
        ("LarkAdapter", "group", 240),
        ("WecomBotAdapter", "person", 18),
        ("DingTalkAdapter", "group", 18),
        ("", "person", 60),
    ],
)
def test_each_service_has_the_pace_it_publishes(adapter: str, kind: str, per_minute: float) -> None:
    """Vendors' numbers, by the adapter's name as the host gives it."""
    allowance = surface_for(adapter, reply_target={"target_type": kind}).allowance
    assert allowance is not None
    assert allowance.per_second * 60 == per_minute
    assert allowance.burst == 5


@pytest.mark.parametrize("adapter", ["WebSocketAdapter", "WebPageBotAdapter", "debug"])
def test_pages_of_the_dashboard_have_no_pace(adapter: str) -> None:
    """Nobody limits them."""
    assert surface_for(adapter).allowance is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("ActionCallError: Failed to execute tool event_reply: Flood control exceeded. Retry in 5 seconds", 5.0),
        ("Too Many Requests: retry after 17", 17.0),
        ("429 Too Many Requests (error code: 20028): The write action you are performing has hit the rate limit.", None),
        ("You are being rate limited. retry_after: 0.65", 0.65),
        ("Too Many Requests: retry after 86400", limits.REPLY_RETRY_MAX),
        ("BadRequest: Message is too long", "no"),
        ("chat 14290 not found", "no"),
    ],
)
def test_a_refusal_for_speed_is_told_from_others(text: str, seconds: float | str | None) -> None:
    """The words of the Bot API, of its client as the host passes them on, and of Discord; a day's pause is cut short."""
    later = too_fast(RuntimeError(text))
    if seconds == "no":
        assert later is None
    else:
        assert later is not None
        assert later.seconds == (limits.REPLY_RETRY_SECONDS if seconds is None else seconds)


# ------------------------------------------------------------------ the queue


class Screen:
    """A sink that keeps what it was given, and refuses as often as it is told."""

    every_message_arrives = True
    shows_failure = False
    failure_is_quiet = True
    show_cost = 1
    complete_cost = 1
    message_cost = 1

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.sent: list[str] = []

    async def show(self, text: str, sequence: int) -> None:
        await self.complete(f"({text})")

    async def complete(self, text: str) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise TryLater(7.0)
        self.sent.append(text)

    async def aclose(self) -> None:
        """Nothing is held."""


class Waiting:
    """A queue over a screen, with the test's clock and the log."""

    def __init__(self, screen: Screen, allowance: Allowance | None) -> None:
        self.now = 0.0
        self.logs: list[str] = []
        self.out = Outbound(screen, Pace(allowance), lambda: self.now, self._log)

    async def _log(self, text: str, level: str) -> None:
        self.logs.append(text)

    async def settle(self) -> None:
        """Let time pass until nothing waits."""
        await self.out.pump()
        while self.out.waiting:
            self.now += max(self.out.wait, 0.001)
            await self.out.pump()


@pytest.mark.asyncio
@pytest.mark.parametrize("allowance", [None, Allowance(5, 1.0)])
async def test_a_refused_message_stays_first_and_is_sent_after_the_pause(allowance: Allowance | None) -> None:
    """Our rule: nothing overtakes it, nothing is sent twice."""
    screen = Screen(refusals=2)
    waiting = Waiting(screen, allowance)
    waiting.out.put([Complete("one", "one"), Complete("two", "two")])
    await waiting.settle()
    assert screen.sent == ["one", "two"]
    assert waiting.now >= 14.0


@pytest.mark.asyncio
async def test_a_message_that_is_always_refused_is_given_up_and_logged() -> None:
    """Six tries, then the ledger says what was lost; the rest still goes."""
    screen = Screen(refusals=limits.REPLY_RETRIES + 1)
    waiting = Waiting(screen, Allowance(5, 1.0))
    waiting.out.put([Complete("one", "one"), Complete("two", "two")])
    await waiting.settle()
    assert screen.sent == ["two"]
    assert waiting.logs == ["coding.reply_failed: message refused for coming too fast"]


@pytest.mark.asyncio
async def test_refused_progress_is_left_out() -> None:
    """It is worth no second try."""
    screen = Screen(refusals=1)
    waiting = Waiting(screen, Allowance(5, 1.0))
    waiting.out.put([Show("half", 1), Complete("whole", "whole")])
    await waiting.settle()
    assert screen.sent == ["whole"]


def test_what_is_taken_back_is_the_text_as_it_was_written() -> None:
    """Parts of one message are joined as they were cut, messages of their own stand apart, progress is none of it."""
    out = Waiting(Screen(), Allowance(3, 1.0)).out
    out.put([Complete("```\na\n```", "```\na\n"), Show("```", 1), Complete("```\nb\n```", "b\n```")], ends=True)
    out.put([Complete("Stopped.", "Stopped.")], ends=True, must=True)
    out.put([Complete("more", "more")])
    rest = out.rest()
    assert rest.text == "```\na\nb\n```\n\nStopped.\n\nmore"
    assert rest.must == "Stopped."


# ------------------------------------------------------------------ whole runs on Telegram


def calls(run: Run) -> list[float]:
    """When the host calls the service for these results: a bubble's first text is a placeholder and an edit."""
    made: list[float] = []
    open_bubble = False
    for at, result in zip(run.times, run.results, strict=True):
        if result.type in ("message.delta", "message.completed"):
            made += [at] * (1 if open_bubble else 2)
            open_bubble = result.type == "message.delta"
    return made


def telegram(kind: str = "person") -> Any:
    """A context of a private chat or a group there."""
    return context(adapter="TelegramAdapter", reply_target={"target_type": kind, "target_id": "7"})


@pytest.mark.asyncio
@pytest.mark.parametrize(("kind", "per_second"), [("person", 1.0), ("group", 1 / 3)])
@pytest.mark.parametrize("name", ANSWERS)
async def test_every_answer_arrives_whole_at_the_pace_of_its_chat(name: str, kind: str, per_second: float) -> None:
    """The service's published rate with a small burst, placeholders and edits counted, from the agent that writes at once."""
    run = await play([(0, TextDelta(ANSWERS[name]))], ctx=telegram(kind), send_until=lambda: 1000.0 + 1795)
    screen = host_model.telegram_stream(run.results)
    assert ink("".join(screen.messages)) == ink(ANSWERS[name])
    assert screen.unfinished == []
    made = calls(run)
    assert busiest(made, 60) <= 5 + 60 * per_second
    assert busiest(made, 1) <= 5 + 1
    assert made[0] == 1000.0
    assert max(later - earlier for earlier, later in itertools.pairwise(run.times)) <= 15.2


@settings(max_examples=200, deadline=None)
@given(_STEPS, st.sampled_from(["person", "group"]), st.floats(0, 200))
def test_any_run_keeps_the_pace_and_loses_nothing(steps: list[Step], kind: str, time_left: float) -> None:
    """Whatever comes when, and however little time is left: what is not in the chat is in the file that the chat names."""
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "REST.md"

    until = 1000.0 + sum(pause for pause, _ in steps) + time_left
    run = asyncio.run(play(steps, ctx=telegram(kind), write_overflow=write, send_until=lambda: until))
    screen = host_model.telegram_stream(run.results)
    assert screen.unfinished == []
    allowance = surface_for("TelegramAdapter", reply_target={"target_type": kind}).allowance
    assert allowance is not None
    made = calls(run)
    forced = 2  # the last message of a run whose time is over
    for first, last in itertools.combinations(range(len(made)), 2):
        most = allowance.burst + allowance.per_second * (made[last] - made[first]) + (forced if last >= len(made) - 2 else 0)
        assert last - first + 1 <= most + 1e-3
    messages = screen.messages
    if files:
        assert "REST.md" in messages[-1]
        messages = [*messages[:-1], files[0]]
    shown = _without_notices(visible("".join(messages)))
    answer = ink(_answer(steps))
    if answer:
        assert ink(shown).removesuffix("Done.") == answer.removesuffix("Done.")


@pytest.mark.asyncio
async def test_when_the_time_is_nearly_over_the_rest_is_in_a_file_that_the_last_message_names() -> None:
    """100,000 characters and 20 seconds: what fits is sent at the chat's pace, then the note, with the failure's text."""
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "REST.md"

    answer = ANSWERS["100000 CJK"]
    error = CodingError("coding.time_limit", seconds="60", field="timeout")
    run = await play([(0, TextDelta(answer))], error=error, ctx=telegram(), write_overflow=write, send_until=lambda: 1020.0)
    screen = host_model.telegram_stream(run.results)
    assert 8 <= len(screen.messages) <= 13
    *whole, last = screen.messages
    assert "REST.md" in last
    assert "Reference: ab12cd" in last
    sent = "".join(whole)
    assert answer == sent + files[0][: len(answer) - len(sent)]
    assert last.startswith(files[0][:1000])
    assert run.now <= 1020.0
    assert busiest(calls(run), 1) <= 6


@pytest.mark.asyncio
async def test_without_a_file_the_last_message_says_that_it_is_not_all() -> None:
    """A remote workspace takes no file: never silently cut."""
    run = await play([(0, TextDelta(ANSWERS["100000 CJK"]))], ctx=telegram(), send_until=lambda: 1020.0)
    last = host_model.telegram_stream(run.results).messages[-1]
    assert "not all of them could be sent" in last


@pytest.mark.asyncio
async def test_beyond_a_number_of_messages_the_rest_is_in_a_file_where_one_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads a thousand messages; where there is no file, everything is sent all the same."""
    monkeypatch.setattr(limits, "MESSAGES_PER_RUN", 10)
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "REST.md"

    answer = ANSWERS["100000 CJK"]
    run = await play([(0, TextDelta(answer))], ctx=telegram(), write_overflow=write)
    assert len(run.messages) == 11
    assert "REST.md" in run.messages[-1]
    assert "".join([*run.messages[:10], *files]) == answer
    run = await play([(0, TextDelta(answer))], ctx=telegram())
    assert "".join(run.messages) == answer


@pytest.mark.asyncio
async def test_a_stop_puts_a_long_backlog_into_the_file_and_sends_a_short_one() -> None:
    """Who says stop wants no three more minutes of messages."""
    for length, stored in ((100_000, True), (12_000, False)):
        files: list[str] = []

        async def write(text: str, files: list[str] = files) -> str:
            files.append(text)
            return "REST.md"

        run = Run(telegram(), write_overflow=write)
        await run.delivery.event(TextDelta("漢" * length))
        await run.delivery.end_turn(TurnEnded("cancelled"))
        assert run.delivery.sending
        await run.delivery.cut_short()
        await run.wait(10.0)
        assert not run.delivery.sending
        await run.delivery.finish()
        assert bool(files) is stored
        assert texts.render("turn.cancelled", "en_US") in "\n".join(run.messages)
        shown = "".join([*run.messages[:-1], *files] if stored else run.messages)
        assert shown.count("漢") == length


@pytest.mark.asyncio
async def test_ticks_send_what_waits_so_that_the_loop_can_listen_meanwhile() -> None:
    """A turn's end does not wait for the chat: :attr:`sending` says when everything is out."""
    run = Run(telegram())
    await run.delivery.event(TextDelta("x" * 40_000))
    before = run.now
    await run.delivery.end_turn(TurnEnded("end_turn"))
    assert run.now == before
    assert run.delivery.sending
    await run.wait(30.0)
    assert not run.delivery.sending
    assert sum(len(message) for message in run.messages) == 40_000


@pytest.mark.asyncio
async def test_no_progress_is_opened_while_messages_wait() -> None:
    """An edit would take the place of a message, and a bubble of its own would end as "Done."."""
    run = Run(telegram())
    await run.delivery.event(TextDelta("x" * 40_000))
    for _ in range(10):
        await run.wait(1.0)
        await run.delivery.event(ThoughtDelta("hm"))
    assert run.deltas == []
    assert run.delivery.sending


@pytest.mark.asyncio
async def test_a_cancelled_drain_stops_at_once() -> None:
    """The host's cancel or a revocation in the middle of it: nothing more is sent, and the voice can be put away."""
    waits = asyncio.Event()

    async def forever(seconds: float) -> None:
        waits.set()
        await asyncio.Event().wait()

    run = Run(telegram(), sleep=forever)
    await run.delivery.event(TextDelta("x" * 40_000))
    task = asyncio.create_task(run.delivery.finish())
    await asyncio.wait_for(waits.wait(), 10)
    count = len(run.results)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await run.delivery.aclose()
    await run.delivery.finish()
    assert len(run.results) == count
    assert not [result for result in run.results if str(result.type).startswith("run.")]


@pytest.mark.asyncio
async def test_two_runs_of_one_chat_have_one_burst() -> None:
    """Two members of a group who ask at the same time."""
    paces = Paces()
    first, second = (Run(telegram("group"), paces=paces, chat="bot group") for _ in range(2))
    for run in (first, second):
        await run.delivery.event(TextDelta("x" * 9_000))
    made = sorted(calls(first) + calls(second))
    assert len(made) <= 5


# ------------------------------------------------------------------ single mode


async def single(answer: str, refusals: int = 0, **options: Any) -> tuple[Run, list[str], list[float]]:
    """A whole run in single mode: the run, what went ahead, and when."""
    ahead: list[str] = []
    times: list[float] = []
    run = Run(telegram(), reply_mode="single", detached_send=lambda text: send(text), **options)
    left = [refusals]

    async def send(text: str) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("Flood control exceeded. Retry in 9 seconds")
        ahead.append(text)
        times.append(run.now)

    await run.delivery.event(TextDelta(answer))
    await run.delivery.end_turn(TurnEnded("end_turn"))
    await run.delivery.finish()
    return run, ahead, times


@pytest.mark.asyncio
async def test_what_goes_ahead_keeps_the_pace_too() -> None:
    """A pipeline that does not stream: one call for each message, the last one among them."""
    run, ahead, times = await single(ANSWERS["1 MB"])
    assert ink("".join([*ahead, *run.messages])) == ink(ANSWERS["1 MB"])
    assert len(run.messages) == 1
    made = [*times, run.times[run.results.index(run.of("message.completed")[0])]]
    assert busiest(made, 60) <= 65
    assert made[-1] - made[0] <= len(made)


@pytest.mark.asyncio
async def test_a_message_ahead_that_came_too_fast_is_sent_again() -> None:
    """After the pause the service names; nothing is missing, doubled or out of order."""
    run, ahead, times = await single(ANSWERS["5000 ascii"], refusals=2)
    assert ink("".join([*ahead, *run.messages])) == ink(ANSWERS["5000 ascii"])
    assert times[0] >= 1018.0


@pytest.mark.asyncio
async def test_what_time_does_not_let_go_ahead_is_in_the_file() -> None:
    """The last message, the only one of the run itself, names it."""
    files: list[str] = []

    async def write(text: str) -> str:
        files.append(text)
        return "REST.md"

    answer = ANSWERS["100000 CJK"]
    run, ahead, _ = await single(answer, write_overflow=write, send_until=lambda: 1010.0)
    (last,) = run.messages
    assert "REST.md" in last
    assert 5 <= len(ahead) <= 15
    assert "".join(ahead) + files[0] == answer
