"""Text that any surface can carry: no terminal escapes, no control characters, no broken Unicode.

:class:`TextCleaner` takes a stream in pieces cut anywhere, also in the middle of an escape sequence, of ``\\r\\n`` or of a
surrogate pair, and gives the same result as for the whole text at once. It holds back at most one unfinished sequence.
"""

from __future__ import annotations

import re
from typing import Final

from pkg import limits

_STRING: Final = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\n\x90\x98\x9c-\x9f]*"
"""How a title or a link begins. It ends at the latest where another begins: else each of many would read all that follow."""
_ESCAPE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor
    rf"|{_STRING}(?:\x07|\x1b\\|\x9c|(?=\n))"
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two-character escapes
)
_UNFINISHED: Final = re.compile(rf"(?:\x1b|(?:\x1b\[|\x9b)[0-?]*[ -/]*|{_STRING}\x1b?|\x1b[ -/]+)\Z")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE: Final = re.compile("[\ud800-\udfff]")
_INVISIBLE: Final = re.compile("[\\s\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff\u00ad\u180e\ufe0e\ufe0f]+")


def _join_pair(match: re.Match[str]) -> str:
    return match.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def is_blank(text: str) -> bool:
    """Whether a person would see nothing: only whitespace and invisible characters (surfaces drop such messages)."""
    return not text or _INVISIBLE.fullmatch(text) is not None


def one_line(text: str, max_chars: int) -> str:
    """``text`` cleaned, on one line, at most ``max_chars`` characters long with ``…`` where it was cut."""
    flat = " ".join(clean(text[: max_chars * 8]).split())
    return flat if len(flat) <= max_chars else flat[: max_chars - 1].rstrip() + "…"


def clean(text: str) -> str:
    """The whole of a text, cleaned."""
    cleaner = TextCleaner()
    return cleaner.feed(text) + cleaner.flush()


class TextCleaner:
    """Cleans one stream of text; the held-back rest never exceeds ``limits.ESCAPE_CHARS``."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """The clean text that is certain after ``piece``."""
        text = self._held + piece
        self._held = ""
        if text.isascii() and text.isprintable():
            return text
        start = len(text)
        tail = _UNFINISHED.search(text, max(0, len(text) - limits.ESCAPE_CHARS))
        if tail is not None:
            start = tail.start()
        elif text and (text[-1] == "\r" or "\ud800" <= text[-1] <= "\udbff"):
            start = len(text) - 1
        self._held = text[start:]
        return self._clean(text[:start])

    def flush(self) -> str:
        """What is left at the end of the stream; an unfinished escape sequence is dropped."""
        text, self._held = self._held, ""
        return self._clean(_UNFINISHED.sub("", text))

    @staticmethod
    def _clean(text: str) -> str:
        if text.isascii() and text.isprintable():
            return text
        if _LONE.search(text):
            text = _LONE.sub("\ufffd", _PAIR.sub(_join_pair, text))
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        return _CONTROL.sub("", _ESCAPE.sub("", text))
