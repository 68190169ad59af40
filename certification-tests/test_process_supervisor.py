"""The supervisor ends every kind of tree, proves it, costs little, and notices every way its own world can end.

The trees are local fixtures (``testkit.hostile_trees``). The part named ``hostile`` also runs as PID 1 of a namespace of its
own, as a worker in a jail does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pkg import limits, process_supervisor, texts
from pkg.errors import AgentDied, LaunchError, ProcessCleanupUnconfirmed
from pkg.launch import Command, Graces, LocalLauncher
from pkg.supervised_process import OrphanReaper, SupervisedProcess, stopped, terminate_process_group
from testkit import hostile_trees

SHORT = Graces(eof=0.2, term=0.2, kill=5.0)
"""Graces that keep the tests fast; killing has all the time it may need on a busy machine."""

BOUND = 30.0
METHODS = ("auto", "sweep")
ENDLESS = sorted(hostile_trees.KINDS)


@contextlib.asynccontextmanager
async def running(
    kind: str, directory: Path, *, graces: Graces = SHORT, method: str = "auto", env: dict[str, str] | None = None
) -> AsyncIterator[SupervisedProcess]:
    """A hostile tree under a supervisor, ended at the latest when the block is left."""
    process = await LocalLauncher(method=method).start(
        Command(hostile_trees.command(kind, directory), str(directory), env or {}, graces)
    )
    try:
        yield process
    finally:
        async with asyncio.timeout(BOUND):
            await process.stop()


async def everything(process: SupervisedProcess) -> bytes:
    """All of the process's stdout up to its end."""
    parts = []
    while data := await process.read():
        parts.append(data)
    return b"".join(parts)


def descriptors() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def supervisor_of(pid: int) -> int:
    """The pid of the supervisor over the agent ``pid``."""
    process = process_supervisor.read_process(pid)
    assert process is not None
    return process.parent


# ------------------------------------------------------------------ trees that do not want to end


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.asyncio
async def test_hostile_tree_is_gone_when_stop_returns(kind: str, method: str, tmp_path: Path) -> None:
    """Our rule: when ``stop`` has returned no process of the tree is left, whatever it did to escape."""
    canary = uuid.uuid4().hex
    async with running(kind, tmp_path, method=method, env={"TREE": canary}) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS[kind])
        assert process.pid in tree
        await process.stop()
        tree |= hostile_trees.announced(tmp_path)
        assert hostile_trees.living(tree) == []
        assert hostile_trees.carrying(canary) == []
        assert process.method == ("subreaper" if method == "auto" else "sweep")


@pytest.mark.asyncio
async def test_hostile_tree_that_keeps_handing_itself_over_is_never_called_clean_while_it_lives(tmp_path: Path) -> None:
    """Our rule: the weaker method may fail against a tree that runs away from it, but it does not claim success then."""
    canary = uuid.uuid4().hex
    process = await LocalLauncher(method="sweep").start(
        Command(hostile_trees.command("hopper", tmp_path), str(tmp_path), {"TREE": canary}, Graces(0.1, 0.1, 0.5))
    )
    await asyncio.to_thread(hostile_trees.complete, tmp_path, 2)
    with contextlib.suppress(ProcessCleanupUnconfirmed):
        await process.stop()
        assert hostile_trees.carrying(canary) == []
        return
    async with asyncio.timeout(BOUND):  # the supervisor goes on trying
        while True:
            with contextlib.suppress(ProcessCleanupUnconfirmed):
                await process.stop()
                break
            await asyncio.sleep(0.05)
    assert hostile_trees.carrying(canary) == []


SWEEPING = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from pkg import process_supervisor
tree = process_supervisor.SweptTree([], ("TREE", sys.argv[2]))
print(sum(tree.gone(True) for _ in range(100)), flush=True)
for _ in range(1000):
    tree.kill()
    if tree.gone(True):
        break
"""


ADOPTING = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
agent = subprocess.Popen(sys.argv[2:], env={"TREE": sys.argv[1]}, start_new_session=True)
sys.stdin.readline()
agent.kill()
try:
    while True:
        os.wait()
except ChildProcessError:
    print("nobody left", flush=True)
"""
"""Starts a tree, ends the first of it on a line of input, and reaps the rest, which PID 1 here may not do: what is dead but
not reaped would fill the process table long before the sweeps are done."""


