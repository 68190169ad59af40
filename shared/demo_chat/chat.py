"""The demo: build the package, install it into the SDK's own runtime, talk to it in a terminal.

Nothing between the message and the agent is made for the demo except the host's side: the package is the official builder's,
the worker is the process that LangBot's runtime starts, and a message goes the way every message goes. Ctrl-C cancels as the
host does, by no longer reading the run's results; pressed again it leaves, and everything that was started is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from agent import presets
from demo_chat.person import Lines, Permissions
from demo_chat.screen import Screen
from testkit.sdk_worker import SdkWorker, built, sdk_worker
from tooling import SetupError, steps

SHARED = Path(__file__).resolve().parent.parent
POLICIES = {
    "ask": "you are asked before anything is changed or run",
    "allow-edits": "files in the workspace are changed without asking, everything else is denied",
    "allow-all": "everything the agent wants to do is allowed",
    "deny": "everything the agent asks for is denied",
}
DEMO_AGENT = "the demo agent (no language model)"
CREDENTIALS = re.compile(r"^(ANTHROPIC|CLAUDE|OPENAI|CODEX|GEMINI|GOOGLE|OPENCODE|DASHSCOPE|QWEN)_[A-Z0-9_]+$")
"""Environment variables by which agents find their account; they travel as secrets of the plugin form."""
TICK = 0.2
"""Seconds between two looks at what the screen holds back."""
IMPATIENCE = 3
"""How often Ctrl-C is pressed in vain before the demo ends at once."""
LOG_LINES = 20
LISTED = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    workspace: Path | None
    policy: str
    agent: str
    say: str | None


def options(arguments: Sequence[str]) -> Options:
    """Parse the command line; leaves with a usage text when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="Talk to a coding agent through the real plugin, in this terminal. Ctrl-C cancels, twice it leaves.",
    )
    parser.add_argument("--workspace", type=Path, metavar="DIR", help="where the agent works (default: a new directory)")
    parser.add_argument(
        "--policy", choices=POLICIES, default="allow-edits", help="what the agent may do (default: %(default)s)"
    )
    named = ", ".join(f"acp:{name}" for name in presets.PRESETS)
    parser.add_argument("--agent", default="", help=f"{named}, or a command that speaks ACP (default: {DEMO_AGENT})")
    parser.add_argument("--say", metavar="TEXT", help="send one message, show the answer and leave; fails unless there is one")
    given = parser.parse_args(arguments)
    kind, colon, name = given.agent.partition(":")
    if kind == "acp" and colon and name not in presets.PRESETS:
        parser.error(f"no agent {given.agent}; known: {named}")
    if given.workspace is not None and not given.workspace.is_dir():
        parser.error(f"{given.workspace} is not a directory")
    if given.say is not None and not given.say.strip():
        parser.error("--say needs a message")
    return Options(given.workspace and given.workspace.resolve(), given.policy, given.agent, given.say)


def runner_form(chosen: Options, workspace: Path, gate: Path | None) -> dict[str, Any]:
    """The runner form as an operator would fill it in; with ``gate``, the socket where permission is asked."""
    kind, _, name = chosen.agent.partition(":")
    preset = name if kind == "acp" else ""
    command: Sequence[str] = shlex.split(chosen.agent) if not preset else ()
    if not chosen.agent:
        command = (sys.executable, "-I", "-S", str(SHARED / "demo_agent"))
    if gate is not None:
        command = command or presets.command_for(preset, "", shutil.which)
        command = (sys.executable, "-I", "-S", str(SHARED / "demo_chat" / "gate.py"), str(gate), "--", *command)
    return {
        "provider": "custom" if command else preset,
        "acp-command": shlex.join(command),
        "location": "local",
        "workspace": str(workspace),
        "approval-policy": chosen.policy,
        "env-json": {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            **{name: f"${{secret:{name}}}" for name in os.environ if CREDENTIALS.match(name)},
        },
        "langbot-assets-enabled": False,
        "show-progress": False,
        "language": "en_US",
    }


