"""The tests of all three packages in one run, each package's in a process whose imports are that package's own.

The names ``pkg`` and ``agent`` are the same in every package, so one process can only ever load one. The process that was
started tests one of them (``CODING_RUNNER_PACKAGE``, by default ``ACPAgentRunner``); tests in a directory of
:data:`DIRECTORIES` belong to a sibling. For those a second pytest is started, once per sibling and only when one of its files
is collected. It collects the directory, says what is in it, and then runs the tests it is asked for, one after the other.
Every inner test is a test of the outer run: selected by ``-k``, ``-m``, ``-x`` and node id as any other, with an outcome and a
time of its own.

Options that concern one process (``-s``, ``--pdb``) do not reach a sibling's tests; for them start pytest as that package:
``CODING_RUNNER_PACKAGE=ClaudeCodeAgent python3 scripts/test.py certification-tests/claude_code -s``.

Messages are JSON, one a line, over two inherited pipes whose descriptors ``SUITE_SERVES`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest

CORE: Final = "ACPAgentRunner"
DIRECTORIES: Final = {"claude_code": "ClaudeCodeAgent", "codex": "CodexAgent"}
"""Directories of tests that belong to a sibling package."""

PACKAGE: Final = "CODING_RUNNER_PACKAGE"
SERVES: Final = "SUITE_SERVES"
CLOSING_GRACE: Final = 20.0
"""Seconds a sibling's process gets to tear its last fixtures down before it is killed."""


def current() -> str:
    """The package that this process tests. Raises :class:`pytest.UsageError` for a name that is none."""
    name = os.environ.get(PACKAGE, "") or CORE
    if name not in (CORE, *DIRECTORIES.values()):
        raise pytest.UsageError(f"{PACKAGE}={name} is no package of this repository")
    return name


def beside(imported: Path, name: str) -> Path:
    """Where package ``name`` is, given where this process imports its own from: a copy of the repository, or extracted ones."""
    return imported if name == current() else imported.parent / name


def owner(file: Path) -> str:
    """The package that a file of tests belongs to: by its directory, else whichever this process tests."""
    return DIRECTORIES.get(file.parent.name) or current()


def serving() -> bool:
    """Whether this process runs tests for another one."""
    return SERVES in os.environ


# ------------------------------------------------------------------ the process that was started


class SiblingFailed(Exception):
    """An inner test failed, or its process ended; the text is what the report shows."""


