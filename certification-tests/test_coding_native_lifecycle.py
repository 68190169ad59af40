"""Agents in the real processes of their package: what was cancelled is gone, accounts stay apart, a session has one writer.

First all three packages with their scripted agents (local protocol fixtures): through their own drivers in a process of their
own (``coding_process_worker.py``), under their own daemon programs, and built, in real workers of the SDK's runtime. Then the
real Claude Code and the real Codex with accounts of their own; their models are local protocol fixtures. Nothing of a sibling
package is imported here, so that this process stays the core's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import resource
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pkg import texts
from pkg.agent_api import Prompt, SessionSpec
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.errors import CodingError, ProcessCleanupUnconfirmed
from pkg.remote_session import RemoteDriver
from testkit import daemon_rig, hostile_trees
from testkit.anthropic_fixture import anthropic_fixture
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.daemon_sites import command_lines, files_below, listening, plugin_form, private, until_shown
from testkit.process_worker import WorkerRefused, process_worker
from testkit.relay_rig import free_port
from testkit.responses_fixture import ResponsesFixture, codex_home, responses_fixture
from testkit.run_harness import Outcome
from testkit.scripted_kinds import KINDS, Kind
from testkit.sdk_websocket import quiet_port
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]
real_codex = pytest.mark.real_codex
every_package = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))

CODEX = "CodexAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
PLACES = ("local", "daemon")
BUSY = texts.render("coding.session_busy", "en_US")
FRESH = texts.render("session.lost_history", "en_US")


class Stored(dict[str, Any]):
    """A host's store in which every conversation has the same session."""

    def __init__(self, session_id: str) -> None:
        super().__init__()
        self._session_id = session_id

    def get(self, key: str, default: Any = None) -> Any:
        """The session, whatever is asked for."""
        return {"value": self._session_id}


async def until_open(port: int) -> None:
    """Wait until a hub listens: a daemon that comes earlier waits longer and longer."""
    async with asyncio.timeout(BOUND):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)


class Account:
    """One installation and the account of Codex that it works with: signed in by the real program, with a key of its own."""

    def __init__(self, uid: str, place: str, base: Path, program: Path) -> None:
        """``base`` is a directory of its own."""
        self.uid = uid
        self.key = f"sk-canary-{uid}-{secrets.token_hex(8)}"
        self.place = place
        self.base = base
        self.program = program
        self.home = base / "home"
        self.daemon: DaemonProcess | None = None
        self._starting: asyncio.Future[None] | None = None
        self.worker: SdkWorker
        self.model: ResponsesFixture
        self.environment: dict[str, str] = {}
        self._runs = 0
        self._port = free_port()
        self._token = secrets.token_urlsafe(32)
        if place == "daemon":
            url = f"ws://127.0.0.1:{self._port}"
            command = (str(program),)
            self.machine = DaemonHome(base / "machine", url, token=self._token, driver="codex", command=command, package=CODEX)
            self.workspace = self.machine.workspace
        else:
            self.workspace = base / "workspace"
            self.workspace.mkdir(parents=True)

    def sign_in(self, model: ResponsesFixture) -> None:
        """Have the real program sign in, and the model take the key."""
        model.keys.add(self.key)
        self.model = model
        self.environment = codex_home(self.home, model.url, key=self.key, sign_in=str(self.program))

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin form."""
        return plugin_form(self._port, self._token) if self.place == "daemon" else {}

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form; ``fields`` with underscores for hyphens."""
        form: dict[str, Any] = {"location": self.place, "langbot-assets-enabled": False, "keep-warm": 0}
        if self.place == "daemon":
            form |= {"daemon-id": DAEMON_ID}
        else:
            named = {"command": str(self.program), "workspace": str(self.workspace), "env-json": json.dumps(self.environment)}
            form |= named
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def begin(self) -> None:
        """Start the daemon, where there is one, as soon as the hub is there, which the next run starts."""
        if self.place == "daemon":
            self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        await until_open(self._port)
        # It finds the account as a person's own: below HOME.
        self.daemon = await daemon_rig.start(self.machine, HOME=str(self.home), TMPDIR=self.environment["TMPDIR"])

    async def end(self) -> None:
        """End the daemon."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self.daemon is not None and self.daemon.process.returncode is None:
            await self.daemon.terminate()

    @property
    def root(self) -> int:
        """The process that the agents of this account are below."""
        return self.worker.pid(self.uid) if self.daemon is None else self.daemon.pid

    def stream(self, text: str, **fields: Any) -> Any:
        """The results of one run as they come."""
        self._runs += 1
        return self.worker.stream(text, uid=self.uid, run_id=f"{self.uid}{self._runs}", config=self.form(**fields))

    async def run(self, text: str, **fields: Any) -> Outcome:
        """One run to its end."""
        async with asyncio.timeout(BOUND):
            return Outcome([result async for result in self.stream(text, **fields)])

    async def killed(self) -> None:
        """SIGKILL to everything of ours that serves this account, and all of it at work again, in other processes."""
        left = descendants(self.root)
        if self.daemon is not None:
            await self.daemon.kill()
        old = self.worker.kill(self.uid)
        assert await gone(left, 30.0)
        await self.worker.ready(self.uid, other_than=old)
        self.begin()

    @property
    def stored(self) -> str:
        """The session that the host has stored."""
        (value,) = self.worker.host(self.uid).state.values()
        session_id: str = value["value"]
        return session_id

    @property
    def rollouts(self) -> dict[str, bytes]:
        """The account's sessions as Codex keeps them."""
        return {path.name: path.read_bytes() for path in (self.home / ".codex" / "sessions").rglob("*.jsonl")}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory outside of temporary ones, which Codex leaves writable."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="lifecycle-")).resolve()
    yield made
    shutil.rmtree(made)


