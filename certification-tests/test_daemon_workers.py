"""Messages through real workers of the SDK's runtime to real daemons, whose agent is the scripted one (local protocol fixture).

Two workers of their own with two machines, then both shapes through what machines and networks do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from testkit import daemon_rig, hostile_trees
from testkit.acp_harness import poll
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.daemon_sites import (
    BOUND,
    Site,
    command_lines,
    environments,
    files_below,
    forms_of,
    holds,
    listening,
    plugin_form,
    site,
    told_processes,
    until_shown,
)
from testkit.host_actions import message
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import built, gone, sdk_worker, wordy
from testkit.tls_front import TlsFront

pytestmark = [pytest.mark.sdk_worker, pytest.mark.timeout(180)]

TOKENS = {"A": "canary-A-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0", "B": "canary-B-aB7cD2eF9gH4iJ6kL1mN8oP3qR5sT0"}
WORKER_SECRET = "canary-of-worker-A-5f0c"
DAEMON_SECRET = "canary-of-daemon-A-91be"
PARENT_SECRET = "canary-of-the-parent-c2d7"
OVER = {"keep_warm": 0}
"""Form fields with which an agent ends with its run."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Site, Site]]:
    """Two workers with a machine each; every id is the same in both, and only A's side has secrets in its environment."""
    base = tmp_path_factory.mktemp("sites")
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PARENT_SECRET", PARENT_SECRET)
        secrets_of_a = {"WORKER_SECRET": WORKER_SECRET}
        a = await stack.enter_async_context(site(base / "A", TOKENS["A"], environment=secrets_of_a))
        b = await stack.enter_async_context(site(base / "B", TOKENS["B"]))
        await asyncio.gather(a.join(DAEMON_SECRET=DAEMON_SECRET), b.join())
        yield a, b


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Site]:
    """One worker and its machine, for tests that end one of them."""
    async with site(tmp_path, TOKENS["A"]) as made:
        await made.join()
        yield made


