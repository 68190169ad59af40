"""The whole suite's schedule and its compatibility lanes: what runs where, what becomes of it, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tooling import ROOT, compat, lanes, venv

MAIN = compat.Python("3.11.7", "/somewhere", "/somewhere/bin/python3.11")
OTHER = compat.Python("3.13.0", "/elsewhere", "/elsewhere/bin/python3.13")
TABLE = compat.lanes(MAIN, [MAIN, OTHER])
OVERLAYS = [lane.overlay for lane in TABLE if lane.overlay is not None]


# ------------------------------------------------------------------ which test runs where


def test_every_test_of_the_suite_runs_in_exactly_one_part() -> None:
    """Our rule: whatever markers a test carries, one of the parts selects it and no other does."""
    parts = lanes.parts()
    markers = sorted({name for part in parts.values() for name in re.findall(r"\w+", part)} - {"not", "or", "and"})
    assert {"real_host", "real_claude", "real_agents"} <= set(markers)
    for carried in itertools.product((False, True), repeat=len(markers)):
        names = dict(zip(markers, carried, strict=True))
        assert sum(bool(eval(part, {}, names)) for part in parts.values()) == 1, names


def test_a_marker_that_the_suite_does_not_declare_is_not_asked_for() -> None:
    """Host fact: pytest refuses an expression with an unknown marker, and so would run nothing."""
    assert compat.any_of(("sdk_worker", "no_such_marker", "ssh")) == "sdk_worker or ssh"


def test_the_lanes_cover_what_they_promise() -> None:
    """Our rule: the oldest SDK, the first with the hook, the stock host's, the lowest websockets, and each other Python."""
    found = {lane.name: compat.pins(lane.lock) for lane in TABLE}
    assert list(found) == ["sdk-0.7.16", "sdk-0.7.5", "sdk-0.7.4", "websockets-15.0", "python-3.13.0"]
    assert [pins["langbot-plugin"] for pins in found.values()][:3] == ["0.7.16", "0.7.5", "0.7.4"]
    lowest = {
        re.search(r"^websockets>=([\d.]+),", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]
        for package in ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")
        for name in (f"{package}/requirements.txt", f"{package}/requirements-daemon.txt")
    }
    assert {found["websockets-15.0"]["websockets"]} == {f"{version}.0" for version in lowest}
    assert [lane.python for lane in TABLE] == [MAIN] * 4 + [OTHER]


@pytest.mark.parametrize("lane", TABLE, ids=lambda lane: lane.name)
def test_a_lane_names_files_and_tests_that_exist(lane: compat.Lane) -> None:
    """Our rule: a renamed test neither vanishes from a lane nor comes back into it unseen; every omission has its reason."""
    files = [part for part in lane.selection if part.endswith(".py")]
    assert files
    for part in files:
        assert list(ROOT.glob(part)), part
    for name, reason in lane.left_out.items():
        file, *parts = name.partition("[")[0].split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert reason
        for part in parts:
            assert re.search(rf"(def|class) {re.escape(part)}", source), name


@pytest.mark.parametrize("name", ["sdk-0.7.16", "sdk-0.7.5"])
def test_some_of_every_established_suite_runs_in_the_lanes_of_shared_sdks(name: str) -> None:
    """Our rule: no file named ``test_coding_*`` is left out as a whole, and the newest SDK is the main run's."""
    [lane] = [each for each in TABLE if each.name == name]
    chosen = [part for part in lane.tests() if "/test_coding_" in part and not part.startswith("--deselect")]
    assert chosen == sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("certification-tests/test_coding_*.py"))
    assert not set(chosen) & set(lane.left_out)


# ------------------------------------------------------------------ locks


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_changes_one_package_of_the_development_lock(overlay: Path) -> None:
    """Our rule: one exact version with its hashes and no address; everything else is the development lock's."""
    text = overlay.read_text(encoding="utf-8")
    assert "://" not in text
    [(name, version)] = compat.pins(text).items()
    assert overlay.stem in (f"sdk-{version}", f"{name}-{version}")
    assert text.count("--hash=sha256:") >= 2
    ours, base = compat.pins(compat.merged(text)), compat.pins(venv.DEV_LOCK.read_text(encoding="utf-8"))
    assert ours == {**{key: value for key, value in base.items() if key not in compat.TOOLS}, name: version}
    assert compat.merged(text).count("--hash=") > 500