@contextlib.asynccontextmanager
async def two_accounts(
    place: str, directory: Path, program: Path, arrange: Callable[[Account, Account], None] = lambda one, other: None
) -> AsyncIterator[tuple[Account, Account]]:
    """Two installations of the package, each in a worker of its own and with an account of its own.

    ``arrange`` may change how the accounts lie on the disk, when both are signed in and nothing runs yet.
    """
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(responses_fixture())
        model.keys.clear()
        accounts = Account("A", place, directory / "a", program), Account("B", place, directory / "b", program)
        for account in accounts:
            await asyncio.to_thread(account.sign_in, model)
        arrange(*accounts)
        forms = {account.uid: account.plugin for account in accounts}
        environment = private(directory / "worker")
        worker = await stack.enter_async_context(
            sdk_worker(built(CODEX), directory / "runtime", name=CODEX, installations=forms, environment=environment)
        )
        for account in accounts:
            account.worker = worker
            stack.push_async_callback(account.end)
            account.begin()
        yield accounts
        left = functools.reduce(dict.__or__, (descendants(account.root) for account in accounts))
        for account in accounts:
            await account.end()
            await worker.revoke(account.uid)
    assert await gone(left, 30.0)


# ------------------------------------------------------------------ every package, its own driver


def tree_beside(kind: Kind, directory: Path) -> tuple[Path, Path]:
    """The agent's program, which starts a stubborn tree beside itself, and where that announces itself."""
    trees = directory / "trees"
    trees.mkdir(parents=True)
    return kind.write(directory / "agent", beside=hostile_trees.command("setsid", trees)), trees


async def announced(trees: Path) -> dict[int, str]:
    """The tree's processes, once all have come up: a child, which ignores SIGTERM, and those below it in other sessions."""
    return await asyncio.to_thread(hostile_trees.complete, trees, hostile_trees.KINDS["setsid"])


