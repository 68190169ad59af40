"""Opens sessions of the ACP driver on the scripted agent, and reads their events with a bound on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.driver import AcpDriver
from agent.session import AcpSession
from pkg.agent_api import AgentEvent, Answer, ApprovalRequested, McpServer, Prompt, SessionSpec, TextDelta, TurnEnded
from pkg.launch import Launcher, LocalLauncher

AGENT = Path(__file__).with_name("scripted_acp_agent.py")
BOUND = 30.0
"""Seconds any single wait may take; never the verdict itself."""


def command(**config: Any) -> tuple[str, ...]:
    """The command line of a scripted agent."""
    return (sys.executable, "-I", "-S", str(AGENT), json.dumps(config))


def spec(workspace: Path, config: Mapping[str, Any] | None = None, **fields: Any) -> SessionSpec:
    """A session spec for the scripted agent; ``fields`` are those of :class:`pkg.agent_api.SessionSpec`."""
    fields.setdefault("command", command(**(config or {})))
    fields.setdefault("startup_timeout", BOUND)
    fields.setdefault("initialize_timeout", BOUND)
    return SessionSpec(cwd=str(workspace), **fields)


@contextlib.asynccontextmanager
async def opened(
    workspace: Path,
    config: Mapping[str, Any] | None = None,
    *,
    driver: AcpDriver | None = None,
    launcher: Launcher | None = None,
    **fields: Any,
) -> AsyncIterator[AcpSession]:
    """An open session, closed afterwards."""
    session = await (driver or AcpDriver()).open(spec(workspace, config, **fields), launcher or LocalLauncher())
    try:
        yield session
    finally:
        await session.close()


async def following(session: AcpSession, stop: Callable[[AgentEvent], bool]) -> list[AgentEvent]:
    """The session's events up to and including the first for which ``stop`` holds, or up to the stream's end."""
    events: list[AgentEvent] = []
    async with asyncio.timeout(BOUND):
        async for event in session.events():
            events.append(event)
            if stop(event):
                break
    return events


async def until(session: AcpSession, *kinds: type) -> list[AgentEvent]:
    """The events up to the first of one of these types."""
    return await following(session, lambda event: isinstance(event, kinds))


async def rest(session: AcpSession) -> list[AgentEvent]:
    """Every event up to the end of the stream."""
    return await following(session, lambda event: False)


async def turn(session: AcpSession, *lines: str, choose: str | Callable[[ApprovalRequested], Answer] = "") -> list[AgentEvent]:
    """One turn whose prompt is the script ``lines``; approvals are answered by choice id or kind, or by a function."""
    async with asyncio.timeout(BOUND):
        await session.prompt(Prompt("\n".join(lines)))
    events: list[AgentEvent] = []
    while not events or not isinstance(events[-1], TurnEnded):
        more = await until(session, ApprovalRequested, TurnEnded)
        events += more
        assert more, "the stream ended within a turn"
        if isinstance(more[-1], ApprovalRequested):
            answer = Answer(choose) if isinstance(choose, str) else choose(more[-1])
            assert await session.answer(more[-1].request_id, answer)
    return events


def text(events: list[AgentEvent]) -> str:
    """The answer text among ``events``."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def of(events: list[AgentEvent], kind: type) -> list[Any]:
    """The events of one type."""
    return [event for event in events if isinstance(event, kind)]


def ended(events: list[AgentEvent]) -> TurnEnded:
    """The one end of a turn among ``events``."""
    ends = of(events, TurnEnded)
    assert len(ends) == 1, ends
    end: TurnEnded = ends[0]
    return end


def received(log: Path, method: str) -> list[dict[str, Any]]:
    """The parameters of every message of one method that the agent received (its ``log``)."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line.get("params") or {} for line in lines if line.get("method") == method]


async def poll(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds: for what happens on the agent's side, where nothing can be awaited."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def buffered(session: AcpSession, count: int) -> None:
    """Wait until ``count`` events are held for the session's consumer."""
    await poll(lambda: len(session._events._events) >= count)


def http_server(name: str = "langbot", url: str = "http://127.0.0.1:1/mcp", bearer: str = "canary-bearer") -> McpServer:
    """An MCP server nobody listens at."""
    return McpServer(name, "http", url=url, headers={"Authorization": f"Bearer {bearer}"})
