"""The HTTP shell around LangBot's tools: one loopback listener per event loop, one bearer per endpoint.

:func:`open_endpoint` gives a payload handler an address that an agent's MCP client can use (streamable HTTP, JSON answers,
no sessions, no event stream). The shell knows nothing of tools or of LangBot.

Guarantees:

- the socket is bound to the literal ``127.0.0.1`` on a free port, opened with the first endpoint and closed with the last;
  it is started in an empty :class:`contextvars.Context`, so no request ever runs with some run's authority by accident;
- a request reaches a handler only with that endpoint's own bearer on that endpoint's own path. Bearers are 32 random bytes,
  kept as SHA-256 only, looked up by hash and compared in constant time; a closed endpoint's bearer is refused at once (401);
- ``Host`` and ``Origin`` must name this machine (no DNS rebinding), before anything else is looked at; the body is read only
  after the bearer was checked, at most ``MCP_BODY_BYTES`` (413), never decompressed;
- connections are counted: one that has not presented a valid bearer soon is dropped, and the oldest of these makes room for a
  new one; an endpoint and an owner with too many lose an idle one, and a request is refused (503) when they have none;
- no thread is used, no request is logged, and what a client sent never appears in a log line;
- :meth:`Endpoint.close` returns when no request of that endpoint is being answered any more, and leaves it no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import hmac
import json
import logging
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Final, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pkg import limits, traceless
from pkg.agent_api import Json

PayloadHandler = Callable[[Json], Awaitable[Json]]
"""Answers one decoded JSON-RPC payload; ``None`` means that nothing is to be answered (202)."""

_LOOPBACK: Final = "127.0.0.1"
_LOCAL_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PREFIX: Final = "/mcp/"

_SILENT: Final = logging.Logger("coding.mcp")
_SILENT.disabled = True

Result = TypeVar("Result")


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` in an empty context to its end, however often the caller is cancelled; then let the cancellation go on."""
    task = asyncio.create_task(work, context=contextvars.Context())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return task.result()


class Endpoint:
    """One address on the listener: a URL and the bearer that opens it, until :meth:`close`."""

    def __init__(self, listener: _Listener, handler: PayloadHandler, owner: Hashable) -> None:
        """Made by :func:`open_endpoint` only."""
        self.bearer = secrets.token_urlsafe(limits.MCP_BEARER_BYTES)
        self.path = _PREFIX + secrets.token_urlsafe(limits.MCP_PATH_BYTES)
        self.handler = handler
        self.owner = owner
        self.digest = _digest(self.bearer)
        self.transports: set[asyncio.Transport] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self._listener = listener

    def __repr__(self) -> str:
        return "Endpoint()"

    @property
    def url(self) -> str:
        """The address as an agent on this machine reaches it."""
        return f"http://{_LOOPBACK}:{self._listener.port}{self.path}"

    def sibling(self, handler: PayloadHandler) -> Endpoint:
        """Another endpoint, at once: the listener stays open for this one, which must not be closed before the other."""
        return self._listener.put(handler, self.owner)

    def revoke(self) -> None:
        """Make the bearer worthless, at once and without waiting; idempotent."""
        self._listener.forget(self)

    async def close(self) -> None:
        """Revoke, let answers in flight leave, cut what does not; closes the listener with its last endpoint. Idempotent."""
        self.revoke()
        await to_the_end(self._listener.settle(self))


async def open_endpoint(handler: PayloadHandler, *, owner: Hashable = None) -> Endpoint:
    """A new endpoint whose authenticated payloads go to ``handler``; whoever opens it must :meth:`Endpoint.close` it.

    Endpoints of one ``owner`` share its bound of connections; where there is none, everything is one owner's.
    """
    loop = asyncio.get_running_loop()
    listener = _LISTENERS.get(loop)
    if listener is None:
        listener = _LISTENERS[loop] = _Listener()
    return await listener.add(handler, owner)


def _digest(bearer: str) -> bytes:
    return hashlib.sha256(bearer.encode("utf-8", "surrogateescape")).digest()


