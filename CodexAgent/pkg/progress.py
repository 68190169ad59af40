"""The progress lines under a text being written: what the agent is doing, never part of the answer.

``show-progress`` says how much: ``off`` (nothing but a mark that more is coming), ``status`` (one line: a status that the agent
tells itself, else the running tool, else the plan's current step, else "thinking" or "working"), ``tools`` (besides, the last
tool calls with their outcome).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pkg import limits, texts
from pkg.agent_api import (
    AgentEvent,
    ApprovalRequested,
    Notice,
    PlanEntry,
    PlanUpdated,
    QuestionAsked,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
)
from pkg.text_clean import one_line

MODES: Final = ("off", "status", "tools")
_MARKS: Final = {"completed": "✓", "failed": "✗", "cancelled": "–"}
_REMEMBERED: Final = 256


@dataclass(slots=True)
class Progress:
    """Follows the events of a run and says the lines to show."""

    mode: str
    language: str
    tool_calls: int = 0
    """Tool calls begun in the current turn."""
    _started_at: float | None = None
    _running: dict[str, str] = field(default_factory=dict)
    _recent: dict[str, str] = field(default_factory=dict)
    _step: Mapping[str, object] | None = None
    """The plan's current step, as its text takes it."""
    _waiting: str = ""
    _told: str = ""
    """A status of the agent's own, until its next sign of life."""
    _thinking: bool = False
    _active: bool = True

    def event(self, event: AgentEvent, now: float) -> None:
        """Take one event of the agent."""
        if self._started_at is None:
            self._started_at = now
        match event:
            case TurnEnded():
                self._active = False
                self._running.clear()
                self._recent.clear()
                self._step = None
                self.tool_calls = 0
            case ToolStarted():
                self._active = True
                self.tool_calls += 1
                title = one_line(event.title, limits.STATUS_CHARS - 2) or event.kind
                self._running[event.tool_call_id] = title
                self._remember(event.tool_call_id, f"▸ {title}")
                while len(self._running) > _REMEMBERED:
                    del self._running[next(iter(self._running))]
            case ToolFinished():
                title = self._running.pop(event.tool_call_id, "") or one_line(event.title, limits.STATUS_CHARS - 2)
                if title:
                    self._remember(event.tool_call_id, f"{_MARKS[event.status]} {title}")
            case PlanUpdated():
                self._step = _current(event.entries)
            case TextDelta():
                self._active = True
            case _:
                pass
        if isinstance(event, ApprovalRequested | QuestionAsked):
            about = event.title if isinstance(event, ApprovalRequested) else event.message
            self._waiting = one_line(about, limits.STATUS_CHARS)
        else:
            self._waiting = ""
        status = isinstance(event, Notice) and event.code.startswith("status.")
        self._told = texts.render(event.code, self.language, event.params) if isinstance(event, Notice) and status else ""
        self._thinking = isinstance(event, ThoughtDelta)

    def begin_turn(self, now: float) -> None:
        """Another turn of the same run begins."""
        self._active = True
        self._started_at = now

    def lines(self, now: float) -> str:
        """The lines to show now; empty when there is nothing to tell."""
        if self.mode == "off" or not self._active:
            return ""
        line = self._line(now)
        if self.mode == "tools":
            return "\n".join([*list(self._recent.values())[-(limits.PROGRESS_LINES - 1) :], line])
        return line

    def _line(self, now: float) -> str:
        line = self._what()
        minutes = int((now - self._started_at) // 60) if self._started_at is not None else 0
        if minutes > 0:
            line = texts.render("status.minutes", self.language, {"status": line, "minutes": minutes})
        return line

    def _what(self) -> str:
        if self._waiting:
            return texts.render("status.waiting", self.language, {"what": self._waiting})
        if self._told:
            return self._told
        if self._running and self.mode != "tools":
            return texts.render("status.running", self.language, {"what": next(reversed(self._running.values()))})
        if self._step is not None:
            return texts.render("status.plan", self.language, self._step)
        return texts.render("status.thinking" if self._thinking else "status.working", self.language)

    def _remember(self, tool_call_id: str, line: str) -> None:
        self._recent[tool_call_id] = line
        while len(self._recent) > limits.PROGRESS_LINES:
            del self._recent[next(iter(self._recent))]


def _current(plan: Sequence[PlanEntry]) -> Mapping[str, object] | None:
    """What is told of the plan's current step; ``None`` where there is none."""
    for number, entry in enumerate(plan, 1):
        if entry.status == "in_progress":
            return {"number": number, "count": len(plan), "what": one_line(entry.content, limits.STATUS_CHARS)}
    return None
