"""Codex's file changes as diffs of our own: what the change replaces and what it puts there.

An added or deleted file comes with its whole content, a changed one as the hunks of a unified diff (Codex 0.171). A hunk
becomes one :class:`pkg.agent_api.FileDiff` whose texts are the hunk's lines before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

from pkg import limits
from pkg.agent_api import FileDiff, Json
from pkg.lenient import as_dict, as_list, as_str, bounded


@dataclass(frozen=True, slots=True)
class Changes:
    """The diffs of a file change, every path it touches, and whether the diffs show all of it."""

    diffs: tuple[FileDiff, ...]
    paths: tuple[str, ...]
    whole: bool


def changes_of(changes: Json) -> Changes:
    """The ``changes`` of a ``fileChange`` item; nothing in it raises."""
    diffs: list[FileDiff] = []
    paths: list[str] = []
    given = as_list(changes)
    whole = bool(given)
    for change in map(as_dict, given):
        path, text, kind = as_str(change.get("path")), as_str(change.get("diff")), as_dict(change.get("kind"))
        if isinstance(change.get("kind"), str):
            kind = {"type": change["kind"]}
        moved = as_str(kind.get("move_path"))
        paths += [name for name in (path, moved) if name]
        found = _file(path, text, as_str(kind.get("type")))
        whole = whole and bool(path) and found is not None and not any(diff.truncated for diff in found)
        diffs += found or []
        if moved and moved != path:
            diffs.append(FileDiff(moved, None, ""))
    if len(diffs) > limits.ACP_DIFFS:
        diffs, whole = diffs[: limits.ACP_DIFFS], False
    return Changes(tuple(diffs), tuple(dict.fromkeys(paths)), whole)


def _file(path: str, text: str, kind: str) -> list[FileDiff] | None:
    """The diffs of one file, ``None`` where the change cannot be understood."""
    if kind in ("add", "delete"):
        content, cut = bounded(text, limits.ACP_DIFF_CHARS)
        return [FileDiff(path, None, content, cut) if kind == "add" else FileDiff(path, content, "", cut)]
    if kind != "update":
        return None
    return _hunks(path, text)


def _hunks(path: str, text: str) -> list[FileDiff] | None:
    diffs: list[FileDiff] = []
    old: list[str] = []
    new: list[str] = []
    inside = False

    def close() -> None:
        before, before_cut = bounded("".join(old), limits.ACP_DIFF_CHARS)
        after, after_cut = bounded("".join(new), limits.ACP_DIFF_CHARS)
        diffs.append(FileDiff(path, before, after, before_cut or after_cut))
        old.clear()
        new.clear()

    for line in text.splitlines(keepends=True):
        if line.startswith("@@"):
            if inside:
                close()
            inside = True
        elif not inside:
            if line.strip() and not line.startswith(("diff ", "index ", "--- ", "+++ ", "Moved to")):
                return None
        elif line.startswith("-"):
            old.append(line[1:])
        elif line.startswith("+"):
            new.append(line[1:])
        elif line.startswith("\\"):
            continue
        else:
            old.append(line[1:] if line[:1] == " " else line)
            new.append(line[1:] if line[:1] == " " else line)
    if inside:
        close()
    return diffs
