"""Words typed in the chat that steer the runner itself instead of the agent: for now ``/stop``.

A control is the whole message. It is recognised whatever its case and surrounding space, with a full-width slash or
full-width letters, after a mention of the bot (``@bot /stop``) and with the bot's name behind it as Telegram writes it
(``/stop@bot``). Any other text, also one that merely contains a control, belongs to the agent.
"""

from __future__ import annotations

import enum
import re
import unicodedata
from typing import Final


class Control(enum.Enum):
    """What a person asked of the runner."""

    STOP = "stop"


_WORDS: Final = {control.value: control for control in Control}
_SHAPE: Final = re.compile(r"(?:@\S+\s+)?/(?P<word>[a-z]+)(?:@\S+)?")
_LONGEST: Final = 200


def parse(text: str) -> Control | None:
    """The control ``text`` is, or ``None`` when it is a message for the agent."""
    if len(text) > _LONGEST:
        return None
    visible = "".join(char for char in unicodedata.normalize("NFKC", text) if unicodedata.category(char) != "Cf")
    match = _SHAPE.fullmatch(visible.strip().lower())
    return _WORDS.get(match["word"]) if match else None
