"""The relay between hub and daemon: who is believed, what is delivered, what counts as ended, where it connects to."""

from __future__ import annotations

from typing import Final

from tooling.sabotages.line import HANGS, Sabotage, pkg

_PROTOCOL = "test_relay_protocol.py"
_STREAMS = "test_relay_protocol_streams.py"
_HOSTILE = "test_relay_protocol_hostile.py"
_RELAY = "test_coding_relay_v1.py"
_TRUST = "test_coding_relay_v1_trust.py"
_WIRE = "test_coding_relay_v1_wire.py"
_POLICY = "test_daemon_policy.py"

_belief = (
    Sabotage(
        "hmac-check-skipped",
        pkg("relay_frames"),
        "or not hmac.compare_digest(frame[2 : _BODY_AT - 2], _mac(self._receive_mac, body))",
        "",
        (f"{_HOSTILE}::test_frames_of_one_connection_are_noise_on_another",),
    ),
    Sabotage(
        "proof-not-checked",
        pkg("relay_auth"),
        'return hmac.compare_digest(nonce_text(_hmac(key, self._body)).encode("ascii"), self._shown)',
        "return True",
        (f"{_PROTOCOL}::test_a_wrong_token_stops_the_daemon_with_an_explanation",),
    ),
    Sabotage(
        "hubs-proof-not-checked",
        pkg("relay_daemon"),
        'if not self._handshake.proves(self._key, "hub", proof_of(message)):',
        "if False:",
        (f"{_PROTOCOL}::test_a_daemon_tells_nothing_to_a_hub_without_its_key",),
    ),
    Sabotage(
        "frame-seen-before-accepted",
        pkg("relay_frames"),
        "if sequence <= self._received:",
        "if False:",
        (f"{_STREAMS}::test_a_frame_is_good_for_one_direction_one_connection_and_one_time",),
        red="FrameError: frames are missing",
    ),
    Sabotage(
        "missing-frames-not-noticed",
        pkg("relay_frames"),
        "if sequence != self._received + 1:",
        "if False:",
        (f"{_STREAMS}::test_a_missing_frame_ends_the_connection",),
    ),
    Sabotage(
        "hello-before-the-proof-is-enough",
        pkg("relay_admission"),
        "elif not found and not self._shared:",
        "elif False:",
        (f"{_PROTOCOL}::test_a_wrong_token_stops_the_daemon_with_an_explanation",),
    ),
    Sabotage(
        "one-token-of-two-installations",
        pkg("relay_admission"),
        "if len(found) > 1:",
        "if False:",
        (f"{_PROTOCOL}::test_two_installations_with_one_token_are_both_refused_until_one_changes",),
    ),
    Sabotage(
        "plain-token-in-a-shared-worker",
        pkg("relay_admission"),
        "if self._shared:",
        "if False:",
        (f"{_PROTOCOL}::test_a_plain_token_is_taken_only_where_one_installation_listens",),
    ),
    Sabotage(
        "weak-token-in-a-shared-worker",
        pkg("relay_auth"),
        "if len(token) < TOKEN_CHARS:",
        "if False:",
        (f"{_PROTOCOL}::test_a_weak_token_opens_no_shared_listener",),
    ),
    Sabotage(
        "daemon-replaced-without-a-probe",
        pkg("relay_hub"),
        "self._probe(link, link.socket, socket, message)",
        'self._close(link.socket, CLOSE_REPLACED, reason_text("daemon_replaced"))',
        (f"{_PROTOCOL}::test_a_second_daemon_with_a_live_id_is_turned_away",),
    ),
    Sabotage(
        "anybody-on-the-way-stops-a-daemon",
        pkg("relay_daemon"),
        "fatal = rejected and self._authentic",
        "fatal = rejected",
        (f"{_PROTOCOL}::test_a_rejection_that_anybody_could_send_does_not_stop_a_daemon",),
    ),
    Sabotage(
        "token-changed-and-daemons-stay",
        pkg("relay_hub"),
        'self._close_all(installation, "daemon_token_changed")',
        "pass",
        (f"{_PROTOCOL}::test_a_hub_rejects_for_good_only_before_its_own_proof",),
    ),
)

