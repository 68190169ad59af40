"""Turns on a live ACP session: streaming, cancelling at every point, late output, failures, and the end of it all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest

from agent.driver import AcpDriver
from pkg import limits
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    Answer,
    ApprovalRequested,
    Notice,
    Prompt,
    QuestionAsked,
    SessionStarted,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    UsageReported,
)
from pkg.errors import AgentDied, TurnInProgress
from pkg.launch import LocalLauncher
from testkit import acp_harness as acp
from testkit import hostile_trees

PERMISSION = json.dumps(
    {
        "toolCall": {"toolCallId": "t", "title": "rm x", "kind": "execute", "rawInput": {"command": "rm x"}},
        "options": [
            {"optionId": "always", "name": "Always", "kind": "allow_always"},
            {"optionId": "once", "name": "Once", "kind": "allow_once"},
            {"optionId": "no", "name": "No", "kind": "reject_once"},
        ],
    }
)
TOOL = json.dumps(
    {"sessionUpdate": "tool_call", "toolCallId": "t1", "title": "long", "status": "in_progress", "rawInput": {"a": 1}}
)


def pids(text: str) -> dict[int, str]:
    """The processes a turn told about (``child=1 agent=2``), with their start times."""
    numbers = [int(word.partition("=")[2]) for word in text.split() if "=" in word]
    return {pid: hostile_trees.start_time(pid) for pid in numbers}


@pytest.mark.asyncio
async def test_a_turn_streams_in_order_and_ends_once(tmp_path: Path) -> None:
    """Protocol v1: the response to the prompt is the turn's end, with the usage it carries."""
    async with acp.opened(tmp_path) as session:
        assert session.alive
        events = await acp.turn(
            session,
            "think hm",
            "say one",
            "say  two",
            'usage {"inputTokens":3,"outputTokens":4,"totalTokens":7}',
            "stop max_tokens",
        )
        kinds = [SessionStarted, ThoughtDelta, TextDelta, UsageReported, TurnEnded]
        assert [kind for kind, _ in itertools.groupby(events, type)] == kinds
        assert acp.text(events) == "one two"
        assert [event for event in events if not isinstance(event, TextDelta)] == [
            SessionStarted("s-1"),
            ThoughtDelta("hm"),
            UsageReported(3, 4, 7),
            TurnEnded("max_tokens"),
        ]
    assert await acp.rest(session) == []
    assert not session.alive


@pytest.mark.asyncio
async def test_five_thousand_updates_arrive_in_order(tmp_path: Path) -> None:
    """Our rule: wire order is event order, also when the reader has to wait for its consumer."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, "many 5000")
        assert acp.text(events) == "".join(f"{number} " for number in range(5000))


@pytest.mark.asyncio
async def test_an_unknown_stop_reason_is_passed_on(tmp_path: Path) -> None:
    """Our rule: a turn that finished is finished, whatever the agent calls it (the library raises a validation error)."""
    async with acp.opened(tmp_path) as session:
        assert acp.ended(await acp.turn(session, "stop paused_for_thought")) == TurnEnded("paused_for_thought")
        assert acp.ended(await acp.turn(session, "say again")) == TurnEnded("end_turn")


@pytest.mark.asyncio
async def test_a_second_prompt_within_a_turn_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    """The driver's contract: ``TurnInProgress``."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("say a\nhang"))
        with pytest.raises(TurnInProgress):
            await session.prompt(Prompt("say b"))
        assert not await session.steer(Prompt("say c"))
        assert not await session.renew_mcp(())
        await session.interrupt()
        await acp.until(session, TurnEnded)


@pytest.mark.asyncio
async def test_an_abandoned_iterator_loses_no_event(tmp_path: Path) -> None:
    """The driver's contract: a new iterator continues where the last one stopped."""
    seen: list[AgentEvent] = []
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("many 500"))
        async with asyncio.timeout(acp.BOUND):
            while not seen or not isinstance(seen[-1], TurnEnded):
                waiting = asyncio.ensure_future(anext(aiter(session.events())))
                await asyncio.sleep(0)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    seen.append(await waiting)
        assert acp.text(seen) == "".join(f"{number} " for number in range(500))


# ------------------------------------------------------------------ cancelling