class TestTwoWorkers:
    """Two worker processes share the loopback and nothing else."""

    @pytest.mark.asyncio(loop_scope="module")
    async def test_each_has_a_listener_a_home_and_an_environment_of_its_own(self, sites: tuple[Site, Site]) -> None:
        """Our rule: one loopback address for each hub; nothing of whoever started the worker is in it."""
        pids = [each.worker.pid() for each in sites]
        assert pids[0] != pids[1]
        for each in sites:
            assert listening(each.worker.pid()) == {("127.0.0.1", each.port)}
            assert {host for host, _ in listening(each.daemon_pid)} <= {"127.0.0.1"}
        own = [dict(entry.partition(b"=")[::2] for entry in environments([pid]).split(b"\0")) for pid in pids]
        for name in (b"HOME", b"TMPDIR"):
            assert own[0][name] != own[1][name]
        assert not [each for each in own if b"PARENT_SECRET" in each or b"PATH" in each]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_daemon_with_the_others_token_is_refused(self, sites: tuple[Site, Site], tmp_path: Path) -> None:
        """Our rule: the token decides, not the daemon's id; the refused one stops with the reason, the good one stays."""
        a, b = sites
        sockets = a.home.log.read_bytes().count(b": connected")
        stranger = DaemonHome(tmp_path / "stranger", f"ws://127.0.0.1:{a.port}", token=b.token)
        code, said = await daemon_rig.run(("run", "--policy", str(stranger.policy)), stranger.environment())
        assert code == 1
        assert "does not admit" in said
        assert not holds(said.encode(), b.token)
        assert (await a.run("say mine", form=OVER)).shown == ["mine"]
        assert a.home.log.read_bytes().count(b": connected") == sockets

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_hub_on_a_port_that_is_taken_says_so_in_the_chat(self, sites: tuple[Site, Site], tmp_path: Path) -> None:
        """Our rule: nothing is shared by accident; the form's field is named, and the first hub goes on."""
        a, _ = sites
        async with site(tmp_path / "C", TOKENS["B"], port=a.port) as late:
            done = await late.run("say hi")
            assert "coding.daemon_bind_failed" in done.log
            assert '"daemon-port"' in done.text
            assert str(a.port) in done.text
            assert (done.terminal.type, done.reason) == ("run.completed", "error")
        assert (await a.run("say still here", form=OVER)).shown == ["still here"]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_the_same_ids_in_both_are_two(self, sites: tuple[Site, Site]) -> None:
        """Our rule: run, chat, person, daemon and vendor session have the same names on both sides, and nothing crosses."""
        counts = [len(each.prompts()) for each in sites]
        for number in range(3):
            said = [f"say {number} of {name}" for name in "AB"]
            both = (each.run(text, run_id=f"same-{number}") for each, text in zip(sites, said, strict=True))
            outcomes = await asyncio.gather(*both)
            assert [outcome.shown for outcome in outcomes] == [[f"{number} of A"], [f"{number} of B"]]
        for each, name, count in zip(sites, "AB", counts, strict=True):
            assert each.prompts()[count:] == [f"say {number} of {name}" for number in range(3)]
            assert {value["value"] for value in each.host.state.values()} == {"s-1"}
        assert sites[0].host.state.keys() == sites[1].host.state.keys()

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_cancelled_run_ends_its_own_agent_and_no_other(self, sites: tuple[Site, Site], tmp_path: Path) -> None:
        """Our rule: the cancelled tree is gone, stubborn children too; the other worker's turn runs to its end."""
        a, b = sites
        gate = tmp_path / "gate"
        other = b.stream(f"child\nuntil {gate}\nsay whole", run_id="same", form=OVER)
        theirs = told_processes(before := await until_shown(other, "agent="))
        mine = a.stream("child\nhang", run_id="same", form=OVER)
        ours = told_processes(await until_shown(mine, "agent="))
        assert not ours.keys() & theirs.keys()
        await mine.aclose()
        assert await gone(ours, 20.0)
        assert set(hostile_trees.living(theirs)) == theirs.keys()
        gate.touch()
        done = Outcome(before + [result async for result in other])
        assert done.shown[-1].endswith("whole")
        assert await gone(theirs, 20.0)
        assert (await a.run("say again", run_id="r2", form=OVER)).shown == ["again"]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_secrets_of_one_sides_environment_are_nowhere_else(self, sites: tuple[Site, Site]) -> None:
        """Our rule: a worker's and a daemon's own variables reach neither the other side nor their own agents."""
        asked = "environ WORKER_SECRET\nenviron DAEMON_SECRET\nenviron PARENT_SECRET\nsay end"
        outcomes = await asyncio.gather(*(each.run(asked) for each in sites))
        assert [outcome.shown for outcome in outcomes] == [["end"], ["end"]]
        a, b = sites
        assert holds(environments([a.worker.pid()]), WORKER_SECRET)
        assert holds(environments([a.daemon_pid]), DAEMON_SECRET)
        assert all(len(each.on_the_machine()) >= 3 for each in sites), "the agents are still there to be looked at"
        for secret, keepers in ((WORKER_SECRET, {a.worker.pid()}), (DAEMON_SECRET, {a.daemon_pid}), (PARENT_SECRET, set())):
            everybody = [pid for each in sites for pid in (*each.on_the_machine(), *each.in_the_worker())]
            assert not holds(environments([pid for pid in everybody if pid not in keepers]), secret)
            assert not holds(command_lines(everybody), secret)
        assert not [pid for pid in b.in_the_worker() if pid == a.worker.pid()]


