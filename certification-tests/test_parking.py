"""Turns that wait for a person, against a scripted driver (local protocol fixture): asked, parked, answered, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pkg import asking as questions
from pkg import installations, limits, texts
from pkg.agent_api import (
    AgentError,
    Answer,
    ApprovalRequested,
    Choice,
    Notice,
    Prompt,
    QuestionAsked,
    QuestionField,
    SessionCapabilities,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
)
from pkg.parking import ParkedTurn
from testkit.host_actions import message
from testkit.run_harness import Harness, Outcome, harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession

CHOICES = (
    Choice("yes", "Allow", "allow_once"),
    Choice("always", "Always", "allow_always"),
    Choice("no", "Deny", "reject_once"),
)
BUTTONS = {
    "field_types": ["select"],
    "action_styles": ["default", "primary", "danger"],
    "supports_updates": True,
    "max_fields": 1,
}
BOUND = 20.0


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def wish(name: str = "a1", command: str = "make install", **more: Any) -> ApprovalRequested:
    return ApprovalRequested(name, command, "execute", CHOICES, command=command, cwd="/w", reason="it is needed", **more)


async def asks(session: ScriptedSession, prompt: Prompt) -> str | None:
    """Ask once, say what was answered, end."""
    session.emit(TextDelta("before. "))
    answer = await session.ask(wish())
    session.emit(TextDelta(f"answered {answer.choice_id or 'cancelled'} {answer.message}".strip(), message_id="m2"))
    return None


def asking(*events: Any) -> ScriptedDriver:
    """A driver whose agent asks all of it, one after the other, in each turn, and says the answers."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        for number, event in enumerate(events):
            answer = await session.ask(type(event)(**{**_fields(event), "request_id": f"{len(session.prompts)}-{number}"}))
            session.emit(TextDelta(f"[{answer.choice_id or dict(answer.values) or 'cancelled'}]"))
        return None

    return ScriptedDriver(script)


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


def delivery(**more: Any) -> dict[str, Any]:
    return {
        "surface": "platform",
        "automatic_reply": True,
        "supports_streaming": True,
        "platform_capabilities": {"adapter": "TelegramAdapter"},
        "interactions": BUTTONS,
        **more,
    }


def requested(done: Outcome) -> dict[str, Any]:
    """The one request that the host was told to show."""
    found = [each.data for each in done.results if each.type == "action.requested"]
    assert len(found) == 1
    assert found[0]["action"] == "interaction.requested"
    payload: dict[str, Any] = found[0]["payload"]
    return payload


async def press(h: Harness, shown: dict[str, Any], number: int, *, actor: str = "7", **more: Any) -> Outcome:
    """Press the numbered button of what was shown."""
    pressed = {"interaction_id": shown["interaction_id"], "action_id": shown["actions"][number - 1]["id"], "values": {}}
    return await h.run(
        "submitted",
        event="interaction.submitted",
        input={"text": "submitted", "interaction": pressed},
        actor=actor,
        run_id=f"press-{actor}-{number}-{shown['interaction_id']}",
        **more,
    )


async def written_at_once(h: Harness, *written: dict[str, Any], **more: Any) -> Outcome:
    """A run that asks, with messages that the host gets as soon as the (first) request is shown."""
    results: list[Any] = []
    left = list(written)
    async for result in h.runner.invoke(h.context("go", run_id="r1", **more)):
        results.append(result)
        if result.type == "action.requested" or (result.type == "message.completed" and "4. " in str(result.data)):
            h.host.steering.extend(left)
            left.clear()
    return Outcome(results)


def parked() -> list[ParkedTurn]:
    return list(installations.installation(None).parked._turns.values())


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not true():  # noqa: ASYNC110 - a registry has no event
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------ asked and answered


@pytest.mark.asyncio
async def test_a_request_ends_its_run_and_the_typed_answer_continues_the_same_turn(tmp_path: Path) -> None:
    """Our rule: what will run, where and why is shown; the answer lands in the living turn."""
    async with harness(tmp_path, ScriptedDriver(asks), approval_policy="ask") as h:
        first = await h.run("go", run_id="r1")
        assert first.reason == "stop"
        for shown in ("make install", "it is needed", "1", "2", "3", "4"):
            assert shown in first.text
        assert len(parked()) == 1
        second = await h.run("1", run_id="r2")
        assert "answered yes" in second.text
        assert [len(each.prompts) for each in h.driver.sessions] == [1]
        assert not parked()


