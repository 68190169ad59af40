"""Trying sabotages: a copy of the sources, one wrong line in it, and whether the suite's own test says so.

A sabotage counts as caught only when a named test of it, which is green on the untouched copy, *fails an assertion* or waits
longer than its bound: a run that cannot collect or set up its tests, skips them, or stumbles over a name or type that the wrong
line broke proves nothing.

Guarantees: the working copy is never written to; each copy is as it was after every trial; everything that a test started is
gone before the next trial (:mod:`tooling.nursery`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from tooling import ROOT, SetupError, nursery, packages
from tooling.sabotages import Sabotage
from tooling.sabotages.line import HANGS

Work = TypeVar("Work")
Result = TypeVar("Result")

TESTS: Final = "certification-tests"
SIBLINGS: Final = {"claude_code": "ClaudeCodeAgent", "codex": "CodexAgent"}
"""Directories of tests that run in a process of a sibling package."""

WORKERS: Final = 2
"""Copies, and so trials at a time."""
TEST_SECONDS: Final = 20
"""What a sabotaged test may take before that is its failure: several times what any of those named needs. On the untouched
copies, where it has to pass on a busy machine, it gets three times as much."""
START_SECONDS: Final = 60
"""What pytest may take besides its tests before it is ended."""
SHOWN: Final = 150
"""Characters of a failure that are shown."""

ASSERTIONS: Final = (
    *("AssertionError", "assert ", "Failed:", "TimeoutError"),
    *('failed on teardown with "Failed:', 'failed on teardown with "Assert'),
)
"""How the message of a test begins that failed by its own word: an assertion, ``pytest.fail``, ``pytest.raises`` without its
exception, a bound of the test's own that ran out, or the suite's own look at what a test has left behind. That the bound of
every test has run out, which pytest-timeout says in the same way, counts only where the table expects it; elsewhere the test is
tried again with three times as much."""


_ALREADY_IMPORTED: Final = "pytest.PytestAssertRewriteWarning"
"""What pytest says of plugins that the nursery has imported; no assertion of theirs is of interest."""


class Ended(Exception):
    """What runs the tests was told to end, or has ended by itself."""


class Stale(Exception):
    """The table names lines or tests that are not there (any more)."""


# ------------------------------------------------------------------ lines


def find(sabotage: Sabotage, text: str) -> int:
    """The index of the sabotaged line; raises :class:`Stale` unless it is there exactly once."""
    lines = text.splitlines()
    found = [index for index, line in enumerate(lines) if line.strip() == sabotage.old]
    if sabotage.within:
        heads = [index for index, line in enumerate(lines) if line.strip().startswith(sabotage.within)]
        if len(heads) != 1:
            raise Stale(f"{sabotage.name}: {sabotage.file} has {len(heads)} lines that begin with: {sabotage.within}")
        found = [index for index in found if heads[0] <= index < _end(lines, heads[0])]
    if len(found) != 1:
        raise Stale(f"{sabotage.name}: {sabotage.file} has {len(found)} lines like this one instead of one: {sabotage.old}")
    return found[0]


def _end(lines: Sequence[str], head: int) -> int:
    """The index behind the block that begins at ``head``."""
    depth = _indent(lines[head])
    for index in range(head + 1, len(lines)):
        if lines[index].strip() and _indent(lines[index]) <= depth and not lines[index].strip().startswith(")"):
            return index
    return len(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def sabotaged(sabotage: Sabotage, text: str) -> str:
    """The text with the wrong line in it, indented as the right one."""
    lines = text.splitlines(keepends=True)
    index = find(sabotage, text)
    lines[index] = " " * _indent(lines[index]) + sabotage.new + "\n"
    return "".join(lines)


def check(table: Sequence[Sabotage], root: Path = ROOT) -> None:
    """Raise :class:`Stale` for what the table says and the sources do not have."""
    problems = []
    for each in table:
        try:
            text = (root / each.file).read_text(encoding="utf-8")
            find(each, text)
        except OSError as exc:
            problems.append(f"{each.name}: {each.file}: {exc.strerror}")
        except Stale as exc:
            problems.append(str(exc))
        problems += [f"{each.name}: no such test: {test}" for test in each.tests if not _has(root, test)]
    if problems:
        raise Stale("\n".join(problems))


def _has(root: Path, test: str) -> bool:
    """Whether a test file defines what a test id names; parameters are not looked at."""
    path, *names = test.partition("[")[0].split("::")
    try:
        text = (root / TESTS / path).read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(names) and all(re.search(rf"^ *(class|(async )?def) {re.escape(name)}\b", text, re.MULTILINE) for name in names)


# ------------------------------------------------------------------ a copy


class Copy:
    """The files that git tracks, as they are in the working copy, in a directory of their own."""

    def __init__(self, directory: Path, root: Path = ROOT) -> None:
        """Make it; raises :class:`tooling.SetupError`."""
        self.root = directory
        listed = _git(root, "ls-files", "-z").split("\0")
        for path in filter(None, listed):
            source, target = root / path, directory / path
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        # What builds packages asks git for the files; the environments are the working copy's own.
        _git(directory, "init", "--quiet")
        _git(directory, "add", "--all", "--force")
        for name in (".venv", ".vendor"):
            if (root / name).exists():
                (directory / name).symlink_to((root / name).resolve())
        self._ticks = 0

    @contextlib.contextmanager
    def with_line(self, sabotage: Sabotage) -> Iterator[None]:
        """The copy with the wrong line in it, in all three packages where the line is in the shared core."""
        places = [self.root / path for path in _places(sabotage.file)]
        right = places[0].read_text(encoding="utf-8")
        wrong = sabotaged(sabotage, right)
        try:
            for place in places:
                self._write(place, wrong)
            yield
        finally:
            for place in places:
                self._write(place, right)

    def _write(self, place: Path, text: str) -> None:
        """Write, with a time that the file never had: byte code is matched to its source by second and size."""
        place.write_text(text, encoding="utf-8")
        self._ticks += 1
        status = place.stat()
        os.utime(place, (status.st_atime, int(status.st_mtime) + self._ticks))


def _places(file: str) -> list[str]:
    package, _, path = file.partition("/")
    if package != packages.SOURCE or path.split("/")[0] not in packages.SHARED:
        return [file]
    return [f"{name}/{path}" for name in packages.NAMES]


def _git(root: Path, *arguments: str) -> str:
    try:
        # Only files are listed or noted, so it does not matter to whom the working copy belongs.
        command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SetupError("git is not installed") from None
    if done.returncode != 0:
        raise SetupError(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------ running tests


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of some tests."""

    passed: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    """Tests that failed, each with the first line of why."""
    problems: tuple[str, ...] = ()
    """Why there is no verdict: errors of collection and set-up, skips, a run that did not end."""
    left: tuple[str, ...] = ()
    """Processes that were left behind and are ended."""


