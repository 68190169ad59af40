"""What people are asked in the real LangBot host, and that their answer lands in the living turn.

Surfaces: Telegram with buttons, streaming and not; an agent bot on Telegram; the web chat and the agents' debug stream, which
have no buttons. One host and one runtime serve the module; the agent is the scripted ACP agent, a local protocol fixture that
runs a command only when it was allowed and says in which process and turn it asked and went on; the chat service is a local
Bot API fixture.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import langbot_host, scripted_acp_agent
from testkit.fake_telegram import MESSAGE_UNITS, Button, FakeTelegram, Message, utf16_units
from testkit.langbot_host import LangBotHost
from tooling import ROOT, packages

pytestmark = [pytest.mark.real_host, pytest.mark.timeout(300)]

BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
SILENCE = 2.5
"""Seconds without a call of the bot after which nothing more comes."""
CHATS = itertools.count(100)
LABELS = ["Allow once", "Allow for this session", "Deny", "Deny and say why"]
SURFACES = ("telegram streaming", "telegram single", "agent bot")
WHO = re.compile(r"pid=\d+ turn=\S+?(?=[.,])")


class Place:
    """The running host with the package installed, and one bot per surface."""

    def __init__(self, host: LangBotHost, telegram: FakeTelegram, runner: str, scratch: Path) -> None:
        self.host, self.telegram, self.runner, self.scratch = host, telegram, runner, scratch
        self.workspace = scratch / "workspace"
        self.workspace.mkdir()
        self._numbers = itertools.count(1)
        self.pipeline = host.pipeline(runner, self.form())
        self.bots = {surface: self.bot(surface) for surface in SURFACES}
        self.unanswered = [Talk(self, self.bot(surface, **{"approval-timeout": 30})) for surface in SURFACES]
        for talk in self.unanswered:
            talk.effect = self.file()
            talk.ask()

    def form(self, agent: dict[str, Any] | None = None, /, **changes: Any) -> dict[str, Any]:
        """The form's values for the scripted agent in our workspace."""
        settings = {"first_session": "", **(agent or {})}  # tests share a workspace and the account, and sessions are kept
        program = [sys.executable, "-I", "-S", scripted_acp_agent.__file__, json.dumps(settings)]
        return {
            "provider": "custom",
            "acp-command": shlex.join(program),
            "workspace": str(self.workspace),
            "keep-warm": 60,
            "timeout": 300,
            **changes,
        }

    def bot(self, surface: str, agent: dict[str, Any] | None = None, /, **changes: Any) -> str:
        """A bot of its own on that surface."""
        if surface == "agent bot":
            return self.host.telegram_bot(agent=self.host.agent(self.runner, self.form(agent, **changes)))
        if surface == "telegram streaming":
            return self.host.telegram_bot(pipeline=self.host.pipeline(self.runner, self.form(agent, **changes)))
        form = self.form(agent, **{"reply-mode": "single", **changes})
        return self.host.telegram_bot(pipeline=self.host.pipeline(self.runner, form), streaming=False)

    def file(self) -> Path:
        """A path nothing exists at yet."""
        return self.scratch / f"file-{next(self._numbers)}"


