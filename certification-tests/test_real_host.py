"""The built package in the real LangBot host: what people read in its chats, and what is left when things end.

Surfaces: the web chat, Telegram with and without streaming, an agent bot on Telegram, the agents' debug stream.

One host and one runtime serve the whole module. The agent is the scripted ACP agent, a local protocol fixture, started by the
package as a ``custom`` provider; the chat service is a local Bot API fixture that refuses what comes too fast: 20 messages and
edits of a chat at once, then one per second (20 per minute in a group). Everything between them is real.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from testkit import langbot_host, scripted_acp_agent
from testkit.fake_telegram import FakeTelegram, Message
from testkit.langbot_host import NOTICES, HostError, LangBotHost
from tooling import ROOT, packages

pytestmark = [pytest.mark.real_host, pytest.mark.timeout(400)]

CHATS = itertools.count(100)
"""A private chat of its own for every conversation on Telegram."""


class Place:
    """The running host with the package installed, and one bot or pipeline per surface."""

    def __init__(self, host: LangBotHost, telegram: FakeTelegram, runner: str, scratch: Path) -> None:
        self.host, self.telegram, self.runner, self.scratch = host, telegram, runner, scratch
        self.workspace = scratch / "workspace"
        self.workspace.mkdir()
        self._numbers = itertools.count(1)
        self.pipeline = host.pipeline(runner, self.form())
        self.single = host.pipeline(runner, self.form(**{"reply-mode": "single"}))
        self.agent = host.agent(runner, self.form())
        self.bots = {
            "telegram streaming": host.telegram_bot(pipeline=self.pipeline),
            "telegram single": host.telegram_bot(pipeline=self.single, streaming=False),
            "agent bot": host.telegram_bot(agent=self.agent),
        }

    def form(self, agent: dict[str, Any] | None = None, /, **changes: Any) -> dict[str, Any]:
        """The form's values for the scripted agent in our workspace."""
        settings = {"first_session": "", **(agent or {})}  # tests share a workspace and the account, and sessions are kept
        program = [sys.executable, "-I", "-S", scripted_acp_agent.__file__, json.dumps(settings)]
        return {
            "provider": "custom",
            "acp-command": shlex.join(program),
            "workspace": str(self.workspace),
            "keep-warm": 20,
            "timeout": 300,
            **changes,
        }

    def file(self) -> Path:
        """A path nothing exists at yet."""
        return self.scratch / f"file-{next(self._numbers)}"


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


def ink(text: str) -> str:
    """A text as far as splitting must keep it: without whitespace and without lines that only open or close a fence."""
    lines = [line for line in text.split("\n") if not re.fullmatch(r"\s*(`{3,}|~{3,})\w*\s*", line)]
    return "".join("".join(lines).split())


def say(text: str) -> str:
    """The line that makes the scripted agent answer with exactly ``text``."""
    return "say " + json.dumps(text)


ASCII = "".join(f"The {i:04d}th quick brown fox. " for i in range(173))[:5000]
CJK = [chr(0x4E00 + 10 * line) + "漢字の文章です。" + chr(0x5E00 + line) for line in range(100)]
FENCE = "Look:\n\n```python\n" + "".join(f"print('line {i:04d} of a long block')\n" for i in range(135)) + "```\n\nThat is all."
ANSWERS: dict[str, tuple[str, str]] = {
    "instant": (say("OK"), "OK"),
    "5000 ascii": (say(ASCII), ASCII),
    "3000 emoji": ("many 50 " + "\U0001f600" * 60, "\U0001f600" * 3000),
    "100000 CJK": ("\n".join(f"many 100 {piece}" for piece in CJK), "".join(piece * 100 for piece in CJK)),
    "5000-character fence": (say(FENCE), FENCE),
    "1 MB": ("many 159000", "".join(f"{i} " for i in range(159_000))),
}
"""Name: what the agent is told, and the answer people must read."""

IN_A_GROUP = "".join(f"Row {i:05d} of a long table. " for i in range(1_960))
"""14 messages of Telegram, 28 calls of a bot that streams them: more than a group takes at once."""

LONG = ("100000 CJK", "1 MB")
"""At the pace of a chat these take from half a minute to nine, so they are on their way while other tests run."""


