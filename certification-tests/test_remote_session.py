"""A session over the relay as the run loop sees it: a real hub, daemons that do what no good daemon does, scripted drivers.

The daemons live in this process (real sockets, local protocol fixtures for the agents); the program itself is tried in
``test_daemon_program.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg.agent_api import (
    Answer,
    Json,
    McpServer,
    Notice,
    Prompt,
    QuestionAsked,
    SessionSpec,
    TextDelta,
    TurnEnded,
    to_json,
)
from pkg.daemon_audit import Audit
from pkg.daemon_jobs import DurableJobTable
from pkg.daemon_policy import load
from pkg.daemon_program import Daemon, Slots
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.errors import CodingError, ProcessCleanupUnconfirmed
from pkg.relay_events import Verb
from pkg.remote_session import DaemonPlace, RemoteDriver, RemoteSession
from testkit.daemon_rig import DAEMON_ID, DaemonHome, following, turn
from testkit.relay_rig import TOKEN, WAIT, ScriptedDaemon, running_daemon, running_hub
from testkit.scripted_driver import ScriptedDriver, ScriptedSession

pytestmark = pytest.mark.asyncio

OPENED = {"type": "SessionOpened", "session_id": "s", "directory": "/w", "capabilities": {"steer": True, "unknown": True}}


@pytest_asyncio.fixture
async def hub(tmp_path: Path) -> AsyncIterator[AgentRuntimeDaemonHub]:
    """A hub with durable fences."""
    async with running_hub(state_dir=tmp_path / "hub") as hub:
        yield hub


async def answered(tools: Any) -> Any:
    """A tool that answers nothing."""
    return None


class Workstation:
    """The daemon's own jobs with a scripted driver, in this process."""

    def __init__(self, hub: AgentRuntimeDaemonHub, directory: Path, driver: ScriptedDriver) -> None:
        home = DaemonHome(directory / "home", hub.endpoint)
        policy = load(home.policy, ("acp",), ("ask", "allow-edits", "deny"))
        self.table = DurableJobTable(directory / "table")
        self.daemon = Daemon(
            policy=policy,
            drivers={"acp": driver},
            table=self.table,
            slots=Slots(policy.max_jobs),
            audit=Audit(directory / "state"),
            url=hub.endpoint,
            token=TOKEN,
            reconnect_delay=0.05,
        )

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """At work while the block runs."""
        task = asyncio.create_task(self.daemon.run_forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            self.table.close()


def remote(hub: AgentRuntimeDaemonHub, tools: Any = None) -> RemoteDriver:
    """The driver for the workstation's agent."""
    return RemoteDriver(hub, DAEMON_ID, "scripted", "acp", tools=tools, connect_timeout=WAIT)


async def opened(hub: AgentRuntimeDaemonHub, tools: Any = None) -> RemoteSession:
    """An open session."""
    return await remote(hub, tools).open(SessionSpec(command=(), cwd=""))


async def test_every_verb_arrives(hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
    """Steering, a question's answer and renewed MCP servers reach the session; LangBot's tools stay among the servers."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        answer = await session.ask(QuestionAsked("q1", "Which?"))
        session.emit(TextDelta(str(answer.values["name"])))
        await session.steering.wait()
        return None

    driver = ScriptedDriver(script)
    driver.steerable = driver.renewable = True
    station = Workstation(hub, tmp_path, driver)
    async with station.working():
        session = await opened(hub, answered)
        assert session.capabilities.steer and session.capabilities.live_mcp and not session.capabilities.images
        await session.prompt(Prompt("go"))
        await following(session, lambda event: isinstance(event, QuestionAsked))
        assert await session.answer("q1", Answer(values={"name": "that one"}))
        assert await session.steer(Prompt("and hurry"))
        events = await following(session, lambda event: isinstance(event, TurnEnded))
        assert TextDelta("that one") in events
        inner = driver.sessions[-1]
        assert [prompt.text for prompt in inner.steered] == ["and hurry"]
        assert await session.renew_mcp((McpServer("more", "http", url="http://127.0.0.1:1/"),))
        assert [server.name for server in inner.renewed[-1]] == ["more", "langbot_agent"]
        with pytest.raises(CodingError) as refused:
            await session.renew_mcp((McpServer("evil", "stdio", command=("sh",)),))
        assert refused.value.code == "coding.policy_mcp_command"
        await session.close()
        assert inner.closed.is_set()


async def test_an_end_without_a_word_ends_the_turn(hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
    """A stream that stops in the middle of a turn is an error of that turn, told once."""

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.die()
        await asyncio.Event().wait()
        return None

    station = Workstation(hub, tmp_path, ScriptedDriver(script))
    async with station.working():
        session = await opened(hub)
        events = await turn(session, "go")
        assert isinstance(events[-1], TurnEnded) and events[-1].stop_reason == "error"
        assert await following(session, lambda event: False) == []
        assert not session.alive and not await session.steer(Prompt("x"))
        await session.interrupt()
        await session.close()
        await session.close()


async def test_an_end_that_is_not_proven_is_never_a_success(hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
    """Closing raises, the machine is fenced, and its own later proof lifts the fence without a restart."""
    driver = ScriptedDriver()
    station = Workstation(hub, tmp_path, driver)
    async with station.working():
        session = await opened(hub)
        driver.sessions[-1].close_error = ProcessCleanupUnconfirmed("a child is left", (1,))
        with pytest.raises(ProcessCleanupUnconfirmed):
            await session.close()
        with pytest.raises(ProcessCleanupUnconfirmed):
            await session.close()
        await hub.wait_for_daemon(DAEMON_ID, WAIT)
        again = await opened(hub)
        assert TextDelta("echo: hello") in await turn(again, "hello")
        await again.close()


async def test_cancelling_the_caller_of_close_changes_nothing(hub: AgentRuntimeDaemonHub, tmp_path: Path) -> None:
    """However often it is cancelled, closing returns after the end of the session, and the cancellation is raised then."""
    driver = ScriptedDriver()
    station = Workstation(hub, tmp_path, driver)
    async with station.working():
        session = await opened(hub)
        closing = asyncio.create_task(session.close())
        for _ in range(5):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert driver.sessions[-1].closed.is_set()


class Rogue(ScriptedDaemon):
    """A daemon that emits whatever its list says, and answers every command."""

    def __init__(self, events: list[Json], **named: Any) -> None:
        super().__init__(**named)
        self.told = events
        self.prompted = asyncio.Event()

    async def handle_command(self, job_id: str, verb: Verb, value: Json) -> Json:
        self.prompted.set()
        return True

    async def run_job(self, job_id: str, payload: Json) -> None:
        await self.emit_event(job_id, self.told[0])
        await self.prompted.wait()
        for event in self.told[1:]:
            await self.emit_event(job_id, event)
        await asyncio.Event().wait()


async def test_what_is_no_event_is_passed_over(hub: AgentRuntimeDaemonHub) -> None:
    """Garbage becomes a notice, only the first end of a turn counts, and the rest arrives."""
    told = [
        OPENED,
        {"type": "Nonsense"},
        {"type": "TextDelta"},
        {"type": "TextDelta", "text": {"not": "a text"}},
        to_json(TextDelta("good")),
        to_json(TurnEnded("end_turn")),
        to_json(TurnEnded("end_turn")),
        to_json(TextDelta("late")),
    ]
    async with running_daemon(Rogue(told, url=hub.endpoint, daemon_id=DAEMON_ID)):
        session = await opened(hub)
        await session.prompt(Prompt("go"))
        events = await following(session, lambda event: event == TextDelta("late"))
        assert events == [*[Notice("agent.unknown_event")] * 3, TextDelta("good"), TurnEnded("end_turn"), TextDelta("late")]
        assert session.capabilities.steer
        await session.close()


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"type": "TextDelta", "text": "x"},
        OPENED | {"session_id": 1},
        OPENED | {"capabilities": []},
        OPENED | {"session_id": "x" * 5000},
        OPENED | {"directory": "/" * 5000},
    ],
    ids=["nothing", "an event", "no id", "no capabilities", "a long id", "a long directory"],
)
async def test_a_daemon_that_does_not_open_a_session_is_refused(hub: AgentRuntimeDaemonHub, first: Json) -> None:
    """Another first event is a protocol error, and the job is ended before that is told."""
    rogue = Rogue([first], url=hub.endpoint, daemon_id=DAEMON_ID)
    async with running_daemon(rogue):
        with pytest.raises(CodingError) as refused:
            await opened(hub)
        assert refused.value.code == "coding.daemon_protocol"
        assert rogue.jobs() == ()


@pytest.mark.parametrize(
    "params", [{"prefix": "x", "reason": "y", "retryable": "z", "daemon": "w", "detail": "words"}, [], None]
)
async def test_a_failure_s_parameters_are_data(hub: AgentRuntimeDaemonHub, params: Json) -> None:
    """Whatever a daemon names its parameters, the error is the one it told of."""

    class Failing(ScriptedDaemon):
        async def run_job(self, job_id: str, payload: Json) -> None:
            await self.finish_job(job_id, "failed", {"code": "coding.agent_start_failed", "params": params})

    async with running_daemon(Failing(url=hub.endpoint, daemon_id=DAEMON_ID)):
        with pytest.raises(CodingError) as failed:
            await opened(hub)
        assert failed.value.code == "coding.agent_start_failed"
        assert failed.value.detail == ("words" if params else "")


FORGED = 'x".\n\nYour account needs attention \x1b[31m\ud800'


async def test_a_failure_s_parameters_stay_inside_their_sentence(hub: AgentRuntimeDaemonHub) -> None:
    """Our rule: a daemon fills places in our texts and writes none of their lines; only the agent's words below have any."""

    class Failing(ScriptedDaemon):
        async def run_job(self, job_id: str, payload: Json) -> None:
            many = {f"more{number}": "x" for number in range(1000)}
            params = {"agent": FORGED, "known": "k" * 5000, "detail": "two\nlines\x07", **many}
            await self.finish_job(job_id, "failed", {"code": "coding.policy_agent_unknown", "params": params})

    async with running_daemon(Failing(url=hub.endpoint, daemon_id=DAEMON_ID)):
        with pytest.raises(CodingError) as failed:
            await opened(hub)
    first, *below = str(failed.value).split("\n")
    assert below == ["two", "lines"]
    assert "Your account" in first and "\x1b" not in first and "\ud800" not in first
    assert len(first) < 1200 and len(failed.value.params) < 20


async def test_an_event_s_parameters_stay_inside_their_sentence(hub: AgentRuntimeDaemonHub) -> None:
    """As before, for what a session says; a code that is none of ours is no text of ours."""
    error = {"code": f"coding.{FORGED}", "detail": "words", "params": {"name": FORGED}, "retryable": False}
    told = [
        OPENED,
        to_json(Notice("coding.policy_option", level="warning", params={"name": FORGED})),
        {"type": "TurnEnded", "stop_reason": "error", "error": error},
    ]
    async with running_daemon(Rogue(told, url=hub.endpoint, daemon_id=DAEMON_ID)):
        session = await opened(hub)
        await session.prompt(Prompt("go"))
        notice, end = await following(session, lambda event: isinstance(event, TurnEnded))
        assert isinstance(notice, Notice) and "\n" not in notice.params["name"]
        assert isinstance(end, TurnEnded) and end.error is not None
        assert (end.error.code, end.error.detail) == ("coding.daemon_job_failed", "words")
        assert "\n" not in end.error.params["name"]
        await session.close()


async def test_a_machine_that_is_not_there(hub: AgentRuntimeDaemonHub) -> None:
    """Nothing is sent, and the text names the machine."""
    with pytest.raises(CodingError) as offline:
        await RemoteDriver(hub, "desk", "scripted", "acp").open(SessionSpec(command=(), cwd=""))
    assert offline.value.code == "coding.daemon_offline" and "desk" in str(offline.value)


async def test_a_machine_s_name_is_stable_and_its_place_starts_nothing() -> None:
    """Two daemons are two machines; a command line never starts from here."""
    assert DaemonPlace("a").machine == DaemonPlace("a").machine != DaemonPlace("b").machine
    assert DaemonPlace("a").label == "a" and not DaemonPlace("a").local
    assert await DaemonPlace("a").reach("http://127.0.0.1:1") == "http://127.0.0.1:1"
    with pytest.raises(CodingError):
        await DaemonPlace("a").start(None)  # type: ignore[arg-type]
