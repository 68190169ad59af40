"""A git worktree for each chat: made once, found again, never meeting another's files, and no command of the repository run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pkg.agent_api import Prompt, TextDelta
from pkg.errors import LaunchError
from pkg.launch import LocalLauncher
from pkg.worktrees import worktree
from testkit.run_harness import harness
from testkit.scripted_driver import ScriptedDriver, ScriptedSession

IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", directory, *arguments], capture_output=True, text=True, check=True, env={**os.environ, **IDENTITY}
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and a subdirectory."""
    path = tmp_path / "repository"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file").write_text("committed\n")
    git(path, "init", "--quiet")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "first")
    return path


@pytest.mark.asyncio
async def test_a_worktree_is_made_once_and_found_again_with_its_changes(repository: Path) -> None:
    """Our rule: what an agent did in it stays."""
    first = Path(await worktree(LocalLauncher(), str(repository), "one"))
    assert (first / "sub" / "file").read_text() == "committed\n"
    (first / "sub" / "file").write_text("changed\n")
    assert Path(await worktree(LocalLauncher(), str(repository), "one")) == first
    assert (first / "sub" / "file").read_text() == "changed\n"
    other = Path(await worktree(LocalLauncher(), str(repository), "two"))
    assert other != first
    assert (other / "sub" / "file").read_text() == "committed\n"
    assert git(repository, "status", "--porcelain") == ""


@pytest.mark.asyncio
async def test_a_workspace_below_the_top_keeps_its_place(repository: Path) -> None:
    """Our rule: the same subdirectory, also when the commit does not have it."""
    assert await worktree(LocalLauncher(), str(repository / "sub"), "one") == str(repository / ".worktrees" / "one" / "sub")
    (repository / "new").mkdir()
    assert Path(await worktree(LocalLauncher(), str(repository / "new"), "one")).is_dir()


@pytest.mark.asyncio
async def test_a_removed_worktree_is_made_anew(repository: Path) -> None:
    """Our rule: people may remove one as they like."""
    path = await worktree(LocalLauncher(), str(repository), "one")
    shutil.rmtree(path)
    assert await worktree(LocalLauncher(), str(repository), "one") == path
    assert (Path(path) / "sub" / "file").exists()


@pytest.mark.asyncio
async def test_hooks_and_monitors_of_the_repository_do_not_run(repository: Path, tmp_path: Path) -> None:
    """Our rule: text in a repository never becomes a command of ours."""
    trace = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(program.read_text())
    hook.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    await worktree(LocalLauncher(), str(repository), "one")
    assert not trace.exists()


