"""Whether jails are possible, where their environment lies, and that a run without jailed tests never passes for one with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_scripts import suite

from tooling import ROOT, SetupError, jail

ONE = """
import pytest
@pytest.mark.nsjail
def test_jailed():
    assert {outcome}
"""
SEEMINGLY = """
from tooling import jail
jail.impossible = str
jail.is_ready = lambda: True
"""
"""A test file for which any machine can jail; nothing is jailed in it."""
POSSIBLE = jail.impossible() == ""


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, by the system's Python where there is one and with nothing of this process's own set-up."""
    python = str(jail.SYSTEM_PYTHON) if POSSIBLE else sys.executable
    program = str(ROOT / "scripts" / "tooling" / "jail.py")
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(Path.home()), **environment}
    return subprocess.run(
        [python, program, *arguments], cwd="/", env=env, capture_output=True, text=True, timeout=60, check=False
    )


def refusing(directory: Path) -> str:
    """A PATH whose unshare is refused, as by a kernel without user namespaces."""
    program = directory / "unshare"
    program.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


class TestPossible:
    """``scripts/tooling/jail.py --possible``."""

    def test_it_says_by_its_exit_code_whether_jails_are_possible_here(self) -> None:
        """Our rule: from a bare checkout, by any Python, in any directory; silent where they are."""
        done = command("--possible")
        assert (done.returncode, done.stdout) == (0 if POSSIBLE else 1, "")
        assert (done.stderr == "") == POSSIBLE

    @pytest.mark.skipif(sys.platform != "linux", reason="another reason comes first")
    def test_it_says_why_they_are_not(self, tmp_path: Path) -> None:
        """Our rule: namespaces are really tried, and the kernel's own words are the reason."""
        done = command("--possible", PATH=refusing(tmp_path))
        assert done.returncode == 1
        assert "jailed workers are not possible here: " in done.stderr
        if POSSIBLE:
            assert "user namespaces cannot be used: unshare: unshare failed: Operation not permitted" in done.stderr

    def test_anything_else_is_a_mistake(self) -> None:
        """Our rule: the usage and another exit code."""
        done = command()
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")

    @pytest.mark.parametrize(
        ("found", "reason"),
        [
            ("/opt/python/bin/python3", "does not show"),
            ("/usr/bin/absent-python", "not found"),
            ("/usr/bin/env", "does not run"),
        ],
    )
    def test_a_python_that_no_jail_could_run_is_a_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, reason: str
    ) -> None:
        """Our rule: the system's Python must really run, be new enough and lie below what a jail shows."""
        if found.startswith("/opt"):
            (tmp_path / "python3").symlink_to(sys.executable)
            monkeypatch.setattr(jail, "SYSTEM", (Path("/nowhere"),))
            found = str(tmp_path / "python3")
        monkeypatch.setattr(jail, "SYSTEM_PYTHON", Path(found))
        with pytest.raises(SetupError, match=reason):
            jail.base()


