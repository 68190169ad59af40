"""How a session of the Codex driver is opened: handshake, account, parameters, stored threads, one writer, the program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from codex_harness import log_of, of, opened, profile_in, received, sandbox_in, spec, text, turn, until

from agent import home, program
from agent.driver import CodexDriver
from agent.form import CodexSettings
from agent.keys import EXCLUDED
from agent.opening import approval_policy
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
        assert (params["approvalPolicy"], sandbox_in(params), params["approvalsReviewer"]) == (sent, given, "user")

    async def test_the_sandbox_is_on_unless_the_form_says_otherwise(self, tmp_path: Path) -> None:
        """Nothing and nonsense mean the safe default; only its own directory is writable."""
        for options_ in ({}, {"sandbox": "off"}, {"sandbox": None}):
            async with opened(tmp_path, options=options_):
                pass
        assert {sandbox_in(params) for params in received(tmp_path, "thread/start")} == {"workspace-write"}

    async def test_what_the_form_chooses(self, tmp_path: Path) -> None:
        """Model, effort, network, further directories, instructions: over the connection, never into the account's files."""
        chosen = {"model": "m", "effort": "high", "network": True, "writable_roots": ["/extra"], "private": ["MY_PASS"]}
        own = {"shell_environment_policy": {"exclude": ["MINE"]}}
        async with opened(tmp_path, {"config": own}, options=chosen, system_prompt="Be brief."):
            (params,) = received(tmp_path, "thread/start")
        profile = profile_in(params)
        del params["config"]["permissions"]
        assert profile["network"] == {"enabled": True}
        assert profile["filesystem"]["/extra"] == "write"
        assert params["model"] == "m"
        assert params["developerInstructions"] == "Be brief."
        assert params["config"] == {
            "shell_environment_policy": {"exclude": [*EXCLUDED, "MY_PASS", "MINE"]},
            "projects": {str(tmp_path / "workspace"): {"trust_level": "untrusted"}},
            "model_reasoning_effort": "high",
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
        assert profile_in(params)["filesystem"].get(":slash_tmp") == ("read" if excluded else None)

    async def test_what_the_form_leaves_open_is_the_account_s(self, tmp_path: Path) -> None:
        """No model, no effort, no instructions are sent."""
        async with opened(tmp_path):
            (params,) = received(tmp_path, "thread/start")
        assert set(params) == {"cwd", "approvalPolicy", "approvalsReviewer", "permissions", "config"}
        assert set(params["config"]) == {"shell_environment_policy", "projects", "permissions"}

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


class TestConfinement:
    """What commands in the sandbox are kept from."""

    async def test_no_command_reads_the_account_s_keys(self, tmp_path: Path) -> None:
        """Nor those of the account that is used where none is named; by their real paths, because a link would end it all."""
        real = tmp_path / "real"
        real.mkdir()
        (real / "auth.json").write_text("{}")
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "auth.json").symlink_to(real / "auth.json")
        (tmp_path / "linked").symlink_to(tmp_path / "home")
        other = tmp_path / "person"
        async with opened(tmp_path, {"home": str(tmp_path / "linked")}, env={"HOME": str(other)}, policy="never"):
            (params,) = received(tmp_path, "thread/start")
        denied = {path for path, access in profile_in(params)["filesystem"].items() if access == "deny"}
        names = ("auth.json", ".credentials.json", "gateway_oauth.json", ".env", "config.toml")
        mine = {str(tmp_path / "home" / name) for name in names[1:]} | {str(real / "auth.json")}
        assert denied == mine | {str(other / ".codex" / name) for name in names}

    async def test_elsewhere_the_machine_is_asked_for_the_real_paths(self, tmp_path: Path) -> None:
        """By a command in its sandbox; where that fails, no command runs at all."""
        launcher = LocalLauncher()
        launcher.local = False
        async with opened(tmp_path, {"home": "/h", "stdout": "/real/auth.json\nnothing\n/h/.env\n"}, launcher=launcher):
            (params,) = received(tmp_path, "thread/start")
        assert profile_in(params)["filesystem"] == {"/real/auth.json": "deny", "/h/.env": "deny"}
        (tmp_path / "log").unlink()
        async with opened(tmp_path, {"home": "/h"}, launcher=launcher):
            (params,) = received(tmp_path, "thread/start")
        assert profile_in(params)["filesystem"]["/h/auth.json"] == "deny"

    async def test_what_the_account_set_for_its_sandbox_still_counts(self, tmp_path: Path) -> None:
        """Codex's profiles know nothing of it; what the form says comes before it."""
        own = {"writable_roots": ["/mine"], "network_access": True, "exclude_slash_tmp": True, "exclude_tmpdir_env_var": True}
        config = {"config": {"sandbox_workspace_write": own}}
        async with opened(tmp_path, config):
            pass
        async with opened(tmp_path, config, options={"network": False, "writable_roots": ["/form"]}):
            pass
        first, second = (profile_in(params) for params in received(tmp_path, "thread/start"))
        assert first["network"] == {"enabled": True}
        assert "network" not in second
        rest = [{path: access for path, access in each["filesystem"].items() if access != "deny"} for each in (first, second)]
        assert rest[0] == {"/mine": "write", ":slash_tmp": "read", ":tmpdir": "read"}
        assert rest[1] == {"/form": "write", ":slash_tmp": "read", ":tmpdir": "read"}

    @pytest.mark.parametrize(
        "lacking",
        [
            {"profiles": None},
            {"profiles": {":read-only": True}},
            {"profiles": {":workspace": False}},
            {"profile_error": "permission profile `langbot` is not allowed by requirements"},
        ],
    )
    @pytest.mark.parametrize("stored", ["", "t-1"])
    async def test_where_it_cannot_be_done_that_is_said(self, lacking: dict[str, Any], stored: str, tmp_path: Path) -> None:
        """An older Codex, or an administrator's requirements: the sandbox is the same, without it."""
        async with opened(tmp_path, {"known": ["t-1"], **lacking}, resume_session_id=stored) as session:
            events = await turn(session, "say x")
            params = received(tmp_path, "thread/resume" if stored else "thread/start")[-1]
        assert params["sandbox"] == "workspace-write"
        assert "permissions" not in params["config"]
        assert "coding.account_readable" in [event.code for event in of(events, Notice)]

    async def test_nothing_is_said_where_it_is_done_or_nobody_expects_it(self, tmp_path: Path) -> None:
        """Without a sandbox everything can be read, which the form says."""
        for sandbox in ("read-only", "danger-full-access"):
            async with opened(tmp_path, options={"sandbox": sandbox}, policy="never") as session:
                events = await turn(session, "say x")
            assert "coding.account_readable" not in [event.code for event in of(events, Notice)]
        assert received(tmp_path, "thread/start")[-1]["sandbox"] == "danger-full-access"

    async def test_a_wish_that_is_taken_and_not_fulfilled_ends_the_opening(self, tmp_path: Path) -> None:
        """Nobody would know which sandbox it is."""
        with pytest.raises(AgentProtocolError):
            async with opened(tmp_path, {"profile_ignored": True}):
                pass


