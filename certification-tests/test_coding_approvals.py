"""What agents ask and how people answer, through the built packages in real workers: every policy, surface, answer, place, agent.

The agents are the scripted ones of each package (local protocol fixtures). They write down on their side what they asked, what
they were answered and how their turns ended, each with its process and turn; every verdict here stands on that, on what people
were shown, and on which processes are alive.

The whole product of policy, surface and answer is tried with one agent in one place (:data:`FULL`), and a table that holds every
value and every pair of agent and place (:data:`TABLE`) with the others. What a person's answer finds after a part was killed or
replaced, and what becomes of a request that nobody answers, is tried for every agent in every place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from testkit import daemon_rig
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.daemon_sites import plugin_form, private
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, Shape, built, descendants, gone, sdk_worker
from testkit.sshd import Server, sshd

pytestmark = [pytest.mark.sdk_worker, pytest.mark.ssh, pytest.mark.timeout(240)]

BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
SHORTEST = 30
"""Seconds of the shortest ``approval-timeout`` that the form takes."""
AT_ONCE = 6
"""Conversations at work at the same time; the machine has two cores."""
WHY = "the build needs it"
REASON = "it is late on Friday"

POLICIES = ("ask", "allow-edits", "allow-all", "deny")
SURFACES = ("buttons", "text", "none")
SHAPES: tuple[Shape, ...] = ("dedicated", "pool")
PLACES = ("local", "daemon", "ssh", "pool-daemon", "pool-ssh")
"""Beside a dedicated worker, or on a user's machine, or over SSH, from a dedicated worker and from the pool."""
UNPARKED = "pool-ssh"
"""Where no turn can wait between runs."""
BUTTONS = {
    "field_types": ["select"],
    "action_styles": ["default", "primary", "danger"],
    "supports_updates": True,
    "max_fields": 1,
}


@dataclass(frozen=True)
class Kind:
    """One package with its scripted agent."""

    package: str
    driver: str
    command_field: str
    program: str

    def ask(self, command: str, cwd: Path) -> str:
        """The step that asks for a command."""
        if self.program == "scripted_acp_agent.py":
            call = {"toolCallId": f"t-{secrets.token_hex(4)}", "title": command, "kind": "execute"}
            call |= {"rawInput": {"command": command, "cwd": str(cwd)}}
            return "perm " + json.dumps({"toolCall": {**call, "content": _said(WHY)}, "options": OPTIONS})
        if self.program == "scripted_claude.py":
            return f"ask Bash {json.dumps({'command': command})} {json.dumps({'decision_reason': WHY})}"
        return "approve " + json.dumps({"command": command, "cwd": str(cwd), "reason": WHY})

    def edit(self, path: Path) -> str:
        """The step that asks to write a file."""
        if self.program == "scripted_acp_agent.py":
            change = {"type": "diff", "path": str(path), "oldText": None, "newText": "new\n"}
            call = {"toolCallId": f"t-{secrets.token_hex(4)}", "title": "write", "kind": "edit", "content": [change]}
            return "perm " + json.dumps({"toolCall": {**call, "locations": [{"path": str(path)}]}, "options": OPTIONS})
        if self.program == "scripted_claude.py":
            return f"ask Write {json.dumps({'file_path': str(path), 'content': 'new'})}"
        return "patch " + json.dumps([{"path": str(path), "kind": {"type": "add"}, "diff": "new\n"}])


