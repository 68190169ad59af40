"""What a daemon says about its jobs when it connects: those it has, where their streams stand, and those that are quiet.

``resume`` lists every job of which something may be running or undelivered; ``quiesced`` those of which nothing is left
running, until the hub has told the daemon to forget them. A job in neither was never received, or is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from pkg import limits
from pkg.relay_frames import FrameError, Message, job_id_of, names_of, number_of, objects_of, text_of
from pkg.relay_streams import Incoming, Outgoing

EntryState = Literal["running", "ending", "finished"]
"""``finished``: nothing is left running and the last records wait for the hub."""

_STATES: Final = ("running", "ending", "finished")


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of a daemon."""

    job_id: str
    epoch: str
    """The hub that started it."""
    state: EntryState
    last: int
    """The last record of its stream to the hub."""
    received: int
    """The last record of the hub's stream to it."""

    def goes_on(self, epoch: str, out: Outgoing, incoming: Incoming) -> bool:
        """Whether a hub of this epoch, whose streams of the job stand there, goes on with it."""
        return (
            self.epoch == epoch
            and self.state != "ending"
            and self.last >= incoming.received
            and out.can_resume(self.received, self.received)
        )

    def message(self) -> Message:
        """Its form on the wire."""
        return {
            "job_id": self.job_id,
            "epoch": self.epoch,
            "state": self.state,
            "last": self.last,
            "received": self.received,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """All of it. ``table`` is the id of the durable table behind it, ``""`` when the daemon keeps none."""

    jobs: Mapping[str, Entry]
    quiesced: frozenset[str]
    table: str = ""

    def message(self) -> Message:
        """Its form on the wire."""
        return {
            "type": "daemon.state",
            "table": self.table,
            "resume": [entry.message() for entry in self.jobs.values()],
            "quiesced": sorted(self.quiesced),
        }


def table_of(message: Message) -> Table:
    """The table of a ``daemon.state`` message (or a plain hello); raises :class:`FrameError`."""
    jobs: dict[str, Entry] = {}
    for item in objects_of(message, "resume", limits.RELAY_TABLE):
        state = text_of(item, "state", 16)
        if state not in _STATES:
            raise FrameError("bad field state")
        job_id = job_id_of(item)
        epoch = text_of(item, "epoch", 64) if item.get("epoch") else ""
        jobs[job_id] = Entry(job_id, epoch, cast(EntryState, state), number_of(item, "last"), number_of(item, "received"))
    quiesced = frozenset(names_of(message, "quiesced", 2 * limits.RELAY_TABLE, 64))
    return Table(jobs, quiesced, text_of(message, "table", 64) if message.get("table") else "")
