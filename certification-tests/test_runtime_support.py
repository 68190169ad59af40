"""Where and how a native process may live: worker shapes, environment, search path, workspaces, the session guard."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pkg import limits, runtime_support, texts
from pkg.errors import CodingError, CommandNotFound, LaunchError, Refused, SessionUnavailable, SettingsError
from pkg.runtime_support import (
    WorkerShape,
    child_environment,
    find_executable,
    home_directory,
    local_workspace,
    search_path,
    secret_values,
    session_guard,
    worker_shape,
)

BOUND = 20.0


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """A small command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------ worker shapes


@pytest.mark.parametrize(
    ("environ", "has_data", "shape"),
    [
        ({}, False, WorkerShape.DEBUG),
        ({"HOME": "/tmp"}, True, WorkerShape.DEBUG),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "oss_dev"}, False, WorkerShape.DEDICATED),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/home"}, True, WorkerShape.JAIL),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/tmp"}, False, WorkerShape.POOL),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/tmp"}, True, WorkerShape.POOL),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared", "HOME": "/home"}, False, WorkerShape.POOL),
        ({"LANGBOT_PLUGIN_RUNTIME_PROFILE": "of-tomorrow", "HOME": "/home"}, True, WorkerShape.POOL),
    ],
)
def test_the_worker_shape_is_told_from_its_environment(
    environ: dict[str, str], has_data: bool, shape: WorkerShape, tmp_path: Path
) -> None:
    """The SDK's facts (0.7.18): the profile, HOME and the data mount tell; what is unknown may do least."""
    assert worker_shape(environ, tmp_path if has_data else tmp_path / "absent") is shape


# ------------------------------------------------------------------ environment


def test_a_child_gets_only_what_the_allowlist_lets_through() -> None:
    """Our rule: the worker's own variables, other credentials and an outer agent session stay behind."""
    environ = {
        "HOME": "/home/me",
        "LANG": "de_DE.UTF-8",
        "LC_TIME": "C",
        "TZ": "Europe/Berlin",
        "HTTPS_PROXY": "http://proxy:1",
        "no_proxy": "localhost",
        "NODE_EXTRA_CA_CERTS": "/ca.pem",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": "/x",
        "PYTHONUNBUFFERED": "1",
        "LANGBOT_PLUGIN_REGISTRATION_CAPABILITY": "secret",
        "LANGBOT_PLUGIN_RUNTIME_PROFILE": "oss_dev",
        "CLAUDECODE": "1",
        "CLAUDE_CODE_ENTRYPOINT": "cli",
        "OPENAI_API_KEY": "secret",
        "SSH_AUTH_SOCK": "/sock",
        "LD_PRELOAD": "/evil.so",
        "npm_config_prefix": "/x",
        "VIRTUAL_ENV": "/venv",
    }
    env = child_environment(environ=environ)
    kept = {"HOME", "LANG", "LC_TIME", "TZ", "HTTPS_PROXY", "no_proxy", "NODE_EXTRA_CA_CERTS"}
    assert {name: env[name] for name in kept} == {name: environ[name] for name in kept}
    added = {"PATH", "USER", "LOGNAME", "SHELL", "TERM", "NPM_CONFIG_LOGLEVEL", "NPM_CONFIG_UPDATE_NOTIFIER", "NPM_CONFIG_FUND"}
    assert set(env) == kept | added
    assert child_environment(ssh_agent=True, environ=environ)["SSH_AUTH_SOCK"] == "/sock"


def test_a_child_of_a_bare_worker_gets_a_whole_environment() -> None:
    """Our rule: a worker without PATH, HOME and language still gives its agents all of them."""
    env = child_environment(environ={"PYTHONPATH": "/x"})
    assert Path(env["HOME"]).is_absolute()
    assert {"/usr/bin", "/bin"} <= set(env["PATH"].split(":"))
    assert env["LANG"] == "C.UTF-8"
    assert env["NPM_CONFIG_LOGLEVEL"] == "error"
    assert env["NPM_CONFIG_UPDATE_NOTIFIER"] == "false"
    assert all(env[name] for name in ("USER", "LOGNAME", "SHELL", "TERM"))


