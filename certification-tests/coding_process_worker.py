#!/usr/bin/env python3
"""One worker process with one extracted package: starts, prompts, cancels and closes sessions of the package's own driver.

``python coding_process_worker.py PACKAGE_ROOT`` imports ``pkg`` and ``agent`` from that root and from nowhere else, so that the
bundled clients of all three packages can be driven from one test process. Requests and answers are JSON objects, one a line, on
standard input and output; an answer repeats the request's ``id`` and has either ``ok`` or ``error``.

- ``hello``: the driver's name, this process, and where each module of the package was imported from.
- ``workspace`` (``configured``, ``data`` in place of ``/data``): the directory a local agent works in, by this process's shape.
- ``start`` (``session``, ``form``, ``workspace``, ``env``, ``resume``): opens; answers with the vendor's id of the session.
- ``prompt`` (``session``, ``text``), ``interrupt`` (``session``).
- ``cancel`` (``session``, ``times``): cancels the task that owns the session, again and again; answered when that has ended.
- ``close`` (``session``): the same without a cancellation. Of a session whose owner is through it asks the session again.
- ``forget`` (``session``): a session whose end nobody could confirm is not ended again with this process.

What a session tells comes as ``{"session": …, "event": {…}}``. ``cancel`` and ``close`` answer ``ok`` only where the session's
end was proven; a cleanup that was not confirmed is an ``error``. The process ends with its standard input, sessions first.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


class Owned:
    """One session and the task that owns it, from its opening to the proof of its end."""

    def __init__(self, worker: Worker, name: str, request: dict[str, Any]) -> None:
        self.worker = worker
        self.name = name
        self.session: Any = None
        self.opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._own(request))

    async def _own(self, request: dict[str, Any]) -> None:
        try:
            self.session = await self.worker.open(request)
        except Exception as exc:  # noqa: BLE001 - answered
            self.opened.set_exception(exc)
            return
        try:
            self.opened.set_result(self.session.session_id)
            told = asyncio.get_running_loop().create_task(self._tell())
            closing = asyncio.get_running_loop().create_task(self._closing.wait())
            try:
                await asyncio.wait({told, closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
                closing.cancel()
        finally:
            await self.session.close()

    async def _tell(self) -> None:
        async for event in self.session.events():
            self.worker.write(session=self.name, event=self.worker.to_json(event))

    async def end(self, times: int) -> None:
        """End it, cancelling its owner this often; raises what the owner ended with, unless that is the cancellation."""
        if self._closing.is_set():
            await self.session.close()
            return
        self._closing.set()
        for _ in range(times):
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=0.02)
        await asyncio.wait({self.task})
        if not self.task.cancelled() and (problem := self.task.exception()) is not None:
            raise problem


class Worker:
    """The package and its sessions."""

    def __init__(self, root: Path) -> None:
        """Imports the package."""
        self.root = root
        sys.path.insert(0, str(root))
        from agent.product import PRODUCT
        from pkg import agent_api, errors, runtime_support
        from pkg.launch import LocalLauncher
        from pkg.product import SpecInputs
        from pkg.settings import parse

        self.product: Any = PRODUCT
        self.to_json = agent_api.to_json
        self._api, self._errors, self._support = agent_api, errors, runtime_support
        self._launcher, self._inputs, self._parse = LocalLauncher(), SpecInputs, parse
        self._sessions: dict[str, Owned] = {}

    def write(self, **message: Any) -> None:
        """One line."""
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    async def open(self, request: dict[str, Any]) -> Any:
        """An open session of the package's driver."""
        import dataclasses

        settings = self._parse(self.product.settings, request.get("form", {}))
        inputs = self._inputs(request["workspace"], "local", request.get("env", {}), ())
        spec = self.product.spec(settings, inputs)
        return await self.product.driver.open(
            dataclasses.replace(spec, resume_session_id=request.get("resume", "")), self._launcher
        )

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request asks for."""
        owned = self._sessions.get(request.get("session", ""))
        match request["do"]:
            case "hello":
                return {"driver": self.product.driver.name, "pid": os.getpid(), "modules": self._modules()}
            case "workspace":
                data = Path(request.get("data") or self._support.DATA_DIRECTORY)
                shape = self._support.worker_shape(data=data)
                found = self._support.local_workspace(request.get("configured", ""), shape=shape, data=data)
                return {"shape": shape.value, "workspace": str(found), "default_data": str(self._support.DATA_DIRECTORY)}
            case "start":
                name = request["session"]
                self._sessions[name] = Owned(self, name, request)
                return {"session_id": await asyncio.shield(self._sessions[name].opened)}
            case "prompt":
                assert owned is not None
                await owned.session.prompt(self._api.Prompt(request["text"]))
                return {}
            case "interrupt":
                assert owned is not None
                await owned.session.interrupt()
                return {}
            case "forget":
                del self._sessions[request["session"]]
                return {}
            case "cancel" | "close" as how:
                assert owned is not None
                await owned.end(request.get("times", 1) if how == "cancel" else 0)
                del self._sessions[request["session"]]
                return {"ended": True}
        raise ValueError("no such request")

    def _modules(self) -> dict[str, str]:
        """Every module of the package that is imported, and its file."""
        names = ("pkg", "agent", "components")
        found = [(name, module) for name, module in sys.modules.items() if name.split(".")[0] in names]
        return {name: str(module.__file__) for name, module in found if getattr(module, "__file__", None)}

    async def serve(self) -> None:
        """Serve until nobody asks any more, then end every session."""
        reader = asyncio.StreamReader(limit=2**24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        asked: set[asyncio.Task[None]] = set()
        try:
            while line := await reader.readline():
                task = asyncio.get_running_loop().create_task(self._answered(json.loads(line)))
                asked.add(task)
                task.add_done_callback(asked.discard)
        finally:
            for owned in list(self._sessions.values()):
                await owned.end(0)
            await asyncio.gather(*asked)

    async def _answered(self, request: dict[str, Any]) -> None:
        try:
            answer = {"ok": await self.answer(request)}
        except self._errors.ProcessCleanupUnconfirmed:
            answer = {"error": {"code": "cleanup unconfirmed"}}
        except Exception as exc:  # noqa: BLE001 - answered
            answer = {"error": {"code": getattr(exc, "code", type(exc).__name__)}}
        self.write(id=request["id"], **answer)


if __name__ == "__main__":
    asyncio.run(Worker(Path(sys.argv[1]).resolve()).serve())
