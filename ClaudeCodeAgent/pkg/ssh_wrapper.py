"""The remote half of an SSH place: sent to the remote ``python3`` on stdin, it runs one command under the supervisor.

The file is both: a module the near side imports for the framing, and the program the far side runs. So it needs nothing but
the standard library and runs on Python 3.7 and later; its text travels as an exact-length header and is never written to
a file there.

The frame format, both ways: one byte channel, four bytes length (big endian), payload. Channels 1 to 3 carry the bytes of
stdin, stdout and stderr; channel 0 carries JSON objects named by ``t``:

================  =========  ===========================================================================
``start``         to remote  argv, cwd, env, defaults, marker, graces, search, alive ``[interval, timeout]``, window, supervisor
``close_stdin``   to remote  no more stdin
``stop``          to remote  end the tree (graces)
``took``          both       so many bytes of stdin (stdout) were taken by their reader: new credit
``alive``         both       keepalive
``started``       to near    pid, method, cwd
``failed``        to near    code, searched: nothing was started and nothing is left
``exited``        to near    code of the command itself
``eof``           to near    channel
``quiescent``     to near    nothing of the tree is left (method)
``unconfirmed``   to near    pids that may be left
================  =========  ===========================================================================

At most ``window`` bytes of stdin and of stdout are under way without credit, so a stream whose reader stalls never holds
back channel 0.

Guarantees of the remote side: the tree is ended when ``stop`` says so, when stdin of the connection ends, on SIGTERM,
SIGINT or SIGHUP, and after ``timeout`` seconds in which nothing was heard. Should this program itself be killed, the
supervisor ends the tree. ``quiescent`` is the supervisor's word, never assumed.
"""
# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH116, PTH117, PTH118, PTH207
# (pathlib would double the time a remote Python takes to start.)

from __future__ import annotations

import errno
import glob
import json
import os
import re
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

CONTROL, STDIN, STDOUT, STDERR = 0, 1, 2, 3
HEADER_BYTES = 5
CHUNK = 65536


class BrokenFraming(Exception):
    """The other side sent what is not a frame."""


def encode(channel: int, payload: bytes) -> bytes:
    """One frame."""
    return bytes((channel,)) + len(payload).to_bytes(4, "big") + payload


def message(kind: str, **fields: Any) -> bytes:
    """One frame of the control channel."""
    fields["t"] = kind
    return encode(CONTROL, json.dumps(fields).encode("ascii"))


class Decoder:
    """Frames out of a byte stream cut anywhere; holds at most one unfinished frame.

    ``largest`` bounds a control frame, ``CHUNK`` every other: a length beyond it is refused before its bytes are awaited.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete with ``data``. Raises :class:`BrokenFraming`, and again on every later call."""
        self._buffer += data
        frames = []
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                channel = self._buffer[start]
                size = int.from_bytes(self._buffer[start + 1 : start + HEADER_BYTES], "big")
                if channel > STDERR or size > (self.largest if channel == CONTROL else CHUNK):
                    raise BrokenFraming(f"channel {channel}, {size} bytes")
                end = start + HEADER_BYTES + size
                if len(self._buffer) < end:
                    break
                frames.append((channel, bytes(self._buffer[start + HEADER_BYTES : end])))
                start = end
        finally:
            del self._buffer[:start]
        return frames


def parse(payload: bytes) -> dict[str, Any]:
    """The object of a control frame. Raises :class:`BrokenFraming`."""
    try:
        loaded = json.loads(payload.decode("ascii"))
    except (ValueError, RecursionError):
        raise BrokenFraming("control frame is not JSON") from None
    if not isinstance(loaded, dict) or not isinstance(loaded.get("t"), str):
        raise BrokenFraming("control frame is not a message")
    return loaded


# ------------------------------------------------------------------ the far side


def expand(path: str) -> str:
    """``~`` as this account's home."""
    return os.path.expanduser(path)


def search_path(own: str, more: Sequence[str]) -> list[str]:
    """The directories of ``own`` and then those of ``more`` that exist; ``~`` and ``*`` are expanded, newest names first."""
    found = [part for part in own.split(os.pathsep) if part]
    for pattern in more:
        found += sorted((path for path in glob.glob(expand(pattern)) if os.path.isdir(path)), key=_numbers, reverse=True)
    return list(dict.fromkeys(found))


