"""Every way an SSH connection can fail is one readable error, from both clients; tunnels; machines without python3; a jail.

Everything runs against real OpenSSH servers, and listeners of this test's own where a server would not misbehave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pkg import limits, ssh_errors, ssh_wrapper
from pkg.errors import AgentDied, CodingError, LaunchError, ProcessCleanupUnconfirmed
from pkg.launch import LocalLauncher
from pkg.launch_ssh import SshLauncher, SshTarget
from pkg.process_api import AgentProcess, Command, Exit, Graces
from pkg.ssh_process import RemoteProcess, ShellProcess
from testkit import hostile_trees
from testkit.sshd import Server, program, sshd

pytestmark = pytest.mark.ssh

Client = Literal["openssh", "library"]
SHORT = Graces(eof=0.2, term=0.2, kill=5.0)
BOUND = 30.0
ECHO = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for this file."""
    with sshd(tmp_path_factory.mktemp("sshd")) as running_server:
        yield running_server


@pytest.fixture(params=["openssh", "library"])
def client(request: pytest.FixtureRequest) -> Client:
    """Both ways to speak SSH."""
    value: Client = request.param
    return value


def target(server: Server, client: Client = "openssh") -> SshTarget:
    """The server with the key from the form."""
    key = server.identity_file.read_text()
    return SshTarget(server.target, server.port, private_key=key, known_hosts=server.known_hosts, client=client)


def python(source: str, *, env: dict[str, str] | None = None) -> Command:
    """A command that runs a Python program in the home."""
    return Command((sys.executable, "-I", "-S", "-c", source), "", env or {}, SHORT)


async def refused(place: SshTarget, command: Command | None = None) -> CodingError:
    """The error of a start that must fail readably."""
    async with asyncio.timeout(BOUND):
        with pytest.raises(LaunchError) as caught:
            await SshLauncher(place).start(command or python("print(1)"))
    text = str(caught.value)
    assert not text.startswith("coding.") and "{" not in text and "/proc/" not in text
    return caught.value


async def everything(process: AgentProcess) -> bytes:
    """All of the process's stdout up to its end."""
    parts = []
    async with asyncio.timeout(BOUND):
        while data := await process.read():
            parts.append(data)
    return b"".join(parts)


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port whose connections get ``answer`` and are closed, or that never answers (``None``)."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(8)
        if answer is None:
            yield sock.getsockname()[1]
            return
        serve = "s = socket.socket(fileno=int(sys.argv[1]))\nwhile True: c = s.accept()[0]; c.send(b'%s'); c.close()"
        source = "import socket, sys; " + serve % answer.decode()
        command = [sys.executable, "-I", "-S", "-c", source, str(sock.fileno())]
        process = subprocess.Popen(command, pass_fds=[sock.fileno()])
        try:
            yield sock.getsockname()[1]
        finally:
            process.kill()
            process.wait()


# ------------------------------------------------------------------ connecting


@pytest.mark.asyncio
async def test_a_closed_port_is_a_refused_connection(server: Server, client: Client) -> None:
    """Our rule: the text says to check the port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        error = await refused(replace(target(server, client), port=sock.getsockname()[1]))
    assert error.code == "coding.ssh_refused" and error.retryable


@pytest.mark.asyncio
async def test_a_name_nobody_knows_is_said(server: Server, client: Client) -> None:
    """Our rule: the text says to check the target."""
    error = await refused(replace(target(server, client), target="user@no-such-host.invalid"))
    assert error.code == "coding.ssh_name_unknown"


@pytest.mark.asyncio
async def test_a_port_that_never_answers_is_a_timeout(server: Server, client: Client) -> None:
    """Our rule: the connect timeout covers the server's first words."""
    with listener(None) as port:
        error = await refused(replace(target(server, client), port=port, connect_timeout=1))
    assert error.code == "coding.ssh_timeout"


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request\\r\\n\\r\\n", b"SSH-2.0-x\\r\\n"])
async def test_a_server_that_closes_at_once_is_said(server: Server, client: Client, answer: bytes) -> None:
    """Our rule: no traceback and no protocol talk, one readable text."""
    with listener(answer) as port:
        error = await refused(replace(target(server, client), port=port, connect_timeout=3))
    assert error.code in ("coding.ssh_closed", "coding.ssh_failed")


