"""What the program asks before it acts, and what it is answered; what people can do about its tool servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from claude_harness import codes, ended, of, opened, poll, prompted, received, requests, text, turn, until

from agent import permissions
from pkg.agent_api import Answer, ApprovalRequested, McpServer, Notice, QuestionAsked, TurnEnded
from pkg.approval_policy import decide, inside_really, unanswered

pytestmark = pytest.mark.asyncio

RULE = {
    "type": "addRules",
    "rules": [{"toolName": "Bash", "ruleContent": "touch *"}],
    "behavior": "allow",
    "destination": "localSettings",
}
SUGGESTIONS = [
    RULE,
    {"type": "addDirectories", "directories": ["/"], "destination": "session"},
    {"type": "setMode", "mode": "acceptEdits", "destination": "session"},
]
COLOURS = {
    "questions": [
        {
            "question": "Which colour?",
            "header": "Colour",
            "options": [{"label": "Red", "description": "warm"}, {"label": "Blue", "description": "cool"}],
            "multiSelect": False,
        },
        {"question": "Which sizes?", "header": "Sizes", "options": [{"label": "S"}, {"label": "M"}], "multiSelect": True},
    ]
}


def ask(name: str, given: dict[str, Any], **extra: Any) -> str:
    """The step with which the program asks."""
    return f"ask {name} {json.dumps(given)} {json.dumps(extra)}"


def answered(events: list[Any]) -> dict[str, Any]:
    """The response that the program read, where it was allowed."""
    said = text(events)
    assert said.startswith("allowed "), said
    found: dict[str, Any] = json.loads(said.removeprefix("allowed "))
    return found


async def test_a_command_is_shown_whole_before_it_runs(tmp_path: Path) -> None:
    """Our rule: the command, where it runs, the file that made the program ask, and its reason."""
    step = ask("Bash", {"command": "touch f", "description": "d"}, blocked_path="/w/f", decision_reason="why")
    async with opened(tmp_path) as session:
        events = await turn(session, step, choose="allow_once")
        (asked,) = of(events, ApprovalRequested)
        assert (asked.command, asked.kind, asked.title) == ("touch f", "execute", "touch f")
        assert (asked.paths, asked.reason, asked.cwd, asked.complete) == (("/w/f",), "why", session.directory, True)
        assert [choice.kind for choice in asked.choices] == ["allow_once", "reject_once"]
        assert answered(events) == {"behavior": "allow", "updatedInput": {"command": "touch f", "description": "d"}}


async def test_an_edit_is_shown_as_what_it_changes(tmp_path: Path) -> None:
    """Our rule: edits carry diffs and no command, so that a policy for edits can judge them by their files."""
    inside = str(tmp_path / "a.py")
    for name, given in (
        ("Edit", {"file_path": inside, "old_string": "a", "new_string": "b"}),
        ("Write", {"file_path": inside, "content": "b"}),
        ("MultiEdit", {"file_path": inside, "edits": [{"old_string": "a", "new_string": "b"}]}),
    ):
        asked = permissions.asked("1", {"tool_name": name, "input": given}, None, str(tmp_path)).event
        assert isinstance(asked, ApprovalRequested)
        assert asked.diffs[0].new_text == "b" and asked.command == "" and asked.complete
        assert decide("allow-edits", asked, inside_really(str(tmp_path))).allowed
        outside = {**given, "file_path": "/etc/passwd"}
        asked = permissions.asked("1", {"tool_name": name, "input": outside}, None, str(tmp_path)).event
        assert isinstance(asked, ApprovalRequested)
        assert not decide("allow-edits", asked, inside_really(str(tmp_path))).allowed


async def test_what_no_tool_of_ours_explains_is_shown_as_its_input(tmp_path: Path) -> None:
    """Our rule: an unknown tool is never an edit, and its name with its input is what people see."""
    asked = permissions.asked("1", {"tool_name": "mcp__x__y", "input": {"q": 1}}, None, str(tmp_path)).event
    assert isinstance(asked, ApprovalRequested)
    assert asked.command == 'x: y {"q":1}'
    assert not decide("allow-edits", asked, inside_really(str(tmp_path))).allowed


async def test_for_this_session_is_remembered_nowhere_else(tmp_path: Path) -> None:
    """Vendor's rule: suggestions write settings files and switch modes; ours: only rules, and only for the session."""
    step = ask("Bash", {"command": "touch f"}, permission_suggestions=SUGGESTIONS)
    async with opened(tmp_path) as session:
        events = await turn(session, step, choose="allow_session")
        assert answered(events)["updatedPermissions"] == [{**RULE, "destination": "session"}]
        assert "updatedPermissions" not in answered(await turn(session, step, choose="allow_once"))


