"""A runner that only hands LangBot's tools over: put in the place of a package's own runner by a test, shipped by none.

It writes the run's MCP server to the file that its form names (mode 0600) and ends when the file ``…-end`` exists.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from pkg.langbot_tools import open_tools


class DefaultRunner(Runner):
    """One run, one MCP server."""

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override]
        """Hand over, wait, end."""
        place = Path(str(ctx.config["hand-over"]))
        async with open_tools(self, ctx) as tools:
            server = {"url": tools.server.url, "headers": dict(tools.server.headers)}
            staged = place.with_suffix(".staged")
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(server, file)
            staged.rename(place)
            while not place.with_name(place.name + "-end").exists():  # noqa: ASYNC110 - the test is another process
                await asyncio.sleep(0.02)
        yield RunnerResult.run_completed(ctx.run_id)
