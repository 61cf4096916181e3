"""Pickling of variables: one by one, but with one memo.

All variables of a namespace go through one pickler, one after the other. So two names for one
object are one object again, and so is an array that two variables share. The globals of a function
that was defined in a cell are the namespace itself, before and after.

What cannot be saved is replaced by a `Lost`; `examine` finds these objects before anything is
written. What cannot be loaded must not affect the others either, but with one memo, a pickle that
breaks off would leave all later ones with wrong references: see `state.Salvage`.

Pickles of saved states refer to functions and classes of this module by name: do not rename those
without an underscore.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import mmap
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from .reach import Kinds, Walk
from .stream import FirstFormat, StateReader, StateWriter, Trial

SMALL_BUFFER = 32 * 1024  # bytes; smaller ones are copied into the pickle, others written directly
LONG_TEXT = 1 << 19  # characters
AVERAGE_BLOCK = 256  # bytes of memory per object: above it, some objects are large


class CannotBeSaved(Exception):
    """An object has no meaning in another process. The message says what it is."""


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
# By module and name: checked only if the module is loaded.
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


_loading: dict[str, object] = {}


def this_namespace() -> dict[str, object]:
    """The namespace that is being loaded."""
    return _loading


def set_namespace(namespace: dict[str, object]) -> None:
    global _loading
    _loading = namespace


Bad = dict[int, tuple[Any, str]]  # by id: objects that cannot be saved, and why


class Lost:
    """Replaces in a container what hibernation could not keep. Any use of it is an error."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"<not kept by hibernation: {self.why}>"

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"hibernation could not keep what was here: {self.why}")

    def _refuse(self, *args: object, **options: object) -> object:
        raise RuntimeError(f"hibernation could not keep what was here: {self.why}")

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __await__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __len__ = _refuse

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why,)


# How a type is pickled. Looked up once for each type, so that a million instances of one class cost
# little more than with plain pickle.
_PLAIN, _SPECIAL, _RUNS = 0, 1, 2


class _Rules:
    """A mixin for picklers: what is pickled in a special way."""

    def __init__(
        self,
        *args: object,
        namespace: dict[str, object],
        views: Views,
        bad: Bad,
        catching: bool,
        **options: object,
    ) -> None:
        super().__init__(*args, **options)
        self._namespace = namespace
        self._views = views
        self._kinds: dict[type, tuple[int, str]] = {}
        self._bad = bad
        self._catching = catching

    def reducer_override(self, thing: object) -> object:
        kind = type(thing)
        try:
            category, what = self._kinds[kind]
        except KeyError:
            category, what = self._kinds[kind] = _category(kind)
        if category == _PLAIN and not self._bad and not self._catching:
            return NotImplemented
        if self._bad and id(thing) in self._bad:
            return Lost, (self._bad[id(thing)][1],)
        if not self._catching:
            return self._reduced(thing, category, what)
        try:
            reduced = self._reduced(thing, category, what)
            if reduced is NotImplemented and not isinstance(thing, type):
                reduced = _usual(thing)
            return reduced
        except BaseException as error:
            self._bad[id(thing)] = thing, in_short(error)
            return Lost, (in_short(error),)

    def _reduced(self, thing: Any, category: int, what: str) -> Any:
        if category == _PLAIN:
            return NotImplemented
        if stream := _standard_stream(thing):
            return standard_stream, (stream,)
        if category == _RUNS:
            raise CannotBeSaved(_in_words(thing, what))
        if id(thing) in self._views:
            return self._views.reduced(thing)
        if isinstance(thing, types.ModuleType) and thing.__name__ in sys.modules:
            return import_again, (thing.__name__, _loaded_within(thing.__name__))
        if isinstance(thing, types.CellType):
            return _reduced_cell(thing)
        if isinstance(getattr(thing, "base", None), mmap.mmap) and _reopens(thing):
            return map_again, _mapped(thing)
        if isinstance(thing, _handler_type()):
            return _reduced_handler(thing)
        kind = type(thing)
        if kind is _Cached and thing.__module__ == "__main__":
            return cached, (thing.__wrapped__, thing.cache_parameters(), vars(thing))
        _load_home(thing)
        reduced = super().reducer_override(thing)  # type: ignore[misc]
        if isinstance(thing, types.FunctionType) and isinstance(reduced, tuple):
            return self._of_a_cell(thing, reduced)
        return reduced

    def _of_a_cell(self, function: types.FunctionType, reduced: tuple[Any, ...]) -> object:
        """A function by value, with its own closure cells and globals.

        Two functions that share a variable still share it, and see globals that are set later.
        cloudpickle would give each function copies.
        """
        make, (code, around, name, defaults, _), (attributes, slots), *rest = reduced
        slots = {**slots, "__closure__": None}
        if function.__globals__ is self._namespace:
            slots["__globals__"] = {}
            around = _ThisNamespace()
        made_of = (code, around, name, defaults, function.__closure__)
        return make, made_of, (attributes, slots), *rest


