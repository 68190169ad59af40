"""Opening a session: sign-in, new, resume, load, tool servers, and the agent's own settings."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent import presets
from agent.driver import AcpDriver
from agent.opening import RecentlyOpened
from agent.session import AcpSession
from pkg import limits
from pkg.agent_api import McpServer, Notice, SessionCapabilities, SessionStarted, TextDelta
from pkg.errors import CodingError, SessionUnavailable
from pkg.launch import LocalLauncher
from testkit import acp_harness as acp


async def started(session: AcpSession) -> SessionStarted:
    """The session's first event."""
    (event,) = await acp.following(session, lambda event: True)
    assert isinstance(event, SessionStarted)
    return event


async def stored(tmp_path: Path, **config: Any) -> tuple[str, dict[str, Any]]:
    """A session with one turn in an agent's store: its id and the agent's configuration."""
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    config = {"state": str(state), "log": str(tmp_path / "log"), **config}
    plain = {key: value for key, value in config.items() if key in ("state", "name")}
    async with acp.opened(tmp_path, plain) as session:
        await acp.turn(session, "say remembered")
    return session.session_id, config


# ------------------------------------------------------------------ handshake


@pytest.mark.asyncio
async def test_the_handshake_says_what_this_client_can_do(tmp_path: Path) -> None:
    """Protocol v1: version 1, our name, files and terminals on this machine, boolean options, questions as forms."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        assert session.capabilities == SessionCapabilities(images=True, embedded_files=True)
        assert await started(session) == SessionStarted("s-1")
    (params,) = acp.received(log, "initialize")
    assert params["protocolVersion"] == 1
    assert params["clientInfo"]["name"]
    assert params["clientCapabilities"] == {
        "fs": {"readTextFile": True, "writeTextFile": True},
        "terminal": True,
        "session": {"configOptions": {"boolean": {}}},
        "elicitation": {"form": {}},
    }
    assert acp.received(log, "session/new") == [{"cwd": str(tmp_path), "mcpServers": []}]


class Elsewhere(LocalLauncher):
    """This machine under the name of another one: what a place looks like whose files can't be opened from here."""

    local = False


@pytest.mark.asyncio
async def test_files_and_terminals_are_not_offered_elsewhere(tmp_path: Path) -> None:
    """Our rule: the client's side of the workspace exists only where the workspace is."""
    log = tmp_path / "log"
    config = {"log": str(log), "without": ["http"]}
    server = acp.http_server(bearer="canary-bearer")
    async with acp.opened(tmp_path, config, launcher=Elsewhere(), mcp_servers=(server,)) as session:
        answer = acp.text(await acp.turn(session, 'request fs/read_text_file {"path":"/etc/hostname"}'))
        assert json.loads(answer)["failed"]["code"] == -32601
        answer = acp.text(await acp.turn(session, 'request terminal/create {"command":"ls"}'))
        assert json.loads(answer)["failed"]["code"] == -32601
    capabilities = acp.received(log, "initialize")[0]["clientCapabilities"]
    assert capabilities["fs"] == {"readTextFile": False, "writeTextFile": False}
    assert capabilities["terminal"] is False
    (given,) = acp.received(log, "session/new")[0]["mcpServers"]
    assert given["command"] == "python3"
    assert given["args"][:3] == ["-I", "-S", "-c"]
    assert "canary" not in json.dumps(given["args"])


@pytest.mark.asyncio
async def test_commands_announced_before_the_session_are_not_lost(tmp_path: Path) -> None:
    """Known agents' habit: available_commands_update can come before the answer to session/new."""
    early = [{"sessionUpdate": "available_commands_update", "availableCommands": [{"name": "compact"}]}]
    async with acp.opened(tmp_path, {"early": early}) as session:
        events = await acp.until(session, Notice)
        assert events == [SessionStarted("s-1"), Notice("agent.commands", "/compact")]
        assert session.commands == ("compact",)


# ------------------------------------------------------------------ sign-in


