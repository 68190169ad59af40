"""A stock LangBot with this package installed, and the real Codex on a loopback model (local protocol fixture).

One host and one runtime serve the whole file; they start empty, and the package is installed over the host's own API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit import langbot_host
from testkit.fake_telegram import MESSAGE_UNITS, FakeTelegram, utf16_units
from testkit.langbot_host import LangBotHost
from testkit.responses_fixture import KEY, ResponsesFixture, codex_home, responses_fixture
from tooling import ROOT, packages

pytestmark = [
    pytest.mark.real_codex,
    pytest.mark.real_host,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

NAME = "CodexAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
PULLED = 3.0
"""Seconds in which a message that the host has taken is certainly pulled: it is asked for every second."""
SECRETS = {"agent-secret-values": json.dumps({"MODEL_KEY": KEY})}


class Place:
    """The host with the package installed and its secret set, and what the program needs."""

    def __init__(
        self, host: LangBotHost, telegram: FakeTelegram, model: ResponsesFixture, runner: str, program: Path, scratch: Path
    ) -> None:
        self.host, self.telegram, self.model, self.runner = host, telegram, model, runner
        self.workspace = scratch / "workspace"
        self.workspace.mkdir()
        self._program = program
        self._environment = codex_home(scratch / "home", model.url)

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form as an operator fills it in; ``fields`` with underscores for hyphens."""
        environment = {**self._environment, "FIXTURE_API_KEY": "${secret:MODEL_KEY}"}
        form = {"command": str(self._program), "workspace": str(self.workspace), "env-json": environment}
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def programs(self) -> set[int]:
        """The app-servers below the package's worker; what they start is the same program."""
        found = set()
        for pid, _ in langbot_host.descendants(self.host.worker(NAME)):
            with contextlib.suppress(OSError):
                own = Path(f"/proc/{pid}/exe").readlink().name == "codex"
                if own and b"app-server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.add(pid)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(
    host_python: Path, package_root: Path, codex_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    """Host, runtime and package for all tests here; afterwards both ended well and nothing of them runs."""
    root = tmp_path_factory.mktemp("langbot")
    scratch = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="codex-host-")).resolve()
    own = package_root == ROOT / NAME
    package = packages.build(NAME, scratch) if own else langbot_host.build_package(package_root, scratch)
    with FakeTelegram(burst=20) as telegram:
        host = LangBotHost(host_python, root, telegram.url)
        async with responses_fixture() as model:
            await asyncio.to_thread(host.__enter__)
            try:
                runner = await asyncio.to_thread(host.install, package)
                await asyncio.to_thread(host.configure, runner, SECRETS)
                yield Place(host, telegram, model, runner, codex_program, scratch)
                host.watch()
            finally:
                codes = await asyncio.to_thread(host.stop)
        assert codes == [0, 0]
        assert await asyncio.to_thread(host.leftovers) == set()
        logs = b"".join(path.read_bytes() for path in root.rglob("*.log"))
        assert KEY.encode() not in logs
    shutil.rmtree(scratch)


async def test_a_stock_host_installs_the_package_and_offers_its_form(place: Place) -> None:
    """The runner is listed, and its form has the established fields and this package's own, with safe defaults."""
    form = place.host.runners()[place.runner]
    assert place.runner == "plugin:langbot-team/CodexAgent/default"
    established = {"location", "workspace", "command", "args-json", "env-json", "daemon-id", "timeout", "streaming"}
    established |= {"reuse-session", "approval-policy", "sandbox-mode", "knowledge-bases", "langbot-assets-enabled"}
    established |= {"mcp-bridge-transport", "mcp-servers-json", "model", "effort", "network-access", "writable-roots"}
    established |= {"keep-warm", "idle-timeout", "append-instructions"}
    assert established <= set(form), sorted(established - set(form))
    assert (form["approval-policy"], form["sandbox-mode"], form["network-access"]) == ("ask", "workspace-write", False)


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
    """A saved plugin form kills the worker and what lives in it; the next message resumes the stored thread."""
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
        alive, gone = place.programs(), place.model.gone
        await chat.say("/stop")
        await chat.until(lambda: any("Stopped" in each.text and each.final for each in chat.bubbles), BOUND)
        await chat.rest()
        assert all(each.final for each in chat.bubbles)
        assert place.model.gone == gone + 1
        stopped = len(chat.bubbles)
        await chat.say("[[ say and on it goes ]]")
        answers = await chat.answers(stopped + 1)
        assert answers[-1].text == "and on it goes"
        assert place.programs() == alive


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
        fake.say(bot, f"pressing {number} [[ run {command} ;; say {told} ]]", user=42)
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
    histories = [path.read_text() for path in (place.workspace.parent / "home").rglob("rollout-*.jsonl")]
    (mine,) = [history for history in histories if "pressing 1" in history]
    assert mine.count('"payload":{"type":"task_started"') == 2, "each was one turn"


async def test_a_message_while_codex_works_is_taken_into_the_turn(place: Place) -> None:
    """The host hands it over; Codex answers it in the turn that is running."""
    gate = place.workspace / "second-gate"
    pipeline = place.host.pipeline(place.runner, place.form())
    async with place.host.web_chat(pipeline) as chat:
        await chat.say(f"begin [[ hold {gate} ]]")
        await chat.until(lambda: bool(chat.bubbles) and "holding" in chat.bubbles[0].text, BOUND)
        await chat.say("also the pears")
        await asyncio.sleep(PULLED)
        gate.touch()
        await chat.until(lambda: any("heard:" in each.text for each in chat.bubbles), BOUND)
        await chat.rest()
    histories = [path.read_text() for path in (place.workspace.parent / "home").rglob("rollout-*.jsonl")]
    (mine,) = [history for history in histories if "also the pears" in history]
    assert mine.count('"payload":{"type":"task_started"') == 1, "one turn took both messages"
