"""What an agent asks of its client on a live session: permissions, files inside the workspace, terminals."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from acp.exceptions import RequestError

from agent.client_requests import ClientRequests, permission_outcome
from agent.driver import AcpDriver
from agent.grants import Grants, inner_command
from agent.session import AcpSession
from agent.terminals import character_start
from agent.translate import Translator
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    Answer,
    ApprovalRequested,
    Choice,
    ChoiceKind,
    FileDiff,
    Notice,
    Prompt,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
)
from pkg.errors import ProcessCleanupUnconfirmed
from pkg.launch import Command, LocalLauncher
from pkg.rpc_transport import Inbound
from pkg.supervised_process import SupervisedProcess
from pkg.workspace_files import FileRefused, WorkspaceFiles
from testkit import acp_harness as acp
from testkit import hostile_trees

CANCELLED = {"outcome": {"outcome": "cancelled"}}


def selected(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


def request(*kinds: ChoiceKind) -> ApprovalRequested:
    return ApprovalRequested("a", "t", "execute", tuple(Choice(f"id-{kind}", kind, kind) for kind in kinds))


@pytest.mark.parametrize(
    ("kinds", "wanted", "expected"),
    [
        (("allow_always", "allow_once", "reject_once"), "id-allow_once", selected("id-allow_once")),
        (("allow_always", "allow_once", "reject_once"), "allow_once", selected("id-allow_once")),
        (("allow_always", "reject_once"), "allow_once", selected("id-reject_once")),
        (("allow_always",), "allow_once", CANCELLED),
        (("allow_once", "reject_once"), "allow_always", selected("id-reject_once")),
        (("allow_once",), "reject_once", CANCELLED),
        (("allow_once", "reject_always"), "reject_once", CANCELLED),
        (("allow_once", "reject_once"), "", CANCELLED),
        (("allow_once", "reject_once"), "nonsense", selected("id-reject_once")),
        ((), "allow_once", CANCELLED),
    ],
)
def test_an_option_is_chosen_by_id_or_kind_and_never_widened(
    kinds: tuple[ChoiceKind, ...], wanted: str, expected: dict[str, Any]
) -> None:
    """Our rule: a missing kind becomes a single rejection, else ``cancelled``; never a standing grant nobody chose."""
    assert permission_outcome(request(*kinds), Answer(wanted))[0] == expected


def permission(**call: Any) -> str:
    options = [
        {"optionId": "proceed_always", "name": "Always", "kind": "allow_always"},
        {"optionId": "proceed_once", "name": "Once", "kind": "allow_once"},
        {"optionId": "cancel", "name": "No", "kind": "reject_once"},
    ]
    return "perm " + json.dumps({"toolCall": {"toolCallId": "t", **call}, "options": options})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("choose", "option"), [("proceed_once", "proceed_once"), ("reject_once", "cancel"), ("cancel", "cancel")]
)
async def test_a_permission_is_answered_with_the_chosen_option(tmp_path: Path, choose: str, option: str) -> None:
    """Known agents' habit: ids of every kind, allow_always first; Gemini's call exists only in the request."""
    async with acp.opened(tmp_path) as session:
        events = await acp.turn(session, permission(title="echo hi", kind="execute"), choose=choose)
        assert json.loads(acp.text(events)) == selected(option)
        assert [type(event) for event in events if isinstance(event, ToolStarted | ApprovalRequested | ToolFinished)] == [
            ToolStarted,
            ApprovalRequested,
            ToolFinished,
        ]
        assert acp.ended(events) == TurnEnded("end_turn")
        (asked,) = acp.of(events, ApprovalRequested)
        assert not await session.answer(asked.request_id, Answer("proceed_once"))


@pytest.mark.asyncio
async def test_a_permission_asked_outside_a_turn_is_refused_and_said(tmp_path: Path) -> None:
    """Our rule: nobody can be asked then, so the agent gets a definite no."""
    log = tmp_path / "log"
    params = permission(title="rm x").removeprefix("perm ")
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await acp.turn(session, f"after_permission {params}", "say a")
        await acp.poll(lambda: '"late"' in log.read_text())
        (reply,) = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("id") == "late"]
        assert reply["result"] == selected("cancel")
        events = await acp.turn(session, "say b")
        assert Notice("coding.permission_outside_turn", level="warning", params={"title": "rm x"}) in events


@pytest.mark.asyncio
async def test_a_request_taken_back_is_answered_and_can_no_longer_be(tmp_path: Path) -> None:
    """Protocol v1: ``$/cancel_request`` ends a waiting request with -32800 (the library leaves it running)."""
    params = permission(title="rm x").removeprefix("perm ")
    async with acp.opened(tmp_path) as session:
        await session.prompt(Prompt(f"take_back session/request_permission {params}"))
        events = await acp.until(session, TurnEnded)
        assert json.loads(acp.text(events))["failed"]["code"] == -32800
        (asked,) = acp.of(events, ApprovalRequested)
        assert not await session.answer(asked.request_id, Answer("proceed_once"))
        assert Notice("agent.request_withdrawn", asked.request_id) in events


@pytest.mark.asyncio
async def test_unknown_methods_and_odd_parameters_get_an_error(tmp_path: Path) -> None:
    """JSON-RPC: -32601 for what is not offered; nothing an agent sends ends the session."""
    async with acp.opened(tmp_path) as session:
        for line, code in (
            ("request mcp/connect {}", -32601),
            ("request fs/read_text_file {}", -32602),
            ('request fs/write_text_file {"path": 7}', -32602),
            ("request terminal/create {}", -32602),
            ('request terminal/create {"command": "ls", "env": [{"name": "A=B", "value": ""}]}', -32602),
            ('request terminal/create {"command": "ls", "env": [{"name": "A", "value": "\\u0000"}]}', -32602),
            ('request terminal/output {"terminalId": "none"}', -32002),
            ('request terminal/kill {"terminalId": {}}', -32002),
        ):
            assert json.loads(acp.text(await acp.turn(session, line)))["failed"]["code"] == code
        events = await acp.turn(
            session, 'raw "{\\"id\\":\\"x\\",\\"method\\":\\"session/request_permission\\",\\"params\\":7}\\n"', "tell_reply x"
        )
        assert json.loads(acp.text(events)) == CANCELLED


@pytest.mark.asyncio
async def test_open_requests_are_bounded_and_all_of_them_answered(tmp_path: Path) -> None:
    """Our rule: one more than ``ACP_OPEN_REQUESTS`` is refused at once; cancelling answers the others."""
    extra = 5
    params = permission(title="rm x").removeprefix("perm ")
    log = tmp_path / "log"
    async with acp.opened(tmp_path, {"log": str(log)}) as session:
        await session.prompt(Prompt(f"deaf\nspam {limits.ACP_OPEN_REQUESTS + extra} {params}"))
        asked: list[Any] = []
        while len(asked) < limits.ACP_OPEN_REQUESTS:
            asked += acp.of(await acp.until(session, ApprovalRequested), ApprovalRequested)
        assert len({item.request_id for item in asked}) == limits.ACP_OPEN_REQUESTS
        await acp.poll(lambda: log.read_text().count('"Too many open requests"') == extra)
        await session.interrupt()
        events = await acp.until(session, TurnEnded)
        assert acp.of(events, ApprovalRequested) == []
        assert acp.text(events) == f"failed={extra} answered={limits.ACP_OPEN_REQUESTS}"
        assert session.alive


# ------------------------------------------------------------------ files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "outside.txt").write_text("secret")
    (root / "inner").symlink_to("a.txt")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "linkdir").symlink_to(tmp_path)
    (root / "binary").write_bytes(b"a\x00b")
    (root / "latin").write_bytes(b"\xff\xfe\xfd")
    os.mkfifo(root / "fifo")
    return root


def test_reading_stays_inside_the_real_root(root: Path) -> None:
    """Our rule: links are resolved and must end inside; only regular UTF-8 text of bounded size is read."""
    files = WorkspaceFiles(str(root))
    assert files.read_text(str(root / "a.txt")) == "one\ntwo\nthree\n"
    assert files.read_text(str(root / "inner")) == "one\ntwo\nthree\n"
    assert files.read_text(str(root / "sub" / ".." / "a.txt"), 2, 1) == "two\n"
    assert files.read_text(str(root / "a.txt"), 2) == "two\nthree\n"
    assert files.read_text(str(root / "a.txt"), None, 1) == "one\n"
    assert files.read_text(str(root / "a.txt"), 9, 1) == ""
    for name in ("link.txt", "linkdir/outside.txt", "../outside.txt", "sub", "fifo", "binary", "latin", "none", "a.txt/x", ""):
        with pytest.raises(FileRefused):
            files.read_text(str(root / name))
    for path in ("a.txt", "/etc/hostname", "/", str(root) + "2/a.txt", "/a\x00b"):
        with pytest.raises(FileRefused):
            files.read_text(path)


def test_writing_follows_no_link_at_all(root: Path) -> None:
    """Our rule: a link at any component refuses a write; an existing file keeps its mode; directories are made."""
    files = WorkspaceFiles(str(root))
    (root / "a.txt").chmod(0o755)
    files.write_text(str(root / "a.txt"), "new é")
    assert (root / "a.txt").read_text() == "new é"
    assert (root / "a.txt").stat().st_mode & 0o777 == 0o755
    files.write_text(str(root / "deep" / "er" / "b.txt"), "b")
    assert (root / "deep" / "er" / "b.txt").read_text() == "b"
    for name in ("inner", "link.txt", "linkdir/x.txt", "linkdir/outside.txt", "../x.txt", "fifo", "sub", "", "a.txt/x"):
        with pytest.raises(FileRefused):
            files.write_text(str(root / name), "bad")
    assert (root.parent / "outside.txt").read_text() == "secret"
    assert not (root.parent / "x.txt").exists()
    with pytest.raises(FileRefused):
        files.write_text(str(root / "big"), "x" * (limits.ACP_FILE_BYTES + 1))
    assert sorted(path.name for path in root.iterdir() if path.name.endswith(".tmp")) == []


def test_a_directory_swapped_for_a_link_in_between_is_not_followed(root: Path) -> None:
    """Our rule: directories are opened one by one below the root, so a swap between check and use changes nothing."""
    files = WorkspaceFiles(str(root))
    target = root / "sub" / "x.txt"
    assert files.current_text(str(target)) is None
    (root / "sub").rmdir()
    (root / "sub").symlink_to(root.parent)
    with pytest.raises(FileRefused):
        files.write_text(str(target), "bad")
    assert not (root.parent / "x.txt").exists()


def test_a_root_that_is_a_link_works_under_both_names(root: Path, tmp_path: Path) -> None:
    """Our rule: the real path of the root is what counts; agents may use either."""
    (tmp_path / "alias").symlink_to(root)
    files = WorkspaceFiles(str(tmp_path / "alias"))
    files.write_text(str(tmp_path / "alias" / "n.txt"), "n")
    assert files.read_text(str(root / "n.txt")) == "n"
    assert files.directory("") == str(root)
    assert files.directory(str(root / "sub")) == str(root / "sub")
    with pytest.raises(FileRefused):
        files.directory(str(root / "linkdir"))


@pytest.mark.asyncio
async def test_a_write_is_shown_and_done_only_when_allowed(root: Path) -> None:
    """Our rule: a write through the client goes through the approval policy, with its diff."""
    async with acp.opened(root) as session:
        line = "request fs/write_text_file " + json.dumps({"path": str(root / "a.txt"), "content": "new"})
        events = await acp.turn(session, line, choose="reject_once")
        assert "Rejected" in acp.text(events)
        assert (root / "a.txt").read_text() == "one\ntwo\nthree\n"
        (asked,) = acp.of(events, ApprovalRequested)
        assert (asked.kind, asked.paths, asked.complete) == ("edit", (str(root / "a.txt"),), True)
        assert asked.diffs == (FileDiff(str(root / "a.txt"), "one\ntwo\nthree\n", "new"),)
        assert [choice.kind for choice in asked.choices] == ["allow_once", "reject_once"]
        events = await acp.turn(session, line, choose="allow_once")
        assert acp.text(events) == "{}"
        assert (root / "a.txt").read_text() == "new"
        reading = "request fs/read_text_file " + json.dumps({"path": str(root / "a.txt")})
        assert json.loads(acp.text(await acp.turn(session, reading))) == {"content": "new"}
        outside = "request fs/read_text_file " + json.dumps({"path": str(root / "link.txt")})
        answer = acp.text(await acp.turn(session, outside))
        assert "outside the workspace" in answer
        assert "secret" not in answer


@pytest.mark.asyncio
async def test_a_file_that_is_not_there_is_told_in_the_protocols_own_words(root: Path) -> None:
    """Protocol v1: -32002, "Resource not found"; clients and agents go by the words as well as by the code."""
    async with acp.opened(root) as session:
        for path in (root / "none.txt", root / "none" / "a.txt"):
            answer = acp.text(await acp.turn(session, "request fs/read_text_file " + json.dumps({"path": str(path)})))
            failed = json.loads(answer)["failed"]
            assert failed["code"] == -32002
            assert failed["message"].startswith("Resource not found")


@pytest.mark.asyncio
async def test_an_agent_that_cannot_tell_a_new_file_from_a_failure_reads_it_as_empty(root: Path) -> None:
    """Known agent's defect: Gemini CLI 0.61 reads before it writes and makes no file when that reading fails."""
    async with acp.opened(root, {"name": "gemini-cli"}) as session:
        answer = acp.text(await acp.turn(session, "request fs/read_text_file " + json.dumps({"path": str(root / "none.txt")})))
        assert json.loads(answer) == {"content": ""}
        outside = json.dumps({"path": str(root.parent / "none.txt")})
        answer = acp.text(await acp.turn(session, "request fs/read_text_file " + outside))
        assert json.loads(answer)["failed"]["code"] == -32602
        assert not (root / "none.txt").exists()