KEY = {
    "type": "env_var",
    "id": "key",
    "name": "Key",
    "vars": [{"name": "AGENT_KEY"}, {"name": "AGENT_EXTRA", "optional": True}],
}
BROWSER = {"id": "browser", "name": "Log in with a browser"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "env"),
    [
        (KEY, {"AGENT_KEY": "canary-key"}),
        ({"id": "gemini-api-key", "name": "Gemini"}, {"GEMINI_API_KEY": "canary-key"}),
        ({"id": "openai", "_meta": {"type": "terminal"}}, {"OPENAI_API_KEY": "canary-key"}),
    ],
    ids=["env_var", "gemini", "qwen"],
)
async def test_a_key_in_the_environment_signs_in_once(tmp_path: Path, method: dict[str, Any], env: dict[str, str]) -> None:
    """Our rule: -32000 is answered with a sign-in that needs nothing but variables that are there, then tried once more."""
    log = tmp_path / "log"
    config = {"auth": "required", "auth_methods": [BROWSER, method], "log": str(log)}
    async with acp.opened(tmp_path, config, env=env) as session:
        assert session.session_id == "s-1"
    assert acp.received(log, "authenticate") == [{"methodId": method["id"]}]
    assert len(acp.received(log, "session/new")) == 2
    assert "canary" not in log.read_text()


@pytest.mark.asyncio
@pytest.mark.parametrize("auth", ["required", "broken", "useless"])
async def test_without_a_key_people_are_told_what_to_run_and_no_browser_opens(tmp_path: Path, auth: str) -> None:
    """Our rule: never a browser login from a headless host; say the command and the machine instead."""
    log = tmp_path / "log"
    config = {"auth": auth, "auth_methods": [BROWSER, KEY], "log": str(log), "name": "opencode"}
    env = {} if auth == "required" else {"AGENT_KEY": "canary-key"}
    with pytest.raises(SessionUnavailable) as caught:
        async with acp.opened(tmp_path, config, env=env):
            pytest.fail("it opened")
    assert caught.value.code == "coding.agent_login_required"
    label = f"{getpass.getuser()}@{socket.gethostname()}"
    assert caught.value.params == {"command": "opencode auth login", "machine": label}
    assert f"({label})" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert "opencode auth login" in str(caught.value)
    assert len(acp.received(log, "authenticate")) == (0 if auth == "required" else 1)


# ------------------------------------------------------------------ resume and load


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, "session/resume"),
        ({"resume": "replay"}, "session/resume"),
        ({"without": ["resume"]}, "session/load"),
        ({"resume": [-32601, "Method not found", None]}, "session/load"),
        ({"resume": [-32602, "Invalid params", None]}, "session/load"),
    ],
    ids=["resume", "resume-that-replays", "load", "lying-resume", "odd-resume"],
)
async def test_an_earlier_session_is_reopened_without_its_history_in_the_chat(
    tmp_path: Path, config: dict[str, Any], method: str
) -> None:
    """Protocol v1 prefers resume; Qwen 0.15 advertises it and answers -32601; fast-agent replays on it too."""
    session_id, whole = await stored(tmp_path, **config)
    async with acp.opened(tmp_path, whole, resume_session_id=session_id, system_prompt="once") as session:
        assert await started(session) == SessionStarted(session_id, resumed=True)
        assert session.session_id == session_id
        events = await acp.turn(session, "blocks")
        (block,) = json.loads(acp.text(events))
        assert block["text"] == "blocks", "the preamble is not repeated in a resumed session"
        assert [type(event) for event in events if not isinstance(event, TextDelta)] == [type(acp.ended(events))]
    assert len(acp.received(tmp_path / "log", method)) == 1
    assert acp.received(tmp_path / "log", "session/new") == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [
        {"load": [-32002, "Resource not found", None]},
        {"load": [-32001, "gone", None]},
        {"load": [-32603, "Internal error", {"message": "no rollout found for thread id 7"}]},
        {"load": [-32603, "Internal error", {"details": 'Invalid session identifier "7".\n  Searched'}]},
        {"load": [-32603, "Internal error", {"details": "No previous sessions found for this project."}]},
        {"load": [-32603, "Internal error: OpenCode service failure", {"service": "session"}], "listed": False},
        {"without": ["resume", "load"]},
    ],
    ids=["claude", "other", "codex", "gemini", "gemini-none", "opencode", "cannot-reopen"],
)
async def test_a_proven_loss_starts_fresh_and_says_so(tmp_path: Path, config: dict[str, Any]) -> None:
    """Known agents' ways to say that a session does not exist; where none is said, the agent's own complete list proves it."""
    session_id, whole = await stored(tmp_path, **{"without": ["resume"], **config})
    whole["first_session"] = "fresh"
    async with acp.opened(tmp_path, whole, resume_session_id=session_id) as session:
        assert await started(session) == SessionStarted("fresh", lost_history=True)
    with pytest.raises(SessionUnavailable) as caught:
        async with acp.opened(tmp_path, whole, resume_session_id=session_id, create_if_missing=False):
            pytest.fail("it opened")
    assert caught.value.code == "coding.session_missing"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [
        {"load": [-32603, "Internal error: OpenCode service failure", {"service": "session"}]},
        {"load": [-32603, "Internal error", None], "without": ["resume", "list"]},
        {"load": [-32602, "Invalid params", None]},
        {"load": [-32099, "busy", None]},
    ],
    ids=["listed", "no-list", "params", "busy"],
)
async def test_a_failure_that_proves_nothing_keeps_the_session(tmp_path: Path, config: dict[str, Any]) -> None:
    """Our rule: never start blank on a generic failure; the stored id stays with the caller."""
    session_id, whole = await stored(tmp_path, **{"without": ["resume"], **config})
    with pytest.raises(SessionUnavailable) as caught:
        async with acp.opened(tmp_path, whole, resume_session_id=session_id):
            pytest.fail("it opened")
    assert caught.value.code == "coding.session_unavailable"
    assert acp.received(tmp_path / "log", "session/new") == []


