"""Agents over a real OpenSSH server: streams, environment, and the end of the remote tree however the connection ends.

Everything runs with both clients, OpenSSH's and the library's child program. The hostile trees are a local fixture.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from agent.driver import AcpDriver
from pkg import limits
from pkg.agent_api import McpServer, SessionSpec
from pkg.errors import AgentDied, LaunchError, ProcessCleanupUnconfirmed
from pkg.launch_ssh import SshLauncher, SshTarget
from pkg.process_api import Command, Exit, Graces
from pkg.ssh_process import RemoteProcess
from testkit import acp_harness, hostile_trees
from testkit.sshd import Server, sshd

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


def python(source: str, *, cwd: str = "", env: dict[str, str] | None = None, graces: Graces = SHORT) -> Command:
    """A command that runs a Python program."""
    return Command((sys.executable, "-I", "-S", "-c", source), cwd, env or {}, graces)


@contextlib.asynccontextmanager
async def running(launcher: SshLauncher, command: Command) -> AsyncIterator[RemoteProcess]:
    """A remote process that is stopped, proven, when the block is left."""
    process = await launcher.start(command)
    assert isinstance(process, RemoteProcess)
    try:
        yield process
    finally:
        async with asyncio.timeout(BOUND):
            await process.stop()


@contextlib.asynccontextmanager
async def lost(launcher: SshLauncher, command: Command) -> AsyncIterator[RemoteProcess]:
    """A remote process whose end nobody confirms; the block breaks the connection."""
    process = await launcher.start(command)
    assert isinstance(process, RemoteProcess)
    try:
        yield process
    finally:
        async with asyncio.timeout(BOUND):
            with pytest.raises(ProcessCleanupUnconfirmed):
                await process.stop()


async def everything(process: RemoteProcess) -> bytes:
    """All of the process's stdout up to its end."""
    parts = []
    async with asyncio.timeout(BOUND):
        while data := await process.read():
            parts.append(data)
    return b"".join(parts)


async def line(process: RemoteProcess) -> bytes:
    """One line of stdout."""
    data = b""
    async with asyncio.timeout(BOUND):
        while not data.endswith(b"\n"):
            piece = await process.read(1)
            assert piece, "stdout ended"
            data += piece
    return data


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nobody reports."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def holders(value: str, what: str) -> set[int]:
    """Every process of this machine with ``value`` in its ``cmdline`` or ``environ``."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if value.encode() in (entry / what).read_bytes():
                    found.add(int(entry.name))
    return found


def open_files() -> list[str]:
    """What this process's descriptors lead to."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return found


# ------------------------------------------------------------------ streams


@pytest.mark.asyncio
async def test_a_line_of_8_mib_goes_there_and_comes_back_unchanged(server: Server, client: Client) -> None:
    """Our promise: whole files in one line, any byte, both ways at once."""
    data = os.urandom(1 << 16) * 128 + b"\n"
    async with running(SshLauncher(target(server, client)), python(ECHO)) as process:
        reading = asyncio.create_task(everything(process))
        async with asyncio.timeout(BOUND):
            await process.write(data)
        process.close_stdin()
        assert await reading == data
        assert await process.wait() == Exit(0)


@pytest.mark.asyncio
async def test_a_key_file_in_the_environment_is_hidden_line_by_line(server: Server, client: Client) -> None:
    """Our rule: what a program says of a secret with several lines is hidden as it is beside the worker."""
    key = "-----BEGIN KEY-----\nabcdefghijklmnopqrstuvwxyz0123\n-----END KEY-----"
    source = "import os, sys; sys.stderr.write('bad line ' + os.environ['PEM'].splitlines()[1] + ' http://a:bcd@h/\\n')"
    async with running(SshLauncher(target(server, client)), python(source, env={"PEM": key})) as process:
        async with asyncio.timeout(BOUND):
            await process.wait()
    assert process.stderr_tail() == "bad line *** http://***@h/\n"


