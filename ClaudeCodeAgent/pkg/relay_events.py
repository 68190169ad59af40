"""What the relay's two roles tell the shells around them, what they need from them, and the times they keep.

Everything here is a value or a small interface; the roles themselves are in ``relay_hub`` and ``relay_daemon``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pkg import limits
from pkg.relay_auth import Installation
from pkg.relay_frames import Json

Outcome = Literal["completed", "failed", "cancelled", "lost", "refused"]
"""How a job ended. ``lost``: its lease ran out or its daemon does not have it (any more); ``refused``: never started."""

OUTCOMES: Final[frozenset[str]] = frozenset(("completed", "failed", "cancelled", "lost", "refused"))

Verb = Literal["prompt", "steer", "answer", "interrupt", "renew_mcp", "close"]
"""What can be said to a running job; the verbs of :class:`pkg.agent_api.AgentSession`."""

VERBS: Final[frozenset[str]] = frozenset(("prompt", "steer", "answer", "interrupt", "renew_mcp", "close"))

CLOSE_NORMAL: Final = 1000
CLOSE_GOING_AWAY: Final = 1001
CLOSE_PROTOCOL: Final = 1002
CLOSE_FATAL: Final = 1008
"""Credential, protocol or hello are wrong: the daemon stops and says why."""
CLOSE_TOO_BIG: Final = 1009
CLOSE_REPLACED: Final = 1012
CLOSE_RETRY: Final = 1013
"""Not now: the daemon keeps trying."""


@dataclass(frozen=True, slots=True)
class RelayTimes:
    """Seconds; the suites scale them, products leave them alone."""

    heartbeat: float = limits.RELAY_HEARTBEAT
    dead: float = limits.RELAY_DEAD
    handshake: float = limits.RELAY_HANDSHAKE
    probe: float = limits.RELAY_PROBE
    cancel: float = limits.RELAY_CANCEL
    ack_delay: float = limits.RELAY_ACK_DELAY


class RelayRefused(Exception):
    """A hub cannot do what it was asked; ``code`` says why, ``retryable`` whether waiting may help.

    Codes: ``daemon_offline``, ``daemon_fenced``, ``daemon_jobs_full``, ``job_gone``, ``commands_full``,
    ``daemon_token_required``.
    """

    def __init__(self, code: str, *, retryable: bool = False) -> None:
        """``code`` is for the shell to translate."""
        self.code = code
        self.retryable = retryable
        super().__init__(code)


# ------------------------------------------------------------------ what shells provide


class PendingMarkers(Protocol):
    """The hub's durable fences: one marker for each job that was dispatched and is not proven to have ended."""

    def mark(self, installation: Installation, daemon_id: str, job_id: str, table: str) -> None:
        """Make the marker durable before this returns; nothing to do when it exists. Raises ``OSError``."""
        ...

    def clear(self, installation: Installation, daemon_id: str, job_id: str) -> None:
        """Remove the marker; nothing to do when there is none."""
        ...

    def pending(self, installation: Installation) -> Mapping[str, Mapping[str, str]]:
        """What an earlier hub left: daemon id to job id to the table it was dispatched to."""
        ...


class NoMarkers:
    """For a worker without a disk: its fences are derived from what the daemons report."""

    def mark(self, installation: Installation, daemon_id: str, job_id: str, table: str) -> None:
        """Keep nothing."""

    def clear(self, installation: Installation, daemon_id: str, job_id: str) -> None:
        """Keep nothing."""

    def pending(self, installation: Installation) -> Mapping[str, Mapping[str, str]]:
        """Nothing was kept."""
        return {}


class JobTable(Protocol):
    """The daemon's durable list of jobs it has started for one hub and not been told to forget."""

    @property
    def table(self) -> str:
        """An id made together with the table; another one means that entries may have been lost."""
        ...

    def started(self, job_id: str) -> None:
        """Make the entry durable before this returns. Raises ``OSError``; the job is then refused."""
        ...

    def quiesced(self, job_id: str) -> None:
        """Nothing of this job is left running."""
        ...

    def forgotten(self, job_id: str) -> None:
        """The hub has taken note; the entry can go."""
        ...


# ------------------------------------------------------------------ what the hub tells its shell


