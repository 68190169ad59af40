"""No text costs more than its length: in the shared pool one process serves every tenant, and what takes the square of a text's
length would stop them all.

Costs are processor time of this thread, compared with each other in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent import failures, wire
from pkg import (
    action_text,
    approval_rules,
    command_line,
    controls,
    decision_log,
    interaction_parts,
    interaction_words,
    question_fields,
    reply_sinks,
    ssh_errors,
    text_clean,
)
from pkg.agent_api import CodecError, FileDiff, PlanEntry, PlanUpdated, QuestionAsked, QuestionField, event_from_json, to_json
from pkg.interactions import OpenRequest
from pkg.redaction import Redactor
from pkg.text_split import FenceTracker, Limit, split

SMALL, BYTES = Limit(500, 10_000), Limit(None, 3_000)
REDACT = Redactor(["a secret value", "the first line of a key\nthe second line of a key"])
CHOICE = question_fields.OpenField(QuestionField("f", "F", "multiselect", options=(("a", "A"), ("b", "B")), custom=True))


def in_pieces(text: str) -> None:
    """A text as an agent streams it."""
    cleaner, fences = text_clean.TextCleaner(), FenceTracker()
    for start in range(0, len(text), 7):
        fences.feed(cleaner.feed(text[start : start + 7]))
    cleaner.flush()


def question(text: str) -> OpenRequest:
    """A question with more options than a message holds, one for every other character of the text."""
    options = tuple((f"v{number}", text[number : number + 9]) for number in range(0, len(text), 2))
    event = QuestionAsked("r", text[:100], (QuestionField("f", "F", "select", options=options),))
    return OpenRequest(event, machine="m", directory="/d", limit=3500)


WORK: dict[str, Callable[[str], Any]] = {
    "cleaning": text_clean.clean,
    "cleaning pieces": in_pieces,
    "looking for something visible": text_clean.is_blank,
    "following fences": lambda text: FenceTracker().feed(text),
    "splitting": lambda text: split(text, SMALL),
    "splitting by bytes": lambda text: split(text, BYTES),
    "making visible": action_text.visible,
    "making visible on one line": lambda text: action_text.visible(text, lines=False),
    "fencing": action_text.fenced,
    "quoting": action_text.code_span,
    "a new file": lambda text: action_text.changes([FileDiff("p", None, text)], 10**9),
    "hiding secrets": REDACT,
    "the end of an output": lambda text: REDACT.tail(text.encode("utf-8", "surrogatepass"), cut=True),
    "hiding named secrets": decision_log.without_secrets,
    "an answer": interaction_words.answer_like,
    "a reason": interaction_words.because,
    "a number with a reason": interaction_words.numbered,
    "a label": interaction_words.forms,
    "several options": lambda text: CHOICE.spoken(text, "F"),
    "a question's text": question_fields.said,
    "words of the agent": lambda text: interaction_parts.words_of_agent(text, len(text)),
    "a command line": command_line.parse,
    "a tool's input": approval_rules._INPUT.fullmatch,
    "a control": controls._SHAPE.fullmatch,
    "what ssh says": lambda text: ssh_errors._PATH.sub("", text),
    "what a chat says": lambda text: (reply_sinks._TOO_FAST.search(text), reply_sinks._PAUSE.search(text)),
    "what an agent's failure says": lambda text: failures._GENERIC_LEAD.sub("", text),
    "a told directory": wire._TOLD_DIRECTORY.search,
}
OPTIONS: dict[str, Callable[[str], Any]] = {
    "showing": lambda text: question(text).shown("en_US", 60),
    "understanding": lambda text: question(text).understand("no such option"),
}
PATTERNS = (
    *("\x9d", "\x9d\x9b", "\x90a", "\x1b]", "\x1b[", "\x1b[0;", "\x1b ", "\x1b]a\n", "\x9b0"),
    *("\r", "\n", "a\n", " \n", " ", "  a", "`", "``` ", "```\n", "~~~\n", "```a\n", "> ```\n", "- ", "1. ", "."),
    *("\"'", "\\", "$(", "a[", "bash -c '", "env ", "x=", "<<E\n", "://a:", "/..", "@a ", "retry after ", "a,"),
    *("token", "-token", "token= ", 'token="', "bearer ", "no, because ", "拒否", "ので", "ので、", "、"),
    *("e\u0301", "\u0301", "\u200d", "\U0001f1e6", "\ud83d", "\ud83d\ude00", "漢", "\u202e", "\u3000"),
)
HEADS = {
    "an answer": "no ",
    "a reason": "because ",
    "a number with a reason": "1 ",
    "a tool's input": "x {",
    "a control": "@a ",
    "a command line": "ls ",
}
"""What a text has to begin with to be read on."""


def cost(work: Callable[[str], Any], text: str, tries: int = 3) -> float:
    """Seconds of the processor, the least of several tries; what takes long is tried once."""
    least = math.inf
    while tries > 0:
        begun = time.thread_time()
        work(text)
        least = min(least, time.thread_time() - begun)
        tries -= 1 if least < 0.3 else tries
    return least


def grown(work: Callable[[str], Any], before: str, pattern: str) -> float:
    """How many times as much four times the text costs; the text is as long as it must be to measure it."""
    length = 2_000
    while length < 16_000 and cost(work, before + pattern * (length // len(pattern)), 1) < 0.0003:
        length *= 2
    times = [length // len(pattern), 4 * length // len(pattern)]
    less, more = (cost(work, before + pattern * count + "\x01é") for count in times)
    return more / max(less, 1e-6)


@pytest.mark.parametrize("name", WORK)
def test_four_times_the_text_is_about_four_times_the_work(name: str) -> None:
    """Our rule: whatever an agent or a person repeats, every character is read a bounded number of times."""
    for pattern in PATTERNS:
        # What else runs on the machine only ever adds.
        assert any(grown(WORK[name], HEADS.get(name, ""), pattern) <= 8 for _ in range(5)), pattern


@pytest.mark.parametrize("name", OPTIONS)
def test_four_times_the_options_are_about_four_times_the_work(name: str) -> None:
    """Our rule: how many options of a question fit is not found out one by one."""
    assert all(any(grown(OPTIONS[name], "", pattern) <= 8 for _ in range(5)) for pattern in ("a", "\x9d", "`", "漢"))


def test_what_is_invalid_costs_no_more_than_what_is_valid() -> None:
    """Our rule: an event with very many errors is refused in a short text, sooner than it could be taken."""
    count = 30_000
    valid = to_json(PlanUpdated(tuple(PlanEntry(f"step {number}") for number in range(count))))
    invalid = {"type": "PlanUpdated", "entries": [1] * count}

    def refused(value: Any) -> None:
        with pytest.raises(CodecError, match=r"^PlanUpdated: invalid in 30000 places$"):
            event_from_json(value)

    assert any(cost(lambda _: refused(invalid), "") <= 3 * cost(lambda _: event_from_json(valid), "") for _ in range(4))


def test_a_few_errors_are_named_by_their_places() -> None:
    """Our rule: places, never values; a name of the agent's own is cut."""
    with pytest.raises(CodecError, match=r"^TextDelta: invalid text$"):
        event_from_json({"type": "TextDelta", "text": {"not": "a text"}})
    with pytest.raises(CodecError, match=r"^Notice: invalid params\.k{64}$"):
        event_from_json({"type": "Notice", "code": "c", "params": {"k" * 100_000: {"a": "value"}}})
