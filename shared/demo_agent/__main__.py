"""Start the agent on stdin and stdout: ``python shared/demo_agent``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo_agent.server import main

if __name__ == "__main__":
    main(sys.argv[1:])