class TestKeys:
    """What Codex's process holds, and what reaches it otherwise."""

    SETTINGS: ClassVar = {
        "model_providers": {
            "mine": {"env_key": "MODEL_KEY", "env_http_headers": {"X-Team": "TEAM_TOKEN", "X-Plain": "PLAIN"}},
            "other": {"env_key": "NOT_GIVEN_KEY"},
        },
        "mcp_servers": {
            "http": {"url": "http://127.0.0.1:1/", "env_http_headers": {"X-Key": "TOOL_PASS"}},
            "stdio": {"command": "x", "env_vars": ["STDIO_TOKEN", "PLAIN", {"name": "z"}]},
        },
    }
    ENV: ClassVar = {
        "MODEL_KEY": "canary-1",
        "TEAM_TOKEN": "canary-2",
        "TOOL_PASS": "canary-3",
        "STDIO_TOKEN": "canary-4",
        "UNUSED_SECRET": "canary-5",
        "PLAIN": "visible",
        "AWS_SECRET_ACCESS_KEY": "for-the-library",
    }

    async def test_what_the_settings_name_comes_with_the_thread(self, tmp_path: Path) -> None:
        """Keys of providers, headers, variables of tool servers; the process holds none; what nothing names goes nowhere."""
        path = tmp_path / "environment"
        config = {"config": self.SETTINGS, "environment": str(path), "known": ["t-1"]}
        for stored in ("", "t-1"):
            async with opened(tmp_path, config, env=self.ENV, options={"private": ["TOOL_PASS"]}, resume_session_id=stored):
                pass
            (params,) = received(tmp_path, "thread/resume" if stored else "thread/start")
            providers = params["config"]["model_providers"]
            assert providers == {"mine": {"http_headers": {"Authorization": "Bearer canary-1", "X-Team": "canary-2"}}}
            servers = {"http": {"http_headers": {"X-Key": "canary-3"}}, "stdio": {"env": {"STDIO_TOKEN": "canary-4"}}}
            assert params["config"]["mcp_servers"] == servers
            assert "canary-5" not in json.dumps(params)
        assert len(path.read_text().splitlines()) == 2
        for line in path.read_text().splitlines():
            environment = json.loads(line)
            assert "canary" not in line
            assert (environment["PLAIN"], environment["AWS_SECRET_ACCESS_KEY"]) == ("visible", "for-the-library")

    async def test_what_cannot_be_sent_stays_in_the_environment(self, tmp_path: Path) -> None:
        """A tool server's bearer: known only once the settings are, so the process is started a second time."""
        path = tmp_path / "environment"
        servers = {**self.SETTINGS["mcp_servers"], "bearer": {"url": "http://127.0.0.1:1/", "bearer_token_env_var": "B_TOKEN"}}
        config = {"config": {**self.SETTINGS, "mcp_servers": servers}, "environment": str(path)}
        async with opened(tmp_path, config, env={**self.ENV, "B_TOKEN": "bearer-value"}, options={"private": ["TOOL_PASS"]}):
            (params,) = received(tmp_path, "thread/start")
        assert set(params["config"]["mcp_servers"]) == {"http", "stdio"}
        first, second = (json.loads(line) for line in path.read_text().splitlines())
        assert first["B_TOKEN"] != "bearer-value"
        assert second["B_TOKEN"] == "bearer-value"
        assert "canary" not in json.dumps([first, second])

    async def test_a_tool_server_of_the_form_comes_before_one_of_the_account(self, tmp_path: Path) -> None:
        """Of one name."""
        mine = McpServer("http", "http", url="http://127.0.0.1:2/mcp")
        options_ = {"private": ["TOOL_PASS"], "bridge": "http"}
        async with opened(tmp_path, {"config": self.SETTINGS}, env=self.ENV, options=options_, mcp_servers=(mine,)):
            (params,) = received(tmp_path, "thread/start")
        assert params["config"]["mcp_servers"]["http"] == {"url": "http://127.0.0.1:2/mcp", "http_headers": {}}


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

    async def test_a_key_of_the_form_signs_in_without_being_written_down(self, tmp_path: Path) -> None:
        """Codex looks at it only for a provider that says so; it comes with the thread, and is in no environment."""
        account = {"account": None, "requiresOpenaiAuth": True}
        async with opened(tmp_path, {"account": account}, env={"OPENAI_API_KEY": "canary-key"}):
            (params,) = received(tmp_path, "thread/start")
        assert params["modelProvider"] == "langbot_key"
        provider = params["config"]["model_providers"]["langbot_key"]
        assert "env_key" not in provider
        assert provider["experimental_bearer_token"] == "canary-key"

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
