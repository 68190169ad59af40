"""Pictures and files a person sent, from inline base64 or ``data:`` URLs, as bounded values for the agent.

Guarantees: nothing is fetched from anywhere; the same bytes arriving twice (hosts repeat them in contents and
attachments) are one attachment; a name is only a label, stripped to its last component and of control characters; the
media type of known pictures comes from their bytes, not from what was claimed; whatever is too large, too many, not
base64 or only an address is left out and named in :attr:`Collected.refused`, never an exception.

Sizes are in bytes after decoding. The bounds stand in :mod:`pkg.limits`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol
from urllib.parse import unquote_to_bytes

from pkg import limits
from pkg.agent_api import Attachment

Kind = Literal["image", "audio", "file"]


class InputLike(Protocol):
    """The two places of a host's message that may carry files; their items are read by attribute name."""

    @property
    def contents(self) -> Sequence[object]:
        """Content elements: ``type``, ``image_base64``, ``image_url.url``, ``file_base64``, ``file_url``, ``file_name``."""
        ...

    @property
    def attachments(self) -> Sequence[object]:
        """Attachments: ``type``, ``mime_type``, ``name``, ``content``, ``url``."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An attachment that was left out: the key of the text that says why, and its parameters."""

    key: str
    params: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a message carried: usable attachments in the order they came, and what was left out."""

    attachments: tuple[Attachment, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    kind: str
    name: str
    mime_type: str
    data: str
    url: str


_MAGIC: Final = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
_PICTURES: Final = frozenset(mime for _, mime in _MAGIC)
_DATA_URL: Final = re.compile(r"data:(?P<mime>[^;,]*)(?P<params>(?:;[^,;]*)*),", re.IGNORECASE)
_MIME: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*/[a-z0-9][a-z0-9.+-]*")


def collect(message: InputLike) -> Collected:
    """All attachments of one message."""
    kept: dict[bytes, Attachment] = {}
    refused: dict[tuple[str, str], Refusal] = {}
    total = 0

    def refuse(key: str, name: str, **params: str) -> None:
        refused.setdefault((key, name), Refusal(key, {"name": name or "–", **params}))

    for source in _sources(message):
        name = clean_name(source.name)
        inline = source.data or (source.url if source.url[:5].lower() == "data:" else "")
        if not inline:
            refuse("attachment.only_an_address", name)
            continue
        if len(inline) > limits.ATTACHMENT_BYTES * 4:
            refuse("attachment.too_large", name, limit=_mib(limits.ATTACHMENT_BYTES))
            continue
        decoded = _decode(inline)
        if decoded is None:
            refuse("attachment.unreadable", name)
            continue
        data, claimed = decoded
        digest = hashlib.sha256(data).digest()
        if digest in kept:
            if kept[digest].kind == "file" and _kind(source.kind, kept[digest].mime_type) == "audio":
                old = kept[digest]
                kept[digest] = Attachment("audio", old.name, old.mime_type, data)
            continue
        if len(data) > limits.ATTACHMENT_BYTES:
            refuse("attachment.too_large", name, limit=_mib(limits.ATTACHMENT_BYTES))
        elif len(kept) >= limits.ATTACHMENTS_MAX:
            refuse("attachment.too_many", name, limit=str(limits.ATTACHMENTS_MAX))
        elif total + len(data) > limits.ATTACHMENTS_BYTES:
            refuse("attachment.too_large_together", name, limit=_mib(limits.ATTACHMENTS_BYTES))
        else:
            mime = _mime_of(data, claimed or source.mime_type)
            total += len(data)
            kept[digest] = Attachment(_kind(source.kind, mime), name, mime, data)
    return Collected(tuple(kept.values()), tuple(refused.values()))


def clean_name(name: str) -> str:
    """The last component of a name a person chose, without control and format characters, at most 128 characters long."""
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name))[-1]
    visible = "".join(char for char in last if unicodedata.category(char)[0] != "C").strip()
    return "" if visible in {"", ".", ".."} else visible[-limits.ATTACHMENT_NAME_CHARS :]


def _sources(message: InputLike) -> Iterator[_Source]:
    # Attachments first: they carry names and media types where contents carry the same bytes bare.
    for item in message.attachments:
        data, url = _text(item, "content"), _text(item, "url")
        if data or url:
            yield _Source(_text(item, "type"), _text(item, "name"), _text(item, "mime_type"), data, url)
    for item in message.contents:
        kind = _text(item, "type")
        if kind == "image_base64":
            yield _Source("image", _text(item, "file_name"), "", _text(item, "image_base64"), "")
        elif kind == "image_url":
            holder = getattr(item, "image_url", None)
            yield _Source("image", _text(item, "file_name"), "", "", _text(holder, "url") or str(holder or ""))
        elif kind in {"file_base64", "file_url"}:
            yield _Source("file", _text(item, "file_name"), "", _text(item, "file_base64"), _text(item, "file_url"))


def _text(item: object, name: str) -> str:
    value = getattr(item, name, None)
    return value if isinstance(value, str) else ""


def _decode(inline: str) -> tuple[bytes, str] | None:
    """Decoded bytes and the claimed media type of base64 text or a ``data:`` URL; ``None`` when it is neither."""
    claimed, body = "", inline
    match = _DATA_URL.match(inline)
    if match:
        claimed, body = match["mime"].lower(), inline[match.end() :]
        if "base64" not in match["params"].lower().split(";"):
            return unquote_to_bytes(body), claimed
    try:
        compact = "".join(body.split()).replace("-", "+").replace("_", "/")
        data = base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    return (data, claimed) if data else None


def _mime_of(data: bytes, claimed: str) -> str:
    for magic, mime in _MAGIC:
        if magic.match(data):
            return mime
    lowered = claimed.strip().lower()
    if _MIME.fullmatch(lowered) and lowered not in _PICTURES:
        return lowered
    return "application/octet-stream"


def _kind(claimed: str, mime: str) -> Kind:
    if mime in _PICTURES:
        return "image"
    if mime.startswith("audio/") or claimed in {"voice", "audio"}:
        return "audio"
    return "file"


def _mib(size: int) -> str:
    return f"{size // (1024 * 1024)} MiB"
