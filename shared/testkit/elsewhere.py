"""A server that sends every client on to another address, where whoever comes is counted; a local protocol fixture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")
"""Variables that programs take a proxy from, in small and in capital letters."""


@dataclass(slots=True)
class Elsewhere:
    """What the two addresses have seen."""

    port: int = 0
    """The one that answers 307 (Temporary Redirect)."""
    other: int = 0
    """The one that nobody was told to go to, or to go through."""
    asked: int = 0
    gone: int = 0

    @property
    def proxies(self) -> dict[str, str]:
        """An environment that sends everything through the other address."""
        names = [*PROXIES, *map(str.upper, PROXIES)]
        return {**dict.fromkeys(names, f"http://127.0.0.1:{self.other}"), "no_proxy": "", "NO_PROXY": ""}


@contextlib.asynccontextmanager
async def elsewhere(scheme: str = "http") -> AsyncIterator[Elsewhere]:
    """Both addresses, on loopback, while the block runs; ``scheme`` is the other one's as clients are told it."""
    seen = Elsewhere()

    async def sent_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.asked += 1
        await reader.readuntil(b"\r\n\r\n")
        place = f"{scheme}://127.0.0.1:{seen.other}/other"
        writer.write(
            f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {place}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.gone += 1
        writer.close()

    async with (
        await asyncio.start_server(sent_on, "127.0.0.1", 0) as first,
        await asyncio.start_server(counted, "127.0.0.1", 0) as second,
    ):
        seen.port = first.sockets[0].getsockname()[1]
        seen.other = second.sockets[0].getsockname()[1]
        yield seen
