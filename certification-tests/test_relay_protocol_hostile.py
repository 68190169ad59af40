"""The relay against those who want to hurt it: hostile daemons, impostor hubs, and whoever writes on the wire."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkg import relay_protocol as relay
from pkg.relay_auth import challenge_frame, transcript
from pkg.relay_frames import Counters, SealedChannel
from testkit.relay_raw import OTHER_TOKEN, TOKEN, Line, RawDaemon
from testkit.relay_world import DiskTable

VICTIM = "dmljdGltLXZpY3RpbS12aQ"
"""The job id of the victim, which the hostile side has guessed."""


class Scene:
    """A victim with a running job, and a hostile daemon: of the same installation, or of another one."""

    def __init__(self, *, same: bool = True) -> None:
        self.line = Line(shared=True)
        self.line.hub.put_secret("north", TOKEN, 0.0)
        self.line.hub.put_secret("south", OTHER_TOKEN, 0.0)
        self.victim = RawDaemon(self.line, "victim").join()
        self.line.hub.start_job("north", "victim", {"text": "work"}, job_id=VICTIM)
        self.victim.say({"type": "run.event", "job_id": VICTIM, "seq": 1, "records": [{"n": 1}, ["mcp", 1, {}]]})
        self.victim.say({"type": "run.ack", "job_id": VICTIM, "seq": 0})
        self.line.hub.events()
        self.hostile = RawDaemon(self.line, "hostile", TOKEN if same else OTHER_TOKEN).join()
        self.own = self.line.hub.start_job("north" if same else "south", "hostile", {})
        self.line.hub.events()
        self.victim.pull()

    def check(self) -> None:
        """The victim's job is as it was and goes on."""
        hub = self.line.hub
        for event in hub.events():
            assert getattr(event, "job_id", "") != VICTIM, event
            assert getattr(event, "daemon_id", "") != "victim", event
        assert self.victim.closed is None
        assert hub.mcp_response(VICTIM, 1, {"answer": 1}), "its tool call still waits for the answer"
        assert hub.command(VICTIM, "steer", {"text": "on"}) == 1
        seen = len(self.victim.heard)
        self.victim.pull()
        (stream,) = [message for message in self.victim.heard[seen:] if message["type"] == "run.command"]
        assert stream["records"][-2:] == [["mcp", 1, {"answer": 1}, ""], ["steer", 1, {"text": "on"}]]
        self.victim.say({"type": "run.event", "job_id": VICTIM, "seq": 3, "records": [{"n": 2}, ["result", 1, True, None]]})
        assert hub.events() == [relay.JobEvents(VICTIM, [{"n": 2}], 4), relay.CommandResult(VICTIM, 1, True, None)]
        self.victim.finished(VICTIM, last=4)
        assert hub.events() == [relay.JobFinished(VICTIM, "completed")]


ABOUT_THE_VICTIM: list[dict[str, Any]] = [
    {"type": "run.event", "job_id": VICTIM, "seq": 3, "records": [{"n": "forged"}]},
    {"type": "run.event", "job_id": VICTIM, "seq": 1, "records": [{"n": "forged"}]},
    {"type": "run.event", "job_id": VICTIM, "seq": 3, "records": [["mcp", 2, {"tool": "x"}]]},
    {"type": "run.event", "job_id": VICTIM, "seq": 3, "records": [["part", "{", True]]},
    {"type": "run.ack", "job_id": VICTIM, "seq": 1},
    {"type": "run.ack", "job_id": VICTIM, "seq": 2**53 - 1},
    {"type": "run.finished", "job_id": VICTIM, "outcome": "completed", "last": 0, "quiescent": True, "error": None},
    {"type": "run.finished", "job_id": VICTIM, "outcome": "failed", "last": 0, "quiescent": False, "error": "x"},
]


@pytest.mark.parametrize("same", [True, False], ids=["same installation", "another installation"])
@pytest.mark.parametrize("message", ABOUT_THE_VICTIM, ids=lambda message: str(message["type"]))
def test_what_a_daemon_says_about_another_s_job_is_counted_and_changes_nothing(message: dict[str, Any], same: bool) -> None:
    """Our rule: a job belongs to its connection; a guessed id is worth nothing, within an installation and across."""
    scene = Scene(same=same)
    scene.hostile.say(message)
    assert scene.line.hub.counters(scene.hostile.number).foreign == 1
    assert scene.hostile.closed is None
    scene.check()


