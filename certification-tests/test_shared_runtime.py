"""One process, one plugin object, one runner object for every installation: what happens to one, and what the others notice.

The pool of the SDK's own runtime, with a real daemon program and scripted agents (local protocol fixtures) behind each
installation. Every name is the same on both sides: run, chat, person, daemon, vendor session. Only secrets, addresses and
settings are each one's own. What is kept of whom is looked at from inside in :mod:`test_statelessness`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pkg import limits
from pkg.agent_api import TextDelta
from testkit import hostile_trees, worker_graph
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_sites import Site, plugin_form, until_shown
from testkit.host_actions import HostActions
from testkit.machines import machine
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.scripted_driver import ScriptedSession
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.shared_runtime, pytest.mark.sdk_worker, pytest.mark.timeout(240)]

BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
GRACE = 20.0
"""Seconds what belongs to a revoked installation gets to leave."""
OVER = {"keep_warm": 0}
ASKED = {
    "toolCall": {"toolCallId": "t1", "title": "make", "kind": "execute", "rawInput": {"command": "make"}},
    "options": [
        {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
        {"optionId": "no", "name": "No", "kind": "reject_once"},
    ],
}


class HoldingHost(HostActions):
    """A host whose tools answer when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.called = asyncio.Event()
        self.let = asyncio.Event()
        self.answered = 0

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **more: Any) -> dict[str, Any]:
        """Hold a tool's answer back."""
        if action.value == "call_tool":
            self.called.set()
            await self.let.wait()
            self.answered += 1
        return await super().call_action(action, data, timeout, **more)


class Pair:
    """Two installations in one worker, each with its machine."""

    def __init__(self, worker: SdkWorker, sites: dict[str, Site], forms: dict[str, dict[str, Any]], port: int) -> None:
        self.worker, self.sites, self.forms, self.port = worker, sites, forms, port

    def processes(self, uid: str) -> dict[int, str]:
        """The agents on a machine, pid to start time."""
        return descendants(self.sites[uid].daemon_pid)


@contextlib.asynccontextmanager
async def pair(directory: Path, *, urls: dict[str, str] | None = None, port: int = 0, join: bool = True) -> AsyncIterator[Pair]:
    """``A`` and ``B``, both with their daemon connected unless told otherwise; ``urls``: where a machine finds the hub."""
    port = port or free_port()
    tokens = {uid: f"canary-{uid}-token-{secrets.token_hex(16)}" for uid in "AB"}
    forms = {
        uid: plugin_form(port, tokens[uid], agent_secret_values=json.dumps({"KEY": f"canary-{uid}-value"})) for uid in tokens
    }
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sdk_worker(built(), directory / "runtime", "pool", installations=forms))
        sites = {
            uid: Site(worker, directory / uid, port, tokens[uid], uid=uid, url=(urls or {}).get(uid, "")) for uid in tokens
        }
        for site in sites.values():
            site.home.write('job_environment = ["CANARY"]')
            stack.push_async_callback(site.stop_daemon)
        if join:
            await asyncio.gather(*(site.join() for site in sites.values()))
        yield Pair(worker, sites, forms, port)


async def rest_of(stream: Any, got: list[Any]) -> Outcome:
    """A run read to its end."""
    async with asyncio.timeout(BOUND):
        return Outcome(got + [result async for result in stream])


async def dropped(stream: Any) -> None:
    """Give up the stream of an installation that is gone: the runtime has nobody to tell any more."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(BOUND):
            await stream.aclose()


@pytest.mark.asyncio
async def test_the_same_names_at_the_same_time_and_nothing_crosses(tmp_path: Path) -> None:
    """Our rule: settings, secrets, tool servers, tools, states and answers are each installation's own."""
    async with pair(tmp_path) as at:
        a, b = (at.sites[uid] for uid in "AB")
        assert at.worker.pid("A") == at.worker.pid("B")
        for number in range(4):
            tools = number % 2 == 0
            docs = {} if tools else {uid: {"docs": {"url": f"http://127.0.0.1:9/canary-{uid}-server"}} for uid in "AB"}
            runs = {
                uid: site.run(
                    f"environ CANARY\n{'tool echo' if tools else 'think nothing'}\nsay this is {uid} {number}",
                    run_id="same",
                    form={
                        "langbot_assets_enabled": tools,
                        "env_json": '{"CANARY": "${secret:KEY}"}',
                        "mcp_servers_json": json.dumps(docs.get(uid, {})),
                        "keep_warm": 300 if uid == "A" else 0,
                    },
                )
                for uid, site in at.sites.items()
            }
            for uid, done in zip(runs, await asyncio.gather(*runs.values()), strict=True):
                other = "B" if uid == "A" else "A"
                assert f"this is {uid} {number}" in done.text
                assert f"canary-{uid}-value" in done.text
                assert f"canary-{other}" not in done.text + done.log
        for uid, site, other in (("A", a, "B"), ("B", b, "A")):
            received = site.agent_log.read_text()
            assert f"canary-{uid}-server" in received
            assert f"canary-{other}" not in received
            said = json.dumps([[action, dict(data)] for action, data in site.host.calls], default=str)
            assert "call_tool" in said
            assert f"canary-{other}" not in said


