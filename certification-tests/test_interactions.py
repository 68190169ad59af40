"""What people are asked and what they answer: an approval shown whole or not offered, numbers and words of eight languages."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pkg import action_text, interaction_words, limits, texts
from pkg.agent_api import (
    Answer,
    ApprovalRequested,
    Choice,
    FileDiff,
    QuestionAsked,
    QuestionField,
    event_from_json,
    to_json,
)
from pkg.interactions import Again, Decided, FormSurface, OpenRequest, Outcome, Shown, Unclear, answer_like, digest
from pkg.text_split import FenceTracker, utf16_units

ONCE, SESSION, REJECT = (
    Choice("yes!", "Yes", "allow_once"),
    Choice("all", "All", "allow_session"),
    Choice("no!", "No", "reject_once"),
)
CHOICES = (ONCE, SESSION, Choice("always", "Always", "allow_always"), REJECT, Choice("never", "Never", "reject_always"))
COMMAND = "git push origin main"


def approval(command: str = COMMAND, **more: Any) -> ApprovalRequested:
    """A request to run a command."""
    given: dict[str, Any] = {"kind": "execute", "choices": CHOICES, "cwd": "/w/project"}
    return ApprovalRequested("r1", command=command, **{"title": "Push", **given, **more})


def opened(
    event: ApprovalRequested | QuestionAsked | None = None, limit: int | None = limits.TELEGRAM_TEXT_UNITS
) -> OpenRequest:
    """An open request on a Telegram-like surface."""
    return OpenRequest(event or approval(), machine="workstation", directory="/w", limit=limit)


def say(text: str, event: ApprovalRequested | QuestionAsked | None = None) -> Outcome:
    """What one message comes to, said to a fresh request."""
    return opened(event).understand(text)


def ids(shown: Shown) -> list[str]:
    """The names of a step's options, in the order of their numbers."""
    return [option.option_id for option in shown.options]


def once() -> Decided:
    """Allowed once."""
    return Decided(Answer("yes!"), "allow_once")


def denied(reason: str = "") -> Decided:
    """Denied, perhaps with a reason."""
    return Decided(Answer("no!", message=reason), "deny")


def allows(outcome: Outcome) -> bool:
    """Whether an outcome lets the agent do it."""
    return isinstance(outcome, Decided) and (
        outcome.decision.startswith("allow") or outcome.answer.choice_id not in ("no!", "")
    )


def seen_as(text: str) -> str:
    """What made-visible text stands for: the inverse of showing it."""

    def back(match: re.Match[str]) -> str:
        return chr(int(match["code"], 16)) * int(match["times"] or 1)

    return re.sub(r"⟦U\+(?P<code>[0-9A-F]{4,6})(?:×(?P<times>[0-9]+))?⟧", back, text)


def blocks(description: str) -> list[str]:
    """What stands in the code blocks of a text, read as a surface reads them."""
    found: list[str] = []
    tracker, inside = FenceTracker(), False
    for line in description.split("\n"):
        before = inside
        tracker.feed(line + "\n")
        inside = tracker.fence is not None
        if inside and not before:
            found.append("")
        elif inside:
            found[-1] += line + "\n"
    assert not inside
    return [block[:-1] for block in found]


LINES = st.text(st.characters(codec="utf-8") | st.sampled_from("`~\n\t\r\u202e\u200b\u3000⟦⟧ "), max_size=120)
TRICKY = st.lists(
    st.sampled_from(["```", "````", "~~~", "\n", "ls", " ", "> ", "- ```", "`", "⟦U+000A⟧", " " * 40, "\u0301" * 9]) | LINES,
    max_size=8,
)


