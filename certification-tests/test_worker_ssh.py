"""Agents on another machine from real workers of both shapes: a loopback OpenSSH server, the scripted ACP agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.host_actions import message
from testkit.run_harness import Outcome
from testkit.sdk_websocket import debugged
from testkit.sdk_worker import SdkWorker, built, descendants, gone, scripted_agent, sdk_worker
from testkit.sshd import Server, sshd

pytestmark = [pytest.mark.sdk_worker, pytest.mark.ssh, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One OpenSSH server for the file."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def form(server: Server, directory: Path, **fields: Any) -> dict[str, Any]:
    state, workspace = directory / "state", directory / "workspace"
    state.mkdir(exist_ok=True)
    workspace.mkdir(exist_ok=True)
    values = {
        "provider": "custom",
        "location": "remote-ssh",
        "acp-command": scripted_agent(state),
        "workspace": str(workspace),
        "ssh-target": server.target,
        "ssh-port": server.port,
        "ssh-known-hosts": server.known_hosts,
    }
    return {**values, **{name.replace("_", "-"): value for name, value in fields.items()}}


def plugin(server: Server) -> dict[str, str]:
    return {"ssh-private-key-secret": server.identity_file.read_text()}


async def read_until(stream: Any, shown: str) -> list[Any]:
    results: list[Any] = []
    async with asyncio.timeout(90):
        async for result in stream:
            results.append(result)
            if shown in json.dumps(result.data, ensure_ascii=False):
                return results
    raise AssertionError(f"{shown!r} never came: {[each.data for each in results]}")


@pytest.mark.asyncio
@pytest.mark.parametrize("made", [sdk_worker, debugged], ids=["dedicated", "debugged"])
async def test_a_dedicated_worker_keeps_a_remote_session_between_messages(made: Any, server: Server, tmp_path: Path) -> None:
    """Our rule: one connection, one agent there, for as long as the session is kept; so does a plugin under ``lbp run``."""
    async with made(built(), tmp_path / "runtime", installations={"A": plugin(server)}) as worker:
        assert (await worker.run("say one", config=form(server, tmp_path))).shown == ["one"]
        here, there = descendants(worker.pid()), descendants(server.pid)
        assert here
        assert there
        assert (await worker.run("say two", run_id="r2", config=form(server, tmp_path))).shown == ["two"]
        assert (descendants(worker.pid()), descendants(server.pid)) == (here, there)
        await worker.revoke()
        assert await gone({**here, **there}, 30.0)


@pytest.mark.asyncio
async def test_a_remote_agent_has_every_right_of_its_account(server: Server, tmp_path: Path) -> None:
    """Known gap: what an agent does outside of its workspace nobody stops; two installations with one account share it."""
    installations = {"A": plugin(server), "B": plugin(server)}
    for uid in installations:
        (tmp_path / uid).mkdir()
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=installations) as worker:
        of_b = tmp_path / "B" / "workspace" / "by-a"
        assert (await worker.run("say here", uid="B", config=form(server, tmp_path / "B"))).shown[-1] == "here"
        assert (await worker.run(f"touch {of_b}\nsay done", uid="A", config=form(server, tmp_path / "A"))).shown[-1] == "done"
        assert of_b.exists()


@pytest.mark.asyncio
async def test_the_pool_runs_remote_agents_and_keeps_none_between_messages(server: Server, tmp_path: Path) -> None:
    """Our rule: in the shared worker nothing acts for an installation outside its runs."""
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": plugin(server)}) as worker:
        assert (await worker.run("say one", config=form(server, tmp_path))).shown == ["one"]
        assert descendants(worker.pid()) == {}
        # The server's own process of the connection ends a moment after the client.
        assert await gone(descendants(server.pid), 10.0)
        assert (await worker.run("say two", run_id="r2", config=form(server, tmp_path))).shown == ["two"]
        # What would run a program in the process that others share, or read a file there, is refused before it connects.
        proxy = f"-o ProxyCommand='touch {tmp_path / 'ran'}'"
        for fields in ({"ssh_allow_local_commands": True, "ssh_extra_options": proxy}, {"ssh_identity_file": "/etc/hostname"}):
            refused = await worker.run("say three", run_id=next(iter(fields)), config=form(server, tmp_path, **fields))
            assert "coding.ssh_in_pool" in refused.log
        assert not (tmp_path / "ran").exists()


@pytest.mark.asyncio
async def test_revocation_in_the_pool_ends_that_installations_remote_run_only(server: Server, tmp_path: Path) -> None:
    """SDK fact: a revoked installation's run is not cancelled by the runtime; our rule: it ends, the other's goes on."""
    installations = {"A": plugin(server), "B": plugin(server)}
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=installations) as worker:
        other, _ = await _hanging(worker, server, tmp_path, "B")
        before = descendants(server.pid)
        stream, results = await _hanging(worker, server, tmp_path, "A")
        mine = {pid: start for pid, start in descendants(server.pid).items() if pid not in before}
        assert mine
        await worker.revoke("A")
        assert await gone(mine, 30.0)
        results += [result async for result in stream]
        assert Outcome(results).terminal.type == "run.failed"
        worker.host("B").steering.append(message("/stop"))
        rest = [result async for result in other]
        assert rest[-1].type == "run.completed"
        assert await gone(before, 30.0)


async def _hanging(worker: SdkWorker, server: Server, tmp_path: Path, uid: str) -> tuple[Any, list[Any]]:
    directory = tmp_path / uid
    directory.mkdir()
    stream = worker.stream("say begun\nhang", uid=uid, run_id=f"r-{uid}", config=form(server, directory))
    return stream, await read_until(stream, "begun")
