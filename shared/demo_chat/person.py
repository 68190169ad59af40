"""The person at the terminal: lines that are typed, and answers to the agent's permission requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from demo_chat.gate import LINE_BYTES
from demo_chat.screen import Screen, printable

Json = Any

DIFF_LINES = 20
"""Lines of a change that are shown before it is allowed; a longer one is refused here, because it cannot be shown whole."""


class Lines:
    """Lines typed on stdin, read by a thread of its own that never keeps the process alive."""

    def __init__(self) -> None:
        """Starts reading; call it inside the loop."""
        self._loop = asyncio.get_running_loop()
        self._typed: deque[str] = deque()
        self._ended = False
        self._news = asyncio.Event()
        self._terminal = os.isatty(0)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def answer(self, screen: Screen, question: str, *, fresh: bool = False) -> str | None:
        """Ask, and the next line without its end; ``None`` when there are no more.

        With ``fresh`` it is one that was ended after the question appeared; lines typed ahead are no answer to it and stay.
        """
        first = len(self._typed) if fresh else 0
        ahead = len(self._typed) > first
        screen.ask(question)
        while len(self._typed) <= first:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        line = self._typed[first]
        del self._typed[first]
        screen.answered(line, shown=self._terminal and not ahead)
        return line

    def _arrived(self, line: str | None) -> None:
        if line is None:
            self._ended = True
        else:
            self._typed.append(line)
        self._news.set()

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError, RuntimeError):  # the terminal or the loop is gone
            while data := os.read(0, 65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._loop.call_soon_threadsafe(self._arrived, line.decode(errors="replace"))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived, None)


class Permissions:
    """Puts what the gate asks to the person, one question after the other."""

    def __init__(self, screen: Screen, lines: Lines) -> None:
        """Where questions are printed and where answers are typed."""
        self._screen = screen
        self._lines = lines
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Listen for gates on the Unix socket ``path``."""
        server = await asyncio.start_unix_server(self._serve, path, limit=LINE_BYTES)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_questions: dict[int, asyncio.Task[None]] = {}
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "ask" in message:
                    number = message["ask"]
                    open_questions[number] = asyncio.create_task(self._put(number, message["request"], writer))
                elif (task := open_questions.pop(message.get("withdraw"), None)) is not None and task.cancel():
                    self._screen.note("(no longer asked)")
        finally:
            for task in open_questions.values():
                task.cancel()
            await asyncio.gather(*open_questions.values(), return_exceptions=True)
            writer.close()

    async def _put(self, number: int, request: Mapping[str, Json], writer: asyncio.StreamWriter) -> None:
        async with self._turn:
            option = await self._decide(request)
        writer.write(json.dumps({"answer": number, "option": option}).encode() + b"\n")
        await writer.drain()

    async def _decide(self, request: Mapping[str, Json]) -> str | None:
        shown = describe(_object(request.get("toolCall")))
        if shown is None:
            self._screen.note("The agent asked for something too long to be shown whole here, so it was denied.")
            return None
        by_kind = {
            option["kind"]: option["optionId"]
            for option in reversed(request.get("options") or [])
            if isinstance(option, dict) and isinstance(option.get("optionId"), str) and isinstance(option.get("kind"), str)
        }
        for line in shown:
            self._screen.note(line)
        longer = "allow_always" in by_kind
        while True:
            question = f"  Allow it? [y]es{', [a]lways in this session' if longer else ''}, [n]o: "
            typed = await self._lines.answer(self._screen, question, fresh=True)
            answer = "no" if typed is None else typed.strip().lower()
            if answer in ("y", "yes") and "allow_once" in by_kind:
                return str(by_kind["allow_once"])
            if answer in ("a", "always") and longer:
                return str(by_kind["allow_always"])
            if answer in ("n", "no"):
                return None


def describe(call: Mapping[str, Json]) -> list[str] | None:
    """What a tool call wants to do, in lines; ``None`` when it cannot be shown whole."""
    command = _object(call.get("rawInput")).get("command")
    if isinstance(command, list):
        command = " ".join(str(part) for part in command)
    lines = [f"? {printable(str(call.get('title') or call.get('kind') or 'a tool call'))}"]
    if isinstance(command, str) and command not in lines[0]:
        lines += [f"  $ {line}" for line in printable(command).splitlines()]
    for item in call.get("content") or ():
        if isinstance(item, dict) and item.get("type") == "diff":
            lines.append(f"  {item.get('path')}")
            lines += [f"  - {line}" for line in printable(str(item.get("oldText") or "")).splitlines()]
            lines += [f"  + {line}" for line in printable(str(item.get("newText") or "")).splitlines()]
    return lines if len(lines) <= DIFF_LINES else None


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}
