"""Sessions that stay alive between messages: taken by one run, closed for every reason there is, and never two for one key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pkg.agent_api import AgentEvent, Prompt, SessionSpec, SessionStarted, TextDelta, TurnEnded
from pkg.errors import ProcessCleanupUnconfirmed
from pkg.installations import Installation
from pkg.warm_sessions import Channel, LiveSession, WarmSessions
from testkit.scripted_driver import ScriptedDriver, ScriptedSession


async def opened(owner: Installation, key: str = "k", fingerprint: str = "f") -> tuple[LiveSession, ScriptedSession]:
    driver = ScriptedDriver()
    session = await driver.open(SessionSpec(("x",), str(Path("/"))), None)
    return LiveSession(key, fingerprint, session, owner.adopt), session


async def closed(session: ScriptedSession) -> None:
    await asyncio.wait_for(session.closed.wait(), 10)


@pytest.mark.asyncio
async def test_a_kept_session_is_taken_once() -> None:
    """Our rule: a session in a run's hands is in nobody else's."""
    owner = Installation("test")
    live, _ = await opened(owner)
    owner.warm.put(live, 60)
    assert owner.warm.take("k", "f") is live
    assert owner.warm.take("k", "f") is None
    owner.warm.put(live, 60)
    await owner.end()


@pytest.mark.asyncio
async def test_another_key_or_fingerprint_gets_nothing_and_a_misfit_is_closed() -> None:
    """Our rule: reconfiguration ends the session before another one is opened."""
    owner = Installation("test")
    live, session = await opened(owner)
    owner.warm.put(live, 60)
    assert owner.warm.take("other", "f") is None
    assert not session.closed.is_set()
    assert owner.warm.take("k", "changed") is None
    await owner.warm.settled("k")
    assert session.closed.is_set()
    await owner.end()


@pytest.mark.asyncio
async def test_an_expired_session_is_closed() -> None:
    """Our rule: keep-warm."""
    owner = Installation("test")
    live, session = await opened(owner)
    owner.warm.put(live, 0.01)
    await closed(session)
    assert len(owner.warm) == 0
    await owner.end()


@pytest.mark.asyncio
async def test_taking_stops_the_expiry_and_putting_back_starts_it_anew() -> None:
    """Our rule: an old timer never ends a session in use, nor one kept again."""
    owner = Installation("test")
    live, session = await opened(owner)
    owner.warm.put(live, 0.2)
    assert owner.warm.take("k", "f") is live
    owner.warm.put(live, 60)
    other, other_session = await opened(owner, "other")
    owner.warm.put(other, 0.4)
    await closed(other_session)
    assert not session.closed.is_set()
    await owner.end()
    assert session.closed.is_set()


@pytest.mark.asyncio
async def test_keeping_for_no_time_closes_at_once() -> None:
    """Our rule: keep-warm 0 means never."""
    owner = Installation("test")
    live, session = await opened(owner)
    owner.warm.put(live, 0)
    await owner.warm.settled("k")
    assert session.closed.is_set()
    await owner.end()


@pytest.mark.asyncio
async def test_the_least_recently_used_session_makes_room() -> None:
    """Our rule: a bounded pool."""
    owner = Installation("test")
    warm = WarmSessions(owner.adopt, capacity=2)
    sessions = {}
    for name in ("a", "b"):
        live, sessions[name] = await opened(owner, name)
        warm.put(live, 60)
    again = warm.take("a", "f")
    assert again is not None
    warm.put(again, 60)
    live, sessions["c"] = await opened(owner, "c")
    warm.put(live, 60)
    await closed(sessions["b"])
    assert [name for name, session in sessions.items() if not session.closed.is_set()] == ["a", "c"]
    await warm.close_all()
    await owner.end()


@pytest.mark.asyncio
async def test_the_death_of_a_kept_session_is_noticed() -> None:
    """Our rule: no dead session is handed out, and its remains are closed without waiting for the next message."""
    owner = Installation("test")
    live, session = await opened(owner)
    owner.warm.put(live, 60)
    session.die()
    await closed(session)
    assert owner.warm.take("k", "f") is None
    await owner.end()


@pytest.mark.asyncio
async def test_nothing_is_kept_after_the_pool_was_closed() -> None:
    """Our rule: a run that ends during a revocation leaves no session behind."""
    owner = Installation("test")
    await owner.warm.close_all()
    live, session = await opened(owner)
    owner.warm.put(live, 60)
    assert len(owner.warm) == 0
    await closed(session)
    await owner.end()


@pytest.mark.asyncio
async def test_the_first_events_wait_for_the_run_and_those_between_runs_are_dropped() -> None:
    """Our rule: a run hears its session from the first event on; between runs a session has no voice."""
    owner = Installation("test")
    live, session = await opened(owner)
    await session.prompt(Prompt("one"))
    heard: list[AgentEvent] = []
    while not heard or not isinstance(heard[-1], TurnEnded):
        await asyncio.wait_for(live.channel.wait(), 10)
        event = live.channel.take()
        assert event is not None
        heard.append(event)
    assert [type(event) for event in heard] == [SessionStarted, TextDelta, TurnEnded]
    owner.warm.put(live, 60)
    session.emit(TextDelta("late"))
    for _ in range(10):
        await asyncio.sleep(0)
    taken = owner.warm.take("k", "f")
    assert taken is live
    channel = live.attach()
    session.emit(TextDelta("new"))
    await asyncio.wait_for(channel.wait(), 10)
    assert channel.take() == TextDelta("new")
    await live.close()
    await owner.end()


@pytest.mark.asyncio
async def test_the_companion_ends_before_its_session_and_however_that_ends() -> None:
    """Our rule: LangBot's tools are gone before the agent is; an unconfirmed end is passed on."""
    owner = Installation("test")
    live, session = await opened(owner)
    order: list[str] = []

    class Companion:
        async def close(self) -> None:
            order.append("session closed" if session.closed.is_set() else "companion first")

    live.companion = Companion()
    session.close_error = ProcessCleanupUnconfirmed("gone")
    with pytest.raises(ProcessCleanupUnconfirmed):
        await live.close()
    assert order == ["companion first"]
    await owner.end()
    assert owner.take_unconfirmed() == 1
    assert owner.take_unconfirmed() == 0


@pytest.mark.asyncio
async def test_a_full_channel_holds_its_producer_back_until_room_or_close() -> None:
    """Our rule: a slow consumer slows the agent down and never loses an event."""
    channel: Channel[int] = Channel(2)
    await channel.put(1)
    await channel.put(2)
    waiting = asyncio.create_task(channel.put(3))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert channel.take() == 1
    await asyncio.wait_for(waiting, 10)
    assert [channel.take(), channel.take(), channel.take()] == [2, 3, None]
    await channel.put(4)
    await channel.put(5)
    stuck = asyncio.create_task(channel.put(6))
    await asyncio.sleep(0)
    channel.close()
    await asyncio.wait_for(stuck, 10)
    assert channel.take() is None


@pytest.mark.asyncio
async def test_waiting_on_a_channel_ends_with_its_end_also_when_nothing_more_comes() -> None:
    """Our rule: no wait without an end."""
    channel: Channel[int] = Channel(2)
    channel.end()
    await asyncio.wait_for(channel.wait(), 10)
    await asyncio.wait_for(channel.wait(), 10)
    assert channel.ended