@pytest.mark.asyncio
@pytest.mark.parametrize("script", ["hang", "say a\nhang", f"update {TOOL}\nhang", f"say a\nperm {PERMISSION}\nhang"])
async def test_a_turn_is_cancelled_wherever_it_is_and_the_next_one_works(tmp_path: Path, script: str) -> None:
    """Our rule: before the first update, while streaming, in a tool, at a permission: one end, ``cancelled``."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(script))
        kinds = {"perm": ApprovalRequested, "upda": ToolStarted, "say ": TextDelta}
        seen = [await acp.until(session, kinds[line[:4]]) for line in script.split("\n") if line[:4] in kinds]
        await session.interrupt()
        await session.interrupt()
        events = [event for part in seen for event in part] + await acp.until(session, TurnEnded)
        assert acp.ended(events) == TurnEnded("cancelled")
        started = [event.tool_call_id for event in acp.of(events, ToolStarted)]
        assert [(event.tool_call_id, event.status) for event in acp.of(events, ToolFinished)] == [
            (tool, "cancelled") for tool in started
        ]
        assert session.alive
        assert acp.text(await acp.turn(session, "say next")) == "next"


@pytest.mark.asyncio
async def test_a_pending_permission_is_answered_with_cancelled(tmp_path: Path) -> None:
    """Protocol v1: on cancel the client answers every pending permission with ``cancelled``."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt(f"deaf\nperm {PERMISSION}"))
        (*_, request) = await acp.until(session, ApprovalRequested)
        await session.interrupt()
        events = await acp.until(session, TurnEnded)
        assert acp.text(events) == '{"outcome": {"outcome": "cancelled"}}'
        assert isinstance(request, ApprovalRequested)
        assert not await session.answer(request.request_id, Answer("once"))
    assert len(acp.received(log, "session/cancel")) == 1


@pytest.mark.asyncio
async def test_cancelling_without_a_turn_is_nothing_and_says_nothing_to_the_agent(tmp_path: Path) -> None:
    """Our rule: a late cancel must not hit the next prompt."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.interrupt()
        await acp.turn(session, "say a")
        await session.interrupt()
        assert acp.text(await acp.turn(session, "say b")) == "b"
    assert acp.received(log, "session/cancel") == []


@pytest.mark.asyncio
@pytest.mark.parametrize("last", ["stop end_turn", 'error [-32603, "Internal error", {"details": "aborted"}]'])
async def test_a_cancelled_turn_is_cancelled_whatever_the_agent_answers(tmp_path: Path, last: str) -> None:
    """Our rule: after ``interrupt`` a good end or an error of the agent is still ``cancelled``."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(f"deaf\n{last}\nsay a\nhang"))
        await acp.until(session, TextDelta)
        await session.interrupt()
        assert acp.ended(await acp.until(session, TurnEnded)) == TurnEnded("cancelled")
        assert session.alive


@pytest.mark.asyncio
async def test_an_agent_that_ignores_cancel_is_ended_with_its_tree(tmp_path: Path) -> None:
    """Our rule: after ``CANCEL_GRACE`` the process is ended; ``cancelled`` is told when nothing of it is left."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("deaf\nchild\nsleep_forever"))
        seen = await acp.until(session, TextDelta)
        processes = pids(acp.text(seen))
        assert all(processes.values())
        await session.interrupt()
        assert acp.ended(await acp.until(session, TurnEnded)) == TurnEnded("cancelled")
        assert hostile_trees.living(processes) == []
        assert not session.alive
        with pytest.raises(AgentDied):
            await session.prompt(Prompt("say a"))
        assert await acp.rest(session) == []


@pytest.mark.asyncio
async def test_closing_cancels_an_open_turn_first(tmp_path: Path) -> None:
    """Measured on real agents: cancel, then session/close, then end of input leaves no tool command behind."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt(f"say a\nperm {PERMISSION}\nhang"))
        await acp.until(session, ApprovalRequested)
        await session.close()
        assert acp.ended(await acp.rest(session)) == TurnEnded("cancelled")
    assert len(acp.received(log, "session/cancel")) == 1
    assert acp.received(log, "session/close") == [{"sessionId": "s-1"}]


@pytest.mark.asyncio
async def test_close_ends_everything_however_often_it_is_cancelled(tmp_path: Path) -> None:
    """Our rule: a cancelled ``close`` returns only when nothing is left, and then says that it was cancelled."""
    async with acp.opened(tmp_path, {"close": "hang", "ignore_eof": True}) as session:
        processes = pids(acp.text(await acp.turn(session, "child")))
        closing = asyncio.create_task(session.close())
        for _ in range(3):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert hostile_trees.living(processes) == []
        await session.close()


