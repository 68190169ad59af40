"""The host's side of a run's calls: state, steering, events, history, tools. Stands in for LangBot's Core, nothing else.

Answers what LangBot 4.11.2 answers (shapes from its handlers of the same actions). One object serves one test; what was
called stands in :attr:`HostActions.calls`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from langbot_plugin.entities.io.errors import ActionCallError

APIS = ("state", "steering_pull", "history_page", "event_page")


def message(
    text: str, *, actor: str = "7", name: str = "Ann", attachments: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """One steering item as the host hands it over."""
    return {
        "claimed_run_id": "r",
        "runner_id": "plugin:a/b/default",
        "claimed_at": int(time.time()),
        "event": {"event_id": f"host:{text}", "event_type": "message.received", "source": "host_adapter"},
        "input": {"text": text, "contents": [], "attachments": attachments or []},
        "conversation": {"conversation_id": "person_7", "bot_id": "bot"},
        "actor": {"actor_type": "user", "actor_id": actor, "actor_name": name},
    }


class HostActions:
    """Answers run-scoped actions by their wire names."""

    def __init__(self) -> None:
        """A host that stores state, has nothing to steer and no history."""
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.state: dict[str, Any] = {}
        self.steering: deque[dict[str, Any]] = deque()
        self.pulled = asyncio.Event()
        """Set after every pull; a test may clear it."""
        self.dropped: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.failing: set[str] = set()
        self.bound_action_context: Any = None
        """The binding a worker's connection belongs to."""

    def drop(self, seq: int, text: str, *, actor: str = "7", age: float = 0.0) -> None:
        """Record a message the host took as steering and dropped, as the host does it."""
        event_id = f"host:{seq}"
        self.dropped.append(
            {
                "event_id": f"audit-{seq}",
                "event_type": "steering.dropped",
                "source": "host",
                "actor_type": "user",
                "actor_id": actor,
                "seq": seq,
                "cursor": str(seq),
                "created_at": int(time.time() - age),
                "metadata": {"steering": {"status": "dropped", "reason": "run_ended", "original_event_id": event_id}},
            }
        )
        self.history.append({"transcript_id": f"t{seq}", "event_id": event_id, "role": "user", "content": text, "seq": seq})

    def answer(self, action: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one action; raises ``ActionCallError`` for an unknown or failing one."""
        self.calls.append((action, data))
        if action in self.failing:
            raise ActionCallError(f"{action} fails in this test")
        match action:
            case "state_get":
                return {"value": self.state.get(data["key"])}
            case "state_set":
                self.state[data["key"]] = data["value"]
                return {"success": True}
            case "steering_pull":
                items = list(self.steering)
                self.steering.clear()
                self.pulled.set()
                return {"items": items}
            case "event_page":
                newest_first = sorted(self.dropped, key=lambda item: -item["seq"])
                return {"items": newest_first[: data["limit"]], "has_more": False}
            case "history_page":
                return {"items": list(reversed(self.history)), "has_more": False}
            case "call_tool":
                return {"result": {"echo": data.get("parameters")}}
        raise ActionCallError(f"this host has no {action}")

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **_: Any) -> dict[str, Any]:
        """As the SDK's own handlers are called."""
        await asyncio.sleep(0)
        return self.answer(action.value, data)


class HoldingHost(HostActions):
    """A host that answers one action, its tools' unless said otherwise, when it is let."""

    def __init__(self, held: str = "call_tool") -> None:
        """Nothing was called, and nothing is let."""
        super().__init__()
        self._held = held
        self.called = asyncio.Event()
        self.let = asyncio.Event()
        self.held = self.answered = self.given_up = 0
        self.news = asyncio.Event()

    async def holds(self, count: int, *, given_up: int = 0) -> None:
        """Wait until it holds exactly so many answers back and has given that many up."""
        while (self.held, self.given_up) != (count, given_up):
            self.news.clear()
            await self.news.wait()

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **more: Any) -> dict[str, Any]:
        """Hold the answer back."""
        if action.value == self._held:
            self.called.set()
            self.held += 1
            self.news.set()
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
            finally:
                self.held -= 1
                self.news.set()
            self.answered += 1
        return await super().call_action(action, data, timeout, **more)


def run_context(
    text: str = "hello",
    *,
    run_id: str = "r1",
    config: Mapping[str, Any] | None = None,
    actor: str = "7",
    actor_name: str = "Ann",
    conversation: str = "person_7",
    event: str = "message.received",
    deadline: float | None = None,
    apis: tuple[str, ...] = APIS,
    automatic_reply: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """A run's context as a pipeline bot's message brings it (``deadline``: seconds from now)."""
    context: dict[str, Any] = {
        "run_id": run_id,
        "trigger": {"type": event},
        "event": {"event_id": f"event-{run_id}", "event_type": event, "source": "host_adapter"},
        "conversation": {"conversation_id": conversation, "bot_id": "bot"},
        "actor": {"actor_type": "user", "actor_id": actor, "actor_name": actor_name},
        "input": {"text": text},
        "delivery": {
            "surface": "platform",
            "automatic_reply": automatic_reply,
            "supports_streaming": True,
            "platform_capabilities": {"adapter": "WebSocketAdapter"},
        },
        "resources": {"tools": [{"tool_name": "echo", "operations": ["call"]}]},
        "context": {"available_apis": dict.fromkeys(apis, True)},
        "runtime": {"deadline_at": None if deadline is None else time.time() + deadline},
        "config": dict(config or {}),
    }
    context.update(more)
    return context
