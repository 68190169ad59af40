"""Looks at the objects of a worker from inside: whose each is, where a tenant's text is, what there is of tasks and files.

:func:`watched` gives the environment of a worker that can be asked, :class:`Watch` asks it. The worker is asked by a signal;
the look itself is a callback of the worker's own loop, so that no run is in the middle of a step. It is made by this file and
:mod:`testkit.object_graph`, copied beside a ``sitecustomize`` that no package ships.

:data:`OWNED` is everything of an installation that may be found in a process which serves others, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

Found = TypeVar("Found")
Between = Callable[[], Awaitable[object]]

BOUND: Final = 60.0
"""Seconds a look may take, which is about two."""
SDK_THREADS: Final = "thread langbot-plugin-worker-blocking_N"
"""The SDK's own executor, which starts its few threads as they are needed and keeps them."""
ASKED: Final = signal.SIGUSR2
PLACE: Final = "OBJECT_GRAPH"
"""The variable with the directory in which questions and answers lie."""

_SITE: Final = """
import worker_graph
worker_graph.listen()
"""


# ------------------------------------------------------------------ in the worker: what belongs to an installation

Entry = Callable[[Any, Any], str | None]


def uid_of(key: Any) -> str | None:
    """The installation of a binding, ``None`` for what is none."""
    uid = getattr(key, "installation_uuid", None)
    return uid if isinstance(uid, str) else None


def _by_binding(key: Any, _value: Any) -> str | None:
    return uid_of(key)


def _registries_of_runs() -> Iterator[tuple[dict[Any, Any], Entry]]:
    yield sys.modules["pkg.installations"]._installations, _by_binding
    yield sys.modules["pkg.installations"]._revocations, _by_binding


def _work() -> Iterator[tuple[str, Any]]:
    for key, installation in sys.modules["pkg.installations"]._installations.items():
        for task in installation._work:
            yield str(uid_of(key)), task
    for key, task in sys.modules["pkg.installations"]._revocations.items():
        yield str(uid_of(key)), task


def _listeners() -> list[Any]:
    shell = sys.modules.get("pkg.relay_hub_shell")
    return [] if shell is None else list(shell._listeners.values())


def _registries_of_hubs() -> Iterator[tuple[dict[Any, Any], Entry]]:
    if (shell := sys.modules.get("pkg.relay_hub_shell")) is not None:
        yield shell._hubs, lambda key, _hub: uid_of(key[1])
    for listener in _listeners():
        protocol = listener.protocol
        owners, sockets = listener._owners, protocol._sockets

        def of_socket(number: Any, _value: Any, sockets: Any = sockets) -> str | None:
            return uid_of(sockets[number].installation) if number in sockets else None

        def of_job(job_id: Any, _job: Any, owners: Any = owners) -> str | None:
            return uid_of(owners.get(job_id))

        yield listener.users, _by_binding
        yield listener._jobs, of_job
        yield listener._connections, of_socket
        yield listener._wakes, of_socket
        yield protocol._sockets, of_socket
        yield protocol._links, _by_binding
        yield protocol._jobs, lambda _job_id, job: uid_of(job.link.installation)
        yield protocol._secrets._tokens, _by_binding


def _connections() -> Iterator[tuple[str, Any]]:
    tasks = [(task, task.get_coro()) for task in asyncio.all_tasks()]
    for listener in _listeners():
        for number, connection in listener._connections.items():
            socket = listener.protocol._sockets.get(number)
            uid = None if socket is None else uid_of(socket.installation)
            if uid is not None:
                yield uid, connection
                yield uid, connection.transport
                for task, coroutine in tasks:
                    if any(value is connection for value in gc.get_referents(coroutine)):
                        yield uid, task


def _registries_of_tools() -> Iterator[tuple[dict[Any, Any], Entry]]:
    proxies = importlib.import_module("langbot_plugin.api.proxies.invocation")

    def owner(_digest: Any, endpoint: Any) -> str | None:
        run = getattr(getattr(endpoint.handler, "__self__", None), "run", None)
        invocation = None if run is None else run._context.get(proxies._current)
        return None if invocation is None else uid_of(invocation.binding)

    listening = sys.modules.get("pkg.tools_listener")
    for listener in () if listening is None else listening._LISTENERS.values():
        yield listener._endpoints, owner


def _slots() -> Iterator[tuple[dict[Any, Any], Entry]]:
    run = importlib.import_module("langbot_plugin.cli.run.handler").PluginRuntimeHandler
    controller = importlib.import_module("langbot_plugin.cli.run.controller").PluginRuntimeController
    for each in gc.get_objects():
        if isinstance(each, (run, controller)):
            yield each._slot_containers, lambda key, _slot: str(key)


