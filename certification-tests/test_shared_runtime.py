"""One process, one plugin object, one runner object for every installation: what happens to one, and what the others notice.

The pool of the SDK's own runtime, with a real daemon program and scripted agents (local protocol fixtures) behind each
installation. Every name is the same on both sides: run, chat, person, daemon, vendor session. Only secrets, addresses and
settings are each one's own. What is kept of whom is looked at from inside in :mod:`test_statelessness`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from langbot_plugin.runtime.io.handler import MAX_INFLIGHT_ACTIONS

from pkg import limits
from pkg.agent_api import TextDelta
from testkit import hostile_trees, worker_graph
from testkit.acp_harness import poll
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_sites import Site, plugin_form
from testkit.host_actions import HoldingHost, HostActions, message
from testkit.langbot_host import build_package
from testkit.machines import machine
from testkit.pool_pair import (
    GRACE,
    VARIABLE,
    Chat,
    Pair,
    Tenant,
    asked_at_once,
    pair,
    revoked,
    revoked_in_its_turn,
)
from testkit.relay_rig import free_port
from testkit.scripted_driver import ScriptedSession
from testkit.scripted_kinds import KINDS
from testkit.sdk_worker import SdkWorker, built, descendants, gone, scripted_agent, sdk_worker
from testkit.sshd import sshd

pytestmark = [pytest.mark.shared_runtime, pytest.mark.sdk_worker, pytest.mark.timeout(240)]

BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
GRACE_OF_TIMERS = 60.0
"""Seconds until the SDK's own timers have run out, whose contexts lead to ended invocations: 30, and spare."""
ASKED = {
    "toolCall": {"toolCallId": "t1", "title": "make", "kind": "execute", "rawInput": {"command": "make"}},
    "options": [
        {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
        {"optionId": "no", "name": "No", "kind": "reject_once"},
    ],
}
ASKS = f"perm {json.dumps(ASKED)}\nsay went on"
TOOLS = {"langbot_assets_enabled": True, "docs": False}


@contextlib.asynccontextmanager
async def neighbour_at_work(at: Pair, directory: Path) -> AsyncIterator[None]:
    """``B`` is in its turn while the block runs; then its answer is whole, and its process the same."""
    b, gate, pid = at.tenants["B"], directory / "gate", at.worker.pid("B")
    chat = Chat(b.stream(f"say begun\nuntil {gate}\nsay whole", run_id="same"))
    try:
        await chat.shown("begun")
        agents = b.processes()
        assert agents
        yield
        assert set(hostile_trees.living(agents)) == agents.keys()
        gate.touch()
        done = await chat.whole()
    finally:
        await chat.end()
    assert (done.shown, done.reason) == (["begunwhole"], "stop")
    assert at.worker.pid("B") == pid
    assert at.crossed({"A": "", "B": done.text + done.log}) == []


@pytest.mark.asyncio
async def test_the_same_names_at_the_same_time_and_nothing_crosses(tmp_path: Path) -> None:
    """Our rule: settings, secrets, tool servers, tools, states and answers are each installation's own.

    Both turns are open from the first step to the last, which they take in turn.
    """
    async with pair(tmp_path) as at:
        assert at.worker.pid("A") == at.worker.pid("B")
        gates = {(uid, step): tmp_path / f"{uid}-{step}" for step in ("tool", "end") for uid in "AB"}
        chats = {
            (uid, chat): Chat(
                each.stream(
                    f"environ {VARIABLE}\nsay {uid} in {chat} begun\nuntil {gates[uid, 'tool']}\n"
                    f'tool echo {{"who": "{uid}", "chat": "{chat}"}}\nuntil {gates[uid, "end"]}\nsay whole',
                    run_id=f"run of {chat}",
                    conversation=chat,
                    form={**TOOLS, "keep_warm": 300 if uid == "A" else 0},
                )
            )
            for uid, each in at.tenants.items()
            for chat in ("one", "two")
        }
        for (uid, chat), reading in chats.items():
            await reading.shown(f"{uid} in {chat} begun")
        for uid, step in gates:
            gates[uid, step].touch()
            for chat in ("one", "two"):
                await chats[uid, chat].shown("structuredContent" if step == "tool" else "whole")
        told = dict.fromkeys("AB", "")
        for (uid, chat), reading in chats.items():
            done = await reading.whole()
            assert re.fullmatch(rf"{at.tenants[uid].value}{uid} in {chat} begun\{{.*\}}whole", done.text), done.text
            told[uid] += done.text + done.log
        for uid, each in at.tenants.items():
            calls = [data for action, data in each.host.calls if action == "call_tool"]
            wanted = [("run of one", {"who": uid, "chat": "one"}), ("run of two", {"who": uid, "chat": "two"})]
            assert sorted((call["run_id"], call["parameters"]) for call in calls) == wanted
            assert {value["value"] for value in each.host.state.values()} == {"s-1"}
        assert at.tenants["A"].host.state.keys().isdisjoint(at.tenants["B"].host.state)
        assert at.tenants["A"].processes(), "one keeps its sessions,"
        await poll(lambda: at.tenants["B"].processes() == {})
        servers = [await each.run("mcp", run_id="servers", conversation="three") for each in at.both]
        for each, done in zip(at.both, servers, strict=True):
            assert each.address in done.text
            told[each.uid] += done.text + done.log
        assert at.crossed(told) == []


@pytest.mark.asyncio
async def test_both_are_asked_and_answered_at_once_and_told_only_their_own(tmp_path: Path) -> None:
    """Our rule: an answer, and a message during the turn, belong to the installation whose chat they came from."""
    async with pair(tmp_path) as at:
        outcomes = await asked_at_once(at, ASKS, f"environ {VARIABLE}")
        for uid, option in (("A", "yes"), ("B", "no")):
            answered = [line["answer"]["outcome"] for line in at.tenants[uid].noted("answered")]
            assert answered == [{"outcome": "selected", "optionId": option}]
            assert "went on" in outcomes[uid].text
        gate = tmp_path / "gate"
        chats = [Chat(each.stream(f"say begun\nuntil {gate}", run_id="steered")) for each in at.both]
        for each, chat in zip(at.both, chats, strict=True):
            await chat.shown("begun")
            each.host.steering.append(message(f"say {each.address} was steered"))
            each.host.pulled.clear()
        for each in at.both:
            async with asyncio.timeout(BOUND):
                await each.host.pulled.wait()
        gate.touch()
        for each, chat in zip(at.both, chats, strict=True):
            done = await chat.whole()
            assert done.shown == ["begun", f"{each.address} was steered"]
            outcomes[each.uid].results.extend(done.results)
        assert at.crossed({uid: json.dumps([each.data for each in outcomes[uid].results]) for uid in "AB"}) == []


@pytest.mark.asyncio
@pytest.mark.ssh
async def test_over_ssh_each_works_on_its_own_machine(tmp_path: Path) -> None:
    """Our rule: target, host key and private key are the run's own, at the same time and with the same names."""
    with sshd(tmp_path / "sshd-A") as first, sshd(tmp_path / "sshd-B") as second:
        servers = dict(zip("AB", (first, second), strict=True))
        forms: dict[str, dict[str, Any]] = {}
        for uid, server in servers.items():
            (tmp_path / uid).mkdir()
            agent = {"provider": "custom", "acp-command": scripted_agent(), "workspace": str(tmp_path / uid)}
            there = {"ssh-target": server.target, "ssh-port": server.port, "ssh-known-hosts": server.known_hosts}
            forms[uid] = {"location": "remote-ssh", "langbot-assets-enabled": False, **agent, **there}
        plugins = {uid: {"ssh-private-key-secret": server.identity_file.read_text()} for uid, server in servers.items()}
        async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=plugins) as worker:
            chats = {uid: Chat(worker.stream(f"who\nsay {uid}\nhang", uid=uid, config=forms[uid])) for uid in "AB"}
            for uid, chat in chats.items():
                await chat.shown(f";{uid}")
                said = json.dumps([each.data for each in chat.results])
                (agent_pid,) = {int(found) for found in re.findall(r"pid=(\d+)", said)}
                assert [name for name, server in servers.items() if agent_pid in descendants(server.pid)] == [uid]
            wrong = {**forms["A"], "ssh-port": second.port, "ssh-known-hosts": second.known_hosts}
            done = await worker.run("say unheard", uid="A", run_id="wrong", conversation="other", config=wrong)
            assert (done.reason, "unheard" in done.text) == ("error", False), "its key is worth nothing at the other's"
            ours, theirs = (descendants(server.pid) for server in (first, second))
            await worker.revoke("A")
            assert revoked(await chats["A"].ended())
            assert await gone({pid: start for pid, start in ours.items() if pid != first.pid}, GRACE)
            assert set(hostile_trees.living(theirs)) == theirs.keys()
            await chats["B"].end()
            assert await gone(theirs, GRACE)


