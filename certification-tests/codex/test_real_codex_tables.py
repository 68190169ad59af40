"""The real Codex on a loopback model, table by table: policies in sandboxes, ends of its process, threads of one, failures."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from codex_harness import ended, of, on_one_server, poll, rest_of_turn, text, turn, until
from real_codex import Codex, real_codex
from test_real_codex_actions import judged, running, with_word

from pkg.agent_api import Answer, ApprovalRequested, Notice, Prompt, TextDelta, ToolStarted, TurnEnded
from pkg.errors import CodingError

pytestmark = [pytest.mark.real_codex, pytest.mark.asyncio, pytest.mark.timeout(180)]


@pytest_asyncio.fixture
async def codex(codex_program: Path) -> AsyncIterator[Codex]:
    """The real program with an account of its own."""
    async with real_codex(codex_program) as made:
        yield made


# ------------------------------------------------------------------ policies in sandboxes

SANDBOXES = ("read-only", "workspace-write", "danger-full-access")
EVERYTHING = ("execute", "edit", "execute")
NOTHING: frozenset[str] = frozenset()
DONE: dict[tuple[str, str], tuple[tuple[str, ...], frozenset[str]]] = {
    **{(policy, sandbox): (EVERYTHING, NOTHING) for policy in ("ask", "deny", "untrusted") for sandbox in SANDBOXES},
    ("allow-edits", "read-only"): (("edit", "execute"), frozenset({"edit"})),
    ("allow-edits", "workspace-write"): (("edit", "execute"), frozenset({"edit"})),
    ("allow-edits", "danger-full-access"): (EVERYTHING, frozenset({"edit"})),
    ("allow-all", "read-only"): (("edit", "execute"), frozenset({"edit", "escape"})),
    ("allow-all", "workspace-write"): (("execute",), frozenset({"command", "edit", "escape"})),
    ("allow-all", "danger-full-access"): ((), frozenset({"command", "edit", "escape"})),
    ("on-request", "read-only"): (("edit", "execute"), NOTHING),
    ("on-request", "workspace-write"): (("execute",), frozenset({"command", "edit"})),
    ("on-request", "danger-full-access"): ((), frozenset({"command", "edit", "escape"})),
    ("never", "read-only"): ((), NOTHING),
    ("never", "workspace-write"): ((), frozenset({"command", "edit"})),
    ("never", "danger-full-access"): ((), frozenset({"command", "edit"})),
}
"""Policy and sandbox mode: what is asked, in order, and what is done where nobody can be asked."""


@pytest.mark.parametrize(("policy", "sandbox"), DONE)
async def test_each_policy_in_each_sandbox(policy: str, sandbox: str, codex: Codex) -> None:
    """A command that writes, a patch, and a command that asks to leave the sandbox: what is asked about, and what is done."""
    asked, done = DONE[policy, sandbox]
    outside = codex.place / "outside"
    script = f"run touch made ;; add new.txt | hello ;; escalate touch {outside} ;; say done"
    events = await judged(codex, policy, script, options={"sandbox": sandbox})
    found = {"command": codex.workspace / "made", "edit": codex.workspace / "new.txt", "escape": outside}
    assert tuple(event.kind for event in of(events, ApprovalRequested)) == asked
    assert {name for name, path in found.items() if path.exists()} == done
    assert text(events) == "done"


# ------------------------------------------------------------------ ends of its process


@pytest.mark.parametrize("command", ["sleep {word}", "(sleep {word} & wait)", "setsid -f sleep {word}; sleep 30"])
@pytest.mark.parametrize("end", ["EOF", "SIGTERM", "SIGINT", "SIGKILL"])
async def test_no_row_of_the_process_table_leaves_a_process(end: str, command: str, codex: Codex) -> None:
    """Vendor's rule (0.171): without a sandbox some of these outlive Codex in each way it can end; ours: none outlives it.

    Codex is ended from outside, as by an operator or the kernel, while it runs a command, a child of one, one in a session of
    its own.
    """
    word = str(secrets.randbelow(10**8) + 10**8)
    async with codex.session(policy="allow-all", options={"sandbox": "danger-full-access"}) as session:
        await session.prompt(Prompt(f"[[ run {command.format(word=word)} ]]"))
        await until(session, ToolStarted)
        await poll(lambda: bool([*with_word(word)]))
        process = codex.launcher.processes[-1]
        if end == "EOF":
            process.close_stdin()
        else:
            os.kill(process.pid, getattr(signal, end))
        assert ended(await rest_of_turn(session)).stop_reason == "error"
        await session.close()
        assert [*with_word(word)] == []
        assert not running(process.pid)


# ------------------------------------------------------------------ threads of one process


async def test_threads_of_one_process_are_told_apart(codex: Codex) -> None:
    """Four at once: a text, an approval, a message into a command, a stop. The process lives as long as one of them does."""
    gate = codex.workspace / "gate"
    sessions, _ = await on_one_server(codex.spec(), codex.launcher, 4)
    (process,) = codex.launcher.processes
    async with contextlib.AsyncExitStack() as stack:
        for session in sessions:
            stack.push_async_callback(session.close)
        says, asks, steered, stopped = sessions
        await says.prompt(Prompt(f"[[ hold {gate} ]]"))
        await asks.prompt(Prompt("[[ run echo for-one > made ;; say allowed ]]"))
        await steered.prompt(Prompt("[[ run until test -e gate; do sleep 0.05; done ;; say then ]]"))
        await stopped.prompt(Prompt(f"[[ hold {codex.place / 'never'} ]]"))
        for session in (says, stopped):
            await until(session, TextDelta)
        (waits,) = of(await until(steered, ApprovalRequested), ApprovalRequested)
        assert await steered.answer(waits.request_id, Answer("accept"))
        assert await steered.steer(Prompt("only for this one"))
        (asked,) = of(await until(asks, ApprovalRequested), ApprovalRequested)
        assert asked.command == "echo for-one > made"
        assert not await says.answer(asked.request_id, Answer("accept"))
        assert await asks.answer(asked.request_id, Answer("accept"))
        assert text(await rest_of_turn(asks)) == "allowed"
        await stopped.interrupt()
        assert ended(await rest_of_turn(stopped)) == TurnEnded("cancelled")
        gate.touch()
        assert text(await rest_of_turn(says)) == " released"
        assert text(await rest_of_turn(steered)) == "heard: only for this one"
        assert text(await turn(stopped, "[[ say on ]]")) == "on"
        for session in sessions[:-1]:
            await session.close()
            assert running(process.pid)
        assert text(await turn(stopped, "[[ say last ]]")) == "last"
    assert not running(process.pid)


# ------------------------------------------------------------------ failures


async def test_a_limit_with_a_time_is_waited_for_and_then_told(codex: Codex) -> None:
    """Vendor's rule (0.171): a 429 with ``Retry-After`` is tried again then."""
    async with codex.session(account={"retries": "request_max_retries = 0\nstream_max_retries = 1"}) as session:
        end = ended(await turn(session, "[[ http 429 1 ]]"))
        assert end.error is not None
        assert (end.error.code, end.error.retryable) == ("coding.model_rate_limited", True)
        assert len(codex.model.bodies) >= 2


