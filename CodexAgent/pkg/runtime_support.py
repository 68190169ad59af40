"""Where and how a native process may live: worker shape, environment, search path, workspace, session guard.

Guarantees:

- a child's environment is built from an allowlist; nothing of the worker's own variables reaches it, and the worker's
  ``os.environ`` is only read;
- a command is found as an absolute path through the same search path the child gets, also in a worker without PATH and HOME;
- a workspace is an existing writable directory, or one clear error;
- a session has one writer at a time among all processes that use the same state directory, released by the kernel when its
  holder dies.

The supervised start and the proven stop are in :mod:`pkg.supervised_process` and offered here again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import hashlib
import itertools
import os
import pwd
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from pkg import limits
from pkg.errors import CommandNotFound, LaunchError, ProcessCleanupUnconfirmed, Refused, SessionUnavailable, SettingsError
from pkg.supervised_process import (
    MARKER,
    REAPER,
    OrphanReaper,
    SupervisedProcess,
    agent_died,
    terminate_process_group,
)

__all__ = [
    "MARKER",
    "REAPER",
    "OrphanReaper",
    "ProcessCleanupUnconfirmed",
    "SupervisedProcess",
    "WorkerShape",
    "account_name",
    "agent_died",
    "child_environment",
    "conventional_directories",
    "find_executable",
    "home_directory",
    "local_workspace",
    "search_path",
    "secret_values",
    "session_guard",
    "terminate_process_group",
    "worker_shape",
]

DATA_DIRECTORY: Final = Path("/data")
"""Where a jail of the shared profile has its one persistent directory."""


# ------------------------------------------------------------------ the worker


class WorkerShape(enum.Enum):
    """How this process is run: by a developer, by a stock LangBot, in a jail per installation, or for all installations."""

    DEBUG = "debug"
    DEDICATED = "dedicated"
    JAIL = "jail"
    POOL = "pool"


def worker_shape(environ: Mapping[str, str] | None = None, data: Path = DATA_DIRECTORY) -> WorkerShape:
    """The shape as far as the environment tells (SDK 0.7.18: ``LANGBOT_PLUGIN_RUNTIME_PROFILE``, HOME and ``/data``).

    The shared profile gives a jail HOME=/home and a writable ``/data``; the pool gets HOME=/tmp and no ``/data``. A profile
    nobody knows counts as the pool, the shape that may do least.
    """
    environ = os.environ if environ is None else environ
    profile = environ.get("LANGBOT_PLUGIN_RUNTIME_PROFILE", "")
    if not profile:
        return WorkerShape.DEBUG
    if profile == "oss_dev":
        return WorkerShape.DEDICATED
    if profile == "shared" and environ.get("HOME") != "/tmp" and data.is_dir():
        return WorkerShape.JAIL
    return WorkerShape.POOL


def home_directory(environ: Mapping[str, str] | None = None) -> str:
    """The account's home: HOME, else the passwd entry, else ``/data`` (a jail has no passwd), else ``/``."""
    home = (os.environ if environ is None else environ).get("HOME", "")
    if Path(home).is_absolute():
        return home
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid()).pw_dir
        if Path(entry).is_absolute():
            return entry
    return str(DATA_DIRECTORY) if DATA_DIRECTORY.is_dir() else "/"


# ------------------------------------------------------------------ search path and environment

_SYSTEM_DIRECTORIES: Final = (
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
    "/opt/homebrew/bin",
    "/home/linuxbrew/.linuxbrew/bin",
    "/snap/bin",
)
_HOME_DIRECTORIES: Final = (
    ".local/bin",
    "bin",
    ".npm-global/bin",
    ".volta/bin",
    ".asdf/shims",
    ".local/share/mise/shims",
    ".pyenv/shims",
    ".bun/bin",
    ".deno/bin",
    ".cargo/bin",
    "go/bin",
    ".local/share/pnpm",
    "Library/pnpm",
    ".yarn/bin",
    ".local/share/fnm/aliases/default/bin",
    ".nix-profile/bin",
)
_NODE_VERSIONS: Final = ".nvm/versions/node/*/bin"

_INHERITED: Final = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "TERM", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "COLORTERM", "NO_COLOR"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"),
        *("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"),
        *("NPM_CONFIG_REGISTRY", "npm_config_registry"),
    }
)
_PLAIN: Final = _INHERITED - {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} | {
    "PATH",
    "PWD",
}


