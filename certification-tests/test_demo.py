"""The demo as a person starts it: messages on the command line, a chat at a terminal, what is asked there, a cut, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from langbot_plugin.entities.io.errors import ActionCallError

from demo_agent.sentences import GREETING as HELLO
from demo_agent.sentences import (
    AppendText,
    Help,
    ListFiles,
    ReadFile,
    ReplaceText,
    RunCommand,
    SearchText,
    Unknown,
    WriteFile,
    understand,
)
from demo_chat import chat
from demo_chat.host import BOT, TARGET, Host
from demo_chat.screen import Screen
from pkg import decision_log, limits
from pkg.open_record import OpenRecord
from testkit import hostile_trees, model_fixture, real_agents, sdk_worker
from tooling import ROOT

DEMO = ROOT / "scripts" / "demo.py"
AGENT = ROOT / "shared" / "demo_agent"
QUESTION = "list the files, then create hello.txt"
EXPIRY = limits.APPROVAL_SECONDS_MIN
BOUND = 90.0
"""Seconds for a worker to start on a busy machine; nothing waits for it when things work."""


# ------------------------------------------------------------------ what the demo's agent understands


@pytest.mark.parametrize(
    ("message", "steps"),
    [
        ("list the files, then create hello.txt", [ListFiles(), WriteFile("hello.txt", HELLO)]),
        ("Please read notes.txt and search for TODO.", [ReadFile("notes.txt"), SearchText("TODO")]),
        ("ls src", [ListFiles("src")]),
        ('create a.txt with the text "one, then two"', [WriteFile("a.txt", "one, then two\n")]),
        ('append "x" to a.txt; replace `b` with `c` in a.txt', [AppendText("a.txt", "x\n"), ReplaceText("a.txt", "b", "c")]),
        ("run: echo a; ls && pwd, then x", [RunCommand("echo a; ls && pwd, then x")]),
        ("list the files, then run: make test", [ListFiles(), RunCommand("make test")]),
        ("what can you do?", [Help()]),
        ("", [Help()]),
        ("rewrite the parser in Rust", [Unknown("rewrite the parser in Rust")]),
        ("create a file called a b.txt", [Unknown("create a file called a b.txt")]),
    ],
)
def test_plain_sentences_become_steps(message: str, steps: list[Any]) -> None:
    """Several steps in one message, quotes kept whole, and nothing guessed."""
    assert understand(message) == steps


# ------------------------------------------------------------------ the agent on its own


class Client:
    """The client's side of one agent process, by hand."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd)
        self.count = 0
        self.session = ""
        self.buffer = b""
        self.request("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        self.session = self.request("session/new", {"cwd": str(cwd), "mcpServers": []})["result"]["sessionId"]

    def send(self, **message: Any) -> None:
        """One line to the agent."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """One line of the agent's."""
        assert self.process.stdout
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], 30)
            assert ready, "the agent said nothing for 30 s"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, "the agent ended"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def request(self, method: str, params: Any) -> dict[str, Any]:
        """A request and its answer, nothing in between."""
        self.count += 1
        self.send(id=self.count, method=method, params=params)
        return self.receive()

    def prompt(self, text: str) -> None:
        """Start a turn."""
        blocks = [{"type": "text", "text": text}]
        self.send(id="turn", method="session/prompt", params={"sessionId": self.session, "prompt": blocks})

    def until(self, wanted: str) -> list[dict[str, Any]]:
        """Everything up to the first message with this method, or with ``turn`` the turn's answer."""
        seen: list[dict[str, Any]] = []
        while not seen or (seen[-1].get("method") != wanted and seen[-1].get("id") != wanted):
            seen.append(self.receive())
        return seen

    def close(self) -> int:
        """End stdin; the agent's exit code."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


def kinds(messages: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The updates of one kind."""
    updates = [message["params"]["update"] for message in messages if message.get("method") == "session/update"]
    return [update for update in updates if update["sessionUpdate"] == kind]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A demo agent in an empty directory."""
    started = Client([sys.executable, "-I", "-S", str(AGENT)], tmp_path)
    yield started
    assert started.close() == 0


def allow(client: Client, request: dict[str, Any], option: str) -> None:
    """Answer a permission request."""
    client.send(id=request["id"], result={"outcome": {"outcome": "selected", "optionId": option}})


def test_a_write_shows_its_diff_and_waits_for_permission(client: Client, tmp_path: Path) -> None:
    """Nothing is on the disk while the agent is asking; after that exactly what the diff showed."""
    client.prompt("create hello.txt")
    request = client.until("session/request_permission")[-1]
    diff = request["params"]["toolCall"]["content"][0]
    assert (diff["type"], diff["oldText"], diff["newText"]) == ("diff", None, HELLO)
    assert [option["kind"] for option in request["params"]["options"]] == ["allow_once", "allow_always", "reject_once"]
    assert not (tmp_path / "hello.txt").exists()
    allow(client, request, "once")
    seen = client.until("turn")
    assert (tmp_path / "hello.txt").read_text() == HELLO
    assert kinds(seen, "tool_call_update")[-1]["status"] == "completed"
    assert len(kinds(seen, "agent_message_chunk")) > 1


def test_what_is_denied_does_not_happen(client: Client, tmp_path: Path) -> None:
    """The tool call fails, the agent says so, the turn ends normally."""
    client.prompt("run: touch made")
    allow(client, client.until("session/request_permission")[-1], "no")
    seen = client.until("turn")
    assert seen[-1]["result"]["stopReason"] == "end_turn"
    assert not (tmp_path / "made").exists()
    assert kinds(seen, "tool_call_update")[-1]["status"] == "failed"


def test_a_cancelled_turn_ends_the_command_it_was_running(client: Client, tmp_path: Path) -> None:
    """The stop reason is ``cancelled`` and the command's process group is gone."""
    client.prompt("run: echo $$ > pid; sleep 300")
    allow(client, client.until("session/request_permission")[-1], "once")
    end = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.02)
    shell = int((tmp_path / "pid").read_text())
    known = {shell: hostile_trees.start_time(shell)}
    client.send(method="session/cancel", params={"sessionId": client.session})
    assert client.until("turn")[-1]["result"]["stopReason"] == "cancelled"
    assert hostile_trees.gone(known, 30)


