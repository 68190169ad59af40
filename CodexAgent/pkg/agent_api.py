"""The vocabulary between a driver and the run loop: events, prompts, session specs, and the two protocols.

A driver knows nothing of LangBot and the loop knows nothing of a vendor; everything they say to each other is
defined here. Values are frozen slots dataclasses. Each has a JSON form (:func:`to_json`, :func:`event_from_json`,
:func:`prompt_from_json`, :func:`spec_from_json`, :func:`answer_from_json`) so that the same job can travel to another
machine.

Guarantees a driver gives:

- events of one session arrive in the agent's order, on one stream, whatever turn they belong to;
- every call of :meth:`AgentSession.prompt` is followed by exactly one :class:`TurnEnded`; a cancelled turn ends normally
  with ``stop_reason="cancelled"``; a dead process ends its open turn with an ``error``;
- every :class:`ApprovalRequested` and :class:`QuestionAsked` is answered once, by :meth:`AgentSession.answer`, or withdrawn
  by the end of its turn;
- :meth:`AgentSession.close` returns only when no process of the session is left, or raises
  :class:`pkg.errors.ProcessCleanupUnconfirmed`.
"""

from __future__ import annotations

import base64
import dataclasses
import types
import typing
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar, cast, runtime_checkable

from pydantic import Base64Bytes, TypeAdapter, ValidationError

from pkg import limits

if typing.TYPE_CHECKING:
    from pkg.launch import Launcher

Json = Any
"""A JSON value: ``None``, bool, number, string, list or string-keyed dict of such."""

ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "mode", "other"]
ToolStatus = Literal["completed", "failed", "cancelled"]
NoticeLevel = Literal["info", "warning", "error"]
StopReason = str
"""``end_turn``, ``max_tokens``, ``max_turn_requests``, ``refusal``, ``cancelled``, ``error``, or what the agent said."""

ChoiceKind = Literal["allow_once", "allow_session", "allow_always", "reject_once", "reject_always"]


# ------------------------------------------------------------------ values inside events


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file as a tool wants to change it or has changed it. ``old_text`` is ``None`` for a new file."""

    path: str
    old_text: str | None
    new_text: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One line of the agent's plan; ``status`` is ``pending``, ``in_progress`` or ``completed``."""

    content: str
    status: str = "pending"
    priority: str = "medium"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer an approval offers. ``kind`` decides what it means, ``choice_id`` is the agent's own name for it."""

    choice_id: str
    label: str
    kind: ChoiceKind


@dataclass(frozen=True, slots=True)
class QuestionField:
    """One field of a question. ``type`` is ``text``, ``number``, ``boolean``, ``select`` or ``multiselect``."""

    name: str
    label: str
    type: str = "text"
    required: bool = False
    options: tuple[tuple[str, str], ...] = ()
    """Pairs of value and label, for the select types."""
    description: str = ""
    default: Json = None
    custom: bool = False
    """Whether a text that is none of the options is an answer, too."""
    options_left_out: int = 0
    """How many more options the agent has that people are not offered, because they are too many."""


