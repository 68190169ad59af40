"""The answer's text out of two sources that overlap: partial messages as they stream, and each finished block once more.

Guarantees: no text is emitted twice, whichever source has it first. A message that was cut off in the middle and is begun again
(a dropped connection, a retry) goes on where it stopped if the new attempt says the same, and is a new message if it does not,
because what people have read cannot be taken back.
"""

from __future__ import annotations

from pkg.agent_api import TextDelta
from pkg.lenient import unicode_safe


class AnswerText:
    """The answer text of one session's main conversation."""

    def __init__(self) -> None:
        self._message_id = ""
        self._blocks: list[list[str]] = []
        """The pieces of each block of the current message, as far as they are known."""
        self._unfinished = False
        """Whether the current message streams and has not ended."""
        self._block_done = False
        """Whether the last block was given as a whole."""
        self._shown_as = ""
        """The id under which text is emitted."""
        self._broken = ""
        """Emitted text of a message that was broken off, while a new attempt may still repeat it."""
        self._repeating = ""
        """What the new attempt has said so far, all of it a repetition."""
        self._half = ""
        """The first half of a surrogate pair that was cut between two pieces."""

    def message_started(self, message_id: str) -> None:
        """A model call began to stream a message."""
        if self._unfinished:
            self.broken_off(0)
        self._begin(message_id)
        self._unfinished = True

    def block_started(self) -> None:
        """A block of the streaming message began, of whatever kind."""
        self._blocks.append([])
        self._block_done = False
        self._half = ""

    def piece(self, text: str) -> list[TextDelta]:
        """A piece of the current block."""
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._half, text = text[-1], text[:-1]
        return self._emit(unicode_safe(text))

    def message_stopped(self) -> None:
        """The streaming message is complete."""
        self._unfinished = False
        self._broken = self._repeating = ""

    def broken_off(self, from_block: int) -> None:
        """What the current message has said from this block on will be said again by the message that comes next."""
        self._broken = self._broken or "".join(piece for block in self._blocks[from_block:] for piece in block)
        self._repeating = self._half = ""
        self._blocks = self._blocks[:from_block]
        self._unfinished = False

    def whole(self, message_id: str, text: str) -> list[TextDelta]:
        """A finished block with all of its text."""
        text = unicode_safe(text)
        if message_id != self._message_id:
            self._begin(message_id)
        if self._block_done or not self._blocks:
            self.block_started()
        said = "".join(self._blocks[-1])
        self._block_done = True
        return self._emit(text[len(said) :]) if text.startswith(said) else []

    def turn_over(self) -> None:
        """Nothing of the turn comes any more."""
        self._broken = self._repeating = self._half = ""
        self._blocks = []
        self._unfinished = self._block_done = False

    def _begin(self, message_id: str) -> None:
        self._message_id = message_id
        self._blocks = []
        self._block_done = False
        if self._repeating:  # an attempt that only repeated, and was the last one
            self._broken = ""
        self._repeating = self._half = ""
        if not self._broken:
            self._shown_as = message_id

    def _emit(self, text: str) -> list[TextDelta]:
        if not text:
            return []
        if not self._blocks:
            self._blocks.append([])
        self._blocks[-1].append(text)
        if not self._broken:
            return [TextDelta(text, self._shown_as)]
        self._repeating += text
        if self._broken.startswith(self._repeating):
            return []
        repeated, said = self._repeating, self._broken
        self._broken = self._repeating = ""
        if repeated.startswith(said):
            return [TextDelta(repeated[len(said) :], self._shown_as)]
        self._shown_as = self._message_id
        return [TextDelta(repeated, self._shown_as)]