class TestNewSettings:
    """SDK fact: new settings are a new revision of the installation, and the old one is revoked."""

    @pytest.mark.asyncio
    async def test_new_settings_of_one_end_its_run_and_no_other(self, tmp_path: Path) -> None:
        """Our rule: the run that was in its turn ends in words, with its agent and its job; the other one's goes on.

        The old secret is worth nothing afterwards, while the new one works on the same listener, in the same process.
        """
        async with pair(tmp_path) as at:
            a, pid = at.tenants["A"], at.worker.pid("A")
            fresh = Tenant(at.worker, tmp_path / "fresh", at.port, "A", kind=a.kind)
            try:
                async with neighbour_at_work(at, tmp_path):
                    ours = Chat(a.stream("say begun\nchild\nhang", run_id="same"))
                    await ours.shown("agent=")
                    processes = a.processes()
                    assert len(processes) >= 3
                    await at.worker.install("A", fresh.plugin, revision=2)
                    assert revoked(await ours.ended())
                    assert await gone(processes, GRACE)
                    await poll(lambda: a.owed() == [])
                    await poll(lambda: b": parked" in a.home.log.read_bytes())
                    refused = await a.run("say hi", run_id="next", form={"daemon_connect_timeout": 1})
                    assert "coding.daemon_offline" in refused.log
                    assert at.worker.pid("A") == pid
                    await fresh.join()
                    done = await fresh.run(f"environ {VARIABLE}", run_id="anew")
                    assert done.shown == [fresh.value]
                    assert a.processes() == {}, "the machine with the old secret is there, and nobody's"
                    assert a.prompts() == ["say here", "say begun\nchild\nhang"]
            finally:
                await fresh.stop_daemon()

    @pytest.mark.asyncio
    async def test_new_settings_of_the_only_one_replace_the_process(self, tmp_path: Path) -> None:
        """SDK fact: without another slot the worker is started anew; our rule: the same daemon comes back by itself."""
        port, token = free_port(), secrets.token_hex(32)
        form = plugin_form(port, token)
        async with sdk_worker(built(), tmp_path / "runtime", "pool", installations={"A": form}) as worker:
            site = Site(worker, tmp_path / "A", port, token)
            try:
                await site.join()
                old = {worker.pid("A"): hostile_trees.start_time(worker.pid("A"))}
                ours = Chat(site.stream("say begun\nchild\nhang", run_id="same", form={"keep_warm": 0}))
                await ours.shown("agent=")
                processes = descendants(site.daemon_pid)
                await worker.install("A", form, revision=2)
                assert revoked(await ours.ended())
                assert await gone({**old, **processes}, GRACE)
                assert (await site.run("say back", run_id="r2")).shown[-1] == "back"
            finally:
                await site.stop_daemon()


