"""The two forms as models: every default, every bound, and one clear error per bad field.

The host hands over untyped JSON exactly as it was stored: numbers as text, switches as ``"true"``, JSON fields as text or as
objects, lists as text, ``null``, fields of other versions, and nothing at all for fields the form never saved. :func:`parse`
takes all of it:

- an unknown key is ignored; ``null`` and blank text mean the default;
- a value that cannot be used raises :class:`pkg.errors.SettingsError` (``coding.setting_invalid``) for the first bad field in
  the order of the form, with ``params["field"]`` the field's form name and ``params["problem"]`` the key of a catalogue text;
  the value itself is in no message;
- field names are the form's names with ``-`` for ``_`` (``ssh-port`` is :attr:`RunnerSettings.ssh_port`);
- models are frozen, and no ``repr`` shows a secret or a value that may hold one.

Secrets live in the plugin form and are referenced from the runner form as ``${secret:NAME}``; :func:`resolve_secrets` fills
them in as late as possible.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from pkg import approval_rules, limits, traceless
from pkg.agent_api import McpServer
from pkg.errors import SettingsError

_SECRET_REFERENCE: Final = re.compile(r"\$\{secret:([^}]*)\}")
_SECRET_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LARGEST: Final = 1e15
"""Beyond every bound of every field, below what floats and integers disagree about."""
_LINE_BREAKS: Final = frozenset("\n\r\t")
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_TRANSPORTS: Final[Mapping[str, Literal["http", "sse", "stdio"]]] = types.MappingProxyType(
    {"http": "http", "streamable-http": "http", "streamable_http": "http", "sse": "sse", "stdio": "stdio"}
)


def _bad(problem: str, **params: object) -> PydanticCustomError:
    """The error of one field: ``problem`` is a key of the catalogue without its ``problem.``."""
    return PydanticCustomError(f"problem.{problem}", "invalid", params)


# ------------------------------------------------------------------ loosely typed values


def _switch(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
    raise _bad("not_a_switch")


def _progress(value: object) -> object:
    if isinstance(value, bool):
        return "status" if value else "off"
    if isinstance(value, str) and value.lower() in (_TRUE | _FALSE) - {"off"}:
        return "status" if value.lower() in _TRUE else "off"
    return value


def _number(value: object) -> object:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _bad("not_a_number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad("not_a_number")
    if not -_LARGEST < value < _LARGEST:  # also false for NaN
        raise _bad("not_a_number")
    return value


def _whole(value: object) -> object:
    number = _number(value)
    if not isinstance(number, int | float) or number != int(number):
        raise _bad("not_a_whole_number")
    return int(number)


def _turn_seconds(value: object) -> object:
    number = _number(value)
    return limits.TURN_SECONDS_MAX if isinstance(number, int | float) and number <= 0 else number


def _string(value: object, allowed: frozenset[str]) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _bad("not_text")
    if len(value) > limits.FORM_TEXT_CHARS:
        raise _bad("too_long", maximum=limits.FORM_TEXT_CHARS)
    if any(char not in allowed and (char < " " or char == "\x7f") for char in value):
        raise _bad("control_characters")
    return value


def _line(value: object) -> object:
    return _string(value, frozenset())


def _text(value: object) -> object:
    return _string(value, _LINE_BREAKS)


def _secret(value: object) -> object:
    return value if isinstance(value, SecretStr) else SecretStr(_string(value, _LINE_BREAKS))


def _names(value: object) -> object:
    """A list of names: an array, or text separated by commas, semicolons or line breaks; order kept, repeats dropped."""
    if isinstance(value, str):
        value = _json(value) if value.startswith("[") else re.split(r"[,;\n\r\uff0c\u3001\uff1b]", value)
    if not isinstance(value, Sequence):
        value = [value]
    if len(value) > limits.FORM_LIST_ITEMS:
        raise _bad("too_many", maximum=limits.FORM_LIST_ITEMS)
    return tuple(dict.fromkeys(name for item in value if item is not None and (name := _string(item, _LINE_BREAKS).strip())))


def _rules(value: object) -> object:
    """Approval rules, one a line; a list of lines is the same."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "\n".join(_string(item, _LINE_BREAKS) for item in value)
    try:
        return approval_rules.parse(_string(value, _LINE_BREAKS))
    except approval_rules.RuleError as exc:
        raise _bad(exc.problem, line=exc.line) from None


