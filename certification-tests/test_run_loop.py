"""One LangBot run, from its context to its single terminal result, against a scripted driver (local protocol fixture)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import installations, limits, run_loop, runtime_support
from pkg.agent_api import (
    Answer,
    ApprovalRequested,
    Choice,
    Prompt,
    QuestionAsked,
    SessionSpec,
    SessionStarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from pkg.errors import AgentDied, ProcessCleanupUnconfirmed, SessionUnavailable
from pkg.product import SpecInputs
from pkg.settings import RunnerSettings
from testkit.host_actions import HoldingHost, message
from testkit.run_harness import Harness, Outcome, harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession, echo

CHOICES = (
    Choice("yes", "Allow", "allow_once"),
    Choice("always", "Always", "allow_always"),
    Choice("no", "Deny", "reject_once"),
)


def binding(uid: str = "A", revision: int = 1) -> InstallationBinding:
    return InstallationBinding(
        instance_uuid="i",
        workspace_uuid="w",
        placement_generation=1,
        installation_uuid=uid,
        runtime_revision=revision,
        artifact_digest="0" * 64,
    )


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class Hanging:
    """A script that says one thing and then works until it is interrupted."""

    def __init__(self) -> None:
        self.working = asyncio.Event()

    async def __call__(self, session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(f"working on {prompt.text}"))
        self.working.set()
        await asyncio.Event().wait()
        return None


async def _until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - a registry has no event
            await asyncio.sleep(0)


# ------------------------------------------------------------------ who and what starts a run


@pytest.mark.asyncio
async def test_an_answer_is_shown_once_and_followed_by_one_terminal_result(tmp_path: Path) -> None:
    """Host rule: a completed message, then run.completed without one."""
    async with harness(tmp_path) as h:
        done = await h.run("hi")
    assert done.shown == ["echo: hi"]
    assert (done.terminal.type, done.reason) == ("run.completed", "stop")


@pytest.mark.asyncio
@pytest.mark.parametrize("event", ["message.edited", "group.member_joined", "feedback.received"])
async def test_other_events_end_silently(tmp_path: Path, event: str) -> None:
    """Our rule: only messages and submitted interactions start anything."""
    async with harness(tmp_path) as h:
        done = await h.run("hi", event=event)
        assert [each.type for each in done.results] == ["run.completed"]
        assert (h.driver.sessions, h.host.calls) == ([], [])


@pytest.mark.asyncio
@pytest.mark.parametrize("actor", [None, {"actor_type": "system", "actor_id": "7"}, {"actor_type": "user", "actor_id": " "}])
async def test_without_a_trusted_actor_nothing_is_started_or_asked(tmp_path: Path, actor: dict[str, Any] | None) -> None:
    """Our rule: authority first, with no outbound call before it."""
    async with harness(tmp_path) as h:
        context = h.context().model_dump()
        context["actor"] = actor
        done = Outcome([each async for each in h.runner.invoke(type(h.context()).model_validate(context))])
        assert "coding.no_actor" in done.log
        assert done.reason == "error"
        assert (h.driver.sessions, h.host.calls) == ([], [])


@pytest.mark.asyncio
async def test_only_allowed_actors_start_a_run(tmp_path: Path) -> None:
    """Our rule: the list is checked before anything starts."""
    async with harness(tmp_path, allowed_actors=["8"]) as h:
        refused = await h.run("hi")
        assert "allowed-actors" in refused.text
        assert h.driver.sessions == []
        assert (await h.run("hi", actor="8")).shown == ["echo: hi"]


@pytest.mark.asyncio
async def test_a_bad_setting_is_named_and_nothing_starts(tmp_path: Path) -> None:
    """Our rule: one clear message that names the field."""
    async with harness(tmp_path, env_json="{not json") as h:
        done = await h.run("hi")
        assert "env-json" in done.text
        assert (done.reason, h.driver.sessions) == ("error", [])


@pytest.mark.asyncio
async def test_a_missing_workspace_is_a_message(tmp_path: Path) -> None:
    """Our rule: said before the agent is started, without a path of the host."""
    async with harness(tmp_path / "nowhere") as h:
        done = await h.run("hi")
        assert done.reason == "error"
        assert "coding.workspace_missing" in done.log
        assert str(tmp_path) not in done.text


@pytest.mark.asyncio
async def test_a_late_press_of_a_button_never_reaches_the_agent(tmp_path: Path) -> None:
    """Our rule: the host's placeholder text of a submitted interaction is no prompt."""
    async with harness(tmp_path) as h:
        done = await h.run("submitted", event="interaction.submitted")
        assert "no longer open" in done.text
        assert h.driver.sessions == []


@pytest.mark.asyncio
async def test_an_empty_message_says_so(tmp_path: Path) -> None:
    """Our rule: people always get an answer they can read."""
    async with harness(tmp_path) as h:
        assert "nothing in this message" in (await h.run("  ")).text


