"""Messages into a running turn, stops, and what is left when a session ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from codex_harness import (
    BOUND,
    ended,
    of,
    on_one_server,
    opened,
    poll,
    received,
    rest_of_turn,
    spec,
    text,
    turn,
    until,
)

from pkg.agent_api import Notice, Prompt, TextDelta, ToolStarted, TurnEnded
from pkg.launch import LocalLauncher

pytestmark = pytest.mark.asyncio


def living(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestSteering:
    """A message lands once: in the running turn, or as the next one."""

    async def test_into_the_running_turn(self, tmp_path: Path) -> None:
        """Codex takes it by its own means, for exactly this turn."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt("say before\nsteer"))
            await until(session, TextDelta)
            assert await session.steer(Prompt("and this"))
            assert text(await rest_of_turn(session)).endswith("steered: and this")
        (params,) = received(tmp_path, "turn/steer")
        assert params["expectedTurnId"] == "turn-1"
        assert len(received(tmp_path, "turn/start")) == 1

    async def test_a_turn_that_ends_without_it_is_followed_by_one_with_it(self, tmp_path: Path) -> None:
        """The stale-turn race: accepted, and not taken any more. The message gets its turn before the end is told."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"say first\nignore-steers {tmp_path / 'on'}"))
            events = await until(session, TextDelta)
            await poll((tmp_path / "on").exists)
            assert await session.steer(Prompt("say landed"))
            events += await rest_of_turn(session)
        assert text(events) == "firstlanded"
        assert ended(events) == TurnEnded("end_turn")
        starts = received(tmp_path, "turn/start")
        assert [start["input"][0]["text"].splitlines()[0] for start in starts] == ["say first", "say landed"]

    @pytest.mark.parametrize("end", ["", 'fail "other" broken'])
    async def test_one_refused_behind_the_turn_s_end_lands_once(self, end: str, tmp_path: Path) -> None:
        """The other half of that race: it is answered in a turn of its own, or it is the caller's again, and never both."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"say first\nlate-steers {tmp_path / 'on'}\n{end}"))
            await poll((tmp_path / "on").exists)
            steering = asyncio.create_task(session.steer(Prompt("say landed")))
            events = await rest_of_turn(session)
            taken = await steering
        landed = text(events).count("landed")
        assert landed + (not taken) == 1
        assert len(received(tmp_path, "turn/start")) == 1 + landed
        assert "steering.not_worked_on" not in [event.code for event in of(events, Notice)]

    async def test_without_its_id_a_taken_message_is_known_by_its_text(self, tmp_path: Path) -> None:
        """So it is never brought twice."""
        async with opened(tmp_path, {"no_client_id": True}) as session:
            await session.prompt(Prompt("say before\nsteer"))
            await until(session, TextDelta)
            assert await session.steer(Prompt("once"))
            assert text(await rest_of_turn(session)).count("once") == 1
        assert len(received(tmp_path, "turn/start")) == 1

    async def test_a_failed_turn_says_that_it_did_not_take_it(self, tmp_path: Path) -> None:
        """Nobody works on what a broken turn was given."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f'say x\nignore-steers {tmp_path / "on"}\nfail "other" broken'))
            await until(session, TextDelta)
            await poll((tmp_path / "on").exists)
            assert await session.steer(Prompt("lost"))
            events = await rest_of_turn(session)
        assert ended(events).stop_reason == "error"
        assert "steering.not_worked_on" in [event.code for event in of(events, Notice)]

    async def test_where_no_turn_runs_it_is_the_next_one_s(self, tmp_path: Path) -> None:
        """Before, after, and while a turn is being stopped."""
        async with opened(tmp_path) as session:
            assert not await session.steer(Prompt("before"))
            await turn(session, "say x")
            assert not await session.steer(Prompt("after"))
            await session.prompt(Prompt("say x\nwait"))
            await until(session, TextDelta)
            await session.interrupt()
            assert not await session.steer(Prompt("while stopping"))
            await rest_of_turn(session)
        assert received(tmp_path, "turn/steer") == []

    async def test_a_server_that_cannot_steer_leaves_it_to_the_next_turn(self, tmp_path: Path) -> None:
        """A refusal is no loss."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"say x\nfile {tmp_path / 'go'}"))
            await until(session, TextDelta)
            session._tracker.turn_id = "another"
            assert not await session.steer(Prompt("x"))
            session._tracker.turn_id = "turn-1"
            (tmp_path / "go").touch()
            assert ended(await rest_of_turn(session)) == TurnEnded("end_turn")

    async def test_a_stopped_turn_takes_its_steered_messages_with_it(self, tmp_path: Path) -> None:
        """``/stop`` means all of it."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"say x\nignore-steers {tmp_path / 'on'}\nwait"))
            await until(session, TextDelta)
            await poll((tmp_path / "on").exists)
            assert await session.steer(Prompt("say never"))
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
        assert len(received(tmp_path, "turn/start")) == 1


class TestStops:
    """``interrupt``, and what follows it."""

    async def test_a_turn_is_stopped_and_its_commands_with_it(self, tmp_path: Path) -> None:
        """Codex 0.171 leaves a running command alive: it is told to end it, before the turn's end is told."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt("opencmd sleep => x\nwait"))
            await until(session, ToolStarted)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert len(received(tmp_path, "turn/interrupt")) == 1
            assert len(received(tmp_path, "thread/backgroundTerminals/clean")) == 1
            assert text(await turn(session, "say on")) == "on"

    async def test_what_may_have_left_the_sandbox_is_ended_with_the_process(self, tmp_path: Path) -> None:
        """With full access a command's children can be anywhere: the supervisor proves that none is left."""
        async with opened(tmp_path, options={"sandbox": "danger-full-access"}) as session:
            await session.prompt(Prompt(f"orphan {tmp_path / 'pid'}\nopencmd sleep => x\nwait"))
            await until(session, ToolStarted)
            pid = int((tmp_path / "pid").read_text())
            assert living(pid)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert not living(pid)
            assert not session.alive

    @pytest.mark.parametrize("rules", [["default.rules"], ["README"]])
    async def test_what_a_rule_may_have_let_out_of_the_sandbox_is_ended_with_the_process(
        self, rules: list[str], tmp_path: Path
    ) -> None:
        """Codex (0.171) runs what the account's rules allow outside of the sandbox, and does not say so."""
        async with opened(tmp_path, {"rules": rules}) as session:
            await session.prompt(Prompt(f"orphan {tmp_path / 'pid'}\nopencmd sleep => x\nwait"))
            await until(session, ToolStarted)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert session.alive == (rules == ["README"])
            assert living(int((tmp_path / "pid").read_text())) == session.alive

    async def test_a_command_whose_beginning_crossed_the_stop_is_ended_too(self, tmp_path: Path) -> None:
        """Codex began it before it heard of the stop; without a sandbox its children can be anywhere as well."""
        async with opened(tmp_path, options={"sandbox": "danger-full-access"}) as session:
            await session.prompt(Prompt(f"crossing {tmp_path / 'pid'}"))
            await until(session, TextDelta)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert not living(int((tmp_path / "pid").read_text()))

    async def test_agents_of_the_agent_s_own_are_ended_with_the_process(self, tmp_path: Path) -> None:
        """They are threads of their own, which Codex (0.171) leaves running when their parent's turn is stopped."""
        began = {"threadId": "child", "turn": {"id": "its-turn", "rootTurnId": "$TURN"}}
        async with opened(tmp_path) as session:
            await session.prompt(
                Prompt(
                    f"orphan {tmp_path / 'pid'}\n"
                    f"send {json.dumps({'method': 'turn/started', 'params': began})}\n"
                    "say delegated\nwait"
                )
            )
            await until(session, TextDelta)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert not living(int((tmp_path / "pid").read_text()))
            assert not session.alive

    async def test_codex_that_does_not_stop_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The turn ends as cancelled all the same, when nothing of it is left."""
        monkeypatch.setattr("pkg.limits.CODEX_INTERRUPT_SECONDS", 0.3)
        async with opened(tmp_path, {"deaf": ["turn/interrupt"]}) as session:
            await session.prompt(Prompt("say x\nwait"))
            await until(session, TextDelta)
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert not session.alive

    async def test_a_stop_before_the_turn_has_a_name(self, tmp_path: Path) -> None:
        """It waits for the name, and then stops that turn."""
        async with opened(tmp_path) as session:
            prompting = asyncio.create_task(session.prompt(Prompt("wait")))
            await asyncio.sleep(0)
            await session.interrupt()
            await prompting
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert text(await turn(session, "say on")) == "on"

    async def test_a_second_stop_and_one_without_a_turn_do_nothing(self, tmp_path: Path) -> None:
        """Repeated presses are harmless."""
        async with opened(tmp_path) as session:
            await session.interrupt()
            await session.prompt(Prompt("say x\nwait"))
            await until(session, TextDelta)
            await session.interrupt()
            await session.interrupt()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
        assert len(received(tmp_path, "turn/interrupt")) == 1

    async def test_nothing_of_a_stopped_turn_is_said_afterwards(self, tmp_path: Path) -> None:
        """Open items never complete; what Codex still says is not told."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt("opencmd x => y\nwait"))
            await until(session, ToolStarted)
            await session.interrupt()
            events = await rest_of_turn(session)
            assert text(events) == ""
            assert text(await turn(session, "say clean")) == "clean"


