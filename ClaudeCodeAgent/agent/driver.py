"""What this version answers when it is asked to open Claude Code: it cannot drive it and says what to use instead."""

from __future__ import annotations

from typing import NoReturn

from pkg.agent_api import SessionSpec
from pkg.errors import Refused
from pkg.launch import Launcher

NAME = "claude-code"


def unavailable() -> Refused:
    """The refusal, before anything is started: ``coding.driver_not_available``."""
    return Refused("coding.driver_not_available", agent="Claude Code")


class ClaudeCodeDriver:
    """An :class:`pkg.agent_api.AgentDriver` that refuses every session."""

    @property
    def name(self) -> str:
        """``claude-code``."""
        return NAME

    def unavailable(self) -> Refused:
        """What every session is refused with."""
        return unavailable()

    async def open(self, spec: SessionSpec, launcher: Launcher) -> NoReturn:
        """Raises :class:`pkg.errors.Refused`; starts nothing."""
        raise unavailable()
