"""What one installation, person or machine must not share with another: state, authority, environment, secrets, files."""

from __future__ import annotations

from typing import Final

from tooling.sabotages.line import HANGS, Sabotage, pkg

_INSTALLATIONS = "test_installations.py"
_STATELESS = "test_statelessness_sources.py"
_IDENTITY = "test_identity.py"
_TOOLS = "test_langbot_tools.py"
_TRUST = "test_coding_relay_v1_trust.py"

_state = (
    Sabotage(
        "config-kept-on-self",
        "ACPAgentRunner/components/runner/default.py",
        '"""One message from the chat, answered; see :mod:`pkg.run_loop`."""',
        "self.config = ctx.config",
        (f"{_STATELESS}::test_plugin_and_runner_keep_nothing",),
    ),
    Sabotage(
        "binding-kept-on-the-plugin",
        "ACPAgentRunner/main.py",
        '"""Cancel the installation\'s runs, close its sessions and drop its secrets; returns when that is done."""',
        "self.last = binding",
        (f"{_STATELESS}::test_plugin_and_runner_keep_nothing",),
    ),
    Sabotage(
        "config-kept-in-a-module",
        pkg("run_loop"),
        "installation.check()",
        'installation.check(); installations.__dict__["last"] = installations.last = self.ctx.config',
        (f"{_STATELESS}::test_modules_keep_nothing_but_what_is_named",),
    ),
    Sabotage(
        "timer-in-a-runs-context",
        pkg("traceless"),
        "return asyncio.get_running_loop().call_later(seconds, callback, *given, context=contextvars.Context())",
        "return asyncio.get_running_loop().call_later(seconds, callback, *given)",
        ("test_traceless.py::test_a_timer_runs_with_nothing_of_its_caller",),
    ),
    Sabotage(
        "background-work-in-a-runs-context",
        pkg("installations"),
        "task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())",
        "task = asyncio.get_running_loop().create_task(work, name=name)",
        (f"{_INSTALLATIONS}::test_background_work_has_an_empty_context",),
    ),
    Sabotage(
        "listener-in-a-runs-context",
        pkg("tools_listener"),
        "task = asyncio.create_task(work, context=contextvars.Context())",
        "task = asyncio.create_task(work)",
        (f"{_TOOLS}::test_the_listener_runs_with_nobodys_authority",),
    ),
)

