"""One end of a relay connection by hand, on real sockets: daemons and hubs that say what a test wants, and TLS in between."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
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


# ------------------------------------------------------------------ TLS


class TlsFront:
    """A TLS listener with a certificate of its own that passes everything on; ``async with`` opens and closes it."""

    def __init__(self, target: tuple[str, int], directory: Path, names: Sequence[str] = ("127.0.0.1",)) -> None:
        """``names`` are the machines the certificate is for; it is signed by nobody but itself."""
        self.target = target
        self.file = directory / "front.pem"
        self.connections = 0
        """Connections whose TLS handshake succeeded."""
        self.passed = bytearray()
        """What clients said inside."""
        self._key = directory / "front.key"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        der = _self_signed(self._key, self.file, names)
        self.pin = hashlib.sha256(der).hexdigest()
        """The certificate's SHA-256."""

    @property
    def url(self) -> str:
        """Its address."""
        assert self._server is not None
        return f"wss://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def trusting(self) -> ssl.SSLContext:
        """A client's context whose only authority is this certificate."""
        return ssl.create_default_context(cafile=str(self.file))

    async def __aenter__(self) -> TlsFront:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self._key)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        there, back = await asyncio.open_connection(*self.target)
        ways = {
            asyncio.create_task(_pass_on(reader, back, self.passed)),
            asyncio.create_task(_pass_on(there, writer, bytearray())),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for end in (writer, back):
                end.transport.abort()
            self._tasks.discard(task)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            record += data
            writer.write(data)
            await writer.drain()


def _self_signed(key_file: Path, file: Path, names: Sequence[str]) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate.public_bytes(serialization.Encoding.DER)
