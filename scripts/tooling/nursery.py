"""Starts many short pytest runs fast: what they import from the environment is imported once, and each run is a fork of that.

A script of its own, run with the environment's interpreter; requests come on stdin, one JSON object a line: ``arguments``
(pytest's), ``cwd``, ``env`` (all of the environment), ``output`` (the file for what it prints) and ``seconds``. Each is
answered on stdout with a JSON object: ``code`` (negative: the signal that ended the run; ``null``: it took longer than
``seconds`` and was ended) and ``left`` (command lines of processes that outlived it and were ended).

Guarantees: nothing of the sources under test is imported before a run, nor anything that a run may want to import from them; a
run is gone with all of its descendants before the next. On Linux every orphan of its tree becomes a child of the process that
watches it (a subreaper), whatever session it made for itself, and that process ends when no child is left; elsewhere the run's
process group is all that is ended. The end of stdin, SIGTERM and the death of the parent end the run that is under way, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = (
    "pytest",
    "_pytest.junitxml",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "hypothesis.strategies",
    "aiohttp.web",
    "websockets.asyncio.client",
    "websockets.asyncio.server",
    "acp.exceptions",
    "langbot_plugin.api.agent_tools",
    "langbot_plugin.api.definition.components.runner.runner",
    "langbot_plugin.api.definition.plugin",
    "langbot_plugin.api.proxies.runner",
    "langbot_plugin.entities.io.context",
)
"""What most tests import; one that is not there is imported by those who need it."""
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


def _end(*_: object) -> None:
    raise Ended


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


def run(seconds: float, start: Callable[[], int]) -> tuple[int | None, list[str]]:
    """The exit code of what ``start`` starts in a session of its own (it gives the pid), and what that left behind."""
    pid = start()
    try:
        code = wait(pid, seconds)
        if code is None:
            send(pid, signal.SIGTERM, group=True)
            if wait(pid, TERM_GRACE) is None:
                send(pid, signal.SIGKILL, group=True)
        return code, clear(ORPHAN_GRACE if code is not None else 0.0)
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send(pid, signal.SIGKILL, group=True)
        clear(0.0)
        raise


def watch(start: Callable[[], int], seconds: float, tell: Callable[[str], object]) -> int:
    """This process's whole work: run it, and ``tell`` the JSON object; the exit code, 0 unless this process was ended."""
    signal.signal(signal.SIGTERM, _end)
    try:
        adopt()
        code, left = run(seconds, start)
    except Ended:
        return 128 + signal.SIGTERM
    tell(json.dumps({"code": code, "left": left}))
    return 0


# ------------------------------------------------------------------ runs


def grow(request: dict[str, Any]) -> int:
    """Become pytest in a new process, as ``python -m pytest`` in that directory is; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        with Path(request["output"]).open("wb") as log, Path(os.devnull).open("rb") as nothing:
            for fd, file in ((0, nothing), (1, log), (2, log)):
                os.dup2(file.fileno(), fd)
        sys.path.insert(0, request["cwd"])
        sys.argv = ["pytest", *request["arguments"]]
        import pytest

        code = int(pytest.main(request["arguments"]))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve(request: dict[str, Any]) -> str:
    """One run to its end, in a process of its own that adopts what the run leaves; the answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(reading)
            status = watch(lambda: grow(request), request["seconds"], lambda told: os.write(writing, told.encode()))
        finally:
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading) as told:
            answer = told.read()
        os.waitpid(pid, 0)
    except Ended:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    return answer or json.dumps({"code": None, "left": []})


def main() -> int:
    """Serve until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGTERM, _end)
    try:
        while line := sys.stdin.readline():
            print(serve(json.loads(line)), flush=True)
    except Ended:
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
