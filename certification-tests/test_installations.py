"""The registry of what an installation has running: keyed by the full binding, emptied by revocation, owner of its work."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Iterator

import pytest
from langbot_plugin.entities.io.context import InstallationBinding
from main import CodingRunnerPlugin

from pkg import installations, limits
from pkg.agent_api import SessionSpec
from pkg.errors import ProcessCleanupUnconfirmed, Refused
from pkg.installations import Installation, Locks, installation, revoke
from pkg.warm_sessions import LiveSession
from testkit.scripted_driver import ScriptedDriver

PARTS = {
    "instance_uuid": "i",
    "workspace_uuid": "w",
    "placement_generation": 1,
    "installation_uuid": "A",
    "runtime_revision": 1,
    "artifact_digest": "0" * 64,
}


def binding(**parts: object) -> InstallationBinding:
    return InstallationBinding.model_validate({**PARTS, **parts})


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    yield
    assert not installations._installations
    assert not installations._revocations


class Run:
    """A run as the registry sees it, that ends when the test lets it."""

    def __init__(self) -> None:
        self.revoked = asyncio.Event()
        self.over = asyncio.Event()

    def revoke(self) -> None:
        self.revoked.set()

    async def ended(self) -> None:
        await self.over.wait()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changed",
    [
        {"instance_uuid": "j"},
        {"workspace_uuid": "v"},
        {"placement_generation": 2},
        {"installation_uuid": "B"},
        {"runtime_revision": 2},
        {"artifact_digest": "1" * 64},
    ],
)
async def test_every_part_of_the_binding_is_part_of_the_key(changed: dict[str, object]) -> None:
    """Authority table: B is the full binding; a key that lacks a part is a defect."""
    one, other = installation(binding()), installation(binding(**changed))
    assert one is not other
    assert installation(binding()) is one
    await revoke(binding())
    await revoke(binding(**changed))


@pytest.mark.asyncio
async def test_without_a_binding_there_is_one_constant_key() -> None:
    """Our rule: debug and old workers serve one installation."""
    assert installation(None) is installation(None)
    assert installation(None) is not installation(binding())
    await revoke(None)
    await revoke(binding())


@pytest.mark.asyncio
async def test_revoking_tells_every_run_and_waits_for_each() -> None:
    """SDK fact: nothing else ends a revoked installation's runs."""
    found = installation(binding())
    runs = {"a": Run(), "b": Run()}
    found.runs.update(runs)
    revoking = asyncio.create_task(revoke(binding()))
    for run in runs.values():
        await asyncio.wait_for(run.revoked.wait(), 10)
    runs["a"].over.set()
    done, _ = await asyncio.wait({revoking}, timeout=0.05)
    assert not done
    with pytest.raises(Refused):
        found.check()
    runs["b"].over.set()
    await asyncio.wait_for(revoking, 10)


@pytest.mark.asyncio
async def test_a_revoked_installation_starts_nothing() -> None:
    """Our rule: a run that was on its way when its installation ended is refused in words."""
    owner = installation(binding())
    owner.check()
    await revoke(binding())
    with pytest.raises(Refused) as caught:
        owner.check()
    assert caught.value.code == "coding.revoked"


@pytest.mark.asyncio
async def test_the_plugin_s_hook_is_the_revocation() -> None:
    """SDK fact: ``on_installation_revoked`` is all that a shared worker hears of an installation's end."""
    owner, other = installation(binding()), installation(binding(installation_uuid="B"))
    plugin = CodingRunnerPlugin.__new__(CodingRunnerPlugin)
    await plugin.on_installation_revoked(binding())
    assert owner.revoked
    assert not other.revoked
    await plugin.on_installation_revoked(binding(installation_uuid="B"))
    assert other.revoked


@pytest.mark.asyncio
async def test_a_cleanup_that_was_not_confirmed_is_kept_until_it_is_told() -> None:
    """Our rule: an end that nobody could prove is never forgotten before a person has read of it, and told once."""

    async def fails() -> None:
        raise ProcessCleanupUnconfirmed("processes outlived SIGKILL", (1,))

    owner = Installation("test")
    with pytest.raises(ProcessCleanupUnconfirmed):
        await owner.adopt(fails(), name="session close")
    assert [owner.take_unconfirmed(), owner.take_unconfirmed()] == [1, 0]


@pytest.mark.asyncio
async def test_a_second_revocation_awaits_the_first_and_a_cancelled_one_does_not_stop_it() -> None:
    """Our rule: what was begun is finished, whoever stops waiting for it."""
    found, run = installation(binding()), Run()
    found.runs["a"] = run
    first = asyncio.create_task(revoke(binding()))
    await asyncio.wait_for(run.revoked.wait(), 10)
    second = asyncio.create_task(revoke(binding()))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    run.over.set()
    await asyncio.wait_for(second, 10)


