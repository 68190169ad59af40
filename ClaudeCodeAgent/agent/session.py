"""One live Claude Code session: its turns, its one event stream, and its proven end.

Guarantees, beyond those of :class:`pkg.agent_api.AgentSession`:

- a turn ends when the program has said of each of its messages that it is done (:mod:`agent.turns`); work that the program
  does by itself between turns is emitted outside any turn, and what nobody has read of it when the next prompt is sent becomes
  one notice, so it is neither lost nor taken for part of the next answer;
- after :meth:`ClaudeSession.interrupt` the turn ends as ``cancelled``, messages that wait in it are dropped with it, and a
  program that does not end it within ``limits.CANCEL_GRACE`` is ended;
- nothing is allowed outside a turn unless everything is;
- reading the program's output pauses while the event buffer is full, except while cancelling or closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

from agent import permissions, wire
from agent.command import PROGRAM, Start
from agent.failures import Account, agent_error, context_usage, error_of, is_interrupted, is_missing_session, said, turn_end
from agent.instructions import workspace_instructions
from agent.prompts import PromptBlocks, prompt_blocks
from agent.translate import Translator, servers_failed
from agent.transport import ControlRefused, Transport
from agent.turns import Outcome, State, Turns
from agent.wire import Message, shimmed
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
    TextDelta,
    TurnEnded,
    UsageReported,
)
from pkg.agent_end import last_lines
from pkg.approval_policy import ALLOW_ALL
from pkg.errors import AgentDied, CodingError, CommandNotFound, SessionUnavailable, TurnInProgress
from pkg.event_buffer import EventBuffer
from pkg.launch import AgentProcess, Launcher
from pkg.lenient import as_dict, as_str
from pkg.owned_tasks import owned, seen_through
from pkg.redaction import Redactor
from pkg.workspace_files import FileRefused, WorkspaceFiles

_NOT_FOUND = "127"
"""What a shell exits with when it cannot find the program it was told to become."""


class SessionMissing(Exception):
    """The program proves that the session to resume does not exist."""


class _Turn:
    """One open turn, as far as it concerns I/O."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.cancelling = False
        self.canceller: asyncio.Task[None] | None = None


