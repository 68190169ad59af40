"""The daemon program inside of the test process, with agents that are coroutines: for many machines at once, and for paces.

Policy file, job table, relay and sessions are the program's own; only its agents start no process (local protocol fixtures).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pkg import limits
from pkg.daemon_audit import Audit
from pkg.daemon_jobs import DurableJobTable
from pkg.daemon_policy import load
from pkg.daemon_program import Daemon, Slots
from pkg.relay_protocol import daemon_key
from testkit.daemon_rig import DAEMON_ID, DaemonHome
from testkit.scripted_driver import Script, ScriptedDriver

POLICIES = ("ask", "allow-edits", "allow-all", "deny")


@dataclass(slots=True)
class Machine:
    """One machine at its hub."""

    driver: ScriptedDriver
    states: list[str] = field(default_factory=list)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    parked: asyncio.Event = field(default_factory=asyncio.Event)


class _Told(Daemon):
    """The program's daemon, which tells its states."""

    machine: Machine

    def on_state(self, state: str, detail: str = "") -> None:
        super().on_state(state, detail)
        self.machine.states.append(state)
        for name in ("connected", "parked"):
            if state == name:
                getattr(self.machine, name).set()


@contextlib.asynccontextmanager
async def machine(
    directory: Path, url: str, token: str, script: Script, *, extra: Sequence[str] = (), recover: bool = True
) -> AsyncIterator[Machine]:
    """A machine whose agents do ``script``, connected until the block ends."""
    home = DaemonHome(directory, url, token=token)
    home.write("\n".join(extra))
    made = Machine(ScriptedDriver(script=script))
    policy = load(home.policy, {"acp"}, POLICIES)
    table = DurableJobTable(policy.state_dir / "table")
    left = await table.recover()
    daemon = _Told(
        policy=policy,
        drivers={"acp": made.driver},
        table=table,
        slots=Slots(limits.RELAY_JOBS),
        audit=Audit(policy.state_dir),
        url=url,
        key=daemon_key(token, DAEMON_ID),
        quiesced=left.quiesced,
        unproven=left.unproven,
        journal_dir=policy.state_dir / "journal",
        metadata={"agents": sorted(policy.agents)},
        features=("session-v1",),
    )
    daemon.machine = made
    running = asyncio.create_task(daemon.run_forever())
    try:
        yield made
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        table.close()
