"""The daemon program as the owner of a workstation meets it: the first start, a policy file, a key, a check, a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent import POLICIES
from pkg import daemon_setup
from pkg.agent_api import Answer, ApprovalRequested, McpServer, Prompt, SessionSpec, TurnEnded
from pkg.daemon_policy import AgentEntry, HubEntry, Policy, load
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.errors import CodingError
from pkg.remote_session import RemoteDriver
from testkit import daemon_rig
from testkit.acp_harness import poll
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.relay_rig import TOKEN, WAIT

ACTOR = "lb_" + "5e" * 32
CANARY = "canary-Kq2wE8rT5yU1iO9p"
PERMISSION = json.dumps(
    {
        "toolCall": {"toolCallId": "t1", "kind": "execute", "rawInput": {"command": f"deploy --token {CANARY}"}},
        "options": [
            {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
            {"optionId": "no", "name": "No", "kind": "reject_once"},
        ],
    }
)
COMMANDS = {"known": ("known-agent", "--acp"), "absent": ("no-such-agent",)}


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[AgentRuntimeDaemonHub, DaemonHome]]:
    """A hub and a workstation that is set up for it."""
    async with daemon_rig.hub_and_home(tmp_path) as both:
        yield both


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of an account that has nothing yet but a directory of sources and a program that looks like an agent."""
    (tmp_path / "src").mkdir()
    program = tmp_path / ".local" / "bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def environment(home: Path, **more: str) -> dict[str, str]:
    """The account's."""
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LANG": "C.UTF-8"} | more


def policy_of(home: Path) -> Path:
    """Where the program looks for its file unless it is told otherwise."""
    return home / ".config" / "langbot-coding-agents" / "daemon.toml"