@pytest.mark.asyncio
async def test_an_unknown_host_key_is_not_trusted(server: Server, client: Client) -> None:
    """Our rule: a host nobody vouched for is never connected to, and never added by itself."""
    other = server.known_hosts.replace(f"[{server.host}]:{server.port}", "elsewhere")
    error = await refused(replace(target(server, client), known_hosts=other))
    assert error.code == "coding.ssh_host_key_unknown"


@pytest.mark.asyncio
async def test_a_changed_host_key_is_an_alarm(server: Server, client: Client) -> None:
    """Our rule: another key than the known one is told apart from an unknown host."""
    error = await refused(replace(target(server, client), known_hosts=server.wrong_known_hosts))
    assert error.code == "coding.ssh_host_key_changed"


@pytest.mark.asyncio
async def test_a_key_that_is_not_accepted_is_said_and_no_password_is_asked(server: Server, client: Client) -> None:
    """Our rule: keys only; the text says where the public key goes."""
    error = await refused(replace(target(server, client), private_key=server.other_identity_file.read_text()))
    assert error.code == "coding.ssh_permission_denied"


@pytest.mark.asyncio
async def test_a_key_with_a_passphrase_is_said_and_no_passphrase_is_asked(
    server: Server, client: Client, tmp_path: Path
) -> None:
    """Our rule: nobody is there to type one."""
    path = tmp_path / "key"
    argv = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "canary-phrase", "-f", str(path)]
    await asyncio.to_thread(subprocess.run, argv, check=True, timeout=30)
    error = await refused(replace(target(server, client), private_key=path.read_text()))
    assert error.code in ("coding.ssh_key_unusable", "coding.ssh_permission_denied")


@pytest.mark.asyncio
async def test_a_key_file_others_can_read_is_said(server: Server, tmp_path: Path) -> None:
    """OpenSSH's rule, our words: a key others can read is not used."""
    path = tmp_path / "key"
    shutil.copy(server.identity_file, path)
    path.chmod(0o644)
    error = await refused(replace(target(server), private_key="", identity_file=str(path)))
    assert error.code == "coding.ssh_key_unusable"


@pytest.mark.asyncio
async def test_no_common_encryption_is_said(server: Server) -> None:
    """Our rule: an old machine is told apart from a broken one."""
    with_old = replace(target(server), extra_options="-c aes128-cbc")
    assert (await refused(with_old)).code == "coding.ssh_algorithms"


