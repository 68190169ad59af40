"""Which variables of a session Codex's process does not hold, and how Codex gets them all the same.

Without a sandbox a command can read the environment of every process of its account. So what looks like a credential, or refers
to a secret, stands in that environment only where Codex reads it nowhere else:

- the key of a model provider of the account's settings, and headers with a value from the environment, are sent over the
  connection for each thread, as are the variables that a tool server of the account is to be started with;
- what the settings name in a way that nothing sent can stand in for (the bearer of a tool server), and what Codex's own
  libraries read (Amazon's and Google's credentials, proxies), stays in the environment;
- what nothing names is not handed over at all.

Codex (0.171) fails over a provider whose variable is missing, and a setting can be changed but not taken away. So the process
holds :data:`PLACEHOLDER` in its place, of which Codex makes no header, and so leaves the header that was sent as it is.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pkg.agent_api import Json
from pkg.lenient import as_dict, as_list, as_str

EXCLUDED: Final = ("*KEY*", "*TOKEN*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*", "LANGBOT_*")
"""Variables that no command of the agent sees, by name; Codex ignores their case."""

PLACEHOLDER: Final = "given over the connection\x7f"
"""What stands in the environment instead of a value; its last character can be in no header."""

_WORD: Final = re.compile("[A-Za-z0-9_]+")
_CODEX_S_OWN: Final = ("AWS_*", "GOOGLE_*", "AZURE_*", "*_PROXY", "CODEX_ACCESS_TOKEN", "CODEX_HOME", "OPENAI_BASE_URL")
"""Variables that Codex and its libraries read without being told to."""
_PLAIN: Final = ("HOME", "PATH", "TMPDIR", "USER", "LOGNAME", "SHELL", "LANG")


def held_back(env: Mapping[str, str], private: Json) -> frozenset[str]:
    """The names in ``env`` that Codex's process is not to hold; ``private`` are those that the form fills with a secret."""
    named = {as_str(each) for each in as_list(private)}
    return frozenset(
        name
        for name, value in env.items()
        if value and (name in named or _matches(name, EXCLUDED)) and name not in _PLAIN and not _matches(name, _CODEX_S_OWN)
    )


def masked(env: Mapping[str, str], held: Iterable[str]) -> dict[str, str]:
    """``env`` as Codex's process gets it."""
    return {**env, **dict.fromkeys(held, PLACEHOLDER)}


def sent(own: Mapping[str, Any], env: Mapping[str, str], held: frozenset[str]) -> dict[str, Any]:
    """The part of a thread's configuration that brings what the account's settings ``own`` name of ``held``."""
    return _arranged(own, env, held)[0]


def needed(own: Mapping[str, Any], env: Mapping[str, str], held: frozenset[str]) -> frozenset[str]:
    """The names of ``held`` that the settings name where nothing sent can stand in for the environment."""
    rest = json.dumps(_arranged(own, env, held)[1])
    return held & frozenset(_WORD.findall(rest))


def _arranged(own: Mapping[str, Any], env: Mapping[str, str], held: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is sent, and the settings without what that stands in for."""
    rest = copy.deepcopy(dict(own))
    # What commands may see is another matter.
    rest.pop("shell_environment_policy", None)
    providers: dict[str, Any] = {}
    for name, provider in as_dict(rest.get("model_providers")).items():
        provider = as_dict(provider)
        headers = _headers(provider, env, held)
        if (key := as_str(provider.get("env_key"))) in held:
            headers["Authorization"] = f"Bearer {env[key]}"
            del provider["env_key"]
        if headers:
            providers[name] = {"http_headers": headers}
    servers: dict[str, Any] = {}
    for name, server in as_dict(rest.get("mcp_servers")).items():
        server, entry = as_dict(server), {}
        if headers := _headers(server, env, held):
            entry["http_headers"] = headers
        names = as_list(server.get("env_vars"))
        if given := {each: env[each] for each in names if isinstance(each, str) and each in held}:
            entry["env"] = given
            server["env_vars"] = [each for each in names if not (isinstance(each, str) and each in held)]
        if entry:
            servers[name] = entry
    found = {"model_providers": providers, "mcp_servers": servers}
    return {name: part for name, part in found.items() if part}, rest


def _headers(holder: dict[str, Any], env: Mapping[str, str], held: frozenset[str]) -> dict[str, str]:
    """The headers of ``holder`` whose values are in ``held``, which are taken out of it."""
    named = as_dict(holder.get("env_http_headers"))
    headers = {header: env[as_str(variable)] for header, variable in named.items() if as_str(variable) in held}
    for header in headers:
        del named[header]
    return headers


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in patterns)