class Talk:
    """One person (in a group: several) in one chat with one bot."""

    def __init__(self, place: Place, bot: str, *, group: bool = False) -> None:
        self.user = next(CHATS)
        self.chat = -self.user if group else self.user
        self.bot, self.fake, self.effect = bot, place.telegram, place.file()

    def ask(self) -> None:
        """Have the agent want to run a command that makes ``effect``."""
        self.say(f"risky touch {self.effect}")

    def say(self, text: str, user: int = 0) -> None:
        """Write a message, as the requester if nobody else is named."""
        self.fake.say(self.bot, text, user=user or self.user, chat=self.chat)

    @property
    def messages(self) -> list[Message]:
        """What stands in the chat."""
        return self.fake.chat(self.bot, self.chat)

    @property
    def text(self) -> str:
        """All that stands in the chat."""
        return "\n".join(each.text for each in self.messages)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()``."""
        assert await asyncio.to_thread(self.fake.until, holds, BOUND), [each.text for each in self.messages]

    async def rest(self) -> None:
        """Wait until nothing comes any more."""
        await asyncio.to_thread(self.fake.quiet, self.bot, SILENCE, 60)

    async def asked(self) -> Message:
        """Wait until something can be pressed; that message."""
        await self.until(lambda: any(each.buttons for each in self.messages))
        (shown,) = [each for each in self.messages if each.buttons]
        return shown

    async def press(self, shown: Message, button: Button, user: int = 0) -> None:
        """Press it and wait until the service has been told that this was heard."""
        query = self.fake.press(self.bot, shown, button, user=user or self.user, chat=self.chat)
        await self.until(lambda: self.fake.acknowledged(self.bot, query))

    async def answered(self, choice: str) -> None:
        """Wait until the agent has told that it got this choice, in the process and the turn that asked; nothing follows."""
        await self.until(lambda: f"Answered {choice}, " in self.text)
        await self.rest()
        asked, gone_on = WHO.findall(self.text)
        assert asked == gone_on
        assert self.text.index("I have to ask") < self.text.index("Answered")


@pytest.fixture(scope="module")
def place(host_python: Path, package_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Host, runtime and package for all tests here; afterwards both ended well and nothing of them runs."""
    root = tmp_path_factory.mktemp("langbot")
    scratch = tmp_path_factory.mktemp("scratch")
    with FakeTelegram(burst=20) as telegram:
        host = LangBotHost(host_python, root, telegram.url)
        with host:
            own = package_root == ROOT / packages.SOURCE
            package = packages.build(packages.SOURCE, scratch) if own else langbot_host.build_package(package_root, scratch)
            yield Place(host, telegram, host.install(package), scratch)
            host.watch()
            codes = host.stop()
        assert codes == [0, 0]
        assert host.leftovers() == set()


def alive(text: str) -> bool:
    """Whether the agent that told its process in ``text`` still runs."""
    return int(WHO.findall(text)[0].split()[0].removeprefix("pid=")) in langbot_host.processes()


# ------------------------------------------------------------------ pressed


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_press_continues_the_same_turn_of_the_same_process(place: Place, surface: str) -> None:
    """What will run, where, and the choices stand in the message itself; the press has its effect, and the answer comes."""
    talk = Talk(place, place.bots[surface])
    talk.ask()
    shown = await talk.asked()
    assert [each.label for each in shown.buttons] == LABELS
    assert utf16_units(shown.text) <= MESSAGE_UNITS
    for part in (f"touch {talk.effect}", str(place.workspace), *(f"{n}. {label}" for n, label in enumerate(LABELS, 1))):
        assert part in shown.text
    await talk.rest()
    assert shown.message_id == talk.messages[-1].message_id
    assert not talk.effect.exists()
    await talk.press(shown, shown.buttons[0])
    await talk.answered("once")
    assert talk.effect.exists()
    assert not any(each.buttons for each in talk.messages)
    assert alive(talk.text)
    before = talk.text
    await talk.press(shown, shown.buttons[2])
    await talk.rest()
    assert talk.text == before


@pytest.mark.asyncio
async def test_a_press_is_answered_by_a_bot_that_does_not_stream_under_a_form_that_does(place: Place) -> None:
    """Both are the defaults; host fact: it loses every reply to a press there, and only its settings say that it does not."""
    talk = Talk(place, place.host.telegram_bot(pipeline=place.pipeline, streaming=False))
    talk.ask()
    shown = await talk.asked()
    await talk.rest()
    await talk.press(shown, shown.buttons[0])
    await talk.answered("once")
    assert talk.effect.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_pressed_denial_reaches_the_agent_and_nothing_is_done(place: Place, surface: str) -> None:
    """The turn goes on in the same process without the command."""
    talk = Talk(place, place.bots[surface])
    talk.ask()
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[2])
    await talk.answered("no")
    assert not talk.effect.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_denial_with_a_reason_asks_for_it_and_tells_the_agent(place: Place, surface: str) -> None:
    """The button asks for the reason, the next message is it; this agent takes it as a message of its own."""
    log = place.file()
    talk = Talk(place, place.bot(surface, {"log": str(log)}))
    talk.ask()
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[3])
    await talk.until(lambda: "Why not?" in talk.text)
    await talk.rest()
    assert "Answered" not in talk.text
    assert alive(talk.text)
    talk.say("say Because of the moon.")
    await talk.until(lambda: talk.messages[-1].text.endswith("Because of the moon."))
    assert "Answered no, " in talk.text
    assert not talk.effect.exists()
    assert [each["prompt"][-1]["text"] for each in received(log, "session/prompt")][1:] == ["say Because of the moon."]


