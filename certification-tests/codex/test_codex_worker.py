"""Messages through the built Codex package in a real worker process: scripted app-server, then the real Codex."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from codex_harness import SERVER

from testkit.host_actions import message
from testkit.responses_fixture import KEY, ResponsesFixture, codex_home, responses_fixture
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(180)]

NAME = "CodexAgent"
CANARY = "canary-5be0117a"


def scripted(place: Path, **config: Any) -> dict[str, Any]:
    """A runner form whose Codex is the scripted app-server."""
    program = place / "codex"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {SERVER} "$@"\n')
    program.chmod(0o755)
    (place / "workspace").mkdir(exist_ok=True)
    settings = {"log": str(place / "log"), **config}
    env = {"CODEX_HOME": str(place / "home"), "SCRIPTED_CODEX": json.dumps(settings), "MY_KEY": "${secret:KEY}"}
    return {"command": str(program), "workspace": str(place / "workspace"), "env-json": json.dumps(env)}


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[SdkWorker]:
    """A dedicated worker of the Codex package."""
    installations = {"A": {"agent-secret-values": json.dumps({"KEY": CANARY})}}
    async with sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=installations) as made:
        yield made


def received(place: Path, method: str) -> list[Any]:
    """The parameters of every message of one method that the scripted app-server received."""
    lines = [json.loads(line) for line in (place / "log").read_text().splitlines()]
    return [line.get("params") for line in lines if line.get("method") == method]


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


class TestScripted:
    """The package's own settings, and what the loop makes of this driver."""

    async def test_two_messages_reach_one_live_thread(self, worker: SdkWorker, tmp_path: Path) -> None:
        """One process, one thread; its id is the host's to keep."""
        form = scripted(tmp_path)
        first = await worker.run("say one two", config=form)
        assert (first.shown, first.reason) == (["one two"], "stop")
        processes = descendants(worker.pid())
        second = await worker.run("say three", run_id="r2", config=form)
        assert second.shown == ["three"]
        assert descendants(worker.pid()) == processes
        (thread,) = {params["threadId"] for params in received(tmp_path, "turn/start")}
        assert list(worker.host().state.values()) == [{"value": thread}]

    async def test_without_keep_warm_the_thread_is_resumed_in_another_process(self, worker: SdkWorker, tmp_path: Path) -> None:
        """Everything is told again; nothing is left in between."""
        form = {**scripted(tmp_path), "keep-warm": 0}
        await worker.run("say one", config=form)
        assert descendants(worker.pid()) == {}
        (stored,) = worker.host().state.values()
        again = {**scripted(tmp_path, known=[stored["value"]]), "keep-warm": 0}
        assert (await worker.run("say two", run_id="r2", config=again)).shown == ["two"]
        (params,) = received(tmp_path, "thread/resume")
        assert params["threadId"] == stored["value"]

    async def test_a_secret_of_the_form_reaches_codex_and_no_command(self, worker: SdkWorker, tmp_path: Path) -> None:
        """By its name it is excluded from what commands see; its value is in nothing that is said or logged."""
        outcome = await worker.run("say done", config=scripted(tmp_path))
        (params,) = received(tmp_path, "thread/start")
        assert "MY_KEY" in params["config"]["shell_environment_policy"]["exclude"]
        assert CANARY not in (tmp_path / "log").read_text()
        assert CANARY not in json.dumps([result.data for result in outcome.results])

    async def test_where_nobody_can_be_asked_it_is_denied_and_said_how_to_change_it(
        self, worker: SdkWorker, tmp_path: Path
    ) -> None:
        """A run that names no chat; the turn goes on."""
        ask = json.dumps({"kind": "command", "command": "/bin/bash -lc 'rm -rf x'", "cwd": "/"})
        outcome = await worker.run(f"approve {ask}", config=scripted(tmp_path), conversation="")
        assert "rm -rf x" in outcome.text
        assert "approval policy" in outcome.text
        assert '{"decision": "decline"}' in outcome.text

    async def test_a_denial_in_the_chat_reaches_the_same_turn(self, worker: SdkWorker, tmp_path: Path) -> None:
        """The third of the numbered choices."""
        ask = json.dumps({"kind": "command", "command": "/bin/bash -lc 'rm -rf x'", "cwd": "/"})
        asked = await worker.run(f"approve {ask}", config=scripted(tmp_path))
        assert "rm -rf x" in asked.text
        assert "decision" not in asked.text
        denied = await worker.run("3", run_id="r2", config=scripted(tmp_path))
        assert '{"decision": "decline"}' in denied.text

    async def test_a_message_during_the_turn_is_steered_into_it(self, worker: SdkWorker, tmp_path: Path) -> None:
        """Codex takes it by its own means."""
        form = scripted(tmp_path)
        stream, results = await until_shown(worker, "say waiting\nsteer\nsay over", "waiting", config=form)
        worker.host().steering.append(message("also this"))
        async with asyncio.timeout(60):
            results += [result async for result in stream]
        shown = json.dumps([result.data for result in results])
        assert "steered: also this" in shown
        assert len(received(tmp_path, "turn/start")) == 1

    async def test_a_stopped_run_keeps_the_thread(self, worker: SdkWorker, tmp_path: Path) -> None:
        """The host cancels; the turn is interrupted, the session goes on."""
        form = scripted(tmp_path)
        stream, _ = await until_shown(worker, "say working\nwait", "working", config=form)
        await stream.aclose()
        assert (await worker.run("say again", run_id="r2", config=form)).shown == ["again"]
        assert len(received(tmp_path, "turn/interrupt")) == 1
        assert len(received(tmp_path, "initialize")) == 1

    async def test_stop_typed_during_the_turn_ends_it(self, worker: SdkWorker, tmp_path: Path) -> None:
        """The turn is interrupted, what was said stays, and the thread goes on."""
        form = scripted(tmp_path)
        stream, results = await until_shown(worker, "say working\nwait", "working", config=form)
        worker.host().steering.append(message("/stop"))
        async with asyncio.timeout(60):
            results += [result async for result in stream]
        shown = json.dumps([result.data for result in results])
        assert "Stopped" in shown
        assert len(received(tmp_path, "turn/interrupt")) == 1
        assert (await worker.run("say again", run_id="r2", config=form)).shown == ["again"]

    async def test_langbot_s_tools_answer_over_the_connection_and_anew_for_each_run(
        self, worker: SdkWorker, tmp_path: Path
    ) -> None:
        """No address and no bearer is given to Codex; the second run's tools are the second run's."""
        form = {**scripted(tmp_path), "langbot-assets-enabled": True}
        call = {"callId": "c", "tool": "langbot_get_current_event", "arguments": {}}
        for number in (1, 2):
            outcome = await worker.run(f"request item/tool/call {json.dumps(call)}", run_id=f"r{number}", config=form)
            answered = json.loads(outcome.text.removeprefix("answered "))
            assert answered["success"] is True, answered
            assert f"r{number}" in json.dumps(answered) or answered["contentItems"]
        (params,) = received(tmp_path, "thread/start")
        assert "langbot_get_current_event" in [tool["name"] for tool in params["dynamicTools"]]
        assert "Bearer" not in (tmp_path / "log").read_text()

    async def test_a_killed_worker_leaves_no_process(self, worker: SdkWorker, tmp_path: Path) -> None:
        """The supervisor sees its parent die."""
        form = scripted(tmp_path)
        stream, _ = await until_shown(worker, f"orphan {tmp_path / 'pid'}\nsay working\nwait", "working", config=form)
        processes = descendants(worker.pid())
        assert int((tmp_path / "pid").read_text()) in processes
        worker.kill()
        await stream.aclose()
        assert await gone(processes, 20.0)

    async def test_the_shared_pool_runs_nothing_beside_itself(self, tmp_path: Path) -> None:
        """Said readably; nothing is started."""
        async with sdk_worker(built(NAME), tmp_path / "runtime", "pool", name=NAME) as pool:
            outcome = await pool.run("hello", config=scripted(tmp_path))
            assert "remote-ssh" in outcome.text
            assert descendants(pool.pid()) == {}
        assert not (tmp_path / "log").exists()

    @pytest.mark.parametrize("fields", [{"sandbox-mode": "none"}, {"approval-policy": "maybe"}, {"writable-roots": "["}])
    async def test_a_wrong_field_is_named(self, fields: dict[str, str], worker: SdkWorker, tmp_path: Path) -> None:
        """And nothing is started."""
        outcome = await worker.run("hello", config={**scripted(tmp_path), **fields})
        assert next(iter(fields)) in outcome.text
        assert not (tmp_path / "log").exists()


