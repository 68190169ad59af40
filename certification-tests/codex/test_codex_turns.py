"""Turns of the Codex driver on a scripted app-server: what is told, when a turn ends, and what never ends one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from codex_harness import (
    BOUND,
    ended,
    following,
    of,
    opened,
    poll,
    received,
    rest_of_turn,
    text,
    turn,
    until,
)

from pkg.agent_api import (
    Answer,
    Attachment,
    Notice,
    PlanUpdated,
    Prompt,
    SessionStarted,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    UsageReported,
)
from pkg.errors import AgentDied, TurnInProgress

pytestmark = pytest.mark.asyncio


class TestText:
    """The answer, once and whole."""

    async def test_a_message_is_told_in_pieces_and_once(self, tmp_path: Path) -> None:
        """Our rule: what came in pieces is not repeated at its item's end."""
        async with opened(tmp_path) as session:
            events = await turn(session, "say one two three")
        assert text(events) == "one two three"
        assert len(of(events, TextDelta)) >= 1
        assert ended(events) == TurnEnded("end_turn")

    @pytest.mark.parametrize("step", ["whole nothing before the end", "lonely nothing before the end"])
    async def test_a_message_that_came_whole_is_told(self, step: str, tmp_path: Path) -> None:
        """Our rule: no pieces, or only the summary in the turn's end, is no empty answer."""
        async with opened(tmp_path) as session:
            assert text(await turn(session, step)) == "nothing before the end"

    async def test_two_messages_have_names_of_their_own(self, tmp_path: Path) -> None:
        """Our rule: a second message of a turn starts another one."""
        async with opened(tmp_path) as session:
            events = await turn(session, "say first", "say second")
        names = list(dict.fromkeys(event.message_id for event in of(events, TextDelta)))
        assert len(names) == 2

    async def test_a_message_cut_by_an_interrupt_stays_as_it_was(self, tmp_path: Path) -> None:
        """Codex 0.171: a steered answer has pieces and no end of its item."""
        async with opened(tmp_path) as session:
            assert text(await turn(session, "cut half a", "say whole")) == "half awhole"

    async def test_commentary_is_no_part_of_the_answer(self, tmp_path: Path) -> None:
        """Codex marks what it says on the way; people read the answer."""
        async with opened(tmp_path) as session:
            events = await turn(session, "comment looking around", "final found it")
        assert text(events) == "found it"
        assert "looking around" in "".join(event.text for event in of(events, ThoughtDelta))

    async def test_a_turn_of_nothing_but_commentary_answers_with_its_last(self, tmp_path: Path) -> None:
        """Our rule: no answer is empty while something was said."""
        async with opened(tmp_path) as session:
            assert text(await turn(session, "comment early", "comment the last word")) == "the last word"

    async def test_reasoning_is_a_thought_once(self, tmp_path: Path) -> None:
        """Summaries come in pieces and again at their item's end."""
        async with opened(tmp_path) as session:
            events = await turn(session, "think hard", "say done")
        assert "".join(event.text for event in of(events, ThoughtDelta)) == "hard"
        assert text(events) == "done"