def _category(kind: type) -> tuple[int, str]:
    if verdict := _verdict(kind):
        return _RUNS, verdict
    special = (type, types.FunctionType, types.ModuleType, types.CellType, _Cached)
    if issubclass(kind, (*special, _handler_type())) or hasattr(kind, "base"):
        return _SPECIAL, ""
    return _PLAIN, ""


def _load_home(thing: object) -> None:
    """Load the module of a class or function, if only its package is loaded.

    numpy loads `numpy.rec` late, but its `recarray` is there from the start. cloudpickle takes what
    is in no loaded module for code of a cell: a copy of the class would come back, beside the real
    one.
    """
    home = getattr(thing, "__module__", None)
    if isinstance(home, str) and home not in sys.modules and home.partition(".")[0] in sys.modules:
        try:
            importlib.import_module(home)
        except Exception:
            pass  # a name that the user chose, say: then it is saved by value


def _usual(thing: object) -> object:
    """What pickle would do, done here so that an error can be attributed to this object."""
    reduce = copyreg.dispatch_table.get(type(thing))
    return reduce(thing) if reduce else thing.__reduce_ex__(5)


def _standard_stream(thing: object) -> str:
    if not isinstance(thing, io.TextIOBase):
        return ""
    known = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    return next((name for name, stream in known.items() if stream is thing), "")


def standard_stream(name: str) -> object:
    return getattr(sys, name)


class _NoHandler:
    """Stands for a class whose module is not loaded: it has no instances."""


def _handler_type() -> type:
    return getattr(sys.modules.get("logging"), "Handler", _NoHandler)


def _reduced_handler(handler: object) -> tuple[Any, ...]:
    """A handler of `logging` without its lock; one that writes to a file opens it again."""
    state = {key: value for key, value in vars(handler).items() if key != "lock"}
    if hasattr(handler, "baseFilename"):
        state.update(stream=None, mode="a")
    return handler_again, (type(handler), state)


def handler_again(kind: Any, state: dict[str, object]) -> object:
    logging = importlib.import_module("logging")
    handler = kind.__new__(kind)
    vars(handler).update(state)
    handler.createLock()
    getattr(logging, "_addHandlerRef", lambda one: None)(handler)
    return handler


def _loaded_within(package: str) -> list[str]:
    """The loaded submodules of a package: `import a.b` binds only `a`, but `a.b` must be loaded."""
    return [name for name in sys.modules if name.startswith(package + ".")]


def import_again(name: str, within: list[str]) -> types.ModuleType:
    module = importlib.import_module(name)
    for submodule in within:
        if submodule not in sys.modules:
            try:
                importlib.import_module(submodule)
            except Exception:
                pass  # not every module that was loaded can be imported by itself
    return module


def _reopens(array: Any) -> bool:
    """Whether it is a numpy array over a file that has all of its content."""
    memmap = getattr(sys.modules.get("numpy"), "memmap", None)
    return type(array) is memmap and bool(array.filename) and array.mode != "c"


def _mapped(array: Any) -> tuple[Any, ...]:
    array.flush()
    mode = "r" if array.mode == "r" else "r+"
    order = "C" if array.flags.c_contiguous else "F"
    return os.fspath(array.filename), array.dtype, mode, array.offset, array.shape, order


def map_again(*arguments: Any) -> object:
    """An array over the same file. Saved as data, it would no longer write to the file."""
    return importlib.import_module("numpy").memmap(*arguments)


_Cached = type(functools.lru_cache()(len))


def cached(function: object, parameters: dict[str, Any], attributes: dict[str, object]) -> object:
    """A cached function with an empty cache. pickle would save it only as a name."""
    wrapped = functools.lru_cache(**parameters)(function)
    vars(wrapped).update({**attributes, "__wrapped__": function})
    return wrapped


def _reduced_cell(cell: types.CellType) -> tuple[Any, ...]:
    """A cell is made empty and filled later, as its content may refer back to it."""
    try:
        return types.CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:
        return types.CellType, ()


def fill_cell(cell: types.CellType, contents: tuple[object]) -> None:
    cell.cell_contents = contents[0]


class _Plain(pickle.Pickler):
    """A pickler without cloudpickle. Refuses classes and functions that cells defined."""

    def reducer_override(self, thing: object) -> Any:
        made_here = getattr(thing, "__module__", None) == "__main__"
        if made_here and isinstance(thing, (type, types.FunctionType)):
            raise CannotBeSaved(f"{thing.__qualname__} was defined in a cell (needs cloudpickle)")
        return NotImplemented


def _verdict(kind: type) -> str:
    for known, what in _RUNNING.items():
        if issubclass(kind, known):
            return what
    for (module, name), what in _RUNNING_BY_NAME.items():
        loaded = getattr(sys.modules.get(module), name, None)
        if isinstance(loaded, type) and issubclass(kind, loaded):
            return what
    return ""


def _in_words(thing: object, verdict: str) -> str:
    if not isinstance(thing, _FILES):
        return verdict
    name = getattr(thing, "name", "")
    where = f" ({os.fspath(name)})" if isinstance(name, (str, os.PathLike)) else ""
    return ("a closed file" if thing.closed else verdict) + where