@pytest.mark.asyncio
async def test_the_worker_says_busy_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host fact: 128 actions share one connection; our rule: say busy before that."""
    monkeypatch.setattr(limits, "RUNS_PER_PROCESS", 1)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        first = h.start("one")
        await script.working.wait()
        second = await h.run("two", run_id="r2", conversation="other")
        assert "coding.busy" in second.log
        h.host.steering.append(message("/stop"))
        await first


# ------------------------------------------------------------------ the prompt


@pytest.mark.asyncio
async def test_what_the_host_adds_is_apart_from_what_the_person_wrote(tmp_path: Path) -> None:
    """Our rule: host text is context, never prompt text, and a name in it is quoted data."""
    async with harness(tmp_path) as h:
        await h.run("hi")
        prompt = h.driver.sessions[0].prompts[0]
        assert prompt.text == "hi"
        assert '"sender_name": "Ann"' in prompt.context
    async with harness(tmp_path, append_run_scope_prompt=False) as h:
        await h.run("hi")
        assert h.driver.sessions[0].prompts[0].context == ""


@pytest.mark.asyncio
async def test_attachments_travel_and_those_left_out_are_named(tmp_path: Path) -> None:
    """Our rule: a bad attachment never fails the message."""
    files = [{"name": "a.txt", "content": "aGk="}, {"name": "b.png", "url": "http://127.0.0.1:1/b.png"}]
    async with harness(tmp_path) as h:
        done = await h.run(input={"text": "see", "attachments": files})
        assert [each.data for each in h.driver.sessions[0].prompts[0].attachments] == [b"hi"]
        assert "b.png" in done.text


# ------------------------------------------------------------------ sessions


@pytest.mark.asyncio
async def test_the_next_message_goes_to_the_same_live_session(tmp_path: Path) -> None:
    """Our rule: a session stays alive between messages of the same person in the same chat."""
    async with harness(tmp_path) as h:
        await h.run("one")
        await h.run("two", run_id="r2")
        assert [prompt.text for prompt in h.driver.sessions[0].prompts] == ["one", "two"]
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("adjustable", [True, False])
async def test_another_option_of_a_kept_session_is_changed_where_it_lives_or_by_resuming_it(
    tmp_path: Path, adjustable: bool
) -> None:
    """Our rule: a changed model is no new conversation, and costs no new process where the agent can switch."""
    driver = ScriptedDriver(adjustable=adjustable)
    async with harness(tmp_path, driver) as h:
        made = h.runner.product

        def spec(settings: RunnerSettings, inputs: SpecInputs) -> SessionSpec:
            return dataclasses.replace(made.spec(settings, inputs), options={"model": ",".join(settings.knowledge_bases)})

        h.runner.product = dataclasses.replace(made, spec=spec)
        for model in ("one", "one", "two", "two"):
            assert (await h.run("hi", config={"knowledge-bases": model})).shown == ["echo: hi"]
        first = driver.sessions[0]
        assert first.options == [{"model": "two"}]
        if adjustable:
            assert len(driver.sessions) == 1
        else:
            (_, second) = driver.sessions
            assert first.closed.is_set()
            assert (second.session_id, second.spec.options) == (first.session_id, {"model": "two"})
            assert second.options == []


@pytest.mark.asyncio
async def test_without_keep_warm_the_session_is_closed_and_resumed_by_its_stored_id(tmp_path: Path) -> None:
    """Our rule: the host's state keeps the id under a scoped name, and nothing else."""
    async with harness(tmp_path, keep_warm=0) as h:
        await h.run("one")
        assert h.driver.sessions[0].closed.is_set()
        await h.run("two", run_id="r2")
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", "scripted-1"]
        assert list(h.host.state.values()) == [{"value": "scripted-1"}]
        assert all(key.startswith("lb_") for key in h.host.state)
        assert [action for action, _ in h.host.calls].count("state_set") == 1


@pytest.mark.asyncio
async def test_an_agent_that_renames_its_session_without_end_costs_the_host_little(tmp_path: Path) -> None:
    """Our rule: the host is asked to store one id at a time, and the last one is what it has in the end."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        for number in range(2000):
            session.emit(SessionStarted(f"name-{number}"))
        session.emit(TextDelta("done"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), keep_warm=0) as h:
        assert (await h.run("one")).shown == ["done"]
        assert list(h.host.state.values()) == [{"value": "name-1999"}]
        assert [action for action, _ in h.host.calls].count("state_set") < 200


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["x" * 5000, "two\nlines", "half \ud800"])
async def test_a_session_s_name_that_nobody_could_read_is_not_stored(tmp_path: Path, name: str) -> None:
    """Our rule: the host keeps an id for good, so it is a short readable one; the message is answered all the same."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(SessionStarted(name))
        session.emit(TextDelta("done"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), keep_warm=0) as h:
        assert (await h.run("one")).shown == ["done"]
        assert list(h.host.state.values()) == [{"value": "scripted-1"}]


@pytest.mark.asyncio
@pytest.mark.parametrize("other", [{"actor": "8"}, {"conversation": "person_8"}])
async def test_another_person_or_chat_gets_a_session_of_its_own(tmp_path: Path, other: dict[str, Any]) -> None:
    """Our rule: sessions belong to binding, chat and person."""
    async with harness(tmp_path) as h:
        await h.run("one")
        await h.run("two", run_id="r2", **other)
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", ""]
        assert len(h.host.state) == 2


@pytest.mark.asyncio
async def test_a_shared_session_is_the_chats(tmp_path: Path) -> None:
    """Our rule: with share-session conversation the person is left out of the key."""
    async with harness(tmp_path, share_session="conversation") as h:
        await h.run("one")
        await h.run("two", run_id="r2", actor="8")
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
async def test_another_revision_of_the_installation_shares_no_process_but_the_stored_id(tmp_path: Path) -> None:
    """Our rule: live things stand on the whole binding, stored ids on its lasting parts."""
    async with harness(tmp_path) as h:
        await h.run("one", binding=binding(revision=1))
        await installations.revoke(binding(revision=1))
        await h.run("two", run_id="r2", binding=binding(revision=2))
        await installations.revoke(binding(revision=2))
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", "scripted-1"]


@pytest.mark.asyncio
async def test_changed_settings_close_the_live_session_and_resume_it(tmp_path: Path) -> None:
    """Our rule: a session is reused only with the settings it was opened with."""
    async with harness(tmp_path) as h:
        await h.run("one")
        await h.run("two", run_id="r2", config={"env-json": '{"A": "1"}'})
        assert h.driver.sessions[0].closed.is_set()
        assert h.driver.sessions[1].spec.resume_session_id == "scripted-1"


