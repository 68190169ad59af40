"""Access to what an agent said, leniently: whatever is missing or of another shape becomes a default, and nothing raises."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pkg.agent_api import Json

_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE: Final = re.compile("[\ud800-\udfff]")
_GREATEST: Final = 2**63 - 1


def as_dict(value: Json) -> dict[str, Any]:
    """``value`` where it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Json) -> list[Any]:
    """``value`` where it is an array, else an empty one."""
    return value if isinstance(value, list) else []


def as_str(value: Json) -> str:
    """``value`` where it is text (broken surrogates replaced), else the empty string."""
    return unicode_safe(value) if isinstance(value, str) else ""


def as_int(value: Json) -> int | None:
    """``value`` where it is a whole number of at most 64 bits, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= _GREATEST else None


def as_float(value: Json) -> float | None:
    """``value`` where it is a finite number, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _GREATEST:
        return None
    return float(value)


def unicode_safe(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced, so that it can be encoded."""
    if text.isascii() or not _LONE.search(text):
        return text
    joined = _PAIR.sub(lambda pair: pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    return _LONE.sub("\ufffd", joined)


def bounded(text: str, limit: int) -> tuple[str, bool]:
    """``text`` cut to ``limit`` characters, and whether it was cut."""
    return (text, False) if len(text) <= limit else (text[:limit], True)


def compact(value: Json, limit: int) -> tuple[str, bool]:
    """``value`` as JSON text of at most ``limit`` characters, and whether it was cut."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return "", True
    return bounded(unicode_safe(text), limit)