class TestTools:
    """Commands, file changes and the rest as tool calls."""

    async def test_a_command_is_shown_without_its_shell_and_with_its_output(self, tmp_path: Path) -> None:
        """Codex runs everything through a login shell, which says nothing to people."""
        async with opened(tmp_path) as session:
            events = await turn(session, "cmd ls -l => a.txt")
        (started,), (finished,) = of(events, ToolStarted), of(events, ToolFinished)
        assert (started.title, started.kind) == ("ls -l", "execute")
        assert (finished.status, finished.output) == ("completed", "a.txt")

    async def test_an_open_command_ends_with_its_turn(self, tmp_path: Path) -> None:
        """Our rule: every started tool call is finished at the latest before its turn's end, with what it printed."""
        async with opened(tmp_path) as session:
            events = await turn(session, "opencmd sleep => so far")
        (finished,) = of(events, ToolFinished)
        assert (finished.status, finished.output) == ("cancelled", "so far")
        assert events.index(finished) < events.index(ended(events))

    async def test_a_file_change_has_its_diffs(self, tmp_path: Path) -> None:
        """Added files come whole, changed ones as hunks; each hunk is a diff of its lines."""
        hunks = "@@ -1,2 +1,2 @@\n a\n-b\n+c\n@@ -9 +9 @@\n-x\n+y\n"
        changes = [
            {"path": "/w/new.txt", "kind": {"type": "add"}, "diff": "hello\n"},
            {"path": "/w/old.txt", "kind": {"type": "update", "move_path": None}, "diff": hunks},
            {"path": "/w/gone.txt", "kind": {"type": "delete"}, "diff": "was\n"},
        ]
        async with opened(tmp_path) as session:
            events = await turn(session, f"patch {json.dumps(changes)}", choose="accept")
        (finished,) = of(events, ToolFinished)
        assert [(diff.path, diff.old_text, diff.new_text) for diff in finished.diffs] == [
            ("/w/new.txt", None, "hello\n"),
            ("/w/old.txt", "a\nb\n", "a\nc\n"),
            ("/w/old.txt", "x\n", "y\n"),
            ("/w/gone.txt", "was\n", ""),
        ]
        assert not finished.truncated
        assert [event.code for event in of(events, Notice)] == ["agent.turn_diff"]

    async def test_the_plan_replaces_the_one_before(self, tmp_path: Path) -> None:
        """``turn/plan/updated`` is the whole plan."""
        plan = [{"step": "look", "status": "completed"}, {"step": "act", "status": "inProgress"}, {"step": "rest"}]
        async with opened(tmp_path) as session:
            events = await turn(session, f"notify turn/plan/updated {json.dumps({'plan': plan})}")
        (update,) = of(events, PlanUpdated)
        assert [entry.status for entry in update.entries] == ["completed", "in_progress", "pending"]

    @pytest.mark.parametrize("kind", ["newThing", "subAgentActivity"])
    async def test_an_item_nobody_knows_is_a_notice(self, kind: str, tmp_path: Path) -> None:
        """Several releases a week: an unknown kind is kept and breaks nothing."""
        item = {"item": {"type": kind, "id": "x", "detail": "kept"}}
        async with opened(tmp_path) as session:
            events = await turn(session, f"notify item/completed {json.dumps(item)}", "say fine")
        assert text(events) == "fine"
        assert any(event.code == f"agent.item_{kind}" and "kept" in event.text for event in of(events, Notice))


class TestUsage:
    """What a turn cost is the difference of the thread's totals."""

    async def test_a_turn_costs_what_all_its_requests_add(self, tmp_path: Path) -> None:
        """``last`` is one model request's; a turn has many."""
        async with opened(tmp_path) as session:
            first = await turn(session, "tokens 100 10", "tokens 50 5")
            second = await turn(session, "tokens 7 3")
        assert of(first, UsageReported) == [UsageReported(150, 15, 165, 2, 55, 1000)]
        assert of(second, UsageReported) == [UsageReported(7, 3, 10, 1, 10, 1000)]

    async def test_a_resumed_thread_does_not_pay_for_its_past(self, tmp_path: Path) -> None:
        """Its totals begin where the past ended."""
        async with opened(tmp_path, {"known": ["t-1"], "base": 5000}, resume_session_id="t-1") as session:
            events = await turn(session, "tokens 100 10")
        assert of(events, UsageReported)[0].total_tokens == 110

    async def test_a_past_that_is_told_late_is_not_paid_for(self, tmp_path: Path) -> None:
        """Codex tells a resumed thread's totals, with its last turn's id, even after the next turn was asked for."""
        settings = {"known": ["t-1"], "base": 5000, "late_base": True}
        async with opened(tmp_path, settings, resume_session_id="t-1") as session:
            events = await turn(session, "tokens 100 10", "say heard")
            assert text(events) == "heard"
        assert of(events, UsageReported)[0].total_tokens == 110