@pytest.mark.parametrize("answer", [Answer("reject_once"), Answer(), Answer("no such choice"), Answer(message="because")])
async def test_whatever_does_not_allow_denies(tmp_path: Path, answer: Answer) -> None:
    """Our rule: with the person's words where there are some, else with words that keep the agent from trying on."""
    async with opened(tmp_path) as session:
        said = text(await turn(session, ask("Bash", {"command": "x"}), choose=lambda asked: answer))
        assert said == f"denied {answer.message or permissions.DENIED}"


async def test_a_request_is_not_replaced_by_another_of_its_id(tmp_path: Path) -> None:
    """Our rule: what a person allowed is what they were shown, also when the program asks twice under one id."""

    def request(command: str) -> str:
        body = {"subtype": "can_use_tool", "tool_name": "Bash", "input": {"command": command}, "tool_use_id": "t"}
        return "line " + json.dumps({"type": "control_request", "request_id": "twice", "request": body})

    log = tmp_path / "log"
    go = tmp_path / "go"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, request("ls"), request("rm -rf ."), f"hold {go}", "say fine")
        events = await until(session, ApprovalRequested)
        await poll(lambda: len(session._asked) == 1)
        await session.set_model("x")  # the second request was read before the answer to this
        assert await session.answer("twice", Answer("allow_once"))
        assert not await session.answer("twice", Answer("allow_once"))
        go.touch()
        events += await until(session, TurnEnded)
        assert len(of(events, ApprovalRequested)) == 1
    (told,) = [line["response"]["response"] for line in received(log) if line.get("type") == "control_response"]
    assert told["updatedInput"] == {"command": "ls"}


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("Glob", {"pattern": "**/*.py"}, True),
        ("Glob", {"pattern": "/etc/**"}, False),
        ("Glob", {"pattern": "../../*"}, False),
        ("Glob", {"pattern": "a/{b,../../..}/*"}, False),
        ("Glob", {"pattern": "~/.ssh/*"}, False),
        ("Grep", {"pattern": "x.*../y"}, True),
        ("Grep", {"pattern": "x", "path": "/etc"}, False),
        ("Grep", {"pattern": "x", "glob": "/etc/*"}, False),
        ("Read", {"file_path": "/etc/passwd"}, False),
        ("Read", {}, False),
        ("ReadMcpResource", {"server": "s", "uri": "file:///etc/passwd"}, False),
    ],
)
async def test_under_allow_edits_only_the_workspace_is_looked_at(
    tmp_path: Path, name: str, given: dict[str, Any], allowed: bool
) -> None:
    """Our rule: a pattern or an address that leads out of the workspace is no edit, nor is a call that names no file."""
    request = permissions.asked("r", {"tool_name": name, "input": given, "tool_use_id": "t"}, None, str(tmp_path)).event
    assert isinstance(request, ApprovalRequested)
    assert decide("allow-edits", request, inside_really(str(tmp_path))).allowed is allowed


async def test_under_the_policy_ask_everything_is_denied_and_said(tmp_path: Path) -> None:
    """Our rule: while nobody can be asked the policy's decision is a rejection with a text for the person."""
    step = ask("Bash", {"command": "touch f"})

    def denied(asked: Any) -> Answer:
        decision = decide("ask", asked, inside_really(str(tmp_path)))
        assert decision.text_key == "approval.cannot_ask"
        return decision.answer

    async with opened(tmp_path) as session:
        assert text(await turn(session, step, choose=denied)).startswith("denied ")