async def daemon(home: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """The program to its end: exit code, and what it wrote."""
    return await daemon_rig.run(arguments, environment(home, **more))


class TestFirstStart:
    """A machine where nothing is set up."""

    @pytest.mark.parametrize(
        "arguments", [(), ("run",), ("check",), ("keygen",)], ids=lambda value: " ".join(value) or "nothing"
    )
    @pytest.mark.asyncio
    async def test_three_lines_say_what_to_do(self, home: Path, arguments: tuple[str, ...]) -> None:
        """Whatever one begins with: what is missing, then three steps in three lines, each a command that can be copied."""
        code, output = await daemon(home, *arguments)
        assert code == 2
        missing, *lines = output.splitlines()
        assert missing == "No policy file yet, so nothing may run here."
        for line, command in zip(lines, ("init", "keygen", "check"), strict=True):
            assert f"{sys.executable} {daemon_rig.program()} {command}" in line
        assert str(policy_of(home)) in lines[0] and lines[2].endswith(" run")
        assert not (home / ".config").exists()

    @pytest.mark.asyncio
    async def test_the_steps_lead_to_a_daemon_that_works(
        self, home: Path, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """init, keygen, check, run, with nothing edited where everything is told to init: the hub has the machine."""
        hub, _ = pair
        code, output = await daemon(home, "init", "--hub", hub.endpoint, "--daemon-id", DAEMON_ID, "--workspace", "~/src")
        assert code == 0 and "Fill in" not in output
        code, output = await daemon(home, "check")
        assert code == 1 and f"key for {hub.endpoint}: " in output and "keygen" in output
        code, output = await daemon(home, "keygen", CODING_DAEMON_TOKEN=TOKEN)
        assert code == 0 and TOKEN not in output
        code, output = await daemon(home, "check")
        assert code == 0, output
        assert [line.partition(":")[0].split()[0] for line in output.splitlines()] == [
            "policy",
            "key",
            "hub",
            "agent",
            "workspace",
            "state",
        ]
        assert all(": ok" in line for line in output.splitlines())
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(daemon_rig.program()), "run", env=environment(home), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            assert [each["metadata"]["agents"] for each in await hub.list_daemons()] == [["opencode"]]
        finally:
            process.terminate()
            assert await process.wait() == 0

    @pytest.mark.asyncio
    async def test_another_policy_file_stands_in_every_command(self, home: Path) -> None:
        """What is to be done next is said so that it finds the same file."""
        file = home / "other policy.toml"
        named = shlex.join(("--policy", str(file)))
        _, output = await daemon(home, "run", "--policy", str(file))
        assert all(f" {command} {named}" in output for command in ("init", "keygen", "check", "run"))
        _, output = await daemon(home, "init", "--policy", str(file), "--workspace", "~/src")
        assert all(f" {command} {named}" in output for command in ("keygen", "check"))
        code, output = await daemon(home, "run", "--policy", str(file))
        assert code == 2 and f"make it with: {sys.executable} {daemon_rig.program()} keygen {named}" in output

    @pytest.mark.asyncio
    async def test_help_names_every_command(self, home: Path) -> None:
        """And says with which to begin."""
        code, output = await daemon(home, "--help")
        assert code == 0
        assert all(re.search(rf"^    {name} ", output, re.MULTILINE) for name in ("init", "keygen", "check", "run"))

    def test_a_python_without_the_packages_is_told_how_to_get_them(self, home: Path) -> None:
        """No traceback, but the commands that make an environment for the daemon."""
        program = home / "copy" / "daemon.py"
        shutil.copytree(daemon_rig.program().parent / "pkg", program.parent / "pkg")
        for name in ("daemon.py", "requirements-daemon.txt"):
            shutil.copyfile(daemon_rig.program().parent / name, program.parent / name)
        done = _bare(program)
        assert done.returncode == 1 and "agent is missing" in done.stderr
        shutil.copytree(daemon_rig.program().parent / "agent", program.parent / "agent")
        done = _bare(program)
        assert done.returncode == 1
        first, make, install, start = done.stderr.splitlines()
        assert "this Python has no" in first and " -m venv " in make
        assert install.endswith(f"install -r {program.parent / 'requirements-daemon.txt'}") and start.endswith("daemon.py run")


def _bare(program: Path) -> subprocess.CompletedProcess[str]:
    """The program under this Python without what was installed into it."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(program), "run"], capture_output=True, text=True, timeout=WAIT, check=False
    )


class TestPolicyFile:
    """The file that ``init`` writes."""

    @pytest.mark.asyncio
    async def test_it_is_the_owner_s_alone_and_never_overwritten(self, home: Path) -> None:
        """0600 in a directory of 0700; a second init, also over a dangling link, changes nothing."""
        code, output = await daemon(home, "init")
        file = policy_of(home)
        assert code == 0 and str(file) in output
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        assert [each.name for each in file.parent.iterdir()] == ["daemon.toml"]
        file.write_text("mine")
        code, output = await daemon(home, "init")
        assert code == 2 and "is there already" in output and file.read_text() == "mine"
        link = home / "link.toml"
        link.symlink_to(home / "nowhere.toml")
        code, output = await daemon(home, "init", "--policy", str(link))
        assert code == 2 and not (home / "nowhere.toml").exists()

    @pytest.mark.asyncio
    async def test_it_names_the_agents_that_are_installed(self, home: Path) -> None:
        """What this machine has is in it, every other known agent is a comment; what is left to do is said."""
        _, output = await daemon(home, "init")
        assert "Fill in the hub's address (url), your directories (workspaces)." in output
        text = policy_of(home).read_text()
        assert list(tomllib.loads(text)["agents"]) == ["opencode"]
        assert '# [agents.codex]\n# command = ["codex-acp"]' in text

    @pytest.mark.asyncio
    async def test_a_directory_is_meant_as_the_shell_has_it(self, home: Path) -> None:
        """What is relative is relative to where init was started, not to the policy file; what is not there is named."""
        absent = Path.cwd() / "no-such-directory"
        code, output = await daemon(home, "init", "--workspace", absent.name, "--workspace", "~/src")
        assert code == 0 and f"Make {absent}: not there yet." in output
        assert tomllib.loads(policy_of(home).read_text())["workspaces"] == [str(absent), "~/src"]

    @pytest.mark.asyncio
    async def test_what_only_this_shell_finds_a_service_finds_too(self, home: Path) -> None:
        """An agent that a version manager's PATH leads to is found again under the short PATH that services have."""
        odd = home / "managed" / "bin"
        odd.mkdir(parents=True)
        (home / ".local" / "bin" / "opencode").rename(odd / "opencode")
        code, _ = await daemon(home, "init", "--workspace", "~/src", PATH=f"relative:{odd}:/usr/bin:/bin")
        assert code == 0
        file = policy_of(home)
        assert all(entry.startswith("/") for entry in tomllib.loads(file.read_text())["path"].split(":"))
        code, output = await daemon(home, "check", PATH="/usr/bin:/bin")
        assert f"agent opencode (acp): ok ({odd / 'opencode'})" in output
        file.unlink()
        (odd / "opencode").rename(home / ".local" / "bin" / "opencode")
        await daemon(home, "init", PATH=f"{odd}:/usr/bin:/bin")
        assert '# path = ""' in file.read_text()

    def test_every_key_stands_in_it_with_an_explanation(self, home: Path) -> None:
        """Commented keys are keys that are read: with all of them switched on the file is still a policy."""
        text = daemon_setup.sample(
            hub="", daemon_id="laptop", workspaces=(str(home / "src"),), driver="acp", commands=COMMANDS, found=("known",)
        )
        key = re.compile(r"^(?:# )?([a-z_0-9]+) = ", re.MULTILINE)
        known = {field.name for kind in (Policy, HubEntry, AgentEntry) for field in dataclasses.fields(kind)}
        structure = {"file", "name", "hubs", "agents"}
        assert set(key.findall(text)) == (known - structure) | {"environment"}
        assert all(f"[{name}" in text for name in ("[hubs]", "agents.known", "agents.absent"))
        (home / "src" / "one").mkdir()
        alternatives = ("token_file", "certificate_sha256", 'workspaces = ["~/src/one"]')
        switched_on = "\n".join(
            re.sub(r"^# (?=[a-z_0-9]+ = |\[)", "", line) if not any(each in line for each in alternatives) else line
            for line in text.splitlines()
        )
        file = home / "daemon.toml"
        file.write_text(switched_on)
        file.chmod(0o600)
        policy = load(file, ("acp",), POLICIES)
        assert set(policy.agents) == {"known", "absent"}
        plain = home / "plain.toml"
        plain.write_text(text)
        plain.chmod(0o600)
        defaults = load(plain, ("acp",), POLICIES)
        same = ("job_environment", "job_options", "approvals", "mcp_servers", "worktrees", "state_dir", "path")
        assert [getattr(policy, name) for name in same] == [getattr(defaults, name) for name in same]

    def test_the_guide_explains_every_key(self, package_root: Path) -> None:
        """DAEMON.md names each key of the file, each command and each outcome of the record, and no key that is not read."""
        guide = (package_root / "DAEMON.md").read_text(encoding="utf-8")
        rows = {
            name for row in re.findall(r"^\| (`[^|]+) \|", guide, re.MULTILINE) for name in re.findall(r"`([a-z_0-9]+)`", row)
        }
        known = {field.name for kind in (Policy, HubEntry, AgentEntry) for field in dataclasses.fields(kind)}
        outcomes = {"started", "refused", "closed", "completed", "failed", "unproven", "recovered", "answered", "too_late"}
        assert rows == (known - {"file", "name", "hubs", "agents"}) | {"environment"} | outcomes
        assert all(f"daemon.py {command}" in guide for command in ("init", "keygen", "check", "run"))

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--hub", "http://chat.example.org"),
            ("--hub", "wss://u:canary@chat.example.org"),
            ("--daemon-id", "a\nb"),
            ("--workspace", "a\x7fb"),
        ],
        ids=lambda value: value[0],
    )
    @pytest.mark.asyncio
    async def test_what_could_not_be_used_is_not_written(self, home: Path, arguments: tuple[str, ...]) -> None:
        """A bad address, name or directory is refused at once, without a traceback."""
        code, output = await daemon(home, "init", *arguments)
        assert code == 2 and output.startswith("daemon: ") and "Traceback" not in output and "canary" not in output
        assert not policy_of(home).exists()

    @pytest.mark.asyncio
    async def test_a_hub_that_is_only_reached_unencrypted_is_the_owner_s_decision(self, home: Path) -> None:
        """It is written and said, and counts only when the line that allows it is no comment any more."""
        arguments = ("--hub", "ws://chat.example.org:8766", "--workspace", str(home / "src"))
        code, output = await daemon(home, "init", *arguments)
        assert code == 0 and "unencrypted" in output and "insecure_plaintext = true" in output
        file = policy_of(home)
        text = file.read_text()
        assert "This address leaves this machine unencrypted" in text and "\n# insecure_plaintext = true\n" in text
        code, output = await daemon(home, "check")
        assert code == 2 and f"{file}:{text[: text.index('url = ')].count(chr(10)) + 1}: hubs.1.url: " in output
        file.write_text(text.replace("# insecure_plaintext", "insecure_plaintext"))
        assert load(file, ("acp",), POLICIES).hubs[0].insecure_plaintext
        file.unlink()
        _, output = await daemon(home, "init", "--hub", "ws://127.0.0.1:8766", "--workspace", "~/src")
        assert "unencrypted" not in output and "# insecure_plaintext = false" in file.read_text()

    @pytest.mark.parametrize("command", ["run", "check", "keygen"])
    @pytest.mark.asyncio
    async def test_a_bad_file_stops_every_command_with_the_place(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome], command: str
    ) -> None:
        """file:line: key: problem, exit code 2, nothing started and nothing written."""
        _, workstation = pair
        workstation.write(agent_extra='workspace = ["typing mistake"]')
        line = workstation.policy.read_text().splitlines().index('workspace = ["typing mistake"]') + 1
        before = sorted(workstation.directory.rglob("*"))
        code, output = await daemon_rig.run((command, "--policy", str(workstation.policy)), workstation.environment())
        assert code == 2
        assert output == f"daemon: {workstation.policy}:{line}: agents.scripted.workspace: is not a key that is known here\n"
        assert sorted(workstation.directory.rglob("*")) == before


