"""How a session of the Codex driver is opened: handshake, account, parameters, stored threads, one writer, the program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from codex_harness import log_of, of, opened, received, spec, text, turn, until

from agent import home, program
from agent.driver import CodexDriver
from agent.form import CodexSettings
from agent.opening import EXCLUDED, approval_policy
from agent.product import PRODUCT, options
from pkg.agent_api import McpServer, Notice, SessionStarted, TurnEnded
from pkg.errors import AgentDied, AgentProtocolError, CodingError, LaunchError, SessionUnavailable
from pkg.launch import LocalLauncher
from pkg.product import SpecInputs
from pkg.settings import parse

pytestmark = pytest.mark.asyncio


class TestParameters:
    """What a thread is told."""

    @pytest.mark.parametrize(
        ("policy", "sandbox", "sent"),
        [
            ("ask", "workspace-write", "untrusted"),
            ("deny", "workspace-write", "untrusted"),
            ("ask", "danger-full-access", "untrusted"),
            ("allow-edits", "workspace-write", "on-request"),
            ("allow-edits", "read-only", "on-request"),
            ("allow-edits", "danger-full-access", "untrusted"),
            ("allow-all", "workspace-write", "on-request"),
            ("untrusted", "workspace-write", "untrusted"),
            ("on-request", "workspace-write", "on-request"),
            ("on-failure", "workspace-write", "on-request"),
            ("never", "read-only", "never"),
            ("unheard-of", "workspace-write", "untrusted"),
        ],
    )
    async def test_a_policy_becomes_what_codex_asks_by(self, policy: str, sandbox: str, sent: str, tmp_path: Path) -> None:
        """``ask`` must see every action, which only ``untrusted`` gives; approvals never go to a reviewer of Codex's own."""
        assert approval_policy(policy, sandbox) == sent
        async with opened(tmp_path, policy=policy, options={"sandbox": sandbox}):
            (params,) = received(tmp_path, "thread/start")
        # Commands only look where edits alone are allowed: a writable sandbox runs them unasked.
        given = "read-only" if (policy, sandbox) == ("allow-edits", "workspace-write") else sandbox
        assert (params["approvalPolicy"], params["sandbox"], params["approvalsReviewer"]) == (sent, given, "user")

    async def test_the_sandbox_is_on_unless_the_form_says_otherwise(self, tmp_path: Path) -> None:
        """Nothing and nonsense mean the safe default; only its own directory is writable."""
        for options_ in ({}, {"sandbox": "off"}, {"sandbox": None}):
            async with opened(tmp_path, options=options_):
                pass
        assert {params["sandbox"] for params in received(tmp_path, "thread/start")} == {"workspace-write"}

    async def test_what_the_form_chooses(self, tmp_path: Path) -> None:
        """Model, effort, network, further directories, instructions: over the connection, never into the account's files."""
        chosen = {"model": "m", "effort": "high", "network": True, "writable_roots": ["/extra"], "private": ["MY_PASS"]}
        own = {"shell_environment_policy": {"exclude": ["MINE"]}}
        async with opened(tmp_path, {"config": own}, options=chosen, system_prompt="Be brief."):
            (params,) = received(tmp_path, "thread/start")
        assert params["model"] == "m"
        assert params["developerInstructions"] == "Be brief."
        assert params["config"] == {
            "shell_environment_policy": {"exclude": [*EXCLUDED, "MY_PASS", "MINE"]},
            "projects": {str(tmp_path / "workspace"): {"trust_level": "untrusted"}},
            "model_reasoning_effort": "high",
            "sandbox_workspace_write": {"network_access": True, "writable_roots": ["/extra"]},
        }

    async def test_no_tool_server_takes_the_place_of_another(self, tmp_path: Path) -> None:
        """Codex takes only some characters in names; whoever loses by it is told, and never LangBot's own."""
        names = ("langbot agent", "langbot_agent", "a/b", "a b")
        servers = tuple(McpServer(name, "http", url=f"http://127.0.0.1:1/{number}") for number, name in enumerate(names))
        async with opened(tmp_path, mcp_servers=servers, options={"bridge": "http"}) as session:
            events = await turn(session, "say x")
            (params,) = received(tmp_path, "thread/start")
        given = {name: entry["url"][-1] for name, entry in params["config"]["mcp_servers"].items()}
        assert given == {"langbot_agent": "1", "a_b": "2"}
        (refused,) = [event for event in of(events, Notice) if event.code == "coding.mcp_servers_refused"]
        assert refused.params["names"] == "langbot agent, a b"

    @pytest.mark.parametrize(("home", "excluded"), [("/tmp/account", True), ("/home/tmp/account", None), ("", None)])
    async def test_an_account_below_the_common_temporary_directory_is_not_writable(
        self, home: str, excluded: bool | None, tmp_path: Path
    ) -> None:
        """Codex (0.171) lets commands in the sandbox write there, and so to its own settings and helpers."""
        async with opened(tmp_path, {"home": home}):
            (params,) = received(tmp_path, "thread/start")
        assert params["config"].get("sandbox_workspace_write", {}).get("exclude_slash_tmp") is excluded

    async def test_what_the_form_leaves_open_is_the_account_s(self, tmp_path: Path) -> None:
        """No model, no effort, no instructions are sent."""
        async with opened(tmp_path):
            (params,) = received(tmp_path, "thread/start")
        assert set(params) == {"cwd", "approvalPolicy", "approvalsReviewer", "sandbox", "config"}
        assert set(params["config"]) == {"shell_environment_policy", "projects"}

    @pytest.mark.parametrize(
        ("own", "options", "expected"),
        [
            (None, {}, {"trust_level": "untrusted"}),
            (None, {"trust_workspace": True}, {"trust_level": "trusted"}),
            (None, {"trust_workspace": "yes"}, {"trust_level": "untrusted"}),
            ("trusted", {}, None),
            ("untrusted", {}, None),
            ("untrusted", {"trust_workspace": True}, {"trust_level": "trusted"}),
        ],
    )
    async def test_whom_the_workspace_s_own_settings_are_obeyed_for(
        self, own: str | None, options: dict[str, Any], expected: dict[str, str] | None, tmp_path: Path
    ) -> None:
        """Something is always said, because Codex (0.171) takes silence for trust; the account's own word stands."""
        workspace = str(tmp_path / "workspace")
        projects = {} if own is None else {workspace: {"trust_level": own}}
        async with opened(tmp_path, {"config": {"projects": projects}}, options=options):
            (params,) = received(tmp_path, "thread/start")
        assert params["config"]["projects"] == ({} if expected is None else {workspace: expected})

    async def test_the_command_line_holds_nothing_secret(self, tmp_path: Path) -> None:
        """Two switches and the subcommand; further arguments of the form stand before it."""
        wanted = spec(tmp_path, env={"SECRET_KEY": "canary-key"})
        wanted_command = (*wanted.command, "-c", "model_verbosity=low")
        async with opened(tmp_path, command=wanted_command, env={"SECRET_KEY": "canary-key"}):
            (argv,) = {tuple(line["argv"]) for line in log_of(tmp_path)}
        assert argv[-1] == "app-server"
        assert "features.instant_interrupt=false" in argv
        assert "features.unbounded_connection_retries=false" in argv
        assert "model_verbosity=low" in argv
        assert "canary" not in " ".join(argv)


