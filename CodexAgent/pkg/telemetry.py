"""What a run leaves in the host's ledger about its tool calls and tokens: bounded in size and in number.

The host handles about 15 results per second, and what waits in line delays the answer. So tool calls beyond a steady rate
are only counted; a call whose start was recorded always gets its end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pkg import limits
from pkg.agent_api import Json, ToolFinished, UsageReported
from pkg.text_clean import clean

_DEPTH: Final = 6
_ITEMS: Final = 50


def bounded(value: Json, *, max_bytes: int = limits.TELEMETRY_VALUE_BYTES) -> Json:
    """``value`` with long strings, long lists and deep levels cut, at most ``max_bytes`` of JSON; says what it cut."""
    for chars, items in ((limits.TELEMETRY_STRING_CHARS, _ITEMS), (limits.TELEMETRY_STRING_CHARS // 8, _ITEMS // 4), (60, 6)):
        small = _bounded(value, chars, items, _DEPTH)
        if len(json.dumps(small)) <= max_bytes:
            return small
    return {"truncated": True} if isinstance(value, Mapping) else "…"


def _bounded(value: Json, chars: int, items: int, depth: int) -> Json:
    if isinstance(value, str):
        text = clean(value[:chars])
        return text if len(value) <= chars else f"{text}… ({len(value)} characters)"
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, int) or abs(value) < 2**63 else str(value)[:40]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        pairs = list(value.items())[:items]
        out = {clean(str(key)[:100]): _bounded(item, chars, items, depth - 1) for key, item in pairs}
        if len(value) > items:
            out["…"] = f"{len(value) - items} more"
        return out
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        listed = [_bounded(item, chars, items, depth - 1) for item in value[:items]]
        return listed if len(value) <= items else [*listed, f"… {len(value) - items} more"]
    return f"({type(value).__name__})"


def tool_result(event: ToolFinished) -> dict[str, Json]:
    """What the ledger keeps of a finished tool call: status, output and per file how many lines it changed."""
    out: dict[str, Any] = {"status": event.status}
    if event.output:
        out["output"] = event.output
    if event.diffs:
        out["files"] = [
            {"path": diff.path, "old_lines": _lines(diff.old_text), "new_lines": _lines(diff.new_text)} for diff in event.diffs
        ]
    if event.truncated:
        out["truncated"] = True
    small = bounded(out)
    return small if isinstance(small, dict) else {"status": event.status}


def _lines(text: str | None) -> int:
    return 0 if not text else text.count("\n") + (not text.endswith("\n"))


@dataclass(slots=True)
class Rate:
    """A bucket of results: ``burst`` at once, ``per_second`` in the long run."""

    per_second: float = limits.TELEMETRY_PER_SECOND
    burst: float = limits.TELEMETRY_BURST
    _level: float = limits.TELEMETRY_BURST
    _at: float | None = None

    def take(self, count: int, now: float) -> bool:
        """Whether ``count`` results may be sent now."""
        if self._at is not None:
            self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.per_second)
        self._at = now
        if self._level < count:
            return False
        self._level -= count
        return True


@dataclass(slots=True)
class Usage:
    """Tokens of a run: within a turn the last report counts, over turns they add up. Unknown stays unknown."""

    _earlier: UsageReported | None = None
    _turn: UsageReported | None = None

    def report(self, usage: UsageReported) -> None:
        """Take one report of the running turn; fields it leaves open keep what an earlier report said."""
        self._turn = usage if self._turn is None else _over(self._turn, usage)

    def end_turn(self) -> None:
        """The turn's numbers are final."""
        if self._turn is not None:
            turn = _totalled(self._turn)
            self._earlier = turn if self._earlier is None else _plus(self._earlier, turn)
            self._turn = None

    def result(self) -> dict[str, int | str] | None:
        """The host's form: whole numbers under the provider-neutral names; ``None`` when the agent reported nothing."""
        self.end_turn()
        total = self._earlier
        if total is None:
            return None
        named: dict[str, int | str | None] = {
            "prompt_tokens": total.input_tokens,
            "completion_tokens": total.output_tokens,
            "total_tokens": total.total_tokens,
            "cached_input_tokens": total.cached_input_tokens,
            "context_used": total.context_used,
            "context_size": total.context_size,
            "cost": clean(total.cost)[:64] or None,
        }
        return {key: value for key, value in named.items() if value is not None} or None


def _totalled(usage: UsageReported) -> UsageReported:
    """With the total filled in where both halves are known and the agent gave none."""
    if usage.total_tokens is not None or usage.input_tokens is None or usage.output_tokens is None:
        return usage
    return dataclasses.replace(usage, total_tokens=usage.input_tokens + usage.output_tokens)


def _over(old: UsageReported, new: UsageReported) -> UsageReported:
    return UsageReported(
        input_tokens=_last(old.input_tokens, new.input_tokens),
        output_tokens=_last(old.output_tokens, new.output_tokens),
        total_tokens=_last(old.total_tokens, new.total_tokens),
        cached_input_tokens=_last(old.cached_input_tokens, new.cached_input_tokens),
        context_used=_last(old.context_used, new.context_used),
        context_size=_last(old.context_size, new.context_size),
        cost=new.cost or old.cost,
    )


def _plus(old: UsageReported, new: UsageReported) -> UsageReported:
    return UsageReported(
        input_tokens=_sum(old.input_tokens, new.input_tokens),
        output_tokens=_sum(old.output_tokens, new.output_tokens),
        total_tokens=_sum(old.total_tokens, new.total_tokens),
        cached_input_tokens=_sum(old.cached_input_tokens, new.cached_input_tokens),
        context_used=_last(old.context_used, new.context_used),
        context_size=_last(old.context_size, new.context_size),
        cost=new.cost or old.cost,
    )


def _last(old: int | None, new: int | None) -> int | None:
    return old if new is None else new


def _sum(old: int | None, new: int | None) -> int | None:
    return _last(old, new) if old is None or new is None else old + new
