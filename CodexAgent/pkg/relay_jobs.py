"""What a hub knows of one daemon and of one job: the link, the job, and how a job's stream becomes events for the shell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from pkg import limits
from pkg.relay_admission import Identity, Socket
from pkg.relay_auth import Installation
from pkg.relay_events import CommandResult, DaemonReady, HubEvent, JobEvents, McpRequest, Outcome
from pkg.relay_frames import Counters, FrameError, Json, Message, encode, number_of
from pkg.relay_streams import Incoming, Outgoing, Streamed
from pkg.relay_table import Table


class HubJob(Streamed):
    """One job of one daemon."""

    __slots__ = ("ack_waits", "cancel_at", "commands", "finish", "incoming", "last_command", "lease", "link", "mcp_open")

    def __init__(self, job_id: str, link: Link, lease: float) -> None:
        """``lease`` is seconds it outlives its connection."""
        super().__init__("run.command", job_id, Outgoing(limits.RELAY_COMMAND_JOURNAL))
        self.link = link
        self.lease = lease
        self.incoming = Incoming()
        self.cancel_at = math.inf
        """When a cancelled job counts as unconfirmed; infinite while it is not cancelled."""
        self.finish: tuple[Outcome, int, Json] | None = None
        """The outcome, the last record and the error of a job that ended while records were still on their way."""
        self.commands: set[int] = set()
        self.last_command = 0
        self.mcp_open: set[int] = set()
        self.ack_waits = False
        """Whether it stands in its link's list of acknowledgements."""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled and not answered yet."""
        return self.cancel_at != math.inf

    def cancel(self, until: float) -> None:
        """Nothing of the job is told any more; until then it may prove its end."""
        self.cancel_at = until
        self.commands.clear()
        self.mcp_open.clear()
        self.incoming.drop_parts()
        self.incoming.consume(self.incoming.delivered)

    def receive(self, message: Message, size: int, counters: Counters, told: list[HubEvent]) -> None:
        """Take one ``run.event`` message and tell what it completes; raises :class:`FrameError`."""
        records = message.get("records")
        if type(records) is not list:
            raise FrameError("bad field records")
        incoming = self.incoming
        if self.cancelled:
            incoming.skip(number_of(message, "seq", 1), len(records))
            return
        whole = incoming.accept(number_of(message, "seq", 1), records, size, counters)
        events: list[Json] = []
        for item in whole:
            if type(item) is dict:
                events.append(item)
                continue
            if events:
                self._tell(events, told)
                events = []
            self._special(item, told)
        if events:
            self._tell(events, told)
        incoming.settle()

    def _tell(self, events: list[Json], told: list[HubEvent]) -> None:
        incoming = self.incoming
        incoming.delivered = incoming.received
        told.append(JobEvents(self.job_id, events, incoming.received))

    def _special(self, item: Json, told: list[HubEvent]) -> None:
        if type(item) is not list or len(item) < 3 or type(item[1]) is not int:
            raise FrameError("unknown record")
        kind, number = item[0], item[1]
        if kind == "result" and len(item) == 4 and type(item[2]) is bool:
            if number in self.commands:
                self.commands.discard(number)
                told.append(CommandResult(self.job_id, number, item[2], item[3]))
        elif kind == "mcp" and len(item) == 3:
            if number in self.mcp_open:
                raise FrameError("tool call repeated")
            if len(self.mcp_open) >= limits.RELAY_MCP_OPEN:
                self.out.push(encode(["mcp", number, None, "busy"]), always=True)
            else:
                self.mcp_open.add(number)
                told.append(McpRequest(self.job_id, number, item[2]))
        else:
            raise FrameError("unknown record")


@dataclass(slots=True, eq=False)
class Link:
    """One daemon of one installation: its connection of the moment, its jobs, its fences."""

    installation: Installation
    daemon_id: str
    socket: Socket | None = None
    incarnation: str = ""
    key: bytes = field(default=b"", repr=False)
    """A fingerprint of the key that proved it."""
    table: str = ""
    """The id of the daemon's job table, as last reported."""
    identity: Identity | None = None
    lost_at: float = 0.0
    """When its connection was lost; its leases run from here."""
    jobs: dict[str, HubJob] = field(default_factory=dict)
    fences: dict[str, str] = field(default_factory=dict)
    """Jobs that ended without proof, with the table they were dispatched to."""
    acks: list[HubJob] = field(default_factory=list)
    ack_at: float = math.inf
    candidate: Socket | None = None
    """A second connection that waits for the probe of the first."""
    probe: int = 0
    """The number the first one has to answer."""
    probe_until: float = math.inf

    @property
    def assembling(self) -> int:
        """Bytes of messages of which not every part has arrived."""
        return sum(job.incoming.assembling for job in self.jobs.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to remember of it."""
        return self.socket is None and self.candidate is None and not self.jobs and not self.fences

    def ready(self) -> DaemonReady | None:
        """What the shell is told of it while it is connected."""
        if self.socket is None or self.identity is None:
            return None
        who = self.identity
        return DaemonReady(self.installation, self.daemon_id, self.incarnation, who.features, who.metadata, bool(self.fences))


Fate = Literal["on", "again", "ending", "quiet", "lost", "unconfirmed"]
"""What a daemon's table means for a job: it goes on; it never arrived and is dispatched again; it was cancelled and is about to
end; nothing of it is left; it ended without proof; it was cancelled and its daemon is another one now."""


def fate_of(job: HubJob, table: Table, epoch: str, *, same: bool) -> Fate:
    """Compare a job with the table of a daemon that connects: the ``same`` incarnation, or another one.

    A job that the same incarnation, or another one with the same table, does not list at all has never got there or was
    forgotten: nothing of it can be left.
    """
    entry = table.jobs.get(job.job_id)
    listed_quiet = job.job_id in table.quiesced
    absent = entry is None and not listed_quiet and (same or (bool(table.table) and table.table == job.link.table))
    if job.cancelled:
        return "quiet" if absent or listed_quiet else "ending" if same else "unconfirmed"
    if same and entry is not None and entry.goes_on(epoch, job.out, job.incoming):
        return "on"
    if absent and same and job.incoming.received == 0 and job.out.acked == 0:
        return "again"
    return "quiet" if listed_quiet or absent else "lost"
