"""The pure parts of the Codex driver: turns, diffs, commands, approvals, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.diffs import Changes, changes_of
from agent.requests import CHOICES, ServerRequests, refusal_of
from agent.translate import Translator, kind_of, shown_command
from agent.turns import TurnTracker
from pkg import limits
from pkg.agent_api import Answer, ApprovalRequested, FileDiff, TextDelta, ToolFinished, ToolStarted
from pkg.progress import Progress

WHOLE = Changes((FileDiff("/w/a", None, "x"),), ("/w/a",), True)


class TestTurns:
    """Whose end is whose."""

    def test_an_end_of_a_former_turn_does_not_end_one_that_is_starting(self) -> None:
        """Not even before the new one has a name."""
        tracker = TurnTracker()
        tracker.start()
        assert tracker.named("one") is None
        assert tracker.completed({"id": "one", "status": "completed"}) is not None
        tracker.start()
        assert not tracker.belongs("one")
        assert tracker.completed({"id": "one", "status": "completed"}) is None
        assert tracker.named("two") is None
        end = tracker.completed({"id": "two", "status": "interrupted"})
        assert end is not None
        assert end.status == "interrupted"

    def test_the_first_end_counts(self) -> None:
        """Before the answer to its start, too."""
        tracker = TurnTracker()
        tracker.start()
        assert tracker.completed({"id": "one", "status": "failed"}) is None
        assert tracker.completed({"id": "one", "status": "completed"}) is None
        end = tracker.named("one")
        assert end is not None
        assert end.status == "failed"
        assert not tracker.open

    def test_an_end_held_for_another_name_is_none(self) -> None:
        """The answer to the start decides which turn is ours."""
        tracker = TurnTracker()
        tracker.start()
        assert tracker.completed({"id": "stranger", "status": "completed"}) is None
        assert tracker.named("mine") is None
        assert tracker.open

    @given(
        st.lists(st.tuples(st.sampled_from(["start", "named", "completed", "belongs"]), st.sampled_from("abc")), max_size=30)
    )
    @settings(deadline=None)
    def test_a_start_has_at_most_one_end(self, steps: list[tuple[str, str]]) -> None:
        """Whatever comes in whatever order."""
        tracker, starts, ends = TurnTracker(), 0, 0
        for step, name in steps:
            match step:
                case "start":
                    if not tracker.open:
                        tracker.start()
                        starts += 1
                case "named":
                    ends += tracker.named(name) is not None
                case "completed":
                    ends += tracker.completed({"id": name}) is not None
                case _:
                    tracker.belongs(name)
        assert starts - ends == (1 if tracker.open else 0)


class TestDiffs:
    """File changes."""

    def test_more_diffs_than_are_shown_are_not_the_whole(self) -> None:
        """The rest is known to be missing."""
        change = {"path": "/w/a", "kind": {"type": "add"}, "diff": "x"}
        found = changes_of([change] * (limits.ACP_DIFFS + 1))
        assert len(found.diffs) == limits.ACP_DIFFS
        assert not found.whole
        assert changes_of([change] * limits.ACP_DIFFS).whole

    def test_a_file_too_large_to_show_is_not_whole(self) -> None:
        """An approval would show less than is done."""
        huge = "x" * (limits.ACP_DIFF_CHARS + 1)
        for kind, text in (("add", huge), ("delete", huge), ("update", f"@@ -1 +1 @@\n-{huge}\n+y\n")):
            assert not changes_of([{"path": "/w/a", "kind": {"type": kind}, "diff": text}]).whole

    def test_a_moved_file_names_both_places(self) -> None:
        """Where it goes counts for the workspace, too."""
        change = {"path": "/w/a", "kind": {"type": "update", "move_path": "/etc/b"}, "diff": "@@ -1 +1 @@\n-x\n+y\n"}
        assert changes_of([change]).paths == ("/w/a", "/etc/b")

    @pytest.mark.parametrize(
        "change",
        [
            {"path": "/w/a", "kind": {"type": "brandNew"}, "diff": "x"},
            {"path": "", "kind": {"type": "add"}, "diff": "x"},
            {"path": "/w/a", "kind": {"type": "update"}, "diff": "no hunk at all"},
            {"path": "/w/a", "diff": "x"},
            7,
        ],
    )
    def test_what_is_not_understood_is_not_whole(self, change: Any) -> None:
        """Never taken for harmless."""
        assert not changes_of([change]).whole

    def test_nothing_is_not_whole(self) -> None:
        """An approval of no change shows nothing."""
        given_: tuple[Any, ...] = ([], None, {}, "x")
        for nothing in given_:
            assert not changes_of(nothing).whole

    @given(
        st.lists(st.text(alphabet="ab \n", max_size=5), max_size=8), st.lists(st.text(alphabet="ab \n", max_size=5), max_size=8)
    )
    def test_a_hunk_is_its_lines_before_and_after(self, old: list[str], new: list[str]) -> None:
        """Whatever the lines hold."""
        before = [line.replace("\n", "") + "\n" for line in old]
        after = [line.replace("\n", "") + "\n" for line in new]
        text = "@@ -1 +1 @@\n" + "".join(f"-{line}" for line in before) + "".join(f"+{line}" for line in after)
        found = changes_of([{"path": "/w/a", "kind": {"type": "update"}, "diff": text}])
        assert found.diffs == (FileDiff("/w/a", "".join(before), "".join(after)),)


class TestCommands:
    """What people read of a command."""

    @pytest.mark.parametrize(
        ("given_", "shown"),
        [
            ("/bin/bash -lc 'ls -l'", "ls -l"),
            ("bash -c \"echo 'a b'\"", "echo 'a b'"),
            ("/usr/bin/zsh -lc pwd", "pwd"),
            ("ls -l", "ls -l"),
            ("bash -lc 'a' extra", "bash -lc 'a' extra"),
            ("/opt/bash-like -lc x", "/opt/bash-like -lc x"),
            ("bash -lc 'unclosed", "bash -lc 'unclosed"),
            ("", ""),
        ],
    )
    def test_the_shell_that_only_carries_it_is_left_out(self, given_: str, shown: str) -> None:
        """And nothing else is."""
        assert shown_command(given_) == shown

    @pytest.mark.parametrize(
        ("actions", "kind"),
        [
            ([{"type": "read"}], "read"),
            ([{"type": "read"}, {"type": "search"}], "search"),
            ([{"type": "listFiles"}], "search"),
            ([{"type": "read"}, {"type": "unknown"}], "execute"),
            ([], "execute"),
            (None, "execute"),
        ],
    )
    def test_only_looking_is_not_executing(self, actions: Any, kind: str) -> None:
        """Only where Codex recognised every part of it."""
        assert kind_of(actions) == kind


class TestApprovals:
    """What is offered as whole."""

    @staticmethod
    def ask(method: str, params: dict[str, Any], changes: Changes | None = None) -> ApprovalRequested:
        """The event of one request."""
        outcome = ServerRequests(lambda item: changes).asked(1, method, params, in_turn=True)
        (event,) = outcome.events
        assert isinstance(event, ApprovalRequested)
        return event

    def test_a_patch_that_also_wants_a_directory_is_more_than_its_diff(self) -> None:
        """The directory is named, and the change is not offered as whole."""
        plain = self.ask("item/fileChange/requestApproval", {"itemId": "x"}, WHOLE)
        wide = self.ask("item/fileChange/requestApproval", {"itemId": "x", "grantRoot": "/etc"}, WHOLE)
        assert plain.complete
        assert not wide.complete
        assert "/etc" in wide.paths

    def test_too_many_open_questions_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A flood of them fills no memory."""
        monkeypatch.setattr(limits, "CODEX_REQUESTS", 2)
        requests = ServerRequests(lambda item: None)
        outcomes = [
            requests.asked(number, "item/commandExecution/requestApproval", {"command": "x"}, in_turn=True)
            for number in range(3)
        ]
        assert [outcome.reply is None for outcome in outcomes] == [True, True, False]
        assert outcomes[2].reply is not None
        assert outcomes[2].reply.result == {"decision": "decline"}

    def test_no_refusal_allows_anything(self) -> None:
        """Of any request there is."""
        for choice in CHOICES:
            assert choice.kind not in ("allow_always", "reject_always")
        for method in ("item/commandExecution/requestApproval", "item/fileChange/requestApproval"):
            assert refusal_of(method) == {"decision": "decline"}
        assert refusal_of("brand/new") is None

    def test_two_requests_with_one_id_are_two_questions(self) -> None:
        """Ids of ours are never the server's."""
        requests = ServerRequests(lambda item: None)
        names = []
        for _ in range(2):
            outcome = requests.asked(0, "item/commandExecution/requestApproval", {"command": "x"}, in_turn=True)
            (event,) = outcome.events
            assert isinstance(event, ApprovalRequested)
            names.append(event.request_id)
        assert len(set(names)) == 2
        assert requests.answer(names[0], Answer("accept")) is not None
        assert requests.answer(names[0], Answer("accept")) is None


