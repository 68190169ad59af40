"""What the host's state remembers of an open request, for the case that the process that knew it is gone when the answer comes.

It holds no text and no secret: the id under which the request was shown, digests of exactly what would be done and of who may
answer, and until when an answer counts. With it an answer that finds no parked turn any more can still be taken: the session is
resumed, and the one action with that digest is allowed once.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["approval", "question"]


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """One open request; ``digest`` is empty for a question and for what could not be shown whole."""

    interaction_id: str
    kind: Kind
    digest: str
    who: str
    """A lasting name of the person who may answer."""
    expires_at: int
    """Seconds since the epoch."""

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return time.time() >= self.expires_at

    def to_text(self) -> str:
        """The stored form."""
        return json.dumps([self.interaction_id, self.kind, self.digest, self.who, self.expires_at])


def record_from(text: str) -> OpenRecord | None:
    """What was stored; ``None`` for nothing and for what is no record."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    match value:
        case [str(name), "approval" | "question" as kind, str(digest), str(who), int(expires_at)] if name and who:
            return OpenRecord(name, kind, digest, who, expires_at)
    return None