# ------------------------------------------------------------------ installing


def test_a_stock_host_installs_the_package_and_offers_its_form(place: Place) -> None:
    """LangBot 4.11.2 with the SDK it pins: the runner is listed, and its form has the established fields with defaults."""
    form = place.host.runners()[place.runner]
    assert place.runner == "plugin:langbot-team/ACPAgentRunner/default"
    assert {"provider", "location", "workspace", "acp-command", "timeout", "reply-mode", "approval-policy"} <= set(form)
    assert form["timeout"] == 1800
    assert form["reply-mode"] == "stream"


# ------------------------------------------------------------------ answers


def shown(messages: list[Message]) -> str:
    """All that stands in a chat, documents included."""
    return "".join(each.text for each in messages)


async def stands(fake: FakeTelegram, bot: str, chat: int, answer: str, seconds: float) -> None:
    """Wait until the chat holds the answer: whole, once, in order, and no call for it was refused."""
    wanted = ink(answer)
    came = await asyncio.to_thread(fake.until, lambda: len(ink(shown(fake.chat(bot, chat)))) >= len(wanted), seconds)
    refused = {call.problem for call in fake.calls if call.bot == bot and call.problem and call.fields["chat_id"] == str(chat)}
    assert came, (refused, [each.text[:100] for each in fake.chat(bot, chat)][-5:])
    await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
    assert ink(shown(fake.chat(bot, chat))) == wanted
    assert refused == set()


SURFACES = ("telegram streaming", "telegram single", "agent bot")
LONG_ANSWERS = (*itertools.product(SURFACES, LONG), ("telegram streaming", "in a group"))


@pytest.fixture(scope="module")
def long_answers(place: Place) -> dict[tuple[str, str], tuple[str, int]]:
    """Each of the long answers asked for, every one of a bot of its own: the bot and the chat."""
    form = place.form(timeout=1800)
    single = {**form, "reply-mode": "single"}
    asked = {}
    for surface, name in LONG_ANSWERS:
        if surface == "agent bot":
            bot = place.host.telegram_bot(agent=place.host.agent(place.runner, form))
        elif surface == "telegram single":
            bot = place.host.telegram_bot(pipeline=place.host.pipeline(place.runner, single), streaming=False)
        else:
            bot = place.host.telegram_bot(pipeline=place.host.pipeline(place.runner, form))
        chat = next(CHATS)
        if name == "in a group":
            place.telegram.say(bot, say(IN_A_GROUP), chat=-chat)
            asked[surface, name] = bot, -chat
        else:
            place.telegram.say(bot, ANSWERS[name][0], user=chat)
            asked[surface, name] = bot, chat
    return asked


@pytest.mark.asyncio
@pytest.mark.parametrize(("surface", "name"), LONG_ANSWERS)
async def test_the_beginning_of_a_long_answer_is_there_long_before_its_end(
    place: Place, long_answers: dict[tuple[str, str], tuple[str, int]], surface: str, name: str
) -> None:
    """The pace of the chat holds back the rest, not the start."""
    bot, chat = long_answers[surface, name]
    fake = place.telegram
    answer = ink(IN_A_GROUP if name == "in a group" else ANSWERS[name][1])

    def begun() -> bool:
        return bool(fake.chat(bot, chat)) and ink(fake.chat(bot, chat)[0].text)[:100] == answer[:100]

    assert await asyncio.to_thread(fake.until, begun, 120)


@pytest.mark.asyncio
async def test_an_answer_is_seen_growing_on_the_web_chat(place: Place) -> None:
    """Streaming: the first half stands in an open bubble while the agent still works; then the same bubble is closed."""
    gate = place.file()
    async with place.host.web_chat(place.pipeline) as chat:
        await chat.say(f"say The first half,\nuntil {gate}\nsay  and the second.")
        await chat.until(lambda: bool(chat.bubbles) and "The first half," in chat.bubbles[0].text, 90)
        assert not chat.bubbles[0].final
        gate.touch()
        assert [each.text for each in await chat.answers(1)] == ["The first half, and the second."]
        await chat.rest()
        assert [(each.text, each.final) for each in chat.bubbles] == [("The first half, and the second.", True)]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ANSWERS)