def received(log: Path, method: str) -> list[dict[str, Any]]:
    """The parameters of every message of one method that the agent got, oldest first."""
    whole_lines = log.read_text().rpartition("\n")[0] if log.exists() else ""
    messages = [json.loads(line) for line in whole_lines.splitlines()]
    return [each.get("params") or {} for each in messages if each.get("method") == method]


@pytest.mark.asyncio
async def test_what_was_allowed_for_the_session_is_not_asked_again(place: Place) -> None:
    """The button for the session, then the same command in another turn of it: no request, and another command asks."""
    talk = Talk(place, place.bots["telegram streaming"])
    talk.ask()
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[1])
    await talk.answered("once")
    talk.effect.unlink()
    talk.ask()
    await talk.until(lambda: talk.text.count("Answered once, ") == 2)
    assert talk.effect.exists()
    await talk.rest()
    talk.say("risky true")
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[2])
    await talk.until(lambda: "Answered no, " in talk.text)


@pytest.mark.asyncio
async def test_another_members_press_changes_nothing_and_the_requester_can_type(place: Place) -> None:
    """Host fact: it refuses the press silently and takes the buttons away all the same; the numbers in the text remain."""
    log = place.file()
    talk = Talk(place, place.bot("telegram streaming", {"log": str(log)}), group=True)
    talk.ask()
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[0], user=next(CHATS))
    await talk.until(lambda: not any(each.buttons for each in talk.messages))
    await talk.rest()
    assert "Answered" not in talk.text
    assert not talk.effect.exists()
    assert len(received(log, "session/prompt")) == 1
    talk.say("1")
    await talk.answered("once")
    assert talk.effect.exists()
    assert len(received(log, "session/prompt")) == 1


# ------------------------------------------------------------------ typed


@pytest.mark.asyncio
async def test_an_approver_answers_by_typing(place: Place) -> None:
    """Host fact: only whoever was asked may press; an approver of the form answers by the number, in the requester's turn."""
    approver = next(CHATS)
    talk = Talk(place, place.bot("telegram streaming", approvers=[str(approver)]), group=True)
    talk.ask()
    shown = await talk.asked()
    await talk.press(shown, shown.buttons[0], user=approver)
    await talk.rest()
    assert "Answered" not in talk.text
    talk.say("1", user=approver)
    await talk.answered("once")
    assert talk.effect.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", SURFACES)
async def test_stop_cancels_what_waits_for_an_answer(place: Place, surface: str) -> None:
    """The agent is told, the command never runs, and the buttons that still stand there answer nothing."""
    log = place.file()
    talk = Talk(place, place.bot(surface, {"log": str(log)}))
    talk.ask()
    shown = await talk.asked()
    await talk.rest()
    talk.say("/stop")
    await talk.until(lambda: "Stopped" in talk.text)
    await talk.rest()
    assert len(received(log, "session/cancel")) == 1
    await talk.press(shown, shown.buttons[0])
    await talk.until(lambda: "This question is no longer open." in talk.text)
    assert not talk.effect.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize(("surface", "words"), list(zip(SURFACES, ("allow", "1", "yes"), strict=True)))
async def test_a_typed_answer_continues_the_same_turn(place: Place, surface: str, words: str) -> None:
    """A number or a word is enough where there are buttons, too; a press afterwards does nothing and is told so."""
    talk = Talk(place, place.bots[surface])
    talk.ask()
    shown = await talk.asked()
    await talk.rest()
    talk.say(words)
    await talk.answered("once")
    assert talk.effect.exists()
    await talk.press(shown, shown.buttons[2])
    await talk.until(lambda: "This question is no longer open." in talk.text)


@pytest.mark.asyncio
async def test_the_web_chat_asks_in_text_and_hears_the_typed_answer(place: Place) -> None:
    """No buttons there: the request is a message that says how to answer; anything else is told what is waited for."""
    effect = place.file()
    async with place.host.web_chat(place.pipeline) as chat:
        await chat.say(f"risky touch {effect}")
        await chat.until(lambda: any(each.final and "4. Deny and say why" in each.text for each in chat.bubbles), BOUND)
        await chat.rest()
        request = chat.bubbles[-1].text
        assert f"touch {effect}" in request
        assert str(place.workspace) in request
        assert "Reply with a number." in request
        await chat.say("and how are you?")
        await chat.until(lambda: "Still waiting" in chat.bubbles[-1].text and chat.bubbles[-1].final, BOUND)
        assert not effect.exists()
        # The host takes a message that comes while a run ends for the one that ends, and drops it.
        await chat.rest()
        await chat.say("1")
        await chat.until(lambda: any(each.final and "Answered once, " in each.text for each in chat.bubbles), BOUND)
        assert effect.exists()
        asked, gone_on = WHO.findall("\n".join(each.text for each in chat.bubbles))
        assert asked == gone_on
        assert chat.errors == []


