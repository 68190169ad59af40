"""What becomes of an open request of an ACP agent: each is answered once, whoever ends it, and the agent sees which way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.session import AcpSession
from pkg.agent_api import Answer, ApprovalRequested, Prompt, QuestionAsked, TurnEnded
from testkit import acp_harness as acp

OPTIONS = [
    {"optionId": "once", "name": "Once", "kind": "allow_once"},
    {"optionId": "no", "name": "No", "kind": "reject_once"},
]
CALL = {"toolCallId": "t", "title": "touch made", "kind": "execute", "rawInput": {"command": "touch made"}}
FORM = {"mode": "form", "message": "Which?", "requestedSchema": {"properties": {"colour": {"type": "string"}}}}
CANCELLED: dict[str, Any] = {"outcome": {"outcome": "cancelled"}}
STEPS: dict[str, tuple[str, Any]] = {
    "permission": ("perm " + json.dumps({"toolCall": CALL, "options": OPTIONS}), CANCELLED),
    "question": ("request elicitation/create " + json.dumps(FORM), {"action": "cancel"}),
    "file": ("request fs/write_text_file ", -32800),
    "terminal": ('request terminal/create {"command": "touch", "args": ["made"]}', -32800),
}
"""What the agent asks, and what it is answered when nobody does: a result, or an error's code."""


def answers(log: Path) -> list[Any]:
    """The result, or the error's code, of every answer that the agent received to what it asked."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["result"] if "result" in line else line["error"]["code"] for line in lines if "method" not in line]


async def closed(session: AcpSession) -> None:
    """The session is closed."""
    await session.close()


async def closed_by_a_cancelled_task(session: AcpSession) -> None:
    """Whoever closes the session is cancelled meanwhile."""
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def interrupted(session: AcpSession) -> None:
    """The turn is stopped."""
    await session.interrupt()


async def reader_cancelled(session: AcpSession) -> None:
    """The run that reads the events is cancelled, as by a deadline, and closes the session."""

    async def run() -> None:
        try:
            await acp.until(session, TurnEnded)
        finally:
            await session.close()

    reading = asyncio.create_task(run())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [closed, closed_by_a_cancelled_task, interrupted, reader_cancelled])
@pytest.mark.parametrize("what", list(STEPS))
async def test_what_ends_a_turn_cancels_what_it_had_asked(
    tmp_path: Path, what: str, end: Callable[[AcpSession], Awaitable[None]]
) -> None:
    """Protocol v1: an open permission of a cancelled turn is answered ``cancelled``; ours: all else is, too, and once."""
    log, made = tmp_path / "log", tmp_path / "made"
    step, wanted = STEPS[what]
    if what == "file":
        step += json.dumps({"path": str(made), "content": "x"})
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt(step))
        asked = (await acp.until(session, ApprovalRequested, QuestionAsked))[-1]
        assert isinstance(asked, ApprovalRequested | QuestionAsked)
        await end(session)
        assert not await session.answer(asked.request_id, Answer("once"))
        assert acp.ended(await acp.until(session, TurnEnded)).stop_reason == "cancelled"
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        await acp.poll(lambda: bool(answers(log)))
        assert answers(log) == [wanted]
    assert not made.exists()


@pytest.mark.asyncio
async def test_what_is_open_at_the_end_of_a_turn_is_cancelled(tmp_path: Path) -> None:
    """Our rule: an agent that ends its turn without waiting gets its answer all the same, and a late one is no answer."""
    log = tmp_path / "log"
    params = {"sessionId": "s-1", "toolCall": CALL, "options": OPTIONS}
    line = json.dumps({"jsonrpc": "2.0", "id": "left", "method": "session/request_permission", "params": params}) + "\n"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt(f"raw {json.dumps(line)}\nsay done"))
        events = await acp.until(session, TurnEnded)
        for asked in acp.of(events, ApprovalRequested):
            assert not await session.answer(asked.request_id, Answer("once"))
        await acp.poll(lambda: bool(answers(log)))
        assert len(answers(log)) == 1
        assert answers(log)[0] in (CANCELLED, {"outcome": {"outcome": "selected", "optionId": "no"}})


@pytest.mark.asyncio
async def test_an_answer_counts_once_and_only_for_its_request(tmp_path: Path) -> None:
    """Our rule: the first answer is the answer; one to a request that nobody made is none."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        assert not session.capabilities.denial_reason
        await session.prompt(Prompt(STEPS["permission"][0]))
        (asked,) = acp.of(await acp.until(session, ApprovalRequested), ApprovalRequested)
        assert not await session.answer("unknown", Answer("once"))
        assert await session.answer(asked.request_id, Answer("no", message="not today"))
        assert not await session.answer(asked.request_id, Answer("once"))
        await acp.until(session, TurnEnded)
        assert answers(log) == [{"outcome": {"outcome": "selected", "optionId": "no"}}]


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["permission", "file", "terminal"])
async def test_an_action_is_shown_where_it_would_be_done(tmp_path: Path, what: str) -> None:
    """Our rule: a directory always stands there; each request offers one single grant and one single refusal."""
    step = STEPS[what][0] + (json.dumps({"path": str(tmp_path / "made"), "content": "x"}) if what == "file" else "")
    async with acp.opened(tmp_path) as session:
        (asked,) = acp.of(await acp.turn(session, step, choose="reject_once"), ApprovalRequested)
        assert asked.cwd == session.directory
        assert {"allow_once", "reject_once"} <= {choice.kind for choice in asked.choices}


