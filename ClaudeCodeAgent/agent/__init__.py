"""The driver for Claude Code; ``DRIVERS`` is all that anybody else needs of it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import ClaudeCodeDriver
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"claude-code": ClaudeCodeDriver()})
"""The drivers of this package by name."""
