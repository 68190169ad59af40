"""Turns of the Claude Code driver against the scripted program: text, tools, steering, cancelling, errors, endings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from claude_harness import (
    codes,
    ended,
    of,
    opened,
    poll,
    prompted,
    received,
    requests,
    rest,
    saying,
    spec,
    text,
    turn,
    until,
)

from agent.command import ASKED
from agent.driver import ClaudeCodeDriver
from agent.session import ClaudeSession
from agent.turns import State
from pkg import limits
from pkg.agent_api import (
    Answer,
    ApprovalRequested,
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
from pkg.errors import AgentDied, CodingError, LaunchError, SessionUnavailable, TurnInProgress
from pkg.launch import LocalLauncher
from testkit import hostile_trees

pytestmark = pytest.mark.asyncio

# ------------------------------------------------------------------ text


async def test_an_answer_is_told_once(tmp_path: Path) -> None:
    """Our rule: partial messages, the whole block and the result say the same; people read it once, in pieces."""
    async with opened(tmp_path) as session:
        events = await turn(session, "say The quick brown fox.")
        assert isinstance(events[0], SessionStarted) and events[0].session_id == session.session_id
        assert text(events) == "The quick brown fox."
        assert len(of(events, TextDelta)) >= 1
        assert ended(events) == TurnEnded("end_turn")
        again = await turn(session, "say Again.")
        assert text(again) == "Again." and ended(again).stop_reason == "end_turn"


async def test_a_block_that_did_not_stream_is_told_whole(tmp_path: Path) -> None:
    """Vendor's rule: a message that falls back from streaming comes as a whole block only."""
    async with opened(tmp_path) as session:
        assert text(await turn(session, "whole All at once.")) == "All at once."


async def test_messages_of_one_turn_have_ids_of_their_own(tmp_path: Path) -> None:
    """Our rule: text before and after a tool call are two messages, so that they are not glued together."""
    async with opened(tmp_path) as session:
        events = await turn(session, "say one", 'tool Bash {"command": "true"}', "say two")
        ids = [event.message_id for event in of(events, TextDelta)]
        assert text(events) == "onetwo" and len(set(ids)) == 2 and all(ids)


async def test_a_dropped_message_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Vendor's rule: after a dropped connection the message begins again; our rule: what was read is not repeated."""
    async with opened(tmp_path) as session:
        events = await turn(session, "drop 9 The quick brown fox.")
        assert text(events) == "The quick brown fox."
        assert len({event.message_id for event in of(events, TextDelta)}) == 1


async def test_a_dropped_message_that_comes_back_different_is_a_new_one(tmp_path: Path) -> None:
    """Our rule: what was read cannot be taken back, so another text is a message of its own, and whole."""
    async with opened(tmp_path) as session:
        events = await turn(session, "drop 9 The quick brown fox. | The slow turtle.")
        shown: dict[str, str] = {}
        for event in of(events, TextDelta):
            shown[event.message_id] = shown.get(event.message_id, "") + event.text
        assert list(shown.values()) == ["The quick", "The slow turtle."]


async def test_thoughts_are_no_answer(tmp_path: Path) -> None:
    """Vendor's rule: thinking comes twice, too; it is told once and never as text."""
    async with opened(tmp_path) as session:
        events = await turn(session, "think hmm", "say yes")
        assert "".join(event.text for event in of(events, ThoughtDelta)) == "hmm"
        assert text(events) == "yes"


async def test_a_sub_agent_speaks_for_itself(tmp_path: Path) -> None:
    """Our rule: the answer is the main conversation's; a sub-agent's tool calls are told like any other."""
    async with opened(tmp_path) as session:
        events = await turn(session, "sub secret musings", "say main")
        assert text(events) == "main"
        titles = [event.title for event in of(events, ToolStarted)]
        assert titles == ["Agent d", "echo in-sub"]
        assert {event.status for event in of(events, ToolFinished)} == {"completed"}


async def test_a_line_may_be_megabytes_long(tmp_path: Path) -> None:
    """Vendor's rule: a tool that writes 3 MB is one line of 3 MB."""
    async with opened(tmp_path) as session:
        events = await turn(session, "long_line 3000000", "say done")
        assert text(events) == "z" * 3_000_000 + "done"