def test_hostile_tree_that_keeps_handing_itself_over_is_seen_by_every_sweep(tmp_path: Path) -> None:
    """Our rule: a look at the process table that missed somebody does not count, so no look finds a living tree gone."""
    canary = uuid.uuid4().hex
    adopting = [sys.executable, "-c", ADOPTING, canary, *hostile_trees.command("hopper", tmp_path)]
    with subprocess.Popen(adopting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert hostile_trees.complete(tmp_path, 2)
        assert parent.stdin is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        command = [sys.executable, "-c", SWEEPING, str(Path(process_supervisor.__file__).parents[1]), canary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "0\n"
        said, _ = parent.communicate(timeout=BOUND)
    assert said == "nobody left\n"
    assert hostile_trees.carrying(canary) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.asyncio
async def test_hostile_orphan_outlives_its_agent_until_stop(method: str, tmp_path: Path) -> None:
    """Our rule: work a finished agent left behind goes on until ``stop``; ``wait`` does not await the stdout it holds open."""
    async with running("holds_stdout", tmp_path, method=method) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 2)
        async with asyncio.timeout(BOUND):
            assert (await process.wait()).code == 0
        orphans = [pid for pid in tree if pid != process.pid]
        assert hostile_trees.living(tree) == orphans
        await process.stop()
        assert await process.read() == b""
        assert hostile_trees.living(tree) == []


@pytest.mark.asyncio
async def test_hostile_flood_of_zombies_is_reaped_while_the_agent_runs(tmp_path: Path) -> None:
    """Our rule: the agent's orphans are reaped all the time, not only at the end."""
    async with running("zombie_flood", tmp_path) as process, asyncio.timeout(BOUND):
        supervisor = supervisor_of(process.pid)
        assert await process.read() == b"done\n"
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
        while children.read_text().split() != [str(process.pid)]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await process.stop()
        assert process.counts["adopted"] == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.asyncio
async def test_hostile_tree_of_a_killed_supervisor_is_swept(method: str, tmp_path: Path) -> None:
    """Our rule: when the supervisor itself is killed the rest of the tree is found by its marker, ended and confirmed."""
    async with running("setsid", tmp_path, method=method) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 3)
        os.kill(supervisor_of(process.pid), signal.SIGKILL)
        async with asyncio.timeout(BOUND):
            assert (await process.wait()).code == -signal.SIGKILL
            await process.stop()
        assert hostile_trees.living(tree) == []


@pytest.mark.asyncio
async def test_hostile_agent_that_stops_its_supervisor_does_not_stop_the_ending(tmp_path: Path) -> None:
    """Our rule: a supervisor that was sent SIGSTOP goes on at the latest when the tree is to be ended."""
    async with running("term_ignorer", tmp_path) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 2)
        os.kill(supervisor_of(process.pid), signal.SIGSTOP)
        await process.stop()
        assert hostile_trees.living(tree) == []
        assert process.counts["killed"] == 2, "the supervisor did it, no sweep was needed"


@pytest.mark.asyncio
async def test_hostile_supervisor_that_hangs_is_replaced_by_a_sweep(tmp_path: Path) -> None:
    """Our rule: a supervisor that does not report within all graces is ended and its tree swept."""
    async with running("setsid", tmp_path, graces=Graces(0.1, 0.1, 0.1)) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 3)
        supervisor = supervisor_of(process.pid)
        stopping = asyncio.ensure_future(process.stop())
        while not stopping.done() and hostile_trees.start_time(supervisor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGSTOP)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(BOUND):
            await stopping
        assert hostile_trees.living(tree) == []


@pytest.mark.asyncio
async def test_hostile_worker_death_ends_the_tree(tmp_path: Path) -> None:
    """Our rule: SIGKILL to the worker ends the tree within 10 s with the default graces, its escaped grandchildren too."""
    worker = await asyncio.to_thread(start_worker, tmp_path, "setsid")
    with worker:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 3)
        agent = next(iter(tree))
        supervisor = {pid: start for pid in (supervisor_of(agent),) if (start := hostile_trees.start_time(pid))}
        worker.kill()
        assert await asyncio.to_thread(hostile_trees.gone, tree | supervisor, 10.0)


@pytest.mark.asyncio
async def test_hostile_worker_death_is_noticed_though_somebody_holds_the_channel(tmp_path: Path) -> None:
    """Our rule: where a fork of the worker keeps the control channel open, the parent-death signal is the second line."""
    worker = await asyncio.to_thread(start_worker, tmp_path, "setsid", holder=True)
    with worker:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 4)
        fork = next(pid for pid in tree if supervisor_of(pid) == worker.pid)
        agent = next(pid for pid in tree if pid != fork and supervisor_of(pid) not in tree)
        supervisor = {supervisor_of(agent): hostile_trees.start_time(supervisor_of(agent))}
        worker.kill()
        rest = {pid: start for pid, start in tree.items() if pid != fork}
        try:
            assert await asyncio.to_thread(hostile_trees.gone, rest | supervisor, 10.0)
            assert hostile_trees.living(tree) == [fork]
        finally:
            os.kill(fork, signal.SIGKILL)


