"""A ``codex app-server`` that does what the prompt says: local protocol fixture, standard library only, no vendor's behaviour.

Its frames have the shape of Codex 0.171's. The configuration is JSON in ``SCRIPTED_CODEX``: ``log`` (a file that gets every
message received), ``environment`` (a file that gets the process's own), ``account`` (the answer to ``account/read``),
``config`` (``config/read``), ``exec`` (exit code of ``command/exec``), ``stdout`` (what that prints), ``profiles`` (what
``permissionProfile/list`` names; ``null``: it is not known), ``profile_error`` (refuses a thread with a profile of its own),
``profile_ignored``, ``known`` (threads that can be resumed; ``true``: all; ``"home"``: those started with the same
``CODEX_HOME``, which are kept there), ``resume_error`` (text), ``start_error``,
``initialize_error``, ``deaf`` (methods never answered), ``early_end`` (a turn's end comes before the answer to its start),
``chatter`` (lines of noise first), ``base`` (tokens a resumed thread begins with), ``late_base`` (told only when the next turn
starts), ``notes`` (a file that gets what became of each turn and request), ``late`` (the steps in place of a message that tells
of a belated permission), ``no_client_id``, ``rollout`` (the file ``thread/read`` names), ``home`` (the account's directory as
told), ``rules`` (names of files there).

Each line of a turn's text is a step; see :func:`Turn.step`. Steps run one after the other in a thread of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_CODEX", "{}"))
PROFILES = {":read-only": True, ":workspace": True, ":danger-full-access": True}
OUTPUT = threading.Lock()
BOUND = 60.0


def send(message: dict[str, Any]) -> None:
    """One message, whole."""
    line = json.dumps(message).encode() + b"\n"
    with OUTPUT:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def raw(data: bytes) -> None:
    """Bytes as they are."""
    with OUTPUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def notify(method: str, **params: Any) -> None:
    """A notification."""
    send({"method": method, "params": params, "emittedAtMs": 1})


LATE = "The action you last asked permission for has now been allowed."


class Turn:
    """One running turn."""

    numbers = itertools.count(1)

    def __init__(self, thread: Thread, text: str) -> None:
        self.thread = thread
        self.id = f"turn-{next(self.numbers)}"
        self.text = text
        if text.startswith(LATE) and CONFIG.get("late"):
            text = "\n".join(CONFIG["late"])
        self.lines = [line for line in text.splitlines() if line.strip()]
        self.interrupted = threading.Event()
        self.steered: queue.Queue[tuple[Any, list[Any]]] = queue.Queue()
        self.items = itertools.count(1)
        self.status = "completed"
        self.error: Any = None
        self.last: list[Any] = []
        self.takes_steers = True
        self.too_late = False
        self.asked = threading.Event()
        self.over = threading.Event()

    def note(self, what: str, **more: Any) -> None:
        """Write down, whole and with the process and the turn, what happened on the server's side."""
        if CONFIG.get("notes"):
            line = json.dumps({"pid": os.getpid(), "turn": self.id, "what": what, **more}) + "\n"
            target = os.open(CONFIG["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(target, line.encode())
            os.close(target)

    def names(self) -> dict[str, str]:
        """What every notification of the turn carries."""
        return {"threadId": self.thread.id, "turnId": self.id}

    def item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A new item."""
        return {"type": kind, "id": f"{self.id}-item-{next(self.items)}", **fields}

    def started(self, item: dict[str, Any]) -> None:
        """``item/started``."""
        notify("item/started", item=item, **self.names())

    def completed(self, item: dict[str, Any]) -> None:
        """``item/completed``."""
        notify("item/completed", item=item, **self.names())

    def say(self, text: str, phase: str | None = None, *, whole: bool = False, cut: bool = False, size: int = 0) -> None:
        """A message, in words, whole or cut."""
        item = self.item("agentMessage", text="", phase=phase)
        self.started(item)
        pieces = [text] if whole or size else [word + " " for word in text.split(" ")]
        if not whole:
            pieces = [*pieces[:-1], pieces[-1].rstrip(" ")]
            for piece in pieces:
                notify("item/agentMessage/delta", itemId=item["id"], delta=piece, **self.names())
        if not cut:
            item = {**item, "text": text}
            self.completed(item)
            self.last = [item]

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Ask the client and wait for its answer."""
        self.note("asked", method=method, params=params)
        answer = ask(method, {**self.names(), **params})
        self.note("answered", answer=answer.get("result", {"error": answer.get("error")}))
        if answer.get("result") == {"decision": "cancel"}:
            # Vendor's rule (0.171): declined, and the turn is interrupted.
            self.note("cancel")
            self.interrupted.set()
        notify("serverRequest/resolved", threadId=self.thread.id, requestId=answer["id"])
        return answer.get("result", {"error": answer.get("error")})

    def run(self) -> None:
        """Every step, then the end."""
        self.note("began", text=self.text)
        notify("thread/status/changed", threadId=self.thread.id, status={"type": "active", "activeFlags": []})
        notify("turn/started", threadId=self.thread.id, turn=self.described("inProgress"))
        self.completed(self.item("userMessage", content=[{"type": "text", "text": "\n".join(self.lines)}], clientId=None))
        for line in self.lines:
            if self.interrupted.is_set() or self.status != "completed":
                break
            verb, _, rest = line.partition(" ")
            self.step(verb, rest)
        while self.takes_steers and not self.interrupted.is_set() and not self.steered.empty():
            self.take_steer()
        if self.interrupted.is_set():
            self.status = "interrupted"
        self.end()

    def take_steer(self, timeout: float = BOUND) -> str:
        """Wait for a steered message and let it into the turn."""
        end = time.monotonic() + timeout
        while not self.interrupted.is_set() and time.monotonic() < end:
            try:
                client_id, content = self.steered.get(timeout=0.02)
            except queue.Empty:
                continue
            shown = None if CONFIG.get("no_client_id") else client_id
            item = self.item("userMessage", content=content, clientId=shown)
            self.started(item)
            self.completed(item)
            text = " ".join(said(content))
            self.note("heard", text=text)
            self.say(f"steered: {text}")
            return text
        return ""

    def end(self) -> None:
        """The turn's last notifications."""
        with self.thread.lock:
            self.thread.turn = None
        self.note("ended", how=self.status)
        idle = "systemError" if self.status == "failed" else "idle"
        notify("thread/status/changed", threadId=self.thread.id, status={"type": idle})
        if self.status == "failed":
            notify("error", error=self.error, willRetry=False, **self.names())
        notify("turn/completed", threadId=self.thread.id, turn=self.described(self.status))
        self.over.set()

    def described(self, status: str) -> dict[str, Any]:
        """The turn as Codex describes it."""
        return {"id": self.id, "items": self.last, "itemsView": "summary", "status": status, "error": self.error}

    def step(self, verb: str, rest: str) -> None:
        """One line of the script; the names say what they do."""
        match verb:
            case "say":
                self.say(rest)
            case "who":
                self.say(f"pid={os.getpid()} turn={self.id};")
            case "whole":
                self.say(rest, whole=True)
            case "cut":
                self.say(rest, cut=True)
            case "comment":
                self.say(rest, "commentary")
            case "final":
                self.say(rest, "final_answer")
            case "lonely":
                self.last = [self.item("agentMessage", text=rest, phase=None)]
            case "think":
                item = self.item("reasoning", summary=[], content=[])
                self.started(item)
                notify("item/reasoning/summaryTextDelta", itemId=item["id"], delta=rest, summaryIndex=0, **self.names())
                self.completed({**item, "summary": [rest]})
            case "cmd" | "opencmd":
                command, _, output = rest.partition(" => ")
                fields = {"command": f"/bin/bash -lc '{command}'", "cwd": "/", "commandActions": [{"type": "unknown"}]}
                item = self.item("commandExecution", status="inProgress", aggregatedOutput=None, **fields)
                self.started(item)
                notify("item/commandExecution/outputDelta", itemId=item["id"], delta=output, **self.names())
                if verb == "cmd":
                    self.completed({**item, "status": "completed", "aggregatedOutput": output, "exitCode": 0})
            case "patch":
                self.patch(json.loads(rest))
            case "approve":
                decision = self.request("item/commandExecution/requestApproval", {"itemId": "c", **json.loads(rest)})
                self.say(f"decided {json.dumps(decision)}")
            case "beside":
                # A tool call beside the next steps, when a file exists at the path.
                path, _, params = rest.partition(" ")
                threading.Thread(target=self.beside, args=(path, json.loads(params)), daemon=True).start()
            case "request":
                method, _, params = rest.partition(" ")
                self.say(f"answered {json.dumps(self.request(method, json.loads(params or '{}')))}")
            case "notify":
                method, _, params = rest.partition(" ")
                notify(method, **{**self.names(), **json.loads(params or "{}")})
            case "send":
                send(json.loads(rest.replace("$THREAD", self.thread.id).replace("$TURN", self.id)))
            case "raw":
                raw(rest.encode() + b"\n")
            case "tokens":
                self.tokens(*map(int, rest.split()))
            case "flood":
                item = self.item("agentMessage", text="", phase=None)
                for _ in range(int(rest)):
                    notify("item/agentMessage/delta", itemId=item["id"], delta="0123456789", **self.names())
            case "big":
                self.say("x" * int(rest), size=1)
            case "bigline":
                raw(b'{"method":"item/agentMessage/delta","params":{"delta":"' + b"x" * int(rest) + b'"}}\n')
            case "retry":
                error = {"message": f"Reconnecting... {rest}/5", "codexErrorInfo": {"responseStreamDisconnected": {}}}
                notify("error", error=error, willRetry=True, **self.names())
            case "fail":
                info, _, message = rest.partition(" ")
                self.error = {"message": message, "codexErrorInfo": json.loads(info), "additionalDetails": None}
                self.status = "failed"
            case "wait":
                self.interrupted.wait(BOUND)
            case "steer":
                self.take_steer()
            case "ignore-steers":
                self.takes_steers = False
                Path(rest).touch()
                end = time.monotonic() + BOUND
                while self.steered.empty() and time.monotonic() < end:
                    time.sleep(0.01)
            case "late-steers":
                # The turn ends while a message for it is on its way, which is refused behind the end.
                self.too_late = True
                Path(rest).touch()
                self.asked.wait(BOUND)
            case "touch":
                Path(rest).touch()
            case "file":
                end = time.monotonic() + BOUND
                while not Path(rest).exists() and not self.interrupted.is_set() and time.monotonic() < end:
                    time.sleep(0.01)
            case "orphan":
                # A child in a session of its own, as commands of agents are.
                child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL)
                Path(rest).write_text(str(child.pid))
            case "crossing":
                # A command whose beginning crosses the interrupt on the wire.
                self.say("crossing")
                self.interrupted.wait(BOUND)
                self.step("orphan", rest)
                self.step("opencmd", "sleep => ")
            case "die":
                sys.stderr.write("the scripted server was told to die\n")
                sys.stderr.flush()
                os._exit(int(rest or 3))
            case "input":
                self.say(json.dumps(self.thread.input))
            case _:
                self.say(f"unknown step {verb}")

    def beside(self, path: str, params: dict[str, Any]) -> None:
        """Call one of the client's tools when a file exists at ``path``."""
        self.step("file", path)
        self.note("calling")
        answer = ask("item/tool/call", {**self.names(), **params})
        self.note("called", answer=answer.get("result", answer))

    def patch(self, changes: list[Any]) -> None:
        """A file change that asks first."""
        item = self.item("fileChange", changes=changes, status="inProgress")
        self.started(item)
        decision = self.request("item/fileChange/requestApproval", {"itemId": item["id"], "reason": None, "grantRoot": None})
        accepted = str(decision.get("decision", "")).startswith("accept")
        self.completed({**item, "status": "completed" if accepted else "declined"})
        notify("turn/diff/updated", diff="diff --git a/x b/x\n", **self.names())
        self.say(f"decided {json.dumps(decision)}")

    def tokens(self, given: int, made: int) -> None:
        """Another model request was counted."""
        total = self.thread.total
        last = {"totalTokens": given + made, "inputTokens": given, "cachedInputTokens": 1, "outputTokens": made}
        for name, value in last.items():
            total[name] = total.get(name, 0) + value
        usage = {"total": dict(total), "last": last, "modelContextWindow": 1000}
        notify("thread/tokenUsage/updated", tokenUsage=usage, **self.names())


class Thread:
    """One thread."""

    def __init__(self, thread_id: str, total: dict[str, int]) -> None:
        self.id = thread_id
        self.turn: Turn | None = None
        self.lock = threading.Lock()
        self.total = total
        self.input: list[Any] = []


THREADS: dict[str, Thread] = {}
NUMBERS = itertools.count(1)
REQUESTS = itertools.count(0)
ANSWERS: dict[int, queue.Queue[dict[str, Any]]] = {}


class Refused(Exception):
    """A call is answered with an error."""


def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """A request to the client; its whole answer."""
    number = next(REQUESTS)
    waiting = ANSWERS[number] = queue.Queue()
    send({"method": method, "id": number, "params": params})
    return waiting.get(timeout=BOUND)


def thread_of(params: dict[str, Any]) -> Thread:
    """The thread a call names."""
    found = THREADS.get(params.get("threadId", ""))
    if found is None:
        raise Refused(f"thread not found: {params.get('threadId')}")
    return found


def answer(method: str, params: dict[str, Any]) -> Any:
    """The result of a call."""
    match method:
        case "initialize":
            if text := CONFIG.get("initialize_error"):
                raise Refused(text)
            return {"userAgent": "client/0.171.0 (scripted)", "codexHome": CONFIG.get("home", "/home/scripted/.codex")}
        case "account/read":
            return CONFIG.get("account", {"account": None, "requiresOpenaiAuth": False})
        case "config/read":
            return {"config": CONFIG.get("config", {})}
        case "permissionProfile/list" if CONFIG.get("profiles", PROFILES) is not None:
            return {"data": [{"id": name, "allowed": allowed} for name, allowed in CONFIG.get("profiles", PROFILES).items()]}
        case "command/exec":
            return {"exitCode": CONFIG.get("exec", 0), "stdout": CONFIG.get("stdout", ""), "stderr": ""}
        case "thread/start":
            if text := CONFIG.get("start_error"):
                raise Refused(text)
            refuse_profile(params)
            started = Thread(f"thread-{os.getpid()}-{next(NUMBERS)}", {})
            if CONFIG.get("known") == "home":
                rollout(started.id).parent.mkdir(exist_ok=True)
                rollout(started.id).touch()
            return opened(started, params)
        case "thread/resume":
            name = params["threadId"]
            if text := CONFIG.get("resume_error"):
                raise Refused(text)
            known = CONFIG.get("known", [])
            if not (rollout(name).exists() if known == "home" else known is True or name in known):
                raise Refused(f"no rollout found for thread id {name}")
            refuse_profile(params)
            base = CONFIG.get("base", 0)
            return opened(Thread(name, {"totalTokens": base, "inputTokens": base, "outputTokens": 0}), params)
        case "thread/read":
            return {"thread": {"id": params["threadId"], "path": CONFIG.get("rollout", "")}}
        case "turn/start":
            return start(thread_of(params), params)
        case "turn/steer":
            return steer(thread_of(params), params)
        case "turn/interrupt":
            turn = thread_of(params).turn
            if turn is None:
                raise Refused("no active turn to interrupt")
            turn.note("cancel")
            turn.interrupted.set()
            return {}
        case "thread/backgroundTerminals/clean" | "thread/unsubscribe" | "fs/writeFile" | "fs/createDirectory" | "fs/remove":
            return {}
        case "fs/getMetadata":
            return {"isDirectory": True, "isFile": False, "isSymlink": False, "createdAtMs": 0, "modifiedAtMs": 0}
        case "fs/readDirectory":
            names = CONFIG.get("rules", []) if params["path"].endswith("/rules") else []
            return {"entries": [{"fileName": name, "isDirectory": False, "isFile": True} for name in names]}
    raise Refused(f"unknown method {method}")


def rollout(thread: str) -> Path:
    """Where a thread of the account is kept."""
    return Path(os.environ["CODEX_HOME"]) / "sessions" / f"{thread}.jsonl"


def refuse_profile(params: dict[str, Any]) -> None:
    """An administrator's requirements, where the configuration has some."""
    if params.get("permissions") and (text := CONFIG.get("profile_error")):
        raise Refused(text)


def opened(thread: Thread, params: dict[str, Any]) -> dict[str, Any]:
    """The answer to a start or a resume."""
    THREADS[thread.id] = thread
    notify("thread/started", thread={"id": thread.id, "parentThreadId": None})
    profile = params.get("permissions")
    active = {"id": profile, "extends": None} if profile and not CONFIG.get("profile_ignored") else None
    answered = {"model": "scripted", "approvalPolicy": "untrusted", "activePermissionProfile": active}
    return {"thread": {"id": thread.id}, **answered}


def said(content: list[Any]) -> list[str]:
    """The texts of an input that a person wrote."""
    texts = [part.get("text", "") for part in content if part.get("type") == "text"]
    return [text for text in texts if not text.startswith("<host-context>")]


def start(thread: Thread, params: dict[str, Any]) -> Any:
    """Begin a turn."""
    text = "\n".join(said(params["input"]))
    if text.startswith("refuse "):
        raise Refused(text.removeprefix("refuse "))
    thread.input = params["input"]
    if CONFIG.get("late_base"):
        usage = {"total": dict(thread.total), "last": dict(thread.total), "modelContextWindow": 1000}
        notify("thread/tokenUsage/updated", tokenUsage=usage, threadId=thread.id, turnId="past")
    turn = thread.turn = Turn(thread, text)
    result = {"turn": turn.described("inProgress")}
    if CONFIG.get("early_end"):
        turn.run()
        return result
    threading.Thread(target=turn.run, daemon=True).start()
    return result


def steer(thread: Thread, params: dict[str, Any]) -> Any:
    """A message for the running turn."""
    with thread.lock:
        turn = thread.turn
        if turn is None:
            raise Refused("no active turn to steer")
        if params["expectedTurnId"] != turn.id:
            raise Refused(f"expected active turn id `{params['expectedTurnId']}` but found `{turn.id}`")
        if not turn.too_late:
            turn.steered.put((params.get("clientUserMessageId"), params["input"]))
    if turn.too_late:
        turn.asked.set()
        turn.over.wait(BOUND)
        raise Refused("no active turn to steer")
    return {"turnId": turn.id}


def main() -> None:
    """Serve until stdin ends."""
    log = CONFIG.get("log")
    if environment := CONFIG.get("environment"):
        with Path(environment).open("a") as out:
            out.write(json.dumps(dict(os.environ)) + "\n")
    for line in CONFIG.get("chatter", []):
        raw(line.encode() + b"\n")
    for data in sys.stdin.buffer:
        message = json.loads(data)
        if log:
            with Path(log).open("a") as out:
                out.write(json.dumps({**message, "argv": sys.argv[1:]}) + "\n")
        method = message.get("method")
        if method is None:
            if (waiting := ANSWERS.pop(message.get("id"), None)) is not None:
                waiting.put(message)
            continue
        if "id" not in message or method in CONFIG.get("deaf", []):
            continue
        try:
            result = answer(method, message.get("params") or {})
        except Refused as exc:
            send({"error": {"code": -32600, "message": str(exc)}, "id": message["id"]})
        else:
            send({"id": message["id"], "result": result})


if __name__ == "__main__":
    main()