@pytest.mark.asyncio
async def test_a_tool_call_that_begins_before_the_request_ends_in_the_ledger_of_the_answer(tmp_path: Path) -> None:
    """Our rule: a recorded start always gets its end, in whichever run of the turn that is."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(ToolStarted("t1", "make install"))
        await session.ask(wish())
        session.emit(ToolFinished("t1", "completed", output="installed"))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        first = await h.run("go", run_id="r1")
        assert [each.type for each in first.results if each.type.startswith("tool.")] == ["tool.call.started"]
        second = await h.run("1", run_id="r2")
        (ended,) = [each.data for each in second.results if each.type.startswith("tool.")]
        assert (ended["tool_call_id"], ended["tool_name"], ended["error"]) == ("t1", "make install", None)
        assert ended["result"]["output"] == "installed"


@pytest.mark.asyncio
@pytest.mark.parametrize("words", ["allow", "ALLOW", "yes", "1.", "允许", "разрешить"])
async def test_words_and_numbers_allow_once(tmp_path: Path, words: str) -> None:
    """Our rule: numbers, words and labels in the languages of the form."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        assert "answered yes" in (await h.run(words, run_id="r2")).text


@pytest.mark.asyncio
async def test_a_button_continues_the_same_turn_and_answers_once(tmp_path: Path) -> None:
    """Host rule: a press is a run of its own; the second one finds nothing."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        first = await h.run("go", run_id="r1", delivery=delivery())
        shown = requested(first)
        assert "make install" in shown["title"] + shown["description"]
        assert len(shown["actions"]) == 4
        done = await press(h, shown, 1, delivery=delivery())
        assert "answered yes" in done.text
        again = await press(h, shown, 3, delivery=delivery())
        assert "no longer open" in again.text
        assert [each.answers for each in h.driver.sessions] == [{"a1": Answer("yes")}]


@pytest.mark.asyncio
@pytest.mark.parametrize("capable", [True, False])
async def test_the_reason_of_a_denial_reaches_the_agent(tmp_path: Path, capable: bool) -> None:
    """Our rule: with the answer where the agent can take it there, else as the next message."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.capabilities = SessionCapabilities(denial_reason=capable)
        if len(session.prompts) > 1:
            session.emit(TextDelta(f"then: {prompt.text}"))
            return None
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        done = await h.run("deny because it is Friday", run_id="r2")
        session = h.driver.sessions[0]
        assert session.answers["a1"].choice_id == "no"
        if capable:
            assert session.answers["a1"].message == "it is Friday"
        else:
            assert "then: it is Friday" in done.text


