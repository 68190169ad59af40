"""Who is asking: authority from the host's bindings only, trusted actors only, and keys that hold every one of their parts."""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.definition.plugin import BasePlugin
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.event import ActorContext
from langbot_plugin.api.proxies.invocation import bind_invocation
from langbot_plugin.entities.io.context import ActionContext, InstallationBinding

from pkg import identity
from pkg.errors import Refused
from pkg.identity import Actor, Authority, Conversation

POOL = {"LANGBOT_PLUGIN_RUNTIME_PROFILE": "shared"}
DEBUG: dict[str, str] = {}


def binding(**changes: Any) -> InstallationBinding:
    """A complete binding with ``changes``."""
    parts = {
        "instance_uuid": "instance",
        "workspace_uuid": "workspace",
        "placement_generation": 1,
        "installation_uuid": "installation",
        "runtime_revision": 1,
        "artifact_digest": "a" * 64,
    }
    return InstallationBinding.model_validate({**parts, **changes})


OTHER_BINDINGS = (
    binding(instance_uuid="instance2"),
    binding(workspace_uuid="workspace2"),
    binding(placement_generation=2),
    binding(installation_uuid="installation2"),
    binding(runtime_revision=2),
    binding(artifact_digest="b" * 64),
)
"""Each differs from :func:`binding` in one part; together they cover every part (a test says so)."""


class Handler:
    """What the SDK's worker handler shows of its connection."""

    def __init__(self, bound: ActionContext | None) -> None:
        self.bound_action_context = bound


def runner_on(bound: ActionContext | None) -> tuple[Runner, Handler]:
    """A runner whose worker's connection is bound to ``bound``."""
    runner, plugin, handler = Runner(), BasePlugin.__new__(BasePlugin), Handler(bound)  # type: ignore[no-untyped-call]
    plugin.plugin_runtime_handler = handler  # type: ignore[assignment]
    runner.plugin = plugin
    runner.bind_runtime(plugin_runtime_handler=handler)  # type: ignore[no-untyped-call]
    return runner, handler


def context(**changes: Any) -> RunnerContext:
    """A message of person 7 in one chat of one bot, as the host sends it, with ``changes``."""
    parts: dict[str, Any] = {
        "run_id": "run-1",
        "trigger": {"type": "message.received"},
        "event": {"event_id": "e", "event_type": "message.received", "source": "platform"},
        "conversation": {"conversation_id": "person_7", "bot_id": "bot-1"},
        "actor": {"actor_type": "user", "actor_id": "7", "actor_name": "Seven"},
        "input": {"text": "hello"},
        "delivery": {"surface": "platform"},
        "resources": {},
        "runtime": {},
    }
    return RunnerContext.model_validate({**parts, **changes})


