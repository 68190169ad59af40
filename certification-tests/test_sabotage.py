"""The command that breaks the sources line by line: its table fits, and it takes nothing for caught that is not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from langbot_plugin.entities.io.context import InstallationBinding

from testkit import hostile_trees
from tooling import ROOT, packages, trials
from tooling.sabotages import SABOTAGES, Sabotage
from tooling.sabotages.line import HANGS

SOURCE = """\
import os
import subprocess


def double(number: int) -> int:
    return number * 2


def other() -> int:
    return 1
"""
TESTS = """\
import thing


def test_double():
    assert thing.double(3) == 6


def test_other():
    assert thing.other() == 1
"""
GOOD = "return number * 2"
REQUIRED = {
    "config-kept-on-self",
    "revocation-hook-skipped",
    "daemon-ids-compared-instead-of-incarnations",
    "cancel-acknowledged-before-the-agent-is-gone",
    "workers-environment-inherited",
    "hmac-check-skipped",
    "last-delta-dropped",
    "approval-answered-by-order",
    "every-child-waited-for",
    "token-in-a-log-line",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one source and one test file of its own."""
    root = tmp_path / "repository"
    (root / trials.TESTS).mkdir(parents=True)
    (root / "thing.py").write_text(SOURCE)
    (root / trials.TESTS / "test_thing.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", root, *command], check=True, timeout=60)
    return root


def wrong(new: str, name: str = "it", **more: str) -> Sabotage:
    """A line in place of the good one."""
    return Sabotage(name, "thing.py", GOOD, new, ("test_thing.py::test_double",), **more)


@pytest.fixture
def tried(repository: Path) -> Callable[..., tuple[int, list[str]]]:
    """Tries sabotages of the small repository: exit code and what was said."""

    def run(*table: Sabotage, seconds: int = 20) -> tuple[int, list[str]]:
        said: list[str] = []
        with trials.Runner(Path(sys.executable), seconds) as runner:
            code = trials.run(table, runner, repository, said.append)
        return code, "\n".join(said).splitlines()

    return run


# ------------------------------------------------------------------ the table


def test_the_table_fits_the_sources_and_the_suite() -> None:
    """Our rule: every wrong line has its right one exactly once, and tests that are there."""
    trials.check(SABOTAGES)
    assert len({each.name for each in SABOTAGES}) == len(SABOTAGES)
    for each in SABOTAGES:
        assert each.tests, each.name
        assert each.old != each.new, each.name
        assert "\n" not in each.new, each.name


def test_no_wrong_line_is_left_to_a_property() -> None:
    """Library fact: a property may fail in several ways at once or, one day, in none; our rule: a named test is certain."""
    for each in SABOTAGES:
        for test in each.tests:
            path, *names = test.partition("[")[0].split("::")
            before, _, _ = (ROOT / trials.TESTS / path).read_text(encoding="utf-8").partition(f"def {names[-1]}(")
            assert "@given(" not in before.rpartition("\n\n")[2], (each.name, test)


def test_every_wrong_line_is_a_line_that_python_reads() -> None:
    """Our rule: a line that only breaks its file proves nothing."""
    for each in SABOTAGES:
        text = (ROOT / each.file).read_text(encoding="utf-8")
        compile(trials.sabotaged(each, text), each.name, "exec", dont_inherit=True)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"old": "return number * 3"}, "has 0 lines like this one"),
        ({"old": ""}, "has 4 lines like this one"),
        ({"within": "def nothing("}, "has 0 lines that begin with"),
        ({"within": "def other("}, "has 0 lines like this one"),
        ({"file": "nothing.py"}, "No such file"),
    ],
)
def test_a_line_that_is_not_there_once_is_a_stale_table(repository: Path, changed: dict[str, str], told: str) -> None:
    """Our rule: nothing is tried with a table that does not fit."""
    row = {"name": "it", "file": "thing.py", "old": GOOD, "new": "pass", **changed}
    sabotage = Sabotage(
        row.pop("name"), row.pop("file"), row.pop("old"), row.pop("new"), ("test_thing.py::test_double",), **row
    )
    with pytest.raises(trials.Stale, match=told):
        trials.run([sabotage], trials.Runner(Path(sys.executable)), repository)