class TestShown:
    """What a person sees before deciding."""

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_a_request_says_what_where_why_and_what_each_choice_does(self, language: str) -> None:
        """Our rule: action, directory, machine, the agent's reason, and each choice with its number and meaning."""
        shown = opened(approval(reason="The branch is finished")).shown(language, 10)
        whole = f"{shown.title}\n\n{shown.description}"
        for part in (COMMAND, "workstation", "`/w/project`", "The branch is finished", "10"):
            assert part in whole
            assert part in shown.text
        assert ids(shown) == ["allow_once", "allow_session", "deny", "deny_why"]
        for number, option in enumerate(shown.options, 1):
            assert re.search(rf"^{number}\. {re.escape(option.label)}: \S.{{4,}}", shown.description, re.MULTILINE)
            assert f"{number}. {option.label}: " in shown.text

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_labels_fit_on_buttons(self, language: str) -> None:
        """Our rule: a label is at most 64 characters, the agent's own choices included."""
        extra = Choice("x", "long " * 60, "allow_once")
        shown = opened(approval(choices=(*CHOICES, extra))).shown(language, 10)
        assert all(0 < len(option.label) <= 64 for option in shown.options)

    def test_the_host_s_request_carries_the_same(self) -> None:
        """The host (SDK 0.7.18) gets actions only, one a row, and the text for surfaces without buttons."""
        shown = opened().shown("en_US", 10)
        request = shown.request("i1", 1_800_000_000)
        assert (request.kind, request.title, request.description) == ("confirmation", shown.title, shown.description)
        assert [action.id for action in request.actions] == ids(shown)
        assert request.fields == []
        assert (request.expires_at, request.fallback_text) == (1_800_000_000, shown.text)

    def test_a_surface_without_buttons_is_not_told_to_press_one(self) -> None:
        """Our rule: the text alone is answered with a number."""
        shown = opened().shown("en_US", 10)
        assert "button" in shown.description
        assert "button" not in shown.text

    def test_edits_are_shown_as_a_unified_diff(self) -> None:
        """Our rule: each changed line, each new file, and a last line without a line break are to be seen."""
        before = "\n".join(map(str, range(1, 30)))
        diffs = (FileDiff("/w/a", before, before.replace("15", "fifteen") + "\n"), FileDiff("/w/n", None, "x\n"))
        shown = opened(approval("", kind="edit", diffs=diffs, paths=("/w/a", "/w/n"))).shown("en_US", 10)
        (diff,) = blocks(shown.description)
        lines = diff.split("\n")
        assert [line for line in lines if line[0] in "+-\\"] == [
            *("--- /w/a", "+++ /w/a", "-15", "+fifteen", "-29", "\\ No newline at end of file", "+29"),
            *("--- /dev/null", "+++ /w/n", "+x"),
        ]
        assert " 12" in lines
        assert " 11" not in lines

    def test_a_diff_beside_a_command_and_other_files_are_named_as_such(self) -> None:
        """Our rule: no block can be taken for another."""
        event = approval(paths=("/w/x\ny",), diffs=(FileDiff("/w/a", "1", "2"),))
        shown = opened(event).shown("en_US", 10)
        command, paths, diff = blocks(shown.description)
        assert (command, paths) == (COMMAND, "/w/x⟦U+000A⟧y")
        assert diff.startswith("--- /w/a")
        assert shown.description.index("Files:") < shown.description.index("Changes:")

    def test_a_title_is_the_action_only_where_nothing_else_is(self) -> None:
        """Our rule: the agent's own name for what it does never stands in place of what it does."""
        (alone,) = blocks(opened(approval("", title="Open the door")).shown("en_US", 10).description)
        assert alone == "Open the door"
        shown = opened(approval("rm -rf /", title="List files")).shown("en_US", 10)
        assert blocks(shown.description) == ["rm -rf /"]
        assert 'The agent calls it: "List files"' in shown.description

    def test_the_agent_s_words_stay_on_their_line(self) -> None:
        """Our rule: a reason cannot pose as the choices or open a code block."""
        reason = "fine\n\n1. Deny: nothing happens\n```\n2. Allow"
        shown = opened(approval(reason=reason)).shown("en_US", 10)
        assert blocks(shown.description) == [COMMAND]
        assert re.findall(r"^1\. .*", shown.description, re.MULTILINE) == ["1. Allow once: only this, only now."]

    @given(
        TRICKY.map("".join).filter(str.strip),
        st.sampled_from([None, 500, 900, limits.DISCORD_TEXT_UNITS, limits.TELEGRAM_TEXT_UNITS]),
    )
    @settings(max_examples=150, deadline=None)
    @example("`" * 40, None)
    @example("x" * 9_999, None)
    @example("💥" * 1_500, limits.TELEGRAM_TEXT_UNITS)
    def test_what_may_be_allowed_is_wholly_shown(self, command: str, limit: int | None) -> None:
        """Our rule: where allowing is offered, the first code block is the command and nothing but it, and all fits."""
        request = opened(approval(command), limit)
        for language in ("en_US", "th_TH"):
            shown = request.shown(language, 10)
            found = blocks(shown.description)
            if "allow_once" in ids(shown):
                assert len(found) == 1
                assert seen_as(found[0]) == command
            else:
                assert found == []
                assert ids(shown) == ["deny", "deny_why"]
                assert not allows(request.understand("1"))
                request = opened(approval(command), limit)
            if limit is None or limit >= 900:
                assert utf16_units(f"{shown.title}\n\n{shown.description}") <= (limit or 10**9)
                assert utf16_units(shown.text) <= (limit or 10**9)
            assert shown.request("i", 1).fallback_text == shown.text

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_the_limit_is_kept_whatever_the_size(self, language: str) -> None:
        """Our rule: text and buttons stay within the surface's units, reasons give way first."""
        offered = []
        for size in range(1, 4_100, 41):
            event = approval("x" * size, reason="because " * 600, title="t" * 500)
            shown = opened(event).shown(language, 10**9)
            assert utf16_units(f"{shown.title}\n\n{shown.description}") <= limits.TELEGRAM_TEXT_UNITS
            assert utf16_units(shown.text) <= limits.TELEGRAM_TEXT_UNITS
            offered.append("allow_once" in ids(shown))
            assert offered[-1] == ("x" * size in shown.description)
        assert offered == sorted(offered, reverse=True)
        assert 3_000 < 41 * sum(offered) < 3_900

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_a_number_means_the_same_in_every_language(self, language: str) -> None:
        """Our rule: at each length, either all languages offer to allow or none."""
        for size in range(2_500, 4_000, 7):
            request = opened(approval("x" * size))
            assert ids(request.shown(language, 10)) == ids(request.shown("en_US", 99))

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_the_time_left_is_no_more_than_there_is(self, language: str) -> None:
        """Our rule: below two minutes seconds are told, above them minutes; and no time makes the longest text longer."""
        request = opened()
        longest = utf16_units(request.shown(language, 10**9).text)
        for left, told in ((30, "30"), (119, "119"), (120, "2"), (121, "3"), (3_600, "60")):
            last = request.shown(language, left).description.split("\n\n")[-1]
            assert re.findall(r"\d+", last)[-1:] == [told]
        assert all(utf16_units(request.shown(language, left).text) <= longest for left in (1, 119, 120, 5_999_940))

    @given(LINES)
    def test_nothing_is_invisible_and_nothing_is_lost(self, text: str) -> None:
        """Our rule: shown text can be read back, and holds no control, format or blank look-alike character."""
        shown = action_text.visible(text)
        assert seen_as(shown) == text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\xa0\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3000\ufeff]", shown)

    @pytest.mark.parametrize(
        "char",
        ["\x1b", "\r", "\u202e", "\u200b", "\u2066", "\u00a0", "\u3164", "\ufe0f", "\u2028", "\ue000", "\ud800", "\U000e0041"],
    )
    def test_hidden_characters_of_a_command_are_made_visible(self, char: str) -> None:
        """Our rule: escapes, overrides, zero widths, look-alikes of a space and lone surrogates stand as code points."""
        (shown,) = blocks(opened(approval(f"ls {char}x")).shown("en_US", 10).description)
        assert shown == f"ls ⟦U+{ord(char):04X}⟧x"

    def test_marks_cannot_paint_over_a_command(self) -> None:
        """Our rule: a letter has the marks that languages need, the rest stand as code points."""
        assert action_text.visible("e\u0301") == "e\u0301"
        assert action_text.visible("a" + "\u0338" * 5) == "a" + "\u0338" * 3 + "⟦U+0338⟧" * 2

    def test_blanks_cannot_push_a_command_out_of_sight(self) -> None:
        """Our rule: a long gap in a line is counted, not drawn; indentation is drawn."""
        assert action_text.visible("    ls" + " " * 90 + "; rm x") == "    ls⟦U+0020×90⟧; rm x"

    @given(st.text("`ab ", max_size=40))
    def test_inline_code_holds_what_it_is_given(self, text: str) -> None:
        """CommonMark's rule: a code span ends at a run of marks as long as its own."""
        span = action_text.code_span(text)
        mark = re.match("`+", span)
        assert mark is not None or not text
        if mark is not None and "`" in text:
            runs = [len(run) for run in re.findall("`+", span)]
            assert runs.count(len(mark.group())) == 2


class TestNotOffered:
    """What cannot be shown whole, or not be allowed for once, is only denied."""

    @pytest.mark.parametrize(
        "event",
        [
            approval(complete=False),
            approval("x" * 5_000),
            approval("", kind="edit", diffs=(FileDiff("/w/a", "1", "2", truncated=True),)),
            approval("", kind="edit", diffs=(FileDiff("/w/a", None, "line\n" * 2_000),)),
            approval("", kind="edit", diffs=(FileDiff("/w/a", "x" * 1_500_000, "x" * 1_500_000 + "y"),)),
            approval("", paths=tuple(f"/w/{number}" for number in range(3_000))),
            approval("", title="  "),
            approval(choices=(SESSION, Choice("always", "Always", "allow_always"), REJECT)),
            approval(choices=(ONCE, Choice("yes!", "No", "reject_once"), REJECT)),
        ],
    )
    def test_only_denying_is_offered(self, event: ApprovalRequested) -> None:
        """Our rule: incomplete, cut, too long, empty, only for good, or a choice whose name means two things."""
        shown = opened(event).shown("en_US", 10)
        assert ids(shown) == ["deny", "deny_why"]
        assert blocks(shown.description) == []
        assert "cannot be allowed here" in shown.description
        for text in ("yes", "allow", "allow for this session", "3", "4"):
            assert isinstance(say(text, event), Unclear)
        for name in ("allow_once", "allow_session", "extra_1", "yes!"):
            assert isinstance(opened(event).pressed(name, {}), Unclear)
        assert say("1", event) == denied()
        assert say("2 too large", event) == denied("too large")
        assert opened(event).pressed("deny", {}) == denied()

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_even_a_small_surface_can_deny(self, language: str) -> None:
        """Our rule: the request to deny stays readable on 900 units."""
        shown = opened(approval("x" * 5_000, reason="y" * 5_000, cwd="/w" * 900, title="z" * 900), 900).shown(language, 10)
        assert utf16_units(shown.text) <= 900

    def test_a_plan_is_allowed_once_only(self) -> None:
        """Our rule: leaving plan mode is no matter of a session."""
        event = approval("1. Build\n2. Test", kind="mode")
        assert ids(opened(event).shown("en_US", 10)) == ["allow_once", "deny", "deny_why"]
        assert isinstance(say("allow for this session", event), Unclear)
        assert say("3 not yet", event) == denied("not yet")

    def test_an_agent_without_a_single_refusal_is_cancelled(self) -> None:
        """Our rule: a denial never becomes a standing refusal."""
        event = approval(choices=(ONCE, Choice("never", "Never", "reject_always")))
        assert say("deny because no", event) == Decided(Answer("", message="no"), "deny")


