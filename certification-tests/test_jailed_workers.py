"""Workers of the shared profile in real nsjail, both shapes: what they see, may and lack, and what is left when they end.

The package is the built one and the launcher the SDK's own; agents are the scripted one (local protocol fixture).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit import daemon_rig, jails
from testkit.daemon_sites import command_lines, environments, files_below, holds, until_shown
from testkit.jails import CAPABILITY, Jail
from testkit.sdk_worker import POLICY, SdkWorker, Shape, built, gone, sdk_worker
from tooling import host, jail, venv

pytestmark = [pytest.mark.nsjail, pytest.mark.shared_runtime, pytest.mark.timeout(180)]

SHAPES: tuple[Shape, ...] = ("jail", "jailed_pool")
BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
SECRETS = {uid: f"canary-of-{uid}-{secrets.token_urlsafe(24)}" for uid in "AB"}
OWN_DIRECTORIES = ("/home", "/tmp", "/data")
TINY = 4 << 20
"""Bytes of nsjail's tmpfs, unless its caller asks for more."""


def agent_in(worker: SdkWorker, uid: str = "A", **config: Any) -> str:
    """The command line of the scripted agent, put into the installation's own home as its operator would."""
    home = worker.own(uid).home_path
    shutil.copy(daemon_rig.AGENT, home / "agent.py")
    (home / "sessions").mkdir(exist_ok=True)
    return shlex.join([*jails.PYTHON, "/home/agent.py", json.dumps({"state": "/home/sessions", **config})])


def form(worker: SdkWorker, uid: str = "A", **fields: Any) -> dict[str, Any]:
    """A runner form for an agent beside the worker that names no workspace; ``fields`` with underscores for hyphens."""
    values = {"provider": "custom", "acp-command": agent_in(worker, uid), "langbot-assets-enabled": False, "keep-warm": 0}
    return {**values, **{name.replace("_", "-"): value for name, value in fields.items()}}


class Standing:
    """A runtime of each shape with two installations."""

    def __init__(self, workers: dict[Shape, SdkWorker], base: Path) -> None:
        self.workers = workers
        self.base = base

    def jail(self, shape: Shape, uid: str = "A") -> Jail:
        """An installation's jail."""
        return Jail.of(self.workers[shape].pid(uid))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standing]:
    """Both shapes, for tests that leave them as they are."""
    base = tmp_path_factory.mktemp("jails")
    async with contextlib.AsyncExitStack() as stack:
        workers: dict[Shape, SdkWorker] = {}
        for shape in SHAPES:
            plugin = {uid: {"agent-secret-values": json.dumps({"KEY": SECRETS[uid]})} for uid in "AB"}
            made = sdk_worker(built(), base / shape, shape, installations=plugin)
            workers[shape] = await stack.enter_async_context(made)
        yield Standing(workers, base)


