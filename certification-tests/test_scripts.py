"""The scripts that prepare environments, run the suite and build packages, and the suite's own rules."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tooling import ROOT, SetupError, agents, host, jail, packages, steps, venv

LOCKS = (venv.DEV_LOCK, host.LOCK, jail.LOCK)
LOCK_LINE = re.compile(r"^[A-Za-z0-9._-]+(\[[a-z0-9,-]+\])?==[^ ;]+( ; .+)?$")


# ------------------------------------------------------------------ locks


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_pins_everything_with_hashes_and_names_no_address(lock: Path) -> None:
    """Every requirement has one exact version and at least one hash; a lock works with whatever index pip is set up for."""
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    entries = text.replace("\\\n", " ").splitlines()
    requirements = [line for line in entries if line and not line.startswith("#")]
    assert len(requirements) > 50
    for line in requirements:
        named, _, hashes = line.partition(" --hash=")
        assert LOCK_LINE.match(" ".join(named.split())), named
        assert hashes.startswith("sha256:") or "--hash=sha256:" in line, named


@pytest.mark.parametrize("locked", [agents.ACP, agents.CLAUDE_CODE], ids=lambda each: each.family)
def test_a_lock_of_agents_pins_everything_with_hashes_and_names_no_registry(locked: agents.Agents) -> None:
    """An npm lock holds no resolved address, so it works with whatever registry npm is set up for."""
    text = (locked.manifest / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in text
    assert text.count('"integrity"') >= text.count('"node_modules/') - 1
    wanted = json.loads((locked.manifest / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values()), wanted


def test_the_development_environment_is_complete() -> None:
    """The lock installs without resolving anything, so nothing may be missing from it (``pip check``)."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------ making environments


def wheel(directory: Path, version: str) -> str:
    """Make a wheel of a tiny package there; returns its lock line."""
    name = f"tinypackage-{version}"
    target = directory / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("tinypackage.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: tinypackage\nVersion: {version}\n")
        archive.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return f"tinypackage=={version} --hash=sha256:{hashlib.sha256(target.read_bytes()).hexdigest()}\n"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock with one package that pip finds on this disk and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    path = tmp_path / "lock.txt"
    path.write_text(wheel(tmp_path, "1.0"))
    return path


