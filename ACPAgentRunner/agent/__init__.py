"""The driver for agents of the Agent Client Protocol; ``DRIVERS``, ``COMMANDS`` and ``POLICIES`` are what a daemon needs."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import AcpDriver
from agent.form import AcpSettings
from agent.presets import PRESETS
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"acp": AcpDriver()})
"""The drivers of this package by name."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
    {name: preset.command for name, preset in PRESETS.items()}
)
"""Command lines of agents that are known by name, for a new policy file."""

POLICIES: Final = AcpSettings.policies
"""The approval policies of the runner's form; a policy file may name these and no other."""
