"""The built package's worker behind the SDK's WebSocket instead of its stdio: everything else as in :mod:`testkit.sdk_worker`.

- ``dedicated``: ``lbp run`` in the extracted artifact, with a debug key, as a developer debugs a package;
- ``pool``: the worker that the runtime starts, with its registration capability, told to connect back. The SDK does so on
  Windows for dedicated workers; for the pool this is a stand-in of the launcher only.

The listener is the SDK's own, on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, cast

from langbot_plugin.entities.io.actions.enums import RuntimeToLangBotAction
from langbot_plugin.entities.io.context import ActionContext, InstallationBinding
from langbot_plugin.runtime.io.connection import Connection
from langbot_plugin.runtime.io.controller import Controller
from langbot_plugin.runtime.io.controllers.stdio.client import StdioClientController, stop_process
from langbot_plugin.runtime.io.controllers.ws.server import WebSocketServerController
from langbot_plugin.runtime.io.handlers.plugin import PluginConnectionHandler
from langbot_plugin.runtime.security import (
    PLUGIN_DEBUG_KEY_ENV,
    PLUGIN_DEBUG_KEY_HEADER,
    PLUGIN_REGISTRATION_CAPABILITY_ENV,
    PLUGIN_REGISTRATION_CAPABILITY_HEADER,
)

from testkit.host_actions import HostActions
from testkit.sdk_worker import READY_WITHIN, Core, SdkWorker, Shape

LOOPBACK: Final = "127.0.0.1"
Callback = Callable[[Connection], Coroutine[Any, Any, None]]


def quiet_port() -> int:
    """A port of 127.0.0.1 that is free, and that no outgoing connection gets meanwhile."""
    for port in random.SystemRandom().sample(range(18000, 32000), 200):
        with contextlib.closing(socket.socket()) as trial, contextlib.suppress(OSError):
            trial.bind((LOOPBACK, port))
            return port
    raise OSError("no free port of 127.0.0.1 below the ephemeral ones")


class _Listener:
    """The SDK's WebSocket server on a free port of 127.0.0.1, for whoever has one secret."""

    def __init__(self, header: str, secret: str, callback: Callback) -> None:
        self.port = quiet_port()
        server = WebSocketServerController(self.port, host=LOOPBACK, expected_headers={header: secret})
        self._task = asyncio.ensure_future(server.run(callback))

    async def opened(self) -> None:
        """Wait until it listens."""
        async with asyncio.timeout(READY_WITHIN):
            while True:
                if self._task.done():
                    await self._task
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(LOOPBACK, self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        await asyncio.wait({self._task})


class _ConnectingBack(Controller):
    """The process that a stdio controller would start, told to connect back over WebSocket."""

    def __init__(self, stdio: StdioClientController) -> None:
        self._stdio = stdio
        self.process: asyncio.subprocess.Process | None = None

    async def run(self, new_connection_callback: Callback) -> None:
        """Start the worker and serve its connection until that ends; as with stdio, in the task that calls this."""
        secret = self._stdio.env[PLUGIN_REGISTRATION_CAPABILITY_ENV]
        arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        served = asyncio.Event()

        async def connected(connection: Connection) -> None:
            if arrived.done():
                return
            arrived.set_result(connection)
            await served.wait()

        listener = _Listener(PLUGIN_REGISTRATION_CAPABILITY_HEADER, secret, connected)
        try:
            await listener.opened()
            self.process = await asyncio.create_subprocess_exec(
                self._stdio.command,
                *(argument for argument in self._stdio.args if argument not in ("-s", "--stdio")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={**self._stdio.env, "RUNTIME_WS_URL": f"ws://{LOOPBACK}:{listener.port}/plugin/ws"},
                cwd=self._stdio.working_dir,
            )
            ended = asyncio.ensure_future(self.process.wait())
            try:
                waiting: set[asyncio.Future[Any]] = {ended, arrived}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            if arrived.done():
                await new_connection_callback(arrived.result())
        finally:
            served.set()
            await self.close()
            await listener.close()

    async def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None and not await stop_process(process):
            raise RuntimeError("the worker did not exit after SIGKILL")


class _DebugCore(Core):
    """LangBot's side for a debugged package, which it makes an installation of when it registers."""

    async def call_action(
        self, action: Any, data: dict[str, Any], timeout: float = 15.0, action_context: Any = None, **more: Any
    ) -> dict[str, Any]:
        if action is RuntimeToLangBotAction.INITIALIZE_PLUGIN_SETTINGS:
            return {}
        if action_context.installation_uuid is None:
            action_context = action_context.for_installation(_DebugWorker.UID)
        return await super().call_action(action, data, timeout, action_context, **more)


class _DebugWorker(SdkWorker):
    """``lbp run`` in an extracted artifact."""

    UID: Final = "A"

    def __init__(self, package: Path, base: Path, *, name: str, environment: Mapping[str, str]) -> None:
        super().__init__(package, base, "dedicated", real_dependencies=False, name=name)
        self.core = _DebugCore()
        self._manager.context.control_handler = cast(Any, self.core)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._listener: _Listener | None = None

    async def install(
        self, uid: str = "A", config: Mapping[str, Any] | None = None, *, revision: int = 1
    ) -> InstallationBinding:
        """Start the package and wait until it serves; there is one installation."""
        assert uid == self.UID
        workspace = ActionContext(instance_uuid="inst", workspace_uuid=f"ws-{uid}")
        self.core.hosts[uid], self.core.configs[uid] = HostActions(), dict(config or {})
        artifact = self._manager.artifact_store.install_package(self._package, self._digest)
        context = self._manager.context
        key = context.workspace_debug_tokens.issue(workspace).token

        async def connected(connection: Connection) -> None:
            handler = PluginConnectionHandler(connection, context, debug_plugin=True)
            handler.debug_workspace_binding, handler.debug_auth_token = workspace, key
            await self._manager.add_plugin_handler(handler)

        self._listener = _Listener(PLUGIN_DEBUG_KEY_HEADER, key, connected)
        await self._listener.opened()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "langbot_plugin.cli.__init__", "run"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONDONTWRITEBYTECODE": "1",
                PLUGIN_DEBUG_KEY_ENV: key,
                "DEBUG_RUNTIME_WS_URL": f"ws://{LOOPBACK}:{self._listener.port}/plugin/debug/ws",
                **self._environment,
            },
            cwd=artifact.code_path,
        )
        self._bindings[uid] = InstallationBinding(
            instance_uuid="inst",
            workspace_uuid=workspace.workspace_uuid,
            placement_generation=1,
            installation_uuid=uid,
            runtime_revision=revision,
            artifact_digest=self._digest,
        )
        await self.ready(uid)
        return self._bindings[uid]

    async def ready(self, uid: str = "A", *, other_than: int = 0) -> None:
        """Wait until the package has registered."""
        async with asyncio.timeout(READY_WITHIN):
            while not any(str(each.status.value) == "initialized" for each in self._manager.plugins):
                if not self._pid(uid):
                    raise AssertionError("the debugged package ended")
                await asyncio.sleep(0.05)

    def _pid(self, uid: str) -> int:
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def revoke(self, uid: str = "A") -> None:
        """End the package's process and the listener."""
        self._bindings.pop(uid, None)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            if not await stop_process(self._process):
                raise RuntimeError("the debugged package did not exit after SIGKILL")
        if self._listener is not None:
            await self._listener.close()

    async def close(self) -> None:
        """Everything gone."""
        await self.revoke()
        await super().close()


