"""Rules of the form that allow, ask about or deny what an agent wants to do: by kind of action, by command, by file, by tool.

One rule a line, ``#`` begins a comment::

    allow execute(git status *)     the command's words; * is one word, at the end any further ones
    deny  edit(secrets/**)          files below the workspace; * within a name, ** any directories
    ask   fetch                     a kind: read edit delete move search execute think fetch mode other, or * for all
    allow mcp:github.get_issue      a tool of an MCP server; github.* is all of that server

Guarantees:

- of the rules that match a part of an action the most specific one decides, among equals deny before ask before allow; an
  action with several parts (commands of a line, files) is denied when one part is, asked about when one is, and allowed only
  when every part is;
- *allow* needs certainty: the action wholly described, the line understood (:mod:`pkg.command_line`), a program by its bare
  name, a directory and files inside the workspace by name and by real path. What makes other programs run commands (``.git``)
  must be named by the rule;
- *deny* and *ask* never miss for want of certainty: a line that is not understood, a file that is not told, a directory above a
  protected file, an option before the word the rule names are at least asked about. They see a program behind its directory,
  quotes, ``env`` or ``sh -c``, and a file behind its links.

Rules decide what an agent asks about and what it says of it. They are no sandbox: what a program does that they allow is not
seen by them.
"""

from __future__ import annotations

import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pkg import command_line, limits
from pkg.agent_api import ApprovalRequested, ToolKind
from pkg.command_line import Command, Word

Effect = Literal["allow", "ask", "deny"]

ANY: Final = "*"
TOOL: Final = "mcp:"
KINDS: Final[frozenset[str]] = frozenset(typing.get_args(ToolKind))
FILE_KINDS: Final = frozenset({"read", "edit", "delete", "move", "search"})
_DIRECTORIES: Final = frozenset({"delete", "move", "search"})
"""Kinds of actions on a name that take what is below it along."""
_STRENGTH: Final[Mapping[str, int]] = types.MappingProxyType({"allow": 0, "ask": 1, "deny": 2})
_RULE: Final = re.compile(r"(allow|ask|deny)\s+([^\s()#]+)\s*")
_TOOL_NAME: Final = re.compile(r"mcp:[^\s.*]+\.(?:\*|[^\s*]+)")
_INPUT: Final = re.compile(r"(?:[\w.-]+(?:: [\w.-]+)? )?\{.*\}", re.DOTALL)
"""How drivers show the input of a tool that runs no command line: its name and one JSON object."""


class RuleError(ValueError):
    """A line is no rule; ``problem`` is a key of the catalogue without its ``problem.``."""

    def __init__(self, problem: str, line: int) -> None:
        """``line`` counts from 1."""
        self.problem = problem
        self.line = line
        super().__init__(f"line {line}: {problem}")


@dataclass(frozen=True, slots=True)
class Target:
    """A file as it is called: every name of it that is known, below the workspace or absolute."""

    names: tuple[str, ...] = ()
    """Normalised; ``""`` is the workspace itself. None: it cannot be told what file is meant."""
    absolute: tuple[str, ...] = ()
    """The same names from the root of the file system, where the workspace's place there is known."""
    directory: bool | None = None
    """Whether it is one; ``None`` where that cannot be known."""


Inside = Callable[[str, str], bool]
Resolve = Callable[[str, str], Target]
"""``resolve(path, cwd)``: the names of a path, relative to ``cwd`` unless absolute."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``str()`` is how people and records name it."""

    line: int
    effect: Effect
    what: str
    """A kind of action, :data:`ANY`, or :data:`TOOL` and a name."""
    pattern: str = ""
    words: tuple[Word, ...] = ()
    """Of a command; ``None`` is one word."""
    further: bool = False
    """Whether any further words may follow."""
    segments: tuple[str, ...] = ()
    """Of a file."""

    def __str__(self) -> str:
        return f"rule {self.line}: {self.effect} {self.what}{f'({self.pattern})' if self.pattern else ''}"

    @property
    def rank(self) -> tuple[int, ...]:
        """How specific it is."""
        tool = self.what.startswith(TOOL)
        what = 0 if self.what == ANY else 1 if not tool else 2 if self.what.endswith(".*") else 3
        literal = sum(word is not None for word in self.words) + sum(not _has_wildcard(part) for part in self.segments)
        partial = sum(word is None for word in self.words)
        partial += sum(_has_wildcard(part) and part != "**" for part in self.segments)
        open_end = self.further or "**" in self.segments
        return (what, int(bool(self.pattern)), literal, partial, int(not open_end))


