"""Keys that lack one of their parts: each part of each key in turn."""

from __future__ import annotations

from typing import Final

from tooling.sabotages.line import Sabotage, pkg

BINDING: Final = (
    "instance_uuid",
    "workspace_uuid",
    "placement_generation",
    "installation_uuid",
    "runtime_revision",
    "artifact_digest",
)
"""The parts of an ``InstallationBinding`` (SDK 0.7.18)."""
LASTING: Final = ("instance_uuid", "workspace_uuid", "installation_uuid")

_KEYS: Final = "test_identity.py::TestNoKeyLacksAPart"
_SCOPED: Final = f"{_KEYS}::test_a_scoped_name_stands_on_the_whole_binding"
_CONVERSATION: Final = f"{_KEYS}::test_a_conversation_key_stands_on_binding_chat_and_actor"
_SESSION: Final = f"{_KEYS}::test_a_session_key_stands_on_installation_chat_actor_and_place"
_REGISTRY: Final = "test_installations.py::test_every_part_of_the_binding_is_part_of_the_key"


def _without(old: str, part: str) -> str:
    """The line without one of the things that stand in it."""
    assert old.count(part) == 1
    return old.replace(part, "")


# ------------------------------------------------------------------ the installation

_PARTS = 'return None if self.binding is None else _pairs(self.binding.model_dump(mode="json"))'
_LASTING_LINE = '_LASTING: Final = ("instance_uuid", "workspace_uuid", "installation_uuid")'
_REGISTERED = "found = _installations.get(key)"

_installation = (
    *(
        Sabotage(
            f"names-without-the-bindings-{part}",
            pkg("identity"),
            _PARTS,
            f'return None if self.binding is None else _pairs(self.binding.model_dump(mode="json", exclude={{"{part}"}}))',
            (_SCOPED,),
        )
        for part in BINDING
    ),
    *(
        Sabotage(
            f"stored-names-without-the-bindings-{part}",
            pkg("identity"),
            _LASTING_LINE,
            f"_LASTING: Final = {tuple(each for each in LASTING if each != part)!r}",
            (_SESSION,),
        )
        for part in LASTING
    ),
    *(
        Sabotage(
            f"registry-without-the-bindings-{part}",
            pkg("installations"),
            "key = UNBOUND if binding is None else binding",
            f'key = UNBOUND if binding is None else binding.model_copy(update={{"{part}": ""}})',
            (f"{_REGISTRY}[changed{number}]",),
            within="def installation(",
        )
        for number, part in enumerate(BINDING)
    ),
)

# ------------------------------------------------------------------ people, chats, what is stored and what lives

_ACTOR = "return [self.kind, self.actor_id, self.bot_id]"
_CHAT = "return [self.bot_id, self.conversation_id]"
_CONVERSATION_KEY = (
    'return _digest("conversation", authority.parts(), conversation.parts(), None if actor is None else actor.parts())'
)
_SESSION_KEY = 'return _digest("session", authority.lasting_parts(), conversation.parts(), who, [agent, machine, workspace])'
_SCOPED_NAME = 'return _digest("actor", authority.parts(), actor.parts())'
_LASTING_NAME = 'return _digest("person", authority.lasting_parts(), actor.parts(), actor.sender_id)'

