"""The relay's way to the network: a clock that counts through a suspend, and WebSocket options that are the same everywhere.

Guarantees: no compression, no message larger than a frame, no proxy from the environment, no redirect followed, nothing of
what goes over the wire in a log; a plain ``ws://`` address off this machine is refused unless its owner insists; a browser's
page (it sends an ``Origin``) never gets a connection.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException
from websockets.protocol import State

from pkg import limits, traceless
from pkg.relay_errors import SILENT

if hasattr(time, "CLOCK_BOOTTIME"):

    def relay_clock() -> float:
        """Seconds that never go back and count while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def relay_clock() -> float:
        """Seconds that never go back."""
        return time.monotonic()


async def listen(
    handler: Callable[[ServerConnection], Awaitable[None]],
    host: str,
    port: int,
    *,
    connection: Callable[..., ServerConnection],
    max_size: int,
) -> Server:
    """A listening WebSocket server; raises ``OSError`` when the address can't be bound, and ``OverflowError`` for no port.

    ``connection`` makes what the library calls for each that is accepted, ``max_size`` is bytes of a message.
    """
    return await serve(
        handler,
        host,
        port,
        compression=None,
        origins=[None],
        server_header=None,
        create_connection=cast(type[ServerConnection], connection),
        max_size=max_size,
        max_queue=limits.RELAY_SOCKET_QUEUE,
        write_limit=limits.RELAY_SOCKET_BUFFER,
        ping_interval=None,
        open_timeout=limits.RELAY_HANDSHAKE,
        close_timeout=limits.RELAY_CLOSE,
        backlog=limits.RELAY_BACKLOG,
        logger=SILENT,
    )


NOT_YET: Final = (
    "The plugin opens its hub with the first message to a runner whose location is daemon; the daemon goes on trying until then"
)
"""Said with a hub that is not there, which may be well."""


class _Connect(connect):
    """A client that goes nowhere else."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Never follow."""
        return exc


class WrongCertificate(ssl.SSLError):
    """The hub showed another certificate than the pinned one."""


