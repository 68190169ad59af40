"""What else the packages must work with: other SDKs, other Pythons, other websockets; each in an environment of its own.

A lane is one pytest run of chosen tests under one environment. An environment's lock is the development lock with the entries
of one overlay (``scripts/lock/sdk-*.txt``, ``websockets-*.txt``) in place of its own, without the tools that only the main run
needs; it lies in ``.vendor`` in a directory named by the fingerprint of that lock and of its Python, and is made when the lane
runs. Every CPython >= 3.11 of the machine is a lane, found by really starting it.

Guarantees: what a lane leaves out is named in its table with the reason; a Python for which the lock has no wheels is a named
gap and never a silence.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tooling import ROOT, WORK, SetupError, steps, venv

LOCKS: Final = ROOT / "scripts" / "lock"
TOOLS: Final = ("mypy", "mypy-extensions", "ruff", "librt", "ast-serialize", "pathspec")
"""Of the development lock only the style checks need these, and those run once."""

GAP: Final = 75
"""Exit code of :func:`prepare` where this Python cannot have the lock."""

NO_WHEEL: Final = re.compile(r"ERROR: (No matching distribution found for \S+|\S+ is not a supported wheel on this platform)")
UNREACHED: Final = re.compile(r"Retrying|Connection|Could not fetch|timed out", re.IGNORECASE)
"""What pip says beside the former when it is the index that it did not reach."""

PROBE_SECONDS: Final = 30.0
"""A Python that does not say its version within this time is none."""

_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+).*?(?:\n(?=\S)|\Z)", re.MULTILINE | re.DOTALL)
_PROBE = (
    "import os, sys; print(sys.implementation.name, '.'.join(map(str, sys.version_info[:3])) + "
    "{'final': ''}.get(sys.version_info[3], sys.version_info[3]) + getattr(sys, 'abiflags', ''), "
    "os.path.realpath(sys.base_prefix), getattr(sys, '_base_executable', sys.executable), sep='\\n')"
)
_PREPARE = "import sys; sys.path.insert(0, sys.argv[1]); from tooling import compat; sys.exit(compat.prepare(*sys.argv[2:]))"


# ------------------------------------------------------------------ locks


def _entries(lock: str) -> dict[str, re.Match[str]]:
    """A lock's entries by name, comments left out."""
    return {entry[1].lower(): entry for entry in _ENTRY.finditer(re.sub(r"^#.*\n", "", lock, flags=re.MULTILINE))}


def pins(lock: str) -> dict[str, str]:
    """Every package of a lock and its version."""
    return {name: entry[2] for name, entry in _entries(lock).items()}


def merged(overlay: str) -> str:
    """The development lock with an overlay's entries in place of its own. Raises :class:`ValueError` for one that has none."""
    entries = _entries(venv.DEV_LOCK.read_text(encoding="utf-8"))
    for name, entry in _entries(overlay).items():
        if name not in entries:
            raise ValueError(f"the overlay's {name} stands in no place of {venv.DEV_LOCK.name}")
        entries[name] = entry
    return "".join(entry[0].rstrip("\n") + "\n" for name, entry in entries.items() if name not in TOOLS)


# ------------------------------------------------------------------ markers


def any_of(markers: Iterable[str]) -> str:
    """The marker expression of tests that carry one of these, of which pytest only takes those that the suite declares."""
    declared = re.findall(r'^    "(\w+)": ', (ROOT / "certification-tests" / "conftest.py").read_text(encoding="utf-8"), re.M)
    return " or ".join(name for name in markers if name in declared)


# ------------------------------------------------------------------ Pythons


@dataclass(frozen=True, slots=True)
class Python:
    """One CPython of the machine."""

    version: str
    prefix: str
    executable: str


