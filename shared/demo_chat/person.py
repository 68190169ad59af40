"""The person at the terminal: the lines that are typed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque

from demo_chat.screen import Screen


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

    async def answer(self, screen: Screen, question: str) -> str | None:
        """Ask, and the next line without its end; ``None`` when there are no more."""
        ahead = bool(self._typed)
        screen.ask(question)
        while not self._typed:
            if self._ended:
                screen.resume()
                return None
            self._news.clear()
            await self._news.wait()
        line = self._typed.popleft()
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
