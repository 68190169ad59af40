"""The daemon's jobs: each is one live session of a named agent, opened here as the policy file allows and driven by its hub.

The hub's payload is ``{"agent", "driver", "tools", "actor", "worktree", "spec"}``; an empty agent is the only one there is,
``actor`` says who the job is for and ``worktree`` names a git worktree of the workspace. Once the session is open the job
emits ``SessionOpened`` with ``session_id``, ``directory`` and ``capabilities``, then the session's own events as
:func:`pkg.agent_api.to_json` gives them. The verbs ``prompt``, ``steer``, ``answer`` (``{"request_id", "answer"}``),
``interrupt``, ``renew_mcp`` (``{"servers"}``) and ``close`` are those of :class:`pkg.agent_api.AgentSession` and answer
``true`` or ``false``.

Guarantees: what the policy refuses ends with its code before anything was started; a session's guard is held on this machine
for as long as the session lives; a job returns only when its session has proven that nothing of it is left, and
:class:`pkg.errors.ProcessCleanupUnconfirmed` is never taken for that; what an agent says beyond the relay's bounds is told as
a notice, and the session goes on; LangBot's tools reach the agent through an address of this job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pkg import limits, runtime_support
from pkg.agent_api import (
    AgentDriver,
    AgentEvent,
    AgentSession,
    ApprovalRequested,
    CodecError,
    Json,
    McpServer,
    Notice,
    QuestionAsked,
    SessionSpec,
    TurnEnded,
    answer_from_json,
    mcp_server_from_json,
    prompt_from_json,
    to_json,
)
from pkg.daemon_audit import Audit, JobRecord
from pkg.daemon_jobs import DurableJobTable, JobLauncher
from pkg.daemon_policy import Admitted, AgentEntry, Policy, workspace
from pkg.errors import CodingError, ProcessCleanupUnconfirmed, Refused, SessionUnavailable, TurnInProgress
from pkg.launch import LocalLauncher
from pkg.relay_client import AgentRuntimeDaemonClient
from pkg.relay_errors import AgentRuntimeDaemonError
from pkg.relay_events import Verb
from pkg.relay_mcp_proxy import LocalMCPProxy
from pkg.worktrees import worktree

log = logging.getLogger(__name__)

OPENED: Final = "SessionOpened"
"""The type of a job's first event."""


class Slots:
    """How many jobs this machine runs at once, over all hubs."""

    def __init__(self, most: int) -> None:
        """``most`` jobs in all; each agent has its own limit besides."""
        self._most = most
        self._used: Counter[str] = Counter()

    @contextlib.contextmanager
    def taken(self, agent: AgentEntry) -> Iterator[None]:
        """A place for one job while the block runs; raises :class:`pkg.errors.Refused` (``coding.policy_jobs_full``)."""
        for used, most in ((self._used.total(), self._most), (self._used[agent.name], agent.max_jobs)):
            if used >= most:
                raise Refused("coding.policy_jobs_full", most=most, retryable=True)
        self._used[agent.name] += 1
        try:
            yield
        finally:
            self._used[agent.name] -= 1


class _Live:
    """A job's session, from the moment the job was admitted."""

    def __init__(self, proxy: LocalMCPProxy | None, record: JobRecord) -> None:
        self.proxy = proxy
        self.record = record
        self.asked: dict[str, ApprovalRequested | QuestionAsked] = {}
        """What the agent asked in this turn, for the record of what was answered."""
        self.opened: asyncio.Future[AgentSession] = asyncio.get_running_loop().create_future()
        self.turns = asyncio.Lock()
        """Keeps the hub's words in their order."""

    def servers(self, asked: tuple[McpServer, ...]) -> tuple[McpServer, ...]:
        """The session's MCP servers: those asked for, and LangBot's tools."""
        return asked if self.proxy is None else (*asked, self.proxy.mcp_server())

    def heard(self, event: AgentEvent) -> None:
        """Remember what the agent asks, as long as its turn lasts."""
        if isinstance(event, ApprovalRequested | QuestionAsked):
            while len(self.asked) >= limits.DAEMON_ASKED:
                self.asked.pop(next(iter(self.asked)))
            self.asked[event.request_id] = event
        elif isinstance(event, TurnEnded):
            self.asked.clear()