_revocation = (
    Sabotage(
        "revocation-hook-skipped",
        "ACPAgentRunner/main.py",
        "await installations.revoke(binding)",
        "return",
        (f"{_INSTALLATIONS}::test_the_plugin_s_hook_is_the_revocation",),
    ),
    Sabotage(
        "revocation-leaves-runs",
        pkg("installations"),
        "run.revoke()",
        "pass",
        (f"{_INSTALLATIONS}::test_revoking_tells_every_run_and_waits_for_each",),
    ),
    Sabotage(
        "revocation-misses-what-arrives",
        pkg("run_loop"),
        "self._arrived, installation.arriving[self.ctx.run_id] = installation, self",
        "self._arrived = installation",
        ("test_run_loop.py::test_a_run_that_still_asks_the_host_ends_with_its_installation",),
    ),
    Sabotage(
        "revocation-stops-at-the-first-trouble",
        pkg("installations"),
        "steps.callback(drop)",
        "drop()",
        (f"{_INSTALLATIONS}::test_one_thing_that_cannot_be_let_go_of_keeps_nothing_else",),
    ),
    Sabotage(
        "one-installation-takes-all-runs",
        pkg("installations"),
        "return active_runs() >= limits.RUNS_PER_PROCESS or (pooled and len(here.runs) >= limits.RUNS_PER_INSTALLATION)",
        "return active_runs() >= limits.RUNS_PER_PROCESS",
        (f"{_INSTALLATIONS}::test_nobody_gets_all_of_a_process_that_serves_several",),
    ),
    Sabotage(
        "one-installation-takes-all-calls",
        pkg("langbot_tools"),
        "_host: Final = FairSlots(limits.MCP_CALLS_PER_PROCESS, limits.MCP_CALLS_PER_INSTALLATION)",
        "_host: Final = FairSlots(limits.MCP_CALLS_PER_PROCESS, limits.MCP_CALLS_PER_PROCESS)",
        (f"{_TOOLS}::test_nobodys_calls_take_every_action_of_the_connection",),
    ),
    Sabotage(
        "first-come-first-served",
        pkg("fair_slots"),
        "key = min(fitting, key=lambda waiting: self._taken.get(waiting, 0))",
        "key = fitting[0]",
        (f"{_TOOLS}::test_a_free_slot_goes_to_whoever_has_the_fewest",),
    ),
    Sabotage(
        "cancelled-calls-stay-at-the-host",
        pkg("host_calls"),
        "call = asyncio.create_task(self._handler.call_action(action, data, timeout, cancel_peer_on_cancel=True))",
        "call = asyncio.create_task(self._handler.call_action(action, data, timeout))",
        ("test_shared_runtime.py::test_a_call_that_was_cancelled_is_no_action_of_the_connection_any_more",),
    ),
    Sabotage(
        "one-installation-takes-all-tool-connections",
        pkg("tools_listener"),
        "if len(theirs) >= most:",
        "if False:",
        (f"{_TOOLS}::test_one_installations_requests_leave_room_for_the_others",),
        red=HANGS,
    ),
    Sabotage(
        "strangers-stay-and-newcomers-go",
        pkg("tools_listener"),
        "oldest = next(iter(self._unproven))",
        "oldest = next(reversed(self._unproven))",
        (f"{_TOOLS}::test_strangers_make_room_for_whoever_comes",),
        red=r"^aiohttp\.client_exceptions\.(ServerDisconnectedError|ClientOSError)",
    ),
    Sabotage(
        "strangers-fill-the-log",
        pkg("tools_listener"),
        "asyncio.get_running_loop().call_soon(oldest.transport.abort)",
        "oldest.transport.abort()",
        (f"{_TOOLS}::test_a_connection_that_finds_no_room_is_cut_without_a_word",),
    ),
    Sabotage(
        "connections-outlive-their-endpoint",
        pkg("tools_listener"),
        "self._server.leave(endpoint)",
        "pass",
        (f"{_TOOLS}::test_a_closed_endpoint_keeps_no_connection",),
        red=r"^TimeoutError",
    ),
    Sabotage(
        "revocation-does-not-wait-for-runs",
        pkg("installations"),
        "steps.push_async_callback(run.ended)",
        "pass",
        (f"{_INSTALLATIONS}::test_revoking_tells_every_run_and_waits_for_each",),
    ),
    Sabotage(
        "revocation-keeps-secrets",
        pkg("installations"),
        "steps.callback(drop)",
        "pass",
        (f"{_INSTALLATIONS}::test_revoking_closes_sessions_ends_work_and_drops_secrets",),
    ),
    Sabotage(
        "revocation-leaves-parked-turns",
        pkg("installations"),
        "steps.push_async_callback(self.parked.end_all)",
        "",
        ("test_parking.py::test_revocation_ends_a_parked_turn",),
        red=HANGS,
    ),
    Sabotage(
        "revocation-leaves-live-sessions",
        pkg("installations"),
        "steps.push_async_callback(self.warm.close_all)",
        "",
        (f"{_INSTALLATIONS}::test_revoking_closes_sessions_ends_work_and_drops_secrets",),
        red=HANGS,
    ),
    Sabotage(
        "revocation-leaves-background-work",
        pkg("installations"),
        "await asyncio.wait(set(self._work))",
        "break",
        (f"{_INSTALLATIONS}::test_revoking_closes_sessions_ends_work_and_drops_secrets",),
    ),
    Sabotage(
        "revoked-installation-goes-on",
        pkg("installations"),
        "if self.revoked:",
        "if False:",
        (f"{_INSTALLATIONS}::test_a_revoked_installation_starts_nothing",),
    ),
    Sabotage(
        "revocation-forgets-its-installation-never",
        pkg("installations"),
        "_installations.pop(found.key, None)",
        "pass",
        (f"{_INSTALLATIONS}::test_a_new_run_after_a_revocation_finds_a_fresh_installation",),
    ),
    Sabotage(
        "cancelled-revocation-stops",
        pkg("installations"),
        "await asyncio.shield(task)",
        "await task",
        (f"{_INSTALLATIONS}::test_a_second_revocation_awaits_the_first_and_a_cancelled_one_does_not_stop_it",),
    ),
    Sabotage(
        "session-kept-after-revocation",
        pkg("warm_sessions"),
        "if self._shut or keep <= 0 or not live.usable:",
        "if keep <= 0 or not live.usable:",
        ("test_warm_sessions.py::test_nothing_is_kept_after_the_pool_was_closed",),
    ),
    Sabotage(
        "revoked-tools-answer-on",
        pkg("langbot_tools"),
        "self._endpoint.revoke()",
        "",
        (f"{_TOOLS}::test_a_closed_session_refuses_before_its_calls_have_ended",),
    ),
    Sabotage(
        "tools-of-an-ended-run-answer-on",
        pkg("langbot_tools"),
        "self._surface.run = None",
        "pass",
        (f"{_TOOLS}::test_a_session_keeps_its_address_and_answers_only_while_a_run_is_attached",),
    ),
    Sabotage(
        "tool-calls-outlive-their-run",
        pkg("langbot_tools"),
        "task.cancel()",
        "pass",
        (f"{_TOOLS}::test_a_call_in_flight_at_the_runs_end_is_cancelled_and_says_so",),
        within="async def _settle(",
        red=HANGS,
    ),
    Sabotage(
        "revoked-daemons-stay",
        pkg("relay_hub"),
        'self._close_all(installation, "installation_revoked")',
        "",
        ("test_relay_protocol.py::test_a_revoked_installation_loses_its_daemons_and_no_other_does",),
    ),
    Sabotage(
        "revocation-hits-everybody",
        pkg("relay_hub"),
        "if shared or socket.installation == installation:",
        "if True:",
        ("test_relay_protocol.py::test_a_revoked_installation_loses_its_daemons_and_no_other_does",),
    ),
)