class TestOneMachine:
    """One chat and one machine, through what happens to them."""

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_message_during_the_turn_is_answered_in_the_same_run(self, sites: tuple[Site, Site]) -> None:
        """Our rule: an agent that takes nothing in its turn gets it as the next one, on the user's machine, too."""
        a, _ = sites
        a.host.steering.append(message("say second"))
        done = await a.run('update {"sessionUpdate": "plan", "entries": []}\nsay first')
        assert done.shown == ["first", "second"]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_the_agents_call_of_a_tool_reaches_the_runs_own_host(self, sites: tuple[Site, Site]) -> None:
        """Our rule: tools travel over the relay; the worker opens no second listener, and the address ends with its job."""
        form = {"langbot_assets_enabled": True, "keep_warm": 0}
        calls = [each.start(f'tool echo {{"who": "{name}"}}', form=form) for each, name in zip(sites, "AB", strict=True)]
        for each, name, call in zip(sites, "AB", calls, strict=True):
            told = json.loads((await call).shown[-1])
            assert told["result"]["structuredContent"]["echo"] == {"who": name}
            made = [data["parameters"] for action, data in each.host.calls if action == "call_tool"]
            assert made == [{"who": name}]
            assert listening(each.worker.pid()) == {("127.0.0.1", each.port)}
            server = each.servers()[0]
            host, port = urllib.parse.urlsplit(server["url"]).netloc.split(":")
            assert (host, int(port)) in listening(each.daemon_pid)
            headers = {item["name"]: item["value"] for item in server["headers"]}
            assert await asyncio.to_thread(posted, server["url"], headers) in (401, 404)
            assert len(made) == 1

    @pytest.mark.asyncio(loop_scope="module")
    async def test_a_kept_session_calls_tools_for_its_new_run(self, sites: tuple[Site, Site]) -> None:
        """Our rule: a live session's next message calls with the authority of its own run."""
        a, _ = sites
        before = len([action for action, _ in a.host.calls if action == "call_tool"])
        for number in (1, 2):
            done = await a.run(f'tool echo {{"n": {number}}}', run_id=f"tools-{number}", form={"langbot_assets_enabled": True})
            assert json.loads(done.shown[-1])["result"]["structuredContent"]["echo"] == {"n": number}
        made = [data["run_id"] for action, data in a.host.calls if action == "call_tool"][before:]
        assert made == ["tools-1", "tools-2"]

    @pytest.mark.asyncio(loop_scope="module")
    async def test_stop_in_the_chat_ends_the_turn_and_not_the_agent(self, sites: tuple[Site, Site]) -> None:
        """Host fact: a stop arrives as steering text; the turn is cancelled in the agent, which takes the next message."""
        a, _ = sites
        stopped = a.methods().count("session/cancel")
        stream = a.stream("child\nhang")
        before = await until_shown(stream, "agent=")
        processes = told_processes(before)
        a.host.steering.append(message("/stop"))
        async with asyncio.timeout(BOUND):
            done = Outcome(before + [result async for result in stream])
        assert done.terminal.type == "run.completed"
        assert "Stopped" in done.text
        assert a.methods().count("session/cancel") == stopped + 1
        assert set(hostile_trees.living(processes)) == processes.keys()
        assert (await a.run("say on", run_id="r2", form=OVER)).shown == ["on"]
        assert await gone(processes, 20.0)

    @pytest.mark.asyncio(loop_scope="module")
    async def test_what_the_machines_own_file_forbids_is_refused_in_the_chat(self, sites: tuple[Site, Site]) -> None:
        """Our rule: the workstation decides; the person reads which key of its file would allow it."""
        a, _ = sites
        began = [method for method in a.methods() if method in ("initialize", "session/new")]
        for form, named in (
            ({"env_json": '{"LD_PRELOAD": "/tmp/evil.so"}'}, "job_environment"),
            ({"workspace": "/etc"}, "workspaces"),
            ({"daemon_agent": "root"}, "scripted"),
        ):
            done = await a.run("say hi", form=form)
            assert named in done.text
            assert (len(done.shown), done.reason) == (1, "error")
        assert [method for method in a.methods() if method in ("initialize", "session/new")] == began

    @pytest.mark.asyncio(loop_scope="module")
    async def test_an_agent_has_every_right_of_the_daemons_account(self, sites: tuple[Site, Site], tmp_path: Path) -> None:
        """Known gap: the policy decides what is started and where; what that does outside of its workspace nobody stops."""
        a, _ = sites
        outside = tmp_path / "outside"
        assert not outside.is_relative_to(a.home.workspace)
        assert (await a.run(f"touch {outside}\nsay done")).shown[-1] == "done"
        assert outside.exists()


