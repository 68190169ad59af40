"""Text for an agent that is no word of its user, in a frame that says so and that nothing in the text ends."""

from __future__ import annotations

import re
from typing import Final

ADDED: Final = "Added by the chat host, not written by the user."


def framed(tag: str, text: str) -> str:
    """``text`` in a frame of this name; what looks like the frame's own beginning or end in it is none any more."""
    inert = re.sub(rf"<(?=[\s/]*{tag})", "&lt;", text, flags=re.IGNORECASE)
    return f"<{tag}>\n{inert}\n</{tag}>"


def host_text(text: str, title: str = ADDED) -> str:
    """Text that the host added, behind a ``title`` that says what it is."""
    return framed("host-context", f"{title}\n\n{text}")
