"""The relay's frames and streams: seals, parts, acknowledgements, replay, backpressure, batching."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkg import limits
from pkg import relay_protocol as relay
from pkg.relay_frames import Counters, FrameError, PlainChannel, SealedChannel, decode, encode
from pkg.relay_streams import Incoming, Outgoing, shares, split
from testkit.relay_pair import Pair
from testkit.relay_raw import Line, RawDaemon
from testkit.relay_world import MemorySpill, World

ONE, TWO = b"1" * 32, b"2" * 32


def ends() -> tuple[SealedChannel, SealedChannel, Counters]:
    """Both ends of a connection and the second one's counters."""
    counters = Counters()
    return SealedChannel(ONE, TWO, Counters()), SealedChannel(TWO, ONE, counters), counters


# ------------------------------------------------------------------ JSON


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values | st.text(alphabet=st.characters(codec=None, categories=["Cs", "Lo", "So", "Cc"])))
def test_whatever_is_json_comes_back_the_same(value: Any) -> None:
    """Our rule: frames are ASCII, and lone surrogates, NUL and emoji travel as they are."""
    assert encode(value).isascii()
    assert decode(encode(value)) == value


@given(json_values)
def test_the_fast_encoder_writes_what_the_standard_one_does(value: Any) -> None:
    """Our rule: the encoder built once is only faster."""
    assert encode(value) == json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", {"a": object()}])
def test_what_is_no_json_value_is_not_sent(value: Any) -> None:
    """Our rule: the producer hears of it, not the other side."""
    with pytest.raises(TypeError, match="no JSON value"):
        encode(value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b'"\xc3"', b"NaN", b"[Infinity]", b"1" * 5000, b"[" * 100_000, b'{"a":' * 90_000]
)
def test_what_is_no_json_is_one_kind_of_error(data: bytes) -> None:
    """Our rule: malformed, deeply nested and non-UTF-8 input raises nothing else."""
    with pytest.raises(FrameError):
        decode(data)


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}])
def test_numbers_that_json_lacks_are_not_sent(value: Any) -> None:
    """Our rule: the producer hears of it, not the other side."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(value)


def test_a_value_nested_too_deeply_is_not_sent() -> None:
    """Our rule: the producer hears of it, not the other side."""
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        encode(value)
    while value:
        value = value[0]


# ------------------------------------------------------------------ the seal


def test_a_sealed_frame_is_one_json_array() -> None:
    """The wire contract: MAC, sequence, messages."""
    one, two, _ = ends()
    frame = one.seal([b'{"type":"a"}', b'{"type":"b"}'])
    mac, sequence, *messages = json.loads(frame)
    assert (len(mac), sequence, messages) == (22, 1, [{"type": "a"}, {"type": "b"}])
    assert two.open(frame) == messages


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_anywhere_drops_the_frame_and_nothing_else(at: int, change: int) -> None:
    """Our rule: what fails the MAC is counted; the connection goes on with the genuine frame."""
    one, two, counters = ends()
    frame = one.seal([b'{"type":"run.event","job_id":"j","seq":1,"records":[{"n":1}]}'])
    forged = bytearray(frame)
    forged[at % len(frame)] ^= change
    assert two.open(bytes(forged)) is None
    assert counters.injected == 1
    assert two.open(frame) is not None


def test_a_frame_is_good_for_one_direction_one_connection_and_one_time() -> None:
    """Our rule: reflected and foreign frames fail the MAC, repeated ones their sequence."""
    one, two, counters = ends()
    frame = one.seal([b'{"type":"a"}'])
    assert one.open(frame) is None
    assert SealedChannel(TWO, b"3" * 32, counters).open(frame) is None
    assert two.open(frame) is not None
    assert two.open(frame) is None
    assert (counters.injected, counters.replayed) == (1, 1)


def test_a_missing_frame_ends_the_connection() -> None:
    """Our rule: WebSocket loses nothing, so a gap means that somebody took a frame away."""
    one, two, _ = ends()
    one.seal([b'{"type":"a"}'])
    with pytest.raises(FrameError, match="frames are missing"):
        two.open(one.seal([b'{"type":"b"}']))


@pytest.mark.parametrize("parts", [[], [b"1"], [b"[]"], [b"{}"], [b'{"type":1}'], [b"{"], [b"[" * 50_000]])
def test_an_authentic_frame_of_something_else_is_an_error(parts: list[bytes]) -> None:
    """Our rule: whoever has the key and does not speak the protocol loses the connection."""
    one, two, _ = ends()
    with pytest.raises(FrameError):
        two.open(one.seal(parts))
    with pytest.raises(FrameError):
        PlainChannel().open(b"[%b]" % b",".join(parts))


def test_a_frame_over_a_megabyte_is_dropped_unread() -> None:
    """Our rule: 1 MiB is the most, authentic or not."""
    one, two, counters = ends()
    assert two.open(one.seal([b'{"type":"a","x":"%b"}' % (b"x" * 1024 * 1024)])) is None
    assert counters.injected == 1


# ------------------------------------------------------------------ streams


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bounds that few records reach."""
    monkeypatch.setattr(limits, "RELAY_RECORD_BYTES", 100)
    monkeypatch.setattr(limits, "RELAY_PART_CHARS", 40)
    monkeypatch.setattr(limits, "RELAY_WINDOW_BYTES", 300)
    monkeypatch.setattr(limits, "RELAY_JOURNAL_DISK", 400)
    yield