@pytest.mark.parametrize("same", [True, False], ids=["same installation", "another installation"])
def test_a_daemon_cannot_list_another_s_job_as_its_own(same: bool) -> None:
    """Our rule: neither resuming nor quiescence of a foreign job moves or ends it."""
    scene = Scene(same=same)
    token = TOKEN if same else OTHER_TOKEN
    entry = {"job_id": VICTIM, "epoch": "epoch1", "state": "running", "last": 2, "received": 1}
    thief = RawDaemon(scene.line, "thief", token).join(resume=[entry], quiesced=["x"])
    assert thief.heard[-1]["resumed"] == []
    assert thief.heard[-1]["end"] == [VICTIM]
    liar = RawDaemon(scene.line, "liar", token).join(quiesced=[VICTIM])
    liar.finished(VICTIM)
    hub = scene.line.hub
    told = [event for event in hub.events() if getattr(event, "daemon_id", "") not in ("thief", "liar")]
    assert told == []
    scene.check()


def test_frames_of_one_connection_are_noise_on_another() -> None:
    """Our rule: a seal belongs to one connection and direction; recorded frames are dropped and counted."""
    scene = Scene()
    recorded = scene.victim.sent[2:]
    for frame in recorded:
        scene.hostile.push(frame)
        scene.victim.push(frame)
    counters = scene.line.hub.counters
    assert counters(scene.hostile.number).injected == len(recorded)
    assert counters(scene.victim.number).replayed == len(recorded)
    scene.check()


MALFORMED: list[Any] = [
    {"type": "run.event"},
    {"type": "run.event", "job_id": 7, "seq": 1, "records": []},
    {"type": "run.event", "job_id": "x" * 65, "seq": 1, "records": []},
    {"type": "run.ack", "job_id": VICTIM},
    {"type": "run.ack", "job_id": VICTIM, "seq": True},
    {"type": "run.ack", "job_id": VICTIM, "seq": -1},
    {"type": "run.ack", "job_id": VICTIM, "seq": 1e3},
    {"type": "run.ack", "job_id": VICTIM, "seq": 2**53},
    {"type": "run.finished", "job_id": VICTIM, "outcome": "fine", "last": 0, "quiescent": True},
    {"type": "run.finished", "job_id": VICTIM, "outcome": ["completed"], "last": 0, "quiescent": True},
    {"type": "run.finished", "job_id": VICTIM, "outcome": "completed", "last": 0, "quiescent": 1},
    {"type": "daemon.state", "resume": [], "quiesced": []},
    {"type": "daemon.ping"},
    {"type": "daemon.hello"},
    {"type": "run.start", "job_id": VICTIM, "lease": 1},
    {"type": "", "x": 1},
]


@pytest.mark.parametrize("message", MALFORMED, ids=lambda message: json.dumps(message)[:40])
def test_a_malformed_message_costs_its_own_connection_only(message: Any) -> None:
    """Our rule: who does not speak the protocol is closed with the reason; nobody else notices."""
    scene = Scene()
    scene.hostile.say(message)
    assert scene.hostile.closed is not None
    code, reason = scene.hostile.closed
    assert code == 1002
    assert reason.startswith("protocol_error:")
    assert "victim" not in reason
    scene.check()


@pytest.mark.parametrize(
    "records",
    [
        None,
        [],
        [1],
        [[]],
        [["mcp"]],
        [["mcp", "1", {}]],
        [["mcp", 1, {}], ["mcp", 1, {}]],
        [["result", 1, "yes", None]],
        [["unknown", 1, 2]],
        [["part", "[" * 100_000, False]],
        [["part", "\ud800", False]],
        [{"n": number} for number in range(65)],
    ],
    ids=repr,
)
def test_a_malformed_stream_ends_its_own_job_only(records: Any) -> None:
    """Our rule: a break of the protocol within a job ends that job; the connection and all other jobs go on."""
    scene = Scene()
    scene.hostile.say({"type": "run.event", "job_id": scene.own, "seq": 1, "records": records})
    assert relay.JobLost(scene.own, "protocol") in scene.line.hub.events()
    assert scene.hostile.closed is None
    assert scene.hostile.types()[-1] == "run.cancel"
    scene.check()


def test_frames_without_messages_and_raw_noise_do_no_harm() -> None:
    """Our rule: a million tiny frames, half frames and binary are counted; nothing is kept of them."""
    scene = Scene()
    noise = Random(5)
    for _ in range(2000):
        scene.hostile.push(noise.randbytes(noise.randrange(60)))
    scene.hostile.push(b'["' + b"A" * 2_000_000)
    assert scene.line.hub.counters(scene.hostile.number).injected == 2001
    assert scene.hostile.closed is None
    scene.check()


def test_a_daemon_that_never_reads_is_closed() -> None:
    """Our rule: what waits for one connection is bounded."""
    scene = Scene()
    for number in range(5000):
        scene.hostile.say({"type": "daemon.ping", "n": number})
    closing = scene.line.hub.closing(scene.hostile.number)
    assert closing is not None
    assert closing[1].startswith("daemon_not_reading:")
    scene.check()


