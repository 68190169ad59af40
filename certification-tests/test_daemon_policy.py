"""The workstation's policy file: what is read, what stops the daemon, and what a job may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pkg.agent_api import McpServer, SessionSpec, to_json
from pkg.daemon_policy import Policy, PolicyError, SecretError, load, read_secret, workspace
from pkg.errors import CodingError, Refused

DRIVERS = ("acp",)
POLICIES = ("ask", "allow-edits", "allow-all", "deny", "vendor-value")
CANARY = "canary-Xq3vK8mW1xR5tY7u"

GOOD = """\
daemon_id = "laptop"
workspaces = ["src", "more"]
environment = ["OWN"]
job_environment = ["FROM_JOB"]
approvals = ["ask", "allow-all"]
max_jobs = 3

[[hubs]]
url = "wss://chat.example.org:8766"
key_file = "laptop.key"
certificate_sha256 = "AA:{pin}"

[[hubs]]
url = "ws://127.0.0.1:8766"
token_file = "token"

[agents.claude]
command = ["claude-agent-acp", "--flag"]

[agents."with.dot"]
driver = "acp"
command = ["other"]
workspaces = ["src/inner"]
environment = ["MORE"]
max_jobs = 1
""".replace("{pin}", ":".join(["0B"] * 31))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Policy]:
    """Writes a policy file beside two workspaces and loads it."""
    (tmp_path / "src" / "inner").mkdir(parents=True)
    (tmp_path / "more").mkdir()

    def write(text: str) -> Policy:
        file = tmp_path / "daemon.toml"
        file.write_text(text)
        file.chmod(0o600)
        return load(file, DRIVERS, POLICIES)

    return write


@pytest.fixture
def policy(written: Callable[[str], Policy]) -> Policy:
    """The good file."""
    return written(GOOD)


def job(agent: str = "claude", **fields: Any) -> Any:
    """A payload as a hub sends it."""
    return {
        "agent": agent,
        "driver": "acp",
        "tools": True,
        "spec": to_json(SessionSpec(**{"command": (), "cwd": "", **fields})),
    }


class TestTrust:
    """Whose workspaces are obeyed."""

    def test_only_the_owner_s_roots_are_trusted(self, written: Callable[[str], Policy], tmp_path: Path) -> None:
        """Our rule: below a trusted root the driver is told so, elsewhere not, also by a link; a job can not ask for it."""
        policy = written('trusted_workspaces = ["src/inner"]\n' + GOOD)
        (tmp_path / "src" / "inner" / "deep").mkdir()
        (tmp_path / "src" / "inner" / "out").symlink_to(tmp_path / "more")
        for cwd, trusted in (
            ("inner", True),
            ("inner/deep", True),
            ("", False),
            ("inner/out", False),
            (str(tmp_path / "more"), False),
        ):
            options = policy.admit(job(cwd=cwd)).spec.options
            assert options.get("trust_workspace", False) is trusted, cwd
        with pytest.raises(Refused):
            policy.admit(job(options={"trust_workspace": True}))
        assert written(GOOD).admit(job(cwd="inner")).spec.options == {}

    def test_a_trusted_root_must_exist(self, written: Callable[[str], Policy]) -> None:
        """A typing mistake here would be found out too late."""
        with pytest.raises(PolicyError, match="does not exist"):
            written('trusted_workspaces = ["srcc"]\n' + GOOD)


class TestFile:
    """Reading."""

    def test_a_good_file_is_read_whole(self, policy: Policy, tmp_path: Path) -> None:
        """Every key arrives, paths are relative to the file, what is common holds for each agent unless it is narrower."""
        assert policy.daemon_id == "laptop" and policy.max_jobs == 3
        assert [hub.url for hub in policy.hubs] == ["wss://chat.example.org:8766", "ws://127.0.0.1:8766"]
        assert policy.hubs[0].key_file == tmp_path / "laptop.key" and policy.hubs[1].token_file == tmp_path / "token"
        assert policy.hubs[0].certificate_sha256 == "aa" + "0b" * 31
        claude, other = policy.agents["claude"], policy.agents["with.dot"]
        assert claude.command == ("claude-agent-acp", "--flag") and claude.driver == "acp" and claude.max_jobs == 3
        assert claude.workspaces == (tmp_path / "src", tmp_path / "more") and claude.environment == ("OWN",)
        assert other.workspaces == (tmp_path / "src" / "inner",) and other.environment == ("OWN", "MORE")

    @pytest.mark.parametrize(
        ("old", "new", "line", "key", "problem"),
        [
            ('daemon_id = "laptop"', "daemon_id = laptop", 1, "", "nvalid"),
            ("max_jobs = 3", "max_jobs = 0", 6, "max_jobs", "number from 1"),
            ("max_jobs = 3", "max_jobs = true", 6, "max_jobs", "number from 1"),
            ("max_jobs = 3", "max_job = 3", 6, "max_job", "known"),
            ('daemon_id = "laptop"', 'daemonid = "laptop"', 1, "daemonid", "known"),
            ("[[hubs]]", "[[hub]]", 8, "hub", "known"),
            ("url = ", "uri = ", 9, "hubs.1.uri", "known"),
            ("command = [", "comand = [", 18, "agents.claude.comand", "known"),
            ('"allow-all"]', '"alow-all"]', 5, "approvals", '"alow-all" is none of: ask, allow-edits, allow-all, deny'),
            ('workspaces = ["src", "more"]', 'workspaces = ["src", "gone"]', 2, "workspaces", '"gone" does not exist'),
            ('workspaces = ["src", "more"]', 'workspaces = ["/"]', 2, "workspaces", "root"),
            ('workspaces = ["src", "more"]', "workspaces = []", 2, "workspaces", "no directory"),
            ('workspaces = ["src", "more"]', 'workspaces = ["src", "."]', 2, "workspaces", "this file lies inside"),
            ("max_jobs = 3", 'max_jobs = 3\nstate_dir = "more/state"', 2, "workspaces", "state_dir lies inside"),
            ('key_file = "laptop.key"', 'key_file = "src/laptop.key"', 2, "workspaces", "a key or token lies inside"),
            ('token_file = "token"', 'token_file = "more/token"', 2, "workspaces", "a key or token lies inside"),
            ('environment = ["OWN"]', 'environment = ["A=B"]', 3, "environment", "no name"),
            ('environment = ["OWN"]', 'environment = ["CODING_DAEMON_TOKEN"]', 3, "environment", "secret"),
            ("wss://chat", "ws://chat", 9, "hubs.1.url", "insecure_plaintext"),
            ("wss://chat", "https://chat", 9, "hubs.1.url", "wss://"),
            ('certificate_sha256 = "AA:', 'certificate_sha256 = "', 11, "hubs.1.certificate_sha256", "64"),
            ('token_file = "token"', 'token = "x"', 15, "hubs.2.token", "known"),
            ('token_file = "token"', 'token_file = "token"\nkey_file = "k"', 15, "hubs.2.token_file", "key_file"),
            ('command = ["claude-agent-acp", "--flag"]', 'command = "claude"', 18, "agents.claude.command", "list"),
            ('command = ["claude-agent-acp", "--flag"]', "", 17, "agents.claude.command", "missing"),
            ('driver = "acp"', 'driver = "codex"', 21, "agents.with.dot.driver", "acp"),
            ('workspaces = ["src/inner"]', 'workspaces = ["."]', 23, "agents.with.dot.workspaces", "inside"),
            ("max_jobs = 1", 'mode = "x"', 25, "agents.with.dot.mode", "known"),
        ],
    )
    def test_a_bad_file_is_refused_with_file_line_and_key(
        self, written: Callable[[str], Policy], tmp_path: Path, old: str, new: str, line: int, key: str, problem: str
    ) -> None:
        """Nothing of it is used, and the owner is led to the place."""
        assert old in GOOD
        with pytest.raises(PolicyError) as bad:
            written(GOOD.replace(old, new, 1))
        assert (bad.value.file, bad.value.line, bad.value.key) == (tmp_path / "daemon.toml", line, key)
        assert problem in bad.value.problem
        assert str(bad.value).startswith(f"{tmp_path}/daemon.toml:{line}: ")

    def test_a_vendor_s_own_approval_policy_may_be_allowed(self, written: Callable[[str], Policy]) -> None:
        """What the package's own form takes besides ours is no mistake in its policy file."""
        assert written(GOOD.replace('"allow-all"]', '"vendor-value"]')).approvals == ("ask", "vendor-value")

    def test_what_is_not_said_is_not_allowed(self, written: Callable[[str], Policy]) -> None:
        """Where the file names no approval policies, options or variables, no job acts unasked, switches that, or sets any."""
        text = GOOD.replace('approvals = ["ask", "allow-all"]\n', "").replace('job_environment = ["FROM_JOB"]\n', "")
        policy = written(text)
        assert policy.approvals == ("ask", "allow-edits", "deny")
        assert policy.job_options == frozenset({"model"})
        assert not policy.job_environment
        assert not policy.trusted_workspaces

    @pytest.mark.parametrize("missing", ["daemon_id", "workspaces", "hubs", "agents"])
    def test_what_a_daemon_cannot_do_without(self, written: Callable[[str], Policy], missing: str) -> None:
        """Each part that is missing is named."""
        parts = {
            "daemon_id": 'daemon_id = "laptop"\n',
            "workspaces": 'workspaces = ["src"]\n',
            "hubs": '[[hubs]]\nurl = "ws://127.0.0.1:1"\n',
            "agents": '[agents.a]\ncommand = ["a"]\n',
        }
        written("".join(parts.values()))
        with pytest.raises(PolicyError) as bad:
            written("".join(text for name, text in parts.items() if name != missing))
        assert bad.value.key == missing

    def test_a_file_that_others_can_change_is_refused(self, written: Callable[[str], Policy], tmp_path: Path) -> None:
        """Whoever can write it could run commands here."""
        written(GOOD)
        (tmp_path / "daemon.toml").chmod(0o620)
        with pytest.raises(PolicyError, match="chmod go-w"):
            load(tmp_path / "daemon.toml", DRIVERS, POLICIES)

    @pytest.mark.parametrize("data", [b"daemon_id = '\xff'", b"#" * (300 * 1024), b"\n\n[agents\n"])
    def test_garbage_is_an_error_and_never_a_crash(self, tmp_path: Path, data: bytes) -> None:
        """Not UTF-8, too long, not TOML; and a file that is not there."""
        file = tmp_path / "daemon.toml"
        with pytest.raises(PolicyError):
            load(file, DRIVERS, POLICIES)
        file.write_bytes(data)
        file.chmod(0o600)
        with pytest.raises(PolicyError):
            load(file, DRIVERS, POLICIES)


