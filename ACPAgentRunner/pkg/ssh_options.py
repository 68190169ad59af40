"""What an SSH form may ask for: the target, the extra options, keys and host keys, checked before any client runs.

The rule for options: a runner form is edited by people who must not run programs beside the worker, and an SSH client can be
told in many ways to do so. So only options known to be harmless pass, each rebuilt from its parsed parts, so that what was
checked is what the client reads. The form's ``ssh-allow-local-commands`` lets every option pass that is an option at all.

Facts are of OpenSSH 9.2's ``ssh(1)`` and ``ssh_config(5)``: the first value of an option wins, so ours, which stand first on
the command line, cannot be changed by extra ones.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pkg import limits
from pkg.errors import SettingsError

_USER: Final = r"[A-Za-z0-9._+~][A-Za-z0-9._+~@-]*"
_HOST: Final = r"[A-Za-z0-9._][A-Za-z0-9._-]*"
_TARGET: Final = re.compile(rf"(?:(?P<user>{_USER})@)?(?P<host>{_HOST}|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)")
_JUMP: Final = re.compile(rf"(?:{_USER}@)?{_HOST}(?::\d{{1,5}})?(?:,(?:{_USER}@)?{_HOST}(?::\d{{1,5}})?)*")
_KEYWORD: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9]*)(?:\s*=\s*|\s+)(\S.*?)\s*")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_FLAGS: Final = frozenset("46CTaknqx")
"""Options without a value that change nothing we rely on (those without meaning here are kept for old configurations)."""

_DROPPED: Final = frozenset("Taknqx")
"""Of ``_FLAGS`` those we set ourselves or that would take stdin away: accepted and left out."""

_VALUES: Final = {"b": "bindaddress", "B": "bindinterface", "c": "ciphers", "i": "identityfile", "J": "proxyjump"}
_VALUES_MORE: Final = {"l": "user", "m": "macs", "p": "port"}
_WITH_VALUE: Final = frozenset("bceilmopBDEFIJLOPQRSWw")
"""Every letter of ``ssh(1)`` that takes a value."""

_HARMLESS: Final = {
    name.lower(): name
    for name in (
        *(
            "AddressFamily",
            "BindAddress",
            "BindInterface",
            "CASignatureAlgorithms",
            "CertificateFile",
            "CheckHostIP",
            "Ciphers",
        ),
        *("Compression", "ConnectionAttempts", "ConnectTimeout", "GSSAPIAuthentication", "GlobalKnownHostsFile"),
        *("HostKeyAlgorithms", "HostKeyAlias", "IPQoS", "IdentitiesOnly", "IdentityFile", "KexAlgorithms", "MACs", "Port"),
        *("PreferredAuthentications", "ProxyJump", "PubkeyAcceptedAlgorithms", "PubkeyAcceptedKeyTypes"),
        *("PubkeyAuthentication", "RekeyLimit", "RequiredRSASize", "ServerAliveCountMax", "ServerAliveInterval"),
        *("TCPKeepAlive", "User", "UserKnownHostsFile", "VerifyHostKeyDNS"),
    )
}
OURS: Final = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "NumberOfPasswordPrompts": "0",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "ExitOnForwardFailure": "yes",
    "LogLevel": "INFO",
    "EscapeChar": "none",
    "RequestTTY": "no",
    "RemoteCommand": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "Tunnel": "no",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ControlPersist": "no",
    "PermitLocalCommand": "no",
}
"""What every connection is made with. An extra option that says the same again is accepted and left out."""

_OURS_BY_NAME: Final = {name.lower(): value for name, value in OURS.items()}
_FILE_LISTS: Final = frozenset({"userknownhostsfile", "globalknownhostsfile"})
_FILES: Final = frozenset({"identityfile", "certificatefile"})
"""Options whose value is one path, which may have spaces."""
_OF_THE_WORKER: Final = _FILES | _FILE_LISTS | {"proxyjump"}
"""Options that use files or keys of the account the worker runs under."""

_KEY_TYPE: Final = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]+")
_KEY_NAME: Final = r"-----{} [A-Z0-9 ]*PRIVATE KEY-----"
_KEY_FRAME: Final = re.compile(rf"\s*({_KEY_NAME.format('BEGIN')})(.*?)({_KEY_NAME.format('END')})\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SshTarget:
    """The form's SSH fields. ``known_hosts`` is text or a path; ``private_key`` is secret text without a passphrase.

    ``client`` is ``auto`` except where a particular one is asked for; ``port`` zero and empty texts mean "not given".
    """

    target: str
    port: int = 0
    identity_file: str = ""
    connect_timeout: float = limits.SSH_CONNECT_SECONDS
    extra_options: str = ""
    known_hosts: str = field(default="", repr=False)
    private_key: str = field(default="", repr=False)
    allow_local_commands: bool = False
    client: Literal["auto", "openssh", "library"] = "auto"
    shared_worker: bool = False
    """Whether the worker serves other installations too: then no file, key, agent or program of its account is used."""


@dataclass(frozen=True, slots=True)
class SshOptions:
    """A target after every check: what both clients need, in one form."""

    host: str
    user: str
    port: int
    """Zero: the client's own configuration, else 22."""
    connect_timeout: float
    identity_file: str
    private_key: str = field(repr=False)
    known_hosts: str = field(repr=False)
    """Lines, ending with a newline; empty: the account's own files."""
    extra: tuple[str, ...] = ()
    """Arguments for the OpenSSH client."""
    named: tuple[tuple[str, str], ...] = ()
    """The extra options by lower-case name; flags have ``yes``. Only harmless ones."""
    forbidden: tuple[str, ...] = ()
    """Names let through by the switch only, unknown to the library."""
    shared_worker: bool = False
    """As :attr:`SshTarget.shared_worker`."""

    @property
    def destination(self) -> str:
        """``user@host`` or ``host``."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def machine(self) -> str:
        """``user@host:port``, the stable name of the place."""
        port = self.port or next((value for name, value in self.named if name == "port"), "") or 22
        user = self.user or next((value for name, value in self.named if name == "user"), "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}@{host}:{port}" if user else f"{host}:{port}"


def _bad(code: str, field_name: str, **params: object) -> SettingsError:
    return SettingsError(code, field=field_name, params=params)


def check(target: SshTarget) -> SshOptions:
    """Every field checked. Raises :class:`pkg.errors.SettingsError` naming the field; touches no network."""
    if target.shared_worker:
        _holds_everything(target)
    match = _TARGET.fullmatch(target.target)
    if match is None:
        raise _bad("coding.ssh_target_invalid", "ssh-target")
    host = match["host"].strip("[]")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _bad("coding.ssh_target_invalid", "ssh-target") from None
    if not 0 <= target.port <= 65535:
        raise _bad("coding.ssh_target_invalid", "ssh-port")
    extra, named, forbidden = _extra(target.extra_options, target.allow_local_commands)
    if target.shared_worker and any(name in _OF_THE_WORKER for name, _ in named):
        raise _bad("coding.ssh_in_pool", "ssh-extra-options")
    return SshOptions(
        host=host,
        user=match["user"] or "",
        port=target.port,
        connect_timeout=max(1.0, target.connect_timeout),
        identity_file=_identity(target.identity_file) if target.identity_file else "",
        private_key=normalise_key(target.private_key) if target.private_key.strip() else "",
        known_hosts=normalise_known_hosts(target.known_hosts) if target.known_hosts.strip() else "",
        extra=extra,
        named=named,
        forbidden=forbidden,
        shared_worker=target.shared_worker,
    )


def _holds_everything(target: SshTarget) -> None:
    """Raise ``coding.ssh_in_pool`` unless the target needs nothing of the worker that it shares with others."""
    known_hosts = target.known_hosts.strip()
    wrong = {
        "ssh-allow-local-commands": target.allow_local_commands,
        "ssh-identity-file": bool(target.identity_file),
        "ssh-known-hosts": known_hosts.startswith(("/", "~")) and "\n" not in known_hosts,
        "ssh-private-key-secret": not target.private_key.strip(),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise _bad("coding.ssh_in_pool", name)


def _identity(path: str) -> str:
    if _CONTROL.search(path) or '"' in path or path.startswith(("-", "pkcs11:")):
        raise _bad("coding.ssh_identity_missing", "ssh-identity-file")
    try:
        found = Path(path).expanduser()
        present = found.is_file()
    except (OSError, RuntimeError):
        present = False
    if not present:
        raise _bad("coding.ssh_identity_missing", "ssh-identity-file")
    return str(found)


def text_of(path: Path) -> str:
    """The content of a regular file of at most ``limits.SSH_FILE_BYTES``; raises ``OSError`` for anything else.

    Forms name such files, and a pipe or a device would never end, or never begin.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = source.read(limits.SSH_FILE_BYTES + 1)
    if len(data) > limits.SSH_FILE_BYTES:
        raise OSError(errno.EFBIG, "too large")
    return data.decode("utf-8", "replace")


