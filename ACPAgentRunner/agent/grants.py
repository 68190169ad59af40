"""What a person allowed in this turn, so that an agent that asked already is not asked about again when it acts.

A grant covers exactly what was shown: the same file with the shown new text as its content, or with the shown changes made to
what it holds now; or the same command, run by a shell of the system, with no variable that a person was not shown. A single
grant is used up by one action; all end with their turn.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pkg.agent_api import ApprovalRequested, FileDiff

_SHELLS = frozenset(
    place + shell for place in ("", "/bin/", "/usr/bin/", "/usr/local/bin/") for shell in ("sh", "bash", "zsh", "dash")
)
_INERT = frozenset({"CLAUDECODE", "CI", "COLUMNS", "FORCE_COLOR", "LANG", "LC_ALL", "LINES", "NO_COLOR", "TERM"})
"""Variables that agents add to a command without naming them to a person, and that change no more than how output looks."""


@dataclass(slots=True)
class _Grant:
    request: ApprovalRequested
    standing: bool


def inner_command(command: str, args: Sequence[str]) -> str:
    """The command line a person would read: without the shell that only carries it."""
    if len(args) == 2 and command in _SHELLS and args[0] in ("-c", "-lc"):
        return args[1]
    return shlex.join((command, *args)) if args else command


class Grants:
    """The grants of one turn."""

    def __init__(self) -> None:
        self._grants: list[_Grant] = []

    def add(self, request: ApprovalRequested, *, standing: bool) -> None:
        """``request`` was allowed; ``standing`` when not only once."""
        self._grants.append(_Grant(request, standing))

    def clear(self) -> None:
        """The turn is over."""
        self._grants.clear()

    def take_write(self, path: str, current: str | None, content: str) -> bool:
        """Whether making ``content`` out of the ``current`` one of ``path`` was allowed; uses a single grant up."""
        for grant in self._grants:
            diffs = [diff for diff in grant.request.diffs if os.path.normpath(diff.path) == os.path.normpath(path)]
            if diffs and _shows(diffs, current or "", content):
                return self._use(grant)
        return False

    def take_command(self, command: str, args: Sequence[str], cwd: str, variables: Collection[str] = ()) -> bool:
        """Whether running a command with these additional variables was allowed; uses a single grant up."""
        if not _INERT.issuperset(variables):
            return False
        for grant in self._grants:
            request = grant.request
            if request.command and request.command in (inner_command(command, args), shlex.join((command, *args))):
                if request.cwd and os.path.realpath(request.cwd) != os.path.realpath(cwd):
                    continue
                return self._use(grant)
        return False

    def _use(self, grant: _Grant) -> bool:
        if not grant.standing:
            self._grants.remove(grant)
        return True


def _shows(diffs: Sequence[FileDiff], current: str, content: str) -> bool:
    """Whether ``content`` is what the diffs of one file show: one of them whole, or all as changes to ``current`` in order."""
    if any(diff.truncated for diff in diffs):
        return False
    if any(not diff.old_text and diff.new_text == content for diff in diffs):
        return True
    return content in (_changed(diffs, current, 1), _changed(diffs, current, -1))


def _changed(diffs: Sequence[FileDiff], text: str, times: int) -> str | None:
    """``text`` with each diff's old text replaced so many times (-1: everywhere); ``None`` where one does not apply."""
    for diff in diffs:
        if not diff.old_text or diff.old_text not in text:
            return None
        text = text.replace(diff.old_text, diff.new_text, times)
    return text
