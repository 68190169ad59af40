"""Streams recorded from Codex 0.171.0 through the state machines alone, without a process; and whether it still says the same.

A recording is a turn's messages from the answer to ``turn/start`` on, without times and with names for its ids. The model was
the fixture, so every text in it is ours.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from codex_harness import turn
from real_codex import Codex, real_codex

from agent.requests import ServerRequests
from agent.translate import Translator
from agent.turns import End, TurnTracker
from pkg.agent_api import (
    AgentEvent,
    Answer,
    ApprovalRequested,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    UsageReported,
)

STREAMS = Path(__file__).with_name("streams")
SCRIPTS = {
    "text": "[[ say hello there ]]",
    "reasoning": "[[ reason thinking hard | the answer ]]",
    "commentary": "[[ comment on my way | say arrived ]]",
    "command": "[[ run echo hi ;; say done ]]",
    "patch": "[[ add a.txt | one ;; change a.txt | one | two ;; say done ]]",
    "failure": "[[ failed context_length_exceeded | too long ]]",
}
"""What the model was told in each recording."""


SOMETIMES = {("item/commandExecution/outputDelta", "")}
"""What a quick command's end may say in its place."""


def recorded(name: str) -> list[dict[str, Any]]:
    """The messages of one recording."""
    return [json.loads(line) for line in (STREAMS / f"{name}.jsonl").read_text().splitlines()]


def played(name: str) -> tuple[list[AgentEvent], End]:
    """The events of a recorded turn and its end; approvals are accepted."""
    tracker, translator = TurnTracker(), Translator()
    requests = ServerRequests(translator.changes)
    tracker.start()
    translator.begin_turn()
    events: list[AgentEvent] = []
    end: End | None = None
    for message in recorded(name):
        assert end is None, "nothing comes behind the end of a turn"
        method, params = message.get("method", ""), message.get("params", {})
        if not method:
            end = tracker.named(message["result"]["turn"]["id"])
        elif "id" in message:
            outcome = requests.asked(message["id"], method, params, in_turn=tracker.belongs(params["turnId"]))
            events += outcome.events
            for event in outcome.events:
                if isinstance(event, ApprovalRequested):
                    assert requests.answer(event.request_id, Answer("accept")) is not None
        elif method == "turn/completed":
            end = tracker.completed(params["turn"])
        elif tracker.belongs(params.get("turnId") or params.get("turn", {}).get("id", "")):
            events += translator.notification(method, params)
    assert end is not None
    return [*events, *translator.end_turn(end.items)], end


def said(events: list[AgentEvent], kind: type = TextDelta) -> str:
    """The texts of one kind."""
    return "".join(event.text for event in events if isinstance(event, TextDelta | ThoughtDelta) and isinstance(event, kind))


def shape(messages: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """What kinds of messages and items there are."""
    found = set()
    for message in messages:
        params = message.get("params") or {}
        item = params.get("item") or {}
        found.add((message.get("method", "answer"), item.get("type", "")))
    return found


@pytest.mark.parametrize(
    ("name", "answer", "thought"),
    [
        ("text", "hello there", ""),
        ("reasoning", "the answer", "thinking hard"),
        ("commentary", "arrived", "on my way"),
        ("command", "done", ""),
        ("patch", "done", ""),
        ("failure", "", ""),
    ],
)
def test_a_recorded_turn_says_what_the_model_said(name: str, answer: str, thought: str) -> None:
    """Once, whole, and thoughts apart."""
    events, end = played(name)
    assert said(events) == answer
    assert said(events, ThoughtDelta).strip() == thought
    assert end.status == ("failed" if name == "failure" else "completed")


def test_a_recorded_command_and_its_approval() -> None:
    """Started, asked about, finished, in this order; the turn's cost is that of both requests."""
    events, _ = played("command")
    kinds = [type(event) for event in events if isinstance(event, ToolStarted | ApprovalRequested | ToolFinished)]
    assert kinds == [ToolStarted, ApprovalRequested, ToolFinished]
    (finished,) = [event for event in events if isinstance(event, ToolFinished)]
    assert (finished.title, finished.output, finished.status) == ("echo hi", "hi\n", "completed")
    (usage,) = [event for event in events if isinstance(event, UsageReported)]
    assert usage.total_tokens == 300


def test_recorded_patches_have_their_diffs() -> None:
    """An added file whole, a changed one by its hunk."""
    events, _ = played("patch")
    diffs = [diff for event in events if isinstance(event, ToolFinished) for diff in event.diffs]
    assert [(diff.path, diff.old_text, diff.new_text) for diff in diffs] == [
        ("/w/a.txt", None, "one\n"),
        ("/w/a.txt", "one\n", "two\n"),
    ]
    assert all(event.complete for event in events if isinstance(event, ApprovalRequested))


def test_a_recorded_failure_has_its_cause() -> None:
    """As Codex names it."""
    _, end = played("failure")
    assert end.error["codexErrorInfo"] == "contextWindowExceeded"


@pytest_asyncio.fixture
async def codex(codex_program: Path) -> AsyncIterator[Codex]:
    """The real program with an account of its own."""
    async with real_codex(codex_program) as made:
        yield made


@pytest.mark.real_codex
@pytest.mark.asyncio
@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_program_still_says_what_was_recorded(name: str, codex: Codex) -> None:
    """Every kind of message of the recording comes from the pinned program, too."""
    async with codex.session() as session:
        start = len(codex.launcher.heard)
        await turn(session, SCRIPTS[name], choose="accept")
        missing = shape(recorded(name)) - shape(codex.launcher.heard[start:])
    assert missing <= SOMETIMES
