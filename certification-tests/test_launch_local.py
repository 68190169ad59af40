"""The local place: an agent starts there from whatever bare environment the worker has, and sees only what it should."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from pkg import launch, process_supervisor
from pkg.launch import Command, Graces, Launcher, LocalLauncher
from pkg.supervised_process import MARKER

BOUND = 30.0
SHORT = Graces(eof=0.2, term=0.2, kill=5.0)
PACKAGE = str(Path(launch.__file__).parents[1])
SHOW = "import json,os,sys;print(json.dumps([dict(os.environ),sys.argv,os.getcwd()]))"


async def shown(command: Command, launcher: LocalLauncher) -> Any:
    """What the started process printed, as JSON."""
    process = await launcher.start(command)
    parts = []
    async with asyncio.timeout(BOUND):
        while data := await process.read():
            parts.append(data)
        await process.stop()
    return json.loads(b"".join(parts))


def test_the_local_place_is_a_launcher() -> None:
    """Our rule: one interface for every place; the name of this one is stable and tells nothing of the machine."""
    place: Launcher = LocalLauncher()
    assert place.local
    assert place.machine == LocalLauncher(method="sweep").machine
    assert str(Path.home()) not in place.machine


@pytest.mark.asyncio
async def test_addresses_of_this_machine_are_reached_as_they_are() -> None:
    """Our rule: no tunnel where the place is this machine."""
    place = LocalLauncher()
    assert await place.reach("http://127.0.0.1:1/x") == "http://127.0.0.1:1/x"
    await place.close()


@pytest.mark.asyncio
async def test_an_agent_sees_its_arguments_directory_and_environment(tmp_path: Path) -> None:
    """Our rule: arguments arrive byte for byte, the environment is the built one plus the run's marker."""
    words = ("", " ", "ä€😀", "a\nb", "--x=$HOME", "\udc80")
    env, argv, cwd = await shown(
        Command((sys.executable, "-c", SHOW, *words), str(tmp_path), {"GIVEN": "grün"}), LocalLauncher()
    )
    assert tuple(argv[1:]) == words
    assert cwd == str(tmp_path.resolve())
    assert env["GIVEN"] == "grün"
    assert len(env[MARKER]) == 32
    assert "LANGBOT_PLUGIN_RUNTIME_PROFILE" not in env