@pytest.mark.asyncio
async def test_the_debug_stream_asks_in_text_and_ends_well(place: Place) -> None:
    """The host fails a run that sends a request there, so none is sent; the next message of the same conversation answers."""
    effect = place.file()
    agent = place.host.agent(place.runner, place.form())
    first = await place.host.agent_events(agent, f"risky touch {effect}")
    assert [each for each in first if each["kind"] == "error"] == []
    kinds = [each["data"]["type"] for each in first if each["kind"] == "result"]
    assert kinds[-1] == "run.completed"
    assert "action.requested" not in kinds
    told = json.dumps(first)
    assert f"touch {effect}" in told
    assert "1. Allow once" in told
    second = await place.host.agent_events(agent, "1")
    assert second[-1]["kind"] == "completed"
    assert effect.exists()
    (asked,) = set(WHO.findall(told))
    assert set(WHO.findall(json.dumps(second))) == {asked}


# ------------------------------------------------------------------ answered by nobody, or too late


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(len(SURFACES)), ids=SURFACES)
async def test_a_request_nobody_answers_ends_in_time_and_says_so_at_once(place: Place, number: int) -> None:
    """Nobody has to write for that; a later press is refused by the host without a word, and nothing was or is done."""
    talk = place.unanswered[number]
    await talk.until(lambda: "Nobody answered in time" in talk.text)
    (shown,) = [each for each in talk.messages if "1. Allow once" in each.text]
    assert talk.text.index("1. Allow once") < talk.text.index("Nobody answered in time")
    await talk.rest()
    before = talk.text
    await talk.press(shown, shown.buttons[0])
    await talk.rest()
    assert talk.text == before
    assert not any(each.buttons for each in talk.messages)
    assert not talk.effect.exists()


@pytest.mark.asyncio
async def test_after_the_worker_was_replaced_the_press_allows_exactly_that_once(place: Place) -> None:
    """The process is gone with its worker; the session is resumed and the one action allowed, and only that, only once."""
    state = place.file()
    state.mkdir()
    effects = [place.file() for _ in range(2)]
    late = f"risky touch {effects[0]}\nrisky touch {effects[1]}"
    bot = place.bot("telegram streaming", {"state": str(state), "instead": {"The action you last asked": late}})
    talk = Talk(place, bot)
    talk.effect = effects[0]
    talk.ask()
    shown = await talk.asked()
    await talk.rest()
    assert alive(talk.text)
    tree = langbot_host.descendants(place.host.worker("ACPAgentRunner"))
    await asyncio.to_thread(place.host.configure, place.runner, {})
    assert await asyncio.to_thread(langbot_host.gone, tree, 10.0), langbot_host.living(tree)
    assert not alive(talk.text)
    await talk.press(shown, shown.buttons[0])
    await talk.until(lambda: any(each.buttons for each in talk.messages) and "Answered once, " in talk.text)
    assert effects[0].exists()
    second = await talk.asked()
    assert f"touch {effects[1]}" in second.text
    assert not effects[1].exists()
    first_pid, *later = [each.split()[0] for each in WHO.findall(talk.text)]
    assert first_pid not in later
    await talk.press(second, second.buttons[2])
    await talk.until(lambda: "Answered no, " in talk.text)
    assert not effects[1].exists()


@pytest.mark.asyncio
async def test_after_the_worker_was_replaced_an_answered_request_is_closed(place: Place) -> None:
    """A typed answer first, then the button that still stands there: the question is no longer open, and nothing runs."""
    state = place.file()
    state.mkdir()
    bot = place.bot("telegram single", {"state": str(state), "instead": {"The action you last asked": "say Then not."}})
    talk = Talk(place, bot)
    talk.ask()
    shown = await talk.asked()
    await talk.rest()
    await asyncio.to_thread(place.host.configure, place.runner, {})
    talk.say("deny")
    await talk.until(lambda: "Then not." in talk.text)
    await talk.rest()
    await talk.press(shown, shown.buttons[0])
    await talk.until(lambda: "This question is no longer open." in talk.text)
    assert not talk.effect.exists()
