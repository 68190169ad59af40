"""Plants a text in every place a program has for one, and says which of them :mod:`testkit.object_graph` finds, and how.

``python planted.py`` prints a JSON object: ``places``, ``found`` (place to way) while everything is planted, ``left`` (the same
after all of it was taken away), ``gated`` (what strays when each owner has its own text only), ``across`` (whose text strays
after one owner's object was given to another).
"""

from __future__ import annotations

import array
import asyncio
import base64
import codecs
import contextlib
import contextvars
import ctypes
import functools
import io
import json
import logging
import mmap
import os
import re
import secrets
import signal
import ssl
import sys
import tempfile
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import AnyUrl, SecretStr

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
def utf_16(text: str) -> Undo:
    return keep(text.encode("utf-16-le"))


@place
def utf_32_in_an_array(text: str) -> Undo:
    return keep(array.array("I", map(ord, text)))


@place
def other_case(text: str) -> Undo:
    return keep([text.swapcase()])


@place
def array_of_bytes(text: str) -> Undo:
    return keep(array.array("b", text.encode()))


@place
def mapped_memory(text: str) -> Undo:
    mapped = mmap.mmap(-1, len(text))
    mapped.write(text.encode())
    return keep(mapped)


@place
def buffer_of_ctypes(text: str) -> Undo:
    return keep(ctypes.create_string_buffer(text.encode()))


def after(undo: Undo, *more: Undo) -> Undo:
    """One thing taken away after another."""

    def done() -> None:
        for each in (undo, *more):
            each()

    return done


@place
def read_ahead(text: str) -> Undo:
    ours, theirs = os.pipe()
    os.write(theirs, f"x{text}".encode())
    file = os.fdopen(ours, "rb")
    assert file.read(1) == b"x"

    def undo() -> None:
        assert file.read(len(text)) == text.encode(), "a look takes nothing out of a file"
        os.close(theirs)
        file.close()

    return after(undo, keep(file))


@place
def written_and_not_flushed(text: str) -> Undo:
    ours, theirs = os.pipe()
    file = os.fdopen(theirs, "wb")
    file.write(text.encode())

    def undo() -> None:
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            raise AssertionError("a look writes nothing", os.read(ours, 1))
        file.close()
        assert os.read(ours, len(text) + 1) == text.encode(), "a look takes nothing out of a file"
        os.close(ours)

    return after(undo, keep(file))


@place
def decoder_of_a_file(text: str) -> Undo:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("idna")(), translate=True)
    assert decoder.decode(text.encode()) == ""
    return keep(decoder)


@place
def behind_the_end_of_compressed_data(text: str) -> Undo:
    decompressor = zlib.decompressobj()
    decompressor.decompress(zlib.compress(b"x") + text.encode())
    return keep(decompressor)


@place
def more_than_was_to_be_decompressed(text: str) -> Undo:
    compressed = zlib.compress(f"before {text}".encode(), 0)
    decompressor = zlib.decompressobj()
    decompressor.decompress(compressed, 1)
    return keep(decompressor)


@place
def bio_of_tls(text: str) -> Undo:
    bio = ssl.MemoryBIO()
    bio.write(text.encode())

    def undo() -> None:
        assert bio.read() == text.encode(), "a look takes nothing out of a BIO"

    return after(undo, keep(bio))


@place
def name_of_a_tls_server(text: str) -> Undo:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return keep(context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=text)._sslobj)  # type: ignore[attr-defined]


@place
def object_that_tells_the_collector_nothing(text: str) -> Undo:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, text).touch()
        with os.scandir(directory) as entries:
            return keep(next(entries))


@place
def object_of_an_extension(text: str) -> Undo:
    return keep(AnyUrl(f"http://host/{text}"))


@place
def name_of_an_attribute(text: str) -> Undo:
    named = Weak(None)
    setattr(named, text, 1)
    return keep(named)


@place
def attribute_of_a_text(text: str) -> Undo:
    class Text(str):
        held: str

    made = Text("a")
    made.held = text
    return keep(made)


@place
def name_of_a_type(text: str) -> Undo:
    return keep(type(text, (), {}))


@place
def qualified_name_of_a_type(text: str) -> Undo:
    return keep(type("Made", (), {"__qualname__": text}))


@place
def constant_of_code(text: str) -> Undo:
    return keep(compile(f"x = {text!r}", "file", "exec"))


@place
def name_in_code(text: str) -> Undo:
    return keep(compile(f"x.{text}", "file", "exec"))


@place
def file_of_code(text: str) -> Undo:
    return keep(compile("1", text, "exec"))


@place
def name_of_a_variable(text: str) -> Undo:
    return keep(contextvars.ContextVar(text))


@place
def string_of_a_scanner(text: str) -> Undo:
    return keep(re.finditer(".", text))


@place
def pattern_of_a_scanner(text: str) -> Undo:
    return after(re.purge, keep(re.finditer(text, "x")))


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
    marks = {name: f"mark_{secrets.token_hex(12)}_{name}" for name in PLACES}
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
