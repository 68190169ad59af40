"""A package installs: through the SDK's own artifact store, with its real dependencies, and reads back as it was.

The SDK (0.7.18) trusts a marker when it reads its stores again and hashes nothing, so the hashes here are our own. That they
would find one changed byte in either store is tried, and what the SDK says of it is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import langbot_plugin
import yaml
from langbot_plugin.api.entities.builtin.runner.manifest import RunnerManifest
from langbot_plugin.entities.io.context import PluginExecutionMode, PluginWorkerPolicy
from langbot_plugin.runtime.plugin.artifact import PluginArtifactStore
from langbot_plugin.runtime.plugin.dependency_environment import (
    PluginDependencyEnvironment,
    PluginDependencyEnvironmentStore,
)
from langbot_plugin.runtime.plugin.runner_service import RunnerRuntimeService
from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher
from langbot_plugin.utils.discover.engine import ComponentDiscoveryEngine

from evidence import Failed
from evidence.recheck import SDK

IMPORTED_WITHIN = 120.0
"""Seconds a process may take to import the SDK."""
POLICY = PluginWorkerPolicy(max_cpus=1, max_memory_mb=1024, max_pids=256, max_open_files=1024, max_file_size_mb=64)


@dataclass(frozen=True, slots=True)
class Installed:
    """One package in the stores."""

    code: Path
    site_packages: Path
    facts: Mapping[str, Any]


def tree(directory: Path) -> dict[str, str]:
    """Path to SHA-256 of every file below a directory."""
    return {
        file.relative_to(directory).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


async def install(package: Path, members: Mapping[str, Any], base: Path) -> Installed:
    """Install a package and its dependencies; raises :class:`evidence.Failed` when anything reads back differently."""
    data = package.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    artifacts = PluginArtifactStore(base)
    artifact = artifacts.install_package(data, digest)
    extracted = tree(artifact.code_path)
    if extracted != {name: entry["sha256"] for name, entry in members.items()}:
        raise Failed(f"{package.name}: the store extracts other bytes than the package holds")
    if PluginArtifactStore(base).require_verified(digest).code_path != artifact.code_path:
        raise Failed(f"{package.name}: the store does not find again what it has installed")
    if writable := [each for each in artifact.code_path.rglob("*") if each.stat().st_mode & 0o222]:
        raise Failed(f"{package.name}: {len(writable)} entries of the extraction can be written")

    launcher = PluginWorkerLauncher()
    launcher.configure(POLICY, "oss_dev")
    mode = PluginExecutionMode.DEDICATED
    store = PluginDependencyEnvironmentStore(base)
    prepared = await launcher.prepare_dependency_environment(store, artifact, execution_mode=mode)
    before = tree(prepared.site_packages_path)

    async def found(what: PluginDependencyEnvironmentStore) -> PluginDependencyEnvironment:
        fingerprint = launcher.dependency_runtime_fingerprint()
        return await what.prepare(artifact, runtime_fingerprint=fingerprint, installer=_refuse, execution_mode=mode)

    again = await found(PluginDependencyEnvironmentStore(base))
    if again.digest != prepared.digest or tree(again.site_packages_path) != before:
        raise Failed(f"{package.name}: a second preparation gives another environment")
    sdk = {"artifact": "not tried", "environment": "not tried"}
    with flipped(artifact.code_path) as changed:
        if differing(tree(artifact.code_path), extracted) != [changed]:
            raise Failed(f"{package.name}: a changed byte in the artifact store is not found")
        sdk["artifact"] = _notices(lambda: PluginArtifactStore(base).get_verified(digest))
    with flipped(prepared.site_packages_path) as changed:
        if differing(tree(prepared.site_packages_path), before) != [changed]:
            raise Failed(f"{package.name}: a changed byte in the environment is not found")
        ready = PluginDependencyEnvironmentStore(base)
        sdk["environment"] = _notices(lambda: ready.get_ready(prepared.digest))
    if tree(artifact.code_path) != extracted or tree(prepared.site_packages_path) != before:
        raise Failed(f"{package.name}: the stores are not as they were")

    if shadowing := [*shadows(prepared.site_packages_path), *shadows(artifact.code_path)]:
        raise Failed(f"{package.name}: it brings a second SDK: {', '.join(shadowing)}")
    imported = sdk_of_a_worker(artifact.code_path, [launcher.runtime_import_root, prepared.site_packages_path])
    if imported != Path(langbot_plugin.__file__ or "").resolve():
        raise Failed(f"{package.name}: a worker of it imports another SDK than the runtime's")
    distributions = {
        each.metadata["Name"]: each.version
        for each in importlib.metadata.distributions(path=[str(prepared.site_packages_path)])
    }
    facts = {
        "artifact_digest": digest,
        "environment_digest": prepared.digest,
        "environment_files": len(before),
        "environment_sha256": hashlib.sha256(repr(sorted(before.items())).encode()).hexdigest(),
        "dependencies": dict(sorted(distributions.items())),
        "read_back": "unchanged",
        "prepared_twice": "the same environment, nothing installed again",
        "flipped_byte": {"found_by": "a hash of every file", "noticed_by_the_sdk": sdk},
        "second_sdk": "none",
    }
    return Installed(artifact.code_path, prepared.site_packages_path, facts)


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The paths at which two trees are not the same."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


@contextlib.contextmanager
def flipped(directory: Path) -> Iterator[str]:
    """One bit of one file below a directory is another meanwhile; the file's path in it."""
    file = max((each for each in directory.rglob("*.py") if each.is_file()), key=lambda each: (each.stat().st_size, str(each)))
    data, status = file.read_bytes(), file.stat()
    file.chmod(0o644)
    try:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        yield file.relative_to(directory).as_posix()
    finally:
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        file.chmod(status.st_mode & 0o777)


