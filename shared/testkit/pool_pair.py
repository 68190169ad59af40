"""Two installations in one pool worker, each with its own machine, and everything else named alike.

Run, chat, person, daemon and vendor session have the same names on both sides; secrets, addresses and settings differ. Any of
the packages, with its scripted agent (local protocol fixture).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult

from testkit import hostile_trees, package_roots
from testkit.daemon_rig import DAEMON_ID
from testkit.daemon_sites import BOUND, Site, files_below, plugin_form
from testkit.relay_rig import free_port, until
from testkit.run_harness import Outcome
from testkit.scripted_kinds import KINDS, Kind
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker
from testkit.worker_graph import Watch, watched

VARIABLE = "AWS_CANARY"
"""The agent's variable with the installation's secret: a name that no driver keeps from its own program."""
GRACE = 20.0
"""Seconds what belongs to a revoked installation gets to leave."""


class Tenant(Site):
    """One of them: its canaries, its forms, and its machine with a scripted agent of this package."""

    def __init__(
        self, worker: SdkWorker, directory: Path, port: int, uid: str, *, kind: Kind, url: str = "", token: str = ""
    ) -> None:
        """``url`` is where its daemon finds the hub when something stands in between."""
        self.kind = kind
        self.notes = directory / "notes"
        settings: dict[str, Any] = {"log": str(directory / "agent.log"), "notes": str(self.notes)}
        if kind.driver == "acp":
            (directory / "sessions").mkdir(parents=True)
            settings |= {"state": str(directory / "sessions"), "first_session": "s-1"}
        if kind.driver == "codex":
            settings |= {"environment": str(directory / "environment"), "known": True}
        command = (str(kind.write(directory / "agent", settings)),)
        token = token or f"canary-{uid}-token-{secrets.token_hex(16)}"
        super().__init__(worker, directory / "site", port, token, uid=uid, url=url, driver=kind.driver, command=command)
        self.agent_log = directory / "agent.log"
        self.value = f"canary-{uid}-value-{secrets.token_hex(8)}"
        self.address = f"canary-{uid}-server-{secrets.token_hex(8)}"
        self.home.write(f"job_environment = {json.dumps([VARIABLE])}")

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin's settings."""
        return plugin_form(self.port, self.token, agent_secret_values=json.dumps({"KEY": self.value}))

    @property
    def canaries(self) -> dict[str, str]:
        """What may be nowhere but here, by name."""
        return {f"{self.uid}.token": self.token, f"{self.uid}.value": self.value, f"{self.uid}.address": self.address}

    def form(self, **fields: Any) -> dict[str, Any]:
        """A runner form: the secret in the agent's environment, an address of the installation's own."""
        fields.setdefault("env_json", json.dumps({VARIABLE: "${secret:KEY}"}))
        if fields.pop("docs", True):
            fields.setdefault("mcp_servers_json", json.dumps({"docs": {"url": f"http://127.0.0.1:9/{self.address}"}}))
        return self.kind.remote(DAEMON_ID, **fields)

    def processes(self) -> dict[int, str]:
        """The agents on the machine, pid to start time."""
        return descendants(self.daemon_pid)

    def noted(self, what: str) -> list[dict[str, Any]]:
        """What became of the agent's turns, requests and calls, of one kind."""
        lines = [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []
        return [line for line in lines if line["what"] == what]

    def owed(self) -> list[str]:
        """The jobs in the daemon's table whose end is not proven."""
        tables = [json.loads(data) for path, data in files_below(self.home.state).items() if path.name == "jobs.json"]
        assert tables, "the daemon has a table"
        return [name for table in tables for name, job in table["jobs"].items() if not job["quiesced"]]

    def everything(self) -> str:
        """What reached the machine's agents and this installation's host."""
        host = json.dumps([[action, dict(data)] for action, data in self.host.calls], default=str)
        agents = [self.agent_log, self.agent_log.with_name("environment")]
        return host + json.dumps(self.host.state) + "".join(path.read_text() for path in agents if path.exists())


class Pair:
    """Both."""

    def __init__(self, worker: SdkWorker, watch: Watch, tenants: Mapping[str, Tenant], port: int) -> None:
        """Made by :func:`pair`."""
        self.worker, self.watch, self.tenants, self.port = worker, watch, tenants, port

    @property
    def both(self) -> tuple[Tenant, Tenant]:
        """``A`` and ``B``."""
        return self.tenants["A"], self.tenants["B"]

    def crossed(self, told: Mapping[str, str] | None = None) -> list[str]:
        """Every canary that is on the other side: with its agents or its host, or in what its chat was ``told``."""
        found = []
        for here, there in (("A", "B"), ("B", "A")):
            places = self.tenants[here].everything() + (told or {}).get(here, "")
            found += [f"{name} at {here}" for name, text in self.tenants[there].canaries.items() if text in places]
        return found


@contextlib.asynccontextmanager
async def pair(
    directory: Path, *, urls: Mapping[str, str] | None = None, port: int = 0, join: bool = True, package: Path | None = None
) -> AsyncIterator[Pair]:
    """``A`` and ``B``, with their daemons connected unless told otherwise; ``urls``: where a machine finds the hub."""
    port = port or free_port()
    kind = KINDS[package_roots.current()]
    async with contextlib.AsyncExitStack() as stack:
        environment = watched(directory / "watch")
        worker = await stack.enter_async_context(
            sdk_worker(
                package or built(kind.package),
                directory / "runtime",
                "pool",
                installations={},
                name=kind.package,
                environment=environment,
            )
        )
        tenants = {
            uid: Tenant(worker, directory / uid, port, uid, kind=kind, url=(urls or {}).get(uid, "")) for uid in ("A", "B")
        }
        for tenant in tenants.values():
            stack.push_async_callback(tenant.stop_daemon)
            await worker.install(tenant.uid, tenant.plugin)
        if join:
            await asyncio.gather(*(tenant.join() for tenant in tenants.values()))
        watch = Watch(directory / "watch", {uid: tenant.canaries for uid, tenant in tenants.items()})
        yield Pair(worker, watch, tenants, port)


class Chat:
    """A run that is read all the time, as a host does, also while its installation goes."""

    def __init__(self, stream: AsyncGenerator[RunnerResult, None]) -> None:
        """Begins to read."""
        self._stream = stream
        self.results: list[RunnerResult] = []
        self._news = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._stream):
                async for result in self._stream:
                    self.results.append(result)
                    self._news.set()
        finally:
            self._news.set()

    async def shown(self, text: str) -> None:
        """Wait until a result holds ``text``."""
        async with asyncio.timeout(BOUND):
            while not any(text in json.dumps(each.data, ensure_ascii=False) for each in self.results):
                assert not self._reading.done(), [each.data for each in self.results]
                self._news.clear()
                await self._news.wait()

    async def ended(self) -> list[RunnerResult]:
        """Every result, when the stream is over; raises what it ends with."""
        async with asyncio.timeout(BOUND):
            await asyncio.shield(self._reading)
        return self.results

    async def whole(self) -> Outcome:
        """The run as a person has it in the end."""
        return Outcome(await self.ended())

    async def end(self) -> None:
        """Cancel the run, as a host does."""
        self._reading.cancel()
        await asyncio.wait({self._reading})