async def test_what_is_no_message_is_skipped(tmp_path: Path) -> None:
    """Our rule: chatter, scalars, unknown kinds, broken text and a byte-order mark cost nothing but a count."""
    lines = ["raw warning: something", "raw [1, 2]", "raw 7", "raw {", 'raw {"type": 3}', "bytes efbbbf0d0a", "bytes ff0a"]
    async with opened(tmp_path, {"banner": ["hello there", ""]}) as session:
        events = await turn(session, *lines, 'line {"type": "from_the_future", "x": 1}', "say fine")
        assert text(events) == "fine"
        assert "agent.from_the_future" in codes(events)
        assert session._transport.noise_count == 7


async def test_a_message_nested_beyond_reason_is_skipped(tmp_path: Path) -> None:
    """Our rule: no message can exhaust the stack of whoever walks over it."""
    deep = '{"type":"assistant","message":' + '{"a":' * 5000 + "1" + "}" * 5001
    async with opened(tmp_path) as session:
        assert text(await turn(session, "raw " + deep, "say fine")) == "fine"


async def test_a_flood_is_held_back_and_whole(tmp_path: Path) -> None:
    """Our rule: an answer of many pieces is complete however slowly it is read."""
    async with opened(tmp_path) as session:
        await prompted(session, "flood 40000")
        await poll(lambda: session._events.full)
        events = await until(session, TurnEnded)
        assert len(text(events)) == 4_000_000


# ------------------------------------------------------------------ what goes to the program


async def test_the_users_text_is_inert(tmp_path: Path) -> None:
    """Vendor's rule: only ``client_composed`` keeps ``@path`` from being read and ``/commands`` from being run."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt("/clear @/etc/passwd", context="who writes"))
        await until(session, TurnEnded)
    (message,) = [line for line in received(log) if line.get("type") == "user"]
    assert message["client_composed"] is True and message["uuid"]
    framed, written = (block["text"] for block in message["message"]["content"])
    assert written == "/clear @/etc/passwd"
    assert "who writes" in framed and "not written by the user" in framed


async def test_the_program_is_started_for_an_untrusted_workspace(tmp_path: Path) -> None:
    """Vendor's rule: these arguments keep a workspace's settings, hooks and tool servers out, and make the program ask."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        argv, env = received(log)[0]["argv"], received(log)[0]["env"]
        assert argv[argv.index("--setting-sources") + 1] == "user"
        assert "--strict-mcp-config" in argv
        settings = {"crossSessionInbound": "refuse", "disableAllHooks": True, "permissions": {"ask": list(ASKED)}}
        assert json.loads(argv[argv.index("--settings") + 1]) == settings
        assert argv[argv.index("--permission-mode") + 1] == "default"
        assert f"--session-id={session.session_id}" in argv
        assert not any("skip-permissions" in item for item in argv)
        assert env["CLAUDE_CODE_DISABLE_AUTO_MEMORY"] == "1"


async def test_a_trusted_workspace_brings_its_own_settings(tmp_path: Path) -> None:
    """Our rule: ``trust-workspace`` means everything a terminal would load, so nothing is passed on by us."""
    (tmp_path / "CLAUDE.md").write_text("Always use tabs.")
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}, options={"trust_workspace": True}):
        argv = received(log)[0]["argv"]
        assert argv[argv.index("--setting-sources") + 1] == "user,project,local"
        assert "--strict-mcp-config" not in argv
        settings = {"crossSessionInbound": "refuse", "permissions": {"ask": list(ASKED)}}
        assert json.loads(argv[argv.index("--settings") + 1]) == settings
        assert "appendSystemPrompt" not in requests(log, "initialize")[0]


async def test_instructions_of_the_workspace_are_passed_on_as_text(tmp_path: Path) -> None:
    """Our rule: ``CLAUDE.md`` reaches an agent that does not trust the workspace, bounded, marked, and never by argv."""
    (tmp_path / "CLAUDE.md").write_text("Always use tabs. " + "x" * 100_000)
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "CLAUDE.md").symlink_to("/etc/passwd")
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}, system_prompt="Be brief."):
        prompt = requests(log, "initialize")[0]["appendSystemPrompt"]
        assert prompt.startswith("Be brief.") and "Always use tabs." in prompt and "<workspace-instructions>" in prompt
        assert "root:" not in prompt
        assert len(prompt) < limits.CLAUDE_INSTRUCTIONS_CHARS + 1000
        assert "tabs" not in " ".join(received(log)[0]["argv"])