@pytest.mark.asyncio
async def test_reuse_session_off_never_resumes_and_stores_nothing(tmp_path: Path) -> None:
    """Established field: every message starts fresh."""
    async with harness(tmp_path, reuse_session=False) as h:
        await h.run("one")
        await h.run("two", run_id="r2")
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", ""]
        assert all(session.closed.is_set() for session in h.driver.sessions)
        assert h.host.state == {}


@pytest.mark.asyncio
async def test_a_generic_failure_keeps_the_stored_id(tmp_path: Path) -> None:
    """Our rule: only a proven missing session is given up."""
    async with harness(tmp_path, keep_warm=0) as h:
        await h.run("one")
        h.driver.open_error = SessionUnavailable("coding.agent_died")
        assert (await h.run("two", run_id="r2")).reason == "error"
        h.driver.open_error = None
        await h.run("three", run_id="r3")
        assert h.driver.sessions[-1].spec.resume_session_id == "scripted-1"


@pytest.mark.asyncio
async def test_a_proven_missing_session_is_replaced_and_the_person_is_told(tmp_path: Path) -> None:
    """Our rule: starting fresh is said in the chat."""
    async with harness(tmp_path, keep_warm=0) as h:
        await h.run("one")
        h.driver.missing = frozenset({"scripted-1"})
        done = await h.run("two", run_id="r2")
        assert len(done.shown) == 2
        assert list(h.host.state.values()) == [{"value": "scripted-2"}]


@pytest.mark.asyncio
async def test_a_session_that_died_while_it_was_kept_is_opened_again(tmp_path: Path) -> None:
    """Our rule: the death of a kept session is noticed before the next message."""
    async with harness(tmp_path) as h:
        await h.run("one")
        h.driver.sessions[0].die()
        await asyncio.wait_for(h.driver.sessions[0].closed.wait(), 10)
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]
        assert h.driver.sessions[1].spec.resume_session_id == "scripted-1"


@pytest.mark.asyncio
async def test_two_messages_for_one_session_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: one writer per vendor session; who waits is told."""
    monkeypatch.setattr(limits, "WAIT_NOTICE", 0.0)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        first = h.start("one")
        await script.working.wait()
        second = h.start("two", run_id="r2", apis=())
        await _until(lambda: "r2" in installations.installation(None).runs)
        assert [prompt.text for prompt in h.driver.sessions[0].prompts] == ["one"]
        h.host.steering.append(message("/stop"))
        h.driver.script = echo
        await first
        assert (await second).shown[-1] == "echo: two"
        assert "Yours is next" in (await second).text
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
async def test_a_session_another_process_writes_to_is_busy_and_stays_stored(tmp_path: Path) -> None:
    """Our rule: a kernel lock per workspace and session, beside the account's own state."""
    directory = tmp_path / "home" / limits.STATE_DIRECTORY / "sessions"
    async with harness(tmp_path, keep_warm=0) as h:
        await h.run("one")
        assert list(directory.iterdir()) == []
        async with runtime_support.session_guard(directory, tmp_path, "scripted-1"):
            busy = await h.run("two", run_id="r2")
        assert "coding.session_busy" in busy.log
        await h.run("three", run_id="r3")
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", "scripted-1"]


@pytest.mark.asyncio
async def test_a_session_of_another_account_is_not_busy_with_this_one_s(tmp_path: Path) -> None:
    """Our rule: the lock lies with the account whose home the agent uses, so accounts never wait for each other."""
    own = tmp_path / "home" / limits.STATE_DIRECTORY / "sessions"
    other = tmp_path / "another home"
    async with harness(tmp_path, keep_warm=0, env_json={"HOME": str(other)}) as h:
        await h.run("one")
        async with runtime_support.session_guard(own, tmp_path, "scripted-1"):
            await h.run("two", run_id="r2")
        assert [session.spec.resume_session_id for session in h.driver.sessions] == ["", "scripted-1"]
        assert (other / limits.STATE_DIRECTORY / "sessions").is_dir()


@pytest.mark.asyncio
async def test_an_exclusive_workspace_serves_one_chat_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: workspace-mode exclusive queues other chats with a message."""
    monkeypatch.setattr(limits, "WAIT_NOTICE", 0.0)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script), workspace_mode="exclusive") as h:
        first = h.start("one")
        await script.working.wait()
        second = h.start("two", run_id="r2", conversation="other", apis=())
        await _until(lambda: "r2" in installations.installation(None).runs)
        assert len(h.driver.sessions) == 1
        h.host.steering.append(message("/stop"))
        await first
        h.driver.script = echo
        assert "Yours is next" in (await second).text


@pytest.mark.asyncio
async def test_a_host_that_fails_costs_memory_not_the_run(tmp_path: Path) -> None:
    """Our rule: state, steering and history are best effort."""
    async with harness(tmp_path, keep_warm=0) as h:
        h.host.failing |= {"state_get", "state_set", "steering_pull", "event_page"}
        assert (await h.run("hi")).shown == ["echo: hi"]


# ------------------------------------------------------------------ steering


@pytest.mark.asyncio
async def test_a_message_during_the_turn_goes_into_it(tmp_path: Path) -> None:
    """Our rule: where the agent can take it, text and attachments both."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        await session.steering.wait()
        session.emit(TextDelta(f"{prompt.text}+{session.steered[0].text}"))
        return None

    async with harness(tmp_path, ScriptedDriver(script, steerable=True)) as h:
        h.host.steering.append(message("more", attachments=[{"name": "a", "content": "aGk="}]))
        assert (await h.run("one")).shown == ["one+more"]
        assert [each.data for each in h.driver.sessions[0].steered[0].attachments] == [b"hi"]