class TestClose:
    """A closed session leaves nothing."""

    async def test_in_the_middle_of_a_turn(self, tmp_path: Path) -> None:
        """The turn is told as cancelled; children in sessions of their own are gone."""
        async with opened(tmp_path) as session:
            await session.prompt(Prompt(f"orphan {tmp_path / 'pid'}\nsay x\nwait"))
            await until(session, TextDelta)
            pid = int((tmp_path / "pid").read_text())
            await session.close()
            assert ended(await rest_of_turn(session)) == TurnEnded("cancelled")
            assert not living(pid)

    async def test_twice_and_under_cancellation(self, tmp_path: Path) -> None:
        """Whoever waits may leave; the ending goes on."""
        async with opened(tmp_path) as session:
            closing = asyncio.create_task(session.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await session.close()
            assert not session.alive


class TestSharing:
    """One process, many threads."""

    async def test_four_threads_at_once_are_told_apart(self, tmp_path: Path) -> None:
        """Everything is routed by thread and turn; closing one leaves the others alive, the last one ends the process."""
        sessions, server = await on_one_server(spec(tmp_path), LocalLauncher(), 4)
        pid = server._process.pid
        go = tmp_path / "go"
        for number, session in enumerate(sessions):
            await session.prompt(Prompt(f"say start{number}\nfile {go}\nsay end{number}"))
        go.touch()
        told = await asyncio.gather(*(rest_of_turn(session) for session in sessions))
        assert [text(events) for events in told] == [f"start{number}end{number}" for number in range(4)]
        for session in sessions[:-1]:
            await session.close()
            assert living(pid)
        assert text(await turn(sessions[-1], "say last")) == "last"
        await sessions[-1].close()
        assert not living(pid)

    async def test_the_death_of_the_process_ends_every_thread_s_turn(self, tmp_path: Path) -> None:
        """Each hears of it once."""
        sessions, _ = await on_one_server(spec(tmp_path), LocalLauncher(), 3)
        for session in sessions[1:]:
            await session.prompt(Prompt("say x\nwait"))
            await until(session, TextDelta)
        await sessions[0].prompt(Prompt("die 9"))
        for session in sessions:
            end = ended(await rest_of_turn(session))
            assert end.error is not None
            assert end.error.params["code"] == "9"
            await session.close()

    async def test_closing_one_in_its_turn_leaves_the_other_s(self, tmp_path: Path) -> None:
        """Only its own turn is stopped, and its own commands ended."""
        (one, other), _ = await on_one_server(spec(tmp_path), LocalLauncher(), 2)
        for session in (one, other):
            await session.prompt(Prompt(f"say x\nfile {tmp_path / 'go'}\nsay done"))
            await until(session, TextDelta)
        async with asyncio.timeout(BOUND):
            await one.close()
        assert ended(await rest_of_turn(one)) == TurnEnded("cancelled")
        (tmp_path / "go").touch()
        assert text(await rest_of_turn(other)).endswith("done")
        await other.close()
        unsubscribed = [params["threadId"] for params in received(tmp_path, "thread/unsubscribe")]
        assert unsubscribed == [one.session_id]