def probe(command: Path) -> Python | None:
    """The CPython >= 3.11 behind a command, of an environment the one it was made from; ``None`` for anything else."""
    try:
        done = subprocess.run(
            [command, "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stdout.splitlines()
    if done.returncode != 0 or len(said) != 4 or said[0] != "cpython":
        return None
    number = re.match(r"(\d+)\.(\d+)", said[1])
    if number is None or (int(number[1]), int(number[2])) < venv.OLDEST:
        return None
    return Python(said[1], said[2], said[3] or str(command))


def places(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Directories where a machine has its Pythons: PATH, the system's, and every version of pyenv."""
    yield from (Path(entry) for entry in environ.get("PATH", "").split(os.pathsep) if entry.startswith("/"))
    yield from (Path("/usr/bin"), Path("/usr/local/bin"))
    for root in (environ.get("PYENV_ROOT", ""), f"{environ.get('HOME', '')}/.pyenv"):
        if root.startswith("/"):
            yield from sorted(Path(root).glob("versions/*/bin"))


def pythons(directories: Iterable[Path]) -> list[Python]:
    """Every CPython >= 3.11 there, each once however many names it has, by version."""
    found: dict[tuple[str, str], Python] = {}
    tried: set[Path] = set()
    for directory in directories:
        for command in (directory / "python3", *sorted(directory.glob("python3.*"))):
            if not re.fullmatch(r"python3(\.\d+t?)?", command.name) or not os.access(command, os.X_OK):
                continue
            # A shim is one file for many versions: it is tried under each of its names.
            real = command if ".pyenv/shims" in str(command) else command.resolve()
            if real in tried:
                continue
            tried.add(real)
            python = probe(command)
            if python is not None:
                found.setdefault((python.version, python.prefix), python)
    return sorted(found.values(), key=lambda each: ([int(part) for part in re.findall(r"\d+", each.version)], each.prefix))


# ------------------------------------------------------------------ environments


def prepare(lock: str, directory: str, what: str) -> int:
    """Make the environment with the Python that runs this; 0, 2 when it failed, :data:`GAP` where it cannot have the lock."""
    os.environ["PIP_ONLY_BINARY"] = ":all:"
    # Where this Python has neither ensurepip nor pip, those of the development environment do.
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), str(venv.DEV_VENV / "bin")))
    target = Path(directory)
    try:
        venv.ensure(target, Path(lock), what, target.with_name(target.name + ".lock"))
    except SetupError as exc:
        steps.say(str(exc))
        return GAP if NO_WHEEL.search(str(exc)) and not UNREACHED.search(str(exc)) else 2
    return 0


# ------------------------------------------------------------------ lanes


@dataclass(frozen=True, slots=True)
class Lane:
    """One environment and what runs in it."""

    name: str
    python: Python
    overlay: Path | None
    selection: tuple[str, ...]
    """Files and options of pytest, relative to the repository; ``*`` in a file's name is expanded when the lane starts."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Node id, or its beginning, to the reason why it does not run here."""
    may_be_missing: bool = False
    """Whether it is a gap, and no failure, when this Python cannot have the lock."""

    @property
    def lock(self) -> str:
        """The whole lock of its environment."""
        return merged(self.overlay.read_text(encoding="utf-8") if self.overlay else "")

    @property
    def directory(self) -> Path:
        """Where its environment is or will be."""
        return WORK / f"compat-{steps.fingerprint(self.lock, self.python.version, self.python.prefix)}"

    def preparation(self) -> list[str]:
        """The command that makes its environment; writes the lock beside it first."""
        WORK.mkdir(exist_ok=True)
        lock = self.directory.with_name(self.directory.name + ".txt")
        steps.write_atomically(lock, self.lock)
        what = f"the environment {self.name}"
        return [self.python.executable, "-c", _PREPARE, str(ROOT / "scripts"), str(lock), str(self.directory), what]

    def tests(self) -> list[str]:
        """Its pytest command."""
        chosen: list[str] = []
        for part in self.selection:
            found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(part)) if "*" in part else [part]
            chosen += found
        leave = [f"--deselect={name}" for name in self.left_out]
        return [str(venv.interpreter(self.directory)), "-m", "pytest", "-p", "no:cacheprovider", *leave, *chosen]


SUITE: Final = "certification-tests/"
ONCE: Final = (
    "real_agents",
    "real_claude",
    "real_codex",
    "real_host",
    "demo",
    "nsjail",
    "evidence",
    "static",
    "daemon_venv",
    "pid_namespace",
)
"""What no lane repeats: vendors' programs, the host, jails, the demo and the style checks run once, in the main run."""

