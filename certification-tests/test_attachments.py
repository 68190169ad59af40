"""Pictures and files of a message, as hosts really send them: inline, twice, misnamed, mislabelled, too big."""

from __future__ import annotations

import base64

import pytest
from langbot_plugin.api.entities.builtin.runner import AgentInput

from pkg import limits, texts
from pkg.attachments import Collected, clean_name, collect

PNG = b"\x89PNG\r\n\x1a\n" + b"p" * 20


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{b64(data)}"


def gather(*, contents: list[dict[str, object]] | None = None, attachments: list[dict[str, object]] | None = None) -> Collected:
    return collect(AgentInput.model_validate({"text": "x", "contents": contents or [], "attachments": attachments or []}))


def test_a_picture_arrives_from_contents_with_its_real_type() -> None:
    """Host fact: a PNG is labelled image/jpeg and its attachment entry carries no bytes."""
    got = gather(
        contents=[{"type": "text", "text": "cap"}, {"type": "image_base64", "image_base64": data_url(PNG, "image/jpeg")}],
        attachments=[{"ref": "attachment-0", "type": "image", "source": "base64"}],
    )
    assert [(each.kind, each.mime_type, each.data) for each in got.attachments] == [("image", "image/png", PNG)]
    assert got.refused == ()


def test_a_document_sent_in_both_places_is_one_attachment_with_its_name() -> None:
    """Host fact: documents travel twice."""
    url = data_url(b"notes", "text/plain")
    got = gather(
        contents=[{"type": "file_base64", "file_base64": url, "file_name": "notes.txt"}],
        attachments=[{"ref": "attachment-0", "type": "file", "name": "notes.txt", "source": "base64", "content": url}],
    )
    assert [(each.kind, each.name, each.mime_type, each.data) for each in got.attachments] == [
        ("file", "notes.txt", "text/plain", b"notes")
    ]


def test_a_voice_message_listed_as_file_and_as_voice_is_one_audio() -> None:
    """Host fact: voice arrives as two attachments with the same bytes."""
    url = data_url(b"OggS....", "audio/ogg")
    got = gather(attachments=[{"type": "file", "name": "voice.silk", "content": url}, {"type": "voice", "content": url}])
    assert [(each.kind, each.mime_type) for each in got.attachments] == [("audio", "audio/ogg")]


@pytest.mark.parametrize(
    "text", [b64(PNG), b64(PNG).rstrip("="), base64.urlsafe_b64encode(PNG).decode(), b64(PNG)[:8] + "\n" + b64(PNG)[8:]]
)
def test_raw_base64_of_every_flavour_is_read(text: str) -> None:
    """Host fact: base64 comes raw or as a data URL."""
    assert gather(contents=[{"type": "image_base64", "image_base64": text}]).attachments[0].data == PNG


def test_a_data_url_may_stand_where_an_address_is_expected() -> None:
    """Our rule: inline data is inline wherever it stands."""
    got = gather(contents=[{"type": "image_url", "image_url": {"url": data_url(PNG, "image/png")}}])
    assert got.attachments[0].data == PNG


def test_a_data_url_without_base64_is_percent_decoded() -> None:
    """RFC 2397."""
    got = gather(attachments=[{"type": "file", "name": "a", "url": "data:text/plain;charset=utf-8,a%20b"}])
    assert (got.attachments[0].data, got.attachments[0].mime_type) == (b"a b", "text/plain")


def test_an_address_is_never_fetched_and_the_person_is_told() -> None:
    """Our rule: no request leaves the worker because of a message."""
    got = gather(contents=[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}])
    assert got.attachments == ()
    assert [refusal.key for refusal in got.refused] == ["attachment.only_an_address"]
    assert "127.0.0.1" not in texts.render(got.refused[0].key, "en_US", got.refused[0].params)


@pytest.mark.parametrize("text", ["!!!", "data:image/png;base64,%%%", "data:;base64,"])
def test_what_is_not_base64_is_left_out_and_told(text: str) -> None:
    """Our rule: an unreadable attachment never fails the message."""
    got = gather(attachments=[{"type": "file", "name": "x", "content": text}])
    assert (got.attachments, [refusal.key for refusal in got.refused]) == ((), ["attachment.unreadable"])


def test_one_attachment_over_its_bound_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule, at the bound and one byte over it."""
    monkeypatch.setattr(limits, "ATTACHMENT_BYTES", 1000)
    got = gather(attachments=[{"name": "ok", "content": b64(b"a" * 1000)}, {"name": "big", "content": b64(b"b" * 1001)}])
    assert [each.name for each in got.attachments] == ["ok"]
    assert [(refusal.key, refusal.params["name"]) for refusal in got.refused] == [("attachment.too_large", "big")]


def test_something_enormous_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: the bound holds before memory is spent."""
    monkeypatch.setattr(limits, "ATTACHMENT_BYTES", 10)
    got = gather(attachments=[{"name": "x", "content": "!" * 41}])
    assert [refusal.key for refusal in got.refused] == ["attachment.too_large"]


def test_attachments_are_bounded_together_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule."""
    monkeypatch.setattr(limits, "ATTACHMENTS_BYTES", 25)
    got = gather(attachments=[{"name": str(number), "content": b64(bytes([number]) * 10)} for number in range(3)])
    assert [refusal.key for refusal in got.refused] == ["attachment.too_large_together"]
    monkeypatch.setattr(limits, "ATTACHMENTS_MAX", 1)
    got = gather(attachments=[{"name": str(number), "content": b64(bytes([number]) * 10)} for number in range(2)])
    assert [refusal.key for refusal in got.refused] == ["attachment.too_many"]


def test_a_picture_format_no_agent_knows_is_a_file_with_its_claimed_type() -> None:
    """Our rule: only bytes prove a picture."""
    got = gather(contents=[{"type": "image_base64", "image_base64": data_url(b"<svg/>", "image/svg+xml")}])
    assert (got.attachments[0].kind, got.attachments[0].mime_type) == ("file", "image/svg+xml")
    got = gather(contents=[{"type": "image_base64", "image_base64": data_url(b"not a png", "image/png")}])
    assert (got.attachments[0].kind, got.attachments[0].mime_type) == ("file", "application/octet-stream")


@pytest.mark.parametrize(
    ("given_name", "clean"),
    [
        ("../../e.txt", "e.txt"),
        ("C:\\x\\y.txt", "y.txt"),
        ("a\x00b\u202ec.txt", "abc.txt"),
        ("..", ""),
        ("/", ""),
        ("x" * 200 + ".txt", "x" * 124 + ".txt"),
        ("报告.pdf", "报告.pdf"),
    ],
)
def test_a_name_is_only_a_label(given_name: str, clean: str) -> None:
    """Host fact: names are raw user input; our rule: never a path, never invisible characters, bounded."""
    assert clean_name(given_name) == clean
