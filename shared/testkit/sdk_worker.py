"""The built package in a real worker process of the SDK's own runtime, driven without LangBot.

Real are the artifact store, the dependency environment, the launcher, the stdio connection, the runtime's runner service and
the worker process. A stand-in is only the control connection to LangBot's Core (:class:`Core`), which answers host actions
through one :class:`testkit.host_actions.HostActions` per installation. Shapes:

- ``dedicated``: the SDK's own launcher, profile ``oss_dev``, as a stock LangBot starts packages;
- ``pool``: one process for all installations, started directly instead of in nsjail (the profile needs it), with the same
  arguments and environment that the SDK's launcher gives the jail;
- ``jail``: a process per installation in an nsjail of its own, profile ``shared``, by the SDK's own launcher;
- ``jailed_pool``: the pool as the SDK's own launcher starts it, in nsjail. For both see :mod:`testkit.jails`.

A worker inherits nothing; what it gets besides the launcher's own variables is ``environment``. A jailed one gets nothing.

Dependencies: the runtime's own environment is first on a worker's path and here holds everything a package requires, so the
package's own environment holds only its names unless ``real_dependencies`` lets the SDK install it from the registry.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import json
import os
import shlex
import signal
import sys
import tempfile
import types
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.entities.io.actions.enums import RuntimeToLangBotAction
from langbot_plugin.entities.io.context import (
    InstallationBinding,
    PluginExecutionMode,
    PluginWorkerPolicy,
    RuntimeIdentity,
)
from langbot_plugin.runtime.context import RuntimeContext
from langbot_plugin.runtime.io.controllers.stdio.client import StdioClientController
from langbot_plugin.runtime.plugin.artifact import PluginArtifactStore, PluginInstallationPaths
from langbot_plugin.runtime.plugin.dependency_environment import PluginDependencyEnvironmentStore
from langbot_plugin.runtime.plugin.mgr import PluginManager
from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher
from langbot_plugin.runtime.security import (
    PLUGIN_FILE_STORAGE_DIR_ENV,
    PLUGIN_REGISTRATION_CAPABILITY_ENV,
    PLUGIN_RUNTIME_PROFILE_ENV,
)
from packaging.requirements import Requirement

import pkg
from testkit import hostile_trees, jails, package_roots
from testkit.host_actions import HostActions, run_context
from testkit.langbot_host import build_package
from testkit.run_harness import Outcome
from tooling import ROOT, SetupError, packages

Shape = Literal["dedicated", "pool", "jail", "jailed_pool"]
POOLED = ("pool", "jailed_pool")
JAILED = ("jail", "jailed_pool")
AUTHOR = "langbot-team"
POLICY = PluginWorkerPolicy(max_cpus=1, max_memory_mb=1024, max_pids=256, max_open_files=1024, max_file_size_mb=64)
READY_WITHIN = 60.0
"""Seconds for a worker to register and initialise; the SDK itself gives 30 s and 120 s."""

_dispatching: contextvars.ContextVar[InstallationBinding | None] = contextvars.ContextVar("dispatching", default=None)


class Core:
    """LangBot's side of the control connection: plugin settings, and host actions by installation."""

    def __init__(self) -> None:
        """No installation has a configuration yet."""
        self.hosts: dict[str, HostActions] = {}
        self.configs: dict[str, dict[str, Any]] = {}

    @property
    def current_action_context(self) -> InstallationBinding | None:
        """The installation whose run is being dispatched by this task."""
        return _dispatching.get()

    async def call_action(
        self, action: Any, data: dict[str, Any], timeout: float = 15.0, action_context: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Answer one action of the runtime or a worker."""
        uid = action_context.installation_uuid
        if action is RuntimeToLangBotAction.GET_PLUGIN_SETTINGS:
            return {
                "enabled": True,
                "priority": 0,
                "plugin_config": self.configs[uid],
                "installation_uuid": uid,
                "install_source": "local",
                "install_info": {},
            }
        return await self.hosts[uid].call_action(action, data, timeout)


async def _record(staging: Any, requirements: Sequence[str]) -> None:
    """Record each requirement's version as it stands in the runtime's own environment, whose modules a worker imports first."""
    for value in requirements:
        name = Requirement(value).name
        version = importlib.metadata.version(name)
        entry = staging.site_packages_path / f"{name.replace('-', '_')}-{version}.dist-info"
        entry.mkdir(parents=True)
        (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


class _Launcher(PluginWorkerLauncher):
    """The SDK's launcher with a dependency environment that only names what the runtime's own already holds."""

    environment: Mapping[str, str] = types.MappingProxyType({})
    """What every worker gets in addition; a ``PYTHONPATH`` goes behind the launcher's own."""

    def create_controller(self, launch_spec: Any) -> Any:
        controller = super().create_controller(launch_spec)
        assert isinstance(controller, StdioClientController)
        controller.env = self._extended(controller.env)
        return controller

    def _extended(self, given: Mapping[str, str]) -> dict[str, str]:
        extended = {**given, **self.environment}
        if "PYTHONPATH" in self.environment:
            extended["PYTHONPATH"] = os.pathsep.join((given["PYTHONPATH"], self.environment["PYTHONPATH"]))
        return extended

    async def prepare_dependency_environment(self, store: Any, artifact: Any, *, execution_mode: Any = None) -> Any:
        return await store.prepare(
            artifact,
            runtime_fingerprint=self.dependency_runtime_fingerprint(),
            installer=_record,
            execution_mode=execution_mode,
        )


class _PoolLauncher(_Launcher):
    """The shared profile without its jail."""

    def configure(self, policy: Any, runtime_profile: Any) -> None:
        self.policy, self.runtime_profile = policy, runtime_profile
        self.effective_profile = "shared"

    def create_shared_pool_controller(self, spec: Any) -> Any:
        scratch = tempfile.mkdtemp(prefix="pool-", dir=spec.artifact.code_path.parent.parent)
        given = {
            PLUGIN_RUNTIME_PROFILE_ENV: "shared",
            PLUGIN_REGISTRATION_CAPABILITY_ENV: spec.registration_capability,
            PLUGIN_FILE_STORAGE_DIR_ENV: str(Path(scratch) / "rpc"),
            "PYTHONPATH": str(self.runtime_import_root),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
        }
        return StdioClientController(
            command=str(self.python_executable),
            args=["-m", "langbot_plugin.cli.__init__", "run", "-s", "--prod"],
            env=self._extended(given),
            working_dir=str(spec.artifact.code_path),
            close_process_on_callback_return=False,
        )


class _JailLauncher(jails.Launcher, _Launcher):
    """The SDK's own in nsjail, as :class:`_Launcher` is for processes without one."""


class SdkWorker:
    """A runtime with one package installed for any number of installations."""

    def __init__(
        self,
        package: Path,
        base: Path,
        shape: Shape,
        *,
        real_dependencies: bool,
        name: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Made by :func:`sdk_worker`."""
        self.name = name
        self.shape = shape
        self.core = Core()
        self._package = package.read_bytes()
        self._digest = hashlib.sha256(self._package).hexdigest()
        self._bindings: dict[str, InstallationBinding] = {}
        context = RuntimeContext()  # type: ignore[no-untyped-call]
        self._manager = PluginManager(context)
        context.plugin_mgr = self._manager
        context.control_handler = cast(Any, self.core)
        self._manager.artifact_store = PluginArtifactStore(base)
        self._manager.dependency_environment_store = PluginDependencyEnvironmentStore(base)
        profile: Literal["oss_dev", "shared"] = "oss_dev" if shape == "dedicated" else "shared"
        if shape in JAILED:
            if environment:
                raise ValueError("a jailed worker takes no environment")
            self._manager.worker_launcher = jails.Launcher() if real_dependencies else _JailLauncher()
        elif shape == "pool":
            self._manager.worker_launcher = _PoolLauncher()
        elif not real_dependencies:
            self._manager.worker_launcher = _Launcher()
        if isinstance(self._manager.worker_launcher, _Launcher):
            self._manager.worker_launcher.environment = dict(environment or {})
        elif environment:
            raise ValueError("the SDK's own launcher takes no environment")
        self._manager.configure_worker_runtime(POLICY, profile)
        context.bind_runtime(RuntimeIdentity(instance_uuid="inst", runtime_id="rt"), POLICY, profile)

    # ---- installations

    async def install(
        self, uid: str = "A", config: Mapping[str, Any] | None = None, *, revision: int = 1
    ) -> InstallationBinding:
        """Install, or with a newer ``revision`` reconfigure, the package for ``uid`` and wait until it serves."""
        binding = InstallationBinding(
            instance_uuid="inst",
            workspace_uuid=f"ws-{uid}",
            placement_generation=1,
            installation_uuid=uid,
            runtime_revision=revision,
            artifact_digest=self._digest,
        )
        self.core.hosts.setdefault(uid, HostActions())
        self.core.configs[uid] = dict(config or {})
        mode = PluginExecutionMode.SHARED_CERTIFIED if self.shape in POOLED else PluginExecutionMode.DEDICATED
        await self._manager.apply_plugin_installation(binding, artifact_package=self._package, execution_mode=mode)
        self._bindings[uid] = binding
        await self.ready(uid)
        return binding

    async def reinitialize(self, config: Mapping[str, Any], *, uid: str = "A") -> None:
        """Give a dedicated worker new settings while it goes on: what a debugged plugin gets after it has reconnected."""
        self.core.configs[uid] = dict(config)
        handler = self._manager.installation_runtimes[self._bindings[uid]].plugin_handler
        assert handler is not None
        await handler.initialize_plugin({"enabled": True, "priority": 0, "plugin_config": dict(config)})

    async def ready(self, uid: str = "A", *, other_than: int = 0) -> None:
        """Wait until the installation's worker serves, with ``other_than`` until it is another process than that."""
        async with asyncio.timeout(READY_WITHIN):
            while True:
                runtime = self._manager.installation_runtimes[self._bindings[uid]]
                if runtime.state == "failed" and not other_than:  # a killed worker fails before it is started again
                    raise AssertionError(f"worker failed: {runtime.error_code} {runtime.error_message}")
                if (
                    runtime.ready_event.is_set()
                    and runtime.plugin_container is not None
                    and self._pid(uid) not in (0, other_than)
                ):
                    return
                await asyncio.sleep(0.05)

    async def revoke(self, uid: str = "A") -> None:
        """Remove the installation."""
        await self._manager.remove_plugin_installation(self._bindings.pop(uid))

    def host(self, uid: str = "A") -> HostActions:
        """The host that answers this installation's runs."""
        return self.core.hosts[uid]

    def pid(self, uid: str = "A") -> int:
        """The worker process that serves the installation; of a jailed one it is the nsjail it runs in."""
        pid = self._pid(uid)
        assert pid
        return pid

    def own(self, uid: str = "A") -> PluginInstallationPaths:
        """Where this machine has what the installation's jail shows as ``/home``, ``/tmp`` and ``/data``."""
        return self._manager.installation_runtimes[self._bindings[uid]].paths

    def _pid(self, uid: str) -> int:
        runtime = self._manager.installation_runtimes[self._bindings[uid]]
        owner: Any = runtime.shared_worker if self.shape in POOLED else runtime
        process = owner.plugin_handler.stdio_process if owner is not None and owner.plugin_handler is not None else None
        return process.pid if process is not None and process.returncode is None else 0

    def kill(self, uid: str = "A") -> int:
        """SIGKILL the installation's worker; returns the pid it had."""
        pid = self.pid(uid)
        os.kill(pid, signal.SIGKILL)
        return pid

    # ---- runs

    async def stream(self, text: str = "hello", *, uid: str = "A", **more: Any) -> AsyncGenerator[RunnerResult, None]:
        """The results of one run as they come; closing the iterator cancels the run as the host does."""
        token = _dispatching.set(self._bindings[uid])
        try:
            context = run_context(text, **more)
            results = self._manager.run_runner(AUTHOR, self.name, "default", context)
            async with contextlib.aclosing(results):
                async for result in results:
                    yield RunnerResult.model_validate(result)
        finally:
            with contextlib.suppress(ValueError):  # closed from another context
                _dispatching.reset(token)

    async def run(self, text: str = "hello", *, uid: str = "A", **more: Any) -> Outcome:
        """One run to its end."""
        return Outcome([result async for result in self.stream(text, uid=uid, **more)])

    def start(self, text: str = "hello", *, uid: str = "A", **more: Any) -> asyncio.Task[Outcome]:
        """One run as a task."""
        return asyncio.get_running_loop().create_task(self.run(text, uid=uid, **more))

    async def runners(self, uid: str = "A") -> list[dict[str, Any]]:
        """What the runtime tells a host of the runners that the installation has."""
        token = _dispatching.set(self._bindings[uid])
        try:
            return await self._manager.list_runners()
        finally:
            _dispatching.reset(token)

    def registered(self, uid: str = "A") -> dict[str, str]:
        """Author, name and version that the worker registered with."""
        (found,) = self._manager.plugins_for_binding(self._bindings[uid]) or self._manager.plugins
        metadata = found.manifest.metadata
        return {"author": str(metadata.author), "name": str(metadata.name), "version": str(metadata.version)}

    @property
    def extracted(self) -> Path:
        """The artifact as the runtime has it on the disk, which the worker runs."""
        return Path(self._manager.artifact_store.require_verified(self._digest).code_path)

    async def close(self) -> None:
        """Remove every installation and end every worker."""
        for uid in list(self._bindings):
            await self.revoke(uid)
        await self._manager.shutdown_all_plugins()  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def sdk_worker(
    package: Path,
    base: Path,
    shape: Shape = "dedicated",
    *,
    installations: Mapping[str, Mapping[str, Any]] | None = None,
    real_dependencies: bool = False,
    name: str = "ACPAgentRunner",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[SdkWorker]:
    """A worker with ``installations`` (id to plugin configuration) of ``package``; everything is gone afterwards."""
    worker = SdkWorker(package, base, shape, real_dependencies=real_dependencies, name=name, environment=environment)
    try:
        for uid, config in ({"A": {}} if installations is None else installations).items():
            await worker.install(uid, config)
        yield worker
    finally:
        await worker.close()


def wordy(directory: Path) -> dict[str, str]:
    """The environment of a worker that logs everything at DEBUG, made in ``directory``.

    Only the SDK's own loggers stay where every worker has them, at INFO: below it they print the plugin's settings.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_WORDY)
    return {"PYTHONPATH": str(directory)}


_WORDY = """
import logging
configured = logging.basicConfig
def basic(**options):
    configured(**{**options, "level": logging.DEBUG})
    logging.getLogger("langbot_plugin").setLevel(logging.INFO)
logging.basicConfig = basic
"""


# ------------------------------------------------------------------ the agent, and what is left of it


def scripted_agent(state: Path | None = None, **config: Any) -> str:
    """The command line of the scripted ACP agent (local protocol fixture) with this configuration."""
    if state is not None:
        config["state"] = str(state)
    program = Path(__file__).with_name("scripted_acp_agent.py")
    return shlex.join([sys.executable, "-I", "-S", str(program), json.dumps(config)])


def descendants(pid: int) -> dict[int, str]:
    """Every living process below ``pid``: pid to start time, in no order."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            start = hostile_trees.start_time(child)
            if start:
                found[child] = start
                waiting.append(child)
    return found


async def gone(processes: Mapping[int, str], bound: float = 10.0) -> bool:
    """Whether every one of these processes (pid to start time) ends within ``bound`` seconds."""
    return await asyncio.to_thread(hostile_trees.gone, dict(processes), bound)


# ------------------------------------------------------------------ the package


@functools.cache
def built(name: str = "ACPAgentRunner") -> Path:
    """The package under test as the SDK's own builder makes it, built once per test process.

    From the working copy, or from the extracted artifacts the suite's imports come from (``CODING_RUNNER_SOURCE_ROOT``).
    """
    directory = tempfile.TemporaryDirectory(prefix="built-")
    atexit.register(directory.cleanup)
    imported = Path(pkg.__file__).parents[1]
    if imported.parent == ROOT:
        return packages.build(name, Path(directory.name))
    extracted = package_roots.beside(imported, name)
    if not (extracted / "manifest.yaml").is_file():
        raise SetupError(f"{imported.parent} holds no {name}")
    return build_package(extracted, Path(directory.name))
