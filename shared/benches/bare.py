"""An ACP agent driven bare over its pipe: what its own speed is, with the least that can stand on the other side."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TEXT = b'"agent_message_chunk"'


class BareAgent:
    """One agent process and one session on it; every call blocks."""

    def __init__(self, command: Sequence[str], workspace: Path) -> None:
        """Start the agent and open a session."""
        self._process = subprocess.Popen(command, cwd=workspace, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout.fileno()
        self._count = 0
        self._call("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        self._session = self._call("session/new", {"cwd": str(workspace), "mcpServers": []})["sessionId"]

    def _send(self, method: str, params: dict[str, Any]) -> bytes:
        """The beginning of the line that will answer."""
        self._count += 1
        message = {"jsonrpc": "2.0", "id": self._count, "method": method, "params": params}
        self._stdin.write(json.dumps(message).encode() + b"\n")
        return f'{{"jsonrpc": "2.0", "id": {self._count}, '.encode()

    def _read(self) -> bytes:
        data = os.read(self._stdout, 65536)
        if not data:
            raise RuntimeError("the agent has ended")
        return data

    def _call(self, method: str, params: dict[str, Any]) -> Any:
        answer = self._send(method, params)
        data = b""
        while not (data.endswith(b"\n") and answer in data):
            data += self._read()
        return json.loads(data[data.index(answer) :])["result"]

    def turn(self, script: str) -> tuple[float, float]:
        """Seconds from the prompt to the first text, and to the end of the turn; the text itself is not looked at."""
        began = time.perf_counter()
        answer = self._send("session/prompt", {"sessionId": self._session, "prompt": [{"type": "text", "text": script}]})
        first = 0.0
        tail = b""
        while True:
            tail = tail[-256:] + self._read()
            if not first and _TEXT in tail:
                first = time.perf_counter() - began
            if answer in tail:
                return first, time.perf_counter() - began

    def close(self) -> None:
        """End the agent by closing its input, and by force when that is not enough."""
        self._stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
