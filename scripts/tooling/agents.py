"""The real agents of the suite, installed from the npm locks below ``certification-tests/vendor`` into ``.vendor``.

The locks hold versions and content hashes and no addresses, so whatever registry npm is set up for is used. Package scripts are
not run, except the one by which opencode puts its platform's binary in place. The name of an installation's directory carries
the fingerprint of its lock, and it gets that name only when the installation is complete.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tooling import ROOT, WORK, SetupError, steps

LOCKS = ROOT / "certification-tests" / "vendor"
OLDEST_NODE = 20


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one lock."""

    family: str
    """What the names of the installation's directories begin with."""
    manifest: Path
    """The directory with ``package.json`` and ``package-lock.json``."""
    what: str
    """What it is, for people."""
    size: str
    """About how much is downloaded and unpacked, for people."""
    rebuilt: tuple[str, ...] = ()
    """Packages whose own installation script is run."""

    def directory(self) -> Path:
        """Where this lock's agents are or will be."""
        name = steps.fingerprint((self.manifest / "package-lock.json").read_bytes(), platform.system(), platform.machine())
        return WORK / f"{self.family}-{name}"

    def package(self, name: str) -> Path:
        """The directory of an installed package."""
        return self.directory() / "node_modules" / name

    def binaries(self) -> Path:
        """The directory with the agents' commands."""
        return self.directory() / "node_modules" / ".bin"

    def ensure(self) -> Path:
        """:meth:`directory`, installed first if need be. Raises :class:`tooling.SetupError`."""
        target = self.directory()
        if target.is_dir():
            return target
        with steps.exclusive(WORK / f"{self.family}.lock", self.what):
            if not target.is_dir():
                if reason := missing():
                    raise SetupError(reason)
                with steps.announced(f"installing {self.what}, about {self.size} (only when the lock has changed)"):
                    self._install(target)
        return target

    def _install(self, target: Path) -> None:
        for old in WORK.glob(f"{self.family}-*"):
            shutil.rmtree(old)
        staged = WORK / f"{self.family}-unfinished.{os.getpid()}"
        try:
            staged.mkdir(parents=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copyfile(self.manifest / name, staged / name)
            # Not `npm ci`: one agent has a package per platform, and registries that mirror only some platforms made the lock
            # incomplete for the others, which `ci` refuses and `install` completes (by exact version).
            steps.run(
                ["npm", "install", "--ignore-scripts", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"], cwd=staged
            )
            if self.rebuilt:
                steps.run(["npm", "rebuild", "--loglevel=error", *self.rebuilt], cwd=staged)
            staged.rename(target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


ACP = Agents("acp-agents", LOCKS, "the real ACP agents", "1 GB", ("opencode-ai",))
"""Commands: ``claude-agent-acp``, ``codex-acp``, ``gemini``, ``opencode``."""

CLAUDE_CODE = Agents("claude-code", LOCKS / "claude-code", "the real Claude Code", "400 MB")
"""The program is :func:`claude_code`; it needs Node.js only to be installed."""


CODEX = Agents("codex", LOCKS / "codex", "the real Codex", "420 MB")
"""The program is :func:`codex`; it needs Node.js only to be installed."""


def claude_code() -> Path:
    """The native program of the installed Claude Code, not its wrapper. Raises :class:`tooling.SetupError`."""
    scope = CLAUDE_CODE.package("@anthropic-ai")
    found = sorted(scope.glob("claude-code-*/claude"))
    if len(found) != 1:
        raise SetupError(f"{CLAUDE_CODE.what}: npm installed {len(found)} programs for this platform below {scope}, not one")
    return found[0]


def codex() -> Path:
    """The native program of the installed Codex, not its wrapper. Raises :class:`tooling.SetupError`."""
    scope = CODEX.package("@openai")
    found = sorted(scope.glob("codex-*/vendor/*/bin/codex"))
    if len(found) != 1:
        raise SetupError(f"{CODEX.what}: npm installed {len(found)} programs for this platform below {scope}, not one")
    return found[0]


def missing() -> str:
    """Why agents cannot be installed here, or the empty string."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return f"Node.js {OLDEST_NODE} or newer with npm is not installed; install it and run this again"
    version = steps.run([node, "--version"]).strip()
    major = re.match(r"v(\d+)\.", version)
    if major is None or int(major[1]) < OLDEST_NODE:
        return f"Node.js is {version}, the agents need {OLDEST_NODE} or newer"
    return ""