_authority = (
    Sabotage(
        "shared-worker-without-a-binding",
        pkg("identity"),
        'if environ.get(PROFILE_VARIABLE) == "shared":',
        "if False:",
        (f"{_IDENTITY}::TestAuthority::test_a_shared_worker_without_a_binding_is_refused",),
    ),
    Sabotage(
        "pool-without-the-revocation-hook",
        pkg("identity"),
        'if pooled and not hasattr(BasePlugin, "on_installation_revoked"):',
        "if False:",
        (f"{_IDENTITY}::TestAuthority::test_a_pool_of_an_sdk_without_the_revocation_hook_is_refused",),
    ),
    Sabotage(
        "pool-taken-for-a-workers-own",
        pkg("identity"),
        "pooled = binding != dedicated",
        "pooled = False",
        (f"{_IDENTITY}::TestAuthority::test_the_invocation_decides_in_a_shared_worker",),
    ),
    Sabotage(
        "connection-decides-before-the-invocation",
        pkg("identity"),
        "binding: InstallationBinding | None = runner.get_installation_binding()  # type: ignore[no-untyped-call]",
        "binding: InstallationBinding | None = dedicated or runner.get_installation_binding()",
        (f"{_IDENTITY}::TestAuthority::test_the_invocation_decides_before_the_connection",),
    ),
    Sabotage(
        "any-host-actor-trusted",
        pkg("identity"),
        'if actor is None or actor.actor_type != "user":',
        "if actor is None:",
        (f"{_IDENTITY}::TestTrustedActor::test_anything_else_is_refused",),
    ),
    Sabotage(
        "run-without-a-person",
        pkg("identity"),
        "if not actor.actor_id.strip():",
        "if False:",
        (f"{_IDENTITY}::TestTrustedActor::test_anything_else_is_refused",),
    ),
    Sabotage(
        "allowed-actors-not-asked",
        pkg("identity"),
        "if allowed_actors and (actor.sender_id or actor.actor_id) not in allowed_actors:",
        "if False:",
        (f"{_IDENTITY}::TestWhoMayUseIt::test_a_list_lets_only_its_members_start",),
    ),
    Sabotage(
        "anybody-steers",
        pkg("identity"),
        "return bool(sender_id) and (sender_id == requester.sender_id or sender_id in allowed_actors)",
        "return bool(sender_id)",
        (f"{_IDENTITY}::TestWhoMayUseIt::test_only_the_requester_and_the_list_may_steer",),
    ),
    Sabotage(
        "chats-without-an-id-are-one",
        pkg("identity"),
        'return Conversation(_bot_of(ctx.conversation), conversation_id or f"run:{ctx.run_id}")',
        "return Conversation(_bot_of(ctx.conversation), conversation_id)",
        (f"{_IDENTITY}::TestConversation::test_a_run_without_a_chat_shares_nothing",),
    ),
    Sabotage(
        "agent-beside-the-pools-worker",
        pkg("places"),
        "if authority.pooled:",
        "if False:",
        ("test_places.py::test_the_pool_is_no_place_for_an_agent",),
    ),
    Sabotage(
        "pools-environment-is-a-tenants",
        pkg("hubs"),
        "environ: Mapping[str, str] = types.MappingProxyType({}) if authority.pooled else os.environ",
        "environ: Mapping[str, str] = os.environ",
        ("test_run_daemon.py::test_in_the_pool_the_workers_environment_is_no_tenants",),
    ),
    Sabotage(
        "session-without-its-lock",
        pkg("run_session"),
        'for name in (f"session {stored_key}", *place.locks):',
        "for name in place.locks:",
        ("test_run_loop.py::test_two_messages_for_one_session_wait_for_each_other",),
    ),
    Sabotage(
        "pool-takes-files-of-its-worker",
        pkg("places"),
        "shared_worker=authority.pooled,",
        "shared_worker=False,",
        ("test_places.py::test_ssh_from_the_pool_uses_nothing_of_the_worker",),
    ),
)

