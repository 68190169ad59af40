"""One direction of one job: an ordered stream of records that survives its connections.

A job has two such streams, up from the daemon (events, results of commands, tool calls) and down from the hub (the start,
commands, tool results). Every record has a sequence from 1. The sender keeps what is not acknowledged and sends it again from
where the receiver says it stands; the receiver takes each record once and in order.

A record is a JSON object (an event) or an array whose first element says what it is. A message whose JSON is larger than
``RELAY_RECORD_BYTES`` travels as several records ``["part", "<piece of its text>", more]``, each acknowledged by itself.

:class:`Outgoing` guarantees: at most ``RELAY_WINDOW_BYTES`` under way (or one record); at most its bound held, in memory and
then in the :class:`Spill`; what it does not take it refuses, and says so again when there is room. :class:`Incoming`
guarantees: never a record twice, never one out of order, and no more held for a slow consumer than two windows and one message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Protocol

from pkg import limits
from pkg.relay_frames import Channel, Counters, FrameError, Json, Message, decode, encode

PART: Final = "part"


class MessageTooLarge(ValueError):
    """A message is larger than the relay carries; ``size`` and ``most`` are bytes of its JSON."""

    def __init__(self, size: int, most: int) -> None:
        """Both in bytes."""
        self.size = size
        self.most = most
        super().__init__(f"{size} bytes of JSON, at most {most} can be sent")


class Spill(Protocol):
    """Where a stream puts what its memory cannot hold, oldest first; one per job, private to this account."""

    def append(self, sequence: int, record: bytes) -> bool:
        """Keep a record; false when there is no room (a full disk). A later append may use the same sequence again."""
        ...

    def read(self, sequence: int) -> bytes:
        """A kept record; raises ``OSError`` when it cannot be read back."""
        ...

    def discard(self, through: int) -> None:
        """Everything up to this sequence is not needed any more."""
        ...

    def close(self) -> None:
        """Nothing is needed any more."""
        ...


def split(encoded: bytes) -> list[bytes]:
    """The records that carry one encoded message."""
    if len(encoded) <= limits.RELAY_RECORD_BYTES:
        return [encoded]
    step = limits.RELAY_PART_CHARS
    starts = range(0, len(encoded), step)
    return [encode([PART, encoded[at : at + step].decode("ascii"), at + step < len(encoded)]) for at in starts]


class Outgoing:
    """The sending side of a stream."""

    __slots__ = (
        "_bound",
        "_disk",
        "_flight",
        "_flight_bytes",
        "_memory",
        "_queue",
        "_spill",
        "acked",
        "last",
        "refused",
        "sent",
    )

    def __init__(self, bound: int, spill: Spill | None = None) -> None:
        """``bound`` is bytes in memory; ``spill`` takes up to ``RELAY_JOURNAL_DISK`` beyond it."""
        self._bound = bound
        self._spill = spill
        self._flight: deque[bytes | int] = deque()
        self._queue: deque[bytes | int] = deque()
        """Records to send; an int is the size of one that lies in the spill."""
        self._flight_bytes = 0
        self._memory = 0
        self._disk = 0
        self.acked = 0
        self.sent = 0
        self.last = 0
        self.refused = False
        """Whether :meth:`push` refused something since there was room."""

    @property
    def held(self) -> int:
        """Bytes not acknowledged yet."""
        return self._memory + self._disk

    @property
    def sendable(self) -> bool:
        """Whether :meth:`take` would give something now."""
        if not self._queue:
            return False
        return not self._flight or self._flight_bytes + _size(self._queue[0]) <= limits.RELAY_WINDOW_BYTES

    @property
    def roomy(self) -> bool:
        """Whether a sender that was refused should try again."""
        return self.held <= self._bound // 2

    def push(self, encoded: bytes, *, always: bool = False, most: int = limits.RELAY_MESSAGE_BYTES) -> bool:
        """Take one encoded message, or refuse it for now (false).

        ``always`` is for messages that other bounds keep few and small. An empty stream takes any message. Raises
        :class:`MessageTooLarge`.
        """
        size = len(encoded)
        if size > most:
            raise MessageTooLarge(size, most)
        if size <= limits.RELAY_RECORD_BYTES and self._memory + size <= self._bound:
            self._queue.append(encoded)
            self._memory += size
            self.last += 1
            return True
        if self._keep(split(encoded), force=always or not self.held):
            return True
        self.refused = True
        return False

    def _keep(self, records: Sequence[bytes], force: bool) -> bool:
        """All of the records or none."""
        size = sum(map(len, records))
        if self._memory + size > self._bound:
            if self._spill is not None and self._disk + size <= limits.RELAY_JOURNAL_DISK:
                kept = 0
                while kept < len(records) and self._spill.append(self.last + 1 + kept, records[kept]):
                    kept += 1
                if kept == len(records):
                    self._queue.extend(map(len, records))
                    self._disk += size
                    self.last += kept
                    return True
            if not force:
                return False
        self._queue.extend(records)
        self._memory += size
        self.last += len(records)
        return True

    def take(self, most_records: int, most_bytes: int, alone: int) -> tuple[int, list[bytes]] | None:
        """The next records to send with the sequence of the first; raises ``OSError`` when the spill is broken.

        ``most_bytes`` bounds them together; a single one may have ``alone`` bytes.
        """
        queue, flight = self._queue, self._flight
        first = self.sent + 1
        room = limits.RELAY_WINDOW_BYTES - self._flight_bytes
        taken: list[bytes] = []
        total = 0
        while queue and len(taken) < most_records:
            entry = queue[0]
            size = len(entry) if type(entry) is bytes else _size(entry)
            if total + size + len(taken) > (most_bytes if taken else alone) or (total + size > room and flight):
                break
            if type(entry) is bytes:
                taken.append(entry)
            else:
                assert self._spill is not None
                taken.append(self._spill.read(first + len(taken)))
            total += size
            flight.append(queue.popleft())
        if not taken:
            return None
        self._flight_bytes += total
        self.sent += len(taken)
        return first, taken

    def ack(self, through: int) -> None:
        """The receiver has no more need of anything up to ``through``; raises :class:`FrameError` for what was never sent."""
        if through > self.sent:
            raise FrameError("acknowledged what was not sent")
        flight = self._flight
        while self.acked < through:
            entry = flight.popleft()
            self.acked += 1
            size = _size(entry)
            self._flight_bytes -= size
            if type(entry) is bytes:
                self._memory -= size
            else:
                self._disk -= size
                if self._spill is not None:
                    self._spill.discard(self.acked)

    def can_resume(self, received: int, acked: int) -> bool:
        """Whether a receiver of this stream can stand there."""
        return self.acked <= received <= self.last and acked <= received

    def resume(self, received: int, acked: int) -> None:
        """Go on behind ``received``, whatever was sent before; the two must be possible (:meth:`can_resume`)."""
        while self.sent > received:
            entry = self._flight.pop()
            self._queue.appendleft(entry)
            self._flight_bytes -= _size(entry)
            self.sent -= 1
        while self.sent < received:
            entry = self._queue.popleft()
            self._flight.append(entry)
            self._flight_bytes += _size(entry)
            self.sent += 1
        self.ack(max(acked, self.acked))

    def clear(self) -> None:
        """Nothing of the stream will be sent any more."""
        self._flight.clear()
        self._queue.clear()
        self._flight_bytes = self._memory = self._disk = 0
        self.acked = self.sent = self.last
        self.refused = False
        if self._spill is not None:
            self._spill.close()
            self._spill = None


def _size(entry: bytes | int) -> int:
    return entry if isinstance(entry, int) else len(entry)


class Incoming:
    """The receiving side of a stream."""

    __slots__ = ("_ledger", "_parts", "_parts_bytes", "_unconsumed", "acked", "consumed", "delivered", "freed", "received")

    def __init__(self) -> None:
        """An empty stream."""
        self.received = 0
        """The last record that arrived."""
        self.delivered = 0
        """The last record that the consumer has been given and has to report as consumed."""
        self.consumed = 0
        """The last record that the consumer has reported."""
        self.acked = 0
        """What the sender was last told."""
        self.freed = 0
        """Bytes given up since then."""
        self.freed = 0
        """Bytes given up since then."""
        self._parts: list[str] = []
        self._parts_bytes = 0
        self._ledger: deque[tuple[int, int]] = deque()
        self._unconsumed = 0

    @property
    def assembling(self) -> int:
        """Bytes of a message of which not every part has arrived."""
        return self._parts_bytes

    @property
    def unconsumed(self) -> int:
        """Bytes held for the consumer, as they came over the wire."""
        return self._unconsumed

    @property
    def acknowledgeable(self) -> int:
        """What the sender may forget: all that was consumed, and all that nobody has to consume."""
        return self.received if self.consumed >= self.delivered else self.consumed

    def accept(self, first: int, records: list[Json], size: int, counters: Counters) -> list[Json]:
        """The messages that ``records`` complete, in order; raises :class:`FrameError`.

        ``size`` is their share of the frame in bytes, counted against the receiver's bound until consumed.
        """
        if not records or len(records) > limits.RELAY_BATCH:
            raise FrameError("bad field records")
        skip = self.received + 1 - first
        if skip:
            if skip < 0:
                raise FrameError("records are missing")
            counters.duplicate += min(skip, len(records))
            records = records[skip:]
            if not records:
                return records
        self._unconsumed += size
        if self._unconsumed > 2 * limits.RELAY_WINDOW_BYTES + limits.RELAY_FRAME_BYTES:
            raise FrameError("more than the window allows")
        self.received += len(records)
        self._ledger.append((self.received, size))
        if not self._parts:
            for record in records:
                if type(record) is not dict and type(record) is list and record and record[0] == PART:
                    break
            else:
                return records
        return self._assemble(records)

    def _assemble(self, records: list[Json]) -> list[Json]:
        whole: list[Json] = []
        for record in records:
            if type(record) is not list or not record or record[0] != PART:
                if self._parts:
                    raise FrameError("a part is missing")
                whole.append(record)
                continue
            if len(record) != 3 or type(record[1]) is not str or not record[1] or type(record[2]) is not bool:
                raise FrameError("bad part")
            self._parts.append(record[1])
            self._parts_bytes += len(record[1])
            if self._parts_bytes > limits.RELAY_MESSAGE_BYTES:
                raise FrameError("message too large")
            if not record[2]:
                text = "".join(self._parts)
                self.drop_parts()
                whole.append(decode(text))
        return whole

    def skip(self, first: int, count: int) -> None:
        """Records arrived that nobody wants; raises :class:`FrameError` behind a gap."""
        if first > self.received + 1:
            raise FrameError("records are missing")
        self.received = max(self.received, first + count - 1)

    def consume(self, through: int) -> None:
        """The consumer is done with everything up to ``through``."""
        self.consumed = max(self.consumed, min(through, self.delivered))
        self.settle()

    def settle(self) -> None:
        """Give up what is counted for records that nobody has to consume any more."""
        free = self.acknowledgeable
        ledger = self._ledger
        while ledger and ledger[0][0] <= free:
            size = ledger.popleft()[1]
            self._unconsumed -= size
            self.freed += size

    def drop_parts(self) -> None:
        """Forget a message of which not every part has arrived."""
        self._parts.clear()
        self._parts_bytes = 0


# ------------------------------------------------------------------ frames out of many streams


class Streamed:
    """A job as the packer sees it: what it has to send, and how its stream messages begin."""

    __slots__ = ("job_id", "label", "out", "queued")

    def __init__(self, kind: str, job_id: str, out: Outgoing) -> None:
        """``kind`` is the type of its stream messages; ``job_id`` needs no escaping."""
        self.job_id = job_id
        self.out = out
        self.label = f'{{"type":"{kind}","job_id":"{job_id}","seq":'.encode("ascii")
        self.queued = False
        """Whether it waits in the ready list."""


class SpillError(Exception):
    """A job's spill cannot be read back, so its stream cannot go on."""

    def __init__(self, job_id: str) -> None:
        """The job is no longer in the ready list."""
        self.job_id = job_id
        super().__init__("journal unreadable")


