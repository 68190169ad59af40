"""What becomes of an open request of the app-server: each is answered once, whoever ends it, and Codex sees which way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from codex_harness import ended, log_of, of, opened, poll, rest_of_turn, text, until

from agent.session import CodexSession
from pkg.agent_api import Answer, ApprovalRequested, Notice, Prompt, QuestionAsked, TurnEnded

pytestmark = pytest.mark.asyncio

COMMAND = {"kind": "command", "command": "/bin/bash -lc 'touch f'", "commandActions": [{"type": "unknown"}]}
CHANGES = [{"path": "a.txt", "kind": {"type": "add"}, "diff": "x\n"}]
QUESTIONS = {"itemId": "i", "isBlocking": True, "questions": [{"id": "q", "header": "H", "question": "Which?", "options": []}]}
TOOL = {
    "serverName": "files",
    "mode": "form",
    "message": "Allow?",
    "requestedSchema": {"properties": {}},
    "_meta": {"codex_approval_kind": "mcp_tool_call", "tool_name": "write", "tool_params": {"path": "x"}},
}
STEPS = {
    f"approve {json.dumps(COMMAND)}": {"decision": "cancel"},
    f"patch {json.dumps(CHANGES)}": {"decision": "cancel"},
    f"request item/tool/requestUserInput {json.dumps(QUESTIONS)}": {"answers": {}},
    f"request mcpServer/elicitation/request {json.dumps(TOOL)}": {"action": "decline", "content": None, "_meta": None},
}
"""What the app-server asks, and the refusal of each."""


def answers(place: Path) -> list[Any]:
    """The result of every answer that the app-server received."""
    return [line["result"] for line in log_of(place) if "result" in line]


async def closed(session: CodexSession) -> None:
    """The session is closed."""
    await session.close()


async def closed_by_a_cancelled_task(session: CodexSession) -> None:
    """Whoever closes the session is cancelled meanwhile."""
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def interrupted(session: CodexSession) -> None:
    """The turn is stopped."""
    await session.interrupt()


async def reader_cancelled(session: CodexSession) -> None:
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
@pytest.mark.parametrize("step", list(STEPS), ids=["command", "files", "question", "tool"])
async def test_what_ends_a_turn_refuses_what_it_had_asked(
    step: str, end: Callable[[CodexSession], Awaitable[None]], tmp_path: Path
) -> None:
    """Codex hears one refusal of the right shape, before it is told to stop; a later answer counts for nothing."""
    async with opened(tmp_path) as session:
        await session.prompt(Prompt(f"{step}\nwait"))
        asked = (await until(session, ApprovalRequested, QuestionAsked))[-1]
        assert isinstance(asked, ApprovalRequested | QuestionAsked)
        await end(session)
        assert not await session.answer(asked.request_id, Answer("accept"))
        assert ended(await rest_of_turn(session)).stop_reason == "cancelled"
        assert not await session.answer(asked.request_id, Answer("accept"))
        await poll(lambda: bool(answers(tmp_path)))
        assert answers(tmp_path) == [STEPS[step]]
        told = [line for line in log_of(tmp_path) if "result" in line or line.get("method") == "turn/interrupt"]
        assert "result" in told[0]


async def test_what_is_open_at_the_end_of_a_turn_is_refused(tmp_path: Path) -> None:
    """An app-server that ends its turn without waiting gets its answer all the same, and a late one is no answer."""
    params = {**COMMAND, "threadId": "$THREAD", "turnId": "$TURN", "itemId": "c"}
    request = {"method": "item/commandExecution/requestApproval", "id": 55, "params": params}
    async with opened(tmp_path) as session:
        await session.prompt(Prompt(f"send {json.dumps(request)}\nsay done"))
        events = await until(session, TurnEnded)
        (asked,) = of(events, ApprovalRequested)
        assert not await session.answer(asked.request_id, Answer("accept"))
        await poll(lambda: bool(answers(tmp_path)))
        assert [(line["id"], line["result"]) for line in log_of(tmp_path) if "result" in line] == [
            (55, {"decision": "decline"})
        ]


async def test_a_request_taken_back_is_told_and_not_answered(tmp_path: Path) -> None:
    """What Codex says is resolved needs no answer; the turn goes on, and whoever asks people knows."""
    params = {**COMMAND, "threadId": "$THREAD", "turnId": "$TURN", "itemId": "c"}
    request = {"method": "item/commandExecution/requestApproval", "id": 55, "params": params}
    gone = {"method": "serverRequest/resolved", "params": {"threadId": "$THREAD", "requestId": 55}}
    async with opened(tmp_path) as session:
        await session.prompt(Prompt(f"send {json.dumps(request)}\nsend {json.dumps(gone)}\nsay on"))
        events = await until(session, TurnEnded)
        (asked,) = of(events, ApprovalRequested)
        assert Notice("agent.request_withdrawn", asked.request_id) in events
        assert not await session.answer(asked.request_id, Answer("accept"))
        assert text(events) == "on"
        assert answers(tmp_path) == []


async def test_an_answer_counts_once_and_only_for_its_request(tmp_path: Path) -> None:
    """The first answer is the answer; one to a request that nobody made is none."""
    async with opened(tmp_path) as session:
        await session.prompt(Prompt(f"approve {json.dumps(COMMAND)}"))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        assert not await session.answer("unknown", Answer("accept"))
        assert await session.answer(asked.request_id, Answer("decline", message="not today"))
        assert not await session.answer(asked.request_id, Answer("accept"))
        await rest_of_turn(session)
        assert answers(tmp_path) == [{"decision": "decline"}]


@pytest.mark.parametrize("step", list(STEPS), ids=["command", "files", "question", "tool"])
async def test_an_action_is_shown_where_it_would_be_done(step: str, tmp_path: Path) -> None:
    """The directory that Codex tells, else the thread's own; each offers one single grant and one single refusal at least."""
    async with opened(tmp_path) as session:
        await session.prompt(Prompt(step))
        asked = (await until(session, ApprovalRequested, QuestionAsked))[-1]
        if isinstance(asked, ApprovalRequested):
            assert asked.cwd == session.directory
            assert {"allow_once", "reject_once"} <= {choice.kind for choice in asked.choices}
        await session.interrupt()
        await rest_of_turn(session)