class Sibling:
    """The process that runs one sibling's tests of one directory."""

    def __init__(self, package: str, directory: Path, config: pytest.Config) -> None:
        """Starts it; :meth:`listing` waits until it has collected."""
        self.package = package
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        read_request, write_request = os.pipe()
        read_reply, write_reply = os.pipe()
        options = ["-c", str(config.inipath), f"--rootdir={config.rootpath}", "-p", "no:cacheprovider"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(directory)],
            cwd=config.rootpath,
            env={**os.environ, PACKAGE: package, SERVES: f"{read_request},{write_reply}"},
            pass_fds=(read_request, write_reply),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(read_request)
        os.close(write_reply)
        self._requests = os.fdopen(write_request, "w", encoding="utf-8")
        self._replies = os.fdopen(read_reply, encoding="utf-8")
        self._listing: dict[str, Any] | None = None

    @property
    def running(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def listing(self) -> dict[str, Any]:
        """What it collected: ``tests`` (objects of path, name, id, line, markers) and ``errors`` (path to text)."""
        if self._listing is None:
            self._listing = self._receive()
        return self._listing

    def run(self, test_id: str, next_id: str) -> dict[str, Any]:
        """Run one test to its end: ``outcome`` (``passed``, ``failed``, ``skipped``, ``xfailed``) and ``text``.

        ``next_id`` is the test that will be asked for next, or empty: fixtures that it shares are kept. Raises
        :class:`SiblingFailed` when the process ends meanwhile.
        """
        self.listing()
        try:
            self._requests.write(json.dumps({"run": test_id, "next": next_id}) + "\n")
            self._requests.flush()
        except OSError:
            raise self._ended() from None
        return self._receive()

    def close(self) -> None:
        """Have it tear down and end; killed when it does not."""
        try:
            self._requests.close()
        except OSError:  # it had ended with a request unread
            self._requests = self._replies
        try:
            self._process.wait(CLOSING_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._output.close()

    def _receive(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        return message

    def _ended(self) -> SiblingFailed:
        code = self._process.wait()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")[-8000:]
        return SiblingFailed(f"the process of {self.package}'s tests ended with exit code {code}\n{text}")


class Siblings:
    """The plugin of the started process: collects siblings' files through their processes, which it ends at the end."""

    def __init__(self) -> None:
        self._processes: dict[Path, Sibling] = {}

    def of(self, file: Path, config: pytest.Config) -> Sibling:
        """The running process for the tests beside ``file``; another one when the last has ended."""
        directory = file.parent
        process = self._processes.get(directory)
        if process is None or not process.running:
            if process is not None:
                process.close()
            process = self._processes[directory] = Sibling(owner(file), directory, config)
        return process

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """A file of a sibling is never imported here."""
        if owner(module_path) == current():
            return None
        file: SiblingFile = SiblingFile.from_parent(parent, path=module_path)
        file.siblings = self
        return file

    def pytest_unconfigure(self) -> None:
        """End every process."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()


class SiblingFile(pytest.File):
    """A file of tests that another process imports."""

    siblings: Siblings

    def collect(self) -> Iterable[pytest.Item]:
        """One item per inner test. Raises :class:`pytest.Collector.CollectError` with what the other process says."""
        try:
            listing = self.siblings.of(self.path, self.config).listing()
        except SiblingFailed as exc:
            raise self.CollectError(str(exc)) from None
        if error := listing["errors"].get(str(self.path)):
            raise self.CollectError(error)
        for test in listing["tests"]:
            if test["path"] == str(self.path):
                yield SiblingTest.of(self, test)


class SiblingTest(pytest.Item):
    """One test of a sibling."""

    inner_id: str
    line: int | None
    next_id = ""

    @classmethod
    def of(cls, file: SiblingFile, test: dict[str, Any]) -> SiblingTest:
        """The item for one entry of the listing."""
        item: SiblingTest = cls.from_parent(file, name=test["name"])
        item.inner_id, item.line = test["id"], test["line"]
        for name in test["markers"]:
            item.add_marker(name)
        item.add_marker(pytest.mark.timeout(0))  # the other process minds the test's own
        return item

    def runtest(self) -> None:
        """Have it run; the inner outcome becomes this one's. Raises :class:`SiblingFailed`."""
        file = self.parent
        assert isinstance(file, SiblingFile)
        outcome = file.siblings.of(self.path, self.config).run(self.inner_id, self.next_id)
        match outcome["outcome"]:
            case "failed":
                raise SiblingFailed(outcome["text"])
            case "skipped":
                raise pytest.skip.Exception(outcome["text"], _use_item_location=True)
            case "xfailed":
                pytest.xfail(outcome["text"])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The inner test's own report."""
        if isinstance(excinfo.value, SiblingFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the test is written."""
        return self.path, self.line, self.name


def link(items: list[pytest.Item]) -> None:
    """Tell every sibling's test which one of the same process follows it, so that shared fixtures live on."""
    following: dict[Path, SiblingTest] = {}
    for item in items:
        if isinstance(item, SiblingTest):
            if (before := following.get(item.path.parent)) is not None:
                before.next_id = item.inner_id
            following[item.path.parent] = item


# ------------------------------------------------------------------ the process that serves it


class Serving:
    """The plugin of a sibling's process: says what it collected and runs what it is asked for."""

    def __init__(self, markers: Iterable[str]) -> None:
        """``markers`` are the names that the listing mentions."""
        read, write = map(int, os.environ.pop(SERVES).split(","))
        os.set_inheritable(read, False)
        os.set_inheritable(write, False)
        self._requests = os.fdopen(read, encoding="utf-8")
        self._replies = os.fdopen(write, "w", encoding="utf-8")
        self._markers = frozenset(markers)
        self._errors: dict[str, str] = {}
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Keep what could not be collected."""
        report = yield
        if report.failed:
            self._errors[str(collector.path)] = report.longreprtext
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the phases of the test that runs."""
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve until nobody asks any more."""
        tests = [
            {
                "path": str(item.path),
                "name": item.name,
                "id": item.nodeid,
                "line": item.reportinfo()[1],
                "markers": sorted(self._markers.intersection(mark.name for mark in item.iter_markers())),
            }
            for item in session.items
        ]
        self._send({"tests": tests, "errors": self._errors})
        items = {item.nodeid: item for item in session.items}
        for request in self._asked():
            item = items[request["run"]]
            self._reports.clear()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=items.get(request["next"]))
            self._send(_outcome(self._reports))
        return True

    def _asked(self) -> Iterator[dict[str, str]]:
        while line := self._requests.readline():
            yield json.loads(line)

    def _send(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def _outcome(reports: list[pytest.TestReport]) -> dict[str, Any]:
    """The phases of one test as one outcome."""
    if failed := [report for report in reports if report.failed]:
        shown = [
            f"[{report.when}]\n{report.longreprtext}" if report.when != "call" else report.longreprtext for report in failed
        ]
        sections = [f"{name:-^80}\n{text}" for name, text in failed[-1].sections]
        return {"outcome": "failed", "text": "\n".join([*shown, *sections])}
    for report in reports:
        if report.skipped:
            if hasattr(report, "wasxfail"):
                return {"outcome": "xfailed", "text": report.wasxfail}
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            return {"outcome": "skipped", "text": reason.removeprefix("Skipped: ")}
    return {"outcome": "passed", "text": ""}