@every_package
@pytest.mark.parametrize("times", [1, 7])
async def test_native_cancel_awaits_child_and_grandchild(kind: Kind, times: int, tmp_path: Path) -> None:
    """Our rule: in the middle of a turn, a cancellation is over when the agent and everything it started is gone, not before.

    However often it is repeated meanwhile; and the same process opens the next session as if nothing had been.
    """
    command, trees = tree_beside(kind, tmp_path)
    workspace = str(tmp_path / "workspace")
    Path(workspace).mkdir()
    async with process_worker(kind.package, private(tmp_path / "own")) as worker:
        hello = await worker.ask("hello")
        assert (hello["driver"], hello["pid"]) == (kind.driver, worker.pid)
        await worker.ask("start", session="s", form=kind.local(command, workspace), workspace=workspace)
        await worker.ask("prompt", session="s", text=f"say begun\n{kind.hold(tmp_path / 'never')}")
        await worker.said("s", "begun")
        processes = {**await announced(trees), **descendants(worker.pid)}
        assert len(processes) >= 4
        assert await worker.ask("cancel", session="s", times=times) == {"ended": True}
        assert hostile_trees.living(processes) == []
        again = kind.write(tmp_path / "again")
        await worker.ask("start", session="t", form=kind.local(again, workspace), workspace=workspace)
        await worker.ask("prompt", session="t", text="say whole")
        await worker.said("t", "whole")
        await worker.ask("close", session="t")
        assert descendants(worker.pid) == {}


def supervisors(pid: int) -> dict[int, str]:
    """The supervisors that a process has: pid to start time."""
    return {child: start for child, start in descendants(pid).items() if b"process_supervisor" in command_lines([child])}


def without_descriptors(pid: int) -> Callable[[], None]:
    """Let a process open nothing more, so that it can start no second supervisor; returns how to let it again."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, hard))
    return lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard)) and None


@every_package
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_native_end_that_nobody_can_confirm_is_never_acknowledged(
    kind: Kind, number: signal.Signals, tmp_path: Path
) -> None:
    """Our rule: where an agent's supervisor was killed, or stays stopped, and no other can look, no end is acknowledged.

    Its tree lives on. Neither who cancels, however often, nor who closes, nor who asks once more is told that it has ended.
    """
    command, trees = tree_beside(kind, tmp_path)
    workspace = str(tmp_path / "workspace")
    Path(workspace).mkdir()
    async with process_worker(kind.package, private(tmp_path / "own")) as worker:
        for session in ("cancelled", "closed"):
            await worker.ask("start", session=session, form=kind.local(command, workspace), workspace=workspace)
            await worker.ask("prompt", session=session, text=f"say begun\n{kind.hold(tmp_path / 'never')}")
            await worker.said(session, "begun")
        tree = await asyncio.to_thread(hostile_trees.complete, trees, 2 * hostile_trees.KINDS["setsid"])
        started = {**tree, **descendants(worker.pid)}
        over = supervisors(worker.pid)
        assert len(over) == 2
        again = without_descriptors(worker.pid)
        try:
            for pid in over:
                os.kill(pid, number)
            asking = [
                asyncio.ensure_future(worker.ask("cancel", session="cancelled", times=7)),
                asyncio.ensure_future(worker.ask("close", session="closed")),
            ]
            while (await asyncio.wait(asking, timeout=0.01))[1]:
                for pid in hostile_trees.living(over):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)  # it was woken
            said = [type(each.exception()) for each in asking]
            assert said == [WorkerRefused, WorkerRefused]
            assert {str(each.exception()) for each in asking} == {"cleanup unconfirmed"}
            left = hostile_trees.living(tree)
            assert left, "nothing was left, so that the end could have been confirmed"
            for session in ("cancelled", "closed"):
                with pytest.raises(WorkerRefused, match="cleanup unconfirmed"):
                    await worker.ask("close", session=session)
                await worker.ask("forget", session=session)
        finally:
            again()
            for pid in hostile_trees.living({**started, **hostile_trees.announced(trees)}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert await gone({**started, **hostile_trees.announced(trees)}, 30.0)
        assert descendants(worker.pid) == {}
        whole = kind.write(tmp_path / "whole")
        await worker.ask("start", session="next", form=kind.local(whole, workspace), workspace=workspace)
        await worker.ask("close", session="next")
        assert descendants(worker.pid) == {}


@every_package
async def test_workspace_defaults(kind: Kind, tmp_path: Path) -> None:
    """Our rule: an isolated installation works in ``/data/workspace``, made for it; elsewhere the established defaults stay.

    A dedicated worker has the current directory, and what is configured counts everywhere but in the pool, which has none.
    ``/data`` is stood in for by a directory here; a real jail has the real one.
    """
    data, mine = tmp_path / "data", tmp_path / "mine"
    data.mkdir()
    mine.mkdir()
    isolated = {"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/home"}
    async with process_worker(kind.package, isolated) as worker:
        found = await worker.ask("workspace", data=str(data))
        assert found == {"shape": "jail", "workspace": str(data / "workspace"), "default_data": "/data"}
        assert (data / "workspace").stat().st_mode & 0o777 == 0o700
        assert (await worker.ask("workspace", data=str(data), configured=str(mine)))["workspace"] == str(mine)
    async with process_worker(kind.package, {"LANGBOT_PLUGIN_RUNTIME_PROFILE": "oss_dev"}, cwd=mine) as worker:
        found = await worker.ask("workspace", data=str(data))
        assert (found["shape"], found["workspace"]) == ("dedicated", str(mine))
        assert (await worker.ask("workspace", configured=str(data)))["workspace"] == str(data)
    async with process_worker(kind.package, {"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/tmp"}) as worker:
        for configured in ("", str(mine)):
            with pytest.raises(WorkerRefused, match=r"coding\.local_in_pool"):
                await worker.ask("workspace", data=str(data), configured=configured)


# ------------------------------------------------------------------ every package, its own daemon


@contextlib.asynccontextmanager
async def machine(kind: Kind, command: Path, directory: Path) -> AsyncIterator[tuple[AgentRuntimeDaemonHub, DaemonHome]]:
    """A hub, and a workstation for the package's own daemon program."""
    async with daemon_rig.hub_and_home(directory) as (hub, _):
        place = directory / "machine"
        yield hub, DaemonHome(place, hub.endpoint, driver=kind.driver, command=(str(command),), package=kind.package)


