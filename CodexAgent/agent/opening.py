"""How a thread is opened: handshake, the account, the parameters, a stored thread resumed or a fresh one.

Guarantees:

- a stored thread is replaced by a fresh one only when Codex's answer proves that it is gone, and that is said; on every other
  failure the id stays the stored one's;
- the sandbox and the approval policy are sent every time (Codex keeps the last ones otherwise), and approvals go to the client,
  never to a reviewer of Codex's own;
- a workspace's own settings, rules, hooks and tool servers are obeyed only where the account's settings or the place's policy
  trust it;
- all that is a run's own (MCP servers with their bearers, keys, instructions, the environment's exclusions) travels over the
  connection: nothing of it is on a command line, in the environment (:mod:`agent.keys` tells the exceptions) or in the
  account's files;
- commands in a sandbox cannot read the account's keys, or it is said that they can.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent import confinement, keys
from agent.confinement import FULL_ACCESS, sandbox_of
from agent.failures import Place, detail_of, is_busy_thread, is_missing_thread
from agent.keys import EXCLUDED
from agent.peer import INTERNAL_ERROR, RpcError
from agent.server import AppServer
from pkg import limits, mcp_stdio_shim, runtime_support
from pkg.agent_api import Json, McpServer, Notice, SessionSpec
from pkg.agent_end import last_lines
from pkg.errors import AgentProtocolError, SessionUnavailable
from pkg.lenient import as_dict, as_list, as_str

CLIENT: Final = {"name": "langbot-coding-runner", "title": "LangBot coding runner", "version": "0.1.0"}
LANGBOT: Final = "langbot_agent"
"""The name of LangBot's own tool server: what it offers was granted by the host already."""
SYSTEM_HOME: Final = "/etc/codex"
"""Where a machine's administrator keeps settings and rules of Codex."""

KEY_PROVIDER: Final = "langbot_key"
KEY_VARIABLES: Final = ("OPENAI_API_KEY", "CODEX_API_KEY")
OPENAI: Final = "https://api.openai.com/v1"

_UNUSABLE_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


def approval_policy(policy: str, sandbox: str) -> str:
    """What Codex is told, so that everything that needs a decision is asked and nothing else.

    ``ask`` and ``deny`` must see every action: only ``untrusted`` asks for what the sandbox would let pass. Under
    ``allow-edits`` and ``allow-all`` the sandbox (:func:`sandbox_of`) decides what may happen unasked, ``on-request`` asks to
    leave it; where there is none, ``allow-edits`` has to see everything, too.
    """
    match policy:
        case "ask" | "deny":
            return "untrusted"
        case "allow-edits":
            return "untrusted" if sandbox == FULL_ACCESS else "on-request"
        case "allow-all" | "on-failure":
            return "on-request"
        case "untrusted" | "on-request" | "never":
            return policy
    return "untrusted"


@dataclass(slots=True)
class Opened:
    """What opening a thread found."""

    thread_id: str = ""
    resumed: bool = False
    lost_history: bool = False
    model: str = ""
    version: str = ""
    notices: list[Notice] = field(default_factory=list)