class TestWhatAJailHas:
    """What the SDK's launcher gives a worker, read back from the worker itself."""

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_topology_is_the_documented_one_and_its_record_names_no_place_and_no_secret(
        self, standing: Standing, shape: Shape
    ) -> None:
        """SDK fact: code, dependencies, Python and system read-only; a jail has its own three directories, the pool a tmpfs."""
        seen = standing.jail(shape)
        found = jails.record(shape, seen, standing.base / shape)
        last = {each["point"]: each for each in found["mounts"]}
        writable = {point for point, each in last.items() if each["access"] == "rw"}
        nodes = {"/dev/null", "/dev/random", "/dev/urandom"}
        assert writable - {"/proc"} == {"/dev", *nodes, *(OWN_DIRECTORIES if shape == "jail" else ("/tmp",))}
        assert {"/", "/usr", "/plugin", "/plugin-dependencies", "<python>"} <= last.keys() - writable
        assert (found["pid"], found["network"]) == (1, "shared")
        assert found["argv"][0].startswith("<python>/")
        written = json.dumps(found)
        assert "<capability>" in written
        assert "<runtime>" in written
        kept_back = [str(standing.base), str(jail.directory()), seen.environment[CAPABILITY], *SECRETS.values()]
        assert not [value for value in kept_back if value in written]

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_record_is_kept_for_whoever_asks_by_environment(
        self, standing: Standing, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: one file for both shapes; a relative path is refused."""
        target = tmp_path / "topology.json"
        monkeypatch.setenv(jails.TOPOLOGY_FILE, str(target))
        jails._keep(target, "another", {})
        found = jails.record(shape, standing.jail(shape), standing.base / shape)
        kept = json.loads(target.read_text())
        assert (kept["schema"], kept["shapes"]) == (jails.SCHEMA, {"another": {}, shape: found})
        monkeypatch.setenv(jails.TOPOLOGY_FILE, "topology.json")
        with pytest.raises(ValueError, match="absolute"):
            jails.record(shape, standing.jail(shape), standing.base / shape)

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_code_dependencies_and_python_cannot_be_written(self, standing: Standing, shape: Shape) -> None:
        """SDK fact: they are read-only for root, too."""
        places = ["/plugin", "/plugin/pkg", "/plugin-dependencies", "/usr/bin", "/etc", "/", str(jail.directory())]
        assert await standing.jail(shape).look(TRY_TO_WRITE, *places) == dict.fromkeys(places, "EROFS")

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize(("shape", "home"), [("jail", "/home"), ("jailed_pool", "/tmp")])
    async def test_the_environment_is_the_launchers_own_and_has_no_path(
        self, standing: Standing, shape: Shape, home: str
    ) -> None:
        """SDK fact: nothing is inherited; neither PATH nor LANG nor proxies."""
        seen = standing.jail(shape)
        names = {
            "HOME",
            "TMPDIR",
            "PYTHONUNBUFFERED",
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONPATH",
            "LANGBOT_PLUGIN_RUNTIME_PROFILE",
        }
        assert set(seen.environment) == {*names, CAPABILITY}
        assert (seen.environment["HOME"], seen.environment["TMPDIR"]) == (home, "/tmp")
        assert seen.environment["LANGBOT_PLUGIN_RUNTIME_PROFILE"] == "shared"
        assert environments([seen.nsjail]).strip(b"\0") == b""

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_there_is_no_passwd(self, standing: Standing, shape: Shape) -> None:
        """SDK fact: four names below /etc, none of which tells of accounts.

        Host fact: where the machine's name service makes up root and nobody (``nss-systemd``), these two have their names.
        """
        found = await standing.jail(shape).look(ACCOUNT)
        assert set(found["etc"]) <= {"hosts", "nsswitch.conf", "resolv.conf", "ssl"}
        assert found["name"] in ("", {0: "root", 65534: "nobody"}.get(os.geteuid(), ""))

    @pytest.mark.asyncio(loop_scope="module")
    async def test_the_pool_has_a_tiny_temporary_directory_and_no_other_place_to_write(self, standing: Standing) -> None:
        """SDK fact: nsjail's default of 4 MiB, in memory; what is bigger does not fit."""
        seen = standing.jail("jailed_pool")
        (tmp,) = [each for each in seen.mounts if each.point == "/tmp"]
        assert (tmp.kind, "size=4096k" in tmp.options) == ("tmpfs", True)
        written = await seen.look(FILL, "/tmp", str(TINY + (1 << 20)))
        assert written["error"] == "ENOSPC"
        assert 0 < written["bytes"] <= TINY
        assert await seen.look(TRY_TO_WRITE, "/home", "/data") == {"/home": "EROFS", "/data": "EROFS"}

    @pytest.mark.asyncio(loop_scope="module")
    async def test_an_installations_jail_keeps_more_than_that_on_its_own_disk(self, standing: Standing) -> None:
        """SDK fact: all three directories are the installation's own on this machine's disk."""
        seen = standing.jail("jail")
        own = standing.workers["jail"].own("A")
        for inside, outside in zip(OWN_DIRECTORIES, (own.home_path, own.tmp_path, own.data_path), strict=True):
            assert await seen.look(FILL, inside, str(TINY + (1 << 20))) == {"bytes": TINY + (1 << 20), "error": ""}
            assert await seen.look(TRY_TO_WRITE, inside) == {inside: ""}
            assert (outside / "written").is_file()
            (outside / "written").unlink()

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_limits_in_force_are_the_policys(self, standing: Standing, shape: Shape) -> None:
        """SDK fact: files, processes and file size are limited; the address space is only what the runtime itself has.

        Known gap of the jail: memory is not limited without cgroups, and nsjail's own 600 seconds of processor time end a
        worker, or an agent beside it, for good.
        """
        limits = standing.jail(shape).limits
        expected = {
            "Max processes": POLICY.max_pids,
            "Max open files": POLICY.max_open_files,
            "Max file size": (POLICY.max_file_size_mb or 0) << 20,
            "Max core file size": 0,
            "Max cpu time": 600,
        }
        assert {name: limits[name] for name in expected} == {name: (str(value),) * 2 for name, value in expected.items()}
        own = Path("/proc/self/limits").read_text().splitlines()
        (space,) = [line.split()[-2] for line in own if line.startswith("Max address space")]
        assert limits["Max address space"] == (space, space)

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_the_network_is_shared_and_this_machines_loopback_is_within_reach(
        self, standing: Standing, shape: Shape
    ) -> None:
        """SDK fact: no network of its own, hence every service on the loopback needs credentials."""
        seen = standing.jail(shape)
        assert seen.shares_network
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(BOUND)
            calling = asyncio.create_task(seen.look(CALL, str(listener.getsockname()[1])))
            accepted, _ = await asyncio.to_thread(listener.accept)
            with accepted:
                accepted.sendall(b"from outside")
            assert await calling == "from outside"

    def test_its_environment_is_made_from_the_systems_python_and_lies_where_a_jail_shows_it(self) -> None:
        """SDK fact: a jail shows the prefix of its Python and the system's directories, and nothing else."""
        python = venv.interpreter(jail.directory())
        code = "import sys; print(sys.base_prefix, sys.prefix)"
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
        base, prefix = map(Path, done.stdout.split())
        assert base == Path("/usr")
        assert prefix == jail.directory()
        assert not jail.hidden(prefix)
        assert os.access(jail.nsjail(), os.X_OK)
        assert jail.directory().parent in (host.cache().resolve(), jail.LASTING / f"langbot-coding-runners-{os.geteuid()}")


class TestWhoSeesWhat:
    """Two installations of one package."""

    @pytest.mark.asyncio(loop_scope="module")
    async def test_two_jails_see_nothing_of_each_other(self, standing: Standing) -> None:
        """SDK fact: own directories, own processes; our rule: nothing of one is put where the other could find it."""
        worker = standing.workers["jail"]
        canaries = {}
        for uid in "AB":
            own = worker.own(uid)
            canaries[uid] = f"file-of-{uid}-{secrets.token_hex(8)}"
            for place in (own.home_path, own.tmp_path, own.data_path):
                (place / canaries[uid]).write_text(canaries[uid])
        looked = {uid: await standing.jail("jail", uid).look(WALK, *OWN_DIRECTORIES) for uid in "AB"}
        for uid, other in ("AB", "BA"):
            assert looked[uid]["names"].count(canaries[uid]) == 3
            assert canaries[other] not in looked[uid]["names"]
            # The worker, and the program that looks.
            assert len(looked[uid]["pids"]) == 2
            paths = [str(place / canaries[other]) for place in (worker.own(other).data_path, worker.own(other).home_path)]
            assert await standing.jail("jail", uid).look(TRY_TO_READ, *paths) == dict.fromkeys(paths, "ENOENT")

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("shape", SHAPES)
    async def test_no_secret_is_on_a_command_line_or_in_an_environment(self, standing: Standing, shape: Shape) -> None:
        """Our rule: the form's secrets come by the pipe alone; SDK fact: the one-use capability is on nsjail's argv."""
        worker = standing.workers[shape]
        for uid in "AB":
            await worker.run("say hi", uid=uid, run_id=f"secrets-{uid}", config={"provider": "custom"})
        pids = [pid for uid in "AB" for pid in standing.jail(shape, uid).processes]
        seen = command_lines(pids) + environments(pids)
        assert not [secret for secret in SECRETS.values() if holds(seen, secret)]
        assert standing.jail(shape).environment[CAPABILITY].encode() in command_lines([standing.jail(shape).nsjail])

    @pytest.mark.asyncio(loop_scope="module")
    async def test_the_pool_refuses_agents_beside_it_and_names_the_other_places(self, standing: Standing) -> None:
        """Our rule: one process for all installations starts no agent beside itself."""
        worker = standing.workers["jailed_pool"]
        assert worker.pid("A") == worker.pid("B")
        for uid in "AB":
            config = {"provider": "custom", "acp-command": "/usr/bin/true", "workspace": "/tmp"}
            done = await worker.run("hi", uid=uid, run_id=f"local-{uid}", config=config)
            assert "coding.local_in_pool" in done.log
            assert "remote-ssh" in done.text
            assert "daemon" in done.text
            seen = standing.jail("jailed_pool")
            assert set(seen.processes) == {seen.nsjail, seen.worker}


class TestAnAgentInAJail:
    """The scripted agent beside the worker of one installation."""

    @pytest.mark.asyncio(loop_scope="module")
    async def test_it_works_in_the_installations_own_workspace_and_its_files_stay_there(self, standing: Standing) -> None:
        """Our rule: ``/data/workspace`` unless the form names another; on this machine below the installation's directory."""
        worker = standing.workers["jail"]
        for uid in "AB":
            done = await worker.run(f"touch made-by-{uid}\nsay made", uid=uid, run_id=f"made-{uid}", config=form(worker, uid))
            assert done.shown == ["made"], done.log
        for uid, other in ("AB", "BA"):
            workspace = worker.own(uid).data_path / "workspace"
            assert (workspace / f"made-by-{uid}").is_file()
            assert not (workspace / f"made-by-{other}").exists()
            assert workspace.stat().st_mode & 0o777 == 0o700

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_workspace_that_is_read_only_or_not_there_is_refused_in_words(self, standing: Standing) -> None:
        """Our rule: the person reads that the jail does not show it, or that nothing can be written."""
        worker = standing.workers["jail"]
        for workspace, code in (
            ("/plugin", "coding.workspace_not_writable"),
            (str(standing.base), "coding.workspace_not_visible"),
            ("/", "coding.workspace_root"),
        ):
            done = await worker.run("say hi", run_id=f"at-{code}", config=form(worker, workspace=workspace))
            assert (code in done.log, done.reason) == (True, "error"), done.log

    @pytest.mark.asyncio(loop_scope="module")
    async def test_its_environment_has_a_path_a_home_and_an_account(self, standing: Standing) -> None:
        """Our rule: an agent gets what a worker lacks, and only the secrets its form names."""
        worker = standing.workers["jail"]
        names = ("PATH", "HOME", "USER", "TMPDIR", "MINE", CAPABILITY, "PYTHONPATH")
        script = "\n".join(f"environ {name}\nsay |" for name in names)
        done = await worker.run(script, run_id="environment", config=form(worker, env_json='{"MINE": "${secret:KEY}"}'))
        said = done.shown[-1].split("|")
        assert "/usr/bin" in said[0].split(os.pathsep)
        account = (await standing.jail("jail").look(ACCOUNT))["name"] or str(os.geteuid())
        assert said[1:4] == ["/home", account, "/tmp"]
        assert said[4] == SECRETS["A"]
        assert said[5:] == ["", "", ""]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_attachments_reach_it_also_those_that_become_files(self, standing: Standing) -> None:
        """Our rule: pictures in the prompt, a document too large for it as a file that it can read in its workspace."""
        worker = standing.workers["jail"]
        big = b"line of a document\n" * 20_000
        files = [
            {"type": "image", "name": "p.png", "content": base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"p" * 20).decode()},
            {"type": "file", "name": "big.txt", "content": base64.b64encode(big).decode()},
        ]
        script = "blocks\nuntil /home/gate\nsay ended"
        given = {"text": script, "attachments": files}
        stream = worker.stream(script, run_id="attached", input=given, config=form(worker))
        shown = json.dumps([each.data for each in await until_shown(stream, "big.txt")])
        assert "image/png" in shown
        workspace = worker.own("A").data_path / "workspace"
        assert big in files_below(workspace).values()
        (worker.own("A").home_path / "gate").touch()
        async with asyncio.timeout(BOUND):
            assert [result async for result in stream][-1].type == "run.completed"
        assert big not in files_below(workspace).values()

    @pytest.mark.asyncio(loop_scope="module")
    async def test_what_it_asks_waits_for_a_person_between_runs(self, standing: Standing) -> None:
        """Our rule: the turn is parked in the jail, and the answer reaches the same process and turn."""
        worker = standing.workers["jail"]
        config = form(worker, acp_command=agent_in(worker, first_session=""))
        asked = await worker.run("risky touch allowed", run_id="ask", config=config, conversation="group_ask")
        assert "touch allowed" in asked.text
        workspace = worker.own("A").data_path / "workspace"
        assert not (workspace / "allowed").exists()
        agents = {pid: start for pid, start in standing.jail("jail").processes.items() if is_agent(pid)}
        assert len(agents) == 1
        answered = await worker.run("1", run_id="answer", config=config, conversation="group_ask")
        assert (workspace / "allowed").is_file(), answered.text + answered.log
        assert await gone(agents, 20.0)
        decided = {uid: worker.own(uid).data_path / ".langbot-coding-agents" / "decisions.jsonl" for uid in "AB"}
        assert "touch allowed" in decided["A"].read_text()
        assert decided["A"].stat().st_mode & 0o777 == 0o600
        assert not decided["B"].exists()


