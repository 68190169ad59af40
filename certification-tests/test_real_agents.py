"""The real ACP agents of four vendors through the driver, each in a home of its own, against a model that follows a script.

What differs between the vendors stands in :data:`HABITS`; everything else is the same for all. Each agent has its vendor's own
defaults, so what an agent asks about here is the driver's doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent import presets
from agent.driver import AcpDriver
from agent.session import AcpSession
from pkg import approval_policy
from pkg.agent_api import (
    AgentEvent,
    Answer,
    ApprovalRequested,
    McpServer,
    Prompt,
    SessionStarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    UsageReported,
)
from pkg.errors import SessionUnavailable
from pkg.launch import LocalLauncher
from pkg.tools_listener import open_endpoint
from testkit import acp_harness as acp
from testkit import hostile_trees
from testkit.model_fixture import KEY, REFUSAL, ModelFixture, model_fixture
from testkit.real_agents import AGENTS, RealAgent
from testkit.sdk_worker import built, descendants, gone, sdk_worker
from tooling.agents import ACP as INSTALLED

pytestmark = [pytest.mark.real_agents, pytest.mark.timeout(150)]
in_this_loop = pytest.mark.asyncio(loop_scope="module")

TURN = 60.0
"""Seconds any single wait for an agent may take; never the verdict itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """What one vendor does differently. Each value is that vendor's rule in the pinned version, not ours."""

    dialect: str
    """What it speaks to its model."""
    agent: str
    """Its name in the handshake."""
    printed: str
    """What it tells of a command that printed ``made``."""
    rejected: tuple[str, str, str]
    """After a rejected command: the turn's stop reason, the turn's text, and how the tool call ended."""
    tokens: tuple[int | None, int | None]
    """The tokens it reports for an answer of twelve in and nine out."""
    gives_up: bool
    """Whether a cancelled turn lets go of its model's answer by itself, before the model says more or the agent ends."""
    reloads: bool
    """Whether a session survives being loaded twice."""
    mentions: bool
    """Whether it reads a file that a message names with ``@``, wherever that is, and asks nobody."""
    tool: str
    """The model's name for the tool ``lb_echo`` of the server ``langbot``; empty where no model call reaches it directly."""
    write: Callable[[Path, str], str]
    """The script step that makes the agent write a file by its own means."""


def _patch(path: Path, text: str) -> str:
    patch = f"*** Begin Patch\n*** Add File: {path}\n+{text}\n*** End Patch"
    return f"sandboxed apply_patch <<'EOF'\n{patch}\nEOF"


def _write(tool: str, key: str) -> Callable[[Path, str], str]:
    return lambda path, text: f"call {tool} " + json.dumps({key: str(path), "content": text + "\n"})


HABITS = {
    "codex": Habits(
        dialect="responses",
        agent="codex-acp",
        printed="made\n",
        rejected=("cancelled", "", "cancelled"),
        tokens=(None, None),
        gives_up=False,
        reloads=True,
        mentions=False,
        tool="",
        write=_patch,
    ),
    "claude": Habits(
        dialect="anthropic",
        agent="@agentclientprotocol/claude-agent-acp",
        printed="```console\nmade\n```",
        rejected=("end_turn", "finished", "failed"),
        tokens=(12, 9),
        gives_up=True,
        reloads=True,
        mentions=True,
        tool="mcp__langbot__lb_echo",
        write=_write("Write", "file_path"),
    ),
    "opencode": Habits(
        dialect="chat",
        agent="OpenCode",
        printed="made\n",
        rejected=("end_turn", "", "failed"),
        tokens=(12, 9),
        gives_up=True,
        reloads=True,
        mentions=False,
        tool="langbot_lb_echo",
        write=_write("write", "filePath"),
    ),
    "gemini": Habits(
        dialect="gemini",
        agent="gemini-cli",
        printed="",
        rejected=("end_turn", "finished", "cancelled"),
        tokens=(12, 9),
        gives_up=True,
        reloads=False,
        mentions=False,
        tool="mcp_langbot_lb_echo",
        write=_write("write_file", "file_path"),
    ),
}

every_agent = pytest.mark.parametrize("name", list(HABITS))
"""One test per agent."""