async def test_settings_of_the_form_become_arguments(tmp_path: Path) -> None:
    """Vendor's rule: tool lists are variadic, so each is one argument."""
    log = tmp_path / "log"
    options = {
        "model": "opus",
        "permission_mode": "plan",
        "allowed_tools": ["Bash(git *)", "Read"],
        "disallowed_tools": ["WebFetch"],
        "max_turns": 7,
        "max_budget_usd": 1.5,
    }
    async with opened(tmp_path, {"log": str(log)}, options=options):
        argv = received(log)[0]["argv"]
    for name, value in (
        ("--model", "opus"),
        ("--permission-mode", "plan"),
        ("--allowedTools", "Bash(git *),Read"),
        ("--disallowedTools", "ListAgents,SendMessage,WebFetch"),
        ("--max-turns", "7"),
        ("--max-budget-usd", "1.5"),
    ):
        assert argv[argv.index(name) + 1] == value


async def test_a_key_reaches_the_program_and_not_its_environment(tmp_path: Path) -> None:
    """Vendor's rule: the program reads its key from a descriptor; so no command it runs can print it."""
    log = tmp_path / "log"
    env = {"ANTHROPIC_API_KEY": "sk-canary-key-1", "CLAUDE_CODE_OAUTH_TOKEN": "canary-oauth-2"}
    async with opened(tmp_path, {"log": str(log)}, env=env) as session:
        assert text(await turn(session, "descriptor CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR")) == "sk-canary-key-1"
        assert text(await turn(session, "descriptor CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR")) == "canary-oauth-2"
        assert text(await turn(session, "env ANTHROPIC_API_KEY")) == "ANTHROPIC_API_KEY="
        assert "canary" not in log.read_text()
        assert "canary" not in repr(session)


# ------------------------------------------------------------------ tools


async def test_a_tool_call_is_told_from_start_to_end(tmp_path: Path) -> None:
    """Our rule: a title people understand, a kind, the output, and what was changed."""
    changed = '{"filePath": "/w/a.py", "oldString": "two", "newString": "2", "originalFile": "one two"}'
    async with opened(tmp_path) as session:
        events = await turn(
            session,
            'tool Bash {"command": "ls -l"} a b c',
            'tool Edit {"file_path": "/w/a.py", "old_string": "two", "new_string": "2"} ' + changed,
            'tool mcp__langbot_agent__lookup {"query": "weather"} sunny',
            'tool Read {"file_path": "/w/b.py"} failed',
            "say ok",
        )
    started = {event.tool_call_id: event for event in of(events, ToolStarted)}
    finished = of(events, ToolFinished)
    assert [(started[each.tool_call_id].title, started[each.tool_call_id].kind, each.status) for each in finished] == [
        ("ls -l", "execute", "completed"),
        ("Edit /w/a.py", "edit", "completed"),
        ("langbot_agent: lookup weather", "other", "completed"),
        ("Read /w/b.py", "read", "failed"),
    ]
    assert finished[0].output == "a b c"
    (diff,) = finished[1].diffs
    assert (diff.path, diff.old_text, diff.new_text) == ("/w/a.py", "two", "2")


async def test_an_open_tool_call_ends_with_its_turn(tmp_path: Path) -> None:
    """Our rule: nothing keeps running on the screen after the answer."""
    async with opened(tmp_path) as session:
        events = await turn(session, "open_tool Bash", "say done")
        assert [event.status for event in of(events, ToolFinished)] == ["cancelled"]
        assert isinstance(events[-1], TurnEnded)


async def test_a_list_of_tasks_is_a_plan(tmp_path: Path) -> None:
    """Vendor's rule: ``TodoWrite`` carries the whole plan each time."""
    todos = '{"todos": [{"content": "look", "status": "completed"}, {"content": "fix", "status": "odd"}]}'
    async with opened(tmp_path) as session:
        (plan,) = of(await turn(session, f"tool TodoWrite {todos}"), PlanUpdated)
    assert [(entry.content, entry.status) for entry in plan.entries] == [("look", "completed"), ("fix", "pending")]


