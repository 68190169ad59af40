"""The daemon program's command line: ``init``, ``keygen``, ``check`` and ``run``.

Secrets come from files (0600), from the environment or from a prompt, never from arguments, and are shown nowhere. ``run`` ends
what an earlier daemon left before it connects, stays connected to every hub of the policy file, and ends its jobs on SIGTERM,
SIGINT and SIGHUP. It exits with 0 after a signal, with 2 for a file or secret that cannot be used (nothing was started then),
and with 1 when no hub is left that admits it. ``check`` exits with 1 when something the file names cannot be used. Where there
is no policy file yet, every command says the three steps to one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import hashlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from pkg import relay_sockets
from pkg.agent_api import AgentDriver
from pkg.daemon_audit import Audit
from pkg.daemon_check import findings
from pkg.daemon_jobs import DurableJobTable, TableBusy
from pkg.daemon_policy import (
    KEY_VARIABLE,
    TOKEN_VARIABLE,
    HubEntry,
    Policy,
    PolicyError,
    SecretError,
    load,
    read_secret,
)
from pkg.daemon_program import Daemon, Slots
from pkg.daemon_setup import Commands, first_steps, write_policy
from pkg.relay_auth import TOKEN_COMMAND, daemon_key, format_key, parse_key, token_problem, valid_daemon_id
from pkg.relay_errors import AgentRuntimeDaemonError

log = logging.getLogger(__name__)

POLICY_FILE: Final = "~/.config/langbot-coding-agents/daemon.toml"
_LOG_LINE: Final = "%(asctime)s %(levelname)s %(message)s"
UNUSABLE: Final = 2
ENDED: Final = 1
INTERRUPTED: Final = 130
"""Ctrl-C at a question or while looking, as shells count it."""

Drivers = Mapping[str, AgentDriver]


def main(argv: Sequence[str], drivers: Drivers, commands: Commands, policies: Sequence[str]) -> int:
    """Run the command line ``argv`` (without the program's name); returns the exit code.

    ``drivers``, ``commands`` and ``policies`` are the package's: what it drives, command lines of agents it knows, and the
    approval policies that its runner's form takes.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        file = Path(arguments.policy).expanduser()
        if arguments.command == "init":
            return _init(arguments, file, drivers, commands)
        if arguments.command == "keygen" and arguments.out:
            return _keygen_for(arguments)
        if not os.path.lexists(file):
            _say(first_steps(_program(), file, _options(arguments)), sys.stderr)
            return UNUSABLE
        if arguments.command is None:
            parser.error("name a command: init, keygen, check or run")
        policy = load(file, tuple(drivers), policies)
        if arguments.command == "keygen":
            return _keygen(arguments, policy)
        if arguments.command == "check":
            return _check(policy, _options(arguments))
        logging.basicConfig(level=arguments.log_level.upper(), format=_LOG_LINE, stream=sys.stderr)
        keys = {hub.url: key_of(hub, policy, os.environ, _options(arguments)) for hub in policy.hubs}
        for name in (KEY_VARIABLE, TOKEN_VARIABLE):
            os.environ.pop(name, None)
        return asyncio.run(_run(policy, keys, drivers))
    except (PolicyError, SecretError, TableBusy, ValueError) as exc:
        _say(f"daemon: {exc}", sys.stderr)
    except OSError as exc:
        _say(f"daemon: {exc.filename or 'the state directory'}: {exc.strerror or type(exc).__name__}", sys.stderr)
    except KeyboardInterrupt:
        _say("", sys.stderr)
        return INTERRUPTED
    return UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daemon.py",
        description="Runs coding agents on this machine for a LangBot chat, as a policy file of yours allows.",
        epilog="Begin with: init, then keygen, then check, then run.",
    )
    parser.set_defaults(policy=POLICY_FILE)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--policy", metavar="FILE", default=POLICY_FILE, help=f"the policy file (default: {POLICY_FILE})")
    init = commands.add_parser("init", parents=[common], help="write a policy file with every key explained, if there is none")
    init.add_argument("--hub", metavar="URL", default="", help="the address of the plugin's hub")
    init.add_argument("--daemon-id", metavar="NAME", default="", help="what the runner's form calls this machine")
    init.add_argument(
        "--workspace", metavar="DIR", action="append", default=[], help="a directory for agents; may be given more than once"
    )
    keygen = commands.add_parser(
        "keygen",
        parents=[common],
        help="make this machine's key out of the token of the plugin's form",
        description="Makes the key files that the policy file names and that are not there yet; asks for each hub's token.",
    )
    keygen.add_argument("--out", metavar="FILE", default="", help="make this key file (0600) instead, without a policy file")
    keygen.add_argument("--daemon-id", metavar="NAME", default="", help="with --out: what the runner's form calls the machine")
    keygen.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help=f"a file (0600) with the token; else the variable {TOKEN_VARIABLE}, else a prompt",
    )
    keygen.add_argument("--force", action="store_true", help="replace key files that exist")
    commands.add_parser("check", parents=[common], help="say line by line whether all that the policy file names can be used")
    run = commands.add_parser("run", parents=[common], help="connect to the hubs of the policy file and run their jobs")
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _say(text: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(text + "\n")
    (stream or sys.stdout).flush()


def _program() -> str:
    """The command line by which the owner has started this program, without arguments."""
    return shlex.join((sys.executable, sys.argv[0]))


def _options(arguments: argparse.Namespace) -> str:
    """What a further command needs to find the same policy file, with a space before it."""
    return "" if arguments.policy == POLICY_FILE else f" --policy {shlex.quote(arguments.policy)}"


def _init(arguments: argparse.Namespace, file: Path, drivers: Drivers, commands: Commands) -> int:
    problem = arguments.hub and relay_sockets.address_problem(arguments.hub, insecure_plaintext=True)
    if problem:
        raise ValueError(f"--hub: {problem}")
    said = write_policy(
        file,
        hub=arguments.hub,
        daemon_id=arguments.daemon_id,
        workspaces=tuple(each if each.partition("/")[0] == "~" else str(Path(each).absolute()) for each in arguments.workspace),
        driver=next(iter(drivers)),
        commands=commands,
    )
    _say(f"{said}\nThen: {_program()} keygen{_options(arguments)}\nThen: {_program()} check{_options(arguments)}")
    return 0


# ------------------------------------------------------------------ secrets


def key_of(hub: HubEntry, policy: Policy, environ: Mapping[str, str], options: str = "") -> bytes:
    """This daemon's key for a hub: from its file, the environment, or the person at the terminal.

    ``options`` are for the command line that is named where the file is not there. Raises
    :class:`pkg.daemon_policy.SecretError`.
    """
    if hub.key_file is not None:
        if not os.path.lexists(hub.key_file):
            raise SecretError(f"{hub.key_file} is not there yet; make it with: {_program()} keygen{options}")
        return _key(read_secret(hub.key_file), str(hub.key_file))
    if hub.token_file is not None:
        return daemon_key(read_secret(hub.token_file), policy.daemon_id)
    if environ.get(KEY_VARIABLE):
        return _key(environ[KEY_VARIABLE], KEY_VARIABLE)
    if environ.get(TOKEN_VARIABLE):
        return daemon_key(environ[TOKEN_VARIABLE], policy.daemon_id)
    needed = f"no key_file or token_file, no {KEY_VARIABLE} or {TOKEN_VARIABLE}"
    return daemon_key(_prompted(f"Token of the plugin at {hub.url} (daemon-token): ", needed), policy.daemon_id)


def _key(text: str, source: str) -> bytes:
    try:
        return parse_key(text)
    except ValueError as exc:
        raise SecretError(f"{source}: {exc}") from None


def _prompted(question: str, absent: str) -> str:
    """What the person says; ``absent`` is what there was not either, for where nobody can be asked."""
    if not sys.stdin.isatty():
        raise SecretError(f"{absent}, and no terminal to ask at")
    with contextlib.suppress(EOFError):
        if token := getpass.getpass(question).strip():
            return token
    raise SecretError("no token was given")


def _token(arguments: argparse.Namespace, question: str) -> str:
    if arguments.token_file:
        return read_secret(Path(arguments.token_file).expanduser())
    return os.environ.get(TOKEN_VARIABLE, "") or _prompted(question, f"no --token-file, no {TOKEN_VARIABLE}")


def _keygen(arguments: argparse.Namespace, policy: Policy) -> int:
    """The key files that the policy names."""
    if arguments.daemon_id:
        raise ValueError("--daemon-id belongs to --out; without it the policy file says what this machine is called")
    named = [(hub, hub.key_file) for hub in policy.hubs if hub.key_file is not None]
    wanted = [(hub, file) for hub, file in named if arguments.force or not os.path.lexists(file)]
    if not wanted:
        nothing = "every key file of the policy file is there; --force makes them anew" if named else "it names no key_file"
        raise ValueError(f"{policy.file}: {nothing}")
    if len(wanted) > 1 and (arguments.token_file or os.environ.get(TOKEN_VARIABLE)):
        raise ValueError("several hubs need a key, each from a token of its own; make them one by one with --out")
    for hub, file in wanted:
        token = _token(arguments, f"Token of the plugin at {hub.url} (daemon-token): ")
        _write_key(file, policy.daemon_id, token, arguments.force)
    return 0


def _keygen_for(arguments: argparse.Namespace) -> int:
    """One key file, without a policy."""
    if not arguments.daemon_id:
        raise ValueError("--out needs --daemon-id, what the runner's form calls the machine")
    if not valid_daemon_id(arguments.daemon_id):
        raise ValueError("--daemon-id: a daemon id has 1 to 128 characters and no control characters")
    token = _token(arguments, "Token of the plugin (daemon-token): ")
    _write_key(Path(arguments.out).expanduser(), arguments.daemon_id, token, arguments.force)
    return 0


def _write_key(file: Path, daemon_id: str, token: str, force: bool) -> None:
    line = format_key(daemon_key(token, daemon_id)) + "\n"
    if force:
        file.unlink(missing_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ValueError(f"{file} is there already; --force makes it anew") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        os.fchmod(descriptor, 0o600)
        opened.write(line)
        opened.flush()
        os.fsync(descriptor)
    _say(f"{file} holds the key of {daemon_id}; whoever has it can only ever be this machine.")
    if problem := token_problem(token):
        poor = f"daemon: its token is not a good one ({problem}), and a LangBot that installations share refuses it"
        _say(f"{poor}. Better put a new one into the plugin's form and make the key anew: {TOKEN_COMMAND}", sys.stderr)


# ------------------------------------------------------------------ check


def _check(policy: Policy, options: str) -> int:
    """Say line by line what can be used."""
    found = asyncio.run(findings(policy, lambda hub: _source(hub, policy, options)))
    for finding in found:
        _say(str(finding))
    return ENDED if any(finding.problem for finding in found) else 0


def _source(hub: HubEntry, policy: Policy, options: str) -> str:
    """Where a hub's key comes from; raises :class:`pkg.daemon_policy.SecretError`."""
    named = hub.key_file or hub.token_file
    variable = next((name for name in (KEY_VARIABLE, TOKEN_VARIABLE) if os.environ.get(name)), "")
    if named is None and not variable and sys.stdin.isatty():
        return "asked for at the start"
    key_of(hub, policy, os.environ, options)
    return str(named or variable)


# ------------------------------------------------------------------ run


async def _run(policy: Policy, keys: dict[str, bytes], drivers: Drivers) -> int:
    working = asyncio.create_task(_connected(policy, keys, drivers))
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        working.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    await asyncio.wait({working})
    if working.cancelled() and stopped:
        return 0
    return working.result()


async def _connected(policy: Policy, keys: dict[str, bytes], drivers: Drivers) -> int:
    """Serve every hub until cancelled, or until none is left."""
    slots = Slots(policy.max_jobs)
    audit = Audit(policy.state_dir)
    with contextlib.ExitStack() as tables:
        daemons = []
        for hub in policy.hubs:
            directory = policy.state_dir / hashlib.sha256(f"{policy.daemon_id}\0{hub.url}".encode()).hexdigest()[:24]
            table = DurableJobTable(directory)
            tables.callback(table.close)
            left = await table.recover()
            for job_id in left.ended:
                audit.write(hub.url, job_id, "recovered")
            for job_id in left.unproven:
                log.error("what job %s left is not proven to have ended; its hub gives this machine no job until it is", job_id)
            daemons.append(
                Daemon(
                    policy=policy,
                    drivers=drivers,
                    table=table,
                    slots=slots,
                    audit=audit,
                    url=hub.url,
                    key=keys[hub.url],
                    quiesced=left.quiesced,
                    unproven=left.unproven,
                    journal_dir=directory / "journal",
                    insecure_plaintext=hub.insecure_plaintext,
                    certificate_sha256=hub.certificate_sha256,
                    metadata={"agents": sorted(policy.agents)[:32]},
                    features=("session-v1",),
                )
            )
        keys.clear()
        for hub in policy.hubs:
            log.info("%s: connecting as %s", hub.url, policy.daemon_id)
        async with asyncio.TaskGroup() as group:
            for daemon in daemons:
                group.create_task(_served(daemon))
    return ENDED


async def _served(daemon: Daemon) -> None:
    try:
        await daemon.run_forever()
    except AgentRuntimeDaemonError as exc:
        # One hub that rejects this machine must not end what runs for the others.
        log.error("%s: %s. It is not asked again before this program is restarted.", daemon.url, exc)