class TestForm:
    """From the form to a session."""

    async def test_the_defaults_are_safe(self) -> None:
        """Asking, in a sandbox without network."""
        settings = parse(CodexSettings, {})
        made = PRODUCT.spec(settings, SpecInputs("/w", "local", {}, ()))
        assert (made.command, made.policy, dict(made.options)) == (("codex",), "ask", {})

    async def test_every_field_arrives(self) -> None:
        """The established names, and this package's own."""
        settings = parse(
            CodexSettings,
            {
                "command": "/opt/codex",
                "args-json": '["--enable", "x"]',
                "env-json": '{"A_PASS": "${secret:ONE}", "PLAIN": "x"}',
                "model": "m",
                "effort": "low",
                "sandbox-mode": "read-only",
                "network-access": True,
                "writable-roots": '["/a", "/b"]',
                "append-instructions": "Hi",
                "approval-policy": "on-request",
                "mcp-bridge-transport": "http",
            },
        )
        made = PRODUCT.spec(settings, SpecInputs("/w", "local", {}, ()))
        assert made.command == ("/opt/codex", "--enable", "x")
        assert made.system_prompt == "Hi"
        assert options(settings) == {
            "sandbox": "read-only",
            "model": "m",
            "effort": "low",
            "network": True,
            "writable_roots": ["/a", "/b"],
            "private": ["A_PASS"],
            "bridge": "http",
        }

    async def test_on_a_workstation_the_policy_file_has_the_command(self) -> None:
        """A daemon runs what its own file names."""
        made = PRODUCT.spec(parse(CodexSettings, {"command": "/opt/codex"}), SpecInputs("/w", "daemon", {}, ()))
        assert made.command == ()


