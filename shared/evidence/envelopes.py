"""Archives are unsigned; copies of them, signed with a key that is thrown away, are told apart in every status.

The SDK fixes no signature algorithm. The throwaway key is an HMAC's, made for one call and never written; the signed copies
are in memory only. So no signed byte and no key can stay.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import io
import json
import secrets
import zipfile
from collections.abc import Callable
from typing import Any

from langbot_plugin import certification

from evidence import Failed

KEY_ID = "throwaway"
STATUSES = (
    "valid",
    "absent",
    "malformed",
    "unsupported_schema",
    "digest_mismatch",
    "manifest_mismatch",
    "unknown_key",
    "signature_invalid",
)


def unsigned(archive: bytes) -> None:
    """Raise :class:`evidence.Failed` unless the archive has no envelope and no other comment."""
    status = certification.verify_archive(archive, lambda _: None).status
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        comment = opened.comment
    if status != "absent" or comment:
        raise Failed(f"the archive is not unsigned: {status}, {len(comment)} bytes of comment")


def statuses(archive: bytes) -> dict[str, str]:
    """What the SDK says of a copy in each condition; raises :class:`evidence.Failed` when one is said to be another."""
    key = secrets.token_bytes(32)

    def signer(message: bytes) -> bytes:
        return hmac.new(key, message, hashlib.sha256).digest()

    def verifier(message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(signer(message), signature)

    def resolver(key_id: str) -> Callable[[bytes, bytes], bool] | None:
        return verifier if key_id == KEY_ID else None

    envelope = certification.create_envelope(archive, KEY_ID, signer)
    signed = certification.write_envelope(archive, envelope)
    forged = dataclasses.replace(envelope, signature=base64.b64encode(secrets.token_bytes(32)).decode())
    renamed = certification.sign_envelope(
        dataclasses.replace(envelope, plugin_id={**envelope.plugin_id, "name": "another"}), signer
    )
    stranger = certification.create_envelope(archive, "nobody", signer)
    made = {
        "valid": signed,
        "absent": archive,
        "malformed": _commented(archive, b"{"),
        "unsupported_schema": _commented(archive, _json({**envelope.to_dict(), "schema": "certified-plugin-envelope-v0"})),
        "digest_mismatch": _commented(_grown(archive), _json(envelope.to_dict())),
        "manifest_mismatch": certification.write_envelope(archive, renamed),
        "unknown_key": certification.write_envelope(archive, stranger),
        "signature_invalid": certification.write_envelope(archive, forged),
    }
    said = {name: certification.verify_archive(copy, resolver).status for name, copy in made.items()}
    if wrong := {name: status for name, status in said.items() if name != status}:
        raise Failed(f"envelopes are not told apart: {wrong}")
    if certification.normalized_zip_digest(signed) != hashlib.sha256(archive).hexdigest():
        raise Failed("signing changes more than the comment")
    return said


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _commented(archive: bytes, comment: bytes) -> bytes:
    copy = io.BytesIO(archive)
    with zipfile.ZipFile(copy, "a") as opened:
        opened.comment = comment
    return copy.getvalue()


def _grown(archive: bytes) -> bytes:
    copy = io.BytesIO(archive)
    with zipfile.ZipFile(copy, "a") as opened:
        opened.writestr("added.txt", "one member more")
    return copy.getvalue()
