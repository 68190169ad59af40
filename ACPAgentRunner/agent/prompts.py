"""A prompt as content blocks, by what the agent says it can take.

Text and links are always allowed; pictures, sound and embedded files only by ``promptCapabilities``. What the agent cannot take
inline becomes a file in the workspace (``.langbot/attachments``) and a link to it, where the workspace is on this machine. Text
the host added is a block of its own, marked as such.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from agent import wire
from pkg import limits
from pkg.agent_api import Attachment, Json, Notice, Prompt
from pkg.framed_text import host_text
from pkg.workspace_files import FileRefused, WorkspaceFiles

FOLDER: Final = (".langbot", "attachments")
_IGNORE: Final = (".langbot", ".gitignore")
_UNSAFE: Final = re.compile(r"[^\w.\-]+")


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The content blocks of a prompt, what people must know about it, and the files made for it (below the root)."""

    blocks: tuple[dict[str, Any], ...]
    notices: tuple[Notice, ...]
    files: tuple[tuple[str, ...], ...]


def host_block(text: str) -> dict[str, Any]:
    """Text the host added: marked for the agent, and in the protocol's own terms not meant for people."""
    return {"type": "text", "text": host_text(text), "annotations": {"audience": ["assistant"]}}


def safe_name(name: str, fallback: str) -> str:
    """A file name without directories, leading dots or anything a shell or a path would read in it."""
    plain = _UNSAFE.sub("_", name.replace("\\", "/").rsplit("/", 1)[-1]).lstrip(".")
    return plain[-80:].lstrip(".") or fallback


def prompt_blocks(prompt: Prompt, capabilities: Json, files: WorkspaceFiles | None, preamble: str = "") -> PromptBlocks:
    """The blocks of ``prompt``. A text that starts with ``/`` stays first, because agents look there for their commands."""
    offered = wire.as_dict(capabilities)
    host = [host_block(text) for text in (preamble, prompt.context) if text.strip()]
    text = [{"type": "text", "text": prompt.text}] if prompt.text else []
    blocks: list[dict[str, Any]] = [*text, *host] if prompt.text.lstrip().startswith("/") else [*host, *text]
    notices: list[Notice] = []
    made: list[tuple[str, ...]] = []
    for attachment in prompt.attachments:
        block = _inline(attachment, offered)
        if block is None and files is not None:
            try:
                block, parts = _as_file(attachment, files)
                made.append(parts)
            except FileRefused:
                block = None
        if block is None:
            notices.append(
                Notice("coding.attachment_unsupported", level="warning", params={"name": safe_name(attachment.name, "file")})
            )
        else:
            blocks.append(block)
    return PromptBlocks(tuple(blocks or [{"type": "text", "text": ""}]), tuple(notices), tuple(made))


def _inline(attachment: Attachment, offered: dict[str, Any]) -> dict[str, Any] | None:
    data = attachment.data
    if attachment.kind in ("image", "audio") and offered.get(attachment.kind) is True:
        return {
            "type": attachment.kind,
            "mimeType": attachment.mime_type,
            "data": base64.b64encode(data).decode("ascii"),
        }
    if attachment.kind == "file" and offered.get("embeddedContext") is True and len(data) <= limits.ACP_EMBED_CHARS:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return None
        if "\x00" not in text:
            name = safe_name(attachment.name, "file")
            resource = {"uri": f"attachment:///{quote(name)}", "mimeType": attachment.mime_type, "text": text}
            return {"type": "resource", "resource": resource}
    return None


def _as_file(attachment: Attachment, files: WorkspaceFiles) -> tuple[dict[str, Any], tuple[str, ...]]:
    name = safe_name(attachment.name, attachment.kind)
    parts = (*FOLDER, f"{secrets.token_hex(4)}-{name}")
    files.write(_IGNORE, b"*\n")
    path = files.write(parts, attachment.data)
    link = {"type": "resource_link", "uri": f"file://{quote(path)}", "name": name, "size": len(attachment.data)}
    return (link | {"mimeType": attachment.mime_type} if attachment.mime_type else link), parts
