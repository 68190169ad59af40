"""The fields of this package's forms beyond those that all three runners share."""

from __future__ import annotations

from pydantic import Field

from pkg.settings import Line, PluginSettings, RunnerSettings, Text, Whole

DAEMON_PORT = 8766
"""Where this package's hub listens unless the form says otherwise; its siblings use the next two."""


class AcpSettings(RunnerSettings):
    """The runner form of the ACP package."""

    provider: Line = "claude-code"
    """The name of a preset, or ``custom``."""
    acp_command: Text = ""
    """The command line of an ACP agent on stdin and stdout: needed for ``custom``, else in place of the preset's."""


class AcpPluginSettings(PluginSettings):
    """The plugin form of the ACP package."""

    daemon_port: Whole = Field(default=DAEMON_PORT, ge=1, le=65535)