@pytest.mark.asyncio
async def test_a_load_without_any_history_has_lost_it(tmp_path: Path) -> None:
    """Known agent's habit: Qwen 0.15 "loads" an unknown session as an empty one."""
    config = {"load": "empty", "without": ["resume"]}
    async with acp.opened(tmp_path, config, resume_session_id="unknown", system_prompt="again") as session:
        assert await started(session) == SessionStarted("unknown", lost_history=True)
        assert "again" in acp.text(await acp.turn(session, "blocks"))
    with pytest.raises(SessionUnavailable) as caught:
        async with acp.opened(tmp_path, config, resume_session_id="unknown", create_if_missing=False):
            pytest.fail("it opened")
    assert caught.value.code == "coding.session_missing"


@pytest.mark.asyncio
async def test_an_agent_that_destroys_quickly_reloaded_sessions_is_given_its_minute(tmp_path: Path) -> None:
    """Known agent's defect: Gemini CLI destroys a session that is loaded within the minute of its last opening."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    driver = AcpDriver(sleep=sleep)
    for name, expected in (("gemini-cli", True), ("scripted-agent", False)):
        waited.clear()
        state = tmp_path / name
        state.mkdir()
        config = {"name": name, "state": str(state), "without": ["resume"]}
        async with acp.opened(tmp_path, config, driver=driver) as session:
            opened = time.monotonic()
            await acp.turn(session, "say a")
        closed = time.monotonic()
        async with acp.opened(tmp_path, config, driver=driver, resume_session_id="s-1") as session:
            assert (await started(session)).resumed
        assert bool(waited) is expected
        assert all(limits.ACP_RELOAD_PAUSE - 60 < seconds <= limits.ACP_RELOAD_PAUSE - (closed - opened) for seconds in waited)


def test_only_the_opened_session_is_waited_for_and_its_id_is_not_kept() -> None:
    """Our rule: the driver remembers digests for a minute, nothing else of anybody."""
    opened = RecentlyOpened()
    opened.add("machine", "canary-session")
    assert opened.wait_seconds("machine", "canary-session") > 0
    assert opened.wait_seconds("machine", "other") == 0
    assert opened.wait_seconds("other", "canary-session") == 0
    assert "canary" not in repr(vars(opened))


# ------------------------------------------------------------------ tool servers


@pytest.mark.asyncio
async def test_http_servers_go_to_agents_that_take_them_with_their_headers(tmp_path: Path) -> None:
    """Protocol v1: http servers carry a type, stdio servers none; sse only where it is offered."""
    log = tmp_path / "log"
    servers = (
        acp.http_server(),
        McpServer("local", "stdio", command=("/bin/tool", "--x"), env={"A": "b"}),
        McpServer("old", "sse", url="http://127.0.0.1:1/sse"),
    )
    async with acp.opened(tmp_path, {"log": str(log)}, mcp_servers=servers) as session:
        events = await acp.until(session, Notice)
        assert events[-1] == Notice("coding.mcp_servers_refused", level="warning", params={"names": "old"})
    assert acp.received(log, "session/new")[0]["mcpServers"] == [
        {
            "type": "http",
            "name": "langbot",
            "url": "http://127.0.0.1:1/mcp",
            "headers": [{"name": "Authorization", "value": "Bearer canary-bearer"}],
        },
        {"name": "local", "command": "/bin/tool", "args": ["--x"], "env": [{"name": "A", "value": "b"}]},
    ]


@pytest.mark.asyncio
async def test_servers_rejected_on_load_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """Known agent's habit: Devin CLI rejects a load with tool servers; the session matters more."""
    session_id, config = await stored(tmp_path, without=["resume"], reject_mcp="load")
    servers = (acp.http_server(),)
    async with acp.opened(tmp_path, config, resume_session_id=session_id, mcp_servers=servers) as session:
        events = await acp.until(session, Notice)
        assert events == [
            SessionStarted(session_id, resumed=True),
            Notice("coding.mcp_servers_refused", level="warning", params={"names": "langbot"}),
        ]
    loads = acp.received(tmp_path / "log", "session/load")
    assert [len(params["mcpServers"]) for params in loads] == [1, 0]