@pytest.mark.asyncio
async def test_an_account_without_a_shell_is_said(tmp_path: Path, client: Client) -> None:
    """Our rule: a forced command or nologin is told apart from a refused login."""
    with sshd(tmp_path / "sshd", extra="ForceCommand echo not here; exit 3") as forced:
        assert (await refused(target(forced, client))).code == "coding.ssh_no_shell"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("workspace", "code"),
    [
        ("nowhere", "coding.ssh_workspace_missing"),
        ("/", "coding.ssh_workspace_is_root"),
        ("/proc/..", "coding.ssh_workspace_is_root"),
        ("{directory}/user_key", "coding.ssh_workspace_not_directory"),
        ("read-only", "coding.ssh_workspace_not_writable"),
    ],
)
async def test_a_workspace_that_cannot_be_used_is_said(server: Server, workspace: str, code: str) -> None:
    """Our rule: the remote workspace is checked before anything is started."""
    (server.home / "read-only").mkdir(mode=0o555, exist_ok=True)
    command = Command(("true",), workspace.format(directory=server.directory), {}, SHORT)
    assert (await refused(target(server), command)).code == code


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (Command((), ""), "coding.ssh_start_failed"),
        (Command(("",), ""), "coding.ssh_start_failed"),
        (Command(("a\0b",), ""), "coding.ssh_start_failed"),
        (Command(("true",), "a\0b"), "coding.ssh_start_failed"),
        (Command(("true",), "", {"A=B": "x"}), "coding.env_invalid"),
        (Command(("true",), "", {"A": "x\0"}), "coding.env_invalid"),
    ],
)
async def test_what_no_process_can_have_is_refused_before_connecting(server: Server, command: Command, code: str) -> None:
    """Our rule: one readable error, and no connection for it."""
    before = server.log
    with pytest.raises(CodingError) as caught:
        await SshLauncher(target(server)).start(command)
    assert caught.value.code == code and server.log == before


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [("ecdsa",), ("rsa", "-b", "2048", "-m", "PEM"), ("ecdsa", "-m", "PKCS8")])
async def test_keys_and_host_keys_of_every_usual_kind_work(tmp_path: Path, client: Client, kind: tuple[str, ...]) -> None:
    """Our promise: a key pasted on one line, and a host known by one of its several keys or under a hashed name."""
    directory = tmp_path / "sshd"
    directory.mkdir()
    for name in ("user_key", "second_host_key"):
        argv = [program("ssh-keygen"), "-q", "-t", *kind, "-N", "", "-f", str(directory / name)]
        await asyncio.to_thread(subprocess.run, argv, check=True, timeout=30)
    with sshd(directory, extra=f"HostKey {directory / 'second_host_key'}") as other:
        public = " ".join((directory / "second_host_key.pub").read_text().split()[:2])
        hosts = directory / "hosts"
        hosts.write_text(f"[{other.host}]:{other.port} {public}\n")
        argv = [program("ssh-keygen"), "-q", "-H", "-f", str(hosts)]
        await asyncio.to_thread(subprocess.run, argv, check=True, timeout=30, capture_output=True)
        key = other.identity_file.read_text().replace("\n", " ")
        place = replace(target(other, client), private_key=key, known_hosts=hosts.read_text())
        process = await SshLauncher(place).start(python("print(1)"))
        assert await everything(process) == b"1\n"
        await process.stop()


@pytest.mark.asyncio
async def test_a_command_that_is_no_program_is_said(server: Server) -> None:
    """Our rule: found but not runnable is told apart from not found."""
    broken = server.home / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert (await refused(target(server), Command(("./broken",), "", {}, SHORT))).code == "coding.ssh_start_failed"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ssh: connect to host h port 22: No route to host", "ssh_no_route"),
        ("ssh: connect to host h port 22: Network is unreachable", "ssh_no_route"),
        ("ssh: connect to host h port 22: Connection timed out", "ssh_timeout"),
        ("Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out", "ssh_timeout"),
        ("Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures", "ssh_permission_denied"),
        ("u@h: Permission denied (publickey,password).", "ssh_permission_denied"),
        ("bash: /x: Permission denied", "ssh_failed"),
        ("Error: remote port forwarding failed for listen port 20000", "ssh_tunnel_failed"),
        ("command-line: line 0: Bad configuration option: foo", "ssh_option_refused"),
        ("Bad owner or permissions on /root/.ssh/config", "ssh_key_unusable"),
        ("No user exists for uid 54321", "ssh_client_missing"),
        ("kex_exchange_identification: read: Connection reset by peer", "ssh_closed"),
        (f"noise\n{ssh_errors.MARK}ssh_refused", "ssh_refused"),
        (f"{ssh_errors.MARK}made_up", "ssh_failed"),
        ("", "ssh_failed"),
    ],
)
def test_a_clients_words_have_one_meaning(words: str, code: str) -> None:
    """OpenSSH 9.2's words in the C locale, and our child program's."""
    assert ssh_errors.classify(words, machine="u@h:22").code == f"coding.{code}"


# ------------------------------------------------------------------ tunnels


@contextlib.asynccontextmanager
async def greeter() -> AsyncIterator[int]:
    """A server here that greets whoever connects."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"greetings")
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def visitor(url: str) -> Command:
    """A command that connects to a URL's port and prints what it gets."""
    port = url.split(":")[2].split("/")[0]
    return python(f"import socket; s = socket.create_connection(('127.0.0.1', {port})); print(s.makefile().read())")