class TestRestarts:
    """A worker or a daemon ends, and comes back."""

    @pytest.mark.asyncio
    async def test_a_killed_daemon_is_told_its_leftovers_end_and_the_next_message_works(self, desk: Site) -> None:
        """Our rule: the next daemon ends and proves what the killed one left; the person reads what became of the turn.

        The supervisors are killed together with it, so that nobody else ends the stubborn child.
        """
        stream = desk.stream("child\nhang")
        before = await until_shown(stream, "agent=")
        processes = told_processes(before)
        assert desk.daemon is not None
        keepers = [pid for pid in desk.on_the_machine() if pid not in processes]
        assert len(keepers) >= 2
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in keepers:
                os.kill(pid, number)
        await desk.daemon.process.wait()
        assert hostile_trees.living(processes), "the child outlives its agent"
        await desk.start_daemon()
        async with asyncio.timeout(BOUND):
            done = Outcome(before + [result async for result in stream])
        assert "agent=" in done.shown[0], "what was said stays"
        assert DAEMON_ID in done.text.partition("agent=")[2]
        assert "again" in done.text
        assert "coding.daemon_lost" in done.log
        assert done.reason == "error"
        assert await gone(processes, 20.0)
        assert (await desk.run("say back", run_id="r2")).shown[-1] == "back"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("how", ["terminate", "kill"])
    async def test_a_restarted_daemon_resumes_the_session_by_its_id(self, desk: Site, how: str) -> None:
        """Our rule: between two messages a restart of the daemon costs the live process and not the session."""
        await desk.run("say one")
        began = len(desk.methods())
        assert desk.daemon is not None
        await getattr(desk.daemon, how)()
        await desk.start_daemon()
        done = await desk.run("say two", run_id="r2")
        assert done.shown[-1] == "two"
        asked = desk.methods()[began:]
        assert asked.count("session/new") == 0
        assert asked.count("session/resume") + asked.count("session/load") == 1

    @pytest.mark.asyncio
    async def test_without_its_daemon_a_message_is_refused_by_name(self, desk: Site) -> None:
        """Our rule: after two seconds the person reads what is waited for, and in the end which daemon it was."""
        await desk.stop_daemon()
        done = await desk.run("say hi", form={"daemon_connect_timeout": 4})
        assert len(done.shown) == 2
        assert done.shown[0] == f'Waiting for "{DAEMON_ID}" to connect…'
        assert f'"{DAEMON_ID}" is not connected' in done.shown[1]
        assert "coding.daemon_offline" in done.log
        assert done.reason == "error"
        soon = await desk.run("say hi", run_id="r2", form={"daemon_connect_timeout": 1})
        assert len(soon.shown) == 1
        unknown = await desk.run("say hi", run_id="r3", form={"daemon_connect_timeout": 1, "daemon_id": "desk"})
        assert '"desk" is not connected' in unknown.text
        await desk.start_daemon()
        assert (await desk.run("say back", run_id="r4", form=OVER)).shown[-1] == "back"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("how", ["killed", "reconfigured"])
    async def test_a_restarted_worker_resumes_the_session_by_its_id(self, desk: Site, how: str) -> None:
        """Our rule: the daemon ends the old worker's job and proves it; the next message resumes, on the same machine."""
        await desk.run("say one")
        old = {pid: hostile_trees.start_time(pid) for pid in desk.on_the_machine()[1:]}
        began = len(desk.methods())
        if how == "killed":
            await desk.worker.ready(other_than=desk.worker.kill())
        else:
            await desk.worker.install("A", plugin_form(desk.port, desk.token), revision=2)
        done = await desk.run("say two", run_id="r2")
        assert done.shown[-1] == "two"
        asked = desk.methods()[began:]
        assert asked.count("session/new") == 0
        assert asked.count("session/resume") + asked.count("session/load") == 1
        assert await gone(old, 20.0)
        assert set(old).isdisjoint(desk.on_the_machine())

    @pytest.mark.asyncio
    async def test_a_worker_killed_in_the_turn_leaves_no_agent_on_the_machine(self, desk: Site) -> None:
        """Our rule: the hub's next process gives the machine a job only after the old one's end is proven."""
        stream = desk.stream("child\nhang")
        processes = told_processes(await until_shown(stream, "agent="))
        killed = desk.worker.kill()
        await stream.aclose()
        await desk.worker.ready(other_than=killed)
        assert set(hostile_trees.living(processes)) == processes.keys(), "the lease has just begun"
        assert (await desk.run("say back", run_id="r2")).shown[-1] == "back"
        assert hostile_trees.living(processes) == []

    @pytest.mark.asyncio
    async def test_other_settings_wait_for_the_jobs_that_run(self, desk: Site) -> None:
        """Our rule: a hub with jobs is never moved silently; the chat names the fields, and the job goes on to its end."""
        gate = desk.home.directory / "gate"
        stream = desk.stream(f"say begun\nuntil {gate}\nsay ended", form=OVER)
        before = await until_shown(stream, "begun")
        port = free_port()
        await desk.worker.reinitialize(plugin_form(port, desk.token))
        other = await desk.run("say hi", run_id="r2", conversation="person_8", form=OVER)
        assert "coding.daemon_hub_conflict" in other.log
        assert '"daemon-port"' in other.text
        assert f"127.0.0.1:{desk.port}" in other.text
        assert listening(desk.worker.pid()) == {("127.0.0.1", desk.port)}
        gate.touch()
        async with asyncio.timeout(BOUND):
            done = Outcome(before + [result async for result in stream])
        assert done.shown == ["begunended"]
        desk.home.url = f"ws://127.0.0.1:{port}"
        desk.home.write()
        await desk.stop_daemon()
        await desk.start_daemon()
        assert (await desk.run("say moved", run_id="r3", form=OVER)).shown[-1] == "moved"
        assert listening(desk.worker.pid()) == {("127.0.0.1", port)}


