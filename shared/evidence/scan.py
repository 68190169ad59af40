"""Nothing in the evidence tells of the builder: no path, no name of the machine, no secret, no key, no signed byte.

What programs print is kept without it (:func:`public`); what is frozen is looked through once more (:func:`scan`).
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from langbot_plugin import certification

from evidence import Failed, Refused, archives, gate

KEYS = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{64}")
SHORTEST = 4
"""Letters of a name that can be told from a word."""
SHORTEST_SECRET = 12
"""Letters of a variable's value that can be told from a setting."""
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASS|PWD$|CREDENTIAL|API_?KEY|_KEY$|_PAT$|AUTH(?!OR)|DSN", re.IGNORECASE)
IN_ADDRESS = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
"""The password in an address."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SECRET = "the secret "
SYSTEM = ("/usr", "/opt")
"""Where Pythons lie that are nobody's own."""


def private_texts(root: Path) -> dict[str, str]:
    """What must not be found, by what it is."""
    texts = {"the repository": str(root.resolve())}
    for name in (".venv", ".vendor"):
        if not (place := (root / name).resolve()).is_relative_to(root.resolve()):
            texts[f"the {name} directory"] = str(place)
    for what, prefix in (("the environment", sys.prefix), ("the interpreter", sys.base_prefix)):
        if not Path(prefix).resolve().is_relative_to(root.resolve()) and not prefix.startswith(SYSTEM):
            texts[what] = str(Path(prefix).resolve())
    texts["the temporary directory"] = str(Path(tempfile.gettempdir()).resolve() / "_")[:-1]
    texts["the lasting temporary directory"] = "/var/tmp/"
    # An account need not have one.
    if (home := os.path.expanduser("~")) not in ("~", "/"):  # noqa: PTH111 - Path.home raises where this says nothing
        texts["the home directory"] = home
    if cache := os.environ.get("XDG_CACHE_HOME", "").rstrip("/"):
        texts["the cache"] = cache + "/"
    host = socket.gethostname().partition(".")[0]
    if len(host) >= SHORTEST and host != "localhost" and not _is_a_word(root, host):
        texts["the machine"] = host
    account = getpass.getuser() if os.environ.get("USER") or os.environ.get("LOGNAME") else ""
    if len(account) >= SHORTEST and account != "root" and not _is_a_word(root, account):
        texts["the account"] = account
    for name, value in os.environ.items():
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET and not os.path.lexists(value):
            texts[f"{SECRET}{name}"] = value
        for password in IN_ADDRESS.findall(value):
            texts[f"{SECRET}in {name}"] = password
    return texts


def scan(directory: Path, private: Mapping[str, str], own: Path, traces: Iterable[bytes] = ()) -> None:
    """Look through every file; raises :class:`evidence.Failed` with the first find.

    Files below ``own`` (extracted sources) and packages are the commit's own bytes: no place or name of the builder is looked
    for in them. ``traces`` are bytes of keys and signatures that were used while the evidence was made.
    """
    places = {what: _pattern(text) for what, text in private.items()}
    secrets = {
        what: {text.encode(), json.dumps(text, ensure_ascii=False)[1:-1].encode()}
        for what, text in private.items()
        if what.startswith(SECRET)
    }
    used = list(traces)
    for file in sorted(directory.rglob("*")):
        if not file.is_file():
            continue
        data = file.read_bytes()
        shown = file.relative_to(directory)
        if KEYS.search(data):
            raise Failed(f"{shown} holds a private key")
        if any(trace in data for trace in used):
            raise Failed(f"{shown} holds a part of the throwaway key or of a signature made with it")
        if zipfile.is_zipfile(file) and (
            certification.verify_archive(data, lambda _: None).status != "absent" or archives.comment(data)
        ):
            raise Failed(f"{shown} is signed")
        if found := [what for what, forms in secrets.items() if any(form in data for form in forms)]:
            raise Failed(f"{shown} names {found[0]} of the builder")
        if file.suffix == ".lbpkg" or file.is_relative_to(own):
            continue
        text = _strings(data.decode(errors="replace"), file.suffix)
        for what, place in places.items():
            if place.search(text) or place.search(str(shown)):
                raise Failed(f"{shown} names {what} of the builder")


def public(text: str, private: Mapping[str, str]) -> str:
    """A text of a program without what is private, and without colours."""
    text = COLOURS.sub("", text)
    for what, each in sorted(private.items(), key=lambda item: -len(item[1])):
        text = _pattern(each).sub(f"<{what.removeprefix('the ')}>" + ("/" if each.endswith("/") else ""), text)
    return text


def public_value(value: Any, private: Mapping[str, str]) -> Any:
    """A JSON value with every text in it, keys too, made :func:`public`."""
    if isinstance(value, str):
        return public(value, private)
    if isinstance(value, list):
        return [public_value(each, private) for each in value]
    if isinstance(value, dict):
        return {public(key, private): public_value(each, private) for key, each in value.items()}
    return value


def _strings(text: str, suffix: str) -> str:
    """What a file says to its reader: of JSON every text in it, a line each, as it is meant."""
    if suffix != ".json":
        return COLOURS.sub("", text)
    found: list[str] = []
    json.loads(text, object_pairs_hook=lambda pairs: found.extend(each for pair in pairs for each in _texts(pair)))
    return COLOURS.sub("", "\n".join(found))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _pattern(text: str) -> re.Pattern[str]:
    """Where a private text stands: a path only where one begins, a name only as a word of its own."""
    if text.startswith("/"):
        return re.compile(rf"(?:(?<![\w>.-])|(?<=\s-[A-Za-z])){re.escape(text)}" + ("" if text.endswith("/") else r"(?![\w-])"))
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _is_a_word(root: Path, name: str) -> bool:
    """Whether the sources themselves use the name, which therefore tells nothing."""
    try:
        return bool(gate.git(root, "grep", "--quiet", "--fixed-strings", "--word-regexp", "--cached", name) == b"")
    except Refused:
        return False
