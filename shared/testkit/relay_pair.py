"""One hub and one daemon of the relay on a perfect line, with a consumer that can be slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from pkg import relay_protocol as relay
from testkit.relay_world import DiskTable

Json = Any
TOKEN = "pair-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0pS"


class Pair:
    """Both roles, connected, with one job that runs."""

    def __init__(self, *, payload: Json = None, spill: Callable[[str], relay.Spill | None] | None = None) -> None:
        self.hub = relay.HubProtocol(epoch="epoch", random=Random(1).randbytes)
        self.hub.put_secret("pair", TOKEN, 0.0)
        self.daemon = relay.DaemonProtocol(
            daemon_id="desk",
            key=relay.daemon_key(TOKEN, "desk"),
            incarnation="one",
            random=Random(2).randbytes,
            table=DiskTable("table"),
            spill=spill,
        )
        self.number = 0
        self.told: list[Json] = []
        """Events the consumer has taken."""
        self.started: list[Json] = []
        self.hub_told: list[relay.HubEvent] = []
        self.daemon_told: list[relay.DaemonEvent] = []
        self.hold: set[str] = set()
        """Jobs whose consumer takes nothing."""
        self.waiting: deque[relay.JobEvents] = deque()
        self.reconnect()
        self.job_id = self.start(payload if payload is not None else {"job": True})

    def start(self, payload: Json = None) -> str:
        """One more job."""
        job_id = self.hub.start_job("pair", "desk", payload)
        self.exchange()
        return job_id

    def reconnect(self) -> None:
        """Cut the line, if there is one, and connect again."""
        if self.number:
            self.daemon.disconnected(0.0)
            self.hub.disconnected(self.number, 0.0)
        self.number += 1
        self.hub.accept(self.number, "192.0.2.1", 0.0)
        self.daemon.connect(0.0)
        if self.number > 1:
            while not self.daemon.live:
                self._handshake_step()
        else:
            self.exchange()

    def _handshake_step(self) -> None:
        frame = self.daemon.next_frame()
        if frame is not None:
            self.hub.receive(self.number, frame, 0.0)
        while not self.daemon.live and (answer := self.hub.next_frame(self.number)) is not None:
            self.daemon.receive(answer, 0.0)

    def exchange(self) -> int:
        """Let everything arrive; the bytes that went up."""
        total = 0
        while True:
            frame = self.daemon.next_frame()
            if frame is not None:
                total += len(frame)
                self.hub.receive(self.number, frame, 0.0)
            if not self.answer() and frame is None:
                return total

    def answer(self) -> bool:
        """Let the consumer take what it wants and the hub's frames arrive; whether there were any."""
        for event in self.hub.events():
            self.hub_told.append(event)
            if isinstance(event, relay.JobEvents):
                self.waiting.append(event)
        for _ in range(len(self.waiting)):
            batch = self.waiting.popleft()
            if batch.job_id in self.hold:
                self.waiting.append(batch)
            else:
                self.told += batch.events
                self.hub.consumed(batch.job_id, batch.seq, 0.0)
        moved = False
        while (frame := self.hub.next_frame(self.number)) is not None:
            self.daemon.receive(frame, 0.0)
            moved = True
        for told in self.daemon.events():
            self.daemon_told.append(told)
            if isinstance(told, relay.StartJob):
                self.started.append(told.payload)
        return moved

    def release(self) -> None:
        """Let everything that was held be taken and acknowledged."""
        while True:
            self.exchange()
            self.hub.tick(1.0)
            if not self.answer() and self.exchange() == 0 and not self.waiting:
                return