_delivery = (
    Sabotage(
        "last-delta-dropped-at-a-jobs-end",
        pkg("relay_hub"),
        "if job.incoming.received >= last:",
        "if True:",
        (f"{_PROTOCOL}::test_within_its_lease_a_job_does_not_notice_a_cut",),
    ),
    Sabotage(
        "records-taken-twice",
        pkg("relay_streams"),
        "skip = self.received + 1 - first",
        "skip = 0",
        (f"{_STREAMS}::test_records_that_came_before_are_dropped_and_counted",),
    ),
    Sabotage(
        "missing-records-not-noticed",
        pkg("relay_streams"),
        "if skip < 0:",
        "if False:",
        (f"{_STREAMS}::test_records_that_came_before_are_dropped_and_counted",),
    ),
    Sabotage(
        "acknowledged-before-consumed",
        pkg("relay_streams"),
        "return self.received if self.consumed >= self.delivered else self.consumed",
        "return self.received",
        (f"{_STREAMS}::test_a_daemon_that_ignores_the_window_loses_that_job_only",),
    ),
    Sabotage(
        "sent-records-forgotten-at-a-cut",
        pkg("relay_streams"),
        "self._queue.appendleft(entry)",
        "pass",
        (f"{_PROTOCOL}::test_commands_arrive_once_and_in_order_across_cuts",),
    ),
    Sabotage(
        "journal-loses-what-it-refuses",
        pkg("relay_daemon"),
        "return False",
        "return True",
        (f"{_STREAMS}::test_a_journal_without_a_disk_holds_the_producer_at_its_memory",),
        within="def emit(",
        red=HANGS,
    ),
    Sabotage(
        "command-started-twice",
        pkg("relay_daemon"),
        'if kind == "start" and len(item) == 2 and not job.started:',
        'if kind == "start" and len(item) == 2:',
        (f"{_HOSTILE}::test_a_job_has_one_start",),
    ),
)

