"""The terminals an agent opens through the client: commands in the workspace, under the supervisor, with bounded output.

A terminal's output is standard output and standard error in the order they were written; the last bytes are kept, cut between
characters. Every terminal ends with its turn or its session at the latest, proven by the place it runs in.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pkg import limits
from pkg.errors import CodingError, ProcessCleanupUnconfirmed
from pkg.launch import AgentProcess, Command, Launcher

_MERGED: Final = 'exec "$@" 2>&1'


def shell_command(command: str, args: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs ``command`` with both outputs merged; without arguments it is a shell's own line."""
    if args:
        return ("/bin/sh", "-c", _MERGED, "sh", command, *args)
    return ("/bin/sh", "-c", f"exec 2>&1\n{command}")


def character_start(data: bytes | bytearray) -> int:
    """The index of the first whole UTF-8 character of ``data``."""
    start = 0
    while start < min(len(data), 4) and data[start] & 0xC0 == 0x80:
        start += 1
    return start


class _Terminal:
    def __init__(self, process: AgentProcess, limit: int) -> None:
        self.process = process
        self.output = bytearray()
        self.truncated = False
        self.exit_status: dict[str, Any] | None = None
        self._limit = limit
        self.ended = asyncio.create_task(self._follow(), name="acp-terminal", context=contextvars.Context())

    async def _follow(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            try:
                code = (await self.process.wait()).code
            except CodingError:
                code = -signal.SIGKILL
            await asyncio.wait({reader}, timeout=limits.ACP_EXIT_DRAIN)
            self.exit_status = {"exitCode": code} if code >= 0 else {"exitCode": None, "signal": _signal_name(-code)}
        finally:
            reader.cancel()
            await asyncio.wait({reader})

    async def _read(self) -> None:
        try:
            while data := await self.process.read():
                self.output += data
                if len(self.output) > self._limit:
                    self.truncated = True
                    del self.output[: len(self.output) - self._limit]
                    del self.output[: character_start(self.output)]
        except CodingError:
            return

    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Terminals:
    """All terminals of one session."""

    def __init__(self, launcher: Launcher, env: Mapping[str, str]) -> None:
        self._launcher = launcher
        self._env = env
        self._open: dict[str, _Terminal] = {}
        self._starting = 0
        self._settled = asyncio.Event()
        """Set while no terminal is being started."""
        self._settled.set()
        self._count = 0
        self._doubt = False
        self._unconfirmed: list[int] = []

    def __repr__(self) -> str:
        return f"Terminals({len(self._open)} open)"

    @property
    def full(self) -> bool:
        """Whether no further terminal may be opened."""
        return len(self._open) + self._starting >= limits.ACP_TERMINALS

    async def create(self, argv: tuple[str, ...], cwd: str, env: Mapping[str, str], byte_limit: int | None) -> str:
        """Start a command and return the terminal's id. Raises :class:`pkg.errors.CodingError`."""
        limit = limits.ACP_TERMINAL_BYTES if byte_limit is None else max(0, min(byte_limit, limits.ACP_TERMINAL_BYTES))
        self._starting += 1
        self._settled.clear()
        try:
            process = await self._launcher.start(Command(argv, cwd, {**self._env, **env}))
            process.close_stdin()
            self._count += 1
            terminal_id = f"term-{self._count}"
            self._open[terminal_id] = _Terminal(process, limit)
        finally:
            self._starting -= 1
            if not self._starting:
                self._settled.set()
        return terminal_id

    def output(self, terminal_id: str) -> dict[str, Any]:
        """The protocol's view of a terminal. Raises ``KeyError``."""
        terminal = self._open[terminal_id]
        view: dict[str, Any] = {"output": terminal.text(), "truncated": terminal.truncated}
        if terminal.exit_status is not None:
            view["exitStatus"] = terminal.exit_status
        return view

    def text(self, terminal_id: str) -> str:
        """What a terminal of ours printed; the empty string for any other id."""
        terminal = self._open.get(terminal_id)
        return "" if terminal is None else terminal.text()

    def ended(self, terminal_id: str) -> asyncio.Task[None]:
        """The task that is done when the command has ended. Raises ``KeyError``."""
        return self._open[terminal_id].ended

    def exit_status(self, terminal_id: str) -> dict[str, Any]:
        """How the command ended. Raises ``KeyError``."""
        return self._open[terminal_id].exit_status or {"exitCode": None}

    async def kill(self, terminal_id: str) -> None:
        """End a command and everything it started; its output stays readable.

        Raises ``KeyError``, and :class:`pkg.errors.CodingError` when its end cannot be confirmed (:meth:`end_all` then says
        so for good).
        """
        terminal = self._open[terminal_id]
        try:
            await terminal.process.stop()
        except ProcessCleanupUnconfirmed as exc:
            self._open.pop(terminal_id, None)
            self._unconfirmed += exc.pids
            self._doubt = True
            raise CodingError("coding.terminal_unconfirmed") from None
        await asyncio.wait({terminal.ended})

    async def release(self, terminal_id: str) -> None:
        """End a command and forget it. Raises as :meth:`kill`."""
        await self.kill(terminal_id)
        self._open.pop(terminal_id, None)

    async def end_all(self) -> None:
        """End every terminal, also those that are just being started.

        Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` after all have been tried.
        """
        await self._settled.wait()
        for terminal_id in tuple(self._open):
            try:
                await self.release(terminal_id)
            except (KeyError, CodingError):
                continue
        if self._doubt:
            raise ProcessCleanupUnconfirmed("terminals of the session", tuple(self._unconfirmed))
