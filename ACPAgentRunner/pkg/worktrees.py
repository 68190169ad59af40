"""A git worktree for each chat, so that several chats can work on one repository without meeting in its files.

The worktree lies in ``.worktrees/NAME`` below the repository's top directory, detached at the commit that was checked out
when the chat first needed it, and is listed in the repository's own ``info/exclude``. It is made once, found again for every
later message, and never removed: what an agent did in it belongs to people.

It is made in the agent's own place by one small POSIX shell program under the supervisor. What is in a repository, its own
configuration included, was perhaps written by an agent that may do less than this program, so nothing of it is obeyed that
runs a command (hooks, a file system monitor, filters, a way to fetch what is missing) and nothing that leads elsewhere: a
configured work tree, and links on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from pkg import limits, traceless
from pkg.errors import LaunchError
from pkg.process_api import Command, Launcher

log = logging.getLogger(__name__)

_NO_GIT: Final = 70
_NO_REPOSITORY: Final = 71
_UNSAFE: Final = 73
_OUTSIDE: Final = 74
_PROGRAM: Final = r"""
set -uf
command -v git >/dev/null 2>&1 || exit 70
g() { git -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
top=$(g rev-parse --show-toplevel) || exit 71
prefix=$(g rev-parse --show-prefix) || exit 71
g rev-parse --verify --quiet HEAD >/dev/null || exit 71
name=$1
shift
inside=$#
for root do
  case $top/ in "$root"/*) inside=0 ;; esac
done
[ "$inside" -eq 0 ] || exit 74
[ "$(cd "$top" && g rev-parse --absolute-git-dir)" = "$(g rev-parse --absolute-git-dir)" ] || exit 73
mkdir -p "$top/.worktrees" || exit 72
[ "$(cd "$top/.worktrees" && pwd -P)" = "$(cd "$top" && pwd -P)/.worktrees" ] || exit 73
tree=$top/.worktrees/$name
[ -L "$tree" ] && exit 73
if ! [ -e "$tree/.git" ]; then
  count=0
  filters=$(g config --includes --show-scope --name-only --get-regexp '^filter\.') || [ $? -eq 1 ] || exit 72
  while IFS='	' read -r scope key; do
    case $scope in local|worktree) ;; *) continue ;; esac
    case $key in *.required) value=false ;; *) value= ;; esac
    export "GIT_CONFIG_KEY_$count=$key" "GIT_CONFIG_VALUE_$count=$value"
    count=$((count + 1))
  done <<END
$filters
END
  export GIT_CONFIG_COUNT=$count
  while [ "$count" -gt 0 ]; do
    count=$((count - 1))
    eval "key=\$GIT_CONFIG_KEY_$count value=\$GIT_CONFIG_VALUE_$count"
    [ "$(g config --get "$key")" = "$value" ] || exit 73
  done
  common=$(cd "$(g rev-parse --git-common-dir)" && pwd -P) || exit 72
  mkdir -p "$common/info" || exit 72
  if ! [ -L "$common/info" ] && ! [ -L "$common/info/exclude" ]; then
    grep -qxF /.worktrees/ "$common/info/exclude" 2>/dev/null || printf '/.worktrees/\n' >>"$common/info/exclude" || exit 72
  fi
  g worktree prune
  g worktree add --detach --quiet "$tree" >&2 || exit 72
fi
way=$tree
IFS=/
for part in $prefix; do
  way=$way/$part
  [ -L "$way" ] && exit 73
  [ -d "$way" ] || mkdir "$way" || exit 72
done
printf '%s/%s' "$tree" "$prefix"
"""
_ENVIRONMENT: Final = {
    "GIT_TERMINAL_PROMPT": "0",
    # What is missing is fetched by a command that the repository names.
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}


async def worktree(launcher: Launcher, workspace: str, name: str, roots: Iterable[str] = ()) -> str:
    """The directory in worktree ``name`` that corresponds to ``workspace``; one call at a time per name.

    ``roots`` are real paths: with any, the repository's top directory has to be one of them, or below. Raises
    :class:`pkg.errors.LaunchError`: ``coding.worktree_no_git``, ``coding.worktree_no_repository`` (none, or no commit
    yet), ``coding.worktree_unsafe``, ``coding.policy_workspace_outside``, ``coding.worktree_failed``, and what the launcher
    raises.
    """
    command = Command(("/bin/sh", "-c", _PROGRAM, "sh", name, *roots), workspace, _ENVIRONMENT)
    process = await launcher.start(command)
    try:
        async with traceless.within(limits.WORKTREE_SECONDS):
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
    keys = {
        _NO_GIT: "coding.worktree_no_git",
        _NO_REPOSITORY: "coding.worktree_no_repository",
        _UNSAFE: "coding.worktree_unsafe",
        _OUTSIDE: "coding.policy_workspace_outside",
    }
    raise LaunchError(keys.get(code, "coding.worktree_failed"))
