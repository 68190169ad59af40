"""A prompt as content blocks: text and pictures as the model takes them, everything else as a file the model is told of.

Pictures and PDF documents go to the model whole. Other files are placed in the workspace (``.langbot/attachments``) where that
is on this machine; elsewhere text becomes a document block, and what is no text is left out and said. Text that the host added
is a block of its own, marked as such. Nothing here is interpreted: the message is sent as composed by a client.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from pkg import limits
from pkg.agent_api import Attachment, Notice, Prompt
from pkg.framed_text import host_text
from pkg.workspace_files import FileRefused, WorkspaceFiles

FOLDER: Final = (".langbot", "attachments")
IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
"""What the model takes as a picture."""
_IGNORE: Final = (".langbot", ".gitignore")
_UNSAFE: Final = re.compile(r"[^\w.\-]+")


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The content blocks of a prompt, what people must know about it, and the files made for it (below the root)."""

    blocks: list[dict[str, Any]]
    notices: tuple[Notice, ...]
    files: tuple[tuple[str, ...], ...]


def safe_name(name: str, fallback: str) -> str:
    """A file name without directories, leading dots or anything a shell or a path would read in it."""
    plain = _UNSAFE.sub("_", name.replace("\\", "/").rsplit("/", 1)[-1]).lstrip(".")
    return plain[-80:].lstrip(".") or fallback


def prompt_blocks(prompt: Prompt, files: WorkspaceFiles | None) -> PromptBlocks:
    """The blocks of ``prompt``; ``files`` is ``None`` where the workspace is not on this machine."""
    blocks: list[dict[str, Any]] = []
    notices: list[Notice] = []
    made: list[tuple[str, ...]] = []
    if prompt.context.strip():
        blocks.append(_text(host_text(prompt.context)))
    if prompt.text:
        blocks.append(_text(prompt.text))
    for attachment in prompt.attachments:
        block, parts = _native(attachment), None
        if block is None and files is not None:
            block, parts = _placed(attachment, files)
        if block is None and files is None:
            block = _document(attachment)
        if parts is not None:
            made.append(parts)
        if block is None:
            name = safe_name(attachment.name, "file")
            notices.append(Notice("coding.attachment_unsupported", level="warning", params={"name": name}))
        else:
            blocks.append(block)
    return PromptBlocks(blocks or [_text("")], tuple(notices), tuple(made))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _native(attachment: Attachment) -> dict[str, Any] | None:
    kind = attachment.mime_type.split(";")[0].strip().lower()
    data = base64.b64encode(attachment.data).decode("ascii")
    if kind in IMAGES and len(attachment.data) <= limits.CLAUDE_IMAGE_BYTES:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    if kind == "application/pdf":
        source = {"type": "base64", "media_type": kind, "data": data}
        return {"type": "document", "source": source, "title": safe_name(attachment.name, "document.pdf")}
    return None


def _placed(attachment: Attachment, files: WorkspaceFiles) -> tuple[dict[str, Any] | None, tuple[str, ...] | None]:
    name = safe_name(attachment.name, attachment.kind)
    parts = (*FOLDER, f"{secrets.token_hex(4)}-{name}")
    try:
        files.write(_IGNORE, b"*\n")
        path = files.write(parts, attachment.data)
    except FileRefused:
        return None, None
    return _text(host_text(path, "The user attached a file. It was placed here:")), parts


def _document(attachment: Attachment) -> dict[str, Any] | None:
    if len(attachment.data) > limits.ACP_EMBED_CHARS:
        return None
    try:
        text = attachment.data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\x00" in text:
        return None
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, "title": safe_name(attachment.name, "file")}