def _invocations() -> Iterator[tuple[str, Any]]:
    proxies = importlib.import_module("langbot_plugin.api.proxies.invocation")
    every = gc.get_objects()
    theirs: dict[int, str] = {}
    for each in every:
        if isinstance(each, contextvars.Context):
            invocation = each.get(proxies._current)
            uid = None if invocation is None else uid_of(invocation.binding)
            if uid is not None:
                theirs[id(each)] = uid
                yield uid, each
                yield uid, invocation
    for each in every:
        if isinstance(each, (asyncio.Task, asyncio.Handle)):
            held = [getattr(each, "_context", None)] if isinstance(each, asyncio.Handle) else gc.get_referents(each)
            uids = [theirs[id(value)] for value in held if id(value) in theirs]
            if uids:
                yield uids[0], each


_EVERYBODYS: Final = ("Listener", "HubProtocol", "_Listener", "_Server", "OrphanReaper", "DefaultRunner", "CodingRunnerPlugin")
"""Classes of the package whose objects serve every installation."""


_ENTERED: Final = ("pkg", "agent", "acp", "builtins", "asyncio", "_asyncio", "collections", "contextlib", "functools")
_NOT_ENTERED: Final = (type, ModuleType, FunctionType, FrameType, asyncio.AbstractEventLoop)


def _sessions() -> Iterator[tuple[str, Any]]:
    starts = [(str(uid_of(key)), each) for key, each in sys.modules["pkg.installations"]._installations.items()]
    starts += [(uid, each) for uid, each in (*_work(), *_invocations()) if isinstance(each, asyncio.Task)]
    for uid, start in starts:
        seen: dict[int, Any] = {}
        waiting = [start]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _NOT_ENTERED):
                continue
            seen[id(value)] = value
            loops = isinstance(value, (asyncio.Task, asyncio.BaseTransport, asyncio.BaseProtocol))
            if loops:
                yield uid, value
            kind = type(value)
            if kind.__module__.partition(".")[0] in _ENTERED and kind.__name__ not in _EVERYBODYS:
                waiting += gc.get_referents(value)


REGISTRIES: Final[Mapping[str, tuple[Callable[[], Iterator[tuple[dict[Any, Any], Entry]]], str]]] = {
    "pkg.installations": (_registries_of_runs, "the registry: runs, sessions, parked turns, work, by full binding"),
    "pkg.relay_hub_shell": (
        _registries_of_hubs,
        "hubs by full binding; what a shared listener has of each",
    ),
    "pkg.tools_listener": (_registries_of_tools, "a run's tools by the digest of its own bearer, for as long as it runs"),
    "langbot_plugin.cli.run": (_slots, "the SDK's own slots, with the configuration that each invocation gets"),
}
GATES: Final[Mapping[str, tuple[Callable[[], Iterator[tuple[str, Any]]], str]]] = {
    "work": (_work, "the loop knows the tasks that an installation has adopted"),
    "connections": (_connections, "the loop knows the sockets that an installation's secret has proven, and their tasks"),
    "sessions": (_sessions, "the loop knows the tasks and pipes of live sessions, which run in no invocation's context"),
    "invocations": (
        _invocations,
        "the loop knows what was begun in an invocation's own context: tasks and timers",
    ),
}
"""What belongs to an installation: how it is found, and why it may be there."""


# ------------------------------------------------------------------ in the worker: the look


def listen() -> None:
    """Look whenever this process gets the signal."""
    signal.signal(ASKED, _asked)


def _asked(_number: int, _frame: object) -> None:
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(_look, context=contextvars.Context())


def _look() -> None:
    directory = Path(os.environ[PLACE])
    try:
        answer = _answered(json.loads((directory / "question").read_text()))
    except Exception as exc:  # noqa: BLE001 - the boundary of the probe: whoever asked reads what it was
        answer = {"error": repr(exc)}
    staged = directory / "staged"
    staged.write_text(json.dumps(answer))
    staged.rename(directory / "answer")


def _answered(question: dict[str, Any]) -> dict[str, Any]:
    object_graph: Any = importlib.import_module("object_graph")

    if question["what"] == "inventory":
        return {"found": inventory()}
    if question["what"] == "globals":
        worker_globals: Any = importlib.import_module("worker_globals")
        return {"found": worker_globals.changed()}
    needles = {uid: object_graph.Needles(texts, question["raw"].get(uid)) for uid, texts in question["texts"].items()}
    gc.collect()
    if question["what"] == "anywhere":
        whole = object_graph.Sides((), own=[question, needles], files=[__file__])
        return {"found": whole.anywhere(*needles.values()), "sizes": {"shared": len(whole.shared)}}
    registries = [object_graph.Registry(*each) for find, _ in REGISTRIES.values() for each in find()]
    gates = [gate for find, _ in GATES.values() for gate in find()]
    sides = object_graph.Sides(needles, registries, gates, own=[question, needles], files=[__file__])
    sizes = {"shared": len(sides.shared), **{uid: len(reached) for uid, reached in sides.of.items()}}
    return {"found": sides.astray(needles), "sizes": sizes}