@pytest.mark.asyncio
async def test_deny_and_say_why_asks_for_the_reason(tmp_path: Path) -> None:
    """Our rule: the next message is the reason; what was shown before answers nothing any more."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.capabilities = SessionCapabilities(denial_reason=True)
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        await press(h, shown, 4, delivery=delivery())
        assert len(parked()) == 1
        stale = await press(h, shown, 1, delivery=delivery())
        assert "no longer open" in stale.text
        done = await h.run("because of the moon", run_id="r2", delivery=delivery())
        assert "answered no" in done.text
        assert "of the moon" in h.driver.sessions[0].answers["a1"].message


@pytest.mark.asyncio
async def test_other_words_never_pass_an_open_request(tmp_path: Path) -> None:
    """Our rule: they are answered with what is waited for, and reach no agent."""
    async with harness(tmp_path, ScriptedDriver(asks, steerable=True)) as h:
        await h.run("go", run_id="r1")
        done = await h.run("and also clean up", run_id="r2")
        assert "make install" in done.text
        session = h.driver.sessions[0]
        assert (session.steered, len(session.prompts), session.answers) == ([], 1, {})
        assert "answered yes" in (await h.run("1", run_id="r3")).text


@pytest.mark.asyncio
async def test_further_requests_are_asked_one_after_the_other(tmp_path: Path) -> None:
    """Our rule: one request at a time, each with its own answer."""
    async with harness(tmp_path, asking(wish(command="one"), wish(command="two"))) as h:
        assert "one" in (await h.run("go", run_id="r1")).text
        second = await h.run("1", run_id="r2")
        assert "two" in second.text
        third = await h.run("3", run_id="r3")
        assert "[no]" in third.text
        assert [each.choice_id for each in h.driver.sessions[0].answers.values()] == ["yes", "no"]


@pytest.mark.asyncio
async def test_allowed_for_the_session_means_exactly_that_again(tmp_path: Path) -> None:
    """Our rule: the same command in the same directory, and nothing else; another actor is asked anew."""
    async with harness(tmp_path, asking(wish(command="one"), wish(command="one"), wish(command="one --force"))) as h:
        await h.run("go", run_id="r1")
        second = await h.run("2", run_id="r2")
        assert "one --force" in second.text
        assert [each.choice_id for each in h.driver.sessions[0].answers.values()] == ["yes", "yes"]
        await h.run("3", run_id="r3")
        again = await h.run("go again", run_id="r4")
        assert "one --force" in again.text
        other = await h.run("go", run_id="r5", actor="8")
        assert "one" in other.text
        assert not h.driver.sessions[1].answers


@pytest.mark.asyncio
async def test_a_question_is_answered_in_the_chat(tmp_path: Path) -> None:
    """Our rule: an option by its number, a text as it is."""
    fields = (
        QuestionField("color", "Color", "select", required=True, options=(("r", "Red"), ("g", "Green"))),
        QuestionField("name", "Name", "text", required=True),
    )
    async with harness(tmp_path, asking(QuestionAsked("q", "Which one?", fields))) as h:
        first = await h.run("go", run_id="r1")
        assert "Green" in first.text
        second = await h.run("2", run_id="r2")
        assert "Name" in second.text
        done = await h.run("1", run_id="r3")
        assert "[{'color': 'g', 'name': '1'}]" in done.text


FIELDS = (
    QuestionField("color", "Color", "select", required=True, options=(("r", "Red"), ("g", "Green"))),
    QuestionField("size", "Size", "number", required=True),
    QuestionField("name", "Name", "text"),
)
FORMS = {**BUTTONS, "field_types": ["text", "number", "select"], "max_fields": None}


async def send(h: Harness, shown: dict[str, Any], values: dict[str, Any], **more: Any) -> Outcome:
    """Send a form that was shown."""
    sent = {"interaction_id": shown["interaction_id"], "action_id": None, "values": values}
    return await h.run(
        "submitted",
        event="interaction.submitted",
        input={"text": "submitted", "interaction": sent},
        run_id=f"send-{shown['interaction_id']}",
        **more,
    )


@pytest.mark.asyncio
async def test_a_question_is_one_form_where_the_surface_has_forms(tmp_path: Path) -> None:
    """Our rule: what is wrong is told and the form shown again, as the host takes one submission; then the turn goes on."""
    forms = delivery(interactions=FORMS)
    async with harness(tmp_path, asking(QuestionAsked("q", "Which one?", FIELDS))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=forms))
        assert (shown["kind"], shown["actions"]) == ("form", [])
        assert [field["id"] for field in shown["fields"]] == ["color", "size", "name"]
        wrong = await send(h, shown, {"color": "g", "size": "big"}, delivery=forms)
        assert "A number is needed here: Size" in wrong.text
        again = requested(wrong)
        assert again["interaction_id"] != shown["interaction_id"]
        assert [field["default"] for field in again["fields"]] == ["g", None, None]
        assert "no longer open" in (await send(h, shown, {"color": "g", "size": 3}, delivery=forms)).text
        assert not h.driver.sessions[0].answers
        done = await send(h, again, {"color": "g", "size": 3}, delivery=forms)
        assert "[{'color': 'g', 'size': 3}]" in done.text
        assert [len(each.prompts) for each in h.driver.sessions] == [1]


@pytest.mark.asyncio
async def test_an_open_form_is_answered_by_writing_and_by_what_is_left_of_it(tmp_path: Path) -> None:
    """Our rule: numbers and words field by field; the form that was shown before answers nothing any more."""
    forms = delivery(interactions=FORMS)
    async with harness(tmp_path, asking(QuestionAsked("q", "Which one?", FIELDS))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=forms))
        rest = requested(await h.run("2", run_id="r2", delivery=forms))
        assert [field["id"] for field in rest["fields"]] == ["size", "name"]
        assert "no longer open" in (await send(h, shown, {"color": "r", "size": 1}, delivery=forms)).text
        done = await send(h, rest, {"size": 3, "name": "x"}, delivery=forms)
        assert "[{'color': 'g', 'size': 3, 'name': 'x'}]" in done.text


@pytest.mark.asyncio
async def test_another_member_s_form_changes_nothing(tmp_path: Path) -> None:
    """Our rule: only the requester answers, with values as with buttons."""
    forms = delivery(interactions=FORMS)
    async with harness(tmp_path, asking(QuestionAsked("q", "Which one?", FIELDS))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=forms, conversation="group_1"))
        refused = await send(h, shown, {"color": "g", "size": 3}, actor="8", delivery=forms, conversation="group_1")
        assert "Only the person who asked" in refused.text
        assert parked()[0].interaction_id == shown["interaction_id"]
        assert not h.driver.sessions[0].answers


@pytest.mark.asyncio
async def test_steps_answered_before_the_run_has_ended_are_requests_of_their_own(tmp_path: Path) -> None:
    """The host takes an id once in a run (LangBot 4.11.2), and the last one shown is the one that answers."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        answer = await session.ask(QuestionAsked("q", "Which one?", (FIELDS[0], QuestionField("sure", "Sure?", "boolean"))))
        session.emit(TextDelta(f"[{dict(answer.values)}]"))
        return None

    async with harness(tmp_path, ScriptedDriver(script, steerable=True)) as h:
        done = await written_at_once(h, message("2"), delivery=delivery())
        first, second = [each.data["payload"] for each in done.results if each.type == "action.requested"]
        assert first["interaction_id"] != second["interaction_id"]
        assert "no longer open" in (await press(h, first, 1, delivery=delivery())).text
        assert "[{'color': 'g', 'sure': True}]" in (await press(h, second, 1, delivery=delivery())).text