class TestAuthority:
    """Where the authority of a run comes from, per shape of worker."""

    def test_the_invocation_decides_in_a_shared_worker(self) -> None:
        """Two installations in one process each act for themselves, and the process knows it is a pool."""
        runner, handler = runner_on(None)
        for one in (binding(), *OTHER_BINDINGS):
            with bind_invocation(handler, binding=one, config={}):
                authority = identity.authority_of(runner, POOL)
            assert authority == Authority(one, pooled=True)

    def test_the_invocation_decides_before_the_connection(self) -> None:
        """A run acts for whoever it was invoked for, whatever its worker's connection belongs to."""
        runner, handler = runner_on(binding())
        for other in OTHER_BINDINGS:
            with bind_invocation(handler, binding=other, config={}):
                assert identity.authority_of(runner, POOL) == Authority(other, pooled=True)

    def test_a_dedicated_worker_is_no_pool(self) -> None:
        """The invocation's binding equals the connection's."""
        runner, handler = runner_on(binding())
        with bind_invocation(handler, binding=binding(), config={}):
            assert identity.authority_of(runner, DEBUG) == Authority(binding(), pooled=False)

    @pytest.mark.parametrize("profile", [DEBUG, POOL])
    def test_a_dedicated_worker_falls_back_to_its_connection(self, profile: dict[str, str]) -> None:
        """Without an invocation binding the connection's is the authority, jailed or not."""
        runner, _ = runner_on(binding())
        assert identity.authority_of(runner, profile) == Authority(binding(), pooled=False)

    def test_a_debug_worker_has_no_authority(self) -> None:
        """Debug and old workers serve one installation; a workspace context without an installation is not one."""
        runner, _ = runner_on(ActionContext(instance_uuid="i", workspace_uuid="w"))
        assert identity.authority_of(runner, DEBUG) == Authority(None)
        assert identity.authority_of(runner_on(None)[0], DEBUG) == Authority(None)

    def test_a_shared_worker_without_a_binding_is_refused(self) -> None:
        """Our rule: never guess whose run it is."""
        runner, handler = runner_on(None)
        with pytest.raises(Refused) as caught:
            identity.authority_of(runner, POOL)
        assert caught.value.code == "coding.no_binding"
        with bind_invocation(handler, config={}), pytest.raises(Refused, match="installation"):
            identity.authority_of(runner, POOL)

    def test_an_ended_invocation_gives_no_authority(self) -> None:
        """The SDK's rule: work that escaped its run cannot act for anybody."""
        runner, handler = runner_on(None)
        with bind_invocation(handler, binding=binding(), config={}):
            escaped = contextvars.copy_context()
        with pytest.raises(RuntimeError, match="ended"):
            escaped.run(identity.authority_of, runner, POOL)

    def test_a_pool_of_an_sdk_without_the_revocation_hook_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """SDKs before 0.7.5 never tell a shared worker that an installation is gone; a dedicated worker needs no telling."""
        monkeypatch.delattr(BasePlugin, "on_installation_revoked")
        pool, handler = runner_on(None)
        with bind_invocation(handler, binding=binding(), config={}), pytest.raises(Refused) as caught:
            identity.authority_of(pool, POOL)
        assert caught.value.code == "coding.sdk_too_old"
        dedicated, handler = runner_on(binding())
        with bind_invocation(handler, binding=binding(), config={}):
            assert identity.authority_of(dedicated, DEBUG).pooled is False


class TestTrustedActor:
    """Only the host says who writes."""

    def test_a_user_with_an_id_is_trusted(self) -> None:
        """Our rule; the display name is kept for display and is no part of anything."""
        actor = identity.trusted_actor(context())
        assert (actor.kind, actor.actor_id, actor.bot_id, actor.sender_id, actor.name) == ("user", "7", "bot-1", "7", "Seven")
        assert actor == identity.trusted_actor(context(actor={"actor_type": "user", "actor_id": "7", "actor_name": "Mallory"}))

    def test_a_submitted_interaction_counts(self) -> None:
        """Host 4.11.2 sends the presser's id with an empty or missing name."""
        for name in ("", None):
            ctx = context(
                event={"event_id": "e", "event_type": "interaction.submitted", "source": "platform"},
                actor={"actor_type": "user", "actor_id": "7", "actor_name": name},
                input={"interaction": {"interaction_id": "one", "action_id": "allow"}},
            )
            assert identity.trusted_actor(ctx) == identity.trusted_actor(context())

    @pytest.mark.parametrize(
        "actor",
        [
            None,
            {"actor_type": "user", "actor_id": None},
            {"actor_type": "user", "actor_id": ""},
            {"actor_type": "user", "actor_id": "  "},
            {"actor_type": "system", "actor_id": "7"},
            {"actor_type": "plugin", "actor_id": "7"},
            {"actor_type": "User", "actor_id": "7"},
            {"actor_type": "", "actor_id": "7"},
        ],
    )
    def test_anything_else_is_refused(self, actor: dict[str, Any] | None) -> None:
        """Our rule: a run without a trusted host actor starts nothing, whatever its texts claim."""
        claims = {"variables": {"sender_id": "7"}, "metadata": {"actor_id": "7"}, "input": {"text": "I am user 7"}}
        ctx = context(actor=actor, conversation={"conversation_id": "person_7", "bot_id": "bot-1", "sender_id": "7"}, **claims)
        with pytest.raises(Refused) as caught:
            identity.trusted_actor(ctx)
        assert caught.value.code == "coding.no_actor"

    def test_legacy_sources_stand_in_for_a_missing_sender(self) -> None:
        """The form can say that a whole session or bot counts as one user."""
        ctx = context(actor=None)
        session = identity.trusted_actor(ctx, "legacy-session")
        bot = identity.trusted_actor(ctx, "legacy-bot")
        assert (session.kind, session.actor_id, session.sender_id) == ("session", "person_7", "")
        assert (bot.kind, bot.actor_id, bot.sender_id) == ("bot", "bot-1", "")

    def test_legacy_sources_need_a_host_value_too(self) -> None:
        """Without a conversation there is nothing to stand in."""
        for source in ("legacy-session", "legacy-bot"):
            with pytest.raises(Refused):
                identity.trusted_actor(context(actor=None, conversation=None), source)

    def test_a_legacy_session_is_one_actor_for_all_its_people(self) -> None:
        """Two members share everything there, yet stay two people for ``allowed-actors``."""
        one = identity.trusted_actor(context(), "legacy-session")
        two = identity.trusted_actor(context(actor={"actor_type": "user", "actor_id": "8"}), "legacy-session")
        assert one == two
        assert (one.sender_id, two.sender_id) == ("7", "8")