@pytest.mark.asyncio
async def test_messages_an_agent_cannot_take_become_the_next_turns_in_order(tmp_path: Path) -> None:
    """Our rule: the same run, one turn each, nothing lost."""
    gate = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        if prompt.text == "one":
            await gate.wait()
        session.emit(TextDelta(prompt.text))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one")
        h.host.steering.extend([message("two"), message("three", attachments=[{"name": "a", "content": "aGk="}])])
        await h.host.pulled.wait()
        gate.set()
        assert (await run).shown == ["one", "two", "three"]
        assert len(h.driver.sessions[0].prompts[2].attachments) == 1


@pytest.mark.asyncio
async def test_a_message_after_the_answer_is_still_taken(tmp_path: Path) -> None:
    """Host fact: it claims messages until the run is unregistered; our rule: a last pull and a short linger."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(prompt.text))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one")
        await h.host.pulled.wait()
        h.host.steering.append(message("late"))
        assert (await run).shown == ["one", "late"]


@pytest.mark.asyncio
async def test_a_stranger_never_reaches_the_agent_and_is_told_once(tmp_path: Path) -> None:
    """Our rule: a steering item is judged by its own actor."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script, steerable=True)) as h:
        run = h.start("one")
        await script.working.wait()
        h.host.steering.extend(message(text, actor="9", name="Eve") for text in ("rm -rf", "/stop"))
        h.host.pulled.clear()
        await h.host.pulled.wait()
        h.host.steering.append(message("again", actor="9", name="Eve"))
        h.host.pulled.clear()
        await h.host.pulled.wait()
        assert (h.driver.sessions[0].steered, h.driver.sessions[0].interrupts) == ([], 0)
        h.host.steering.append(message("/stop"))
        assert (await run).text.count("Eve") == 1


@pytest.mark.asyncio
async def test_an_allowed_actor_may_steer_somebody_elses_turn(tmp_path: Path) -> None:
    """Our rule: the requester and allowed-actors."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        await session.steering.wait()
        return None

    async with harness(tmp_path, ScriptedDriver(script, steerable=True), allowed_actors="7,9") as h:
        h.host.steering.append(message("more", actor="9"))
        await h.run("one")
        assert [each.text for each in h.driver.sessions[0].steered] == ["more"]


@pytest.mark.asyncio
async def test_messages_the_host_dropped_come_with_the_next_one(tmp_path: Path) -> None:
    """Host fact: dropped messages are audited and in the history; our rule: only the requester's, recent, and once."""
    async with harness(tmp_path) as h:
        h.host.drop(1, "long ago", age=10_000)
        h.host.drop(2, "first")
        h.host.drop(3, "not mine", actor="9")
        h.host.drop(4, "/stop")
        h.host.drop(5, "second")
        await h.run("now")
        await h.run("later", run_id="r2")
        h.host.drop(6, "third")
        await h.run("at last", run_id="r3")
        assert [prompt.text for prompt in h.driver.sessions[0].prompts] == [
            "first\n\nsecond\n\nnow",
            "later",
            "third\n\nat last",
        ]


@pytest.mark.asyncio
async def test_a_message_taken_into_the_turn_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: who was given something to do may think about it as long as at the start."""
    ahead = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], time=time.time)
    monkeypatch.setattr(run_loop, "time", clock)
    begun, finished = asyncio.Event(), asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta("begun"))
        begun.set()
        await finished.wait()
        return None

    async with harness(tmp_path, ScriptedDriver(script, steerable=True), idle_timeout=100) as h:
        run = h.start("one")
        await begun.wait()
        ahead[0] += 60
        h.host.steering.append(message("more"))
        await h.driver.sessions[0].steering.wait()
        ahead[0] += 60
        for _ in range(2):
            h.host.pulled.clear()
            await asyncio.wait_for(h.host.pulled.wait(), 10)
            ahead[0] += 1
        assert h.driver.sessions[0].interrupts == 0
        ahead[0] += 60
        done = await run
        assert "coding.idle_limit" in done.log


# ------------------------------------------------------------------ a session that breaks while messages wait


async def _with_waiting(h: Harness, script: Hanging, *texts: str) -> asyncio.Task[Outcome]:
    """A run in its first turn with messages of the same person waiting behind it."""
    run = h.start("one")
    await script.working.wait()
    h.driver.script = echo
    h.host.steering.extend(message(text) for text in texts)
    for _ in range(2):  # the second pull starts after the first was heard
        h.host.pulled.clear()
        await asyncio.wait_for(h.host.pulled.wait(), 10)
    return run


def _prompts(h: Harness) -> list[list[str]]:
    return [[prompt.text for prompt in session.prompts] for session in h.driver.sessions]


@pytest.mark.asyncio
@pytest.mark.parametrize("reuse", [True, False])
async def test_waiting_messages_survive_the_death_of_the_agent(tmp_path: Path, reuse: bool) -> None:
    """Our rule: the failure is told where it happened, and the next messages go to a process that resumes the session."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script), reuse_session=reuse) as h:
        run = await _with_waiting(h, script, "two", "three")
        h.driver.sessions[0].die()
        done = await run
        assert done.shown[0] == "working on one"
        assert "ended in the middle" in done.shown[1]
        assert done.shown[2:] == ["echo: two", "echo: three"]
        assert _prompts(h) == [["one"], ["two", "three"]]
        assert h.driver.sessions[1].spec.resume_session_id == "scripted-1"
        assert h.driver.sessions[0].closed.is_set()
        assert (done.terminal.type, done.reason) == ("run.completed", "stop")


