"""Calls to the host that end there when they are cancelled here.

SDK fact (0.7.4 to 0.7.18): all runs share the worker's one connection, whose other end counts a call until it is answered;
that takes minutes where a tool hangs. A run's own proxy does not tell it that nobody waits any more. It listens to four such
words at a time and to no fifth, so they are said in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, Final

from langbot_plugin.api.proxies.runner import RunnerAPIProxy

from pkg import limits
from pkg.fair_slots import FairSlots
from pkg.tools_listener import to_the_end

_cancelling: Final = FairSlots(limits.HOST_CANCELLATIONS, limits.HOST_CANCELLATIONS - 1)
"""Calls that are being cancelled, by the installation's binding; empty when none is."""


def cancelled_there(api: RunnerAPIProxy, binding: Hashable) -> RunnerAPIProxy:
    """The run's own proxy, whose calls return only when they are over at the host, too."""
    adapter: Any = api._api.plugin_runtime_handler
    adapter._handler = _Handler(adapter._handler, binding)
    return api


class _Handler:
    """The SDK's connection as a run's proxy uses it."""

    def __init__(self, handler: Any, binding: Hashable) -> None:
        self._handler = handler
        self._binding = binding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0) -> dict[str, Any]:
        call = asyncio.create_task(self._handler.call_action(action, data, timeout, cancel_peer_on_cancel=True))
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            await to_the_end(self._cancelled(call))
            raise
        result: dict[str, Any] = call.result()
        return result

    async def _cancelled(self, call: asyncio.Task[Any]) -> None:
        async with _cancelling.one(self._binding):
            call.cancel()
            await asyncio.wait({call})
        if not call.cancelled():
            call.exception()