class TestAnswered:
    """What a button or a typed message decides."""

    @pytest.mark.parametrize(
        "text",
        ["1", " 1 ", "１", "1️⃣", "①", "1.", "1)", "(1)", "#1", "# 1", "1。", "1!", "@bot 1", "@my_bot\n1", "1. Allow once"],
    )
    def test_a_number_is_understood_however_it_is_typed(self, text: str) -> None:
        """Our rule: width, keycaps, list marks and a mention of the bot don't matter."""
        assert say(text) == once()

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_labels_are_understood_in_every_language(self, language: str) -> None:
        """Our rule: what stands on a button may be typed, in capitals and with a full stop, too."""
        labels = {option.option_id: option.label for option in opened().shown(language, 10).options}
        for shown in (str, str.upper, "{}.".format, "@bot {}".format, "“{}”".format):
            assert say(shown(labels["allow_once"])) == once()
            assert say(shown(labels["allow_session"])) == Decided(Answer("yes!"), "allow_session")
            assert say(shown(labels["deny"])) == denied()
            assert say(shown(labels["deny_why"])) == Again()

    @pytest.mark.parametrize(
        ("yes", "session", "no"),
        [
            ("Yes", "always this session", "no"),
            ("OK!", "Allow for session", "Deny."),
            ("ａｌｌｏｗ", "yes, for this session", "don’t"),
            ("允许", "本次会话允许", "不"),
            ("好的。", "本次会话始终允许", "拒绝！"),
            ("允許", "允許本次工作階段", "不行"),
            ("はい", "このセッション中は許可", "いいえ"),
            ("許可", "このセッションで許可", "だめ"),
            ("อนุญาต", "อนุญาตตลอดเซสชันนี้", "ไม่อนุญาต"),
            ("ตกลง", "เสมอในเซสชันนี้", "ไม่"),
            ("Đồng ý", "luôn trong phiên này", "Không"),
            ("cho phép", "cho phép trong phiên này", "từ chối"),
            ("¿?", "", ""),
            ("Sí", "siempre en esta sesión", "no"),
            ("permitir", "permitir en esta sesión", "Denegar"),
            ("Да", "всегда в этом сеансе", "нет"),
            ("разрешить", "разрешить на эту сессию", "запретить"),
        ],
    )
    def test_words_of_eight_languages(self, yes: str, session: str, no: str) -> None:
        """Our rule: a bare yes allows once, a bare no denies, and the session is named."""
        if yes == "¿?":
            assert isinstance(say(yes), Unclear)
            return
        assert say(yes) == once()
        assert say(session) == Decided(Answer("yes!"), "allow_session")
        assert say(no) == denied()

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("deny because It Breaks CI", "It Breaks CI"),
            ("No, because it\nbreaks", "it\nbreaks"),
            ("no: not now", "not now"),
            ("4 not now", "not now"),
            ("4: not now", "not now"),
            ("４：not now", "not now"),
            ("#4 not now", "not now"),
            ("4. because not now", "not now"),
            ("3 because not now", "not now"),
            ("@bot 4 not now", "not now"),
            ("拒绝，因为太危险", "太危险"),
            ("不，因為太危險", "太危險"),
            ("拒否。理由は危ない", "危ない"),
            ("危ないので拒否", "危ない"),
            ("ปฏิเสธเพราะอันตราย", "อันตราย"),
            ("Từ chối vì nguy hiểm", "nguy hiểm"),
            ("no, porque es peligroso", "es peligroso"),
            ("Нет, потому что опасно", "опасно"),
        ],
    )
    def test_a_denial_carries_its_reason(self, text: str, reason: str) -> None:
        """Our rule: what follows is for the agent, as it was typed."""
        assert say(text) == denied(reason)

    @pytest.mark.parametrize(
        "text",
        [
            *(
                "allow me to explain",
                "no idea",
                "1 more thing",
                "yes?",
                "yes but",
                "no way to tell",
                "allow, because I trust it",
            ),
            *(
                "1, 2",
                "11",
                "0",
                "5",
                "1.5",
                "-1",
                "14",
                "",
                "  ",
                "\u200b",
                "allowed actors?",
                "ok then tell me",
                "noporque es",
                "не знаю",
            ),
            *(
                "not",
                "nobody",
                "允许的话",
                "好吗",
                "許可とは",
                "có thể",
                "да ладно тебе",
                "always",
                "allow always",
                "2 more files",
                "yes no",
            ),
            *("1 because I trust it", "deny because", "because", "/diff", "1\n2", "yes\nyes", "@bot", "3 more", "1: fine"),
        ],
    )
    def test_a_sentence_is_no_answer(self, text: str) -> None:
        """Our rule: what merely begins like an answer is told that it is still waited for, and how to answer."""
        outcome = say(text)
        assert isinstance(outcome, Unclear)
        told = texts.render(outcome.text_key, "en_US", outcome.params)
        assert COMMAND in told
        assert "from 1 to 4" in told

    @given(
        st.text(max_size=60)
        | st.lists(st.sampled_from(sorted(interaction_words.meanings())) | st.text(max_size=8), max_size=3).map(" ".join)
    )
    @settings(max_examples=600, deadline=None)
    @example("1 ①")
    @example("yes, because no")
    def test_nothing_else_allows(self, text: str) -> None:
        """Our rule: an allowing answer is the number, a label or a listed word, in whole."""
        if not allows(say(text)):
            return
        core = re.sub(r"^@\S+\s+", "", interaction_words.plain(text))
        core = re.sub(r"^#?\s?\(?[12]\u20e3?[.):、。]?\s+", "", core)
        core = core.strip(" .,;:!…。、~～\"'“”‘’«»「」『』„`")
        listed = {word for word, meaning in interaction_words.meanings().items() if meaning.startswith("allow")}
        assert core in listed | {"o.k"} or re.fullmatch(r"#?\s?\(?[12]\u20e3?[.):、。]?", core)

    def test_words_never_mean_two_things(self) -> None:
        """Our rule: no word of one language allows and denies, or skips or cancels, in another."""
        groups = [interaction_words._words(words) for words in (interaction_words._ALLOW, interaction_words._SESSION)]
        groups += [interaction_words._words(words) for words in (interaction_words._DENY, interaction_words._DENY_WHY)]
        groups += [interaction_words._words(words) for words in (interaction_words._SKIP, interaction_words._CANCEL)]
        assert sum(map(len, groups)) == len(frozenset().union(*groups))
        assert not interaction_words._set("yes") & interaction_words._set("no")

    def test_buttons_decide(self) -> None:
        """Our rule: a button is its name, a select's only value is, too; any other name is told to be none."""
        assert opened().pressed("allow_once", {}) == once()
        assert opened().pressed("allow_session", {}) == Decided(Answer("yes!"), "allow_session")
        assert opened().pressed("deny", {}) == denied()
        assert opened().pressed("deny_why", {}) == Again()
        assert opened().pressed("", {"choice": "deny"}) == denied()
        for name, values in (
            ("", {}),
            ("yes!", {}),
            ("always", {}),
            ("1", {}),
            ("cancel", {}),
            ("", {"a": "deny", "b": "deny"}),
            ("", {"a": 1}),
        ):
            assert isinstance(opened().pressed(name, values), Unclear)

    def test_the_reason_is_asked_for_and_is_the_next_message(self) -> None:
        """Our rule: after "deny and say why" whatever comes is the reason, a yes or a number, too; it never allows."""
        for text in ("It breaks CI", "yes", "1", "allow", "no"):
            request = opened()
            assert request.understand("4") == Again()
            shown = request.shown("en_US", 9)
            assert ids(shown) == ["cancel"]
            assert COMMAND in shown.description
            assert "cancel: Deny without a reason" in shown.text
            assert isinstance(request.understand("  "), Unclear)
            assert isinstance(request.pressed("allow_once", {}), Unclear)
            assert request.understand(text) == denied(text)

    @pytest.mark.parametrize("text", ["cancel", "取消", "отмена", "skip", "Deny without a reason", "キャンセル"])
    def test_no_reason_is_a_denial_all_the_same(self, text: str) -> None:
        """Our rule: leaving the reason out denies."""
        request = opened()
        request.pressed("deny_why", {})
        assert request.understand(text) == denied()

    def test_a_request_is_decided_once(self) -> None:
        """Our rule: a second answer changes nothing and is told so."""
        request = opened()
        assert request.understand("deny") == denied()
        for again in (request.understand("1"), request.pressed("allow_once", {})):
            assert isinstance(again, Unclear)
            assert texts.render(again.text_key, "en_US", again.params) == f"This was already answered: {COMMAND}"

    def test_an_agent_s_further_choices_are_offered_for_once(self) -> None:
        """Our rule: more single choices are further numbers, with the agent's words behind ours; standing ones are none."""
        extras = (Choice("feature", "Deny", "allow_once"), Choice("stop", "Stop `here`", "reject_once"))
        event = approval(choices=(*CHOICES, *extras))
        shown = opened(event).shown("en_US", 10)
        assert [option.label for option in shown.options][4:] == ["Allow: Deny", "Deny: Stop 'here'"]
        assert say("5", event) == Decided(Answer("feature"), "allow_once")
        assert say("6", event) == Decided(Answer("stop"), "deny")
        assert say("stop `here`", event) == Decided(Answer("stop"), "deny")
        assert opened(event).pressed("extra_1", {}) == Decided(Answer("feature"), "allow_once")
        assert say("deny", event) == denied(), "our word is ours"

    @pytest.mark.parametrize("text", ["1", "９", "yes", "Отклонить", "allow for this session", "no, because it is late", "4️⃣"])
    def test_what_looks_like_a_choice_when_nothing_is_open(self, text: str) -> None:
        """Our rule: a late answer is known as one."""
        assert answer_like(text)

    @pytest.mark.parametrize("text", ["10", "write a test", "no idea", "4 files are missing", "", "allow me"])
    def test_what_does_not_look_like_a_choice(self, text: str) -> None:
        """Our rule: a message for the agent is none."""
        assert not answer_like(text)

    def test_it_is_described_in_one_line(self) -> None:
        """Our rule: short, on one line, nothing invisible."""
        assert opened().described() == COMMAND
        long = opened(approval("a\n\x1b" + "b" * 500)).described()
        assert long.startswith("a ⟦U+001B⟧b")
        assert len(long) <= limits.INTERACTION_NAME_CHARS


