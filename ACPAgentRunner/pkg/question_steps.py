"""A question as people see and answer it: its fields one after the other, each a number, a word or a text.

Where the surface renders what is left of it as one form, that is shown and takes all values at once; typed answers still count,
one after the other. A question is no action, so that its text may be cut where a surface holds little; which number means which
option stays. What goes to the agent is the option's value, a number, a switch, a list of values or the text as it was typed.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from pkg import interaction_words, limits, text_clean, texts
from pkg.agent_api import Answer, Json, QuestionAsked
from pkg.interaction_parts import (
    ACCEPT,
    CANCEL,
    SKIP,
    Again,
    Decided,
    FormSurface,
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
from pkg.question_fields import Given, OpenField, said
from pkg.question_form import Form, form_ids, form_of
from pkg.text_split import Limit


class QuestionSteps:
    """The fields of a question, one after the other."""

    def __init__(self, event: QuestionAsked, room: Limit) -> None:
        self._event = event
        self._room = room
        self._number = 0
        self._values: dict[str, Json] = {}
        self._message = self._own_words()
        self._fields = tuple(OpenField(item) for item in event.fields)
        self._form: Form | None = None
        """What was shown last, if that was a form."""
        self._sound: Mapping[str, Json] = {}
        """What was good in a form that did not count."""

    def _own_words(self) -> str:
        """The message without the lines that its fields say again."""
        again = {
            line.strip() for item in self._event.fields for line in (*item.label.splitlines(), *item.description.splitlines())
        }
        return "\n".join(line for line in said(self._event.message).splitlines() if line.strip() not in again).strip()

    @property
    def _field(self) -> OpenField | None:
        return self._fields[self._number] if self._number < len(self._fields) else None

    # ---- what is shown

    def described(self) -> str:
        return self._described(self._field)

    def _described(self, field: OpenField | None) -> str:
        item = None if field is None else field.item
        text = item.label if item is not None and len(self._fields) > 1 else self._event.message
        return words_of_agent(text or (item.label or item.name if item is not None else ""), limits.INTERACTION_NAME_CHARS)

    def shown(self, language: str, seconds: int, surface: FormSurface | None = None) -> Shown:
        step = self._step(language, seconds)
        self._form = form = None if surface is None else self._form_for(surface)
        shown = None if form is None else self._as_form(form, step, language, seconds)
        if shown is None:
            self._form = None
        return shown or step

    def _step(self, language: str, seconds: int) -> Shown:
        for question_chars in limits.INTERACTION_QUESTION_CHARS:
            for option_chars in limits.INTERACTION_OPTION_CHARS:
                shown = self._composed(language, seconds, question_chars, option_chars, None)
                if fits(shown, self._room):
                    return shown
        # As many options as fit; fewer of them are never longer.
        least, most = 0, len(self._field.offers) if self._field is not None else 0
        while least < most:
            listed = (least + most + 1) // 2
            if fits(self._composed(language, seconds, question_chars, option_chars, listed), self._room):
                least = listed
            else:
                most = listed - 1
        return self._composed(language, seconds, question_chars, option_chars, least)

    def _composed(self, language: str, seconds: int, question_chars: int, option_chars: int, listed: int | None) -> Shown:
        count = len(self._fields)
        key = "interaction.ask_question" if count <= 1 else "interaction.ask_question_of"
        title = texts.render(key, language, {"number": self._number + 1, "count": count})
        asked = cut("\n\n".join(filter(None, (self._message, *self._told()))), question_chars)
        how, _ = self._how()
        blocks = [asked, self._unasked(language), *self._answers(language, option_chars, listed)]
        return composed(title, blocks, self._buttons(language), language, seconds, reply=how, kind="choice")

    def _answers(self, language: str, option_chars: int, listed: int | None) -> list[str]:
        """How this step can be answered, as paragraphs."""
        field, options = self._field, self._buttons(language)
        words: list[str] = []
        if field is None or field.buttons:
            numbered = [option.label for option in options]
        else:
            numbered = [offer.shown(language) for offer in field.offers]
            words = [f"{texts.render(f'interaction.{option.option_id}_word', language)}: {option.label}" for option in options]
        lines = [f"{number}. {cut(label, option_chars)}" for number, label in enumerate(numbered, 1)]
        if listed is not None and listed < len(lines):
            lines = [*lines[:listed], "…"]
        also = [texts.render("interaction.reply_custom", language)] if self._how()[1] else []
        if field is not None and field.item.options_left_out:
            also.insert(0, texts.render("interaction.options_left_out", language, {"count": field.item.options_left_out}))
        return ["\n".join(lines), self._default(language), "\n".join((*also, *words))]

    def _unasked(self, language: str) -> str:
        """What people are told of fields that they are not asked for."""
        count = self._event.fields_left_out
        return texts.render("interaction.fields_left_out", language, {"count": count}) if count else ""

    def _told(self) -> list[str]:
        """What the agent asks at this step, beside its message, nothing twice."""
        item = self._field.item if self._field is not None else None
        described = said(item.description) if item is not None else ""
        label = said(item.label or item.name) if item is not None else ""
        if label in (line.strip() for line in (self._message + "\n" + described).splitlines()):
            label = ""
        return list(filter(None, (label, described)))

    def _default(self, language: str) -> str:
        field = self._field
        item = None if field is None else field.item
        if field is None or item is None or item.default is None or item.default == "" or item.required:
            return ""
        given = item.default if isinstance(item.default, list) else [item.default]
        labels = [next((offer for offer in field.offers if offer.value == each), None) for each in given]
        shown = ", ".join(
            str(each) if offer is None else offer.shown(language) for each, offer in zip(given, labels, strict=True)
        )
        return texts.render(
            "interaction.default", language, {"value": words_of_agent(shown, limits.INTERACTION_REASON_SHORT_CHARS)}
        )

    def _how(self) -> tuple[str, bool]:
        """The text that says how to answer this step, and whether any other words are an answer, too."""
        field = self._field
        if field is None or field.buttons:
            return "interaction.reply_number", field is not None and field.item.custom
        keys = {
            "select": "interaction.reply_number_only",
            "multiselect": "interaction.reply_several",
            "number": "interaction.reply_figure",
        }
        kind = field.item.type
        return keys.get(kind, "interaction.reply_text"), field.item.custom and kind in ("select", "multiselect")

    def _buttons(self, language: str) -> tuple[Option, ...]:
        field = self._field
        buttons = []
        if field is None:
            buttons = [Option(ACCEPT, texts.render("interaction.accept", language), "primary")]
        else:
            for number, offer in enumerate(field.offers[: field.buttons], 1):
                label = cut(offer.shown(language), limits.INTERACTION_LABEL_CHARS)
                buttons.append(Option(self._id(number), label))
            if not field.item.required:
                buttons.append(Option(SKIP, texts.render("interaction.skip", language)))
        return (*buttons, Option(CANCEL, texts.render("interaction.cancel", language)))

    def _id(self, number: int) -> str:
        """An option's name holds its field's number: a late press on the field before is none on this one."""
        return f"field_{self._number + 1}_{number}"

    # ---- what is left as one form

    def _form_for(self, surface: FormSurface) -> Form | None:
        """The form of what is left; one choice alone is asked with buttons and numbers."""
        left = self._fields[self._number :]
        if not left or (len(left) == 1 and left[0].item.type in ("select", "boolean")):
            return None
        return form_of(tuple(zip(form_ids(self._fields), self._fields, strict=True))[self._number :], surface)

    def _as_form(self, form: Form, step: Shown, language: str, seconds: int) -> Shown | None:
        """The form, with the step that it begins with for whoever writes instead; ``None`` where that does not fit."""
        fields = form.fields(language, self._sound)
        if fields is None:
            return None
        one = self._number + 1 == len(self._fields)
        title = texts.render("interaction.ask_question", language)
        begins = "" if one else step.title
        how = self._how()[0]
        reply = "interaction.reply_number_only" if how == "interaction.reply_number" else how
        details = "\n\n".join(filter(None, map(self._detail, self._fields[self._number + 1 :])))
        for question_chars in limits.INTERACTION_QUESTION_CHARS:
            for option_chars in limits.INTERACTION_OPTION_CHARS:
                blocks = [
                    cut(self._message, question_chars),
                    cut(details, question_chars),
                    self._unasked(language),
                    texts.render("interaction.reply_form", language),
                    begins,
                    cut("\n\n".join(self._told()), question_chars),
                    *self._answers(language, option_chars, None),
                ]
                described = composed(title, blocks, (), language, seconds, reply=reply).description
                shown = Shown(title, described, (), step.text, "form", fields)
                labels = "\n".join(item.label for item in fields)
                if fits(shown, self._room) and self._room.admits(f"{title}\n\n{shown.description}\n\n{labels}"):
                    return shown
        return None

    @staticmethod
    def _detail(field: OpenField) -> str:
        """What a field of a form cannot hold itself."""
        label, described = said(field.item.label or field.item.name), said(field.item.description)
        if described and label in (line.strip() for line in described.splitlines()):
            return described
        return f"{label}\n{described}" if described or len(label) > limits.INTERACTION_FIELD_CHARS else ""

    def _sent(self, form: Form, values: Mapping[str, Json]) -> Outcome:
        sent = form.sent(values, self._described)
        self._sound = sent.sound
        if sent.wrong is not None:
            return sent.wrong
        self._values.update(sent.values)
        self._number = len(self._fields)
        return self._answered()

    # ---- what is answered

    def understand(self, text: str) -> Outcome:
        if text_clean.is_blank(text):
            return self._unclear()
        field = self._field
        if field is None:
            return self._accepting(text)
        if (found := self._offered(field, text)) is not None:
            return found
        if interaction_words.cancels(text):
            return Decided(Answer(), "cancelled")
        if not field.item.required and interaction_words.skips(text):
            return self._next()
        match field.spoken(text, self.described()):
            case Given(value):
                return self._given(value)
            case Unclear() as unclear:
                return unclear
        return self._unclear()

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

    def _offered(self, field: OpenField, text: str) -> Outcome | None:
        """The answer that is a number or a label of what is offered; ``None`` for any other text."""
        if not field.offers:
            return None
        position = field.position(text)
        if position is not None:
            return self._given(field.chosen(position))
        counted = interaction_words.number(text)
        if counted is None or not (buttons := field.buttons):
            return None
        names = [SKIP] * (not field.item.required) + [CANCEL]
        return self._named(names[counted - buttons - 1]) if buttons < counted <= buttons + len(names) else None

    def pressed(self, option_id: str, values: Mapping[str, Json]) -> Outcome:
        if self._form is not None:
            return self._sent(self._form, values) if option_id in ("", ACCEPT) else self._named(option_id)
        name = option_id or selected(values)
        field = self._field
        if field is None:
            return Decided(Answer(ACCEPT), "answered") if name == ACCEPT else self._named(name)
        names = {self._id(number): offer.value for number, offer in enumerate(field.offers, 1)}
        if name in names:
            return self._given([names[name]] if field.item.type == "multiselect" else names[name])
        chosen = next(iter(values.values())) if not option_id and len(values) == 1 else None
        if field.item.type == "multiselect" and isinstance(chosen, list) and chosen and all(each in names for each in chosen):
            return self._given(list(dict.fromkeys(names[each] for each in chosen)))
        return self._named(name)

    def _named(self, name: str) -> Outcome:
        if name == CANCEL:
            return Decided(Answer(), "cancelled")
        if name == SKIP and self._field is not None and not self._field.item.required:
            return self._next()
        return self._unclear()

    def _given(self, value: Json) -> Outcome:
        assert self._field is not None
        self._values[self._field.item.name] = value
        return self._next()

    def _next(self) -> Outcome:
        self._form = None
        if self._number + 1 < len(self._fields):
            self._number += 1
            return Again()
        return self._answered()

    def _answered(self) -> Outcome:
        values = types.MappingProxyType(dict(self._values))
        return Decided(Answer("" if values else ACCEPT, values), "answered")

    def _unclear(self) -> Unclear:
        field = self._field
        if field is not None and field.item.type not in ("select", "boolean"):
            return Unclear("interaction.still_waiting_text", {"what": self.described()})
        count = 2 if field is None else len(field.offers)
        if field is not None and field.buttons:
            count += 1 + (not field.item.required)
        return Unclear("interaction.still_waiting", {"what": self.described(), "count": str(count)})
