#!/usr/bin/env python3
"""The daemon for a user's own machine: dials out to LangBot's plugin and runs coding agents here, as a policy file allows.

``daemon.py init`` writes the policy file, ``daemon.py keygen`` makes this machine's key, ``daemon.py check`` looks at both,
``daemon.py run`` works. It needs the directories ``agent`` and ``pkg`` beside it and the packages of
``requirements-daemon.txt``, and never LangBot's SDK.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"daemon: this needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}.")
if sys.platform == "win32":
    sys.exit("daemon: this runs on Linux and macOS. On Windows, use WSL.")

try:
    from agent import COMMANDS, DRIVERS, POLICIES
    from pkg import daemon_command
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] in ("agent", "pkg"):
        sys.exit(f"daemon: {exc.name} is missing. Take agent, pkg and requirements-daemon.txt out of the package, too.")
    requirements, venv = HERE / "requirements-daemon.txt", HERE / "venv"
    if not requirements.is_file():
        sys.exit("daemon: this version of the package drives no agent on a user's machine. Use the one of the ACP runner.")
    sys.exit(
        f"daemon: this Python has no package {exc.name}. Make an environment for the daemon and start it from there:\n"
        f"  {shlex.join((sys.executable, '-m', 'venv', str(venv)))}\n"
        f"  {shlex.join((str(venv / 'bin' / 'pip'), 'install', '-r', str(requirements)))}\n"
        f"  {shlex.join((str(venv / 'bin' / 'python'), str(HERE / 'daemon.py'), *sys.argv[1:]))}"
    )
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(daemon_command.main(sys.argv[1:], dict(DRIVERS), dict(COMMANDS), POLICIES))
