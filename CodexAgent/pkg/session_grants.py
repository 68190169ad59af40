"""What a person allowed "for this session": exactly that again, by the same person's turns, while the session lives.

A grant covers the same command in the same directory, or another change of the same files, or the same call of the same
tool; only actions that were shown whole. It lives in memory beside its session and ends with it; it never reaches the vendor's
own rules, so that no settings file remembers it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from pkg import limits
from pkg.agent_api import ApprovalRequested
from pkg.interactions import digest

if TYPE_CHECKING:
    from pkg.identity import Actor


def pattern(event: ApprovalRequested) -> str:
    """The name of everything a grant of ``event`` covers; ``""`` where it can cover nothing."""
    exact = digest(event)
    if not exact or event.kind == "mode":
        return ""
    paths = sorted({*event.paths, *(diff.path for diff in event.diffs)})
    if event.kind == "edit" and paths and not event.command:
        return hashlib.sha256(json.dumps(["edit", event.cwd, paths]).encode("ascii")).hexdigest()
    return exact


def placed(event: ApprovalRequested, machine: str, directory: str) -> str:
    """The name of exactly this action on this machine, in a session of this directory; ``""`` where it is not known whole."""
    exact = digest(event)
    return hashlib.sha256(json.dumps([exact, machine, directory]).encode("ascii")).hexdigest() if exact else ""


class SessionGrants:
    """The grants of one live session."""

    def __init__(self) -> None:
        """Nothing is granted."""
        self._granted: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self.once = ""
        """The name (:func:`placed`) of an action that is allowed once in the open turn, because the answer came when its own
        turn was gone."""

    def take_once(self, name: str) -> bool:
        """Whether exactly this was allowed once; used up by it."""
        taken = bool(name) and self.once == name
        if taken:
            self.once = ""
        return taken

    def add(self, actor: Actor, event: ApprovalRequested) -> None:
        """``actor``'s turns may do what ``event`` asked for again."""
        name = pattern(event)
        if name:
            self._granted[(*actor.parts(), actor.sender_id, name)] = None
            while len(self._granted) > limits.SESSION_GRANTS:
                self._granted.popitem(last=False)

    def covers(self, actor: Actor, event: ApprovalRequested) -> bool:
        """Whether it was granted to ``actor``'s turns."""
        name = pattern(event)
        return bool(name) and (*actor.parts(), actor.sender_id, name) in self._granted
