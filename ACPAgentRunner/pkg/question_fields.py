"""One field of a question: what it offers, and which value a typed text or a value of a form is for it.

Guarantees: both ways lead to the same values, which are the field's: an option's value, a list of them, a number, a switch, or
the text as it was typed; what is none of them is no value. Nothing is guessed about.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pkg import interaction_words, limits, text_clean, texts
from pkg.agent_api import Json, QuestionField
from pkg.interaction_parts import Unclear, words_of_agent

_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
_FENCES: Final = re.compile(r"`{3,}|~{3,}")
_PIECES: Final = re.compile(r"[,;、，；\n]+")
_DIGITS: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?", re.IGNORECASE)


def said(text: str) -> str:
    """A question's own text: cleaned, and without fences that would swallow what stands below it."""
    return _FENCES.sub(lambda match: "'" * len(match.group()), _REORDERING.sub("", text_clean.clean(text))).strip()


def said_on_one_line(text: str) -> str:
    """The same on one line."""
    return " ".join(said(text).split())


def own_names(wanted: Sequence[str], most: int) -> tuple[str, ...]:
    """``wanted`` where each of it is a readable name of at most ``most`` characters and no two are the same, else numbers."""
    readable = all(0 < len(each) <= most and each == said_on_one_line(each) for each in wanted)
    if readable and len(set(wanted)) == len(wanted):
        return tuple(wanted)
    return tuple(str(number) for number in range(1, len(wanted) + 1))


@dataclass(frozen=True, slots=True)
class Offer:
    """One option of a field: what goes to the agent, and how it reads."""

    value: Json
    label: str
    text_key: str = ""

    def shown(self, language: str) -> str:
        """Its label for people."""
        return texts.render(self.text_key, language) if self.text_key else self.label

    def readings(self) -> set[str]:
        """Every text that names it."""
        if self.text_key:
            return {texts.render(self.text_key, language) for language in texts.LANGUAGES}
        return {self.label, str(self.value)}


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the field."""

    value: Json


class OpenField:
    """One field that is to be answered."""

    def __init__(self, item: QuestionField) -> None:
        """None of it is looked at before it is needed."""
        self.item = item

    @functools.cached_property
    def offers(self) -> tuple[Offer, ...]:
        """What it offers, in the order of the numbers."""
        if self.item.type == "boolean":
            return Offer(True, "", "interaction.yes"), Offer(False, "", "interaction.no")
        if self.item.type in ("select", "multiselect"):
            return tuple(Offer(value, said_on_one_line(label) or value) for value, label in self.item.options)
        return ()

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """What stands for each option in a form: its value where that can stand there, else its number."""
        if self.item.type == "boolean":
            return "true", "false"
        return own_names([str(offer.value) for offer in self.offers], limits.INTERACTION_FIELD_CHARS)

    @functools.cached_property
    def _named(self) -> Mapping[str, set[int]]:
        """Which options, counted from 0, every label and value names."""
        named: dict[str, set[int]] = {}
        for at, offer in enumerate(self.offers):
            for reading in offer.readings():
                for form in interaction_words.forms(reading):
                    named.setdefault(form, set()).add(at)
        return named

    @property
    def buttons(self) -> int:
        """How many options are buttons: all or none."""
        offers = len(self.offers) if self.item.type in ("select", "boolean") else 0
        return offers if offers <= limits.INTERACTION_BUTTONS else 0

    # ---- typed

    def position(self, text: str) -> int | None:
        """Which option a text is, counted from 0: its number, else its label or value where that is one option's alone."""
        counted = interaction_words.number(text)
        if counted is not None and counted <= len(self.offers):
            return counted - 1
        exact = [at for at, offer in enumerate(self.offers) if offer.value == text.strip()]
        if len(exact) == 1:
            return exact[0]
        found = {at for form in interaction_words.forms(text) for at in self._named.get(form, ())}
        return found.pop() if len(found) == 1 else None

    def chosen(self, position: int) -> Json:
        """The value of one option alone."""
        value = self.offers[position].value
        return [value] if self.item.type == "multiselect" else value

    def spoken(self, text: str, what: str) -> Given | Unclear | None:
        """The value that is a text, which is no single option; ``None`` for none. ``what`` is how the field is told of."""
        match self.item.type:
            case "select":
                return Given(text.strip()) if self.item.custom else None
            case "multiselect":
                return self._several(text, what)
            case "boolean":
                truth = interaction_words.truth(text)
                return None if truth is None else Given(truth)
            case "number":
                value = _number(text)
                return Unclear("interaction.number_needed", {"what": what}) if value is None else Given(value)
        return Given(text.strip())

    def _several(self, text: str, what: str) -> Given | Unclear:
        offers = self.offers
        numbers = [interaction_words.number(piece) for piece in re.split(r"[\s,;、，；]+", text.strip()) if piece]
        if numbers and all(each is not None and each <= len(offers) for each in numbers):
            return _distinct([offers[each - 1].value for each in numbers if each is not None])
        pieces = [piece.strip() for piece in _PIECES.split(text) if piece.strip()]
        positions = [self.position(piece) for piece in pieces]
        if self.item.custom and not any(each is not None for each in positions):
            return Given([text.strip()])
        unknown = [piece for piece, each in zip(pieces, positions, strict=True) if each is None]
        if pieces and (self.item.custom or not unknown):
            return _distinct(
                [piece if each is None else offers[each].value for piece, each in zip(pieces, positions, strict=True)]
            )
        given = words_of_agent(", ".join(unknown), limits.INTERACTION_NAME_CHARS)
        return Unclear("interaction.unknown_option", {"what": what, "given": given})

    # ---- from a form

    def sent(self, value: Json, what: str) -> Given | Unclear | None:
        """The value that a form's value is; ``None`` where it was left empty. Options are their :attr:`keys` there."""
        if value is None or value in ("", []) or (isinstance(value, str) and text_clean.is_blank(value)):
            return None
        given: Given | Unclear | None = None
        match self.item.type:
            case "boolean" if isinstance(value, bool):
                given = Given(value)
            case "select" | "boolean":
                given = Given(self.offers[self.keys.index(value)].value) if value in self.keys else None
            case "multiselect":
                chosen = value if isinstance(value, list) else [value]
                if all(each in self.keys for each in chosen):
                    given = _distinct([self.offers[self.keys.index(str(each))].value for each in chosen])
            case "number" if not isinstance(value, str):
                given = Given(value) if _is_number(value) else Unclear("interaction.number_needed", {"what": what})
            case _ if isinstance(value, str):
                given = self.spoken(value, what)
        return given or no_answer(value, what)


def no_answer(value: Json, what: str) -> Unclear:
    """The text that says that a form's value is none."""
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Unclear(
        "interaction.form_no_answer", {"what": what, "given": words_of_agent(written, limits.INTERACTION_NAME_CHARS)}
    )


def _distinct(values: list[str]) -> Given:
    """A value of several, each once."""
    return Given(list(dict.fromkeys(values)))


def _is_number(value: Json) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return bool(abs(value) < 10**limits.INTERACTION_NUMBER_CHARS)
    return isinstance(value, float) and math.isfinite(value)


def _number(text: str) -> int | float | None:
    """The finite number that is the whole of ``text``, whole where it is written whole; a comma is not guessed about."""
    shown = interaction_words.plain(text).rstrip("!")
    if len(shown) > limits.INTERACTION_NUMBER_CHARS or not _DIGITS.fullmatch(shown):
        return None
    if re.fullmatch(r"[+-]?[0-9]+", shown):
        return int(shown)
    value = float(shown)
    return value if math.isfinite(value) else None
