"""The hub's entrance: what connections of which nobody knows yet who they are may cost its process.

Guarantees: at most ``RELAY_OPENING`` connections of a listener are in their WebSocket handshake at once, the oldest of the
largest crowd gives way; until :func:`widen` a connection's message is not taken from the wire beyond ``RELAY_UNPROVEN_BYTES``.
What is proven is bounded by the protocol itself, and so is what has finished this handshake and not the relay's.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from websockets.asyncio.server import ServerConnection

from pkg import limits, relay_sockets
from pkg.relay_admission import gives_way

_SIZES: Final = ("max_message_size", "max_size")
"""How the library names the bound that its parser reads for each frame (websockets 16 and 17; 15)."""


def address_of(connection: ServerConnection) -> str:
    """The peer's address without its port."""
    peer = connection.remote_address
    return str(peer[0]) if isinstance(peer, tuple) and peer else "local"


class Entrance:
    """The connections of one listener that have not finished their WebSocket handshake."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: dict[ServerConnection, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def connection(self, *given: Any, **named: Any) -> ServerConnection:
        """What the library makes for an accepted connection."""
        return _Connection(self, *given, **named)

    def enter(self, connection: ServerConnection) -> None:
        """A connection was accepted."""
        if len(self._waiting) >= limits.RELAY_OPENING:
            oldest = gives_way(self._waiting)
            del self._waiting[oldest]
            relay_sockets.cut(oldest)
        self._waiting[connection] = address_of(connection)

    def leave(self, connection: ServerConnection) -> None:
        """Its handshake is over, or it is gone."""
        self._waiting.pop(connection, None)


class _Connection(ServerConnection):
    def __init__(self, entrance: Entrance, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._entrance = entrance

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._entrance.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._entrance.leave(self)
        super().connection_lost(exc)


def widen(connection: ServerConnection) -> None:
    """Take whole frames from a connection that is proven; before anything is sent to which it may answer with one."""
    for name in _SIZES:
        if hasattr(connection.protocol, name):
            setattr(connection.protocol, name, limits.RELAY_SOCKET_BYTES)
