"""Runs whose agent lives on a daemon's machine: the whole loop here, the real daemon program there, a scripted ACP agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from agent.product import PRODUCT
from pkg import hubs, installations, limits
from pkg.errors import CodingError
from pkg.identity import Authority
from pkg.settings import parse
from testkit import hostile_trees
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess, descendants, running, start
from testkit.host_actions import message
from testkit.relay_rig import OTHER_TOKEN, TOKEN, WAIT, free_port
from testkit.run_harness import Harness, Outcome, harness

pytestmark = pytest.mark.asyncio


def listening() -> set[int]:
    """The TCP ports this process listens on."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()))
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


class Rig:
    """A runner of the real package, and one workstation whose daemon may be running."""

    def __init__(self, harness: Harness, home: DaemonHome, port: int) -> None:
        self.harness = harness
        self.home = home
        self.port = port
        self.daemon: DaemonProcess | None = None
        """One that a test started itself."""
        self.plug()

    def plug(self, **form: Any) -> None:
        """Give the runner the plugin form."""
        stored = {"daemon-enabled": True, "daemon-port": self.port, "daemon-token": TOKEN}
        stored.update({name.replace("_", "-"): value for name, value in form.items()})
        self.harness.runner.bind_runtime(plugin_runtime_handler=self.harness.host, plugin_config=stored)  # type: ignore[no-untyped-call]

    async def run(self, *lines: str, **given: Any) -> Outcome:
        """One message, whose text is a script of the agent's; see :meth:`stream`."""
        stream = self.stream("\n".join(lines), **given)
        async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
            return Outcome([result async for result in stream])

    def stream(
        self, text: str, *, conversation: str = "person_7", run_id: str = "r1", **config: Any
    ) -> AsyncGenerator[RunnerResult, None]:
        """A run's results as they come; ``config`` are form values with underscores for hyphens."""
        values = {name.replace("_", "-"): value for name, value in config.items()}
        context = self.harness.context(text, config=values, conversation=conversation, run_id=run_id)
        return self.harness.runner.invoke(context)


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """The daemon of it is not running yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "worker"))
    # Only the test of the notice wants it; on a busy machine a daemon takes longer to start.
    monkeypatch.setattr(limits, "DAEMON_WAIT_NOTICE", WAIT)
    port = free_port()
    home = DaemonHome(tmp_path / "home", f"ws://127.0.0.1:{port}")
    async with harness(tmp_path, location="daemon", daemon_id=DAEMON_ID) as made:
        made.config["workspace"] = ""
        made.runner.product = PRODUCT
        yield Rig(made, home, port)


@pytest_asyncio.fixture
async def daemon(rig: Rig) -> AsyncIterator[DaemonProcess]:
    """The workstation's daemon, running."""
    async with running(rig.home) as process:
        yield process


async def test_a_message_is_worked_on_on_the_users_machine_and_the_session_stays_alive(rig: Rig, daemon: DaemonProcess) -> None:
    """DESIGN §5, §7: the chat is as with a local agent, and the next message finds the same process."""
    first = await rig.run("say one")
    assert first.terminal.type == "run.completed"
    assert "one" in first.text
    agents = descendants(daemon.pid)
    assert agents
    second = await rig.run("say two")
    assert "two" in second.text
    assert descendants(daemon.pid) == agents
    tree = {pid: hostile_trees.start_time(pid) for pid in agents}
    await rig.harness.close()
    assert hostile_trees.gone(tree)


async def test_a_session_that_is_not_kept_is_resumed_by_its_id(rig: Rig, tmp_path: Path) -> None:
    """Our rule: the stored id is the daemon's machine's, and finds the session there again."""
    rig.home.agent = {"state": str(tmp_path / "sessions")}
    (tmp_path / "sessions").mkdir()
    rig.home.write()
    async with running(rig.home) as daemon:
        await rig.run("say one", keep_warm=0)
        assert descendants(daemon.pid) == []
        stored = dict(rig.harness.host.state)
        second = await rig.run("say two", keep_warm=0)
        assert second.terminal.type == "run.completed"
        assert second.shown == ["two"], "nothing says that the session was lost"
        assert stored, "the host has the id"
        assert rig.harness.host.state == stored


