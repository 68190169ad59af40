"""The sabotages: single wrong lines that somebody might write, each with the tests that must not let it pass."""

from __future__ import annotations

from typing import Final

from tooling.sabotages import agents, isolation, keys, relay
from tooling.sabotages.line import Sabotage

__all__ = ["SABOTAGES", "Sabotage"]

SABOTAGES: Final[tuple[Sabotage, ...]] = (*keys.SABOTAGES, *isolation.SABOTAGES, *relay.SABOTAGES, *agents.SABOTAGES)
