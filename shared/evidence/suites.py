"""Programs and test suites run for the evidence, with their results by test and without a word of the builder.

A run gets what is said here and nothing of the caller's own settings for tests: no filter, plugin or source root of somebody's
shell decides what ran.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from evidence import Failed, gate, recheck
from evidence.scan import public, public_value

INSTALLED_SUITES = "test_coding_*.py"
SUITES = "certification-tests/"
LAST_LINES = 15
"""Lines of a failed program that the reason quotes."""
PROBED_WITHIN = 900.0
"""Seconds all RPC probes together may take: half a minute on two idle cores, and each of their steps has a bound of its own."""
TESTED_WITHIN = 7200.0
"""Seconds a run of the suites may take, several times what two busy cores need."""
INTERRUPTED = 30.0
"""Seconds interrupted programs get to end what they have started before they are killed."""
SETTINGS = re.compile(r"PYTEST_|PYTHON|PY_COLORS|FORCE_COLOR|CODING_|SUITE_PREPARE|SUITE_SERVES|REQUIRE_NSJAIL")
"""Variables that say what is tested, and how; ``SUITE_REQUIRE_ALL`` can only make a run stricter."""


def chosen(root: Path) -> list[str]:
    """Every established suite that git knows, the sibling packages' too, relative to the repository."""
    files = [path for path in gate.tracked(root) if path.startswith(SUITES)]
    return sorted(path for path in files if fnmatch(path.rpartition("/")[2], INSTALLED_SUITES))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """What a program gets: this process's, without settings for tests, and ``more``."""
    return {name: value for name, value in os.environ.items() if not SETTINGS.match(name)} | dict(more)


def probes(program: Path, extractions: Mapping[str, Path], root: Path, private: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the RPC probe says of each extraction, all tried at once, for they mostly wait.

    Raises :class:`evidence.Failed` when it is not content with one.
    """
    commands = [[sys.executable, str(program), str(place)] for place in extractions.values()]
    ended = run_all(commands, root, {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": os.devnull}, PROBED_WITHIN)
    return {
        name: _content(name, command, done, private) for name, command, done in zip(extractions, commands, ended, strict=True)
    }


def _content(name: str, command: Sequence[str], done: tuple[int, str, str], private: Mapping[str, str]) -> dict[str, Any]:
    """A probe's report, which has to tell of every cell."""
    code, output, complaint = done
    if code != 0:
        tail = "\n".join((complaint + output).splitlines()[-LAST_LINES:])
        raise Failed(f"{name}: its RPC is not what it should be:\n{public(tail, private)}")
    try:
        found = public_value(json.loads(output), private)
    except ValueError:
        raise Failed(f"{name}: the RPC probe printed no JSON object") from None
    try:
        content = recheck.spoken_to(found)
    except (KeyError, TypeError):
        content = False
    if not content:
        raise Failed(f"{name}: the RPC probe does not say that every transport and shape is as it must be")
    return {"command": shown(command, private), **found}


def tests(
    selection: Sequence[str], root: Path, scratch: Path, private: Mapping[str, str], more: Mapping[str, str]
) -> dict[str, Any]:
    """A run of pytest: counts, and the outcome of every test; what failed or did not run is named with its reason."""
    report = scratch / "report.xml"
    # What was compiled before, by whomever, is not run.
    compiled = {"PYTHONPYCACHEPREFIX": str(scratch / "compiled")}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
    ((code, output, complaint),) = run_all([command], root, {"SUITE_PREPARE": "1", **compiled, **more}, TESTED_WITHIN)
    outcomes: dict[str, list[dict[str, str]]] = {"passed": [], "failed": [], "skipped": []}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        kind = "passed"
        reason = ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                kind = "skipped" if child.tag == "skipped" else "failed"
                reason = public(child.get("message") or "", private)
        named = {"test": public(f"{case.get('classname')}::{case.get('name')}", private)}
        outcomes[kind].append({**named, "reason": reason} if reason else named)
    report.unlink(missing_ok=True)
    return {
        "command": shown(command, private),
        "environment": {name: public(value, private) for name, value in sorted(more.items())},
        "exit_code": code,
        "counts": {kind: len(found) for kind, found in outcomes.items()},
        "passed": sorted(each["test"] for each in outcomes["passed"]),
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "last_lines": [public(line, private) for line in (complaint + output).splitlines()[-LAST_LINES:]],
    }


def shown(command: Sequence[str], private: Mapping[str, str]) -> str:
    """A command as it can be typed again, without the builder's places."""
    return public(" ".join(["python3", *command[1:]] if command[0] == sys.executable else command), private)


def run_all(
    commands: Sequence[Sequence[str]], root: Path, more: Mapping[str, str], within: float
) -> list[tuple[int, str, str]]:
    """Exit code and both outputs of each command, all at once; when this is interrupted they are too, and have ended then.

    Raises :class:`evidence.Failed` when one has not ended ``within`` so many seconds; none runs then.
    """
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = []
        stack.callback(lambda: _end([process for process, *_ in started]))
        for command in commands:
            # Files, so that none waits until another's output is read.
            output, complaint = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                command, cwd=root, env=environment(more), stdin=subprocess.DEVNULL, stdout=output, stderr=complaint
            )
            started.append((process, output, complaint))
        latest = time.monotonic() + within
        try:
            for process, *_ in started:
                process.wait(max(0.0, latest - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(
                f"what was run for the evidence did not end within {within:g} s: {Path(commands[0][-1]).name}"
            ) from None
        return [(process.returncode, _said(output), _said(complaint)) for process, output, complaint in started]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have programs end that have not yet; all are asked before any is waited for, and killed when they do not."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    latest = time.monotonic() + INTERRUPTED
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, latest - time.monotonic()))
        process.kill()
        process.wait()


def _said(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")
