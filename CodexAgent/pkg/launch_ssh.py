"""An agent on another machine, reached by SSH: :class:`SshLauncher` behind the same ``Launcher`` interface.

What happens at a start: an SSH client runs here as a supervised process; on the remote side one fixed line looks for
``python3`` and reads from stdin, exactly as many bytes as announced, the remote half (:mod:`pkg.ssh_wrapper`); from then on
both sides speak frames, and the first brings the order and the supervisor's program. So secrets, environment, command and
workspace are on no command line, here or there.

Guarantees:

- never a prompt: keys only, ``BatchMode``, no terminal; host keys are always checked, against those of the form where given;
- a failure to connect is a :class:`pkg.errors.LaunchError` that says what to do; raw client output reaches nobody;
- cancelling ends the remote tree, and says so only on the remote supervisor's word; a lost connection ends the remote tree
  by itself, and here it counts as unconfirmed;
- a key from the form is in no file: the OpenSSH client reads it from anonymous memory of this process, the library from its
  stdin. Which of the two runs: OpenSSH, except where it is not installed or cannot run (no passwd entry, as in a jail), or
  where a key would need a file (no anonymous memory, as on macOS).

An empty workspace means the account's home on the remote machine; ``~`` and relative paths are taken from there; ``/`` is
refused.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pwd
import re
import secrets as random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pkg import limits, process_supervisor, runtime_support, ssh_errors, ssh_library, ssh_options, ssh_wrapper, traceless
from pkg.errors import AgentDied, LaunchError, SettingsError
from pkg.launch import LocalLauncher
from pkg.process_api import AgentProcess, Command, Graces
from pkg.ssh_options import SshTarget
from pkg.ssh_process import RemoteProcess, ShellProcess, failure, graces_of
from pkg.supervised_process import stopped

__all__ = ["SshLauncher", "SshTarget"]

_READ_EXACTLY: Final = (
    "import os;"
    "g=lambda n,b:any(b.extend(os.read(0,n-len(b))or os._exit(1))or len(b)>=n for _ in iter(int,1))and b;"
    "exec(bytes(g(int(g(8,bytearray())),bytearray())))"
)
_PYTHONS: Final = (
    '/usr/bin/python3 /usr/local/bin/python3 /opt/homebrew/bin/python3 python3 "$HOME"/.local/bin/python3 '
    '"$HOME"/.pyenv/shims/python3 "$HOME"/miniconda3/bin/python3 "$HOME"/anaconda3/bin/python3'
)
REMOTE_LINE: Final = (
    "exec /bin/sh -c '"
    f"for p in {_PYTHONS}; do "
    'if q=$(command -v "$p" 2>/dev/null) && '
    '"$q" -I -S -c "import sys;sys.exit(sys.version_info<(3,7))" </dev/null >/dev/null 2>&1; '
    f'then printf "\\n%s%s python3\\n" coding- ssh-1; exec "$q" -I -S -c "{_READ_EXACTLY}"; fi; done; '
    'printf "\\n%s%s sh\\n" coding- ssh-1; read -r n && s=$(dd bs=1 count="$n" 2>/dev/null) && eval "$s"\''
)
"""The one line the remote account's shell runs: no secret, no newline, nothing that sh, csh and fish read differently."""

_GREETING: Final = re.compile(rb"\ncoding-ssh-1 (python3|sh)\n")
_LOOPBACK: Final = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
_DEFAULTS: Final = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "NPM_CONFIG_LOGLEVEL": "error",
    "NPM_CONFIG_UPDATE_NOTIFIER": "false",
    "NPM_CONFIG_FUND": "false",
}
_CLIENT_GRACES: Final = Graces(eof=1.0, term=0.5, kill=1.0)
_LIBRARY_IGNORES: Final = frozenset(
    {
        *("C", "4", "6", "addressfamily", "checkhostip", "compression", "connectionattempts", "connecttimeout"),
        *("gssapiauthentication", "globalknownhostsfile", "hostkeyalias", "identitiesonly", "identityfile", "ipqos", "port"),
        *("preferredauthentications", "pubkeyauthentication", "serveralivecountmax", "serveraliveinterval", "tcpkeepalive"),
        *("user", "userknownhostsfile"),
    }
)
"""Extra options that the library knows, or that change nothing for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tunnel:
    """A port of the remote machine's loopback that leads to an address here."""

    remote: int
    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Connection:
    """A client that is logged in; the remote side waits for its program. ``python`` tells which kind."""

    carrier: AgentProcess
    python: bool
    tunnel: _Tunnel | None


