"""The real Codex, its pinned version, against a loopback model: text, sessions, endings."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from codex_harness import ended, of, rest_of_turn, text, turn, until
from real_codex import ANSWERS, Codex, real_codex, schemas

from agent.requests import refusal_of
from pkg.agent_api import (
    Attachment,
    Notice,
    Prompt,
    SessionStarted,
    TextDelta,
    ThoughtDelta,
    ToolFinished,
    TurnEnded,
    UsageReported,
)
from pkg.errors import SessionUnavailable
from testkit.json_schema import problems
from testkit.responses_fixture import KEY

pytestmark = [pytest.mark.real_codex, pytest.mark.asyncio, pytest.mark.timeout(180)]


@pytest_asyncio.fixture
async def codex(codex_program: Path) -> AsyncIterator[Codex]:
    """The real program with an account of its own."""
    async with real_codex(codex_program) as made:
        yield made


def one_pixel() -> bytes:
    """The smallest picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(4))) + chunk(b"IEND", b"")


class TestText:
    """What the model says."""

    async def test_an_answer_with_its_cost(self, codex: Codex) -> None:
        """Text in pieces and once, and the tokens the model's server counted."""
        async with codex.session() as session:
            assert session.version == "0.171.0"
            events = await turn(session, "[[ say hello from the model ]]")
            assert text(events) == "hello from the model"
            assert ended(events) == TurnEnded("end_turn")
            (usage,) = of(events, UsageReported)
            assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (120, 30, 150)
            assert usage.context_size > 0
            again = await turn(session, "[[ run true ;; say more ]]", choose="accept")
            (usage,) = of(again, UsageReported)
            assert usage.total_tokens == 300

    async def test_thoughts_and_commentary_are_apart_from_the_answer(self, codex: Codex) -> None:
        """Reasoning summaries and what the model says on its way."""
        async with codex.session() as session:
            events = await turn(session, "[[ reason thinking hard | the answer ]]")
            assert text(events) == "the answer"
            assert "thinking hard" in "".join(event.text for event in of(events, ThoughtDelta))
            events = await turn(session, "[[ comment on my way | say arrived ]]")
            assert text(events) == "arrived"
            assert "on my way" in "".join(event.text for event in of(events, ThoughtDelta))

    async def test_a_model_that_writes_code_to_call_tools(self, codex: Codex) -> None:
        """Current models run a script that calls tools; commands look the same to people."""
        async with codex.session(account={"model": "gpt-6.2-sol"}) as session:
            script = 'const r = await tools.exec_command({cmd:"echo from code"}); text(r.output)'
            events = await turn(session, f"[[ custom exec {script} ]]", choose="accept")
            (finished,) = of(events, ToolFinished)
            assert (finished.title, finished.status) == ("echo from code", "completed")
            assert "from code" in finished.output

    async def test_five_megabytes_come_whole(self, codex: Codex) -> None:
        """Codex sends them as three lines of that size."""
        async with codex.session() as session:
            assert len(text(await turn(session, "[[ huge 5000000 ]]"))) == 5_000_000

    async def test_four_threads_at_once(self, codex: Codex) -> None:
        """Four sessions, each waiting for the others."""
        gates = [codex.place / f"gate{number}" for number in range(4)]
        async with (
            codex.session() as one,
            codex.session() as two,
            codex.session() as three,
            codex.session() as four,
        ):
            sessions = (one, two, three, four)
            for session, gate in zip(sessions, gates, strict=True):
                await session.prompt(Prompt(f"[[ hold {gate} ]]"))
                await until(session, TextDelta)
            for gate in gates:
                gate.touch()
            told = await asyncio.gather(*(rest_of_turn(session) for session in sessions))
            assert all("released" in text(events) for events in told)

    @pytest.mark.parametrize(
        "words", ["/new", "/compact", "@/etc/passwd", "look at @/etc/passwd please", "!touch ran", "# remember this"]
    )
    async def test_what_people_write_is_inert(self, words: str, codex: Codex) -> None:
        """Codex 0.171: over its app-server text is text, where its terminal runs commands and looks for files."""
        async with codex.session() as session:
            before = session.session_id
            assert text(await turn(session, f"{words} [[ say plain ]]")) == "plain"
            assert session.session_id == before
            assert words in text(await turn(session, "[[ recall ]]"))
        assert "root:" not in codex.model.shown
        assert not (codex.workspace / "ran").exists()

    @pytest.mark.parametrize("whose", ["account", "workspace"])
    async def test_known_gap_a_skill_is_called_by_its_name(self, whose: str, codex: Codex) -> None:
        """Codex 0.171: ``$name`` puts that skill's text into the conversation, whoever writes it; that alone starts nothing."""
        above = codex.place / "home" / ".codex" if whose == "account" else codex.workspace / ".agents"
        folder = above / "skills" / "heron-work"
        folder.mkdir(parents=True)
        described = "---\nname: heron-work\ndescription: what herons do\n---\n"
        (folder / "SKILL.md").write_text(f"{described}canary-of-the-skill\n")
        async with codex.session() as session:
            assert text(await turn(session, "[[ say hello ]]")) == "hello"
            assert "canary-of-the-skill" not in codex.model.shown
            events = await turn(session, "$heron-work [[ say plain ]]")
            assert text(events) == "plain"
            assert of(events, ToolFinished) == []
            assert "canary-of-the-skill" in codex.model.shown

    async def test_pictures_and_files_reach_the_model(self, codex: Codex) -> None:
        """A picture inline and without a path; a file by its place in the workspace, gone with the session."""
        png = one_pixel()
        picture = Attachment("image", "dot.png", "image/png", png)
        document = Attachment("file", "notes.txt", "text/plain", b"the word is heron")
        async with codex.session(policy="allow-all") as session:
            await session.prompt(Prompt("[[ run cat .langbot/attachments/*notes.txt ]]", (picture, document)))
            events = await rest_of_turn(session)
            assert "heron" in text(events)
        assert "data:image/png;base64," in codex.model.shown
        assert not list((codex.workspace / ".langbot" / "attachments").iterdir())

    async def test_a_file_for_another_machine_goes_through_the_app_server(self, codex: Codex) -> None:
        """Where the workspace cannot be written to from here, Codex itself puts it there, and takes it away in the end."""
        codex.launcher.local = False
        document = Attachment("file", "../odd name.txt", "text/plain", b"the word is heron")
        async with codex.session(policy="allow-all") as session:
            await session.prompt(Prompt("[[ run cat .langbot/attachments/*name.txt ]]", (document,)))
            assert "heron" in text(await rest_of_turn(session))
            assert (codex.workspace / ".langbot" / ".gitignore").read_text() == "*\n"
        assert not list((codex.workspace / ".langbot" / "attachments").iterdir())
        methods = [message.get("method") for message in codex.launcher.sent]
        assert methods.count("fs/writeFile") == 2

    @pytest.mark.parametrize("linked", ["folder", "attachments", "ignore", "dangling ignore"])
    async def test_no_link_in_the_workspace_leads_a_file_out_of_it(self, linked: str, codex: Codex) -> None:
        """The app-server writes outside of its sandbox and follows links, which a workspace may hold from the beginning."""
        codex.launcher.local = False
        outside = codex.place / "outside"
        outside.mkdir()
        (outside / "precious").write_text("as it was")
        folder = codex.workspace / ".langbot"
        if linked == "folder":
            folder.symlink_to(outside)
        else:
            folder.mkdir()
            name = "attachments" if linked == "attachments" else ".gitignore"
            target = {"attachments": outside, "ignore": outside / "precious"}.get(linked, outside / "new")
            (folder / name).symlink_to(target)
        document = Attachment("file", "name.txt", "text/plain", b"the word is heron")
        async with codex.session() as session:
            await session.prompt(Prompt("hello", (document,)))
            events = await rest_of_turn(session)
            assert [path.name for path in outside.rglob("*")] == ["precious"]
            assert (outside / "precious").read_text() == "as it was"
        refused = "coding.attachment_unsupported" in [event.code for event in of(events, Notice)]
        assert refused == (linked in ("folder", "attachments"))


