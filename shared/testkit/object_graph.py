"""What can be reached in a living Python process, and by which way: finds a tenant's text wherever an object holds it.

:func:`children` is every object that another one leads to: what the garbage collector knows (which includes the frames of
suspended coroutines and generators, closures and their cells, contexts, and the insides of tasks and futures), and what it
does not know: the frames of running functions and of tracebacks, what a weak reference points to, the keys of a dictionary, the
names of an instance's attributes, of types and in code, a thread's own values, the bytes in buffers, arrays and mappings, what
a file or a memory BIO has not passed on yet, and the texts that members of extensions' objects tell.

:class:`Needles` are the texts looked for, in every shape a text has in a program: plain, JSON, hex, URL-quoted, base64 at each
of its three alignments, UTF-16 and UTF-32, in any mix of upper and lower case, as ``str`` or in bytes.

Only CPython can be asked like this. What cannot be seen: memory of C libraries (a cipher's, a compressor's window, a hash) and
freed memory; values of other threads' ``threading.local``; what waits in a memory BIO behind whose end nothing can be put back;
the name of an attribute that no instance has any more. What cannot be known: a text in pieces, split over several strings, in
single characters or numbers, or in a number.
This file runs inside the process that is looked at, so it imports the standard library only and leaves nothing behind in it.
"""

from __future__ import annotations

import _ssl
import asyncio
import base64
import contextlib
import contextvars
import ctypes
import gc
import inspect
import io
import itertools
import json
import re
import signal
import ssl
import struct
import sys
import threading
import types
import urllib.parse
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LONGEST_WAY: Final = 40
"""Steps of a way that are shown, from its end."""

_ATOMS: Final = frozenset((int, float, complex, bool, type(None), type(Ellipsis)))
_TEXTS: Final = (str, bytes, bytearray)
_GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_WIDE: Final = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")


def forms_of(text: str) -> set[bytes]:
    """The shapes in which a text could be somewhere, all in lower case."""
    raw = text.encode()
    forms = {raw, json.dumps(text)[1:-1].encode(), raw.hex().encode(), *(text.encode(wide) for wide in _WIDE)}
    forms |= {urllib.parse.quote(text, safe="").encode(), urllib.parse.quote_plus(text).encode()}
    for shift in range(3):
        padded = base64.b64encode(b"\0" * shift + raw)
        inner = padded[4 if shift else 0 :].rstrip(b"=")[:-1]
        forms |= {inner, inner.translate(bytes.maketrans(b"+/", b"-_"))}
    return {form.lower() for form in forms}


class Needles:
    """Texts to look for, each with a name."""

    def __init__(self, texts: Mapping[str, str], raw: Mapping[str, str] | None = None) -> None:
        """``texts``: name to text, long enough to stand nowhere by chance; ``raw``: name to exact bytes, in hex."""
        self._bytes = [(name, form) for name, text in texts.items() for form in forms_of(text)]
        self._bytes += [(name, bytes.fromhex(value).lower()) for name, value in (raw or {}).items()]
        self._bytes += [(name, value.lower().encode()) for name, value in (raw or {}).items()]
        self._texts = [(name, form.decode()) for name, form in self._bytes if form.isascii()]
        self._texts += [(name, text.lower()) for name, text in texts.items() if not text.isascii()]
        self._shortest = min((len(form) for _, form in (*self._bytes, *self._texts)), default=1)

    def inside(self, value: Any) -> set[str]:
        """The names of those that ``value`` (text or bytes) holds, in whatever case."""
        if len(value) < self._shortest:
            return set()
        if isinstance(value, str):
            lower = str.lower(value)
            return {name for name, form in self._texts if form in lower}
        small = bytes(value).lower()
        return {name for name, form in self._bytes if form in small}


# ------------------------------------------------------------------ what an object leads to

Ask = Callable[[Any], Iterable[Any]]


def _of_frame(frame: types.FrameType) -> Iterator[Any]:
    # Asking for the locals leaves a copy of them in the frame, where it would outlive what it was copied from.
    known = frame.f_locals
    yield dict(known)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        known.clear()
    yield frame.f_back
    yield frame.f_globals


def _of_file(file: Any) -> list[bytes]:
    """What a buffered file read ahead, or has not written yet.

    It may neither read nor write for that, so its raw file is stood in for by one that answers ``None``: "would block".
    """
    writes = isinstance(file, (io.BufferedWriter, io.BufferedRandom))
    asked: list[Any] = []
    name, raw = "write" if writes else "readinto", file.raw
    setattr(raw, name, asked.append)
    try:
        if not writes:
            return [file.peek()]
        with contextlib.suppress(BlockingIOError):
            file.flush()
        return [bytes(waiting) for waiting in asked]
    finally:
        delattr(raw, name)


