"""A session's updates as :mod:`pkg.agent_api` events: a state machine without I/O.

Guarantees:

- before the first prompt of the process nothing of a replayed history becomes an event (agents replay on load, some on
  resume too); the replayed user messages are counted, because a load without any has lost its history;
- a tool call is one :class:`ToolStarted`, from whichever of its update or permission request comes first, and one
  :class:`ToolFinished`, at the latest at the end of its turn; ids that an agent uses again get a suffix, endless ones a digest;
  the oldest end early when there are more than ``limits.ACP_TOOL_CALLS`` or they carry more than
  ``limits.ACP_HELD_TOOL_BYTES``;
- text that looks like an error message is held back until it is known whether the turn fails with it: people read a failure
  once;
- text after the end of a turn is emitted as it comes (work that outlived its turn), after a cancelled turn it is dropped;
- halves of a surrogate pair in two chunks are joined, lone ones replaced;
- kinds nobody knows become notices.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from dataclasses import dataclass, field
from typing import Any, Final

from agent import wire
from agent.failures import is_error_json
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    ApprovalRequested,
    FileDiff,
    Json,
    Notice,
    PlanUpdated,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolKind,
    ToolStarted,
    ToolStatus,
    UsageReported,
)
from pkg.event_buffer import weight

_FAILURE_START: Final = re.compile(r'\s*(?:API Error\b|\{\s*"(?:error"\s*:|type"\s*:\s*"error"))')
_ELLIPSIS: Final = ("…", "...")
_CHUNKS: Final = frozenset({"user_message_chunk", "agent_message_chunk", "agent_thought_chunk"})
_HISTORY: Final = _CHUNKS | {"tool_call", "tool_call_update", "plan"}


@dataclass(slots=True)
class _Tool:
    event_id: str
    title: str = ""
    kind: ToolKind = "other"
    raw_input: Json = None
    raw_output: Json = None
    without_input: bool = False
    """Whether the agent has said that the call has no input, which is not the same as having said nothing."""
    content: list[Any] = field(default_factory=list)
    locations: list[Any] = field(default_factory=list)
    announced: bool = False
    finished: bool = False
    size: int = 0
    """About how many bytes the call keeps until it has finished."""


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """The last events of a turn before its end, and the error text the agent gave as an answer, if that is what it was."""

    events: tuple[AgentEvent, ...]
    failure: str = ""


class Translator:
    """The state of one session's update stream."""

    def __init__(self, directory: str = "") -> None:
        """``directory`` is where the session works."""
        self._directory = directory
        self.session_id = ""
        """Set when known; updates of other sessions are ignored, earlier ones wait."""
        self.in_turn = False
        self.cancelling = False
        self.replayed_user_messages = 0
        self.commands: tuple[str, ...] = ()
        self.mode = ""
        self.title = ""
        self.terminal_output = lambda terminal_id: ""
        """Looks up what one of the client's own terminals printed."""
        self._prompted = False
        self._muted = False
        self._early: list[dict[str, Any]] = []
        self._tools: dict[str, _Tool] = {}
        self._used_ids: dict[str, int] = {}
        self._carried = 0
        """What the sizes of the remembered calls add up to."""
        self._usage: UsageReported | None = None
        self._high = {"agent_message_chunk": "", "agent_thought_chunk": ""}
        self._message_id = ""
        self._at_start = True
        self._said = False
        self._held = ""

    # ---- life of a session

    def opened(self, session_id: str) -> list[AgentEvent]:
        """The session's id is known; returns the events of the updates that came before it."""
        self.session_id = session_id
        early, self._early = self._early, []
        return [event for params in early for event in self.update(params)]

    def forget_replay(self) -> None:
        """Another attempt to open a session begins."""
        self.replayed_user_messages = 0
        self._early.clear()
        self.session_id = ""

    def begin_turn(self) -> None:
        """A prompt is about to be sent."""
        self._prompted = self.in_turn = True
        self.cancelling = self._muted = self._said = False
        self._at_start = True
        self._message_id = ""

    def cancel(self) -> list[AgentEvent]:
        """The turn is being cancelled: its open tool calls end here, whatever the agent still says about them."""
        self.cancelling = True
        return self._finish_tools()

    def end_turn(self, *, failed: bool) -> TurnOutcome:
        """The prompt's response is here (or will never come)."""
        events = self._flush_halves()
        failure = ""
        held, self._held = self._held, ""
        if held and (failed or (not self._said and is_error_json(held))):
            failure = held
        elif held:
            events.append(TextDelta(held, self._message_id))
        events += self._finish_tools()
        self._muted = self.cancelling
        self.in_turn = self.cancelling = False
        return TurnOutcome(tuple(events), failure)

    # ---- updates

    def update(self, params: Json) -> list[AgentEvent]:
        """The events of one ``session/update`` notification."""
        item = wire.as_dict(params)
        if not self.session_id:
            if len(self._early) < limits.ACP_EARLY_UPDATES:
                self._early.append(item)
            return []
        if wire.as_str(item.get("sessionId")) not in ("", self.session_id):
            return []
        update = wire.as_dict(item.get("update"))
        kind = wire.as_str(update.get("sessionUpdate"))
        if kind in _HISTORY and not self._prompted:
            self.replayed_user_messages += kind == "user_message_chunk"
            return []
        if kind in _HISTORY and self._muted:
            return []
        match kind:
            case "agent_message_chunk":
                return self._text(update)
            case "agent_thought_chunk":
                text = self._whole(kind, wire.content_text(update.get("content")))
                return [*self._release(), ThoughtDelta(text)] if text else []
            case "user_message_chunk":
                return []
            case "tool_call" | "tool_call_update":
                return self._tool_update(update, kind)
            case "plan":
                return [*self._release(), PlanUpdated(wire.plan_of(update.get("entries")))]
            case "usage_update":
                return self._usage_update(wire.context_of(update))
            case _:
                return self._session_update(kind, update)

    def _session_update(self, kind: str, update: dict[str, Any]) -> list[AgentEvent]:
        match kind:
            case "available_commands_update":
                listed = map(wire.as_dict, wire.as_list(update.get("availableCommands")))
                self.commands = tuple(name for command in listed if (name := wire.as_str(command.get("name"))))
                text, _ = wire.bounded(", ".join(f"/{name}" for name in self.commands), limits.ACP_NOTICE_CHARS)
                return [Notice("agent.commands", text)]
            case "current_mode_update":
                self.mode = wire.as_str(update.get("currentModeId"))
                return [Notice("agent.mode", self.mode)]
            case "config_option_update":
                return [Notice("agent.config", wire.compact(update.get("configOptions"), limits.ACP_NOTICE_CHARS)[0])]
            case "session_info_update":
                self.title = wire.as_str(update.get("title")) or self.title
                return [Notice("agent.session_info", self.title)]
            case _:
                return [self.unknown(kind or "update", update)]

    def unknown(self, kind: str, value: Json) -> Notice:
        """The notice that keeps something nobody knows."""
        name = re.sub(r"[^A-Za-z0-9_/.-]+", "_", kind)[:64]
        return Notice(f"agent.{name}", wire.compact(value, limits.ACP_NOTICE_CHARS)[0])

    def _usage_update(self, usage: UsageReported) -> list[AgentEvent]:
        if usage == self._usage:
            return []
        self._usage = usage
        return [usage]

    # ---- text

    def _text(self, update: dict[str, Any]) -> list[AgentEvent]:
        block = update.get("content")
        text = self._whole("agent_message_chunk", wire.content_text(block))
        message_id = wire.as_str(update.get("messageId"))
        if not text:
            kind = wire.as_str(wire.as_dict(block).get("type"))
            return [Notice(f"agent.content_{kind}")] if kind not in ("text", "", "resource", "resource_link") else []
        events: list[AgentEvent] = []
        if message_id != self._message_id:
            events += self._release()
            self._message_id, self._at_start = message_id, True
        if self._held or (self.in_turn and self._at_start and _FAILURE_START.match(text)):
            if len(self._held) + len(text) <= limits.ACP_HELD_TEXT_CHARS:
                self._held += text
                return events
            events += self._release()
        self._at_start = False
        self._said = self._said or not text.isspace()
        events.append(TextDelta(text, message_id))
        return events

    def _release(self) -> list[AgentEvent]:
        """The held text turned out to be an answer."""
        held, self._held = self._held, ""
        self._at_start = True
        if not held:
            return []
        self._said = True
        return [TextDelta(held, self._message_id)]

    def _whole(self, stream: str, text: str) -> str:
        text = self._high[stream] + text
        self._high[stream] = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._high[stream], text = text[-1], text[:-1]
        return wire.unicode_safe(text)

    def _flush_halves(self) -> list[AgentEvent]:
        events: list[AgentEvent] = []
        if self._high["agent_thought_chunk"]:
            events.append(ThoughtDelta("\ufffd"))
        if self._high["agent_message_chunk"]:
            events += [*self._release(), TextDelta("\ufffd", self._message_id)]
        self._high = dict.fromkeys(self._high, "")
        return events

    # ---- tools

    def _tool_update(self, update: dict[str, Any], kind: str) -> list[AgentEvent]:
        tool_id = _tool_id(update)
        if not tool_id:
            return [self.unknown(kind, update)]
        tool = self._tools.get(tool_id)
        if tool is not None and tool.finished and kind == "tool_call_update":
            return []
        if tool is None or tool.finished:
            tool = self._new_tool(tool_id)
        _merge(tool, update)
        self._weigh(tool)
        status = update.get("status")
        shed = self._shed(tool)
        bare = status in (None, "pending") and not (tool.raw_input or tool.content or tool.locations)
        events = [*self._release(), *shed]
        if kind == "tool_call_update" or not bare:
            events += self._announce(tool)
        if status == "completed":
            events += self._finish(tool, "completed")
        elif status == "failed":
            events += self._finish(tool, "failed")
        return events

    def _new_tool(self, tool_id: str) -> _Tool:
        uses = self._used_ids[tool_id] = self._used_ids.pop(tool_id, 0) + 1
        while len(self._used_ids) > 10 * limits.ACP_TOOL_CALLS:
            del self._used_ids[next(iter(self._used_ids))]
        if tool_id in self._tools:
            self._carried -= self._tools.pop(tool_id).size
        tool = self._tools[tool_id] = _Tool(tool_id if uses == 1 else f"{tool_id}#{uses}")
        return tool

    def _weigh(self, tool: _Tool) -> None:
        size = weight([tool.title, tool.raw_input, tool.raw_output, tool.content, tool.locations])
        self._carried += size - tool.size
        tool.size = size

    def _shed(self, current: _Tool) -> list[AgentEvent]:
        """Forget the oldest calls beyond a bound, never the ``current`` one; what is open of them ends as cancelled."""
        events: list[AgentEvent] = []
        while len(self._tools) > limits.ACP_TOOL_CALLS or (self._carried > limits.ACP_HELD_TOOL_BYTES and len(self._tools) > 1):
            oldest = next(iter(self._tools))
            if self._tools[oldest] is current:
                self._tools[oldest] = self._tools.pop(oldest)
                continue
            tool = self._tools.pop(oldest)
            if not tool.finished:
                events += self._finish(tool, "cancelled")
            self._carried -= tool.size
        return events

    def _announce(self, tool: _Tool) -> list[AgentEvent]:
        if tool.announced:
            return []
        tool.announced = True
        return [ToolStarted(tool.event_id, tool.title or tool.kind, tool.kind, wire.input_of(tool.raw_input))]

    def _finish(self, tool: _Tool, status: ToolStatus) -> list[AgentEvent]:
        events = self._announce(tool)
        tool.finished = True
        output, output_cut = wire.output_of(tool.content, tool.raw_output, self.terminal_output)
        diffs, diffs_cut = wire.diffs_of(tool.content)
        events.append(ToolFinished(tool.event_id, status, tool.title, output, diffs, output_cut or diffs_cut))
        tool.raw_input = tool.raw_output = None
        tool.content, tool.locations = [], []
        self._weigh(tool)
        return events

    def _finish_tools(self) -> list[AgentEvent]:
        return [event for tool in self._tools.values() if not tool.finished for event in self._finish(tool, "cancelled")]

    # ---- permissions

    def permission(self, request_id: str, params: Json) -> tuple[list[AgentEvent], ApprovalRequested]:
        """A permission request: the events of its tool call if it is new, and the request for people."""
        item = wire.as_dict(params)
        call = wire.as_dict(item.get("toolCall"))
        tool_id = _tool_id(call)
        events = self._release()
        tool = self._tools.get(tool_id) if tool_id else _Tool("")
        if tool is None or tool.finished:
            tool = self._new_tool(tool_id)
        told = wire.as_dict(tool.raw_input)
        _merge(tool, call)
        if tool.kind == "execute" and isinstance(tool.raw_input, dict):
            # OpenCode (1.18) repeats the command alone, and not where it told that it runs.
            tool.raw_input = {**told, **tool.raw_input}
        if tool_id:
            self._weigh(tool)
            events += [*self._shed(tool), *self._announce(tool)]
        request = _approval(request_id, tool, item.get("options"), self._directory)
        # The rest of the content is what the person is told when asked (Codex, Gemini), never what the tool says.
        tool.content = [part for part in tool.content if wire.as_dict(part).get("type") == "diff"]
        return events, request