class TestCuts:
    """The path between worker and machine is cut in the middle of a turn."""

    @pytest.mark.asyncio
    async def test_a_cut_of_some_seconds_changes_nothing_in_the_answer(self, tmp_path: Path) -> None:
        """Our rule: within the lease a blip is invisible; the answer is the one of a run that was not cut."""
        gate, port = tmp_path / "gate", free_port()
        script = f"say before \nuntil {gate}\nmany 400\nsay after"
        async with CuttingProxy(("127.0.0.1", port)) as proxy, site(tmp_path, TOKENS["A"], port=port, url=proxy.url) as desk:
            await desk.join()
            stream = desk.stream(script, run_id="cut")
            before = await until_shown(stream, "before")
            agents = set(desk.on_the_machine())
            pipes = len(proxy.pipes)
            proxy.cut()
            gate.touch()
            await poll(lambda: proxy.refused >= 3)
            proxy.restore()
            async with asyncio.timeout(BOUND):
                cut = Outcome(before + [result async for result in stream])
            assert len(proxy.pipes) > pipes
            whole = await desk.run(script, run_id="whole")
            assert cut.shown == whole.shown == ["before " + "".join(f"{number} " for number in range(400)) + "after"]
            assert [cut.terminal.type, cut.reason] == [whole.terminal.type, whole.reason]
            assert set(desk.on_the_machine()) == agents
            assert desk.prompts() == ["say here", script, script]


