"""One live ACP session: its turns, its one event stream, and its proven end.

Guarantees, beyond those of :class:`pkg.agent_api.AgentSession`:

- a turn's end is decided by the response to its prompt: what came before it on the wire belongs to the turn, what comes after
  does not. Text after the end of a turn is emitted outside any turn (work that outlived it); what nobody has read of it
  when the next prompt is sent becomes one notice, so it is neither lost nor taken for part of the next answer; after a
  cancelled turn it is dropped;
- after :meth:`AcpSession.interrupt` the turn ends as ``cancelled`` whatever the agent answers; when it answers nothing for
  ``limits.CANCEL_GRACE`` the process is ended, and the turn's end is told when nothing of it is left;
- a turn's terminals are gone before its end is told;
- reading the agent's output pauses while the event buffer is full, except while cancelling or closing.

A person's words that go with an answer (``Answer.message``) have no place in this protocol and are not sent
(``denial_reason`` is false).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from acp.exceptions import RequestError

from agent import wire
from agent.client_requests import MISSING_IS_EMPTY, ClientRequests
from agent.failures import AUTH_REQUIRED, agent_error, detail_of, readable
from agent.opening import Opened, Opening, RecentlyOpened
from agent.peer import Peer
from agent.prompts import prompt_blocks
from agent.terminals import Terminals
from agent.translate import Translator
from pkg import limits, traceless
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    Answer,
    Json,
    McpServer,
    Notice,
    Prompt,
    SessionCapabilities,
    SessionSpec,
    SessionStarted,
    TurnEnded,
)
from pkg.errors import AgentDied, CodingError, ProcessCleanupUnconfirmed, TurnInProgress
from pkg.event_buffer import EventBuffer
from pkg.launch import AgentProcess, Launcher
from pkg.owned_tasks import owned, seen_through
from pkg.redaction import Redactor
from pkg.rpc_transport import Message
from pkg.workspace_files import WorkspaceFiles


class _Turn:
    """One open turn."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.ended = asyncio.Event()
        self.answered = asyncio.Event()
        """Set when the response is here (or never will be); nothing more is read until the turn's end is told."""
        self.cancelling = False
        self.task: asyncio.Task[None] | None = None
        self.canceller: asyncio.Task[None] | None = None


