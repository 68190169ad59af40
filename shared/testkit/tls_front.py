"""TLS in front of a listener that has none, with a certificate that no authority knows."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            self._tasks.discard(task)
            writer.transport.abort()
            return
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
