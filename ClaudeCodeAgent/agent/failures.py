"""Why a turn ended, from its result: a stop reason, or one readable error with its class.

``is_error`` decides, never ``subtype``: an API error's subtype is ``success`` (2.1.332). What the program calls the class of an
API error stands in the ``error`` of the message that tells it. The texts under ``errors`` of an interrupted turn are
diagnostics and shown to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pkg import limits
from pkg.agent_api import AgentError, TurnEnded
from pkg.errors import CodingError
from pkg.lenient import as_dict, as_int, as_list, as_str
from pkg.redaction import Redactor

LOGIN: Final = "claude auth login"
MISSING_SESSION: Final = "no conversation found with session id"
ROOT_BYPASS: Final = "cannot be used with root/sudo privileges"

_BUSY: Final = frozenset({429, 500, 502, 503, 504, 529})
_STOP_REASONS: Final = frozenset({"max_tokens", "refusal"})


@dataclass(frozen=True, slots=True)
class Account:
    """Whose credentials the program works with: those of the form, or its own sign-in on a machine."""

    configured: bool
    machine: str


def said(result: dict[str, Any]) -> str:
    """The program's own sentence about a failed result."""
    errors = "\n".join(text for item in as_list(result.get("errors")) if (text := as_str(item).strip()))
    return errors or as_str(result.get("result")).strip()


def is_interrupted(result: dict[str, Any]) -> bool:
    """Whether a result says that the work was cut off, by us or by a refusal that asked for it."""
    return as_str(result.get("terminal_reason")).startswith("aborted")


def is_missing_session(text: str) -> bool:
    """Whether the program proves that a session it should resume does not exist."""
    return MISSING_SESSION in text.lower()


def turn_end(result: dict[str, Any], error_class: str, account: Account, redact: Redactor) -> TurnEnded:
    """The end of a turn with this last ``result``; ``error_class`` is that of the turn's last API error, if any."""
    if is_interrupted(result):
        return TurnEnded("cancelled")
    if result.get("is_error") is not True:
        reason = as_str(result.get("stop_reason"))
        return TurnEnded(reason if reason in _STOP_REASONS else "end_turn")
    if as_str(result.get("subtype")) == "error_max_turns":
        return TurnEnded("max_turn_requests")
    if as_str(result.get("stop_reason")) == "refusal":
        return TurnEnded("refusal")
    return TurnEnded("error", error_of(result, error_class, account, redact))


def error_of(result: dict[str, Any], error_class: str, account: Account, redact: Redactor) -> AgentError:
    """The readable error of a failed result."""
    detail = redact(said(result))[: limits.ACP_ERROR_CHARS]
    status = as_int(result.get("api_error_status"))
    reason = as_str(result.get("terminal_reason"))
    if as_str(result.get("subtype")) == "error_max_budget_usd":
        return AgentError("coding.claude_budget", params={"field": "max-budget-usd"})
    if reason in ("prompt_too_long", "blocking_limit"):
        return AgentError("coding.claude_context_full", detail)
    if error_class == "authentication_failed" or status in (401, 403):
        if account.configured:
            return AgentError("coding.claude_key_refused", detail)
        # What it says itself names a command that is typed in a terminal of its own, which a chat is not.
        return AgentError("coding.agent_login_required", params={"command": LOGIN, "machine": account.machine})
    if error_class == "billing_error":
        return AgentError("coding.claude_billing", detail)
    if error_class == "model_not_found":
        return AgentError("coding.claude_model_unknown", detail, {"field": "model"})
    if reason == "api_error" and status is None and error_class in ("", "unknown", "server_error"):
        return AgentError("coding.claude_unreachable", detail, retryable=True)
    if status in _BUSY or error_class in ("rate_limit", "server_error", "overloaded"):
        return AgentError("coding.claude_service_busy", detail, retryable=True)
    return AgentError("coding.agent_error", detail)


def context_usage(response: dict[str, Any]) -> tuple[int | None, int | None]:
    """Used and available tokens in an answer to ``get_context_usage``."""
    return as_int(response.get("totalTokens")), as_int(response.get("maxTokens") or as_dict(response).get("rawMaxTokens"))


def agent_error(exc: CodingError) -> AgentError:
    """The form in which an exception ends a turn."""
    return AgentError(exc.code, exc.detail, dict(exc.params), exc.retryable)
