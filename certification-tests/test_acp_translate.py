"""A session's updates as events, without any process: every habit of a known agent, one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import wire
from agent.translate import Translator
from pkg import limits
from pkg.agent_api import (
    AgentEvent,
    ApprovalRequested,
    FileDiff,
    Notice,
    PlanEntry,
    PlanUpdated,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    ToolStarted,
    UsageReported,
)


def update(kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"sessionId": "s", "update": {"sessionUpdate": kind, **fields}}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return update("agent_message_chunk", content={"type": "text", "text": text}, **fields)


def running() -> Translator:
    translator = Translator()
    translator.opened("s")
    translator.begin_turn()
    return translator


def feed(translator: Translator, *updates: dict[str, Any]) -> list[AgentEvent]:
    return [event for item in updates for event in translator.update(item)]


# ------------------------------------------------------------------ text


def test_text_and_thoughts_become_deltas_with_their_message_ids() -> None:
    """Protocol v1: agent_message_chunk and agent_thought_chunk, messageId where given."""
    events = feed(
        running(), said("a", messageId="m1"), update("agent_thought_chunk", content={"type": "text", "text": "t"}), said("b")
    )
    assert events == [TextDelta("a", "m1"), ThoughtDelta("t"), TextDelta("b", "")]


def test_empty_chunks_and_echoed_user_messages_are_nothing() -> None:
    """Known agent's habit: Claude Agent begins each message with an empty chunk; some echo the prompt."""
    assert feed(running(), said(""), update("user_message_chunk", content={"type": "text", "text": "hi"})) == []


def test_links_and_embedded_text_are_readable_and_pictures_are_noted() -> None:
    """Protocol v1: message chunks hold any content block."""
    events = feed(
        running(),
        update("agent_message_chunk", content={"type": "resource_link", "name": "a.txt", "uri": "file:///a.txt"}),
        update("agent_message_chunk", content={"type": "resource", "resource": {"uri": "x", "text": "body"}}),
        update("agent_message_chunk", content={"type": "image", "data": "AA==", "mimeType": "image/png"}),
    )
    assert events == [TextDelta("a.txt (file:///a.txt)"), TextDelta("body"), Notice("agent.content_image")]


