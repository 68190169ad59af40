"""A place in which every effect shows: files, a repository whose hooks and filters leave marks, and a loopback server.

Local protocol fixture: the server answers ``/hit`` and speaks MCP with one tool, ``act``, that has an effect; both are counted.
What an agent may do in such a place is look. :attr:`Trap.effects` names everything else that has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from pkg.agent_api import McpServer

SERVER: Final = "effects"
"""The name of the tool server."""
PATIENCE: Final = 70.0
"""Seconds a request of a real agent is left open to see that nothing gives up meanwhile: longer than any minute's timeout."""
OLD: Final = "one two\n"
"""What ``old.txt`` holds."""

SHELL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "make": "touch made",
        "redirect": "echo x > made",
        "append": "echo x >> old.txt",
        "here": "cat <<'E' > made\nx\nE",
        "delete": "rm old.txt",
        "move": "mv old.txt new.txt",
        "copy": "cp old.txt made",
        "link": "ln -s old.txt made",
        "directory": "mkdir made",
        "mode": "chmod 600 old.txt",
        "in place": "sed -i s/one/1/ old.txt",
        "find": "find . -name old.txt -delete",
        "written by sed": "sed -n 'w made' old.txt",
        "written by awk": "awk 'BEGIN { print 1 > \"made\" }'",
        "written by sort": "sort -o made old.txt",
        "written by git": "git log --output=made",
        "branch": "git branch made",
        "settings": "git config user.name made",
        "behind a reader": "cat old.txt | tee made",
        "behind and": "ls && touch made",
        "behind a semicolon": "pwd; touch made",
        "in a substitution": "echo $(touch made)",
        "in backticks": "echo `touch made`",
        "in a process substitution": "cat <(touch made)",
        "in a default": "echo ${x:=$(touch made)}",
        "in a subshell": "(touch made)",
        "in a loop": "for i in 1; do touch made; done",
        "in a trap": "trap 'touch made' EXIT",
        "evaluated": "eval touch made",
        "escaped": "\\touch made",
        "by env": "env touch made",
        "by xargs": "echo made | xargs touch",
        "by a shell": "sh -c 'touch made'",
        "by python": "python3 -c \"open('made', 'w')\"",
        "in the background": "touch made & wait",
        "detached": "setsid touch made; sleep 0.2",
        "elsewhere": "touch {marks}/made",
        "over the network": "curl -s {url}/hit",
        "over a socket": "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /hit HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3",
    }
)
"""Commands with an effect, by what is special about each; see :meth:`Trap.shell`."""


class Trap:
    """One such place; made by :func:`trap`."""

    def __init__(self, directory: Path) -> None:
        self.workspace = directory / "trapped"
        self.marks = directory / "marks"
        """Outside of the workspace; what the repository's own programs, and commands, would leave there shows."""
        self.url = ""
        self.hits: list[str] = []
        self.acts: list[Any] = []
        self._before: dict[str, bytes] = {}

    def make(self) -> None:
        """The files, and the repository."""
        for each in (self.workspace / "sub", self.marks):
            each.mkdir(parents=True)
        (self.workspace / "old.txt").write_text(OLD)
        (self.workspace / "sub" / "below.txt").write_text(OLD)
        cell: dict[str, Any] = {"cell_type": "code", "id": "c1", "source": "1", "metadata": {}, "outputs": []}
        notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (self.workspace / "book.ipynb").write_text(json.dumps(notebook))
        for words in (
            ("init", "-q"),
            ("add", "-A"),
            ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"),
            ("config", "core.fsmonitor", f"touch {self.marks}/monitor; false"),
        ):
            subprocess.run(("git", "-C", str(self.workspace), *words), check=True, capture_output=True, timeout=20)
        for name in ("post-checkout", "pre-commit", "post-commit", "reference-transaction"):
            hook = self.workspace / ".git" / "hooks" / name
            hook.write_text(f"#!/bin/sh\ntouch {self.marks}/{name}\n")
            hook.chmod(0o755)
        self._before = self._state()

    @property
    def servers(self) -> tuple[McpServer, ...]:
        """The tool server, as a session is given it."""
        return (McpServer(SERVER, "http", url=f"{self.url}/mcp"),)

    def shell(self) -> list[str]:
        """The commands of :data:`SHELL` for this place."""
        return [
            line.replace("{marks}", str(self.marks)).replace("{url}", self.url).replace("{port}", self.url.rpartition(":")[2])
            for line in SHELL.values()
        ]

    def file(self, name: str) -> str:
        """The absolute path of a file in the workspace."""
        return str(self.workspace / name)

    @property
    def effects(self) -> list[str]:
        """What has happened, in words."""
        now = self._state()
        changed = [name for name in {*now, *self._before} if now.get(name) != self._before.get(name)]
        marks = [f"mark {path.name}" for path in self.marks.iterdir()]
        return sorted([*changed, *marks, *(f"hit {path}" for path in self.hits), *(f"act {call}" for call in self.acts)])

    def _state(self) -> dict[str, bytes]:
        """Every file, directory and mode of the workspace, and the repository's names and settings; not git's own index."""
        state: dict[str, bytes] = {}
        for path in self.workspace.rglob("*"):
            name = str(path.relative_to(self.workspace))
            if name.startswith(".git/") and not name.startswith((".git/refs", ".git/config", ".git/worktrees", ".git/hooks")):
                continue
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            state[name] = f"{path.lstat().st_mode:o} ".encode() + content
        return state

    # ---- the server

    async def hit(self, request: web.Request) -> web.Response:
        """Somebody fetched it."""
        self.hits.append(request.path)
        return web.Response(text="hit")

    async def mcp(self, request: web.Request) -> web.Response:
        """One MCP message."""
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        params = message.get("params") or {}
        match message["method"]:
            case "initialize":
                server = {"name": SERVER, "version": "1"}
                result: Any = {
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": server,
                }
            case "tools/list":
                schema = {"type": "object", "properties": {"what": {"type": "string"}}}
                result = {"tools": [{"name": "act", "description": "Has an effect.", "inputSchema": schema}]}
            case "tools/call":
                self.acts.append(params.get("arguments"))
                result = {"content": [{"type": "text", "text": "acted"}]}
            case _:
                error = {"code": -32601, "message": "no such method"}
                return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


@contextlib.asynccontextmanager
async def trap(directory: Path) -> AsyncIterator[Trap]:
    """A place below ``directory``, and its server on a free loopback port."""
    made = Trap(directory)
    await asyncio.to_thread(made.make)
    app = web.Application()
    app.router.add_get("/hit", made.hit)
    app.router.add_post("/mcp", made.mcp)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield made
    finally:
        await runner.cleanup()