def _of_bio(bio: ssl.MemoryBIO) -> list[bytes]:
    bio.write(b"")  # raises after an end, where nothing could be put back
    waiting = bio.read()
    bio.write(waiting)
    return [waiting]


def _place_in_a_scanner() -> int:
    """Where a scanner (``finditer``) has the string it searches, which no member tells: where one has a string we know."""
    known = "".join(("known", " string"))
    scanner = re.compile("").scanner(known)  # type: ignore[attr-defined]
    size = type(scanner).__basicsize__ // ctypes.sizeof(ctypes.c_size_t)
    words = (ctypes.c_size_t * size).from_address(id(scanner))
    return list(words).index(id(known)) * ctypes.sizeof(ctypes.c_size_t)


_STRING: Final = _place_in_a_scanner()


def _of_scanner(scanner: Any) -> list[Any]:
    return [ctypes.py_object.from_address(id(scanner) + _STRING).value]


def _of_generator(made: Any) -> Iterator[Any]:
    yield getattr(made, "gi_yieldfrom", None) or getattr(made, "cr_await", None) or getattr(made, "ag_await", None)


_ASKED: Final[Sequence[tuple[Any, Ask]]] = (
    (types.FrameType, _of_frame),
    (dict, lambda value: list(dict.keys(value))),  # text keys are none of the collector's business
    (weakref.ref, lambda value: (weakref.ref.__call__(value),)),
    (weakref.ProxyTypes, lambda value: (value.__repr__.__self__,)),
    (threading.local, lambda value: (vars(value),)),
    (io.BytesIO, lambda value: (io.BytesIO.getvalue(value),)),
    (io.StringIO, lambda value: (io.StringIO.getvalue(value),)),
    ((io.BufferedReader, io.BufferedWriter, io.BufferedRandom), _of_file),
    (io.IncrementalNewlineDecoder, lambda value: (value.getstate(),)),
    (type, lambda value: (type.__subclasses__(value),)),
    (BaseException, lambda value: (value.__traceback__, value.__context__, value.__cause__)),
    (_GENERATORS, _of_generator),
    (ssl.MemoryBIO, _of_bio),
    (type(re.compile("").scanner("")), _of_scanner),  # type: ignore[attr-defined]
)
"""What there is to ask the objects of a type for."""

_MEMBERS: Final[Mapping[type, Sequence[str]]] = {
    types.CodeType: (
        *("co_consts", "co_names", "co_varnames", "co_cellvars", "co_freevars"),
        *("co_filename", "co_name", "co_qualname"),
    ),
    type: ("__name__", "__qualname__"),
    contextvars.ContextVar: ("name",),
    struct.Struct: ("format",),
    _ssl._SSLSocket: ("server_hostname",),  # type: ignore[attr-defined]
}
"""Members that the collector is not told of."""

_TOLD: Final = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NO_TEXTS: Final = ("__class__", "__dict__", "__weakref__")
_VISITED: Final = 1 << 14
_INLINE: Final = 1 << 4
"""Bits of ``__flags__``: the collector visits such objects; their attributes are not in a dictionary until one asks for it."""


def _asks(kind: type, value: Any) -> Iterator[Ask]:
    """What the objects of ``kind``, of which ``value`` is one, are asked for."""
    yield from (ask for each, ask in _ASKED if issubclass(kind, each))
    yield from (_members([vars(each)[name] for name in names]) for each, names in _MEMBERS.items() if issubclass(kind, each))
    if kind.__flags__ & _INLINE:
        own = [vars(each)["__dict__"] for each in kind.__mro__ if "__dict__" in vars(each)]
        yield _members([each for each in own if isinstance(each, types.GetSetDescriptorType)])
    for base in kind.__mro__ if kind not in _MEMBERS else ():
        if not (base.__flags__ & _VISITED and _top(base) in sys.stdlib_module_names):
            told = [each for name, each in vars(base).items() if isinstance(each, _TOLD) and name not in _NO_TEXTS]
            yield from (_text_of(each) for each in told)
    try:
        memoryview(value).release()
    except TypeError:
        return
    except (ValueError, BufferError):  # closed or in use, which the next one may not be
        pass
    yield lambda value: (memoryview(value).tobytes(),)


