"""The real Codex on other machines: over SSH, and under a daemon that dials out, both from a real worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_codex_worker import NAME, scripted

from pkg.relay_protocol import daemon_key, format_key
from testkit.responses_fixture import KEY, ResponsesFixture, codex_home, responses_fixture
from testkit.sdk_worker import Shape, built, descendants, gone, sdk_worker
from testkit.sshd import Server, sshd
from tooling import ROOT

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(180)]

TOKEN = "canary-codex-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0"


@pytest.fixture
def place() -> Iterator[Path]:
    """A place outside of temporary directories."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="codex-place-")).resolve()
    (made / "workspace").mkdir()
    yield made
    shutil.rmtree(made)


def installed(codex_program: Path, place: Path) -> Path:
    """Codex as npm installs it for everybody: a link to the script that only starts the binary of another package."""
    package = next(parent for parent in codex_program.parents if parent.name.startswith("codex-"))
    link = place / "bin" / "codex"
    link.parent.mkdir()
    link.symlink_to(package.parent / "codex" / "bin" / "codex.js")
    return link


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One OpenSSH server for the file."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.mark.ssh
class TestSsh:
    """Another account's machine."""

    @staticmethod
    def form(server: Server, base: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A runner form for that machine."""
        there = {
            "location": "remote-ssh",
            "ssh-target": server.target,
            "ssh-port": server.port,
            "ssh-known-hosts": server.known_hosts,
        }
        return {**base, **there, **{name.replace("_", "-"): value for name, value in fields.items()}}

    @pytest.mark.parametrize("shape", ["dedicated", "pool"])
    async def test_the_scripted_server_from_both_shapes(self, shape: Shape, server: Server, tmp_path: Path) -> None:
        """LangBot's tools come through the tunnel; files go through the app-server; nothing stays."""
        secret = {"A": {"ssh-private-key-secret": server.identity_file.read_text(), "agent-secret-values": '{"KEY": "x-y-z"}'}}
        async with sdk_worker(built(NAME), tmp_path / "runtime", shape, name=NAME, installations=secret) as worker:
            form = self.form(server, scripted(tmp_path), langbot_assets_enabled=True, keep_warm=0)
            outcome = await worker.run("say one two", config=form)
            assert outcome.shown == ["one two"], outcome.text
            assert await gone(descendants(server.pid), 10.0)
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        (start,) = [line["params"] for line in lines if line.get("method") == "thread/start"]
        assert start["config"]["mcp_servers"]["langbot_agent"]["http_headers"]["Authorization"].startswith("Bearer ")
        assert "dynamicTools" not in start

    async def test_a_program_that_is_not_there_is_named(self, server: Server, tmp_path: Path) -> None:
        """In words about the machine."""
        secret = {"A": {"ssh-private-key-secret": server.identity_file.read_text(), "agent-secret-values": '{"KEY": "x-y-z"}'}}
        async with sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=secret) as worker:
            form = self.form(server, scripted(tmp_path), command="codex-that-is-not-there")
            outcome = await worker.run("say x", config=form)
        assert "codex-that-is-not-there" in outcome.text
        assert "coding.agent_not_found" in outcome.log

    @pytest.mark.real_codex
    async def test_the_real_one_in_its_account(self, server: Server, codex_program: Path, place: Path, tmp_path: Path) -> None:
        """Behind npm's script the binary itself is started; the session is resumed; a stopped command is gone."""
        program = installed(codex_program, place)
        secrets = {"KEY": KEY}
        installation = {
            "ssh-private-key-secret": server.identity_file.read_text(),
            "agent-secret-values": json.dumps(secrets),
        }
        async with (
            responses_fixture() as model,
            sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations={"A": installation}) as worker,
        ):
            env = {**codex_home(place / "home", model.url), "FIXTURE_API_KEY": "${secret:KEY}"}
            base = {"command": str(program), "workspace": str(place / "workspace"), "env-json": json.dumps(env)}
            form = self.form(server, base, approval_policy="allow-all", keep_warm=0)
            assert (await worker.run("remember the heron [[ say noted ]]", config=form)).text == "noted"
            recalled = await worker.run("[[ recall ]]", run_id="r2", config=form)
            assert "remember the heron" in recalled.text
            stream = worker.stream("[[ hold /never ]]", run_id="r3", config=form)
            async with asyncio.timeout(60):
                async for result in stream:
                    if "holding" in json.dumps(result.data):
                        break
            there = descendants(server.pid)
            lines = [(Path(f"/proc/{pid}/cmdline")).read_bytes() for pid in there]
            assert any(b"vendor" in line and b"app-server" in line for line in lines)
            assert not [line for line in lines if b"codex.js" in line]
            assert not [line for line in lines if KEY.encode() in line]
            await stream.aclose()
            assert await gone(there, 30.0)


