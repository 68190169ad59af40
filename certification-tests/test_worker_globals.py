"""A worker's process belongs to the SDK: a plugin that changes what is process-wide changes it for every installation in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from testkit import worker_globals

CHANGES = """
import asyncio
import logging
import os
Runner.invoke = lambda self, ctx: self.run(ctx)
os.environ["CHANGED"] = "1"
logging.getLogger().setLevel(logging.DEBUG)
asyncio.get_running_loop().set_default_executor(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))
"""
"""What a careless module might do at import."""


def probed(package: Path, scratch: Path) -> dict[str, Any]:
    """What the probe says of ``package``."""
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, worker_globals.__file__, package, scratch],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(scratch)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_many_runs_change_nothing_of_the_worker(package_root: Path, tmp_path: Path) -> None:
    """Our rule: the SDK's globals, executor, logging, environment and limits are as before, however the runs ended."""
    found = probed(package_root, tmp_path / "scratch")
    assert found["changed"] == []
    rounds = worker_globals.ROUNDS
    assert found["runs"] == {"stop": 2 * rounds, "error": 3 * rounds, "cancelled": rounds}


def test_a_change_would_be_seen(package_root: Path, tmp_path: Path) -> None:
    """The other side of the test above: each kind of change has its name in what the probe prints."""
    package = tmp_path / "ACPAgentRunner"
    shutil.copytree(package_root, package, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "dist"))
    runner = package / "components" / "runner" / "default.py"
    runner.write_text(runner.read_text(encoding="utf-8") + CHANGES, encoding="utf-8")
    assert set(probed(package, tmp_path / "scratch")["changed"]) == {
        "environment",
        "executor",
        "loggers",
        "langbot_plugin.api.definition.components.runner.runner.Runner.invoke",
    }
