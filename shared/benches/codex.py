"""Codex for :mod:`benches.programs`: how its app-server is driven bare, and its model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from benches.programs import Program, ended, phases_of
from testkit.responses_fixture import codex_home, responses_fixture
from tooling import agents


class BareCodex:
    """The app-server as we start it and the least that can stand on the other side; every call blocks."""

    def __init__(self, program: Path, workspace: Path, env: Mapping[str, str]) -> None:
        """Start the program and a thread."""
        flags = ["-c", "features.instant_interrupt=false", "-c", "features.unbounded_connection_retries=false"]
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(program), *flags, "app-server"],
            cwd=workspace,
            env={**env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._count = 0
        info = {"name": "bench", "title": "bench", "version": "1"}
        self._call("initialize", {"clientInfo": info, "capabilities": {"experimentalApi": True}})
        self._send({"method": "initialized"})
        # What hides the account's keys costs about 0.1 s of every turn in Codex (0.171) itself, which is not ours to measure.
        hiding = {"extends": ":workspace", "filesystem": {f"{env['CODEX_HOME']}/auth.json": "deny"}}
        config = {"permissions": {"bench": hiding}}
        started = self._call(
            "thread/start",
            {"cwd": str(workspace), "approvalPolicy": "untrusted", "permissions": "bench", "config": config},
        )
        self._thread = started["thread"]["id"]

    def turn(self, text: str) -> float:
        """The time at which the first text of the answer is there; returns when the turn is over."""
        self._count += 1
        params = {"threadId": self._thread, "input": [{"type": "text", "text": text}]}
        self._send({"id": self._count, "method": "turn/start", "params": params})
        first = 0.0
        while True:
            message = self._read()
            if not first and message.get("method") == "item/agentMessage/delta":
                first = time.perf_counter()
            if message.get("method") == "turn/completed":
                return first

    def close(self) -> None:
        """End the program."""
        ended(self._process)

    def _call(self, method: str, params: Any) -> Any:
        self._count += 1
        self._send({"id": self._count, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self._count and "method" not in message:
                return message["result"]

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the program has ended")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.asynccontextmanager
async def _model(home: Path) -> AsyncIterator[Mapping[str, str]]:
    async with responses_fixture() as fixture:
        yield codex_home(home, fixture.url)


PROGRAM: Final = Program("CodexAgent", agents.CODEX, agents.codex, _model, BareCodex)
PHASES: Final = phases_of(PROGRAM)
