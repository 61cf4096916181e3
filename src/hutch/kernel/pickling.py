"""Variables as bytes and back, each by itself and yet with one memory of what was seen.

All variables of a namespace go through one pickler, one after the other. So two names for one
object are one object again, and so is an array that two variables share. A function made in a cell
has the namespace itself for its globals, then and afterwards.

A variable that cannot be brought back must not cost the others, but with one memory a pickle that
breaks off leaves all later ones referring to the wrong things. What then is done is in `salvage`.
"""

from __future__ import annotations

import functools
import importlib
import io
import mmap
import os
import pickle
import sys
import threading
import types
from typing import Any

from .reach import Kinds, Walk

# Copied into the pickle; larger ones are written straight from where they are.
SMALL_BUFFER = 32 * 1024


class CannotBeSaved(Exception):
    """An object has no meaning in another process. Says what it is."""


_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_RUNNING: dict[type, str] = {
    **{kind: "an open file" for kind in _FILES},
    types.GeneratorType: "a generator in the middle of its work",
    types.CoroutineType: "a coroutine in the middle of its work",
    types.AsyncGeneratorType: "a generator in the middle of its work",
    types.FrameType: "a frame of running code",
    types.TracebackType: "a traceback, which holds frames of running code",
    type(threading.Lock()): "a lock",
    type(threading.RLock()): "a lock",
    threading.Thread: "a thread",
    mmap.mmap: "a memory-mapped file",
}
# Of modules that are looked for only if they are loaded.
_RUNNING_BY_NAME = {
    ("socket", "socket"): "a socket",
    ("subprocess", "Popen"): "a process that was started here",
    ("multiprocessing.process", "BaseProcess"): "a process that was started here",
    ("asyncio", "Future"): "a task or future of an event loop",
    ("asyncio", "AbstractEventLoop"): "an event loop",
    ("sqlite3", "Connection"): "a connection to a database",
    ("sqlite3", "Cursor"): "a connection to a database",
    ("concurrent.futures", "Executor"): "a pool of workers",
}


class _ThisNamespace:
    """Stands for the namespace in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return this_namespace, ()


_loading: dict[str, Any] = {}


def this_namespace() -> dict[str, Any]:
    """The namespace that is being loaded."""
    return _loading


def set_namespace(namespace: dict[str, Any]) -> None:
    global _loading
    _loading = namespace


class _Rules:
    """What is pickled in another way than usual, mixed into a pickler."""

    def __init__(self, *args: Any, namespace: dict[str, Any], views: Views, **options: Any) -> None:
        super().__init__(*args, **options)
        self._namespace = namespace
        self._views = views
        self._verdicts: dict[type, str] = {}

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        verdict = self._verdicts.get(kind)
        if verdict is None:
            verdict = self._verdicts[kind] = _verdict(kind)
        if verdict:
            raise CannotBeSaved(_in_words(thing, verdict))
        if id(thing) in self._views:
            return self._views.reduced(thing)
        if isinstance(thing, types.ModuleType) and thing.__name__ in sys.modules:
            return import_again, (thing.__name__, _loaded_within(thing.__name__))
        if isinstance(thing, types.CellType):
            return _reduced_cell(thing)
        if isinstance(getattr(thing, "base", None), mmap.mmap) and _reopens(thing):
            return map_again, _mapped(thing)
        if kind is _Cached and thing.__module__ == "__main__":
            return cached, (thing.__wrapped__, thing.cache_parameters(), vars(thing))
        reduced = super().reducer_override(thing)  # type: ignore[misc]
        if isinstance(thing, types.FunctionType) and isinstance(reduced, tuple):
            return self._of_a_cell(thing, reduced)
        return reduced

    def _of_a_cell(self, function: types.FunctionType, reduced: tuple[Any, ...]) -> Any:
        """A function by value: with its very variables, those around it and the global ones.

        Two functions that count with one variable still do so, and a global that is set later is
        seen. cloudpickle gives each function copies of its own.
        """
        make, (code, around, name, defaults, _), (attributes, slots), *rest = reduced
        slots = {**slots, "__closure__": None}
        if function.__globals__ is self._namespace:
            slots["__globals__"] = {}
            around = _ThisNamespace()
        made_of = (code, around, name, defaults, function.__closure__)
        return make, made_of, (attributes, slots), *rest


def _loaded_within(package: str) -> list[str]:
    """`import a.b` binds `a`, and means that `a.b` is there: so it is to be there again."""
    return [name for name in sys.modules if name.startswith(package + ".")]


def import_again(name: str, within: list[str]) -> types.ModuleType:
    module = importlib.import_module(name)
    for one in within:
        if one not in sys.modules:
            try:
                importlib.import_module(one)
            except Exception:
                pass  # that it was there once need not mean that it can be imported by itself
    return module


def _reopens(array: Any) -> bool:
    """Is it a numpy array over a file, of which the file holds all that it shows?"""
    memmap = getattr(sys.modules.get("numpy"), "memmap", None)
    return type(array) is memmap and bool(array.filename) and array.mode != "c"


def _mapped(array: Any) -> tuple[Any, ...]:
    array.flush()
    mode = "r" if array.mode == "r" else "r+"
    order = "C" if array.flags.c_contiguous else "F"
    return os.fspath(array.filename), array.dtype, mode, array.offset, array.shape, order


def map_again(*arguments: Any) -> Any:
    """An array over the file that it was over. As data it would no longer write to it."""
    return importlib.import_module("numpy").memmap(*arguments)


_Cached = type(functools.lru_cache()(len))


def cached(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A function with an empty cache. By itself it would be pickled as a name in this module."""
    made = functools.lru_cache(**parameters)(function)
    vars(made).update({**attributes, "__wrapped__": function})
    return made