@pytest.mark.asyncio
async def test_a_permission_covers_exactly_the_write_that_was_shown_once(root: Path) -> None:
    """Our rule: an agent that asked already is not asked about again; another content, path or turn is."""
    path = str(root / "n.txt")
    diff = {"type": "diff", "path": path, "oldText": None, "newText": "shown"}
    asking = permission(title="Write", kind="edit", content=[diff])

    def write(content: str, where: str = path) -> str:
        return "request fs/write_text_file " + json.dumps({"path": where, "content": content})

    async with acp.opened(root) as session:
        allowing = lambda asked: Answer("proceed_once" if asked.tool_call_id else "reject_once")  # noqa: E731
        events = await acp.turn(session, asking, write("other"), write("shown"), write("shown again"), choose=allowing)
        assert len(acp.of(events, ApprovalRequested)) == 3
        assert (root / "n.txt").read_text() == "shown"
        await acp.turn(session, asking, choose=allowing)
        events = await acp.turn(session, write("shown later"), choose=allowing)
        assert len(acp.of(events, ApprovalRequested)) == 1
        assert (root / "n.txt").read_text() == "shown"


def test_a_grant_for_a_command_is_for_that_command_in_that_place() -> None:
    """Our rule: the shell that only carries a command is no difference, everything else is."""
    grants = Grants()
    grants.add(ApprovalRequested("a", "t", "execute", (), command="ls -l", cwd="/tmp"), standing=True)
    assert grants.take_command("ls", ["-l"], "/tmp")
    assert grants.take_command("/bin/bash", ["-lc", "ls -l"], "/tmp")
    assert not grants.take_command("ls", ["-l"], "/")
    assert not grants.take_command("ls", ["-la"], "/tmp")
    assert not grants.take_command("/bin/bash", ["-lc", "ls -l; rm x"], "/tmp")
    grants.clear()
    assert not grants.take_command("ls", ["-l"], "/tmp")
    assert inner_command("a b", []) == "a b"
    assert inner_command("sh", ["-c", "x", "y"]) == "sh -c x y"