async def test_every_answer_arrives_whole_once_in_order_on_the_web_chat(place: Place, name: str) -> None:
    """The sizes that break hosts: nothing lost, doubled, stuck or cut."""
    script, answer = ANSWERS[name]
    async with place.host.web_chat(place.pipeline) as chat:
        await chat.say(script)
        await chat.until(lambda: len(ink("".join(each.text for each in chat.bubbles if each.final))) >= len(ink(answer)), 180)
        await chat.rest()
        assert ink("".join(each.text for each in chat.bubbles)) == ink(answer)
        assert all(each.final for each in chat.bubbles)
        assert chat.errors == []


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in LONG])
@pytest.mark.parametrize("surface", SURFACES)
async def test_every_answer_arrives_whole_once_in_order_on_telegram(place: Place, surface: str, name: str) -> None:
    """A stock host cuts at 4,000 characters, sends nothing or sends twice; here all of it stands in the chat, once."""
    script, answer = ANSWERS[name]
    bot, chat = place.bots[surface], next(CHATS)
    place.telegram.say(bot, script, user=chat)
    await stands(place.telegram, bot, chat, answer, 300)


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", ["telegram streaming", "telegram single", "agent bot"])
async def test_an_empty_answer_says_so_on_telegram(place: Place, surface: str) -> None:
    """No "Thinking..." is left standing, and silence is explained."""
    bot, chat, fake = place.bots[surface], next(CHATS), place.telegram
    fake.say(bot, "think only a thought", user=chat)
    assert await asyncio.to_thread(fake.until, lambda: "no text" in shown(fake.chat(bot, chat)), 90)
    await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
    assert [each.text for each in fake.chat(bot, chat)] == ["Done. The agent gave no text as an answer."]


@pytest.mark.asyncio
async def test_a_web_chat_without_streaming_gets_the_whole_answer_in_its_one_message(place: Place) -> None:
    """The host delivers only the last message of a run there; with ``reply-mode: single`` everything is in it."""
    async with place.host.web_chat(place.single, streaming=False) as chat:
        await chat.say(f"{ANSWERS['5000 ascii'][0]}\nexit 3")
        bubbles = await chat.answers(1)
        await chat.rest()
        assert len(chat.bubbles) == 1
        assert ink(bubbles[0].text).startswith(ink(ANSWERS["5000 ascii"][1]))
        assert "exit code 3" in bubbles[0].text


# ------------------------------------------------------------------ failures


def readable(text: str) -> None:
    """What a failure in the chat may and may not contain."""
    assert not text.startswith(NOTICES)
    assert re.search(r"Reference: \w+", text), text
    assert "Traceback" not in text
    assert "/plugin-runtime/" not in text


@pytest.mark.asyncio
async def test_a_missing_agent_is_an_error_people_can_read(place: Place) -> None:
    """The stock host would show "Agent runner execution failed."; people read what is wrong and what to do."""
    pipeline = place.host.pipeline(place.runner, place.form(**{"acp-command": "no-such-agent --acp"}))
    async with place.host.web_chat(pipeline) as chat:
        await chat.say("hello")
        (bubble,) = await chat.answers(1)
        readable(bubble.text)
        assert "no-such-agent" in bubble.text
        await chat.rest()
        assert len(chat.bubbles) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", ["telegram streaming", "telegram single", "agent bot"])
async def test_a_crash_leaves_the_partial_answer_and_says_what_happened(place: Place, surface: str) -> None:
    """Exit code and the agent's last words are told, once, under what it had said; nothing is overwritten."""
    bot, chat, fake = place.bots[surface], next(CHATS), place.telegram
    fake.say(bot, "say Half of the work.\ncomplain the disk is full\nexit 3", user=chat)
    assert await asyncio.to_thread(fake.until, lambda: "Reference:" in shown(fake.chat(bot, chat)), 90)
    await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
    text = "\n".join(each.text for each in fake.chat(bot, chat))
    readable(text)
    assert text.startswith("Half of the work.")
    assert text.count("exit code 3") == 1
    assert "the disk is full" in text