class TestRevocation:
    """One installation is removed at a bad moment; the other is in the middle of something, too."""

    @pytest.mark.asyncio
    async def test_in_its_turn(self, tmp_path: Path) -> None:
        """Our rule: its chat is told, its job, its agent and every task of it are gone; the other's answer is whole."""
        async with pair(tmp_path) as at:
            await revoked_in_its_turn(at, tmp_path)

    @pytest.mark.asyncio
    async def test_before_its_run_has_begun(self, tmp_path: Path) -> None:
        """Our rule: a run that waits for the host to say what its message answers ends, too, and nothing is made for it."""
        async with pair(tmp_path) as at:
            a, pid = at.tenants["A"], at.worker.pid("A")
            before = await at.watch.inventory(pid)
            host = at.worker.core.hosts["A"] = HoldingHost("state_get")
            ours = Chat(a.stream("1", run_id="late"))
            async with asyncio.timeout(BOUND):
                await host.called.wait()
            await at.worker.revoke("A")
            host.let.set()
            assert revoked(await ours.ended())
            await poll(lambda: b": parked" in a.home.log.read_bytes())
            assert a.prompts() == ["say here"]
            assert a.processes() == {}
            assert await at.watch.more_than(before, pid, GRACE) == {}
            assert await at.watch.settled(lambda: at.watch.anywhere(pid, *a.canaries, uid="A"), GRACE_OF_TIMERS) == {}

    @pytest.mark.asyncio
    async def test_while_a_request_waits_for_its_answer(self, tmp_path: Path) -> None:
        """Our rule: the parked turn is over and its agent gone, a late answer reaches nobody; the other's waits on."""
        async with pair(tmp_path) as at:
            a, b = at.both
            pid, before = at.worker.pid("A"), await at.watch.inventory(at.worker.pid("A"))
            assert "make" in (await b.run(ASKS, run_id="asks")).text
            waiting = await at.watch.inventory(pid)
            assert "make" in (await a.run(ASKS, run_id="asks")).text
            processes, others = a.processes(), b.processes()
            assert processes
            await at.worker.revoke("A")
            assert await gone(processes, GRACE)
            await poll(lambda: a.owed() == [])
            assert await at.watch.more_than(waiting, pid, GRACE) == {}
            await at.worker.install("A", a.plugin, revision=2)
            at.worker.core.hosts["A"] = HostActions()
            assert (await a.run("1", run_id="answers")).shown[-1] == "1", "to the agent of a new installation that is a message"
            told = [line["answer"]["outcome"] for line in a.noted("answered")]
            assert all(outcome == {"outcome": "cancelled"} for outcome in told), told
            await at.worker.revoke("A")
            assert set(hostile_trees.living(others)) == others.keys()
            assert "went on" in (await b.run("1", run_id="answers")).text
            assert at.worker.pid("B") == pid
            assert await at.watch.more_than(before, pid, GRACE) == {}

    @pytest.mark.asyncio
    async def test_while_a_tool_is_being_called(self, tmp_path: Path) -> None:
        """Our rule: the call is cancelled with its run; an answer that comes late reaches nobody, the other's call goes on."""
        async with pair(tmp_path) as at:
            hosts = {uid: HoldingHost() for uid in "AB"}
            at.worker.core.hosts.update(hosts)
            pid, before = at.worker.pid("B"), await at.watch.inventory(at.worker.pid("B"))
            chats = {
                uid: Chat(each.stream(f'say begun\ntool echo {{"who": "{uid}"}}\nsay called', run_id="same", form=TOOLS))
                for uid, each in at.tenants.items()
            }
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*(host.called.wait() for host in hosts.values()))
            a, b = at.both
            processes = a.processes()
            assert processes
            await at.worker.revoke("A")
            assert revoked(await chats["A"].ended())
            assert await gone(processes, GRACE)
            await poll(lambda: a.owed() == [])
            assert hosts["A"].given_up == 1, "SDK fact: the runtime gives up the calls of an installation that is gone"
            hosts["A"].let.set()
            assert (await b.run("say beside", run_id="beside", conversation="beside")).shown == ["beside"]
            assert not hosts["B"].answered
            hosts["B"].let.set()
            done = await chats["B"].whole()
            assert json.loads(done.text.removeprefix("begun").removesuffix("called"))["result"]["structuredContent"] == {
                "echo": {"who": "B"}
            }
            assert not [line for line in a.noted("called") if "structuredContent" in line["answer"]]
            assert len(b.noted("called")) == 1
            assert await at.watch.more_than(before, pid, GRACE) == {}

    @pytest.mark.asyncio
    async def test_while_its_machine_is_cut_off(self, package_root: Path, tmp_path: Path) -> None:
        """Our rule: the run is told within the time for ending a session; the machine ends its agent by itself, by the lease.

        That it gets through again, to a hub that does not know it any more, makes the lease no longer. Both are shortened.
        """
        port = free_port()
        package = with_limits(package_root, tmp_path / "package", RELAY_LEASE=LEASE, CLOSE_WAIT=1.0, RELAY_STOP=2.0)
        async with (
            CuttingProxy(("127.0.0.1", port)) as proxy,
            pair(tmp_path, urls={"A": proxy.url}, port=port, package=package) as at,
            neighbour_at_work(at, tmp_path),
        ):
            a, pid = at.tenants["A"], at.worker.pid("A")
            before = await at.watch.inventory(pid)
            ours = Chat(a.stream("say begun\nchild\nhang", run_id="same"))
            await ours.shown("agent=")
            processes = a.processes()
            assert proxy.cut() >= 1
            await poll(lambda: proxy.refused >= 1)
            revoking = asyncio.create_task(at.worker.revoke("A"))
            assert revoked(await ours.ended())
            assert hostile_trees.living(processes), "nobody could tell the machine"
            proxy.restore()
            await poll(lambda: b": parked" in a.home.log.read_bytes())
            assert hostile_trees.living(processes), "whoever does not know the secret any more has no say over there"
            assert await gone(processes, LEASE + GRACE)
            await poll(lambda: a.owed() == [])
            await revoking
            assert await at.watch.more_than(before, pid, GRACE) == {}
            await at.worker.install("A", a.plugin, revision=2)
            assert (await a.run("say back", run_id="r2")).shown[-1] == "back", "with its secret the same machine serves again"

    @pytest.mark.asyncio
    async def test_while_it_waits_for_its_machine(self, tmp_path: Path) -> None:
        """Our rule: a run that waits ends, too; a machine that comes afterwards is nobody's."""
        async with pair(tmp_path, join=False) as at:
            a, b = at.both
            await b.join()
            before = await at.watch.inventory(at.worker.pid("B"))
            ours = Chat(a.stream("say never", run_id="same", form={"daemon_connect_timeout": 300}))
            await ours.shown("laptop")
            await at.worker.revoke("A")
            assert revoked(await ours.ended())
            assert await at.watch.more_than(before, at.worker.pid("B"), GRACE) == {}
            await a.start_daemon()
            await poll(lambda: b": parked" in a.home.log.read_bytes())
            assert (await b.run("say fine", run_id="r2")).shown == ["fine"]
            assert a.processes() == {}
            assert not a.agent_log.exists()

    @pytest.mark.asyncio
    async def test_the_last_one_takes_the_process_and_the_listener_with_it(self, tmp_path: Path) -> None:
        """SDK fact: without slots there is no worker; our rule: nothing of anybody is left, and a new start works."""
        async with pair(tmp_path) as at:
            a, b = at.both
            pid = at.worker.pid("A")
            worker = {pid: hostile_trees.start_time(pid)}
            for each in at.both:
                assert (await each.run("say kept", form={"keep_warm": 300})).shown == ["kept"]
            processes = {**a.processes(), **b.processes()}
            assert len(processes) >= 4, "both have a live session"
            for each in at.both:
                assert (await each.run("say on", run_id="kept", form={"keep_warm": 300})).shown == ["on"]
            assert {**a.processes(), **b.processes()} == processes, "the next message reaches the same process"
            await at.worker.revoke("A")
            assert hostile_trees.living(worker)
            await at.worker.revoke("B")
            assert await gone({**worker, **processes}, GRACE)
            await poll(lambda: (a.owed(), b.owed()) == ([], []))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", at.port))
            await at.worker.install("A", a.plugin, revision=2)
            assert at.worker.pid("A") != pid
            assert (await a.run("say again", run_id="r2")).shown[-1] == "again"
            assert b.processes() == {}


