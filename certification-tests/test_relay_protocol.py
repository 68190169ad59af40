"""The relay's two roles: who is let in, whose a job is, how jobs end, and what a fence means."""

from __future__ import annotations

import base64
import json
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pkg import limits, relay_auth
from pkg import relay_protocol as relay
from pkg.relay_admission import REASONS, reason_text
from pkg.relay_auth import Transcript, challenge_frame
from testkit.relay_raw import OTHER_TOKEN, TOKEN, Line, RawDaemon
from testkit.relay_world import TOKENS, Machine, Markers, World

ALONE: dict[str, Any] = {"shared": False, "machines": 1}


def joined(**options: Any) -> tuple[World, Machine]:
    """A world whose machines are connected, and its first machine."""
    world = World(**{**ALONE, **options})
    for machine in world.machines:
        world.connect(machine)
        world.exchange(machine)
    return world, world.machines[0]


def started(world: World, machine: Machine) -> str:
    """A job that runs."""
    job_id = world.start(machine)
    assert job_id is not None
    world.exchange(machine)
    assert job_id in machine.alive
    return job_id


def line(token: str = TOKEN, **options: Any) -> Line:
    """A hub with one installation."""
    made = Line(**options)
    made.hub.put_secret("north", token, 0.0)
    return made


# ------------------------------------------------------------------ who is let in


@pytest.mark.parametrize("protocol", [None, "coding-relay-v2", "", 7, ["coding-relay-v1"]])
def test_another_protocol_is_refused_with_what_to_upgrade(protocol: Any) -> None:
    """Our rule: close 1008, and the reason names the protocol and the mend."""
    daemon = RawDaemon(line())
    daemon.hello(protocol=protocol)
    assert daemon.closed is not None
    code, reason = daemon.closed
    assert code == 1008
    assert reason.startswith("protocol_unsupported:")
    assert "coding-relay-v1" in reason
    assert "upgrade" in reason
    assert daemon.heard == []


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"type":"daemon.hello"' + b" " * 5000 + b"}",
        b'{"type":"run.event"}',
        b'{"type":"daemon.hello","protocol":"coding-relay-v1"}',
    ],
)
def test_what_is_no_hello_is_refused(frame: bytes) -> None:
    """Our rule: nothing but a hello is heard first, and whatever it is instead does no harm."""
    daemon = RawDaemon(line())
    daemon.push(frame)
    assert daemon.closed == (1008, reason_text("hello_invalid"))


@pytest.mark.parametrize("daemon_id", ["", "x" * 129, "a\nb", "\ud800", 7, None])
def test_an_impossible_daemon_id_is_refused(daemon_id: Any) -> None:
    """Our rule: 1 to 128 characters, no control characters, valid Unicode."""
    daemon = RawDaemon(line())
    daemon.hello(daemon_id=daemon_id)
    assert daemon.closed is not None
    assert daemon.closed[0] == 1008


def test_a_wrong_token_stops_the_daemon_with_an_explanation() -> None:
    """Our rule: a rejected credential is fatal for the daemon, which says what to do."""
    world, machine = joined()
    world.hub.put_secret("east", OTHER_TOKEN, world.now)
    world.collect()
    world.exchange(machine)
    assert machine.wire is None
    assert not machine.stopped, "a changed token is first a reason to come back"
    world.connect(machine)
    world.exchange(machine)
    assert machine.stopped.startswith("daemon_token_rejected:")
    assert "daemon-token" in machine.stopped


def test_the_token_and_keys_made_from_it_never_travel() -> None:
    """Our rule: raw, base64, hex and URL-quoted, they are in no byte of either direction and in no repr."""
    hub = line()
    daemon = RawDaemon(hub)
    daemon.hello()
    handshake = daemon.prove()
    wire = list(daemon.sent)
    daemon.state()
    hub.hub.start_job("north", "raw", {"text": "hello"})
    frames = daemon.sent + daemon.pull() + [json.dumps(daemon.heard).encode()]
    session = handshake.derive(daemon.key, b"frames of the hub")
    for secret in (TOKEN.encode(), daemon.key, session):
        forms = {
            secret,
            base64.b64encode(secret).rstrip(b"="),
            base64.urlsafe_b64encode(secret).rstrip(b"="),
            secret.hex().encode(),
        }
        forms.add(urllib.parse.quote_from_bytes(secret).encode())
        for form in forms:
            assert not any(form in frame for frame in wire + frames)
            assert form.decode("latin-1") not in repr((hub.hub, hub.hub._secrets, hub.hub._sockets, hub.hub._links))


def test_a_recorded_handshake_is_worth_nothing_on_another_connection() -> None:
    """Our rule: the proof covers the hub's nonce."""
    hub = line()
    first = RawDaemon(hub)
    first.hello()
    first.prove()
    second = RawDaemon(hub)
    second.push(first.sent[0])
    second.pull()
    second.push(first.sent[1])
    assert second.closed == (1008, reason_text("daemon_token_rejected"))


@pytest.mark.parametrize("changed", ["metadata", "daemon_incarnation", "nonce"])
def test_a_hello_changed_on_its_way_is_not_proven(changed: str) -> None:
    """Our rule: the proof covers the whole hello, as it was sent."""
    daemon = RawDaemon(line())
    value = {"metadata": {"agents": ["other"]}, "daemon_incarnation": "other", "nonce": "bm9uY2Utbm9uY2Utbm9uY2UtMDI"}[changed]
    daemon.hello(**{changed: value})
    arrived = daemon.sent.pop()
    daemon.sent.append(arrived.replace(json.dumps(value).encode(), b'"what the daemon sent"'))
    assert daemon.sent != [arrived]
    challenge = daemon.pull()[0]
    sent = json.loads(daemon.sent[0])
    proof = Transcript("raw", sent["nonce"], json.loads(challenge)["nonce"], daemon.sent[0], challenge).proof(
        daemon.key, "daemon"
    )
    daemon.push(json.dumps({"type": "daemon.proof", "proof": proof}).encode())
    assert daemon.closed == (1008, reason_text("daemon_token_rejected"))


