"""What must not be able to turn an approval into another one: people, races, ends and restarts, and agents that lie.

Against a scripted driver (local protocol fixture), as :mod:`test_parking`, which shows what is meant to work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_parking import BOUND, CHOICES, asking, asks, delivery, parked, press, requested, until, wish, written_at_once

from pkg import asking as questions
from pkg import installations, limits, run_loop
from pkg.agent_api import (
    Answer,
    ApprovalRequested,
    Choice,
    FileDiff,
    Notice,
    Prompt,
    QuestionAsked,
    QuestionField,
    TextDelta,
)
from pkg.approval_policy import grant
from pkg.identity import Actor
from pkg.interactions import Decided, OpenRequest, digest
from pkg.parking import Outcome as Became
from pkg.session_grants import SessionGrants, placed
from testkit.host_actions import message
from testkit.run_harness import Harness, Outcome, harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# ------------------------------------------------------------------ after a restart a number means what was shown

LARGE = "echo " + "x" * (limits.INTERACTION_DESCRIPTION_CHARS + 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("event", "number"),
    [
        (wish(command=LARGE), "1"),
        (wish(complete=False), "1"),
        (wish(complete=False), "2"),
        (ApprovalRequested("m", "leave plan mode", "mode", CHOICES), "2"),
    ],
)
async def test_after_a_restart_a_number_that_denied_does_not_allow(
    tmp_path: Path, event: ApprovalRequested, number: str
) -> None:
    """Our rule: where the first or second number was "deny" it still is, when only the host's state knows of the request."""
    async with harness(tmp_path, asking(event)) as h:
        await h.run("go", run_id="r1")
    async with harness(tmp_path, asking(event)) as again:
        again.host.state = h.host.state
        await again.run(number, run_id="r2")
        session = again.driver.sessions[0]
        assert session.prompts[0].text.startswith(questions._DENIED_LATE)
        assert not session.answers


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", ["yes", "1", "deny because of that"])
async def test_after_a_restart_the_reason_of_a_denial_does_not_allow(tmp_path: Path, answer: str) -> None:
    """Our rule: whoever has chosen to deny has denied, whatever word the reason is."""
    async with harness(tmp_path, asking(wish())) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        await press(h, shown, 4, delivery=delivery())
    async with harness(tmp_path, asking(wish())) as again:
        again.host.state = h.host.state
        await again.run(answer, run_id="r2")
        session = again.driver.sessions[0]
        assert session.prompts[0].text.startswith(questions._DENIED_LATE)
        assert not session.answers


# ------------------------------------------------------------------ a grant for once is for its turn and its place


async def _asked(tmp_path: Path) -> tuple[Harness, Any]:
    """A worker that ended while "one" was asked about."""
    async with harness(tmp_path, asking(wish(command="one"))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
    return h, shown


@pytest.mark.asyncio
async def test_a_grant_for_once_ends_with_a_turn_that_expires(tmp_path: Path) -> None:
    """Our rule: what was allowed for a turn is not allowed in the next one, however the turn ended."""
    h, shown = await _asked(tmp_path)
    async with harness(tmp_path, asking(wish(command="two"))) as again:
        again.host.state = h.host.state
        await press(again, shown, 1, delivery=delivery())
        (turn,) = parked()
        turn.until = 0.0
        turn.held.channel.wake()
        await until(lambda: len(installations.installation(None).warm))
        again.driver.script = asking(wish(command="one")).script
        assert "one" in (await again.run("go", run_id="r2")).text
        assert len(again.driver.sessions) == 1
        assert not again.driver.sessions[0].answers


@pytest.mark.asyncio
async def test_a_grant_for_once_ends_with_a_turn_that_asks_nothing(tmp_path: Path) -> None:
    """Our rule: it is for the turn that was told of it, not for the next message of the same run."""
    h, shown = await _asked(tmp_path)

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) == 1:
            session.driver.host.steering.append(message("something else"))  # type: ignore[attr-defined]
            return None
        await session.ask(wish(command="one"))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as again:
        again.driver.host = again.host  # type: ignore[attr-defined]
        again.host.state = h.host.state
        await press(again, shown, 1, delivery=delivery())
        session = again.driver.sessions[0]
        assert len(session.prompts) == 2
        assert not session.answers
        assert parked()