def _top(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _members(descriptors: Sequence[Any]) -> Ask:
    return lambda value: [each.__get__(value) for each in descriptors]


def _text_of(descriptor: Any) -> Ask:
    """Texts only: what is made anew at each asking has members like its own, without an end."""
    return lambda value: (text,) if isinstance(text := descriptor.__get__(value), _TEXTS) else ()


def children(value: Any, asks: dict[type, tuple[Ask, ...]]) -> Iterator[Any]:
    """Every object that ``value`` leads to; some are made for the purpose and hold what it holds.

    ``asks`` is what is known of types so far.
    """
    kind = type(value)
    if kind not in asks:
        asks[kind] = tuple(_asks(kind, value))
    for ask in asks[kind]:
        try:
            yield from ask(value)
        except Exception:  # noqa: BLE001, S112 - closed, detached, gone: there is nothing, or nothing that it tells
            continue
    yield from gc.get_referents(value)


def roots() -> list[Any]:
    """Where every way begins: modules, every thread and its frames, signal handlers, the running loop and its tasks."""
    found: list[Any] = [*sys.modules.values(), *sys._current_frames().values(), *threading.enumerate()]
    found += [signal.getsignal(number) for number in signal.valid_signals()]
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        found += [loop, *asyncio.all_tasks(loop)]
    return found


class Reached:
    """The objects that were reached from somewhere, each with the one before it."""

    def __init__(self, children_of: Ask) -> None:
        """Nothing was reached."""
        self._children = children_of
        self._objects: dict[int, Any] = {}
        self._before: dict[int, int] = {}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._objects

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def go(self, starts: Iterable[Any], enter: Callable[[Any], bool]) -> None:
        """Go on from ``starts`` to everything that ``enter`` lets in; what was reached before is not looked at again."""
        waiting: deque[Any] = deque()
        for start in starts:
            if type(start) not in _ATOMS and id(start) not in self._objects and enter(start):
                self._objects[id(start)] = start
                waiting.append(start)
        while waiting:
            value = waiting.popleft()
            if type(value) in _TEXTS:
                continue
            for child in self._children(value):
                number = id(child)
                if number in self._objects or type(child) in _ATOMS or not enter(child):
                    continue
                self._objects[number] = child
                self._before[number] = id(value)
                waiting.append(child)

    def holding(self, needles: Needles) -> list[tuple[Any, set[str]]]:
        """Every text among the objects in which a needle is, with the needles' names."""
        texts = [value for value in self._objects.values() if isinstance(value, _TEXTS)]
        return [(value, names) for value in texts if (names := needles.inside(value))]

    def way(self, value: Any) -> list[str]:
        """How ``value`` was reached, from the start on, without what any text says."""
        steps: list[Any] = [value]
        while (before := self._before.get(id(steps[-1]))) is not None and len(steps) < LONGEST_WAY:
            steps.append(self._objects[before])
        steps.reverse()
        told = [_called(steps[0])]
        for parent, child in itertools.pairwise(steps):
            told.append(_link(parent, child) + _called(child))
        return told


def _called(value: Any) -> str:
    kind = type(value).__qualname__
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (types.FunctionType, type, *_GENERATORS)):
        return f"{kind} {value.__qualname__}"
    if isinstance(value, types.FrameType):
        return f"frame of {value.f_code.co_qualname}:{value.f_lineno}"
    if isinstance(value, asyncio.Task):
        return f"Task of {getattr(value.get_coro(), '__qualname__', '?')}"
    if isinstance(value, types.MethodType):
        return f"method {value.__func__.__qualname__}"
    return kind


def _link(parent: Any, child: Any) -> str:
    """The name under which ``parent`` holds ``child``, where it has one."""
    named: Any = parent
    if not isinstance(parent, dict):
        try:
            named = object.__getattribute__(parent, "__dict__")
        except AttributeError:
            return ""
    for key, value in dict(named).items():
        if value is child and isinstance(key, str) and key.isidentifier():
            return f".{key} "
    return ""


# ------------------------------------------------------------------ whose it is


@dataclass(frozen=True)
class Registry:
    """A dictionary whose entries belong to owners."""

    entries: dict[Any, Any]
    owner: Callable[[Any, Any], str | None]
    """Whose an entry is, given its key and its value; ``None``: everybody's."""


