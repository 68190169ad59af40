"""Claude Code for :mod:`benches.programs`: how it is driven bare, and its model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from benches.programs import Program, ended, phases_of
from testkit.anthropic_fixture import anthropic_fixture
from tooling import agents

_FIRST: Final = b'"text_delta","text":"first'


class BareClaude:
    """The program with the arguments we give it and the least that can stand on the other side; every call blocks."""

    def __init__(self, program: Path, workspace: Path, env: Mapping[str, str]) -> None:
        """Start the program."""
        flags = ["-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
        flags += ["--include-partial-messages", "--permission-prompt-tool", "stdio", "--system-prompt-snapshot", "off"]
        flags += ["--setting-sources", "user", "--strict-mcp-config", f"--session-id={uuid.uuid4()}"]
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(program), *flags], cwd=workspace, env={**env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def turn(self, text: str) -> float:
        """The time at which the first text of the answer is there; returns when the program is idle again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        message = {"type": "user", "message": {"role": "user", "content": text}, "client_composed": True}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        first, tail = 0.0, b""
        while True:
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the program has ended")
            tail = tail[-4096:] + data
            if not first and _FIRST in tail.replace(b" ", b""):
                first = time.perf_counter()
            if b'"type":"result"' in tail.replace(b" ", b""):
                return first

    def close(self) -> None:
        """End the program."""
        ended(self._process)


@contextlib.asynccontextmanager
async def _model(home: Path) -> AsyncIterator[Mapping[str, str]]:
    async with anthropic_fixture() as fixture:
        yield fixture.environment()


PROGRAM: Final = Program("ClaudeCodeAgent", agents.CLAUDE_CODE, agents.claude_code, _model, BareClaude)
PHASES: Final = phases_of(PROGRAM)
