"""The relay under everything that goes wrong: cuts, losses, duplicates, injected frames, expired leases, crashes of both sides.

A run is a list of drawn steps in :class:`testkit.relay_world.World`, which knows the truth and compares it with every claim of
the two roles. Bounds are small here, so that parts, windows, full journals and spilled records happen all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pkg import limits
from testkit.relay_world import Machine, World

EXAMPLES = 900
STEPS = (
    *("start",) * 7,
    *("produce",) * 12,
    *("consume",) * 6,
    *("connect",) * 10,
    *("exchange",) * 6,
    *("deliver_up", "deliver_down", "lose") * 2,
    *("tool", "command", "complete", "cancel", "reap", "surrender") * 2,
    *("cut", "half_cut", "hole", "duplicate", "inject"),
    *("crash_hub", "crash_daemon", "crash_stuck", "boot", "secrets"),
    *("second", "minute", "lease", "disk"),
)
NEEDED = (
    "cut",
    "half cut",
    "black hole",
    "lost frame",
    "duplicate frame",
    "injected frame",
    "hub crash",
    "daemon crash",
    "lost: lease",
    "lost: restarted",
    "unconfirmed",
    "unproven leftovers",
    "fence lifted",
    "finished: completed",
    "finished: cancelled",
    "refused: daemon_fenced",
    "held",
    "room again",
    "spilled",
    "parked",
    "injected frames dropped",
    "replayed frames dropped",
)
"""What must have happened at least 20 times in the run, else it proves nothing."""

step = st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(0, 400))


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A relay whose every bound is reached within a few events."""
    monkeypatch.setattr(limits, "RELAY_RECORD_BYTES", 160)
    monkeypatch.setattr(limits, "RELAY_PART_CHARS", 60)
    monkeypatch.setattr(limits, "RELAY_WINDOW_BYTES", 700)
    monkeypatch.setattr(limits, "RELAY_JOURNAL_MEMORY", 900)
    monkeypatch.setattr(limits, "RELAY_JOURNAL_DISK", 900)
    monkeypatch.setattr(limits, "RELAY_ACK_RECORDS", 3)
    monkeypatch.setattr(limits, "RELAY_BATCH", 8)
    yield


def act(world: World, name: str, which: int, much: int) -> None:
    """One step of a run."""
    machine = world.machines[which % len(world.machines)]
    jobs = [job for job in world.jobs.values() if job.machine is machine and job.epoch == world.hub.epoch and not job.ends]
    job = jobs[much % len(jobs)] if jobs else None
    wire = machine.wire
    match name:
        case "start":
            world.start(machine, much)
        case "produce" | "tool" | "complete":
            for job_id in sorted(machine.alive):
                if name == "produce":
                    for turn in range(1 + much % 4):
                        world.produce(machine, job_id, much if turn == 1 else 5)
                elif name == "tool":
                    world.call_tool(machine, job_id)
                else:
                    world.complete(machine, job_id)
                    break
        case "command" if job is not None:
            world.command(job.job_id)
        case "consume" if job is not None:
            world.consume(job)
        case "exchange":
            world.exchange(machine)
        case "deliver_up" | "deliver_down" if wire is not None:
            world.collect()
            world.deliver(wire, up=name == "deliver_up")
        case "cut":
            world.cut(machine)
        case "half_cut":
            world.cut_one_side(machine)
        case "hole" if wire is not None and not wire.hole:
            wire.hole = True
            world.seen["black hole"] += 1
        case "lose" if wire is not None:
            world.collect()
            queue = wire.up if much % 2 else wire.down
            if queue and b"" not in queue:
                queue.popleft()
                world.seen["lost frame"] += 1
        case "duplicate" if wire is not None and wire.passed and wire.number in world.wires:
            replay(world, machine, much)
        case "inject" if wire is not None and wire.number in world.wires and machine.role is not None:
            if machine.role.live:
                forge(world, machine, much)
        case "crash_hub" if much % 2 == 0:
            world.crash_hub()
        case "crash_daemon" if much % 2 == 0:
            world.crash_daemon(machine)
        case "crash_stuck":
            world.crash_daemon(machine)
            world.boot(machine, unproven=True)
        case "boot":
            world.boot(machine)
        case "connect":
            world.boot(machine)
            if wire is not None and wire.hole and much % 2:
                world.cut_one_side(machine)
            world.connect(machine)
            world.exchange(machine)
        case "secrets":
            world.show_secrets()
        case "cancel" if job is not None:
            world.cancel(job)
        case "reap":
            world.reap(machine)
        case "surrender":
            world.surrender(machine)
        case "second":
            world.wait(much % 9)
        case "minute":
            world.wait(40 + much % 30)
        case "lease" if much % 2 == 0:
            world.wait(200.0)
        case "disk":
            world.disk_full = not world.disk_full