def plugin_form() -> dict[str, Any]:
    """The plugin form: the accounts that this shell's environment names."""
    return {"agent-secret-values": json.dumps({name: value for name, value in os.environ.items() if CREDENTIALS.match(name)})}


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

    def __init__(self, worker: SdkWorker, screen: Screen, form: dict[str, Any]) -> None:
        """A conversation with the installed runner under this runner form."""
        self._worker = worker
        self._screen = screen
        self._form = form
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
            return False
        self._run.result()
        return bool(self._screen.answer.strip()) and not self._screen.problem

    async def _consume(self, text: str) -> None:
        stream = self._worker.stream(text, uid="demo", run_id=f"demo-{self._count}", config=self._form, resources={})
        async with contextlib.aclosing(stream) as results:
            async for result in results:
                self._screen.result(result.model_dump(mode="json"))

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
            self._screen.note("Ctrl-C again leaves")
        return True

    async def talk(self, lines: Lines) -> None:
        """Send every line that is typed, until there are no more."""
        while True:
            self._screen.ask("you> ")
            line = await lines.next()
            if line is None:
                self._screen.note("bye")
                return
            if line.strip():
                await self.send(line)


async def converse(chosen: Options, out: TextIO, log: Path, base: Path) -> int:
    """The whole demo; the exit code."""
    screen = Screen(out, color=out.isatty() and os.environ.get("TERM", "dumb") != "dumb")
    workspace = chosen.workspace or Path(tempfile.mkdtemp(prefix="coding-demo-"))
    asked = chosen.policy == "ask" and sys.stdin.isatty()
    meaning = POLICIES[chosen.policy] if asked or chosen.policy != "ask" else "nobody can be asked here, so it denies"
    print(f"policy {chosen.policy}: {meaning}", file=out)
    print(f"agent {chosen.agent or DEMO_AGENT} in {workspace}", file=out, flush=True)
    this = asyncio.current_task()
    assert this is not None
    interrupts = Interrupts(this)
    async with contextlib.AsyncExitStack() as stack:
        lines = Lines() if asked or chosen.say is None else None
        gate = base / "gate" if asked and lines is not None else None
        if gate is not None and lines is not None:
            await stack.enter_async_context(Permissions(screen, lines).listening(gate))
        screen.note("building the package and starting it in a worker of the SDK's runtime")
        worker = await stack.enter_async_context(
            sdk_worker(await asyncio.to_thread(built), base / "runtime", installations={"demo": plugin_form()})
        )
        chat = Chat(worker, screen, runner_form(chosen, workspace, gate))
        interrupts.instead = chat.interrupt
        if chosen.say is None:
            if lines is not None:
                await chat.talk(lines)
            return 0
        answered = await chat.send(chosen.say)
        screen.note(f"in {workspace}: {_listing(workspace)}")
        if not answered:
            screen.note(screen.problem or "there was no answer")
            _show_log(log, out)
        return 0 if answered else 1


def _listing(workspace: Path) -> str:
    names = sorted(entry.name for entry in workspace.iterdir())
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "nothing") + more


def _show_log(log: Path, out: TextIO) -> None:
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    if tail:
        print("The last lines of the runtime's log:", *tail, sep="\n  ", file=out)


def main(arguments: Sequence[str]) -> int:
    """Run the demo with these arguments."""
    chosen = options(arguments)
    Interrupts.block()
    with tempfile.TemporaryDirectory(prefix="demo-", ignore_cleanup_errors=True) as directory:
        base = Path(directory)
        log = base / "runtime.log"
        with log.open("wb") as file:
            out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
            for descriptor in (1, 2):  # the runtime and its worker talk a lot
                os.dup2(file.fileno(), descriptor)
            try:
                return asyncio.run(converse(chosen, out, log, base))
            except asyncio.CancelledError:
                return 130
            except SetupError as exc:
                print(exc, file=out)
                return 2
            except Exception as exc:  # noqa: BLE001 - the person reads what went wrong, with the log beside it
                steps.say(repr(exc))
                print(f"The demo could not go on: {exc}", file=out)
                _show_log(log, out)
                return 1
