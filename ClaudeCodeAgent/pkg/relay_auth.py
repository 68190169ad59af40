"""Who is at the other end of a relay connection: keys, the mutual proof, and what a token must be like.

The installation's token never travels. Both sides derive the same *daemon key* from it and the daemon id, so a workstation
may hold the daemon key alone and can then only ever be itself. The handshake is::

    daemon                                              hub
      daemon.hello   {protocol, daemon_id, nonce, ...}   →
                     ←  hub.challenge {protocol, nonce, epoch}
      daemon.proof   {proof}                             →
                     ←  hub.proof {proof}                     (or parked, or a close)

Each proof is an HMAC with the daemon key over the prover's role, the daemon id, both nonces, and the whole hello and challenge
as they went over the wire. Two session keys, one for each direction, come from the same inputs under labels of their own, so
they belong to this connection only.

Guarantees: a proof made for one role, connection, daemon id or hello is worth nothing for another; comparing takes the same
time wherever two values differ; no secret is in a ``repr``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

from pkg import limits
from pkg.relay_frames import Counters, FrameError, Message, SealedChannel, decode_object, encode, text_of

PROTOCOL: Final = "coding-relay-v1"
NONCE_BYTES: Final = 24
KEY_PREFIX: Final = "crk1_"
"""What a per-daemon key in a file begins with, so that it is never mistaken for a token."""

TOKEN_CHARS: Final = 32
"""Characters a token of the shared profile has at least."""
TOKEN_DISTINCT: Final = 12
"""Different characters it has at least."""
TOKEN_COMMAND: Final = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
"""Prints a good token."""

Role = Literal["daemon", "hub"]

_DAEMON_ID: Final = re.compile(r"[^\x00-\x1f\x7f]{1,128}")


def token_problem(token: str) -> str:
    """Why a token may not open the shared profile, in a few words; ``""`` for one that may."""
    if len(token) < TOKEN_CHARS:
        return f"shorter than {TOKEN_CHARS} characters"
    if token != token.strip():
        return "space around it"
    if len(set(token)) < TOKEN_DISTINCT:
        return f"fewer than {TOKEN_DISTINCT} different characters"
    return ""


def daemon_key(token: str, daemon_id: str) -> bytes:
    """The key of one daemon of the installation that has this token."""
    return _hmac(token.encode("utf-8", "surrogatepass"), _keying(daemon_id))


def _keying(daemon_id: str) -> bytes:
    return _body(b"daemon key", daemon_id.encode("utf-8"))


def format_key(key: bytes) -> str:
    """The line a key file holds."""
    return KEY_PREFIX + base64.urlsafe_b64encode(key).decode("ascii").rstrip("=")


def parse_key(text: str) -> bytes:
    """The key of a :func:`format_key` line; raises ``ValueError``, without the line."""
    body = text.strip()
    try:
        if not body.startswith(KEY_PREFIX):
            raise ValueError
        key = base64.b64decode(body[len(KEY_PREFIX) :] + "=", altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != 32:
        raise ValueError(f"not a daemon key (they begin with {KEY_PREFIX})")
    return key


def valid_daemon_id(daemon_id: str) -> bool:
    """Whether a string can be a daemon id: 1 to 128 characters, no control characters, no lone surrogate."""
    try:
        daemon_id.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return _DAEMON_ID.fullmatch(daemon_id) is not None


def daemon_id_of(message: Message) -> str:
    """The field ``daemon_id``; raises :class:`FrameError`."""
    daemon_id = text_of(message, "daemon_id")
    if not valid_daemon_id(daemon_id):
        raise FrameError("bad field daemon_id")
    return daemon_id


def nonce_text(raw: bytes) -> str:
    """A nonce as it travels."""
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")


def nonce_of(message: Message) -> str:
    """The field ``nonce``: 16 to 64 bytes in base64url without padding; raises :class:`FrameError`."""
    value = text_of(message, "nonce", 86)
    if not re.fullmatch(r"[A-Za-z0-9_-]{22,86}", value):
        raise FrameError("bad field nonce")
    return value


# ------------------------------------------------------------------ proofs


@dataclass(frozen=True, slots=True)
class Transcript:
    """What both sides saw of a handshake."""

    daemon_id: str
    daemon_nonce: str
    hub_nonce: str
    hello: bytes
    challenge: bytes

    def derive(self, key: bytes, label: bytes) -> bytes:
        """32 bytes that only a holder of ``key`` can make for this handshake and ``label``."""
        return _hmac(key, self.body(label))

    def body(self, label: bytes) -> bytes:
        """What a key is applied to for ``label``: the same for every key."""
        return _body(
            label,
            self.daemon_id.encode("utf-8"),
            self.daemon_nonce.encode("ascii"),
            self.hub_nonce.encode("ascii"),
            self.hello,
            self.challenge,
        )

    def proof(self, key: bytes, role: Role) -> str:
        """The proof of ``role``."""
        return nonce_text(self.derive(key, _proving(role)))

    def proves(self, key: bytes, role: Role, proof: str) -> bool:
        """Whether ``proof`` is the one of ``role``."""
        return Claim(self, role, proof).made_with(key)

    def channel(self, key: bytes, role: Role, counters: Counters) -> SealedChannel:
        """The proven connection, as ``role`` sees it."""
        from_daemon = self.derive(key, b"frames of the daemon")
        from_hub = self.derive(key, b"frames of the hub")
        keys = (from_daemon, from_hub) if role == "daemon" else (from_hub, from_daemon)
        return SealedChannel(*keys, counters)


class Claim:
    """A proof as it was shown, to be tried with many keys: what does not depend on a key is worked out once."""

    __slots__ = ("_body", "_shown")

    def __init__(self, handshake: Transcript, role: Role, proof: str) -> None:
        """``proof`` is said to be the one of ``role``."""
        self._body = handshake.body(_proving(role))
        self._shown = proof.encode("utf-8", "replace")

    def made_with(self, key: bytes) -> bool:
        """Whether a holder of ``key`` made it."""
        return hmac.compare_digest(nonce_text(_hmac(key, self._body)).encode("ascii"), self._shown)


def transcript(hello: bytes, challenge: bytes) -> Transcript:
    """The transcript of a hello and a challenge as they went over the wire; raises :class:`FrameError`."""
    first = decode_object(hello, limits.RELAY_HELLO_BYTES)
    second = decode_object(challenge, limits.RELAY_HELLO_BYTES)
    return Transcript(daemon_id_of(first), nonce_of(first), nonce_of(second), hello, challenge)


def challenge_frame(nonce: bytes, epoch: str) -> bytes:
    """The hub's challenge."""
    return encode({"type": "hub.challenge", "protocol": PROTOCOL, "nonce": nonce_text(nonce), "epoch": epoch})


