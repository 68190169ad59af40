"""The built package in a real worker of the SDK's runtime, with the real Claude Code in all three places.

Beside the worker, on a machine behind a loopback OpenSSH server, and on a user's machine under the real daemon program. The
model is a local protocol fixture.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from langbot_plugin.api.agent_tools import LANGBOT_AGENT_MCP_SERVER_NAME

from testkit import daemon_rig
from testkit.anthropic_fixture import AnthropicFixture, anthropic_fixture, call, say
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.daemon_sites import command_lines, environments, files_below, plugin_form, private, until_shown
from testkit.host_actions import HostActions, message
from testkit.model_fixture import KEY
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, Shape, built, descendants, gone, sdk_worker
from testkit.sshd import sshd

pytestmark = [pytest.mark.real_claude, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

NAME = "ClaudeCodeAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
PLACES = ("local", "daemon", pytest.param("remote-ssh", marks=pytest.mark.ssh))
WRITES = {"approval-policy": "allow-all"}


class Stage:
    """A worker with the package, and one place where the real program works for it."""

    def __init__(self, fixture: AnthropicFixture, worker: SdkWorker, form: dict[str, Any], workspace: Path) -> None:
        self.model, self.worker, self.workspace = fixture, worker, workspace
        self._form = form
        self._runs = 0
        self.roots: list[Callable[[], int]] = [worker.pid]
        """What gives the pid below which this place has its processes."""

    @property
    def host(self) -> HostActions:
        """LangBot's side."""
        return self.worker.host()

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form; ``fields`` with underscores for hyphens."""
        return {**self._form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def stream(self, text: str, **fields: Any) -> Any:
        """The results of one run as they come."""
        self._runs += 1
        return self.worker.stream(text, run_id=f"r{self._runs}", config=self.form(**fields))

    async def run(self, text: str, **fields: Any) -> Outcome:
        """One run to its end."""
        async with asyncio.timeout(BOUND):
            return Outcome([result async for result in self.stream(text, **fields)])

    def processes(self) -> dict[int, str]:
        """Every process of the place, pid to start time."""
        found: dict[int, str] = {}
        for root in self.roots:
            found |= descendants(root())
        return found

    def programs(self) -> set[int]:
        """The processes that are Claude Code itself."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/exe").readlink().name == "claude":
                    found.add(pid)
        return found


@contextlib.asynccontextmanager
async def staged(
    place: str, directory: Path, program: Path, *, signed_in: bool = True, shape: Shape = "dedicated"
) -> AsyncIterator[Stage]:
    """The place, set up as its operator or owner would; everything of it is gone afterwards."""
    home, workspace = directory / "home", directory / "workspace"
    home.mkdir(parents=True)
    workspace.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        fixture = await stack.enter_async_context(anthropic_fixture())
        given = {**fixture.environment(), "HOME": str(home)}
        if not signed_in:
            del given["ANTHROPIC_API_KEY"]
        plugin: dict[str, Any] = {"agent-secret-values": json.dumps({"MODEL_KEY": KEY})}
        named = {"ANTHROPIC_API_KEY": "${secret:MODEL_KEY}"} if signed_in else {}
        form: dict[str, Any] = {
            "location": place,
            "command": str(program),
            "workspace": str(workspace),
            "env-json": json.dumps({**given, **named}),
            "langbot-assets-enabled": False,
        }
        roots: list[Callable[[], int]] = []
        machine = None
        if place == "remote-ssh":
            server = stack.enter_context(sshd(directory / "sshd"))
            plugin["ssh-private-key-secret"] = server.identity_file.read_text()
            target = {"ssh-target": server.target, "ssh-port": server.port, "ssh-known-hosts": server.known_hosts}
            form |= target
            roots.append(functools.partial(getattr, server, "pid"))
        if place == "daemon":
            port, token = free_port(), secrets.token_urlsafe(32)
            plugin = plugin_form(port, token)
            machine = DaemonHome(
                directory / "machine", f"ws://127.0.0.1:{port}", token=token, driver="claude-code", command=(str(program),)
            )
            machine.write(f'environment = {json.dumps(sorted(given))}\napprovals = ["ask", "deny", "allow-all"]')
            workspace = machine.workspace
            for name in ("command", "env-json"):
                del form[name]
            form |= {"daemon-id": DAEMON_ID, "workspace": ""}
        worker = await stack.enter_async_context(
            sdk_worker(
                built(NAME),
                directory / "runtime",
                shape,
                name=NAME,
                installations={"A": plugin},
                environment=private(directory / "w") if shape == "dedicated" else None,
            )
        )
        stage = Stage(fixture, worker, form, workspace)
        stage.roots += roots
        if machine is not None:
            daemon = await stack.enter_async_context(daemon_rig.running(machine, **given))
            stage.roots.append(functools.partial(getattr, daemon, "pid"))
        yield stage