def test_a_grant_for_a_command_covers_neither_another_shell_nor_variables_nobody_saw() -> None:
    """Our rule: a program that is only called like a shell is another command, and so is one with another environment."""
    grants = Grants()
    grants.add(ApprovalRequested("a", "t", "execute", (), command="make"), standing=True)
    assert not grants.take_command("/w/sh", ["-c", "make"], "/w")
    assert not grants.take_command("make", [], "/w", {"LD_PRELOAD": "/w/x.so"})
    assert grants.take_command("make", [], "/w", {"CLAUDECODE": "1", "TERM": "dumb"})
    assert inner_command("/w/sh", ["-c", "make"]) == "/w/sh -c make"


@pytest.mark.parametrize(
    ("diffs", "current", "content", "covered"),
    [
        ([("", "whole")], None, "whole", True),
        ([(None, "whole")], "before", "whole", True),
        ([("b", "c")], "a b", "a c", True),
        ([("b", "c")], "b b", "c c", True),
        ([("b", "c"), ("a", "d")], "a b", "d c", True),
        ([("a b", "c")], "a b", "c", True),
        ([("b", "c")], "a b", "evil c", False),
        ([("b", "")], "a b", "", False),
        ([("b", "")], "a b", "evil", False),
        ([("z", "c")], "a b", "c", False),
        ([("b", "c")], None, "a c", False),
        ([("", "whole")], None, "whole and more", False),
    ],
)
def test_a_grant_for_an_edit_covers_the_shown_result_and_nothing_more(
    diffs: list[tuple[str | None, str]], current: str | None, content: str, covered: bool
) -> None:
    """Our rule: the file becomes what was shown, whole or as the shown changes to what it holds; else it is asked again."""
    grants = Grants()
    shown = tuple(FileDiff("/w/a", old, new) for old, new in diffs)
    grants.add(ApprovalRequested("a", "t", "edit", (), diffs=shown), standing=False)
    assert not grants.take_write("/w/b", current, content)
    assert grants.take_write("/w/a", current, content) is covered
    assert not grants.take_write("/w/a", current, content)


