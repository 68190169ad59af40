"""A command line as a POSIX shell takes it apart: which simple commands it runs, or that this cannot be told for certain.

A lexer of its own, because the usual ones split words and know no operators. It reads quotes, backslashes, line
continuations and the operators ``;``, ``&``, ``&&``, ``|``, ``||`` and newline; a descriptor that is duplicated (``2>&1``)
and ``/dev/null`` change nothing of what runs. Everything else a shell would do makes the line *opaque*: substitutions,
variables, redirections, here-documents, groups and subshells, reserved words, functions, assignments, comments, syntax
errors, control and look-alike space characters, programs that run what their arguments or another file say.

Guarantees: of a line that is not opaque, :attr:`Line.commands` are exactly the simple commands that run, in their order, with
words as the program gets them (a word that expands is ``None``: any number of unknown words); of an opaque one they are those
that could be told, and there may be others. What a wrapper (``env``, ``nohup``, ``sh -c '…'``) runs is listed after it, with
:attr:`Command.through`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from pkg import limits

Word = str | None
"""A word, or ``None`` for any number of words that are not known."""


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command; ``words`` has at least one."""

    words: tuple[Word, ...]
    through: bool = False
    """Whether a program named before it runs it."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a line runs."""

    commands: tuple[Command, ...]
    opaque: bool


_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=")
_HARMLESS: Final = re.compile(r"(?:>&[0-2]|(?:>>?|<)[ \t]*/dev/null)(?=[ \t\n;&|<>]|\Z)")
_REDIRECTION: Final = re.compile(r">>|>\||>&|<>|<&|>|<")
_VARIABLE: Final = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!-])")
_DURATION: Final = re.compile(r"\d+(?:\.\d+)?[smhd]?")

_RESERVED: Final = frozenset(
    {
        *(
            "!",
            "{",
            "}",
            "[[",
            "]]",
            "case",
            "coproc",
            "do",
            "done",
            "elif",
            "else",
            "esac",
            "fi",
            "for",
            "function",
            "if",
            "in",
        ),
        *("select", "then", "until", "while", "foreach", "repeat", "end", "always", "nocorrect", "noglob", "-"),
    }
)
_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "yash", "rbash"})
_SHELL_LITERAL: Final = re.compile(r"-[elux]*c")
_PREFIXES: Final = frozenset({"nohup", "time", "command", "builtin", "setsid", "busybox", "toybox", "chronic", "caffeinate"})
"""Programs that run the words after them; one of them is a shell's own word."""
_POWERS: Final = frozenset({"sudo", "doas", "exec"})
"""The same, with other rights or in place of the shell."""
_RUNNERS: Final = frozenset(
    {
        *("eval", ".", "source", "xargs", "parallel", "su", "runuser", "pkexec", "chroot", "unshare", "nsenter", "fakeroot"),
        *("strace", "ltrace", "gdb", "script", "watch", "entr", "expect", "screen", "tmux", "at", "batch", "crontab"),
        *("systemd-run", "ionice", "chrt", "taskset", "stdbuf", "unbuffer", "flock", "start-stop-daemon", "rlwrap", "proot"),
        *("bwrap", "firejail", "fish", "csh", "tcsh", "pwsh", "powershell", "cmd", "nu", "elvish", "xonsh"),
        # What changes the shell that runs the rest of the line.
        *("alias", "unalias", "hash", "enable", "trap", "set", "shopt", "setopt", "unsetopt", "emulate", "export", "declare"),
        *("typeset", "local", "readonly", "bind", "complete", "compgen", "fc", "mapfile", "readarray", "let", "autoload"),
        *("zmodload", "rehash", "disable", "functions", "aliases", "zle"),
    }
)
"""Programs whose arguments, input or files say what runs, in ways that are not followed."""
_EVALUATING: Final = frozenset({"test", "[", "printf", "read", "unset", "wait", "getopts"})
"""A shell's own commands that expand what is quoted, in names of array elements."""
_RUNS_WORDS: Final = re.compile(r"-(?:exec|execdir|ok|okdir)|--exec(?:[=-].*)?|--to-command(?:=.*)?|--pre(?:=.*)?", re.DOTALL)
"""Options of many programs that name a command to run."""