WORKER = """
import asyncio, os, sys, time
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from pkg.launch import Command, LocalLauncher
from testkit import hostile_trees

async def main():
    directory = Path(sys.argv[2])
    process = await LocalLauncher().start(Command(hostile_trees.command(sys.argv[3], directory), str(directory)))
    print(process.pid, flush=True)
    if sys.argv[4:] and os.fork() == 0:
        os.setsid()
        hostile_trees._announce(sys.argv[2])
        time.sleep(3600)
    while await process.read():
        pass
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def start_worker(directory: Path, kind: str, *prefix: str, holder: bool = False) -> subprocess.Popen[bytes]:
    """A worker process of its own that has started one tree, and a fork that holds all its descriptors if wished."""
    paths = ":".join((str(Path(process_supervisor.__file__).parents[1]), str(Path(hostile_trees.__file__).parents[1])))
    command = [*prefix, sys.executable, "-c", WORKER, paths, str(directory), kind, *(["holder"] if holder else [])]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline().strip().isdigit()
    return worker


# ------------------------------------------------------------------ as PID 1


def namespace_problem() -> str:
    """Why no pid namespace can be made here, or nothing."""
    try:
        tried = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, timeout=20, check=False
        )
    except FileNotFoundError:
        return "there is no unshare command"
    return "" if tried.returncode == 0 else f"no pid namespace can be made: {tried.stderr.decode().strip()}"


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip, saying why, where no pid namespace can be made."""
    if reason := namespace_problem():
        pytest.skip(reason)


@pytest.mark.pid_namespace
@pytest.mark.usefixtures("namespaces")
def test_the_same_trees_end_when_the_worker_is_pid_1(tmp_path: Path) -> None:
    """Our rule: everything above named ``hostile`` holds where the worker is PID 1, as in a jail."""
    done = subprocess.run(
        [
            *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "pytest", __file__),
            *("-q", "-k", "hostile", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")),
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.pid_namespace
@pytest.mark.usefixtures("namespaces")
def test_killing_a_worker_that_is_pid_1_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's rule: with PID 1 of its namespace the whole tree ends, escaped grandchildren included."""
    canary = uuid.uuid4().hex
    environ = {**os.environ, "NO_COLOR": canary}  # a variable that is handed on to agents
    os.environ.update(environ)
    try:
        worker = start_worker(tmp_path, "setsid", "unshare", "--pid", "--fork", "--mount-proc")
    finally:
        del os.environ["NO_COLOR"]
    with worker:
        hostile_trees.complete(tmp_path, 3)
        tree = {pid: hostile_trees.start_time(pid) for pid in hostile_trees.carrying(canary) if pid != worker.pid}
        assert len(tree) >= 4, "the worker and three processes of its tree"
        listing = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        os.kill(int(listing[0]), signal.SIGKILL)
        assert hostile_trees.gone(tree)
        assert hostile_trees.carrying(canary) in ([], [worker.pid])


REAPING_WORKER = """
import asyncio, os, signal, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from pkg import limits, process_supervisor, texts
from pkg.launch import Command, Graces, LocalLauncher
from testkit import hostile_trees

async def main():
    assert os.getpid() == 1
    directory = Path(sys.argv[2])
    graces = Graces(0.1, 0.1, 2.0)
    process = await LocalLauncher().start(Command(hostile_trees.command("setsid", directory), str(directory), {}, graces))
    hostile_trees.complete(directory, 3)
    os.kill(process_supervisor.read_process(process.pid).parent, signal.SIGKILL)
    await process.stop()
    mine = await asyncio.create_subprocess_exec("true")
    assert await mine.wait() == 0
    async with asyncio.timeout(20):
        while set(process_supervisor.proc_table()) != {1}:
            await asyncio.sleep(0.02)
    print("clean", flush=True)

asyncio.run(main())
"""


@pytest.mark.pid_namespace
@pytest.mark.usefixtures("namespaces")
def test_a_worker_that_is_pid_1_reaps_what_a_lost_supervisor_left_to_it(tmp_path: Path) -> None:
    """Our rule: orphans re-parented to PID 1 leave no zombie, and the worker's own children keep their exit codes."""
    paths = ":".join((str(Path(process_supervisor.__file__).parents[1]), str(Path(hostile_trees.__file__).parents[1])))
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REAPING_WORKER, paths, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-2000:]


# ------------------------------------------------------------------ the way of ending


@pytest.mark.asyncio
async def test_an_agent_that_leaves_at_end_of_file_is_not_signalled(tmp_path: Path) -> None:
    """Our rule: the gentle step comes first, and an agent that takes it ends with its own exit code."""
    async with running("plain", tmp_path, graces=Graces(eof=20.0)) as process:
        await process.stop()
        assert (await process.wait()).code == 0
        assert process.counts == {"adopted": 0, "terminated": 0, "killed": 0}


@pytest.mark.asyncio
async def test_sigterm_comes_before_sigkill_and_reaches_every_descendant(tmp_path: Path) -> None:
    """Our rule: after the end of file every process, in whatever session, is asked by SIGTERM before it is killed."""
    child = 'trap "echo child; exit 0" TERM; echo up; while :; do sleep .01; done'
    script = f"trap 'echo parent' TERM; setsid sh -c '{child}' & wait; wait; exit 3"
    process = await LocalLauncher().start(Command(("sh", "-c", script), str(tmp_path), {}, Graces(0.1, 20.0, 5.0)))
    async with asyncio.timeout(BOUND):
        assert await process.read() == b"up\n"
        await process.stop()
        assert sorted((await everything(process)).split()) == [b"child", b"parent"]
        assert (await process.wait()).code == 3
        assert process.counts["killed"] == 0


@pytest.mark.asyncio
async def test_a_stopped_process_can_follow_sigterm(tmp_path: Path) -> None:
    """Our rule: SIGTERM comes with SIGCONT, so that a process that was stopped ends in its own way, too."""
    script = "trap 'exit 4' TERM; echo up; while :; do sleep .01; done"
    process = await LocalLauncher().start(Command(("sh", "-c", script), str(tmp_path), {}, Graces(0.1, 20.0, 5.0)))
    async with asyncio.timeout(BOUND):
        assert await process.read() == b"up\n"
        os.kill(process.pid, signal.SIGSTOP)
        await process.stop()
        assert (await process.wait()).code == 4


@pytest.mark.asyncio
async def test_the_streams_end_with_the_agent_though_an_orphan_lives(tmp_path: Path) -> None:
    """Our rule: the supervisor holds no end of the agent's streams, so their end means what it says.

    The kernel may close the agent's stdout an instant before its stdin; a held stdin would fill, and the bound end the test.
    """
    script = "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $!"
    process = await LocalLauncher().start(Command(("sh", "-c", script), str(tmp_path), {}, SHORT))
    async with asyncio.timeout(BOUND):
        orphan = int(await everything(process))
        assert hostile_trees.start_time(orphan)
        with pytest.raises(AgentDied):
            while True:
                await process.write(b"x" * 4096)
        await process.stop()
        assert not hostile_trees.start_time(orphan)


@pytest.mark.asyncio
async def test_repeated_cancellation_does_not_stop_the_ending(tmp_path: Path) -> None:
    """Our rule: however often the caller of ``stop`` is cancelled, the ending goes on and a later call awaits it."""
    async with running("term_ignorer", tmp_path) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 2)
        for _ in range(5):
            task = asyncio.ensure_future(process.stop())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.gather(process.stop(), process.stop())
        assert hostile_trees.living(tree) == []


