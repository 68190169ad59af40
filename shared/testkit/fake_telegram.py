"""A local protocol fixture: the part of Telegram's Bot API that the host's adapter uses, on a free port of 127.0.0.1.

It keeps every chat as people would see it (messages with all texts they ever showed, documents with their bytes, the buttons
under them) and refuses what the service refuses: texts over 4,096 UTF-16 units, empty texts, edits that change nothing, buttons
whose data is no 1 to 64 bytes, answers to presses it does not know. Any person may press any button, also one that has gone
meanwhile, as an app does that has not heard of it yet. Written from the public API description; it never saw the real service.
Runs in a thread of its own so that a session can share it; every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

MESSAGE_UNITS: Final = 4096
BUTTON_BYTES: Final = 64
NOT_MODIFIED: Final = (
    "Bad Request: message is not modified: specified new message content and reply markup are exactly the same as a current "
    "content and reply markup of the message"
)
LONG_POLL_SECONDS: Final = 5.0


def utf16_units(text: str) -> int:
    """Length as Telegram counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


@dataclass(frozen=True)
class Button:
    """One button of an inline keyboard; the bot gets ``data`` when it is pressed."""

    label: str
    data: str


@dataclass
class Message:
    """One message of the bot in a chat; ``texts`` is every text it ever showed, the last one is what stands there."""

    message_id: int
    texts: list[str] = field(default_factory=list)
    document: bytes | None = None
    name: str = ""
    deleted: bool = False
    buttons: tuple[Button, ...] = ()
    """What can be pressed under it now, row by row."""

    @property
    def text(self) -> str:
        """What people read now."""
        return self.texts[-1] if self.texts else ""


@dataclass(frozen=True)
class Call:
    """One request of the adapter and whether the service took it (``problem`` is empty then)."""

    bot: str
    method: str
    fields: dict[str, str]
    problem: str = ""
    at: float = field(default_factory=time.monotonic)


class Refusal(Exception):
    """What the service answers instead of doing it."""

    def __init__(self, description: str, status: int = 400) -> None:
        """``description`` is the service's text."""
        self.status = status
        super().__init__(description)


