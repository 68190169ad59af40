"""The demo: build the package, install it into the SDK's own runtime, talk to it in a terminal.

Nothing between the message and the agent is made for the demo except the host's side: the package is the official builder's,
the worker is the process that LangBot's runtime starts, and a message goes the way every message goes. Ctrl-C cancels as the
host does, by no longer reading the run's results; pressed again it leaves, and everything that was started is ended. What the
agent asks is asked by the plugin, in the chat, and the next message answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from agent import DRIVERS, presets
from demo_chat.host import DELIVERY, Host
from demo_chat.packages import PACKAGES, Package
from demo_chat.person import Lines
from demo_chat.screen import Screen
from demo_chat.workstation import LONGEST_BLIP, Workstation
from pkg import limits
from pkg.errors import SettingsError
from pkg.settings import RunnerSettings, parse
from testkit.sdk_worker import SdkWorker, built, sdk_worker
from tooling import ROOT, SetupError, packages, steps

SHARED = Path(__file__).resolve().parent.parent
POLICIES = {
    "ask": "you are asked before anything is changed or run",
    "allow-edits": "files in the workspace are changed without asking, about everything else you are asked",
    "allow-all": "everything the agent wants to do is allowed",
    "deny": "everything the agent asks for is denied",
}
DEMO_AGENT = "the demo agent (no language model)"
CREDENTIALS = re.compile(r"^(ANTHROPIC|CLAUDE|OPENAI|CODEX|GEMINI|GOOGLE|OPENCODE|DASHSCOPE|QWEN)_[A-Z0-9_]+$")
"""Environment variables that hold accounts; a daemon has them in its own environment, elsewhere they travel as secrets of the
plugin form."""
ACCOUNT_PLACES = ("CLAUDE_CONFIG_DIR", "CODEX_HOME")
"""Environment variables that only say where an account is."""
PLACES = ("local", "daemon")
PAUSE = 1.0
"""Seconds the demo's own agent pauses while it works when its path is to be cut: a turn that is over can't be."""
PACE = 0.03
"""Seconds between two words of the loopback model, so that streaming can be seen."""
SLOW_PACE = 0.3
"""The same where its path is to be cut."""
OPEN = "the agent's request was left without an answer"
"""Why messages that end so have failed."""
TICK = 0.2
"""Seconds between two looks at what the screen holds back."""
IMPATIENCE = 3
"""How often Ctrl-C is pressed in vain before the demo ends at once."""
INSTALLATION = "demo"
PROMPT = "you> "
STOP = "/stop"
LOG_LINES = 20
WARNING = re.compile(r"\[(?:WARNING|ERROR|CRITICAL)\]|^\S+ \S+ (?:WARNING|ERROR|CRITICAL) ")
"""A line of the runtime's log, or of the daemon's in it, that says more than what goes on."""
LISTED = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    workspace: Path | None
    policy: str
    agent: str
    say: tuple[str, ...]
    """Messages to send instead of opening a chat."""
    place: str
    blip: float | None
    """Seconds; ``None`` cuts nothing."""
    fixture: bool = False
    """Whether the agent's model is a loopback server."""
    approval_timeout: int | None = None
    """Seconds a request waits for its answer; ``None``: as long as the form's default says."""

    @property
    def own_package(self) -> Package | None:
        """The package that drives this agent alone, if there is one."""
        return PACKAGES.get(self.agent)


