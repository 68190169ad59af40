"""What the app-server asks its client: approvals, questions, tools, and everything that nobody serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from codex_harness import ended, log_of, of, opened, received, rest_of_turn, text, turn, until

from pkg.agent_api import Answer, ApprovalRequested, McpServer, Notice, Prompt, QuestionAsked, ToolFinished, TurnEnded
from pkg.approval_policy import decide, inside_lexically

pytestmark = pytest.mark.asyncio

COMMAND = {"kind": "command", "command": "/bin/bash -lc 'touch f'", "cwd": "/w", "commandActions": [{"type": "unknown"}]}


def answered(events: list[Any]) -> Any:
    """What the app-server was answered, as the scripted one repeats it."""
    return json.loads(text(events).removeprefix("answered "))


class TestApprovals:
    """A command or a file change waits for a decision."""

    @pytest.mark.parametrize("choice", ["accept", "acceptForSession", "decline", "cancel"])
    async def test_each_choice_is_codex_s_own_word(self, choice: str, tmp_path: Path) -> None:
        """What is offered is what is sent."""
        async with opened(tmp_path) as session:
            events = await turn(session, f"approve {json.dumps(COMMAND)}", choose=choice)
        assert json.loads(text(events).removeprefix("decided ")) == {"decision": choice}
        (asked,) = of(events, ApprovalRequested)
        assert (asked.command, asked.cwd, asked.kind, asked.complete) == ("touch f", "/w", "execute", True)
        assert choice in [each.choice_id for each in asked.choices]

    @pytest.mark.parametrize("given", ["", "nonsense", "acceptWithExecpolicyAmendment"])
    async def test_anything_else_allows_nothing(self, given: str, tmp_path: Path) -> None:
        """The permanent amendment that Codex proposes can't be chosen, whoever names it."""
        proposed = {**COMMAND, "proposedExecpolicyAmendment": ["touch"], "availableDecisions": ["accept"]}
        async with opened(tmp_path) as session:
            events = await turn(session, f"approve {json.dumps(proposed)}", choose=given)
        decision = json.loads(text(events).removeprefix("decided "))["decision"]
        assert decision == ("decline" if given else "cancel")
        (asked,) = of(events, ApprovalRequested)
        assert not [each for each in asked.choices if each.kind in ("allow_always", "reject_always")]

    @pytest.mark.parametrize(
        "more",
        [
            {"kind": "writeStdin"},
            {"kind": "humanCommand"},
            {"networkApprovalContext": {"host": "example.org", "protocol": "https"}},
            {"additionalPermissions": {"fileSystem": {"write": ["/etc"]}}},
            {"command": None},
            {"command": "x" * 70_000},
        ],
    )
    async def test_what_is_more_than_its_command_is_not_offered_as_whole(self, more: dict[str, Any], tmp_path: Path) -> None:
        """An action that cannot be shown whole must be known as such."""
        async with opened(tmp_path) as session:
            events = await turn(session, f"approve {json.dumps({**COMMAND, **more})}", choose="decline")
        (asked,) = of(events, ApprovalRequested)
        assert not asked.complete
        if more.get("kind") == "humanCommand":
            assert "acceptForSession" not in [each.choice_id for each in asked.choices]

    async def test_a_file_change_shows_what_its_item_announced(self, tmp_path: Path) -> None:
        """The request names only the item; the diff was told before. ``allow-edits`` allows it inside the workspace."""
        changes = [{"path": "/w/a.txt", "kind": {"type": "add"}, "diff": "x\n"}]
        async with opened(tmp_path) as session:
            events = await turn(session, f"patch {json.dumps(changes)}", choose="accept")
        (asked,) = of(events, ApprovalRequested)
        assert (asked.kind, asked.paths, asked.complete, asked.command) == ("edit", ("/w/a.txt",), True, "")
        assert decide("allow-edits", asked, inside_lexically("/w")).allowed
        assert not decide("allow-edits", asked, inside_lexically("/other")).allowed
        assert not decide("ask", asked, inside_lexically("/w")).allowed

    @pytest.mark.parametrize("more", [{"grantRoot": "/"}, {"itemId": "unknown"}])
    async def test_a_file_change_that_is_not_shown_whole_is_no_edit(self, more: dict[str, Any], tmp_path: Path) -> None:
        """Write access for a whole directory, or a change nobody described."""
        request = {"itemId": "x", "reason": None, "grantRoot": None, **more}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request item/fileChange/requestApproval {json.dumps(request)}", choose="decline")
        (asked,) = of(events, ApprovalRequested)
        assert not asked.complete
        assert not decide("allow-edits", asked, inside_lexically("/")).allowed

    async def test_a_declined_change_is_a_cancelled_tool_call(self, tmp_path: Path) -> None:
        """It was not done."""
        changes = [{"path": "/w/a.txt", "kind": {"type": "add"}, "diff": "x\n"}]
        async with opened(tmp_path) as session:
            events = await turn(session, f"patch {json.dumps(changes)}", choose="decline")
        assert [event.status for event in of(events, ToolFinished)] == ["cancelled"]

    async def test_a_denial_s_words_are_left_to_whoever_answers(self, tmp_path: Path) -> None:
        """No answer has a place for them (Codex 0.171): the session says so, and sends them once, when it is told to steer."""
        async with opened(tmp_path) as session:
            assert not session.capabilities.denial_reason
            await session.prompt(Prompt(f"approve {json.dumps(COMMAND)}\nsteer"))
            (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
            assert await session.answer(asked.request_id, Answer("decline", message="use the other file"))
            assert received(tmp_path, "turn/steer") == []
            assert await session.steer(Prompt("use the other file"))
            assert "steered: use the other file" in text(await rest_of_turn(session))
        assert len(received(tmp_path, "turn/steer")) == 1

    async def test_an_answer_counts_once(self, tmp_path: Path) -> None:
        """A late or repeated press answers nothing, nor does one that is meant for another request."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"approve {json.dumps(COMMAND)}"))
            (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
            assert not await session.answer("unknown", Answer("decline"))
            assert await session.answer(asked.request_id, Answer("accept"))
            assert not await session.answer(asked.request_id, Answer("decline"))
            assert '"accept"' in text(await rest_of_turn(session))

    async def test_a_request_that_codex_withdraws_is_closed(self, tmp_path: Path) -> None:
        """``serverRequest/resolved`` says that nobody needs to answer any more."""
        ask = {
            "method": "item/commandExecution/requestApproval",
            "id": 55,
            "params": {"threadId": "$THREAD", "turnId": "$TURN"},
        }
        gone = {"method": "serverRequest/resolved", "params": {"threadId": "$THREAD", "requestId": 55}}
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"send {json.dumps(ask)}\nsend {json.dumps(gone)}\nsay next"))
            events = await until(session, TurnEnded)
            (asked,) = of(events, ApprovalRequested)
            assert not await session.answer(asked.request_id, Answer("accept"))
            assert Notice("agent.request_withdrawn", asked.request_id) in events

    @pytest.mark.parametrize(
        "born",
        [
            {"method": "thread/started", "params": {"thread": {"id": "child", "parentThreadId": "$THREAD"}}},
            {"method": "turn/started", "params": {"threadId": "child", "turn": {"id": "its-turn", "rootTurnId": "$TURN"}}},
        ],
    )
    async def test_a_thread_that_codex_started_asks_through_its_parent(self, born: dict[str, Any], tmp_path: Path) -> None:
        """Codex's own helpers ask for what they do; the person is the same. Codex (0.171) tells of them by their turns."""
        request = {**COMMAND, "threadId": "child", "turnId": "child-turn"}
        async with opened(tmp_path) as session:
            events = await turn(
                session,
                f"send {json.dumps(born)}",
                f"request item/commandExecution/requestApproval {json.dumps(request)}",
                choose="accept",
            )
        assert answered(events) == {"decision": "accept"}

    async def test_a_file_change_of_such_a_thread_is_not_taken_for_one_of_its_parent(self, tmp_path: Path) -> None:
        """Models name their items, so two threads' may have one name: the parent's harmless diff vouches for nothing."""
        born = {"method": "thread/started", "params": {"thread": {"id": "child", "parentThreadId": "$THREAD"}}}
        change = {"path": "harmless.txt", "kind": {"type": "add"}, "diff": "hello"}
        item = {"type": "fileChange", "id": "call_1", "status": "inProgress", "changes": [change]}
        request = {"threadId": "child", "turnId": "child-turn", "itemId": "call_1", "reason": None, "grantRoot": None}
        async with opened(tmp_path, policy="allow-edits") as session:
            events = await turn(
                session,
                f"send {json.dumps(born)}",
                f"notify item/started {json.dumps({'item': item})}",
                f"request item/fileChange/requestApproval {json.dumps(request)}",
                choose="decline",
            )
        (asked,) = of(events, ApprovalRequested)
        assert not asked.complete
        assert asked.diffs == ()

    async def test_a_stranger_s_request_is_refused(self, tmp_path: Path) -> None:
        """A thread nobody here knows is not answered for."""
        request = {**COMMAND, "threadId": "stranger"}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request item/commandExecution/requestApproval {json.dumps(request)}")
        assert answered(events) == {"decision": "decline"}
        assert of(events, ApprovalRequested) == []

    async def test_outside_a_turn_nothing_is_allowed(self, tmp_path: Path) -> None:
        """And the person is told."""
        late = {**COMMAND, "turnId": "another"}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request item/commandExecution/requestApproval {json.dumps(late)}")
        assert answered(events) == {"decision": "decline"}
        assert "coding.permission_outside_turn" in [event.code for event in of(events, Notice)]


class TestToolApprovals:
    """MCP tools ask through an elicitation of their server."""

    META: ClassVar = {
        "codex_approval_kind": "mcp_tool_call",
        "persist": ["session", "always"],
        "tool_name": "write",
        "tool_params": {"path": "x"},
    }
    REQUEST: ClassVar = {
        "serverName": "files",
        "mode": "form",
        "message": "Allow?",
        "requestedSchema": {"properties": {}},
        "_meta": META,
    }

    @pytest.mark.parametrize(
        ("choice", "reply"),
        [
            ("accept", {"action": "accept", "content": None, "_meta": None}),
            ("acceptForSession", {"action": "accept", "content": None, "_meta": {"persist": "session"}}),
            ("decline", {"action": "decline", "content": None, "_meta": None}),
            ("", {"action": "cancel", "content": None, "_meta": None}),
        ],
    )
    async def test_a_tool_s_approval(self, choice: str, reply: dict[str, Any], tmp_path: Path) -> None:
        """Never for good: ``always`` is not offered."""
        async with opened(tmp_path) as session:
            events = await turn(session, f"request mcpServer/elicitation/request {json.dumps(self.REQUEST)}", choose=choice)
        assert answered(events) == reply
        (asked,) = of(events, ApprovalRequested)
        assert (asked.title, asked.tool) == ("files.write", "mcp:files.write")
        assert json.loads(asked.command) == {"tool": "files.write", "arguments": {"path": "x"}}
        assert not decide("allow-edits", asked, inside_lexically("/")).allowed

    async def test_a_form_is_a_question(self, tmp_path: Path) -> None:
        """Fields of every kind; values go back as they are."""
        schema = {
            "type": "object",
            "required": ["n"],
            "properties": {
                "n": {"type": "integer", "title": "Number"},
                "b": {"type": "boolean"},
                "s": {"type": "string", "oneOf": [{"const": "x", "title": "X"}]},
                "e": {"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"]},
                "m": {"type": "array", "items": {"enum": ["p"]}},
                "t": {"type": "string"},
            },
        }
        request = {"serverName": "s", "mode": "form", "message": "Which?", "requestedSchema": schema, "_meta": None}
        async with opened(tmp_path) as session:
            events = await turn(
                session,
                f"request mcpServer/elicitation/request {json.dumps(request)}",
                choose=lambda asked: Answer(values={"n": 3}),
            )
        (question,) = of(events, QuestionAsked)
        kinds = [(each.name, each.type, each.required, each.options) for each in question.fields]
        assert kinds == [
            ("n", "number", True, ()),
            ("b", "boolean", False, ()),
            ("s", "select", False, (("x", "X"),)),
            ("e", "select", False, (("a", "A"), ("b", "B"))),
            ("m", "multiselect", False, (("p", "p"),)),
            ("t", "text", False, ()),
        ]
        assert answered(events) == {"action": "accept", "content": {"n": 3}, "_meta": None}

    @pytest.mark.parametrize(
        "more",
        [{"mode": "url", "url": "https://example.org"}, {"requestedSchema": {"properties": {"api_key": {"type": "string"}}}}],
    )
    async def test_what_does_not_belong_in_a_chat_is_not_asked(self, more: dict[str, Any], tmp_path: Path) -> None:
        """No address to log in at, no secret."""
        request = {"serverName": "s", "mode": "form", "message": "Log in", "requestedSchema": {}, "_meta": None, **more}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request mcpServer/elicitation/request {json.dumps(request)}")
        assert answered(events)["action"] == "decline"
        assert of(events, QuestionAsked) == []


