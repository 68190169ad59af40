"""Processes that must be gone, and what a person must have allowed: ends, approvals, and what the chat is shown."""

from __future__ import annotations

from typing import Final

from tooling.sabotages.line import Sabotage, pkg

_SUPERVISOR = "test_process_supervisor.py"
_TREE = f"{_SUPERVISOR}::test_hostile_tree_is_gone_when_stop_returns"
_JOBS = "test_daemon_jobs.py"
_PARKING = "test_parking.py"
_ATTACKS = "test_approval_attacks.py"
_POLICY = "test_approval_policy.py"
_REQUESTS = "test_acp_client_requests.py"

_processes = (
    Sabotage(
        "every-child-waited-for",
        pkg("supervised_process"),
        "if os.waitpid(key[0], os.WNOHANG)[0]:",
        "if os.waitpid(-1, os.WNOHANG)[0]:",
        (f"{_SUPERVISOR}::test_the_orphan_reaper_takes_only_old_foreign_zombies",),
    ),
    Sabotage(
        "own-children-reaped",
        pkg("supervised_process"),
        "if process.parent == me and not process.alive and process.session != session and process.pid not in owned",
        "if process.parent == me and not process.alive",
        (f"{_SUPERVISOR}::test_the_orphan_reaper_takes_only_old_foreign_zombies",),
    ),
    Sabotage(
        "stop-returns-before-the-tree-is-gone",
        pkg("supervised_process"),
        "await asyncio.shield(self._ended)",
        "",
        (_TREE,),
    ),
    Sabotage(
        "quiescent-when-the-agent-has-ended",
        pkg("process_supervisor"),
        "return self.tree.gone(childless) and not (isinstance(self.tree, SweptTree) and self.tree.doubtful)",
        "return bool(self.agent_ended)",
        (_TREE, f"{_SUPERVISOR}::test_hostile_orphan_outlives_its_agent_until_stop"),
    ),
    Sabotage(
        "nothing-is-killed",
        pkg("process_supervisor"),
        'self.counts["killed"] = self.tree.kill()',
        'self.counts["killed"] = 1',
        (_TREE,),
    ),
    Sabotage(
        "orphans-not-adopted",
        pkg("process_supervisor"),
        "adopts = self.prctl is not None and self.prctl(PR_SET_CHILD_SUBREAPER, 1)",
        "adopts = self.prctl is not None",
        (_TREE,),
    ),
    Sabotage(
        "cancelled-stop-stops-ending",
        pkg("supervised_process"),
        "continue",
        "raise",
        (f"{_SUPERVISOR}::test_whoever_awaits_an_end_is_cancelled_only_behind_it",),
        within="async def stopped(",
    ),
    Sabotage(
        "unconfirmed-end-is-a-success",
        pkg("supervised_process"),
        'self._finish(("processes outlived SIGKILL", tuple(report["pids"])))',
        "self._finish(None)",
        (f"{_SUPERVISOR}::test_an_end_that_is_not_confirmed_is_no_success_until_its_proof",),
    ),
    Sabotage(
        "lost-supervisor-is-a-success",
        pkg("supervised_process"),
        "if self._quiet:",
        "if True:",
        (f"{_SUPERVISOR}::test_hostile_tree_of_a_killed_supervisor_is_swept",),
    ),
    Sabotage(
        "pid-signalled-without-its-start-time",
        pkg("process_supervisor"),
        "if now is None or now.start != process.start:",
        "if now is None:",
        (f"{_SUPERVISOR}::test_a_reused_pid_is_not_signalled",),
    ),
    Sabotage(
        "workers-death-not-noticed",
        pkg("process_supervisor"),
        "if not self.control.open:",
        "if False:",
        (f"{_SUPERVISOR}::test_a_closed_channel_alone_ends_the_tree",),
    ),
    Sabotage(
        "jobs-processes-unmarked",
        pkg("daemon_jobs"),
        "env = {**command.env, JOB_MARKER: self._table.marker(self._job_id)}",
        "env = dict(command.env)",
        (f"{_JOBS}::TestLauncher::test_agent_and_supervisor_carry_the_marker_and_the_pid_is_noted",),
    ),
    Sabotage(
        "recorded-pid-without-the-marker",
        pkg("daemon_jobs"),
        "if strangers:",
        "if False:",
        (f"{_JOBS}::TestProof::test_a_recorded_pid_without_the_marker_is_left_alone_and_the_job_is_not_proven",),
    ),
    Sabotage(
        "every-boot-proves-the-end",
        pkg("daemon_jobs"),
        "if entry.boot and boot_id() and entry.boot != boot_id():",
        "if entry.boot:",
        (f"{_JOBS}::TestProof::test_marked_processes_are_ended_and_others_are_not",),
    ),
    Sabotage(
        "two-daemons-on-one-table",
        pkg("daemon_jobs"),
        "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{_JOBS}::TestFile::test_one_process_at_a_time",),
    ),
    Sabotage(
        "unconfirmed-cleanup-forgotten",
        pkg("installations"),
        "self._unconfirmed += 1",
        "pass",
        ("test_installations.py::test_a_cleanup_that_was_not_confirmed_is_kept_until_it_is_told",),
    ),
)