@pytest.mark.asyncio
async def test_exit_codes_and_stderr_are_the_commands_own(server: Server, client: Client) -> None:
    """Our promise: a code, a signal, and the last words, without escapes and without the environment's secrets."""
    source = "import os,sys; os.write(2, b'\\x1b[31mbad\\x1b[0m ' + os.environb[b'TOKEN'] + b'\\n'); sys.exit(7)"
    async with running(SshLauncher(target(server, client)), python(source, env={"TOKEN": "canary-in-stderr"})) as process:
        assert await process.wait() == Exit(7)
        assert await everything(process) == b""
    assert process.stderr_tail() == "bad ***\n"
    async with running(SshLauncher(target(server, client)), python("import os; os.kill(os.getpid(), 15)")) as process:
        assert await process.wait() == Exit(-15)
        with pytest.raises(AgentDied) as caught:
            await process.write(b"too late")
    assert caught.value.code == "coding.agent_killed"


@pytest.mark.asyncio
async def test_a_flood_of_stderr_holds_nothing_back_and_keeps_a_bounded_tail(server: Server, client: Client) -> None:
    """Our rule: stderr is always drained, and only its last lines are kept."""
    source = "import sys; sys.stderr.write(('x' * 99 + '\\n') * 100_000 + 'last words\\n'); sys.stderr.flush(); print('done')"
    async with running(SshLauncher(target(server, client)), python(source)) as process:
        assert await everything(process) == b"done\n"
        await process.wait()
    assert process.stderr_tail().endswith("\nlast words\n")
    assert len(process.stderr_tail()) <= limits.STDERR_TAIL_BYTES


@pytest.mark.asyncio
async def test_the_end_of_stdin_reaches_the_agent_which_may_go_on_working(server: Server, client: Client) -> None:
    """Our rule: closing stdin is not ending the agent."""
    source = "import sys,time; data = sys.stdin.read(); print('got', data, flush=True)"
    async with running(SshLauncher(target(server, client)), python(source)) as process:
        await process.write(b"all")
        process.close_stdin()
        process.close_stdin()
        assert await everything(process) == b"got all\n"
        assert await process.wait() == Exit(0)


@pytest.mark.asyncio
async def test_an_agent_whose_output_nobody_reads_is_held_back_and_can_still_be_stopped(server: Server, client: Client) -> None:
    """Our rule: a stalled stream never holds back the control channel, and at most a window of it is under way."""
    source = "import os\nn = 0\nwhile True:\n    n += os.write(1, b'x' * 65536)\n    os.write(2, b'%d\\n' % n)"
    async with running(SshLauncher(target(server, client)), python(source)) as process:

        def written() -> int:
            return int(process.stderr_tail().strip().split("\n")[-1] or 0)

        await until(lambda: written() >= limits.SSH_WINDOW_BYTES)
        assert process._credit == limits.SSH_WINDOW_BYTES
    assert limits.SSH_WINDOW_BYTES <= written() <= limits.SSH_WINDOW_BYTES + 4 * 65536


@pytest.mark.asyncio
async def test_an_agent_that_reads_nothing_holds_the_writer_back_and_can_be_stopped(server: Server, client: Client) -> None:
    """Our rule: a write waits for the agent, and ending the agent ends the wait with a readable error."""
    async with running(SshLauncher(target(server, client)), python("import time; time.sleep(600)")) as process:
        writing = asyncio.create_task(process.write(b"x" * (4 * limits.SSH_WINDOW_BYTES)))
        await until(lambda: process._credit <= 0)
        assert not writing.done()
    with pytest.raises(AgentDied):
        await writing


@pytest.mark.asyncio
async def test_a_write_cancelled_in_the_middle_leaves_its_message_whole(server: Server) -> None:
    """Our rule: the rest of a begun message goes out before the next one."""
    slow = "import os,sys,time\nos.read(0,1)\nos.write(1,b'go\\n')\nwhile not os.path.exists('go'): time.sleep(.01)\n" + ECHO
    go = server.home / "go"
    go.unlink(missing_ok=True)
    async with running(SshLauncher(target(server)), python(slow)) as process:
        await process.write(b"!")
        assert await line(process) == b"go\n"
        writing = asyncio.create_task(process.write(b"a" * (2 * limits.SSH_WINDOW_BYTES) + b"\n"))
        await until(lambda: process._credit <= 0)
        writing.cancel()
        await asyncio.wait([writing])
        go.touch()
        reading = asyncio.create_task(everything(process))
        await process.write(b"next\n")
        process.close_stdin()
        assert await reading == b"a" * (2 * limits.SSH_WINDOW_BYTES) + b"\nnext\n"