def test_what_the_form_names_wins_and_may_be_anything() -> None:
    """Our rule: the allowlist is for what is inherited; what an operator writes down on purpose is passed on."""
    env = child_environment({"CLAUDE_CODE_USE_BEDROCK": "1", "TERM": "xterm", "PATH": "/opt/tools:relative"}, environ={})
    assert env["CLAUDE_CODE_USE_BEDROCK"] == "1"
    assert env["TERM"] == "xterm"
    assert env["PATH"].split(":")[0] == "/opt/tools"
    assert "relative" not in env["PATH"]


@pytest.mark.parametrize("extra", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "canary\0"}])
def test_an_impossible_entry_is_one_clear_error_without_its_value(extra: dict[str, str]) -> None:
    """Our rule: what no environment can hold is refused by name; the value, maybe a secret, is not repeated."""
    with pytest.raises(SettingsError) as caught:
        child_environment(extra)
    assert caught.value.code == "coding.env_invalid"
    assert caught.value.params["field"] == "env-json"
    assert "canary" not in str(caught.value) + repr(caught.value.params)


def test_building_environments_changes_nothing_here() -> None:
    """Our rule: ``os.environ`` is only read."""
    before = dict(os.environ)
    child_environment({"A": "1"}, recorded_path="/opt/bin")
    assert dict(os.environ) == before


def test_only_values_that_can_be_secrets_are_hidden() -> None:
    """Our rule: public names and short values are no secrets; everything else of the form is, proxies included."""
    extra = {"KEY": "abcdefg", "FLAG": "true", "PATH": "/usr/local/bin", "HTTPS_PROXY": "http://u:p@h", "LANG": "en_US.UTF-8"}
    assert secret_values(extra) == ("abcdefg", "http://u:p@h")


# ------------------------------------------------------------------ search path and commands


def test_the_search_path_has_the_users_own_directories(tmp_path: Path) -> None:
    """Our rule: a given path first, else the recorded one, else ours; then the existing places people install to."""
    for name in (".local/bin", ".volta/bin", ".nvm/versions/node/v9.11.2/bin", ".nvm/versions/node/v20.1.0/bin"):
        (tmp_path / name).mkdir(parents=True)
    environ = {"HOME": str(tmp_path), "PATH": "/own/bin"}
    entries = search_path("", environ=environ).split(":")
    assert entries[0] == "/own/bin"
    assert str(tmp_path / ".local/bin") in entries
    assert str(tmp_path / ".volta/bin") in entries
    assert str(tmp_path / ".asdf/shims") not in entries, "only what exists"
    assert entries[-1] == str(tmp_path / ".nvm/versions/node/v20.1.0/bin"), "the newest of the manager's versions"
    assert len(entries) == len(set(entries))
    assert search_path("", recorded="/rec/bin", environ=environ).startswith("/rec/bin:")
    assert search_path("/giv/bin", recorded="/rec/bin", environ=environ).startswith("/giv/bin:")


def test_a_home_without_a_variable_comes_from_the_account() -> None:
    """Our rule: without a usable HOME the passwd entry counts."""
    assert home_directory({"HOME": "/somewhere"}) == "/somewhere"
    assert Path(home_directory({})).is_absolute()
    assert home_directory({"HOME": "relative"}) == home_directory({})


def test_a_command_is_found_where_the_child_would_find_it(tmp_path: Path) -> None:
    """Our rule: absolute, first match that can be run, links kept as they are called, relative paths from the workspace."""
    tool = executable(tmp_path / "one" / "tool")
    (tmp_path / "zero" / "tool").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tool").write_text("not executable")
    (tmp_path / "shim").symlink_to(tool)
    path = ":".join(str(tmp_path / name) for name in ("zero", "none", "one"))
    assert find_executable("tool", path) == str(tool)
    assert find_executable(str(tmp_path / "shim"), path) == str(tmp_path / "shim")
    assert find_executable("./one/tool", path, cwd=tmp_path) == str(tmp_path / "one/tool")


