"""LangBot's side of the demo's one chat: it remembers what the plugin stores, and shows what the plugin says outside a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pkg.open_record import record_from
from testkit.host_actions import HostActions

BOT: Final = "bot"
"""The bot that a run's context names."""
TARGET: Final[Mapping[str, str]] = {"target_type": "person", "target_id": "terminal"}
"""Where the person of this chat is reached outside a run."""
DELIVERY: Final[Mapping[str, Any]] = {
    "surface": "platform",
    "automatic_reply": True,
    "supports_streaming": True,
    "interactions": None,
    "platform_capabilities": {"adapter": "WebSocketAdapter"},
    "reply_target": TARGET,
}
"""A chat that shows text of any length as it grows, has no buttons, and is reached outside a run, too."""


class Host(HostActions):
    """One chat's host, for all of its runs."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """``show`` takes a message for the person that belongs to no run."""
        super().__init__()
        self._show = show
        self._left = False

    def leave(self) -> None:
        """The person has left: what the plugin says from now on, about what ends with the chat, is shown to nobody."""
        self._left = True

    @property
    def asking(self) -> bool:
        """Whether a request waits for the person's answer, by the record of it that the plugin keeps here."""
        stored = (value.get("value") for value in self.state.values() if isinstance(value, dict))
        records = (record_from(text) for text in stored if isinstance(text, str))
        return any(record is not None and not record.expired for record in records)

    def answer(self, action: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one action; a message to the person is shown."""
        to = (data.get("bot_uuid"), data.get("target_type"), data.get("target_id"))
        if action != "send_message" or to != (BOT, *TARGET.values()):
            return super().answer(action, data)
        self.calls.append((action, data))
        if not self._left:
            self._show("".join(str(part.get("text") or "") for part in data["message_chain"]))
        return {}