async def test_usage_is_that_of_the_turn(tmp_path: Path) -> None:
    """Vendor's rule: only ``model_usage_since_last_result`` is per turn; our rule: cost is told only when asked for."""
    async with opened(tmp_path) as session:
        (usage,) = of(await turn(session, "say hi"), UsageReported)
        assert usage == UsageReported(input_tokens=15, output_tokens=5, total_tokens=20, cached_input_tokens=3)
    async with opened(tmp_path, options={"show_cost": True}) as session:
        (usage,) = of(await turn(session, "say hi"), UsageReported)
        assert usage.cost == "0.2500 USD"


# ------------------------------------------------------------------ steering


async def test_a_message_during_a_tool_is_absorbed(tmp_path: Path) -> None:
    """Vendor's rule: it goes in behind the tool's result and is answered in the same result."""
    go = tmp_path / "go"
    async with opened(tmp_path) as session:
        await prompted(session, f'tool Bash {{"command": "x", "until": "{go}"}}', "say first")
        await until(session, ToolStarted)
        assert await session.steer(Prompt("say steered"))
        go.touch()
        events = await until(session, TurnEnded)
        assert [event.text for event in of(events, Notice) if event.code == "agent.steering"] == ["absorbed"]
        assert text(events) == "steeredfirst"
        assert ended(events).stop_reason == "end_turn"


async def test_a_message_during_an_answer_gets_its_own(tmp_path: Path) -> None:
    """Vendor's rule: it is answered after the result; our rule: the turn lasts until then and ends once."""
    go = tmp_path / "go"
    async with opened(tmp_path) as session:
        await prompted(session, f"holding {go} first")
        await saying(session, "first")
        assert await session.steer(Prompt("say second"))
        assert await session.steer(Prompt("say third"))
        go.touch()
        events = await until(session, TurnEnded)
        fates = [event.text for event in of(events, Notice) if event.code == "agent.steering"]
        assert fates == ["own_turn", "own_turn"]
        assert text(events) == "secondthird"
        assert ended(await turn(session, "say next")).stop_reason == "end_turn"


async def test_a_failure_before_a_further_answer_is_told(tmp_path: Path) -> None:
    """Our rule: an error does not vanish because the turn went on."""
    go = tmp_path / "go"
    async with opened(tmp_path) as session:
        await prompted(session, f"hold {go}", "error server_error 529 Overloaded")
        await poll(lambda: session.state is State.RUNNING)
        assert await session.steer(Prompt("say second"))
        go.touch()
        events = await until(session, TurnEnded)
        assert "coding.claude_service_busy" in codes(events)
        assert text(events) == "second" and ended(events).stop_reason == "end_turn"


async def test_nothing_can_be_put_into_no_turn(tmp_path: Path) -> None:
    """Our rule: where nothing runs the message becomes the next turn."""
    async with opened(tmp_path) as session:
        assert not await session.steer(Prompt("say lost"))
        await turn(session, "say hi")
        assert not await session.steer(Prompt("say lost"))


async def test_a_program_that_tells_no_lifecycles_is_believed_when_idle(tmp_path: Path) -> None:
    """Vendor's rule: earlier versions told only their state, or nothing but results."""
    for config in ({"lifecycle": False}, {"lifecycle": False, "states": False}):
        async with opened(tmp_path, config) as session:
            for words in ("one", "two"):
                events = await turn(session, f"say {words}")
                assert text(events) == words and ended(events).stop_reason == "end_turn"


# ------------------------------------------------------------------ work nobody asked for


async def test_work_after_the_answer_is_delivered_with_the_next(tmp_path: Path) -> None:
    """Vendor's rule: background work makes an answer of its own; our rule: it is neither lost nor part of the next one."""
    go = tmp_path / "go"
    async with opened(tmp_path) as session:
        await turn(session, f"later {go} say the build is done", "say started")
        go.touch()
        await poll(lambda: "the build is done" in unread(session))
        events = await turn(session, "say hello")
        (late,) = [event for event in of(events, Notice) if event.code == "coding.late_text"]
        assert late.text == "the build is done"
        assert text(events) == "hello"