def _numbers(path: str) -> list[int]:
    """The numbers in a path, so that 22 is newer than 9."""
    return [int(number) for number in re.findall("[0-9]+", path)]


def find(name: str, directories: Sequence[str], cwd: str) -> str:
    """The executable file that ``name`` means, or an empty string."""
    name = expand(name)
    places = [os.path.join(cwd, name)] if "/" in name else [os.path.join(place, name) for place in directories]
    for path in places:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


class CannotStart(Exception):
    """The command cannot be started; nothing was."""

    def __init__(self, code: str, **fields: Any) -> None:
        """``code`` and what is known of it."""
        self.code = code
        self.fields = fields
        super().__init__(code)


def resolve(order: Mapping[str, Any]) -> dict[str, Any]:
    """The supervisor's spec for a start order. Raises :class:`CannotStart`."""
    env = dict(os.environ)
    for name in ("SSH_ORIGINAL_COMMAND", "OLDPWD", "PWD", "_"):
        env.pop(name, None)
    for name, value in order["defaults"].items():
        env.setdefault(name, value)
    env.update(order["env"])
    cwd = expand(order["cwd"] or "~")
    if not os.path.isabs(cwd):
        cwd = os.path.join(expand("~"), cwd)
    if os.path.realpath(cwd) == "/":
        raise CannotStart("workspace_is_root")
    if not os.path.isdir(cwd):
        raise CannotStart("workspace_not_a_directory" if os.path.exists(cwd) else "workspace_missing")
    if not os.access(cwd, os.X_OK | os.R_OK):
        raise CannotStart("workspace_closed")
    if not os.access(cwd, os.W_OK) or not os.stat(cwd).st_mode & 0o222:
        raise CannotStart("workspace_not_writable")
    directories = search_path(env.get("PATH", os.defpath), order["search"])
    executable = find(order["argv"][0], directories, cwd)
    if not executable:
        raise CannotStart("command_missing", searched=directories)
    env["PATH"] = os.pathsep.join(directories)
    env["PWD"] = cwd
    marker = [order["marker"], os.urandom(16).hex()]
    env[marker[0]] = marker[1]
    return {
        "argv": list(order["argv"]),
        "executable": executable,
        "cwd": cwd,
        "env": env,
        "graces": order["graces"],
        "marker": marker,
        "method": "auto",
    }


