"""An agent that misbehaves on its pipes or dies: the session survives what it can and says what it cannot."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import weakref
from pathlib import Path

import pytest

from agent.driver import AcpDriver
from agent.session import AcpSession
from pkg import limits
from pkg.agent_api import ApprovalRequested, Notice, Prompt, TextDelta, TurnEnded
from pkg.errors import AgentDied, CodingError
from pkg.launch import LocalLauncher
from testkit import acp_harness as acp
from testkit import hostile_trees


class Secret:
    """Something a run's context holds."""


MARKER: contextvars.ContextVar[Secret | None] = contextvars.ContextVar("marker", default=None)
KIB = 1024
MIB = 1024 * 1024
FRAME = 140
"""More than the bytes of a chunk's line that are not its text."""


def pids(text: str) -> dict[int, str]:
    numbers = [int(word.partition("=")[2]) for word in text.split() if "=" in word]
    return {pid: hostile_trees.start_time(pid) for pid in numbers}


# ------------------------------------------------------------------ sizes


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB - 1, MIB, MIB + 1, 8 * MIB, 40 * MIB])
async def test_a_line_of_any_size_under_the_limit_is_delivered_whole(tmp_path: Path, size: int) -> None:
    """Our rule: 64 KiB (asyncio's own limit) and everything up to ``AGENT_LINE_BYTES`` arrives, and the next turn works."""
    async with acp.opened(tmp_path) as session:
        text = acp.text(await acp.turn(session, f"huge {size}", "say end"))
        assert text.endswith("xend")
        assert set(text[:-3]) == {"x"}
        assert size - FRAME - 40 < len(text) < size
        assert acp.text(await acp.turn(session, "say next")) == "next"


@pytest.mark.asyncio
async def test_a_line_over_the_limit_is_a_visible_truncation_and_the_session_goes_on(tmp_path: Path) -> None:
    """Our rule: what exceeds the bound becomes a typed notice; the turn and the session live on."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, f"huge {limits.AGENT_LINE_BYTES + MIB}", "say end")
        (notice,) = [event for event in acp.of(events, Notice) if event.code == "coding.agent_line_truncated"]
        assert notice.level == "warning"
        assert notice.params == {"size": "65", "limit": "64"}
        assert acp.text(events) == "end"
        assert acp.ended(events) == TurnEnded("end_turn")
        assert acp.text(await acp.turn(session, "say next")) == "next"


@pytest.mark.asyncio
async def test_an_oversized_request_is_refused_and_its_agent_goes_on(tmp_path: Path) -> None:
    """Our rule: a request that was dropped for its size gets an error, so the agent does not wait for ever."""
    line = '{"jsonrpc":"2.0","id":"big","method":"fs/write_text_file","params":{"path":"/x","content":"'
    async with acp.opened(tmp_path) as session:
        script = [f'raw "{line.replace(chr(34), chr(92) + chr(34))}"', f"fill {limits.AGENT_LINE_BYTES}", 'raw "\\"}}\\n"']
        events = await acp.turn(session, *script, "tell_reply big")
        assert '"code": -32600' in acp.text(events)


@pytest.mark.asyncio
async def test_a_large_prompt_arrives_whole(tmp_path: Path) -> None:
    """Our rule: prompts are written whole, whatever the pipe takes at once."""
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        async with asyncio.timeout(acp.BOUND):
            await session.prompt(Prompt("say ok", context="é" * 4 * MIB))
        assert acp.text(await acp.until(session, TurnEnded)) == "ok"
    (params,) = acp.received(log, "session/prompt")
    assert params["prompt"][0]["text"].count("é") == 4 * MIB


# ------------------------------------------------------------------ noise


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "noise",
    [
        'raw "npm WARN deprecated\\n\\u001b[31mcolour\\u001b[0m\\n"',
        'raw "42\\n\\"text\\"\\nnull\\ntrue\\n"',
        'raw "[]\\n[1, null]\\n"',
        'raw "{\\"jsonrpc\\": \\"2.0\\"}\\n{\\"id\\": {}, \\"result\\": 1}\\n{\\"id\\": 99, \\"result\\": 1}\\n"',
        'raw "{\\"id\\": null, \\"error\\": \\"odd\\"}\\n"',
        "hex fffefd0a00000a0d0a",
        "update {}",
        'update {"sessionUpdate": 7}',
        'raw "{\\"method\\": \\"session/update\\", \\"params\\": [1]}\\n{\\"method\\": \\"session/update\\"}\\n"',
        'raw "{\\"method\\": \\"_vendor/thing\\", \\"params\\": {}}\\n"',
    ],
)
async def test_noise_of_any_kind_changes_nothing(tmp_path: Path, noise: str, caplog: pytest.LogCaptureFixture) -> None:
    """Measured: each kills or floods the library's own reader; here the text around it arrives, nothing is logged."""
    with caplog.at_level(logging.INFO):
        async with acp.opened(tmp_path, {"banner": ["> agent@1.0 start", ""]}) as session:
            events = await acp.turn(session, "say a", noise, "say b")
            assert acp.text(events) == "ab"
            assert acp.ended(events) == TurnEnded("end_turn")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
