"""The demo with a package that drives one agent alone: the real program on the demo's loopback model, and with no account."""

from __future__ import annotations

import os
import re
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


AGENTS = (
    pytest.param("claude-code", "run echo hi > made.txt", "allow-all", marks=pytest.mark.real_claude),
    pytest.param("codex", "add made.txt | hi", "allow-edits", marks=pytest.mark.real_codex),
)
"""The agent, a step of a script that makes a file, and a policy that lets it."""
ASKING = (
    pytest.param("claude-code", "I tried", marks=pytest.mark.real_claude),
    pytest.param("codex", "heard: it is Friday", marks=pytest.mark.real_codex),
)
"""The agent, and what its model says after a denial: Claude Code has the reason in the tool's result, Codex as a message."""
SIGN_INS = (
    pytest.param("claude-code", "claude_program", "claude auth login", marks=pytest.mark.real_claude),
    pytest.param("codex", "codex_program", "codex login", marks=pytest.mark.real_codex),
)


@pytest.mark.parametrize(("agent", "step", "policy"), AGENTS)
def test_an_agent_answers_without_an_account(agent: str, step: str, policy: str, tmp_path: Path) -> None:
    """The real program, built package and real worker: a sentence is repeated, and a script acts in the workspace."""
    options = ("--agent", agent, "--fixture", "--workspace", str(tmp_path))
    done = demo(*options, "--say", "Good morning.")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "You said: Good morning." in done.stdout
    done = demo(*options, "--policy", policy, "--say", f"please [[ {step} ;; say I made it ]]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "I made it" in done.stdout and (tmp_path / "made.txt").read_text() == "hi\n"


@pytest.mark.parametrize("place", ["local", "daemon"])
@pytest.mark.parametrize(("agent", "after"), ASKING)
def test_an_agent_asks_in_the_chat_and_obeys(agent: str, after: str, place: str, tmp_path: Path) -> None:
    """Its command waits for the next message, which allows it; the next command is denied, and the agent goes on without it.

    Vendor's rule: Claude Code keeps the output of commands by workspace below the temporary directory; with the demo it goes.
    """
    options = ("--agent", agent, "--fixture", "--place", place, "--workspace", str(tmp_path))
    said = (
        "please [[ run touch made ;; say I made it ]]",
        "1",
        "again [[ run touch denied ;; say I tried ]]",
        "deny because it is Friday",
    )
    done = demo(*options, *(part for text in said for part in ("--say", text)))
    assert done.returncode == 0, done.stdout + done.stderr
    asked, allowed, again, denied = (part.partition("\n")[2] for part in done.stdout.split("\nyou> ")[1:])
    assert "1. Allow once" in asked and "touch made" in asked and "I made it" not in asked, done.stdout
    assert "I made it" in allowed and "1. Allow once" not in allowed, done.stdout
    assert "1. Allow once" in again and "touch denied" in again, done.stdout
    assert "Denied." in denied and after in denied, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    kept = re.sub(r"[^A-Za-z0-9]", "-", str(tmp_path))
    assert not list(Path(f"/tmp/claude-{os.getuid()}").glob(f"*{kept}*"))


@pytest.mark.parametrize(("agent", "step", "policy"), AGENTS)
def test_an_agent_answers_under_a_daemon_whose_path_is_cut(agent: str, step: str, policy: str, tmp_path: Path) -> None:
    """The package's own daemon program, real program and built package: the answer is the same, once, and a cut is seen."""
    words = " ".join(f"word{number}" for number in range(12))
    options = ("--agent", agent, "--fixture", "--place", "daemon", "--blip", "1", "--workspace", str(tmp_path))
    done = demo(*options, "--say", words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(line for line in done.stdout.splitlines() if not line.startswith("  "))
    assert said.endswith(f"You said: {words}"), done.stdout
    assert "connection cut for 1 s" in done.stdout
    assert done.stdout.count("connected") >= 2
    done = demo(*options[:5], "--policy", policy, *options[-2:], "--say", f"please [[ {step} ;; say I made it ]]")
    assert "I made it" in done.stdout and (tmp_path / "made.txt").read_text() == "hi\n", done.stdout


@pytest.mark.parametrize(("agent", "program", "command"), SIGN_INS)
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_an_agent_without_a_sign_in_says_what_to_do(
    place: str, agent: str, program: str, command: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On a machine without an account: the command, the machine, and the exit code of a message without an answer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / command.split()[0]).symlink_to(request.getfixturevalue(program))
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    done = demo("--agent", agent, "--place", place, "--say", "hello", PATH=path, HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"`{command}`" in done.stdout, done.stdout
    assert os.uname().nodename in done.stdout


@pytest.mark.real_codex
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_an_account_elsewhere_is_found_where_the_shell_says(place: str, codex_program: Path, tmp_path: Path) -> None:
    """``CODEX_HOME`` of the person's shell names the account, and is no secret; without ``--fixture`` it is the one used."""
    account = tmp_path / "elsewhere"
    account.mkdir()
    (account / "config.toml").write_text('model_provider = "none-such"\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "codex").symlink_to(codex_program)
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    given = {"PATH": path, "HOME": str(tmp_path), "CODEX_HOME": str(account)}
    done = demo("--agent", "codex", "--place", place, "--say", "hello", **given)
    assert done.returncode == 1
    assert "`none-such` not found" in done.stdout, done.stdout


@pytest.mark.parametrize(("agent", "program"), [("claude-code", "claude"), ("codex", "codex")])
def test_an_agent_that_is_not_installed_says_so(agent: str, program: str, tmp_path: Path) -> None:
    """The name that was looked for, and what to do."""
    done = demo("--agent", agent, "--say", "hello", PATH="/usr/bin:/bin", HOME=str(tmp_path))
    assert done.returncode == 1
    assert f'The command "{program}" was not found' in done.stdout, done.stdout


@pytest.mark.parametrize("wrong", [("--fixture",), ("--fixture", "--agent", "acp:claude-code")])
def test_a_wrong_combination_is_told_at_once(wrong: tuple[str, ...]) -> None:
    """Nothing is built or started."""
    done = demo(*wrong, "--say", "hello")
    assert done.returncode == 2 and "claude-code" in done.stderr
