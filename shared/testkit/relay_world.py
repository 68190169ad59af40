"""A world for the relay's roles without sockets and clocks: hubs and daemons that crash, a network that cuts, and the truth.

The world knows which processes are really alive and which events were really produced, so that what the roles claim can be
compared with it after every step (:meth:`World.check`). It drives the roles as a shell would and never looks inside them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pkg import relay_protocol as relay

Json = Any

TOKENS = {"east": "east-Zq8vK2mW5xR7tY1uB4nC6dF9gH3jL0pS", "west": "west-aB7cD2eF9gH4iJ6kL1mN8oP3qR5sT0uV"}


class Markers:
    """A hub's disk: what it holds outlives the hub."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, str]] = {}

    def mark(self, installation: Any, daemon_id: str, job_id: str, table: str) -> None:
        self.kept.setdefault((installation, daemon_id), {})[job_id] = table

    def clear(self, installation: Any, daemon_id: str, job_id: str) -> None:
        self.kept.get((installation, daemon_id), {}).pop(job_id, None)

    def pending(self, installation: Any) -> Mapping[str, Mapping[str, str]]:
        return {daemon: dict(jobs) for (owner, daemon), jobs in self.kept.items() if owner == installation and jobs}


class DiskTable:
    """A daemon's disk: its table of jobs outlives the daemon."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.jobs: dict[str, str] = {}

    def started(self, job_id: str) -> None:
        self.jobs[job_id] = "started"

    def quiesced(self, job_id: str) -> None:
        if job_id in self.jobs:
            self.jobs[job_id] = "quiesced"

    def forgotten(self, job_id: str) -> None:
        self.jobs.pop(job_id, None)


class MemorySpill:
    """A job's disk journal; ``full`` refuses, as a full disk does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.records: dict[int, bytes] = {}

    def append(self, sequence: int, record: bytes) -> bool:
        if self.world.disk_full:
            return False
        self.records[sequence] = record
        self.world.seen["spilled"] += 1
        return True

    def read(self, sequence: int) -> bytes:
        return self.records[sequence]

    def discard(self, through: int) -> None:
        for sequence in [number for number in self.records if number <= through]:
            del self.records[sequence]

    def close(self) -> None:
        self.records.clear()


@dataclass(eq=False)
class Wire:
    """One connection: frames under way in both directions. ``hole``: frames vanish and nobody notices."""

    number: int
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    passed: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=8))
    sealed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    """How many sealed frames have arrived, by direction; somebody on the network can count them too."""
    hole: bool = False


@dataclass(eq=False)
class Machine:
    """A workstation: its daemon process of the moment, its disk, its truth."""

    installation: str
    daemon_id: str
    disk: DiskTable
    role: relay.DaemonProtocol | None = None
    wire: Wire | None = None
    incarnations: int = 0
    retry_at: float = 0.0
    stopped: str = ""
    alive: set[str] = field(default_factory=set)
    """Jobs of which a process really lives."""
    ending: list[str] = field(default_factory=list)
    """Jobs whose end was ordered and whose process lives on."""
    held: dict[str, Json] = field(default_factory=dict)
    """Events that found no room, by job."""
    heard: dict[str, list[int]] = field(default_factory=dict)
    """Commands that arrived, by job."""


@dataclass(eq=False)
class Job:
    """The truth about one job."""

    job_id: str
    machine: Machine
    epoch: str
    produced: int = 0
    consumed: list[int] = field(default_factory=list)
    waiting: deque[relay.JobEvents] = field(default_factory=deque)
    completed: bool = False
    cancelled: bool = False
    ends: list[object] = field(default_factory=list)
    commands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    tool_calls: list[int] = field(default_factory=list)