def _arguments(value: object) -> object:
    """A JSON list of texts; unlike :func:`_names` it keeps repeats, blanks and spaces."""
    loaded = _json(value)
    if isinstance(loaded, Mapping) and not loaded:
        return ()
    if not isinstance(loaded, Sequence) or isinstance(loaded, str) or not all(isinstance(item, str) for item in loaded):
        raise _bad("not_a_list")
    if len(loaded) > limits.FORM_LIST_ITEMS:
        raise _bad("too_many", maximum=limits.FORM_LIST_ITEMS)
    return tuple(_string(item, _LINE_BREAKS) for item in loaded)


def _json(value: object) -> object:
    """The JSON value of a field that is stored as text or already parsed."""
    if not isinstance(value, str):
        return value
    if len(value.encode("utf-8", "surrogatepass")) > limits.FORM_JSON_BYTES:
        raise _bad("too_long", maximum=limits.FORM_JSON_BYTES)
    try:
        return json.loads(value)
    except json.JSONDecodeError as exc:
        raise _bad("not_json", line=exc.lineno, column=exc.colno) from None
    except RecursionError:
        raise _bad("not_json", line=1, column=1) from None


def _object(value: object) -> Mapping[str, object]:
    loaded = _json(value)
    if not isinstance(loaded, Mapping):
        raise _bad("not_an_object")
    return {str(key): item for key, item in loaded.items()}


def _strings(value: object, name: re.Pattern[str]) -> Mapping[str, str]:
    """An object of names to texts; numbers become text, anything else is refused by the number of its entry.

    Not by its name: a secret pasted to the wrong side of the colon must not be shown.
    """
    out: dict[str, str] = {}
    for entry, (key, item) in enumerate(_object(value).items(), 1):
        if not name.fullmatch(key):
            raise _bad("bad_name", entry=entry)
        if isinstance(item, bool) or not isinstance(item, str | int | float) or "\x00" in str(item):
            raise _bad("not_text_value", entry=entry)
        out[key] = str(item)
    return types.MappingProxyType(out)


def _variables(value: object) -> object:
    return _strings(value, _VARIABLE_NAME)


def _secrets(value: object) -> object:
    return types.MappingProxyType({key: SecretStr(item) for key, item in _strings(value, _SECRET_NAME).items()})


# ------------------------------------------------------------------ MCP servers


def _pairs(value: object, server: str, what: str) -> Mapping[str, str]:
    """Headers or environment of a server: an object, or a list of ``{name, value}`` as ACP writes them."""
    if value is None:
        return types.MappingProxyType({})
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(item, Mapping) and "name" in item and "value" in item for item in value):
            raise _bad("mcp_entry", server=server, what=what)
        value = {str(item["name"]): item["value"] for item in value}
    if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
        raise _bad("mcp_entry", server=server, what=what)
    if any(char in text for key, item in value.items() for text in (str(key), item) for char in "\r\n\x00"):
        raise _bad("mcp_entry", server=server, what=what)
    return types.MappingProxyType({str(key): item for key, item in value.items()})


def _command(entry: Mapping[str, object], server: str) -> tuple[str, ...]:
    command, arguments = entry.get("command"), entry.get("args") or ()
    head = (command,) if isinstance(command, str) else command
    for part in (head, arguments):
        if isinstance(part, str) or not isinstance(part, Sequence) or not all(isinstance(item, str) for item in part):
            raise _bad("mcp_entry", server=server, what="command")
    words = (*typing.cast(Sequence[str], head), *typing.cast(Sequence[str], arguments))
    if not words or not words[0].strip() or any("\x00" in word for word in words):
        raise _bad("mcp_entry", server=server, what="command")
    if any(_SECRET_REFERENCE.search(word) for word in words):
        raise _bad("secret_place", server=server)
    return words