@dataclass(frozen=True, slots=True)
class AgentError:
    """Why a turn failed. ``code`` is one of ours (``coding.*``); ``detail`` is the agent's text, bounded, no secrets."""

    code: str
    detail: str = ""
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))
    retryable: bool = False


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """The vendor session exists. ``lost_history`` is true when an older one was asked for and is proven gone."""

    session_id: str
    resumed: bool = False
    lost_history: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A new piece of the answer (not cumulative). A changed ``message_id`` starts a new message of the same turn.

    Where the consumer is behind, pieces of one message that follow each other may come as one.
    """

    text: str
    message_id: str = ""


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """A new piece of the agent's reasoning; never part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call began. ``tool_call_id`` is unique in its session; ``input`` is bounded JSON for telemetry."""

    tool_call_id: str
    title: str
    kind: ToolKind = "other"
    input: Mapping[str, Json] = field(default_factory=lambda: types.MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """A tool call ended; every started one is finished at the latest before its turn's end (then ``cancelled``)."""

    tool_call_id: str
    status: ToolStatus
    title: str = ""
    output: str = ""
    diffs: tuple[FileDiff, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class PlanUpdated:
    """The whole current plan, replacing the one before."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    """The agent wants to do something and waits. ``complete`` is false when the action cannot be shown whole."""

    request_id: str
    title: str
    kind: ToolKind
    choices: tuple[Choice, ...]
    tool_call_id: str = ""
    command: str = ""
    paths: tuple[str, ...] = ()
    diffs: tuple[FileDiff, ...] = ()
    reason: str = ""
    cwd: str = ""
    complete: bool = True
    tool: str = ""
    """Which tool it is, where the protocol itself says so: ``mcp:server.tool``, else the agent's own name for it."""


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """The agent asks the person something and waits for field values."""

    request_id: str
    message: str
    fields: tuple[QuestionField, ...] = ()
    fields_left_out: int = 0
    """How many more fields the agent asks for that people are not asked, because they are too many."""


@dataclass(frozen=True, slots=True)
class UsageReported:
    """Token numbers the agent reported. ``None`` means "not reported", never zero. Context numbers are not billing."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cached_input_tokens: int | None = None
    context_used: int | None = None
    context_size: int | None = None
    cost: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth telling that is neither answer nor thought. ``code`` is ours or ``agent.<kind>`` for unknown kinds.

    Levels: ``info`` is telemetry only; ``warning`` and ``error`` are shown to the person. When ``code`` names a text of
    the catalogue, ``params`` fill it; otherwise ``text`` is shown as it is.
    """

    code: str
    text: str = ""
    level: NoticeLevel = "info"
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The one end of a turn."""

    stop_reason: StopReason
    error: AgentError | None = None


AgentEvent = (
    SessionStarted
    | TextDelta
    | ThoughtDelta
    | ToolStarted
    | ToolFinished
    | PlanUpdated
    | ApprovalRequested
    | QuestionAsked
    | UsageReported
    | Notice
    | TurnEnded
)


# ------------------------------------------------------------------ what goes in


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture or file for the agent, already fetched and bounded. ``kind`` is ``image``, ``audio`` or ``file``."""

    kind: Literal["image", "audio", "file"]
    name: str
    mime_type: str
    data: Base64Bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message for the agent. ``context`` is text the host added; drivers mark it as such and keep it apart."""

    text: str
    attachments: tuple[Attachment, ...] = ()
    context: str = ""


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server for the session. ``headers`` and ``env`` may carry secrets and never reach argv or a log."""

    name: str
    transport: Literal["http", "sse", "stdio"]
    url: str = ""
    headers: Mapping[str, str] = field(repr=False, default_factory=lambda: types.MappingProxyType({}))
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(repr=False, default_factory=lambda: types.MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything a driver needs to open a session in a place. ``options`` are the driver's own (JSON values only)."""

    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False, default_factory=lambda: types.MappingProxyType({}))
    resume_session_id: str = ""
    create_if_missing: bool = True
    mcp_servers: tuple[McpServer, ...] = ()
    system_prompt: str = ""
    policy: str = "ask"
    """``ask``, ``allow-edits``, ``allow-all``, ``deny``, or a vendor value passed through."""
    startup_timeout: float = 60.0
    """Seconds until the process must have started and answered its first request."""
    initialize_timeout: float = 60.0
    """Seconds for the protocol's own handshake and for opening the session."""
    options: Mapping[str, Json] = field(default_factory=lambda: types.MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an approval (``choice_id``) or a question (``values``).

    An empty ``choice_id`` with no values means "cancelled". ``message`` is what the person wants the agent to know.
    """

    choice_id: str = ""
    values: Mapping[str, Json] = field(default_factory=lambda: types.MappingProxyType({}))
    message: str = ""


# ------------------------------------------------------------------ the two protocols


@dataclass(frozen=True, slots=True)
class SessionCapabilities:
    """What an open session can do beyond prompting."""

    steer: bool = False
    images: bool = False
    audio: bool = False
    embedded_files: bool = False
    live_mcp: bool = False
    """:meth:`AgentSession.renew_mcp` works without restarting the agent."""
    denial_reason: bool = False
    """The ``message`` of an answer that denies reaches the agent with it."""


class AgentSession(Protocol):
    """One live vendor session: one process (or one thread of a shared one), one event stream."""

    @property
    def session_id(self) -> str:
        """The vendor's id, to resume it later."""
        ...

    @property
    def directory(self) -> str:
        """The absolute working directory, as its place names it."""
        ...

    @property
    def capabilities(self) -> SessionCapabilities:
        """What this session can do."""
        ...

    @property
    def alive(self) -> bool:
        """Whether another turn can be prompted on this session."""
        ...

    def events(self) -> AsyncIterator[AgentEvent]:
        """The session's one event stream, from its first event on, ending after :meth:`close` or the agent's death.

        It has a single consumer at a time; a new iterator continues where the last one stopped. The buffer behind it is
        bounded and holds the agent's pipe back when full.
        """
        ...

    async def prompt(self, prompt: Prompt) -> None:
        """Start a turn; returns when the agent has been sent the prompt. Raises ``TurnInProgress`` if one is open."""
        ...

    async def steer(self, prompt: Prompt) -> bool:
        """Put a message into the running turn; false when the agent cannot take it (it then becomes the next turn)."""
        ...

    async def answer(self, request_id: str, answer: Answer) -> bool:
        """Answer an open approval or question; false when it is not open (any more)."""
        ...

    async def interrupt(self) -> None:
        """Ask the agent to cancel the running turn. Its ``TurnEnded`` still arrives on the stream."""
        ...

    async def renew_mcp(self, servers: tuple[McpServer, ...]) -> bool:
        """Replace the session's MCP servers between turns; false when only a reopened session can."""
        ...

    async def close(self) -> None:
        """End the session and prove that none of its processes is left; idempotent, safe under repeated cancellation.

        Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` when it cannot be proven.
        """
        ...


@runtime_checkable
class LiveOptions(Protocol):
    """A session some of whose options can be changed without opening it again."""

    async def set_options(self, options: Mapping[str, Json]) -> bool:
        """Go on with these in place of the spec's, from the next turn on; false when only a reopened session can.

        Raises :class:`pkg.errors.CodingError` for a value that the agent does not take.
        """
        ...


class AgentDriver(Protocol):
    """Opens sessions of one kind of agent in any place a :class:`pkg.launch.Launcher` reaches."""

    @property
    def name(self) -> str:
        """The driver's name in ``DRIVERS`` and in jobs."""
        ...

    async def open(self, spec: SessionSpec, launcher: Launcher) -> AgentSession:
        """Start the agent and open or resume its session; the first event is :class:`SessionStarted`.

        Raises :class:`pkg.errors.CodingError` with a stable code; by then every process it started is proven gone.
        """
        ...


# ------------------------------------------------------------------ JSON codec


class CodecError(ValueError):
    """A JSON value is not one of this module's types, lacks a field or has one of the wrong type."""


def to_json(value: object) -> Json:
    """The JSON form of a dataclass of this module: its fields plus ``type``; bytes as base64, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Json] = {"type": type(value).__name__}
        for item in dataclasses.fields(value):
            out[item.name] = to_json(getattr(value, item.name))
        return out
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value


Decoded = TypeVar("Decoded")

_EVENT_TYPES: Final[Mapping[str, type]] = types.MappingProxyType({kind.__name__: kind for kind in typing.get_args(AgentEvent)})
_ADAPTERS: Final[Mapping[type, TypeAdapter[Any]]] = types.MappingProxyType(
    {kind: TypeAdapter(kind) for kind in (*typing.get_args(AgentEvent), Prompt, SessionSpec, Answer, McpServer)}
)


def _decode(kind: type[Decoded], value: Json) -> Decoded:
    if not isinstance(value, dict):
        raise CodecError(f"{kind.__name__}: expected an object, got {type(value).__name__}")
    fields = {key: item for key, item in value.items() if key != "type"}
    try:
        return cast(Decoded, _ADAPTERS[kind].validate_python(fields))
    except ValidationError as exc:
        raise CodecError(f"{kind.__name__}: invalid {_places(exc)}") from None


def _places(exc: ValidationError) -> str:
    """Where a value is invalid. Many places are only counted: naming each would take longer than all that is valid."""
    if exc.error_count() > limits.CODEC_PLACES:
        return f"in {exc.error_count()} places"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    named = (".".join(str(part)[: limits.CODEC_PLACE_CHARS] for part in error["loc"]) for error in errors)
    return ", ".join(place or "value" for place in named)


def event_from_json(value: Json) -> AgentEvent:
    """The event a :func:`to_json` object stands for; raises :class:`CodecError` for an unknown type or a bad field."""
    kind = _EVENT_TYPES.get(str(value.get("type"))) if isinstance(value, dict) else None
    if kind is None:
        raise CodecError("not an agent event")
    event = cast(AgentEvent, _decode(kind, value))
    return _askable(event) if isinstance(event, QuestionAsked) else event


def _askable(event: QuestionAsked) -> QuestionAsked:
    """A question that is no larger than people can be asked and that says how much was left out; texts end with ``…``."""
    fields = tuple(map(_askable_field, event.fields[: limits.QUESTION_FIELDS]))
    left_out = len(event.fields) - len(fields)
    return dataclasses.replace(event, message=_cut(event.message), fields=fields, fields_left_out=left_out)


def _askable_field(field: QuestionField) -> QuestionField:
    options = field.options[: limits.QUESTION_OPTIONS]
    return dataclasses.replace(
        field,
        label=_cut(field.label),
        description=_cut(field.description),
        options=options,
        options_left_out=len(field.options) - len(options),
        default=field.default[: limits.QUESTION_OPTIONS] if isinstance(field.default, list) else field.default,
    )


def _cut(text: str) -> str:
    return text if len(text) <= limits.QUESTION_TEXT_CHARS else text[: limits.QUESTION_TEXT_CHARS - 1] + "…"


def prompt_from_json(value: Json) -> Prompt:
    """The prompt a :func:`to_json` object stands for; raises :class:`CodecError`."""
    return _decode(Prompt, value)


def spec_from_json(value: Json) -> SessionSpec:
    """The session spec a :func:`to_json` object stands for; raises :class:`CodecError`."""
    return _decode(SessionSpec, value)


def answer_from_json(value: Json) -> Answer:
    """The answer a :func:`to_json` object stands for; raises :class:`CodecError`."""
    return _decode(Answer, value)


def mcp_server_from_json(value: Json) -> McpServer:
    """The MCP server a :func:`to_json` object stands for; raises :class:`CodecError`."""
    return _decode(McpServer, value)