@pytest.mark.asyncio
async def test_whoever_awaits_an_end_is_cancelled_only_behind_it(tmp_path: Path) -> None:
    """Our rule: an end that has to be seen through is, however often its caller is cancelled meanwhile."""
    async with running("term_ignorer", tmp_path) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 2)
        ending = asyncio.ensure_future(stopped(process))
        async with asyncio.timeout(BOUND):
            while not ending.done():
                await asyncio.wait({ending}, timeout=0.01)
                ending.cancel()
        assert ending.cancelled()
        assert hostile_trees.living(tree) == []


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    """Our rule: cancelled at any moment of its start, a process is gone when the cancellation arrives."""
    canary = uuid.uuid4().hex
    launcher = LocalLauncher()
    for pause in (0.0, 0.005, 0.02, 0.05):
        command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {"TREE": canary}, SHORT)
        task = asyncio.ensure_future(launcher.start(command))
        await asyncio.sleep(pause)
        if not task.cancel():
            await (await task).stop()
            continue
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).stop()
        assert hostile_trees.carrying(canary) == []


@pytest.mark.asyncio
async def test_an_agent_that_ended_with_everything_is_quiescent_without_stop(tmp_path: Path) -> None:
    """Our rule: the supervisor leaves by itself when nothing is left, and what was said can still be read."""
    process = await LocalLauncher().start(Command(("sh", "-c", "echo out; echo err >&2; exit 5"), str(tmp_path)))
    async with asyncio.timeout(BOUND):
        assert (await process.wait()).code == 5
        assert await everything(process) == b"out\n"
        await process.stop()
    assert process.stderr_tail() == "err\n"


@pytest.mark.asyncio
async def test_blocked_and_ignored_signals_of_the_worker_change_nothing(tmp_path: Path) -> None:
    """Our rule: what the worker blocks or ignores is inherited by no part of the tree: an end is noticed, SIGTERM works."""
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1})
    try:
        process = await LocalLauncher().start(Command(("sleep", "60"), str(tmp_path), {}, Graces(0.0, 20.0, 5.0)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, old)
    async with asyncio.timeout(BOUND):
        await process.stop()
        assert (await process.wait()).code == -signal.SIGTERM


@pytest.mark.asyncio
async def test_a_killed_agent_reports_its_signal(tmp_path: Path) -> None:
    """Our rule: an exit code below zero is minus the signal."""
    async with running("plain", tmp_path) as process:
        os.kill(process.pid, signal.SIGSEGV)
        async with asyncio.timeout(BOUND):
            assert (await process.wait()).code == -signal.SIGSEGV


@pytest.mark.asyncio
async def test_a_group_that_is_not_ours_is_ended_by_pid(tmp_path: Path) -> None:
    """Our rule: ``terminate_process_group`` ends a leader, its group and their descendants, and a pid that is gone is fine."""
    leader = subprocess.Popen(  # noqa: ASYNC220
        hostile_trees.command("setsid", tmp_path), start_new_session=True
    )
    tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, 3)
    await terminate_process_group(leader.pid, SHORT)
    assert hostile_trees.living(tree) == []
    leader.wait()
    await terminate_process_group(leader.pid, SHORT)


# ------------------------------------------------------------------ starting


