"""What a machine's owner does first: the three steps, and the policy file that ``init`` writes, with every key explained.

Guarantees: an existing file is never touched; a new one is 0600, in a directory made 0700, and complete or not there at all;
everything that opens the machine further than the defaults stands in it as a comment; its keys are those that
:mod:`pkg.daemon_policy` reads.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pkg import relay_sockets, runtime_support
from pkg.daemon_policy import APPROVALS, KEY_VARIABLE, OPTIONS, STATE_DIRECTORY, TOKEN_VARIABLE
from pkg.errors import LaunchError
from pkg.relay_auth import valid_daemon_id

HUB: Final = "wss://chat.example.org:8767"
"""Stands where the owner puts the hub's address."""
WORKSPACE: Final = "~/src"
"""Stands where the owner puts a directory."""

_PLAINTEXT: Final = (
    "The hub's address leaves this machine unencrypted: everybody on the way could read along. Put a wss:// address or that of "
    "an SSH tunnel there; only where you accept it, take the # away before insecure_plaintext = true."
)
_ENCRYPTED: Final = """\
# true lets a ws:// address leave this machine unencrypted: everybody on the way can read along.
# insecure_plaintext = false"""
_UNENCRYPTED: Final = """\
# This address leaves this machine unencrypted: everybody on the way could read along. So the file is not used like this: put
# a wss:// address or that of an SSH tunnel there, or, only where you accept it, take the # away from the next line.
# insecure_plaintext = true"""

Commands = Mapping[str, tuple[str, ...]]
"""Command lines of agents that a package knows, by name."""


def first_steps(program: str, policy: Path, options: str = "") -> str:
    """What to do on a machine where nothing is set up, a line for each step. ``options`` follow every command."""
    return (
        f"No policy file yet, so nothing may run here.\n1. {program} init{options} writes {policy}: "
        "fill in the hub's address, your directories and your agents\n"
        f"2. {program} keygen{options} makes this machine's key out of the token in the plugin's form (daemon-token)\n"
        f"3. {program} check{options} says whether all of it can be used; then start it: {program} run{options}"
    )


def write_policy(file: Path, *, hub: str, daemon_id: str, workspaces: tuple[str, ...], driver: str, commands: Commands) -> str:
    """Write a new policy file and return what is still to be done, for people.

    Empty arguments are filled with what this machine says or with examples. Agents of ``commands`` that are installed here
    are in it, the others as comments. Raises ``ValueError`` (also where there is a file already) and ``OSError``.
    """
    if os.path.lexists(file):
        raise ValueError(f"{file} is there already and is left as it is")
    daemon_id = daemon_id or socket.gethostname().partition(".")[0] or "laptop"
    if not valid_daemon_id(daemon_id):
        raise ValueError("a daemon id has 1 to 128 characters and no control characters")
    shell = runtime_support.search_path()
    found = {name: command for name, command in commands.items() if _installed(command[0], shell)}
    # A service has a short PATH: what only this shell's one leads to is found there by the note of it.
    bare = runtime_support.search_path(environ={"HOME": runtime_support.home_directory()})
    path = "" if all(_installed(command[0], bare) for command in found.values()) else shell
    text = sample(
        hub=hub,
        daemon_id=daemon_id,
        workspaces=workspaces,
        driver=driver,
        commands=commands,
        found=tuple(found),
        path=path,
    )
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise ValueError("a name or directory has characters that a policy file cannot hold") from None
    _write(file, text)
    left = [] if hub else ["the hub's address (url)"]
    left += [] if workspaces else ["your directories (workspaces)"]
    left += [] if found else ["an agent (none that is known was found here)"]
    absent = [each for each in workspaces if not Path(each).expanduser().is_dir()]
    said = f"{file} is written.{' Fill in ' + ', '.join(left) + '.' if left else ''}"
    said += f" Make {', '.join(absent)}: not there yet." if absent else ""
    return f"{said} {_PLAINTEXT}" if _plaintext(hub) else said


def _plaintext(hub: str) -> bool:
    """Whether a hub's address needs ``insecure_plaintext``."""
    return bool(hub and relay_sockets.address_problem(hub, insecure_plaintext=False))


