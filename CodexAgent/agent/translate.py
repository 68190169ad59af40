"""A thread's notifications as :mod:`pkg.agent_api` events: a state machine without I/O.

Guarantees:

- only what belongs to the open turn becomes an event; what comes late of an ended turn, and everything of other threads, does
  not;
- a text is emitted once, whether it came in pieces, whole at its item's end, or both; the piece of a message that was cut by an
  interrupt stays as it was;
- ``commentary`` is no part of the answer: it is told as a thought, and becomes the answer only where the turn gave no other;
- a tool call is one :class:`ToolStarted` and one :class:`ToolFinished`, at the latest at the end of its turn;
- what a turn cost is the difference of the thread's totals, told once, before the turn's end;
- kinds nobody knows become notices.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.diffs import Changes, changes_of
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    Json,
    Notice,
    PlanEntry,
    PlanUpdated,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolKind,
    ToolStarted,
    ToolStatus,
    UsageReported,
)
from pkg.lenient import as_dict, as_int, as_list, as_str, bounded, compact

_SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash"})
_STATUSES: Final[Mapping[str, ToolStatus]] = {
    "completed": "completed",
    "failed": "failed",
    "declined": "cancelled",
    "interrupted": "cancelled",
}
_PLAN_STATUSES: Final = {"inProgress": "in_progress", "completed": "completed"}
_SILENT_ITEMS: Final = frozenset({"userMessage", "hookPrompt", "functionCallOutput", "sleep"})
_RETRY: Final = re.compile(r"(\d+)\s*/\s*(\d+)")
_ACTION_KINDS: Final[Mapping[str, ToolKind]] = {"read": "read", "listFiles": "search", "search": "search"}


def shown_command(command: str) -> str:
    """A command line as a person would write it: without the shell that only carries it (``/bin/bash -lc '…'``)."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    if len(words) == 3 and words[0].rpartition("/")[2] in _SHELLS and words[1] in ("-c", "-lc"):
        return words[2]
    return command


def kind_of(actions: Json) -> ToolKind:
    """What a command does, by the actions Codex recognised in it; ``execute`` unless all of them only look."""
    kinds = {_ACTION_KINDS.get(as_str(as_dict(action).get("type"))) for action in as_list(actions)}
    if not kinds or None in kinds:
        return "execute"
    return "read" if kinds == {"read"} else "search"


@dataclass(slots=True)
class _Item:
    kind: str
    title: str = ""
    spoken: bool = False
    """Whether text of it was emitted."""
    commentary: bool = False
    tool: bool = False
    finished: bool = False
    changes: Changes | None = None
    cut: bool = False
    parts: list[str] = field(default_factory=list)
    """What a command printed."""
    size: int = 0
    """Characters emitted, or kept of what was printed."""