def test_an_overlay_for_a_package_that_is_in_no_lock_is_refused() -> None:
    """Our rule: a misspelt name adds nothing unseen."""
    with pytest.raises(ValueError, match="no-such-package"):
        compat.merged("no-such-package==1.0 \\\n    --hash=sha256:00\n")


# ------------------------------------------------------------------ Pythons


def pretend(path: Path, *said: str, code: int = 0) -> Path:
    """A program that says this, whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said) + f"exit {code}\n")
    path.chmod(0o755)
    return path


def test_every_cpython_of_the_machine_is_found_once(tmp_path: Path) -> None:
    """Our rule: each is really started; several names are one; shims, old ones, others and broken ones are none."""
    pretend(tmp_path / "a" / "python3.12", "cpython", "3.12.1", "/opt/twelve", "/opt/twelve/bin/python3.12")
    pretend(tmp_path / "b" / "python3", "cpython", "3.12.1", "/opt/twelve", "/opt/twelve/bin/python3.12")
    pretend(tmp_path / "b" / "python3.13t", "cpython", "3.13.0t", "/opt/free", "/opt/free/bin/python3.13t")
    pretend(tmp_path / "b" / "python3.10", "cpython", "3.10.13", "/opt/ten", "/opt/ten/bin/python3.10")
    pretend(tmp_path / "b" / "python3.11", "pypy", "3.11.9", "/opt/pypy", "/opt/pypy/bin/pypy3.11")
    pretend(tmp_path / "b" / "python3.14", "python3.14: command not found", code=127)
    pretend(tmp_path / "b" / "python3.12-config", "cpython", "3.12.9", "/opt/no", "/opt/no")
    pretend(tmp_path / "b" / "python3.15", "cpython", "3.15.0", "/opt/no", "/opt/no").chmod(0o644)
    found = compat.pythons([tmp_path / "nowhere", tmp_path / "a", tmp_path / "b"])
    assert [each.version for each in found] == ["3.12.1", "3.13.0t"]
    assert found[0] == compat.Python("3.12.1", "/opt/twelve", "/opt/twelve/bin/python3.12")


def test_an_environment_is_the_python_it_was_made_from() -> None:
    """Our rule: an active environment on PATH is no further Python of the machine."""
    mine = compat.probe(Path(sys.executable))
    assert mine is not None
    assert mine.prefix == os.path.realpath(sys.base_prefix)
    assert mine.version.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}")
    base = compat.probe(Path(mine.executable))
    assert base is not None and (base.version, base.prefix) == (mine.version, mine.prefix)


def test_versions_of_pyenv_are_looked_for(tmp_path: Path) -> None:
    """Our rule: PATH, the system's directories and all of pyenv's, wherever that is."""
    for directory in (
        tmp_path / "root" / "versions" / "3.12.1" / "bin",
        tmp_path / "home" / ".pyenv" / "versions" / "3.13.0" / "bin",
    ):
        directory.mkdir(parents=True)
    environ = {"PATH": "/one:relative:/two", "PYENV_ROOT": str(tmp_path / "root"), "HOME": str(tmp_path / "home")}
    found = [str(place).replace(str(tmp_path), "") for place in compat.places(environ)]
    assert found[:4] == ["/one", "/two", "/usr/bin", "/usr/local/bin"]
    assert found[4:] == ["/root/versions/3.12.1/bin", "/home/.pyenv/versions/3.13.0/bin"]


PREPARE = """
import sys
sys.path.insert(0, sys.argv[1])
from tooling import compat
sys.exit(compat.prepare(sys.argv[2], sys.argv[3], "a test environment"))
"""


@pytest.mark.parametrize(("source", "code"), [("find", compat.GAP), ("index", 2)])
def test_no_wheel_is_a_gap_and_no_network_a_failure(tmp_path: Path, source: str, code: int) -> None:
    """Our rule: what cannot be had for this Python is told apart from what could not be asked for."""
    (tmp_path / "lock.txt").write_text(f"tinypackage==1.0 --hash=sha256:{'0' * 64}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    if source == "find":
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    else:
        environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_TIMEOUT": "5"}
    command = [sys.executable, "-c", PREPARE, str(ROOT / "scripts"), str(tmp_path / "lock.txt"), str(tmp_path / "env")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr


# ------------------------------------------------------------------ running


RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tooling import lanes
whole = [lanes.Step(**{**step, "command": ["/bin/sh", "-c", step["command"]]}) for step in json.loads(sys.argv[2])]
sys.exit(lanes.run(whole, places=int(sys.argv[3])))
"""