def unread(session: ClaudeSession) -> str:
    """The answer text that nobody has read."""
    return text([entry.whole() for entry in session._events._events])


async def test_a_prompt_during_such_work_gets_its_own_end(tmp_path: Path) -> None:
    """Our rule: work nobody asked for ends no turn of ours, and what it goes on to say is no part of the answer."""
    go, more = tmp_path / "go", tmp_path / "more"
    async with opened(tmp_path) as session:
        await turn(session, f"later {go} halves {more} by itself |  and on", "say started")
        go.touch()
        await poll(lambda: "by itself" in unread(session))
        await prompted(session, "say asked")
        more.touch()
        events = await until(session, TurnEnded)
        assert [event.text for event in of(events, Notice) if event.code == "coding.late_text"] == ["by itself and on"]
        assert text(events) == "asked"
        assert ended(events).stop_reason == "end_turn"


# ------------------------------------------------------------------ cancelling


@pytest.mark.parametrize("during", ["text", "tool"])
async def test_a_turn_can_be_stopped(tmp_path: Path, during: str) -> None:
    """Vendor's rule: an interrupted turn is an error result full of diagnostics; ours: it is cancelled, nothing more."""
    never = tmp_path / "never"
    script = f"holding {never} words" if during == "text" else f'tool Bash {{"command": "x", "until": "{never}"}}'
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, script)
        await until(session, TextDelta if during == "text" else ToolStarted)
        await session.interrupt()
        await session.interrupt()
        events = await until(session, TurnEnded)
        assert ended(events) == TurnEnded("cancelled")
        assert "diagnostic" not in repr(events)
        assert len(requests(log, "interrupt")) == 1
        assert text(await turn(session, "say alive")) == "alive"


async def test_stopping_drops_what_waits(tmp_path: Path) -> None:
    """Vendor's rule: waiting messages would run next unless they are cancelled with it."""
    never = tmp_path / "never"
    async with opened(tmp_path) as session:
        await prompted(session, f"holding {never} words")
        await saying(session, "words")
        assert await session.steer(Prompt("say waiting"))
        await session.interrupt()
        assert not await session.steer(Prompt("say too late"))
        events = await until(session, TurnEnded)
        assert ended(events) == TurnEnded("cancelled")
        assert "waiting" not in text(events)
        assert "cancelled" in [event.text for event in of(events, Notice) if event.code == "agent.steering"]
        assert text(await turn(session, "say next")) == "next"


async def test_a_program_that_ignores_the_stop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: the turn still ends as cancelled, and no process is left."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.3)
    async with opened(tmp_path, {"interrupt": "ignore"}) as session:
        await prompted(session, f"hold {tmp_path / 'never'}")
        await session.interrupt()
        events = await rest(session)
        assert ended(events) == TurnEnded("cancelled")
        assert not session.alive


