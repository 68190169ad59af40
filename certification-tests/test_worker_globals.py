"""A worker's process belongs to the SDK: a plugin that changes what is process-wide changes it for every installation in it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit import worker_globals
from testkit.pool_pair import Chat, pair, revoked

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


@pytest.mark.asyncio
@pytest.mark.shared_runtime
@pytest.mark.sdk_worker
@pytest.mark.timeout(180)
async def test_many_runs_of_two_installations_change_nothing_of_the_pool(tmp_path: Path) -> None:
    """Our rule: nor do those that share a real worker, who come and go in between."""
    async with pair(tmp_path) as at:
        pid = at.worker.pid("A")
        for each in at.both:
            await each.run("say warm")
        assert await at.watch.changed(pid) == []
        runs = 0
        for number in range(5):
            for text in ("say an answer", "exit 3"):
                names: dict[str, Any] = {"run_id": f"r{number}", "conversation": f"c{number}"}
                outcomes = await asyncio.gather(*(each.run(text, **names) for each in at.both))
                runs += len(outcomes)
            assert {outcome.reason for outcome in outcomes} == {"error"}
        hanging = Chat(at.tenants["A"].stream("say begun\nhang", run_id="hangs"))
        await hanging.shown("begun")
        await at.worker.revoke("A")
        assert revoked(await hanging.ended())
        assert (await at.tenants["B"].run("say on", run_id="on")).shown == ["on"]
        assert runs == 20
        assert await at.watch.changed(pid) == []


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