def started(*scripts: str | dict[str, object], places: int = 2) -> subprocess.Popen[str]:
    """A run of steps, each of them a script of a shell in place of pytest, named a, b, c …"""
    whole = [
        {"name": "abcdefgh"[number], "counted": False, **(script if isinstance(script, dict) else {"command": script})}
        for number, script in enumerate(scripts)
    ]
    command = [sys.executable, "-c", RUN, str(ROOT / "scripts"), json.dumps(whole), str(places)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*scripts: str | dict[str, object], places: int = 2) -> tuple[int, str]:
    """Exit code and output of such a run."""
    with started(*scripts, places=places) as run:
        output, errors = run.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return run.returncode, output


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("places", [1, 2])
def test_every_step_runs_once_and_the_worst_code_is_the_wholes(failing: int, places: int) -> None:
    """Our rule: any step's failure is the whole's, and what each printed is shown whole and once."""
    code, output = ended(*(f"echo ran {n}; exit {3 if n == failing else 0}" for n in range(4)), places=places)
    assert code == 3
    assert sorted(re.findall(r"^ran \d$", output, re.MULTILINE)) == [f"ran {n}" for n in range(4)]
    rows = re.findall(r"^([abcd]) .* (\d)$", output, re.MULTILINE)
    assert rows == [("abcd"[n], "3" if n == failing else "0") for n in range(4)]


def test_without_a_failure_the_code_is_zero() -> None:
    """Our rule: only that is green."""
    assert ended("exit 0", "exit 0", "exit 0")[0] == 0


def test_a_step_that_a_signal_ended_is_a_failure() -> None:
    """Our rule: as a shell counts it."""
    assert ended("exit 0", "kill -KILL $$", "exit 1")[0] == 128 + signal.SIGKILL


def test_the_place_that_is_free_takes_the_next_step(tmp_path: Path) -> None:
    """Our rule: the first ends only after the last has run, which therefore ran beside it; two never become three."""
    alive = f"mkdir {tmp_path}/in.$$; ls -d {tmp_path}/in.* | wc -l >> {tmp_path}/counts"
    leave = f"rmdir {tmp_path}/in.$$"
    wait = f"while [ ! -e {tmp_path}/last ]; do sleep 0.02; done"
    code, _ = ended(
        f"{alive}; {wait}; {leave}", f"{alive}; {leave}", f"{alive}; {leave}", f"{alive}; touch {tmp_path}/last; {leave}"
    )
    assert code == 0
    assert max(int(line) for line in (tmp_path / "counts").read_text().split()) == 2


