"""Local protocol fixture: a driver whose "agent" is a coroutine of the test, speaking the vocabulary of ``pkg.agent_api``.

No process and no vendor protocol is involved; it exists to put the run loop, the warm pool and the registry into states
that a real agent reaches rarely. A *script* is called once per turn with the session and the prompt; it emits events and
returns a stop reason (``None`` means ``end_turn``). An interrupt cancels the script unless the session is stubborn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pkg.agent_api import (
    AgentEvent,
    Answer,
    Json,
    McpServer,
    Prompt,
    SessionCapabilities,
    SessionSpec,
    SessionStarted,
    TextDelta,
    TurnEnded,
)
from pkg.errors import TurnInProgress

Script = Callable[["ScriptedSession", Prompt], Awaitable[str | None]]


async def echo(session: ScriptedSession, prompt: Prompt) -> str | None:
    """Answer with the prompt's own text."""
    session.emit(TextDelta(f"echo: {prompt.text}"))
    return None


class ScriptedSession:
    """One session; everything that was done to it stands in its public lists."""

    def __init__(self, driver: ScriptedDriver, spec: SessionSpec, session_id: str) -> None:
        """Open with a ``SessionStarted`` already on the stream."""
        self.driver = driver
        self.spec = spec
        self.session_id = session_id
        self.directory = spec.cwd
        self.capabilities = SessionCapabilities(steer=driver.steerable, live_mcp=driver.renewable)
        self.prompts: list[Prompt] = []
        self.steered: list[Prompt] = []
        self.answers: dict[str, Answer] = {}
        self.answered: dict[str, asyncio.Event] = {}
        self.steering = asyncio.Event()
        self.renewed: list[tuple[McpServer, ...]] = []
        self.options: list[Mapping[str, Json]] = []
        """What it was asked to go on with."""
        self.interrupts = 0
        self.stubborn = driver.stubborn
        self.closed = asyncio.Event()
        self.close_error: BaseException | None = None
        self._events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        self._turn: asyncio.Task[None] | None = None
        self._dead = False

    @property
    def alive(self) -> bool:
        """Neither closed nor killed."""
        return not self._dead and not self.closed.is_set()

    def emit(self, event: AgentEvent) -> None:
        """Put an event on the stream."""
        self._events.put_nowait(event)

    def die(self) -> None:
        """End the stream without a turn's end, as no driver may: the loop must cope all the same."""
        self._dead = True
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[AgentEvent]:
        """The stream, until :meth:`die` or :meth:`close`."""
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event

    async def prompt(self, prompt: Prompt) -> None:
        """Start the script."""
        if self._turn is not None and not self._turn.done():
            raise TurnInProgress
        if self.driver.prompt_errors:
            self._dead = True
            raise self.driver.prompt_errors.pop(0)
        self.prompts.append(prompt)
        self._turn = asyncio.get_running_loop().create_task(self._run(prompt))

    async def _run(self, prompt: Prompt) -> None:
        try:
            stop = await self.driver.script(self, prompt)
        except asyncio.CancelledError:
            stop = "cancelled"
        if not self._dead:
            self.emit(TurnEnded(stop or "end_turn"))

    async def steer(self, prompt: Prompt) -> bool:
        """Take the message when the driver is steerable."""
        if not self.driver.steerable:
            return False
        self.steered.append(prompt)
        self.steering.set()
        return True

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Record the answer and let :meth:`ask` go on."""
        if request_id in self.answers:
            return False
        self.answers[request_id] = answer
        self.answered.setdefault(request_id, asyncio.Event()).set()
        return True

    async def ask(self, event: Any) -> Answer:
        """Emit an approval or question and wait for its answer."""
        self.emit(event)
        await self.answered.setdefault(event.request_id, asyncio.Event()).wait()
        return self.answers[event.request_id]

    async def interrupt(self) -> None:
        """Cancel the script."""
        self.interrupts += 1
        if self._turn is not None and not self.stubborn:
            self._turn.cancel()

    async def set_options(self, options: Mapping[str, Json]) -> bool:
        """Taken only where the driver says so."""
        self.options.append(options)
        return self.driver.adjustable

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Record the servers; say whether the driver can renew."""
        self.renewed.append(servers)
        return self.driver.renewable

    async def close(self) -> None:
        """End the script and the stream."""
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.wait({self._turn})
        self._events.put_nowait(None)
        self.closed.set()
        if self.close_error is not None:
            raise self.close_error


@dataclasses.dataclass(eq=False)
class ScriptedDriver:
    """Opens :class:`ScriptedSession`s; what was opened stands in :attr:`sessions`."""

    script: Script = echo
    steerable: bool = False
    renewable: bool = False
    adjustable: bool = False
    """Its sessions take other options while they live."""
    stubborn: bool = False
    open_error: BaseException | None = None
    open_errors: list[BaseException | None] = dataclasses.field(default_factory=list)
    """What the next openings fail with, one after the other; ``None`` is one that doesn't."""
    prompt_errors: list[BaseException] = dataclasses.field(default_factory=list)
    """What the next prompts fail with, each killing its session, before anything of them arrives."""
    missing: frozenset[str] = frozenset()
    """Session ids that are proven gone: resuming one starts afresh and says so."""
    opening: asyncio.Event | None = None
    """When set, opening waits for it."""
    sessions: list[ScriptedSession] = dataclasses.field(default_factory=list)
    name: str = "scripted"
    _ids: itertools.count[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    async def open(self, spec: SessionSpec, launcher: object) -> ScriptedSession:
        """Open or resume a session."""
        if self.opening is not None:
            await self.opening.wait()
        if self.open_error is not None:
            raise self.open_error
        if self.open_errors and (problem := self.open_errors.pop(0)) is not None:
            raise problem
        wanted = spec.resume_session_id
        lost = wanted in self.missing
        session = ScriptedSession(self, spec, wanted if wanted and not lost else f"scripted-{next(self._ids)}")
        session.emit(SessionStarted(session.session_id, resumed=bool(wanted) and not lost, lost_history=lost))
        self.sessions.append(session)
        return session
