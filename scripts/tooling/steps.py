"""Running slow steps: one line for people, one runner at a time, completion recorded in one atomic step.

Guarantees: a step that did not finish never looks finished; two processes that need the same thing do not prepare it
twice, the second waits and says so; a failed command shows the end of what it printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tooling import SetupError

FAILURE_LINES = 20
"""Lines of a failed command's output that are shown."""


def say(text: str) -> None:
    """One line for people, on stderr so that stdout stays usable."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path`` (kernel lock, gone with its process); says so once when it has to wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}: another run is preparing it, waiting for that")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """Run a command to its end and return what it printed; raises :class:`SetupError` with its last lines when it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as exc:
        raise SetupError(f"{command[0]} cannot be started: {exc.strerror}") from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-FAILURE_LINES:])
        raise SetupError(f"{tail}\n{Path(str(command[0])).name} failed with exit code {done.returncode}")
    return done.stdout


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Say what is being done before it starts and how long it took when it is done."""
    started = time.monotonic()
    say(f"{text} ...")
    yield
    say(f"{text}: done in {time.monotonic() - started:.0f} s")


def fingerprint(*parts: str | bytes) -> str:
    """A short hash over all parts, each kept apart from the next."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:20]


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` in one step."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
