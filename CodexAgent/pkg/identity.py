"""Who is asking: the installation a run acts for, the person behind it, and every key that is made of them.

Identity comes from the host's binding and actor only: never from text, configuration, display names or file names.

- :func:`authority_of` takes the invocation's binding, in a dedicated worker else the connection's; a worker that knows
  neither (debug, old hosts) serves one installation and its names stay as they are. A shared worker without a binding is
  refused (``coding.no_binding``), a shared worker whose SDK cannot tell us of revocations too (``coding.sdk_too_old``).
- :func:`trusted_actor` takes a host actor of type ``user`` with an id (a submitted interaction has one too), or what the
  form's ``user-id-source`` says for surfaces that have none; otherwise the run is refused (``coding.no_actor``).
- Keys are ``lb_`` + SHA-256 over a canonical JSON array of all their parts, each in its own place and every list with its
  length, so that no two different tuples of parts have the same encoding.

Two kinds of keys: :func:`scoped_name` and :func:`conversation_key` are for what lives in a process (warm sessions, audit
lines, jobs) and stand on the *whole* binding; :func:`session_key` and :func:`lasting_name` are for what is stored and must
survive a change of the settings, which raises the binding's revision, so they stand on the binding's lasting parts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.definition.plugin import BasePlugin
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.entities.builtin.runner.event import ActorContext, ConversationContext
from langbot_plugin.entities.io.context import InstallationBinding

from pkg.errors import Refused

PROFILE_VARIABLE: Final = "LANGBOT_PLUGIN_RUNTIME_PROFILE"
"""Set by the host's worker launcher; ``shared`` in jails and in the pool (SDK 0.7.18, ``runtime/security.py``)."""

UserIdSource = Literal["sender", "legacy-session", "legacy-bot"]

_LASTING: Final = ("instance_uuid", "workspace_uuid", "installation_uuid")
"""The parts of a binding that settings changes, upgrades and moves leave alone."""


@dataclass(frozen=True, slots=True)
class Authority:
    """The installation a run acts for. ``binding`` is ``None`` in debug and old workers only."""

    binding: InstallationBinding | None
    pooled: bool = False
    """Whether this process serves several installations: no local agents, no disk, nothing kept outside a run."""

    def parts(self) -> list[list[str]] | None:
        """The whole binding as name and value pairs, or ``None``."""
        return None if self.binding is None else _pairs(self.binding.model_dump(mode="json"))

    def lasting_parts(self) -> list[list[str]] | None:
        """The parts of the binding that outlive a revision, or ``None``."""
        if self.binding is None:
            return None
        return _pairs({name: getattr(self.binding, name) for name in _LASTING})


