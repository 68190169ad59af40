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
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from evidence import Failed, gate, recheck
from evidence.scan import public

INSTALLED_SUITES = "test_coding_*.py"
SUITES = "certification-tests/"
LAST_LINES = 15
"""Lines of a failed program that the reason quotes."""
INTERRUPTED = 30.0
"""Seconds an interrupted program gets to end what it has started before it is killed."""
SETTINGS = re.compile(r"PYTEST_|PYTHON(?!DONTWRITEBYTECODE)|CODING_|SUITE_PREPARE|SUITE_SERVES|REQUIRE_NSJAIL")
"""Variables that say what is tested, and how; ``SUITE_REQUIRE_ALL`` can only make a run stricter."""


def chosen(root: Path) -> list[str]:
    """Every established suite that git knows, the sibling packages' too, relative to the repository."""
    files = [path for path in gate.tracked(root) if path.startswith(SUITES)]
    return sorted(path for path in files if fnmatch(path.rpartition("/")[2], INSTALLED_SUITES))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """What a program gets: this process's, without settings for tests, and ``more``."""
    return {name: value for name, value in os.environ.items() if not SETTINGS.match(name)} | dict(more)


def probe(program: Path, package: Path, root: Path, private: Mapping[str, str]) -> dict[str, Any]:
    """What the RPC probe says of an extraction; raises :class:`evidence.Failed` when it is not content."""
    command = [sys.executable, str(program), str(package)]
    code, output, complaint = _run(command, root, {})
    if code != 0:
        tail = "\n".join((complaint + output).splitlines()[-LAST_LINES:])
        raise Failed(f"{package.name}: its RPC is not what it should be:\n{public(tail, private)}")
    try:
        found = json.loads(public(output, private))
    except ValueError:
        raise Failed(f"{package.name}: the RPC probe printed no JSON object") from None
    try:
        content = recheck.spoken_to(found)
    except (KeyError, TypeError):
        content = False
    if not content:
        raise Failed(
            f"{package.name}: the RPC probe does not say that everything is as it must be, in every transport and shape"
        )
    return {"command": shown(command, private), **found}


def tests(
    selection: Sequence[str], root: Path, scratch: Path, private: Mapping[str, str], more: Mapping[str, str]
) -> dict[str, Any]:
    """A run of pytest: counts, and the outcome of every test; what failed or did not run is named with its reason."""
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
    code, output, complaint = _run(command, root, {"SUITE_PREPARE": "1", **more})
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


def _run(command: Sequence[str], root: Path, more: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code and both outputs of a command; when this is interrupted the command is too, and has ended afterwards."""
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment(more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, complaint = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=INTERRUPTED)
        process.kill()
        process.wait()
        raise
    return process.returncode, output, complaint