class _Server(web.Server):
    """aiohttp's server with its connections counted, and a time limit for those that proved nothing."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            handler,
            logger=_SILENT,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.MCP_KEEPALIVE_SECONDS,
            lingering_time=0,
        )
        self._unproven: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._proven: dict[RequestHandler, Endpoint] = {}
        """With whose bearer each asked last; whichever did so longest ago is the first."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._unproven[handler] = traceless.call_later(limits.MCP_UNPROVEN_SECONDS, transport.abort)
        if len(self._unproven) > limits.MCP_UNPROVEN or len(self._unproven) + len(self._proven) > limits.MCP_CONNECTIONS:
            oldest = next(iter(self._unproven))
            self._forget(oldest)
            if oldest.transport is not None:
                # aiohttp's own first step for this connection may be still to come, and it needs an open one.
                asyncio.get_running_loop().call_soon(oldest.transport.abort)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        self._forget(handler)
        super().connection_lost(handler, exc)

    def admits(self, handler: RequestHandler, endpoint: Endpoint) -> bool:
        """Whether there is room for the connection, which has presented the endpoint's bearer: it is no longer watched then."""
        others = {each: its for each, its in self._proven.items() if each is not handler}
        same = [each for each, its in others.items() if its is endpoint]
        owned = [each for each, its in others.items() if endpoint.owner is not None and its.owner == endpoint.owner]
        for theirs, most in ((same, limits.MCP_CONNECTIONS_PER_ENDPOINT), (owned, limits.MCP_CONNECTIONS_PER_INSTALLATION)):
            if len(theirs) >= most:
                idle = next((each for each in theirs if each.transport not in others[each].transports), None)
                if idle is None:
                    return False
                self._let_go(idle)
        self._forget(handler)
        self._proven[handler] = endpoint
        return True

    def leave(self, endpoint: Endpoint) -> None:
        """Let go of the endpoint's connections, none of which has a request in flight."""
        for handler in [each for each, its in self._proven.items() if its is endpoint]:
            self._let_go(handler)

    def _let_go(self, handler: RequestHandler) -> None:
        """Close an idle connection as soon as what was written has left, and soon in any case."""
        self._forget(handler)
        if handler.transport is not None:
            handler.transport.close()
            traceless.call_later(limits.MCP_STOP_SECONDS, handler.transport.abort)

    def _forget(self, handler: RequestHandler) -> None:
        self._proven.pop(handler, None)
        timer = self._unproven.pop(handler, None)
        if timer is not None:
            timer.cancel()


