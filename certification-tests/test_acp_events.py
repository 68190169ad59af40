"""The buffer between an agent's reader and the session's consumer: order, bounds, and texts that wait behind each other."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from pkg import limits
from pkg.agent_api import AgentEvent, Notice, TextDelta, ThoughtDelta, TurnEnded
from pkg.event_buffer import EventBuffer

_EVENT: st.SearchStrategy[AgentEvent] = st.one_of(
    st.builds(TextDelta, st.text(max_size=5), st.sampled_from(["", "m1", "m2"])),
    st.builds(ThoughtDelta, st.text(max_size=5)),
    st.builds(Notice, st.just("agent.x"), st.text(max_size=5)),
)


async def _drained(buffer: EventBuffer) -> list[AgentEvent]:
    buffer.finish()
    events: list[AgentEvent] = []
    while (event := await buffer.get()) is not None:
        events.append(event)
    return events


def _plain(events: list[AgentEvent]) -> list[tuple[object, ...]]:
    """Events as runs of text and single others, so that it does not matter where a text was cut."""
    found: list[tuple[object, ...]] = []
    for (kind, message), group in itertools.groupby(events, lambda event: (type(event), getattr(event, "message_id", ""))):
        if kind in (TextDelta, ThoughtDelta):
            found.append((kind, message, "".join(getattr(event, "text", "") for event in group)))
        else:
            found += [(kind, event) for event in group]
    return found


@given(st.lists(_EVENT, max_size=60), st.integers(0, 60))
def test_joined_or_not_the_stream_says_the_same(events: list[AgentEvent], read_after: int) -> None:
    """Our rule: only text of one kind and one message is joined, nothing is lost, doubled or moved."""

    async def through() -> list[AgentEvent]:
        buffer = EventBuffer()
        out: list[AgentEvent] = []
        for number, event in enumerate(events):
            buffer.put(event)
            if number == read_after and (early := await buffer.get()) is not None:
                out.append(early)
        return out + await _drained(buffer)

    assert _plain(asyncio.run(through())) == _plain(events)


def test_many_short_pieces_become_few_events_of_bounded_size() -> None:
    """Our rule: a consumer that is behind does the work of few events, none larger than ``EVENT_JOINED_CHARS``."""

    async def through() -> list[AgentEvent]:
        buffer = EventBuffer()
        for number in range(10_000):
            buffer.put(TextDelta(f"{number:019d} "))
        return await _drained(buffer)

    texts = [event.text for event in asyncio.run(through()) if isinstance(event, TextDelta)]
    assert "".join(texts) == "".join(f"{number:019d} " for number in range(10_000))
    assert max(map(len, texts)) <= limits.EVENT_JOINED_CHARS
    assert len(texts) < 20


def test_a_buffer_of_joined_text_is_full_at_its_limit() -> None:
    """Our rule: joining does not lift the bound; the reader is held back, and goes on when there is room."""

    async def through() -> None:
        buffer = EventBuffer(limit=50_000)
        pieces = 0
        while not buffer.full:
            buffer.put(TextDelta("x" * 20))
            pieces += 1
        assert 2_400 < pieces <= 2_500
        room = asyncio.ensure_future(buffer.room())
        await asyncio.sleep(0)
        assert not room.done()
        await buffer.get()
        await asyncio.wait_for(room, 10)
        assert not buffer.full

    asyncio.run(through())


def test_text_after_the_end_of_a_turn_is_taken_out_whole() -> None:
    """Our rule: late text nobody has read becomes one notice; joined pieces count with all of their text."""

    async def through() -> tuple[str, list[AgentEvent]]:
        buffer = EventBuffer()
        for event in (TextDelta("in time"), TurnEnded("end_turn"), TextDelta("LA"), TextDelta("TE"), Notice("agent.x")):
            buffer.put(event)
        buffer.put(TextDelta("R"))
        return buffer.take_late_text(), await _drained(buffer)

    assert asyncio.run(through()) == ("LATER", [TextDelta("in time"), TurnEnded("end_turn"), Notice("agent.x")])
