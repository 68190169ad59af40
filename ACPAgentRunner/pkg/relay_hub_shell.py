"""The hub as an installation uses it: start with a token, wait for a daemon, open jobs on it, stop.

An :class:`AgentRuntimeDaemonHub` is one installation's; where many installations share a worker (``shared``) their hubs share
one :class:`pkg.relay_listener.Listener` for each address, and the token alone decides whose a daemon is. The names are those
of the SDK's relay, so that code written for it moves over with its import.

Guarantees: starting is serialized and waits for nobody's connections to end, the same settings are the same listener, other
settings are a ``daemon_hub_conflict`` and never a silent reuse; a hub never acts in the context of the run that started it;
:func:`revoke` (and the installation's own revocation) drops exactly one installation's secret, daemons and jobs; in a shared
worker a secret is held only while a run or a connected daemon needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import re
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

from pkg import installations, limits, runtime_support, traceless
from pkg.agent_api import Json
from pkg.relay_auth import TOKEN_COMMAND, token_problem
from pkg.relay_errors import AgentRuntimeDaemonError, relay_error
from pkg.relay_events import RelayTimes
from pkg.relay_job import Job, Tools
from pkg.relay_listener import Listener, open_listener
from pkg.relay_markers import DiskMarkers
from pkg.runtime_support import WorkerShape
from pkg.tools_listener import to_the_end

log = logging.getLogger(__name__)

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8766
_DIGITS: Final = re.compile("[0-9]{1,9}")

_hubs: Final[dict[tuple[Hashable, Hashable], AgentRuntimeDaemonHub]] = {}
_listeners: Final[dict[tuple[str, int], Listener]] = {}
"""Listeners that several installations may share, by the address that each has bound and the port that was asked for."""
_starting: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]] = weakref.WeakKeyDictionary()


class DaemonHubConfig(TypedDict):
    """A hub's settings."""

    enabled: bool
    host: str
    port: int
    token: str


class DaemonInfo(TypedDict):
    """A connected daemon."""

    daemon_id: str
    metadata: Mapping[str, Json]
    features: list[str]
    fenced: bool
    active_jobs: list[str]


def agent_runtime_daemon_config_from_plugin_config(
    config: Mapping[str, Any] | None,
    *,
    env_prefix: str = "LANGBOT_AGENT_RUNTIME_DAEMON",
    default_host: str = DEFAULT_HOST,
    default_port: int = DEFAULT_PORT,
    environ: Mapping[str, str] | None = None,
) -> DaemonHubConfig:
    """A hub's settings out of a plugin's form, and of the environment (``<env_prefix>_ENABLED`` …)."""
    form = config or {}
    environ = os.environ if environ is None else environ

    def setting(name: str) -> Any:
        value = form.get(f"daemon-{name}")
        return environ.get(f"{env_prefix}_{name.upper()}", "") if value is None or value == "" else value

    enabled = setting("enabled")
    port = setting("port")
    return DaemonHubConfig(
        enabled=enabled.strip().lower() in ("1", "true", "yes", "y", "on") if isinstance(enabled, str) else bool(enabled),
        host=str(setting("host") or default_host),
        port=int(port) if _DIGITS.fullmatch(str(port).strip()) else default_port,
        token=str(setting("token")),
    )


async def handle_agent_runtime_mcp_payload(tools: Any, payload: Json) -> Json:
    """Answer one MCP payload with a run's tools: a callable, an object with ``answer``, or the SDK's external tools."""
    return await tools_of(tools)(payload)


def tools_of(tools: Any) -> Tools:
    """What answers the payloads of ``tools`` (see :func:`handle_agent_runtime_mcp_payload`)."""
    if hasattr(tools, "answer"):
        answer: Tools = tools.answer
        return answer
    if callable(tools):
        call: Tools = tools
        return call

    async def answer_with_the_sdk(payload: Json) -> Json:
        from langbot_plugin.api.agent_tools.mcp_protocol import handle_mcp_payload

        resolver = _Resolver(tools)
        return await handle_mcp_payload(payload, resolver, server_info={"name": "langbot", "version": "1"})

    return answer_with_the_sdk