def test_the_hub_s_own_proof_does_not_pass_for_a_daemon_s() -> None:
    """Our rule: a proof covers the role, so nobody is reflected."""
    daemon = RawDaemon(line())
    daemon.hello()
    handshake = daemon.transcript()
    daemon.push(json.dumps({"type": "daemon.proof", "proof": handshake.proof(daemon.key, "hub")}).encode())
    assert daemon.closed == (1008, reason_text("daemon_token_rejected"))


def test_a_daemon_tells_nothing_to_a_hub_without_its_key() -> None:
    """Our rule: authentication is mutual; an impostor gets the hello and a proof, and no job from it is heard."""
    world = World(**ALONE)
    (machine,) = world.machines
    role = machine.role
    assert role is not None
    impostor = RawDaemon(line(OTHER_TOKEN))
    role.connect(0.0)
    hello = role.next_frame()
    assert hello is not None
    impostor.push(hello)
    challenge = impostor.pull()[0]
    role.receive(challenge, 0.0)
    assert role.next_frame() is not None
    role.receive(b'["AAAAAAAAAAAAAAAAAAAAAA",1,{"type":"run.start","job_id":"x","lease":1}]', 0.0)
    assert role.closing() is not None
    role.disconnected(0.0)
    role.connect(0.0)
    role.next_frame()
    role.receive(challenge, 0.0)
    role.next_frame()
    role.receive(json.dumps({"type": "hub.proof", "proof": "A" * 43}).encode(), 0.0)
    assert role.closing() == (1002, "protocol_error: the hub does not have this daemon's key")
    told = role.events()
    assert [type(event) for event in told] == [relay.Refused, relay.Refused]
    assert not any(event.fatal for event in told if isinstance(event, relay.Refused))


def test_a_hub_of_another_protocol_stops_the_daemon() -> None:
    """Our rule: the daemon says what to upgrade instead of looping."""
    world = World(**ALONE)
    role = world.machines[0].role
    assert role is not None
    role.connect(0.0)
    role.receive(b'{"type":"hub.challenge","protocol":"coding-relay-v9","nonce":"' + b"A" * 32 + b'","epoch":"e"}', 0.0)
    (told,) = role.events()
    assert told == relay.Refused("the hub does not speak coding-relay-v1; upgrade the plugin or this daemon", fatal=True)


@pytest.mark.parametrize("stage", ["before the challenge", "after the challenge", "parked"])
def test_a_rejection_that_anybody_could_send_does_not_stop_a_daemon(stage: str) -> None:
    """Our rule: close frames carry no seal, so on plain ws:// to another machine 1008 is told, and tried again."""
    role = World(**ALONE, authentic=False).machines[0].role
    assert role is not None
    role.connect(0.0)
    if stage != "before the challenge":
        role.receive(challenge_frame(bytes(24), "epoch"), 0.0)
        while role.next_frame() is not None:
            pass
    if stage == "parked":
        role.receive(b'{"type":"daemon.parked"}', 0.0)
        assert role.events() == [relay.Parked()]
    role.disconnected(1.0, 1008, "daemon_token_rejected: \x1b[2Jsays somebody\n")
    assert role.events() == [relay.Refused("daemon_token_rejected: ?[2Jsays somebody?", fatal=False, claimed=True)]


def test_a_challenge_of_another_protocol_stops_no_daemon_that_anybody_could_have_sent_it_to() -> None:
    """Our rule: what comes before the hub's proof is believed only where nobody else can say it."""
    role = World(**ALONE, authentic=False).machines[0].role
    assert role is not None
    role.connect(0.0)
    role.receive(b'{"type":"hub.challenge","protocol":"coding-relay-v9","nonce":"' + b"A" * 32 + b'","epoch":"e"}', 0.0)
    (told,) = role.events()
    assert isinstance(told, relay.Refused)
    assert (told.fatal, told.claimed) == (False, True)


@pytest.mark.parametrize("authentic", [True, False])
def test_an_unsealed_rejection_ends_no_job_before_its_lease(authentic: bool) -> None:
    """Our rule: whoever can only write into the connection can cut it, and no more."""
    world, machine = joined(authentic=authentic)
    job_id = started(world, machine)
    role = machine.role
    assert role is not None
    role.disconnected(world.now, 1008, "daemon_token_rejected: says somebody")
    assert role.jobs() == (() if authentic else (job_id,))
    role.tick(world.now + world.lease - 1)
    assert role.jobs() == (() if authentic else (job_id,))
    role.tick(world.now + world.lease + 1)
    assert role.jobs() == ()


@pytest.mark.parametrize("change", ["token", "conflict", "revoked"])
def test_a_hub_rejects_for_good_only_before_its_own_proof(change: str) -> None:
    """The wire contract: a proven connection is never closed with 1008, whatever becomes of its token."""
    world, machine = joined()
    assert machine.wire is not None
    if change == "revoked":
        world.hub.revoke("east", world.now)
    else:
        world.hub.put_secret(*(("east", OTHER_TOKEN) if change == "token" else ("another", TOKENS["east"])), world.now)
    while world.hub.next_frame(machine.wire.number) is not None:
        pass
    closing = world.hub.closing(machine.wire.number)
    assert closing is not None
    assert closing[0] == 1013


