"""This package as the run loop sees it."""

from __future__ import annotations

from typing import Final

from agent import DRIVERS, presets
from agent.form import AcpPluginSettings, AcpSettings
from pkg import runtime_support
from pkg.agent_api import SessionSpec
from pkg.errors import LaunchError
from pkg.product import Product, SpecInputs


def agent(settings: AcpSettings) -> str:
    """The preset's name, or the command as it was written."""
    return f"command {settings.acp_command}" if settings.acp_command else settings.provider


def spec(settings: AcpSettings, inputs: SpecInputs) -> SessionSpec:
    """The session that the form describes; raises :class:`pkg.errors.SettingsError` for a provider or command that can't be."""

    def find(name: str) -> str | None:
        try:
            return runtime_support.find_executable(name, runtime_support.search_path(inputs.env.get("PATH", "")))
        except LaunchError:
            return None

    command: tuple[str, ...] = ()
    if inputs.location != "daemon":
        command = presets.command_for(settings.provider, settings.acp_command, find if inputs.location == "local" else None)
    return SessionSpec(
        command=command,
        cwd=inputs.workspace,
        env=inputs.env,
        create_if_missing=settings.create_session_if_missing,
        mcp_servers=inputs.mcp_servers,
        policy=settings.approval_policy,
        startup_timeout=settings.startup_timeout,
        initialize_timeout=settings.initialize_timeout,
    )


PRODUCT: Final = Product(
    name="acp",
    driver=DRIVERS["acp"],
    settings=AcpSettings,
    plugin_settings=AcpPluginSettings,
    agent=agent,
    spec=spec,
)
"""Any agent of the Agent Client Protocol."""
