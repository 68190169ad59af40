"""The real Claude Code 2.1.332, driven by our driver and with a loopback server for its model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from claude_harness import codes, ended, of, poll, prompted, saying, text, until
from claude_harness import turn as any_turn

from agent import command
from agent.driver import ClaudeCodeDriver
from agent.session import ClaudeSession
from pkg.agent_api import (
    AgentEvent,
    Answer,
    ApprovalRequested,
    Attachment,
    McpServer,
    Notice,
    Prompt,
    SessionSpec,
    SessionStarted,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    UsageReported,
)
from pkg.errors import AgentDied
from pkg.launch import LocalLauncher
from testkit import anthropic_fixture as model
from testkit import hostile_trees
from testkit.anthropic_fixture import AnthropicFixture
from testkit.model_fixture import KEY, Call

pytestmark = [pytest.mark.real_claude, pytest.mark.asyncio]

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)


class Place:
    """A home and a workspace for the real program, and the server it takes for its model."""

    def __init__(self, directory: Path, program: Path, fixture: AnthropicFixture) -> None:
        self.home, self.workspace = directory / "home", directory / "ws"
        self.home.mkdir()
        self.workspace.mkdir()
        (directory / "tmp").mkdir()
        self.program = program
        self.fixture = fixture
        self.env = {**fixture.environment(), "HOME": str(self.home), "TMPDIR": str(directory / "tmp")}

    def spec(self, **fields: Any) -> SessionSpec:
        """A session in the workspace."""
        env = {**self.env, **fields.pop("env", {})}
        return SessionSpec((str(self.program),), str(self.workspace), env=env, **fields)

    @contextlib.asynccontextmanager
    async def opened(self, **fields: Any) -> AsyncIterator[ClaudeSession]:
        """An open session, closed afterwards."""
        session = await ClaudeCodeDriver().open(self.spec(**fields), LocalLauncher())
        try:
            yield session
        finally:
            await session.close()


@pytest_asyncio.fixture
async def place(tmp_path: Path, claude_program: Path) -> AsyncIterator[Place]:
    """See :class:`Place`."""
    async with model.anthropic_fixture() as fixture:
        yield Place(tmp_path, claude_program, fixture)


async def turn(session: ClaudeSession, words: str, choose: Any = "allow_once") -> list[AgentEvent]:
    """One turn whose approvals are allowed unless said otherwise."""
    return await any_turn(session, words, choose=choose)


def said_by_user(place: Place) -> str:
    """What the newest model call got from the user."""
    messages = place.fixture.bodies[-1]["messages"]
    return json.dumps([message["content"] for message in messages if message["role"] == "user"])


# ------------------------------------------------------------------ text and sessions


async def test_two_turns_of_one_conversation(place: Place) -> None:
    """Vendor's rule: one process answers turn after turn and remembers; ours: each answer is told once."""
    async with place.opened() as session:
        events = await turn(session, "alpha [[ say The quick brown fox ]]")
        assert isinstance(events[0], SessionStarted)
        assert text(events) == "The quick brown fox"
        assert ended(events) == TurnEnded("end_turn")
        (usage,) = of(events, UsageReported)
        assert usage.output_tokens and usage.input_tokens and usage.cost == ""
        assert "alpha" in text(await turn(session, "beta [[ recall ]]"))
        assert session._transport.noise_count == 0


@pytest.mark.parametrize("words", ["/clear", "/cost", "@/etc/passwd", "look at @/etc/passwd please", "! ls", "# remember this"])
async def test_what_people_write_is_inert(place: Place, words: str) -> None:
    """Vendor's rule: only a message composed by a client is plain text; commands would run and files be sent otherwise."""
    async with place.opened() as session:
        before = session.session_id
        events = await turn(session, f"{words} [[ say plain ]]")
        assert text(events) == "plain" and session.session_id == before
        assert json.dumps(words)[1:-1] in said_by_user(place)
        assert "root:" not in json.dumps(place.fixture.bodies[-1])


async def test_a_session_is_resumed_with_its_history(place: Place) -> None:
    """Vendor's rule: the id stays; ours: other words for the system prompt count from then on, and stand on no command line."""
    async with place.opened(system_prompt="canary-system-one") as session:
        await turn(session, "the fruit is a quince [[ say noted ]]")
        first = session.session_id
        assert "canary-system-one" in json.dumps(place.fixture.bodies[-1]["system"])
        assert b"canary-system" not in Path(f"/proc/{session._process.pid}/cmdline").read_bytes()
    async with place.opened(resume_session_id=first, system_prompt="canary-system-two") as session:
        assert session.session_id == first
        events = await turn(session, "again [[ recall ]]")
        assert of(events, SessionStarted) == [SessionStarted(first, resumed=True)]
        assert "quince" in text(events)
        assert "canary-system-two" in json.dumps(place.fixture.bodies[-1]["system"])