@pytest.mark.usefixtures("small")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "push", "take", "take", "ack", "resume", "disk"]), st.integers(0, 250)), max_size=80
    )
)
def test_a_stream_gives_every_record_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    """Our rule: pushes, parts, acknowledgements, reconnects and spilling never lose, repeat or reorder anything."""
    world = World(machines=0, shared=False)
    out, incoming = Outgoing(400, MemorySpill(world)), Incoming()
    pushed: list[str] = []
    arrived: list[str] = []
    under_way: list[tuple[int, list[bytes]]] = []

    def arrive(first: int, records: list[bytes]) -> None:
        arrived.extend(item["text"] for item in incoming.accept(first, [decode(one) for one in records], 0, Counters()))

    for name, much in steps:
        if name == "push":
            text = chr(97 + len(pushed) % 26) * much
            if out.push(encode({"text": text})):
                pushed.append(text)
            else:
                assert out.held
        elif name == "take" and (taken := out.take(1 + much % 8, 300, 10_000)) is not None:
            under_way.append(taken)
            if much % 2:
                arrive(*under_way.pop(0))
        elif name == "ack":
            out.ack(max(out.acked, incoming.received - much % 3))
        elif name == "resume":
            under_way.clear()
            assert out.can_resume(incoming.received, out.acked)
            out.resume(incoming.received, out.acked)
        elif name == "disk":
            world.disk_full = not world.disk_full
        assert out.sent - out.acked >= 0
        assert out.held <= 400 + 400 + 300 or out.acked < out.last
    out.resume(incoming.received, out.acked)
    while True:
        while (taken := out.take(8, 300, 10_000)) is not None:
            arrive(*taken)
        if out.acked == incoming.received:
            break
        out.ack(incoming.received)
    assert arrived == pushed
    assert out.held == 0


def test_records_that_came_before_are_dropped_and_counted() -> None:
    """Our rule: a sender that repeats itself changes nothing, also in the middle of a message."""
    incoming, counters = Incoming(), Counters()
    assert incoming.accept(1, [{"n": 1}, {"n": 2}], 10, counters) == [{"n": 1}, {"n": 2}]
    assert incoming.accept(1, [{"n": 1}, {"n": 2}, {"n": 3}], 10, counters) == [{"n": 3}]
    assert incoming.accept(2, [{"n": "other"}], 10, counters) == []
    assert (counters.duplicate, incoming.received) == (3, 3)
    with pytest.raises(FrameError, match="records are missing"):
        incoming.accept(5, [{"n": 5}], 10, counters)