_people = (
    *(
        Sabotage(f"actor-without-{name}", pkg("identity"), _ACTOR, _without(_ACTOR, part), (f"{_KEYS}::{test}",))
        for name, part, test in (
            ("kind", "self.kind, ", "test_a_scoped_name_stands_on_the_whole_actor"),
            ("id", "self.actor_id, ", "test_a_scoped_name_stands_on_the_whole_actor"),
            ("bot", ", self.bot_id", "test_a_scoped_name_stands_on_the_whole_actor"),
        )
    ),
    *(
        Sabotage(f"chat-without-{name}", pkg("identity"), _CHAT, _without(_CHAT, part), (_CONVERSATION,))
        for name, part in (("bot", "self.bot_id, "), ("conversation-id", ", self.conversation_id"))
    ),
    *(
        Sabotage(
            f"actor-name-without-{name}", pkg("identity"), _SCOPED_NAME, _without(_SCOPED_NAME, part), (f"{_KEYS}::{test}",)
        )
        for name, part, test in (
            ("installation", "authority.parts(), ", "test_a_scoped_name_stands_on_the_whole_binding"),
            ("actor", ", actor.parts()", "test_a_scoped_name_stands_on_the_whole_actor"),
        )
    ),
    *(
        Sabotage(
            f"conversation-key-without-{name}",
            pkg("identity"),
            _CONVERSATION_KEY,
            _without(_CONVERSATION_KEY, part),
            (_CONVERSATION,),
        )
        for name, part in (
            ("installation", "authority.parts(), "),
            ("chat", "conversation.parts(), "),
            ("actor", ", None if actor is None else actor.parts()"),
        )
    ),
    *(
        Sabotage(f"session-key-without-{name}", pkg("identity"), _SESSION_KEY, _without(_SESSION_KEY, part), (_SESSION,))
        for name, part in (
            ("installation", "authority.lasting_parts(), "),
            ("chat", "conversation.parts(), "),
            ("actor", "who, "),
            ("agent", "agent, "),
            ("machine", "machine, "),
            ("workspace", ", workspace"),
        )
    ),
    *(
        Sabotage(
            f"person-who-may-answer-without-{name}",
            pkg("identity"),
            _LASTING_NAME,
            _without(_LASTING_NAME, part),
            (f"{_KEYS}::{test}",),
        )
        for name, part, test in (
            ("installation", "authority.lasting_parts(), ", "test_a_lasting_name_stands_on_the_installation"),
            ("actor", ", actor.parts()", "test_a_lasting_name_is_one_persons"),
            ("sender", ", actor.sender_id", "test_a_lasting_name_is_one_persons"),
        )
    ),
    Sabotage(
        "keys-run-together",
        pkg("identity"),
        'encoded = json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode("ascii")',
        'encoded = repr(parts).translate({ord(each): None for each in "[](), \'"}).encode("ascii", "replace")',
        ("test_identity.py::TestEncoding::test_no_concatenation_collides",),
    ),
    Sabotage(
        "decisions-without-installation",
        pkg("decision_log"),
        'return "" if parts is None else hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()',
        'return "" if parts is None else hashlib.sha256(json.dumps(parts[:1]).encode("ascii")).hexdigest()',
        ("test_decision_log.py::TestPlaces::test_every_part_of_a_binding_counts",),
    ),
)

# ------------------------------------------------------------------ live sessions

_TAKEN = "if live.usable and live.fingerprint == fingerprint:"
_FINGERPRINT = (
    "described = json.dumps([to_json(spec), place.launcher.machine, place.way, place.worktree, assets], sort_keys=True)"
)
_WARM = "test_warm_sessions.py::test_another_key_or_fingerprint_gets_nothing_and_a_misfit_is_closed"
_PARTS_OF_FINGERPRINT = "test_places.py::test_a_kept_session_is_remembered_by_everything_it_was_opened_with"

_live = (
    Sabotage(
        "live-session-of-any-key",
        pkg("warm_sessions"),
        "live = self._leave(key)",
        "live = self._leave(key if key in self._waiting else next(iter(self._waiting), key))",
        (_WARM,),
        within="def take(self, key",
    ),
    Sabotage("live-session-with-other-settings", pkg("warm_sessions"), _TAKEN, "if live.usable:", (_WARM,)),
    *(
        Sabotage(
            f"live-session-without-its-{name}",
            pkg("held_session"),
            _FINGERPRINT,
            _without(_FINGERPRINT, part),
            (_PARTS_OF_FINGERPRINT,),
        )
        for name, part in (
            ("spec", "to_json(spec), "),
            ("machine", "place.launcher.machine, "),
            ("way", "place.way, "),
            ("worktree", "place.worktree, "),
            ("assets", ", assets"),
        )
    ),
)

# ------------------------------------------------------------------ the writer's guard

_GUARD = r'name = hashlib.sha256(f"{os.path.realpath(workspace)}\0{session_id}".encode("utf-8", "surrogatepass")).hexdigest()'
_BUSY = "SessionUnavailable: This session is in use"
_WRITER = "test_runtime_support.py::test_a_session_has_one_writer"