def _tool_id(call: dict[str, Any]) -> str:
    named = wire.as_str(call.get("toolCallId"))
    if len(named) <= limits.ACP_ID_CHARS:
        return named
    return "sha256:" + hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()


def _merge(tool: _Tool, update: dict[str, Any]) -> None:
    tool.title = wire.bounded(wire.as_str(update.get("title")), limits.ACP_COMMAND_CHARS + 1)[0] or tool.title
    if isinstance(update.get("kind"), str):
        tool.kind = wire.tool_kind(update["kind"])
    if update.get("rawInput") not in (None, {}, ""):
        tool.raw_input = update["rawInput"]
    tool.without_input = update.get("rawInput") == {} and not tool.raw_input
    if update.get("rawOutput") not in (None, {}, ""):
        tool.raw_output = update["rawOutput"]
    if isinstance(update.get("content"), list):
        tool.content = update["content"]
    if wire.as_list(update.get("locations")):
        tool.locations = update["locations"]


def _approval(request_id: str, tool: _Tool, options: Json, directory: str) -> ApprovalRequested:
    diffs, cut = wire.diffs_of(tool.content)
    paths = tuple(dict.fromkeys((*wire.paths_of(tool.locations, tool.raw_input), *(diff.path for diff in diffs if diff.path))))
    command, whole = _action(tool, diffs, paths)
    reason, _ = wire.output_of(tool.content, None, lambda terminal_id: "")
    title = tool.title or command or tool.kind
    named, certain = wire.cwd_of(tool.raw_input) if tool.kind == "execute" else "", True
    if tool.kind == "execute" and not tool.raw_input:
        named, certain = wire.directory_told(reason)
    return ApprovalRequested(
        request_id,
        wire.bounded(title, limits.ACP_COMMAND_CHARS)[0],
        tool.kind,
        wire.choices_of(options),
        tool_call_id=tool.event_id,
        command=command,
        paths=paths,
        diffs=diffs,
        reason="" if reason == command else reason,
        cwd=posixpath.join(directory, named) if named else directory,
        complete=whole and certain and not cut,
    )