def search_path(given: str = "", *, recorded: str = "", environ: Mapping[str, str] | None = None) -> str:
    """A PATH for a child: ``given`` (form), else ``recorded``, else our own; then where people install commands.

    Only absolute directories, each once, in this order; of the conventional ones only those that exist. The newest Node.js
    of a version manager that has no fixed directory comes last.
    """
    environ = os.environ if environ is None else environ
    home = Path(home_directory(environ))
    conventional = [*_SYSTEM_DIRECTORIES[:1], *(str(home / name) for name in _HOME_DIRECTORIES), *_SYSTEM_DIRECTORIES[1:]]
    conventional += (str(found) for found in sorted(home.glob(_NODE_VERSIONS), key=_version_of, reverse=True)[:1])
    first = (given or recorded or environ.get("PATH", "")).split(os.pathsep)
    entries = [entry for entry in first if Path(entry).is_absolute()]
    entries += [entry for entry in conventional if entry in ("/usr/bin", "/bin") or Path(entry).is_dir()]
    return os.pathsep.join(dict.fromkeys(entries))


def conventional_directories() -> tuple[str, ...]:
    """Where people install commands, for a machine that is not this one: ``~`` is its home, ``*`` any version."""
    home = tuple(f"~/{name}" for name in _HOME_DIRECTORIES)
    return (*_SYSTEM_DIRECTORIES[:1], *home, *_SYSTEM_DIRECTORIES[1:], f"~/{_NODE_VERSIONS}")


