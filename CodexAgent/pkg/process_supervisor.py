"""The parent of one agent process: starts it, adopts what it leaves behind, ends the whole tree and proves it.

A script of its own, run as ``python -I -S process_supervisor.py FD``; it needs only the small parts of the standard library,
so it starts in milliseconds, stays small, and runs on a remote machine from Python 3.7 on. ``FD`` is the *control channel*,
a stream socket inherited from the parent. Its descriptors 0, 1 and 2 are the agent's: they are handed on and then let go,
so no byte of the agent passes through here and an end of file means what it says.

Frames on the control channel, both ways: four bytes of length (big endian), then a JSON object.

The parent sends one *spec* first. ``{"argv", "executable", "cwd", "env", "graces": {"eof", "term", "kill", "settle"},
"marker": [name, value], "method": "auto" | "sweep"}`` starts an agent; ``{"sweep": {"roots": [[pid, start], …]}, "marker",
"graces"}`` starts nothing and only ends what is left of a tree whose supervisor is gone. Afterwards the parent may send
``{"verb": "stop", "graces": {…}}``; a later one can only shorten what is granted. Graces are seconds.

Reports: ``started(pid, start, method)`` or ``failed(errno, stage)``; ``exited(code)`` when the agent itself has ended;
then one of ``quiescent(method, counts)``, after which this process ends, and ``unconfirmed(pids, method)``, after which it
goes on trying and may still report ``quiescent``; a sweep without a child of its own gives up after two minutes.

Guarantees:

- The tree is ended when the parent says so, when the control channel closes (the parent died), or on SIGTERM, SIGINT or
  SIGHUP. The parent-death signal is a second line only: it also fires when the forking *thread* ends, so it counts only if
  the parent has really changed.
- Order: end of file on stdin (the parent's pipe closes) → SIGTERM to every descendant → SIGKILL, repeated until none is left.
- ``quiescent`` by the method ``subreaper`` (Linux) is the kernel's own word: every orphan of the tree becomes a child of this
  process whatever session it made for itself, so "no child left" is "nothing left". Where that is not available the method is
  ``sweep``: parent links, sessions and groups of known members, and a marker in the environment; it says so because a
  process can shed all of these.
- A process is signalled only while its pid and start time belong together.
- Ended children are reaped all the time, the agent's own orphans included.
"""

# The convenient modules (json, signal, pathlib, contextlib) pull in re and enum: half of the memory and time this may cost.
# ruff: noqa: PTH115, PTH123, PTH208, SIM105

from __future__ import annotations

import errno
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    ctypes: Any
    json: Any
else:
    try:
        import _json as json
        import _signal as signal

        if not hasattr(json, "make_scanner"):
            import json
    except ImportError:
        import json
        import signal
    try:
        import _ctypes as ctypes

        if not hasattr(ctypes, "call_function"):
            import ctypes
    except ImportError:  # a Python built without libffi
        ctypes = None

LINUX = sys.platform.startswith("linux")
WAIT_ALL = os.WNOHANG | (0x40000000 if LINUX else 0)  # __WALL: children that signal something else than SIGCHLD, too
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DEATH = signal.SIGUSR1
MARKED_ENV_BYTES = 4 * 1024 * 1024
LOOKS = 32
GIVE_UP = 120.0
KILLS_PER_ROUND = 4096  # then the ended ones are reaped, so that a fork storm does not fill the process table


class Process:
    """One row of the process table. ``start`` is any value that differs between two users of one pid."""

    __slots__ = ("group", "marked", "parent", "pid", "session", "start", "state", "threads", "unreadable")

    def __init__(self, pid: int, parent: int, group: int, session: int, state: str, threads: int, start: str) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.session = session
        self.state = state
        self.threads = threads
        self.start = start
        self.marked = False
        self.unreadable = False

    @property
    def alive(self) -> bool:
        """False for a zombie; a zombie leader whose threads go on is alive."""
        return self.state not in "ZX" or self.threads > 1


# ------------------------------------------------------------------ the process table