def test_a_missing_command_says_where_it_was_looked_for_but_not_in_the_chat(tmp_path: Path) -> None:
    """Our rule: the places are kept, because on a service they differ from a terminal's, apart from what people read there."""
    with pytest.raises(CommandNotFound) as missing:
        find_executable("tool", f"{tmp_path}/a:{tmp_path}/b")
    assert missing.value.code == "coding.agent_not_found"
    assert missing.value.params == {"name": "tool"}
    assert missing.value.places == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert str(tmp_path) not in str(missing.value)
    assert missing.value.for_log == f"coding.agent_not_found (looked for tool in {tmp_path}/a, {tmp_path}/b)"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tool").write_text("")
    with pytest.raises(LaunchError) as caught:
        find_executable("tool", f"{tmp_path}/a:{tmp_path}/b")
    assert caught.value.code == "coding.agent_not_executable"


# ------------------------------------------------------------------ workspaces


def test_a_configured_workspace_is_its_real_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: links are resolved once, here; ``~`` is the account's home."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert local_workspace(f" {tmp_path}/link ", shape=WorkerShape.DEDICATED) == (tmp_path / "real").resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_workspace("~/link", shape=WorkerShape.DEDICATED) == (tmp_path / "real").resolve()


@pytest.mark.parametrize("shape", [WorkerShape.DEBUG, WorkerShape.DEDICATED])
def test_without_a_workspace_the_current_directory_counts(
    shape: WorkerShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The established rule; a stock worker stands in its own read-only code, which is then a clear error."""
    monkeypatch.chdir(tmp_path)
    assert local_workspace("", shape=shape) == tmp_path.resolve()
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(LaunchError) as caught:
            local_workspace("", shape=shape)
    finally:
        tmp_path.chmod(0o755)
    assert caught.value.code == "coding.workspace_unset"


def test_a_jail_makes_its_own_workspace(tmp_path: Path) -> None:
    """Our rule: per installation, below its data directory, for nobody else to read."""
    workspace = local_workspace("", shape=WorkerShape.JAIL, data=tmp_path)
    assert workspace == (tmp_path / "workspace").resolve()
    assert stat.S_IMODE(workspace.stat().st_mode) == 0o700
    assert local_workspace("", shape=WorkerShape.JAIL, data=tmp_path) == workspace


def test_the_pool_has_no_place_for_an_agent(tmp_path: Path) -> None:
    """Our rule: refused whatever is configured, in words that name the two other places."""
    for configured in ("", str(tmp_path)):
        with pytest.raises(Refused) as caught:
            local_workspace(configured, shape=WorkerShape.POOL)
        assert caught.value.code == "coding.local_in_pool"
        assert "daemon" in str(caught.value)
        assert "remote-ssh" in str(caught.value)


@pytest.mark.parametrize(
    ("configured", "shape", "code"),
    [
        ("{root}/missing", WorkerShape.DEDICATED, "coding.workspace_missing"),
        ("{root}/missing", WorkerShape.JAIL, "coding.workspace_not_visible"),
        ("{root}/file", WorkerShape.DEDICATED, "coding.workspace_not_directory"),
        ("{root}/file/below", WorkerShape.DEDICATED, "coding.workspace_not_directory"),
        ("{root}/loop", WorkerShape.DEDICATED, "coding.workspace_missing"),
        ("{root}/readonly", WorkerShape.DEDICATED, "coding.workspace_not_writable"),
        ("{root}/readonly", WorkerShape.JAIL, "coding.workspace_not_writable"),
        ("{root}/to-root", WorkerShape.DEDICATED, "coding.workspace_root"),
        ("/", WorkerShape.DEDICATED, "coding.workspace_root"),
        ("/usr/..", WorkerShape.DEBUG, "coding.workspace_root"),
        ("relative/path", WorkerShape.DEDICATED, "coding.workspace_relative"),
        ("{root}/nul\0", WorkerShape.DEDICATED, "coding.workspace_missing"),
        ("{root}/" + "x" * 300, WorkerShape.DEDICATED, "coding.workspace_missing"),
    ],
)
def test_an_unusable_workspace_is_one_clear_error(configured: str, shape: WorkerShape, code: str, tmp_path: Path) -> None:
    """Our rule: each way a workspace can be wrong has its own code and a text that shows no path."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to-root").symlink_to("/")
    (tmp_path / "readonly").mkdir(mode=0o555)
    with pytest.raises(CodingError) as caught:
        local_workspace(configured.format(root=tmp_path), shape=shape, data=tmp_path)
    assert caught.value.code == code
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_workspace_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Our rule: what the account itself may not write to is refused before anything starts."""
    tmp_path.chmod(0o755)
    script = (
        "import os,sys;sys.path.insert(0,sys.argv[1]);from pkg import runtime_support as r;"
        "os.setgroups([]);os.setgid(65534);os.setuid(65534)\n"
        "try: r.local_workspace(sys.argv[2],shape=r.WorkerShape.DEDICATED)\n"
        "except r.LaunchError as e: print(e.code)"
    )
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    package = str(Path(runtime_support.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script, package, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "coding.workspace_not_writable\n"


def test_every_code_has_a_text() -> None:
    """Our rule: a code without a text would be shown as itself."""
    catalogue = texts.catalogue("en_US")
    sources = [Path(runtime_support.__file__).with_name(name) for name in ("runtime_support.py", "supervised_process.py")]
    words = {
        word for source in sources for word in source.read_text().replace("`", '"').split('"') if word.startswith("coding.")
    }
    assert len(words) > 12
    assert words <= set(catalogue)


# ------------------------------------------------------------------ session guard


@pytest.mark.asyncio
async def test_a_session_has_one_writer(tmp_path: Path) -> None:
    """Our rule: same real path and session wait and then fail; another session, path or account is independent."""
    workspace, other, state = tmp_path / "w", tmp_path / "o", tmp_path / "state"
    workspace.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(workspace)
    async with session_guard(state, workspace, "s1"):
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        with pytest.raises(SessionUnavailable) as caught:
            async with session_guard(state, tmp_path / "link", "s1", wait=0.0):
                raise AssertionError("two writers")
        assert caught.value.code == "coding.session_busy"
        async with (
            session_guard(state, workspace, "s2", wait=0.0),
            session_guard(state, other, "s1", wait=0.0),
            session_guard(tmp_path / "another account", workspace, "s1", wait=0.0),
        ):
            pass
    async with session_guard(state, workspace, "s1", wait=0.0):
        pass
    assert list(state.iterdir()) == [], "no lock file stays behind"


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["half \ud800", "raw \udcff", "nul \0", "../../up", "n" * 100_000])
async def test_a_session_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Bad input: an id is data of an agent's or a hub's, and never part of a path."""
    async with session_guard(tmp_path / "state", tmp_path, name):
        assert len(list((tmp_path / "state").iterdir())) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


