"""The driver for agents of the Agent Client Protocol; ``DRIVERS`` and ``COMMANDS`` are all that a daemon needs of it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import AcpDriver
from agent.presets import PRESETS
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"acp": AcpDriver()})
"""The drivers of this package by name."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
    {name: preset.command for name, preset in PRESETS.items()}
)
"""Command lines of agents that are known by name, for a new policy file."""
