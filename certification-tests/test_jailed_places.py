"""Agents elsewhere from real jails, both shapes: a user's machine under the real daemon program, and an OpenSSH server.

All three packages, each the built one; agents are the scripted ones of each package (local protocol fixtures).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg.relay_protocol import daemon_key, format_key
from testkit import daemon_rig, hostile_trees, jails
from testkit.acp_harness import poll
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.daemon_sites import (
    Site,
    command_lines,
    environments,
    files_below,
    holds,
    listening,
    plugin_form,
    told_processes,
    until_shown,
)
from testkit.jails import Jail
from testkit.relay_rig import free_port
from testkit.sdk_worker import Shape, built, descendants, gone, scripted_agent, sdk_worker
from testkit.sshd import Server, sshd
from tooling import jail

pytestmark = [pytest.mark.nsjail, pytest.mark.shared_runtime, pytest.mark.ssh, pytest.mark.timeout(180)]

SHAPES: tuple[Shape, ...] = ("jail", "jailed_pool")
BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
OVER = {"keep_warm": 0}
"""Form fields with which an agent ends with its run."""
FENCES = ".coding-relay-v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One OpenSSH server for the file."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@contextlib.asynccontextmanager
async def sites_of(shape: Shape, directory: Path, server: Server, uids: str = "AB") -> AsyncIterator[dict[str, Site]]:
    """Installations, each with a machine whose daemon is at work: a hub each in jails, one listener in the pool."""
    shared = free_port()
    ports = {uid: shared if shape == "jailed_pool" else free_port() for uid in uids}
    tokens = {uid: f"token-of-{uid}-{secrets.token_urlsafe(24)}" for uid in uids}
    key = server.identity_file.read_text()
    plugin = {uid: plugin_form(ports[uid], tokens[uid], ssh_private_key_secret=key) for uid in uids}
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sdk_worker(built(), directory / "runtime", shape, installations=plugin))
        sites = {uid: Site(worker, directory / uid, ports[uid], tokens[uid], uid=uid) for uid in uids}
        for each in sites.values():
            stack.push_async_callback(each.stop_daemon)
        await asyncio.gather(*(each.join() for each in sites.values()))
        yield sites


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(tmp_path_factory: pytest.TempPathFactory, server: Server) -> AsyncIterator[dict[Shape, dict[str, Site]]]:
    """Both shapes, for tests that leave workers and daemons as they are."""
    async with contextlib.AsyncExitStack() as stack:
        found: dict[Shape, dict[str, Site]] = {}
        for shape in SHAPES:
            made = sites_of(shape, tmp_path_factory.mktemp(shape), server)
            found[shape] = await stack.enter_async_context(made)
        yield found


def jail_of(site: Site) -> Jail:
    """The jail that serves this installation."""
    return Jail.of(site.worker.pid(site.uid))


class TestDaemon:
    """A person's own machine, which dials into the jail."""

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_each_installation_works_on_its_own_machine_and_nothing_beside_the_worker(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape
    ) -> None:
        """Our rule: one loopback address per hub, in the pool one for all; agents live over there alone."""
        both = sites[shape]
        said = await asyncio.gather(*(each.run(f"say mine, {uid}", run_id="same") for uid, each in both.items()))
        assert [done.shown for done in said] == [["mine, A"], ["mine, B"]]
        for uid, each in both.items():
            assert each.prompts()[-1] == f"say mine, {uid}"
            assert len(each.on_the_machine()) >= 3
            seen = jail_of(each)
            assert set(seen.processes) == {seen.nsjail, seen.worker}
            assert listening(seen.worker) == {("127.0.0.1", each.port)}
        assert (both["A"].worker.pid("A") == both["B"].worker.pid("B")) == (shape == "jailed_pool")

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_a_daemon_without_the_right_secret_gets_nothing_though_it_reaches_the_port(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape, tmp_path: Path
    ) -> None:
        """Our rule: the network is shared, so the secret decides; a jail's hub refuses, the pool lets nobody of nobody in."""
        a = sites[shape]["A"]
        stranger = DaemonHome(tmp_path / "stranger", f"ws://127.0.0.1:{a.port}", token="a-wrong-" + secrets.token_urlsafe(24))
        sockets = a.home.log.read_bytes().count(b": connected")
        if shape == "jail":
            code, said = await daemon_rig.run(("run", "--policy", str(stranger.policy)), stranger.environment())
            assert (code, "does not admit" in said) == (1, True), said
        else:
            async with daemon_rig.running(stranger):
                await poll(lambda: b": parked" in stranger.log.read_bytes())
                assert (await a.run("say mine", form=OVER)).shown == ["mine"]
            assert b": connected" not in stranger.log.read_bytes()
        assert (await a.run("say still mine", run_id="r2", form=OVER)).shown == ["still mine"]
        assert a.home.log.read_bytes().count(b": connected") == sockets

    @pytest.mark.asyncio(loop_scope="module")
    async def test_another_installations_jail_reaches_the_port_and_is_refused_there(
        self, sites: dict[Shape, dict[str, Site]]
    ) -> None:
        """Our rule: what runs in B's jail can dial A's hub, and without A's secret it is no daemon of A."""
        a, b = (sites["jail"][uid] for uid in "AB")
        home = b.worker.own("B").home_path
        (home / "src").mkdir()
        key = home / "stolen.key"
        key.write_text(format_key(daemon_key(b.token, DAEMON_ID)) + "\n")
        policy = home / "daemon.toml"
        lines = [f'daemon_id = "{DAEMON_ID}"', 'workspaces = ["/home/src"]', 'state_dir = "/home/state"', "[[hubs]]"]
        lines += [f'url = "ws://127.0.0.1:{a.port}"', 'key_file = "stolen.key"', "[agents.own]", 'driver = "acp"']
        policy.write_text("\n".join([*lines, 'command = ["/usr/bin/true"]']) + "\n")
        for path in (key, policy):
            path.chmod(0o600)
        command = (str(jail.directory() / "bin" / "python"), "/plugin/daemon.py", "run", "--policy", "/home/daemon.toml")
        code, said, complaint = await jail_of(b).run(*command)
        assert (code, "does not admit" in said + complaint) == (1, True), said + complaint

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_an_agents_question_waits_for_a_person_between_runs(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape
    ) -> None:
        """Our rule: the turn is parked over there, and the answer reaches it from the jail."""
        a = sites[shape]["A"]
        asked = await a.run("risky touch allowed", run_id="ask", conversation="group_ask", form=OVER)
        assert "touch allowed" in asked.text
        assert not (a.home.workspace / "allowed").exists()
        answered = await a.run("1", run_id="answer", conversation="group_ask", form=OVER)
        assert (a.home.workspace / "allowed").is_file(), answered.text + answered.log
        (a.home.workspace / "allowed").unlink()

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_agents_call_of_a_tool_reaches_its_own_installations_host(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape
    ) -> None:
        """Our rule: tools travel over the relay into the jail and act for the run."""
        both = sites[shape]
        form = {"langbot_assets_enabled": True, "keep_warm": 0}
        calls = {uid: each.start(f'tool echo {{"who": "{uid}"}}', run_id="tool", form=form) for uid, each in both.items()}
        for uid, call in calls.items():
            told = json.loads((await call).shown[-1])
            assert told["result"]["structuredContent"]["echo"] == {"who": uid}
            made = [data["parameters"] for action, data in both[uid].host.calls if action == "call_tool"]
            assert made == [{"who": uid}]

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_attachments_travel_that_no_temporary_directory_of_the_pool_could_hold(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape, tmp_path: Path
    ) -> None:
        """Our rule: it passes through a worker's memory and never its disk; it is a file over there until the run's end."""
        a = sites[shape]["A"]
        data = {f"big-{number}.txt": (f"line {number}\n" * 300_000).encode() for number in range(2)}
        assert sum(map(len, data.values())) > 4 << 20
        files = [{"type": "file", "name": name, "content": base64.b64encode(each).decode()} for name, each in data.items()]
        gate = tmp_path / "gate"
        script = f"say begun\nuntil {gate}\nsay ended"
        stream = a.stream(script, run_id="attached", input={"text": script, "attachments": files}, form=OVER)
        await until_shown(stream, "begun")
        received = files_below(a.home.workspace).values()
        assert [each in received for each in data.values()] == [True, True]
        on_disk = await jail_of(a).look(FILES, "/tmp", "/home", "/data")
        assert not [found for found in on_disk if "line 0" in found or "line 1" in found]
        gate.touch()
        async with asyncio.timeout(BOUND):
            assert [result async for result in stream][-1].type == "run.completed"
        assert not [each for each in files_below(a.home.workspace).values() if each in data.values()]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_a_killed_jail_leaves_a_fence_where_it_has_a_disk_and_no_agent_on_the_machine(
        self, server: Server, tmp_path: Path, shape: Shape
    ) -> None:
        """Our rule: the next worker knows of the unproven job, from ``/data`` or from the daemon's own table, and resumes."""
        async with sites_of(shape, tmp_path, server, "A") as sites:
            a = sites["A"]
            stream = a.stream("child\nhang")
            tree = told_processes(await until_shown(stream, "agent="))
            fences = a.worker.own("A").data_path / FENCES
            seen = jail_of(a)
            processes = seen.processes
            os.kill(seen.worker, signal.SIGKILL)
            await stream.aclose()
            assert await gone(processes, 10.0)
            if shape == "jail":
                kept = files_below(fences)
                assert kept
                assert {stat.S_IMODE(file.stat().st_mode) for file in kept} == {0o600}
                assert {stat.S_IMODE(file.parent.stat().st_mode) for file in kept} == {0o700}
                assert not [file for file, data in kept.items() if holds(data, a.token)]
            else:
                assert not fences.exists()
            await a.worker.ready(other_than=seen.nsjail)
            assert (await a.run("say back", run_id="r2", form=OVER)).shown[-1] == "back"
            assert hostile_trees.living(tree) == []
            assert a.methods().count("session/new") == 1


