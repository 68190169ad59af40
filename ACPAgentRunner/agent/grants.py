"""What a person allowed in this turn, so that an agent that asked already is not asked about again when it acts.

A grant covers exactly what was shown: the same file with a content that contains the shown new text, or the same command. A
single grant is used up by one action; all end with their turn.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pkg.agent_api import ApprovalRequested

_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})


@dataclass(slots=True)
class _Grant:
    request: ApprovalRequested
    standing: bool


def inner_command(command: str, args: Sequence[str]) -> str:
    """The command line a person would read: without the shell that only carries it."""
    if len(args) == 2 and Path(command).name in _SHELLS and args[0] in ("-c", "-lc"):
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

    def take_write(self, path: str, content: str) -> bool:
        """Whether writing ``content`` to ``path`` was allowed; uses a single grant up."""
        for grant in self._grants:
            for diff in grant.request.diffs:
                if os.path.normpath(diff.path) == os.path.normpath(path) and not diff.truncated and diff.new_text in content:
                    return self._use(grant)
        return False

    def take_command(self, command: str, args: Sequence[str], cwd: str) -> bool:
        """Whether running a command was allowed; uses a single grant up."""
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