@pytest.mark.asyncio
async def test_a_grant_for_once_is_for_the_place_that_was_shown(tmp_path: Path) -> None:
    """Our rule: the form has another workspace (or machine) by now, so the same command is another action."""
    h, shown = await _asked(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    async with harness(tmp_path / "elsewhere", asking(wish(command="one"))) as again:
        again.host.state = h.host.state
        await press(again, shown, 1, delivery=delivery())
        assert not again.driver.sessions[0].answers
        assert parked()


# ------------------------------------------------------------------ who may still answer, under which policy


@pytest.mark.asyncio
@pytest.mark.parametrize("pressed", [True, False])
async def test_an_approver_who_was_removed_meanwhile_answers_nothing(tmp_path: Path, pressed: bool) -> None:
    """Our rule: who may answer says the form as it is now."""
    group: dict[str, Any] = {"conversation": "group_1", "delivery": delivery()}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", config={"approvers": ["9"]}, **group))
        if pressed:
            done = await press(h, shown, 1, actor="9", **group)
            assert "Only the person who asked" in done.text
        else:
            await h.run("1", run_id="r2", actor="9", **group)
            assert h.driver.sessions[1].prompts[0].text == "1"
        await h.run("/stop", run_id="r3", actor="9", **group)
        assert not h.driver.sessions[0].answers
        assert any(each.held.live.session is h.driver.sessions[0] for each in parked())  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_an_approver_who_is_named_only_now_answers_nothing(tmp_path: Path) -> None:
    """Our rule: nor does whoever the form did not name when it was asked."""
    group: dict[str, Any] = {"conversation": "group_1", "delivery": delivery()}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", **group))
        done = await press(h, shown, 1, actor="9", config={"approvers": ["9"]}, **group)
        assert "Only the person who asked" in done.text
        assert not h.driver.sessions[0].answers


@pytest.mark.asyncio
async def test_an_approver_s_message_in_another_chat_is_none_here(tmp_path: Path) -> None:
    """Our rule: as a press: a number answers what waits in its own chat, and is a message like any other elsewhere."""
    config = {"approvers": ["9"]}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1", conversation="group_1", config=config)
        await h.run("1", run_id="r2", actor="9", conversation="group_2", config=config)
        assert not h.driver.sessions[0].answers
        assert h.driver.sessions[1].prompts[0].text == "1"


@pytest.mark.asyncio
async def test_where_a_whole_chat_is_the_actor_only_the_person_who_asked_answers(tmp_path: Path) -> None:
    """Our rule: a legacy form shares sessions and runs in a chat, and no right to allow."""
    group: dict[str, Any] = {"conversation": "group_1", "config": {"user-id-source": "legacy-session"}}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1", **group)
        assert "waiting for an answer" in (await h.run("1", run_id="r2", actor="8", **group)).text
        assert not h.driver.sessions[0].answers
        assert "answered yes" in (await h.run("1", run_id="r3", **group)).text


@pytest.mark.asyncio
async def test_after_a_restart_only_the_button_that_was_shown_last_counts(tmp_path: Path) -> None:
    """Our rule: another step of a request is another request, also where nobody but the host's state knows it."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        requested(await press(h, shown, 4, delivery=delivery()))
    async with harness(tmp_path, ScriptedDriver(asks)) as again:
        again.host.state = h.host.state
        assert "no longer open" in (await press(again, shown, 1, delivery=delivery())).text
        assert not again.driver.sessions


@pytest.mark.asyncio
async def test_what_the_form_denies_the_agent_is_denied(tmp_path: Path) -> None:
    """Our rule: a person is not even asked, and the agent reads a refusal."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        done = await h.run("go", run_id="r1", config={"approval-policy": "deny"})
        assert "answered no" in done.text
        assert not parked()


@pytest.mark.asyncio
@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize("config", [{"approval-policy": "deny"}, {"approval-rules": "deny execute(make *)"}])
async def test_what_is_denied_by_now_is_allowed_by_nobody(tmp_path: Path, number: str, config: dict[str, Any]) -> None:
    """Our rule: policy and rules as they are when the answer comes; nobody's "allow" is stronger than "deny"."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        done = await h.run(number, run_id="r2", config=config)
        session = h.driver.sessions[0]
        assert session.answers["a1"].choice_id == "no"
        assert "answered no" in done.text
        assert not session_granted()


def session_granted() -> int:
    return sum(len(each.live.grants._granted) for each in installations.installation(None).warm._waiting.values())


@pytest.mark.asyncio
async def test_another_allowed_actor_s_message_is_no_answer(tmp_path: Path) -> None:
    """Our rule: whoever may write into the turn may not therefore allow what it asks for."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) > 1:
            return None
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script), allowed_actors=["7", "8"]) as h:
        results = await written_at_once(h, message("1", actor="8"), delivery=delivery())
        assert "Only the person who asked" in results.text
        assert not h.driver.sessions[0].answers
        assert "answered yes" in (await h.run("1", run_id="r2")).text


