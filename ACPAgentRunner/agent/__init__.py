"""The driver for agents of the Agent Client Protocol; ``DRIVERS`` is all that anybody else needs of it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from agent.driver import AcpDriver
from pkg.agent_api import AgentDriver

DRIVERS: Final[Mapping[str, AgentDriver]] = types.MappingProxyType({"acp": AcpDriver()})
"""The drivers of this package by name."""
