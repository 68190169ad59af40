"""What the app-server asks of its client, as events for people and answers for Codex: a state machine without I/O.

Guarantees:

- every request is answered exactly once, or withdrawn because its turn is over; what is not understood is refused;
- nothing allows an action but a person's or policy's choice; the permanent amendments Codex proposes (which it writes into its
  own rules for all later sessions) are neither offered nor ever chosen;
- an action that Codex does not describe wholly is offered as incomplete;
- a secret is never asked for in a chat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.diffs import Changes
from agent.peer import METHOD_NOT_FOUND, RequestId
from agent.translate import kind_of, shown_command
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    Answer,
    ApprovalRequested,
    Choice,
    Json,
    Notice,
    QuestionAsked,
    QuestionField,
)
from pkg.lenient import as_dict, as_list, as_str, bounded, compact

_ONCE: Final = Choice("accept", "Allow once", "allow_once")
_SESSION: Final = Choice("acceptForSession", "Allow for this session", "allow_session")
_DECLINE: Final = Choice("decline", "Deny", "reject_once")
_CANCEL: Final = Choice("cancel", "Deny and stop", "reject_once")
CHOICES: Final = (_ONCE, _SESSION, _DECLINE, _CANCEL)
_WITHOUT_SESSION: Final = (_ONCE, _DECLINE, _CANCEL)

_COMMAND: Final = "item/commandExecution/requestApproval"
_FILES: Final = "item/fileChange/requestApproval"
_ELICITATION: Final = "mcpServer/elicitation/request"
_INPUT: Final = "item/tool/requestUserInput"
_PERMISSIONS: Final = "item/permissions/requestApproval"
_LEGACY: Final = frozenset({"applyPatchApproval", "execCommandApproval"})
TOOL_CALL: Final = "item/tool/call"
"""Answered by whoever has the tools, not here."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What goes back to the app-server: a result, or an error."""

    request_id: RequestId
    result: Json = None
    error: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request leads to: events for people, and the answer where it needs no person."""

    events: tuple[AgentEvent, ...] = ()
    reply: Reply | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    request_id: RequestId
    method: str
    answered: Callable[[Answer], Json]
    allows: Callable[[Answer], bool]


def refusal_of(method: str) -> Json | None:
    """The result that refuses a request of a kind we know; ``None`` where only an error does."""
    if method in (_COMMAND, _FILES):
        return {"decision": "decline"}
    if method == _ELICITATION:
        return {"action": "decline", "content": None, "_meta": None}
    if method == _INPUT:
        return {"answers": {}}
    if method == _PERMISSIONS:
        return {"permissions": {}, "scope": "turn"}
    if method in _LEGACY:
        return {"decision": {"denied": {"rejection": "The client does not serve this kind of request."}}}
    if method == TOOL_CALL:
        text = "This tool is not available (any more)."
        return {"success": False, "contentItems": [{"type": "inputText", "text": text}]}
    return None


def refuse(request_id: RequestId, method: str) -> Reply:
    """The refusal of a request of any kind."""
    result = refusal_of(method)
    if result is None:
        return Reply(request_id, error=(METHOD_NOT_FOUND, f"The client does not serve {method[:100]}"))
    return Reply(request_id, result)


class ServerRequests:
    """The open requests of one thread."""

    def __init__(self, changes: Callable[[str], Changes | None], directory: str = "") -> None:
        """``changes`` finds the file changes that an item announced; ``directory`` is where the thread works."""
        self._changes = changes
        self._directory = directory
        self._open: dict[str, _Open] = {}
        self._count = 0

    def asked(
        self, request_id: RequestId, method: str, params: Mapping[str, Any], *, in_turn: bool, child: bool = False
    ) -> Outcome:
        """The app-server asks; ``in_turn`` says whether a turn that takes questions is open.

        What a thread that Codex started for this one (``child``) has announced is not known here, so its file changes are
        incomplete, also where an item of this thread has the same id.
        """
        known = method in (_COMMAND, _FILES, _ELICITATION, _INPUT)
        if not known:
            return Outcome(reply=refuse(request_id, method))
        if not in_turn:
            title = as_str(params.get("command")) or as_str(params.get("message")) or method
            told = Notice("coding.permission_outside_turn", level="warning", params={"title": bounded(title, 300)[0]})
            return Outcome((told,), refuse(request_id, method))
        if len(self._open) >= limits.CODEX_REQUESTS:
            return Outcome(reply=refuse(request_id, method))
        self._count += 1
        name = f"{request_id}-{self._count}"
        match method:
            case "item/commandExecution/requestApproval":
                return self._approval(name, request_id, method, _command(name, params, self._directory))
            case "item/fileChange/requestApproval":
                changes = None if child else self._changes(as_str(params.get("itemId")))
                return self._approval(name, request_id, method, _file_change(name, params, changes, self._directory))
            case "mcpServer/elicitation/request":
                return self._elicitation(name, request_id, params)
        return self._input(name, request_id, params)

    def answer(self, name: str, answer: Answer) -> tuple[Reply, bool] | None:
        """A person's or policy's answer: the reply, and whether it allows an action; ``None`` where nothing is open."""
        found = self._open.pop(name, None)
        if found is None:
            return None
        return Reply(found.request_id, found.answered(answer)), found.allows(answer)

    def resolved(self, request_id: Json) -> list[Notice]:
        """The app-server says that a request needs no answer any more: what was open of it is told."""
        names = [name for name, each in self._open.items() if each.request_id == request_id]
        for name in names:
            del self._open[name]
        return [Notice("agent.request_withdrawn", name) for name in names]

    def withdraw(self, *, cancelling: bool = False) -> list[Reply]:
        """The turn is over or being cancelled: refuse whatever is open.

        Codex (0.171) goes on with a turn whose action is declined, so that a turn that is ``cancelling`` would act once more
        before the interrupt reaches it; "cancel" declines and ends it in one.
        """
        replies = [
            Reply(each.request_id, {"decision": "cancel"})
            if cancelling and each.method in (_COMMAND, _FILES)
            else refuse(each.request_id, each.method)
            for each in self._open.values()
        ]
        self._open.clear()
        return replies

    # ---- approvals

    def _approval(self, name: str, request_id: RequestId, method: str, event: ApprovalRequested) -> Outcome:
        offered = {choice.choice_id for choice in event.choices}

        def decision(answer: Answer) -> str:
            if not answer.choice_id:
                return "cancel"
            return answer.choice_id if answer.choice_id in offered else "decline"

        self._open[name] = _Open(
            request_id, method, lambda answer: {"decision": decision(answer)}, lambda answer: decision(answer).startswith("acc")
        )
        return Outcome((event,))

    def _elicitation(self, name: str, request_id: RequestId, params: Mapping[str, Any]) -> Outcome:
        meta = as_dict(params.get("_meta"))
        if meta.get("codex_approval_kind") == "mcp_tool_call":
            event = _tool_approval(name, params, meta, self._directory)
            offered = {choice.choice_id for choice in event.choices}

            def approved(answer: Answer) -> Json:
                choice = answer.choice_id if answer.choice_id in offered else ("decline" if answer.choice_id else "cancel")
                if choice not in ("accept", "acceptForSession"):
                    return {"action": choice, "content": None, "_meta": None}
                kept = {"persist": "session"} if choice == "acceptForSession" else None
                return {"action": "accept", "content": None, "_meta": kept}

            self._open[name] = _Open(
                request_id, _ELICITATION, approved, lambda answer: answer.choice_id in ("accept", "acceptForSession")
            )
            return Outcome((event,))
        fields = _schema_fields(params.get("requestedSchema"))
        if params.get("mode") != "form" or any(_is_secret(each) for each in fields):
            told = Notice("agent.elicitation", bounded(as_str(params.get("message")), limits.ACP_NOTICE_CHARS)[0])
            return Outcome((told,), refuse(request_id, _ELICITATION))
        question = QuestionAsked(name, f"{as_str(params.get('serverName'))}: {as_str(params.get('message'))}", fields)

        def answered(answer: Answer) -> Json:
            if not answer.values and not answer.choice_id:
                return {"action": "cancel", "content": None, "_meta": None}
            return {"action": "accept", "content": dict(answer.values), "_meta": None}

        self._open[name] = _Open(request_id, _ELICITATION, answered, lambda answer: False)
        return Outcome((question,))

    def _input(self, name: str, request_id: RequestId, params: Mapping[str, Any]) -> Outcome:
        questions = [as_dict(each) for each in as_list(params.get("questions"))[: limits.ACP_QUESTION_FIELDS]]
        open_ones = [each for each in questions if each.get("isSecret") is not True and as_str(each.get("id"))]
        if not open_ones:
            told = Notice("coding.secret_asked", level="warning")
            return Outcome((told,), refuse(request_id, _INPUT))
        fields = tuple(
            QuestionField(
                as_str(each.get("id")),
                as_str(each.get("question")) or as_str(each.get("header")),
                "select" if as_list(each.get("options")) else "text",
                options=tuple(
                    (label, label)
                    for option in map(as_dict, as_list(each.get("options")))
                    if (label := as_str(option.get("label")))
                ),
                description="\n".join(
                    f"{as_str(option.get('label'))}: {as_str(option.get('description'))}"
                    for option in map(as_dict, as_list(each.get("options")))
                ),
                custom=each.get("isOther") is True,
            )
            for each in open_ones
        )
        message = "\n".join(field.label for field in fields)
        names = {field.name for field in fields}

        def answered(answer: Answer) -> Json:
            given: dict[str, Json] = {}
            for key, value in answer.values.items():
                if key in names:
                    values = value if isinstance(value, list | tuple) else [value]
                    given[key] = {"answers": [each if isinstance(each, str) else compact(each, 4000)[0] for each in values]}
            return {"answers": given}

        self._open[name] = _Open(request_id, _INPUT, answered, lambda answer: False)
        return Outcome((QuestionAsked(name, message, fields),))


# ------------------------------------------------------------------ requests as events


def _command(name: str, params: Mapping[str, Any], directory: str) -> ApprovalRequested:
    given = as_str(params.get("command"))
    command, cut = bounded(shown_command(given), limits.ACP_COMMAND_CHARS)
    kind = as_str(params.get("kind")) or "command"
    network, wanted = as_dict(params.get("networkApprovalContext")), as_dict(params.get("additionalPermissions"))
    reason = [as_str(params.get("reason"))]
    if network:
        reason.append(f"{as_str(network.get('protocol'))}://{as_str(network.get('host'))}")
    if wanted:
        reason.append(compact(wanted, limits.ACP_NOTICE_CHARS)[0])
    if kind != "command":
        reason.append(kind)
    # What goes to a running terminal, into the network or beyond the sandbox in a way of its own is not just this command.
    whole = bool(command) and not cut and kind == "command" and not network and not wanted
    return ApprovalRequested(
        name,
        bounded(command, limits.ACTION_CHARS)[0] or kind,
        "execute" if not command else _approved_kind(params),
        _offered(params),
        tool_call_id=as_str(params.get("itemId")),
        command=command,
        reason="\n".join(filter(None, reason)),
        cwd=as_str(params.get("cwd")) or directory,
        complete=whole,
    )


def _approved_kind(params: Mapping[str, Any]) -> Any:
    return kind_of(params.get("commandActions"))


def _offered(params: Mapping[str, Any]) -> tuple[Choice, ...]:
    # Codex (0.171) takes a grant for the session although it does not list it, but not for what a person must decide anew.
    return _WITHOUT_SESSION if params.get("kind") == "humanCommand" else CHOICES


def _file_change(name: str, params: Mapping[str, Any], changes: Changes | None, directory: str) -> ApprovalRequested:
    root = as_str(params.get("grantRoot"))
    reason = [as_str(params.get("reason")), f"write access below {root}" if root else ""]
    paths = changes.paths if changes is not None else ()
    return ApprovalRequested(
        name,
        ", ".join(path.rpartition("/")[2] for path in paths[:5]) or "file change",
        "edit",
        CHOICES,
        tool_call_id=as_str(params.get("itemId")),
        paths=(*paths, root) if root else paths,
        diffs=changes.diffs if changes is not None else (),
        reason="\n".join(filter(None, reason)),
        cwd=directory,
        complete=changes is not None and changes.whole and not root,
    )


def _tool_approval(name: str, params: Mapping[str, Any], meta: Mapping[str, Any], directory: str) -> ApprovalRequested:
    server, tool = as_str(params.get("serverName")), as_str(meta.get("tool_name"))
    shown, cut = compact({"tool": f"{server}.{tool}", "arguments": meta.get("tool_params")}, limits.ACP_COMMAND_CHARS)
    persists = "session" in as_list(meta.get("persist"))
    return ApprovalRequested(
        name,
        f"{server}.{tool}".strip(".") or as_str(params.get("message")),
        "other",
        CHOICES if persists else _WITHOUT_SESSION,
        command=shown,
        reason=as_str(meta.get("tool_description")) or as_str(params.get("message")),
        cwd=directory,
        complete=bool(server or tool) and not cut and "tool_params" in meta,
        tool=f"mcp:{server}.{tool}" if server and tool and "." not in server else "",
    )


def _schema_fields(schema: Json) -> tuple[QuestionField, ...]:
    properties = as_dict(as_dict(schema).get("properties"))
    required = {name for name in as_list(as_dict(schema).get("required")) if isinstance(name, str)}
    return tuple(
        _schema_field(str(name), as_dict(item), str(name) in required)
        for name, item in list(properties.items())[: limits.ACP_QUESTION_FIELDS]
    )


def _schema_field(name: str, item: dict[str, Any], required: bool) -> QuestionField:
    source = as_dict(item.get("items")) if item.get("type") == "array" else item
    named = as_list(source.get("oneOf")) or as_list(source.get("anyOf"))
    options = [(as_str(as_dict(each).get("const")), as_str(as_dict(each).get("title"))) for each in named]
    if not options:
        labels = as_list(source.get("enumNames"))
        options = [
            (as_str(value), as_str(labels[index]) if index < len(labels) else "")
            for index, value in enumerate(as_list(source.get("enum")))
        ]
    field = QuestionField(
        name,
        as_str(item.get("title")) or name,
        {"number": "number", "integer": "number", "boolean": "boolean"}.get(as_str(item.get("type")), "text"),
        required,
        tuple((value, label or value) for value, label in options[: limits.ACP_QUESTION_FIELDS] if value),
        as_str(item.get("description")),
        item.get("default"),
    )
    if item.get("type") == "array":
        return dataclasses.replace(field, type="multiselect")
    return dataclasses.replace(field, type="select") if field.options else field


_SECRET_WORDS: Final = ("password", "passwd", "secret", "token", "api key", "api_key", "apikey", "credential")


def _is_secret(field: QuestionField) -> bool:
    """Whether a field asks for something that must not stand in a chat, as far as its name tells."""
    named = f"{field.name} {field.label}".lower()
    return any(word in named for word in _SECRET_WORDS)