Rules = tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What the rules say of an action, and which of them."""

    effect: Effect
    rules: tuple[Rule, ...]
    certain: bool = True
    """Whether they match; else it could not be told, and a person has to look."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))


# ------------------------------------------------------------------ reading


def parse(text: str) -> Rules:
    """The rules in ``text``; raises :class:`RuleError` for the first line that is none."""
    rules: list[Rule] = []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if len(rules) >= limits.APPROVAL_RULES:
            raise RuleError("rule_too_many", number)
        if len(stripped) > limits.APPROVAL_RULE_CHARS:
            raise RuleError("rule_too_long", number)
        rules.append(_rule(stripped, number))
    return tuple(rules)


def _rule(text: str, number: int) -> Rule:
    begun = _RULE.match(text)
    if begun is None:
        raise RuleError("rule_shape", number)
    effect: Effect = begun.group(1)  # type: ignore[assignment]  # one of the three, by the expression
    what, rest = begun.group(2), text[begun.end() :]
    if what not in KINDS and what != ANY and not _TOOL_NAME.fullmatch(what):
        raise RuleError("rule_kind", number)
    pattern: str | None = None
    if rest.startswith("("):
        end = _closing(rest, quotes=what == "execute")
        if end < 0:
            raise RuleError("rule_shape", number)
        pattern, rest = rest[1:end].strip(), rest[end + 1 :].strip()
        if not pattern:
            raise RuleError("rule_empty", number)
    if rest and not rest.startswith("#"):
        raise RuleError("rule_shape", number)
    if pattern is None:
        return Rule(number, effect, what)
    if what == "execute":
        return _command_rule(number, effect, pattern)
    if what in FILE_KINDS:
        return _file_rule(number, effect, what, pattern)
    raise RuleError("rule_no_pattern", number)


def _closing(text: str, *, quotes: bool) -> int:
    """Where the parenthesis that ``text`` begins with ends."""
    depth, at, quote = 0, 0, ""
    while at < len(text):
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif quotes and char == "\\":
            at += 1
        elif quotes and char in "'\"":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if not depth:
                return at
        at += 1
    return -1


def _command_rule(number: int, effect: Effect, pattern: str) -> Rule:
    words = command_line.literal_words(pattern)
    if words is None:
        raise RuleError("rule_command", number)
    further = words[-1] is None
    if further:
        words = words[:-1]
    if effect == "allow" and words and words[0] is not None:
        program, following = words[0], words[1] if len(words) > 1 else None
        option = following is None or following.startswith(("-", "+"))
        if command_line.names_runner(program) or (command_line.names_shell(program) and option):
            raise RuleError("rule_runs_others", number)
        if command_line.parse(" ".join(_quoted(word) for word in words if word is not None)).opaque:
            raise RuleError("rule_command", number)
    return Rule(number, effect, "execute", pattern, words, further)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _file_rule(number: int, effect: Effect, what: str, pattern: str) -> Rule:
    if pattern.endswith("/"):
        pattern += "**"
    whole = pattern.removeprefix("./")
    segments = tuple(part for part in whole.split("/") if part not in ("", "."))
    absolute = whole.startswith("/")
    if ".." in segments or whole.startswith("~") or any("**" in part and part != "**" for part in segments) or "\\" in whole:
        raise RuleError("rule_path", number)
    if absolute and effect == "allow":
        raise RuleError("rule_path_outside", number)
    return Rule(number, effect, what, pattern, segments=("/", *segments) if absolute else segments or ("**",))


# ------------------------------------------------------------------ deciding


def shell_line(request: ApprovalRequested) -> str:
    """The command line a request is about, empty when it is about something else: a plan, or a tool's input as JSON."""
    if request.kind == "execute":
        return request.command
    if request.kind == "mode" or request.tool.startswith(TOOL) or _INPUT.fullmatch(request.command):
        return ""
    return request.command