async def test_a_session_that_is_gone_becomes_a_new_one(place: Place) -> None:
    """Vendor's rule: it says so and exits with 1; ours: a fresh session that is said to be one."""
    async with place.opened(resume_session_id="11111111-2222-4333-8444-555555555555") as session:
        events = await turn(session, "[[ say hello ]]")
        (started,) = of(events, SessionStarted)
        assert started.lost_history and started.session_id == session.session_id
        assert text(events) == "hello"


async def test_a_session_killed_in_a_tool_is_resumed(place: Place, tmp_path: Path) -> None:
    """Vendor's rule: the open call gets a result of its own; ours: no process of it is left, also none in its own session."""
    pid = tmp_path / "pid"
    script = f"[[ run echo $$ > {pid}; sleep 300 ]]"
    async with place.opened() as session:
        await session.prompt(Prompt(f"the fruit is a quince {script}"))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        await session.answer(asked.request_id, Answer("allow_once"))
        await poll(lambda: pid.exists() and pid.read_text().strip() != "")
        child = int(pid.read_text())
        tree = {child: hostile_trees.start_time(child)}
        os.kill(session._process.pid, signal.SIGKILL)
        error = ended(await until(session, TurnEnded)).error
        assert error is not None and error.params["code"] == "SIGKILL"
        first = session.session_id
    assert hostile_trees.gone(tree, 5.0)
    async with place.opened(resume_session_id=first) as session:
        assert "quince" in text(await turn(session, "again [[ recall ]]"))


async def test_sessions_side_by_side(place: Place) -> None:
    """Vendor's rule: several programs share one home; ours: each answers its own."""

    async def one(number: int) -> str:
        async with place.opened() as session:
            return text(await turn(session, f"[[ say number {number} ]]"))

    async with asyncio.timeout(60):
        assert await asyncio.gather(*map(one, range(3))) == [f"number {number}" for number in range(3)]


async def test_thinking_is_told_apart(place: Place) -> None:
    """Vendor's rule: thinking blocks stream before the text."""
    script = place.fixture.play(model.Answer((model.Thinking("let me see"), model.Text("yes"))))
    async with place.opened() as session:
        events = await turn(session, script)
        assert "".join(event.text for event in of(events, ThoughtDelta)) == "let me see" and text(events) == "yes"


async def test_pictures_and_files(place: Place) -> None:
    """Vendor's rule: pictures and PDF go to the model as they are; ours: another file is placed and named."""
    attachments = (
        Attachment("image", "dot.png", "image/png", PIXEL),
        Attachment("file", "data.bin", "application/octet-stream", b"\x00\x01"),
    )
    async with place.opened() as session:
        await session.prompt(Prompt("[[ say seen ]]", attachments))
        assert text(await until(session, TurnEnded)) == "seen"
    given = said_by_user(place)
    assert '"media_type": "image/png"' in given and ".langbot/attachments/" in given


# ------------------------------------------------------------------ the workspace


async def test_a_workspace_runs_nothing(place: Place) -> None:
    """Vendor's rule: hooks of a workspace run unasked; ours: not unless it is trusted, and its CLAUDE.md is passed on."""
    settings = place.workspace / ".claude"
    settings.mkdir()
    hook = {"hooks": [{"type": "command", "command": f"touch {place.workspace}/hooked"}]}
    (settings / "settings.json").write_text(json.dumps({"hooks": {"SessionStart": [hook], "UserPromptSubmit": [hook]}}))
    (place.workspace / "CLAUDE.md").write_text("The password of the kitchen is canary-claude-md.")
    (place.workspace / ".mcp.json").write_text(json.dumps({"mcpServers": {"evil": {"command": "touch", "args": ["served"]}}}))
    async with place.opened() as session:
        assert text(await turn(session, "[[ say hello ]]")) == "hello"
        assert "canary-claude-md" in json.dumps(place.fixture.bodies[-1])
    assert not (place.workspace / "hooked").exists() and not (place.workspace / "served").exists()
    async with place.opened(options={"trust_workspace": True}) as session:
        assert text(await turn(session, "[[ say hello ]]")) == "hello"
        assert "canary-claude-md" in json.dumps(place.fixture.bodies[-1])
    assert (place.workspace / "hooked").exists()