_approvals = (
    Sabotage(
        "approval-answered-by-order",
        "ACPAgentRunner/agent/client_requests.py",
        "waiting = self._waiting.get(request_id)",
        "waiting = next(iter(self._waiting.values()), None)",
        ("test_acp_open_requests.py::test_an_answer_counts_once_and_only_for_its_request",),
    ),
    Sabotage(
        "press-answers-whatever-waits-first",
        pkg("parking"),
        "return next((turn for turn in self._turns.values() if turn.interaction_id == interaction_id), None)",
        "return next(iter(self._turns.values()), None)",
        (f"{_PARKING}::test_deny_and_say_why_asks_for_the_reason",),
    ),
    Sabotage(
        "press-of-another-chat",
        pkg("answering"),
        "if turn is None or turn.conversation != conversation:",
        "if turn is None:",
        (f"{_ATTACKS}::test_a_press_in_another_chat_is_none_here",),
    ),
    Sabotage(
        "messages-of-another-chat-answer",
        pkg("parking"),
        "return [turn for turn in self._turns.values() if turn.conversation == conversation]",
        "return list(self._turns.values())",
        (f"{_ATTACKS}::test_an_approver_s_message_in_another_chat_is_none_here",),
    ),
    Sabotage(
        "anybody-answers",
        pkg("parking"),
        "return actor == self.requester and actor.sender_id == self.requester.sender_id",
        "return True",
        (f"{_PARKING}::test_in_a_shared_session_only_the_requester_answers",),
    ),
    Sabotage(
        "requester-without-the-person",
        pkg("parking"),
        "return actor == self.requester and actor.sender_id == self.requester.sender_id",
        "return actor == self.requester",
        (f"{_ATTACKS}::test_where_a_whole_chat_is_the_actor_only_the_person_who_asked_answers",),
    ),
    Sabotage(
        "approver-of-yesterday",
        pkg("parking"),
        "if actor.sender_id and actor.sender_id in self.approvers and actor.sender_id in approvers:",
        "if actor.sender_id and actor.sender_id in self.approvers:",
        (f"{_ATTACKS}::test_an_approver_who_was_removed_meanwhile_answers_nothing",),
    ),
    Sabotage(
        "approver-named-after-the-question",
        pkg("parking"),
        "if actor.sender_id and actor.sender_id in self.approvers and actor.sender_id in approvers:",
        "if actor.sender_id and actor.sender_id in approvers:",
        (f"{_ATTACKS}::test_an_approver_who_is_named_only_now_answers_nothing",),
    ),
    Sabotage(
        "allowed-actor-approves",
        pkg("asking"),
        "return sender == self._asked.actor.sender_id or sender in self._asked.settings.approvers",
        "return sender == self._asked.actor.sender_id or sender in self._asked.settings.allowed_actors",
        (f"{_ATTACKS}::test_another_allowed_actor_s_message_is_no_answer",),
    ),
    Sabotage(
        "expired-approval-accepted",
        pkg("open_record"),
        "return time.time() >= self.expires_at",
        "return False",
        (f"{_PARKING}::test_after_a_restart_an_expired_request_is_over",),
    ),
    Sabotage(
        "expired-turn-waits-on",
        pkg("parking"),
        "elif channel.ended or (left := turn.until - time.monotonic()) <= 0:",
        "elif channel.ended or (left := 1e9 + turn.until - time.monotonic()) <= 0:",
        (f"{_PARKING}::test_on_its_deadline_the_turn_is_cancelled_and_the_next_run_says_so",),
    ),
    Sabotage(
        "anybody-answers-after-a-restart",
        pkg("answering"),
        "known = record is not None and record.who == who and not record.expired",
        "known = record is not None and not record.expired",
        (
            f"{_PARKING}::test_after_a_restart_a_stranger_s_press_is_over",
            f"{_PARKING}::test_after_a_restart_a_session_of_all_has_still_one_who_may_answer",
        ),
    ),
    Sabotage(
        "older-button-answers-after-a-restart",
        pkg("answering"),
        "if record is None or not known or (submission is not None and record.interaction_id != submission.interaction_id):",
        "if record is None or not known:",
        (f"{_ATTACKS}::test_after_a_restart_only_the_button_that_was_shown_last_counts",),
    ),
    Sabotage(
        "answered-twice",
        pkg("parking"),
        "if turn.state is not State.WAITING:",
        "if False:",
        (f"{_PARKING}::test_a_parked_turn_is_taken_back_once",),
        within="def take(self, turn",
    ),
    Sabotage(
        "settled-request-answered-again",
        pkg("parking"),
        "if interaction_id in self._settled:",
        "if False:",
        (
            f"{_PARKING}::test_what_was_stopped_is_never_allowed_afterwards",
            f"{_ATTACKS}::test_what_is_over_is_over_also_for_a_press_that_was_on_its_way",
        ),
    ),
    Sabotage(
        "once-is-not-used-up",
        pkg("session_grants"),
        'self.once = ""',
        "pass",
        (f"{_PARKING}::test_after_a_restart_the_answer_allows_exactly_that_action_once",),
        within="def take_once(",
    ),
    Sabotage(
        "once-allows-anything",
        pkg("session_grants"),
        "taken = bool(name) and self.once == name",
        "taken = bool(self.once)",
        (f"{_PARKING}::test_after_a_restart_the_answer_allows_exactly_that_action_once",),
    ),
    Sabotage(
        "denied-by-now-allowed-all-the-same",
        pkg("asking"),
        'if verdict.verdict == "deny":',
        "if False:",
        (f"{_ATTACKS}::test_what_is_denied_by_now_is_allowed_by_nobody",),
        within="async def decided(",
    ),
    Sabotage(
        "grant-overrides-a-denial",
        pkg("asking"),
        'elif verdict.verdict == "deny":',
        "elif False:",
        (f"{_ATTACKS}::test_what_the_form_denies_the_agent_is_denied",),
    ),
    Sabotage(
        "allow-all-by-default",
        pkg("settings"),
        'approval_policy: Line = "ask"',
        'approval_policy: Line = "allow-all"',
        ("test_manifests.py::test_the_form_and_the_model_agree_on_every_default",),
    ),
    Sabotage(
        "unknown-policy-allows",
        pkg("approval_policy"),
        "if policy == ALLOW_ALL or (policy == ALLOW_EDITS and _edits_only(request, inside)):",
        "if policy not in (ASK, DENY, ALLOW_EDITS) or (policy == ALLOW_EDITS and _edits_only(request, inside)):",
        (f"{_POLICY}::test_every_other_policy_denies_and_says_so",),
    ),
    Sabotage(
        "standing-grant-chosen",
        pkg("approval_policy"),
        '_GRANTS: Final[tuple[ChoiceKind, ...]] = ("allow_once", "allow_session")',
        '_GRANTS: Final[tuple[ChoiceKind, ...]] = ("allow_once", "allow_session", "allow_always")',
        (f"{_POLICY}::test_an_offer_of_standing_grants_only_is_refused_and_told",),
    ),
    Sabotage(
        "edits-outside-the-workspace",
        pkg("approval_policy"),
        "return all(inside(path, request.cwd) for path in paths)",
        "return True",
        (f"{_POLICY}::test_allow_edits_denies_what_it_cannot_see_to_be_inside",),
    ),
    Sabotage(
        "link-out-of-the-workspace",
        pkg("approval_policy"),
        "return Path(os.path.realpath(base / cwd / path)).is_relative_to(base)",
        "return Path(os.path.normpath(base / cwd / path)).is_relative_to(base)",
        (f"{_POLICY}::test_a_link_out_of_a_local_workspace_is_outside",),
    ),
    Sabotage(
        "edit-that-makes-programs-run",
        pkg("approval_policy"),
        "if request.kind in _NEEDS_PATHS and (not paths or _starts_programs(request)):",
        "if request.kind in _NEEDS_PATHS and not paths:",
        (f"{_POLICY}::test_changing_what_makes_programs_run_commands_is_no_edit",),
    ),
    Sabotage(
        "write-without-asking",
        "ACPAgentRunner/agent/client_requests.py",
        "if old != content and not self._grants.take_write(path, old, content):",
        "if False:",
        (f"{_REQUESTS}::test_a_write_is_shown_and_done_only_when_allowed",),
    ),
    Sabotage(
        "command-without-asking",
        "ACPAgentRunner/agent/client_requests.py",
        "if not self._grants.take_command(command, args, cwd, env):",
        "if False:",
        (f"{_REQUESTS}::test_a_command_is_shown_whole_and_not_run_when_refused",),
        red="ValueError: not enough values to unpack",
    ),
    Sabotage(
        "rejection-runs-all-the-same",
        "ACPAgentRunner/agent/client_requests.py",
        "if answer.choice_id != _ALLOW.choice_id:",
        "if False:",
        (f"{_REQUESTS}::test_a_command_is_shown_whole_and_not_run_when_refused",),
    ),
    Sabotage(
        "answer-after-the-turn-counts",
        "ACPAgentRunner/agent/client_requests.py",
        "return answer if turns == self._turns else Answer()",
        "return answer",
        (f"{_REQUESTS}::test_an_answer_that_meets_the_end_of_its_turn_allows_nothing",),
    ),
    Sabotage(
        "write-through-a-link",
        pkg("workspace_files"),
        "below = os.open(part, _DIRECTORY, dir_fd=handle)",
        "below = os.open(part, os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)",
        (f"{_REQUESTS}::test_writing_follows_no_link_at_all",),
    ),
)