class _Resolver:
    """The SDK's external tools as its MCP handler wants them."""

    def __init__(self, tools: Any) -> None:
        self._tools = tools

    async def list_tools(self) -> list[dict[str, Json]]:
        listed: list[dict[str, Json]] = self._tools.mcp_tools()
        return listed

    async def call_tool(self, name: str, arguments: dict[str, Json]) -> dict[str, Json]:
        result: dict[str, Json] = await self._tools.call_mcp_tool(name, arguments)
        return result


class AgentRuntimeDaemonHub:
    """One installation's daemons and jobs."""

    def __init__(
        self,
        *,
        error_code_prefix: str = "agent_runtime",
        state_dir: str | os.PathLike[str] | None = None,
        installation: Hashable = installations.UNBOUND,
        shared: bool = False,
        times: RelayTimes | None = None,
    ) -> None:
        """``state_dir`` holds the durable fences (``None``: they are derived from what daemons report).

        ``installation`` is the full binding where there is one, ``shared`` whether its worker serves others too.
        """
        self.error_code_prefix = error_code_prefix
        self.state_dir = None if state_dir is None else Path(state_dir)
        self.lease_seconds: float = limits.RELAY_LEASE
        """Seconds a job outlives its connection; 0: a disconnection cancels and fences."""
        self.times = times or RelayTimes()
        self._installation = installation
        self._shared = shared
        self._listener: Listener | None = None
        self._settings: tuple[str, int, str] | None = None
        self._changed = asyncio.Event()
        self._users = 0
        self._moving = 0
        self._forget: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"AgentRuntimeDaemonHub({self.endpoint!r})"

    @property
    def cancel_timeout(self) -> float:
        """Seconds a daemon gets to prove that a cancelled job is gone."""
        return self.times.cancel

    @cancel_timeout.setter
    def cancel_timeout(self, seconds: float) -> None:
        self.times = RelayTimes(
            heartbeat=self.times.heartbeat,
            dead=self.times.dead,
            handshake=self.times.handshake,
            probe=self.times.probe,
            cancel=seconds,
            ack_delay=self.times.ack_delay,
        )
        if self._listener is not None and not self._listener.shared:
            self._listener.times = self._listener.protocol.times = self.times

    @property
    def is_running(self) -> bool:
        """Whether this installation's daemons can connect."""
        return self._listener is not None and self._listener.open

    @property
    def endpoint(self) -> str:
        """The bound address as a ``ws://`` URL; ``""`` while it is not running."""
        if self._listener is None or not self._listener.open:
            return ""
        host, port = self._listener.address
        return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"

    # -------------------------------------------------------------- life

    async def start(self, host: str, port: int, token: str = "") -> None:
        """Listen, or join the listener of this address; nothing to do when that is done with the same settings.

        Raises :class:`AgentRuntimeDaemonError`: ``daemon_token_required``, ``daemon_token_conflict``, ``daemon_hub_conflict``,
        ``daemon_bind_failed``, ``daemon_address_overlaps``, ``revoked``.
        """
        strict = self._shared or runtime_support.worker_shape() is WorkerShape.JAIL
        problem = token_problem(token) if strict else "" if token else "missing"
        if problem:
            raise self._error("daemon_token_required", problem=problem, command=TOKEN_COMMAND)
        if not self._started(host, port, token):
            await to_the_end(self._start(host, port, token))

    async def _start(self, host: str, port: int, token: str) -> None:
        async with _turn():
            if self._started(host, port, token):
                return
            owner = installations.installation(self._installation)
            if owner.revoked:
                raise self._error("revoked")
            listener = _serving(host, port) if self._shared else None
            if listener is None:
                listener = await self._open(host, port)
            if self._installation in listener.users:
                raise self._error("daemon_hub_conflict", address=f"{host}:{port}")
            listener.register(self._installation, token, self._notice)
            self._listener, self._settings = listener, (host, port, token)
            if self._forget is None:
                self._forget = owner.hold(self._revoke)
            self._check_conflict()

    def _started(self, host: str, port: int, token: str) -> bool:
        """Whether it runs with these settings; raises when it runs with others, or with a token that is another's too."""
        if self._settings is None or not self.is_running:
            return False
        if self._settings != (host, port, token):
            raise self._error("daemon_hub_conflict", address=self.endpoint)
        self._check_conflict()
        return True

    def _check_conflict(self) -> None:
        """Both installations keep their secret here, so that neither has daemons until one of them changes it."""
        if self._listener is not None and self._listener.protocol.conflicting(self._installation):
            raise self._error("daemon_token_conflict")

    async def _open(self, host: str, port: int) -> Listener:
        markers = None if self.state_dir is None else DiskMarkers(self.state_dir)
        try:
            listener = await open_listener(_literal(host), port, shared=self._shared, markers=markers, times=self.times)
        except (OSError, ValueError, OverflowError) as exc:
            log.warning(
                "the hub can't listen on %r, port %d: %s", host, port, getattr(exc, "strerror", "") or type(exc).__name__
            )
            if (
                self._shared
                and isinstance(exc, OSError)
                and exc.errno == errno.EADDRINUSE
                and (other := _overlapping(host, port))
            ):
                raise self._error("daemon_address_overlaps", host=host, port=port, other=other) from None
            raise self._error("daemon_bind_failed", host=host, port=port) from None
        if self._shared:
            _listeners[_literal(host), port] = listener
        return listener

    async def ensure_started_from_config(self, config: Mapping[str, Any]) -> None:
        """Start with the settings of a plugin's form; see :meth:`start`."""
        settings = agent_runtime_daemon_config_from_plugin_config(config)
        await self.start(settings["host"], settings["port"], settings["token"])

    async def stop(self) -> None:
        """End this installation's jobs (proven, as far as that can be done in time) and its part of the listener."""
        await to_the_end(self._stop())

    async def _stop(self) -> None:
        async with _turn():
            listener = self._leave()
        if listener is not None:
            for job in listener.jobs_of(self._installation):
                listener.cancel(job.job_id)
            await self._ended(listener)

    async def _ended(self, listener: Listener) -> None:
        """Wait until this installation's jobs are over, as far as that can be done in time, and leave the listener."""
        # Without the turn: other installations start and stop meanwhile.
        with contextlib.suppress(TimeoutError):
            async with traceless.within(limits.RELAY_STOP):
                for job in listener.jobs_of(self._installation):
                    await job.ended.wait()
        listener.drop(self._installation)
        await self._close_unused(listener)

    async def _close_unused(self, listener: Listener) -> None:
        async with _turn():
            if listener.users:
                return
            for address, known in list(_listeners.items()):
                if known is listener:
                    del _listeners[address]
            listener.shut()
        # Without the turn: connections that do not answer a close take their time, and others start meanwhile.
        await listener.close()

    def _leave(self) -> Listener | None:
        listener, self._listener, self._settings = self._listener, None, None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        self._wake()
        return listener

    def _revoke(self) -> None:
        """The installation is gone: its secret at once, its jobs and daemons by a task that its revocation awaits."""
        _forget(self)
        listener = self._leave()
        if listener is not None:
            listener.forbid(self._installation)
            installations.installation(self._installation).adopt(self._ended(listener), name="relay revocation")

    def release(self) -> None:
        """In a shared worker: forget the secret unless a job, a waiting run or a connected daemon needs it."""
        listener = self._listener
        if listener is None or not self._shared or self._users:
            return
        protocol = listener.protocol
        if (
            listener.jobs_of(self._installation)
            or protocol.daemons(self._installation)
            or protocol.conflicting(self._installation)
        ):
            return
        self._leave()
        listener.drop(self._installation)
        installations.installation(self._installation).adopt(self._close_unused(listener), name="relay close")

    @contextlib.asynccontextmanager
    async def in_use(self, host: str, port: int, token: str) -> AsyncIterator[None]:
        """Started with these settings, and kept so while the block runs; see :meth:`reconfigure`."""
        try:
            with self._needed():
                await self.reconfigure(host, port, token)
                yield
        finally:
            self.release()

    async def reconfigure(self, host: str, port: int, token: str) -> None:
        """Start with other settings than before; a ``daemon_hub_conflict`` while jobs run.

        Whoever waits for a daemon goes on waiting, for one that connects under the new settings.
        """
        listener = self._listener
        if self._settings not in (None, (host, port, token)) and listener is not None:
            if listener.jobs_of(self._installation):
                raise self._error("daemon_hub_conflict", address=self.endpoint)
            self._moving += 1
            try:
                await self.stop()
                await self.start(host, port, token)
            finally:
                self._moving -= 1
                self._wake()
            return
        await self.start(host, port, token)

    @contextlib.contextmanager
    def _needed(self) -> Iterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def _notice(self) -> None:
        """Something about this installation's daemons has changed."""
        self._wake()
        if not self._users:
            self.release()

    def _wake(self) -> None:
        """Let those who wait look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -------------------------------------------------------------- daemons

    async def list_daemons(self) -> list[DaemonInfo]:
        """This installation's connected daemons."""
        listener = self._listener
        if listener is None:
            return []
        jobs = listener.jobs_of(self._installation)
        return [
            DaemonInfo(
                daemon_id=ready.daemon_id,
                metadata=ready.metadata,
                features=list(ready.features),
                fenced=ready.fenced,
                active_jobs=sorted(job.job_id for job in jobs if job.daemon_id == ready.daemon_id),
            )
            for ready in listener.protocol.daemons(self._installation)
        ]

    async def wait_for_daemon(self, daemon_id: str, timeout: float) -> None:
        """Wait until a daemon is connected and takes jobs, at most ``timeout`` seconds.

        Raises :class:`AgentRuntimeDaemonError`: ``daemon_offline``, ``daemon_fenced``, ``daemon_token_conflict``,
        ``daemon_hub_not_started``.
        """
        with self._needed():
            try:
                async with traceless.within(timeout):
                    while (problem := self._problem(daemon_id)) in ("daemon_offline", "daemon_fenced"):
                        await self._changed.wait()
            except TimeoutError:
                problem = self._problem(daemon_id)
        if problem:
            raise self._error(problem, retryable=True, daemon=daemon_id)

    def _problem(self, daemon_id: str) -> str:
        """Why the daemon takes no job now; ``""`` when it does."""
        listener = self._listener
        if listener is None or not listener.open:
            return "daemon_offline" if self._moving else "daemon_hub_not_started"
        if listener.protocol.conflicting(self._installation):
            return "daemon_token_conflict"
        if listener.protocol.fences(self._installation, daemon_id):
            return "daemon_fenced"
        known = any(ready.daemon_id == daemon_id for ready in listener.protocol.daemons(self._installation))
        return "" if known else "daemon_offline"

    def lift_fence(self, daemon_id: str) -> None:
        """An operator vouches that nothing of this daemon's earlier jobs runs any more."""
        listener = self._listener
        if listener is not None:
            for job_id in listener.protocol.fences(self._installation, daemon_id):
                listener.protocol.lift(self._installation, daemon_id, job_id)
            listener.pump()

    # -------------------------------------------------------------- jobs

    async def open_job(self, daemon_id: str, payload: Json, tools: Any = None) -> Job:
        """Start a job on a connected daemon and return it, to be driven and at last cancelled or read to its end.

        Its ``tools`` (see :func:`handle_agent_runtime_mcp_payload`) run in the caller's context of now. Raises
        :class:`AgentRuntimeDaemonError`; nothing was started then.
        """
        listener = self._listener
        if listener is None or not listener.open:
            raise self._error(self._problem(daemon_id), retryable=True, daemon=daemon_id)
        with self._needed():
            job = Job(listener, self.error_code_prefix, daemon_id, None if tools is None else tools_of(tools))
            await listener.open_job(job, self._installation, payload, self.lease_seconds, self.error_code_prefix)
            return job

    async def run_job(self, daemon_id: str, payload: Json, tools: Any, timeout: float) -> AsyncGenerator[Json, None]:
        """Run a job and give its events; closing the generator ends the job and waits for the proof.

        Raises :class:`AgentRuntimeDaemonError` for every end but a completed one (``daemon_timeout`` after ``timeout``
        seconds), and :class:`pkg.errors.ProcessCleanupUnconfirmed` when the end of a cancelled job was not proven.
        """
        job = await self.open_job(daemon_id, payload, tools)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with contextlib.aclosing(job.events(deadline)) as events:
                async for event in events:
                    yield event
        except TimeoutError:
            raise self._error("daemon_timeout", retryable=True, daemon=daemon_id, seconds=f"{timeout:g}") from None
        finally:
            if not job.ended.is_set():
                await job.cancel()

    def _error(self, reason: str, *, retryable: bool = False, **params: object) -> AgentRuntimeDaemonError:
        return relay_error(self.error_code_prefix, reason, retryable=retryable, **params)


