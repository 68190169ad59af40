"""This plugin's runner: it hands every run to the shared loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from agent.product import PRODUCT
from pkg import run_loop


class DefaultRunner(Runner):
    """Stateless: one object serves every run of every installation."""

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override]
        """One message from the chat, answered; see :mod:`pkg.run_loop`."""
        async with aclosing(run_loop.run(self, ctx, PRODUCT)) as results:
            async for result in results:
                yield result
