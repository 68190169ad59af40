"""What an agent wants to do, as text that a person can rely on.

Guarantees:

- :func:`visible` loses nothing and hides nothing: different texts look different, a character that cannot be seen, reorders its
  neighbours or looks like a space stands as its code point in ``⟦U+202E⟧``, and that bracket itself does, too;
- what stands in :func:`fenced` or :func:`code_span` cannot end it;
- :func:`changes` shows a change whole: lines left out are the same before and after.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

from pkg import limits
from pkg.agent_api import FileDiff

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"})
_PLAIN: Final = re.compile(r"[ -~\n\t]*")
_BLANK_LETTERS: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U00013441\U00013442\U0001d159\U000e0100-\U000e01ef]"
)
"""Characters of other categories that draw nothing: joiners, fillers, variation selectors, the empty Braille cell."""
_GAP: Final = re.compile(rf"((?<=\S)[ \t]{{{limits.ACTION_GAP_CHARS},}}|^[ \t]{{{limits.ACTION_INDENT_CHARS},}})", re.MULTILINE)
_EMPTY_LINES: Final = re.compile(rf"(\n(?:[ \t]*+\n){{{limits.ACTION_EMPTY_LINES},}})")
_TICKS: Final = re.compile(r"`+")
_SEPARATOR: Final = "\u27e6"


def _code_point(char: str) -> str:
    return f"⟦U+{ord(char):04X}⟧"


def _gap(match: re.Match[str]) -> str:
    """A gap that could push what follows out of sight, as the number of its blanks."""
    runs = re.finditer(r" +|\t+|\n+", match.group(1))
    return "".join(f"⟦U+{ord(run.group()[0]):04X}×{len(run.group())}⟧" for run in runs)


def visible(text: str, *, lines: bool = True) -> str:
    """``text`` with everything in it made visible; line breaks stay (with ``lines``), and blanks where they do no harm."""
    if not _PLAIN.fullmatch(text):
        text = "".join(_shown(text))
    if not lines:
        text = text.replace("\n", _code_point("\n"))
    return _GAP.sub(_gap, _EMPTY_LINES.sub(_gap, text))


def _shown(text: str) -> Iterator[str]:
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if char in " \n\t":
            yield char
        elif char == _SEPARATOR or category in _HIDDEN or marks > limits.ACTION_MARKS or _BLANK_LETTERS.match(char):
            yield _code_point(char)
        else:
            yield char


def fenced(text: str, language: str = "") -> str | None:
    """``text`` as a code block with a fence longer than any in it; ``None`` where no fence is long enough for every surface."""
    marks = max((len(run) for run in _TICKS.findall(text)), default=0) + 1
    if marks > limits.ACTION_FENCE_CHARS:
        return None
    mark = "`" * max(3, marks)
    return f"{mark}{language}\n{text}\n{mark}"


def code_span(text: str) -> str:
    """``text`` (one line) as inline code."""
    runs = {len(run) for run in _TICKS.findall(text)}
    mark = "`" * next(length for length in range(1, len(runs) + 2) if length not in runs)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{mark}{space}{text}{space}{mark}"


def changes(diffs: Sequence[FileDiff], most: int) -> str | None:
    """The diffs of an action as one unified diff, each with its path; ``None`` beyond ``most`` characters."""
    if sum(len(diff.old_text or "") + len(diff.new_text) for diff in diffs) > limits.ACTION_DIFF_CHARS:
        return None
    lines: list[str] = []
    for line in (line for diff in diffs for line in _unified(diff)):
        most -= len(line) + 1
        if most < -1:
            return None
        lines.append(line)
    return "\n".join(lines)


def _unified(diff: FileDiff) -> Iterator[str]:
    path = visible(diff.path, lines=False)
    yield "--- /dev/null" if diff.old_text is None else f"--- {path}"
    yield f"+++ {path}"
    before, after = _lines(diff.old_text or ""), _lines(diff.new_text)
    for line in _hunks(before, after):
        body = line[:-1] if line.endswith("\n") else line
        yield visible(body) if line.startswith("@@") else body[:1] + visible(body[1:])
        if not line.endswith("\n") and not line.startswith("@@"):
            yield "\\ No newline at end of file"


def _lines(text: str) -> list[str]:
    pieces = text.split("\n")
    lines = [piece + "\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def _hunks(before: list[str], after: list[str]) -> Iterator[str]:
    """The lines of the hunks. What is the same at both ends is set aside first; a large rest is one replacement."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    if max(len(before), len(after)) - start - end > limits.ACTION_DIFF_LINES:
        yield f"@@ -{start + 1},{len(before) - start - end} +{start + 1},{len(after) - start - end} @@\n"
        yield from ("-" + line for line in before[start : len(before) - end])
        yield from ("+" + line for line in after[start : len(after) - end])
        return
    first = max(0, start - limits.ACTION_DIFF_CONTEXT)
    rest = max(0, end - limits.ACTION_DIFF_CONTEXT)
    old, new = before[first : len(before) - rest], after[first : len(after) - rest]
    matcher = difflib.SequenceMatcher(None, old, new)
    for group in matcher.get_grouped_opcodes(limits.ACTION_DIFF_CONTEXT):
        yield (f"@@ -{_span(first, group[0][1], group[-1][2])} +{_span(first, group[0][3], group[-1][4])} @@\n")
        for tag, low, high, new_low, new_high in group:
            if tag == "equal":
                yield from (" " + line for line in old[low:high])
                continue
            yield from ("-" + line for line in old[low:high])
            yield from ("+" + line for line in new[new_low:new_high])


def _span(offset: int, low: int, high: int) -> str:
    return f"{offset + low + 1 if high > low else offset + low},{high - low}"
