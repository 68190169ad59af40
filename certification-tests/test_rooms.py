"""Which room a line of code lives in: what may import what, and what no file of the repository may hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tooling import ROOT, packages

pytestmark = pytest.mark.static

PLACELESS = (
    "agent",
    "daemon",
    "pkg.agent_api",
    "pkg.daemon_command",
    "pkg.daemon_program",
    "pkg.daemon_relay",
    "pkg.approval_policy",
    "pkg.approval_rules",
    "pkg.decision_log",
    "pkg.launch",
    "pkg.launch_ssh",
    "pkg.mcp_stdio_shim",
    "pkg.relay_protocol",
    "pkg.remote_session",
    "pkg.runtime_support",
    "pkg.settings",
    "pkg.supervised_process",
    "pkg.texts",
)
"""What a user's own machine needs, where the SDK is not installed."""

UNNAMED = tuple(".".join(parts) for parts in (("pypi", "org"), ("npmjs", "org"), ("pythonhosted", "org"), ("npmmirror", "com")))
"""Package registries: whoever installs decides on one, so no file names any."""

BLOCKED = """
import sys
sys.modules["langbot_plugin"] = None
for name in sys.argv[1:]:
    __import__(name)
from agent import DRIVERS
assert DRIVERS and all(driver.name == name for name, driver in DRIVERS.items())
"""


def imported(source: Path) -> Iterator[str]:
    """The first part of every absolute import of a file."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_shared_core_imports_nothing_of_one_package(package_root: Path) -> None:
    """``pkg/`` is the same in three packages, so it knows none of them."""
    sources = sorted((package_root / "pkg").rglob("*.py"))
    assert len(sources) > 20
    for source in sources:
        assert not {"agent", "components", "main"} & set(imported(source)), source.name


def test_drivers_know_the_core_and_nothing_of_langbot(package_root: Path) -> None:
    """No file of ``agent/`` imports the SDK."""
    for source in sorted((package_root / "agent").rglob("*.py")):
        assert "langbot_plugin" not in set(imported(source)), source.name


@pytest.mark.parametrize("name", packages.NAMES)
def test_what_a_user_s_machine_needs_is_importable_without_the_sdk(name: str, package_root: Path) -> None:
    """Drivers and places work where ``langbot_plugin`` is not installed."""
    command = [sys.executable, "-c", BLOCKED, *PLACELESS]
    package = package_root if name == packages.SOURCE else package_root.parent / name
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_no_committed_file_names_a_registry() -> None:
    """Locks and code work with whatever registry pip and npm are set up for."""
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    files = [ROOT / path for path in listed.split("\0") if path and (ROOT / path).is_file()]
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        assert not [name for name in UNNAMED if name in text], file
