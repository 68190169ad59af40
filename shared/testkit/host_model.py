"""A model of how LangBot 4.11.2 brings a run's results to a person: the oracle of the delivery tests.

It states in a page what was measured on the real host (its web chat, its Telegram adapter against a local Bot API, agent
bots): which result opens, changes or closes which message, what is cut, refused or sent twice. It is a model, not the host;
the suite checks the real host apart from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.entities.io.actions.enums import PluginToRuntimeAction
from langbot_plugin.entities.io.errors import ActionCallError

FRAME_BYTES: Final = 1024 * 1024
PLACEHOLDER: Final = "Thinking..."
HOST_NOTICE: Final = "Agent runner execution failed."


class FrameTooLarge(Exception):
    """A result is larger than the runtime forwards: the run would fail."""


def result_bytes(result: RunnerResult) -> int:
    """Bytes of a result as the runtime encodes it."""
    return len(json.dumps(result.model_dump(mode="json")))


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


class Rejected(Exception):
    """The chat service refused a call."""


@dataclass
class TelegramChat:
    """Messages of one chat as the Bot API keeps them; ``trail`` has every text each message ever showed."""

    messages: list[str] = field(default_factory=list)
    trail: list[list[str]] = field(default_factory=list)

    def send(self, text: str) -> int:
        """A new message; trimmed, refused when empty or longer than 4,096 UTF-16 units."""
        text = text.strip()
        if not text:
            raise Rejected("message text is empty")
        if _units(text) > 4096:
            raise Rejected("message is too long")
        self.messages.append(text)
        self.trail.append([text])
        return len(self.messages) - 1

    def edit(self, index: int, text: str) -> None:
        """Change a message; refused when nothing changes."""
        text = text.strip()
        if not text:
            raise Rejected("message text is empty")
        if _units(text) > 4096:
            raise Rejected("message is too long")
        if self.messages[index] == text:
            raise Rejected("message is not modified")
        self.messages[index] = text
        self.trail[index].append(text)


@dataclass
class TelegramBubble:
    """One message streamed by the host's Telegram adapter."""

    chat: TelegramChat
    index: int
    visible: bool = False

    def chunk(self, text: str, sequence: int, *, final: bool) -> None:
        """What the adapter does with one chunk; raises :class:`Rejected` where the host sees an error."""
        if not text.strip():
            return
        if self.visible and (sequence - 1) % 8 and not final:
            return
        try:
            self.chat.edit(self.index, text)
        except Rejected as exc:
            if "too long" not in str(exc):
                raise
            self.chat.edit(self.index, text[:4000] + "\n\n… (truncated)")
        self.visible = True


@dataclass
class Screen:
    """What a person sees at the end: the messages, and those that still look unfinished."""

    messages: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    trail: list[list[str]] = field(default_factory=list)
    """Every text each message showed on its way."""
    finish_reason: str = ""
    failed: str = ""
    """Code of ``run.failed``."""


@dataclass(frozen=True)
class _Output:
    text: str
    final: bool
    sequence: int = 0


def _outputs(results: Sequence[RunnerResult], screen: Screen) -> list[_Output]:
    """The run's visible outputs; checks the frame limit and that nothing follows the terminal result."""
    outputs: list[_Output] = []
    ended = False
    for result in results:
        assert not ended, f"{result.type} after the terminal result"
        if result_bytes(result) > FRAME_BYTES:
            raise FrameTooLarge(result.type)
        kind = str(getattr(result.type, "value", result.type))
        if kind == "message.delta":
            chunk = result.data["chunk"]
            text = chunk["all_content"] if chunk["all_content"] is not None else chunk["content"]
            outputs.append(_Output(text, chunk["is_final"], chunk["msg_sequence"]))
        elif kind == "message.completed":
            outputs.append(_Output(result.data["message"]["content"], final=True))
        elif kind == "run.completed":
            ended = True
            screen.finish_reason = result.data["finish_reason"]
            if result.data.get("message"):
                outputs.append(_Output(result.data["message"]["content"], final=True))
        elif kind == "run.failed":
            ended = True
            screen.failed = result.data["code"]
            outputs.append(_Output(HOST_NOTICE, final=False))
    assert ended, "no terminal result"
    return outputs