@pytest.mark.parametrize("record", [["part"], ["part", 1, True], ["part", "", True], ["part", "x", 1], ["part", "{", False]])
def test_a_bad_part_is_an_error(record: Any) -> None:
    """Our rule: a message in parts is text pieces and one end."""
    with pytest.raises(FrameError):
        Incoming().accept(1, [record], 10, Counters())


def test_a_record_between_two_parts_is_an_error() -> None:
    """Our rule: the parts of a message follow each other."""
    with pytest.raises(FrameError, match="part is missing"):
        Incoming().accept(1, [["part", '{"a":', True], {"n": 1}], 10, Counters())


def test_acknowledging_what_was_never_sent_is_an_error() -> None:
    """Our rule: nobody frees what is not his."""
    out = Outgoing(1000)
    out.push(b"{}")
    with pytest.raises(FrameError):
        out.ack(1)
    assert not out.can_resume(2, 0)
    assert not out.can_resume(0, 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["run.event", "run.ack"]), st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=9
    )
)
def test_what_messages_weigh_in_a_frame_adds_up(items: list[tuple[str, int, int]]) -> None:
    """Our rule: a job is charged for its own records, so a small one beside a large one never pays for it."""
    messages = [{"type": kind, "job_id": f"job-{job}", "records": ["x" * size]} for kind, job, size in items]
    frame = json.dumps(["A" * 22, 1, *messages]).encode()
    sizes = list(shares(frame, messages, "run.event"))
    streams = [size for kind, _, size in items if kind == "run.event"]
    assert len(sizes) == max(1, len(streams))
    assert sum(sizes) == len(frame)
    if len(streams) == len(items):
        assert all(abs(found - size) < 200 for found, size in zip(sizes, streams, strict=True))


# ------------------------------------------------------------------ large and many