def normalise_key(text: str) -> str:
    """A private key with the line breaks a one-line form field took away. Raises ``coding.ssh_key_invalid``."""
    match = _KEY_FRAME.fullmatch(text.replace("\\n", "\n"))
    if match is None or len(text) > limits.SSH_KEY_BYTES:
        raise _bad("coding.ssh_key_invalid", "ssh-private-key-secret")
    head, body, foot = match.groups()
    lines = body.split("\n") if "\n" in body.strip() else body.split()
    return "\n".join([head, *(line.strip() for line in lines if line.strip()), foot, ""])


def normalise_known_hosts(text: str) -> str:
    """Lines of a ``known_hosts`` file out of a form field: lines, lines joined by spaces, or the path of such a file.

    Raises ``coding.ssh_known_hosts_invalid`` when no host key is found.
    """
    text = text.strip()
    if text.startswith(("/", "~")) and "\n" not in text:
        try:
            text = text_of(Path(text).expanduser())
        except (OSError, RuntimeError, ValueError):
            raise _bad("coding.ssh_known_hosts_invalid", "ssh-known-hosts") from None
    words = [word for line in text.splitlines() if not line.lstrip().startswith("#") for word in line.split()]
    lines = []
    for place in range(1, len(words) - 1):
        if not _KEY_TYPE.fullmatch(words[place]) or not words[place + 1].startswith("AAAA"):
            continue
        if _KEY_TYPE.fullmatch(words[place - 1]) or words[place - 1].startswith("AAAA"):
            continue
        marker = words[place - 2] if place > 1 and words[place - 2].startswith("@") else ""
        lines.append(" ".join(filter(None, [marker, *words[place - 1 : place + 2]])))
    if not lines:
        raise _bad("coding.ssh_known_hosts_invalid", "ssh-known-hosts")
    return "\n".join([*lines, ""])


