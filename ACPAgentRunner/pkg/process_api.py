"""What a supervised process looks like from outside, whatever place it runs in: values and protocols, no I/O.

The process runs under ``process_supervisor`` in its place, its stdin and stdout are byte streams here, and
:meth:`AgentProcess.stop` returns only when the place confirmed that nothing of the tree is left.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pkg import limits


@dataclass(frozen=True, slots=True)
class Graces:
    """Seconds granted to each step of ending a tree: stdin EOF, SIGTERM, SIGKILL (the cancel step is the driver's)."""

    eof: float = limits.EOF_GRACE
    term: float = limits.TERM_GRACE
    kill: float = limits.KILL_GRACE


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: ``argv[0]`` is a name or absolute path, resolved in the place itself; ``env`` is laid over its base.

    ``env`` may hold secrets: it reaches the process as its environment and appears nowhere else.
    """

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False, default_factory=lambda: types.MappingProxyType({}))
    graces: Graces = Graces()


@dataclass(frozen=True, slots=True)
class Exit:
    """How the agent's own process ended: its exit code, or minus the signal number."""

    code: int


class AgentProcess(Protocol):
    """A running agent: two byte streams and a proven end."""

    @property
    def pid(self) -> int:
        """The agent's pid in its place's numbering."""
        ...

    @property
    def directory(self) -> str:
        """The absolute directory it was started in, in its place: what an empty or ``~`` working directory became there."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to the agent's stdin and wait until the pipe took it. Raises :class:`pkg.errors.AgentDied`."""
        ...

    def close_stdin(self) -> None:
        """Close the agent's stdin without waiting; idempotent."""
        ...

    async def read(self, size: int = 65536) -> bytes:
        """Up to ``size`` bytes of the agent's stdout, ``b""`` at its end. Not reading holds the agent back."""
        ...

    def stderr_tail(self) -> str:
        """The last lines of stderr: decoded, without ANSI escapes, secrets of the environment replaced by ``***``."""
        ...

    async def wait(self) -> Exit:
        """Wait until the agent's own process has ended (its children may live on until :meth:`stop`).

        Raises :class:`pkg.errors.AgentDied` when the place itself was lost (an SSH connection), so that no code is known.
        """
        ...

    async def stop(self) -> None:
        """End the whole tree and return when the place confirmed that nothing is left; idempotent.

        Safe under repeated cancellation: the ending goes on and a later call awaits it. Raises
        :class:`pkg.errors.ProcessCleanupUnconfirmed` when it cannot be confirmed.
        """
        ...


class Launcher(Protocol):
    """One place where agents can run."""

    @property
    def machine(self) -> str:
        """A stable name of the machine and account, part of the key under which a vendor session id is stored."""
        ...

    @property
    def label(self) -> str:
        """The place as people call it, ``user@host``; never part of a key."""
        ...

    @property
    def local(self) -> bool:
        """Whether the place is this machine and account, so that paths of the place can be opened from here."""
        ...

    async def start(self, command: Command) -> AgentProcess:
        """Start the command. Raises :class:`pkg.errors.LaunchError`; by then nothing it started is left."""
        ...

    async def reach(self, url: str) -> str:
        """The address under which the next :meth:`start` reaches ``url``, a loopback address of this machine, from its place.

        The same ``url`` where the place is this machine. Elsewhere a tunnel is opened, held for the next start and living
        as long as that process. Raises :class:`pkg.errors.LaunchError`.
        """
        ...

    async def close(self) -> None:
        """Give up what :meth:`reach` opened and no :meth:`start` took; idempotent. Processes started live on."""
        ...
