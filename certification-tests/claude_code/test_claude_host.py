"""A stock LangBot with this package installed, and the real Claude Code on a loopback model (local protocol fixture).

One host and one runtime serve the whole file; they start empty, and the package is installed over the host's own API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit import langbot_host
from testkit.anthropic_fixture import AnthropicFixture, anthropic_fixture
from testkit.fake_telegram import MESSAGE_UNITS, FakeTelegram, utf16_units
from testkit.langbot_host import LangBotHost
from testkit.model_fixture import KEY
from tooling import ROOT, packages

pytestmark = [
    pytest.mark.real_claude,
    pytest.mark.real_host,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

NAME = "ClaudeCodeAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""


class Place:
    """The host with the package installed and its secret set, and what the program needs."""

    def __init__(
        self, host: LangBotHost, telegram: FakeTelegram, model: AnthropicFixture, runner: str, program: Path, scratch: Path
    ) -> None:
        self.host, self.telegram, self.model, self.runner = host, telegram, model, runner
        self.workspace = scratch / "workspace"
        self._home = home = scratch / "home"
        for directory in (self.workspace, home):
            directory.mkdir()
        self._program = program
        self._environment = {**model.environment(), "HOME": str(home)}

    def form(self, *, signed_in: bool = True, **fields: Any) -> dict[str, Any]:
        """The runner form as an operator fills it in; ``fields`` with underscores for hyphens."""
        environment = {**self._environment, "ANTHROPIC_API_KEY": "${secret:MODEL_KEY}"}
        if not signed_in:
            del environment["ANTHROPIC_API_KEY"]
        form = {"command": str(self._program), "workspace": str(self.workspace), "env-json": environment}
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def programs(self) -> set[int]:
        """The processes below the package's worker that are Claude Code itself."""
        found = set()
        for pid, _ in langbot_host.descendants(self.host.worker(NAME)):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/exe").readlink().name == "claude":
                    found.add(pid)
        return found

    def histories(self) -> list[str]:
        """Every line of Claude Code's own records of its sessions."""
        return [line for path in self._home.rglob("*.jsonl") for line in path.read_text().splitlines()]


