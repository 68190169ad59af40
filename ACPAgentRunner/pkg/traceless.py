"""Time limits and parsing that leave nothing behind in the process, which other installations share.

A timer keeps the context it was made in until the moment it was set for, also after it was cancelled; and the context of a run
leads to the invocation's configuration and message. The standard library remembers the URLs it has split.

Guarantees: a limit is ``asyncio``'s own and its timer is made in an empty context; :func:`split_url` is ``urlsplit`` without
its cache.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
import urllib.parse
from collections.abc import Callable
from typing import Final

_split: Final[Callable[[str], urllib.parse.SplitResult]] = getattr(urllib.parse.urlsplit, "__wrapped__", urllib.parse.urlsplit)


class until:
    """``asyncio.timeout_at`` whose timer keeps nothing of the caller's context alive; ``None``: no limit."""

    __slots__ = ("_limit", "_when")

    def __init__(self, when: float | None) -> None:
        """``when`` is a moment of the loop's clock."""
        self._when = when
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> asyncio.Timeout:
        """The limit counts from now on."""
        limit = await self._limit.__aenter__()
        if self._when is not None:
            contextvars.Context().run(limit.reschedule, self._when)
        return limit

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        """Raises ``TimeoutError`` when the limit ended the block."""
        await self._limit.__aexit__(kind, problem, traceback)


def within(seconds: float | None) -> until:
    """``asyncio.timeout`` whose timer keeps nothing of the caller's context alive; ``None``: no limit."""
    return until(None if seconds is None else asyncio.get_running_loop().time() + seconds)


def call_later(seconds: float, callback: Callable[..., object], *given: object) -> asyncio.TimerHandle:
    """The loop's ``call_later`` in an empty context."""
    return asyncio.get_running_loop().call_later(seconds, callback, *given, context=contextvars.Context())


def split_url(url: str) -> urllib.parse.SplitResult:
    """``urllib.parse.urlsplit`` that forgets the address; raises ``ValueError`` as it does."""
    return _split(url)