def proof_of(message: Message) -> str:
    """The field ``proof``; raises :class:`FrameError`."""
    return text_of(message, "proof", 64)


def _proving(role: Role) -> bytes:
    return b"proof of the " + role.encode("ascii")


def _body(label: bytes, *parts: bytes) -> bytes:
    return b"".join(b"%d:%b," % (len(part), part) for part in (PROTOCOL.encode("ascii"), label, *parts))


def _hmac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


# ------------------------------------------------------------------ which installation a secret belongs to

Installation = Hashable
"""Whatever identifies an installation: its full binding, or a constant."""


@dataclass(slots=True)
class Secrets:
    """The tokens of the installations one listener serves.

    Two installations with one token are both unusable until one of them changes: a proof could mean either.
    """

    _tokens: dict[Installation, str] = field(default_factory=dict, repr=False)
    _holders: dict[bytes, dict[Installation, None]] = field(default_factory=dict, repr=False)
    """Who has a token, by its digest: as long as anybody has it."""

    def put(self, installation: Installation, token: str) -> bool:
        """Set an installation's token; whether it replaced another one."""
        before = self._tokens.get(installation)
        self.drop(installation)
        self._tokens[installation] = token
        self._holders.setdefault(_digest(token), {})[installation] = None
        return before is not None and before != token

    def drop(self, installation: Installation) -> None:
        """Forget an installation's token."""
        token = self._tokens.pop(installation, None)
        if token is None:
            return
        digest = _digest(token)
        del self._holders[digest][installation]
        if not self._holders[digest]:
            del self._holders[digest]

    def has(self, installation: Installation) -> bool:
        """Whether the installation has a token here."""
        return installation in self._tokens

    def conflicting(self, installation: Installation) -> bool:
        """Whether another installation has the same token."""
        token = self._tokens.get(installation)
        return token is not None and len(self._holders[_digest(token)]) > 1

    def rivals(self, installation: Installation) -> list[Installation]:
        """The other installations that have the same token."""
        token = self._tokens.get(installation)
        return [] if token is None else [each for each in self._holders[_digest(token)] if each != installation]

    def proven(self, handshake: Transcript, proof: str) -> list[tuple[Installation, bytes]]:
        """Every installation whose token made this proof, with the daemon key.

        A stranger makes this try every token, so that nothing is done for each of them that can be done once.
        """
        claim, keying = Claim(handshake, "daemon", proof), _keying(handshake.daemon_id)
        for token in self._tokens.values():
            key = _hmac(token.encode("utf-8", "surrogatepass"), keying)
            if claim.made_with(key):
                return [(holder, key) for holder in self._holders[_digest(token)]]
        return []

    def proven_by(self, installation: Installation, handshake: Transcript, proof: str) -> tuple[Installation, bytes] | None:
        """The installation, with the daemon key, when its own token made this proof."""
        key = daemon_key(self._tokens[installation], handshake.daemon_id)
        return (installation, key) if handshake.proves(key, "daemon", proof) else None

    def holding(self, daemon_id: str, token: str) -> list[tuple[Installation, bytes]]:
        """Every installation that has exactly this token, with the daemon key."""
        return [(found, daemon_key(own, daemon_id)) for found, own in self._tokens.items() if _same(own, token)]


def fingerprint(key: bytes) -> bytes:
    """What tells two keys apart without holding them."""
    return hashlib.sha256(b"coding-relay-v1 fingerprint" + key).digest()[:16]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
