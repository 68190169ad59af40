"""The sources themselves: style, format and types, over everything that is ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import package_roots
from tooling import ROOT

pytestmark = [pytest.mark.static, pytest.mark.timeout(600)]

PACKAGES = ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")


def check(*command: str, cwd: Path = ROOT, **environment: str) -> None:
    """Run one checker; what it found is the failure's text."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_linter_finds_nothing() -> None:
    """``ruff check`` with the rules of pyproject.toml is clean over the whole repository."""
    check("ruff", "check", ".")


def test_everything_is_formatted() -> None:
    """``ruff format`` would change nothing."""
    check("ruff", "format", "--check", ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_fully_typed(package: str) -> None:
    """``mypy --strict`` is clean over each package with its own directory as the root, as a worker sees it."""
    config = str(ROOT / "pyproject.toml")
    check("mypy", "--strict", "--config-file", config, "--explicit-package-bases", ".", cwd=ROOT / package)


def test_scripts_test_kit_and_tests_are_fully_typed() -> None:
    """``mypy --strict`` is clean over what the packages do not ship, too; each package's tests with its own modules."""
    siblings = "|".join(package_roots.DIRECTORIES)
    excluded = ("--exclude", rf"^certification-tests/({siblings})/")
    check("mypy", "--strict", *excluded, "scripts", "shared", "certification-tests", MYPYPATH=typing_path("ACPAgentRunner"))


@pytest.mark.parametrize(("directory", "package"), package_roots.DIRECTORIES.items())
def test_tests_of_a_sibling_are_fully_typed(directory: str, package: str) -> None:
    """``mypy --strict`` is clean over a sibling's tests, against the sibling's modules."""
    tests = ROOT / "certification-tests" / directory
    if tests.is_dir():
        check("mypy", "--strict", f"certification-tests/{directory}", MYPYPATH=typing_path(package))


def typing_path(package: str) -> str:
    """Where modules are found in a process that tests ``package``."""
    return os.pathsep.join(str(ROOT / name) for name in (package, "shared", "scripts"))