def _installed(name: str, path: str) -> bool:
    try:
        runtime_support.find_executable(name, path)
    except LaunchError:
        return False
    return True


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    staged = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(handle)
        try:
            os.link(staged, file)  # unlike a rename this never replaces a file that appeared meanwhile
        except FileExistsError:
            raise ValueError(f"{file} is there already and is left as it is") from None
    finally:
        staged.unlink()


def _toml(value: str | tuple[str, ...]) -> str:
    return json.dumps(value, ensure_ascii=False)


def sample(
    *,
    hub: str,
    daemon_id: str,
    workspaces: tuple[str, ...],
    driver: str,
    commands: Commands,
    found: tuple[str, ...],
    path: str = "",
) -> str:
    """A policy file's text; the agents ``found`` are in it, others of ``commands`` as comments. ``path`` is the key's value."""
    tables = []
    for name, command in sorted(commands.items(), key=lambda item: item[0] not in found):
        mark = "" if name in found else "# "
        tables.append(f"{mark}[agents.{name}]\n{mark}command = {_toml(command)}\n")
    if not commands:
        tables.append('# [agents.my-agent]\n# command = ["my-agent"]\n')
    agents = "\n".join(tables)
    return f"""\
# What may run on this machine for a LangBot chat. This file decides; whatever a hub asks for outside of it is refused.
# Only you may be able to change it (chmod 600). Look at it with "daemon.py check" after every change, then restart the
# daemon. Lines that begin with # are comments; commented keys show their defaults or an example.

# What the runner's form calls this machine (daemon-id).
daemon_id = {_toml(daemon_id)}

# Agents work below these directories and nowhere else. The first is where a chat without a workspace works; a workspace
# in the runner's form is one of these, a directory below one, or relative to the first.
workspaces = {_toml(workspaces or (WORKSPACE,))}

# Variables of the daemon's own environment that agents get; all others stay hidden from them.
# environment = []

# Variables that the runner's form (env-json) may set for an agent here. None: it could replace what you set.
# job_environment = []

# Options of the agent that a job may set. A mode is left out on purpose: it could switch off the asking.
# job_options = {_toml(OPTIONS)}

# Approval policies a job may ask for. Add "allow-all" only where an agent may do everything without asking anybody.
# approvals = {_toml(APPROVALS)}

# Whether a job may give its agent further MCP servers. Only ever by address; commands are refused in any case.
# mcp_servers = true

# Whether a job may have a git worktree made for its chat in a workspace, below .worktrees/ of the repository.
# worktrees = true

# Directories below which agents obey the files of the workspace: its settings, hooks and tool servers, which run commands.
# trusted_workspaces = []

# How many jobs run at once, over all agents and hubs.
# max_jobs = 128

# Where the daemon keeps its table of jobs and audit.jsonl, the record of what ran here for whom.
# state_dir = {_toml(STATE_DIRECTORY)}

# Where commands are looked for first, like PATH. A service has a short PATH of its own; the usual places follow by themselves.
{"" if path else "# "}path = {_toml(path)}

# One [[hubs]] for every LangBot that may use this machine.
[[hubs]]
# The address of the plugin's hub: wss:// through your TLS proxy, or ws:// over loopback or an SSH tunnel.
url = {_toml(hub or HUB)}
# This machine's key; "daemon.py keygen" makes it. A name without a directory lies beside this file.
key_file = "daemon.key"
# Instead of the key: a file (0600) with the token of the plugin's form. Without either, the variables {KEY_VARIABLE} or
# {TOKEN_VARIABLE} count, and then you are asked at the terminal.
# token_file = "token"
# The SHA-256 of the hub's certificate (64 hexadecimal digits), instead of the authorities this system trusts.
# certificate_sha256 = ""
{_UNENCRYPTED if _plaintext(hub) else _ENCRYPTED}

# The agents. A job names one ("Agent of the daemon" in the runner's form; with only one it may be left empty), and only
# the command written here is started.
{agents}
# Each agent may also have:
{f"# driver = {_toml(driver)}":<36}# where the package has several
# workspaces = ["~/src/one"]        # fewer directories than the common ones
# environment = ["MY_SETTING"]      # further variables of the daemon's own environment
# max_jobs = 1                      # fewer jobs at once
"""
