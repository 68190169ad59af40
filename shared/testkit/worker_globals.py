"""Runs a package's runner in a process of its own and prints what of that process is not as it was.

``python worker_globals.py PACKAGE SCRATCH``: the SDK is loaded as a worker loads it and everything process-wide is noted down;
then the package is imported and serves many runs that end in every way, with the scripted ACP agent (local protocol fixture).
Prints a JSON object: ``runs`` (how many ended how) and ``changed`` (names of what is not as before).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp.web  # noqa: F401 - importing it adds a filter for a warning of its own
import langbot_plugin.api.definition.components.runner.runner
import langbot_plugin.api.proxies.invocation
import langbot_plugin.cli.run.controller
import langbot_plugin.cli.run.handler  # noqa: F401 - a worker has these modules

ROUNDS = 5
SDK_THREADS = "langbot-plugin-worker-blocking"
"""The SDK's own executor, which starts its few threads as they are needed and keeps them."""


def _inside(value: Any) -> Any:
    """What can be told from another value later: a container's items, anything else as it is."""
    if isinstance(value, dict):
        return (value, tuple(value.items()))
    if isinstance(value, (list, set, frozenset)):
        return (value, tuple(value))
    return value


def _sdk() -> dict[str, Any]:
    """Every global of every loaded module of the SDK, and every attribute of every class it defines."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "langbot_plugin":
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            found[f"{name}.{key}"] = _inside(value)
            if inspect.isclass(value) and value.__module__ == name:
                for attribute, inner in list(vars(value).items()):
                    if not attribute.startswith("__") or inspect.isfunction(inner):
                        found[f"{name}.{key}.{attribute}"] = _inside(inner)
    return found


def _logger(logger: logging.Logger) -> Any:
    return logger.level, tuple(logger.handlers), tuple(logger.filters), logger.propagate, logger.disabled


def snapshot() -> dict[str, Any]:
    """Everything process-wide that a plugin could change, by name."""
    loop = asyncio.get_running_loop()
    loggers = {name: _logger(logging.getLogger(name)) for name in ("", "asyncio", "langbot_plugin")}
    return {
        **_sdk(),
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
        "loggers": loggers,
        "logging": (
            logging.root.manager.disable,
            logging.getLoggerClass(),
            logging.getLogRecordFactory(),
        ),
        "executor": vars(loop)["_default_executor"],
        "loop": (loop.get_exception_handler(), loop.get_task_factory(), loop.get_debug()),
        "policy": asyncio.get_event_loop_policy(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stdin, sys.stdout, sys.stderr),
        "search path": tuple(sys.path),
        "warnings": (tuple(warnings.filters), warnings.showwarning),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
        "threads": tuple(each for each in threading.enumerate() if not each.name.startswith(SDK_THREADS)),
        "recursion": sys.getrecursionlimit(),
    }


async def main(scratch: Path) -> dict[str, Any]:
    """Note down, serve, compare."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        before = snapshot()
        runs = await _serve(scratch)
        after = snapshot()
        return {"runs": runs, "changed": _differing(before, after)}


_first: dict[str, Any] = {}


def changed() -> list[str]:
    """In a worker: the names of what is not as it was at the first call."""
    now = snapshot()
    if not _first:
        _first.update(now)
    return _differing(_first, now)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if not _same(value, after.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, (str, int, float, bool, dict)) and one == other)


async def _serve(scratch: Path) -> Counter[str]:
    importlib.import_module("main")
    importlib.import_module("components.runner.default")
    product = importlib.import_module("agent.product").PRODUCT
    from testkit.run_harness import harness  # imports the package, so not before the first look
    from testkit.sdk_worker import scripted_agent

    ended: Counter[str] = Counter()
    lines = {
        "say an answer": {},
        'say a long one\nupdate {"sessionUpdate": "plan", "entries": []}': {"reply-mode": "single"},
        "exit 3": {},
        "say nobody": {"acp-command": "no-such-agent-4f1a"},
        "say never": {"timeout": "soon"},
    }
    form: dict[str, Any] = {
        "langbot_assets_enabled": True,
        "keep_warm": 0,
        "provider": "custom",
        "acp_command": scripted_agent(),
        "timeout": 60,
    }
    async with harness(scratch, **form) as made:
        made.runner.product = product
        for number in range(ROUNDS):
            chats = [
                made.start(text, run_id=f"r{number}-{each}", conversation=f"c{number}-{each}", config=config)
                for each, (text, config) in enumerate(lines.items())
            ]
            hanging = made.start("hang", run_id=f"h{number}", conversation="hanging")
            for outcome in await asyncio.gather(*chats):
                ended[outcome.reason] += 1
            hanging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hanging
            ended["cancelled"] += 1
    return ended


if __name__ == "__main__":
    sys.path[:0] = [sys.argv[1], str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")]
    print(json.dumps(asyncio.run(main(Path(sys.argv[2])))))
