"""What must not be shown of other programs' words: secret values we know, however they are written.

Hidden as ``***``: a value as it is, as it stands in JSON, and each longer line of a value that has several (a key file);
also the credentials in any URL. Values shorter than ``limits.SECRET_CHARS`` would mangle ordinary text and are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from pkg import limits, text_clean

_CREDENTIALS_IN_URL: Final = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


class Redactor:
    """Hides a set of secrets; call it with a text."""

    __slots__ = ("_known",)

    def __init__(self, secrets: Iterable[str]) -> None:
        """``secrets`` may hold anything; what is no secret by its length is ignored."""
        self._known = sorted(_forms(secrets), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """``text`` without the secrets."""
        # No pattern: the standard library would remember it, and the secrets with it.
        for secret in self._known:
            text = text.replace(secret, "***")
        return _CREDENTIALS_IN_URL.sub("***", text)

    def tail(self, data: bytes | bytearray, *, cut: bool) -> str:
        """The end of a program's output: decoded, without terminal escapes and secrets.

        Where it was ``cut`` out of more, the cut may have gone through a secret: the line it went through is not shown, or,
        in a single line, whatever could be the rest of one.
        """
        text = text_clean.clean(data.decode("utf-8", "replace"))
        if cut:
            _, newline, whole = text.partition("\n")
            text = whole if newline else self._without_rest(text.lstrip("\ufffd"))
        return self(text)

    def _without_rest(self, text: str) -> str:
        """``text`` without the longest end of a secret it begins with."""
        rests = (size for secret in self._known for size in range(len(secret) - 1, 0, -1) if text.startswith(secret[-size:]))
        return text[max(rests, default=0) :]

    def __repr__(self) -> str:
        return "Redactor(***)"


def _forms(secrets: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for secret in secrets:
        if len(secret) >= limits.SECRET_CHARS:
            lines = (line.strip() for line in secret.splitlines())
            pieces = {secret, *(line for line in lines if len(line) >= limits.SECRET_LINE_CHARS)}
            found |= pieces | {json.dumps(piece)[1:-1] for piece in pieces}
    return found | {cleaned for each in found if (cleaned := text_clean.clean(each))}
