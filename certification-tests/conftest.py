"""What every suite shares: which package is under test, what selected tests need, and that no test leaves a process behind.

``CODING_RUNNER_SOURCE_ROOT`` points the suites at extracted artifacts: a directory that holds ``ACPAgentRunner`` (or is one
package itself); ``pkg``, ``agent`` and ``components`` are then imported from there. Tests of the sibling packages run in a
process of their package (:mod:`testkit.package_roots`).

``SUITE_PREPARE`` (set by ``scripts/test.py``) lets the suite install what the selected tests need: the real agents and the
real LangBot host. Where something cannot be had, its tests are skipped with the reason; with ``SUITE_REQUIRE_ALL`` (set by
``.ci/run``) that is a failure instead, as is every other skip.

Jailed tests alone may be skipped there as well, because not every machine can jail; the last lines say how many ran, or why
none did. With ``REQUIRE_NSJAIL`` they must run: a run that selects any of them and runs fewer than :data:`JAILED_TESTS` fails.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from testkit import package_roots
from tooling import ROOT, SetupError, agents, daemon, host, jail, venv

MARKERS = {
    "real_agents": "drives the real ACP agents from the npm registry (about 1 GB, needs Node.js)",
    "real_claude": "drives the real Claude Code from the npm registry (400 MB)",
    "real_codex": "drives the real Codex from the npm registry (420 MB)",
    "real_host": "drives the real LangBot host (1.6 GB, in an environment of its own)",
    "nsjail": "drives workers of the SDK's shared profile in real nsjail, in an environment of their own (130 MB)",
    "daemon_venv": "runs the daemon program with nothing but its own packages, in an environment of its own",
    "sdk_worker": "drives the built package in a real worker of the SDK's own runtime",
    "shared_runtime": "drives one worker process that serves several installations, and looks at it from inside",
    "ssh": "drives a loopback OpenSSH server",
    "pid_namespace": "runs as PID 1 of a namespace of its own, as in a jail",
    "demo": "runs the demo as a person does",
    "evidence": "checks and freezes a release candidate made of a clone of the working copy",
    "static": "checks the sources: style, types, copies",
}
LEFTOVER_GRACE = 5.0
"""Seconds a test's last child gets to leave before the test is blamed; only waited when there is one."""

TRANSFERS = "LANGBOT_PLUGIN_FILE_STORAGE_DIR"
"""The variable by which the SDK is told where files are kept while they are transferred."""

SERVING = "serving"
"""The plugin's name where this process runs a sibling's tests: whoever asks for one has prepared what it needs."""

JAILED = "nsjail"
JAILED_TESTS = 56
"""The least number of jailed tests that a run must have which requires them; raised with every test that is added."""

HARMLESS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Helpers of Python's own that live as long as their parent."""


def _source_root() -> Path:
    given = os.environ.get("CODING_RUNNER_SOURCE_ROOT", "")
    name = package_roots.current()
    if not given:
        return ROOT / name
    root = Path(given).resolve()
    package = root / name if name != package_roots.CORE or (root / name).is_dir() else root
    if not (package / "pkg" / "agent_api.py").is_file():
        raise pytest.UsageError(f"CODING_RUNNER_SOURCE_ROOT={given} holds no extracted package {name}")
    return package


SOURCE_ROOT = _source_root()
sys.path[:] = [str(SOURCE_ROOT), *(entry for entry in sys.path if entry != str(ROOT / "ACPAgentRunner"))]


@pytest.fixture(scope="session")
def package_root() -> Path:
    """The package under test: the source tree's, or the extracted one."""
    return SOURCE_ROOT


@pytest.fixture(scope="session")
def agent_binaries() -> Path:
    """The directory with the real ACP agents' commands (for tests marked ``real_agents``)."""
    return agents.ACP.binaries()


@pytest.fixture(scope="session")
def claude_program() -> Path:
    """The real Claude Code (for tests marked ``real_claude``)."""
    return agents.claude_code()


