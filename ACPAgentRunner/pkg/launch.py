"""Where an agent's process runs, behind one interface: a :class:`Launcher` starts a :class:`Command` in its place.

The interface is defined in :mod:`pkg.process_api` and offered here again; :class:`LocalLauncher` is this machine and account.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from pkg import runtime_support
from pkg.process_api import AgentProcess, Command, Exit, Graces, Launcher
from pkg.supervised_process import SupervisedProcess

__all__ = ["AgentProcess", "Command", "Exit", "Graces", "Launcher", "LocalLauncher"]


class LocalLauncher:
    """Starts agents on this machine, each under a supervisor of its own.

    ``recorded_path`` is a search path noted when the account's own shell was at hand (a service has a bare one). ``method``
    ``"sweep"`` forgoes the subreaper, as on systems that have none.
    """

    local = True

    def __init__(self, *, recorded_path: str = "", method: str = "auto") -> None:
        self._recorded_path = recorded_path
        self._method = method

    @property
    def machine(self) -> str:
        """``local-`` and a digest of account and home; two places of one installation with one home are one machine."""
        account = f"{os.getuid()}\0{runtime_support.home_directory()}"
        return "local-" + hashlib.sha256(account.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @property
    def label(self) -> str:
        """``user@host`` of this process (SSH names its places alike)."""
        return f"{runtime_support.account_name()}@{socket.gethostname()}"

    async def start(self, command: Command) -> SupervisedProcess:
        """Start the command under a supervisor.

        Raises :class:`pkg.errors.LaunchError`: ``coding.agent_not_found`` (knows where it was looked for),
        ``coding.agent_not_executable``, ``coding.workspace_missing``, ``coding.workspace_not_directory``,
        ``coding.workspace_not_readable``, ``coding.agent_start_failed``, ``coding.supervisor_failed``.
        """
        env = runtime_support.child_environment(command.env, recorded_path=self._recorded_path)
        directory = Path(command.cwd)
        executable = runtime_support.find_executable(command.argv[0] if command.argv else "", env["PATH"], cwd=directory)
        return await SupervisedProcess.start(
            executable,
            (executable, *command.argv[1:]),
            cwd=str(directory),
            env=env,
            graces=command.graces,
            secrets=runtime_support.secret_values(command.env),
            method=self._method,
        )

    async def reach(self, url: str) -> str:
        """The same address: the place is this machine."""
        return url

    async def close(self) -> None:
        """Nothing to give up."""
