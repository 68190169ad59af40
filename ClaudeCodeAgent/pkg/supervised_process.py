"""A process under its supervisor, as the event loop sees it: two byte streams, a bounded tail of stderr, a proven end.

Guarantees:

- no thread, no task and no child watcher per process: everything is a callback on the loop that started it, and nothing
  of the caller's context is kept alive;
- nothing is read ahead from stdout, so not reading holds the agent back; stderr is always drained;
- :meth:`SupervisedProcess.stop` goes on however often its caller is cancelled, and a later call awaits the same ending;
- a supervisor that dies or hangs is noticed: what is left of its tree is swept by a second one, by the marker in the
  environment and by the agent's session; when that finds no end the cleanup counts as unconfirmed;
- no ``waitpid(-1)`` anywhere here: only pids we own are waited for, and :class:`OrphanReaper` takes what was re-parented to a
  worker that is PID 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import fcntl
import json
import os
import secrets as random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pkg import limits, process_supervisor
from pkg.errors import AgentDied, LaunchError, ProcessCleanupUnconfirmed
from pkg.process_api import AgentProcess, Exit, Graces
from pkg.redaction import Redactor

MARKER: Final = "CODING_AGENT_RUN"
"""Name of the environment variable that marks every process of one tree; its value is random and no secret."""

JOB_MARKER: Final = "CODING_RELAY_JOB"
"""Name of the variable that marks every process of one job of a daemon, its supervisors included; no secret either."""

_SCRIPT: Final = str(Path(process_supervisor.__file__).resolve())
_LIBRARY_PATHS: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")


# ------------------------------------------------------------------ descriptors on the loop


def _widen(fd: int) -> None:
    """Let a pipe hold ``limits.AGENT_PIPE_BYTES``, where the system can and this account may."""
    set_size = getattr(fcntl, "F_SETPIPE_SZ", None)
    if set_size is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, set_size, limits.AGENT_PIPE_BYTES)


class _End:
    """One end of a pipe, not blocking, with at most one waiter."""

    __slots__ = ("_loop", "_waiter", "_writing", "fd")

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, *, writing: bool) -> None:
        self._loop = loop
        self._writing = writing
        self._waiter: asyncio.Future[None] | None = None
        self.fd = fd
        os.set_blocking(fd, False)

    @property
    def closed(self) -> bool:
        return self.fd < 0

    async def ready(self) -> None:
        """Wait until the descriptor can be used, or was closed."""
        if self._waiter is not None:
            raise RuntimeError("another task already waits for this stream")
        self._waiter = self._loop.create_future()
        try:
            if self._writing:
                self._loop.add_writer(self.fd, self._wake)
            else:
                self._loop.add_reader(self.fd, self._wake)
            await self._waiter
        finally:
            self._forget()
            self._waiter = None

    def close(self) -> None:
        """Close the descriptor and wake its waiter."""
        if not self.closed:
            self._forget()
            os.close(self.fd)
            self.fd = -1
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _forget(self) -> None:
        if not self.closed:
            if self._writing:
                self._loop.remove_writer(self.fd)
            else:
                self._loop.remove_reader(self.fd)


class _Channel:
    """One supervisor process and its control channel. ``on_closed`` is called when it is gone and reaped."""

    def __init__(
        self,
        stdio: tuple[int, int, int],
        on_report: Callable[[Mapping[str, Any]], None],
        on_closed: Callable[[], None],
        job: str = "",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.Context()
        self._on_report = on_report
        self._on_closed = on_closed
        self._inbox = b""
        self._outbox = b""
        self._reap_until = 0.0
        env = {name: os.environ[name] for name in _LIBRARY_PATHS if name in os.environ}
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SCRIPT, str(theirs.fileno())],
                stdin=stdio[0],
                stdout=stdio[1],
                stderr=stdio[2],
                env=env | ({JOB_MARKER: job} if job else {}),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket: socket.socket | None = ours
        _OWNED.add(self.process.pid)
        self._context.run(self._loop.add_reader, ours.fileno(), self._readable)

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame without waiting; to a supervisor that is gone it is lost."""
        body = json.dumps(frame).encode("ascii")
        self._outbox += len(body).to_bytes(4, "big") + body
        self._flush()

    def later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """``call_later`` that keeps nothing of the caller's context alive."""
        return self._loop.call_later(delay, callback, context=self._context)

    def kill(self) -> None:
        """End the supervisor itself; the channel then closes."""
        self._signal(signal.SIGKILL)

    def wake(self) -> None:
        """Let a supervisor that was stopped go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    def _flush(self) -> None:
        if self._socket is None:
            self._outbox = b""
            return
        try:
            while self._outbox:
                self._outbox = self._outbox[self._socket.send(self._outbox) :]
        except BlockingIOError:
            self._context.run(self._loop.add_writer, self._socket.fileno(), self._flush)
            return
        except OSError:
            self._outbox = b""
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._inbox += data
        while len(self._inbox) >= 4:
            size = int.from_bytes(self._inbox[:4], "big")
            if len(self._inbox) < 4 + size:
                break
            body, self._inbox = self._inbox[4 : 4 + size], self._inbox[4 + size :]
            self._on_report(json.loads(body))
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._reap_until = self._loop.time() + limits.SUPERVISOR_EXIT
            self._reap(0.0)

    def _reap(self, delay: float) -> None:
        """The channel closes a moment before the process can be reaped."""
        if self.process.poll() is None:
            if self._loop.time() > self._reap_until:
                self.kill()
            delay = min(max(delay * 2, 0.001), 0.05)
            self.later(delay, lambda: self._reap(delay))
            return
        _OWNED.discard(self.process.pid)
        self._on_closed()


class _Sweep:
    """Ends what is left of a tree that has no supervisor any more. ``on_done`` gets ``None`` or the reason and the pids."""

    def __init__(
        self,
        roots: Sequence[tuple[int, str]],
        marker: str,
        graces: Graces,
        on_done: Callable[[_Doubt], None],
        name: str = MARKER,
    ) -> None:
        self._on_done = on_done
        self._doubt: _Doubt = ("the supervisor of the sweep was lost", tuple(pid for pid, _ in roots))
        self._done = False
        null = subprocess.DEVNULL
        self._channel = _Channel((null, null, null), self._report, self._closed)
        self._channel.send(
            {
                "sweep": {"roots": [[pid, start] for pid, start in roots]},
                "marker": [name if marker else "", marker],
                "graces": _graces(graces),
            }
        )
        self._watch = self._channel.later(graces.term + graces.kill + limits.STOP_MARGIN, self._channel.kill)

    def _report(self, report: Mapping[str, Any]) -> None:
        if report["event"] == "quiescent":
            self._doubt = None
        elif report["event"] == "unconfirmed":
            self._doubt = ("processes outlived SIGKILL or cannot be told apart", tuple(report["pids"]))
            self._channel.kill()

    def _closed(self) -> None:
        self._watch.cancel()
        self._on_done(self._doubt)


_Doubt = tuple[str, tuple[int, ...]] | None


def _graces(graces: Graces) -> dict[str, float]:
    return {"eof": graces.eof, "term": graces.term, "kill": graces.kill, "settle": limits.SETTLE_GRACE}


# ------------------------------------------------------------------ the process


class SupervisedProcess:
    """One agent under its supervisor on this machine; an :class:`pkg.process_api.AgentProcess`."""

    def __init__(
        self, env: Mapping[str, str], directory: str, secrets: Iterable[str], graces: Graces, pipes: Sequence[int]
    ) -> None:
        """Used by :meth:`start`. ``pipes`` are our ends of stdin, stdout and stderr."""
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._graces = graces
        self._redact = Redactor(secrets)
        self._marker = env[MARKER]
        self._stdin = _End(self._loop, pipes[0], writing=True)
        self._stdout = _End(self._loop, pipes[1], writing=False)
        self._stderr = _End(self._loop, pipes[2], writing=False)
        contextvars.Context().run(self._loop.add_reader, pipes[2], self._read_stderr)
        self._writing = asyncio.Lock()
        self._unsent = b""
        self._rest = bytearray()
        self._burst = 0
        self._tail = bytearray()
        self._tail_cut = False
        self._pid = 0
        self._start = ""
        self.method = ""
        """How the end is proven: ``subreaper`` or ``sweep``."""
        self.counts: dict[str, int] = {}
        """What the ending took: orphans adopted, processes terminated and killed."""
        self._started: asyncio.Future[Mapping[str, Any]] = self._loop.create_future()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._doubt: _Doubt = None
        self._quiet = False
        self._stopping = False
        self._watch: asyncio.TimerHandle | None = None
        self._channel: _Channel | None = None
        self._sweep: _Sweep | None = None

    @classmethod
    async def start(
        cls,
        executable: str,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        graces: Graces | None = None,
        secrets: Iterable[str] = (),
        method: str = "auto",
    ) -> SupervisedProcess:
        """Start ``executable`` with exactly ``env`` (and the marker) and return once it is running.

        ``secrets`` are the values :meth:`stderr_tail` hides. Raises :class:`pkg.errors.LaunchError`; by then, as after a
        cancellation, nothing is left. Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` where that cannot be proven.
        """
        graces = graces or Graces()
        marked = {**env, MARKER: random.token_hex(16)}
        REAPER.reap()
        ours: list[int] = []
        theirs: list[int] = []
        self: SupervisedProcess | None = None
        failure: Exception | None = None
        try:
            for index in range(3):
                reader, writer = os.pipe()
                ours.append(writer if index == 0 else reader)
                theirs.append(reader if index == 0 else writer)
            _widen(ours[1])
            self = cls(marked, str(Path(cwd).absolute()), secrets, graces, ours)
            ours = []
            job = marked.get(JOB_MARKER, "")
            self._channel = _Channel((theirs[0], theirs[1], theirs[2]), self._report, self._supervisor_gone, job)
        except (OSError, subprocess.SubprocessError) as exc:
            failure = exc
        finally:
            for fd in (*ours, *theirs):
                os.close(fd)
        if self is None or self._channel is None:
            if self is not None:
                self._release()
            if isinstance(failure, FileNotFoundError | PermissionError):
                raise LaunchError("coding.supervisor_failed") from None
            name = errno.errorcode.get(getattr(failure, "errno", None) or 0, type(failure).__name__)
            raise LaunchError("coding.agent_start_failed", retryable=True, name=Path(executable).name, reason=name) from None
        self._channel.send(
            {
                "executable": executable,
                "argv": list(argv),
                "cwd": cwd,
                "env": marked,
                "graces": _graces(graces),
                "marker": [MARKER, self._marker],
                "method": method,
            }
        )
        overdue = self._channel.later(limits.SUPERVISOR_START, self._overdue)
        try:
            report = await asyncio.shield(self._started)
        except BaseException:
            await self._abandon()
            raise
        finally:
            overdue.cancel()
        if report["event"] == "started":
            return self
        await self._abandon()
        raise _start_error(report, Path(executable).name, self.stderr_tail()[-500:])

    def _overdue(self) -> None:
        if not self._started.done():
            self._started.set_result({"event": "failed", "stage": "supervisor", "errno": errno.ETIMEDOUT})

    # ---- streams

    @property
    def pid(self) -> int:
        """The agent's pid."""
        return self._pid

    @property
    def directory(self) -> str:
        """The absolute directory it was started in."""
        return self._directory

    async def write(self, data: bytes) -> None:
        """Write to the agent's stdin and wait until the pipe took it; concurrent writes do not mix.

        After a cancellation in the middle the rest of ``data`` goes out before the next write, so messages stay whole.
        Raises :class:`pkg.errors.AgentDied`.
        """
        async with self._writing:
            queue = memoryview(self._unsent + data)
            ahead = len(self._unsent)
            self._unsent = b""
            sent = 0
            try:
                while sent < len(queue):
                    if self._stdin.closed:
                        raise BrokenPipeError
                    try:
                        sent += os.write(self._stdin.fd, queue[sent : sent + limits.PIPE_WRITE_BYTES])
                    except BlockingIOError:
                        await self._stdin.ready()
            except BrokenPipeError:
                await asyncio.wait({self._exit}, timeout=limits.SETTLE_GRACE)
                raise self._death() from None
            except asyncio.CancelledError:
                self._unsent = bytes(queue[sent:ahead] if sent <= ahead else queue[sent:])
                raise

    def close_stdin(self) -> None:
        """Close the agent's stdin without waiting; idempotent. A write that is under way fails."""
        self._stdin.close()

    async def read(self, size: int = 65536) -> bytes:
        """Up to ``size`` bytes of the agent's stdout, ``b""`` at its end; one reader at a time, nothing lost if cancelled."""
        self._burst += 1
        if self._burst >= limits.PIPE_BURST:
            self._burst = 0
            await asyncio.sleep(0)
        while not self._stdout.closed:
            try:
                data = os.read(self._stdout.fd, size)
            except BlockingIOError:
                self._burst = 0
                await self._stdout.ready()
                continue
            if not data:
                self._stdout.close()
            return data
        data = bytes(self._rest[:size])
        del self._rest[:size]
        return data

    def stderr_tail(self) -> str:
        """The last lines of stderr: decoded, without terminal escapes, the secrets given at the start hidden."""
        return self._redact.tail(self._tail, cut=self._tail_cut)

    def _read_stderr(self) -> None:
        try:
            data = os.read(self._stderr.fd, limits.STDERR_TAIL_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._stderr.close()
        self._tail += data
        surplus = len(self._tail) - limits.STDERR_TAIL_BYTES
        if surplus > 0:
            del self._tail[:surplus]
            self._tail_cut = True

    # ---- ending

    async def wait(self) -> Exit:
        """Wait until the agent's own process has ended; its children may live on until :meth:`stop`.

        The code is ``-9`` too when the supervisor was killed: the kernel then ends the agent.
        """
        return Exit(await asyncio.shield(self._exit))

    async def stop(self) -> None:
        """End the whole tree and return when it is proven that nothing is left; idempotent.

        An agent that has more to say than its pipe holds needs somebody to go on reading, else it is ended by a signal.
        Safe under repeated cancellation: the ending goes on and a later call awaits it. Raises
        :class:`pkg.errors.ProcessCleanupUnconfirmed`; a later call returns normally once the proof came after all.
        """
        self._begin_stop(self._graces)
        await asyncio.shield(self._ended)
        self._release()
        if self._doubt is not None:
            raise ProcessCleanupUnconfirmed(*self._doubt)

    def _begin_stop(self, graces: Graces) -> None:
        self._stopping = True
        self.close_stdin()
        if self._watch is None and self._channel is not None and not self._ended.done():
            self._channel.wake()
            self._channel.send({"verb": "stop", "graces": _graces(graces)})
            bound = graces.eof + graces.term + graces.kill + limits.STOP_MARGIN
            self._watch = self._channel.later(bound, self._channel.kill)

    async def _abandon(self) -> None:
        """After a failed or cancelled start: end it at once, and do not return before that is proven."""
        self._begin_stop(Graces(eof=0.0, term=0.0, kill=self._graces.kill))
        await stopped(self)

    def _report(self, report: Mapping[str, Any]) -> None:
        event = report["event"]
        if event == "started":
            self._pid, self._start, self.method = report["pid"], report["start"], report["method"]
        if event in ("started", "failed"):
            self._quiet = event == "failed"
            if not self._started.done():
                self._started.set_result(report)
        elif event == "exited" and not self._exit.done():
            self._exit.set_result(report["code"])
        elif event == "quiescent":
            self._quiet = True
            self.counts = dict(report["counts"])
        elif event == "unconfirmed":
            self._finish(("processes outlived SIGKILL", tuple(report["pids"])))

    def _supervisor_gone(self) -> None:
        if self._quiet:
            self._finish(None)
            return
        roots = [(self._pid, self._start)] if self._pid else []
        graces = Graces(eof=0.0, term=limits.SWEEP_TERM_GRACE, kill=limits.SWEEP_KILL_GRACE)
        try:
            self._sweep = _Sweep(roots, self._marker, graces, self._swept)
        except (OSError, subprocess.SubprocessError):
            self._finish(("the supervisor was lost and no sweep could be started", tuple(pid for pid, _ in roots)))

    def _swept(self, doubt: _Doubt) -> None:
        REAPER.reap()
        if self._channel is not None:
            self._channel.later(limits.ORPHAN_AGE * 1.1, REAPER.look_again)
        self._sweep = None
        self._finish(doubt)

    def _finish(self, doubt: _Doubt) -> None:
        self._doubt = doubt
        if self._watch is not None:
            self._watch.cancel()
        if not self._started.done():
            self._started.set_result({"event": "failed", "stage": "supervisor", "errno": 0})
        if not self._exit.done():
            self._exit.set_result(-signal.SIGKILL)
        if not self._ended.done():
            self._ended.set_result(None)
        if self._stopping:
            self._release()

    def _release(self) -> None:
        """Close our descriptors; what the agent still said is kept for a reader (at most a pipe's content)."""
        self._stdin.close()
        while not self._stdout.closed:
            try:
                data = os.read(self._stdout.fd, limits.PIPE_WRITE_BYTES)
            except BlockingIOError:
                data = b""
            self._rest += data
            if not data or len(self._rest) > limits.PIPE_REST_BYTES:
                self._stdout.close()
        for _ in range(limits.PIPE_BURST):
            if self._stderr.closed:
                break
            self._read_stderr()
        self._stderr.close()

    def _death(self) -> AgentDied:
        return agent_died(self, Exit(self._exit.result()) if self._exit.done() else None)


async def stopped(process: AgentProcess) -> None:
    """Stop a process and do not return before its end, however often the caller is cancelled; only then that is raised.

    Raises :class:`pkg.errors.ProcessCleanupUnconfirmed`.
    """
    cancelled = False
    while True:
        try:
            await process.stop()
        except asyncio.CancelledError:
            cancelled = True
            continue
        break
    if cancelled:
        raise asyncio.CancelledError


def agent_died(process: AgentProcess, end: Exit | None) -> AgentDied:
    """The error for an agent that ended while it was needed: exit code (``None`` = still there) and its last words."""
    words = "\n".join(process.stderr_tail().strip().splitlines()[-limits.LAST_WORDS_LINES :])[-limits.LAST_WORDS_CHARS :]
    if end is None:
        return AgentDied("coding.agent_closed_input", detail=words, retryable=True)
    if end.code < 0:
        try:
            name = signal.Signals(-end.code).name
        except ValueError:
            name = str(-end.code)
        return AgentDied("coding.agent_killed", detail=words, retryable=True, signal=name)
    return AgentDied("coding.agent_exited", detail=words, retryable=True, params={"code": end.code})


def _start_error(report: Mapping[str, Any], name: str, words: str) -> LaunchError:
    stage, number = report["stage"], report["errno"]
    if stage == "supervisor":
        return LaunchError("coding.supervisor_failed", detail=words, retryable=True)
    if stage == "chdir":
        code = {errno.ENOENT: "coding.workspace_missing", errno.ENOTDIR: "coding.workspace_not_directory"}
        return LaunchError(code.get(number, "coding.workspace_not_readable"))
    if stage == "exec" and number in (errno.EACCES, errno.ENOEXEC, errno.ENOENT, errno.EPERM):
        return LaunchError("coding.agent_not_executable", name=name)
    return LaunchError("coding.agent_start_failed", retryable=True, name=name, reason=errno.errorcode.get(number, str(number)))


# ------------------------------------------------------------------ other processes


async def terminate_process_group(pid: int, graces: Graces | None = None) -> None:
    """End ``pid``, its process group (if it leads one) and all their descendants, and return when none is left.

    For a process that is not under a supervisor of ours; a pid that is gone is a success. SIGTERM, then SIGKILL after
    ``graces.term``. A child of the caller's stays to be reaped by the caller. Safe under cancellation: the ending goes on.
    Raises :class:`pkg.errors.ProcessCleanupUnconfirmed`.
    """
    process = process_supervisor.read_process(pid) if process_supervisor.LINUX else process_supervisor.proc_or_ps(pid)
    if process is None:
        return
    done: asyncio.Future[_Doubt] = asyncio.get_running_loop().create_future()
    try:
        sweep = _Sweep([(pid, process.start)], "", graces or Graces(), done.set_result)
    except (OSError, subprocess.SubprocessError):
        raise ProcessCleanupUnconfirmed("no sweep could be started", (pid,)) from None
    doubt = await asyncio.shield(done)
    del sweep
    if doubt is not None:
        raise ProcessCleanupUnconfirmed(*doubt)


async def end_job(marker: str, roots: Sequence[tuple[int, str]] = (), *, since: str = "") -> None:
    """End every process that carries the job marker ``marker`` and all that it leads to, and return when none is left.

    ``roots`` are pids with start times known to belong to it; a process older than ``since`` (a start time, too) does not.
    Safe under cancellation: the ending goes on. Raises :class:`pkg.errors.ProcessCleanupUnconfirmed`.
    """
    known = [*roots, (_NO_PID, since)] if since else list(roots)
    graces = Graces(eof=0.0, term=limits.SWEEP_TERM_GRACE, kill=limits.SWEEP_KILL_GRACE)
    done: asyncio.Future[_Doubt] = asyncio.get_running_loop().create_future()
    try:
        sweep = _Sweep(known, marker, graces, done.set_result, JOB_MARKER)
    except (OSError, subprocess.SubprocessError):
        raise ProcessCleanupUnconfirmed("no sweep could be started", tuple(pid for pid, _ in roots)) from None
    doubt = await asyncio.shield(done)
    del sweep
    if doubt is not None:
        raise ProcessCleanupUnconfirmed(*doubt)


_NO_PID: Final = 2**22 + 1
"""A pid that no process can have (``PID_MAX_LIMIT`` of Linux is 2**22)."""

_OWNED: Final[set[int]] = set()
"""Pids of our supervisors, this process's own children."""


class OrphanReaper:
    """Reaps what was re-parented to this process when it is PID 1 (a jail) or a subreaper; elsewhere it does nothing.

    A zombie is taken only by its pid, only when it is not ours, only from another session than our own (every agent has its
    own; a child of the worker's other parts usually has not), and only after it stayed unreaped for ``limits.ORPHAN_AGE``,
    since whoever started a process reaps it at once.
    """

    def __init__(self, owned: Callable[[], Iterable[int]], *, adopts: bool | None = None) -> None:
        """``owned`` names the children somebody here waits for; ``adopts`` overrides the look at our own pid."""
        self._owned = owned
        self._adopts = os.getpid() == 1 if adopts is None else adopts
        self._seen: dict[tuple[int, str], float] = {}

    def reap(self) -> tuple[int, ...]:
        """Look once and reap what was seen long enough ago; returns the reaped pids. Call it now and then."""
        if not self._adopts:
            return ()
        me, session, owned, now = os.getpid(), os.getsid(0), set(self._owned()), time.monotonic()
        zombies = {
            (process.pid, process.start)
            for process in process_supervisor.proc_table().values()
            if process.parent == me and not process.alive and process.session != session and process.pid not in owned
        }
        self._seen = {key: self._seen.get(key, now) for key in zombies}
        reaped = []
        for key, since in list(self._seen.items()):
            if now - since >= limits.ORPHAN_AGE:
                del self._seen[key]
                try:
                    if os.waitpid(key[0], os.WNOHANG)[0]:
                        reaped.append(key[0])
                except ChildProcessError:
                    continue
        return tuple(reaped)

    def look_again(self) -> None:
        """:meth:`reap` as a callback."""
        self.reap()


REAPER: Final = OrphanReaper(lambda: _OWNED)
"""This process's reaper; it looks at every start and at every abnormal end."""