@pytest.mark.asyncio
async def test_new_settings_of_one_end_its_run_and_no_other(tmp_path: Path) -> None:
    """SDK fact: new settings are a new revision, and the old one is revoked; our rule: in the middle of both runs.

    The old secret is worth nothing afterwards, the new one works on the same listener, and the process stays.
    """
    async with pair(tmp_path) as at:
        a, b = (at.sites[uid] for uid in "AB")
        gate, pid = tmp_path / "gate", at.worker.pid("B")
        theirs = b.stream(f"say begun\nuntil {gate}\nsay whole", run_id="same", form=OVER)
        got = await until_shown(theirs, "begun")
        ours = a.stream("say begun\nchild\nhang", run_id="same", form=OVER)
        await until_shown(ours, "agent=")
        processes = at.processes("A")
        assert processes
        fresh = f"canary-A-fresh-{secrets.token_hex(16)}"
        await at.worker.install("A", {**at.forms["A"], "daemon-token": fresh}, revision=2)
        assert await gone(processes, GRACE)
        await dropped(ours)
        assert at.worker.pid("A") == pid
        gate.touch()
        assert (await rest_of(theirs, got)).shown[-1].endswith("whole")
        refused = await a.run("say hi", form={**OVER, "daemon_connect_timeout": 1})
        assert refused.reason == "error"
        await a.stop_daemon()
        again = Site(at.worker, tmp_path / "again", at.port, fresh, uid="A")
        try:
            await again.join()
            assert (await again.run("say anew")).shown[-1] == "anew"
            assert (await b.run("say still here")).shown[-1] == "still here"
        finally:
            await again.stop_daemon()


@pytest.mark.asyncio
async def test_new_settings_of_the_only_one_replace_the_process(tmp_path: Path) -> None:
    """SDK fact: without another slot the worker is started anew; our rule: the same daemon comes back by itself."""
    port, token = free_port(), secrets.token_hex(32)
    form = plugin_form(port, token)
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": form}) as worker:
        site = Site(worker, tmp_path / "A", port, token)
        try:
            await site.join()
            pid = worker.pid("A")
            await worker.install("A", form, revision=2)
            assert worker.pid("A") != pid
            assert (await site.run("say back")).shown[-1] == "back"
        finally:
            await site.stop_daemon()


class TestRevocation:
    """One installation is removed at a bad moment; the other is in the middle of something, too."""

    @pytest.mark.asyncio
    async def test_while_a_request_waits_for_its_answer(self, tmp_path: Path) -> None:
        """Our rule: the parked turn is cancelled and its agent gone; the other's waits on, and is answered."""
        async with pair(tmp_path) as at:
            for site in at.sites.values():
                asked = await site.run(f"perm {json.dumps(ASKED)}\nsay went on", run_id="asks")
                assert "make" in asked.text
            processes, others = at.processes("A"), at.processes("B")
            assert processes
            await at.worker.revoke("A")
            assert await gone(processes, GRACE)
            assert set(hostile_trees.living(others)) == others.keys()
            assert "went on" in (await at.sites["B"].run("1", run_id="answers")).text

    @pytest.mark.asyncio
    async def test_while_a_tool_is_being_called(self, tmp_path: Path) -> None:
        """Our rule: the call is cancelled with its run; an answer that comes late reaches nobody, the other's call goes on."""
        async with pair(tmp_path) as at:
            hosts = {uid: HoldingHost() for uid in "AB"}
            at.worker.core.hosts.update(hosts)
            form = {**OVER, "langbot_assets_enabled": True}
            streams = {
                uid: site.stream("say begun\ntool echo\nsay called", run_id="same", form=form) for uid, site in at.sites.items()
            }
            got = {uid: await until_shown(stream, "begun") for uid, stream in streams.items()}
            reading = asyncio.create_task(rest_of(streams["B"], got["B"]))
            async with asyncio.timeout(BOUND):
                await asyncio.gather(hosts["B"].called.wait(), hosts["A"].called.wait())
            processes = at.processes("A")
            await at.worker.revoke("A")
            assert await gone(processes, GRACE)
            for host in hosts.values():
                host.let.set()
            assert (await reading).shown[-1].endswith("called")
            assert hosts["B"].answered == 1
            await dropped(streams["A"])

    @pytest.mark.asyncio
    async def test_while_its_machine_is_cut_off(self, tmp_path: Path) -> None:
        """Our rule: the run ends at once, the cut-off machine's job when it hears of it; the other one's answer is whole."""
        port = free_port()
        async with CuttingProxy(("127.0.0.1", port)) as proxy, pair(tmp_path, urls={"A": proxy.url}, port=port) as at:
            gate = tmp_path / "gate"
            theirs = at.sites["B"].stream(f"say begun\nuntil {gate}\nsay whole", run_id="same", form=OVER)
            got = await until_shown(theirs, "begun")
            ours = at.sites["A"].stream("say begun\nhang", run_id="same", form=OVER)
            await until_shown(ours, "begun")
            processes = at.processes("A")
            assert proxy.cut() >= 1
            await at.worker.revoke("A")
            await dropped(ours)
            gate.touch()
            assert (await rest_of(theirs, got)).shown[-1].endswith("whole")
            proxy.restore()
            # The token that would prove the hub is gone from it: what still runs there ends with the lease, or with its owner.
            await at.sites["A"].stop_daemon()
            assert await gone(processes, GRACE)

    @pytest.mark.asyncio
    async def test_while_it_waits_for_its_machine(self, tmp_path: Path) -> None:
        """Our rule: a run that waits ends, too; a machine that comes afterwards is nobody's."""
        async with pair(tmp_path, join=False) as at:
            ours = at.sites["A"].stream("say never", run_id="same", form={**OVER, "daemon_connect_timeout": 60})
            await until_shown(ours, "laptop")
            await at.worker.revoke("A")
            await dropped(ours)
            await at.sites["B"].join()
            await at.sites["A"].start_daemon()
            assert (await at.sites["B"].run("say fine")).shown[-1] == "fine"
            assert at.processes("A") == {}
            assert not at.sites["A"].agent_log.exists()

    @pytest.mark.asyncio
    async def test_the_last_one_takes_the_process_and_the_listener_with_it(self, tmp_path: Path) -> None:
        """SDK fact: without slots there is no worker; our rule: nothing of anybody is left, and a new start works."""
        async with pair(tmp_path) as at:
            pid = at.worker.pid("A")
            worker = {pid: hostile_trees.start_time(pid) or ""}
            for site in at.sites.values():
                assert (await site.run("say kept")).shown[-1] == "kept"
            processes = {**at.processes("A"), **at.processes("B")}
            assert len(processes) >= 4, "both have a live session"
            await at.worker.revoke("A")
            assert hostile_trees.living(worker)
            await at.worker.revoke("B")
            assert await gone(worker, GRACE)
            assert await gone(processes, GRACE)
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", at.port)
            await at.worker.install("A", at.forms["A"], revision=2)
            assert at.worker.pid("A") != pid
            assert (await at.sites["A"].run("say again")).shown[-1] == "again"


