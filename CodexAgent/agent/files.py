"""Files that a prompt brought, put where the agent can read them and removed with the session.

On this machine they are written race-free below the workspace; elsewhere the app-server writes them in its place, where no
link that lies in the workspace leads out of it. A ``.gitignore`` beside them keeps them out of commits.
"""

from __future__ import annotations

import base64
import contextlib
import posixpath
from typing import Any, Final

from agent.peer import RpcError
from agent.prompts import FOLDER
from agent.server import AppServer
from pkg import limits
from pkg.errors import CodingError
from pkg.lenient import as_dict
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
        path = self.directory
        for folder in parts[:-1]:
            path = posixpath.join(path, folder)
            await self._directory(path)
            if folder == _IGNORE[0]:
                await self._ignored(path)
        path = posixpath.join(path, parts[-1])
        await self._put(path, data)
        return path

    async def _directory(self, path: str) -> None:
        """A directory of the workspace's own: the app-server writes outside of its sandbox, and would follow a link."""
        await self._made_there(path)
        found = await self._call("fs/getMetadata", {"path": path})
        if found.get("isSymlink") is not False or found.get("isDirectory") is not True:
            raise FileRefused("no directory of the workspace")

    async def _ignored(self, folder: str) -> None:
        path = posixpath.join(folder, _IGNORE[-1])
        # Whatever has the name stays as it is: a link's target would be overwritten. Only making a directory tells of a link
        # that leads nowhere (Codex 0.171 neither lists nor describes one).
        if await self._made_there(path):
            await self._call("fs/remove", {"path": path})
            await self._put(path, _IGNORE_ALL)

    async def _made_there(self, path: str) -> bool:
        """Whether a directory could be made, which it can't where anything has the name."""
        with contextlib.suppress(RpcError):
            await self._call("fs/createDirectory", {"path": path, "recursive": False})
            return True
        return False

    async def _put(self, path: str, data: bytes) -> None:
        await self._call("fs/writeFile", {"path": path, "dataBase64": base64.b64encode(data).decode("ascii")})

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

    async def _call(self, method: str, params: dict[str, object]) -> dict[str, Any]:
        return as_dict(await self._server.peer.call(method, params, limits.CODEX_FILE_SECONDS))
