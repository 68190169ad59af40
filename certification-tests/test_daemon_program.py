"""The daemon program: real processes on both sides, the scripted agent (a local protocol fixture) as the agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pkg import limits
from pkg.agent_api import (
    Answer,
    ApprovalRequested,
    McpServer,
    Prompt,
    SessionSpec,
    SessionStarted,
    TextDelta,
    TurnEnded,
    to_json,
)
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.errors import CodingError, ProcessCleanupUnconfirmed, TurnInProgress
from pkg.remote_session import RemoteDriver
from pkg.runtime_support import session_guard
from pkg.supervised_process import JOB_MARKER
from testkit import daemon_rig, hostile_trees
from testkit.acp_harness import poll
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_rig import DAEMON_ID, DaemonHome, following, opened, remote, running, told_pids, turn
from testkit.relay_rig import OTHER_TOKEN, TOKEN, WAIT, port_of
from testkit.tls_front import TlsFront

PERMISSION = json.dumps(
    {
        "toolCall": {"toolCallId": "t1", "title": "rm -rf build", "kind": "execute", "rawInput": {"command": "rm -rf build"}},
        "options": [
            {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
            {"optionId": "no", "name": "No", "kind": "reject_once"},
        ],
    }
)


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[AgentRuntimeDaemonHub, DaemonHome]]:
    """A hub and a workstation whose agent logs every message it receives."""
    async with daemon_rig.hub_and_home(tmp_path, log=str(tmp_path / "agent.log")) as both:
        yield both


def text_of(events: list[Any]) -> str:
    """The answer among events."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


