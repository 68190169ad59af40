"""The whole suite as several processes side by side: its own four parts, every compatibility lane, and the sabotages.

Guarantees: every test of the suite runs in exactly one of the four parts; whichever place is free takes the next step, longest
first, so that all places end at about the same time; when :func:`run` returns every process is over, also after an interrupt
or SIGTERM; what a step printed is shown whole when it has ended, the first step's as it comes; one table at the end says what
every step ran on and what became of it, with what was left out and why; the worst exit code is the whole's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from tooling import ROOT, compat, steps, venv

WAITING: Final = ("real_host", "real_claude", "real_agents")
"""The markers of tests that wait for a chat's pace and for other programs, so that one core serves them and others."""

WORKERS: Final = ("sdk_worker", "demo")
"""The markers of tests that start whole workers and daemons beside them."""

JAILED: Final = ("nsjail", "evidence")
"""The markers of tests that start jails or build and check whole packages."""

SABOTAGE: Final = ROOT / "scripts" / "sabotage.py"
NOTE: Final = re.compile(rb"^jailed tests: .*$", re.MULTILINE)
"""What a step prints that is repeated below the table."""

INTERRUPTED: Final = 20.0
"""Seconds that a step gets to end by itself after an interrupt, before it is terminated."""

TERMINATED: Final = 5.0
"""Seconds that it gets after that, before it is killed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table: commands in their order, of which the last is the run itself."""

    name: str
    command: Sequence[str]
    sdk: str = ""
    python: str = ""
    websockets: str = ""
    preparation: Sequence[str] = ()
    may_be_missing: bool = False
    counted: bool = True
    """Whether the command is pytest, whose outcomes are counted."""
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    step: Step
    code: int
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: tuple[str, ...] = ()
    """Why tests were skipped."""
    notes: tuple[str, ...] = ()
    gap: str = ""


# ------------------------------------------------------------------ what there is to run


def parts() -> dict[str, str]:
    """The suite divided by marker expressions into parts, each test in exactly one: the first whose markers it carries."""
    divided: dict[str, str] = {}
    taken: list[str] = []
    for name, markers in (("main, waiting", WAITING), ("main, jailed", JAILED), ("main, workers", WORKERS)):
        if chosen := compat.any_of(markers):
            divided[name] = f"({chosen}) and not ({' or '.join(taken)})" if taken else chosen
            taken.append(chosen)
    # The longest first.
    rest = {"main": f"not ({' or '.join(taken)})"}
    return {**rest, **{name: divided[name] for name in ("main, waiting", "main, workers", "main, jailed") if name in divided}}


def main_steps(python: Path) -> list[Step]:
    """The suite itself and, where it is there, the command that sabotages the product."""
    found = compat.probe(python)
    pins = compat.pins(venv.DEV_LOCK.read_text(encoding="utf-8"))
    version = found.version if found else ""
    whole = [
        Step(name, [str(python), "-m", "pytest", "-m", marks], pins["langbot-plugin"], version, pins["websockets"])
        for name, marks in parts().items()
    ]
    if SABOTAGE.is_file():
        whole.append(Step("sabotage", [str(python), str(SABOTAGE)], counted=False))
    return whole


def compat_steps(python: Path) -> list[Step]:
    """Every compatibility lane. ``python`` is the interpreter of the main run."""
    main = compat.probe(python)
    assert main is not None
    found = []
    for lane in compat.lanes(main, compat.pythons(compat.places())):
        pins = compat.pins(lane.lock)
        found.append(
            Step(
                lane.name,
                lane.tests(),
                pins["langbot-plugin"],
                lane.python.version,
                pins["websockets"],
                lane.preparation(),
                lane.may_be_missing,
                left_out=lane.left_out,
            )
        )
    return found


def whole(python: Path) -> list[Step]:
    """Everything: the suite's own parts first, then what any place takes when it is free."""
    return [*main_steps(python), *compat_steps(python)]


def compat_only(python: Path, names: Sequence[str]) -> int:
    """Run the named compatibility lanes, all of them without a name; the exit code, 2 for a name that is none."""
    every = compat_steps(python)
    if list(names) == ["--list"]:
        print("\n".join(f"{step.name}: SDK {step.sdk}, Python {step.python}, websockets {step.websockets}" for step in every))
        return 0
    if unknown := set(names) - {step.name for step in every}:
        steps.say(f"No such lane: {', '.join(sorted(unknown))}. There are: {', '.join(step.name for step in every)}")
        return 2
    return run([step for step in every if not names or step.name in names], places=places())


# ------------------------------------------------------------------ running