def mcp_server_config(servers: Sequence[McpServer], *, bridge: str, local: bool) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The ``mcp_servers`` of a thread, and the names of those that Codex cannot use (it speaks http and stdio).

    ``bridge`` ``"stdio"`` turns every http server into our forwarding script.
    """
    config: dict[str, dict[str, Any]] = {}
    skipped: list[str] = []
    # Who has a usable name keeps it; of two that would share one, the second is told as refused.
    for server in sorted(servers, key=lambda each: _UNUSABLE_NAME.search(each.name) is not None):
        name = _UNUSABLE_NAME.sub("_", server.name) or "server"
        if name in config:
            skipped.append(server.name)
            continue
        if server.transport == "http" and bridge == "stdio":
            entry = _forwarded(server, local)
        elif server.transport == "http":
            entry = {"url": server.url, "http_headers": dict(server.headers)}
        elif server.transport == "stdio" and server.command:
            entry = {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}
        else:
            skipped.append(server.name)
            continue
        if server.name == LANGBOT:
            entry["default_tools_approval_mode"] = "approve"
        config[name] = entry
    return config, skipped


def _forwarded(server: McpServer, local: bool) -> dict[str, Any]:
    script = Path(mcp_stdio_shim.__file__).resolve()
    where = (sys.executable, str(script)) if local else ("python3", "-c", script.read_text(encoding="utf-8"))
    env = mcp_stdio_shim.environment(server.url, dict(server.headers))
    return {"command": where[0], "args": ["-I", "-S", *where[1:]], "env": env}


def excluded_variables(own: Json, private: Json) -> list[str]:
    """The names and patterns no command sees: ours, those of the form's secrets, and those of the account's own settings."""
    names = [*EXCLUDED, *(as_str(each) for each in as_list(private)), *(as_str(each) for each in as_list(own))]
    return list(dict.fromkeys(filter(None, names)))


def project_trust(cwd: str, own: Mapping[str, Any], trusted: bool) -> dict[str, Any]:
    """The ``projects`` of a thread's configuration: what Codex may obey of the workspace's own ``.codex``.

    Codex (0.171) takes a directory that a client opens with a writable sandbox for trusted where nothing is said about it: it
    writes so into the account's settings, starts the workspace's tool servers, and obeys its rules, which let commands out of
    the sandbox unasked. So something is always said, unless the account's own settings do.
    """
    if not trusted and as_dict(as_dict(own.get("projects")).get(cwd)).get("trust_level"):
        return {}
    return {cwd: {"trust_level": "trusted" if trusted else "untrusted"}}


def key_provider(env: Mapping[str, str], own: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a thread's configuration by which a key in ``env`` is used, empty where there is none.

    Codex (0.171) looks at ``OPENAI_API_KEY`` only for a provider that says so; signing in with it would write it to disk. What
    is sent with a thread is kept in the process's memory only.
    """
    name = next((name for name in KEY_VARIABLES if env.get(name)), "")
    if not name:
        return {}
    address = env.get("OPENAI_BASE_URL") or as_str(own.get("openai_base_url")) or OPENAI
    provider = {"name": "OpenAI", "base_url": address, "experimental_bearer_token": env[name], "wire_api": "responses"}
    return {"model_providers": {KEY_PROVIDER: provider}}