def revoked(results: list[RunnerResult]) -> bool:
    """Whether the chat was told, once and before anything else ended the run, that the installation is gone.

    SDK fact: behind it the runtime says by itself that it cannot reach the plugin any more (``runner.forward_exception``).
    """
    ends = [each for each in results if each.type in ("run.completed", "run.failed")]
    codes = [str(each.data.get("code")) for each in ends]
    assert codes in (["coding.revoked"], ["coding.revoked", "runner.forward_exception"]), [each.data for each in results]
    return "Send your message again" in str(ends[0].data["error"])


# ------------------------------------------------------------------ what every package's tests tell of them


async def asked_at_once(at: Pair, asks: str, secret: str) -> dict[str, Outcome]:
    """Both agents ask at the same time, by the same names; ``A`` is allowed and ``B`` is not, at the same time, too.

    ``asks`` and ``secret`` are the steps that ask and that show the environment's secret to somebody.
    """
    chats = {uid: Chat(each.stream(f"{secret}\nsay asked by {uid}\n{asks}", run_id="asks")) for uid, each in at.tenants.items()}
    for uid, chat in chats.items():
        done = await chat.whole()
        assert f"asked by {uid}" in done.text, done.text + done.log
        assert at.tenants[uid].processes(), "the agent waits for its answer"
    assert at.worker.pid("A") == at.worker.pid("B")
    answers = {"A": "1", "B": "deny"}
    outcomes = await asyncio.gather(*(at.tenants[uid].run(text, run_id="answers") for uid, text in answers.items()))
    return dict(zip(answers, outcomes, strict=True))


async def revoked_in_its_turn(at: Pair, directory: Path) -> None:
    """``A`` is revoked while both are in their turn: its chat is told and its agent is gone, ``B``'s answer is whole."""
    a, b = at.both
    gate, pid = directory / "gate", at.worker.pid("B")
    chats = {
        uid: Chat(each.stream(f"say begun\n{each.kind.hold(gate)}\nsay whole", run_id="same"))
        for uid, each in at.tenants.items()
    }
    for chat in chats.values():
        await chat.shown("begun")
    ours, theirs = a.processes(), b.processes()
    assert ours
    assert theirs
    assert await at.watch.settled(lambda: at.watch.astray(pid), GRACE) == {}
    assert min(at.watch.sizes[uid] for uid in "AB") > 100, "both were found"
    before = await at.watch.inventory(pid)
    await at.worker.revoke("A")
    assert revoked(await chats["A"].ended())
    assert await gone(ours, GRACE)
    await until(lambda: a.owed() == [])
    assert set(hostile_trees.living(theirs)) == theirs.keys()
    gate.touch()
    done = await chats["B"].whole()
    assert done.text.split()[-1].endswith("whole"), done.text
    assert at.worker.pid("B") == pid
    assert await at.watch.more_than(before, pid, GRACE) == {}
    assert (await b.run("say still here", run_id="later")).shown == ["still here"]
    assert at.crossed({"A": "", "B": done.text + done.log}) == []