def test_nothing_outside_the_workspace_is_touched(client: Client, tmp_path: Path) -> None:
    """Neither by a path nor through a link."""
    (tmp_path / "way-out").symlink_to("/etc")
    for message in ("read ../secret", "read /etc/passwd", "read way-out/passwd", "create way-out/x"):
        client.prompt(message)
        text = "".join(update["content"]["text"] for update in kinds(client.until("turn"), "agent_message_chunk"))
        assert "outside the workspace" in text, message


def test_what_the_client_added_for_the_agent_alone_is_not_taken_for_a_sentence(client: Client) -> None:
    """Context whose annotations say it is for the assistant is not the person's text."""
    hint = {"type": "text", "text": "sender: Ann", "annotations": {"audience": ["assistant"]}}
    blocks = [hint, {"type": "text", "text": "list the files"}]
    client.send(id="turn", method="session/prompt", params={"sessionId": client.session, "prompt": blocks})
    text = "".join(update["content"]["text"] for update in kinds(client.until("turn"), "agent_message_chunk"))
    assert text == "The workspace is empty."


# ------------------------------------------------------------------ the screen


def shown(*results: dict[str, Any]) -> str:
    """What a run's results print."""
    out = io.StringIO()
    screen = Screen(out, color=False)
    screen.begin()
    for result in results:
        screen.result(result)
    return out.getvalue()


def delta(text: str) -> dict[str, Any]:
    """A growing text, as the runner marks it."""
    return {"type": "message.delta", "data": {"chunk": {"content": f"{text}\n\n…"}}}


def completed(text: str) -> dict[str, Any]:
    """A whole message."""
    return {"type": "message.completed", "data": {"message": {"content": text}}}


def test_a_growing_answer_is_printed_once() -> None:
    """Cumulative texts become one text; the marker of an unfinished one is not printed."""
    assert shown(delta("Hello"), delta("Hello, wor"), completed("Hello, world")) == "Hello, world\n"


def test_a_fence_closed_only_for_the_moment_is_not_printed() -> None:
    """The runner closes an open fence in every unfinished text."""
    assert shown(delta("```\na\n```"), completed("```\na\nb\n```")) == "```\na\nb\n```\n"


def test_a_line_of_the_demo_s_own_waits_for_the_end_of_a_line_and_for_what_is_typed() -> None:
    """What happens to the path in mid-answer tears neither a line of the answer nor a question apart."""
    out = io.StringIO()
    screen = Screen(out, color=False)
    screen.begin()
    assert not screen.begun
    screen.result(delta("one"))
    assert screen.begun
    screen.aside("connection cut")
    screen.result(delta("one\ntwo"))
    screen.result(completed("one\ntwo"))
    screen.ask("you> ")
    screen.aside("connection back")
    screen.answered("yes", shown=False)
    assert out.getvalue() == "one\n  connection cut\ntwo\nyou> yes\n  connection back\n"


@pytest.mark.parametrize(
    ("code", "explained"), [("coding.policy_approvals", True), ("coding.internal", False), (None, False), ("runner.x", False)]
)
def test_only_a_failure_that_nobody_expected_needs_the_log_beside_it(code: str | None, explained: bool) -> None:
    """The catalogue's texts say what to do; "something went wrong" and failures of others do not."""
    screen = Screen(io.StringIO(), color=False)
    screen.begin()
    screen.result({"type": "run.failed", "data": {"error": "refused", "code": code}})
    assert screen.problem and screen.explained is explained
    screen.begin()
    assert not screen.explained
    screen.result({"type": "processor.log", "data": {"level": "error", "text": f"{code or ''} and more [5e]"}})
    assert not screen.explained
    screen.result({"type": "run.completed", "data": {"finish_reason": "error"}})
    assert screen.explained is explained