class Runner:
    """Runs pytest in copies, one run at a time in each; knows what is running, so that it can be ended."""

    def __init__(self, python: Path, seconds: int = TEST_SECONDS) -> None:
        """``python`` is the development environment's, ``seconds`` what a sabotaged test may take."""
        self.seconds = seconds
        self._python = python
        self._nurseries: dict[Copy, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        self._ended = False

    def tests(self, copy: Copy, tests: Sequence[str], *, seconds: int, stop: bool) -> Outcome:
        """Run tests of one package; ``stop``: the first failure is enough. ``seconds`` is for each."""
        directory = tests[0].split("/")[0]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SUITE_", "CODING_", "PYTEST_", "LANGBOT_")) and name != "PYTHONPATH"
        }
        environment["CODING_RUNNER_PACKAGE"] = SIBLINGS.get(directory, "")
        with tempfile.TemporaryDirectory(prefix="sabotage-run-") as base:
            report, output = Path(base, "report.xml"), Path(base, "output")
            options = ["-q", "-p", "no:cacheprovider", "-W", f"ignore::{_ALREADY_IMPORTED}", f"--timeout={seconds}"]
            options += [f"--junitxml={report}", f"--basetemp={base}/tmp", *(["-x"] if stop else [])]
            request = {
                "arguments": [*options, *(f"{TESTS}/{test}" for test in tests)],
                "cwd": str(copy.root),
                "env": environment,
                "output": str(output),
                "seconds": START_SECONDS + (seconds if stop else seconds * len(tests)),
            }
            told = self._asked(copy, json.dumps(request))
            return _outcome(told["code"], tuple(told["left"]), report, output)

    def _asked(self, copy: Copy, request: str) -> dict[str, Any]:
        with self._lock:
            if self._ended:
                raise Ended("no test is run any more")
            nursery = self._nurseries.get(copy)
            if nursery is None:
                nursery = self._nurseries[copy] = self._nursery()
        assert nursery.stdin is not None and nursery.stdout is not None
        try:
            nursery.stdin.write(request + "\n")
            nursery.stdin.flush()
            line = nursery.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise Ended("what runs the tests was ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def _nursery(self) -> subprocess.Popen[str]:
        # A session of its own: what interrupts this program is told to it by this program.
        command = [str(self._python), "-I", nursery.__file__]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def end(self) -> None:
        """End what is running and wait until it is gone; nothing is started any more."""
        with self._lock:
            self._ended = True
            running = list(self._nurseries.values())
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for process in self._nurseries.values():
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()


def _outcome(code: int | None, left: tuple[str, ...], report: Path, output: Path) -> Outcome:
    if not report.exists():
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        why = "it took too long and was ended" if code is None else f"pytest ended with {code}: {lines[-1]}"
        return Outcome(problems=(why,), left=left)
    passed, failures, problems = 0, [], []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = "::".join((*case.get("classname", "").split(".")[-1:], case.get("name", "")))
        troubles = [each for each in case if each.tag in ("failure", "error", "skipped")]
        passed += not troubles
        for each in troubles:
            said = first_line(each.get("message", ""))
            if each.tag == "failure" or said.startswith("failed on teardown with"):
                failures.append((name, said))
            else:
                problems.append(f"{name}: {said}")
    if code not in (0, 1) and not problems:
        problems.append(f"pytest ended with {code}")
    if not (passed or failures or problems):
        problems.append("no test ran")
    return Outcome(passed, tuple(failures), tuple(problems), left)


def first_line(text: str) -> str:
    """The first line that says something, bounded."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


# ------------------------------------------------------------------ judging

Kind = Literal["caught", "green", "unclear"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one sabotage."""

    sabotage: Sabotage
    kind: Kind
    test: str = ""
    """The test that caught it."""
    how: str = ""
    """The first line of its failure, or why there is no verdict."""
    left: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """The line people read."""
        ended = f" [{len(self.left)} process(es) left behind and ended]" if self.left else ""
        if self.kind == "caught":
            return f"caught        {self.sabotage.name}: {self.test}: {self.how}{ended}"
        if self.kind == "green":
            return f"STAYED GREEN  {self.sabotage.name}: {', '.join(self.sabotage.tests)}{ended}"
        return f"NO VERDICT    {self.sabotage.name}: {self.how}{ended}"


def judge(sabotage: Sabotage, outcome: Outcome) -> Verdict:
    """A red counts when it is an assertion's, or says what the table expects."""
    wanted = re.compile(sabotage.red) if sabotage.red else None
    for test, said in outcome.failures:
        own = said.startswith(ASSERTIONS) and not re.search(HANGS, said)
        if own or (wanted is not None and wanted.search(said)):
            return Verdict(sabotage, "caught", test, said, outcome.left)
    if outcome.failures:
        test, said = outcome.failures[0]
        return Verdict(sabotage, "unclear", how=f"{test} failed, but by no assertion: {said}", left=outcome.left)
    if outcome.problems:
        return Verdict(sabotage, "unclear", how=outcome.problems[0], left=outcome.left)
    return Verdict(sabotage, "green", left=outcome.left)


def attempt(runner: Runner, copy: Copy, sabotage: Sabotage) -> Verdict:
    """Apply one sabotage, run its tests, and take it back."""
    with copy.with_line(sabotage):
        outcome = runner.tests(copy, sabotage.tests, seconds=runner.seconds, stop=True)
        if not sabotage.red and any(re.search(HANGS, said) for _, said in outcome.failures):
            # On a busy machine a test may only have been slow: with the time of an untouched copy it speaks for itself.
            outcome = runner.tests(copy, sabotage.tests, seconds=3 * runner.seconds, stop=True)
        return judge(sabotage, outcome)


def batches(table: Sequence[Sabotage]) -> list[list[str]]:
    """Every test that is named, once, in runs of one package each, about as many as there are copies."""
    named = dict.fromkeys(test for each in table for test in each.tests)
    by_package: dict[str, list[str]] = {}
    for test in named:
        by_package.setdefault(SIBLINGS.get(test.split("/")[0], ""), []).append(test)
    found = []
    for tests in by_package.values():
        files: dict[str, list[str]] = {}
        for test in tests:
            files.setdefault(test.split("::")[0], []).append(test)
        parts: list[list[str]] = [[] for _ in range(WORKERS)]
        for group in files.values():
            min(parts, key=len).extend(group)
        found += [part for part in parts if part]
    return found


def prove_green(runner: Runner, copies: Sequence[Copy], table: Sequence[Sabotage]) -> list[str]:
    """Run every named test on the untouched copies; why one of them is not green."""

    def prove(copy: Copy, tests: list[str]) -> list[str]:
        outcome = runner.tests(copy, tests, seconds=3 * runner.seconds, stop=False)
        problems = [f"{test}: {said}" for test, said in outcome.failures]
        problems += outcome.problems
        return problems + [f"left a process behind: {each}" for each in outcome.left]

    found: list[str] = []
    for problems in side_by_side(runner, copies, batches(table), prove):
        found += problems
    return found


def side_by_side(
    runner: Runner, copies: Sequence[Copy], works: Sequence[Work], do: Callable[[Copy, Work], Result]
) -> Iterator[Result]:
    """``do(copy, work)`` for each, one at a time in every copy; the results as they come, or what one of them raised.

    Whoever stops reading early ends what ``runner`` has running.
    """
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[list[Result], BaseException | None]] = queue.SimpleQueue()
    for work in works:
        waiting.put(work)

    def serve(copy: Copy) -> None:
        while True:
            try:
                work = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put(([do(copy, work)], None))
            except BaseException as exc:  # noqa: BLE001 - raised again where the results are read
                done.put(([], exc))
                return

    threads = [threading.Thread(target=serve, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    try:
        for _ in works:
            results, problem = done.get()
            if problem is not None:
                raise problem
            yield from results
    except BaseException:
        runner.end()
        raise
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for thread in threads:
            thread.join()


def run(table: Sequence[Sabotage], runner: Runner, root: Path = ROOT, say: Callable[[str], None] = print) -> int:
    """Prove the tests green, then try every sabotage, with one line for each; 0 when all were caught, else 1.

    Raises :class:`Stale` before anything is tried, and :class:`tooling.SetupError`.
    """
    check(table, root)
    started = time.monotonic()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sabotage-") as base:
        copies = [Copy(Path(base, str(number)), root) for number in range(min(WORKERS, len(table)))]
        if problems := prove_green(runner, copies, table):
            say("\n".join(["the tests are not green on the untouched sources, so nothing can be said:", *problems]))
            return 1
        for verdict in side_by_side(runner, copies, table, functools.partial(attempt, runner)):
            say(str(verdict))
            if verdict.kind != "caught":
                bad.append(verdict.sabotage.name)
    took = f"in {time.monotonic() - started:.0f} s"
    if bad:
        say(f"{len(bad)} of {len(table)} sabotages were not caught ({took}): {', '.join(bad)}")
        return 1
    say(f"{f'all {len(table)} sabotages were' if len(table) != 1 else 'the sabotage was'} caught ({took})")
    return 0
