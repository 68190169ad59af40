"""Whole sites: a worker of the built package with a hub of its own, and a user's machine with a real daemon for it.

A :class:`Site` is one installation's part of that: where its hub listens, its token, its :class:`testkit.daemon_rig.DaemonHome`
and whichever daemon process runs there now. A dedicated worker gets a HOME and a TMPDIR of its own and inherits nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from testkit import daemon_rig, hostile_trees
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.host_actions import HostActions
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, sdk_worker

BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""


def plugin_form(port: int, token: str, **more: Any) -> dict[str, Any]:
    """The plugin's settings of an installation whose hub listens on this port."""
    form = {"daemon-enabled": True, "daemon-host": "127.0.0.1", "daemon-port": port, "daemon-token": token}
    return {**form, **{name.replace("_", "-"): value for name, value in more.items()}}


def private(directory: Path) -> dict[str, str]:
    """A HOME and a TMPDIR that only one worker has."""
    places = {"HOME": directory / "home", "TMPDIR": directory / "tmp"}
    for place in places.values():
        place.mkdir(parents=True)
    return {name: str(place) for name, place in places.items()}


class Site:
    """One installation, its worker, and the machine its agents run on."""

    def __init__(
        self, worker: SdkWorker, directory: Path, port: int, token: str, *, uid: str = "A", url: str = "", **home: Any
    ) -> None:
        """``url`` is where the daemon finds the hub when something stands in between; ``home`` is for its ``DaemonHome``."""
        self.worker = worker
        self.uid = uid
        self.port = port
        self.token = token
        self.agent_log = directory / "agent.log"
        state = directory / "sessions"
        state.mkdir(parents=True)
        home.setdefault("agent", {"state": str(state), "log": str(self.agent_log)})
        self.home = DaemonHome(directory / "machine", url or f"ws://127.0.0.1:{port}", token=token, **home)
        self.daemon: DaemonProcess | None = None

    # ---- the machine

    async def start_daemon(self, **environment: str) -> DaemonProcess:
        """The daemon at work on this machine."""
        assert self.daemon is None or self.daemon.process.returncode is not None
        self.daemon = await daemon_rig.start(self.home, **environment)
        return self.daemon

    async def stop_daemon(self) -> None:
        """End it gently, when there is one."""
        if self.daemon is not None and self.daemon.process.returncode is None:
            await self.daemon.terminate()

    @property
    def daemon_pid(self) -> int:
        """The daemon's pid."""
        assert self.daemon is not None
        return self.daemon.pid

    def on_the_machine(self) -> list[int]:
        """The daemon and every process below it."""
        return [self.daemon_pid, *daemon_rig.descendants(self.daemon_pid)]

    def in_the_worker(self) -> list[int]:
        """The worker and every process below it."""
        pid = self.worker.pid(self.uid)
        return [pid, *daemon_rig.descendants(pid)]

    def received(self) -> list[dict[str, Any]]:
        """Every message the machine's agents got."""
        return [json.loads(line) for line in self.agent_log.read_text().splitlines()] if self.agent_log.exists() else []

    def methods(self) -> list[str]:
        """What the agents were asked for, in order."""
        return [str(message["method"]) for message in self.received() if "method" in message]

    def prompts(self) -> list[str]:
        """The scripts the agents were given."""
        asked = [message["params"]["prompt"] for message in self.received() if message.get("method") == "session/prompt"]
        texts = [block["text"] for prompt in asked for block in prompt if block["type"] == "text"]
        return [text for text in texts if not text.startswith("<host-context>")]

    def servers(self) -> list[dict[str, Any]]:
        """The MCP servers that the newest session was opened with."""
        opened = [message["params"]["mcpServers"] for message in self.received() if "mcpServers" in message.get("params", {})]
        return list(opened[-1])

    # ---- the chat

    @property
    def host(self) -> HostActions:
        """The host that answers this installation's runs."""
        return self.worker.host(self.uid)

    def form(self, **fields: Any) -> dict[str, Any]:
        """A runner form for the machine's agent; ``fields`` with underscores for hyphens."""
        form = {"provider": "custom", "location": "daemon", "daemon-id": DAEMON_ID, "langbot-assets-enabled": False}
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def stream(self, text: str, *, form: Mapping[str, Any] | None = None, **more: Any) -> AsyncGenerator[RunnerResult, None]:
        """The results of one run as they come; closing the iterator cancels the run as the host does."""
        return self.worker.stream(text, uid=self.uid, config=self.form(**(form or {})), **more)

    async def run(self, text: str, *, form: Mapping[str, Any] | None = None, **more: Any) -> Outcome:
        """One run to its end."""
        async with asyncio.timeout(BOUND):
            return Outcome([result async for result in self.stream(text, form=form, **more)])

    def start(self, text: str, *, form: Mapping[str, Any] | None = None, **more: Any) -> asyncio.Task[Outcome]:
        """One run as a task."""
        return asyncio.get_running_loop().create_task(self.run(text, form=form, **more))

    async def join(self, **environment: str) -> None:
        """Start the hub by a first run and the daemon beside it, and see that they work together."""
        first = self.start("say here", form={"keep_warm": 0})
        await self.start_daemon(**environment)
        assert (await first).shown[-1] == "here"