@pytest.mark.asyncio
async def test_an_answer_typed_before_the_run_has_ended_counts(tmp_path: Path) -> None:
    """Host rule: a message during a run comes as steering; it is the answer then, and the same run goes on."""

    async with harness(tmp_path, ScriptedDriver(asks, steerable=True)) as h:
        done = await written_at_once(h, message("1"))
        assert "answered yes" in done.text
        assert not h.driver.sessions[0].steered


@pytest.mark.asyncio
async def test_messages_from_before_the_request_wait_for_their_turn(tmp_path: Path) -> None:
    """Our rule: nothing is lost and nothing passes the request."""
    ready = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) > 1:
            session.emit(TextDelta(f"later: {prompt.text}"))
            return None
        await ready.wait()
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("go", run_id="r1")
        await until(lambda: h.driver.sessions)
        h.host.steering.append(message("and then this"))
        h.host.pulled.clear()
        await until(lambda: not h.host.steering and h.host.pulled.is_set())
        await asyncio.sleep(2 * limits.LOOP_TICK)
        ready.set()
        await run
        done = await h.run("1", run_id="r2")
        assert "answered yes" in done.text
        assert "later: and then this" in done.text


@pytest.mark.asyncio
async def test_in_one_message_the_request_is_at_its_end(tmp_path: Path) -> None:
    """Host rule: where nothing is streamed only the last message is sent, so it holds the text and the request."""
    async with harness(tmp_path, ScriptedDriver(asks), reply_mode="single") as h:
        first = await h.run("go", run_id="r1")
        assert len(first.shown) == 1
        assert first.text.index("before.") < first.text.index("make install")
        assert "answered yes" in (await h.run("1", run_id="r2")).text


@pytest.mark.asyncio
async def test_a_parked_turn_is_taken_back_once(tmp_path: Path) -> None:
    """Our rule: by one run; whoever comes later, or after its end, finds nothing."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        (turn,) = parked()
        turns = installations.installation(None).parked
        assert [turns.take(turn), turns.take(turn), turns.stop(turn)] == [True, False, False]
        await turn.carried.cancel_parked(revoked=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("buttons", [True, False])
async def test_two_answers_at_once_are_one(tmp_path: Path, buttons: bool) -> None:
    """Our rule: the second finds nothing, also not what the host's state still says of the request."""
    more: dict[str, Any] = {"delivery": delivery()} if buttons else {}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        first = await h.run("go", run_id="r1", **more)
        both = (
            [press(h, requested(first), number, **more) for number in (1, 2)]
            if buttons
            else [h.run("1", run_id=name) for name in ("r2", "r3")]
        )
        texts = sorted([done.text for done in await asyncio.gather(*both)], key=lambda text: "answered yes" in text)
        assert "no longer open" in texts[0]
        assert "answered yes" in texts[1]
        assert [len(each.prompts) for each in h.driver.sessions] == [1]


