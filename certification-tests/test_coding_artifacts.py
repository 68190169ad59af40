"""The artifacts themselves: what the SDK's RPC makes of each, and that suites pointed at extracted ones use nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from testkit.sdk_worker import built
from tooling import ROOT

pytestmark = [pytest.mark.sdk_worker, pytest.mark.timeout(240)]

PACKAGES = ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")
TESTS = ROOT / "certification-tests"
CELLS = {(transport, shape) for transport in ("stdio", "websocket") for shape in ("dedicated", "pool")}


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """This interpreter, to the end of a program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CODING_", "SUITE_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def probed(package: Path) -> subprocess.CompletedProcess[str]:
    """The probe's verdict on one package."""
    return python(TESTS / "coding_artifact_rpc_probe.py", package)


def extracted(name: str, directory: Path) -> Path:
    """The built package's members in a directory of its name."""
    target = directory / name
    with zipfile.ZipFile(built(name)) as archive:
        archive.extractall(target)
    return target


@pytest.mark.parametrize("name", PACKAGES)
def test_every_transport_and_shape_serves_the_exact_extraction(name: str, tmp_path: Path) -> None:
    """Our rule: a package registers, is discovered and runs over stdio and WebSocket, in a dedicated worker and in the pool.

    In the pool an agent beside the worker is refused in words; the daemon's agent answers everywhere.
    """
    done = probed(extracted(name, tmp_path) if name == "CodexAgent" else built(name))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["package"] == name
    assert report["agent"].endswith("(local protocol fixture)")
    cells = {(cell["transport"], cell["shape"]): cell for cell in report["cells"]}
    assert cells.keys() == CELLS
    for (_, shape), cell in cells.items():
        assert cell["ok"] is True
        assert cell["manifest"] == {"author": "langbot-team", "name": name, "version": report["version"]}
        assert cell["runner"]["id"] == f"plugin:langbot-team/{name}/default"
        beside, away = cell["runs"]["beside the worker"], cell["runs"]["under the daemon"]
        assert (beside["terminal"], away["terminal"]) == ("run.completed", "run.completed")
        assert beside["reason"] == ("error" if shape == "pool" else "stop")
        assert away["texts"][-1] == "under the daemon"
    assert len({cell["runner"]["manifest_sha256"] for cell in cells.values()}) == 1
    for path in (str(ROOT), str(tmp_path), os.environ.get("HOME", "/root") + "/", "/tmp/"):
        assert path not in done.stdout


def test_the_probe_fails_when_the_runner_is_another(tmp_path: Path) -> None:
    """Our rule: what every cell must show is looked at in every cell; what is missing is named, without a path."""
    changed = extracted("ACPAgentRunner", tmp_path)
    component = changed / "components" / "runner" / "default.yaml"
    text = component.read_text()
    assert "\n  name: default\n" in text
    component.write_text(text.replace("\n  name: default\n", "\n  name: other\n"))
    done = probed(changed)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert [cell["ok"] for cell in report["cells"]] == [False] * 4
    assert all("the runner's id" in cell["error"] for cell in report["cells"])
    assert str(tmp_path) not in done.stdout


def test_the_probe_fails_on_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    """Our rule: one broken line in the core is a failure, told as one."""
    broken = extracted("ACPAgentRunner", tmp_path)
    loop = broken / "pkg" / "run_loop.py"
    loop.write_text(loop.read_text() + "\nraise RuntimeError('broken on purpose')\n")
    done = probed(broken)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "ok": False,
        "package": "ACPAgentRunner",
        "error": "cannot be imported: RuntimeError",
    }


def test_the_probe_refuses_what_is_no_package(tmp_path: Path) -> None:
    """Our rule: neither an empty directory nor a file of anything is tried; both are told in one line."""
    other = tmp_path / "file.lbpkg"
    other.write_text("no archive")
    for given in (tmp_path, other, tmp_path / "nothing"):
        done = probed(given)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no package" in done.stderr
        assert str(tmp_path) not in done.stderr


MARKED = """
import json
import os
import pathlib
import pkg
import pytest
from testkit import daemon_rig
from testkit.process_worker import process_worker
from testkit.sdk_worker import built, sdk_worker
from testkit.scripted_kinds import KINDS

ROOT = pathlib.Path(os.environ["CODING_RUNNER_SOURCE_ROOT"])
SEEN = pathlib.Path(os.environ["HOME"]) / "seen"
PACKAGES = list(KINDS)

def test_this_process_imports_from_there(package_root):
    import agent.product
    assert package_root == ROOT / "ACPAgentRunner"
    for module in (pkg, agent.product):
        assert pathlib.Path(module.__file__).is_relative_to(package_root)
    assert pkg.MARK == "ACPAgentRunner"

@pytest.mark.parametrize("name", PACKAGES)
def test_so_does_a_daemon_program(name):
    assert daemon_rig.program(name) == ROOT / name / "daemon.py"

@pytest.mark.asyncio
@pytest.mark.parametrize("name", PACKAGES)
async def test_so_does_a_worker_process(name):
    async with process_worker(name) as worker:
        modules = (await worker.ask("hello"))["modules"]
    assert len(modules) > 20
    assert all(pathlib.Path(file).is_relative_to(ROOT / name) for file in modules.values())

@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["ACPAgentRunner", "CodexAgent"])
async def test_so_does_a_real_worker_of_the_sdk(name, tmp_path):
    async with sdk_worker(built(name), tmp_path, name=name, environment={"MARK_SEEN": str(SEEN)}) as worker:
        assert (worker.extracted / "pkg" / "__init__.py").read_bytes() == (ROOT / name / "pkg" / "__init__.py").read_bytes()
        assert f"{name} {worker.pid()}" in SEEN.read_text().splitlines()
"""


def test_a_source_root_is_where_every_process_of_the_suites_gets_the_packages_from(tmp_path: Path) -> None:
    """Our rule: with ``CODING_RUNNER_SOURCE_ROOT`` nothing under test comes from the working copy.

    Each extraction gets a mark of its own that tells the process it is imported in, and every kind of process is started.
    """
    for name in PACKAGES:
        core = extracted(name, tmp_path / "root") / "pkg" / "__init__.py"
        told = f"open(os.environ['MARK_SEEN'], 'a').write({name!r} + f' {{os.getpid()}}\\n')"
        core.write_text(f"{core.read_text()}\nimport os\n\nMARK = {name!r}\nif 'MARK_SEEN' in os.environ:\n    {told}\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copyfile(TESTS / "conftest.py", tests / "conftest.py")
    (tests / "test_marked.py").write_text(MARKED)
    done = python(
        *("-m", "pytest", "-c", ROOT / "pyproject.toml", f"--rootdir={tests}", "-p", "no:cacheprovider", "-q", tests),
        CODING_RUNNER_SOURCE_ROOT=str(tmp_path / "root"),
        HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "9 passed" in done.stdout


def test_the_historical_blockers_are_in_no_ordinary_run() -> None:
    """Our rule: what the stock relay does is shown by hand only; no run of the suite collects it or counts its assertions."""
    name = "historical_coding_runner_shared_blockers.py"
    assert (TESTS / name).is_file()
    listing = ("-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q")
    ordinary = python(*listing, TESTS, "--ignore-glob=*/test_[!s]*")
    assert ordinary.returncode == 0, ordinary.stdout
    assert "test_static.py" in ordinary.stdout
    assert "historical" not in ordinary.stdout
    by_hand = python(*listing, TESTS / name)
    assert by_hand.returncode == 0, by_hand.stdout
    assert by_hand.stdout.count(f"{name}::test_") == 5