@dataclass(frozen=True, slots=True)
class DaemonReady:
    """A daemon is connected and takes jobs, unless it is ``fenced``."""

    installation: Installation
    daemon_id: str
    incarnation: str
    features: tuple[str, ...]
    metadata: Mapping[str, Json]
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class DaemonGone:
    """A daemon's connection ended; its jobs may still come back within their leases."""

    installation: Installation
    daemon_id: str


@dataclass(frozen=True, slots=True)
class JobEvents:
    """The next events of a job, in order. Call ``consumed(job_id, seq)`` when the consumer is done with all of them."""

    job_id: str
    events: list[Json]
    seq: int


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer to a command: ``value`` is the result, or with ``ok`` false a description of the failure."""

    job_id: str
    command_id: int
    ok: bool
    value: Json


@dataclass(frozen=True, slots=True)
class McpRequest:
    """The job's agent calls a tool; answer with ``mcp_response``."""

    job_id: str
    request_id: int
    payload: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobFinished:
    """A job ended and nothing of it is left running; all of its events were told before."""

    job_id: str
    outcome: Outcome
    error: Json = None


@dataclass(frozen=True, slots=True)
class JobLost:
    """A job ended without a word from its daemon; until that proves it quiet, the daemon is fenced.

    ``reason``: ``lease``, ``restarted``, ``unknown``, ``protocol``, ``revoked`` or ``disconnected``. ``proven`` is true when
    the daemon has already shown that nothing is left.
    """

    job_id: str
    reason: str
    proven: bool = False


@dataclass(frozen=True, slots=True)
class JobUnconfirmed:
    """A job was cancelled or has ended, and its daemon cannot or does not say that nothing is left: it is fenced."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The daemon gets no job until ``job_id`` is proven to have ended."""

    installation: Installation
    daemon_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class FenceLifted:
    """Every fenced job of the daemon is proven to have ended."""

    installation: Installation
    daemon_id: str


HubEvent = (
    DaemonReady
    | DaemonGone
    | JobEvents
    | CommandResult
    | McpRequest
    | JobFinished
    | JobLost
    | JobUnconfirmed
    | Fenced
    | FenceLifted
)


# ------------------------------------------------------------------ what the daemon's role tells its shell


@dataclass(frozen=True, slots=True)
class Connected:
    """The hub has proven itself and admitted this daemon."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Parked:
    """The hub does not know this daemon's secret yet; the connection waits."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection cannot be used. ``fatal``: trying again is no use until a person has acted on ``reason``.

    ``claimed``: a rejection that anybody on the way could have made up; it is told, and tried again slowly.
    """

    reason: str
    fatal: bool
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start this job; it ends with a call of ``finish``."""

    job_id: str
    payload: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class Command:
    """Something for a running job; answer once with ``command_done``."""

    job_id: str
    command_id: int
    verb: Verb
    value: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class McpResponse:
    """The answer to a tool call: ``payload``, or ``error`` with a short code."""

    job_id: str
    request_id: int
    payload: Json = field(repr=False)
    error: str = ""


@dataclass(frozen=True, slots=True)
class EndJob:
    """End this job now, prove that nothing of it is left, and call ``finish``.

    ``reason``: ``cancelled``, ``lost``, ``unknown``, ``disconnected`` or ``journal``.
    """

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Writable:
    """There is room in this job's journal again after ``emit`` said there was none."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobForgotten:
    """The hub has everything of this job; nothing of it is kept here any more."""

    job_id: str


DaemonEvent = Connected | Parked | Refused | StartJob | Command | McpResponse | EndJob | Writable | JobForgotten


class Backoff:
    """How long to wait before connecting again: doubling from ``RELAY_BACKOFF``, each wait between half and the whole of it."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """``jitter`` gives numbers from 0 to 1."""
        self._jitter = jitter
        self._tries = 0

    def next(self, *, network: bool = False) -> float:
        """Seconds to wait now; ``network`` when names, certificates or a credential failed, not merely the connection."""
        most = limits.RELAY_BACKOFF_NETWORK if network else limits.RELAY_BACKOFF_REFUSED
        whole = min(most, limits.RELAY_BACKOFF * 2.0 ** min(self._tries, 16))
        self._tries += 1
        return whole * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        """A connection was admitted."""
        self._tries = 0
