"""The real Claude Code under the default form, with nobody to ask: no tool that the model can call has an effect.

One test lets the same calls through: what is asserted to be absent there would show.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from claude_harness import ended, of, prompted, text, until
from claude_harness import turn as any_turn

from agent.driver import ClaudeCodeDriver
from agent.form import ClaudeCodeSettings
from agent.product import PRODUCT
from pkg.agent_api import Answer, ApprovalRequested, McpServer, QuestionAsked, SessionSpec, ToolFinished, TurnEnded
from pkg.approval_policy import decide, inside_really
from pkg.launch import LocalLauncher
from pkg.product import SpecInputs
from pkg.settings import parse
from testkit import anthropic_fixture as model
from testkit.anthropic_fixture import AnthropicFixture
from testkit.effects import PATIENCE, SERVER, Trap, trap

pytestmark = [pytest.mark.real_claude, pytest.mark.asyncio, pytest.mark.timeout(180)]


@dataclasses.dataclass
class Place:
    """A trap, a home, a model, and the program."""

    trap: Trap
    env: dict[str, str]
    program: Path
    model: AnthropicFixture

    def spec(self, servers: tuple[McpServer, ...]) -> SessionSpec:
        """What the default form becomes; only the program's path and home, and a tool server, are given."""
        settings = parse(ClaudeCodeSettings, {"command": str(self.program)})
        return PRODUCT.spec(settings, SpecInputs(str(self.trap.workspace), "local", self.env, servers))

    async def played(self, *calls: tuple[str, dict[str, Any]], answer: str = "") -> list[Any]:
        """A turn in which the model makes these calls one after the other; nobody can be asked, or everything is answered."""
        script = self.model.play(*(model.call(name, **given) for name, given in calls), model.say("over"))
        inside = inside_really(str(self.trap.workspace))

        def nobody(asked: Any) -> Answer:
            if answer:
                return Answer(answer)
            return decide("ask", asked, inside).answer if isinstance(asked, ApprovalRequested) else Answer()

        session = await ClaudeCodeDriver().open(self.spec(self.trap.servers), LocalLauncher())
        try:
            events = await any_turn(session, script, choose=nobody)
        finally:
            await session.close()
        assert ended(events).stop_reason == "end_turn"
        finished = of(events, ToolFinished)
        assert len(finished) >= len(calls), "a call was not made"
        assert {"allow_once", "reject_once"} <= {
            choice.kind for asked in of(events, ApprovalRequested) for choice in asked.choices
        } or not of(events, ApprovalRequested)
        return events


@pytest_asyncio.fixture
async def place(tmp_path: Path, claude_program: Path) -> AsyncIterator[Place]:
    """See :class:`Place`."""
    home = tmp_path / "home"
    for each in (home, tmp_path / "tmp"):
        each.mkdir()
    async with model.anthropic_fixture() as fixture, trap(tmp_path) as made:
        env = {**fixture.environment(), "HOME": str(home), "TMPDIR": str(tmp_path / "tmp")}
        yield Place(made, env, claude_program, fixture)


def deferred(name: str) -> tuple[str, dict[str, Any]]:
    """The call that makes a tool usable which the program announces by name alone."""
    return "ToolSearch", {"query": f"select:{name}", "max_results": 3}


def files(trapped: Trap) -> list[tuple[str, dict[str, Any]]]:
    """Calls that change files by the program's own tools."""
    old, new = trapped.file("old.txt"), trapped.file("made.txt")
    notebook = {"notebook_path": trapped.file("book.ipynb"), "cell_id": "c1", "new_source": "2", "edit_mode": "replace"}
    return [
        ("Write", {"file_path": new, "content": "x"}),
        ("Write", {"file_path": str(trapped.marks / "made"), "content": "x"}),
        ("Read", {"file_path": old}),
        ("Edit", {"file_path": old, "old_string": "one", "new_string": "1"}),
        ("Write", {"file_path": old, "content": "x"}),
        deferred("NotebookEdit"),
        ("Read", {"file_path": trapped.file("book.ipynb")}),
        ("NotebookEdit", notebook),
    ]


def agents(trapped: Trap) -> list[tuple[str, dict[str, Any]]]:
    """Calls that have other agents act, or act later."""
    shell = {"command": "touch made", "description": "d"}
    inner = {"description": "d", "prompt": "[[ run touch made ;; say x ]]", "subagent_type": "general-purpose"}
    workflow = "export const meta = {name: 'x', description: 'y', phases: []};\nreturn await agent('[[ run touch made ]]', {})"
    return [
        ("Agent", {**inner, "run_in_background": False}),
        ("Agent", {**inner, "run_in_background": True}),
        ("Agent", {**inner, "run_in_background": False, "mode": "bypassPermissions"}),
        ("Agent", {**inner, "run_in_background": False, "isolation": "worktree"}),
        ("Workflow", {"script": workflow}),
        ("Bash", {**shell, "run_in_background": True}),
        ("Bash", {**shell, "dangerouslyDisableSandbox": True}),
        deferred("Monitor"),
        ("Monitor", {"command": "touch made", "description": "d", "timeout_ms": 2000, "persistent": False}),
        deferred("EnterWorktree"),
        ("EnterWorktree", {"name": "made"}),
        ("CronCreate", {"cron": "*/1 * * * *", "prompt": "[[ run touch made ]]", "recurring": True, "durable": True}),
        ("Bash", {"command": "echo settled; sleep 1", "description": "d"}),
    ]