def evaluate(
    rules: Rules, request: ApprovalRequested, inside: Inside, resolve: Resolve, closed: Callable[[str], bool]
) -> Found | None:
    """What the rules say; ``None`` when they leave it to the policy.

    ``inside`` and ``resolve`` judge the paths of the request; ``closed`` says whether a segment of a path is one that a rule
    must name before it allows an effect there.
    """
    if not rules:
        return None
    command = shell_line(request)
    paths = tuple(dict.fromkeys((*request.paths, *(diff.path for diff in request.diffs))))
    found: list[Found | None] = []
    if command:
        may_allow = request.complete and not request.diffs and inside(request.cwd or ".", "")
        found += _of_line(rules, request, command, root=_names_root(request, resolve), may_allow=may_allow)
        found += [each for each in _of_files(rules, request, paths, inside, resolve, closed) if each and each.effect != "allow"]
        if not paths:
            found += [each for each in (_untold(rules, request),) if each]
    elif request.kind in FILE_KINDS and paths:
        found += _of_files(rules, request, paths, inside, resolve, closed)
    else:
        found.append(_of_whole(rules, request, here=inside(request.cwd or ".", "")))
    return _together(found)


def _together(parts: Sequence[Found | None]) -> Found | None:
    for effect in ("deny", "ask"):
        hits = [each for each in parts if each is not None and each.effect == effect]
        if hits:
            return hits[0]
    if not parts or any(each is None for each in parts):
        return None
    return Found("allow", tuple(dict.fromkeys(rule for each in parts if each is not None for rule in each.rules)))


def _best(sure: Iterable[Rule], maybe: Iterable[Rule] = ()) -> Found | None:
    """The most specific rule; what only may match is asked about unless a more specific one matches for sure."""

    def key(rule: Rule) -> tuple[tuple[int, ...], int]:
        return (rule.rank, _STRENGTH[rule.effect])

    winner = max(sure, key=key, default=None)
    doubtful = max((rule for rule in maybe if rule.effect != "allow"), key=key, default=None)
    if doubtful is not None and (winner is None or (winner.effect == "allow" and doubtful.rank >= winner.rank)):
        return Found("ask", (doubtful,), certain=False)
    return None if winner is None else Found(winner.effect, (winner,))


def _of_whole(rules: Rules, request: ApprovalRequested, *, here: bool) -> Found | None:
    """An action that names neither a command line nor a file; ``here`` when it happens in the workspace."""
    sure, maybe = [], []
    may_allow = request.complete and (here or request.kind not in FILE_KINDS)
    may_allow = may_allow and request.kind not in ("execute", "edit", "delete", "move")
    for rule in rules:
        if rule.effect == "allow" and not may_allow:
            continue
        if rule.what.startswith(TOOL):
            if _names_tool(rule.what, request.tool):
                sure.append(rule)
            elif not request.tool and request.kind == "other":
                maybe.append(rule)
        elif rule.what in (ANY, request.kind):
            (maybe if rule.pattern else sure).append(rule)
    return _best(sure, maybe)


def _names_tool(what: str, tool: str) -> bool:
    return tool.startswith(what[:-1]) if what.endswith(".*") else tool == what


# ---- commands


def _of_line(rules: Rules, request: ApprovalRequested, text: str, *, root: bool, may_allow: bool) -> list[Found | None]:
    line = command_line.parse(text)
    # Another language with other quotes: nothing of it can be told for certain.
    opaque = line.opaque or not line.commands or not request.complete or request.tool == "PowerShell"
    found: list[Found | None] = []
    moved = False
    for command in line.commands:
        allowed = may_allow and not opaque
        found_here = _of_command(rules, request, command, root=root and not moved, may_allow=allowed)
        moved = moved or command_line.base_name(command.words[0] or "") in ("cd", "pushd", "popd", "chdir")
        found.append(found_here)
    if opaque:
        found.append(_untold_line(rules, request))
    return found


def _untold_line(rules: Rules, request: ApprovalRequested) -> Found | None:
    """A line that is not understood: whatever denies or asks about some command may be about this one."""
    sure = [rule for rule in rules if rule.effect != "allow" and _whole(rule, request)]
    maybe = [rule for rule in rules if rule.effect != "allow" and rule.what == "execute"]
    return _best(sure, maybe)


