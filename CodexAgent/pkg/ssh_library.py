"""An SSH client as a program of its own, for places where the OpenSSH client cannot run.

OpenSSH refuses to work for a user id without a passwd entry, which is what a jailed worker has. This program does the
same on ``asyncssh``, never inside the worker: it is started supervised, ``python -I -S ssh_library.py``, and

- takes one order from stdin, eight decimal digits of length and that many bytes of JSON (:func:`order`): the import path, where
  to connect, the private key and the host keys. So no key is on a command line, in an environment or in a file;
- then its stdin, stdout and stderr are those of the remote command, and it ends with the command's exit code, or with 255
  after one line on stderr, ``coding-ssh-error: <code>``, the same codes as :mod:`pkg.ssh_errors` knows.

Host keys are always checked against exactly those in the order; the only authentication is the one public key given; no
agent, no configuration file, no password, no local command is ever used.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncssh

_CHUNK = 65536
_MARK = "coding-ssh-error: "
_OS_ERRORS = {
    errno.ECONNREFUSED: "ssh_refused",
    errno.EHOSTUNREACH: "ssh_no_route",
    errno.ENETUNREACH: "ssh_no_route",
    errno.EADDRNOTAVAIL: "ssh_no_route",
    errno.ETIMEDOUT: "ssh_timeout",
    errno.ECONNRESET: "ssh_closed",
}


def order(values: Mapping[str, object]) -> bytes:
    """The bytes that tell the program what to do; the keys are the arguments of :func:`connect` and ``path``, ``command``."""
    body = json.dumps(dict(values)).encode()
    return b"%08d" % len(body) + body


class Failed(Exception):
    """The connection could not be made; ``code`` says why."""

    def __init__(self, code: str) -> None:
        """``code`` is one of :mod:`pkg.ssh_errors`."""
        self.code = code
        super().__init__(code)


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            raise SystemExit(1)
        data += piece
    return data


async def connect(
    *,
    host: str,
    port: int,
    user: str,
    key: str,
    known_hosts: str,
    host_key_alias: str,
    family: int,
    timeout: float,
    alive: float,
    alive_count: int,
) -> asyncssh.SSHClientConnection:
    """A connection whose host key was checked. Raises :class:`Failed`."""
    import asyncssh

    try:
        keys = [asyncssh.import_private_key(key)] if key else []
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, ValueError):
        raise Failed("ssh_key_unusable") from None
    try:
        trusted = asyncssh.import_known_hosts(known_hosts)
    except (ValueError, IndexError):
        raise Failed("ssh_host_key_unknown") from None
    try:
        return await asyncssh.connect(
            host,
            port,
            username=user,
            family=family,
            client_keys=keys or None,
            known_hosts=trusted,
            host_key_alias=host_key_alias or None,
            config=[],
            agent_path=None,
            password=None,
            preferred_auth="publickey",
            gss_host=None,
            gss_auth=False,
            gss_kex=False,
            x509_trusted_certs=None,
            connect_timeout=timeout,
            login_timeout=timeout + 15,
            keepalive_interval=alive,
            keepalive_count_max=alive_count,
            compression_algs=None,
        )
    except asyncssh.HostKeyNotVerifiable:
        known = trusted.match(host_key_alias or host, "", None if port == 22 else port)
        raise Failed("ssh_host_key_changed" if any(known[:2]) else "ssh_host_key_unknown") from None
    except asyncssh.PermissionDenied:
        raise Failed("ssh_permission_denied") from None
    except asyncssh.KeyExchangeFailed:
        raise Failed("ssh_algorithms") from None
    except TimeoutError:
        raise Failed("ssh_timeout") from None
    except socket.gaierror:
        raise Failed("ssh_name_unknown") from None
    except OSError as exc:
        unknown = "ssh_closed" if isinstance(exc, ConnectionError) else "ssh_no_route"
        raise Failed(_OS_ERRORS.get(exc.errno or 0, unknown)) from None
    except asyncssh.Error:
        raise Failed("ssh_closed") from None


async def _stdin_to(process: asyncssh.SSHClientProcess[bytes]) -> None:
    """Our stdin to the remote command until either ends."""
    reader = asyncio.StreamReader(limit=_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0, closefd=False)
    )
    try:
        while data := await reader.read(_CHUNK):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.write_eof()
    except (BrokenPipeError, ConnectionError):
        return
    finally:
        transport.close()


async def _copy(source: asyncssh.SSHReader[bytes], descriptor: int) -> None:
    """One remote stream to one of our descriptors, holding the remote back while we are not read."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", buffering=0, closefd=False)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        while data := await source.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    except (BrokenPipeError, ConnectionError):
        return
    finally:
        writer.close()


async def serve(values: dict[str, Any]) -> int:
    """Run the order's command on the order's machine; its exit code."""
    import asyncssh

    command, tunnel = values.pop("command"), values.pop("tunnel")
    connection = await connect(**values)
    try:
        if tunnel is not None:
            remote, host, local = tunnel
            try:
                listener = await connection.forward_remote_port("127.0.0.1", remote, host, local)
            except (asyncssh.ChannelListenError, asyncssh.Error, OSError):
                raise Failed("ssh_tunnel_failed") from None
            if listener.get_port() != remote:
                raise Failed("ssh_tunnel_failed")
        try:
            process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(command, encoding=None)
        except asyncssh.Error:
            raise Failed("ssh_closed") from None
        feeding = asyncio.create_task(_stdin_to(process))
        try:
            await asyncio.gather(_copy(process.stdout, 1), _copy(process.stderr, 2))
            await process.wait_closed()
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        status = process.exit_status
        return 255 if status is None or status < 0 else status
    finally:
        connection.close()
        await connection.wait_closed()


def main() -> int:
    """The program: read the order, become the remote command."""
    values = json.loads(_exactly(int(_exactly(8))))
    sys.path[:] = values.pop("path")
    try:
        return asyncio.run(serve(values))
    except ImportError:
        code = "ssh_client_missing"
    except Failed as exc:
        code = exc.code
    except Exception as exc:  # noqa: BLE001 - the program's boundary: whatever it was, it is one line and one code
        sys.stderr.write(f"\n{type(exc).__name__}")
        code = "ssh_failed"
    sys.stderr.write(f"\n{_MARK}{code}\n")
    return 255


if __name__ == "__main__":
    sys.exit(main())
