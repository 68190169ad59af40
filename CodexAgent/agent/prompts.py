"""A prompt as Codex's user input: text, pictures inline, every other file in the workspace and named in the text.

Text the host added is an input of its own, marked as such. Pictures go as data URLs, so no path of the host reaches the model;
Codex takes no addresses (0.171). Files are written below ``.langbot/attachments``, which git ignores.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from pkg.agent_api import Notice, Prompt
from pkg.framed_text import host_text

FOLDER: Final = (".langbot", "attachments")
_UNSAFE: Final = re.compile(r"[^\w.\-]+")
_PICTURES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})

WriteFile = Callable[[str, bytes], Awaitable[str]]
"""Puts a file of this name into the workspace; returns its path there, ``""`` when it can't be."""


@dataclass(frozen=True, slots=True)
class Input:
    """The inputs of a turn, and what people must know about them."""

    items: tuple[dict[str, Any], ...]
    notices: tuple[Notice, ...] = ()


def text_item(text: str) -> dict[str, Any]:
    """Text as an input."""
    return {"type": "text", "text": text, "text_elements": []}


def safe_name(name: str, fallback: str) -> str:
    """A file name without directories, leading dots or anything a shell or a path would read in it."""
    plain = _UNSAFE.sub("_", name.replace("\\", "/").rsplit("/", 1)[-1]).lstrip(".")
    return plain[-80:].lstrip(".") or fallback


async def user_input(prompt: Prompt, write: WriteFile) -> Input:
    """The inputs of ``prompt``."""
    items = [text_item(host_text(prompt.context))] if prompt.context.strip() else []
    if prompt.text:
        items.append(text_item(prompt.text))
    notices: list[Notice] = []
    for attachment in prompt.attachments:
        name = safe_name(attachment.name, attachment.kind)
        if attachment.kind == "image" and attachment.mime_type.lower() in _PICTURES:
            data = base64.b64encode(attachment.data).decode("ascii")
            items.append({"type": "image", "url": f"data:{attachment.mime_type.lower()};base64,{data}"})
            continue
        path = await write(f"{secrets.token_hex(4)}-{name}", attachment.data)
        if path:
            items.append(text_item(host_text(f"The user attached a file; it is at {path}")))
        else:
            notices.append(Notice("coding.attachment_unsupported", level="warning", params={"name": name}))
    return Input(tuple(items or [text_item("")]), tuple(notices))
