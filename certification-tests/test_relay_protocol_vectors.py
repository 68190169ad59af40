"""The relay's wire contract: golden vectors that both roles reproduce, and a client made from the page alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pkg import relay_protocol as relay
from testkit import relay_vectors
from tooling import ROOT

FILE = ROOT / "shared" / "coding-relay-v1.vectors.json"
PAGE = ROOT / "shared" / "coding-relay-v1.md"
VECTORS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ the page, written down once more with the standard library


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def h(key: bytes, *parts: str) -> bytes:
    """``H`` of the page's section 2."""
    body = b"".join(str(len(part.encode())).encode() + b":" + part.encode() + b"," for part in ("coding-relay-v1", *parts))
    return hmac.new(key, body, hashlib.sha256).digest()


def seal(key: bytes, sequence: int, messages: list[Any]) -> str:
    """A frame of the page's section 4."""
    body = ",".join([str(sequence), *(json.dumps(message) for message in messages)]) + "]"
    return '["' + b64(hmac.new(key, body.encode(), hashlib.sha256).digest()[:16]) + '",' + body


def unseal(key: bytes, sequence: int, frame: str) -> list[Any]:
    """The messages of a frame whose MAC and sequence are right."""
    assert frame[:2] == '["'
    assert frame[24:26] == '",'
    assert frame[2:24] == b64(hmac.new(key, frame[26:].encode(), hashlib.sha256).digest()[:16])
    value: list[Any] = json.loads(frame)
    assert value[1] == sequence
    return value[2:]


def parts_of(hello: str, challenge: str) -> tuple[str, str, str, str, str]:
    """What proofs and session keys cover."""
    first, second = json.loads(hello), json.loads(challenge)
    return first["daemon_id"], first["nonce"], second["nonce"], hello, challenge


# ------------------------------------------------------------------ the vectors


def test_both_roles_reproduce_the_golden_vectors() -> None:
    """Our rule: what goes over the wire changes only together with the file."""
    assert relay_vectors.vectors() == VECTORS


def test_the_vectors_are_what_the_page_says() -> None:
    """The wire contract: keys, proofs and seals, recomputed without our code."""
    keys = VECTORS["keys"]
    key = h(keys["token"].encode(), "daemon key", keys["daemon_id"])
    assert key.hex() == keys["daemon_key"]
    assert keys["key_file"] == "crk1_" + b64(key)
    frames: Iterator[Any] = iter(VECTORS["frames"])
    direction: dict[str, bytes] = {}
    sequence: dict[str, int] = {}
    opened = 0
    for item in frames:
        if "connection" in item:
            (handshake,) = [one for one in VECTORS["handshakes"] if one["connection"] == item["connection"]]
            parts = parts_of(next(frames)["frame"], next(frames)["frame"])
            assert parts[3:] == (handshake["hello"], handshake["challenge"])
            for role in ("daemon", "hub"):
                proof = b64(h(key, f"proof of the {role}", *parts))
                assert next(frames)["messages"] == [{"type": f"{role}.proof", "proof": proof}]
                assert proof == handshake[f"{role}_proof"]
                direction[role] = h(key, f"frames of the {role}", *parts)
                assert direction[role].hex() == handshake[f"key_of_the_{role}_s_frames"]
                sequence[role] = 0
            continue
        role = item["from"]
        sequence[role] += 1
        assert unseal(direction[role], sequence[role], item["frame"]) == item["messages"]
        opened += 1
    assert opened > 15


def test_the_vectors_show_every_message_of_a_working_connection() -> None:
    """Our rule: whoever writes a client finds each message in the file once at least."""
    seen = {message["type"] for item in VECTORS["frames"] for message in item.get("messages", ())}
    named = {
        "daemon.hello", "hub.challenge", "daemon.proof", "hub.proof", "daemon.state", "daemon.ready",
        "run.start", "run.command", "run.event", "run.ack", "run.cancel", "run.finished", "run.forget",
    }  # fmt: skip
    assert seen == named