def side() -> tuple[ClientRequests, list[AgentEvent]]:
    """The client's side of an open turn, and the events it emits."""
    translator = Translator()
    translator.opened("s-1")
    translator.begin_turn()
    events: list[AgentEvent] = []
    return ClientRequests(translator, events.append, None, None), events


@pytest.mark.asyncio
async def test_an_answer_that_meets_the_end_of_its_turn_allows_nothing() -> None:
    """Our rule: a turn ends for answers that are under way, too, and no grant outlives it."""
    requests, events = side()
    options = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}]
    asked = Inbound({"toolCall": {"toolCallId": "t", "title": "make"}, "options": options}, 1)
    handling = asyncio.create_task(requests.handle("session/request_permission", asked))
    while not acp.of(events, ApprovalRequested):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert requests.answer(acp.of(events, ApprovalRequested)[0].request_id, Answer("yes"))
    requests.withdraw()
    assert await handling == CANCELLED
    assert requests._grants._grants == []


@pytest.mark.asyncio
async def test_an_id_that_is_open_is_not_taken_twice() -> None:
    """Our rule: a repeated id is refused, so that the bound on open requests holds; afterwards it is free again."""
    requests, events = side()
    asked = Inbound({"toolCall": {"toolCallId": "t"}, "options": []}, None)
    handling = asyncio.create_task(requests.handle("session/request_permission", asked))
    while not acp.of(events, ApprovalRequested):  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(RequestError):
        await requests.handle("session/request_permission", asked)
    requests.withdraw()
    assert await handling == CANCELLED
    assert len(acp.of(events, ApprovalRequested)) == 1