def test_a_plain_token_is_taken_only_where_one_installation_listens() -> None:
    """Our rule: outside the shared profile a simple client may send the token itself; then frames are bare messages."""
    hub = line()
    daemon = RawDaemon(hub)
    daemon.hello(token=TOKEN)
    assert [message["type"] for message in [json.loads(frame) for frame in daemon.pull()]] == ["daemon.ready"]
    job_id = hub.hub.start_job("north", "raw", {"text": "hello"})
    sent = [item for frame in daemon.pull() for item in json.loads(frame)]
    assert [item["type"] for item in sent] == ["run.start", "run.command"]
    assert sent[1]["records"] == [["start", {"text": "hello"}]]
    daemon.push(json.dumps({"type": "run.event", "job_id": job_id, "seq": 1, "records": [{"n": 1}]}).encode())
    assert [event.events for event in hub.events(relay.JobEvents)] == [[{"n": 1}]]

    wrong = RawDaemon(hub, "other")
    wrong.hello(token=OTHER_TOKEN)
    assert wrong.closed == (1008, reason_text("daemon_token_rejected"))
    pooled = RawDaemon(line(shared=True))
    pooled.hello(token=TOKEN)
    assert pooled.closed == (1008, reason_text("daemon_token_sent"))


def test_two_installations_with_one_token_are_both_refused_until_one_changes() -> None:
    """Our rule: a proof that could mean either of two installations means neither."""
    hub = line(shared=True)
    first = RawDaemon(hub).join()
    assert first.types()[-1] == "daemon.ready"
    hub.hub.put_secret("south", TOKEN, hub.now)
    assert hub.hub.conflicting("north")
    assert first.closed == (1013, reason_text("daemon_token_conflict"))
    first.gone()
    second = RawDaemon(hub)
    second.hello()
    second.prove()
    assert second.closed == (1013, reason_text("daemon_token_conflict"))
    hub.hub.put_secret("south", OTHER_TOKEN, hub.now)
    assert RawDaemon(hub).join().types()[-1] == "daemon.ready"
    assert [ready.daemon_id for ready in hub.hub.daemons("north")] == ["raw"]
    assert hub.hub.daemons("south") == []


def test_a_per_daemon_key_can_only_be_itself() -> None:
    """Our rule: a key made for one daemon id proves no other."""
    key = relay.daemon_key(TOKEN, "mine")
    assert relay.parse_key(f" {relay.format_key(key)}\n") == key
    hub = line()
    daemon = RawDaemon(hub, "yours", key=key)
    daemon.hello()
    daemon.prove()
    assert daemon.closed == (1008, reason_text("daemon_token_rejected"))
    assert RawDaemon(hub, "mine", key=key).join().types()[-1] == "daemon.ready"


@pytest.mark.parametrize("text", ["", "crk1_short", TOKEN, "crk1_" + "!" * 43, "crk1_" + "A" * 44])
def test_what_is_no_daemon_key_is_refused_without_repeating_it(text: str) -> None:
    """Our rule: a bad key file is named, its content is not."""
    with pytest.raises(ValueError, match="not a daemon key") as caught:
        relay.parse_key(text)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    "token", ["", "short", "abcdefghijklmnopqrstuvwxyz01234", "a" * 40, "ab" * 20, f" {TOKEN}", f"{TOKEN}\n"]
)
def test_a_weak_token_opens_no_shared_listener(token: str) -> None:
    """Our rule: at least 32 characters, 12 different ones, no space around them."""
    hub = Line(shared=True)
    with pytest.raises(relay.RelayRefused, match="daemon_token_required"):
        hub.hub.put_secret("north", token, 0.0)
    assert relay.token_problem(token)
    assert not relay.token_problem(TOKEN)


def test_a_daemon_of_an_unknown_installation_is_parked_until_its_secret_is_shown() -> None:
    """Our rule: the secret that verifies the proof decides the installation, also when it comes later."""
    hub = Line(shared=True)
    daemon = RawDaemon(hub)
    daemon.hello()
    daemon.prove()
    assert daemon.types() == ["hub.challenge", "daemon.parked"]
    hub.wait(60.0)
    daemon.push(b'{"type":"daemon.ping","n":5}')
    assert daemon.types()[-1] == "daemon.pong"
    hub.wait(60.0)
    assert daemon.closed is None
    hub.hub.put_secret("south", OTHER_TOKEN, hub.now)
    assert daemon.types()[-1] == "daemon.pong"
    hub.hub.put_secret("north", TOKEN, hub.now)
    assert daemon.types()[-1] == "hub.proof"
    assert hub.hub.parked == 0


def test_a_thousand_strangers_keep_nobody_out() -> None:
    """Our rule: at most 4 parked of one address and 256 in all, the oldest give way; a known secret never waits."""
    hub = Line(shared=True)
    strangers = []
    for number in range(1000):
        stranger = RawDaemon(hub, f"s{number}", OTHER_TOKEN, address=f"198.51.100.{number % 250}")
        stranger.hello()
        stranger.prove()
        strangers.append(stranger)
        assert hub.hub.parked <= 256
    crowd = []
    for number in range(20):
        stranger = RawDaemon(hub, f"c{number}", OTHER_TOKEN, address="203.0.113.9")
        stranger.hello()
        stranger.prove()
        crowd.append(stranger)
    assert [stranger.closed is None for stranger in crowd] == [False] * 16 + [True] * 4
    assert strangers[0].closed == (1013, reason_text("parking_full"))
    assert hub.hub.parked == 256
    early = RawDaemon(hub, "early", address="203.0.113.9")
    early.hello()
    early.prove()
    hub.hub.put_secret("north", TOKEN, hub.now)
    assert early.types()[-1] == "hub.proof"
    assert RawDaemon(hub, "late", address="203.0.113.9").join().types()[-1] == "daemon.ready"


def test_silent_connections_give_way_before_their_hello() -> None:
    """Our rule: at most 256 connections in their handshake; each step has 10 seconds."""
    hub = line()
    silent = [RawDaemon(hub) for _ in range(300)]
    assert [daemon.closed is not None for daemon in silent] == [True] * 44 + [False] * 256
    hub.wait(11.0)
    assert all(daemon.closed is not None for daemon in silent)
    assert RawDaemon(hub).join().types()[-1] == "daemon.ready"


