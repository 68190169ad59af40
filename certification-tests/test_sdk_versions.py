"""What holds under every SDK that the packages take: all is imported, dedicated and debugged workers serve, a shared one serves
exactly where the SDK tells it of revocations.

The suite runs this under the oldest SDK, the first with the revocation hook, the one of a stock LangBot and the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.entities.io.actions.enums import RuntimeToLangBotAction
from langbot_plugin.entities.io.context import ActionContext, PluginWorkerPolicy, RuntimeIdentity
from langbot_plugin.runtime.context import RuntimeContext
from langbot_plugin.runtime.io.controllers.ws.server import WebSocketServerController
from langbot_plugin.runtime.io.handlers.plugin import PluginConnectionHandler
from langbot_plugin.runtime.plugin.mgr import PluginManager
from langbot_plugin.runtime.security import PLUGIN_DEBUG_KEY_ENV, PLUGIN_DEBUG_KEY_HEADER
from packaging.version import Version

from testkit.host_actions import HostActions, run_context
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import AUTHOR, Core, built, descendants, gone, scripted_agent, sdk_worker
from tooling import packages

SDK = Version(importlib.metadata.version("langbot-plugin"))
TELLS = Version("0.7.5") <= SDK
"""Whether this SDK tells a shared worker that an installation is gone."""

WITHIN = 60.0
"""Seconds that a debugged plugin gets to connect."""

IMPORTS = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(root))
names = sorted(
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for path in root.rglob("*.py") if path.relative_to(root).parts[0] in ("pkg", "agent", "components", "main.py", "daemon.py")
)
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def form(directory: Path) -> dict[str, Any]:
    """A runner's form with the scripted agent (local protocol fixture)."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True)
    return {"provider": "custom", "acp-command": scripted_agent(), "workspace": str(workspace), "keep-warm": 0}


@pytest.mark.parametrize("name", packages.NAMES)
def test_every_module_is_imported(name: str, package_root: Path) -> None:
    """Our rule: nothing of a package needs a newer SDK than its requirements name."""
    command = [sys.executable, "-W", "error::DeprecationWarning:pkg", "-c", IMPORTS, str(package_root.parent / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


@pytest.mark.sdk_worker
@pytest.mark.asyncio
async def test_a_dedicated_worker_serves(tmp_path: Path) -> None:
    """Our rule: so it does under the oldest SDK that the requirements allow."""
    async with sdk_worker(built(), tmp_path / "runtime") as worker:
        done = await worker.run("say here", config=form(tmp_path))
        assert done.shown == ["here"]


@pytest.mark.sdk_worker
@pytest.mark.asyncio
async def test_a_shared_worker_serves_where_it_is_told_of_revocations_and_refuses_elsewhere(tmp_path: Path) -> None:
    """SDK fact: the hook came with 0.7.5. Our rule: without it every run is refused in words, whatever it asks for."""
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": {}, "B": {}}) as worker:
        for uid in "AB":
            done = await worker.run("say here", uid=uid, config=form(tmp_path))
            assert ("coding.sdk_too_old" in done.log) is not TELLS, done.log
            assert ("coding.local_in_pool" in done.log) is TELLS, done.log
            assert done.text
        assert descendants(worker.pid("A")) == {}


class DebugCore(Core):
    """LangBot's side of a debugged plugin: it also makes the plugin's settings."""

    async def call_action(
        self, action: Any, data: dict[str, Any], timeout: float = 15.0, action_context: Any = None, **more: Any
    ) -> dict[str, Any]:
        """Answer; a debugged plugin's installation is ``debugged``."""
        if action is RuntimeToLangBotAction.INITIALIZE_PLUGIN_SETTINGS:
            return {}
        if action is RuntimeToLangBotAction.GET_PLUGIN_SETTINGS:
            action_context = action_context.for_installation("debugged")
        return await super().call_action(action, data, timeout, action_context, **more)


@contextlib.asynccontextmanager
async def debugged(directory: Path) -> AsyncIterator[tuple[PluginManager, asyncio.subprocess.Process]]:
    """The built package as ``lbp run`` starts it, connected over WebSocket to a runtime of the SDK on 127.0.0.1."""
    core = DebugCore()
    core.hosts["debugged"] = HostActions()
    core.configs["debugged"] = {}
    context = RuntimeContext()  # type: ignore[no-untyped-call]
    manager = PluginManager(context)
    context.plugin_mgr = manager
    context.control_handler = cast(Any, core)
    policy = PluginWorkerPolicy(max_cpus=1, max_memory_mb=1024, max_pids=256, max_open_files=1024, max_file_size_mb=64)
    manager.configure_worker_runtime(policy, "oss_dev")
    context.bind_runtime(RuntimeIdentity(instance_uuid="inst", runtime_id="rt"), policy, "oss_dev")
    workspace = ActionContext(instance_uuid="inst", workspace_uuid="ws")
    key = context.workspace_debug_tokens.issue(workspace).token

    async def connected(connection: Any) -> None:
        handler = PluginConnectionHandler(connection, context, debug_plugin=True)
        given = str(connection.request_headers.get(PLUGIN_DEBUG_KEY_HEADER) or "")
        handler.debug_workspace_binding = context.workspace_debug_tokens.binding_for_token(given)
        handler.debug_auth_token = given
        await manager.add_plugin_handler(handler)

    port = free_port()
    server = WebSocketServerController(
        port,
        host="127.0.0.1",
        request_authenticator=lambda headers: bool(
            context.workspace_debug_tokens.binding_for_token(str(headers.get(PLUGIN_DEBUG_KEY_HEADER) or ""))
        ),
    )
    with zipfile.ZipFile(built()) as archive:
        archive.extractall(directory / "code")
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(directory),
        "DEBUG_RUNTIME_WS_URL": f"ws://127.0.0.1:{port}/plugin/debug/ws",
        PLUGIN_DEBUG_KEY_ENV: key,
    }
    serving = asyncio.get_running_loop().create_task(server.run(connected))
    command = (sys.executable, "-m", "langbot_plugin.cli.__init__", "run")
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=directory / "code", env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield manager, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.sdk_worker
@pytest.mark.asyncio
async def test_a_debugged_worker_serves(tmp_path: Path) -> None:
    """Our rule: what a developer starts with ``lbp run`` answers as an installed plugin does."""
    async with debugged(tmp_path) as (manager, process):
        async with asyncio.timeout(WITHIN):
            while not (plugins := [each for each in manager.plugins if each.status.value == "initialized"]):
                assert process.returncode is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        assert plugins[0].debug
        children = descendants(process.pid)
        context = run_context("say here", config=form(tmp_path))
        results = manager.run_runner(AUTHOR, "ACPAgentRunner", "default", context)
        done = Outcome([RunnerResult.model_validate(result) async for result in results])
        assert done.shown == ["here"], (tmp_path / "log").read_text()
        children |= descendants(process.pid)
    assert await gone(children)