def inventory() -> dict[str, int]:
    """What this process has of tasks, timers, threads, files and sockets, child processes: how many of each kind."""
    found: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        found[f"task {getattr(task.get_coro(), '__qualname__', '?')}"] += 1
    found.update(f"thread {re.sub(r'[0-9]+', 'N', thread.name)}" for thread in threading.enumerate())
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[f"file {re.sub(r'[0-9]+', 'N', str(descriptor.readlink()))}"] += 1
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found["child process"] += len(children.read_text().split())
    return {name: count for name, count in found.items() if count}


# ------------------------------------------------------------------ outside


def watched(directory: Path) -> dict[str, str]:
    """The environment of a worker that can be asked, made in ``directory``."""
    directory.mkdir(mode=0o700, parents=True)
    for name in ("worker_graph.py", "object_graph.py", "worker_globals.py"):
        shutil.copy(Path(__file__).with_name(name), directory)
    (directory / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": str(directory), PLACE: str(directory)}


class Watch:
    """Asks one worker at a time; ``texts``: installation to name to canary, ``raw`` the same with exact bytes in hex."""

    def __init__(
        self, directory: Path, texts: Mapping[str, Mapping[str, str]], raw: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """``directory`` is the one given to :func:`watched`."""
        self._directory = directory
        self.texts = texts
        self.raw = raw or {}
        self.sizes: dict[str, int] = {}

    async def astray(self, pid: int) -> dict[str, list[str]]:
        """Every canary that is everybody's or another installation's, with a way to it."""
        return await self._graph(pid, "astray", self.texts)

    async def anywhere(self, pid: int, *names: str, uid: str) -> dict[str, list[str]]:
        """Those of an installation's canaries (all, or the named ones) that are in the process at all, with a way to each."""
        wanted = {name: text for name, text in self.texts[uid].items() if not names or name in names}
        return await self._graph(pid, "anywhere", {uid: wanted}, raw=not names)

    async def inventory(self, pid: int) -> dict[str, int]:
        """What there is of tasks, threads, files, sockets and child processes."""
        answer = await self._ask(pid, {"what": "inventory"})
        return dict(answer["found"])

    async def changed(self, pid: int) -> list[str]:
        """What of the process is not as it was when this was asked first: names of :func:`testkit.worker_globals.snapshot`."""
        answer = await self._ask(pid, {"what": "globals"})
        return list(answer["found"])

    async def more_than(
        self, before: Mapping[str, int], pid: int, bound: float, between: Between | None = None
    ) -> dict[str, int]:
        """What there is more of than ``before``, and stays so for ``bound`` seconds; ``between`` comes before each look."""

        async def look() -> dict[str, int]:
            if between is not None:
                await between()
            now = await self.inventory(pid)
            more = {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
            return {name: count for name, count in more.items() if name != SDK_THREADS}

        return await self.settled(look, bound)

    async def settled(self, look: Callable[[], Awaitable[Found]], bound: float) -> Found:
        """What ``look`` finds once that is nothing, or after ``bound`` seconds: what is on its way leaves, a leak stays."""
        end = time.monotonic() + bound
        while (found := await look()) and time.monotonic() < end:  # noqa: ASYNC110 - the worker is another process
            await asyncio.sleep(0.2)
        return found

    async def _graph(
        self, pid: int, what: str, texts: Mapping[str, Mapping[str, str]], *, raw: bool = True
    ) -> dict[str, list[str]]:
        question = {"what": what, "texts": texts, "raw": self.raw if raw else {}}
        answer = await self._ask(pid, question)
        self.sizes = dict(answer["sizes"])
        return dict(answer["found"])

    async def _ask(self, pid: int, question: Mapping[str, Any]) -> dict[str, Any]:
        answered = self._directory / "answer"
        answered.unlink(missing_ok=True)
        (self._directory / "question").write_text(json.dumps(question))
        os.kill(pid, ASKED)
        async with asyncio.timeout(BOUND):
            while not answered.exists():  # noqa: ASYNC110 - the worker is another process
                await asyncio.sleep(0.02)
        answer: dict[str, Any] = json.loads(answered.read_text())
        assert "error" not in answer, answer
        return answer
