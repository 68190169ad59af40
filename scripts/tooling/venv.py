"""Virtual environments made from a pinned lock, and reused as long as lock, place and Python are the same.

An environment is ready when its stamp equals the fingerprint of its lock, its directory and the interpreter inside it; so a
changed lock, a moved working copy and a replaced Python are all noticed. An environment whose installation was interrupted is
made anew. A lock names everything down to the last dependency, so nothing is resolved at installation.

They are made from this Python unless another is given. What is needed to make one, in the order tried: that Python's
``ensurepip``; a ``pip`` that can install into another environment; ``virtualenv``. With none of them,
:class:`tooling.SetupError` names the one command to run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tooling import ROOT, WORK, SetupError, steps

DEV_LOCK = ROOT / "scripts" / "lock" / "dev.txt"
DEV_VENV = ROOT / ".venv"
STAMP = "lock.stamp"
UNFINISHED = "installation.unfinished"
PIP_OPTIONS = (
    "--quiet",
    "--no-deps",
    "--require-hashes",
    "--no-input",
    "--disable-pip-version-check",
    "--require-virtualenv",
    "--no-warn-script-location",
)
OLDEST = (3, 11)
THIS = Path(sys.executable)


def interpreter(directory: Path) -> Path:
    """The Python of an environment."""
    return directory / "bin" / "python"


def development() -> Path:
    """The interpreter of the repository's own ``.venv``, which is made or brought up to date first if need be."""
    return ensure(DEV_VENV, DEV_LOCK, "the development environment .venv", WORK / "venv.lock")


def enter(script: str) -> None:
    """Go on under the development interpreter: starts the script again, same arguments, unless it is running there already."""
    python = development()
    if Path(sys.prefix).resolve() != DEV_VENV.resolve():
        os.execv(python, [str(python), script, *sys.argv[1:]])


def ensure(directory: Path, lock: Path, what: str, guard: Path, base: Path = THIS) -> Path:
    """The interpreter of the environment in ``directory`` with exactly what ``lock`` pins.

    ``what`` names it for people, ``guard`` is the lock file that keeps two runs from making it at once, ``base`` the Python it
    is made from. Raises :class:`tooling.SetupError`.
    """
    if is_ready(directory, lock):
        return interpreter(directory)
    with steps.exclusive(guard, what):
        if not is_ready(directory, lock):
            count = sum("==" in line for line in lock.read_text(encoding="utf-8").splitlines())
            with steps.announced(f"preparing {what}, {count} pinned packages (only when the lock has changed)"):
                _prepare(directory, lock, base)
    return interpreter(directory)


def is_ready(directory: Path, lock: Path) -> bool:
    """Whether the environment stands and was made from exactly this lock by an installation that finished."""
    stamp = directory / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == _stamp(directory, lock)


def _stamp(directory: Path, lock: Path) -> str:
    return steps.fingerprint(lock.read_bytes(), str(directory.resolve()), _identity(directory))


def _identity(directory: Path) -> str:
    """Version of the interpreter inside, empty when it cannot run (any more) or is too old."""
    code = f"import sys; print(sys.version) if sys.version_info >= {OLDEST} and sys.prefix != sys.base_prefix else None"
    try:
        done = subprocess.run(
            [interpreter(directory), "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _prepare(directory: Path, lock: Path, base: Path) -> None:
    unfinished = directory / UNFINISHED
    if not _identity(directory) or unfinished.exists():
        _remove(directory)
        _create(directory, base)
    unfinished.touch()
    (directory / STAMP).unlink(missing_ok=True)
    installer = _installer(directory)
    if installer is None:
        raise SetupError(_advice(base))
    steps.run([*installer, "install", *PIP_OPTIONS, "--requirement", lock])
    unfinished.unlink()
    steps.write_atomically(directory / STAMP, _stamp(directory, lock) + "\n")


def _remove(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not (directory / "pyvenv.cfg").exists() and any(directory.iterdir())):
        raise SetupError(f"{directory} is in the way: it is no virtual environment. Move it away and start again.")
    if directory.exists():
        shutil.rmtree(directory)


def _create(directory: Path, base: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    if _has(base, "ensurepip"):
        try:
            steps.run([base, "-m", "venv", directory])
            return
        except SetupError:
            shutil.rmtree(directory, ignore_errors=True)  # a Python whose ensurepip is there in name only
    if _has(base, "venv"):
        steps.run([base, "-m", "venv", "--without-pip", directory])
        if _installer(directory) is not None:
            return
        shutil.rmtree(directory)
    for virtualenv in ([sys.executable, "-m", "virtualenv"], [shutil.which("virtualenv") or "virtualenv"]):
        if _works([*virtualenv, "--version"]):
            steps.run([*virtualenv, "--quiet", "--python", base, directory])
            return
    raise SetupError(_advice(base))


def _has(base: Path, module: str) -> bool:
    if base == THIS:
        return importlib.util.find_spec(module) is not None
    return _works([base, "-I", "-c", f"import {module}"])


def _installer(directory: Path) -> list[str | Path] | None:
    """A pip that installs into ``directory``: its own, else one of this Python or on PATH."""
    inside = interpreter(directory)
    candidates: list[list[str | Path]] = [[inside, "-m", "pip"], [sys.executable, "-m", "pip", "--python", inside]]
    candidates += [[found, "--python", inside] for name in ("pip", "pip3") if (found := shutil.which(name))]
    return next((command for command in candidates if _works([*command, "--version"])), None)


def _works(command: Sequence[str | Path]) -> bool:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _advice(base: Path) -> str:
    root = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        command = f"{root}apt-get install --yes {_named(base)}-venv"
    elif shutil.which("dnf"):
        command = f"{root}dnf install --assumeyes python3-pip"
    elif shutil.which("pacman"):
        command = f"{root}pacman --sync --noconfirm python-pip"
    else:
        command = f"{base} -m ensurepip --user"
    return f"{base} has neither ensurepip nor pip nor virtualenv. Run this, then start again:\n\n    {command}\n"


def _named(base: Path) -> str:
    """The name a Debian package of this Python begins with."""
    return base.name if base != THIS else f"python{sys.version_info.major}.{sys.version_info.minor}"