@pytest_asyncio.fixture(params=PLACES)
async def stage(request: pytest.FixtureRequest, tmp_path: Path, claude_program: Path) -> AsyncIterator[Stage]:
    """A :class:`Stage` of every place in turn."""
    async with staged(request.param, tmp_path, claude_program) as made:
        yield made
        programs = made.programs()
        left = {pid: start for pid, start in made.processes().items() if pid in programs}
    assert await gone(left, 30.0)


async def happens(condition: Callable[[], object], running: asyncio.Future[Any]) -> None:
    """Wait until ``condition`` holds while ``running`` goes on: for what happens in files and at the host's stand-in."""
    async with asyncio.timeout(BOUND):
        while not condition():
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)


async def test_a_conversation_is_one_live_process_and_is_resumed_when_that_is_gone(stage: Stage) -> None:
    """Our rule: every answer once; a kept session is the same process; a stored one has its history in a new process."""
    first = await stage.run("remember PEAR [[ say one two three ]]")
    assert (first.shown, first.reason) == (["one two three"], "stop")
    alive = stage.programs()
    assert len(alive) == 1
    second = await stage.run("remember PLUM [[ say four ]]", keep_warm=300)
    assert (second.shown, second.reason) == (["four"], "stop")
    assert stage.programs() == alive
    ended = await stage.run("remember FIG [[ recall ]]", keep_warm=0)
    assert ended.shown == ["recalled: remember PEAR | remember PLUM"]
    assert stage.programs() == set()
    resumed = await stage.run("[[ recall ]]")
    assert resumed.shown == ["recalled: remember PEAR | remember PLUM | remember FIG"]
    assert stage.programs().isdisjoint(alive)


async def test_what_people_write_arrives_as_it_is(stage: Stage) -> None:
    """Vendor's rule (2.1.332) undone: neither files named with @ nor commands of the program are taken from a chat."""
    outcome = await stage.run("/clear @/etc/passwd [[ say seen ]]")
    assert outcome.shown == ["seen"]
    sent = json.dumps(stage.model.bodies[-1]["messages"])
    assert "/clear @/etc/passwd" in sent
    assert "root:x:" not in sent


async def test_the_form_s_policy_decides_and_is_told(stage: Stage) -> None:
    """Our rule: a command is refused under ``ask`` where nobody can be asked, and runs under ``allow-all``."""
    refused = await stage.run("[[ run touch refused ;; say finished ]]", approval_policy="deny")
    assert "finished" in refused.text
    assert not (stage.workspace / "refused").exists()
    allowed = await stage.run("[[ run touch allowed ;; say finished ]]", **WRITES)
    assert "finished" in allowed.text
    assert (stage.workspace / "allowed").exists()


async def test_a_key_is_nowhere_but_with_the_program(stage: Stage) -> None:
    """Canary: on no command line, in no environment of the program and its commands, in no file, result or log."""
    gate, seen = stage.workspace / "gate", stage.workspace / "seen"
    command = f"env > {seen}; touch {gate}.here; while [ ! -e {gate} ]; do sleep 0.05; done"
    running = asyncio.ensure_future(stage.run(f"[[ run {command} ;; say done ]]", **WRITES))
    await happens(gate.with_suffix(".here").exists, running)
    pids = [stage.worker.pid(), *stage.processes()]
    lines, told = command_lines(pids), environments(sorted(stage.programs()))
    gate.touch()
    outcome = await running
    assert outcome.shown[-1] == "done", outcome.text
    assert b"ANTHROPIC_BASE_URL" in told
    assert KEY.encode() not in lines + told
    assert "PATH=" in seen.read_text()
    assert KEY not in seen.read_text()
    del told
    assert all(KEY not in json.dumps(result.data) for result in outcome.results)
    found = files_below(stage.workspace, stage.workspace.parent)
    assert [path for path, held in found.items() if KEY.encode() in held and path.name != "daemon.toml"] == []


async def test_a_message_during_a_run_is_taken_into_it(stage: Stage) -> None:
    """Steering from the chat to the running program, wherever it is: one answer to both, told once."""
    here = stage.workspace / "here"
    # However long the message is on its way, there is a command left after which it is taken in.
    steps = [f"run touch {here}; sleep 0.3", *["run echo on; sleep 0.3"] * 30]
    running = asyncio.ensure_future(stage.run(f"[[ {' ;; '.join(steps)} ;; say only the first ]]", **WRITES))
    await happens(here.exists, running)
    stage.host.steering.append(message("and this [[ say both ]]"))
    assert (await running).shown == ["both"]