def options(arguments: Sequence[str]) -> Options:
    """Parse the command line; leaves with a usage text when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="Talk to a coding agent through the real plugin, in this terminal. Ctrl-C cancels what runs, "
        "twice it leaves; while the agent waits for your answer /stop cancels.",
    )
    parser.add_argument(
        "--workspace", type=Path, metavar="DIR", help="where the agent works, a directory that exists (default: a new one)"
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        help="what the agent may do without an answer (default: ask; allow-edits with a single --say, as nobody answers)",
    )
    parser.add_argument(
        "--approval-timeout",
        type=int,
        metavar="SECONDS",
        help="how long the agent waits for an answer of yours before it gives up, "
        f"{limits.APPROVAL_SECONDS_MIN} to {limits.APPROVAL_SECONDS_MAX}",
    )
    named = ", ".join(f"acp:{name}" for name in presets.PRESETS)
    own = ", ".join(PACKAGES)
    either = " or ".join(PACKAGES)
    parser.add_argument("--agent", help=f"{own}, {named}, or a command that speaks ACP (default: {DEMO_AGENT})")
    parser.add_argument(
        "--fixture",
        action="store_true",
        help=f"with --agent {either}: the real program, pinned, on a loopback model, no account",
    )
    parser.add_argument(
        "--say",
        action="append",
        default=[],
        metavar="TEXT",
        help="send one message, show the answer and leave; fails unless there is one and nothing is left to be answered. "
        "Given again it is the next message of "
        "the same conversation, so that --say 1 allows what the one before made the agent ask",
    )
    parser.add_argument(
        "--place",
        choices=PLACES,
        default="local",
        help="where the agent runs: local, beside the plugin, or daemon, under a daemon process that dials out to the plugin "
        "as one on another machine would (default: %(default)s)",
    )
    parser.add_argument(
        "--blip", type=float, metavar="SECONDS", help="with --place daemon: cut its connection for so long in every answer"
    )
    given = parser.parse_args(arguments)
    kind, colon, name = (given.agent or "").partition(":")
    if kind == "acp" and colon and name not in presets.PRESETS:
        parser.error(f"no agent {given.agent}; known: {named}")
    if given.agent is not None and not _is_command(given.agent):
        parser.error("--agent needs the name of an agent or a command line whose quotes are closed")
    if given.workspace is not None and not given.workspace.is_dir():
        parser.error(f"{given.workspace} is not a directory")
    if not all(text.strip() for text in given.say):
        parser.error("--say needs a message")
    if given.blip is not None and given.place != "daemon":
        parser.error("--blip cuts the connection to a daemon: it needs --place daemon")
    if given.blip is not None and not (math.isfinite(given.blip) and 0 < given.blip <= LONGEST_BLIP):
        parser.error(f"--blip needs a number of seconds, at most {LONGEST_BLIP:g}: a job outlives no longer cut")
    if given.fixture and given.agent not in PACKAGES:
        parser.error(f"--fixture needs --agent {either}")
    if given.approval_timeout is not None:
        try:
            parse(RunnerSettings, {"approval-timeout": given.approval_timeout})
        except SettingsError as exc:
            parser.error(exc.text("en_US"))
    return Options(
        given.workspace and given.workspace.resolve(),
        given.policy or ("allow-edits" if len(given.say) == 1 else "ask"),
        given.agent or "",
        tuple(given.say),
        given.place,
        given.blip,
        given.fixture,
        given.approval_timeout,
    )


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def agent_command(chosen: Options) -> tuple[str, ...]:
    """The agent's command line; empty for one that the runner finds by its name."""
    kind, _, name = chosen.agent.partition(":")
    preset = name if kind == "acp" else ""
    if not chosen.agent:
        slowly = () if chosen.blip is None else ("--pause", str(PAUSE))
        return (sys.executable, "-I", "-S", str(SHARED / "demo_agent"), *slowly)
    if not preset:
        return tuple(shlex.split(chosen.agent))
    return () if chosen.place == "local" else presets.command_for(preset, "", shutil.which)


def environment(chosen: Options, home: Path) -> dict[str, str]:
    """What the agent has of this shell's environment, without credentials.

    A real agent has the person's home, where its account is; one that needs no account has ``home`` and leaves nothing there.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", *ACCOUNT_PLACES) if name in os.environ}
    if chosen.agent and not chosen.fixture:
        return kept
    return {name: value for name, value in kept.items() if name not in ACCOUNT_PLACES} | {"HOME": str(home)}


def credentials() -> dict[str, str]:
    """The accounts that this shell's environment names."""
    return {name: value for name, value in os.environ.items() if CREDENTIALS.match(name) and name not in ACCOUNT_PLACES}