class TestDigest:
    """What counts as the same action."""

    BASE = approval("make", paths=("/w/a",), diffs=(FileDiff("/w/a", "1", "2"),))

    @pytest.mark.parametrize(
        "change",
        [
            {"kind": "edit"},
            {"command": "make "},
            {"command": ""},
            {"paths": ("/w/b",)},
            {"paths": ()},
            {"cwd": "/w"},
            {"diffs": ()},
            {"diffs": (FileDiff("/w/a", None, "2"),)},
            {"diffs": (FileDiff("/w/a", "", "2"),)},
            {"diffs": (FileDiff("/w/a", "1", "3"),)},
            {"diffs": (FileDiff("/w/b", "1", "2"),)},
        ],
    )
    def test_every_part_counts(self, change: dict[str, Any]) -> None:
        """Our rule: another part, another action."""
        assert digest(dataclasses.replace(self.BASE, **change)) not in ("", digest(self.BASE))

    @pytest.mark.parametrize(
        "change", [{"request_id": "r2"}, {"title": "x"}, {"reason": "x"}, {"choices": ()}, {"tool_call_id": "t"}]
    )
    def test_what_is_not_done_does_not_count(self, change: dict[str, Any]) -> None:
        """Our rule: names and reasons are no part of the action where there is one."""
        assert digest(dataclasses.replace(self.BASE, **change)) == digest(self.BASE)

    def test_a_title_counts_where_there_is_nothing_else(self) -> None:
        """Our rule: two titles without more are two actions."""
        assert digest(approval("", title="a")) != digest(approval("", title="b"))

    def test_what_is_not_known_whole_has_none(self) -> None:
        """Our rule: nothing may be remembered about an action that was not seen whole."""
        assert digest(approval(complete=False)) == ""
        assert digest(approval(diffs=(FileDiff("/w/a", "1", "2", truncated=True),))) == ""

    PARTS = st.tuples(st.text(), st.lists(st.text(), max_size=3).map(tuple), st.text())

    @given(PARTS, PARTS)
    @example(("a", ("b",), ""), ("a", ("b", ""), ""))
    @example(("\ud83d\ude00", (), ""), ("\U0001f600", (), ""))
    @example(("\ud800", (), ""), ("\udc00", (), ""))
    def test_equal_only_for_the_same(
        self, one: tuple[str, tuple[str, ...], str], other: tuple[str, tuple[str, ...], str]
    ) -> None:
        """Our rule: parts never run into each other."""
        events = [approval(command, paths=paths, cwd=cwd) for command, paths, cwd in (one, other)]
        assert (digest(events[0]) == digest(events[1])) == (one == other)


PORT = QuestionField("port", "Port", "number", required=True)
DATABASE = QuestionField("db", "Database", "select", options=(("pg", "Postgres"), ("lite", "SQLite")), description="Where to?")
TABLES = QuestionField(
    "tables", "Tables", "multiselect", options=(("a", "Users"), ("b", "Posts, old"), ("c", "3rd")), required=True
)
SURE = QuestionField("sure", "Really?", "boolean")
NOTE = QuestionField("note", "Note", "text")


