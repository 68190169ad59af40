"""Real agents in the real processes of their package: accounts stay apart, a session has one writer and outlives its process.

The package is the built one, in a real worker of the SDK's runtime and under its own daemon program; nothing of it is imported
here, so that this process stays the core's. The model is a local protocol fixture.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pkg import texts
from testkit import daemon_rig
from testkit.daemon_rig import DAEMON_ID, DaemonHome, DaemonProcess
from testkit.daemon_sites import command_lines, files_below, plugin_form, private, until_shown
from testkit.relay_rig import free_port
from testkit.responses_fixture import ResponsesFixture, codex_home, responses_fixture
from testkit.run_harness import Outcome
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.real_codex, pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

CODEX = "CodexAgent"
BOUND = 90.0
"""Seconds any single wait may take; never the verdict itself."""
PLACES = ("local", "daemon")
BUSY = texts.render("coding.session_busy", "en_US")
FRESH = texts.render("session.lost_history", "en_US")


class Stored(dict[str, Any]):
    """A host's store in which every conversation has the same session."""

    def __init__(self, session_id: str) -> None:
        super().__init__()
        self._session_id = session_id

    def get(self, key: str, default: Any = None) -> Any:
        """The session, whatever is asked for."""
        return {"value": self._session_id}


class Account:
    """One installation and the account of Codex that it works with: signed in by the real program, with a key of its own."""

    def __init__(self, uid: str, place: str, base: Path, program: Path) -> None:
        """``base`` is a directory of its own."""
        self.uid = uid
        self.key = f"sk-canary-{uid}-{secrets.token_hex(8)}"
        self.place = place
        self.base = base
        self.program = program
        self.home = base / "home"
        self.daemon: DaemonProcess | None = None
        self._starting: asyncio.Future[None] | None = None
        self.worker: SdkWorker
        self.model: ResponsesFixture
        self.environment: dict[str, str] = {}
        self._runs = 0
        self._port = free_port()
        self._token = secrets.token_urlsafe(32)
        if place == "daemon":
            url = f"ws://127.0.0.1:{self._port}"
            command = (str(program),)
            self.machine = DaemonHome(base / "machine", url, token=self._token, driver="codex", command=command, package=CODEX)
            self.workspace = self.machine.workspace
        else:
            self.workspace = base / "workspace"
            self.workspace.mkdir(parents=True)

    def sign_in(self, model: ResponsesFixture) -> None:
        """Have the real program sign in, and the model take the key."""
        model.keys.add(self.key)
        self.model = model
        self.environment = codex_home(self.home, model.url, key=self.key, sign_in=str(self.program))

    @property
    def plugin(self) -> dict[str, Any]:
        """The plugin form."""
        return plugin_form(self._port, self._token) if self.place == "daemon" else {}

    def form(self, **fields: Any) -> dict[str, Any]:
        """The runner form; ``fields`` with underscores for hyphens."""
        form: dict[str, Any] = {"location": self.place, "langbot-assets-enabled": False, "keep-warm": 0}
        if self.place == "daemon":
            form |= {"daemon-id": DAEMON_ID}
        else:
            named = {"command": str(self.program), "workspace": str(self.workspace), "env-json": json.dumps(self.environment)}
            form |= named
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}

    def begin(self) -> None:
        """Start the daemon, where there is one, as soon as the hub is there, which the next run starts."""
        if self.place == "daemon":
            self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        async with asyncio.timeout(BOUND):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        # It finds the account as a person's own: below HOME.
        self.daemon = await daemon_rig.start(self.machine, HOME=str(self.home), TMPDIR=self.environment["TMPDIR"])

    async def end(self) -> None:
        """End the daemon."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self.daemon is not None and self.daemon.process.returncode is None:
            await self.daemon.terminate()

    @property
    def root(self) -> int:
        """The process that the agents of this account are below."""
        return self.worker.pid(self.uid) if self.daemon is None else self.daemon.pid

    def stream(self, text: str, **fields: Any) -> Any:
        """The results of one run as they come."""
        self._runs += 1
        return self.worker.stream(text, uid=self.uid, run_id=f"{self.uid}{self._runs}", config=self.form(**fields))

    async def run(self, text: str, **fields: Any) -> Outcome:
        """One run to its end."""
        async with asyncio.timeout(BOUND):
            return Outcome([result async for result in self.stream(text, **fields)])

    async def killed(self) -> None:
        """SIGKILL to everything of ours that serves this account, and all of it at work again, in other processes."""
        left = descendants(self.root)
        if self.daemon is not None:
            await self.daemon.kill()
        old = self.worker.kill(self.uid)
        assert await gone(left, 30.0)
        await self.worker.ready(self.uid, other_than=old)
        self.begin()

    @property
    def stored(self) -> str:
        """The session that the host has stored."""
        (value,) = self.worker.host(self.uid).state.values()
        session_id: str = value["value"]
        return session_id

    @property
    def rollouts(self) -> dict[str, bytes]:
        """The account's sessions as Codex keeps them."""
        return {path.name: path.read_bytes() for path in (self.home / ".codex" / "sessions").rglob("*.jsonl")}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory outside of temporary ones, which Codex leaves writable."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="lifecycle-")).resolve()
    yield made
    shutil.rmtree(made)


