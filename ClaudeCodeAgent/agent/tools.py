"""What the program's tools are to people: a title, a kind, the files they name, what they would change, what they printed."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

from pkg import limits
from pkg.agent_api import FileDiff, Json, PlanEntry, ToolKind
from pkg.lenient import as_dict, as_list, as_str, bounded, compact

ASK: Final = "AskUserQuestion"
LEAVE_PLAN: Final = "ExitPlanMode"

_KINDS: Final[Mapping[str, ToolKind]] = types.MappingProxyType(
    {
        **dict.fromkeys(("Read", "NotebookRead", "ReadMcpResource", "ListMcpResources", "TaskOutput"), "read"),
        **dict.fromkeys(("Edit", "MultiEdit", "Write", "NotebookEdit"), "edit"),
        **dict.fromkeys(("Glob", "Grep", "LS", "ToolSearch"), "search"),
        **dict.fromkeys(("Bash", "PowerShell", "Monitor"), "execute"),
        **dict.fromkeys(("WebFetch", "WebSearch"), "fetch"),
        **dict.fromkeys(("TodoWrite", "TaskCreate", "TaskUpdate", "TaskList"), "think"),
        **dict.fromkeys((LEAVE_PLAN, "EnterPlanMode"), "mode"),
    }
)
_PATH_KEYS: Final = ("file_path", "notebook_path", "path", "directory")
_TITLE_KEYS: Final = ("description", "query", "url", "pattern", "skill", "subject", "prompt")
_LEADS_OUT: Final = re.compile(r"(?:^|[{,(|])\s*[/~$]|(?:^|[/{,(|])\.\.(?:[/},)|]|$)|\\")
"""Patterns of file names that may match outside of the directory they are looked for in."""
_PLAN_STATES: Final = frozenset({"pending", "in_progress", "completed"})


def kind_of(name: str) -> ToolKind:
    """The kind of a tool by its name; tools of servers and unknown ones are ``other``."""
    return _KINDS.get(name, "other")


def shown_name(name: str) -> str:
    """A tool's name as people read it: a server's tools with the server's name in front."""
    parts = name.split("__", 2)
    return f"{parts[1]}: {parts[2]}" if len(parts) == 3 and parts[0] == "mcp" else name


def rule_name(name: str) -> str:
    """A tool's name as approval rules have it: ``mcp:server.tool``, else the program's own name.

    Empty where the name does not tell for certain which server it is.
    """
    parts = name.split("__")
    if parts[0] != "mcp" or len(parts) < 3:
        return name
    return f"mcp:{parts[1]}.{parts[2]}" if len(parts) == 3 and "." not in parts[1] else ""


def title_of(name: str, given: dict[str, Any]) -> str:
    """One line about a call: the command, the file, or whatever says most."""
    shown = shown_name(name)
    if kind_of(name) == "execute":
        detail = as_str(given.get("command"))
    else:
        texts = (as_str(given.get(key)) for key in (*_PATH_KEYS, *_TITLE_KEYS))
        detail = next((text for text in texts if text.strip()), "")
    line = " ".join(detail.split())
    if not line:
        return shown
    if kind_of(name) == "execute":
        return bounded(line, limits.ACP_COMMAND_CHARS)[0]
    return bounded(f"{shown} {line}", limits.ACP_COMMAND_CHARS)[0]


def paths_of(given: dict[str, Any], blocked: str = "") -> tuple[str, ...]:
    """The files and directories a call names, and the one that made the program ask."""
    named = [as_str(given.get(key)) for key in _PATH_KEYS]
    return tuple(dict.fromkeys(path for path in (*named, blocked) if path))


def names_its_place(name: str, given: dict[str, Any]) -> bool:
    """Whether :func:`paths_of` says where a call reads or looks; without a path, a search does it in the working directory."""
    if kind_of(name) == "read":
        return bool(paths_of(given))
    pattern = as_str(given.get("pattern" if name == "Glob" else "glob"))
    return kind_of(name) == "search" and not _LEADS_OUT.search(pattern)


def changes_of(
    name: str, given: dict[str, Any], current: Callable[[str], str | None] = lambda path: None
) -> tuple[tuple[FileDiff, ...], bool]:
    """What a call would change, by its input, and whether that is the whole of it.

    ``current`` is the text of a file as it is, ``None`` where there is none or it cannot be known.
    """
    path = as_str(given.get("file_path"))
    if name == "Write" and path:
        return _diffs([(path, current(path), as_str(given.get("content")))])
    if name == "Edit" and path:
        return _diffs([(path, as_str(given.get("old_string")), as_str(given.get("new_string")))])
    if name == "MultiEdit" and path:
        edits = map(as_dict, as_list(given.get("edits")))
        return _diffs([(path, as_str(edit.get("old_string")), as_str(edit.get("new_string"))) for edit in edits])
    # A notebook's change is told by its cell, and shown as it was given.
    return (), name == "NotebookEdit" or kind_of(name) != "edit"


def changed_by(result: Json) -> tuple[tuple[FileDiff, ...], bool]:
    """What a call has changed, by the structured copy of its result, and whether nothing was cut."""
    item = as_dict(result)
    path = as_str(item.get("filePath"))
    if not path:
        return (), True
    if isinstance(item.get("newString"), str):
        return _diffs([(path, as_str(item.get("oldString")), as_str(item.get("newString")))])
    if item.get("type") in ("create", "update") and isinstance(item.get("content"), str):
        before = item.get("originalFile")
        return _diffs([(path, as_str(before) if isinstance(before, str) else None, as_str(item.get("content")))])
    return (), True


def _diffs(changes: list[tuple[str, str | None, str]]) -> tuple[tuple[FileDiff, ...], bool]:
    diffs: list[FileDiff] = []
    whole = len(changes) <= limits.ACP_DIFFS
    for path, old, new in changes[: limits.ACP_DIFFS]:
        before, cut = bounded(old or "", limits.ACP_DIFF_CHARS)
        after, cut_too = bounded(new, limits.ACP_DIFF_CHARS)
        diffs.append(FileDiff(path, None if old is None else before, after, cut or cut_too))
        whole = whole and not cut and not cut_too
    return tuple(diffs), whole


def output_of(content: Json) -> tuple[str, bool]:
    """The text of a tool result, bounded, and whether it was cut."""
    if isinstance(content, str):
        return bounded(as_str(content), limits.ACP_TOOL_OUTPUT_CHARS)
    parts = [as_str(item.get("text")) for item in map(as_dict, as_list(content)) if item.get("type") == "text"]
    return bounded("\n".join(part for part in parts if part), limits.ACP_TOOL_OUTPUT_CHARS)


def input_of(given: dict[str, Any]) -> Mapping[str, Json]:
    """A call's input for telemetry, bounded."""
    text, cut = compact(given, limits.ACP_TOOL_INPUT_BYTES)
    return {"truncated": text} if cut else given


def plan_of(given: dict[str, Any]) -> tuple[PlanEntry, ...]:
    """The lines of a plan that the program writes down (``TodoWrite``)."""
    return tuple(
        PlanEntry(content, state if (state := as_str(item.get("status"))) in _PLAN_STATES else "pending")
        for item in map(as_dict, as_list(given.get("todos"))[: limits.ACP_PLAN_ENTRIES])
        if (content := as_str(item.get("content")))
    )