@pytest.mark.asyncio
async def test_an_approver_s_message_in_the_same_moment_is_the_answer(tmp_path: Path) -> None:
    """Our rule: it is an approver's, whether the run has ended or not."""
    config = {"allowed-actors": ["7", "8"], "approvers": ["8"]}
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        results = await written_at_once(h, message("1", actor="8"), config=config, delivery=delivery())
        assert "answered yes" in results.text
    (line,) = written_down(tmp_path)
    assert (line["actor"], line["answerer"]) == ("7", "8")


@pytest.mark.asyncio
async def test_what_was_written_before_the_request_is_shown_is_no_answer(tmp_path: Path) -> None:
    """Our rule: an "ok" that the host had before anybody could see the request is a message like any other."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) > 1:
            session.emit(TextDelta(f"heard {prompt.text}"))
            return None
        session.driver.host.steering.append(message("ok"))  # type: ignore[attr-defined]
        return await asks(session, prompt)

    async with harness(tmp_path, ScriptedDriver(script, steerable=True)) as h:
        h.driver.host = h.host  # type: ignore[attr-defined]
        await h.run("go", run_id="r1")
        session = h.driver.sessions[0]
        assert not session.answers
        assert not session.steered
        done = await h.run("3", run_id="r2")
        assert "answered no" in done.text
        assert "heard ok" in done.text


# ------------------------------------------------------------------ races and ends


@pytest.mark.asyncio
async def test_what_was_denied_in_the_same_moment_is_not_allowed_by_the_button(tmp_path: Path) -> None:
    """Our rule: the press' own snapshot of the state still has the request, and yet it is answered."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        first = await written_at_once(h, message("3"), delivery=delivery())
        assert "answered no" in first.text
        record = next(data["value"] for action, data in h.host.calls if action == "state_set" and "approval" in str(data))
        key = next(data["key"] for action, data in h.host.calls if action == "state_set" and data["value"] is record)
        known = {key: record}
        late = await press(h, requested(first), 1, delivery=delivery(), state={"conversation": known})
        assert "no longer open" in late.text
        assert len(h.driver.sessions[0].prompts) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("pressed", [True, False])
async def test_an_answer_whose_run_is_cancelled_at_any_moment_leaves_nothing_stuck(tmp_path: Path, pressed: bool) -> None:
    """Our rule: the turn is answered, cancelled, or still to be answered; never open to nobody, and no lock stays."""
    for ticks in range(24):
        async with harness(tmp_path, ScriptedDriver(asks)) as h:
            shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
            installations.installation(None).parked._outcomes[parked()[0].key] = Became("approval.expired", "something else")
            answer = press(h, shown, 1, delivery=delivery()) if pressed else h.run("1", run_id="r2")
            running = asyncio.ensure_future(answer)
            for _ in range(ticks):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            await until(lambda: not installations.installation(None).runs)
            session = h.driver.sessions[0]
            if parked():
                assert "answered yes" in (await h.run("1", run_id="r3")).text, ticks
            else:
                assert session.answers or session.interrupts, ticks
            h.driver.script = _done
            async with asyncio.timeout(BOUND):
                assert (await h.run("next", run_id="r4")).text.endswith("done"), ticks


