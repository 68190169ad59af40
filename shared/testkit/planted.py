"""Plants a text in every place a program has for one, and says which of them :mod:`testkit.object_graph` finds, and how.

``python planted.py`` prints a JSON object: ``places``, ``found`` (place to way) while everything is planted, ``left`` (the same
after all of it was taken away), ``gated`` (what strays when each owner has its own text only), ``across`` (whose text strays
after one owner's object was given to another).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import functools
import io
import json
import logging
import os
import secrets
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).parents[1]))
from testkit.object_graph import Needles, Registry, Sides

MODULE: Any = None
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("planted")
THREADS: Any = threading.local()


class Plugin:
    """Stands for whatever lives as long as the process."""

    held: Any = None


class Slotted:
    """Has no dictionary."""

    __slots__ = ("held",)
    held: Any


class Weak:
    """Can be referred to weakly."""

    def __init__(self, held: Any) -> None:
        self.held = held


PLUGIN = Plugin()
SLOTTED = Slotted()
KEPT: list[Any] = []
WEAK: weakref.WeakSet[Weak] = weakref.WeakSet()
ALIVE: dict[str, Any] = {}

Undo = Callable[[], Any]
PLACES: dict[str, Callable[[str], Undo]] = {}


def place(plant: Callable[[str], Undo]) -> Callable[[str], Undo]:
    """One of the places; the function plants a text and returns what takes it away."""
    PLACES[plant.__name__] = plant
    return plant


def keep(value: Any) -> Undo:
    """Hold a value as a module's list does."""
    KEPT.append(value)
    return KEPT.clear


@place
def module_global(text: str) -> Undo:
    def put(value: Any) -> None:
        global MODULE
        MODULE = value

    put(text)
    return functools.partial(put, None)


@place
def class_attribute(text: str) -> Undo:
    Plugin.held = text
    return functools.partial(setattr, Plugin, "held", None)


@place
def instance_attribute(text: str) -> Undo:
    PLUGIN.held = {"nested": [("deep", text)]}
    return functools.partial(delattr, PLUGIN, "held")


@place
def slot(text: str) -> Undo:
    SLOTTED.held = text
    return functools.partial(delattr, SLOTTED, "held")


@place
def raw_bytes(text: str) -> Undo:
    return keep(text.encode())


@place
def bytes_array(text: str) -> Undo:
    return keep(bytearray(text.encode()))


@place
def memory_view(text: str) -> Undo:
    return keep(memoryview(text.encode()))


@place
def buffer_of_a_file(text: str) -> Undo:
    return keep(io.BytesIO(text.encode()))


@place
def base64_in_text(text: str) -> Undo:
    return keep("x" + base64.b64encode(f"a{text}".encode()).decode())


@place
def secret_str(text: str) -> Undo:
    return keep(SecretStr(text))


@place
def key_of_a_dict(text: str) -> Undo:
    return keep({text: 1})


@place
def closure_cell(text: str) -> Undo:
    def inner() -> str:
        return text

    return keep(inner)


@place
def default_argument(text: str) -> Undo:
    def inner(value: str = text) -> str:
        return value

    return keep(inner)


@place
def keyword_default(text: str) -> Undo:
    def inner(*, value: str = text) -> str:
        return value

    return keep(inner)


@place
def annotation(text: str) -> Undo:
    def inner() -> None: ...

    inner.__annotations__["value"] = text
    return keep(inner)


@place
def bound_method(text: str) -> Undo:
    return keep(Weak(text).__init__)  # type: ignore[misc]


@place
def partial(text: str) -> Undo:
    return keep(functools.partial(print, text))


@place
def mapping_proxy(text: str) -> Undo:
    return keep(types.MappingProxyType({"held": text}))


@place
def iterator(text: str) -> Undo:
    return keep(iter([text]))


@place
def suspended_generator(text: str) -> Undo:
    def inner(value: str) -> Iterator[int]:
        yield 1
        print(value)

    made = inner(text)
    next(made)
    return keep(made)


@place
def suspended_coroutine(text: str) -> Undo:
    async def inner() -> None:
        held = "".join(text)
        await asyncio.sleep(600)
        print(held)

    return running(inner())


@place
def suspended_async_generator(text: str) -> Undo:
    async def inner(value: str) -> Any:
        yield 1
        print(value)

    async def outer() -> None:
        async with contextlib.aclosing(inner(text)) as made:
            await anext(made)
            await asyncio.sleep(600)

    return running(outer())


def running(coroutine: Any, context: contextvars.Context | None = None) -> Undo:
    """A task of the loop that nobody else holds; cancelled when it is taken away."""
    task = asyncio.get_running_loop().create_task(coroutine, context=context)
    reference = weakref.ref(task)

    def undo() -> None:
        alive = reference()
        if alive is not None:
            alive.cancel()

    return undo


@place
def context_of_a_task(text: str) -> Undo:
    async def inner() -> None:
        await asyncio.sleep(600)

    context = contextvars.Context()
    context.run(VARIABLE.set, text)
    return running(inner(), context)


@place
def context_of_a_timer(text: str) -> Undo:
    context = contextvars.Context()
    context.run(VARIABLE.set, text)
    timer = asyncio.get_running_loop().call_later(700, print, context=context)
    timer.cancel()  # which forgets what was to be called, not its context
    return lambda: asyncio.get_running_loop()._scheduled.clear()  # type: ignore[attr-defined]


