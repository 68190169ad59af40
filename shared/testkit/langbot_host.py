"""The real LangBot host and its plugin runtime as test processes, with the clients a person would use.

:class:`LangBotHost` starts both on free ports of 127.0.0.1 in a directory of its own, installs packages over HTTP, makes
pipelines, agents and bots, and stops everything in order (host, then runtime). :class:`WebChat` is the dashboard's chat,
:meth:`LangBotHost.agent_events` the agents' debug stream; Telegram is :mod:`testkit.fake_telegram`.

Nothing here is shipped; the host is imported by its own interpreter only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
import yaml

READY_SECONDS: Final = 240.0
"""The host needs 18 to 31 s alone; the machine may be busy."""

INSTALL_SECONDS: Final = 300.0
STOP_SECONDS: Final = 60.0
NOTICES: Final = ("Agent runner execution failed.", "Agent runner temporarily unavailable.", "Request failed.")
"""What the host itself shows instead of a run that failed."""

_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT", "REQUESTS_CA_BUNDLE")
_PR_SET_PDEATHSIG: Final = 1


class HostError(RuntimeError):
    """The host, its runtime or its API did not do what it should; the text has the end of the logs."""


# ------------------------------------------------------------------ processes


def processes() -> dict[int, tuple[int, int]]:
    """Every living process: pid to (parent pid, start time in clock ticks). Zombies are not living."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                rest = (entry / "stat").read_text().rpartition(")")[2].split()
                if rest[0] != "Z":
                    found[int(entry.name)] = (int(rest[1]), int(rest[19]))
    return found


def descendants(pid: int) -> set[tuple[int, int]]:
    """Pid and start time of every living process below ``pid``."""
    table = processes()
    found: set[tuple[int, int]] = set()
    wanted = {pid}
    while wanted:
        wanted = {child for child, (parent, _) in table.items() if parent in wanted}
        found |= {(child, table[child][1]) for child in wanted}
    return found


def connected_to(root: Path) -> set[tuple[int, int]]:
    """Living processes (without this one) whose directory or command line is inside ``root``."""
    found = set()
    for pid, (_, started) in processes().items():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(root) in command or str(Path(f"/proc/{pid}/cwd").readlink()).startswith(str(root)):
                found.add((pid, started))
    return found