def names_runner(program: str) -> bool:
    """Whether a program of this name runs whatever its arguments say, so that allowing it would allow everything."""
    name = base_name(program)
    return name in _PREFIXES | _POWERS | _RUNNERS | {"env", "timeout", "nice"}


def names_shell(program: str) -> bool:
    """Whether it is a shell, which runs what an option or a file says."""
    return base_name(program) in _SHELLS


def base_name(program: str) -> str:
    """A program's name without its directory, in small letters: some file systems do not tell them apart."""
    return unicodedata.normalize("NFC", program.rpartition("/")[2]).casefold()


def parse(text: str) -> Line:
    """What ``text`` runs as the line of a POSIX shell; never raises."""
    return _parsed(text, 0)


def literal_words(text: str) -> tuple[Word, ...] | None:
    """The words of one simple command in which nothing but a ``*`` alone expands (``None`` for it), else ``None``."""
    lexer = _Lexer(text)
    lexer.run()
    if lexer.opaque or len(lexer.commands) != 1:
        return None
    words = lexer.commands[0]
    if _is_assignment(words[0]) or (words[0].raw in _RESERVED and not words[0].quoted):
        return None
    if any(word.wild and word.raw != "*" for word in words):
        return None
    return tuple(None if word.wild else word.raw for word in words)


def _parsed(text: str, depth: int) -> Line:
    if depth > limits.COMMAND_DEPTH or len(text) > limits.COMMAND_CHARS:
        return Line((), opaque=True)
    lexer = _Lexer(text)
    lexer.run()
    opaque = lexer.opaque
    found: list[Command] = []
    count = 0
    for raw in lexer.commands:
        count += len(raw)
        if count > limits.COMMAND_WORDS:
            return Line(tuple(found), opaque=True)
        while raw and (_is_assignment(raw[0]) or (not raw[0].quoted and raw[0].raw in _RESERVED)):
            opaque = True
            raw = raw[1:]
        if raw:
            words = tuple(None if word.wild else word.raw for word in raw)
            inner = _with_inner(words, depth)
            found += inner.commands
            opaque = opaque or inner.opaque
    return Line(tuple(found), opaque)


def _is_assignment(word: _Word) -> bool:
    found = _ASSIGNMENT.match(word.raw)
    return found is not None and (not word.quoted or found.end() <= word.quoted_at)


# ------------------------------------------------------------------ wrappers


def _with_inner(words: tuple[Word, ...], depth: int) -> Line:
    """A simple command and what it runs in its turn."""
    itself = Command(words, through=depth > 0)
    program = words[0]
    if program is None:
        return Line((itself,), opaque=True)
    name = base_name(program)
    opaque = not name or any(word is not None and _RUNS_WORDS.fullmatch(word) for word in words[1:])
    if name in ("fd", "fdfind") and any(word in ("-x", "-X") for word in words[1:]):
        opaque = True
    if name in _EVALUATING and any(word is None or "$" in word or "`" in word for word in words[1:]):
        opaque = True
    inner: Line | None = None
    if depth > limits.COMMAND_DEPTH or name in _RUNNERS:
        opaque = True
    elif name in _SHELLS:
        inner = _shell(words, depth)
    elif name == "env":
        inner = _env(words, depth)
    elif name in _PREFIXES | _POWERS | {"timeout", "nice"}:
        inner = _prefix(name, words, depth)
    if inner is None:
        return Line((itself,), opaque)
    return Line((itself, *inner.commands), opaque or inner.opaque or name in _POWERS)


_NOT_FOLLOWED: Final = Line((), opaque=True)
_NOTHING: Final = Line((), opaque=False)