class TestPlace:
    """Where the environment of jailed workers lies."""

    def test_it_is_in_the_shared_cache_unless_a_jail_would_hide_that(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: below /home and /tmp nothing could be seen; /var/tmp is the other place, for one account alone."""
        monkeypatch.setattr(jail, "HIDDEN", (tmp_path / "home",))
        monkeypatch.setattr(jail, "LASTING", tmp_path / "lasting")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert jail._shelf() == tmp_path / "cache" / "langbot-coding-runners"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "ann" / ".cache"))
        other = jail._shelf()
        assert other == tmp_path / "lasting" / f"langbot-coding-runners-{os.geteuid()}"
        assert other.stat().st_mode & 0o777 == 0o700
        assert not (tmp_path / "home").exists()

    def test_a_place_that_others_can_write_to_is_refused_readably(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Our rule: in /var/tmp anybody may have been first with the name."""
        monkeypatch.setattr(jail, "HIDDEN", (tmp_path / "home",))
        monkeypatch.setattr(jail, "LASTING", tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        open_to_all = tmp_path / f"langbot-coding-runners-{os.geteuid()}"
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        with pytest.raises(SetupError, match="XDG_CACHE_HOME"):
            jail._shelf()

    def test_a_link_into_a_hidden_directory_is_seen_through(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our rule: the real path counts, which is what a jail mounts."""
        (tmp_path / "home").mkdir()
        (tmp_path / "cache").symlink_to(tmp_path / "home")
        monkeypatch.setattr(jail, "HIDDEN", (tmp_path / "home",))
        monkeypatch.setattr(jail, "LASTING", tmp_path / "lasting")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert jail._shelf().parent == tmp_path / "lasting"


class TestTheirNumber:
    """What a run says of its jailed tests, and when their number fails it."""

    def test_where_jails_are_impossible_the_last_lines_say_why_none_ran(self, tmp_path: Path) -> None:
        """Our rule: a skip that nobody can overlook, also where nothing else may be skipped."""
        done = suite(tmp_path, ONE.format(outcome=True), PATH=refusing(tmp_path), SUITE_REQUIRE_ALL="1", REQUIRE_NSJAIL="")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line for line in done.stdout.splitlines()[-6:] if line.startswith("jailed tests: 0 of 1 ran: ")]

    def test_where_they_are_required_and_impossible_the_run_fails(self, tmp_path: Path) -> None:
        """Our rule: ``REQUIRE_NSJAIL`` turns the skip into a failure with the reason."""
        done = suite(tmp_path, ONE.format(outcome=True), PATH=refusing(tmp_path), REQUIRE_NSJAIL="1")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "1 tests marked nsjail cannot run: " in done.stderr

    @pytest.mark.parametrize("outcome", [True, False])
    def test_fewer_than_the_recorded_number_fail_a_run_that_requires_them(self, tmp_path: Path, outcome: bool) -> None:
        """Our rule: green tests are not enough, there must be as many as were recorded; without the requirement they are."""
        done = suite(tmp_path, SEEMINGLY + ONE.format(outcome=outcome), REQUIRE_NSJAIL="1")
        assert done.returncode == 1
        assert "jailed tests: 1 ran" in done.stdout
        assert "REQUIRE_NSJAIL: 1 jailed tests ran, at least " in done.stdout
        if outcome:
            assert suite(tmp_path, SEEMINGLY + ONE.format(outcome=True), REQUIRE_NSJAIL="").returncode == 0

    def test_a_jailed_test_that_skips_itself_has_not_run(self, tmp_path: Path) -> None:
        """Our rule: only what was really run counts; where nothing may be skipped it is a failure like any other."""
        source = SEEMINGLY + ONE.format(outcome="pytest.skip('not today')")
        done = suite(tmp_path, source, REQUIRE_NSJAIL="1")
        assert done.returncode == 1
        assert "jailed tests: 0 ran" in done.stdout
        strict = suite(tmp_path, source, SUITE_REQUIRE_ALL="1", REQUIRE_NSJAIL="")
        assert strict.returncode == 1
        assert "not today" in strict.stdout

    def test_a_run_that_selects_none_says_and_requires_nothing(self, tmp_path: Path) -> None:
        """Our rule: the requirement concerns runs that have jailed tests."""
        done = suite(tmp_path, "def test_it():\n    pass\n", REQUIRE_NSJAIL="1")
        assert done.returncode == 0
        assert "jailed tests" not in done.stdout

    def test_a_run_that_wants_them_by_their_mark_and_finds_none_fails(self, tmp_path: Path) -> None:
        """Our rule: tests that lost their mark, or whose file is gone, are missed."""
        source = "import pytest\n@pytest.mark.static\ndef test_it():\n    pass\n"
        done = suite(tmp_path, source, "-m", "nsjail or static", REQUIRE_NSJAIL="1")
        assert done.returncode == 1
        assert "REQUIRE_NSJAIL: 0 jailed tests ran" in done.stdout
        for others in ("static and not (nsjail or evidence)", "not nsjail", "not evidence"):
            assert suite(tmp_path, source, "-m", others, REQUIRE_NSJAIL="1").returncode == 0