async def test_a_daemon_that_is_late_is_waited_for_and_that_is_said(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN §5: "waiting for …" after a moment, then the answer."""
    monkeypatch.setattr(limits, "DAEMON_WAIT_NOTICE", 0.2)
    stream = rig.stream("say hello")
    shown = []
    async with asyncio.timeout(WAIT), contextlib.aclosing(stream), contextlib.AsyncExitStack() as later:
        async for result in stream:
            if result.type == "message.completed":
                shown.append(result.data["message"]["content"])
            if shown and rig.daemon is None:
                rig.daemon = await later.enter_async_context(running(rig.home))
        await rig.harness.close()
    assert shown == [f'Waiting for "{DAEMON_ID}" to connect…', "hello"]


async def test_a_daemon_that_does_not_come_is_a_readable_end(rig: Rig) -> None:
    """Bad input: the person reads which daemon is missing and what to do, and nothing was started anywhere."""
    outcome = await rig.run("say hello", daemon_connect_timeout=1)
    assert "coding.daemon_offline" in outcome.log
    assert f'"{DAEMON_ID}" is not connected' in outcome.text


@pytest.mark.parametrize(
    ("form", "config", "code", "named"),
    [
        ({"daemon_enabled": False}, {}, "coding.daemon_hub_not_started", '"daemon-enabled"'),
        ({"daemon_token": ""}, {}, "coding.daemon_token_required", '"daemon-token"'),
        ({}, {"daemon_id": ""}, "coding.setting_invalid", '"daemon-id"'),
        ({"daemon_host": "192.0.2.1"}, {}, "coding.daemon_bind_failed", '"daemon-port"'),
    ],
)
async def test_a_form_without_a_usable_hub_is_a_readable_end(
    rig: Rig, form: dict[str, Any], config: dict[str, Any], code: str, named: str
) -> None:
    """Bad input: each of the plugin's and the runner's daemon fields that cannot be used is named."""
    rig.plug(**form)
    outcome = await rig.run("say hello", **config)
    assert code in outcome.log
    assert named in outcome.text
    assert TOKEN not in repr(outcome.results)


@pytest.mark.parametrize(
    ("extra", "config", "code"),
    [
        ("", {"daemon_agent": "other"}, "coding.policy_agent_unknown"),
        ("", {"workspace": "/etc"}, "coding.policy_workspace_outside"),
        ("", {"approval_policy": "allow-all"}, "coding.policy_approvals"),
        ("", {"env_json": '{"SECRET": "x"}'}, "coding.policy_environment"),
        ("worktrees = false", {"workspace_mode": "worktree"}, "coding.policy_worktrees"),
    ],
)
async def test_what_the_policy_refuses_is_read_in_the_chat_and_nothing_starts(
    rig: Rig, extra: str, config: dict[str, Any], code: str
) -> None:
    """DESIGN §5: the workstation decides what may run."""
    rig.home.write(extra)
    async with running(rig.home) as daemon:
        outcome = await rig.run("say hello", **config)
        assert code in outcome.log
        assert descendants(daemon.pid) == []


async def test_the_job_names_its_agent_and_may_leave_out_the_only_one(rig: Rig, daemon: DaemonProcess) -> None:
    """Our rule: an empty name is the one agent there is, and a name chooses."""
    assert (await rig.run("say one")).shown == ["one"]
    assert (await rig.run("say two", daemon_agent="scripted")).shown == ["two"]


async def test_langbots_tools_travel_over_the_relay_and_answer_in_the_runs_authority(rig: Rig, daemon: DaemonProcess) -> None:
    """DESIGN §4: a tool call of the agent is the run's own; between runs there is none, and no listener in the worker."""
    for word in ("one", "two"):
        said = await rig.run(f'tool echo {{"word": "{word}"}}', langbot_assets_enabled=True)
        assert word in said.text, "the host's tool answered"
    called = [data for action, data in rig.harness.host.calls if action == "call_tool"]
    assert [data["parameters"] for data in called] == [{"word": "one"}, {"word": "two"}]
    assert len(descendants(daemon.pid)) == len(set(descendants(daemon.pid)))
    assert listening() == {rig.port}


async def test_a_message_during_the_turn_reaches_the_daemon_as_the_next_turn(rig: Rig, daemon: DaemonProcess) -> None:
    """Our rule: ACP agents take no message into a running turn; it becomes the next one of the same session."""
    gate = rig.home.workspace / "go"
    rig.harness.host.steering.append(message("say second"))
    asked = asyncio.ensure_future(rig.run("say first", f"until {gate}"))
    async with asyncio.timeout(WAIT):
        await rig.harness.host.pulled.wait()
    gate.touch()
    outcome = await asked
    assert outcome.shown == ["first", "second"]


async def test_stop_ends_the_turn_there_and_the_session_goes_on(rig: Rig, daemon: DaemonProcess) -> None:
    """DESIGN §4: a cancelled turn is a normal end."""
    stream = rig.stream("say begun\nhang")
    shown = []
    async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
        async for result in stream:
            if result.type == "message.delta" and "begun" in repr(result.data):
                rig.harness.host.steering.append(message("/stop"))
            if result.type == "message.completed":
                shown.append(result.data["message"]["content"])
    agents = descendants(daemon.pid)
    assert "begun" in shown[0]
    assert (await rig.run("say again")).shown == ["again"]
    assert descendants(daemon.pid) == agents


async def test_a_run_that_is_cancelled_in_mid_turn_leaves_nothing_there(rig: Rig, daemon: DaemonProcess) -> None:
    """Our rule: without a kept session the run's end is the agent's, its escaped children included."""
    stream = rig.stream("child\nhang", keep_warm=0)
    async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
        async for result in stream:
            if "child=" in repr(result.data):
                tree = {pid: hostile_trees.start_time(pid) for pid in descendants(daemon.pid)}
                break
    assert len(tree) >= 3
    assert hostile_trees.gone(tree), "closing the stream waits for the end"


async def test_a_daemon_killed_in_mid_turn_is_said_and_the_next_message_works(rig: Rig) -> None:
    """DESIGN §5: both sides agree on lost; the restarted daemon ends what was left before it takes a job."""
    async with running(rig.home) as killed:
        stream = rig.stream("child\nhang")
        shown = []
        tree: dict[int, str] = {}
        async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
            async for result in stream:
                if "child=" in repr(result.data) and not tree:
                    tree = {pid: hostile_trees.start_time(pid) for pid in descendants(killed.pid)}
                    await killed.kill()
                    rig.daemon = await start(rig.home)
                if result.type == "message.completed":
                    shown.append(result.data["message"]["content"])
    assert rig.daemon is not None
    try:
        assert f'"{DAEMON_ID}" was lost' in shown[-1]
        assert hostile_trees.gone(tree)
        assert (await rig.run("say again")).shown[-1] == "again"
        await rig.harness.close()
    finally:
        await rig.daemon.terminate()


async def test_other_hub_settings_while_a_job_runs_are_a_conflict_and_taken_over_afterwards(
    rig: Rig, daemon: DaemonProcess
) -> None:
    """DESIGN §5: another setting is never silently ignored, and never breaks what runs."""
    gate = rig.home.workspace / "go"
    shown = []
    stream = rig.stream(f"say first\nuntil {gate}", keep_warm=0)
    async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
        async for result in stream:
            if result.type == "message.delta" and "first" in repr(result.data) and not gate.exists():
                rig.plug(daemon_token=OTHER_TOKEN)
                refused = await rig.run("say second", conversation="person_8", run_id="r2")
                assert "coding.daemon_hub_conflict" in refused.log
                gate.touch()
            if result.type == "message.completed":
                shown.append(result.data["message"]["content"])
    assert shown == ["first"]
    after = await rig.run("say third", daemon_connect_timeout=1)
    assert "coding.daemon_offline" in after.log, "the daemon has the former token"
    async with asyncio.timeout(WAIT):
        assert await daemon.process.wait() != 0, "a rejected credential ends the daemon, with an explanation"
    rig.plug()
    async with running(rig.home):
        assert (await rig.run("say fourth")).shown[-1] == "fourth"
        await rig.harness.close()


async def test_each_chat_has_a_worktree_of_its_own_on_the_daemon(rig: Rig, daemon: DaemonProcess) -> None:
    """DESIGN §7: two chats in one repository; the daemon makes the trees, inside its roots."""
    repository = rig.home.workspace
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        await asyncio.to_thread(subprocess.run, [*git, *arguments], check=True, capture_output=True)
    for chat in ("person_7", "person_8", "person_7"):
        outcome = await rig.run("touch here", f"say {chat}", conversation=chat, workspace_mode="worktree")
        assert outcome.shown == [chat]
    trees = sorted((repository / ".worktrees").iterdir())
    assert len(trees) == 2
    assert all((tree / "here").exists() for tree in trees)


async def test_a_worktree_outside_of_the_roots_is_not_made(rig: Rig) -> None:
    """Our rule: worktrees lie in the repository's top directory, so that has to be inside a root, too."""
    init = ["git", "init", "-q", str(rig.home.directory)]
    await asyncio.to_thread(subprocess.run, init, check=True, capture_output=True)
    async with running(rig.home):
        outcome = await rig.run("say hello", workspace_mode="worktree")
    assert "coding.policy_worktree_outside" in outcome.log
    assert not (rig.home.directory / ".worktrees").exists()


async def test_a_revocation_returns_when_the_turn_there_is_proven_gone(rig: Rig, daemon: DaemonProcess) -> None:
    """Authority table, rule 3: what ends is awaited, and its processes are gone; the person reads why."""
    tree: dict[int, str] = {}
    results = []
    async with asyncio.timeout(WAIT), contextlib.aclosing(rig.stream("child\nhang")) as stream, asyncio.TaskGroup() as group:
        async for result in stream:
            results.append(result)
            if "child=" in repr(result.data) and not tree:
                tree = {pid: hostile_trees.start_time(pid) for pid in descendants(daemon.pid)}
                revoking = group.create_task(installations.revoke(None))
    assert len(tree) >= 3
    assert revoking.done()
    assert hostile_trees.living(tree) == []
    assert results[-1].data["code"] == "coding.revoked"
    assert not listening()


async def test_what_git_takes_for_the_repository_has_to_be_inside_the_roots(rig: Rig) -> None:
    """Our rule: as before, when something that only looks like a repository lies in between."""
    outer = ("git", "-C", str(rig.home.directory), "-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        await asyncio.to_thread(subprocess.run, [*outer, *arguments], check=True, capture_output=True)
    (rig.home.workspace / ".git").mkdir()
    async with running(rig.home):
        outcome = await rig.run("say hello", workspace_mode="worktree")
    assert "coding.policy_workspace_outside" in outcome.log
    assert not (rig.home.directory / ".worktrees").exists()


async def test_a_fenced_daemon_is_said_to_be_so(rig: Rig, daemon: DaemonProcess) -> None:
    """DESIGN §5: without the proof that the turn is gone the daemon gets no job, and the person reads that."""
    stream = rig.stream("say begun\nhang", keep_warm=0)
    frozen = False
    shown = []
    async with asyncio.timeout(WAIT), contextlib.aclosing(stream):
        async for result in stream:
            if result.type == "message.delta" and "begun" in repr(result.data) and not frozen:
                frozen = True
                daemon.process.send_signal(signal.SIGSTOP)
                rig.harness.host.steering.append(message("/stop"))
            if result.type == "message.completed":
                shown.append(result.data["message"]["content"])
    assert "is not proven to have ended" in shown[-1]
    refused = await rig.run("say again", daemon_connect_timeout=1)
    assert "coding.daemon_fenced" in refused.log
    daemon.process.send_signal(signal.SIGCONT)
    assert (await rig.run("say again")).shown[-1] == "again"


async def test_in_the_pool_the_workers_environment_is_no_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN §4: nothing of the worker's own account is a tenant's."""
    monkeypatch.setenv("LANGBOT_AGENT_RUNTIME_DAEMON_ENABLED", "1")
    monkeypatch.setenv("LANGBOT_AGENT_RUNTIME_DAEMON_TOKEN", TOKEN)
    settings = parse(PRODUCT.settings, {"location": "daemon", "daemon-id": DAEMON_ID})
    plugin = parse(PRODUCT.plugin_settings, {})
    own = hubs.daemon_way(settings, plugin, {}, Authority(None), "acp")
    assert (own.token, own.port) == (TOKEN, 8766)
    with pytest.raises(CodingError) as caught:
        hubs.daemon_way(settings, plugin, {}, Authority(None, pooled=True), "acp")
    assert caught.value.code == "coding.daemon_hub_not_started"
    assert TOKEN not in repr(own)