@pytest.mark.asyncio
async def test_waiting_messages_survive_an_agent_that_ignores_the_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: the silent turn is given up with its process; what came meanwhile is worked on."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.2)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script, stubborn=True), idle_timeout=2.5) as h:
        run = await _with_waiting(h, script, "two")
        done = await run
        assert "coding.idle_limit" not in done.log
        assert '"idle-timeout"' in done.text
        assert done.shown[-1] == "echo: two"
        assert _prompts(h) == [["one"], ["two"]]


@pytest.mark.asyncio
async def test_a_session_that_cannot_be_opened_again_costs_one_message(tmp_path: Path) -> None:
    """Our rule: one attempt per message, the error told, the next one goes on."""
    script = Hanging()
    driver = ScriptedDriver(script, open_errors=[None, SessionUnavailable("coding.session_unavailable", step="session/load")])
    async with harness(tmp_path, driver) as h:
        run = await _with_waiting(h, script, "two", "three")
        h.driver.sessions[0].die()
        done = await run
        assert "could not open the session" in done.shown[2]
        assert done.shown[3:] == ["echo: three"]
        assert _prompts(h) == [["one"], ["three"]]


@pytest.mark.asyncio
async def test_a_kept_session_that_dies_as_it_is_prompted_is_resumed_without_a_word(tmp_path: Path) -> None:
    """Our rule: the message did not arrive, so it is sent again, once; a second failure is told."""
    async with harness(tmp_path) as h:
        await h.run("one")
        h.driver.prompt_errors = [AgentDied("coding.agent_died")]
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]
        assert _prompts(h) == [["one"], ["two"]]
        assert h.driver.sessions[1].spec.resume_session_id == "scripted-1"
        h.driver.prompt_errors = [AgentDied("coding.agent_died"), AgentDied("coding.agent_died")]
        done = await h.run("three", run_id="r3")
        assert "ended in the middle" in done.text
        assert _prompts(h) == [["one"], ["two"], []]


@pytest.mark.asyncio
async def test_messages_that_nobody_works_on_any_more_are_counted(tmp_path: Path) -> None:
    """Our rule: at the time limit everything ends, and nobody's message vanishes without a word."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one", deadline=5.0)
        await script.working.wait()
        h.host.steering.extend([message("two"), message("three")])
        done = await run
        assert '"timeout"' in done.shown[-1]
        assert "not worked on any more: 2" in done.text
        assert _prompts(h) == [["one"]]


@pytest.mark.asyncio
async def test_a_message_waiting_while_the_first_opening_fails_gets_its_own(tmp_path: Path) -> None:
    """Our rule: a failed start costs the message it was for."""
    driver = ScriptedDriver(opening=asyncio.Event(), open_errors=[SessionUnavailable("coding.session_unavailable", step="new")])
    async with harness(tmp_path, driver) as h:
        run = h.start("one")
        h.host.steering.append(message("two"))
        for _ in range(2):
            h.host.pulled.clear()
            await asyncio.wait_for(h.host.pulled.wait(), 10)
        assert driver.opening is not None
        driver.opening.set()
        done = await run
        assert "could not open the session" in done.shown[0]
        assert done.shown[1:] == ["echo: two"]


# ------------------------------------------------------------------ /stop


@pytest.mark.asyncio
async def test_stop_during_a_turn_ends_it_and_the_session_lives_on(tmp_path: Path) -> None:
    """Host fact: a stop can only arrive as steering text; our rule: a cancelled turn is a normal end."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one")
        await script.working.wait()
        h.host.steering.append(message("／STOP"))
        done = await run
        assert "working on one" in done.text
        assert (done.terminal.type, h.driver.sessions[0].interrupts) == ("run.completed", 1)
        h.driver.script = echo
        await h.run("two", run_id="r2")
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
async def test_stop_drops_what_was_waiting_before_it_and_not_what_came_after(tmp_path: Path) -> None:
    """Our rule: order is kept."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one")
        await script.working.wait()
        h.driver.script = echo
        h.host.steering.extend([message("before"), message("/stop"), message("after")])
        done = await run
        assert done.shown[-1] == "echo: after"
        assert done.text.count("Stopped.") == 1
        assert "dropped with it: 1" in done.text
        assert [prompt.text for prompt in h.driver.sessions[0].prompts] == ["one", "after"]


@pytest.mark.asyncio
async def test_stop_as_a_run_of_its_own_drops_what_waits_too(tmp_path: Path) -> None:
    """Our rule: stop means what is running and what waits, however it arrives, and says how much that was."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = await _with_waiting(h, script, "two", "three")
        assert "Stopping" in (await h.run("/stop", run_id="r2")).text
        assert "dropped with it: 2" in (await run).text
        assert _prompts(h) == [["one"]]


@pytest.mark.asyncio
async def test_stop_while_the_agent_starts_spares_what_came_after_it(tmp_path: Path) -> None:
    """Our rule: the half-opened session is given up, the later message gets its own."""
    driver = ScriptedDriver(opening=asyncio.Event())
    async with harness(tmp_path, driver) as h:
        run = h.start("one")
        h.host.steering.extend([message("/stop"), message("after")])
        h.host.pulled.clear()
        await asyncio.wait_for(h.host.pulled.wait(), 10)
        driver.opening = None
        assert (await run).shown == ["Stopped.", "echo: after"]
        assert _prompts(h) == [["after"]]