async def test_batches_crlf_marks_and_split_characters_are_read(tmp_path: Path) -> None:
    """Our rule: the same text out, whatever the bytes around it and wherever they are cut."""
    async with acp.opened(tmp_path) as session:
        one = '{"method":"session/update","params":{"sessionId":"s-1","update":{"sessionUpdate":"agent_message_chunk",'
        one += '"content":{"type":"text","text":"%s"}}}}'
        batch = ("[" + one % "a" + "," + one % "b" + "]\n").encode().hex()
        crlf = (b"\xef\xbb\xbf" + (one % "c").encode() + b"\r\n").hex()
        whole = (one % "d\u20ac\U0001f600").encode()
        cut = whole.index("\U0001f600".encode()) + 2
        events = await acp.turn(
            session,
            f"hex {batch}",
            f"hex {crlf}",
            f"hex {whole[:cut].hex()}",
            f"until {acp.AGENT}",
            f"hex {whole[cut:].hex()}0a",
            'raw "' + (one % "\\ud83d").replace("\\", "\\\\").replace('"', '\\"') + '\\n"',
            'raw "' + (one % "\\ude00\\u0000!").replace("\\", "\\\\").replace('"', '\\"') + '\\n"',
        )
        assert acp.text(events) == "abcd\u20ac\U0001f600\U0001f600\x00!"


@pytest.mark.asyncio
async def test_a_flood_on_stderr_blocks_nobody(tmp_path: Path) -> None:
    """Measured: 1 MB on an undrained stderr deadlocks the library's own process helper."""
    async with acp.opened(tmp_path) as session:
        assert acp.text(await acp.turn(session, f"stderr {8 * MIB}", "say done")) == "done"


# ------------------------------------------------------------------ backpressure


@pytest.mark.asyncio
async def test_a_consumer_that_does_not_read_holds_the_agent_back(tmp_path: Path) -> None:
    """Our rule: the event buffer is bounded and then the agent's pipe is; nothing is lost."""
    progress = tmp_path / "progress"
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(f"many 20000 {'y' * 500}\ntouch {progress}"))
        await acp.poll(lambda: session._events.full)
        size = session._events._size
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert session._events._size == size
        assert not progress.exists()
        assert len(acp.text(await acp.until(session, TurnEnded))) == 20000 * 500
        assert progress.exists()