def _action(tool: _Tool, diffs: tuple[FileDiff, ...], paths: tuple[str, ...]) -> tuple[str, bool]:
    """What would be done beyond its paths and diffs, as text, and whether that (with them) is the whole action.

    Gemini names a command only in the title. Where neither command nor diff is known the raw input itself is shown.
    """
    command = wire.command_of(tool.raw_input)
    if not command and tool.kind == "execute" and not tool.raw_input:
        command = tool.title
        if not command or command.rstrip().endswith(_ELLIPSIS):
            return command, False
    if command:
        return wire.bounded(command, limits.ACP_COMMAND_CHARS)[0], len(command) <= limits.ACP_COMMAND_CHARS
    if tool.kind == "mode" and (plan := wire.as_str(wire.as_dict(tool.raw_input).get("plan"))):
        return wire.bounded(plan, limits.ACP_COMMAND_CHARS)[0], len(plan) <= limits.ACP_COMMAND_CHARS
    if diffs:
        return "", True
    if tool.kind in ("read", "search", "think", "mode"):
        return "", bool(paths or tool.title)
    if tool.raw_input:
        text, cut = wire.compact(tool.raw_input, limits.ACP_COMMAND_CHARS)
        return text, not cut
    return "", tool.without_input and tool.kind == "other" and bool(tool.title)