def test_escape_sequences_of_an_agent_do_not_reach_the_terminal() -> None:
    """An answer cannot clear the screen or set its title."""
    assert shown(completed("a\x1b]0;title\x07b\x1b[2Jc")) == "a]0;titleb[2Jc\n"


def test_what_is_said_at_once_stands_above_the_question_that_waits() -> None:
    """A message from outside any run and a line of the demo's own leave the question the last line, until it is answered."""
    out = io.StringIO()
    screen = Screen(out, color=False)
    screen.ask("you> ")
    screen.message("Nobody answered in time.\x1b[2J")
    screen.note("Ctrl-C again leaves")
    assert out.getvalue() == "you> \nNobody answered in time.[2J\nyou> \n  Ctrl-C again leaves\nyou> "
    out.write("hello\n")  # the terminal's echo
    screen.answered("hello", shown=True)
    screen.message("later")
    assert out.getvalue().endswith("you> hello\nlater\n")


def test_the_demo_s_host_shows_what_is_sent_to_its_person_and_to_nobody_else() -> None:
    """A message outside a run reaches the terminal; one for another chat is refused as by a host that has no such chat."""
    shown: list[str] = []
    host = Host(shown.append)
    chain = [{"type": "Plain", "text": "Nobody answered "}, {"type": "Plain", "text": "in time."}]
    host.answer("send_message", {"bot_uuid": BOT, **TARGET, "message_chain": chain})
    with pytest.raises(ActionCallError):
        host.answer("send_message", {"bot_uuid": BOT, **TARGET, "target_id": "other", "message_chain": chain})
    assert shown == ["Nobody answered in time."]
    host.leave()
    host.answer("send_message", {"bot_uuid": BOT, **TARGET, "message_chain": chain})
    assert shown == ["Nobody answered in time."], "who has left reads nothing more"


def test_the_demo_s_host_knows_a_request_that_is_open() -> None:
    """By the plugin's own record, as long as its time is not over."""
    host = Host(lambda text: None)
    host.state["session"] = {"value": "12"}
    assert not host.asking
    for left, asking in ((60, True), (-1, False)):
        record = OpenRecord("i", "approval", "all", "digest", "who", int(time.time()) + left)
        host.state["open"] = {"value": record.to_text()}
        assert host.asking is asking


def test_a_line_that_the_terminal_did_not_show_is_shown_with_its_question() -> None:
    """What was typed ahead or comes from a pipe can be read where it belongs."""
    out = io.StringIO()
    screen = Screen(out, color=False)
    screen.ask("you> ")
    screen.answered("list the files", shown=False)
    screen.result(completed("There are none."))
    assert out.getvalue() == "you> list the files\nThere are none.\n"


# ------------------------------------------------------------------ the command line


def test_an_agent_runs_beside_the_plugin_unless_told_otherwise() -> None:
    """The place is local, the person is asked, and nothing is cut; all of it can be chosen."""
    assert [getattr(chat.options(()), name) for name in ("place", "policy", "blip")] == ["local", "ask", None]
    chosen = chat.options(("--place", "daemon", "--policy", "deny", "--blip", "0.5"))
    assert (chosen.place, chosen.policy, chosen.blip) == ("daemon", "deny", 0.5)


