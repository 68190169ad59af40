"""Native sessions and their accounts through built packages in real workers: what goes on, what stays apart, who may write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.responses_fixture import KEY, ResponsesFixture, codex_home, responses_fixture
from testkit.sdk_worker import SdkWorker, built, descendants, gone, sdk_worker

pytestmark = [pytest.mark.sdk_worker, pytest.mark.asyncio, pytest.mark.timeout(240)]

CODEX = "CodexAgent"
SECRETS = {"agent-secret-values": json.dumps({"KEY": KEY})}


@pytest.fixture
def place() -> Iterator[Path]:
    """A place outside of temporary directories."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="native-")).resolve()
    (made / "workspace").mkdir()
    yield made
    shutil.rmtree(made)


def codex_form(program: Path, place: Path, model: ResponsesFixture, home: str = "home", **fields: Any) -> dict[str, Any]:
    """A runner form for the real Codex in an account of its own."""
    env = {**codex_home(place / home, model.url), "FIXTURE_API_KEY": "${secret:KEY}"}
    base = {"command": str(program), "workspace": str(place / "workspace"), "env-json": json.dumps(env)}
    return {**base, **{name.replace("_", "-"): value for name, value in fields.items()}}


def threads(place: Path, home: str) -> set[str]:
    """The histories of an account."""
    return {path.name for path in (place / home / ".codex" / "sessions").rglob("*.jsonl")}


def pinned(worker: SdkWorker) -> str:
    """The one session that the host keeps for the chat."""
    (stored,) = worker.host().state.values()
    value: str = stored["value"]
    return value


@pytest.mark.real_codex
async def test_codex_auth_and_resume_continuity(codex_program: Path, place: Path, tmp_path: Path) -> None:
    """Two accounts of one machine: each goes on with its own sessions over new processes and workers, none sees the other's.

    A sign-in that the account has is left as it is, and neither a session nor a sign-in is copied, linked or shared.
    """
    async with responses_fixture() as model:
        forms = {name: codex_form(codex_program, place, model, name, keep_warm=0) for name in ("one", "two")}
        signed_in = {}
        for name in forms:
            auth = place / name / ".codex" / "auth.json"
            auth.write_text(json.dumps({"auth_mode": "apikey", "OPENAI_API_KEY": f"sk-account-{name}"}))
            auth.chmod(0o600)
            signed_in[name] = auth.read_bytes()
        stored: dict[str, str] = {}
        for name, form in forms.items():
            async with sdk_worker(built(CODEX), tmp_path / name, name=CODEX, installations={"A": SECRETS}) as worker:
                said = await worker.run(f"remember {name} [[ say noted ]]", config=form)
                assert said.text == "noted"
                again = await worker.run("[[ recall ]]", run_id="r2", config=form)
                assert again.text == f"recalled: remember {name}"
                stored[name] = pinned(worker)
                assert descendants(worker.pid()) == {}
        assert stored["one"] != stored["two"]
        histories = {name: threads(place, name) for name in forms}
        assert [len(histories[name]) for name in forms] == [1, 1]
        assert histories["one"].isdisjoint(histories["two"])
        async with sdk_worker(built(CODEX), tmp_path / "later", name=CODEX, installations={"A": SECRETS}) as worker:
            for name, form in forms.items():
                await worker.run("[[ say x ]]", run_id=f"first-{name}", config=form)
                key = next(iter(worker.host().state))
                worker.host().state[key] = {"value": stored[name]}
                recalled = await worker.run("[[ recall ]]", run_id=f"again-{name}", config=form)
                assert f"remember {name}" in recalled.text
                other = stored["two" if name == "one" else "one"]
                worker.host().state[key] = {"value": other}
                foreign = await worker.run("[[ recall ]]", run_id=f"foreign-{name}", config=form)
                assert not [each for each in forms if f"remember {each}" in foreign.text]
                worker.host().state.clear()
        for name, data in signed_in.items():
            auth = place / name / ".codex" / "auth.json"
            assert auth.read_bytes() == data
            assert not auth.is_symlink()
            assert not (place / name / ".codex" / "sessions").is_symlink()
            text = b"".join(path.read_bytes() for path in (place / name).rglob("*") if path.is_file() and path != auth)
            assert f"sk-account-{'two' if name == 'one' else 'one'}".encode() not in text


@pytest.mark.real_codex
async def test_session_guard_serialization(codex_program: Path, place: Path, tmp_path: Path) -> None:
    """Two workers of one account, and a second home whose ``sessions`` is a link to the first one's: one writer per session.

    The lock goes by the real path. The second writer waits a moment and is then told so; when the first is done, it goes on.
    """
    gate = place / "gate"
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(responses_fixture())
        first, second = [
            await stack.enter_async_context(sdk_worker(built(CODEX), tmp_path / name, name=CODEX, installations={"A": SECRETS}))
            for name in ("first", "second")
        ]
        form = codex_form(codex_program, place, model, keep_warm=0)
        linked = codex_form(codex_program, place, model, "linked", keep_warm=0)
        assert (await first.run("remember the heron [[ say noted ]]", config=form)).text == "noted"
        thread = pinned(first)
        (place / "linked" / ".codex" / "sessions").symlink_to(place / "home" / ".codex" / "sessions")
        holding = first.stream(f"[[ hold {gate} ]]", run_id="r2", config=form)
        async with asyncio.timeout(60):
            async for result in holding:
                if "holding" in json.dumps(result.data):
                    break
        for number, config in enumerate((form, linked)):
            await second.run("[[ say x ]]", run_id=f"own-{number}", config=config)
            (key,) = second.host().state
            second.host().state[key] = {"value": thread}
            refused = await second.run("[[ say never ]]", run_id=f"late-{number}", config=config)
            assert "coding.session_busy" in refused.log, refused.text
            assert "never" not in refused.text
            assert second.host().state[key] == {"value": thread}
            second.host().state.clear()
        gate.touch()
        async with asyncio.timeout(60):
            async for _ in holding:
                pass
        await second.run("[[ say x ]]", run_id="own-last", config=linked)
        (key,) = second.host().state
        second.host().state[key] = {"value": thread}
        goes_on = await second.run("[[ recall ]]", run_id="last", config=linked)
        assert "remember the heron" in goes_on.text
        left = {**descendants(first.pid()), **descendants(second.pid())}
        assert await gone(left, 20.0)