@pytest.mark.asyncio
async def test_a_loopback_address_is_reached_from_the_remote_machine(server: Server, client: Client) -> None:
    """Our promise: the run's MCP server is reached through a port of its own, as long as the process lives."""
    launcher = SshLauncher(target(server, client))
    async with greeter() as port:
        url = await launcher.reach(f"http://127.0.0.1:{port}/mcp?x=1")
        assert url.endswith("/mcp?x=1") and f":{port}/" not in url
        assert await launcher.reach(f"http://localhost:{port}/mcp?x=1") == url
        with pytest.raises(ValueError, match="one tunnel"):
            await launcher.reach("http://127.0.0.1:1/")
        process = await launcher.start(visitor(url))
        assert await everything(process) == b"greetings\n"
        await process.stop()
        with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("127.0.0.1", int(url.split(":")[2].split("/")[0])))


@pytest.mark.asyncio
async def test_another_machines_address_stays_as_it_is(server: Server) -> None:
    """Our rule: only loopback addresses need a tunnel."""
    assert await SshLauncher(target(server)).reach("https://example.com/mcp") == "https://example.com/mcp"


@pytest.mark.asyncio
async def test_a_taken_port_is_never_trusted_but_another_one_tried(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: whoever listens on a remote port before us never gets the bearer."""
    with socket.socket() as squatter, socket.socket() as other:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen(1)
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        monkeypatch.setattr(limits, "SSH_TUNNEL_PORTS", [squatter.getsockname()[1]])
        launcher = SshLauncher(target(server, client))
        with pytest.raises(LaunchError) as caught:
            await launcher.reach("http://127.0.0.1:9/")
        assert caught.value.code == "coding.ssh_tunnel_failed"
        ports = iter([squatter.getsockname()[1], free])
        monkeypatch.setattr("pkg.launch_ssh.random.choice", lambda _: next(ports))
        assert await launcher.reach("http://127.0.0.1:9/") == f"http://127.0.0.1:{free}/"
        await launcher.close()
        await launcher.close()


@pytest.mark.asyncio
async def test_a_server_that_forbids_tunnels_is_said(tmp_path: Path, client: Client) -> None:
    """Our rule: no agent is started that would miss its tools."""
    with sshd(tmp_path / "sshd", extra="AllowTcpForwarding no") as strict:
        with pytest.raises(LaunchError) as caught:
            await SshLauncher(target(strict, client)).reach("http://127.0.0.1:9/")
        assert caught.value.code == "coding.ssh_tunnel_failed"


@pytest.mark.asyncio
async def test_a_held_connection_that_died_meanwhile_is_a_clean_error(server: Server, client: Client) -> None:
    """Our rule: nothing was ordered yet, so nothing can be left."""
    launcher = SshLauncher(target(server, client))
    await launcher.reach("http://127.0.0.1:9/")
    assert launcher._held is not None
    os.kill(launcher._held.carrier.pid, 9)
    await launcher._held.carrier.wait()
    with pytest.raises(LaunchError) as caught:
        await launcher.start(python("print(1)"))
    assert caught.value.code == "coding.ssh_closed"


# ------------------------------------------------------------------ machines without python3


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose every command line has its python3 replaced by a name nobody has, so the shell must do."""
    directory = tmp_path_factory.mktemp("bare")
    force = directory / "force"
    force.write_text('exec /bin/sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed s/python3/absent-python/g)"\n')
    with sshd(directory, extra=f"ForceCommand exec /bin/sh {force}") as running_server:
        yield running_server


@contextlib.asynccontextmanager
async def unproven(place: SshTarget, command: Command) -> AsyncIterator[ShellProcess]:
    """A process under the shell; its end is never called proven."""
    process = await SshLauncher(place).start(command)
    assert isinstance(process, ShellProcess)
    try:
        yield process
    finally:
        async with asyncio.timeout(BOUND):
            with pytest.raises(ProcessCleanupUnconfirmed):
                await process.stop()
            with pytest.raises(ProcessCleanupUnconfirmed):
                await process.stop()


@pytest.mark.asyncio
async def test_without_python_the_shell_runs_the_command_and_its_end_is_unconfirmed(bare: Server, client: Client) -> None:
    """Our rule: it works, secrets stay off every command line, and the cleanup is never reported as clean."""
    tool = bare.home / "bin/tool"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text('#!/bin/sh\nread x; echo "$x $1 $(pwd) $TOKEN"; echo "$TOKEN oops" >&2; exit 7\n')
    tool.chmod(0o755)
    command = Command(("tool", "a 'b'"), "~", {"TOKEN": "canary'quoted canary"}, SHORT)
    async with unproven(target(bare, client), command) as process:
        assert process.pid > 0 and process.directory == str(bare.home)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                assert not entry.name.isdigit() or b"canary" not in (entry / "cmdline").read_bytes()
        await process.write(b"hello\n")
        assert await everything(process) == f"hello a 'b' {bare.home} canary'quoted canary\n".encode()
        async with asyncio.timeout(BOUND):
            assert await process.wait() == Exit(7)
        assert "*** oops" in process.stderr_tail() and "canary" not in process.stderr_tail()


@pytest.mark.asyncio
async def test_without_python_big_streams_pass_both_ways(bare: Server, client: Client) -> None:
    """Our promise: a line of 8 MiB, any byte; here the end of stdin starts the grace in which the command must finish."""
    data = os.urandom(1 << 16) * 128 + b"\n"
    patient = Graces(eof=BOUND, term=0.2, kill=5.0)
    async with unproven(target(bare, client), Command(("cat",), "", {}, patient)) as process:
        reading = asyncio.create_task(everything(process))
        await process.write(data)
        process.close_stdin()
        assert await reading == data


@pytest.mark.asyncio
async def test_without_python_stopping_ends_the_process_group(bare: Server, client: Client, tmp_path: Path) -> None:
    """Our rule: the shell does what it can: end of stdin, SIGTERM, SIGKILL to the whole group."""
    command = Command(hostile_trees.command("term_ignorer", tmp_path), "", {}, SHORT)
    async with unproven(target(bare, client), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["term_ignorer"])
        assert process.pid not in tree
    assert hostile_trees.gone(tree, BOUND)


@pytest.mark.asyncio
async def test_without_python_a_dead_connection_ends_the_process_group(bare: Server, client: Client, tmp_path: Path) -> None:
    """Our rule: the shell sees its stdin end and ends the group by itself."""
    command = Command(hostile_trees.command("term_ignorer", tmp_path), "", {}, SHORT)
    async with unproven(target(bare, client), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["term_ignorer"])
        os.kill(process._carrier.pid, 9)
        assert await asyncio.to_thread(hostile_trees.gone, tree, BOUND)
        with pytest.raises(AgentDied) as caught:
            await process.wait()
        assert caught.value.code == "coding.ssh_connection_lost"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("argv", "workspace", "code"),
    [
        ("no-such-agent", "", "coding.ssh_command_missing"),
        ("cat", "nowhere", "coding.ssh_workspace_missing"),
        ("cat", "/", "coding.ssh_workspace_is_root"),
        ("cat", "/etc/hostname", "coding.ssh_workspace_not_directory"),
    ],
)
async def test_without_python_bad_places_are_said_all_the_same(bare: Server, argv: str, workspace: str, code: str) -> None:
    """Our rule: one readable error for one mistake, whatever the remote machine has."""
    assert (await refused(target(bare), Command((argv,), workspace, {}, SHORT))).code == code


