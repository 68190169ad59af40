"""The protocol's JSON as our values and back, leniently: whatever is missing or of another shape becomes a default.

Agents of this protocol differ in almost every optional field (measured with Claude Agent 0.49 and 0.101, codex-acp 0.16 and
2.6, OpenCode 1.18, Gemini CLI 0.61, Qwen Code 0.15 and 0.24, fast-agent 0.10), so nothing here raises for what an agent says.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from acp import PROTOCOL_VERSION, schema

from agent.grants import inner_command
from pkg import limits
from pkg.agent_api import (
    Answer,
    Choice,
    ChoiceKind,
    FileDiff,
    Json,
    McpServer,
    PlanEntry,
    QuestionField,
    ToolKind,
    UsageReported,
)
from pkg.lenient import (
    as_dict as as_dict,
)
from pkg.lenient import (
    as_float as as_float,
)
from pkg.lenient import (
    as_int as as_int,
)
from pkg.lenient import (
    as_list as as_list,
)
from pkg.lenient import (
    as_str as as_str,
)
from pkg.lenient import (
    bounded as bounded,
)
from pkg.lenient import (
    compact as compact,
)
from pkg.lenient import (
    unicode_safe as unicode_safe,
)

CLIENT_NAME: Final = "langbot-coding-runner"
CLIENT_VERSION: Final = "0.1.0"

_TOOL_KINDS: Final = frozenset(get_args(ToolKind))
_CHOICE_KINDS: Final[Mapping[str, ChoiceKind]] = types.MappingProxyType(
    {kind: kind for kind in ("allow_once", "allow_always", "reject_once", "reject_always")}
)
_RAW_OUTPUT_KEYS: Final = ("formatted_output", "aggregated_output", "output", "stdout", "content", "text", "message", "error")
_PATH_KEY: Final = re.compile(r"(?:path|file|dir|directory|directories|folder|uri)s?$", re.IGNORECASE)
"""Keys of an input that name files (file_path, filePath, absolute_path, dir_path, notebook_path, paths, ...)."""
_PATTERN_KEY: Final = re.compile(r"(?:pattern|glob|include)s?$", re.IGNORECASE)
_LEADS_OUT: Final = re.compile(r"^[/~]|(?:^|/)\.\.(?:/|$)")
_TOLD_DIRECTORY: Final = re.compile(
    r"\[(?:in|current working directory) ([^][\n]+)\](?: \[background\])?(?: \([^][]*\))?", re.DOTALL
)
_PATH_CHARS: Final = 4096
_COMMAND_KEYS: Final = ("command", "cmd")


# ------------------------------------------------------------------ what goes out


def initialize_params(*, local: bool) -> dict[str, Any]:
    """The handshake. Files and terminals are offered only where the agent runs on this machine."""
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "clientInfo": {"name": CLIENT_NAME, "title": "LangBot coding runner", "version": CLIENT_VERSION},
        "clientCapabilities": {
            "fs": {"readTextFile": local, "writeTextFile": local},
            "terminal": local,
            "session": {"configOptions": {"boolean": {}}},
            "elicitation": {"form": {}},
        },
    }


def mcp_server_params(
    servers: Sequence[McpServer], capabilities: Json, shim: Callable[[McpServer], McpServer]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The ``mcpServers`` an agent can use, and the names of those it cannot.

    Every agent takes stdio servers; http and sse only by ``mcpCapabilities``. An http server that the agent can't reach
    itself is replaced by what ``shim`` makes of it (a stdio server that forwards).
    """
    offered = as_dict(capabilities)
    params: list[dict[str, Any]] = []
    skipped: list[str] = []
    for given in servers:
        server = shim(given) if given.transport == "http" and offered.get("http") is not True else given
        if server.transport == "stdio":
            if not server.command:
                skipped.append(server.name)
                continue
            model: schema.McpServerStdio | schema.HttpMcpServer | schema.SseMcpServer = schema.McpServerStdio(
                name=server.name,
                command=server.command[0],
                args=list(server.command[1:]),
                env=[schema.EnvVariable(name=name, value=value) for name, value in server.env.items()],
            )
        elif server.transport == "http" or offered.get("sse") is True:
            headers = [schema.HttpHeader(name=name, value=value) for name, value in server.headers.items()]
            model = (
                schema.HttpMcpServer(type="http", name=server.name, url=server.url, headers=headers)
                if server.transport == "http"
                else schema.SseMcpServer(type="sse", name=server.name, url=server.url, headers=headers)
            )
        else:
            skipped.append(server.name)
            continue
        params.append(model.model_dump(mode="json", by_alias=True, exclude_none=True))
    return params, skipped


# ------------------------------------------------------------------ content