class TestCanaries:
    """Secrets are where they were put and nowhere else."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("scheme", ["ws", "wss"])
    async def test_secrets_stay_off_the_wire_argv_environments_logs_and_files(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], scheme: str
    ) -> None:
        """Our rule: token, key and the tools' bearer never travel; a job's own secrets do, inside what TLS hides."""
        job_secret, server_secret = (f"canary/{secrets.token_urlsafe(24)}+=&?" for _ in range(2))
        gate, port = tmp_path / "gate", free_port()
        async with contextlib.AsyncExitStack() as stack:
            target, pin = ("127.0.0.1", port), ""
            if scheme == "wss":
                front = await stack.enter_async_context(TlsFront(target, tmp_path))
                target, pin = ("127.0.0.1", int(front.url.rpartition(":")[2])), front.pin
            proxy = await stack.enter_async_context(CuttingProxy(target))
            desk = await stack.enter_async_context(
                site(
                    tmp_path,
                    TOKENS["A"],
                    port=port,
                    url=proxy.url.replace("ws:", f"{scheme}:"),
                    environment=wordy(tmp_path / "wordy"),
                    plugin={"agent_secret_values": json.dumps({"JOB": job_secret, "SERVER": server_secret})},
                )
            )
            desk.home.write(extra='job_environment = ["JOB_TOKEN"]')
            if pin:
                text = desk.home.policy.read_text()
                desk.home.policy.write_text(text.replace("[[hubs]]", f'[[hubs]]\ncertificate_sha256 = "{pin}"'))
            server = {"url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": "Bearer ${secret:SERVER}"}}
            form = {
                "env_json": '{"JOB_TOKEN": "${secret:JOB}"}',
                "mcp_servers_json": json.dumps({"mcpServers": {"own": server}}),
                "langbot_assets_enabled": True,
            }
            await desk.join()
            stream = desk.stream(f"say begun\nuntil {gate}\n" + f"huge {3 << 20}\n" * 7 + "say end", form=form)
            before = await until_shown(stream, "begun")
            bearers = [item["value"].removeprefix("Bearer ") for each in desk.servers() for item in each["headers"]]
            assert len(bearers) == 2
            assert server_secret in bearers
            bearer = next(value for value in bearers if value != server_secret)
            never = [desk.token, desk.home.key.read_text().strip(), bearer]
            everywhere = [*never, job_secret, server_secret]

            # A journal that memory does not hold any more.
            proxy.cut()
            gate.touch()
            await poll(lambda: journals(desk.daemon_pid) != {})
            for descriptor, path in journals(desk.daemon_pid).items():
                assert path.startswith(str(desk.home.state))
                status = os.stat(descriptor)  # noqa: PTH116 - an open file without a name
                assert stat.S_IMODE(status.st_mode) == 0o600

            wire = proxy.recorded()
            assert not [secret for secret in never if holds(wire, secret)]
            seen = [holds(wire, secret) for secret in (job_secret, server_secret)]
            assert seen == [scheme == "ws"] * 2
            assert (b"say begun" in wire) == (scheme == "ws"), "the recording is of this conversation"

            machine, worker = desk.on_the_machine(), desk.in_the_worker()
            assert not [secret for secret in everywhere if holds(command_lines([*machine, *worker]), secret)]
            agents = [pid for pid in machine if b"scripted_acp_agent" in command_lines([pid])]
            assert len(agents) == 1
            assert holds(environments(agents), job_secret)
            assert not [secret for secret in (*never, server_secret) if holds(environments(agents), secret)]
            others = environments([pid for pid in (*machine, *worker) if pid not in agents])
            assert not [secret for secret in everywhere if holds(others, secret)]

            kept = files_below(desk.home.state, tmp_path / "worker" / "home" / ".local" / "state")
            assert {"jobs.json", "audit.jsonl"} <= {file.name for file in kept}
            assert [file for file in kept if file.suffix == ".pending"]
            for file in kept:
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name
                assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700, file.parent.name
            written = files_below(desk.home.state, desk.home.workspace, tmp_path / "worker", tmp_path / "runtime")
            assert not [file for file, data in written.items() for secret in everywhere if holds(data, secret)]
            assert stat.S_IMODE(desk.home.key.stat().st_mode) == 0o600

            proxy.restore()
            desk.host.steering.append(message("/stop"))
            async with asyncio.timeout(BOUND):
                done = Outcome(before + [result async for result in stream])
            said = "".join(each.model_dump_json() for each in done.results) + repr(desk.host.calls)
            assert not [secret for secret in everywhere if holds(said.encode(), secret)]
            await desk.worker.revoke()
        captured = capfd.readouterr()
        logs = (captured.out + captured.err).encode() + desk.home.log.read_bytes()
        assert b"[DEBUG]" in logs
        assert b" DEBUG " in logs
        assert not [secret for secret in everywhere if holds(logs, secret)]

    def test_what_looks_for_them_finds_them(self) -> None:
        """The search itself: each form is found inside of other bytes, and a secret that is not there is not."""
        secret = "canary-/+=&?" + secrets.token_urlsafe(24)
        for before in (b"", b"a", b"ab", b"abc"):
            for after in (b"", b"z", b"zy"):
                whole = before + secret.encode() + after
                for form in (whole, whole.hex().encode(), base64.b64encode(whole), base64.urlsafe_b64encode(whole)):
                    assert holds(b"{" + form + b"}", secret)
        assert holds(urllib.parse.quote("x" + secret + "y").encode(), secret)
        assert not holds(b"".join(forms_of(secret[::-1])), secret)


class TestPool:
    """One worker and one listener for all installations."""

    @pytest.mark.asyncio
    async def test_a_revoked_installation_loses_its_daemon_job_and_agent_and_no_other(self, tmp_path: Path) -> None:
        """Our rule: the token alone decides whose a daemon is; revocation ends one installation's, in the middle of a turn."""
        port, gate = free_port(), tmp_path / "gate"
        forms = {uid: plugin_form(port, TOKENS[uid]) for uid in "AB"}
        async with contextlib.AsyncExitStack() as stack:
            worker = await stack.enter_async_context(sdk_worker(built(), tmp_path / "runtime", "pool", installations=forms))
            a, b = (Site(worker, tmp_path / uid, port, TOKENS[uid], uid=uid) for uid in "AB")
            for each in (a, b):
                stack.push_async_callback(each.stop_daemon)
            await asyncio.gather(a.join(), b.join())
            assert worker.pid("A") == worker.pid("B")
            assert listening(worker.pid("A")) == {("127.0.0.1", port)}
            assert environments(a.in_the_worker()) and not holds(environments(a.in_the_worker()), a.token)

            kept = b.stream(f"child\nuntil {gate}\nsay whole", run_id="same", form=OVER)
            theirs = told_processes(before := await until_shown(kept, "agent="))
            lost = a.stream("child\nhang", run_id="same", form=OVER)
            ours = told_processes(await until_shown(lost, "agent="))
            assert not ours.keys() & theirs.keys()
            await worker.revoke("A")
            assert await gone(ours, 20.0)
            await lost.aclose()
            await poll(lambda: b": parked" in a.home.log.read_bytes())
            assert b"installation_revoked" in a.home.log.read_bytes()
            assert set(hostile_trees.living(theirs)) == theirs.keys()
            gate.touch()
            async with asyncio.timeout(BOUND):
                done = Outcome(before + [result async for result in kept])
            assert done.shown[-1].endswith("whole")
            assert b.home.log.read_bytes().count(b": connected") == 1
            assert not [word for word in (b": lost", b": refused", b": parked") if word in b.home.log.read_bytes()]
            assert (await b.run("say on", run_id="r2", form=OVER)).shown == ["on"]
            assert a.prompts() == ["say here", "child\nhang"]
            assert listening(worker.pid("B")) == {("127.0.0.1", port)}

    @pytest.mark.asyncio
    async def test_a_killed_shared_worker_leaves_no_agent_on_any_machine(self, tmp_path: Path) -> None:
        """Our rule: without a disk the fence is what each daemon's own table says; each installation gets its session back."""
        port = free_port()
        forms = {uid: plugin_form(port, TOKENS[uid]) for uid in "AB"}
        async with contextlib.AsyncExitStack() as stack:
            worker = await stack.enter_async_context(sdk_worker(built(), tmp_path / "runtime", "pool", installations=forms))
            both = [Site(worker, tmp_path / uid, port, TOKENS[uid], uid=uid) for uid in "AB"]
            for each in both:
                stack.push_async_callback(each.stop_daemon)
            await asyncio.gather(*(each.join() for each in both))
            streams = [each.stream("child\nhang", run_id="same") for each in both]
            trees = [told_processes(await until_shown(stream, "agent=")) for stream in streams]
            killed = worker.kill()
            for stream in streams:
                await stream.aclose()
            for each in both:
                await worker.ready(each.uid, other_than=killed)
            backs = await asyncio.gather(*(each.run(f"say back in {each.uid}", run_id="r2") for each in both))
            assert [back.shown[-1] for back in backs] == ["back in A", "back in B"]
            assert [hostile_trees.living(tree) for tree in trees] == [[], []]
            for each in both:
                assert each.prompts() == ["say here", "child\nhang", f"say back in {each.uid}"]
                assert each.methods().count("session/new") == 1

    @pytest.mark.asyncio
    async def test_a_weak_or_shared_token_is_refused_in_words(self, tmp_path: Path) -> None:
        """Our rule: where a token decides whose a daemon is, it must be good and nobody else's."""
        port = free_port()
        forms = {"A": plugin_form(port, "frail-one"), "B": plugin_form(port, TOKENS["B"]), "C": plugin_form(port, TOKENS["B"])}
        async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=forms) as worker:
            a, b, c = (Site(worker, tmp_path / uid, port, TOKENS["B"], uid=uid) for uid in "ABC")
            weak = await a.run("say hi", form={"daemon_connect_timeout": 1})
            assert "coding.daemon_token_required" in weak.log
            assert '"daemon-token"' in weak.text
            assert "frail-one" not in weak.text + weak.log
            waiting = b.start("say hi", run_id="r2", form={"daemon_connect_timeout": 300})
            await poll(lambda: ("127.0.0.1", port) in listening(worker.pid("B")))
            shared = await c.run("say hi", run_id="r3", form={"daemon_connect_timeout": 1})
            assert "coding.daemon_token_conflict" in shared.log
            assert "coding.daemon_token_conflict" in (await waiting).log


def posted(url: str, headers: dict[str, str]) -> int:
    """The status that a JSON-RPC call gets."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=BOUND) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code


def journals(pid: int) -> dict[str, str]:
    """The journals a daemon has on disk: the open file under ``/proc`` to the name it no longer has."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if "/.journal-" in name and name.endswith(" (deleted)"):
                found[str(descriptor)] = name
    return found