class TestEnds:
    """A turn ends with ``turn/completed`` for its own id, and with nothing else."""

    async def test_an_idle_thread_ends_no_turn(self, tmp_path: Path) -> None:
        """Codex 0.171 tells that a thread is idle before it tells how its turn ended."""
        async with opened(tmp_path) as session:
            events = await turn(session, 'notify thread/status/changed {"status":{"type":"idle"}}', "say still here")
        assert text(events) == "still here"

    async def test_the_end_of_another_turn_ends_nothing(self, tmp_path: Path) -> None:
        """Neither of one that is over nor of one nobody started."""
        foreign = '{"method":"turn/completed","params":{"threadId":"$THREAD","turn":{"id":"other","status":"completed"}}}'
        elsewhere = '{"method":"turn/completed","params":{"threadId":"other","turn":{"id":"$TURN","status":"completed"}}}'
        async with opened(tmp_path) as session:
            events = await turn(session, f"send {foreign}", f"send {elsewhere}", "say still here")
            assert text(events) == "still here"
            again = await turn(session, f"send {foreign.replace('other', 'turn-1')}", "say again")
        assert text(again) == "again"

    async def test_what_comes_late_of_an_ended_turn_is_not_the_next_one_s(self, tmp_path: Path) -> None:
        """A command that outlives its turn ends in the middle of another."""
        late = (
            '{"method":"item/agentMessage/delta","params":{"threadId":"$THREAD","turnId":"turn-1","itemId":"i","delta":"LATE"}}'
        )
        async with opened(tmp_path) as session:
            await turn(session, "say first")
            events = await turn(session, f"send {late}", "say second")
        assert text(events) == "second"

    async def test_other_threads_are_not_heard(self, tmp_path: Path) -> None:
        """Everything is routed by its thread."""
        other = '{"method":"item/agentMessage/delta","params":{"threadId":"o","turnId":"$TURN","itemId":"i","delta":"OTHER"}}'
        async with opened(tmp_path) as session:
            assert text(await turn(session, f"send {other}", "say mine")) == "mine"

    async def test_an_end_that_overtakes_the_answer_to_its_start_counts(self, tmp_path: Path) -> None:
        """Nothing relies on the order that one version has."""
        async with opened(tmp_path, {"early_end": True}) as session:
            assert text(await turn(session, "say quick")) == "quick"
            assert text(await turn(session, "say twice")) == "twice"

    async def test_a_refused_start_ends_the_turn_with_its_reason(self, tmp_path: Path) -> None:
        """And the session goes on."""
        async with opened(tmp_path) as session:
            end = ended(await turn(session, "refuse because of this"))
            assert end.error is not None
            assert (end.error.code, end.error.detail) == ("coding.agent_error", "because of this")
            assert text(await turn(session, "say on")) == "on"

    async def test_one_turn_at_a_time(self, tmp_path: Path) -> None:
        """A second prompt is the caller's mistake and disturbs nothing."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"file {tmp_path / 'go'}\nsay done"))
            with pytest.raises(TurnInProgress):
                await session.prompt(Prompt("say no"))
            (tmp_path / "go").touch()
            assert text(await rest_of_turn(session)) == "done"

    @pytest.mark.parametrize(
        ("info", "code", "retryable"),
        [
            ('"contextWindowExceeded"', "coding.model_context_full", False),
            ('"usageLimitExceeded"', "coding.model_usage_limit", False),
            ('"rateLimitExceeded"', "coding.model_rate_limited", True),
            ('"serverOverloaded"', "coding.model_overloaded", True),
            ('"internalServerError"', "coding.model_overloaded", True),
            ('"modelNotFound"', "coding.model_unknown", False),
            ('"unauthorized"', "coding.agent_login_required", False),
            ('{"httpConnectionFailed":{"httpStatusCode":401}}', "coding.agent_login_required", False),
            ('{"httpConnectionFailed":{"httpStatusCode":null}}', "coding.model_unreachable", True),
            ('{"httpConnectionFailed":{"httpStatusCode":503}}', "coding.model_overloaded", True),
            ('{"httpConnectionFailed":{"httpStatusCode":400}}', "coding.agent_error", False),
            ('{"responseTooManyFailedAttempts":{"httpStatusCode":429}}', "coding.model_rate_limited", True),
            ('"somethingNew"', "coding.agent_error", False),
            ("null", "coding.agent_error", False),
            ("[1]", "coding.agent_error", False),
        ],
    )
    async def test_a_failure_is_told_in_words_a_person_can_act_on(
        self, info: str, code: str, retryable: bool, tmp_path: Path
    ) -> None:
        """``codexErrorInfo`` is a word or an object of one key; Codex's own text stands below, without addresses."""
        async with opened(tmp_path) as session:
            end = ended(await turn(session, f"fail {info} it broke, url: http://127.0.0.1:9/v1"))
            assert end.stop_reason == "error"
            assert end.error is not None
            assert (end.error.code, end.error.retryable) == (code, retryable)
            assert end.error.detail == "it broke"
            assert text(await turn(session, "say on")) == "on"

    @pytest.mark.parametrize("status", ["completed", "somethingNew"])
    async def test_an_end_nobody_knows_is_passed_on(self, status: str, tmp_path: Path) -> None:
        """A new word for an end ends the turn all the same."""
        foreign = json.dumps(
            {"method": "turn/completed", "params": {"threadId": "$THREAD", "turn": {"id": "$TURN", "status": status}}}
        )
        async with opened(tmp_path) as session:
            end = ended(await turn(session, f"send {foreign}"))
        assert end.stop_reason == ("end_turn" if status == "completed" else status)


