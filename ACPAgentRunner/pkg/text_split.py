"""Long text in parts that each stand alone: cut where it hurts least, code fences closed and opened again.

Guarantees, for any text without lone surrogates and any limit of at least ``MINIMUM_UNITS``:

- every part's text is within the limit, in UTF-16 units and in bytes of ASCII-escaped JSON;
- the bodies of the parts, joined, are the original text; a part's text is its body with at most one fence line before it
  and one after it;
- a part that ends inside a code fence closes it, and the next one opens it again with its indentation, its length of
  marks and its language;
- no cut falls inside a surrogate pair; none falls inside a letter with its marks, a flag or a joined emoji, unless a single
  one of those is longer than ``GRAPHEME_REACH`` characters.

Where to cut, best first: between paragraphs or beside a code fence, between lines, between the lines of a fence, after a
sentence, between words, anywhere. A better place is taken when it still fills a fair share of the part.
"""

from __future__ import annotations

import bisect
import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MINIMUM_UNITS: Final = 500
"""The smallest limit that still holds both fence lines and some text."""

GRAPHEME_REACH: Final = 64
"""Characters looked back for the start of a letter; longer piles of marks are cut anywhere."""

_FENCE_LINE: Final = re.compile(r"(?P<lead>(?:[ \t]|>|[-*+][ \t]|[0-9]{1,9}[.)][ \t])*)(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)")
_SENTENCE_END: Final = re.compile(r"[.!?](?=[ \n])[ ]?|[。！？；…]")
_WORD_END: Final = re.compile(r"[ \t\u3000]+|[，、]")
_REACH: Final = 8 * 1024
"""Characters before the end of a part in which places are looked for; a part of a surface without a limit holds far more."""
_LINES_BEFORE: Final = 4
"""Lines before those that are looked at, too: cutting anywhere steps back over as many fence lines."""
_ZWJ: Final = "\u200d"
_FILL: Final = (0.5, 0.5, 0.5, 0.5, 0.3)
"""Least share of the limit a cut must reach: paragraph or fence edge, line, line in a fence, sentence, word."""


def utf16_units(text: str) -> int:
    """Length in UTF-16 code units, the unit chat services count in."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def json_bytes(text: str) -> int:
    """Bytes of ``text`` inside ASCII-escaped JSON, without the quotes."""
    return len(json.dumps(text)) - 2


@dataclass(frozen=True, slots=True)
class Limit:
    """What one message may hold: ``units`` UTF-16 units (``None``: no such limit) and ``json_bytes`` escaped bytes."""

    units: int | None
    json_bytes: int

    def admits(self, text: str) -> bool:
        """Whether ``text`` fits into one message."""
        if 12 * len(text) <= self.json_bytes and (self.units is None or 2 * len(text) <= self.units):
            return True
        if len(text) > self.json_bytes or (self.units is not None and len(text) > self.units):
            return False
        return (self.units is None or utf16_units(text) <= self.units) and json_bytes(text) <= self.json_bytes

    def less(self, text: str) -> Limit:
        """What is left beside ``text``."""
        units = None if self.units is None else self.units - utf16_units(text)
        return Limit(units, self.json_bytes - json_bytes(text))

    def head(self, text: str) -> int:
        """How many characters from the start of ``text`` fit."""
        low, high = 0, len(text)
        if self.units is not None:
            high = min(high, max(0, self.units))
        high = min(high, max(0, self.json_bytes))
        if self.admits(text[:high]):
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.admits(text[:middle]):
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class Fence:
    """An open code fence: what stands before its marks, the marks, and the rest of its opening line."""

    lead: str
    mark: str
    info: str

    @property
    def opening(self) -> str:
        """The line that opens it again in the next part."""
        blank = "".join(char if char in "> \t" else " " for char in self.lead)
        return f"{blank}{self.mark}{self.info}\n"

    @property
    def closing(self) -> str:
        """The line that closes it, without a line break."""
        return "".join(char if char in "> \t" else " " for char in self.lead) + self.mark

    def closed_by(self, line: str) -> bool:
        """Whether ``line`` (without its break) ends this fence."""
        match = _FENCE_LINE.fullmatch(line[:_LINE_HEAD_CHARS])
        return (
            match is not None
            and match["mark"][0] == self.mark[0]
            and len(match["mark"]) >= len(self.mark)
            and not match["info"].strip()
            and not match["lead"].strip(" \t>")
        )


_LINE_HEAD_CHARS: Final = 256
"""Characters of a line looked at to see whether it is a fence line."""

_MARK_CHARS: Final = 32
"""Longer marks or indentation open no fence here: opening it again would cost more than it helps."""

_INFO_CHARS: Final = 48
"""Characters of a fence's language tag repeated when it is opened again."""