class TestWhoMayUseIt:
    """``allowed-actors`` and steering."""

    def test_an_empty_list_lets_everybody_start(self) -> None:
        """Our rule."""
        identity.check_allowed(identity.trusted_actor(context()), ())

    def test_a_list_lets_only_its_members_start(self) -> None:
        """Our rule; ids are compared whole."""
        actor = identity.trusted_actor(context())
        identity.check_allowed(actor, ("7",))
        for others in (("8",), ("77",), ("",), ("Seven",), ("person_7",)):
            with pytest.raises(Refused) as caught:
                identity.check_allowed(actor, others)
            assert caught.value.code == "coding.actor_not_allowed"

    @pytest.mark.parametrize("source", ["legacy-session", "legacy-bot"])
    def test_a_legacy_source_does_not_hide_the_person(self, source: str) -> None:
        """A known sender is judged as himself even where a whole session counts as one user."""
        actor = identity.trusted_actor(context(), source)  # type: ignore[arg-type]
        identity.check_allowed(actor, ("7",))
        with pytest.raises(Refused):
            identity.check_allowed(actor, (actor.actor_id,))

    def test_only_the_requester_and_the_list_may_steer(self) -> None:
        """Our rule: an empty list lets nobody but the requester into a running turn."""
        requester = identity.trusted_actor(context())
        seven, eight = (ActorContext(actor_type="user", actor_id=each) for each in "78")
        assert identity.may_steer(requester, seven, ())
        assert not identity.may_steer(requester, eight, ())
        assert identity.may_steer(requester, eight, ("8",))
        assert identity.may_steer(requester, seven, ("8",))

    @pytest.mark.parametrize("sender", [None, ActorContext(actor_type="system", actor_id="7"), ActorContext(actor_type="user")])
    def test_an_untrusted_sender_never_steers(self, sender: ActorContext | None) -> None:
        """Not even when the requester has no sender either."""
        for actor in (identity.trusted_actor(context()), identity.trusted_actor(context(actor=None), "legacy-bot")):
            assert not identity.may_steer(actor, sender, ("",))


class TestConversation:
    """Which chat it is."""

    def test_the_id_alone_is_not_the_chat(self) -> None:
        """Host 4.11.2 repeats ``person_7`` on every bot."""
        one = identity.conversation_of(context())
        two = identity.conversation_of(context(conversation={"conversation_id": "person_7", "bot_id": "bot-2"}))
        assert one == Conversation("bot-1", "person_7")
        assert one != two

    @pytest.mark.parametrize("conversation", [None, {"bot_id": "bot-1"}, {"conversation_id": "", "bot_id": "bot-1"}])
    def test_a_run_without_a_chat_shares_nothing(self, conversation: dict[str, Any] | None) -> None:
        """Two such runs never meet in one session."""
        one = identity.conversation_of(context(conversation=conversation, run_id="r1"))
        two = identity.conversation_of(context(conversation=conversation, run_id="r2"))
        assert one != two


# ------------------------------------------------------------------ keys

