"""What an approval policy answers: never more than the agent offered, never a standing grant, nothing outside the workspace."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pkg import texts
from pkg.agent_api import ApprovalRequested, Choice, ChoiceKind, FileDiff, QuestionAsked, ToolKind
from pkg.approval_policy import (
    Decision,
    decide,
    grant,
    inside_lexically,
    inside_really,
    judge,
    names_lexically,
    names_really,
    refusal,
    unanswered,
)

KINDS: tuple[ChoiceKind, ...] = ("allow_always", "allow_session", "allow_once", "reject_always", "reject_once")
TOOL_KINDS: tuple[ToolKind, ...] = ("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "mode", "other")
ALL = tuple(Choice(kind, kind, kind) for kind in KINDS)
INSIDE = inside_lexically("/ws")


def request(
    kind: ToolKind = "edit", *, choices: tuple[Choice, ...] = ALL, paths: tuple[str, ...] = ("/ws/a",), **more: object
) -> ApprovalRequested:
    return ApprovalRequested("r", "Edit a", kind, choices, paths=paths, cwd="/ws", **more)  # type: ignore[arg-type]


def test_allow_all_grants_once_and_never_for_good() -> None:
    """Our rule: a policy is not a grant that outlives it."""
    assert decide("allow-all", request("execute", command="make"), INSIDE).answer.choice_id == "allow_once"


def test_a_grant_for_the_session_is_used_only_when_no_single_one_is_offered() -> None:
    """Our rule: the smallest grant that lets the action happen."""
    offered = tuple(choice for choice in ALL if choice.kind != "allow_once")
    assert decide("allow-all", request(choices=offered), INSIDE).answer.choice_id == "allow_session"


def test_an_offer_of_standing_grants_only_is_refused_and_told() -> None:
    """Our rule: ``allow_always`` is never chosen silently, not even under allow-all."""
    offered = tuple(choice for choice in ALL if choice.kind in {"allow_always", "reject_once"})
    decision = decide("allow-all", request(choices=offered), INSIDE)
    assert (decision.allowed, decision.answer.choice_id, decision.text_key) == (
        False,
        "reject_once",
        "approval.no_single_grant",
    )


@pytest.mark.parametrize("policy", ["ask", "deny", "", "acceptEdits", "never", "ALLOW-ALL"])
@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_every_other_policy_denies_and_says_so(policy: str, kind: ToolKind) -> None:
    """Our rule: ask, deny and unknown values allow nothing; the person reads what was denied."""
    decision = decide(policy, request(kind), INSIDE)
    assert not decision.allowed
    assert decision.answer.choice_id == "reject_once"
    assert "Edit a" in texts.render(decision.text_key, "en_US", decision.params)


def test_without_a_single_refusal_the_request_is_cancelled() -> None:
    """Our rule: refusing for good is a standing answer too."""
    offered = tuple(choice for choice in ALL if choice.kind in {"allow_once", "reject_always"})
    assert decide("deny", request(choices=offered), INSIDE).answer.choice_id == ""


@pytest.mark.parametrize("kind", ["read", "edit", "search", "think", "move"])
def test_allow_edits_lets_file_work_inside_the_workspace_happen(kind: ToolKind) -> None:
    """Our rule."""
    decision = decide("allow-edits", request(kind), INSIDE)
    assert (decision.allowed, decision.text_key) == (True, "")


@pytest.mark.parametrize("kind", ["execute", "delete", "fetch", "mode", "other"])
def test_allow_edits_denies_what_is_no_edit(kind: ToolKind) -> None:
    """Our rule."""
    decision = decide("allow-edits", request(kind), INSIDE)
    assert (decision.allowed, decision.text_key) == (False, "approval.not_an_edit")


@pytest.mark.parametrize(
    "asked",
    [
        request(paths=("/etc/passwd",)),
        request(paths=("/ws/a", "../b")),
        request(paths=("/ws/../etc/passwd",)),
        request(paths=("/wsx/a",)),
        request(paths=("/ws/a",), diffs=(FileDiff("/etc/passwd", None, "x"),)),
        request(paths=()),
        request(complete=False),
        request("read", command="cat a"),
        request("edit", command="patch"),
    ],
)
def test_allow_edits_denies_what_it_cannot_see_to_be_inside(asked: ApprovalRequested) -> None:
    """Our rule: outside paths, no paths, half-described actions and commands called "edit" are denied."""
    assert not decide("allow-edits", asked, INSIDE).allowed


def test_a_link_out_of_a_local_workspace_is_outside(tmp_path: Path) -> None:
    """Our rule: real paths decide where they can be known."""
    root, outside = tmp_path / "ws", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    inside = inside_really(str(root))
    assert inside("new/file", str(root))
    assert not inside("link/file", str(root))
    assert not inside(str(outside / "file"), "")


def test_in_a_remote_home_only_relative_paths_are_inside() -> None:
    """Our rule: where the root is known only to the other machine, an absolute path proves nothing."""
    inside = inside_lexically("")
    assert inside("a/b", "")
    assert inside("a/../b", "")
    assert not inside("../b", "")
    assert not inside("/home/ann/a", "")


def test_a_denied_command_is_quoted_bounded_and_on_one_line() -> None:
    """Our rule: a text in the chat has a bound whatever the agent asks."""
    decision = decide("ask", request("execute", command="echo a\n" + "x" * 5000), INSIDE)
    assert decision.params["action"].startswith("echo a xxx")
    assert len(decision.params["action"]) <= 300


def test_a_question_is_cancelled_and_repeated_in_the_chat() -> None:
    """Known gap: nobody can be asked during a run."""
    decision = unanswered(QuestionAsked("q", "Which port?"))
    assert decision == Decision(decision.answer, False, "question.cannot_ask", {"question": "Which port?"})
    assert (decision.answer.choice_id, dict(decision.answer.values)) == ("", {})


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_what_a_policy_leaves_open_is_asked_about(kind: ToolKind) -> None:
    """Our rule: ``ask``, vendor values and what is no edit under ``allow-edits`` are questions for a person."""
    names = names_lexically("/ws")
    edits = kind in ("read", "edit", "search", "think", "move")
    expected = {"ask": "ask", "on-request": "ask", "never": "ask", "allow-all": "allow", "deny": "deny"}
    for policy, verdict in {**expected, "allow-edits": "allow" if edits else "ask"}.items():
        found = judge(policy, (), request(kind), INSIDE, names)
        assert (found.verdict, found.by) == (verdict, f"policy {policy}")
        assert bool(found.text_key) == (verdict != "allow")
        if verdict != "allow":
            told = refusal(request(kind), found)
            assert (told.answer.choice_id, told.text_key) == ("reject_once", found.text_key)
            assert "Edit a" in texts.render(told.text_key, "en_US", told.params)


def test_a_grant_is_the_single_one_or_none() -> None:
    """Our rule: what a person allows once is allowed once; neither a session's nor a standing grant stands in for it."""
    answer = grant(request())
    assert answer is not None and answer.choice_id == "allow_once"
    standing = request(choices=tuple(choice for choice in ALL if choice.kind != "allow_once"))
    assert grant(standing) is None
    refused = refusal(standing, judge("allow-all", (), standing, INSIDE, names_lexically("/ws")))
    assert (refused.answer.choice_id, refused.allowed, refused.text_key) == ("reject_once", False, "approval.no_single_grant")