def opened_by(line: str) -> Fence | None:
    """The fence that ``line`` (without its break) opens outside any fence, or ``None``."""
    line = line[:_LINE_HEAD_CHARS]
    if "```" not in line and "~~~" not in line:
        return None
    match = _FENCE_LINE.fullmatch(line)
    if match is None or (match["mark"][0] == "`" and "`" in match["info"]):
        return None
    if len(match["mark"]) > _MARK_CHARS or len(match["lead"]) > _MARK_CHARS:
        return None
    return Fence(match["lead"], match["mark"], match["info"][:_INFO_CHARS].rstrip())


@dataclass(slots=True)
class FenceTracker:
    """Which fence is open at the end of a growing text; reads each character once."""

    fence: Fence | None = None
    line_start: int = 0
    """Where the last begun line outside any fence starts, in characters of the text."""
    _line: str = ""
    _read: int = 0

    def feed(self, text: str) -> None:
        """Take the next piece, cut anywhere."""
        lines, ended, rest = text.rpartition("\n")
        if ended:
            # Without marks only the first line can be a fence line: they may stand in what is held of it.
            marked = "```" in lines or "~~~" in lines
            start = self._read
            for line in lines.split("\n") if marked else lines.split("\n", 1)[:1]:
                self.fence = _after_line(self.fence, self._line + line[:_LINE_HEAD_CHARS])
                self._line = ""
                start += len(line) + 1
                if self.fence is None:
                    self.line_start = start
            if self.fence is None:
                self.line_start = self._read + len(lines) + 1
        self._line = (self._line + rest[:_LINE_HEAD_CHARS])[:_LINE_HEAD_CHARS]
        self._read += len(text)

    @property
    def now(self) -> Fence | None:
        """The fence open now, the unfinished last line counted as if it ended here."""
        return _after_line(self.fence, self._line)

    @property
    def at_line_start(self) -> bool:
        """Whether the text so far is empty or ends with a line break."""
        return not self._line


def _after_line(fence: Fence | None, line: str) -> Fence | None:
    if fence is None:
        return opened_by(line)
    return None if fence.closed_by(line) else fence


@dataclass(frozen=True, slots=True)
class Part:
    """One message's worth. ``text`` is what is shown, ``body`` the piece of the original it stands for."""

    text: str
    body: str


class _Place(NamedTuple):
    position: int
    suffix: str
    fence: Fence | None


@dataclass(slots=True)
class _Places:
    floor: int
    """No place before it is of interest."""
    ranks: tuple[list[_Place], ...] = field(default_factory=lambda: ([], [], [], [], []))
    lines: list[tuple[int, Fence | None, bool]] = field(default_factory=list)
    """Start of each line looked at, the fence open before it, and whether the line is itself a fence line."""

    def scan(self, text: str, fence: Fence | None) -> None:
        """Collect the places to cut in ``text``, which starts inside ``fence``."""
        start = self.floor
        for _ in range(_LINES_BEFORE):
            start = text.rfind("\n", 0, max(0, start - 1)) + 1
        tracker = FenceTracker(fence)
        tracker.feed(text[:start])
        fence = tracker.fence
        while start <= len(text):
            end = text.find("\n", start)
            line = text[start:] if end < 0 else text[start:end]
            after = _after_line(fence, line)
            is_fence_line = after is not fence
            self.lines.append((start, fence, is_fence_line))
            if len(self.lines) > 1 and not (is_fence_line and fence is not None):
                self._line_start(text, start, fence, opens=is_fence_line)
            if not is_fence_line:
                self._inside(text, start, len(text) if end < 0 else end, fence)
            if end < 0:
                break
            fence, start = after, end + 1

    def _line_start(self, text: str, start: int, fence: Fence | None, *, opens: bool) -> None:
        previous = self.lines[-2]
        if fence is None:
            edge = opens or previous[2] or text[start - 2 : start] == "\n\n"
            self.ranks[0 if edge else 1].append(_Place(start, "", None))
        elif not previous[2]:
            self.ranks[2].append(_Place(start, fence.closing, fence))

    def _inside(self, text: str, start: int, end: int, fence: Fence | None) -> None:
        start = max(start, self.floor)
        if start >= end:
            return
        suffix = "" if fence is None else "\n" + fence.closing
        if fence is None:
            self.ranks[3].extend(_Place(match.end(), suffix, fence) for match in _SENTENCE_END.finditer(text, start, end))
        self.ranks[4].extend(_Place(match.end(), suffix, fence) for match in _WORD_END.finditer(text, start, end))

    def anywhere(self, text: str, limit: Limit) -> _Place:
        """The last position at which the part still fits, not inside a letter nor inside a fence line."""
        position = limit.head(text)
        for _ in range(3):
            index = bisect.bisect_right(self.lines, position, key=lambda entry: entry[0]) - 1
            start, fence, is_fence_line = self.lines[index]
            if is_fence_line and start > 0 and position > start:
                position = start
                start, fence, is_fence_line = self.lines[index - 1]
            suffix = "" if fence is None else fence.closing if text[position - 1 : position] == "\n" else "\n" + fence.closing
            fits = min(position, limit.less(suffix).head(text))
            fits = max(grapheme_start(text, fits), 1)
            if fits == position:
                return _Place(position, suffix, fence)
            position = fits
        return _Place(position, suffix, fence)


