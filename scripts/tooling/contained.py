"""One command with everything it starts: bounded in time, and gone with all of its descendants when this program ends.

A script of its own: ``python -I contained.py SECONDS OUTPUT COMMAND...`` runs the command in a session of its own, with what
it prints in the file OUTPUT, and prints one JSON object: ``code`` (negative: the signal that ended it; ``null``: it took
longer than SECONDS and was ended) and ``left`` (command lines of processes that outlived it and were ended).

Guarantees: on Linux every orphan of the tree becomes a child of this program (a subreaper), whatever session it made for
itself, and this program ends when no child is left; elsewhere the command's process group is all that is ended. SIGTERM,
SIGINT and the death of the parent end the tree, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

POLL: Final = 0.02
"""Seconds between two looks for ended children."""
TERM_GRACE: Final = 2.0
"""Seconds the command gets between SIGTERM and SIGKILL when its time is up."""
ORPHAN_GRACE: Final = 2.0
"""Seconds that what the command left gets to leave by itself: a helper that notices its parent's end."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36


class Ended(BaseException):
    """This program was told to end."""


def adopt() -> None:
    """Make this process the parent of every orphan below it, and have it told of its own parent's death; Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise Ended


def children() -> dict[int, str]:
    """This process's living children, pid to command line; empty where there is no ``/proc``."""
    found: dict[int, str] = {}
    own = str(os.getpid()).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if parent == own and state != b"Z":
                command = (entry / "cmdline").read_bytes()
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


def reap() -> dict[int, int]:
    """The children that have ended since the last call: pid to exit code."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of ``pid``, or ``None`` when it has not ended in that time."""
    end = time.monotonic() + seconds
    while True:
        ended = reap()
        if pid in ended:
            return ended[pid]
        if time.monotonic() >= end:
            return None
        time.sleep(POLL)


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a child, which cannot be another process because only :func:`reap` gives its pid back."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def clear(grace: float) -> list[str]:
    """Return when no descendant is left; the command lines of those that had to be killed."""
    end = time.monotonic() + grace
    killed: dict[int, str] = {}
    while True:
        reap()
        left = children()
        if not left:
            return sorted(killed.values())
        if time.monotonic() >= end:
            killed |= left
            for pid in left:
                send(pid, signal.SIGKILL)
        time.sleep(POLL)


def run(seconds: float, output: Path, command: list[str]) -> tuple[int | None, list[str]]:
    """The command's exit code and what it left; see the module."""
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = wait(process.pid, seconds)
        if code is None:
            send(process.pid, signal.SIGTERM, group=True)
            if wait(process.pid, TERM_GRACE) is None:
                send(process.pid, signal.SIGKILL, group=True)
        return code, clear(ORPHAN_GRACE if code is not None else 0.0)
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        send(process.pid, signal.SIGKILL, group=True)
        clear(0.0)
        raise
    finally:
        # Reaped above, by its pid.
        process.returncode = process.returncode or 0


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code is 0 unless this program itself was ended."""

    def end(*_: object) -> None:
        raise Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        adopt()
        code, left = run(float(arguments[0]), Path(arguments[1]), arguments[2:])
    except Ended:
        return 128 + signal.SIGTERM
    print(json.dumps({"code": code, "left": left}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