@pytest.mark.parametrize("size", [1024 * 1024 - 1, 1024 * 1024, 1024 * 1024 + 1, 8 * 1024 * 1024, 32 * 1024 * 1024 - 40])
def test_a_large_event_travels_in_parts_that_are_acknowledged_singly(size: int) -> None:
    """Our rule: no frame over 1 MiB, up to 32 MiB a message, and memory is given back part by part."""
    pair = Pair()
    text = '"é\\' * (size // 10)
    assert pair.daemon.emit(pair.job_id, {"type": "text", "text": text})
    held = pair.daemon.held(pair.job_id)
    least = held
    frames = 0
    while (frame := pair.daemon.next_frame()) is not None:
        assert len(frame) <= 1024 * 1024
        frames += 1
        pair.hub.receive(1, frame, 0.0)
        pair.answer()
        if not pair.told:
            least = min(least, pair.daemon.held(pair.job_id))
    assert [event["text"] for event in pair.told] == [text]
    assert frames > 3
    assert least < held / 2, "memory is given back before the message is whole"


def test_a_message_over_32_mib_is_refused_before_anything_of_it_is_sent() -> None:
    """Our rule: the producer hears of it and can shorten; the connection and the job live on."""
    pair = Pair()
    with pytest.raises(relay.MessageTooLarge) as caught:
        pair.daemon.emit(pair.job_id, {"text": "x" * (40 * 1024 * 1024)})
    assert caught.value.most == 32 * 1024 * 1024
    with pytest.raises(relay.MessageTooLarge):
        pair.hub.command(pair.job_id, "prompt", "x" * (33 * 1024 * 1024))
    assert pair.daemon.next_frame() is None
    pair.daemon.emit(pair.job_id, {"n": 1})
    pair.exchange()
    assert pair.told == [{"n": 1}]


def test_a_large_start_reaches_the_daemon_whole() -> None:
    """Our rule: pictures in a prompt are no special case."""
    pair = Pair(payload={"picture": "é" * 3_000_000})
    assert pair.started == [{"picture": "é" * 3_000_000}]


def test_after_a_cut_a_large_event_goes_on_where_it_stopped() -> None:
    """Our rule: parts that have arrived are not sent again."""
    pair = Pair()
    pair.daemon.emit(pair.job_id, {"text": "x" * 4_000_000})
    first = pair.daemon.next_frame()
    assert first is not None
    pair.hub.receive(1, first, 0.0)
    pair.reconnect()
    rest = pair.exchange()
    assert [len(event["text"]) for event in pair.told] == [4_000_000]
    assert rest < 4_300_000 - len(first) + 20_000
    assert pair.hub.counters(pair.number).duplicate == 0


def test_waiting_events_share_a_frame_and_a_single_one_never_waits() -> None:
    """Our rule: up to 64 events of what is there; nothing waits for more."""
    pair = Pair()
    pair.daemon.emit(pair.job_id, {"n": 0})
    assert pair.daemon.next_frame() is not None
    for number in range(200):
        pair.daemon.emit(pair.job_id, {"n": number})
    frames = []
    while (frame := pair.daemon.next_frame()) is not None:
        frames.append(json.loads(frame))
    assert [sum(len(message.get("records", ())) for message in frame[2:]) for frame in frames] == [64, 64, 64, 8]


def test_many_jobs_take_turns_and_a_control_message_goes_first() -> None:
    """Our rule: no job keeps another one waiting, and no stream keeps a cancel waiting."""
    pair = Pair()
    second = pair.start()
    for number in range(500):
        pair.daemon.emit(pair.job_id, {"n": number, "filler": "x" * 3000})
    pair.daemon.emit(second, {"n": 0})
    pair.daemon.finish(second, "completed")
    first = json.loads(pair.daemon.next_frame() or b"null")
    assert first[2]["type"] == "run.finished"
    following = json.loads(pair.daemon.next_frame() or b"null")
    assert following[2]["job_id"] == second
    assert len(json.dumps(first)) < 300_000


def test_a_slow_consumer_bounds_hub_and_daemon_and_hurts_no_other_job() -> None:
    """Our rule: 2 MiB under way, 16 MiB in memory, 64 MiB on disk, then the agent is held back; all arrives in the end."""
    world = World(machines=0, shared=False)
    pair = Pair(spill=lambda job_id: MemorySpill(world))
    pair.hold.add(pair.job_id)
    other = pair.start()
    event = {"text": "x" * 100_000}
    taken = 0
    while pair.daemon.emit(pair.job_id, event):
        taken += 1
        pair.exchange()
    size = len(encode(event))
    assert 0 <= 80 * 1024 * 1024 - pair.daemon.held(pair.job_id) < 2 * size
    assert world.seen["spilled"] > 600
    waiting = sum(len(batch.events) for batch in pair.waiting)
    assert waiting * size <= 2 * 1024 * 1024
    pair.daemon.emit(other, {"n": 1})
    pair.exchange()
    assert pair.told == [{"n": 1}]
    pair.hold.clear()
    pair.release()
    assert relay.Writable(pair.job_id) in pair.daemon_told
    assert len(pair.told) == 1 + taken
    assert pair.daemon.held(pair.job_id) == 0


def test_a_journal_without_a_disk_holds_the_producer_at_its_memory() -> None:
    """Our rule: 16 MiB, and what was refused is not half kept."""
    pair = Pair()
    pair.hold.add(pair.job_id)
    event = {"text": "x" * 700_000}
    while pair.daemon.emit(pair.job_id, event):
        pair.exchange()
    held = pair.daemon.held(pair.job_id)
    assert held <= 16 * 1024 * 1024
    assert not pair.daemon.emit(pair.job_id, event)
    assert pair.daemon.held(pair.job_id) == held


def test_a_journal_that_cannot_be_read_back_ends_its_job_and_no_other() -> None:
    """Our rule: what cannot be delivered is not skipped; the job fails and says so."""

    class Broken(MemorySpill):
        def read(self, sequence: int) -> bytes:
            raise OSError("input/output error")

    world = World(machines=0, shared=False)
    pair = Pair(spill=lambda job_id: Broken(world))
    other = pair.start()
    pair.hold.add(pair.job_id)
    while not world.seen["spilled"]:
        pair.daemon.emit(pair.job_id, {"text": "x" * 400_000})
    pair.hold.clear()
    pair.exchange()
    pair.release()
    assert relay.EndJob(pair.job_id, "journal") in pair.daemon_told
    pair.daemon.finish(pair.job_id, "completed")
    pair.daemon.emit(other, {"n": 1})
    pair.exchange()
    assert relay.JobFinished(pair.job_id, "lost", "journal") in pair.hub_told
    assert pair.told[-1] == {"n": 1}


def test_a_daemon_that_ignores_the_window_loses_that_job_only() -> None:
    """Our rule: the hub's bound does not depend on the daemon's good will."""
    hub = Line()
    hub.hub.put_secret("north", "a token of some length", 0.0)
    daemon = RawDaemon(hub, token="a token of some length").join()
    flooded, other = hub.hub.start_job("north", "raw", {}), hub.hub.start_job("north", "raw", {})
    for seq in range(1, 12):
        daemon.say({"type": "run.event", "job_id": flooded, "seq": seq, "records": [{"text": "x" * 500_000}]})
    daemon.say({"type": "run.event", "job_id": other, "seq": 1, "records": [{"n": 1}]})
    told = hub.hub.events()
    assert relay.JobLost(flooded, "protocol") in told
    assert relay.JobEvents(other, [{"n": 1}], 1) in told
    assert daemon.closed is None


def test_half_received_messages_of_one_daemon_are_bounded_together() -> None:
    """Our rule: 64 MiB; the job that goes beyond ends, the others go on."""
    hub = Line()
    hub.hub.put_secret("north", "a token of some length", 0.0)
    daemon = RawDaemon(hub, token="a token of some length").join()
    jobs = [hub.hub.start_job("north", "raw", {}) for _ in range(3)]
    piece = "x" * 1_000_000
    for job_id in jobs:
        for seq in range(1, 26):
            daemon.say({"type": "run.event", "job_id": job_id, "seq": seq, "records": [["part", piece, True]]})
    assert [lost.job_id for lost in hub.events(relay.JobLost)] == [jobs[2]]
    daemon.say({"type": "run.event", "job_id": jobs[0], "seq": 26, "records": [["part", "x", False]]})
    assert [lost.job_id for lost in hub.events(relay.JobLost)] == [jobs[0]], "what is put together has to be JSON"
    assert daemon.closed is None


def test_acknowledgements_travel_in_company_or_after_a_moment() -> None:
    """Our rule: 64 records or 256 KiB at once, else with the next frame or after 0.2 seconds."""
    pair = Pair()
    pair.daemon.emit(pair.job_id, {"n": 1})
    pair.exchange()
    assert pair.daemon.held(pair.job_id) > 0
    pair.hub.tick(0.3)
    pair.exchange()
    assert pair.daemon.held(pair.job_id) == 0
    for number in range(64):
        pair.daemon.emit(pair.job_id, {"n": number})
    pair.exchange()
    assert pair.daemon.held(pair.job_id) == 0


@given(st.binary(max_size=2000))
def test_parts_of_a_message_are_the_message(data: bytes) -> None:
    """Our rule: parts are pieces of the message's own JSON text."""
    encoded = encode({"text": Random(len(data)).randbytes(len(data)).hex() + "x" * limits.RELAY_RECORD_BYTES})
    records = [decode(record) for record in split(encoded)]
    assert "".join(record[1] for record in records).encode() == encoded
    assert [record[2] for record in records] == [True] * (len(records) - 1) + [False]
