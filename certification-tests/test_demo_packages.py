"""The demo with a package that drives one agent alone: the real program on the demo's loopback model, and with no account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo_chat import chat
from tooling import ROOT

pytestmark = pytest.mark.demo
DEMO = ROOT / "scripts" / "demo.py"


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end, with as little of this environment as it takes."""
    kept = {name: value for name, value in os.environ.items() if not chat.CREDENTIALS.match(name)}
    command = [sys.executable, str(DEMO), *arguments]
    return subprocess.run(
        command, env={**kept, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.real_claude
def test_claude_code_answers_without_an_account(tmp_path: Path) -> None:
    """The real program, built package and real worker: a sentence is repeated, and a script acts in the workspace."""
    options = ("--agent", "claude-code", "--fixture", "--workspace", str(tmp_path))
    done = demo(*options, "--say", "Good morning.")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "You said: Good morning." in done.stdout
    done = demo(*options, "--policy", "allow-all", "--say", "please [[ run echo hi > made.txt ;; say I made it ]]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "I made it" in done.stdout and (tmp_path / "made.txt").read_text() == "hi\n"


@pytest.mark.real_claude
def test_claude_code_answers_under_a_daemon_whose_path_is_cut(tmp_path: Path) -> None:
    """The package's own daemon program, real program and built package: the answer is the same, once, and a cut is seen."""
    words = " ".join(f"word{number}" for number in range(12))
    options = ("--agent", "claude-code", "--fixture", "--place", "daemon", "--blip", "1", "--workspace", str(tmp_path))
    done = demo(*options, "--say", words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(line for line in done.stdout.splitlines() if not line.startswith("  "))
    assert said.endswith(f"You said: {words}"), done.stdout
    assert "path cut for 1 s (1 live connection)" in done.stdout
    assert done.stdout.count("connected") >= 2


@pytest.mark.real_claude
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_claude_code_without_a_sign_in_says_what_to_do(place: str, claude_program: Path, tmp_path: Path) -> None:
    """On a machine without an account: the command, the machine, and the exit code of a message without an answer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "claude").symlink_to(claude_program)
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    done = demo("--agent", "claude-code", "--place", place, "--say", "hello", PATH=path, HOME=str(tmp_path))
    assert done.returncode == 1
    assert "`claude auth login`" in done.stdout, done.stdout
    assert os.uname().nodename in done.stdout


@pytest.mark.real_codex
def test_codex_answers_without_an_account(tmp_path: Path) -> None:
    """The real program, built package and real worker: a sentence is repeated, and a script acts in the workspace."""
    options = ("--agent", "codex", "--fixture", "--workspace", str(tmp_path))
    done = demo(*options, "--say", "Good morning.")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "You said: Good morning." in done.stdout
    done = demo(*options, "--policy", "allow-edits", "--say", "please [[ add made.txt | hi ;; say I made it ]]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "I made it" in done.stdout and (tmp_path / "made.txt").read_text() == "hi\n"


@pytest.mark.real_codex
def test_codex_answers_under_a_daemon_whose_path_is_cut(tmp_path: Path) -> None:
    """The package's own daemon program, real program and built package: the answer is the same, once, and a cut is seen."""
    words = " ".join(f"word{number}" for number in range(12))
    options = ("--agent", "codex", "--fixture", "--place", "daemon", "--blip", "1", "--workspace", str(tmp_path))
    done = demo(*options, "--say", words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(line for line in done.stdout.splitlines() if not line.startswith("  "))
    assert said.endswith(f"You said: {words}"), done.stdout
    assert "path cut for 1 s (1 live connection)" in done.stdout


@pytest.mark.real_codex
def test_codex_without_a_sign_in_says_what_to_do(codex_program: Path, tmp_path: Path) -> None:
    """On a machine without an account: the command, the machine, and the exit code of a message without an answer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "codex").symlink_to(codex_program)
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    done = demo("--agent", "codex", "--say", "hello", PATH=path, HOME=str(tmp_path))
    assert done.returncode == 1
    assert "`codex login`" in done.stdout, done.stdout


def test_claude_code_that_is_not_installed_says_so(tmp_path: Path) -> None:
    """The name that was looked for, and what to do."""
    done = demo("--agent", "claude-code", "--say", "hello", PATH="/usr/bin:/bin", HOME=str(tmp_path))
    assert done.returncode == 1
    assert 'The command "claude" was not found' in done.stdout, done.stdout


@pytest.mark.parametrize("wrong", [("--fixture",), ("--fixture", "--agent", "acp:claude-code")])
def test_a_wrong_combination_is_told_at_once(wrong: tuple[str, ...]) -> None:
    """Nothing is built or started."""
    done = demo(*wrong, "--say", "hello")
    assert done.returncode == 2 and "claude-code" in done.stderr
