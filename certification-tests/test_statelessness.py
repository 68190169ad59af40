"""One process serves many installations: nothing of one is found where another is, or where nobody is any more.

The pool of the SDK's own runtime runs two installations with the same ids and different canaries: secrets, texts, addresses,
names. A look from inside (:mod:`testkit.worker_graph`) divides every object of the process into what is everybody's and what is
behind an installation's own entries of the registries, and says by which way a canary can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg.relay_auth import daemon_key
from testkit import daemon_rig
from testkit import planted as planted_places
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.daemon_sites import plugin_form, until_shown
from testkit.langbot_host import build_package
from testkit.object_graph import Needles
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, gone, scripted_agent, sdk_worker
from testkit.sshd import Server, sshd
from testkit.worker_graph import Watch, watched
from testkit.worker_memory import UNKNOWN, WIPING, in_memory

pytestmark = [pytest.mark.shared_runtime, pytest.mark.sdk_worker, pytest.mark.ssh, pytest.mark.timeout(240)]

BOUND = 60.0
"""Seconds any single wait may take; never the verdict itself."""
GRACE = 20.0
"""Seconds an installation's tasks, threads, sockets, files and processes get to leave."""
GRACE_OF_TIMERS = 60.0
"""Seconds until the SDK's own timers have run out, whose contexts lead to ended invocations: 30, and spare."""
PLACES = ("daemon", "ssh")
KINDS = ("token", "value", "text", "answer", "address", "person", "title")
OPTIONS = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}, {"optionId": "no", "name": "No", "kind": "reject_once"}]


class Tenant:
    """One installation with its canaries, its machine and its account."""

    def __init__(self, uid: str, directory: Path, port: int, server: Server, key: Path) -> None:
        self.uid = uid
        self.canaries = {kind: f"canary-{uid}-{kind}-{secrets.token_hex(12)}" for kind in KINDS}
        self.key = key.read_text()
        self.server = server
        self.port = port
        self.directory = directory
        (directory / "ssh").mkdir(parents=True)
        self.home = DaemonHome(directory / "machine", f"ws://127.0.0.1:{port}", token=self.canaries["token"])
        self.home.write('job_environment = ["CANARY"]')
        self.daemon: DaemonProcess | None = None

    @property
    def texts(self) -> dict[str, str]:
        """What is looked for."""
        return {
            **{f"{self.uid}.{kind}": text for kind, text in self.canaries.items()},
            f"{self.uid}.key": self.key.splitlines()[2],
        }

    @property
    def raw(self) -> dict[str, str]:
        """What is made of the token."""
        return {f"{self.uid}.daemon key": daemon_key(self.canaries["token"], DAEMON_ID).hex()}

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin's settings."""
        values = json.dumps({"KEY": self.canaries["value"]})
        form = plugin_form(self.port, self.canaries["token"], agent_secret_values=values)
        return {**form, "ssh-private-key-secret": self.key}

    def form(self, place: str, **fields: Any) -> dict[str, Any]:
        """A runner form."""
        form = {
            "provider": "custom",
            "keep-warm": 300 if self.uid == "A" else 0,
            "env-json": json.dumps({"CANARY": "${secret:KEY}"}),
            "mcp-servers-json": json.dumps({"docs": {"url": f"http://127.0.0.1:9/{self.canaries['address']}"}}),
        }
        if place == "daemon":
            form |= {"location": "daemon", "daemon-id": DAEMON_ID}
        else:
            form |= {"location": "remote-ssh", "acp-command": scripted_agent(), "workspace": str(self.directory / "ssh")}
            form |= {"ssh-target": self.server.target, "ssh-port": str(self.server.port)}
            form |= {"ssh-known-hosts": self.server.known_hosts}
        return {**form, **fields}

    def said(self, *steps: str) -> str:
        """A message with the text's canary in it, to which the agent says the answer's."""
        return "\n".join((f"say heard {self.canaries['text']} answered {self.canaries['answer']}", *steps))

    def asks(self) -> str:
        """The step that asks for a permission."""
        call = {"toolCallId": "t1", "title": f"make {self.canaries['title']}", "kind": "execute"}
        return "perm " + json.dumps(
            {"toolCall": {**call, "rawInput": {"command": f"make {self.canaries['title']}"}}, "options": OPTIONS}
        )