def test_output_of_others_waits_for_the_first_steps(tmp_path: Path) -> None:
    """Our rule: no line of one step stands in the middle of another's."""
    first = f"echo first begins; while [ ! -e {tmp_path}/done ]; do sleep 0.02; done; sleep 0.2; echo first ends"
    _, output = ended(first, f"echo second; touch {tmp_path}/done")
    assert re.findall(r"^(?:first \w+|second)$", output, re.MULTILINE) == ["first begins", "first ends", "second"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_told_to_end_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    """Our rule: nothing goes on in the background, children of children included, and nothing more begins."""
    script = f"sleep 300 & echo $! >> {tmp_path}/pids; echo $$ >> {tmp_path}/pids; wait"
    with started(script, script, f"touch {tmp_path}/begun") as run:
        deadline = time.monotonic() + 30
        pids: list[str] = []
        while len(pids) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
            pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode in (128 + number, -number)
    assert len(pids) == 4
    assert not [pid for pid in pids if living(pid)]
    assert not (tmp_path / "begun").exists()


def living(pid: str) -> bool:
    """Whether the process does anything yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("prepared", "may_be_missing", "code", "row"),
    [
        (f"echo ERROR: No matching distribution found for thing==1; exit {compat.GAP}", True, 0, "gap"),
        (f"echo ERROR: No matching distribution found for thing==1; exit {compat.GAP}", False, compat.GAP, str(compat.GAP)),
        ("exit 2", True, 2, "2"),
    ],
)
def test_what_cannot_be_prepared_is_named_and_not_run(prepared: str, may_be_missing: bool, code: int, row: str) -> None:
    """Our rule: a Python without wheels is a gap that the summary names; whatever else fails is a failure."""
    step: dict[str, object] = {
        "command": "echo it ran",
        "preparation": ["/bin/sh", "-c", prepared],
        "may_be_missing": may_be_missing,
        "python": "3.99.0",
    }
    found, output = ended(step)
    assert found == code
    assert "it ran" not in output
    assert re.search(rf"^a .*3\.99\.0.* {row}$", output, re.MULTILINE)
    assert ("gap: a: No matching distribution found for thing==1" in output) is (row == "gap")


# ------------------------------------------------------------------ the summary


INNER = """
import pytest
def test_passes():
    pass
def test_fails():
    raise AssertionError
def test_skips():
    pytest.skip("the moon is not full")
@pytest.mark.xfail
def test_fails_as_known():
    raise AssertionError
@pytest.fixture
def broken():
    yield
    raise AssertionError
def test_passes_and_breaks(broken):
    pass
"""


def test_outcomes_are_counted_by_test_and_skips_keep_their_reason(tmp_path: Path) -> None:
    """Our rule: what breaks after it has passed has failed, once; a failure that is expected has passed."""
    (tmp_path / "test_inner.py").write_text(INNER)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-q", str(tmp_path / "test_inner.py"), f"--junit-xml={report}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    counted = lanes.counted(report)
    assert {name: counted[name] for name in ("passed", "failed", "skipped")} == {"passed": 2, "failed": 2, "skipped": 1}
    assert ["the moon is not full" in reason for reason in counted["reasons"]] == [True]


def rows(text: str) -> list[Sequence[str]]:
    """The table's rows, cells apart."""
    return [re.split(r"  +", line) for line in text.splitlines() if "  " in line]


def test_the_summary_says_what_ran_on_what_and_what_did_not_run() -> None:
    """Our rule: a row has versions and numbers; gaps, skips, omissions and jailed tests stand below with their reasons."""
    one = lanes.Step("one", ["true"], "0.7.18", "3.11.7", "17.4")
    two = lanes.Step("two", ["true"], "0.7.5", "3.11.7", "17.4", left_out={"certification-tests/test_x.py::test_y": "because"})
    three = lanes.Step("three", ["true"], "0.7.18", "3.15.0", "17.4", may_be_missing=True)
    text = lanes.table(
        [
            lanes.Outcome(one, 0, 61.2, 7, 0, 1, ("no moon",), ("jailed tests: 3 ran",)),
            lanes.Outcome(two, 1, 2.0, 5, 1, 0),
            lanes.Outcome(three, 0, 1.0, gap="No matching distribution found for thing==1"),
        ],
        120.0,
    )
    assert rows(text)[1:] == [
        ["one", "0.7.18", "3.11.7", "17.4", "7", "0", "1", "61", "0"],
        ["two", "0.7.5", "3.11.7", "17.4", "5", "1", "0", "2", "1"],
        ["three", "0.7.18", "3.15.0", "17.4", "1", "gap"],
    ]
    for line in (
        "gap: three: No matching distribution found for thing==1",
        "skipped in one: no moon",
        "one: jailed tests: 3 ran",
        "left out of two: test_x.py::test_y: because",
        "3 steps in 2.0 minutes",
    ):
        assert f"\n{line}" in text


def test_a_lane_that_is_not_there_is_not_run() -> None:
    """Our rule: a misspelt name is a failure that names those there are."""
    command = [sys.executable, str(ROOT / "scripts" / "test.py"), "--compat", "sdk-0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "sdk-0.0.1" in done.stderr and "sdk-0.7.5" in done.stderr
