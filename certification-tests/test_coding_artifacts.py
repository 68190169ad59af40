"""The artifacts themselves: what the SDK's RPC makes of each, and that suites pointed at extracted ones use nothing else."""

from __future__ import annotations

import json
import os
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