# ------------------------------------------------------------------ the place


@pytest.mark.asyncio
async def test_the_agent_gets_the_accounts_environment_and_ours_over_it(server: Server, client: Client) -> None:
    """Our rule: home, a PATH with the conventional directories, ours laid over; nothing of the worker or the wrapper."""
    bin_directory = server.home / ".local/bin"
    bin_directory.mkdir(parents=True, exist_ok=True)
    source = "import json,os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    command = python(source, env={"MINE": "a'b\"c\n\u4f60", "TZ": "X"})
    async with running(SshLauncher(target(server, client)), command) as process:
        env, cwd = json.loads(await everything(process))
    assert cwd == str(server.home) == process.directory
    assert env["MINE"] == "a'b\"c\n\u4f60" and env["TZ"] == "X" and env["HOME"] == str(server.home)
    assert str(bin_directory) in env["PATH"].split(":")
    assert env["TERM"] == "dumb" and env["NPM_CONFIG_LOGLEVEL"] == "error"
    assert not {"SSH_ORIGINAL_COMMAND", "PYTEST_CURRENT_TEST", "VIRTUAL_ENV"} & set(env)


@pytest.mark.asyncio
@pytest.mark.parametrize("workspace", ["~/work", "work", "{home}/work"])
async def test_a_command_is_found_and_run_in_its_place(server: Server, workspace: str) -> None:
    """Our rule: names are looked up on the remote machine, ``~`` is its home, relative workspaces start there."""
    work = server.home / "work"
    work.mkdir(exist_ok=True)
    tool = server.home / ".local/bin/the-agent"
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text('#!/bin/sh\necho "$1 in $(pwd)"\n')
    tool.chmod(0o755)
    for name in ("the-agent", "~/.local/bin/the-agent", "../.local/bin/the-agent"):
        command = Command((name, "a b"), workspace.format(home=server.home), {}, SHORT)
        async with running(SshLauncher(target(server)), command) as process:
            assert await everything(process) == f"a b in {work}\n".encode()


@pytest.mark.asyncio
async def test_what_start_up_files_print_is_skipped(tmp_path: Path, client: Client) -> None:
    """Our rule: a chatty .bashrc (Debian's bash reads it for commands too) breaks nothing."""
    with sshd(tmp_path / "sshd") as noisy:
        for name in (".bashrc", ".profile", ".zshenv", ".cshrc"):
            (noisy.home / name).write_text("echo hello; echo coding-ssh-1 python3 not; echo words 1>&2\n")
        async with running(SshLauncher(target(noisy, client)), python(ECHO)) as process:
            await process.write(b"ping\n")
            assert await line(process) == b"ping\n"


@pytest.mark.asyncio
async def test_secrets_are_on_no_command_line_and_in_no_other_environment(server: Server, client: Client) -> None:
    """Our rule: both machines' process tables show neither the environment's secrets nor the key; its memory is given back."""
    canary = f"canary{uuid.uuid4().hex}"
    key_line = server.identity_file.read_text().splitlines()[2]
    before = len(open_files())
    async with running(SshLauncher(target(server, client)), python(ECHO, env={"TOKEN": canary})) as process:
        await process.write(b"up\n")
        await line(process)
        assert holders(canary, "cmdline") == set()
        assert holders(canary, "environ") == {process.pid}
        assert holders(key_line, "cmdline") | holders(key_line, "environ") == set()
        assert not [name for name in open_files() if "memfd" in name]
        assert canary not in repr(process) + server.log
    assert len(open_files()) == before