async def test_langbot_s_tools_are_called_from_wherever_the_program_is(stage: Stage) -> None:
    """Each run of a live session has tools of its own; what the host answers reaches the model, and no bearer is to be seen."""
    tool = f"mcp__{LANGBOT_AGENT_MCP_SERVER_NAME}__langbot_call_tool"
    answers = []
    for number in (1, 2):
        script = stage.model.play(call(tool, tool_name="echo", parameters={"n": number}), say(f"called {number}"))
        running = asyncio.ensure_future(stage.run(f"tool {script}", langbot_assets_enabled=True, **WRITES))
        answers.append((await running).shown)
    assert answers == [["called 1"], ["called 2"]]
    made = [data["parameters"] for action, data in stage.host.calls if action == "call_tool"]
    assert made == [{"n": 1}, {"n": 2}]
    results = [text for role, text in stage.model.asked[-1].history if role == "tool"]
    assert [json.loads(text)["echo"] for text in results] == made
    assert len(stage.programs()) == 1
    assert b"Bearer" not in command_lines([stage.worker.pid(), *stage.processes()])


async def test_two_messages_at_once_are_both_answered_and_neither_history_is_lost(stage: Stage) -> None:
    """Vendor's rule (2.1.332): of two writers of a session the first to end is forgotten; ours: there is one at a time."""
    first = await stage.run("remember PEAR [[ say one ]]")
    assert first.shown == ["one"]
    outcomes = await asyncio.gather(*(stage.run(f"remember {word} [[ say {word} ]]") for word in ("FIG", "PLUM")))
    assert [outcome.shown for outcome in outcomes] == [["FIG"], ["PLUM"]]
    recalled = await stage.run("[[ recall ]]")
    said = recalled.text.removeprefix("recalled: ").split(" | ")
    assert said[0] == "remember PEAR"
    assert sorted(said[1:]) == ["remember FIG", "remember PLUM"]
    assert len(stage.programs()) == 1


async def test_a_cancelled_run_ends_the_command_it_was_running(stage: Stage) -> None:
    """Vendor's rule (2.1.332): commands have sessions of their own; ours: they are gone with the run all the same."""
    here = stage.workspace / "here"
    stream = stage.stream(f"[[ run echo $$ > {here}.new; mv {here}.new {here}; sleep 300; true ;; say done ]]", **WRITES)
    reading = asyncio.ensure_future(until_shown(stream, "never shown"))
    await happens(here.exists, reading)
    command = {pid: start for pid, start in stage.processes().items() if pid == int(here.read_text())}
    assert command
    reading.cancel()
    await asyncio.wait({reading})
    await stream.aclose()
    assert await gone(command, 30.0)


async def test_a_killed_worker_leaves_no_process_and_loses_no_history(tmp_path: Path, claude_program: Path) -> None:
    """Beside a worker that is gone at once, in the middle of a command: everything ends, and the next message resumes."""
    async with staged("local", tmp_path, claude_program) as stage:
        assert (await stage.run("remember PEAR [[ say one ]]")).shown == ["one"]
        here = stage.workspace / "here"
        words = f"remember FIG [[ run touch {here}; setsid sleep 300 & sleep 300; true ;; say never ]]"
        running = asyncio.ensure_future(stage.run(words, **WRITES))
        await happens(here.exists, running)
        processes = stage.processes()
        old = stage.worker.kill()
        assert await gone(processes, 30.0)
        with contextlib.suppress(Exception):
            await running
        await stage.worker.ready(other_than=old)
        recalled = await stage.run("[[ recall ]]")
        assert "remember PEAR" in recalled.text


@pytest.mark.parametrize("place", PLACES[1:])
async def test_the_shared_pool_has_the_program_elsewhere_and_nothing_of_it_here(
    place: str, tmp_path: Path, claude_program: Path
) -> None:
    """Our rule: in a worker that installations share no agent's process lives; a conversation goes on all the same."""
    async with staged(place, tmp_path, claude_program, shape="pool") as stage:
        assert (await stage.run("remember PEAR [[ say one ]]")).shown == ["one"]
        assert descendants(stage.worker.pid()) == {}
        assert (await stage.run("[[ recall ]]")).shown == ["recalled: remember PEAR"]
        assert stage.model.refused == 0


@pytest.mark.parametrize("place", PLACES)
async def test_without_an_account_the_chat_says_which_command_on_which_machine(
    place: str, tmp_path: Path, claude_program: Path
) -> None:
    """Our rule: one readable message, with the command and the machine; no text of the program's about commands it has not."""
    async with staged(place, tmp_path, claude_program, signed_in=False) as stage:
        outcome = await stage.run("[[ say never ]]")
        assert "claude auth login" in outcome.text
        assert outcome.reason == "error"
        assert {"remote-ssh": "127.0.0.1"}.get(place, os.uname().nodename) in outcome.text
        assert "/login" not in outcome.text
        assert stage.model.refused == 0