UNCANCELLED: Final = (
    "SDKs before 0.7.11 do not tell a worker that the host has cancelled a run, which then ends at its own bounds"
)
UNPOOLED: Final = "sets the hook aside that this SDK lacks; under it the pool's refusal is tested with the pool itself"
NO_SDK: Final = "relay and daemon have no SDK in them; the main run and the websockets lane have it"
ONE_AGENT: Final = "what the SDK has to do with it is the same for every agent; acp runs"
ONE_POLICY: Final = "only what is asked passes through the SDK"
SELF_TEST: Final = "a test of the test"
HOSTS: Final = "runs under the newest SDK, and the real host prepares it with its own"
HOST: Final = "the suites of the real host drive dedicated workers of this SDK"

SDK_FILES: Final = (
    f"{SUITE}test_sdk_versions.py",
    f"{SUITE}test_coding_*.py",
    f"{SUITE}test_worker_*.py",
    f"{SUITE}test_daemon_workers.py",
    f"{SUITE}test_langbot_tools_worker.py",
    f"{SUITE}test_statelessness.py",
    f"{SUITE}test_shared_runtime.py",
)
"""The established suites and what drives a real worker."""

OLDEST_FILES: Final = (
    f"{SUITE}test_sdk_versions.py",
    f"{SUITE}test_worker_runs.py",
    f"{SUITE}test_identity.py",
)
"""Imports, and a dedicated and a debugged worker; its pool is refused."""

CORE_FILES: Final = (
    f"{SUITE}test_sdk_versions.py",
    f"{SUITE}test_relay_protocol.py",
    f"{SUITE}test_relay_protocol_vectors.py",
    f"{SUITE}test_acp_turns.py",
    f"{SUITE}test_process_supervisor.py",
    f"{SUITE}test_run_loop.py",
)
"""Imports of every module, a worker of each kind, the protocols, processes and a run: what another Python could break."""

BRIEF_FILES: Final = (f"{SUITE}test_sdk_versions.py", f"{SUITE}test_relay_protocol_vectors.py")
"""For another build of the main run's own minor version: imports, a worker of each kind, the protocol."""

SOCKET_FILES: Final = (f"{SUITE}test_coding_relay_v1*.py", f"{SUITE}test_sdk_versions.py")
"""All that speaks over a real socket of the relay, and a debugged worker, whose SDK speaks over one."""