# ------------------------------------------------------------------ terminals


async def terminal(session: AcpSession, **params: Any) -> Any:
    """The end and the view of a terminal that was allowed."""
    events = await acp.turn(session, "term " + json.dumps(params), choose="allow_once")
    assert acp.ended(events) == TurnEnded("end_turn")
    return json.loads(acp.text(events))


@pytest.mark.asyncio
async def test_a_command_runs_in_the_workspace_when_allowed(root: Path) -> None:
    """Our rule: terminals run inside the root, through the approval policy, with both outputs and the exit code."""
    async with acp.opened(root, env={"GREETING": "hi"}) as session:
        script = 'echo "$GREETING $EXTRA"; pwd; echo err >&2; exit 3'
        env = [{"name": "EXTRA", "value": "there"}]
        ended, view = await terminal(session, command="/bin/sh", args=["-c", script], cwd=str(root / "sub"), env=env)
        assert ended == {"exitCode": 3}
        assert view == {"output": f"hi there\n{root / 'sub'}\nerr\n", "truncated": False, "exitStatus": {"exitCode": 3}}
        ended, view = await terminal(session, command="echo a; echo b >&2")
        assert view["output"] == "a\nb\n"
        ended, view = await terminal(session, command="/bin/sh", args=["-c", "kill -9 $$"])
        assert ended == {"exitCode": None, "signal": "SIGKILL"}
        ended, view = await terminal(session, command="no-such-command-here", args=["x"])
        assert ended == {"exitCode": 127}
        assert "no-such-command-here" in view["output"]