def remote(hub: AgentRuntimeDaemonHub, kind: Kind) -> RemoteDriver:
    """The driver for the workstation's agent."""
    return RemoteDriver(hub, DAEMON_ID, "scripted", kind.driver, connect_timeout=BOUND)


@every_package
async def test_bundled_daemon_acknowledges_only_after_group_exit(kind: Kind, tmp_path: Path) -> None:
    """Our rule: whoever ends a job hears of it when the whole tree on the machine is gone, however often cancelled."""
    command, trees = tree_beside(kind, tmp_path / "first")
    async with machine(kind, command, tmp_path) as (hub, home), daemon_rig.running(home) as daemon:
        for times in (0, 7):
            for file in trees.iterdir():
                file.unlink()
            session = await remote(hub, kind).open(SessionSpec(command=(), cwd=""))
            await session.prompt(Prompt(kind.hold(tmp_path / "never")))
            processes = {**await announced(trees), **descendants(daemon.pid)}
            closing = asyncio.ensure_future(session.close())
            for _ in range(times):
                await asyncio.wait({closing}, timeout=0.02)
                closing.cancel()
            await asyncio.wait({closing}, timeout=BOUND)
            assert closing.done()
            assert hostile_trees.living(processes) == []
            assert descendants(daemon.pid) == {}
            if not closing.cancelled():
                closing.result()