_guard = (
    Sabotage(
        "guard-without-workspace",
        pkg("runtime_support"),
        _GUARD,
        _without(_GUARD, "{os.path.realpath(workspace)}"),
        (_WRITER,),
        red=_BUSY,
    ),
    Sabotage("guard-without-session", pkg("runtime_support"), _GUARD, _without(_GUARD, "{session_id}"), (_WRITER,), red=_BUSY),
    Sabotage(
        "guard-by-name-instead-of-real-path",
        pkg("runtime_support"),
        _GUARD,
        _GUARD.replace("os.path.realpath(workspace)", "workspace"),
        (_WRITER,),
    ),
    Sabotage(
        "guard-without-account",
        pkg("held_session"),
        'home = spec.env.get("HOME") or runtime_support.home_directory()',
        "home = runtime_support.home_directory()",
        ("test_run_loop.py::test_a_session_of_another_account_is_not_busy_with_this_one_s",),
    ),
)

# ------------------------------------------------------------------ grants

_COVERS = "return bool(name) and (*actor.parts(), actor.sender_id, name) in self._granted"
_PATTERN = 'return hashlib.sha256(json.dumps(["edit", event.cwd, paths]).encode("ascii")).hexdigest()'
_PLACED = 'return hashlib.sha256(json.dumps([exact, machine, directory]).encode("ascii")).hexdigest() if exact else ""'
_DIGEST = "whole = json.dumps([event.kind, event.command, list(event.paths), diffs, event.cwd, named], ensure_ascii=False)"
_ONCE = "test_approval_attacks.py::test_the_name_of_what_is_allowed_once_has_every_part"
_ACTION = "test_what_is_allowed_is_named_by_everything_that_would_be_done"
_GRANTS = "test_approval_attacks.py::test_a_grant_for_the_session_has_every_part"

_grants = (
    *(
        Sabotage(f"session-grant-without-{name}", pkg("session_grants"), _COVERS, new, (_GRANTS,))
        for name, new in (
            (
                "actor-kind",
                "return bool(name) and (*actor.parts()[1:], actor.sender_id, name) in {key[1:] for key in self._granted}",
            ),
            (
                "actor-id",
                "return bool(name) and (actor.kind, actor.bot_id, actor.sender_id, name)"
                " in {(key[0], *key[2:]) for key in self._granted}",
            ),
            (
                "bot",
                "return bool(name) and (*actor.parts()[:2], actor.sender_id, name)"
                " in {(*key[:2], *key[3:]) for key in self._granted}",
            ),
            ("sender", "return bool(name) and (*actor.parts(), name) in {(*key[:3], key[4]) for key in self._granted}"),
            ("action", "return bool(name) and (*actor.parts(), actor.sender_id) in {key[:4] for key in self._granted}"),
        )
    ),
    Sabotage("edit-grant-without-directory", pkg("session_grants"), _PATTERN, _without(_PATTERN, "event.cwd, "), (_GRANTS,)),
    Sabotage("edit-grant-without-files", pkg("session_grants"), _PATTERN, _without(_PATTERN, ", paths"), (_GRANTS,)),
    *(
        Sabotage(f"single-grant-without-{name}", pkg("session_grants"), _PLACED, _without(_PLACED, part), (_ONCE,))
        for name, part in (("action", "exact, "), ("machine", "machine, "), ("directory", ", directory"))
    ),
    *(
        Sabotage(
            f"action-without-{name}",
            pkg("interactions"),
            _DIGEST,
            _without(_DIGEST, part),
            (f"test_approval_attacks.py::{_ACTION}",),
        )
        for name, part in (
            ("kind", "event.kind, "),
            ("command", "event.command, "),
            ("paths", "list(event.paths), "),
            ("diffs", "diffs, "),
            ("directory", "event.cwd, "),
            ("title", ", named"),
        )
    ),
)

# ------------------------------------------------------------------ LangBot's tools

_OTHERS_PATH = "test_langbot_tools.py::test_one_installations_bearer_opens_nothing_on_anothers_path"

