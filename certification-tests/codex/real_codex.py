"""The real Codex on the loopback Responses server: sessions, and every message of ours checked against its own schema."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.driver import CodexDriver
from agent.session import CodexSession
from pkg.agent_api import McpServer, SessionSpec
from pkg.launch import AgentProcess, Command, Exit, LocalLauncher
from testkit.json_schema import problems, unknown_fields
from testkit.responses_fixture import ResponsesFixture, codex_home, responses_fixture

Message = dict[str, Any]


class _Recorded:
    """A process whose lines are kept, in both directions."""

    def __init__(self, process: AgentProcess, sent: list[Message], heard: list[Message]) -> None:
        self._process = process
        self._sent = sent
        self._heard = heard
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def directory(self) -> str:
        return self._process.directory

    async def write(self, data: bytes) -> None:
        self._sent += [json.loads(line) for line in data.splitlines()]
        await self._process.write(data)

    def close_stdin(self) -> None:
        self._process.close_stdin()

    async def read(self, size: int = 65536) -> bytes:
        data = await self._process.read(size)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._heard += [json.loads(line) for line in lines if line.startswith(b"{") and len(line) < 1_000_000]
        return data

    def stderr_tail(self) -> str:
        return self._process.stderr_tail()

    async def wait(self) -> Exit:
        return await self._process.wait()

    async def stop(self) -> None:
        await self._process.stop()


class RecordingLauncher(LocalLauncher):
    """Starts on this machine and keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.heard: list[Message] = []
        self.processes: list[AgentProcess] = []
        self.commands: list[Command] = []

    async def start(self, command: Command) -> AgentProcess:  # type: ignore[override] # its own kind of process
        self.commands.append(command)
        process = _Recorded(await super().start(command), self.sent, self.heard)
        self.processes.append(process)
        return process


@dataclass
class Codex:
    """An account, a workspace outside of any temporary directory, a model, and the real program."""

    program: Path
    place: Path
    model: ResponsesFixture
    launcher: RecordingLauncher = field(default_factory=RecordingLauncher)
    driver: CodexDriver = field(default_factory=CodexDriver)

    @property
    def workspace(self) -> Path:
        """Where the agent works."""
        return self.place / "workspace"

    def environment(self, home: str = "home", url: str = "", **fields: Any) -> dict[str, str]:
        """The environment of an account; ``fields`` are those of :func:`testkit.responses_fixture.codex_home`."""
        return codex_home(self.place / home, url or self.model.url, **fields)

    def spec(self, *, account: Mapping[str, Any] | None = None, **fields: Any) -> SessionSpec:
        """A session of the fixture's account; ``fields`` are those of :class:`pkg.agent_api.SessionSpec`."""
        env = {**self.environment(**(account or {})), **fields.pop("env", {})}
        fields.setdefault("command", (str(self.program),))
        fields.setdefault("cwd", str(self.workspace))
        return SessionSpec(env=env, **fields)

    @contextlib.asynccontextmanager
    async def session(self, **fields: Any) -> AsyncIterator[CodexSession]:
        """An open session, closed afterwards."""
        session = await self.driver.open(self.spec(**fields), self.launcher)
        try:
            yield session
        finally:
            await session.close()


@contextlib.asynccontextmanager
async def real_codex(program: Path) -> AsyncIterator[Codex]:
    """Everything for one test; at its end each message of ours is valid for the program's own schema."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="codex-test-") as place:
        async with responses_fixture() as model:
            codex = Codex(program, Path(place).resolve(), model)
            codex.workspace.mkdir()
            yield codex
    found = [*invalid(codex.launcher.sent, codex.launcher.heard, schemas(str(program)))]
    assert found == []


@functools.cache
def schemas(program: str) -> Mapping[str, Any]:
    """The schemas the program generates of itself, by file name without its ending."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="codex-schema-") as place:
        command = [program, "app-server", "generate-json-schema", "--experimental", "--out", place]
        env = {"CODEX_HOME": place, "HOME": place, "PATH": "/usr/bin:/bin"}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        return {path.stem: json.loads(path.read_text()) for path in Path(place).glob("*.json")}


ANSWERS = {
    "item/commandExecution/requestApproval": "CommandExecutionRequestApprovalResponse",
    "item/fileChange/requestApproval": "FileChangeRequestApprovalResponse",
    "mcpServer/elicitation/request": "McpServerElicitationRequestResponse",
    "item/tool/requestUserInput": "ToolRequestUserInputResponse",
    "item/tool/call": "DynamicToolCallResponse",
    "item/permissions/requestApproval": "PermissionsRequestApprovalResponse",
    "applyPatchApproval": "ApplyPatchApprovalResponse",
    "execCommandApproval": "ExecCommandApprovalResponse",
}
"""The schemas of what the server's requests are answered with."""


def invalid(sent: list[Message], heard: list[Message], generated: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with our messages: requests, notifications, and answers to the server's requests."""
    asked = {message["id"]: message["method"] for message in heard if "method" in message and "id" in message}
    requests, notifications = generated["ClientRequest"], generated["ClientNotification"]
    for message in sent:
        if "method" in message and "id" in message:
            schema = _of_method(requests, message["method"])
            yield from problems(message, schema, requests, message["method"])
            yield from unknown_fields(message, schema, requests, message["method"])
        elif "method" in message:
            yield from problems(message, notifications, notifications, message["method"])
        elif "result" in message:
            name = ANSWERS[asked[message["id"]]]
            yield from problems(message["result"], generated[name], generated[name], name)


def _of_method(requests: Mapping[str, Any], method: str) -> Any:
    for variant in requests["oneOf"]:
        if variant["properties"]["method"]["enum"] == [method]:
            return variant
    raise AssertionError(f"the program does not know {method}")


def http_server(name: str, url: str, bearer: str) -> McpServer:
    """A tool server with a bearer."""
    return McpServer(name, "http", url=url, headers={"Authorization": f"Bearer {bearer}"})
