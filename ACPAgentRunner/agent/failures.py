"""What agents say when something fails, as our typed errors: one readable text, bounded, without secrets.

Agents wrap a provider's error in every possible way (a JSON text in ``data.message``, in ``data.details``, in the message, or
as the answer itself); :func:`readable` finds the sentence a person needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from acp.exceptions import RequestError

from pkg import limits
from pkg.agent_api import AgentError, Json
from pkg.errors import CodingError
from pkg.redaction import Redactor

AUTH_REQUIRED: Final = -32000
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
NOT_FOUND: Final = -32002
REQUEST_CANCELLED: Final = -32800

_MISSING_CODES: Final = frozenset({-32001, NOT_FOUND})
_MISSING_TEXTS: Final = (
    "no rollout found",  # codex-acp 2.6
    "invalid session identifier",  # gemini 0.61
    "no previous sessions found",  # gemini 0.61 in a directory without any
    "session not found",
    "unknown session",
    "no conversation found",
    "thread not found",
)
_GENERIC: Final = frozenset({"internal error", "error", "invalid params", "invalid request"})
_GENERIC_LEAD: Final = re.compile(r"(?:internal error|invalid params|invalid request): (?=.)", re.IGNORECASE)
_TEXT_KEYS: Final = ("message", "details", "detail", "error", "reason", "description")


def readable(value: Json) -> str:
    """The human sentence inside an error value of any shape; the empty string when there is none."""
    return _readable(value, 0)


def _readable(value: Json, depth: int) -> str:
    if depth > 6:
        return ""
    if isinstance(value, str):
        text = value.strip()
        start = text.find("{")
        if start >= 0 and text.endswith("}"):
            try:
                inner = _readable(json.loads(text[start:]), depth + 1)
            except (ValueError, RecursionError):
                return text
            lead = text[:start].strip().rstrip(":")
            return (f"{lead}: {inner}" if lead and lead not in inner else inner) if inner else text
        return text
    if isinstance(value, Mapping):
        for key in _TEXT_KEYS:
            if text := _readable(value.get(key), depth + 1):
                return text
    return ""


def is_error_json(text: str) -> bool:
    """Whether an answer is nothing but a provider's raw error object (codex-acp 2.6 ends such turns with ``end_turn``)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(readable(value)) and ("error" in value or value.get("type") == "error")


def detail_of(exc: RequestError, redact: Redactor) -> str:
    """The agent's own words about a failed request."""
    message = _GENERIC_LEAD.sub("", readable(str(exc)))
    data = readable(exc.data)
    text = data if message.lower() in _GENERIC or not message else message
    if data and text != data and data not in text:
        text = f"{text}: {data}"
    return redact(text or message)[: limits.ACP_ERROR_CHARS]


def is_missing_session(exc: RequestError) -> bool:
    """Whether an error of load or resume proves that the session does not exist (any more)."""
    if exc.code in _MISSING_CODES:
        return True
    said = f"{exc} {readable(exc.data)}".lower()
    return any(text in said for text in _MISSING_TEXTS)


def agent_error(exc: CodingError) -> AgentError:
    """The form in which an exception ends a turn."""
    return AgentError(exc.code, exc.detail, dict(exc.params), exc.retryable)