def test_every_close_reason_fits_and_says_what_to_do() -> None:
    """RFC 6455: a close reason has at most 123 bytes."""
    for code, text in REASONS.items():
        assert len(f"{code}: {text}".encode()) <= 123, code
        assert reason_text(code) == f"{code}: {text}"


# ------------------------------------------------------------------ one daemon id, one daemon


def test_a_second_daemon_with_a_live_id_is_turned_away() -> None:
    """Our rule: the first is probed; while it answers, it stays and its jobs do not notice."""
    hub = line()
    first = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    second = RawDaemon(hub, incarnation="raw-2").join()
    assert second.closed is None
    third = RawDaemon(hub, incarnation="raw-3").join()
    assert third.closed == (1013, reason_text("daemon_id_in_use"))
    first.pull()
    (probe,) = [message for message in first.heard if message["type"] == "daemon.ping"]
    first.say({"type": "daemon.pong", "n": probe["n"]})
    assert second.closed == (1013, reason_text("daemon_id_in_use"))
    first.say({"type": "run.event", "job_id": job_id, "seq": 1, "records": [{"n": 1}]})
    assert len(hub.events(relay.JobEvents)) == 1


def test_a_daemon_that_fails_the_probe_is_replaced() -> None:
    """Our rule: after 5 seconds without an answer the second one is in, and what the first one had is lost and fenced."""
    hub = line()
    first = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    second = RawDaemon(hub, incarnation="raw-2").join(table="another table")
    first.say({"type": "daemon.pong", "n": 1})
    hub.wait(4.9)
    assert first.closed is None
    hub.wait(0.2)
    assert first.closed is not None
    assert relay.JobLost(job_id, "restarted") in hub.hub.events()
    assert second.closed == (1013, reason_text("daemon_fenced"))
    assert second.heard[-1] == {"type": "daemon.fenced", "end": [job_id], "forget": []}


def test_the_same_daemon_takes_its_jobs_along_to_a_new_connection() -> None:
    """Our rule: the same incarnation with the same key replaces itself at once; the old connection is heard no more."""
    hub = line()
    first = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    event = {"type": "run.event", "job_id": job_id, "seq": 1, "records": [{"n": 1}]}
    first.say(event)
    first.pull()
    entry = {"job_id": job_id, "epoch": "epoch1", "state": "running", "last": 2, "received": 1}
    second = RawDaemon(hub).join(resume=[entry])
    assert first.closed == (1012, reason_text("daemon_replaced"))
    assert second.heard[-1]["resumed"] == [{"job_id": job_id, "received": 1, "acked": 0}]
    first.say({**event, "seq": 2, "records": [{"n": "forged"}]})
    second.say({**event, "seq": 2, "records": [{"n": 2}]})
    assert [told.events for told in hub.events(relay.JobEvents)] == [[{"n": 1}], [{"n": 2}]]


def test_the_same_daemon_takes_its_place_while_another_one_is_waiting_for_it() -> None:
    """Our rule: whoever proves to be the same daemon goes before whoever wants its id."""
    hub = line()
    first = RawDaemon(hub).join()
    waiting = RawDaemon(hub, incarnation="raw-2").join()
    again = RawDaemon(hub).join()
    assert waiting.closed == (1013, reason_text("daemon_id_in_use"))
    assert first.closed == (1012, reason_text("daemon_replaced"))
    assert again.types()[-1] == "daemon.ready"
    assert [ready.incarnation for ready in hub.hub.daemons("north")] == ["raw-1"]


def test_the_same_incarnation_with_another_key_is_probed_like_a_stranger() -> None:
    """Our rule: an incarnation is no secret, so alone it proves nothing."""
    hub = line()
    first = RawDaemon(hub).join()
    hub.hub._links["north"]["raw"].key = b"of another key"
    second = RawDaemon(hub).join()
    assert first.closed is None
    assert "daemon.ready" not in second.types()


def test_a_crowd_in_its_handshake_does_not_push_out_a_daemon_from_elsewhere() -> None:
    """Our rule: the oldest of the largest crowd gives way, before the proof as while parked."""
    hub = line()
    daemon = RawDaemon(hub)
    for number in range(600):
        RawDaemon(hub, f"s{number}", address="203.0.113.9")
    daemon.join()
    assert daemon.closed is None
    assert daemon.types()[-1] == "daemon.ready"


def test_what_a_secret_costs_does_not_grow_with_everybody_else_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: of a crowd that waits each is tried with the new secret alone, and none when one goes."""
    hub = Line(shared=True)
    for number in range(50):
        hub.hub.put_secret(number, f"installation-{number}-aB7cD2eF9gH4iJ6kL1mN8oP3qR5", hub.now)
    for number in range(40):
        stranger = RawDaemon(hub, f"s{number}", address=f"203.0.113.{number}")
        stranger.hello()
        stranger.prove()
    assert hub.hub.parked == 40
    tried = 0
    proves = relay_auth.Transcript.proves

    def counted(*given: Any) -> bool:
        nonlocal tried
        tried += 1
        return proves(*given)

    monkeypatch.setattr(relay_auth.Transcript, "proves", counted)
    hub.hub.put_secret("late", OTHER_TOKEN, hub.now)
    assert tried == 40
    hub.hub.revoke("late", hub.now)
    assert tried == 40
    hub.hub.put_secret("north", TOKEN, hub.now)
    assert hub.hub.parked == 0


def calls(work: Callable[[], object]) -> int:
    """How many calls some work makes, those of built-in functions included."""
    made = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


def test_showing_a_secret_costs_the_same_whoever_else_has_one() -> None:
    """Our rule: nobody's first run waits longer for each other installation; nothing of a token outlives its last holder."""
    hub = Line(shared=True)
    costs = []
    for number in range(1000):
        token = f"installation-{number:04d}-aB7cD2eF9gH4iJ6kL1mN8oP3qR5"
        costs.append(calls(lambda name=number, token=token: hub.hub.put_secret(name, token, hub.now)))  # type: ignore[misc]
    assert costs[999] == costs[10]
    hub.hub.put_secret("copy", "installation-0500-aB7cD2eF9gH4iJ6kL1mN8oP3qR5", hub.now)
    assert (hub.hub.rivals("copy"), hub.hub.rivals(500), hub.hub.rivals(501)) == ([500], ["copy"], [])
    hub.hub.revoke(500, hub.now)
    assert not hub.hub.conflicting("copy")
    for installation in [*range(1000), "copy"]:
        hub.hub.revoke(installation, hub.now)
    assert hub.hub._secrets == relay_auth.Secrets()