class Supervised:
    """The supervisor as a child of this process, and its control channel."""

    def __init__(self, source: str, spec: Mapping[str, Any], stdio: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _become_supervisor(source, theirs.fileno(), stdio)
        theirs.close()
        self.control = ours
        self._buffer = b""
        body = json.dumps(spec).encode("ascii")
        try:
            ours.sendall(len(body).to_bytes(4, "big") + body)
        except OSError:
            self._buffer = b""

    def stop(self, graces: Mapping[str, float]) -> None:
        """Ask it to end the tree; one that is gone is noticed by :meth:`reports`."""
        body = json.dumps({"verb": "stop", "graces": dict(graces)}).encode("ascii")
        try:
            self.control.sendall(len(body).to_bytes(4, "big") + body)
        except OSError:
            return

    def reports(self) -> list[dict[str, Any]] | None:
        """Read once; ``None`` at the end of the channel."""
        try:
            data = self.control.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self.control.close()
            os.waitpid(self.pid, 0)
            return None
        self._buffer += data
        frames = []
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end:
                break
            frames.append(json.loads(self._buffer[4:end].decode("ascii")))
            self._buffer = self._buffer[end:]
        return frames


def _become_supervisor(source: str, control: int, stdio: Sequence[int]) -> None:
    """In the forked child: run the supervisor's program on the given descriptors. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        held = [os.dup(fd) for fd in stdio]
        for target, fd in enumerate(held):
            os.dup2(fd, target)
        os.dup2(control, 3)
        os.closerange(4, 1024)
        sys.argv = ["process_supervisor", "3"]
        exec(compile(source, "process_supervisor", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    finally:
        os._exit(code)


class Remote:
    """One connection and the one tree it owns, in one poll loop without threads."""

    def __init__(self, decoder: Decoder, order: Mapping[str, Any]) -> None:
        self.order = order
        self.decoder = decoder
        self.outgoing = bytearray(message("alive"))
        self.connected = True
        self.credit = int(order["window"])
        self.to_agent = bytearray()
        self.stdin_ends = False
        self.ending = False
        self.done = False
        self.exited = False
        self.swept = False
        self.agent: tuple[int, str] = (0, "")
        self.streams: dict[int, int] = {}
        self.interval, self.timeout = order["alive"]
        self.heard = self.spoke = time.monotonic()
        self.wake, wake_writer = os.pipe()
        for fd in (self.wake, wake_writer, 0, 1):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.spec = resolve(order)
        pipes = [os.pipe() for _ in range(3)]
        self.stdin, self.streams = pipes[0][1], {pipes[1][0]: STDOUT, pipes[2][0]: STDERR}
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        for fd in (self.stdin, *self.streams):
            os.set_blocking(fd, False)
        self.supervisor: Supervised | None = Supervised(order["supervisor"], self.spec, theirs)
        for fd in theirs:
            os.close(fd)

    # ---- the loop

    def run(self) -> None:
        """Live until the tree is gone and everything was told, or there is nobody left to tell."""
        while not self._finished():
            poller = select.poll()
            poller.register(self.wake, select.POLLIN)
            if self.connected:
                poller.register(0, select.POLLIN)
                poller.register(1, select.POLLOUT if self.outgoing else 0)
            if self.stdin >= 0:
                poller.register(self.stdin, select.POLLOUT if self.to_agent else 0)
            for fd, channel in self.streams.items():
                if self._may_read(channel):
                    poller.register(fd, select.POLLIN)
            if self.supervisor is not None:
                poller.register(self.supervisor.control.fileno(), select.POLLIN)
            for fd, events in poller.poll(self._patience()):
                self._serve(fd, events)
            self._keep_alive()

    def _finished(self) -> bool:
        if self.connected:
            return self.done and not self.streams and not self.outgoing
        return self.done or self.supervisor is None

    def _may_read(self, channel: int) -> bool:
        if not self.connected:
            return True
        if len(self.outgoing) > 4 * CHUNK:
            return False
        return channel != STDOUT or self.credit > 0

    def _patience(self) -> int | None:
        if not self.connected:
            return None
        now = time.monotonic()
        return max(0, int(1000 * min(self.spoke + self.interval - now, self.heard + self.timeout - now)) + 1)

    def _serve(self, fd: int, events: int) -> None:
        if fd == self.wake:
            os.read(self.wake, 64)
            self.end(self.order["graces"])
        elif fd == 0 and self.connected:
            self._hear()
        elif fd == 1 and self.connected:
            self._speak(events)
        elif fd == self.stdin:
            self._feed(events)
        elif fd in self.streams:
            self._take(fd)
        elif self.supervisor is not None and fd == self.supervisor.control.fileno():
            self._listen(self.supervisor)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if not self.connected:
            return
        if now - self.heard >= self.timeout:
            self._lost()
        elif now - self.spoke >= self.interval:
            self.spoke = now
            if len(self.outgoing) < CHUNK:
                self.outgoing += message("alive")

    # ---- the connection

    def _hear(self) -> None:
        try:
            data = os.read(0, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self.heard = time.monotonic()
        try:
            for channel, payload in self.decoder.feed(data):
                self._obey(channel, payload)
        except (BrokenFraming, KeyError, TypeError, ValueError):
            self._lost()

    def _obey(self, channel: int, payload: bytes) -> None:
        if channel == STDIN:
            if self.stdin < 0 or self.stdin_ends:
                self.outgoing += message("took", bytes=len(payload))
            else:
                self.to_agent += payload
                self._feed(select.POLLOUT)
            return
        if channel != CONTROL:
            raise BrokenFraming(f"channel {channel}")
        told = parse(payload)
        kind = told["t"]
        if kind == "stop":
            self.end(told["graces"])
        elif kind == "close_stdin":
            self.stdin_ends = True
            self._feed(0)
        elif kind == "took":
            self.credit += int(told["bytes"])

    def _speak(self, events: int) -> None:
        if events & (select.POLLERR | select.POLLNVAL):
            self._lost()
            return
        try:
            written = os.write(1, self.outgoing[: 4 * CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self._lost()
            return
        del self.outgoing[:written]

    def _lost(self) -> None:
        """There is nobody left to tell: end the tree and go."""
        self.connected = False
        self.outgoing.clear()
        self.end(self.order["graces"])

    # ---- the agent

    def _feed(self, events: int) -> None:
        if self.stdin < 0:
            return
        written = 0
        if self.to_agent:
            try:
                written = os.write(self.stdin, self.to_agent[:CHUNK])
            except BlockingIOError:
                return
            except OSError:
                events |= select.POLLERR
        del self.to_agent[:written]
        if events & select.POLLERR:
            written += len(self.to_agent)
            self.to_agent.clear()
            self.stdin_ends = True
        if written:
            self.outgoing += message("took", bytes=written)
        if self.stdin_ends and not self.to_agent:
            os.close(self.stdin)
            self.stdin = -1

    def _take(self, fd: int) -> None:
        channel = self.streams[fd]
        size = min(CHUNK, self.credit) if channel == STDOUT and self.connected else CHUNK
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not self.connected:
            self.outgoing.clear()
        elif data:
            self.outgoing += encode(channel, data)
            if channel == STDOUT:
                self.credit -= len(data)
        else:
            self.outgoing += message("eof", channel=channel)
        if not data:
            os.close(fd)
            del self.streams[fd]

    def end(self, graces: Mapping[str, float]) -> None:
        """End the tree: stdin first, then as the supervisor does; a second call can only shorten it."""
        self.ending = True
        self.to_agent.clear()
        self.stdin_ends = True
        self._feed(0)
        if self.supervisor is not None:
            self.supervisor.stop(graces)

    # ---- the supervisor

    def _listen(self, supervisor: Supervised) -> None:
        reports = supervisor.reports()
        if reports is None:
            self.supervisor = None
            if not self.done:
                self._sweep()
            return
        for report in reports:
            event = report.pop("event")
            if event == "started":
                self.agent = (report["pid"], report["start"])
                self.outgoing += message("started", pid=report["pid"], method=report["method"], cwd=self.spec["cwd"])
            elif event == "failed":
                stage, number = report["stage"], report["errno"]
                closed = stage == "chdir" or number in (errno.EACCES, errno.EPERM)
                code = "workspace_closed" if stage == "chdir" else "command_closed" if closed else "start_failed"
                self.outgoing += message("failed", code=code)
                self._is_done()
            elif event == "exited":
                self.exited = True
                self.outgoing += message("exited", code=report["code"])
            elif event == "quiescent":
                if self.swept and not self.exited:
                    self.outgoing += message("exited", code=-signal.SIGKILL)
                self.outgoing += message("quiescent", method=report["method"])
                self._is_done()
            elif event == "unconfirmed":
                self.outgoing += message("unconfirmed", pids=report["pids"])
        if not self.connected:
            self.outgoing.clear()

    def _is_done(self) -> None:
        """Nothing of the tree is left: what its pipes still hold is all there will be."""
        self.done = True
        self.stdin_ends = True
        self.to_agent.clear()
        self._feed(0)

    def _sweep(self) -> None:
        """The supervisor is gone without its last word: a second one looks for what is left of the tree, once."""
        if self.swept or not self.agent[0]:
            self.outgoing += message("unconfirmed", pids=[self.agent[0]] if self.agent[0] else [])
            return
        self.swept = True
        null = os.open(os.devnull, os.O_RDWR)
        sweep = {"sweep": {"roots": [list(self.agent)]}, "marker": self.spec["marker"], "graces": self.order["graces"]}
        self.supervisor = Supervised(self.order["supervisor"], sweep, [null, null, null])
        os.close(null)


def main() -> None:
    """The program on the remote machine: one start order, one tree, one end."""
    decoder = Decoder(16 * 1024 * 1024)
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = os.read(0, CHUNK)
        if not data:
            return
        frames = decoder.feed(data)
    order = parse(frames[0][1])
    try:
        remote = Remote(decoder, order)
    except CannotStart as exc:
        os.set_blocking(1, True)
        data = message("failed", code=exc.code, **exc.fields)
        while data:
            data = data[os.write(1, data) :]
        return
    for channel, payload in frames[1:]:
        remote._obey(channel, payload)
    remote.run()


if __name__ == "__main__":
    main()
