"""The program's command line and environment: what every session needs, what the form chooses, and nothing secret.

``SessionSpec.options`` may hold ``model``, ``permission_mode``, ``allowed_tools``, ``disallowed_tools`` (lists of names or
patterns), ``max_turns``, ``max_budget_usd``, ``trust_workspace`` and ``show_cost``.

A workspace is not trusted unless the form says so: its settings, hooks, plugins and tool servers are left alone
(``--setting-sources user``, ``--strict-mcp-config``, hooks off), and git, which the program runs without asking, does not start
the monitor that a repository names. In any workspace, programs of one account are kept apart: they neither see each other nor
take messages from each other. Keys that the program reads from a descriptor are handed to
it on stdin before it starts, through a line of POSIX shell, so that they are in no environment and the commands it runs
cannot read them.
"""

from __future__ import annotations

import json
import re
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pkg.agent_api import Json, SessionSpec
from pkg.errors import SettingsError
from pkg.lenient import as_float, as_int, as_list, as_str

PROGRAM: Final = "claude"

_FIXED: Final = (
    "-p",
    *("--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    "--include-partial-messages",
    *("--permission-prompt-tool", "stdio"),
    *("--system-prompt-snapshot", "off"),
)
APART: Final = ("ListAgents", "SendMessage")
"""Tools with which programs of one account find and write to each other, unasked: chats of different people would."""
ASKED: Final = ("EnterWorktree", "ExitWorktree", "Agent(isolation:*)", "Task(isolation:*)")
"""Calls that the program (2.1.332) lets pass unasked although they write: worktrees and branches in the repository."""
_ENVIRONMENT: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "CLAUDE_CODE_SDK_READS_SESSION_STATE": "1",  # tells when it is idle
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",  # one memory per directory would be shared by everybody who works there
        "CLAUDE_CODE_DISABLE_CRON": "1",  # schedules lie in the workspace, where the program obeys anybody's
        "DISABLE_AUTOUPDATER": "1",
    }
)
_DESCRIPTORS: Final[Mapping[str, tuple[str, int]]] = types.MappingProxyType(
    {
        "ANTHROPIC_API_KEY": ("CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR", 8),
        "CLAUDE_CODE_OAUTH_TOKEN": ("CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR", 9),
    }
)
"""Variables whose value the program also reads from a descriptor, and the descriptor used for each."""
_CREDENTIALS: Final = frozenset({*_DESCRIPTORS, "ANTHROPIC_AUTH_TOKEN"})
_ELSEWHERE: Final = re.compile(r"CLAUDE_CODE_USE_(?:BEDROCK|VERTEX|FOUNDRY)$")

RESERVED: Final = frozenset(
    {
        *("-p", "--print", "--input-format", "--output-format", "--permission-prompt-tool", "--permission-prompts"),
        *("-c", "--continue", "-r", "--resume", "--session-id", "--fork-session", "--no-session-persistence", "--from-pr"),
        *("--resume-session-at", "--teleport", "--remote", "--worktree", "-w", "--tmux", "--bg", "--background"),
        *("--system-prompt-snapshot", "--replay-user-messages", "--setting-sources", "--settings", "--strict-mcp-config"),
        *("--dangerously-skip-permissions", "--allow-dangerously-skip-permissions", "--permission-mode"),
        *("--mcp-config", "--sdk-url", "--ide", "-h", "--help", "-v", "--version", "--"),
        *("--cloud", "--environment", "--desktop", "--remote-control", "--init-only"),
    }
)
"""Arguments of the program that would break what the runner says to it, or that have a field of their own."""
_WITH_VALUE: Final = frozenset("drnw")
"""Short flags that may have a value attached."""