AUTHORITY = Authority(binding())
ACTOR = Actor("user", "7", "bot-1")
CHAT = Conversation("bot-1", "person_7")
PLACE = {"agent": "acp", "machine": "m", "workspace": "/w"}


OTHER_ACTORS = (
    dataclasses.replace(ACTOR, kind="session"),
    dataclasses.replace(ACTOR, actor_id="8"),
    dataclasses.replace(ACTOR, bot_id="bot-2"),
)
"""Each differs from ``ACTOR`` in one part of its identity."""
OTHER_CHATS = (dataclasses.replace(CHAT, bot_id="bot-2"), dataclasses.replace(CHAT, conversation_id="person_8"))
"""Each differs from ``CHAT`` in one part."""


class TestNoKeyLacksAPart:
    """Changing any part changes the key: taking one out of the encoding makes these red."""

    def test_the_bindings_below_cover_every_part(self) -> None:
        """A part that a newer SDK adds must be looked at here."""
        ours = binding().model_dump()
        assert {name for other in OTHER_BINDINGS for name, value in other.model_dump().items() if value != ours[name]} == set(
            ours
        )

    @pytest.mark.parametrize("other", OTHER_BINDINGS)
    def test_a_scoped_name_stands_on_the_whole_binding(self, other: InstallationBinding) -> None:
        """Another installation, or another revision of it, has other names."""
        assert identity.scoped_name(AUTHORITY, ACTOR) != identity.scoped_name(Authority(other), ACTOR)

    @pytest.mark.parametrize("other", OTHER_ACTORS)
    def test_a_scoped_name_stands_on_the_whole_actor(self, other: Actor) -> None:
        """The same id on another bot may be another person."""
        assert identity.scoped_name(AUTHORITY, ACTOR) != identity.scoped_name(AUTHORITY, other)

    def test_a_conversation_key_stands_on_binding_chat_and_actor(self) -> None:
        """The key of warm processes."""
        key = identity.conversation_key(AUTHORITY, CHAT, ACTOR)
        others = [
            *(identity.conversation_key(Authority(each), CHAT, ACTOR) for each in OTHER_BINDINGS),
            *(identity.conversation_key(AUTHORITY, each, ACTOR) for each in OTHER_CHATS),
            *(identity.conversation_key(AUTHORITY, CHAT, each) for each in OTHER_ACTORS),
            identity.conversation_key(AUTHORITY, CHAT, None),
            identity.conversation_key(Authority(None), CHAT, ACTOR),
        ]
        assert len({key, *others}) == len(others) + 1

    def test_a_session_key_stands_on_installation_chat_actor_and_place(self) -> None:
        """The key of stored session ids: another machine, workspace or agent never resumes them."""
        lasting = [each for each in OTHER_BINDINGS if each.placement_generation == each.runtime_revision == 1]
        lasting = [each for each in lasting if each.artifact_digest == binding().artifact_digest]
        assert len(lasting) == 3
        key = identity.session_key(AUTHORITY, CHAT, ACTOR, **PLACE)
        others = [
            *(identity.session_key(Authority(each), CHAT, ACTOR, **PLACE) for each in lasting),
            *(identity.session_key(AUTHORITY, each, ACTOR, **PLACE) for each in OTHER_CHATS),
            *(identity.session_key(AUTHORITY, CHAT, each, **PLACE) for each in OTHER_ACTORS),
            *(identity.session_key(AUTHORITY, CHAT, ACTOR, **{**PLACE, name: "other"}) for name in PLACE),
            identity.session_key(AUTHORITY, CHAT, None, **PLACE),
            identity.session_key(Authority(None), CHAT, ACTOR, **PLACE),
        ]
        assert len({key, *others}) == len(others) + 1

    def test_an_unscoped_session_is_not_found_under_a_scoped_name(self) -> None:
        """Our rule: when a worker without a binding gets one, the chat begins anew; nobody inherits what had no owner."""
        assert identity.session_key(Authority(None), CHAT, ACTOR, **PLACE) not in {
            identity.session_key(Authority(each), CHAT, ACTOR, **PLACE) for each in (binding(), *OTHER_BINDINGS)
        }

    @pytest.mark.parametrize("change", [{"runtime_revision": 2}, {"artifact_digest": "b" * 64}, {"placement_generation": 2}])
    def test_a_session_outlives_settings_upgrades_and_moves(self, change: dict[str, Any]) -> None:
        """Saving the plugin's form raises the revision; nobody's session is lost by that."""
        assert identity.session_key(AUTHORITY, CHAT, ACTOR, **PLACE) == identity.session_key(
            Authority(binding(**change)), CHAT, ACTOR, **PLACE
        )

    @pytest.mark.parametrize("other", OTHER_BINDINGS)
    def test_a_lasting_name_stands_on_the_installation(self, other: InstallationBinding) -> None:
        """Who may answer an open request is known after the plugin's form was saved, in this installation only."""
        kept = other.runtime_revision == 2 or other.placement_generation == 2 or other.artifact_digest != "a" * 64
        assert (identity.lasting_name(AUTHORITY, ACTOR) == identity.lasting_name(Authority(other), ACTOR)) == kept

    @pytest.mark.parametrize("other", [*OTHER_ACTORS, dataclasses.replace(ACTOR, sender_id="other")])
    def test_a_lasting_name_is_one_persons(self, other: Actor) -> None:
        """Also where a whole session or bot is the actor: the person behind it counts."""
        assert identity.lasting_name(AUTHORITY, ACTOR) != identity.lasting_name(AUTHORITY, other)

    def test_a_shared_session_leaves_the_actor_out(self) -> None:
        """``share-session: conversation``: everybody in the chat has the same key, and no single person's."""
        keys = {identity.conversation_key(AUTHORITY, CHAT, None) for _ in ("7", "8")}
        assert len(keys) == 1
        assert identity.conversation_key(AUTHORITY, CHAT, ACTOR) not in keys

    def test_kinds_of_keys_never_meet(self) -> None:
        """The same parts under another kind are another key."""
        assert identity.conversation_key(AUTHORITY, CHAT, ACTOR) != identity.scoped_name(AUTHORITY, ACTOR)

    def test_display_data_is_no_part(self) -> None:
        """Whoever renames himself keeps his sessions and gains nobody else's."""
        renamed = dataclasses.replace(ACTOR, name="Seven", sender_id="7")
        assert identity.scoped_name(AUTHORITY, ACTOR) == identity.scoped_name(AUTHORITY, renamed)