def content_text(block: Json) -> str:
    """The readable text of one content block: text, an embedded text resource, or a link; else the empty string.

    Surrogates are left as they are, because halves of one pair may come in two blocks.
    """
    item = as_dict(block)
    text = item.get("text")
    if item.get("type") == "text":
        return text if isinstance(text, str) else ""
    if item.get("type") == "resource":
        return as_str(as_dict(item.get("resource")).get("text"))
    if item.get("type") == "resource_link":
        name, uri = as_str(item.get("title")) or as_str(item.get("name")), as_str(item.get("uri"))
        return f"{name} ({uri})" if name and uri else name or uri
    return ""


def tool_kind(value: Json) -> ToolKind:
    """The kind of a tool call; unknown ones are ``other``."""
    if value == "switch_mode":
        return "mode"
    known: ToolKind = value if isinstance(value, str) and value in _TOOL_KINDS else "other"  # type: ignore[assignment]
    return known


def diffs_of(content: Json) -> tuple[tuple[FileDiff, ...], bool]:
    """The diffs among a tool call's content, bounded, and whether anything was cut."""
    diffs: list[FileDiff] = []
    cut = False
    for item in map(as_dict, as_list(content)):
        if item.get("type") != "diff":
            continue
        if len(diffs) == limits.ACP_DIFFS:
            return tuple(diffs), True
        old, old_cut = bounded(as_str(item.get("oldText")), limits.ACP_DIFF_CHARS)
        new, new_cut = bounded(as_str(item.get("newText")), limits.ACP_DIFF_CHARS)
        known = isinstance(item.get("oldText"), str)
        diffs.append(FileDiff(as_str(item.get("path")), old if known else None, new, old_cut or new_cut))
        cut = cut or old_cut or new_cut
    return tuple(diffs), cut


def output_of(content: Json, raw_output: Json, terminal_output: Callable[[str], str]) -> tuple[str, bool]:
    """What a tool call printed, bounded, and whether it was cut; from its content, our terminals, or its raw output.

    Terminals that are not ours (codex-acp names its own) contribute nothing.
    """
    parts: list[str] = []
    for item in map(as_dict, as_list(content)):
        if item.get("type") == "content":
            parts.append(unicode_safe(content_text(item.get("content"))))
        elif item.get("type") == "terminal":
            parts.append(terminal_output(as_str(item.get("terminalId"))))
    text = "\n".join(part for part in parts if part)
    if not text:
        text = _raw_text(raw_output)
    return bounded(text, limits.ACP_TOOL_OUTPUT_CHARS)


def _raw_text(raw: Json) -> str:
    if isinstance(raw, str):
        return as_str(raw)
    if isinstance(raw, dict):
        for key in _RAW_OUTPUT_KEYS:
            if text := as_str(raw.get(key)):
                return text
        if any(isinstance(raw.get(key), str) for key in _RAW_OUTPUT_KEYS):
            return ""
    return compact(raw, limits.ACP_TOOL_OUTPUT_CHARS + 1)[0] if raw else ""


def input_of(raw_input: Json) -> Mapping[str, Json]:
    """A tool call's input for telemetry, bounded."""
    if not isinstance(raw_input, dict) or not raw_input:
        return {} if raw_input in (None, {}, "") else {"input": compact(raw_input, limits.ACP_TOOL_INPUT_BYTES)[0]}
    text, cut = compact(raw_input, limits.ACP_TOOL_INPUT_BYTES)
    return {"truncated": text} if cut else raw_input


def command_of(raw_input: Json) -> str:
    """The command line inside a tool call's input, whole; the empty string when there is none."""
    for key in _COMMAND_KEYS:
        value = as_dict(raw_input).get(key)
        if isinstance(value, str) and value.strip():
            return as_str(value)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return unicode_safe(inner_command(value[0], value[1:]))
    return ""


def cwd_of(raw_input: Json) -> str:
    """The working directory named inside a tool call's input."""
    item = as_dict(raw_input)
    return as_str(item.get("cwd")) or as_str(item.get("workdir")) or as_str(item.get("directory"))


def directory_told(text: str) -> tuple[str, bool]:
    """The working directory that a command's description names (Gemini CLI 0.61 tells it nowhere else), and whether it is sure.

    A name with brackets of its own could be read in two ways, so it is not.
    """
    if not text.startswith(("[in ", "[current working directory ")):
        return "", True
    found = _TOLD_DIRECTORY.fullmatch(text)
    return (found[1], True) if found else ("", False)


def paths_of(locations: Json, raw_input: Json) -> tuple[str, ...]:
    """The files and directories a tool call names, without repeats, and the patterns that may lead out of the workspace."""
    found = [as_str(as_dict(item).get("path")) for item in as_list(locations)]
    for key, value in as_dict(raw_input).items():
        texts = [as_str(item) for item in (value if isinstance(value, list) else [value])]
        names = [text for text in texts if text and "\n" not in text and len(text) <= _PATH_CHARS]
        if _PATH_KEY.search(str(key)):
            found += names
        elif _PATTERN_KEY.search(str(key)):
            found += [text for text in names if _LEADS_OUT.search(text)]
    return tuple(dict.fromkeys(path for path in found if path))


