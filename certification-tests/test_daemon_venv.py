"""The daemon program as a user installs it: a few paths out of the built package, in an environment with only its packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pkg.agent_api import Prompt, TextDelta, TurnEnded
from testkit import daemon_rig, hostile_trees
from testkit.acp_harness import poll
from testkit.daemon_rig import DAEMON_ID, DaemonHome, opened, told_pids, turn
from testkit.relay_rig import WAIT
from testkit.sdk_worker import built
from tooling import daemon, venv

pytestmark = pytest.mark.daemon_venv

TAKEN = ("daemon.py", "requirements-daemon.txt", "pkg/", "agent/")
"""What the documentation tells a user to take out of the package: nothing else is needed."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The daemon's directory, unpacked from the package that LangBot gets."""
    target = tmp_path_factory.mktemp("langbot-daemon")
    with zipfile.ZipFile(built("ACPAgentRunner")) as package:
        package.extractall(target, [name for name in package.namelist() if name.startswith(TAKEN)])
    assert {entry.name for entry in target.iterdir()} == {name.rstrip("/") for name in TAKEN}
    return target


def command(python: Path, installed: Path, *arguments: str) -> tuple[str, ...]:
    """The program's command line; ``-I``: nothing but the environment's own packages and the program's directory."""
    return (str(python), "-I", str(installed / "daemon.py"), *arguments)


@contextlib.asynccontextmanager
async def running(python: Path, installed: Path, home: DaemonHome) -> AsyncIterator[asyncio.subprocess.Process]:
    """The installed daemon at work, with SIGTERM afterwards."""
    with home.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command(python, installed, "run", "--policy", str(home.policy)),
            cwd=home.directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=home.environment(),
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(WAIT):
            await process.wait()


@pytest.mark.asyncio
async def test_a_job_runs_to_its_end_and_leaves_nothing(daemon_python: Path, installed: Path, tmp_path: Path) -> None:
    """The installed program connects, runs a turn of a scripted agent (a local protocol fixture) and ends all of it.

    Nothing of it is left afterwards: no process, also none of a tool in a session of its own; no file but the table of jobs
    (which lists none), the record of jobs and their locks; and no file was written beside the program.
    """
    before = sorted(installed.rglob("*.py"))
    async with daemon_rig.hub_and_home(tmp_path) as (hub, home), running(daemon_python, installed, home) as process:
        async with opened(hub) as session:
            events = await turn(session, "say from a bare machine")
            assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "from a bare machine"
            assert events[-1] == TurnEnded("end_turn")
            await session.prompt(Prompt("child\nhang"))
            children = await told_pids(session)
            below = {pid: hostile_trees.start_time(pid) for pid in daemon_rig.descendants(process.pid)}
            assert set(children) <= set(below)
        assert hostile_trees.living({**below, **children}) == []
        await hub.wait_for_daemon(DAEMON_ID, WAIT)
        await poll(lambda: json.loads(next(home.state.rglob("jobs.json")).read_text())["jobs"] == {})
        process.terminate()
        async with asyncio.timeout(WAIT):
            assert await process.wait() == 0
        await poll(lambda: daemon_rig.descendants(process.pid) == [])
        left = {file.name for file in home.state.rglob("*") if file.is_file()}
        assert left == {"jobs.json", "lock", "audit.jsonl"}
        assert "Traceback" not in home.log.read_text()
    assert sorted(installed.rglob("*.py")) == before


def test_langbot_s_sdk_is_not_importable_there(daemon_python: Path, installed: Path) -> None:
    """The environment has no SDK and nothing else that the program could lean on by accident; every module still loads."""
    script = (
        "import importlib, importlib.util, pathlib, sys\n"
        f"root = pathlib.Path({str(installed)!r})\n"
        "sys.path.insert(0, str(root))\n"
        "assert importlib.util.find_spec('langbot_plugin') is None\n"
        "assert importlib.util.find_spec('asyncssh') is None\n"
        "import daemon\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [daemon_python, "-I", "-c", script], capture_output=True, text=True, timeout=WAIT, check=False, cwd=installed
    )
    assert done.returncode == 0, done.stderr
    assert "langbot_plugin" not in done.stdout.split() and "websockets" in done.stdout.split()


def test_check_and_first_steps_work_there(daemon_python: Path, installed: Path, tmp_path: Path) -> None:
    """The commands a person types first."""
    for arguments, code in ((("--help",), 0), ((), 2), (("init",), 0), (("check",), 2)):
        done = subprocess.run(
            command(daemon_python, installed, *arguments),
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_the_lock_is_what_the_requirements_allow(daemon_python: Path, installed: Path) -> None:
    """Every requirement of the package is met by the pinned versions the tests run with, and nothing is missing (pip check)."""
    text = (installed / "requirements-daemon.txt").read_text(encoding="utf-8")
    wanted = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {re.split(r"[<>=]", line)[0] for line in wanted} == {
        "websockets",
        "pydantic",
        "aiohttp",
        "agent-client-protocol",
    }
    pip = (str(venv.interpreter(daemon.directory())), "-m", "pip", "--disable-pip-version-check")
    for arguments in (("check",), ("install", "--no-index", "--dry-run", "-r", str(installed / "requirements-daemon.txt"))):
        done = subprocess.run((*pip, *arguments), capture_output=True, text=True, timeout=WAIT, check=False)
        assert done.returncode == 0 and "Would install" not in done.stdout, done.stdout + done.stderr


def test_lock_lines_are_pinned_with_hashes_and_name_no_address() -> None:
    """The lock works with whatever index pip is set up for, and its bytes are verified."""
    text = daemon.LOCK.read_text(encoding="utf-8")
    assert "://" not in text
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert len(entries) > 10
    assert all(re.match(r"[a-z0-9._-]+==[^ ;]+( ; [^-]+)?\s+--hash=sha256:", entry) for entry in entries)