def question(*fields: QuestionField, message: str = "Please choose.") -> QuestionAsked:
    """A question with these fields."""
    return QuestionAsked("q1", message, fields)


def values(outcome: Outcome) -> dict[str, Any]:
    """The values of an answer."""
    assert isinstance(outcome, Decided)
    assert outcome.decision == "answered"
    return dict(outcome.answer.values)


class TestQuestions:
    """Fields one after another, each answered by number, word or text."""

    def test_fields_are_asked_one_after_another(self) -> None:
        """Our rule: one step a field, its number in the title, and values as the field's type has them."""
        request = opened(question(DATABASE, TABLES, SURE, PORT, NOTE))
        seen = []
        outcome: Outcome = Again()
        for text in ("2", "1,3", "no", "5432", "yes"):
            assert outcome == Again()
            seen.append(request.shown("en_US", 5))
            outcome = request.understand(text)
        assert [shown.title for shown in seen] == [f"The agent asks you ({number} of 5)" for number in range(1, 6)]
        assert all("Please choose." in shown.description and shown.kind == "choice" for shown in seen)
        assert values(outcome) == {"db": "lite", "tables": ["a", "c"], "sure": False, "port": 5432, "note": "yes"}
        assert isinstance(request.understand("1"), Unclear)

    def test_a_choice_is_shown_with_numbers_and_buttons(self) -> None:
        """Our rule: options, leaving out and not answering are numbered in one row."""
        shown = opened(question(DATABASE)).shown("en_US", 5)
        assert [option.label for option in shown.options] == ["Postgres", "SQLite", "Leave this out", "Do not answer"]
        assert "1. Postgres\n2. SQLite\n3. Leave this out\n4. Do not answer" in shown.description
        assert "Where to?" in shown.text
        assert shown.request("i", 1).kind == "choice"

    @pytest.mark.parametrize("text", ["2", "２", "SQLite", "sqlite.", "lite", "@bot SQLITE", "“SQLite”"])
    def test_an_option_is_its_number_label_or_value(self, text: str) -> None:
        """Our rule: any of them, however it is typed."""
        assert values(say(text, question(DATABASE))) == {"db": "lite"}

    def test_what_no_option_is_counts_only_where_the_field_takes_it(self) -> None:
        """Our rule: own words are an answer to a field that takes them, as they are."""
        told = say("MySQL, maybe?", question(DATABASE))
        assert isinstance(told, Unclear)
        assert "from 1 to 4" in texts.render(told.text_key, "en_US", told.params)
        custom = dataclasses.replace(DATABASE, custom=True)
        assert values(say(" MySQL, maybe? ", question(custom))) == {"db": "MySQL, maybe?"}
        assert values(say("9", question(custom))) == {"db": "9"}
        assert "own" in opened(question(custom)).shown("en_US", 5).text

    def test_two_options_of_one_label_need_a_number(self) -> None:
        """Our rule: nothing is guessed."""
        field = QuestionField("f", "F", "select", options=(("1a", "Same"), ("1b", "same")))
        assert isinstance(say("same", question(field)), Unclear)
        assert values(say("2", question(field))) == {"f": "1b"}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1,3", ["a", "c"]),
            ("1 3", ["a", "c"]),
            ("3、1", ["c", "a"]),
            ("１，３", ["a", "c"]),
            ("1, 1", ["a"]),
            ("2", ["b"]),
            ("users, 3rd", ["a", "c"]),
            ("Posts, old", ["b"]),
            ("Users, 2", ["a", "b"]),
        ],
    )
    def test_several_options_are_separated_by_commas_or_spaces(self, text: str, expected: list[str]) -> None:
        """Our rule: numbers, labels, or both; one that holds a comma is read whole first."""
        assert values(say(text, question(TABLES))) == {"tables": expected}

    def test_several_options_have_no_buttons(self) -> None:
        """The host shows no multiselect on Telegram (LangBot 4.11.2): they are typed, and what is none is named."""
        request = opened(question(TABLES))
        shown = request.shown("en_US", 5)
        assert ids(shown) == ["cancel"]
        assert "1. Users\n2. Posts, old\n3. 3rd" in shown.description
        outcome = request.understand("1, nobody")
        assert isinstance(outcome, Unclear)
        assert "nobody" in texts.render(outcome.text_key, "en_US", outcome.params)
        assert isinstance(request.understand("4"), Unclear)
        assert isinstance(request.understand("skip"), Unclear)
        custom = dataclasses.replace(TABLES, custom=True)
        assert values(say("1, nobody", question(custom))) == {"tables": ["a", "nobody"]}
        assert values(say("all, but one", question(custom))) == {"tables": ["all, but one"]}

    @pytest.mark.parametrize(("text", "value"), [("0", 0), ("-3", -3), ("２.5", 2.5), ("1e3", 1000.0), ("+7", 7)])
    def test_numbers_are_numbers(self, text: str, value: float) -> None:
        """Our rule: whole where written whole."""
        got = values(say(text, question(PORT)))["port"]
        assert (got, type(got)) == (value, type(value))

    @pytest.mark.parametrize("text", ["", "many", "1,5", "1,000", "0x10", "inf", "nan", "1e999", "1 2", "9" * 5_000])
    def test_what_is_no_number_is_asked_again(self, text: str) -> None:
        """Our rule: a comma is not guessed about, nothing endless is taken."""
        assert isinstance(say(text, question(PORT)), Unclear)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("yes", True),
            ("1", True),
            ("да", True),
            ("はい", True),
            ("Có", True),
            ("true", True),
            ("no", False),
            ("2", False),
            ("否", False),
            ("Không", False),
        ],
    )
    def test_switches_are_yes_or_no(self, text: str, value: bool) -> None:
        """Our rule: in every language."""
        assert values(say(text, question(SURE)))["sure"] is value

    def test_any_text_answers_a_text(self) -> None:
        """Our rule: while a text is open everything but leaving out and not answering is it, numbers and yes, too."""
        for text in ("1", "yes", "deny because x", "/tmp", "no\nnever"):
            assert values(say(f" {text} ", question(NOTE))) == {"note": text}
        assert isinstance(say(" \u200b", question(NOTE)), Unclear)

    @pytest.mark.parametrize(
        "field", [DATABASE, SURE, NOTE, dataclasses.replace(TABLES, required=False), dataclasses.replace(PORT, required=False)]
    )
    @pytest.mark.parametrize(
        "text", ["skip", "-", "跳过", "スキップ", "ข้าม", "bỏ qua", "omitir", "Пропустить", "Leave this out"]
    )
    def test_an_optional_field_may_be_left_out(self, field: QuestionField, text: str) -> None:
        """Our rule: by word, label or button; what is left out is no value."""
        for pressed in (False, True):
            request = opened(question(field, NOTE))
            assert (request.pressed("skip", {}) if pressed else request.understand(text)) == Again()
            assert values(request.understand("x")) == {"note": "x"}

    def test_a_required_field_may_not(self) -> None:
        """Our rule: it is asked again."""
        assert isinstance(say("skip", question(PORT)), Unclear)
        assert isinstance(opened(question(PORT)).pressed("skip", {}), Unclear)
        assert values(say("skip", question(dataclasses.replace(NOTE, required=True)))) == {"note": "skip"}

    @pytest.mark.parametrize("field", [DATABASE, TABLES, SURE, PORT, NOTE])
    @pytest.mark.parametrize("text", ["cancel", "取消", "キャンセル", "ยกเลิก", "hủy", "Cancelar", "ОТМЕНА", "Do not answer"])
    def test_no_answer_is_always_possible(self, field: QuestionField, text: str) -> None:
        """Our rule: by word, label or button, at every field."""
        for pressed in (False, True):
            request = opened(question(NOTE, field))
            assert request.understand("x") == Again()
            outcome = request.pressed("cancel", {}) if pressed else request.understand(text)
            assert outcome == Decided(Answer(), "cancelled")

    def test_a_press_on_the_field_before_is_none_on_this_one(self) -> None:
        """Our rule: an option's name is its field's, so that a double press answers nothing twice."""
        request = opened(question(DATABASE, dataclasses.replace(DATABASE, name="again")))
        first = request.shown("en_US", 5).options[0].option_id
        assert request.pressed(first, {}) == Again()
        assert isinstance(request.pressed(first, {}), Unclear)
        second = request.shown("en_US", 5).options[1].option_id
        assert values(request.pressed("", {"choice": second})) == {"db": "pg", "again": "lite"}

    def test_more_options_than_buttons_are_numbered_only(self) -> None:
        """Our rule: the host takes 20 actions, two of which are ours."""
        field = QuestionField("f", "F", "select", options=tuple((f"v{number}", f"L{number}") for number in range(1, 51)))
        shown = opened(question(field)).shown("en_US", 5)
        assert ids(shown) == ["skip", "cancel"]
        assert "50. L50" in shown.description
        assert values(say("50", question(field))) == {"f": "v50"}
        fewer = dataclasses.replace(field, options=field.options[:18])
        assert len(opened(question(fewer)).shown("en_US", 5).options) == 20

    def test_what_is_too_much_to_ask_is_left_out_and_said(self) -> None:
        """Our rule: a question from a daemon has a bound of fields, options and text, and says how much lies beyond it."""
        options = tuple((f"v{number}", f"label {number}") for number in range(20_000))
        fields = (QuestionField("f", "F" * 100_000, "select", options=options, default=["v1"] * 500), *[SURE] * 5_000)
        event = event_from_json(to_json(question(*fields, message="m " * 1_000_000)))
        assert isinstance(event, QuestionAsked)
        assert len(event.fields) == limits.QUESTION_FIELDS
        assert len(event.fields[0].options) == len(event.fields[0].default) == limits.QUESTION_OPTIONS
        assert len(event.message) == len(event.fields[0].label) == limits.QUESTION_TEXT_CHARS
        assert event.message.endswith("…")
        shown = opened(event).shown("en_US", 5)
        assert "19901 more options are left out" in shown.text
        assert "4951 more values" in shown.text
        assert opened(event).understand("label 98") == Again()
        assert isinstance(opened(event).understand("label 99"), Unclear)
        small = question(DATABASE, SURE)
        assert event_from_json(to_json(small)) == small
        assert "left out" not in opened(small).shown("en_US", 5).text

    @pytest.mark.parametrize("limit", [500, limits.DISCORD_TEXT_UNITS, limits.TELEGRAM_TEXT_UNITS])
    def test_as_many_options_are_shown_as_fit(self, limit: int) -> None:
        """Our rule: beyond the surface's room options are not listed, and not one that has room is missing."""
        options = tuple((f"v{number}", f"{number} " + "long " * 8) for number in range(1, 400))
        request = opened(question(QuestionField("f", "F", "select", options=options)), limit)
        shown = request.shown("en_US", 5)
        listed = [line for line in shown.text.splitlines() if re.match(r"[0-9]+\. ", line)]
        assert shown.text.splitlines()[shown.text.splitlines().index(listed[-1]) + 1] == "…"
        assert 0 <= limit - utf16_units(shown.text) < len(listed[-1]) + 10
        assert values(request.understand("99")) == {"f": "v99"}

    @pytest.mark.parametrize("limit", [None, 500, limits.DISCORD_TEXT_UNITS, limits.TELEGRAM_TEXT_UNITS])
    @pytest.mark.parametrize("language", ["en_US", "ru_RU", "th_TH"])
    def test_long_questions_are_cut_to_the_surface(self, language: str, limit: int | None) -> None:
        """Our rule: a question is no action; its text gives way to its options."""
        options = tuple((f"v{number}", f"{number} " + "long " * 80) for number in range(50))
        event = question(QuestionField("f", "F", "select", options=options, description="d" * 9_000), message="m " * 9_000)
        request = opened(event, limit)
        shown = request.shown(language, 5)
        assert shown.request("i", 1).title == shown.title
        if limit is not None:
            assert utf16_units(f"{shown.title}\n\n{shown.description}") <= limit
            assert utf16_units(shown.text) <= limit
        assert values(request.understand("50")) == {"f": "v49"}

    def test_a_question_says_nothing_twice(self) -> None:
        """Claude Code 2.1 and Codex 0.171 repeat the questions in the message; each is shown at its own step."""
        fields = (
            QuestionField("q1", "Which database?", description="Postgres: solid"),
            QuestionField("q2", "Tables", description="Which tables?\nUsers: all of them"),
        )
        shown = opened(question(*fields, message="Which database?\nWhich tables?")).shown("en_US", 5)
        assert shown.text.count("Which database?") == 1
        assert "Which tables?" not in shown.text

    def test_a_question_cannot_hide_its_choices(self) -> None:
        """Our rule: the agent's text opens no code block over what stands below it."""
        shown = opened(question(DATABASE, message="Look:\n```\nx\u202e\x1b[31m")).shown("en_US", 5)
        assert blocks(shown.description) == []
        assert "\u202e" not in shown.description
        assert "\x1b" not in shown.description

    def test_a_default_is_told(self) -> None:
        """Our rule: what leaving out means is said, by label."""
        shown = opened(question(dataclasses.replace(DATABASE, default="lite"))).shown("en_US", 5)
        assert "If you leave it out: SQLite" in shown.text
        assert "If you leave it out: No" in opened(question(dataclasses.replace(SURE, default=False))).shown("en_US", 5).text

    def test_a_question_without_fields_is_consented_to_or_not(self) -> None:
        """Our rule: consent is an answer without values; it has a choice, so that no agent takes it for a cancellation."""
        assert [option.label for option in opened(question()).shown("en_US", 5).options] == ["Confirm", "Do not answer"]
        for text in ("1", "confirm", "yes", "ok"):
            assert say(text, question()) == Decided(Answer("accept"), "answered")
        for text in ("2", "no", "cancel"):
            assert say(text, question()) == Decided(Answer(), "cancelled")
        assert opened(question()).pressed("accept", {}) == Decided(Answer("accept"), "answered")
        assert isinstance(say("perhaps", question()), Unclear)
        assert say("skip", question(NOTE)) == Decided(Answer("accept"), "answered"), "all left out"

    def test_a_question_is_described_by_its_open_field(self) -> None:
        """Our rule: who is reminded reads what is waited for now."""
        request = opened(question(DATABASE, PORT))
        assert request.described() == "Database"
        request.understand("1")
        assert request.described() == "Port"
        assert opened(question(PORT, message="Which\nport?")).described() == "Which port?"