@pytest.mark.asyncio
async def test_a_full_buffer_does_not_keep_a_turn_from_being_cancelled(tmp_path: Path) -> None:
    """Our rule: while cancelling, the agent is heard although nobody reads; text over the bound is counted and said."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(f"deaf\nmany 20000 {'y' * 500}\nhang"))
        await acp.poll(lambda: session._events.full)
        await session.interrupt()
        await acp.poll(lambda: session._turn is None)
        events = await acp.until(session, TurnEnded)
        assert acp.ended(events) == TurnEnded("cancelled")
        assert any(event.code == "coding.events_dropped" for event in acp.of(events, Notice))
        assert session.alive


# ------------------------------------------------------------------ death


@pytest.mark.asyncio
@pytest.mark.parametrize(("last", "code"), [("exit 3", "3"), ("exit 0", "0"), ("kill", "SIGKILL")])
async def test_a_crash_ends_the_open_turn_with_code_and_last_words(tmp_path: Path, last: str, code: str) -> None:
    """Our rule: a dead process ends its open turn with ``coding.agent_exited``; what it wrote before is delivered."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, "say before", "complain Traceback: fatal thing", last)
        assert acp.text(events) == "before"
        error = acp.ended(events).error
        assert error is not None
        assert (error.code, error.params["code"]) == ("coding.agent_exited", code)
        assert error.detail == "Traceback: fatal thing"
        assert await acp.rest(session) == []
        assert not session.alive
        with pytest.raises(AgentDied):
            await session.prompt(Prompt("say x"))


@pytest.mark.asyncio
async def test_an_answer_right_before_a_crash_is_an_answer(tmp_path: Path) -> None:
    """Our rule: the response in the pipe counts, although the process is gone when it is read."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("many 2000 text\nexit_after"))
        events = await acp.until(session, TurnEnded)
        assert acp.text(events) == "text" * 2000
        assert acp.ended(events) == TurnEnded("end_turn")
        await acp.rest(session)


@pytest.mark.asyncio
async def test_output_held_back_by_its_consumer_outlives_its_agent(tmp_path: Path) -> None:
    """Our rule: a reader that pauses for its consumer is not taken for a silent agent; all of it is delivered."""
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt("many_in 5300\nexit_after"))
        pid = session._process.pid
        await acp.poll(lambda: session._events.full and not hostile_trees.start_time(pid))
        await asyncio.sleep(limits.ACP_EXIT_DRAIN * 1.5)
        events = await acp.until(session, TurnEnded)
        assert acp.text(events) == "0123456789" * 5300
        assert acp.ended(events) == TurnEnded("end_turn")
        assert await acp.rest(session) == []


@pytest.mark.asyncio
async def test_an_agent_that_closes_its_output_and_stays_is_ended(tmp_path: Path) -> None:
    """Our rule: half an exit is an exit; the rest of the tree is ended at once."""
    async with acp.opened(tmp_path) as session:
        go = tmp_path / "go"
        await session.prompt(Prompt(f"child\nuntil {go}\nclose_stdout"))
        processes = pids(acp.text(await acp.until(session, TextDelta)))
        assert all(processes.values())
        go.touch()
        error = acp.ended(await acp.until(session, TurnEnded)).error
        assert error is not None
        assert error.code == "coding.agent_output_closed"
        await acp.rest(session)
        assert hostile_trees.living(processes) == []


@pytest.mark.asyncio
async def test_a_dead_leader_whose_child_holds_the_output_is_noticed(tmp_path: Path) -> None:
    """Measured: after SIGKILL of only the leader a surviving child can hold stdout, so the prompt never fails by itself."""
    async with acp.opened(tmp_path) as session:
        go = tmp_path / "go"
        await session.prompt(Prompt(f"hold\nuntil {go}\nkill"))
        processes = pids(acp.text(await acp.until(session, TextDelta)))
        assert all(processes.values())
        go.touch()
        error = acp.ended(await acp.until(session, TurnEnded)).error
        assert error is not None
        assert (error.code, error.params["code"]) == ("coding.agent_exited", "SIGKILL")
        await acp.rest(session)
        assert hostile_trees.living(processes) == []


@pytest.mark.asyncio
async def test_a_crash_between_turns_ends_the_stream(tmp_path: Path) -> None:
    """The driver's contract: the stream ends after the agent's death."""
    async with acp.opened(tmp_path) as session:
        await acp.turn(session, "say a", "exit_after")
        assert await acp.rest(session) == []
        assert not session.alive


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"initialize": "exit 7", "stderr": "npm ERR! no such version\n"}, "coding.agent_exited", "npm ERR! no such version"),
        ({"initialize": "hang", "stderr": "waiting for a lock\n"}, "coding.agent_start_timeout", "waiting for a lock"),
        ({"initialize": "error"}, "coding.agent_refused_handshake", "cannot start"),
        ({"protocol": 2}, "coding.agent_protocol_version", ""),
        ({"protocol": "new"}, "coding.agent_protocol_version", ""),
        ({"new_error": [1001, "failed to start codex", None]}, "coding.session_unavailable", "failed to start codex"),
        ({"new": {"sessionId": 7}}, "coding.agent_protocol", ""),
    ],
)
async def test_an_agent_that_cannot_open_says_why_and_leaves_nothing(
    tmp_path: Path, config: dict[str, object], code: str, words: str
) -> None:
    """Our rule: each ends in one typed error with the agent's last words (the suite looks for children)."""
    hanging = config.get("initialize") == "hang"
    with pytest.raises(CodingError) as caught:
        async with acp.opened(tmp_path, config, initialize_timeout=0.5 if hanging else acp.BOUND):
            pytest.fail("it opened")
    assert caught.value.code == code
    assert words in caught.value.detail