_tools = (
    Sabotage(
        "tools-without-path",
        pkg("tools_listener"),
        "return endpoint if hmac.compare_digest(path, endpoint.path.encode()) else None",
        "return endpoint",
        (_OTHERS_PATH,),
    ),
    Sabotage(
        "tools-without-bearer",
        pkg("tools_listener"),
        "endpoint = self._endpoints.get(digest)",
        "endpoint = next((each for each in self._endpoints.values() if each.path == request.path), None); digest = "
        'endpoint.digest if endpoint else b""',
        (_OTHERS_PATH,),
    ),
    Sabotage(
        "tools-session-of-any-installation",
        pkg("langbot_tools"),
        "if self._surface.closed or (invoked is not None and invoked != self._binding):",
        "if self._surface.closed:",
        ("test_langbot_tools.py::test_a_session_never_takes_another_installations_run",),
    ),
    Sabotage(
        "tools-call-without-its-runs-context",
        pkg("langbot_tools"),
        "task = asyncio.create_task(self._perform(name, arguments), context=self._context.copy())",
        "task = asyncio.create_task(self._perform(name, arguments))",
        ("test_langbot_tools.py::test_a_call_leaves_the_worker_as_the_installation_whose_run_is_asking",),
    ),
)

# ------------------------------------------------------------------ daemons and their jobs

_AUTH = "test_relay_protocol.py"
_OTHERS_JOB = "test_relay_protocol_hostile.py::test_what_a_daemon_says_about_another_s_job_is_counted_and_changes_nothing"
_VECTORS = "test_relay_protocol_vectors.py::test_both_roles_reproduce_the_golden_vectors"
_TRUST = "test_coding_relay_v1_trust.py"
_DAEMON_KEY = 'return _body(b"daemon key", daemon_id.encode("utf-8"))'
_SCOPE = 'names = ("instance_uuid", "workspace_uuid", "installation_uuid")'
_MARKER_NAME = r'name = hashlib.sha256(f"{daemon_id}\0{job_id}".encode("utf-8", "surrogatepass")).hexdigest()[:40]'
_SAME_DAEMON = "if link.incarnation != identity.incarnation or link.key != socket.key:"
_JOB_MARKER = 'marker = f"{self.table}.{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"'