# ------------------------------------------------------------------ where OpenSSH cannot run

JAILED = """
import asyncio, json, os, pwd, sys
values = json.loads(sys.stdin.read())
sys.path[:0] = values["path"]
try:
    pwd.getpwuid(os.getuid())
    sys.exit("there is a passwd entry")
except KeyError:
    pass
from pkg.errors import LaunchError
from pkg.launch_ssh import SshLauncher, SshTarget
from pkg.process_api import Command
async def main():
    try:
        await SshLauncher(SshTarget(**values["target"], client="openssh")).start(Command(("pwd",), ""))
    except LaunchError as exc:
        print(exc.code)
    process = await SshLauncher(SshTarget(**values["target"])).start(Command(("pwd",), ""))
    print((await process.read()).decode().strip())
    await process.stop()
asyncio.run(main())
"""


def test_without_a_passwd_entry_the_library_connects(server: Server, package_root: Path, tmp_path: Path) -> None:
    """Our promise: in a jail, where OpenSSH says "No user exists for uid", the child program with LOGNAME and HOME does it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed: no way to run without a passwd entry")
    (tmp_path / "passwd").touch()
    (tmp_path / "nsswitch").write_text("passwd: files\nhosts: files\n")
    mounts = "mount --bind passwd /etc/passwd && mount --bind nsswitch /etc/nsswitch.conf"
    key = server.identity_file.read_text()
    place = {"target": server.target, "port": server.port, "private_key": key, "known_hosts": server.known_hosts}
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    shell = ["sh", "-c", f'{mounts} && exec "$0" -c "$1"', sys.executable, JAILED]
    done = subprocess.run(
        [unshare, "--mount", *root, *shell],
        cwd=tmp_path,
        input=json.dumps({"path": [str(package_root)], "target": place}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"HOME": str(tmp_path), "LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared"},
    )
    assert done.stdout.split() == ["coding.ssh_client_missing", str(server.home)], done.stderr
    assert done.returncode == 0


# ------------------------------------------------------------------ a remote side that lies

LIAR = """
import json, os, sys
def frame(channel, payload):
    data = bytes([channel]) + len(payload).to_bytes(4, "big") + payload
    while data: data = data[os.write(1, data):]
