"""What the approval policy and the rules of the form answer when the agent asks, as a pure decision.

:func:`judge` says *allow*, *ask* or *deny*, and by what. Rules (:mod:`pkg.approval_rules`) come first; then the
policy: ``allow-all`` allows, ``deny`` denies, ``allow-edits`` allows an edit and asks about the rest, ``ask`` and vendors' own
values ask. Where nobody can be asked, :func:`refusal` is the answer.

Guarantees: an answer is always one of the choices the agent offered or "cancelled"; a standing grant (``allow_always``) is
never chosen; ``deny`` and ``ask`` never allow anything by themselves; under ``allow-edits`` an action is allowed only when it
is wholly described, touches files and nothing else, and every file it names lies inside the workspace. A name that another
program may read differently (a home, a URI, a variable, a NUL) lies inside nothing, and changing what makes programs run
commands (a repository's own directory, the settings of agents and editors) is no edit.
"""

from __future__ import annotations

import os
import posixpath
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pkg import approval_rules, limits
from pkg.agent_api import Answer, ApprovalRequested, ChoiceKind, QuestionAsked
from pkg.approval_rules import Rules, Target

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
Resolve = Callable[[str, str], Target]
"""``resolve(path, cwd)``: the names of a path, for rules."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to happen with a request, by which rule or policy, and the text (key and parameters) that says why not."""

    verdict: Literal["allow", "ask", "deny"]
    by: str
    text_key: str = ""
    params: Mapping[str, str] = field(default_factory=lambda: types.MappingProxyType({}))


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


def names_lexically(root: str) -> Resolve:
    """The names of files by their paths alone, for a workspace on another machine; ``root`` as for :func:`inside_lexically`."""
    base = posixpath.normpath(root) if posixpath.isabs(root) else ""

    def resolve(path: str, cwd: str) -> Target:
        if _ELSEWHERE.match(path) or _ELSEWHERE.match(cwd):
            return Target()
        whole = _normal(posixpath.join(cwd if posixpath.isabs(cwd) else posixpath.join(base, cwd), path))
        if posixpath.isabs(whole):
            return Target((_below(whole, base) if base else whole,), (whole,))
        return Target() if whole == ".." or whole.startswith("../") else Target(("" if whole == "." else whole,))

    return resolve


def names_really(root: str) -> Resolve:
    """The names of files as they are written and behind their links, for a workspace on this machine."""
    named, base = _normal(posixpath.join(Path.cwd(), root)), os.path.realpath(root)

    def resolve(path: str, cwd: str) -> Target:
        if _ELSEWHERE.match(path) or _ELSEWHERE.match(cwd):
            return Target()
        unresolved = posixpath.join(base, cwd, path)
        real, written = os.path.realpath(unresolved), _normal(unresolved)
        below = _below(written, base)
        names = (below if not below.startswith("/") else _below(written, named), _below(real, base))
        return Target(tuple(dict.fromkeys(names)), tuple(dict.fromkeys((written, real))), Path(real).is_dir())

    return resolve


def _normal(path: str) -> str:
    whole = posixpath.normpath(path)
    return whole[1:] if whole.startswith("//") else whole


def _below(whole: str, base: str) -> str:
    """``whole`` as a path below ``base``, or itself where it is not there."""
    if whole == base:
        return ""
    return whole[len(base) :].lstrip("/") if whole.startswith(base.rstrip("/") + "/") else whole


def judge(policy: str, rules: Rules, request: ApprovalRequested, inside: Inside, resolve: Resolve) -> Verdict:
    """What is to happen; ``inside`` and ``resolve`` judge the paths the request names.

    The text of what is not allowed is for where nobody can be asked, and for what is denied.
    """
    found = approval_rules.evaluate(rules, request, inside, resolve, _is_closed)
    described = _described(request)
    if policy == DENY and found is not None and found.effect == "ask":
        found = None  # what may be asked about elsewhere is denied here
    if found is not None:
        named = {**described, "rule": str(found)}
        if found.effect == "allow":
            return Verdict("allow", str(found))
        if found.effect == "deny":
            return Verdict("deny", str(found), "approval.denied_by_rule", named)
        return Verdict("ask", str(found), "approval.asked_by_rule" if found.certain else "approval.not_certain", named)
    by = f"policy {policy}"
    if policy == ALLOW_ALL or (policy == ALLOW_EDITS and _edits_only(request, inside)):
        return Verdict("allow", by)
    if policy == DENY:
        return Verdict("deny", by, "approval.denied", described)
    if policy == ALLOW_EDITS:
        key = "approval.starts_programs" if _starts_programs(request) else "approval.not_an_edit"
        return Verdict("ask", by, key, described)
    return Verdict("ask", by, "approval.cannot_ask", described)


def session_policy(policy: str, rules: Rules) -> str:
    """The policy an agent's session is opened under, so that it asks about what the rules want to see.

    Under ``allow-edits`` and ``allow-all`` some agents do in their sandbox what they are never asked about; a rule that denies
    or asks would not be heard. An agent's own policies are left to it.
    """
    sees = any(rule.effect != "allow" for rule in rules)
    return "ask" if sees and policy in (ALLOW_ALL, ALLOW_EDITS) else policy


def grant(request: ApprovalRequested) -> Answer | None:
    """The answer that allows this action and no other; ``None`` where the agent offers no such choice: then refuse it, with
    ``approval.no_single_grant``."""
    choice = _pick(request, ("allow_once",))
    return Answer(choice_id=choice) if choice else None


def refusal(request: ApprovalRequested, verdict: Verdict) -> Decision:
    """The answer to what is denied, or cannot be asked about, and the text of it."""
    if verdict.verdict == "allow":
        return Decision(_refusal(request), False, "approval.no_single_grant", _described(request))
    return Decision(_refusal(request), False, verdict.text_key, verdict.params)


def decide(policy: str, request: ApprovalRequested, inside: Inside) -> Decision:
    """The decision ``policy`` makes about ``request`` where there are no rules and nobody can be asked."""
    verdict = judge(policy, (), request, inside, lambda path, cwd: Target())
    choice = _pick(request, _GRANTS) if verdict.verdict == "allow" else ""
    return Decision(Answer(choice_id=choice), allowed=True) if choice else refusal(request, verdict)


def unanswered(question: QuestionAsked) -> Decision:
    """The decision about a question while nobody can be asked: cancelled, and the person is told what was asked."""
    return Decision(Answer(), False, "question.cannot_ask", {"question": _shorten(question.message)})


def _is_closed(part: str) -> bool:
    return part.casefold() in _STARTS_PROGRAMS


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
            # One of two choices with the same name could be taken for the other.
            if choice.kind == kind and [each.choice_id for each in request.choices].count(choice.choice_id) == 1:
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