async def test_the_account_s_own_settings_count_without_their_hooks(place: Place) -> None:
    """Vendor's rule: a default mode of its own would skip permissions; ours: the mode is given, and hooks are off."""
    settings = place.home / ".claude"
    settings.mkdir()
    hook = {"hooks": [{"type": "command", "command": f"touch {place.workspace}/hooked"}]}
    permissions = {"defaultMode": "bypassPermissions", "deny": ["WebFetch"]}
    (settings / "settings.json").write_text(json.dumps({"hooks": {"SessionStart": [hook]}, "permissions": permissions}))
    async with place.opened() as session:
        events = await turn(session, "[[ run touch made ]]", choose="reject_once")
        assert len(of(events, ApprovalRequested)) == 1
        assert session.permission_mode == "default"
        assert "WebFetch" not in [tool["name"] for tool in place.fixture.bodies[-1]["tools"]]
    assert not (place.workspace / "hooked").exists() and not (place.workspace / "made").exists()


async def test_no_memory_is_shared_between_conversations(place: Place) -> None:
    """Vendor's rule: everybody in one directory would share a memory; ours: there is none."""

    async def told(**fields: Any) -> str:
        async with place.opened(**fields) as session:
            await turn(session, "[[ say hello ]]")
        return json.dumps(place.fixture.bodies[-1])

    assert "file-based memory" in await told(env={"CLAUDE_CODE_DISABLE_AUTO_MEMORY": ""})
    assert "file-based memory" not in await told()


async def test_conversations_do_not_reach_each_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vendor's rule: live programs of one account list and write to each other unasked; ours: they neither send nor take."""

    async def use(session: ClaudeSession, name: str, **given: str) -> str:
        script = place.fixture.play(model.call(name, **given), model.say("used"))
        return "".join(event.output for event in of(await turn(session, script), ToolFinished))

    async with place.opened() as first:
        await turn(first, "[[ say hello ]]")
        async with place.opened() as second:
            assert "No such tool" in await use(second, "ListAgents")
            assert "No such tool" in await use(second, "SendMessage", to="x", message="canary-crossing", summary="x")
        monkeypatch.setattr(command, "APART", ())
        async with place.opened() as foreign:
            listed = await use(foreign, "ListAgents")
            names = re.findall(r"^\s+(\S+) \[", listed, re.MULTILINE)
            for name in names:
                await use(foreign, "SendMessage", to=name, message="canary-crossing", summary="x")
        assert text(await turn(first, "[[ say next ]]")) == "next"
        assert "canary-crossing" not in json.dumps(place.fixture.bodies[-1]["messages"])


async def test_nothing_is_left_for_later_conversations_to_do(place: Place) -> None:
    """Vendor's rule: schedules are written into the workspace unasked, and any program there obeys them; ours: none."""
    script = place.fixture.play(
        model.call("CronCreate", cron="*/1 * * * *", prompt="canary-later", recurring=True, durable=True), model.say("done")
    )
    async with place.opened() as session:
        (finished,) = of(await turn(session, script), ToolFinished)
        assert finished.status == "failed" and "No such tool" in finished.output
    assert not list(place.workspace.rglob("*.json"))


async def test_a_key_stays_where_no_command_can_read_it(place: Place) -> None:
    """Vendor's rule: commands inherit the program's environment; ours: the key is not in it, nor on a command line or disk."""
    async with place.opened() as session:
        events = await turn(session, "[[ run env; cat /proc/$PPID/environ | tr '\\0' '\\n'; cat /proc/$PPID/cmdline ]]")
        assert KEY not in "".join(event.output for event in of(events, ToolFinished))
        assert KEY not in text(events)
        for process in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{session._process.pid}/{process}").read_bytes()
    written = [path for path in place.home.rglob("*") if path.is_file()]
    assert written and not any(KEY.encode() in path.read_bytes() for path in written)


# ------------------------------------------------------------------ acting


async def test_reading_is_not_asked_about_and_writing_is(place: Place) -> None:
    """Vendor's rule: the program lets read-only commands run by itself and asks for the others."""
    async with place.opened() as session:
        events = await turn(session, "[[ run echo hi; pwd ]]")
        assert of(events, ApprovalRequested) == [] and str(place.workspace) in text(events)
        events = await turn(session, "[[ run touch made ]]")
        (asked,) = of(events, ApprovalRequested)
        assert asked.command == "touch made" and (place.workspace / "made").exists()
        assert [choice.kind for choice in asked.choices] == ["allow_once", "allow_session", "reject_once"]


