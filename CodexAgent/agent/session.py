"""One live thread as a session: its turns, its one event stream, and its proven end.

Guarantees, beyond those of :class:`pkg.agent_api.AgentSession`:

- a turn ends only with ``turn/completed`` for its own id, when its start was refused, or with the process; never because the
  thread is idle;
- a steered message lands once: in the running turn, or, where that ended without having taken it, in the one that this session
  starts behind it, before the turn's end is told; a cancelled turn takes its steered messages with it;
- after :meth:`CodexSession.interrupt` the turn ends as ``cancelled`` whatever Codex answers, its commands are ended first, and
  where one of them may have left the sandbox, or agents of the agent's own may run, the whole process is; the same when Codex
  does not end the turn in time;
- a model that cannot be reached is given up after ``limits.CODEX_RETRY_SECONDS`` without another sign of life;
- reading the process's output pauses while the event buffer is full, except while cancelling or closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any

from agent import confinement, opening
from agent.failures import agent_error, detail_of, is_busy_thread, is_stale_turn, turn_error
from agent.files import SessionFiles
from agent.opening import Opening
from agent.peer import RequestId, RpcError
from agent.prompts import user_input
from agent.requests import TOOL_CALL, Reply, ServerRequests, refuse
from agent.tools import HostTools
from agent.translate import Translator, unknown
from agent.turns import End, TurnTracker
from pkg import limits, traceless
from pkg.agent_api import (
    AgentError,
    AgentEvent,
    Answer,
    ApprovalRequested,
    Json,
    McpServer,
    Notice,
    Prompt,
    QuestionAsked,
    SessionCapabilities,
    SessionStarted,
    TurnEnded,
)
from pkg.errors import AgentDied, TurnInProgress
from pkg.event_buffer import EventBuffer
from pkg.lenient import as_dict, as_list, as_str
from pkg.owned_tasks import owned, seen_through
from pkg.rpc_transport import Message

_SILENT = frozenset(
    {
        *("thread/started", "thread/status/changed", "thread/readState/changed", "thread/closed", "thread/settings/updated"),
        *("account/rateLimits/updated", "account/updated", "remoteControl/status/changed", "skills/changed"),
        *("thread/name/updated", "thread/goal/cleared", "thread/goal/updated", "thread/queue/changed", "app/list/updated"),
        *("hook/started", "hook/completed", "thread/environment/connected"),
    }
)
"""What the app-server tells beside any turn and nobody needs."""


class _Steered:
    """A message put into the running turn."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.client_id = str(uuid.uuid4())
        self.items = items
        self.texts = [item["text"] for item in items if item.get("type") == "text"]
        self.accepted = False
        """Whether Codex has said that the turn takes it."""
        self.brought = False
        """Whether this session has brought it in a turn of its own, before Codex said anything."""
        self.given_up = False
        """Whether its turn has ended in a way that leaves it to whoever sent it, before Codex said anything."""


class _Turn:
    """One open turn."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.over = asyncio.Event()
        """Set when Codex's end of it is here (or never will be)."""
        self.named = asyncio.Event()
        """Set when its id is known, or it is over."""
        self.ended = asyncio.Event()
        """Set when its end has been told."""
        self.end: End | None = None
        self.refusal: RpcError | None = None
        self.cancelling = False
        self.gave_up = False
        self.task: asyncio.Task[None] | None = None
        self.canceller: asyncio.Task[None] | None = None
        self.steered: list[_Steered] = []