def outwards(trapped: Trap) -> list[tuple[str, dict[str, Any]]]:
    """Calls that leave the machine, or the program's own tools."""
    return [
        deferred("WebFetch"),
        ("WebFetch", {"url": f"{trapped.url}/hit", "prompt": "x"}),
        (f"mcp__{SERVER}__act", {"what": "x"}),
        (f"mcp__{SERVER}__act", {}),
        ("Skill", {"skill": "init"}),
        deferred("EnterPlanMode"),
        ("EnterPlanMode", {}),
        ("Write", {"file_path": trapped.file("made.txt"), "content": "x"}),
        ("ExitPlanMode", {"plan": "1. do it"}),
        ("Bash", {"command": "touch made", "description": "d"}),
    ]


async def test_no_command_has_an_effect(place: Place) -> None:
    """Vendor's rule: what its own reading of a command takes for harmless runs unasked; ours: nothing on our list does."""
    events = await place.played(*(("Bash", {"command": line, "description": "d"}) for line in place.trap.shell()))
    assert len(of(events, ApprovalRequested)) == len(place.trap.shell())
    assert place.trap.effects == []


@pytest.mark.parametrize("calls", [files, agents, outwards])
async def test_no_other_tool_has_an_effect(place: Place, calls: Any) -> None:
    """Our rule: files, notebooks, other agents, worktrees, schedules, servers and the network wait for somebody."""
    events = await place.played(*calls(place.trap))
    assert of(events, ApprovalRequested)
    assert place.trap.effects == []


async def test_a_worktree_is_asked_for(place: Place) -> None:
    """Vendor's rule (2.1.332): one is made in the repository unasked; ours: the settings make it ask."""
    inner = {"description": "d", "prompt": "[[ say x ]]", "subagent_type": "general-purpose", "run_in_background": False}
    calls = [deferred("EnterWorktree"), ("EnterWorktree", {"name": "w"}), ("Agent", {**inner, "isolation": "worktree"})]
    asked = of(await place.played(*calls), ApprovalRequested)
    assert [each.title for each in asked] == ["EnterWorktree", "Agent d"] and place.trap.effects == []
    assert of(await place.played(("Agent", inner)), ApprovalRequested) == []
    await place.played(*calls, answer="allow_once")
    assert ".claude/worktrees/w/old.txt" in place.trap.effects


async def test_a_moved_shell_is_shown_where_it_stands(place: Place) -> None:
    """Vendor's rule: ``cd`` runs unasked and lasts; ours: the next command is shown in that directory, and so it runs."""
    moved = ("Bash", {"command": "cd sub", "description": "d"})
    events = await place.played(moved, ("Bash", {"command": "touch made", "description": "d"}), answer="allow_once")
    (asked,) = of(events, ApprovalRequested)
    assert asked.cwd == place.trap.file("sub")
    assert place.trap.effects == ["sub/made"]


async def test_a_request_may_wait_for_minutes(place: Place) -> None:
    """Our rule: neither the program nor we give a request up by ourselves; the answer lands in the same turn and process."""
    options = [{"label": "Red", "description": "r"}, {"label": "Blue", "description": "b"}]
    question = {"question": "Which?", "header": "Colour", "options": options, "multiSelect": False}
    for_command = place.model.play(model.call("Bash", command="touch made", description="d"), model.say("finished"))
    for_question = place.model.play(model.call("AskUserQuestion", questions=[question]), model.say("finished"))
    driver = ClaudeCodeDriver()

    async def one(script: str, answer: Answer) -> None:
        session = await driver.open(place.spec(()), LocalLauncher())
        try:
            process = session._process.pid
            await prompted(session, script)
            asked = (await until(session, ApprovalRequested, QuestionAsked))[-1]
            assert isinstance(asked, ApprovalRequested | QuestionAsked)
            await asyncio.sleep(PATIENCE)
            assert await session.answer(asked.request_id, answer)
            events = await until(session, TurnEnded)
            assert text(events) == "finished" and ended(events) == TurnEnded("end_turn")
            assert [event.status for event in of(events, ToolFinished)] == ["completed"]
            assert session._process.pid == process and session.alive
        finally:
            await session.close()

    async with asyncio.TaskGroup() as waiting:
        waiting.create_task(one(for_command, Answer("allow_once")))
        waiting.create_task(one(for_question, Answer(values={"q1": "Blue"})))
        await asyncio.sleep(PATIENCE / 2)
        assert (await place.played(("Read", {"file_path": place.trap.file("old.txt")}))) and place.trap.effects == []
    assert place.trap.effects == ["made"]


async def test_allowed_calls_do_show(place: Place) -> None:
    """The trap catches: the same kinds of calls, allowed."""
    calls = [files(place.trap)[0], ("Bash", {"command": "touch made", "description": "d"}), outwards(place.trap)[2]]
    await place.played(*calls, answer="allow_once")
    assert place.trap.effects == ["act {'what': 'x'}", "made", "made.txt"]
