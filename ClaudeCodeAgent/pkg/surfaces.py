"""What each delivery surface holds, shows and how fast it takes it: one table, the only place that knows adapters by name.

Facts of LangBot 4.11.2 behind it: nothing splits long text and nobody says the limit (``max_message_size`` is null); the
Telegram adapter edits its message on deltas with ``(msg_sequence - 1) % 8 == 0``, the Lark adapter on multiples of 8 (others
once per second), the DingTalk adapters by time or as Telegram; the web chat, Discord, WeCom and QQ adapters do not read the
number. A number that is 1 plus a multiple of 8 therefore shows everywhere but on Lark, which gets multiples of 8. A streamed
message is first sent as a placeholder and then edited: its first text is two calls of the service, each further one a call.
Where it does not stream, the Telegram adapter can't reply to a pressed button: it looks where only typed messages are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pkg import limits
from pkg.pacing import Allowance
from pkg.text_split import MINIMUM_UNITS, Limit

_STATUS_BYTES: Final = 16 * 1024
"""JSON bytes kept free for the progress lines under a text (at most 7 lines of 80 characters, 12 bytes each)."""

SEQUENCE_STEP: Final = 8

STREAM_SETTING: Final = "enable-stream-reply"
"""The setting of a Telegram bot in the host that has it stream; nothing that a run is given says so. It is off by default."""


@dataclass(frozen=True, slots=True)
class Surface:
    """How one run's messages must look to be shown whole."""

    limit: Limit
    """What one message may hold."""
    interval: float = limits.DELTA_INTERVAL
    """Seconds between two deltas."""
    first_sequence: int = 1
    """``msg_sequence`` of a bubble's first delta; each further one adds ``SEQUENCE_STEP``."""
    text_copies: int = 2
    """How often a delta carries its text: results have it in ``content`` and ``all_content``."""
    shown_every: int = 1
    """Of how many updates the surface shows one, the first always among them."""
    press_reply_lost: bool = False
    """Whether the last message of a run that a pressed button began is lost where nothing is streamed."""
    allowance: Allowance | None = None
    """How many messages and edits its chats take; ``None`` for those that are no service's."""

    def sequence(self, shows: int) -> int:
        """The number of a bubble's delta after ``shows`` earlier ones."""
        return self.first_sequence + SEQUENCE_STEP * shows


def _units(adapter: str) -> int | None:
    if "telegram" in adapter:
        return limits.TELEGRAM_TEXT_UNITS
    if "discord" in adapter:
        return limits.DISCORD_TEXT_UNITS
    if "websocket" in adapter or "webpage" in adapter or "web_page" in adapter or adapter == "debug":
        return None
    return limits.UNKNOWN_TEXT_UNITS


def _allowance(adapter: str, *, group: bool) -> Allowance | None:
    if _units(adapter) is None:
        return None
    if "telegram" in adapter:
        return Allowance(limits.TELEGRAM_BURST, limits.TELEGRAM_GROUP_PER_SECOND if group else limits.TELEGRAM_PER_SECOND)
    if "discord" in adapter:
        return Allowance(limits.DISCORD_BURST, limits.DISCORD_PER_SECOND)
    if "lark" in adapter:
        return Allowance(limits.LARK_BURST, limits.LARK_PER_SECOND)
    if "wecom" in adapter or "dingtalk" in adapter:
        return Allowance(limits.WECOM_BURST, limits.WECOM_PER_SECOND)
    return Allowance(limits.UNKNOWN_BURST, limits.UNKNOWN_PER_SECOND)


def surface_for(
    adapter: str,
    *,
    reply_target: Mapping[str, Any] | None = None,
    max_message_size: int | None = None,
    live_reply: bool = False,
) -> Surface:
    """The surface behind the adapter's class name as the host gives it (``TelegramAdapter``; ``""`` when unknown).

    ``live_reply`` is a reply stream of an agent bot: the host numbers its updates 1, 2, 3 …, so that Telegram shows each
    eighth, and the text travels once. ``max_message_size`` lowers the table's limit where a host ever says one.
    """
    name = adapter.lower()
    units = _units(name)
    if max_message_size is not None and max_message_size >= MINIMUM_UNITS:
        units = min(units or max_message_size, max_message_size)
    copies = 1 if live_reply else 2
    room = Limit(units, (limits.RESULT_JSON_BYTES - limits.RESULT_ENVELOPE_BYTES) // 2 - _STATUS_BYTES)
    if live_reply:
        units = min(units or limits.REPLY_STREAM_CHARS, limits.REPLY_STREAM_CHARS - _STATUS_BYTES)
        room = Limit(units, room.json_bytes)
    telegram = "telegram" in name
    interval = limits.DELTA_INTERVAL
    group = (reply_target or {}).get("target_type") == "group"
    if telegram and not live_reply:
        interval = limits.TELEGRAM_GROUP_DELTA_INTERVAL if group else limits.TELEGRAM_DELTA_INTERVAL
    return Surface(
        limit=room,
        interval=interval,
        first_sequence=SEQUENCE_STEP if "lark" in name else 1,
        text_copies=copies,
        shown_every=SEQUENCE_STEP if telegram and live_reply else 1,
        press_reply_lost=telegram and not live_reply,
        allowance=_allowance(name, group=group),
    )