@pytest.mark.parametrize("test", ["test_thing.py::test_doubled", "test_thing.py", "test_nothing.py::test_double"])
def test_a_test_that_is_not_there_is_a_stale_table(repository: Path, test: str) -> None:
    """Our rule: as before; a renamed test takes its sabotages along."""
    with pytest.raises(trials.Stale, match="no such test"):
        trials.run([Sabotage("it", "thing.py", GOOD, "pass", (test,))], trials.Runner(Path(sys.executable)), repository)


# ------------------------------------------------------------------ verdicts


def test_a_failed_assertion_is_caught_and_named(tried: Callable[..., tuple[int, list[str]]], repository: Path) -> None:
    """Our rule: the line says which test and how; nothing in the working copy has changed."""
    code, said = tried(wrong("return number + 2"))
    assert code == 0
    assert said[0].startswith("caught        it: test_thing::test_double: ")
    assert "assert 5 == 6" in said[0]
    assert said[1].startswith("the sabotage was caught")
    assert (repository / "thing.py").read_text() == SOURCE


def test_a_harmless_change_stays_green(tried: Callable[..., tuple[int, list[str]]]) -> None:
    """Our rule: exit code 1 and its name; what was tried before and behind it is judged by itself, also in the same copy."""
    table = [wrong(f"return number + {number}", f"bad-{number}") for number in (4, 5)]
    code, said = tried(wrong("return 2 * number", "harmless"), *table, wrong("return number + number", "harmless-too"))
    assert code == 1
    assert sorted(line.split()[0] for line in said[:4]) == ["STAYED", "STAYED", "caught", "caught"]
    assert said[4].startswith("2 of 4 sabotages were not caught")
    assert said[4].split(": ")[1] in ("harmless, harmless-too", "harmless-too, harmless")


BROKEN = {
    "return number *": "SyntaxError",
    "return nubmer * 2": "NameError",
    "import nothing_of_that_name": "ModuleNotFoundError",
    "raise ValueError('thrice')": "ValueError",
    "os._exit(7)": "pytest ended with 7",
}


def test_what_only_breaks_is_not_caught(tried: Callable[..., tuple[int, list[str]]]) -> None:
    """Our rule: a red that is no assertion's, and a run that comes to no end, prove nothing, unless the table expects it."""
    table = [wrong(new, why) for new, why in BROKEN.items()]
    table = [dataclasses.replace(each, red="ValueError: twice") for each in table]
    expected = dataclasses.replace(table[0], name="expected", new="raise ValueError('twice')")
    code, said = tried(*table, expected)
    assert code == 1
    lines = {line.split(": ")[0].split(maxsplit=2)[-1]: line for line in said[:-1]}
    assert lines.pop("expected").startswith("caught")
    assert lines.keys() == set(BROKEN.values())
    for why, line in lines.items():
        assert line.startswith("NO VERDICT")
        assert why in line.partition(": ")[2] or why == "SyntaxError"


def test_a_test_that_hangs_has_noticed_where_that_is_expected(tried: Callable[..., tuple[int, list[str]]]) -> None:
    """Our rule: a bound that runs out speaks for the test where the table says so."""
    hangs = dataclasses.replace(wrong("__import__('time').sleep(600)"), red=HANGS)
    code, said = tried(hangs, seconds=1)
    assert code == 0
    assert "Timeout" in said[0]


def test_a_test_that_hangs_elsewhere_gives_no_verdict(tried: Callable[..., tuple[int, list[str]]]) -> None:
    """Our rule: else it may have been a slow machine; the test gets more time once, and then has to say what is wrong."""
    code, said = tried(wrong("__import__('time').sleep(600)"), seconds=1)
    assert code == 1
    assert "NO VERDICT" in said[0]
    code, said = tried(wrong("__import__('time').sleep(1.5); return number + 2"), seconds=1)
    assert code == 0
    assert "Timeout" not in said[0]


