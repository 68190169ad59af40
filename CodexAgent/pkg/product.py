"""What one runner package provides to the shared run loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pkg.agent_api import AgentDriver, McpServer, SessionSpec
from pkg.settings import PluginSettings, RunnerSettings


@dataclass(frozen=True, slots=True)
class SpecInputs:
    """What a package needs, besides its own form, to say how its agent is started in a place."""

    workspace: str
    location: str
    env: Mapping[str, str]
    """The agent's environment from the form, references to secrets filled."""
    mcp_servers: tuple[McpServer, ...]
    """The form's further MCP servers, references to secrets filled."""


def _the_only_one(settings: RunnerSettings) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Product:
    """One runner package: its driver, its two forms and how they become a session."""

    name: str
    """The agent's name in keys of stored sessions; never changed once released."""
    driver: AgentDriver
    settings: type[RunnerSettings]
    plugin_settings: type[PluginSettings]
    spec: Callable[[Any, SpecInputs], SessionSpec]
    """From an instance of ``settings`` to a session; raises :class:`pkg.errors.CodingError`. Resume id and LangBot's own
    tools are added by the loop."""
    agent: Callable[[Any], str] = _the_only_one
    """Which agent an instance of ``settings`` chooses, in words that upgrades and new places of its program don't change."""
