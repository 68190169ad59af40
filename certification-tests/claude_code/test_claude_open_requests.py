"""What becomes of an open request of the program: each is answered once, whoever ends it, and the program sees which way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from claude_harness import ended, of, opened, poll, prompted, received, text, turn, until
from test_claude_permissions import COLOURS, ask

from agent import permissions, tools
from agent.session import ClaudeSession
from pkg.agent_api import Answer, ApprovalRequested, Notice, QuestionAsked, TurnEnded

pytestmark = pytest.mark.asyncio

COMMAND = ask("Bash", {"command": "touch made"})
QUESTION = ask("AskUserQuestion", COLOURS)
WITHDRAWN = {"behavior": "deny", "message": permissions.WITHDRAWN}


def answers(log: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every answer that the program received, by its request's id."""
    lines = [line["response"] for line in received(log) if line.get("type") == "control_response"]
    return [(line["request_id"], line["response"]) for line in lines]


async def closed(session: ClaudeSession) -> None:
    """The session is closed."""
    await session.close()


async def closed_by_a_cancelled_task(session: ClaudeSession) -> None:
    """Whoever closes the session is cancelled meanwhile."""
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def interrupted(session: ClaudeSession) -> None:
    """The turn is stopped."""
    await session.interrupt()


async def reader_cancelled(session: ClaudeSession) -> None:
    """The run that reads the events is cancelled, as by a deadline, and closes the session."""

    async def run() -> None:
        try:
            await until(session, TurnEnded)
        finally:
            await session.close()

    reading = asyncio.create_task(run())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("end", [closed, closed_by_a_cancelled_task, interrupted, reader_cancelled])
@pytest.mark.parametrize("step", [COMMAND, QUESTION])
async def test_what_ends_a_turn_denies_what_it_had_asked(
    tmp_path: Path, step: str, end: Callable[[ClaudeSession], Awaitable[None]]
) -> None:
    """Our rule: the program hears one denial that ends its turn, too; an answer that comes later counts for nothing."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, step)
        asked = (await until(session, ApprovalRequested, QuestionAsked))[-1]
        assert isinstance(asked, ApprovalRequested | QuestionAsked)
        await end(session)
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        assert ended(await until(session, TurnEnded)).stop_reason == "cancelled"
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        await poll(lambda: bool(answers(log)))
        assert answers(log) == [(asked.request_id, {**WITHDRAWN, "interrupt": True})]


async def test_what_is_open_at_the_end_of_a_turn_is_denied(tmp_path: Path) -> None:
    """Our rule: a program that ends its turn without waiting gets its answer all the same, and a late one is no answer."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, 'leave left-1 Bash {"command": "x"}', "say done")
        events = await until(session, TurnEnded)
        (asked,) = of(events, ApprovalRequested)
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        await poll(lambda: bool(answers(log)))
        assert answers(log) == [("left-1", WITHDRAWN)]


async def test_a_request_taken_back_is_told_and_not_answered(tmp_path: Path) -> None:
    """Vendor's rule: what is taken back needs no answer; ours: the turn goes on, and whoever asks people knows."""
    log, go = tmp_path / "log", tmp_path / "go"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, 'leave left-1 Bash {"command": "x"}', "take_back left-1", f"hold {go}", "say on")
        events = await until(session, Notice)
        while Notice("agent.request_withdrawn", "left-1") not in events:
            events += await until(session, Notice)
        assert not await session.answer("left-1", Answer("allow_once"))
        go.touch()
        assert text(await until(session, TurnEnded)).endswith("on")
        assert answers(log) == []


async def test_an_answer_counts_once_and_only_for_its_request(tmp_path: Path) -> None:
    """Our rule: the first answer is the answer; one to a request that nobody made is none."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, COMMAND)
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        assert not await session.answer("unknown", Answer("allow_once"))
        assert await session.answer(asked.request_id, Answer("reject_once", message="not today"))
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        assert text(await until(session, TurnEnded)) == "denied not today"
        assert answers(log) == [(asked.request_id, {"behavior": "deny", "message": "not today"})]


async def test_what_a_person_says_with_a_denial_reaches_the_program(tmp_path: Path) -> None:
    """Our rule: where a session says so, the words are the answer, whatever was denied."""
    async with opened(tmp_path) as session:
        assert session.capabilities.denial_reason
        steps = (COMMAND, QUESTION, ask("ExitPlanMode", {"plan": "1. do it"}), ask("mcp__x__y", {}))
        for step in steps:
            said = text(await turn(session, step, choose=lambda asked: Answer("reject_once", message="because of Monday")))
            assert said == "denied because of Monday"


async def test_a_command_is_shown_where_it_would_run(tmp_path: Path) -> None:
    """Vendor's rule: a shell that was moved stays there, and only a hook tells; ours: what is shown is that directory."""
    below = str(tmp_path / "below")
    async with opened(tmp_path) as session:
        events = await turn(session, f'ask_in {below} Bash {{"command": "rm -rf *"}}', COMMAND, choose="reject_once")
        moved, unmoved = of(events, ApprovalRequested)
        assert (moved.cwd, unmoved.cwd) == (below, session.directory)
        (leaving,) = of(await turn(session, ask("ExitPlanMode", {"plan": "1."}), choose="reject_once"), ApprovalRequested)
        assert leaving.cwd == session.directory


async def test_a_file_that_is_there_is_shown_as_overwritten(tmp_path: Path) -> None:
    """Our rule: a person sees what a new content replaces, where the workspace is here."""
    (tmp_path / "old.txt").write_text("precious")
    async with opened(tmp_path) as session:
        for name, before in (("old.txt", "precious"), ("new.txt", None)):
            step = ask("Write", {"file_path": str(tmp_path / name), "content": "x"})
            (asked,) = of(await turn(session, step, choose="reject_once"), ApprovalRequested)
            assert [(diff.old_text, diff.new_text) for diff in asked.diffs] == [(before, "x")]
            assert asked.complete


async def test_a_notebook_s_change_is_shown_as_it_was_given() -> None:
    """Our rule: it is whole and can be decided on, and no edit that a policy for edits would let pass."""
    given = {"notebook_path": "/w/n.ipynb", "cell_id": "c", "new_source": "print(1)"}
    asked = permissions.asked("r", {"tool_name": "NotebookEdit", "input": given}, None, "/w").event
    assert isinstance(asked, ApprovalRequested)
    assert json.dumps(given, separators=(",", ":")) in asked.command and asked.complete and asked.kind == "edit"


async def test_a_question_takes_other_words_than_its_options() -> None:
    """Vendor's rule: an answer is any text."""
    asked = permissions.asked("r", {"tool_name": tools.ASK, "input": COLOURS}, None, "/w")
    assert isinstance(asked.event, QuestionAsked) and all(each.custom for each in asked.event.fields)
    answer = permissions.response(asked, Answer(values={"q1": "something greenish"}))
    assert answer["updatedInput"]["answers"] == {"Which colour?": "something greenish"}