LEASE = 8.0
"""Seconds instead of 120 that a cut-off job lives."""


def with_limits(package_root: Path, scratch: Path, **values: float) -> Path:
    """The package with other bounds, built."""
    source = scratch / package_root.name
    shutil.copytree(package_root, source, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "dist"))
    file = source / "pkg" / "limits.py"
    text = file.read_text(encoding="utf-8")
    for name, value in values.items():
        text, count = re.subn(rf"^{name}: Final = .*$", f"{name}: Final = {value}", text, flags=re.MULTILINE)
        assert count == 1
    file.write_text(text, encoding="utf-8")
    (scratch / "built").mkdir()
    return build_package(source, scratch / "built")


# ------------------------------------------------------------------ many


CROWD = 50
AT_ONCE = 100
NOISE = 0.005
"""The share of objects by which two looks at an idle process may differ."""


class Crowd:
    """Coroutines as agents, which answer when all are at work."""

    def __init__(self) -> None:
        """Nobody is at work."""
        self.working = self.most = 0
        self.gate = asyncio.Event()
        self.news = asyncio.Event()

    async def script(self, session: ScriptedSession, prompt: Any) -> str | None:
        """Wait for the gate, and answer."""
        self.working += 1
        self.most = max(self.most, self.working)
        self.news.set()
        await self.gate.wait()
        session.emit(TextDelta(f"answer to {prompt.text}"))
        self.working -= 1
        return None

    async def at_work(self, count: int) -> None:
        """Wait until so many are."""
        async with asyncio.timeout(BOUND * 2):
            while self.working < count:
                self.news.clear()
                await self.news.wait()


