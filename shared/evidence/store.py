"""A package installs: through the SDK's own artifact store, with its real dependencies, and reads back as it was.

The SDK (0.7.18) trusts a marker when it reads its stores again and hashes nothing, so the hashes here are our own; a changed
byte in a store is found by them and not by the SDK.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from langbot_plugin.api.entities.builtin.runner.manifest import RunnerManifest
from langbot_plugin.entities.io.context import PluginExecutionMode, PluginWorkerPolicy
from langbot_plugin.runtime.plugin.artifact import PluginArtifactStore
from langbot_plugin.runtime.plugin.dependency_environment import PluginDependencyEnvironmentStore
from langbot_plugin.runtime.plugin.runner_service import RunnerRuntimeService
from langbot_plugin.runtime.plugin.worker_launcher import PluginWorkerLauncher
from langbot_plugin.utils.discover.engine import ComponentDiscoveryEngine

from evidence import Failed
from evidence.sdk_record import SDK

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
    store = PluginDependencyEnvironmentStore(base)
    mode = PluginExecutionMode.DEDICATED
    prepared = await launcher.prepare_dependency_environment(store, artifact, execution_mode=mode)
    before = tree(prepared.site_packages_path)
    again = await launcher.prepare_dependency_environment(PluginDependencyEnvironmentStore(base), artifact, execution_mode=mode)
    if again.digest != prepared.digest or tree(again.site_packages_path) != before:
        raise Failed(f"{package.name}: a second preparation gives another environment")
    if shadowing := shadows(prepared.site_packages_path):
        raise Failed(f"{package.name}: its environment has a second SDK: {', '.join(shadowing)}")
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
        "second_sdk": "none",
    }
    return Installed(artifact.code_path, prepared.site_packages_path, facts)


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