def tell(text): frame(CONTROL, text.encode())
tell('{"t": "started", "pid": 4, "method": "subreaper", "cwd": "/"}')
"""


@contextlib.asynccontextmanager
async def lied_to(what: str) -> AsyncIterator[tuple[RemoteProcess, AgentProcess]]:
    """The near half, with a local process (local protocol fixture) in the place of the SSH client."""
    source = LIAR.replace("CONTROL", str(ssh_wrapper.CONTROL)) + what
    carrier = await LocalLauncher().start(Command((sys.executable, "-I", "-S", "-c", source), "/", {}, SHORT))
    process = RemoteProcess(
        carrier, Command(("x",), "/", {}, SHORT), machine="m", secrets=(), alive_interval=10.0, alive_timeout=60.0
    )
    try:
        await process.begin(b"", {})
        yield process, carrier
    finally:
        async with asyncio.timeout(BOUND):
            with pytest.raises(ProcessCleanupUnconfirmed):
                await process.stop()


@pytest.mark.asyncio
async def test_a_remote_side_that_ignores_the_window_is_given_up() -> None:
    """Our rule: output nobody takes is bounded on this side, too; the machine that sends more is not talked to any more."""
    flood = f"while True: frame({ssh_wrapper.STDOUT}, b'x' * {limits.SSH_FRAME_BYTES})"
    async with lied_to(flood) as (process, _), asyncio.timeout(BOUND):
        with pytest.raises(AgentDied) as caught:
            await process.wait()
        assert caught.value.code == "coding.ssh_connection_lost"
        assert sum(map(len, process._stdout)) <= limits.SSH_WINDOW_BYTES


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "told",
    [
        '{"t": "took", "bytes": Infinity}',
        '{"t": "took", "bytes": ' + "9" * 5000 + "}",
        '{"t": "exited", "code": 1e999}',
        '{"t": "exited", "code": null}',
        '{"t": "unconfirmed", "pids": [[]]}',
        '{"t": "eof"}',
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[]",
        "\\u0000",
    ],
    ids=lambda told: told[:30],
)
async def test_a_remote_side_that_talks_nonsense_is_given_up(told: str) -> None:
    """Our rule: what is not the protocol ends the connection as a lost one, never as an exception of ours."""
    async with lied_to(f"tell({told!r})\nos.read(0, 1)\nimport time; time.sleep(600)") as (process, _), asyncio.timeout(BOUND):
        with pytest.raises(AgentDied) as caught:
            await process.wait()
        assert caught.value.code == "coding.ssh_connection_lost"
