"""The test's side of ``coding_process_worker.py``: one process per package, whichever package this process imports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import pkg
from testkit import package_roots
from tooling import ROOT

PROGRAM: Final = ROOT / "certification-tests" / "coding_process_worker.py"
BOUND: Final = 60.0
"""Seconds any single wait may take; never the verdict itself."""


class WorkerRefused(Exception):
    """The process answered with an error, whose code this is."""


def root_of(package: str) -> Path:
    """Where a package is: in the working copy, or beside the extracted one that this process imports."""
    return package_roots.beside(Path(pkg.__file__).resolve().parents[1], package)


class ProcessWorker:
    """One process with one package."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Made by :func:`process_worker`."""
        self.process = process
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """One request; its answer. Raises :class:`WorkerRefused`."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": do, **fields}).encode() + b"\n")
        await self.process.stdin.drain()
        async with asyncio.timeout(BOUND):
            answer = await self._answers[number]
        if "error" in answer:
            raise WorkerRefused(answer["error"]["code"])
        found: dict[str, Any] = answer["ok"]
        return found

    async def until(self, session: str, kind: str, **fields: Any) -> dict[str, Any]:
        """The session's next event of a kind in which every one of ``fields`` holds what is given."""
        async with asyncio.timeout(BOUND):
            while True:
                event = await self._queue(session).get()
                if event["type"] == kind and all(value in str(event[name]) for name, value in fields.items()):
                    return event

    async def said(self, session: str, text: str) -> None:
        """Wait until the session has said a text, in however many parts."""
        said = ""
        async with asyncio.timeout(BOUND):
            while text not in said:
                event = await self._queue(session).get()
                said += event["text"] if event["type"] == "TextDelta" else ""

    def _queue(self, session: str) -> asyncio.Queue[dict[str, Any]]:
        return self._events.setdefault(session, asyncio.Queue())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            if "event" in message:
                self._queue(message["session"]).put_nowait(message["event"])
            else:
                self._answers.pop(message["id"]).set_result(message)
        for waiting in self._answers.values():
            waiting.set_result({"error": {"code": "the worker process ended"}})

    async def close(self) -> int:
        """End of its input; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(BOUND):
                code = await self.process.wait()
        except TimeoutError:
            self.process.kill()
            code = await self.process.wait()
        await self._reading
        return code


@contextlib.asynccontextmanager
async def process_worker(
    package: str, environment: Mapping[str, str] | None = None, *, cwd: Path | None = None
) -> AsyncIterator[ProcessWorker]:
    """A process with the package; it has ended with code 0 afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-B", str(PROGRAM), str(root_of(package))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        cwd=cwd,
        env={"PATH": os.environ.get("PATH", os.defpath), **(environment or {})},
    )
    worker = ProcessWorker(process)
    code = None
    try:
        yield worker
    finally:
        code = await worker.close()
    assert code == 0
