"""What is left of a question as one form, and the values that a sent form comes to.

Guarantees: a form is made only where the surface renders every field of it, with a text beside each choice that also takes own
words, and within what the host takes; either every value of a sent form counts or none does.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pkg import limits, text_clean, texts
from pkg.agent_api import Json
from pkg.interaction_parts import FieldType, FormField, FormSurface, Unclear, cut, words_of_agent
from pkg.question_fields import Given, OpenField, no_answer, own_names, said_on_one_line

_RENDERED: Final[Mapping[str, tuple[FieldType, ...]]] = {
    "number": ("number", "text", "textarea"),
    "boolean": ("boolean", "select"),
    "select": ("select",),
    "multiselect": ("multiselect",),
}
"""As what a field can be rendered, the best first."""
_TEXT: Final[tuple[FieldType, ...]] = ("text", "textarea")
_OWN: Final = "_own"
"""Ends the id of the text beside a choice."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One field of the question in the form; ``own`` is the type of the text beside it, if there is one."""

    name: str
    field: OpenField
    type: FieldType
    own: FieldType | None


@dataclass(frozen=True, slots=True)
class Sent:
    """What a sent form comes to: the values by the fields' own names, or what is ``wrong`` with it.

    ``sound`` are the form's values that are good, so that nobody has to write them again.
    """

    values: Mapping[str, Json]
    wrong: Unclear | None
    sound: Mapping[str, Json]


def form_ids(fields: Sequence[OpenField]) -> tuple[str, ...]:
    """What each field is called in a form: as the agent calls it, where that can be."""
    names = own_names([field.item.name for field in fields], limits.INTERACTION_FIELD_ID_CHARS - len(_OWN))
    if any(f"{name}{_OWN}" in names for name in names):
        return tuple(str(number) for number in range(1, len(names) + 1))
    return names


def form_of(fields: Sequence[tuple[str, OpenField]], surface: FormSurface) -> Form | None:
    """The fields, with their ids, as one form; ``None`` where the surface renders none that holds them all."""
    parts: list[_Part] = []
    for name, field in fields:
        item = field.item
        rendered = next((each for each in _RENDERED.get(item.type, _TEXT) if each in surface.field_types), None)
        chosen = item.type in ("select", "multiselect")
        own = next((each for each in _TEXT if each in surface.field_types), None) if chosen and item.custom else None
        if rendered is None or (chosen and item.custom and own is None):
            return None
        if chosen and not 0 < len(field.offers) <= limits.INTERACTION_FORM_OPTIONS:
            return None
        parts.append(_Part(name, field, rendered, own))
    most = limits.INTERACTION_FORM_FIELDS
    if surface.max_fields is not None:
        most = min(most, surface.max_fields)
    return Form(tuple(parts)) if 0 < sum(1 + (part.own is not None) for part in parts) <= most else None


class Form:
    """The fields of a question that are left, side by side."""

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        """Made by :func:`form_of`."""
        self._parts = parts

    def fields(self, language: str, sound: Mapping[str, Json]) -> tuple[FormField, ...] | None:
        """The form's fields, filled in with ``sound`` or the defaults; ``None`` where they are more than the host takes."""
        fields: list[FormField] = []
        for part in self._parts:
            item = part.field.item
            label = cut(said_on_one_line(item.label) or said_on_one_line(item.name) or "…", limits.INTERACTION_FIELD_CHARS)
            options: tuple[tuple[str, str], ...] = ()
            if part.type in ("select", "multiselect"):
                labels = [cut(each.shown(language), limits.INTERACTION_FIELD_CHARS) for each in part.field.offers]
                options = tuple((key, label or key) for key, label in zip(part.field.keys, labels, strict=True))
            required = item.required and part.own is None
            default = sound.get(part.name, self._default(part))
            fields.append(FormField(part.name, label, part.type, required, options, default))
            if part.own is not None:
                title = texts.render("interaction.own_words", language, {"label": label})
                title = cut(title, limits.INTERACTION_FIELD_CHARS)
                fields.append(FormField(part.name + _OWN, title, part.own, default=sound.get(part.name + _OWN)))
        whole = json.dumps([[each.field_id, each.label, each.options, each.default] for each in fields])
        return tuple(fields) if len(whole) <= limits.INTERACTION_FORM_BYTES else None

    @staticmethod
    def _default(part: _Part) -> Json:
        """What the agent takes where nothing is said, as the form has it."""
        field, default = part.field, part.field.item.default
        keys = {json.dumps(offer.value): key for offer, key in zip(field.offers, field.keys, strict=True)}
        match part.type:
            case "boolean":
                return default if isinstance(default, bool) else None
            case "select":
                return keys.get(json.dumps(default))
            case "multiselect":
                given = default if isinstance(default, list) else []
                return [keys[written] for each in given if (written := json.dumps(each)) in keys] or None
            case "number":
                return default if isinstance(default, int | float) and not isinstance(default, bool) else None
        return str(default) if isinstance(default, str | int | float) and not isinstance(default, bool) else None

    def sent(self, values: Mapping[str, Json], described: Callable[[OpenField], str]) -> Sent:
        """What a sent form comes to; ``described`` is how a field is told of."""
        found: dict[str, Json] = {}
        sound: dict[str, Json] = {}
        missing: list[str] = []
        wrong: list[Unclear] = []
        left = dict(values)
        for part in self._parts:
            what, given = described(part.field), left.pop(part.name, None)
            own = left.pop(part.name + _OWN, None) if part.own is not None else None
            outcome, said = part.field.sent(given, what), _own(own, what)
            for name, value, each in ((part.name, given, outcome), (part.name + _OWN, own, said)):
                if isinstance(each, Unclear):
                    wrong.append(each)
                elif each is not None:
                    sound[name] = value
            if isinstance(outcome, Unclear) or isinstance(said, Unclear):
                continue
            if said is not None and part.field.item.type == "multiselect":
                chosen = outcome.value if outcome is not None else []
                found[part.field.item.name] = [*chosen, *([] if said.value in chosen else [said.value])]
            elif (taken := said or outcome) is not None:
                found[part.field.item.name] = taken.value
            elif part.field.item.required:
                missing.append(what)
        if left:
            given = words_of_agent(", ".join(left), limits.INTERACTION_NAME_CHARS)
            wrong.insert(0, Unclear("interaction.form_no_field", {"given": given}))
        if missing:
            what = words_of_agent(", ".join(missing), limits.INTERACTION_REASON_SHORT_CHARS)
            wrong.append(Unclear("interaction.form_missing", {"what": what}))
        return Sent(types.MappingProxyType(found), wrong[0] if wrong else None, types.MappingProxyType(sound))


def _own(value: Json, what: str) -> Given | Unclear | None:
    """Own words beside a choice."""
    if value is None:
        return None
    if not isinstance(value, str):
        return no_answer(value, what)
    return None if text_clean.is_blank(value) else Given(value.strip())