class TestSessions:
    """Stored threads."""

    async def test_a_stored_thread_is_resumed_with_everything_sent_again(self, tmp_path: Path) -> None:
        """Codex keeps what it was told last, so a change of the form must be told; its history is not sent back."""
        async with opened(tmp_path, {"known": ["t-1"]}, resume_session_id="t-1", policy="ask") as session:
            first = (await until(session, SessionStarted))[0]
            assert first == SessionStarted("t-1", resumed=True)
            assert text(await turn(session, "say on")) == "on"
        (params,) = received(tmp_path, "thread/resume")
        assert params["threadId"] == "t-1"
        assert params["excludeTurns"] is True
        assert params["approvalPolicy"] == "untrusted"
        assert "shell_environment_policy" in params["config"]
        assert received(tmp_path, "thread/start") == []

    async def test_one_that_is_proven_gone_is_replaced_and_that_is_said(self, tmp_path: Path) -> None:
        """The only case in which a stored id is given up."""
        async with opened(tmp_path, resume_session_id="t-gone") as session:
            first = (await until(session, SessionStarted))[0]
            assert isinstance(first, SessionStarted)
            assert first.lost_history
            assert not first.resumed
            assert first.session_id != "t-gone"

    async def test_unless_the_form_forbids_a_new_one(self, tmp_path: Path) -> None:
        """Then it is an error a person can act on."""
        with pytest.raises(SessionUnavailable) as caught:
            async with opened(tmp_path, resume_session_id="t-gone", create_if_missing=False):
                pass
        assert caught.value.code == "coding.session_missing"

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            ("thread t-1 already has an active writer", "coding.session_busy"),
            ("database is locked", "coding.session_unavailable"),
            ("something new", "coding.session_unavailable"),
        ],
    )
    async def test_any_other_refusal_keeps_the_stored_thread(self, words: str, code: str, tmp_path: Path) -> None:
        """Only Codex's text separates the causes; what is not proof is none."""
        with pytest.raises(SessionUnavailable) as caught:
            async with opened(tmp_path, {"resume_error": words}, resume_session_id="t-1"):
                pass
        assert caught.value.code == code
        assert received(tmp_path, "thread/start") == []


