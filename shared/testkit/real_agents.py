"""How the suite starts each real ACP agent: its command, and a home of its own whose only model is the fixture.

The agents are those of ``certification-tests/vendor``. Nothing here tells an agent to ask before it acts: that is the
driver's to do, so every agent has its vendor's own defaults for that. The one secret is the fixture's key, which travels in
the environment as a person's would.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pkg.agent_api import SessionSpec
from testkit.model_fixture import KEY


@dataclass(frozen=True, slots=True)
class RealAgent:
    """One vendor's agent: the package and version that the lock pins, and how it is started."""

    name: str
    package: str
    version: str
    program: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path, str], dict[str, str]]
    """Writes the agent's files into a home, for a model server at a URL; returns its environment."""

    def environment(self, home: Path, url: str) -> dict[str, str]:
        """The agent's environment in ``home`` (made if missing)."""
        for each in (home, home / "tmp"):
            each.mkdir(exist_ok=True)
        base = {f"XDG_{name}_HOME": str(home / f".{name.lower()}") for name in ("CONFIG", "DATA", "CACHE", "STATE")}
        return {**base, "HOME": str(home), "TMPDIR": str(home / "tmp"), **self.prepare(home, url)}

    def command(self, binaries: Path) -> tuple[str, ...]:
        """The command line of the installed program."""
        return (str(binaries / self.program), *self.arguments)

    def spec(self, binaries: Path, home: Path, workspace: Path, url: str, **fields: Any) -> SessionSpec:
        """A session in ``workspace``; ``fields`` are further ones of :class:`pkg.agent_api.SessionSpec`."""
        env = {**self.environment(home, url), **fields.pop("env", {})}
        return SessionSpec(self.command(binaries), str(workspace), env=env, **fields)


def _claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


_CODEX_CONFIG: Final = """
model = "gpt-5.2"
model_provider = "fixture"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.fixture]
name = "fixture"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def _codex(home: Path, url: str) -> dict[str, str]:
    directory = home / ".codex"
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(_CODEX_CONFIG.format(url=url))
    return {"CODEX_HOME": str(directory), "OPENAI_API_KEY": KEY}


def _gemini(home: Path, url: str) -> dict[str, str]:
    directory = home / ".gemini"
    directory.mkdir(exist_ok=True)
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    return {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": url, "NO_BROWSER": "1", "GEMINI_CLI_NO_RELAUNCH": "true"}


def _opencode(home: Path, url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "fixture",
        "options": {"baseURL": f"{url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {"fixture-1": {"name": "fixture-1", "tool_call": True, "limit": {"context": 128000, "output": 8192}}},
    }
    config = {
        "provider": {"fixture": provider},
        "model": "fixture/fixture-1",
        "small_model": "fixture/fixture-1",
        "share": "disabled",
        "autoupdate": False,
    }
    path = home / "opencode.json"
    path.write_text(json.dumps(config))
    return {
        "OPENAI_API_KEY": KEY,
        "OPENCODE_CONFIG": str(path),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }


AGENTS: Final[Mapping[str, RealAgent]] = types.MappingProxyType(
    {
        agent.name: agent
        for agent in (
            RealAgent("codex", "@zed-industries/codex-acp", "0.16.0", "codex-acp", (), _codex),
            RealAgent("claude", "@agentclientprotocol/claude-agent-acp", "0.49.0", "claude-agent-acp", (), _claude),
            RealAgent("opencode", "opencode-ai", "1.18.33", "opencode", ("acp",), _opencode),
            RealAgent("gemini", "@google/gemini-cli", "0.61.0", "gemini", ("--acp",), _gemini),
        )
    }
)
"""Every real agent of the suite, by the name its tests go by."""
