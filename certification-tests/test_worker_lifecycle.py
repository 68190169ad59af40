"""What happens to agents when their worker, installation or configuration goes away: real workers, both shapes."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from testkit import hostile_trees
from testkit.daemon_sites import plugin_form
from testkit.relay_rig import free_port
from testkit.sdk_websocket import debugged
from testkit.sdk_worker import built, descendants, gone, scripted_agent, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.timeout(180)]

TOOL = 'update {"sessionUpdate": "tool_call", "toolCallId": "t1", "title": "make", "kind": "execute", "status": "in_progress"}'


def form(directory: Path, command: str = "", **fields: Any) -> dict[str, Any]:
    state, workspace = directory / "state", directory / "workspace"
    state.mkdir(exist_ok=True)
    workspace.mkdir(exist_ok=True)
    values = {"provider": "custom", "acp-command": command or scripted_agent(state), "workspace": str(workspace)}
    return {**values, **{name.replace("_", "-"): value for name, value in fields.items()}}


async def read_until(stream: Any, shown: str) -> list[Any]:
    results: list[Any] = []
    async with asyncio.timeout(60):
        async for result in stream:
            results.append(result)
            if shown in json.dumps(result.data, ensure_ascii=False):
                return results
    raise AssertionError(f"{shown!r} never came: {[each.data for each in results]}")


def with_tree(kind: str, trees: Path, state: Path) -> str:
    """A command that starts a hostile tree beside the agent, as an agent's tool does, and then becomes the agent."""
    trees.mkdir()
    tree = shlex.join(hostile_trees.command(kind, trees))
    line = f"{tree} </dev/null >/dev/null 2>&1 & exec {scripted_agent(state)}"
    return shlex.join(["/bin/sh", "-c", line])


@pytest.mark.asyncio
async def test_a_worker_killed_in_the_middle_of_a_tool_call_leaves_no_process(tmp_path: Path) -> None:
    """Our rule: SIGKILL of the worker ends the whole tree within 10 s, also what ignores SIGTERM in a session of its own."""
    (tmp_path / "state").mkdir()
    command = with_tree("setsid", tmp_path / "trees", tmp_path / "state")
    async with sdk_worker(built(), tmp_path / "runtime") as worker:
        stream = worker.stream(f"say begun\n{TOOL}\nhang", config=form(tmp_path, command))
        await read_until(stream, "begun")
        announced = await asyncio.to_thread(hostile_trees.complete, tmp_path / "trees", hostile_trees.KINDS["setsid"])
        processes = {**descendants(worker.pid()), **announced}
        assert len(processes) >= 4
        killed = worker.kill()
        assert await gone(processes, 10.0)
        await stream.aclose()
        await worker.ready(other_than=killed)
        again = await worker.run("say back", run_id="r2", config=form(tmp_path))
        assert again.shown == ["back"]


@pytest.mark.asyncio
async def test_a_killed_worker_loses_no_stored_session_id(tmp_path: Path) -> None:
    """Our rule: the id is stored when the session opens, not when it ends."""
    log = tmp_path / "log"
    config = form(tmp_path)
    config["acp-command"] = scripted_agent(tmp_path / "state", log=str(log))
    async with sdk_worker(built(), tmp_path / "runtime") as worker:
        await worker.run("say one", config=config)
        killed = worker.kill()
        await worker.ready(other_than=killed)
        assert (await worker.run("say two", run_id="r2", config=config)).shown == ["two"]
    methods = [json.loads(line).get("method") for line in log.read_text().splitlines()]
    assert methods.count("session/new") == 1
    assert methods.count("session/resume") + methods.count("session/load") == 1


@pytest.mark.asyncio
async def test_removing_the_installation_ends_its_agents(tmp_path: Path) -> None:
    """SDK fact: a dedicated worker is ended without any hook; our rule: its agents end all the same."""
    async with sdk_worker(built(), tmp_path / "runtime") as worker:
        await worker.run("say one", config=form(tmp_path))
        processes = descendants(worker.pid())
        assert processes
        await worker.revoke()
        assert await gone(processes)


@pytest.mark.asyncio
async def test_a_reconfigured_plugin_starts_anew_and_resumes(tmp_path: Path) -> None:
    """Host fact: a change of the plugin's settings replaces the worker and raises the revision."""
    log = tmp_path / "log"
    config = form(tmp_path)
    config["acp-command"] = scripted_agent(tmp_path / "state", log=str(log))
    async with sdk_worker(built(), tmp_path / "runtime") as worker:
        await worker.run("say one", config=config)
        processes = descendants(worker.pid())
        await worker.install("A", {}, revision=2)
        assert await gone(processes)
        assert (await worker.run("say two", run_id="r2", config=config)).shown == ["two"]
    methods = [json.loads(line).get("method") for line in log.read_text().splitlines()]
    assert methods.count("session/new") == 1