def get_agent_runtime_daemon_hub(
    key: Hashable = "default",
    *,
    error_code_prefix: str = "agent_runtime",
    state_dir: str | os.PathLike[str] | None = None,
    installation: Hashable = installations.UNBOUND,
    shared: bool = False,
) -> AgentRuntimeDaemonHub:
    """The one hub of ``key`` and ``installation`` in this process; the other arguments matter when it is made."""
    hub = _hubs.get((key, installation))
    if hub is None:
        hub = _hubs[key, installation] = AgentRuntimeDaemonHub(
            error_code_prefix=error_code_prefix, state_dir=state_dir, installation=installation, shared=shared
        )
        # Also one that is not started leaves with its installation.
        installations.installation(installation).hold(functools.partial(_forget, hub))
    return hub


def _forget(hub: AgentRuntimeDaemonHub) -> None:
    for key in [key for key, known in _hubs.items() if known is hub]:
        del _hubs[key]


def revoke(installation: Hashable) -> None:
    """Drop exactly this installation's hubs: secrets, daemons and jobs. Its own revocation does the same."""
    for hub in [hub for (_, owner), hub in _hubs.items() if owner == installation]:
        hub._revoke()


def _literal(host: str) -> str:
    """The address to bind; raises ``ValueError`` for a name: looking it up would take the worker's small executor."""
    return DEFAULT_HOST if host == "localhost" else str(ipaddress.ip_address(host))


