"""Limits and parsing that leave nothing of a run behind in the process."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import urllib.parse
import weakref
from typing import Any

import pytest

from pkg import traceless
from pkg.redaction import Redactor

VARIABLE: contextvars.ContextVar[object] = contextvars.ContextVar("invocation")


class Held:
    """Stands for an invocation's configuration."""


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["ours", "asyncio's"])
async def test_a_limit_that_was_not_reached_keeps_nothing_of_its_caller(limit: str) -> None:
    """asyncio fact: a cancelled timer keeps its context until its time has come; our rule: ours has none to keep."""

    async def run(value: object) -> None:
        VARIABLE.set(value)
        async with traceless.within(600) if limit == "ours" else asyncio.timeout(600):
            await asyncio.sleep(0)

    first = asyncio.get_running_loop().call_later(500, print)  # the loop forgets the first of its timers at once
    held = Held()
    gone = weakref.ref(held)
    await asyncio.create_task(run(held))
    del held
    await asyncio.sleep(0)  # the loop lets go of what it ran last
    gc.collect()
    assert (gone() is None) == (limit == "ours")
    first.cancel()


@pytest.mark.asyncio
async def test_a_timer_runs_with_nothing_of_its_caller() -> None:
    """Our rule: what is called later is called in an empty context, whoever asked for it."""
    heard: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        VARIABLE.set("a run's")
        traceless.call_later(0, lambda: heard.set_result(VARIABLE.get(None)))

    await asyncio.create_task(run())
    assert await asyncio.wait_for(heard, 10) is None


@pytest.mark.asyncio
async def test_a_limit_ends_its_block_as_asyncios_does() -> None:
    """Our rule: ``TimeoutError`` at the limit, also one that has passed; nothing without one; another's cancellation passes."""
    for seconds in (0.01, 0, -1):
        with pytest.raises(TimeoutError):
            async with traceless.within(seconds):
                await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with traceless.until(asyncio.get_running_loop().time() + 0.01) as limit:
            await asyncio.Event().wait()
    assert limit.expired()
    async with traceless.within(None) as unlimited:
        await asyncio.sleep(0)
    assert not unlimited.expired()

    async def waits() -> None:
        async with traceless.within(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_address_is_split_and_not_remembered() -> None:
    """Library fact: ``urlsplit`` remembers what it was given; our rule: an address of a form is not kept."""
    remembering: Any = urllib.parse.urlsplit
    url = "https://user:word@host:81/path?query#end"
    assert traceless.split_url(url) == urllib.parse.urlsplit(url)
    remembering.cache_clear()
    traceless.split_url(url)
    assert remembering.cache_info().currsize == 0
    with pytest.raises(ValueError, match="IPv6"):
        traceless.split_url("http://[::1")


def test_secrets_are_hidden_without_a_pattern_that_is_remembered() -> None:
    """Library fact: a compiled pattern is remembered by the module ``re``; our rule: no secret is in one."""
    re.purge()
    secret = "canary-of-the-redactor-77f1"
    assert Redactor([secret, secret + "-longer"])(f"{secret}-longer {secret}!") == "*** ***!"
    assert not [key for key in re._cache if secret in str(key)]  # type: ignore[attr-defined]