@pytest.mark.asyncio
async def test_a_command_is_shown_whole_and_not_run_when_refused(root: Path) -> None:
    """Our rule: the command shown is never a truncated one, its settings included; a refusal starts nothing."""
    async with acp.opened(root) as session:
        params = {"command": "touch", "args": ["made file"], "env": [{"name": "A", "value": "b"}]}
        events = await acp.turn(session, "term " + json.dumps(params), choose="reject_once")
        (asked,) = acp.of(events, ApprovalRequested)
        assert (asked.kind, asked.command, asked.cwd, asked.complete) == ("execute", "A=b touch 'made file'", str(root), True)
        assert not (root / "made file").exists()
        events = await acp.turn(
            session, "term " + json.dumps({"command": "x" * (limits.ACP_COMMAND_CHARS + 1)}), choose="reject_once"
        )
        assert acp.of(events, ApprovalRequested)[0].complete is False
        for cwd in ("/", str(root / "linkdir"), "relative"):
            events = await acp.turn(session, "term " + json.dumps({"command": "ls", "cwd": cwd}))
            assert acp.of(events, ApprovalRequested) == []
            assert "failed" in acp.text(events)


@pytest.mark.asyncio
async def test_output_is_cut_at_its_front_between_characters(root: Path) -> None:
    """Protocol v1: outputByteLimit keeps the end and stays valid text."""
    async with acp.opened(root) as session:
        _, view = await terminal(session, command="printf", args=["%s", "é" * 100], outputByteLimit=9)
        assert view["output"] == "é" * 4
        assert view["truncated"] is True
    assert [character_start("é".encode()[cut:]) for cut in (0, 1, 2)] == [0, 1, 0]


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["turn", "interrupt", "close"])
async def test_terminals_end_with_their_turn(root: Path, end: str) -> None:
    """Our rule: whatever a turn left running is gone when its end is told."""
    async with acp.opened(root) as session:
        hostile = hostile_trees.command("setsid", root / "sub")
        opening = "open_term " + json.dumps({"command": hostile[0], "args": list(hostile[1:])})
        go = root / "go"
        await session.prompt(Prompt("\n".join([opening, f"until {go}" if end == "turn" else "hang"])))
        (*_, asked) = await acp.until(session, ApprovalRequested)
        assert isinstance(asked, ApprovalRequested)
        await session.answer(asked.request_id, Answer("allow_once"))
        await acp.until(session, TextDelta)
        processes = await asyncio.to_thread(hostile_trees.complete, root / "sub", hostile_trees.KINDS["setsid"])
        if end == "turn":
            go.touch()
        elif end == "interrupt":
            await session.interrupt()
        else:
            await session.close()
        acp.ended(await acp.until(session, TurnEnded))
        assert hostile_trees.living(processes) == []
        assert session.alive is (end != "close")


@pytest.mark.asyncio
async def test_a_tools_output_is_its_terminals(root: Path) -> None:
    """Protocol v1: tool content may name a terminal of the client's; people see what it printed."""
    made = "open_term " + json.dumps({"command": "echo", "args": ["from the terminal"]})
    content = [{"type": "terminal", "terminalId": "term-1"}, {"type": "terminal", "terminalId": "not-ours"}]
    tool = {"sessionUpdate": "tool_call", "toolCallId": "t", "title": "x", "status": "completed", "content": content}
    async with acp.opened(root) as session:
        waiting = 'request terminal/wait_for_exit {"terminalId": "term-1"}'
        events = await acp.turn(session, made, waiting, "update " + json.dumps(tool), choose="allow_once")
        assert acp.of(events, ToolFinished)[0].output == "from the terminal\n"