def test_what_a_strangers_proof_costs_for_each_installation_is_what_needs_its_token() -> None:
    """Our rule: what is the same for all tokens is worked out once for a proof that none of them has made."""

    def cost(installations: int) -> int:
        hub = Line(shared=True)
        for number in range(installations):
            hub.hub.put_secret(number, f"installation-{number:04d}-aB7cD2eF9gH4iJ6kL1mN8oP3qR5", hub.now)
        stranger = RawDaemon(hub, "stranger", OTHER_TOKEN)
        stranger.hello()
        handshake = stranger.transcript()
        frame = json.dumps({"type": "daemon.proof", "proof": handshake.proof(stranger.key, "daemon")}).encode()
        spent = calls(lambda: stranger.push(frame))
        assert hub.hub.parked == 1
        alone.append(calls(lambda: handshake.proves(relay.daemon_key(OTHER_TOKEN, "stranger"), "daemon", "no")))
        return spent

    alone: list[int] = []
    assert (cost(300) - cost(100)) / 200 < alone[0] / 2


def test_daemons_that_are_away_with_fences_are_remembered_up_to_a_bound() -> None:
    """Our rule: whoever holds the token can't fill the hub's memory by inventing daemons with jobs."""
    hub = line()
    for number in range(300):
        one = RawDaemon(hub, f"d{number}")
        one.join(resume=[{"job_id": f"job{number}", "epoch": "old", "state": "ending", "last": 0, "received": 0}])
        if number >= 256:
            assert one.closed == (1013, reason_text("daemons_unproven"))
        one.gone()
    assert len(hub.hub._links["north"]) == 256
    again = RawDaemon(hub, "d7", incarnation="next").join(quiesced=["job7"])
    assert again.types()[-1] == "daemon.ready", "one that is remembered comes back and proves"
    again.gone()
    assert RawDaemon(hub, "d299").join().types()[-1] == "daemon.ready", "and makes room"


def test_an_installation_has_at_most_128_daemons_and_128_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: the 129th is told so, and may come back."""
    hub = line()
    daemons = [RawDaemon(hub, f"d{number}").join() for number in range(128)]
    late = RawDaemon(hub, "late").join()
    assert late.closed == (1013, reason_text("daemons_full"))
    for number in range(128):
        hub.hub.start_job("north", f"d{number % 3}", {})
    with pytest.raises(relay.RelayRefused, match="daemon_jobs_full"):
        hub.hub.start_job("north", "d5", {})
    daemons[9].gone()
    assert RawDaemon(hub, "late").join().types()[-1] == "daemon.ready"


def test_proven_connections_that_are_not_live_are_bounded_with_the_live_ones() -> None:
    """Our rule: who proves itself and never says which jobs it has gives way, and keeps no other daemon of its own out."""
    hub = line()
    hub.hub.put_secret("south", OTHER_TOKEN, hub.now)
    other = RawDaemon(hub, "other", OTHER_TOKEN).join()

    def proven(daemon_id: str) -> RawDaemon:
        one = RawDaemon(hub, daemon_id)
        one.hello()
        one.prove()
        return one

    def open_ones(daemons: list[RawDaemon]) -> int:
        return sum(hub.hub.closing(daemon.number) is None for daemon in daemons)

    slow = proven("slow")
    crowd = [proven("crowd") for _ in range(300)]
    assert open_ones(crowd) == limits.RELAY_CONNECTIONS - 1
    assert crowd[0].closed == (1013, reason_text("connections_full"))
    live = [RawDaemon(hub, f"d{number}").join() for number in range(127)]
    assert open_ones(live) == 127
    assert open_ones(crowd) == limits.RELAY_CONNECTIONS - 128
    slow.state()
    assert slow.types()[-1] == "daemon.ready", "a crowd of one daemon id pushes out nobody else"
    for one in [*crowd, *live, slow]:
        one.gone()
    assert set(hub.hub._connected) == {"south"}
    assert other.closed is None


def test_a_daemon_comes_again_where_an_installation_has_all_its_daemons() -> None:
    """Our rule: who takes its own old connection's place needs no free one."""
    hub = line()
    live = [RawDaemon(hub, f"d{number}").join() for number in range(128)]
    again = RawDaemon(hub, "d5").join()
    assert again.types()[-1] == "daemon.ready"
    assert live[5].closed == (1012, reason_text("daemon_replaced"))


# ------------------------------------------------------------------ jobs and their ends


def test_cancel_is_answered_only_when_nothing_is_left() -> None:
    """Our rule: events stop at once, the end is told after the daemon has proven it."""
    world, machine = joined()
    job_id = started(world, machine)
    world.produce(machine, job_id)
    world.cancel(world.jobs[job_id])
    world.exchange(machine)
    assert machine.ending == [job_id]
    assert world.jobs[job_id].ends == []
    world.reap(machine)
    world.exchange(machine)
    assert world.jobs[job_id].ends == [relay.JobFinished(job_id, "cancelled")]
    assert world.start(machine) is not None