def _extra(text: str, everything: bool) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The arguments, the harmless options by name, and the names that only the switch let through."""
    if not text.strip():
        return (), (), ()
    try:
        words = shlex.split(text)
    except ValueError:
        raise _bad("coding.ssh_options_unparsable", "ssh-extra-options") from None
    if len(words) > limits.SSH_OPTIONS_MAX or any(_CONTROL.search(word) for word in words):
        raise _bad("coding.ssh_options_unparsable", "ssh-extra-options")
    arguments: list[str] = []
    named: list[tuple[str, str]] = []
    beyond: list[str] = []
    rest = iter(words)
    for word in rest:
        if len(word) < 2 or not word.startswith("-") or word == "--":
            raise _bad("coding.ssh_option_forbidden", "ssh-extra-options", option=_shown(word))
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in _WITH_VALUE:
                value = letters or next(rest, "")
                letters = ""
                if letter == "o" and _says_the_same(value):
                    continue
                option = _valued(letter, value)
                if option is not None:
                    named.append(option)
                    name, given = option
                    quoted = f'"{given}"' if name in _FILES else given
                    arguments += ["-o", f"{_HARMLESS[name]}={quoted}"]
                    continue
                shown = _shown(value.split("=")[0]) if letter == "o" else f"-{letter}"
                if not everything or not value:
                    raise _bad("coding.ssh_option_forbidden", "ssh-extra-options", option=shown)
                beyond.append(shown)
                arguments += [f"-{letter}", value]
            elif letter in _FLAGS:
                if letter not in _DROPPED:
                    named.append((letter, "yes"))
                    arguments.append(f"-{letter}")
            elif everything and letter.isalnum() and letter not in "GVNfst":
                beyond.append(f"-{letter}")
                arguments.append(f"-{letter}")
            else:
                raise _bad("coding.ssh_option_forbidden", "ssh-extra-options", option=f"-{_shown(letter)}")
    return tuple(arguments), tuple(named), tuple(beyond)


def _says_the_same(option: str) -> bool:
    match = _KEYWORD.fullmatch(option)
    return match is not None and _OURS_BY_NAME.get(match[1].lower()) == match[2]


def _valued(letter: str, value: str) -> tuple[str, str] | None:
    """The option of ``ssh_config`` that a letter with its value means, when it is a harmless one with a harmless value."""
    if letter == "o":
        match = _KEYWORD.fullmatch(value)
        if match is None:
            return None
        name, value = match[1].lower(), match[2]
    else:
        name = _VALUES.get(letter) or _VALUES_MORE.get(letter) or ""
    if name not in _HARMLESS or not value or value.startswith("-") or '"' in value:
        return None
    if name == "proxyjump" and not _JUMP.fullmatch(value):
        return None
    if name == "user" and not re.fullmatch(_USER, value):
        return None
    if name in _FILES and value.lower().startswith("pkcs11:"):
        return None
    if (name in _FILES and not _ends(value)) or (name in _FILE_LISTS and not all(map(_ends, value.split()))):
        return None
    return name, value


def _ends(path: str) -> bool:
    """Whether the client comes to the end of a file it is told to read: not so with pipes and most devices."""
    try:
        mode = Path(path).expanduser().stat().st_mode
    except (OSError, RuntimeError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or path == os.devnull


def _shown(word: str) -> str:
    """The part of an option that is safe to repeat: its name, never its value."""
    return re.sub(r"[^A-Za-z0-9-].*", "", word.strip(), flags=re.DOTALL)[:40] or "?"