@pytest.mark.parametrize(
    ("argv", "cwd", "code"),
    [
        (("no-such-command-anywhere",), ".", "coding.agent_not_found"),
        ((), ".", "coding.agent_not_found"),
        (("./plain-file",), ".", "coding.agent_not_executable"),
        (("./broken-interpreter",), ".", "coding.agent_not_executable"),
        (("cat",), "missing", "coding.workspace_missing"),
        (("cat",), "plain-file", "coding.workspace_not_directory"),
        (("cat", "x" * 4_000_000), ".", "coding.agent_start_failed"),
        (("cat", "nul\0"), ".", "coding.agent_start_failed"),
    ],
)
@pytest.mark.asyncio
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    argv: tuple[str, ...], cwd: str, code: str, tmp_path: Path
) -> None:
    """Our rule: each way a start can fail has its own code, and no process or descriptor stays."""
    (tmp_path / "plain-file").write_text("text")
    broken = tmp_path / "broken-interpreter"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    before = descriptors()
    with pytest.raises(LaunchError) as caught:
        await LocalLauncher().start(Command(argv, str(tmp_path / cwd)))
    assert caught.value.code == code
    assert descriptors() == before


@pytest.mark.asyncio
async def test_a_start_without_descriptors_fails_clean(tmp_path: Path) -> None:
    """Our rule: wherever in the start descriptors run out, it is one error, and nothing stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    texts.catalogue(texts.DEFAULT_LANGUAGE)  # as in every worker that has run a while; reading it takes a descriptor
    before = descriptors()
    failed = 0
    for spare in range(14):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
        try:
            process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
        except LaunchError as exc:
            assert exc.code == "coding.agent_start_failed"
            assert exc.params["reason"] == "EMFILE"
            failed += 1
        else:
            await process.stop()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
    assert 0 < failed < 14


@pytest.mark.asyncio
async def test_an_agent_starts_as_if_nobody_was_in_between(tmp_path: Path) -> None:
    """Our rule: own session and group, default signals, nothing blocked, only descriptors 0 to 2, the asked-for directory."""
    script = "pwd; cut -d' ' -f 1,5,6 /proc/$$/stat; grep Sig[IB] /proc/self/status; exec ls /proc/$$/fd"
    process = await LocalLauncher().start(Command(("sh", "-c", script), str(tmp_path), {}, SHORT))
    async with asyncio.timeout(BOUND):
        cwd, ids, blocked, ignored, *fds = (await everything(process)).decode().splitlines()
        await process.stop()
    assert cwd == str(tmp_path.resolve())
    assert fds == ["0", "1", "2", "3"], "3 is the listing's own"
    assert ids.split() == [str(process.pid)] * 3
    assert (int(blocked.split()[1], 16), int(ignored.split()[1], 16)) == (0, 0)


@pytest.mark.asyncio
async def test_agents_started_together_do_not_hold_each_other_open(tmp_path: Path) -> None:
    """Our rule: closing one agent's stdin ends that one while twenty others, started at the same time, live on."""
    launcher = LocalLauncher()
    processes = await asyncio.gather(*(launcher.start(Command(("cat",), str(tmp_path))) for _ in range(20)))
    async with asyncio.timeout(BOUND):
        for index, process in enumerate(processes):
            process.close_stdin()
            assert await everything(process) == b""
            assert (await process.wait()).code == 0
            if index + 1 < len(processes):
                await processes[index + 1].write(b"alive\n")
                assert await processes[index + 1].read() == b"alive\n"
        await asyncio.gather(*(process.stop() for process in processes))


# ------------------------------------------------------------------ streams


@pytest.mark.asyncio
async def test_a_line_of_40_mib_arrives_whole(tmp_path: Path) -> None:
    """Our rule: nothing between agent and reader has an idea of lines, so their length does not matter."""
    async with running("big_line", tmp_path) as process, asyncio.timeout(60):
        total = 0
        while data := await process.read(1 << 20):
            total += len(data)
        assert total == hostile_trees.LINE + 1


