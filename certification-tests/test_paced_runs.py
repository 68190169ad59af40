"""A run whose answer is longer than its chat takes at once: it goes on listening while the chat is read to.

The run loop, the SDK's ``Runner.invoke`` and a scripted driver; the host is a stand-in, time is real.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pkg import limits
from pkg.agent_api import Prompt, TextDelta
from testkit.host_actions import message
from testkit.run_harness import harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession

pytestmark = pytest.mark.timeout(90)

DELIVERY: dict[str, Any] = {
    "platform_capabilities": {"adapter": "TelegramAdapter"},
    "surface": "platform",
    "automatic_reply": True,
    "reply_target": {"target_type": "person", "target_id": "7"},
}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def workspace(tmp_path: Path) -> Path:
    """An empty directory."""
    made = tmp_path / "workspace"
    made.mkdir()
    return made


PAGES = "".join(f"Page {number} " + "x" * 3990 + "\n" for number in range(40))


class Pages:
    """An agent that answers with forty pages to the first message, shortly to every other, and takes no time for it."""

    def __init__(self) -> None:
        self._prompts: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(PAGES if prompt.text == "pages" else f"answer to {prompt.text}"))
        self._prompts.put_nowait(prompt.text)
        return None

    async def prompted(self) -> None:
        """Wait for the next prompt."""
        await asyncio.wait_for(self._prompts.get(), 20)


@pytest.mark.asyncio
async def test_waiting_for_the_chat_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: the idle watchdog is about the agent, and that has done its part."""
    monkeypatch.setattr(limits, "TELEGRAM_PER_SECOND", 30.0)
    async with harness(workspace(tmp_path), ScriptedDriver(Pages()), idle_timeout=1) as h:
        started = time.monotonic()
        done = await h.run("pages", delivery=DELIVERY)
        assert time.monotonic() - started > 2.0
    assert done.reason == "stop"
    assert [text.split()[1] for text in done.shown] == [str(number) for number in range(40)]
    assert "coding.idle_limit" not in done.log


@pytest.mark.asyncio
async def test_the_next_message_is_worked_on_while_the_chat_is_still_read_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: a message during the sending is neither lost nor held back; its answer comes after the first one."""
    monkeypatch.setattr(limits, "TELEGRAM_PER_SECOND", 10.0)
    agent = Pages()
    async with harness(workspace(tmp_path), ScriptedDriver(agent)) as h:
        run = h.start("pages", delivery=DELIVERY)
        await agent.prompted()
        h.host.steering.append(message("more"))
        await agent.prompted()
        assert not run.done()
        done = await run
    assert done.reason == "stop"
    assert len(done.shown) == 41
    assert done.shown[-1] == "answer to more"


@pytest.mark.asyncio
async def test_stop_ends_the_sending_and_names_the_file_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: who says stop gets no hundred more messages, and loses nothing."""
    monkeypatch.setattr(limits, "TELEGRAM_PER_SECOND", 0.5)
    place = workspace(tmp_path)
    agent = Pages()
    async with harness(place, ScriptedDriver(agent)) as h:
        run = h.start("pages", delivery=DELIVERY)
        await agent.prompted()
        h.host.steering.append(message("/stop"))
        async with asyncio.timeout(40):
            done = await run
    (file,) = place.glob("answer-*.md")
    assert any(file.name in text for text in done.shown)
    assert done.shown[-1].startswith("Stopped")
    whole = [text for text in done.shown if file.name not in text and not text.startswith("Stopped")]
    assert "".join(whole) + file.read_text() == PAGES


@pytest.mark.asyncio
async def test_before_the_time_limit_the_rest_goes_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: an answer that is there ends well although not all of it could be sent, and says where the rest is."""
    monkeypatch.setattr(limits, "TELEGRAM_PER_SECOND", 1.0)
    place = workspace(tmp_path)
    async with harness(place, ScriptedDriver(Pages())) as h:
        started = time.monotonic()
        done = await h.run("pages", delivery=DELIVERY, deadline=12.0)
        assert time.monotonic() - started < 12.0
    (file,) = place.glob("answer-*.md")
    assert file.name in done.shown[-1]
    assert done.reason == "stop"
    assert len(done.shown) >= 4
    assert "".join(done.shown[:-1]) + file.read_text() == PAGES