def replay(world: World, machine: Machine, much: int) -> None:
    """A frame that has passed already passes again, on the same connection."""
    wire, role = machine.wire, machine.role
    assert wire is not None
    if role is None or not role.live:
        return
    direction, frame = wire.passed[much % len(wire.passed)]
    if not frame.startswith(b'["'):
        return
    world.seen["duplicate frame"] += 1
    if direction == "up":
        world.hub.receive(wire.number, frame, world.now)
    else:
        role.receive(frame, world.now)
    world.drain()


def forge(world: World, machine: Machine, much: int) -> None:
    """Somebody on the network who counts frames and knows job ids writes into the connection, without the key."""
    wire, role = machine.wire, machine.role
    assert wire is not None
    assert role is not None
    jobs = sorted(world.running(machine)) or ["x"]
    job_id = jobs[much % len(jobs)].encode()
    mac = wire.passed[-1][1][2:24] if wire.passed else b"A" * 22
    up = (
        b'{"type":"run.finished","job_id":"%b","outcome":"completed","last":0,"quiescent":true}',
        b'{"type":"run.event","job_id":"%b","seq":1,"records":[{"type":"text","n":77}]}',
        b'{"type":"run.ack","job_id":"%b","seq":1}',
    )
    down = (b'{"type":"run.cancel","job_id":"%b"}', b'{"type":"run.forget","job_id":"%b"}')
    world.hub.receive(wire.number, b'["%b",%d,%b]' % (mac, wire.sealed["up"] + 1, up[much % 3] % job_id), world.now)
    role.receive(b'["%b",%d,%b]' % (mac, wire.sealed["down"] + 1, down[much % 2] % job_id), world.now)
    world.seen["injected frame"] += 1
    world.drain()


def count(world: World) -> None:
    """Add what the roles themselves have counted."""
    every = [world.hub.dropped, *(world.hub.counters(number) for number in world.wires)]
    every += [machine.role.counters for machine in world.machines if machine.role is not None]
    world.seen["injected frames dropped"] += sum(one.injected for one in every)
    world.seen["replayed frames dropped"] += sum(one.replayed for one in every)


@pytest.mark.timeout(600)
def test_whatever_happens_each_event_arrives_once_and_nothing_is_called_stopped_that_lives() -> None:
    """Our rule: exactly once and in order, truthful ends, fences until proof, and all heals; over 500 drawn histories."""
    seen: Counter[str] = Counter()
    ran = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(step, min_size=60, max_size=160), st.booleans(), st.booleans(), st.sampled_from([120.0, 30.0, 0.0]))
    def history(steps: list[tuple[str, int, int]], disk: bool, shared: bool, lease: float) -> None:
        nonlocal ran
        world = World(disk=disk, shared=shared, lease=lease)
        for machine in world.machines:
            world.connect(machine)
            world.exchange(machine)
        for name, which, much in steps:
            act(world, name, which, much)
            world.drain()
            world.check()
        count(world)
        world.settle()
        seen.update(world.seen)
        ran += 1

    history()
    assert ran >= 500
    rare = {name: seen[name] for name in NEEDED if seen[name] < 20}
    print(f"{ran} histories: " + ", ".join(f"{name} {number}" for name, number in sorted(seen.items())))
    assert not rare, f"happened too rarely to prove anything: {rare}"
