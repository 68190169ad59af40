"""Opening a vendor session: handshake, sign-in with a key, new, resume or load, and the settings of the session.

The rules: a sign-in happens only with keys that the session's own environment holds, once; a fresh session replaces a lost one
only when the loss is proven; the mode in which the agent asks before it acts is set explicitly, last, and a mode that cannot
be set fails the opening; what an agent would do unasked in any mode is turned off as far as the agent lets its client
(:data:`agent.presets.ASKING_META`).
"""

from __future__ import annotations

import hashlib
import sys
import time
import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from acp import PROTOCOL_VERSION
from acp.exceptions import RequestError

from agent import presets, wire
from agent.failures import (
    AUTH_REQUIRED,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    detail_of,
    is_missing_session,
)
from agent.peer import Peer
from agent.translate import Translator
from pkg import limits, mcp_stdio_shim
from pkg.agent_api import Json, McpServer, Notice, SessionSpec
from pkg.agent_end import last_lines
from pkg.errors import AgentProtocolError, SessionUnavailable
from pkg.launch import AgentProcess, Launcher
from pkg.redaction import Redactor

RELOAD_DESTROYS: Final = frozenset({"gemini-cli"})
"""Agents that destroy a session when it is loaded within the minute in which it was made or last loaded (Gemini CLI 0.61 names
a session's files by minute and begins a new one on load)."""

_KEY_METHODS: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
    {"gemini-api-key": ("GEMINI_API_KEY",), "openai": ("OPENAI_API_KEY",)}
)
"""Sign-in methods that only read a key from the environment but are not declared as such (Gemini CLI, Qwen Code)."""

OUR_POLICIES: Final = frozenset({"ask", "allow-edits", "allow-all", "deny"})
"""The policies by which the client decides, so that the agent has to ask it. Any other is a mode of the agent's own."""
_ASKING_MODES: Final = ("default", "ask")
"""Modes in which known agents ask their client, in order of preference: Claude Agent, Gemini, Qwen: ``default``."""
_ASKING_MODES_OF: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType(
    {"codex-acp": ("read-only",), "@agentclientprotocol/codex-acp": ("read-only",)}
)
"""Modes of agents that mean another thing elsewhere, by the agent's own name. Codex (codex-acp 0.16 and 2.6) runs commands in
a read-only sandbox there and asks before it leaves it or edits; in its other modes files of the workspace change unasked."""
_UNASKING_MODES: Final = frozenset(
    {"auto", "agent", "yolo", "acceptEdits", "autoEdit", "auto-edit", "bypassPermissions", "dontAsk", "full-access"}
    | {"danger-full-access", "agent-full-access", "auto_edit", "never", "workspace-write"}
)


class RecentlyOpened:
    """When sessions of agents named in :data:`RELOAD_DESTROYS` were opened, for about a minute, by digest and not by id."""

    def __init__(self) -> None:
        self._opened: dict[bytes, float] = {}

    @staticmethod
    def _key(machine: str, session_id: str) -> bytes:
        return hashlib.sha256(f"{machine}\n{session_id}".encode("utf-8", "replace")).digest()

    def add(self, machine: str, session_id: str) -> None:
        """The session has just been made or loaded."""
        now = time.monotonic()
        self._opened = {key: at for key, at in self._opened.items() if now - at < limits.ACP_RELOAD_PAUSE}
        if len(self._opened) < limits.ACP_RELOAD_MEMORY:
            self._opened[self._key(machine, session_id)] = now

    def wait_seconds(self, machine: str, session_id: str) -> float:
        """Seconds until the session may be loaded."""
        opened = self._opened.get(self._key(machine, session_id))
        return 0.0 if opened is None else max(0.0, opened + limits.ACP_RELOAD_PAUSE - time.monotonic())


@dataclass(slots=True)
class Opened:
    """An open session: its id, how it came to be, and what its agent offers."""

    session_id: str = ""
    resumed: bool = False
    lost_history: bool = False
    fresh: bool = True
    """Whether the agent has seen nothing of this conversation yet."""
    agent_name: str = ""
    agent_version: str = ""
    prompt_capabilities: dict[str, Any] = field(default_factory=dict)
    can_close: bool = False
    notices: list[Notice] = field(default_factory=list)


def shim_for(local: bool) -> Callable[[McpServer], McpServer]:
    """What turns an http server into a stdio server for agents that can't reach http servers: our forwarding script.

    Elsewhere the script itself travels on the command line; address and headers are in the environment in both cases.
    """
    script = Path(mcp_stdio_shim.__file__).resolve()

    def shim(server: McpServer) -> McpServer:
        command: tuple[str, ...]
        if local:
            command = (sys.executable, "-I", "-S", str(script))
        else:
            command = ("python3", "-I", "-S", "-c", script.read_text(encoding="utf-8"))
        return McpServer(
            server.name, "stdio", command=command, env=mcp_stdio_shim.environment(server.url, dict(server.headers))
        )

    return shim