async def _serve(bodies: list[tuple[dict[str, str], Any]]) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in head[1:] if row)}
        message = json.loads(await reader.readexactly(int(headers["content-length"])))
        bodies.append((headers, message))
        kind = "application/json"
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": {"echo": message.get("method")}})
        if message.get("method") == "tools/list":
            kind, body = "text/event-stream", f"event: message\r\ndata: {body}\r\n\r\n"
        status = "200 OK" if "id" in message else "202 Accepted"
        data = body.encode() if "id" in message else b""
        if message.get("method") == "broken":
            status, data = "500 Broken", b"canary"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nMcp-Session-Id: m-1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


@pytest.mark.asyncio
async def test_an_agent_without_http_reaches_the_server_through_a_stdio_one(tmp_path: Path) -> None:
    """Our rule: every agent takes stdio servers; the forwarder carries address and bearer in its environment only."""
    log = tmp_path / "log"
    bodies: list[tuple[dict[str, str], Any]] = []
    async for url in _serve(bodies):
        servers = (acp.http_server(url=url, bearer="canary-bearer"),)
        async with acp.opened(tmp_path, {"log": str(log), "without": ["http"]}, mcp_servers=servers):
            pass
        (given,) = acp.received(log, "session/new")[0]["mcpServers"]
        assert "type" not in given
        assert "canary" not in json.dumps([given["command"], given["args"]])
        process = await asyncio.create_subprocess_exec(
            given["command"],
            *given["args"],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={item["name"]: item["value"] for item in given["env"]},
        )
        asked = [
            {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": "two", "method": "tools/list"},
            {"jsonrpc": "2.0", "id": 3, "method": "broken"},
        ]
        text = "".join(json.dumps(message) + "\n" for message in asked) + "not json\n\n"
        out, _ = await process.communicate(text.encode())
        answers = {str(message["id"]): message for message in map(json.loads, out.splitlines())}
        assert process.returncode == 0
        assert answers["1"]["result"] == {"echo": "initialize"}
        assert answers["two"]["result"] == {"echo": "tools/list"}
        assert answers["3"]["error"]["code"] == -32603
        assert answers["None"]["error"]["code"] == -32700
        assert b"canary" not in out
        assert {headers["authorization"] for headers, _ in bodies} == {"Bearer canary-bearer"}
        assert bodies[1][0]["mcp-session-id"] == "m-1"


# ------------------------------------------------------------------ settings


def select(option: str, category: str, current: str, *values: str) -> dict[str, Any]:
    listed = [{"value": value, "name": value.title()} for value in values]
    return {"id": option, "name": option, "category": category, "type": "select", "currentValue": current, "options": listed}


MODES = {"currentModeId": "auto", "availableModes": [{"id": "auto"}, {"id": "default"}, {"id": "plan"}]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("new", "fields", "expected"),
    [
        (
            {"configOptions": [select("m", "mode", "auto", "auto", "default")], "modes": MODES},
            {},
            [("session/set_config_option", {"configId": "m", "value": "default"})],
        ),
        ({"modes": MODES}, {}, [("session/set_mode", {"modeId": "default"})]),
        ({"modes": MODES}, {"policy": "allow-all"}, [("session/set_mode", {"modeId": "default"})]),
        (
            {"configOptions": [select("mode", "mode", "auto", "read-only", "auto", "full-access")]},
            {"policy": "deny", "name": "codex-acp"},
            [("session/set_config_option", {"configId": "mode", "value": "read-only"})],
        ),
        (
            {"configOptions": [select("mode", "mode", "agent", "read-only", "agent", "workspace-write")]},
            {"name": "@agentclientprotocol/codex-acp"},
            [("session/set_config_option", {"configId": "mode", "value": "read-only"})],
        ),
        (
            {"configOptions": [select("mode", "mode", "build", "build", "read-only")]},
            {},
            [],
        ),
        ({"modes": MODES}, {"options": {"mode": "plan"}}, [("session/set_mode", {"modeId": "plan"})]),
        ({"modes": MODES}, {"policy": "plan"}, [("session/set_mode", {"modeId": "plan"})]),
        ({"configOptions": [select("mode", "mode", "build", "build", "plan")]}, {}, []),
        ({}, {}, []),
        (
            {
                "configOptions": [
                    select("x", "model", "a", "a", "b"),
                    {"id": "fast", "type": "boolean", "currentValue": False},
                    {**select("e", "thought_level", "low"), "options": [{"group": "g", "options": [{"value": "high"}]}]},
                ]
            },
            {"options": {"model": "B", "config": {"fast": True, "e": "high"}}},
            [
                ("session/set_config_option", {"configId": "x", "value": "b"}),
                ("session/set_config_option", {"configId": "fast", "value": True, "type": "boolean"}),
                ("session/set_config_option", {"configId": "e", "value": "high"}),
            ],
        ),
        (
            {"models": {"availableModels": [{"modelId": "gemini-x", "name": "X"}]}},
            {"options": {"model": "X"}},
            [("session/set_model", {"modelId": "gemini-x"})],
        ),
    ],
    ids=[
        "claude-options",
        "qwen-modes",
        "allow-all",
        "codex",
        "codex-new",
        "read-only-elsewhere",
        "chosen",
        "vendor-policy",
        "opencode",
        "none",
        "options",
        "gemini",
    ],
)
async def test_settings_are_made_explicitly_and_the_asking_mode_last(
    tmp_path: Path, new: dict[str, Any], fields: dict[str, Any], expected: list[tuple[str, dict[str, Any]]]
) -> None:
    """Known agents' habit: Claude Agent 0.101, Qwen 0.24 and codex-acp start in modes that ask nobody; options win."""
    log = tmp_path / "log"
    config = {"new": new, "log": str(log), "name": fields.pop("name", "scripted-agent")}
    async with acp.opened(tmp_path, config, **fields):
        pass
    methods = {"session/set_mode", "session/set_model", "session/set_config_option"}
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    made = [(call["method"], call["params"]) for call in calls if call.get("method") in methods]
    assert made == [(method, {"sessionId": "s-1", **params}) for method, params in expected]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("new", "fields", "code"),
    [
        ({"modes": MODES}, {"options": {"mode": "nosuch"}}, "coding.agent_setting_unknown"),
        ({}, {"policy": "yolo"}, "coding.agent_setting_unknown"),
        ({}, {"options": {"model": "m"}}, "coding.agent_setting_unknown"),
        ({"configOptions": [select("x", "model", "a", "a")]}, {"options": {"model": "m"}}, "coding.agent_setting_unknown"),
        ({}, {"options": {"config": {"x": 1}}}, "coding.agent_setting_unknown"),
        (
            {"configOptions": [{"id": "fast", "type": "boolean"}]},
            {"options": {"config": {"fast": "yes"}}},
            "coding.agent_setting_unknown",
        ),
        ({"modes": MODES}, {}, "coding.agent_setting_refused"),
    ],
)
async def test_a_setting_that_cannot_be_made_fails_the_opening(
    tmp_path: Path, new: dict[str, Any], fields: dict[str, Any], code: str
) -> None:
    """Our rule: nobody works in another mode or with another model than was asked for."""
    config = {"new": new, "setting_error": [-32603, "Internal error", {"details": "no"}]}
    with pytest.raises(CodingError) as caught:
        async with acp.opened(tmp_path, config, **fields):
            pytest.fail("it opened")
    assert caught.value.code == code


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "asks"),
    [
        *(({"policy": policy}, True) for policy in ("ask", "allow-edits", "allow-all", "deny")),
        ({"policy": "plan"}, False),
        ({"env": {"OPENCODE_PERMISSION": "own"}}, False),
    ],
)
async def test_agents_that_are_told_to_ask_by_their_environment_are_told(
    tmp_path: Path, fields: dict[str, Any], asks: bool
) -> None:
    """Known agent's habit: OpenCode has no asking mode and acts unasked; the form's own variables stay as they are."""
    async with acp.opened(tmp_path, {"new": {"modes": MODES}}, **fields) as session:
        answer = acp.text(await acp.turn(session, "environ OPENCODE_PERMISSION"))
    told = json.loads(answer) if asks else None
    if told is None:
        assert answer == fields.get("env", {}).get("OPENCODE_PERMISSION", "")
    else:
        assert (told["*"], told["bash"], told["edit"], told["grep"]) == ("ask", "ask", "ask", "allow")
        assert told["task"] == "deny"  # what its own agents ask never reaches a client (1.18), so they would wait for ever