def _url(value: object, server: str) -> str:
    if not isinstance(value, str) or any(char.isspace() for char in value.strip()):
        raise _bad("mcp_url", server=server)
    try:
        parts = traceless.split_url(value.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise _bad("mcp_url", server=server)
    if parts.username or parts.password or _SECRET_REFERENCE.search(value):
        raise _bad("secret_place", server=server)
    return value.strip()


def _server(name: str, entry: object) -> McpServer:
    if not isinstance(entry, Mapping):
        raise _bad("mcp_entry", server=name, what="url/command")
    named = entry.get("type", entry.get("transport")) or ("http" if entry.get("url") else "stdio")
    transport = _TRANSPORTS.get(str(named).lower())
    if transport is None:
        raise _bad("mcp_entry", server=name, what="type")
    if transport == "stdio":
        return McpServer(name, transport, command=_command(entry, name), env=_pairs(entry.get("env"), name, "env"))
    return McpServer(name, transport, url=_url(entry.get("url"), name), headers=_pairs(entry.get("headers"), name, "headers"))


def _servers(value: object) -> object:
    """``{"mcpServers": {name: server}}``, ``{name: server}``, or a list of servers with their ``name``."""
    loaded = _json(value)
    if isinstance(loaded, Mapping) and "mcpServers" in loaded:
        loaded = loaded["mcpServers"]
    if isinstance(loaded, Mapping):
        found = [(str(name), entry) for name, entry in loaded.items()]
    elif isinstance(loaded, Sequence) and not isinstance(loaded, str):
        found = [(str(entry.get("name") or "") if isinstance(entry, Mapping) else "", entry) for entry in loaded]
    else:
        raise _bad("mcp_shape")
    if len(found) > limits.MCP_SERVERS_MAX:
        raise _bad("too_many", maximum=limits.MCP_SERVERS_MAX)
    names = [name.strip() for name, _ in found]
    if not all(names) or len(set(names)) != len(names):
        raise _bad("mcp_names")
    return tuple(_server(name, entry) for name, (_, entry) in zip(names, found, strict=True))


# ------------------------------------------------------------------ the models

Switch = Annotated[bool, BeforeValidator(_switch)]
Whole = Annotated[int, BeforeValidator(_whole)]
Seconds = Annotated[float, BeforeValidator(_number)]
TurnSeconds = Annotated[float, BeforeValidator(_turn_seconds)]
Line = Annotated[str, BeforeValidator(_line)]
"""Text of one line, trimmed."""
Text = Annotated[str, BeforeValidator(_text)]
"""Text that may have several lines, trimmed."""
Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""A secret as it was stored, untrimmed."""
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Rules = Annotated[tuple[approval_rules.Rule, ...], BeforeValidator(_rules)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(_arguments)]
Variables = Annotated[Mapping[str, str], BeforeValidator(_variables)]
Secrets = Annotated[Mapping[str, SecretStr], BeforeValidator(_secrets)]
McpServers = Annotated[tuple[McpServer, ...], BeforeValidator(_servers)]

Progress = Annotated[Literal["off", "status", "tools"], BeforeValidator(_progress)]
"""How much of the agent's work is told besides its answer; a switch of older configurations means ``status`` or ``off``."""
Language = Literal["auto", "en_US", "zh_Hans", "zh_Hant", "ja_JP", "th_TH", "vi_VN", "es_ES", "ru_RU"]


class FormModel(BaseModel):
    """What both forms have in common; parse with :func:`parse`, never by the constructor."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=lambda name: name.replace("_", "-"),
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
    )

    former: ClassVar[frozenset[str]] = frozenset()
    """Fields the form no longer has, read from what is stored already."""


class RunnerSettings(FormModel):
    """The fields that the forms of all three runners share.

    Values that a field's own text explains are not repeated here; times are seconds.
    """

    policies: ClassVar[tuple[str, ...]] = ("ask", "allow-edits", "allow-all", "deny")
    """The values ``approval-policy`` may have; a package whose existing configurations know others adds them."""

    location: Literal["local", "remote-ssh", "daemon"] = "local"
    workspace: Line = ""
    """An absolute directory where the agent runs; empty means the place's own default."""
    workspace_mode: Literal["shared", "exclusive", "worktree"] = "shared"

    ssh_target: Line = ""
    """``user@host`` or the name of an entry in the SSH configuration."""
    ssh_port: Whole = Field(default=0, ge=0, le=65535)
    """Zero: what the SSH configuration says, else 22."""
    ssh_identity_file: Line = ""
    ssh_known_hosts: Text = ""
    """Lines of a ``known_hosts`` file, or the path of one."""
    ssh_connect_timeout: Seconds = Field(default=limits.SSH_CONNECT_SECONDS, ge=1, le=limits.CONNECT_SECONDS_MAX)
    ssh_extra_options: Line = ""
    ssh_allow_local_commands: Switch = False
    """Whether ``ssh-extra-options`` may name options that run commands beside the worker."""

    daemon_id: Line = Field(default="", max_length=128)
    daemon_agent: Line = Field(default="", max_length=64)
    """The agent's name in the daemon's policy file; empty: the only one there."""
    daemon_connect_timeout: Seconds = Field(default=limits.DAEMON_CONNECT_SECONDS, ge=1, le=limits.CONNECT_SECONDS_MAX)

    approval_policy: Line = "ask"
    approval_rules: Rules = ()
    """What is allowed, asked about or denied before the policy decides (:mod:`pkg.approval_rules`)."""
    approvers: Names = ()
    """People who may answer for others, besides whoever started the run."""
    approval_timeout: Whole = Field(
        default=limits.APPROVAL_SECONDS, ge=limits.APPROVAL_SECONDS_MIN, le=limits.APPROVAL_SECONDS_MAX
    )
    allowed_actors: Names = ()
    share_session: Literal["actor", "conversation"] = "actor"
    user_id_source: Literal["sender", "legacy-session", "legacy-bot"] = "sender"

    reuse_session: Switch = True
    create_session_if_missing: Switch = True
    keep_warm: Seconds = Field(default=limits.KEEP_WARM_SECONDS, ge=0, le=limits.KEEP_WARM_SECONDS_MAX)

    streaming: Switch = True
    reply_mode: Literal["stream", "single"] = "stream"
    show_progress: Progress = "status"
    language: Language = "auto"

    timeout: TurnSeconds = Field(default=limits.TURN_SECONDS, ge=limits.TURN_SECONDS_MIN, le=limits.TURN_SECONDS_MAX)
    """Zero or less, "no limit" to the host, means the longest that is allowed."""
    idle_timeout: Seconds = Field(default=limits.IDLE_SECONDS, ge=0, le=limits.IDLE_SECONDS_MAX)
    startup_timeout: Seconds = Field(default=limits.STARTUP_SECONDS, ge=1, le=limits.START_SECONDS_MAX)
    initialize_timeout: Seconds = Field(default=limits.INITIALIZE_SECONDS, ge=1, le=limits.START_SECONDS_MAX)

    langbot_assets_enabled: Switch = True
    langbot_assets_mode: Literal["auto", "ephemeral", "gateway"] = "auto"
    """Kept for existing configurations: every value gives each run an access of its own that ends with it."""
    knowledge_bases: Names = ()
    append_run_scope_prompt: Switch = True

    env_json: Variables = Field(default_factory=lambda: types.MappingProxyType({}), repr=False)
    """The agent's environment as written, references not resolved: use :meth:`environment`."""
    mcp_servers_json: McpServers = Field(default=(), repr=False)
    """Further MCP servers as written, references not resolved: use :meth:`mcp_servers`."""

    advanced_settings: Switch = False
    """Only shows the advanced fields in the web form; their values count whether shown or not."""

    @field_validator("approval_policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in cls.policies:
            raise _bad("not_an_option", options=", ".join(cls.policies))
        return value

    def environment(self, secrets: Mapping[str, SecretStr]) -> dict[str, str]:
        """``env-json`` with its references filled from ``secrets``; raises :class:`SettingsError` for a missing one."""
        return {name: resolve_secrets(value, secrets, field="env-json") for name, value in self.env_json.items()}

    def mcp_servers(self, secrets: Mapping[str, SecretStr]) -> tuple[McpServer, ...]:
        """``mcp-servers-json`` with the references in headers and environments filled from ``secrets``.

        Raises :class:`SettingsError` for a missing one.
        """

        def filled(pairs: Mapping[str, str]) -> Mapping[str, str]:
            return types.MappingProxyType(
                {name: resolve_secrets(value, secrets, field="mcp-servers-json") for name, value in pairs.items()}
            )

        return tuple(
            McpServer(
                server.name,
                server.transport,
                url=server.url,
                headers=filled(server.headers),
                command=server.command,
                env=filled(server.env),
            )
            for server in self.mcp_servers_json
        )


class PluginSettings(FormModel):
    """The plugin's own form: what operators set once, and the only place for secrets.

    ``daemon_port`` has no default here: each package subclasses this and sets its own, so that their hubs do not collide.
    """

    daemon_enabled: Switch = False
    daemon_host: Line = "127.0.0.1"
    daemon_port: Whole = Field(default=0, ge=0, le=65535)
    daemon_token: Secret = SecretStr("")
    ssh_private_key_secret: Secret = SecretStr("")
    """A private key in OpenSSH or PEM form, for workers that have no key file of their own."""
    agent_secret_values: Secrets = Field(default_factory=lambda: types.MappingProxyType({}), repr=False)
    """The values of ``${secret:NAME}``; ``secret`` as a word of the name makes LangBot (4.11.2) mask it."""
    agent_secrets: Secrets = Field(default_factory=lambda: types.MappingProxyType({}), repr=False)
    """The same field under its former name, which LangBot does not mask."""

    former: ClassVar[frozenset[str]] = frozenset({"agent_secrets"})

    @property
    def secrets(self) -> Mapping[str, SecretStr]:
        """The values of ``${secret:NAME}``, wherever they are stored; of two values of one name the masked field's counts."""
        return types.MappingProxyType({**self.agent_secrets, **self.agent_secret_values})


Model = TypeVar("Model", bound=FormModel)

_BUILTIN_PROBLEMS: Final[Mapping[str, str]] = types.MappingProxyType(
    {"bool_type": "not_a_switch", "string_type": "not_text", "string_too_long": "too_long"}
)


def parse(model: type[Model], config: Mapping[str, Any]) -> Model:
    """The form values in ``config`` as ``model``; raises :class:`SettingsError` for the first field that cannot be used."""
    given: dict[str, object] = {}
    for name, field in model.model_fields.items():
        form_name = name.replace("_", "-")
        value = config.get(form_name)
        if isinstance(value, str) and field.annotation is not SecretStr:
            value = value.strip()
        if value is not None and value != "":
            given[form_name] = value
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False)[0]
    form_name = str(error["loc"][0])
    problem, params = _problem(model, form_name, error["type"], error.get("ctx", {}))
    raise SettingsError("coding.setting_invalid", params={**params, "field": form_name, "problem": problem})


def _problem(model: type[FormModel], form_name: str, kind: str, context: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """The catalogue key and parameters of a validation error."""
    if kind.startswith("problem."):
        return kind, dict(context)
    field = model.model_fields[form_name.replace("-", "_")]
    if kind in ("greater_than_equal", "less_than_equal"):
        low = next((item.ge for item in field.metadata if isinstance(item, Ge)), "")
        high = next((item.le for item in field.metadata if isinstance(item, Le)), "")
        return "problem.out_of_range", {"minimum": _plain(low), "maximum": _plain(high)}
    if kind == "literal_error":
        return "problem.not_an_option", {"options": ", ".join(map(str, typing.get_args(field.annotation)))}
    if kind == "string_too_long":
        return "problem.too_long", {"maximum": context.get("max_length", "")}
    return "problem." + _BUILTIN_PROBLEMS.get(kind, "unusable"), {}


def _plain(number: object) -> str:
    return f"{number:g}" if isinstance(number, float) and abs(number) < 1e6 else str(number)


# ------------------------------------------------------------------ secrets


def resolve_secrets(text: str, secrets: Mapping[str, SecretStr], *, field: str = "") -> str:
    """``text`` with every ``${secret:NAME}`` replaced by the secret of that name.

    Raises :class:`SettingsError` for ``field`` that names the missing or malformed name; other ``${...}`` stay as they are.
    """

    def value(found: re.Match[str]) -> str:
        name = found.group(1).strip()
        secret = secrets.get(name)
        if secret is None:
            shown = name if _SECRET_NAME.fullmatch(name) else "?"
            raise SettingsError("coding.setting_invalid", field=field, problem="problem.secret_missing", name=shown)
        return secret.get_secret_value()

    return _SECRET_REFERENCE.sub(value, text)


def secret_names(texts: Sequence[str]) -> frozenset[str]:
    """The names of all secrets that ``texts`` refer to."""
    return frozenset(name.strip() for text in texts for name in _SECRET_REFERENCE.findall(text))