def test_a_job_that_does_not_end_fences_its_daemon_until_it_has() -> None:
    """Our rule: 10 seconds for the proof, then no job on that daemon; a late proof lifts the fence."""
    world, machine = joined()
    job_id = started(world, machine)
    world.cancel(world.jobs[job_id])
    world.exchange(machine)
    world.wait(9.9)
    assert world.jobs[job_id].ends == []
    world.wait(0.2)
    assert world.jobs[job_id].ends == [relay.JobUnconfirmed(job_id)]
    assert world.hub.fences("east", "desk0") == (job_id,)
    assert world.start(machine) is None
    assert world.seen["refused: daemon_fenced"] == 1
    world.reap(machine)
    world.exchange(machine)
    assert world.seen["fence lifted"] == 1
    assert world.start(machine) is not None


def test_a_daemon_that_cannot_end_a_job_says_so_at_once() -> None:
    """Our rule: an end that is not proven is never taken for one."""
    world, machine = joined()
    job_id = started(world, machine)
    world.cancel(world.jobs[job_id])
    world.exchange(machine)
    world.surrender(machine)
    world.exchange(machine)
    assert world.jobs[job_id].ends == [relay.JobUnconfirmed(job_id)]
    world.cut(machine)
    world.connect(machine)
    world.exchange(machine)
    assert machine.wire is None, "a fenced daemon is not admitted"
    assert not machine.stopped, "and keeps trying"
    world.settle()


@pytest.mark.parametrize("quiet", [True, False], ids=["proven", "not proven"])
def test_a_cancel_that_meets_a_restarted_daemon_is_answered_by_its_table(quiet: bool) -> None:
    """Our rule: the new process's word counts when it is a proof, and else the daemon is fenced at once."""
    hub = line()
    first = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    first.gone()
    hub.hub.cancel(job_id, hub.now)
    RawDaemon(hub, incarnation="raw-2").join(quiesced=[job_id] if quiet else [], table="table" if quiet else "made anew")
    told = hub.hub.events()
    assert (relay.JobFinished(job_id, "cancelled") in told) == quiet
    assert (relay.JobUnconfirmed(job_id) in told) != quiet
    assert hub.hub.fences("north", "raw") == (() if quiet else (job_id,))


def test_a_fenced_daemon_is_closed_with_1013_and_told_what_to_end() -> None:
    """Our rule: only a daemon that proves every fenced job ended is admitted."""
    hub = line()
    daemon = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {}, lease=0)
    daemon.gone()
    assert relay.JobLost(job_id, "disconnected") in hub.hub.events()
    entry = {"job_id": job_id, "epoch": "epoch1", "state": "ending", "last": 0, "received": 1}
    stubborn = RawDaemon(hub).join(resume=[entry])
    assert stubborn.heard[-1] == {"type": "daemon.fenced", "end": [job_id], "forget": []}
    assert stubborn.closed == (1013, reason_text("daemon_fenced"))
    stubborn.gone()
    proven = RawDaemon(hub).join(quiesced=[job_id])
    assert proven.heard[-1]["type"] == "daemon.ready"
    assert proven.heard[-1]["forget"] == [job_id]
    assert relay.FenceLifted("north", "raw") in hub.hub.events()
    hub.hub.start_job("north", "raw", {})


def test_a_fence_outlives_the_hub_where_there_is_a_disk() -> None:
    """Our rule: the marker is made before anything is sent; a new hub process starts no job on that daemon before the proof."""
    disk = Markers()
    hub = line(markers=disk)
    RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    assert disk.kept == {("north", "raw"): {job_id: "table"}}
    again = line(markers=disk, epoch="epoch2")
    assert again.hub.fences("north", "raw") == (job_id,)
    other_table = RawDaemon(again).join(table="made anew")
    assert other_table.closed == (1013, reason_text("daemon_fenced"))
    other_table.gone()
    again.hub.lift("north", "raw", job_id)
    assert disk.kept == {("north", "raw"): {}}
    assert RawDaemon(again).join(table="made anew").types()[-1] == "daemon.ready"


def test_a_table_that_never_heard_of_a_job_proves_that_it_never_ran() -> None:
    """Our rule: the table the job was dispatched to lists every job that was started, so absence is proof."""
    disk = Markers()
    hub = line(markers=disk)
    RawDaemon(hub).join()
    hub.hub.start_job("north", "raw", {})
    again = line(markers=disk, epoch="epoch2")
    assert RawDaemon(again, incarnation="raw-2").join().types()[-1] == "daemon.ready"
    assert again.hub.fences("north", "raw") == ()


def test_without_a_disk_the_fence_is_derived_from_the_daemon_s_table() -> None:
    """Our rule: a hub starts no job on a daemon that lists something unknown to it until that is proven to have ended."""
    hub = line(shared=True)
    entry = {"job_id": "old", "epoch": "epoch0", "state": "running", "last": 7, "received": 1}
    daemon = RawDaemon(hub).join(resume=[entry])
    assert daemon.heard[-1]["end"] == ["old"]
    (ready,) = hub.events(relay.DaemonReady)
    assert ready.fenced
    with pytest.raises(relay.RelayRefused, match="daemon_fenced"):
        hub.hub.start_job("north", "raw", {})
    daemon.finished("old", quiescent=False)
    with pytest.raises(relay.RelayRefused, match="daemon_fenced"):
        hub.hub.start_job("north", "raw", {})
    daemon.finished("old", outcome="lost")
    assert hub.events(relay.FenceLifted) == [relay.FenceLifted("north", "raw")]
    assert daemon.types()[-1] == "run.forget"
    hub.hub.start_job("north", "raw", {})


def test_a_marker_that_cannot_be_made_stops_the_job_before_anything_is_sent() -> None:
    """Our rule: first durable, then dispatched."""

    class Full(Markers):
        def mark(self, installation: Any, daemon_id: str, job_id: str, table: str) -> None:
            raise OSError("disk full")

    hub = line(markers=Full())
    daemon = RawDaemon(hub).join()
    with pytest.raises(OSError, match="disk full"):
        hub.hub.start_job("north", "raw", {})
    assert daemon.types()[-1] == "daemon.ready"
    assert hub.hub.cancel("any", 0.0) is False