class TestSessions:
    """Threads that outlive their process."""

    async def test_a_thread_goes_on_after_its_process_was_killed(self, codex: Codex) -> None:
        """The history is the account's; the model hears what was said before."""
        async with codex.session() as session:
            await turn(session, "remember the heron [[ say noted ]]")
            thread = session.session_id
            os.kill(codex.launcher.processes[-1].pid, signal.SIGKILL)
            await session.close()
        async with codex.session(resume_session_id=thread) as session:
            first = (await until(session, SessionStarted))[0]
            assert first == SessionStarted(thread, resumed=True)
            events = await turn(session, "[[ recall ]]")
            assert "remember the heron" in text(events)
            (usage,) = of(events, UsageReported)
            assert usage.total_tokens == 150

    @pytest.mark.parametrize("unknown", ["01a22d62-9a6c-79c3-a5b1-f9d23619be87", "not an id"])
    async def test_an_unknown_thread_is_replaced_and_that_is_said(self, unknown: str, codex: Codex) -> None:
        """Codex's own words prove it."""
        async with codex.session(resume_session_id=unknown) as session:
            first = (await until(session, SessionStarted))[0]
            assert isinstance(first, SessionStarted)
            assert first.lost_history
            assert text(await turn(session, "[[ say fresh ]]")) == "fresh"

    async def test_one_writer_at_a_time(self, codex: Codex, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ours goes by the real path of the sessions; Codex's own is heeded where ours is not asked."""
        monkeypatch.setattr("agent.home.writer_guard.__kwdefaults__", {"wait": 0.2})
        async with codex.session() as session:
            await turn(session, "[[ say mine ]]")
            for _ in range(2):
                with pytest.raises(SessionUnavailable) as caught:
                    async with codex.session(resume_session_id=session.session_id):
                        pass
                assert caught.value.code == "coding.session_busy"
                monkeypatch.setattr("agent.home.LOCKS", ".elsewhere")
        async with codex.session(resume_session_id=session.session_id) as again:
            assert again.session_id == session.session_id

    async def test_two_accounts_know_nothing_of_each_other(self, codex: Codex) -> None:
        """Neither sessions nor sign-in: another home has never heard of the thread."""
        async with codex.session() as session:
            await turn(session, "[[ say mine ]]")
        async with codex.session(account={"home": "other"}, resume_session_id=session.session_id) as other:
            first = (await until(other, SessionStarted))[0]
            assert isinstance(first, SessionStarted)
            assert first.lost_history
        mine, theirs = (codex.place / name / ".codex" / "sessions" for name in ("home", "other"))
        names = [path.name for path in mine.rglob("*.jsonl")]
        assert len(names) == 1
        assert not [path for path in theirs.rglob("*.jsonl") if path.name in names]

    async def test_nothing_of_a_run_is_written_into_the_account(self, codex: Codex) -> None:
        """Its settings stay as they were, and no secret of a run is in any of its files."""
        async with codex.session(env={"MY_SECRET": "canary-of-the-run"}, options={"model": "gpt-5.5"}) as session:
            config = codex.place / "home" / ".codex" / "config.toml"
            before = config.read_text()
            await turn(session, "[[ run env ;; say done ]]", choose="accept")
        assert config.read_text() == before
        for path in (codex.place / "home").rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert b"canary-of-the-run" not in data, path
                assert KEY.encode() not in data, path


class TestEndings:
    """What a person reads when the model fails."""

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            ("http 401", "coding.agent_login_required"),
            ("http 429", "coding.model_rate_limited"),
            ("http 400", "coding.agent_error"),
            ("http 404", "coding.model_unknown"),
            ("drop", "coding.agent_error"),
            ("failed context_length_exceeded | too long", "coding.model_context_full"),
            ("failed insufficient_quota | used up", "coding.model_usage_limit"),
            ("failed server_is_overloaded | busy", "coding.model_overloaded"),
        ],
    )
    async def test_each_failure_in_its_own_words(self, script: str, code: str, codex: Codex) -> None:
        """The turn ends with a code of ours; the session goes on."""
        async with codex.session() as session:
            end = ended(await turn(session, f"[[ {script} ]]"))
            assert end.stop_reason == "error"
            assert end.error is not None
            assert end.error.code == code
            assert "127.0.0.1" not in end.error.detail
            assert text(await turn(session, "[[ say on ]]")) == "on"

    @pytest.mark.parametrize("script", ["http 500", "failed rate_limit_exceeded | slow down"])
    async def test_what_codex_retries_is_progress_until_it_fails(self, script: str, codex: Codex) -> None:
        """With one retry allowed; ``willRetry`` is no end."""
        async with codex.session(account={"retries": "request_max_retries = 0\nstream_max_retries = 1"}) as session:
            events = await turn(session, f"[[ {script} ]]")
            end = ended(events)
            assert end.error is not None
            assert end.error.code in ("coding.model_overloaded", "coding.model_rate_limited")

    async def test_a_hiccup_is_survived(self, codex: Codex) -> None:
        """One failure, then an answer."""
        async with codex.session(account={"retries": "request_max_retries = 0\nstream_max_retries = 3"}) as session:
            events = await turn(session, "[[ httpn 503 1 ]]")
            assert text(events) == "ok after 2 tries"
            assert "status.reconnecting" in [event.code for event in of(events, Notice)]

    async def test_a_model_that_cannot_be_reached_is_given_up(self, codex: Codex) -> None:
        """Codex would retry a refused connection for ever; it is told not to."""
        account = {"url": "http://127.0.0.1:1", "retries": "request_max_retries = 0\nstream_max_retries = 1"}
        async with codex.session(account=account) as session:
            events = await turn(session, "hello")
            end = ended(events)
            assert end.error is not None
            assert (end.error.code, end.error.retryable) == ("coding.model_unreachable", True)

    async def test_a_missing_key_is_said_at_once(self, codex: Codex) -> None:
        """Codex names the variable."""
        async with codex.session(env={"FIXTURE_API_KEY": ""}) as session:
            end = ended(await turn(session, "hello"))
            assert end.error is not None
            assert "FIXTURE_API_KEY" in end.error.detail

    async def test_nobody_signed_in_is_said_before_any_turn(self, codex: Codex) -> None:
        """An account without sign-in and without settings."""
        bare = codex.place / "bare"
        bare.mkdir()
        with pytest.raises(SessionUnavailable) as caught:
            async with codex.session(env={"HOME": str(bare), "CODEX_HOME": str(bare / ".codex")}):
                pass
        assert caught.value.code == "coding.agent_login_required"

    async def test_a_key_from_the_form_works_without_signing_in(self, codex: Codex) -> None:
        """In an account without sign-in; it is written nowhere."""
        bare = codex.place / "bare"
        bare.mkdir()
        home = bare / ".codex"
        keyed = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{codex.model.url}/v1"}
        env = {"HOME": str(bare), "CODEX_HOME": str(home), **keyed}
        async with codex.session(env=env, options={"model": "gpt-5.5"}) as session:
            assert text(await turn(session, "[[ say signed in by key ]]")) == "signed in by key"
            thread = session.session_id
        async with codex.session(env=env, options={"model": "gpt-5.5"}, resume_session_id=thread) as session:
            assert text(await turn(session, "[[ say again ]]")) == "again"
        assert not (home / "auth.json").exists()
        for path in home.rglob("*"):
            assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


async def test_every_refusal_is_valid_for_its_request(codex_program: Path) -> None:
    """What nobody serves is refused in a shape that this Codex understands."""
    generated = schemas(str(codex_program))
    for method, name in ANSWERS.items():
        assert [*problems(refusal_of(method), generated[name], generated[name])] == [], method