_APPROVALS: Final = f"{SUITE}test_coding_approvals.py::test_"
_RELAY: Final = f"{SUITE}test_coding_relay_v1"
LONG: Final = {
    f"{_RELAY}.py::TestNetwork::test_a_cut_of_65_seconds_at_full_length": "its length depends on no library; shorter cuts run",
    f"{_RELAY}_bounds.py::TestMemory::test_a_million_tiny_frames_are_a_million_events_in_bounded_memory": "the memory is ours",
    f"{_RELAY}_trust.py::TestEnds::test_a_machine_that_slept_goes_on_or_agrees_that_its_job_is_lost": "the clock is ours",
}
LEFT_OUT_PYTHON: Final = {
    f"{SUITE}test_process_supervisor.py::test_a_supervisor_is_small_and_quick": "its bound is of Python 3.11's own memory",
}
LEFT_OUT_SDK: Final = {
    f"{_APPROVALS}whatever_is_killed_or_replaced_no_turn_waits_for_ever[codex]": ONE_AGENT,
    f"{_APPROVALS}whatever_is_killed_or_replaced_no_turn_waits_for_ever[claude]": ONE_AGENT,
    f"{_APPROVALS}where_no_turn_can_wait_it_is_cancelled_and_the_answer_resumes_the_session[codex]": ONE_AGENT,
    f"{_APPROVALS}where_no_turn_can_wait_it_is_cancelled_and_the_answer_resumes_the_session[claude]": ONE_AGENT,
    f"{_APPROVALS}stop_cancels_what_waits_and_leaves_nothing_to_answer[codex]": ONE_AGENT,
    f"{_APPROVALS}stop_cancels_what_waits_and_leaves_nothing_to_answer[claude]": ONE_AGENT,
    f"{_APPROVALS}every_answer_under_every_policy_on_every_surface[allow": ONE_POLICY,
    f"{_APPROVALS}every_answer_under_every_policy_on_every_surface[deny": ONE_POLICY,
    f"{_APPROVALS}a_cut_of_some_seconds_changes_nothing_for_who_waits": NO_SDK,
    f"{_RELAY}.py::TestNetwork": NO_SDK,
    f"{_RELAY}_bounds.py::TestMemory": NO_SDK,
    f"{_RELAY}_bounds.py::TestCrowds": NO_SDK,
    f"{_RELAY}_trust.py::TestEnds": NO_SDK,
    f"{_RELAY}_wire.py::TestForeignBytes": NO_SDK,
    f"{_RELAY}_wire.py::TestTwoMachines": NO_SDK,
    f"{SUITE}test_daemon_workers.py::TestRestarts": NO_SDK,
    f"{SUITE}test_daemon_workers.py::TestCuts": NO_SDK,
    f"{SUITE}test_daemon_workers.py::TestCanaries": NO_SDK,
    f"{SUITE}test_daemon_workers.py::TestPool::test_a_weak_or_shared_token_is_refused_in_words": NO_SDK,
    f"{SUITE}test_statelessness.py::test_": SELF_TEST,
}
CANCELS: Final = {
    f"{SUITE}test_worker_runs.py::test_a_cancelled_run_stops_the_turn_and_keeps_the_agent": UNCANCELLED,
    f"{SUITE}test_worker_runs.py::test_a_cancelled_agent_that_does_not_stop_is_ended": UNCANCELLED,
}
LEFT_OUT_0_7_4: Final = {
    **CANCELS,
    f"{SUITE}test_identity.py::TestAuthority::test_the_invocation_decides_in_a_shared_worker": UNPOOLED,
    f"{SUITE}test_identity.py::TestAuthority::test_the_invocation_decides_before_the_connection": UNPOOLED,
    f"{SUITE}test_identity.py::TestAuthority::test_a_pool_of_an_sdk_without_the_revocation_hook_is_refused": UNPOOLED,
}
LEFT_OUT_0_7_5: Final = {
    **CANCELS,
    f"{SUITE}test_shared_runtime.py::test_over_ssh_each_works_on_its_own_machine": UNCANCELLED,
    f"{SUITE}test_shared_runtime.py::test_a_call_that_was_cancelled_is_no_action_of_the_connection_any_more": UNCANCELLED,
    f"{SUITE}test_daemon_workers.py::TestTwoWorkers::test_a_cancelled_run_ends_its_own_agent_and_no_other": UNCANCELLED,
    f"{SUITE}test_daemon_workers.py::TestPool::test_a_killed_shared_worker_leaves_no_agent_on_any_machine": NO_SDK,
    f"{SUITE}test_worker_lifecycle.py::test_the_real_dependency_environment_of_the_package_serves": HOSTS,
}
LEFT_OUT_0_7_16: Final = {
    f"{SUITE}test_worker_lifecycle.py::test_the_real_dependency_environment_of_the_package_serves": HOST,
    f"{SUITE}test_daemon_workers.py::TestPool::test_a_killed_shared_worker_leaves_no_agent_on_any_machine": NO_SDK,
}


def lanes(main: Python, machine: Sequence[Python]) -> list[Lane]:
    """Every lane beside the main run, longest first. ``main`` is the Python of the main run, ``machine`` all there are."""
    unless_once = ("-m", f"not ({any_of(ONCE)})")
    found = [
        Lane("sdk-0.7.16", main, LOCKS / "sdk-0.7.16.txt", (*unless_once, *SDK_FILES), {**LEFT_OUT_SDK, **LEFT_OUT_0_7_16}),
        Lane("sdk-0.7.5", main, LOCKS / "sdk-0.7.5.txt", (*unless_once, *SDK_FILES), {**LEFT_OUT_SDK, **LEFT_OUT_0_7_5}),
        Lane("sdk-0.7.4", main, LOCKS / "sdk-0.7.4.txt", (*unless_once, *OLDEST_FILES), LEFT_OUT_0_7_4),
        Lane("websockets-15.0", main, LOCKS / "websockets-15.0.txt", (*unless_once, *SOCKET_FILES), LONG),
    ]
    others = (each for each in machine if (each.version, each.prefix) != (main.version, main.prefix))
    core = (*unless_once, *CORE_FILES)
    return [
        *found,
        *(Lane(f"python-{each.version}", each, None, core, LEFT_OUT_PYTHON, may_be_missing=True) for each in others),
    ]