@place
def argument_of_a_handle(text: str) -> Undo:
    timer = asyncio.get_running_loop().call_later(600, print, text)
    return timer.cancel


@place
def reader_of_the_loop(text: str) -> Undo:
    ours, theirs = os.pipe()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, print, text)

    def undo() -> None:
        loop.remove_reader(ours)
        os.close(ours)
        os.close(theirs)

    return undo


@place
def result_of_a_future(text: str) -> Undo:
    future = asyncio.get_running_loop().create_future()
    future.set_result(text)
    return keep(future)


@place
def exception_of_a_future(text: str) -> Undo:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError(text))
    future.exception()
    return keep(future)


@place
def traceback_of_an_exception(text: str) -> Undo:
    def inner(value: str) -> None:
        raise ValueError(len(value))

    try:
        inner("".join(text))
    except ValueError as exc:
        kept = exc
    return keep(kept)


@place
def context_of_an_exception(text: str) -> Undo:
    try:
        try:
            raise KeyError(text)
        except KeyError:
            raise ValueError from None
    except ValueError as exc:
        kept = exc
    kept.__traceback__ = None
    assert kept.__context__ is not None
    kept.__context__.__traceback__ = None
    return keep(kept)


@place
def done_callback(text: str) -> Undo:
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(functools.partial(print, text))
    return keep(future)


@functools.lru_cache
def cached(value: str) -> int:
    return len(value)


@place
def lru_cache(text: str) -> Undo:
    cached(text)
    return cached.cache_clear


@place
def cached_pattern(text: str) -> Undo:
    import re

    re.compile(text)
    return re.purge


@place
def record_of_a_log(text: str) -> Undo:
    record = logging.getLogger("planted").makeRecord("planted", 20, "", 0, "said %s", (text,), None)
    return keep(record)


@place
def handler_of_a_log(text: str) -> Undo:
    handler = logging.Handler()
    handler.addFilter(lambda record: record.getMessage() != text)
    logging.getLogger("planted").addHandler(handler)
    return functools.partial(logging.getLogger("planted").removeHandler, handler)


@place
def name_of_a_logger(text: str) -> Undo:
    logging.getLogger(text)
    return functools.partial(logging.root.manager.loggerDict.pop, text)


@place
def environment(text: str) -> Undo:
    os.environ["PLANTED"] = text
    return functools.partial(os.environ.pop, "PLANTED")


@place
def handler_of_a_signal(text: str) -> Undo:
    signal.signal(signal.SIGUSR1, lambda *_: print(text))
    return functools.partial(signal.signal, signal.SIGUSR1, signal.SIG_DFL)


@place
def frame_of_another_thread(text: str) -> Undo:
    end = threading.Event()

    def inner(value: str) -> None:
        end.wait()
        print(value, file=io.StringIO())

    thread = threading.Thread(target=inner, args=("".join(text),))
    thread.start()

    def undo() -> None:
        end.set()
        thread.join()

    return undo


@place
def local_of_a_thread(text: str) -> Undo:
    THREADS.held = text
    return functools.partial(delattr, THREADS, "held")


@place
def member_of_a_weak_set(text: str) -> Undo:
    member = Weak(text)
    ALIVE["weak"] = member
    WEAK.add(member)
    return ALIVE.clear


@place
def finalizer(text: str) -> Undo:
    owner = Weak(None)
    ALIVE["finalized"] = owner
    return weakref.finalize(owner, len, text).detach


@place
def filter_of_warnings(text: str) -> Undo:
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=text)

    def undo() -> None:
        import re

        warnings.filters[:] = before  # type: ignore[index]
        re.purge()

    return undo


@place
def only_a_c_object(text: str) -> Undo:
    """Held by what nobody can ask: found because whatever is alive is looked at."""
    import atexit

    def inner() -> str:
        return text

    atexit.register(inner)
    return functools.partial(atexit.unregister, inner)


async def main() -> dict[str, Any]:
    """Plant, look, take away, look again."""
    marks = {name: f"mark-{secrets.token_hex(12)}-{name}" for name in PLACES}
    written = json.dumps(marks)
    undo = [plant("".join(marks[name])) for name, plant in PLACES.items()]
    marks.clear()
    await asyncio.sleep(0)
    found = look(written)
    while undo:
        undo.pop()()
    KEPT.clear()
    for _ in range(3):
        await asyncio.sleep(0)  # cancelled tasks end
    left = look(written)
    gated, across = owners(written)
    return {"places": list(PLACES), "found": found, "left": left, "gated": gated, "across": across}


def look(written: str) -> dict[str, list[str]]:
    """A look at everything."""
    needles = Needles(json.loads(written))
    return Sides((), own=[needles, written]).anywhere(needles)


def owners(written: str) -> tuple[list[list[str]], list[str]]:
    """What strays when each of two owners has its own, and when one has the other's."""
    one, other = list(json.loads(written).values())[:2]
    entries: dict[str, Any] = {"A": {"text": "".join(one)}, "B": {"text": "".join(other)}}
    needles = {"A": Needles({"A": one}), "B": Needles({"B": other})}
    registry = Registry(entries, lambda key, _value: str(key))
    own = [*needles.values(), one, other, written]

    def astray() -> dict[str, list[str]]:
        return Sides("AB", [registry], own=own).astray(needles)

    PLUGIN.held = entries
    quiet = astray()
    entries["B"]["borrowed"] = entries["A"]
    across = sorted(astray())
    return list(quiet.values()), across


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
