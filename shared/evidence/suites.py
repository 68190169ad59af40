"""Programs and test suites run for the evidence, with their results by test and without a word of the builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence import Failed
from evidence.scan import public

INSTALLED_SUITES = "test_coding_*.py"
LAST_LINES = 15
"""Lines of a failed program that the reason quotes."""


def run(
    command: list[str | Path], root: Path, private: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A command to its end: exit code and output, both without anything private."""
    done = subprocess.run(
        [str(each) for each in command],
        cwd=root,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return {
        "command": public(" ".join(str(each) for each in command), dict(private)),
        "exit_code": done.returncode,
        "output": public(done.stdout, dict(private)),
    }


def probe(program: Path, package: Path, root: Path, private: Mapping[str, str]) -> dict[str, Any]:
    """What the RPC probe says of an extraction; raises :class:`evidence.Failed` when it is not content."""
    done = subprocess.run(
        [sys.executable, program, package], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr + done.stdout).splitlines()[-LAST_LINES:])
        raise Failed(f"{package.name}: its RPC is not what it should be:\n{public(tail, dict(private))}")
    result: dict[str, Any] = json.loads(public(done.stdout, dict(private)))
    return result


def tests(
    selection: list[str], root: Path, scratch: Path, private: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """A run of pytest: counts, and the outcome of every test; what failed or did not run is named with its reason."""
    report = scratch / "report.xml"
    ran = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection],
        root,
        private,
        environment={"SUITE_PREPARE": "1", **environment},
    )
    outcomes: dict[str, list[dict[str, str]]] = {"passed": [], "failed": [], "skipped": []}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        kind = "passed"
        reason = ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                kind = "skipped" if child.tag == "skipped" else "failed"
                reason = public(child.get("message") or "", dict(private))
        named = {"test": f"{case.get('classname')}::{case.get('name')}"}
        outcomes[kind].append({**named, "reason": reason} if reason else named)
    report.unlink(missing_ok=True)
    return {
        "selection": [public(each, dict(private)) for each in selection],
        "exit_code": ran["exit_code"],
        "counts": {kind: len(found) for kind, found in outcomes.items()},
        "passed": sorted(each["test"] for each in outcomes["passed"]),
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "last_lines": ran["output"].splitlines()[-LAST_LINES:],
    }
