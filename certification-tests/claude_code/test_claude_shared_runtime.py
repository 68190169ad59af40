"""One process for every installation of the Claude Code package: the pool, daemons, and the scripted program behind each."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.pool_pair import VARIABLE, asked_at_once, pair, revoked_in_its_turn

pytestmark = [pytest.mark.shared_runtime, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

ASKS = 'ask Bash {"command": "make"}'
SECRET = f"env {VARIABLE}"
ALLOWED, DENIED = "allowed {", "denied "


async def test_two_installations_are_asked_and_answered_at_once_and_one_is_removed(tmp_path: Path) -> None:
    """Our rule: every name is the same, and nothing crosses; whoever is removed in its turn leaves nothing and nobody else."""
    async with pair(tmp_path) as at:
        outcomes = await asked_at_once(at, ASKS, SECRET)
        assert ALLOWED in outcomes["A"].text
        assert DENIED in outcomes["B"].text
        assert DENIED not in outcomes["A"].text
        for tenant in at.both:
            assert tenant.value in tenant.everything(), "the agent has its secret"
        assert at.crossed({uid: outcome.text + outcome.log for uid, outcome in outcomes.items()}) == []
        await revoked_in_its_turn(at, tmp_path)
