"""Plain sentences to steps: what the agent understands, as one pure function.

``understand("list the files, then create hello.txt")`` is ``[ListFiles("."), WriteFile("hello.txt", ...)]``. Several steps in
one message are separated by "then", "and", commas, semicolons, full stops or lines; text in quotes or backticks is kept whole.
What is not understood becomes :class:`Unknown`, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListFiles:
    """List a directory."""

    path: str = "."


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Show a file."""

    path: str


@dataclass(frozen=True, slots=True)
class SearchText:
    """Find the lines that hold ``text`` below ``path``."""

    text: str
    path: str = "."


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Create a file or replace what is in it."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class AppendText:
    """Add a line at the end of a file."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class ReplaceText:
    """Replace every ``old`` in a file with ``new``."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Run a shell command."""

    command: str


@dataclass(frozen=True, slots=True)
class Help:
    """Say what this agent is and what it understands."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part of the message that means nothing to this agent."""

    text: str


Step = ListFiles | ReadFile | SearchText | WriteFile | AppendText | ReplaceText | RunCommand | Help | Unknown

GREETING = "Hello from the demo agent!\n"
"""What goes into a new file when the message does not say."""

_QUOTED = re.compile(r"\"([^\"]*)\"|“([^”]*)”|`([^`]*)`|(?<!\w)'([^']*)'(?!\w)")
_BETWEEN = re.compile(
    r"\s*(?:[,;]|\.(?=\s|$)|[!?](?=\s|$))?\s*\b(?:and then|then|and)\b\s*|\s*[,;]\s*|[.!?](?=\s|$)\s*", re.IGNORECASE
)
_WHOLE_LINE = re.compile(r"(?:^|.*?[\s,;.])run:\s*(\S.*)$", re.IGNORECASE)
_POLITE = re.compile(
    r"^(?:(?:please|now|can you|could you|would you|just|also|first|next|finally|go ahead and)\s+)+", re.IGNORECASE
)
_MARK = "\x00"

_PATH = r"(?P<path>\S+)"
_TEXT = r"(?P<text>.+)"
_NOUN = r"(?:(?:a|an|the|my)\s+)?(?:(?:new|empty|text)\s+)*(?:file\s+)?(?:(?:called|named)\s+)?"
_HOLDING = r"(?:with|containing|saying|that says)\s+(?:(?:the\s+)?(?:text|contents?|words?|line)\s+)?"
_FOLDER = r"(?:(?:the|this|my)\s+)*(?:folder|directory|workspace|project)"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"^{text}$", re.IGNORECASE)


_PATTERNS: tuple[tuple[re.Pattern[str], Callable[[dict[str, str]], Step]], ...] = (
    (_pattern(r"(?:help|hi|hello|hey|who are you|what are you|what can you do)(?:\s+there)?"), lambda found: Help()),
    (_pattern(r"(?:run|execute)(?:\s+the\s+command)?:?\s+(?P<command>.+)"), lambda found: RunCommand(found["command"])),
    (
        _pattern(
            rf"(?:ls|(?:list|show|see)(?:\s+me)?(?:\s+(?:all|the|my|what))*(?:\s+(?:files|contents|is\s+here))?)(?:\s+(?:in|of|under)\s+{_FOLDER})?"
        ),
        lambda found: ListFiles(),
    ),
    (
        _pattern(rf"(?:ls|(?:list|show)(?:\s+me)?(?:\s+(?:all|the|my))*(?:\s+files)?\s+(?:in|of|under))\s+{_PATH}"),
        lambda found: ListFiles(found["path"]),
    ),
    (
        _pattern(rf"replace\s+(?P<old>.+?)\s+(?:with|by)\s+(?P<new>.+?)\s+in\s+{_NOUN}{_PATH}"),
        lambda found: ReplaceText(found["path"], found["old"], found["new"]),
    ),
    (
        _pattern(rf"(?:append|add)\s+{_TEXT}\s+to\s+{_NOUN}{_PATH}"),
        lambda found: AppendText(found["path"], _line(found["text"])),
    ),
    (
        _pattern(rf"(?:write|put|save)\s+{_TEXT}\s+(?:to|in|into)\s+{_NOUN}{_PATH}"),
        lambda found: WriteFile(found["path"], _line(found["text"])),
    ),
    (
        _pattern(rf"(?:create|make|write|touch)\s+{_NOUN}{_PATH}\s+{_HOLDING}{_TEXT}"),
        lambda found: WriteFile(found["path"], _line(found["text"])),
    ),
    (_pattern(rf"(?:create|make|write|touch)\s+{_NOUN}{_PATH}"), lambda found: WriteFile(found["path"], GREETING)),
    (_pattern(rf"(?:search|grep|look|find)\s+(?:for\s+)?{_TEXT}\s+in\s+{_FOLDER}"), lambda found: SearchText(found["text"])),
    (
        _pattern(rf"(?:search|grep|look|find)\s+(?:for\s+)?{_TEXT}\s+in\s+{_NOUN}{_PATH}"),
        lambda found: SearchText(found["text"], found["path"]),
    ),
    (_pattern(rf"(?:search|grep|look|find)\s+(?:for\s+)?{_TEXT}"), lambda found: SearchText(found["text"])),
    (
        _pattern(rf"(?:read|show|open|cat|print|display)\s+(?:me\s+)?(?:(?:the\s+)?contents?\s+of\s+)?{_NOUN}{_PATH}"),
        lambda found: ReadFile(found["path"]),
    ),
)


def understand(message: str) -> list[Step]:
    """The steps a message asks for, in its order; an empty message asks for help."""
    steps: list[Step] = []
    for line in message.splitlines():
        command = _WHOLE_LINE.match(line)
        plain = line[: command.start(1)].rstrip()[: -len("run:")] if command else line
        steps += [_step(*part) for part in _parts(plain)]
        if command:
            steps.append(RunCommand(command[1].strip()))
    return steps or [Help()]


def _parts(line: str) -> list[tuple[str, list[str]]]:
    """The line cut into steps, each with the quoted texts that its marks stand for."""
    quoted: list[str] = []

    def keep(found: re.Match[str]) -> str:
        quoted.append(next(group for group in found.groups() if group is not None))
        return f"{_MARK}{len(quoted) - 1}{_MARK}"

    marked = _QUOTED.sub(keep, line)
    return [(part.strip(), quoted) for part in _BETWEEN.split(marked) if part and part.strip()]


def _step(part: str, quoted: list[str]) -> Step:
    def restore(text: str) -> str:
        return re.sub(f"{_MARK}(\\d+){_MARK}", lambda found: quoted[int(found[1])], text)

    words = _POLITE.sub("", part)
    for pattern, build in _PATTERNS:
        if found := pattern.match(words):
            return build({name: restore(value) for name, value in found.groupdict().items()})
    return Unknown(restore(part))


def _line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