@pytest.mark.asyncio
async def test_an_unread_agent_is_held_back(tmp_path: Path) -> None:
    """Our rule: what is not read stays in the agent: its writer blocks on a full pipe, and nothing is lost by that."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with running("big_line", tmp_path) as process, asyncio.timeout(60):
        assert await process.read(1) == b"x"
        stat = Path(f"/proc/{process.pid}/wchan")
        while "pipe" not in stat.read_text() and hostile_trees.start_time(process.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert hostile_trees.start_time(process.pid)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


@pytest.mark.asyncio
async def test_a_flood_of_stderr_blocks_nobody_and_leaves_its_end(tmp_path: Path) -> None:
    """Our rule: 50 MB of stderr pass, stdout stays usable, and exactly the last lines are kept."""
    async with running("stderr_flood", tmp_path) as process, asyncio.timeout(60):
        assert await process.read() == b"done\n"
        await process.stop()
        tail = process.stderr_tail()
        assert tail.endswith("the very last words\n")
        assert len(tail) <= limits.STDERR_TAIL_BYTES
        assert set(tail.splitlines()[:-1]) == {"e" * 99}, "a line cut at its start is not shown"


@pytest.mark.asyncio
async def test_a_writer_whom_nobody_reads_is_released_by_stop(tmp_path: Path) -> None:
    """Our rule: 4 MB into an agent that never reads block neither ``stop`` nor the writer for ever."""
    async with running("deaf", tmp_path) as process, asyncio.timeout(BOUND):
        writer = asyncio.ensure_future(process.write(b"x" * 4_000_000))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writer.done()
        await process.stop()
        with pytest.raises(AgentDied):
            await writer


@pytest.mark.asyncio
async def test_a_cancelled_write_does_not_tear_the_next_message(tmp_path: Path) -> None:
    """Our rule: a message that was begun is finished before the next one, so the agent never sees half of one."""
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    big = b"a" * 1_000_000 + b"\n"
    async with asyncio.timeout(BOUND):
        writer = asyncio.ensure_future(process.write(big))
        for _ in range(10):
            await asyncio.sleep(0)
        writer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writer
        reader = asyncio.ensure_future(everything(process))
        await process.write(b"second\n")
        process.close_stdin()
        assert await reader == big + b"second\n"
        await process.stop()


@pytest.mark.asyncio
async def test_concurrent_writes_do_not_mix(tmp_path: Path) -> None:
    """Our rule: each message is one piece, whoever writes it."""
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    messages = [bytes([65 + index]) * 200_000 + b"\n" for index in range(8)]
    async with asyncio.timeout(BOUND):
        reader = asyncio.ensure_future(everything(process))
        await asyncio.gather(*(process.write(message) for message in messages))
        process.close_stdin()
        assert sorted((await reader).splitlines(keepends=True)) == messages
        await process.stop()


@pytest.mark.asyncio
async def test_a_cancelled_read_loses_nothing(tmp_path: Path) -> None:
    """Our rule: bytes leave the pipe only into a read that returns."""
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    async with asyncio.timeout(BOUND):
        for number in range(20):
            reader = asyncio.ensure_future(process.read())
            await asyncio.sleep(0)
            await process.write(b"%d\n" % number)
            reader.cancel()
            data = b""
            with contextlib.suppress(asyncio.CancelledError):
                data = await reader
            assert (data or await process.read()) == b"%d\n" % number
        await process.stop()


@pytest.mark.asyncio
async def test_writing_to_a_dead_agent_tells_how_it_ended(tmp_path: Path) -> None:
    """Our rule: the error names the exit code and shows the last words."""
    process = await LocalLauncher().start(Command(hostile_trees.command("exit_at_once", tmp_path), str(tmp_path)))
    async with asyncio.timeout(BOUND):
        await process.wait()
        with pytest.raises(AgentDied) as caught:
            await process.write(b"hello\n")
        await process.stop()
    assert caught.value.code == "coding.agent_exited"
    assert caught.value.params == {"code": "7"}
    assert "cannot work today" in caught.value.detail


# ------------------------------------------------------------------ secrets


@pytest.mark.asyncio
async def test_secrets_reach_the_agent_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Our rule: a secret is in the agent's environment only: on no command line, not at the supervisor, in no log."""
    caplog.set_level("DEBUG")
    secret = f"canary-{uuid.uuid4().hex}"
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {"SERVICE_KEY": secret}, SHORT))
    supervisor = supervisor_of(process.pid)
    assert secret.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert secret.encode() not in Path(f"/proc/{supervisor}/environ").read_bytes()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in cmdline.read_bytes()
    await process.stop()
    assert secret not in repr(process) + str(vars(Command)) + caplog.text


@pytest.mark.asyncio
async def test_an_end_that_is_not_confirmed_is_no_success_until_its_proof(tmp_path: Path) -> None:
    """Our rule: what the supervisor could not end is an error of ``stop``, and none any more once it has ended after all."""
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    process._report({"event": "unconfirmed", "pids": [process.pid]})
    with pytest.raises(ProcessCleanupUnconfirmed):
        await process.stop()
    async with asyncio.timeout(BOUND):  # the end of its stdin ends it
        while True:
            with contextlib.suppress(ProcessCleanupUnconfirmed):
                await process.stop()
                break
            await asyncio.sleep(0.02)
    assert hostile_trees.start_time(process.pid) == ""


@pytest.mark.asyncio
async def test_a_supervisor_has_nothing_of_the_worker_s_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: whatever is in the worker's environment stays there; not even the process in between gets it."""
    monkeypatch.setenv("LANGBOT_CANARY", f"canary-{uuid.uuid4().hex}")
    process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
    for pid in (process.pid, supervisor_of(process.pid)):
        assert b"canary-" not in Path(f"/proc/{pid}/environ").read_bytes()
    await process.stop()