@pytest.mark.asyncio
async def test_fifty_installations_with_a_hundred_runs_at_once(tmp_path: Path) -> None:
    """Our rule: every answer reaches its own installation; whoever comes when the process is full is told so.

    When all are revoked, nothing of them is left in the process: no task, no socket, no secret, no text, no object. The
    machines are the daemon program's own, in this process, with agents that are coroutines.
    """
    port, crowd = free_port(), Crowd()
    names = [f"T{number:02}" for number in range(CROWD)]
    tokens = {uid: f"canary-{uid}-{secrets.token_hex(16)}" for uid in ("warm", *names)}
    words = {uid: f"words-{uid}-{secrets.token_hex(8)}" for uid in tokens}
    texts = {"crowd": {f"{uid}.{kind}": each[uid] for kind, each in (("token", tokens), ("words", words)) for uid in tokens}}
    watch = worker_graph.Watch(tmp_path / "watch", texts)
    environment = worker_graph.watched(tmp_path / "watch")
    form = KINDS["ACPAgentRunner"].remote("laptop", daemon_connect_timeout=60)
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            sdk_worker(built(), tmp_path / "runtime", "pool", installations={"base": {}}, environment=environment)
        )

        async def settled() -> Mapping[str, list[str]]:
            async def look() -> dict[str, list[str]]:
                await worker.run("hi", uid="base")
                return await watch.anywhere(worker.pid("base"), uid="crowd")

            return await watch.settled(look, GRACE_OF_TIMERS)

        async def machines(*uids: str) -> None:
            for uid in uids:
                await worker.install(uid, plugin_form(port, tokens[uid]))
                await stack.enter_async_context(machine(tmp_path / uid, f"ws://127.0.0.1:{port}", tokens[uid], crowd.script))

        def start(uid: str, number: int) -> asyncio.Task[Any]:
            chat = f"chat-{number}"
            return worker.start(f"{words[uid]} {number}", uid=uid, run_id=f"run-{number}", config=form, conversation=chat)

        # What a process has once it has served anybody at all.
        await machines("warm")
        first = start("warm", 0)
        await crowd.at_work(1)
        assert await watch.anywhere(worker.pid("warm"), uid="crowd"), "what is there is found"
        crowd.gate.set()
        assert (await first).shown == [f"answer to {words['warm']} 0"]
        await worker.revoke("warm")
        assert await settled() == {}
        before, objects = await watch.inventory(worker.pid("base")), watch.sizes["shared"]

        crowd.gate.clear()
        await machines(*names)
        assert len({worker.pid(uid) for uid in names}) == 1
        wanted = [(uid, number) for number in range(AT_ONCE // CROWD) for uid in names]
        runs = [start(uid, number) for uid, number in wanted]
        await crowd.at_work(AT_ONCE)
        assert len(await watch.anywhere(worker.pid("base"), uid="crowd")) == 2 * CROWD
        more = [(uid, AT_ONCE // CROWD) for uid in names[: limits.RUNS_PER_PROCESS - AT_ONCE]]
        runs += [start(uid, number) for uid, number in more]
        await crowd.at_work(limits.RUNS_PER_PROCESS)
        full = await start(names[-1], 9)
        assert "coding.busy" in full.log
        assert "Too many messages" in full.text
        crowd.gate.set()
        async with asyncio.timeout(BOUND * 2):
            done = await asyncio.gather(*runs)
        assert [each.shown[-1] for each in done] == [f"answer to {words[uid]} {number}" for uid, number in wanted + more]
        assert crowd.most == limits.RUNS_PER_PROCESS, "all of them really were at work at the same time"
        assert (await start(names[-1], 10)).shown[-1] == f"answer to {words[names[-1]]} 10"
        for uid in names:
            said = json.dumps([[action, dict(data)] for action, data in worker.host(uid).calls], default=str)
            assert worker.host(uid).state
            assert not [other for other in names if other != uid and (words[other] in said or tokens[other] in said)]

        for uid in names:
            await worker.revoke(uid)
        assert await settled() == {}
        assert await watch.more_than(before, worker.pid("base"), GRACE) == {}
        assert watch.sizes["shared"] <= objects * (1 + NOISE), (objects, watch.sizes)


@pytest.mark.asyncio
async def test_nobody_gets_all_runs_of_the_process(tmp_path: Path) -> None:
    """Our rule: an installation whose machine is off and whose chats all write is told that it is busy, and no other."""
    port = free_port()
    forms = {uid: plugin_form(port, secrets.token_hex(32)) for uid in "AB"}
    form = {"provider": "custom", "location": "daemon", "daemon-id": "laptop", "daemon-connect-timeout": 300}
    async with sdk_worker(built(), tmp_path / "runtime", "pool", installations=forms) as worker:
        runs = {
            worker.start("hello", uid="A", run_id=f"a{number}", conversation=f"chat {number}", config=form)
            for number in range(limits.RUNS_PER_INSTALLATION + 1)
        }
        try:
            async with asyncio.timeout(BOUND * 2):
                done, runs = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            assert ["coding.busy" in each.result().log for each in done] == [True]
            theirs = await worker.run("hello", uid="B", config={**form, "daemon-connect-timeout": 1})
            assert "coding.daemon_offline" in theirs.log
        finally:
            for each in runs:
                each.cancel()
            await asyncio.wait(runs)


async def calls_tools(session: ScriptedSession, many: int) -> str:
    """Call LangBot's tool ``echo`` so often at once; what the last one answered."""
    (server,) = session.spec.mcp_servers
    arguments = {"name": "langbot_call_tool", "arguments": {"tool_name": "echo", "parameters": {}}}

    async def call(number: int) -> str:
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": arguments}
        async with http.post(server.url, json=message) as answer:
            return await answer.text()

    async with aiohttp.ClientSession(headers=dict(server.headers)) as http:
        return (await asyncio.gather(*map(call, range(many))))[-1]


@contextlib.asynccontextmanager
async def neighbour_with_tools(
    directory: Path, host: HoldingHost, ours: Callable[[ScriptedSession, Any], Awaitable[str | None]]
) -> AsyncIterator[tuple[SdkWorker, dict[str, Any]]]:
    """A pool and a form: ``A`` has this host and this agent, ``B`` an agent that tells what a call of a tool came to."""

    async def modest(session: ScriptedSession, _: Any) -> str | None:
        session.emit(TextDelta(await calls_tools(session, 1)))
        return None

    port, tokens = free_port(), {uid: secrets.token_hex(32) for uid in "AB"}
    forms = {uid: plugin_form(port, token) for uid, token in tokens.items()}
    async with sdk_worker(built(), directory / "runtime", "pool", installations=forms) as worker, asyncio.timeout(BOUND * 2):
        worker.core.hosts["A"] = host
        url = f"ws://127.0.0.1:{port}"
        async with machine(directory / "A", url, tokens["A"], ours), machine(directory / "B", url, tokens["B"], modest):
            yield worker, KINDS["ACPAgentRunner"].remote("laptop", langbot_assets_enabled=True)


@pytest.mark.asyncio
async def test_nobody_gets_all_actions_of_the_connection(tmp_path: Path) -> None:
    """Our rule: while the tools of one installation hang, another one's tools are called and its session is stored.

    SDK fact: the connection takes 128 actions at a time, of whomever, and refuses the next.
    """
    asked = asyncio.Semaphore(0)

    async def greedy(session: ScriptedSession, _: Any) -> str | None:
        asked.release()
        await calls_tools(session, 12)
        return None

    host = HoldingHost()
    async with neighbour_with_tools(tmp_path, host, greedy) as (worker, form):
        many = MAX_INFLIGHT_ACTIONS // limits.MCP_CALLS_AT_ONCE + 1
        runs = [worker.start(uid="A", run_id=f"a{n}", conversation=f"chat {n}", config=form) for n in range(many)]
        try:
            for _ in runs:
                await asked.acquire()
            await host.holds(limits.MCP_CALLS_PER_INSTALLATION)
            done = await worker.run(uid="B", config=form)
            assert "structuredContent" in done.text, done.text + done.log
            assert "warning" not in done.log
            assert worker.host("B").state
            assert host.held == limits.MCP_CALLS_PER_INSTALLATION
        finally:
            for each in runs:
                each.cancel()
            await asyncio.wait(runs)


@pytest.mark.asyncio
async def test_a_call_that_was_cancelled_is_no_action_of_the_connection_any_more(tmp_path: Path) -> None:
    """Our rule: an agent that calls and cancels for ever holds nothing with the host; its run's end cancels there, too.

    SDK fact: a run's own calls are cancelled in the worker only, and count at the other end until they end by themselves.
    """
    cancelled = asyncio.Event()
    host, each = HoldingHost(), limits.MCP_CALLS_AT_ONCE
    rounds = MAX_INFLIGHT_ACTIONS // each

    async def fickle(session: ScriptedSession, _: Any) -> str | None:
        (server,) = session.spec.mcp_servers
        async with aiohttp.ClientSession(headers=dict(server.headers)) as http:
            for number in range(rounds):
                calls = asyncio.create_task(calls_tools(session, each))
                while host.held + host.given_up < (number + 1) * each:
                    host.news.clear()
                    await host.news.wait()
                for call in range(each):
                    params = {"requestId": call}
                    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
                    async with http.post(server.url, json=note) as answer:
                        assert answer.status == 202
                session.emit(TextDelta(await calls))
            cancelled.set()
            await calls_tools(session, each)
        return None

    async with neighbour_with_tools(tmp_path, host, fickle) as (worker, form):
        run = worker.start(uid="A", config=form)
        await cancelled.wait()
        done = await worker.run(uid="B", config=form)
        assert "structuredContent" in done.text, done.text + done.log
        await host.holds(each, given_up=rounds * each)
        run.cancel()
        await asyncio.wait({run})
        await host.holds(0, given_up=(rounds + 1) * each)
