"""Deep hibernation: all of a namespace as one stream of bytes, and back in another process.

    magic | sizes of header | header (JSON) | pickles | large buffers | checksum

The pickles hold everything but the large buffers, which are written from where they are and read to
where they will be. Nothing is unpickled before all of it has arrived and its checksum is right, and
no variable is set before all are loaded.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import surroundings
from .pickling import Dump, Nowhere, Views, in_short, set_namespace, values
from .salvage import Salvage
from .surroundings import Lost, begin

__all__ = ["begin", "load", "save"]

MAGIC = b"hutch kernel state 1\n"
_HEADER = struct.Struct(">II")  # size and checksum
_END = struct.Struct(">I")
_LARGEST_HEADER = 64 << 20
_PIECE = 1 << 20
_PYTHON = [sys.implementation.name, *sys.version_info[:2]]


class BadState(Exception):
    """The bytes are not what `save` wrote."""


# saving


def save(
    namespace: dict[str, Any],
    write: Callable[[Any], None],
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write everything that can be saved, and say what was and what could not be.

    `extra` is given back by `load`; it must be JSON.
    """
    lost = surroundings.running()
    around = pickle.dumps(surroundings.gather(), protocol=4)
    names = [name for name in namespace if not (name.startswith("__") and name.endswith("__"))]
    selves = [name for name in names if namespace[name] is namespace]
    names, metadata, buffers = _dumped(namespace, [n for n in names if n not in selves], lost)
    header = {
        "python": _PYTHON,
        "names": names,
        "selves": selves,
        "lost": lost,
        "extra": extra or {},
        "numpy": "numpy" in sys.modules,
        "around": len(around),
        "metadata": metadata.nbytes,
        "buffers": [view.nbytes for view in buffers],
    }
    _write(write, json.dumps(header).encode(), [memoryview(around), metadata, *buffers])
    return {"kept": names + selves, "lost": lost}


def _dumped(
    namespace: dict[str, Any], names: list[str], lost: Lost
) -> tuple[list[str], memoryview, list[memoryview]]:
    """All variables through one pickler; those that fail are noted and left out."""
    checked = False
    while True:
        file = io.BytesIO()
        dump = Dump(file, namespace, Views(namespace, names))
        failed = _first_failure(dump, namespace, names)
        if failed is None:
            return names, file.getbuffer(), dump.buffers
        # What failed has left its traces in the pickler, so it is all done again. Most likely
        # others fail as well: each by itself is quicker than as many rounds.
        bad = [failed] if checked else _failures(namespace, names) or [failed]
        checked = True
        lost += [[name, why] for name, why in bad]
        names = [name for name in names if name not in dict(bad)]


def _first_failure(
    dump: Dump, namespace: dict[str, Any], names: list[str]
) -> tuple[str, str] | None:
    for name in names:
        try:
            dump.add(namespace[name])
        except BaseException as error:
            return name, in_short(error)
    return None


def _failures(namespace: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
    none = Views(namespace, [])
    tried = [_first_failure(Dump(Nowhere(), namespace, none), namespace, [one]) for one in names]
    return [failed for failed in tried if failed]


def _write(write: Callable[[Any], None], header: bytes, parts: list[memoryview]) -> None:
    write(MAGIC + _HEADER.pack(len(header), zlib.crc32(header)) + header)
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        write(part)
    write(_END.pack(checksum))


# loading


@dataclass
class _Arrived:
    header: dict[str, Any]
    around: bytes
    metadata: bytes
    buffers: list[Any]


def load(namespace: dict[str, Any], read: Callable[[int], bytes]) -> dict[str, Any]:
    """Set the variables that were saved, and say which could not be, and why.

    `read` gives as many bytes as asked for, or fewer at the end.
    """
    try:
        arrived = _receive(_Source(read))
        kept = pickle.loads(arrived.around)
    except (BadState, pickle.UnpicklingError, MemoryError) as error:
        return {"kept": [], "lost": [["everything", str(error) or "no memory"]], "extra": {}}
    header = arrived.header
    lost: Lost = [*header["lost"], *surroundings.apply(kept)]
    builtins = namespace.get("__builtins__")
    set_namespace(namespace)
    try:
        found = _values(arrived, namespace, lost)
    finally:
        set_namespace({})
    namespace.update(found)
    namespace.update({name: namespace for name in header["selves"]})
    namespace["__builtins__"] = builtins  # functions that are made anew set another one
    lost += surroundings.apply_chance(kept)
    return {"kept": [*found, *header["selves"]], "lost": lost, "extra": header["extra"]}


def _values(arrived: _Arrived, namespace: dict[str, Any], lost: Lost) -> dict[str, Any]:
    names = arrived.header["names"]
    other_python = arrived.header["python"] != _PYTHON
    if not other_python:
        try:
            return dict(zip(names, values(arrived.metadata, arrived.buffers, len(names))))  # noqa: B905
        except BaseException:
            pass  # why, and whose fault it is, is found out below
    salvage = Salvage(arrived.metadata, arrived.buffers, other_python)
    good = {}
    for name in names:
        value = salvage.load()
        why = salvage.why_lost(value, namespace)
        if why:
            lost.append([name, why])
        else:
            good[name] = value
    return good


class _Source:
    """Reads, and sums up what was read."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.checksum = 0

    def take(self, size: int) -> bytes:
        some = self._read(size)
        if len(some) < size:
            raise BadState("the saved state ends too early: it was not written or sent whole")
        return some

    def fill(self, place: Any) -> Any:
        view = memoryview(place).cast("B")
        for start in range(0, len(view), _PIECE):
            some = self.take(min(_PIECE, len(view) - start))
            self.checksum = zlib.crc32(some, self.checksum)
            view[start : start + len(some)] = some
        return place


def _receive(source: _Source) -> _Arrived:
    header = _receive_header(source)
    around = source.fill(bytearray(header["around"]))
    metadata = source.fill(bytearray(header["metadata"]))
    empty = _allocator(header["numpy"])
    buffers = [source.fill(empty(size)) for size in header["buffers"]]
    (checksum,) = _END.unpack(source.take(_END.size))
    if checksum != source.checksum:
        raise BadState("the saved state is damaged: its checksum is wrong")
    return _Arrived(header, around, metadata, buffers)


def _receive_header(source: _Source) -> dict[str, Any]:
    if source.take(len(MAGIC)) != MAGIC:
        raise BadState("this is not the saved state of a kernel, or of another version of it")
    size, checksum = _HEADER.unpack(source.take(_HEADER.size))
    if size > _LARGEST_HEADER:
        raise BadState("the saved state is damaged: its header cannot be that large")
    text = source.take(size)
    if zlib.crc32(text) != checksum:
        raise BadState("the saved state is damaged: the checksum of its header is wrong")
    header: dict[str, Any] = json.loads(text)
    return header


def _allocator(wanted: bool) -> Callable[[int], Any]:
    """Where buffers are read to. Memory of numpy's is not cleared first, and can sleep."""
    if wanted:
        try:
            empty = importlib.import_module("numpy").empty
            return lambda size: empty(size, "uint8")
        except Exception:
            pass  # whatever needs numpy will say so
    return bytearray