class Translator:
    """The state of one thread's stream."""

    def __init__(self) -> None:
        self._items: dict[str, _Item] = {}
        self._shed: list[AgentEvent] = []
        """The ends of tool calls that were forgotten, not told yet."""
        self._answered = False
        self._commentary = ""
        self._diff = ""
        self._total: Mapping[str, Any] | None = None
        """The thread's totals before the open turn, ``None`` while unknown."""
        self._usage: Mapping[str, Any] = {}
        self._retrying = False

    # ---- turns

    def begin_turn(self) -> None:
        """A turn is about to be started."""
        self._items.clear()
        self._answered = self._retrying = False
        self._commentary = self._diff = ""
        self._usage = {}

    def cancel(self) -> list[AgentEvent]:
        """The turn is being cancelled: its open tool calls end here, whatever Codex still says about them."""
        return self._finish_tools()

    def end_turn(self, items: Json = None) -> list[AgentEvent]:
        """The turn is over; its last events. ``items`` are those of ``turn/completed`` (its last message)."""
        events: list[AgentEvent] = []
        if not self._answered:
            for item in map(as_dict, as_list(items)):
                if item.get("type") == "agentMessage" and item.get("phase") != "commentary":
                    events += self._message_end(as_str(item.get("id")), item)
        if not self._answered and self._commentary:
            events.append(TextDelta(self._commentary))
            self._answered = True
        events += self._finish_tools()
        if self._diff:
            text, _ = bounded(self._diff, limits.ACP_TOOL_OUTPUT_CHARS)
            events.append(Notice("agent.turn_diff", text))
        if self._usage:
            events.append(self._reported())
        return events

    # ---- notifications of the open turn

    def notification(self, method: str, params: Mapping[str, Any]) -> list[AgentEvent]:
        """The events of one notification that belongs to the open turn."""
        events = self._notification(method, params)
        shed, self._shed = self._shed, []
        return [*shed, *events]

    def _notification(self, method: str, params: Mapping[str, Any]) -> list[AgentEvent]:
        match method:
            case "item/agentMessage/delta":
                return self._message_delta(as_str(params.get("itemId")), as_str(params.get("delta")))
            case "item/reasoning/summaryTextDelta" | "item/reasoning/textDelta":
                return self._thought(as_str(params.get("itemId")), as_str(params.get("delta")))
            case "item/reasoning/summaryPartAdded":
                item = self._items.get(as_str(params.get("itemId")))
                return [ThoughtDelta("\n\n")] if item is not None and item.spoken else []
            case "item/commandExecution/outputDelta":
                self._output(as_str(params.get("itemId")), as_str(params.get("delta")))
                return []
            case "item/fileChange/patchUpdated":
                item = self._items.get(as_str(params.get("itemId")))
                if item is not None:
                    item.changes = changes_of(params.get("changes"))
                return []
            case "item/plan/delta":
                return self._message_delta(as_str(params.get("itemId")), as_str(params.get("delta")))
            case "item/started":
                return self._started(as_dict(params.get("item")))
            case "item/completed":
                return self._completed(as_dict(params.get("item")))
            case "turn/plan/updated":
                return [PlanUpdated(_plan(params.get("plan")))]
            case "turn/diff/updated":
                self._diff = as_str(params.get("diff"))
                return []
            case "thread/tokenUsage/updated":
                self._count(as_dict(params.get("tokenUsage")))
                return []
            case "error":
                return self._retry(params)
            case "item/mcpToolCall/progress" | "item/fileChange/outputDelta" | "item/commandExecution/terminalInteraction":
                return []
            case "turn/started" | "turn/moderationMetadata":
                return []
            case "thread/compacted":
                return [Notice("agent.compacted")]
            case _:
                return [unknown(method, params)]

    def counted_before(self, params: Mapping[str, Any]) -> None:
        """Take the totals of a thread as they were before the turn: what it did not cost."""
        self._total = as_dict(as_dict(params.get("tokenUsage")).get("total")) or self._total

    def changes(self, item_id: str) -> Changes | None:
        """The file changes that an item announced, for the approval that names only the item."""
        item = self._items.get(item_id)
        return None if item is None else item.changes

    @property
    def retrying(self) -> bool:
        """Whether the last thing Codex said is that it is trying to reach the model again."""
        return self._retrying

    # ---- text

    def _item(self, item_id: str, kind: str) -> _Item:
        item = self._items.get(item_id)
        if item is None:
            item = _Item(kind)
            if len(self._items) >= limits.CODEX_ITEMS:
                self._forget_one()
            self._items[item_id] = item
        return item

    def _forget_one(self) -> None:
        """Forget the oldest item, an open tool call only where there is nothing else: it ends as cancelled then."""
        over = (name for name, each in self._items.items() if each.finished or not each.tool)
        oldest = next(over, next(iter(self._items)))
        item = self._items.pop(oldest)
        if item.tool and not item.finished:
            self._shed.append(self._finish(item, oldest, {"status": "interrupted"}))

    def _message_delta(self, item_id: str, delta: str) -> list[AgentEvent]:
        self._retrying = False
        item = self._item(item_id, "agentMessage")
        if not delta or item.finished:
            return []
        return self._say(item, item_id, delta)

    def _say(self, item: _Item, item_id: str, text: str) -> list[AgentEvent]:
        first, item.spoken = not item.spoken, True
        item.size += len(text)
        if item.commentary:
            before = "" if first else self._commentary
            self._commentary = (before + text)[-limits.ACP_TOOL_OUTPUT_CHARS :]
            return [ThoughtDelta(text)]
        self._answered = self._answered or not text.isspace()
        return [TextDelta(text, item_id)]

    def _message_end(self, item_id: str, value: Mapping[str, Any]) -> list[AgentEvent]:
        item = self._item(item_id, as_str(value.get("type")))
        if item.finished:
            return []
        text = as_str(value.get("text"))
        rest = text[item.size :]
        events = self._say(item, item_id, rest) if rest else []
        item.finished = True
        return events

    def _thought(self, item_id: str, delta: str) -> list[AgentEvent]:
        self._retrying = False
        item = self._item(item_id, "reasoning")
        if not delta or item.finished:
            return []
        item.spoken = True
        return [ThoughtDelta(delta)]

    # ---- items

    def _started(self, value: Mapping[str, Any]) -> list[AgentEvent]:
        self._retrying = False
        kind, item_id = as_str(value.get("type")), as_str(value.get("id"))
        if kind in _SILENT_ITEMS or not item_id:
            return []
        item = self._item(item_id, kind)
        match kind:
            case "agentMessage" | "plan":
                item.commentary = value.get("phase") == "commentary"
                return []
            case "reasoning":
                return []
        return self._announce(item, item_id, value)

    def _announce(self, item: _Item, item_id: str, value: Mapping[str, Any]) -> list[AgentEvent]:
        if item.tool:
            return []
        described = _tool(value)
        if described is None:
            return []
        item.tool = True
        title, kind, given = described
        item.title = bounded(title, limits.ACP_COMMAND_CHARS)[0]
        if item.kind == "fileChange":
            item.changes = changes_of(value.get("changes"))
        return [ToolStarted(item_id, item.title, kind, given)]

    def _completed(self, value: Mapping[str, Any]) -> list[AgentEvent]:
        self._retrying = False
        kind, item_id = as_str(value.get("type")), as_str(value.get("id"))
        if kind in _SILENT_ITEMS or not item_id:
            return []
        known = item_id in self._items
        item = self._item(item_id, kind)
        if item.finished:
            return []
        match kind:
            case "agentMessage" | "plan":
                if not known:
                    item.commentary = value.get("phase") == "commentary"
                return self._message_end(item_id, value)
            case "reasoning":
                said = "\n\n".join(filter(None, map(as_str, as_list(value.get("summary")))))
                events: list[AgentEvent] = [ThoughtDelta(said)] if said and not item.spoken else []
                item.finished = True
                return events
            case "contextCompaction":
                item.finished = True
                return [Notice("agent.compacted")]
        events = self._announce(item, item_id, value)
        if not item.tool:
            item.finished = True
            return [unknown(f"item_{kind}", value)]
        return [*events, self._finish(item, item_id, value)]

    def _finish(self, item: _Item, item_id: str, value: Mapping[str, Any]) -> ToolFinished:
        item.finished = True
        output, cut = _output_of(item.kind, value)
        kept = "".join(item.parts)
        if len(kept) > len(output):
            output, cut = kept, item.cut
        output, too_long = bounded(output, limits.CODEX_ITEM_OUTPUT_CHARS)
        item.parts.clear()
        if item.kind == "fileChange":
            item.changes = changes_of(value.get("changes")) if as_list(value.get("changes")) else item.changes
        changes = item.changes
        diffs = () if changes is None else changes.diffs
        truncated = cut or too_long or (changes is not None and not changes.whole)
        status = _STATUSES.get(as_str(value.get("status")), "completed")
        if value.get("success") is False or (value.get("error") and status == "completed"):
            status = "failed"
        return ToolFinished(item_id, status, item.title, output, diffs, truncated)

    def _finish_tools(self) -> list[AgentEvent]:
        events: list[AgentEvent] = []
        for item_id, item in self._items.items():
            if item.tool and not item.finished:
                events.append(self._finish(item, item_id, {"status": "interrupted"}))
        return events

    def _output(self, item_id: str, delta: str) -> None:
        self._retrying = False
        item = self._items.get(item_id)
        if item is None or item.finished:
            return
        room = limits.CODEX_ITEM_OUTPUT_CHARS - item.size
        item.cut = item.cut or len(delta) > room
        if room > 0 and delta:
            item.parts.append(delta[:room])
            item.size += min(len(delta), room)
            if len(item.parts) == 256:
                item.parts = ["".join(item.parts)]

    # ---- numbers and trouble

    def _count(self, usage: Mapping[str, Any]) -> None:
        total = as_dict(usage.get("total"))
        if not total:
            return
        if self._total is None:
            # A resumed thread begins with the totals of its past: what this request did not add.
            last = as_dict(usage.get("last"))
            self._total = {name: (as_int(value) or 0) - (as_int(last.get(name)) or 0) for name, value in total.items()}
        self._usage = usage

    def _reported(self) -> UsageReported:
        total, before = as_dict(self._usage.get("total")), self._total or {}

        def spent(name: str) -> int | None:
            now = as_int(total.get(name))
            return None if now is None else max(now - (as_int(before.get(name)) or 0), 0)

        last = as_dict(self._usage.get("last"))
        report = UsageReported(
            input_tokens=spent("inputTokens"),
            output_tokens=spent("outputTokens"),
            total_tokens=spent("totalTokens"),
            cached_input_tokens=spent("cachedInputTokens"),
            context_used=as_int(last.get("totalTokens")),
            context_size=as_int(self._usage.get("modelContextWindow")),
        )
        self._total = total
        return report

    def _retry(self, params: Mapping[str, Any]) -> list[AgentEvent]:
        error = as_dict(params.get("error"))
        if params.get("willRetry") is not True:
            # Its turn's end follows and says the same.
            return []
        self._retrying = True
        found = _RETRY.search(as_str(error.get("message")))
        return [Notice("status.reconnecting", params={"attempt": f"{found[1]}/{found[2]}" if found else "…"})]


