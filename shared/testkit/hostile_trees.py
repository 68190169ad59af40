"""Process trees that do not want to end, and the means to prove that they did. A local fixture, no vendor's behaviour.

As a script (``python -I -S hostile_trees.py KIND DIRECTORY``) it becomes the tree; every process of it writes a file
``DIRECTORY/PID`` with its start time before it goes on. As a module it starts nothing: :func:`command` gives the command line,
:func:`announced` the processes so far, :func:`gone` waits for their end by pid *and* start time.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "plain": 1,
    "term_ignorer": 2,
    "setsid": 3,
    "double_fork": 2,
    "holds_stdout": 2,
    "respawner": 3,
    "hopper": 2,
    "stopped": 2,
    "deaf": 1,
    "bare_environment": 2,
    "storm": 40,
}
"""Every kind that lives until it is ended, with the number of processes to wait for before it counts as complete."""

LINE = 40 * 1024 * 1024
FLOOD = 50 * 1024 * 1024


# ------------------------------------------------------------------ the observer's side


def command(kind: str, directory: Path) -> tuple[str, ...]:
    """The command line of one tree."""
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), kind, str(directory))  # noqa: PTH100


def start_time(pid: int) -> str:
    """The start time of ``pid`` in clock ticks, empty when it is gone or a zombie nobody has reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def announced(directory: Path) -> dict[int, str]:
    """Every process of the tree that has announced itself: pid to start time."""
    return {int(file.name): file.read_text() for file in directory.iterdir() if file.name.isdigit()}


def complete(directory: Path, count: int, bound: float = 20.0) -> dict[int, str]:
    """Wait until ``count`` processes have announced themselves."""
    end = time.monotonic() + bound
    while len(found := announced(directory)) < count or "" in found.values():
        if time.monotonic() > end:
            raise AssertionError(f"only {len(found)} of {count} processes came up")
        time.sleep(0.005)
    return found


def living(processes: dict[int, str]) -> list[int]:
    """The pids that still belong to the process they were announced for."""
    return [pid for pid, start in processes.items() if start_time(pid) == start]


def carrying(value: str) -> list[int]:
    """The pids of living processes that carry ``value`` in their environment: also those that never announced themselves."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                    if value.encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def gone(processes: dict[int, str], bound: float = 10.0) -> bool:
    """Wait for the end of every process, by the kernel's own event; false when one outlives ``bound`` seconds."""
    end = time.monotonic() + bound
    for pid, start in processes.items():
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if start_time(pid) == start and not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
        finally:
            os.close(handle)
    return not living(processes)


# ------------------------------------------------------------------ the tree's side


def _announce(directory: str) -> None:
    path = f"{directory}/{os.getpid()}"
    with open(f"{path}.new", "w") as file:  # noqa: PTH123
        file.write(start_time(os.getpid()))
    os.rename(f"{path}.new", path)  # noqa: PTH104


def _ignore(*numbers: int) -> None:
    for number in numbers or (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _forever() -> None:
    while True:
        time.sleep(3600)


def _child(directory: str, *, session: bool = False, ignore: bool = True) -> bool:
    """Fork; true in the child, announced."""
    if os.fork():
        return False
    if session:
        os.setsid()
    if ignore:
        _ignore()
    _announce(directory)
    return True


def _until_eof() -> None:
    while os.read(0, 65536):
        pass


def _keep_pair(directory: str) -> None:
    """Two processes that replace each other: the parent on the child's death, an orphan by forking a new partner."""
    os.setsid()
    _ignore()
    _announce(directory)
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _announce(directory)
            while os.getppid() == parent:
                time.sleep(0.0005)
            continue
        os.waitpid(pid, 0)


def _hop(directory: str) -> None:
    """A process that is never the same for long: it hands itself over to a child in a new session and leaves."""
    _ignore()
    hops = 0
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        hops += 1
        if hops in (1, 50):
            _announce(directory)


def _storm(directory: str, depth: int) -> None:
    """Three children of one's own, each in its own session, replaced at once when they die; four generations."""
    _ignore()
    alive = 0
    while True:
        while depth and alive < 3:
            alive += 1
            if os.fork() == 0:
                os.setsid()
                _announce(directory)
                _storm(directory, depth - 1)
        if not depth:
            _forever()
        os.wait()
        alive -= 1


def run(kind: str, directory: str) -> None:
    """Be the tree."""
    if kind in ("term_ignorer", "stopped", "setsid"):
        _ignore()
    if kind == "big_line":
        chunk = b"x" * 65536
        left = LINE
        while left:
            left -= os.write(1, chunk[:left])
        os.write(1, b"\n")
        return
    if kind == "stderr_flood":
        line = b"e" * 99 + b"\n"
        block = line * 600
        sent = 0
        while sent < FLOOD:
            sent += os.write(2, block)
        os.write(2, b"the very last words\n")
        os.write(1, b"done\n")
        _until_eof()
        return
    if kind == "zombie_flood":
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                if os.fork() == 0:
                    os._exit(0)
                os._exit(0)
            os.waitpid(pid, 0)
        os.write(1, b"done\n")
        _until_eof()
        return
    if kind == "exit_at_once":
        os.write(2, b"cannot work today\n")
        os._exit(7)
    _announce(directory)
    if kind == "plain":
        _until_eof()
        return
    if kind == "deaf":
        _ignore()
        _forever()
    if kind == "term_ignorer" and _child(directory):
        _forever()
    if kind == "setsid" and _child(directory, session=True):
        if _child(directory, session=True):
            _forever()
        _forever()
    if kind == "double_fork":
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            _ignore()
            _announce(directory)
            _forever()
        os.waitpid(pid, 0)
        _until_eof()
        return
    if kind == "holds_stdout":
        if _child(directory, session=True):
            _forever()
        return
    if kind == "storm":
        _storm(directory, 3)
    if kind == "respawner" and os.fork() == 0:
        _keep_pair(directory)
    if kind == "hopper" and os.fork() == 0:
        _hop(directory)
    if kind == "stopped":
        if _child(directory):
            os.kill(os.getpid(), signal.SIGSTOP)
            _forever()
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "bare_environment" and os.fork() == 0:
        os.setsid()
        _ignore()
        os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, "bare", directory], {})
    if kind == "bare":
        _forever()
    _forever()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