async def _done(session: ScriptedSession, prompt: Prompt) -> str | None:
    session.emit(TextDelta("done"))
    return None


@pytest.mark.asyncio
async def test_an_asking_run_that_is_cancelled_at_any_moment_leaves_nothing_stuck(tmp_path: Path) -> None:
    """Our rule: parked or cancelled, and the next message is served."""
    for ticks in range(0, 90, 5):
        async with harness(tmp_path, ScriptedDriver(asks)) as h:
            running = h.start("go", run_id="r1")
            for _ in range(ticks):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            await until(lambda: not installations.installation(None).runs)
            await until(lambda: not parked())
            h.driver.script = _done
            async with asyncio.timeout(BOUND):
                assert (await h.run("next", run_id="r4")).text.endswith("done"), ticks


@pytest.mark.asyncio
async def test_a_stop_while_the_asking_run_still_ends_stops_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: it is not parked behind the back of whoever was told that it stops."""
    ending, go_on = asyncio.Event(), asyncio.Event()
    left = run_loop._Run._tell_left

    async def slow(self: Any) -> None:
        ending.set()
        await go_on.wait()
        await left(self)

    monkeypatch.setattr(run_loop._Run, "_tell_left", slow)
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        asked = h.start("go", run_id="r1", delivery=delivery())
        await ending.wait()
        stopping = h.start("/stop", run_id="r2", delivery=delivery())
        for _ in range(20):
            await asyncio.sleep(0)
        go_on.set()
        shown = requested(await asked)
        await stopping
        session = h.driver.sessions[0]
        await until(lambda: session.interrupts)
        assert not parked()
        assert "no longer open" in (await press(h, shown, 1, delivery=delivery())).text
        assert len(session.prompts) == 1
        assert not any(shown["interaction_id"] in str(each) for each in h.host.state.values())


@pytest.mark.asyncio
async def test_a_turn_that_is_being_ended_asks_nobody(tmp_path: Path) -> None:
    """Our rule: a request that comes behind the interrupt is cancelled, neither shown nor parked."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await session.ask(wish())
            raise
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        done = await h.run("go", run_id="r1", delivery=delivery(), deadline=1.5)
        assert "time limit" in done.text
        assert not parked()
        assert not [each for each in done.results if each.type == "action.requested"]
        assert h.driver.sessions[0].answers == {"a1": Answer()}


@pytest.mark.asyncio
async def test_a_second_request_that_was_taken_back_meanwhile_holds_nobody_up(tmp_path: Path) -> None:
    """Our rule: what the agent said behind it counts, also where it was said before the request is shown."""
    both = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if len(session.prompts) > 1:
            return None
        first = asyncio.ensure_future(session.ask(wish("a1", "one")))
        await asyncio.sleep(0)
        session.emit(wish("a2", "two"))
        session.emit(Notice("agent.request_withdrawn", "a2"))
        both.set()
        await first
        await asyncio.sleep(0)
        session.emit(TextDelta("went on"))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        await both.wait()
        await until(lambda: any(isinstance(each, Notice) for each in parked()[0].held.early))
        done = await h.run("1", run_id="r2")
        if parked():
            assert not parked()[0].waits
            done = await h.run("and now?", run_id="r3")
        assert "went on" in done.text
        assert not parked()


@pytest.mark.asyncio
async def test_requests_without_end_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: an agent that asks on and on while it waits has its turn cancelled at a bound."""
    monkeypatch.setattr(limits, "PARKED_REQUEST_BYTES", 20_000)

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        for number in range(200):
            session.emit(wish(f"a{number}", "x" * 1000))
        await asyncio.Event().wait()
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await h.run("go", run_id="r1")
        session = h.driver.sessions[0]
        await until(lambda: session.interrupts)
        await until(lambda: not parked())
        h.driver.script = _done
        assert (await h.run("next", run_id="r2")).text.endswith("done")


@pytest.mark.asyncio
async def test_a_host_that_does_not_take_the_news_delays_no_end(tmp_path: Path) -> None:
    """Our rule: on its deadline the turn is cancelled, whatever becomes of telling so."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        (turn,) = parked()
        never = asyncio.Event()

        async def tell(outcome: Became) -> None:
            await never.wait()

        turn.tell = tell
        turn.until = 0.0
        turn.held.channel.wake()
        await until(lambda: h.driver.sessions[0].interrupts)
        never.set()


