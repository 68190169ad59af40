"""The daemon's durable job table: what it has started for one hub, so that the next process can end it and prove that.

One file (0600, written whole, synced together with its directory before anything of a job starts) holds for each job: its
marker, the boot and the process namespace it ran in, since when, and its processes as pid and start time. Every process of a
job carries the marker in its environment, its supervisors too, so that nothing escapes between the entry and a process.

Guarantees:

- one process at a time uses a table (a kernel lock, gone with its holder);
- a job that is listed as started is either ended and proven gone, or reported as not proven: by machine restart (another boot
  id), by the end of a namespace whose first process the daemon was, or by looking at every living process;
- a process is ended only when it carries the job's marker, or descends from, or shares group or session with, one that does; a
  pid with the recorded start time that lacks the marker is left alone and named, and the job is not proven;
- a table that is lost or cannot be read gets a new id, by which its hub knows that entries may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pkg import limits, process_supervisor
from pkg.errors import ProcessCleanupUnconfirmed
from pkg.process_api import AgentProcess, Command, Launcher
from pkg.supervised_process import JOB_MARKER, end_job

log = logging.getLogger(__name__)

_FILE: Final = "jobs.json"
_LOCK: Final = "lock"
_VERSION: Final = 1


class TableBusy(Exception):
    """Another daemon uses this table."""


@dataclass(slots=True)
class Entry:
    """One job that was started and is not forgotten."""

    marker: str
    boot: str
    namespace: str
    first: bool
    """Whether the daemon was its namespace's first process: nothing outlives that."""
    since: str
    """Its start, as a process start time."""
    quiesced: bool = False
    processes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of the jobs of an earlier process."""

    quiesced: tuple[str, ...]
    """Those of which nothing is left."""
    unproven: tuple[str, ...]
    ended: tuple[str, ...] = ()
    """Those of the quiesced whose end the earlier process did not see."""


class DurableJobTable:
    """The table of one hub; a :class:`pkg.relay_events.JobTable`."""

    def __init__(self, directory: Path) -> None:
        """Take the table in ``directory`` (made 0700, as is its parent); raises :class:`TableBusy` and ``OSError``."""
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        self._directory = directory
        self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise TableBusy(f"another daemon runs here already, on {directory}; stop that one first") from None
        self._jobs: dict[str, Entry] = {}
        self.table = ""
        try:
            self._read()
            if not self.table:
                self.table = secrets.token_urlsafe(16)
                self._write()
        except BaseException:
            os.close(self._lock)
            raise

    def __repr__(self) -> str:
        return f"DurableJobTable({len(self._jobs)} jobs)"

    def close(self) -> None:
        """Let another process have the table."""
        os.close(self._lock)

    # -------------------------------------------------------------- the relay's interface

    def started(self, job_id: str) -> None:
        """Make the entry durable before this returns. Raises ``OSError``; the job is then refused."""
        marker = f"{self.table}.{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"
        self._jobs[job_id] = Entry(marker, boot_id(), namespace(), os.getpid() == 1, _now())
        try:
            self._write()
        except OSError:
            del self._jobs[job_id]
            raise

    def quiesced(self, job_id: str) -> None:
        """Nothing of this job is left running."""
        entry = self._jobs.get(job_id)
        if entry is not None and not entry.quiesced:
            entry.quiesced = True
            self._write()

    def forgotten(self, job_id: str) -> None:
        """The hub has taken note; the entry goes."""
        if self._jobs.pop(job_id, None) is not None:
            self._write()

    # -------------------------------------------------------------- processes

    def marker(self, job_id: str) -> str:
        """What every process of the job carries; raises ``KeyError`` for a job that is not listed."""
        return self._jobs[job_id].marker

    def process(self, job_id: str, pid: int) -> None:
        """Remember a process of a job; one that has ended already is not worth it. Raises ``OSError``."""
        entry = self._jobs.get(job_id)
        found = _look(pid)
        if entry is None or found is None:
            return
        entry.processes[pid] = found.start
        while len(entry.processes) > limits.DAEMON_JOB_PROCESSES:
            del entry.processes[next(iter(entry.processes))]
        self._write()

    # -------------------------------------------------------------- what an earlier process left

    async def recover(self) -> Recovered:
        """End what every listed job has left, and say of which that is proven; before the first connection."""
        turns = asyncio.Semaphore(limits.DAEMON_PROOFS)

        async def one(job_id: str) -> bool:
            async with turns:
                return await self.prove(job_id)

        listed = tuple(self._jobs)
        open_before = {job_id for job_id in listed if self.left(job_id)}
        async with asyncio.TaskGroup() as group:
            proofs = [group.create_task(one(job_id)) for job_id in listed]
        proven = {job_id for job_id, proof in zip(listed, proofs, strict=True) if proof.result()}
        return Recovered(
            tuple(job_id for job_id in listed if job_id in proven),
            tuple(job_id for job_id in listed if job_id not in proven),
            tuple(job_id for job_id in listed if job_id in proven & open_before),
        )

    def left(self, job_id: str) -> bool:
        """Whether a job is listed whose end nobody has seen."""
        entry = self._jobs.get(job_id)
        return entry is not None and not entry.quiesced

    async def prove(self, job_id: str) -> bool:
        """End what an earlier process left of a job; whether it is proven that nothing is."""
        entry = self._jobs.get(job_id)
        if entry is None or entry.quiesced:
            return True
        if not await self._gone(entry):
            return False
        with contextlib.suppress(OSError):
            self.quiesced(job_id)
        return True

    async def _gone(self, entry: Entry) -> bool:
        if entry.boot and boot_id() and entry.boot != boot_id():
            return True
        if entry.namespace != namespace():
            if not entry.first:
                log.error("a job ran in another process namespace, where this daemon can't look for it")
            return entry.first
        roots, strangers = _living(entry)
        if strangers:
            log.error("processes that may belong to an earlier job do not carry its marker: %s", strangers)
            return False
        try:
            await end_job(entry.marker, roots, since=entry.since)
        except ProcessCleanupUnconfirmed as exc:
            # Not a success: the job stays unproven, and its hub keeps the fence.
            log.error("what an earlier daemon left could not be ended: %s", exc)
            return False
        return True

    # -------------------------------------------------------------- the file

    def _read(self) -> None:
        file = self._directory / _FILE
        try:
            with file.open("rb") as opened:
                data = opened.read(limits.DAEMON_TABLE_BYTES + 1)
            value = json.loads(data)
            if value["version"] != _VERSION or len(data) > limits.DAEMON_TABLE_BYTES:
                raise ValueError
            jobs = {str(job_id): _entry(item) for job_id, item in value["jobs"].items()}
            self.table, self._jobs = str(value["table"]), jobs
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, AttributeError):
            log.error("the job table can't be read and is begun anew; it is kept as %s.broken", _FILE)
            file.replace(file.with_suffix(".broken"))

    def _write(self) -> None:
        value = {
            "version": _VERSION,
            "table": self.table,
            "jobs": {
                job_id: {
                    "marker": entry.marker,
                    "boot": entry.boot,
                    "namespace": entry.namespace,
                    "first": entry.first,
                    "since": entry.since,
                    "quiesced": entry.quiesced,
                    "processes": [[pid, start] for pid, start in entry.processes.items()],
                }
                for job_id, entry in self._jobs.items()
            },
        }
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=".jobs-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(value).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._directory / _FILE)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entry(item: Any) -> Entry:
    return Entry(
        str(item["marker"]),
        str(item["boot"]),
        str(item["namespace"]),
        item["first"] is True,
        str(item["since"]),
        item["quiesced"] is True,
        {int(pid): str(start) for pid, start in item["processes"]},
    )


class JobLauncher:
    """A launcher whose processes carry a job's marker and stand in its table."""

    def __init__(self, inner: Launcher, table: DurableJobTable, job_id: str) -> None:
        """``inner`` is where the processes run: this machine."""
        self._inner = inner
        self._table = table
        self._job_id = job_id

    @property
    def machine(self) -> str:
        """As the inner one's."""
        return self._inner.machine

    @property
    def label(self) -> str:
        """As the inner one's."""
        return self._inner.label

    @property
    def local(self) -> bool:
        """As the inner one's."""
        return self._inner.local

    async def start(self, command: Command) -> AgentProcess:
        """Start the command; raises what the inner launcher does, with nothing left."""
        env = {**command.env, JOB_MARKER: self._table.marker(self._job_id)}
        process = await self._inner.start(Command(command.argv, command.cwd, env, command.graces))
        # The marker, which is on the disk already, finds the process too; without room for its pid it still runs.
        with contextlib.suppress(OSError):
            self._table.process(self._job_id, process.pid)
        return process

    async def reach(self, url: str) -> str:
        """As the inner one's."""
        return await self._inner.reach(url)

    async def close(self) -> None:
        """As the inner one's."""
        await self._inner.close()