class TestItsEnd:
    """What is left when a jailed worker ends."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("who", ["worker", "nsjail"])
    async def test_a_killed_worker_leaves_no_process_and_the_session_goes_on(self, tmp_path: Path, who: str) -> None:
        """The kernel's rule: PID 1 takes all with it; nsjail's: so does its own end. Our rule: the session is resumed."""
        async with sdk_worker(built(), tmp_path / "runtime", "jail") as worker:
            log = worker.own("A").home_path / "log"
            config = form(worker, acp_command=agent_in(worker, log="/home/log"), keep_warm=600)
            stream = worker.stream("say begun\nchild\nhang", config=config)
            await until_shown(stream, "agent=")
            seen = Jail.of(worker.pid())
            processes = seen.processes
            assert len(processes) >= 5, "nsjail, the worker, a supervisor, the agent and its child"
            os.kill(getattr(seen, who), signal.SIGKILL)
            assert await gone(processes, 10.0)
            await stream.aclose()
            await worker.ready(other_than=seen.nsjail)
            assert (await worker.run("say back", run_id="r2", config=config)).shown[-1] == "back"
            methods = [json.loads(line).get("method") for line in log.read_text().splitlines()]
            assert methods.count("session/new") == 1
            assert methods.count("session/resume") + methods.count("session/load") == 1
            last = Jail.of(worker.pid()).processes
            assert len(last) >= 4, "the session is kept"
        assert await gone(last, 10.0)

    @pytest.mark.asyncio
    async def test_a_worker_that_is_pid_1_reaps_what_a_lost_supervisor_left_to_it(self, tmp_path: Path) -> None:
        """Our rule: what is re-parented to the worker is ended, and reaped by a later start; no other child is touched."""
        async with sdk_worker(built(), tmp_path / "runtime", "jail") as worker:
            stream = worker.stream("say begun\nchild\nhang", config=form(worker))
            await until_shown(stream, "agent=")
            seen = Jail.of(worker.pid())
            assert seen.inner_pid == 1
            tree = {pid: start for pid, start in seen.processes.items() if pid not in (seen.nsjail, seen.worker)}
            (supervisor,) = [pid for pid in children_of(seen.worker) if pid in tree]
            os.kill(supervisor, signal.SIGKILL)
            async with asyncio.timeout(BOUND):
                results = [result async for result in stream]
            assert results[-1].type in ("run.completed", "run.failed")
            assert await gone(tree, 20.0)
            assert (await worker.run("say on", run_id="r2", config=form(worker))).shown[-1] == "on"

            async def another() -> bool:
                await worker.run("say on", run_id=f"r-{secrets.token_hex(2)}", config=form(worker))
                return not seen.zombies

            async with asyncio.timeout(BOUND):
                while not await another():
                    pass
            assert set(seen.processes) == {seen.nsjail, seen.worker}

    @pytest.mark.asyncio
    async def test_removing_an_installation_ends_its_jail_and_no_other(self, tmp_path: Path) -> None:
        """SDK fact: a jailed worker is ended without a hook; our rule: its agents end all the same."""
        async with sdk_worker(built(), tmp_path / "runtime", "jail", installations={"A": {}, "B": {}}) as worker:
            for uid in "AB":
                await worker.run("say hi", uid=uid, config=form(worker, uid, keep_warm=600))
            ending, staying = (Jail.of(worker.pid(uid)).processes for uid in "AB")
            assert min(len(ending), len(staying)) >= 4
            await worker.revoke("A")
            assert await gone(ending, 20.0)
            assert Jail.of(worker.pid("B")).processes == staying

    @pytest.mark.asyncio
    async def test_the_packages_requirements_are_installed_in_a_jail_of_their_own_and_it_serves(self, tmp_path: Path) -> None:
        """SDK fact: pip runs in nsjail, too, from the index that the runtime names."""
        async with sdk_worker(built(), tmp_path / "runtime", "jail", real_dependencies=True) as worker:
            assert (await worker.run("say hi", config=form(worker))).shown == ["hi"]
            assert "asyncssh" in await Jail.of(worker.pid()).look(NAMES, "/plugin-dependencies")


# ------------------------------------------------------------------ looking


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_agent(pid: int) -> bool:
    """Whether this is the scripted agent itself and not what supervises it."""
    words = command_lines([pid]).split(b"\0")
    return b"/home/agent.py" in words[: len(jails.PYTHON) + 1]


TRY_TO_WRITE = """
import errno, json, os, sys
found = {}
for place in sys.argv[1:]:
    try:
        open(os.path.join(place, "written"), "w").close()
        found[place] = ""
    except OSError as exc:
        found[place] = errno.errorcode[exc.errno]