def permission(**call: Any) -> str:
    """A step that asks for a call."""
    return "perm " + json.dumps({"toolCall": {"toolCallId": "t", **call}, "options": OPTIONS})


def update(**call: Any) -> str:
    """A step that tells of a call before it is asked for."""
    return "update " + json.dumps({"sessionUpdate": "tool_call", "toolCallId": "t", "status": "in_progress", **call})


def content(text: str) -> list[Any]:
    """A call's content of one text."""
    return [{"type": "content", "content": {"type": "text", "text": text}}]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("steps", "directory", "complete"),
    [
        ([permission(kind="execute", rawInput={"command": "x", "workdir": "sub"})], "sub", True),
        ([permission(kind="execute", rawInput={"command": "x", "cwd": "/elsewhere"})], "/elsewhere", True),
        (
            [update(kind="execute", rawInput={"command": "x", "workdir": "sub"}), permission(rawInput={"command": "x"})],
            "sub",
            True,
        ),
        ([permission(kind="execute", title="x", content=content("[in sub] (why [not])"))], "", False),
        ([permission(kind="execute", title="x", content=content("[in sub] (why)"))], "sub", True),
        ([permission(kind="execute", title="x", content=content("[in a] [in b]"))], "", False),
        ([permission(kind="execute", title="x", content=content("[current working directory /w] [background]"))], "/w", True),
        ([permission(kind="other", title="x", rawInput={"directory": "sub"})], "", True),
    ],
)
async def test_a_command_that_runs_elsewhere_is_shown_there(
    tmp_path: Path, steps: list[str], directory: str, complete: bool
) -> None:
    """Known agents' habits: OpenCode 1.18 names the directory before it asks, Gemini CLI 0.61 in words alone.

    What could be read in two ways is not whole, so it is not offered.
    """
    async with acp.opened(tmp_path) as session:
        (asked,) = acp.of(await acp.turn(session, *steps, choose="no"), ApprovalRequested)
        wanted = directory if directory.startswith("/") else str(Path(session.directory) / directory)
        assert (asked.cwd, asked.complete) == (wanted, complete)


@pytest.mark.asyncio
async def test_a_call_said_to_have_no_input_is_whole(tmp_path: Path) -> None:
    """Our rule: a tool's name is all of it then; where nothing was said of the input, something may be missing."""
    async with acp.opened(tmp_path) as session:
        said: dict[str, Any] = {"rawInput": {}}
        for call, whole in ((said, True), ({}, False)):
            step = permission(kind="other", title="mcp__files__clear", **call)
            (asked,) = acp.of(await acp.turn(session, step, choose="no"), ApprovalRequested)
            assert asked.complete is whole


@pytest.mark.asyncio
async def test_leaving_plan_mode_shows_the_plan(tmp_path: Path) -> None:
    """Our rule: what a person agrees to is the plan, not the question whether they do."""
    step = permission(kind="switch_mode", title="Ready to code?", rawInput={"plan": "1. do it"})
    async with acp.opened(tmp_path) as session:
        (asked,) = acp.of(await acp.turn(session, step, choose="no"), ApprovalRequested)
        assert (asked.kind, asked.command, asked.complete) == ("mode", "1. do it", True)


@pytest.mark.asyncio
@pytest.mark.parametrize(("policy", "told"), [("ask", True), ("allow-all", True), ("plan", False)])
async def test_an_agent_that_obeys_its_workspace_is_told_not_to(tmp_path: Path, policy: str, told: bool) -> None:
    """Known agent's habit: Claude Agent 0.49 runs hooks and servers of the workspace; not where our policy is to decide."""
    log = tmp_path / "log"
    config = {
        "log": str(log),
        "name": "@agentclientprotocol/claude-agent-acp",
        "new": {"modes": {"currentModeId": "plan", "availableModes": [{"id": "plan", "name": "Plan"}]}},
    }
    async with acp.opened(tmp_path, config, policy=policy):
        (params,) = acp.received(log, "session/new")
    assert ("_meta" in params) is told
    if told:
        assert params["_meta"]["claudeCode"]["options"]["settingSources"] == ["user"]