@pytest.mark.asyncio
async def test_a_cancelled_opening_leaves_no_process(tmp_path: Path) -> None:
    """Our rule: by the time ``open`` has ended, everything it started is gone (the suite looks for children)."""
    log = tmp_path / "log"
    opening = asyncio.create_task(
        AcpDriver().open(acp.spec(tmp_path, {"initialize": "hang", "log": str(log)}), LocalLauncher())
    )
    await acp.poll(lambda: bool(acp.received(log, "initialize")))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


# ------------------------------------------------------------------ late output


@pytest.mark.asyncio
async def test_text_right_before_the_response_belongs_to_the_turn_and_right_behind_it_does_not(tmp_path: Path) -> None:
    """Known agents' habit: updates after the response. The wire decides; late text is told before the next turn, apart."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, "after LATE", "say in time")
        assert acp.text(events) == "in time"
        await acp.buffered(session, 1)
        assert acp.text(await acp.until(session, TextDelta)) == "LATE"
        assert acp.text(await acp.turn(session, "say second")) == "second"


@pytest.mark.asyncio
async def test_late_text_nobody_read_becomes_one_notice_of_the_next_turn(tmp_path: Path) -> None:
    """Our rule: what came after a turn is neither lost nor part of the next answer."""
    async with acp.opened(tmp_path) as session:
        await acp.turn(session, "after LA", "after TE", f"after_update {TOOL}", "say x")
        late = await acp.following(session, lambda event: isinstance(event, ToolStarted))
        assert acp.text(late) == "LATE"
        await acp.turn(session, "after LA", "after TE", 'after_update {"sessionUpdate":"marker"}', "say x")
        await acp.buffered(session, 2)
        events = await acp.turn(session, "say next")
        assert acp.text(events) == "next"
        assert Notice("coding.late_text", "LATE", "warning", {"text": "LATE"}) in events


@pytest.mark.asyncio
async def test_nothing_is_heard_after_cancelled(tmp_path: Path) -> None:
    """Our rule: late output of a cancelled turn is dropped."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("after LATE\nsay a\nhang"))
        await acp.until(session, TextDelta)
        await session.interrupt()
        await acp.until(session, TurnEnded)
        assert acp.text(await acp.turn(session, "say next")) == "next"


# ------------------------------------------------------------------ failures


@pytest.mark.asyncio
async def test_a_failed_prompt_ends_the_turn_with_one_readable_error(tmp_path: Path) -> None:
    """Known agent's habit: Claude Agent tells an API failure as text and as the prompt's error."""
    async with acp.opened(tmp_path) as session:
        error = json.dumps([-32603, "Internal error: API Error: 400 fake 400", {"errorKind": "api"}])
        events = await acp.turn(session, f"error {error}", "say API Error: 400 fake 400")
        assert acp.text(events) == ""
        assert acp.ended(events).error == AgentError("coding.agent_error", "API Error: 400 fake 400")
        assert session.alive


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        ([-32603, "Internal error: fake 400", {"service": "session", "errorName": "APIError"}], "fake 400"),
        (
            [-32603, "Internal error", {"message": '{"error": {"message": "fake 400"}}', "codex_error_info": "other"}],
            "fake 400",
        ),
        ([-32603, "Internal error", {"details": "400 fake 400"}], "400 fake 400"),
        ([400, '{"error":{"type":"fake","message":"fake 400","code":400}}', None], "fake 400"),
        ([1001, "cannot start", None], "cannot start"),
        ([-32603, "Internal error", None], "Internal error"),
        ([-32603, "x" * 10_000, None], "x" * limits.ACP_ERROR_CHARS),
    ],
    ids=["opencode", "codex-zed", "qwen", "gemini", "codex-start", "bare", "endless"],
)
async def test_every_agents_way_to_fail_is_readable(tmp_path: Path, error: list[object], detail: str) -> None:
    """Known agents' habit: the sentence a person needs is in the message, in data.message, in data.details, or JSON in it."""
    async with acp.opened(tmp_path) as session:
        end = acp.ended(await acp.turn(session, "error " + json.dumps(error)))
        assert end == TurnEnded("error", AgentError("coding.agent_error", detail))