@pytest.mark.asyncio
async def test_the_debug_stream_shows_the_failure_with_its_stable_code(place: Place) -> None:
    """Where ``run.failed`` is shown as it is, it carries our code."""
    agent = place.host.agent(place.runner, place.form(**{"acp-command": "no-such-agent"}))
    events = await place.host.agent_events(agent, "hello")
    failed = [each["data"] for each in events if each["kind"] == "result" and each["data"]["type"] == "run.failed"]
    assert [each["data"]["code"] for each in failed] == ["coding.agent_not_found"]
    assert "no-such-agent" in failed[0]["data"]["error"]


# ------------------------------------------------------------------ steering and stopping


@pytest.mark.asyncio
async def test_a_message_during_a_run_is_taken_into_it(place: Place) -> None:
    """Steering: the host hands the second message to the running run, which answers both in order."""
    gate = place.file()
    async with place.host.web_chat(place.pipeline) as chat:
        await chat.say(f"say The first answer.\nuntil {gate}")
        await chat.until(lambda: bool(chat.bubbles) and "The first answer." in chat.bubbles[0].text, 90)
        claimed = claims(place.host)
        await chat.say("say The second answer.")
        await eventually(lambda: claims(place.host) > claimed, 30)
        gate.touch()
        await chat.answers(2)
        await chat.rest()
        assert [(each.text, each.final) for each in chat.bubbles] == [("The first answer.", True), ("The second answer.", True)]


def claims(host: LangBotHost) -> int:
    """How many messages the host has handed to running runs so far, by its own log."""
    return host.host.log.read_text(errors="replace").count("as steering input for run")


@pytest.mark.asyncio
async def test_stop_typed_in_the_chat_ends_the_turn(place: Place) -> None:
    """Only steering can carry it there: the host itself has no way to stop a pipeline's run."""
    log = place.file()
    pipeline = place.host.pipeline(place.runner, place.form({"log": str(log)}))
    async with place.host.web_chat(pipeline) as chat:
        await chat.say("say I am working.\nhang")
        await chat.until(lambda: bool(chat.bubbles) and "I am working." in chat.bubbles[0].text, 90)
        await chat.say("/stop")
        await chat.until(lambda: any("Stopped" in each.text and each.final for each in chat.bubbles), 90)
        await chat.rest()
        text = "\n".join(each.text for each in chat.bubbles)
        assert text.startswith("I am working.")
        assert all(each.final for each in chat.bubbles)
    assert '"session/cancel"' in log.read_text()


@pytest.mark.asyncio
async def test_closing_the_debug_stream_cancels_the_agents_turn(place: Place) -> None:
    """The host's own cancel reaches the agent as its protocol's cancel."""
    log = place.file()
    agent = place.host.agent(place.runner, place.form({"log": str(log)}))
    with contextlib.suppress(TimeoutError):
        await place.host.agent_events(agent, "say I am working.\nhang", seconds=8)
    await eventually(lambda: log.exists() and '"session/cancel"' in log.read_text(), 60)


# ------------------------------------------------------------------ tools


@pytest.mark.asyncio
async def test_the_agent_reaches_langbots_tools_while_its_run_lasts(place: Place) -> None:
    """The MCP address given to the agent answers from the real host during the run, and refuses or says why afterwards."""
    log, gate = place.file(), place.file()
    pipeline = place.host.pipeline(place.runner, place.form({"log": str(log)}, **{"keep-warm": 0}))
    async with place.host.web_chat(pipeline) as chat:
        await chat.say(f"say Ready.\nuntil {gate}")
        await chat.until(lambda: bool(chat.bubbles) and "Ready." in chat.bubbles[0].text, 90)
        messages = [json.loads(line) for line in log.read_text().splitlines()]
        (opened,) = [each["params"] for each in messages if each.get("method") == "session/new"]
        (server,) = [each for each in opened["mcpServers"] if each["name"] == "langbot_agent"]
        async with aiohttp.ClientSession(trust_env=False) as http:
            names = {each["name"] for each in (await mcp(http, server, "tools/list"))["result"]["tools"]}
            assert {"langbot_get_current_event", "langbot_list_assets", "langbot_history_page"} <= names
            event = await mcp(http, server, "tools/call", name="langbot_get_current_event", arguments={})
            assert "say Ready." in event["result"]["structuredContent"]["input"]["text"]
            page = await mcp(http, server, "tools/call", name="langbot_history_page", arguments={"limit": 5})
            assert not page["result"].get("isError"), page
            gate.touch()
            await chat.answers(1)
            await chat.rest()
            with pytest.raises((aiohttp.ClientError, PermissionError)):
                await mcp(http, server, "tools/call", name="langbot_history_page", arguments={})