@pytest.mark.asyncio
async def test_a_step_is_not_shown_for_a_turn_that_has_ended(tmp_path: Path) -> None:
    """Our rule: what is wrong with a form is told, and no request is opened anew behind a ``/stop``."""
    fields = (QuestionField("size", "Size", "number", required=True), QuestionField("name", "Name", "text"))
    forms = delivery(interactions={**delivery()["interactions"], "field_types": ["text", "number"], "max_fields": None})
    async with harness(tmp_path, asking(QuestionAsked("q", "Which?", fields))) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=forms))
        sent = {"interaction_id": shown["interaction_id"], "action_id": None, "values": {"size": "big"}}
        stream = h.runner.invoke(
            h.context("submitted", event="interaction.submitted", input={"text": "s", "interaction": sent}, delivery=forms)
        )
        turn = parked()[0]
        tell = run_loop._Run.tell

        async def stop_meanwhile(self: Any, *more: Any) -> None:
            await tell(self, *more)
            installations.installation(None).parked.stop(turn)

        results = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_loop._Run, "tell", stop_meanwhile)
            results = [result async for result in stream]
        assert "no longer open" in Outcome(results).text
        assert not [each for each in results if each.type == "action.requested"]


@pytest.mark.asyncio
async def test_a_press_in_another_chat_is_none_here(tmp_path: Path) -> None:
    """Our rule: a request belongs to its chat, whoever presses and whatever id is sent."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery(), conversation="group_1"))
        done = await press(h, shown, 1, delivery=delivery(), conversation="group_2")
        assert "no longer open" in done.text
        assert parked()
        assert not h.driver.sessions[0].answers


@pytest.mark.asyncio
async def test_an_answer_that_one_approver_began_is_not_ended_by_another(tmp_path: Path) -> None:
    """Our rule: the next message of whoever chose to say why is the reason, also where a whole chat is the actor."""
    group: dict[str, Any] = {
        "conversation": "group_1",
        "config": {"approvers": ["8", "9"], "user-id-source": "legacy-bot"},
        "delivery": delivery(),
    }
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", **{**group, "config": {"approvers": ["8", "9"]}}))
        await press(h, shown, 4, actor="8", **group)
        h.driver.script = _done
        await h.run("good morning", run_id="r2", actor="9", **group)
        assert not h.driver.sessions[0].answers
        await h.run("too risky", run_id="r3", actor="8", **group)
        assert h.driver.sessions[0].answers["a1"].message == "too risky"


@pytest.mark.asyncio
async def test_in_a_shared_session_a_grant_is_one_person_s(tmp_path: Path) -> None:
    """Our rule: what one member allowed for the session the next one is asked about, in the same process."""
    group: dict[str, Any] = {"conversation": "group_1", "config": {"share-session": "conversation"}}
    async with harness(tmp_path, asking(wish())) as h:
        await h.run("go", run_id="r1", **group)
        assert "[yes]" in (await h.run("2", run_id="r2", **group)).text
        assert "[yes]" in (await h.run("go", run_id="r3", **group)).text
        await h.run("go", run_id="r4", actor="8", **group)
        assert len(h.driver.sessions) == 1
        assert parked()[0].requester.sender_id == "8"


@pytest.mark.asyncio
async def test_what_an_approver_allows_for_the_session_is_the_requester_s(tmp_path: Path) -> None:
    """Our rule: whoever answers, turn and grant stay the requester's; the approver's own turns are asked about."""
    group: dict[str, Any] = {
        "conversation": "group_1",
        "config": {"share-session": "conversation", "approvers": ["9"]},
        "delivery": delivery(),
    }
    async with harness(tmp_path, asking(wish())) as h:
        shown = requested(await h.run("go", run_id="r1", **group))
        assert "[yes]" in (await press(h, shown, 2, actor="9", **group)).text
        assert "[yes]" in (await h.run("go", run_id="r2", **group)).text
        await h.run("go", run_id="r3", actor="9", **group)
        assert parked()[0].requester.sender_id == "9"


@pytest.mark.asyncio
async def test_who_may_start_nothing_any_more_starts_nothing_by_a_late_answer(tmp_path: Path) -> None:
    """Our rule: an approver answers for others; a turn of their own takes an allowed actor."""
    async with harness(tmp_path, asking(wish())) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
    async with harness(tmp_path, asking(wish())) as again:
        again.host.state = h.host.state
        config = {"allowed-actors": ["8"], "approvers": ["7"]}
        done = await press(again, shown, 1, delivery=delivery(), config=config)
        assert "allowed-actors" in done.text
        assert not again.driver.sessions


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["stopped", "replaced"])
async def test_what_is_over_is_over_also_for_a_press_that_was_on_its_way(tmp_path: Path, end: str) -> None:
    """Our rule: its snapshot of the state is older than the ``/stop``, or than the next step; it allows nothing."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        shown = requested(await h.run("go", run_id="r1", delivery=delivery()))
        known = {"conversation": dict(h.host.state)}
        if end == "stopped":
            await h.run("/stop", run_id="r2", delivery=delivery())
        else:
            await press(h, shown, 4, delivery=delivery())
            await h.run("/stop", run_id="r2", delivery=delivery())
        await until(lambda: not parked())
        assert "no longer open" in (await press(h, shown, 1, delivery=delivery(), state=known)).text
        assert len(h.driver.sessions[0].prompts) == 1


