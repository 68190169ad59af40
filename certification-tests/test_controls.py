"""What counts as a control typed in the chat."""

from __future__ import annotations

import pytest

from pkg.controls import Control, parse


@pytest.mark.parametrize(
    "text",
    ["/stop", " /stop\n", "/STOP", "／stop", "／ｓｔｏｐ", "\u3000/stop\u3000", "/stop@my_bot", "@my_bot /stop", "\u200b/stop"],
)
def test_stop_is_recognised_however_it_was_typed(text: str) -> None:
    """Our rule: case, surrounding space, full-width characters and mentions don't matter."""
    assert parse(text) is Control.STOP


@pytest.mark.parametrize(
    "text",
    ["", "stop", "/stop it", "please /stop", "/stopping", "//stop", "/ stop", "/start", "/stop\n/stop", "/stop" + " " * 300],
)
def test_anything_else_belongs_to_the_agent(text: str) -> None:
    """Our rule: a control is the whole message and nothing but it."""
    assert parse(text) is None
