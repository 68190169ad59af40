"""Files that a prompt brought, put where the agent can read them and removed with the session.

On this machine they are written race-free below the workspace; elsewhere the app-server writes them in its place. A
``.gitignore`` beside them keeps them out of commits.
"""

from __future__ import annotations

import base64
import contextlib
import posixpath
from typing import Final

from agent.peer import RpcError
from agent.prompts import FOLDER
from agent.server import AppServer
from pkg import limits
from pkg.errors import CodingError
from pkg.workspace_files import FileRefused, WorkspaceFiles

_IGNORE: Final = (".langbot", ".gitignore")
_IGNORE_ALL: Final = b"*\n"


class SessionFiles:
    """The attachments of one session."""

    def __init__(self, server: AppServer, directory: str, *, local: bool) -> None:
        """``directory`` is the workspace, absolute in its place."""
        self.directory = directory
        self._server = server
        self._here = WorkspaceFiles(directory) if local else None
        self._made: list[tuple[str, ...]] = []

    async def write(self, name: str, data: bytes) -> str:
        """The path of a new file of this name, ``""`` where it cannot be written."""
        parts = (*FOLDER, name)
        path = ""
        with contextlib.suppress(FileRefused, RpcError, CodingError, TimeoutError):
            if self._here is not None:
                self._here.write(_IGNORE, _IGNORE_ALL)
                path = self._here.write(parts, data)
            else:
                path = await self._write_there(parts, data)
            self._made.append(parts)
        return path

    async def _write_there(self, parts: tuple[str, ...], data: bytes) -> str:
        folder = posixpath.join(self.directory, *parts[:-1])
        await self._call("fs/createDirectory", {"path": folder, "recursive": True})
        for name, content in ((_IGNORE, _IGNORE_ALL), (parts, data)):
            path = posixpath.join(self.directory, *name)
            await self._call("fs/writeFile", {"path": path, "dataBase64": base64.b64encode(content).decode("ascii")})
        return posixpath.join(self.directory, *parts)

    async def remove_elsewhere(self) -> None:
        """Remove what lies on another machine, while its app-server still lives."""
        if self._here is not None or not self._server.peer.alive:
            return
        with contextlib.suppress(CodingError, TimeoutError):
            for parts in self._made:
                with contextlib.suppress(RpcError):
                    await self._call("fs/remove", {"path": posixpath.join(self.directory, *parts)})
        self._made.clear()

    async def remove(self) -> None:
        """Remove what lies on this machine."""
        for parts in self._made:
            if self._here is not None:
                self._here.remove(parts)
        self._made.clear()

    async def _call(self, method: str, params: dict[str, object]) -> None:
        await self._server.peer.call(method, params, limits.CODEX_FILE_SECONDS)
