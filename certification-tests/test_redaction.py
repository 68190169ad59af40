"""Secrets in other programs' words: hidden however they are written, also where only the end of the words is kept."""

from __future__ import annotations

import json

import pytest

from pkg.redaction import Redactor

KEY = "-----BEGIN KEY-----\n  abcdefghijklmnopqrstuvwxyz0123  \nshort\n-----END KEY-----\n"


def test_known_secrets_are_hidden_and_short_values_left() -> None:
    """Our rule: a secret is never shown; what is too short to be one is no reason to mangle a text."""
    redact = Redactor(["canary-secret", "canary-secret-longer", "abc", ""])
    assert redact("x canary-secret-longer canary-secret abc") == "x *** *** abc"
    assert "canary" not in repr(redact)
    assert Redactor([])("text") == "text"


def test_every_usual_form_of_a_secret_is_hidden() -> None:
    """Our rule: as it is, inside JSON, and line by line where it has several."""
    value = 'to"ken\\-value'
    redact = Redactor([value, KEY])
    assert redact(f"a {value} b") == "a *** b"
    assert redact(json.dumps({"said": value})) == '{"said": "***"}'
    assert redact(json.dumps([KEY])) == '["***"]'
    assert redact("line: abcdefghijklmnopqrstuvwxyz0123!") == "line: ***!"
    assert redact("a short word") == "a short word"


def test_credentials_in_addresses_are_hidden_without_being_known() -> None:
    """Our rule: nobody writes them into a text on purpose."""
    assert Redactor([])("GET https://me:pa55@host:1/x@y and http://host/") == "GET https://***@host:1/x@y and http://host/"


@pytest.mark.parametrize("size", range(1, 20))
def test_a_cut_through_a_secret_shows_nothing_of_it(size: int) -> None:
    """Our rule: where the kept end begins in the middle of a secret, its rest is not shown, in one line or several."""
    secret = "S3cr3t-value-of-20-ch"
    kept = secret[-size:].encode()
    redact = Redactor([secret])
    assert redact.tail(kept + b" end", cut=True) == " end"
    assert redact.tail(kept + b"\nnext " + secret.encode(), cut=True) == "next ***"
    assert redact.tail("\u4f60".encode()[1:] + kept + b" end", cut=True) == " end"


def test_a_tail_that_was_not_cut_keeps_its_first_line() -> None:
    """Our rule: nothing is left out without a reason; terminal escapes are."""
    assert Redactor(["canary-secret"]).tail(b"\x1b[31mred\x1b[0m\ncanary-secret\n", cut=False) == "red\n***\n"