# ------------------------------------------------------------------ items as tool calls


def _tool(value: Mapping[str, Any]) -> tuple[str, ToolKind, Mapping[str, Json]] | None:
    """Title, kind and bounded input of an item that is a tool call; ``None`` for one that is none we know."""
    match as_str(value.get("type")):
        case "commandExecution":
            command = shown_command(as_str(value.get("command")))
            return command or "command", kind_of(value.get("commandActions")), {"command": bounded(command, 4000)[0]}
        case "fileChange":
            paths = changes_of(value.get("changes")).paths
            names = ", ".join(path.rpartition("/")[2] for path in paths[:5]) + (", …" if len(paths) > 5 else "")
            return names or "file change", "edit", {"paths": list(paths[:50])}
        case "mcpToolCall":
            name = f"{as_str(value.get('server'))}.{as_str(value.get('tool'))}".strip(".")
            return name, "other", _input(value.get("arguments"))
        case "dynamicToolCall":
            name = ".".join(filter(None, (as_str(value.get("namespace")), as_str(value.get("tool")))))
            return name, "other", _input(value.get("arguments"))
        case "webSearch":
            query = as_str(value.get("query"))
            return query or "web search", "fetch", {"query": bounded(query, 4000)[0]}
        case "imageView":
            return as_str(value.get("path")).rpartition("/")[2] or "image", "read", {}
        case "collabAgentToolCall":
            tool = as_str(value.get("tool"))
            return tool or "agent", "think", {"prompt": bounded(as_str(value.get("prompt")), 4000)[0]}
    return None