_CHILD = 'env = {name: value for name, value in environ.items() if name in _INHERITED or name.startswith("LC_")}'

_environment = (
    Sabotage(
        "workers-environment-inherited",
        pkg("runtime_support"),
        _CHILD,
        "env = dict(environ)",
        ("test_runtime_support.py::test_a_child_gets_only_what_the_allowlist_lets_through",),
    ),
    Sabotage(
        "workers-environment-at-the-supervisor",
        pkg("supervised_process"),
        "env = {name: os.environ[name] for name in _LIBRARY_PATHS if name in os.environ}",
        "env = dict(os.environ)",
        ("test_process_supervisor.py::test_a_supervisor_has_nothing_of_the_worker_s_environment",),
    ),
)

_secrets = (
    Sabotage(
        "token-in-a-log-line",
        pkg("relay_hub_shell"),
        "listener.register(self._installation, token, self._notice)",
        'listener.register(self._installation, token, self._notice); log.debug("registered %s", token)',
        (f"{_TRUST}::TestTrust::test_no_secret_is_on_the_wire_in_logs_or_in_files",),
    ),
    Sabotage(
        "bearer-in-a-log-line",
        pkg("tools_listener"),
        "digest = _digest(presented.strip())",
        'digest = _digest(presented.strip()); logging.getLogger(__name__).debug("presented %s", presented)',
        (f"{_TOOLS}::test_nothing_a_client_sent_is_logged",),
    ),
    Sabotage(
        "requests-in-the-log",
        pkg("tools_listener"),
        "logger=_SILENT,",
        "logger=logging.getLogger(__name__),",
        (f"{_TOOLS}::test_nothing_a_client_sent_is_logged",),
    ),
    Sabotage(
        "bearer-in-a-repr",
        pkg("tools_listener"),
        'return "Endpoint()"',
        'return f"Endpoint({self.bearer})"',
        (f"{_TOOLS}::test_the_bearer_appears_in_no_repr_and_not_in_the_address",),
    ),
    Sabotage(
        "bearer-in-the-address",
        pkg("tools_listener"),
        'return f"http://{_LOOPBACK}:{self._listener.port}{self.path}"',
        'return f"http://{_LOOPBACK}:{self._listener.port}{self.path}?{self.bearer}"',
        (f"{_TOOLS}::test_the_bearer_appears_in_no_repr_and_not_in_the_address",),
    ),
    Sabotage(
        "tokens-in-a-repr",
        pkg("relay_auth"),
        "_tokens: dict[Installation, str] = field(default_factory=dict, repr=False)",
        "_tokens: dict[Installation, str] = field(default_factory=dict)",
        ("test_relay_protocol.py::test_the_token_and_keys_made_from_it_never_travel",),
    ),
    Sabotage(
        "token-of-the-way-in-a-repr",
        pkg("hubs"),
        "token: str = field(repr=False)",
        "token: str",
        ("test_places.py::test_a_token_does_not_show_in_a_place",),
    ),
    Sabotage(
        "secrets-in-an-agents-last-words",
        pkg("supervised_process"),
        "self._redact = Redactor(secrets)",
        "self._redact = Redactor(())",
        ("test_process_supervisor.py::test_stderr_hides_secrets_in_every_usual_form",),
    ),
    Sabotage(
        "secret-shown-behind-a-cut",
        pkg("redaction"),
        'text = whole if newline else self._without_rest(text.lstrip("\\ufffd"))',
        "pass",
        ("test_redaction.py::test_a_cut_through_a_secret_shows_nothing_of_it",),
    ),
    Sabotage(
        "secrets-in-the-decisions",
        pkg("decision_log"),
        "hide = redact or _REDACT",
        "hide = str",
        ("test_decision_log.py::TestLines::test_no_secret_is_in_a_line",),
    ),
    Sabotage(
        "decisions-told-in-the-pools-log",
        pkg("decision_log"),
        "return cls(None if authority.pooled else _directory(shape), _named(authority.parts()))",
        "return cls(_directory(shape) or runtime_support.DATA_DIRECTORY, _named(authority.parts()))",
        ("test_decision_log.py::TestPlaces::test_in_the_pool_there_is_no_file_and_no_content",),
    ),
)

