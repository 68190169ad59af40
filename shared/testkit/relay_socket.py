"""One end of a relay connection by hand, on real sockets: daemons and hubs that say what a test wants, and TLS in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from pkg import relay_sockets
from pkg.relay_auth import daemon_key, transcript
from pkg.relay_frames import Counters, SealedChannel
from testkit.relay_rig import TOKEN, WAIT

Json = Any


class SocketDaemon:
    """One connection of a daemon made by hand; ``async with`` opens it and cuts it."""

    def __init__(
        self, url: str, daemon_id: str = "mallory", token: str = TOKEN, *, address: str = "", incarnation: str = "by-hand"
    ) -> None:
        self.url = url
        self.daemon_id = daemon_id
        self.key = daemon_key(token, daemon_id)
        self.incarnation = incarnation
        self.channel: SealedChannel | None = None
        self._address = address
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> SocketDaemon:
        options: dict[str, Any] = {"local_addr": (self._address, 0)} if self._address else {}
        self._socket = await connect(
            self.url, compression=None, proxy=None, ping_interval=None, max_size=None, close_timeout=0.1, **options
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        relay_sockets.cut(self.socket)
        await self.socket.wait_closed()

    @property
    def socket(self) -> ClientConnection:
        """The WebSocket."""
        assert self._socket is not None
        return self._socket

    # ------------------------------------------------------------------ bytes

    async def push(self, frame: bytes) -> None:
        """Send a text message as it is."""
        await self.socket.send(frame, text=True)

    def write(self, data: bytes) -> None:
        """Send bytes as they are, WebSocket framing included."""
        self.socket.transport.write(data)

    async def pull(self) -> bytes:
        """The next message, raw."""
        async with asyncio.timeout(WAIT):
            return bytes(await self.socket.recv(decode=False))

    async def closed(self) -> tuple[int, str]:
        """How the hub closes this connection; ``(0, "")`` when it is cut."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.pull()
        told = self.socket.protocol.close_rcvd
        return (0, "") if told is None else (int(told.code), told.reason)

    # ------------------------------------------------------------------ the protocol

    async def prove(self) -> Json:
        """Hello, challenge and proof; the hub's answer."""
        fields = {
            "type": "daemon.hello",
            "protocol": "coding-relay-v1",
            "daemon_id": self.daemon_id,
            "daemon_incarnation": self.incarnation,
            "nonce": "bm9uY2Utbm9uY2Utbm9uY2UtMDE",
        }
        hello = json.dumps(fields).encode()
        await self.push(hello)
        shake = transcript(hello, await self.pull())
        await self.push(json.dumps({"type": "daemon.proof", "proof": shake.proof(self.key, "daemon")}).encode())
        answer = json.loads(await self.pull())
        if answer["type"] == "hub.proof":
            assert shake.proves(self.key, "hub", answer["proof"])
            self.channel = shake.channel(self.key, "daemon", Counters())
        return answer

    async def join(self) -> SocketDaemon:
        """Everything up to the hub's ``daemon.ready``."""
        assert (await self.prove())["type"] == "hub.proof"
        await self.say({"type": "daemon.state", "table": "by-hand", "resume": [], "quiesced": []})
        assert (await self.hear("daemon.ready"))["resumed"] == []
        return self

    def sealed(self, *parts: bytes) -> bytes:
        """The next frame, made of messages as they are."""
        assert self.channel is not None
        return self.channel.seal(parts)

    async def say(self, *messages: Json) -> None:
        """Send messages in one frame."""
        await self.push(self.sealed(*(json.dumps(message).encode() for message in messages)))

    async def hear(self, *kinds: str) -> Json:
        """The next message of these kinds; others are dropped."""
        assert self.channel is not None
        while True:
            for message in self.channel.open(await self.pull()) or []:
                if message["type"] in kinds:
                    return message


@contextlib.asynccontextmanager
async def hub_by_hand(speak: Callable[[ServerConnection], Awaitable[None]], port: int = 0) -> AsyncIterator[int]:
    """A listener that is no hub: what it says to whoever connects is ``speak``. Gives its port."""

    async def handle(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            await speak(connection)

    server = await serve(handle, "127.0.0.1", port, compression=None, max_size=None, close_timeout=0.1, ping_interval=None)
    try:
        yield next(iter(server.sockets)).getsockname()[1]
    finally:
        server.close(close_connections=False)
        for connection in server.connections:
            connection.transport.abort()
        await server.wait_closed()
