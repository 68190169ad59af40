"""The program that is started: Codex's native binary, not the script that only starts it.

The npm package's ``codex`` is a Node.js script that starts the binary of a platform package and waits for it; killed, it leaves
the binary behind (Codex 0.171 under Node.js 20). So the binary is looked for where npm, pnpm, bun and the Python package put
it. What is none of these is started as it is: a binary on the search path, a wrapper of the operator's own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SHIM: Final = ("@openai", "codex", "bin", "codex.js")
"""The end of the script's real path."""

_OVERRIDES: Final = ("features.instant_interrupt=false", "features.unbounded_connection_retries=false")
"""A steered message lets the answer it interrupts be finished, and a model that cannot be reached is given up some time."""


def command_line(program: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of an app-server on stdin and stdout; nothing of it is secret."""
    overrides = tuple(part for override in _OVERRIDES for part in ("-c", override))
    return (program, *overrides, *arguments, "app-server")


ELSEWHERE: Final = """
name=$1; shift
case $name in "~/"*) name=$HOME/${name#"~/"};; esac
found=$(command -v -- "$name") || { printf '%s: not found\\n' "$name" >&2; exit 127; }
(umask 077; mkdir -p -- "${CODEX_HOME:-$HOME/.codex}") 2>/dev/null
real=$(readlink -f -- "$found" 2>/dev/null) || real=$found
case $real in */@openai/codex/bin/codex.js)
  package=${real%/bin/codex.js}
  scope=${package%/codex}
  for native in "$scope"/codex-*/vendor/*/bin/codex "$package"/node_modules/@openai/codex-*/vendor/*/bin/codex \\
    "$package"/vendor/*/bin/codex "$package"/vendor/*/codex/codex; do
    if [ -x "$native" ]; then exec "$native" "$@"; fi
  done;;
esac
exec "$found" "$@"
"""
"""The same for a machine that is not this one, as a shell script: the program's name first, then its arguments."""


def elsewhere(command: tuple[str, ...]) -> tuple[str, ...]:
    """A command line that starts the native binary behind ``command`` on another machine."""
    return ("sh", "-c", ELSEWHERE.strip(), "codex", *command)


def native(found: str) -> str:
    """The native binary behind the executable ``found``, or ``found`` itself."""
    real = Path(os.path.realpath(found))
    candidates = _beside_shim(real) if real.parts[-4:] == SHIM else _of_python(Path(found), real)
    return next((str(path) for path in candidates if os.access(path, os.X_OK) and path.is_file()), found)


def _triples() -> tuple[str, ...]:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if platform.system() == "Darwin":
        return (f"{machine}-apple-darwin",)
    return (f"{machine}-unknown-linux-musl", f"{machine}-unknown-linux-gnu")


def _beside_shim(real: Path) -> Iterator[Path]:
    package = real.parent.parent
    platforms = [*package.parent.glob("codex-*"), *package.glob("node_modules/@openai/codex-*"), package]
    # pnpm keeps a package's dependencies beside its own real directory, npm and bun above it.
    for directory in [*package.parents][1:3]:
        platforms += directory.glob("@openai/codex-*")
    for root in platforms:
        for triple in _triples():
            for inside in ("bin", "codex"):
                yield root / "vendor" / triple / inside / "codex"


def _of_python(found: Path, real: Path) -> Iterator[Path]:
    if real.suffix in ("", ".py") and _is_script(real):
        for prefix in (found.parent.parent, real.parent.parent):
            for package in prefix.glob("lib/python3*/site-packages/codex_cli_bin"):
                yield from package.glob("bin/codex")
                yield from package.glob("**/bin/codex")


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as source:
            return source.read(2) == b"#!"
    except OSError:
        return False
