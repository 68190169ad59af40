"""The driver for Claude Code; ``DRIVERS``, ``COMMANDS`` and ``POLICIES`` are what a daemon needs."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import ClaudeCodeDriver
from agent.form import ClaudeCodeSettings
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"claude-code": ClaudeCodeDriver()})
"""The drivers of this package by name."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType({"claude-code": ("claude",)})
"""Command lines of agents that are known by name, for a new policy file."""

POLICIES: Final = ClaudeCodeSettings.policies
"""The approval policies of the runner's form; a policy file may name these and no other."""