def _whole(rule: Rule, request: ApprovalRequested) -> bool:
    """Whether a rule is about every command line of this request."""
    if rule.what == "execute":
        return not rule.words and (not rule.pattern or rule.further)
    return not rule.pattern and rule.what in (ANY, request.kind)


def _of_command(rules: Rules, request: ApprovalRequested, command: Command, *, root: bool, may_allow: bool) -> Found | None:
    sure, maybe = [], []
    for rule in rules:
        if rule.effect == "allow":
            if may_allow and rule.what in ("execute", ANY) and _allows(rule, command.words, root=root):
                sure.append(rule)
        elif _whole(rule, request) or (rule.what == "execute" and _is(rule, command.words)):
            sure.append(rule)
        elif rule.what == "execute" and _may_be(rule, command.words):
            maybe.append(rule)
    return _best(sure, maybe)


def _allows(rule: Rule, words: tuple[Word, ...], *, root: bool) -> bool:
    """Whether an allowing rule is about exactly this command."""
    program = words[0]
    if program is None:
        return False
    if not rule.pattern:
        return "/" not in program
    named = rule.words[0] if rule.words else None
    if "/" in program and not (program == named and (program.startswith("/") or root)):
        return False
    return _covers(rule, words, lambda pattern, word: pattern == word)


def _is(rule: Rule, words: tuple[Word, ...]) -> bool:
    """Whether a denying or asking rule is about this command, however its program is named."""
    if words[0] is None:
        return False
    return _covers(rule, (command_line.base_name(words[0]), *words[1:]), _same_word, program=True)


def _covers(rule: Rule, words: tuple[Word, ...], same: Callable[[str, str], bool], *, program: bool = False) -> bool:
    count = len(rule.words)
    if len(words) < count or (not rule.further and len(words) != count):
        return False
    for at, pattern in enumerate(rule.words):
        word = words[at]
        if word is None:
            return False
        if pattern is None:
            continue
        if not same(command_line.base_name(pattern) if program and at == 0 else pattern, word):
            return False
    return True


def _same_word(pattern: str, word: str) -> bool:
    return pattern == word


def _may_be(rule: Rule, words: tuple[Word, ...]) -> bool:
    """Whether a command may be the one the rule is about: with options in front of a word, or with words that expand."""
    whole = len(rule.words)
    states = {(0, False)}  # how much of the rule is found, and whether options are being left out
    for at, word in enumerate(words):
        if rule.further and any(found == whole for found, _ in states):
            return True
        following: set[tuple[int, bool]] = set()
        for found, skipping in states:
            if word is None:
                following |= {(found, skipping), *((more, False) for more in range(found + 1, whole + 1))}
                continue
            if found == whole:
                continue
            wanted = rule.words[found]
            here = word
            if at == 0:
                here, wanted = command_line.base_name(word), None if wanted is None else command_line.base_name(wanted)
            if wanted in (None, here):
                following.add((found + 1, False))
            if found and (skipping or word.startswith("-") or (wanted or "").startswith("-")):
                following.add((found, True))
        states = following
    return any(found == whole for found, _ in states)


def _names_root(request: ApprovalRequested, resolve: Resolve) -> bool:
    """Whether a command runs in the workspace itself, so that a program named from there is the one the rule means."""
    names = resolve(request.cwd or ".", "").names
    return bool(names) and all(name == "" for name in names)


# ---- files


def _untold(rules: Rules, request: ApprovalRequested) -> Found | None:
    """Files and tools that are not named."""
    kinds = (request.kind,) if request.kind in FILE_KINDS else ()
    tool = request.kind == "other" and not request.tool
    return _best((), [each for each in rules if (each.pattern and each.what in kinds) or (tool and each.what.startswith(TOOL))])