def plan_of(entries: Json) -> tuple[PlanEntry, ...]:
    """The lines of a plan."""
    return tuple(
        PlanEntry(
            as_str(item.get("content")),
            status if (status := as_str(item.get("status"))) in {"pending", "in_progress", "completed"} else "pending",
            as_str(item.get("priority")) or "medium",
        )
        for item in map(as_dict, as_list(entries)[: limits.ACP_PLAN_ENTRIES])
        if as_str(item.get("content"))
    )


def choices_of(options: Json) -> tuple[Choice, ...]:
    """The options of a permission request whose meaning is known, each id once, in the agent's order."""
    choices: dict[str, Choice] = {}
    for item in map(as_dict, as_list(options)):
        choice_id, kind = item.get("optionId"), _CHOICE_KINDS.get(as_str(item.get("kind")))
        if isinstance(choice_id, str) and choice_id and kind is not None:
            choices.setdefault(choice_id, Choice(choice_id, as_str(item.get("name")) or choice_id, kind))
    return tuple(choices.values())


def usage_of(result: Json) -> UsageReported | None:
    """The token numbers of a prompt's response, in the stable form or in Gemini's own."""
    usage = as_dict(as_dict(result).get("usage"))
    if usage:
        return UsageReported(
            input_tokens=as_int(usage.get("inputTokens")),
            output_tokens=as_int(usage.get("outputTokens")),
            total_tokens=as_int(usage.get("totalTokens")),
            cached_input_tokens=as_int(usage.get("cachedReadTokens")),
        )
    quota = as_dict(as_dict(as_dict(as_dict(result).get("_meta")).get("quota")).get("token_count"))
    if quota:
        return UsageReported(as_int(quota.get("input_tokens")), as_int(quota.get("output_tokens")))
    return None


def context_of(update: Json) -> UsageReported:
    """The context numbers of a ``usage_update``."""
    item = as_dict(update)
    cost = as_dict(item.get("cost"))
    amount = as_float(cost.get("amount"))
    return UsageReported(
        context_used=as_int(item.get("used")),
        context_size=as_int(item.get("size")),
        cost="" if amount is None else f"{amount:g} {as_str(cost.get('currency'))}".strip(),
    )


# ------------------------------------------------------------------ questions


def question_fields(requested: Json) -> tuple[QuestionField, ...]:
    """The fields of an elicitation's schema."""
    properties = as_dict(as_dict(requested).get("properties"))
    required = {name for name in as_list(as_dict(requested).get("required")) if isinstance(name, str)}
    return tuple(
        _question_field(str(name), as_dict(item), str(name) in required)
        for name, item in list(properties.items())[: limits.ACP_QUESTION_FIELDS]
    )


def _question_field(name: str, item: dict[str, Any], required: bool) -> QuestionField:
    kind = item.get("type")
    options = _options(item)
    if kind == "array":
        shown, options = "multiselect", _options(as_dict(item.get("items")))
    elif options:
        shown = "select"
    else:
        shown = {"number": "number", "integer": "number", "boolean": "boolean"}.get(as_str(kind), "text")
    label = as_str(item.get("title")) or name
    return QuestionField(name, label, shown, required, options, as_str(item.get("description")), item.get("default"))


def _options(item: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    named = as_list(item.get("oneOf")) or as_list(item.get("anyOf"))
    pairs = [(as_str(as_dict(option).get("const")), as_str(as_dict(option).get("title"))) for option in named]
    if not pairs:
        pairs = [(as_str(value), "") for value in as_list(item.get("enum"))]
    return tuple((value, label or value) for value, label in pairs[: limits.ACP_QUESTION_FIELDS] if value)


def question_result(answer: Answer, requested: Json) -> dict[str, Any]:
    """The response to an elicitation; numbers and switches typed as text are turned into what the schema wants."""
    if answer.values:
        properties = as_dict(as_dict(requested).get("properties"))
        content = {name: _coerced(value, as_dict(properties.get(name))) for name, value in answer.values.items()}
        return {"action": "accept", "content": content}
    return {"action": "decline" if answer.choice_id else "cancel"}


def _coerced(value: Json, item: dict[str, Any]) -> Json:
    kind = item.get("type")
    if not isinstance(value, str) or kind not in {"integer", "number", "boolean"}:
        return value
    text = value.strip()
    if kind == "boolean":
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower(), value)
    try:
        return int(text) if kind == "integer" else float(text)
    except ValueError:
        return value
