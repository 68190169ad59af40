"""A real OpenSSH server on a loopback port, run as the current user, with throwaway host and user keys.

:func:`sshd` starts one, gives a :class:`Server`, and ends it (and every session of it) by process id. Everything it
writes lies in the directory it is given. It needs ``sshd`` and ``ssh-keygen``; without them :class:`MissingProgram` says which
package brings them, and a suite that needs a server fails: it does not skip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 20.0
_PACKAGES = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "ssh": "openssh-client"}


class MissingProgram(RuntimeError):
    """A program these tests run is not installed; the message says which package has it."""


def program(name: str) -> str:
    """The absolute path of an OpenSSH program. Raises :class:`MissingProgram`."""
    found = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin:/sbin:/opt/homebrew/sbin")
    if found is None:
        raise MissingProgram(
            f"{name} is not installed; install the package {_PACKAGES[name]} (apt-get install {_PACKAGES[name]})"
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A running server: where it listens and what a client needs to be let in."""

    host: str
    port: int
    user: str
    pid: int
    directory: Path

    @property
    def target(self) -> str:
        """``user@host``."""
        return f"{self.user}@{self.host}"

    @property
    def home(self) -> Path:
        """The account's home on the server's side."""
        return self.directory / "home"

    @property
    def identity_file(self) -> Path:
        """The private key that is accepted."""
        return self.directory / "user_key"

    @property
    def other_identity_file(self) -> Path:
        """A private key that is not accepted."""
        return self.directory / "other_key"

    @property
    def known_hosts(self) -> str:
        """The server's own line of a ``known_hosts`` file."""
        return self._line(self.directory / "host_key.pub")

    @property
    def wrong_known_hosts(self) -> str:
        """A line that names another key for this server, as after the server was replaced."""
        return self._line(self.directory / "other_key.pub")

    def _line(self, public: Path) -> str:
        kind, key = public.read_text().split()[:2]
        return f"[{self.host}]:{self.port} {kind} {key}\n"

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        return (self.directory / "log").read_text(errors="replace")


def _keygen(path: Path) -> None:
    subprocess.run(
        [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "throwaway", "-f", str(path)], check=True, timeout=30
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _speaks(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as probe:
        probe.settimeout(2)
        return probe.recv(4) == b"SSH-"
    return False


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True, timeout=30).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [child for child, parent in pairs if parent == pid]


@contextlib.contextmanager
def sshd(directory: Path, *, extra: str = "") -> Iterator[Server]:
    """Run a server whose keys, configuration and log lie in ``directory``; ``extra`` are further lines of ``sshd_config``.

    The account's home there is ``directory/home``, so that nobody's own start-up files take part.
    """
    server_program = program("sshd")
    (directory / "home").mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("host_key", "user_key", "other_key"):
        if not (directory / name).exists():
            _keygen(directory / name)
    if os.geteuid() == 0 and sys.platform == "linux":
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    port = _free_port()
    config = directory / "sshd_config"
    config.write_text(
        f"""Port {port}
ListenAddress 127.0.0.1
HostKey {directory / "host_key"}
AuthorizedKeysFile {directory / "user_key.pub"}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitUserEnvironment no
SetEnv HOME={directory / "home"}
MaxStartups 200
MaxSessions 200
LogLevel VERBOSE
{extra}
"""
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [server_program, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Server("127.0.0.1", port, pwd.getpwuid(os.geteuid()).pw_name, process.pid, directory)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _speaks(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd did not start:\n{server.log}")
            time.sleep(0.02)
        yield server
    finally:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
