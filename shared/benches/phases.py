"""The phases of a benchmark, one after the other, each bounded and each cleaned up after.

A phase takes an empty directory and a number of repetitions and gives its rows. One that fails or takes too long is a row that
could not be measured, and so are processes that it leaves; the other phases still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benches.table import Row, counted
from testkit.sdk_worker import descendants, gone

Say = Callable[[str], None]
Phase = Callable[[Path, int], Awaitable[list[Row]]]
Phases = Mapping[str, tuple[Phase, float]]
"""Each phase by name, with the seconds it may take."""

LOG_LINES: Final = 20
LEFT_WITHIN: Final = 12.0
"""Seconds within which everything that was started must be gone."""


@contextlib.contextmanager
def _quiet(say: Say) -> Iterator[None]:
    """Keep what is logged on stderr, by this process and its children, aside; show its end when something goes wrong."""
    with tempfile.TemporaryFile() as log:
        sys.stderr.flush()
        terminal = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(terminal, 2)
            log.seek(0)
            for line in log.read().decode(errors="replace").splitlines()[-LOG_LINES:]:
                say(f"    {line}")
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


async def measure(phases: Phases, names: Sequence[str], repeats: int, say: Say) -> list[Row]:
    """Every row of the named phases."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    rows: list[Row] = []
    for name in names:
        phase, limit = phases[name]
        say(f"{name}: at most {limit:.0f} s")
        with tempfile.TemporaryDirectory(prefix="bench-") as base:
            try:
                with _quiet(say):
                    async with asyncio.timeout(limit):
                        rows += await phase(Path(base), repeats)
            except TimeoutError:
                say(f"{name}: not done within {limit:.0f} s")
                rows.append(Row(name, ()))
            except Exception as exc:  # noqa: BLE001 - the other phases still have something to say
                say(f"{name}: {type(exc).__name__}: {exc}")
                rows.append(Row(name, ()))
            left = descendants(os.getpid())
            if not await gone(left, LEFT_WITHIN):
                left = {pid: start for pid, start in descendants(os.getpid()).items() if left.get(pid) == start}
                rows.append(counted(f"{name}: processes left", [float(len(left))]))
    return rows