def _reduced_cell(cell: types.CellType) -> tuple[Any, ...]:
    """Made empty and filled later: what is in it may well lead back to it."""
    try:
        return types.CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:
        return types.CellType, ()


def fill_cell(cell: types.CellType, contents: tuple[object]) -> None:
    cell.cell_contents = contents[0]


class _Plain(pickle.Pickler):
    """Without cloudpickle, what was defined in cells cannot be saved, and must not seem to be."""

    def reducer_override(self, thing: Any) -> Any:
        made_here = getattr(thing, "__module__", None) == "__main__"
        if made_here and isinstance(thing, (type, types.FunctionType)):
            raise CannotBeSaved(f"{thing.__qualname__} was defined in a cell (needs cloudpickle)")
        return NotImplemented


def _verdict(kind: type) -> str:
    for known, what in _RUNNING.items():
        if issubclass(kind, known):
            return what
    for (module, name), what in _RUNNING_BY_NAME.items():
        known = getattr(sys.modules.get(module), name, None)  # type: ignore[assignment]
        if isinstance(known, type) and issubclass(kind, known):
            return what
    return ""


def _in_words(thing: Any, verdict: str) -> str:
    if not isinstance(thing, _FILES):
        return verdict
    name = getattr(thing, "name", "")
    where = f" ({os.fspath(name)})" if isinstance(name, (str, os.PathLike)) else ""
    return ("a closed file" if thing.closed else verdict) + where


class Views:
    """Arrays that share memory with each other, so that they share it again afterwards.

    Only arrays that the user holds are looked at. Tables share memory too, but they keep books on
    it that do not survive, and would take a write to one for a write to that one alone.
    """

    def __init__(self, namespace: dict[str, Any], names: list[str]) -> None:
        self._roots: dict[int, tuple[Any, Any]] = {}
        kinds = Kinds()
        if not kinds.arrays:
            return
        walk = Walk(namespace, kinds)
        found: dict[int, Any] = {}
        for name in names:
            for thing in walk.holdings(namespace[name]):
                if type(thing) in kinds.arrays:
                    found[id(thing)] = thing
        families: dict[int, list[Any]] = {}
        for array in found.values():
            families.setdefault(id(_root(array)), []).append(array)
        for family in families.values():
            root = _root(family[0])
            # If none of them can be written to, nobody can tell that they share.
            shared = len(family) > 1 and any(one.flags.writeable for one in family)
            if shared and _can_be_root(root, kinds):
                self._roots.update({id(one): (one, root) for one in family if one is not root})

    def __contains__(self, identity: int) -> bool:
        return identity in self._roots

    def reduced(self, array: Any) -> tuple[Any, ...]:
        root = self._roots[id(array)][1]
        offset = _address(array) - _address(root)
        shape, strides = array.shape, array.strides
        return view_of, (root, array.dtype, shape, strides, offset, array.flags.writeable)


def _root(array: Any) -> Any:
    while type(array.base) is type(array):
        array = array.base
    return array


def _can_be_root(array: Any, kinds: Kinds) -> bool:
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    return type(array) in kinds.arrays and contiguous and not array.dtype.hasobject


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def view_of(root: Any, dtype: Any, shape: Any, strides: Any, offset: int, writeable: bool) -> Any:
    """An array in the memory of another one."""
    memory = root.reshape(-1, order="A").view("uint8")
    view = type(root)(shape, dtype, buffer=memory, offset=offset, strides=strides)
    view.flags.writeable = writeable
    return view


class Dump:
    """Writes values to a file, one after the other, with large buffers beside it."""

    def __init__(self, file: Any, namespace: dict[str, Any], views: Views) -> None:
        self.buffers: list[memoryview] = []
        self._pickler = _pickler_class()(
            file,
            protocol=5,
            buffer_callback=self._keep,
            namespace=namespace,
            views=views,
        )

    def add(self, value: object) -> None:
        self._pickler.dump(value)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """True has it copied into the pickle."""
        view = buffer.raw()
        if view.nbytes < SMALL_BUFFER:
            return True
        self.buffers.append(view)
        return False


def _pickler_class() -> Any:
    try:
        base = importlib.import_module("cloudpickle").Pickler
    except ImportError:
        base = _Plain
    return type("Pickler", (_Rules, base), {})


class Nowhere:
    """A file for finding out whether something can be written."""

    def write(self, some: Any) -> int:
        return len(some)


def values(metadata: bytes, buffers: list[Any], count: int) -> list[Any]:
    """Everything that was dumped. Raises whatever loading it raises."""
    unpickler = pickle.Unpickler(io.BytesIO(metadata), buffers=iter(buffers))
    return [unpickler.load() for _ in range(count)]


def in_short(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, CannotBeSaved):
        return str(error)
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "it is nested too deeply"
    try:
        text = str(error)
    except Exception:
        text = ""
    line = " ".join(text.split())
    return f"{type(error).__name__}: {line}"[:300]
