"""Messages through the built package in a real worker process, with the scripted ACP agent (local protocol fixture)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit.host_actions import message
from testkit.run_harness import Outcome
from testkit.sdk_websocket import debugged
from testkit.sdk_worker import SdkWorker, built, descendants, gone, scripted_agent, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.timeout(120)]

CANARY = "canary-b2c41f07"


def config(directory: Path, **fields: Any) -> dict[str, Any]:
    """A runner form: the scripted agent beside the worker; ``fields`` with underscores for hyphens."""
    state = directory.parent / "state"
    state.mkdir(exist_ok=True)
    form = {"provider": "custom", "acp-command": scripted_agent(state), "workspace": str(directory)}
    return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[SdkWorker]:
    """A dedicated worker with one installation."""
    async with sdk_worker(
        built(), tmp_path / "runtime", installations={"A": {"agent-secret-values": json.dumps({"KEY": CANARY})}}
    ) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SdkWorker]:
    """One worker for tests that leave nothing behind in it."""
    async with sdk_worker(built(), tmp_path_factory.mktemp("runtime")) as made:
        yield made


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Where the agent works."""
    path = tmp_path / "workspace"
    path.mkdir()
    return path


async def until_shown(worker: SdkWorker, text: str, shown: str, **more: Any) -> tuple[Any, list[Any]]:
    """Start a run and read it until a result holds ``shown``; the open stream and what came."""
    stream = worker.stream(text, **more)
    results: list[Any] = []
    async with asyncio.timeout(60):
        async for result in stream:
            results.append(result)
            if shown in json.dumps(result.data, ensure_ascii=False):
                return stream, results
    raise AssertionError(f"{shown!r} never came: {[each.data for each in results]}")


@pytest.mark.asyncio
async def test_an_answer_streams_and_the_next_message_reaches_the_same_process(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: a live session between messages; one agent process under one supervisor."""
    first = await worker.run('say "one "\nsay two', config=config(workspace))
    assert first.shown == ["one two"]
    assert first.reason == "stop"
    processes = descendants(worker.pid())
    assert processes
    second = await worker.run("say three", run_id="r2", config=config(workspace))
    assert second.shown == ["three"]
    assert descendants(worker.pid()) == processes
    assert list(worker.host().state.values()) == [{"value": "s-1"}]


@pytest.mark.asyncio
async def test_under_lbp_run_the_next_message_reaches_the_same_process(workspace: Path) -> None:
    """Our rule: a plugin that is being debugged keeps a live session, too."""
    async with debugged(built(), workspace.parent / "runtime") as worker:
        assert (await worker.run("say one", config=config(workspace))).shown == ["one"]
        processes = descendants(worker.pid())
        assert processes
        assert (await worker.run("say two", run_id="r2", config=config(workspace))).shown == ["two"]
        assert descendants(worker.pid()) == processes
    assert await gone(processes)


@pytest.mark.asyncio
async def test_without_keep_warm_no_process_is_left_and_the_session_is_resumed(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: the stored id brings the vendor session back in another process."""
    form = config(workspace, keep_warm=0)
    log = workspace.parent / "log"
    form["acp-command"] = scripted_agent(workspace.parent / "state", log=str(log))
    await worker.run("say one", config=form)
    assert descendants(worker.pid()) == {}
    await worker.run("say two", run_id="r2", config=form)
    methods = [json.loads(line).get("method") for line in log.read_text().splitlines()]
    assert methods.count("session/new") == 1
    assert methods.count("session/resume") + methods.count("session/load") == 1


@pytest.mark.asyncio
async def test_a_cancelled_run_stops_the_turn_and_keeps_the_agent(worker: SdkWorker, workspace: Path) -> None:
    """SDK fact: closing the stream cancels the runner's task; our rule: the turn is cancelled in the agent, too."""
    log = workspace.parent / "log"
    form = config(workspace, acp_command=scripted_agent(workspace.parent / "state", log=str(log)))
    stream, _ = await until_shown(worker, "say working\nhang", "working", config=form)
    await stream.aclose()
    again = await worker.run("say again", run_id="r2", config=form)
    assert again.shown == ["again"]
    methods = [json.loads(line).get("method") for line in log.read_text().splitlines()]
    assert methods.count("session/cancel") == 1
    assert methods.count("initialize") == 1


@pytest.mark.asyncio
async def test_a_cancelled_agent_that_does_not_stop_is_ended(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: a session whose turn could not be stopped is closed, with every process of it."""
    stream, _ = await until_shown(worker, "say working\nhang", "working", config=config(workspace))
    processes = descendants(worker.pid())
    os.kill(max(processes), signal.SIGSTOP)
    await stream.aclose()
    assert await gone(processes, 20.0)
    assert (await worker.run("say again", run_id="r2", config=config(workspace))).shown == ["again"]


@pytest.mark.asyncio
async def test_before_the_deadline_the_answer_so_far_and_the_limit_are_shown(worker: SdkWorker, workspace: Path) -> None:
    """Host fact: at its deadline nothing can be said any more."""
    done = await worker.run("say begun\nhang", deadline=6.0, config=config(workspace))
    assert "begun" in done.text
    assert '"timeout"' in done.text
    assert done.terminal.type == "run.completed"
    assert (await worker.run("say more", run_id="r2", config=config(workspace))).shown == ["more"]


@pytest.mark.asyncio
async def test_a_message_during_the_turn_is_answered_in_the_same_run(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: an agent that takes nothing in its turn gets it as the next one."""
    worker.host().steering.append(message("say second"))
    done = await worker.run('update {"sessionUpdate": "plan", "entries": []}\nsay first', config=config(workspace))
    assert done.shown == ["first", "second"]


@pytest.mark.asyncio
async def test_stop_in_the_chat_ends_the_turn(worker: SdkWorker, workspace: Path) -> None:
    """Host fact: a stop arrives as steering text."""
    run = worker.start("say begun\nhang", config=config(workspace))
    worker.host().steering.append(message("/stop"))
    done = await run
    assert done.terminal.type == "run.completed"
    assert descendants(worker.pid())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"acp_command": "no-such-agent-4f1a --acp"}, "coding.agent_not_found"),
        ({"acp_command": "'unclosed"}, "coding.agent_command_unparsable"),
        ({"acp_command": ""}, "coding.agent_command_missing"),
        ({"provider": "nobody", "acp_command": ""}, "coding.provider_unknown"),
        ({"env_json": "{"}, "coding.setting_invalid"),
        ({"env_json": '{"A": "${secret:MISSING}"}'}, "coding.setting_invalid"),
        ({"mcp_servers_json": "[1"}, "coding.setting_invalid"),
        ({"timeout": "soon"}, "coding.setting_invalid"),
        ({"workspace": "/"}, "coding.workspace_root"),
        ({"workspace": "/no/such/place"}, "coding.workspace_missing"),
        ({"location": "daemon"}, "coding.setting_invalid"),
        ({"location": "daemon", "daemon_id": "laptop"}, "coding.daemon_hub_not_started"),
        ({"acp_command": scripted_agent(initialize="exit 7", stderr="it broke")}, "coding.agent_exited"),
        ({"acp_command": scripted_agent(auth="required", auth_methods=[])}, "coding.agent_login_required"),
        ({"acp_command": scripted_agent(initialize="hang"), "startup_timeout": 1, "initialize_timeout": 1}, "timeout"),
    ],
)
async def test_what_cannot_work_is_one_readable_message_and_one_end(
    lasting_worker: SdkWorker, workspace: Path, fields: dict[str, Any], code: str
) -> None:
    """Our rule: a stable code for the ledger, words for the person, no process left, no path of the host."""
    done = await lasting_worker.run("hi", config=config(workspace, **fields))
    assert len(done.shown) == 1
    assert len(done.shown[0]) > 20
    assert code in done.log
    assert done.reason == "error"
    assert descendants(lasting_worker.pid()) == {}
    assert str(workspace) not in done.text