def read_process(pid: int) -> Process | None:
    """The process ``pid`` as Linux's ``/proc`` shows it, or ``None``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    numbers = [int(fields[index]) for index in (1, 2, 3)]
    return Process(pid, numbers[0], numbers[1], numbers[2], fields[0].decode(), int(fields[17]), fields[19].decode())


def proc_table() -> dict[int, Process]:
    """Every process ``/proc`` shows; empty where it shows another pid namespace than ours, or nothing."""
    return look_at_proc()[0]


def look_at_proc(visit: Callable[[Process], None] | None = None) -> tuple[dict[int, Process], bool]:
    """The process table, and whether it is complete: another listing named no process that was not looked at.

    Who is gone before it can be read may have left a child, but that is younger than the listing and so in the next one. The
    newest are read first, before they can be gone; ``visit`` is called at once for each.
    """
    table: dict[int, Process] = {}
    seen: set[int] = set()
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return {}, False
        for _ in range(LOOKS):
            new = {int(name) for name in os.listdir("/proc") if name.isdigit()} - seen
            if not new:
                return table, True
            for pid in sorted(new, reverse=True):
                process = read_process(pid)
                if process is not None:
                    table[pid] = process
                    if visit is not None:
                        visit(process)
            seen |= new
    except OSError:
        return {}, False
    return table, False


def parse_ps(text: str, marker: str) -> dict[int, Process]:
    """The table in ``ps -o pid=,ppid=,pgid=,stat=,lstart=,command=`` with the environment after each command."""
    table = {}
    for line in text.splitlines():
        fields = line.split(None, 9)
        if len(fields) < 9 or not (fields[0].isdigit() and fields[1].isdigit() and fields[2].isdigit()):
            continue
        pid, parent, group = (int(field) for field in fields[:3])
        process = Process(pid, parent, group, 0, fields[3][0], 1, " ".join(fields[4:9]))
        process.marked = bool(marker) and len(fields) > 9 and marker in fields[9].split(" ")
        table[pid] = process
    return table


def ps_table(marker: str) -> dict[int, Process]:
    """Every process as ``ps`` shows it (macOS and other systems without ``/proc``)."""
    flags = "-axEww" if sys.platform == "darwin" else "axeww"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writer, 1)
            argv = ["ps", flags, "-o", "pid=,ppid=,pgid=,stat=,lstart=,command="]
            os.execve("/bin/ps", argv, {"LC_ALL": "C", "PATH": "/bin:/usr/bin"})
        finally:
            os._exit(127)
    os.close(writer)
    chunks = []
    while True:
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
    os.close(reader)
    os.waitpid(pid, 0)
    table = parse_ps(b"".join(chunks).decode("utf-8", "replace"), marker)
    table.pop(pid, None)
    return table


def send_signal(process: Process, number: int) -> bool:
    """Signal ``process`` unless its pid belongs to another one by now; false when it is gone or not ours to signal."""
    handle = -1
    try:
        if LINUX:
            if hasattr(os, "pidfd_open"):
                try:
                    handle = os.pidfd_open(process.pid)
                except OSError as exc:
                    if exc.errno == errno.ESRCH:
                        return False
            now = read_process(process.pid)
            if now is None or now.start != process.start:
                return False
        if handle >= 0 and hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(process.pid, number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


# ------------------------------------------------------------------ the two methods


class AdoptedTree:
    """The tree of a subreaper: whatever happens in it ends up as a child of this process."""

    method = "subreaper"

    def __init__(self) -> None:
        self._rounds = 0
        self._killed: set[int] = set()

    def members(self) -> list[Process]:
        """Every living descendant, parents before their children."""
        return _descendants(proc_table(), [os.getpid()])

    def gone(self, childless: bool) -> bool:
        """The kernel's word: no child is left."""
        return childless

    def kill(self) -> int:
        """One round of SIGKILL, repeated by the caller until nothing is left; returns how many it hit so far.

        Children first: only we can reap them, so their pids cannot be reused and no look at the table is needed. That is fast
        enough to catch a process that keeps handing itself over to the next one. Then the whole tree, parents first.
        """
        killed: set[int] = set()
        while True:
            fresh = [pid for pid in self._children() if pid not in killed]
            if not fresh or len(killed) > KILLS_PER_ROUND:
                break
            for pid in fresh:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
                killed.add(pid)
        self._rounds += 1
        if self._rounds % 4 == 1:
            groups = set()
            own = os.getsid(0)
            for process in self.members():
                if send_signal(process, signal.SIGKILL):
                    killed.add(process.pid)
                if process.session != own:
                    groups.add(process.group)
            for group in groups:
                # All at once, so that no member can fork away between two kills; every group of a session made
                # inside the tree belongs to the tree.
                _kill_group(group, signal.SIGKILL)
        self._killed |= killed
        return len(self._killed)

    def _children(self) -> list[int]:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:
            me = os.getpid()
            return [process.pid for process in proc_table().values() if process.parent == me and process.alive]
        living = []
        for pid in pids:
            process = read_process(pid)
            if process is not None and process.alive:
                living.append(pid)
        return living


