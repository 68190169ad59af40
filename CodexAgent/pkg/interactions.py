"""One open request of an agent, as people see it and as they answer it, without I/O: an approval or a question, step by step.

Guarantees, beside those of :mod:`pkg.approval_steps`:

- a request is decided once;
- title and description hold the choices, too, so that a message is enough to answer where its buttons are gone; together they
  stay within the surface's limit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from pkg import limits
from pkg.agent_api import ApprovalRequested, Json, QuestionAsked
from pkg.approval_steps import ApprovalSteps
from pkg.interaction_parts import Again, Decided, FormSurface, Option, Outcome, Shown, Unclear, known
from pkg.interaction_words import answer_like
from pkg.open_record import Offers
from pkg.question_steps import QuestionSteps
from pkg.text_split import Limit

__all__ = [
    "Again",
    "Decided",
    "FormSurface",
    "OpenRequest",
    "Option",
    "Outcome",
    "Shown",
    "Unclear",
    "answer_like",
    "digest",
]


def digest(event: ApprovalRequested) -> str:
    """The SHA-256 of exactly what would be done, in hexadecimal; empty where that is not known whole.

    It covers kind, command, paths, diffs and directory, and the title where there is no command, path or diff.
    """
    if not known(event):
        return ""
    named = event.title if not (event.command or event.paths or event.diffs) else ""
    diffs = [[diff.path, diff.old_text, diff.new_text] for diff in event.diffs]
    whole = json.dumps([event.kind, event.command, list(event.paths), diffs, event.cwd, named], ensure_ascii=False)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


class OpenRequest:
    """One request on its way to an answer.

    ``machine`` and ``directory`` are as they are to be shown; ``limit`` is what a message of the surface holds, in UTF-16 units
    (``None``: only what the host takes), ``json_limit`` the same in bytes of escaped JSON.
    """

    def __init__(
        self,
        event: ApprovalRequested | QuestionAsked,
        *,
        machine: str,
        directory: str,
        limit: int | None,
        json_limit: int = limits.INTERACTION_JSON_BYTES,
    ) -> None:
        self.event = event
        room = Limit(limit, json_limit)
        self._steps: ApprovalSteps | QuestionSteps = (
            ApprovalSteps(event, machine, directory, room)
            if isinstance(event, ApprovalRequested)
            else QuestionSteps(event, room)
        )
        self._decided = False

    @property
    def answered(self) -> bool:
        """Whether it is decided."""
        return self._decided

    @property
    def offers(self) -> Offers:
        """Which choices of an approval are open now; ``all`` for a question."""
        return self._steps.offers if isinstance(self._steps, ApprovalSteps) else "all"

    def shown(self, language: str, seconds: int, surface: FormSurface | None = None) -> Shown:
        """The current step; ``seconds`` are left until it expires.

        Where ``surface`` holds all that is left of a question, that is one form; :meth:`pressed` then takes what was sent with
        it, and a typed message still answers its first field.
        """
        left = max(1, min(seconds, limits.INTERACTION_SECONDS))
        if isinstance(self._steps, QuestionSteps):
            return self._steps.shown(language, left, surface)
        return self._steps.shown(language, left)

    def understand(self, text: str) -> Outcome:
        """What a typed message means here."""
        return self._once(lambda: self._steps.understand(text))

    def pressed(self, option_id: str, values: Mapping[str, Json]) -> Outcome:
        """What a button means here, or (with an empty ``option_id``) what was selected or sent with a form."""
        return self._once(lambda: self._steps.pressed(option_id, values))

    def described(self) -> str:
        """What is asked, in one short line."""
        return self._steps.described()

    def _once(self, understand: Callable[[], Outcome]) -> Outcome:
        if self._decided:
            return Unclear("interaction.already_answered", {"what": self.described()})
        outcome = understand()
        self._decided = isinstance(outcome, Decided)
        return outcome