class TestTrouble:
    """What can be wrong at the start, each with its own words."""

    async def test_nobody_is_signed_in(self, tmp_path: Path) -> None:
        """Said at once, with the command that signs in and where; not after seven seconds of retries."""
        account = {"account": None, "requiresOpenaiAuth": True}
        with pytest.raises(SessionUnavailable) as caught:
            async with opened(tmp_path, {"account": account}):
                pass
        assert caught.value.code == "coding.agent_login_required"
        assert caught.value.params["command"] == "codex login"
        assert caught.value.params["machine"]

    async def test_a_key_in_the_environment_signs_in_without_being_written_down(self, tmp_path: Path) -> None:
        """Codex looks at it only for a provider that says so."""
        account = {"account": None, "requiresOpenaiAuth": True}
        async with opened(tmp_path, {"account": account}, env={"OPENAI_API_KEY": "canary-key"}):
            (params,) = received(tmp_path, "thread/start")
        assert params["modelProvider"] == "langbot_key"
        provider = params["config"]["model_providers"]["langbot_key"]
        assert provider["env_key"] == "OPENAI_API_KEY"
        assert "canary" not in json.dumps(params)

    async def test_an_account_s_own_sign_in_comes_first(self, tmp_path: Path) -> None:
        """A key beside it changes nothing."""
        account = {"account": {"type": "chatgpt"}, "requiresOpenaiAuth": True}
        async with opened(tmp_path, {"account": account}, env={"OPENAI_API_KEY": "k"}):
            (params,) = received(tmp_path, "thread/start")
        assert "modelProvider" not in params

    async def test_a_refused_handshake(self, tmp_path: Path) -> None:
        """Codex's own words stand below."""
        with pytest.raises(AgentProtocolError) as caught:
            async with opened(tmp_path, {"initialize_error": "too old"}):
                pass
        assert (caught.value.code, caught.value.detail) == ("coding.agent_refused_handshake", "too old")

    async def test_a_refused_thread(self, tmp_path: Path) -> None:
        """For instance a model provider the account's settings do not have."""
        with pytest.raises(SessionUnavailable) as caught:
            async with opened(tmp_path, {"start_error": "Model provider `x` not found"}):
                pass
        assert caught.value.code == "coding.session_unavailable"
        assert "not found" in caught.value.detail

    @pytest.mark.parametrize("method", ["initialize", "thread/start"])
    async def test_a_server_that_does_not_answer(self, method: str, tmp_path: Path) -> None:
        """Ends with what it waited for, and with nothing left running."""
        with pytest.raises(CodingError) as caught:
            async with opened(tmp_path, {"deaf": [method]}, initialize_timeout=0.5):
                pass
        assert caught.value.code == "coding.agent_start_timeout"
        assert caught.value.params["step"] == method

    async def test_no_such_program(self, tmp_path: Path) -> None:
        """Named, with the places that were looked at."""
        with pytest.raises(LaunchError) as caught:
            async with opened(tmp_path, command=("codex-that-is-not-there",)):
                pass
        assert caught.value.code == "coding.agent_not_found"

    async def test_a_program_that_ends_at_once(self, tmp_path: Path) -> None:
        """With its exit code and its last words, without the secrets it was given."""
        path = tmp_path / "broken"
        path.write_text('#!/bin/sh\necho "no such flag: $TOKEN" >&2\nexit 2\n')
        path.chmod(0o755)
        with pytest.raises(AgentDied) as caught:
            async with opened(tmp_path, command=(str(path),), env={"TOKEN": "canary-token-value"}):
                pass
        assert caught.value.params["code"] == "2"
        assert "no such flag" in caught.value.detail
        assert "canary" not in caught.value.detail

    @pytest.mark.parametrize(("exit_code", "told"), [(0, False), (1, True)])
    async def test_a_sandbox_that_cannot_work_is_said_with_the_choice(self, exit_code: int, told: bool, tmp_path: Path) -> None:
        """Found out beside the first turn by running something harmless in it."""
        async with opened(tmp_path, {"exec": exit_code}) as session:
            events = await turn(session, "say first")
            if told:
                events += await until(session, Notice) if not of(events, Notice) else []
            notices = [event for event in of(events, Notice) if event.code == "coding.sandbox_unusable"]
            assert bool(notices) is told
            assert all(notice.level == "warning" and notice.params["machine"] for notice in notices)
            assert any(isinstance(event, TurnEnded) for event in events)

    @pytest.mark.parametrize(("policy", "told"), [("never", True), ("ask", False), ("on-request", False)])
    async def test_a_policy_that_never_asks_is_said_once(self, policy: str, told: bool, tmp_path: Path) -> None:
        """An existing configuration keeps its meaning, and people know it; a resumed session does not repeat it."""
        async with opened(tmp_path, policy=policy) as session:
            events = await turn(session, "say first")
        assert [event.level for event in of(events, Notice) if event.code == "coding.codex_never_asks"] == ["warning"] * told
        async with opened(tmp_path, {"known": ["t-1"]}, policy=policy, resume_session_id="t-1") as session:
            events = await turn(session, "say again")
        assert not [event for event in of(events, Notice) if event.code == "coding.codex_never_asks"]

    async def test_the_sandbox_is_checked_once_per_machine(self, tmp_path: Path) -> None:
        """And never where there is none."""
        driver = CodexDriver()
        async with opened(tmp_path, driver=driver, options={"sandbox": "danger-full-access"}) as session:
            await turn(session, "say x")
        assert received(tmp_path, "command/exec") == []
        for _ in range(2):
            async with opened(tmp_path, driver=driver) as session:
                await turn(session, "say x")
                await asyncio.gather(*session._side)
        assert len(received(tmp_path, "command/exec")) == 1