@pytest.mark.asyncio
async def test_a_missing_command_is_the_launchers_error(tmp_path: Path) -> None:
    """The launcher's contract: it says where it looked."""
    with pytest.raises(CodingError) as caught:
        async with acp.opened(tmp_path, command=("no-such-agent-anywhere",)):
            pytest.fail("it opened")
    assert caught.value.code == "coding.agent_not_found"


@pytest.mark.asyncio
async def test_an_agent_that_stopped_reading_does_not_hold_close(tmp_path: Path) -> None:
    """Measured: with a stalled stdin and a 4 MB prompt the library's own exit hangs for ever, even under a timeout."""
    async with acp.opened(tmp_path) as session:
        processes = pids(acp.text(await acp.turn(session, "child", "stall")))
        sending = asyncio.create_task(session.prompt(Prompt("x" * 4 * MIB)))
        await acp.poll(lambda: session._turn is not None)
        await session.close()
        await sending
        assert hostile_trees.living(processes) == []
        assert acp.ended(await acp.rest(session)) == TurnEnded("cancelled")


@pytest.mark.asyncio
async def test_a_prompt_cancelled_while_sending_leaves_an_open_turn_that_can_be_ended(tmp_path: Path) -> None:
    """Our rule: a cancelled sender leaves no half line; the turn stays open until it is interrupted."""
    async with acp.opened(tmp_path) as session:
        await acp.turn(session, "stall")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.prompt(Prompt("x" * 4 * MIB))
        await session.interrupt()
        assert acp.ended(await acp.until(session, TurnEnded)) == TurnEnded("cancelled")
        assert not session.alive


@pytest.mark.asyncio
async def test_nothing_of_the_opener_is_kept_in_the_sessions_tasks(tmp_path: Path) -> None:
    """Our rule: a session that outlives its run carries no context of it."""
    before = asyncio.all_tasks()

    async def run() -> tuple[AcpSession, weakref.ref[Secret]]:
        tenant = Secret()
        MARKER.set(tenant)
        session = await AcpDriver().open(acp.spec(tmp_path), LocalLauncher())
        await session.prompt(Prompt("say a\nhang"))
        return session, weakref.ref(tenant)

    # A live timer before all others keeps cancelled ones, and their contexts, from being cleared away by chance.
    earlier = asyncio.get_running_loop().call_later(acp.BOUND / 2, str)
    session, tenant = await asyncio.create_task(run(), context=contextvars.copy_context())
    try:
        await asyncio.sleep(0)  # the loop's own handle of the ended task
        gc.collect()
        assert tenant() is None
        await session.interrupt()
        await acp.until(session, TurnEnded)
    finally:
        earlier.cancel()
        await session.close()
    assert asyncio.all_tasks() <= before