async def mcp(http: aiohttp.ClientSession, server: dict[str, Any], method: str, **params: Any) -> dict[str, Any]:
    """One JSON-RPC request to an MCP server as the agent was given it."""
    headers = {each["name"]: each["value"] for each in server["headers"]}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with http.post(server["url"], json=body, headers=headers) as answer:
        if answer.status == 401:
            raise PermissionError
        answered: dict[str, Any] = await answer.json()
        return answered


# ------------------------------------------------------------------ sessions, people, files, limits, secrets


def received(log: Path, method: str) -> list[dict[str, Any]]:
    """The parameters of every message of one method that the agent got, oldest first."""
    if not log.exists():
        return []
    whole_lines = log.read_text().rpartition("\n")[0]
    messages = [json.loads(line) for line in whole_lines.splitlines()]
    return [each.get("params") or {} for each in messages if each.get("method") == method]


async def told(place: Place, bot: str, chat: int, script: str, answer: str) -> None:
    """Write to a Telegram bot and wait until its last message is exactly ``answer`` and nothing follows."""
    fake = place.telegram
    fake.say(bot, script, user=chat)
    stands = await asyncio.to_thread(fake.until, lambda: [each.text for each in fake.chat(bot, chat)][-1:] == [answer], 90)
    assert stands, fake.chat(bot, chat)
    await asyncio.to_thread(fake.quiet, bot, 2.0, 60)


@pytest.mark.asyncio
async def test_the_next_message_continues_the_stored_session(place: Place) -> None:
    """The session id is kept by the host between two processes of the agent: the second one resumes, nothing is repeated."""
    log, state = place.file(), place.file()
    state.mkdir()
    pipeline = place.host.pipeline(place.runner, place.form({"log": str(log), "state": str(state)}, **{"keep-warm": 0}))
    bot, chat, fake = place.host.telegram_bot(pipeline=pipeline), next(CHATS), place.telegram
    for text in ("one", "two"):
        await told(place, bot, chat, f"say {text}", text)
    assert [each.text for each in fake.chat(bot, chat)] == ["one", "two"]
    (resumed,) = received(log, "session/resume")
    assert resumed["sessionId"] == received(log, "session/prompt")[0]["sessionId"]
    assert len(received(log, "session/new")) == 1
    assert len(received(log, "initialize")) == 2


@pytest.mark.asyncio
async def test_one_bots_session_is_not_anothers(place: Place) -> None:
    """The host's conversation id repeats across bots (``person_7``); the same person gets a session of each bot's own."""
    log, state = place.file(), place.file()
    state.mkdir()
    agent = {"log": str(log), "state": str(state)}
    chat = next(CHATS)
    for text in ("one", "two"):
        pipeline = place.host.pipeline(place.runner, place.form(agent))
        bot = place.host.telegram_bot(pipeline=pipeline)
        await told(place, bot, chat, f"say {text}", text)
    assert len(received(log, "session/new")) == 2
    assert received(log, "session/resume") == received(log, "session/load") == []


@pytest.mark.asyncio
async def test_another_member_of_a_group_cannot_steer_somebodys_run(place: Place) -> None:
    """The host hands any member's message to the running run; it is refused once, in words, and the run goes on."""
    log, gate = place.file(), place.file()
    pipeline = place.host.pipeline(place.runner, place.form({"log": str(log)}))
    bot, group, fake = place.host.telegram_bot(pipeline=pipeline), -next(CHATS), place.telegram
    fake.say(bot, f"say Mine.\nuntil {gate}\nsay  Done.", user=11, chat=group)
    assert await asyncio.to_thread(fake.until, lambda: "Mine." in shown(fake.chat(bot, group)), 90)
    fake.say(bot, "say NOT FOR THE AGENT", user=12, chat=group)
    assert await asyncio.to_thread(fake.until, lambda: "only the person who started" in shown(fake.chat(bot, group)), 60)
    gate.touch()
    assert await asyncio.to_thread(fake.until, lambda: "Done." in shown(fake.chat(bot, group)), 60)
    await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
    text = "".join(each.text for each in fake.chat(bot, group))
    assert text.count("only the person who started") == 1
    assert "User12" in text
    assert "NOT FOR THE AGENT" not in log.read_text()


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)


