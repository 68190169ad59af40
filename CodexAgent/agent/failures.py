"""What Codex says when something fails, as our typed errors: readable, bounded, without secrets.

``codexErrorInfo`` is a word or an object of one key (Codex 0.171); an unknown one is a plain agent error with Codex's own text.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.peer import RpcError
from pkg import limits
from pkg.agent_api import AgentError, Json
from pkg.errors import CodingError
from pkg.lenient import as_dict, as_int, as_str
from pkg.redaction import Redactor

_CODES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "contextWindowExceeded": "coding.model_context_full",
        "usageLimitExceeded": "coding.model_usage_limit",
        "sessionBudgetExceeded": "coding.model_usage_limit",
        "rateLimitExceeded": "coding.model_rate_limited",
        "serverOverloaded": "coding.model_overloaded",
        "flexUnavailable": "coding.model_overloaded",
        "policyCapacityUnavailable": "coding.model_overloaded",
        "internalServerError": "coding.model_overloaded",
        "modelNotFound": "coding.model_unknown",
        "unauthorized": "coding.agent_login_required",
        "sandboxError": "coding.sandbox_unusable",
    }
)
_STATUS_CODES: Final[Mapping[int, str]] = types.MappingProxyType(
    {401: "coding.agent_login_required", 403: "coding.agent_login_required", 429: "coding.model_rate_limited"}
)
_RETRYABLE: Final = frozenset({"coding.model_rate_limited", "coding.model_overloaded", "coding.model_unreachable"})
_UNREACHABLE: Final = frozenset(
    {
        "httpConnectionFailed",
        "responseStreamConnectionFailed",
        "responseStreamDisconnected",
        "responseTooManyFailedAttempts",
    }
)
_ADDRESS: Final = re.compile(r",? ?(?:for )?(?:url|request id): ?\S+|https?://\S+")

_MISSING: Final = ("no rollout found for thread", "invalid session id", "invalid thread id")
_BUSY: Final = ("already has an active writer",)
_NOT_STEERABLE: Final = ("expected active turn", "no active turn", "cannot accept", "not steerable", "cannot steer")


@dataclass(frozen=True, slots=True)
class Place:
    """What a refusal for want of an account tells a person: the command that signs in, and where to run it."""

    login: str
    machine: str


def detail_of(text: str, redact: Redactor) -> str:
    """Codex's own words as shown to people: no addresses, no secrets, bounded."""
    return redact(_ADDRESS.sub("", text)).strip()[: limits.ACP_ERROR_CHARS]


def turn_error(error: Json, place: Place, redact: Redactor) -> AgentError:
    """The error of a failed turn."""
    item = as_dict(error)
    info = item.get("codexErrorInfo")
    kind, status = _kind(info)
    code = _CODES.get(kind, "")
    if not code and kind in _UNREACHABLE:
        code = _STATUS_CODES.get(status or 0, "")
        if not code and (status is None or status >= 500):
            code = "coding.model_unreachable" if status is None else "coding.model_overloaded"
    code = code or "coding.agent_error"
    said = as_str(item.get("message"))
    if more := as_str(item.get("additionalDetails")):
        said = f"{said}: {more}" if more not in said else said
    params: dict[str, str] = {"machine": place.machine}
    if code == "coding.agent_login_required":
        params["command"] = place.login
    return AgentError(code, detail_of(said, redact), params, retryable=code in _RETRYABLE)


def _kind(info: Json) -> tuple[str, int | None]:
    if isinstance(info, str):
        return info, None
    for key, value in as_dict(info).items():
        return str(key), as_int(as_dict(value).get("httpStatusCode"))
    return "", None


def agent_error(exc: CodingError) -> AgentError:
    """The form in which an exception ends a turn."""
    return AgentError(exc.code, exc.detail, dict(exc.params), exc.retryable)


def is_missing_thread(exc: RpcError) -> bool:
    """Whether a refused resume proves that there is no such thread (any more); only Codex's text says so."""
    return any(text in exc.message.lower() for text in _MISSING)


def is_busy_thread(exc: RpcError) -> bool:
    """Whether another process writes to the thread."""
    return any(text in exc.message.lower() for text in _BUSY)


def is_stale_turn(exc: RpcError) -> bool:
    """Whether a steer came too late, or for a turn that takes none: then the message is the next turn's."""
    return any(text in exc.message.lower() for text in _NOT_STEERABLE)
