"""What the relay's shells raise and log: one exception with a stable code, and loggers that never hold a frame."""

from __future__ import annotations

import logging
from typing import Final

from pkg import texts
from pkg.errors import CodingError

SILENT: Final = logging.Logger("coding.relay.wire")
"""For libraries that would log what goes over the wire."""
SILENT.disabled = True


class AgentRuntimeDaemonError(Exception):
    """The relay cannot do what it was asked.

    ``code`` is ``<prefix>.<reason>``, ``message`` the English text for a person, ``retryable`` whether waiting may help.
    """

    def __init__(self, message: str, code: str = "agent_runtime.daemon_error", retryable: bool = False) -> None:
        """The established shape; :func:`relay_error` fills it from the catalogue."""
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable
        self.params: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """The code without its prefix."""
        return self.code.rpartition(".")[2]

    def coding_error(self) -> CodingError:
        """The same for the chat: in its catalogue where it has a text, else as the daemon's own words."""
        code = f"coding.{self.reason}"
        if code in texts.catalogue(texts.DEFAULT_LANGUAGE):
            return CodingError(code, retryable=self.retryable, params=self.params)
        return CodingError("coding.daemon_job_failed", retryable=self.retryable)


def relay_error(prefix: str, reason: str, /, *, retryable: bool = False, **params: object) -> AgentRuntimeDaemonError:
    """The error ``<prefix>.<reason>`` with the text of ``coding.<reason>``."""
    message = texts.render(f"coding.{reason}", texts.DEFAULT_LANGUAGE, params)
    error = AgentRuntimeDaemonError(message, f"{prefix}.{reason}", retryable)
    error.params = {name: str(value) for name, value in params.items()}
    return error
