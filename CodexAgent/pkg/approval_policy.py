"""What an approval policy answers when the agent asks, as a pure decision.

Guarantees: an answer is always one of the choices the agent offered or "cancelled"; a standing grant (``allow_always``) is
never chosen; ``deny`` and ``ask`` never allow anything; under ``allow-edits`` an action is allowed only when it is wholly
described, touches files and nothing else, and every file it names lies inside the workspace. A name that another program may
read differently (a home, a URI, a variable, a NUL) lies inside nothing, and changing what makes programs run commands (a
repository's own directory, the settings of agents and editors) is no edit.

``ask`` and vendor values this module does not know are denied with a text that says what was asked and how to change it,
because nobody can be asked in the middle of a run.
"""

from __future__ import annotations

import os
import posixpath
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pkg import limits
from pkg.agent_api import Answer, ApprovalRequested, ChoiceKind, QuestionAsked

ASK: Final = "ask"
ALLOW_ALL: Final = "allow-all"
ALLOW_EDITS: Final = "allow-edits"
DENY: Final = "deny"

_FILE_KINDS: Final = frozenset({"read", "edit", "move", "search", "think"})
_NEEDS_PATHS: Final = frozenset({"edit", "move"})
_STARTS_PROGRAMS: Final = frozenset(
    {
        *(".git", ".claude", ".codex", ".gemini", ".opencode", ".qwen", ".vscode", ".idea"),
        *(".mcp.json", ".envrc", "opencode.json", "opencode.jsonc"),
    }
)
"""Names in a workspace whose content other programs obey: git's hooks, filters and monitors, hooks, plugins and servers of
agents, tasks of editors. Git and the agents themselves read them unasked."""
_GRANTS: Final[tuple[ChoiceKind, ...]] = ("allow_once", "allow_session")
_REFUSALS: Final[tuple[ChoiceKind, ...]] = ("reject_once",)

_ELSEWHERE: Final = re.compile(r"~|[A-Za-z][A-Za-z0-9+.-]*:/|.*[$\x00]", re.DOTALL)
"""Names that are no plain path: agents expand homes and variables, and take URIs for the files they name."""

Inside = Callable[[str, str], bool]
"""``inside(path, cwd)``: whether a path, relative to ``cwd`` unless absolute, lies inside the workspace."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to give, whether it allows the action, and the text (key and parameters) a person must see, if any."""

    answer: Answer
    allowed: bool
    text_key: str = ""
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))


def inside_lexically(root: str) -> Inside:
    """Containment by names alone, for a workspace on another machine, where links can't be resolved from here.

    When ``root`` itself is known only there (empty or relative to the account's home), only relative paths can be inside.
    """
    base = posixpath.normpath(root) if posixpath.isabs(root) else ""

    def inside(path: str, cwd: str) -> bool:
        if _ELSEWHERE.match(path) or _ELSEWHERE.match(cwd):
            return False
        whole = posixpath.normpath(posixpath.join(cwd if posixpath.isabs(cwd) else base, path))
        if not base:
            return not posixpath.isabs(path) and whole != ".." and not whole.startswith("../")
        return whole == base or whole.startswith(base.rstrip("/") + "/")

    return inside


def inside_really(root: str) -> Inside:
    """Containment of real paths (links resolved), for a workspace on this machine."""
    base = Path(os.path.realpath(root))

    def inside(path: str, cwd: str) -> bool:
        if _ELSEWHERE.match(path) or _ELSEWHERE.match(cwd):
            return False
        return Path(os.path.realpath(base / cwd / path)).is_relative_to(base)

    return inside


def decide(policy: str, request: ApprovalRequested, inside: Inside) -> Decision:
    """The decision ``policy`` makes about ``request``; ``inside`` judges the paths it names."""
    if policy == ALLOW_ALL or (policy == ALLOW_EDITS and _edits_only(request, inside)):
        choice = _pick(request, _GRANTS)
        if choice:
            return Decision(Answer(choice_id=choice), allowed=True)
        return Decision(_refusal(request), False, "approval.no_single_grant", _described(request))
    key = {DENY: "approval.denied", ALLOW_EDITS: "approval.not_an_edit"}.get(policy, "approval.cannot_ask")
    if policy == ALLOW_EDITS and _starts_programs(request):
        key = "approval.starts_programs"
    return Decision(_refusal(request), False, key, _described(request))


def unanswered(question: QuestionAsked) -> Decision:
    """The decision about a question while nobody can be asked: cancelled, and the person is told what was asked."""
    return Decision(Answer(), False, "question.cannot_ask", {"question": _shorten(question.message)})


def _edits_only(request: ApprovalRequested, inside: Inside) -> bool:
    if not request.complete or request.command or request.kind not in _FILE_KINDS:
        return False
    paths = (*request.paths, *(diff.path for diff in request.diffs))
    if request.kind in _NEEDS_PATHS and (not paths or _starts_programs(request)):
        return False
    return all(inside(path, request.cwd) for path in paths)


def _starts_programs(request: ApprovalRequested) -> bool:
    """Whether a file to be changed is one that makes other programs run commands."""
    paths = (*request.paths, *(diff.path for diff in request.diffs))
    return request.kind in _NEEDS_PATHS and any(
        part.casefold() in _STARTS_PROGRAMS for path in paths for part in path.replace("\\", "/").split("/")
    )


def _pick(request: ApprovalRequested, kinds: tuple[ChoiceKind, ...]) -> str:
    for kind in kinds:
        for choice in request.choices:
            if choice.kind == kind:
                return choice.choice_id
    return ""


def _refusal(request: ApprovalRequested) -> Answer:
    return Answer(choice_id=_pick(request, _REFUSALS))


def _described(request: ApprovalRequested) -> Mapping[str, str]:
    named = request.command or request.title or ", ".join(request.paths) or request.kind
    return {"action": _shorten(named)}


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limits.ACTION_CHARS else line[: limits.ACTION_CHARS - 1] + "…"


@dataclass
class Verdict:
    verdict: str
    by: str


def judge(policy, rules, request, inside):
    if policy == ALLOW_ALL or (policy == ALLOW_EDITS and _edits_only(request, inside)):
        return Verdict("allow", f"policy {policy}")
    return Verdict("deny" if policy == DENY else "ask", f"policy {policy}")


def refusal(request, verdict):
    return Decision(_refusal(request), False, "approval.cannot_ask", _described(request))


def grant(request):
    c = _pick(request, ("allow_once",))
    return Answer(choice_id=c) if c else None


def ungrantable(request):
    return Decision(_refusal(request), False, "approval.no_single_grant", _described(request))