def _of_files(
    rules: Rules,
    request: ApprovalRequested,
    paths: tuple[str, ...],
    inside: Inside,
    resolve: Resolve,
    closed: Callable[[str], bool],
) -> list[Found | None]:
    found: list[Found | None] = []
    if request.kind not in FILE_KINDS:
        return found
    if not request.complete:
        found.append(_untold(rules, request))
    for path in paths:
        target = resolve(path, request.cwd)
        may_allow = request.complete and not request.command and bool(target.names) and inside(path, request.cwd)
        sure, maybe = [], []
        for rule in rules:
            if rule.what not in (ANY, request.kind):
                continue
            if rule.effect == "allow":
                if may_allow and _allows_file(rule, request, target, closed):
                    sure.append(rule)
            elif not rule.pattern or _is_file(rule, target):
                sure.append(rule)
            elif _may_be_file(rule, request, target):
                maybe.append(rule)
        found.append(_best(sure, maybe))
    return found


def _allows_file(rule: Rule, request: ApprovalRequested, target: Target, closed: Callable[[str], bool]) -> bool:
    named = {part.casefold() for part in rule.segments}
    for name in target.names:
        parts = _parts(name)
        if name.startswith("/") or (rule.pattern and not matches(rule.segments, parts, below=True)):
            return False
        effect = request.kind in ("edit", "delete", "move")
        if effect and any(closed(part) and part.casefold() not in named for part in parts):
            return False
    return True


def _is_file(rule: Rule, target: Target) -> bool:
    pattern = tuple(map(_folded, rule.segments))
    if pattern[0] == "/":
        return any(matches(pattern[1:], parts) for parts in _all_parts(target.absolute))
    # Outside of the workspace a pattern that may begin anywhere is about every directory.
    anywhere = pattern[0] == "**" and len(pattern) > 1
    names = target.names if anywhere else [name for name in target.names if not name.startswith("/")]
    return any(matches(pattern, parts) for parts in _all_parts(names))


def _may_be_file(rule: Rule, request: ApprovalRequested, target: Target) -> bool:
    """Whether the action may be about what the rule names: a file nobody told, or something below a directory."""
    pattern = tuple(map(_folded, rule.segments))
    absolute = pattern[0] == "/"
    names = target.absolute if absolute else [name for name in target.names if not name.startswith("/")]
    if not target.names or (absolute and not names):
        return True
    if target.directory is False or (target.directory is None and request.kind not in _DIRECTORIES):
        return False
    return any(leads_to(pattern[1:] if absolute else pattern, parts) for parts in _all_parts(names))


def _all_parts(names: Iterable[str]) -> list[tuple[str, ...]]:
    return [tuple(map(_folded, _parts(name))) for name in names]


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split("/") if part)


def _folded(part: str) -> str:
    """A name as file systems see it that do not tell small from capital letters or ways of writing an accent apart."""
    return unicodedata.normalize("NFC", part).casefold()


def _has_wildcard(segment: str) -> bool:
    return "*" in segment or "?" in segment


def _matches_name(pattern: str, name: str) -> bool:
    """One segment; going back only to the last ``*``, so that no name an agent makes up takes long."""
    at = here = 0
    star, resumed = -1, 0
    while here < len(name):
        if at < len(pattern) and pattern[at] == "*":
            star, resumed = at, here
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", name[here]):
            at += 1
            here += 1
        elif star >= 0:
            resumed += 1
            at, here = star + 1, resumed
        else:
            return False
    return not pattern[at:].strip("*")


def _states(pattern: tuple[str, ...], parts: tuple[str, ...]) -> frozenset[int]:
    """How much of the pattern may be used up by ``parts``: every number of segments that is possible."""

    def onward(states: set[int]) -> set[int]:
        for at in range(len(pattern)):
            if at in states and pattern[at] == "**":
                states.add(at + 1)
        return states

    states = onward({0})
    for part in parts:
        following: set[int] = set()
        for at in states:
            if at == len(pattern):
                continue
            if pattern[at] == "**":
                following.add(at)
            elif _matches_name(pattern[at], part):
                following.add(at + 1)
        states = onward(following)
    return frozenset(states)


def matches(pattern: tuple[str, ...], parts: tuple[str, ...], *, below: bool = False) -> bool:
    """Whether the segments of a name match; ``below``: a ``**`` at the end is not the directory itself."""
    if below and pattern[-1:] == ("**",):
        pattern = (*pattern, "*")
    return len(pattern) in _states(pattern, parts)


def leads_to(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether something below the directory ``parts`` may match."""
    return any(at < len(pattern) for at in _states(pattern, parts))
