"""The driver for Claude Code; ``DRIVERS`` and ``COMMANDS`` are all that a daemon needs of it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import ClaudeCodeDriver
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"claude-code": ClaudeCodeDriver()})
"""The drivers of this package by name."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType({"claude-code": ("claude",)})
"""Command lines of agents that are known by name, for a new policy file."""
