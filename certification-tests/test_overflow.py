"""Text that does not fit into the one message a surface shows: sent ahead of it from outside the run, or stored in a file."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.definition.plugin import BasePlugin
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext

from pkg import installations, limits, overflow
from pkg.agent_api import Prompt, TextDelta
from pkg.identity import Authority
from pkg.installations import Installation
from testkit.host_actions import HostActions, run_context
from testkit.run_harness import harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession

TARGET = {"target_type": "person", "target_id": "7"}
OF_THE_RUN: contextvars.ContextVar[str] = contextvars.ContextVar("of_the_run", default="")


class Host(HostActions):
    """A host that takes messages sent outside runs, and notes in which context they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[str] = []
        self.slow: asyncio.Event | None = None
        self.ended = asyncio.Event()

    def answer(self, action: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if action == "send_message" and action not in self.failing:
            self.calls.append((action, data))
            return {"result": {}}
        return super().answer(action, data)

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **more: Any) -> dict[str, Any]:
        if action.value != "send_message":
            return await super().call_action(action, data, timeout, **more)
        self.contexts.append(OF_THE_RUN.get())
        try:
            if self.slow is not None:
                await self.slow.wait()
        finally:
            self.ended.set()
        return self.answer(action.value, data)

    @property
    def sent(self) -> list[tuple[str, str, str, str]]:
        """Bot, kind of chat, chat and text of each message."""
        return [
            (data["bot_uuid"], data["target_type"], data["target_id"], data["message_chain"][0]["text"])
            for action, data in self.calls
            if action == "send_message"
        ]


def _runner(host: Host) -> Runner:
    plugin = BasePlugin()  # type: ignore[no-untyped-call]
    plugin.plugin_runtime_handler = cast(Any, host)
    runner = cast(Any, object.__new__(Runner))
    runner.plugin = plugin
    return cast(Runner, runner)


def _context(target: Mapping[str, Any] | None = None, **more: Any) -> RunnerContext:
    delivery = {"surface": "platform", "automatic_reply": True, "reply_target": TARGET if target is None else dict(target)}
    return RunnerContext.model_validate({**run_context("hi", delivery=delivery), **more})


@pytest_asyncio.fixture
async def installation() -> AsyncIterator[Installation]:
    """The installation of a worker that has none; ended afterwards."""
    yield installations.installation(None)
    await installations.revoke(None)


@pytest.mark.asyncio
async def test_a_message_ahead_goes_to_the_runs_chat_from_an_empty_context(installation: Installation) -> None:
    """Our rule: whole, to the chat the host named, and nothing of the run's authority travels with it."""
    host = Host()
    send = overflow.sender(_runner(host), _context(), Authority(None), installation)
    assert send is not None
    OF_THE_RUN.set("r1")
    text = "x" * 20_000 + "\n" + "\U0001f600"
    await send(text)
    assert host.sent == [("bot", "person", "7", text)]
    assert host.contexts == [""]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pooled", "context"),
    [
        (True, {}),
        (False, {"target": {}}),
        (False, {"target": {"target_type": "person"}}),
        (False, {"target": {"target_type": "person", "target_id": ""}}),
        (False, {"conversation": None}),
    ],
)
async def test_where_nobody_can_be_reached_outside_the_run_there_is_no_sender(
    installation: Installation, pooled: bool, context: dict[str, Any]
) -> None:
    """Our rule: in the shared pool no message is sent outside a run; elsewhere bot and chat must be known."""
    assert overflow.sender(_runner(Host()), _context(**context), Authority(None, pooled=pooled), installation) is None


@pytest.mark.asyncio
async def test_a_host_that_does_not_answer_costs_a_bounded_time(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: the caller takes its next way, and no send goes on behind it."""
    monkeypatch.setattr(limits, "DETACHED_SEND_WAIT", 0.05)
    host = Host()
    host.slow = asyncio.Event()
    send = overflow.sender(_runner(host), _context(), Authority(None), installation)
    assert send is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(send("text"), 10)
    assert host.ended.is_set()
    assert host.sent == []


@pytest.mark.asyncio
async def test_revocation_waits_for_a_message_on_its_way(installation: Installation) -> None:
    """Our rule: a send belongs to its installation; nothing acts for it once it is gone."""
    host = Host()
    host.slow = asyncio.Event()
    send = overflow.sender(_runner(host), _context(), Authority(None), installation)
    assert send is not None
    sending = asyncio.ensure_future(send("text"))
    while not host.contexts:  # noqa: ASYNC110 - the host stand-in has no event for it
        await asyncio.sleep(0)
    revoking = asyncio.ensure_future(installations.revoke(None))
    done, _ = await asyncio.wait({revoking}, timeout=0.05)
    assert not done
    host.slow.set()
    await asyncio.wait_for(revoking, 10)
    assert host.ended.is_set()
    await sending


@pytest.mark.asyncio
async def test_a_single_reply_too_long_for_one_message_goes_ahead_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host fact: a surface that does not stream shows a run's last message only; what comes before it is sent outside."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    whole = "\n\n".join(f"paragraph {number} " + "x" * 100 for number in range(60))

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(whole))
        return None

    async with harness(tmp_path, ScriptedDriver(script), reply_mode="single") as h:
        host = Host()
        h.runner.plugin = _runner(host).plugin
        delivery = {"platform_capabilities": {"adapter": "TelegramAdapter"}, "surface": "platform", "automatic_reply": True}
        done = await h.run("one", delivery={**delivery, "reply_target": TARGET})
    assert len(host.sent) == 1
    assert len(done.shown) == 1
    assert host.sent[0][3].rstrip("\n") + "\n\n" + done.shown[0] == whole
    assert list(tmp_path.glob("answer-*")) == []


@pytest.mark.asyncio
async def test_a_file_is_a_new_one_of_the_account_alone(tmp_path: Path) -> None:
    """Our rule: no link is followed, no file replaced, and each text gets its own."""
    write = overflow.writer(str(tmp_path), "c0ffee")
    assert [await write("one"), await write("two")] == ["answer-c0ffee.md", "answer-c0ffee-2.md"]
    assert (tmp_path / "answer-c0ffee.md").read_text() == "one"
    assert (tmp_path / "answer-c0ffee.md").stat().st_mode & 0o077 == 0
    target = tmp_path / "victim"
    (tmp_path / "answer-beef.md").symlink_to(target)
    with pytest.raises(FileExistsError):
        await overflow.writer(str(tmp_path), "beef")("text")
    assert not target.exists()
    with pytest.raises(FileExistsError):
        await overflow.writer(str(tmp_path), "c0ffee")("other")
    assert (tmp_path / "answer-c0ffee.md").read_text() == "one"