@functools.cache
def _source(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


class SshLauncher:
    """One account on one machine, reached by SSH; a :class:`pkg.process_api.Launcher`.

    ``alive_interval`` and ``alive_timeout`` are the keepalive's seconds, on both sides. Raises
    :class:`pkg.errors.SettingsError` naming the field when the target cannot be used.
    """

    local = False

    def __init__(
        self,
        target: SshTarget,
        *,
        alive_interval: float = limits.SSH_ALIVE_INTERVAL,
        alive_timeout: float = limits.SSH_ALIVE_TIMEOUT,
    ) -> None:
        self._options = ssh_options.check(target)
        self._client = target.client
        self._alive = (alive_interval, alive_timeout)
        self._here = LocalLauncher()
        self._held: _Connection | None = None

    @property
    def machine(self) -> str:
        """``user@host:port``."""
        return self._options.machine

    @property
    def label(self) -> str:
        """The same name."""
        return self.machine

    async def start(self, command: Command) -> AgentProcess:
        """Start the command on the remote machine.

        Raises :class:`pkg.errors.LaunchError` ``coding.ssh_*`` (see :mod:`pkg.ssh_errors` and the catalogue),
        :class:`pkg.errors.SettingsError` for an option this client cannot have, and
        :class:`pkg.errors.ProcessCleanupUnconfirmed` where a failed start may have left something on the remote machine.
        """
        _check(command, self.machine)
        connection, self._held = self._held, None
        if connection is None:
            connection = await self._connect(None)
        hidden = (*runtime_support.secret_values(command.env), *self._own_secrets())
        search = runtime_support.conventional_directories()
        if not connection.python:
            shell = ShellProcess(connection.carrier, command, machine=self.machine, secrets=hidden)
            await shell.begin(search)
            return shell
        interval, timeout = self._alive
        process = RemoteProcess(
            connection.carrier,
            command,
            machine=self.machine,
            secrets=hidden,
            alive_interval=interval,
            alive_timeout=timeout,
        )
        program = _source(ssh_wrapper.__file__).encode()
        await process.begin(
            b"%08d" % len(program) + program,
            {
                "argv": list(command.argv),
                "cwd": command.cwd,
                "env": dict(command.env),
                "defaults": _DEFAULTS,
                "marker": runtime_support.MARKER,
                "graces": graces_of(command.graces),
                "search": list(search),
                "alive": [interval, timeout],
                "window": limits.SSH_WINDOW_BYTES,
                "supervisor": _source(process_supervisor.__file__),
            },
        )
        return process

    async def reach(self, url: str) -> str:
        """``url`` as the remote machine reaches it: a loopback address through a reverse tunnel on a port of its own.

        The connection is made now and taken by the next :meth:`start`, so the port is proven to be ours before anybody is told
        it (``ExitOnForwardFailure``): no other process of the remote machine can be listening there and get the bearer. Raises
        :class:`pkg.errors.LaunchError`; ``ValueError`` when another address is already held.
        """
        parts = traceless.split_url(url)
        host = _LOOPBACK.get(parts.hostname or "")
        if host is None:
            return url
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if self._held is None:
            self._held = await self._connect((host, port))
        tunnel = self._held.tunnel
        if tunnel is None or (tunnel.host, tunnel.port) != (host, port):
            raise ValueError("one process has one tunnel")
        return parts._replace(netloc=f"127.0.0.1:{tunnel.remote}").geturl()

    async def close(self) -> None:
        """Give up a connection that no start took; idempotent."""
        connection, self._held = self._held, None
        if connection is not None:
            await connection.carrier.stop()

    # ---- connecting

    async def _connect(self, address: tuple[str, int] | None) -> _Connection:
        """A logged-in client, with a tunnel to ``address`` where one is asked for; tries other ports when one is taken."""
        attempts = limits.SSH_TUNNEL_ATTEMPTS if address else 1
        while True:
            attempts -= 1
            tunnel = _Tunnel(random.choice(limits.SSH_TUNNEL_PORTS), *address) if address else None
            try:
                return await self._login(tunnel)
            except LaunchError as exc:
                if exc.code != "coding.ssh_tunnel_failed" or not attempts:
                    raise

    async def _login(self, tunnel: _Tunnel | None) -> _Connection:
        options = self._options
        with _Memory() as memory:
            if self._uses_library():
                argv, first, env = self._library(tunnel)
            else:
                argv, first, env = self._openssh(tunnel, memory), b"", {"LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
                if "SSH_AUTH_SOCK" in os.environ and not options.shared_worker:
                    env["SSH_AUTH_SOCK"] = os.environ["SSH_AUTH_SOCK"]
            carrier = await self._here.start(Command(argv, "/", env, _CLIENT_GRACES))
            try:
                async with traceless.within(options.connect_timeout + limits.SSH_LOGIN_MARGIN):
                    greeting = await self._greeting(carrier, first)
            except BaseException as exc:
                await stopped(carrier)
                if isinstance(exc, TimeoutError):
                    raise ssh_errors.error("ssh_timeout", self.machine) from None
                raise
        if greeting:
            return _Connection(carrier, greeting == b"python3", tunnel)
        await stopped(carrier)
        code = (await carrier.wait()).code
        words = carrier.stderr_tail()
        if 0 <= code < 255:
            raise ssh_errors.error("ssh_no_shell", self.machine)
        raise ssh_errors.classify(words, machine=self.machine, secrets=self._own_secrets())

    async def _greeting(self, carrier: AgentProcess, first: bytes) -> bytes:
        """Skip what start-up files print, up to the remote line's greeting; empty when the client ended before it."""
        seen = b"\n"
        try:
            if first:
                await carrier.write(first)
            while (match := _GREETING.search(seen)) is None:
                data = await carrier.read()
                if not data or len(seen) > limits.SSH_GREETING_BYTES:
                    return b""
                seen += data
        except AgentDied:
            return b""
        return match[1]

    def _own_secrets(self) -> Sequence[str]:
        return [line for line in self._options.private_key.splitlines() if len(line) >= limits.SECRET_LINE_CHARS]

    def _uses_library(self) -> bool:
        if self._client != "auto":
            return self._client == "library"
        if (self._options.private_key or self._options.known_hosts) and not hasattr(os, "memfd_create"):
            return True
        try:
            pwd.getpwuid(os.getuid())
            runtime_support.find_executable("ssh")
        except (KeyError, LaunchError):
            return True
        return False

    # ---- the two clients

    def _openssh(self, tunnel: _Tunnel | None, memory: _Memory) -> tuple[str, ...]:
        """The OpenSSH client's command line; the first value of an option wins there, so ours come first."""
        options = self._options
        fixed = {
            **ssh_options.OURS,
            "ConnectTimeout": str(max(1, round(options.connect_timeout))),
            "ServerAliveInterval": str(round(limits.SSH_ALIVE_INTERVAL)),
            "ServerAliveCountMax": str(limits.SSH_SERVER_ALIVE_COUNT),
        }
        if options.forbidden:
            del fixed["PermitLocalCommand"]
        if options.user:
            fixed["User"] = options.user
        if options.port:
            fixed["Port"] = str(options.port)
        if options.known_hosts:
            fixed["UserKnownHostsFile"] = memory.path(options.known_hosts)
            fixed["GlobalKnownHostsFile"] = os.devnull
        identity = memory.path(options.private_key) if options.private_key else options.identity_file
        if identity:
            fixed["IdentitiesOnly"] = "yes"
            fixed["IdentityFile"] = '"{}"'.format(identity.replace("%", "%%"))
        argv = ["ssh", "-T", "-a", "-x", *(("-F", "none") if options.shared_worker else ())]
        for name, value in fixed.items():
            argv += ["-o", f"{name}={value}"]
        if tunnel is not None:
            host = f"[{tunnel.host}]" if ":" in tunnel.host else tunnel.host
            argv += ["-R", f"127.0.0.1:{tunnel.remote}:{host}:{tunnel.port}"]
        return (*argv, *options.extra, "--", options.host, REMOTE_LINE)

    def _library(self, tunnel: _Tunnel | None) -> tuple[tuple[str, ...], bytes, dict[str, str]]:
        """The library's command line, the order for its stdin, and its environment."""
        options = self._options
        named = dict(reversed(options.named))
        if unknown := [*options.forbidden, *(name for name in named if name not in _LIBRARY_IGNORES)]:
            raise SettingsError("coding.ssh_option_unsupported", field="ssh-extra-options", option=unknown[0])
        user = options.user or named.get("user", "")
        if not user:
            raise SettingsError("coding.ssh_user_missing", field="ssh-target")
        home = Path(runtime_support.home_directory())
        family = named.get("addressfamily", "inet" if "4" in named else "inet6" if "6" in named else "any")
        order = ssh_library.order(
            {
                "path": [entry for entry in map(os.path.abspath, sys.path) if Path(entry).exists()],
                "command": REMOTE_LINE,
                "tunnel": [tunnel.remote, tunnel.host, tunnel.port] if tunnel else None,
                "host": options.host,
                "port": options.port or int(named.get("port", "22")),
                "user": user,
                "key": options.private_key or self._identity(home, named.get("identityfile", "")),
                "known_hosts": options.known_hosts or _text(home, named.get("userknownhostsfile", "~/.ssh/known_hosts")),
                "host_key_alias": named.get("hostkeyalias", ""),
                "family": {"inet": int(socket.AF_INET), "inet6": int(socket.AF_INET6)}.get(family, 0),
                "timeout": options.connect_timeout,
                "alive": limits.SSH_ALIVE_INTERVAL,
                "alive_count": limits.SSH_SERVER_ALIVE_COUNT,
            }
        )
        argv = (sys.executable, "-I", "-S", str(Path(ssh_library.__file__).resolve()))
        return argv, order, {"HOME": str(home), "LOGNAME": user, "USER": user}

    def _identity(self, home: Path, named: str) -> str:
        """The text of the identity file, of the account's first usual one where none is given, or nothing."""
        if self._options.identity_file or named:
            return _text(home, self._options.identity_file or named)
        usual = (_text(home, f"~/.ssh/{name}") for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
        return next(filter(None, usual), "")


def _check(command: Command, machine: str) -> None:
    """Refuse here what no process can have, so that nothing is connected for it."""
    for name, value in command.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise SettingsError("coding.env_invalid", field="env-json", name=name.replace("\0", "")[:64] or "?")
    if not command.argv or not command.argv[0] or "\0" in command.cwd or any("\0" in word for word in command.argv):
        raise failure("start_failed", command, machine)


def _text(home: Path, path: str) -> str:
    """The content of a file of the account, empty when it cannot be read."""
    try:
        found = home / path[2:] if path.startswith("~/") else Path(path)
        return ssh_options.text_of(found)
    except (OSError, ValueError):
        return ""


class _Memory:
    """Anonymous memory of this process, named to a child of the same account by ``/proc``; gone at the block's end.

    OpenSSH closes inherited descriptors at its start, so ``/dev/fd`` leads nowhere there; it takes a key only from what looks
    like a file that others cannot read.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            os.close(self._held.pop())

    def path(self, text: str) -> str:
        """A path under which ``text`` can be read until the block ends."""
        held = os.memfd_create("ssh", os.MFD_CLOEXEC)
        self._held.append(held)
        os.fchmod(held, 0o600)
        os.write(held, text.encode())
        return f"/proc/{os.getpid()}/fd/{held}"