async def test_a_refusal_reaches_the_model(place: Place) -> None:
    """Vendor's rule: the turn goes on with an error as the tool's result."""
    async with place.opened() as session:
        events = await turn(session, "[[ run touch made ]]", choose=lambda asked: Answer(message="not on a Monday"))
        assert "not on a Monday" in text(events) and not (place.workspace / "made").exists()
        (finished,) = of(events, ToolFinished)
        assert finished.status == "failed"


async def test_for_this_session_holds_for_the_session(place: Place) -> None:
    """Vendor's rule: a rule of the session is asked about once; ours: no settings file is written."""
    async with place.opened() as session:
        await turn(session, "[[ run touch made ]]", choose="allow_session")
        assert of(await turn(session, "[[ run touch made ]]", choose="reject_once"), ApprovalRequested) == []
    assert not (place.workspace / ".claude").exists()
    assert not list(place.home.rglob("settings*.json"))


async def test_edits_carry_their_changes(place: Place) -> None:
    """Vendor's rule: the program reads before it edits; ours: the approval and the result show the change."""
    file = place.workspace / "a.txt"
    file.write_text("one two three")
    script = place.fixture.play(
        model.call("Read", file_path=str(file)),
        model.call("Edit", file_path=str(file), old_string="two", new_string="2"),
        model.say("edited"),
    )
    async with place.opened() as session:
        events = await turn(session, script)
        (asked,) = of(events, ApprovalRequested)
        assert asked.diffs[0].new_text == "2" and asked.command == "" and asked.paths == (str(file),)
        assert of(events, ToolFinished)[-1].diffs[0].old_text == "two"
        assert file.read_text() == "one 2 three"


async def test_three_megabytes_are_written(place: Place) -> None:
    """Vendor's rule: the call and its result are lines of 3 MB."""
    big = place.workspace / "big.txt"
    script = place.fixture.play(model.call("Write", file_path=str(big), content="z" * 3_000_000), model.say("written"))
    async with place.opened() as session:
        events = await turn(session, script)
        assert text(events) == "written" and big.stat().st_size == 3_000_000
        assert ended(events).stop_reason == "end_turn"


async def test_a_question_is_answered(place: Place) -> None:
    """Vendor's rule: an answer comes back to the model under the question's text."""
    question = {
        "question": "Which colour?",
        "header": "Colour",
        "options": [{"label": "Red", "description": "r"}, {"label": "Blue", "description": "b"}],
        "multiSelect": False,
    }
    script = place.fixture.play(model.call("AskUserQuestion", questions=[question]), model.say("thanks"))
    async with place.opened() as session:
        events = await turn(session, script, choose=lambda asked: Answer(values={"q1": "Blue"}))
        assert text(events) == "thanks"
        assert '"Which colour?"="Blue"' in of(events, ToolFinished)[0].output
        events = await turn(session, script, choose=lambda asked: Answer())
        assert of(events, ToolFinished)[0].status == "failed"


async def test_leaving_plan_mode_is_asked(place: Place) -> None:
    """Vendor's rule: in plan mode nothing is written before the plan is allowed."""
    script = place.fixture.play(model.call("ExitPlanMode", plan="1. do it"), model.say("off we go"))
    async with place.opened(options={"permission_mode": "plan"}) as session:
        events = await turn(session, script)
        (asked,) = of(events, ApprovalRequested)
        assert asked.kind == "mode" and asked.command == "1. do it"
        assert session.permission_mode == "default"


async def test_a_sub_agent_keeps_to_itself(place: Place) -> None:
    """Vendor's rule: a sub-agent's lines carry its parent's call; ours: its text is not the answer."""
    inner = "[[ run echo in-sub ;; say sub secret ]]"
    call = Call("Agent", {"description": "d", "prompt": inner, "subagent_type": "general-purpose", "run_in_background": False})
    script = place.fixture.play(model.Answer((call,)), model.say("main done"))
    async with place.opened() as session:
        events = await turn(session, script)
        assert text(events) == "main done"
        assert [event.title for event in of(events, ToolStarted)] == ["Agent d", "echo in-sub"]
        assert {event.status for event in of(events, ToolFinished)} == {"completed"}