class TestSessions:
    """A session on the user's machine behaves as one beside the hub."""

    @pytest.mark.asyncio
    async def test_turns_stream_and_end(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """Two turns of one live session come in order, each with one end, in the default workspace's real path."""
        hub, home = pair
        async with running(home), opened(hub) as session:
            assert session.directory == str(home.workspace.resolve())
            first = await turn(session, "say one", "many 50")
            assert [event for event in first if isinstance(event, SessionStarted)] == [SessionStarted(session.session_id)]
            assert text_of(first) == "one" + "".join(f"{number} " for number in range(50))
            assert first[-1] == TurnEnded("end_turn")
            assert text_of(await turn(session, "say two")) == "two"
            assert session.alive
        assert not session.alive

    @pytest.mark.asyncio
    async def test_a_long_answer_is_whole(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A message of several megabytes travels in parts and arrives as one text."""
        hub, home = pair
        async with running(home), opened(hub) as session:
            answer = text_of(await turn(session, f"huge {3 << 20}"))
            assert len(answer) > (3 << 20) - 1000 and set(answer) == {"x"}

    @pytest.mark.asyncio
    async def test_an_approval_is_answered_through_the_hub(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """The agent waits until the hub's answer arrives, and gets exactly that one; a second answer is refused."""
        hub, home = pair
        async with running(home), opened(hub) as session:
            await session.prompt(Prompt(f"perm {PERMISSION}"))
            asked = (await following(session, lambda event: isinstance(event, ApprovalRequested)))[-1]
            assert isinstance(asked, ApprovalRequested)
            assert await session.answer(asked.request_id, Answer("yes"))
            events = await following(session, lambda event: isinstance(event, TurnEnded))
            assert json.loads(text_of(events))["outcome"] == {"outcome": "selected", "optionId": "yes"}
            assert not await session.answer(asked.request_id, Answer("no"))

    @pytest.mark.asyncio
    async def test_an_interrupt_ends_the_turn_and_not_the_session(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A cancelled turn ends normally, and the next one runs in the same process."""
        hub, home = pair
        async with running(home), opened(hub) as session:
            await session.prompt(Prompt("say begun\nhang"))
            await following(session, lambda event: isinstance(event, TextDelta))
            with pytest.raises(TurnInProgress):
                await session.prompt(Prompt("say too early"))
            assert not await session.steer(Prompt("say more"))
            await session.interrupt()
            events = await following(session, lambda event: isinstance(event, TurnEnded))
            assert events[-1] == TurnEnded("cancelled")
            assert text_of(await turn(session, "say again")) == "again"

    @pytest.mark.asyncio
    async def test_closing_in_a_turn_leaves_no_process(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """Closing returns when a stubborn child in a session of its own is gone, too; the open turn gets its end."""
        hub, home = pair
        async with running(home) as daemon:
            async with opened(hub) as session:
                await session.prompt(Prompt("child\nhang"))
                pids = await told_pids(session)
                await session.close()
                assert hostile_trees.living(pids) == []
                assert (await following(session, lambda event: False))[-1] == TurnEnded("cancelled")
            await poll(lambda: daemon_rig.descendants(daemon.pid) == [])

    @pytest.mark.asyncio
    async def test_an_agent_that_dies_ends_its_turn_with_the_reason(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The death is told once, the session is over, and a new one can be opened."""
        hub, home = pair
        async with running(home):
            async with opened(hub) as session:
                events = await turn(session, "say dying", "kill")
                assert isinstance(events[-1], TurnEnded) and events[-1].error is not None
                assert (events[-1].error.code, events[-1].error.params["code"]) == ("coding.agent_exited", "SIGKILL")
                assert await following(session, lambda event: False) == []
                assert not session.alive
                with pytest.raises(CodingError):
                    await session.prompt(Prompt("say anybody"))
            async with opened(hub) as session:
                assert text_of(await turn(session, "say alive")) == "alive"

    @pytest.mark.asyncio
    async def test_an_agent_that_does_not_start_is_told_with_its_last_words(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The driver's own code, parameters and the agent's words travel; the job is over without a fence."""
        hub, home = pair
        home.agent |= {"initialize": "exit 3", "stderr": "no license found\n"}
        home.write()
        async with running(home):
            with pytest.raises(CodingError) as told:
                await remote(hub).open(SessionSpec(command=(), cwd=""))
            assert told.value.code == "coding.agent_exited"
            assert "no license found" in told.value.detail
            await hub.wait_for_daemon(DAEMON_ID, WAIT)

    @pytest.mark.asyncio
    async def test_a_session_is_resumed_with_one_writer(self, tmp_path: Path) -> None:
        """A stored session is opened again by its id, and while it is open nobody else on the machine gets it."""
        async with daemon_rig.hub_and_home(tmp_path, state=str(tmp_path)) as (hub, home), running(home):
            async with opened(hub) as session:
                await turn(session, "say remember")
                name = session.session_id
            async with opened(hub, resume_session_id=name) as session:
                started = await following(session, lambda event: isinstance(event, SessionStarted))
                assert started[-1] == SessionStarted(name, resumed=True)
                with pytest.raises(CodingError) as busy:
                    await remote(hub).open(SessionSpec(command=(), cwd="", resume_session_id=name))
                assert busy.value.code == "coding.session_busy"

    @pytest.mark.asyncio
    async def test_a_new_session_s_writer_is_the_only_one_until_its_processes_are_gone(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The guard ends after the agent, not with the wish to end it: what is still ending may still write."""
        hub, home = pair
        guards = home.directory / limits.STATE_DIRECTORY / "sessions"
        async with running(home), opened(hub) as session:
            await session.prompt(Prompt("child\nhang"))
            pids = await told_pids(session)
            closing = asyncio.create_task(session.close())
            async with session_guard(guards, session.directory, session.session_id, wait=WAIT):
                assert hostile_trees.living(pids) == []
            await closing

    @pytest.mark.asyncio
    async def test_a_cut_in_the_middle_of_a_turn_changes_nothing(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """What the agent says while nobody is connected arrives afterwards, whole; the wire never carried token or key."""
        hub, home = pair
        gate = home.directory / "gate"
        async with CuttingProxy(port_of(hub)) as proxy:
            home.policy.write_text(home.policy.read_text().replace(home.url, proxy.url))
            async with running(home), opened(hub) as session:
                await session.prompt(Prompt(f"say before\nuntil {gate}\nmany 500\nsay after"))
                await following(session, lambda event: isinstance(event, TextDelta))
                proxy.cut()
                gate.touch()
                await poll(lambda: b": no connection (" in home.log.read_bytes())
                proxy.restore()
                events = await following(session, lambda event: isinstance(event, TurnEnded))
                assert text_of(events) == "".join(f"{number} " for number in range(500)) + "after"
                assert events[-1] == TurnEnded("end_turn")
            wire = proxy.recorded()
            assert len(proxy.pipes) >= 2 and b"many 500" in wire
            for secret in (TOKEN, home.key.read_text().strip()):
                raw = secret.encode()
                for form in (raw, base64.b64encode(raw), raw.hex().encode(), urllib.parse.quote(secret, safe="").encode()):
                    assert form not in wire


class TestTools:
    """LangBot's tools on the user's machine."""

    @pytest.mark.asyncio
    async def test_the_agent_reaches_them_by_an_address_of_its_job(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The agent is given a loopback address with a bearer; without the bearer, and after the job, nothing answers."""
        hub, home = pair
        called: list[Any] = []

        async def tools(payload: Any) -> Any:
            called.append(payload)
            return {"jsonrpc": "2.0", "id": payload["id"], "result": {"tools": []}}

        call = {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}
        async with running(home), aiohttp.ClientSession() as http:
            async with opened(hub, tools=tools) as session:
                server = json.loads(text_of(await turn(session, "mcp")))[0]
                headers = {item["name"]: item["value"] for item in server["headers"]}
                assert server["url"].startswith("http://127.0.0.1:")
                async with http.post(server["url"], json=call, headers=headers) as answered:
                    assert (await answered.json())["result"] == {"tools": []}
                async with http.post(server["url"], json=call) as bare:
                    assert bare.status == 401
                assert called == [call]
                assert headers["Authorization"].encode() not in b"".join(secret_places(home, session))
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(server["url"], json=call, headers=headers) as late:
                    assert late.status in (401, 404)
            assert called == [call]


def secret_places(home: DaemonHome, session: Any) -> list[bytes]:
    """Logs and state files of the workstation."""
    return [file.read_bytes() for file in (home.log, *home.state.rglob("*")) if file.is_file()]


class TestCrashes:
    """What a daemon leaves when it dies is ended and proven by the next."""

    @pytest.mark.asyncio
    async def test_a_killed_daemon_s_job_is_gone_and_proven_by_its_successor(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """SIGKILL in the middle of a tool: the turn ends as lost, the children are gone, the fence falls by proof."""
        hub, home = pair
        async with running(home) as daemon:
            session = await remote(hub).open(SessionSpec(command=(), cwd=""))
            await session.prompt(Prompt("child\nhang"))
            pids = await told_pids(session)
            await daemon.kill()
        async with running(home):
            events = await following(session, lambda event: False)
            ends = [event for event in events if isinstance(event, TurnEnded)]
            assert len(ends) == 1 and ends[0].error is not None and ends[0].error.code == "coding.daemon_lost"
            await session.close()
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            assert hostile_trees.living(pids) == []
            async with opened(hub) as again:
                assert text_of(await turn(again, "say back")) == "back"

    @pytest.mark.asyncio
    async def test_what_outlived_daemon_and_supervisor_is_found_by_its_marker(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """With every supervisor killed too, a stubborn child lives on alone; the next daemon ends it before it connects."""
        hub, home = pair
        async with running(home) as daemon:
            session = await remote(hub).open(SessionSpec(command=(), cwd=""))
            await session.prompt(Prompt("child\nhang"))
            pids = await told_pids(session)
            below = daemon_rig.descendants(daemon.pid)
            others = [pid for pid in below if pid not in pids]
            assert others, "the agent has a supervisor"
            for pid in (daemon.pid, *others):
                os.kill(pid, signal.SIGSTOP)
            for pid in (daemon.pid, *others):
                os.kill(pid, signal.SIGKILL)
            await daemon.process.wait()
        left = [
            pid for pid in hostile_trees.living(pids) if f"{JOB_MARKER}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        ]
        assert left, "the child in its own session outlived its supervisor"
        async with running(home):
            await session.close()
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            assert hostile_trees.living(pids) == []

    @pytest.mark.asyncio
    async def test_a_gentle_stop_ends_the_jobs_first(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """SIGTERM: the agent is gone, the turn is told why, the exit code is 0, and no fence is left."""
        hub, home = pair
        async with running(home) as daemon:
            session = await remote(hub).open(SessionSpec(command=(), cwd=""))
            await session.prompt(Prompt("child\nhang"))
            pids = await told_pids(session)
            assert await daemon.terminate() == 0
        assert hostile_trees.living(pids) == []
        events = await following(session, lambda event: False)
        assert isinstance(events[-1], TurnEnded) and events[-1].error is not None
        assert events[-1].error.code == "coding.daemon_stopped"
        await session.close()
        async with running(home):
            await hub.wait_for_daemon(DAEMON_ID, WAIT)

    @pytest.mark.asyncio
    async def test_two_daemons_never_share_a_table(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A second daemon on one state directory stops at once and says why."""
        hub, home = pair
        async with running(home):
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            code, output = await daemon_rig.run(("run", "--policy", str(home.policy)), home.environment())
            assert code == 2 and "another daemon" in output

    @pytest.mark.asyncio
    async def test_what_cannot_be_proven_keeps_the_fence_until_it_can(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """A process that may be the job's but lacks its marker is not touched; when it is gone, the fence falls by itself."""
        hub, home = pair
        async with running(home) as daemon:
            session = await remote(hub).open(SessionSpec(command=(), cwd=""))
            await daemon.kill()
        stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        try:
            table = next(home.state.rglob("jobs.json"))
            kept = json.loads(table.read_text())
            for entry in kept["jobs"].values():
                entry["processes"] = [[stranger.pid, hostile_trees.start_time(stranger.pid)]]
            table.write_text(json.dumps(kept))
            async with running(home):
                async with asyncio.timeout(WAIT):
                    await session.job.ended.wait()
                with pytest.raises(CodingError) as fenced:
                    await RemoteDriver(hub, DAEMON_ID, "scripted", "acp").open(SessionSpec(command=(), cwd=""))
                assert fenced.value.code == "coding.daemon_fenced"
                with pytest.raises(ProcessCleanupUnconfirmed):
                    await session.close()
                assert stranger.returncode is None
                stranger.kill()
                await stranger.wait()
                await hub.wait_for_daemon(DAEMON_ID, WAIT)
                async with opened(hub) as again:
                    assert text_of(await turn(again, "say proven")) == "proven"
        finally:
            if stranger.returncode is None:
                stranger.kill()
                await stranger.wait()


class TestCertificates:
    """``wss://`` with a certificate that no authority knows."""

    @pytest.mark.asyncio
    async def test_a_pinned_certificate_is_accepted_and_no_other(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome], tmp_path: Path
    ) -> None:
        """With its fingerprint the daemon connects; with another one, or without any, nothing is said to the hub."""
        hub, home = pair
        async with TlsFront(port_of(hub), tmp_path) as front:
            plain = home.policy.read_text().replace(home.url, front.url)
            for line in ("", f'certificate_sha256 = "{"0" * 64}"'):
                home.policy.write_text(plain.replace("[[hubs]]", f"[[hubs]]\n{line}"))
                home.log.unlink(missing_ok=True)
                async with running(home):
                    await poll(lambda: home.log.exists() and b": no connection (" in home.log.read_bytes())
                    assert await hub.list_daemons() == []
            home.policy.write_text(plain.replace("[[hubs]]", f'[[hubs]]\ncertificate_sha256 = "{front.pin}"'))
            async with running(home), opened(hub) as session:
                assert text_of(await turn(session, "say sealed")) == "sealed"


class TestRefusals:
    """The workstation decides; what it refuses has started nothing."""

    @pytest.mark.parametrize(
        ("code", "spec"),
        [
            ("policy_workspace_outside", {"cwd": "/etc"}),
            ("policy_workspace_outside", {"cwd": "../.."}),
            ("policy_workspace_outside", {"cwd": "escape"}),
            ("policy_workspace_missing", {"cwd": "nowhere"}),
            ("policy_environment", {"env": {"LD_PRELOAD": "/tmp/evil.so"}}),
            ("policy_approvals", {"policy": "allow-all"}),
            ("policy_option", {"options": {"mode": "bypassPermissions"}}),
            ("policy_mcp_command", {"mcp_servers": (McpServer("x", "stdio", command=("sh", "-c", "id")),)}),
        ],
    )
    @pytest.mark.asyncio
    async def test_outside_the_policy(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome], tmp_path: Path, code: str, spec: dict[str, Any]
    ) -> None:
        """Each is refused by its own code, and the daemon takes the next job."""
        hub, home = pair
        (home.workspace / "escape").symlink_to("/etc")
        async with running(home) as daemon:
            with pytest.raises(CodingError) as refused:
                await remote(hub).open(SessionSpec(**{"command": (), "cwd": "", **spec}))
            assert refused.value.code == f"coding.{code}"
            assert not (tmp_path / "agent.log").exists()
            assert daemon_rig.descendants(daemon.pid) == []
            await hub.wait_for_daemon(DAEMON_ID, WAIT)

    @pytest.mark.asyncio
    async def test_a_command_line_of_the_hub_never_runs(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome], tmp_path: Path
    ) -> None:
        """A hub that sends a command is refused, as are an unknown agent, another driver and what is no job."""
        hub, home = pair
        proof = tmp_path / "it-ran"
        good = {"agent": "scripted", "driver": "acp", "spec": to_json(SessionSpec(command=(), cwd=""))}
        evil = to_json(SessionSpec(command=("touch", str(proof)), cwd=""))
        wanted = {
            "coding.policy_command_refused": good | {"spec": evil},
            "coding.policy_agent_unknown": good | {"agent": "root"},
            "coding.policy_driver_other": good | {"driver": "codex"},
            "coding.daemon_payload_invalid": {"spec": 1},
        }
        async with running(home):
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            for code, payload in wanted.items():
                job = await hub.open_job(DAEMON_ID, payload)
                async with asyncio.timeout(WAIT):
                    await job.ended.wait()
                assert isinstance(job.error, dict) and job.error["code"] == code
        assert not proof.exists()

    @pytest.mark.asyncio
    async def test_the_machine_s_own_limit_of_jobs(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A job beyond ``max_jobs`` is refused, and its place is free again when one has ended."""
        hub, home = pair
        home.write(agent_extra="max_jobs = 1")
        async with running(home):
            async with opened(hub):
                with pytest.raises(CodingError) as full:
                    await remote(hub).open(SessionSpec(command=(), cwd=""))
                assert full.value.code == "coding.policy_jobs_full" and full.value.retryable
            async with opened(hub) as session:
                assert text_of(await turn(session, "say free")) == "free"

    @pytest.mark.asyncio
    async def test_a_missing_agent_s_directories_are_told_to_the_machine_s_owner_alone(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The hub learns the command's name; where it was looked for is in the daemon's log and in nothing that travels."""
        hub, home = pair
        with home.policy.open("a") as file:
            file.write('[agents.absent]\ncommand = ["no-such-agent"]\n')
        async with running(home):
            with pytest.raises(CodingError) as told:
                await remote(hub, agent="absent").open(SessionSpec(command=(), cwd=""))
        assert (told.value.code, told.value.params) == (
            "coding.agent_not_found",
            {"daemon": DAEMON_ID, "name": "no-such-agent"},
        )
        assert "/" not in told.value.text("en_US")
        assert re.search(rb"looked for no-such-agent in \S*/", home.log.read_bytes())

    @pytest.mark.asyncio
    async def test_an_approval_policy_that_the_package_does_not_know_stops_the_daemon(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The program tells the reader its own policies, so that a typing mistake is named and refuses nothing later."""
        _, home = pair
        home.write(extra='approvals = ["alow-all"]')
        line = home.policy.read_text().splitlines().index('approvals = ["alow-all"]') + 1
        code, output = await daemon_rig.run(("run", "--policy", str(home.policy)), home.environment())
        known = "ask, allow-edits, allow-all, deny"
        assert (code, output) == (2, f'daemon: {home.policy}:{line}: approvals: "alow-all" is none of: {known}\n')


class TestSecrets:
    """The daemon's secrets are nowhere but where they were put."""

    @pytest.mark.asyncio
    async def test_a_key_that_is_wrong_stops_the_daemon_with_the_hub_s_reason(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """It does not loop, its exit code is 1, and neither key nor token is in what it says."""
        _, home = pair
        wrong = home.directory / "wrong.token"
        wrong.write_text(OTHER_TOKEN + "\n")
        wrong.chmod(0o600)
        home.policy.write_text(home.policy.read_text().replace('key_file = "laptop.key"', 'token_file = "wrong.token"'))
        code, output = await daemon_rig.run(("run", "--policy", str(home.policy)), home.environment())
        assert code == 1 and "does not admit" in output
        assert OTHER_TOKEN not in output

    @pytest.mark.asyncio
    async def test_canaries_stay_out_of_arguments_environments_logs_and_files(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The token by environment: no descendant has it, no argument, no log at DEBUG, no state file, in any usual form."""
        hub, home = pair
        home.policy.write_text(home.policy.read_text().replace('key_file = "laptop.key"', ""))
        canary = home.key.read_text().strip()
        home.key.unlink()
        async with (
            running(home, CODING_DAEMON_TOKEN=TOKEN, FOREIGN="canary-foreign-variable") as daemon,
            opened(hub) as session,
        ):
            assert text_of(await turn(session, "environ FOREIGN", "environ CODING_DAEMON_TOKEN")) == ""
            below = daemon_rig.descendants(daemon.pid)
            assert len(below) >= 2
            places = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (daemon.pid, *below)]
            places += [Path(f"/proc/{pid}/environ").read_bytes() for pid in below]
            places += secret_places(home, session)
        places += secret_places(home, session)
        seen = b"\n".join(places)
        assert b"acp" in seen or b"scripted" in seen
        for secret in (TOKEN, canary, "canary-foreign-variable"):
            raw = secret.encode()
            for form in (raw, base64.b64encode(raw), raw.hex().encode(), urllib.parse.quote(secret, safe="").encode()):
                assert form not in seen

    @pytest.mark.asyncio
    async def test_state_is_the_account_s_own(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """The job table is 0600 in directories of 0700, and lists a job only while it is not forgotten."""
        hub, home = pair
        async with running(home):
            async with opened(hub):
                table = next(home.state.rglob("jobs.json"))
                assert table.stat().st_mode & 0o777 == 0o600
                assert table.parent.stat().st_mode & 0o777 == 0o700
                assert len(json.loads(table.read_text())["jobs"]) == 1
            await poll(lambda: json.loads(table.read_text())["jobs"] == {})

    @pytest.mark.asyncio
    async def test_the_owner_s_variables_reach_the_agent_only_by_name(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """``environment`` hands on the daemon's own variable, ``job_environment`` lets a job set one."""
        hub, home = pair
        home.write(extra='job_environment = ["FROM_JOB"]', agent_extra='environment = ["OWN"]')
        async with running(home, OWN="mine", OTHER="hidden"), opened(hub, env={"FROM_JOB": "given"}) as session:
            events = await turn(session, "environ OWN", "environ FROM_JOB", "environ OTHER")
            assert text_of(events) == "minegiven"


class TestCommandLine:
    """``keygen`` and ``check``, and the program without the SDK."""

    @pytest.mark.asyncio
    async def test_keygen_makes_a_key_that_only_its_daemon_can_use(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """The token comes from a 0600 file or the environment; the key is 0600, works, and is never overwritten unasked."""
        hub, home = pair
        home.key.unlink()
        token = home.directory / "token"
        token.write_text(TOKEN)
        token.chmod(0o644)
        arguments = ("keygen", "--daemon-id", DAEMON_ID, "--out", str(home.key), "--token-file", str(token))
        code, output = await daemon_rig.run(arguments, home.environment())
        assert code == 2 and "chmod 600" in output and TOKEN not in output
        token.chmod(0o600)
        code, output = await daemon_rig.run(arguments, home.environment())
        assert code == 0 and TOKEN not in output and home.key.read_text().strip() not in output
        assert home.key.stat().st_mode & 0o777 == 0o600
        code, _ = await daemon_rig.run(arguments, home.environment())
        assert code == 2
        code, output = await daemon_rig.run(
            ("keygen", "--daemon-id", "desk", "--out", str(home.directory / "desk.key")),
            home.environment(CODING_DAEMON_TOKEN=TOKEN),
        )
        assert code == 0
        async with running(home):
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
        home.key.write_text((home.directory / "desk.key").read_text())
        code, output = await daemon_rig.run(("run", "--policy", str(home.policy)), home.environment())
        assert code == 1 and "does not admit" in output

    @pytest.mark.asyncio
    async def test_check_says_what_can_be_used(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """Everything good is 0; an agent's missing command and a readable key are named, with 1."""
        _, home = pair
        code, output = await daemon_rig.run(("check", "--policy", str(home.policy)), home.environment())
        assert code == 0, output
        home.key.chmod(0o644)
        with home.policy.open("a") as file:
            file.write('[agents.absent]\ncommand = ["no-such-agent"]\n')
        code, output = await daemon_rig.run(("check", "--policy", str(home.policy)), home.environment())
        assert code == 1
        assert "chmod 600" in output and re.search(r"agent absent .*no-such-agent", output)

    def test_the_program_needs_no_sdk(self, package_root: Path, tmp_path: Path) -> None:
        """Every module of the program, and the hub's side of a session, import with ``langbot_plugin`` blocked."""
        script = (
            "import sys; sys.modules['langbot_plugin'] = None\n"
            "import daemon, agent, pkg.daemon_command, pkg.daemon_program, pkg.daemon_jobs, pkg.daemon_policy\n"
            "import pkg.remote_session\n"
            "assert not any(name.startswith('langbot_plugin.') for name in sys.modules)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=package_root, capture_output=True, text=True, timeout=WAIT, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.asyncio
async def test_a_cancelled_opening_leaves_nothing(pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
    """A run that is cancelled while its session opens returns when the half-open agent is gone."""
    hub, home = pair
    home.agent |= {"initialize": "hang"}
    home.write()
    async with running(home) as daemon:
        await hub.wait_for_daemon(DAEMON_ID, WAIT)
        opening = asyncio.create_task(remote(hub).open(SessionSpec(command=(), cwd="")))
        await poll(lambda: len(daemon_rig.descendants(daemon.pid)) >= 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await poll(lambda: daemon_rig.descendants(daemon.pid) == [])
        await hub.wait_for_daemon(DAEMON_ID, WAIT)


def test_a_spec_travels_without_its_command() -> None:
    """What the hub's side sends never holds a command line, whatever the form says."""
    spec = SessionSpec(command=("sh", "-c", "id"), cwd="")
    assert to_json(dataclasses.replace(spec, command=()))["command"] == []