@contextlib.asynccontextmanager
async def websocket_worker(
    package: Path,
    base: Path,
    shape: Shape,
    *,
    installations: Mapping[str, Mapping[str, Any]],
    name: str,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[SdkWorker]:
    """A worker with ``installations`` that is connected over WebSocket; everything is gone afterwards."""
    worker: SdkWorker
    if shape == "dedicated":
        worker = _DebugWorker(package, base, name=name, environment=environment or {})
    else:
        worker = SdkWorker(package, base, shape, real_dependencies=False, name=name, environment=environment)
        launcher: Any = worker._manager.worker_launcher
        plain = launcher.create_shared_pool_controller
        launcher.create_shared_pool_controller = lambda spec: _ConnectingBack(plain(spec))
    try:
        for uid, config in installations.items():
            await worker.install(uid, config)
        yield worker
    finally:
        await worker.close()


def debugged(
    package: Path, base: Path, *, installations: Mapping[str, Mapping[str, Any]] | None = None, name: str = "ACPAgentRunner"
) -> contextlib.AbstractAsyncContextManager[SdkWorker]:
    """One installation's plugin as a developer debugs it, with ``lbp run``, in a home of its own below ``base``."""
    home = base / "home"
    home.mkdir(parents=True)
    forms = {_DebugWorker.UID: {}} if installations is None else installations
    return websocket_worker(package, base, "dedicated", installations=forms, name=name, environment={"HOME": str(home)})