@pytest.mark.parametrize(
    ("root", "path", "cwd", "names", "absolute"),
    [
        ("/ws", "a//b/../c", "", ("a/c",), ("/ws/a/c",)),
        ("/ws", "/ws/a", "/x", ("a",), ("/ws/a",)),
        ("/ws", "a", "/ws/sub", ("sub/a",), ("/ws/sub/a",)),
        ("/ws", "a", "sub", ("sub/a",), ("/ws/sub/a",)),
        ("/ws", ".", "", ("",), ("/ws",)),
        ("/ws", "../x", "", ("/x",), ("/x",)),
        ("/ws", "//ws/a", "", ("a",), ("/ws/a",)),
        ("/", "a", "", ("a",), ("/a",)),
        ("", "a/../b", "", ("b",), ()),
        ("", "../b", "", (), ()),
        ("", "/etc/x", "", ("/etc/x",), ("/etc/x",)),
        ("/ws", "~/a", "", (), ()),
        ("/ws", "file:///ws/a", "", (), ()),
    ],
)
def test_the_names_of_a_file_on_another_machine(
    root: str, path: str, cwd: str, names: tuple[str, ...], absolute: tuple[str, ...]
) -> None:
    """Our rule: normalised, below the workspace or absolute; none where it cannot be told."""
    target = names_lexically(root)(path, cwd)
    assert (target.names, target.absolute, target.directory) == (names, absolute, None)


