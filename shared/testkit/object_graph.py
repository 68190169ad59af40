"""What can be reached in a living Python process, and by which way: finds a tenant's text wherever an object holds it.

:func:`children` is every object that another one leads to: what the garbage collector knows (which includes the frames of
suspended coroutines and generators, closures and their cells, contexts, and the insides of tasks and futures), and what it does
not know: the frames of running functions and of tracebacks, what a weak reference points to, the keys of a dictionary, a
thread's own values, the bytes in a buffer.

:class:`Needles` are the texts looked for, in every shape a text has in a program: plain, JSON, hex, URL-quoted, base64 at each
of its three alignments, as ``str`` or in bytes.

Only CPython can be asked like this. What cannot be seen: memory of C libraries, values of other threads' ``threading.local``.
This file runs inside the process that is looked at, so it imports the standard library only and leaves nothing behind in it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import inspect
import io
import itertools
import json
import signal
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

_ATOMS: Final = (int, float, complex, bool, type(None), type(Ellipsis), types.CodeType)
_TEXTS: Final = (str, bytes, bytearray)
_GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def forms_of(text: str) -> set[bytes]:
    """The shapes in which a text could be somewhere: plain, JSON, hex, URL-quoted, base64 at each of its alignments."""
    raw = text.encode()
    forms = {raw, json.dumps(text)[1:-1].encode(), raw.hex().encode(), raw.hex().upper().encode()}
    forms |= {urllib.parse.quote(text, safe="").encode(), urllib.parse.quote_plus(text).encode()}
    for shift in range(3):
        padded = base64.b64encode(b"\0" * shift + raw)
        inner = padded[4 if shift else 0 :].rstrip(b"=")[:-1]
        forms |= {inner, inner.translate(bytes.maketrans(b"+/", b"-_"))}
    return forms


class Needles:
    """Texts to look for, each with a name."""

    def __init__(self, texts: Mapping[str, str], raw: Mapping[str, str] | None = None) -> None:
        """``texts``: name to text, long enough to stand nowhere by chance; ``raw``: name to exact bytes, in hex."""
        self._bytes = [(name, form) for name, text in texts.items() for form in forms_of(text)]
        self._bytes += [(name, bytes.fromhex(value)) for name, value in (raw or {}).items()]
        self._bytes += [(name, value.encode()) for name, value in (raw or {}).items()]
        self._texts = [(name, form.decode()) for name, form in self._bytes if form.isascii()]
        self._shortest = min((len(form) for _, form in self._bytes), default=1)

    def inside(self, value: Any) -> set[str]:
        """The names of those that ``value`` (text or bytes) holds."""
        if len(value) < self._shortest:
            return set()
        if isinstance(value, str):
            return {name for name, form in self._texts if form in value}
        return {name for name, form in self._bytes if form in value}


def children(value: Any) -> Iterator[Any]:
    """Every object that ``value`` leads to; some are made for the purpose and hold what it holds."""
    if isinstance(value, types.FrameType):
        # Asking for the locals leaves a copy of them in the frame, where it would outlive what it was copied from.
        known = value.f_locals
        yield dict(known)
        if value.f_code.co_flags & inspect.CO_OPTIMIZED:
            known.clear()
        yield value.f_back
        yield value.f_globals
    elif isinstance(value, dict):
        yield from list(dict.keys(value))  # text keys are none of the collector's business
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, weakref.ProxyTypes):
        with contextlib.suppress(ReferenceError, AttributeError):
            yield value.__repr__.__self__
    elif isinstance(value, threading.local):
        yield vars(value)
    elif isinstance(value, (io.BytesIO, io.StringIO)):
        with contextlib.suppress(ValueError):
            yield value.getvalue()
    elif isinstance(value, memoryview):
        with contextlib.suppress(ValueError):
            yield bytes(value)
    elif isinstance(value, type):
        yield type.__subclasses__(value)
    elif isinstance(value, BaseException):
        yield value.__traceback__
        yield value.__context__
        yield value.__cause__
    elif isinstance(value, _GENERATORS):
        yield getattr(value, "gi_yieldfrom", None) or getattr(value, "cr_await", None) or getattr(value, "ag_await", None)
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

    def __init__(self, children_of: Callable[[Any], Iterable[Any]] = children) -> None:
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
            if not isinstance(start, _ATOMS) and id(start) not in self._objects and enter(start):
                self._objects[id(start)] = start
                waiting.append(start)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _TEXTS):
                continue
            for child in self._children(value):
                number = id(child)
                if isinstance(child, _ATOMS) or number in self._objects or not enter(child):
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
            return () if id(value) in self._books else children(value)
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
                found[name] = reached.way(value)
    return found