class FakeTelegram:
    """Bots by token, chats by id. Use as a context manager."""

    def __init__(self, *, burst: int = 0, per_second: float = 1.0, group_per_second: float = 1 / 3) -> None:
        """Nothing listens before ``with``.

        With a ``burst`` a chat takes that many messages and edits at once and ``per_second`` (a group ``group_per_second``)
        afterwards; more are answered 429, as the service does. The defaults are what its bot FAQ says: one message per second
        and chat, 20 per minute in a group, short bursts allowed; how long a burst may be is not public.
        """
        self._burst, self._per_second, self._group_per_second = burst, per_second, group_per_second
        self._room: dict[str, tuple[float, float]] = {}
        self.calls: list[Call] = []
        self._chats: dict[tuple[str, int], list[Message]] = collections.defaultdict(list)
        self._updates: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._files: dict[str, bytes] = {}
        self._presses: set[tuple[str, str]] = set()
        self._changed = threading.Condition()
        self._ids = itertools.count(1000)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listening: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-telegram")
        self.url = ""

    def __enter__(self) -> FakeTelegram:
        self._thread.start()
        if not self._listening.wait(10):
            raise RuntimeError("the Bot API fixture did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # ---- what a test does

    def say(
        self,
        bot: str,
        text: str,
        *,
        user: int = 7,
        chat: int | None = None,
        photo: bytes | None = None,
        document: tuple[str, bytes] | None = None,
    ) -> None:
        """A person writes to the bot, in private or (negative ``chat``) in a group; with a file ``text`` is its caption."""
        place = user if chat is None else chat
        message: dict[str, Any] = {
            "message_id": next(self._ids),
            "date": int(time.time()),
            "from": {"id": user, "is_bot": False, "first_name": f"User{user}"},
            "chat": self._chat(place),
            "text" if photo is None and document is None else "caption": text,
        }
        if photo is not None:
            message["photo"] = [{**self._stored(photo), "width": 16, "height": 16}]
        if document is not None:
            message["document"] = {**self._stored(document[1]), "file_name": document[0], "mime_type": "text/plain"}
        self._deliver(bot, {"message": message})

    def press(self, bot: str, message: Message, button: Button, *, user: int = 7, chat: int | None = None) -> str:
        """A person presses a button of the bot's ``message``; the id of the press, for :meth:`acknowledged`."""
        place = user if chat is None else chat
        query = str(next(self._ids))
        with self._changed:
            self._presses.add((bot, query))
            shown = self._shown(
                bot, place, next(each for each in self._chats[bot, place] if each.message_id == message.message_id)
            )
        pressed = {
            "id": query,
            "from": {"id": user, "is_bot": False, "first_name": f"User{user}"},
            "message": shown,
            "chat_instance": f"instance{place}",
            "data": button.data,
        }
        self._deliver(bot, {"callback_query": pressed})
        return query

    def acknowledged(self, bot: str, press: str) -> bool:
        """Whether the bot has answered a press, so that the button no longer looks busy."""
        with self._changed:
            return any(
                call.bot == bot and call.method == "answerCallbackQuery" and call.fields["callback_query_id"] == press
                for call in self.calls
            )

    def _deliver(self, bot: str, what: dict[str, Any]) -> None:
        update = {"update_id": next(self._ids), **what}
        self._loop.call_soon_threadsafe(lambda: self._queue(bot).put_nowait(update))

    def _stored(self, data: bytes) -> dict[str, Any]:
        name = f"file{next(self._ids)}"
        self._files[name] = data
        return {"file_id": name, "file_unique_id": name, "file_size": len(data)}

    def chat(self, bot: str, chat: int = 7) -> list[Message]:
        """The bot's messages in a chat as they stand now, oldest first, without deleted ones."""
        with self._changed:
            return [
                Message(each.message_id, list(each.texts), each.document, each.name, buttons=each.buttons)
                for each in self._chats[bot, chat]
                if not each.deleted
            ]

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``holds()``, looked at after every call of an adapter; false when the time is over."""
        with self._changed:
            return self._changed.wait_for(holds, seconds)

    def quiet(self, bot: str, seconds: float, limit: float) -> bool:
        """Wait until the bot made no call for ``seconds``; false when it never rests within ``limit`` seconds."""
        end = time.monotonic() + limit
        with self._changed:
            while time.monotonic() < end:
                count = self._count(bot)

                def moved(before: int = count) -> bool:
                    return self._count(bot) != before

                if not self._changed.wait_for(moved, seconds):
                    return True
        return False

    def _count(self, bot: str) -> int:
        return sum(1 for call in self.calls if call.bot == bot)

    # ---- the service

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_route("*", "/bot{token}/{method}", self._answer)
        application.router.add_get("/file/bot{token}/{name}", self._download)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()

    def _queue(self, bot: str) -> asyncio.Queue[dict[str, Any]]:
        return self._updates.setdefault(bot, asyncio.Queue())

    def _chat(self, chat: int) -> dict[str, Any]:
        if chat > 0:
            return {"id": chat, "type": "private", "first_name": f"User{chat}"}
        return {"id": chat, "type": "supergroup", "title": "Group"}

    async def _answer(self, request: web.Request) -> web.Response:
        bot, method = request.match_info["token"], request.match_info["method"]
        fields: dict[str, str] = dict(request.query)
        files: dict[str, tuple[str, bytes]] = {}
        for name, value in (await request.post()).items():
            if isinstance(value, web.FileField):
                files[name] = (value.filename, value.file.read())
            elif isinstance(value, str):
                fields[name] = value
        if method == "getUpdates":
            return _result(await self._poll(bot, float(fields.get("timeout", "0"))))
        try:
            with self._changed:
                result = self._do(bot, method, fields, files)
        except Refusal as exc:
            self._note(Call(bot, method, fields, str(exc)))
            refused = {"ok": False, "error_code": exc.status, "description": str(exc)}
            if exc.status == 429:
                refused["parameters"] = {"retry_after": math.ceil(1 / self._rate(int(fields["chat_id"])))}
            return web.json_response(refused, status=exc.status)
        self._note(Call(bot, method, fields))
        return _result(result)

    async def _download(self, request: web.Request) -> web.Response:
        data = self._files.get(request.match_info["name"])
        return web.Response(status=404) if data is None else web.Response(body=data)

    async def _poll(self, bot: str, seconds: float) -> list[dict[str, Any]]:
        queue = self._queue(bot)
        try:
            async with asyncio.timeout(min(seconds, LONG_POLL_SECONDS)):
                found = [await queue.get()]
        except TimeoutError:
            return []
        while not queue.empty():
            found.append(queue.get_nowait())
        return found

    def _note(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def _do(self, bot: str, method: str, fields: dict[str, str], files: dict[str, tuple[str, bytes]]) -> Any:
        if method == "getMe":
            return _me(bot)
        if method == "getFile":
            name = fields["file_id"]
            return {"file_id": name, "file_unique_id": name, "file_size": len(self._files[name]), "file_path": name}
        if method == "answerCallbackQuery":
            if (bot, fields["callback_query_id"]) not in self._presses:
                raise Refusal("Bad Request: query is too old and response timeout expired or query ID is invalid")
            return True
        if not method.startswith(("send", "edit", "delete")) or "chat_id" not in fields:
            return True
        chat = int(fields["chat_id"])
        messages = self._chats[bot, chat]
        if method == "sendChatAction":
            return True
        if self._burst:
            self._spend(bot, chat)
        if method.startswith("send"):
            message = Message(next(self._ids), buttons=_buttons(fields))
            if method == "sendMessage":
                message.texts.append(_text(fields, "Bad Request: message is too long"))
            else:
                message.texts.append(fields.get("caption", ""))
                for name, data in files.values():
                    message.name, message.document = name, data
            messages.append(message)
        else:
            found = [each for each in messages if each.message_id == int(fields["message_id"]) and not each.deleted]
            if not found:
                raise Refusal("Bad Request: message to edit not found")
            message = found[0]
            if method == "deleteMessage":
                message.deleted = True
                return True
            if method == "editMessageText":
                text, buttons = _text(fields, "Bad Request: MESSAGE_TOO_LONG"), _buttons(fields)
                if (text, buttons) == (message.text, message.buttons):
                    raise Refusal(NOT_MODIFIED)
                message.texts.append(text)
                message.buttons = buttons
            if method == "editMessageReplyMarkup":
                buttons = _buttons(fields)
                if buttons == message.buttons:
                    raise Refusal(NOT_MODIFIED)
                message.buttons = buttons
        return self._shown(bot, chat, message)

    def _shown(self, bot: str, chat: int, message: Message) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "message_id": message.message_id,
            "date": int(time.time()),
            "chat": self._chat(chat),
            "from": _me(bot),
            "text": message.text,
        }
        if message.buttons:
            rows = [[{"text": each.label, "callback_data": each.data}] for each in message.buttons]
            shown["reply_markup"] = {"inline_keyboard": rows}
        return shown

    def _rate(self, chat: int) -> float:
        return self._group_per_second if chat < 0 else self._per_second

    def _spend(self, bot: str, chat: int) -> None:
        now, key = time.monotonic(), f"{bot} {chat}"
        left, since = self._room.get(key, (float(self._burst), now))
        left = min(float(self._burst), left + (now - since) * self._rate(chat))
        if left < 1:
            self._room[key] = (left, now)
            raise Refusal("Too Many Requests: retry later", 429)
        self._room[key] = (left - 1, now)


def _me(bot: str) -> dict[str, Any]:
    return {"id": int(bot.split(":")[0]), "is_bot": True, "first_name": "bot", "username": "fixture_bot"}


def _buttons(fields: dict[str, str]) -> tuple[Button, ...]:
    rows = json.loads(fields.get("reply_markup") or "{}").get("inline_keyboard") or []
    buttons = tuple(Button(each["text"], each.get("callback_data", "")) for row in rows for each in row)
    if any(not each.label.strip() for each in buttons):
        raise Refusal("Bad Request: can't parse inline keyboard button: Text buttons are unallowed in the inline keyboard")
    if any(not 1 <= len(each.data.encode()) <= BUTTON_BYTES for each in buttons):
        raise Refusal("Bad Request: BUTTON_DATA_INVALID")
    return buttons


def _text(fields: dict[str, str], too_long: str) -> str:
    text = fields.get("text", "").strip()
    if not text:
        raise Refusal("Bad Request: message text is empty")
    if utf16_units(text) > MESSAGE_UNITS:
        raise Refusal(too_long)
    return text


def _result(value: Any) -> web.Response:
    return web.Response(body=json.dumps({"ok": True, "result": value}).encode(), content_type="application/json")