@pytest.mark.real_codex
class TestReal:
    """The real Codex behind the real worker."""

    @pytest.fixture
    def place(self) -> Any:
        """A place outside of temporary directories."""
        made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="codex-worker-")).resolve()
        (made / "workspace").mkdir()
        yield made
        shutil.rmtree(made)

    @staticmethod
    def form(codex_program: Path, place: Path, model: ResponsesFixture, **fields: Any) -> dict[str, Any]:
        """A runner form of a person with an account of their own; the key is in the plugin form."""
        env = {**codex_home(place / "home", model.url), "FIXTURE_API_KEY": "${secret:KEY}"}
        base = {"command": str(codex_program), "workspace": str(place / "workspace"), "env-json": json.dumps(env)}
        return {**base, **{name.replace("_", "-"): value for name, value in fields.items()}}

    async def test_a_conversation(self, codex_program: Path, place: Path, tmp_path: Path) -> None:
        """Two messages, a command that is denied, one that is allowed, LangBot's tools, and nothing left."""
        secrets = {"A": {"agent-secret-values": json.dumps({"KEY": KEY})}}
        async with (
            responses_fixture() as model,
            sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=secrets) as worker,
        ):
            form = self.form(codex_program, place, model)
            assert (await worker.run("remember the heron [[ say noted ]]", config=form)).text == "noted"
            recalled = await worker.run("[[ recall ]]", run_id="r2", config=form)
            assert "remember the heron" in recalled.text
            asked = await worker.run("[[ run touch made ;; say done ]]", run_id="r3", config=form)
            assert "touch made" in asked.text
            denied = await worker.run("deny", run_id="r3-answer", config=form)
            assert denied.shown[-1:] == ["done"]
            assert not (place / "workspace" / "made").exists()
            allowed = await worker.run(
                "[[ run touch made ;; say done ]]", run_id="r4", config={**form, "approval-policy": "allow-all"}
            )
            assert allowed.text == "done"
            assert (place / "workspace" / "made").exists()
            tool = await worker.run("[[ call langbot_get_current_event {} ]]", run_id="r5", config=form)
            assert "done: " in tool.text
            assert "not available" not in tool.text
            processes = descendants(worker.pid())
            assert processes
            await worker.revoke()
            assert await gone(processes, 20.0)
        assert KEY not in model.shown

    async def test_stop_typed_in_the_chat(self, codex_program: Path, place: Path, tmp_path: Path) -> None:
        """While the model speaks: the turn ends, the model's answer is let go, the same thread goes on."""
        secrets = {"A": {"agent-secret-values": json.dumps({"KEY": KEY})}}
        async with (
            responses_fixture() as model,
            sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=secrets) as worker,
        ):
            form = self.form(codex_program, place, model)
            stream, results = await until_shown(worker, f"[[ hold {place / 'never'} ]]", "holding", config=form)
            worker.host().steering.append(message("/stop"))
            async with asyncio.timeout(60):
                results += [result async for result in stream]
            assert "Stopped" in json.dumps([result.data for result in results])
            assert model.gone == 1
            assert (await worker.run("[[ say on ]]", run_id="r2", config=form)).text == "on"
            processes = descendants(worker.pid())
            await worker.revoke()
            assert await gone(processes, 20.0)

    async def test_a_session_survives_its_worker(self, codex_program: Path, place: Path, tmp_path: Path) -> None:
        """Killed in the middle of a command; the next worker resumes the thread, and nothing of the old one runs."""
        secrets = {"A": {"agent-secret-values": json.dumps({"KEY": KEY})}}
        async with (
            responses_fixture() as model,
            sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=secrets) as worker,
        ):
            form = self.form(codex_program, place, model, approval_policy="allow-all", show_progress="tools")
            await worker.run("remember the heron [[ say noted ]]", config=form)
            stream, _ = await until_shown(worker, "[[ run sleep 77123 ]]", "sleep 77123", run_id="r2", config=form)
            processes = descendants(worker.pid())
            old = worker.kill()
            await stream.aclose()
            assert await gone(processes, 20.0)
            await worker.ready(other_than=old)
            recalled = await worker.run("[[ recall ]]", run_id="r3", config=form)
            assert "remember the heron" in recalled.text
            processes = descendants(worker.pid())
            await worker.revoke()
            assert await gone(processes, 20.0)