@pytest.mark.asyncio
async def test_stderr_hides_secrets_in_every_usual_form(tmp_path: Path) -> None:
    """Our rule: values of the given environment, their JSON form, lines of key files and URL credentials become ``***``."""
    key = "-----BEGIN KEY-----\nabcdefghijklmnopqrstuvwxyz0123\n-----END KEY-----"
    env = {"A_TOKEN": 'to"ken-value-1', "PEM": key, "FLAG": "1", "MODE": "debug", "PATH": "/usr/bin:/bin"}
    script = (
        "import os,json,sys;e=os.environ;sys.stderr.write('plain '+e['A_TOKEN']+'\\njson '+json.dumps(e['A_TOKEN'])+'\\nline '"
        "+e['PEM'].splitlines()[1]+'\\nurl http://me:pass@host/\\nflag 1 debug /usr/bin:/bin\\n\\x1b[31mred\\x1b[0m\\n')"
    )
    process = await LocalLauncher().start(Command((sys.executable, "-c", script), str(tmp_path), env, SHORT))
    async with asyncio.timeout(BOUND):
        await process.wait()
        await process.stop()
    assert process.stderr_tail().splitlines() == [
        "plain ***",
        'json "***"',
        "line ***",
        "url http://***@host/",
        "flag 1 debug /usr/bin:/bin",
        "red",
    ]


@pytest.mark.asyncio
async def test_a_secret_cut_by_the_tail_does_not_show_its_rest(tmp_path: Path) -> None:
    """Our rule: where the kept tail begins in the middle of a secret, its rest is not shown either."""
    secret = "S3" + "cr3t" * 20
    script = f"import os,sys;sys.stderr.write(os.environ['K']*{limits.STDERR_TAIL_BYTES // 82 + 9});sys.stderr.write('end')"
    process = await LocalLauncher().start(Command((sys.executable, "-c", script), str(tmp_path), {"K": secret}, SHORT))
    async with asyncio.timeout(BOUND):
        await process.wait()
        await process.stop()
    assert "cr3t" not in process.stderr_tail().replace("***", "")
    assert process.stderr_tail().endswith("end")


# ------------------------------------------------------------------ what it costs


def test_a_supervisor_is_small_and_quick() -> None:
    """Our bound: at most 25 ms over a bare Python to start and end an agent, and 12 MB of memory.

    Processor time, so that other work on the machine does not decide; medians of nine, taken alternately.
    """
    bare, supervised, sizes = [], [], []
    for _ in range(9):
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], env={})
        bare.append(spent(child))
        with supervisor({"argv": ["sleep", "60"], "executable": "/bin/sleep"}) as (control, child):
            assert receive(control)["event"] == "started"
            sizes.append(memory(child.pid))
            control.close()
            supervised.append(spent(child))
    print(f"bare {statistics.median(bare):.4f} s, supervised {statistics.median(supervised):.4f} s, {max(sizes)} bytes")
    assert statistics.median(supervised) - statistics.median(bare) <= 0.025
    assert max(sizes) <= 12_000_000


def spent(child: subprocess.Popen[bytes]) -> float:
    """Wait for the child; the processor time of it and of all it waited for."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def memory(pid: int) -> int:
    """Peak resident bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such process")


