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

Guarantees: no prompt, answer, environment or secret is ever in it; names that a hub chose are bounded, and a line stays one
line whatever they hold; the file is 0600 and begun anew at ``DAEMON_AUDIT_BYTES``, with ``DAEMON_AUDIT_FILES`` older ones kept;
several daemons may share it; a line that cannot be written is an error in the log and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pkg import limits
from pkg.agent_api import Json
from pkg.errors import CodingError, ProcessCleanupUnconfirmed, Refused

log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"
_LOCK: Final = "audit.lock"
_FIELDS: Final = ("actor", "agent", "workspace", "policy")


class Audit:
    """The record of one machine."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is the daemon's state directory; it is made (0700) with the first line."""
        self.file = directory / FILE

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

    def write(self, hub: str, job_id: str, outcome: str, code: str = "", about: Mapping[str, str] | None = None) -> None:
        """One line; ``about`` holds what is known of ``actor``, ``agent``, ``workspace`` and ``policy``."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "hub": hub, "job": job_id[: limits.DAEMON_AUDIT_CHARS]}
        line |= {name: (about or {}).get(name, "")[: limits.DAEMON_AUDIT_CHARS] for name in _FIELDS}
        line |= {"outcome": outcome, "code": code}
        try:
            self._append(json.dumps(line).encode("ascii") + b"\n")
        except OSError as exc:
            log.error("the audit line of job %s (%s) could not be written: %s", job_id, outcome, exc.strerror)

    def _append(self, line: bytes) -> None:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self.file.stat().st_size + len(line) > limits.DAEMON_AUDIT_BYTES:
                self._set_aside()
        descriptor = _opened(self.file, os.O_APPEND)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # what a full disk cut off stays a line of its own
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _set_aside(self) -> None:
        """Begin a new file, unless another daemon that shares it does so just now."""
        lock = _opened(self.file.with_name(_LOCK))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.file.stat().st_size > limits.DAEMON_AUDIT_BYTES // 2:
                for number in range(limits.DAEMON_AUDIT_FILES - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        self._old(number).replace(self._old(number + 1))
                self.file.replace(self._old(1))
        except (BlockingIOError, FileNotFoundError):
            return  # a line more in the full file does no harm
        finally:
            os.close(lock)

    def _old(self, number: int) -> Path:
        return self.file.with_name(f"{FILE}.{number}")


def _opened(file: Path, flags: int = 0) -> int:
    """The file, made if need be, of this account alone."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


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

    def write(self, outcome: str, code: str = "") -> None:
        """One line of this job."""
        self._audit.write(self._hub, self._job_id, outcome, code, self._about)


def _described(payload: Json) -> dict[str, str]:
    """What a job's payload says of the fields of a line; what is no text there is left empty."""
    job = payload if isinstance(payload, dict) else {}
    spec = job.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    found = {"actor": job.get("actor"), "agent": job.get("agent"), "workspace": spec.get("cwd"), "policy": spec.get("policy")}
    return {name: value for name, value in found.items() if isinstance(value, str)}
