"""Long text is cut where it hurts least, every part stands alone, and nothing is lost, doubled or broken."""

from __future__ import annotations

import itertools
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkg.text_clean import TextCleaner, clean, is_blank, one_line
from pkg.text_split import FenceTracker, Limit, cut, json_bytes, split, utf16_units

ROOMY = 600_000
TELEGRAM = Limit(4000, ROOMY)

_WORDS = st.sampled_from(
    [
        "word",
        "a rather longer phrase",
        "é́",
        "漢字",
        "句読点。",
        "👩‍👩‍👧‍👦",
        "🇯🇵🇫🇷",
        "👍🏽",
        "x" * 700,
        "漢" * 600,
        "😀" * 300,
        '"\\',
        "1️⃣",
    ]
)
_LINES = st.one_of(
    st.lists(_WORDS, max_size=6).map(" ".join),
    st.sampled_from(
        ["", "", "```python", "```", "~~~~", "~~~", "  ```js x=1", "  ```", "````", "> ```sh", "- ```", "x``` not", "```a`b"]
    ),
)
_TEXTS = st.lists(_LINES, max_size=60).map("\n".join)
_LIMITS = st.builds(Limit, st.one_of(st.none(), st.integers(500, 5000)), st.integers(3000, 20_000))


def _is_one_fence_line(text: str) -> bool:
    return "\n" not in text.strip("\n") and ("```" in text or "~~~" in text)


@settings(max_examples=300, deadline=None)
@given(_TEXTS, _LIMITS)
def test_parts_fit_and_their_bodies_are_the_text(text: str, limit: Limit) -> None:
    """Every part is within both limits, the bodies joined are the original, and only single fence lines are added."""
    parts = split(text, limit)
    assert "".join(part.body for part in parts) == text
    for part in parts:
        assert limit.units is None or len(part.text.encode("utf-16-le")) // 2 <= limit.units
        assert len(json.dumps(part.text)) - 2 <= limit.json_bytes
        before, body, after = part.text.partition(part.body)
        assert body
        assert not before or _is_one_fence_line(before)
        assert not after or _is_one_fence_line(after)


@settings(max_examples=300, deadline=None)
@given(_TEXTS, _LIMITS)
def test_no_part_leaves_a_fence_open(text: str, limit: Limit) -> None:
    """Each part read by itself ends outside any code fence, so that no surface renders the rest of the chat as code."""
    for part in split(text, limit):
        tracker = FenceTracker()
        tracker.feed(part.text)
        assert tracker.now is None, part.text[-200:]


@settings(max_examples=200, deadline=None)
@given(_TEXTS, _LIMITS)
def test_no_letter_is_torn(text: str, limit: Limit) -> None:
    """No part begins with a mark that belongs to the letter before it, and none ends or begins with a joiner."""
    bodies = [part.body for part in split(text, limit)]
    for before, after in itertools.pairwise(bodies):
        assert unicodedata.category(after[0]) not in {"Mn", "Me", "Mc"}
        assert "\u200d" not in (before[-1], after[0])
        assert not "\U0001f3fb" <= after[0] <= "\U0001f3ff"


@pytest.mark.parametrize("letter", ["👩‍👩‍👧‍👦", "🇯🇵", "é", "👍🏽", "1️⃣", "한", "🏴󠁧󠁢󠁿"])
@pytest.mark.parametrize("offset", range(3))
def test_a_letter_of_many_characters_stays_whole(letter: str, offset: int) -> None:
    """Families, flags, marks, skin tones, keycaps and jamo are cut between, never inside."""
    for part in split("x" * offset + letter * 2500, TELEGRAM):
        assert part.body.lstrip("x") == letter * part.body.count(letter)