class House:
    """The pool with its tenants."""

    def __init__(self, worker: SdkWorker, watch: Watch, tenants: dict[str, Tenant]) -> None:
        self.worker, self.watch, self.tenants = worker, watch, tenants
        self.numbers = {uid: itertools.count() for uid in tenants}

    @property
    def pid(self) -> int:
        """The process that serves them all."""
        return self.worker.pid("C")

    def stream(self, uid: str, text: str, place: str, *, chat: str = "person_7", **fields: Any) -> Any:
        """The results of one run as they come; every id is the same for everybody, only the person's name is not."""
        tenant = self.tenants[uid]
        more = {"config": tenant.form(place, **fields), "actor_name": tenant.canaries["person"], "conversation": chat}
        return self.worker.stream(text, uid=uid, run_id=f"{place}-{next(self.numbers[uid])}", **more)

    async def run(self, uid: str, text: str, place: str, **more: Any) -> Outcome:
        """One run to its end."""
        async with asyncio.timeout(BOUND):
            return Outcome([result async for result in self.stream(uid, text, place, **more)])

    async def neutral(self) -> None:
        """A run that has nothing of anybody: what the SDK's connection had in hand is of this one then."""
        async with asyncio.timeout(BOUND):
            assert "coding.local_in_pool" in (await self.worker.run("hi", uid="C", run_id="neutral")).log

    async def astray(self) -> dict[str, list[str]]:
        """Every canary that is everybody's, or another's, and stays so."""

        async def look() -> dict[str, list[str]]:
            await self.neutral()
            return await self.watch.astray(self.pid)

        return await self.watch.settled(look, GRACE)

    async def anywhere(self, uid: str, *kinds: str) -> dict[str, list[str]]:
        """Every canary (or each of these kinds) of an installation that is in the process at all, and stays so."""

        async def look() -> dict[str, list[str]]:
            await self.neutral()
            return await self.watch.anywhere(self.pid, *(f"{uid}.{kind}" for kind in kinds), uid=uid)

        return await self.watch.settled(look, GRACE_OF_TIMERS)

    async def more_than(self, before: Mapping[str, int]) -> dict[str, int]:
        """What there is more of than ``before``, and stays so."""
        return await self.watch.more_than(before, self.pid, GRACE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One OpenSSH server that takes two keys."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        other = running.other_identity_file.with_suffix(".pub").read_text()
        with running.identity_file.with_suffix(".pub").open("a") as accepted:
            accepted.write(other)
        yield running


@contextlib.asynccontextmanager
async def house(
    directory: Path, server: Server, package: Path | None = None, more: Mapping[str, str] | None = None
) -> AsyncIterator[House]:
    """The pool with ``A``, ``B`` and ``C``, of which the last has no secrets; ``more`` is of the process's environment."""
    port = free_port()
    keys = {"A": server.identity_file, "B": server.other_identity_file}
    tenants = {uid: Tenant(uid, directory / uid, port, server, key) for uid, key in keys.items()}
    watch = Watch(
        directory / "watch",
        {uid: tenant.texts for uid, tenant in tenants.items()},
        {uid: tenant.raw for uid, tenant in tenants.items()},
    )
    forms = {**{uid: tenant.plugin for uid, tenant in tenants.items()}, "C": {}}
    environment = {**watched(directory / "watch"), **(more or {})}
    async with sdk_worker(
        package or built(), directory / "runtime", "pool", installations=forms, environment=environment
    ) as worker:
        made = House(worker, watch, tenants)
        try:
            yield made
        finally:
            for tenant in tenants.values():
                if tenant.daemon is not None and tenant.daemon.process.returncode is None:
                    await tenant.daemon.terminate()


@dataclass
class Story:
    """What was seen while two installations lived in one process, and after one of them was revoked."""

    strayed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By moment."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Objects of each when both had a parked turn."""
    processes_of_a: int = 0
    survived: dict[str, int] = field(default_factory=dict)
    processes_gone: bool = False
    left_of_a: dict[str, list[str]] = field(default_factory=dict)
    left_of_b: dict[str, list[str]] = field(default_factory=dict)
    seen_before: dict[str, list[str]] = field(default_factory=dict)
    """What of A was in the process just before its revocation."""
    answered: list[str] = field(default_factory=list)


async def told(at: House, directory: Path) -> Story:
    """Two installations at work by turns, in both places; in the end one is revoked in the middle of everything."""
    story = Story()
    a, b = at.tenants["A"], at.tenants["B"]

    def shown(uid: str, outcome: Outcome) -> None:
        own, other = at.tenants[uid], at.tenants["B" if uid == "A" else "A"]
        assert own.canaries["answer"] in outcome.text, outcome.text + outcome.log
        assert not [canary for canary in other.canaries.values() if canary in outcome.text + outcome.log]

    # What there is when B has worked everywhere and A not yet.
    for place in PLACES:
        shown("B", await at.run("B", b.said(), place))
    await at.neutral()
    counts = [await at.watch.inventory(at.pid) for _ in range(3)]
    before = {name: min(each.get(name, 0) for each in counts) for name in counts[0]}

    a.daemon = await daemon_rig.start(a.home)
    for place in PLACES:
        outcomes = await asyncio.gather(*(at.run(uid, at.tenants[uid].said(), place) for uid in "AB"))
        for uid, outcome in zip("AB", outcomes, strict=True):
            shown(uid, outcome)
    for place in PLACES:
        gate = directory / f"gate-{place}"
        running = at.stream("B", b.said(f"until {gate}"), place, chat="person_8")
        got = await until_shown(running, b.canaries["answer"])
        asked = await at.run("A", a.said(a.asks()), "daemon", chat=f"asked_{place}")
        assert a.canaries["title"] in asked.text
        story.strayed[f"A waits for an answer, B runs ({place})"] = await at.astray()
        gate.touch()
        async with asyncio.timeout(BOUND):
            shown("B", Outcome(got + [result async for result in running]))
    for uid in "AB":
        # Over SSH nothing waits: the turn is cancelled, what is open stands in the host's state.
        assert (
            at.tenants[uid].canaries["title"] in (await at.run(uid, at.tenants[uid].said(at.tenants[uid].asks()), "ssh")).text
        )
    assert b.canaries["title"] in (await at.run("B", b.said(b.asks()), "daemon", chat="asked_daemon")).text
    story.strayed["both wait"] = await at.astray()
    story.sizes = dict(at.watch.sizes)

    answer = await at.run("B", "1", "daemon", chat="asked_daemon")
    story.answered = [answer.reason or "", answer.text]
    story.strayed["B was answered, A waits"] = await at.astray()

    # A has a parked turn, a run on its daemon and one over SSH; then it is revoked.
    lost = [at.stream("A", a.said("hang"), place, chat=f"lost_{place}") for place in PLACES]
    for stream in lost:
        await until_shown(stream, a.canaries["answer"])
    story.seen_before = await at.watch.anywhere(at.pid, uid="A")
    processes = {pid: start for each in (at.pid, a.daemon.pid) for pid, start in descendants(each).items()}
    story.processes_of_a = len(processes)
    await at.worker.revoke("A")
    await a.daemon.terminate()
    story.survived = await at.more_than(before)
    story.processes_gone = await gone(processes, GRACE)
    for stream in lost:
        await stream.aclose()
    story.strayed["A is revoked"] = await at.astray()
    story.left_of_b = await at.anywhere("B", "text", "answer", "address", "person", "title")
    story.left_of_a = await at.anywhere("A")
    shown("B", await at.run("B", b.said(), "daemon"))
    return story


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Story:
    """The two installations' story, told once."""
    directory = tmp_path_factory.mktemp("story")
    async with house(directory, server) as at:
        at.tenants["B"].daemon = await daemon_rig.start(at.tenants["B"].home)
        return await told(at, directory)


class TestTwoInstallations:
    """One process, one plugin object, one runner object."""

    def test_nothing_of_one_is_everybodys_or_the_others(self, story: Story) -> None:
        """Our rule: what an installation has is reached through the registries by its full binding, and by no other way."""
        assert len(story.strayed) == 5
        assert not any(story.strayed.values()), json.dumps(story.strayed, indent=1)

    def test_what_each_has_was_really_looked_at(self, story: Story) -> None:
        """The other side of the test above: both sides were found, and the canaries are there while they are used."""
        assert story.sizes["A"] > 100
        assert story.sizes["B"] > 100
        kinds = {"token", "value", "text", "answer", "address", "person", "title", "key"}
        assert story.seen_before.keys() >= {f"A.{kind}" for kind in kinds}

    def test_a_parked_turn_goes_on_while_the_other_waits(self, story: Story) -> None:
        """Our rule: an answer belongs to its own installation's request, though every id is the same."""
        assert story.answered[0] == "stop", story.answered

    def test_after_its_runs_nothing_of_what_was_said_is_left(self, story: Story) -> None:
        """Our rule: texts, names and addresses end with their runs, though the installation and its daemon go on."""
        assert not story.left_of_b, json.dumps(story.left_of_b, indent=1)

    def test_after_revocation_nothing_at_all_is_left(self, story: Story) -> None:
        """Our rule: no text and no secret of a revoked installation is in the process, also in no form of either."""
        assert not story.left_of_a, json.dumps(story.left_of_a, indent=1)

    def test_no_task_thread_socket_file_or_process_survives_revocation(self, story: Story) -> None:
        """Our rule: what a revoked installation had running is gone within the grace, in the worker and on its machines."""
        assert story.processes_of_a > 0
        assert story.survived == {}
        assert story.processes_gone


@pytest.mark.skipif(UNKNOWN is not None, reason=str(UNKNOWN))
@pytest.mark.asyncio
async def test_after_revocation_no_byte_of_a_secret_is_held_by_anything(tmp_path: Path, server: Server) -> None:
    """Our rule: where freed memory is wiped, no secret of a revoked installation is in the memory, in no form of it."""
    async with house(tmp_path, server, more=WIPING) as at:
        a = at.tenants["A"]
        needles = Needles({name: a.texts[f"A.{name}"] for name in ("token", "value", "key")}, a.raw)
        a.daemon = await daemon_rig.start(a.home)
        for place in PLACES:
            assert a.canaries["answer"] in (await at.run("A", a.said(), place)).text
        assert in_memory(at.pid, needles) >= {"token", "value", "key"}
        await at.worker.revoke("A")
        await a.daemon.terminate()

        async def look() -> set[str]:
            await at.neutral()
            await at.watch.anywhere(at.pid, "B.text", uid="B")  # which lets the collector run, and says nothing of A
            return in_memory(at.pid, needles)

        assert await at.watch.settled(look, GRACE_OF_TIMERS) == set()


# ------------------------------------------------------------------ that all of that would be seen


@pytest.fixture(scope="module")
def planted() -> dict[str, Any]:
    """What was found of what was planted, in a process of its own."""
    done = subprocess.run([sys.executable, planted_places.__file__], capture_output=True, text=True, timeout=BOUND, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_text_is_found_wherever_a_program_can_hold_one(planted: dict[str, Any]) -> None:
    """The look's own test: a canary in each place is found, and in none of them once it was taken away."""
    assert len(planted["places"]) >= 69
    assert [name for name in planted["places"] if name not in planted["found"]] == []
    assert planted["left"] == {}


def test_a_text_is_its_owners_as_long_as_only_the_owner_leads_to_it(planted: dict[str, Any]) -> None:
    """The look's own test: behind its own gate a canary is no leak; held by another owner, too, it is one."""
    assert planted["gated"] == []
    assert planted["across"] == ["A"]


SABOTAGES = {
    "kept on the runner": (
        "components/runner/default.py",
        "        async with aclosing",
        "        self.last = ctx\n        async with aclosing",
        "DefaultRunner",
    ),
    "kept in a module": (
        "components/runner/default.py",
        "        async with aclosing",
        "        run_loop.last = ctx.input.text\n        async with aclosing",
        "module pkg.run_loop",
    ),
}


def broken(package_root: Path, scratch: Path, file: str, old: str, new: str) -> Path:
    """The package with one line changed, built."""
    source = scratch / "ACPAgentRunner"
    shutil.copytree(package_root, source, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "dist"))
    changed = source / file
    text = changed.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed.write_text(text.replace(old, new), encoding="utf-8")
    (scratch / "built").mkdir()
    return build_package(source, scratch / "built")


@pytest.mark.asyncio
@pytest.mark.parametrize("how", SABOTAGES)
async def test_a_package_that_keeps_a_message_is_caught(how: str, package_root: Path, tmp_path: Path, server: Server) -> None:
    """The other side of the story: a run's data on the runner or in a module is found, with the way to it."""
    file, old, new, held = SABOTAGES[how]
    async with house(tmp_path, server, broken(package_root, tmp_path, file, old, new)) as at:
        await at.neutral()
        await at.run("A", at.tenants["A"].said(), "ssh")
        found = await at.watch.astray(at.pid)
        assert any(held in step for step in found["A.text"]), found


@pytest.mark.asyncio
async def test_a_package_that_ignores_revocation_is_caught(package_root: Path, tmp_path: Path, server: Server) -> None:
    """The other side of the story: without the hook a run, its process and its secrets stay, and are found."""
    package = broken(package_root, tmp_path, "main.py", "        await installations.revoke(binding)", "        return")
    async with house(tmp_path, server, package) as at:
        await at.neutral()
        before = await at.watch.inventory(at.pid)
        stream = at.stream("A", at.tenants["A"].said("hang"), "ssh")
        await until_shown(stream, at.tenants["A"].canaries["answer"])
        await at.worker.revoke("A")
        now = await at.watch.inventory(at.pid)
        more = {name for name, count in now.items() if count > before.get(name, 0)}
        assert any(name.startswith("task ") for name in more), more
        assert "child process" in more
        assert (await at.watch.anywhere(at.pid, uid="A")).keys() >= {"A.text", "A.key", "A.value"}
        await stream.aclose()
