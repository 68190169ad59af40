"""What agents ask and how people answer, through the built packages in real workers: every policy, surface, answer and place.

The agents are the scripted ones of each package (local protocol fixtures). They write down on their side what they asked, what
they were answered and how their turns ended, each with its process and turn; every verdict here stands on that, on what people
were shown, and on which processes are alive.

The whole product of policy, surface and answer is tried with one agent in one place (:data:`FULL`), and a table that holds
every value and every pair of agent and place (:data:`TABLE`) with the others. What a person's answer finds after a part was
killed or replaced, and what becomes of a request that nobody answers, is tried for every agent in every place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pkg import langbot_tools, limits
from testkit import daemon_rig
from testkit.cutting_proxy import CuttingProxy
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.daemon_sites import plugin_form, private
from testkit.relay_rig import free_port
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, Shape, built, gone, sdk_worker
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
            given = {"command": command, "cwd": str(cwd)}
            return "perm " + json.dumps({"toolCall": {**call, "rawInput": given, "content": _said(WHY)}, "options": OPTIONS})
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
        return {"yes": "allow", "no": "deny", "always": "for good"}.get(outcome.get("optionId", ""), str(outcome["outcome"]))
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
        return [
            Turn(pid, name, tuple(note for note in lines if (note["pid"], note["turn"]) == (pid, name))) for pid, name in found
        ]

    def of(self, pid: int) -> list[dict[str, Any]]:
        """Everything one process wrote down."""
        return [note for line in self.path.read_text().splitlines() if (note := json.loads(line))["pid"] == pid]


# ------------------------------------------------------------------ the places


class Bench:
    """One package in one shape of worker, with a user's machine beside it and an SSH account."""

    def __init__(self, agent: str, shape: Shape, directory: Path, server: Server, *, port: int = 0, url: str = "") -> None:
        """Started by :func:`bench`; ``url`` is where the daemon finds the hub when something stands in between."""
        self.agent, self.shape, self.server = agent, shape, server
        self.kind = AGENTS[agent]
        self.directory = directory
        self.port, self.token = port or free_port(), secrets.token_urlsafe(32)
        self.worker: SdkWorker
        self.daemon: DaemonProcess | None = None
        self.notebook = Notebook(directory / "notes")
        self.workspace = directory / "workspace"
        self.workspace.mkdir(parents=True)
        self.command = directory / "agent"
        self.home = DaemonHome(
            directory / "machine",
            url or f"ws://127.0.0.1:{self.port}",
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
        own: dict[str, dict[str, Any]] = {"acp": {"state": str(state), "first_session": ""}, "codex": {"known": True}}
        config |= own.get(self.agent, {})
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
        self.shown: Shown = NOTHING_SHOWN
        self.token = f"mark-{next(self.numbers)}-{secrets.token_hex(3)}"
        self.command = f"make {self.token}"
        self._runs = itertools.count(1)

    def script(self, *, edits: bool = False, times: int = 1, command: str = "") -> str:
        """A prompt: tell who works, ask, tell who works."""
        kind = self.bench.kind
        steps = ["who"]
        steps += [kind.edit(self.bench.cwd(self.place) / f"{self.token}.txt")] if edits else []
        steps += [kind.ask(command or self.command, self.bench.workspace)] * times
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
                # Not a service's, which would take some messages a minute only.
                "platform_capabilities": {"adapter": "WebSocketAdapter"},
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
        # Claude Code names no directory of its own.
        directory = self.bench.cwd(self.place) if self.bench.agent == "claude" else self.bench.workspace
        for part in (command, str(directory), "1. ", "2. ", "3. ", "4. "):
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


Shown = Mapping[str, Any]
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
async def bench(agent: str, shape: Shape, directory: Path, server: Server, **way: Any) -> AsyncIterator[Bench]:
    """A bench at work; nothing of it is left afterwards."""
    made = Bench(agent, shape, directory, server, **way)
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
async def benches_of(directory: Path, server: Server, *agents: str) -> AsyncIterator[Benches]:
    """The benches of these agents, at work."""
    async with contextlib.AsyncExitStack() as stack:
        entered = [
            stack.enter_async_context(bench(agent, shape, directory / f"{agent}-{shape}", server))
            for agent in agents
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


@dataclass
class Stage:
    """Every bench, and in every place a request that nobody will answer."""

    benches: Benches
    expiring: dict[str, tuple[Talk, Shown]] = field(default_factory=dict)

    async def begin(self) -> None:
        """Have every agent ask in every place; the others' tests go on meanwhile."""

        async def one(name: str, number: int) -> None:
            place = name.split()[1]
            talk = self.benches[name].talk(place, ("buttons", "text")[number % 2], approval_timeout=SHORTEST)
            self.expiring[name] = talk, (await talk.asking())[1]

        await all_of({name: partial(one, name, number) for number, name in enumerate(self.benches)})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory, server: Server) -> AsyncIterator[Stage]:
    """Every bench, for tests that leave their workers and daemons as they are."""
    async with benches_of(tmp_path_factory.mktemp("benches"), server, *AGENTS) as made:
        found = Stage(made)
        await found.begin()
        yield found


@pytest_asyncio.fixture
async def own(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> AsyncIterator[Benches]:
    """One agent's benches, for tests that end parts of them; ``agent`` is the test's parameter."""
    async with benches_of(tmp_path, server, request.getfixturevalue("agent")) as made:
        yield made


# ------------------------------------------------------------------ the answers


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
async def test_every_answer_under_every_policy_on_every_surface(policy: str, surface: str, stage: Stage) -> None:
    """Our rule: who may, once, in the same turn of the same process; by policy alone where nobody is asked."""
    cases = [each for each in FULL if (each.policy, each.surface) == (policy, surface)]
    made = stage.benches["acp local"]
    await all_of({str(each): partial(played, made, each) for each in cases})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("agent", AGENTS)
async def test_every_agent_in_every_place(agent: str, stage: Stage) -> None:
    """Our rule: the same for all three packages and every place that can keep a turn."""
    cases = [each for each in TABLE if each.agent == agent]
    await all_of({str(each): partial(played, stage.benches[f"{agent} {each.place}"], each) for each in cases})


# ------------------------------------------------------------------ where no turn can wait


async def resumed(talk: Talk, answer: Callable[[], Awaitable[Outcome]], *, kept: bool) -> None:
    """The answer resumes the session in another process, with a grant for exactly that action, once.

    The agent then asks for another action, for the one that was allowed, and for that again. Where turns can wait (``kept``)
    each answer goes on in the new process, else each request ends its turn and takes the grant with it.
    """
    before = talk.turn
    done = await answer()
    said = re.search(r"pid=(\d+) turn=([^;]+);", done.text)
    assert said is not None, done.text

    def now() -> Turn:
        (found,) = [each for each in talk.bench.notebook.turns(GRANTED) if (str(each.pid), each.name) == (said[1], said[2])]
        return found

    assert now().pid != before.pid
    assert "late other" in done.text + json.dumps([each.data for each in done.results]), "asked anew"
    if not kept:
        await until(lambda: now().settled)
        return
    assert (now().asked, now().answers) == (1, [])
    again = await talk.say("3")
    assert now().answers == ["deny", "allow"], "the grant is for that action"
    assert "late action" in again.text + json.dumps([each.data for each in again.results]), "and for once"
    assert started(now().pid)
    last = await talk.say("3")
    assert last.reason == "stop"
    assert now().answers == ["deny", "allow", "deny"]
    assert now().how
    await until(lambda: not started(now().pid))


GRANTED = "has now been allowed"
DENIED = "was not allowed"
"""What an agent is told when the answer came after its turn was gone."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("agent", AGENTS)
async def test_where_no_turn_can_wait_it_is_cancelled_and_the_answer_resumes_the_session(agent: str, stage: Stage) -> None:
    """Our rule: over SSH from the pool nothing lives between runs; a grant is for the one action that was shown."""
    bench = stage.benches[f"{agent} {UNPARKED}"]

    async def allowed(surface: str) -> None:
        talk = bench.talk(UNPARKED, surface)
        _, shown = await talk.asking(command="late action")
        turn = talk.turn
        assert turn.settled
        assert "allow" not in turn.answers
        assert not started(turn.pid)
        await resumed(talk, partial(presses(1), talk, shown), kept=False)
        await talk.over()

    async def denied() -> None:
        talk = bench.talk(UNPARKED)
        await talk.asking(command="late action")
        done = await talk.say(f"deny because {talk.token}-reason")
        assert done.reason == "stop"
        (turn,) = [each for each in bench.notebook.turns(f"{talk.token}-reason") if each.pid != talk.turn.pid]
        assert DENIED in turn.notes[0]["text"]
        assert turn.settled
        # It counted once: the same word again is a message.
        await talk.say("1")
        assert len(bench.notebook.turns(GRANTED)) == 2
        await talk.over()

    async def strangers() -> None:
        talk = bench.talk(UNPARKED, "buttons")
        _, shown = await talk.asking()
        assert "no longer open" in (await talk.press(shown, 1, actor="8")).text
        assert "no longer open" in (await talk.press(NOTHING_SHOWN, 1)).text
        await talk.over()

    await allowed("text")
    await allowed("buttons")
    await denied()
    await strangers()


# ------------------------------------------------------------------ when parts end


async def parked_everywhere(benches: Benches, *, command: str = "late action", keep: Callable[[str], bool]) -> list[Talk]:
    """A request that waits, in every place that ``keep`` names, by turns with buttons and as text."""
    found: list[Talk] = []

    async def one(name: str, surface: str) -> None:
        talk = benches[name].talk(name.split()[1], surface)
        talk.shown = (await talk.asking(command=command))[1]
        found.append(talk)

    names = [name for name in benches if keep(name)]
    await all_of({f"{name} {surface}": partial(one, name, surface) for name in names for surface in ("buttons", "text")})
    return found


def parks(name: str) -> bool:
    """Whether turns can wait there."""
    return not name.endswith(UNPARKED)


async def ended(talks: list[Talk]) -> None:
    """Every process of these is gone, and none of them was allowed anything."""
    processes = {talk.turn.pid: start for talk in talks if (start := started(talk.turn.pid))}
    assert await gone(processes, 60.0)
    for talk in talks:
        assert "allow" not in talk.turn.answers


async def taken_up(talks: list[Talk]) -> None:
    """Each is answered now, and each answer finds its session: allowed where there are buttons, denied where there are none."""

    async def one(talk: Talk) -> None:
        if talk.surface == "buttons":
            await resumed(talk, partial(talk.press, talk.shown, 1), kept=True)
            over = await talk.press(talk.shown, 1)
            assert "no longer open" in over.text
            return
        done = await talk.say(f"deny because {talk.token}-reason")
        assert done.reason == "stop"
        (turn,) = talk.bench.notebook.turns(f"{talk.token}-reason")
        assert turn.pid != talk.turn.pid
        assert DENIED in turn.notes[0]["text"]
        assert turn.settled

    await all_of({f"{talk.place} {talk.surface}": partial(one, talk) for talk in talks})


@pytest.mark.asyncio
@pytest.mark.parametrize("agent", AGENTS)
async def test_whatever_is_killed_or_replaced_no_turn_waits_for_ever(agent: str, own: Benches) -> None:
    """Our rule: a killed worker or daemon and a hub that starts anew end what waited there; the answer resumes it."""
    benches = {made.shape: made for made in own.values()}

    # SIGKILL to the workers, and to the hubs in them.
    talks = await parked_everywhere(own, keep=parks)
    assert all(talk.waiting for talk in talks)
    for made in benches.values():
        killed = made.worker.kill()
        await made.worker.ready(other_than=killed)
    # On a user's machine they outlive the connection, until another hub knows nothing of them.
    await ended([talk for talk in talks if not talk.place.endswith("daemon")])
    await taken_up(talks)
    await ended(talks)

    # SIGKILL to the daemons.
    talks = await parked_everywhere(own, keep=lambda name: name.endswith("daemon"))
    for made in benches.values():
        assert made.daemon is not None
        await made.daemon.kill()
    await ended(talks)
    for made in benches.values():
        seen = made.home.log.read_bytes().count(b": connected")
        await made.start_daemon()
        await until(lambda made=made, seen=seen: made.home.log.read_bytes().count(b": connected") > seen)  # type: ignore[misc]
    await taken_up(talks)

    # Another configuration: another worker, or in the pool another hub in the same one.
    talks = await parked_everywhere(own, keep=parks)
    for made in benches.values():
        await made.replace()
    await ended([talk for talk in talks if talk.place != "daemon"])
    await taken_up(talks)
    await ended(talks)

    # The installation is removed.
    talks = await parked_everywhere(own, keep=parks)
    for made in benches.values():
        await made.worker.revoke()
    await ended([talk for talk in talks if talk.place != "daemon"])
    # No hub will ever come back: the lease ends it, or the daemon's own end.
    for made in benches.values():
        await made.end_daemon()
    await ended(talks)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("agent", AGENTS)
async def test_stop_cancels_what_waits_and_leaves_nothing_to_answer(agent: str, stage: Stage) -> None:
    """Our rule: the agent is told at once; what was shown answers nothing any more, and a number is a message again."""
    mine = {name: made for name, made in stage.benches.items() if made.agent == agent}

    async def stopped(talk: Talk) -> None:
        assert "Stopped" in (await talk.say("/stop")).text
        await talk.over()
        assert talk.turn.cancelled
        assert "allow" not in talk.turn.answers
        assert talk.turn.how not in ("end_turn", "completed"), "nothing goes on after it"
        assert "no longer open" in (await talk.press(talk.shown, 1)).text
        granted = len(talk.bench.notebook.turns(GRANTED))
        word = await talk.say("1")
        assert word.reason == "stop", word.text
        assert len(talk.bench.notebook.turns(GRANTED)) == granted

    talks = await parked_everywhere(mine, keep=parks)
    await all_of({f"{talk.place} {talk.surface}": partial(stopped, talk) for talk in talks})


@pytest.mark.asyncio(loop_scope="module")
async def test_other_chats_push_no_waiting_turn_out(stage: Stage) -> None:
    """Our rule: more kept sessions than the pool of them holds, beside a turn that waits, cost the oldest kept one only."""
    local, there = stage.benches["acp local"], stage.benches["acp pool-daemon"]
    talks = [local.talk("local"), there.talk("pool-daemon")]
    for talk in talks:
        await talk.asking()

    async def chat(bench: Bench, place: str) -> None:
        other = bench.talk(place, keep_warm=2)
        assert "hi" in (await other.say("say hi")).text

    crowd = {f"local {number}": partial(chat, local, "local") for number in range(limits.WARM_SESSIONS + 2)}
    crowd |= {f"pool {number}": partial(chat, there, "pool-daemon") for number in range(4)}
    await all_of(crowd)
    for talk in talks:
        assert talk.waiting
        assert talk.who() in (await talk.say("1")).text
        assert talk.turn.answers == ["allow"]
        await talk.over()


# ------------------------------------------------------------------ LangBot's tools, and the way to the machine


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["acp local", "acp daemon", "acp pool-daemon", "codex local", "codex daemon"])
async def test_a_tool_call_while_nobody_answers_is_held_for_the_next_run(name: str, stage: Stage) -> None:
    """Our rule: a waiting turn has no voice; its call is made with the authority of the run that brings the answer."""
    agent, place = name.split()
    bench = stage.benches[name]
    talk = bench.talk(place, langbot_assets_enabled=True)
    gates = [bench.directory / f"{talk.token}-{number}" for number in (1, 2)]
    call = {"callId": "c", "tool": "langbot_call_tool", "arguments": {"tool_name": "echo", "parameters": {"n": 5}}}
    beside = f"beside {gates[0]} " + ('echo {"n": 5}' if agent == "acp" else json.dumps(call))
    until_then = f"{'until' if agent == 'acp' else 'file'} {gates[1]}"
    ask = bench.kind.ask(talk.command, bench.cwd(place))
    host = bench.worker.host()

    def calls() -> list[Any]:
        return [data for action, data in host.calls if action == "call_tool" and data["run_id"].startswith(talk.token)]

    first = await talk.say("\n".join(["who", beside, ask, until_then, "who", f"say {talk.token}"]))
    assert talk.command in first.text
    gates[0].touch()
    await until(lambda: any(note["what"] == "calling" for note in talk.turn.notes))
    assert not calls()
    answering = asyncio.ensure_future(talk.say("1"))
    await until(lambda: any(note["what"] == "called" for note in talk.turn.notes))
    gates[1].touch()
    done = await answering
    assert talk.who() in done.text
    (told,) = [note["answer"] for note in talk.turn.notes if note["what"] == "called"]
    assert "echo" in json.dumps(told)
    assert '"isError": true' not in json.dumps(told)
    assert [data["run_id"] for data in calls()] == [f"{talk.token}-2"]
    assert talk.turn.answers == ["allow"]
    await talk.over()


@pytest.mark.asyncio
async def test_a_tool_call_that_waits_too_long_is_answered_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: when no run comes in time the agent is told what these tools are for; the next run's calls work again."""
    monkeypatch.setattr(limits, "PARKED_TOOL_WAIT", 0.2)
    tools = langbot_tools.SessionTools(None)
    await tools.park()
    call = {"name": "langbot_call_tool", "arguments": {"tool_name": "echo", "parameters": {}}}
    answer = await tools.answer({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    assert isinstance(answer, dict)
    result = answer["result"]
    assert result["isError"] is True
    assert "only while a message is being answered" in result["content"][0]["text"]
    await tools.close()


@pytest.mark.asyncio
async def test_a_cut_of_some_seconds_changes_nothing_for_who_waits(tmp_path: Path, server: Server) -> None:
    """Our rule: within the lease a blip is invisible, whether the answer comes behind it or in the middle."""
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(CuttingProxy(("127.0.0.1", port)))
        made = await stack.enter_async_context(bench("acp", "dedicated", tmp_path, server, port=port, url=proxy.url))
        for meanwhile in (False, True):
            talk = made.talk("daemon")
            await talk.asking()
            assert proxy.cut()
            refused = proxy.refused
            answering = asyncio.ensure_future(talk.say("1")) if meanwhile else None
            await until(lambda refused=refused: proxy.refused >= refused + 2)  # type: ignore[misc]
            assert talk.waiting
            proxy.restore()
            await until(lambda: any(pipe.live for pipe in proxy.pipes))
            done = await (talk.say("1") if answering is None else answering)
            assert talk.who() in done.text
            assert talk.turn.answers == ["allow"]
            await talk.over()


# ------------------------------------------------------------------ nobody answers


@pytest.mark.asyncio(loop_scope="module")
async def test_what_nobody_answers_is_cancelled_on_its_deadline(stage: Stage) -> None:
    """Our rule: cancelled, not merely denied; the next run says so first, goes on, and a late answer does nothing."""

    async def one(name: str, talk: Talk, shown: Shown) -> None:
        await talk.over()
        turn = talk.turn
        assert turn.cancelled
        assert "allow" not in turn.answers
        assert turn.how not in ("end_turn", "completed"), "nothing goes on after it"
        if not parks(name):
            # Its turn was ended when its run was, and an answer counts until the deadline.
            await until(lambda: time.time() >= shown.get("expires_at", 0))
        late = await talk.press(shown, 1)
        assert "no longer open" in late.text
        done = await talk.say("say going on")
        if parks(name):
            assert "Nobody answered in time" in done.shown[0]
            assert talk.command in done.shown[0]
        assert "going on" in done.text
        word = await talk.say("1")
        assert word.reason == "stop"
        assert talk.turn == turn

    await all_of({name: partial(one, name, talk, shown) for name, (talk, shown) in stage.expiring.items()})
