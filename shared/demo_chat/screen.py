"""What the demo prints: a runner's results as lines of a terminal.

An answer arrives as texts that grow (``message.delta`` carries the whole text so far); the screen prints what is new. Tool
calls get a line when they start and one when they end. They are told at once and text a little later, so a tool's line waits
for the end of the line being written, at most :data:`PATIENCE` seconds. A question stays the last line until it is answered:
what has to be said at once stands above it, what can wait follows the answer. Nothing here waits or reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, TextIO

Json = Any

MARKER = "…"
"""What the runner puts under a text that is still being written."""

PATIENCE = 0.6
"""Seconds a tool's line waits for the end of a line of the answer; the runner's texts come every 0.25 s."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_WIDTH = 100


def printable(text: str) -> str:
    """``text`` without what a terminal would take for a command."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


class Screen:
    """One terminal, one run at a time."""

    def __init__(self, out: TextIO, *, color: bool) -> None:
        """``color`` also tells whether the terminal understands escape sequences at all."""
        self._out = out
        self._color = color
        self._shown = ""
        self._line_open = False
        self._held: list[str] = []
        self._question = ""
        self._later: list[str] = []
        self._written_at = 0.0
        self.begun = False
        """Whether anything of the current run's answer has come, a text or a tool call."""
        self.answer = ""
        """All completed messages of the current run."""
        self.problem = ""
        """How the current run failed; empty while it has not."""
        self._code = ""

    def begin(self) -> None:
        """A run begins."""
        self._shown, self.answer, self.problem = "", "", ""
        self._code = ""
        self.begun = False

    def result(self, result: Mapping[str, Json]) -> None:
        """Print one result of the runner."""
        data = result.get("data") or {}
        match result.get("type"):
            case "message.delta":
                self._grow(_text(data.get("chunk")))
            case "message.completed":
                self._complete(_text(data.get("message")))
            case "tool.call.started":
                self.begun = True
                self._hold(f"▸ {_title(data)}")
            case "tool.call.completed":
                self._tool_ended(data)
            case "run.completed":
                if data.get("message"):
                    self._complete(_text(data["message"]))
                if data.get("finish_reason") == "error":
                    self.problem = "the run ended with an error"
            case "run.failed":
                self._code = str(data.get("code") or "no code")
                self.problem = f"{data.get('error') or 'the run failed'} ({self._code})"
                self.note(f"✗ {printable(self.problem)}")
            case "processor.log" if data.get("level") == "error":
                self._code = (str(data.get("text") or "").split() or [""])[0]
            case _:
                return

    @property
    def explained(self) -> bool:
        """Whether the current run failed by a code of the plugin's catalogue, whose text says what to do.

        Where a run ends by ``run.completed``, only the log entry before it has the code.
        """
        return bool(self.problem) and self._code.startswith("coding.") and self._code != "coding.internal"

    def note(self, text: str) -> None:
        """A line of our own, apart from the answer."""
        self._apart(f"\x1b[2m  {text}\x1b[0m\n" if self._color else f"  {text}\n")

    def message(self, text: str) -> None:
        """A whole message that belongs to no run."""
        self._apart(printable(text).rstrip("\n") + "\n")

    def aside(self, text: str) -> None:
        """A line of our own that can wait, as a tool's does, for the end of a line of the answer, and for what is typed."""
        if self._question:
            self._later.append(text)
        else:
            self._hold(text)

    def ask(self, text: str) -> None:
        """Text before something is typed; it is the last line until :meth:`answered` or :meth:`resume`."""
        self._end_line()
        self._release()
        self._write(text)
        self._question = text

    def answered(self, line: str, *, shown: bool) -> None:
        """Something was typed; ``shown`` when the terminal has put it, and the end of the line, behind the question."""
        if shown:
            self._line_open = False
        else:
            self._write(printable(line) + "\n")
        self.resume()

    def resume(self) -> None:
        """No question stands any more: print what came meanwhile."""
        self._question = ""
        later, self._later = self._later, []
        if later:
            self._end_line()
        for text in later:
            self._hold(text)

    def tick(self) -> None:
        """To be called often: tells what has been held long enough."""
        if self._held and time.monotonic() - self._written_at > PATIENCE:
            self._release()

    # ---- pieces

    def _apart(self, text: str) -> None:
        self._end_line()
        if self._held:
            self._release()
        self._write(text + self._question)

    def _hold(self, line: str) -> None:
        self._held.append(line)
        if not self._line_open:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for line in held:
            self.note(line)

    def _grow(self, text: str) -> None:
        body = text.rstrip()
        if body.endswith(MARKER):
            body = body[: -len(MARKER)].rstrip()
        if body.endswith("\n```"):  # a fence that is closed only for the moment
            body = body[:-4].rstrip()
        if body.startswith(self._shown):
            self._answer(body[len(self._shown) :])
            self._shown = body
            self.begun = self.begun or bool(body)

    def _complete(self, text: str) -> None:
        if text.startswith(self._shown):
            self._answer(text[len(self._shown) :])
        else:
            self._end_line()
            self._answer(text)
        self._end_line()
        self._release()
        self._shown = ""
        self.answer += text + "\n"

    def _answer(self, text: str) -> None:
        """More of the answer, with the held lines after its first line end."""
        first, end, rest = printable(text).partition("\n")
        if self._held and end:
            self._write(first)
            self._release()
            self._answer(rest)
        else:
            self._write(first + end + rest)
        self._written_at = time.monotonic()

    def _tool_ended(self, data: Mapping[str, Json]) -> None:
        result = data.get("result") or {}
        status = "failed" if data.get("error") else str(result.get("status") or "completed")
        mark = {"completed": "✓", "cancelled": "–"}.get(status, "✗")
        output = printable(str(result.get("output") or "")).strip().splitlines()
        more = f": {output[0][:_WIDTH]}" + (f" (+{len(output) - 1} lines)" if len(output) > 1 else "") if output else ""
        self._hold(f"{mark} {_title(data)}{more}")

    def _end_line(self) -> None:
        if self._line_open:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._line_open = not text.endswith("\n")


def _title(data: Mapping[str, Json]) -> str:
    return printable(str(data.get("tool_name") or "tool"))


def _text(message: Json) -> str:
    """The text of a message or chunk: its own, or that of its parts."""
    if not isinstance(message, Mapping):
        return ""
    content = message.get("all_content") or message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))