# ------------------------------------------------------------------ anything at all


names = st.sampled_from(
    ["job_id", "seq", "records", "outcome", "last", "quiescent", "error", "n", "resume", "quiesced", "table"]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.just(2**70),
    st.sampled_from([VICTIM, "OWN", "epoch1", "completed", "lost", "running", "part", "mcp", "result", "start", ""]),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=5), max_leaves=15
)
kinds = st.sampled_from(
    [
        "run.event",
        "run.event",
        "run.ack",
        "run.finished",
        "daemon.state",
        "daemon.ping",
        "daemon.pong",
        "run.start",
        "run.command",
        "run.cancel",
        "run.forget",
        "daemon.ready",
        "daemon.fenced",
        "x",
    ]
)
messages = st.builds(lambda kind, fields: {**fields, "type": kind}, kinds, st.dictionaries(names, values, max_size=6))


def own(value: Any, job_id: str) -> Any:
    """The value with every ``OWN`` replaced by the sender's own job id."""
    return json.loads(json.dumps(value).replace('"OWN"', json.dumps(job_id)))


@settings(max_examples=300, deadline=None)
@given(st.lists(messages, min_size=1, max_size=12), st.booleans())
def test_no_daemon_can_say_anything_that_changes_another_s_job(said: list[Any], same: bool) -> None:
    """Our rule: whatever an authentic daemon sends, the hub raises nothing and the victim's job is as it was."""
    scene = Scene(same=same)
    for message in said:
        scene.hostile.say(own(message, scene.own))
        scene.hostile.pull()
        if scene.line.hub.closing(scene.hostile.number) is not None:
            scene.hostile.gone()
            break
    scene.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(messages, min_size=1, max_size=3), st.lists(messages, max_size=8))
def test_no_job_table_can_harm_another_daemon(first: list[Any], more: list[Any]) -> None:
    """Our rule: the same for what a daemon says while it joins."""
    scene = Scene()
    joining = RawDaemon(scene.line, "joining")
    joining.hello()
    joining.prove()
    for message in first + more:
        joining.say(own({**message, "type": "daemon.state"} if message is first[0] else message, "x"))
    joining.pull()
    joining.gone()
    told = [event for event in scene.line.hub.events() if getattr(event, "daemon_id", "") != "joining"]
    assert told == []
    scene.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=200) | (messages | values).map(lambda value: json.dumps(value).encode()), max_size=6),
    st.booleans(),
)
def test_nothing_before_the_proof_raises_or_reaches_a_job(frames: list[bytes], greeted: bool) -> None:
    """Our rule: without the proof only the handshake is heard."""
    scene = Scene()
    stranger = RawDaemon(scene.line, "stranger")
    if greeted:
        stranger.hello()
        stranger.pull()
    for frame in frames:
        stranger.push(frame)
    assert all(message["type"] in ("hub.challenge", "daemon.parked", "daemon.pong") for message in stranger.heard)
    stranger.gone()
    scene.check()


class ByHandHub:
    """The hub's end of a connection by hand, for a daemon role."""

    def __init__(self) -> None:
        self.key = relay.daemon_key(TOKEN, "desk")
        self.table = DiskTable("table")
        self.role = relay.DaemonProtocol(
            daemon_id="desk", key=self.key, incarnation="one", random=Random(3).randbytes, table=self.table
        )
        self.channel: SealedChannel | None = None

    def join(self, *, last: str = "daemon.ready") -> None:
        """The handshake, and the admission or its refusal."""
        self.role.connect(0.0)
        hello = self.role.next_frame()
        assert hello is not None
        challenge = challenge_frame(b"n" * 24, "epoch1")
        self.role.receive(challenge, 0.0)
        assert self.role.next_frame() is not None
        handshake = transcript(hello, challenge)
        self.channel = handshake.channel(self.key, "hub", Counters())
        self.role.receive(json.dumps({"type": "hub.proof", "proof": handshake.proof(self.key, "hub")}).encode(), 0.0)
        self.say({"type": last, "epoch": "epoch1", "resumed": [], "end": [], "forget": []})
        assert self.role.live == (last == "daemon.ready")

    def say(self, *said: Any) -> None:
        """Send messages in one sealed frame."""
        assert self.channel is not None
        self.role.receive(self.channel.seal([json.dumps(message).encode() for message in said]), 0.0)


