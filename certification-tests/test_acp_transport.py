"""The bytes of an agent's output as protocol messages: lines, noise, malformed messages, and what is never let through."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pkg.rpc_transport import LineAssembler, Oversized, answer_to_nested, answer_to_oversized, nested_deeper, parse_line


def lines_of(data: bytes, cuts: list[int], limit: int = 1000) -> list[bytes | Oversized]:
    assembler = LineAssembler(limit)
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    lines = [line for start, end in itertools.pairwise(bounds) for line in assembler.feed(data[start:end])]
    return [*lines, *assembler.finish()]


@given(st.lists(st.binary(max_size=60).filter(lambda item: b"\n" not in item), min_size=1), st.lists(st.integers(0, 5000)))
def test_lines_do_not_depend_on_where_the_pipe_cuts_them(lines: list[bytes], cuts: list[int]) -> None:
    """Our rule: any split of the stream gives the same lines; an unterminated last one counts."""
    data = b"\n".join(lines)
    expected = lines if lines[-1] else lines[:-1]
    assert lines_of(data, cuts) == expected


@given(st.integers(11, 400), st.lists(st.integers(0, 2000)))
def test_a_line_over_the_limit_is_dropped_and_the_next_one_is_whole(size: int, cuts: list[int]) -> None:
    """Our rule: the connection survives an oversized line, whose size is known and of which both ends are kept."""
    body = bytes(65 + index % 26 for index in range(size))
    first, second, third = lines_of(b"a\n" + body + b"\nnext\n", cuts, limit=10)
    assert (first, third) == (b"a", b"next")
    assert isinstance(second, Oversized)
    assert second.size == size
    assert body.startswith(second.head) or body == second.head
    assert body.endswith(second.tail)


@pytest.mark.parametrize("size", [9, 10])
def test_a_line_of_exactly_the_limit_is_delivered(size: int) -> None:
    """Our rule: the limit is inclusive and does not count the newline."""
    assert lines_of(b"x" * size + b"\n", [3], limit=10) == [b"x" * size]


MESSAGE = b'{"jsonrpc":"2.0","method":"m","params":{}}'


@pytest.mark.parametrize(
    "line",
    [
        MESSAGE,
        b"\xef\xbb\xbf" + MESSAGE,
        MESSAGE + b"\r",
        b"\x00\x00" + MESSAGE + b"\x00",
        b"  \t" + MESSAGE,
        b"\x1b[0m" + MESSAGE,
        b"npm notice done " + MESSAGE,
        b"[" + MESSAGE + b"]",
    ],
)
def test_a_message_is_found_in_whatever_surrounds_it(line: bytes) -> None:
    """Known agents' habits: byte-order marks, CRLF, NUL padding, colours and npm chatter before a message, batches."""
    assert parse_line(line)[0] == [json.loads(MESSAGE)]


@pytest.mark.parametrize(
    "line",
    [
        b"npm WARN deprecated something",
        b"42",
        b'"text"',
        b"null",
        b"true",
        b"[]]",
        b"{",
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b'{"jsonrpc":"2.0"}',
        b'{"id":[1],"result":1}',
        b'{"id":{"a":1},"method":"m"}',
        b'{"id":true,"result":1}',
        b'{"method":7}',
        b'{"jsonrpc": broken',
    ],
    ids=lambda line: line[:20].decode("latin1"),
)
def test_what_is_no_message_is_noise_and_no_exception(line: bytes) -> None:
    """Our rule: nothing an agent prints can end the connection (the library's own reader dies of scalars, null and arrays)."""
    messages, noise = parse_line(line)
    assert messages == []
    assert noise


def test_a_batch_with_one_bad_item_keeps_the_good_ones() -> None:
    """Our rule: an array is taken apart and its unusable items are noise."""
    messages, noise = parse_line(b'[{"method":"a"},7,{"id":1,"result":2}]')
    assert [message.get("method", message.get("result")) for message in messages] == ["a", 2]
    assert noise


def test_an_empty_batch_is_nothing() -> None:
    """Our rule: an empty array and a blank line are silently nothing."""
    assert parse_line(b"[]") == ([], "")
    assert parse_line(b" \r") == ([], "")


def test_control_characters_inside_strings_are_accepted() -> None:
    """Known agents' habit: raw newlines escaped wrongly by shells appear as control characters inside JSON text."""
    messages, _ = parse_line(b'{"method":"m","params":{"text":"a\tb\x01"}}')
    assert messages[0]["params"]["text"] == "a\tb\x01"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("boom", {"code": -32603, "message": "boom"}),
        ({"code": "x", "message": None}, {"code": -32603, "message": "Error"}),
        ({"code": 5, "message": "m", "data": 1}, {"code": 5, "message": "m", "data": 1}),
        ({"code": True, "message": 3}, {"code": -32603, "message": "3"}),
    ],
)
def test_errors_of_any_shape_become_proper_ones(error: Any, expected: Any) -> None:
    """Our rule: a malformed error fails its call and never the connection."""
    messages, _ = parse_line(json.dumps({"id": 1, "error": error, "result": None}).encode())
    assert messages[0]["error"] == expected
    assert "result" not in messages[0]


def test_a_null_error_beside_a_result_is_a_success() -> None:
    """Known agents' habit: some libraries send both keys."""
    messages, _ = parse_line(b'{"id":1,"result":{"a":1},"error":null}')
    assert messages == [{"id": 1, "result": {"a": 1}}]


def test_a_dropped_response_fails_its_call_wherever_its_id_stands() -> None:
    """Our rule: keys come in any order, so the id is looked for at both ends of an oversized line."""
    for head, tail in ((b'{"jsonrpc":"2.0","id":7,"result":"x', b"xx"), (b'{"result":"xx', b'x","id":7}')):
        received, reply = answer_to_oversized(Oversized(99, head, tail))
        assert reply is None
        assert received is not None
        assert received["id"] == 7
        assert received["error"]["data"]["bytes"] == 99


def test_a_dropped_request_is_refused_and_a_dropped_notification_forgotten() -> None:
    """Our rule: an agent whose request was too large is told so under the request's own (text) id."""
    received, reply = answer_to_oversized(Oversized(9, b'{"id":"a-1","method":"fs/write_text_file"', b""))
    assert received is None
    assert reply is not None
    assert reply["id"] == "a-1"
    assert answer_to_oversized(Oversized(9, b'{"method":"session/update","params":{"x', b'"}}')) == (None, None)


@pytest.mark.parametrize("inside", [{"a": 1}, [1], "text", {}, []])
@pytest.mark.parametrize("depth", [0, 5, 900])
def test_depth_is_counted_in_containers_whatever_they_hold(inside: Any, depth: int) -> None:
    """Our rule: a message is judged before anything walks over it, by a walk that no depth can end."""
    value = inside
    for number in range(depth):
        value = [value, 1] if number % 2 else {"a": value, "b": "x"}
    containers = depth + isinstance(inside, dict | list)
    assert not nested_deeper(value, containers)
    assert containers == 0 or nested_deeper(value, containers - 1)


def test_what_is_nested_too_deeply_is_answered_in_its_place() -> None:
    """Our rule: a call fails, a request is refused, a notification is forgotten; nobody waits for ever."""
    received, reply = answer_to_nested({"id": 3, "result": {}})
    assert reply is None
    assert received is not None
    assert (received["id"], received["error"]["code"]) == (3, -32600)
    received, reply = answer_to_nested({"id": "a", "method": "m"})
    assert received is None
    assert reply is not None
    assert reply["id"] == "a"
    assert answer_to_nested({"method": "m"}) == (None, None)
