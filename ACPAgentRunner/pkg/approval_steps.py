"""An approval as people see and answer it: what would be done, the choices, and the step in which a reason is written.

Guarantees:

- an allowing choice is offered only where the whole action stands in the text of every language within the surface's limit;
  nothing of an action is cut, and what is invisible in it is made visible (:mod:`pkg.action_text`);
- which number means what is the same in every language and does not change while the request is open;
- an answer allows only by a choice of the agent of the kind ``allow_once``, never for good, and only where the number, the
  label or the word for it was the whole message;
- what an agent says about its action (its reason, its own name for it) is marked as the agent's words and stands on one line.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pkg import action_text, interaction_words, limits, text_clean, texts
from pkg.agent_api import Answer, ApprovalRequested, Choice, Json
from pkg.interaction_parts import (
    ALLOW_ONCE,
    ALLOW_SESSION,
    CANCEL,
    DENY,
    DENY_WHY,
    Again,
    Decided,
    Option,
    Outcome,
    Shown,
    Style,
    Unclear,
    composed,
    cut,
    fits,
    known,
    selected,
    words_of_agent,
)
from pkg.open_record import Offers
from pkg.text_split import Limit

_TITLES: Final = types.MappingProxyType(
    {
        "edit": "interaction.ask_edit",
        "delete": "interaction.ask_delete",
        "move": "interaction.ask_move",
        "read": "interaction.ask_read",
        "search": "interaction.ask_read",
        "execute": "interaction.ask_command",
        "fetch": "interaction.ask_fetch",
        "mode": "interaction.ask_plan",
    }
)
_LABELS_OF: Final = types.MappingProxyType(
    {
        ALLOW_ONCE: ("interaction.allow_once", "interaction.allow_once_does"),
        DENY: ("interaction.deny", "interaction.deny_does"),
        DENY_WHY: ("interaction.deny_why", "interaction.deny_why_does"),
    }
)


@dataclass(frozen=True, slots=True)
class _Extent:
    """How much beside the action is shown."""

    reason: int
    named: bool
    sentences: bool = True


_EXTENTS: Final = (
    _Extent(limits.INTERACTION_REASON_CHARS, True),
    _Extent(limits.INTERACTION_REASON_SHORT_CHARS, True),
    _Extent(limits.INTERACTION_REASON_SHORT_CHARS, False),
    _Extent(0, False),
)
_LEAST: Final = _Extent(0, False, sentences=False)


class ApprovalSteps:
    """The four choices, and the step in which the reason of a denial is written."""

    def __init__(self, event: ApprovalRequested, machine: str, directory: str, room: Limit) -> None:
        self._event = event
        self._room = room
        self._machine = " ".join(action_text.visible(machine, lines=False).split())
        self._directory = action_text.visible(event.cwd or directory, lines=False)
        self._writing = False
        unique = {name for name, count in Counter(choice.choice_id for choice in event.choices).items() if count == 1}
        granting = [each for each in event.choices if each.kind == "allow_once" and each.choice_id in unique and each.choice_id]
        refusing = [
            each for each in event.choices if each.kind == "reject_once" and each.choice_id in unique and each.choice_id
        ]
        self._grant: Choice | None = granting[0] if granting else None
        self._refusal = refusing[0].choice_id if refusing else ""
        self._extras = (*granting[1:], *refusing[1:])
        self._body = self._whole() if self._grant is not None and known(event) else None
        self._options: tuple[str, ...] = ()
        if self._body is not None:
            session = () if event.kind == "mode" else (ALLOW_SESSION,)
            extras = tuple(f"extra_{number}" for number in range(1, len(self._extras) + 1))
            room_left = limits.INTERACTION_BUTTONS - 4
            self._options = (ALLOW_ONCE, *session, DENY, DENY_WHY, *extras[:room_left])
            if not all(self._composed(language, limits.INTERACTION_SECONDS, _EXTENTS[-1])[1] for language in texts.LANGUAGES):
                self._body = None
        if self._body is None:
            self._options = (DENY, DENY_WHY)

    @property
    def offers(self) -> Offers:
        """Which choices are open now."""
        if self._writing:
            return "reason"
        return "denial" if self._body is None else "all" if ALLOW_SESSION in self._options else "once"

    # ---- what is shown

    def described(self) -> str:
        event = self._event
        named = event.command or ", ".join(event.paths or tuple(diff.path for diff in event.diffs)) or event.title or event.kind
        return words_of_agent(named, limits.INTERACTION_NAME_CHARS)

    def _whole(self) -> tuple[tuple[str, str], ...] | None:
        """The action in code blocks with the text that names each, whole; ``None`` where it is larger than any message."""
        event, most = self._event, limits.INTERACTION_DESCRIPTION_CHARS
        parts: list[tuple[str, str | None]] = []
        if event.command:
            if len(event.command) > most:
                return None
            parts.append(("", action_text.fenced(action_text.visible(event.command))))
        in_diffs = {diff.path for diff in event.diffs}
        paths = [path for path in event.paths if path not in in_diffs]
        if paths:
            if sum(map(len, paths)) > most:
                return None
            listed = "\n".join(action_text.visible(path, lines=False) for path in paths)
            parts.append(("interaction.files", action_text.fenced(listed)))
        if event.diffs:
            changed = action_text.changes(event.diffs, most)
            key = "interaction.changes" if parts else ""
            parts.append((key, None if changed is None else action_text.fenced(changed, "diff")))
        if not parts:
            if len(event.title) > most or not event.title.strip():
                return None
            parts.append(("", action_text.fenced(action_text.visible(event.title))))
        whole = tuple((key, block) for key, block in parts if block is not None)
        return whole if len(whole) == len(parts) else None

    def shown(self, language: str, seconds: int) -> Shown:
        if self._writing:
            return self._reason_step(language, seconds)
        extents = _EXTENTS if self._body is not None else (*_EXTENTS, _LEAST)
        for extent in extents:
            shown, whole = self._composed(language, seconds, extent)
            if whole:
                break
        return shown

    def _composed(self, language: str, seconds: int, extent: _Extent) -> tuple[Shown, bool]:
        event = self._event
        title = texts.render(self._title_key(), language)
        blocks: list[str] = []
        directory = self._directory if self._body is not None else cut(self._directory, limits.INTERACTION_NAME_CHARS)
        where = {"machine": self._machine, "directory": action_text.code_span(directory) if directory else ""}
        if self._machine and directory:
            blocks.append(texts.render("interaction.where", language, where))
        elif self._machine:
            blocks.append(texts.render("interaction.where_machine", language, where))
        elif directory:
            blocks.append(texts.render("interaction.where_directory", language, where))
        if self._body is not None:
            blocks += [f"{texts.render(key, language)}\n{block}" if key else block for key, block in self._body]
        said: list[str] = []
        named = bool(event.command or event.paths or event.diffs) or self._body is None
        if event.title.strip() and named and extent.named:
            given = words_of_agent(event.title, limits.INTERACTION_REASON_SHORT_CHARS)
            said.append(texts.render("interaction.named", language, {"title": given}))
        if event.reason.strip() and extent.reason:
            given = words_of_agent(event.reason, extent.reason)
            said.append(texts.render("interaction.reason", language, {"reason": given}))
        if said:
            blocks.append("\n".join(said))
        if self._body is None:
            key = "interaction.no_single_grant" if self._grant is None and known(event) else "interaction.not_whole"
            blocks.append(texts.render(key, language, {"machine": cut(self._machine, limits.INTERACTION_NAME_CHARS) or "–"}))
        options = tuple(self._option(name, language) for name in self._options)
        lines = [
            f"{number}. {option.label}" + (f": {self._does(name, number, language)}" if extent.sentences else "")
            for number, (name, option) in enumerate(zip(self._options, options, strict=True), 1)
        ]
        blocks.append("\n".join(lines))
        shown = composed(title, blocks, options, language, seconds)
        return shown, fits(shown, self._room)

    def _title_key(self) -> str:
        if self._event.command and self._event.kind in ("read", "search", "edit", "delete", "move", "think"):
            return "interaction.ask_command"
        return _TITLES.get(self._event.kind, "interaction.ask_other")

    def _option(self, name: str, language: str) -> Option:
        if extra := self._extra(name):
            allows = extra.kind == "allow_once"
            key = "interaction.extra_allow" if allows else "interaction.extra_deny"
            label = texts.render(key, language, {"label": words_of_agent(extra.label, limits.INTERACTION_LABEL_CHARS)})
            return Option(name, cut(label, limits.INTERACTION_LABEL_CHARS), "default" if allows else "danger")
        key = "interaction.allow_session" if name == ALLOW_SESSION else _LABELS_OF[name][0]
        style: Style = "primary" if name == ALLOW_ONCE else "danger" if name == DENY else "default"
        return Option(name, texts.render(key, language), style)

    def _does(self, name: str, number: int, language: str) -> str:
        if extra := self._extra(name):
            allows = extra.kind == "allow_once"
            return texts.render("interaction.extra_allow_does" if allows else "interaction.extra_deny_does", language)
        if name == ALLOW_SESSION:
            event = self._event
            key = "interaction.allow_session_same"
            if event.command and event.kind == "execute":
                key = "interaction.allow_session_command"
            elif not event.command and (event.paths or event.diffs):
                key = "interaction.allow_session_files"
            return texts.render(key, language)
        return texts.render(_LABELS_OF[name][1], language, {"number": number})

    def _extra(self, name: str) -> Choice | None:
        return self._extras[int(name.removeprefix("extra_")) - 1] if name.startswith("extra_") else None

    def _reason_step(self, language: str, seconds: int) -> Shown:
        title = texts.render("interaction.ask_reason", language)
        params = {"what": self.described(), "word": texts.render("interaction.cancel_word", language)}
        label = texts.render("interaction.deny_plain", language)
        blocks = [texts.render("interaction.ask_reason_of", language, params), f"{params['word']}: {label}"]
        return composed(title, blocks, (Option(CANCEL, label, "danger"),), language, seconds, reply="")

    # ---- what is answered

    def understand(self, text: str) -> Outcome:
        if self._writing:
            if text_clean.is_blank(text):
                return self._unclear()
            if (
                interaction_words.cancels(text)
                or interaction_words.skips(text)
                or self._is_label("interaction.deny_plain", text)
            ):
                return self._denied()
            return self._denied(text.strip())
        if (counted := interaction_words.number(text)) is not None:
            return self._chosen(self._options[counted - 1]) if counted <= len(self._options) else self._unclear()
        if (led := interaction_words.numbered(text)) is not None and led.number <= len(self._options):
            return self._led(self._options[led.number - 1], led)
        if (typed := interaction_words.typed(text)) is not None:
            if typed.reason:
                return self._denied(typed.reason)
            return self._chosen(typed.meaning) if typed.meaning in self._options else self._unclear()
        for name in self._options:
            if (extra := self._extra(name)) and any(
                interaction_words.same(text, label) for label in self._labels_of(name, extra)
            ):
                return self._chosen(name)
        return self._unclear()

    def _led(self, name: str, led: interaction_words.Numbered) -> Outcome:
        """A number with something behind it: a reason, where the number denies; or the label that stands there."""
        if name == DENY_WHY:
            return self._denied(interaction_words.because(led.rest) or led.rest)
        if name == DENY and (led.marked or interaction_words.because(led.rest)):
            return self._denied(interaction_words.because(led.rest) or led.rest)
        typed = interaction_words.typed(led.rest)
        return self._chosen(name) if typed is not None and typed.meaning == name and not typed.reason else self._unclear()

    def _labels_of(self, name: str, extra: Choice) -> set[str]:
        # Which word allows is not for the agent to say.
        own = {extra.label} if extra.kind == "reject_once" else set()
        return {*own, *(self._option(name, language).label for language in texts.LANGUAGES)}

    @staticmethod
    def _is_label(key: str, text: str) -> bool:
        return any(interaction_words.same(text, texts.render(key, language)) for language in texts.LANGUAGES)

    def pressed(self, option_id: str, values: Mapping[str, Json]) -> Outcome:
        name = option_id or selected(values)
        if self._writing:
            return self._denied() if name == CANCEL else self._unclear()
        return self._chosen(name) if name in self._options else self._unclear()

    def _chosen(self, name: str) -> Outcome:
        if extra := self._extra(name):
            return Decided(Answer(extra.choice_id), "allow_once" if extra.kind == "allow_once" else "deny")
        if name == DENY_WHY:
            self._writing = True
            return Again()
        if name == DENY or self._grant is None:
            return self._denied()
        return Decided(Answer(self._grant.choice_id), "allow_session" if name == ALLOW_SESSION else "allow_once")

    def _denied(self, reason: str = "") -> Decided:
        return Decided(Answer(self._refusal, message=reason), "deny")

    def _unclear(self) -> Unclear:
        if self._writing:
            return Unclear("interaction.still_waiting_text", {"what": self.described()})
        return Unclear("interaction.still_waiting", {"what": self.described(), "count": str(len(self._options))})