async def test_a_question_is_asked_with_its_fields(tmp_path: Path) -> None:
    """Vendor's rule: answers stand under the question's own text, several choices as one text."""

    def answer(asked: Any) -> Answer:
        assert isinstance(asked, QuestionAsked)
        colour, sizes = asked.fields
        assert asked.message == "Which colour?\nWhich sizes?"
        assert (colour.name, colour.label, colour.type) == ("q1", "Colour", "select")
        assert colour.options == (("Red", "Red"), ("Blue", "Blue")) and "cool" in colour.description
        assert sizes.type == "multiselect"
        return Answer(values={"q1": "Blue", "q2": ["S", "M"]})

    async with opened(tmp_path) as session:
        events = await turn(session, ask("AskUserQuestion", COLOURS, requires_user_interaction=True), choose=answer)
        given = answered(events)["updatedInput"]
        assert given["answers"] == {"Which colour?": "Blue", "Which sizes?": "S, M"}
        assert given["questions"] == COLOURS["questions"]


async def test_a_question_nobody_answers_is_denied(tmp_path: Path) -> None:
    """Our rule: the agent is told to go on, and the person what was asked."""

    def nobody(asked: Any) -> Answer:
        decision = unanswered(asked)
        assert "Which colour?" in decision.params["question"]
        return decision.answer

    async with opened(tmp_path) as session:
        said = text(await turn(session, ask("AskUserQuestion", COLOURS), choose=nobody))
        assert said == f"denied {permissions.UNANSWERED}"


async def test_leaving_plan_mode_shows_the_plan(tmp_path: Path) -> None:
    """Vendor's rule: the request itself is empty, the plan stands in the tool call before it."""
    async with opened(tmp_path) as session:
        events = await turn(session, ask("ExitPlanMode", {"plan": "1. do it"}, input={}), choose="allow_once")
        (asked,) = of(events, ApprovalRequested)
        assert (asked.kind, asked.command) == ("mode", "1. do it")
        assert answered(events)["behavior"] == "allow"


async def test_a_withdrawn_request_is_not_answered(tmp_path: Path) -> None:
    """Vendor's rule: an interrupt takes a waiting request back; an answer to it would be an error."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}) as session:
        await prompted(session, ask("Bash", {"command": "x"}))
        (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
        await session.interrupt()
        assert not await session.answer(asked.request_id, Answer("allow_once"))
        assert ended(await until(session, TurnEnded)).stop_reason == "cancelled"
        answers = [line["response"]["response"] for line in received(log) if line.get("type") == "control_response"]
        assert all(answer["behavior"] == "deny" for answer in answers)


@pytest.mark.parametrize(("policy", "allowed"), [("ask", False), ("allow-edits", False), ("deny", False), ("allow-all", True)])
async def test_outside_a_turn_only_the_policy_for_everything_allows(tmp_path: Path, policy: str, allowed: bool) -> None:
    """Our rule: background work asks when nobody listens; what it did not get is told with the next turn."""
    log, go = tmp_path / "log", tmp_path / "go"
    async with opened(tmp_path, {"log": str(log)}, policy=policy) as session:
        await turn(session, f"later {go} {ask('Bash', {'command': 'x'})}", "say started")
        go.touch()

        def response() -> list[dict[str, Any]]:
            return [line["response"]["response"] for line in received(log) if line.get("type") == "control_response"]

        await poll(lambda: bool(response()))
        assert response()[0]["behavior"] == ("allow" if allowed else "deny")
        events = await turn(session, "say next")
        assert ("coding.permission_outside_turn" in codes(events)) is not allowed


async def test_other_requests_get_an_answer(tmp_path: Path) -> None:
    """Our rule: a hook is let through, what nobody knows is refused, and what is too long to be read as well."""
    async with opened(tmp_path) as session:
        assert json.loads(text(await turn(session, "hook"))) == {}
        assert text(await turn(session, "strange_request")) == "error"


async def test_a_request_too_long_to_be_read_is_refused(tmp_path: Path) -> None:
    """Our rule: it costs its own tool call and nothing else."""
    async with opened(tmp_path) as session:
        session._transport._lines._limit = 100_000
        events = await turn(session, "huge_request 200000", "say fine")
        assert text(events) == "errorfine"
        assert "coding.agent_line_truncated" in codes(events)


# ------------------------------------------------------------------ tool servers


def server(name: str = "langbot_agent", token: str = "canary-bearer-1") -> McpServer:
    """An MCP server nobody listens at."""
    return McpServer(name, "http", url="http://127.0.0.1:1/mcp", headers={"Authorization": f"Bearer {token}"})


async def test_tool_servers_travel_on_stdin_alone(tmp_path: Path) -> None:
    """Vendor's rule: ``mcp_set_servers`` takes them at any time; ours: no credential in arguments or environment."""
    log = tmp_path / "log"
    local = McpServer("local", "stdio", command=("tool", "--x"), env={"TOKEN": "canary-env-1"})
    async with opened(tmp_path, {"log": str(log)}, mcp_servers=(server(), local)):
        assert requests(log, "mcp_set_servers")[0]["servers"] == {
            "langbot_agent": {
                "type": "http",
                "url": "http://127.0.0.1:1/mcp",
                "headers": {"Authorization": "Bearer canary-bearer-1"},
            },
            "local": {"type": "stdio", "command": "tool", "args": ["--x"], "env": {"TOKEN": "canary-env-1"}},
        }
        assert "canary" not in json.dumps(received(log)[0])