def runner_form(chosen: Options) -> dict[str, Any]:
    """What the runner form says wherever the agent runs."""
    timeout = {} if chosen.approval_timeout is None else {"approval-timeout": chosen.approval_timeout}
    return {
        **timeout,
        "approval-policy": chosen.policy,
        "langbot-assets-enabled": False,
        "show-progress": False,
        "language": "en_US",
    }


def local_form(
    chosen: Options, command: Sequence[str], workspace: Path, home: Path, accounts: Mapping[str, str]
) -> dict[str, Any]:
    """What the runner form says of an agent beside the plugin, as an operator would fill it in."""
    if chosen.own_package is not None:
        agent = {"command": command[0]}
    else:
        provider = "custom" if command else chosen.agent.partition(":")[2]
        agent = {"provider": provider, "acp-command": shlex.join(command)}
    referred = {name: f"${{secret:{name}}}" for name in accounts}
    return {
        **agent,
        "location": "local",
        "workspace": str(workspace),
        "env-json": {**environment(chosen, home), **referred},
    }


def workstation(
    chosen: Options,
    command: Sequence[str],
    workspace: Path,
    home: Path,
    base: Path,
    screen: Screen,
    accounts: Mapping[str, str],
) -> Workstation:
    """The machine of ``--place daemon``: what an operator writes into the form for a local agent, its owner writes there."""
    own = chosen.own_package
    kept = environment(chosen, home)
    return Workstation(
        base / "machine",
        package=ROOT / (packages.SOURCE if own is None else own.package),
        drivers=tuple(DRIVERS) if own is None else (own.driver,),
        command=command,
        workspace=workspace,
        approval=chosen.policy,
        environment={**kept, **accounts},
        shared=(*accounts, *(name for name in ACCOUNT_PLACES if name in kept)),
        blip=chosen.blip,
        tell=screen.aside,
    )


def described(policy: str, *, answered: bool) -> str:
    """What a policy means in a conversation in which somebody answers what is asked, or nobody can."""
    if answered or policy not in ("ask", "allow-edits"):
        return POLICIES[policy]
    asked = "is asked about, and one more --say answers it"
    if policy == "ask":
        return f"everything {asked}"
    return f"files in the workspace are changed without asking; everything else {asked}"


def unanswered(policy: str) -> list[str]:
    """What is told when the last message leaves a request open under this policy."""
    others = [name for name in POLICIES if name not in ("ask", policy, *(("allow-edits",) if policy == "allow-all" else ()))]
    return [
        "The agent waits for an answer, and nothing more is said here: leaving cancels that. Answer in the chat that opens",
        'without --say, or with one more: --say 1, --say allow, --say "deny because …". Or decide beforehand:',
        *(f"  --policy {name}: {POLICIES[name]}" for name in others),
    ]


