"""Files inside one workspace root, race-free: every directory is opened below the root, component by component.

Guarantees: nothing outside the real path of the root is read or written. Reading resolves links first and then opens the
resolved path without following any; writing follows no link at all. Only regular UTF-8 text files of bounded size are read;
writing replaces a file in one step and keeps its mode. Works on the calling thread: files are small by the bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pkg import limits

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileRefused(Exception):
    """A file operation that is not possible or not allowed; ``missing`` says that there is no such file."""

    def __init__(self, reason: str, *, missing: bool = False) -> None:
        self.reason = reason
        self.missing = missing
        super().__init__(reason)


class WorkspaceFiles:
    """The files below ``root``, an absolute path that may itself be a link."""

    def __init__(self, root: str) -> None:
        self._named = os.path.normpath(root)
        self.root = os.path.realpath(root)
        """The real path of the workspace."""

    def read_text(self, path: str, line: int | None = None, limit: int | None = None) -> str:
        """The text of a file, or ``limit`` lines of it from ``line`` (counted from 1) on. Raises :class:`FileRefused`."""
        text = self._decoded(self._read(self._parts(os.path.realpath(self._below(path)))))
        if line is None and limit is None:
            return text
        lines = text.splitlines(keepends=True)
        start = max((line or 1) - 1, 0)
        return "".join(lines[start : None if limit is None else start + max(limit, 0)])

    def current_text(self, path: str) -> str | None:
        """The text a write to ``path`` would replace, ``None`` where there is no file. Raises :class:`FileRefused`."""
        try:
            return self._decoded(self._read(self._parts(self._below(path))))
        except FileRefused as exc:
            if exc.missing:
                return None
            raise

    def write_text(self, path: str, content: str) -> None:
        """Replace or create a text file and the directories above it. Raises :class:`FileRefused`."""
        data = content.encode("utf-8", "replace")
        if len(data) > limits.ACP_FILE_BYTES:
            raise FileRefused(f"the file is larger than {limits.ACP_FILE_BYTES} bytes")
        self.write(self._parts(self._below(path)), data)

    def write(self, parts: tuple[str, ...], data: bytes) -> str:
        """Replace or create the file at these components below the root; returns its real path."""
        if not parts:
            raise FileRefused("the path is the workspace itself")
        with _refusals(), self._directory(parts[:-1], create=True) as directory:
            mode = 0o644
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise FileRefused("the path is not a regular file")
                mode = stat.S_IMODE(found.st_mode)
            draft = f".{secrets.token_hex(8)}.tmp"
            handle = os.open(draft, _CREATE, 0o600, dir_fd=directory)
            try:
                with os.fdopen(handle, "wb") as out:
                    os.fchmod(out.fileno(), mode)
                    out.write(data)
                os.rename(draft, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=directory)
                raise
        return str(Path(self.root, *parts))

    def remove(self, parts: tuple[str, ...]) -> None:
        """Remove the file at these components; one that is gone is fine."""
        with contextlib.suppress(FileRefused, OSError), self._directory(parts[:-1]) as directory:
            os.unlink(parts[-1], dir_fd=directory)

    def directory(self, path: str) -> str:
        """The real path of a directory inside the workspace. Raises :class:`FileRefused`."""
        real = os.path.realpath(self._below(path)) if path else self.root
        with _refusals(), self._directory(self._parts(real)):
            return real

    def _below(self, path: str) -> str:
        """``path`` below the real root, by its name alone."""
        if "\x00" in path or not path.startswith("/"):
            raise FileRefused("the path is not absolute")
        whole = os.path.normpath(path)
        for root in (self.root, self._named):
            if whole == root or whole.startswith(root.rstrip("/") + "/"):
                return os.path.normpath(self.root + "/" + whole[len(root) :])
        named = Path(whole)
        real = str(Path(os.path.realpath(named.parent), named.name))
        if real.startswith(self.root.rstrip("/") + "/"):
            return real
        raise FileRefused("the path is outside the workspace")

    def _parts(self, below: str) -> tuple[str, ...]:
        if below != self.root and not below.startswith(self.root.rstrip("/") + "/"):
            raise FileRefused("the path is outside the workspace")
        return tuple(part for part in below[len(self.root) :].split("/") if part)

    def _read(self, parts: tuple[str, ...]) -> bytes:
        if not parts:
            raise FileRefused("the path is not a regular file")
        with _refusals(), self._directory(parts[:-1]) as directory:
            handle = os.open(parts[-1], _READ, dir_fd=directory)
            with os.fdopen(handle, "rb") as source:
                if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                    raise FileRefused("the path is not a regular file")
                data = source.read(limits.ACP_FILE_BYTES + 1)
        if len(data) > limits.ACP_FILE_BYTES:
            raise FileRefused(f"the file is larger than {limits.ACP_FILE_BYTES} bytes")
        return data

    @staticmethod
    def _decoded(data: bytes) -> str:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise FileRefused("the file is not UTF-8 text") from None
        if "\x00" in text:
            raise FileRefused("the file is not text")
        return text

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        handle = os.open(self.root, _DIRECTORY)
        try:
            for part in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=handle)
                below = os.open(part, _DIRECTORY, dir_fd=handle)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Operating system errors in plain words."""
    try:
        yield
    except FileNotFoundError:
        raise FileRefused("there is no such file or directory", missing=True) from None
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EMLINK):
            raise FileRefused("the path leads through a symbolic link") from None
        if exc.errno == errno.ENOTDIR:
            raise FileRefused("the path leads through a file or a symbolic link") from None
        raise FileRefused(os.strerror(exc.errno) if exc.errno else "the file cannot be used") from None