class SweptTree:
    """The tree as far as links, sessions, groups and a marker in the environment tell; remembers whom it has seen."""

    method = "sweep"

    def __init__(self, roots: Iterable[tuple[int, str]], marker: tuple[str, str]) -> None:
        self.known = dict(roots)
        self.marker = marker
        self.doubtful: list[int] = []
        self._unmarked: dict[int, str] = {}
        self._killed: set[int] = set()
        self._complete = True
        self._at_once = 0
        self._since = min((_number(start) for start in self.known.values()), default=0.0)

    def add(self, pid: int, start: str) -> None:
        """Make ``pid`` a known member."""
        if not self.known:
            self._since = _number(start)
        self.known[pid] = start

    def members(self) -> list[Process]:
        """Every living member, known ones and whoever they lead to."""
        table = self._table()
        me = os.getpid()
        found: dict[int, Process] = {}
        grown = True
        while grown:
            grown = False
            leaders = {pid for pid, start in self.known.items() if pid not in table or table[pid].start == start}
            for process in table.values():
                if process.pid in found or process.pid == me:
                    continue
                if (
                    self.known.get(process.pid) == process.start
                    or process.marked
                    or process.parent in found
                    or process.parent == me
                    or ((process.group in leaders or process.session in leaders) and self._recent(process))
                ):
                    found[process.pid] = process
                    self.known[process.pid] = process.start
                    grown = True
        self.doubtful = [p.pid for p in table.values() if p.unreadable and p.alive and p.pid not in found and self._recent(p)]
        return [process for process in found.values() if process.alive]

    def gone(self, childless: bool) -> bool:
        """Two looks at the complete table found no member."""
        return all(not self.members() and self._complete for _ in range(2))

    def kill(self) -> int:
        """Stop every member so that none can fork or be replaced, until a look finds no new one; then SIGKILL them all.

        Returns how many were hit so far.
        """
        stopped: dict[int, str] = {}
        self._at_once = signal.SIGKILL
        for _ in range(LOOKS):
            fresh = [process for process in self.members() if stopped.get(process.pid) != process.start]
            if not fresh:
                break
            for process in fresh:
                send_signal(process, signal.SIGSTOP)
                stopped[process.pid] = process.start
        for process in self.members():
            if send_signal(process, signal.SIGKILL):
                self._killed.add(process.pid)
        return len(self._killed)

    def _recent(self, process: Process) -> bool:
        """Not older than the tree's root: an older one cannot belong to it."""
        return not LINUX or _number(process.start) >= self._since

    def _table(self) -> dict[int, Process]:
        if not LINUX:
            return ps_table("=".join(self.marker) if self.marker[0] else "")
        table, self._complete = look_at_proc(self._visit)
        return table

    def _visit(self, process: Process) -> None:
        """Look for the marker; in the end phase a process that has it is killed before it can be another one."""
        if self.marker[0] and process.pid not in self.known and self._unmarked.get(process.pid) != process.start:
            try:
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    environ = file.read(MARKED_ENV_BYTES)
            except PermissionError:
                # An orphan of our own user that hides its environment may be anything: it is never killed, only named.
                process.unreadable = process.parent == 1 and _real_uid(process.pid) == os.getuid()
                return
            except OSError:  # a kernel thread, a zombie, or gone
                return
            process.marked = "=".join(self.marker).encode("utf-8", "surrogateescape") in environ.split(b"\0")
            if environ and not process.marked:
                self._unmarked[process.pid] = process.start
        if process.marked and self._at_once and send_signal(process, self._at_once):
            self._killed.add(process.pid)


