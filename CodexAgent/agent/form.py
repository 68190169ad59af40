"""The fields of this package's forms beyond those that all three runners share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pkg.settings import Arguments, Line, Names, PluginSettings, RunnerSettings, Switch, Text, Whole

DAEMON_PORT = 8768
"""Where this package's hub listens unless the form says otherwise; no sibling uses the same."""


class CodexSettings(RunnerSettings):
    """The runner form of the Codex package."""

    policies: ClassVar[tuple[str, ...]] = (*RunnerSettings.policies, "untrusted", "on-request", "on-failure", "never")
    """Ours, then Codex's own values, which existing configurations may hold."""

    command: Line = ""
    """Name or absolute path of the program; empty: ``codex`` where programs usually are."""
    args_json: Arguments = ()
    """Further arguments, added to the command."""
    model: Line = ""
    """Empty: what the account's own settings say."""
    effort: Line = ""
    """How much the model thinks, in Codex's words; empty: what the account's own settings say."""
    sandbox_mode: Literal["read-only", "workspace-write", "danger-full-access"] = "workspace-write"
    network_access: Switch = False
    """Whether commands in the sandbox reach the network."""
    writable_roots: Names = ()
    """Further absolute directories that commands in the sandbox may write to."""
    append_instructions: Text = ""
    """What the agent is told besides its own instructions."""
    mcp_bridge_transport: Literal["auto", "http", "stdio"] = "auto"


class CodexPluginSettings(PluginSettings):
    """The plugin form of the Codex package."""

    daemon_port: Whole = Field(default=DAEMON_PORT, ge=1, le=65535)
