"""The real Codex, its pinned version: no command reads a key; where one still can, that is pinned as a known gap."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from codex_harness import of, poll, rest_of_turn, text, turn, until
from real_codex import Codex, real_codex

from agent.confinement import SANDBOXES
from pkg.agent_api import ApprovalRequested, Notice, Prompt, TextDelta
from testkit.daemon_rig import descendants
from testkit.responses_fixture import KEY

pytestmark = [pytest.mark.real_codex, pytest.mark.asyncio, pytest.mark.timeout(180)]

CONFINED = ("read-only", "workspace-write")
ACCOUNT_KEY = KEY
"""What the account signs in with, where it does."""


@pytest_asyncio.fixture
async def codex(codex_program: Path) -> AsyncIterator[Codex]:
    """The real program with an account of its own."""
    async with real_codex(codex_program) as made:
        yield made


def sign_in(codex: Codex) -> Path:
    """The file with the key of an account that has signed in."""
    codex.environment(sign_in=str(codex.program))
    found = codex.place / "home" / ".codex" / "auth.json"
    assert ACCOUNT_KEY in found.read_text()
    return found


def signed_in(codex: Codex) -> dict[str, Any]:
    """The fields of a session of that account."""
    return {"account": {"sign_in": str(codex.program)}}


def ways(auth: Path, workspace: Path) -> str:
    """A shell script that tries to read a file."""
    (workspace / "soft").symlink_to(auth)
    (workspace / "home").symlink_to(auth.parent)
    script = workspace / "ways.sh"
    lines = [
        f"cat {auth} soft home/auth.json /proc/self/root{auth} /proc/self/cwd/soft /proc/1/root{auth}",
        f"ln {auth} hard; cat hard; cp {auth} copy; cat copy; ln -s {auth} soft2; cat soft2; dd if={auth}; sh -c '. {auth}'",
        f"mkdir there; mount --bind {auth.parent} there; cat there/auth.json; umount {auth}; cat {auth}",
        f"unshare -rm sh -c 'umount {auth}; cat {auth}'; nsenter -t 1 -m cat {auth}",
        f"chmod 644 {auth}; cat {auth}; mv {auth} moved; cat moved",
        f"(exec 3< {auth}; cat <&3); tar cf - -C {auth.parent} . | grep -a OPENAI",
        f"find {auth.parent} {workspace} -samefile {auth} -exec cat {{}} +",
        f"for root in /proc/[0-9]*/root; do cat $root{auth}; done",
        "echo tried",
    ]
    script.write_text("\n".join(lines))
    return f"run sh {script} 2>&1"


class TestAccount:
    """The key of the account's own sign-in."""

    @pytest.mark.parametrize("sandbox", CONFINED)
    @pytest.mark.parametrize("allowed", [False, True])
    async def test_no_command_in_a_sandbox_reads_it(self, sandbox: str, allowed: bool, codex: Codex) -> None:
        """By no way that leads to the file, nor where it was allowed to leave the sandbox; the model is reached with it.

        The workspace's links are there before, as somebody else may have made them.
        """
        auth = sign_in(codex)
        script = ways(auth, codex.workspace)
        if allowed:
            script = script.replace("run ", "escalate ", 1)
        async with codex.session(policy="on-request", options={"sandbox": sandbox}, **signed_in(codex)) as session:
            events = await turn(session, f"[[ {script} ;; say done ]]", choose="accept")
        assert text(events) == "done"
        assert "tried" in codex.model.shown
        assert ACCOUNT_KEY not in codex.model.shown
        assert ACCOUNT_KEY not in repr(events)
        assert set(codex.model.bearers) == {ACCOUNT_KEY}
        assert "coding.account_readable" not in [event.code for event in of(events, Notice)]

    @pytest.mark.parametrize("sandbox", CONFINED)
    async def test_nor_does_any_other_tool(self, sandbox: str, codex: Codex) -> None:
        """A patch of it, a look at it as a picture, and what agents of the agent's own run."""
        auth = sign_in(codex)
        picture = json.dumps({"path": str(auth)})
        task = f"[[ run cat {auth} ;; say child ]]".replace("[", "\\u005b").replace("]", "\\u005d").replace(";", "\\u003b")
        spawn = f'call multi_agent_v1/spawn_agent {{"message": "{task}"}}'
        script = f"change {auth} | OPENAI_API_KEY | X ;; call view_image {picture} ;; {spawn} ;; hold {codex.place / 'gate'}"
        async with codex.session(policy="on-request", options={"sandbox": sandbox}, **signed_in(codex)) as session:
            await session.prompt(Prompt(f"[[ {script} ]]"))
            await poll(lambda: codex.model.shown.count("Permission denied") >= 3)
            (codex.place / "gate").touch()
            await rest_of_turn(session, choose="accept")
        assert ACCOUNT_KEY not in codex.model.shown
        assert ACCOUNT_KEY in auth.read_text()

    @pytest.mark.parametrize("policy", ["ask", "allow-all", "never"])
    async def test_what_a_rule_allows_stays_in_the_sandbox(self, policy: str, codex: Codex) -> None:
        """Codex (0.171) would run it outside of a sandbox that hides nothing."""
        home = codex.place / "home" / ".codex"
        codex.environment()
        (home / "rules").mkdir()
        (home / "rules" / "own.rules").write_text('prefix_rule(pattern=["touch"], decision="allow")\n')
        outside, inside = codex.place / "outside", codex.workspace / "inside"
        async with codex.session(policy=policy) as session:
            events = await turn(session, f"[[ run touch {outside} ;; run touch {inside} ;; say done ]]")
        assert of(events, ApprovalRequested) == []
        assert (outside.exists(), inside.exists()) == (False, True)

    @pytest.mark.parametrize("again", [False, True])
    async def test_a_rule_of_the_account_opens_nothing(self, again: bool, codex: Codex) -> None:
        """What it allows runs unasked, in the sandbox; in a resumed thread, too."""
        auth = sign_in(codex)
        (auth.parent / "rules").mkdir()
        (auth.parent / "rules" / "own.rules").write_text('prefix_rule(pattern=["cat"], decision="allow")\n')
        async with codex.session(policy="ask", **signed_in(codex)) as session:
            thread = session.session_id
            await turn(session, "[[ say hello ]]" if again else f"[[ run cat {auth} ;; say done ]]")
        if again:
            async with codex.session(policy="ask", resume_session_id=thread, **signed_in(codex)) as session:
                await turn(session, f"[[ run cat {auth} ;; say done ]]")
        assert "Permission denied" in codex.model.shown
        assert ACCOUNT_KEY not in codex.model.shown

    async def test_an_account_behind_links_is_kept_as_well(self, codex: Codex) -> None:
        """Codex (0.171) fails every command over a link in what it shall hide, so it gets the real path."""
        auth = sign_in(codex)
        kept = codex.place / "kept"
        kept.mkdir()
        auth.rename(kept / "auth.json")
        auth.symlink_to(kept / "auth.json")
        (codex.place / "door").symlink_to(auth.parent)
        env = {"CODEX_HOME": str(codex.place / "door")}
        files = f"{auth} {kept}/auth.json {codex.place}/door/auth.json"
        spec = codex.spec(policy="on-request", env=env, account={"sign_in": ""})
        config = auth.parent / "config.toml"
        config.write_text(config.read_text().replace('env_key = "FIXTURE_API_KEY"', "requires_openai_auth = true"))
        session = await codex.driver.open(spec, codex.launcher)
        try:
            await turn(session, f"[[ run cat {files}; echo tried ;; say done ]]")
        finally:
            await session.close()
        assert codex.model.shown.count("Permission denied") == 3
        assert "tried" in codex.model.shown
        assert ACCOUNT_KEY not in codex.model.shown

    async def test_on_another_machine_that_is_asked_for_its_real_paths(self, codex: Codex) -> None:
        """Where nothing can be looked up from here; the account that is used where none is named is kept there as well."""
        auth = sign_in(codex)
        usual = codex.place / "home" / ".codex"
        kept = codex.place / "kept"
        auth.rename(kept)
        auth.symlink_to(kept)
        (usual / ".env").write_text("SOME=canary-variable\n")
        codex.launcher.local = False
        files = f"{auth} {kept} {usual}/.env"
        async with codex.session(policy="on-request", env={"CODEX_HOME": str(usual)}) as session:
            await turn(session, f"[[ run cat {files}; echo tried ;; say done ]]")
        assert codex.model.shown.count("Permission denied") == 3
        assert "tried" in codex.model.shown
        assert ACCOUNT_KEY not in codex.model.shown

    async def test_the_account_used_where_none_is_named_is_kept_from_another_s_commands(self, codex: Codex) -> None:
        """A bot with a home of its own on a person's machine."""
        auth = sign_in(codex)
        other = codex.place / "bot"
        other.mkdir()
        (other / "config.toml").write_text(
            (auth.parent / "config.toml").read_text().replace("requires_openai_auth = true", 'env_key = "FIXTURE_API_KEY"')
        )
        env = {**codex.environment(), "CODEX_HOME": str(other)}
        auth.write_text("canary-of-the-person")
        async with codex.session(policy="on-request", env=env) as session:
            await turn(session, f"[[ run cat {auth}; echo tried ;; say done ]]")
        assert "tried" in codex.model.shown
        assert "canary-of-the-person" not in codex.model.shown

    async def test_nothing_is_left_in_the_account_s_home(self, codex: Codex) -> None:
        """Neither in the place of files that are not there, nor in that of those that are."""
        auth = sign_in(codex)
        (auth.parent / ".env").write_text("SOME=canary-variable\n")
        names = ("auth.json", ".credentials.json", "gateway_oauth.json", ".env", "config.toml")
        async with codex.session(policy="on-request", **signed_in(codex)) as session:
            before = {name: (auth.parent / name).read_bytes() for name in names if (auth.parent / name).exists()}
            await turn(session, f"[[ run cat {auth.parent}/* {auth.parent}/.env ;; say done ]]")
            after = {name: (auth.parent / name).read_bytes() for name in names if (auth.parent / name).exists()}
        assert before == after
        assert "canary-variable" not in codex.model.shown

    async def test_known_gap_without_a_sandbox_it_is_readable(self, codex: Codex) -> None:
        """Which is what no sandbox means; the form says so."""
        auth = sign_in(codex)
        options = {"sandbox": "danger-full-access"}
        async with codex.session(policy="on-request", options=options, **signed_in(codex)) as session:
            await turn(session, f"[[ run cat {auth} ;; say done ]]")
        assert ACCOUNT_KEY in codex.model.shown

    async def test_known_gap_a_sign_in_renewed_during_a_command(self, codex: Codex) -> None:
        """The kernel lifts what hides a file when another takes its place: that command can read it, the next one cannot."""
        auth = sign_in(codex)
        started, renewed = codex.workspace / "started", codex.workspace / "renewed"
        wait = f"touch {started}; while ! [ -e {renewed} ]; do sleep 0.05; done; cat {auth}"
        async with codex.session(policy="on-request", **signed_in(codex)) as session:
            await session.prompt(Prompt(f"[[ run {wait} ;; run cat {auth} ;; say done ]]"))
            await poll(started.exists)
            (auth.parent / "new").write_text(json.dumps({"auth_mode": "apikey", "OPENAI_API_KEY": "canary-renewed"}))
            (auth.parent / "new").replace(auth)
            renewed.touch()
            await rest_of_turn(session)
        first, second = [item for item in codex.model.bodies[-1]["input"] if item["type"] == "function_call_output"]
        assert "canary-renewed" in first["output"]
        assert "Permission denied" in second["output"]
        assert "canary-renewed" not in second["output"]

    async def test_known_gap_a_command_that_was_allowed_to_leave_the_sandbox_can_move_the_account(self, codex: Codex) -> None:
        """It reads nothing itself, but may change what is hidden from the next one."""
        auth = sign_in(codex)
        moved = auth.parent.with_name("moved")
        async with codex.session(policy="on-request", **signed_in(codex)) as session:
            script = f"escalate mv {auth.parent} {moved}; cat {moved}/auth.json ;; say done"
            await turn(session, f"[[ {script} ]]", choose="accept")
            assert ACCOUNT_KEY not in codex.model.shown
        assert ACCOUNT_KEY in (moved / "auth.json").read_text()