def _number(start: str) -> float:
    return float(start) if start.isdigit() else 0.0


def _real_uid(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1


def _kill_group(group: int, number: int) -> None:
    if group > 1 and group != os.getpgrp():
        try:
            os.killpg(group, number)
        except OSError:
            return


def _descendants(table: dict[int, Process], roots: list[int]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found = []
    level = list(roots)
    while level:
        below = [process for pid in level for process in children.get(pid, ())]
        found += [process for process in below if process.alive]
        level = [process.pid for process in below]
    return found


# ------------------------------------------------------------------ the control channel


class _Scanning:
    """What the interpreter's own JSON scanner wants to know; it is all of ``json`` that is needed here."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo = None


def decode(text: str) -> dict[str, Any]:
    """The JSON object ``text``."""
    if hasattr(json, "make_scanner"):
        value, _ = json.make_scanner(_Scanning)(text, 0)
    else:
        value = json.loads(text)
    return value  # type: ignore[no-any-return]


def encode(value: Any) -> str:
    """The JSON form of numbers, ASCII names, lists and dicts of such: all a report consists of."""
    if isinstance(value, dict):
        return "{" + ", ".join(encode(key) + ": " + encode(item) for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(encode(item) for item in value) + "]"
    return '"' + value + '"' if isinstance(value, str) else repr(value)


class Control:
    """The control channel: frames in, frames out; a parent that is gone is no error."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.open = True
        self._buffer = b""
        os.set_inheritable(fd, False)
        os.set_blocking(fd, True)

    def report(self, event: str, **fields: Any) -> None:
        """Send one report."""
        fields["event"] = event
        body = encode(fields).encode("ascii")
        data = len(body).to_bytes(4, "big") + body
        while self.open and data:
            try:
                data = data[os.write(self.fd, data) :]
            except OSError:
                return

    def receive(self) -> list[dict[str, Any]]:
        """Read once and return the frames that are complete; clears ``open`` at the end of the channel."""
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self.open = False
        self._buffer += data
        frames = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                break
            try:
                frames.append(decode(self._buffer[4 : 4 + size].decode("utf-8")))
            except (ValueError, StopIteration):  # a parent that speaks something else is as good as gone
                self.open = False
            self._buffer = self._buffer[4 + size :]
        return frames


# ------------------------------------------------------------------ the supervisor


def _load_prctl() -> Callable[[int, int], bool] | None:
    """Linux's ``prctl`` for options with one argument; ``None`` where it cannot be called."""
    if not LINUX or ctypes is None:
        return None
    try:
        if hasattr(ctypes, "CDLL"):
            function = ctypes.CDLL(None).prctl
            return lambda option, value: bool(function(option, value, 0, 0, 0) == 0)
        address = ctypes.dlsym(ctypes.dlopen(None, 0), "prctl")
    except (OSError, AttributeError):
        return None
    return lambda option, value: bool(ctypes.call_function(address, (option, value, 0, 0, 0)) == 0)


class Supervisor:
    """One agent, from its start to the proof that nothing of it is left."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.prctl = _load_prctl()
        self.parent = os.getppid()
        self.agent = 0
        self.agent_ended = 0.0
        self.phase = "run"
        self.deadline = 0.0
        self.graces: dict[str, float] = {}
        self.counts = {"adopted": 0, "terminated": 0, "killed": 0}
        self.tree: AdoptedTree | SweptTree = AdoptedTree()
        self._told: set[tuple[int, str]] = set()
        self._sent: set[int] = set()
        self._end_asked = False
        self._wake, self._wake_writer = os.pipe()
        for fd in (self._wake, self._wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(PARENT_DEATH, self._on_parent_death)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if self.prctl is not None:
            self.prctl(PR_SET_PDEATHSIG, PARENT_DEATH)

    def _on_parent_death(self, *_: object) -> None:
        if os.getppid() != self.parent:
            self._end_asked = True

    def _on_end(self, *_: object) -> None:
        self._end_asked = True

    # ---- starting

    def run(self) -> None:
        """Take the spec, start what it names, and stay until the tree is proven gone."""
        frames: list[dict[str, Any]] = []
        while not frames:
            frames = self.control.receive()
            if not frames and not self.control.open:
                return
        spec = frames.pop(0)
        self.graces = dict(spec["graces"])
        marker = spec.get("marker") or ["", ""]
        if "sweep" in spec:
            roots = [(int(pid), str(start)) for pid, start in spec["sweep"]["roots"]]
            self.tree = SweptTree(roots, (marker[0], marker[1]))
            _let_go_of_stdio()
            self.agent_ended = time.monotonic()
            self._enter("term")
        else:
            adopts = self.prctl is not None and self.prctl(PR_SET_CHILD_SUBREAPER, 1)
            if spec.get("method") == "sweep" or not adopts:
                if self.prctl is not None:
                    self.prctl(PR_SET_CHILD_SUBREAPER, 0)
                self.tree = SweptTree([], (marker[0], marker[1]))
            if not self._start(spec):
                return
        for frame in frames:
            self._obey(frame)
        self._loop()

    def _start(self, spec: dict[str, Any]) -> bool:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as exc:
            self.control.report("failed", errno=exc.errno or 0, stage="fork")
            return False
        if pid == 0:
            _become_agent(spec, writer, self.prctl)
        os.close(writer)
        _let_go_of_stdio()
        failure = b""
        while True:
            chunk = os.read(reader, 256)
            if not chunk:
                break
            failure += chunk
        os.close(reader)
        if failure:
            os.waitpid(pid, 0)
            number, _, stage = failure.decode("ascii", "replace").partition(" ")
            self.control.report("failed", errno=int(number), stage=stage)
            return False
        self.agent = pid
        process = read_process(pid) if LINUX else proc_or_ps(pid)
        start = process.start if process is not None else ""
        if isinstance(self.tree, SweptTree):
            self.tree.add(pid, start)
        self.control.report("started", pid=pid, start=start, method=self.tree.method)
        return True

    # ---- living

    def _loop(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self.control.fd, select.POLLIN)
        listening = True
        pause = 0.0
        while True:
            if self._end_asked and self.phase == "run":
                self._enter("eof")
            childless = self._reap()
            if self._proven(childless):
                self.control.report("quiescent", method=self.tree.method, counts=self.counts)
                return
            if self.phase == "unconfirmed" and self.agent_ended and childless and time.monotonic() > self.deadline + GIVE_UP:
                return  # a sweep that finds no proof in this time will not find it later
            timeout, pause = self._advance(pause)
            for fd, _ in poller.poll(None if timeout is None else int(min(max(timeout, 0.0), 60.0) * 1000 + 0.999)):
                if fd == self._wake:
                    _drain(self._wake)
                elif listening:
                    for frame in self.control.receive():
                        self._obey(frame)
                    if not self.control.open:
                        listening = False
                        poller.unregister(fd)
                        self._end_asked = True

    def _proven(self, childless: bool) -> bool:
        """Whether nothing is left; an orphan of which nothing is known but that it exists spoils the proof of a sweep."""
        if self.phase == "run" and not (childless and self.agent_ended):
            return False
        if isinstance(self.tree, SweptTree) and (self.agent and not self.agent_ended):
            return False
        return self.tree.gone(childless) and not (isinstance(self.tree, SweptTree) and self.tree.doubtful)

    def _reap(self) -> bool:
        """Reap every ended child; true when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, WAIT_ALL)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.agent:
                self.agent_ended = time.monotonic()
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.control.report("exited", code=code)
            else:
                self.counts["adopted"] += 1

    def _obey(self, frame: Mapping[str, Any]) -> None:
        if frame.get("verb") != "stop":
            return
        self.graces.update(frame.get("graces") or {})
        self._end_asked = True
        if self.phase in ("eof", "term"):
            self.deadline = min(self.deadline, time.monotonic() + self.graces[self.phase])

    # ---- ending

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.deadline = time.monotonic() + self.graces.get(phase, 0.0)
        self.entered = time.monotonic()

    def _advance(self, pause: float) -> tuple[float | None, float]:
        """Do what the phase asks for now; returns how long to wait for news, and the next pause between two kills."""
        now = time.monotonic()
        if self.phase == "run":
            return None, 0.0
        if self.phase == "eof":
            until = self.deadline
            if self.agent_ended:
                until = min(until, max(self.agent_ended, self.entered) + self.graces["settle"])
            if now < until:
                return until - now, 0.0
            self._enter("term")
        if self.phase == "term":
            self._terminate()
            if now < self.deadline:
                return min(self.deadline - now, self.graces["settle"]), 0.0
            self._enter("kill")
        self.counts["killed"] = self.tree.kill()
        if not self.counts["killed"]:
            self._signal_agent_group(signal.SIGKILL)
        if self.phase == "kill" and time.monotonic() >= self.deadline:
            self.phase = "unconfirmed"
            pids = [process.pid for process in self.tree.members()]
            if isinstance(self.tree, SweptTree):
                pids += self.tree.doubtful
            self.control.report("unconfirmed", pids=pids, method=self.tree.method)
        pause = min(max(pause * 2, 0.001), 0.05 if self.phase == "kill" else 10.0)
        return pause, pause

    def _terminate(self) -> None:
        """SIGTERM once to every member, and SIGCONT so that a stopped one can follow it."""
        members = self.tree.members()
        if not members:
            self._signal_agent_group(signal.SIGTERM)
        for process in members:
            if (process.pid, process.start) not in self._told:
                self._told.add((process.pid, process.start))
                self.counts["terminated"] += send_signal(process, signal.SIGTERM)
                send_signal(process, signal.SIGCONT)

    def _signal_agent_group(self, number: int) -> None:
        """Where no process table can be read: the agent is our child and not reaped, so its group is still its own."""
        if self.agent and not self.agent_ended and number not in self._sent:
            self._sent.add(number)
            _kill_group(self.agent, number)
            _kill_group(self.agent, signal.SIGCONT)


def proc_or_ps(pid: int) -> Process | None:
    """The process ``pid`` on a system without ``/proc``."""
    return ps_table("").get(pid)


def _become_agent(spec: Mapping[str, Any], failures: int, prctl: Callable[[int, int], bool] | None) -> None:
    """In the forked child: turn into the agent, or say on ``failures`` which stage did not work. Never returns."""
    stage = "prepare"
    try:
        supervisor = os.getppid()
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(127)
        argv = [_bytes(word) for word in spec["argv"]]
        env = {_bytes(name): _bytes(value) for name, value in spec["env"].items()}
        stage = "chdir"
        os.chdir(_bytes(spec["cwd"]))
        stage = "exec"
        os.execve(_bytes(spec["executable"]), argv, env)
    except OSError as exc:
        os.write(failures, f"{exc.errno or 0} {stage}".encode())
    except (ValueError, TypeError, KeyError, AttributeError):  # a spec no process can be made of
        os.write(failures, f"{errno.EINVAL} {stage}".encode())
    finally:
        os._exit(127)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _let_go_of_stdio() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    os.chdir("/")


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def main(argv: list[str]) -> None:
    """Run one supervisor on the control channel whose descriptor is ``argv[1]``."""
    Supervisor(Control(int(argv[1]))).run()


if __name__ == "__main__":
    main(sys.argv)