@contextlib.asynccontextmanager
async def two_accounts(
    place: str, directory: Path, program: Path, arrange: Callable[[Account, Account], None] = lambda one, other: None
) -> AsyncIterator[tuple[Account, Account]]:
    """Two installations of the package, each in a worker of its own and with an account of its own.

    ``arrange`` may change how the accounts lie on the disk, when both are signed in and nothing runs yet.
    """
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(responses_fixture())
        model.keys.clear()
        accounts = Account("A", place, directory / "a", program), Account("B", place, directory / "b", program)
        for account in accounts:
            await asyncio.to_thread(account.sign_in, model)
        arrange(*accounts)
        forms = {account.uid: account.plugin for account in accounts}
        environment = private(directory / "worker")
        worker = await stack.enter_async_context(
            sdk_worker(built(CODEX), directory / "runtime", name=CODEX, installations=forms, environment=environment)
        )
        for account in accounts:
            account.worker = worker
            stack.push_async_callback(account.end)
            account.begin()
        yield accounts
        left = functools.reduce(dict.__or__, (descendants(account.root) for account in accounts))
        for account in accounts:
            await account.end()
            await worker.revoke(account.uid)
    assert await gone(left, 30.0)


# ------------------------------------------------------------------ accounts


@pytest.mark.parametrize("place", PLACES)
async def test_codex_auth_and_resume_continuity(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: an account's sign-in and sessions are its own home's, used as they are, and found again by the next process.

    Two installations with an account each talk in turn. Each is answered for its own key; a killed worker (and daemon) goes on
    with the same session; neither home ever holds anything of the other's, and both sign-ins stay as the program wrote them.
    """
    async with two_accounts(place, directory, codex_program) as (one, other):
        words = {one.uid: "PEAR", other.uid: "PLUM"}
        signed = {account.uid: (account.home / ".codex" / "auth.json").read_bytes() for account in (one, other)}
        results = []
        for account in (one, other):
            noted = await account.run(f"remember {words[account.uid]} [[ say noted ]]", keep_warm=300)
            assert noted.shown[-1:] == ["noted"], noted.text
            assert account.model.bearers[-1] == account.key
            results += noted.results
        assert one.stored != other.stored
        lines = command_lines([*descendants(one.root), *descendants(other.root)])
        assert b"app-server" in lines

        for account in (one, other):
            before = account.stored
            await account.killed()
            recalled = await account.run("[[ recall ]]")
            assert recalled.shown[-1:] == [f"recalled: remember {words[account.uid]}"], recalled.text
            assert account.model.bearers[-1] == account.key
            assert account.stored == before
            results += recalled.results

        told = json.dumps([result.data for result in results]).encode()
        for account, stranger in ((one, other), (other, one)):
            auth = account.home / ".codex" / "auth.json"
            assert auth.read_bytes() == signed[account.uid]
            assert not auth.is_symlink()
            assert auth.stat().st_mode & 0o777 == 0o600
            (rollout,) = account.rollouts
            assert account.stored in rollout
            held = files_below(account.home)
            assert [path for path, data in held.items() if account.key.encode() in data] == [auth]
            for foreign in (stranger.key, words[stranger.uid], stranger.stored):
                assert [path for path, data in held.items() if foreign.encode() in data] == []
            assert account.key.encode() not in told + lines
        outside = files_below(directory / "worker", directory / "runtime", one.workspace, other.workspace)
        assert [path for path, data in outside.items() if one.key.encode() in data or other.key.encode() in data] == []


@pytest.mark.parametrize("place", PLACES)
async def test_a_session_of_another_account_is_none_of_this_one_s(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: even an installation that knows another account's session id gets a fresh session, and is told so."""
    async with two_accounts(place, directory, codex_program) as (one, other):
        await one.run("remember PEAR [[ say noted ]]")
        before = one.rollouts
        other.worker.host(other.uid).state = Stored(one.stored)
        outcome = await other.run("[[ recall ]]")
        assert FRESH in outcome.text
        assert "PEAR" not in outcome.text
        assert one.rollouts == before
        assert set(other.rollouts).isdisjoint(before)


@pytest.mark.parametrize("place", PLACES)
async def test_distinct_accounts_work_at_the_same_time(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: nothing of one account waits for another's, not even in the same turn."""
    async with two_accounts(place, directory, codex_program) as accounts, contextlib.AsyncExitStack() as stack:
        gates = [directory / f"gate-{account.uid}" for account in accounts]
        streams = [account.stream(f"[[ hold {gate} ]]") for account, gate in zip(accounts, gates, strict=True)]
        for stream in streams:
            stack.push_async_callback(stream.aclose)
            await until_shown(stream, "holding")
        for gate in gates:
            gate.touch()
        for stream in streams:
            await until_shown(stream, "released")
            assert [result.type async for result in stream][-1] == "run.completed"


# ------------------------------------------------------------------ one writer


def linked_sessions(one: Account, other: Account) -> None:
    """Two homes with sign-ins of their own whose sessions are one directory, as an earlier plugin laid them out."""
    (one.home / ".codex" / "sessions").mkdir()
    (other.home / ".codex" / "sessions").symlink_to(one.home / ".codex" / "sessions")


def linked_home(one: Account, other: Account) -> None:
    """One account under two names."""
    shutil.rmtree(other.home)
    other.home.symlink_to(one.home)
    other.key = one.key


@pytest.mark.parametrize("arrange", [linked_sessions, linked_home])
@pytest.mark.parametrize("place", PLACES)
async def test_session_guard_serialization(
    place: str, arrange: Callable[[Account, Account], None], directory: Path, codex_program: Path
) -> None:
    """Our rule: a session is locked by its real path, so two workers, or two daemons, never write it at once.

    Vendor's rule (0.171): Codex's own lock is per home, so two homes with linked sessions would both write. The second is told
    that the session is in use, and goes on with it, history and all, as soon as it is free.
    """
    async with two_accounts(place, directory, codex_program, arrange) as (one, other):
        gate = directory / "gate"
        noted = await one.run("remember PEAR [[ say noted ]]")
        assert noted.shown[-1:] == ["noted"], noted.text
        other.worker.host(other.uid).state = Stored(one.stored)
        stream = one.stream(f"[[ hold {gate} ]]")
        await until_shown(stream, "holding")
        refused = await other.run("INTRUDER [[ say mine ]]")
        assert (refused.text.splitlines()[0], refused.reason) == (BUSY, "error")
        assert "coding.session_busy" in refused.log
        assert other.worker.host(other.uid).state == {}, "another session took its place"
        gate.touch()
        await until_shown(stream, "released")
        await stream.aclose()
        recalled = await other.run("[[ recall ]]")
        assert "remember PEAR" in recalled.text, recalled.text
        assert FRESH not in recalled.text
        (rollout,) = one.rollouts.values()
        assert b"INTRUDER" not in rollout
        assert all(json.loads(line) for line in rollout.splitlines())


@pytest.mark.parametrize("place", PLACES)
async def test_session_guard_ends_with_its_holder(place: str, directory: Path, codex_program: Path) -> None:
    """Our rule: SIGKILL to whoever had the session frees it, and leaves no writer behind."""
    async with two_accounts(place, directory, codex_program, linked_sessions) as (one, other):
        await one.run("remember PEAR [[ say noted ]]")
        other.worker.host(other.uid).state = Stored(one.stored)
        stream = one.stream(f"[[ hold {directory / 'never'} ]]")
        await until_shown(stream, "holding")
        await one.killed()
        await stream.aclose()
        recalled = await other.run("[[ recall ]]")
        assert "remember PEAR" in recalled.text, recalled.text