class TestJobs:
    """What a job may ask for."""

    def test_an_admitted_job_runs_the_file_s_command_in_a_real_directory(self, policy: Policy, tmp_path: Path) -> None:
        """The command, the directory and the environment are the workstation's."""
        admitted = policy.admit(job(cwd="inner", env={"FROM_JOB": "x"}), {"OWN": CANARY, "OTHER": "no", "FROM_JOB": "hidden"})
        assert admitted.spec.command == ("claude-agent-acp", "--flag")
        assert admitted.spec.cwd == str(tmp_path / "src" / "inner")
        assert dict(admitted.spec.env) == {"OWN": CANARY, "FROM_JOB": "x"}
        assert admitted.tools
        assert CANARY not in repr(admitted)

    @pytest.mark.parametrize("asked", ["", "  ", "inner", "./inner/.."])
    def test_a_directory_below_the_first_root(self, policy: Policy, tmp_path: Path, asked: str) -> None:
        """Relative names count from there, and none at all means the root itself."""
        found = workspace(policy.workspaces, asked)
        assert found == (tmp_path / "src" / "inner" if asked == "inner" else tmp_path / "src")

    def test_a_directory_below_another_root(self, policy: Policy, tmp_path: Path) -> None:
        """Absolute names may lie below any root; an agent that is narrower keeps to its own."""
        assert policy.admit(job(cwd=str(tmp_path / "more"))).spec.cwd == str(tmp_path / "more")
        with pytest.raises(Refused) as refused:
            policy.admit(job("with.dot", cwd=str(tmp_path / "more")))
        assert refused.value.code == "coding.policy_workspace_outside"

    @pytest.mark.parametrize("asked", ["/", "/etc", "..", "../more/../..", "link", "link/sub", "chain", "~", "src\0x", "loop"])
    def test_no_name_leads_out(self, policy: Policy, tmp_path: Path, asked: str) -> None:
        """Dots, links, chains of links, loops and control characters: refused, whether there is anything out there or not."""
        outside = tmp_path / "outside"
        (outside / "sub").mkdir(parents=True)
        (tmp_path / "src" / "link").symlink_to(outside)
        (tmp_path / "src" / "chain").symlink_to("link")
        (tmp_path / "src" / "loop").symlink_to("loop")
        with pytest.raises(Refused):
            workspace(policy.workspaces, asked)

    def test_a_link_that_stays_inside_is_followed(self, policy: Policy, tmp_path: Path) -> None:
        """The agent works in the real directory."""
        (tmp_path / "src" / "here").symlink_to("inner")
        assert workspace(policy.workspaces, "here") == tmp_path / "src" / "inner"

    def test_outside_tells_nothing_of_what_exists(self, policy: Policy) -> None:
        """A hub can't explore the machine by asking for directories."""
        for asked in ("/etc", "/no/such/place"):
            with pytest.raises(Refused) as refused:
                workspace(policy.workspaces, asked)
            assert refused.value.code == "coding.policy_workspace_outside"

    def test_a_root_that_is_a_neighbour_by_name_only(self, policy: Policy, tmp_path: Path) -> None:
        """``src-secret`` does not lie in ``src``."""
        (tmp_path / "src-secret").mkdir()
        with pytest.raises(Refused):
            workspace(policy.workspaces, str(tmp_path / "src-secret"))

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"command": ("sh",)}, "policy_command_refused"),
            ({"env": {"PATH": "/tmp"}}, "policy_environment"),
            ({"env": {"OWN": "x"}}, "policy_environment"),
            ({"options": {"mode": "yolo"}}, "policy_option"),
            ({"options": {"config": {"a": "b"}}}, "policy_option"),
            ({"policy": "deny"}, "policy_approvals"),
            ({"policy": "bypassPermissions"}, "policy_approvals"),
            ({"mcp_servers": (McpServer("m", "stdio", command=("sh",)),)}, "policy_mcp_command"),
            ({"mcp_servers": (McpServer("m", "http", url="http://x", command=("sh",)),)}, "policy_mcp_command"),
        ],
    )
    def test_what_the_file_does_not_allow(self, policy: Policy, fields: dict[str, Any], code: str) -> None:
        """Each has its own code and a text that says what to change."""
        with pytest.raises(Refused) as refused:
            policy.admit(job(**fields))
        assert refused.value.code == f"coding.{code}"
        assert "{" not in str(refused.value) and not str(refused.value).startswith("coding.")

    def test_a_repository_that_begins_above_the_workspaces_is_said_in_words_of_its_own(
        self, policy: Policy, tmp_path: Path
    ) -> None:
        """The working directory is inside, but its worktrees would not be; without one the job runs."""
        (tmp_path / ".git").mkdir()
        payload = job(cwd="inner")
        policy.admit(payload)
        with pytest.raises(Refused) as refused:
            policy.admit(payload | {"worktree": "chat"})
        assert refused.value.code == "coding.policy_worktree_outside"
        assert "git repository" in str(refused.value) and '"workspaces"' in str(refused.value)

    def test_what_only_takes_from_an_agent_needs_no_permission(self, policy: Policy) -> None:
        """A job may keep its own secrets from the agent's commands, whatever options its owner allows."""
        strict = dataclasses.replace(policy, job_options=frozenset())
        assert strict.admit(job(options={"private": ["DB_PASS"]})).spec.options == {"private": ["DB_PASS"]}

    def test_servers_by_address_can_be_forbidden(self, policy: Policy) -> None:
        """They are allowed by default, and by one key not at all."""
        payload = job(mcp_servers=(McpServer("m", "http", url="http://x"),))
        policy.admit(payload)
        with pytest.raises(Refused) as refused:
            dataclasses.replace(policy, mcp_servers=False).admit(payload)
        assert refused.value.code == "coding.policy_mcp_refused"

    @pytest.mark.parametrize(
        "payload",
        [
            None,
            [],
            {},
            {"agent": "claude"},
            {"agent": 1, "driver": "acp", "spec": {}},
            {"agent": "claude", "driver": "acp", "spec": []},
        ],
    )
    def test_what_is_no_job(self, policy: Policy, payload: Any) -> None:
        """A payload of another shape is refused, not guessed at."""
        with pytest.raises(CodingError) as refused:
            policy.admit(payload)
        assert refused.value.code == "coding.daemon_payload_invalid"

    @pytest.mark.parametrize("asked", [float("inf"), float("nan"), -1.0, 1e9])
    def test_no_job_waits_for_ever_for_its_agent(self, policy: Policy, asked: float) -> None:
        """A start's patience is bounded here, whatever the hub grants."""
        assert policy.admit(job(startup_timeout=asked)).spec.startup_timeout == 600.0
        assert policy.admit(job(startup_timeout=30.0)).spec.startup_timeout == 30.0


class TestSecretFiles:
    """Files with a key or a token."""

    def test_only_the_account_s_own_file_counts(self, tmp_path: Path) -> None:
        """0600 is read without surrounding space; wider, empty, too long or missing is refused, without its content."""
        file = tmp_path / "token"
        file.write_text(f"  {CANARY}\n")
        file.chmod(0o600)
        assert read_secret(file) == CANARY
        for mode in (0o640, 0o604, 0o660):
            file.chmod(mode)
            with pytest.raises(SecretError, match="chmod 600") as refused:
                read_secret(file)
            assert CANARY not in str(refused.value)
        file.chmod(0o600)
        for content in (b"", b"\xff\xfe", b"x" * 5000):
            file.write_bytes(content)
            with pytest.raises(SecretError):
                read_secret(file)
        file.unlink()
        with pytest.raises(SecretError):
            read_secret(file)
        with pytest.raises(SecretError):
            read_secret(tmp_path)
