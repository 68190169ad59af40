"""Archives are unsigned; copies of them, signed with a key that is thrown away, are told apart in every status.

The SDK fixes no signature algorithm; the throwaway key is an Ed25519 key that is never written. The copies are files of a
temporary directory that is gone when this is done. :attr:`Trial.traces` are the bytes by which whatever stayed would be found.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from langbot_plugin import certification

from evidence import Failed, archives
from evidence.recheck import STATUSES

KEY_ID = "throwaway"
ALGORITHM = "Ed25519"


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What the SDK said of each copy, and what must be found nowhere afterwards."""

    statuses: Mapping[str, str]
    traces: frozenset[bytes] = dataclasses.field(repr=False)


def unsigned(archive: bytes) -> None:
    """Raise :class:`evidence.Failed` unless the archive has no envelope and no other comment."""
    status = certification.verify_archive(archive, lambda _: None).status
    comment = archives.comment(archive)
    if status != "absent" or comment:
        raise Failed(f"the archive is not unsigned: {status}, {len(comment)} bytes of comment")


def trial(archive: bytes) -> Trial:
    """What the SDK says of copies in each condition; raises :class:`evidence.Failed` when one is said to be another."""
    key = Ed25519PrivateKey.generate()
    signatures: list[bytes] = []

    def signer(message: bytes) -> bytes:
        signatures.append(key.sign(message))
        return signatures[-1]

    def verifier(message: bytes, signature: bytes) -> bool:
        try:
            key.public_key().verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def resolver(key_id: str) -> Callable[[bytes, bytes], bool] | None:
        return verifier if key_id == KEY_ID else None

    envelope = certification.create_envelope(archive, KEY_ID, signer)
    forged = dataclasses.replace(envelope, signature=base64.b64encode(secrets.token_bytes(64)).decode())
    renamed = certification.sign_envelope(
        dataclasses.replace(envelope, plugin_id={**envelope.plugin_id, "name": "another"}), signer
    )
    stranger = certification.create_envelope(archive, "nobody", signer)
    made = {
        "valid": certification.write_envelope(archive, envelope),
        "absent": archive,
        "malformed": commented(archive, b"{"),
        "unsupported_schema": commented(archive, _json({**envelope.to_dict(), "schema": "certified-plugin-envelope-v0"})),
        "digest_mismatch": commented(_grown(archive), _json(envelope.to_dict())),
        "manifest_mismatch": certification.write_envelope(archive, renamed),
        "unknown_key": certification.write_envelope(archive, stranger),
        "signature_invalid": certification.write_envelope(archive, forged),
    }
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="copies-") as base:
        for name, data in made.items():
            copy = Path(base, f"{name}.lbpkg")
            copy.write_bytes(data)
            said[name] = certification.verify_archive(copy.read_bytes(), resolver).status
    if Path(base).exists():
        raise Failed("the signed copies are still there")
    if set(said) != set(STATUSES):
        raise Failed("not every status of an envelope was tried")
    if wrong := {name: status for name, status in said.items() if name != status}:
        raise Failed(f"envelopes are not told apart: {wrong}")
    if certification.normalized_zip_digest(made["valid"]) != hashlib.sha256(archive).hexdigest():
        raise Failed("signing changes more than the comment")
    return Trial(said, frozenset(_traces([key.private_bytes_raw(), *signatures])))


def commented(archive: bytes, comment: bytes) -> bytes:
    """A copy of an archive with a comment."""
    copy = io.BytesIO(archive)
    with zipfile.ZipFile(copy, "a") as opened:
        opened.comment = comment
    return copy.getvalue()


def _traces(secret: list[bytes]) -> list[bytes]:
    return [form for each in secret for form in (each, each.hex().encode(), base64.b64encode(each))]


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _grown(archive: bytes) -> bytes:
    copy = io.BytesIO(archive)
    with zipfile.ZipFile(copy, "a") as opened:
        opened.writestr("added.txt", "one member more")
    return copy.getvalue()