@pytest.mark.asyncio
async def test_a_press_while_the_run_still_ends_is_the_answer(tmp_path: Path) -> None:
    """Host rule: a press is a run of its own at any moment; whoever is that quick continues the same turn, too."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        stream = h.runner.invoke(h.context("go", run_id="r1", delivery=delivery()))
        results = []
        async for result in stream:
            results.append(result)
            if result.type == "action.requested":
                break
        pressing = asyncio.ensure_future(press(h, requested(Outcome(results)), 1, delivery=delivery()))
        results += [result async for result in stream]
        assert Outcome(results).reason == "stop"
        assert "answered yes" in (await pressing).text
        assert [len(each.prompts) for each in h.driver.sessions] == [1]


# ------------------------------------------------------------------ who may answer


@pytest.mark.asyncio
async def test_another_member_changes_nothing(tmp_path: Path) -> None:
    """Our rule: a member's "1" is a message of their own, a press of theirs is refused."""
    group: dict[str, Any] = {"conversation": "group_1"}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery(), **group))
        await h.run("1", run_id="r2", actor="8", **group)
        assert h.driver.sessions[1].prompts[0].text == "1"
        refused = await press(h, shown, 1, actor="8", delivery=delivery(), **group)
        assert "Only the person who asked" in refused.text
        assert not h.driver.sessions[0].answers
        assert "answered yes" in (await press(h, shown, 1, delivery=delivery(), **group)).text


@pytest.mark.asyncio
async def test_an_approver_answers_for_the_requester(tmp_path: Path) -> None:
    """Our rule: by a number or a button; what is no answer is no message of the turn."""
    group: dict[str, Any] = {"conversation": "group_1", "config": {"approvers": ["9"], "allowed-actors": ["7"]}}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1", **group)
        other = await h.run("how are you?", run_id="r2", actor="9", **group)
        assert "allowed-actors" in other.text
        done = await h.run("1", run_id="r3", actor="9", **group)
        assert "answered yes" in done.text
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
async def test_in_a_shared_session_only_the_requester_answers(tmp_path: Path) -> None:
    """Our rule: sharing the session shares no right to allow."""
    group: dict[str, Any] = {"conversation": "group_1", "config": {"share-session": "conversation"}}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1", **group)
        other = await h.run("1", run_id="r2", actor="8", **group)
        assert "waiting for an answer" in other.text
        assert not h.driver.sessions[0].answers
        assert "answered yes" in (await h.run("1", run_id="r3", **group)).text


# ------------------------------------------------------------------ every end


@pytest.mark.asyncio
async def test_on_its_deadline_the_turn_is_cancelled_and_the_next_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: cancelled, not merely denied; the session goes on with the next message."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        (turn,) = parked()
        turn.until = 0.0
        turn.held.channel.wake()
        session = h.driver.sessions[0]
        await until(lambda: session.interrupts)
        await until(lambda: not parked())
        assert not session.answers
        h.driver.script = lambda session, prompt: _say(session, f"echo {prompt.text}")
        late = await h.run("hello", run_id="r2")
        assert "Nobody answered in time" in late.shown[0]
        assert "echo hello" in late.text
        assert len(h.driver.sessions) == 1


async def _say(session: ScriptedSession, text: str) -> str | None:
    session.emit(TextDelta(text))
    return None


@pytest.mark.asyncio
async def test_a_press_after_the_deadline_is_told_so(tmp_path: Path) -> None:
    """Our rule: late is over, and nothing is done."""
    async with harness(tmp_path, ScriptedDriver(asks), approval_timeout=30) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        (turn,) = parked()
        turn.until = 0.0
        turn.held.channel.wake()
        await until(lambda: h.driver.sessions[0].interrupts)
        late = await press(h, shown, 1, delivery=delivery())
        assert "no longer open" in late.text
        assert not h.driver.sessions[0].answers
        assert len(h.driver.sessions[0].prompts) == 1