@pytest.mark.asyncio
async def test_stop_after_the_answer_has_nothing_to_stop(tmp_path: Path) -> None:
    """Our rule: it is answered all the same, and what it drops is counted."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        h.host.steering.extend([message("two"), message("/stop")])
        session.emit(TextDelta("done"))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        done = await h.run("one")
        assert done.shown[0] == "done"
        assert "dropped with it: 1" in done.shown[1]
        assert _prompts(h) == [["one"]]


@pytest.mark.asyncio
async def test_stop_while_the_agent_starts_gives_up(tmp_path: Path) -> None:
    """Our rule: nothing half-opened is left."""
    driver = ScriptedDriver(opening=asyncio.Event())
    async with harness(tmp_path, driver) as h:
        h.host.steering.append(message("/stop"))
        done = await h.run("one")
        assert done.terminal.type == "run.completed"
        assert driver.sessions == []


@pytest.mark.asyncio
async def test_a_run_cancelled_while_the_agent_starts_leaves_no_session(tmp_path: Path) -> None:
    """Our rule: what opens after all is closed by its installation, and the chat's next message is not blocked by it."""
    driver = ScriptedDriver(opening=asyncio.Event())
    async with harness(tmp_path, driver) as h:
        run = h.start("one")
        await _until(lambda: [action for action, _ in h.host.calls if action == "event_page"])
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        driver.opening = None
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]
        assert [session.closed.is_set() for session in driver.sessions] == [False]


@pytest.mark.asyncio
async def test_a_session_that_opens_although_its_run_was_cancelled_is_closed(tmp_path: Path) -> None:
    """Our rule: a driver that does not notice the cancellation leaves no orphan either."""
    gate = asyncio.Event()

    class Deaf(ScriptedDriver):
        async def open(self, spec: SessionSpec, launcher: object) -> ScriptedSession:
            opening = asyncio.ensure_future(super().open(spec, launcher))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({opening, asyncio.ensure_future(gate.wait())}, return_when=asyncio.ALL_COMPLETED)
            return await opening

    driver = Deaf()
    async with harness(tmp_path, driver) as h:
        run = h.start("one")
        await _until(lambda: driver.sessions)
        run.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert driver.sessions[0].closed.is_set()


@pytest.mark.asyncio
async def test_the_host_may_cancel_twice_and_the_ending_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDK fact: a second cancel can hit the cleanup; our rule: it belongs to the installation and is finished there."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.3)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script, stubborn=True)) as h:
        run = h.start("one")
        await script.working.wait()
        for _ in range(3):
            run.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.wait_for(h.driver.sessions[0].closed.wait(), 10)
        h.driver.script, h.driver.stubborn = echo, False
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]


@pytest.mark.asyncio
async def test_the_time_limit_also_counts_while_the_agent_starts(tmp_path: Path) -> None:
    """Our rule: the person hears of the limit whatever the run was waiting for."""
    driver = ScriptedDriver(opening=asyncio.Event())
    async with harness(tmp_path, driver) as h:
        done = await h.run("one", deadline=1.0)
        assert "coding.time_limit" in done.log
        assert driver.sessions == []


@pytest.mark.asyncio
async def test_an_answer_too_long_for_one_message_is_stored_in_the_workspace_and_named(tmp_path: Path) -> None:
    """Host fact: a surface that does not stream shows the last message only; our rule: nothing is lost."""
    whole = "\n\n".join(f"paragraph {number} " + "x" * 100 for number in range(100))

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(whole))
        return None

    async with harness(tmp_path, ScriptedDriver(script), reply_mode="single") as h:
        delivery = {"platform_capabilities": {"adapter": "TelegramAdapter"}, "surface": "platform", "automatic_reply": True}
        done = await h.run("one", delivery=delivery)
    files = list(tmp_path.glob("answer-*.md"))
    assert len(files) == 1
    assert whole in files[0].read_text()
    assert files[0].name in done.shown[-1]
    assert files[0].stat().st_mode & 0o077 == 0


@pytest.mark.asyncio
async def test_stop_as_a_message_of_its_own_stops_the_run_of_the_same_chat(tmp_path: Path) -> None:
    """Host fact: without steering (agent bots) it arrives as a run."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one", apis=("state",))
        await script.working.wait()
        assert "Only the person" in (await h.run("/stop", run_id="r2", actor="9")).text
        assert "Nothing is running" in (await h.run("/stop", run_id="r3", conversation="other")).text
        assert "Stopping" in (await h.run("/stop", run_id="r4")).text
        await run
        assert h.driver.sessions[0].interrupts == 1


@pytest.mark.asyncio
async def test_an_agent_that_ignores_the_cancel_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: after the grace only a new process can be trusted; the id is kept."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.2)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script, stubborn=True)) as h:
        run = h.start("one")
        await script.working.wait()
        h.host.steering.append(message("/stop"))
        await run
        assert h.driver.sessions[0].closed.is_set()
        assert list(h.host.state.values()) == [{"value": "scripted-1"}]


# ------------------------------------------------------------------ approvals and questions


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "answers", "told"),
    [("ask", ["no", "no"], 1), ("allow-edits", ["yes", "no"], 1), ("allow-all", ["yes", "yes"], 0)],
)
async def test_approvals_are_answered_by_policy_and_denials_told_once(
    tmp_path: Path, policy: str, answers: list[str], told: int
) -> None:
    """Our rule: where nobody can be asked, as in a run that names no chat, it is denied visibly; no standing grant."""
    given: list[Answer] = []

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        for name, kind in (("a", "edit"), ("b", "execute")):
            request = ApprovalRequested(name, f"Do {name}", kind, CHOICES, paths=(str(tmp_path / name),))  # type: ignore[arg-type]
            given.append(await session.ask(request))
        session.emit(TextDelta("done"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), approval_policy=policy) as h:
        done = await h.run("one", conversation="")
    assert [each.choice_id for each in given] == answers
    assert sum("denied" in text for text in done.shown) == told
    assert done.shown[-1] == "done"


@pytest.mark.asyncio
async def test_a_question_is_repeated_in_the_chat_and_cancelled(tmp_path: Path) -> None:
    """Our rule: where nobody can be asked the question is told, and the agent hears that it is not answered."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        answer = await session.ask(QuestionAsked("q", "Which port?"))
        session.emit(TextDelta("cancelled" if answer == Answer() else "answered"))
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        done = await h.run("one", conversation="")
    assert "Which port?" in done.text
    assert done.shown[-1] == "cancelled"