@dataclass(frozen=True, slots=True)
class Start:
    """How the program is started, and what is written to its stdin before anything else."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    first: bytes
    credentials: bool
    """Whether the form has credentials for it, so that its own sign-in does not matter."""

    def __repr__(self) -> str:
        return f"Start({self.argv!r})"


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises :class:`pkg.errors.SettingsError` for ``args-json`` that would break the protocol or be taken for a prompt."""
    for index, argument in enumerate(arguments):
        name = argument.split("=", 1)[0]
        if (
            any(short in RESERVED for short in _short_flags(argument))
            or name in RESERVED
            or (index == 0 and not argument.startswith("-"))
        ):
            raise SettingsError(
                "coding.setting_invalid", field="args-json", problem="problem.argument_reserved", argument=name[:80] or '""'
            )


def _short_flags(argument: str) -> Iterator[str]:
    """The flags of one argument such as ``-cd`` or ``-rID``; behind one with a value stands that value."""
    if argument.startswith("-") and not argument.startswith("--"):
        for letter in argument[1:]:
            yield f"-{letter}"
            if letter in _WITH_VALUE:
                return


def valid_session_id(text: str) -> bool:
    """Whether a stored id can be one of the program's; anything else it would look up as a title."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def start(spec: SessionSpec, session_id: str, *, resume: bool) -> Start:
    """The start of a program for this session."""
    options = spec.options
    trusted = options.get("trust_workspace") is True
    argv = [*(spec.command or (PROGRAM,)), *_FIXED]
    settings: dict[str, Json] = {
        "crossSessionInbound": "refuse",  # what other programs of the account write to this one
        "permissions": {"ask": list(ASKED)},
    }
    if trusted:
        argv += ["--setting-sources", "user,project,local"]
    else:
        settings["disableAllHooks"] = True
        argv += ["--setting-sources", "user", "--strict-mcp-config"]
    argv += ["--settings", json.dumps(settings, separators=(",", ":"))]
    argv += ["--permission-mode", as_str(options.get("permission_mode")) or "default"]
    if model := as_str(options.get("model")):
        argv += ["--model", model]
    if turns := as_int(options.get("max_turns")):
        argv += ["--max-turns", str(turns)]
    if budget := as_float(options.get("max_budget_usd")):
        argv += ["--max-budget-usd", f"{budget:g}"]
    if tools := _names(options.get("allowed_tools")):
        argv += ["--allowedTools", ",".join(tools)]
    if tools := [*APART, *_names(options.get("disallowed_tools"))]:
        argv += ["--disallowedTools", ",".join(tools)]
    argv.append(f"--resume={session_id}" if resume else f"--session-id={session_id}")
    env = {**_ENVIRONMENT, **spec.env}
    if not trusted:
        env |= _without_monitor(env.get("GIT_CONFIG_COUNT", "0"))
    credentials = any(env.get(name) for name in _CREDENTIALS) or any(_ELSEWHERE.match(name) for name in env)
    return _with_descriptors(tuple(argv), env, credentials)


def _without_monitor(count: str) -> dict[str, str]:
    """One setting more in git's environment, behind the ``count`` that are there."""
    if not count.isdecimal():
        return {}
    return {
        "GIT_CONFIG_COUNT": str(int(count) + 1),
        f"GIT_CONFIG_KEY_{int(count)}": "core.fsmonitor",
        f"GIT_CONFIG_VALUE_{int(count)}": "false",
    }


def _names(value: Json) -> list[str]:
    return [text for item in as_list(list(value) if isinstance(value, tuple) else value) if (text := as_str(item).strip())]


def _with_descriptors(argv: tuple[str, ...], env: dict[str, str], credentials: bool) -> Start:
    """Move what can be read from a descriptor out of the environment."""
    script, first = "", b""
    for name, (variable, descriptor) in _DESCRIPTORS.items():
        value = env.get(name, "")
        if not value or "\n" in value or "\r" in value or variable in env:
            continue
        del env[name]
        env[variable] = str(descriptor)
        first += value.encode() + b"\n"
        script += f"IFS= read -r k || exit 1\nexec {descriptor}<<K\n$k\nK\nunset k\n"
    if not script:
        return Start(argv, types.MappingProxyType(env), b"", credentials)
    wrapped = ("/bin/sh", "-c", script + 'exec "$@"', PROGRAM, *argv)
    return Start(wrapped, types.MappingProxyType(env), first, credentials)