SECRETS = {"agent-secret-values": json.dumps({"MODEL_KEY": KEY})}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(
    host_python: Path, package_root: Path, claude_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    """Host, runtime and package for all tests here; afterwards both ended well and nothing of them runs."""
    root, scratch = tmp_path_factory.mktemp("langbot"), tmp_path_factory.mktemp("scratch")
    own = package_root == ROOT / NAME
    package = packages.build(NAME, scratch) if own else langbot_host.build_package(package_root, scratch)
    with FakeTelegram(burst=20) as telegram:
        host = LangBotHost(host_python, root, telegram.url)
        async with anthropic_fixture() as model:
            await asyncio.to_thread(host.__enter__)
            try:
                runner = await asyncio.to_thread(host.install, package)
                await asyncio.to_thread(host.configure, runner, SECRETS)
                yield Place(host, telegram, model, runner, claude_program, scratch)
                host.watch()
            finally:
                codes = await asyncio.to_thread(host.stop)
        assert codes == [0, 0]
        assert await asyncio.to_thread(host.leftovers) == set()
        logs = b"".join(path.read_bytes() for path in root.rglob("*.log"))
        assert KEY.encode() not in logs


async def test_a_stock_host_installs_the_package_and_offers_its_form(place: Place) -> None:
    """LangBot 4.11.2 with the SDK it pins: the runner is listed, and its form has the established fields with defaults."""
    form = place.host.runners()[place.runner]
    assert place.runner == "plugin:langbot-team/ClaudeCodeAgent/default"
    established = {"location", "workspace", "command", "args-json", "env-json", "daemon-id", "timeout", "streaming"}
    established |= {"reuse-session", "dangerously-skip-permissions", "knowledge-bases", "langbot-assets-enabled"}
    established |= {"mcp-bridge-transport", "mcp-servers-json", "model", "permission-mode", "allowed-tools"}
    established |= {"disallowed-tools", "max-turns", "max-budget-usd", "trust-workspace", "append-system-prompt"}
    assert established <= set(form), sorted(established - set(form))
    assert (form["timeout"], form["approval-policy"], form["trust-workspace"]) == (1800, "ask", False)


async def test_a_conversation_of_two_turns_in_the_web_chat(place: Place) -> None:
    """Every answer stands there once, whole and closed; the second turn knows the first and is the same live process."""
    gate = place.workspace / "gate"
    pipeline = place.host.pipeline(place.runner, place.form())
    async with place.host.web_chat(pipeline) as chat:
        await chat.say(f"remember PEAR [[ hold {gate} ]]")
        await chat.until(lambda: bool(chat.bubbles) and "holding" in chat.bubbles[0].text, BOUND)
        assert not chat.bubbles[0].final
        gate.touch()
        assert [each.text for each in await chat.answers(1)] == ["holding released"]
        alive = place.programs()
        assert len(alive) == 1
        await chat.say("[[ recall ]]")
        await chat.answers(2)
        await chat.rest()
        assert [(each.text, each.final) for each in chat.bubbles] == [
            ("holding released", True),
            ("recalled: remember PEAR", True),
        ]
        assert chat.errors == []
        assert place.programs() == alive


async def test_the_conversation_goes_on_after_the_worker_was_replaced(place: Place) -> None:
    """A saved plugin form kills the worker and what lives in it; the next message resumes the stored session."""
    pipeline = place.host.pipeline(place.runner, place.form())
    async with place.host.web_chat(pipeline) as chat:
        await chat.say("remember PLUM [[ say noted ]]")
        await chat.answers(1)
        before = place.programs()
        await asyncio.to_thread(place.host.configure, place.runner, SECRETS)
        await chat.say("[[ recall ]]")
        answers = await chat.answers(2)
        assert answers[-1].text == "recalled: remember PLUM"
        assert place.programs().isdisjoint(before)


async def test_stop_typed_in_the_chat_ends_the_turn_and_not_the_conversation(place: Place) -> None:
    """What was said stays, the stop is told, the model's answer is let go, and the same process answers the next message."""
    gate, pipeline = place.workspace / "never", place.host.pipeline(place.runner, place.form())
    async with place.host.web_chat(pipeline) as chat:
        await chat.say(f"remember FIG [[ hold {gate} ]]")
        await chat.until(lambda: bool(chat.bubbles) and "holding" in chat.bubbles[0].text, BOUND)
        alive = place.programs()
        dropped = place.model.dropped
        await chat.say("/stop")
        await chat.until(lambda: any("Stopped" in each.text and each.final for each in chat.bubbles), BOUND)
        await chat.rest()
        assert "\n".join(each.text for each in chat.bubbles).startswith("holding")
        assert all(each.final for each in chat.bubbles)
        assert place.model.dropped == dropped + 1
        stopped = len(chat.bubbles)
        await chat.say("[[ say and on it goes ]]")
        answers = await chat.answers(stopped + 1)
        assert answers[-1].text == "and on it goes"
        assert place.programs() == alive


async def test_a_tool_call_is_decided_by_the_form_and_shown(place: Place) -> None:
    """In a chat of a bot: the command runs under ``allow-all``, and the answer stands there once."""
    pipeline = place.host.pipeline(place.runner, place.form(approval_policy="allow-all"))
    bot = place.host.telegram_bot(pipeline=pipeline)
    place.telegram.say(bot, "do it [[ run touch made ;; say I made it ]]", user=41)

    def shown() -> str:
        return "".join(each.text for each in place.telegram.chat(bot, 41))

    assert await asyncio.to_thread(place.telegram.until, lambda: "I made it" in shown(), BOUND), shown()
    await asyncio.to_thread(place.telegram.quiet, bot, 2.5, 60)
    assert shown().count("I made it") == 1
    assert (place.workspace / "made").exists()


async def test_a_pressed_button_lands_in_the_living_turn(place: Place) -> None:
    """The whole command and its directory are asked; allowed, it runs in the same process and turn; denied, it does not."""
    pipeline = place.host.pipeline(place.runner, place.form())
    bot, fake = place.host.telegram_bot(pipeline=pipeline), place.telegram
    number = 0

    def shown() -> str:
        return "\n".join(each.text for each in fake.chat(bot, 42))

    async def decided(command: str, label: str, told: str) -> set[int]:
        nonlocal number
        number += 1
        fake.say(bot, f"turn {number} [[ run {command} ;; say {told} ]]", user=42)
        assert await asyncio.to_thread(fake.until, lambda: any(each.buttons for each in fake.chat(bot, 42)), BOUND), shown()
        (asked,) = [each for each in fake.chat(bot, 42) if each.buttons]
        assert utf16_units(asked.text) <= MESSAGE_UNITS
        for part in (
            command,
            str(place.workspace),
            "1. Allow once",
            "2. Allow for this session",
            "3. Deny",
            "4. Deny and say why",
        ):
            assert part in asked.text
        await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
        waiting = place.programs()
        (button,) = [each for each in asked.buttons if each.label == label]
        fake.press(bot, asked, button, user=42)
        assert await asyncio.to_thread(fake.until, lambda: told in shown(), BOUND), shown()
        # The host takes a message that comes while a run ends for the one that ends, and drops it.
        await asyncio.to_thread(fake.quiet, bot, 2.5, 60)
        assert place.programs() == waiting
        return waiting

    first = await decided("touch allowed", "Allow once", "I made it")
    assert (place.workspace / "allowed").exists()
    assert await decided("touch denied", "Deny", "I left it") == first
    assert not (place.workspace / "denied").exists()
    prompts = [line for line in place.histories() if '"turn 1 ' in line or '"turn 2 ' in line]
    assert len([line for line in prompts if json.loads(line).get("type") == "user"]) == 2, "each was one turn"


async def test_without_an_account_the_chat_says_what_to_do(place: Place) -> None:
    """One message with the command and the machine, where the stock host would say that the runner failed."""
    pipeline = place.host.pipeline(place.runner, place.form(signed_in=False))
    async with place.host.web_chat(pipeline) as chat:
        await chat.say("hello")
        (bubble,) = await chat.answers(1)
        await chat.rest()
        assert "`claude auth login`" in bubble.text
        assert os.uname().nodename in bubble.text
        assert len(chat.bubbles) == 1
