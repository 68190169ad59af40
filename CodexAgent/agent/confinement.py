"""What a thread's commands may write, reach and read: Codex's sandbox modes as a profile that also keeps the account's keys.

Codex (0.171) lets commands in its sandbox read everything. A *permission profile*, sent with a thread, is the same sandbox with
paths that cannot be read, by any way that leads to them: links, ``/proc``, commands that were allowed to leave the sandbox
and those a rule allows, patches, pictures, and agents of the agent's own (each measured). It costs such commands the
network, which only the profile gives, and gaining rights (``sudo``). And it costs time, because Codex then looks for a
workspace's skills from inside the sandbox, one program for each look: 0.1 s for a turn, 0.3 s for each skill at the start.

A path that is a link makes every command fail, so real paths are sent; one that does not exist is ignored, and what is put into
the place of a file while a command runs can be read by that command until it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pkg.agent_api import Json
from pkg.lenient import as_dict, as_list, as_str

SANDBOXES: Final = ("read-only", "workspace-write", "danger-full-access")
SANDBOX: Final = "workspace-write"
"""What holds unless something else is chosen."""
READ_ONLY: Final = "read-only"
FULL_ACCESS: Final = "danger-full-access"

PROFILE: Final = "langbot"
"""The name of a thread's own profile."""
BASES: Final[Mapping[str, str]] = {READ_ONLY: ":read-only", SANDBOX: ":workspace"}
"""Codex's own profiles, which are its sandbox modes."""

PRIVATE: Final = ("auth.json", ".credentials.json", "gateway_oauth.json", ".env", "config.toml")
"""Files of an account that hold its keys, or may: sign-ins, those of tool servers, variables, settings."""

PRIVATE_ELSEWHERE: Final = (
    'for home in "$1" "$HOME/.codex"; do for name in '
    + " ".join(PRIVATE)
    + '; do readlink -f -- "$home/$name"; done; done 2>/dev/null; true'
)
"""A shell script that says the real paths of the account's private files, on another machine."""


def sandbox_of(options: Mapping[str, Json], policy: str) -> str:
    """The sandbox mode for a spec's options and policy; the safe default for anything unknown.

    Under ``allow-edits`` commands may only look: inside a writable sandbox Codex (0.171) runs them, and applies every patch,
    unasked. In a read-only one each patch is asked about, and nothing else has an effect.
    """
    wanted = options.get("sandbox")
    chosen = wanted if isinstance(wanted, str) and wanted in SANDBOXES else SANDBOX
    return READ_ONLY if policy == "allow-edits" and chosen == SANDBOX else chosen


def workspace_write(options: Mapping[str, Json], home: str) -> dict[str, Any]:
    """The ``sandbox_workspace_write`` of a thread: what differs from the account's own."""
    writable: dict[str, Any] = {}
    if home.startswith("/tmp/"):
        # Commands in the sandbox would write to the account's settings and to the programs of the sandbox itself.
        writable["exclude_slash_tmp"] = True
    if "network" in options:
        writable["network_access"] = options["network"] is True
    if roots := [as_str(each) for each in as_list(options.get("writable_roots"))]:
        writable["writable_roots"] = roots
    return writable


def profile(sandbox: str, writable: Mapping[str, Any], private: Iterable[str]) -> dict[str, Any]:
    """The profile of a thread: a sandbox mode, with its ``sandbox_workspace_write``, that cannot read ``private``."""
    paths = dict.fromkeys(private, "deny")
    made: dict[str, Any] = {"extends": BASES[sandbox], "filesystem": paths}
    if sandbox != SANDBOX:
        return made
    paths |= {root: "write" for root in map(as_str, as_list(writable.get("writable_roots"))) if root and root not in paths}
    if writable.get("exclude_slash_tmp") is True:
        paths[":slash_tmp"] = "read"
    if writable.get("exclude_tmpdir_env_var") is True:
        paths[":tmpdir"] = "read"
    if writable.get("network_access") is True:
        made["network"] = {"enabled": True}
    return made


def confined(params: Mapping[str, Any], own: Mapping[str, Any], private: Iterable[str]) -> dict[str, Any]:
    """The parameters of a thread with a profile in the place of its sandbox mode."""
    config = dict(params["config"])
    writable = {**as_dict(own.get("sandbox_workspace_write")), **config.pop("sandbox_workspace_write", {})}
    config["permissions"] = {PROFILE: profile(params["sandbox"], writable, private)}
    rest = {name: value for name, value in params.items() if name != "sandbox"}
    return {**rest, "permissions": PROFILE, "config": config}


def private_files(homes: Iterable[Path]) -> list[str]:
    """The real paths of the private files of accounts on this machine, whether they exist or not."""
    return list(dict.fromkeys(os.path.realpath(home / name) for home in homes for name in PRIVATE))