def sdk_of_a_worker(code: Path, path: Sequence[Path]) -> Path:
    """Where a process that starts as a worker does, in the package's directory and with this path, imports the SDK from."""
    command = [sys.executable, "-c", "import langbot_plugin; print(langbot_plugin.__file__)"]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=code,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORTED_WITHIN,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"a worker does not import the SDK within {IMPORTED_WITHIN:g} s") from None
    if done.returncode != 0:
        raise Failed(f"a worker cannot import the SDK: {(done.stderr.splitlines() or [''])[-1]}")
    return Path(done.stdout.strip()).resolve()


async def _refuse(_: object, requirements: Sequence[str]) -> None:
    raise Failed(f"what was prepared is not found again: {len(requirements)} requirements would be installed anew")


def _notices(read: Callable[[], object]) -> str:
    """Whether reading again refuses."""
    try:
        return "no" if read() is not None else "yes"
    except ValueError:
        return "yes"


def shadows(site_packages: Path) -> list[str]:
    """What in an environment would stand in for the runtime's own SDK."""
    name = SDK.replace("-", "_")
    return sorted(each.name for each in site_packages.iterdir() if each.name.lower().replace("-", "_").startswith(name))


def runner(code: Path, package: str) -> dict[str, Any]:
    """The runner as the runtime lists it, a real ``RunnerManifest``; raises :class:`evidence.Failed` when there is none."""
    before = Path.cwd()
    os.chdir(code)
    try:
        engine = ComponentDiscoveryEngine()  # type: ignore[no-untyped-call]
        plugin = engine.load_component_manifest("manifest.yaml", owner="evidence", no_save=True)
        component = engine.load_component_manifest("components/runner/default.yaml", owner="evidence", no_save=True)
    finally:
        os.chdir(before)
    if plugin is None or component is None:
        raise Failed(f"{package}: its manifests cannot be discovered")
    entry = RunnerRuntimeService._build_runner_entry(
        None,  # type: ignore[arg-type]
        types.SimpleNamespace(manifest=plugin),  # type: ignore[arg-type]
        types.SimpleNamespace(manifest=component, component_instance=None),  # type: ignore[arg-type]
    )
    if entry is None:
        raise Failed(f"{package}: the runtime lists no runner of it")
    listed = RunnerManifest.model_validate(entry["manifest"])
    author = yaml.safe_load((code / "manifest.yaml").read_text(encoding="utf-8"))["metadata"]["author"]
    if listed.id != f"plugin:{author}/{package}/default":
        raise Failed(f"{package}: its runner is called {listed.id}")
    return {
        "id": listed.id,
        "capabilities": listed.capabilities.model_dump(mode="json"),
        "permissions": listed.permissions.model_dump(mode="json"),
        "fields": [each.name for each in listed.config_schema],
    }
