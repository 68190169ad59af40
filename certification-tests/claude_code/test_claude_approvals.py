"""The real Claude Code asks in the chat and waits between two runs in a real worker; the model is a local protocol fixture."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from test_claude_places import Stage, staged

from testkit.anthropic_fixture import call, say
from testkit.sdk_worker import gone

pytestmark = [pytest.mark.real_claude, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

REASON = "not-on-a-friday"
SHORTEST = 30
"""Seconds of the shortest ``approval-timeout`` that the form takes."""


@pytest_asyncio.fixture
async def stage(tmp_path: Path, claude_program: Path) -> AsyncIterator[Stage]:
    """The program beside the worker."""
    async with staged("local", tmp_path, claude_program) as made:
        yield made


def told(stage: Stage) -> str:
    """What the model was given last."""
    return json.dumps(stage.model.bodies[-1].get("messages"))


@pytest.mark.parametrize("tool", ["Bash", "Write"])
async def test_an_action_waits_for_its_answer_in_the_same_process(tool: str, stage: Stage) -> None:
    """Allowed it has its effect, once; denied it has none, and the reason is what the model reads next."""
    made = [stage.workspace / name for name in ("one.txt", "two.txt")]
    for path, answer in zip(made, ("1", f"deny because {REASON}"), strict=True):
        asked = call("Bash", command=f"touch {path}") if tool == "Bash" else call("Write", file_path=str(path), content="new")
        first = await stage.run(stage.model.play(asked, say("finished")))
        assert first.reason == "stop"
        assert path.name in first.text
        assert "4. " in first.text
        assert not path.exists()
        (program,) = stage.programs()
        calls = len(stage.model.bodies)
        done = await stage.run(answer)
        assert "finished" in done.text
        assert stage.programs() == {program}
        assert len(stage.model.bodies) == calls + 1, "the same turn went on"
        assert path.exists() == (answer == "1")
        assert (REASON in told(stage)) == (answer != "1")


async def test_its_question_is_answered_by_a_number(stage: Stage) -> None:
    """AskUserQuestion: the chosen label is what the model reads."""
    options = [{"label": "Red", "description": "warm"}, {"label": "Green", "description": "cool"}]
    question = {"question": "Which color?", "header": "Color", "options": options, "multiSelect": False}
    first = await stage.run(stage.model.play(call("AskUserQuestion", questions=[question]), say("thanks")))
    assert "Which color?" in first.text
    assert "Green" in first.text
    (program,) = stage.programs()
    done = await stage.run("2")
    assert "thanks" in done.text
    assert stage.programs() == {program}
    (result,) = [
        part
        for message in stage.model.bodies[-1]["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "tool_result"
    ]
    assert "Green" in json.dumps(result)


async def test_what_nobody_answers_is_cancelled_and_the_next_message_works(stage: Stage) -> None:
    """On the deadline, with nothing done and no process left where none is kept."""
    path = stage.workspace / "never.txt"
    fields = {"approval_timeout": SHORTEST, "keep_warm": 0}
    await stage.run(stage.model.play(call("Bash", command=f"touch {path}"), say("finished")), **fields)
    calls = len(stage.model.bodies)
    assert await gone(stage.processes(), 60.0)
    done = await stage.run("[[ say going on ]]", **fields)
    assert "Nobody answered in time" in done.shown[0]
    assert "going on" in done.text
    assert not path.exists()
    assert len(stage.model.bodies) == calls + 1
    assert stage.processes() == {}