async def test_a_stop_that_is_never_answered_ends_no_later_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: once the stopped turn has ended, the stop is over, whatever became of the answer to it."""
    monkeypatch.setattr(limits, "CANCEL_GRACE", 0.5)
    go = tmp_path / "go"
    async with opened(tmp_path, {"interrupt": "mute"}) as session:
        await prompted(session, f"holding {tmp_path / 'never'} words")
        await saying(session, "words")
        await session.interrupt()
        assert ended(await until(session, TurnEnded)) == TurnEnded("cancelled")
        await prompted(session, "say begun", f"hold {go}", "say done")
        await saying(session, "begun")
        await poll(lambda: not session._cancellers)
        go.touch()
        events = await until(session, TurnEnded)
        assert ended(events) == TurnEnded("end_turn") and "done" in text(events)


async def test_stopping_nothing_does_nothing(tmp_path: Path) -> None:
    """Our rule: a stop that comes too late harms no later turn."""
    async with opened(tmp_path) as session:
        await session.interrupt()
        assert text(await turn(session, "say hi")) == "hi"


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("script", "code", "retryable"),
    [
        ("error authentication_failed - Not logged in · Please run /login", "coding.agent_login_required", False),
        ("error rate_limit 429 Too many", "coding.claude_service_busy", True),
        ("error server_error 529 Overloaded", "coding.claude_service_busy", True),
        ("error unknown - API Error: Connection refused", "coding.claude_unreachable", True),
        ("error billing_error 400 Credit balance is too low", "coding.claude_billing", False),
        ("error model_not_found 404 no such model", "coding.claude_model_unknown", False),
        ("error invalid_request 400 what is this", "coding.agent_error", False),
        (
            'result {"is_error": true, "terminal_reason": "prompt_too_long", "result": "long"}',
            "coding.claude_context_full",
            False,
        ),
        ('result {"is_error": true, "subtype": "error_max_budget_usd", "errors": ["x"]}', "coding.claude_budget", False),
        ('result {"is_error": true, "subtype": "error_during_execution", "errors": ["it broke"]}', "coding.agent_error", False),
    ],
)
async def test_an_error_is_one_readable_error(tmp_path: Path, script: str, code: str, retryable: bool) -> None:
    """Vendor's rule: ``subtype`` says success for API errors; ours: ``is_error`` decides, and the text is told once."""
    async with opened(tmp_path) as session:
        events = await turn(session, script)
        error = ended(events).error
        assert error is not None and (error.code, error.retryable) == (code, retryable)
        assert text(events) == ""
        assert text(await turn(session, "say alive")) == "alive"


async def test_a_missing_sign_in_says_what_to_run_where(tmp_path: Path) -> None:
    """Our rule: the command and the machine; with a key in the form the key is what is wrong."""
    async with opened(tmp_path) as session:
        error = ended(await turn(session, "error authentication_failed 401 Invalid")).error
        assert error is not None and error.params["command"] == "claude auth login"
        assert "@" in error.params["machine"]
    async with opened(tmp_path, env={"ANTHROPIC_API_KEY": "sk-canary-key-9"}) as session:
        error = ended(await turn(session, "error authentication_failed 401 bad sk-canary-key-9")).error
        assert error is not None and error.code == "coding.claude_key_refused" and "canary" not in repr(error)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('result {"is_error": true, "subtype": "error_max_turns", "errors": ["x"]}', "max_turn_requests"),
        ('result {"is_error": true, "stop_reason": "refusal", "result": "no"}', "refusal"),
        ('result {"stop_reason": "max_tokens"}', "max_tokens"),
        ('result {"stop_reason": "tool_use"}', "end_turn"),
    ],
)
async def test_a_turn_says_why_it_stopped(tmp_path: Path, script: str, reason: str) -> None:
    """Our rule: stop reasons people know; everything else that is no error is the end of the turn."""
    async with opened(tmp_path) as session:
        assert ended(await turn(session, "say hi", script)) == TurnEnded(reason)


async def test_people_are_told_when_the_service_does_not_answer(tmp_path: Path) -> None:
    """Vendor's rule: it tries ten times, for minutes; ours: the third attempt is told, once."""
    async with opened(tmp_path) as session:
        events = await turn(session, "retries 2", "say hi")
        assert "coding.claude_retrying" not in codes(events)
        events = await turn(session, "retries 6", "say hi")
        assert codes(events).count("coding.claude_retrying") == 1


# ------------------------------------------------------------------ sessions


async def test_a_stored_session_is_resumed(tmp_path: Path) -> None:
    """Vendor's rule: the id stays the same; ours: it can't become another argument."""
    log, known = tmp_path / "log", tmp_path / "known"
    known.mkdir()
    config = {"log": str(log), "sessions": str(known)}
    async with opened(tmp_path, config) as session:
        first = session.session_id
    async with opened(tmp_path, config, resume_session_id=first) as session:
        (started,) = of(await until(session, SessionStarted), SessionStarted)
        assert started == SessionStarted(first, resumed=True)
        assert f"--resume={first}" in received(log)[-2]["argv"]