OPTIONS = [
    {"optionId": "always", "name": "Always", "kind": "allow_always"},
    {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
    {"optionId": "no", "name": "No", "kind": "reject_once"},
]
AGENTS = {
    "acp": Kind("ACPAgentRunner", "acp", "acp-command", "scripted_acp_agent.py"),
    "claude": Kind("ClaudeCodeAgent", "claude-code", "command", "scripted_claude.py"),
    "codex": Kind("CodexAgent", "codex", "command", "scripted_codex.py"),
}


def _said(text: str) -> list[dict[str, Any]]:
    return [{"type": "content", "content": {"type": "text", "text": text}}]


def verdict_of(answer: Any) -> str:
    """What an agent was answered, in words that are the same for all three."""
    if not isinstance(answer, dict):
        return "nothing"
    outcome = answer.get("outcome")
    if isinstance(outcome, dict):
        return {"yes": "allow", "no": "deny", "always": "for good"}.get(outcome.get("optionId", ""), outcome["outcome"])
    if "decision" in answer:
        words = {"accept": "allow", "decline": "deny", "cancel": "cancelled", "acceptForSession": "for good"}
        return words.get(answer["decision"], str(answer["decision"]))
    response = answer.get("response") or {}
    if response.get("behavior") == "allow":
        return "for good" if response.get("updatedPermissions") else "allow"
    return str(response.get("behavior", "error"))


# ------------------------------------------------------------------ the agents' own side


@dataclass(frozen=True)
class Turn:
    """One turn as its agent wrote it down."""

    pid: int
    name: str
    notes: tuple[dict[str, Any], ...]

    @property
    def asked(self) -> int:
        """Requests made."""
        return sum(note["what"] == "asked" for note in self.notes)

    @property
    def answers(self) -> list[str]:
        """What each was answered, those that were taken back because the turn was cancelled included."""
        told = [note for note in self.notes if note["what"] in ("answered", "withdrawn")]
        return ["withdrawn" if note["what"] == "withdrawn" else verdict_of(note["answer"]) for note in told]

    @property
    def cancelled(self) -> bool:
        """Whether the agent was told to stop."""
        return any(note["what"] == "cancel" for note in self.notes)

    @property
    def how(self) -> str:
        """How it ended; empty while it has not."""
        return next((str(note["how"]) for note in self.notes if note["what"] == "ended"), "")

    @property
    def settled(self) -> bool:
        """Whether nothing of it waits: everything it asked was answered, and it has ended."""
        return bool(self.how) and len(self.answers) == self.asked


class Notebook:
    """What the agents of one rig wrote down."""

    def __init__(self, path: Path) -> None:
        """``path`` is the file; there may be none yet."""
        self.path = path

    def turns(self, text: str) -> list[Turn]:
        """The turns whose prompt holds ``text``, in order."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        found = [(note["pid"], note["turn"]) for note in lines if note["what"] == "began" and text in note["text"]]
        return [Turn(pid, name, tuple(note for note in lines if (note["pid"], note["turn"]) == (pid, name))) for pid, name in found]

    def of(self, pid: int) -> list[dict[str, Any]]:
        """Everything one process wrote down."""
        return [note for line in self.path.read_text().splitlines() if (note := json.loads(line))["pid"] == pid]


# ------------------------------------------------------------------ the places


class Bench:
    """One package in one shape of worker, with a user's machine beside it and an SSH account."""

    def __init__(self, agent: str, shape: Shape, directory: Path, server: Server) -> None:
        """Started by :func:`bench`."""
        self.agent, self.shape, self.server = agent, shape, server
        self.kind = AGENTS[agent]
        self.directory = directory
        self.port, self.token = free_port(), secrets.token_urlsafe(32)
        self.worker: SdkWorker
        self.daemon: DaemonProcess | None = None
        self.notebook = Notebook(directory / "notes")
        self.workspace = directory / "workspace"
        self.workspace.mkdir(parents=True)
        self.command = directory / "agent"
        self.home = DaemonHome(
            directory / "machine",
            f"ws://127.0.0.1:{self.port}",
            token=self.token,
            driver=self.kind.driver,
            command=(str(self.command),),
            package=self.kind.package,
        )
        self.home.write(f"approvals = {json.dumps(POLICIES)}")
        self._revision = 1

    def prepare(self) -> None:
        """Write the agent's program: the scripted one with its settings."""
        state = self.directory / "sessions"
        state.mkdir()
        late = ["who", self.kind.ask("late other", self.workspace), self.kind.ask("late action", self.workspace)]
        late += [self.kind.ask("late action", self.workspace)]
        config: dict[str, Any] = {"notes": str(self.notebook.path), "late": late}
        config |= {"acp": {"state": str(state)}, "claude": {}, "codex": {"known": True}}[self.agent]
        program = Path(daemon_rig.__file__).with_name(self.kind.program)
        written = shlex.quote(json.dumps(config))
        given = f"SCRIPTED_CODEX={written} exec" if self.agent == "codex" else "exec"
        last = "" if self.agent == "codex" else written
        self.command.write_text(f'#!/bin/sh\n{given} {sys.executable} -I -S {program} {last} "$@"\n')
        self.command.chmod(0o755)

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin's settings."""
        return {**plugin_form(self.port, self.token), "ssh-private-key-secret": self.server.identity_file.read_text()}

    def form(self, place: str, **fields: Any) -> dict[str, Any]:
        """A runner form for one of the places; ``fields`` with underscores for hyphens."""
        form: dict[str, Any] = {"langbot-assets-enabled": False, "keep-warm": 0, "language": "en_US"}
        if self.agent == "acp":
            form["provider"] = "custom"
        if place.endswith("daemon"):
            form |= {"location": "daemon", "daemon-id": DAEMON_ID}
        else:
            form |= {"location": "local", self.kind.command_field: str(self.command), "workspace": str(self.workspace)}
        if place.endswith("ssh"):
            form |= {"location": "remote-ssh", "ssh-target": self.server.target}
            form |= {"ssh-port": self.server.port, "ssh-known-hosts": self.server.known_hosts}
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    @property
    def places(self) -> tuple[str, ...]:
        """The places that this shape of worker has."""
        return tuple(place for place in PLACES if place.startswith("pool-") == (self.shape == "pool"))

    def cwd(self, place: str) -> Path:
        """The directory in which the agent works there."""
        return self.home.workspace if place.endswith("daemon") else self.workspace

    async def start_daemon(self) -> None:
        """The daemon, at work once the hub is there."""
        self.daemon = await daemon_rig.start(self.home)

    async def end_daemon(self) -> None:
        """End it, gently."""
        if self.daemon is not None and self.daemon.process.returncode is None:
            await self.daemon.terminate()

    async def replace(self) -> None:
        """Give the installation another configuration, and so the worker and the hub in it to another process."""
        self._revision += 1
        await self.worker.install("A", self.plugin, revision=self._revision)

    def talk(self, place: str, surface: str = "text", **fields: Any) -> Talk:
        """A conversation of its own."""
        return Talk(self, place, surface, self.form(place, **fields))


class Talk:
    """One chat, as its members see it."""

    numbers = itertools.count(1)

    def __init__(self, bench: Bench, place: str, surface: str, form: dict[str, Any]) -> None:
        """Made by :meth:`Bench.talk`."""
        self.bench, self.place, self.surface, self.form = bench, place, surface, form
        self.token = f"mark-{next(self.numbers)}-{secrets.token_hex(3)}"
        self.command = f"make {self.token}"
        self._runs = itertools.count(1)

    def script(self, *, edits: bool = False, times: int = 1, command: str = "") -> str:
        """A prompt: tell who works, ask, tell who works."""
        kind, cwd = self.bench.kind, self.bench.cwd(self.place)
        steps = ["who"]
        steps += [kind.edit(cwd / f"{self.token}.txt")] if edits else []
        steps += [kind.ask(command or self.command, cwd)] * times
        # A step with the mark in it, whatever the command is.
        return "\n".join([*steps, "who", f"say {self.token}"])

    async def say(self, text: str, *, actor: str = "7", **more: Any) -> Outcome:
        """Somebody writes a message."""
        conversation = "" if self.surface == "none" else f"group_{self.token}"
        if self.surface == "buttons":
            more["delivery"] = {
                "surface": "platform",
                "automatic_reply": True,
                "supports_streaming": True,
                "platform_capabilities": {"adapter": "TelegramAdapter"},
                "interactions": BUTTONS,
            }
        name = f"{self.token}-{next(self._runs)}"
        async with asyncio.timeout(BOUND):
            return await self.bench.worker.run(
                text, run_id=name, conversation=conversation, actor=actor, config=self.form, **more
            )

    async def press(self, shown: Mapping[str, Any], number: int, *, actor: str = "7") -> Outcome:
        """Somebody presses a button of what was shown."""
        chosen = shown["actions"][number - 1]["id"]
        pressed = {"interaction_id": shown["interaction_id"], "action_id": chosen, "values": {}}
        more = {"event": "interaction.submitted", "input": {"text": "submitted", "interaction": pressed}}
        return await self.say("submitted", actor=actor, **more)

    @property
    def turns(self) -> list[Turn]:
        """What the agent wrote down of this chat's scripts."""
        return self.bench.notebook.turns(self.token)

    @property
    def turn(self) -> Turn:
        """The chat's first turn."""
        return self.turns[0]

    @property
    def waiting(self) -> bool:
        """Whether the turn waits for the answer to its last request, in a living process."""
        turn = self.turn
        return bool(started(turn.pid)) and not turn.how and len(turn.answers) == turn.asked - 1

    def told(self, text: str) -> int:
        """How often the agent was told something, with an answer or as a message."""
        notes = self.bench.notebook.of(self.turn.pid)
        return sum(text in json.dumps(note) for note in notes if note["what"] in ("answered", "heard", "began"))

    def who(self) -> str:
        """What the agent says of its process and turn."""
        return f"pid={self.turn.pid} turn={self.turn.name};"

    async def asking(self, **more: Any) -> tuple[Outcome, dict[str, Any]]:
        """Say the script, see that it ends with the request shown and nothing answered; the run and what was shown."""
        first = await self.say(self.script(**more))
        assert first.reason == "stop", first.text
        assert self.who() in first.text
        command = more.get("command") or self.command
        for part in (command, str(self.bench.cwd(self.place)), "1. ", "2. ", "3. ", "4. "):
            assert part in first.text + json.dumps([each.data for each in first.results]), part
        requests = [each.data for each in first.results if each.type == "action.requested"]
        assert len(requests) == (1 if self.surface == "buttons" else 0)
        if not requests:
            return first, NOTHING_SHOWN
        shown: dict[str, Any] = requests[0]["payload"]
        whole = f"{shown['title']}\n\n{shown['description']}"
        assert command in whole
        assert "4. " in whole
        assert len(whole.encode("utf-16-le")) // 2 <= 4096
        return first, shown

    async def over(self) -> None:
        """See that nothing of the chat's turns waits and no process of them is left."""
        await until(lambda: all(turn.settled for turn in self.turns), f"{self.turns}")
        assert await gone({turn.pid: start for turn in self.turns if (start := started(turn.pid))}, 30.0)


NOTHING_SHOWN: dict[str, Any] = {"interaction_id": "0" * 32, "actions": [{"id": name} for name in ("a", "b", "c", "d")]}
"""Stands for buttons that somebody presses where none were shown."""


def started(pid: int) -> str:
    """A living process's start time, empty for another."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


async def until(true: Callable[[], object], told: str = "") -> None:
    """Wait for what no event tells."""
    try:
        async with asyncio.timeout(BOUND):
            while not true():  # noqa: ASYNC110 - another process's file
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never came: {told}") from None


async def all_of(tasks: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Every one of these, some at once; what fails names itself, and the others go on to their end."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, task: Callable[[], Awaitable[None]]) -> Exception | None:
        async with slots:
            try:
                await task()
            except Exception as exc:  # noqa: BLE001 - raised below
                exc.add_note(name)
                return exc
        return None

    found = await asyncio.gather(*(one(name, task) for name, task in tasks.items()))
    if problems := [each for each in found if each is not None]:
        raise ExceptionGroup(f"{len(problems)} of {len(tasks)}", problems)


@contextlib.asynccontextmanager
async def bench(agent: str, shape: Shape, directory: Path, server: Server) -> AsyncIterator[Bench]:
    """A bench at work; nothing of it is left afterwards."""
    made = Bench(agent, shape, directory, server)
    made.prepare()
    package = made.kind.package
    environment = private(directory / "worker") if shape == "dedicated" else None
    async with sdk_worker(
        built(package),
        directory / "runtime",
        shape,
        name=package,
        installations={"A": made.plugin},
        environment=environment,
    ) as worker:
        made.worker = worker
        await made.start_daemon()
        try:
            yield made
        finally:
            await made.end_daemon()


Benches = dict[str, Bench]
"""By place, for each agent: ``acp local`` and so on."""


@contextlib.asynccontextmanager
async def benches_of(directory: Path, server: Server) -> AsyncIterator[Benches]:
    """Every bench at work."""
    async with contextlib.AsyncExitStack() as stack:
        entered = [
            stack.enter_async_context(bench(agent, shape, directory / f"{agent}-{shape}", server))
            for agent in AGENTS
            for shape in SHAPES
        ]
        found: Benches = {}
        for entering in entered:
            made = await entering
            found |= {f"{made.agent} {place}": made for place in made.places}
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One OpenSSH server for the file."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches(tmp_path_factory: pytest.TempPathFactory, server: Server) -> AsyncIterator[Benches]:
    """Every bench, for tests that leave their workers and daemons as they are."""
    async with benches_of(tmp_path_factory.mktemp("benches"), server) as made:
        yield made


# ------------------------------------------------------------------ the answers


Shown = Mapping[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to answer: what somebody does, and what the agent must have been answered."""

    act: Callable[[Talk, Shown], Awaitable[Outcome]]
    verdict: str
    reason: bool = False
    """Whether the agent is told :data:`REASON`."""
    times: int = 1
    """How often the same action is asked for in the turn."""


def types(*texts: str) -> Callable[[Talk, Shown], Awaitable[Outcome]]:
    """The requester writes these, one after the other."""

    async def act(talk: Talk, shown: Shown) -> Outcome:
        for text in texts:
            done = await talk.say(text)
        return done

    return act


def presses(number: int, then: str = "") -> Callable[[Talk, Shown], Awaitable[Outcome]]:
    """The requester presses a button (where there is none, types its number), and writes something behind it."""

    async def act(talk: Talk, shown: Shown) -> Outcome:
        done = await (talk.say(str(number)) if shown is NOTHING_SHOWN else talk.press(shown, number))
        return await talk.say(then) if then else done

    return act


async def other_words(talk: Talk, shown: Shown) -> Outcome:
    """What is no answer is told so and reaches no agent."""
    done = await talk.say("and please tidy up as well")
    assert "Still waiting" in done.text
    assert talk.command in done.text
    assert "tidy" not in json.dumps(talk.bench.notebook.of(talk.turn.pid))
    assert talk.waiting
    return await talk.say("1")


async def wrong_person(talk: Talk, shown: Shown) -> Outcome:
    """Another member's press changes nothing, and their word is a message of their own."""
    if shown is NOTHING_SHOWN:
        theirs = await talk.say(f"say theirs {talk.token}-other", actor="8")
        assert "theirs" in theirs.text
        one = await talk.say("1", actor="8")
        assert talk.who() not in one.text
    else:
        refused = await talk.press(shown, 1, actor="8")
        assert "Only the person who asked" in refused.text
    assert talk.waiting
    return await talk.say("1")


async def approver(talk: Talk, shown: Shown) -> Outcome:
    """An approver answers for the requester, whose turn it stays."""
    if shown is NOTHING_SHOWN:
        return await talk.say("1", actor="9")
    return await talk.press(shown, 1, actor="9")


async def double(talk: Talk, shown: Shown) -> Outcome:
    """Two answers at the same moment are one."""
    both = await asyncio.gather(presses(1)(talk, shown), presses(1)(talk, shown))
    mine = [done for done in both if talk.who() in done.text]
    assert len(mine) == 1
    return mine[0]


async def stale(talk: Talk, shown: Shown) -> Outcome:
    """What was shown before the last step answers nothing any more, and unknown buttons never do."""
    if shown is not NOTHING_SHOWN:
        further = await talk.press(shown, 4)
        assert further.reason == "stop"
        over = await talk.press(shown, 1)
    else:
        over = await talk.press(NOTHING_SHOWN, 1)
    assert "no longer open" in over.text
    assert talk.waiting
    return await talk.say(REASON if shown is not NOTHING_SHOWN else f"deny because {REASON}")


WAYS: dict[str, Way] = {
    "1": Way(types("1"), "allow"),
    "2": Way(types("2"), "allow", times=2),
    "3": Way(types("3"), "deny"),
    "4": Way(types("4", REASON), "deny", reason=True),
    "4 and why": Way(types(f"4 {REASON}"), "deny", reason=True),
    "allow": Way(types("Allow."), "allow"),
    "allow for this session": Way(types("allow for this session"), "allow", times=2),
    "deny": Way(types("deny"), "deny"),
    "deny because": Way(types(f"deny because {REASON}"), "deny", reason=True),
    "press 1": Way(presses(1), "allow"),
    "press 2": Way(presses(2), "allow", times=2),
    "press 3": Way(presses(3), "deny"),
    "press 4": Way(presses(4, REASON), "deny", reason=True),
    "other words": Way(other_words, "allow"),
    "wrong person": Way(wrong_person, "allow"),
    "approver": Way(approver, "allow"),
    "double": Way(double, "allow"),
    "stale": Way(stale, "deny", reason=True),
}
"""Answers while everything stays alive."""
LATER = ("expired", "worker killed", "worker replaced", "daemon killed", "stopped", "revoked")
"""What else can become of a request; tried for every agent in every place below."""


# ------------------------------------------------------------------ the matrix


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    policy: str
    surface: str
    answer: str
    agent: str = "acp"
    place: str = "local"

    @property
    def asks(self) -> bool:
        """Whether a person is asked about a command."""
        return self.policy in ("ask", "allow-edits") and self.surface != "none"

    def __str__(self) -> str:
        return " / ".join(dataclasses.astuple(self))


FULL = [Case(*each) for each in itertools.product(POLICIES, SURFACES, WAYS)]
TABLE = [
    Case(*row.split(" | "))
    for row in """
ask | buttons | 1 | acp | daemon
ask | text | deny because | acp | daemon
allow-edits | text | double | acp | daemon
ask | text | 2 | acp | ssh
ask | buttons | press 4 | acp | ssh
deny | buttons | press 1 | acp | ssh
ask | buttons | press 1 | acp | pool-daemon
allow-edits | text | wrong person | acp | pool-daemon
ask | none | allow | acp | pool-daemon
ask | text | 1 | claude | local
ask | buttons | press 2 | claude | local
ask | text | deny because | claude | local
allow-edits | buttons | stale | claude | local
allow-all | text | deny | claude | local
ask | text | allow for this session | claude | daemon
ask | buttons | press 4 | claude | daemon
deny | none | 3 | claude | daemon
ask | text | 4 and why | claude | ssh
ask | buttons | approver | claude | ssh
ask | buttons | press 3 | claude | pool-daemon
allow-edits | text | 4 | claude | pool-daemon
ask | text | 1 | codex | local
ask | buttons | press 2 | codex | local
ask | text | deny because | codex | local
allow-edits | text | other words | codex | local
allow-all | none | press 1 | codex | local
ask | buttons | press 1 | codex | daemon
ask | text | deny | codex | daemon
ask | buttons | stale | codex | ssh
allow-edits | text | allow | codex | ssh
ask | text | approver | codex | pool-daemon
deny | buttons | double | codex | pool-daemon
allow-all | buttons | press 1 | acp | pool-ssh
deny | text | deny | acp | pool-ssh
ask | none | 1 | claude | pool-ssh
allow-all | text | 1 | claude | pool-ssh
allow-edits | none | press 3 | codex | pool-ssh
deny | buttons | press 4 | codex | pool-ssh
""".strip().splitlines()
]
"""The diagonal. Requests that are asked from :data:`UNPARKED` have a test of their own."""


def test_the_table_holds_every_value_and_every_pair() -> None:
    """The table itself: nothing of the matrix is left out by accident."""
    assert {each.policy for each in TABLE} == set(POLICIES)
    assert {each.surface for each in TABLE} == set(SURFACES)
    assert {each.answer for each in TABLE} == set(WAYS)
    pairs = set(itertools.product(AGENTS, PLACES)) - {("acp", "local")}
    assert {(each.agent, each.place) for each in TABLE} == pairs
    asked = {(each.agent, each.place) for each in TABLE if each.asks}
    assert asked == {pair for pair in pairs if pair[1] != UNPARKED}
    for agent in AGENTS:
        mine = [each for each in TABLE if each.agent == agent]
        assert {WAYS[each.answer].verdict for each in mine if each.asks} == {"allow", "deny"}
        assert any(WAYS[each.answer].reason for each in mine if each.asks)
        assert {each.policy for each in mine} == set(POLICIES)
        assert {each.surface for each in mine} == set(SURFACES)
    assert len(FULL) == len(set(FULL)) == len(POLICIES) * len(SURFACES) * len(WAYS)


async def played(bench: Bench, case: Case) -> None:
    """One cell: the agent asks, somebody answers, the same turn of the same process goes on, and nothing is left."""
    way = WAYS[case.answer]
    fields = {"approval_policy": case.policy, "approvers": ["9"]}
    talk = bench.talk(case.place, case.surface, **fields)
    edits = case.policy == "allow-edits"
    if not case.asks:
        await _unasked(talk, case, way, edits=edits)
        return
    _, shown = await talk.asking(edits=edits, times=way.times)
    turn = talk.turn
    start = started(turn.pid)
    assert start, "the agent waits in its own process"
    assert turn.answers == (["allow"] if edits else [])
    assert talk.waiting
    done = await way.act(talk, shown)
    assert done.reason == "stop", done.text
    answered = talk.turn
    assert (answered.pid, answered.name) == (turn.pid, turn.name), "another turn"
    assert answered.answers == [*(["allow"] if edits else []), *[way.verdict] * way.times]
    assert talk.who() in done.text, "the same turn goes on"
    assert answered.how in ("end_turn", "completed")
    assert talk.told(REASON) == way.reason, "the reason, once"
    await talk.over()


async def _unasked(talk: Talk, case: Case, way: Way, *, edits: bool) -> None:
    """Where nobody is asked the turn goes on at once; an answer to nothing allows nothing."""
    first = await talk.say(talk.script(edits=edits, times=way.times))
    turn = talk.turn
    verdict = "allow" if case.policy == "allow-all" else "deny"
    assert turn.answers == [*(["allow"] if edits else []), *[verdict] * way.times]
    assert first.reason == "stop"
    assert not [each for each in first.results if each.type == "action.requested"]
    assert verdict == "allow" or talk.command in first.text, "what was refused is told"
    if case.answer.startswith("press") or case.answer in ("stale", "approver", "double"):
        assert "no longer open" in (await talk.press(NOTHING_SHOWN, 1)).text
    else:
        assert (await talk.say(case.answer)).reason == "stop"
    assert talk.turns[0] == turn
    await talk.over()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_answer_under_every_policy_on_every_surface(policy: str, surface: str, benches: Benches) -> None:
    """Our rule: who may, once, before the deadline, in the same turn of the same process; policy alone where nobody is asked."""
    cases = [each for each in FULL if (each.policy, each.surface) == (policy, surface)]
    made = benches["acp local"]
    await all_of({str(each): partial(played, made, each) for each in cases})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("agent", AGENTS)
async def test_every_agent_in_every_place(agent: str, benches: Benches) -> None:
    """Our rule: the same for all three packages and every place that can keep a turn."""
    cases = [each for each in TABLE if each.agent == agent]
    await all_of({str(each): partial(played, benches[f"{agent} {each.place}"], each) for each in cases})