@every_package
async def test_cleanup_failure_never_becomes_success(kind: Kind, tmp_path: Path) -> None:
    """Our rule: a job whose processes are not proven gone is never acknowledged, and its daemon gets no other job till it is.

    What may be the job's is another's process here, so that no daemon may end it and none can prove it is nothing.
    """
    command = kind.write(tmp_path / "agent")
    async with machine(kind, command, tmp_path) as (hub, home):
        async with daemon_rig.running(home) as daemon:
            session = await remote(hub, kind).open(SessionSpec(command=(), cwd=""))
            await daemon.kill()
        stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        try:
            (table,) = home.state.rglob("jobs.json")
            kept = json.loads(table.read_text())
            for entry in kept["jobs"].values():
                entry["processes"] = [[stranger.pid, hostile_trees.start_time(stranger.pid)]]
            table.write_text(json.dumps(kept))
            async with daemon_rig.running(home):
                async with asyncio.timeout(BOUND):
                    await session.job.ended.wait()
                for _ in range(2):
                    with pytest.raises(CodingError) as refused:
                        await RemoteDriver(hub, DAEMON_ID, "scripted", kind.driver).open(SessionSpec(command=(), cwd=""))
                    assert refused.value.code == "coding.daemon_fenced"
                    with pytest.raises(ProcessCleanupUnconfirmed):
                        await session.close()
                assert json.loads(table.read_text())["jobs"].keys() == kept["jobs"].keys()
                assert stranger.returncode is None
                stranger.kill()
                await stranger.wait()
                await hub.wait_for_daemon(DAEMON_ID, BOUND)
                await (await remote(hub, kind).open(SessionSpec(command=(), cwd=""))).close()
        finally:
            if stranger.returncode is None:
                stranger.kill()
                await stranger.wait()


# ------------------------------------------------------------------ every package, built


STATES = {
    "acp": {"state": "$HOME/sessions"},
    "claude-code": {"sessions": "$CLAUDE_CONFIG_DIR/known"},
    "codex": {"known": "home"},
}
"""Where each scripted agent keeps its account's sessions."""


def account(home: Path) -> dict[str, str]:
    """The environment of an account with a home of its own, in which a file must never be anybody else's."""
    home.mkdir()
    (home / "key").write_text(f"sk-canary-{secrets.token_hex(8)}")
    return {"HOME": str(home), "CLAUDE_CONFIG_DIR": str(home / ".claude"), "CODEX_HOME": str(home / ".codex")}