class TestDaemon:
    """A person's own machine."""

    @staticmethod
    @contextlib.asynccontextmanager
    async def daemon(place: Path, port: int, command: list[str], **environment: str) -> AsyncIterator[Path]:
        """The daemon program of the Codex package with a policy file of its own; its log."""
        key = place / "laptop.key"
        key.write_text(format_key(daemon_key(TOKEN, "laptop")) + "\n")
        key.chmod(0o600)
        policy = place / "daemon.toml"
        policy.write_text(
            "\n".join(
                [
                    'daemon_id = "laptop"',
                    f"workspaces = [{json.dumps(str(place / 'workspace'))}]",
                    f"state_dir = {json.dumps(str(place / 'state'))}",
                    'approvals = ["ask", "allow-all"]',
                    f"environment = {json.dumps(sorted(environment))}",
                    "[[hubs]]",
                    f'url = "ws://127.0.0.1:{port}"',
                    'key_file = "laptop.key"',
                    "[agents.codex]",
                    f"command = {json.dumps(command)}",
                ]
            )
            + "\n"
        )
        policy.chmod(0o600)
        log = place / "daemon.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(ROOT / NAME / "daemon.py"),
                *("run", "--policy", str(policy), "--log-level", "debug"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={"PATH": os.environ["PATH"], "HOME": str(place), "LANG": "C.UTF-8", **environment},
            )
        try:
            yield log
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(60):
                await process.wait()

    @pytest.mark.real_codex
    @pytest.mark.parametrize("shape", ["dedicated", "pool"])
    async def test_a_conversation_over_the_relay(self, shape: Shape, codex_program: Path, place: Path, tmp_path: Path) -> None:
        """Text, memory, steering, a denied command, LangBot's tools; the key never leaves the machine."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        plugin = {"daemon-enabled": True, "daemon-host": "127.0.0.1", "daemon-port": port, "daemon-token": TOKEN}
        async with contextlib.AsyncExitStack() as stack:
            model: ResponsesFixture = await stack.enter_async_context(responses_fixture())
            worker = await stack.enter_async_context(
                sdk_worker(built(NAME), tmp_path / "runtime", shape, name=NAME, installations={"A": plugin})
            )
            form = {"location": "daemon", "daemon-id": "laptop", "keep-warm": 0}
            first = worker.start("remember the heron [[ say noted ]]", config=form)
            env = codex_home(place / "home", model.url)
            del env["HOME"]
            log = await stack.enter_async_context(self.daemon(place, port, [str(codex_program)], **env))
            assert (await first).shown[-1:] == ["noted"], log.read_text()[-3000:]
            recalled = await worker.run("[[ recall ]]", run_id="r2", config=form)
            assert "remember the heron" in recalled.text
            asked = await worker.run("[[ run touch made ;; say done ]]", run_id="r3", config=form)
            assert "touch made" in asked.text
            denied = await worker.run("3", run_id="r3-answer", config=form)
            assert denied.shown[-1:] == ["done"]
            assert not (place / "workspace" / "made").exists()
            tool = await worker.run("[[ call langbot_get_current_event {} ]]", run_id="r4", config=form)
            assert "done: " in tool.text
            assert "not available" not in tool.text
            wide = {**form, "sandbox-mode": "danger-full-access"}
            refused = await worker.run("[[ say x ]]", run_id="r5", config=wide)
            assert "sandbox" in refused.text
            assert "coding.policy_option" in refused.log
            assert KEY not in log.read_text()