async def test_nothing_of_a_server_is_filled_in_from_the_environment(tmp_path: Path) -> None:
    """Vendor's rule: ``${NAME}`` becomes a variable of the program's environment; ours: what was given is what is sent."""
    log = tmp_path / "log"
    evil = McpServer("e", "http", url="http://127.0.0.1:1/${TOKEN}", headers={"X": "${TOKEN} ${A:-b} $HOME {} $${TOKEN}"})
    local = McpServer("l", "stdio", command=("tool", "${TOKEN}"), env={"A": "${TOKEN}"})
    async with opened(tmp_path, {"log": str(log)}, mcp_servers=(evil, local)):
        servers = requests(log, "mcp_set_servers")[0]["servers"]

    def filled(value: str) -> str:
        """What the vendor's program makes of a value (one pass, by 2.1.332)."""
        environ = {"TOKEN": "canary-variable", "A": "canary-variable", "HOME": "canary-variable"}

        def known(found: re.Match[str]) -> str:
            name, _, default = found[1].partition(":-")
            return environ.get(name, default or found[0])

        return re.sub(r"\$\{([^}]+)\}", known, value)

    assert filled(servers["e"]["headers"]["X"]) == evil.headers["X"]
    assert filled(servers["e"]["url"]) == evil.url
    assert [*map(filled, servers["l"]["args"]), filled(servers["l"]["env"]["A"])] == ["${TOKEN}", "${TOKEN}"]


async def test_a_server_that_failed_is_said_once(tmp_path: Path) -> None:
    """Vendor's rule: a failed server only lacks its tools; ours: people are told, once."""
    config = {"mcp": {"langbot_agent": "ECONNREFUSED canary-bearer-1"}}
    async with opened(tmp_path, config, mcp_servers=(server(), server("other"))) as session:
        events = [*await turn(session, "say one"), *await turn(session, "say two")]
        (notice,) = [event for event in of(events, Notice) if event.code == "coding.mcp_servers_failed"]
        assert notice.params == {"names": "langbot_agent"} and notice.level == "warning"


async def test_tool_servers_can_be_renewed_between_turns(tmp_path: Path) -> None:
    """Vendor's rule: a token may change between two turns of one process."""
    log = tmp_path / "log"
    async with opened(tmp_path, {"log": str(log)}, mcp_servers=(server(),)) as session:
        await turn(session, "say one")
        assert await session.renew_mcp((server(token="canary-bearer-2"),))
        assert "canary-bearer-2" in json.dumps(requests(log, "mcp_set_servers")[1])
        await prompted(session, f"hold {tmp_path / 'never'}")
        assert not await session.renew_mcp(())