def grapheme_start(text: str, position: int) -> int:
    """The nearest position at or before ``position`` that is not inside a letter with its marks, a flag or a joined emoji."""
    lowest = max(0, position - GRAPHEME_REACH)
    here = position
    while here > lowest and here < len(text) and _joins(text, here):
        here -= 1
    return here if here > lowest or lowest == 0 else position


def _joins(text: str, here: int) -> bool:
    """Whether the characters before and after ``here`` belong to one letter."""
    before, after = text[here - 1], text[here]
    if after < "\u0300":
        return before == "\r" and after == "\n"
    if before == _ZWJ or after == _ZWJ or unicodedata.category(after) in {"Mn", "Me", "Mc"}:
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f":
        return True
    if "\U0001f1e6" <= after <= "\U0001f1ff":
        flags = 0
        while flags < here and "\U0001f1e6" <= text[here - 1 - flags] <= "\U0001f1ff":
            flags += 1
        return flags % 2 == 1
    if "\u1160" <= after <= "\u11ff":
        return "\u1100" <= before <= "\u11ff" or "\uac00" <= before <= "\ud7a3"
    return False


def cut(text: str, limit: Limit, fence: Fence | None = None, *, least: int = 0) -> tuple[Part, str, Fence | None]:
    """The first part of ``text``, what is left of it, and the fence open there.

    ``fence`` is the one open where ``text`` begins; its opening line is put before the part. Text that fits is one part
    (closed when its fence is still open, so that the part stands alone). A good place before ``least`` characters is not
    taken.
    """
    prefix = fence.opening if fence is not None else ""
    if limit.admits(prefix + text):
        whole, end = _closed(text, fence)
        if limit.admits(prefix + whole):
            return Part(prefix + whole, text), "", end
    room = limit.less(prefix)
    window = text[: room.head(text)]
    places = _Places(floor=max(int(min(_FILL) * len(window)), len(window) - _REACH))
    places.scan(window, fence)
    place = _best(places, window, room, least) or places.anywhere(text, room)
    body = text[: place.position]
    return Part(prefix + body + place.suffix, body), text[place.position :], place.fence


def _closed(text: str, fence: Fence | None) -> tuple[str, Fence | None]:
    tracker = FenceTracker(fence)
    tracker.feed(text)
    end = tracker.now
    if end is None:
        return text, None
    return text + ("" if text.endswith("\n") or not text else "\n") + end.closing, end


def _best(places: _Places, window: str, room: Limit, least: int) -> _Place | None:
    for rank, share in zip(places.ranks, _FILL, strict=True):
        for place in reversed(rank):
            if place.position < max(share * len(window), least):
                break
            if not place.suffix or room.less(place.suffix).admits(window[: place.position]):
                return place
    return None


def split(text: str, limit: Limit) -> list[Part]:
    """``text`` in parts within ``limit``, in order; an empty text has no parts.

    The last part of a text that ends inside an open fence closes it.
    """
    parts: list[Part] = []
    fence: Fence | None = None
    while text:
        part, text, fence = cut(text, limit, fence)
        parts.append(part)
    return parts