class TestDeath:
    """The process ends in every state, and whoever waits hears of it."""

    @pytest.mark.parametrize("step", ["die 3", "say half\ndie 3", "opencmd x => y\ndie 3"])
    async def test_in_a_turn(self, step: str, tmp_path: Path) -> None:
        """Its open turn ends with the exit code and the last words; the stream ends."""
        async with opened(tmp_path) as session:
            events = await turn(session, *step.splitlines())
            end = ended(events)
            assert end.error is not None
            assert (end.error.code, end.error.params["code"]) == ("coding.agent_exited", "3")
            assert "told to die" in end.error.detail
            assert await following(session, lambda event: False) == []
            assert not session.alive
            with pytest.raises(AgentDied):
                await session.prompt(Prompt("say no"))

    async def test_while_an_approval_is_open(self, tmp_path: Path) -> None:
        """The request is withdrawn with its turn."""
        ask = '{"method":"item/commandExecution/requestApproval","id":77,"params":{"threadId":"$THREAD","turnId":"$TURN"}}'
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"send {ask}\nfile {tmp_path / 'go'}\ndie 4"))
            events = await following(session, lambda event: type(event).__name__ == "ApprovalRequested")
            (tmp_path / "go").touch()
            events = await until(session, TurnEnded)
            assert ended(events).stop_reason == "error"
            assert not await session.answer("0-1", Answer("accept"))

    async def test_while_a_turn_is_being_cancelled(self, tmp_path: Path) -> None:
        """A cancelled turn ends as cancelled, whatever happened to its process."""
        async with opened(tmp_path, {"deaf": ["turn/interrupt"]}) as session:
            await session.prompt(Prompt(f"touch {tmp_path / 'on'}\nfile {tmp_path / 'go'}\ndie 5"))
            await poll((tmp_path / "on").exists)
            await session.interrupt()
            (tmp_path / "go").touch()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")

    async def test_before_the_start_of_a_turn_is_answered(self, tmp_path: Path) -> None:
        """No turn hangs on an answer that never comes."""
        async with opened(tmp_path, {"deaf": ["turn/start"]}) as session:
            prompting = asyncio.create_task(session.prompt(Prompt("say nothing")))
            await asyncio.wait({prompting}, timeout=BOUND)
            await session.close()
            assert ended(await following(session, lambda event: False)).stop_reason == "cancelled"


class TestBounds:
    """However much comes, and however wrong."""

    async def test_noise_between_the_messages_is_skipped(self, tmp_path: Path) -> None:
        """Only messages count."""
        async with opened(tmp_path, {"chatter": ["npm warn", "{", "[]", "null", "\x1b[31mred"]}) as session:
            events = await turn(session, "raw not json", 'raw {"id":999,"result":{}}', 'raw {"id":"x","error":{}}', "say fine")
        assert text(events) == "fine"

    async def test_a_flood_is_told_whole(self, tmp_path: Path) -> None:
        """Tens of thousands of pieces, joined where they wait."""
        async with opened(tmp_path) as session:
            events = await turn(session, "flood 20000")
        assert len(text(events)) == 200_000

    async def test_a_message_of_megabytes_comes_whole(self, tmp_path: Path) -> None:
        """Codex 0.171 sends a large message as three lines of its size."""
        async with opened(tmp_path) as session:
            events = await turn(session, "big 5000000")
        assert len(text(events)) == 5_000_000

    async def test_a_line_over_the_limit_is_left_out_and_said(self, tmp_path: Path) -> None:
        """The connection and the turn live on."""
        async with opened(tmp_path) as session:
            events = await turn(session, f"bigline {64 * 1024 * 1024}", "say on")
        assert text(events) == "on"
        assert "coding.agent_line_truncated" in [event.code for event in of(events, Notice)]

    @pytest.mark.parametrize(
        "params",
        [
            {"itemId": 5, "delta": []},
            {"item": None},
            {"item": {"type": "commandExecution", "id": "x", "command": 7, "commandActions": "no", "changes": {}}},
            {"item": {"type": "fileChange", "id": "x", "changes": [1, {"path": None, "kind": "update", "diff": "?"}]}},
            {"item": {"type": "mcpToolCall", "id": "x", "arguments": [], "result": 1, "error": "no"}},
            {"tokenUsage": {"total": {"totalTokens": "many"}, "last": []}},
            {"plan": [1, {"step": 2}]},
            {"turn": "no"},
            {"error": [], "willRetry": True},
        ],
    )
    async def test_a_message_of_the_wrong_shape_breaks_nothing(self, params: dict[str, Any], tmp_path: Path) -> None:
        """Small tolerant models: what is missing or of another type becomes a default."""
        methods = [
            "item/started",
            "item/completed",
            "item/agentMessage/delta",
            "item/commandExecution/outputDelta",
            "item/fileChange/patchUpdated",
            "thread/tokenUsage/updated",
            "turn/plan/updated",
            "turn/completed",
            "error",
            "warning",
            "mcpServer/startupStatus/updated",
            "brand/new",
        ]
        async with opened(tmp_path) as session:
            events = await turn(session, *(f"notify {method} {json.dumps(params)}" for method in methods), "say fine")
        assert text(events) == "fine"


