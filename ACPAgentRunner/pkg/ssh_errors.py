"""What an SSH client's last words mean: its stderr in the C locale, turned into one code a person can act on.

Nothing of the text itself reaches a person except one last line, and only when its meaning is not known: bounded, without
paths, without the secrets named. The words are those of OpenSSH 8 to 10 (measured on 9.2); the library's child program
writes :data:`MARK` and the code instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pkg import limits, text_clean
from pkg.errors import LaunchError
from pkg.redaction import Redactor

MARK: Final = "coding-ssh-error: "
"""How the library's child program begins the one line that says why it failed; a code without ``coding.`` follows."""

_CODES: Final = frozenset(
    {
        *("ssh_refused", "ssh_timeout", "ssh_no_route", "ssh_name_unknown", "ssh_host_key_unknown", "ssh_host_key_changed"),
        *("ssh_permission_denied", "ssh_key_unusable", "ssh_tunnel_failed", "ssh_algorithms", "ssh_closed"),
        *("ssh_client_missing", "ssh_failed"),
    }
)
"""What the child program may say."""
_MEANINGS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), code)
    for pattern, code in (
        (r"no user exists for uid|you don't exist", "ssh_client_missing"),
        (r"remote port forwarding failed for listen port", "ssh_tunnel_failed"),
        (r"REMOTE HOST IDENTIFICATION HAS CHANGED|REVOKED HOST KEY|host key .* has changed", "ssh_host_key_changed"),
        (r"no \S+ host key is known for|host key verification failed", "ssh_host_key_unknown"),
        (r"could not resolve hostname", "ssh_name_unknown"),
        (r"UNPROTECTED PRIVATE KEY FILE|bad permissions|bad owner or permissions", "ssh_key_unusable"),
        (r"^load key .*(invalid format|error in libcrypto|incorrect passphrase|passphrase supplied)", "ssh_key_unusable"),
        (r"permission denied \(|too many authentication failures|no more authentication methods", "ssh_permission_denied"),
        (r"connection refused", "ssh_refused"),
        (r"no route to host|network is unreachable|host is down|cannot assign requested address", "ssh_no_route"),
        (r"timed out|timeout, server", "ssh_timeout"),
        (r"unable to negotiate|no matching (host key|cipher|key exchange|mac)", "ssh_algorithms"),
        (r"bad configuration option|unsupported option|keyword .* extra arguments|command-line:? line 0", "ssh_option_refused"),
        (r"kex_exchange_identification|connection (closed|reset) by|connection to .* closed|broken pipe", "ssh_closed"),
    )
)
_PATH: Final = re.compile(r"(?<![A-Za-z0-9])[~.]?/[^\s'\":,]+")
_RETRYABLE: Final = frozenset({"ssh_timeout", "ssh_refused", "ssh_no_route", "ssh_closed", "ssh_tunnel_failed"})


def classify(stderr: str, *, machine: str, secrets: Iterable[str] = ()) -> LaunchError:
    """The error that ``stderr`` of a failed client means; ``coding.ssh_failed`` with its last line when nothing is known."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in reversed(lines):
        code = line.removeprefix(MARK)
        if line.startswith(MARK) and code in _CODES - {"ssh_failed"}:
            return error(code, machine)
    for pattern, code in _MEANINGS:
        if any(pattern.search(line) for line in lines):
            return error(code, machine)
    words = [line for line in lines if not line.startswith(MARK)]
    detail = _PATH.sub("…", text_clean.one_line(Redactor(secrets)(words[-1]), limits.SSH_DETAIL_CHARS)) if words else ""
    return error("ssh_failed", machine, detail=detail)


def error(code: str, machine: str, *, detail: str = "") -> LaunchError:
    """The launch error ``coding.<code>`` about ``machine``."""
    return LaunchError(f"coding.{code}", detail=detail, retryable=code in _RETRYABLE, machine=machine)