@pytest.mark.asyncio
async def test_an_agent_that_exits_in_its_turn_says_so_and_the_session_comes_back(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: the exit is told after what was said; the next message resumes."""
    stream, results = await until_shown(worker, "say begun\nhang", "begun", config=config(workspace))
    os.kill(max(descendants(worker.pid())), signal.SIGKILL)
    done = Outcome(results + [result async for result in stream])
    assert "begun" in done.shown[0]
    assert done.reason == "error"
    assert (await worker.run("say back", run_id="r2", config=config(workspace))).shown == ["back"]


@pytest.mark.asyncio
async def test_secrets_reach_the_agent_only(worker: SdkWorker, workspace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Our rule: not in results, host calls, logs or command lines."""
    form = config(workspace, env_json='{"TOKEN": "${secret:KEY}"}')
    done = await worker.run("say hi", config=form)
    assert done.shown == ["hi"]
    processes = descendants(worker.pid())
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes]
    assert any(CANARY.encode() in each for each in environments)
    lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [worker.pid(), *processes])
    captured = capfd.readouterr()
    everything = [each.model_dump_json() for each in done.results] + [repr(worker.host().calls), captured.out, captured.err]
    assert CANARY not in "\n".join(everything) + lines.decode(errors="replace")


@pytest.mark.asyncio
async def test_the_agent_gets_langbots_tools_on_a_loopback_address_with_a_bearer(worker: SdkWorker, workspace: Path) -> None:
    """Our rule: one listener per worker, nothing else than a loopback address."""
    done = await worker.run("mcp", config=config(workspace))
    server = json.loads(done.shown[0])[0]
    assert server["url"].startswith("http://127.0.0.1:")
    assert [header["name"] for header in server["headers"]] == ["Authorization"]
    off = await worker.run("mcp", run_id="r2", config=config(workspace, langbot_assets_enabled=False))
    assert json.loads(off.shown[0]) == []