def _tools_of_rollout(path: str) -> frozenset[str]:
    """The names of the dynamic tools in a history's first line; nothing where it is not as Codex 0.171 writes it."""
    try:
        with Path(path).open("rb") as source:
            first = json.loads(source.readline(limits.AGENT_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    meta = as_dict(as_dict(first).get("payload"))
    return frozenset(as_str(as_dict(tool).get("name")) for tool in as_list(meta.get("dynamic_tools")))


class Opening:
    """One attempt to open a thread on a started app-server."""

    def __init__(
        self, spec: SessionSpec, server: AppServer, *, local: bool, place: Place, held: frozenset[str] = frozenset()
    ) -> None:
        """``local`` says whether the server runs on this machine; ``place`` tells people where to sign in.

        ``held`` are the variables of the session that the process does not hold.
        """
        self.spec = spec
        self._held = held
        self.server = server
        self._local = local
        self.place = place
        self.opened = Opened()
        self._skipped: list[str] = []
        self.offered: list[dict[str, Any]] = []
        """LangBot's tools, where they are to go over the connection itself."""
        self.bridged = False
        """Whether they do."""
        self.rules = False
        """Whether rules may let commands out of the sandbox unasked."""
        self._home = ""
        self._own: dict[str, Any] | None = None
        """The account's settings, once they are known; none where Codex cannot load them."""
        self._account: dict[str, Any] = {}
        self._private: list[str] = []
        """The files that no command in a sandbox may read."""
        self._confines = False
        """Whether this Codex can keep them from it."""
        self._looked = False

    async def handshake(self, seconds: float) -> None:
        """The server's own start. Raises :class:`pkg.errors.CodingError`."""
        params = {"clientInfo": CLIENT, "capabilities": {"experimentalApi": True}}
        try:
            result = as_dict(await self._call("initialize", params, seconds))
        except RpcError as exc:
            detail = detail_of(exc.message, self.server.redact)
            raise AgentProtocolError("coding.agent_refused_handshake", detail=detail) from None
        agent = as_str(result.get("userAgent"))
        self._home = as_str(result.get("codexHome"))
        self.opened.version = agent.partition("/")[2].partition(" ")[0][:100]
        await self.server.peer.notify("initialized")

    async def look(self) -> None:
        """Find out what holds here: the account's settings, its sign-in, its rules, and what commands can be kept from."""
        self._looked = True
        spec = self.spec
        own, account, profiles, private, _ = await asyncio.gather(
            self._asked("config/read", {"cwd": spec.cwd}),
            self._asked("account/read", {}),
            self._asked("permissionProfile/list", {"cwd": spec.cwd}),
            self._private_files(),
            self._find_rules(),
        )
        self._own = None if own is None else as_dict(own.get("config"))
        self._account, self._private = as_dict(account), private
        base = confinement.BASES.get(sandbox_of(spec.options, spec.policy))
        known = [as_dict(each) for each in as_list(as_dict(profiles).get("data"))]
        self._confines = any(each.get("id") == base and each.get("allowed") is not False for each in known)

    async def needed(self) -> frozenset[str]:
        """The variables held back that this account's Codex has to find in its environment after all.

        Raises :class:`pkg.errors.CodingError`.
        """
        if not self._held:
            return self._held
        await self.look()
        return self._held if self._own is None else keys.needed(self._own, self.spec.env, self._held)

    async def thread(self) -> None:
        """The thread, resumed or fresh. Raises :class:`pkg.errors.CodingError`."""
        if not self._looked:
            await self.look()
        spec, own, account = self.spec, self._own or {}, self._account
        provider: dict[str, Any] = {}
        # Where Codex (0.171) cannot load the account's settings it speaks of its own provider's account instead.
        signed_out = account.get("requiresOpenaiAuth") is True and account.get("account", False) is None
        if signed_out and self._own is not None:
            provider = key_provider(spec.env, own)
            if not provider:
                raise SessionUnavailable("coding.agent_login_required", command=self.place.login, machine=self.place.machine)
        result: dict[str, Any] | None = None
        if spec.resume_session_id:
            self.bridged = bool(self.offered) and await self._has_tools(spec.resume_session_id)
            result = await self._resumed(self._params(own, provider))
        if result is None:
            self.bridged = bool(self.offered)
            params = self._params(own, provider)
            if self.bridged:
                params["dynamicTools"] = self.offered
            result = await self._fresh(params)
        if self._skipped:
            names = ", ".join(dict.fromkeys(self._skipped))
            self.opened.notices.append(Notice("coding.mcp_servers_refused", level="warning", params={"names": names}))
        if spec.policy == "never" and not self.opened.resumed:
            self.opened.notices.append(Notice("coding.codex_never_asks", level="warning"))
        self.opened.model = as_str(result.get("model"))

    def _params(self, own: Mapping[str, Any], provider: Mapping[str, Any]) -> dict[str, Any]:
        spec, options = self.spec, self.spec.options
        sandbox = sandbox_of(options, spec.policy)
        given = [server for server in spec.mcp_servers if not (self.bridged and server.name == LANGBOT)]
        servers, self._skipped = mcp_server_config(given, bridge=as_str(options.get("bridge")), local=self._local)
        policy = as_dict(own.get("shell_environment_policy"))
        config: dict[str, Any] = {
            "shell_environment_policy": {"exclude": excluded_variables(policy.get("exclude"), options.get("private"))},
            "projects": (projects := project_trust(spec.cwd, own, options.get("trust_workspace") is True)),
        }
        for table, entries in (*keys.sent(own, spec.env, self._held).items(), *provider.items(), ("mcp_servers", servers)):
            if entries:
                config[table] = {**config.get(table, {}), **entries}
        # The rules of a workspace, or of a repository around it, that is obeyed are not looked for.
        above = [each for root, each in as_dict(own.get("projects")).items() if spec.cwd.startswith(f"{root.rstrip('/')}/")]
        obeyed = projects.get(spec.cwd) != {"trust_level": "untrusted"}
        self.rules = self.rules or obeyed or any(as_dict(each).get("trust_level") == "trusted" for each in above)
        if effort := as_str(options.get("effort")):
            config["model_reasoning_effort"] = effort
        if sandbox == confinement.SANDBOX and (writable := confinement.workspace_write(options, self._home)):
            config["sandbox_workspace_write"] = writable
        params: dict[str, Any] = {
            "cwd": spec.cwd,
            "approvalPolicy": approval_policy(spec.policy, sandbox),
            "approvalsReviewer": "user",
            "sandbox": sandbox,
            "config": config,
        }
        if model := as_str(options.get("model")):
            params["model"] = model
        if provider:
            params["modelProvider"] = KEY_PROVIDER
        if spec.system_prompt.strip():
            params["developerInstructions"] = spec.system_prompt
        return params

    async def _find_rules(self) -> None:
        """Rules are those of the account and of the machine; what cannot be read counts as none."""
        homes = [home for home in (self._home, SYSTEM_HOME) if home.startswith("/")]
        found = await asyncio.gather(*(self._asked("fs/readDirectory", {"path": f"{home}/rules"}) for home in homes))
        entries = [as_dict(entry) for answer in found for entry in as_list(as_dict(answer).get("entries"))]
        self.rules = any(as_str(entry.get("fileName")).endswith(".rules") for entry in entries)

    async def _has_tools(self, thread_id: str) -> bool:
        """Whether a stored thread has been given all of LangBot's tools: Codex keeps them in its history's first line."""
        read = as_dict(await self._asked("thread/read", {"threadId": thread_id}))
        path = as_str(as_dict(read.get("thread")).get("path"))
        given = await asyncio.to_thread(_tools_of_rollout, path) if path and self._local else frozenset()
        return {as_str(tool.get("name")) for tool in self.offered} <= given

    async def _fresh(self, params: dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._confined("thread/start", params)
        except RpcError as exc:
            raise self._refused("thread/start", exc) from None
        self.opened.thread_id = as_str(as_dict(result.get("thread")).get("id"))
        if not self.opened.thread_id:
            raise AgentProtocolError("coding.agent_protocol", step="thread/start")
        return result

    async def _resumed(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """Reopen the stored thread; ``None`` when it is proven gone and a new one may replace it."""
        thread_id = self.spec.resume_session_id
        try:
            result = await self._confined("thread/resume", {**params, "threadId": thread_id, "excludeTurns": True})
        except RpcError as exc:
            if is_busy_thread(exc):
                raise SessionUnavailable("coding.session_busy", retryable=True) from None
            if not is_missing_thread(exc):
                raise self._refused("thread/resume", exc) from None
            if not self.spec.create_if_missing:
                raise SessionUnavailable("coding.session_missing") from None
            self.opened.lost_history = True
            return None
        self.opened.thread_id = as_str(as_dict(result.get("thread")).get("id")) or thread_id
        self.opened.resumed = True
        return result

    async def _confined(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Open a thread whose commands cannot read the account's keys; where that is not to be had, as it can be, and say so.

        Raises :class:`RpcError`, and :class:`pkg.errors.AgentProtocolError` where Codex takes the wish and does not fulfil it.
        """
        if params["sandbox"] == FULL_ACCESS:
            return as_dict(await self._call(method, params))
        if self._confines:
            try:
                wanted = confinement.confined(params, self._own or {}, self._private)
                # A workspace with many skills takes long, see there.
                seconds = max(self.spec.startup_timeout, self.spec.initialize_timeout)
                result = as_dict(await self._call(method, wanted, seconds))
            except RpcError as exc:
                # An administrator's requirements may allow none but certain profiles.
                if "permission" not in exc.message.lower():
                    raise
                self._confines = False
            else:
                if as_dict(result.get("activePermissionProfile")).get("id") != confinement.PROFILE:
                    raise AgentProtocolError("coding.agent_protocol", step=method)
                return result
        result = as_dict(await self._call(method, params))
        self.opened.notices.append(
            Notice("coding.account_readable", level="warning", params={"machine": self.place.machine}),
        )
        return result

    async def _private_files(self) -> list[str]:
        """The files that hold the account's keys, and those of the one that Codex uses where none is named."""
        home = self._home
        if self._local:
            usual = Path(self.spec.env.get("HOME") or runtime_support.home_directory()) / ".codex"
            homes = [Path(home)] if home else []
            return await asyncio.to_thread(confinement.private_files, [*homes, usual])
        command = ["sh", "-c", confinement.PRIVATE_ELSEWHERE, "sh", home]
        params = {"command": command, "sandboxPolicy": {"type": "readOnly"}, "timeoutMs": int(limits.CODEX_PROBE_SECONDS * 500)}
        found = as_str(as_dict(await self._asked("command/exec", params)).get("stdout")).splitlines()
        # Where the sandbox cannot run this, it runs no command either.
        return [*dict.fromkeys(path for path in found if path.startswith("/"))] or [
            f"{home}/{name}" for name in confinement.PRIVATE
        ]

    # ---- calls

    async def _asked(self, method: str, params: Json) -> dict[str, Any] | None:
        """The answer to something that versions may lack: empty where it is refused, ``None`` where Codex fails over it."""
        try:
            return as_dict(await self._call(method, params))
        except RpcError as exc:
            return None if exc.code == INTERNAL_ERROR else {}

    async def _call(self, method: str, params: Json, timeout: float = 0.0) -> Json:
        seconds = timeout or self.spec.initialize_timeout
        try:
            return await self.server.peer.call(method, params, seconds)
        except TimeoutError:
            raise SessionUnavailable(
                "coding.agent_start_timeout",
                detail=last_lines(self.server.stderr_tail(), self.server.redact),
                retryable=True,
                seconds=f"{seconds:g}",
                step=method,
            ) from None

    def _refused(self, method: str, exc: RpcError) -> SessionUnavailable:
        detail = detail_of(exc.message, self.server.redact)
        return SessionUnavailable("coding.session_unavailable", detail=detail, step=method)


async def sandbox_works(server: AppServer, cwd: str, sandbox: str) -> bool | None:
    """Whether a command runs in the sandbox of this machine; ``None`` where that can't be found out.

    The check runs ``true`` (0.12 s with Codex 0.171); where the machine allows no namespaces, it fails. It runs read-only
    whatever the mode: for a writable workspace Codex puts placeholders of ``.git`` and the like into it for the time of a
    command, and one that is ended by force leaves them there.
    """
    if sandbox == FULL_ACCESS:
        return None
    policy = {"type": "readOnly"}
    params = {"command": ["true"], "cwd": cwd, "sandboxPolicy": policy, "timeoutMs": int(limits.CODEX_PROBE_SECONDS * 500)}
    try:
        result = as_dict(await server.peer.call("command/exec", params, limits.CODEX_PROBE_SECONDS))
    except (RpcError, TimeoutError):
        return None
    code = result.get("exitCode")
    return code == 0 if isinstance(code, int) else None
