"""The hub's entrance: what connections may cost its process, above all those of which nobody knows yet who they are.

Guarantees: at most ``RELAY_OPENING`` connections of a listener are in their WebSocket handshake at once, the oldest of the
largest crowd gives way; until :func:`proven` a connection's message is not taken from the wire beyond ``RELAY_UNPROVEN_BYTES``;
the connections of all listeners take at most one in ``RELAY_DESCRIPTORS_SHARE`` of the files the process may have open, and
past that whoever has most of them loses one, be it an installation or all strangers together. What is proven is bounded by the
protocol itself, and so is what has finished this handshake and not the relay's.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any, Final

from websockets.asyncio.server import ServerConnection

from pkg import limits, relay_sockets
from pkg.relay_admission import gives_way
from pkg.relay_auth import Installation

_SIZES: Final = ("max_message_size", "max_size")
"""How the library names the bound that its parser reads for each frame (websockets 16 and 17; 15)."""


_open: Final[dict[ServerConnection, Installation]] = {}
"""The connections of this process in order of arrival, and whose each is; ``None``: it is not proven."""


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
        _open[self] = None
        _give_back()

    def connection_lost(self, exc: Exception | None) -> None:
        self._entrance.leave(self)
        _open.pop(self, None)
        super().connection_lost(exc)


def _give_back() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or len(_open) <= most // limits.RELAY_DESCRIPTORS_SHARE:
        return
    [(largest, _)] = Counter(_open.values()).most_common(1)
    crowd = {connection: address_of(connection) for connection, owner in _open.items() if owner == largest}
    # Of an installation's own the newest: those that work go on, and one that comes again is the newest again.
    one = gives_way(crowd) if largest is None else next(reversed(crowd))
    del _open[one]
    relay_sockets.cut(one)


def proven(connection: ServerConnection, installation: Installation) -> None:
    """Take whole frames from a connection that is proven; before anything is sent to which it may answer with one."""
    if connection in _open:
        _open[connection] = installation
    for name in _SIZES:
        if hasattr(connection.protocol, name):
            setattr(connection.protocol, name, limits.RELAY_SOCKET_BYTES)