class World:
    """One hub and several machines."""

    def __init__(
        self,
        *,
        seed: int = 0,
        disk: bool = True,
        shared: bool = True,
        lease: float = 120.0,
        machines: int = 2,
        authentic: bool = True,
    ) -> None:
        self.random = Random(0)
        self.seen: Counter[str] = Counter()
        self.shared = shared
        self.lease = lease
        self.authentic = authentic
        self.now = 1000.0
        self.markers = Markers() if disk else None
        self.disk_full = False
        self.hubs = 0
        self.wires: dict[int, Wire] = {}
        self.numbers = 0
        self.jobs: dict[str, Job] = {}
        installations = list(TOKENS) if shared else ["east"]
        self.machines = [
            Machine(installations[number % len(installations)], f"desk{number}", DiskTable(f"table{number}"))
            for number in range(machines)
        ]
        self.hub = self._new_hub()
        for installation in {machine.installation for machine in self.machines}:
            self.hub.put_secret(installation, TOKENS[installation], self.now)
        for machine in self.machines:
            self.boot(machine)

    def bytes_(self, count: int) -> bytes:
        return self.random.randbytes(count)

    # ------------------------------------------------------------------ processes

    def _new_hub(self) -> relay.HubProtocol:
        self.hubs += 1
        return relay.HubProtocol(epoch=f"epoch{self.hubs}", random=self.bytes_, shared=self.shared, markers=self.markers)

    def crash_hub(self) -> None:
        """The hub's process dies and a new one starts, which knows its disk and, after :meth:`show_secrets`, its secrets."""
        self.seen["hub crash"] += 1
        self.drain()
        for wire in list(self.wires.values()):
            self._drop_wire(wire)
        self.wires.clear()
        self.hub = self._new_hub()
        if not self.shared:
            self.show_secrets()

    def show_secrets(self) -> None:
        for installation in sorted({machine.installation for machine in self.machines}):
            self.hub.put_secret(installation, TOKENS[installation], self.now)
        self.drain()

    def crash_daemon(self, machine: Machine) -> None:
        """The daemon's process dies; what it started lives on."""
        if machine.role is None:
            return
        self.seen["daemon crash"] += 1
        self.drain()
        if machine.wire is not None:
            self.hub_loses(machine.wire)
        machine.role, machine.wire = None, None
        machine.ending.clear()
        machine.held.clear()
        self.drain()

    def boot(self, machine: Machine, *, unproven: bool = False) -> None:
        """A daemon's process starts: it ends what an earlier one left (unless it cannot) and knows its table."""
        if machine.role is not None:
            return
        machine.incarnations += 1
        left = [job_id for job_id, state in machine.disk.jobs.items() if state == "started"]
        stuck = [job_id for job_id in left if job_id in machine.alive] if unproven else []
        self.seen["unproven leftovers"] += bool(stuck)
        machine.alive.difference_update(set(left) - set(stuck))
        for job_id in left:
            if job_id not in stuck:
                machine.disk.quiesced(job_id)
        quiesced = [job_id for job_id, state in machine.disk.jobs.items() if state == "quiesced"]
        machine.stopped = ""
        machine.role = relay.DaemonProtocol(
            daemon_id=machine.daemon_id,
            key=relay.daemon_key(TOKENS[machine.installation], machine.daemon_id),
            incarnation=f"{machine.daemon_id}-{machine.incarnations}",
            random=self.bytes_,
            table=machine.disk,
            quiesced=quiesced,
            unproven=stuck,
            spill=lambda _: MemorySpill(self),
            authentic=self.authentic,
        )

    # ------------------------------------------------------------------ the network

    def connect(self, machine: Machine) -> None:
        """Open a connection where there is none; an old one that the daemon has given up may still count at the hub."""
        if machine.role is None or machine.wire is not None or machine.stopped:
            return
        self.numbers += 1
        wire = Wire(self.numbers)
        self.wires[wire.number] = wire
        machine.wire = wire
        self.hub.accept(wire.number, machine.daemon_id, self.now)
        machine.role.connect(self.now)
        self.drain()

    def _drop_wire(self, wire: Wire) -> None:
        for machine in self.machines:
            if machine.wire is wire:
                machine.wire = None
                assert machine.role is not None
                machine.role.disconnected(self.now)
        self.drain()

    def hub_loses(self, wire: Wire) -> None:
        if self.wires.pop(wire.number, None) is not None:
            self.hub.disconnected(wire.number, self.now)

    def cut(self, machine: Machine) -> None:
        """The connection breaks for both; what was under way is lost."""
        wire = machine.wire
        if wire is None:
            return
        self.seen["cut"] += 1
        self._drop_wire(wire)
        self.hub_loses(wire)
        self.drain()

    def cut_one_side(self, machine: Machine) -> None:
        """Only the daemon notices that the connection broke."""
        if machine.wire is not None:
            self.seen["half cut"] += 1
            machine.wire.hole = True
            self._drop_wire(machine.wire)

    def collect(self) -> None:
        """Move what the roles want to send onto the wires, and close what they want closed."""
        for machine in self.machines:
            wire, role = machine.wire, machine.role
            if wire is None or role is None:
                continue
            while (frame := role.next_frame()) is not None:
                if not wire.hole:
                    wire.up.append(frame)
            if role.closing() is not None:
                wire.up.append(b"")
                machine.wire = None
                role.disconnected(self.now)
        for number in sorted(self.hub.output() | set(self.wires)):
            wire = self.wires.get(number)
            if wire is None:
                continue
            while (frame := self.hub.next_frame(number)) is not None:
                if not wire.hole:
                    wire.down.append(frame)
            closing = self.hub.closing(number)
            if closing is not None:
                self.hub_loses(wire)
                if not wire.hole:
                    wire.down.append(b"%d %b" % (closing[0], closing[1].encode()))
                    wire.down.append(b"")

    def deliver(self, wire: Wire, *, up: bool) -> bool:
        """Let one frame arrive; whether there was one."""
        queue = wire.up if up else wire.down
        if not queue:
            return False
        frame = queue.popleft()
        machine = next((one for one in self.machines if one.wire is wire), None)
        if up:
            if frame == b"":
                self.hub_loses(wire)
            elif wire.number in self.wires:
                wire.passed.append(("up", frame))
                wire.sealed["up"] += frame.startswith(b'["')
                self.hub.receive(wire.number, frame, self.now)
        elif machine is not None and machine.role is not None:
            if queue and queue[-1] == b"" and len(queue) == 1:
                code, _, reason = frame.decode().partition(" ")
                machine.wire = None
                machine.role.disconnected(self.now, int(code), reason)
            else:
                wire.passed.append(("down", frame))
                wire.sealed["down"] += frame.startswith(b'["')
                machine.role.receive(frame, self.now)
        self.drain()
        return True

    def exchange(self, machine: Machine, most: int = 1000) -> None:
        """Let frames arrive in both directions until nothing is under way."""
        for _ in range(most):
            self.drain()
            self.collect()
            wires = list(self.wires.values()) + ([machine.wire] if machine.wire is not None else [])
            wire = machine.wire
            moved = False
            if wire is not None:
                moved = self.deliver(wire, up=True)
                moved = self.deliver(wire, up=False) or moved
            for other in wires:
                if other is not wire and other.up:
                    moved = self.deliver(other, up=True) or moved
            if not moved:
                return
        raise AssertionError("the roles talk without end")

    # ------------------------------------------------------------------ the shells

    def drain(self) -> None:
        """Act on what the roles tell, as their shells would, and compare each claim with the truth."""
        for machine in self.machines:
            if machine.role is not None:
                for event in machine.role.events():
                    self._daemon_event(machine, event)
        for told in self.hub.events():
            self._hub_event(told)

    def _daemon_event(self, machine: Machine, event: relay.DaemonEvent) -> None:
        assert machine.role is not None
        match event:
            case relay.StartJob(job_id, payload):
                assert payload["job"], "the payload arrives whole"
                assert job_id not in machine.heard, "a job is started once"
                machine.heard[job_id] = []
                machine.alive.add(job_id)
            case relay.EndJob(job_id, reason):
                self.seen[f"ended: {reason}"] += 1
                if job_id in machine.alive:
                    machine.ending.append(job_id)
                else:
                    machine.role.finish(job_id, "cancelled")
            case relay.Command(job_id, command_id, verb, value):
                assert verb == "steer"
                assert value == {"text": f"command {command_id}"}
                machine.heard[job_id].append(command_id)
                machine.role.command_done(job_id, command_id, True, command_id)
            case relay.McpResponse(_, request_id, payload, error):
                assert error or payload == {"answer": request_id}
            case relay.Writable(job_id):
                self.seen["room again"] += 1
                if (event_held := machine.held.pop(job_id, None)) is not None:
                    self._emit(machine, self.jobs[job_id], event_held)
            case relay.Refused(reason, fatal):
                self.seen["refused"] += 1
                if fatal:
                    machine.stopped = reason
            case relay.Parked():
                self.seen["parked"] += 1

    def _hub_event(self, event: relay.HubEvent) -> None:
        job = self.jobs.get(getattr(event, "job_id", ""))
        match event:
            case relay.JobEvents():
                assert job is not None
                assert not job.cancelled, "nothing is told after a cancel"
                assert not job.ends, "nothing is told after the end"
                job.waiting.append(event)
            case relay.CommandResult(_, command_id, ok, value):
                assert job is not None
                assert ok
                assert value == command_id
                job.results.append(command_id)
            case relay.McpRequest(job_id, request_id, payload):
                assert job is not None
                assert payload == {"call": len(job.tool_calls)}
                job.tool_calls.append(request_id)
                self.hub.mcp_response(job_id, request_id, {"answer": request_id})
            case relay.JobFinished(job_id, outcome):
                assert job is not None
                job.ends.append(event)
                assert job_id not in job.machine.alive, "an end is told only when nothing is left"
                told = len(job.consumed) + sum(len(batch.events) for batch in job.waiting)
                assert outcome != "completed" or told == job.produced, "every event is told before the end"
                self.seen[f"finished: {outcome}"] += 1
            case relay.JobLost(job_id, reason, proven):
                assert job is not None
                job.ends.append(event)
                assert not proven or job_id not in job.machine.alive, "a proof is true"
                self.seen[f"lost: {reason}"] += 1
            case relay.JobUnconfirmed():
                assert job is not None
                job.ends.append(event)
                self.seen["unconfirmed"] += 1
            case relay.FenceLifted(installation, daemon_id):
                machine = next(one for one in self.machines if one.daemon_id == daemon_id)
                assert installation == machine.installation
                self.seen["fence lifted"] += 1

    def running(self, machine: Machine) -> set[str]:
        """Jobs of the present hub on this machine that are not over for it."""
        return {
            job.job_id for job in self.jobs.values() if job.machine is machine and job.epoch == self.hub.epoch and not job.ends
        }

    def start(self, machine: Machine, size: int = 0) -> str | None:
        """Try to start a job; its id, or ``None`` when it was refused."""
        before = self.running(machine)
        try:
            payload = {"job": True, "filler": "x" * size}
            job_id = self.hub.start_job(machine.installation, machine.daemon_id, payload, lease=self.lease)
        except relay.RelayRefused as exc:
            self.seen[f"refused: {exc.code}"] += 1
            return None
        assert machine.alive <= before, "no job starts where something of an ended one lives"
        self.jobs[job_id] = Job(job_id, machine, self.hub.epoch)
        self.seen["started"] += 1
        return job_id

    def _emit(self, machine: Machine, job: Job, event: Json) -> None:
        assert machine.role is not None
        if not machine.role.emit(job.job_id, event):
            machine.held[job.job_id] = event
            self.seen["held"] += 1

    def produce(self, machine: Machine, job_id: str, size: int = 0) -> None:
        """The job's agent says something, unless it is held back."""
        if machine.role is None or job_id not in machine.alive or job_id in machine.held or job_id in machine.ending:
            return
        job = self.jobs[job_id]
        event = {"type": "text", "n": job.produced, "filler": "é" * size}
        job.produced += 1
        self._emit(machine, job, event)

    def call_tool(self, machine: Machine, job_id: str) -> None:
        """The job's agent calls a tool."""
        if machine.role is not None and job_id in machine.alive and job_id not in machine.ending:
            calls = machine.heard.setdefault(f"calls of {job_id}", [])
            if machine.role.mcp_request(job_id, {"call": len(calls)}):
                calls.append(len(calls))

    def command(self, job_id: str) -> None:
        job = self.jobs[job_id]
        try:
            number = len(job.commands) + 1
            assert self.hub.command(job_id, "steer", {"text": f"command {number}"}) == number
            job.commands.append(number)
        except relay.RelayRefused as exc:
            self.seen[f"refused: {exc.code}"] += 1

    def consume(self, job: Job) -> None:
        """The job's consumer takes what waits for it, once."""
        if job.waiting and job.epoch == self.hub.epoch:
            batch = job.waiting.popleft()
            job.consumed.extend(event["n"] for event in batch.events)
            self.hub.consumed(job.job_id, batch.seq, self.now)
            self.drain()

    def complete(self, machine: Machine, job_id: str) -> None:
        """The job's agent is done."""
        if machine.role is None or job_id not in machine.alive or job_id in machine.held or job_id in machine.ending:
            return
        machine.alive.discard(job_id)
        self.jobs[job_id].completed = True
        machine.role.finish(job_id, "completed")
        self.drain()

    def cancel(self, job: Job) -> None:
        if job.epoch == self.hub.epoch and not job.ends:
            job.cancelled = True
            job.waiting.clear()
            self.hub.cancel(job.job_id, self.now)
            self.seen["cancelled"] += 1
            self.drain()

    def reap(self, machine: Machine) -> None:
        """The process whose end was ordered first is really gone."""
        if machine.role is not None and machine.ending:
            job_id = machine.ending.pop(0)
            machine.alive.discard(job_id)
            machine.held.pop(job_id, None)
            machine.role.finish(job_id, "cancelled")
            self.drain()

    def surrender(self, machine: Machine) -> None:
        """The daemon says that it cannot end a process."""
        if machine.role is not None and machine.ending:
            self.seen["surrendered"] += 1
            machine.role.finish(machine.ending[0], "failed", quiescent=False)
            self.drain()

    def wait(self, seconds: float) -> None:
        """Let time pass, with every deadline kept on the way."""
        end = self.now + seconds
        for _ in range(10_000):
            due = [self.hub.deadline()] + [machine.role.deadline() for machine in self.machines if machine.role is not None]
            step = min(*due, end) if due else end
            self.now = max(self.now, min(step, end))
            self.hub.tick(self.now)
            for machine in self.machines:
                if machine.role is not None:
                    machine.role.tick(self.now)
            self.drain()
            self.collect()
            self.drain()
            if self.now >= end:
                return
        raise AssertionError("time stands still")

    # ------------------------------------------------------------------ the truth

    def check(self) -> None:
        """What holds at every moment."""
        for job in self.jobs.values():
            assert job.consumed == list(range(len(job.consumed))), "each event once and in order"
            assert len(job.consumed) <= job.produced
            assert len(job.ends) <= 1, "a job ends once"
            heard = job.machine.heard.get(job.job_id, [])
            assert heard == list(range(1, len(heard) + 1)), "each command once and in order"
            assert job.results == heard[: len(job.results)]

    def settle(self) -> None:
        """Let everything heal: connections, processes, consumers; then what must hold in the end."""
        self.disk_full = False
        for machine in self.machines:
            if machine.stopped and machine.role is not None:
                self.crash_daemon(machine)
        for turn in range(40):
            self.show_secrets()
            for machine in self.machines:
                self.boot(machine)
                if machine.wire is not None and machine.wire.hole:
                    self.cut(machine)
                self.connect(machine)
                self.exchange(machine)
                while machine.ending and machine.role is not None:
                    self.reap(machine)
                if machine.role is not None and machine.role.live:
                    for job_id in sorted(machine.alive - set(self.running(machine)) - set(machine.role.jobs())):
                        machine.alive.discard(job_id)
                        machine.role.finish(job_id, "cancelled")
                self.exchange(machine)
                for job in self.jobs.values():
                    while job.waiting and job.epoch == self.hub.epoch:
                        self.consume(job)
                self.exchange(machine)
            # A frame taken away as the last one shows only when the next one comes: with the heartbeat.
            self.wait(25.0 if turn < 3 else 1.0)
            self.check()
            if turn > 3 and all(self._calm(machine) for machine in self.machines):
                break
        for machine in self.machines:
            assert self._calm(machine), (machine, self.hub.fences(machine.installation, machine.daemon_id))
            assert machine.alive <= self.running(machine), "nothing lives that no hub knows"
            assert self.hub.fences(machine.installation, machine.daemon_id) == ()
        for job in self.jobs.values():
            running = not job.ends and job.epoch == self.hub.epoch
            if not job.cancelled and running:
                assert job.consumed == list(range(job.produced)), "every event has arrived"
                assert job.results == job.commands, "every command is answered"
            assert not (running and job.completed), "a completed job has ended"
        for machine in self.machines:
            assert self.start(machine) is not None, "everybody may work again"
            self.exchange(machine)

    def _calm(self, machine: Machine) -> bool:
        live = machine.role is not None and machine.role.live
        left = any(job.waiting for job in self.jobs.values() if job.machine is machine and job.epoch == self.hub.epoch)
        fenced = self.hub.fences(machine.installation, machine.daemon_id)
        known = {job_id for job_id in self.running(machine) if not self.jobs[job_id].cancelled}
        return live and not machine.ending and not machine.held and not left and not fenced and machine.alive <= known
