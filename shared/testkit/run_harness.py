"""Drives the run loop in this process through the SDK's own ``Runner.invoke``, with a scripted driver and a host stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.definition.plugin import BasePlugin
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.api.proxies.invocation import bind_invocation
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import installations, run_loop
from pkg.agent_api import SessionSpec
from pkg.product import Product, SpecInputs
from pkg.settings import PluginSettings, RunnerSettings
from testkit.host_actions import HostActions, run_context
from testkit.scripted_driver import ScriptedDriver


def _spec(settings: RunnerSettings, inputs: SpecInputs) -> SessionSpec:
    return SessionSpec(
        ("scripted",), inputs.workspace, env=inputs.env, mcp_servers=inputs.mcp_servers, policy=settings.approval_policy
    )


class _Runner(Runner):
    product: Product

    async def run(self, ctx: RunnerContext) -> AsyncIterator[RunnerResult]:  # type: ignore[override]
        async with contextlib.aclosing(run_loop.run(self, ctx, self.product)) as results:
            async for result in results:
                yield result


@dataclasses.dataclass
class Outcome:
    """What one run sent, in order."""

    results: list[RunnerResult]

    @property
    def shown(self) -> list[str]:
        """The completed messages: what a person has in the chat afterwards."""
        return [_text(each.data["message"]) for each in self.results if each.type == "message.completed"]

    @property
    def text(self) -> str:
        """All completed messages together."""
        return "\n".join(self.shown)

    @property
    def terminal(self) -> RunnerResult:
        """The one terminal result; fails when there is none, or more than one, or it isn't the last."""
        found = [each for each in self.results if each.type in ("run.completed", "run.failed")]
        assert len(found) == 1, f"{len(found)} terminal results"
        assert self.results[-1] is found[0]
        return found[0]

    @property
    def reason(self) -> str:
        """Why it ended: ``run.failed``'s code or ``run.completed``'s finish reason."""
        data = self.terminal.data
        return str(data.get("code") if self.terminal.type == "run.failed" else data.get("finish_reason"))

    @property
    def log(self) -> str:
        """The log results, for the ledger."""
        return "\n".join(str(each.data.get("text")) for each in self.results if each.type == "processor.log")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


class Harness:
    """One runner object with one driver and one host; runs may go on at the same time."""

    def __init__(
        self, workspace: Path, driver: ScriptedDriver | None = None, *, host: HostActions | None = None, **config: Any
    ) -> None:
        """``config`` are form values with underscores for hyphens."""
        self.driver = driver or ScriptedDriver()
        self.host = host or HostActions()
        self.config: dict[str, Any] = {"workspace": str(workspace), "langbot-assets-enabled": False}
        self.config.update({name.replace("_", "-"): value for name, value in config.items()})
        self.runner = _Runner()  # type: ignore[no-untyped-call]
        self.runner.product = Product(
            "scripted", self.driver, RunnerSettings, PluginSettings, agent=lambda settings: "scripted", spec=_spec
        )
        self.runner.bind_runtime(plugin_runtime_handler=self.host, plugin_config={})  # type: ignore[no-untyped-call]
        self.runner.plugin = cast(BasePlugin, types.SimpleNamespace(plugin_runtime_handler=self.host))

    def context(self, text: str = "hello", **more: Any) -> RunnerContext:
        """A run's context with this harness's form values."""
        config = {**self.config, **more.pop("config", {})}
        return RunnerContext.model_validate(run_context(text, config=config, **more))

    async def run(self, text: str = "hello", *, binding: InstallationBinding | None = None, **more: Any) -> Outcome:
        """One run to its end; with ``binding`` as in a worker that belongs to that installation."""
        self.host.bound_action_context = binding
        scope = bind_invocation(self.host, config={}, binding=binding) if binding else contextlib.nullcontext()
        with scope:
            async with contextlib.aclosing(self.runner.invoke(self.context(text, **more))) as stream:
                return Outcome([result async for result in stream])

    def start(self, text: str = "hello", **more: Any) -> asyncio.Task[Outcome]:
        """One run as a task."""
        return asyncio.get_running_loop().create_task(self.run(text, **more))

    async def close(self) -> None:
        """End everything that is still kept."""
        await installations.revoke(None)


@contextlib.asynccontextmanager
async def harness(
    workspace: Path, driver: ScriptedDriver | None = None, *, host: HostActions | None = None, **config: Any
) -> AsyncIterator[Harness]:
    """A harness that leaves nothing behind."""
    made = Harness(workspace, driver, host=host, **config)
    try:
        yield made
    finally:
        await made.close()