async def test_model_and_mode_change_while_it_lives(place: Place) -> None:
    """Vendor's rule: both hold from the next step on, without another process."""
    async with place.opened() as session:
        await turn(session, "[[ say one ]]")
        await session.set_model("haiku")
        await session.set_permission_mode("acceptEdits")
        assert text(await turn(session, "[[ say two ]]")) == "two"
        assert "haiku" in session.model and session.permission_mode == "acceptEdits"
        assert "haiku" in place.fixture.bodies[-1]["model"]
        usage = await session.context_usage()
        assert usage.context_used and usage.context_size


# ------------------------------------------------------------------ steering and stopping


async def test_a_message_during_a_tool_is_absorbed(place: Place, tmp_path: Path) -> None:
    """Vendor's rule: it is put in behind the tool's result, and one result answers both."""
    go = tmp_path / "go"
    script = f"[[ run touch begun; while [ ! -e {go} ]; do sleep 0.05; done ;; say finished ]]"
    async with place.opened() as session:
        await session.prompt(Prompt(script))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        await session.answer(asked.request_id, Answer("allow_once"))
        await poll((place.workspace / "begun").exists)
        assert await session.steer(Prompt("canary-steered"))
        go.touch()
        events = await until(session, TurnEnded)
        assert [event.text for event in of(events, Notice) if event.code == "agent.steering"] == ["absorbed"]
        assert text(events) == "finished" and "canary-steered" in json.dumps(place.fixture.bodies[-1]["messages"])


async def test_messages_during_an_answer_get_their_own(place: Place, tmp_path: Path) -> None:
    """Vendor's rule: what waits is answered together, after the result; ours: the turn ends when all of it is answered."""
    go = tmp_path / "go"
    script = place.fixture.play(model.say("first answer", hold=go))
    async with place.opened() as session:
        await prompted(session, script)
        await saying(session, "first")
        assert await session.steer(Prompt("one more [[ say second ]]"))
        assert await session.steer(Prompt("and one more [[ say third ]]"))
        go.touch()
        events = await until(session, TurnEnded)
        assert [event.text for event in of(events, Notice) if event.code == "agent.steering"] == ["own_turn", "own_turn"]
        assert text(events).replace(" ", "") == "answerthird"
        assert text(await turn(session, "[[ say next ]]")) == "next"


async def test_an_answer_is_stopped(place: Place, tmp_path: Path) -> None:
    """Vendor's rule: an interrupted answer ends as an error with diagnostics; ours: cancelled, and the session goes on."""
    script = place.fixture.play(model.say("first word", hold=tmp_path / "never"))
    async with place.opened() as session:
        await prompted(session, script)
        await saying(session, "first")
        assert await session.steer(Prompt("[[ say never ]]"))
        await session.interrupt()
        events = await until(session, TurnEnded)
        assert ended(events) == TurnEnded("cancelled") and "never" not in text(events)
        assert text(await turn(session, "[[ say alive ]]")) == "alive"


async def test_a_command_is_stopped(place: Place) -> None:
    """Vendor's rule: an interrupt ends the command; ours: and it is gone."""
    pid = place.workspace / "pid"
    async with place.opened() as session:
        await session.prompt(Prompt("[[ run echo $$ > pid; sleep 300 ]]"))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        await session.answer(asked.request_id, Answer("allow_once"))
        await poll(lambda: pid.exists() and pid.read_text().strip() != "")
        tree = {int(pid.read_text()): hostile_trees.start_time(int(pid.read_text()))}
        await session.interrupt()
        events = await until(session, TurnEnded)
        assert ended(events) == TurnEnded("cancelled")
        assert [event.status for event in of(events, ToolFinished)][-1] in ("failed", "cancelled")
        assert await asyncio.to_thread(hostile_trees.gone, tree, 5.0)
        assert text(await turn(session, "[[ say alive ]]")) == "alive"


async def test_a_turn_stopped_at_once_is_over(place: Place) -> None:
    """Our rule: a stop that reaches the program before its turn has begun ends that turn, and no later one."""
    async with place.opened() as session:
        for _ in range(3):
            await prompted(session, "[[ say never mind ]]")
            await session.interrupt()
            assert ended(await until(session, TurnEnded)) == TurnEnded("cancelled")
        assert text(await turn(session, "[[ say alive ]]")) == "alive"


