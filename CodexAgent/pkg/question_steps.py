"""A question as people see and answer it: its fields one after the other, each a number, a word or a text.

A question is no action, so that its text may be cut where a surface holds little; which number means which option stays. What
goes to the agent is the option's value, a number, a switch, a list of values or the text as it was typed.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pkg import interaction_words, limits, text_clean, texts
from pkg.agent_api import Answer, Json, QuestionAsked, QuestionField
from pkg.interaction_parts import (
    ACCEPT,
    CANCEL,
    SKIP,
    Again,
    Decided,
    Option,
    Outcome,
    Shown,
    Unclear,
    composed,
    cut,
    fits,
    selected,
    words_of_agent,
)
from pkg.text_split import Limit

_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
_FENCES: Final = re.compile(r"`{3,}|~{3,}")
_PIECES: Final = re.compile(r"[,;、，；\n]+")
_DIGITS: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?", re.IGNORECASE)


def _said(text: str) -> str:
    """A question's own text: cleaned, and without fences that would swallow what stands below it."""
    return _FENCES.sub(lambda match: "'" * len(match.group()), _REORDERING.sub("", text_clean.clean(text))).strip()


def _said_on_one_line(text: str) -> str:
    return " ".join(_said(text).split())


@dataclass(frozen=True, slots=True)
class _Offer:
    """One option of a field: what goes to the agent, and how it reads."""

    value: Json
    label: str
    text_key: str = ""


