"""A scriptable ACP agent: a local protocol fixture, hand-written JSON-RPC over stdio, no vendor's behaviour by itself.

Run as ``python -I -S scripted_acp_agent.py CONFIG`` (a JSON object, see ``DEFAULTS``). Each prompt is its script: one step per
line, ``VERB ARGUMENTS``, in the last text block that the host has not added; a line with an unknown verb is echoed. It starts
in well under 50 ms and does on the wire whatever it is told, also what no protocol allows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULTS: dict[str, Any] = {
    "name": "scripted-agent",
    "version": "1.0",
    "protocol": 1,
    "capabilities": {},  # laid over the default agentCapabilities
    "without": [],  # of load, resume, close, list, http, image
    "auth_methods": [],
    "auth": "",  # "required": -32000 until authenticate; "broken": that fails; "useless": that changes nothing
    "initialize": "",  # "hang", "exit N", "error", "silent-exit"
    "new": {},  # laid over the answer to session/new
    "new_error": None,  # [code, message, data]
    "load": "replay",  # "replay", "empty", "late", or [code, message, data]
    "resume": "quiet",  # "quiet", "replay", or [code, message, data]
    "listed": True,  # whether session/list names stored sessions
    "reject_mcp": "",  # "load" or "new": non-empty mcpServers answer -32602
    "early": [],  # updates sent before the answer to session/new
    "setting_error": None,  # [code, message, data]
    "close": "",  # "hang"
    "banner": [],  # raw lines at start
    "stderr": "",  # text on stderr at start
    "state": "",  # directory of stored sessions; may name variables of the agent's environment
    "log": "",  # file that gets every message received, one JSON line each
    "notes": "",  # file that gets what became of each turn and request, see Agent.note
    "late": [],  # the script in place of a prompt that tells of a belated permission
    "ignore_eof": False,
    "first_session": "s-1",  # empty: a name that no other process gives
    "instead": {},  # beginning of a prompt: the script that is run for it
}

LATE = "The action you last asked permission for has now been allowed."
STUBBORN = "import signal, time\nsignal.signal(15, 1)\nprint(1, flush=True)\ntime.sleep(600)"


class Agent:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = {**DEFAULTS, **config}
        if self.config["state"]:
            self.config["state"] = os.path.expandvars(self.config["state"])
            os.makedirs(self.config["state"], exist_ok=True)  # noqa: PTH103
        self.out_lock = threading.Lock()
        self.replies: dict[str, Any] = {}
        self.reply_ready = threading.Condition()
        self.cancelled = threading.Event()
        self.next_id = 0
        self.sessions: dict[str, Any] = {}
        self.count = 0
        self.authenticated = not self.config["auth"]
        self.stalled = threading.Event()
        self.session = ""
        self.turn: Any = None
        self.blocks: list[Any] = []
        self.reason = "end_turn"
        self.usage: Any = None
        self.after: list[Any] = []
        self.failure: Any = None
        self.obeys = True
        self.leaves = False
        self.log = open(self.config["log"], "a", buffering=1) if self.config["log"] else None  # noqa: PTH123, SIM115

    def note(self, what: str, **more: Any) -> None:
        """Write down, whole and with the process and the turn, what happened on the agent's side."""
        if self.config["notes"]:
            line = json.dumps({"pid": os.getpid(), "turn": str(self.turn), "what": what, **more}) + "\n"
            target = os.open(self.config["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(target, line.encode())
            os.close(target)

    # ---- the wire

    def raw(self, data: str | bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        with self.out_lock:
            while view:
                view = view[os.write(1, view) :]

    def send(self, message: dict[str, Any]) -> None:
        self.raw(json.dumps({"jsonrpc": "2.0", **message}) + "\n")

    def update(self, session: str, update: Any) -> None:
        self.send({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def chunk(self, session: str, text: str, kind: str = "agent_message_chunk", **more: Any) -> None:
        self.update(session, {"sessionUpdate": kind, "content": {"type": "text", "text": text}, **more})

    def ask(self, method: str, params: dict[str, Any], request_id: str | None = None, bound: float = 60.0) -> Any:
        if request_id is None:
            self.next_id += 1
            request_id = f"agent-{self.next_id}"
        self.note("asked", method=method, params=params)
        self.send({"id": request_id, "method": method, "params": params})
        answer = self.reply(request_id, bound)
        self.note("answered", answer=answer)
        return answer

    def reply(self, request_id: str, bound: float = 60.0) -> Any:
        with self.reply_ready:
            self.reply_ready.wait_for(lambda: request_id in self.replies, bound)
            message = self.replies.pop(request_id, {"error": {"code": 0, "message": "no answer"}})
        return message.get("result") if "error" not in message else {"failed": message["error"]}

    # ---- the loop

    def serve(self) -> None:
        for line in self.config["banner"]:
            self.raw(line + "\n")
        if self.config["stderr"]:
            os.write(2, self.config["stderr"].encode())
        buffer = b""
        while True:
            if self.stalled.is_set():
                time.sleep(3600)
            data = os.read(0, 262144)
            if not data:
                break
            buffer += data
            while b"\n" in buffer and not self.stalled.is_set():
                line, _, buffer = buffer.partition(b"\n")
                self.take(json.loads(line))
        while self.config["ignore_eof"]:
            time.sleep(3600)

    def take(self, message: dict[str, Any]) -> None:
        if self.log:
            self.log.write(json.dumps(message) + "\n")
        method = message.get("method")
        if method is None:
            with self.reply_ready:
                self.replies[message["id"]] = message
                self.reply_ready.notify_all()
        elif method == "session/cancel":
            self.note("cancel")
            self.cancelled.set()
        elif method == "session/prompt":
            self.cancelled.clear()
            threading.Thread(target=self.prompt, args=(message,), daemon=True).start()
        elif "id" in message:
            handler = getattr(self, "on_" + method.replace("/", "_"), None)
            if handler is None:
                self.fail(message, -32601, "Method not found", {"method": method})
            else:
                handler(message, message.get("params") or {})

    def answer(self, message: dict[str, Any], result: Any) -> None:
        self.send({"id": message["id"], "result": result})

    def fail(self, message: dict[str, Any], code: int, text: str, data: Any = None) -> None:
        self.send({"id": message["id"], "error": {"code": code, "message": text, "data": data}})

    # ---- opening

    def on_initialize(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        how = self.config["initialize"]
        if how == "hang":
            return
        if how.startswith("exit"):
            os._exit(int(how.split()[1]))
        if how == "error":
            self.fail(message, -32603, "Internal error", {"details": "cannot start"})
            return
        without = self.config["without"]
        capabilities = {
            "loadSession": "load" not in without,
            "promptCapabilities": {"image": "image" not in without, "embeddedContext": "embed" not in without},
            "mcpCapabilities": {"http": "http" not in without, "sse": False},
            "sessionCapabilities": {name: {} for name in ("resume", "close", "list") if name not in without},
            **self.config["capabilities"],
        }
        self.answer(
            message,
            {
                "protocolVersion": self.config["protocol"],
                "agentCapabilities": capabilities,
                "agentInfo": {"name": self.config["name"], "version": self.config["version"]},
                "authMethods": self.config["auth_methods"],
            },
        )

    def on_authenticate(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        if self.config["auth"] == "broken":
            self.fail(message, -32603, "Internal error", {"details": "no"})
            return
        self.authenticated = self.config["auth"] != "useless"
        self.answer(message, {})

    def refused(self, message: dict[str, Any], params: dict[str, Any], what: str) -> bool:
        if not self.authenticated:
            self.fail(message, -32000, "Authentication required")
            return True
        if self.config["reject_mcp"] == what and params.get("mcpServers"):
            self.fail(message, -32602, "Invalid params", {"details": "mcpServers must be empty"})
            return True
        return False

    def path(self, session: str) -> str:
        return os.path.join(self.config["state"], session + ".json")  # noqa: PTH118

    def save(self, session: str) -> None:
        if self.config["state"]:
            with open(self.path(session), "w") as file:  # noqa: PTH123
                json.dump(self.sessions[session], file)

    def on_session_new(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        if self.refused(message, params, "new"):
            return
        if self.config["new_error"]:
            self.fail(message, *self.config["new_error"])
            return
        self.count += 1
        first = self.config["first_session"] or f"s-{os.getpid()}-{time.time_ns()}"
        session = first if self.count == 1 else f"s-{self.count}"
        self.sessions[session] = {"turns": [], "mcp": params.get("mcpServers")}
        self.save(session)
        for update in self.config["early"]:
            self.update(session, update)
        self.answer(message, {"sessionId": session, **self.config["new"]})

    def reopen(self, message: dict[str, Any], params: dict[str, Any], how: Any, what: str) -> None:
        session = params["sessionId"]
        if self.refused(message, params, "load"):
            return
        if isinstance(how, list):
            self.fail(message, *how)
            return
        stored = bool(self.config["state"]) and os.path.exists(self.path(session))  # noqa: PTH110
        if not stored and how not in ("empty", "late"):
            self.fail(message, -32002, "Resource not found", {"uri": session})
            return
        self.sessions[session] = {"turns": [], "mcp": params.get("mcpServers")}
        if stored:
            with open(self.path(session)) as file:  # noqa: PTH123
                self.sessions[session]["turns"] = json.load(file)["turns"]
        if how == "replay":
            self.replay(session)
        self.answer(message, dict(self.config["new"]))

    def replay(self, session: str) -> None:
        for said, answered in self.sessions[session]["turns"]:
            self.chunk(session, said, "user_message_chunk")
            self.update(session, {"sessionUpdate": "tool_call", "toolCallId": "old", "title": "old", "status": "completed"})
            self.update(session, {"sessionUpdate": "plan", "entries": [{"content": "old plan", "status": "completed"}]})
            self.chunk(session, answered)

    def on_session_load(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        self.reopen(message, params, self.config["load"], "load")

    def on_session_resume(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        self.reopen(message, params, self.config["resume"], "resume")

    def on_session_list(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        state = self.config["state"]
        names = [name[:-5] for name in os.listdir(state)] if state else []  # noqa: PTH208
        self.answer(message, {"sessions": [{"sessionId": name, "cwd": "/"} for name in names if self.config["listed"]]})

    def on_session_close(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        if self.config["close"] != "hang":
            self.answer(message, {})

    def setting(self, message: dict[str, Any], params: dict[str, Any]) -> None:
        if self.config["setting_error"]:
            self.fail(message, *self.config["setting_error"])
        else:
            self.answer(message, {})

    on_session_set_mode = on_session_set_config_option = on_session_set_model = setting

    # ---- a turn

    def prompt(self, message: dict[str, Any]) -> None:
        params = message["params"]
        self.session, self.turn = params["sessionId"], message["id"]
        texts = [block["text"] for block in params["prompt"] if block["type"] == "text"]
        own = [text for text in texts if not text.startswith("<host-context>")]
        self.blocks = params["prompt"]
        self.reason, self.usage, self.after, self.failure = "end_turn", None, [], None
        self.obeys = True
        script = own[-1] if own else ""
        script = next((other for start, other in self.config["instead"].items() if script.startswith(start)), script)
        self.note("began", text=script)
        if script.startswith(LATE) and self.config["late"]:
            script = "\n".join(self.config["late"])
        for line in script.split("\n"):
            if self.cancelled.is_set() and self.obeys:
                break
            verb, _, argument = line.partition(" ")
            step = getattr(self, "do_" + verb, None)
            if step is None:
                self.chunk(self.session, line)
            else:
                step(argument)
        stored = self.sessions.get(self.session)
        if stored is not None:
            stored["turns"].append([script, "done"])
            self.save(self.session)
        if self.failure:
            code, text, data = self.failure
            last: dict[str, Any] = {
                "jsonrpc": "2.0",
                "id": message["id"],
                "error": {"code": code, "message": text, "data": data},
            }
        else:
            reason = "cancelled" if self.cancelled.is_set() and self.obeys else self.reason
            last = {"jsonrpc": "2.0", "id": message["id"], "result": {"stopReason": reason}}
            if self.usage:
                last["result"]["usage"] = self.usage
        self.note("ended", how=last.get("result", {}).get("stopReason", "error"))
        self.raw("".join(json.dumps(item) + "\n" for item in [last, *self.after]))
        if self.leaves:
            os._exit(0)

    def do_say(self, text: str) -> None:
        self.chunk(self.session, json.loads(text) if text.startswith('"') else text)

    def do_who(self, argument: str) -> None:
        """The process and the turn."""
        self.chunk(self.session, f"pid={os.getpid()} turn={self.turn};")

    def do_environ(self, name: str) -> None:
        self.chunk(self.session, os.environ.get(name, ""))

    def do_in(self, argument: str) -> None:
        message_id, _, text = argument.partition(" ")
        self.chunk(self.session, text, messageId=message_id)

    def do_think(self, text: str) -> None:
        self.chunk(self.session, text, "agent_thought_chunk")

    def do_update(self, text: str) -> None:
        self.update(self.session, json.loads(text))

    def do_foreign(self, text: str) -> None:
        self.update("another-session", json.loads(text))

    def do_raw(self, text: str) -> None:
        self.raw(json.loads(text))

    def do_hex(self, text: str) -> None:
        self.raw(bytes.fromhex(text))

    def do_huge(self, size: str) -> None:
        """One line of exactly SIZE bytes, its newline included, with a chunk of x."""
        frame = json.dumps(
            {
                "jsonrpc": "2.0",
                "method": "session/update",
                "params": {
                    "sessionId": self.session,
                    "update": {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "%"}},
                },
            }
        )
        head, tail = (frame + "\n").split("%")
        self.raw(head + "x" * (int(size) - len(head) - len(tail)) + tail)

    def do_many(self, argument: str) -> None:
        count, _, text = argument.partition(" ")
        lines = []
        for number in range(int(count)):
            update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text or f"{number} "}}
            params = {"sessionId": self.session, "update": update}
            lines.append(json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}))
            if len(lines) == 1000:
                self.raw("\n".join(lines) + "\n")
                lines = []
        if lines:
            self.raw("\n".join(lines) + "\n")

    def do_many_in(self, count: str) -> None:
        """Chunks of ten characters, each a message of its own."""
        for number in range(int(count)):
            self.chunk(self.session, "0123456789", messageId=f"m{number}")

    def do_blocks(self, argument: str) -> None:
        self.chunk(self.session, json.dumps(self.blocks))

    def do_mcp(self, argument: str) -> None:
        self.chunk(self.session, json.dumps(self.sessions[self.session]["mcp"]))

    def do_tool(self, argument: str) -> None:
        """Call one of LangBot's tools through the session's first MCP server and tell the answer."""
        import urllib.error
        import urllib.request

        name, _, parameters = argument.partition(" ")
        server = self.sessions[self.session]["mcp"][0]
        arguments = {"tool_name": name, "parameters": json.loads(parameters or "{}")}
        params = {"name": "langbot_call_tool", "arguments": arguments}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
        headers = {"Content-Type": "application/json", **{item["name"]: item["value"] for item in server["headers"]}}
        request = urllib.request.Request(server["url"], body, headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
                told = answer.read().decode()
        except urllib.error.HTTPError as exc:
            told = f"HTTP {exc.code}"
        self.note("called", answer=told)
        self.chunk(self.session, told)

    def do_beside(self, argument: str) -> None:
        """``PATH NAME PARAMETERS``: call a tool as ``tool`` does, beside the next steps, when a file exists at the path."""
        path, _, call = argument.partition(" ")

        def calling() -> None:
            self.do_until(path)
            self.note("calling")
            self.do_tool(call)

        threading.Thread(target=calling, daemon=True).start()

    def do_perm(self, argument: str) -> None:
        outcome = self.ask("session/request_permission", {"sessionId": self.session, **json.loads(argument)})
        self.chunk(self.session, json.dumps(outcome))

    def do_risky(self, command: str) -> None:
        """Ask to run a shell command, run it only when that was allowed, and say in which process and turn that was."""
        who = f"pid={os.getpid()} turn={self.turn}"
        self.chunk(self.session, f"I have to ask, {who}.\n")
        call = {
            "toolCallId": f"risky-{self.next_id}",
            "title": "Make it so",
            "kind": "execute",
            "rawInput": {"command": command, "cwd": os.getcwd()},  # noqa: PTH109
        }
        options = [
            {"optionId": "once", "name": "Allow", "kind": "allow_once"},
            {"optionId": "always", "name": "Allow for good", "kind": "allow_always"},
            {"optionId": "no", "name": "Reject", "kind": "reject_once"},
        ]
        params = {"sessionId": self.session, "toolCall": call, "options": options}
        outcome = (self.ask("session/request_permission", params, bound=300) or {}).get("outcome", {})
        chosen = outcome.get("optionId", "cancelled")
        if chosen == "once":
            subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        self.chunk(self.session, f"Answered {chosen}, {who}.")

    def do_request(self, argument: str) -> None:
        method, _, params = argument.partition(" ")
        result = self.ask(method, {"sessionId": self.session, **json.loads(params or "{}")})
        self.chunk(self.session, json.dumps(result))

    def do_spam(self, argument: str) -> None:
        """COUNT permission requests at once, then tell how many got an error and how many were cancelled."""
        count, _, params = argument.partition(" ")
        whole = {"sessionId": self.session, **json.loads(params)}
        for number in range(int(count)):
            self.send({"id": f"spam-{number}", "method": "session/request_permission", "params": whole})
        replies = [self.reply(f"spam-{number}") for number in range(int(count))]
        failed = sum("failed" in reply for reply in replies)
        self.chunk(self.session, f"failed={failed} answered={len(replies) - failed}")

    def do_take_back(self, argument: str) -> None:
        """Send a request, then $/cancel_request for it, then tell its answer."""
        method, _, params = argument.partition(" ")
        self.send({"id": "back", "method": method, "params": {"sessionId": self.session, **json.loads(params)}})
        self.send({"method": "$/cancel_request", "params": {"requestId": "back"}})
        self.chunk(self.session, json.dumps(self.reply("back")))

    def do_term(self, argument: str) -> None:
        """Open a terminal, wait for its end, tell its output, release it."""
        made = self.ask("terminal/create", {"sessionId": self.session, **json.loads(argument)})
        if "failed" in made:
            self.chunk(self.session, json.dumps(made))
            return
        ids = {"sessionId": self.session, "terminalId": made["terminalId"]}
        ended = self.ask("terminal/wait_for_exit", ids)
        view = self.ask("terminal/output", ids)
        self.ask("terminal/release", ids)
        self.chunk(self.session, json.dumps([ended, view]))

    def do_open_term(self, argument: str) -> None:
        made = self.ask("terminal/create", {"sessionId": self.session, **json.loads(argument)})
        self.chunk(self.session, json.dumps(made))

    def do_until_output(self, argument: str) -> None:
        while not self.ask("terminal/output", {"sessionId": self.session, **json.loads(argument)}).get("output"):
            time.sleep(0.01)

    def do_stop(self, reason: str) -> None:
        self.reason = reason

    def do_usage(self, text: str) -> None:
        self.usage = json.loads(text)

    def do_error(self, text: str) -> None:
        self.failure = json.loads(text)

    def do_after(self, text: str) -> None:
        """A chunk right behind the response."""
        update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
        self.after.append(
            {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": self.session, "update": update}}
        )

    def do_after_update(self, text: str) -> None:
        params = {"sessionId": self.session, "update": json.loads(text)}
        self.after.append({"jsonrpc": "2.0", "method": "session/update", "params": params})

    def do_after_permission(self, text: str) -> None:
        params = {"sessionId": self.session, **json.loads(text)}
        self.after.append({"jsonrpc": "2.0", "id": "late", "method": "session/request_permission", "params": params})

    def do_hang(self, argument: str) -> None:
        self.cancelled.wait(120)

    def do_deaf(self, argument: str) -> None:
        self.obeys = False

    def do_sleep_forever(self, argument: str) -> None:
        time.sleep(3600)

    def do_fill(self, size: str) -> None:
        left = int(size)
        while left > 0:
            piece = min(left, 1 << 20)
            self.raw("x" * piece)
            left -= piece

    def do_tell_reply(self, request_id: str) -> None:
        self.chunk(self.session, json.dumps(self.reply(request_id)))

    def do_touch(self, path: str) -> None:
        with open(path, "w"):  # noqa: PTH123
            return

    def do_exit_after(self, argument: str) -> None:
        """Exit right behind the response."""
        self.leaves = True

    def do_until(self, path: str) -> None:
        while not os.path.exists(path):  # noqa: PTH110
            time.sleep(0.005)

    def do_stall(self, argument: str) -> None:
        """Stop reading standard input for good; the next line wakes the reader up to notice."""
        self.stalled.set()

    def do_stderr(self, size: str) -> None:
        left = int(size)
        while left > 0:
            left -= os.write(2, b"e" * 79 + b"\n")

    def do_complain(self, text: str) -> None:
        os.write(2, (text + "\n").encode())

    def do_child(self, argument: str) -> None:
        """A child in a session of its own that ignores SIGTERM; its pid is told."""
        child = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                "import signal,time\nsignal.signal(15, 1)\nprint(1, flush=True)\ntime.sleep(600)",
            ],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        self.chunk(self.session, f"child={child.pid} agent={os.getpid()}")

    def do_hold(self, argument: str) -> None:
        """A child that keeps our standard output open."""
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        self.chunk(self.session, f"child={child.pid} agent={os.getpid()}")

    def do_exit(self, code: str) -> None:
        os._exit(int(code or 1))

    def do_kill(self, argument: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_close_stdout(self, argument: str) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        time.sleep(3600)


if __name__ == "__main__":
    try:
        Agent(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}).serve()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