class _Listener:
    """The listener of one event loop: exists from its first endpoint to its last."""

    def __init__(self) -> None:
        self.port = 0
        self._endpoints: dict[bytes, Endpoint] = {}
        self._server: _Server | None = None
        self._runner: web.ServerRunner | None = None
        self._lock = asyncio.Lock()
        self._working: set[asyncio.Task[Any]] = set()

    # ---- life

    async def add(self, handler: PayloadHandler, owner: Hashable) -> Endpoint:
        async with self._lock:
            if self._runner is None:
                await to_the_end(self._start())
            return self.put(handler, owner)

    def put(self, handler: PayloadHandler, owner: Hashable) -> Endpoint:
        endpoint = Endpoint(self, handler, owner)
        self._endpoints[endpoint.digest] = endpoint
        return endpoint

    def forget(self, endpoint: Endpoint) -> None:
        self._endpoints.pop(endpoint.digest, None)

    async def settle(self, endpoint: Endpoint) -> None:
        if endpoint.transports:
            with contextlib.suppress(TimeoutError):
                async with traceless.within(limits.MCP_STOP_SECONDS):
                    await endpoint.idle.wait()
        for transport in tuple(endpoint.transports):
            transport.abort()
        await endpoint.idle.wait()
        if self._server is not None:
            self._server.leave(endpoint)
        async with self._lock:
            if not self._endpoints and self._runner is not None:
                await self._stop()

    async def _start(self) -> None:
        server = _Server(self._answer)
        runner = web.ServerRunner(server, shutdown_timeout=limits.MCP_STOP_SECONDS)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((_LOOPBACK, 0))
            await runner.setup()
            await web.SockSite(runner, sock).start()
        except BaseException:
            await runner.cleanup()
            sock.close()
            raise
        self._server, self._runner, self.port = server, runner, sock.getsockname()[1]

    async def _stop(self) -> None:
        runner, self._runner, self._server = self._runner, None, None
        assert runner is not None
        await runner.cleanup()
        if self._working:
            await asyncio.wait(tuple(self._working), timeout=limits.MCP_STOP_SECONDS)

    # ---- one request

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            return await self._route(request)
        finally:
            self._working.discard(task)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if not _names_this_machine(request.headers.get("Host"), scheme=""):
            return _refusal(403, "this address answers to 127.0.0.1 only")
        origin = request.headers.get("Origin")
        if origin is not None and not _names_this_machine(origin, scheme="http"):
            return _refusal(403, "this origin may not use this address")
        if not request.path.startswith(_PREFIX):
            return _refusal(404, "nothing here")
        if request.method != "POST":
            return _refusal(405, "only POST", {"Allow": "POST"})
        endpoint = self._authenticated(request)
        if endpoint is None:
            return _refusal(401, "the bearer is missing or no longer valid", {"WWW-Authenticate": "Bearer"})
        transport = request.transport
        if transport is None:
            return _refusal(400, "the connection is gone")
        if self._server is not None and not self._server.admits(request.protocol, endpoint):
            return _refusal(503, "too many requests at once: wait for some of them, then try again")
        endpoint.transports.add(transport)
        endpoint.idle.clear()
        try:
            response = await _served(endpoint.handler, request)
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            endpoint.transports.discard(transport)
            if not endpoint.transports:
                endpoint.idle.set()

    def _authenticated(self, request: web.BaseRequest) -> Endpoint | None:
        scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(presented.strip())
        endpoint = self._endpoints.get(digest)
        if endpoint is None or not hmac.compare_digest(digest, endpoint.digest):
            return None
        path = request.path.encode("utf-8", "surrogateescape")
        return endpoint if hmac.compare_digest(path, endpoint.path.encode()) else None


_LISTENERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Listener]] = weakref.WeakKeyDictionary()


def _names_this_machine(value: str | None, *, scheme: str) -> bool:
    if not value:
        return False
    try:
        parts = traceless.split_url(value if scheme else f"//{value}")
        _ = parts.port
    except ValueError:
        return False
    if scheme and parts.scheme not in ("http", "https"):
        return False
    return parts.hostname in _LOCAL_NAMES


async def _served(handler: PayloadHandler, request: web.BaseRequest) -> web.Response:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return _refusal(415, "bodies are taken as they are, not compressed")
    try:
        async with traceless.within(limits.MCP_BODY_SECONDS):
            body = await _body(request)
    except TimeoutError:
        return _refusal(408, "the body did not arrive")
    except (ConnectionError, web.RequestPayloadError):
        return _refusal(400, "the body broke off")
    if body is None:
        return _refusal(413, f"a body may have {limits.MCP_BODY_BYTES} bytes")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return _json_rpc_refusal(-32700, "Parse error")
    answer = await handler(payload)
    if answer is None:
        return web.Response(status=202)
    return web.Response(body=json.dumps(answer).encode("ascii"), content_type="application/json")


async def _body(request: web.BaseRequest) -> bytes | None:
    announced = request.content_length
    if announced is not None and announced > limits.MCP_BODY_BYTES:
        return None
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limits.MCP_BODY_BYTES:
            return None
    return bytes(body)


def _refusal(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    response = web.json_response({"error": text}, status=status, headers=headers)
    response.force_close()
    return response


def _json_rpc_refusal(code: int, text: str) -> web.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": text}}
    return web.json_response(body, status=400)
