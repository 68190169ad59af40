"""The messages of one run on their way to a turn: heard at the host, let into the running turn, or waiting for their own.

Guarantees:

- messages keep their order, and each lands once: in the running turn or in the queue. From the first that the agent does not
  take on, the others wait behind it;
- ``/stop`` drops what waits and leaves alone what came after it; what it dropped, and what is left when the run ends, is
  counted, so that nobody's message vanishes without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.steering import SteeringInputItem

from pkg import attachments, limits, steering
from pkg.agent_api import Prompt
from pkg.errors import CodingError

Value = TypeVar("Value")


class Owner(Protocol):
    """The run, as its messages need it."""

    def spawn(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run ``work`` beside the loop; it ends, or is ended, with the run."""
        ...

    async def tell(self, key: str, params: Mapping[str, str] | None = None) -> None:
        """Tell the person a text of the catalogue."""
        ...

    async def tell_refused(self, refused: tuple[attachments.Refusal, ...]) -> None:
        """Tell the person which attachments were left out."""
        ...


class MessageQueue:
    """What a run has still to work on."""

    def __init__(
        self, ctx: RunnerContext, judge: steering.Judge, owner: Owner, steer: Callable[[Prompt], Awaitable[bool]]
    ) -> None:
        """``steer`` puts a message into the running turn and says whether the agent took it."""
        self._ctx = ctx
        self._judge = judge
        self._owner = owner
        self._steer = steer
        self._pulls = bool(ctx.context.available_apis.steering_pull)
        self._pulling: asyncio.Task[list[SteeringInputItem]] | None = None
        self._next_pull = time.monotonic() + steering.first_pull_after(ctx.run_id)
        self._inbox: deque[Prompt] = deque()
        self._steering: asyncio.Task[None] | None = None
        self._queue: deque[Prompt] = deque()
        self._stops = 0
        self.stopping = False
        """A ``/stop`` came that nothing has obeyed yet; whoever does sets it back."""
        self._dropped = 0
        self._apart: list[steering.Message] | None = None

    @property
    def waiting(self) -> bool:
        """Whether a message waits for its own turn."""
        return bool(self._queue)

    def put(self, prompt: Prompt) -> None:
        """Add a message that is to have its own turn."""
        self._queue.append(prompt)

    def put_all(self, prompts: Iterable[Prompt]) -> None:
        """Add several, in their order, before what waits already."""
        self._queue.extendleft(reversed(list(prompts)))

    def take_all(self) -> list[Prompt]:
        """Everything that waits for its own turn."""
        taken = list(self._queue)
        self._queue.clear()
        return taken

    def take(self) -> Prompt:
        """The next message; raises ``IndexError`` when :meth:`more` found none."""
        return self._queue.popleft()

    def stop(self) -> None:
        """What is running is to stop, and what waits is dropped."""
        self.stopping = True
        self._stops += 1
        self._dropped += len(self._inbox) + len(self._queue)
        self._inbox.clear()
        self._queue.clear()

    def take_dropped(self) -> int:
        """How many messages a ``/stop`` dropped that nobody was told of; the count starts again at zero."""
        count, self._dropped = self._dropped, 0
        return count

    async def tick(self, now: float) -> None:
        """Ask the host for messages when it is time, and hear what came; never waits for the host."""
        if self._pulling is not None:
            if self._pulling.done():
                pulled, self._pulling = self._pulling, None
                self._next_pull = now + limits.STEERING_INTERVAL
                await self._heard(pulled.result())
        elif self._pulls and now >= self._next_pull:
            self._pulling = self._owner.spawn(steering.pull(self._ctx))

    async def more(self) -> bool:
        """Whether there is another message: what waits already, then what the host has, then what it gets in a moment."""
        await self._settled()
        if self._queue or not self._pulls:
            return bool(self._queue)
        for pause in (0.0, limits.STEERING_LINGER):
            await asyncio.sleep(pause)
            await self._heard(await self._pulled())
            await self._settled()
            if self._queue:
                return True
        return False

    async def gather(self) -> None:
        """Have everything the host has by now in the queue (or, where the agent takes it, in the turn)."""
        if self._pulls:
            await self._heard(await self._pulled())
        await self._settled()

    async def apart(self) -> list[steering.Message]:
        """What comes in this moment, and reaches neither turn nor queue; nothing when nothing does."""
        heard: list[steering.Message] = []
        self._apart = heard
        try:
            for pause in (0.0, limits.STEERING_LINGER) if self._pulls else ():
                await asyncio.sleep(pause)
                await self._heard(await self._pulled())
                if heard or self.stopping:
                    break
        finally:
            self._apart = None
        return heard

    async def _pulled(self) -> list[SteeringInputItem]:
        pending, self._pulling = self._pulling, None
        return await (pending if pending is not None else steering.pull(self._ctx))

    async def left(self) -> int:
        """How many messages will not be worked on when the run ends now: those waiting, and those on their way here."""
        await self._settled()
        count = len(self._queue)
        if self._pulling is not None:
            await asyncio.wait({self._pulling}, timeout=limits.RECOVERY_WAIT)
            if self._pulling.done():
                judged = self._judge.judge(self._pulling.result())
                count += sum(isinstance(each, steering.Message) for each in judged)
        return count

    async def _heard(self, items: Iterable[SteeringInputItem]) -> None:
        for judged in self._judge.judge(items):
            match judged:
                case steering.Stop():
                    self.stop()
                case steering.Stranger(name):
                    await self._owner.tell("steering.not_yours", {"name": name})
                case steering.Message(prompt, refused) as message:
                    await self._owner.tell_refused(refused)
                    if not prompt.text.strip() and not prompt.attachments:
                        continue
                    if self._apart is not None:
                        self._apart.append(message)
                        continue
                    if len(self._inbox) + len(self._queue) >= limits.STEERING_QUEUE:
                        await self._owner.tell("steering.too_many")
                        continue
                    self._inbox.append(prompt)
        if self._inbox and (self._steering is None or self._steering.done()):
            self._steering = self._owner.spawn(self._distribute())

    async def _distribute(self) -> None:
        while self._inbox:
            prompt, stops = self._inbox.popleft(), self._stops
            taken = False
            try:
                if not self._queue:
                    with contextlib.suppress(CodingError):
                        taken = await self._steer(prompt)
            finally:
                if not taken and stops != self._stops:
                    self._dropped += 1
                elif not taken:
                    self._queue.append(prompt)

    async def _settled(self) -> None:
        """Have every message heard so far in the turn or in the queue; an agent that does not say it took one did not."""
        if self._steering is None or self._steering.done():
            return
        await asyncio.wait({self._steering}, timeout=limits.CANCEL_GRACE)
        if not self._steering.done():
            self._steering.cancel()
            await asyncio.wait({self._steering})
            self._queue.extend(self._inbox)
            self._inbox.clear()