class Sides:
    """A process divided into what belongs to each of several owners and what is everybody's.

    An owner has *gates*: entries of registries, and objects (its tasks, say) by which it is reached from elsewhere, too.
    Everybody's is what can be reached from the :func:`roots` without passing a gate, and what else is alive and no gate leads
    to; an owner's is what can be reached from its gates and is not everybody's. Together that is every object of the process.
    """

    def __init__(
        self,
        owners: Iterable[str],
        registries: Sequence[Registry] = (),
        gates: Sequence[tuple[str, Any]] = (),
        *,
        own: Iterable[Any] = (),
        files: Iterable[str] = (),
    ) -> None:
        """``gates`` are pairs of owner and object; ``own`` and frames of code in ``files`` are the looker's, and left out."""
        gc.collect()
        everything = gc.get_objects()
        self._files = {__file__, *files}
        self._asks: dict[type, tuple[Ask, ...]] = {}
        self._books = _books()
        self._registries = {id(each.entries): each for each in registries}
        self.gates: dict[str, dict[int, Any]] = {owner: {} for owner in owners}
        for owner, gate in gates:
            if owner in self.gates:
                self.gates[owner][id(gate)] = gate
        passing = {number for listed in self.gates.values() for number in listed}
        self._skipped = {id(part) for each in own for part in _parts(each)}
        self._skipped |= {*map(id, (registries, gates, *registries, *gates))}
        self._skipped |= {id(self), id(vars(self)), *map(id, vars(self).values())}
        self._skipped |= {*map(id, self.gates.values()), *map(id, self._registries.values())}
        self.shared = Reached(self._children)
        self.shared.go(roots(), lambda value: id(value) not in passing and self._looked_at(value))
        self.of: dict[str, Reached] = {}
        for owner, listed in self.gates.items():
            entries = [each.entries[key] for each in self._registries.values() for key in self._keys(each, owner)]
            self.of[owner] = Reached(self._children)
            self.of[owner].go([*listed.values(), *entries], lambda value: value not in self.shared and self._looked_at(value))
        # What only C code holds is as good as a global.
        self.shared.go(self._rest(everything), lambda value: id(value) not in passing and self._looked_at(value))

    def _rest(self, everything: list[Any]) -> list[Any]:
        """What no way has led to, in an order in which a way begins at its beginning."""
        reached = (self.shared, *self.of.values())
        rest = [value for value in everything if not any(value in each for each in reached)]
        rest = [value for value in rest if not isinstance(value, weakref.ref)]  # which holds nothing by itself
        inner = {id(child) for value in rest for child in gc.get_referents(value)}
        return sorted(rest, key=lambda value: id(value) in inner)

    def _keys(self, registry: Registry, owner: str) -> list[Any]:
        return [key for key, value in registry.entries.items() if registry.owner(key, value) == owner]

    def _children(self, value: Any) -> Iterable[Any]:
        registry = self._registries.get(id(value))
        if registry is None:
            return () if id(value) in self._books else children(value, self._asks)
        everybodys = [item for item in registry.entries.items() if registry.owner(*item) not in self.gates]
        return [part for item in everybodys for part in item]

    def _looked_at(self, value: Any) -> bool:
        if isinstance(value, types.FrameType):
            return value.f_code.co_filename not in self._files
        return id(value) not in self._skipped

    def anywhere(self, *needles: Needles) -> dict[str, list[str]]:
        """Every needle that is in the process at all, with a way to it."""
        found: dict[str, list[str]] = {}
        for each in needles:
            found |= _ways([self.shared, *self.of.values()], each)
        return found

    def astray(self, needles: Mapping[str, Needles]) -> dict[str, list[str]]:
        """Every owner's needle that is everybody's or another owner's, every gate that another owner has; with a way to it."""
        found: dict[str, list[str]] = {}
        for owner, own in needles.items():
            others = [reached for name, reached in self.of.items() if name != owner]
            found |= _ways([self.shared, *others], own)
            for reached in others:
                for gate in self.gates[owner].values():
                    if gate in reached:
                        found[f"{owner}: {_called(gate)}"] = reached.way(gate)
        return found


def _books() -> frozenset[int]:
    """The loop's weak list of asynchronous generators: it has everybody's, and each belongs to what holds it."""
    try:
        return frozenset((id(vars(asyncio.get_running_loop())["_asyncgens"].data),))
    except (RuntimeError, KeyError, TypeError):
        return frozenset()


def _parts(value: Any) -> Iterator[Any]:
    """``value`` and what it is made of, for the plain values of a looker."""
    yield value
    if isinstance(value, Needles):
        yield from _parts(vars(value))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _parts(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _parts(each)


def _ways(places: Iterable[Reached], needles: Needles) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for reached in places:
        for value, names in reached.holding(needles):
            for name in names - found.keys():
                found[name] = ["***" if needles.inside(step) else step for step in reached.way(value)]
    return found
