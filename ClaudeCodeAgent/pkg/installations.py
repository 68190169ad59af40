"""The one registry of what belongs to an installation while it lives: its runs, sessions, background work and secrets.

Everything tenant-bound that outlives a single call is reachable from an :class:`Installation` and from nowhere else. The
key is the host's full ``InstallationBinding`` (a constant where there is none: debug and old workers), so that another
revision of the same installation is another installation.

Guarantees:

- :func:`revoke` returns when the installation's runs were told to stop and have ended, its sessions are closed, its
  background work is finished and what it held (bearers, secrets) is dropped; a second call awaits the first;
- a revoked installation starts nothing any more: :meth:`Installation.check` raises;
- background work (:meth:`Installation.adopt`) runs in an empty context, so that it can never act with the authority of
  the run that started it, and it is awaited by its installation;
- a cleanup that could not be confirmed is logged and kept until somebody can be told (:meth:`Installation.take_unconfirmed`);
  one on a daemon's machine is kept by its hub, which says so itself for as long as it is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, Protocol, TypeVar

from pkg import limits
from pkg.errors import CodingError, DaemonFenced, ProcessCleanupUnconfirmed, Refused
from pkg.pacing import Paces
from pkg.parking import ParkedTurns
from pkg.warm_sessions import WarmSessions

log = logging.getLogger(__name__)

Value = TypeVar("Value")

UNBOUND: Final = "unbound"
"""The key of everything in a worker that knows no binding: such a worker serves one installation only."""


class Run(Protocol):
    """A run as its installation sees it."""

    def revoke(self) -> None:
        """End now, because the installation is gone; returns at once."""
        ...

    async def ended(self) -> None:
        """Wait until nothing of the run is left."""
        ...


class Lease:
    """The right to be the only one under a key; released once, by whoever holds it at the end."""

    def __init__(self, release: Callable[[], None]) -> None:
        """``release`` is called by the first :meth:`release` only."""
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let the next one in; idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Locks:
    """Fair locks by key that vanish when nobody holds or awaits them."""

    def __init__(self) -> None:
        """No key is locked."""
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def acquire(self, key: str) -> Lease:
        """Wait for ``key`` in order of arrival."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            await lock.acquire()
        except BaseException:
            self._leave(key)
            raise

        def release() -> None:
            lock.release()
            self._leave(key)

        return Lease(release)

    def _leave(self, key: str) -> None:
        lock, users = self._locks[key]
        if users == 1:
            del self._locks[key]
        else:
            self._locks[key] = (lock, users - 1)


class Installation:
    """What one installation has running; made by :func:`installation`, ended by :func:`revoke`."""

    def __init__(self, key: Hashable) -> None:
        """An installation with nothing running."""
        self.key = key
        self.arriving: dict[str, Run] = {}
        """Runs that do not work yet: what they are is still being found out, mostly from the host."""
        self.runs: dict[str, Run] = {}
        self.locks = Locks()
        self.paces = Paces()
        self.warm = WarmSessions(self.adopt)
        self.parked = ParkedTurns(self.adopt)
        self.revoked = False
        self._work: set[asyncio.Task[Any]] = set()
        self._drops: set[Callable[[], None]] = set()
        self._unconfirmed = 0

    def check(self) -> None:
        """Raise :class:`pkg.errors.Refused` (``coding.revoked``) once the installation is revoked."""
        if self.revoked:
            raise Refused("coding.revoked")

    def adopt(self, work: Coroutine[Any, Any, Value], *, name: str) -> asyncio.Task[Value]:
        """Run ``work`` as a task of this installation, in an empty context; its end is awaited by :func:`revoke`."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())
        self._work.add(task)
        task.add_done_callback(self._finished)
        return task

    def hold(self, drop: Callable[[], None]) -> Callable[[], None]:
        """Keep ``drop`` to be called at revocation; returns the call that forgets it (when its object ended before)."""
        self._drops.add(drop)
        return lambda: self._drops.discard(drop)

    def take_unconfirmed(self) -> int:
        """How many cleanups nobody was told of could not be confirmed; the count starts again at zero."""
        count, self._unconfirmed = self._unconfirmed, 0
        return count

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, DaemonFenced):
            log.error("cleanup unconfirmed: %s", problem)
        elif isinstance(problem, ProcessCleanupUnconfirmed):
            self._unconfirmed += 1
            log.error("cleanup unconfirmed: %s", problem)
        elif problem is not None and not isinstance(problem, CodingError):
            log.error("background work failed: %s", task.get_name(), exc_info=problem)

    async def end(self) -> None:
        """Stop everything and wait until it is gone."""
        self.revoked = True
        runs = [*self.arriving.values(), *self.runs.values()]
        # Last in, first out; each is done whatever the others raise.
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._worked)
            steps.push_async_callback(self.warm.close_all)
            steps.push_async_callback(self.parked.end_all)
            steps.push_async_callback(_ended, runs)
            for drop in self._drops:
                steps.callback(drop)
            self._drops.clear()
            for run in runs:
                run.revoke()

    async def _worked(self) -> None:
        while self._work:
            await asyncio.wait(set(self._work))


async def _ended(runs: list[Run]) -> None:
    await asyncio.gather(*(run.ended() for run in runs))


_installations: Final[dict[Hashable, Installation]] = {}
_revocations: Final[dict[Hashable, asyncio.Task[None]]] = {}


def installation(binding: Hashable | None) -> Installation:
    """The installation of ``binding``, made on first use."""
    key = UNBOUND if binding is None else binding
    found = _installations.get(key)
    if found is None:
        found = _installations[key] = Installation(key)
    return found


def active_runs() -> int:
    """Runs in progress in this process, over all installations."""
    return sum(len(each.runs) for each in _installations.values())


def busy(here: Installation, *, pooled: bool) -> bool:
    """Whether this process should take no further run ``here``: where others are, ``pooled``, nobody gets all of it."""
    return active_runs() >= limits.RUNS_PER_PROCESS or (pooled and len(here.runs) >= limits.RUNS_PER_INSTALLATION)


async def revoke(binding: Hashable | None) -> None:
    """End everything of ``binding``'s installation and forget it; see the module's guarantees."""
    key = UNBOUND if binding is None else binding
    task = _revocations.get(key)
    if task is None:
        found = _installations.get(key)
        if found is None:
            return
        task = asyncio.get_running_loop().create_task(_end(found), name="revoke", context=contextvars.Context())
        _revocations[key] = task
    await asyncio.shield(task)


async def _end(found: Installation) -> None:
    try:
        await found.end()
    finally:
        _installations.pop(found.key, None)
        _revocations.pop(found.key, None)
