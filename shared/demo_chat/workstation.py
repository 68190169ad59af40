"""The person's own machine in the demo: a real daemon process, its policy file and key, and a path to the hub that can be cut.

Everything it needs lies below one directory of the demo's: the policy file names the one agent, the one workspace and the one
approval policy that the person chose on the command line, the key can only be this daemon's, and the state goes with the
directory. The daemon runs under a supervisor of its own, which ends it and every agent of it when the demo is gone, however.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pkg import limits
from pkg.daemon_policy import PolicyError, load
from pkg.errors import AgentDied
from pkg.launch import Command, Graces, LocalLauncher
from pkg.process_api import AgentProcess
from pkg.relay_auth import daemon_key, format_key
from pkg.settings import RunnerSettings
from pkg.supervised_process import stopped
from testkit.cutting_proxy import CuttingProxy
from testkit.langbot_host import free_ports
from tooling import SetupError

NAME = "demo-machine"
"""The daemon's id, what the runner's form calls this machine."""
AGENT = "demo"
"""The agent's name in the policy file."""
KEY = "daemon.key"
LONGEST_BLIP = limits.RELAY_LEASE - 20
"""Seconds; a job outlives its connection by the lease, and connecting again takes a few seconds of it."""
GRACES = Graces(eof=0.0, term=limits.RELAY_CANCEL)
"""The daemon does not read its stdin; on SIGTERM it ends its jobs in order."""
START = 'exec "$0" "$@" 2>&1'
"""The daemon talks on stderr; here it is read line by line."""


def program(package: Path) -> tuple[str, ...]:
    """The daemon program of a package, for Python's command line."""
    return (str(package / "daemon.py"),)


class Workstation:
    """One machine with one daemon, before and while it runs."""

    def __init__(
        self,
        directory: Path,
        *,
        package: Path,
        drivers: Sequence[str],
        command: Sequence[str],
        workspace: Path,
        approval: str,
        environment: Mapping[str, str],
        shared: Sequence[str],
        blip: float | None,
        tell: Callable[[str], None],
    ) -> None:
        """``package`` is where the daemon program of the plugin's package lies, ``drivers`` what it can drive.

        ``environment`` is the daemon's own, and those of its names that ``shared`` has reach the agent.

        ``blip`` is how many seconds the path is cut in every answer, ``tell`` takes a line for the person.
        """
        self._directory = directory
        self._program = program(package)
        self._drivers = tuple(drivers)
        self._policy = directory / "daemon.toml"
        self._command = tuple(command)
        self._workspace = workspace
        self._approval = approval
        self._environment = dict(environment)
        self._shared = tuple(shared)
        self._blip = blip
        self._tell = tell
        self._port = free_ports(1)[0]
        self._token = secrets.token_urlsafe(32)
        self._proxy: CuttingProxy | None = None
        self._cut: asyncio.Task[None] | None = None
        self._connected = False

    def __repr__(self) -> str:
        return f"Workstation({NAME!r})"

    @property
    def plugin_form(self) -> dict[str, Any]:
        """What the plugin form says of the hub."""
        return {
            "daemon-enabled": True,
            "daemon-host": "127.0.0.1",
            "daemon-port": self._port,
            "daemon-token": self._token,
        }

    @property
    def runner_form(self) -> dict[str, Any]:
        """What the runner form says of this machine: the agent's command line and environment are not among it."""
        return {"location": "daemon", "daemon-id": NAME, "daemon-agent": AGENT, "workspace": ""}

    # -------------------------------------------------------------- life

    def prepare(self) -> None:
        """Write the daemon's key and its policy file; raises :class:`tooling.SetupError` for what a policy cannot allow."""
        self._directory.mkdir(mode=0o700)
        key = self._directory / KEY
        key.touch(mode=0o600)
        key.write_text(format_key(daemon_key(self._token, NAME)) + "\n", encoding="ascii")
        self._allow(f"ws://127.0.0.1:{self._port}")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The daemon at work, after :meth:`prepare`; gone with everything it started afterwards."""
        async with contextlib.AsyncExitStack() as stack:
            url = f"ws://127.0.0.1:{self._port}"
            if self._blip is not None:
                self._proxy = await stack.enter_async_context(CuttingProxy(("127.0.0.1", self._port), record=False))
                url = self._proxy.url
                self._allow(url)
            argv = ("/bin/sh", "-c", START, sys.executable, *self._program, "run", "--policy", str(self._policy))
            command = Command(argv, str(self._directory), self._environment, GRACES)
            process = await LocalLauncher().start(command)
            try:
                self._tell(f"daemon {NAME} started as process {process.pid}, its policy file allows {self._approval}")
                following = asyncio.create_task(self._follow(process, url))
                try:
                    yield
                finally:
                    following.cancel()
                    await asyncio.wait({following})
            finally:
                await self._restored()
                await stopped(process)

    def _allow(self, url: str) -> None:
        """Write the policy file for the hub at this address, and look at it as the daemon will."""
        lines = (
            f"daemon_id = {_toml(NAME)}",
            f"workspaces = {_toml([str(self._workspace)])}",
            f"environment = {_toml(self._shared)}",
            f"approvals = {_toml([self._approval])}",
            f"state_dir = {_toml(str(self._directory / 'state'))}",
            "[[hubs]]",
            f"url = {_toml(url)}",
            f"key_file = {_toml(KEY)}",
            f"[agents.{AGENT}]",
            f"command = {_toml(self._command)}",
        )
        self._policy.touch(mode=0o600)
        try:
            self._policy.write_text("\n".join(lines) + "\n", encoding="utf-8")
            load(self._policy, self._drivers, RunnerSettings.policies)
        except UnicodeEncodeError:
            raise SetupError("A policy file can only name what is UTF-8: the directory or the command is not.") from None
        except PolicyError as exc:
            raise SetupError(f"A daemon's policy file cannot allow this: {exc.key} {exc.problem}.") from None

    async def _follow(self, process: AgentProcess, url: str) -> None:
        """Pass the daemon's log on to ours, and tell what it says of its connection."""
        rest = b""
        last = ""
        while data := await process.read():
            os.write(2, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                last = line.decode(errors="replace")
                if last.endswith(f" {url}: connected"):
                    self._tell(f"daemon {NAME} connected{' again' if self._connected else ''}")
                    self._connected = True
        with contextlib.suppress(AgentDied):
            await process.wait()
        self._tell(f"daemon {NAME} has ended: {last}")

    # -------------------------------------------------------------- the path

    def answer_begun(self) -> None:
        """Something of an answer has arrived: cut the path, unless that was done in this answer."""
        if self._blip is not None and self._proxy is not None and self._cut is None:
            self._cut = asyncio.create_task(self._cut_for(self._proxy, self._blip))

    async def answer_ended(self) -> None:
        """Wait until the path is back; the next answer is cut again."""
        if self._cut is not None:
            await self._cut
            self._cut = None

    async def _cut_for(self, proxy: CuttingProxy, seconds: float) -> None:
        count = proxy.cut()
        self._tell(f"connection cut for {seconds:g} s" if count else f"no connection yet, and none for {seconds:g} s")
        try:
            await asyncio.sleep(seconds)
        finally:
            proxy.restore()
        self._tell("connection back")

    async def _restored(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            await asyncio.wait({self._cut})


def _toml(value: str | Sequence[str]) -> str:
    """A text or a list of texts as TOML writes it; JSON escapes all but DEL as TOML does."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