class TestEncoding:
    """No two different tuples of parts are encoded alike."""

    def test_a_scoped_name_has_the_agreed_form(self) -> None:
        """``lb_`` and a SHA-256 in hex; usable as a file name anywhere."""
        name = identity.scoped_name(AUTHORITY, ACTOR)
        assert name.startswith("lb_")
        assert len(name) == 67
        assert set(name[3:]) <= set("0123456789abcdef")

    def test_names_without_a_binding_stay_unscoped(self) -> None:
        """Debug and old workers see the names they always saw."""
        assert identity.scoped_name(Authority(None), ACTOR) == "7"

    @given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
    def test_different_parts_give_different_keys(self, one: list[str], two: list[str]) -> None:
        """Shifting a character from one part into its neighbour, quotes, commas and brackets included, changes the key."""
        keys = [identity.conversation_key(AUTHORITY, Conversation(a, b), Actor("user", c, d)) for a, b, c, d in (one, two)]
        assert (keys[0] == keys[1]) == (one == two)

    def test_no_concatenation_collides(self) -> None:
        """Every way to cut one text into the four parts is a key of its own."""
        text = '["a","b"],\\"\x00,'
        cuts = list(itertools.combinations(range(len(text) + 1), 3))
        keys = {
            identity.conversation_key(AUTHORITY, Conversation(text[:i], text[i:j]), Actor("user", text[j:k], text[k:]))
            for i, j, k in cuts
        }
        assert len(keys) == len(cuts)

    def test_text_that_is_no_unicode_still_has_a_key(self) -> None:
        """A lone surrogate in a platform's id is encodable."""
        lone, mark = (Actor("user", each, "b") for each in ("\ud800", "?"))
        assert identity.scoped_name(AUTHORITY, lone) != identity.scoped_name(AUTHORITY, mark)
