"""A package that cannot drive its agent yet: in a real worker it says so in one sentence and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.sdk_worker import Shape, built, descendants, sdk_worker

AGENTS = {"ClaudeCodeAgent": "Claude Code"}

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio]


@pytest.mark.parametrize("shape", ["dedicated", "pool"])
@pytest.mark.parametrize("name", AGENTS)
async def test_a_message_is_answered_with_what_to_use_instead(name: str, shape: Shape, tmp_path: Path) -> None:
    """Our rule: a refusal people can read, one terminal result, no process; whatever the settings say, even nonsense."""
    async with sdk_worker(built(name), tmp_path, shape, name=name) as worker:
        for config in ({}, {"location": "daemon", "timeout": "soon", "env-json": "{"}):
            outcome = await worker.run("hello", config=config)
            assert AGENTS[name] in outcome.text
            assert "ACP" in outcome.text
            assert outcome.terminal.type == "run.completed"
        in_russian = await worker.run("привет")
        assert AGENTS[name] in in_russian.text
        assert in_russian.text != outcome.text
        assert descendants(worker.pid()) == {}
