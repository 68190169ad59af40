"""The whole suite as two pytest processes side by side: what waits for others much of its time, and everything else.

Guarantees: every test runs in exactly one of the two; both are over when :func:`run` returns, also after an interrupt; what
the one in the background printed is shown whole when it has ended; the worse exit code counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tooling import ROOT, steps

WAITING: Final = "real_host or real_claude or real_agents"
"""The markers of tests that wait for a chat's pace and for other programs, so that one core serves them and others."""


def run(python: Path) -> int:
    """Run both to their end; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [str(python), "-m", "pytest", "-m"]
    with tempfile.TemporaryFile() as output:
        waiting = subprocess.Popen(
            [*command, WAITING], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        others = subprocess.Popen([*command, f"not ({WAITING})"], cwd=ROOT)
        try:
            codes = [others.wait()]
            if waiting.poll() is None:
                steps.say(f"The tests marked {WAITING} are still running; what they print follows.")
            codes.append(waiting.wait())
        except KeyboardInterrupt:
            # The terminal has interrupted all three.
            others.wait()
            waiting.wait()
            raise
        except BaseException:
            for process in (others, waiting):
                process.terminate()
                process.wait()
            raise
        finally:
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
    # A process that a signal ended has a negative code.
    return max(abs(code) for code in codes)


def alone() -> bool:
    """Whether this machine has one core only, where two processes gain nothing."""
    return (os.cpu_count() or 1) < 2