@dataclass(frozen=True, slots=True)
class Actor:
    """Whoever a run belongs to: a person, or with a legacy ``user-id-source`` a whole session or bot.

    ``bot_id`` is a part of it: the same id on two bots may be two people.
    """

    kind: Literal["user", "session", "bot"]
    actor_id: str
    bot_id: str = ""
    sender_id: str = field(default="", compare=False)
    """The person who really wrote, when the host named one; the one that ``allowed-actors`` is about."""
    name: str = field(default="", compare=False)
    """For display only."""

    def parts(self) -> list[str]:
        """What makes this actor itself."""
        return [self.kind, self.actor_id, self.bot_id]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat: the id alone repeats across bots."""

    bot_id: str
    conversation_id: str

    def parts(self) -> list[str]:
        """What makes this conversation itself."""
        return [self.bot_id, self.conversation_id]


# ------------------------------------------------------------------ authority


def authority_of(runner: Runner, environ: Mapping[str, str] = os.environ) -> Authority:
    """The authority of the invocation that is running; call it inside :meth:`Runner.run` only.

    Raises :class:`pkg.errors.Refused`: ``coding.no_binding`` or ``coding.sdk_too_old``.
    """
    plugin = getattr(runner, "plugin", None)
    connection = getattr(getattr(plugin, "plugin_runtime_handler", None), "bound_action_context", None)
    dedicated = connection if isinstance(connection, InstallationBinding) else None
    binding: InstallationBinding | None = runner.get_installation_binding()  # type: ignore[no-untyped-call]
    if binding is None:
        binding = dedicated
    if binding is None:
        if environ.get(PROFILE_VARIABLE) == "shared":
            raise Refused("coding.no_binding")
        return Authority(None)
    pooled = binding != dedicated
    if pooled and not hasattr(BasePlugin, "on_installation_revoked"):
        raise Refused("coding.sdk_too_old")
    return Authority(binding, pooled)


# ------------------------------------------------------------------ people and chats


def sender_of(actor: ActorContext | None) -> str:
    """The id of a trusted host actor: type ``user`` and a non-blank id; ``""`` for any other."""
    if actor is None or actor.actor_type != "user":
        return ""
    return (actor.actor_id or "").strip()


def _bot_of(conversation: ConversationContext | None) -> str:
    return (conversation.bot_id or "") if conversation is not None else ""


def trusted_actor(ctx: RunnerContext, user_id_source: UserIdSource = "sender") -> Actor:
    """The actor a run belongs to; raises :class:`pkg.errors.Refused` (``coding.no_actor``) when the host named none."""
    conversation, bot_id, sender = ctx.conversation, _bot_of(ctx.conversation), sender_of(ctx.actor)
    name = (ctx.actor.actor_name or "") if ctx.actor is not None else ""
    actor: Actor
    if user_id_source == "legacy-session":
        session = (conversation.session_id or conversation.conversation_id or "") if conversation is not None else ""
        actor = Actor("session", session, bot_id, sender, name)
    elif user_id_source == "legacy-bot":
        actor = Actor("bot", bot_id, bot_id, sender, name)
    else:
        actor = Actor("user", sender, bot_id, sender, name)
    if not actor.actor_id.strip():
        raise Refused("coding.no_actor")
    return actor


def check_allowed(actor: Actor, allowed_actors: tuple[str, ...]) -> None:
    """Raise :class:`pkg.errors.Refused` (``coding.actor_not_allowed``) unless ``actor`` may start a run.

    An empty list allows everybody in the chat. The person who wrote counts, not the session or bot a legacy source names.
    """
    if allowed_actors and (actor.sender_id or actor.actor_id) not in allowed_actors:
        raise Refused("coding.actor_not_allowed")


def may_steer(requester: Actor, sender: ActorContext | None, allowed_actors: tuple[str, ...]) -> bool:
    """Whether a message of ``sender`` may enter ``requester``'s running turn: the requester and ``allowed-actors`` only."""
    sender_id = sender_of(sender)
    return bool(sender_id) and (sender_id == requester.sender_id or sender_id in allowed_actors)


def conversation_of(ctx: RunnerContext) -> Conversation:
    """The chat a run belongs to; a run without a conversation id is a chat of its own, shared with no other run."""
    conversation_id = (ctx.conversation.conversation_id or "") if ctx.conversation is not None else ""
    return Conversation(_bot_of(ctx.conversation), conversation_id or f"run:{ctx.run_id}")


# ------------------------------------------------------------------ keys


def scoped_name(authority: Authority, actor: Actor) -> str:
    """The name of ``actor`` wherever it leaves the run (a job's actor, an audit line).

    Without a binding it is the plain actor id, as it always was there.
    """
    if authority.binding is None:
        return actor.actor_id
    return _digest("actor", authority.parts(), actor.parts())


def lasting_name(authority: Authority, actor: Actor) -> str:
    """The name in what is stored of the person behind ``actor``: the same under every revision of the installation."""
    return _digest("person", authority.lasting_parts(), actor.parts(), actor.sender_id)


def conversation_key(authority: Authority, conversation: Conversation, actor: Actor | None) -> str:
    """The key of what lives in this process for one chat; ``actor`` is ``None`` when the form shares sessions in a chat."""
    return _digest("conversation", authority.parts(), conversation.parts(), None if actor is None else actor.parts())


def session_key(
    authority: Authority, conversation: Conversation, actor: Actor | None, *, agent: str, machine: str, workspace: str
) -> str:
    """The key under which a vendor session id is stored.

    ``actor`` is ``None`` when the form shares sessions in a chat; ``agent`` names the driver and its command, ``machine``
    the place and account (:attr:`pkg.launch.Launcher.machine`), ``workspace`` the directory there.
    """
    who = None if actor is None else actor.parts()
    return _digest("session", authority.lasting_parts(), conversation.parts(), who, [agent, machine, workspace])


def _pairs(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, json.dumps(values[name])] for name in sorted(values)]


def _digest(*parts: object) -> str:
    # ensure_ascii keeps lone surrogates encodable; nesting and quotes keep every part in its own place.
    encoded = json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return "lb_" + hashlib.sha256(encoded).hexdigest()