@settings(max_examples=200, deadline=None)
@given(_TEXTS, st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_a_tracker_fed_in_pieces_knows_the_same_fence(text: str, sizes: list[int]) -> None:
    """The fence open at the end does not depend on how the text arrived."""
    whole, pieces = FenceTracker(), FenceTracker()
    whole.feed(text)
    position = 0
    while position < len(text):
        size = sizes[position % len(sizes)]
        pieces.feed(text[position : position + size])
        position += size
    assert pieces.now == whole.now


def test_a_cut_prefers_the_end_of_a_paragraph() -> None:
    """Two paragraphs that do not fit together become two parts."""
    first, second = "a sentence. " * 200 + "\n\n", "another one. " * 200
    assert [part.body for part in split(first + second, TELEGRAM)] == [first, second]


def test_a_cut_keeps_a_code_block_whole_where_it_can() -> None:
    """A block that would be torn moves to the next part."""
    block = "```py\n" + "x = 1\n" * 300 + "```\n"
    text = "prose " * 400 + "\n" + block + "prose " * 400
    assert any(part.body.startswith(block) for part in split(text, TELEGRAM))


@pytest.mark.parametrize(
    ("opening", "closing"), [("```python", "```"), ("~~~~ js", "~~~~"), ("   ````", "   ````"), ("> ```sh", "> ```")]
)
def test_a_long_code_block_is_closed_and_opened_again(opening: str, closing: str) -> None:
    """5,000 characters of code in one fence: each part has the same fence, with its marks, indentation and language."""
    text = f"{opening}\n" + "0123456789012345678901234567890123456789012345678\n" * 100 + closing
    parts = split(text, TELEGRAM)
    assert len(parts) == 2
    assert parts[0].text.endswith("\n" + closing)
    assert parts[1].text.startswith(opening + "\n")


def test_a_fence_opened_in_a_list_is_opened_again_without_the_bullet() -> None:
    """The list marker before a fence becomes indentation, not another item."""
    parts = split("- ```sh\n" + "  echo a line of shell code\n" * 300 + "  ```\n", TELEGRAM)
    assert len(parts) > 1
    assert all(part.text.startswith("  ```sh\n") for part in parts[1:])


def test_code_in_one_line_longer_than_a_message_is_cut_inside_its_fence() -> None:
    """A 5,000-character line of code has no good place: it is cut anywhere, and still each part is a closed block."""
    parts = split("```\n" + "x" * 5000 + "\n```", TELEGRAM)
    assert "".join(part.body for part in parts) == "```\n" + "x" * 5000 + "\n```"
    assert all(part.text.startswith("```\n") and part.text.rstrip("\n").endswith("\n```") for part in parts)


@pytest.mark.parametrize(
    ("text", "most"),
    [("a" * 5000, 2), ("😀" * 3000, 2), ("漢字。" * 33_334, 26), ("word " * 200_000, 252), ("é" * 3000, 1)],
)
def test_parts_are_well_filled(text: str, most: int) -> None:
    """Telegram counts UTF-16 units: 3,000 emoji are two messages, 100,000 CJK characters 26, a megabyte of words about 250."""
    assert len(split(text, TELEGRAM)) <= most


def test_without_a_unit_limit_the_bytes_of_the_json_count() -> None:
    """A surface without a limit still gets results of bounded JSON; a CJK character costs six bytes there."""
    parts = split("漢" * 102_400, Limit(None, 300_000))
    assert len(parts) == 3
    assert all(json_bytes(part.text) <= 300_000 for part in parts)


def test_an_empty_text_has_no_parts() -> None:
    """Nothing is not a message."""
    assert split("", TELEGRAM) == []


def test_text_that_fits_is_left_alone() -> None:
    """A short text is one part, unchanged."""
    part, rest, fence = cut("short `code`", TELEGRAM)
    assert (part.text, rest, fence) == ("short `code`", "", None)


def test_lengths_are_counted_as_the_services_count() -> None:
    """UTF-16 units for chats, ASCII-escaped JSON for the host."""
    assert (utf16_units("aé漢😀"), json_bytes('aé漢😀"\n')) == (5, 1 + 6 + 6 + 12 + 2 + 2)


# ------------------------------------------------------------------ cleaning

_ESCAPES = [
    "\x1b[31m",
    "\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\",
    "\x1b",
    "\x9b1m",
    "\x1bM",
    "[",
    "]",
    "\x9d0;title",
    "\x90",
    "\x07",
    "\x9c",
]
_OTHERS = ["text", "\r\n", "\r", "\n", "\x00", "\ud83d", "\ude00", "漢", "\t"]
_DIRTY = st.lists(st.sampled_from(_ESCAPES + _OTHERS), max_size=30)


@settings(max_examples=400, deadline=None)
@given(_DIRTY)
def test_cleaning_does_not_depend_on_how_the_text_arrived(pieces: list[str]) -> None:
    """Escape sequences, line ends and surrogate pairs cut by the agent's chunks give the text they give in one."""
    cleaner = TextCleaner()
    fed = "".join(cleaner.feed(piece) for piece in pieces) + cleaner.flush()
    assert fed == clean("".join(pieces))
    assert "\x1b" not in fed and "\x00" not in fed and "\r" not in fed
    fed.encode("utf-8")


def test_escapes_controls_and_broken_unicode_are_removed() -> None:
    """Colours, titles and links go, their text stays; half a character becomes the replacement character."""
    dirty = "a\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 NUL\x00 bell\x07 \ud83d\ude00 \ud800."
    assert clean(dirty) == "ared link NUL bell 😀 �."


def test_a_sequence_that_never_ends_does_not_swallow_the_answer() -> None:
    """An unterminated title is held back only up to its bound, then the rest is text again."""
    cleaner = TextCleaner()
    assert "the answer" in cleaner.feed("\x1b]0;" + "x" * 3000 + " the answer") + cleaner.flush()


@pytest.mark.parametrize("text", ["", " \n\t", "\u200b", "\ufeff \u200d", "\u2060"])
def test_what_nobody_sees_is_blank(text: str) -> None:
    """Telegram drops messages of invisible characters; they count as no text."""
    assert is_blank(text)
    assert not is_blank(text + "x")


def test_a_title_becomes_one_bounded_line() -> None:
    """Progress lines are single lines of bounded length."""
    assert one_line("run:\n  npm \x1b[1mtest\x1b[0m", 80) == "run: npm test"
    assert len(one_line("x" * 10_000, 80)) == 80