_ends = (
    Sabotage(
        "fence-not-written-before-dispatch",
        pkg("relay_hub"),
        "self._markers.mark(installation, daemon_id, job.job_id, link.table)",
        "",
        (f"{_PROTOCOL}::test_a_fence_outlives_the_hub_where_there_is_a_disk",),
    ),
    Sabotage(
        "fence-not-synced",
        pkg("relay_markers"),
        "os.fsync(file.fileno())",
        "pass",
        ("test_coding_relay_v1_bounds.py::TestFences::test_a_marker_is_synced_with_its_directories_before_anything_is_sent",),
    ),
    Sabotage(
        "fence-gone-without-proof",
        pkg("relay_hub"),
        "self._fence(job.link, job.job_id, job.link.table)",
        "self._unmark(job.link, job.job_id)",
        (f"{_PROTOCOL}::test_a_job_that_does_not_end_fences_its_daemon_until_it_has",),
    ),
    Sabotage(
        "fenced-daemon-gets-jobs",
        pkg("relay_hub"),
        "if link.fences:",
        "if False:",
        (f"{_PROTOCOL}::test_a_job_that_does_not_end_fences_its_daemon_until_it_has",),
        within="def start_job(",
    ),
    Sabotage(
        "fenced-daemon-admitted",
        pkg("relay_hub"),
        "if link.fences:",
        "if False:",
        (f"{_PROTOCOL}::test_a_fenced_daemon_is_closed_with_1013_and_told_what_to_end",),
        within="def _state(",
    ),
    Sabotage(
        "unproven-end-taken-for-one",
        pkg("relay_hub"),
        "elif not quiescent:",
        "elif False:",
        (f"{_PROTOCOL}::test_a_daemon_that_cannot_end_a_job_says_so_at_once",),
    ),
    Sabotage(
        "lost-job-not-fenced",
        pkg("relay_hub"),
        "proven = proven or job.finish is not None",
        "proven = True",
        (f"{_PROTOCOL}::test_past_its_lease_a_job_is_lost_for_both_sides",),
    ),
    Sabotage(
        "cancel-acknowledged-before-the-agent-is-gone",
        pkg("relay_client"),
        "_give_up(running.calls)",
        '_give_up(running.calls); self._protocol.finish(event.job_id, "cancelled")',
        (f"{_TRUST}::TestEnds::test_however_often_its_caller_is_cancelled_a_job_is_ended_first",),
        within="def _end(self, event",
    ),
    Sabotage(
        "cancel-returns-before-the-end",
        pkg("relay_job"),
        "while not self.ended.is_set() or self._calls:",
        "while self._calls:",
        (f"{_TRUST}::TestEnds::test_however_often_its_caller_is_cancelled_a_job_is_ended_first",),
    ),
    Sabotage(
        "unconfirmed-cancel-is-a-success",
        pkg("relay_job"),
        "raise DaemonFenced(self.daemon_id)",
        "pass",
        (f"{_TRUST}::TestEnds::test_an_end_that_the_daemon_itself_cannot_prove_fences_too",),
    ),
    Sabotage(
        "unproven-job-reported-as-ended",
        pkg("relay_client"),
        "self._protocol.finish(job_id, running.outcome, quiescent=not running.unproven, error=running.error)",
        "self._protocol.finish(job_id, running.outcome, error=running.error)",
        (f"{_TRUST}::TestEnds::test_an_end_that_the_daemon_itself_cannot_prove_fences_too",),
    ),
    Sabotage(
        "job-started-before-it-is-in-the-table",
        pkg("relay_daemon"),
        "self._table.started(job_id)",
        "pass",
        (f"{_PROTOCOL}::test_a_job_whose_table_cannot_be_written_is_refused",),
    ),
    Sabotage(
        "running-job-forgotten",
        pkg("relay_daemon"),
        "if job is not None and job.outcome is None:",
        "if False:",
        (f"{_HOSTILE}::test_a_hub_cannot_have_a_running_job_forgotten",),
    ),
    Sabotage(
        "lease-never-runs-out",
        pkg("relay_daemon"),
        "if not job.ended and now >= self._lost_at + job.lease:",
        "if False:",
        (f"{_PROTOCOL}::test_past_its_lease_a_job_is_lost_for_both_sides",),
    ),
    Sabotage(
        "daemons-at-work-give-way-to-new-ones",
        pkg("relay_entrance"),
        "one = gives_way(crowd) if largest is None else next(reversed(crowd))",
        "one = next(iter(crowd))",
        ("test_coding_relay_v1_bounds.py::TestCrowds::test_all_connections_together_leave_the_worker_half_of_its_descriptors",),
        red="ConnectionClosed",
    ),
    Sabotage(
        "proven-connections-not-counted",
        pkg("relay_hub"),
        "if len(others) >= limits.RELAY_CONNECTIONS:",
        "if False:",
        (f"{_PROTOCOL}::test_proven_connections_that_are_not_live_are_bounded_with_the_live_ones",),
    ),
    Sabotage(
        "listeners-by-the-text-of-their-host",
        pkg("relay_hub_shell"),
        "_listeners[_literal(host), port] = listener",
        "_listeners[host, port] = listener",
        (f"{_TRUST}::TestListener::test_one_address_is_one_listener_however_it_is_written",),
        red="AgentRuntimeDaemonError",
    ),
    Sabotage(
        "silent-daemon-kept",
        pkg("relay_hub"),
        "if now >= socket.heard + self.times.dead:",
        "if False:",
        (f"{_PROTOCOL}::test_heartbeats_keep_an_idle_connection_and_silence_ends_it",),
    ),
)