@pytest.mark.asyncio
async def test_an_identity_file_and_a_known_hosts_file_do_as_well(server: Server, client: Client, tmp_path: Path) -> None:
    """Our promise: the established fields work as before."""
    hosts = tmp_path / "hosts"
    hosts.write_text(server.known_hosts)
    place = SshTarget(
        server.target, server.port, identity_file=str(server.identity_file), known_hosts=str(hosts), client=client
    )
    async with running(SshLauncher(place), python("print(1)")) as process:
        assert await everything(process) == b"1\n"


@pytest.mark.asyncio
async def test_a_proxy_command_works_with_the_switch(server: Server, tmp_path: Path) -> None:
    """Our rule: what the switch allows is really used."""
    proxy = tmp_path / "proxy.py"
    proxy.write_text(
        "import socket,sys,os,threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "open(sys.argv[0] + '.used', 'w').close()\n"
        "def up():\n    while d := os.read(0, 65536): s.sendall(d)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536): os.write(1, d)\n"
    )
    place = SshTarget(
        server.target,
        server.port,
        private_key=server.identity_file.read_text(),
        known_hosts=server.known_hosts,
        extra_options=f"-o 'ProxyCommand={sys.executable} {proxy} %h %p'",
        allow_local_commands=True,
    )
    async with running(SshLauncher(place), python("print(1)")) as process:
        assert await everything(process) == b"1\n"
    assert Path(f"{proxy}.used").exists()


# ------------------------------------------------------------------ the end


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "setsid", "double_fork", "hopper", "stopped"])
async def test_stopping_ends_the_whole_remote_tree_and_says_so(
    server: Server, client: Client, kind: str, tmp_path: Path
) -> None:
    """Our promise: sessions of their own, ignored SIGTERM and double forks end too, by the remote supervisor's word."""
    command = Command(hostile_trees.command(kind, tmp_path), str(tmp_path), {}, SHORT)
    async with running(SshLauncher(target(server, client)), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS[kind])
        assert process.method == "subreaper"
    assert hostile_trees.living(hostile_trees.announced(tmp_path)) == []
    assert tree


@pytest.mark.asyncio
async def test_a_cancelled_stop_goes_on_and_a_later_one_awaits_it(server: Server, client: Client, tmp_path: Path) -> None:
    """Our rule: the ending does not depend on anybody's patience."""
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {}, SHORT)
    async with running(SshLauncher(target(server, client)), command) as process:
        await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["setsid"])
        for _ in range(3):
            stopping = asyncio.create_task(process.stop())
            await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.wait([stopping])
            assert stopping.cancelled()
    assert hostile_trees.living(hostile_trees.announced(tmp_path)) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", [1, 3, 10, 40, 120])
async def test_a_cancelled_start_leaves_nothing_here_or_there(
    server: Server, client: Client, tmp_path: Path, steps: int
) -> None:
    """Our rule: wherever a start is cancelled, neither client nor agent is left."""
    mark = uuid.uuid4().hex
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {"MARK": mark}, SHORT)
    starting = asyncio.create_task(SshLauncher(target(server, client)).start(command))
    for _ in range(steps):
        await asyncio.wait([starting], timeout=0.005)
    if starting.done():
        await starting.result().stop()
    else:
        starting.cancel()
        async with asyncio.timeout(BOUND):
            await asyncio.wait([starting])
        assert starting.cancelled()
    assert holders(mark, "environ") == set()
    assert hostile_trees.living(hostile_trees.announced(tmp_path)) == []


@pytest.mark.asyncio
async def test_a_killed_client_ends_the_remote_tree_and_nobody_calls_it_proven(
    server: Server, client: Client, tmp_path: Path
) -> None:
    """Our rule: the remote side ends its tree when the connection dies; here that counts as unconfirmed."""
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {}, SHORT)
    async with lost(SshLauncher(target(server, client)), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["setsid"])
        os.kill(process._carrier.pid, signal.SIGKILL)
        assert await asyncio.to_thread(hostile_trees.gone, tree, BOUND)
        async with asyncio.timeout(BOUND):
            with pytest.raises(AgentDied) as caught:
                await process.wait()
        assert caught.value.code == "coding.ssh_connection_lost"
        assert await process.read() == b""
        with pytest.raises(AgentDied):
            await process.write(b"x")