@given(st.text(st.characters(codec="utf-16-le", exclude_categories=()), max_size=30), st.data())
def test_any_text_cut_between_utf16_units_comes_out_whole(text: str, data: st.DataObject) -> None:
    """Our rule: halves of a surrogate pair in two chunks are one character; what comes out can always be encoded."""
    units = text.encode("utf-16-le", "surrogatepass")
    cuts = sorted(2 * cut for cut in data.draw(st.lists(st.integers(0, len(units) // 2), max_size=5)))
    bounds = [0, *cuts, len(units)]
    pieces = [units[a:b].decode("utf-16-le", "surrogatepass") for a, b in itertools.pairwise(bounds)]
    translator = running()
    events = feed(translator, *(said(piece) for piece in pieces))
    events += translator.end_turn(failed=False).events
    out = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert out == units.decode("utf-16-le", "replace")
    out.encode("utf-8")


# ------------------------------------------------------------------ replay, other sessions, late updates


def test_nothing_of_a_replayed_history_becomes_an_event_before_the_first_prompt() -> None:
    """Known agents' habit: all replay on load, fast-agent on resume too; the gate is the first prompt, not the load call."""
    translator = Translator()
    translator.opened("s")
    replay = [
        update("user_message_chunk", content={"type": "text", "text": "old"}),
        said("old answer"),
        update("agent_thought_chunk", content={"type": "text", "text": "old thought"}),
        update("tool_call", toolCallId="t", title="old"),
        update("tool_call_update", toolCallId="t", status="completed"),
        update("plan", entries=[{"content": "old"}]),
    ]
    assert feed(translator, *replay) == []
    assert translator.replayed_user_messages == 1
    translator.begin_turn()
    assert feed(translator, said("new")) == [TextDelta("new")]


def test_updates_from_before_the_session_id_wait_for_it() -> None:
    """Known agents' habit: available_commands_update comes before, with or after the answer to session/new."""
    translator = Translator()
    commands = update("available_commands_update", availableCommands=[{"name": "init"}, {"name": "review"}])
    assert feed(translator, commands, {"sessionId": "other", "update": commands["update"]}) == []
    assert translator.opened("s") == [Notice("agent.commands", "/init, /review")]
    assert translator.commands == ("init", "review")


def test_updates_of_another_session_are_ignored() -> None:
    """Our rule: one process may speak of several sessions; only ours is heard."""
    assert feed(running(), {**said("x"), "sessionId": "other"}) == []


def test_text_after_a_turn_is_emitted_and_after_a_cancelled_turn_dropped() -> None:
    """Our rule: work that outlives its turn reaches people, nothing is heard after ``cancelled``."""
    translator = running()
    translator.end_turn(failed=False)
    assert feed(translator, said("later")) == [TextDelta("later")]
    translator.begin_turn()
    translator.cancel()
    translator.end_turn(failed=False)
    assert feed(translator, said("later"), update("tool_call", toolCallId="x", title="x", status="completed")) == []
    translator.begin_turn()
    assert feed(translator, said("next")) == [TextDelta("next")]


# ------------------------------------------------------------------ tools


def test_a_tool_call_starts_and_finishes_once_with_its_output_and_diff() -> None:
    """Protocol v1: tool_call, then updates that replace its fields."""
    diff = {"type": "diff", "path": "/w/a", "oldText": "x", "newText": "y"}
    events = feed(
        running(),
        update("tool_call", toolCallId="t", title="Edit a", kind="edit", status="in_progress", rawInput={"path": "/w/a"}),
        update("tool_call_update", toolCallId="t", status="in_progress"),
        update(
            "tool_call_update",
            toolCallId="t",
            status="completed",
            content=[diff, {"type": "content", "content": {"type": "text", "text": "ok"}}],
        ),
        update("tool_call_update", toolCallId="t", status="completed"),
    )
    assert events == [
        ToolStarted("t", "Edit a", "edit", {"path": "/w/a"}),
        ToolFinished("t", "completed", "Edit a", "ok", (FileDiff("/w/a", "x", "y"),)),
    ]


def test_a_bare_pending_call_is_announced_when_its_title_is_known() -> None:
    """Known agent's habit: Claude Agent first sends "Terminal" with empty input, then the command."""
    events = feed(
        running(),
        update("tool_call", toolCallId="t", title="Terminal", kind="execute", status="pending", rawInput={}, content=[]),
        update("tool_call_update", toolCallId="t", title="ls", rawInput={"command": "ls"}),
        update("tool_call_update", toolCallId="t"),
        update("tool_call_update", toolCallId="t", status="completed", rawOutput="files"),
    )
    assert events == [
        ToolStarted("t", "ls", "execute", {"command": "ls"}),
        ToolFinished("t", "completed", "ls", "files"),
    ]


def test_a_call_first_seen_in_an_update_is_started_without_a_title() -> None:
    """Known agents' habit: Gemini and Qwen send no tool_call before its update."""
    events = feed(running(), update("tool_call_update", toolCallId="t", status="failed", kind="execute"))
    assert events == [ToolStarted("t", "execute", "execute"), ToolFinished("t", "failed")]


def test_calls_left_open_are_cancelled_with_their_turn() -> None:
    """Known agents' habit: a cancelled Claude call stays pending, a Codex one in_progress; both are finished for people."""
    translator = running()
    feed(
        translator,
        update("tool_call", toolCallId="a", title="A", status="pending"),
        update("tool_call", toolCallId="b", title="B", status="in_progress", rawInput={"x": 1}),
    )
    events = translator.cancel()
    assert [(event.tool_call_id, event.status) for event in events if isinstance(event, ToolFinished)] == [
        ("a", "cancelled"),
        ("b", "cancelled"),
    ]
    assert feed(translator, update("tool_call_update", toolCallId="b", status="completed")) == []
    assert translator.end_turn(failed=False).events == ()


def test_an_id_used_again_gets_a_suffix() -> None:
    """Our rule: tool call ids in events are unique in their session, whatever the agent does."""
    translator = running()
    first = feed(translator, update("tool_call", toolCallId="t", title="A", status="completed"))
    translator.end_turn(failed=False)
    translator.begin_turn()
    second = feed(translator, update("tool_call", toolCallId="t", title="B", status="completed"))
    assert [event.tool_call_id for event in first if isinstance(event, ToolStarted)] == ["t"]
    assert [event.tool_call_id for event in second if isinstance(event, ToolStarted)] == ["t#2"]


def test_a_call_that_ends_after_its_turn_does_not_appear_again() -> None:
    """Known agent's habit: Codex lets a slow command go on after its turn and tells its end in the next one."""
    translator = running()
    feed(translator, update("tool_call", toolCallId="t", title="A", status="in_progress"))
    translator.end_turn(failed=False)
    translator.begin_turn()
    assert feed(translator, update("tool_call_update", toolCallId="t", status="completed")) == []


def test_the_number_of_remembered_calls_is_bounded() -> None:
    """Our rule: beyond ``ACP_TOOL_CALLS`` the oldest are forgotten, and what is open of them is ended for people."""
    translator = running()
    calls = [update("tool_call", toolCallId=str(n), title="A", status="in_progress") for n in range(limits.ACP_TOOL_CALLS + 2)]
    events = feed(translator, *calls)
    assert [event.tool_call_id for event in events if isinstance(event, ToolFinished)] == ["0", "1"]
    rest = translator.end_turn(failed=False).events
    assert len([event for event in rest if isinstance(event, ToolFinished)]) == limits.ACP_TOOL_CALLS


def test_terminals_nobody_opened_here_are_tolerated() -> None:
    """Known agent's habit: codex-acp names terminals of its own; the output then comes from the raw output."""
    events = feed(
        running(),
        update("tool_call", toolCallId="t", title="x", status="in_progress", content=[{"type": "terminal", "terminalId": "9"}]),
        update("tool_call_update", toolCallId="t", status="completed", rawOutput={"formatted_output": "out", "exit_code": 0}),
    )
    assert isinstance(events[-1], ToolFinished)
    assert events[-1].output == "out"


def test_outputs_diffs_and_inputs_are_bounded() -> None:
    """Our rule: what exceeds a bound is cut and says so."""
    big = "x" * (limits.ACP_DIFF_CHARS + 1)
    events = feed(
        running(),
        update("tool_call", toolCallId="t", title="x", kind="edit", status="in_progress", rawInput={"text": big}),
        update(
            "tool_call_update",
            toolCallId="t",
            status="completed",
            content=[
                {"type": "diff", "path": "p", "newText": big},
                {"type": "content", "content": {"type": "text", "text": big}},
            ],
        ),
    )
    started, finished = events
    assert isinstance(started, ToolStarted)
    assert len(started.input["truncated"]) == limits.ACP_TOOL_INPUT_BYTES
    assert isinstance(finished, ToolFinished)
    assert finished.truncated
    assert len(finished.output) == limits.ACP_TOOL_OUTPUT_CHARS
    assert finished.diffs[0].truncated
    assert len(finished.diffs[0].new_text) == limits.ACP_DIFF_CHARS


def test_unknown_kinds_of_tools_are_other_and_switch_mode_is_mode() -> None:
    """Protocol v1 kinds; unknown ones must not fail."""
    events = feed(
        running(),
        update("tool_call", toolCallId="a", title="A", kind="teleport", status="in_progress"),
        update("tool_call", toolCallId="b", title="B", kind="switch_mode", status="in_progress"),
        update("tool_call", toolCallId="c", title="C", kind=["odd"], status="in_progress"),
    )
    assert [event.kind for event in events if isinstance(event, ToolStarted)] == ["other", "mode", "other"]


# ------------------------------------------------------------------ permissions


OPTIONS = [
    {"optionId": "allow_always", "name": "Always", "kind": "allow_always"},
    {"optionId": "allow", "name": "Allow", "kind": "allow_once"},
    {"optionId": "reject", "name": "Reject", "kind": "reject_once"},
]


def ask(translator: Translator, call: dict[str, Any], options: Any = OPTIONS) -> tuple[list[AgentEvent], ApprovalRequested]:
    return translator.permission("a-1", {"sessionId": "s", "toolCall": call, "options": options})


def test_a_permission_creates_its_tool_call_when_it_comes_first() -> None:
    """Known agents' habit: Gemini and Qwen name the call only inside the request, and the command only in the title."""
    translator = running()
    events, request = ask(translator, {"toolCallId": "t", "title": "echo hi", "kind": "execute", "status": "pending"})
    assert events == [ToolStarted("t", "echo hi", "execute")]
    assert (request.command, request.complete, request.tool_call_id) == ("echo hi", True, "t")
    assert feed(translator, update("tool_call_update", toolCallId="t", status="completed"))[0] == ToolFinished(
        "t", "completed", "echo hi"
    )


def test_a_permission_for_a_known_call_does_not_start_it_twice() -> None:
    """Known agents' habit: Claude Agent and OpenCode announce the call before they ask."""
    translator = running()
    feed(
        translator,
        update("tool_call", toolCallId="t", title="ls", kind="execute", status="pending", rawInput={"command": "ls"}),
    )
    events, request = ask(translator, {"toolCallId": "t"})
    assert events == []
    assert request.command == "ls"
    assert [choice.kind for choice in request.choices] == ["allow_always", "allow_once", "reject_once"]


@pytest.mark.parametrize("announced", [True, False])
def test_what_a_person_is_told_when_asked_is_not_what_the_tool_says(announced: bool) -> None:
    """Known agents' habit: Codex and Gemini put their reasons into the call's content, and no other content comes after it."""
    translator = running()
    if announced:
        feed(translator, update("tool_call", toolCallId="t", title="ls", kind="execute", rawInput={"command": "ls"}))
    reason = {"type": "content", "content": {"type": "text", "text": "because"}}
    diff = {"type": "diff", "path": "/w/a", "oldText": None, "newText": "n"}
    request = ask(translator, {"toolCallId": "t", "content": [reason, diff]})[1]
    assert (request.reason, request.diffs) == ("because", (FileDiff("/w/a", None, "n"),))
    finished = feed(translator, update("tool_call_update", toolCallId="t", status="completed", rawOutput={"stdout": "file"}))[0]
    assert isinstance(finished, ToolFinished)
    assert (finished.output, finished.diffs) == ("file", request.diffs)


def test_a_permission_without_a_tool_call_is_asked_all_the_same() -> None:
    """Our rule: a request is shown by what it has."""
    events, request = ask(running(), {"title": "Do it?"})
    assert events == []
    assert (request.title, request.tool_call_id, request.complete) == ("Do it?", "", False)


def test_the_command_is_whole_or_the_request_is_incomplete() -> None:
    """Our rule: an action that cannot be shown whole is not offered as complete."""
    long = "x" * (limits.ACP_COMMAND_CHARS + 1)
    assert ask(running(), {"toolCallId": "a", "kind": "execute", "rawInput": {"command": long}})[1].complete is False
    assert ask(running(), {"toolCallId": "b", "kind": "execute", "title": "rm -rf …"})[1].complete is False
    assert ask(running(), {"toolCallId": "c", "kind": "edit", "locations": [{"path": "/w/a"}]})[1].complete is False
    shown = ask(running(), {"toolCallId": "d", "kind": "other", "title": "x", "rawInput": {"a": 1}})[1]
    assert (shown.command, shown.complete) == ('{"a":1}', True)
    vector = ask(running(), {"toolCallId": "e", "kind": "execute", "rawInput": {"command": ["sh", "-c", "a b"], "cwd": "/w"}})[
        1
    ]
    assert (vector.command, vector.cwd) == ("a b", "/w")


def test_an_edit_shows_its_diff_and_paths() -> None:
    """Protocol v1: diffs and locations of the call to be permitted."""
    call = {
        "toolCallId": "t",
        "kind": "edit",
        "title": "Edit",
        "locations": [{"path": "/w/a"}],
        "content": [{"type": "diff", "path": "/w/b", "oldText": None, "newText": "n"}],
    }
    request = ask(running(), call)[1]
    assert request.paths == ("/w/a", "/w/b")
    assert request.diffs == (FileDiff("/w/b", None, "n"),)
    assert (request.command, request.complete) == ("", True)


def test_options_of_unknown_meaning_are_not_offered() -> None:
    """Our rule: an option is chosen by its kind, so one without a known kind or with a repeated id cannot be."""
    options = [{"optionId": "x", "kind": "allow_forever"}, {"optionId": "y", "kind": "allow_once"}, *OPTIONS, *OPTIONS, 7]
    assert [choice.choice_id for choice in ask(running(), {"toolCallId": "t"}, options)[1].choices] == [
        "y",
        "allow_always",
        "allow",
        "reject",
    ]
    assert ask(running(), {"toolCallId": "t"}, "odd")[1].choices == ()


# ------------------------------------------------------------------ plan, usage, notices


def test_plan_usage_mode_title_and_config_are_events() -> None:
    """Protocol v1: the remaining stable kinds."""
    translator = running()
    events = feed(
        translator,
        update(
            "plan", entries=[{"content": "a", "status": "completed", "priority": "high"}, {"content": "b", "status": "odd"}]
        ),
        update("usage_update", used=5, size=10, cost={"amount": 0.25, "currency": "USD"}),
        update("usage_update", used=5, size=10, cost={"amount": 0.25, "currency": "USD"}),
        update("current_mode_update", currentModeId="plan"),
        update("session_info_update", title="Title"),
        update("config_option_update", configOptions=[{"id": "m"}]),
    )
    assert events == [
        PlanUpdated((PlanEntry("a", "completed", "high"), PlanEntry("b"))),
        UsageReported(context_used=5, context_size=10, cost="0.25 USD"),
        Notice("agent.mode", "plan"),
        Notice("agent.session_info", "Title"),
        Notice("agent.config", '[{"id":"m"}]'),
    ]
    assert (translator.mode, translator.title) == ("plan", "Title")


def test_unknown_kinds_are_kept_as_bounded_notices() -> None:
    """Our rule: nothing is silently dropped because it is new."""
    (event,) = feed(running(), update("compaction_update", status="in_progress", blob="x" * 100_000))
    assert isinstance(event, Notice)
    assert event.code == "agent.compaction_update"
    assert event.text.startswith('{"sessionUpdate":"compaction_update"')
    assert len(event.text) == limits.ACP_NOTICE_CHARS


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "sessionUpdate",
                        "content",
                        "type",
                        "text",
                        "toolCallId",
                        "status",
                        "entries",
                        "title",
                        "kind",
                        "rawInput",
                        "locations",
                        "path",
                        "options",
                        "optionId",
                        "availableCommands",
                        "name",
                        "used",
                        "cost",
                        "toolCall",
                    ]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=20,
    ),
    st.sampled_from(
        [
            "agent_message_chunk",
            "agent_thought_chunk",
            "tool_call",
            "tool_call_update",
            "plan",
            "usage_update",
            "available_commands_update",
            "current_mode_update",
            "config_option_update",
            "session_info_update",
            "new_kind",
        ]
    ),
)
def test_no_shape_of_an_update_raises(value: Any, kind: str) -> None:
    """Our rule: whatever the JSON, there is an event, a notice or nothing."""
    translator = running()
    translator.update(value)
    fields = value if isinstance(value, dict) else {"content": value, "toolCallId": "t", "entries": value}
    translator.update({"sessionId": "s", "update": {**fields, "sessionUpdate": kind}})
    translator.permission("p", value)
    translator.permission("q", fields)
    translator.end_turn(failed=False)


# ------------------------------------------------------------------ failures told as text


def test_an_api_error_told_as_text_and_as_failure_is_told_once() -> None:
    """Known agent's habit: Claude Agent says "API Error: …" and fails the prompt with the same text."""
    translator = running()
    events = feed(translator, said("API Error: 400 "), said("fake 400"), update("usage_update", used=1, size=2))
    assert [event for event in events if isinstance(event, TextDelta)] == []
    outcome = translator.end_turn(failed=True)
    assert (outcome.events, outcome.failure) == ((), "API Error: 400 fake 400")


@pytest.mark.parametrize("text", ["API Error: explained", '{"error": "is a key in this answer"}, as you can see'])
def test_an_answer_that_only_looks_like_an_error_is_delivered(text: str) -> None:
    """Our rule: held-back text is released by other text, a tool, or a good end."""
    translator = running()
    assert feed(translator, said(text)) == []
    assert translator.end_turn(failed=False).events == (TextDelta(text),)
    translator.begin_turn()
    events = feed(translator, said(text), update("tool_call", toolCallId="t", title="x", status="in_progress"))
    assert events[0] == TextDelta(text)


def test_a_raw_json_error_as_the_whole_answer_is_a_failure() -> None:
    """Known agent's habit: codex-acp 2.6 ends the turn well with the provider's error object as its text."""
    translator = running()
    text = '{"error": {"type": "fake", "message": "fake 400", "code": 400}}'
    assert feed(translator, said(text[:20]), said(text[20:])) == []
    assert translator.end_turn(failed=False).failure == text
    translator.begin_turn()
    feed(translator, said("As asked, the JSON:", messageId="a"), said(text, messageId="b"))
    outcome = translator.end_turn(failed=False)
    assert outcome.failure == ""
    assert outcome.events == (TextDelta(text, "b"),)


def test_an_endless_error_like_text_is_released_at_its_bound() -> None:
    """Our rule: at most ``ACP_HELD_TEXT_CHARS`` are held back."""
    translator = running()
    pieces = ['{"error":', *["x" * 1000] * (limits.ACP_HELD_TEXT_CHARS // 1000 + 2)]
    events = feed(translator, *(said(piece) for piece in pieces))
    events += translator.end_turn(failed=False).events
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "".join(pieces)


def test_what_unfinished_calls_carry_is_bounded_together() -> None:
    """Our rule: beyond ``ACP_HELD_TOOL_BYTES`` the oldest end early; what has ended weighs nothing."""
    translator = running()
    piece = "x" * (limits.ACP_HELD_TOOL_BYTES // 4)
    done = [update("tool_call", toolCallId=f"d{n}", title="A", rawInput={"a": piece}, status="completed") for n in range(10)]
    assert len([event for event in feed(translator, *done) if isinstance(event, ToolFinished)]) == 10
    calls = [update("tool_call", toolCallId=str(n), title="A", rawInput={"a": piece}, status="in_progress") for n in range(6)]
    events = feed(translator, *calls)
    ended = [event.tool_call_id for event in events if isinstance(event, ToolFinished)]
    assert ended == ["0", "1", "2"]
    assert translator._carried <= limits.ACP_HELD_TOOL_BYTES
    translator.end_turn(failed=False)
    assert translator._carried < limits.ACP_HELD_TOOL_BYTES // 100


def test_endless_ids_of_calls_are_kept_as_digests_and_stay_different() -> None:
    """Our rule: an id is remembered for the session, so its length is bounded."""
    translator = running()
    ids = ["x" * 1_000_000 + end for end in ("a", "b")]
    events = feed(translator, *(update("tool_call", toolCallId=each, title="A", status="completed") for each in ids))
    started = [event.tool_call_id for event in events if isinstance(event, ToolStarted)]
    assert len(set(started)) == 2
    assert max(map(len, translator._used_ids)) <= limits.ACP_ID_CHARS


@pytest.mark.parametrize(
    ("raw_input", "expected"),
    [
        ({"dir_path": "/etc"}, ("/etc",)),
        ({"paths": ["/a", "b", 3]}, ("/a", "b")),
        ({"targetFile": "x", "uri": "file:///etc"}, ("x", "file:///etc")),
        ({"pattern": "/etc/*", "include": ["../up", "src/*"]}, ("/etc/*", "../up")),
        ({"pattern": "a.*b", "glob": "**/*.py"}, ()),
        ({"file": "line one\nline two"}, ()),
    ],
)
def test_files_are_found_under_whatever_key_an_agent_names_them(raw_input: Any, expected: tuple[str, ...]) -> None:
    """Our rule: what a policy judges must hold every place a call names, also a pattern that leads out of the workspace."""
    assert wire.paths_of(None, raw_input) == expected