@pytest.mark.parametrize("seconds", [0.5, 5.0, 29.0, 65.0, 119.0])
def test_within_its_lease_a_job_does_not_notice_a_cut(seconds: float) -> None:
    """Our rule: what is produced during the outage arrives afterwards, once and in order, and so does a completion."""
    world, machine = joined()
    job_id = started(world, machine)
    world.produce(machine, job_id)
    world.exchange(machine)
    world.cut(machine)
    world.produce(machine, job_id)
    world.wait(seconds)
    world.produce(machine, job_id)
    world.complete(machine, job_id)
    world.connect(machine)
    world.exchange(machine)
    assert world.jobs[job_id].ends == [relay.JobFinished(job_id, "completed")]
    for _ in range(3):
        world.consume(world.jobs[job_id])
    assert world.jobs[job_id].consumed == [0, 1, 2]


def test_past_its_lease_a_job_is_lost_for_both_sides() -> None:
    """Our rule: the daemon ends it by itself, the hub fences, and the next connection settles it."""
    world, machine = joined()
    job_id = started(world, machine)
    world.cut(machine)
    world.wait(121.0)
    assert world.jobs[job_id].ends == [relay.JobLost(job_id, "lease")]
    assert machine.ending == [job_id]
    world.reap(machine)
    world.connect(machine)
    world.exchange(machine)
    assert world.hub.fences("east", "desk0") == ()
    assert machine.disk.jobs == {}
    assert world.start(machine) is not None


def test_without_a_lease_a_disconnect_ends_and_fences() -> None:
    """Our rule: ``lease=0`` is the plain behaviour."""
    world, machine = joined(lease=0.0)
    job_id = started(world, machine)
    world.cut(machine)
    assert world.jobs[job_id].ends == [relay.JobLost(job_id, "disconnected")]
    assert machine.ending == [job_id]
    world.connect(machine)
    world.exchange(machine)
    assert machine.wire is None
    world.reap(machine)
    world.connect(machine)
    world.exchange(machine)
    assert world.start(machine) is not None


def test_a_workstation_that_slept_for_an_hour_ends_its_job_when_it_wakes() -> None:
    """Our rule: a lease runs from the last word heard, not from when the silence was noticed."""
    world, machine = joined()
    job_id = started(world, machine)
    assert machine.wire is not None
    machine.wire.hole = True
    world.now += 3600.0
    world.wait(0.1)
    assert machine.ending == [job_id]
    assert world.jobs[job_id].ends == [relay.JobLost(job_id, "lease")]


def test_heartbeats_keep_an_idle_connection_and_silence_ends_it() -> None:
    """Our rule: a ping every 20 seconds, and 90 seconds of silence are the end."""
    world, machine = joined()
    for _ in range(20):
        world.wait(20.0)
        world.exchange(machine)
    assert machine.wire is not None
    machine.wire.hole = True
    world.wait(69.0)
    assert machine.wire is not None
    world.wait(22.0)
    assert machine.wire is None
    assert world.hub.daemons("east") == []


def test_a_job_that_never_reached_its_daemon_is_dispatched_again() -> None:
    """Our rule: the table shows that it never arrived, so starting it once more starts it once."""
    world, machine = joined()
    job_id = world.start(machine)
    assert job_id is not None
    world.collect()
    world.cut(machine)
    assert machine.alive == set()
    world.connect(machine)
    world.exchange(machine)
    assert machine.alive == {job_id}


@pytest.mark.parametrize(
    "changed", [{"epoch": "epoch0"}, {"state": "ending"}, {"last": 0}, {"received": 9}], ids=lambda item: next(iter(item))
)
def test_a_job_that_does_not_stand_where_the_hub_left_it_is_not_gone_on_with(changed: dict[str, Any]) -> None:
    """Our rule: a job belongs to one hub process too, and streams that do not fit together are not patched."""
    hub = line()
    first = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    first.say({"type": "run.event", "job_id": job_id, "seq": 1, "records": [{"n": 1}]})
    entry = {"job_id": job_id, "epoch": "epoch1", "state": "running", "last": 1, "received": 1}
    first.pull()
    again = RawDaemon(hub).join(resume=[entry | changed])
    assert [lost.job_id for lost in hub.events(relay.JobLost)] == [job_id]
    assert again.heard[-1] == {"type": "daemon.fenced", "end": [job_id], "forget": []}


def test_a_restarted_hub_ends_what_it_does_not_know() -> None:
    """Our rule: a hub that does not know a resumed job says so, and the daemon ends it."""
    world, machine = joined(disk=False)
    job_id = started(world, machine)
    world.crash_hub()
    world.connect(machine)
    world.exchange(machine)
    assert machine.ending == [job_id]
    assert world.start(machine) is None
    world.reap(machine)
    world.exchange(machine)
    assert world.start(machine) is not None


def test_a_restarted_daemon_reports_what_it_has_ended() -> None:
    """Our rule: jobs of the earlier process are lost, and proven, with the first word of the new one."""
    world, machine = joined()
    job_id = started(world, machine)
    world.crash_daemon(machine)
    world.boot(machine)
    world.connect(machine)
    world.exchange(machine)
    assert world.jobs[job_id].ends == [relay.JobLost(job_id, "restarted", proven=True)]
    assert world.start(machine) is not None


def test_a_job_whose_table_cannot_be_written_is_refused() -> None:
    """Our rule: first durable, then started; the hub is told why."""
    world, machine = joined()

    def fail(job_id: str) -> None:
        raise OSError("disk full")

    machine.disk.started = fail  # type: ignore[method-assign]
    job_id = world.start(machine)
    assert job_id is not None
    world.exchange(machine)
    assert world.jobs[job_id].ends == [relay.JobFinished(job_id, "refused", "job_table")]
    assert machine.alive == set()