# ------------------------------------------------------------------ an agent that wants the worker to fail


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def raw(line: str) -> str:
    return "raw " + json.dumps(line + "\n")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "update",
    [
        '{"sessionUpdate":"tool_call","toolCallId":"d","title":"t","kind":"edit","rawInput":' + nested(90) + "}",
        '{"sessionUpdate":"tool_call","toolCallId":"d","title":"t","kind":"edit","rawInput":' + nested(600) + "}",
        '{"sessionUpdate":"tool_call","toolCallId":"d","title":"t","status":"completed","rawOutput":' + nested(900) + "}",
        '{"sessionUpdate":"usage_update","used":1,"size":2,"cost":{"amount":' + "9" * 400 + ',"currency":"USD"}}',
        '{"sessionUpdate":"usage_update","used":Infinity,"size":NaN,"cost":{"amount":NaN}}',
    ],
    ids=["nested 90", "nested 600", "nested 900", "a number no float holds", "no numbers"],
)
async def test_values_of_any_depth_and_size_leave_the_reader_alive(
    tmp_path: Path, update: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Our rule: what one update holds never ends the reading of the next; the turn ends by itself and nothing is logged."""
    line = '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s-1","update":' + update + "}}"
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, raw(line), "say end")
        assert acp.text(events) == "end"
        assert acp.ended(events) == TurnEnded("end_turn")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["session/request_permission", "elicitation/create", "fs/write_text_file"])
async def test_a_request_nested_too_deeply_is_refused(tmp_path: Path, method: str) -> None:
    """Our rule: such a request gets its one answer, and nobody is asked about it."""
    params = '{"sessionId":"s-1","toolCall":{"toolCallId":"p","kind":"edit","rawInput":' + nested(500) + "}}"
    line = '{"jsonrpc":"2.0","id":"q","method":"' + method + '","params":' + params + "}"
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, raw(line), "tell_reply q")
        assert '"code": -32600' in acp.text(events)
        assert acp.of(events, ApprovalRequested) == []


@pytest.mark.asyncio
async def test_a_reader_that_fails_ends_the_turn_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: a defect of our own in reading is told as a lost agent; it never leaves a turn waiting for ever."""
    async with acp.opened(tmp_path) as session:
        monkeypatch.setattr(session._peer.transport, "_on_notification", lambda method, params: 1 / 0)
        events = await acp.turn(session, "say x", "hang")
        end = acp.ended(events)
        assert end.error is not None
        assert end.error.code == "coding.agent_output_closed"


@pytest.mark.asyncio
async def test_an_agent_that_asks_and_does_not_read_is_not_heard_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: small requests for large answers cannot fill the worker; the session can still be ended."""
    monkeypatch.setattr(limits, "ACP_UNREAD_BYTES", 2 * MIB)
    (tmp_path / "big").write_text("x" * MIB)
    params = {"sessionId": "s-1", "path": str(tmp_path / "big")}
    asks = [{"jsonrpc": "2.0", "id": f"r{n}", "method": "fs/read_text_file", "params": params} for n in range(60)]
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        lines = "".join(json.dumps(ask) + "\n" for ask in asks)
        async with asyncio.timeout(acp.BOUND):
            await session.prompt(Prompt("\n".join(["stall", f"raw {json.dumps(lines)}", "say unheard"])))
        transport = session._peer.transport
        await acp.poll(lambda: transport._unread >= 2 * MIB)
        for _ in range(200):
            await asyncio.sleep(0)
        assert transport._unread < 2 * MIB + 2 * (MIB + KIB)
    assert transport._unread == 0