class Interrupts:
    """Ctrl-C as calls into the loop. The signal stays blocked, also in the worker, so that it ends nothing by itself.

    It leaves, by cancelling the main task once, unless ``instead`` deals with it. Impatience while leaving, or a loop that
    hears nothing, ends this process at once; the worker and the supervisors notice that and end the rest.
    """

    def __init__(self, main: asyncio.Task[Any]) -> None:
        """To be made inside the loop; ``main`` is what leaving cancels."""
        self.instead: Callable[[], bool] | None = None
        """Called in the loop; true when nothing more is to be done."""
        self._loop = asyncio.get_running_loop()
        self._main = main
        self._leaving = 0
        self._unheard = 0
        threading.Thread(target=self._wait, name="interrupts", daemon=True).start()

    @staticmethod
    def block() -> None:
        """To be called before anything is started: everything started later inherits it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def _wait(self) -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            self._unheard += 1
            if self._unheard > IMPATIENCE:
                os._exit(130)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._heard)

    def _heard(self) -> None:
        self._unheard = 0
        if self._leaving or self.instead is None or not self.instead():
            self._leaving += 1
            if self._leaving == 1:
                self._main.cancel()
            elif self._leaving > IMPATIENCE:
                os._exit(130)


class Chat:
    """The conversation: one message at a time, each to its end or until it is cancelled."""

    def __init__(
        self, worker: SdkWorker, host: Host, screen: Screen, form: dict[str, Any], machine: Workstation | None
    ) -> None:
        """A conversation with the installed runner under this runner form; ``machine`` is where the agent runs, if not here."""
        self._worker = worker
        self._host = host
        self._screen = screen
        self._form = form
        self._machine = machine
        self._count = 0
        self._run: asyncio.Task[None] | None = None
        self._warned = False

    async def send(self, text: str) -> bool:
        """One message; whether a non-empty answer came back and no error."""
        self._count += 1
        self._warned = False
        self._screen.begin()
        self._run = asyncio.create_task(self._consume(text))
        try:
            while not (await asyncio.wait({self._run}, timeout=TICK))[0]:
                self._screen.tick()
        except asyncio.CancelledError:
            self._run.cancel()
            await asyncio.wait({self._run})
            raise
        if self._run.cancelled():
            self._screen.note("(cancelled)")
        if self._machine is not None:
            await self._machine.answer_ended()
        if self._run.cancelled():
            if self._host.asking and text != STOP:
                # Shown just before the run was cancelled: nothing that is cancelled can be allowed any more.
                await self.send(STOP)
            return False
        self._run.result()
        return bool(self._screen.answer.strip()) and not self._screen.problem

    async def _consume(self, text: str) -> None:
        stream = self._worker.stream(
            text,
            uid=INSTALLATION,
            run_id=f"demo-{self._count}",
            config=self._form,
            resources={},
            delivery=dict(DELIVERY),
        )
        async with contextlib.aclosing(stream) as results:
            async for result in results:
                self._screen.result(result.model_dump(mode="json"))
                if self._machine is not None and self._screen.begun:
                    self._machine.answer_begun()

    def interrupt(self) -> bool:
        """Ctrl-C: cancel what runs; with nothing running say first that another one leaves. False when it is to leave."""
        running = self._run is not None and not self._run.done()
        if self._run is not None and running and not self._run.cancelling():
            self._screen.note("cancelling (Ctrl-C again leaves)")
            self._run.cancel()
        elif running or self._warned:
            return False
        else:
            self._warned = True
            asked = " and cancels what is asked; /stop cancels it and stays" if self._host.asking else ""
            self._screen.note(f"Ctrl-C again leaves{asked}")
        return True

    async def tell(self, messages: Sequence[str]) -> bool:
        """Send these messages, as long as each is answered; whether all of them were, and no request is left open."""
        for text in messages:
            if len(messages) > 1:
                self._screen.ask(PROMPT)
                self._screen.answered(text, shown=False)
            if not await self.send(text):
                return False
        if self._host.asking:
            for line in unanswered(self._form["approval-policy"]):
                self._screen.note(line)
        return not self._host.asking

    async def talk(self, lines: Lines) -> None:
        """Send every line that is typed, until there are no more."""
        while True:
            line = await lines.answer(self._screen, PROMPT)
            if line is None:
                self._screen.note("bye")
                return
            if line.strip():
                await self.send(line)


async def converse(chosen: Options, out: TextIO, log: Path, base: Path, pinned: Path | None) -> int:
    """The whole demo, with the ``pinned`` program of ``--fixture``; the exit code."""
    screen = Screen(out, color=out.isatty() and os.environ.get("TERM", "dumb") != "dumb")
    workspace = chosen.workspace or Path(tempfile.mkdtemp(prefix="coding-demo-"))
    own = chosen.own_package
    print(f"policy {chosen.policy}: {described(chosen.policy, answered=len(chosen.say) != 1)}", file=out)
    print(f"agent {chosen.agent or DEMO_AGENT} in {workspace}", file=out, flush=True)
    this = asyncio.current_task()
    assert this is not None
    interrupts = Interrupts(this)
    async with contextlib.AsyncExitStack() as stack:
        if chosen.workspace is None:
            stack.callback(_removed_if_empty, workspace)
        lines = None if chosen.say else Lines()
        home = base / "home"
        home.mkdir()
        accounts = credentials() if chosen.agent else {}
        command = agent_command(chosen) if own is None else (own.program,)
        if own is not None and pinned is not None:
            accounts = dict(await stack.enter_async_context(own.fixture(home, PACE if chosen.blip is None else SLOW_PACE)))
            command = (str(pinned),)
        machine = None
        if chosen.place == "daemon":
            machine = workstation(chosen, command, workspace, home, base, screen, accounts)
            machine.prepare()
        plugin = machine.plugin_form if machine is not None else {"agent-secret-values": json.dumps(accounts)}
        place = machine.runner_form if machine is not None else local_form(chosen, command, workspace, home, accounts)
        package = packages.SOURCE if own is None else own.package
        screen.note("building the package and starting it in a worker of the SDK's runtime")
        worker = await stack.enter_async_context(
            sdk_worker(
                await asyncio.to_thread(built, package),
                base / "runtime",
                name=package,
                installations={INSTALLATION: plugin},
                # What a hub notes of the jobs of one demo must not fence the daemon of the next, and without an account the
                # record of decisions goes with the demo. With one the agent is also looked for in the person's home.
                environment={"HOME": str(home)} if machine is not None or not chosen.agent or chosen.fixture else {},
            )
        )
        host = worker.core.hosts[INSTALLATION] = Host(screen.message)
        if machine is not None:
            await stack.enter_async_context(machine.running())
        stack.callback(host.leave)
        chat = Chat(worker, host, screen, {**runner_form(chosen), **place}, machine)
        interrupts.instead = chat.interrupt
        if lines is not None:
            await chat.talk(lines)
            return 0
        answered = await chat.tell(chosen.say)
        screen.note(f"in {workspace}: {_listing(workspace)}")
        if not answered:
            screen.note(screen.problem or (OPEN if host.asking else "there was no answer"))
            if screen.problem or not host.asking:
                _show_log(log, out, all_of_it=not screen.explained)
        return 0 if answered else 1


def _removed_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # something was made in it, or it is gone already
        directory.rmdir()


def _listing(workspace: Path) -> str:
    names = sorted(entry.name for entry in workspace.iterdir())
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "nothing") + more


def _show_log(log: Path, out: TextIO, *, all_of_it: bool) -> None:
    """The end of the log, which goes with the demo; where the answer says what went wrong, only its warnings."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = [line for line in lines if all_of_it or WARNING.search(line)][-LOG_LINES:]
    if tail:
        print(f"The last {'lines' if all_of_it else 'warnings'} of the runtime's log:", *tail, sep="\n  ", file=out)


def main(arguments: Sequence[str]) -> int:
    """Run the demo with these arguments."""
    chosen = options(arguments)
    try:
        # While what is downloaded can still be told, and interrupted.
        pinned = chosen.own_package.pinned() if chosen.fixture and chosen.own_package is not None else None
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    Interrupts.block()
    with tempfile.TemporaryDirectory(prefix="demo-", ignore_cleanup_errors=True) as directory:
        base = Path(directory)
        log = base / "runtime.log"
        with log.open("wb") as file:
            out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
            for descriptor in (1, 2):  # the runtime and its worker talk a lot
                os.dup2(file.fileno(), descriptor)
            try:
                return asyncio.run(converse(chosen, out, log, base, pinned))
            except asyncio.CancelledError:
                return 130
            except SetupError as exc:
                print(exc, file=out)
                return 2
            except Exception as exc:  # noqa: BLE001 - the person reads what went wrong, with the log beside it
                steps.say(repr(exc))
                print(f"The demo could not go on: {exc}", file=out)
                _show_log(log, out, all_of_it=True)
                return 1