def untouched(home: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a directory, and what changes when it is written to, replaced, or something in it comes or goes."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (home, *home.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


@every_package
async def test_same_session_is_serialized_and_another_account_is_independent(kind: Kind, tmp_path: Path) -> None:
    """Our rule: two workers with one home never write one session at once; a third with a home of its own waits for neither.

    To that account the session's id means nothing, even while it is being written to: it gets a fresh session, and is told so.
    """
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    command = kind.write(tmp_path / "agent", STATES[kind.driver])
    homes = {"A": tmp_path / "home-a", "B": tmp_path / "home-b"}
    forms = {uid: kind.local(command, str(workspace), env_json=json.dumps(account(home))) for uid, home in homes.items()}
    installations: dict[str, dict[str, Any]] = {"A": {}, "again": {}, "B": {}}
    async with sdk_worker(
        built(kind.package),
        tmp_path / "runtime",
        name=kind.package,
        installations=installations,
        environment=private(tmp_path / "worker"),
    ) as worker:
        assert len({worker.pid(uid) for uid in installations}) == 3
        assert (await worker.run("say one", uid="A", config=forms["A"])).shown == ["one"]
        (kept,) = worker.host("A").state.values()
        stored: str = kept["value"]
        gate = tmp_path / "gate"
        holding = worker.stream(f"say begun\n{kind.hold(gate)}\nsay released", uid="A", run_id="r2", config=forms["A"])
        before = await until_shown(holding, "begun")

        held, agents = untouched(homes["A"]), descendants(worker.pid("A"))
        worker.host("B").state = Stored(stored)
        async with asyncio.timeout(BOUND):
            crossed = await worker.run("say mine", uid="B", run_id="b1", config=forms["B"])
            assert FRESH in crossed.text
            assert crossed.shown[-1] == "mine"
            (fresh,) = worker.host("B").state.values()
            worker.host("B").state = Stored(fresh["value"])
            resumed = await worker.run("say still mine", uid="B", run_id="b2", config=forms["B"])
        assert resumed.shown == ["still mine"]
        assert fresh["value"] != stored
        assert agents
        assert descendants(worker.pid("A")) == agents
        assert untouched(homes["A"]) == held
        for own, other, session in (("A", "B", fresh["value"]), ("B", "A", stored)):
            foreign = (session.encode(), str(homes[other]).encode(), (homes[other] / "key").read_bytes())
            below = files_below(homes[own])
            assert [path for path, data in below.items() if any(each in data + os.fsencode(path) for each in foreign)] == []
        assert any(fresh["value"] in str(path) for path in files_below(homes["B"]))

        worker.host("again").state = Stored(stored)
        refused = await worker.run("say intruder", uid="again", run_id="r3", config=forms["A"])
        assert (refused.text.splitlines()[0], refused.reason) == (BUSY, "error")
        worker.host("again").state = {}
        own_session = await worker.run("say beside", uid="again", run_id="r4", conversation="person_8", config=forms["A"])
        assert own_session.shown == ["beside"]
        gate.touch()
        async with asyncio.timeout(BOUND):
            done = Outcome(before + [result async for result in holding])
        assert "released" in done.text
        worker.host("again").state = Stored(stored)
        after = await worker.run("say after", uid="again", run_id="r5", config=forms["A"])
        assert after.shown == ["after"]


async def test_one_runner_two_agents_one_listener_and_reconfiguration(tmp_path: Path) -> None:
    """Our rule: two agents' configurations of one runner share its one listener and reach a daemon each, by their ids.

    A new configuration of the plugin moves the one listener, and both daemons work again under the new token only.
    """
    kind = KINDS["ACPAgentRunner"]
    ids = ("laptop", "desktop")
    async with contextlib.AsyncExitStack() as stack:
        port, token = quiet_port(), secrets.token_urlsafe(32)
        worker = await stack.enter_async_context(
            sdk_worker(
                built(),
                tmp_path / "runtime",
                installations={"A": plugin_form(port, token)},
                environment=private(tmp_path / "w"),
            )
        )
        for revision in (1, 2):
            if revision == 2:
                port, token = quiet_port(), secrets.token_urlsafe(32)
                await worker.install("A", plugin_form(port, token), revision=2)
            gates = {name: tmp_path / f"gate-{name}-{revision}" for name in ids}
            streams, told, daemons = {}, {}, {}
            for name in ids:  # the first run starts the hub, and both wait for their daemons
                script = f"who\n{kind.hold(gates[name])}\nsay from {name}"
                run_id, conversation = f"{name}{revision}", f"person_{name}"
                streams[name] = worker.stream(script, run_id=run_id, conversation=conversation, config=kind.remote(name))
                told[name] = asyncio.ensure_future(until_shown(streams[name], "turn="))
            await until_open(port)
            for name in ids:
                place = tmp_path / f"{name}-{revision}"
                command = (str(kind.write(place / "agent")),)
                url = f"ws://127.0.0.1:{port}"
                home = DaemonHome(place / "machine", url, token=token, driver=kind.driver, command=command, daemon_id=name)
                daemons[name] = await stack.enter_async_context(daemon_rig.running(home))
            for name in ids:
                (pid,) = set(re.findall(r"pid=(\d+)", json.dumps((await told[name])[-1].data)))
                assert int(pid) in descendants(daemons[name].pid)
            assert listening(worker.pid()) == {("127.0.0.1", port)}
            for name in reversed(ids):
                gates[name].touch()
                await until_shown(streams[name], f"from {name}")
                assert [result.type async for result in streams[name]][-1] == "run.completed"
            for daemon in daemons.values():
                assert descendants(daemon.pid) == {}
                await daemon.terminate()


# ------------------------------------------------------------------ accounts


@pytest.mark.real_claude
async def test_claude_code_auth_and_resume_continuity(tmp_path: Path, claude_program: Path) -> None:
    """Our rule: each ``CLAUDE_CONFIG_DIR`` is an account with its own key and sessions, found again by another process.

    The key is told by the account's own settings; a session of one home is no session of the other, and that is said.
    """
    words = {"one": "PEAR", "other": "PLUM"}
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with anthropic_fixture() as model:
        keys = {name: f"sk-canary-{name}-{secrets.token_hex(8)}" for name in words}
        model.keys = set(keys.values())
        environments = {}
        for name, key in keys.items():
            home = tmp_path / name
            home.mkdir()
            (home / "key").write_text(key)
            (home / "settings.json").write_text(json.dumps({"apiKeyHelper": f"cat {home / 'key'}"}))
            given = {key: value for key, value in model.environment().items() if key != "ANTHROPIC_API_KEY"}
            environments[name] = {**given, "CLAUDE_CONFIG_DIR": str(home)}
        form = {"command": str(claude_program), "workspace": str(workspace)}
        ids: dict[str, str] = {}
        private_places = private(tmp_path / "own")
        for text in ("remember {} [[ say noted ]]", "[[ recall ]]"):
            async with process_worker("ClaudeCodeAgent", private_places) as worker:
                for name, word in words.items():
                    started = {"session": name, "form": form, "workspace": str(workspace), "env": environments[name]}
                    ids[name] = (await worker.ask("start", **started, resume=ids.get(name, "")))["session_id"]
                    await worker.ask("prompt", session=name, text=text.format(word))
                    await worker.said(name, "noted" if "say" in text else word)
                    await worker.until(name, "TurnEnded", stop_reason="end_turn")
                    assert model.used[-1] == keys[name]
                for name in words:
                    await worker.ask("close", session=name)
        assert ids["one"] != ids["other"]
        for name, stranger in (("one", "other"), ("other", "one")):
            held = files_below(tmp_path / name)
            assert any(ids[name] in str(path) for path in held)
            for foreign in (keys[stranger], words[stranger], ids[stranger]):
                assert [path for path, data in held.items() if foreign.encode() in data] == []
        async with process_worker("ClaudeCodeAgent", private_places) as worker:
            crossed = {"form": form, "workspace": str(workspace), "env": environments["other"], "resume": ids["one"]}
            found = await worker.ask("start", session="crossed", **crossed)
            assert (await worker.until("crossed", "SessionStarted"))["lost_history"] is True
            assert found["session_id"] != ids["one"]
            await worker.ask("close", session="crossed")


@real_codex
@pytest.mark.parametrize("place", PLACES)
async def test_codex_auth_and_resume_continuity(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: an account's sign-in and sessions are its own home's, used as they are, and found again by the next process.

    Two installations with an account each talk in turn. Each is answered for its own key; a killed worker (and daemon) goes on
    with the same session; neither home ever holds anything of the other's, and both sign-ins stay as the program wrote them.
    """
    async with two_accounts(place, directory, codex_program) as (one, other):
        words = {one.uid: "PEAR", other.uid: "PLUM"}
        signed = {account.uid: (account.home / ".codex" / "auth.json").read_bytes() for account in (one, other)}
        results = []
        for account in (one, other):
            noted = await account.run(f"remember {words[account.uid]} [[ say noted ]]", keep_warm=300)
            assert noted.shown[-1:] == ["noted"], noted.text
            assert account.model.bearers[-1] == account.key
            results += noted.results
        assert one.stored != other.stored
        lines = command_lines([*descendants(one.root), *descendants(other.root)])
        assert b"app-server" in lines

        for account in (one, other):
            before = account.stored
            await account.killed()
            recalled = await account.run("[[ recall ]]")
            assert recalled.shown[-1:] == [f"recalled: remember {words[account.uid]}"], recalled.text
            assert account.model.bearers[-1] == account.key
            assert account.stored == before
            results += recalled.results

        told = json.dumps([result.data for result in results]).encode()
        for account, stranger in ((one, other), (other, one)):
            auth = account.home / ".codex" / "auth.json"
            assert auth.read_bytes() == signed[account.uid]
            assert not auth.is_symlink()
            assert auth.stat().st_mode & 0o777 == 0o600
            (rollout,) = account.rollouts
            assert account.stored in rollout
            held = files_below(account.home)
            assert [path for path, data in held.items() if account.key.encode() in data] == [auth]
            for foreign in (stranger.key, words[stranger.uid], stranger.stored):
                assert [path for path, data in held.items() if foreign.encode() in data] == []
            assert account.key.encode() not in told + lines
        outside = files_below(directory / "worker", directory / "runtime", one.workspace, other.workspace)
        assert [path for path, data in outside.items() if one.key.encode() in data or other.key.encode() in data] == []


@real_codex
@pytest.mark.parametrize("place", PLACES)
async def test_a_session_of_another_account_is_none_of_this_one_s(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: even an installation that knows another account's session id gets a fresh session, and is told so."""
    async with two_accounts(place, directory, codex_program) as (one, other):
        await one.run("remember PEAR [[ say noted ]]")
        before = one.rollouts
        other.worker.host(other.uid).state = Stored(one.stored)
        outcome = await other.run("[[ recall ]]")
        assert FRESH in outcome.text
        assert "PEAR" not in outcome.text
        assert one.rollouts == before
        assert set(other.rollouts).isdisjoint(before)


@real_codex
@pytest.mark.parametrize("place", PLACES)
async def test_distinct_accounts_work_at_the_same_time(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: nothing of one account waits for another's, not even in the same turn."""
    async with two_accounts(place, directory, codex_program) as accounts, contextlib.AsyncExitStack() as stack:
        gates = [directory / f"gate-{account.uid}" for account in accounts]
        streams = [account.stream(f"[[ hold {gate} ]]") for account, gate in zip(accounts, gates, strict=True)]
        for stream in streams:
            stack.push_async_callback(stream.aclose)
            await until_shown(stream, "holding")
        for gate in gates:
            gate.touch()
        for stream in streams:
            await until_shown(stream, "released")
            assert [result.type async for result in stream][-1] == "run.completed"


# ------------------------------------------------------------------ one writer


def linked_sessions(one: Account, other: Account) -> None:
    """Two homes with sign-ins of their own whose sessions are one directory, as an earlier plugin laid them out."""
    (one.home / ".codex" / "sessions").mkdir()
    (other.home / ".codex" / "sessions").symlink_to(one.home / ".codex" / "sessions")


def linked_home(one: Account, other: Account) -> None:
    """One account under two names."""
    shutil.rmtree(other.home)
    other.home.symlink_to(one.home)
    other.key = one.key


@real_codex
@pytest.mark.parametrize("arrange", [linked_sessions, linked_home])
@pytest.mark.parametrize("place", PLACES)
async def test_session_guard_serialization(
    place: str, arrange: Callable[[Account, Account], None], directory: Path, codex_program: Path
) -> None:
    """Our rule: a session is locked by its real path, so two workers, or two daemons, never write it at once.

    Vendor's rule (0.171): Codex's own lock is per home, so two homes with linked sessions would both write. The second is told
    that the session is in use, and goes on with it, history and all, as soon as it is free.
    """
    async with two_accounts(place, directory, codex_program, arrange) as (one, other):
        gate = directory / "gate"
        noted = await one.run("remember PEAR [[ say noted ]]")
        assert noted.shown[-1:] == ["noted"], noted.text
        other.worker.host(other.uid).state = Stored(one.stored)
        stream = one.stream(f"[[ hold {gate} ]]")
        await until_shown(stream, "holding")
        refused = await other.run("INTRUDER [[ say mine ]]")
        assert (refused.text.splitlines()[0], refused.reason) == (BUSY, "error")
        assert "coding.session_busy" in refused.log
        assert other.worker.host(other.uid).state == {}, "another session took its place"
        gate.touch()
        await until_shown(stream, "released")
        await stream.aclose()
        recalled = await other.run("[[ recall ]]")
        assert "remember PEAR" in recalled.text, recalled.text
        assert FRESH not in recalled.text
        (rollout,) = one.rollouts.values()
        assert b"INTRUDER" not in rollout
        assert all(json.loads(line) for line in rollout.splitlines())


@real_codex
@pytest.mark.parametrize("place", PLACES)
async def test_session_guard_ends_with_its_holder(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: SIGKILL to whoever had the session frees it, and leaves no writer behind."""
    async with two_accounts(place, directory, codex_program, linked_sessions) as (one, other):
        await one.run("remember PEAR [[ say noted ]]")
        other.worker.host(other.uid).state = Stored(one.stored)
        stream = one.stream(f"[[ hold {directory / 'never'} ]]")
        await until_shown(stream, "holding")
        await one.killed()
        await stream.aclose()
        recalled = await other.run("[[ recall ]]")
        assert "remember PEAR" in recalled.text, recalled.text