print(json.dumps(found))
"""
TRY_TO_READ = """
import errno, json, sys
found = {}
for path in sys.argv[1:]:
    try:
        found[path] = open(path).read()
    except OSError as exc:
        found[path] = errno.errorcode[exc.errno]
print(json.dumps(found))
"""
FILL = """
import errno, json, os, sys
place, left = os.path.join(sys.argv[1], "filled"), int(sys.argv[2])
written, error = 0, ""
with open(place, "wb", buffering=0) as file:
    try:
        while written < left:
            written += file.write(b"x" * min(65536, left - written))
    except OSError as exc:
        error = errno.errorcode[exc.errno]
os.unlink(place)
print(json.dumps({"bytes": written, "error": error}))
"""
ACCOUNT = """
import json, os, pwd
try:
    name = pwd.getpwuid(os.getuid()).pw_name
except KeyError:
    name = ""
print(json.dumps({"name": name, "etc": os.listdir("/etc")}))
"""
WALK = """
import json, os, sys
names = [name for place in sys.argv[1:] for _, folders, files in os.walk(place) for name in (*folders, *files)]
print(json.dumps({"names": names, "pids": [name for name in os.listdir("/proc") if name.isdigit()]}))
"""
CALL = """
import json, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as connection:
    print(json.dumps(connection.recv(100).decode()))
"""
NAMES = """
import json, os, sys
print(json.dumps(os.listdir(sys.argv[1])))
"""