# ------------------------------------------------------------------ limits


@pytest.mark.asyncio
async def test_before_the_hosts_deadline_the_turn_ends_softly(tmp_path: Path) -> None:
    """Host fact: at the deadline nothing can be delivered any more; our rule: end before it, say which limit, go on later."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        done = await h.run("one", deadline=2.0)
        assert "working on one" in done.text
        assert '"timeout"' in done.text
        assert "coding.time_limit" in done.log
        h.driver.script = echo
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]
        assert len(h.driver.sessions) == 1


@pytest.mark.asyncio
async def test_silence_for_too_long_ends_the_turn(tmp_path: Path) -> None:
    """Our rule: the idle limit names its field."""
    async with harness(tmp_path, ScriptedDriver(Hanging()), idle_timeout=0.3) as h:
        done = await h.run("one")
        assert '"idle-timeout"' in done.text


@pytest.mark.asyncio
async def test_a_running_tool_is_not_silence(tmp_path: Path) -> None:
    """Our rule: the idle time is paused while a tool call is pending."""
    quiet = asyncio.Event()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(ToolStarted("t", "make"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quiet.wait(), 1.0)
        session.emit(ToolFinished("t", "completed"))
        session.emit(TextDelta("made"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), idle_timeout=0.3) as h:
        assert (await h.run("one")).shown == ["made"]


@pytest.mark.asyncio
async def test_after_an_approval_silence_counts_again(tmp_path: Path) -> None:
    """Our rule: an answered approval is not pending any more."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        await session.ask(ApprovalRequested("a", "Do a", "edit", CHOICES))
        await asyncio.Event().wait()
        return None

    async with harness(tmp_path, ScriptedDriver(script), idle_timeout=0.3, approval_policy="deny") as h:
        assert "coding.idle_limit" in (await h.run("one", deadline=60.0)).log


# ------------------------------------------------------------------ the end of a run


async def _cancelled(h: Harness, script: Hanging) -> None:
    stream = h.runner.invoke(h.context("one"))
    with pytest.raises(asyncio.CancelledError):

        async def consume() -> None:
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    pass

        task = asyncio.create_task(consume())
        await script.working.wait()
        task.cancel()
        await task


@pytest.mark.asyncio
async def test_a_cancelled_run_interrupts_its_turn_and_keeps_the_session(tmp_path: Path) -> None:
    """Our rule: a cancelled session is left consistent, and the cancellation is not swallowed."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        await _cancelled(h, script)
        assert h.driver.sessions[0].interrupts == 1
        assert len(installations.installation(None).warm) == 1
        h.driver.script = echo
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]


@pytest.mark.asyncio
async def test_a_cancelled_run_closes_a_session_that_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: never an orphan."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.2)
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script, stubborn=True)) as h:
        await _cancelled(h, script)
        assert h.driver.sessions[0].closed.is_set()
        assert (len(installations.installation(None).warm), installations.active_runs()) == (0, 0)


@pytest.mark.asyncio
async def test_revocation_ends_the_run_with_a_code_and_closes_its_session(tmp_path: Path) -> None:
    """SDK fact: a revoked installation's runs go on unless the plugin ends them."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one", binding=binding())
        await script.working.wait()
        await installations.revoke(binding())
        assert h.driver.sessions[0].closed.is_set()
        done = await run
        assert done.reason == "coding.revoked"
        assert "Reference: " in done.terminal.data["error"]


@pytest.mark.asyncio
async def test_a_run_that_still_asks_the_host_ends_with_its_installation(tmp_path: Path) -> None:
    """Our rule: what a message answers is found out by a run that can be revoked, too; no agent begins for it."""
    host = HoldingHost("state_get")
    async with harness(tmp_path, host=host) as h:
        run = h.start("1", binding=binding())
        async with asyncio.timeout(10):
            await host.called.wait()
            await installations.revoke(binding())
            done = await run
        assert done.reason == "coding.revoked"
        assert h.driver.sessions == []
        assert installations.active_runs() == 0


@pytest.mark.asyncio
async def test_revocation_leaves_another_installation_alone(tmp_path: Path) -> None:
    """Our rule: everything is keyed by the full binding."""
    script = Hanging()
    async with harness(tmp_path, ScriptedDriver(script)) as h:
        run = h.start("one", binding=binding("B"))
        await script.working.wait()
        await installations.revoke(binding("A"))
        assert not h.driver.sessions[0].closed.is_set()
        h.host.steering.append(message("/stop"))
        assert (await run).terminal.type == "run.completed"
        await installations.revoke(binding("B"))
        assert h.driver.sessions[0].closed.is_set()


@pytest.mark.asyncio
async def test_an_unexpected_error_shows_a_reference_and_never_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Our rule: exception text goes to the worker's log only."""
    async with harness(tmp_path, ScriptedDriver(open_error=ZeroDivisionError("canary-5d1f"))) as h:
        done = await h.run("one")
    sent = "\n".join(each.model_dump_json() for each in done.results)
    assert "coding.internal" in done.log
    assert "canary-5d1f" not in sent
    assert "canary-5d1f" in caplog.text


