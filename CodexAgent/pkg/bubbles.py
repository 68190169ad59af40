"""The messages a person sees being written, as a state machine without I/O: what to show next, and when.

A *bubble* is one chat message: any number of :class:`Show` (its text so far, with a progress line) and one
:class:`Complete` (its whole text). Time is passed in. Guarantees, whatever the pieces and their timing:

- the bodies of all completed bubbles, joined, are the text that was appended, in order, once; nothing but notices and
  fallbacks is added, and only whitespace that nobody would see is ever left out;
- every bubble that was shown is completed; no bubble is completed without a visible character;
- a :class:`Show` never equals the :class:`Complete` after it nor the :class:`Show` before it, not even to a surface that
  trims them (Telegram answers an unchanged edit with an error, and the host that error with a second message); an exception
  is made where a surface shows only each n-th update: there it is repeated until one is shown;
- two Shows are at least the surface's interval apart, except one that keeps a Complete from equalling the Show before it, and
  a bubble's first words under a progress line: a person waits for those, so they go out at once, and the Show after them as
  much later;
- what is sent for one bubble costs at most ``MESSAGE_BYTES_FACTOR`` times its own JSON or ``MESSAGE_BYTES_FREE``, whichever
  is more: the more a text has grown, the rarer it is repeated;
- text is split as :mod:`pkg.text_split` does, at the moment it no longer fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pkg import limits
from pkg.surfaces import Surface
from pkg.text_clean import is_blank
from pkg.text_split import Fence, FenceTracker, Part, cut, json_bytes, split, utf16_units

MARKER: Final = "…"
"""Stands under a text being written when there is no progress line."""

_FENCE_UNITS: Final = 160
"""Units kept free for the line that closes a fence."""


@dataclass(frozen=True, slots=True)
class Show:
    """Replace the open bubble's text, or open a bubble with it; ``sequence`` is the number its surface shows."""

    text: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Close the open bubble with its whole text, or send that as a message of its own; ``body`` is what of it was appended."""

    text: str
    body: str


Action = Show | Complete


@dataclass(slots=True)
class Bubbles:
    """The one bubble being written and what it has cost so far."""

    surface: Surface
    _pieces: list[str] = field(default_factory=list)
    _units: int = 0
    _bytes: int = 0
    _fence_before: Fence | None = None
    _tracker: FenceTracker = field(default_factory=FenceTracker)
    _visible: bool = False
    _shows: int = 0
    _displayed: str = ""
    _last: str = ""
    _cost: int = 0
    _shown_chars: int = 0
    _shown_at: float = float("-inf")
    _completed_at: float = float("-inf")
    _grown: bool = False

    # ---- what it knows

    @property
    def open(self) -> bool:
        """Whether the person sees an unfinished bubble."""
        return self._shows > 0

    @property
    def has_text(self) -> bool:
        """Whether the bubble being written has a visible character of its own."""
        return self._visible

    @property
    def in_fence(self) -> bool:
        """Whether the text so far ends inside a code fence."""
        return self._tracker.now is not None

    @property
    def at_paragraph_end(self) -> bool:
        """Whether the text so far ends with a line break outside any fence."""
        return self._tracker.at_line_start and self._tracker.fence is None

    # ---- what happens

    def append(self, piece: str, now: float) -> list[Action]:
        """Take more of the answer; whatever no longer fits is completed at once."""
        if not piece:
            return []
        self._add(piece)
        if not self._overfull():
            return []
        parts: list[Part] = []
        text, fence = self._text(), self._fence_before
        part, rest, after = cut(text, self.surface.limit, fence, least=self._committed())
        while rest:
            parts.append(part)
            text, fence = rest, after
            part, rest, after = cut(text, self.surface.limit, fence)
        if not parts:
            return []
        self._restart(fence)
        self._add(text)
        return [action for part in parts if not is_blank(part.body) for action in self._complete(part, now)]

    def poll(self, now: float, status: str) -> list[Action]:
        """What to show now; ``status`` are the progress lines under the text, empty when there is nothing to tell."""
        if not self._visible and (not status or (not self.open and now - self._completed_at < limits.STATUS_INTERVAL)):
            return []
        interval = self.surface.interval if self._grown or not self.open else max(self.surface.interval, limits.STATUS_INTERVAL)
        wait = self._shown_at + (self.surface.interval if self._hidden() else interval) - now
        if wait > 0 and not self._first_words():
            return []
        if not self._affordable(self._bytes):
            return []
        text = self._composed(status or MARKER)
        if _same(text, self._displayed):
            self._grown = False
            return []
        if not self._affordable(json_bytes(text)):
            return []
        return [self._show(text, now + max(wait, 0.0))]

    def close(self, now: float, fallback: str = "") -> list[Action]:
        """Finish the bubble; one without visible text becomes ``fallback``, and nothing when it was never shown either.

        Raises ``ValueError`` when an open bubble has no text and no fallback is given.
        """
        if self._visible:
            actions: list[Action] = []
            text, fence = self._text(), self._fence_before
            while text:
                part, text, fence = cut(text, self.surface.limit, fence)
                if not is_blank(part.body):
                    actions += self._complete(part, now)
            self._restart(None)
            return actions
        self._restart(None)
        if is_blank(fallback):
            if self.open:
                raise ValueError("an open bubble needs a text")
            return []
        return self.message(fallback, now)

    def message(self, text: str, now: float) -> list[Action]:
        """A message of its own; an open bubble without visible text becomes it.

        Raises ``ValueError`` when the open bubble has text: that must be completed first.
        """
        if self._visible and self.open:
            raise ValueError("the open bubble has text of its own")
        actions: list[Action] = []
        for part in split(text, self.surface.limit):
            if not is_blank(part.body):
                actions += self._complete(part, now)
        return actions

    def break_off(self, now: float, *, anywhere: bool) -> list[Action] | None:
        """Complete what there is so that a message can come between; the rest of a begun line waits for the next bubble.

        Without ``anywhere`` only at the end of a line outside fences: ``None`` when there is none yet.
        """
        if not self._visible:
            return []
        text, at = self._text(), 0
        if not self.at_paragraph_end:
            at = self._tracker.line_start
            if is_blank(text[:at]) or at < self._committed():
                if not anywhere:
                    return None
                at = 0
        head, rest = (text[:at], text[at:]) if at else (text, "")
        fence = self._tracker.now if not rest else None
        self._restart(self._fence_before)
        self._add(head)
        actions = self.close(now)
        self._restart(fence)
        self._add(rest)
        return actions

    # ---- inside

    def _text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _add(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._units += utf16_units(piece)
        self._bytes += json_bytes(piece)
        self._tracker.feed(piece)
        self._visible = self._visible or not is_blank(piece)
        self._grown = True

    def _restart(self, fence: Fence | None) -> None:
        """The text being written begins anew, inside ``fence``; what was shown of it stays until it is completed."""
        self._pieces = []
        self._fence_before = fence
        self._tracker = FenceTracker(fence)
        self._visible = False
        opening = fence.opening if fence else ""
        self._units, self._bytes = utf16_units(opening), json_bytes(opening)

    def _overfull(self) -> bool:
        limit = self.surface.limit
        spare = _FENCE_UNITS if self.in_fence else 0
        return self._bytes + spare > limit.json_bytes or (limit.units is not None and self._units + spare > limit.units)

    def _hidden(self) -> bool:
        """Whether the last update is not on the person's screen yet."""
        return self.open and not _same(self._displayed, self._last)

    def _first_words(self) -> bool:
        """Whether there is text for a bubble that has only shown progress, on a surface that would show it."""
        return self.open and self._visible and self._shown_chars == 0 and self.surface.shown_every == 1

    def _composed(self, status: str) -> str:
        if not self._visible:
            return status
        opening = self._fence_before.opening if self._fence_before else ""
        text = opening + self._text()
        fence = self._tracker.now
        tail = f"\n\n{status}" if fence is None else f"\n{fence.closing}\n\n{status}"
        room = self.surface.limit.less(tail)
        if not room.admits(text):
            text = text[: room.head(text)]
        return text.rstrip("\n") + tail

    def _committed(self) -> int:
        """Characters that must stay in this bubble because showing them cost more than a shorter message may."""
        return self._shown_chars if self._cost > limits.MESSAGE_BYTES_FREE - limits.MESSAGE_BYTES_RESERVE else 0

    def _affordable(self, size: int) -> bool:
        """Whether a Show of ``size`` JSON bytes leaves the bubble, with its Complete, within what it may cost."""
        cost = limits.RESULT_ENVELOPE_BYTES + self.surface.text_copies * size
        final = limits.RESULT_ENVELOPE_BYTES + self._bytes
        allowed = max(
            limits.MESSAGE_BYTES_FACTOR * self._bytes,
            limits.MESSAGE_BYTES_FREE - limits.MESSAGE_BYTES_RESERVE,
        )
        return self._cost + cost + final <= allowed

    def _show(self, text: str, at: float) -> Show:
        """Show ``text`` now; ``at`` is when it was due, from which the next interval counts."""
        action = Show(text, self.surface.sequence(self._shows))
        if self._shows % self.surface.shown_every == 0:
            self._displayed = text
        self._shows += 1
        self._last = text
        self._shown_at = max(self._shown_at, at)
        self._cost += limits.RESULT_ENVELOPE_BYTES + self.surface.text_copies * json_bytes(text)
        self._shown_chars = len(self._text())
        self._grown = False
        return action

    def _complete(self, part: Part, now: float) -> list[Action]:
        actions: list[Action] = []
        text = part.text
        if self.open and (_same(text, self._last) or _same(text, self._displayed)):
            actions.append(self._show(f"{MARKER} {MARKER}" if _same(text, MARKER) else MARKER, now))
        actions.append(Complete(text, part.body))
        self._shows = 0
        self._displayed = self._last = ""
        self._cost = 0
        self._shown_chars = 0
        self._completed_at = now
        self._grown = True
        return actions


def _same(one: str, other: str) -> bool:
    return one.strip() == other.strip()