@pytest.mark.asyncio
@pytest.mark.parametrize("surface", ["telegram streaming", "agent bot"])
async def test_a_photo_and_a_document_reach_the_agent_once(place: Place, surface: str) -> None:
    """Hosts repeat files in two places and name every photo a JPEG; the agent gets each once, as what it is."""
    log = place.file()
    form = place.form({"log": str(log)})
    if surface == "agent bot":
        bot = place.host.telegram_bot(agent=place.host.agent(place.runner, form))
    else:
        bot = place.host.telegram_bot(pipeline=place.host.pipeline(place.runner, form))
    chat, fake = next(CHATS), place.telegram
    fake.say(bot, "say seen", user=chat, photo=PNG)
    await eventually(lambda: len(received(log, "session/prompt")) == 1, 90)
    assert await asyncio.to_thread(fake.until, lambda: "seen" in shown(fake.chat(bot, chat)), 90)
    # Between the last words of a run and its end the host hands a message to the run, which is over before it can take it.
    await asyncio.to_thread(fake.quiet, bot, 2.0, 60)
    fake.say(bot, "say read", user=chat, document=("notes.txt", b"the notes CANARY-NOTE"))
    await eventually(lambda: len(received(log, "session/prompt")) == 2, 90)
    photo, document = (each["prompt"] for each in received(log, "session/prompt"))
    images = [block for block in photo if block["type"] == "image"]
    assert [(each["mimeType"], base64.b64decode(each["data"])) for each in images] == [("image/png", PNG)]
    given = json.dumps(document)
    assert given.count("CANARY-NOTE") + given.count(base64.b64encode(b"the notes CANARY-NOTE").decode()) == 1
    assert "notes.txt" in given


@pytest.mark.asyncio
async def test_the_time_limit_ends_softly_and_names_its_field(place: Place) -> None:
    """Before the host's own deadline, which would leave a frozen bubble: the partial answer stays, the limit is told."""
    pipeline = place.host.pipeline(place.runner, place.form(timeout=25))
    bot, chat, fake = place.host.telegram_bot(pipeline=pipeline), next(CHATS), place.telegram
    fake.say(bot, "say Half of it.\nhang", user=chat)
    assert await asyncio.to_thread(fake.until, lambda: '"timeout"' in shown(fake.chat(bot, chat)), 90)
    await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
    text = "\n".join(each.text for each in fake.chat(bot, chat))
    assert text.startswith("Half of it.")
    assert "25 seconds" in text
    readable(text)


@pytest.mark.asyncio
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("surface", "name"), LONG_ANSWERS)
async def test_a_long_answer_arrives_whole_once_in_order_at_the_pace_of_its_chat(
    place: Place, long_answers: dict[tuple[str, str], tuple[str, int]], surface: str, name: str
) -> None:
    """Sent as fast as it is written, most of it would be refused, and nobody tries again on a pipeline."""
    bot, chat = long_answers[surface, name]
    await stands(place.telegram, bot, chat, IN_A_GROUP if name == "in a group" else ANSWERS[name][1], 900)


