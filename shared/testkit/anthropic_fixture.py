"""A loopback Anthropic Messages server for the real Claude Code: local protocol fixture, no model and no vendor's behaviour.

It takes the same scripts in the prompt as :mod:`testkit.model_fixture` (``[[ say hello ]]``, ``[[ run ls ;; say done ]]``, …),
which a person can type and which survive a resumed session. What a script cannot say, a test says in Python:
:meth:`AnthropicFixture.play` takes whole answers and returns the ``[[ play N ]]`` to put into the prompt. Answer *n* is given
to the model call that has *n* assistant messages after that prompt; after the last one the answer is ``over``.

An answer can have several blocks (text, thinking, parallel tool calls), be paced, wait for a file, end with any stop reason,
cost any number of tokens, be an HTTP error or a connection cut in the middle, the first few times or always.

``python3 -m testkit.anthropic_fixture`` serves by itself, for looking at the real program by hand: it prints the environment to
start ``claude`` with.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from testkit.model_fixture import (
    KEY,
    REFUSAL,
    TOKENS,
    AnthropicStream,
    Asked,
    Call,
    ModelFixture,
    flat,
    last_script,
    new_id,
    released,
    serving,
    speaker,
)

BODIES: Final = 64
"""How many of the newest requests are kept whole."""
ALWAYS: Final = 10**9

_PLAY: Final = re.compile(r"play (\d+)$")
_SUMMARY: Final = re.compile(r"summary of (the|this|our) conversation|summarize (the|this|our) conversation", re.IGNORECASE)
SUMMARY: Final = "<summary>the fixture's summary of what came before</summary>"
"""What is answered to a request for a summary of the conversation, which compaction makes."""


@dataclass(frozen=True, slots=True)
class Text:
    """A block of text, sent word by word."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """A block of thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered to one model call."""

    blocks: tuple[Text | Thinking | Call, ...] = ()
    pace: float = 0.0
    """Seconds between two words."""
    hold: Path | None = None
    """Nothing more after the first word of text before this file exists (or :data:`testkit.model_fixture.HOLD_SECONDS`)."""
    stop: str = ""
    """The stop reason; by default ``tool_use`` where there is a call and ``end_turn`` elsewhere."""
    usage: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the API's names; by default 12 in and 9 out."""
    status: int = 0
    """An HTTP error instead of the blocks."""
    error: str = "api_error"
    """The error's type."""
    message: str = REFUSAL
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the error, as ``retry-after``."""
    cut: bool = False
    """The connection is cut after the first word (or at once where there is none)."""
    times: int = ALWAYS
    """How often the error or the cut happens before the blocks are answered."""


def say(text: str, **fields: Any) -> Answer:
    """An answer of one text."""
    return Answer((Text(text),), **fields)


def call(name: str, /, **arguments: Any) -> Answer:
    """An answer that is one tool call."""
    return Answer((Call(name, arguments),))


def refuse(status: int, error: str, message: str = REFUSAL, **fields: Any) -> Answer:
    """An HTTP error."""
    return Answer(status=status, error=error, message=message, **fields)


class AnthropicFixture(ModelFixture):
    """A running server; made by :func:`anthropic_fixture`."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: deque[Mapping[str, Any]] = deque(maxlen=BODIES)
        """The newest requests that offered tools, whole, in order."""
        self.summaries = 0
        """Requests for a summary of the conversation."""
        self._plays: list[tuple[Answer, ...]] = []
        self._met: Counter[tuple[int, int]] = Counter()

    def play(self, *answers: Answer) -> str:
        """What a prompt has to contain so that these are the answers."""
        self._plays.append(answers)
        return f"[[ play {len(self._plays) - 1} ]]"

    def environment(self) -> dict[str, str]:
        """What Claude Code needs in its environment to talk to this server, and to nothing else."""
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_MAX_RETRIES": "1",
        }

    async def answer(self, request: web.Request, asked: Asked, body: Mapping[str, Any]) -> web.StreamResponse:
        """Answer a model call as its script, or what the test has it play, says."""
        if asked.tools:
            self.bodies.append(body)
        if _is_for_summary(asked):
            self.summaries += 1
            return await self._give(request, asked, say(SUMMARY))
        texts = [(message["role"], flat(message.get("content"))) for message in body.get("messages", ())]
        said = [(speaker(role, text), text) for role, text in texts]
        script = last_script(said) if asked.tools else None
        if script is None or (play := _PLAY.match(script[1])) is None:
            return await super().answer(request, asked, body)
        number, at = int(play[1]), sum(role == "assistant" for role, _ in said[script[0] :])
        answers = self._plays[number] if number < len(self._plays) else ()
        answer = answers[at] if at < len(answers) else say("over")
        self._met[number, at] += 1
        failing = self._met[number, at] <= answer.times
        if answer.status and failing:
            error = {"type": answer.error, "message": answer.message}
            return web.json_response({"type": "error", "error": error}, status=answer.status, headers=answer.headers)
        return await self._give(request, asked, answer, cut=answer.cut and failing)

    async def _give(self, request: web.Request, asked: Asked, answer: Answer, *, cut: bool = False) -> web.StreamResponse:
        if not asked.streaming:
            if cut and request.transport is not None:
                request.transport.abort()
            return web.json_response(_whole(asked, answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the agent has cancelled
            await self._write(AnthropicStream(response, asked), request, answer, cut=cut)
        return response

    async def _write(self, stream: AnthropicStream, request: web.Request, answer: Answer, *, cut: bool) -> None:
        await stream.started({"input_tokens": TOKENS["in"], **answer.usage})
        held = answer.hold
        for index, block in enumerate(answer.blocks):
            match block:
                case Text(text):
                    await stream.opened(index, None)
                    for at, word in enumerate(re.findall(r"\S+\s*|\s+", text)):
                        if at and answer.pace:
                            await asyncio.sleep(answer.pace)
                        await stream.said(index, word)
                        if cut:
                            break
                        if held is not None:
                            if not await released(held, request):
                                self.dropped += 1
                                return
                            held = None
                case Thinking(text):
                    opened = {"type": "thinking", "thinking": "", "signature": ""}
                    await stream.send("content_block_start", index=index, content_block=opened)
                    for delta in (
                        {"type": "thinking_delta", "thinking": text},
                        {"type": "signature_delta", "signature": "AA=="},
                    ):
                        await stream.send("content_block_delta", index=index, delta=delta)
                case Call():
                    await stream.opened(index, block)
                    await stream.called(index, block)
            if cut:
                break
            await stream.send("content_block_stop", index=index)
        if cut:
            if request.transport is not None:
                request.transport.abort()
            return
        await stream.ended(_stop(answer), {"output_tokens": TOKENS["out"], **answer.usage})


def _stop(answer: Answer) -> str:
    return answer.stop or ("tool_use" if any(isinstance(block, Call) for block in answer.blocks) else "end_turn")


def _whole(asked: Asked, answer: Answer) -> dict[str, Any]:
    """An answer that is not streamed; what it says of pace, holding and cutting is for streams."""
    content: list[dict[str, Any]] = []
    for block in answer.blocks:
        match block:
            case Text(text):
                content.append({"type": "text", "text": text})
            case Thinking(text):
                content.append({"type": "thinking", "thinking": text, "signature": "AA=="})
            case Call(name, arguments):
                content.append({"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": dict(arguments)})
    usage = {"input_tokens": TOKENS["in"], "output_tokens": TOKENS["out"], **answer.usage}
    message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": asked.model, "content": content}
    return {**message, "stop_reason": _stop(answer), "stop_sequence": None, "usage": usage}


def _is_for_summary(asked: Asked) -> bool:
    """Whether the last thing said asks for a summary of the conversation."""
    role, text = asked.history[-1] if asked.history else ("", "")
    return role == "user" and last_script([(role, text)]) is None and _SUMMARY.search(text) is not None


@contextlib.asynccontextmanager
async def anthropic_fixture() -> AsyncIterator[AnthropicFixture]:
    """A server on a free loopback port, gone afterwards with every answer it still holds."""
    async with serving(AnthropicFixture()) as fixture:
        yield fixture


async def _serve() -> None:
    async with anthropic_fixture() as fixture:
        print(" ".join(f"{name}={value}" for name, value in fixture.environment().items()), "claude", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve())