@pytest.fixture(scope="session")
def codex_program() -> Path:
    """The real Codex, its native program (for tests marked ``real_codex``)."""
    return agents.codex()


@pytest.fixture(scope="session")
def host_python() -> Path:
    """The interpreter that has the real LangBot host (for tests marked ``real_host``)."""
    return venv.interpreter(host.directory())


@pytest.fixture(scope="session")
def daemon_python() -> Path:
    """The interpreter that has the daemon program's packages and no others (for tests marked ``daemon_venv``)."""
    return venv.interpreter(daemon.directory())


# ------------------------------------------------------------------ what the selected tests need


def _installed(wanted: agents.Agents) -> Callable[[bool], str]:
    def needs(prepare: bool) -> str:
        if wanted.directory().is_dir():
            return agents.missing() if wanted is agents.ACP else ""
        if not prepare:
            return f"{wanted.what} is not installed; start the suite with: python3 scripts/test.py"
        if reason := agents.missing():
            return reason
        wanted.ensure()
        return ""

    return needs


def _real_host(prepare: bool) -> str:
    if prepare:
        host.ensure()
    elif not venv.is_ready(host.directory(), host.LOCK):
        return "the real LangBot host is not installed; start the suite with: python3 scripts/test.py"
    return ""


def _daemon_venv(prepare: bool) -> str:
    if prepare:
        daemon.ensure()
    elif not venv.is_ready(daemon.directory(), daemon.LOCK):
        return "the daemon program's environment is not prepared; start the suite with: python3 scripts/test.py"
    return ""


def _ssh(prepare: bool) -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    absent = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=path) is None]
    return f"{', '.join(absent)} not found; on Debian: apt-get install openssh-server openssh-client" if absent else ""


def _nsjail(prepare: bool) -> str:
    if reason := jail.impossible():
        return reason
    if prepare:
        jail.ensure()
    elif not jail.is_ready():
        return "the environment of jailed workers is not prepared; start the suite with: python3 scripts/test.py"
    return ""


