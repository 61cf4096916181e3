"""Finds the arrays and tables that a variable holds, without running its code.

The garbage collector knows what every object refers to, including closures, slots and attributes.
It does not see into numpy arrays and Arrow tables: those are asked for their memory.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

# Objects visited in one walk. A namespace with more is not made of large pieces.
BUDGET = 200_000
# Bytes. Smaller buffers stay, even those of a large table: their pages are not worth a mapping.
SMALL = 64 * 1024
# Each pointer in an object column refers to a Python object; a short string weighs this many
# pointers. An estimate is enough to recognise a large table; measuring would wake what sleeps.
OBJECT_WEIGHT = 8

_ATOMS = {int, str, bytes, float, bool, complex, type(None), range, bytearray}


class Buffer(NamedTuple):
    """A piece of memory, and the object that keeps it."""

    address: int
    size: int
    owner: object


@dataclass
class Large:
    """A variable that holds much memory, and remarks about parts that cannot move."""

    name: str
    buffers: list[Buffer] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Kinds:
    """The types of arrays and tables of the libraries that are loaded. It loads none."""

    def __init__(self) -> None:
        self.arrays = _types("numpy", "ndarray")
        self.plain_subclasses = _types("numpy", "recarray", "matrix")
        self.frames = _types("pandas", "DataFrame")
        self.series = _types("pandas", "Series", "Index")
        arrays = getattr(sys.modules.get("pandas"), "arrays", None)
        self.columns: tuple[Any, ...] = tuple(
            kind
            for kind in vars(arrays or object).values()
            if isinstance(kind, type) and kind.__name__.endswith("Array")
        )
        self.arrow = _types(
            "pyarrow.lib", "Table", "RecordBatch", "ChunkedArray", "Array", "Buffer"
        )
        self.tables = self.frames + self.series + self.columns + self.arrow

    def __bool__(self) -> bool:
        return bool(self.arrays or self.arrow)


def _types(module: str, *names: str) -> tuple[Any, ...]:
    found = [getattr(sys.modules.get(module), name, None) for name in names]
    return tuple(kind for kind in found if isinstance(kind, type))


class Walk:
    """A walk through what values hold, up to modules, classes of libraries and the namespace."""

    def __init__(self, namespace: dict[str, object], kinds: Kinds, budget: int = BUDGET) -> None:
        self.kinds = kinds
        self.left = budget
        modules = [item for item in list(sys.modules.values()) if isinstance(item, ModuleType)]
        self._outside = {id(vars(module)) for module in modules} | {id(namespace)}

    def holdings(self, value: object) -> Iterator[object]:
        """Every array and table that a value holds, but not their parts."""
        stop = self.kinds.arrays + self.kinds.tables
        for thing in self._things(value):
            if isinstance(thing, stop):
                yield thing

    def buffers(self, thing: object) -> Iterator[tuple[Buffer, bool]]:
        """The memory behind an array or table, and whether it holds Python objects."""
        for part in self._things(thing, into_tables=True):
            if isinstance(part, self.kinds.arrays):
                yield from self._array_memory(part)
            elif isinstance(part, self.kinds.arrow):
                yield from _arrow_memory(part)

    def everything(self, value: object) -> Iterator[object]:
        """Every object that a value holds, including those in tables and arrays of objects."""
        return self._things(value, into_tables=True, into_objects=True)

    def _array_memory(self, array: Any) -> Iterator[tuple[Buffer, bool]]:
        if isinstance(array.base, self.kinds.arrays):
            return  # its base is visited too, and has all of the memory
        if array.nbytes and (array.flags.c_contiguous or array.flags.f_contiguous):
            address = array.__array_interface__["data"][0]
            yield Buffer(address, array.nbytes, array), bool(array.dtype.hasobject)

    def _things(
        self, value: object, into_tables: bool = False, into_objects: bool = False
    ) -> Iterator[object]:
        seen: dict[int, object] = {}  # by id; kept alive, or another object might get the same id
        queue: collections.deque[object] = collections.deque([value])
        while queue and self.left > 0:
            thing = queue.popleft()
            if id(thing) in seen or not self._inside(thing):
                continue
            seen[id(thing)] = thing
            self.left -= 1
            yield thing
            if into_tables or not isinstance(thing, self.kinds.tables):
                queue.extend(self._behind(thing, into_tables, into_objects))

    def _inside(self, thing: object) -> bool:
        if isinstance(thing, type):
            return thing.__module__ == "__main__"
        return not isinstance(thing, ModuleType) and id(thing) not in self._outside

    def _behind(self, thing: object, into_tables: bool, into_objects: bool) -> list[object]:
        if isinstance(thing, (list, tuple, set, frozenset, dict)) and len(thing) > self.left:
            return []
        held = gc.get_referents(thing)
        if isinstance(thing, self.kinds.arrays):
            if into_tables:
                held.append(thing.base)
            if into_objects and thing.dtype.hasobject:
                held += thing.ravel().tolist()
        return [part for part in held if type(part) not in _ATOMS]


def _arrow_memory(thing: Any) -> Iterator[tuple[Buffer, bool]]:
    if hasattr(thing, "address"):
        while thing.parent is not None:
            thing = thing.parent
        if thing.is_cpu and thing.size:
            yield Buffer(thing.address, thing.size, thing), False
        return
    if hasattr(thing, "columns"):
        parts = thing.columns
    elif hasattr(thing, "chunks"):
        parts = thing.chunks
    else:
        parts = [buffer for buffer in thing.buffers() if buffer is not None]
        if hasattr(thing, "dictionary"):
            parts.append(thing.dictionary)
    for part in parts:
        yield from _arrow_memory(part)


def large(namespace: dict[str, Any], frame_bytes: int, array_bytes: int) -> list[Large]:
    """The variables that hold large arrays and tables, in the order of the namespace."""
    kinds = Kinds()
    if not kinds:
        return []
    walk = Walk(namespace, kinds)
    result = []
    for name, value in list(namespace.items()):
        variable = Large(name)
        for thing in walk.holdings(value):
            _weigh(variable, thing, walk, frame_bytes, array_bytes)
        if walk.left <= 0:
            variable.remarks.append("there are too many objects to look through")
        if variable.buffers or variable.remarks:
            result.append(variable)
        if walk.left <= 0:
            break
    return result


def _weigh(variable: Large, thing: object, walk: Walk, frame_bytes: int, array_bytes: int) -> None:
    """Add the buffers of an array or table to its variable, if it is large."""
    memory = {buffer.address: (buffer, objects) for buffer, objects in walk.buffers(thing)}
    weight = sum(
        buffer.size * (OBJECT_WEIGHT if objects else 1) for buffer, objects in memory.values()
    )
    table = isinstance(thing, walk.kinds.tables)
    if weight < (frame_bytes if table else array_bytes):
        return
    variable.buffers += [buffer for buffer, _ in memory.values() if buffer.size >= SMALL]
    if any(objects and buffer.size >= SMALL for buffer, objects in memory.values()):
        variable.remarks += _object_columns(thing, walk.kinds) or ["it holds Python objects"]


def _object_columns(thing: object, kinds: Kinds) -> list[str]:
    if not isinstance(thing, kinds.frames):
        return []
    kept = [name for name, kind in thing.dtypes.items() if getattr(kind, "hasobject", False)]
    return [f"column {name!r} holds Python objects" for name in kept[:20]]
