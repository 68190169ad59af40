"""The fields of this package's forms beyond those that all three runners share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pkg.settings import Arguments, Line, PluginSettings, RunnerSettings, Switch, Whole

DAEMON_PORT = 8767
"""Where this package's hub listens unless the form says otherwise; no sibling uses the same."""


class ClaudeCodeSettings(RunnerSettings):
    """The runner form of the Claude Code package."""

    command: Line = ""
    """Name or absolute path of the program; empty: ``claude`` where programs usually are."""
    args_json: Arguments = ()
    """Further arguments, added to the command."""
    dangerously_skip_permissions: Switch = False
    """Of existing configurations: counts as ``approval-policy: allow-all``."""
    mcp_bridge_transport: Literal["auto", "http", "stdio"] = "auto"


class ClaudeCodePluginSettings(PluginSettings):
    """The plugin form of the Claude Code package."""

    daemon_port: Whole = Field(default=DAEMON_PORT, ge=1, le=65535)