def _version_of(directory: Path) -> tuple[int, ...]:
    name = directory.parent.name.lstrip("v")
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def find_executable(name: str, path: str = "", *, cwd: Path | None = None) -> str:
    """The absolute path of the command ``name``, looked for along ``path`` (default: :func:`search_path`).

    A name with a slash is taken relative to ``cwd`` (a process resolves it only after changing its directory, so it must be
    made absolute before). Links are kept: version managers decide by the name they are called by. Raises
    :class:`pkg.errors.CommandNotFound` with the places looked at, :class:`pkg.errors.LaunchError`
    (``coding.agent_not_executable``).
    """
    path = path or search_path()
    name = home_directory() + name[1:] if name.startswith("~/") else name
    if not name or "\0" in name:
        raise CommandNotFound("?", path.split(os.pathsep))
    if "/" in name:
        candidates = [Path(name) if cwd is None else cwd / name]
    else:
        candidates = [Path(directory) / name for directory in path.split(os.pathsep)]
    unusable = False
    for candidate in candidates:
        if _is_file(candidate):
            if os.access(candidate, os.X_OK):
                return str(candidate.absolute())
            unusable = True
    if unusable:
        raise LaunchError("coding.agent_not_executable", name=Path(name).name)
    raise CommandNotFound(Path(name).name, (str(candidate.parent) for candidate in candidates))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def child_environment(
    extra: Mapping[str, str] | None = None,
    *,
    recorded_path: str = "",
    ssh_agent: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of an agent: what the allowlist lets through, a real PATH and HOME, and ``extra`` over it.

    The allowlist: account, language and time zone, temporary directory, the operator's proxies, certificates and npm registry.
    ``ssh_agent`` adds SSH_AUTH_SOCK. The worker's own variables (LANGBOT_*, PYTHON*), those of a coding agent's session this
    process may run inside, and every credential stay behind; ``extra`` may name anything on purpose. A PATH in ``extra`` comes
    first in the search path. Raises :class:`pkg.errors.SettingsError` (``coding.env_invalid``) for a name or value that no
    environment can hold.
    """
    environ = os.environ if environ is None else environ
    extra = extra or {}
    for name, value in extra.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise SettingsError("coding.env_invalid", field="env-json", name=name.replace("\0", "")[:64] or "?")
    env = {name: value for name, value in environ.items() if name in _INHERITED or name.startswith("LC_")}
    if ssh_agent and "SSH_AUTH_SOCK" in environ:
        env["SSH_AUTH_SOCK"] = environ["SSH_AUTH_SOCK"]
    user, shell = _account()
    env["HOME"] = home_directory(environ)
    env.setdefault("USER", env.get("LOGNAME", user))
    env.setdefault("LOGNAME", env["USER"])
    env.setdefault("SHELL", shell)
    env.setdefault("LANG", "C.UTF-8")
    env.setdefault("TERM", "dumb")
    env["NPM_CONFIG_LOGLEVEL"] = "error"
    env["NPM_CONFIG_UPDATE_NOTIFIER"] = "false"
    env["NPM_CONFIG_FUND"] = "false"
    env.update(extra)
    env["PATH"] = search_path(extra.get("PATH", ""), recorded=recorded_path, environ={**environ, "HOME": env["HOME"]})
    return env


def account_name() -> str:
    """The name of the account this process runs under; its number where the account has no entry (a jail)."""
    return _account()[0]


def _account() -> tuple[str, str]:
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), "/bin/sh"
    return entry.pw_name, entry.pw_shell or "/bin/sh"


def secret_values(extra: Mapping[str, str]) -> tuple[str, ...]:
    """The values of ``extra`` that must not be shown: all but those of plainly public names and those too short to be one.

    Public names are the allowlist's own (HOME, LANG, TZ …) except proxies; short means under ``limits.SECRET_CHARS``.
    """
    return tuple(value for name, value in extra.items() if name not in _PLAIN and len(value) >= limits.SECRET_CHARS)


# ------------------------------------------------------------------ workspace


def local_workspace(configured: str = "", *, shape: WorkerShape | None = None, data: Path = DATA_DIRECTORY) -> Path:
    """The real directory a local agent works in.

    In a jail the default is ``/data/workspace``, made for this installation alone; elsewhere it is the current directory.
    Raises :class:`pkg.errors.Refused` ``coding.local_in_pool`` in the shared pool, else :class:`pkg.errors.LaunchError`:
    ``coding.workspace_unset`` (the current directory is the plugin's own read-only code), ``coding.workspace_relative``,
    ``coding.workspace_root``, ``coding.workspace_missing``, ``coding.workspace_not_visible`` (missing in the jail),
    ``coding.workspace_not_directory``, ``coding.workspace_not_writable``.
    """
    shape = worker_shape() if shape is None else shape
    if shape is WorkerShape.POOL:
        raise Refused("coding.local_in_pool")
    configured = configured.strip()
    if configured == "~" or configured.startswith("~/"):
        configured = home_directory() + configured[1:]
    if configured:
        if not Path(configured).is_absolute():
            raise LaunchError("coding.workspace_relative")
        chosen = Path(configured)
    elif shape is WorkerShape.JAIL:
        chosen = data / "workspace"
        with contextlib.suppress(OSError):
            chosen.mkdir(mode=0o700, exist_ok=True)
    else:
        chosen = Path.cwd()
        if not _writable(chosen):
            raise LaunchError("coding.workspace_unset")
    return _usable(chosen, "coding.workspace_not_visible" if shape is WorkerShape.JAIL else "coding.workspace_missing")


def _usable(chosen: Path, missing: str) -> Path:
    try:
        real = chosen.resolve(strict=True)
        mode = real.stat().st_mode
    except NotADirectoryError:
        raise LaunchError("coding.workspace_not_directory") from None
    except PermissionError:
        raise LaunchError("coding.workspace_not_writable") from None
    except (OSError, ValueError, RuntimeError):
        raise LaunchError(missing) from None
    if real == Path(real.anchor):
        raise LaunchError("coding.workspace_root")
    if not stat.S_ISDIR(mode):
        raise LaunchError("coding.workspace_not_directory")
    if not _writable(real):
        raise LaunchError("coding.workspace_not_writable")
    return real


def _writable(directory: Path) -> bool:
    """Whether files can be made there; a directory without any write bit counts as read-only for root, too."""
    try:
        return bool(directory.stat().st_mode & 0o222) and os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        return False


# ------------------------------------------------------------------ session guard


@contextlib.asynccontextmanager
async def session_guard(
    directory: Path, workspace: str | Path, session_id: str, *, wait: float = limits.SESSION_GUARD_WAIT
) -> AsyncIterator[None]:
    """Hold the one writer's place of a vendor session: a kernel lock per real path and session.

    ``directory`` is beside the vendor's own state, so that whoever shares the state shares the lock and another account stays
    independent; it is made with mode 0700. The lock ends with the block or with the process, also by SIGKILL, and is not
    inherited by children. Waits at most ``wait`` seconds. Raises :class:`pkg.errors.SessionUnavailable`:
    ``coding.session_busy``, or ``coding.state_unusable`` when the directory cannot be made or is not ours alone.
    """
    name = hashlib.sha256(f"{os.path.realpath(workspace)}\0{session_id}".encode("utf-8", "surrogatepass")).hexdigest()
    path = _private(directory) / f"{name}.lock"
    deadline = asyncio.get_running_loop().time() + wait
    while (fd := _try_lock(path)) is None:
        if asyncio.get_running_loop().time() >= deadline:
            raise SessionUnavailable("coding.session_busy", retryable=True)
        await asyncio.sleep(limits.SESSION_GUARD_POLL)
    try:
        _sweep(path)
        yield
    finally:
        # Removed while it is still locked: whoever opened it meanwhile sees that the name leads elsewhere and tries again.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(fd)


def _private(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise SessionUnavailable("coding.state_unusable")
        if stat.S_IMODE(status.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError:
        raise SessionUnavailable("coding.state_unusable") from None
    return directory


def _sweep(own: Path) -> None:
    """Remove what killed processes left beside ``own``: a few files nobody holds, so that they never pile up."""
    with contextlib.suppress(OSError, SessionUnavailable), os.scandir(own.parent) as entries:
        others = (Path(entry) for entry in entries if entry.name.endswith(".lock") and entry.name != own.name)
        for path in itertools.islice(others, limits.SESSION_GUARD_SWEEP):
            fd = _try_lock(path)
            if fd is not None:
                path.unlink(missing_ok=True)
                os.close(fd)


def _try_lock(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        raise SessionUnavailable("coding.state_unusable") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