async def test_stopping_takes_a_question_back(place: Place) -> None:
    """Vendor's rule: the interrupt withdraws the permission that is waited for."""
    async with place.opened() as session:
        await session.prompt(Prompt("[[ run touch never ]]"))
        await until(session, ApprovalRequested)
        await session.interrupt()
        assert ended(await until(session, TurnEnded)) == TurnEnded("cancelled")
        assert not (place.workspace / "never").exists()
        assert text(await turn(session, "[[ say alive ]]")) == "alive"


# ------------------------------------------------------------------ background work and endings


async def test_background_work_reports_after_the_answer(place: Place) -> None:
    """Vendor's rule: a finished background command makes the program answer by itself; ours: told with the next answer."""
    go = place.workspace / "go"
    command = "touch begun; while [ ! -e go ]; do sleep 0.05; done"
    script = place.fixture.play(
        model.call("Bash", command=command, description="d", run_in_background=True),
        model.say("started"),
        model.say("the build is done"),
    )
    async with place.opened() as session:
        assert text(await turn(session, script)) == "started"
        go.touch()
        await poll(lambda: "is done" in text([entry.whole() for entry in session._events._events]))
        events = await turn(session, "[[ say hello ]]")
        assert [event.text for event in of(events, Notice) if event.code == "coding.late_text"] == ["the build is done"]
        assert text(events) == "hello"


@pytest.mark.parametrize("detached", [False, True])
async def test_closing_ends_background_work(place: Place, detached: bool) -> None:
    """Vendor's rule: a child in a session of its own survives the program; ours: not us."""
    inner = "echo $$ > pid; sleep 300"
    command = f"setsid sh -c '{inner}' </dev/null >/dev/null 2>&1 & sleep 0.1" if detached else inner
    script = place.fixture.play(
        model.call("Bash", command=command, description="d", run_in_background=not detached), model.say("started")
    )
    pid = place.workspace / "pid"
    async with place.opened() as session:
        await turn(session, script)
        await poll(lambda: pid.exists() and pid.read_text().strip() != "")
        child = int(pid.read_text())
        tree = {child: hostile_trees.start_time(child), session._process.pid: hostile_trees.start_time(session._process.pid)}
    assert hostile_trees.gone(tree, 5.0)


FOREGROUND = "echo $$ > pid; sleep 300"
COMMANDS = {
    "foreground": (FOREGROUND, False),
    "background": (FOREGROUND, True),
    "in a session of its own": ("setsid nohup sh -c 'echo $$ > pid; sleep 300' </dev/null >/dev/null 2>&1 & sleep 300", False),
}


@pytest.mark.parametrize("which", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
async def test_no_signal_leaves_a_process(place: Place, number: signal.Signals, which: str) -> None:
    """Vendor's rule: some of its commands survive it, by the signal and how they were started; ours: none survives us."""
    command, background = COMMANDS[which]
    script = place.fixture.play(
        model.call("Bash", command=command, description="d", run_in_background=background),
        model.say("started", hold=place.workspace / "never"),
    )
    pid = place.workspace / "pid"
    async with place.opened() as session:
        await session.prompt(Prompt(script))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        await session.answer(asked.request_id, Answer("allow_once"))
        await poll(lambda: pid.exists() and pid.read_text().strip() != "")
        pids = (int(pid.read_text()), session._process.pid)
        tree = {each: hostile_trees.start_time(each) for each in pids}
        os.kill(session._process.pid, number)
        end = ended(await until(session, TurnEnded))
        assert end.stop_reason == ("cancelled" if number is signal.SIGINT else "error")
    assert await asyncio.to_thread(hostile_trees.gone, tree, 5.0)


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, "invalid_request_error", "coding.agent_error"),
        (401, "authentication_error", "coding.claude_key_refused"),
        (429, "rate_limit_error", "coding.claude_service_busy"),
        (500, "api_error", "coding.claude_service_busy"),
        (529, "overloaded_error", "coding.claude_service_busy"),
    ],
)
async def test_an_error_of_the_service_is_one_readable_error(place: Place, status: int, error: str, code: str) -> None:
    """Vendor's rule: its prose comes as an answer; ours: one error with its class, and the session goes on."""
    script = place.fixture.play(model.refuse(status, error, "the fixture says no"))
    async with place.opened() as session:
        events = await turn(session, script)
        failure = ended(events).error
        assert failure is not None and failure.code == code, failure
        assert text(events) == "" and KEY not in repr(events)
        assert text(await turn(session, "[[ say alive ]]")) == "alive"


