"""TLS in front of a listener that has none, with a certificate that no authority knows."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def tls_in_front_of(target: tuple[str, int], directory: Path) -> AsyncIterator[tuple[str, str]]:
    """A TLS listener that passes everything on to ``target``: its address, and its certificate's fingerprint."""
    key, certificate = directory / "tls.key", directory / "tls.pem"
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    process = await asyncio.create_subprocess_exec(
        *made, "-subj", "/CN=hub", "-keyout", str(key), "-out", str(certificate), stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection(*target)
        except OSError:
            writer.transport.abort()
            return
        ways = [asyncio.create_task(pass_on(reader, here)), asyncio.create_task(pass_on(there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)
        for way in ways:
            if not way.cancelled():
                way.exception()
        for end in (writer, here):
            end.transport.abort()

    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context)
    try:
        port = server.sockets[0].getsockname()[1]
        pem = ssl.PEM_cert_to_DER_cert(certificate.read_text())
        yield f"wss://127.0.0.1:{port}", hashlib.sha256(pem).hexdigest()
    finally:
        server.close()
        await server.wait_closed()