def test_the_name_of_what_is_allowed_once_has_every_part() -> None:
    """Our rule: action, machine and directory; none that could be left out."""
    names = {
        placed(event, machine, directory)
        for event in (wish(), wish(command="other"))
        for machine in ("local", "ssh me@host")
        for directory in ("/w", "/v")
    }
    assert len(names) == 8
    assert placed(wish(complete=False), "local", "/w") == ""


def test_what_is_allowed_is_named_by_everything_that_would_be_done() -> None:
    """Our rule: kind, command, paths, changes, directory and, where there is nothing else, the title."""
    edit = ApprovalRequested("a", "t", "edit", CHOICES, paths=("/w/a",), diffs=(FileDiff("/w/a", "1", "2"),), cwd="/w")
    named = ApprovalRequested("a", "t", "fetch", CHOICES, cwd="/w")
    events = [
        wish(),
        wish(command="other"),
        dataclasses.replace(wish(), kind="other"),
        dataclasses.replace(wish(), cwd="/v"),
        dataclasses.replace(wish(), paths=("/w/a",)),
        edit,
        dataclasses.replace(edit, diffs=(FileDiff("/w/a", "1", "3"),)),
        named,
        dataclasses.replace(named, title="other"),
    ]
    assert len({digest(event) for event in events} - {""}) == len(events)


def test_a_grant_for_the_session_has_every_part() -> None:
    """Our rule: one actor's, one person's, and one action's; an edit's is for the same files in the same directory."""
    actor = Actor("user", "7", "bot", "7")
    edit = ApprovalRequested("a", "t", "edit", CHOICES, paths=("/w/a",), diffs=(FileDiff("/w/a", "1", "2"),), cwd="/w")
    grants = SessionGrants()
    grants.add(actor, wish())
    grants.add(actor, edit)
    for event in (wish(), edit, dataclasses.replace(edit, diffs=(FileDiff("/w/a", "2", "3"),))):
        assert grants.covers(actor, event)
    for other in (
        Actor("session", "7", "bot", "7"),
        Actor("user", "8", "bot", "7"),
        Actor("user", "7", "other bot", "7"),
        Actor("user", "7", "bot", "8"),
    ):
        assert not grants.covers(other, wish())
    for event in (
        wish(command="make uninstall"),
        dataclasses.replace(edit, cwd="/v"),
        dataclasses.replace(edit, paths=("/w/b",), diffs=()),
    ):
        assert not grants.covers(actor, event)


def test_a_plan_is_allowed_for_no_session() -> None:
    """Our rule: leaving the plan mode is granted each time."""
    plan = ApprovalRequested("m", "the plan", "mode", CHOICES)
    grants, actor = SessionGrants(), Actor("user", "7", "bot", "7")
    grants.add(actor, plan)
    assert not grants.covers(actor, plan)


