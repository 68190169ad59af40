"""The three packages, each with its scripted agent (local protocol fixture): its command and runner forms."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Kind:
    """One package, the driver it brings, and the program that stands in for its agent."""

    package: str
    driver: str
    command_field: str
    program: str
    label: str

    def write(self, path: Path, config: Mapping[str, Any] | None = None, *, beside: Sequence[str] = ()) -> Path:
        """Write the agent's program to ``path``: the scripted one with this configuration.

        ``beside`` is a command that it starts first and leaves to itself, as an agent's tools do.
        """
        settings = {**({"first_session": ""} if self.driver == "acp" else {}), **(config or {})}
        written = shlex.quote(json.dumps(settings))
        codex = self.driver == "codex"
        given, last = (f"SCRIPTED_CODEX={written} exec", "") if codex else ("exec", written)
        path.parent.mkdir(parents=True, exist_ok=True)
        program = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(HERE / self.program))}"
        started = f"{shlex.join(beside)} </dev/null >/dev/null 2>&1 &\n" if beside else ""
        path.write_text(f'#!/bin/sh\n{started}{given} {program} {last} "$@"\n')
        path.chmod(0o755)
        return path

    def hold(self, gate: Path) -> str:
        """The step that waits for a file, or for the turn's end."""
        return {"acp": "until", "claude-code": "hold", "codex": "file"}[self.driver] + f" {gate}"

    def local(self, command: Path, workspace: str = "", **fields: Any) -> dict[str, Any]:
        """A runner form for an agent beside the worker; ``fields`` with underscores for hyphens."""
        own = {"location": "local", self.command_field: str(command), **({"workspace": workspace} if workspace else {})}
        return self._form(own, fields)

    def remote(self, daemon_id: str, **fields: Any) -> dict[str, Any]:
        """A runner form for an agent under a daemon."""
        return self._form({"location": "daemon", "daemon-id": daemon_id}, fields)

    def _form(self, own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        form: dict[str, Any] = {"langbot-assets-enabled": False, "keep-warm": 0, "language": "en_US", **own}
        if self.driver == "acp":
            form["provider"] = "custom"
        return {**form, **{name.replace("_", "-"): value for name, value in fields.items()}}


KINDS: Final = {
    kind.package: kind
    for kind in (
        Kind("ACPAgentRunner", "acp", "acp-command", "scripted_acp_agent.py", "scripted ACP agent"),
        Kind("ClaudeCodeAgent", "claude-code", "command", "scripted_claude.py", "scripted Claude Code"),
        Kind("CodexAgent", "codex", "command", "scripted_codex.py", "scripted Codex app-server"),
    )
}
"""By package."""