@pytest.mark.asyncio
async def test_revoking_closes_sessions_ends_work_and_drops_secrets() -> None:
    """Our rule: everything that ends is ended by its owner and awaited."""
    found = installation(binding())
    session = await ScriptedDriver().open(SessionSpec(("x",), "/"), None)
    found.warm.put(LiveSession("k", "f", session, found.adopt), 60)
    dropped: list[str] = []
    found.hold(lambda: dropped.append("kept"))
    forget = found.hold(lambda: dropped.append("forgotten"))
    forget()
    worked = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        worked.set()

    found.adopt(work(), name="work")
    await revoke(binding())
    assert session.closed.is_set()
    assert dropped == ["kept"]
    assert worked.is_set()


@pytest.mark.asyncio
async def test_revoking_what_is_not_there_does_nothing() -> None:
    """SDK fact: the hook may come for an installation that never ran anything."""
    await revoke(binding())


@pytest.mark.asyncio
async def test_a_new_run_after_a_revocation_finds_a_fresh_installation() -> None:
    """Our rule: nothing of the old one is inherited."""
    old = installation(binding())
    await revoke(binding())
    new = installation(binding())
    assert new is not old
    new.check()
    await revoke(binding())


@pytest.mark.asyncio
async def test_background_work_has_an_empty_context() -> None:
    """Our rule: what outlives a call can't act with its authority."""
    secret: contextvars.ContextVar[str] = contextvars.ContextVar("secret", default="none")
    secret.set("of the run")
    found = installation(None)

    async def read() -> str:
        return secret.get()

    assert await found.adopt(read(), name="read") == "none"
    await revoke(None)


@pytest.mark.asyncio
async def test_background_work_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Our rule: no error is silent."""
    found = installation(None)

    async def fail() -> None:
        raise ZeroDivisionError("broken")

    task = found.adopt(fail(), name="failing")
    await asyncio.wait({task})
    await revoke(None)
    assert "failing" in caplog.text


@pytest.mark.asyncio
async def test_busy_counts_every_installations_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host fact: the limit is the process's, one connection for all."""
    monkeypatch.setattr(limits, "RUNS_PER_PROCESS", 2)
    runs = [Run(), Run()]
    here, there = installation(binding()), installation(binding(installation_uuid="B"))
    here.runs["a"] = runs[0]
    assert not installations.busy(here, pooled=False)
    there.runs["b"] = runs[1]
    assert installations.busy(here, pooled=False)
    for run in runs:
        run.over.set()
    await revoke(binding())
    await revoke(binding(installation_uuid="B"))


@pytest.mark.asyncio
async def test_nobody_gets_all_of_a_process_that_serves_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: in the pool an installation has its share, whether or not others are at work; elsewhere it has all."""
    monkeypatch.setattr(limits, "RUNS_PER_INSTALLATION", 1)
    run = Run()
    here = installation(binding())
    here.runs["a"] = run
    assert installations.busy(here, pooled=True)
    assert not installations.busy(here, pooled=False)
    assert not installations.busy(installation(binding(installation_uuid="B")), pooled=True)
    run.over.set()
    await revoke(binding())
    await revoke(binding(installation_uuid="B"))


@pytest.mark.asyncio
async def test_one_thing_that_cannot_be_let_go_of_keeps_nothing_else() -> None:
    """Our rule: at a revocation everything is dropped and everything ends, whatever one step raises; that is not hidden."""
    found = installation(binding())
    let_go: list[str] = []

    def broken() -> None:
        raise ZeroDivisionError("broken")

    for name in ("one", "other"):
        found.hold(functools.partial(let_go.append, name))
        found.hold(broken)
    run, arriving = Run(), Run()
    found.runs["a"], found.arriving["b"] = run, arriving
    for each in (run, arriving):
        each.over.set()
    with pytest.raises(ZeroDivisionError):
        await revoke(binding())
    assert sorted(let_go) == ["one", "other"]
    assert run.revoked.is_set() and arriving.revoked.is_set()
    assert installation(binding()) is not found
    await revoke(binding())


@pytest.mark.asyncio
async def test_a_lock_is_granted_in_order_and_released_once() -> None:
    """Our rule: one writer per key, first come first served."""
    locks = Locks()
    first = await locks.acquire("k")
    order: list[int] = []

    async def take(number: int) -> None:
        lease = await locks.acquire("k")
        order.append(number)
        await asyncio.sleep(0)
        lease.release()

    waiting = [asyncio.create_task(take(number)) for number in range(3)]
    (await asyncio.wait_for(locks.acquire("other"), 10)).release()
    assert order == []
    first.release()
    first.release()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]


@pytest.mark.asyncio
async def test_a_cancelled_wait_for_a_lock_leaves_nothing_behind() -> None:
    """Our rule: the next one still gets it."""
    locks = Locks()
    first = await locks.acquire("k")
    cancelled = asyncio.create_task(locks.acquire("k"))
    last = asyncio.create_task(locks.acquire("k"))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    first.release()
    (await asyncio.wait_for(last, 10)).release()
    assert not locks._locks