def installed(python: Path) -> str:
    """The version of the tiny package in an environment."""
    command: list[str | Path] = [python, "-I", "-c", "import tinypackage; print(tinypackage.VERSION)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def ensure(directory: Path, lock: Path) -> Path:
    """Make or reuse the environment."""
    return venv.ensure(directory, lock, "a test environment", directory.parent / "guard")


def test_an_environment_is_made_once_and_reused(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call says in one line what it does and installs; the second finds it ready, says nothing, changes nothing."""
    directory = tmp_path / "env"
    assert installed(ensure(directory, lock)) == "1.0"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("preparing a test environment, 1 pinned packages")
    before = (directory / venv.STAMP).stat()
    ensure(directory, lock)
    assert capsys.readouterr().err == ""
    assert (directory / venv.STAMP).stat().st_mtime_ns == before.st_mtime_ns


def test_a_changed_lock_brings_the_environment_up_to_date(lock: Path, tmp_path: Path) -> None:
    """The fingerprint of the lock decides; what is there is updated, not made anew."""
    directory = tmp_path / "env"
    ensure(directory, lock)
    (directory / "kept").touch()
    lock.write_text(wheel(tmp_path, "2.0"))
    assert installed(ensure(directory, lock)) == "2.0"
    assert (directory / "kept").exists()


def test_an_interrupted_installation_is_never_taken_for_a_finished_one(lock: Path, tmp_path: Path) -> None:
    """An environment with a failed installation is made anew by the next call."""
    directory = tmp_path / "env"
    good = lock.read_text()
    lock.write_text("tinypackage==3.0 --hash=sha256:" + "0" * 64 + "\n")
    with pytest.raises(SetupError, match="failed with exit code"):
        ensure(directory, lock)
    assert not venv.is_ready(directory, lock)
    (directory / "half-installed").touch()
    lock.write_text(good)
    assert installed(ensure(directory, lock)) == "1.0"
    assert not (directory / "half-installed").exists()


def test_wrong_bytes_are_refused(lock: Path, tmp_path: Path) -> None:
    """A package whose bytes are not those of the lock is not installed."""
    lock.write_text(re.sub("sha256:.", "sha256:" + ("1" if "sha256:0" in lock.read_text() else "0"), lock.read_text()))
    with pytest.raises(SetupError, match=r"(?i)hash"):
        ensure(tmp_path / "env", lock)


def test_a_moved_environment_is_made_anew(lock: Path, tmp_path: Path) -> None:
    """Its scripts name the old place, so it is not taken as it is."""
    ensure(tmp_path / "env", lock)
    (tmp_path / "env").rename(tmp_path / "moved")
    assert not venv.is_ready(tmp_path / "moved", lock)
    assert installed(ensure(tmp_path / "moved", lock)) == "1.0"


def test_something_else_in_its_place_is_left_alone(lock: Path, tmp_path: Path) -> None:
    """A directory that is no virtual environment is never deleted."""
    directory = tmp_path / "env"
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupError, match="in the way"):
        ensure(directory, lock)
    assert (directory / "thesis.txt").read_text() == "years of work"


BARE = """
import sys
sys.modules["ensurepip"] = None
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tooling import SetupError, venv
try:
    print(venv.ensure(Path(sys.argv[2]), Path(sys.argv[3]), "a test environment", Path(sys.argv[2] + ".guard")))
except SetupError as exc:
    sys.exit(str(exc))
"""


def without_ensurepip(lock: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Make an environment with a Python that has neither ensurepip nor pip, and this PATH."""
    bare = lock.parent / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=60)
    command: list[str | Path] = [bare / "bin" / "python", "-c", BARE, ROOT / "scripts", lock.parent / "env", lock]
    environment = {**os.environ, "PATH": str(path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_where_ensurepip_is_missing_pip_on_the_path_is_used(lock: Path, tmp_path: Path) -> None:
    """Debian's Python comes without ensurepip; any pip that can install into another environment will do."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    (tools / "pip").chmod(0o755)
    done = without_ensurepip(lock, tools)
    assert done.returncode == 0, done.stderr
    assert installed(Path(done.stdout.strip())) == "1.0"


def test_where_ensurepip_is_missing_virtualenv_on_the_path_is_used(lock: Path, tmp_path: Path) -> None:
    """The last resort before giving up."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "virtualenv").write_text(f'#!/bin/sh\nexec {sys.executable} -m virtualenv "$@"\n')
    (tools / "virtualenv").chmod(0o755)
    done = without_ensurepip(lock, tools)
    assert done.returncode == 0, done.stderr
    assert installed(Path(done.stdout.strip())) == "1.0"


def test_with_none_of_them_the_one_command_to_run_is_named(lock: Path, tmp_path: Path) -> None:
    """Nothing is half made, and the text holds a command line to copy."""
    (tmp_path / "tools").mkdir()
    done = without_ensurepip(lock, tmp_path / "tools")
    assert done.returncode == 1
    assert "neither ensurepip nor pip nor virtualenv" in done.stderr
    assert "\n\n    " in done.stderr
    assert not (tmp_path / "env").exists()


# ------------------------------------------------------------------ test.py, the locks between runs


def test_the_interpreter_is_all_that_python_option_prints() -> None:
    """``scripts/test.py --python`` is made for ``$(...)``."""
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "test.py", "--python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"{venv.interpreter(venv.DEV_VENV)}\n"


@pytest.mark.parametrize("script", ["test.py", "demo.py", "build.py"])
def test_an_old_python_is_told_what_is_needed(script: str) -> None:
    """Below 3.11 one readable line, no traceback."""
    pretend = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_path(sys.argv[1], run_name='__main__')"
    command: list[str | Path] = [sys.executable, "-c", pretend, ROOT / "scripts" / script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("This needs Python 3.11 or newer")
    assert done.stderr.count("\n") == 1


HOLD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tooling import steps
with steps.exclusive(Path(sys.argv[2]), "the thing"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_never_prepare_the_same_thing_at_once(tmp_path: Path) -> None:
    """The second waits, says so, and goes on when the first is done or dead."""
    command: list[str | Path] = [sys.executable, "-c", HOLD, str(ROOT / "scripts"), str(tmp_path / "guard")]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            for _ in range(2)
        ]
        ready, _, _ = select.select([run.stdout for run in runs if run.stdout], [], [], 60)
        winner, loser = runs if runs[0].stdout in ready else reversed(runs)
        assert winner.stdin and winner.stdout and loser.stdin and loser.stdout and loser.stderr
        assert winner.stdout.readline() == "held\n"
        assert "another run is preparing it" in loser.stderr.readline()
        winner.send_signal(signal.SIGKILL)
        assert loser.stdout.readline() == "held\n"
        loser.stdin.close()
        assert loser.wait(60) == 0


def test_a_failed_step_shows_the_end_of_what_it_printed() -> None:
    """The last lines and the exit code, not a traceback."""
    with pytest.raises(SetupError) as caught:
        steps.run([sys.executable, "-c", "print(chr(10).join(map(str, range(100)))); raise SystemExit(7)"])
    assert "99" in str(caught.value) and "exit code 7" in str(caught.value)
    assert "79\n" not in str(caught.value)


# ------------------------------------------------------------------ the suite's own rules


def suite(tmp_path: Path, source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one test file under the suite's conftest."""
    test = tmp_path / "test_inner.py"
    test.write_text(source)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SUITE_", "CODING_", "PYTEST_"))}
    options: list[str | Path] = ["-c", ROOT / "pyproject.toml", "-p", "conftest", "-p", "no:cacheprovider"]
    command: list[str | Path] = [sys.executable, "-m", "pytest", *options, test, *arguments]
    env = {**inherited, "PYTHONPATH": f"{ROOT / 'certification-tests'}{os.pathsep}{ROOT / 'scripts'}", **environment}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_a_test_that_leaves_a_process_behind_fails(tmp_path: Path) -> None:
    """The suite names the process; nothing else of the run is touched."""
    source = """
import subprocess
def test_leaves_one_behind():
    process = subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("pid", process.pid)
    process.returncode = 0
"""
    done = suite(tmp_path, source, "-s")
    pid = int(re.search(r"pid (\d+)", done.stdout)[1])  # type: ignore[index]
    os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1
    assert f"processes left behind: {pid}: sleep 30" in done.stdout


NEEDY = """
import pytest
@pytest.mark.real_agents
def test_with_agents():
    raise AssertionError("ran without what it needs")
"""


def test_a_need_that_cannot_be_met_is_a_visible_skip(tmp_path: Path) -> None:
    """On a laptop the reason stands in the summary."""
    done = suite(tmp_path, NEEDY, PATH="/nowhere")
    assert done.returncode == 0
    assert "SKIPPED" in done.stdout and "real_agents: " in done.stdout


def test_in_ci_a_need_that_cannot_be_met_is_a_failure(tmp_path: Path) -> None:
    """Nothing that was selected is left out silently."""
    done = suite(tmp_path, NEEDY, PATH="/nowhere", SUITE_REQUIRE_ALL="1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "1 tests marked real_agents cannot run" in done.stderr


def test_in_ci_no_test_skips_itself(tmp_path: Path) -> None:
    """A skip inside a test is a failure there too, and keeps its reason."""
    source = "import pytest\ndef test_it():\n    pytest.skip('the moon is not full')\n"
    assert suite(tmp_path, source).returncode == 0
    strict = suite(tmp_path, source, SUITE_REQUIRE_ALL="1")
    assert strict.returncode == 1
    assert "the moon is not full" in strict.stdout


def test_deselected_tests_need_nothing(tmp_path: Path) -> None:
    """Only what is really selected is prepared."""
    done = suite(tmp_path, NEEDY, "-m", "not real_agents", PATH="/nowhere", SUITE_REQUIRE_ALL="1")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_source_root_decides_which_package_is_under_test(tmp_path: Path) -> None:
    """With CODING_RUNNER_SOURCE_ROOT the suites import the extracted artifact, not the working copy."""
    core = tmp_path / "extracted" / "ACPAgentRunner" / "pkg"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("WHICH = 'extracted'\n")
    (core / "agent_api.py").write_text("")
    source = """
import pkg
def test_imports(package_root):
    assert pkg.WHICH == "extracted"
    assert pkg.__file__.startswith(str(package_root))
"""
    done = suite(tmp_path, source, CODING_RUNNER_SOURCE_ROOT=str(tmp_path / "extracted"))
    assert done.returncode == 0, done.stdout
    wrong = suite(tmp_path, source, CODING_RUNNER_SOURCE_ROOT=str(tmp_path / "nothing"))
    assert wrong.returncode != 0 and "holds no extracted package" in wrong.stderr


def siblings_suite(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a test file of the core and two files of a sibling in one run."""
    theirs = tmp_path / "claude_code"
    theirs.mkdir(exist_ok=True)
    (theirs / "test_theirs.py").write_text(
        """
import os
import sys
import pkg
import pytest

@pytest.fixture(scope="module")
def made():
    made = []
    yield made
    print("torn down after", len(made), file=sys.__stderr__)

@pytest.mark.parametrize("number", [1, 2])
def test_imports_its_own(package_root, made, number):
    made.append(number)
    assert len(made) == number
    assert package_root.name == "ClaudeCodeAgent"
    assert pkg.__file__.startswith(str(package_root))

def test_fails():
    print("a line it printed")
    raise AssertionError("visible from outside")

@pytest.mark.xfail
def test_fails_as_known():
    raise AssertionError

def test_skips():
    pytest.skip("the moon is not full")

def test_ends_its_process():
    os._exit(7)

def test_runs_afterwards():
    pass

@pytest.mark.real_agents
def test_needs_agents():
    raise AssertionError("ran without what it needs")
"""
    )
    (theirs / "test_broken.py").write_text("import no_such_module\n")
    source = "import pkg\ndef test_ours():\n    assert 'ACPAgentRunner' in pkg.__file__\n"
    return suite(tmp_path, source, "-v", f"--rootdir={tmp_path}", *arguments, PYTEST_ADDOPTS="-p conftest", **environment)


def test_a_siblings_tests_run_in_its_own_process(tmp_path: Path) -> None:
    """One run tests several packages, and every inner test has an outcome of its own, whatever its process does."""
    done = siblings_suite(tmp_path, "claude_code/test_theirs.py", PATH="/nowhere")
    found = dict(re.findall(r"::(test_\w+(?:\[\d\])?) (PASSED|FAILED|SKIPPED|XFAIL)", done.stdout))
    found.pop("test_ours", None)  # where what was selected needs something, pytest shows the first test without its name
    assert found == {
        "test_imports_its_own[1]": "PASSED",
        "test_imports_its_own[2]": "PASSED",
        "test_fails": "FAILED",
        "test_fails_as_known": "XFAIL",
        "test_skips": "SKIPPED",
        "test_ends_its_process": "FAILED",
        "test_runs_afterwards": "PASSED",
        "test_needs_agents": "SKIPPED",
    }, done.stdout + done.stderr
    assert done.returncode == 1
    assert "2 failed, 4 passed, 2 skipped, 1 xfailed" in done.stdout
    assert "visible from outside" in done.stdout and "a line it printed" in done.stdout
    assert "the process of ClaudeCodeAgent's tests ended with exit code 7" in done.stdout
    assert "the moon is not full" in done.stdout and "real_agents: " in done.stdout


def test_a_siblings_tests_are_selected_like_any_other(tmp_path: Path) -> None:
    """Node ids, ``-k`` and ``-m`` reach into the other process; where nothing is left to run, nothing runs."""
    one = siblings_suite(tmp_path, "claude_code/test_theirs.py::test_imports_its_own[1]", "-k", "not ours")
    assert one.returncode == 0 and "1 passed" in one.stdout, one.stdout
    both = siblings_suite(tmp_path, "claude_code/test_theirs.py", "-k", "imports_its_own")
    assert both.returncode == 0 and "2 passed" in both.stdout, both.stdout
    none = siblings_suite(tmp_path, "claude_code/test_theirs.py", "-m", "ssh")
    assert none.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_siblings_file_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    """The outer run says what the inner one could not import."""
    done = siblings_suite(tmp_path, "claude_code/test_broken.py")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "no_such_module" in done.stdout
    absent = siblings_suite(tmp_path, "claude_code/test_theirs.py", CODING_RUNNER_SOURCE_ROOT=str(ROOT / "ACPAgentRunner"))
    assert absent.returncode == pytest.ExitCode.INTERRUPTED
    assert "holds no extracted package ClaudeCodeAgent" in absent.stdout


def test_workers_run_the_package_under_test(tmp_path: Path) -> None:
    """With CODING_RUNNER_SOURCE_ROOT a real worker gets the extracted artifact, too; a missing one is said."""
    extracted = tmp_path / "extracted" / "ACPAgentRunner"
    packages.export(packages.SOURCE, extracted)
    with (extracted / "main.py").open("a") as main:
        main.write("# extracted\n")
    source = """
import zipfile
import pytest
from testkit.sdk_worker import built
from tooling import SetupError
def test_builds():
    with zipfile.ZipFile(built()) as package:
        assert package.read("main.py").endswith(b"# extracted\\n")
    with pytest.raises(SetupError, match="holds no CodexAgent"):
        built("CodexAgent")
"""
    done = suite(tmp_path, source, CODING_RUNNER_SOURCE_ROOT=str(tmp_path / "extracted"))
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------ building


BUILD = """
import sys
from pathlib import Path
from tooling import packages
for name in sys.argv[2:]:
    print(packages.build(name, Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with everything that is committed here."""
    target = tmp_path_factory.mktemp("clone") / "repository"
    target.mkdir()
    trusted = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]  # whoever the working copy belongs to
    archive = subprocess.run([*trusted, "archive", "HEAD"], capture_output=True, check=True, timeout=120).stdout
    subprocess.run(["tar", "-x", "-C", target], input=archive, check=True, timeout=120)
    for step in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(target), *step], check=True, timeout=120)
    return target


def build(clone: Path, output: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Build packages of the clone with its own scripts."""
    command: list[str | Path] = [sys.executable, "-c", BUILD, output, *names]
    env = {**os.environ, "PYTHONPATH": str(clone / "scripts")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)


def members(package: str) -> dict[str, bytes]:
    """What a package holds."""
    with zipfile.ZipFile(package) as archive:
        return {item.filename.removeprefix("./"): archive.read(item) for item in archive.infolist() if not item.is_dir()}


def test_a_copy_that_is_no_clone_is_told_to_be_one(tmp_path: Path) -> None:
    """An unpacked archive knows nothing of what git tracks; the person reads what to get instead."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "scripts"), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = [sys.executable, "-c", BUILD, str(tmp_path / "dist"), packages.SOURCE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "use a git clone instead of this copy" in done.stderr


def test_a_file_that_vanishes_while_it_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: a package is the working copy at one moment; somebody who tidies up meanwhile breaks no build."""
    here = {"main.py": ROOT / packages.SOURCE / "main.py", "gone.py": tmp_path / "gone.py"}
    monkeypatch.setattr(packages, "sources", lambda name: here)
    assert packages.export(packages.SOURCE, tmp_path / "out") == {"main.py"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["main.py"]


def test_every_package_builds_and_holds_exactly_its_committed_files(clone: Path, tmp_path: Path) -> None:
    """The official builder's package has every tracked file and nothing else; the manifest alone is written anew by it."""
    built = build(clone, tmp_path, *packages.NAMES).stdout.split()
    assert [Path(path).name.split("-")[2] for path in built] == list(packages.NAMES)
    for name, path in zip(packages.NAMES, built, strict=True):
        held = members(path)
        tracked = subprocess.run(
            ["git", "-C", clone, "ls-files", name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        own = {line.removeprefix(f"{name}/") for line in tracked.split()}
        assert own - held.keys() <= {".gitignore"}
        for member in own & held.keys() - {"manifest.yaml"}:
            if member.split("/")[0] not in packages.SHARED:
                assert held[member] == (clone / name / member).read_bytes()


def test_a_package_never_holds_what_git_does_not_know(clone: Path, tmp_path: Path) -> None:
    """A forgotten file stays out and is named, so that a needed one is noticed."""
    stray = clone / "CodexAgent" / "agent" / "forgotten.py"
    stray.write_text("SECRET = 'canary'\n")
    try:
        done = build(clone, tmp_path, "CodexAgent")
    finally:
        stray.unlink()
    assert "agent/forgotten.py" not in members(done.stdout.strip())
    assert "CodexAgent/agent/forgotten.py" in done.stderr


def test_the_shared_core_of_a_package_is_the_edited_one(clone: Path, tmp_path: Path) -> None:
    """A sibling is built with the core as it is in ACPAgentRunner, even when the copies have not been made yet."""
    source = clone / "ACPAgentRunner" / "pkg" / "texts.py"
    before = source.read_bytes()
    source.write_bytes(before + b"# edited\n")
    try:
        held = members(build(clone, tmp_path, "CodexAgent").stdout.strip())
    finally:
        source.write_bytes(before)
    assert held["pkg/texts.py"] == before + b"# edited\n"


def test_an_unfinished_download_of_the_agents_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory gets its name only when it is complete; a failing npm leaves nothing under it."""
    monkeypatch.setattr(agents, "WORK", tmp_path / "vendor")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "node").write_text("#!/bin/sh\necho v20.0.0\n")
    (tools / "npm").write_text("#!/bin/sh\nmkdir -p node_modules; echo broken; exit 1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
    with pytest.raises(SetupError, match="broken"):
        agents.ACP.ensure()
    assert not agents.ACP.directory().exists()
    (tools / "node").write_text("#!/bin/sh\necho v18.1.0\n")
    assert "Node.js is v18.1.0" in agents.missing()
    shutil.rmtree(tools)
    monkeypatch.setenv("PATH", str(tools))
    assert "not installed" in agents.missing()
