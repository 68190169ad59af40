"""Tasks that belong to an object instead of a caller: how they begin, and how their end is awaited."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def owned(work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
    """A task that keeps nothing of the caller's context alive; its owner awaits it."""
    return asyncio.create_task(work, name=name, context=contextvars.Context())


async def seen_through(task: asyncio.Task[Result]) -> Result:
    """The task's result or what it raised, not before its end, however often the caller is cancelled meanwhile.

    A cancellation is raised afterwards, unless the task itself has failed.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