class TestQuestions:
    """``requestUserInput``: the model asks the person."""

    QUESTIONS: ClassVar = [
        {"id": "q1", "header": "H", "question": "Which one?", "options": [{"label": "A", "description": "first"}]},
        {"id": "q2", "header": "H", "question": "Why?", "isOther": True, "options": [{"label": "B", "description": ""}]},
    ]

    async def test_a_question_is_asked_and_answered(self, tmp_path: Path) -> None:
        """With options as a choice; where another answer is allowed, that is said."""
        request = {"itemId": "i", "questions": self.QUESTIONS, "isBlocking": True}
        async with opened(tmp_path) as session:
            events = await turn(
                session,
                f"request item/tool/requestUserInput {json.dumps(request)}",
                choose=lambda asked: Answer(values={"q1": "A", "q2": ["because"], "other": "x"}),
            )
        (question,) = of(events, QuestionAsked)
        assert [(each.name, each.type, each.custom) for each in question.fields] == [
            ("q1", "select", False),
            ("q2", "select", True),
        ]
        assert [each.options for each in question.fields] == [(("A", "A"),), (("B", "B"),)]
        assert answered(events) == {"answers": {"q1": {"answers": ["A"]}, "q2": {"answers": ["because"]}}}

    async def test_nobody_s_answer_is_no_answer(self, tmp_path: Path) -> None:
        """While nobody can be asked, the model hears that there is none."""
        request = {"itemId": "i", "questions": self.QUESTIONS, "isBlocking": True}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request item/tool/requestUserInput {json.dumps(request)}")
        assert answered(events) == {"answers": {}}

    async def test_a_secret_is_never_asked_for(self, tmp_path: Path) -> None:
        """It would stand in the chat."""
        request = {"itemId": "i", "questions": [{"id": "q", "question": "Password?", "header": "H", "isSecret": True}]}
        async with opened(tmp_path) as session:
            events = await turn(session, f"request item/tool/requestUserInput {json.dumps(request)}")
        assert answered(events) == {"answers": {}}
        assert "coding.secret_asked" in [event.code for event in of(events, Notice)]