@pytest.mark.asyncio
async def test_waiting_for_a_session_never_blocks_the_loop(tmp_path: Path) -> None:
    """Our rule: a waiter gets the session once it is free, and everything else goes on meanwhile."""
    order: list[str] = []

    async def second() -> None:
        async with session_guard(tmp_path / "state", tmp_path, "s", wait=BOUND):
            order.append("second")

    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group, session_guard(tmp_path / "state", tmp_path, "s"):
        group.create_task(second())
        for _ in range(20):
            await asyncio.sleep(limits.SESSION_GUARD_POLL / 10)
        order.append("first")
    assert order == ["first", "second"]


@pytest.mark.asyncio
async def test_locks_of_killed_processes_do_not_pile_up(tmp_path: Path) -> None:
    """Our rule: the next lock removes what killed writers left, and leaves alone what somebody holds."""
    state = tmp_path / "state"
    script = (
        "import asyncio,os,signal,sys;sys.path.insert(0,sys.argv[1])\n"
        "from pathlib import Path;from pkg import runtime_support as r\n"
        "async def main():\n"
        "  async with r.session_guard(Path(sys.argv[2]),sys.argv[2],sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    package = str(Path(runtime_support.__file__).parents[1])
    state.mkdir(mode=0o700)
    async with session_guard(state, tmp_path, "held"):
        held = {path.name for path in state.iterdir()}
        for session in ("a", "b"):
            command = [sys.executable, "-c", script, package, str(state), session]
            done = await asyncio.to_thread(subprocess.run, command, check=False, timeout=BOUND)
            assert done.returncode == -signal.SIGKILL
        assert len(list(state.iterdir())) == 2, "the second killed writer removed what the first had left"
        async with session_guard(state, tmp_path, "next"):
            assert len({path.name for path in state.iterdir()} - held) == 1
        assert {path.name for path in state.iterdir()} == held


@pytest.mark.asyncio
async def test_many_writers_follow_each_other(tmp_path: Path) -> None:
    """Our rule: removing a lock file never lets two in: of thirty writers there is never more than one inside."""
    inside = 0

    async def writer() -> None:
        nonlocal inside
        async with session_guard(tmp_path / "state", tmp_path, "s", wait=BOUND):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(writer())


def test_writers_of_many_processes_never_meet(tmp_path: Path) -> None:
    """Our rule: also where one process removes the lock file that another has just opened, only one is inside."""
    script = (
        "import asyncio,os,sys;sys.path.insert(0,sys.argv[1]);from pathlib import Path;from pkg import limits;"
        "from pkg.runtime_support import session_guard\n"
        "limits.SESSION_GUARD_POLL=0.0\n"
        "async def main():\n"
        "  for _ in range(300):\n"
        "    async with session_guard(Path(sys.argv[2])/'state',sys.argv[2],'s',wait=60):\n"
        "      os.close(os.open(sys.argv[2]+'/inside',os.O_CREAT|os.O_EXCL)); await asyncio.sleep(0)\n"
        "      os.unlink(sys.argv[2]+'/inside')\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", script, str(Path(runtime_support.__file__).parents[1]), str(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ends = [(writer.communicate(timeout=60)[1], writer.returncode) for writer in writers]
    assert ends == [("", 0)] * 4


@pytest.mark.asyncio
async def test_a_killed_writer_frees_its_session_though_its_children_live(tmp_path: Path) -> None:
    """Our rule: the kernel lets go of the session when its holder dies, and no child inherited it."""
    script = (
        "import asyncio,sys,subprocess;sys.path.insert(0,sys.argv[1]);from pathlib import Path;"
        "from pkg.runtime_support import session_guard\n"
        "async def main():\n"
        "  async with session_guard(Path(sys.argv[2]),sys.argv[3],'s'):\n"
        "    print(subprocess.Popen(['sleep','60'],stdout=subprocess.DEVNULL).pid,flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(Path(runtime_support.__file__).parents[1]), str(tmp_path / "state"), str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND):
        assert holder.stdout is not None
        child = int(await holder.stdout.readline())
        try:
            with pytest.raises(SessionUnavailable):
                async with session_guard(tmp_path / "state", tmp_path, "s", wait=0.0):
                    raise AssertionError("two writers")
            holder.kill()
            await holder.wait()
            async with session_guard(tmp_path / "state", tmp_path, "s"):
                assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, 9)


@pytest.mark.asyncio
async def test_a_state_directory_that_is_not_ours_alone_is_refused_or_closed(tmp_path: Path) -> None:
    """Our rule: a wider directory of ours is closed; a link, a file or somebody else's directory is refused."""
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    async with session_guard(wide, tmp_path, "s"):
        assert stat.S_IMODE(wide.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(wide)
    (tmp_path / "file").write_text("")
    bad = [tmp_path / "link", tmp_path / "file"]
    if os.getuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)
        bad.append(foreign)
    for directory in bad:
        with pytest.raises(SessionUnavailable) as caught:
            async with session_guard(directory, tmp_path, "s"):
                raise AssertionError("an unsafe place was used")
        assert caught.value.code == "coding.state_unusable"