@contextlib.asynccontextmanager
async def site(
    directory: Path,
    token: str,
    *,
    port: int = 0,
    url: str = "",
    environment: Mapping[str, str] | None = None,
    plugin: Mapping[str, Any] | None = None,
) -> AsyncIterator[Site]:
    """A dedicated worker with one installation, ``A``, and its machine without a daemon yet."""
    port = port or free_port()
    given = {**private(directory / "worker"), **(environment or {})}
    forms = {"A": plugin_form(port, token, **(plugin or {}))}
    async with sdk_worker(built(), directory / "runtime", installations=forms, environment=given) as worker:
        made = Site(worker, directory, port, token, url=url)
        try:
            yield made
        finally:
            await made.stop_daemon()


async def until_shown(stream: AsyncGenerator[RunnerResult, None], shown: str) -> list[RunnerResult]:
    """Read a run until a result holds ``shown``; what came."""
    results: list[RunnerResult] = []
    async with asyncio.timeout(BOUND):
        async for result in stream:
            results.append(result)
            if shown in json.dumps(result.data, ensure_ascii=False):
                return results
    raise AssertionError(f"{shown!r} never came: {[each.data for each in results]}")


def told_processes(results: list[RunnerResult]) -> dict[int, str]:
    """The processes that a script's ``child`` line told of, with their start times."""
    found = re.findall(r"(?:child|agent)=(\d+)", json.dumps(results[-1].data))
    processes = {int(pid): hostile_trees.start_time(int(pid)) for pid in found}
    assert len(processes) == 2
    assert all(processes.values())
    return processes


# ------------------------------------------------------------------ what can be seen from outside


def listening(pid: int) -> set[tuple[str, int]]:
    """The TCP addresses a process listens on."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = set()
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                raw = bytes.fromhex(address)
                assert len(address) == size
                host = ".".join(str(byte) for byte in reversed(raw)) if name == "tcp" else raw.hex()
                found.add((host, int(port, 16)))
    return found


def environments(pids: list[int]) -> bytes:
    """The environments of these processes, those that have ended meanwhile left out."""
    return _read(pids, "environ")


def command_lines(pids: list[int]) -> bytes:
    """The command lines of these processes, those that have ended meanwhile left out."""
    return _read(pids, "cmdline")


def _read(pids: list[int], name: str) -> bytes:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/{name}").read_bytes())
    return b"\n".join(found)


def files_below(*directories: Path) -> dict[Path, bytes]:
    """Every regular file below these directories with what it holds."""
    found = {}
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for path in (Path(folder) / name for name in names):
                if path.is_file() and not path.is_symlink():
                    found[path] = path.read_bytes()
    return found


def forms_of(secret: str) -> list[bytes]:
    """The shapes in which a secret could be somewhere: raw, hex, URL-quoted, and base64 at each of its three alignments."""
    raw = secret.encode()
    quoted = "".join(f"%{byte:02X}" for byte in raw)
    forms = {raw, raw.hex().encode(), raw.hex().upper().encode(), quoted.encode(), quoted.lower().encode()}
    forms |= {urllib.parse.quote(secret).encode(), urllib.parse.quote(secret, safe="").encode()}
    forms |= {urllib.parse.quote_plus(secret).encode()}
    forms.add(json.dumps(secret)[1:-1].encode())
    for shift in range(3):
        padded = base64.b64encode(b"\0" * shift + raw)
        inner = padded[4 if shift else 0 :].rstrip(b"=")[:-1]
        forms |= {inner, inner.translate(bytes.maketrans(b"+/", b"-_"))}
    return sorted(forms)


def holds(places: bytes, secret: str) -> bool:
    """Whether a secret is there in any of its forms."""
    return any(form in places for form in forms_of(secret))
