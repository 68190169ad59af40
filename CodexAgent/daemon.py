#!/usr/bin/env python3
"""The daemon for a user's own machine: dials out to LangBot's plugin and runs coding agents here, as a policy file allows.

``daemon.py keygen`` makes this machine's key, ``daemon.py check`` looks at the policy file, ``daemon.py run`` works. It needs
what ``requirements-daemon.txt`` lists, and never LangBot's SDK.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import DRIVERS
from pkg import daemon_command

if __name__ == "__main__":
    sys.exit(daemon_command.main(sys.argv[1:], dict(DRIVERS)))