# ------------------------------------------------------------------ one agent, one model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model() -> AsyncIterator[ModelFixture]:
    """The one model server of this file."""
    async with model_fixture() as fixture:
        yield fixture
    assert fixture.refused == 0, "an agent came without the key of its environment"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where one agent lives and works, and which model it has."""

    agent: RealAgent
    habits: Habits
    home: Path
    workspace: Path
    model: ModelFixture

    @contextlib.asynccontextmanager
    async def opened(self, *, driver: AcpDriver | None = None, **fields: Any) -> AsyncIterator[AcpSession]:
        """An open session; when it is closed no process of it is left."""
        spec = self.agent.spec(INSTALLED.binaries(), self.home, self.workspace, self.model.url, **fields)
        before = descendants(os.getpid())
        session = await (driver or AcpDriver()).open(spec, LocalLauncher())
        try:
            yield session
        finally:
            processes = {pid: start for pid, start in descendants(os.getpid()).items() if pid not in before}
            assert processes
            await session.close()
            assert hostile_trees.living(processes) == []


def place(base: Path, name: str, model: ModelFixture) -> Place:
    """A new home and workspace below ``base``."""
    workspace = base / "workspace"
    workspace.mkdir()
    return Place(AGENTS[name], HABITS[name], base / "home", workspace, model)


async def prompt(session: AcpSession, text: str) -> None:
    """Send a prompt."""
    async with asyncio.timeout(TURN):
        await session.prompt(Prompt(text))


async def following(session: AcpSession, stop: Callable[[AgentEvent], bool]) -> list[AgentEvent]:
    """The events up to and including the first for which ``stop`` holds."""
    events: list[AgentEvent] = []
    async with asyncio.timeout(TURN):
        async for event in session.events():
            assert KEY not in repr(event)
            events.append(event)
            if stop(event):
                return events
    raise AssertionError(f"the stream ended: {events}")


async def to_the_end(session: AcpSession) -> list[AgentEvent]:
    """The events up to the end of the turn; nothing is asked meanwhile."""
    events = await following(session, lambda event: isinstance(event, ApprovalRequested | TurnEnded))
    assert isinstance(events[-1], TurnEnded), events[-1]
    return events


async def asked(session: AcpSession) -> tuple[list[AgentEvent], ApprovalRequested]:
    """The events up to the agent's question whether it may."""
    events = await following(session, lambda event: isinstance(event, ApprovalRequested | TurnEnded))
    assert isinstance(events[-1], ApprovalRequested), f"nothing was asked: {events}"
    return events, events[-1]


def chosen(request: ApprovalRequested, kind: str) -> Answer:
    """The answer of one kind that the agent offers."""
    return Answer(next(choice.choice_id for choice in request.choices if choice.kind == kind))


async def said(session: AcpSession, script: str) -> str:
    """The text of one whole turn without questions, which must succeed."""
    await prompt(session, script)
    events = await to_the_end(session)
    assert events[-1] == TurnEnded("end_turn"), events
    return acp.text(events)


# ------------------------------------------------------------------ what is driven


def test_the_agents_are_those_of_the_lock_and_the_fallbacks_of_the_form() -> None:
    """Our rule: what is fetched on the fly for a person is the version that is driven here."""
    known = {preset.package: preset for preset in presets.PRESETS.values()}
    for agent in AGENTS.values():
        manifest = INSTALLED.package(agent.package) / "package.json"
        assert json.loads(manifest.read_text())["version"] == agent.version
        assert known[f"{agent.package}@{agent.version}"].command == (agent.program, *agent.arguments)


# ------------------------------------------------------------------ sessions that are resumed at the end of this file