def _rest(words: tuple[Word, ...], depth: int) -> Line:
    """What the words after a wrapper run."""
    return _with_inner(words, depth + 1) if words else _NOTHING


def _shell(words: tuple[Word, ...], depth: int) -> Line:
    if len(words) < 2 or words[1] is None:
        return _NOT_FOLLOWED
    if not words[1].startswith(("-", "+")):
        return _NOTHING  # a script, by its name
    script = words[2] if len(words) > 2 else None
    if not _SHELL_LITERAL.fullmatch(words[1]) or script is None or script.startswith(("-", "+")):
        return _NOT_FOLLOWED
    return _parsed(script, depth + 1)


def _env(words: tuple[Word, ...], depth: int) -> Line:
    at, opaque = 1, False
    while at < len(words):
        word = words[at]
        if word is None:
            return _NOT_FOLLOWED
        if word in ("-i", "-", "--ignore-environment"):
            at += 1
        elif word in ("-u", "--unset"):
            if words[at + 1 : at + 2] in ((), (None,)):
                return _NOT_FOLLOWED
            at += 2
        elif word == "--":
            at += 1
            break
        elif word.startswith("-"):
            return _NOT_FOLLOWED
        elif "=" in word:
            opaque = True
            at += 1
        else:
            break
    while at < len(words) and "=" in (words[at] or ""):
        opaque = True
        at += 1
    inner = _rest(words[at:], depth)
    return Line(inner.commands, inner.opaque or opaque)


def _prefix(name: str, words: tuple[Word, ...], depth: int) -> Line:
    rest = words[1:]
    if name == "command" and rest[:1] in (("-v",), ("-V",)):
        return _NOTHING
    if name in ("time", "command") and rest[:1] == ("-p",):
        rest = rest[1:]
    if name == "nice" and rest[:1] == ("-n",) and rest[1:2] != (None,):
        rest = rest[2:]
    if name == "timeout":
        if not rest or rest[0] is None or not _DURATION.fullmatch(rest[0]):
            return _NOT_FOLLOWED
        rest = rest[1:]
    if rest and (rest[0] is None or rest[0].startswith("-")):
        return _NOT_FOLLOWED
    if name == "time" and rest and (rest[0] in _RESERVED or _ASSIGNMENT.match(rest[0] or "")):
        return _NOT_FOLLOWED  # a shell's own word, before a whole pipeline
    return _rest(rest, depth)


# ------------------------------------------------------------------ words


@dataclass(slots=True)
class _Word:
    """A word while it is read: what is left after quotes are removed."""

    raw: str = ""
    wild: bool = False
    quoted: bool = False
    quoted_at: int = 0

    def add(self, text: str) -> None:
        self.raw += text

    def add_quoted(self, text: str) -> None:
        if not self.quoted:
            self.quoted, self.quoted_at = True, len(self.raw)
        self.raw += text


class _Rest(Exception):
    """What follows cannot be told at all."""


