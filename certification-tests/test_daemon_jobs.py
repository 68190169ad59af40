"""The daemon's durable job table: what it keeps, and how it proves that nothing of an earlier process is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pkg import daemon_jobs, limits
from pkg.daemon_jobs import DurableJobTable, JobLauncher, TableBusy
from pkg.launch import LocalLauncher
from pkg.process_api import Command
from pkg.supervised_process import JOB_MARKER
from testkit import hostile_trees

SLEEPER = ("-I", "-S", "-c", "import sys, time\nprint(1, flush=True)\ntime.sleep(600)")


@contextlib.asynccontextmanager
async def sleeper(marker: str = "") -> AsyncIterator[tuple[int, str]]:
    """A process of nobody's job unless it carries ``marker``: pid and start time. Ended afterwards if it still lives."""
    environment = {JOB_MARKER: marker} if marker else {}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *SLEEPER, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield process.pid, hostile_trees.start_time(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def edited(directory: Path, job_id: str, **fields: Any) -> None:
    """Change one entry of a closed table, as another boot or another machine would have written it."""
    file = directory / "jobs.json"
    value = json.loads(file.read_text())
    value["jobs"][job_id].update(fields)
    file.write_text(json.dumps(value))


class TestFile:
    """What is kept."""

    def test_entries_outlive_their_process_and_go_when_forgotten(self, tmp_path: Path) -> None:
        """The id of the table stays, a started job stays until the hub has taken note."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        table.started("two")
        table.quiesced("two")
        name = table.table
        table.close()
        again = DurableJobTable(tmp_path / "t")
        assert again.table == name and again.marker("one") != again.marker("two")
        again.forgotten("one")
        again.forgotten("two")
        again.close()
        assert json.loads((tmp_path / "t" / "jobs.json").read_text())["jobs"] == {}

    def test_a_marker_is_of_one_table_and_one_job(self, tmp_path: Path) -> None:
        """Two hubs' jobs of one name are two jobs: ending what one left touches nothing of the other's."""
        tables = [DurableJobTable(tmp_path / name) for name in ("one hub", "another")]
        for table in tables:
            table.started("one")
            table.started("two")
        assert len({table.marker(job) for table in tables for job in ("one", "two")}) == 4
        for table in tables:
            table.close()

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        """A second one is refused while the first lives, and not afterwards."""
        table = DurableJobTable(tmp_path / "t")
        with pytest.raises(TableBusy):
            DurableJobTable(tmp_path / "t")
        table.close()
        DurableJobTable(tmp_path / "t").close()

    def test_files_are_the_account_s_own(self, tmp_path: Path) -> None:
        """0600 in 0700, under any umask."""
        before = os.umask(0)
        try:
            table = DurableJobTable(tmp_path / "t")
            table.started("one")
            table.close()
        finally:
            os.umask(before)
        assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700
        assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "t").iterdir()} == {
            "jobs.json": 0o600,
            "lock": 0o600,
        }

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2}', '{"version": 1, "table": "x", "jobs": {"a": {}}}'])
    def test_a_table_that_cannot_be_read_gets_a_new_id(self, tmp_path: Path, content: str, caplog: Any) -> None:
        """By the id the hub knows that entries may be missing; the broken file is kept for its owner."""
        table = DurableJobTable(tmp_path / "t")
        name = table.table
        table.close()
        (tmp_path / "t" / "jobs.json").write_text(content)
        with caplog.at_level(logging.ERROR):
            again = DurableJobTable(tmp_path / "t")
        again.close()
        assert again.table and again.table != name
        assert (tmp_path / "t" / "jobs.broken").read_text() == content
        assert "begun anew" in caplog.text

    def test_a_job_that_cannot_be_noted_is_not_listed(self, tmp_path: Path) -> None:
        """Where the entry can't be written, ``started`` raises and the job is refused."""
        table = DurableJobTable(tmp_path / "t")
        (tmp_path / "t").rename(tmp_path / "moved")
        with pytest.raises(OSError, match=r".+"):
            table.started("one")
        with pytest.raises(KeyError):
            table.marker("one")
        table.close()

    def test_a_job_s_processes_are_bounded(self, tmp_path: Path) -> None:
        """Of very many the newest are remembered; the marker finds the others."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        table._jobs["one"].processes = {-number: "1" for number in range(1, limits.DAEMON_JOB_PROCESSES + 1)}
        table.process("one", os.getpid())
        kept = json.loads((tmp_path / "t" / "jobs.json").read_text())["jobs"]["one"]["processes"]
        assert len(kept) == limits.DAEMON_JOB_PROCESSES and kept[-1][0] == os.getpid()
        table.close()


class TestProof:
    """What an earlier process left."""

    @pytest.mark.asyncio
    async def test_marked_processes_are_ended_and_others_are_not(self, tmp_path: Path) -> None:
        """Of a job and its neighbour only the job's own processes end, recorded or not."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        table.started("two")
        table.quiesced("two")
        async with (
            sleeper(table.marker("one")) as recorded,
            sleeper(table.marker("one")) as unrecorded,
            sleeper(table.marker("two")) as neighbour,
            sleeper() as stranger,
        ):
            table.process("one", recorded[0])
            table.close()
            again = DurableJobTable(tmp_path / "t")
            left = await again.recover()
            assert sorted(left.quiesced) == ["one", "two"] and left.unproven == ()
            assert left.ended == ("one",), "the end of the other was seen before"
            assert hostile_trees.living(dict((recorded, unrecorded))) == []
            assert len(hostile_trees.living(dict((neighbour, stranger)))) == 2
            again.close()

    @pytest.mark.asyncio
    async def test_a_stubborn_child_is_ended_too(self, tmp_path: Path) -> None:
        """What ignores SIGTERM in a session of its own carries the marker of its parent."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        (tmp_path / "tree").mkdir()
        argv = hostile_trees.command("setsid", tmp_path / "tree")
        process = await asyncio.create_subprocess_exec(*argv, env={JOB_MARKER: table.marker("one")}, start_new_session=True)
        try:
            pids = await asyncio.to_thread(hostile_trees.complete, tmp_path / "tree", hostile_trees.KINDS["setsid"])
            assert await table.prove("one")
            assert hostile_trees.living(pids) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            table.close()

    @pytest.mark.asyncio
    async def test_a_recorded_pid_without_the_marker_is_left_alone_and_the_job_is_not_proven(self, tmp_path: Path) -> None:
        """Pid and start time agree but the marker does not: it is no proof and no reason to kill; once it is gone, it is."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        async with sleeper() as stranger:
            table.process("one", stranger[0])
            left = await table.recover()
            assert left.unproven == ("one",) and left.quiesced == ()
            assert hostile_trees.living(dict((stranger,))) == [stranger[0]]
        assert await table.prove("one")
        table.close()

    @pytest.mark.asyncio
    async def test_a_pid_that_somebody_else_has_now_is_left_alone(self, tmp_path: Path) -> None:
        """With another start time it is another process; the job is proven without it."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        async with sleeper() as stranger:
            table._jobs["one"].processes = {stranger[0]: "1"}
            assert await table.prove("one")
            assert hostile_trees.living(dict((stranger,))) == [stranger[0]]
        table.close()

    @pytest.mark.asyncio
    async def test_after_a_restart_of_the_machine_nothing_is_looked_for(self, tmp_path: Path) -> None:
        """Another boot id proves the end by itself: even a process that looks like the job's is somebody else's."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        async with sleeper(table.marker("one")) as same:
            table.process("one", same[0])
            table.close()
            edited(tmp_path / "t", "one", boot="another-boot")
            again = DurableJobTable(tmp_path / "t")
            assert (await again.recover()).quiesced == ("one",)
            assert hostile_trees.living(dict((same,))) == [same[0]]
            again.close()

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.asyncio
    async def test_another_namespace_is_proven_only_where_its_first_process_is_gone(self, tmp_path: Path, first: bool) -> None:
        """A daemon that was a container's first process took everything with it; else nobody can look there."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        table.close()
        edited(tmp_path / "t", "one", namespace="pid:[1]", first=first)
        again = DurableJobTable(tmp_path / "t")
        left = await again.recover()
        assert (left.quiesced, left.unproven) == ((("one",), ()) if first else ((), ("one",)))
        again.close()


class TestLauncher:
    """Processes of a job."""

    @pytest.mark.asyncio
    async def test_agent_and_supervisor_carry_the_marker_and_the_pid_is_noted(self, tmp_path: Path) -> None:
        """Nothing of a job runs without it, so nothing escapes between the entry and the process."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        launcher = JobLauncher(LocalLauncher(), table, "one")
        process = await launcher.start(Command((sys.executable, *SLEEPER), str(tmp_path)))
        try:
            carrying = hostile_trees.carrying(table.marker("one"))
            assert process.pid in carrying and len(carrying) == 2
            kept = json.loads((tmp_path / "t" / "jobs.json").read_text())["jobs"]["one"]
            assert kept["processes"] == [[process.pid, hostile_trees.start_time(process.pid)]]
            assert kept["boot"] == daemon_jobs.boot_id() and kept["namespace"] == daemon_jobs.namespace()
        finally:
            await process.stop()
        table.close()

    @pytest.mark.asyncio
    async def test_a_full_disk_costs_the_note_and_not_the_process(self, tmp_path: Path) -> None:
        """The marker stands on the disk already; the agent runs and ends as ever."""
        table = DurableJobTable(tmp_path / "t")
        table.started("one")
        (tmp_path / "t").rename(tmp_path / "moved")
        process = await JobLauncher(LocalLauncher(), table, "one").start(Command((sys.executable, *SLEEPER), str(tmp_path)))
        await process.stop()
        table.close()