def _filter(repository: Path, program: str, *, included: bool) -> None:
    """Let the repository's own configuration filter its file, under a name that is awkward to override."""
    (repository / ".gitattributes").write_text("sub/file filter=a=b.c\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "filtered")
    file = repository / ".git" / ("more" if included else "config")
    with file.open("a") as config:
        config.write(f'[filter "a=b.c"]\n\tsmudge = {program}; cat\n\tclean = {program}; cat\n\trequired = true\n')
    if included:
        git(repository, "config", "include.path", "more")


@pytest.mark.asyncio
@pytest.mark.parametrize("included", [False, True], ids=["in the config", "in an included file"])
async def test_filters_of_the_repository_do_not_run(repository: Path, tmp_path: Path, included: bool) -> None:
    """Our rule: text in a repository never becomes a command of ours, whatever part of git would run it."""
    trace = tmp_path / "ran"
    _filter(repository, f"touch {trace}", included=included)
    trace.unlink(missing_ok=True)
    made = Path(await worktree(LocalLauncher(), str(repository), "one"))
    assert not trace.exists()
    assert (made / "sub" / "file").read_text() == "committed\n"


@pytest.mark.asyncio
async def test_the_accounts_own_filters_go_on_working(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: what the account has configured for itself (large files, for example) is its own."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text('[filter "own"]\n\tsmudge = tr a-z A-Z\n')
    (repository / ".gitattributes").write_text("sub/file filter=own\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "filtered")
    monkeypatch.setenv("HOME", str(home))
    made = Path(await worktree(LocalLauncher(), str(repository), "one"))
    assert (made / "sub" / "file").read_text() == "COMMITTED\n"


@pytest.mark.asyncio
async def test_what_a_repository_lacks_is_not_fetched_by_its_own_command(repository: Path, tmp_path: Path) -> None:
    """Our rule: as before; a partial clone names the command that fetches."""
    trace = tmp_path / "ran"
    blob = git(repository, "rev-parse", "HEAD:sub/file").strip()
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for name, value in (
        ("remote.own.url", str(tmp_path)),
        ("remote.own.promisor", "true"),
        ("remote.own.uploadpack", f"touch {trace}; false"),
        ("extensions.partialClone", "own"),
        ("core.repositoryFormatVersion", "1"),
    ):
        git(repository, "config", name, value)
    with pytest.raises(LaunchError) as caught:
        await worktree(LocalLauncher(), str(repository), "one")
    assert caught.value.code == "coding.worktree_failed"
    assert not trace.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["trees are elsewhere", "the tree is elsewhere", "work tree elsewhere", "a link in the tree"])
async def test_nothing_is_made_elsewhere(repository: Path, tmp_path: Path, way: str) -> None:
    """Our rule: neither a link nor a setting in a repository leads this account's own writing out of it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    workspace = repository
    if way == "trees are elsewhere":
        (repository / ".worktrees").symlink_to(elsewhere)
    elif way == "the tree is elsewhere":
        (elsewhere / ".git").write_text("gitdir: here\n")
        (repository / ".worktrees").mkdir()
        (repository / ".worktrees" / "one").symlink_to(elsewhere)
    elif way == "work tree elsewhere":
        git(repository, "config", "core.worktree", str(tmp_path))
    else:
        (repository / "linked").symlink_to(elsewhere)
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", "linked")
        (repository / "linked").unlink()
        workspace = repository / "linked" / "new"
        workspace.mkdir(parents=True)
    before = sorted(each.name for each in elsewhere.iterdir())
    with pytest.raises(LaunchError) as caught:
        await worktree(LocalLauncher(), str(workspace), "one")
    assert caught.value.code == "coding.worktree_unsafe"
    assert sorted(each.name for each in elsewhere.iterdir()) == before
    assert not (tmp_path / ".worktrees").exists()


@pytest.mark.asyncio
async def test_the_repository_found_has_to_be_inside_the_roots(repository: Path) -> None:
    """Our rule: what git takes for the repository counts, and not the first thing that looks like one."""
    workspace = repository / "sub" / "deep"
    (workspace / ".git").mkdir(parents=True)
    with pytest.raises(LaunchError) as caught:
        await worktree(LocalLauncher(), str(workspace), "one", [str(repository / "sub")])
    assert caught.value.code == "coding.policy_workspace_outside"
    assert not (repository / ".worktrees").exists()
    assert await worktree(LocalLauncher(), str(workspace), "one", ["/elsewhere", str(repository)])


@pytest.mark.asyncio
@pytest.mark.parametrize("made", ["nothing", "empty repository"])
async def test_without_a_commit_there_is_no_worktree(tmp_path: Path, made: str) -> None:
    """Our rule: said in words, with a code of its own."""
    if made == "empty repository":
        git(tmp_path, "init", "--quiet")
    with pytest.raises(LaunchError) as caught:
        await worktree(LocalLauncher(), str(tmp_path), "one")
    assert caught.value.code == "coding.worktree_no_repository"
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.asyncio
async def test_what_git_cannot_do_is_one_error(repository: Path) -> None:
    """Our rule: git's own words go to the log."""
    (repository / ".worktrees").write_text("in the way")
    with pytest.raises(LaunchError) as caught:
        await worktree(LocalLauncher(), str(repository), "one")
    assert caught.value.code == "coding.worktree_failed"


@pytest.mark.asyncio
async def test_two_chats_work_in_two_worktrees_and_a_chats_people_share_theirs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our rule: the worktree belongs to the chat, the session to the person in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    async def script(session: ScriptedSession, prompt: Prompt) -> str | None:
        session.emit(TextDelta(session.spec.cwd))
        return None

    async with harness(repository, ScriptedDriver(script), workspace_mode="worktree") as h:
        first = await h.run("one")
        again = await h.run("two", run_id="r2")
        colleague = await h.run("three", run_id="r3", actor="8")
        other = await h.run("four", run_id="r4", conversation="other")
    assert first.shown == again.shown == colleague.shown
    assert first.shown != other.shown
    assert len(h.driver.sessions) == 3
