"""The near half of an SSH place: one remote process as two byte streams and a proven end.

:class:`RemoteProcess` speaks the frames of :mod:`pkg.ssh_wrapper` over a *carrier*, the local SSH client, which is a supervised
process of this machine itself. :class:`ShellProcess` is what is left where the remote machine has no ``python3``: the streams
are the carrier's own, and no end is ever called proven.

Guarantees of both: ``stop`` goes on however often its caller is cancelled; the carrier's own tree is ended in every case; no
tree of the remote machine counts as gone without the remote supervisor's word.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import shlex
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pkg import limits, ssh_wrapper, traceless
from pkg.errors import AgentDied, CommandNotFound, LaunchError, ProcessCleanupUnconfirmed
from pkg.process_api import AgentProcess, Command, Exit, Graces
from pkg.redaction import Redactor
from pkg.ssh_wrapper import CONTROL, STDERR, STDIN, STDOUT
from pkg.supervised_process import agent_died, stopped

_FAILURES: Final = {
    "workspace_missing": "coding.ssh_workspace_missing",
    "workspace_not_a_directory": "coding.ssh_workspace_not_directory",
    "workspace_closed": "coding.ssh_workspace_closed",
    "workspace_is_root": "coding.ssh_workspace_is_root",
    "workspace_not_writable": "coding.ssh_workspace_not_writable",
    "command_missing": "coding.ssh_command_missing",
    "command_closed": "coding.ssh_command_closed",
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Doubt = tuple[str, tuple[int, ...]]
"""Why an end is not proven, and the pids last seen."""


def graces_of(graces: Graces) -> dict[str, float]:
    """Graces as the supervisor takes them."""
    return {"eof": graces.eof, "term": graces.term, "kill": graces.kill, "settle": limits.SETTLE_GRACE}


def failure(code: str, command: Command, machine: str, searched: Iterable[str] = ()) -> LaunchError:
    """The error for a command the remote side could not start; ``searched`` are the directories it was looked for in."""
    name = command.argv[0].rsplit("/", 1)[-1] if command.argv else ""
    known = _FAILURES.get(code, "coding.ssh_start_failed")
    if code == "command_missing":
        return CommandNotFound(name, list(searched)[: limits.SSH_PLACES_SHOWN], code=known, machine=machine)
    return LaunchError(known, retryable=known == "coding.ssh_start_failed", machine=machine, name=name)


class _Ending:
    """``stop`` for both kinds: one task does it, every caller waits for that one."""

    def __init__(self, carrier: AgentProcess) -> None:
        self._carrier = carrier
        self._task: asyncio.Task[Doubt | None] | None = None

    async def stop(self) -> None:
        """End the remote tree and the carrier; idempotent, safe under repeated cancellation.

        Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` when the remote machine did not confirm it.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._end(), context=contextvars.Context())
        doubt = await asyncio.shield(self._task)
        if doubt is not None:
            raise ProcessCleanupUnconfirmed(*doubt)

    async def _end(self) -> Doubt | None:
        raise NotImplementedError

    async def _end_carrier(self) -> Doubt | None:
        try:
            await self._carrier.stop()
        except ProcessCleanupUnconfirmed as exc:
            return f"the SSH client could not be ended: {exc.reason}", exc.pids
        return None


# ------------------------------------------------------------------ framed


class RemoteProcess(_Ending):
    """A process under the supervisor on the remote machine; an :class:`pkg.process_api.AgentProcess`."""

    def __init__(
        self,
        carrier: AgentProcess,
        command: Command,
        *,
        machine: str,
        secrets: Iterable[str],
        alive_interval: float,
        alive_timeout: float,
    ) -> None:
        """``carrier`` is connected to the remote side's bootstrap; ``secrets`` are hidden in :meth:`stderr_tail`."""
        super().__init__(carrier)
        self._command = command
        self._machine = machine
        self._redact = Redactor(secrets)
        self._alive_interval = alive_interval
        self._alive_timeout = alive_timeout
        self._outgoing: deque[bytes] = deque()
        self._speak = asyncio.Event()
        self._writing = asyncio.Lock()
        self._unsent = b""
        self._stdin_closed = False
        self._credit = limits.SSH_WINDOW_BYTES
        self._changed = asyncio.Event()
        self._stdout: deque[bytes] = deque()
        self._stdout_ended = False
        self._readable = asyncio.Event()
        self._taken = 0
        self._held = 0
        self._tail = bytearray()
        self._tail_cut = False
        self._pid = 0
        self._order = b""
        self._may_run = False
        self._failure: LaunchError | None = None
        self._answered = asyncio.Event()
        self._exit: Exit | None = None
        self._lost = False
        self._exited = asyncio.Event()
        self._quiescent = False
        self._pids: tuple[int, ...] = ()
        self._settled = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()
        self.method = ""
        """How the remote supervisor proves the end: ``subreaper`` or ``sweep``."""
        self.directory = ""
        """The agent's working directory on the remote machine, absolute."""
        self._living = asyncio.create_task(self._live(), context=contextvars.Context())

    async def begin(self, programs: bytes, order: Mapping[str, Any]) -> None:
        """Send the remote programs and the start order, and return once the command runs.

        Raises :class:`pkg.errors.LaunchError`; by then nothing is left. Raises
        :class:`pkg.errors.ProcessCleanupUnconfirmed` where that is not known.
        """
        self._order = ssh_wrapper.message("start", **order)
        self._send(programs)
        self._send(self._order)
        try:
            async with traceless.within(limits.SSH_START_SECONDS):
                await self._answered.wait()
        except BaseException as exc:
            await stopped(self)
            if isinstance(exc, TimeoutError):
                raise failure("start_failed", self._command, self._machine) from None
            raise
        if self._pid == 0:
            await stopped(self)
            raise self._failure or LaunchError("coding.ssh_closed", retryable=True, machine=self._machine)

    # ---- streams

    @property
    def pid(self) -> int:
        """The agent's pid on the remote machine."""
        return self._pid

    async def write(self, data: bytes) -> None:
        """Send to the agent's stdin, at most ``limits.SSH_WINDOW_BYTES`` ahead of it; concurrent writes do not mix.

        After a cancellation in the middle the rest goes out before the next write. Raises :class:`pkg.errors.AgentDied`.
        """
        async with self._writing:
            queue = memoryview(self._unsent + data)
            ahead, sent = len(self._unsent), 0
            self._unsent = b""
            try:
                while sent < len(queue):
                    if self._stdin_closed or self._lost or self._exit is not None:
                        raise self._death()
                    size = min(len(queue) - sent, self._credit, limits.SSH_FRAME_BYTES)
                    if size <= 0 or len(self._outgoing) > limits.SSH_WINDOW_BYTES // limits.SSH_FRAME_BYTES:
                        self._changed.clear()
                        await self._changed.wait()
                        continue
                    self._credit -= size
                    self._send(ssh_wrapper.encode(STDIN, bytes(queue[sent : sent + size])))
                    sent += size
            except asyncio.CancelledError:
                self._unsent = bytes(queue[sent:] if sent > ahead else queue[sent:ahead])
                raise

    def close_stdin(self) -> None:
        """Close the agent's stdin without waiting; idempotent. A write that is under way fails."""
        if not self._stdin_closed:
            self._stdin_closed = True
            self._tell("close_stdin")
            self._changed.set()

    async def read(self, size: int = 65536) -> bytes:
        """Up to ``size`` bytes of the agent's stdout, ``b""`` at its end (also when the connection was lost)."""
        while not self._stdout and not self._stdout_ended:
            self._readable.clear()
            await self._readable.wait()
        if not self._stdout:
            return b""
        piece = self._stdout.popleft()
        if len(piece) > size:
            self._stdout.appendleft(piece[size:])
            piece = piece[:size]
        self._held -= len(piece)
        self._taken += len(piece)
        if self._taken >= limits.SSH_WINDOW_BYTES // 4:
            self._tell("took", bytes=self._taken)
            self._taken = 0
        return piece

    def stderr_tail(self) -> str:
        """The last lines of stderr: decoded, without terminal escapes, secrets replaced by ``***``."""
        return self._redact.tail(self._tail, cut=self._tail_cut)

    async def wait(self) -> Exit:
        """Wait until the agent's own process has ended. Raises :class:`pkg.errors.AgentDied` when the machine was lost."""
        await self._exited.wait()
        if self._exit is None:
            raise self._death()
        return self._exit

    def _death(self) -> AgentDied:
        if self._lost and self._exit is None:
            return AgentDied("coding.ssh_connection_lost", retryable=True, machine=self._machine)
        return agent_died(self, self._exit)

    # ---- the connection

    def _send(self, frame: bytes) -> None:
        if not self._lost:
            self._outgoing.append(frame)
            self._speak.set()

    def _tell(self, kind: str, **fields: Any) -> None:
        self._send(ssh_wrapper.message(kind, **fields))

    async def _live(self) -> None:
        """The connection's life: reads, writes and keeps alive until one of the two ends of it is gone."""
        loops = [asyncio.create_task(loop) for loop in (self._listen(), self._talk(), self._watch())]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            self._gone()

    async def _listen(self) -> None:
        decoder = ssh_wrapper.Decoder(limits.SSH_ORDER_BYTES)
        while data := await self._carrier.read():
            self._heard = asyncio.get_running_loop().time()
            try:
                for channel, payload in decoder.feed(data):
                    self._take(channel, payload)
            except (ssh_wrapper.BrokenFraming, KeyError, TypeError, ValueError, OverflowError):
                return

    async def _talk(self) -> None:
        try:
            while True:
                while self._outgoing:
                    frame = self._outgoing.popleft()
                    self._may_run = self._may_run or frame is self._order
                    await self._carrier.write(frame)
                    self._changed.set()
                self._speak.clear()
                await self._speak.wait()
        except AgentDied:
            # What the remote side said last may still be on its way; the other loop reads to its end.
            await asyncio.Event().wait()

    async def _watch(self) -> None:
        """A keepalive now and then; returns when nothing was heard for too long."""
        loop = asyncio.get_running_loop()
        silent = 0
        while silent < 2:
            # Twice: after a pause of this whole process what was said meanwhile has not been read yet.
            silent = silent + 1 if loop.time() - self._heard >= self._alive_timeout else 0
            await asyncio.sleep(min(self._alive_interval, self._alive_timeout / 2))
            if len(self._outgoing) < limits.SSH_WINDOW_BYTES // limits.SSH_FRAME_BYTES:
                self._tell("alive")

    def _gone(self) -> None:
        self._lost = True
        self._stdout_ended = True
        self._outgoing.clear()
        for event in (self._readable, self._changed, self._answered, self._exited, self._settled):
            event.set()

    def _take(self, channel: int, payload: bytes) -> None:
        if channel == STDOUT:
            self._held += len(payload)
            if self._held > limits.SSH_WINDOW_BYTES:
                raise ssh_wrapper.BrokenFraming("more output than was asked for")
            if payload:
                self._stdout.append(payload)
                self._readable.set()
        elif channel == STDERR:
            self._tail += payload
            surplus = len(self._tail) - limits.STDERR_TAIL_BYTES
            if surplus > 0:
                del self._tail[:surplus]
                self._tail_cut = True
        elif channel == CONTROL:
            self._obey(ssh_wrapper.parse(payload))
        else:
            raise ssh_wrapper.BrokenFraming(f"channel {channel}")

    def _obey(self, told: Mapping[str, Any]) -> None:
        kind = told["t"]
        if kind == "took":
            self._credit += int(told["bytes"])
            self._changed.set()
        elif kind == "started":
            self._pid, self.method, self.directory = int(told["pid"]), str(told["method"]), str(told["cwd"])
            self._answered.set()
        elif kind == "failed":
            searched = [str(place) for place in told.get("searched", ())]
            self._failure = failure(str(told["code"]), self._command, self._machine, searched)
            self._quiescent = True
            self._answered.set()
            self._settled.set()
        elif kind == "exited":
            self._exit = Exit(int(told["code"]))
            self._exited.set()
            self._changed.set()
        elif kind == "eof" and told["channel"] == STDOUT:
            self._stdout_ended = True
            self._readable.set()
        elif kind == "quiescent":
            self._quiescent = True
            self._settled.set()
        elif kind == "unconfirmed":
            self._pids = tuple(int(pid) for pid in told["pids"])

    # ---- ending

    async def _end(self) -> Doubt | None:
        graces = self._command.graces
        self._stdin_closed = True
        self._changed.set()
        if self._may_run and not self._quiescent and not self._lost:
            self._tell("stop", graces=graces_of(graces))
            try:
                async with traceless.within(graces.eof + graces.term + graces.kill + limits.SSH_CONFIRM_MARGIN):
                    await self._settled.wait()
            except TimeoutError:
                self._pids = self._pids or ((self._pid,) if self._pid else ())
        doubt = await self._end_carrier()
        await self._living
        if self._quiescent or not self._may_run:
            return doubt
        return "the remote machine did not confirm the end", self._pids or ((self._pid,) if self._pid else ())


# ------------------------------------------------------------------ without python3


def shell_script(command: Command, search: Iterable[str]) -> str:
    """The program for the remote ``/bin/sh``: environment and command inside it, nothing on a command line.

    It says ``started`` or ``failed`` in one line on stdout, then the streams are the command's own. The end of stdin is the
    beginning of the end: EOF grace, SIGTERM to the process group, SIGKILL. The command's code is the last line on stderr.
    """
    eof, term = (max(1, round(grace + 0.5)) for grace in (command.graces.eof, command.graces.term))
    home = '"$HOME"'
    cwd = shlex.quote(command.cwd or "~")
    if command.cwd in ("", "~") or command.cwd.startswith("~/"):
        cwd = home + (shlex.quote(command.cwd[1:]) if command.cwd[1:] else "")
    elif not command.cwd.startswith("/"):
        cwd = f"{home}/{cwd}"
    argv = [shlex.quote(word) for word in command.argv]
    if command.argv[0].startswith("~/"):
        argv[0] = home + shlex.quote(command.argv[0][1:])
    places = " ".join(home + _glob(place[1:]) if place.startswith("~") else _glob(place) for place in search)
    return "\n".join(
        [
            *(f"export {name}={shlex.quote(value)}" for name, value in command.env.items()),
            f'for d in {places}; do if [ -d "$d" ]; then PATH=$PATH:$d; fi; done; export PATH',
            "say() { printf '\\n%s%s %s\\n' coding- ssh-1 \"$1\"; }",
            f"if [ ! -e {cwd} ]; then say 'failed workspace_missing'; exit 0; fi",
            f"if [ ! -d {cwd} ]; then say 'failed workspace_not_a_directory'; exit 0; fi",
            f"cd -- {cwd} 2>/dev/null || {{ say 'failed workspace_closed'; exit 0; }}",
            "if [ \"$(pwd -P)\" = / ]; then say 'failed workspace_is_root'; exit 0; fi",
            "[ -w . ] || { say 'failed workspace_not_writable'; exit 0; }",
            f"command -v {argv[0]} >/dev/null 2>&1 || {{ say 'failed command_missing'; exit 0; }}",
            "trap : TERM HUP INT",
            'say "started $$ $(pwd)"',
            "exec 3<&0",
            "{ trap : TERM HUP INT; cat <&3; exec 1>&- 3<&-; "
            f'sleep {eof}; kill -s TERM -- "-$$"; sleep {term}; kill -s KILL -- "-$$"; }} |',
            f"{{ exec 3<&-; trap : TERM HUP INT; (trap - TERM HUP INT; exec {' '.join(argv)}); c=$?; "
            'printf \'\\n%s%s exited %s\\n\' coding- ssh-1 "$c" >&2; kill -s KILL -- "-$$"; }',
            "",
        ]
    )


def _glob(place: str) -> str:
    """A search pattern as a shell word whose only special character is ``*``."""
    return "*".join(shlex.quote(part) if part else "" for part in place.split("*"))


_SHELL_ANSWER: Final = re.compile(rb"\ncoding-ssh-1 (started|failed) ([0-9a-z_]+)(?: (.*))?\n")
_SHELL_EXIT: Final = re.compile(r"^coding-ssh-1 exited (\d+)$", re.MULTILINE)


class ShellProcess(_Ending):
    """A process under a POSIX shell on a machine without ``python3``; its end is never called proven."""

    def __init__(self, carrier: AgentProcess, command: Command, *, machine: str, secrets: Iterable[str]) -> None:
        """``carrier`` is connected to the remote shell, which waits for its program."""
        super().__init__(carrier)
        self._command = command
        self._machine = machine
        self._redact = Redactor(secrets)
        self._pid = 0
        self._rest = bytearray()
        self.directory = ""
        """The command's working directory on the remote machine, absolute."""

    async def begin(self, search: Iterable[str]) -> None:
        """Send the shell's program and return once the command runs. Raises :class:`pkg.errors.LaunchError`."""
        if not all(_NAME.fullmatch(name) for name in self._command.env):
            await self._carrier.stop()
            raise failure("start_failed", self._command, self._machine)
        script = shell_script(self._command, search).encode("utf-8", "surrogateescape")
        answer: tuple[str, str, str] | None = None
        try:
            async with traceless.within(limits.SSH_START_SECONDS):
                await self._carrier.write(f"{len(script)}\n".encode() + script)
                answer = await self._answer()
        except (TimeoutError, AgentDied):
            await stopped(self)
        except BaseException:
            await stopped(self)
            raise
        if answer is None:
            await stopped(self)
            raise failure("start_failed", self._command, self._machine)
        kind, word, directory = answer
        if kind == "failed":
            await self._carrier.stop()
            raise failure(word, self._command, self._machine, ("PATH",))
        self._pid, self.directory = int(word), directory

    async def _answer(self) -> tuple[str, str, str] | None:
        """``started``, pid and directory, or ``failed`` and the reason; nothing when the shell ended before."""
        while (match := _SHELL_ANSWER.search(bytes(self._rest))) is None:
            data = await self._carrier.read()
            if not data or len(self._rest) > limits.SSH_GREETING_BYTES:
                return None
            self._rest += data
        del self._rest[: match.end()]
        return match[1].decode(), match[2].decode(), (match[3] or b"").decode("utf-8", "surrogateescape")

    @property
    def pid(self) -> int:
        """The pid of the shell that leads the command's process group."""
        return self._pid

    async def write(self, data: bytes) -> None:
        """Write to the command's stdin. Raises :class:`pkg.errors.AgentDied`."""
        await self._carrier.write(data)

    def close_stdin(self) -> None:
        """Close the command's stdin, which here is the beginning of its end."""
        self._carrier.close_stdin()

    async def read(self, size: int = 65536) -> bytes:
        """Up to ``size`` bytes of the command's stdout, ``b""`` at its end."""
        if self._rest:
            piece = bytes(self._rest[:size])
            del self._rest[:size]
            return piece
        return await self._carrier.read(size)

    def stderr_tail(self) -> str:
        """The last lines of stderr, the SSH client's own included; secrets replaced by ``***``."""
        return self._redact(_SHELL_EXIT.sub("", self._carrier.stderr_tail()))

    async def wait(self) -> Exit:
        """Wait until the command has ended. Raises :class:`pkg.errors.AgentDied` when the machine was lost."""
        await self._carrier.wait()
        match = _SHELL_EXIT.search(self._carrier.stderr_tail())
        if match is None:
            raise AgentDied("coding.ssh_connection_lost", retryable=True, machine=self._machine)
        code = int(match[1])
        return Exit(128 - code if code > 128 else code)

    async def _end(self) -> Doubt | None:
        graces = self._command.graces
        self._carrier.close_stdin()
        try:
            async with traceless.within(graces.eof + graces.term + graces.kill + limits.SSH_CONFIRM_MARGIN):
                await self._carrier.wait()
        except TimeoutError:
            pass
        await self._end_carrier()
        return "the remote machine has no python3, so nothing there can confirm the end", (self._pid,) if self._pid else ()
