"""What the steps of an open request are made of: how one is shown, and what an answer to it comes to."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pkg import action_text, limits, texts
from pkg.agent_api import Answer, ApprovalRequested, Json
from pkg.text_split import Limit

if typing.TYPE_CHECKING:
    from langbot_plugin.api.entities.builtin.runner.interaction import InteractionRequest

ALLOW_ONCE: Final = "allow_once"
ALLOW_SESSION: Final = "allow_session"
DENY: Final = "deny"
DENY_WHY: Final = "deny_why"
SKIP: Final = "skip"
CANCEL: Final = "cancel"
ACCEPT: Final = "accept"
"""The choice of an answer to a question that asks for nothing but consent, or whose fields were all left out."""

Decision = Literal["allow_once", "allow_session", "deny", "answered", "cancelled"]
Style = Literal["default", "primary", "danger"]
FieldType = Literal["text", "textarea", "select", "multiselect", "number", "boolean"]


@dataclass(frozen=True, slots=True)
class Decided:
    """The request is answered; the reason of a denial is ``answer.message``."""

    answer: Answer
    decision: Decision


@dataclass(frozen=True, slots=True)
class Again:
    """The next step is to be shown: the next field of a question, or the reason of a denial."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """Not an answer; the text to tell."""

    text_key: str
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))


Outcome = Decided | Again | Unclear


@dataclass(frozen=True, slots=True)
class Option:
    """One button, and in this order one number."""

    option_id: str
    label: str
    style: Style = "default"


@dataclass(frozen=True, slots=True)
class FormSurface:
    """What the forms of a surface can hold, as the host says it; ``max_fields`` is ``None`` where it says no number."""

    field_types: frozenset[str]
    max_fields: int | None = None


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of a form; ``options`` are pairs of the value that comes back and the label."""

    field_id: str
    label: str
    type: FieldType
    required: bool = False
    options: tuple[tuple[str, str], ...] = ()
    default: Json = None


@dataclass(frozen=True, slots=True)
class Shown:
    """One step as it is shown; ``text`` is the whole of it as one message, for surfaces without buttons.

    A form has ``fields`` and no options: no adapter of LangBot 4.11.2 renders actions beside fields, each that renders fields
    has a button of its own to send them. ``text`` holds the first of its fields only, as the rest is asked after it.
    """

    title: str
    description: str
    options: tuple[Option, ...]
    text: str
    kind: Literal["confirmation", "choice", "form"] = "confirmation"
    fields: tuple[FormField, ...] = ()

    @property
    def rich(self) -> bool:
        """Whether there is anything to press or to fill in."""
        return bool(self.options or self.fields)

    def request(self, interaction_id: str, expires_at: int) -> InteractionRequest:
        """The step as the host takes it: actions only, or fields only. ``expires_at`` is in seconds since the epoch."""
        from langbot_plugin.api.entities.builtin.runner import interaction

        return interaction.InteractionRequest(
            interaction_id=interaction_id,
            kind=self.kind,
            title=self.title,
            description=self.description,
            fields=[
                interaction.InteractionField(
                    id=item.field_id,
                    label=item.label,
                    type=item.type,
                    required=item.required,
                    options=[interaction.InteractionOption(value=value, label=label) for value, label in item.options],
                    default=item.default,
                )
                for item in self.fields
            ],
            actions=[
                interaction.InteractionAction(id=option.option_id, label=option.label, style=option.style)
                for option in self.options
            ],
            expires_at=expires_at,
            fallback_text=self.text,
        )


def known(event: ApprovalRequested) -> bool:
    """Whether what would be done is known whole."""
    return event.complete and not any(diff.truncated for diff in event.diffs)


def composed(
    title: str,
    blocks: Sequence[str],
    options: tuple[Option, ...],
    language: str,
    seconds: int,
    *,
    reply: str = "interaction.reply_number",
    kind: Literal["confirmation", "choice"] = "confirmation",
) -> Shown:
    """A step of these paragraphs; how to answer and the time left stand below. Without buttons nobody is told to press one."""

    def whole(key: str) -> str:
        last = (texts.render(key, language) if key else "", _time_left(language, seconds))
        return "\n\n".join((*filter(None, blocks), " ".join(filter(None, last))))

    plain = whole("interaction.reply_number_only" if reply == "interaction.reply_number" else reply)
    return Shown(title, whole(reply), options, f"{title}\n\n{plain}", kind)


def _time_left(language: str, seconds: int) -> str:
    if seconds < limits.INTERACTION_SOON:
        return texts.render("interaction.expires_soon", language, {"seconds": seconds})
    return texts.render("interaction.expires", language, {"minutes": math.ceil(seconds / 60)})


def fits(shown: Shown, room: Limit) -> bool:
    """Whether a step can be shown as one message, with buttons or without, and as a request of the host."""
    return (
        len(shown.title) <= limits.INTERACTION_TITLE_CHARS
        and len(shown.description) <= limits.INTERACTION_DESCRIPTION_CHARS
        and len(shown.text) <= limits.INTERACTION_TEXT_CHARS
        and room.admits(f"{shown.title}\n\n{shown.description}")
        and room.admits(shown.text)
    )


def cut(text: str, most: int) -> str:
    """``text``, at most ``most`` characters long, with ``…`` where it was cut."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def words_of_agent(text: str, most: int) -> str:
    """Words of the agent on one line that begins with ours, so that they cannot pose as more than that."""
    head = text[: most * 4]
    line = action_text.visible(" ".join(head.split()), lines=False).replace("`", "'")
    return cut(line + ("…" if len(head) < len(text) else ""), most)


def selected(values: Mapping[str, Json]) -> str:
    """The name of the one option that a form's values select, else nothing."""
    chosen = next(iter(values.values())) if len(values) == 1 else None
    return chosen if isinstance(chosen, str) else ""