class TestAccounts:
    """Homes, and the one writer of a thread."""

    async def test_a_missing_home_is_made_for_this_account_alone(self, tmp_path: Path) -> None:
        """Codex refuses a home that does not exist."""
        place = tmp_path / "deep" / "home"
        async with opened(tmp_path, env={"CODEX_HOME": str(place)}):
            assert stat.S_IMODE(place.stat().st_mode) == 0o700

    @pytest.mark.parametrize("value", ["relative/home", "/proc/nothing/here"])
    async def test_a_home_that_cannot_be_is_refused_before_anything_starts(self, value: str, tmp_path: Path) -> None:
        """In words about the setting."""
        with pytest.raises(SessionUnavailable) as caught:
            async with opened(tmp_path, env={"CODEX_HOME": value}):
                pass
        assert caught.value.code == "coding.codex_home_unusable"
        assert log_of(tmp_path) == []

    async def test_the_default_home_is_the_account_s(self) -> None:
        """``CODEX_HOME``, else ``.codex`` in ``HOME``."""
        assert home.codex_home({"CODEX_HOME": "/a", "HOME": "/b"}) == Path("/a")
        assert home.codex_home({"HOME": "/b"}) == Path("/b/.codex")

    async def test_two_homes_that_share_their_sessions_have_one_writer(self, tmp_path: Path) -> None:
        """Codex's own lock is per home; ours goes by the real path, also between processes of different daemons."""
        real, other = tmp_path / "home", tmp_path / "other"
        (real / "sessions").mkdir(parents=True)
        other.mkdir()
        (other / "sessions").symlink_to(real / "sessions")
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(home.writer_guard({"CODEX_HOME": str(real)}, "t-1"))
            with pytest.raises(SessionUnavailable) as caught:
                await held.enter_async_context(home.writer_guard({"CODEX_HOME": str(other)}, "t-1", wait=0.1))
            assert caught.value.code == "coding.session_busy"
            await held.enter_async_context(home.writer_guard({"CODEX_HOME": str(other)}, "t-2", wait=0.1))
        (tmp_path / "third" / "sessions").mkdir(parents=True)
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(home.writer_guard({"CODEX_HOME": str(real)}, "t-1"))
            await held.enter_async_context(home.writer_guard({"CODEX_HOME": str(tmp_path / "third")}, "t-1", wait=0.1))

    async def test_a_live_session_is_the_only_writer_of_its_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Resumed or fresh, until it is closed."""
        monkeypatch.setattr("agent.home.writer_guard.__kwdefaults__", {"wait": 0.2})
        async with opened(tmp_path, {"known": ["t-1"]}, resume_session_id="t-1"):
            with pytest.raises(SessionUnavailable) as caught:
                async with opened(tmp_path, {"known": ["t-1"]}, resume_session_id="t-1"):
                    pass
            assert caught.value.code == "coding.session_busy"
        async with opened(tmp_path, {"known": ["t-1"]}, resume_session_id="t-1") as session:
            assert session.session_id == "t-1"


class TestProgram:
    """The native binary behind what people install."""

    @staticmethod
    def _binary(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF")
        path.chmod(0o755)
        return path

    @pytest.mark.parametrize(
        "inside",
        [
            "node_modules/@openai/codex-linux-x64",
            "node_modules/@openai/codex/node_modules/@openai/codex-linux-x64",
            "node_modules/@openai/codex",
        ],
    )
    async def test_behind_npm_s_script(self, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beside the package, inside it, or in it as older versions had it; the one of this machine."""
        monkeypatch.setattr("platform.system", lambda: "Linux")
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        shim = tmp_path / "node_modules/@openai/codex/bin/codex.js"
        shim.parent.mkdir(parents=True)
        shim.write_text("#!/usr/bin/env node\n")
        shim.chmod(0o755)
        link = tmp_path / "bin" / "codex"
        link.parent.mkdir()
        link.symlink_to(shim)
        assert program.native(str(link)) == str(link)
        self._binary(tmp_path / inside.replace("x64", "arm64") / "vendor/aarch64-unknown-linux-musl/bin/codex")
        binary = self._binary(tmp_path / inside / "vendor/x86_64-unknown-linux-musl/bin/codex")
        assert program.native(str(link)) == str(binary)

    async def test_behind_the_python_package_s_script(self, tmp_path: Path) -> None:
        """In the environment whose script it is."""
        script = tmp_path / "venv/bin/codex"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!{sys.executable}\n")
        binary = self._binary(tmp_path / "venv/lib/python3.11/site-packages/codex_cli_bin/bin/codex")
        assert program.native(str(script)) == str(binary)

    async def test_anything_else_is_started_as_it_is(self, tmp_path: Path) -> None:
        """A binary, a wrapper of the operator's own."""
        binary = self._binary(tmp_path / "codex")
        wrapper = tmp_path / "wrapper"
        wrapper.write_text("#!/bin/sh\n")
        for path in (binary, wrapper, tmp_path / "missing"):
            assert program.native(str(path)) == str(path)


async def test_a_driver_keeps_nothing_of_who_used_it(tmp_path: Path) -> None:
    """One object serves every installation: all it learns is which machines have a working sandbox."""
    driver = CodexDriver()
    async with opened(tmp_path, driver=driver, env={"K": "canary-env-value"}) as session:
        await turn(session, "say x")
        await asyncio.gather(*session._side)
    assert vars(driver) == {"_sandboxed": {LocalLauncher().machine}}
    assert os.environ.get("CODEX_HOME") is None