def web_stream(results: Sequence[RunnerResult]) -> Screen:
    """The dashboard's web chat, streaming: each output replaces the open bubble, a final one closes it."""
    screen = Screen()
    open_bubble = False
    for output in _outputs(results, screen):
        if not open_bubble:
            screen.messages.append("")
            screen.trail.append([])
        screen.messages[-1] = output.text
        screen.trail[-1].append(output.text)
        open_bubble = not output.final
    if open_bubble:
        screen.unfinished.append(screen.messages[-1])
    return screen


def web_last(results: Sequence[RunnerResult]) -> Screen:
    """Any surface without streaming and without a length limit: the last output alone."""
    screen = Screen()
    outputs = _outputs(results, screen)
    screen.messages = [output.text for output in outputs[-1:]]
    return screen


def telegram_last(results: Sequence[RunnerResult]) -> Screen:
    """Telegram without streaming: the last output alone, and nothing at all when it is too long."""
    screen = Screen()
    chat = TelegramChat()
    for output in _outputs(results, screen)[-1:]:
        try:
            chat.send(output.text)
        except Rejected:
            continue
    screen.messages = chat.messages
    return screen


def telegram_stream(results: Sequence[RunnerResult]) -> Screen:
    """Telegram with streaming: a placeholder, edits on some chunks, a second message where the last edit is refused."""
    screen = Screen()
    chat = TelegramChat()
    bubble: TelegramBubble | None = None
    for output in _outputs(results, screen):
        if bubble is None:
            bubble = TelegramBubble(chat, chat.send(PLACEHOLDER))
        try:
            bubble.chunk(output.text, output.sequence, final=output.final)
        except Rejected:
            if output.final:
                try:
                    chat.send(output.text)
                except Rejected:
                    screen.unfinished.append(output.text)
        if output.final:
            bubble = None
    if bubble is not None:
        screen.unfinished.append(chat.messages[bubble.index])
    screen.messages, screen.trail = chat.messages, chat.trail
    screen.unfinished += [message for message in chat.messages if message == PLACEHOLDER]
    return screen


@dataclass
class AgentBotHost:
    """The host's end of an agent bot on Telegram: the handler behind ``ctx.reply`` and ``ctx.reply_stream``.

    ``failing`` names operations (``update``, ``finish``, ``reply``) that raise, as a platform in trouble does.
    """

    chat: TelegramChat = field(default_factory=TelegramChat)
    failing: frozenset[str] = frozenset()
    bubbles: dict[str, TelegramBubble] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    bytes_sent: int = 0

    async def call_action(self, action: Any, data: dict[str, Any], timeout: float = 15.0, **_: Any) -> dict[str, Any]:
        """The runtime connection's one method a run uses."""
        self.bytes_sent += len(json.dumps(data))
        try:
            if action == PluginToRuntimeAction.REPLY_STREAM:
                return {"result": self._stream(data["stream_id"], data["operation"], data["text"])}
            if action == PluginToRuntimeAction.CALL_TOOL and data["tool_name"] == "event_reply":
                self._may("reply")
                return {"result": {"message_id": self.chat.send(data["parameters"]["text"])}}
        except Rejected as exc:
            raise ActionCallError(str(exc)) from None
        raise ActionCallError(f"unexpected action {action}")

    def _may(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.failing:
            raise Rejected(f"{operation} failed")

    def _stream(self, key: str, operation: str, text: str) -> dict[str, Any]:
        self._may(operation)
        if key in self.closed:
            raise Rejected("Reply stream is closed")
        if key not in self.bubbles:
            if len(self.bubbles) >= 16:
                raise Rejected("A run may create at most 16 reply streams")
            self.bubbles[key] = TelegramBubble(self.chat, self.chat.send(PLACEHOLDER))
            self.numbers[key] = 0
        if operation != "abort":
            self.texts[key] = text
        self.numbers[key] += 1
        final = operation != "update"
        if final:
            self.closed.add(key)
        self.bubbles[key].chunk(self.texts[key], self.numbers[key], final=final)
        return {"stream_id": key, "status": "open" if not final else "completed"}
