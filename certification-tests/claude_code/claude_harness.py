"""Opens sessions of the Claude Code driver on the scripted program, and reads their events with a bound on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import testkit
from agent.driver import ClaudeCodeDriver
from agent.session import ClaudeSession
from pkg.agent_api import AgentEvent, Answer, ApprovalRequested, Prompt, QuestionAsked, SessionSpec, TextDelta, TurnEnded
from pkg.launch import Launcher, LocalLauncher

PROGRAM = Path(testkit.__file__).with_name("scripted_claude.py")
BOUND = 30.0
"""Seconds any single wait may take; never the verdict itself."""


def command(**config: Any) -> tuple[str, ...]:
    """The command line of a scripted program."""
    return (sys.executable, "-I", "-S", str(PROGRAM), json.dumps(config))


def spec(workspace: Path, config: Mapping[str, Any] | None = None, **fields: Any) -> SessionSpec:
    """A session spec for the scripted program; ``fields`` are those of :class:`pkg.agent_api.SessionSpec`."""
    fields.setdefault("command", command(**(config or {})))
    fields.setdefault("startup_timeout", BOUND)
    fields.setdefault("initialize_timeout", BOUND)
    return SessionSpec(cwd=str(workspace), **fields)


@contextlib.asynccontextmanager
async def opened(
    workspace: Path, config: Mapping[str, Any] | None = None, *, launcher: Launcher | None = None, **fields: Any
) -> AsyncIterator[ClaudeSession]:
    """An open session, closed afterwards."""
    session = await ClaudeCodeDriver().open(spec(workspace, config, **fields), launcher or LocalLauncher())
    try:
        yield session
    finally:
        await session.close()


async def following(session: ClaudeSession, stop: Callable[[AgentEvent], bool]) -> list[AgentEvent]:
    """The session's events up to and including the first for which ``stop`` holds, or up to the stream's end."""
    events: list[AgentEvent] = []
    async with asyncio.timeout(BOUND):
        async for event in session.events():
            events.append(event)
            if stop(event):
                break
    return events


async def until(session: ClaudeSession, *kinds: type) -> list[AgentEvent]:
    """The events up to the first of one of these types."""
    return await following(session, lambda event: isinstance(event, kinds))


async def saying(session: ClaudeSession, text: str) -> list[AgentEvent]:
    """The events up to the one with which the answer contains ``text``."""
    said = ""

    def contains(event: AgentEvent) -> bool:
        nonlocal said
        said += event.text if isinstance(event, TextDelta) else ""
        return text in said

    return await following(session, contains)


async def rest(session: ClaudeSession) -> list[AgentEvent]:
    """Every event up to the end of the stream."""
    return await following(session, lambda event: False)


async def prompted(session: ClaudeSession, *lines: str) -> None:
    """Send a script as a prompt."""
    async with asyncio.timeout(BOUND):
        await session.prompt(Prompt("\n".join(lines)))


Chooses = str | Callable[[ApprovalRequested | QuestionAsked], Answer]


async def turn(session: ClaudeSession, *lines: str, choose: Chooses = "") -> list[AgentEvent]:
    """One turn whose prompt is the script ``lines``; approvals are answered by choice id, or by a function."""
    await prompted(session, *lines)
    events: list[AgentEvent] = []
    while not events or not isinstance(events[-1], TurnEnded):
        more = await until(session, ApprovalRequested, QuestionAsked, TurnEnded)
        events += more
        assert more, "the stream ended within a turn"
        if isinstance(asked := more[-1], ApprovalRequested | QuestionAsked):
            answer = Answer(choose) if isinstance(choose, str) else choose(asked)
            assert await session.answer(asked.request_id, answer)
    return events


def text(events: list[AgentEvent]) -> str:
    """The answer text among ``events``."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def of(events: list[AgentEvent], kind: type) -> list[Any]:
    """The events of one type."""
    return [event for event in events if isinstance(event, kind)]


def codes(events: list[AgentEvent]) -> list[str]:
    """The codes of the notices among ``events``."""
    return [event.code for event in events if hasattr(event, "code")]


def ended(events: list[AgentEvent]) -> TurnEnded:
    """The one end of a turn among ``events``."""
    ends = of(events, TurnEnded)
    assert len(ends) == 1, ends
    end: TurnEnded = ends[0]
    return end


def received(log: Path) -> list[dict[str, Any]]:
    """Every line that the program received (its ``log``), behind one with its arguments and environment."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def requests(log: Path, subtype: str) -> list[dict[str, Any]]:
    """The control requests of one kind that the program received."""
    lines = received(log)
    return [
        line["request"] for line in lines if line.get("type") == "control_request" and line["request"]["subtype"] == subtype
    ]


async def poll(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds: for what happens on the program's side, where nothing can be awaited."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
