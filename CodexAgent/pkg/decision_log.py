"""What agents asked to do, and what was decided about it: one JSON object a line, for whoever runs the worker.

A line has ``time`` (UTC), ``installation`` (a digest of its binding, empty where there is only one), ``conversation`` and
``actor`` (the names :mod:`pkg.identity` gives them), ``answerer`` (who answered, empty where no person did), ``machine`` and
``directory``, ``kind``, ``action`` (cut, without secrets) and ``digest`` (of the whole action), ``decision`` (a person's:
``allow_once``, ``allow_session``, ``deny``, ``answered``, ``cancelled``; nobody's: ``allow``, ``deny``, ``cancelled``,
``expired``) and ``by`` (``policy …``, ``rule …``, ``grant …``, ``person``, or what ended the turn: ``time``, ``stop``,
``agent``, ``the end of …``).

Guarantees: known secrets, credentials in addresses and what stands behind words such as ``token=`` are not in it, neither are
an answer to a question and the reason of a denial; a file is as :mod:`pkg.json_lines` keeps it; a line that cannot be written
is an error in the log, once until one can be written again, and stops nothing. Where a worker serves several installations
there is no file: a line in its log says that something was decided, and not what.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pkg import limits, runtime_support, text_clean
from pkg.agent_api import ApprovalRequested, QuestionAsked, to_json
from pkg.json_lines import JsonLines, now
from pkg.redaction import Redactor
from pkg.runtime_support import WorkerShape

if TYPE_CHECKING:
    from pkg.identity import Authority

log = logging.getLogger(__name__)

FILE: Final = "decisions.jsonl"
JAIL_DIRECTORY: Final = ".langbot-coding-agents"

_WORDS: Final = (
    r"(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|authorization)"
)
_VALUE: Final = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"';&|]+)"
_NAME: Final = rf"(?<![\w.-])(?=[\w.-]*{_WORDS})(?:[\w.-]++[\"']?\s*[=:]\s*|-[\w.-]++\s+)(?:(?:bearer|basic)\s+)?"
"""A word that names a secret, read to its end once: looked for behind each of its letters, a long one would take its square."""
_NAMED_SECRET: Final = re.compile(
    rf"(?P<name>{_NAME}){_VALUE}|(?P<scheme>\b(?:bearer|basic)\s+)[^\s\"']{{8,}}",
    re.IGNORECASE,
)


def without_secrets(text: str, redact: Callable[[str], str] | None = None) -> str:
    """``text`` without what ``redact`` knows, credentials in addresses, and values that are named as secrets."""

    def hidden(found: re.Match[str]) -> str:
        return f"{found['name'] or found['scheme']}***"

    return _NAMED_SECRET.sub(hidden, (redact or _REDACT)(text))


_REDACT: Final = Redactor(())


@dataclass(frozen=True, slots=True)
class Action:
    """What was asked, as a record has it."""

    kind: str
    described: str
    digest: str

    @classmethod
    def of(cls, request: ApprovalRequested | QuestionAsked, redact: Callable[[str], str] | None = None) -> Action:
        """The action of a request; ``redact`` hides the secrets that are known."""
        if isinstance(request, QuestionAsked):
            kind, named = "question", request.message
        else:
            files = dict.fromkeys((*request.paths, *(diff.path for diff in request.diffs)))
            kind, named = request.kind, request.command or ", ".join(files) or request.title or request.kind
        # Hidden before it is cut, so that no cut goes through a secret.
        shown = text_clean.one_line(without_secrets(named[: limits.DECISION_CHARS * 16], redact), limits.DECISION_CHARS)
        left_out = {"type", "request_id", "tool_call_id", "choices", "reason"}
        whole = {name: value for name, value in to_json(request).items() if name not in left_out}
        data = json.dumps(whole, sort_keys=True, ensure_ascii=True).encode("ascii")
        return cls(kind, shown, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """One decision. ``conversation``, ``actor`` and ``answerer`` are names for records, never a person's own."""

    action: Action
    decision: str
    by: str
    conversation: str = ""
    actor: str = ""
    answerer: str = ""
    machine: str = ""
    directory: str = ""


class DecisionLog:
    """Where an installation's decisions are written down."""

    def __init__(self, directory: Path | None, installation: str = "") -> None:
        """``directory`` is made (0700) with the first line; ``None``: there is only the worker's log."""
        self.file = None if directory is None else directory / FILE
        self._lines = None if self.file is None else JsonLines(self.file)
        self._installation = installation

    @classmethod
    def for_worker(cls, authority: Authority, shape: WorkerShape | None = None) -> DecisionLog:
        """The log of an installation in this kind of worker."""
        shape = shape or runtime_support.worker_shape()
        return cls(None if authority.pooled else _directory(shape), _named(authority.parts()))

    def write(self, line: DecisionLine, redact: Callable[[str], str] | None = None) -> None:
        """Write a decision down; never raises for a file that can't be written. ``redact`` hides the secrets that are known."""
        if self._lines is None:
            installation, by = self._installation or "-", line.by.partition(":")[0]
            log.info("installation %s: %s was decided by %s: %s", installation[:12], line.action.kind, by, line.decision)
            return
        values = {
            "installation": self._installation,
            "conversation": line.conversation,
            "actor": line.actor,
            "answerer": line.answerer,
            "machine": line.machine,
            "directory": line.directory,
            "kind": line.action.kind,
            "action": line.action.described,
            "digest": line.action.digest,
            "decision": line.decision,
            "by": line.by,
        }
        hide = redact or _REDACT
        self._append({"time": now(), **{name: hide(value)[: limits.DECISION_CHARS] for name, value in values.items()}})

    def _append(self, line: Mapping[str, str]) -> None:
        assert self._lines is not None and self.file is not None
        try:
            self._lines.append(line, most=limits.DECISION_BYTES, kept=limits.DECISION_FILES)
        except OSError as exc:
            if self.file not in _failing:
                _failing.add(self.file)
                log.error("decisions can not be written down: %s: %s", FILE, exc.strerror)
        else:
            _failing.discard(self.file)


_failing: Final[set[Path]] = set()
"""Files that could not be written to the last time; a worker has one, at most a few."""


def _directory(shape: WorkerShape) -> Path | None:
    if shape is WorkerShape.POOL:
        return None
    if shape is WorkerShape.JAIL:
        return runtime_support.DATA_DIRECTORY / JAIL_DIRECTORY
    return Path(runtime_support.home_directory()) / limits.STATE_DIRECTORY


def _named(parts: list[list[str]] | None) -> str:
    return "" if parts is None else hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()