@pytest.mark.asyncio
async def test_a_secret_of_the_plugin_form_reaches_the_agents_environment_and_nothing_else(place: Place) -> None:
    """Absent from every command line and from the logs; the runner form holds only its name."""
    canary = "CANARY-" + secrets.token_hex(16)
    await asyncio.to_thread(place.host.configure, place.runner, {"agent-secret-values": json.dumps({"KEY": canary})})
    form = place.form(**{"env-json": '{"AGENT_KEY": "${secret:KEY}"}'})
    async with place.host.web_chat(place.host.pipeline(place.runner, form)) as chat:
        await chat.say("child\nhang")
        await chat.until(lambda: bool(chat.bubbles) and "agent=" in chat.bubbles[0].text, 90)
        agent = int(chat.bubbles[0].text.split("agent=")[1].split()[0])
        environment = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
        assert f"AGENT_KEY={canary}".encode() in environment
        for pid in langbot_host.processes():
            with contextlib.suppress(OSError):
                assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        await chat.say("/stop")
        await chat.until(lambda: any("Stopped" in each.text for each in chat.bubbles), 60)
    for process in (place.host.host, place.host.runtime):
        assert canary not in process.log.read_text(errors="replace")


@pytest.mark.asyncio
async def test_the_host_masks_every_secret_of_the_plugin_form_and_keeps_what_is_saved_masked(place: Place) -> None:
    """4.11.2 masks by a word of the name: ``secret``, ``token``. A form saved as it was shown means the stored values."""
    canary = "CANARY-" + secrets.token_hex(16)
    stored = {
        "daemon-token": "CANARY-T" * 8,
        "ssh-private-key-secret": "CANARY-K",
        "agent-secret-values": json.dumps({"KEY": canary}),
    }
    await asyncio.to_thread(place.host.configure, place.runner, stored)
    path = "/api/v1/plugins/langbot-team/ACPAgentRunner/config"
    shown_form = (await asyncio.to_thread(place.host.call, "GET", path))["config"]
    assert {name: value for name, value in shown_form.items() if name in stored} == dict.fromkeys(stored, "***")
    await asyncio.to_thread(place.host.configure, place.runner, {**shown_form, "daemon-port": 8798})
    form = place.form(**{"env-json": '{"AGENT_KEY": "${secret:KEY}"}'})
    async with place.host.web_chat(place.host.pipeline(place.runner, form)) as chat:
        await chat.say("child\nhang")
        await chat.until(lambda: bool(chat.bubbles) and "agent=" in chat.bubbles[0].text, 90)
        agent = int(chat.bubbles[0].text.split("agent=")[1].split()[0])
        assert f"AGENT_KEY={canary}".encode() in Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
        await chat.say("/stop")
        await chat.until(lambda: any("Stopped" in each.text for each in chat.bubbles), 60)
    await asyncio.to_thread(place.host.configure, place.runner, {})


# ------------------------------------------------------------------ the worst end


async def eventually(holds: Any, seconds: float) -> None:
    """Wait until ``holds()``, looked at ten times a second (for what announces itself nowhere)."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["SIGKILL", "another configuration"])
async def test_a_worker_that_dies_in_the_middle_of_a_tool_leaves_no_process(place: Place, end: str) -> None:
    """Neither runs any cleanup in the worker. The agent has a child in its own session that ignores SIGTERM: gone in 10 s."""
    host = place.host
    async with host.web_chat(place.pipeline) as chat:
        await chat.say("child\nhang")
        await chat.until(lambda: bool(chat.bubbles) and "agent=" in chat.bubbles[0].text, 90)
        match = re.search(r"child=(\d+) agent=(\d+)", chat.bubbles[0].text)
        assert match is not None
        worker = host.worker("ACPAgentRunner")
        table = langbot_host.processes()
        tree = langbot_host.descendants(worker) | {(int(pid), table[int(pid)][1]) for pid in match.groups()}
        assert langbot_host.living(tree) == tree
        if end == "SIGKILL":
            os.kill(worker, signal.SIGKILL)
        else:
            await asyncio.to_thread(host.configure, place.runner, {"daemon-port": 8799})
        assert await asyncio.to_thread(langbot_host.gone, tree, 10.0), langbot_host.living(tree)
    await eventually(lambda: host.worker("ACPAgentRunner") not in (0, worker), 60)
    last = ""
    for _ in range(20):  # the host needs a moment until it uses the new worker
        with contextlib.suppress(HostError):
            async with host.web_chat(place.pipeline) as chat:
                await chat.say("say back again")
                last = (await chat.answers(1, 15))[0].text
                if last == "back again":
                    break
        await asyncio.sleep(1)
    assert last == "back again"
