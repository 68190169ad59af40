"""The real Codex under the default form, with nobody to ask: no tool that the model can call has an effect.

One test lets the same calls through: what is asserted to be absent there would show.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from codex_harness import ended, of, rest_of_turn, text, turn, until
from real_codex import Codex, real_codex

from agent.form import CodexSettings
from agent.product import PRODUCT
from pkg.agent_api import Answer, ApprovalRequested, Prompt, SessionSpec, ToolFinished, TurnEnded
from pkg.approval_policy import decide, inside_really
from pkg.launch import LocalLauncher
from pkg.product import SpecInputs
from pkg.settings import parse
from testkit.effects import PATIENCE, SERVER, Trap, trap

pytestmark = [pytest.mark.real_codex, pytest.mark.asyncio, pytest.mark.timeout(240)]

CODE_MODEL = "gpt-6.2-sol"
"""A model that Codex (0.171) has call its tools from a program instead of one by one."""


@dataclasses.dataclass
class Place:
    """A trap and the program."""

    trap: Trap
    codex: Codex

    def spec(self, **account: Any) -> SessionSpec:
        """What the default form becomes; only the program's path and home, and a tool server, are given."""
        settings = parse(CodexSettings, {"command": str(self.codex.program)})
        env = self.codex.environment(**account)
        return PRODUCT.spec(settings, SpecInputs(str(self.trap.workspace), "local", env, self.trap.servers))

    async def played(self, *steps: str, answer: str = "", **account: Any) -> list[Any]:
        """Turns of one session, a step each; nobody can be asked, or everything is answered."""
        inside = inside_really(str(self.trap.workspace))

        def nobody(asked: Any) -> Answer:
            if answer:
                return Answer(answer)
            return decide("ask", asked, inside).answer if isinstance(asked, ApprovalRequested) else Answer()

        session = await self.codex.driver.open(self.spec(**account), self.codex.launcher)
        events: list[Any] = []
        try:
            for step in steps:
                events += await turn(session, f"[[ {step} ]]", choose=nobody)
        finally:
            await session.close()
        for asked in of(events, ApprovalRequested):
            assert {"allow_once", "reject_once"} <= {choice.kind for choice in asked.choices}
            assert asked.cwd
        return events


@pytest_asyncio.fixture
async def place(codex_program: Path) -> AsyncIterator[Place]:
    """See :class:`Place`; it is not below a temporary directory, which Codex leaves writable."""
    async with real_codex(codex_program) as codex, trap(codex.place) as made:
        yield Place(made, codex)


def call(name: str, **given: Any) -> str:
    """A step that calls a tool."""
    return f"call {name} {json.dumps(given)}"


async def test_no_command_has_an_effect(place: Place) -> None:
    """Codex (0.171) would run each in its sandbox, in the workspace unasked; as we start it, it asks for each."""
    steps = [call("exec_command", cmd=line) for line in place.trap.shell()]
    events = await place.played(*steps)
    assert len(of(events, ApprovalRequested)) == len(steps)
    assert place.trap.effects == []


async def test_nor_has_one_that_asks_to_leave_the_sandbox_or_stays_open(place: Place) -> None:
    """Whatever the call says of itself."""
    steps = [
        f"escalate touch {place.trap.marks}/made",
        f"escalate curl -s {place.trap.url}/hit",
        call("exec_command", cmd="sleep 0.2; touch made", yield_time_ms=50),
        call("exec_command", cmd="cat > made", tty=True),
        call("exec_command", cmd="touch made", workdir=place.trap.file("sub")),
        call("exec_command", cmd="touch made", login=True),
        call("exec_command", cmd="touch made", shell="/bin/sh"),
        call("write_stdin", session_id=1, chars="touch made\n"),
    ]
    events = await place.played(*steps)
    assert len(of(events, ApprovalRequested)) == len(steps) - 1
    assert place.trap.file("sub") in [asked.cwd for asked in of(events, ApprovalRequested)]
    assert place.trap.effects == []


