"""The pages that promise something: every sentence of theirs names the tests behind it, and those tests exist.

A page is text, bullets and tables, then a section ``Proofs`` with a numbered list of tests. Each sentence is followed by its
numbers in square brackets. In a table whose last column has no title each row has them there; in every other table each cell
but the first has its own. What is fenced is code of the language it names, or text like any other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from evidence import recheck
from pkg import limits
from tooling import ROOT, packages

pytestmark = pytest.mark.static

TESTS = ROOT / "certification-tests"
CONTRACT = f"{packages.SOURCE}/SHARED_RUNTIME.md"
CANDIDATES = "certification-tests/CODING-CANDIDATES.md"
PAGES = (CONTRACT, "SECURITY.md", CANDIDATES)
NUMBERS = re.compile(r"\s*\[(\d+(?:, \d+)*)\]")
CODE = ("python", "sh")
SENTENCE_END = re.compile(r"[.?!](?=\s|$)")


def cells(row: str) -> list[str]:
    """The cells of a table's row."""
    return [each.strip() for each in row.strip().removeprefix("|").removesuffix("|").split("|")]


def blocks(text: str) -> list[str]:
    """What needs proofs, each on one line: paragraphs, bullets, rows of a table, or its cells where each has its own."""
    found: list[str] = []
    fence = ""
    following = False
    titles: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = "" if fence else stripped.removeprefix("```") or "text"
            stripped = ""
        if not stripped or stripped.startswith("#") or fence in CODE:
            following, titles = False, []
        elif stripped.startswith("|"):
            if titles and not set(stripped) <= set("|-: "):
                found += [f"| {each} |" for each in cells(stripped)[1:]] if titles[-1] else [stripped]
            following, titles = False, titles or cells(stripped)
        elif line.startswith(("- ", "1. ")) or not following:
            found.append(re.sub(r"^(- |\d+\. )", "", stripped))
            following, titles = True, []
        else:
            found[-1] += " " + stripped
    return found


def unproven(block: str) -> list[str]:
    """The sentences of a block that have no numbers behind them; a cell has them behind all of its text."""
    if block.startswith("|"):
        *before, last = cells(block)
        text, *behind = NUMBERS.split(last)
        return [] if behind[1:] == [""] and bool(before) != bool(text) else [block]
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


def constant(file: str, name: str) -> float:
    """A number that a test file gives a name."""
    (found,) = re.findall(rf"^{name} = ([0-9.]+)$", (TESTS / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return float(found)


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


def said(page: str) -> str:
    """A page's text on one line."""
    return " ".join(parted(page)[0].split())


def test_each_shape_has_its_own_proofs() -> None:
    """Our rule: what holds in one shape of worker is not proven by a test of another."""
    _, _, section = parted(CONTRACT)[0].partition("\n## The four shapes\n")
    head, _, *rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert cells(head) == ["", "debug (`lbp run`)", "dedicated worker", "one jail per installation", "shared pool"]
    assert [len(cells(row)) for row in rows] == [5] * 6
    assert len(blocks(section.partition("\n## ")[0])) == 4 * 6


def test_the_numbers_of_the_contract_are_those_of_the_code() -> None:
    """Our rule: a limit that is changed takes its sentence with it; how long something may take is what its tests allow."""
    text = said(CONTRACT)
    within, timers = (constant("test_statelessness.py", name) for name in ("GRACE", "GRACE_OF_TIMERS"))
    for sentence in (
        f"A worker takes {limits.RUNS_PER_PROCESS} runs at a time, in the pool at most {limits.RUNS_PER_INSTALLATION} of one ",
        f"An installation has at most {limits.RELAY_DAEMONS} daemons connected, {limits.RELAY_JOBS} jobs on them, ",
        f"and {limits.RELAY_CONNECTIONS} proven connections; ",
        f"up to {limits.PARKED_EVENT_BYTES >> 20} MiB of what its agent says stays in the worker. ",
        f"Within {within:.0f} seconds of an installation's revocation no task, thread, socket, file or process ",
        f"and within {timers:.0f} seconds no text and no secret. ",
    ):
        assert sentence in text


def test_the_gates_are_these() -> None:
    """Our rule: five things take a person, and nobody's program takes one of them away; the page names who and how."""
    assert recheck.GATES == (
        "independent review of the exact digests",
        "signature by the holder of the signing key",
        "acceptance with two live Workspaces",
        "network policy of the deployment",
        "accounts at vendors",
    )
    _, _, section = parted(CANDIDATES)[0].partition("\n## Gates that remain open\n")
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert all(cells(row)[0] in gate for row, gate in zip(rows, recheck.GATES, strict=True))


def test_what_is_not_claimed_is_this() -> None:
    """Our rule: the evidence and both pages leave the same four things open."""
    assert recheck.NOT_CLAIMED == (
        "resistance to escapes through the kernel",
        "admission into production",
        "isolation between live Workspaces",
        "accounts at vendors",
    )
    for open_ in ("escapes through the kernel", "admission into production", "isolation between live Workspaces", "vendor"):
        for page in (CONTRACT, CANDIDATES):
            assert open_ in said(page).partition("What is not ")[2]


@pytest.mark.parametrize("name", packages.NAMES)
def test_a_report_can_name_the_version(name: str) -> None:
    """Our rule: what the contract says is said of the version that each package's manifest has."""
    manifest = yaml.safe_load((ROOT / name / "manifest.yaml").read_text(encoding="utf-8"))
    assert f"of version {manifest['metadata']['version']}, " in said(CONTRACT)


def test_a_page_that_promises_too_much_would_be_seen(tmp_path: Path) -> None:
    """The other side of the tests above."""
    assert unproven("It is so. [1] And so. [2, 3]") == []
    assert unproven("It is so. And so. [1]") == ["It is so. And so."]
    assert unproven("It is so. [1] And so.") == [" And so."]
    assert unproven("| a | b |") == ["| a | b |"]
    assert unproven("| a | b [1] | [2] |") == []
    assert unproven("| a | b [1] |") == ["| a | b [1] |"]
    assert unproven("| a [1] |") == []
    assert unproven("| a [1]; b |") == ["| a [1]; b |"]
    assert unproven("| [1] |") == ["| [1] |"]
    assert blocks("# Title\n\nOne\ntwo. [1]\n- three.\n  four. [2]\n\n| a | |\n|---|---|\n| c | [1] |\n") == [
        "One two. [1]",
        "three. four. [2]",
        "| c | [1] |",
    ]
    assert blocks("| | a | b |\n|---|---|---|\n| c | d [1] | e |\n\nf") == ["| d [1] |", "| e |", "f"]
    assert blocks("```sh\none\n```\n```\ntwo.\n```\nthree") == ["two.", "three"]
    assert proofs("1. `a.py::test_a`\n2. `b.py::test_b`,\n   `c.py::test_c`\n") == {
        1: ["a.py::test_a"],
        2: ["b.py::test_b", "c.py::test_c"],
    }
    assert exists("test_claims.py::test_the_named_tests_exist")
    assert not exists("test_claims.py::test_nothing_of_the_kind")
    assert not exists("test_nothing.py::test_the_named_tests_exist")