class TestEscalation:
    """What a command may do that was allowed to leave the sandbox."""

    @pytest.mark.parametrize("network", [False, True])
    async def test_it_writes_anywhere_and_reaches_what_the_form_opens(self, network: bool, codex: Codex) -> None:
        """Keeping the keys from it costs it the network where commands have none, which Codex gives by the profile alone."""
        outside = codex.place / "outside"
        port = codex.model.url.rpartition(":")[2]
        script = f"escalate touch {outside}; (echo > /dev/tcp/127.0.0.1/{port}) && echo REACHED ;; say x"
        async with codex.session(policy="on-request", options={"network": network}) as session:
            await turn(session, f"[[ {script} ]]", choose="accept")
        assert outside.exists()
        assert ("\\nREACHED" in codex.model.shown) is network


class TestFormKeys:
    """Keys that the form gives."""

    @pytest.mark.parametrize("sandbox", SANDBOXES)
    @pytest.mark.parametrize("way", ["provider", "key"])
    async def test_no_process_has_it(self, way: str, sandbox: str, codex: Codex) -> None:
        """Neither in its environment nor on its command line, and no command finds it there; nor any file of the account.

        By the variable that a provider of the account's settings names, or as the key of an account without any sign-in.
        """
        # Without a sandbox a command sees every process of the machine, those of other runs of these tests, too.
        key, unused = f"sk-canary-{secrets.token_hex(8)}", f"canary-{secrets.token_hex(8)}"
        codex.model.keys = {key}
        fields: dict[str, Any] = {"policy": "never", "options": {"sandbox": sandbox, "private": ["OTHER_PASS"]}}
        fields["env"] = {"OTHER_PASS": unused, "FIXTURE_API_KEY": key}
        if way == "key":
            bare = codex.place / "bare"
            bare.mkdir()
            keyed = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"{codex.model.url}/v1"}
            fields["env"] |= {"HOME": str(bare), "CODEX_HOME": str(bare / ".codex"), "FIXTURE_API_KEY": "", **keyed}
            fields["options"]["model"] = "gpt-5.5"
        look = 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr "\\0" "\\n"; env; echo tried'
        async with codex.session(**fields) as session:
            events = await turn(session, f"[[ run {look} ;; say done ]]")
            await session.prompt(Prompt(f"[[ hold {codex.place / 'gate'} ]]"))
            await until(session, TextDelta)
            family = descendants(os.getpid())
            held = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in family for name in ("environ", "cmdline")]
            (codex.place / "gate").touch()
            await rest_of_turn(session)
            tails = [process.stderr_tail() for process in codex.launcher.processes]
        assert any(b"codex" in each for each in held)
        assert "tried" in codex.model.shown
        assert set(codex.model.bearers) == {key}
        written = [path for path in codex.place.rglob("*") if path.is_file()]
        for canary in (key, unused):
            assert canary not in repr(events)
            assert canary not in codex.model.shown
            assert not [each for each in held if canary.encode() in each]
            assert not [path for path in written if canary.encode() in path.read_bytes()]
            assert canary not in "".join(tails)
        assert any(path.name.startswith("rollout-") for path in written)

    async def test_tool_servers_of_the_account_get_what_its_settings_name(self, codex: Codex) -> None:
        """A header and a variable come with the thread; a bearer is the one thing that has to be in the environment."""
        heard: dict[str, str] = {}

        async def listen(request: web.Request) -> web.Response:
            heard.update({name: request.headers[name] for name in ("X-Key", "Authorization") if name in request.headers})
            return web.json_response({}, status=404)

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", listen)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            spec = codex.spec(env={"A_TOKEN": "canary-a", "B_TOKEN": "canary-b", "C_TOKEN": "canary-c", "D_TOKEN": "canary-d"})
            seen = codex.place / "seen"
            servers = [
                f'[mcp_servers.a]\nurl = "{url}/a"\nenv_http_headers = {{ "X-Key" = "A_TOKEN" }}',
                f'[mcp_servers.b]\nurl = "{url}/b"\nbearer_token_env_var = "B_TOKEN"',
                f'[mcp_servers.c]\ncommand = "sh"\nargs = ["-c", "env > {seen}.n; mv {seen}.n {seen}"]\nenv_vars = ["C_TOKEN"]',
            ]
            config = codex.place / "home" / ".codex" / "config.toml"
            config.write_text("\n".join((config.read_text(), *servers)))
            session = await codex.driver.open(spec, codex.launcher)
            try:
                await turn(session, "[[ say hello ]]")
                await poll(lambda: len(heard) == 2 and seen.exists())
                held = Path(f"/proc/{codex.launcher.processes[-1].pid}/environ").read_bytes()
                family = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(os.getpid()))
            finally:
                await session.close()
        finally:
            await runner.cleanup()
        assert heard == {"X-Key": "canary-a", "Authorization": "Bearer canary-b"}
        assert "C_TOKEN=canary-c" in seen.read_text().splitlines()
        assert "canary-b" not in seen.read_text()
        assert b"canary" not in held.replace(b"canary-b", b"")
        assert not [name for name in (b"canary-a", b"canary-c", b"canary-d", KEY.encode()) if name in family]
        assert len(codex.launcher.processes) == 2

    async def test_a_stored_thread_goes_on_with_another_key(self, codex: Codex) -> None:
        """It is no part of the history."""
        async with codex.session() as session:
            thread = session.session_id
            await turn(session, "[[ say one ]]")
        codex.model.keys = {"sk-another-canary"}
        async with codex.session(resume_session_id=thread, env={"FIXTURE_API_KEY": "sk-another-canary"}) as session:
            assert text(await turn(session, "[[ say two ]]")) == "two"
        assert [*dict.fromkeys(codex.model.bearers)] == [KEY, "sk-another-canary"]