@pytest.mark.asyncio
async def test_a_silent_network_ends_the_remote_tree_by_itself(server: Server, client: Client, tmp_path: Path) -> None:
    """Our rule: without a keepalive for the agreed time the remote side ends its tree; the near side gives up as well."""
    launcher = SshLauncher(target(server, client), alive_interval=0.2, alive_timeout=1.5)
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {}, SHORT)
    async with lost(launcher, command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["setsid"])
        os.kill(process._carrier.pid, signal.SIGSTOP)
        assert await asyncio.to_thread(hostile_trees.gone, tree, BOUND)
        async with asyncio.timeout(BOUND):
            with pytest.raises(AgentDied):
                await process.wait()


@pytest.mark.asyncio
async def test_keepalives_keep_a_silent_agent_alive(server: Server) -> None:
    """Our rule: an agent may be silent for longer than the timeout."""
    launcher = SshLauncher(target(server), alive_interval=0.1, alive_timeout=2.5)
    async with running(launcher, python("import time; time.sleep(6); print('still here')")) as process:
        assert await everything(process) == b"still here\n"


@pytest.mark.asyncio
async def test_a_killed_wrapper_ends_the_remote_tree_and_nobody_calls_it_proven(server: Server, tmp_path: Path) -> None:
    """Our rule: the supervisor outlives the wrapper long enough to end the tree."""
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {}, SHORT)
    async with lost(SshLauncher(target(server)), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["setsid"])
        os.kill(parent(parent(process.pid)), signal.SIGKILL)
        assert await asyncio.to_thread(hostile_trees.gone, tree, BOUND)


@pytest.mark.asyncio
async def test_a_killed_remote_supervisor_is_replaced_by_a_sweep(server: Server, tmp_path: Path) -> None:
    """Our rule: a lost supervisor is noticed, and a second one finds and ends what is left of the tree."""
    command = Command(hostile_trees.command("setsid", tmp_path), str(tmp_path), {}, SHORT)
    async with running(SshLauncher(target(server)), command) as process:
        tree = await asyncio.to_thread(hostile_trees.complete, tmp_path, hostile_trees.KINDS["setsid"])
        os.kill(parent(process.pid), signal.SIGKILL)
        async with asyncio.timeout(BOUND):
            assert (await process.wait()).code == -signal.SIGKILL
    assert hostile_trees.living(tree) == []