class Views:
    """Arrays that share memory, so that they share it again after loading.

    Only arrays that the user holds are examined. Tables share memory too, but what they record
    about that does not survive pickling.
    """

    def __init__(self, namespace: dict[str, object], names: list[str]) -> None:
        self._roots: dict[int, tuple[Any, Any]] = {}
        kinds = Kinds()
        if not kinds.arrays:
            return
        walk = Walk(namespace, kinds)
        arrays: dict[int, Any] = {}
        for name in names:
            for thing in walk.holdings(namespace[name]):
                if _is_simple(thing, kinds):
                    arrays[id(thing)] = thing
        families: dict[int, list[Any]] = {}
        for array in arrays.values():
            families.setdefault(id(_root(array)), []).append(array)
        for family in families.values():
            root = _root(family[0])
            # If all are read-only, sharing makes no difference.
            shared = len(family) > 1 and any(array.flags.writeable for array in family)
            if shared and _can_be_root(root, kinds):
                self._roots.update({id(view): (view, root) for view in family if view is not root})

    def __contains__(self, identity: int) -> bool:
        return identity in self._roots

    def reduced(self, array: Any) -> tuple[Any, ...]:
        root = self._roots[id(array)][1]
        offset = _address(array) - _address(root)
        shape, strides = array.shape, array.strides
        flag = array.flags.writeable
        return view_of, (root, array.dtype, shape, strides, offset, flag, type(array))


def _is_simple(array: Any, kinds: Kinds) -> bool:
    """Whether an array is only its memory: without a mask, file or unit."""
    simple = kinds.arrays + kinds.plain_subclasses
    return type(array) in simple


def _root(array: Any) -> Any:
    ndarray = sys.modules["numpy"].ndarray
    while isinstance(array.base, ndarray):
        array = array.base
    return array


def _can_be_root(array: Any, kinds: Kinds) -> bool:
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    return _is_simple(array, kinds) and contiguous and not array.dtype.hasobject


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def view_of(
    root: Any,
    dtype: Any,
    shape: object,
    strides: object,
    offset: int,
    writeable: bool,
    kind: object = None,
) -> object:
    """An array in the memory of another one. `kind` is its type; older states have none."""
    ndarray = importlib.import_module("numpy").ndarray
    memory = root.view(ndarray).reshape(-1, order="A").view("uint8")
    view = ndarray(shape, dtype, buffer=memory, offset=offset, strides=strides)
    if kind not in (None, ndarray):
        view = view.view(kind)
    view.flags.writeable = writeable
    return view


class StatePickler:
    """Writes values, one after the other, to a StateWriter."""

    def __init__(
        self,
        out: StateWriter | Trial,
        namespace: dict[str, object],
        views: Views,
        bad: Bad,
        catching: bool = False,
    ) -> None:
        """`bad`: what is replaced by a Lost. `catching`: what fails is added to it."""
        self._out = out
        # By id, with the text itself: a text that `__reduce__` made would be freed otherwise, and
        # another one might get its id, and so its number.
        self._numbers: dict[int, tuple[int, str]] = {}
        self._pickler = _pickler_class(self._long_text if _has_large_blocks() else None)(
            out,
            protocol=5,
            buffer_callback=self._keep,
            namespace=namespace,
            views=views,
            bad=bad,
            catching=catching,
        )

    def add(self, value: object) -> None:
        self._pickler.dump(value)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a large buffer. True: pickle copies it into its own stream."""
        view = buffer.raw()
        if view.nbytes < SMALL_BUFFER:
            return True
        self._out.buffer(view)
        return False

    def _long_text(self, thing: object) -> int | None:
        """The number of a long text, which is written separately: pickle would copy it."""
        if type(thing) is not str or len(thing) < LONG_TEXT:
            return None
        known = self._numbers.get(id(thing))
        if known is None:
            known = self._numbers[id(thing)] = self._out.text(thing), thing
        return known[0]


def _has_large_blocks() -> bool:
    """Whether there may be long texts: looking for them costs time for every small object."""
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return True
    return resident > AVERAGE_BLOCK * sys.getallocatedblocks()


def _pickler_class(persistent_id: Callable[[object], int | None] | None) -> Any:
    try:
        base = importlib.import_module("cloudpickle").Pickler
    except ImportError:
        base = _Plain
    # A plain dict, as it is looked up for every object: cloudpickle's table is a slow ChainMap.
    table = {} if base is _Plain else base.dispatch_table
    own: dict[str, object] = {"dispatch_table": {**copyreg.dispatch_table, **table}}
    if persistent_id:
        own["persistent_id"] = staticmethod(persistent_id)
    return type("Pickler", (_Rules, base), own)


class StateUnpickler(pickle.Unpickler):
    """Reads values, one after the other, from a StateReader."""

    def __init__(self, reader: StateReader | FirstFormat) -> None:
        super().__init__(reader, buffers=reader)
        self._reader = reader

    def persistent_load(self, number: Any) -> str:
        return self._reader.text(number)


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