def run(whole: Sequence[Step], *, places: int) -> int:
    """Run every step to its end, ``places`` of them at a time; the worst exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    started = time.monotonic()
    runner = _Runner(whole)
    threads = [threading.Thread(target=runner.serve, name=f"place {number}") for number in range(places)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        runner.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if runner.broken is not None:
        raise runner.broken
    outcomes = sorted(runner.outcomes, key=lambda outcome: whole.index(outcome.step))
    print(table(outcomes, time.monotonic() - started), flush=True)
    return max((outcome.code for outcome in outcomes), default=2)


class _Runner:
    """Takes steps in their order into places, and knows every process that lives."""

    def __init__(self, whole: Sequence[Step]) -> None:
        self.outcomes: list[Outcome] = []
        self.broken: BaseException | None = None
        """What went wrong in a place itself."""
        self._left = collections.deque(whole)
        self._shown = whole[0] if whole else None
        """The step whose output is shown as it comes; the others' waits until it is over."""
        self._held: list[bytes] = []
        self._lock = threading.Lock()
        self._living: set[subprocess.Popen[bytes]] = set()
        self._ending = False

    def serve(self) -> None:
        """One place: step after step until none is left."""
        try:
            while (step := self._next()) is not None:
                self._one(step)
        except BaseException as exc:  # noqa: BLE001 - raised by the main thread, which ends the other place
            self.broken = exc
            self.end()

    def _next(self) -> Step | None:
        with self._lock:
            return self._left.popleft() if self._left and not self._ending else None

    def _one(self, step: Step) -> None:
        started = time.monotonic()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory(prefix="lane-") as directory:
            shown = step is self._shown
            if not shown:
                output.write(f"\n{'-' * 20} {step.name}\n".encode())
                output.flush()
            report = Path(directory) / "report.xml"
            code, gap = 0, ""
            if step.preparation:
                code = self._process(step.preparation, output)
                if code == compat.GAP and step.may_be_missing:
                    output.seek(0)
                    why = compat.NO_WHEEL.search(output.read().decode(errors="replace"))
                    code, gap = 0, why[1] if why else "its environment cannot be made"
            if not code and not gap:
                extra = [f"--junit-xml={report}"] if step.counted else []
                code = self._process([*step.command, *extra], None if shown else output)
            output.seek(0)
            said = output.read()
            outcome = Outcome(
                step,
                code,
                time.monotonic() - started,
                **(counted(report) if report.is_file() else {}),
                notes=tuple(line.decode(errors="replace") for line in NOTE.findall(said)),
                gap=gap,
            )
        with self._lock:
            self.outcomes.append(outcome)
            self._held.append(said)
            if shown:
                self._shown = None
            if self._shown is None:
                sys.stdout.flush()
                while self._held:
                    sys.stdout.buffer.write(self._held.pop(0))
                sys.stdout.buffer.flush()

    def _process(self, command: Sequence[str], output: IO[bytes] | None) -> int:
        """One process to its end; its exit code, that of a signal as a shell has it."""
        with self._lock:
            if self._ending:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                process_group=0,
            )
            self._living.add(process)
        code = process.wait()
        with self._lock:
            self._living.discard(process)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Begin nothing more, and end whatever lives: interrupted, so that it can tidy up, then terminated, then killed.

        What a process left in its group is killed even where the process itself has ended before.
        """
        with self._lock:
            self._ending = True
            living = list(self._living)
        for number, grace in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED), (signal.SIGKILL, TERMINATED)):
            for process in living:
                if process.poll() is None or number is signal.SIGKILL:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            until = time.monotonic() + grace
            for process in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))


# ------------------------------------------------------------------ what became of them


def counted(report: Path) -> dict[str, Any]:
    """How many tests of a JUnit report passed, failed and were skipped, and why the latter; each test counts once."""
    verdicts: dict[tuple[str, str], str] = {}
    reasons = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        key = (case.get("classname", ""), case.get("name", ""))
        found = {child.tag for child in case}
        skip = case.find("skipped")
        if found & {"failure", "error"}:
            verdicts[key] = "failed"
        elif skip is not None and skip.get("type") != "pytest.xfail":
            verdicts.setdefault(key, "skipped")
            reasons.append(skip.get("message", ""))
        else:
            verdicts.setdefault(key, "passed")
    count = collections.Counter(verdicts.values())
    return {
        "passed": count["passed"],
        "failed": count["failed"],
        "skipped": count["skipped"],
        "reasons": tuple(dict.fromkeys(reasons)),
    }


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """One row a step, and below it every gap, skip and omission with its reason."""
    head = ("step", "SDK", "Python", "websockets", "passed", "failed", "skipped", "seconds", "exit")
    rows: list[tuple[str, ...]] = [head]
    notes = []
    for outcome in outcomes:
        step = outcome.step
        numbers = ("", "", "") if not step.counted or outcome.gap else (outcome.passed, outcome.failed, outcome.skipped)
        code = "gap" if outcome.gap else str(outcome.code)
        rows.append((step.name, step.sdk, step.python, step.websockets, *map(str, numbers), f"{outcome.seconds:.0f}", code))
        if outcome.gap:
            notes.append(f"gap: {step.name}: {outcome.gap}")
        notes += [f"skipped in {step.name}: {reason}" for reason in outcome.reasons]
        notes += [f"{step.name}: {note}" for note in outcome.notes]
    omitted: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, reason in outcome.step.left_out.items():
            omitted.setdefault(f"{name.rpartition('/')[2]}: {reason}", []).append(outcome.step.name)
    notes += [f"left out of {', '.join(names)}: {what}" for what, names in omitted.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "=" * max(map(len, lines))
    return "\n".join(("", rule, *lines, rule, *notes, f"{len(outcomes)} steps in {seconds / 60:.1f} minutes"))


def places() -> int:
    """How many steps run side by side: one more than there are cores, three at the most, because tests mostly wait."""
    return min(3, (os.cpu_count() or 1) + 1)
