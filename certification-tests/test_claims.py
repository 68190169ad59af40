"""The pages that promise something: every sentence of theirs names the tests behind it, and those tests exist.

A page is text, bullets and tables, then a section ``Proofs`` with a numbered list of tests. Each sentence is followed by its
numbers in square brackets, each row of a table has them in its last cell.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tooling import ROOT, packages

pytestmark = pytest.mark.static

TESTS = ROOT / "certification-tests"
PAGES = (f"{packages.SOURCE}/SHARED_RUNTIME.md", "SECURITY.md", "certification-tests/CODING-CANDIDATES.md")
NUMBERS = re.compile(r"\s*\[(\d+(?:, \d+)*)\]")
SENTENCE_END = re.compile(r"[.?!](?=\s|$)")


def blocks(text: str) -> list[str]:
    """Paragraphs, bullets and rows of a page, each on one line; headings, rulers and what is fenced are left out."""
    found: list[str] = []
    fenced = False
    following = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        stripped = line.strip()
        if fenced or not stripped or stripped.startswith(("```", "#")):
            following = False
        elif stripped.startswith("|") or line.startswith(("- ", "1. ")) or not following:
            found.append(re.sub(r"^(- |\d+\. )", "", stripped))
            following = not stripped.startswith("|")
        else:
            found[-1] += " " + stripped
    rows = [each for each in found if each.startswith("|")]
    heads = {rows[index - 1] for index, row in enumerate(rows) if set(row) <= set("|-: ")}
    return [each for each in found if each not in heads and not set(each) <= set("|-: ")]


def unproven(block: str) -> list[str]:
    """The sentences of a block that have no numbers behind them."""
    if block.startswith("|"):
        last = block.strip("|").split("|")[-1]
        return [] if NUMBERS.fullmatch(last.rstrip()) else [block]
    pieces = NUMBERS.split(block)
    sentences, rest = [each.strip() for each in pieces[0::2][:-1]], pieces[-1]
    bad = [each for each in sentences if not each.endswith(".") or len(SENTENCE_END.findall(each)) != 1]
    return [*bad, *([rest] if rest.strip() else [])]


def proofs(section: str) -> dict[int, list[str]]:
    """The numbered tests."""
    found: dict[int, list[str]] = {}
    for number, names in re.findall(r"^(\d+)\. (.+(?:\n   .+)*)$", section, flags=re.MULTILINE):
        assert int(number) not in found, f"{number} stands twice"
        found[int(number)] = re.findall(r"`([^`]+)`", names)
    return found


def exists(name: str) -> bool:
    """Whether there is such a test: ``file.py::function`` or ``file.py::Class::function``."""
    file, *path = name.split("::")
    if not path or not path[-1].startswith("test_") or not (TESTS / file).is_file():
        return False
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    for part in path:
        node = next(
            (
                each
                for each in body
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and each.name == part
            ),
            None,
        )
        if node is None:
            return False
        body = node.body
    return True


def parted(page: str) -> tuple[str, str]:
    """A page's text, and its proofs."""
    text, heading, section = (ROOT / page).read_text(encoding="utf-8").partition("\n## Proofs\n")
    assert heading, f"{page} has no section of proofs"
    return text, section


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_names_its_tests(page: str) -> None:
    """Our rule: what is promised is tested, and a sentence without a test is not written."""
    text, _ = parted(page)
    assert [missing for block in blocks(text) for missing in unproven(block)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_named_tests_exist(page: str) -> None:
    """Our rule: a renamed or deleted test takes its sentence with it."""
    text, section = parted(page)
    named = proofs(section)
    assert [name for names in named.values() for name in names if not exists(name)] == []
    assert [number for number, names in named.items() if not names] == []
    used = {int(number) for numbers in NUMBERS.findall(text) for number in numbers.split(",")}
    assert used == named.keys()


def test_the_contract_is_the_same_in_all_packages() -> None:
    """Our rule: what holds in a shared worker does not depend on the agent."""
    one, *others = ((ROOT / name / "SHARED_RUNTIME.md").read_bytes() for name in packages.NAMES)
    assert all(other == one for other in others)


def test_a_page_that_promises_too_much_would_be_seen(tmp_path: Path) -> None:
    """The other side of the tests above."""
    assert unproven("It is so. [1] And so. [2, 3]") == []
    assert unproven("It is so. And so. [1]") == ["It is so. And so."]
    assert unproven("It is so. [1] And so.") == [" And so."]
    assert unproven("| a | b |") == ["| a | b |"]
    assert unproven("| a | b [1] | [2] |") == []
    assert blocks("# Title\n\nOne\ntwo. [1]\n- three.\n  four. [2]\n\n| a | b |\n|---|---|\n| c | [1] |\n") == [
        "One two. [1]",
        "three. four. [2]",
        "| c | [1] |",
    ]
    assert proofs("1. `a.py::test_a`\n2. `b.py::test_b`,\n   `c.py::test_c`\n") == {
        1: ["a.py::test_a"],
        2: ["b.py::test_b", "c.py::test_c"],
    }
    assert exists("test_claims.py::test_the_named_tests_exist")
    assert not exists("test_claims.py::test_nothing_of_the_kind")
    assert not exists("test_nothing.py::test_the_named_tests_exist")