# ------------------------------------------------------------------ this machine


def boot_id() -> str:
    """What tells one run of this machine's kernel from the next; ``""`` where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def namespace() -> str:
    """The process namespace pids belong to; ``""`` where there are none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _now() -> str:
    """The present as a process start time (Linux: clock ticks since boot); ``""`` elsewhere."""
    if not process_supervisor.LINUX:
        return ""
    return str(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")))


def _look(pid: int) -> process_supervisor.Process | None:
    return process_supervisor.read_process(pid) if process_supervisor.LINUX else process_supervisor.proc_or_ps(pid)


def _living(entry: Entry) -> tuple[list[tuple[int, str]], list[int]]:
    """Recorded processes that still live: those that carry the marker, and those that do not (any more)."""
    marked, strangers = [], []
    wanted = f"{JOB_MARKER}={entry.marker}".encode()
    for pid, start in entry.processes.items():
        found = _look(pid)
        if found is None or found.start != start or not found.alive:
            continue
        if process_supervisor.LINUX:
            try:
                carried = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                carried = False
        else:
            carried = pid in {known for known, one in process_supervisor.ps_table(wanted.decode()).items() if one.marked}
        if carried:
            marked.append((pid, start))
        elif (again := _look(pid)) is not None and again.start == start and again.alive:
            strangers.append(pid)
    return marked, strangers