_files = (
    Sabotage(
        "records-others-can-read",
        pkg("json_lines"),
        "os.fchmod(descriptor, 0o600)",
        "os.fchmod(descriptor, 0o644)",
        ("test_decision_log.py::TestPlaces::test_beside_a_worker_of_one_installation",),
    ),
    Sabotage(
        "records-through-a-link",
        pkg("json_lines"),
        "flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
        "flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK",
        ("test_decision_log.py::TestFile::test_a_link_in_its_place_is_not_followed",),
    ),
    Sabotage(
        "locks-others-can-reach",
        pkg("runtime_support"),
        "directory.chmod(0o700)",
        "pass",
        ("test_runtime_support.py::test_a_state_directory_that_is_not_ours_alone_is_refused_or_closed",),
    ),
    Sabotage(
        "job-table-others-can-read",
        pkg("daemon_jobs"),
        "directory.chmod(0o700)",
        "directory.chmod(0o755)",
        ("test_daemon_jobs.py::TestFile::test_files_are_the_account_s_own",),
    ),
    Sabotage(
        "secret-file-others-can-read",
        pkg("daemon_policy"),
        "if stat.S_IMODE(status.st_mode) & 0o077:",
        "if False:",
        ("test_daemon_policy.py::TestSecretFiles::test_only_the_account_s_own_file_counts",),
    ),
    Sabotage(
        "policy-file-others-can-change",
        pkg("daemon_policy"),
        "if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:",
        "if False:",
        ("test_daemon_policy.py::TestFile::test_a_file_that_others_can_change_is_refused",),
    ),
    Sabotage(
        "key-file-others-can-read",
        pkg("daemon_command"),
        "os.fchmod(descriptor, 0o600)",
        "os.fchmod(descriptor, 0o644)",
        ("test_daemon_program.py::TestCommandLine::test_keygen_makes_a_key_that_only_its_daemon_can_use",),
    ),
    Sabotage(
        "fence-others-can-read",
        pkg("relay_markers"),
        "folder.mkdir(mode=0o700, parents=True, exist_ok=True)",
        "folder.mkdir(mode=0o755, parents=True, exist_ok=True)",
        (f"{_TRUST[: -len('_trust.py')]}.py::TestJobs::test_a_marker_is_on_the_disk_before_the_job_and_private",),
    ),
)

SABOTAGES: Final[tuple[Sabotage, ...]] = (*_state, *_revocation, *_authority, *_environment, *_secrets, *_files)
