"""LangBot's tools in a real worker of the SDK's runtime, dedicated and shared by installations, called over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from testkit import tools_probe_runner
from testkit.langbot_host import build_package
from testkit.sdk_worker import SdkWorker, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio]


@pytest.fixture(scope="module")
def package(package_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package under test with the probe in the place of its runner."""
    scratch = tmp_path_factory.mktemp("probe")
    source = scratch / "ACPAgentRunner"
    shutil.copytree(package_root, source, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "dist"))
    shutil.copy(tools_probe_runner.__file__, source / "components" / "runner" / "default.py")
    (scratch / "built").mkdir()
    return build_package(source, scratch / "built")


@pytest_asyncio.fixture(params=["dedicated", "pool"])
async def worker(request: pytest.FixtureRequest, package: Path, tmp_path: Path) -> AsyncIterator[SdkWorker]:
    """A worker (or one shared worker) with two installations."""
    async with sdk_worker(package, tmp_path / "runtime", request.param, installations={"A": {}, "B": {}}) as started:
        yield started


class Handed:
    """A run that has handed its server over."""

    def __init__(self, worker: SdkWorker, place: Path, uid: str) -> None:
        self.place, self.uid = place, uid
        self.run = worker.start(uid=uid, run_id="same-run", config={"hand-over": str(place)})
        self.server: dict[str, Any] = {}

    async def taken(self) -> Handed:
        """Wait until the server is known."""
        async with asyncio.timeout(60):
            while not self.place.exists():  # noqa: ASYNC110 - the worker is another process
                await asyncio.sleep(0.02)
        self.server = json.loads(self.place.read_text())
        self.place.unlink()
        return self

    async def end(self) -> None:
        """Let the run end and wait for it."""
        self.place.with_name(self.place.name + "-end").touch()
        outcome = await asyncio.wait_for(self.run, 60)
        assert [result.type for result in outcome.results] == ["run.completed"]

    async def call(self, http: aiohttp.ClientSession, who: str) -> tuple[int, Any]:
        """Call the tool ``echo`` through LangBot."""
        arguments = {"tool_name": "echo", "parameters": {"who": who}}
        params = {"name": "langbot_call_tool", "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        async with http.post(self.server["url"], json=body, headers=self.server["headers"]) as answer:
            return answer.status, await answer.json()


async def test_each_installations_calls_reach_its_own_host_actions(worker: SdkWorker, tmp_path: Path) -> None:
    """The SDK's own bridge fails in a shared worker; here two runs with one id, side by side, each speak for their own."""
    runs = [await Handed(worker, tmp_path / f"server-{uid}", uid).taken() for uid in ("A", "B")]
    shared = worker.pid("A") == worker.pid("B")
    assert shared == (worker.shape == "pool")
    assert (runs[0].server["url"].split("/")[2] == runs[1].server["url"].split("/")[2]) == shared
    async with aiohttp.ClientSession(trust_env=False) as http:
        answers = await asyncio.gather(*(run.call(http, run.uid) for _ in range(5) for run in runs))
        assert {(status, answer["result"]["structuredContent"]["echo"]["who"]) for status, answer in answers} == {
            (200, "A"),
            (200, "B"),
        }
        for uid in ("A", "B"):
            assert [data["parameters"]["who"] for action, data in worker.host(uid).calls if action == "call_tool"] == [uid] * 5
        await runs[0].end()
        assert (await runs[1].call(http, "B"))[0] == 200
        if shared:
            assert (await runs[0].call(http, "A"))[0] == 401
        else:
            with pytest.raises(aiohttp.ClientConnectionError):
                await runs[0].call(http, "A")
        await runs[1].end()
        with pytest.raises(aiohttp.ClientConnectionError):
            await runs[1].call(http, "B")
    for uid in ("A", "B"):
        assert all(data["parameters"]["who"] == uid for action, data in worker.host(uid).calls if action == "call_tool")


async def test_revoking_one_installation_leaves_the_others_tools_alone(worker: SdkWorker, tmp_path: Path) -> None:
    """A revoked installation's calls reach nobody; its neighbour in the same process goes on."""
    first, second = [await Handed(worker, tmp_path / f"server-{uid}", uid).taken() for uid in ("A", "B")]
    await worker.revoke("A")
    async with aiohttp.ClientSession(trust_env=False) as http:
        assert (await second.call(http, "B"))[0] == 200
        try:
            status, answer = await first.call(http, "A")
        except aiohttp.ClientConnectionError:
            status, answer = 0, {}
        assert status in (0, 401) or answer["result"]["isError"] is True
        assert not [action for action, _ in worker.host("A").calls if action == "call_tool"]
    await second.end()
    first.run.cancel()
    await asyncio.wait({first.run})
