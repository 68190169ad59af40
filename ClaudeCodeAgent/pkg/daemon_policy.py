"""The workstation's own word on what may run there: a TOML file that its owner writes, and the judgement of a job against it.

::

    daemon_id = "laptop"                      # what the runner's form calls this machine
    workspaces = ["~/src"]                    # agents work below these, the first is the default
    environment = ["ANTHROPIC_API_KEY"]       # variables of the daemon's own environment that agents get
    job_environment = []                      # variables a job may set
    job_options = ["model"]                   # options of the agent a job may set
    approvals = ["ask", "allow-edits", "deny"]  # approval policies a job may ask for
    mcp_servers = true                        # whether a job may name further MCP servers (by address, never by command)
    worktrees = true                          # whether a job may have a git worktree of its chat's own made in a workspace
    trusted_workspaces = []                   # below these, agents obey the files of the workspace (hooks run commands)
    max_jobs = 8
    state_dir = "~/.local/state/langbot-coding-agents/daemon"
    path = ""                                 # where commands are looked for first

    [[hubs]]
    url = "wss://chat.example.org:8767"
    key_file = "laptop.key"                   # or token_file; else the environment or a prompt
    certificate_sha256 = ""                   # pins a certificate instead of the system's authorities
    insecure_plaintext = false                # ws:// to another machine

    [agents.claude]
    command = ["claude-agent-acp"]
    driver = "acp"                            # where the package has several
    workspaces = []                           # narrower than the common ones
    environment = []                          # in addition to the common ones
    max_jobs = 8

Guarantees: a file that cannot be used whole is not used at all, and the error names file, line and key; an unknown key is such
an error, so that no typing mistake loosens anything; command lines come from this file only; directories are compared by
their real paths, so no symbolic link leads out of a root; the file itself, the daemon's secrets and its state lie in none of
them, so that an agent which may edit its workspace can't edit those; a job outside of the policy raises before anything is
started.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import stat
import tomllib
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pkg import limits, relay_sockets, runtime_support
from pkg.agent_api import CodecError, Json, McpServer, SessionSpec, spec_from_json
from pkg.errors import CodingError, Refused
from pkg.relay_auth import valid_daemon_id

KEY_VARIABLE: Final = "CODING_DAEMON_KEY"
"""May hold the daemon's key where there is no file."""
TOKEN_VARIABLE: Final = "CODING_DAEMON_TOKEN"
"""May hold the installation's token where there is no file."""
STATE_DIRECTORY: Final = f"~/{limits.STATE_DIRECTORY}/daemon"
TRUST_OPTION: Final = "trust_workspace"
"""The option by which a driver is told that it may let its agent obey the files of the workspace."""
APPROVALS: Final = ("ask", "allow-edits", "deny")
"""Approval policies a job may ask for unless the file says otherwise: those under which a person or nobody decides."""
OPTIONS: Final = ("model",)
"""Options of the agent a job may set unless the file says otherwise; a mode could switch the asking off."""
RESTRICTIONS: Final = frozenset({"private"})
"""Options a job may always set, because they only take from an agent: variables it brings that no command may see."""