def _wildcard(literal: str) -> str:
    """The address that stands for all of this machine's of its version of IP."""
    return "::" if ":" in literal else "0.0.0.0"


def _serving(host: str, port: int) -> Listener | None:
    """The shared listener whose address is ``host``, however that is written, or includes it; ``None``: there is none."""
    try:
        literal = _literal(host)
    except ValueError:
        return None
    found = _listeners.get((literal, port))
    if found is None and ipaddress.ip_address(literal).is_loopback:
        found = _listeners.get((_wildcard(literal), port))
    return found if found is not None and found.open else None


def _overlapping(host: str, port: int) -> str:
    """The address of another shared listener that keeps ``host`` from being bound; ``""``: it is none of ours."""
    literal = _literal(host)
    wildcard = _wildcard(literal)
    taken = [known for (known, its_port) in _listeners if its_port == port and _wildcard(known) == wildcard]
    return next((known for known in taken if wildcard in (literal, known)), "")


def _turn() -> asyncio.Lock:
    """Starts and stops of one event loop's hubs, one at a time."""
    loop = asyncio.get_running_loop()
    return _starting.setdefault(loop, asyncio.Lock())


__all__ = [
    "AgentRuntimeDaemonError",
    "AgentRuntimeDaemonHub",
    "DaemonHubConfig",
    "DaemonInfo",
    "agent_runtime_daemon_config_from_plugin_config",
    "get_agent_runtime_daemon_hub",
    "handle_agent_runtime_mcp_payload",
    "revoke",
]