class TestTheRest:
    """What nobody serves is refused, never allowed."""

    @pytest.mark.parametrize(
        ("method", "reply"),
        [
            ("item/permissions/requestApproval", {"permissions": {}, "scope": "turn"}),
            ("applyPatchApproval", {"decision": {"denied": {"rejection": "The client does not serve this kind of request."}}}),
            ("execCommandApproval", {"decision": {"denied": {"rejection": "The client does not serve this kind of request."}}}),
        ],
    )
    async def test_requests_of_a_known_kind_are_refused_in_their_own_words(
        self, method: str, reply: dict[str, Any], tmp_path: Path
    ) -> None:
        """A refusal of the right shape; the turn goes on."""
        async with opened(tmp_path) as session:
            assert answered(await turn(session, f"request {method} {{}}")) == reply

    @pytest.mark.parametrize(
        "method", ["account/chatgptAuthTokens/refresh", "attestation/generate", "brand/new", "currentTime/read"]
    )
    async def test_everything_else_is_an_error(self, method: str, tmp_path: Path) -> None:
        """Codex treats an error as a refusal."""
        async with opened(tmp_path) as session:
            assert answered(await turn(session, f"request {method} {{}}"))["error"]["code"] == -32601

    async def test_a_tool_nobody_offered_answers_in_words(self, tmp_path: Path) -> None:
        """A thread may remember tools of an earlier run."""
        call = {"callId": "c", "tool": "old", "arguments": {}}
        async with opened(tmp_path) as session:
            reply = answered(await turn(session, f"request item/tool/call {json.dumps(call)}"))
        assert reply["success"] is False
        assert "not available" in reply["contentItems"][0]["text"]

    async def test_a_cancelled_turn_refuses_what_it_had_asked(self, tmp_path: Path) -> None:
        """Nothing is allowed behind the person's back, and nothing waits for ever."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"approve {json.dumps(COMMAND)}\nwait"))
            (asked,) = of(await until(session, ApprovalRequested), ApprovalRequested)
            await session.interrupt()
            assert not await session.answer(asked.request_id, Answer("accept"))
            assert ended(await rest_of_turn(session)).stop_reason == "cancelled"
        replies = [line["result"] for line in log_of(tmp_path) if "result" in line]
        assert replies == [{"decision": "cancel"}]


class TestMcpServers:
    """How tool servers are told to Codex."""

    async def test_servers_travel_over_the_connection_and_nowhere_else(self, tmp_path: Path) -> None:
        """``http_headers`` is the key that Codex reads; no secret is on the command line."""
        servers = (
            McpServer("one", "http", url="http://127.0.0.1:1/mcp", headers={"Authorization": "Bearer canary-bearer"}),
            McpServer("two words", "stdio", command=("prog", "arg"), env={"T": "canary-env"}),
            McpServer("three", "sse", url="http://127.0.0.1:1/sse"),
        )
        async with opened(tmp_path, mcp_servers=servers) as session:
            events = await turn(session, "say x")
        (params,) = received(tmp_path, "thread/start")
        assert params["config"]["mcp_servers"] == {
            "one": {"url": "http://127.0.0.1:1/mcp", "http_headers": {"Authorization": "Bearer canary-bearer"}},
            "two_words": {"command": "prog", "args": ["arg"], "env": {"T": "canary-env"}},
        }
        (refused,) = [event for event in of(events, Notice) if event.code == "coding.mcp_servers_refused"]
        assert refused.params["names"] == "three"
        assert "canary" not in json.dumps([line["argv"] for line in log_of(tmp_path)])

    async def test_a_server_that_does_not_start_is_said(self, tmp_path: Path) -> None:
        """The turn goes on without its tools."""
        failed = {"name": "one", "status": "failed", "error": "x"}
        async with opened(tmp_path) as session:
            events = await turn(session, f"notify mcpServer/startupStatus/updated {json.dumps(failed)}", "say on")
        assert text(events) == "on"
        assert "coding.mcp_servers_refused" in [event.code for event in of(events, Notice)]

    @pytest.mark.parametrize(("bridge", "key"), [("http", "url"), ("stdio", "command")])
    async def test_the_form_decides_how_langbot_s_tools_are_reached(self, bridge: str, key: str, tmp_path: Path) -> None:
        """LangBot's own are approved: what they offer was granted by the host."""
        server = McpServer("langbot_agent", "http", url="http://127.0.0.1:1/mcp", headers={"Authorization": "Bearer c"})
        async with opened(tmp_path, mcp_servers=(server,), options={"bridge": bridge}) as session:
            await turn(session, "say x")
            assert not session.capabilities.live_mcp
        (params,) = received(tmp_path, "thread/start")
        entry = params["config"]["mcp_servers"]["langbot_agent"]
        assert key in entry
        assert entry["default_tools_approval_mode"] == "approve"

    async def test_an_endpoint_that_does_not_answer_is_left_to_codex(self, tmp_path: Path) -> None:
        """The session opens all the same."""
        server = McpServer("langbot_agent", "http", url="http://127.0.0.1:1/mcp")
        async with opened(tmp_path, mcp_servers=(server,)) as session:
            await turn(session, "say x")
        (params,) = received(tmp_path, "thread/start")
        assert "dynamicTools" not in params
        assert "langbot_agent" in params["config"]["mcp_servers"]