# ------------------------------------------------------------------ many


CROWD = 50
AT_ONCE = 100


@pytest.mark.asyncio
async def test_fifty_installations_with_a_hundred_runs_at_once(tmp_path: Path) -> None:
    """Our rule: every answer reaches its own installation, and when all are revoked nothing of them is left in the process.

    The machines are the daemon program's own, in this process, with agents that are coroutines.
    """
    assert limits.RUNS_PER_PROCESS >= AT_ONCE
    port = free_port()
    names = [f"T{number:02}" for number in range(CROWD)]
    tokens = {uid: f"canary-{uid}-{secrets.token_hex(16)}" for uid in names}
    working, most, gate = 0, 0, asyncio.Event()

    async def script(session: ScriptedSession, prompt: Any) -> str | None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        if working >= AT_ONCE:
            gate.set()
        await gate.wait()
        session.emit(TextDelta(f"answer to {prompt.text}"))
        working -= 1
        return None

    watch = worker_graph.Watch(tmp_path / "watch", {}, {})
    environment = worker_graph.watched(tmp_path / "watch")
    forms = {"base": {}, **{uid: plugin_form(port, tokens[uid]) for uid in names}}
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            sdk_worker(built(), tmp_path / "runtime", "pool", installations={"base": {}}, environment=environment)
        )
        await worker.run("hi", uid="base")
        before = await watch.inventory(worker.pid("base"))
        for uid in names:
            await worker.install(uid, forms[uid])
        assert len({worker.pid(uid) for uid in names}) == 1
        form = {"provider": "custom", "location": "daemon", "daemon-id": "laptop", "keep-warm": 0, "daemon-connect-timeout": 60}
        for uid in names:
            await stack.enter_async_context(machine(tmp_path / uid, f"ws://127.0.0.1:{port}", tokens[uid], script))
        runs = [
            worker.start(f"{uid} {number}", uid=uid, run_id=f"run-{number}", config=form, conversation=f"chat-{number}")
            for number in range(AT_ONCE // CROWD)
            for uid in names
        ]
        async with asyncio.timeout(BOUND * 2):
            done = await asyncio.gather(*runs)
        wanted = [f"answer to {uid} {number}" for number in range(AT_ONCE // CROWD) for uid in names]
        assert [each.shown[-1] for each in done] == wanted
        assert most == AT_ONCE, "all of them really were at work at the same time"
        for uid in names:
            await worker.revoke(uid)

        async def look() -> dict[str, int]:
            await worker.run("hi", uid="base")
            now = await watch.inventory(worker.pid("base"))
            more = {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
            return {name: count for name, count in more.items() if not name.startswith("thread langbot-plugin-worker-blocking")}

        assert await watch.settled(look, GRACE) == {}
        assert Counter(worker.core.hosts).keys() >= set(names)