@pytest.mark.asyncio
async def test_a_worker_that_gets_a_binding_begins_a_new_conversation_and_keeps_that(tmp_path: Path) -> None:
    """Our rule: what a worker without a binding stored is not found with one; the chat goes on, and the old entry stays."""
    log = tmp_path / "log"
    config = form(tmp_path, scripted_agent(tmp_path / "state", log=str(log)), keep_warm=0)

    def methods() -> list[str]:
        return [json.loads(line).get("method") for line in log.read_text().splitlines()]

    async with debugged(built(), tmp_path / "unscoped") as worker:
        assert (await worker.run("say one", config=config)).shown == ["one"]
        assert (await worker.run("say two", run_id="r2", config=config)).shown == ["two"]
        stored = dict(worker.host().state)
    assert stored, "a session is stored"
    assert methods().count("session/new") == 1, "and found again by the name that it was stored under"
    async with sdk_worker(built(), tmp_path / "scoped") as worker:
        worker.host().state.update(stored)
        assert (await worker.run("say three", config=config)).shown == ["three"]
        assert methods().count("session/new") == 2
        assert (await worker.run("say four", run_id="r2", config=config)).shown == ["four"]
        assert methods().count("session/new") == 2, "the new one is stored under the new name"
        assert {key: worker.host().state[key] for key in stored} == stored
        assert len(worker.host().state) == 2 * len(stored)


@pytest.mark.asyncio
async def test_two_installations_have_a_worker_each_and_share_nothing(tmp_path: Path) -> None:
    """Our rule: the same chat and person in two installations are two."""
    async with sdk_worker(built(), tmp_path / "runtime", installations={"A": {}, "B": {}}) as worker:
        config = form(tmp_path)
        await asyncio.gather(worker.run("say a", uid="A", config=config), worker.run("say b", uid="B", config=config))
        assert worker.pid("A") != worker.pid("B")
        assert worker.host("A").state.keys().isdisjoint(worker.host("B").state)


@pytest.mark.asyncio
async def test_the_pool_refuses_local_agents_in_words(tmp_path: Path) -> None:
    """Our rule: one process for all installations starts no agent beside itself."""
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": {}, "B": {}}) as worker:
        assert worker.pid("A") == worker.pid("B")
        for uid in ("A", "B"):
            done = await worker.run("hi", uid=uid, config=form(tmp_path))
            assert "coding.local_in_pool" in done.log
            assert "remote-ssh" in done.text
        assert descendants(worker.pid("A")) == {}


@pytest.mark.asyncio
async def test_the_pool_serves_one_installation_after_anothers_revocation(tmp_path: Path) -> None:
    """Our rule: revocation ends one installation and no other."""
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": {}, "B": {}}) as worker:
        pid = worker.pid("B")
        await worker.revoke("A")
        assert "coding.local_in_pool" in (await worker.run("hi", uid="B", config=form(tmp_path))).log
        assert worker.pid("B") == pid


@pytest.mark.asyncio
async def test_the_pool_tells_apart_settings_and_secrets_of_runs_at_the_same_time(tmp_path: Path) -> None:
    """Our rule: a run's configuration is its invocation's: A has the secret and waits for its daemon, B has none."""
    port = free_port()
    plugin = {uid: plugin_form(port, f"{uid}-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0pS") for uid in "AB"}
    plugin["A"]["agent-secret-values"] = '{"KEY": "a"}'
    daemon: dict[str, Any] = {"location": "daemon", "daemon_id": "laptop", "daemon_connect_timeout": 1}
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=plugin) as worker:
        config = form(tmp_path, env_json='{"TOKEN": "${secret:KEY}"}', **daemon)
        runs = [worker.start("hi", uid=uid, run_id=f"r-{uid}-{n}", config=config) for n in range(5) for uid in ("A", "B")]
        outcomes = [await run for run in runs]
        assert all("coding.daemon_offline" in done.log for done in outcomes[0::2])
        assert all("coding.setting_invalid" in done.log for done in outcomes[1::2])


@pytest.mark.asyncio
async def test_the_real_dependency_environment_of_the_package_serves(tmp_path: Path) -> None:
    """The package's requirements can be installed by the SDK's own preparation, and the runner answers with them."""
    async with sdk_worker(built(), tmp_path / "runtime", real_dependencies=True) as worker:
        assert (await worker.run("say hi", config=form(tmp_path))).shown == ["hi"]