class TestBounds:
    """However many items, however long their output."""

    def test_a_command_s_output_is_cut_and_says_so(self) -> None:
        """The most that is kept."""
        translator = Translator()
        translator.begin_turn()
        item = {"type": "commandExecution", "id": "c", "command": "x", "status": "inProgress"}
        translator.notification("item/started", {"item": item})
        for _ in range(5):
            translator.notification("item/commandExecution/outputDelta", {"itemId": "c", "delta": "y" * 50_000})
        done = translator.notification("item/completed", {"item": {**item, "status": "completed"}})
        (finished,) = [event for event in done if isinstance(event, ToolFinished)]
        assert len(finished.output) == limits.CODEX_ITEM_OUTPUT_CHARS
        assert finished.truncated

    def test_items_are_forgotten_and_every_tool_call_ends_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An open one beyond the bound ends as cancelled, the others at the end of their turn."""
        monkeypatch.setattr(limits, "CODEX_ITEMS", 10)
        translator = Translator()
        translator.begin_turn()
        told = []
        for number in range(30):
            item = {"type": "commandExecution", "id": f"c{number}", "command": "x", "status": "inProgress"}
            told += translator.notification("item/started", {"item": item})
            told += translator.notification("item/agentMessage/delta", {"itemId": f"m{number}", "delta": "t"})
            assert len(translator._items) <= 10
        told += translator.end_turn()
        started = [event.tool_call_id for event in told if isinstance(event, ToolStarted)]
        ended = [event.tool_call_id for event in told if isinstance(event, ToolFinished)]
        assert len(started) == 30
        assert sorted(ended) == sorted(started)

    def test_text_of_one_item_is_not_taken_for_another_s(self) -> None:
        """Two messages at once."""
        translator = Translator()
        translator.begin_turn()
        events = []
        for name, text in (("a", "1"), ("b", "2"), ("a", "3")):
            events += translator.notification("item/agentMessage/delta", {"itemId": name, "delta": text})
        events += translator.notification("item/completed", {"item": {"type": "agentMessage", "id": "a", "text": "134"}})
        texts = [(event.message_id, event.text) for event in events if isinstance(event, TextDelta)]
        assert texts == [("a", "1"), ("b", "2"), ("a", "3"), ("a", "4")]


def test_a_retry_is_shown_as_progress_until_the_next_sign_of_life() -> None:
    """One status line, in the person's language; no message of its own."""
    progress = Progress("status", "en_US")
    translator = Translator()
    translator.begin_turn()
    error = {"message": "Reconnecting... 2/5", "codexErrorInfo": None}
    for event in translator.notification("error", {"error": error, "willRetry": True}):
        progress.event(event, 0.0)
    assert progress.lines(0.0) == "The model cannot be reached, trying again (2/5)…"
    for event in translator.notification("item/agentMessage/delta", {"itemId": "m", "delta": "back"}):
        progress.event(event, 1.0)
    assert progress.lines(1.0) == "Working…"