@contextlib.contextmanager
def supervisor(
    spec: dict[str, Any], interpreter: str = sys.executable
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """The script by itself, spoken to over its control channel."""
    ours, theirs = socket.socketpair()
    with ours:
        child = subprocess.Popen(
            [interpreter, "-I", "-S", process_supervisor.__file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={},
        )
        theirs.close()
        whole = {"cwd": "/", "env": {}, "graces": {"eof": 0, "term": 0.2, "kill": 5, "settle": 0.01}, "marker": ["M", "1"]}
        body = json.dumps(whole | spec).encode()
        with child:
            try:
                ours.settimeout(BOUND)
                ours.sendall(len(body).to_bytes(4, "big") + body)
                yield ours, child
            finally:
                ours.close()


def receive(control: socket.socket) -> dict[str, Any]:
    """One report; an empty one at the end of the channel."""
    head = control.recv(4, socket.MSG_WAITALL)
    if not head:
        return {}
    report: dict[str, Any] = json.loads(control.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    return report


@pytest.mark.asyncio
async def test_fifty_rounds_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    """Our rule: a started and stopped process costs nothing afterwards, and no process has a thread of its own."""

    async def once() -> None:
        process = await LocalLauncher().start(Command(("cat",), str(tmp_path), {}, SHORT))
        assert threading.active_count() == threads
        await process.stop()

    threads = threading.active_count()
    await once()
    before = descriptors()
    for _ in range(50):
        await once()
    assert descriptors() == before
    assert threading.active_count() == threads


COSTING_WORKER = """
import asyncio, resource, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from pkg.launch import Command, Graces, LocalLauncher

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

async def main():
    command = Command(("cat",), "/", {}, Graces(2, 2, 10))
    processes = [await LocalLauncher().start(command)]
    before = resident()
    processes += [await LocalLauncher().start(command) for _ in range(50)]
    print(resident() - before)
    await asyncio.gather(*(process.stop() for process in processes))

asyncio.run(main())
"""


def test_fifty_live_processes_cost_the_worker_little() -> None:
    """Our bound: 100 sessions cost the worker at most 64 MB; the processes' own share, a sixteenth, is measured for half."""
    package = str(Path(process_supervisor.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", COSTING_WORKER, package], capture_output=True, text=True, timeout=100, check=True
    )
    print(f"{done.stdout.strip()} bytes for 50 processes")
    assert int(done.stdout) <= 2_000_000


# ------------------------------------------------------------------ the script by itself


PYTHONS = sorted(
    path for path in Path.home().glob(".pyenv/versions/3.*/bin/python3") if int(path.parts[-3].split(".")[1]) >= 7
) or [Path(sys.executable)]


@pytest.mark.parametrize("interpreter", PYTHONS, ids=lambda path: path.parts[-3])
def test_the_script_runs_on_every_python_of_this_machine(interpreter: Path) -> None:
    """Our rule: from Python 3.7 on, because a remote machine runs the same script with whatever it has."""
    with supervisor({"argv": ["sleep", "60"], "executable": "/bin/sleep"}, str(interpreter)) as (control, _):
        started = receive(control)
        assert (started["event"], started["method"]) == ("started", "subreaper")
        control.sendall(b"\0\0\0\x0f" + b'{"verb":"stop"}')
        assert receive(control) == {"event": "exited", "code": -signal.SIGTERM}
        assert receive(control)["event"] == "quiescent"
        assert receive(control) == {}


def test_a_closed_channel_before_the_spec_starts_nothing() -> None:
    """Our rule: a parent that dies before it said anything leaves a supervisor that simply ends."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", process_supervisor.__file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
    ) as child:
        theirs.close()
        ours.close()
        assert child.wait(BOUND) == 0


def test_a_closed_channel_alone_ends_the_tree() -> None:
    """Our rule: the control channel is the authority; the parent need not die for its end to count."""
    with supervisor({"argv": ["sleep", "60"], "executable": "/bin/sleep"}) as (control, child):
        agent = receive(control)["pid"]
        control.close()
        assert child.wait(BOUND) == 0
        assert hostile_trees.start_time(agent) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_supervisor_ends_its_tree(number: signal.Signals) -> None:
    """Our rule: whoever ends the supervisor gently ends the tree with it."""
    with supervisor({"argv": ["sleep", "60"], "executable": "/bin/sleep"}) as (control, child):
        agent = receive(control)["pid"]
        child.send_signal(number)
        assert receive(control)["event"] == "exited"
        assert receive(control)["event"] == "quiescent"
        assert hostile_trees.start_time(agent) == ""


def test_the_parent_death_signal_alone_ends_nothing_while_the_parent_lives() -> None:
    """The kernel's rule and ours: it also fires when a forking thread ends, so a supervisor whose parent lives ignores it."""
    with supervisor({"argv": ["sleep", "60"], "executable": "/bin/sleep"}) as (control, child):
        agent = receive(control)["pid"]
        child.send_signal(process_supervisor.PARENT_DEATH)
        assert not select.select([control], [], [], 0.3)[0]
        assert hostile_trees.start_time(agent)


def test_a_later_stop_shortens_what_was_granted() -> None:
    """Our rule: who is in a hurry may say so while the ending is under way."""
    with supervisor(
        {"argv": ["sleep", "60"], "executable": "/bin/sleep", "graces": {"eof": 60, "term": 60, "kill": 5, "settle": 0.01}}
    ) as (control, _):
        assert receive(control)["event"] == "started"
        for graces in ({}, {"eof": 0}):
            body = json.dumps({"verb": "stop", "graces": graces}).encode()
            control.sendall(len(body).to_bytes(4, "big") + body)
        assert receive(control)["event"] == "exited"
        assert receive(control)["event"] == "quiescent"


def test_the_process_table_of_ps_is_understood() -> None:
    """Our rule: where there is no ``/proc`` the same table comes from ``ps``, start times and marked environments included."""
    env = {"PATH": "/usr/bin:/bin", "M": "1234"}
    with subprocess.Popen(["sleep", "60"], env=env, start_new_session=True) as child:
        try:
            table = process_supervisor.ps_table("M=1234")
        finally:
            child.kill()
    assert table[child.pid].marked
    assert table[child.pid].parent == os.getpid()
    assert table[child.pid].group == child.pid
    assert len(table[child.pid].start) >= 20
    assert not table[os.getpid()].marked


def test_a_reused_pid_is_not_signalled() -> None:
    """Our rule: a pid counts only together with its start time."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            process = process_supervisor.read_process(child.pid)
            assert process is not None
            process.start = str(int(process.start) - 1)
            assert not process_supervisor.send_signal(process, signal.SIGKILL)
            assert hostile_trees.start_time(child.pid)
        finally:
            child.kill()


def test_the_orphan_reaper_takes_only_old_foreign_zombies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: by pid, never one of ours, never at first sight, never a child in our own session."""
    monkeypatch.setattr(limits, "ORPHAN_AGE", 0.0)
    # A child that somebody else has waited for has the exit code 0 for its owner.
    children = [subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=index < 2) for index in range(3)]
    for child in children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reaper = OrphanReaper(lambda: [children[0].pid], adopts=True)
    assert reaper.reap() == (children[1].pid,)
    assert [child.wait() for child in children] == [3, 0, 3]
    assert OrphanReaper(list, adopts=False).reap() == ()
