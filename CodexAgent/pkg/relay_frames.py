"""Relay frames: bounded JSON in and out, and the seal that binds every frame to one connection and one place in it.

A frame is one WebSocket text message of at most ``RELAY_FRAME_BYTES``. Before the proof it is one JSON object; after it::

    ["<mac>",<sequence>,{message},{message},...]

The MAC is the unpadded base64url form of the first 16 bytes of HMAC-SHA256 over everything behind ``["<mac>",``. The
sequence counts this direction's frames from 1 without a gap.

Guarantees of :class:`SealedChannel`:

- nothing of a frame is parsed before its MAC has been verified;
- a frame that fails the MAC, and one whose sequence was seen before, is dropped and counted, and changes nothing;
- an authentic frame behind a gap means that somebody took frames away: :class:`FrameError`, the connection has to end;
- an authentic frame that is not what a frame has to be raises :class:`FrameError`; no other exception leaves this module.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from pkg import limits

Json = Any
"""A JSON value."""

Message = dict[str, Json]
"""One message of a frame: a JSON object with a ``type``."""

MAC_CHARS: Final = 22
"""Characters of a frame's MAC: 16 bytes in base64url without padding."""

LARGEST_NUMBER: Final = 2**53 - 1
"""The largest integer that every JSON implementation keeps exactly."""

_HEAD: Final = b'["'
_NECK: Final = b'",'
_BODY_AT: Final = len(_HEAD) + MAC_CHARS + len(_NECK)


class FrameError(Exception):
    """What arrived breaks the protocol; ``reason`` is short, ours, and holds nothing of what arrived."""

    def __init__(self, reason: str) -> None:
        """``reason`` fits into a close reason."""
        self.reason = reason
        super().__init__(reason)


@dataclass(slots=True)
class Counters:
    """What was dropped, by cause."""

    injected: int = 0
    """Frames without a valid MAC."""
    replayed: int = 0
    """Authentic frames whose sequence was seen before."""
    duplicate: int = 0
    """Records that had arrived before a reconnect."""
    foreign: int = 0
    """Messages about a job that does not belong to their connection."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_json(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is no JSON value")


_LONG: Final = 1024
"""Characters from which on :func:`_quoted` is faster than the C function, which looks at each one twice."""

_RARE: Final = bytes(255 - code if code == 0x7F or (code < 0x20 and code not in b"\t\n\r") else code for code in range(256))
"""Changes the control characters that hardly any text has, and leaves every other ASCII character alone."""

_C_QUOTED: Final = json.encoder.encode_basestring_ascii


def _quoted(text: str) -> str:
    """The same as the C function, in less than half its time for a long text of ASCII."""
    if len(text) < _LONG or not text.isascii():
        return _C_QUOTED(text)
    raw = text.encode("ascii")
    if raw.translate(_RARE) != raw:
        return _C_QUOTED(text)
    raw = raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    raw = raw.replace(b"\n", b"\\n").replace(b"\t", b"\\t").replace(b"\r", b"\\r")
    return (b'"%b"' % raw).decode("ascii")


def _encoder() -> Callable[[Json, int], Sequence[str]]:
    """The compact ASCII encoder; what it gives for a value and a 0 is the text in pieces.

    ``JSONEncoder.encode`` builds its C encoder anew for every call, which is a third of the cost of a small event, and has no
    say in how a text is quoted; here it is built once, where this Python has it with the arguments known from 3.11 to 3.13.
    """
    plain = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False, default=_no_json).encode

    def whole(value: Json, _level: int) -> tuple[str]:
        return (plain(value),)

    try:
        make: Callable[..., Callable[[Json, int], Sequence[str]]] = json.encoder.c_make_encoder  # type: ignore[attr-defined]
        built = make(None, _no_json, _quoted, None, ":", ",", False, False, False)
        sample = {"a": [1, -2.5, True, None, "\u00e9\ud800"]}
        if "".join(built(sample, 0)) == plain(sample):
            return built
    except (AttributeError, TypeError):
        return whole
    return whole


_encode = _encoder()
_decode = json.JSONDecoder(parse_constant=_no_constant).decode


def encode(value: Json) -> bytes:
    """The compact ASCII JSON of a value; raises ``ValueError`` or ``TypeError`` for what is no JSON value."""
    try:
        return "".join(_encode(value, 0)).encode("ascii")
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode(data: bytes | str) -> Json:
    """The value a JSON text stands for; raises :class:`FrameError` for anything else, however it is malformed."""
    try:
        return _decode(data if isinstance(data, str) else data.decode("utf-8"))
    except RecursionError:
        raise FrameError("nested too deeply") from None
    except ValueError:
        raise FrameError("not JSON in UTF-8") from None


def decode_object(data: bytes, most: int) -> Message:
    """One JSON object of at most ``most`` bytes; raises :class:`FrameError`."""
    if len(data) > most:
        raise FrameError(f"more than {most} bytes")
    value = decode(data)
    if type(value) is not dict:
        raise FrameError("not a JSON object")
    return value


# ------------------------------------------------------------------ fields of messages


def text_of(message: Mapping[str, Json], name: str, most: int = 128) -> str:
    """A non-empty string field of at most ``most`` characters; raises :class:`FrameError`."""
    value = message.get(name)
    if type(value) is not str or not 0 < len(value) <= most:
        raise FrameError(f"bad field {name}")
    return value


def number_of(message: Mapping[str, Json], name: str, least: int = 0) -> int:
    """An integer field from ``least`` to 2**53 - 1; raises :class:`FrameError`."""
    value = message.get(name)
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise FrameError(f"bad field {name}")
    return value


def seconds_of(message: Mapping[str, Json], name: str) -> float:
    """A non-negative number field; raises :class:`FrameError`."""
    value = message.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LARGEST_NUMBER:
        raise FrameError(f"bad field {name}")
    return float(value)


def flag_of(message: Mapping[str, Json], name: str) -> bool:
    """A boolean field; raises :class:`FrameError`."""
    value = message.get(name)
    if type(value) is not bool:
        raise FrameError(f"bad field {name}")
    return value


def names_of(message: Mapping[str, Json], name: str, most: int, chars: int = 128) -> tuple[str, ...]:
    """A field that is a list of at most ``most`` non-empty strings, empty when absent; raises :class:`FrameError`."""
    value = message.get(name, [])
    if type(value) is not list or len(value) > most:
        raise FrameError(f"bad field {name}")
    for item in value:
        if type(item) is not str or not 0 < len(item) <= chars:
            raise FrameError(f"bad field {name}")
    return tuple(value)


def objects_of(message: Mapping[str, Json], name: str, most: int) -> list[Message]:
    """A field that is a list of at most ``most`` objects, empty when absent; raises :class:`FrameError`."""
    value = message.get(name, [])
    if type(value) is not list or len(value) > most:
        raise FrameError(f"bad field {name}")
    for item in value:
        if type(item) is not dict:
            raise FrameError(f"bad field {name}")
    return value


def job_id_of(message: Mapping[str, Json]) -> str:
    """The field ``job_id``; raises :class:`FrameError`."""
    return text_of(message, "job_id", 64)


# ------------------------------------------------------------------ channels


class Channel(Protocol):
    """How messages become frames on one connection, and back."""

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """The next frame, made of encoded messages."""
        ...

    def open(self, frame: bytes) -> list[Message] | None:
        """A frame's messages; ``None`` for one that was dropped. Raises :class:`FrameError`."""
        ...