# ------------------------------------------------------------------ agents that lie


@pytest.mark.asyncio
async def test_a_request_sent_again_after_its_answer_is_asked_again(tmp_path: Path) -> None:
    """Our rule: "once" is once, also under the same name in the next turn."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.answers.clear()
        session.answered.clear()
        await session.ask(wish())
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        for number in range(2):
            assert "make install" in (await h.run("go", run_id=f"r{number}")).text
            assert parked()
            await h.run("1", run_id=f"s{number}")
            assert not parked()


@pytest.mark.parametrize("label", ["nein", "stop it", "wait", "what?", "help", "x"])
def test_an_agent_s_own_word_does_not_allow(label: str) -> None:
    """Our rule: what a person means by a word is not for the agent to say; its choice is allowed by number or whole label."""
    extra = Choice("worse", label, "allow_once")
    event = ApprovalRequested("a", "t", "execute", (*CHOICES, extra), command="c", cwd="/w")
    request = OpenRequest(event, machine="m", directory="/w", limit=None)
    assert not isinstance(request.understand(label), Decided)
    assert request.understand("5") == Decided(Answer("worse"), "allow_once")


def test_a_choice_that_shares_its_name_is_no_single_grant() -> None:
    """Our rule: which of the two an agent takes it for is not known, so neither policy nor rule answers with it."""
    choices = (Choice("x", "Once", "allow_once"), Choice("x", "Always", "allow_always"), Choice("no", "No", "reject_once"))
    assert grant(ApprovalRequested("a", "t", "execute", choices, command="c", cwd="/w")) is None


@pytest.mark.parametrize(
    "command",
    [
        "echo ok\n" + " " * 3000 + "; rm -rf ~",
        " " * 3000 + "rm -rf ~",
        "echo ok" + "\n" * 60 + "rm -rf ~",
        "echo ok" + "\n \n\t" * 40 + "rm -rf ~",
        "rm\U0001d159-rf ~",
        "rm\U00013441-rf ~",
    ],
)
def test_nothing_of_a_command_is_pushed_out_of_sight(command: str) -> None:
    """Our rule: a block of blanks or empty lines stands as its number, wherever it is; what draws nothing as its code point."""
    event = ApprovalRequested("a", "t", "execute", CHOICES, command=command, cwd="/w")
    shown = OpenRequest(event, machine="m", directory="/w", limit=None).shown("en_US", 5).text
    assert " " * 200 not in shown
    assert shown.count("\n") < 40
    assert "⟦U+" in shown
    assert "rm" in shown


# ------------------------------------------------------------------ what is written down


def written_down(tmp_path: Path) -> list[dict[str, str]]:
    """The lines of the log of decisions."""
    (file,) = (tmp_path / "home").rglob("decisions.jsonl")
    return [json.loads(line) for line in file.read_text("ascii").splitlines()]


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["expired", "stopped"])
async def test_an_end_without_an_answer_is_written_down(tmp_path: Path, end: str) -> None:
    """Our rule: every decision is a line, also that of the clock and of ``/stop``."""
    async with harness(tmp_path, ScriptedDriver(asks)) as h:
        await h.run("go", run_id="r1")
        (turn,) = parked()
        if end == "expired":
            turn.until = 0.0
            turn.held.channel.wake()
        else:
            await h.run("/stop", run_id="r2")
        await until(lambda: h.driver.sessions[0].interrupts)
    (line,) = written_down(tmp_path)
    assert line["decision"] == ("expired" if end == "expired" else "cancelled")
    assert line["action"] == "make install"


@pytest.mark.asyncio
async def test_a_late_denial_is_written_down(tmp_path: Path) -> None:
    """Our rule: a person's decision is a line, also where the turn was gone."""
    async with harness(tmp_path, asking(wish())) as h:
        await h.run("go", run_id="r1")
    async with harness(tmp_path, ScriptedDriver(_done)) as again:
        again.host.state = h.host.state
        await again.run("deny because my-reason-canary", run_id="r2")
    line = written_down(tmp_path)[-1]
    assert (line["decision"], line["by"], line["answerer"]) == ("deny", "person", "7")
    assert "canary" not in str(line)