def _input(arguments: Json) -> Mapping[str, Json]:
    if not isinstance(arguments, dict):
        return {} if arguments in (None, "") else {"input": compact(arguments, limits.ACP_TOOL_INPUT_BYTES)[0]}
    text, cut = compact(arguments, limits.ACP_TOOL_INPUT_BYTES)
    return {"truncated": text} if cut else arguments


def _output_of(kind: str, value: Mapping[str, Any]) -> tuple[str, bool]:
    match kind:
        case "commandExecution":
            return as_str(value.get("aggregatedOutput")), False
        case "mcpToolCall":
            error = as_str(as_dict(value.get("error")).get("message"))
            return _content(as_dict(value.get("result")).get("content")) or error, False
        case "dynamicToolCall":
            return _content(value.get("contentItems")), False
    return "", False


def _content(blocks: Json) -> str:
    return "\n".join(filter(None, (as_str(as_dict(block).get("text")) for block in as_list(blocks))))


def _plan(steps: Json) -> tuple[PlanEntry, ...]:
    return tuple(
        PlanEntry(text, _PLAN_STATUSES.get(as_str(step.get("status")), "pending"))
        for step in map(as_dict, as_list(steps)[: limits.ACP_PLAN_ENTRIES])
        if (text := as_str(step.get("step")))
    )


def unknown(kind: str, value: Json) -> Notice:
    """The notice that keeps something nobody knows."""
    name = re.sub(r"[^A-Za-z0-9_/.-]+", "_", kind)[:64]
    return Notice(f"agent.{name}", compact(value, limits.ACP_NOTICE_CHARS)[0])