def test_the_kinds_that_must_be_tried_are() -> None:
    """Our rule: these, whatever else is in the table; of a registry's key every part of the SDK's binding."""
    named = {each.name for each in SABOTAGES}
    assert named >= REQUIRED
    assert named >= {f"registry-without-the-bindings-{field}" for field in InstallationBinding.model_fields}


def test_a_test_that_is_red_anyway_catches_nothing(tried: Callable[..., tuple[int, list[str]]], repository: Path) -> None:
    """Our rule: a test speaks of a wrong line only when it is green without it."""
    (repository / trials.TESTS / "test_thing.py").write_text(TESTS.replace("== 6", "== 7"))
    code, said = tried(wrong("return number + 2"))
    assert code == 1
    assert "not green on the untouched sources" in said[0]
    assert "test_double" in said[1]


def test_what_a_test_leaves_behind_is_ended(tried: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    """Our rule: also what has made a session of its own; the line says so."""
    file = tmp_path / "pid"
    script = f"echo $$ > {file}; echo; exec sleep 600"
    start = f"subprocess.Popen(['sh', '-c', '{script}'], stdout=subprocess.PIPE, start_new_session=True)"
    code, said = tried(wrong(f"{start}.stdout.readline(); return number + 2"))
    assert code == 0
    assert said[0].endswith("[1 process(es) left behind and ended]")
    assert hostile_trees.start_time(int(file.read_text())) == ""


def test_trials_that_are_ended_leave_nothing(repository: Path, tmp_path: Path) -> None:
    """Our rule: what runs at the moment is gone, with all that it has started, when its end has been waited for."""
    file = tmp_path / "pid"
    start = f"subprocess.Popen(['sh', '-c', 'echo $$ > {file}; exec sleep 600'], start_new_session=True)"
    table = [wrong(f"{start}; __import__('time').sleep(600)")]
    with trials.Runner(Path(sys.executable), 600) as runner:
        ended: list[BaseException] = []

        def work() -> None:
            try:
                trials.run(table, runner, repository, lambda _: None)
            except trials.Ended as exc:
                ended.append(exc)

        thread = threading.Thread(target=work)
        thread.start()
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.02)
        pid = int(file.read_text())
        assert hostile_trees.start_time(pid)
        runner.end()
        assert hostile_trees.start_time(pid) == ""
        thread.join(60)
    assert ended


# ------------------------------------------------------------------ copies and the command


def test_a_line_of_the_shared_core_is_wrong_in_all_three_packages(tmp_path: Path) -> None:
    """Our rule: no package's tests run against the right line; afterwards each copy is as the working copy is."""
    copy = trials.Copy(tmp_path / "copy")
    sabotage = next(each for each in SABOTAGES if each.file == "ACPAgentRunner/pkg/identity.py")
    files = [copy.root / name / "pkg" / "identity.py" for name in packages.NAMES]
    right = files[0].read_bytes()
    with copy.with_line(sabotage):
        assert len({file.read_bytes() for file in files}) == 1
        assert files[0].read_bytes() != right
    assert {file.read_bytes() for file in files} == {right, (ROOT / sabotage.file).read_bytes()}
    assert not files[0].samefile(ROOT / sabotage.file)


def sabotage_script(*arguments: str, version: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command, pretending another Python where ``version`` says so."""
    pretend = f"import runpy, sys; {version or 0}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command: list[str | Path] = [sys.executable, "-c", pretend, ROOT / "scripts" / "sabotage.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_lists_what_there_is_and_knows_no_other_names() -> None:
    """Nothing is tried with ``--list``; a name that is misspelt is said so, with 2."""
    listed = sabotage_script("--list")
    assert listed.returncode == 0, listed.stderr
    assert {each.name for each in SABOTAGES} <= set(listed.stdout.splitlines())
    unknown = sabotage_script("no-such-thing")
    assert unknown.returncode == 2
    assert "no such sabotage: no-such-thing" in unknown.stderr


def test_an_old_python_is_told_what_is_needed() -> None:
    """Below 3.11 one readable line, no traceback."""
    done = sabotage_script(version="sys.version_info = (3, 9, 2)")
    assert done.returncode == 1
    assert done.stderr.startswith("This needs Python 3.11 or newer")
    assert done.stderr.count("\n") == 1
