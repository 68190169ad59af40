"""A git worktree for each chat, so that several chats can work on one repository without meeting in its files.

The worktree lies in ``.worktrees/NAME`` below the repository's top directory, detached at the commit that was checked out
when the chat first needed it, and is listed in the repository's own ``info/exclude``. It is made once, found again for every
later message, and never removed: what an agent did in it belongs to people.

It is made in the agent's own place by one small POSIX shell program under the supervisor, without hooks or a file system
monitor of the repository (both would run commands of its choosing).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pkg import limits
from pkg.errors import LaunchError
from pkg.process_api import Command, Launcher

log = logging.getLogger(__name__)

_NO_GIT: Final = 70
_NO_REPOSITORY: Final = 71
_PROGRAM: Final = r"""
set -u
command -v git >/dev/null 2>&1 || exit 70
g() { git -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
top=$(g rev-parse --show-toplevel) || exit 71
prefix=$(g rev-parse --show-prefix) || exit 71
g rev-parse --verify --quiet HEAD >/dev/null || exit 71
tree=$top/.worktrees/$1
if ! [ -e "$tree/.git" ]; then
  common=$(cd "$(g rev-parse --git-common-dir)" && pwd) || exit 72
  mkdir -p "$common/info" || exit 72
  grep -qxF /.worktrees/ "$common/info/exclude" 2>/dev/null || printf '/.worktrees/\n' >>"$common/info/exclude" || exit 72
  g worktree prune
  g worktree add --detach --quiet "$tree" >&2 || exit 72
fi
mkdir -p "$tree/$prefix" || exit 72
printf '%s/%s' "$tree" "$prefix"
"""


async def worktree(launcher: Launcher, workspace: str, name: str) -> str:
    """The directory in worktree ``name`` that corresponds to ``workspace``; one call at a time per name.

    Raises :class:`pkg.errors.LaunchError`: ``coding.worktree_no_git``, ``coding.worktree_no_repository`` (none, or no commit
    yet), ``coding.worktree_failed``, and what the launcher raises.
    """
    command = Command(("/bin/sh", "-c", _PROGRAM, "sh", name), workspace, {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"})
    process = await launcher.start(command)
    try:
        async with asyncio.timeout(limits.WORKTREE_SECONDS):
            said = b""
            while piece := await process.read():
                said = (said + piece)[-limits.WORKTREE_PATH_BYTES :]
            code = (await process.wait()).code
    except TimeoutError:
        raise LaunchError("coding.worktree_failed", retryable=True) from None
    finally:
        await process.stop()
    path = said.decode("utf-8", "surrogateescape").rstrip("/")
    if code == 0 and path.startswith("/") and "\n" not in path:
        return path
    log.warning("no worktree (exit code %d): %s", code, process.stderr_tail())
    keys = {_NO_GIT: "coding.worktree_no_git", _NO_REPOSITORY: "coding.worktree_no_repository"}
    raise LaunchError(keys.get(code, "coding.worktree_failed"))