def test_what_agents_are_told_by_their_environment_is_laid_below_the_form_s() -> None:
    """Our rule: git gets one setting more and keeps those it has; a workspace's instructions are named where it is known."""
    given = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "a.b", "GIT_CONFIG_VALUE_0": "c", "CLAUDE_CODE_DISABLE_CRON": ""}
    told = presets.asking_environment("/w", given)
    assert told.items() >= {"GIT_CONFIG_KEY_0": "a.b", "GIT_CONFIG_VALUE_0": "c", "CLAUDE_CODE_DISABLE_CRON": ""}.items()
    assert (told["GIT_CONFIG_COUNT"], told["GIT_CONFIG_KEY_1"], told["GIT_CONFIG_VALUE_1"]) == ("2", "core.fsmonitor", "false")
    assert json.loads(told["OPENCODE_CONFIG_CONTENT"]) == {"instructions": ["/w/AGENTS.md", "/w/CLAUDE.md"]}
    for cwd in ("", "~", "relative"):
        assert "OPENCODE_CONFIG_CONTENT" not in presets.asking_environment(cwd, {})
    broken = presets.asking_environment("/w", {"GIT_CONFIG_COUNT": "x"})
    assert broken["GIT_CONFIG_COUNT"] == "x" and "GIT_CONFIG_KEY_0" not in broken


@pytest.mark.asyncio
async def test_an_agent_without_an_asking_mode_is_named(tmp_path: Path) -> None:
    """Our rule: where the agent acts without asking and cannot be told to ask, people are told."""
    new = {"modes": {"currentModeId": "yolo", "availableModes": [{"id": "yolo"}, {"id": "turbo"}]}}
    async with acp.opened(tmp_path, {"new": new}) as session:
        events = await acp.until(session, Notice)
        assert events[-1] == Notice("coding.agent_mode_unasking", level="warning", params={"mode": "yolo"})
