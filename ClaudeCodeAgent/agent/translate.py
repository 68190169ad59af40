"""The program's lines as our events: a state machine without I/O.

Only the main conversation's text is the answer; a sub-agent's text is its own affair, its tool calls are told like any other.
Text of an API error is no answer: it becomes the turn's error. Every tool call that was told is finished at the latest by the
end of its turn. Kinds that nobody knows become notices for telemetry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agent import tools
from agent.answer_text import AnswerText
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    Json,
    Notice,
    PlanUpdated,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    ToolStatus,
    UsageReported,
)
from pkg.lenient import as_dict, as_float, as_int, as_list, as_str, compact

_SILENT = frozenset({"init", "session_state_changed", "thinking_tokens", "ui_invalidate"})
_USAGE_KEYS = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")
_RETRIES_TOLD = 3
"""The attempt at which people are told that the service does not answer: by then about half a minute has passed."""


@dataclass(slots=True)
class Call:
    """A tool call that was told and has not ended."""

    name: str
    title: str
    given: dict[str, Any]


class Translator:
    """The state of one session's stream."""

    def __init__(self, *, show_cost: bool = False) -> None:
        """``show_cost`` adds what a turn cost to its usage."""
        self._show_cost = show_cost
        self._text = AnswerText()
        self._calls: dict[str, Call] = {}
        self._thought = ""
        self._failed_servers: frozenset[str] = frozenset()
        self._retries_told = False
        self.error_class = ""
        """The class of the turn's last API error."""
        self.model = ""
        self.mode = ""
        self.session_id = ""

    # ---- turns

    def begin_turn(self) -> None:
        """A prompt is about to be sent."""
        self.error_class = ""
        self._retries_told = False

    def end_turn(self) -> list[AgentEvent]:
        """The turn is over (or being cancelled): what was left of it."""
        self._text.turn_over()
        return self._finish_all()

    def call(self, tool_use_id: str) -> Call | None:
        """An open tool call, to know what a permission is asked for."""
        return self._calls.get(tool_use_id)

    # ---- lines

    def line(self, message: dict[str, Any]) -> list[AgentEvent]:
        """The events of one line."""
        kind = as_str(message.get("type"))
        match kind:
            case "stream_event":
                return [] if message.get("parent_tool_use_id") else self._stream(message)
            case "assistant":
                return self._assistant(message)
            case "user":
                return self._user(message)
            case "system":
                return self._system(as_str(message.get("subtype")), message)
            case "result":
                return self._usage(message)
            case "command_lifecycle" | "control_request" | "control_cancel_request" | "keep_alive":
                return []
            case _:
                return [unknown(kind, message)]

    def _stream(self, message: dict[str, Any]) -> list[AgentEvent]:
        event = as_dict(message.get("event"))
        match event.get("type"):
            case "message_start":
                self._text.message_started(as_str(as_dict(event.get("message")).get("id")))
            case "content_block_start":
                block = as_dict(event.get("content_block"))
                self._text.block_started()
                self._thought = ""
                if block.get("type") == "text" and (text := block.get("text")) and isinstance(text, str):
                    return list(self._text.piece(text))
            case "content_block_delta":
                return self._delta(as_dict(event.get("delta")))
            case "message_stop":
                abandoned = as_dict(message.get("abandoned_blocks"))
                if abandoned:
                    self._text.broken_off(max(as_int(abandoned.get("from_block_index")) or 0, 0))
                else:
                    self._text.message_stopped()
        return []

    def _delta(self, delta: dict[str, Any]) -> list[AgentEvent]:
        text = delta.get("text")
        if delta.get("type") == "text_delta" and isinstance(text, str):
            return list(self._text.piece(text))
        if delta.get("type") == "thinking_delta" and (thought := as_str(delta.get("thinking"))):
            self._thought += thought
            return [ThoughtDelta(thought)]
        return []

    def _assistant(self, message: dict[str, Any]) -> list[AgentEvent]:
        said = as_dict(message.get("message"))
        if error := as_str(message.get("error")):
            self.error_class = error
        if message.get("is_api_error_message") is True or message.get("error"):
            return []
        ours = not message.get("parent_tool_use_id")
        events: list[AgentEvent] = []
        for block in map(as_dict, as_list(said.get("content"))):
            match block.get("type"):
                case "text" if ours and as_str(said.get("model")) != "<synthetic>":
                    text = block.get("text")
                    events += self._text.whole(as_str(said.get("id")), text if isinstance(text, str) else "")
                case "thinking" if ours:
                    events += self._whole_thought(as_str(block.get("thinking")))
                case "tool_use" | "server_tool_use" | "mcp_tool_use":
                    events += self._called(block)
        return events

    def _whole_thought(self, thought: str) -> list[AgentEvent]:
        streamed, self._thought = self._thought, ""
        if thought.startswith(streamed) and (more := thought[len(streamed) :]):
            return [ThoughtDelta(more)]
        return []

    # ---- tools

    def _called(self, block: dict[str, Any]) -> list[AgentEvent]:
        call_id, name = as_str(block.get("id"))[: limits.ACP_ID_CHARS], as_str(block.get("name"))
        if not call_id or call_id in self._calls:
            return []
        given = as_dict(block.get("input"))
        call = self._calls[call_id] = Call(name, tools.title_of(name, given), given)
        events: list[AgentEvent] = [ToolStarted(call_id, call.title, tools.kind_of(name), tools.input_of(given))]
        if name == "TodoWrite":
            events.append(PlanUpdated(tools.plan_of(given)))
        if len(self._calls) > limits.ACP_TOOL_CALLS:
            events += self._finish(next(iter(self._calls)), "cancelled")
        return events

    def _user(self, message: dict[str, Any]) -> list[AgentEvent]:
        content = as_dict(message.get("message")).get("content")
        results = [item for item in map(as_dict, as_list(content)) if item.get("type") == "tool_result"]
        events: list[AgentEvent] = []
        for item in results:
            call_id = as_str(item.get("tool_use_id"))[: limits.ACP_ID_CHARS]
            structured = message.get("tool_use_result") if len(results) == 1 else None
            status: ToolStatus = "failed" if item.get("is_error") is True else "completed"
            events += self._finish(call_id, status, item.get("content"), structured)
        return events

    def _finish(self, call_id: str, status: ToolStatus, content: Json = None, structured: Json = None) -> list[AgentEvent]:
        call = self._calls.pop(call_id, None)
        if call is None:
            return []
        output, cut = tools.output_of(content)
        diffs, whole = tools.changed_by(structured) if status == "completed" else ((), True)
        return [ToolFinished(call_id, status, call.title, output, diffs, cut or not whole)]

    def _finish_all(self) -> list[AgentEvent]:
        return [event for call_id in list(self._calls) for event in self._finish(call_id, "cancelled")]

    # ---- what the program says about itself

    def _system(self, subtype: str, message: dict[str, Any]) -> list[AgentEvent]:
        match subtype:
            case "init":
                return self._init(message)
            case "status":
                self.mode = as_str(message.get("permissionMode")) or self.mode
                status = as_str(message.get("status"))
                return [Notice("agent.status", status)] if status not in ("", "requesting") else []
            case "api_retry":
                return self._retry(message)
            case "compact_boundary":
                return [Notice("agent.compacted", compact(message.get("compact_metadata"), limits.ACP_NOTICE_CHARS)[0])]
            case _ if subtype in _SILENT:
                return []
        return [unknown(subtype or "system", message)]

    def _init(self, message: dict[str, Any]) -> list[AgentEvent]:
        self.session_id = as_str(message.get("session_id")) or self.session_id
        self.model = as_str(message.get("model")) or self.model
        self.mode = as_str(message.get("permissionMode")) or self.mode
        servers = [as_dict(item) for item in as_list(message.get("mcp_servers"))]
        failed = frozenset(as_str(item.get("name")) for item in servers if item.get("status") == "failed") - {""}
        new, self._failed_servers = failed - self._failed_servers, failed
        return [servers_failed(new)] if new else []

    def servers_told(self, failed: frozenset[str]) -> None:
        """People have been told of these servers already."""
        self._failed_servers = failed

    def _retry(self, message: dict[str, Any]) -> list[AgentEvent]:
        events: list[AgentEvent] = [unknown("api_retry", message)]
        if (as_int(message.get("attempt")) or 0) >= _RETRIES_TOLD and not self._retries_told:
            self._retries_told = True
            reason = as_int(message.get("error_status")) or as_str(message.get("error")) or "-"
            events.append(Notice("coding.claude_retrying", level="warning", params={"reason": str(reason)[:80]}))
        return events

    def _usage(self, message: dict[str, Any]) -> list[AgentEvent]:
        """What the program used since its last result, over all models."""
        models = [as_dict(item) for item in as_dict(message.get("model_usage_since_last_result")).values()]
        if not models:
            return []
        fresh, out, cached, made = (sum(as_int(item.get(key)) or 0 for item in models) for key in _USAGE_KEYS)
        cost = ""
        if self._show_cost:
            cost = f"{sum(as_float(item.get('costUSD')) or 0.0 for item in models):.4f} USD"
        given = fresh + cached + made
        return [UsageReported(given, out, given + out, cached, cost=cost)]


def servers_failed(names: frozenset[str]) -> Notice:
    """The notice that tool servers could not be reached."""
    return Notice("coding.mcp_servers_failed", level="warning", params={"names": ", ".join(sorted(names))[:500]})


def unknown(kind: str, value: dict[str, Any]) -> Notice:
    """The notice that keeps something for telemetry."""
    name = re.sub(r"[^A-Za-z0-9_/.-]+", "_", kind)[:64] or "message"
    shown = {key: item for key, item in value.items() if key not in ("type", "subtype", "uuid", "session_id")}
    return Notice(f"agent.{name}", compact(shown, limits.ACP_NOTICE_CHARS)[0])
