"""Where Codex keeps an account's sign-in and sessions, and the one writer's place of a session.

The account's own ``CODEX_HOME`` (else ``$HOME/.codex``) is used as it is: nothing of a run is written there. A session is
locked by the *real* path of its ``sessions`` directory, beside it, because Codex's own lock is per home: two homes that share
one directory through a link would both write (measured with 0.171).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pkg import limits, runtime_support
from pkg.errors import SessionUnavailable

LOCKS = ".langbot-locks"
TEMPORARY = "langbot-tmp"


def codex_home(env: Mapping[str, str]) -> Path:
    """The directory Codex will use in an environment laid over this account's own."""
    given = env.get("CODEX_HOME", "")
    if given:
        return Path(given)
    return Path(env.get("HOME") or runtime_support.home_directory()) / ".codex"


def prepared(env: Mapping[str, str]) -> Path:
    """:func:`codex_home`, made for this account alone where it is missing (Codex refuses a home that does not exist)."""
    home = codex_home(env)
    if not home.is_absolute():
        raise SessionUnavailable("coding.codex_home_unusable")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        raise SessionUnavailable("coding.codex_home_unusable") from None
    return home


def environment(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """``env`` with a temporary directory of the account's own where its home lies below the one that all share.

    Codex (0.171) puts no helper programs below the temporary directory, and then its sandbox does not find them. They lie in
    ``tmp`` of the home, which therefore must not be the temporary directory: commands in the sandbox write there, and would
    put programs of their own in the place of the sandbox.
    """
    shared = Path(os.path.realpath(env.get("TMPDIR") or tempfile.gettempdir()))
    real = Path(os.path.realpath(home))
    if not real.is_relative_to(shared):
        return dict(env)
    own = home / TEMPORARY
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
    return {**env, "TMPDIR": str(own)}


def writer_guard(
    env: Mapping[str, str], thread_id: str, *, wait: float = limits.SESSION_GUARD_WAIT
) -> AbstractAsyncContextManager[None]:
    """The one writer's place of a thread; see :func:`pkg.runtime_support.session_guard` for what it raises."""
    sessions = Path(os.path.realpath(codex_home(env) / "sessions"))
    with contextlib.suppress(OSError):
        sessions.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return runtime_support.session_guard(sessions.parent / LOCKS, sessions, thread_id, wait=wait)