@settings(max_examples=250, deadline=None)
@given(st.lists(messages, max_size=12))
def test_no_hub_can_say_anything_that_a_daemon_stumbles_over(said: list[Any]) -> None:
    """Our rule: whatever a proven hub sends, the daemon raises nothing and keeps its table right."""
    hub = ByHandHub()
    hub.join()
    hub.say({"type": "run.start", "job_id": "OWN", "lease": 120})
    hub.say({"type": "run.command", "job_id": "OWN", "seq": 1, "records": [["start", {"work": True}]]})
    assert hub.role.jobs() == ("OWN",)
    for message in said:
        hub.say(message)
        hub.role.emit("OWN", {"n": 1})
        while hub.role.next_frame() is not None:
            pass
    started = {event.job_id for event in hub.role.events() if isinstance(event, relay.StartJob)}
    assert started <= set(hub.table.jobs) | {"OWN"}
    assert set(hub.role.jobs()) <= set(hub.table.jobs)
    hub.role.disconnected(0.0)
    hub.role.tick(1e9)
    for job_id in list(hub.table.jobs):
        hub.role.finish(job_id, "cancelled")
    assert hub.role.jobs() == ()


def test_a_hub_that_never_reads_is_closed() -> None:
    """Our rule: what waits for one connection is bounded at either end."""
    hub = ByHandHub()
    hub.join()
    for number in range(5000):
        hub.say({"type": "daemon.ping", "n": number})
    assert hub.role.closing() == (1002, "protocol_error: the hub does not read")
    assert hub.role.next_frame() is None


def test_a_hub_that_never_stops_commanding_is_closed() -> None:
    """Our rule: 64 commands of a job are open at once, as the hub's own end sees to; an answered one makes room."""
    hub = ByHandHub()
    hub.join()
    hub.say({"type": "run.start", "job_id": "job-1", "lease": 120})
    hub.say({"type": "run.command", "job_id": "job-1", "seq": 1, "records": [["start", {"work": True}]]})

    def command(number: int) -> None:
        records = [["steer", number, "more"]]
        hub.say({"type": "run.command", "job_id": "job-1", "seq": number + 1, "records": records})

    for number in range(1, 65):
        command(number)
    hub.role.command_done("job-1", 1, True)
    command(65)
    assert hub.role.closing() is None
    command(66)
    while hub.role.next_frame() is not None:
        pass
    assert hub.role.closing() == (1002, "protocol_error: too many commands")
    assert len([event for event in hub.role.events() if isinstance(event, relay.Command)]) == 65


def test_a_job_is_in_the_table_before_it_is_started_and_starts_once() -> None:
    """Our rule: first durable; a repeated or late start of a job changes nothing."""
    hub = ByHandHub()
    hub.join()
    start = {"type": "run.start", "job_id": "job-1", "lease": 120}
    record = {"type": "run.command", "job_id": "job-1", "seq": 1, "records": [["start", {"work": True}]]}
    hub.say(start)
    assert hub.table.jobs == {"job-1": "started"}
    hub.role.events()
    hub.say(record)
    hub.say(start)
    hub.say(record)
    assert hub.role.events() == [relay.StartJob("job-1", {"work": True})]
    hub.role.finish("job-1", "completed")
    hub.say({"type": "run.forget", "job_id": "job-1"})
    assert hub.table.jobs == {}


def test_a_job_has_one_start() -> None:
    """Our rule: a second start record of a job breaks the protocol, and starts nothing."""
    hub = ByHandHub()
    hub.join()
    hub.say({"type": "run.start", "job_id": "job-1", "lease": 120})
    for number, payload in ((1, {"work": True}), (2, {"work": "other"})):
        hub.role.events()
        hub.say({"type": "run.command", "job_id": "job-1", "seq": number, "records": [["start", payload]]})
    assert [type(event) for event in hub.role.events()] == [relay.Refused]


def test_a_job_the_hub_does_not_mention_ends() -> None:
    """Our rule: a hub that passes over a resumed job does not have it."""
    hub = ByHandHub()
    hub.join()
    hub.say({"type": "run.start", "job_id": "job-1", "lease": 120})
    hub.say({"type": "run.command", "job_id": "job-1", "seq": 1, "records": [["start", {"work": True}]]})
    hub.role.disconnected(0.0)
    hub.role.events()
    hub.join()
    assert relay.EndJob("job-1", "unknown") in hub.role.events()
    hub.role.finish("job-1", "completed")
    assert hub.table.jobs == {"job-1": "quiesced"}


def test_a_hub_cannot_have_a_running_job_forgotten() -> None:
    """Our rule: the table keeps a job until nothing of it is left, whatever the hub says."""
    hub = ByHandHub()
    hub.join()
    hub.say({"type": "run.start", "job_id": "job-1", "lease": 120})
    hub.say({"type": "run.command", "job_id": "job-1", "seq": 1, "records": [["start", {"work": True}]]})
    hub.say({"type": "run.forget", "job_id": "job-1"})
    assert hub.table.jobs == {"job-1": "started"}
    hub.say({"type": "run.cancel", "job_id": "job-1"})
    hub.say({"type": "run.forget", "job_id": "job-1"})
    assert hub.table.jobs == {"job-1": "started"}