NEEDS: dict[str, Callable[[bool], str]] = {
    "real_agents": _installed(agents.ACP),
    "real_claude": _installed(agents.CLAUDE_CODE),
    "real_codex": _installed(agents.CODEX),
    "real_host": _real_host,
    "daemon_venv": _daemon_venv,
    "ssh": _ssh,
    JAILED: _nsjail,
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if TRANSFERS not in os.environ:
        # The SDK's runtime, which these processes are, would keep them where the suite was started.
        os.environ[TRANSFERS] = tempfile.mkdtemp(prefix="rpc-transfer-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(TRANSFERS), ignore_errors=True))
    if package_roots.serving():
        config.pluginmanager.register(package_roots.Serving(MARKERS), SERVING)
    else:
        config.pluginmanager.register(package_roots.Siblings())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare what the tests that were really selected need; skip those whose needs cannot be met."""
    if session.config.option.collectonly or session.config.pluginmanager.has_plugin(SERVING):
        return
    package_roots.link(session.items)
    _jails.asked = _asked_by_mark(session.config.option.markexpr)
    prepare = bool(os.environ.get("SUITE_PREPARE"))
    capture = session.config.pluginmanager.getplugin("capturemanager")
    for marker, prepared in NEEDS.items():
        wanting = [item for item in session.items if item.get_closest_marker(marker)]
        if not wanting:
            continue
        if capture is not None:
            capture.suspend_global_capture(in_=False)
        try:
            reason = prepared(prepare)
        except SetupError as exc:
            raise pytest.UsageError(f"tests marked {marker} cannot be prepared: {exc}") from None
        finally:
            if capture is not None:
                capture.resume_global_capture()
        if marker == JAILED:
            _jails.selected = len(wanting)
            _jails.reason = reason
        if reason and _required(marker):
            raise pytest.UsageError(f"{len(wanting)} tests marked {marker} cannot run: {reason}")
        for item in wanting if reason else ():
            item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _required(marker: str) -> bool:
    """Whether tests with this marker must run: where everything must, but for jails, which not every machine can make."""
    return bool(os.environ.get("REQUIRE_NSJAIL" if marker == JAILED else "SUITE_REQUIRE_ALL"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything must run, a skip is a failure with the skip's reason; a jailed test's where jails are required."""
    report = yield
    unjailed = JAILED in report.keywords and _jails.reason
    if report.skipped and not unjailed and os.environ.get("SUITE_REQUIRE_ALL") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{reason}\nNothing may be skipped here (SUITE_REQUIRE_ALL)."
    return report


# ------------------------------------------------------------------ how many were really jailed


@dataclasses.dataclass
class _Jails:
    """The jailed tests of this run."""

    selected: int = 0
    asked: bool = False
    """Whether the run is to have them by their mark, so that none may be lost with its mark."""
    reason: str = ""
    ran: int = 0

    def told(self) -> str:
        """What the last lines say of them; empty when none was selected."""
        if not self.selected:
            return ""
        if self.reason:
            return f"jailed tests: 0 of {self.selected} ran: {self.reason}"
        return f"jailed tests: {self.ran} ran"

    def missing(self) -> str:
        """What is wrong with their number where they are required, else empty."""
        if not (self.selected or self.asked) or not _required(JAILED) or self.ran >= JAILED_TESTS:
            return ""
        return f"REQUIRE_NSJAIL: {self.ran} jailed tests ran, at least {JAILED_TESTS} must."


_jails = _Jails()


def _asked_by_mark(marks: str) -> bool:
    """Whether an expression of marks selects jailed tests for being jailed."""
    if not marks:
        return False

    def jailed(name: str, /, **_: str | int | bool | None) -> bool:
        return name == JAILED

    def unmarked(name: str, /, **_: str | int | bool | None) -> bool:
        return False

    expression = Expression.compile(marks)
    return expression.evaluate(jailed) and not expression.evaluate(unmarked)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run without its jailed tests has failed where they are required."""
    if _jails.missing() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# ------------------------------------------------------------------ where the time goes

_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's time to the first of our markers it carries, and count what was jailed."""
    _jails.ran += report.when == "call" and JAILED in report.keywords and not report.skipped
    name = next((marker for marker in MARKERS if marker in report.keywords), "core")
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how the time was spent, by what the tests drive, and how many of them were jailed."""
    total = sum(_seconds.values())
    if total >= 60:
        spent = sorted(_seconds.items(), key=lambda item: -item[1])
        terminalreporter.write_line("minutes: " + ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in spent))
    for line in filter(None, (_jails.told(), _jails.missing())):
        terminalreporter.write_line(line)


# ------------------------------------------------------------------ nothing is left behind


def _children() -> dict[int, str]:
    """This process's living children: pid to command line. Empty where there is no ``/proc``."""
    found: dict[int, str] = {}
    own = str(os.getpid()).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if parent != own or state == b"Z":
                continue
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if not any(name in command for name in HARMLESS):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    """Fail a test that leaves a child process of the test process behind."""
    before = _children()
    yield
    end = time.monotonic() + LEFTOVER_GRACE
    while left := {pid: command for pid, command in _children().items() if pid not in before}:
        if time.monotonic() > end:
            shown = "; ".join(f"{pid}: {command}" for pid, command in left.items())
            pytest.fail(f"processes left behind: {shown}")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _registry_of_its_own() -> Iterator[None]:
    """Fail a test that leaves runs, sessions or work of an installation behind, and forget the installations it made.

    Hubs register theirs for the life of the process, and tests share one process.
    """
    yield
    registry = sys.modules.get("pkg.installations")
    if registry is None:
        return
    left = [
        f"{len(each.runs)} runs, {len(each.warm)} sessions, {sum(not task.done() for task in each._work)} tasks of {each.key}"
        for each in registry._installations.values()
        if each.runs or len(each.warm) or any(not task.done() for task in each._work)
    ]
    registry._installations.clear()
    if left:
        pytest.fail("left behind: " + "; ".join(left))
