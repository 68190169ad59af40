"""Real daemon processes for the suites: a policy file, key files, the program itself, and what it leaves in the open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pkg import limits
from pkg.agent_api import AgentEvent, Prompt, SessionSpec, TextDelta, TurnEnded
from pkg.daemon_relay import AgentRuntimeDaemonHub
from pkg.relay_protocol import RelayTimes, daemon_key, format_key
from pkg.remote_session import RemoteDriver, RemoteSession
from testkit import hostile_trees, package_roots
from testkit.relay_rig import TOKEN, WAIT, running_hub

DAEMON_ID = "laptop"
AGENT = Path(__file__).with_name("scripted_acp_agent.py")
TIMES = RelayTimes()
"""The product's own: agents are ended within them."""


class DaemonHome:
    """One workstation: its policy file, key, workspace and state, below one directory."""

    def __init__(
        self,
        directory: Path,
        url: str,
        *,
        token: str = TOKEN,
        agent: Mapping[str, Any] | None = None,
        driver: str = "acp",
        command: Sequence[str] = (),
        package: str = "",
        daemon_id: str = DAEMON_ID,
    ) -> None:
        """``agent`` configures the scripted agent; ``driver`` and ``command`` are those of another one, as is ``package``."""
        self.daemon_id = daemon_id
        self.directory = directory
        self.workspace = directory / "src"
        self.workspace.mkdir(parents=True)
        self.state = directory / "state"
        self.policy = directory / "daemon.toml"
        self.key = directory / "laptop.key"
        self.key.write_text(format_key(daemon_key(token, daemon_id)) + "\n")
        self.key.chmod(0o600)
        self.log = directory / "daemon.log"
        self.url = url
        self.agent = dict(agent or {})
        self.driver = driver
        self.command = tuple(command)
        self.package = package or package_roots.current()
        self.write()

    def write(self, extra: str = "", agent_extra: str = "") -> None:
        """(Re)write the policy file; ``extra`` are top-level lines, ``agent_extra`` the agent's."""
        command = self.command or (sys.executable, "-I", "-S", str(AGENT), json.dumps(self.agent))
        lines = [
            f'daemon_id = "{self.daemon_id}"',
            f"workspaces = [{json.dumps(str(self.workspace))}]",
            f"state_dir = {json.dumps(str(self.state))}",
            extra,
            "[[hubs]]",
            f"url = {json.dumps(self.url)}",
            'key_file = "laptop.key"',
            "[agents.scripted]",
            f"driver = {json.dumps(self.driver)}",
            f"command = {json.dumps(command)}",
            agent_extra,
        ]
        self.policy.write_text("\n".join(lines) + "\n")
        self.policy.chmod(0o600)

    def environment(self, **more: str) -> dict[str, str]:
        """What the daemon's own process gets."""
        return {"PATH": os.environ.get("PATH", ""), "HOME": str(self.directory), "LANG": "C.UTF-8", **more}


def program(package: str = "") -> Path:
    """The daemon program of a package, by default of the one this process tests."""
    imported = Path(sys.modules["pkg"].__file__ or "").resolve().parent.parent
    return package_roots.beside(imported, package or package_roots.current()) / "daemon.py"


async def run(
    arguments: Sequence[str], environment: Mapping[str, str], *, stdin: int = asyncio.subprocess.DEVNULL
) -> tuple[int, str]:
    """The program to its end: exit code, and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program()),
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(environment),
    )
    try:
        async with asyncio.timeout(WAIT):
            output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, output.decode()


class DaemonProcess:
    """``daemon.py run`` at work."""

    def __init__(self, home: DaemonHome, process: asyncio.subprocess.Process) -> None:
        self.home = home
        self.process = process

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL, and reaped."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def terminate(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT):
            return await self.process.wait()


async def start(home: DaemonHome, **environment: str) -> DaemonProcess:
    """A daemon process; it logs everything into its home."""
    with home.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program(home.package)),
            "run",
            "--policy",
            str(home.policy),
            "--log-level",
            "debug",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=home.environment(**environment),
        )
    return DaemonProcess(home, process)


@contextlib.asynccontextmanager
async def running(home: DaemonHome, **environment: str) -> AsyncIterator[DaemonProcess]:
    """A daemon process, stopped gently afterwards unless it is gone already."""
    daemon = await start(home, **environment)
    try:
        yield daemon
    finally:
        if daemon.process.returncode is None:
            await daemon.terminate()


@contextlib.asynccontextmanager
async def hub_and_home(tmp_path: Path, **agent: Any) -> AsyncIterator[tuple[AgentRuntimeDaemonHub, DaemonHome]]:
    """A hub, and a workstation that is set up for it."""
    async with running_hub(state_dir=tmp_path / "hub", times=TIMES) as hub:
        hub.lease_seconds = limits.RELAY_LEASE
        yield hub, DaemonHome(tmp_path / "home", hub.endpoint, agent=agent)


def remote(hub: AgentRuntimeDaemonHub, *, agent: str = "scripted", tools: Any = None) -> RemoteDriver:
    """The driver for the workstation's scripted agent."""
    return RemoteDriver(hub, DAEMON_ID, agent, "acp", tools=tools, connect_timeout=WAIT)


@contextlib.asynccontextmanager
async def opened(hub: AgentRuntimeDaemonHub, *, tools: Any = None, **fields: Any) -> AsyncIterator[RemoteSession]:
    """An open session on the workstation, closed afterwards."""
    fields.setdefault("cwd", "")
    session = await remote(hub, tools=tools).open(SessionSpec(command=(), **fields))
    try:
        yield session
    finally:
        await session.close()


async def following(session: RemoteSession, stop: Callable[[AgentEvent], bool]) -> list[AgentEvent]:
    """The events up to and including the first for which ``stop`` holds, or up to the stream's end."""
    events: list[AgentEvent] = []
    async with asyncio.timeout(WAIT):
        async for event in session.events():
            events.append(event)
            if stop(event):
                break
    return events


async def turn(session: RemoteSession, *lines: str) -> list[AgentEvent]:
    """One turn whose prompt is the script ``lines``."""
    async with asyncio.timeout(WAIT):
        await session.prompt(Prompt("\n".join(lines)))
    return await following(session, lambda event: isinstance(event, TurnEnded))


async def told_pids(session: RemoteSession) -> dict[int, str]:
    """The processes a script's ``child`` or ``hold`` line tells of, with their start times."""
    events = await following(session, lambda event: isinstance(event, TextDelta) and "agent=" in event.text)
    last = events[-1]
    assert isinstance(last, TextDelta)
    pids = [int(part.partition("=")[2]) for part in last.text.split()]
    found = {pid: hostile_trees.start_time(pid) for pid in pids}
    assert all(found.values())
    return found


def descendants(pid: int) -> list[int]:
    """Every living process below ``pid``."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = parents.get(pending.pop(), [])
        found += below
        pending += below
    return found
