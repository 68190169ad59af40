"""This package as the run loop sees it."""

from __future__ import annotations

from typing import Final

from agent import DRIVERS, command
from agent.form import ClaudeCodePluginSettings, ClaudeCodeSettings
from pkg.agent_api import Json, SessionSpec
from pkg.product import Product, SpecInputs


def spec(settings: ClaudeCodeSettings, inputs: SpecInputs) -> SessionSpec:
    """The session that the form describes; raises :class:`pkg.errors.SettingsError` for arguments that can't be."""
    command.check_arguments(settings.args_json)
    elsewhere = inputs.location == "daemon"  # only the policy file there has command lines
    options: dict[str, Json] = {
        "model": settings.model,
        # An option that says what holds anyway would have to be allowed by every daemon's policy file.
        "permission_mode": "" if settings.permission_mode == "default" else settings.permission_mode,
        "allowed_tools": list(settings.allowed_tools),
        "disallowed_tools": list(settings.disallowed_tools),
        "trust_workspace": settings.trust_workspace,
        "max_turns": settings.max_turns,
        "max_budget_usd": settings.max_budget_usd,
        "show_cost": settings.show_cost,
        "stdio_tools": settings.mcp_bridge_transport == "stdio",
        "skipped_permissions": settings.dangerously_skip_permissions and not elsewhere,
    }
    return SessionSpec(
        command=() if elsewhere else (settings.command or command.PROGRAM, *settings.args_json),
        cwd=inputs.workspace,
        env=inputs.env,
        create_if_missing=settings.create_session_if_missing,
        mcp_servers=inputs.mcp_servers,
        system_prompt=settings.append_system_prompt,
        policy=settings.approval_policy,
        startup_timeout=settings.startup_timeout,
        initialize_timeout=settings.initialize_timeout,
        options={name: value for name, value in options.items() if value},
    )


PRODUCT: Final = Product(
    name="claude-code",
    driver=DRIVERS["claude-code"],
    settings=ClaudeCodeSettings,
    plugin_settings=ClaudeCodePluginSettings,
    spec=spec,
)
"""Claude Code."""
