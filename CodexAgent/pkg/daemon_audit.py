"""What ran on this machine, for whom, and what its policy refused: one JSON object a line, for the machine's owner.

A line has ``time`` (UTC), ``hub``, ``job``, ``actor`` (the name the hub gives the person), ``agent``, ``workspace``,
``policy`` (the approval policy), ``outcome`` and ``code`` (of a refusal or failure). A job has a line when it starts and
one when it ends:

- ``started``: the policy allowed it, and its agent is about to be started;
- ``refused``: the policy did not allow it; nothing was started. Also for what a running job asks for later;
- ``closed``: its hub ended it, was away for too long, or the daemon was stopped; nothing of it is left;
- ``completed``, ``failed``: it has ended by itself, and nothing of it is left;
- ``unproven``: it has ended, and processes may be left;
- ``recovered``: its end was not seen or not proven (a crash), and now it is proven that nothing of it is left.

What the hub answered when the agent asked for permission has a line, too: ``answered``, or ``too_late`` when it was not open
any more, with ``request`` (the agent's name for it), ``kind``, ``action`` (cut), ``digest`` (of the whole action) and
``choice``: its kind (``allow_once``, ``reject_once``, …), ``answered`` for a question, or ``cancelled``.

Guarantees: no prompt, answer in words, environment or known secret is ever in it; names that a hub chose are bounded, and a
line stays one line whatever they hold; the file is as :mod:`pkg.json_lines` keeps it, and several daemons may share it; a line
that cannot be written is an error in the log and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pkg import limits
from pkg.agent_api import Answer, ApprovalRequested, Json, QuestionAsked
from pkg.decision_log import Action
from pkg.errors import CodingError, ProcessCleanupUnconfirmed, Refused
from pkg.json_lines import JsonLines, now

log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"
_FIELDS: Final = ("actor", "agent", "workspace", "policy")


class Audit:
    """The record of one machine."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is the daemon's state directory; it is made (0700) with the first line."""
        self.file = directory / FILE
        self._lines = JsonLines(self.file)

    @contextlib.contextmanager
    def job(self, hub: str, job_id: str, payload: Json) -> Iterator[JobRecord]:
        """The record of a job while it runs; however the block ends is written, and goes on."""
        record = JobRecord(self, hub, job_id, _described(payload))
        try:
            yield record
        except Refused as exc:
            record.write("failed" if record.begun else "refused", exc.code)
            raise
        except CodingError as exc:
            record.write("failed", exc.code)
            raise
        except asyncio.CancelledError:
            record.write("closed")
            raise
        except ProcessCleanupUnconfirmed:
            record.write("unproven")
            raise
        except BaseException:
            record.write("failed")
            raise
        record.write("completed")

    def write(
        self,
        hub: str,
        job_id: str,
        outcome: str,
        code: str = "",
        about: Mapping[str, str] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """One line; ``about`` holds what is known of ``actor``, ``agent``, ``workspace`` and ``policy``, ``more`` what only
        this line has."""
        line = {"time": now(), "hub": hub, "job": job_id[: limits.DAEMON_AUDIT_CHARS]}
        line |= {name: (about or {}).get(name, "")[: limits.DAEMON_AUDIT_CHARS] for name in _FIELDS}
        line |= {"outcome": outcome, "code": code}
        line |= {name: value[: limits.DAEMON_AUDIT_CHARS] for name, value in (more or {}).items()}
        try:
            self._lines.append(line, most=limits.DAEMON_AUDIT_BYTES, kept=limits.DAEMON_AUDIT_FILES)
        except OSError as exc:
            log.error("the audit line of job %s (%s) could not be written: %s", job_id, outcome, exc.strerror)


class JobRecord:
    """What is written of one job."""

    def __init__(self, audit: Audit, hub: str, job_id: str, about: dict[str, str]) -> None:
        """``about`` is what the hub asked for."""
        self._audit = audit
        self._hub = hub
        self._job_id = job_id
        self._about = about
        self.begun = False

    def started(self, agent: str, workspace: str) -> None:
        """The policy allows the job: this agent, in this directory."""
        self.begun = True
        self._about |= {"agent": agent, "workspace": workspace}
        self.write("started")

    def answered(self, request: ApprovalRequested | QuestionAsked, answer: Answer, *, in_time: bool) -> None:
        """The hub answered what the agent asked; ``in_time`` when it was still open."""
        action = Action.of(request)
        more = {"request": request.request_id, "kind": action.kind, "action": action.described, "digest": action.digest}
        more["choice"] = _chosen(request, answer)
        self._audit.write(self._hub, self._job_id, "answered" if in_time else "too_late", "", self._about, more)

    def write(self, outcome: str, code: str = "") -> None:
        """One line of this job."""
        self._audit.write(self._hub, self._job_id, outcome, code, self._about)


def _chosen(request: ApprovalRequested | QuestionAsked, answer: Answer) -> str:
    if isinstance(request, QuestionAsked):
        return "answered" if answer.values else "cancelled"
    kinds = {choice.choice_id: choice.kind for choice in request.choices}
    return kinds.get(answer.choice_id, "unknown" if answer.choice_id else "cancelled")


def _described(payload: Json) -> dict[str, str]:
    """What a job's payload says of the fields of a line; what is no text there is left empty."""
    job = payload if isinstance(payload, dict) else {}
    spec = job.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    found = {"actor": job.get("actor"), "agent": job.get("agent"), "workspace": spec.get("cwd"), "policy": spec.get("policy")}
    return {name: value for name, value in found.items() if isinstance(value, str)}