def test_a_killed_worker_leaves_nothing_here_or_there(
    server: Server, client: Client, tmp_path: Path, package_root: Path
) -> None:
    """Our promise: SIGKILL of the whole near side ends client and remote tree within the bound."""
    mark = uuid.uuid4().hex
    key = server.identity_file.read_text()
    program = (
        "import asyncio, json, sys\n"
        "values = json.loads(sys.stdin.readline())\n"
        "sys.path[:0] = values['path']\n"
        "from pkg.launch_ssh import SshLauncher, SshTarget\n"
        "from pkg.process_api import Command, Graces\n"
        "async def main():\n"
        "    process = await SshLauncher(SshTarget(**values['target'])).start(\n"
        "        Command(tuple(values['argv']), values['cwd'], {'MARK': values['mark']}, Graces(0.2, 0.2, 5.0)))\n"
        "    print('up', process._carrier.pid, flush=True)\n"
        "    await process.wait()\n"
        "asyncio.run(main())\n"
    )
    values = {
        "path": [str(package_root)],
        "target": {"target": server.target, "port": server.port, "private_key": key, "known_hosts": server.known_hosts},
        "argv": hostile_trees.command("setsid", tmp_path),
        "cwd": str(tmp_path),
        "mark": mark,
    }
    values["target"]["client"] = client  # type: ignore[index]
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    with worker:
        worker.stdin.write(json.dumps(values) + "\n")
        worker.stdin.flush()
        word, pid = worker.stdout.readline().split()
        assert word == "up"
        tree = hostile_trees.complete(tmp_path, hostile_trees.KINDS["setsid"])
        tree[int(pid)] = hostile_trees.start_time(int(pid))
        worker.kill()
    assert hostile_trees.gone(tree, BOUND)
    deadline = time.monotonic() + BOUND
    while holders(mark, "environ"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.asyncio
async def test_many_agents_share_a_machine_and_end_apart(server: Server) -> None:
    """Our rule: every start has a connection and a tree of its own."""
    launcher = SshLauncher(target(server))
    processes = await asyncio.gather(*(launcher.start(python(ECHO)) for _ in range(5)))
    await processes[0].stop()
    for number, process in enumerate(processes[1:]):
        await process.write(b"%d\n" % number)
        assert await process.read() == b"%d\n" % number
    await asyncio.gather(*(process.stop() for process in processes))


@pytest.mark.asyncio
async def test_a_command_that_cannot_start_leaves_nothing_running(server: Server, client: Client) -> None:
    """Our rule: a start that failed is over on both sides, and says where it looked, in the log and not in the chat."""
    with pytest.raises(LaunchError) as caught:
        await SshLauncher(target(server, client)).start(Command(("no-such-agent",), "", {}, SHORT))
    assert caught.value.code == "coding.ssh_command_missing"
    assert "/usr/bin" not in str(caught.value) and "no-such-agent" in str(caught.value)
    assert "/usr/bin" in caught.value.for_log and "no-such-agent" in caught.value.for_log


# ------------------------------------------------------------------ a whole agent


@pytest.mark.asyncio
async def test_an_acp_agent_works_on_the_remote_machine_and_reaches_a_server_here(
    server: Server, client: Client, tmp_path: Path
) -> None:
    """Our promise: the same driver works in this place; its session, its tunnel and its end are those of any other."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\ngreetings")
        writer.close()
        await writer.wait_closed()

    log = tmp_path / "log"
    launcher = SshLauncher(target(server, client))
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        url = await launcher.reach(f"http://127.0.0.1:{port}/mcp")
        tools = McpServer("tools", "http", url=url, headers={"Authorization": "Bearer canary-bearer"})
        async with acp_harness.opened(tmp_path, {"log": str(log)}, launcher=launcher, mcp_servers=(tools,)) as session:
            await launcher.close()
            events = await acp_harness.turn(session, "say hello from afar")
            assert "hello from afar" in acp_harness.text(events)
            given = acp_harness.received(log, "session/new")[0]
            assert given["cwd"] == session.directory == str(tmp_path) and given["mcpServers"][0]["url"] == url
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
            assert (await reader.read()).endswith(b"greetings")
            writer.close()
            await writer.wait_closed()
            agent = session._process
            assert isinstance(agent, RemoteProcess)
            running_agent = {agent.pid: hostile_trees.start_time(agent.pid)}
            assert holders("canary-bearer", "cmdline") == set()
    assert hostile_trees.living(running_agent) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("workspace", ["", "~", "~/project", "project"])
async def test_an_agent_is_told_an_absolute_directory(server: Server, client: Client, tmp_path: Path, workspace: str) -> None:
    """Protocol rule: ``cwd`` is absolute; our rule: an unset or ``~`` workspace is what the remote account makes of it."""
    wanted = server.home / "project" if "project" in workspace else server.home
    wanted.mkdir(exist_ok=True)
    log = tmp_path / "log"

    async def opened(resume: str = "", **more: object) -> str:
        command = acp_harness.command(log=str(log), state=str(tmp_path), **more)
        spec = SessionSpec(command, workspace, resume_session_id=resume, startup_timeout=BOUND)
        session = await AcpDriver().open(spec, SshLauncher(target(server, client)))
        await session.close()
        assert session.directory == str(wanted)
        return session.session_id

    session_id = await opened()
    await opened(session_id)
    await opened(session_id, without=["resume"])
    for method in ("session/new", "session/resume", "session/load"):
        assert [each["cwd"] for each in acp_harness.received(log, method)] == [str(wanted)], method