def test_the_names_of_a_file_on_this_machine(tmp_path: Path) -> None:
    """Our rule: as it is written and as it is."""
    (tmp_path / "ws" / "real").mkdir(parents=True)
    (tmp_path / "ws" / "link").symlink_to("real")
    target = names_really(str(tmp_path / "ws"))("link", "")
    assert (set(target.names), target.directory) == ({"link", "real"}, True)
    assert set(names_really(str(tmp_path / "ws"))("link/../x", "").names) == {"x"}
    assert names_really(str(tmp_path / "ws"))("nothing", "").directory is False


@given(
    policy=st.sampled_from(["ask", "deny", "allow-edits", "allow-all", "other"]),
    kind=st.sampled_from(TOOL_KINDS),
    kinds=st.permutations(KINDS).flatmap(lambda order: st.integers(0, len(order)).map(lambda n: order[:n])),
    complete=st.booleans(),
    paths=st.lists(st.sampled_from(["/ws/a", "a", "/etc", "../x"]), max_size=3),
)
def test_the_answer_is_always_an_offered_single_or_session_choice_or_cancelled(
    policy: str, kind: ToolKind, kinds: list[ChoiceKind], complete: bool, paths: list[str]
) -> None:
    """Our rule, over all combinations."""
    choices = tuple(Choice(f"id-{number}", each, each) for number, each in zip(itertools.count(), kinds, strict=False))
    decision = decide(policy, request(kind, choices=choices, paths=tuple(paths), complete=complete), INSIDE)
    chosen = {choice.choice_id: choice.kind for choice in choices}.get(decision.answer.choice_id)
    assert chosen in ({"allow_once", "allow_session"} if decision.allowed else {"reject_once", None})
    assert decision.allowed == (decision.text_key == "")


@pytest.mark.parametrize(
    "path", ["~/.bashrc", "~root/x", "file:///etc/passwd", "FILE:/etc/x", "$HOME/x", "a/${HOME}/x", "a\x00b"]
)
@pytest.mark.parametrize("root", ["/ws", ""])
def test_a_name_that_an_agent_may_read_differently_is_inside_nothing(tmp_path: Path, path: str, root: str) -> None:
    """Our rule: only a plain path is judged as one; agents expand homes and variables and take URIs."""
    assert not inside_really(str(tmp_path))(path, "")
    assert not inside_lexically(root)(path, "")
    assert not inside_lexically(root)("x", path)
    assert not decide("allow-edits", request(paths=(path,)), inside_really(str(tmp_path))).allowed


@pytest.mark.parametrize(
    "path", [".git/config", "/ws/.git/hooks/pre-commit", "sub/.GIT/x", ".claude/settings.json", ".mcp.json"]
)
@pytest.mark.parametrize("kind", ["edit", "move"])
def test_changing_what_makes_programs_run_commands_is_no_edit(path: str, kind: ToolKind) -> None:
    """Our rule: git and the agents obey such files unasked, so writing one is running a command; reading one is not."""
    decision = decide("allow-edits", request(kind, paths=(path,)), INSIDE)
    assert (decision.allowed, decision.text_key) == (False, "approval.starts_programs")
    assert not decide("allow-edits", request(kind, paths=(), diffs=(FileDiff(path, None, "x"),)), INSIDE).allowed
    assert decide("allow-edits", request("read", paths=(path,)), INSIDE).allowed
    assert decide("allow-edits", request(kind, paths=(".github/x", ".gitignore", "git/config")), INSIDE).allowed
