"""A stdio MCP server that forwards to one http MCP server: for agents that can start servers but not reach them.

A script of the standard library alone, run as ``python3 -I -S <this file>`` in the agent's place. The address and the headers
(a bearer among them) come in the environment and are nowhere else. Messages are lines of JSON on both sides; each is one POST,
whose answer is JSON or a stream of events. A request that cannot be forwarded is answered with a JSON-RPC error. Requests are
forwarded concurrently, up to eight at once.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import urllib.parse

URL = "LANGBOT_MCP_URL"
HEADERS = "LANGBOT_MCP_HEADERS"
AT_ONCE = 8
TIMEOUT = 600.0
BODY_BYTES = 32 * 1024 * 1024


def environment(url: str, headers: dict[str, str]) -> dict[str, str]:
    """The variables this script reads."""
    return {URL: url, HEADERS: json.dumps(headers)}


class Forwarder:
    """Forwards messages and writes every answer as one line."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an http address")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = headers
        self._session = ""
        self._version = ""
        self._output = threading.Lock()
        self._slots = threading.BoundedSemaphore(AT_ONCE)

    def take(self, line: bytes) -> None:
        """Forward one line; requests on a thread of their own, everything else in order."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            self._write({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "Parse error"}})
            return
        is_request = isinstance(message, dict) and "method" in message and message.get("id") is not None
        if not is_request or message["method"] == "initialize":
            self._forward(message, line)
            return
        self._slots.acquire()
        threading.Thread(target=self._forward_and_release, args=(message, line), daemon=True).start()

    def drain(self) -> None:
        """Wait for the requests on their way."""
        for _ in range(AT_ONCE):
            self._slots.acquire(timeout=5.0)

    def _forward_and_release(self, message: dict[str, object], line: bytes) -> None:
        try:
            self._forward(message, line)
        finally:
            self._slots.release()

    def _forward(self, message: object, line: bytes) -> None:
        request_id = message.get("id") if isinstance(message, dict) and "method" in message else None
        try:
            answers = self._post(line)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            answers = []
            if request_id is not None:
                reason = f"The server cannot be reached ({type(exc).__name__})"
                answers = [{"jsonrpc": "2.0", "id": request_id, "error": {"code": -32603, "message": reason}}]
        for answer in answers:
            self._write(answer)
        if isinstance(message, dict) and message.get("method") == "initialize":
            for answer in answers:
                result = answer.get("result") if isinstance(answer, dict) else None
                if isinstance(result, dict):
                    self._version = str(result.get("protocolVersion") or "")

    def _post(self, line: bytes) -> list[object]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        headers = {
            **self._headers,
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        if self._session:
            headers["Mcp-Session-Id"] = self._session
        if self._version:
            headers["MCP-Protocol-Version"] = self._version
        try:
            connection.request("POST", self._path, line.strip(), headers)
            response = connection.getresponse()
            body = response.read(BODY_BYTES + 1)
            if len(body) > BODY_BYTES:
                raise ValueError("the answer is too large")
            if response.status >= 300:
                raise ValueError(f"status {response.status}")
            self._session = response.getheader("Mcp-Session-Id") or self._session
            if not body.strip():
                return []
            if "text/event-stream" in (response.getheader("Content-Type") or ""):
                return _events(body)
            value = json.loads(body)
            return value if isinstance(value, list) else [value]
        finally:
            connection.close()

    def _write(self, message: object) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._output:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def _events(body: bytes) -> list[object]:
    """The messages of an event stream."""
    messages: list[object] = []
    for block in body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(row[5:].lstrip(" ") for row in block.split("\n") if row.startswith("data:"))
        if data:
            messages.append(json.loads(data))
    return messages


def main() -> int:
    """Forward standard input until it ends."""
    url, raw = os.environ.pop(URL, ""), os.environ.pop(HEADERS, "{}")
    try:
        forwarder = Forwarder(url, {str(name): str(value) for name, value in json.loads(raw).items()})
    except (ValueError, AttributeError):
        sys.stderr.write(f"{URL} or {HEADERS} is missing or unusable\n")
        return 2
    for line in sys.stdin.buffer:
        if line.strip():
            forwarder.take(line)
    forwarder.drain()
    return 0


if __name__ == "__main__":
    sys.exit(main())
