"""The real ACP agents of the suite, installed from the npm lock in ``certification-tests/vendor`` into ``.vendor``.

The lock holds versions and content hashes and no addresses, so whatever registry npm is set up for is used. Package scripts are
not run, except the one by which opencode puts its platform's binary in place. The directory's name carries the fingerprint of
the lock, and it gets that name only when the installation is complete.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

from tooling import ROOT, WORK, SetupError, steps

MANIFEST = ROOT / "certification-tests" / "vendor"
OLDEST_NODE = 20
FAMILY = "acp-agents-"


def directory() -> Path:
    """Where this lock's agents are or will be."""
    name = steps.fingerprint((MANIFEST / "package-lock.json").read_bytes(), platform.system(), platform.machine())
    return WORK / f"{FAMILY}{name}"


def binaries() -> Path:
    """The directory with the agents' commands: ``claude-agent-acp``, ``codex-acp``, ``gemini``, ``opencode``."""
    return directory() / "node_modules" / ".bin"


def missing() -> str:
    """Why the agents cannot be installed here, or the empty string."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return f"Node.js {OLDEST_NODE} or newer with npm is not installed"
    version = steps.run([node, "--version"]).strip()
    major = re.match(r"v(\d+)\.", version)
    if major is None or int(major[1]) < OLDEST_NODE:
        return f"Node.js is {version}, the agents need {OLDEST_NODE} or newer"
    return ""


def ensure() -> Path:
    """:func:`binaries`, installed first if need be. Raises :class:`tooling.SetupError`."""
    target = directory()
    if target.is_dir():
        return binaries()
    with steps.exclusive(WORK / "acp-agents.lock", "the real ACP agents"):
        if not target.is_dir():
            if reason := missing():
                raise SetupError(reason)
            with steps.announced("installing the real ACP agents, about 1 GB (only when their lock has changed)"):
                _install(target)
    return binaries()


def _install(target: Path) -> None:
    for old in WORK.glob(f"{FAMILY}*"):
        shutil.rmtree(old)
    staged = WORK / f"{FAMILY}unfinished.{os.getpid()}"
    staged.mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(MANIFEST / name, staged / name)
    # Not `npm ci`: one agent has a package per platform, and registries that mirror only some platforms made the lock
    # incomplete for the others, which `ci` refuses and `install` completes (by exact version).
    steps.run(["npm", "install", "--ignore-scripts", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"], cwd=staged)
    steps.run(["npm", "rebuild", "--loglevel=error", "opencode-ai"], cwd=staged)
    staged.rename(target)
