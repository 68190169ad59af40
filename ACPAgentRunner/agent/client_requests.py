"""What an agent asks of its client: permissions, files, terminals, questions. One dispatcher over plain JSON.

Guarantees: every request gets exactly one answer; an answer to a permission is one of the options offered or ``cancelled``; an
allowing option is never chosen by this module; whatever has an effect (a write, a command) goes through an
:class:`ApprovalRequested` unless a permission granted in the same turn shows exactly that; requests outside a turn are
refused; ``$/cancel_request`` ends a waiting request with -32800; unknown methods get -32601.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from acp.exceptions import RequestError

from agent import wire
from agent.failures import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, NOT_FOUND, REQUEST_CANCELLED
from agent.grants import Grants, inner_command
from agent.terminals import Terminals, shell_command
from agent.translate import Translator
from pkg import limits
from pkg.agent_api import AgentEvent, Answer, ApprovalRequested, Choice, FileDiff, Notice, QuestionAsked
from pkg.errors import CodingError
from pkg.rpc_transport import Inbound
from pkg.workspace_files import FileRefused, WorkspaceFiles

Result = TypeVar("Result")

MISSING_IS_EMPTY: Final = frozenset({"gemini-cli"})
"""Agents that read a file before they make it and take any error for a failure (Gemini CLI 0.61 loses the protocol's "Resource
not found"): to them a file of the workspace that is not there is an empty one, as in an editor."""
_ALLOW: Final = Choice("allow_once", "Allow once", "allow_once")
_REJECT: Final = Choice("reject_once", "Reject", "reject_once")
_CANCELLED: Final[dict[str, Any]] = {"outcome": {"outcome": "cancelled"}}


@dataclass(slots=True)
class _Waiting:
    answer: asyncio.Future[Answer]


def permission_outcome(request: ApprovalRequested, answer: Answer) -> tuple[dict[str, Any], Choice | None]:
    """The response to a permission request, and the option it chooses.

    ``answer.choice_id`` is an option's id or, where no option has that id, a kind. A kind the agent does not offer becomes
    a single rejection, and ``cancelled`` where even that is missing.
    """
    if not answer.choice_id:
        return _CANCELLED, None
    chosen = next((choice for choice in request.choices if choice.choice_id == answer.choice_id), None)
    for kind in (answer.choice_id, "reject_once"):
        chosen = chosen or next((choice for choice in request.choices if choice.kind == kind), None)
    if chosen is None:
        return _CANCELLED, None
    return {"outcome": {"outcome": "selected", "optionId": chosen.choice_id}}, chosen


class ClientRequests:
    """The client's side of one session."""

    def __init__(
        self,
        translator: Translator,
        emit: Callable[[AgentEvent], None],
        files: WorkspaceFiles | None,
        terminals: Terminals | None,
    ) -> None:
        """``files`` and ``terminals`` are ``None`` where the workspace is not on this machine."""
        self._translator = translator
        self._emit = emit
        self._files = files
        self._terminals = terminals
        self._grants = Grants()
        self._waiting: dict[str, _Waiting] = {}
        self._cancellations: dict[Any, asyncio.Future[None]] = {}
        self._count = 0
        self._turns = 0
        self.missing_is_empty = False
        """Set when the agent's name is known and is one of :data:`MISSING_IS_EMPTY`."""

    # ---- the session's side

    def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.answer.done():
            return False
        waiting.answer.set_result(answer)
        return True

    def withdraw(self) -> None:
        """Answer everything that is open with "cancelled", also what was answered just now, and forget the turn's grants."""
        self._turns += 1
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_result(Answer())
        self._grants.clear()

    def cancel_request(self, request_id: object) -> None:
        """The agent takes a request back."""
        try:
            cancelled = self._cancellations.get(request_id)
        except TypeError:
            return
        if cancelled is not None and not cancelled.done():
            cancelled.set_result(None)

    # ---- the agent's side

    async def handle(self, method: str, params: Inbound) -> Any:
        """The result of one request. Raises ``acp.exceptions.RequestError``."""
        if len(self._cancellations) >= limits.ACP_OPEN_REQUESTS:
            raise RequestError(INTERNAL_ERROR, "Too many open requests")
        handler = self._handlers().get(method)
        if handler is None:
            raise RequestError.method_not_found(method)
        if params.request_id in self._cancellations:
            raise RequestError(INVALID_REQUEST, "A request with this id is open")
        cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cancellations[params.request_id] = cancelled
        try:
            return await handler(params, cancelled)
        except FileRefused as exc:
            if exc.missing:
                raise RequestError(NOT_FOUND, f"Resource not found: {exc.reason}") from None
            raise RequestError(INVALID_PARAMS, f"Refused: {exc.reason}") from None
        except CodingError as exc:
            raise RequestError(INTERNAL_ERROR, f"Failed: {exc.code}") from None
        finally:
            self._cancellations.pop(params.request_id, None)

    def _handlers(self) -> dict[str, Callable[[Inbound, asyncio.Future[None]], Awaitable[Any]]]:
        handlers: dict[str, Callable[[Inbound, asyncio.Future[None]], Awaitable[Any]]] = {
            "session/request_permission": self._permission,
            "elicitation/create": self._elicitation,
        }
        if self._files is not None:
            handlers |= {"fs/read_text_file": self._read_file, "fs/write_text_file": self._write_file}
        if self._terminals is not None:
            handlers |= {
                "terminal/create": self._terminal_create,
                "terminal/output": self._terminal_output,
                "terminal/wait_for_exit": self._terminal_wait,
                "terminal/kill": self._terminal_kill,
                "terminal/release": self._terminal_release,
            }
        return handlers

    def _new_id(self, what: str) -> str:
        self._count += 1
        return f"{what}-{self._count}"

    async def _ask(self, request: ApprovalRequested | QuestionAsked, cancelled: asyncio.Future[None]) -> Answer:
        waiting = _Waiting(asyncio.get_running_loop().create_future())
        self._waiting[request.request_id] = waiting
        turns = self._turns
        self._emit(request)
        try:
            answer = await _unless(cancelled, waiting.answer)
        except RequestError:
            self._emit(Notice("agent.request_withdrawn", request.request_id))
            raise
        finally:
            self._waiting.pop(request.request_id, None)
        # A turn may end between an answer and the moment its waiter goes on.
        return answer if turns == self._turns else Answer()

    # ---- permissions and questions

    async def _permission(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        events, request = self._translator.permission(self._new_id("approval"), params)
        for event in events:
            self._emit(event)
        if self._translator.cancelling:
            return _CANCELLED
        if not self._translator.in_turn:
            self._emit(Notice("coding.permission_outside_turn", level="warning", params={"title": request.title[:200]}))
            return permission_outcome(request, Answer("reject_once"))[0]
        answer = await self._ask(request, cancelled)
        outcome, chosen = permission_outcome(request, answer)
        if chosen is not None and chosen.kind in ("allow_once", "allow_always"):
            self._grants.add(request, standing=chosen.kind == "allow_always")
        return outcome

    async def _elicitation(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        if params.get("mode", "form") != "form":
            return {"action": "decline"}
        if not self._translator.in_turn or self._translator.cancelling:
            return {"action": "cancel"}
        schema = params.get("requestedSchema")
        message = wire.as_str(params.get("message"))
        question = QuestionAsked(self._new_id("question"), message, wire.question_fields(schema))
        return wire.question_result(await self._ask(question, cancelled), schema)

    async def _allowed(self, request: ApprovalRequested, cancelled: asyncio.Future[None]) -> None:
        """Return when people allow our own request; raise an answer for the agent otherwise."""
        if self._translator.cancelling or not self._translator.in_turn:
            raise RequestError(REQUEST_CANCELLED, "Cancelled")
        answer = await self._ask(request, cancelled)
        if not answer.choice_id:
            raise RequestError(REQUEST_CANCELLED, "Cancelled")
        if answer.choice_id != _ALLOW.choice_id:
            raise RequestError(INTERNAL_ERROR, "Rejected by the user")

    # ---- files

    async def _read_file(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._files is not None
        line, limit = wire.as_int(params.get("line")), wire.as_int(params.get("limit"))
        try:
            return {"content": self._files.read_text(wire.as_str(params.get("path")), line, limit)}
        except FileRefused as exc:
            if exc.missing and self.missing_is_empty:
                return {"content": ""}
            raise

    async def _write_file(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._files is not None
        path, content = wire.as_str(params.get("path")), params.get("content")
        if not isinstance(content, str):
            raise RequestError.invalid_params({"content": "not text"})
        content = wire.unicode_safe(content)
        old = self._files.current_text(path)
        if old != content and not self._grants.take_write(path, old, content):
            old_shown, old_cut = wire.bounded(old or "", limits.ACP_DIFF_CHARS)
            new_shown, new_cut = wire.bounded(content, limits.ACP_DIFF_CHARS)
            diff = FileDiff(path, None if old is None else old_shown, new_shown, old_cut or new_cut)
            request = ApprovalRequested(
                self._new_id("approval"),
                f"Write {path.rsplit('/', 1)[-1]}",
                "edit",
                (_ALLOW, _REJECT),
                paths=(path,),
                diffs=(diff,),
                cwd=self._files.directory(""),
                complete=not diff.truncated,
            )
            await self._allowed(request, cancelled)
        self._files.write_text(path, content)
        return {}

    # ---- terminals

    async def _terminal_create(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._terminals is not None and self._files is not None
        command = wire.as_str(params.get("command"))
        args = [wire.as_str(arg) for arg in wire.as_list(params.get("args"))]
        if not command.strip() or "\x00" in command + "".join(args):
            raise RequestError.invalid_params({"command": "empty or not text"})
        if self._terminals.full:
            raise RequestError(INTERNAL_ERROR, "Too many terminals")
        cwd = self._files.directory(wire.as_str(params.get("cwd")))
        pairs = map(wire.as_dict, wire.as_list(params.get("env")))
        env = {wire.as_str(pair.get("name")): wire.as_str(pair.get("value")) for pair in pairs}
        if any(not name or "=" in name or "\x00" in name + value for name, value in env.items()):
            raise RequestError.invalid_params({"env": "not a variable"})
        if not self._grants.take_command(command, args, cwd, env):
            shown = inner_command(command, args)
            settings = " ".join(f"{name}={value}" for name, value in env.items())
            text = f"{settings} {shown}" if settings else shown
            request = ApprovalRequested(
                self._new_id("approval"),
                wire.bounded(text, limits.ACP_COMMAND_CHARS)[0],
                "execute",
                (_ALLOW, _REJECT),
                command=wire.bounded(text, limits.ACP_COMMAND_CHARS)[0],
                cwd=cwd,
                complete=len(text) <= limits.ACP_COMMAND_CHARS,
            )
            await self._allowed(request, cancelled)
        limit = wire.as_int(params.get("outputByteLimit"))
        return {"terminalId": await self._terminals.create(shell_command(command, args), cwd, env, limit)}

    async def _terminal_output(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._terminals is not None
        return self._terminals.output(self._terminal_id(params))

    async def _terminal_wait(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._terminals is not None
        terminal_id = self._terminal_id(params)
        ended = self._terminals.ended(terminal_id)
        await _unless(cancelled, asyncio.shield(ended))
        try:
            return self._terminals.exit_status(terminal_id)
        except KeyError:
            return {"exitCode": None}

    async def _terminal_kill(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._terminals is not None
        await self._terminals.kill(self._terminal_id(params))
        return {}

    async def _terminal_release(self, params: Inbound, cancelled: asyncio.Future[None]) -> Any:
        assert self._terminals is not None
        await self._terminals.release(self._terminal_id(params))
        return {}

    def _terminal_id(self, params: Inbound) -> str:
        assert self._terminals is not None
        terminal_id = wire.as_str(params.get("terminalId"))
        try:
            self._terminals.ended(terminal_id)
        except KeyError:
            raise RequestError(NOT_FOUND, "There is no such terminal") from None
        return terminal_id


async def _unless(cancelled: asyncio.Future[None], wanted: asyncio.Future[Result]) -> Result:
    """The result of ``wanted``; raises the protocol's "request cancelled" when ``cancelled`` is done first."""
    both: set[asyncio.Future[Any]] = {cancelled, wanted}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if wanted.done():
        return wanted.result()
    wanted.cancel()
    raise RequestError(REQUEST_CANCELLED, "Request cancelled")