@pytest.mark.parametrize("stored", ["11111111-2222-4333-8444-555555555555", "--dangerous", "a title"])
async def test_a_session_that_is_proven_missing_becomes_a_new_one(tmp_path: Path, stored: str) -> None:
    """Our rule: said, not silent; and an id that can be none of the program's is not asked for."""
    known = tmp_path / "known"
    known.mkdir()
    async with opened(tmp_path, {"sessions": str(known)}, resume_session_id=stored) as session:
        (started,) = of(await until(session, SessionStarted), SessionStarted)
        assert started == SessionStarted(session.session_id, resumed=False, lost_history=True)
        assert session.session_id != stored
    with pytest.raises(SessionUnavailable) as caught:
        wanted = spec(tmp_path, {"sessions": str(known)}, resume_session_id=stored, create_if_missing=False)
        await ClaudeCodeDriver().open(wanted, LocalLauncher())
    assert caught.value.code == "coding.session_missing"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit 3", "coding.agent_exited"),
        ("kill", "coding.agent_exited"),
        ("refuse", "coding.session_unavailable"),
        ("hang", "coding.agent_start_timeout"),
    ],
)
async def test_a_session_that_cannot_be_resumed_is_kept(tmp_path: Path, how: str, code: str) -> None:
    """Our rule: whatever else goes wrong is an error of its own, and never a new session."""
    stored = "11111111-2222-4333-8444-555555555555"
    config = {"initialize": how, "stderr": "the program says why\n"}
    wanted = spec(tmp_path, config, resume_session_id=stored, initialize_timeout=1.0 if how == "hang" else 30.0)
    with pytest.raises(CodingError) as caught:
        await ClaudeCodeDriver().open(wanted, LocalLauncher())
    assert caught.value.code == code
    if how.startswith("exit"):
        assert "the program says why" in caught.value.detail


async def test_a_program_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Our rule: by name and with the places looked at, also where a key has to be handed over."""
    for env in ({}, {"ANTHROPIC_API_KEY": "sk-canary-key-1"}):
        with pytest.raises(LaunchError) as caught:
            await ClaudeCodeDriver().open(spec(tmp_path, command=("no-such-claude",), env=env), LocalLauncher())
        assert caught.value.code == "coding.agent_not_found"


async def test_what_a_session_cannot_do_is_refused(tmp_path: Path) -> None:
    """Our rule: one turn at a time, and none after the end."""
    session = await ClaudeCodeDriver().open(spec(tmp_path), LocalLauncher())
    try:
        await prompted(session, f"hold {tmp_path / 'never'}")
        with pytest.raises(TurnInProgress):
            await session.prompt(Prompt("say no"))
    finally:
        await session.close()
    with pytest.raises(AgentDied):
        await session.prompt(Prompt("say no"))
    await session.close()


async def test_other_options_of_the_form_are_taken_live_when_they_are_the_model_and_the_mode(tmp_path: Path) -> None:
    """Our rule: those two need no other process; what stands on the command line does."""
    options = {"model": "one", "max_turns": 3}
    async with opened(tmp_path, options=options) as session:
        assert await session.set_options({**options, "model": "two", "permission_mode": "plan"})
        await turn(session, "say hi")
        assert (session.model, session.permission_mode) == ("two", "plan")
        assert await session.set_options({"max_turns": 3})
        await turn(session, "say hi")
        assert session.permission_mode == "default"
        assert not await session.set_options({"max_turns": 4})


async def test_model_and_mode_change_while_it_lives(tmp_path: Path) -> None:
    """Vendor's rule: both are control requests; a mode it does not know is refused and changes nothing."""
    async with opened(tmp_path) as session:
        await session.set_model("other-2")
        await session.set_permission_mode("plan")
        await turn(session, "say hi")
        assert (session.model, session.permission_mode) == ("other-2", "plan")
        with pytest.raises(SessionUnavailable) as caught:
            await session.set_permission_mode("nonsense")
        assert caught.value.code == "coding.agent_setting_refused"
        assert session.permission_mode == "plan"
        assert await session.context_usage() == UsageReported(context_used=1234, context_size=200000)


async def test_a_reset_conversation_has_a_new_id(tmp_path: Path) -> None:
    """Vendor's rule: ``/clear`` changes the id; ours: it is told, so that it can be stored."""
    async with opened(tmp_path) as session:
        await until(session, SessionStarted)
        new = "99999999-2222-4333-8444-555555555555"
        events = await turn(session, f'line {{"type": "conversation_reset", "new_session_id": "{new}"}}', "say hi")
        assert of(events, SessionStarted) == [SessionStarted(new)] and session.session_id == new


