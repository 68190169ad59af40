"""Nothing in the evidence tells of the builder: no path, no name of the machine, no key, no signed byte."""

from __future__ import annotations

import getpass
import os
import re
import socket
import tempfile
import zipfile
from pathlib import Path

from langbot_plugin import certification

from evidence import Failed

KEYS = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{64}")
SHORTEST = 4
"""Letters of a name that can be told from a word."""


def private_texts(root: Path) -> dict[str, str]:
    """What must not be found, by what it is."""
    texts = {"the repository": str(root.resolve()), "the temporary directory": str(Path(tempfile.gettempdir()) / "")}
    home = str(Path.home())
    if home.count("/") > 1:
        texts["the home directory"] = home + "/"
    elif home != "/":
        texts["the home directory"] = home + "/."
    host = socket.gethostname().partition(".")[0]
    if len(host) >= SHORTEST and host not in ("localhost", "debian"):
        texts["the machine"] = host
    user = getpass.getuser() if os.environ.get("USER") or os.environ.get("LOGNAME") else ""
    if len(user) >= SHORTEST and user != "root":
        texts["the account"] = user
    return texts


def scan(directory: Path, private: dict[str, str], own: Path) -> None:
    """Look through every file; raises :class:`evidence.Failed` with the first find.

    Files below ``own`` (extracted sources and packages) are the commit's own bytes: looked through for keys and signatures
    only.
    """
    for file in sorted(directory.rglob("*")):
        if not file.is_file():
            continue
        data = file.read_bytes()
        shown = file.relative_to(directory)
        if KEYS.search(data):
            raise Failed(f"{shown} holds a private key")
        if zipfile.is_zipfile(file) and certification.verify_archive(data, lambda _: None).status != "absent":
            raise Failed(f"{shown} is signed")
        if file.suffix == ".lbpkg" or file.is_relative_to(own):
            continue
        for what, text in private.items():
            if text.encode() in data:
                raise Failed(f"{shown} names {what} of the builder")


def public(text: str, private: dict[str, str]) -> str:
    """A text of a program without what is private."""
    for what, each in sorted(private.items(), key=lambda item: -len(item[1])):
        text = text.replace(each, f"<{what.removeprefix('the ')}>")
    return text