@pytest.mark.asyncio
async def test_an_unconfirmed_cleanup_is_told_and_never_a_success(tmp_path: Path) -> None:
    """Our rule: processes that may be left are said to be left."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.close_error = ProcessCleanupUnconfirmed("sshd went away", (4711,))
        session.emit(TextDelta("done"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), keep_warm=0) as h:
        done = await h.run("one")
        assert done.shown[0] == "done"
        assert "coding.cleanup_unconfirmed" in done.log
        assert done.reason == "error"
        h.driver.script = echo
        assert (await h.run("two", run_id="r2")).shown == ["echo: two"]


@pytest.mark.asyncio
async def test_an_unconfirmed_cleanup_in_the_background_is_told_in_the_next_run(tmp_path: Path) -> None:
    """Our rule: somebody is always told."""
    async with harness(tmp_path) as h:
        await h.run("one")
        session = h.driver.sessions[0]
        session.close_error = ProcessCleanupUnconfirmed("gone")
        session.die()
        [installation] = installations._installations.values()
        async with asyncio.timeout(10):
            # A session says that it is closed before its end is known.
            while not installation._unconfirmed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        done = await h.run("two", run_id="r2")
        assert len(done.shown) == 2
        assert "could not be confirmed" in done.shown[0]
        assert "Reference: " in done.shown[0]


@pytest.mark.asyncio
async def test_a_stream_that_ends_inside_a_turn_is_an_error_after_what_was_said(tmp_path: Path) -> None:
    """Our rule: whatever a driver does, the person gets an end."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta("half an ans"))
        session.die()
        return None

    async with harness(tmp_path, ScriptedDriver(script)) as h:
        done = await h.run("one")
        assert "half an ans" in done.shown[0]
        assert "coding.agent_died" in done.log
        assert h.driver.sessions[0].closed.is_set()


@pytest.mark.asyncio
async def test_an_agent_bot_is_answered_by_explicit_replies(tmp_path: Path) -> None:
    """Host fact: agent bots show nothing but replies."""
    tools = {"tools": [{"tool_name": "event_reply", "operations": ["call"]}]}
    async with harness(tmp_path) as h:
        done = await h.run("hi", automatic_reply=False, resources=tools)
        replies = [data["parameters"] for action, data in h.host.calls if action == "call_tool"]
    assert replies == [{"text": "echo: hi"}]
    assert done.terminal.type == "run.completed"


@pytest.mark.asyncio
async def test_a_reply_that_cannot_be_delivered_still_ends_the_run(tmp_path: Path) -> None:
    """Our rule: one terminal result, and the ledger knows, whatever the surface does."""
    async with harness(tmp_path) as h:
        h.host.failing.add("call_tool")
        done = await h.run("hi", automatic_reply=False, resources={"tools": [{"tool_name": "event_reply"}]})
        assert done.terminal
        assert "coding.reply_failed" in done.log


@pytest.mark.asyncio
async def test_a_process_left_by_a_helper_task_is_told(tmp_path: Path) -> None:
    """Our rule: an unconfirmed end is never lost, wherever it comes up."""

    class Leaky(ScriptedSession):
        async def answer(self, request_id: str, answer: Answer) -> bool:
            raise ProcessCleanupUnconfirmed("terminal")

    class Driver(ScriptedDriver):
        async def open(self, spec: SessionSpec, launcher: object) -> ScriptedSession:
            session = await super().open(spec, launcher)
            session.__class__ = Leaky
            return session

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(ApprovalRequested("a", "Do a", "edit", CHOICES))
        await asyncio.Event().wait()
        return None

    async with harness(tmp_path, Driver(script), approval_policy="deny") as h:
        done = await h.run("one")
        assert "coding.cleanup_unconfirmed" in done.log
        assert done.reason == "error"


# ------------------------------------------------------------------ LangBot's tools


def _bearer(session: ScriptedSession) -> str:
    return next(server.headers["Authorization"] for server in session.spec.mcp_servers if server.name == "langbot_agent")


@pytest.mark.asyncio
async def test_a_kept_session_keeps_its_address_and_loses_its_tools_between_runs(tmp_path: Path) -> None:
    """Our rule: an agent that cannot renew its servers has a stable address that answers for the current run only."""
    import aiohttp

    answers: list[str] = []

    async def call(session: ScriptedSession) -> str:
        server = session.spec.mcp_servers[0]
        body = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "langbot_get_current_event", "arguments": {}},
        }
        async with aiohttp.ClientSession() as client, client.post(server.url, json=body, headers=server.headers) as reply:
            return await reply.text()

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        answers.append(await call(session))
        session.emit(TextDelta("called"))
        return None

    async with harness(tmp_path, ScriptedDriver(script), langbot_assets_enabled=True) as h:
        await h.run("one", run_id="r1")
        between = await call(h.driver.sessions[0])
        await h.run("two", run_id="r2")
        assert len(h.driver.sessions) == 1
    assert "event-r1" in answers[0]
    assert "event-" not in between
    assert "event-r2" in answers[1]


@pytest.mark.asyncio
async def test_an_agent_that_can_renew_gets_a_bearer_per_run(tmp_path: Path) -> None:
    """Our rule: a run's bearer dies with the run."""
    async with harness(tmp_path, ScriptedDriver(renewable=True), langbot_assets_enabled=True) as h:
        await h.run("one")
        await h.run("two", run_id="r2")
        session = h.driver.sessions[0]
        renewed = session.renewed[0][0].headers["Authorization"]
        assert renewed != _bearer(session)


@pytest.mark.asyncio
async def test_secrets_of_the_form_reach_the_agent_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Our rule: no secret in results, log or host state."""
    caplog.set_level("DEBUG")
    async with harness(tmp_path, env_json='{"TOKEN": "${secret:KEY}"}') as h:
        h.runner.bind_runtime(plugin_runtime_handler=h.host, plugin_config={"agent-secret-values": '{"KEY": "canary-77aa"}'})  # type: ignore[no-untyped-call]
        done = await h.run("one")
        assert h.driver.sessions[0].spec.env == {"TOKEN": "canary-77aa"}
        sent = "\n".join(each.model_dump_json() for each in done.results)
        assert "canary-77aa" not in sent + caplog.text + repr(h.host.calls) + repr(h.driver.sessions[0].spec)
