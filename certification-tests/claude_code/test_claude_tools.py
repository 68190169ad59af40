"""LangBot's tools for the real Claude Code, in a real worker of the SDK's runtime: each call acts for its own run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit import anthropic_fixture as model
from testkit.anthropic_fixture import AnthropicFixture, anthropic_fixture
from testkit.sdk_worker import SdkWorker, built, descendants, sdk_worker

pytestmark = [pytest.mark.real_claude, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(200)]

NAME = "ClaudeCodeAgent"
CALL = "mcp__langbot_agent__langbot_call_tool"


class Desk:
    """A worker, the model, and the runner's form."""

    def __init__(self, worker: SdkWorker, fixture: AnthropicFixture, form: dict[str, Any], home: Path) -> None:
        self.worker, self.fixture, self._form, self.home = worker, fixture, form, home

    def form(self, **fields: Any) -> dict[str, Any]:
        """The form; ``fields`` with underscores for hyphens."""
        return {**self._form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def calling(self, who: str) -> str:
        """A prompt that makes the model call LangBot's tool ``echo``."""
        call = model.call(CALL, tool_name="echo", parameters={"who": who})
        return self.fixture.play(call, model.say(f"called for {who}"))

    def called(self) -> list[str]:
        """For whom the host's tool was called."""
        return [data["parameters"]["who"] for action, data in self.worker.host().calls if action == "call_tool"]


@pytest_asyncio.fixture(params=["http", "stdio"])
async def desk(request: pytest.FixtureRequest, claude_program: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """See :class:`Desk`; the tools are reached over http, or through a process of the program's own."""
    home, workspace = tmp_path / "home", tmp_path / "workspace"
    for each in (home, workspace):
        each.mkdir()
    async with anthropic_fixture() as fixture, sdk_worker(built(NAME), tmp_path / "runtime", name=NAME) as worker:
        form = {
            "command": str(claude_program),
            "workspace": str(workspace),
            "env-json": {**fixture.environment(), "HOME": str(home)},
            "mcp-bridge-transport": request.param,
            "allowed-tools": ["mcp__langbot_agent"],
        }
        yield Desk(worker, fixture, form, home)


async def test_the_program_calls_langbot_s_tools_run_after_run(desk: Desk) -> None:
    """One live program, two runs: the second run's calls act for the second, and no bearer is to be seen or stored."""
    for number, who in enumerate(("first", "second")):
        outcome = await desk.worker.run(desk.calling(who), run_id=f"r{number}", config=desk.form())
        assert outcome.shown == [f"called for {who}"], outcome.text
        assert desk.called()[-1] == who
    programs = 0
    for pid in descendants(desk.worker.pid()):
        with contextlib.suppress(OSError):
            command, environment = (Path(f"/proc/{pid}/{view}").read_bytes() for view in ("cmdline", "environ"))
            programs += Path(f"/proc/{pid}/exe").readlink().name == "claude"
            assert b"Bearer" not in command
            assert b"Bearer" not in environment or b"LANGBOT_MCP_HEADERS" in environment
    assert programs == 1
    stored = [path.read_bytes() for path in desk.home.rglob("*") if path.is_file()]
    assert stored and not any(b"Bearer " in each for each in stored)


async def test_without_leave_the_policy_decides_about_tools_too(desk: Desk) -> None:
    """Our rule: LangBot's tools are tools; where nobody said that they may be used they are asked about like any other.

    What is allowed is called in the run of the answer.
    """
    outcome = await desk.worker.run(desk.calling("somebody"), config=desk.form(allowed_tools=[]))
    assert desk.called() == []
    assert "langbot_call_tool" in outcome.text and "1. Allow once" in outcome.text
    outcome = await desk.worker.run("1", run_id="r2", config=desk.form(allowed_tools=[]))
    assert desk.called() == ["somebody"], outcome.text
    outcome = await desk.worker.run(
        desk.calling("all"), run_id="r3", config=desk.form(allowed_tools=[], approval_policy="allow-all")
    )
    assert desk.called() == ["somebody", "all"], outcome.text


async def test_tools_are_what_the_run_may_use(desk: Desk) -> None:
    """Vendor's rule: the names of a server's tools are told to the model at once, their schemas when it asks for them."""
    await desk.worker.run("[[ say hello ]]", config=desk.form())
    told = json.dumps(desk.fixture.bodies[-1])
    assert CALL in told and "mcp__langbot_agent__langbot_list_assets" in told
    await desk.worker.run("[[ say hello ]]", run_id="r2", conversation="c2", config=desk.form(langbot_assets_enabled=False))
    assert "mcp__langbot_agent" not in json.dumps(desk.fixture.bodies[-1])
