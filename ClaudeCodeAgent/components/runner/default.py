"""This plugin's runner: it answers every message with what to use instead, and starts nothing."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from agent.driver import unavailable
from pkg import texts
from pkg.results import Delivery


class DefaultRunner(Runner):
    """Stateless: one object serves every run of every installation."""

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override] # generators are welcome
        """One message answered by ``coding.driver_not_available``; other events are left alone."""
        if ctx.event.event_type != "message.received":
            yield RunnerResult.run_completed(ctx.run_id)
            return
        results: list[RunnerResult] = []

        async def emit(result: RunnerResult) -> None:
            results.append(result)

        chosen = str(ctx.config.get("language") or "auto")
        language = chosen if chosen in texts.LANGUAGES else texts.guess_language(ctx.input.to_text())
        delivery = Delivery(
            ctx, reply_mode="single", show_progress="off", language=language, emit=emit, correlation_id=uuid.uuid4().hex[:12]
        )
        await delivery.finish(unavailable())
        for result in results:
            yield result
