"""The work of ``coding_artifact_rpc_probe.py``: one package's exact bytes behind every transport and in every shape of worker.

Whoever imports this has put the extracted package first on ``sys.path``, so that the daemon beside the worker is that
package's, too. What is printed names no path, host, key or time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import re
import secrets
import traceback
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from langbot_plugin.api.entities.builtin.runner import RunnerManifest

import pkg
from testkit import daemon_rig
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.daemon_sites import plugin_form, private
from testkit.run_harness import Outcome
from testkit.scripted_kinds import KINDS, Kind
from testkit.sdk_websocket import quiet_port, websocket_worker
from testkit.sdk_worker import AUTHOR, SdkWorker, Shape, descendants, gone, sdk_worker

Transport = Literal["stdio", "websocket"]
CELLS: Final[tuple[tuple[Transport, Shape], ...]] = (
    ("stdio", "dedicated"),
    ("stdio", "pool"),
    ("websocket", "dedicated"),
    ("websocket", "pool"),
)
HOW: Final = {
    "stdio dedicated": "started by the SDK's own launcher, profile oss_dev",
    "stdio pool": "started as the SDK's own launcher does, without its jail",
    "websocket dedicated": "lbp run with a debug key",
    "websocket pool": "started as the SDK's own launcher does, without its jail, told to connect back",
}
BOUND: Final = 60.0
"""Seconds a run may take; never the verdict itself."""
REFUSED: Final = "coding.local_in_pool"


class ProbeFailed(Exception):
    """What was seen is not what a package must show."""


def expect(true: object, what: str) -> None:
    """Raise :class:`ProbeFailed` unless ``true``."""
    if not true:
        raise ProbeFailed(what)


def members(directory: Path) -> dict[str, str]:
    """Every file of an extraction: its path there to the SHA-256 of its bytes, without what Python leaves."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def packed(directory: Path, target: Path) -> Path:
    """A package with exactly the files of an extraction, the way to the SDK's artifact store for a directory."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in members(directory):
            archive.writestr(zipfile.ZipInfo(path), (directory / path).read_bytes())
    return target


class Probe:
    """One package and the directory that everything of its trial is in."""

    def __init__(self, extracted: Path, package: Path, scratch: Path) -> None:
        """``package`` is the file that ``extracted`` came from, or has been packed into."""
        self.package = package
        self.scratch = scratch
        self.files = members(extracted)
        self.manifest = yaml.safe_load((extracted / "manifest.yaml").read_text(encoding="utf-8"))
        self.name = str(self.manifest["metadata"]["name"])
        self.kind: Kind = KINDS[self.name]

    async def report(self) -> dict[str, Any]:
        """Everything that is printed; ``ok`` only when every cell is."""
        cells = [await self._tried(transport, shape) for transport, shape in CELLS]
        return {
            "ok": all(cell["ok"] for cell in cells),
            "package": self.name,
            "version": str(self.manifest["metadata"]["version"]),
            "sha256": hashlib.sha256(self.package.read_bytes()).hexdigest(),
            "members": len(self.files),
            "sdk": importlib.metadata.version("langbot-plugin"),
            "agent": f"{self.kind.label} (local protocol fixture)",
            "cells": cells,
        }

    async def _tried(self, transport: Transport, shape: Shape) -> dict[str, Any]:
        found: dict[str, Any] = {"transport": transport, "shape": shape, "how": HOW[f"{transport} {shape}"], "ok": False}
        try:
            await self._cell(transport, shape, found)
            found["ok"] = True
        except Exception as exc:  # noqa: BLE001 - the cell says so
            last = traceback.extract_tb(exc.__traceback__)[-1]
            found["error"] = without_paths(f"{type(exc).__name__} in {last.name}: {exc}")[:2000]
        return found

    async def _cell(self, transport: Transport, shape: Shape, found: dict[str, Any]) -> None:
        base = self.scratch / f"{transport}-{shape}"
        base.mkdir()
        command = self.kind.write(base / "agent")
        workspace = base / "workspace"
        workspace.mkdir()
        port, token = quiet_port(), secrets.token_urlsafe(32)
        home = DaemonHome(
            base / "machine",
            f"ws://127.0.0.1:{port}",
            token=token,
            driver=self.kind.driver,
            command=(str(command),),
            package=self.name,
        )
        async with self._worker(transport, shape, base, plugin_form(port, token)) as worker, daemon_rig.running(home) as daemon:
            expect(Path(f"/proc/{worker.pid()}/cwd").resolve() == worker.extracted.resolve(), "the worker runs elsewhere")
            found["manifest"] = self._manifest(worker)
            found["runner"] = self._runner(await worker.runners())
            found["runs"] = runs = {}
            beside = await self._run(worker, self.kind.local(command, str(workspace)), "beside the worker")
            runs["beside the worker"] = told(beside)
            if shape == "pool":
                expect(worker.pid("A") == worker.pid("B"), "two installations in two processes")
                expect(REFUSED in beside.log, "the pool did not refuse an agent beside it")
            else:
                expect((beside.shown, beside.reason) == (["beside the worker"], "stop"), "the run beside the worker")
            away = await self._run(worker, self.kind.remote(DAEMON_ID), "under the daemon")
            runs["under the daemon"] = told(away)
            expect((away.shown[-1:], away.reason) == (["under the daemon"], "stop"), "the run under the daemon")
            left = {**descendants(worker.pid()), **descendants(daemon.pid)}
        expect(members(worker.extracted) == self.files, "the extraction was changed")
        expect(await gone(left), "a process was left behind")
        found["left behind"] = 0

    def _worker(
        self, transport: Transport, shape: Shape, base: Path, plugin: Mapping[str, Any]
    ) -> contextlib.AbstractAsyncContextManager[SdkWorker]:
        made = sdk_worker if transport == "stdio" else websocket_worker
        environment = private(base / "worker") if shape == "dedicated" else None
        forms: dict[str, Mapping[str, Any]] = {"A": plugin, "B": {}} if shape == "pool" else {"A": plugin}
        return made(self.package, base / "runtime", shape, name=self.name, installations=forms, environment=environment)

    def _manifest(self, worker: SdkWorker) -> dict[str, Any]:
        """The manifest that the worker registered with, which must be the extraction's; and the extraction as it was given."""
        expect(members(worker.extracted) == self.files, "the runtime's extraction has other bytes")
        registered = worker.registered()
        for field in ("author", "name", "version"):
            expect(registered[field] == str(self.manifest["metadata"][field]), f"the worker registered another {field}")
        return registered

    def _runner(self, runners: list[dict[str, Any]]) -> dict[str, Any]:
        """The one runner as the host is told of it."""
        expect(len(runners) == 1, f"{len(runners)} runners")
        manifest = RunnerManifest.model_validate(runners[0]["manifest"])
        expect(manifest.id == f"plugin:{AUTHOR}/{self.name}/default", "the runner's id")
        whole = json.dumps(runners[0]["manifest"], sort_keys=True).encode()
        return {
            "id": manifest.id,
            "fields": len(manifest.config_schema),
            "manifest_sha256": hashlib.sha256(whole).hexdigest(),
        }

    async def _run(self, worker: SdkWorker, form: Mapping[str, Any], text: str) -> Outcome:
        async with asyncio.timeout(BOUND):
            return await worker.run(f"say {text}", run_id=text.replace(" ", "-"), config=form)


def told(outcome: Outcome) -> dict[str, Any]:
    """One run in what is printed."""
    return {
        "terminal": str(outcome.terminal.type),
        "reason": outcome.reason,
        "texts": [without_paths(text) for text in outcome.shown],
        "results": len(outcome.results),
    }


_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.@+~-]+/)*[\w.@+~-]+")


def without_paths(text: str) -> str:
    """A text in which no absolute path is left."""
    return _PATH.sub("<path>", text)


async def probe(given: Path, extracted: Path, scratch: Path) -> dict[str, Any]:
    """Try one package; what to print. Raises :class:`ProbeFailed` when ``pkg`` was imported from elsewhere."""
    expect(Path(pkg.__file__).resolve().is_relative_to(extracted.resolve()), "the core was imported from elsewhere")
    package = given if given.is_file() else packed(extracted, scratch / "given.lbpkg")
    return await Probe(extracted, package, scratch).report()