class CodexSession:
    """A thread of one app-server, opened by :class:`agent.driver.CodexDriver`."""

    def __init__(
        self,
        attempt: Opening,
        *,
        sandbox: str,
        files: SessionFiles,
        tools: HostTools | None = None,
        guards: contextlib.AsyncExitStack | None = None,
    ) -> None:
        """The ``attempt`` has opened the thread; this session holds its app-server from now on.

        ``guards`` are released when nothing of the session is left.
        """
        server, opened = attempt.server, attempt.opened
        server.hold()
        self._server = server
        self._opened = opened
        self._place = attempt.place
        self._guards = guards or contextlib.AsyncExitStack()
        self._files = files
        self._tools = tools
        self._bridged = attempt.bridged
        # A rule that allows a command lets it run outside of the sandbox (Codex 0.171), and nothing tells which did.
        self._sandboxed = sandbox != confinement.FULL_ACCESS and not attempt.rules
        self._escaped = False
        """Whether something may run, or have left something running, that ending this thread's own commands does not end:
        outside of the sandbox, or for a thread that Codex started for this one."""
        self._events = EventBuffer()
        self._translator = Translator()
        self._tracker = TurnTracker()
        self._requests = ServerRequests(self._translator.changes, files.directory)
        self._turn: _Turn | None = None
        self._closing = False
        self._dead = False
        self._closer: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._side: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._events.put(SessionStarted(opened.thread_id, opened.resumed, opened.lost_history))
        for notice in opened.notices:
            self._events.put(notice)
        server.attach(opened.thread_id, self)

    def __repr__(self) -> str:
        return f"CodexSession({self._opened.thread_id!r}, alive={self.alive})"

    # ---- what it is

    @property
    def session_id(self) -> str:
        """The thread's id."""
        return self._opened.thread_id

    @property
    def directory(self) -> str:
        """The absolute working directory, as the app-server's place names it."""
        return self._files.directory

    @property
    def version(self) -> str:
        """The version of Codex, as it says itself."""
        return self._opened.version

    @property
    def capabilities(self) -> SessionCapabilities:
        """Codex takes pictures and messages in the middle of a turn; LangBot's tools are renewable where they go through us.

        No answer of its protocol (0.171) has a place for words: those of a denial are for whoever answers to steer.
        """
        return SessionCapabilities(steer=True, images=True, live_mcp=self._bridged)

    @property
    def alive(self) -> bool:
        """Whether another turn can be prompted."""
        return self._server.peer.alive and not self._closing

    async def events(self) -> AsyncIterator[AgentEvent]:
        """The session's event stream; a new iterator continues where the last one stopped."""
        while (event := await self._events.get()) is not None:
            yield event

    def check_sandbox(self, sandbox: str, learned: set[str], machine: str) -> None:
        """Find out beside the first turn whether the sandbox works here, and say so if it doesn't."""

        async def check() -> None:
            try:
                works = await opening.sandbox_works(self._server, self.directory, sandbox)
            except AgentDied:
                return
            if works:
                learned.add(machine)
                if len(learned) > limits.CODEX_PROBED_MACHINES:
                    learned.pop()
            elif works is False:
                params = {"machine": self._place.machine}
                self._events.put(Notice("coding.sandbox_unusable", level="warning", params=params))

        self._beside(check(), "codex-sandbox")

    # ---- turns

    async def prompt(self, prompt: Prompt) -> None:
        """Start a turn; returns when the app-server's pipe took the prompt.

        Raises :class:`pkg.errors.TurnInProgress`, or :class:`pkg.errors.AgentDied` where the session is not alive. Once it
        has returned or was cancelled while sending, the turn is open and ends with its :class:`TurnEnded`.
        """
        if self._turn is not None:
            raise TurnInProgress("a turn of this session is open")
        if not self._server.peer.alive:
            raise await self._server.peer.death()
        if self._closing:
            raise AgentDied("coding.session_closed")
        turn = self._turn = _Turn()
        self._translator.begin_turn()
        turn.task = owned(self._run_turn(turn, prompt), "codex-turn")
        sent = asyncio.create_task(turn.sent.wait())
        try:
            await asyncio.wait({sent, turn.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()

    async def steer(self, prompt: Prompt) -> bool:
        """Put a message into the running turn; false when it has ended or takes none.

        An accepted one is answered in this turn, or in one started behind it before the turn's end is told.
        """
        turn = self._turn
        if turn is None or turn.cancelling or turn.over.is_set() or not self._tracker.turn_id:
            return False
        built = await user_input(prompt, self._files.write)
        for notice in built.notices:
            self._events.put(notice)
        return await self._steer(turn, [*built.items])

    async def _steer(self, turn: _Turn, items: list[dict[str, Any]]) -> bool:
        if turn.cancelling or turn.over.is_set() or not self._tracker.turn_id:
            return False
        steered = _Steered(items)
        params = {
            "threadId": self.session_id,
            "expectedTurnId": self._tracker.turn_id,
            "input": items,
            "clientUserMessageId": steered.client_id,
        }
        turn.steered.append(steered)
        try:
            await self._server.peer.call("turn/steer", params)
        except RpcError as exc:
            if steered.brought:
                return True
            self._forget_steered(turn, steered)
            if not is_stale_turn(exc):
                self._events.put(Notice("agent.steer_refused", detail_of(exc.message, self._server.redact)))
            return False
        except AgentDied:
            self._forget_steered(turn, steered)
            return False
        except asyncio.CancelledError:
            # Whoever asked will bring it again.
            self._forget_steered(turn, steered)
            raise
        steered.accepted = True
        return not steered.given_up

    @staticmethod
    def _forget_steered(turn: _Turn, steered: _Steered) -> None:
        if steered in turn.steered:
            turn.steered.remove(steered)

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open (any more). Its ``message`` is not sent."""
        found = self._requests.answer(request_id, answer)
        if found is None:
            return False
        reply, allowed = found
        self._escaped = self._escaped or allowed
        self._reply(reply)
        return True

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Replace the server behind LangBot's tools where they go through this session; false where Codex reaches it itself."""
        if self._tools is None or not self._bridged:
            return False
        server = next((each for each in servers if each.name == opening.LANGBOT), None)
        if server is None:
            return False
        return await self._tools.renewed(server)

    async def interrupt(self) -> None:
        """Cancel the running turn; its end arrives on the stream. Does nothing where no turn is open."""
        turn = self._turn
        if turn is None or turn.cancelling:
            return
        if turn.over.is_set():
            turn.steered.clear()
            return
        self._cancel(turn)

    def _cancel(self, turn: _Turn) -> None:
        turn.cancelling = True
        self._events.lift(True)
        for event in self._translator.cancel():
            self._events.put(event)
        for reply in self._requests.withdraw(cancelling=True):
            self._reply(reply)
        turn.canceller = owned(self._see_cancel_through(turn), "codex-cancel")

    async def _see_cancel_through(self, turn: _Turn) -> None:
        """Tell Codex, and end its process when it does not end the turn in time."""
        try:
            async with traceless.within(limits.CODEX_INTERRUPT_SECONDS):
                await turn.named.wait()
                if not turn.over.is_set():
                    params = {"threadId": self.session_id, "turnId": self._tracker.turn_id}
                    with contextlib.suppress(RpcError):
                        await self._server.peer.call("turn/interrupt", params)
                await turn.over.wait()
        except TimeoutError:
            self._start_closing()
        except AgentDied:
            return

    async def _run_turn(self, turn: _Turn, prompt: Prompt) -> None:
        died: AgentDied | None = None
        try:
            built = await user_input(prompt, self._files.write)
            for notice in built.notices:
                self._events.put(notice)
            items = [*built.items]
            while True:
                await self._codex_turn(turn, items)
                items = self._left_over(turn)
                if not items:
                    break
        except AgentDied as exc:
            died = exc
        self._tracker.close()
        turn.over.set()
        turn.named.set()
        self._quiet_retry()
        for event in self._translator.end_turn(None if turn.end is None else turn.end.items):
            self._events.put(event)
        for reply in self._requests.withdraw():
            self._reply(reply)
        if turn.cancelling:
            await self._clean_up(died)
        self._events.put(self._turn_end(turn, died))
        self._turn = None
        if not self._closing:
            self._events.lift(False)
        turn.ended.set()
        turn.sent.set()
        if turn.canceller is not None:
            await asyncio.wait({turn.canceller})

    async def _codex_turn(self, turn: _Turn, items: list[dict[str, Any]]) -> None:
        """One turn of Codex's: started, and waited for."""
        turn.over.clear()
        turn.named.clear()
        turn.end = None
        self._tracker.start()

        def named(result: Json) -> None:
            end = self._tracker.named(as_str(as_dict(as_dict(result).get("turn")).get("id")))
            turn.named.set()
            if end is not None:
                self._completed(turn, end)

        params = {"threadId": self.session_id, "input": items}
        try:
            await self._server.peer.call("turn/start", params, sent=turn.sent, answered=named)
        except RpcError as exc:
            turn.refusal = exc
            self._tracker.close()
            turn.over.set()
            turn.named.set()
            return
        if self._dead:
            turn.over.set()
        await turn.over.wait()
        if turn.end is None:
            raise (
                await self._server.peer.death()
                if self._dead or not self._server.peer.alive
                else AgentDied("coding.session_closed")
            )

    def _left_over(self, turn: _Turn) -> list[dict[str, Any]]:
        """What was steered into a turn that ended without having taken it."""
        steered, turn.steered = turn.steered, []
        if not steered or turn.cancelling:
            return []
        if turn.refusal is not None or turn.end is None or turn.end.status != "completed":
            if count := sum(each.accepted for each in steered):
                self._events.put(Notice("steering.not_worked_on", level="warning", params={"count": str(count)}))
            for each in steered:
                each.given_up = not each.accepted
            return []
        for each in steered:
            each.brought = True
        return [item for each in steered for item in each.items]

    async def _clean_up(self, died: AgentDied | None) -> None:
        """After a cancelled turn: nothing of its commands goes on."""
        # Codex (0.171) may have begun a command that it has not told of yet.
        if died is None and self._sandboxed and not self._escaped and not self._closing:
            # Where this fails the process's end is the stronger means, and comes next.
            with contextlib.suppress(RpcError, TimeoutError, AgentDied):
                params = {"threadId": self.session_id}
                await self._server.peer.call("thread/backgroundTerminals/clean", params, limits.CODEX_CLEAN_SECONDS)
                return
        # What left the sandbox may have left Codex's own tree, too: only the process's supervisor proves its end.
        self._start_closing()
        await self._stopped.wait()

    def _turn_end(self, turn: _Turn, died: AgentDied | None) -> TurnEnded:
        if turn.cancelling and not turn.gave_up:
            return TurnEnded("cancelled")
        if turn.gave_up:
            return TurnEnded("error", AgentError("coding.model_unreachable", retryable=True))
        if died is not None:
            return TurnEnded("error", agent_error(died))
        if turn.refusal is not None:
            if is_busy_thread(turn.refusal):
                return TurnEnded("error", AgentError("coding.session_busy", retryable=True))
            return TurnEnded("error", AgentError("coding.agent_error", detail_of(turn.refusal.message, self._server.redact)))
        assert turn.end is not None
        match turn.end.status:
            case "completed":
                return TurnEnded("end_turn")
            case "interrupted":
                return TurnEnded("cancelled")
            case "failed":
                return TurnEnded("error", turn_error(turn.end.error, self._place, self._server.redact))
            case other:
                return TurnEnded(other[:100])

    # ---- what the app-server says

    def notified(self, method: str, params: Message, *, child: bool) -> None:
        """Take one notification; of threads that Codex started for this one only their questions count."""
        if child:
            self._escaped = True
            if method == "serverRequest/resolved":
                self._resolved(params)
            return
        turn = self._turn
        match method:
            case "turn/completed":
                if turn is not None and (end := self._tracker.completed(params.get("turn"))) is not None:
                    self._completed(turn, end)
                return
            case "serverRequest/resolved":
                self._resolved(params)
                return
            case "warning" | "configWarning" | "deprecationNotice" | "guardianWarning" | "model/rerouted":
                said = as_str(params.get("message")) or as_str(params.get("summary"))
                self._events.put(Notice(f"agent.{method.replace('/', '_')}", said[: limits.ACP_NOTICE_CHARS]))
                return
            case "mcpServer/startupStatus/updated":
                if params.get("status") == "failed":
                    names = {"names": as_str(params.get("name"))}
                    self._events.put(Notice("coding.mcp_servers_refused", level="warning", params=names))
                return
            case "thread/tokenUsage/updated" if turn is None or not (turn.over.is_set() or self._named(params)):
                # Codex repeats a resumed thread's last totals, under its last turn, at any time before the next request.
                self._translator.counted_before(params)
                return
        if method in _SILENT:
            return
        if "turnId" not in params and not method.startswith(("turn/", "item/")) and method != "error":
            self._events.put(unknown(method, params))
            return
        turn_id = as_str(params.get("turnId")) or as_str(as_dict(params.get("turn")).get("id"))
        if turn is None or turn.over.is_set() or (turn_id and not self._tracker.belongs(turn_id)):
            return
        self._of_turn(turn, method, params)

    def _resolved(self, params: Message) -> None:
        for notice in self._requests.resolved(params.get("requestId")):
            self._events.put(notice)

    def _named(self, params: Message) -> bool:
        """Whether a message names the open turn by the id that is known for it already."""
        return bool(self._tracker.turn_id) and as_str(params.get("turnId")) == self._tracker.turn_id

    def _of_turn(self, turn: _Turn, method: str, params: Message) -> None:
        item = as_dict(params.get("item"))
        if method == "item/started":
            self._begun(turn, item)
        if turn.cancelling and method != "thread/tokenUsage/updated":
            return
        for event in self._translator.notification(method, params):
            self._events.put(event)
        self._watch_retries(turn)

    def _begun(self, turn: _Turn, item: Message) -> None:
        """An item of the turn has begun; also one whose beginning crossed the turn's cancellation counts."""
        match as_str(item.get("type")):
            case "userMessage":
                self._taken(turn, item)
            case "collabAgentToolCall":
                self._escaped = True

    def _taken(self, turn: _Turn, item: Message) -> None:
        """A message is in the turn now; ours is known by its id, by its text where Codex leaves the id out."""
        client_id = as_str(item.get("clientId"))
        texts = [as_str(as_dict(each).get("text")) for each in as_list(item.get("content"))]
        for steered in turn.steered:
            if steered.client_id == client_id or (not client_id and [text for text in texts if text] == steered.texts):
                turn.steered.remove(steered)
                return

    def _completed(self, turn: _Turn, end: End) -> None:
        turn.end = end
        turn.over.set()
        turn.named.set()

    def requested(self, request_id: RequestId, method: str, params: Message, *, child: bool) -> None:
        """Take one question of the app-server."""
        turn = self._turn
        turn_id = as_str(params.get("turnId"))
        ours = child or not turn_id or self._tracker.belongs(turn_id)
        open_turn = turn is not None and not turn.over.is_set() and ours
        if turn is not None and turn.cancelling:
            self._reply(refuse(request_id, method))
            return
        if method == TOOL_CALL and self._tools is not None and open_turn:
            self._beside(self._call_tool(self._tools, request_id, params), "codex-tool")
            return
        outcome = self._requests.asked(request_id, method, params, in_turn=open_turn, child=child)
        for event in outcome.events:
            if isinstance(event, ApprovalRequested | QuestionAsked):
                self._quiet_retry()
            self._events.put(event)
        if outcome.reply is not None:
            self._reply(outcome.reply)

    async def _call_tool(self, tools: HostTools, request_id: RequestId, params: Message) -> None:
        self._reply(Reply(request_id, await tools.call(as_str(params.get("tool")), params.get("arguments"))))

    def _reply(self, reply: Reply) -> None:
        if reply.error is not None:
            self._server.peer.refuse(reply.request_id, *reply.error)
        else:
            self._server.peer.respond(reply.request_id, reply.result)

    def oversized(self, size: int) -> None:
        """A message of the app-server was left out."""
        params = {"size": f"{size / 1048576:.0f}", "limit": f"{limits.AGENT_LINE_BYTES // 1048576}"}
        self._events.put(Notice("coding.agent_line_truncated", level="warning", params=params))

    def pause(self) -> Awaitable[None] | None:
        """What reading has to wait for, if anything."""
        return self._events.room() if self._events.full else None

    def server_died(self) -> None:
        """The process has ended."""
        self._dead = True
        if self._turn is not None:
            self._turn.over.set()
            self._turn.named.set()
        self._start_closing()

    # ---- a model that cannot be reached

    def _watch_retries(self, turn: _Turn) -> None:
        if not self._translator.retrying:
            self._quiet_retry()
        elif self._retry is None:
            loop = asyncio.get_running_loop()
            empty = contextvars.Context()
            self._retry = empty.run(loop.call_later, limits.CODEX_RETRY_SECONDS, self._give_up, turn)

    def _quiet_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _give_up(self, turn: _Turn) -> None:
        self._retry = None
        if turn is self._turn and not turn.cancelling and not turn.over.is_set():
            turn.gave_up = True
            self._cancel(turn)

    # ---- the end

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = owned(work, name)
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closer is None:
            self._closing = True
            self._events.lift(True)
            self._closer = owned(self._end(), "codex-close")
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
            steps.push_async_callback(self._guards.aclose)
            steps.push_async_callback(self._files.remove)
            steps.push_async_callback(self._turn_told, turn)
            steps.callback(self._server.detach, self.session_id)
            steps.callback(self._stopped.set)
            steps.push_async_callback(self._server.release)
            if self._tools is not None:
                steps.push_async_callback(self._tools.close)
            steps.push_async_callback(self._end_side)
            self._quiet_retry()
            if turn is not None and self._server.peer.alive and not turn.over.is_set() and not turn.cancelling:
                self._cancel(turn)
                await _bounded(turn.over, limits.CANCEL_GRACE)
            await self._files.remove_elsewhere()
            await self._leave_thread()

    async def _leave_thread(self) -> None:
        """Where others go on using the process: end what this thread has running, and let go of it."""
        if not self._server.shared or not self._server.peer.alive:
            return
        for method in ("thread/backgroundTerminals/clean", "thread/unsubscribe"):
            with contextlib.suppress(RpcError, TimeoutError, AgentDied):
                await self._server.peer.call(method, {"threadId": self.session_id}, limits.CODEX_CLEAN_SECONDS)

    async def _end_side(self) -> None:
        tasks = {*self._side}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _turn_told(self, turn: _Turn | None) -> None:
        if turn is not None and turn.task is not None:
            turn.over.set()
            turn.named.set()
            await asyncio.wait({turn.task})


async def _bounded(event: asyncio.Event, seconds: float) -> None:
    try:
        async with traceless.within(seconds):
            await event.wait()
    except TimeoutError:
        return