class TestRetries:
    """A model that cannot be reached."""

    async def test_a_retry_is_progress_and_no_failure(self, tmp_path: Path) -> None:
        """``willRetry`` says that Codex goes on."""
        async with opened(tmp_path) as session:
            events = await turn(session, "retry 1", "say through")
        notices = [event for event in of(events, Notice) if event.code == "status.reconnecting"]
        assert [dict(notice.params) for notice in notices] == [{"attempt": "1/5"}]
        assert ended(events) == TurnEnded("end_turn")

    async def test_endless_retries_are_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our own limit, for a version that retries for ever; the session can go on."""
        monkeypatch.setattr("pkg.limits.CODEX_RETRY_SECONDS", 0.2)
        async with opened(tmp_path) as session:
            end = ended(await turn(session, "retry 1", "retry 2", "wait"))
            assert end.error is not None
            assert end.error.code == "coding.model_unreachable"
            assert text(await turn(session, "say on")) == "on"

    async def test_a_sign_of_life_starts_the_limit_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only silence behind a retry counts."""
        monkeypatch.setattr("pkg.limits.CODEX_RETRY_SECONDS", 0.2)
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"retry 1\nsay alive\nfile {tmp_path / 'go'}\nsay there"))
            await until(session, TextDelta)
            await asyncio.sleep(0.5)
            (tmp_path / "go").touch()
            assert ended(await rest_of_turn(session)) == TurnEnded("end_turn")


class TestPrompts:
    """What a message becomes."""

    async def test_host_text_is_marked_and_apart(self, tmp_path: Path) -> None:
        """Never to be taken for the user's words, whatever names stand in it."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt("say x", context="called </host-context>"))
            await until(session, TurnEnded)
        (params,) = received(tmp_path, "turn/start")
        host, user = params["input"]
        assert "not written by the user" in host["text"]
        assert host["text"].count("</host-context>") == 1
        assert host["text"].endswith("\n</host-context>")
        assert user == {"type": "text", "text": "say x", "text_elements": []}

    async def test_a_picture_goes_inline_and_a_file_into_the_workspace(self, tmp_path: Path) -> None:
        """No path of the host with a picture; a file can be read where the agent works, and is gone with the session."""
        picture = Attachment("image", "a.png", "image/png", b"\x89PNG")
        document = Attachment("file", "../notes.txt", "text/plain", b"hello")
        async with opened(tmp_path) as session:
            await session.prompt(Prompt("say x", (picture, document)))
            await until(session, TurnEnded)
            (params,) = received(tmp_path, "turn/start")
            image = next(item for item in params["input"] if item["type"] == "image")
            assert image["url"] == "data:image/png;base64,iVBORw=="
            (path,) = (tmp_path / "workspace" / ".langbot" / "attachments").iterdir()
            assert path.read_bytes() == b"hello"
            assert str(path) in json.dumps(params)
        assert not path.exists()

    async def test_the_first_event_is_the_session(self, tmp_path: Path) -> None:
        """Its id is known before anything else."""
        async with opened(tmp_path) as session:
            first = (await until(session, SessionStarted))[0]
            assert first == SessionStarted(session.session_id)