# ------------------------------------------------------------------ endings


@pytest.mark.parametrize("how", ["exit 3", "kill", "close_output"])
@pytest.mark.parametrize("when", ["text", "tool"])
async def test_a_program_that_dies_ends_its_turn(tmp_path: Path, how: str, when: str) -> None:
    """Our rule: one end with an error that says what is known, and the stream is over."""
    async with opened(tmp_path) as session:
        await prompted(session, "say hi" if when == "text" else "open_tool Bash", how)
        events = await rest(session)
        error = ended(events).error
        assert error is not None
        expected = "coding.agent_output_closed" if how == "close_output" else "coding.agent_exited"
        assert error.code == expected and error.retryable
        if how == "exit 3":
            assert "the program says why" in error.detail and error.params["code"] == "3"
        assert [event.status for event in of(events, ToolFinished)] == (["cancelled"] if when == "tool" else [])
        assert not session.alive
        with pytest.raises(AgentDied):
            await session.prompt(Prompt("say more"))


async def test_a_program_that_dies_between_turns_ends_the_stream(tmp_path: Path) -> None:
    """Our rule: there is no turn to end, and nobody waits for ever."""
    go = tmp_path / "go"
    async with opened(tmp_path) as session:
        await turn(session, f"later {go} kill", "say hi")
        go.touch()
        assert of(await rest(session), TurnEnded) == []
        assert not session.alive


async def test_a_program_that_dies_while_it_asks_ends_its_turn(tmp_path: Path) -> None:
    """Our rule: a request nobody can answer any more is withdrawn with the turn."""
    async with opened(tmp_path) as session:
        await prompted(session, 'ask Bash {"command": "x"}')
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        assert session.state is State.REQUIRES_ACTION
        os.kill(session._process.pid, signal.SIGKILL)
        error = ended(await rest(session)).error
        assert error is not None and error.params["code"] == "SIGKILL"
        assert not await session.answer(asked.request_id, Answer("allow_once"))


@pytest.mark.parametrize("config", [{}, {"end_session": "ignore"}, {"end_session": "ignore", "ignore_eof": True}])
async def test_closing_leaves_nothing(tmp_path: Path, config: dict[str, object]) -> None:
    """Our rule: a child in a session of its own that ignores SIGTERM is gone as well, and so is a program that will not go."""
    pid, log = tmp_path / "pid", tmp_path / "log"
    async with opened(tmp_path, {**config, "log": str(log)}) as session:
        await turn(session, f"child {pid}", "say hi")
        pids = (int(pid.read_text()), session._process.pid)
        tree = {each: hostile_trees.start_time(each) for each in pids}
    assert hostile_trees.gone(tree, 5.0)
    assert len(requests(log, "end_session")) == 1, "it is asked to leave before it is made to"


async def test_closing_in_the_middle_of_a_turn_cancels_it(tmp_path: Path) -> None:
    """Our rule: the turn gets its end, and then the stream ends."""
    session = await ClaudeCodeDriver().open(spec(tmp_path), LocalLauncher())
    await prompted(session, f"hold {tmp_path / 'never'}")
    await session.close()
    assert ended(await rest(session)) == TurnEnded("cancelled")


async def test_a_cancelled_closing_goes_on(tmp_path: Path) -> None:
    """Our rule: whoever closes may be cancelled; the program is gone all the same when it returns."""
    session = await ClaudeCodeDriver().open(spec(tmp_path, {"end_session": "ignore"}), LocalLauncher())
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert session._closer is not None and session._closer.done()
    await session.close()


async def test_files_made_for_a_prompt_are_removed(tmp_path: Path) -> None:
    """Our rule: an attachment that became a file is gone with its session."""
    async with opened(tmp_path) as session:
        data = Attachment("file", "../../evil name.bin", "application/octet-stream", b"\x00\x01")
        await session.prompt(Prompt("say got it", (data,)))
        await until(session, TurnEnded)
        (placed,) = (tmp_path / ".langbot" / "attachments").iterdir()
        assert placed.name.endswith("evil_name.bin") and placed.read_bytes() == b"\x00\x01"
    assert not placed.exists()
