"""The real ACP agents under the default form, with nobody to ask: no tool that their models can call has an effect.

The siblings' agents are tried in the same way beside their other tests (``claude_code/``, ``codex/``), with the same list of
commands and the same place (:mod:`testkit.effects`). Each agent has its vendor's own defaults in a home of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.driver import AcpDriver
from agent.form import AcpSettings
from agent.presets import PRESETS
from agent.product import PRODUCT
from agent.session import AcpSession
from pkg.agent_api import Answer, ApprovalRequested, McpServer, Prompt, QuestionAsked, SessionSpec, TurnEnded
from pkg.approval_policy import decide, inside_really
from pkg.launch import LocalLauncher
from pkg.product import SpecInputs
from pkg.settings import parse
from testkit import acp_harness as acp
from testkit.effects import PATIENCE, SERVER, Trap, trap
from testkit.model_fixture import ModelFixture, model_fixture
from testkit.real_agents import AGENTS
from tooling.agents import ACP as INSTALLED

pytestmark = [pytest.mark.real_agents, pytest.mark.asyncio, pytest.mark.timeout(400)]

TURN = 60.0
"""Seconds any single wait for an agent may take; never the verdict itself."""
PROVIDERS = {"claude": "claude-code", "codex": "codex", "gemini": "gemini", "opencode": "opencode"}
"""The form's name of each agent."""

every_agent = pytest.mark.parametrize("name", list(PROVIDERS))


@dataclasses.dataclass
class Place:
    """A trap, a home, and one agent with its model."""

    name: str
    trap: Trap
    home: Path
    model: ModelFixture

    def spec(self, servers: tuple[McpServer, ...]) -> SessionSpec:
        """What the default form becomes; only the program's path and home, and a tool server, are given."""
        agent = AGENTS[self.name]
        settings = parse(AcpSettings, {"provider": PROVIDERS[self.name]})
        env = agent.environment(self.home, self.model.url)
        spec: SessionSpec = PRODUCT.spec(settings, SpecInputs(str(self.trap.workspace), "local", env, servers))
        assert PRESETS[settings.provider].command == (agent.program, *agent.arguments)
        return dataclasses.replace(spec, command=agent.command(INSTALLED.binaries()))

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AcpSession]:
        """An open session, closed afterwards."""
        session = await AcpDriver().open(self.spec(self.trap.servers), LocalLauncher())
        try:
            yield session
        finally:
            await session.close()

    async def played(self, session: AcpSession, step: str, answer: str = "") -> list[Any]:
        """A turn of one step; nobody can be asked, or everything is answered in one way."""
        inside = inside_really(str(self.trap.workspace))
        async with asyncio.timeout(TURN):
            await session.prompt(Prompt(f"[[{step}]]"))
            events: list[Any] = []
            async for event in session.events():
                events.append(event)
                if isinstance(event, TurnEnded):
                    break
                if isinstance(event, ApprovalRequested):
                    assert {"allow_once", "reject_once"} <= {choice.kind for choice in event.choices}
                    given = Answer(answer) if answer else decide("ask", event, inside).answer
                    assert await session.answer(event.request_id, given)
                elif isinstance(event, QuestionAsked):
                    assert await session.answer(event.request_id, Answer())
        assert "is not offered" not in acp.text(events), acp.text(events)
        return events


@contextlib.asynccontextmanager
async def placed(directory: Path, name: str) -> AsyncIterator[Place]:
    """See :class:`Place`."""
    async with model_fixture() as model, trap(directory) as made:
        yield Place(name, made, directory / "home", model)


def call(name: str, **given: Any) -> str:
    """A step that calls a tool; no bracket of what is given ends the script."""
    return f"call {name} " + json.dumps(given).replace("[", "\\u005b").replace("]", "\\u005d").replace(";", "\\u003b")


def shell(name: str, line: str) -> str:
    """A step that runs a command by the agent's own shell tool."""
    if name in ("claude", "opencode"):
        return call("Bash" if name == "claude" else "bash", command=line, description="d")
    if name == "gemini":
        return call("run_shell_command", command=line)
    escalated = {"sandbox_permissions": "require_escalated", "justification": "the script wants it"}
    return call("exec_command", cmd=line, **escalated)