def living(known: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of ``known`` that still run."""
    table = processes()
    return {(pid, started) for pid, started in known if pid in table and table[pid][1] == started}


def gone(known: set[tuple[int, int]], seconds: float) -> bool:
    """Wait until none of ``known`` runs."""
    end = time.monotonic() + seconds
    while living(known):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Process:
    """One server in a session of its own, its output in a file, ended with this process at the latest."""

    def __init__(self, name: str, command: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        """Starts it."""
        self.name = name
        self.log = cwd.parent / f"{name}.log"
        cwd.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def tail(self, lines: int = 40) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise :class:`HostError` if it has ended."""
        if self.process.poll() is not None:
            raise HostError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def stop(self) -> int:
        """SIGTERM, wait, SIGKILL; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that were free on 127.0.0.1 a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


# ------------------------------------------------------------------ packages


def build_package(source: Path, scratch: Path) -> Path:
    """A ``.lbpkg`` of the plugin in ``source``, made by the SDK's own builder from a copy inside ``scratch``."""
    copy = scratch / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", ".mypy_cache", ".ruff_cache"))
    done = subprocess.run(
        [sys.executable, "-m", "langbot_plugin.cli.__init__", "build"], cwd=copy, capture_output=True, text=True, check=False
    )
    built = list((copy / "dist").glob("*.lbpkg"))
    if done.returncode or len(built) != 1:
        raise HostError(f"lbp build failed:\n{done.stdout}\n{done.stderr}")
    return built[0]


def package_identity(package: Path) -> tuple[str, str]:
    """Author and name of a built package."""
    with zipfile.ZipFile(package) as archive:
        metadata = yaml.safe_load(archive.read("manifest.yaml"))["metadata"]
    return str(metadata["author"]), str(metadata["name"])


# ------------------------------------------------------------------ the host


class LangBotHost:
    """One host and one runtime; use as a context manager."""

    def __init__(self, python: Path, root: Path, telegram: str = "http://127.0.0.1:9") -> None:
        """``python`` has the host, ``root`` is an empty directory of ours, ``telegram`` a Bot API's address."""
        self.python, self.root, self.telegram = python, root, telegram
        self.api = httpx.Client(timeout=60, trust_env=False)
        self.login = ""
        self.workspace = ""
        self.url = ""
        self._names = itertools.count(1)
        self._processes: list[Process] = []
        self._seen: set[tuple[int, int]] = set()

    def __enter__(self) -> LangBotHost:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def host(self) -> Process:
        """The host's process."""
        return self._processes[1]

    @property
    def runtime(self) -> Process:
        """The plugin runtime's process; workers are its children."""
        return self._processes[0]

    def _start(self) -> None:
        http, control, debug = free_ports(3)
        here = Path(__file__).parent
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        home = self.root / "home"
        home.mkdir()
        env |= {"HOME": str(home), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"LANGBOT_PLUGIN_RUNTIME_CONTROL_TOKEN": secrets.token_urlsafe(48)}
        ports = ["--ws-control-port", str(control), "--ws-debug-port", str(debug)]
        self._processes.append(
            Process("runtime", [str(self.python), str(here / "rt_loopback.py"), *ports], self.root / "runtime", env)
        )
        settings = {
            "API__HOST": "127.0.0.1",
            "API__PORT": str(http),
            "API__WEBHOOK_PREFIX": f"http://127.0.0.1:{http}",
            "PLUGIN__RUNTIME_WS_URL": f"ws://127.0.0.1:{control}/control/ws",
            "PLUGIN__DISPLAY_PLUGIN_DEBUG_URL": f"ws://127.0.0.1:{debug}/plugin/debug/ws",
            "PLUGIN__ENABLE_MARKETPLACE": "false",
            "SPACE__DISABLE_TELEMETRY": "true",
            "SPACE__DISABLE_MODELS_SERVICE": "true",
            "SPACE__URL": "http://127.0.0.1:9",
            "BOX__ENABLED": "false",
            "MCP__STDIO__ENABLED": "false",
            "FAKE_TELEGRAM": self.telegram,
        }
        command = [str(self.python), str(here / "host_entry.py"), "--standalone-runtime"]
        self._processes.append(Process("host", command, self.root / "host", env | settings))
        self.url = f"http://127.0.0.1:{http}"
        self.api.base_url = httpx.URL(self.url)
        self._wait(self._connected, READY_SECONDS, "the host did not become ready")
        account = {"user": "admin@test.invalid", "password": secrets.token_urlsafe(16)}
        self.call("POST", "/api/v1/user/init", json=account)
        self.login = self.call("POST", "/api/v1/user/auth", json=account)["token"]
        self.api.headers["Authorization"] = f"Bearer {self.login}"
        workspaces = self.call("GET", "/api/v1/workspaces/bootstrap")["workspaces"]
        self.workspace = workspaces[0]["workspace"]["uuid"]
        self.api.headers["X-Workspace-Id"] = self.workspace

    def _connected(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return bool(self.api.get("/healthz", timeout=5).json()["resources"]["runtimes"]["plugin_runtime_connected"])
        return False

    def _wait(self, holds: Callable[[], bool], seconds: float, problem: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            for process in self._processes:
                process.check()
            if time.monotonic() > end:
                logs = "\n".join(f"--- {process.name}\n{process.tail()}" for process in self._processes)
                raise HostError(f"{problem}\n{logs}")
            time.sleep(0.2)

    def watch(self) -> None:
        """Remember every process that exists below host and runtime now, for :meth:`leftovers`."""
        for process in self._processes:
            self._seen |= descendants(process.pid)
        self._seen |= connected_to(self.root)

    def leftovers(self, seconds: float = 15.0) -> set[tuple[int, int]]:
        """After :meth:`stop`: what still runs of everything that was seen or works inside our directory."""
        gone(self._seen | connected_to(self.root), seconds)
        return living(self._seen | connected_to(self.root))

    def stop(self) -> list[int]:
        """End the host, then the runtime (which ends its workers); their exit codes."""
        self.watch()
        self.api.close()
        return [process.stop() for process in reversed(self._processes)]

    # ---- its API

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One API call; the ``data`` of its answer."""
        response = self.api.request(method, path, **options)
        try:
            body = response.json()
        except ValueError:
            raise HostError(f"{method} {path}: {response.status_code} {response.text[:300]}") from None
        if response.status_code >= 400 or body.get("code") not in (0, None):
            raise HostError(f"{method} {path}: {response.status_code} {body}")
        return body.get("data")

    def install(self, package: Path) -> str:
        """Install a package over HTTP as the dashboard does and wait for its runner; the runner's id."""
        author, name = package_identity(package)
        with package.open("rb") as handle:
            task = self.call("POST", "/api/v1/plugins/install/local", files={"file": (package.name, handle)})["task_id"]

        def installed() -> bool:
            state = self.call("GET", f"/api/v1/system/tasks/{task}")["runtime"]
            if state["done"] and state["exception"]:
                raise HostError(f"the installation failed: {state['exception']}\n{self.runtime.tail()}")
            return bool(state["done"])

        self._wait(installed, INSTALL_SECONDS, "the installation did not end")
        runner = f"plugin:{author}/{name}/default"
        self._wait(lambda: runner in self.runners(), 120, f"{runner} is not offered")
        return runner

    def configure(self, runner: str, config: Mapping[str, Any]) -> None:
        """Save the plugin's own form; the host replaces the worker for it. Returns when the new one serves."""
        author, name = runner.removeprefix("plugin:").split("/")[:2]
        old = self.worker(name)
        self.call("PUT", f"/api/v1/plugins/{author}/{name}/config", json=dict(config))
        self._wait(lambda: self.worker(name) not in (0, old), 120, "the worker was not replaced")

        def serves() -> bool:
            response = self.api.get(f"/api/v1/plugins/{author}/{name}")
            return response.status_code == 200 and response.json()["data"]["plugin"].get("status") == "initialized"

        self._wait(serves, 120, "the replaced worker does not serve")

    def worker(self, name: str) -> int:
        """The pid of the worker of plugin ``name``, 0 when there is none."""
        for pid, (parent, _) in processes().items():
            if parent == self.runtime.pid:
                with contextlib.suppress(OSError):
                    if f"/{name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
        return 0

    def runners(self) -> dict[str, dict[str, Any]]:
        """The runners the host offers, each with the defaults of its form."""
        groups = self.call("GET", "/api/v1/pipelines/_/metadata")["configs"]
        stages = next(group for group in groups if group["name"] == "ai")["stages"]
        chooser = next(item for item in stages[0]["config"] if item["name"] == "id")
        forms = {stage["name"]: {item["name"]: item.get("default") for item in stage["config"]} for stage in stages}
        return {option["name"]: forms.get(option["name"], {}) for option in chooser.get("options") or []}

    def _chosen(self, runner: str, form: Mapping[str, Any]) -> dict[str, Any]:
        filled = {**self.runners()[runner], **form}
        return {"runner": {"id": runner, "expire-time": 0}, "runner_config": {runner: filled}}

    def pipeline(self, runner: str, form: Mapping[str, Any]) -> str:
        """A new pipeline that answers with ``runner``; ``form`` over the form's defaults (the host fills none)."""
        pipeline = self.call("POST", "/api/v1/pipelines", json={"name": f"pipeline {next(self._names)}"})["uuid"]
        config = self.call("GET", f"/api/v1/pipelines/{pipeline}")["pipeline"]["config"]
        config["ai"] = self._chosen(runner, form)
        config["trigger"]["group-respond-rules"]["random"] = 1.0
        self.call("PUT", f"/api/v1/pipelines/{pipeline}", json={"config": config})
        return str(pipeline)

    def agent(self, runner: str, form: Mapping[str, Any]) -> str:
        """A new agent that answers with ``runner``."""
        body = {
            "name": f"agent {next(self._names)}",
            "kind": "agent",
            "supported_event_patterns": ["*"],
            "config": self._chosen(runner, form),
        }
        return str(self.call("POST", "/api/v1/agents", json=body)["uuid"])

    def telegram_bot(self, *, pipeline: str = "", agent: str = "", streaming: bool = True) -> str:
        """A running Telegram bot for a pipeline or an agent; the token the fixture knows it by."""
        token = f"{5000 + next(self._names)}:fixture"
        binding: dict[str, Any] = {
            "event_pattern": "message.received" if pipeline else "*",
            "target_type": "pipeline" if pipeline else "agent",
            "target_uuid": pipeline or agent,
            "filters": [],
            "enabled": True,
        }
        body = {
            "name": f"bot {token}",
            "description": "",
            "adapter": "telegram-omni",
            "enable": False,
            "adapter_config": {"token": token, "markdown_card": False, "enable-stream-reply": streaming},
            "event_bindings": [binding],
        }
        bot = self.call("POST", "/api/v1/platform/bots", json=body)["uuid"]
        self.call("PUT", f"/api/v1/platform/bots/{bot}", json={"enable": True})  # created is not started
        return token

    # ---- its chats

    @contextlib.asynccontextmanager
    async def web_chat(self, pipeline: str, *, streaming: bool = True) -> AsyncIterator[WebChat]:
        """The dashboard's chat with a pipeline, in a conversation of its own."""
        address = f"{self.url}/api/v1/pipelines/{pipeline}/ws/connect?session_type=person"
        async with (
            aiohttp.ClientSession(trust_env=False) as http,
            http.ws_connect(address, origin=self.url, max_msg_size=64 * 1024 * 1024) as socket_,
        ):
            await socket_.send_json({"type": "authenticate", "token": self.login, "workspace_uuid": self.workspace})
            chat = WebChat(socket_, streaming)
            reader = asyncio.create_task(chat.read())
            try:
                await chat.until(lambda: chat.connected, 30)
                yield chat
            finally:
                reader.cancel()
                await asyncio.wait({reader})

    async def agent_events(self, agent: str, text: str, seconds: float = 120) -> list[dict[str, Any]]:
        """One message to an agent over its debug stream: the raw results, then what the host made of them."""
        address = f"{self.url}/api/v1/agents/{agent}/debug/stream"
        headers = {"Authorization": f"Bearer {self.login}", "X-Workspace-Id": self.workspace}
        body = {"event_type": "message.received", "text": text}
        async with (
            aiohttp.ClientSession(trust_env=False, read_bufsize=2**24) as http,
            http.post(address, json=body, headers=headers, timeout=aiohttp.ClientTimeout(seconds)) as answer,
        ):
            answer.raise_for_status()
            lines = (await answer.text()).splitlines()
        return [json.loads(line) for line in lines if line.strip()]


@dataclass
class Bubble:
    """One message in the web chat: every text it ever showed, and whether the host closed it."""

    texts: list[str] = field(default_factory=list)
    final: bool = False

    @property
    def text(self) -> str:
        """What people read now."""
        return self.texts[-1] if self.texts else ""


class WebChat:
    """The person's side of the dashboard's chat: bubbles in the order in which they appeared."""

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse, streaming: bool) -> None:
        """Made by :meth:`LangBotHost.web_chat`, which also runs :meth:`read`."""
        self.connected = False
        self.errors: list[str] = []
        self._socket = socket_
        self._streaming = streaming
        self._bubbles: dict[Any, Bubble] = {}
        self._changed = asyncio.Condition()

    @property
    def bubbles(self) -> list[Bubble]:
        """All messages of the runner, oldest first."""
        return list(self._bubbles.values())

    async def say(self, text: str, *more: Mapping[str, Any]) -> None:
        """Write a message; ``more`` are further parts of it as the dashboard sends them (an ``Image``, a ``File``)."""
        message = [{"type": "Plain", "text": text}, *more]
        await self._socket.send_json({"type": "message", "stream": self._streaming, "message": message})

    async def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until ``holds()``; raises :class:`HostError` with what is to be seen when it does not in time."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError:
            seen = [(len(each.text), each.final, each.text[:200]) for each in self.bubbles]
            raise HostError(f"the chat did not get there in {seconds} s: {seen} {self.errors}") from None

    async def answers(self, count: int, seconds: float = 90) -> list[Bubble]:
        """Wait for ``count`` closed bubbles in all; all bubbles then."""
        await self.until(lambda: sum(each.final for each in self.bubbles) >= count, seconds)
        return self.bubbles

    async def rest(self, seconds: float = 1.5) -> None:
        """Wait until nothing changes for ``seconds`` (for what must *not* come)."""
        while True:
            before = self._seen()

            def moved(seen: list[tuple[str, bool]] = before) -> bool:
                return self._seen() != seen

            try:
                async with asyncio.timeout(seconds), self._changed:
                    await self._changed.wait_for(moved)
            except TimeoutError:
                return

    def _seen(self) -> list[tuple[str, bool]]:
        return [(each.text, each.final) for each in self.bubbles]

    async def read(self) -> None:
        """Take what the host sends until the connection closes."""
        async for frame in self._socket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                continue
            message = json.loads(frame.data)
            data = message.get("data") or {}
            async with self._changed:
                if message.get("type") == "connected":
                    self.connected = True
                elif message.get("type") == "error":
                    self.errors.append(str(message.get("message")))
                elif message.get("type") == "response":
                    bubble = self._bubbles.setdefault(data.get("id"), Bubble())
                    bubble.texts.append(str(data.get("content") or ""))
                    bubble.final = bubble.final or bool(data.get("is_final"))
                self._changed.notify_all()