@pytest.mark.asyncio
async def test_stop_cancels_a_parked_turn(tmp_path: Path) -> None:
    """Our rule: whoever may answer may stop it."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1", conversation="group_1")
        stranger = await h.run("/stop", run_id="r2", actor="8", conversation="group_1")
        assert parked()
        assert not h.driver.sessions[0].interrupts
        assert stranger.text
        await h.run("/stop", run_id="r3", conversation="group_1")
        await until(lambda: h.driver.sessions[0].interrupts)
        assert not parked()
        session = h.driver.sessions[0]
        h.driver.script = lambda session, prompt: _say(session, f"heard {prompt.text}")
        late = await h.run("1", run_id="r4", conversation="group_1")
        assert late.text.endswith("heard 1")
        assert not session.answers


@pytest.mark.asyncio
@pytest.mark.parametrize("restarted", [False, True])
async def test_what_was_stopped_is_never_allowed_afterwards(tmp_path: Path, restarted: bool) -> None:
    """Our rule: not by the button that still stands there, and not after a restart."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        await h.run("/stop", run_id="r2", delivery=delivery())
        await until(lambda: h.driver.sessions[0].interrupts)
        if not restarted:
            assert "no longer open" in (await press(h, shown, 1, delivery=delivery())).text
            assert len(h.driver.sessions[0].prompts) == 1
    if restarted:
        async with harness(tmp_path, ScriptedDriver(asks)) as again:
            again.host.state = h.host.state
            assert "no longer open" in (await press(again, shown, 1, delivery=delivery())).text
            assert not again.driver.sessions


@pytest.mark.asyncio
async def test_what_was_not_needed_any_more_is_not_allowed_later(tmp_path: Path) -> None:
    """Our rule: the agent went on without it, so that a late answer would start something else."""
    ready = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(wish())
        await ready.wait()
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        ready.set()
        await until(lambda: not parked()[0].held.turn_open)
        (turn,) = parked()
        turn.until = 0.0
        turn.held.channel.wake()
        await until(lambda: not parked())
        assert "no longer open" in (await press(h, shown, 1, delivery=delivery())).text
        assert len(h.driver.sessions[0].prompts) == 1


@pytest.mark.asyncio
async def test_revocation_ends_a_parked_turn(tmp_path: Path) -> None:
    """Our rule: nothing of an installation outlives it."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        await installations.revoke(None)
        assert h.driver.sessions[0].closed.is_set()
        assert not h.driver.sessions[0].answers


ENDS: list[TurnEnded | None] = [TurnEnded("error", AgentError("coding.agent_died")), TurnEnded("cancelled"), None]
"""How a turn ends whose agent dies or is closed elsewhere; the last, which is no end, is none that a driver may give."""


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ENDS)
async def test_an_agent_that_ends_while_it_waits_is_told_of(tmp_path: Path, end: TurnEnded | None) -> None:
    """Our rule: at once where there is a way, else by the next run; its session is released."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        if end is not None:
            h.driver.sessions[0].emit(end)
        h.driver.sessions[0].die()
        await until(lambda: not parked())
        done = await h.run("hello", run_id="r2")
        assert "ended while it was waiting" in done.shown[0]
        assert h.driver.sessions[0].closed.is_set()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ENDS)
async def test_the_answer_to_an_agent_that_ended_meanwhile_resumes_its_session(tmp_path: Path, end: TurnEnded | None) -> None:
    """Our rule: as after a restart of the worker, exactly the action that was shown is allowed once."""
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        first = h.driver.sessions[0]
        if end is not None:
            first.emit(end)
        first.die()
        await until(lambda: not parked())
        await press(h, shown, 1, delivery=delivery())
        second = h.driver.sessions[1]
        assert second.spec.resume_session_id == first.session_id
        assert [each.choice_id for each in second.answers.values()] == ["yes"]
        assert "no longer open" in (await press(h, shown, 1, delivery=delivery())).text


@pytest.mark.asyncio
async def test_a_turn_that_ends_without_its_answer_is_delivered(tmp_path: Path) -> None:
    """Our rule: what the agent said meanwhile is not lost."""
    event = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(wish())
        await event.wait()
        session.emit(TextDelta("I found another way."))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        event.set()
        await until(lambda: not parked()[0].held.turn_open)
        done = await h.run("1", run_id="r2")
        assert "I found another way." in done.text
        assert "no longer waits" in done.text
        assert not h.driver.sessions[0].interrupts
        assert not h.driver.sessions[0].answers