def claude(trapped: Trap) -> list[str]:
    """The further tools of Claude Agent."""
    old, new = trapped.file("old.txt"), trapped.file("made.txt")
    read = call("Read", file_path=old)
    inner = {"description": "d", "prompt": "[[ run touch made ]]", "subagent_type": "general-purpose"}
    notebook = {"notebook_path": trapped.file("book.ipynb"), "cell_id": "c1", "new_source": "2", "edit_mode": "replace"}
    return [
        call("Write", file_path=new, content="x"),
        f"{read} ;; " + call("Edit", file_path=old, old_string="one", new_string="1"),
        f"{read} ;; " + call("Write", file_path=old, content="x"),
        call("Read", file_path=trapped.file("book.ipynb")) + " ;; " + call("NotebookEdit", **notebook),
        call("Bash", command="touch made", description="d", run_in_background=True),
        call("Bash", command="cd sub", description="d") + " ;; " + call("Bash", command="touch made", description="d"),
        call("Agent", **inner, run_in_background=False),
        call("Agent", **inner, run_in_background=False, isolation="worktree"),
        call("WebFetch", url=f"{trapped.url}/hit", prompt="x"),
        call("Workflow", script="export const meta = {name: 'x', description: 'y', phases: []};\nreturn await agent('x', {})"),
        call(f"mcp__{SERVER}__act", what="x"),
        call(f"mcp__{SERVER}__act"),
        "call EnterPlanMode {} ;; " + call("ExitPlanMode", plan="1. touch made"),
    ]


def codex(trapped: Trap) -> list[str]:
    """The further tools of codex-acp, which works in a sandbox that lets nothing be written."""

    def sandboxed(line: str) -> str:
        return call("exec_command", cmd=line)

    patch = "apply_patch <<'E'\n*** Begin Patch\n{}\n*** End Patch\nE"
    return [
        *(sandboxed(line) for line in trapped.shell()),
        sandboxed(patch.format("*** Add File: made.txt\n+x")),
        sandboxed(patch.format("*** Delete File: old.txt")),
        sandboxed(patch.format("*** Update File: old.txt\n*** Move to: new.txt\n@@\n-one two\n+1")),
        sandboxed(patch.format(f"*** Add File: {trapped.marks}/made\n+x")),
        call("exec_command", cmd="cat > made", tty=True),
        call("exec_command", cmd="touch made", workdir=trapped.file("sub"), yield_time_ms=10),
    ]


def gemini(trapped: Trap) -> list[str]:
    """The further tools of Gemini CLI."""
    return [
        call("write_file", file_path=trapped.file("made.txt"), content="x"),
        call("replace", file_path=trapped.file("old.txt"), old_string="one", new_string="1", instruction="x"),
        call("run_shell_command", command="touch made", dir_path="sub"),
        call("run_shell_command", command="touch made", is_background=True),
        call("web_fetch", prompt=f"get {trapped.url}/hit"),
        call("invoke_agent", agent_name="generalist", prompt="[[ run touch made ]]"),
        call(f"mcp_{SERVER}_act", what="x"),
        call("enter_plan_mode"),
    ]


def opencode(trapped: Trap) -> list[str]:
    """The further tools of OpenCode."""
    return [
        call("write", filePath=trapped.file("made.txt"), content="x"),
        call("write", filePath=str(trapped.marks / "made"), content="x"),
        call("read", filePath=trapped.file("old.txt"))
        + " ;; "
        + call("edit", filePath=trapped.file("old.txt"), oldString="one", newString="1"),
        call("bash", command="touch made", description="d", workdir="sub"),
        call("webfetch", url=f"{trapped.url}/hit", format="text"),
        call(f"{SERVER}_act", what="x"),
    ]


FURTHER = {"claude": claude, "codex": codex, "gemini": gemini, "opencode": opencode}


@every_agent
async def test_no_command_has_an_effect(name: str, tmp_path: Path) -> None:
    """Our rule: whatever an agent's own reading of a command takes for harmless, nothing on our list is done unasked."""
    async with placed(tmp_path, name) as place, place.session() as session:
        for line in place.trap.shell():
            events = await place.played(session, shell(name, line))
            assert acp.of(events, ApprovalRequested), line
            assert place.trap.effects == [], line