def test_a_request_waits_as_long_as_the_form_s_default_says_unless_told_otherwise() -> None:
    """``--approval-timeout`` is the form's field."""
    assert "approval-timeout" not in chat.runner_form(chat.options(()))
    assert chat.runner_form(chat.options(("--approval-timeout", "30")))["approval-timeout"] == 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--say", " "), "--say needs a message"),
        (("--say", "create a.txt", "--say", ""), "--say needs a message"),
        (("--approval-timeout", "soon"), "invalid int value"),
        (("--approval-timeout", str(EXPIRY - 1)), "approval-timeout"),
    ],
)
def test_what_cannot_be_said_or_waited_for_is_a_usage_error(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as left:
        chat.options(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--blip", "5"), "--blip cuts the connection to a daemon: it needs --place daemon"),
        (("--place", "local", "--blip", "5"), "it needs --place daemon"),
        (("--place", "moon"), "invalid choice: 'moon'"),
        (("--place", "daemon", "--blip", "long"), "invalid float value"),
        *(
            (("--place", "daemon", "--blip", seconds), "needs a number of seconds")
            for seconds in ("0", "-1", "nan", "inf", "101")
        ),
    ],
)
def test_only_the_path_to_a_daemon_can_be_cut_and_not_for_ever(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error, before anything is started."""
    with pytest.raises(SystemExit) as left:
        chat.options(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------ the whole demo


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end without a terminal."""
    command = [sys.executable, str(DEMO), *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.demo
def test_one_message_lists_and_asks_and_says_how_to_answer(tmp_path: Path) -> None:
    """Exit code 1 with the reason, the policy on the first line, the whole request, how to answer it, nothing done."""
    done = demo("--workspace", str(tmp_path), "--policy", "ask", "--say", QUESTION)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("policy ask: ")
    assert "The workspace is empty." in done.stdout
    assert f"+{HELLO.strip()}" in done.stdout and "1. Allow once" in done.stdout
    lines = own_lines(done.stdout)
    assert [line for line in lines if "--say 1" in line] and [
        line for line in lines if line.startswith("--policy allow-edits: ")
    ]
    assert lines[-2:] == [f"in {tmp_path}: nothing", "the agent's request was left without an answer"]


@pytest.mark.demo
def test_what_a_policy_leaves_open_is_not_answered_by_the_same_policy(tmp_path: Path) -> None:
    """A single message whose command is asked about: nothing is run, and the advice is what would have allowed it."""
    done = demo("--workspace", str(tmp_path), "--say", "run: touch made")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(
        "policy allow-edits: files in the workspace are changed without asking; everything else is asked"
    )
    named = [line for line in own_lines(done.stdout) if line.startswith("--policy ")]
    assert [line.split()[1] for line in named] == ["allow-all:", "deny:"]
    assert not list(tmp_path.iterdir())


@pytest.mark.demo
def test_a_single_message_asks_nobody_about_files(tmp_path: Path) -> None:
    """There is nobody to answer: files of the workspace are changed, as the first line says."""
    done = demo("--workspace", str(tmp_path), "--say", QUESTION)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("policy allow-edits: ")
    assert "Created hello.txt" in done.stdout and "Allow the agent" not in done.stdout
    assert (tmp_path / "hello.txt").read_text() == HELLO


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
@pytest.mark.parametrize("allowing", ["1", "allow"])
def test_a_further_message_allows_and_the_turn_goes_on(allowing: str, place: str, tmp_path: Path) -> None:
    """A number or a word: the rest of the turn follows, the file is there, and nobody is told any more how to answer."""
    done = demo("--workspace", str(tmp_path), "--place", place, "--say", QUESTION, "--say", allowing)
    assert done.returncode == 0, done.stdout + done.stderr
    asked, _, answered = done.stdout.partition(f"you> {allowing}\n")
    assert "1. Allow once" in asked and "Created" not in asked
    assert "Created hello.txt" in answered and "Allow the agent" not in answered
    assert "✓ Create hello.txt" in own_lines(answered)
    assert "--policy" not in answered
    assert (tmp_path / "hello.txt").read_text() == HELLO


@pytest.mark.demo
def test_messages_that_are_not_answered_are_not_followed_by_others(tmp_path: Path) -> None:
    """What was to answer a request would mean something else then."""
    done = demo("--workspace", str(tmp_path), "--agent", "/nowhere/agent --acp", "--say", "one", "--say", "two")
    assert done.returncode == 1
    assert "you> one\n" in done.stdout and "you> two\n" not in done.stdout


# ------------------------------------------------------------------ under a daemon


WAITING = 'Waiting for "demo-machine" to connect…'
"""The plugin's word while a busy machine has not got so far; no part of the answer."""

FORGETFUL = """
import runpy
import sys
from pathlib import Path
program = Path(sys.argv.pop(1))
sys.path.insert(0, str(program.parent))
from pkg.relay_streams import Outgoing

resume = Outgoing.resume

def forgetful(self, received, acked):
    resume(self, received, acked)
    lost = [record for record in self._queue if isinstance(record, bytes) and b"TextDelta" in record]
    for record in lost:
        self._queue.remove(record)
        self._memory -= len(record)
        self.last -= 1

Outgoing.resume = forgetful
runpy.run_path(str(program), run_name="__main__")
"""
"""A daemon program (local fixture) that replays everything but the texts its journal kept."""

INSTEAD = """
import sys
from pathlib import Path
root, program, *arguments = sys.argv[1:]
sys.path[:0] = [str(Path(root, room)) for room in ("ACPAgentRunner", "shared", "scripts")]
from demo_chat import chat, workstation
usual = workstation.program
workstation.program = lambda package: (program, *usual(package))
sys.exit(chat.main(arguments))
"""
"""The demo with another daemon program."""


def answer(output: str) -> str:
    """The agent's text in what the demo printed, without the demo's own lines and the line breaks that make room for them."""
    return "".join(line for line in output.splitlines()[2:] if not line.startswith("  ") and line != WAITING)


def own_lines(output: str) -> list[str]:
    """The demo's own lines, tool calls among them."""
    return [line.strip() for line in output.splitlines() if line.startswith("  ")]


def daemon_process(output: str) -> int:
    """The pid of the daemon the demo started."""
    [line] = [line for line in own_lines(output) if line.startswith("daemon demo-machine started as process ")]
    return int(line.split(",")[0].rpartition(" ")[2])


def check_the_cut(output: str, seconds: str) -> None:
    """The path was cut once, with a connection on it, behind the first and before the last of the turn's events."""
    lines = own_lines(output)
    told = [line for line in lines if line.startswith("connection ")]
    assert told == [f"connection cut for {seconds} s", "connection back"]
    order = ["▸ List .", told[0], "connection back", "✓ List .", "▸ Create hello.txt", "✓ Create hello.txt"]
    assert sorted(order, key=lines.index) == order
    assert (
        lines.index("connection back") < lines.index("daemon demo-machine connected again") < lines.index("✓ Create hello.txt")
    )


@pytest.mark.demo
def test_under_a_daemon_the_answer_is_the_same_and_a_cut_changes_nothing_in_it(tmp_path: Path) -> None:
    """The same message beside the plugin, under a daemon, and under a daemon whose path is cut in mid-turn."""
    answers = {}
    for name, place in {"local": (), "daemon": ("--place", "daemon"), "blip": ("--place", "daemon", "--blip", "2")}.items():
        work = tmp_path / name
        work.mkdir()
        done = demo("--workspace", str(work), "--policy", "allow-edits", "--say", QUESTION, *place)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (work / "hello.txt").read_text() == HELLO
        answers[name] = answer(done.stdout)
        if place:
            assert "daemon demo-machine connected" in own_lines(done.stdout)
            assert not hostile_trees.start_time(daemon_process(done.stdout))
    check_the_cut(done.stdout, "2")
    assert answers["local"] == "The workspace is empty.Created hello.txt (27 bytes)."
    assert answers["daemon"] == answers["local"]
    assert answers["blip"] == answers["local"]


@pytest.mark.demo
def test_a_daemon_that_does_not_replay_is_noticed_by_the_answer(tmp_path: Path) -> None:
    """The comparison above is one that can fail: the same cut, a daemon that loses the texts it should have sent again."""
    forgetful = tmp_path / "forgetful.py"
    forgetful.write_text(FORGETFUL)
    work = tmp_path / "work"
    work.mkdir()
    script = [sys.executable, "-c", INSTEAD, str(ROOT), str(forgetful)]
    done = subprocess.run(
        [*script, "--workspace", str(work), "--policy", "allow-edits", "--place", "daemon", "--blip", "2", "--say", QUESTION],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    check_the_cut(done.stdout, "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "hello.txt").read_text() == HELLO
    assert "The workspace is empty." not in answer(done.stdout)


@pytest.mark.demo
def test_what_no_policy_file_can_allow_is_told_before_anything_is_started() -> None:
    """Exit code 2 and the daemon's own words for it."""
    done = demo("--place", "daemon", "--workspace", "/", "--say", "hello")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("A daemon's policy file cannot allow this: workspaces ")
    assert "started" not in done.stdout


@pytest.mark.demo
def test_under_a_daemon_nothing_is_left_of_the_person_s_home(tmp_path: Path) -> None:
    """A home that takes no files is not needed, by the daemon and by the hub neither."""
    home = tmp_path / "home"
    home.write_text("a home that is no directory takes no files from anybody")
    work = tmp_path / "work"
    work.mkdir()
    done = demo("--place", "daemon", "--workspace", str(work), "--say", "create a.txt", "--say", "1", HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "a.txt").exists()


@pytest.mark.demo
def test_without_an_answer_the_exit_code_says_so(tmp_path: Path) -> None:
    """An agent that cannot be started is told readably, and the exit code is not 0."""
    done = demo("--workspace", str(tmp_path), "--agent", "/nowhere/agent --acp", "--say", "hello")
    assert done.returncode == 1
    assert "/nowhere/agent" in done.stdout and "was not found" in done.stdout
    _, _, log = done.stdout.partition("\nThe last warnings of the runtime's log:\n")
    assert "looked for agent in /nowhere" in log and "[INFO]" not in log
    assert len(log.splitlines()) <= 3, "what is said readably needs little beside it"
    assert "Traceback" not in done.stdout


@pytest.mark.demo
def test_a_wrong_command_line_is_told_at_once(tmp_path: Path) -> None:
    """Unknown agents and missing directories are no surprise after a minute."""
    wrong = (
        ("--agent", "acp:nobody"),
        ("--agent", "'my agent"),
        ("--agent", " "),
        ("--workspace", str(tmp_path / "none")),
        ("--policy", "maybe"),
        ("--blip", "5"),
        ("--approval-timeout", "soon"),
    )
    for arguments in wrong:
        done = demo(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: demo.py")


@pytest.mark.demo
def test_a_home_that_takes_no_files_does_not_matter_to_the_demo_s_own_agent(tmp_path: Path) -> None:
    """It has no account there; nothing is written into the person's home, and none is needed."""
    home = tmp_path / "home"
    home.write_text("a home that is no directory takes no files from anybody")
    work = tmp_path / "work"
    work.mkdir()
    done = demo("--workspace", str(work), "--say", "create a.txt", "--say", "1", HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "a.txt").exists()


@pytest.mark.demo
def test_what_keeps_the_demo_from_starting_is_told(tmp_path: Path) -> None:
    """Without git there is no package: exit code 2, and the last line says what is missing."""
    done = demo("--workspace", str(tmp_path), "--say", "hello", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "git is not installed" in done.stdout


def until_exists(file: Path) -> None:
    """Wait for a file that a command of the agent makes."""
    end = time.monotonic() + BOUND
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.02)


def commands(processes: Mapping[int, str]) -> list[str]:
    """The command lines of these processes (pid to start time), of those that are still there."""
    found = []
    for pid in processes:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


class Terminal:
    """The demo on a pseudo terminal of its own, as in a person's shell."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            env = {**os.environ, "TERM": "dumb", **environment}
            os.execve(sys.executable, [sys.executable, str(DEMO), *arguments], env)
        self.seen = ""

    def expect(self, text: str) -> str:
        """Read until ``text`` appears; what was read before it."""
        end = time.monotonic() + BOUND
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not appear; seen: {self.seen!r}"
            try:
                data = os.read(self.master, 65536)
            except OSError:
                data = b""
            assert data, f"it ended before {text!r} appeared; seen: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        """Type something; \\x03 is Ctrl-C."""
        os.write(self.master, text.encode())

    def leave(self) -> tuple[int, dict[int, str]]:
        """Ctrl-C, twice; the exit code and every process that was below the demo just before."""
        below = sdk_worker.descendants(self.pid)
        self.type("\x03")
        self.expect("again leaves")
        self.type("\x03")
        return self.wait(), below

    def wait(self, *, insisting: bool = False) -> int:
        """The exit code; ``insisting`` presses Ctrl-C again where the demo asks for that."""
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if select.select([self.master], [], [], 0.05)[0]:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
            if insisting and "again leaves" in self.seen:
                self.seen = ""
                self.type("\x03")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.master)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.master)
        raise AssertionError(f"the demo did not end; seen: {self.seen!r}")


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_ctrl_c_cancels_the_run_and_a_second_one_leaves_nothing(place: str, tmp_path: Path) -> None:
    """The chat goes on after a cancelled run; after leaving, worker, daemon, supervisors, agent and command are gone."""
    terminal = Terminal("--workspace", str(tmp_path), "--policy", "allow-all", "--place", place)
    terminal.expect("you> ")
    terminal.type("run: sleep 300\n")
    terminal.expect("▸ sleep 300")
    below = sdk_worker.descendants(terminal.pid)
    terminal.type("\x03")
    terminal.expect("(cancelled)")
    terminal.expect("you> ")
    terminal.type("create a.txt\n")
    terminal.expect("Created a.txt")
    terminal.expect("you> ")
    for _ in range(4):  # it never adds up: each cancels its own run
        terminal.type("run: sleep 300\n")
        terminal.expect("▸ sleep 300")
        terminal.type("\x03")
        terminal.expect("(cancelled)")
        terminal.expect("you> ")
    code, later = terminal.leave()
    assert code == 130
    assert len(below) >= 3
    assert hostile_trees.gone({**below, **later}, BOUND)


@pytest.mark.demo
def test_ctrl_c_while_it_is_still_starting_leaves(tmp_path: Path) -> None:
    """Nobody has to wait for the worker in order to leave."""
    terminal = Terminal("--workspace", str(tmp_path))
    terminal.expect("building the package")
    terminal.type("\x03")
    assert terminal.wait() == 130


def agents(pid: int) -> dict[int, str]:
    """The demo's agents below this process, without their supervisors: pid to start time."""
    itself = re.compile(rf"\S+ -I -S {re.escape(str(AGENT))} ")
    below = sdk_worker.descendants(pid)
    return {each: at for each, at in below.items() if any(map(itself.fullmatch, commands({each: at})))}


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_at_a_terminal_what_the_agent_asks_is_answered_in_the_chat(place: str, tmp_path: Path) -> None:
    """The product's numbered message; the same agent process goes on and asks again; a denial's reason reaches it."""
    work = tmp_path / "work"
    work.mkdir()
    terminal = Terminal("--workspace", str(work), "--place", place, TMPDIR=str(tmp_path))
    terminal.expect("policy ask: you are asked")
    terminal.expect("you> ")
    terminal.type('create a.txt with "some text", then run: touch b.txt\n')
    asked = terminal.expect("you> ")
    assert "+some text" in asked and "1. Allow once" in asked
    agent = agents(terminal.pid)
    assert len(agent) == 1
    terminal.type("and what about c.txt?\n")  # no answer to this request
    assert "Still waiting" in terminal.expect("you> ")
    assert not (work / "a.txt").exists()
    terminal.type("1\n")
    again = terminal.expect("you> ")
    assert "Created a.txt" in again and "touch b.txt" in again and "1. Allow once" in again
    assert not (work / "b.txt").exists()
    terminal.type("deny because it is Friday\n")
    denied = terminal.expect("you> ")
    assert "not allowed" in denied and "did not understand 'it is Friday'" in denied
    assert agents(terminal.pid) == agent, "one process for all of it"
    [record] = tmp_path.glob(f"demo-*/home/{limits.STATE_DIRECTORY}/{decision_log.FILE}")
    assert [json.loads(line)["decision"] for line in record.read_text().splitlines()] == ["allow_once", "deny"]
    below = sdk_worker.descendants(terminal.pid)
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert [path.name for path in work.iterdir()] == ["a.txt"]
    assert hostile_trees.gone(below, BOUND)
    assert not record.exists(), "it goes with the demo"


@pytest.mark.demo
def test_a_request_that_nobody_answers_is_cancelled_and_told_at_once(tmp_path: Path) -> None:
    """In both places at a time, because it takes the shortest time a form may say; a later answer does nothing."""
    terminals = {}
    for place in ("local", "daemon"):
        (tmp_path / place).mkdir()
        terminals[place] = Terminal(
            *("--workspace", str(tmp_path / place), "--place", place, "--approval-timeout", str(EXPIRY))
        )
    for terminal in terminals.values():
        terminal.expect("you> ")
        terminal.type("run: touch made\n")
        assert f"Time left: {EXPIRY} s;" in terminal.expect("you> ")
    for place, terminal in terminals.items():
        told = terminal.expect("you> ")
        assert "Nobody answered in time" in told and "touch made" in told
        terminal.type("list the files\n")
        after = terminal.expect("you> ")
        assert "The workspace is empty." in after and "Nobody answered" not in after, "told once"
        code, below = terminal.leave()
        assert code == 130
        assert hostile_trees.gone(below, BOUND)
        assert not list((tmp_path / place).iterdir())


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_leaving_while_the_agent_asks_is_the_last_that_is_said(place: str, tmp_path: Path) -> None:
    """What is asked ends with the chat, of which nobody has to read more, whichever of worker and daemon ends first."""
    terminal = Terminal("--workspace", str(tmp_path), "--place", place)
    terminal.expect("you> ")
    terminal.type("run: touch made\n")
    assert "1. Allow once" in terminal.expect("you> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert terminal.seen.split() == ["bye"]
    assert not list(tmp_path.iterdir())


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_stop_ends_the_turn_that_asks_and_the_chat_goes_on(place: str, tmp_path: Path) -> None:
    """Nothing of it is done, and the next message is a message again."""
    terminal = Terminal("--workspace", str(tmp_path), "--place", place)
    terminal.expect("you> ")
    terminal.type("run: touch made\n")
    assert "1. Allow once" in terminal.expect("you> ")
    terminal.type("/stop\n")
    assert "Stopped." in terminal.expect("you> ")
    terminal.type("list the files\n")
    assert "The workspace is empty." in terminal.expect("you> ")
    code, below = terminal.leave()
    assert code == 130
    assert hostile_trees.gone(below, BOUND)


@pytest.mark.demo
def test_what_is_cancelled_the_moment_it_is_asked_cannot_be_allowed_any_more(tmp_path: Path) -> None:
    """Ctrl-C before the run that shows a request has ended cancels the request, too."""
    terminal = Terminal("--workspace", str(tmp_path))
    terminal.expect("you> ")
    for _ in range(10):
        terminal.type("create made.txt\n")
        terminal.expect("1. Allow once")
        terminal.type("\x03")
        if "(cancelled)" in terminal.expect("you> "):
            break
        terminal.type("/stop\n")  # the run was over before it was cancelled
        terminal.expect("you> ")
    else:
        raise AssertionError("no run was cancelled while it showed its request")
    terminal.type("1\n")
    assert "made.txt" not in terminal.expect("you> ")
    code, below = terminal.leave()
    assert code == 130
    assert not list(tmp_path.iterdir())
    assert hostile_trees.gone(below, BOUND)


@pytest.mark.demo
@pytest.mark.parametrize("place", ["local", "daemon"])
def test_leaving_while_it_asks_leaves_no_process(place: str, tmp_path: Path) -> None:
    """The first Ctrl-C says what the second one does; the waiting agent, its supervisors, worker and daemon are gone then."""
    terminal = Terminal("--workspace", str(tmp_path), "--place", place)
    terminal.expect("you> ")
    terminal.type("run: touch made\n")
    assert "1. Allow once" in terminal.expect("you> ")
    assert len(agents(terminal.pid)) == 1
    below = sdk_worker.descendants(terminal.pid)
    terminal.type("\x03")
    assert "and cancels what is asked" in terminal.expect("you> "), "the request stays open until it is left"
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert hostile_trees.gone(below, BOUND)
    assert not list(tmp_path.iterdir())


@pytest.mark.demo
@pytest.mark.parametrize("place", [(), ("--place", "daemon"), ("--place", "daemon", "--blip", "60")], ids=" ".join)
def test_a_killed_demo_leaves_no_process(place: tuple[str, ...], tmp_path: Path) -> None:
    """SIGKILL in the middle of a command, also while cut: the worker sees its pipe close, supervisors end the rest."""
    # What it could not tidy up either goes with the directory of this test.
    work = tmp_path / "work"
    work.mkdir()
    terminal = Terminal("--workspace", str(work), "--policy", "allow-all", *place, TMPDIR=str(tmp_path))
    terminal.expect("you> ")
    terminal.type("run: touch begun; sleep 300\n")
    terminal.expect("▸ touch begun")
    if "--blip" in place:  # the command itself waits for its permission, behind the cut
        terminal.expect("connection cut for 60 s")
    else:
        until_exists(work / "begun")
    below = sdk_worker.descendants(terminal.pid)
    assert [line for line in commands(below) if "demo_agent" in line]
    assert bool(place) == bool([line for line in commands(below) if "daemon.py" in line])
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.wait() == -signal.SIGKILL
    assert hostile_trees.gone(below, BOUND)


@pytest.mark.demo
def test_leaving_while_the_path_is_cut_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C cannot reach a daemon behind a cut; the demo ends the machine itself."""
    terminal = Terminal("--workspace", str(tmp_path), "--policy", "allow-all", "--place", "daemon", "--blip", "60")
    terminal.expect("you> ")
    terminal.type("list the files\n")
    terminal.expect("connection cut for 60 s")
    below = sdk_worker.descendants(terminal.pid)
    assert [line for line in commands(below) if "demo_agent" in line]
    terminal.type("\x03")
    terminal.expect("cancelling (Ctrl-C again leaves)")
    terminal.type("\x03")
    assert terminal.wait(insisting=True) == 130, "the run may be cancelled before the second one is heard"
    assert hostile_trees.gone(below, BOUND)


@pytest.mark.demo
def test_a_daemon_s_agent_has_the_accounts_of_this_shell_from_the_daemon_alone(tmp_path: Path) -> None:
    """The policy file names the variable; its value is in no file, on no command line and not in the worker's environment."""
    secret = "canary-5f0d1c"
    work = tmp_path / "work"
    work.mkdir()
    terminal = Terminal(
        *("--workspace", str(work), "--policy", "allow-all", "--place", "daemon"),
        *("--agent", f"{sys.executable} -I -S {AGENT}"),
        OPENAI_API_KEY=secret,
        TMPDIR=str(tmp_path),
    )
    terminal.expect("you> ")
    terminal.type('run: printf %s "$OPENAI_API_KEY" > made; touch there; sleep 300\n')
    until_exists(work / "there")
    made = work / "made"
    assert made.read_text() == secret
    made.unlink()
    [policy] = tmp_path.glob("demo-*/machine/daemon.toml")
    assert 'environment = ["OPENAI_API_KEY"]' in policy.read_text().splitlines()
    assert 'approvals = ["allow-all"]' in policy.read_text().splitlines()
    assert policy.stat().st_mode & 0o777 == policy.with_name("daemon.key").stat().st_mode & 0o777 == 0o600
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert policy in files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    having = []
    for pid in sdk_worker.descendants(terminal.pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert secret.encode() not in command
            if secret.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                having.append(command)
    assert any(b"demo_agent" in command for command in having)
    assert not any(b"langbot_plugin" in command for command in having)
    terminal.type("\x03")
    terminal.expect("(cancelled)")
    terminal.expect("you> ")
    code, below = terminal.leave()
    assert code == 130
    assert hostile_trees.gone(below, BOUND)


@pytest.mark.demo
@pytest.mark.real_agents
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("agent", "preset", "place"),
    [
        ("claude", "acp:claude-code", "local"),
        ("codex", "acp:codex", "local"),
        ("gemini", "acp:gemini", "local"),
        ("claude", "acp:claude-code", "daemon"),
    ],
)
async def test_a_real_agent_asks_the_person_at_the_terminal(
    agent: str, preset: str, place: str, tmp_path: Path, agent_binaries: Path
) -> None:
    """Found on PATH, signed in by the shell's variables, it asks here before it runs a command and obeys the answer."""
    workspace = tmp_path / "work"
    workspace.mkdir()
    async with model_fixture.model_fixture() as fixture:
        environment = real_agents.AGENTS[agent].environment(tmp_path / "home", fixture.url)
        environment["PATH"] = f"{agent_binaries}{os.pathsep}{os.environ['PATH']}"

        def talk() -> int:
            where = ("--workspace", str(workspace), "--place", place)
            terminal = Terminal(*where, "--agent", preset, **environment)
            terminal.expect("you> ")
            terminal.type("Write. [[ run touch made ]]\n")
            asked = terminal.expect("you> ")
            assert "1. Allow once" in asked and "touch made" in asked, asked
            assert not (workspace / "made").exists()
            terminal.type("1\n")
            terminal.expect("done:")
            terminal.expect("you> ")
            terminal.type("Again. [[ run touch denied ]]\n")
            assert "1. Allow once" in terminal.expect("you> ")
            terminal.type("3\n")
            terminal.expect("you> ")
            terminal.type("\x04")
            return terminal.wait()

        assert await asyncio.to_thread(talk) == 0
    assert (workspace / "made").exists()
    assert not (workspace / "denied").exists()
