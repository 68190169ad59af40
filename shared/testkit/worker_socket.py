"""Workers that speak with their runtime over a WebSocket on loopback: managed ones, and one under ``lbp run`` as developers
start it.

A stock runtime on Linux speaks with managed workers over stdio; over a WebSocket it speaks with them on Windows, and with
debugged plugins everywhere. Connection, handlers and worker are the SDK's own in all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.entities.io.actions.enums import RuntimeToLangBotAction
from langbot_plugin.entities.io.context import ActionContext, PluginWorkerPolicy, RuntimeIdentity
from langbot_plugin.runtime.context import RuntimeContext
from langbot_plugin.runtime.io.connection import Connection
from langbot_plugin.runtime.io.controller import Controller
from langbot_plugin.runtime.io.controllers.stdio.client import StdioClientController, stop_process
from langbot_plugin.runtime.io.controllers.ws.server import WebSocketServerController
from langbot_plugin.runtime.io.handlers.plugin import PluginConnectionHandler
from langbot_plugin.runtime.plugin.container import RuntimeContainerStatus
from langbot_plugin.runtime.plugin.mgr import PluginManager
from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher

from testkit.host_actions import HostActions, run_context
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome

READY_WITHIN = 60.0
"""Seconds for a debugged plugin to register."""

INITIALIZED = RuntimeContainerStatus.INITIALIZED
Callback = Callable[[Connection], Coroutine[Any, Any, None]]


class OverWebSocket(Controller):
    """Owns a worker as the SDK's stdio controller does, and hands on the connection that the worker opens."""

    def __init__(self, stdio: StdioClientController) -> None:
        """Command, environment and directory are those of ``stdio``."""
        self._stdio = stdio
        self.process: asyncio.subprocess.Process | None = None

    async def run(self, new_connection_callback: Callback) -> None:
        """Start the worker, serve its one connection, end it."""
        port = free_port()
        over = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def connected(connection: Connection) -> None:
            handling = asyncio.get_running_loop().create_task(new_connection_callback(connection))
            connections.add(handling)
            await asyncio.wait({handling})
            over.set()

        serving = asyncio.create_task(WebSocketServerController(port, host="127.0.0.1").run(connected))
        try:
            await _listening(port)
            self.process = await asyncio.create_subprocess_exec(
                self._stdio.command,
                *(each for each in self._stdio.args if each != "-s"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                env={**self._stdio.env, "RUNTIME_WS_URL": f"ws://127.0.0.1:{port}/plugin/ws"},
                cwd=self._stdio.working_dir,
            )
            either = {asyncio.create_task(self.process.wait()), asyncio.create_task(over.wait())}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in either:
                    each.cancel()
        finally:
            await self.close()
            # The SDK's own handling of a pooled connection goes on until somebody ends it.
            for each in (*connections, serving):
                each.cancel()
            await asyncio.wait({*connections, serving})

    async def close(self) -> None:
        """End the worker."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if not await stop_process(process):
                raise RuntimeError("a worker did not exit")


def over_websocket(launcher: PluginWorkerLauncher) -> PluginWorkerLauncher:
    """Have a launcher's workers connect over a WebSocket."""
    for name in ("create_controller", "create_shared_pool_controller"):
        made = getattr(launcher, name)

        def carried(spec: Any, made: Callable[[Any], Any] = made) -> OverWebSocket:
            return OverWebSocket(made(spec))

        setattr(launcher, name, carried)
    return launcher


async def _listening(port: int) -> None:
    async with asyncio.timeout(READY_WITHIN):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)


class DebuggedPlugin:
    """A package directory under ``lbp run``."""

    def __init__(self, manager: PluginManager, name: str, host: HostActions) -> None:
        self._manager, self._name, self.host = manager, name, host

    async def run(self, text: str, **more: Any) -> Outcome:
        """One run to its end."""
        results = self._manager.run_runner("langbot-team", self._name, "default", run_context(text, **more))
        async with contextlib.aclosing(results):
            return Outcome([RunnerResult.model_validate(each) async for each in results])


class _DebugCore:
    """LangBot's side for a debugged plugin: its settings, and one host."""

    def __init__(self, host: HostActions, config: Mapping[str, Any], workspace: ActionContext) -> None:
        self.host, self.config, self.current_action_context = host, dict(config), workspace

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **_: Any) -> dict[str, Any]:
        """Answer one action."""
        if action is RuntimeToLangBotAction.GET_PLUGIN_SETTINGS:
            settings = {"enabled": True, "priority": 0, "plugin_config": self.config}
            return {**settings, "installation_uuid": "debugged", "install_source": "debug", "install_info": {}}
        if action is RuntimeToLangBotAction.INITIALIZE_PLUGIN_SETTINGS:
            return {}
        return await self.host.call_action(action, data, timeout)


@contextlib.asynccontextmanager
async def debugged(code: Path, name: str, config: Mapping[str, Any] | None = None) -> AsyncIterator[DebuggedPlugin]:
    """``lbp run`` in ``code``, connected to a runtime of this process; the worker is gone afterwards."""
    workspace = ActionContext(instance_uuid="inst", workspace_uuid="ws", placement_generation=1)
    context = RuntimeContext()  # type: ignore[no-untyped-call]
    manager = PluginManager(context)
    context.plugin_mgr = manager
    host = HostActions()
    context.control_handler = cast(Any, _DebugCore(host, config or {}, workspace))
    policy = PluginWorkerPolicy(max_cpus=1, max_memory_mb=1024, max_pids=256, max_open_files=1024, max_file_size_mb=64)
    manager.configure_worker_runtime(policy, "oss_dev")
    context.bind_runtime(RuntimeIdentity(instance_uuid="inst", runtime_id="rt"), policy, "oss_dev")
    key = context.workspace_debug_tokens.issue(workspace).token

    async def connected(connection: Connection) -> None:
        handler = PluginConnectionHandler(connection, context, debug_plugin=True)
        handler.debug_workspace_binding = context.workspace_debug_tokens.binding_for_token(key)
        handler.debug_auth_token = key
        await manager.add_plugin_handler(handler)

    port = free_port()
    serving = asyncio.create_task(WebSocketServerController(port, host="127.0.0.1").run(connected))
    process = None
    try:
        await _listening(port)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "langbot_plugin.cli.__init__", "run"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            cwd=code,
            env={
                "PATH": os.environ.get("PATH", ""),
                "HOME": os.environ.get("HOME", "/"),
                "DEBUG_RUNTIME_WS_URL": f"ws://127.0.0.1:{port}/plugin/debug/ws",
                "PLUGIN_DEBUG_KEY": key,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        async with asyncio.timeout(READY_WITHIN):
            while (found := manager.find_plugin("langbot-team", name)) is None or found.status is not INITIALIZED:
                assert process.returncode is None, "lbp run has ended"
                await asyncio.sleep(0.05)
        yield DebuggedPlugin(manager, name, host)
    finally:
        if process is not None and process.returncode is None:
            process.terminate()
            await stop_process(process)
        serving.cancel()
        await asyncio.wait({serving})