_network = (
    Sabotage(
        "browsers-page-connects",
        pkg("relay_sockets"),
        "origins=[None],",
        "origins=None,",
        (f"{_TRUST}::TestTrust::test_a_page_in_a_browser_gets_no_connection",),
    ),
    Sabotage(
        "proxy-of-the-environment-obeyed",
        pkg("relay_sockets"),
        "proxy=None,",
        "proxy=True,",
        (f"{_WIRE}::TestWayOut::test_no_proxy_of_the_environment_is_used",),
    ),
    Sabotage(
        "redirect-followed",
        pkg("relay_sockets"),
        "return exc",
        "return super().process_redirect(exc)",
        (f"{_WIRE}::TestWayOut::test_no_redirect_is_followed",),
        red=HANGS,
    ),
    Sabotage(
        "compression-offered",
        pkg("relay_sockets"),
        "compression=None,",
        'compression="deflate",',
        (f"{_WIRE}::TestForeignBytes::test_nothing_is_compressed",),
        within="async def listen(",
    ),
    Sabotage(
        "plaintext-off-this-machine",
        pkg("relay_sockets"),
        'if parts.scheme == "ws" and not insecure_plaintext and not _loopback(host):',
        "if False:",
        (f"{_WIRE}::TestCertificates::test_plain_ws_off_this_machine_is_not_even_dialled",),
    ),
    Sabotage(
        "pinned-certificate-not-compared",
        pkg("relay_sockets"),
        'if not hmac.compare_digest(shown, pin.replace(":", "").lower()):',
        "if False:",
        (f"{_WIRE}::TestCertificates::test_a_hub_with_another_certificate_hears_nothing",),
        red=HANGS,
    ),
    Sabotage(
        "tools-for-any-host-name",
        pkg("tools_listener"),
        'if not _names_this_machine(request.headers.get("Host"), scheme=""):',
        "if False:",
        ("test_langbot_tools.py::test_every_request_is_judged_before_its_body_is_read",),
        red=HANGS,
    ),
    Sabotage(
        "tools-for-any-page",
        pkg("tools_listener"),
        'if origin is not None and not _names_this_machine(origin, scheme="http"):',
        "if False:",
        ("test_langbot_tools.py::test_every_request_is_judged_before_its_body_is_read",),
        red=HANGS,
    ),
    Sabotage(
        "tools-for-the-whole-network",
        pkg("tools_listener"),
        "sock.bind((_LOOPBACK, 0))",
        'sock.bind(("0.0.0.0", 0))',
        ("test_langbot_tools.py::test_the_socket_is_bound_to_loopback_only_and_closed_with_the_last_endpoint",),
    ),
)

_workstation = (
    Sabotage(
        "hubs-command-line-not-refused",
        pkg("daemon_policy"),
        "if spec.command:",
        "if False:",
        (f"{_POLICY}::TestJobs::test_what_the_file_does_not_allow",),
    ),
    Sabotage(
        "job-sets-any-variable",
        pkg("daemon_policy"),
        "if variable not in self.job_environment:",
        "if False:",
        (f"{_POLICY}::TestJobs::test_what_the_file_does_not_allow",),
    ),
    Sabotage(
        "job-sets-any-option",
        pkg("daemon_policy"),
        "if option not in self.job_options | RESTRICTIONS:",
        "if False:",
        (f"{_POLICY}::TestJobs::test_what_the_file_does_not_allow",),
    ),
    Sabotage(
        "job-asks-for-any-approval-policy",
        pkg("daemon_policy"),
        "if spec.policy not in self.approvals:",
        "if False:",
        (f"{_POLICY}::TestJobs::test_what_the_file_does_not_allow",),
    ),
    Sabotage(
        "job-works-anywhere",
        pkg("daemon_policy"),
        "inside = any(root == real or root in real.parents for root in roots)",
        "inside = True",
        (f"{_POLICY}::TestJobs::test_no_name_leads_out",),
    ),
    Sabotage(
        "workspace-by-name-instead-of-real-path",
        pkg("daemon_policy"),
        "real = roots[0].joinpath(_home(asked)).resolve()",
        "real = Path(os.path.normpath(roots[0].joinpath(_home(asked))))",
        (f"{_POLICY}::TestJobs::test_no_name_leads_out",),
    ),
    Sabotage(
        "job-brings-a-servers-command",
        pkg("daemon_policy"),
        'if server.transport == "stdio" or server.command:',
        "if False:",
        (f"{_POLICY}::TestJobs::test_what_the_file_does_not_allow",),
    ),
    Sabotage(
        "every-workspace-trusted",
        pkg("daemon_policy"),
        "if any(root == directory or root in directory.parents for root in self.trusted_workspaces):",
        "if True:",
        (f"{_POLICY}::TestTrust::test_only_the_owner_s_roots_are_trusted",),
    ),
    Sabotage(
        "allow-all-for-every-job",
        pkg("daemon_policy"),
        'APPROVALS: Final = ("ask", "allow-edits", "deny")',
        'APPROVALS: Final = ("ask", "allow-edits", "allow-all", "deny")',
        (f"{_POLICY}::TestFile::test_what_is_not_said_is_not_allowed",),
    ),
    Sabotage(
        "misspelt-key-ignored",
        pkg("daemon_policy"),
        'raise self.error(key, "is not a key that is known here")',
        "pass",
        (f"{_POLICY}::TestFile::test_a_bad_file_is_refused_with_file_line_and_key",),
    ),
)

SABOTAGES: Final[tuple[Sabotage, ...]] = (*_belief, *_delivery, *_ends, *_network, *_workstation)
