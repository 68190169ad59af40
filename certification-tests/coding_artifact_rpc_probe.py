#!/usr/bin/env python3
"""The SDK's real RPC with one extracted package, whose directory is the argument; what came is printed as one JSON object.

Over stdio and over WebSocket, in a dedicated worker and in the pool, and under ``lbp run`` as developers start it, the runner
is registered, asked, and answers. The agent is the scripted one (a local protocol fixture), beside a dedicated worker and
behind a daemon of the package's own for the pool. Exits with 1 and the reason on stderr when anything is not as it should be.
No path and no secret is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXTRACTED = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "ACPAgentRunner"
sys.path[:0] = [str(EXTRACTED), str(ROOT / "shared"), str(ROOT / "scripts")]
BOUND = 60.0
"""Seconds any single run may take."""


def form(name: str, scratch: Path) -> dict[str, Any]:
    """A runner form for the package's scripted program (local protocol fixtures) beside the worker."""
    from testkit import scripted_claude, scripted_codex
    from testkit.sdk_worker import scripted_agent

    workspace = scratch / "workspace"
    workspace.mkdir(exist_ok=True)
    common = {"location": "local", "workspace": str(workspace), "keep-warm": 0}
    if name == "ACPAgentRunner":
        return {**common, "provider": "custom", "acp-command": scripted_agent()}
    program = scripted_claude if name == "ClaudeCodeAgent" else scripted_codex
    return {**common, "command": str(launcher(scratch, Path(str(program.__file__))))}


def launcher(scratch: Path, program: Path) -> Path:
    """A command of one word that starts a scripted program; Claude Code's has its configuration as the first argument."""
    file = scratch / f"{program.stem}.sh"
    first = "'{}' " if program.stem == "scripted_claude" else ""
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {program} {first}"$@"\n')
    file.chmod(0o755)
    return file


@contextlib.asynccontextmanager
async def daemon(name: str, port: int, token: str, scratch: Path) -> AsyncIterator[Any]:
    """A machine with the extraction's own daemon program."""
    from testkit import daemon_rig, scripted_claude, scripted_codex

    programs = {"ClaudeCodeAgent": ("claude-code", scripted_claude), "CodexAgent": ("codex", scripted_codex)}
    more: dict[str, Any] = {}
    if name in programs:
        driver, program = programs[name]
        more = {"driver": driver, "command": [str(launcher(scratch, Path(str(program.__file__))))]}
    home = daemon_rig.DaemonHome(scratch / "machine", f"ws://127.0.0.1:{port}", token=token, package=name, **more)
    process = await daemon_rig.start(home)
    try:
        yield process
    finally:
        if process.process.returncode is None:
            await process.terminate()


async def probe(code: Path) -> dict[str, Any]:
    """Everything; raises ``AssertionError`` with what is not as it should be."""
    import pkg
    from testkit.daemon_rig import DAEMON_ID
    from testkit.daemon_sites import plugin_form
    from testkit.langbot_host import build_package
    from testkit.relay_rig import free_port
    from testkit.sdk_worker import sdk_worker
    from testkit.worker_socket import debugged

    assert Path(pkg.__file__).is_relative_to(code), "the extraction's own modules are the ones imported"
    name = code.name
    found: dict[str, Any] = {"package": name, "fixtures": "local protocol fixtures", "runs": {}}

    def answered(label: str, outcome: Any, transport: str) -> None:
        assert f"answered over {transport}" in outcome.text, f"{label}: {outcome.text!r} {outcome.log}"
        found["runs"][label] = {
            "terminal": outcome.terminal.type,
            "finish_reason": outcome.reason,
            "messages": len(outcome.shown),
            "answer": f"answered over {transport}",
        }

    with tempfile.TemporaryDirectory(prefix="probe-") as base:
        package = build_package(code, Path(base))
        found["members"] = hashlib.sha256(
            json.dumps(sorted(str(each.relative_to(code)) for each in code.rglob("*") if each.is_file())).encode()
        ).hexdigest()
        for transport in ("stdio", "websocket"):
            scratch = Path(base, transport)
            scratch.mkdir()
            text = f"say answered over {transport}"
            async with sdk_worker(package, scratch / "dedicated", name=name, transport=transport) as worker:
                async with asyncio.timeout(BOUND):
                    answered(f"dedicated over {transport}", await worker.run(text, config=form(name, scratch)), transport)
            port, token = free_port(), secrets.token_hex(32)
            installations = {"A": plugin_form(port, token), "B": {}}
            async with (
                sdk_worker(
                    package, scratch / "pool", "pool", name=name, transport=transport, installations=installations
                ) as worker,
                daemon(name, port, token, scratch),
            ):
                remote = {**form(name, scratch), "location": "daemon", "daemon-id": DAEMON_ID, "workspace": ""}
                async with asyncio.timeout(BOUND):
                    answered(f"pool over {transport}", await worker.run(text, config=remote), transport)
                    refused = await worker.run(text, uid="B", config=form(name, scratch))
                assert "coding.local_in_pool" in refused.log, refused.log
                assert worker.pid("A") == worker.pid("B"), "one process serves both installations"
        async with debugged(code, name) as plugin, asyncio.timeout(BOUND):
            scratch = Path(base, "debug")
            scratch.mkdir()
            done = await plugin.run("say answered over websocket", config=form(name, scratch))
            answered("debug over websocket", done, "websocket")
    return found


def main() -> int:
    """Probe the directory of the command line; a copy of it is used, for what a worker writes."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="extracted-") as base:
        code = Path(base).resolve() / EXTRACTED.name
        shutil.copytree(EXTRACTED, code, ignore=shutil.ignore_patterns("__pycache__"))
        for each in [code, *code.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        sys.path[0] = str(code)
        try:
            print(json.dumps(asyncio.run(probe(code)), indent=1, sort_keys=True))
        except AssertionError as exc:
            print(f"{EXTRACTED.name}: {exc}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