class TestKeygen:
    """Keys for the hubs that the policy file names."""

    @pytest.mark.asyncio
    async def test_the_token_is_asked_for_at_the_terminal_and_not_shown(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """Typed unseen, named by hub; the key file is 0600 and holds the key, not the token."""
        hub, workstation = pair
        before = workstation.key.read_text()
        workstation.key.unlink()
        arguments = ("keygen", "--policy", str(workstation.policy))
        code, seen = await asyncio.to_thread(_at_a_terminal, arguments, workstation.environment(), TOKEN)
        assert code == 0, seen
        assert hub.endpoint in seen and TOKEN not in seen
        assert workstation.key.read_text() == before and workstation.key.stat().st_mode & 0o777 == 0o600

    @pytest.mark.asyncio
    async def test_ctrl_c_at_the_question_leaves(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """No traceback, no key, and the exit code that shells give it."""
        _, workstation = pair
        workstation.key.unlink()
        arguments = ("keygen", "--policy", str(workstation.policy))
        code, seen = await asyncio.to_thread(_at_a_terminal, arguments, workstation.environment(), "")
        assert code == 130 and "Traceback" not in seen
        assert not workstation.key.exists()

    @pytest.mark.asyncio
    async def test_a_key_is_not_replaced_unasked(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """Where every key is there, nothing is asked or changed; --force makes it anew."""
        _, workstation = pair
        workstation.key.write_text("mine")
        arguments = ("keygen", "--policy", str(workstation.policy))
        code, output = await daemon_rig.run(arguments, workstation.environment(CODING_DAEMON_TOKEN=TOKEN))
        assert code == 2 and "--force" in output and workstation.key.read_text() == "mine"
        code, output = await daemon_rig.run((*arguments, "--force"), workstation.environment(CODING_DAEMON_TOKEN=TOKEN))
        assert code == 0 and workstation.key.read_text().startswith("crk1_")

    @pytest.mark.parametrize(("token", "problem"), [("short", "shorter than 32"), ("ab" * 20, "12 different"), (TOKEN, "")])
    def test_a_poor_token_is_said_and_the_key_is_made_all_the_same(self, home: Path, token: str, problem: str) -> None:
        """On stderr, with a command that makes a good one, and without the token."""
        key = home / "laptop.key"
        done = subprocess.run(
            [sys.executable, str(daemon_rig.program()), "keygen", "--daemon-id", DAEMON_ID, "--out", str(key)],
            env=environment(home, CODING_DAEMON_TOKEN=token),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 0 and key.read_text().startswith("crk1_")
        assert (problem in done.stderr and "token_urlsafe" in done.stderr) if problem else done.stderr == ""
        assert token not in done.stderr.replace("shorter", "") + done.stdout

    @pytest.mark.asyncio
    async def test_two_hubs_never_get_keys_of_one_token(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A token in the environment does not say whose it is, so with two hubs it is not used for both."""
        _, workstation = pair
        workstation.key.unlink()
        text = workstation.policy.read_text()
        workstation.policy.write_text(
            text.replace("[[hubs]]", '[[hubs]]\nurl = "wss://other.example.org"\nkey_file = "other.key"\n[[hubs]]')
        )
        arguments = ("keygen", "--policy", str(workstation.policy))
        code, output = await daemon_rig.run(arguments, workstation.environment(CODING_DAEMON_TOKEN=TOKEN))
        assert code == 2 and "one by one" in output
        assert not list(workstation.directory.glob("*.key"))


def _at_a_terminal(arguments: tuple[str, ...], env: dict[str, str], typed: str) -> tuple[int, str]:
    """The program at a terminal of its own, where somebody types one line when asked: exit code, and what the screen shows.

    Nothing typed stands for Ctrl-C.
    """
    person, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(daemon_rig.program()), *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
        start_new_session=True,
    )
    os.close(terminal)
    screen = b""
    try:
        while b"daemon-token" not in screen:
            screen += os.read(person, 4096)
        if typed:
            os.write(person, typed.encode() + b"\n")
        else:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while data := os.read(person, 4096):
                screen += data
        return process.wait(WAIT), screen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(person)


class TestCheck:
    """Line by line, before anything runs."""

    @pytest.mark.asyncio
    async def test_a_running_daemon_is_not_disturbed(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """The hub is asked nothing in this machine's name: the daemon that is connected stays so, on its socket."""
        hub, workstation = pair
        async with daemon_rig.running(workstation):
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
            code, output = await daemon_rig.run(("check", "--policy", str(workstation.policy)), workstation.environment())
            assert code == 0, output
            assert b": no connection (" not in workstation.log.read_bytes()
            assert workstation.log.read_bytes().count(b": connected") == 1

    @pytest.mark.asyncio
    async def test_a_hub_that_is_not_there_is_said_with_the_reason(
        self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]
    ) -> None:
        """Each in its own words, with exit code 1, and the rest is still said."""
        hub, workstation = pair

        async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readline()
            status = b"502 Bad Gateway" if b"/proxy" in asked else b"404 Not Found"
            if b"/tunnel" not in asked:
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            writer.close()

        server = await asyncio.start_server(page, "127.0.0.1", 0)
        web = server.sockets[0].getsockname()[1]
        said = {
            f"ws://127.0.0.1:{web}": "answers 404",
            f"ws://127.0.0.1:{web}/proxy": "reaches no hub",
            f"ws://127.0.0.1:{web}/tunnel": "hangs up, as an SSH tunnel .* first message",
            hub.endpoint.replace("ws://", "wss://"): "mixed up",
            f"wss://127.0.0.1:{web}": "mixed up",
            "wss://no-such-machine.invalid": "the name is not known",
        }
        original = workstation.policy.read_text()
        try:
            for url, words in said.items():
                workstation.policy.write_text(original.replace(workstation.url, url))
                code, output = await daemon_rig.run(("check", "--policy", str(workstation.policy)), workstation.environment())
                assert code == 1
                assert re.search(rf"^hub {re.escape(url)}: .*{words}", output, re.MULTILINE), output
                assert "workspace" in output and "Traceback" not in output
        finally:
            server.close()
            await server.wait_closed()
        workstation.policy.write_text(original.replace(workstation.url, f"ws://127.0.0.1:{web}"))
        code, output = await daemon_rig.run(("check", "--policy", str(workstation.policy)), workstation.environment())
        assert code == 1 and "nobody listens there" in output

    @pytest.mark.asyncio
    async def test_a_hub_that_is_not_there_yet_fills_no_log(self, tmp_path: Path) -> None:
        """Trying again and again is told once; the daemon goes on, and is there when the hub opens."""
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
        workstation = DaemonHome(tmp_path / "home", f"ws://127.0.0.1:{port}")
        async with daemon_rig.running(workstation):
            await poll(lambda: workstation.log.read_bytes().count(b": no connection (") >= 3)
            assert len(re.findall(rb"(WARNING|INFO) \S+: no connection \(", workstation.log.read_bytes())) == 1
            hub = AgentRuntimeDaemonHub(error_code_prefix="coding", state_dir=tmp_path / "hub")
            await hub.start("127.0.0.1", port, TOKEN)
            try:
                await hub.wait_for_daemon(DAEMON_ID, WAIT)
            finally:
                await hub.stop()

    @pytest.mark.asyncio
    async def test_everything_that_cannot_be_used_is_said_at_once(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A readable key, a missing command and a state directory that is a file, in one go."""
        _, workstation = pair
        workstation.key.chmod(0o640)
        workstation.state.write_text("in the way")
        workstation.write(agent_extra='[agents.absent]\ncommand = ["no-such-agent"]')
        code, output = await daemon_rig.run(("check", "--policy", str(workstation.policy)), workstation.environment())
        assert code == 1
        problems = [line for line in output.splitlines() if ": ok" not in line]
        assert [line.split()[0] for line in problems] == ["key", "agent", "state"]
        assert "chmod 600" in problems[0] and "no-such-agent" in problems[1] and "no directory" in problems[2]
        assert "/usr/bin" in problems[1], "its owner may read where it was looked for"
        assert workstation.key.read_text().strip() not in output


@pytest.mark.parametrize(("name", "agent"), [("ClaudeCodeAgent", "claude"), ("CodexAgent", "codex")])
@pytest.mark.asyncio
async def test_the_program_of_each_package_begins_with_its_own_agent(
    name: str, agent: str, home: Path, package_root: Path
) -> None:
    """A new policy file names what the package drives, and is made for its owner alone."""
    program = package_root.parent / name / "daemon.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *("init", "--hub", "ws://127.0.0.1:1", "--workspace", str(home)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(home),
    )
    async with asyncio.timeout(WAIT):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    (policy,) = (home / ".config").rglob("*.toml")
    assert f'command = ["{agent}"]' in policy.read_text()
    assert policy.stat().st_mode & 0o077 == 0


class TestRecord:
    """``audit.jsonl``: what the owner finds afterwards."""

    @pytest.mark.asyncio
    async def test_jobs_and_refusals_leave_their_lines(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A turn, a refused server of a running job, a refused job: who, what, where, how it ended, and not a word more."""
        hub, workstation = pair
        driver = RemoteDriver(hub, DAEMON_ID, "scripted", "acp", actor=ACTOR, connect_timeout=WAIT)
        async with daemon_rig.running(workstation):
            session = await driver.open(SessionSpec(command=(), cwd=""))
            await daemon_rig.turn(session, f"say {CANARY}")
            with pytest.raises(CodingError):
                await session.renew_mcp((McpServer("x", "stdio", command=("sh",), env={"KEY": CANARY}),))
            await session.close()
            with pytest.raises(CodingError):
                await driver.open(SessionSpec(command=(), cwd="/etc", env={"KEY": CANARY}))
            await poll(lambda: len(lines(workstation)) == 4)
        started, renewed, ended, refused = lines(workstation)
        common = {"hub": hub.endpoint, "actor": ACTOR, "policy": "ask"}
        assert all(line.items() >= common.items() for line in (started, ended, refused))
        assert started["job"] == renewed["job"] == ended["job"] != refused["job"]
        assert [(line["outcome"], line["code"]) for line in (started, renewed, ended, refused)] == [
            ("started", ""),
            ("refused", "coding.policy_mcp_command"),
            ("closed", ""),
            ("refused", "coding.policy_environment"),
        ]
        assert started["agent"] == ended["agent"] == "scripted"
        assert started["workspace"] == str(workstation.workspace.resolve()) and refused["workspace"] == "/etc"
        file = workstation.state / "audit.jsonl"
        assert file.stat().st_mode & 0o777 == 0o600
        secrets = (CANARY, TOKEN, workstation.key.read_text().strip())
        assert not any(secret in file.read_text() for secret in secrets)

    @pytest.mark.asyncio
    async def test_what_the_hub_answered_leaves_its_line(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """Whether it was in time, what the agent had asked and which choice was made; no reason, no word of an answer."""
        hub, workstation = pair
        async with daemon_rig.running(workstation), daemon_rig.opened(hub) as session:
            await session.prompt(Prompt(f"perm {PERMISSION}"))
            asked = (await daemon_rig.following(session, lambda event: isinstance(event, ApprovalRequested)))[-1]
            assert isinstance(asked, ApprovalRequested)
            assert await session.answer(asked.request_id, Answer("no", message=CANARY))
            await poll(lambda: len(lines(workstation)) == 2)
            await daemon_rig.following(session, lambda event: isinstance(event, TurnEnded))
            assert not await session.answer(asked.request_id, Answer("yes"))
            assert not await session.answer("nothing", Answer("yes"))
            await session.close()
            await poll(lambda: len(lines(workstation)) == 3)
        started, answered, closed = lines(workstation)
        assert (started["outcome"], answered["outcome"], closed["outcome"]) == ("started", "answered", "closed")
        assert answered["job"] == started["job"] and answered["workspace"] == started["workspace"]
        assert answered["request"] == asked.request_id and answered["choice"] == "reject_once"
        assert (answered["kind"], answered["action"]) == ("execute", "deploy --token ***")
        assert len(answered["digest"]) == 64 and "action" not in started
        assert CANARY not in (workstation.state / "audit.jsonl").read_text()

    @pytest.mark.asyncio
    async def test_a_crash_is_not_a_gap(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """A killed daemon's job has its start, and its end once the next daemon has proven it; a good end comes once."""
        hub, workstation = pair
        async with daemon_rig.running(workstation) as process:
            async with daemon_rig.opened(hub) as session:
                await daemon_rig.turn(session, "say fine")
            session = await daemon_rig.remote(hub).open(SessionSpec(command=(), cwd=""))
            await poll(lambda: len(lines(workstation)) == 3)
            await process.kill()
        async with daemon_rig.running(workstation):
            await session.close()
            await hub.wait_for_daemon(DAEMON_ID, WAIT)
        first, ended, second, recovered = lines(workstation)
        assert [line["outcome"] for line in (first, ended, second, recovered)] == [
            "started",
            "closed",
            "started",
            "recovered",
        ]
        assert first["job"] == ended["job"] and second["job"] == recovered["job"]

    @pytest.mark.asyncio
    async def test_a_stop_of_the_daemon_closes_its_jobs(self, pair: tuple[AgentRuntimeDaemonHub, DaemonHome]) -> None:
        """SIGTERM ends what runs, and the record says so."""
        hub, workstation = pair
        async with daemon_rig.running(workstation) as process:
            session = await daemon_rig.remote(hub).open(SessionSpec(command=(), cwd=""))
            assert await process.terminate() == 0
        assert [line["outcome"] for line in lines(workstation)] == ["started", "closed"]
        await session.close()


def lines(workstation: DaemonHome) -> list[dict[str, str]]:
    """The record's lines."""
    file = workstation.state / "audit.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
