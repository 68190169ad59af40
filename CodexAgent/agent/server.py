"""One ``codex app-server`` process and the threads it carries: everything it says reaches the thread it is about.

Guarantees:

- routing is by ``threadId`` alone; what names a thread that Codex started for one of ours (``parentThreadId``, or a turn's
  ``rootTurnId``: 0.171 announces an agent's agents by their turns only) reaches that one, so that its questions are not lost;
  a request about any other thread is refused;
- what comes of a thread before its id is known to us waits for it, within a bound;
- what names no thread (warnings about the configuration) reaches every thread;
- the process ends when its last thread has let go of it, and is proven gone then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable
from typing import Protocol

from agent.peer import METHOD_NOT_FOUND, Peer, RequestId
from agent.requests import refuse
from pkg import limits
from pkg.launch import AgentProcess
from pkg.lenient import as_dict, as_str
from pkg.redaction import Redactor
from pkg.rpc_transport import Message


class Thread(Protocol):
    """A thread's owner, as the server needs it."""

    def notified(self, method: str, params: Message, *, child: bool) -> None:
        """The app-server tells something; ``child`` when it is about a thread that Codex started for this one."""
        ...

    def requested(self, request_id: RequestId, method: str, params: Message, *, child: bool) -> None:
        """The app-server asks something and waits for the answer."""
        ...

    def oversized(self, size: int) -> None:
        """A message too large to be taken was left out."""
        ...

    def server_died(self) -> None:
        """The process has ended."""
        ...

    def pause(self) -> Awaitable[None] | None:
        """What reading has to wait for, if anything."""
        ...


class AppServer:
    """A started app-server. ``calls`` go through :attr:`peer`."""

    def __init__(self, process: AgentProcess, redact: Redactor) -> None:
        """The process was started for this object, which owns it from now on."""
        self._process = process
        self.redact = redact
        self.peer = Peer(
            process,
            redact,
            on_notification=self._notified,
            on_request=self._requested,
            on_oversized=self._oversized,
            on_death=self._died,
            pause=self._pause,
        )
        self._threads: dict[str, Thread] = {}
        self._children: OrderedDict[str, str] = OrderedDict()
        self._turns: OrderedDict[str, str] = OrderedDict()
        """Which of our threads a turn is of."""
        self._early: OrderedDict[str, deque[tuple[str, Message]]] = OrderedDict()
        self._users = 0
        self.told: deque[tuple[str, Message]] = deque(maxlen=limits.CODEX_EARLY)
        """What came without a thread's name before any thread was there."""

    @property
    def directory(self) -> str:
        """The absolute directory the process was started in, as its place names it."""
        return self._process.directory

    @property
    def shared(self) -> bool:
        """Whether several sessions use this process."""
        return self._users > 1

    def stderr_tail(self) -> str:
        """The last lines of the process's stderr."""
        return self._process.stderr_tail()

    # ---- threads

    def hold(self) -> None:
        """One more session uses this process; each gives it back with :meth:`release`."""
        self._users += 1

    def attach(self, thread_id: str, thread: Thread) -> None:
        """From now on ``thread`` hears of its id; first of all that came before."""
        self._threads[thread_id] = thread
        for method, params in (*self.told, *self._early.pop(thread_id, ())):
            thread.notified(method, params, child=False)

    def detach(self, thread_id: str) -> None:
        """Nothing about this id matters any more."""
        self._threads.pop(thread_id, None)
        for child in [child for child, parent in self._children.items() if parent == thread_id]:
            del self._children[child]
        for turn in [turn for turn, owner in self._turns.items() if owner == thread_id]:
            del self._turns[turn]

    async def release(self) -> None:
        """A session has let go; the last one ends the process.

        Raises :class:`pkg.errors.ProcessCleanupUnconfirmed` when its end cannot be proven.
        """
        self._users -= 1
        if self._users <= 0:
            await self.end()

    async def end(self) -> None:
        """End the process, whoever uses it, and prove that nothing of it is left; idempotent."""
        try:
            await self._process.stop()
        finally:
            await self.peer.close()

    # ---- what the server says

    def _notified(self, method: str, params: Message) -> None:
        thread_id = as_str(params.get("threadId"))
        if method == "thread/started":
            started = as_dict(params.get("thread"))
            thread_id = as_str(started.get("id"))
            self._adopt(thread_id, as_str(started.get("parentThreadId")))
        if method == "turn/started":
            self._begun(thread_id, as_dict(params.get("turn")))
        if not thread_id:
            if not self._threads:
                self.told.append((method, params))
            for thread in [*self._threads.values()]:
                thread.notified(method, params, child=False)
            return
        found = self._find(thread_id)
        if found is not None:
            found.notified(method, params, child=thread_id not in self._threads)
            return
        kept = self._early.setdefault(thread_id, deque(maxlen=limits.CODEX_EARLY))
        kept.append((method, params))
        while len(self._early) > limits.CODEX_EARLY_THREADS:
            self._early.popitem(last=False)

    def _requested(self, request_id: RequestId, method: str, params: Message) -> None:
        named = as_str(params.get("threadId")) or as_str(params.get("conversationId"))
        found = self._find(named) if named else None
        if found is not None:
            found.requested(request_id, method, params, child=named not in self._threads)
            return
        reply = refuse(request_id, method)
        if reply.error is None:
            self.peer.respond(request_id, reply.result)
        else:
            self.peer.refuse(request_id, METHOD_NOT_FOUND, reply.error[1])

    def _begun(self, thread_id: str, turn: Message) -> None:
        turn_id, root = as_str(turn.get("id")), as_str(turn.get("rootTurnId"))
        if thread_id in self._threads:
            self._turns[turn_id] = thread_id
            while len(self._turns) > limits.CODEX_CHILD_THREADS:
                self._turns.popitem(last=False)
        elif thread_id and thread_id not in self._children:
            self._adopt(thread_id, self._turns.get(root, ""))

    def _adopt(self, child: str, parent: str) -> None:
        owner = self._children.get(parent, parent)
        if not child or child in self._threads or owner not in self._threads:
            return
        self._children[child] = owner
        while len(self._children) > limits.CODEX_CHILD_THREADS:
            self._children.popitem(last=False)

    def _find(self, thread_id: str) -> Thread | None:
        return self._threads.get(thread_id) or self._threads.get(self._children.get(thread_id, ""))

    def _oversized(self, size: int) -> None:
        for thread in [*self._threads.values()]:
            thread.oversized(size)

    def _died(self) -> None:
        for thread in [*self._threads.values()]:
            thread.server_died()

    def _pause(self) -> Awaitable[None] | None:
        for thread in self._threads.values():
            if (waiting := thread.pause()) is not None:
                return waiting
        return None