class Daemon(AgentRuntimeDaemonClient):
    """This machine at one hub."""

    def __init__(
        self,
        *,
        policy: Policy,
        drivers: Mapping[str, AgentDriver],
        table: DurableJobTable,
        slots: Slots,
        audit: Audit,
        unproven: Iterable[str] = (),
        **relay: Any,
    ) -> None:
        """``unproven`` and ``relay`` are as of :class:`pkg.relay_client.AgentRuntimeDaemonClient`; raises ``ValueError``."""
        unproven = tuple(unproven)
        super().__init__(daemon_id=policy.daemon_id, table=table, unproven=unproven, **relay)
        self._policy = policy
        self._drivers = drivers
        self._table = table
        self._slots = slots
        self._audit = audit
        self._live: dict[str, _Live] = {}
        self._stopping = asyncio.Event()
        self._unproven = unproven
        self._proving: set[str] = set()
        self._worktrees = asyncio.Lock()
        self._state = ("", "")

    # -------------------------------------------------------------- what the relay calls

    async def run_job(self, job_id: str, payload: Json) -> None:
        """Open the session the payload describes, pass on its events, and end it."""
        try:
            with self._audit.job(self.url, job_id, payload) as record:
                admitted = self._policy.admit(payload)
                with self._slots.taken(admitted.agent):
                    log.info("job %s: agent %s", job_id, admitted.agent.name)
                    record.started(admitted.agent.name, admitted.spec.cwd)
                    await self._session(job_id, admitted, record)
        except CodingError as exc:
            log.warning("job %s failed: %s", job_id, exc.for_log)
            if exc.detail:
                exc.params = {**exc.params, "detail": exc.detail}
            raise
        except ProcessCleanupUnconfirmed:
            self._prove_later(job_id)
            raise
        finally:
            log.info("job %s is over", job_id)

    async def handle_command(self, job_id: str, verb: Verb, value: Json) -> Json:
        """One of the verbs of an open session; one that comes early waits for it."""
        live = self._live.get(job_id)
        if live is None:
            raise CodingError("coding.daemon_job_gone")
        session = await asyncio.shield(live.opened)
        try:
            if verb == "interrupt":
                await session.interrupt()
            elif verb == "close":
                await _closed(session)
            else:
                async with live.turns:
                    return await self._said(live, session, verb, value)
        except (CodecError, KeyError, TypeError, AttributeError):
            raise CodingError("coding.daemon_payload_invalid") from None
        except Refused as exc:
            self._audit.write(self.url, job_id, "refused", exc.code)
            raise
        except (TurnInProgress, ProcessCleanupUnconfirmed) as exc:
            # Not a success of this command; whether anything is left is told by the end of the job itself.
            log.error("job %s: %s: %s", job_id, verb, exc)
            raise CodingError("coding.daemon_command_failed") from None
        return True

    async def run_forever(self) -> None:
        """Stay connected until cancelled, and go on trying to prove what an earlier process left.

        A hub admits no machine that owes it a proof, so nobody else would ask for it.
        """
        for job_id in self._unproven:
            self._prove_later(job_id)
        await super().run_forever()

    def _prove_later(self, job_id: str) -> None:
        """Go on trying; awaited with everything else when this daemon stops."""
        self._orphans.add(task := self._task(self.on_orphan(job_id, "unproven"), "relay orphan"))
        task.add_done_callback(self._orphans.discard)

    async def on_orphan(self, job_id: str, reason: str) -> None:
        """Try to end what an earlier process left until that is proven, or this program stops."""
        if job_id in self._proving:
            return
        self._proving.add(job_id)
        left = self._table.left(job_id)
        while not await self._table.prove(job_id):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.DAEMON_ORPHAN_RETRY):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
        if left:
            self._audit.write(self.url, job_id, "recovered")
        self.orphan_ended(job_id)

    def on_state(self, state: str, detail: str = "") -> None:
        """One line for the owner; what only repeats (a hub that is not there yet is tried every few seconds) is for DEBUG."""
        level = logging.WARNING if state in ("refused", "lost") else logging.INFO
        state = "no connection" if state == "lost" else state
        if (state, detail) == self._state:
            level = logging.DEBUG
        self._state = (state, detail)
        log.log(level, "%s: %s%s", self.url, state, f" ({detail})" if detail else "")

    async def _shut_down(self) -> None:
        self._stopping.set()
        await super()._shut_down()

    # -------------------------------------------------------------- a session

    async def _session(self, job_id: str, admitted: Admitted, record: JobRecord) -> None:
        spec = admitted.spec
        # The guards are the outer ones: a session that is still ending may still write.
        async with contextlib.AsyncExitStack() as guards, contextlib.AsyncExitStack() as held:
            proxy = self.create_mcp_proxy(job_id) if admitted.tools else None
            if proxy is not None:
                proxy.start()
                held.callback(proxy.stop)
            live = self._live[job_id] = _Live(proxy, record)
            held.callback(self._live.pop, job_id, None)
            spec = dataclasses.replace(spec, mcp_servers=live.servers(spec.mcp_servers))
            launcher = JobLauncher(LocalLauncher(recorded_path=self._policy.path), self._table, job_id)
            if admitted.worktree:
                async with self._worktrees:
                    roots = map(str, admitted.agent.workspaces)
                    made = await worktree(launcher, spec.cwd, admitted.worktree, roots)
                spec = dataclasses.replace(spec, cwd=str(workspace(admitted.agent.workspaces, made)))
            if spec.resume_session_id:
                await guards.enter_async_context(_guard(spec, spec.resume_session_id))
            session = await self._drivers[admitted.agent.driver].open(spec, launcher)
            held.push_async_callback(_closed, session)
            if session.session_id != spec.resume_session_id:
                # A new session's name can only be taken where an agent names sessions of different processes alike.
                try:
                    await guards.enter_async_context(_guard(spec, session.session_id, wait=0.0))
                except SessionUnavailable as exc:
                    if exc.code != "coding.session_busy":
                        raise
            await self.emit_event(job_id, _opened(session))
            live.opened.set_result(session)
            async for event in session.events():
                live.heard(event)
                await self._told(job_id, to_json(event))

    async def _told(self, job_id: str, event: Json) -> None:
        try:
            await self.emit_event(job_id, event)
        except AgentRuntimeDaemonError as exc:
            notice = Notice("coding.daemon_message_too_large", level="warning", params=types.MappingProxyType(exc.params))
            await self.emit_event(job_id, to_json(notice))

    async def _said(self, live: _Live, session: AgentSession, verb: Verb, value: Json) -> Json:
        if verb == "prompt":
            await session.prompt(prompt_from_json(value))
            return True
        if verb == "steer":
            return await session.steer(prompt_from_json(value))
        if verb == "answer":
            request_id, answer = str(value["request_id"]), answer_from_json(value["answer"])
            in_time = await session.answer(request_id, answer)
            if (request := live.asked.get(request_id)) is not None:
                live.record.answered(request, answer, in_time=in_time)
            return in_time
        servers = tuple(mcp_server_from_json(item) for item in value["servers"])
        self._policy.check_servers(servers)
        return await session.renew_mcp(live.servers(servers))


def _opened(session: AgentSession) -> dict[str, Json]:
    capabilities = {field.name: getattr(session.capabilities, field.name) for field in dataclasses.fields(session.capabilities)}
    return {
        "type": OPENED,
        "session_id": session.session_id,
        "directory": session.directory,
        "capabilities": capabilities,
    }


def _guard(
    spec: SessionSpec, session_id: str, *, wait: float = limits.SESSION_GUARD_WAIT
) -> contextlib.AbstractAsyncContextManager[None]:
    """The session's lock, where every place of this account has it."""
    home = spec.env.get("HOME") or runtime_support.home_directory()
    return runtime_support.session_guard(Path(home) / limits.STATE_DIRECTORY / "sessions", spec.cwd, session_id, wait=wait)


async def _closed(session: AgentSession) -> None:
    """Close a session and do not return before its end, however often the caller is cancelled; only then that is raised."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await session.close()
        except asyncio.CancelledError as exc:
            cancelled = exc
            continue
        break
    if cancelled is not None:
        raise cancelled