def test_a_revoked_installation_loses_its_daemons_and_no_other_does() -> None:
    """Our rule: revocation drops exactly one installation's connections, jobs and secret."""
    world, east = joined(shared=True, machines=2)
    west = world.machines[1]
    lost, kept = started(world, east), started(world, west)
    world.hub.revoke("east", world.now)
    world.exchange(east)
    world.exchange(west)
    assert world.jobs[lost].ends == [relay.JobLost(lost, "revoked")]
    assert lost in east.ending, "the daemon was told to end it"
    assert east.wire is None
    assert world.hub.daemons("east") == []
    world.produce(west, kept)
    world.exchange(west)
    assert len(world.jobs[kept].waiting) == 1
    world.connect(east)
    world.exchange(east)
    assert world.seen["parked"] == 1
    world.reap(east)
    world.hub.put_secret("east", TOKENS["east"], world.now)
    world.exchange(east)
    assert world.start(east) is not None


# ------------------------------------------------------------------ commands and tools


def test_commands_arrive_once_and_in_order_across_cuts() -> None:
    """Our rule: what a running job is told is delivered at most once, and answered."""
    world, machine = joined()
    job_id = started(world, machine)
    for _ in range(3):
        world.command(job_id)
    world.collect()
    world.cut(machine)
    world.command(job_id)
    world.connect(machine)
    world.exchange(machine)
    assert machine.heard[job_id] == [1, 2, 3, 4]
    assert world.jobs[job_id].results == [1, 2, 3, 4]


def test_too_many_open_commands_are_refused_and_ended_jobs_take_none() -> None:
    """Our rule: 64 unanswered commands; after the end there is nobody to tell."""
    hub = line()
    daemon = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    for _ in range(64):
        hub.hub.command(job_id, "interrupt")
    with pytest.raises(relay.RelayRefused, match="commands_full"):
        hub.hub.command(job_id, "interrupt")
    daemon.say(
        {"type": "run.event", "job_id": job_id, "seq": 1, "records": [["result", 1, True, None], ["result", 99, True, None]]}
    )
    assert hub.events(relay.CommandResult) == [relay.CommandResult(job_id, 1, True, None)]
    assert hub.hub.command(job_id, "close") == 65
    daemon.finished(job_id)
    with pytest.raises(relay.RelayRefused, match="job_gone"):
        hub.hub.command(job_id, "interrupt")


def test_tool_calls_are_bounded_in_number_and_size() -> None:
    """Our rule: the 73rd open call is answered busy, a result over 4 MiB becomes an error, a request over 1 MiB is not sent."""
    hub = line()
    daemon = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    for first in range(1, 74, 37):
        records = [["mcp", number, {}] for number in range(first, min(first + 37, 74))]
        daemon.say({"type": "run.event", "job_id": job_id, "seq": first, "records": records})
    assert len(hub.events(relay.McpRequest)) == 72
    daemon.pull()
    assert daemon.heard[-1]["records"][-1] == ["mcp", 73, None, "busy"]
    assert hub.hub.mcp_response(job_id, 1, "x" * 5_000_000)
    assert not hub.hub.mcp_response(job_id, 1, "again")
    assert not hub.hub.mcp_response(job_id, 73, "nobody waits")
    daemon.pull()
    assert daemon.heard[-1]["records"] == [["mcp", 1, None, "too_large"]]
    world, machine = joined()
    job_id = started(world, machine)
    assert machine.role is not None
    with pytest.raises(relay.MessageTooLarge):
        machine.role.mcp_request(job_id, {"big": "x" * 1_100_000})
    assert machine.role.mcp_request(job_id, {"call": 0}) == 1
    world.exchange(machine)
    assert world.jobs[job_id].tool_calls == [1]


def test_a_cancelled_job_s_tools_are_gone_at_once() -> None:
    """Our rule: no tool call of a cancelled job reaches the host, and no answer goes back."""
    hub = line()
    daemon = RawDaemon(hub).join()
    job_id = hub.hub.start_job("north", "raw", {})
    daemon.say({"type": "run.event", "job_id": job_id, "seq": 1, "records": [["mcp", 1, {}]]})
    hub.hub.events()
    hub.hub.cancel(job_id, hub.now)
    assert not hub.hub.mcp_response(job_id, 1, {})
    daemon.say({"type": "run.event", "job_id": job_id, "seq": 2, "records": [["mcp", 2, {}], {"n": 1}]})
    assert hub.hub.events() == []
    assert daemon.types().count("run.cancel") == 1
    assert "mcp" not in json.dumps(daemon.heard)


# ------------------------------------------------------------------ connecting again


def jitters() -> Iterator[float]:
    while True:
        yield 1.0
        yield 0.0


def test_pauses_between_connections_grow_to_their_cap_and_are_jittered() -> None:
    """Our rule: from 0.5 s, at most 5 s while the hub is not there and 30 s for names and certificates."""
    source = jitters()
    backoff = relay.Backoff(lambda: next(source))
    waits = [backoff.next() for _ in range(8)]
    assert waits == [0.5, 0.5, 2.0, 2.0, 5.0, 2.5, 5.0, 2.5]
    assert max(backoff.next(network=True) for _ in range(4)) == 30.0
    backoff.reset()
    assert backoff.next() <= 0.5


def test_the_protocol_touches_no_clock_socket_or_file(package_root: Path) -> None:
    """Our rule: the state machine has no I/O, so that every history of it can be replayed."""
    sources = sorted((package_root / "pkg").glob("relay_*.py"))
    for name in ("frames", "auth", "streams", "events", "table", "admission", "jobs", "hub", "daemon", "protocol"):
        text = (package_root / "pkg" / f"relay_{name}.py").read_text(encoding="utf-8")
        assert package_root / "pkg" / f"relay_{name}.py" in sources
        for module in ("asyncio", "socket", "time", "os", "threading", "secrets", "pathlib", "websockets", "logging"):
            assert f"\nimport {module}\n" not in text, (name, module)
            assert f"\nfrom {module}" not in text, (name, module)