class SealedChannel:
    """One side's end of a proven connection."""

    def __init__(self, send_key: bytes, receive_key: bytes, counters: Counters) -> None:
        """The keys are this connection's own, 32 bytes each, one for each direction."""
        # Keyed once: the one-shot function looks up its digest at every call, which costs more than the MAC of a small frame.
        self._send_mac = hmac.new(send_key, digestmod="sha256")
        self._receive_mac = hmac.new(receive_key, digestmod="sha256")
        self._counters = counters
        self._sent = 0
        self._received = 0

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """The next frame, made of encoded messages."""
        self._sent += 1
        pieces = [b"%d" % self._sent]
        for part in parts:
            pieces += (b",", part)
        pieces.append(b"]")
        body = b"".join(pieces)
        return b"".join((_HEAD, _mac(self._send_mac, body), _NECK, body))

    def open(self, frame: bytes) -> list[Message] | None:
        """A frame's messages; ``None`` for a dropped one. Raises :class:`FrameError` for an authentic one that is wrong."""
        body = memoryview(frame)[_BODY_AT:]
        if (
            len(frame) > limits.RELAY_FRAME_BYTES
            or frame[:2] != _HEAD
            or frame[_BODY_AT - 2 : _BODY_AT] != _NECK
            or not hmac.compare_digest(frame[2 : _BODY_AT - 2], _mac(self._receive_mac, body))
        ):
            self._counters.injected += 1
            return None
        comma = frame.find(b",", _BODY_AT, _BODY_AT + 20)
        digits = frame[_BODY_AT:comma] if comma > 0 else b""
        if not digits.isdigit() or digits[:1] == b"0":
            raise FrameError("bad frame sequence")
        sequence = int(digits)
        if sequence <= self._received:
            self._counters.replayed += 1
            return None
        if sequence != self._received + 1:
            raise FrameError("frames are missing")
        self._received = sequence
        value = decode(frame)
        if type(value) is not list:
            raise FrameError("not a frame")
        return _messages(value[2:])


class PlainChannel:
    """One side's end of a connection whose hello carried the token itself: bare messages without seal or sequence."""

    def seal(self, parts: Sequence[bytes]) -> bytes:
        """One message as it is, several as a JSON array."""
        return parts[0] if len(parts) == 1 else b"[%b]" % b",".join(parts)

    def open(self, frame: bytes) -> list[Message] | None:
        """The messages of a frame, which is one object or an array of them; raises :class:`FrameError`."""
        if len(frame) > limits.RELAY_FRAME_BYTES:
            raise FrameError("frame too large")
        value = decode(frame)
        return _messages(value if type(value) is list else [value])


def _mac(keyed: hmac.HMAC, body: bytes | memoryview) -> bytes:
    mac = keyed.copy()
    mac.update(body)
    return base64.urlsafe_b64encode(mac.digest()[:16])[:MAC_CHARS]


def _messages(values: list[Json]) -> list[Message]:
    if not values:
        raise FrameError("empty frame")
    for value in values:
        if type(value) is not dict or type(value.get("type")) is not str:
            raise FrameError("not a message")
    return values