class TestSsh:
    """Another account's machine."""

    @staticmethod
    def form(server: Server, directory: Path, **fields: Any) -> dict[str, Any]:
        """A runner form for that machine; ``fields`` with underscores for hyphens."""
        state, workspace = directory / "state", directory / "workspace"
        for each in (state, workspace):
            each.mkdir(exist_ok=True)
        values = {
            "provider": "custom",
            "location": "remote-ssh",
            "acp-command": scripted_agent(state),
            "workspace": str(workspace),
            "ssh-target": server.target,
            "ssh-port": server.port,
            "ssh-known-hosts": server.known_hosts,
            "keep-warm": 0,
        }
        return {**values, **{name.replace("_", "-"): value for name, value in fields.items()}}

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_settings_key_opens_the_account_and_is_nowhere_else(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape, server: Server, tmp_path: Path
    ) -> None:
        """Our rule: works without passwd, PATH and a known_hosts file; the key is on no command line and in no environment."""
        a = sites[shape]["A"]
        key = max(server.identity_file.read_text().splitlines(), key=len)
        stream = a.worker.stream("say begun\nhang", run_id="ssh", config=self.form(server, tmp_path))
        await until_shown(stream, "begun")
        there = descendants(server.pid)
        pids = list(jail_of(a).processes)
        assert there
        assert not holds(command_lines(pids) + environments(pids), key)
        await stream.aclose()
        assert await gone(there, 30.0)
        done = await a.worker.run("tool echo {}\nsay two", run_id="ssh-2", config=self.form(server, tmp_path))
        assert done.shown[-1].endswith("two"), done.text + done.log
        seen = jail_of(a)
        assert await gone({pid: start for pid, start in seen.processes.items() if pid not in (seen.nsjail, seen.worker)}, 20.0)
        assert not [name for name in (await seen.look(FILES, "/tmp", "/home")) if holds(name.encode(), key)]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_it_works_for_an_account_without_any_name(
        self, server: Server, tmp_path: Path, shape: Shape, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Host fact: OpenSSH's client refuses to run for an account without a name; our rule: a library takes its place."""
        plain = tmp_path / "nsswitch.conf"
        plain.write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        monkeypatch.setattr(jails.Launcher, "instead", {"/etc/nsswitch.conf": str(plain)})
        plugin = {"A": {"ssh-private-key-secret": server.identity_file.read_text()}}
        async with sdk_worker(built(), tmp_path / "runtime", shape, installations=plugin) as worker:
            code, _, complaint = await Jail.of(worker.pid()).run("/usr/bin/ssh", "-G", "nowhere")
            assert (code, "No user exists" in complaint) == (255, True), complaint
            done = await worker.run("say by another way", config=self.form(server, tmp_path))
            assert done.shown == ["by another way"], done.text + done.log
        assert await gone(descendants(server.pid), 10.0)

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_a_server_with_another_key_is_refused_by_name(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape, server: Server, tmp_path: Path
    ) -> None:
        """Our rule: the host keys of the settings alone count, and the reason reaches the chat."""
        a = sites[shape]["A"]
        config = self.form(server, tmp_path, ssh_known_hosts=server.wrong_known_hosts)
        done = await a.worker.run("say hi", run_id="ssh-wrong", config=config)
        assert done.reason == "error"
        assert "coding.ssh_host_key" in done.log

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_what_is_re_parented_to_the_worker_is_reaped(
        self, sites: dict[Shape, dict[str, Site]], shape: Shape, server: Server, tmp_path: Path
    ) -> None:
        """Our rule: PID 1 of a jail leaves no zombie behind: what has ended below it for a while goes at a later start."""
        a = sites[shape]["A"]
        seen = jail_of(a)
        before = set(seen.zombies)
        await seen.look(ORPHAN)
        await poll(lambda: len(set(seen.zombies) - before) == 1)
        (orphan,) = set(seen.zombies) - before
        for number in itertools.count():
            done = await a.worker.run("say hi", run_id=f"reaps-{number}", config=self.form(server, tmp_path))
            assert done.shown == ["hi"]
            if orphan not in seen.zombies:
                break
            assert number < 20


# ------------------------------------------------------------------ the other packages

SIBLINGS = {
    "ClaudeCodeAgent": ("claude-code", "scripted_claude.py"),
    "CodexAgent": ("codex", "scripted_codex.py"),
}


def written(directory: Path, shown_as: str, package: str, python: tuple[str, ...], config: Mapping[str, Any]) -> str:
    """The scripted agent of a package as a program in ``directory``, which is seen as ``shown_as``; its path there."""
    name = SIBLINGS[package][1]
    shutil.copy(Path(daemon_rig.__file__).with_name(name), directory / name)
    given = shlex.quote(json.dumps(config))
    words = [*python, f"{shown_as}/{name}"]
    line = (
        f"SCRIPTED_CODEX={given} exec {shlex.join(words)}" if package == "CodexAgent" else f"exec {shlex.join(words)} {given}"
    )
    program = directory / "agent"
    program.write_text(f'#!/bin/sh\n{line} "$@"\n')
    program.chmod(0o755)
    return f"{shown_as}/agent"


@pytest.mark.asyncio
@pytest.mark.parametrize("package", SIBLINGS)
async def test_a_sibling_works_beside_its_jailed_worker(package: str, tmp_path: Path) -> None:
    """Our rule: the same in every package; the default workspace is ``/data/workspace``, and the next message resumes."""
    async with sdk_worker(built(package), tmp_path / "runtime", "jail", name=package) as worker:
        own = worker.own()
        command = written(own.home_path, "/home", package, jails.PYTHON, {})
        form = {"command": command, "langbot-assets-enabled": False}
        assert (await worker.run("say one", config=form)).shown == ["one"]
        processes = Jail.of(worker.pid()).processes
        assert len(processes) >= 4
        assert (await worker.run("say two", run_id="r2", config=form)).shown == ["two"]
        assert Jail.of(worker.pid()).processes == processes
        assert (own.data_path / "workspace").is_dir()
    assert await gone(processes, 10.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("package", SIBLINGS)
async def test_a_sibling_in_the_jailed_pool_works_on_a_users_machine(package: str, tmp_path: Path) -> None:
    """Our rule: beside the pool's worker it is refused, under the package's own daemon program it works."""
    port, token = free_port(), secrets.token_urlsafe(32)
    plugin = {"A": plugin_form(port, token)}
    async with sdk_worker(built(package), tmp_path / "runtime", "jailed_pool", name=package, installations=plugin) as worker:
        refused = await worker.run("say hi", config={"command": "/usr/bin/true", "workspace": "/tmp"})
        assert "coding.local_in_pool" in refused.log
        place = tmp_path / "machine"
        place.mkdir()
        command = written(place, str(place), package, (sys.executable, "-I", "-S"), {})
        url = f"ws://127.0.0.1:{port}"
        home = DaemonHome(place / "home", url, token=token, driver=SIBLINGS[package][0], command=(command,), package=package)
        form = {"location": "daemon", "daemon-id": DAEMON_ID, "langbot-assets-enabled": False, "keep-warm": 0}
        first = worker.start("say one", run_id="r2", config=form)
        async with daemon_rig.running(home):
            async with asyncio.timeout(BOUND):
                assert (await first).shown[-1] == "one", home.log.read_text()[-3000:]
            seen = Jail.of(worker.pid())
            assert set(seen.processes) == {seen.nsjail, seen.worker}


ORPHAN = """
import os
ended, ending = os.pipe()
if os.fork() == 0:
    os.setsid()
    middle = os.getpid()
    if os.fork() == 0:
        os.close(ended)
        for number in range(3):
            os.close(number)
        while os.getppid() == middle:
            pass
    os._exit(0)
os.wait()
os.close(ending)
os.read(ended, 1)
print("null")
"""
FILES = """
import json, os, sys
found = []
for place in sys.argv[1:]:
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                found.append(open(path, errors="replace").read())
print(json.dumps(found))
"""