_TOP_KEYS: Final = frozenset(
    {"daemon_id", "workspaces", "environment", "job_environment", "job_options", "approvals", "mcp_servers", "worktrees"}
    | {"trusted_workspaces", "max_jobs", "state_dir", "path", "hubs", "agents"}
)
_HUB_KEYS: Final = frozenset({"url", "key_file", "token_file", "certificate_sha256", "insecure_plaintext"})
_AGENT_KEYS: Final = frozenset({"command", "driver", "workspaces", "environment", "max_jobs"})

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AGENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORKTREE: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
_PIN: Final = re.compile(r"[0-9a-f]{64}")
_HEADER: Final = re.compile(r"\s*\[(\[?)\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART: Final = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


class PolicyError(Exception):
    """A policy file cannot be used: ``file``, ``line`` (1 where nothing better is known), ``key`` and what is wrong."""

    def __init__(self, file: Path, line: int, key: str, problem: str) -> None:
        """``problem`` is a few words for the owner, and never a secret."""
        self.file, self.line, self.key, self.problem = file, line, key, problem
        super().__init__(f"{file}:{line}: {key + ': ' if key else ''}{problem}")


@dataclass(frozen=True, slots=True)
class HubEntry:
    """One hub to connect to."""

    url: str
    key_file: Path | None = None
    token_file: Path | None = None
    certificate_sha256: str = ""
    insecure_plaintext: bool = False


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One agent that jobs may name."""

    name: str
    driver: str
    command: tuple[str, ...]
    workspaces: tuple[Path, ...]
    """Real paths; the first is the default."""
    environment: tuple[str, ...]
    max_jobs: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that the policy allows, with nothing of the hub's left in it that could start something."""

    agent: AgentEntry
    spec: SessionSpec
    tools: bool
    """Whether the agent gets LangBot's tools."""
    actor: str = ""
    """Who the job is for, as its hub names them."""
    worktree: str = ""
    """The worktree of ``spec.cwd`` to work in."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy file."""

    file: Path
    daemon_id: str
    hubs: tuple[HubEntry, ...]
    agents: Mapping[str, AgentEntry]
    workspaces: tuple[Path, ...]
    job_environment: frozenset[str]
    job_options: frozenset[str]
    approvals: tuple[str, ...]
    mcp_servers: bool
    worktrees: bool
    trusted_workspaces: tuple[Path, ...]
    """Roots whose files agents may obey, whatever a job says."""
    max_jobs: int
    state_dir: Path
    path: str

    def admit(self, payload: Json, environ: Mapping[str, str] | None = None) -> Admitted:
        """The job of ``payload`` as it may run here.

        Raises :class:`pkg.errors.Refused` (``coding.policy_*``) for what the file does not allow, and
        :class:`pkg.errors.CodingError` (``coding.daemon_payload_invalid``) for what is no job. Nothing was started then.
        """
        try:
            name = payload["agent"]
            driver = payload["driver"]
            tools = payload.get("tools", False)
            actor, worktree = payload.get("actor", ""), payload.get("worktree", "")
            spec = spec_from_json(payload["spec"])
            if not (isinstance(tools, bool) and all(isinstance(each, str) for each in (name, driver, actor, worktree))):
                raise TypeError
        except (KeyError, TypeError, AttributeError, CodecError):
            raise CodingError("coding.daemon_payload_invalid") from None
        if worktree and not _WORKTREE.fullmatch(worktree):
            raise CodingError("coding.daemon_payload_invalid")
        if not name and len(self.agents) > 1:
            raise Refused("coding.policy_agent_needed", known=", ".join(self.agents))
        agent = self.agents.get(name) if name else next(iter(self.agents.values()))
        if agent is None:
            raise Refused("coding.policy_agent_unknown", agent=name[:80], known=", ".join(self.agents))
        if agent.driver != driver:
            raise Refused("coding.policy_driver_other", agent=agent.name, driver=driver[:80])
        if spec.command:
            raise Refused("coding.policy_command_refused")
        for variable in spec.env:
            if variable not in self.job_environment:
                raise Refused("coding.policy_environment", name=variable[:80])
        for option in spec.options:
            if option not in self.job_options | RESTRICTIONS:
                raise Refused("coding.policy_option", name=option[:80])
        if spec.policy not in self.approvals:
            raise Refused("coding.policy_approvals", asked=spec.policy[:80], allowed=", ".join(self.approvals))
        self.check_servers(spec.mcp_servers)
        directory = workspace(agent.workspaces, spec.cwd)
        if worktree:
            self._check_worktree(agent, directory)
        options = dict(spec.options)
        if any(root == directory or root in directory.parents for root in self.trusted_workspaces):
            options[TRUST_OPTION] = True
        environ = os.environ if environ is None else environ
        own = {variable: environ[variable] for variable in agent.environment if variable in environ}
        admitted = dataclasses.replace(
            spec,
            command=agent.command,
            cwd=str(directory),
            env=types.MappingProxyType({**own, **spec.env}),
            options=types.MappingProxyType(options),
            startup_timeout=_seconds(spec.startup_timeout),
            initialize_timeout=_seconds(spec.initialize_timeout),
        )
        return Admitted(agent, admitted, tools, actor[: limits.DAEMON_ACTOR_CHARS], worktree)

    def _check_worktree(self, agent: AgentEntry, directory: Path) -> None:
        """Worktrees lie in the top directory of their repository, which then is inside a root, too."""
        if not self.worktrees:
            raise Refused("coding.policy_worktrees")
        top = next((each for each in (directory, *directory.parents) if (each / ".git").exists()), directory)
        if not any(root == top or root in top.parents for root in agent.workspaces):
            raise Refused("coding.policy_worktree_outside")

    def check_servers(self, servers: tuple[McpServer, ...]) -> None:
        """Whether a job may have these MCP servers; raises :class:`pkg.errors.Refused`."""
        for server in servers:
            if server.transport == "stdio" or server.command:
                raise Refused("coding.policy_mcp_command", server=server.name[:80])
            if not self.mcp_servers:
                raise Refused("coding.policy_mcp_refused", server=server.name[:80])


def workspace(roots: tuple[Path, ...], asked: str) -> Path:
    """The real directory a job works in: ``asked`` (absolute, below ``~`` or below the first root), else the first root.

    Raises :class:`pkg.errors.Refused`: ``coding.policy_workspace_outside``, also for a link that leads out (and without
    telling what exists out there), ``coding.policy_workspace_missing``.
    """
    asked = asked.strip()
    try:
        real = roots[0].joinpath(_home(asked)).resolve()
        inside = any(root == real or root in real.parents for root in roots)
        found = inside and real.is_dir()
    except (OSError, ValueError, RuntimeError):
        raise Refused("coding.policy_workspace_missing") from None
    if not inside:
        raise Refused("coding.policy_workspace_outside")
    if not found:
        raise Refused("coding.policy_workspace_missing")
    return real


def _home(path: str) -> str:
    return runtime_support.home_directory() + path[1:] if path == "~" or path.startswith("~/") else path


def _seconds(asked: float) -> float:
    return min(asked, limits.DAEMON_STARTUP_MAX) if math.isfinite(asked) and asked > 0 else limits.DAEMON_STARTUP_MAX


# ------------------------------------------------------------------ reading the file


def load(file: Path, drivers: Collection[str], policies: Collection[str]) -> Policy:
    """The policy in ``file``, for a package with these drivers and approval policies; raises :class:`PolicyError`."""
    file = file.absolute()
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            data = opened.read(limits.DAEMON_POLICY_BYTES + 1)
    except OSError as exc:
        raise PolicyError(file, 1, "", exc.strerror or "cannot be read") from None
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
        raise PolicyError(file, 1, "", "others can change this file; make it yours alone: chmod go-w")
    if len(data) > limits.DAEMON_POLICY_BYTES:
        raise PolicyError(file, 1, "", f"longer than {limits.DAEMON_POLICY_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        values = tomllib.loads(text)
    except UnicodeDecodeError as exc:
        raise PolicyError(file, data.count(b"\n", 0, exc.start) + 1, "", "not UTF-8") from None
    except tomllib.TOMLDecodeError as exc:
        place = re.search(r"\(at line (\d+), column \d+\)", str(exc))
        line = int(place[1]) if place else text.count("\n") + 1
        said = re.sub(r" \(at .*\)$", "", str(exc))
        raise PolicyError(file, line, "", f"not TOML: {said}. Texts stand in quotes, a key stands once") from None
    return _policy(_Table(_Source(file, text), values, ()), tuple(drivers), tuple(policies))


@dataclass(frozen=True, slots=True)
class _Source:
    file: Path
    text: str

    def error(self, where: tuple[str | int, ...], problem: str) -> PolicyError:
        """An error at a key, in the line that sets it or else its table's header."""
        line = 1
        lines = dict(self._lines())
        for length in range(len(where), 0, -1):
            if where[:length] in lines:
                line = lines[where[:length]]
                break
        return PolicyError(self.file, line, ".".join(str(part) for part in where), problem)

    def _lines(self) -> Iterator[tuple[tuple[str | int, ...], int]]:
        """Where keys and tables stand."""
        counts: dict[str, int] = {}
        table: tuple[str | int, ...] = ()
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := _HEADER.match(line):
                table = _parts(header[2])
                if header[1]:
                    counts[header[2]] = counts.get(header[2], 0) + 1
                    if counts[header[2]] == 1:
                        yield table, number
                    table = (*table, counts[header[2]])
                yield table, number
            elif key := _KEY.match(line):
                yield (*table, *_parts(key[1])), number


def _parts(text: str) -> tuple[str | int, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(text))


class _Table:
    """One table of the file: its keys are taken one by one, and what is left is unknown."""

    def __init__(self, source: _Source, values: Mapping[str, Any], where: tuple[str | int, ...]) -> None:
        self.source = source
        self.where = where
        self._left = dict(values)

    def error(self, key: str, problem: str) -> PolicyError:
        return self.source.error((*self.where, key) if key else self.where, problem)

    def has(self, key: str) -> bool:
        return key in self._left

    def text(self, key: str, default: str | None = None) -> str:
        value = self._left.pop(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str) or "\0" in value:
            raise self.error(key, "is not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false")
        return value

    def number(self, key: str, default: int, most: int) -> int:
        value = self._left.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(key, f"is not a number from 1 to {most}")
        return value

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        value = self._left.pop(key, list(default))
        if not isinstance(value, list) or not all(isinstance(item, str) and item and "\0" not in item for item in value):
            raise self.error(key, 'is not a list of texts; write ["one", "two"]')
        return tuple(value)

    def variables(self, key: str) -> tuple[str, ...]:
        names = self.texts(key)
        for name in names:
            if not _NAME.fullmatch(name):
                raise self.error(key, f'"{name}" is no name of a variable')
            if name in (KEY_VARIABLE, TOKEN_VARIABLE):
                raise self.error(key, f"{name} is the daemon's own secret and never an agent's")
        return names

    def path(self, key: str, default: str | None = None) -> Path:
        return self.source.file.parent / _home(self.text(key, default))

    def directories(self, key: str) -> tuple[Path, ...]:
        """Real paths of existing directories."""
        found = []
        for name in self.texts(key):
            try:
                real = (self.source.file.parent / _home(name)).resolve(strict=True)
            except (OSError, ValueError, RuntimeError):
                raise self.error(key, f'"{name}" does not exist; make it, or name another directory') from None
            if not real.is_dir():
                raise self.error(key, f'"{name}" is no directory')
            if real == Path(real.anchor):
                raise self.error(key, "the root of the file system is no workspace")
            found.append(real)
        return tuple(found)

    def table(self, key: str) -> _Table:
        value = self._left.pop(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "is not a table")
        return _Table(self.source, value, (*self.where, key))

    def tables(self, key: str) -> tuple[_Table, ...]:
        value = self._left.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"is not a list of tables; write [[{key}]]")
        return tuple(_Table(self.source, item, (*self.where, key, number)) for number, item in enumerate(value, 1))

    def names(self) -> tuple[str, ...]:
        return tuple(self._left)

    def only(self, keys: Collection[str]) -> None:
        """Before anything is read, so that a misspelled key is named and not the absence of the right one."""
        for key in self._left:
            if key not in keys:
                raise self.error(key, "is not a key that is known here")

    def done(self) -> None:
        """Nothing that stands here was left unread."""
        self.only(())


def _policy(top: _Table, drivers: tuple[str, ...], policies: tuple[str, ...]) -> Policy:
    top.only(_TOP_KEYS)
    daemon_id = top.text("daemon_id")
    if not valid_daemon_id(daemon_id):
        raise top.error("daemon_id", "has 1 to 128 characters and no control characters")
    roots = top.directories("workspaces")
    if not roots:
        raise top.error("workspaces", "names no directory, so no agent could work anywhere")
    common = top.variables("environment")
    job_environment = frozenset(top.variables("job_environment"))
    job_options = frozenset(top.texts("job_options", OPTIONS))
    approvals = top.texts("approvals", APPROVALS)
    for approval in approvals:
        if approval not in policies:
            raise top.error("approvals", f'"{approval}" is none of: {", ".join(policies)}')
    mcp_servers = top.flag("mcp_servers", True)
    worktrees = top.flag("worktrees", True)
    trusted = top.directories("trusted_workspaces") if top.has("trusted_workspaces") else ()
    most = top.number("max_jobs", limits.RELAY_JOBS, limits.RELAY_JOBS)
    state_dir = top.path("state_dir", STATE_DIRECTORY)
    path = top.text("path", "")
    hubs = tuple(_hub(table) for table in top.tables("hubs"))
    if not hubs:
        raise top.error("hubs", "names no hub to connect to; write [[hubs]]")
    if len({hub.url for hub in hubs}) < len(hubs):
        raise top.error("hubs", "names one hub twice")
    named = top.table("agents")
    agents = {name: _agent(named.table(name), name, drivers, roots, common, most) for name in named.names()}
    if not agents:
        raise top.error("agents", "names no agent; write [agents.NAME], or take the # away from one that is there")
    top.done()
    own = [("this file", top.source.file), ("state_dir", state_dir)]
    own += [("a key or token", file) for hub in hubs for file in (hub.key_file, hub.token_file) if file is not None]
    for what, file in own:
        real = file.resolve()
        for root in roots:
            if root == real or root in real.parents:
                raise top.error("workspaces", f'{what} lies inside "{root}", where agents could change it')
    return Policy(
        file=top.source.file,
        daemon_id=daemon_id,
        hubs=hubs,
        agents=types.MappingProxyType(agents),
        workspaces=roots,
        job_environment=job_environment,
        job_options=job_options,
        approvals=approvals,
        mcp_servers=mcp_servers,
        worktrees=worktrees,
        trusted_workspaces=trusted,
        max_jobs=most,
        state_dir=state_dir,
        path=path,
    )


def _hub(table: _Table) -> HubEntry:
    table.only(_HUB_KEYS)
    url = table.text("url")
    insecure = table.flag("insecure_plaintext", False)
    problem = relay_sockets.address_problem(url, insecure_plaintext=insecure)
    if problem:
        raise table.error("url", problem)
    pin = table.text("certificate_sha256", "").replace(":", "").lower()
    if pin and not _PIN.fullmatch(pin):
        raise table.error("certificate_sha256", "is not the SHA-256 of a certificate (64 hexadecimal digits)")
    if pin and not url.startswith("wss:"):
        raise table.error("certificate_sha256", "only a wss:// address has a certificate")
    key_file = table.path("key_file") if table.has("key_file") else None
    token_file = table.path("token_file") if table.has("token_file") else None
    if key_file and token_file:
        raise table.error("token_file", "there is a key_file already")
    table.done()
    return HubEntry(url, key_file, token_file, pin, insecure)


def _agent(
    table: _Table, name: str, drivers: tuple[str, ...], roots: tuple[Path, ...], common: tuple[str, ...], most: int
) -> AgentEntry:
    if not _AGENT.fullmatch(name):
        raise table.error("", "an agent's name has up to 64 letters, digits, dots, dashes and underscores")
    table.only(_AGENT_KEYS)
    driver = table.text("driver", drivers[0] if len(drivers) == 1 else None)
    if driver not in drivers:
        raise table.error("driver", f"is none of this package's: {', '.join(drivers)}")
    command = table.texts("command")
    if not command:
        raise table.error("command", "is missing or empty")
    own = table.directories("workspaces")
    for directory in own:
        if not any(root == directory or root in directory.parents for root in roots):
            raise table.error("workspaces", "is not inside the common workspaces")
    environment = tuple(dict.fromkeys((*common, *table.variables("environment"))))
    entry = AgentEntry(name, driver, command, own or roots, environment, table.number("max_jobs", most, limits.RELAY_JOBS))
    table.done()
    return entry


# ------------------------------------------------------------------ secrets


class SecretError(Exception):
    """A secret cannot be had, in words that do not hold it."""


def read_secret(file: Path) -> str:
    """The secret in a file that nobody else can read; raises :class:`SecretError`."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            data = opened.read(limits.DAEMON_SECRET_BYTES + 1)
    except OSError as exc:
        raise SecretError(f"{file}: {exc.strerror or 'cannot be read'}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0):
        raise SecretError(f"{file}: not a file of this account")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SecretError(f"{file}: others can read it; make it yours alone: chmod 600")
    if len(data) > limits.DAEMON_SECRET_BYTES:
        raise SecretError(f"{file}: too long for a secret")
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise SecretError(f"{file}: not a text") from None
    if not text:
        raise SecretError(f"{file}: empty")
    return text
