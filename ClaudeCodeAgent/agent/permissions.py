"""What the program asks before it acts: its requests as our approvals and questions, and our answers as its responses.

Guarantees: a request is answered once; nothing is allowed but by an answer that chooses an allowing option; what is remembered
is remembered for the session only, whatever the program suggests, so that no settings file of the user is ever written.

The questions of one ``AskUserQuestion`` are the fields ``q1``, ``q2`` … of one :class:`pkg.agent_api.QuestionAsked`. Leaving
plan mode is an approval whose ``command`` is the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agent import tools
from agent.translate import Call
from pkg import limits
from pkg.agent_api import Answer, ApprovalRequested, Choice, Json, QuestionAsked, QuestionField
from pkg.lenient import as_dict, as_list, as_str, bounded, compact

DENIED: Final = (
    "This was not allowed. Do not try to reach the same by other means; say what you would have done, and go on with what "
    "needs no permission."
)
UNANSWERED: Final = "The question was not answered. Do what you can without an answer, and put the question into your reply."
WITHDRAWN: Final = "The turn was stopped."

_ONCE: Final = Choice("allow_once", "Allow once", "allow_once")
_SESSION: Final = Choice("allow_session", "Allow for this session", "allow_session")
_REJECT: Final = Choice("reject_once", "Reject", "reject_once")


@dataclass(frozen=True, slots=True)
class Asked:
    """One open request."""

    request_id: str
    given: dict[str, Any]
    event: ApprovalRequested | QuestionAsked
    remembered: tuple[dict[str, Json], ...] = ()
    """The rules that "for this session" adds."""


def asked(
    request_id: str,
    request: dict[str, Any],
    call: Call | None,
    cwd: str,
    current: Callable[[str], str | None] = lambda path: None,
) -> Asked:
    """A ``can_use_tool`` request; ``call`` is the tool call it is about, where that was told before.

    ``current`` is the text of a file as it is, ``None`` where there is none or it cannot be known.
    """
    name, given = as_str(request.get("tool_name")), as_dict(request.get("input"))
    if name == tools.ASK:
        return Asked(request_id, given, _question(request_id, given))
    if name == tools.LEAVE_PLAN:
        return Asked(request_id, given, _plan(request_id, request, given, call, cwd))
    remembered = _session_rules(request.get("permission_suggestions"))
    choices = (_ONCE, _SESSION, _REJECT) if remembered else (_ONCE, _REJECT)
    diffs, whole = tools.changes_of(name, given, current)
    command, complete = _command(name, given, has_diffs=bool(diffs))
    blocked = as_str(request.get("blocked_path"))
    event = ApprovalRequested(
        request_id,
        tools.title_of(name, given),
        tools.kind_of(name),
        choices,
        tool_call_id=as_str(request.get("tool_use_id"))[: limits.ACP_ID_CHARS],
        command=command,
        paths=tools.paths_of(given, blocked),
        diffs=diffs,
        reason=bounded(as_str(request.get("decision_reason")), limits.ACP_ERROR_CHARS)[0],
        cwd=cwd,
        complete=complete and whole,
        tool=tools.rule_name(name),
    )
    return Asked(request_id, given, event, remembered)


def response(question: Asked, answer: Answer) -> dict[str, Any]:
    """The response to a request. Whatever chooses no allowing option denies it."""
    if isinstance(question.event, QuestionAsked):
        answers = _answers(question, answer)
        if not answers:
            return {"behavior": "deny", "message": answer.message or UNANSWERED}
        return {"behavior": "allow", "updatedInput": {**question.given, "answers": answers}}
    kinds = {choice.choice_id: choice.kind for choice in question.event.choices}
    match kinds.get(answer.choice_id):
        case "allow_once":
            return {"behavior": "allow", "updatedInput": question.given}
        case "allow_session":
            rules = list(question.remembered)
            return {"behavior": "allow", "updatedInput": question.given, "updatedPermissions": rules}
    return {"behavior": "deny", "message": answer.message or DENIED}


def withdrawn(*, cancelling: bool = False) -> dict[str, Any]:
    """The response to a request of a turn that is over, or is ``cancelling``.

    Claude Code (2.1.332) goes on with a turn whose action is denied, so that it would act once more before an interrupt reaches
    it; with "interrupt" the denial ends the turn, too, and the program stays usable.
    """
    denied = {"behavior": "deny", "message": WITHDRAWN}
    return {**denied, "interrupt": True} if cancelling else denied


# ------------------------------------------------------------------ approvals


def _command(name: str, given: dict[str, Any], *, has_diffs: bool) -> tuple[str, bool]:
    """What would be done beyond files and diffs, as text, and whether that is all of it."""
    if tools.kind_of(name) == "execute" and (command := as_str(given.get("command"))):
        text, cut = bounded(command, limits.ACP_COMMAND_CHARS)
        return text, not cut
    if has_diffs or tools.names_its_place(name, given):
        return "", True
    if not given and tools.kind_of(name) != "read":
        return "", True
    text, cut = compact(given, limits.ACP_COMMAND_CHARS)
    return f"{tools.shown_name(name)} {text}", not cut


def _session_rules(suggestions: Json) -> tuple[dict[str, Json], ...]:
    """The suggested rules as rules of the session; suggestions to switch the mode or to open directories are left out."""
    return tuple(
        {**item, "destination": "session"}
        for item in map(as_dict, as_list(suggestions))
        if item.get("type") == "addRules" and item.get("behavior") == "allow" and as_list(item.get("rules"))
    )


def _plan(request_id: str, request: dict[str, Any], given: dict[str, Any], call: Call | None, cwd: str) -> ApprovalRequested:
    plan = as_str(given.get("plan")) or as_str(call.given.get("plan") if call is not None else "")
    text, cut = bounded(plan, limits.ACP_COMMAND_CHARS)
    return ApprovalRequested(
        request_id,
        "Carry out the plan",
        "mode",
        (_ONCE, _REJECT),
        tool_call_id=as_str(request.get("tool_use_id"))[: limits.ACP_ID_CHARS],
        command=text,
        cwd=cwd,
        complete=bool(text) and not cut,
    )


# ------------------------------------------------------------------ questions


def _questions(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(item) for item in as_list(given.get("questions"))[: limits.ACP_QUESTION_FIELDS]]


def _question(request_id: str, given: dict[str, Any]) -> QuestionAsked:
    questions = _questions(given)
    fields = tuple(
        QuestionField(
            f"q{number}",
            as_str(item.get("header")) or as_str(item.get("question")),
            "multiselect" if item.get("multiSelect") is True else "select" if as_list(item.get("options")) else "text",
            options=tuple(
                (label, label)
                for option in map(as_dict, as_list(item.get("options"))[: limits.ACP_QUESTION_FIELDS])
                if (label := as_str(option.get("label")))
            ),
            description=_described(item),
            custom=True,  # the program hands on what was typed as it is
        )
        for number, item in enumerate(questions, 1)
    )
    message = "\n".join(text for item in questions if (text := as_str(item.get("question"))))
    return QuestionAsked(request_id, bounded(message, limits.ACP_NOTICE_CHARS)[0], fields)


def _described(item: dict[str, Any]) -> str:
    """The question's own text, and what its options mean."""
    lines = [as_str(item.get("question"))]
    options = map(as_dict, as_list(item.get("options"))[: limits.ACP_QUESTION_FIELDS])
    lines += [f"{as_str(each.get('label'))}: {text}" for each in options if (text := as_str(each.get("description")))]
    return bounded("\n".join(lines), limits.ACP_NOTICE_CHARS)[0]


def _answers(question: Asked, answer: Answer) -> dict[str, str]:
    """The answers by the questions' own texts; a choice of several is one text, and what was typed counts as it is."""
    answers: dict[str, str] = {}
    for number, item in enumerate(_questions(question.given), 1):
        value = answer.values.get(f"q{number}")
        chosen = [str(each) for each in value] if isinstance(value, list | tuple) else [] if value is None else [str(value)]
        text = ", ".join(each for each in chosen if each.strip())
        if text and (asked_text := as_str(item.get("question"))):
            answers[asked_text] = text
    return answers