def shares(frame: bytes, messages: Sequence[Message], kind: str) -> Iterator[int]:
    """The bytes of each message of one kind in its frame, in order.

    Measured from one job id to the next, however the frame was written; what a sender gains by confusing this for one of
    its jobs it loses for another.
    """
    at = [0]
    for message in messages:
        if message["type"] == kind:
            job_id = message.get("job_id")
            quoted = f'"{job_id}"'.encode("ascii", "replace")
            found = frame.find(quoted, at[-1] + 1)
            at.append(found if found >= 0 else at[-1])
    at = [0, *at[2:], len(frame)]
    return (after - before for before, after in pairwise(at))


def pack(channel: Channel, controls: deque[bytes], ready: deque[Streamed]) -> bytes | None:
    """The next frame: control messages first, then up to ``RELAY_BATCH`` records of the jobs that have some, in turn.

    Takes what is there and never waits for more. Raises :class:`SpillError` before anything was taken for the frame.
    """
    usable = limits.RELAY_FRAME_BYTES - limits.RELAY_FRAME_MARGIN
    streams: list[bytes] = []
    size = 0
    waiting = 0
    for control in controls:
        if size + len(control) > usable:
            break
        size += len(control) + 1
        waiting += 1
    room = limits.RELAY_BATCH
    while ready and room and size < limits.RELAY_FRAME_TARGET:
        job = ready[0]
        try:
            taken = job.out.take(room, limits.RELAY_FRAME_TARGET - size, usable - size)
        except OSError:
            if streams:
                break
            ready.popleft()
            job.queued = False
            raise SpillError(job.job_id) from None
        if taken is None:
            if job.out.sendable:
                break
            ready.popleft()
            job.queued = False
            continue
        ready.popleft()
        first, records = taken
        room -= len(records)
        # One copy of the records, not two: they are most of the frame, and its buffers cost more than its bytes.
        records[0] = b'%b%d,"records":[%b' % (job.label, first, records[0])
        records[-1] += b"]}"
        streams.append(b",".join(records))
        size += len(streams[-1]) + 1
        job.queued = job.out.sendable
        if job.queued:
            ready.append(job)
    parts = [controls.popleft() for _ in range(waiting)]
    parts += streams
    return channel.seal(parts) if parts else None