@every_agent
async def test_no_other_tool_has_an_effect(name: str, tmp_path: Path) -> None:
    """Our rule: files, other agents, worktrees, servers and the network wait for somebody; a sandbox lets nothing out."""
    async with placed(tmp_path, name) as place, place.session() as session:
        for step in FURTHER[name](place.trap):
            await place.played(session, step)
            assert place.trap.effects == [], step


@every_agent
async def test_allowed_calls_do_show(name: str, tmp_path: Path) -> None:
    """The trap catches: a command that is allowed shows, and it ran where the request said."""
    async with placed(tmp_path, name) as place, place.session() as session:
        (asked,) = acp.of(await place.played(session, shell(name, "touch made"), "allow_once"), ApprovalRequested)
        assert asked.cwd == str(place.trap.workspace)
        await acp.poll(lambda: bool(place.trap.effects))
        assert place.trap.effects == ["made"]


async def test_a_request_may_wait_for_minutes(tmp_path: Path) -> None:
    """Our rule: neither an agent nor we give a request up by ourselves; the answer lands in the same turn and process."""

    async def one(name: str) -> None:
        directory = tmp_path / name
        directory.mkdir()
        async with placed(directory, name) as place, place.session() as session, place.session() as other:
            process = session._process.pid
            await session.prompt(Prompt(f"[[{shell(name, 'touch made')} ;; say finished]]"))
            (*_, asked) = await acp.until(session, ApprovalRequested)
            assert isinstance(asked, ApprovalRequested)
            await asyncio.sleep(PATIENCE / 2)
            assert acp.text(await place.played(other, "say meanwhile")) == "meanwhile"
            await asyncio.sleep(PATIENCE / 2)
            assert place.trap.effects == []
            once = next(choice.choice_id for choice in asked.choices if choice.kind == "allow_once")
            assert await session.answer(asked.request_id, Answer(once))
            events = await acp.until(session, TurnEnded)
            assert (acp.text(events), acp.ended(events)) == ("finished", TurnEnded("end_turn"))
            assert place.trap.effects == ["made"]
            assert session._process.pid == process and session.alive

    async with asyncio.TaskGroup() as agents:
        for name in PROVIDERS:
            agents.create_task(one(name))


@pytest.mark.parametrize("name", ["claude", "opencode"])
async def test_a_workspace_s_own_settings_start_and_allow_nothing(name: str, tmp_path: Path) -> None:
    """Vendor's rule: both obey the workspace's settings, whose hooks, servers and rules act unasked; ours: they are left alone.

    What the workspace says in words is read all the same. Known gap: nothing turns OpenCode's plugins of a workspace off.
    """
    async with placed(tmp_path, name) as place:
        root, marks = place.trap.workspace, place.trap.marks
        hook = [{"hooks": [{"type": "command", "command": f"touch {marks}/hook"}]}]
        server = {"command": "touch", "args": [f"{marks}/server"]}
        rules = {"allow": ["Bash(touch:*)", "Write"], "defaultMode": "acceptEdits"}
        written = {
            ".claude/settings.json": {
                "hooks": {"SessionStart": hook, "UserPromptSubmit": hook, "PreToolUse": hook},
                "permissions": rules,
                "enableAllProjectMcpServers": True,
            },
            ".claude/settings.local.json": {"permissions": rules},
            ".mcp.json": {"mcpServers": {"planted": server}},
            "opencode.json": {
                "permission": {"bash": "allow", "edit": "allow"},
                "mcp": {"planted": {"type": "local", "command": ["touch", f"{marks}/server"], "enabled": True}},
            },
        }
        for path, content in written.items():
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_text(json.dumps(content))
        (root / "CLAUDE.md").write_text("canary-instructions")
        before = place.trap.effects
        async with place.session() as session:
            for step in (shell(name, "touch made"), FURTHER[name](place.trap)[0]):
                assert acp.of(await place.played(session, step), ApprovalRequested), step
        assert place.trap.effects == before
        shown = json.dumps([asked.history for asked in place.model.asked])
        assert ("CLAUDE.md" if name == "claude" else "canary-instructions") in shown