async def dial(url: str, *, context: ssl.SSLContext | None, pin: str, timeout: float) -> ClientConnection:
    """A connection to a hub; raises ``OSError``, ``TimeoutError`` or a WebSocket handshake's exception.

    ``pin`` is the SHA-256 of the certificate in hex, ``""`` for the authorities of ``context`` (``None``: the system's).
    """
    options: dict[str, Any] = {}
    if url.startswith("wss:"):
        options["ssl"] = context or (_unverified() if pin else ssl.create_default_context())
    connection = await _Connect(
        url,
        compression=None,
        user_agent_header=None,
        proxy=None,
        max_size=limits.RELAY_SOCKET_BYTES,
        max_queue=limits.RELAY_SOCKET_QUEUE,
        write_limit=limits.RELAY_SOCKET_BUFFER,
        ping_interval=None,
        open_timeout=timeout,
        close_timeout=limits.RELAY_CLOSE,
        logger=SILENT,
        **options,
    )
    if pin:
        tunnel = connection.transport.get_extra_info("ssl_object")
        shown = hashlib.sha256(tunnel.getpeercert(True) or b"").hexdigest() if tunnel is not None else ""
        if not hmac.compare_digest(shown, pin.replace(":", "").lower()):
            connection.transport.abort()
            raise WrongCertificate("the hub's certificate is not the pinned one")
    return connection


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def address_problem(url: str, *, insecure_plaintext: bool) -> str:
    """Why a hub's address can't be used, in a few words; ``""`` for one that can."""
    try:
        parts = traceless.split_url(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        return "not an address"
    if parts.scheme not in ("ws", "wss") or not host:
        return "a hub's address begins with wss:// or ws:// and names a machine"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "no user, password or parameters belong into a hub's address"
    if parts.scheme == "ws" and not insecure_plaintext and not _loopback(host):
        return "plain ws:// leaves this machine unencrypted; use wss://, an SSH tunnel, or insecure_plaintext = true"
    return ""


def authentic(url: str, *, context: ssl.SSLContext | None, pin: str) -> bool:
    """Whether nobody but the hub can answer at this address: its certificate is checked, or it is on this machine.

    Close frames carry no seal, so on plain ``ws://`` to another machine anybody on the way can send one.
    """
    parts = traceless.split_url(url)
    if parts.scheme == "wss":
        return bool(pin) or context is None or context.check_hostname
    return _loopback(parts.hostname or "")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def network_trouble(exc: BaseException) -> bool:
    """Whether names or certificates fail, which takes a person, and not merely the connection."""
    return isinstance(exc, socket.gaierror | ssl.SSLError)


def trouble(exc: BaseException) -> str:
    """Why :func:`dial` did not reach a hub, in words for the machine's owner."""
    if isinstance(exc, WrongCertificate):
        return "its certificate is another one than certificate_sha256 says"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({exc.verify_message}); see certificate_sha256"
    if isinstance(exc, ssl.SSLError | ConnectionResetError):
        return "what listens there hangs up; are ws:// and wss:// mixed up?"
    if isinstance(exc, socket.gaierror):
        return "the name is not known"
    if isinstance(exc, ConnectionRefusedError):
        return f"nobody listens there. {NOT_YET}"
    if isinstance(exc, TimeoutError):
        return f"no answer within {limits.RELAY_HANDSHAKE:g} seconds"
    if isinstance(exc, InvalidStatus) and exc.response.status_code in (502, 503, 504):
        return f"the proxy there reaches no hub. {NOT_YET}"
    if isinstance(exc, InvalidStatus):
        return f"the server answers {exc.response.status_code} instead of a WebSocket; does the proxy pass those on to the hub?"
    if isinstance(exc, InvalidMessage) and isinstance(exc.__cause__, EOFError):
        return f"what listens there hangs up, as an SSH tunnel to a hub that is not there does. {NOT_YET}"
    if isinstance(exc, WebSocketException | EOFError):
        return "what answers there is no WebSocket"
    return f"cannot be reached ({exc.strerror or type(exc).__name__})" if isinstance(exc, OSError) else type(exc).__name__


def cut(connection: ServerConnection | ClientConnection) -> None:
    """End a connection at once, whatever waits to be sent; nothing to do when it has ended."""
    inner = connection.transport.get_extra_info("socket")
    # A transport that closed itself once its buffer was empty can't be aborted any more: it has forgotten its loop.
    if inner is not None and inner.fileno() >= 0:
        connection.transport.abort()


class Sending:
    """The one way frames take on a connection: one at a time, and the connection is cut when the other side takes nothing."""

    def __init__(self, connection: ServerConnection | ClientConnection, patience: float) -> None:
        """``patience`` is seconds one frame may wait for the other side."""
        self._connection = connection
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        """One for many frames: a timer for each would cost more than most frames."""

    @property
    def free(self) -> bool:
        """Whether a frame would go out now: none is on its way, and the connection is open."""
        return self._since is None and self._connection.state is State.OPEN

    async def send(self, frame: bytes) -> None:
        """Send one frame; raises ``websockets.exceptions.ConnectionClosed`` when the connection is gone."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._patience, self._look, context=contextvars.Context())
        try:
            await self._connection.send(frame, text=True)
        finally:
            self._since = None

    def stop(self) -> None:
        """Nothing will be sent any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        left = self._since + self._patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look, context=contextvars.Context())
        else:
            cut(self._connection)


async def close(connection: ServerConnection | ClientConnection, code: int, reason: str, patience: float) -> None:
    """Close a connection and cut it when the other side does not answer within ``patience`` seconds."""
    timer = traceless.call_later(patience, cut, connection)
    try:
        await connection.close(code, reason)
    finally:
        timer.cancel()