async def test_a_model_the_service_does_not_know(place: Place) -> None:
    """Vendor's rule: 404 with a sentence of its own; ours: the field to change."""
    script = place.fixture.play(*(model.refuse(404, "not_found_error", "model: nonsense") for _ in range(3)))
    async with place.opened(options={"model": "nonsense"}) as session:
        failure = ended(await turn(session, script)).error
        assert failure is not None and failure.code == "coding.claude_model_unknown", failure
        assert failure.params == {"field": "model"}


async def test_a_limit_of_cost_ends_a_turn(place: Place) -> None:
    """Vendor's rule: the program counts by itself and ends as an error; ours: the field to raise."""
    script = place.fixture.play(
        model.Answer((Call("Bash", {"command": "echo 1", "description": "d"}),), usage={"output_tokens": 1_000_000}),
        model.say("never"),
    )
    async with place.opened(options={"max_budget_usd": 0.01}) as session:
        failure = ended(await turn(session, script)).error
        assert failure is not None and failure.code == "coding.claude_budget"


async def test_a_message_too_long_for_any_model(place: Place) -> None:
    """Vendor's rule: 3 MB are not even sent; ours: one readable error, and the session goes on."""
    async with place.opened() as session:
        failure = ended(await turn(session, "x " * 1_500_000)).error
        assert failure is not None and failure.code == "coding.claude_context_full", failure


