"""The vendor session id of a conversation, kept in the host's state store.

One value per key in scope ``conversation``; the key is a scoped name (:func:`pkg.identity.session_key`) that holds every
part that makes the session somebody's. Only the vendor's id is stored: no secret, no text. The value outlives any failure of
the agent; it is replaced when another session was opened and never deleted because something went wrong.

A host without a state store, or one that fails, costs the memory of the conversation and never the run.
"""

from __future__ import annotations

import logging
from typing import Any

from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.errors import AgentAPIException
from langbot_plugin.api.proxies.runner.common import PermissionDeniedError

from pkg import limits

log = logging.getLogger(__name__)

SCOPE = "conversation"
HOST_PROBLEMS = (AgentAPIException, PermissionDeniedError, ValueError, RuntimeError)
"""What the SDK's run-scoped calls raise when the host refuses, fails or has ended the run (SDK 0.7.18)."""


def storable(session_id: str) -> bool:
    """Whether the host is given an agent's name for a session to keep: one that a person could read, and no long one."""
    return 0 < len(session_id) <= limits.SESSION_ID_CHARS and session_id.isprintable()


class SessionStore:
    """Reads and writes one key of the host's state."""

    def __init__(self, ctx: RunnerContext, key: str) -> None:
        """``key`` is a scoped name."""
        self._ctx = ctx
        self._key = key
        self._known: str | None = None

    async def load(self) -> str:
        """The stored value, ``""`` when there is none or the host can't say."""
        snapshot = self._ctx.state.conversation
        if self._key in snapshot:
            self._known = _text(snapshot[self._key])
        elif self._ctx.context.available_apis.state:
            try:
                self._known = _text((await self._ctx.state_get(SCOPE, self._key)).get("value"))
            except HOST_PROBLEMS as exc:
                log.warning("stored session not readable: %s", type(exc).__name__)
        return self._known or ""

    async def save(self, value: str) -> bool:
        """Store ``value`` unless it is known to be stored already; whether it is stored now."""
        if value == self._known or not self._ctx.context.available_apis.state:
            return value == self._known
        try:
            await self._ctx.state_set(SCOPE, self._key, {"value": value})
        except HOST_PROBLEMS as exc:
            log.warning("session not stored: %s", type(exc).__name__)
            return False
        self._known = value
        return True


def _text(value: Any) -> str:
    found = value.get("value") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""
