"""The fields of this package's forms beyond those that all three runners share."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from pkg.settings import Arguments, Line, Names, PluginSettings, RunnerSettings, Seconds, Switch, Text, Whole

DAEMON_PORT = 8767
"""Where this package's hub listens unless the form says otherwise; no sibling uses the same."""

_ON: Final = frozenset({"true", "yes", "on", "1"})
_BYPASS: Final = "bypassPermissions"


class ClaudeCodeSettings(RunnerSettings):
    """The runner form of the Claude Code package."""

    command: Line = ""
    """Name or absolute path of the program; empty: ``claude`` where programs usually are."""
    model: Line = ""
    """A model or an alias of one; empty: the program's own choice."""
    permission_mode: Literal["default", "acceptEdits", "plan", "dontAsk"] = "default"
    """How the program itself begins; whatever it asks about is decided by ``approval-policy``."""
    allowed_tools: Names = ()
    """Tools and patterns that need no permission."""
    disallowed_tools: Names = ()
    """Tools and patterns that are not there at all."""
    trust_workspace: Switch = False
    """Whether the settings, hooks, plugins and tool servers of the workspace are used."""
    append_system_prompt: Text = ""
    max_turns: Whole = Field(default=0, ge=0, le=1000)
    """Steps of one message; zero: no limit."""
    max_budget_usd: Seconds = Field(default=0, ge=0, le=10000)
    """What one session may cost, in US dollars; zero: no limit."""
    show_cost: Switch = False
    """Whether the cost is reported with the usage of a turn."""
    args_json: Arguments = ()
    """Further arguments, added to the command."""
    dangerously_skip_permissions: Switch = False
    """Of existing configurations: counts as ``approval-policy: allow-all``."""
    mcp_bridge_transport: Literal["auto", "http", "stdio"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _skipping(cls, given: Any) -> Any:
        """What existing configurations call skipping permissions is our policy for everything.

        The program's own mode for it is never used: it cannot run as root, and nothing could be shown or stopped.
        """
        if not isinstance(given, dict):
            return given
        skips = str(given.get("dangerously-skip-permissions", "")).lower() in _ON
        if given.get("permission-mode") == _BYPASS:
            given = {**given, "permission-mode": "default", "dangerously-skip-permissions": True}
            skips = True
        return {**given, "approval-policy": "allow-all"} if skips else given


class ClaudeCodePluginSettings(PluginSettings):
    """The plugin form of the Claude Code package."""

    daemon_port: Whole = Field(default=DAEMON_PORT, ge=1, le=65535)