class _Lexer:
    """Takes one line apart, into :attr:`commands`, each a list of words."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._word: _Word | None = None
        self._words: list[_Word] = []
        self._target = False
        """The next word is a redirection's and no command's."""
        self._due = False
        """An operator waits for the command after it."""
        self.commands: list[list[_Word]] = []
        self.opaque = any((char < " " and char not in "\t\n") or "\x7f" <= char <= "\x9f" for char in text)

    def run(self) -> None:
        """Read to the end, or to what cannot be told."""
        try:
            while self._at < len(self._text):
                self._step(self._text[self._at])
        except _Rest:
            self.opaque = True
            self._current().wild = True
        self._end_word()
        self._end_command("")
        if self._due or self._target:
            self.opaque = True

    def _current(self) -> _Word:
        if self._word is None:
            self._word = _Word()
        return self._word

    def _step(self, char: str) -> None:
        match char:
            case " " | "\t":
                self._at += 1
                self._end_word()
            case "\\":
                self._backslash()
            case "'":
                self._single()
            case '"':
                self._double()
            case "\n" | ";" | "&" | "|":
                self._operator(char)
            case "<" | ">":
                self._redirection()
            case "(" | ")":
                self.opaque = True
                self._at += 1
                self._end_word()
                self._end_command("\n")
            case "$":
                self._dollar()
            case "`":
                raise _Rest
            case "#" if self._word is None:
                self.opaque = True  # not in every shell a comment
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            case _:
                self._at += 1
                self._plain(char)

    def _plain(self, char: str) -> None:
        word = self._current()
        if char in "{}":
            self.opaque = True
            # A brace alone is a reserved word; in a word it may make several.
            word.wild = word.wild or bool(word.raw) or self._goes_on()
        elif char in "*?" or (char == "[" and (word.raw or word.quoted or self._goes_on())):
            word.wild = True
        elif (char == "~" and (not word.raw or word.raw[-1] in "=:")) or (char == "=" and not word.raw and not word.quoted):
            word.wild = True  # a home; in zsh the path of a program
        elif not char.isascii() and unicodedata.category(char) in ("Zs", "Zl", "Zp", "Cf", "Cs", "Co", "Cn"):
            self.opaque = True
        word.add(char)

    def _goes_on(self) -> bool:
        """Whether the word does not end here."""
        return self._at < len(self._text) and self._text[self._at] not in " \t\n;&|<>()"

    def _backslash(self) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if not following:
            raise _Rest
        self._at += 2
        if following != "\n":
            self._current().add_quoted(following)

    def _single(self) -> None:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise _Rest
        self._current().add_quoted(self._text[self._at + 1 : end])
        self._at = end + 1

    def _double(self) -> None:
        word = self._current()
        word.add_quoted("")
        self._at += 1
        while True:
            char = self._text[self._at : self._at + 1]
            if char == '"':
                self._at += 1
                return
            if char in ("", "`"):
                raise _Rest
            if char == "$":
                self._dollar()
                continue
            if char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                if following and following in '$`"\\\n':
                    self._at += 2
                    word.add("" if following == "\n" else following)
                    continue
            self._at += 1
            word.add(char)

    def _dollar(self) -> None:
        found = _VARIABLE.match(self._text, self._at)
        if found is None:
            raise _Rest
        self.opaque = True
        self._current().wild = True
        self._at = found.end()

    def _operator(self, char: str) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if char == "&" and following == ">":
            self.opaque = True  # one redirection to some shells, an end and a redirection to others
            self._at += 1
            self._end_word()
            self._redirection()
            return
        both = char + following
        self._end_word()
        if both in ("&&", "||"):
            self._at += 2
            self._end_command(both)
            return
        if both in (";;", ";&", "|&") or (both == "&;"):
            self.opaque = True
            self._at += 2
        else:
            self._at += 1
        self._end_command(char)

    def _redirection(self) -> None:
        word = self._word
        if word is not None and not word.quoted and not word.wild and word.raw.isascii() and word.raw.isdecimal():
            self._word = None
        else:
            self._end_word()
        if self._target:
            self.opaque = True
        if self._text.startswith(("<<", "<(", ">("), self._at):
            raise _Rest
        harmless = _HARMLESS.match(self._text, self._at)
        if harmless is not None:
            self._at = harmless.end()
            return
        self.opaque = True
        found = _REDIRECTION.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        self._target = True

    def _end_word(self) -> None:
        if self._word is None:
            return
        if self._target:
            self._target = False
        else:
            self._words.append(self._word)
        self._word = None

    def _end_command(self, operator: str) -> None:
        if self._words:
            self.commands.append(self._words)
            self._words = []
            self._due = False
        elif operator not in ("", "\n"):
            self.opaque = True
        if operator in ("&&", "||", "|"):
            self._due = True