@pytest.mark.asyncio
async def test_the_recorded_search_path_finds_the_agent_and_reaches_it(tmp_path: Path) -> None:
    """Our rule: found through the recorded path, and commands the agent starts by name are found through the same."""
    for name, text in (
        ("my-agent", "#!/usr/bin/env my-runtime\n"),
        ("my-runtime", f"#!/bin/sh\nexec {sys.executable} -c '{SHOW}'\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env, _, _ = await shown(Command(("my-agent",), str(tmp_path)), LocalLauncher(recorded_path=f"{tmp_path}:/usr/bin:/bin"))
    assert env["PATH"].split(":")[0] == str(tmp_path)


@pytest.mark.parametrize(
    "environ", [{}, {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, {"CLAUDECODE": "1", "CLAUDE_CODE_SSE_PORT": "1"}]
)
def test_a_worker_with_a_bare_environment_starts_agents(environ: dict[str, str], tmp_path: Path) -> None:
    """The field's case: no PATH, no HOME, or an outer agent session's variables; the agent starts clean in each."""
    script = (
        "import asyncio,sys;sys.path.insert(0,sys.argv[1]);from pkg.launch import *\n"
        "async def main():\n"
        "  p=await LocalLauncher().start(Command(('sh','-c','env; cat'),sys.argv[2]))\n"
        "  p.close_stdin(); out=b''\n"
        "  while d:=await p.read(): out+=d\n"
        "  await p.stop(); print(out.decode())\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, PACKAGE, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert "/usr/bin" in seen["PATH"].split(":")
    assert seen["HOME"].startswith("/")
    assert not [name for name in seen if name.startswith(("CLAUDE", "LANGBOT", "PYTHON"))]


def test_nothing_here_needs_the_sdk(tmp_path: Path) -> None:
    """Our rule: a workstation's daemon has these modules without ``langbot_plugin``."""
    script = (
        "import sys;sys.path.insert(0,sys.argv[1]);sys.modules['langbot_plugin']=None;"
        "import pkg.launch,pkg.runtime_support,pkg.supervised_process,pkg.process_supervisor"
    )
    subprocess.run([sys.executable, "-c", script, PACKAGE], check=True, cwd=tmp_path, timeout=60)


def test_everything_imports_where_there_is_no_linux(tmp_path: Path) -> None:
    """Our rule: the code paths of macOS are chosen at run time, so the modules import there."""
    script = (
        "import sys;sys.path.insert(0,sys.argv[1]);sys.platform='darwin';"
        "import pkg.launch,pkg.process_supervisor as s;assert not s.LINUX"
    )
    subprocess.run([sys.executable, "-c", script, PACKAGE], check=True, cwd=tmp_path, timeout=60)


def test_the_supervisor_works_by_ps_where_there_is_no_proc(tmp_path: Path) -> None:
    """Our rule: macOS's way, run here with its platform name pretended: found by ``ps``, ended, confirmed by the sweep."""
    source = Path(process_supervisor.__file__).read_text().replace('sys.platform.startswith("linux")', "False")
    script = tmp_path / "supervisor.py"
    script.write_text(source)
    program = (
        "import sys;sys.path.insert(0,sys.argv[1]);import asyncio\n"
        "from pkg import supervised_process as s;s._SCRIPT=sys.argv[3]\n"
        "from pkg.launch import *\n"
        "async def main():\n"
        "  p=await LocalLauncher().start(Command(('sh','-c','setsid sleep 1000 & trap \"\" TERM; echo up; cat; sleep 1000'),"
        "sys.argv[2],{},Graces(.1,.1,10)))\n"
        "  assert await p.read()==b'up\\n'\n"
        "  await p.stop(); print(p.method, p.counts['killed'] > 0, (await p.wait()).code)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, PACKAGE, str(tmp_path), str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "sweep True -9\n", done.stderr


class _NoExecutor(concurrent.futures.ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the loop's default executor was used")


@pytest.mark.asyncio
async def test_the_default_executor_is_never_used(tmp_path: Path) -> None:
    """The SDK's fact: a worker's default executor has four places per installation, so nothing of ours waits in it."""
    asyncio.get_running_loop().set_default_executor(_NoExecutor())
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    await process.write(b"x")
    assert await process.read() == b"x"
    await process.stop()


class _Held:
    """Something of an invocation."""


@pytest.mark.asyncio
async def test_a_live_process_keeps_nothing_of_its_invocation(tmp_path: Path) -> None:
    """Our rule: a process may outlive the run that started it, the run's context may not be kept alive by that."""
    variable: contextvars.ContextVar[_Held] = contextvars.ContextVar("held")
    held = _Held()
    gone = weakref.ref(held)

    async def run(value: _Held) -> launch.AgentProcess:
        variable.set(value)
        return await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))

    task = asyncio.create_task(run(held), context=contextvars.Context())
    process = await task
    del held, task
    await asyncio.sleep(0)  # the loop lets go of the finished task
    try:
        gc.collect()
        assert gone() is None
    finally:
        await process.stop()


@pytest.mark.asyncio
async def test_starting_and_stopping_changes_nothing_of_the_worker(tmp_path: Path) -> None:
    """Our rule: environment, directory and signal handling of the worker stay as they are."""

    def state() -> Any:
        status = Path("/proc/self/status").read_text()
        return dict(os.environ), Path.cwd(), [line for line in status.splitlines() if line.startswith("Sig")]

    before = state()
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {"A": "1"}, SHORT))
    await process.stop()
    assert state() == before