@pytest.mark.asyncio
async def test_a_request_that_the_agent_takes_back_lets_the_next_message_in(tmp_path: Path) -> None:
    """Our rule: the turn that works on unheard is heard again by the next message, which has its own turn behind it."""
    back, go_on = asyncio.Event(), asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) > 1:
            return await _say(session, f"then {prompt.text}")
        session.emit(wish())
        await back.wait()
        session.emit(Notice("agent.request_withdrawn", "a1"))
        await go_on.wait()
        session.emit(TextDelta("Done without it."))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        back.set()
        await until(lambda: parked()[0].withdrawn)
        run = h.start("what now?", run_id="r2")
        await until(lambda: not parked())
        go_on.set()
        done = await run
        assert done.text.index("Done without it.") < done.text.index("then what now?")
        assert not h.driver.sessions[0].interrupts


@pytest.mark.asyncio
async def test_more_than_a_buffer_leaves_a_gap_and_keeps_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: 1 MiB of text is kept, then one typed gap; requests and the end are always kept."""
    monkeypatch.setattr(limits, "PARKED_EVENT_BYTES", 5000)

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        first = asyncio.ensure_future(session.ask(wish("a1", "one")))
        await asyncio.sleep(0)
        for _ in range(200):
            session.emit(TextDelta("x" * 100))
        second = asyncio.ensure_future(session.ask(wish("a2", "two")))
        await asyncio.wait({first, second})
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        await until(lambda: any(isinstance(each, ApprovalRequested) for each in parked()[0].held.early))
        done = await h.run("1", run_id="r2")
        assert "left out" in done.text
        assert "two" in done.text
        assert done.text.count("x") < 6000
        await h.run("1", run_id="r3")
        assert set(h.driver.sessions[0].answers) == {"a1", "a2"}


@pytest.mark.asyncio
async def test_a_parked_turn_is_pushed_out_by_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: another conversation's traffic and a full pool leave it alone."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        h.driver.script = lambda session, prompt: _say(session, "hi")
        for number in range(limits.WARM_SESSIONS + 3):
            await h.run("hello", run_id=f"o{number}", conversation=f"person_{number + 100}")
        assert "answered yes" in (await h.run("1", run_id="r2")).text


@pytest.mark.asyncio
async def test_where_no_turn_can_be_parked_the_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: what cannot be asked is denied in words, never allowed and never left waiting."""
    monkeypatch.setattr(installations.installation(None).parked, "_capacity", 0)
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        done = await h.run("go", run_id="r1")
        assert "answered no" in done.text


# ------------------------------------------------------------------ when the process is gone


@pytest.mark.asyncio
async def test_after_a_restart_the_answer_allows_exactly_that_action_once(tmp_path: Path) -> None:
    """Our rule: the session is resumed with a grant for the one action that was shown, used up by it."""
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
    async with harness(tmp_path, asking(wish(command="two"), wish(command="one"), wish(command="one"))) as again:
        again.host.state = h.host.state
        done = await press(again, shown, 1, delivery=delivery())
        session = again.driver.sessions[0]
        assert session.spec.resume_session_id == h.driver.sessions[0].session_id
        assert "two" in str(requested(done))
        assert not session.answers
        second = await again.run("3", run_id="r2", delivery=delivery())
        assert [each.choice_id for each in session.answers.values()] == ["no", "yes"]
        assert requested(second)


@pytest.mark.asyncio
async def test_after_a_restart_an_expired_request_is_over(tmp_path: Path) -> None:
    """Our rule: the stored record says until when an answer counts."""
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
    for key, value in h.host.state.items():
        if shown["interaction_id"] in str(value):
            h.host.state[key] = {"value": value["value"].replace(str(shown["expires_at"]), "1")}
    async with harness(tmp_path, asking(wish(command="one"))) as again:
        again.host.state = h.host.state
        assert "no longer open" in (await press(again, shown, 1, delivery=delivery())).text
        assert not again.driver.sessions


@pytest.mark.asyncio
async def test_after_a_restart_a_stranger_s_press_is_over(tmp_path: Path) -> None:
    """Our rule: the stored record names who may answer."""
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery(), config={"share-session": "conversation"}))
    async with harness(tmp_path, asking(wish(command="one"))) as again:
        again.host.state = h.host.state
        done = await press(again, shown, 1, actor="8", delivery=delivery(), config={"share-session": "conversation"})
        assert "no longer open" in done.text
        assert not again.driver.sessions