async def test_a_model_whose_name_nobody_knows_is_given_up(codex: Codex) -> None:
    """No DNS: as a refused connection, which Codex by itself would try for ever."""
    account = {"url": "http://model.invalid", "retries": "request_max_retries = 0\nstream_max_retries = 1"}
    async with codex.session(account=account) as session:
        events = await turn(session, "hello")
        end = ended(events)
        assert end.error is not None
        assert (end.error.code, end.error.retryable) == ("coding.model_unreachable", True)
        assert "model.invalid" not in end.error.detail
        assert "status.reconnecting" in [event.code for event in of(events, Notice)]


async def test_a_model_provider_that_the_account_does_not_have(codex: Codex) -> None:
    """Refused when the thread is opened, in Codex's own words; nothing is left running."""
    spec = codex.spec()
    settings = codex.place / "home" / ".codex" / "config.toml"
    settings.write_text(settings.read_text().replace('model_provider = "fixture"', 'model_provider = "nobody"'))
    with pytest.raises(CodingError) as caught:
        await codex.driver.open(spec, codex.launcher)
    assert caught.value.code == "coding.session_unavailable"
    assert "`nobody` not found" in caught.value.detail
    assert codex.launcher.processes
    assert not [process for process in codex.launcher.processes if running(process.pid)]