class Opening:
    """One attempt to open a session on a started agent."""

    def __init__(
        self,
        spec: SessionSpec,
        launcher: Launcher,
        process: AgentProcess,
        peer: Peer,
        translator: Translator,
        redact: Redactor,
        recently_opened: RecentlyOpened,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._launcher = launcher
        self._process = process
        self._peer = peer
        self._translator = translator
        self._redact = redact
        self._recently_opened = recently_opened
        self._sleep = sleep
        self._capabilities: dict[str, Any] = {}
        self._auth_methods: list[dict[str, Any]] = []
        self._signed_in = False
        self.opened = Opened()

    async def run(self, handshake_timeout: float) -> Opened:
        """Open the session. Raises :class:`pkg.errors.CodingError`."""
        await self._initialize(handshake_timeout)
        result = await self._resume() if self._spec.resume_session_id else None
        if result is None:
            result = await self._new()
        if self.opened.agent_name in RELOAD_DESTROYS:
            self._recently_opened.add(self._launcher.machine, self.opened.session_id)
        await self._configure(wire.as_dict(result))
        return self.opened

    # ---- requests

    async def _call(self, method: str, params: dict[str, Any], timeout: float = 0.0) -> dict[str, Any]:
        """One request of the opening; signs in and repeats it once when the agent asks for that."""
        seconds = timeout or self._spec.initialize_timeout
        while True:
            try:
                return wire.as_dict(await self._peer.call(method, params, seconds))
            except TimeoutError:
                raise SessionUnavailable(
                    "coding.agent_start_timeout",
                    detail=last_lines(self._process.stderr_tail(), self._redact),
                    retryable=True,
                    seconds=f"{seconds:g}",
                    step=method,
                ) from None
            except RequestError as exc:
                if exc.code != AUTH_REQUIRED:
                    raise
                await self._sign_in(exc, seconds)

    async def _sign_in(self, refusal: RequestError, seconds: float) -> None:
        method = next((item for item in self._auth_methods if self._satisfied(item)), None)
        if method is None or self._signed_in:
            raise self.login_required(refusal)
        self._signed_in = True
        try:
            await self._peer.call("authenticate", {"methodId": wire.as_str(method.get("id"))}, seconds)
        except (RequestError, TimeoutError):
            raise self.login_required(refusal) from None

    def _satisfied(self, method: dict[str, Any]) -> bool:
        """Whether a sign-in method needs nothing but variables that this session's environment has."""
        declared = method.get("type") or wire.as_dict(method.get("_meta")).get("type")
        if declared == "env_var":
            variables = map(wire.as_dict, wire.as_list(method.get("vars")))
            names = [wire.as_str(item.get("name")) for item in variables if item.get("optional") is not True]
        else:
            names = list(_KEY_METHODS.get(wire.as_str(method.get("id")), ()))
        return bool(names) and all(self._spec.env.get(name) for name in names)

    def login_required(self, refusal: RequestError) -> SessionUnavailable:
        """The refusal in words a person can act on: which command to run, and where."""
        return SessionUnavailable(
            "coding.agent_login_required",
            detail=detail_of(refusal, self._redact),
            command=presets.login_command(self.opened.agent_name, self._spec.command, self._auth_methods),
            machine=self._launcher.label,
        )

    def _refused(self, method: str, exc: RequestError) -> SessionUnavailable:
        return SessionUnavailable("coding.session_unavailable", detail=detail_of(exc, self._redact), step=method)

    # ---- handshake

    async def _initialize(self, timeout: float) -> None:
        try:
            params = wire.initialize_params(local=self._launcher.local)
            result = await self._call("initialize", params, timeout)
        except RequestError as exc:
            raise AgentProtocolError("coding.agent_refused_handshake", detail=detail_of(exc, self._redact)) from None
        if result.get("protocolVersion") != PROTOCOL_VERSION:
            spoken = wire.compact(result.get("protocolVersion"), 40)[0]
            raise AgentProtocolError("coding.agent_protocol_version", wanted=PROTOCOL_VERSION, spoken=spoken)
        self._capabilities = wire.as_dict(result.get("agentCapabilities"))
        self._auth_methods = [wire.as_dict(item) for item in wire.as_list(result.get("authMethods"))]
        info = wire.as_dict(result.get("agentInfo"))
        self.opened.agent_name = wire.as_str(info.get("name"))[:200]
        self.opened.agent_version = wire.as_str(info.get("version"))[:100]
        self.opened.prompt_capabilities = wire.as_dict(self._capabilities.get("promptCapabilities"))
        self.opened.can_close = self._offers("close")

    def _offers(self, name: str) -> bool:
        return isinstance(wire.as_dict(self._capabilities.get("sessionCapabilities")).get(name), dict)

    # ---- sessions

    async def _with_servers(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """A request with the session's MCP servers; once again without any when the agent rejects them."""
        capabilities = self._capabilities.get("mcpCapabilities")
        servers, skipped = wire.mcp_server_params(self._spec.mcp_servers, capabilities, shim_for(self._launcher.local))
        if self._spec.policy in OUR_POLICIES and (meta := presets.ASKING_META.get(self.opened.agent_name)):
            params = params | {"_meta": meta}
        try:
            result = await self._call(method, params | {"mcpServers": servers})
        except RequestError as exc:
            if not servers or exc.code == METHOD_NOT_FOUND or is_missing_session(exc):
                raise
            try:
                result = await self._call(method, params | {"mcpServers": []})
            except RequestError:
                raise exc from None
            skipped += [str(server["name"]) for server in servers]
        if skipped:
            names = ", ".join(dict.fromkeys(skipped))
            self.opened.notices.append(Notice("coding.mcp_servers_refused", level="warning", params={"names": names}))
        return result

    async def _new(self) -> dict[str, Any]:
        self._translator.forget_replay()
        try:
            result = await self._with_servers("session/new", {"cwd": self._spec.cwd})
        except RequestError as exc:
            raise self._refused("session/new", exc) from None
        session_id = result.get("sessionId")
        if not isinstance(session_id, str) or not session_id:
            raise AgentProtocolError("coding.agent_protocol", step="session/new")
        self.opened.session_id = session_id
        return result

    async def _resume(self) -> dict[str, Any] | None:
        """Reopen the stored session; ``None`` when it is proven gone and a new one may replace it."""
        session_id = self._spec.resume_session_id
        methods = [method for method, offered in self._reopening() if offered]
        for method in methods:
            self._translator.forget_replay()
            self._translator.opened(session_id)
            if self.opened.agent_name in RELOAD_DESTROYS:
                await self._sleep(self._recently_opened.wait_seconds(self._launcher.machine, session_id))
            try:
                result = await self._with_servers(method, {"cwd": self._spec.cwd, "sessionId": session_id})
            except RequestError as exc:
                if await self._is_missing(exc, session_id):
                    break
                unsupported = exc.code == METHOD_NOT_FOUND or (exc.code == INVALID_PARAMS and method != methods[-1])
                if unsupported:
                    continue
                raise self._refused(method, exc) from None
            lost = method == "session/load" and self._translator.replayed_user_messages == 0
            if lost and not self._spec.create_if_missing:
                raise SessionUnavailable("coding.session_missing")
            self.opened.session_id = session_id
            self.opened.resumed, self.opened.lost_history = not lost, lost
            self.opened.fresh = lost
            return result
        if not self._spec.create_if_missing:
            raise SessionUnavailable("coding.session_missing")
        self.opened.lost_history = True
        return None

    def _reopening(self) -> tuple[tuple[str, bool], ...]:
        return (
            ("session/resume", self._offers("resume")),
            ("session/load", self._capabilities.get("loadSession") is True),
        )

    async def _is_missing(self, exc: RequestError, session_id: str) -> bool:
        """Whether the session is proven gone: by the error itself, or by the agent's complete list without it."""
        if is_missing_session(exc):
            return True
        if exc.code in (METHOD_NOT_FOUND, INVALID_PARAMS) or not self._offers("list"):
            return False
        cursor: str | None = None
        for _ in range(limits.ACP_LIST_PAGES):
            try:
                page = await self._call("session/list", {} if cursor is None else {"cursor": cursor})
            except RequestError:
                return False
            sessions = page.get("sessions")
            if not isinstance(sessions, list):
                return False
            if any(wire.as_dict(item).get("sessionId") == session_id for item in sessions):
                return False
            cursor = wire.as_str(page.get("nextCursor")) or None
            if cursor is None:
                return True
        return False

    # ---- settings of the session

    async def _configure(self, result: dict[str, Any]) -> None:
        settings = _Settings(result)
        options = self._spec.options
        model = options.get("model")
        if isinstance(model, str) and model:
            await self._set_model(settings, model)
        for config_id, value in wire.as_dict(dict(wire.as_dict(options.get("config")))).items():
            await self._set_option(settings, settings.option(config_id), config_id, value)
        await self._set_mode(settings, options.get("mode"))

    async def _set_model(self, settings: _Settings, model: str) -> None:
        option = settings.by_category("model")
        if option is not None:
            await self._set_option(settings, option, "model", model)
            return
        match = settings.legacy_model(model)
        if match is None:
            raise self._unknown_setting("model", model, settings.legacy_models())
        await self._setting("session/set_model", {"modelId": match}, "model", model)

    async def _set_mode(self, settings: _Settings, wanted: Json) -> None:
        option = settings.by_category("mode")
        available = list(_values(option)) if option is not None else settings.modes()
        policy = self._spec.policy
        if isinstance(wanted, str) and wanted:
            mode = wanted
        elif policy not in OUR_POLICIES:
            mode = policy
        else:
            asking = _ASKING_MODES_OF.get(self.opened.agent_name, _ASKING_MODES)
            found = next((name for name in asking if name in available), None)
            current = wire.as_str(option.get("currentValue")) if option is not None else settings.current_mode
            if found is None and current in _UNASKING_MODES and available != [current]:
                self.opened.notices.append(Notice("coding.agent_mode_unasking", level="warning", params={"mode": current}))
            if found is None:
                return
            mode = found
        if option is not None:
            await self._set_option(settings, option, "mode", mode)
        elif mode in available:
            await self._setting("session/set_mode", {"modeId": mode}, "mode", mode)
        else:
            raise self._unknown_setting("mode", mode, available)

    async def _set_option(self, settings: _Settings, option: dict[str, Any] | None, name: str, value: Json) -> None:
        if option is None:
            raise self._unknown_setting(name, value, settings.option_ids())
        params: dict[str, Any] = {"configId": wire.as_str(option.get("id")), "value": value}
        if option.get("type") == "boolean":
            if not isinstance(value, bool):
                raise self._unknown_setting(name, value, ["true", "false"])
            params["type"] = "boolean"
        else:
            offered = _values(option)
            match = next((key for key, label in offered.items() if value in (key, label)), None)
            if match is None:
                raise self._unknown_setting(name, value, list(offered))
            params["value"] = match
        settings.replace(await self._setting("session/set_config_option", params, name, value))

    async def _setting(self, method: str, params: dict[str, Any], name: str, value: Json) -> dict[str, Any]:
        try:
            return await self._call(method, {"sessionId": self.opened.session_id, **params})
        except RequestError as exc:
            shown = wire.compact(value, 200)[0].strip('"')
            raise SessionUnavailable(
                "coding.agent_setting_refused", detail=detail_of(exc, self._redact), name=name, value=shown
            ) from None

    def _unknown_setting(self, name: str, value: Json, available: list[str]) -> SessionUnavailable:
        shown = wire.compact(value, 200)[0].strip('"')
        known = ", ".join(available[:30]) or "-"
        return SessionUnavailable("coding.agent_setting_unknown", name=name, value=shown, available=known)


class _Settings:
    """What a session's opening response says about modes, models and options; options win where both are present."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._options = [wire.as_dict(item) for item in wire.as_list(result.get("configOptions"))]
        modes = wire.as_dict(result.get("modes"))
        self.current_mode = wire.as_str(modes.get("currentModeId"))
        self._modes = [wire.as_str(wire.as_dict(item).get("id")) for item in wire.as_list(modes.get("availableModes"))]
        models = wire.as_list(wire.as_dict(result.get("models")).get("availableModels"))
        self._models = {wire.as_str(item.get("modelId")): wire.as_str(item.get("name")) for item in map(wire.as_dict, models)}

    def replace(self, result: dict[str, Any]) -> None:
        if isinstance(result.get("configOptions"), list):
            self._options = [wire.as_dict(item) for item in result["configOptions"]]

    def option(self, config_id: str) -> dict[str, Any] | None:
        return next((item for item in self._options if item.get("id") == config_id), None)

    def by_category(self, category: str) -> dict[str, Any] | None:
        found = next((item for item in self._options if item.get("category") == category), None)
        return found or self.option(category)

    def option_ids(self) -> list[str]:
        return [wire.as_str(item.get("id")) for item in self._options]

    def modes(self) -> list[str]:
        return [mode for mode in self._modes if mode]

    def legacy_model(self, wanted: str) -> str | None:
        return next((key for key, label in self._models.items() if wanted in (key, label)), None)

    def legacy_models(self) -> list[str]:
        return list(self._models)


def _values(option: dict[str, Any]) -> dict[str, str]:
    """The values of a select option with their labels; groups are flattened."""
    values: dict[str, str] = {}
    for item in map(wire.as_dict, wire.as_list(option.get("options"))):
        for entry in map(wire.as_dict, wire.as_list(item.get("options")) or [item]):
            if value := wire.as_str(entry.get("value")):
                values[value] = wire.as_str(entry.get("name"))
    return values