async def test_no_patch_has_an_effect(place: Place) -> None:
    """Neither a new file nor a change, a deletion, a move, or a patch that a command carries."""
    outside = place.trap.marks / "made"
    custom = "custom apply_patch *** Begin Patch\\n{}\\n*** End Patch"
    steps = [
        "add made.txt | x",
        f"add {outside} | x",
        "change old.txt | one two | 1",
        custom.format("*** Delete File: old.txt"),
        custom.format("*** Update File: old.txt\\n*** Move to: new.txt\\n@@\\n-one two\\n+1"),
        call("exec_command", cmd="apply_patch <<'E'\n*** Begin Patch\n*** Add File: made\n+x\n*** End Patch\nE"),
    ]
    events = await place.played(*steps)
    asked = of(events, ApprovalRequested)
    assert len(asked) == len(steps)
    assert all(each.complete and each.diffs for each in asked if each.kind == "edit")
    assert place.trap.effects == []


async def test_nothing_else_has_an_effect(place: Place) -> None:
    """Agents of the agent's own, tools of a further server, goals, pictures, the network."""
    task = "\\u005b\\u005b run touch made \\u005d\\u005d"
    steps = [
        f'call multi_agent_v1/spawn_agent {{"message": "{task}"}} ;; call multi_agent_v1/wait_agent {{}}',
        call(f"mcp__{SERVER}/act", what="x"),
        call("create_goal", objective="touch made"),
        call("view_image", path=place.trap.file("old.txt")),
        call("web_search", query="x"),
        call("request_user_input", questions=[{"id": "q", "header": "h", "question": "touch made?", "options": []}]),
    ]
    events = await place.played(*steps)
    assert [asked.title for asked in of(events, ApprovalRequested)] == ["touch made", f"{SERVER}.act"]
    assert place.trap.effects == []


async def test_nor_has_a_program_of_the_model_s(place: Place) -> None:
    """Where tools are called from a program, each call of it is asked about, and the program itself can do nothing."""
    act = "tools.exec_command({cmd: 'touch made'})"
    patch = "tools.apply_patch(`*** Begin Patch\\n*** Add File: made\\n+x\\n*** End Patch`)"
    steps = [
        f"custom exec const r = await {act}; text(r.output)",
        f"custom exec const r = await {patch}; text(String(r))",
        f"custom exec const r = await tools.mcp__{SERVER}__act({{what: 'x'}}); text(String(r))",
        f"custom exec text(await fetch('{place.trap.url}/hit'))",
        "custom exec (await import('fs')).writeFileSync('made', 'x')",
        "custom exec require('fs').writeFileSync('made', 'x')",
    ]
    events = await place.played(*steps, model=CODE_MODEL)
    assert [asked.kind for asked in of(events, ApprovalRequested)] == ["execute", "edit", "other"]
    assert place.trap.effects == []


async def test_a_request_may_wait_for_minutes(place: Place) -> None:
    """Neither Codex nor we give a request up by ourselves; the answer lands in the same turn of the same process."""
    codex = place.codex

    async def one(step: str) -> None:
        session = await codex.driver.open(place.spec(), LocalLauncher())  # what several say at once is not recorded together
        try:
            process = session._server._process
            await session.prompt(Prompt(f"[[ {step} ;; say finished ]]"))
            (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
            await asyncio.sleep(PATIENCE)
            assert await session.answer(asked.request_id, Answer("accept"))
            events = await rest_of_turn(session)
            assert text(events) == "finished" and ended(events) == TurnEnded("end_turn")
            assert session._server._process is process and session.alive
        finally:
            await session.close()

    async with asyncio.TaskGroup() as waiting:
        for step in ("run touch made", "add made.txt | x", call(f"mcp__{SERVER}/act", what="x")):
            waiting.create_task(one(step))
        await asyncio.sleep(PATIENCE / 2)
        assert text(await place.played("say meanwhile")) == "meanwhile" and place.trap.effects == []
    assert place.trap.effects == ["act {'what': 'x'}", "made", "made.txt"]


async def test_allowed_calls_do_show(place: Place) -> None:
    """The trap catches: the same kinds of calls, allowed."""
    steps = ("run touch made", "add made.txt | x", call(f"mcp__{SERVER}/act", what="x"))
    events = await place.played(*steps, answer="accept")
    assert [each.status for each in of(events, ToolFinished)] == ["completed"] * 3
    assert place.trap.effects == ["act {'what': 'x'}", "made", "made.txt"]
