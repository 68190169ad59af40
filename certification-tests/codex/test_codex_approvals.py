"""The real Codex asks in the chat and waits between two runs in a real worker; the model is a local protocol fixture."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit.responses_fixture import KEY, ResponsesFixture, codex_home, responses_fixture
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.real_codex, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

NAME = "CodexAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
REASON = "not-on-a-friday"
SHORTEST = 30
"""Seconds of the shortest ``approval-timeout`` that the form takes."""


class Desk:
    """A worker, the real Codex beside it, and its model."""

    def __init__(self, worker: SdkWorker, model: ResponsesFixture, form: dict[str, Any], workspace: Path) -> None:
        """Made by the fixture."""
        self.worker, self.model, self.form, self.workspace = worker, model, form, workspace
        self._runs = 0

    async def run(self, text: str, **fields: Any) -> Outcome:
        """One run to its end."""
        self._runs += 1
        form = {**self.form, **{name.replace("_", "-"): value for name, value in fields.items()}}
        async with asyncio.timeout(BOUND):
            return await self.worker.run(text, run_id=f"r{self._runs}", config=form)

    def servers(self) -> set[int]:
        """The processes that are the app-server itself."""
        found = set()
        for pid in descendants(self.worker.pid()):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if line[0].endswith(b"codex") and b"app-server" in line:
                found.add(pid)
        return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A place outside of temporary directories, which Codex leaves writable."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="codex-asks-")).resolve()
    (made / "workspace").mkdir()
    yield made
    shutil.rmtree(made)


@pytest_asyncio.fixture
async def desk(place: Path, tmp_path: Path, codex_program: Path) -> AsyncIterator[Desk]:
    """The program beside the worker, writing below its workspace only."""
    secrets = {"A": {"agent-secret-values": json.dumps({"KEY": KEY})}}
    async with (
        responses_fixture() as model,
        sdk_worker(built(NAME), tmp_path / "runtime", name=NAME, installations=secrets) as worker,
    ):
        env = {**codex_home(place / "home", model.url), "FIXTURE_API_KEY": "${secret:KEY}"}
        form = {"command": str(codex_program), "workspace": str(place / "workspace"), "env-json": json.dumps(env)}
        more = {"sandbox-mode": "workspace-write", "langbot-assets-enabled": False}
        yield Desk(worker, model, {**form, **more}, place / "workspace")
        left = descendants(worker.pid())
        await worker.revoke()
        assert await gone(left, 30.0)


@pytest.mark.parametrize("what", ["command", "patch"])
async def test_an_action_waits_for_its_answer_in_the_same_process(what: str, desk: Desk) -> None:
    """Allowed it has its effect, once; denied it has none, and the reason is what the model reads next."""
    made = [desk.workspace / name for name in ("one.txt", "two.txt")]
    for path, answer in zip(made, ("1", f"deny because {REASON}"), strict=True):
        step = f"run touch {path.name}" if what == "command" else f"add {path.name} | new"
        first = await desk.run(f"[[ {step} ;; say finished ]]")
        assert first.reason == "stop"
        assert path.name in first.text
        assert "4. " in first.text
        assert not path.exists()
        (server,) = desk.servers()
        calls = len(desk.model.bodies)
        done = await desk.run(answer)
        assert done.reason == "stop"
        assert desk.servers() == {server}
        assert path.exists() == (answer == "1")
        assert len(desk.model.bodies) > calls
        last = json.dumps(desk.model.bodies[-1]["input"])
        assert (REASON in last) == (answer != "1")
        if answer == "1":
            assert done.text.endswith("finished")
            assert len(desk.model.bodies) == calls + 1, "the same turn went on"


async def test_what_nobody_answers_is_cancelled_and_the_next_message_works(desk: Desk) -> None:
    """On the deadline, with nothing done and no process left where none is kept."""
    fields = {"approval_timeout": SHORTEST, "keep_warm": 0}
    await desk.run("[[ run touch never.txt ;; say finished ]]", **fields)
    calls = len(desk.model.bodies)
    assert await gone(descendants(desk.worker.pid()), 60.0)
    done = await desk.run("[[ say going on ]]", **fields)
    assert "Nobody answered in time" in done.shown[0]
    assert "going on" in done.text
    assert not (desk.workspace / "never.txt").exists()
    assert len(desk.model.bodies) == calls + 1
    assert descendants(desk.worker.pid()) == {}