@pytest.mark.asyncio
async def test_after_a_restart_a_session_of_all_has_still_one_who_may_answer(tmp_path: Path) -> None:
    """Our rule: where the whole group is the actor, a stranger's "1" is a message, and the requester's is the answer."""
    group: dict[str, Any] = {"conversation": "group_1", "config": {"user-id-source": "legacy-session"}}
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        await h.run("go", run_id="r1", **group)
    for actor, first in (("8", "1"), ("7", asking_again())):
        async with harness(tmp_path, asking(wish(command="one"))) as again:
            again.host.state = dict(h.host.state)
            await again.run("1", run_id=f"r-{actor}", actor=actor, **group)
            session = again.driver.sessions[0]
            assert session.prompts[0].text == first
            assert bool(session.answers) == (actor == "7")


def asking_again() -> str:
    """What the agent is told when it may do what it asked for."""
    return questions._ALLOWED_LATE


@pytest.mark.asyncio
async def test_the_next_step_keeps_the_language_of_the_request(tmp_path: Path) -> None:
    """Host rule: a press has no words of its own ("submitted"), so it says nothing of the person's language."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("请安装它", run_id="r1", delivery=delivery()))
        why = requested(await press(h, shown, 4, delivery=delivery()))
        assert why["title"] == texts.render("interaction.ask_reason", "zh_Hans")


@pytest.mark.asyncio
async def test_after_a_restart_a_typed_denial_is_passed_on(tmp_path: Path) -> None:
    """Our rule: a text that looks like an answer finds the open record; any other is a message."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(f"heard: {prompt.text}"))
        return None

    async with harness(tmp_path, asking(wish(command="one"))) as h:
        await h.run("go", run_id="r1")
    async with harness(tmp_path, ScriptedDriver(script)) as again:
        again.host.state = h.host.state
        done = await again.run("deny because it is late", run_id="r2")
        assert "not allowed" in done.text
        assert "it is late" in done.text
        other = await again.run("1", run_id="r3")
        assert "heard: 1" in other.text


@pytest.mark.asyncio
async def test_after_a_restart_a_sent_form_is_the_next_message(tmp_path: Path) -> None:
    """Our rule: its values by their names; a press that only the lost process could read is over."""
    forms = delivery(interactions=FORMS)

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(f"heard: {prompt.text}"))
        return None

    async with harness(tmp_path, asking(QuestionAsked("q", "Which one?", FIELDS))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=forms))
    async with harness(tmp_path, ScriptedDriver(script)) as again:
        again.host.state = h.host.state
        over = await press(again, {**shown, "actions": [{"id": "field_1_1"}]}, 1, delivery=forms)
        assert "no longer open" in over.text
        done = await send(again, shown, {"color": "g", "size": 3}, delivery=forms)
        assert "heard: color: g\nsize: 3" in done.text


@pytest.mark.asyncio
async def test_a_run_that_waits_for_a_turn_that_asks_gives_way(tmp_path: Path) -> None:
    """Our rule: it can't be served before the answer, so it says so instead of waiting until its time is over."""
    go = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        await go.wait()
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        first = h.start("go", run_id="r1")
        await until(lambda: h.driver.sessions and h.driver.sessions[0].prompts)
        second = h.start("me too", run_id="r2")
        await until(lambda: len(installations.installation(None).runs) == 2)
        go.set()
        assert (await first).reason == "stop"
        assert "Answer it first" in (await second).text
        assert "answered yes" in (await h.run("1", run_id="r3")).text


@pytest.mark.asyncio
async def test_an_answer_whose_run_is_cancelled_at_once_leaves_no_turn_behind(tmp_path: Path) -> None:
    """Our rule: from its answer on the run owns the turn; ended anywhere, it cancels it and the next message has a session."""
    for steps in range(0, 60, 3):
        async with harness(tmp_path, ScriptedDriver(asks)) as h:
            await h.run("go", run_id="r1")
            run = h.start("1", run_id="r2")
            for _ in range(steps):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait({run})
            h.driver.script = lambda session, prompt: _say(session, f"echo {prompt.text}")
            async with asyncio.timeout(BOUND):
                if parked():
                    assert "answered yes" in (await h.run("1", run_id="r3")).text
                else:
                    assert "echo hello" in (await h.run("hello", run_id="r3")).text
