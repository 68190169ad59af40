"""The daemon program's command line: ``run``, ``check`` and ``keygen``.

Secrets come from files (0600), from the environment or from a prompt, never from arguments, and are shown nowhere. ``run`` ends
what an earlier daemon left before it connects, stays connected to every hub of the policy file, and ends its jobs on SIGTERM,
SIGINT and SIGHUP. It exits with 0 after a signal, with 2 for a file or secret that cannot be used, and with 1 when no hub is
left that admits it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from pkg import runtime_support
from pkg.agent_api import AgentDriver
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
from pkg.errors import LaunchError
from pkg.relay_auth import daemon_key, format_key, parse_key, valid_daemon_id
from pkg.relay_errors import AgentRuntimeDaemonError

log = logging.getLogger(__name__)

POLICY_FILE: Final = "~/.config/langbot-coding-agents/daemon.toml"
_LOG_LINE: Final = "%(asctime)s %(levelname)s %(message)s"
UNUSABLE: Final = 2
ENDED: Final = 1

Drivers = Mapping[str, AgentDriver]


def main(argv: Sequence[str], drivers: Drivers) -> int:
    """Run the command line ``argv`` (without the program's name) with a package's drivers; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "keygen":
            return _keygen(arguments)
        policy = load(_path(arguments.policy), tuple(drivers))
        if arguments.command == "check":
            return _check(policy)
        logging.basicConfig(
            level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
        )
        keys = {hub.url: key_of(hub, policy, os.environ) for hub in policy.hubs}
        for name in (KEY_VARIABLE, TOKEN_VARIABLE):
            os.environ.pop(name, None)
        return asyncio.run(_run(policy, keys, drivers))
    except (PolicyError, SecretError, TableBusy, ValueError) as exc:
        _say(f"daemon: {exc}", sys.stderr)
    except OSError as exc:
        _say(f"daemon: {exc.filename or 'the state directory'}: {exc.strerror or type(exc).__name__}", sys.stderr)
    return UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="daemon.py", description="Runs coding agents on this machine for a LangBot chat.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="connect to the hubs of the policy file and run their jobs")
    run.add_argument("--policy", default=POLICY_FILE, help=f"the policy file (default: {POLICY_FILE})")
    run.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    check = commands.add_parser("check", help="say whether the policy file and what it names can be used")
    check.add_argument("--policy", default=POLICY_FILE, help=f"the policy file (default: {POLICY_FILE})")
    keygen = commands.add_parser("keygen", help="make this daemon's own key out of the installation's token")
    keygen.add_argument("--daemon-id", required=True, help="what the runner's form calls this machine")
    keygen.add_argument("--out", required=True, help="the key file to make (0600)")
    keygen.add_argument(
        "--token-file", default="", help=f"a file (0600) with the token; else the variable {TOKEN_VARIABLE}, else a prompt"
    )
    keygen.add_argument("--force", action="store_true", help="replace a key file that exists")
    return parser


def _say(text: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(text + "\n")


def _path(text: str) -> Path:
    return Path(text).expanduser()


# ------------------------------------------------------------------ secrets


def key_of(hub: HubEntry, policy: Policy, environ: Mapping[str, str]) -> bytes:
    """This daemon's key for a hub: from its file, the environment, or the person at the terminal.

    Raises :class:`pkg.daemon_policy.SecretError`.
    """
    if hub.key_file is not None:
        return _key(read_secret(hub.key_file), str(hub.key_file))
    if hub.token_file is not None:
        return daemon_key(read_secret(hub.token_file), policy.daemon_id)
    if environ.get(KEY_VARIABLE):
        return _key(environ[KEY_VARIABLE], KEY_VARIABLE)
    if environ.get(TOKEN_VARIABLE):
        return daemon_key(environ[TOKEN_VARIABLE], policy.daemon_id)
    return daemon_key(_prompted(f"Token of the installation at {hub.url}: "), policy.daemon_id)


def _key(text: str, source: str) -> bytes:
    try:
        return parse_key(text)
    except ValueError as exc:
        raise SecretError(f"{source}: {exc}") from None


def _prompted(question: str) -> str:
    if not sys.stdin.isatty():
        raise SecretError(f"no key_file or token_file, no {KEY_VARIABLE} or {TOKEN_VARIABLE}, and no terminal to ask at")
    with contextlib.suppress(EOFError):
        if token := getpass.getpass(question).strip():
            return token
    raise SecretError("no token was given")


def _keygen(arguments: argparse.Namespace) -> int:
    if not valid_daemon_id(arguments.daemon_id):
        raise ValueError("a daemon id has 1 to 128 characters and no control characters")
    if arguments.token_file:
        token = read_secret(_path(arguments.token_file))
    else:
        token = os.environ.get(TOKEN_VARIABLE, "") or _prompted("Token of the installation: ")
    file = _path(arguments.out)
    line = format_key(daemon_key(token, arguments.daemon_id)) + "\n"
    if arguments.force:
        file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        os.fchmod(descriptor, 0o600)
        opened.write(line)
        opened.flush()
        os.fsync(descriptor)
    _say(f"{file} holds the key of {arguments.daemon_id}; it can only ever be this daemon.")
    return 0


# ------------------------------------------------------------------ check


def _check(policy: Policy) -> int:
    """Say for each hub and agent whether it can be used."""
    good = True
    for hub in policy.hubs:
        problem = ""
        if hub.key_file is not None or hub.token_file is not None:
            try:
                key_of(hub, policy, {})
            except SecretError as exc:
                problem = str(exc)
        elif not (os.environ.get(KEY_VARIABLE) or os.environ.get(TOKEN_VARIABLE)):
            problem = "" if sys.stdin.isatty() else "no key_file, no token_file, and nothing in the environment"
        good = good and not problem
        _say(f"hub {hub.url}: {problem or 'ok'}")
    for agent in policy.agents.values():
        problem = ""
        try:
            path = runtime_support.search_path(recorded=policy.path)
            runtime_support.find_executable(agent.command[0], path, cwd=agent.workspaces[0])
        except LaunchError as exc:
            problem = str(exc)
        good = good and not problem
        _say(f"agent {agent.name} ({agent.driver}): {problem or 'ok'}")
    for directory in policy.workspaces:
        _say(f"workspace {directory}: ok")
    return 0 if good else ENDED


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
    with contextlib.ExitStack() as tables:
        daemons = []
        for hub in policy.hubs:
            directory = policy.state_dir / hashlib.sha256(f"{policy.daemon_id}\0{hub.url}".encode()).hexdigest()[:24]
            table = DurableJobTable(directory)
            tables.callback(table.close)
            left = await table.recover()
            for job_id in left.unproven:
                log.error("what job %s left is not proven to have ended; its hub gives this machine no job until it is", job_id)
            daemons.append(
                Daemon(
                    policy=policy,
                    drivers=drivers,
                    table=table,
                    slots=slots,
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
        async with asyncio.TaskGroup() as group:
            for daemon in daemons:
                group.create_task(_served(daemon))
    return ENDED


async def _served(daemon: Daemon) -> None:
    try:
        await daemon.run_forever()
    except AgentRuntimeDaemonError as exc:
        # One hub that rejects this machine must not end what runs for the others.
        log.error("%s: %s", daemon.url, exc)