async def test_a_service_nobody_reaches(place: Place) -> None:
    """Vendor's rule: no status; ours: the network is named."""
    async with place.opened(env={"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}) as session:
        failure = ended(await turn(session, "hello")).error
        assert failure is not None and failure.code == "coding.claude_unreachable" and failure.retryable


async def test_without_a_sign_in_the_command_is_named(place: Place) -> None:
    """Vendor's rule: it asks for its own /login; ours: the command to run, and the machine to run it on."""
    del place.env["ANTHROPIC_API_KEY"]
    async with place.opened() as session:
        failure = ended(await turn(session, "hello")).error
        assert failure is not None and failure.code == "coding.agent_login_required"
        assert failure.params["command"] == "claude auth login"


async def test_a_prompt_too_long_for_the_model(place: Place) -> None:
    """Vendor's rule: the service's sentence ends the turn as ``prompt_too_long``."""
    refusal = model.refuse(400, "invalid_request_error", "prompt is too long: 1200000 tokens > 1000000 maximum")
    script = place.fixture.play(refusal, refusal, refusal)
    async with place.opened() as session:
        failure = ended(await turn(session, script)).error
        assert failure is not None and failure.code == "coding.claude_context_full"


async def test_a_dropped_answer_is_told_once(place: Place) -> None:
    """Vendor's rule: the answer begins again, in the end without streaming; ours: no word of it is told twice."""
    script = place.fixture.play(model.say("The quick brown fox", cut=True, times=1))
    async with place.opened() as session:
        assert text(await turn(session, script)) == "The quick brown fox"
    script = place.fixture.play(model.say("The quick brown fox", cut=True, times=2))
    async with place.opened() as session:
        assert text(await turn(session, script)) == "The quick brown fox"


async def test_limits_of_the_form_end_a_turn(place: Place) -> None:
    """Vendor's rule: too many steps are an error result; ours: a stop reason people know."""
    script = place.fixture.play(*(model.call("Bash", command=f"echo {n}", description="d") for n in range(5)))
    async with place.opened(options={"max_turns": 2}) as session:
        assert ended(await turn(session, script)) == TurnEnded("max_turn_requests")


async def test_a_setting_the_program_does_not_have(place: Place) -> None:
    """Vendor's rule: it leaves with 1 and a line on stderr; ours: that line is shown, and nothing is left."""
    spec = place.spec()
    spec = SessionSpec((*spec.command, "--no-such-option"), spec.cwd, env=spec.env)
    with pytest.raises(AgentDied) as caught:
        await ClaudeCodeDriver().open(spec, LocalLauncher())
    assert caught.value.code == "coding.agent_exited" and "--no-such-option" in caught.value.detail


async def test_a_refusal_is_a_stop_reason(place: Place) -> None:
    """Vendor's rule: one silent retry, then an error result; ours: the stop reason."""
    script = place.fixture.play(*(model.say("no", stop="refusal") for _ in range(4)))
    async with place.opened() as session:
        assert ended(await turn(session, script)).stop_reason == "refusal"


async def test_a_full_context_is_compacted(place: Place) -> None:
    """Vendor's rule: the program has the conversation summarised and goes on; ours: told as telemetry, not as text."""
    full = {"input_tokens": 990_000}
    first = place.fixture.play(model.say("nearly full", usage=full))
    async with place.opened() as session:
        assert text(await turn(session, first)) == "nearly full"
        events = await turn(session, "and now [[ say after the summary ]]")
        assert place.fixture.summaries >= 1
        assert "agent.compacted" in codes(events)
        assert text(events) == "after the summary" and ended(events).stop_reason == "end_turn"


# ------------------------------------------------------------------ tools


@contextlib.asynccontextmanager
async def tool_server(bearers: set[str]) -> AsyncIterator[tuple[str, list[str]]]:
    """An MCP server with one tool: local protocol fixture. Its address, and the bearers that called the tool."""
    called: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if bearer not in bearers:
            return web.json_response({"error": "unauthorized"}, status=401)
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        result: dict[str, Any] = {}
        match message["method"]:
            case "initialize":
                info = {"name": "fixture", "version": "1"}
                result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                schema = {"type": "object", "properties": {"q": {"type": "string"}}}
                result = {"tools": [{"name": "lookup", "description": "d", "inputSchema": schema}]}
            case "tools/call":
                called.append(bearer)
                result = {"content": [{"type": "text", "text": f"found {message['params']['arguments']['q']}"}]}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})

    app = web.Application()
    app.router.add_post("/mcp", serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", called
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("options", [{}, {"stdio_tools": True}])
async def test_tools_are_given_on_stdin_and_renewed(place: Place, options: dict[str, Any]) -> None:
    """Vendor's rule: tool servers may be replaced between turns; ours: no bearer on a command line or on disk."""
    async with tool_server({"canary-bearer-1", "canary-bearer-2"}) as (url, called):

        def given(bearer: str) -> tuple[McpServer, ...]:
            return (McpServer("langbot_agent", "http", url=url, headers={"Authorization": f"Bearer {bearer}"}),)

        script = place.fixture.play(model.call("mcp__langbot_agent__lookup", q="weather"), model.say("looked up"))
        async with place.opened(mcp_servers=given("canary-bearer-1"), options=options) as session:
            events = await turn(session, script)
            assert text(events) == "looked up" and "found weather" in of(events, ToolFinished)[0].output
            assert await session.renew_mcp(given("canary-bearer-2"))
            events = await turn(session, script)
            assert called == ["canary-bearer-1", "canary-bearer-2"]
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    assert b"canary-bearer" not in process.read_bytes()
        written = [path for path in place.home.rglob("*") if path.is_file()]
        assert not any(b"canary-bearer" in path.read_bytes() for path in written)


async def test_a_tool_server_gets_nothing_of_the_environment(place: Place) -> None:
    """Vendor's rule: ``${NAME}`` in a header is filled in; ours: a server that somebody else named learns no variable."""
    seen: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        seen.extend(request.headers.getall("X-Given", []))
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/mcp", serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        server = McpServer("other", "http", url=url, headers={"X-Given": "${MINE} ${MINE:-x} $MINE"})
        async with place.opened(env={"MINE": "canary-variable"}, mcp_servers=(server,)) as session:
            assert text(await turn(session, "[[ say hello ]]")) == "hello"
    finally:
        await runner.cleanup()
    assert seen and set(seen) == {"${MINE} ${MINE:-x} $MINE"}


async def test_git_runs_nothing_of_a_workspace(place: Place) -> None:
    """Vendor's rule: ``git status`` runs unasked; ours: what the repository names as its monitor is not started with it."""
    monitor = place.workspace / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {place.home}/ran\n")
    monitor.chmod(0o755)
    for words in (("init", "-q"), ("config", "core.fsmonitor", str(monitor))):
        await asyncio.to_thread(subprocess.run, ("git", "-C", str(place.workspace), *words), check=True, timeout=20)
    async with place.opened() as session:
        events = await turn(session, "[[ run git status ]]", choose="reject_once")
        assert "monitor" in of(events, ToolFinished)[0].output
    assert not (place.home / "ran").exists()


async def test_a_tool_server_that_does_not_answer_is_said(place: Place) -> None:
    """Vendor's rule: the run goes on without its tools; ours: people are told, once."""
    server = McpServer("langbot_agent", "http", url="http://127.0.0.1:9/mcp", headers={"Authorization": "Bearer canary-b"})
    async with place.opened(mcp_servers=(server,)) as session:
        events = [*await turn(session, "[[ say one ]]"), *await turn(session, "[[ say two ]]")]
        assert codes(events).count("coding.mcp_servers_failed") == 1
        assert text(events) == "onetwo"