@pytest.mark.asyncio
async def test_an_error_object_as_the_whole_answer_is_an_error(tmp_path: Path) -> None:
    """Known agent's habit: codex-acp 2.6 ends such a turn with ``end_turn``."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, 'say {"error": {"type": "fake", "message": "fake 400", "code": 400}}')
        assert acp.text(events) == ""
        assert acp.ended(events) == TurnEnded("error", AgentError("coding.agent_error", "fake 400"))


@pytest.mark.asyncio
async def test_a_lost_sign_in_says_what_to_run_and_where(tmp_path: Path) -> None:
    """Protocol v1: -32000 means authentication required, also in the middle of a session."""
    async with acp.opened(tmp_path, {"name": "gemini-cli"}) as session:
        error = acp.ended(await acp.turn(session, 'error [-32000, "Authentication required", null]')).error
        assert error is not None
        assert error.code == "coding.agent_login_required"
        assert error.params["command"] == "gemini"
        assert error.params["machine"]


@pytest.mark.asyncio
async def test_secrets_of_the_session_are_in_no_error(tmp_path: Path) -> None:
    """Our rule: values of the environment and of MCP headers are removed from whatever the agent says."""
    env = {"SOME_API_KEY": "canary-environment-value"}
    async with acp.opened(tmp_path, env=env, mcp_servers=(acp.http_server(bearer="canary-bearer-value"),)) as session:
        said = "key canary-environment-value and canary-bearer-value"
        error = acp.ended(await acp.turn(session, "error " + json.dumps([-32603, said, None]))).error
        assert error is not None
        assert "canary" not in error.detail
        events = await acp.turn(session, f"complain {said}", "exit 3")
        error = acp.ended(events).error
        assert error is not None
        assert "canary" not in error.detail
        assert "key ***" in error.detail
        assert "canary" not in repr(session)


# ------------------------------------------------------------------ what goes along with a prompt


@pytest.mark.asyncio
async def test_host_text_is_a_block_of_its_own_and_the_preamble_comes_once(tmp_path: Path) -> None:
    """Our rule: text the host added is marked as such and kept apart from the person's."""
    async with acp.opened(tmp_path, system_prompt="be kind") as session:
        async with asyncio.timeout(acp.BOUND):
            await session.prompt(Prompt("blocks", context="weather: fine"))
        first = json.loads(acp.text(await acp.until(session, TurnEnded)))
        assert [block["text"] for block in first][-1] == "blocks"
        assert "be kind" in first[0]["text"]
        assert "weather: fine" in first[1]["text"]
        assert all(block["annotations"] == {"audience": ["assistant"]} for block in first[:2])
        second = json.loads(acp.text(await acp.turn(session, "blocks")))
        assert [block["text"] for block in second] == ["blocks"]


@pytest.mark.asyncio
async def test_a_question_is_asked_and_its_answer_typed(tmp_path: Path) -> None:
    """Protocol v1: elicitation/create in form mode."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "title": "Name"},
            "age": {"type": "integer"},
            "sure": {"type": "boolean", "default": False},
            "colour": {"type": "string", "oneOf": [{"const": "r", "title": "Red"}, {"const": "g", "title": "Green"}]},
            "many": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        },
        "required": ["name"],
    }
    params = json.dumps({"mode": "form", "message": "Who?", "requestedSchema": schema})
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(f"request elicitation/create {params}"))
        question = (await acp.until(session, QuestionAsked))[-1]
        assert isinstance(question, QuestionAsked)
        assert question.message == "Who?"
        assert [(item.name, item.type, item.required) for item in question.fields] == [
            ("name", "text", True),
            ("age", "number", False),
            ("sure", "boolean", False),
            ("colour", "select", False),
            ("many", "multiselect", False),
        ]
        assert question.fields[3].options == (("r", "Red"), ("g", "Green"))
        values = {"name": "Ann", "age": "7", "sure": "yes", "colour": "g", "many": ["a"]}
        assert await session.answer(question.request_id, Answer(values=values))
        answered = json.loads(acp.text(await acp.until(session, TurnEnded)))
        assert answered == {"action": "accept", "content": {**values, "age": 7, "sure": True}}
        await session.prompt(Prompt(f"request elicitation/create {params}"))
        question = (await acp.until(session, QuestionAsked))[-1]
        assert isinstance(question, QuestionAsked)
        await session.answer(question.request_id, Answer())
        assert json.loads(acp.text(await acp.until(session, TurnEnded))) == {"action": "cancel"}
        url = 'request elicitation/create {"mode":"url","message":"go","url":"https://example.org"}'
        assert json.loads(acp.text(await acp.turn(session, url))) == {"action": "decline"}