class ClaudeSession:
    """A session of one process, opened by :class:`agent.driver.ClaudeCodeDriver`."""

    def __init__(
        self,
        spec: SessionSpec,
        launcher: Launcher,
        process: AgentProcess,
        redact: Redactor,
        begin: Start,
        session_id: str,
        *,
        resumed: bool,
        lost: bool,
    ) -> None:
        """The process has been started for this session, which owns it from now on."""
        self._spec = spec
        self._launcher = launcher
        self._process = process
        self._redact = redact
        self._begin = begin
        self._session_id = session_id
        self._resumed = resumed
        self._lost = lost
        self._events = EventBuffer()
        self._before_start: list[AgentEvent] | None = []
        self._refusal = ""
        """What the program said when it ended before it was open."""
        self._translator = Translator(show_cost=spec.options.get("show_cost") is True)
        self._turns = Turns()
        self._turn: _Turn | None = None
        self._asked: dict[str, permissions.Asked] = {}
        self._directories: dict[str, str] = {}
        """Where calls that may still be asked about would run: commands move about, and some agents work elsewhere."""
        self._files = WorkspaceFiles(spec.cwd) if launcher.local else None
        self._made_files: list[tuple[str, ...]] = []
        self._late: list[str] = []
        """Text of the program's own work that nobody has read when the next turn begins, at most a buffer full."""
        self._late_chars = 0
        self._account = Account(begin.credentials, launcher.label)
        self._transport = Transport(
            process,
            redact,
            on_message=self._message,
            on_oversized=self._oversized,
            on_death=self._died,
            pause=self._pause,
        )
        self._closing = False
        self._closer: asyncio.Task[None] | None = None
        self._cancellers: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"ClaudeSession({self._session_id!r}, alive={self.alive})"

    # ---- opening

    async def open(self, timeout: float) -> None:
        """Handshake, instructions and tool servers; afterwards :class:`SessionStarted` is the first event. Called once.

        Raises :class:`SessionMissing` and :class:`pkg.errors.CodingError`; the caller closes the session then.
        """
        if self._begin.first:
            await self._process.write(self._begin.first)
        self._transport.start()
        step = "initialize"
        try:
            async with traceless.within(timeout):
                instructions = await self._instructions()
                fields = {"appendSystemPrompt": instructions} if instructions else {}
                await self._transport.control("initialize", hooks=wire.HOOKS, **fields)
        except TimeoutError:
            detail = last_lines(self._process.stderr_tail(), self._redact)
            seconds = f"{timeout:g}"
            raise SessionUnavailable(
                "coding.agent_start_timeout", detail=detail, retryable=True, seconds=seconds, step=step
            ) from None
        except ControlRefused as exc:
            detail = self._redact(exc.text)[: limits.ACP_ERROR_CHARS]
            raise SessionUnavailable("coding.session_unavailable", detail=detail, step=step) from None
        except AgentDied as exc:
            raise self._not_opened(exc) from None
        notices: list[AgentEvent] = []
        if self._spec.mcp_servers and (failed := await self._set_servers(self._spec.mcp_servers)):
            notices.append(servers_failed(failed))
        if not self._resumed and self._spec.options.get("skipped_permissions") is True:
            notices.append(Notice("coding.claude_skips_permissions", level="warning"))
        before, self._before_start = self._before_start or [], None
        self._emit(SessionStarted(self._session_id, self._resumed, self._lost))
        for event in (*notices, *before):
            self._emit(event)

    async def _instructions(self) -> str:
        """What is appended to the system prompt: the form's own words, and the workspace's where it is not trusted."""
        own = self._spec.system_prompt.strip()
        if self._spec.options.get("trust_workspace") is True:
            return own
        theirs = await workspace_instructions(self._launcher, self._spec.cwd)
        return "\n\n".join(text for text in (own, theirs) if text)

    def _not_opened(self, died: AgentDied) -> Exception:
        """Why the program ended before its session was open, in words a person can act on."""
        told = f"{self._refusal}\n{died.detail}"
        if self._resumed and is_missing_session(told):
            return SessionMissing()
        if self._begin.first and died.params.get("code") == _NOT_FOUND:
            name = (self._spec.command or (PROGRAM,))[0].rpartition("/")[2]
            return CommandNotFound(name, ("PATH",))
        if self._refusal and not died.detail:
            detail = self._redact(self._refusal)[: limits.ACP_ERROR_CHARS]
            return AgentDied(died.code, detail=detail, retryable=died.retryable, params=died.params)
        return died

    async def _set_servers(self, servers: tuple[McpServer, ...]) -> frozenset[str]:
        """Give the program these tool servers in place of the ones it has; the names of those that failed.

        Raises :class:`pkg.errors.AgentDied`.
        """
        try:
            answer = await self._transport.control(
                "mcp_set_servers", limits.CLAUDE_CONTROL_SECONDS, servers=wire.mcp_servers(self._bridged(servers))
            )
            failed = frozenset(map(str, as_dict(answer.get("errors"))))
        except (ControlRefused, TimeoutError):
            failed = frozenset(server.name for server in servers)
        self._translator.servers_told(failed)
        return failed

    def _bridged(self, servers: tuple[McpServer, ...]) -> tuple[McpServer, ...]:
        """The servers as the form wants them reached: where it says so, http ones through a process of the program's own."""
        if self._spec.options.get("stdio_tools") is not True:
            return servers
        return tuple(shimmed(each, local=self._launcher.local) if each.transport == "http" else each for each in servers)

    # ---- what it is

    @property
    def session_id(self) -> str:
        """The program's id of the session."""
        return self._session_id

    @property
    def directory(self) -> str:
        """The absolute working directory, as the program's place names it."""
        return self._spec.cwd

    @property
    def state(self) -> State:
        """What the program is doing."""
        return State.REQUIRES_ACTION if self._asked else self._turns.state

    @property
    def model(self) -> str:
        """The model of the last turn, as the program names it."""
        return self._translator.model

    @property
    def permission_mode(self) -> str:
        """The permission mode, as the program names it."""
        return self._translator.mode

    @property
    def capabilities(self) -> SessionCapabilities:
        """Everything but sound."""
        return SessionCapabilities(steer=True, images=True, embedded_files=True, live_mcp=True, denial_reason=True)

    @property
    def alive(self) -> bool:
        """Whether another turn can be prompted."""
        return self._transport.alive and not self._closing

    async def events(self) -> AsyncIterator[AgentEvent]:
        """The session's event stream; a new iterator continues where the last one stopped."""
        while (event := await self._events.get()) is not None:
            yield event

    # ---- turns

    async def prompt(self, prompt: Prompt) -> None:
        """Start a turn; returns when the program's pipe took the prompt.

        Raises :class:`pkg.errors.TurnInProgress`, or :class:`pkg.errors.AgentDied` where the session is not alive. Once it
        has returned or was cancelled while sending, the turn is open and ends with its :class:`TurnEnded`.
        """
        if self._turn is not None:
            raise TurnInProgress("a turn of this session is open")
        if not self._transport.alive:
            raise await self._transport.death()
        if self._closing:
            raise AgentDied("coding.session_closed")
        built = self._built(prompt)
        if late := self._events.take_late_text():
            self._late.append(late)
        message_id = str(uuid.uuid4())
        self._translator.begin_turn()
        self._turns.begin(message_id)
        self._turn = _Turn()
        self._tell(built)
        with contextlib.suppress(AgentDied):  # the turn's end tells it
            await self._transport.send(wire.user_message(built.blocks, message_id))

    async def steer(self, prompt: Prompt) -> bool:
        """Put a message into the running turn; false when none is running.

        The program takes it at its next step, or answers it after what it is saying now; the turn lasts until then.
        """
        turn = self._turn
        if turn is None or turn.cancelling or not self.alive:
            return False
        built = self._built(prompt)
        message_id = str(uuid.uuid4())
        self._turns.steer(message_id)
        self._tell(built)
        try:
            await self._transport.send(wire.user_message(built.blocks, message_id))
        except AgentDied:
            return False
        return True

    def _built(self, prompt: Prompt) -> PromptBlocks:
        built = prompt_blocks(prompt, self._files)
        self._made_files += built.files
        return built

    def _tell(self, built: PromptBlocks) -> None:
        for notice in built.notices:
            self._emit(notice)

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open (any more)."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return False
        self._transport.post(wire.control_success(request_id, permissions.response(asked, answer)))
        return True

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Replace the session's tool servers between turns; false while one runs or the session is over."""
        if self._turn is not None or not self.alive:
            return False
        try:
            failed = await self._set_servers(servers)
        except AgentDied:
            return False
        if failed:
            self._emit(servers_failed(failed))
        return True

    async def interrupt(self) -> None:
        """Cancel the running turn and what waits in it; its end arrives on the stream. Does nothing where no turn is open."""
        turn = self._turn
        if turn is not None and not turn.cancelling:
            self._cancel(turn)

    def _cancel(self, turn: _Turn) -> None:
        turn.cancelling = True
        self._events.lift(True)
        self._withdraw(cancelling=True)
        turn.canceller = owned(self._see_cancel_through(turn), "claude-cancel")
        self._cancellers.add(turn.canceller)
        turn.canceller.add_done_callback(self._cancellers.discard)

    async def _see_cancel_through(self, turn: _Turn) -> None:
        """Tell the program, and end its process when it does not end the turn in time."""
        try:
            async with traceless.within(limits.CANCEL_GRACE):
                with contextlib.suppress(ControlRefused):
                    await self._transport.control("interrupt", cancel_queued=True)
                await turn.ended.wait()
        except TimeoutError:
            if not turn.ended.is_set():
                self._start_closing()
        except AgentDied:
            return

    # ---- settings of a running session

    async def set_options(self, options: Mapping[str, Json]) -> bool:
        """Switch the model and the permission mode; see :class:`pkg.agent_api.LiveOptions`."""
        before, after = dict(self._spec.options), dict(options)
        modes = [as_str(each.pop("permission_mode", "")) or "default" for each in (before, after)]
        models = [as_str(each.pop("model", "")) for each in (before, after)]
        if before != after:
            return False
        if modes[0] != modes[1]:
            await self.set_permission_mode(modes[1])
        if models[0] != models[1]:
            await self.set_model(models[1])
        self._spec = dataclasses.replace(self._spec, options=options)
        return True

    async def set_model(self, model: str) -> None:
        """Use another model from the next step on; empty for the default. Raises :class:`pkg.errors.CodingError`."""
        await self._setting("set_model", "model", model, model=model or None)

    async def set_permission_mode(self, mode: str) -> None:
        """Use another permission mode from now on. Raises :class:`pkg.errors.CodingError`."""
        answer = await self._setting("set_permission_mode", "permission-mode", mode, mode=mode)
        self._translator.mode = as_str(answer.get("mode")) or mode

    async def context_usage(self) -> UsageReported:
        """How much of the model's context the conversation takes. Raises :class:`pkg.errors.CodingError`."""
        answer = await self._setting("get_context_usage", "context", "")
        used, size = context_usage(answer)
        return UsageReported(context_used=used, context_size=size)

    async def _setting(self, subtype: str, name: str, value: str, **fields: object) -> Message:
        try:
            return await self._transport.control(subtype, limits.CLAUDE_CONTROL_SECONDS, **fields)
        except ControlRefused as exc:
            detail = self._redact(exc.text)[: limits.ACP_ERROR_CHARS]
        except TimeoutError:
            detail = ""
        raise SessionUnavailable("coding.agent_setting_refused", detail=detail, name=name, value=value[:200] or "-")

    # ---- what the program sends

    def _emit(self, event: AgentEvent) -> None:
        if self._before_start is not None:
            if len(self._before_start) < limits.ACP_EARLY_UPDATES:
                self._before_start.append(event)
        else:
            self._events.put(event)

    def _message(self, message: Message) -> None:
        match message["type"]:
            case "control_request":
                self._requested(as_str(message.get("request_id")), as_dict(message.get("request")))
                return
            case "control_cancel_request":
                self._taken_back(as_str(message.get("request_id")))
                return
            case "conversation_reset":
                self._reset(as_str(message.get("new_session_id")) or as_str(message.get("session_id")))
            case "result" if self._before_start is not None:
                self._refusal = said(message)
        outcome = self._turns.line(message)
        own_work = self._turn is not None and not self._turns.begun
        if not own_work:
            self._tell_late()
        for event in self._translator.line(message):
            if not (own_work and isinstance(event, TextDelta)):
                self._emit(event)
            elif self._late_chars < limits.EVENT_BUFFER_BYTES:
                self._late.append(event.text)
                self._late_chars += len(event.text)
        self._follow(outcome, message)

    def _tell_late(self) -> None:
        """Tell what is no part of the answer that begins now."""
        if self._late:
            text = "".join(self._late)
            self._late.clear()
            self._late_chars = 0
            self._emit(Notice("coding.late_text", text, "warning", {"text": text}))

    def _follow(self, outcome: Outcome, message: Message) -> None:
        for settled in outcome.settled:
            self._emit(Notice("agent.steering", settled.fate))
        if outcome.passed is not None:
            self._tell_failure(outcome.passed)
        if outcome.over:
            self._end_turn()
        elif message["type"] == "result" and self._turn is None and self._before_start is None:
            self._tell_failure(message)

    def _tell_failure(self, result: Message) -> None:
        """A failed result that ends no turn."""
        if result.get("is_error") is True and not is_interrupted(result):
            error = error_of(result, self._translator.error_class, self._account, self._redact)
            self._emit(Notice(error.code, error.detail, "error", error.params))

    def _reset(self, session_id: str) -> None:
        if session_id and session_id != self._session_id:
            self._session_id = session_id
            self._emit(SessionStarted(session_id))

    def _end_turn(self) -> None:
        turn, result = self._turn, self._turns.result
        if turn is None:
            return
        if turn.cancelling or not (result or self._turns.begun):
            end = TurnEnded("cancelled")
        elif not result:
            end = TurnEnded("error", AgentError("coding.agent_error"))
        else:
            end = turn_end(result, self._translator.error_class, self._account, self._redact)
        self._tell_end(turn, end)
        if not self._closing:
            self._events.lift(False)

    def _tell_end(self, turn: _Turn, end: TurnEnded) -> None:
        self._withdraw()
        self._tell_late()
        for event in self._translator.end_turn():
            self._emit(event)
        self._turns.end()
        self._turn = None
        self._emit(end)
        turn.ended.set()

    def _requested(self, request_id: str, request: dict[str, Any]) -> None:
        match request.get("subtype"):
            case "can_use_tool":
                self._permission(request_id, request)
            case "hook_callback":
                self._about_to_act(as_dict(request.get("input")))
                self._transport.post(wire.control_success(request_id, {}))
            case _:
                self._transport.post(wire.control_error(request_id, "This request is not supported."))

    def _about_to_act(self, told: dict[str, Any]) -> None:
        """A call is about to be judged; where it would run is told only here."""
        call_id, cwd = as_str(told.get("tool_use_id")), as_str(told.get("cwd"))
        if call_id and cwd:
            self._directories[call_id] = cwd
            while len(self._directories) > limits.ACP_OPEN_REQUESTS:
                del self._directories[next(iter(self._directories))]

    def _current_text(self, path: str) -> str | None:
        try:
            return None if self._files is None else self._files.current_text(path)
        except FileRefused:
            return None

    def _taken_back(self, request_id: str) -> None:
        """The program needs no answer any more."""
        if self._asked.pop(request_id, None) is not None:
            self._emit(Notice("agent.request_withdrawn", request_id))

    def _permission(self, request_id: str, request: dict[str, Any]) -> None:
        if request_id in self._asked:
            return  # what people were shown is what they answer
        call_id = as_str(request.get("tool_use_id"))
        cwd = self._directories.get(call_id, self._spec.cwd)
        asked = permissions.asked(request_id, request, self._translator.call(call_id), cwd, self._current_text)
        if self._turn is None:
            self._outside_turn(asked)
        elif self._turn.cancelling or len(self._asked) >= limits.ACP_OPEN_REQUESTS:
            response = permissions.withdrawn(cancelling=self._turn.cancelling)
            self._transport.post(wire.control_success(request_id, response))
        else:
            self._asked[request_id] = asked
            self._emit(asked.event)

    def _outside_turn(self, asked: permissions.Asked) -> None:
        """Nobody listens between turns, so the policy alone decides."""
        choice = "allow_once" if self._spec.policy == ALLOW_ALL else ""
        answer = permissions.response(asked, Answer(choice))
        self._transport.post(wire.control_success(asked.request_id, answer))
        if answer["behavior"] != "allow":
            title = getattr(asked.event, "title", "") or getattr(asked.event, "message", "")
            params = {"title": " ".join(title.split())[: limits.ACTION_CHARS]}
            self._emit(Notice("coding.permission_outside_turn", level="warning", params=params))

    def _withdraw(self, *, cancelling: bool = False) -> None:
        """Answer everything that is open; nobody else will."""
        for request_id in self._asked:
            self._transport.post(wire.control_success(request_id, permissions.withdrawn(cancelling=cancelling)))
        self._asked.clear()

    def _oversized(self, size: int) -> None:
        params = {"size": f"{size / 1048576:.0f}", "limit": f"{limits.AGENT_LINE_BYTES // 1048576}"}
        self._emit(Notice("coding.agent_line_truncated", level="warning", params=params))

    def _pause(self) -> Awaitable[None] | None:
        return self._events.room() if self._events.full else None

    # ---- the end

    def _died(self) -> None:
        self._start_closing()

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closer is None:
            self._closing = True
            self._events.lift(True)
            self._closer = owned(self._end(), "claude-close")
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
            steps.push_async_callback(self._cancellers_over)
            steps.push_async_callback(self._transport.close)
            steps.push_async_callback(self._turn_told)
            steps.push_async_callback(self._process.stop)
            if turn is not None and self._transport.alive and not turn.cancelling:
                self._cancel(turn)
                await _bounded(turn.ended, limits.CANCEL_GRACE)
            await self._end_session()

    async def _end_session(self) -> None:
        """Have the program end its background work and leave, where it still listens."""
        if not self._transport.alive or self._turn is not None:
            return
        try:
            async with traceless.within(limits.CLAUDE_END_SECONDS):
                await self._transport.control("end_session")
                await self._process.wait()
        except (ControlRefused, CodingError, TimeoutError):
            return

    async def _turn_told(self) -> None:
        """The end of a turn that the program did not end itself, told when nothing of it is left."""
        turn = self._turn
        if turn is None:
            return
        if turn.cancelling:
            self._tell_end(turn, TurnEnded("cancelled"))
            return
        if self._transport.alive:
            self._tell_end(turn, TurnEnded("error", agent_error(AgentDied("coding.session_closed"))))
            return
        self._tell_end(turn, TurnEnded("error", agent_error(await self._transport.death())))

    async def _cancellers_over(self) -> None:
        for task in list(self._cancellers):
            await asyncio.wait({task})

    def _leave_no_trace(self) -> None:
        """Remove the files made for prompts."""
        for parts in self._made_files:
            if self._files is not None:
                self._files.remove(parts)


async def _bounded(event: asyncio.Event, seconds: float) -> None:
    try:
        async with traceless.within(seconds):
            await event.wait()
    except TimeoutError:
        return
