"""This package as the run loop sees it."""

from __future__ import annotations

from typing import Final

from agent import DRIVERS
from agent.confinement import SANDBOX
from agent.form import CodexPluginSettings, CodexSettings
from pkg.agent_api import Json, SessionSpec
from pkg.product import Product, SpecInputs
from pkg.settings import secret_names

PROGRAM: Final = "codex"


def spec(settings: CodexSettings, inputs: SpecInputs) -> SessionSpec:
    """The session that the form describes."""
    command: tuple[str, ...] = ()
    if inputs.location != "daemon":
        command = (settings.command or PROGRAM, *settings.args_json)
    return SessionSpec(
        command=command,
        cwd=inputs.workspace,
        env=inputs.env,
        create_if_missing=settings.create_session_if_missing,
        mcp_servers=inputs.mcp_servers,
        system_prompt=settings.append_instructions,
        policy=settings.approval_policy,
        startup_timeout=settings.startup_timeout,
        initialize_timeout=settings.initialize_timeout,
        options=options(settings),
    )


def options(settings: CodexSettings) -> dict[str, Json]:
    """The driver's own options, without what the form leaves as it is: a daemon's policy file names those that may be set."""
    private = [name for name, value in settings.env_json.items() if secret_names([value])]
    chosen: dict[str, Json] = {}
    if settings.sandbox_mode != SANDBOX:
        chosen["sandbox"] = settings.sandbox_mode
    if settings.model:
        chosen["model"] = settings.model
    if settings.effort:
        chosen["effort"] = settings.effort
    if settings.network_access:
        chosen["network"] = True
    if settings.writable_roots:
        chosen["writable_roots"] = list(settings.writable_roots)
    if private:
        chosen["private"] = private
    if settings.mcp_bridge_transport != "auto":
        chosen["bridge"] = settings.mcp_bridge_transport
    return chosen


PRODUCT: Final = Product(
    name="codex",
    driver=DRIVERS["codex"],
    settings=CodexSettings,
    plugin_settings=CodexPluginSettings,
    spec=spec,
)
"""Codex through its app-server."""
