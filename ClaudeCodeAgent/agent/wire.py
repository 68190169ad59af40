"""The lines of Claude Code's stream-json protocol: one JSON object each way per line, without I/O.

What the program writes is read leniently, because its lines differ between versions; what is sent has exactly the shapes that
Claude Code 2.1.332 takes. A message of the user always says ``client_composed``: without it the program replaces ``@path`` by
the file's content and runs ``/commands``, which people in a chat must not be able to cause.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from pkg import limits, mcp_stdio_shim
from pkg.agent_api import Json, McpServer
from pkg.rpc_transport import Oversized, nested_deeper

Message = dict[str, Any]

HOOKS: Final[Json] = {"PreToolUse": [{"matcher": "*", "hookCallbackIds": ["directory"]}]}
"""What the program tells us before each call, however it is allowed: where the call would run (2.1.332 says it nowhere else).
The answer is always that we have no opinion."""

_BLANK: Final = b" \t\r\n\x00"
_DECODER: Final = json.JSONDecoder(strict=False)
_MESSAGE_START: Final = re.compile(r'\{\s*"[a-z_]+"\s*:')
_DOLLAR: Final = "${__NO_SUCH_VARIABLE__:-$}"
"""What the program makes a plain ``$`` of."""
_PEEK_REQUEST: Final = re.compile(rb'"request_id"\s*:\s*"([^"\\]{1,200})"')
_PEEK_CONTROL: Final = re.compile(rb'"type"\s*:\s*"control_request"')


# ------------------------------------------------------------------ what comes in


def parse_line(line: bytes) -> tuple[Message | None, str]:
    """The message of one line, and what of it is noise (the empty string when nothing is).

    A byte-order mark, ``\\r``, NUL, broken UTF-8 and text before the object are tolerated; an object that is nested deeper
    than ``limits.ACP_JSON_DEPTH`` or has no ``type`` is noise.
    """
    body = line.removeprefix(codecs.BOM_UTF8).strip(_BLANK)
    if not body:
        return None, ""
    text = body.decode("utf-8", "replace")
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        start = _MESSAGE_START.search(text)
        if start is None:
            return None, text
        try:
            value, _ = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return None, text
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return None, text
    many = line.count(b"{") + line.count(b"[") > limits.ACP_JSON_DEPTH
    if many and nested_deeper(value, limits.ACP_JSON_DEPTH):
        return None, "(nested too deeply)"
    return value, ""


def refusal_of_oversized(line: Oversized) -> Message | None:
    """The answer to a request that was too long to be read; ``None`` where the line was none."""
    if not (_PEEK_CONTROL.search(line.head) or _PEEK_CONTROL.search(line.tail)):
        return None
    found = _PEEK_REQUEST.search(line.head) or _PEEK_REQUEST.search(line.tail)
    return None if found is None else control_error(found[1].decode("utf-8", "replace"), "The request is too large.")


# ------------------------------------------------------------------ what goes out


def encoded(message: Message) -> bytes:
    """A message as the line it is sent as."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def user_message(blocks: list[dict[str, Any]], message_id: str) -> Message:
    """A message of the user, inert by ``client_composed``; ``message_id`` is the uuid that ``command_lifecycle`` names."""
    return {
        "type": "user",
        "message": {"role": "user", "content": blocks},
        "parent_tool_use_id": None,
        "session_id": "",
        "uuid": message_id,
        "client_composed": True,
    }


def control_request(request_id: str, subtype: str, fields: Message) -> Message:
    """A request to the program."""
    return {"type": "control_request", "request_id": request_id, "request": {"subtype": subtype, **fields}}


def control_success(request_id: str, response: Message) -> Message:
    """The answer to a request of the program."""
    return {
        "type": "control_response",
        "response": {"subtype": "success", "request_id": request_id, "response": response},
    }


def control_error(request_id: str, error: str) -> Message:
    """The refusal of a request of the program."""
    return {"type": "control_response", "response": {"subtype": "error", "request_id": request_id, "error": error}}


def mcp_servers(servers: tuple[McpServer, ...]) -> dict[str, Json]:
    """The servers as ``mcp_set_servers`` takes them; they travel on stdin alone, because headers hold credentials.

    The program would fill in variables of its own environment; whoever named a server must not learn them, so every value
    arrives as it was given.
    """
    configs: dict[str, Json] = {}
    for server in servers:
        if server.transport == "stdio":
            command, *arguments = server.command or ("",)
            configs[server.name] = {
                "type": "stdio",
                "command": _literal(command),
                "args": [_literal(argument) for argument in arguments],
                "env": {name: _literal(value) for name, value in server.env.items()},
            }
        else:
            headers = {name: _literal(value) for name, value in server.headers.items()}
            configs[server.name] = {"type": server.transport, "url": _literal(server.url), "headers": headers}
    return configs


def _literal(text: str) -> str:
    """``text`` for a place where the program fills in ``${NAME}`` and ``${NAME:-default}`` (in one pass, 2.1.332)."""
    return text.replace("${", _DOLLAR + "{")


def shimmed(server: McpServer, *, local: bool) -> McpServer:
    """An http server as a stdio server that forwards to it; address and headers are in that process's environment alone.

    Elsewhere the forwarding script itself travels on the command line.
    """
    script = Path(mcp_stdio_shim.__file__).resolve()
    command: tuple[str, ...] = (sys.executable, "-I", "-S", str(script))
    if not local:
        command = ("python3", "-I", "-S", "-c", script.read_text(encoding="utf-8"))
    env = mcp_stdio_shim.environment(server.url, dict(server.headers))
    return McpServer(server.name, "stdio", command=command, env=env)
