"""A scriptable stand-in for the Claude Code program: a local protocol fixture that speaks stream-json, no vendor's code.

Run as ``python -I -S scripted_claude.py CONFIG [the program's arguments]`` (a JSON object, see ``DEFAULTS``). Each message of
the user is its script: one step per line, ``VERB ARGUMENTS``, in the last text block; a line with an unknown verb is echoed.
Messages that arrive meanwhile are queued and absorbed behind the next tool call, or answered on their own after the result. It
starts in well under 50 ms and does on the wire whatever it is told, also what no program would.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULTS: dict[str, Any] = {
    "log": "",  # file that gets every line received, and one line with argv and environment at start
    "notes": "",  # file that gets what became of each turn and request, see Claude.tell
    "late": [],  # the script in place of a message that tells of a belated permission
    "sessions": "",  # directory of known session ids, may name variables of the environment; without one every id is known
    "initialize": "",  # "hang", "refuse", "exit N", "kill"
    "mcp": {},  # server name to error
    "lifecycle": True,
    "states": True,
    "banner": [],  # raw lines at start
    "stderr": "",
    "interrupt": "",  # "ignore", "hang", "mute" (done, and not answered)
    "end_session": "",  # "ignore"
    "ignore_eof": False,
    "version": "2.1.332",
    "partial": True,
}
LATE = "The action you last asked permission for has now been allowed."
SLEEPER = "import signal, time\nsignal.signal(15, 1)\nprint(1, flush=True)\ntime.sleep(600)"


class Interrupted(Exception):
    pass


class Claude:
    def __init__(self, config: dict[str, Any], argv: list[str]) -> None:
        self.config = {**DEFAULTS, **config}
        if self.config["sessions"]:
            self.config["sessions"] = os.path.expandvars(self.config["sessions"])
            os.makedirs(self.config["sessions"], exist_ok=True)  # noqa: PTH103
        self.argv = argv
        self.lock = threading.Lock()
        self.gate = threading.Lock()
        self.inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.waiting: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.answered = threading.Condition()
        self.interrupted = threading.Event()
        self.busy = threading.Event()
        self.count = 0
        self.turn = 0
        self.mode = self.option("--permission-mode", "default")
        self.model = self.option("--model", "scripted-1")
        self.session = self.option("--session-id", "") or self.option("--resume", "")
        self.failed: list[str] = []
        self.result: dict[str, Any] = {}
        self.last = ""
        self.after: list[str] = []
        self.log = open(self.config["log"], "a", buffering=1) if self.config["log"] else None  # noqa: PTH123, SIM115
        self.note({"argv": argv, "env": dict(os.environ), "pid": os.getpid()})

    def option(self, name: str, default: str) -> str:
        for index, item in enumerate(self.argv):
            if item == name and index + 1 < len(self.argv):
                return self.argv[index + 1]
            if item.startswith(name + "="):
                return item[len(name) + 1 :]
        return default

    def note(self, value: Any) -> None:
        if self.log is not None:
            self.log.write(json.dumps(value) + "\n")

    def tell(self, what: str, **more: Any) -> None:
        """Write down, whole and with the process and the turn, what happened on the program's side."""
        if self.config["notes"]:
            line = json.dumps({"pid": os.getpid(), "turn": str(self.turn), "what": what, **more}) + "\n"
            target = os.open(self.config["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(target, line.encode())
            os.close(target)

    # ---- the wire

    def raw(self, data: str | bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        with self.lock:
            while view:
                view = view[os.write(1, view) :]

    def send(self, kind: str, **fields: Any) -> None:
        self.raw(json.dumps({"type": kind, **fields, "session_id": self.session, "uuid": str(uuid.uuid4())}) + "\n")

    def system(self, subtype: str, **fields: Any) -> None:
        self.send("system", subtype=subtype, **fields)

    def state(self, name: str) -> None:
        if self.config["states"]:
            self.system("session_state_changed", state=name)

    def lifecycle(self, message: dict[str, Any], state: str) -> None:
        if self.config["lifecycle"] and message.get("uuid"):
            self.send("command_lifecycle", command_uuid=message["uuid"], state=state)

    def event(self, event: dict[str, Any], parent: str | None = None, **more: Any) -> None:
        if self.config["partial"]:
            self.send("stream_event", event=event, parent_tool_use_id=parent, **more)

    def assistant(self, content: Any, message_id: str, parent: str | None = None, model: str = "", **more: Any) -> None:
        message = {"id": message_id, "type": "message", "role": "assistant", "model": model or self.model, "content": content}
        self.send("assistant", message=message, parent_tool_use_id=parent, **more)

    def new_id(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count:04d}"

    # ---- reading

    def serve(self) -> None:
        for line in self.config["banner"]:
            self.raw(line + "\n")
        if self.config["stderr"]:
            os.write(2, self.config["stderr"].encode())
        known = self.config["sessions"]
        wanted = self.option("--resume", "")
        if wanted and known and not os.path.exists(os.path.join(known, wanted)):  # noqa: PTH110, PTH118
            text = f"No conversation found with session ID: {wanted}"
            self.send("result", subtype="error_during_execution", is_error=True, errors=[text], num_turns=0)
            os.write(2, (text + "\n").encode())
            sys.exit(1)
        if known:
            open(os.path.join(known, self.session), "w").close()  # noqa: PTH118, PTH123
        threading.Thread(target=self.work, daemon=True).start()
        for line in sys.stdin.buffer:
            if line.strip():
                self.take(json.loads(line))
        if self.config["ignore_eof"]:
            time.sleep(600)
        self.inbox.put(None)
        while not self.inbox.empty() or self.busy.is_set():
            time.sleep(0.01)

    def take(self, message: dict[str, Any]) -> None:
        self.note(message)
        match message["type"]:
            case "user":
                with self.gate:
                    if not self.busy.is_set():
                        self.state("running")
                    self.lifecycle(message, "queued")
                    if self.busy.is_set():
                        self.waiting.append(message)
                    else:
                        self.interrupted.clear()
                        self.busy.set()
                        self.inbox.put(message)
            case "control_request":
                self.control(message["request_id"], message["request"])
            case "control_response":
                response = message["response"]
                with self.answered:
                    self.answers[response["request_id"]] = response
                    self.answered.notify_all()

    def reply(self, request_id: str, **response: Any) -> None:
        self.send("control_response", response={"subtype": "success", "request_id": request_id, "response": response})

    def refuse(self, request_id: str, error: str, code: str) -> None:
        response = {"subtype": "error", "request_id": request_id, "error": error, "error_code": code}
        self.send("control_response", response=response)

    def control(self, request_id: str, request: dict[str, Any]) -> None:
        match request["subtype"]:
            case "initialize":
                word, _, rest = self.config["initialize"].partition(" ")
                if word == "hang":
                    return None
                if word == "exit":
                    os._exit(int(rest))
                if word == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if word == "refuse":
                    return self.refuse(request_id, "no handshake today", "refused")
                self.reply(request_id, commands=[], models=[], claude_code_version=self.config["version"], pid=os.getpid())
            case "mcp_set_servers":
                errors = {name: text for name, text in self.config["mcp"].items() if name in request["servers"]}
                self.failed = list(errors)
                self.reply(request_id, added=list(request["servers"]), removed=[], errors=errors)
            case "interrupt":
                self.tell("cancel")
                if self.config["interrupt"] == "hang":
                    time.sleep(600)
                if self.config["interrupt"] == "ignore":
                    return self.reply(request_id, still_queued=[])
                with self.gate:
                    dropped, self.waiting = (self.waiting, []) if request.get("cancel_queued") else ([], self.waiting)
                for message in dropped:
                    self.lifecycle(message, "cancelled")
                if self.busy.is_set():
                    self.interrupted.set()
                with self.answered:
                    self.answered.notify_all()
                if self.config["interrupt"] == "mute":
                    return None
                self.reply(request_id, still_queued=[], cancelled=[message["uuid"] for message in dropped])
            case "set_model":
                self.model = request.get("model") or "scripted-1"
                self.reply(request_id, model=self.model)
            case "set_permission_mode":
                if request["mode"] not in ("default", "acceptEdits", "plan"):
                    return self.refuse(request_id, f"no mode {request['mode']}", "invalid_mode")
                self.mode = request["mode"]
                self.reply(request_id, mode=self.mode)
                self.system("status", status=None, permissionMode=self.mode)
            case "get_context_usage":
                self.reply(request_id, totalTokens=1234, maxTokens=200000)
            case "end_session":
                if self.config["end_session"] != "ignore":
                    self.reply(request_id)
                    os._exit(0)
            case _:
                self.refuse(request_id, "unsupported", "unsupported_request")
        return None

    def ask(self, request: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        """One request to the host; raises Interrupted when the turn is interrupted meanwhile."""
        request_id = request_id or self.new_id("ask-")
        self.state("requires_action")
        self.tell("asked", method=request["subtype"], params=request)
        self.send("control_request", request_id=request_id, request=request)
        with self.answered:
            self.answered.wait_for(lambda: request_id in self.answers or self.interrupted.is_set(), 60)
            if request_id not in self.answers:
                self.tell("withdrawn")
                self.send("control_cancel_request", request_id=request_id)
                raise Interrupted
        self.state("running")
        found: dict[str, Any] = self.answers.pop(request_id)
        self.tell("answered", answer=found)
        return found

    # ---- working

    def work(self) -> None:
        while (message := self.inbox.get()) is not None:
            several = [message]
            while several:
                self.answer(several)
                with self.gate:
                    several, self.waiting = self.waiting, []
                    self.interrupted.clear()
                    if not several:
                        self.busy.clear()
                        self.state("idle")
            after, self.after = self.after, []
            for line in after:
                self.by_itself(line)

    def by_itself(self, line: str) -> None:
        """An answer nobody asked for: ``PATH TEXT``, when a file exists at the path."""
        path, _, text = line.partition(" ")
        wait_for(path)
        self.interrupted.clear()
        self.state("running")
        self.begin()
        self.result = {}
        with contextlib.suppress(Interrupted):
            self.step(text)
        self.finish([])
        self.state("idle")

    def begin(self) -> None:
        servers = [{"name": name, "status": "failed"} for name in self.failed]
        self.system("init", mcp_servers=servers, model=self.model, permissionMode=self.mode, tools=["Bash"])

    def answer(self, messages: list[dict[str, Any]]) -> None:
        self.result = {}
        for message in messages:
            self.lifecycle(message, "started")
        self.begin()
        script = "\n".join(script_of(message) for message in messages)
        self.turn += 1
        self.tell("began", text=script)
        if script.startswith(LATE) and self.config["late"]:
            script = "\n".join(self.config["late"])
        try:
            for line in script.split("\n"):
                self.step(line)
        except Interrupted:
            self.send("user", message={"role": "user", "content": [{"type": "text", "text": "[Request interrupted by user]"}]})
            errors = ["[ede_diagnostic] canary-diagnostic"]
            aborted = {"subtype": "error_during_execution", "is_error": True, "terminal_reason": "aborted_streaming"}
            self.result = {**aborted, "errors": errors, "result": None}
        self.finish(messages)

    def finish(self, messages: list[dict[str, Any]]) -> None:
        usage = {
            "inputTokens": 10,
            "outputTokens": 5,
            "cacheReadInputTokens": 3,
            "cacheCreationInputTokens": 2,
            "costUSD": 0.25,
        }
        base = {"subtype": "success", "is_error": False, "stop_reason": "end_turn", "terminal_reason": "completed"}
        fields = {**base, "result": self.last, "model_usage_since_last_result": {"scripted-1": usage}, **self.result}
        self.tell("ended", how=fields["terminal_reason"])
        if not fields.pop("omitted", False):
            self.send("result", **fields)
        for message in messages:
            self.lifecycle(message, "cancelled" if fields["is_error"] else "completed")

    def step(self, line: str) -> None:
        if self.interrupted.is_set():
            raise Interrupted
        verb, _, rest = line.partition(" ")
        handler = getattr(self, "do_" + verb.replace("-", "_"), None)
        if handler is None:
            self.do_say(line)
        else:
            handler(rest)

    def stream(self, text: str, message_id: str, parent: str | None = None) -> None:
        self.event({"type": "message_start", "message": {"id": message_id}}, parent)
        self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}, parent)
        for at in range(0, len(text), 7):
            delta = {"type": "text_delta", "text": text[at : at + 7]}
            self.event({"type": "content_block_delta", "index": 0, "delta": delta}, parent)

    def do_say(self, text: str) -> None:
        message_id = self.new_id("msg_")
        self.stream(text, message_id)
        self.assistant([{"type": "text", "text": text}], message_id)
        self.event({"type": "content_block_stop", "index": 0})
        self.event({"type": "message_stop"})
        self.last = text

    def do_who(self, rest: str) -> None:
        """The process and the turn."""
        self.do_say(f"pid={os.getpid()} turn={self.turn};")

    def do_whole(self, text: str) -> None:
        self.assistant([{"type": "text", "text": text}], self.new_id("msg_"))

    def do_think(self, text: str) -> None:
        message_id = self.new_id("msg_")
        self.event({"type": "message_start", "message": {"id": message_id}})
        self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}})
        self.event({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": text}})
        self.assistant([{"type": "thinking", "thinking": text, "signature": "x"}], message_id)
        self.event({"type": "content_block_stop", "index": 0})
        self.event({"type": "message_stop"})

    def do_drop(self, rest: str) -> None:
        """``N FIRST | SECOND``: N characters of a message, then the connection drops and another attempt says SECOND."""
        count, _, texts = rest.partition(" ")
        first, _, second = texts.partition(" | ")
        self.stream(first[: int(count)], self.new_id("msg_"))
        self.event({"type": "message_stop"}, abandoned_blocks={"from_block_index": 0})
        self.system("api_retry", attempt=1, max_retries=10, error_status=None, error="unknown")
        self.do_say(second or first)

    def do_retries(self, rest: str) -> None:
        for attempt in range(1, int(rest) + 1):
            self.system("api_retry", attempt=attempt, max_retries=10, error_status=529, error="server_error")

    def do_sub(self, text: str) -> None:
        """A sub-agent that says something and calls a tool."""
        parent = self.new_id("toolu_")
        self.assistant(
            [{"type": "tool_use", "id": parent, "name": "Agent", "input": {"description": "d"}}], self.new_id("msg_")
        )
        self.system("task_started", task_id="t1", tool_use_id=parent, task_type="local_agent")
        inner = self.new_id("msg_")
        self.stream(text, inner, parent)
        self.assistant([{"type": "text", "text": text}], inner, parent, agent_id="a1")
        call = self.new_id("toolu_")
        bash = {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": "echo in-sub"}}
        self.assistant([bash], self.new_id("msg_"), parent, agent_id="a1")
        self.tool_result(call, "in-sub", parent)
        self.tool_result(parent, "report")

    def tool_result(self, call: str, content: Any, parent: str | None = None, error: bool = False, **more: Any) -> None:
        block = {"type": "tool_result", "tool_use_id": call, "content": content, "is_error": error}
        self.send("user", message={"role": "user", "content": [block]}, parent_tool_use_id=parent, **more)

    def do_tool(self, rest: str) -> None:
        """``NAME INPUT [RESULT]``: a tool call that needs no permission; waiting messages are absorbed behind it."""
        name, _, given = rest.partition(" ")
        value, end = json.JSONDecoder().raw_decode(given)
        call = self.new_id("toolu_")
        self.assistant([{"type": "tool_use", "id": call, "name": name, "input": value}], self.new_id("msg_"))
        if path := value.get("until"):
            self.wait(path)
        result = given[end:].strip() or "done"
        structured = json.loads(result) if result.startswith("{") else result
        self.tool_result(call, result, tool_use_result=structured, error=result == "failed")
        self.absorb()

    def do_open_tool(self, rest: str) -> None:
        self.assistant([{"type": "tool_use", "id": self.new_id("toolu_"), "name": rest, "input": {}}], self.new_id("msg_"))

    def absorb(self) -> None:
        with self.gate:
            several, self.waiting = self.waiting, []
        for message in several:
            self.lifecycle(message, "started")
        for message in several:
            for line in script_of(message).split("\n"):
                self.step(line)
            self.lifecycle(message, "completed")

    def do_ask(self, rest: str) -> None:
        """``NAME INPUT [EXTRA]``: a tool call that asks; what became of it is said."""
        name, _, given = rest.partition(" ")
        value, end = json.JSONDecoder().raw_decode(given)
        extra = json.loads(given[end:]) if given[end:].strip() else {}
        call = self.new_id("toolu_")
        self.assistant([{"type": "tool_use", "id": call, "name": name, "input": value}], self.new_id("msg_"))
        given_input = extra.pop("input", value)
        request = {"subtype": "can_use_tool", "tool_name": name, "input": given_input, "tool_use_id": call, **extra}
        answer = self.ask(request)
        response = answer.get("response") or {"behavior": "error"}
        if response["behavior"] == "allow":
            self.tool_result(call, json.dumps(response.get("updatedInput")))
            self.do_say(f"allowed {json.dumps(response, sort_keys=True)}")
        else:
            self.tool_result(call, response.get("message", ""), error=True)
            if response.get("interrupt"):
                # Vendor's rule (2.1.332): the denial ends the turn, too.
                self.tell("cancel")
                raise Interrupted
            self.do_say(f"denied {response.get('message', '')}")

    def do_ask_in(self, rest: str) -> None:
        """``DIRECTORY NAME INPUT``: the same as ``ask``, for a call that would run in a directory, told as a hook before."""
        directory, name, given = rest.split(" ", 2)
        call = self.new_id("toolu_")
        told = {"hook_event_name": "PreToolUse", "tool_use_id": call, "cwd": directory}
        self.ask({"subtype": "hook_callback", "callback_id": "directory", "input": told})
        request = {"subtype": "can_use_tool", "tool_name": name, "input": json.loads(given), "tool_use_id": call}
        self.do_say(json.dumps(self.ask(request).get("response")))

    def do_leave(self, rest: str) -> None:
        """``ID NAME INPUT``: ask, and go on without waiting for the answer."""
        request_id, name, given = rest.split(" ", 2)
        request = {"subtype": "can_use_tool", "tool_name": name, "input": json.loads(given), "tool_use_id": "left"}
        self.send("control_request", request_id=request_id, request=request)

    def do_take_back(self, rest: str) -> None:
        """``ID``: what was asked needs no answer any more."""
        self.send("control_cancel_request", request_id=rest)

    def do_hook(self, rest: str) -> None:
        self.do_say(json.dumps(self.ask({"subtype": "hook_callback", "callback_id": "h", "input": {}})["response"]))

    def do_strange_request(self, rest: str) -> None:
        self.do_say(self.ask({"subtype": "open_the_doors"})["subtype"])

    def do_huge_request(self, rest: str) -> None:
        request = {"subtype": "can_use_tool", "tool_name": "Write", "input": {"content": "x" * int(rest)}}
        self.do_say(self.ask(request, "huge-1")["subtype"])

    def do_error(self, rest: str) -> None:
        """``CLASS STATUS TEXT``: an API error."""
        kind, status, text = rest.split(" ", 2)
        code = None if status == "-" else int(status)
        marks: dict[str, Any] = {"error": kind, "is_api_error_message": True, "api_error_status": code}
        self.assistant([{"type": "text", "text": text}], self.new_id("err_"), model="<synthetic>", **marks)
        fields = {"terminal_reason": "api_error", "api_error_status": code, "stop_reason": "stop_sequence"}
        self.result = {"is_error": True, "result": text, **fields}

    def do_result(self, rest: str) -> None:
        self.result = json.loads(rest)

    def do_raw(self, rest: str) -> None:
        self.raw(rest + "\n")

    def do_bytes(self, rest: str) -> None:
        self.raw(bytes.fromhex(rest))

    def do_line(self, rest: str) -> None:
        value = json.loads(rest)
        self.send(value.pop("type"), **value)

    def do_long_line(self, rest: str) -> None:
        """``N``: an assistant text of N bytes in one line."""
        self.assistant([{"type": "text", "text": "z" * int(rest)}], self.new_id("msg_"))

    def do_flood(self, rest: str) -> None:
        """``N``: one message of N pieces of 100 characters."""
        message_id = self.new_id("msg_")
        self.event({"type": "message_start", "message": {"id": message_id}})
        self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "0123456789" * 10}}
        line = json.dumps({"type": "stream_event", "event": piece, "parent_tool_use_id": None}) + "\n"
        for _ in range(int(rest)):
            if self.interrupted.is_set():
                raise Interrupted
            self.raw(line)
        self.event({"type": "message_stop"})

    def wait(self, path: str) -> None:
        while not os.path.exists(path):  # noqa: PTH110
            if self.interrupted.is_set():
                raise Interrupted
            time.sleep(0.01)

    def do_hold(self, rest: str) -> None:
        self.wait(rest)

    def do_holding(self, rest: str) -> None:
        """Say something, in pieces, and hold in the middle of the message."""
        path, _, text = rest.partition(" ")
        message_id = self.new_id("msg_")
        self.stream(text, message_id)
        try:
            self.wait(path)
        except Interrupted:
            self.assistant([{"type": "text", "text": text}], message_id, aborted=True)
            raise
        self.assistant([{"type": "text", "text": text}], message_id)
        self.event({"type": "message_stop"})

    def do_halves(self, rest: str) -> None:
        """``PATH FIRST | SECOND``: a message of two halves, with a wait between them."""
        path, _, texts = rest.partition(" ")
        first, _, second = texts.partition(" | ")
        message_id = self.new_id("msg_")
        self.stream(first, message_id)
        self.wait(path)
        self.event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": second}})
        self.assistant([{"type": "text", "text": first + second}], message_id)
        self.event({"type": "message_stop"})

    def do_later(self, rest: str) -> None:
        self.after.append(rest)

    def do_child(self, rest: str) -> None:
        """``PATH``: a child in a session of its own that ignores SIGTERM; its pid goes to the file."""
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        child.stdout.readline()
        with open(rest + ".tmp", "w") as file:  # noqa: PTH123
            file.write(str(child.pid))
        os.rename(rest + ".tmp", rest)  # noqa: PTH104

    def do_exit(self, rest: str) -> None:
        os.write(2, b"the program says why\n")
        os._exit(int(rest))

    def do_kill(self, rest: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_close_output(self, rest: str) -> None:
        os.close(1)
        time.sleep(600)

    def do_env(self, rest: str) -> None:
        self.do_say(f"{rest}={os.environ.get(rest, '')}")

    def do_descriptor(self, rest: str) -> None:
        self.do_say(os.read(int(os.environ[rest]), 4096).decode().strip())


def wait_for(path: str) -> None:
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.01)


def script_of(message: dict[str, Any]) -> str:
    content = message["message"]["content"]
    if isinstance(content, str):
        return content
    texts = [block["text"] for block in content if block["type"] == "text" and not block["text"].startswith("<host-context>")]
    return str(texts[-1]) if texts else "say (no text)"


if __name__ == "__main__":
    Claude(json.loads(sys.argv[1]), sys.argv[2:]).serve()