class AcpSession:
    """A session of one agent process, opened by :class:`agent.driver.AcpDriver`."""

    def __init__(
        self,
        spec: SessionSpec,
        launcher: Launcher,
        process: AgentProcess,
        redact: Redactor,
        recently_opened: RecentlyOpened,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """The process has been started for this session, which owns it from now on."""
        self._spec = spec
        self._launcher = launcher
        self._process = process
        self._redact = redact
        self._events = EventBuffer()
        self._before_start: list[AgentEvent] | None = []
        self._translator = Translator(spec.cwd)
        self._files = WorkspaceFiles(spec.cwd) if launcher.local else None
        self._terminals = Terminals(launcher, spec.env) if launcher.local else None
        if self._terminals is not None:
            self._translator.terminal_output = self._terminals.text
        self._requests = ClientRequests(self._translator, self._emit, self._files, self._terminals)
        self._made_files: list[tuple[str, ...]] = []
        self._peer = Peer(
            process,
            redact,
            handle=self._requests.handle,
            on_notification=self._notified,
            on_oversized=self._oversized,
            on_sent=self._sent,
            on_death=self._died,
            pause=self._pause,
        )
        self._opening = Opening(spec, launcher, process, self._peer, self._translator, redact, recently_opened, sleep)
        self._opened = Opened()
        self._preamble = ""
        self._turn: _Turn | None = None
        self._closing = False
        self._closer: asyncio.Task[None] | None = None
        self._unconfirmed: ProcessCleanupUnconfirmed | None = None
        """A turn lost track of a terminal: the session is not used again, and :meth:`close` says so."""
        self._stopped = asyncio.Event()
        """Set when the process has been stopped, or that has failed."""

    def __repr__(self) -> str:
        return f"AcpSession({self._opened.session_id!r}, alive={self.alive})"

    async def open(self, handshake_timeout: float) -> None:
        """Handshake and session; afterwards :class:`SessionStarted` is the first event. Called once, by the driver.

        Raises :class:`pkg.errors.CodingError`; the caller closes the session then.
        """
        self._peer.start()
        opened = await self._opening.run(handshake_timeout)
        early = self._translator.opened(opened.session_id) if not self._translator.session_id else []
        self._opened = opened
        self._requests.missing_is_empty = opened.agent_name in MISSING_IS_EMPTY
        self._preamble = self._spec.system_prompt if opened.fresh else ""
        before, self._before_start = self._before_start or [], None
        self._emit(SessionStarted(opened.session_id, opened.resumed, opened.lost_history))
        for event in (*opened.notices, *before, *early):
            self._emit(event)

    # ---- what it is

    @property
    def session_id(self) -> str:
        """The agent's id of the session."""
        return self._opened.session_id

    @property
    def directory(self) -> str:
        """The absolute working directory, as the agent's place names it."""
        return self._spec.cwd

    @property
    def agent_name(self) -> str:
        """The agent's own name, from the handshake."""
        return self._opened.agent_name

    @property
    def commands(self) -> tuple[str, ...]:
        """The agent's slash commands, as last announced."""
        return self._translator.commands

    @property
    def capabilities(self) -> SessionCapabilities:
        """What the agent takes in a prompt; this protocol has neither steering nor live MCP renewal."""
        offered = self._opened.prompt_capabilities
        return SessionCapabilities(
            images=offered.get("image") is True,
            audio=offered.get("audio") is True,
            embedded_files=offered.get("embeddedContext") is True,
        )

    @property
    def alive(self) -> bool:
        """Whether another turn can be prompted."""
        return self._peer.alive and not self._closing

    async def events(self) -> AsyncIterator[AgentEvent]:
        """The session's event stream; a new iterator continues where the last one stopped."""
        while (event := await self._events.get()) is not None:
            yield event

    # ---- turns

    async def prompt(self, prompt: Prompt) -> None:
        """Start a turn; returns when the agent's pipe took the prompt.

        Raises :class:`pkg.errors.TurnInProgress`, or :class:`pkg.errors.AgentDied` where the session is not alive. Once it
        has returned or was cancelled while sending, the turn is open and ends with its :class:`TurnEnded`.
        """
        if self._turn is not None:
            raise TurnInProgress("a turn of this session is open")
        if not self._peer.alive:
            raise await self._peer.death()
        if self._closing:
            raise AgentDied("coding.session_closed")
        built = prompt_blocks(prompt, self._opened.prompt_capabilities, self._files, self._preamble)
        self._preamble = ""
        self._made_files += built.files
        if late := self._events.take_late_text():
            self._emit(Notice("coding.late_text", late, "warning", {"text": late}))
        self._translator.begin_turn()
        turn = self._turn = _Turn()
        for notice in built.notices:
            self._emit(notice)
        params = {"sessionId": self.session_id, "prompt": list(built.blocks)}
        turn.task = owned(self._run_turn(turn, params), "acp-turn")
        sent = asyncio.create_task(turn.sent.wait())
        try:
            await asyncio.wait({sent, turn.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()

    async def steer(self, prompt: Prompt) -> bool:
        """Always false: this protocol cannot put a message into a running turn."""
        return False

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open (any more)."""
        return self._requests.answer(request_id, answer)

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Always false: servers are given when a session is opened."""
        return False

    async def interrupt(self) -> None:
        """Cancel the running turn; its end arrives on the stream. Does nothing where no turn is open."""
        turn = self._turn
        if turn is None or turn.cancelling or turn.answered.is_set():
            return
        self._cancel(turn)

    def _cancel(self, turn: _Turn) -> None:
        turn.cancelling = True
        self._events.lift(True)
        for event in self._translator.cancel():
            self._emit(event)
        self._requests.withdraw()
        turn.canceller = owned(self._see_cancel_through(turn), "acp-cancel")

    async def _see_cancel_through(self, turn: _Turn) -> None:
        """Tell the agent, and end its process when it does not end the turn in time."""
        try:
            async with traceless.within(limits.CANCEL_GRACE):
                await self._peer.notify("session/cancel", {"sessionId": self.session_id})
                await turn.answered.wait()
        except TimeoutError:
            self._start_closing()
        except AgentDied:
            return

    async def _run_turn(self, turn: _Turn, params: dict[str, Any]) -> None:
        result: Json = None
        refusal: RequestError | None = None
        died: AgentDied | None = None
        try:
            result = await self._peer.call("session/prompt", params)
        except RequestError as exc:
            refusal = exc
        except AgentDied as exc:
            died = exc
        # Nothing is awaited between the response and here, so the translator's state splits the stream where the wire did.
        turn.answered.set()
        outcome = self._translator.end_turn(failed=refusal is not None or died is not None)
        self._requests.withdraw()
        for event in outcome.events:
            self._emit(event)
        if (usage := wire.usage_of(result)) is not None:
            self._emit(usage)
        if self._terminals is not None:
            await self._end_terminals(self._terminals)
        if turn.cancelling and died is not None:
            await self._stopped.wait()
        self._emit(self._turn_end(turn, result, refusal, died, outcome.failure))
        self._turn = None
        if not self._closing:
            self._events.lift(False)
        turn.ended.set()
        turn.sent.set()
        if turn.canceller is not None:
            await asyncio.wait({turn.canceller})

    async def _end_terminals(self, terminals: Terminals) -> None:
        try:
            await terminals.end_all()
        except ProcessCleanupUnconfirmed as exc:
            self._unconfirmed = exc
            self._start_closing()

    def _turn_end(
        self, turn: _Turn, result: Json, refusal: RequestError | None, died: AgentDied | None, failure: str
    ) -> TurnEnded:
        if turn.cancelling:
            return TurnEnded("cancelled")
        if died is not None:
            return TurnEnded("error", agent_error(died))
        said = self._redact(readable(failure))[: limits.ACP_ERROR_CHARS]
        if refusal is not None:
            if refusal.code == AUTH_REQUIRED:
                return TurnEnded("error", agent_error(self._opening.login_required(refusal)))
            detail = detail_of(refusal, self._redact)
            return TurnEnded("error", AgentError("coding.agent_error", _the_fuller(detail, said)))
        if failure:
            return TurnEnded(
                "error", AgentError("coding.agent_error", self._redact(readable(failure))[: limits.ACP_ERROR_CHARS])
            )
        return TurnEnded(wire.as_str(wire.as_dict(result).get("stopReason"))[:100] or "end_turn")

    # ---- what the agent sends

    def _emit(self, event: AgentEvent) -> None:
        if self._before_start is not None:
            if len(self._before_start) < limits.ACP_EARLY_UPDATES:
                self._before_start.append(event)
        else:
            self._events.put(event)

    def _sent(self, method: str) -> None:
        if method == "session/prompt" and self._turn is not None:
            self._turn.sent.set()

    def _notified(self, method: str, params: Message) -> None:
        if method == "session/update":
            for event in self._translator.update(params):
                self._emit(event)
        elif method == "$/cancel_request":
            self._requests.cancel_request(params.get("requestId"))
        else:
            self._emit(self._translator.unknown(method.lstrip("_$/") or "notification", params))

    def _oversized(self, size: int) -> None:
        params = {"size": f"{size / 1048576:.0f}", "limit": f"{limits.AGENT_LINE_BYTES // 1048576}"}
        self._emit(Notice("coding.agent_line_truncated", level="warning", params=params))

    def _pause(self) -> Awaitable[None] | None:
        turn = self._turn
        if turn is not None and turn.answered.is_set():
            return _until(turn.ended)
        return self._events.room() if self._events.full else None

    # ---- the end

    def _died(self) -> None:
        self._start_closing()

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closer is None:
            self._closing = True
            self._events.lift(True)
            self._closer = owned(self._end(), "acp-close")
        return self._closer

    async def close(self) -> None:
        """End the session and prove that none of its processes is left.

        Returns only then, also when the caller is cancelled meanwhile (the cancellation is raised afterwards). Raises
        :class:`pkg.errors.ProcessCleanupUnconfirmed`.
        """
        await seen_through(self._start_closing())

    async def _end(self) -> None:
        turn = self._turn
        async with contextlib.AsyncExitStack() as steps:
            # Left in reverse order; each step runs whatever the ones before it raised.
            steps.callback(self._events.finish)
            steps.callback(self._leave_no_trace)
            steps.push_async_callback(self._turn_told, turn)
            steps.push_async_callback(self._peer.close)
            steps.callback(self._stopped.set)
            steps.push_async_callback(self._process.stop)
            if turn is not None and self._peer.alive and not turn.answered.is_set() and not turn.cancelling:
                self._cancel(turn)
                await _bounded(turn.answered, limits.CANCEL_GRACE)
            if turn is not None and turn.answered.is_set() and self._peer.alive:
                await turn.ended.wait()
            await self._close_session()
            if self._terminals is not None:
                await self._terminals.end_all()
        if self._unconfirmed is not None:
            raise self._unconfirmed

    async def _turn_told(self, turn: _Turn | None) -> None:
        if turn is not None and turn.task is not None:
            await asyncio.wait({turn.task})

    def _leave_no_trace(self) -> None:
        """Remove the files made for prompts."""
        for parts in self._made_files:
            if self._files is not None:
                self._files.remove(parts)

    async def _close_session(self) -> None:
        """Tell the agent, where it wants to be told and is not stuck in a turn."""
        if not (self._opened.can_close and self._peer.alive and self._turn is None and self.session_id):
            return
        try:
            await self._peer.call("session/close", {"sessionId": self.session_id}, limits.ACP_CLOSE_SECONDS)
        except (RequestError, CodingError, TimeoutError):
            return


def _the_fuller(one: str, other: str) -> str:
    """One of two texts about the same failure: the one that says more."""
    if not one or one.lower() in other.lower():
        return other
    return one


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _bounded(event: asyncio.Event, seconds: float) -> None:
    try:
        async with traceless.within(seconds):
            await event.wait()
    except TimeoutError:
        return