class QuestionSteps:
    """The fields of a question, one after the other."""

    def __init__(self, event: QuestionAsked, room: Limit) -> None:
        self._event = event
        self._room = room
        self._number = 0
        self._values: dict[str, Json] = {}
        self._message = self._own_words()
        self._offered_at: dict[int, tuple[list[_Offer], Mapping[str, set[int]]]] = {}

    def _own_words(self) -> str:
        """The message without the lines that its fields say again."""
        again = {
            line.strip() for item in self._event.fields for line in (*item.label.splitlines(), *item.description.splitlines())
        }
        return "\n".join(line for line in _said(self._event.message).splitlines() if line.strip() not in again).strip()

    @property
    def _field(self) -> QuestionField | None:
        return self._event.fields[self._number] if self._number < len(self._event.fields) else None

    def _offers(self) -> list[_Offer]:
        """What the current field offers."""
        return self._known()[0]

    def _known(self) -> tuple[list[_Offer], Mapping[str, set[int]]]:
        """What the current field offers, and which of it, counted from 0, every label and value names."""
        if self._number not in self._offered_at:
            offers = self._offers_of(self._field) if self._field is not None else []
            named: dict[str, set[int]] = {}
            for at, offer in enumerate(offers):
                for reading in self._readings(offer):
                    for form in interaction_words.forms(reading):
                        named.setdefault(form, set()).add(at)
            self._offered_at[self._number] = offers, named
        return self._offered_at[self._number]

    @staticmethod
    def _offers_of(item: QuestionField) -> list[_Offer]:
        if item.type == "boolean":
            return [_Offer(True, "", "interaction.yes"), _Offer(False, "", "interaction.no")]
        if item.type in ("select", "multiselect"):
            return [_Offer(value, _said_on_one_line(label) or value) for value, label in item.options]
        return []

    # ---- what is shown

    def described(self) -> str:
        item = self._field
        text = item.label if item is not None and len(self._event.fields) > 1 else self._event.message
        return words_of_agent(text or (item.label or item.name if item is not None else ""), limits.INTERACTION_NAME_CHARS)

    def shown(self, language: str, minutes: int) -> Shown:
        for question_chars in limits.INTERACTION_QUESTION_CHARS:
            for option_chars in limits.INTERACTION_OPTION_CHARS:
                shown = self._composed(language, minutes, question_chars, option_chars, None)
                if fits(shown, self._room):
                    return shown
        for listed in range(len(self._offers()), -1, -1):
            shown = self._composed(language, minutes, question_chars, option_chars, listed)
            if fits(shown, self._room):
                break
        return shown

    def _composed(self, language: str, minutes: int, question_chars: int, option_chars: int, listed: int | None) -> Shown:
        item, count = self._field, len(self._event.fields)
        key = "interaction.ask_question" if count <= 1 else "interaction.ask_question_of"
        title = texts.render(key, language, {"number": self._number + 1, "count": count})
        blocks = [cut("\n\n".join(self._told()), question_chars)]
        options = self._buttons(language)
        offers = self._offers()
        numbered = [self._label(offer, language) for offer in offers]
        words: list[str] = []
        if item is None or self._buttons_count(item):
            numbered = [option.label for option in options]
        else:
            words = [f"{texts.render(f'interaction.{option.option_id}_word', language)}: {option.label}" for option in options]
        lines = [f"{number}. {cut(label, option_chars)}" for number, label in enumerate(numbered, 1)]
        if listed is not None and listed < len(lines):
            lines = [*lines[:listed], "…"]
        how, custom = self._how()
        also = [texts.render("interaction.reply_custom", language)] if custom else []
        blocks += ["\n".join(lines), self._default(language), "\n".join((*also, *words))]
        return composed(title, blocks, options, language, minutes, reply=how, kind="choice")

    def _told(self) -> list[str]:
        """What the agent asks at this step, nothing twice."""
        item = self._field
        described = _said(item.description) if item is not None else ""
        label = _said(item.label or item.name) if item is not None else ""
        if label in (line.strip() for line in (self._message + "\n" + described).splitlines()):
            label = ""
        return list(filter(None, (self._message, label, described)))

    def _default(self, language: str) -> str:
        item = self._field
        if item is None or item.default is None or item.default == "" or item.required:
            return ""
        given = item.default if isinstance(item.default, list) else [item.default]
        labels = [next((offer for offer in self._offers() if offer.value == each), None) for each in given]
        shown = ", ".join(
            str(each) if offer is None else self._label(offer, language) for each, offer in zip(given, labels, strict=True)
        )
        return texts.render(
            "interaction.default", language, {"value": words_of_agent(shown, limits.INTERACTION_REASON_SHORT_CHARS)}
        )

    def _how(self) -> tuple[str, bool]:
        """The text that says how to answer this step, and whether any other words are an answer, too."""
        item = self._field
        if item is None or self._buttons_count(item):
            return "interaction.reply_number", item is not None and item.custom
        keys = {
            "select": "interaction.reply_number_only",
            "multiselect": "interaction.reply_several",
            "number": "interaction.reply_figure",
        }
        return keys.get(item.type, "interaction.reply_text"), item.custom and item.type in ("select", "multiselect")

    @staticmethod
    def _label(offer: _Offer, language: str) -> str:
        return texts.render(offer.text_key, language) if offer.text_key else offer.label

    def _buttons_count(self, item: QuestionField) -> int:
        """How many options are buttons: all or none."""
        offers = len(self._offers()) if item.type in ("select", "boolean") else 0
        return offers if offers <= limits.INTERACTION_BUTTONS else 0

    def _buttons(self, language: str) -> tuple[Option, ...]:
        item = self._field
        buttons = []
        if item is None:
            buttons = [Option(ACCEPT, texts.render("interaction.accept", language), "primary")]
        else:
            for number, offer in enumerate(self._offers()[: self._buttons_count(item)], 1):
                label = cut(self._label(offer, language), limits.INTERACTION_LABEL_CHARS)
                buttons.append(Option(self._id(number), label))
            if not item.required:
                buttons.append(Option(SKIP, texts.render("interaction.skip", language)))
        return (*buttons, Option(CANCEL, texts.render("interaction.cancel", language)))

    def _id(self, number: int) -> str:
        """An option's name holds its field's number: a late press on the field before is none on this one."""
        return f"field_{self._number + 1}_{number}"

    # ---- what is answered

    def understand(self, text: str) -> Outcome:
        if text_clean.is_blank(text):
            return self._unclear()
        item = self._field
        if item is None:
            return self._accepting(text)
        offers = self._offers()
        if offers and (found := self._offered(item, text)) is not None:
            return found
        if interaction_words.cancels(text):
            return Decided(Answer(), "cancelled")
        if not item.required and interaction_words.skips(text):
            return self._next()
        match item.type:
            case "select":
                return self._given(text.strip()) if item.custom else self._unclear()
            case "multiselect":
                return self._several(item, text)
            case "boolean":
                truth = interaction_words.truth(text)
                return self._given(truth) if truth is not None else self._unclear()
            case "number":
                value = _number(text)
                return (
                    self._given(value)
                    if value is not None
                    else Unclear("interaction.number_needed", {"what": self.described()})
                )
        return self._given(text.strip())

    def _accepting(self, text: str) -> Outcome:
        counted, typed = interaction_words.number(text), interaction_words.typed(text)
        if counted == 1 or (typed is not None and typed.meaning == "allow_once") or self._is_accept(text):
            return Decided(Answer(ACCEPT), "answered")
        if counted == 2 or interaction_words.cancels(text) or (typed is not None and typed.meaning == "deny"):
            return Decided(Answer(), "cancelled")
        return self._unclear()

    @staticmethod
    def _is_accept(text: str) -> bool:
        return any(interaction_words.same(text, texts.render("interaction.accept", language)) for language in texts.LANGUAGES)

    def _offered(self, item: QuestionField, text: str) -> Outcome | None:
        """The answer that is a number or a label of what is offered; ``None`` for any other text."""
        position = self._position(text)
        if position is not None:
            value = self._offers()[position].value
            return self._given([value] if item.type == "multiselect" else value)
        counted = interaction_words.number(text)
        if counted is None or not (buttons := self._buttons_count(item)):
            return None
        names = [SKIP] * (not item.required) + [CANCEL]
        return self._named(names[counted - buttons - 1]) if buttons < counted <= buttons + len(names) else None

    def _position(self, text: str) -> int | None:
        """Which option a text is, counted from 0: its number, else its label or value where that is one option's alone."""
        offers = self._offers()
        counted = interaction_words.number(text)
        if counted is not None and counted <= len(offers):
            return counted - 1
        exact = [at for at, offer in enumerate(offers) if offer.value == text.strip()]
        if len(exact) == 1:
            return exact[0]
        named = self._known()[1]
        found = {at for form in interaction_words.forms(text) for at in named.get(form, ())}
        return found.pop() if len(found) == 1 else None

    @staticmethod
    def _readings(offer: _Offer) -> set[str]:
        if offer.text_key:
            return {texts.render(offer.text_key, language) for language in texts.LANGUAGES}
        return {offer.label, str(offer.value)}

    def _several(self, item: QuestionField, text: str) -> Outcome:
        offers = self._offers()
        numbers = [interaction_words.number(piece) for piece in re.split(r"[\s,;、，；]+", text.strip()) if piece]
        if numbers and all(each is not None and each <= len(offers) for each in numbers):
            chosen = [offers[each - 1].value for each in numbers if each is not None]
            return self._given(list(dict.fromkeys(chosen)))
        pieces = [piece.strip() for piece in _PIECES.split(text) if piece.strip()]
        positions = [self._position(piece) for piece in pieces]
        if item.custom and not any(each is not None for each in positions):
            return self._given([text.strip()])
        unknown = [piece for piece, each in zip(pieces, positions, strict=True) if each is None]
        if pieces and (item.custom or not unknown):
            values = [piece if each is None else offers[each].value for piece, each in zip(pieces, positions, strict=True)]
            return self._given(list(dict.fromkeys(values)))
        given = words_of_agent(", ".join(unknown), limits.INTERACTION_NAME_CHARS)
        return Unclear("interaction.unknown_option", {"what": self.described(), "given": given})

    def pressed(self, option_id: str, values: Mapping[str, Json]) -> Outcome:
        name = option_id or selected(values)
        item = self._field
        if item is None:
            return Decided(Answer(ACCEPT), "answered") if name == ACCEPT else self._named(name)
        offers = self._offers()
        names = {self._id(number): offer.value for number, offer in enumerate(offers, 1)}
        if name in names:
            return self._given([names[name]] if item.type == "multiselect" else names[name])
        chosen = next(iter(values.values())) if not option_id and len(values) == 1 else None
        if item.type == "multiselect" and isinstance(chosen, list) and chosen and all(each in names for each in chosen):
            return self._given(list(dict.fromkeys(names[each] for each in chosen)))
        return self._named(name)

    def _named(self, name: str) -> Outcome:
        if name == CANCEL:
            return Decided(Answer(), "cancelled")
        if name == SKIP and self._field is not None and not self._field.required:
            return self._next()
        return self._unclear()

    def _given(self, value: Json) -> Outcome:
        assert self._field is not None
        self._values[self._field.name] = value
        return self._next()

    def _next(self) -> Outcome:
        if self._number + 1 < len(self._event.fields):
            self._number += 1
            return Again()
        values = types.MappingProxyType(dict(self._values))
        return Decided(Answer("" if values else ACCEPT, values), "answered")

    def _unclear(self) -> Unclear:
        item = self._field
        if item is not None and item.type not in ("select", "boolean"):
            return Unclear("interaction.still_waiting_text", {"what": self.described()})
        count = 2 if item is None else len(self._offers())
        if item is not None and self._buttons_count(item):
            count += 1 + (not item.required)
        return Unclear("interaction.still_waiting", {"what": self.described(), "count": str(count)})


def _number(text: str) -> int | float | None:
    """The finite number that is the whole of ``text``, whole where it is written whole; a comma is not guessed about."""
    shown = interaction_words.plain(text).rstrip("!")
    if len(shown) > limits.INTERACTION_NUMBER_CHARS or not _DIGITS.fullmatch(shown):
        return None
    if re.fullmatch(r"[+-]?[0-9]+", shown):
        return int(shown)
    value = float(shown)
    return value if math.isfinite(value) else None
