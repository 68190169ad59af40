"""What the host's state remembers of an open request, for the case that the process that knew it is gone when the answer comes.

It holds no text and no secret: the id under which the request was shown, what its choices were, digests of exactly what would
be done (and where) and of who may answer, and until when an answer counts. With it an answer that finds no parked turn any more
can still be taken: the session is resumed, and the one action with that digest is allowed once.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["approval", "question"]
Offers = Literal["all", "once", "denial", "reason"]
"""What the numbers of an approval were: every choice, all but the session's, those that deny, or none but a denial's reason."""


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """One open request; ``digest`` is empty for a question and for what could not be shown whole."""

    interaction_id: str
    kind: Kind
    offers: Offers
    digest: str
    who: str
    """The lasting name of the person who may answer (:func:`pkg.identity.lasting_name`)."""
    expires_at: int
    """Seconds since the epoch."""

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return time.time() >= self.expires_at

    def to_text(self) -> str:
        """The stored form."""
        return json.dumps([self.interaction_id, self.kind, self.offers, self.digest, self.who, self.expires_at])


def record_from(text: str) -> OpenRecord | None:
    """What was stored; ``None`` for nothing and for what is no record."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    match value:
        case [
            str(name),
            "approval" | "question" as kind,
            "all" | "once" | "denial" | "reason" as offers,
            str(digest),
            str(who),
            int(expires_at),
        ] if name and who:
            return OpenRecord(name, kind, offers, digest, who, expires_at)
    return None
