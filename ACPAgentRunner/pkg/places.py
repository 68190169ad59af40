"""Where a run's agent lives, decided from the form and the kind of worker: launcher, workspace and what follows from them.

``local`` is this machine (refused in the shared pool, which has neither processes nor a disk of its own per installation),
``remote-ssh`` another account over SSH (allowed everywhere, in the pool with nothing of the worker's own account), ``daemon`` a
user's own machine, whose daemon alone knows command lines and directories (allowed everywhere).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pkg import runtime_support
from pkg.approval_policy import Inside, Resolve, inside_lexically, inside_really, names_lexically, names_really
from pkg.errors import Refused
from pkg.hubs import DaemonWay, daemon_way
from pkg.identity import Authority
from pkg.launch import Launcher, LocalLauncher
from pkg.launch_ssh import SshLauncher, SshTarget
from pkg.remote_session import DaemonPlace
from pkg.settings import PluginSettings, RunnerSettings


@dataclass(frozen=True, slots=True)
class Place:
    """A place for one run."""

    launcher: Launcher
    workspace: str
    may_keep: bool
    """Whether a session may stay alive here between messages."""
    locks: tuple[str, ...] = ()
    """What only one run at a time may have."""
    way: str = ""
    """A digest of all that the way there was set up with: a kept session is not used after one of it changed."""
    daemon: DaemonWay | None = None
    """How a daemon is reached, where sessions are opened by one."""
    worktree: str = ""
    """The worktree of the workspace that a daemon is asked to work in."""


def place_of(
    settings: RunnerSettings, plugin: PluginSettings, config: Mapping[str, Any], authority: Authority, product: str
) -> Place:
    """The place the form asks for; raises :class:`pkg.errors.CodingError` when it can't be had.

    ``config`` is the plugin's form as it is stored, ``product`` the name under which the package's hub is known.
    """
    launcher: Launcher
    daemon = None
    way = ""
    if settings.location == "daemon":
        daemon = daemon_way(settings, plugin, config, authority, product)
        workspace = settings.workspace
        launcher = DaemonPlace(settings.daemon_id)
        way = f"agent {settings.daemon_agent}"
    elif settings.location == "local":
        if authority.pooled:
            raise Refused("coding.local_in_pool")
        workspace = str(runtime_support.local_workspace(settings.workspace))
        launcher = LocalLauncher()
    else:
        workspace = settings.workspace
        target = _target(settings, plugin, authority)
        launcher = SshLauncher(target)
        way = hashlib.sha256(json.dumps(dataclasses.asdict(target)).encode("ascii")).hexdigest()
    exclusive = settings.workspace_mode == "exclusive"
    locks = (f"workspace {launcher.machine} {workspace}",) if exclusive else ()
    # In the pool a session may only be kept where nothing of it is in the worker.
    keep = daemon is not None or not authority.pooled
    return Place(launcher, workspace, may_keep=keep, locks=locks, way=way, daemon=daemon)


def inside_of(launcher: Launcher, directory: str) -> Inside:
    """How to judge whether a path an agent names lies inside its working directory, given as its place names it."""
    return inside_really(directory) if launcher.local else inside_lexically(directory)


def names_of(launcher: Launcher, directory: str) -> Resolve:
    """How to tell the names of a file that an agent works on, for rules about files."""
    return names_really(directory) if launcher.local else names_lexically(directory)


def _target(settings: RunnerSettings, plugin: PluginSettings, authority: Authority) -> SshTarget:
    return SshTarget(
        target=settings.ssh_target,
        port=settings.ssh_port,
        identity_file=settings.ssh_identity_file,
        known_hosts=settings.ssh_known_hosts,
        connect_timeout=settings.ssh_connect_timeout,
        extra_options=settings.ssh_extra_options,
        allow_local_commands=settings.ssh_allow_local_commands,
        private_key=plugin.ssh_private_key_secret.get_secret_value(),
        shared_worker=authority.pooled,
    )