LARK = FormSurface(frozenset({"text", "textarea", "number", "select"}), 1)
"""What the Lark and DingTalk adapters say (LangBot 4.11.2)."""
BUTTONS = FormSurface(frozenset({"select"}), 1)
"""What the Telegram, Discord, WeCom and QQ adapters say (LangBot 4.11.2)."""
FORMS = FormSurface(frozenset({"text", "textarea", "select", "multiselect", "number", "boolean"}))
ALL = (DATABASE, TABLES, SURE, PORT, NOTE)


def form(*fields: QuestionField, surface: FormSurface = FORMS, **more: Any) -> tuple[OpenRequest, Shown]:
    """A question that is shown as one form."""
    request = opened(question(*fields), **more)
    shown = request.shown("en_US", 5, surface)
    assert shown.kind == "form"
    return request, shown


def told(outcome: Outcome) -> str:
    """What a person reads when a form did not count."""
    assert isinstance(outcome, Unclear)
    return texts.render(outcome.text_key, "en_US", outcome.params)


class TestForms:
    """A question as one form, where the surface renders all of its fields."""

    def test_a_question_is_one_form_where_all_its_fields_are_rendered(self) -> None:
        """Our rule: labels, options, what is required, defaults; fields only, as no adapter shows actions beside them."""
        _, shown = form(DATABASE, TABLES, SURE, dataclasses.replace(PORT, default=5432), NOTE)
        request = shown.request("i1", 1_800_000_000)
        assert (request.kind, request.actions) == ("form", [])
        assert [(each.id, each.label, each.type, each.required) for each in request.fields] == [
            ("db", "Database", "select", False),
            ("tables", "Tables", "multiselect", True),
            ("sure", "Really?", "boolean", False),
            ("port", "Port", "number", True),
            ("note", "Note", "text", False),
        ]
        assert [(each.value, each.label) for each in request.fields[0].options] == [("pg", "Postgres"), ("lite", "SQLite")]
        assert request.fields[3].default == 5432
        assert "Fill in the form" in (request.description or "")

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_a_form_says_how_to_answer_without_it(self, language: str) -> None:
        """A foreign press may take a form away: its description is enough to write an answer, and its text is the step."""
        request = opened(question(*ALL))
        step = request.shown(language, 5)
        shown = request.shown(language, 5, FORMS)
        for part in ("Please choose.", "Where to?", "1. Postgres\n2. SQLite\n3. ", step.title):
            assert part in shown.description
        assert shown.text == step.text
        assert len(shown.request("i", 1).fields) == 5

    def test_everything_sent_counts_at_once(self) -> None:
        """Our rule: values as the field's type has them, what is empty is left out."""
        request, _ = form(*ALL)
        sent = {"db": "lite", "tables": ["c", "a"], "sure": False, "port": 5432, "note": " x "}
        assert values(request.pressed("", sent)) == {**sent, "note": "x"}
        assert "already" in told(request.pressed("", sent))
        request, _ = form(*ALL)
        assert values(request.pressed("", {"tables": ["a"], "port": "5432", "note": " ", "db": None})) == {
            "tables": ["a"],
            "port": 5432,
        }
        request, _ = form(DATABASE, NOTE)
        assert request.pressed("", {}) == Decided(Answer("accept"), "answered"), "all left out"

    @pytest.mark.parametrize(
        ("sent", "says"),
        [
            ({"other": "x"}, "fields that this question does not have: other"),
            ({"db": "mysql"}, 'no answer to "Database": mysql'),
            ({"db": "2"}, 'no answer to "Database": 2'),
            ({"db": ["pg"]}, 'no answer to "Database"'),
            ({"tables": ["a", "z"]}, 'no answer to "Tables"'),
            ({"tables": [{"a": 1}]}, 'no answer to "Tables"'),
            ({"sure": "perhaps"}, 'no answer to "Really?": perhaps'),
            ({"port": "many"}, "A number is needed here: Port"),
            ({"port": True}, "A number is needed here: Port"),
            ({"port": 10**50}, "A number is needed here: Port"),
            ({"note": {"a": "b"}}, 'no answer to "Note"'),
            ({"tables": []}, "Not answered yet: Tables"),
            ({"tables": None, "port": " "}, "Not answered yet: Tables, Port"),
        ],
    )
    def test_a_form_with_anything_wrong_counts_not_at_all_and_stays_open(self, sent: dict[str, Any], says: str) -> None:
        """Our rule: it says what is wrong; shown again it holds what was right."""
        request, _ = form(*ALL)
        right = {"tables": ["b"], "port": 1, "note": "kept"}
        assert says in told(request.pressed("", {**right, **sent}))
        again = request.shown("en_US", 5, FORMS)
        filled = {item.field_id: item.default for item in again.fields}
        assert all(filled[name] == (None if name in sent else value) for name, value in right.items())
        assert filled["note"] != sent.get("note", "")
        assert values(request.pressed("", {**right, "sure": True})) == {**right, "sure": True}

    def test_an_open_form_is_answered_by_writing_too(self) -> None:
        """Our rule: one after the other; what is left is one form again, and one choice left has its buttons."""
        request, _ = form(PORT, TABLES, SURE)
        assert "number is needed" in told(request.understand("many"))
        assert request.understand("80") == Again()
        shown = request.shown("en_US", 5, FORMS)
        assert [item.field_id for item in shown.fields] == ["tables", "sure"]
        assert request.understand("1,3") == Again()
        last = request.shown("en_US", 5, FORMS)
        assert (last.kind, last.fields, len(last.options)) == ("choice", (), 4)
        assert values(request.pressed(last.options[0].option_id, {})) == {"port": 80, "tables": ["a", "c"], "sure": True}

    def test_what_was_written_stays_when_the_rest_is_sent(self) -> None:
        """Our rule: both ways fill the same answer."""
        request, _ = form(PORT, NOTE, TABLES)
        assert request.understand("80") == Again()
        request.shown("en_US", 5, FORMS)
        assert values(request.pressed("", {"note": "n", "tables": ["a"]})) == {"port": 80, "note": "n", "tables": ["a"]}

    @pytest.mark.parametrize("text", ["cancel", "Do not answer", "取消"])
    def test_no_answer_is_possible_at_a_form(self, text: str) -> None:
        """Our rule: by word, as a form has no button for it; by its name where a surface ever sends one."""
        request, shown = form(NOTE, PORT)
        assert "cancel: Do not answer" in shown.description
        assert request.understand(text) == Decided(Answer(), "cancelled")
        request, _ = form(NOTE, PORT)
        assert request.pressed("cancel", {}) == Decided(Answer(), "cancelled")

    @pytest.mark.parametrize("field", [DATABASE, SURE, dataclasses.replace(DATABASE, custom=True)])
    @pytest.mark.parametrize("surface", [BUTTONS, LARK, FORMS])
    def test_one_choice_keeps_its_buttons(self, field: QuestionField, surface: FormSurface) -> None:
        """Our rule: a press answers it, a form would need two."""
        shown = opened(question(field)).shown("en_US", 5, surface)
        assert shown == opened(question(field)).shown("en_US", 5)
        assert shown.options[2].option_id == "skip"

    @pytest.mark.parametrize(
        ("surface", "fields"),
        [
            (BUTTONS, (DATABASE, SURE)),
            (BUTTONS, (NOTE,)),
            (LARK, (DATABASE, NOTE)),
            (LARK, (TABLES,)),
            (FormSurface(frozenset({"select", "text"})), (DATABASE, TABLES)),
            (FormSurface(frozenset({"select"})), (DATABASE, NOTE)),
            (FormSurface(frozenset({"select"})), (dataclasses.replace(DATABASE, custom=True), SURE)),
            (dataclasses.replace(FORMS, max_fields=2), (dataclasses.replace(DATABASE, custom=True), SURE)),
            (dataclasses.replace(FORMS, max_fields=0), (NOTE,)),
            (FORMS, ()),
            (FORMS, (dataclasses.replace(DATABASE, options=()), NOTE)),
            (FORMS, (dataclasses.replace(DATABASE, options=tuple((f"v{n}", "") for n in range(101))), NOTE)),
            (FORMS, tuple(dataclasses.replace(NOTE, name=f"n{n}") for n in range(51))),
            (
                FORMS,
                tuple(
                    dataclasses.replace(DATABASE, name=f"n{n}", options=tuple((f"v{m}", "long " * 90) for m in range(99)))
                    for n in range(9)
                ),
            ),
        ],
    )
    def test_elsewhere_the_fields_come_one_after_another(self, surface: FormSurface, fields: tuple[QuestionField, ...]) -> None:
        """The surface's types and number, the host's bounds (SDK 0.7.18): a form is whole or there is none."""
        event = question(*fields)
        assert opened(event).shown("en_US", 5, surface) == opened(event).shown("en_US", 5)

    def test_one_text_or_number_is_a_form_where_the_surface_has_it(self) -> None:
        """The Lark and DingTalk adapters (LangBot 4.11.2) render one field, and send it back under its id."""
        request, shown = form(PORT, surface=LARK)
        assert [(item.field_id, item.type) for item in shown.fields] == [("port", "number")]
        assert "(1 of 1)" not in shown.description
        assert values(request.pressed("", {"port": 8080})) == {"port": 8080}
        request, shown = form(NOTE, surface=LARK)
        assert request.pressed("", {}) == Decided(Answer("accept"), "answered")

    def test_a_field_is_rendered_as_the_next_best_of_what_there_is(self) -> None:
        """Our rule: a number can be written as a text, a switch be one of two; the values stay what they are."""
        request, shown = form(PORT, SURE, surface=FormSurface(frozenset({"select", "textarea"})))
        assert [item.type for item in shown.fields] == ["textarea", "select"]
        assert shown.fields[1].options == (("true", "Yes"), ("false", "No"))
        assert values(request.pressed("", {"port": "2.5", "sure": "false"})) == {"port": 2.5, "sure": False}

    def test_own_words_have_a_text_beside_the_choice(self) -> None:
        """Our rule: they are instead of one option, or further to several; then neither field alone must be filled in."""
        fields = (
            dataclasses.replace(DATABASE, custom=True, required=True),
            dataclasses.replace(TABLES, custom=True, required=True),
        )
        request, shown = form(*fields)
        names = ["db", "db_own", "tables", "tables_own"]
        assert [(item.field_id, item.required) for item in shown.fields] == [(name, False) for name in names]
        assert "Not answered yet: Database, Tables" in told(request.pressed("", {"db_own": " "}))
        sent = {"db": "pg", "db_own": "MySQL", "tables": ["a"], "tables_own": "nobody"}
        assert values(request.pressed("", sent)) == {"db": "MySQL", "tables": ["a", "nobody"]}
        request, _ = form(*fields)
        assert "no answer" in told(request.pressed("", {"db_own": 7, "tables": ["a"]}))

    @pytest.mark.parametrize(
        "names",
        [("", "b"), ("same", "same"), ("x" * 200, "y"), ("a\nb", "c"), ("\ud800", "b"), ("a", "a_own"), ("1_own", "1")],
    )
    def test_names_that_the_host_would_not_take_are_numbered(self, names: tuple[str, str]) -> None:
        """The host (LangBot 4.11.2) takes ids of 1 to 128 characters, each once; the agent gets its own names."""
        request, shown = form(*(QuestionField(name, "", "text") for name in names))
        assert [item.id for item in shown.request("i", 1).fields] == ["1", "2"]
        assert all(item.label for item in shown.fields)
        assert values(request.pressed("", {"1": "one", "2": "two"})) == {names[0]: "one", names[1]: "two"}

    @pytest.mark.parametrize(
        "options", [(("s", "A"), ("s", "B")), (("x" * 600, "A"), ("y", "B")), (("\x1b[m", "A"), ("y", "B"))]
    )
    def test_option_values_that_the_host_would_not_take_are_numbered(self, options: tuple[tuple[str, str], ...]) -> None:
        """The host (LangBot 4.11.2) takes values of 1 to 512 characters, each once in a field; the agent gets its own."""
        request, shown = form(QuestionField("f", "F", "select", options=options, default=options[1][0]), NOTE)
        assert [option.value for option in shown.request("i", 1).fields[0].options] == ["1", "2"]
        assert shown.fields[0].default in ("1", "2")
        assert values(request.pressed("", {"f": "2"})) == {"f": options[1][0]}

    @pytest.mark.parametrize(
        ("field", "default"),
        [
            (dataclasses.replace(DATABASE, default="lite"), "lite"),
            (dataclasses.replace(DATABASE, default="none of them"), None),
            (dataclasses.replace(TABLES, default=["c", "z"]), ["c"]),
            (dataclasses.replace(SURE, default=False), False),
            (dataclasses.replace(PORT, default="many"), None),
            (dataclasses.replace(NOTE, default="a note"), "a note"),
            (dataclasses.replace(NOTE, default={"a": 1}), None),
        ],
    )
    def test_a_form_is_filled_in_with_the_defaults(self, field: QuestionField, default: Any) -> None:
        """Our rule: with those that are answers to their field."""
        _, shown = form(field, NOTE if field.name != "note" else PORT)
        assert shown.fields[0].default == default

    @pytest.mark.parametrize("limit", [None, 500, limits.DISCORD_TEXT_UNITS, limits.TELEGRAM_TEXT_UNITS])
    def test_a_form_fits_its_surface_or_there_is_none(self, limit: int | None) -> None:
        """Our rule: the texts give way first; where even they leave no room the fields come one after another."""
        long = dataclasses.replace(DATABASE, label="L" * 900, description="d " * 9_000)
        request = opened(question(long, dataclasses.replace(long, name="again"), message="m " * 9_000), limit)
        shown = request.shown("en_US", 5, FORMS)
        assert shown.kind == ("choice" if limit == 500 else "form")
        assert all(len(item.label) <= limits.INTERACTION_FIELD_CHARS for item in shown.request("i", 1).fields)
        if limit is not None:
            assert utf16_units(f"{shown.title}\n\n{shown.description}") <= limit
        if shown.kind == "form":
            assert values(request.pressed("", {"db": "lite", "again": "pg"})) == {"db": "lite", "again": "pg"}
        else:
            assert request.pressed(shown.options[0].option_id, {}) == Again()

    def test_a_step_shown_after_a_form_takes_presses_again(self) -> None:
        """Our rule: a submission means what was shown last."""
        request, _ = form(SURE, NOTE)
        step = request.shown("en_US", 5)
        assert request.pressed(step.options[0].option_id, {}) == Again()