def test_every_message_of_both_roles_is_on_the_page() -> None:
    """Our rule: the page is complete."""
    page = PAGE.read_text(encoding="utf-8")
    package = ROOT / "ACPAgentRunner" / "pkg"
    for name in ("relay_hub", "relay_daemon", "relay_admission", "relay_auth", "relay_table"):
        source = (package / f"{name}.py").read_text(encoding="utf-8")
        for kind in ("daemon", "hub", "run"):
            for found in source.split(f'"type": "{kind}.')[1:]:
                assert f"{kind}.{found.split(chr(34))[0]}" in page
    for verb in ("prompt", "steer", "answer", "interrupt", "renew_mcp", "close"):
        assert f"`{verb}`" in page


# ------------------------------------------------------------------ a client made from the page


class Client:
    """A whole daemon in thirty lines, for one job at a time."""

    def __init__(self, hub: relay.HubProtocol, token: str) -> None:
        self.hub, self.key = hub, h(token.encode(), "daemon key", "client")
        hub.accept(1, "192.0.2.7", 0.0)
        hello = json.dumps(
            {
                "type": "daemon.hello",
                "protocol": "coding-relay-v1",
                "daemon_id": "client",
                "daemon_incarnation": "1",
                "nonce": b64(bytes(16)),
            },
            indent=1,
        )
        self.post(hello)
        challenge = self.fetch()
        parts = parts_of(hello, challenge)
        self.post(json.dumps({"type": "daemon.proof", "proof": b64(h(self.key, "proof of the daemon", *parts))}))
        assert json.loads(self.fetch())["proof"] == b64(h(self.key, "proof of the hub", *parts))
        self.up, self.down = h(self.key, "frames of the daemon", *parts), h(self.key, "frames of the hub", *parts)
        self.sent = self.got = 0
        self.say({"type": "daemon.state", "table": "", "resume": [], "quiesced": []})

    def post(self, frame: str) -> None:
        self.hub.receive(1, frame.encode(), 0.0)

    def fetch(self) -> str:
        frame = self.hub.next_frame(1)
        assert frame is not None
        return frame.decode()

    def say(self, *messages: Any) -> None:
        self.sent += 1
        self.post(seal(self.up, self.sent, list(messages)))

    def hear(self) -> list[Any]:
        messages = []
        while (frame := self.hub.next_frame(1)) is not None:
            self.got += 1
            messages += unseal(self.down, self.got, frame.decode())
        return messages


@pytest.mark.parametrize("size", [10, 900_000])
def test_a_client_made_from_the_page_alone_runs_a_job(size: int) -> None:
    """The wire contract is enough: spaces in its JSON, its own parts, acknowledgements as they come."""
    hub = relay.HubProtocol(epoch="e", random=Random(4).randbytes)
    hub.put_secret("one", "some token", 0.0)
    client = Client(hub, "some token")
    assert [message["type"] for message in client.hear()] == ["daemon.ready"]
    job_id = hub.start_job("one", "client", {"text": "é" * size})
    heard = client.hear()
    assert heard[0] == {"type": "run.start", "job_id": job_id, "lease": 120.0}
    records: list[Any] = []
    while streamed := [record for message in heard if message["type"] == "run.command" for record in message["records"]]:
        records += streamed
        client.say({"type": "run.ack", "job_id": job_id, "seq": len(records)})
        heard = client.hear()
    whole = records[0] if size == 10 else json.loads("".join(text for _, text, _ in records))
    assert whole == ["start", {"text": "é" * size}]
    client.say({"type": "run.event", "job_id": job_id, "seq": 1, "records": [["part", '{"n"', True], ["part", " : 1}", False]]})
    client.say(
        {"type": "run.event", "job_id": job_id, "seq": 3, "records": [{"n": 2}]},
        {"type": "run.finished", "job_id": job_id, "outcome": "completed", "last": 3, "quiescent": True},
    )
    events = hub.events()
    assert [event.events for event in events if isinstance(event, relay.JobEvents)] == [[{"n": 1}], [{"n": 2}]]
    assert events[-1] == relay.JobFinished(job_id, "completed")
    assert client.hear()[-1] == {"type": "run.forget", "job_id": job_id}