@pytest.mark.asyncio
async def test_a_terminal_can_be_killed_and_its_output_read(root: Path) -> None:
    """Protocol v1: kill keeps the output, release forgets the terminal."""
    async with acp.opened(root) as session:
        ids = '{"terminalId": "term-1"}'
        opening = "open_term " + json.dumps({"command": "/bin/sh", "args": ["-c", "echo out; sleep 600"]})
        polling = f"until_output {ids}"
        events = await acp.turn(
            session,
            opening,
            polling,
            f"request terminal/kill {ids}",
            f"request terminal/output {ids}",
            f"request terminal/release {ids}",
            f"request terminal/output {ids}",
            choose="allow_once",
        )
        text = acp.text(events)
        assert '"output": "out\\n"' in text
        assert '"exitStatus"' in text
        assert '"code": -32002' in text


@pytest.mark.asyncio
async def test_the_number_of_terminals_is_bounded(root: Path) -> None:
    """Our rule: at most ``ACP_TERMINALS`` of one session at once."""
    async with acp.opened(root) as session:
        opening = "open_term " + json.dumps({"command": "true", "args": ["x"]})
        events = await acp.turn(session, *[opening] * (limits.ACP_TERMINALS + 1), choose="allow_once")
        assert len(acp.of(events, ApprovalRequested)) == limits.ACP_TERMINALS
        assert "Too many terminals" in acp.text(events)


class Doubting(LocalLauncher):
    """Real processes whose end, from the second one on, is said to be unconfirmed after it happened."""

    def __init__(self) -> None:
        super().__init__()
        self._started = 0

    async def start(self, command: Command) -> SupervisedProcess:
        process = await super().start(command)
        self._started += 1
        if self._started > 1:
            stop = process.stop

            async def doubt() -> None:
                await stop()
                raise ProcessCleanupUnconfirmed("not confirmed", (process.pid,))

            process.stop = doubt  # type: ignore[method-assign]
        return process


@pytest.mark.asyncio
@pytest.mark.parametrize("released", [True, False])
async def test_a_terminal_whose_end_is_unconfirmed_is_never_a_clean_end(root: Path, released: bool) -> None:
    """Our rule: the session is not used again, and its close says that something may be left."""
    session = await AcpDriver().open(acp.spec(root), Doubting())
    opening = "open_term " + json.dumps({"command": "true", "args": ["x"]})
    lines = [opening, 'request terminal/release {"terminalId": "term-1"}'] if released else [opening]
    events = await acp.turn(session, *lines, choose="allow_once")
    assert acp.ended(events) == TurnEnded("end_turn")
    assert not session.alive
    for _ in range(2):
        with pytest.raises(ProcessCleanupUnconfirmed):
            await session.close()


@pytest.mark.asyncio
async def test_a_terminal_that_is_just_starting_is_gone_before_its_turn_is_told_to_end(tmp_path: Path) -> None:
    """Our rule: an agent that ends its turn right behind its request leaves no command running."""
    mark, go = tmp_path / "pid", tmp_path / "go"
    params = {"sessionId": "s-1", "command": "/bin/sh", "args": ["-c", f"echo $$ > {mark}; exec sleep 600"]}
    line = json.dumps({"jsonrpc": "2.0", "id": "t", "method": "terminal/create", "params": params}) + "\n"

    def allow(asked: ApprovalRequested) -> Answer:
        go.touch()
        return Answer("allow_once")

    async with acp.opened(tmp_path) as session:
        for number in range(5):
            go.unlink(missing_ok=True)
            await acp.turn(session, f"raw {json.dumps(line)}", f"until {go}", f"say {number}", choose=allow)
            assert session._terminals is not None
            assert (session._terminals._starting, session._terminals._open) == (0, {})
            if mark.exists() and (pid := mark.read_text().strip()):
                assert not hostile_trees.start_time(int(pid))
