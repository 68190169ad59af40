"""The driver for Codex; ``DRIVERS``, ``COMMANDS`` and ``POLICIES`` are what a daemon needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent.driver import CodexDriver
from agent.form import CodexSettings
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = MappingProxyType({"codex": CodexDriver()})
"""Every driver of this package by the name it has in jobs."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"codex": ("codex",)})
"""Command lines of agents that are known by name, for a new policy file."""

POLICIES: Final = CodexSettings.policies
"""The approval policies of the runner's form; a policy file may name these and no other."""
