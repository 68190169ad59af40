"""Opens sessions of the Codex driver on the scripted app-server, and reads their events with a bound on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.confinement import BASES, sandbox_of
from agent.driver import CodexDriver
from agent.failures import Place
from agent.files import SessionFiles
from agent.opening import Opening
from agent.server import AppServer
from agent.session import CodexSession
from pkg.agent_api import AgentEvent, Answer, ApprovalRequested, Prompt, QuestionAsked, SessionSpec, TextDelta, TurnEnded
from pkg.launch import Command, Launcher, LocalLauncher
from pkg.redaction import Redactor
from testkit import scripted_codex

SERVER = Path(scripted_codex.__file__)
BOUND = 30.0
"""Seconds any single wait may take; never the verdict itself."""


def program(directory: Path) -> str:
    """An executable that is the scripted app-server."""
    path = directory / "codex"
    if not path.exists():
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {SERVER} "$@"\n')
        path.chmod(0o755)
    return str(path)


def spec(place: Path, config: Mapping[str, Any] | None = None, **fields: Any) -> SessionSpec:
    """A session spec for the scripted app-server; workspace, home and log are below ``place``."""
    workspace, home = place / "workspace", place / "home"
    for each in (workspace, home):
        each.mkdir(exist_ok=True)
    settings = {"log": str(place / "log"), **(config or {})}
    env = {"CODEX_HOME": str(home), "SCRIPTED_CODEX": json.dumps(settings), **fields.pop("env", {})}
    fields.setdefault("command", (program(place),))
    fields.setdefault("startup_timeout", BOUND)
    fields.setdefault("initialize_timeout", BOUND)
    fields.setdefault("cwd", str(workspace))
    return SessionSpec(env=env, **fields)


@contextlib.asynccontextmanager
async def opened(
    place: Path,
    config: Mapping[str, Any] | None = None,
    *,
    driver: CodexDriver | None = None,
    launcher: Launcher | None = None,
    **fields: Any,
) -> AsyncIterator[CodexSession]:
    """An open session, closed afterwards."""
    session = await (driver or CodexDriver()).open(spec(place, config, **fields), launcher or LocalLauncher())
    try:
        yield session
    finally:
        await session.close()


async def following(session: CodexSession, stop: Callable[[AgentEvent], bool]) -> list[AgentEvent]:
    """The session's events up to and including the first for which ``stop`` holds, or up to the stream's end."""
    events: list[AgentEvent] = []
    async with asyncio.timeout(BOUND):
        async for event in session.events():
            events.append(event)
            if stop(event):
                break
    return events


async def until(session: CodexSession, *kinds: type) -> list[AgentEvent]:
    """The events up to the first of one of these types."""
    return await following(session, lambda event: isinstance(event, kinds))


async def on_one_server(wanted: SessionSpec, launcher: Launcher, count: int) -> tuple[list[CodexSession], AppServer]:
    """Sessions on threads of one app-server, which ends with the last of them."""
    process = await launcher.start(Command((*wanted.command, "app-server"), wanted.cwd, wanted.env))
    server = AppServer(process, Redactor(()))
    server.peer.start()
    sessions = []
    for number in range(count):
        attempt = Opening(wanted, server, local=True, place=Place("codex login", launcher.label))
        if number == 0:
            await attempt.handshake(BOUND)
        await attempt.thread()
        files = SessionFiles(server, wanted.cwd, local=True)
        sandbox = sandbox_of(wanted.options, wanted.policy)
        sessions.append(CodexSession(attempt, sandbox=sandbox, files=files))
    return sessions, server


Chooser = Callable[[ApprovalRequested | QuestionAsked], Answer]


async def turn(session: CodexSession, *lines: str, choose: str | Chooser = "") -> list[AgentEvent]:
    """One turn whose prompt is the script ``lines``; what is asked is answered by choice id, or by a function."""
    async with asyncio.timeout(BOUND):
        await session.prompt(Prompt("\n".join(lines)))
    return await rest_of_turn(session, choose=choose)


async def rest_of_turn(session: CodexSession, *, choose: str | Chooser = "") -> list[AgentEvent]:
    """The events up to the turn's end."""
    events: list[AgentEvent] = []
    while not events or not isinstance(events[-1], TurnEnded):
        more = await until(session, ApprovalRequested, QuestionAsked, TurnEnded)
        events += more
        assert more, "the stream ended within a turn"
        last = more[-1]
        if isinstance(last, ApprovalRequested | QuestionAsked):
            answer = Answer(choose) if isinstance(choose, str) else choose(last)
            assert await session.answer(last.request_id, answer)
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


def received(place: Path, method: str) -> list[dict[str, Any]]:
    """The parameters of every message of one method that the app-server received."""
    return [line.get("params") or {} for line in log_of(place) if line.get("method") == method]


def sandbox_in(params: Mapping[str, Any]) -> str:
    """The sandbox mode that a thread's parameters mean, by name or by a profile of its own."""
    if "sandbox" in params:
        return str(params["sandbox"])
    base = profile_in(params)["extends"]
    return next(mode for mode, profile in BASES.items() if profile == base)


def profile_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """The profile that a thread's parameters bring and choose."""
    profile: dict[str, Any] = params["config"]["permissions"][params["permissions"]]
    return profile


def log_of(place: Path) -> list[dict[str, Any]]:
    """Every message that the app-server received, with its command line."""
    log = place / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


async def poll(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds: for what happens on the app-server's side, where nothing can be awaited."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
