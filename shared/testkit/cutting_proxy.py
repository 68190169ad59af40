"""A TCP proxy that misbehaves on demand: it cuts, swallows, holds back, injects, and remembers every byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass, field


@dataclass(eq=False)
class Pipe:
    """One proxied connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    up: bytearray = field(default_factory=bytearray)
    """Everything the client sent, masked as it was."""
    down: bytearray = field(default_factory=bytearray)
    """Everything the server sent."""
    swallowing: bool = False
    live: bool = True
    """Whether neither side has ended it and it was not cut."""

    def abort(self) -> None:
        """Reset both sides."""
        self.live = False
        for writer in (self.client, self.server):
            _reset(writer)


class CuttingProxy:
    """Listens on a free loopback port and forwards to ``target``; ``async with`` opens and closes it.

    With ``record`` off it forgets what passed and every connection that has ended, so that it can run for long.
    """

    def __init__(self, target: tuple[str, int], *, record: bool = True) -> None:
        self.target = target
        self._record = record
        self.pipes: list[Pipe] = []
        """Every connection there was."""
        self.connected = asyncio.Event()
        self.refused = 0
        """Connections that were reset because the way was cut."""
        self._down = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The proxy's own WebSocket address."""
        assert self._server is not None
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in self.pipes:
            pipe.abort()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5)
        await self._server.wait_closed()

    # ---- misbehaviour

    def cut(self) -> int:
        """Reset every connection and every new one until :meth:`restore`; how many were live."""
        self._down = True
        count = sum(pipe.live for pipe in self.pipes)
        for pipe in self.pipes:
            pipe.abort()
        return count

    def restore(self) -> None:
        """Let new connections pass."""
        self._down = False

    def black_hole(self) -> None:
        """Let the connections of now stay open and carry nothing any more; new ones pass."""
        for pipe in self.pipes:
            pipe.swallowing = True

    def inject_down(self, frame: bytes) -> None:
        """Send a text frame to the client as if the server had."""
        self.pipes[-1].client.write(ws_frame(frame))

    def inject_up(self, frame: bytes) -> None:
        """Send a text frame to the server as if the client had."""
        self.pipes[-1].server.write(ws_frame(frame, mask=os.urandom(4)))

    def inject_close(self, code: int, reason: str) -> None:
        """Send a close frame to the client as if the server had."""
        self.pipes[-1].client.write(ws_frame(code.to_bytes(2, "big") + reason.encode(), opcode=8))

    def recorded(self) -> bytes:
        """Every byte of both directions, the client's messages unmasked and raw."""
        return b"".join(bytes(pipe.up + pipe.down) + unmasked(bytes(pipe.up)) for pipe in self.pipes)

    # ---- forwarding

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._down:
                self.refused += 1
                _reset(writer)
                return
            try:
                there, back = await asyncio.open_connection(*self.target)
            except OSError:
                _reset(writer)
                return
            pipe = Pipe(writer, back)
            self.pipes.append(pipe)
            self.connected.set()
            await asyncio.gather(
                self._forward(pipe, reader, back, pipe.up),
                self._forward(pipe, there, writer, pipe.down),
                return_exceptions=True,
            )
            pipe.abort()
            if not self._record:
                self.pipes.remove(pipe)
        finally:
            self._tasks.discard(task)

    async def _forward(self, pipe: Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self._record:
                    record += data
                if not pipe.swallowing:
                    writer.write(data)
                    await writer.drain()
        if not pipe.swallowing:
            with contextlib.suppress(ConnectionError, RuntimeError, OSError):
                writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def ws_frame(data: bytes, mask: bytes = b"", opcode: int = 1) -> bytes:
    """One WebSocket frame (RFC 6455, 5.2)."""
    size = len(data)
    flag = 0x80 if mask else 0
    head = bytes([0x80 | opcode])
    if size < 126:
        head += bytes([flag | size])
    elif size < 65536:
        head += bytes([flag | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([flag | 127]) + size.to_bytes(8, "big")
    return head + mask + (_masked(data, mask) if mask else data)


def messages_of(stream: bytes) -> list[bytes]:
    """The payloads of one direction's frames behind its HTTP head, unmasked where they are masked."""
    _, _, rest = stream.partition(b"\r\n\r\n")
    out: list[bytes] = []
    while len(rest) >= 2:
        masked, size, at = rest[1] >> 7, rest[1] & 0x7F, 2
        if size == 126:
            size, at = int.from_bytes(rest[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(rest[2:10], "big"), 10
        mask, at = (rest[at : at + 4], at + 4) if masked else (b"\0" * 4, at)
        if len(mask) < 4 or len(rest) < at + size:
            break
        out.append(_masked(rest[at : at + size], mask))
        rest = rest[at + size :]
    return out


def unmasked(stream: bytes) -> bytes:
    """The payloads of a client's frames behind its HTTP request, the last one as far as it came."""
    _, _, rest = stream.partition(b"\r\n\r\n")
    out: list[bytes] = []
    while len(rest) >= 2:
        size, at = rest[1] & 0x7F, 2
        if size == 126:
            size, at = int.from_bytes(rest[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(rest[2:10], "big"), 10
        mask, at = rest[at : at + 4], at + 4
        if len(mask) < 4:
            break
        out.append(_masked(rest[at : at + size], mask))
        rest = rest[at + size :]
    return b"".join(out)


def _masked(data: bytes, mask: bytes) -> bytes:
    size = len(data)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")