_daemons = (
    Sabotage(
        "daemon-key-without-daemon-id",
        pkg("relay_auth"),
        _DAEMON_KEY,
        _without(_DAEMON_KEY, ', daemon_id.encode("utf-8")'),
        (f"{_AUTH}::test_a_per_daemon_key_can_only_be_itself",),
    ),
    *(
        Sabotage(f"proof-without-{name}", pkg("relay_auth"), old, new, tests, within="def body(")
        for name, old, new, tests in (
            ("role", "label,", 'b"",', (f"{_AUTH}::test_the_hub_s_own_proof_does_not_pass_for_a_daemon_s",)),
            ("daemon-id", 'self.daemon_id.encode("utf-8"),', "", (_VECTORS,)),
            ("daemon-nonce", 'self.daemon_nonce.encode("ascii"),', "", (_VECTORS,)),
            ("hub-nonce", 'self.hub_nonce.encode("ascii"),', "", (_VECTORS,)),
            ("hello", "self.hello,", "", (f"{_AUTH}::test_a_hello_changed_on_its_way_is_not_proven",)),
            ("challenge", "self.challenge,", "", (_VECTORS,)),
        )
    ),
    Sabotage(
        "one-seal-for-both-directions",
        pkg("relay_auth"),
        'from_hub = self.derive(key, b"frames of the hub")',
        'from_hub = self.derive(key, b"frames of the daemon")',
        ("test_relay_protocol_hostile.py::test_frames_of_one_connection_are_noise_on_another", _VECTORS),
    ),
    Sabotage(
        "daemon-without-installation",
        pkg("relay_hub"),
        "links = self._links.get(installation, {}).values()",
        "links = [link for links in self._links.values() for link in links.values()]",
        (f"{_AUTH}::test_a_revoked_installation_loses_its_daemons_and_no_other_does",),
    ),
    Sabotage(
        "daemon-ids-compared-instead-of-incarnations",
        pkg("relay_hub"),
        _SAME_DAEMON,
        "if link.daemon_id != identity.daemon_id or link.key != socket.key:",
        (f"{_AUTH}::test_a_second_daemon_with_a_live_id_is_turned_away",),
    ),
    Sabotage(
        "incarnation-without-key",
        pkg("relay_hub"),
        _SAME_DAEMON,
        "if link.incarnation != identity.incarnation:",
        (f"{_AUTH}::test_the_same_incarnation_with_another_key_is_probed_like_a_stranger",),
    ),
    Sabotage(
        "jobs-go-on-with-any-incarnation",
        pkg("relay_hub"),
        "self._settle(link, table, same=link.incarnation == identity.incarnation)",
        "self._settle(link, table, same=link.daemon_id == identity.daemon_id)",
        (
            f"{_AUTH}::test_a_restarted_daemon_reports_what_it_has_ended",
            f"{_AUTH}::test_a_cancel_that_meets_a_restarted_daemon_is_answered_by_its_table",
            f"{_TRUST}::TestEnds::test_a_killed_daemon_s_job_is_lost_and_its_successor_proves_the_end",
        ),
    ),
    Sabotage(
        "jobs-go-on-with-any-hub-process",
        pkg("relay_table"),
        "self.epoch == epoch",
        "True",
        (
            f"{_AUTH}::test_a_job_that_does_not_stand_where_the_hub_left_it_is_not_gone_on_with",
            f"{_AUTH}::test_a_restarted_hub_ends_what_it_does_not_know",
        ),
    ),
    Sabotage(
        "events-from-any-connection",
        pkg("relay_hub"),
        "job = None if link is None else link.jobs.get(job_id_of(message))",
        "job = self._jobs.get(job_id_of(message))",
        (_OTHERS_JOB,),
    ),
    Sabotage(
        "journal-acknowledged-by-a-foreign-connection",
        pkg("relay_hub"),
        "job = None if socket.link is None else socket.link.jobs.get(job_id_of(message))",
        "job = self._jobs.get(job_id_of(message))",
        (_OTHERS_JOB,),
    ),
    Sabotage(
        "end-told-by-any-connection",
        pkg("relay_hub"),
        "job = None if link is None else link.jobs.get(job_id)",
        "job = self._jobs.get(job_id)",
        (_OTHERS_JOB,),
    ),
    *(
        Sabotage(
            f"fence-without-{part}",
            pkg("relay_markers"),
            _SCOPE,
            f"names = {tuple(each for each in LASTING if each != part)!r}",
            (f"{_TRUST}::TestFences::test_another_revision_finds_them_and_another_installation_does_not",),
        )
        for part in LASTING
    ),
    *(
        Sabotage(
            f"fence-without-{name}",
            pkg("relay_markers"),
            _MARKER_NAME,
            _without(_MARKER_NAME, part),
            (f"{_TRUST}::TestFences::test_a_fence_is_of_one_daemon_and_one_job",),
        )
        for name, part in (("daemon", "{daemon_id}"), ("job", "{job_id}"))
    ),
    Sabotage(
        "hub-without-installation",
        pkg("relay_hub_shell"),
        "hub = _hubs.get((key, installation))",
        "hub = next((each for (product, _), each in _hubs.items() if product == key), None)",
        (f"{_TRUST}::TestListener::test_a_hub_is_of_one_package_and_one_installation",),
    ),
    Sabotage(
        "hub-without-product",
        pkg("relay_hub_shell"),
        "hub = _hubs.get((key, installation))",
        "hub = next((each for (_, owner), each in _hubs.items() if owner == installation), None)",
        (f"{_TRUST}::TestListener::test_a_hub_is_of_one_package_and_one_installation",),
    ),
    Sabotage(
        "jobs-of-every-installation",
        pkg("relay_listener"),
        "return [job for job_id, job in self._jobs.items() if self._owners[job_id] == installation]",
        "return list(self._jobs.values())",
        (f"{_TRUST}::TestListener::test_two_installations_share_an_address_and_nothing_else",),
    ),
    *(
        Sabotage(
            f"job-marker-without-{name}",
            pkg("daemon_jobs"),
            _JOB_MARKER,
            _without(_JOB_MARKER, part),
            ("test_daemon_jobs.py::TestFile::test_a_marker_is_of_one_table_and_one_job",),
        )
        for name, part in (("table", "{self.table}"), ("job", "{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"))
    ),
    Sabotage(
        "daemons-machine-without-its-id",
        pkg("remote_session"),
        'return "daemon-" + hashlib.sha256(self._daemon_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]',
        'return "daemon-" + hashlib.sha256(b"").hexdigest()[:16]',
        ("test_remote_session.py::test_a_machine_s_name_is_stable_and_its_place_starts_nothing",),
    ),
)

SABOTAGES: Final[tuple[Sabotage, ...]] = (*_installation, *_people, *_live, *_guard, *_grants, *_tools, *_daemons)