_chat = (
    Sabotage(
        "last-delta-dropped",
        pkg("event_buffer"),
        'return dataclasses.replace(self.event, text="".join([self.event.text, *self.more]))',
        'return dataclasses.replace(self.event, text="".join([self.event.text, *self.more[:-1]]))',
        ("test_acp_turns.py::test_five_thousand_updates_arrive_in_order",),
    ),
    Sabotage(
        "run-ends-before-everything-is-sent",
        pkg("results"),
        "await self._drain()",
        "",
        ("test_results.py::test_any_run_shows_the_answer_once_and_nothing_else",),
        within="async def _finish_stream(",
    ),
    Sabotage(
        "two-terminal-results",
        pkg("results"),
        "self._finished = True",
        "pass",
        ("test_results.py::test_nothing_follows_the_terminal_result",),
        within="async def finish(",
    ),
    Sabotage(
        "address-fetched-as-an-attachment",
        pkg("attachments"),
        'inline = source.data or (source.url if source.url[:5].lower() == "data:" else "")',
        "inline = source.data or source.url",
        ("test_attachments.py::test_an_address_is_never_fetched_and_the_person_is_told",),
    ),
    Sabotage(
        "session-given-up-at-any-failure",
        pkg("held_session"),
        "if await store.save(session_id):",
        'if await store.save(""):',
        ("test_run_loop.py::test_without_keep_warm_the_session_is_closed_and_resumed_by_its_stored_id",),
    ),
)

SABOTAGES: Final[tuple[Sabotage, ...]] = (*_processes, *_approvals, *_chat)
