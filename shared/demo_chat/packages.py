"""The packages that drive one agent, as the demo starts them: which program, and which loopback model for it.

With ``--fixture`` the real program runs without an account: its model is a server of this process that has no language model.
It repeats what it is told, and does what a script in double square brackets says (``[[ run ls ;; say done ]]``).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from testkit.anthropic_fixture import AnthropicFixture, say
from testkit.model_fixture import Asked, flat, last_script, serving
from testkit.responses_fixture import KEY_VARIABLE, ResponsesFixture, codex_home
from testkit.responses_fixture import serving as responses_serving
from tooling import agents


@dataclass(frozen=True, slots=True)
class Package:
    """One package of its own agent."""

    package: str
    driver: str
    """What a policy file calls its driver."""
    program: str
    """What its program is called where it is installed."""
    pinned: Callable[[], Path]
    """The pinned program, installed first if need be. Raises :class:`tooling.SetupError`."""
    fixture: Callable[[Path, float], AbstractAsyncContextManager[Mapping[str, str]]]
    """The loopback model while it runs, for an account with this home, with so many seconds between two words: what an
    environment must have for talking to it."""


class Parrot(AnthropicFixture):
    """A model that repeats what it is told where no script says otherwise."""

    def __init__(self, pace: float) -> None:
        """``pace`` is the seconds between two words."""
        super().__init__()
        self._pace = pace

    async def answer(self, request: web.Request, asked: Asked, body: Mapping[str, Any]) -> web.StreamResponse:
        """Answer a model call."""
        said = [(message["role"], flat(message.get("content"))) for message in body.get("messages", ())]
        if not asked.tools or last_script(said) is not None:
            return await super().answer(request, asked, body)
        words = [text for role, text in said if role == "user" and text.strip()]
        last = words[-1].rsplit("</host-context>", 1)[-1].strip() if words else ""
        repeated = f"(a loopback model, no language model) You said: {last[:2000]}"
        return await self._give(request, asked, say(repeated, pace=self._pace))


@contextlib.asynccontextmanager
async def _claude_fixture(home: Path, pace: float) -> AsyncIterator[Mapping[str, str]]:
    async with serving(Parrot(pace)) as fixture:
        # Else it leaves a directory beside everybody's temporary files.
        yield {**fixture.environment(), "CLAUDE_CODE_TMPDIR": str(home)}


def _claude() -> Path:
    agents.CLAUDE_CODE.ensure()
    return agents.claude_code()


class CodexParrot(ResponsesFixture):
    """The same for Codex."""

    def unscripted(self, text: str) -> str:
        """The answer to a message without a script."""
        return f"(a loopback model, no language model) You said: {text[:2000]}"


@contextlib.asynccontextmanager
async def _codex_fixture(home: Path, pace: float) -> AsyncIterator[Mapping[str, str]]:
    async with responses_serving(CodexParrot(pace)) as fixture:
        # Everything else of the account is where Codex looks for it: below the home.
        yield {KEY_VARIABLE: codex_home(home, fixture.url)[KEY_VARIABLE]}


def _codex() -> Path:
    agents.CODEX.ensure()
    return agents.codex()


PACKAGES: Final[Mapping[str, Package]] = {
    "claude-code": Package("ClaudeCodeAgent", "claude-code", "claude", _claude, _claude_fixture),
    "codex": Package("CodexAgent", "codex", "codex", _codex, _codex_fixture),
}
"""By what ``--agent`` calls it."""
