"""Texts for people, in eight languages: one flat JSON catalogue per language beside this module.

Keys are error codes (``coding.workspace_missing``) and names of visible texts (``status.working``). Every key stands in every
catalogue with the same placeholders; the suite checks it. English is the fallback, and an unknown key renders as itself
with its parameters, so that a missing text is visible and never an exception.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LANGUAGES: Final = ("en_US", "zh_Hans", "zh_Hant", "ja_JP", "th_TH", "vi_VN", "es_ES", "ru_RU")
DEFAULT_LANGUAGE: Final = "en_US"

_VIETNAMESE: Final = frozenset("ăđơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ")
_TRADITIONAL: Final = frozenset("這個們來說時會對為國過還後裡麼嗎請與處應實開關問題檔寫讀號碼資訊")


@functools.cache
def catalogue(language: str) -> Mapping[str, str]:
    """The catalogue of one language, read once; raises ``KeyError`` for a language that is not in ``LANGUAGES``."""
    if language not in LANGUAGES:
        raise KeyError(language)
    path = Path(__file__).with_name("locales") / f"{language}.json"
    loaded: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return types.MappingProxyType(loaded)


class _Params(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def render(key: str, language: str, params: Mapping[str, object] | None = None) -> str:
    """The text of ``key`` in ``language`` with its placeholders filled; never raises for an unknown key."""
    values = _Params({name: str(value) for name, value in (params or {}).items()})
    known = language if language in LANGUAGES else DEFAULT_LANGUAGE
    for name, value in values.items():
        if value.startswith("problem.") and value != key and value in catalogue(DEFAULT_LANGUAGE):
            values[name] = render(value, known, values)
    template = catalogue(known).get(key) or catalogue(DEFAULT_LANGUAGE).get(key)
    if template is None:
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"{key} ({listed})" if listed else key
    return template.format_map(values)


def guess_language(text: str) -> str:
    """The language whose script ``text`` is written in, for a form left on ``auto``; English when nothing tells."""
    lowered = text.lower()
    if any("\u3040" <= char <= "\u30ff" for char in text):
        return "ja_JP"
    if any("\u4e00" <= char <= "\u9fff" for char in text):
        return "zh_Hant" if any(char in _TRADITIONAL for char in text) else "zh_Hans"
    if any("\u0e00" <= char <= "\u0e7f" for char in text):
        return "th_TH"
    if any("\u0400" <= char <= "\u04ff" for char in text):
        return "ru_RU"
    if any(char in _VIETNAMESE for char in lowered):
        return "vi_VN"
    if any(char in "¿¡ñ" for char in lowered):
        return "es_ES"
    return DEFAULT_LANGUAGE


for _language in LANGUAGES:
    # Now, and not when the first error is told: by then no descriptor may be left to read a file with.
    catalogue(_language)