class Remembered:
    """One session per agent with one turn, made on first use; time passes until it is loaded, as one agent needs it."""

    def __init__(self, base: Path, model: ModelFixture) -> None:
        self.driver = AcpDriver()
        self._base = base
        self._model = model
        self._made: dict[str, tuple[Place, str]] = {}

    async def session(self, name: str) -> tuple[Place, str]:
        """The place and the session's id."""
        if name not in self._made:
            directory = self._base / name
            directory.mkdir()
            where = place(directory, name, self._model)
            async with where.opened(driver=self.driver) as session:
                events = await following(session, lambda event: isinstance(event, SessionStarted))
                assert events[-1] == SessionStarted(session.session_id)
                assert session.agent_name == where.habits.agent
                assert session.capabilities.images
                assert session.capabilities.embedded_files
                assert await said(session, "remember PEAR [[say noted]]") == "noted"
            self._made[name] = where, session.session_id
        return self._made[name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remembered(tmp_path_factory: pytest.TempPathFactory, model: ModelFixture) -> Remembered:
    """The sessions that this file makes at its beginning and resumes at its end."""
    return Remembered(tmp_path_factory.mktemp("remembered"), model)


@every_agent
@in_this_loop
async def test_a_session_starts_and_answers(name: str, remembered: Remembered) -> None:
    """Protocol v1: a new session of the agent that was meant, with what it takes in a prompt."""
    where, session_id = await remembered.session(name)
    assert session_id
    assert {asked.dialect for asked in where.model.asked} >= {where.habits.dialect}


# ------------------------------------------------------------------ answers


@every_agent
@in_this_loop
async def test_an_answer_streams(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Our rule: text is passed on while the model still speaks; each piece once, usage only where the vendor tells it."""
    where = place(tmp_path, name, model)
    release = tmp_path / "release"
    async with where.opened() as session:
        await prompt(session, f"[[hold {release}]]")
        events = await following(session, lambda event: isinstance(event, TextDelta) and "holding" in event.text)
        release.touch()
        events += await to_the_end(session)
        assert acp.text(events) == "holding released"
        assert acp.ended(events) == TurnEnded("end_turn")
        reports = [event for event in acp.of(events, UsageReported) if event.input_tokens is not None]
        assert [(each.input_tokens, each.output_tokens) for each in reports[-1:] or [UsageReported()]] == [where.habits.tokens]


@every_agent
@in_this_loop
async def test_what_people_write_runs_nothing_and_sends_no_file(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Agents' rule: over ACP what their terminals take for a command or a file is text; known gap: one reads the files."""
    where = place(tmp_path, name, model)
    outside = tmp_path / "outside"
    outside.write_text("canary-from-outside")
    written = (f"@{outside}", f"look at @{outside} please", "!touch ran", "# remember this")
    begun = len(model.asked)
    async with where.opened() as session:
        for words in written:
            assert await said(session, f"{words} [[say plain]]") == "plain"
    heard = "\n".join(text for asked in model.asked[begun:] for _, text in asked.history)
    assert [words for words in written if words not in heard] == []
    assert ("canary-from-outside" in heard) == where.habits.mentions
    assert not (where.workspace / "ran").exists()


@every_agent
@in_this_loop
async def test_a_failing_model_is_one_readable_error_and_the_session_goes_on(
    name: str, tmp_path: Path, model: ModelFixture
) -> None:
    """Known agents' habit: each tells the same failure in another way, one of them twice; people read its sentence once."""
    where = place(tmp_path, name, model)
    async with where.opened() as session:
        await prompt(session, "[[fail 400]]")
        events = await to_the_end(session)
        end = acp.ended(events)
        assert end.stop_reason == "error"
        assert end.error is not None
        assert end.error.code == "coding.agent_error"
        assert end.error.detail.removeprefix("API Error: 400 ") == REFUSAL
        assert acp.text(events) == ""
        assert await said(session, "[[say again]]") == "again"


# ------------------------------------------------------------------ permission


@every_agent
@in_this_loop
async def test_a_command_runs_when_it_is_allowed_and_only_then(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Our rule: every agent asks before each command and shows all of it; allowing one allows no other."""
    where = place(tmp_path, name, model)
    made, release = where.workspace / "made.txt", tmp_path / "release"
    async with where.opened() as session:
        await prompt(session, f"[[run echo made | tee made.txt ;; hold {release}]]")
        events, request = await asked(session)
        assert not made.exists()
        assert "echo made | tee made.txt" in request.command
        assert (request.kind, request.complete) == ("execute", True)
        assert await session.answer(request.request_id, chosen(request, "allow_once"))
        # The model goes on only when the tool call has ended: Codex may tell that after the turn otherwise.
        events += await following(session, lambda event: isinstance(event, ToolFinished))
        release.touch()
        events += await to_the_end(session)
        assert made.read_text() == "made\n"
        assert acp.text(events) == "holding released"
        (started,) = acp.of(events, ToolStarted)
        (finished,) = acp.of(events, ToolFinished)
        assert started.tool_call_id == finished.tool_call_id == request.tool_call_id
        assert (started.kind, finished.status, finished.output) == ("execute", "completed", where.habits.printed)

        await prompt(session, "[[run echo made | tee again.txt ;; say finished]]")
        events, request = await asked(session)
        decision = approval_policy.decide("ask", request, approval_policy.inside_really(str(where.workspace)))
        assert not decision.allowed
        assert await session.answer(request.request_id, decision.answer)
        events += await to_the_end(session)
        (finished,) = acp.of(events, ToolFinished)
        assert (acp.ended(events).stop_reason, acp.text(events), finished.status) == where.habits.rejected
        assert not (where.workspace / "again.txt").exists()


@every_agent
@in_this_loop
async def test_an_edit_inside_the_workspace_is_shown_whole_and_allowed_by_its_policy(
    name: str, tmp_path: Path, model: ModelFixture
) -> None:
    """Our rule: ``allow-edits`` sees from every agent's request that it is an edit, of which file, and to what."""
    where = place(tmp_path, name, model)
    inside, made = approval_policy.inside_really(str(where.workspace)), where.workspace / "note.txt"
    async with where.opened(policy="allow-edits") as session:
        await prompt(session, f"[[{where.habits.write(made, 'pear')} ;; say finished]]")
        _, request = await asked(session)
        assert not made.exists()
        assert [(diff.path, diff.new_text.strip()) for diff in request.diffs] == [(str(made), "pear")]
        decision = approval_policy.decide("allow-edits", request, inside)
        assert decision.allowed, request
        assert await session.answer(request.request_id, decision.answer)
        await to_the_end(session)
        assert made.read_text() == "pear\n"

        await prompt(session, "[[run touch never.txt ;; say finished]]")
        _, request = await asked(session)
        decision = approval_policy.decide("allow-edits", request, inside)
        assert not decision.allowed, request
        assert await session.answer(request.request_id, decision.answer)
        await to_the_end(session)
        assert not (where.workspace / "never.txt").exists()


@in_this_loop
async def test_codex_changes_nothing_unasked_where_its_own_settings_would_let_it(tmp_path: Path, model: ModelFixture) -> None:
    """Vendor's rule (codex-acp 0.16): a trusted folder's sessions start in a mode that writes unasked; ours is set over it."""
    where = place(tmp_path, "codex", model)
    env = where.agent.environment(where.home, model.url)
    with (Path(env["CODEX_HOME"]) / "config.toml").open("a") as file:
        file.write(f'\n[projects.{json.dumps(str(where.workspace))}]\ntrust_level = "trusted"\n')
    made = where.workspace / "made.txt"
    trusting = dataclasses.replace(where.agent, prepare=lambda home, url: env)
    where = dataclasses.replace(where, agent=trusting)
    async with where.opened() as session:
        assert await said(session, "[[sandboxed touch made.txt ;; say finished]]") == "finished"
        assert not made.exists()
    async with where.opened(policy="auto") as session:
        assert await said(session, "[[sandboxed touch made.txt ;; say finished]]") == "finished"
        assert made.exists()


@in_this_loop
async def test_opencode_asks_nobody_when_it_is_left_to_itself(tmp_path: Path, model: ModelFixture) -> None:
    """Vendor's rule (OpenCode 1.18): no mode of it asks; with one of its own modes as policy a command just runs."""
    where = place(tmp_path, "opencode", model)
    async with where.opened(policy="build") as session:
        assert await said(session, "[[run touch made.txt ;; say finished]]") == "finished"
        assert (where.workspace / "made.txt").exists()


# ------------------------------------------------------------------ cancelling


@every_agent
@in_this_loop
async def test_a_streaming_answer_is_cancelled_and_the_session_goes_on(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Protocol v1: the turn ends as cancelled and the agent takes the next prompt; nobody goes on listening to the model."""
    where = place(tmp_path, name, model)
    async with where.opened() as session:
        dropped = model.dropped
        await prompt(session, f"[[hold {tmp_path / 'never'}]]")
        await following(session, lambda event: isinstance(event, TextDelta) and "holding" in event.text)
        await session.interrupt()
        assert acp.ended(await to_the_end(session)) == TurnEnded("cancelled")
        if where.habits.gives_up:
            await acp.poll(lambda: model.dropped == dropped + 1)
        assert await said(session, "[[say again]]") == "again"
    await acp.poll(lambda: model.dropped == dropped + 1)


@every_agent
@in_this_loop
async def test_a_turn_is_cancelled_while_it_waits_for_permission(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Protocol v1: the open request is answered as cancelled, its command never runs, and the next prompt is taken."""
    where = place(tmp_path, name, model)
    async with where.opened() as session:
        await prompt(session, "[[run touch made.txt ;; say finished]]")
        events, _ = await asked(session)
        await session.interrupt()
        events += await to_the_end(session)
        assert acp.ended(events) == TurnEnded("cancelled")
        assert [each.status for each in acp.of(events, ToolFinished)] == ["cancelled"]
        assert await said(session, "[[say again]]") == "again"
        assert not (where.workspace / "made.txt").exists()


@every_agent
@in_this_loop
async def test_a_running_command_is_cancelled_and_nothing_of_it_is_left(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Our rule: after the end of a cancelled turn and of its session no process of its command is left."""
    where = place(tmp_path, name, model)
    running = where.workspace / "running"
    async with where.opened() as session:
        await prompt(session, "[[run sleep 600 & echo $! > running.new; mv running.new running; wait ;; say finished]]")
        events, request = await asked(session)
        assert await session.answer(request.request_id, chosen(request, "allow_once"))
        await acp.poll(running.exists)
        pid = int(running.read_text())
        sleep = {pid: hostile_trees.start_time(pid)}
        assert sleep[pid]
        await session.interrupt()
        events += await to_the_end(session)
        assert acp.ended(events) == TurnEnded("cancelled")
        assert [each.status for each in acp.of(events, ToolFinished)] == ["cancelled"]
        if session.alive:
            assert await said(session, "[[say again]]") == "again"
    assert hostile_trees.living(sleep) == []


# ------------------------------------------------------------------ LangBot's tools


class Tools:
    """What an MCP server of one tool answers; every payload comes through the worker's own listener, by its bearer."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.listed = asyncio.Event()

    async def answer(self, payload: Any) -> Any:
        """The answer to one payload."""
        method = str(payload.get("method"))
        self.methods.append(method)
        if "id" not in payload:
            return None
        params = payload.get("params") or {}
        result: dict[str, Any] = {}
        match method:
            case "initialize":
                server = {"name": "langbot", "version": "1"}
                result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
            case "tools/list":
                schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
                result = {"tools": [{"name": "lb_echo", "description": "Say it again", "inputSchema": schema}]}
                self.listed.set()
            case "tools/call":
                self.calls.append(params["arguments"])
                result = {"content": [{"type": "text", "text": f"echo: {params['arguments']['text']}"}]}
            case "ping":
                pass
            case _:
                error = {"code": -32601, "message": "Method not found"}
                return {"jsonrpc": "2.0", "id": payload["id"], "error": error}
        return {"jsonrpc": "2.0", "id": payload["id"], "result": result}


@every_agent
@in_this_loop
async def test_tools_are_reached_with_their_bearer_and_asked_about(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Our rule: every agent reaches the run's tools at the worker's own listener, and asks before it calls one."""
    where = place(tmp_path, name, model)
    tools = Tools()
    endpoint = await open_endpoint(tools.answer)
    try:
        server = McpServer("langbot", "http", url=endpoint.url, headers={"Authorization": f"Bearer {endpoint.bearer}"})
        async with where.opened(mcp_servers=(server,)) as session:
            async with asyncio.timeout(TURN):
                await tools.listed.wait()
            if where.habits.tool:
                await prompt(session, '[[call lb_echo {"text": "pear"}]]')
                events, request = await asked(session)
                assert tools.calls == []
                assert await session.answer(request.request_id, chosen(request, "allow_once"))
                events += await to_the_end(session)
                assert "echo: pear" in acp.text(events)
                assert tools.calls == [{"text": "pear"}]
                assert endpoint.bearer not in repr(events)
            offered = {tool for tool in (where.habits.tool,) if tool}
            assert {tool for call in model.asked[-1:] for tool in call.tools if tool.endswith("lb_echo")} == offered
    finally:
        await endpoint.close()


# ------------------------------------------------------------------ sessions of another process


@every_agent
@in_this_loop
async def test_an_unknown_session_is_never_silently_a_blank_one(name: str, tmp_path: Path, model: ModelFixture) -> None:
    """Our rule: a session proven missing is replaced and that is said, or the opening fails with it where it may not be."""
    where = place(tmp_path, name, model)
    unknown = "ses_00000000ffffAAAAAAAAAAAAAA" if name == "opencode" else "01a22cb9-fe96-7b53-a4ad-9152b459b66e"
    async with where.opened(resume_session_id=unknown) as session:
        (event,) = await following(session, lambda event: isinstance(event, SessionStarted))
        assert event == SessionStarted(session.session_id, resumed=False, lost_history=True)
        assert session.session_id != unknown
        assert await said(session, "[[recall]]") == "recalled: "
    with pytest.raises(SessionUnavailable) as caught:
        async with where.opened(resume_session_id=unknown, create_if_missing=False):
            pytest.fail("it opened")
    assert caught.value.code == "coding.session_missing"


@every_agent
@in_this_loop
async def test_a_session_goes_on_in_a_new_process_with_all_it_knows(name: str, remembered: Remembered) -> None:
    """Our rule: the stored id brings the session back, nothing of its history is said again, and it goes on."""
    where, session_id = await remembered.session(name)
    async with where.opened(driver=remembered.driver, resume_session_id=session_id) as session:
        await prompt(session, "remember PLUM [[recall]]")
        events = await to_the_end(session)
        assert acp.of(events, SessionStarted) == [SessionStarted(session_id, resumed=True)]
        assert acp.text(events) == "recalled: remember PEAR"
    async with where.opened(resume_session_id=session_id) as session:
        await prompt(session, "[[recall]]")
        events = await to_the_end(session)
        (started,) = acp.of(events, SessionStarted)
        assert (started.resumed, started.lost_history) == (where.habits.reloads, not where.habits.reloads)
        # Vendor's rule (Gemini CLI 0.61): its own clean-up deletes what has been loaded once; it is told, never hidden.
        known = "remember PEAR | remember PLUM" if where.habits.reloads else ""
        assert acp.text(events) == f"recalled: {known}"


# ------------------------------------------------------------------ the whole package


@pytest.mark.sdk_worker
@in_this_loop
async def test_the_built_package_answers_with_a_real_agent_in_a_real_worker(tmp_path: Path, model: ModelFixture) -> None:
    """From the form to the chat: the SDK's worker, the built package, codex-acp, a streamed answer, and commands that wait.

    An allowed one has its effect and a denied one none, in the same process; the reason of the denial is what the model reads
    next. What nobody answers is cancelled on its deadline.
    """
    where = place(tmp_path, "codex", model)
    spec = where.agent.spec(INSTALLED.binaries(), where.home, where.workspace, model.url)
    environment = {**spec.env, "OPENAI_API_KEY": "${secret:MODEL_KEY}"}
    form = {
        "provider": "custom",
        "acp-command": shlex.join(spec.command),
        "workspace": str(where.workspace),
        "env-json": json.dumps(environment),
        "langbot-assets-enabled": False,
    }
    installations = {"A": {"agent-secret-values": json.dumps({"MODEL_KEY": KEY})}}
    async with sdk_worker(built(), tmp_path / "runtime", installations=installations) as worker:
        async with asyncio.timeout(TURN):
            answer = await worker.run("remember PEAR [[say one two three]]", config=form)
        assert (answer.shown, answer.reason) == (["one two three"], "stop")
        processes = descendants(worker.pid())
        assert processes
        outcomes = [answer]
        for number, (name, word) in enumerate((("made.txt", "1"), ("other.txt", "deny because of-the-moon")), 1):
            script = f"[[run touch {name} ;; say finished]]"
            async with asyncio.timeout(TURN):
                asked = await worker.run(script, run_id=f"asks-{number}", config=form)
            assert f"touch {name}" in asked.text
            assert "4. " in asked.text
            assert not (where.workspace / name).exists()
            async with asyncio.timeout(TURN):
                done = await worker.run(word, run_id=f"answers-{number}", config=form)
            assert (where.workspace / name).exists() == (word == "1")
            assert processes.items() <= descendants(worker.pid()).items()
            outcomes += [asked, done]
            if word == "1":
                assert "finished" in done.text
            else:
                assert "of-the-moon" in repr(model.asked[-1].history)
        async with asyncio.timeout(TURN):
            recalled = await worker.run("[[recall]]", run_id="r3", config=form)
        assert "recalled: remember PEAR" in recalled.text
        outcomes.append(recalled)
        # The shortest time that the form takes.
        late = {**form, "approval-timeout": 30, "keep-warm": 0}
        async with asyncio.timeout(TURN):
            await worker.run("[[run touch never.txt ;; say finished]]", run_id="r4", config=late)
        assert await gone(descendants(worker.pid()), 60.0)
        async with asyncio.timeout(TURN):
            after = await worker.run("[[say going on]]", run_id="r5", config=late)
        assert "Nobody answered in time" in after.shown[0]
        assert "going on" in after.text
        assert not (where.workspace / "never.txt").exists()
        assert all(KEY not in str(result.data) for each in outcomes for result in each.results)
    assert await gone(processes)
