"""Describes variables without waking what sleeps, and without waiting for user code.

The preview of a table is its shape and its columns. User code (`__repr__`, `__len__`, `shape`) gets
a moment; if that is not enough, the description has the type only.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, TypeVar

from .pages import Spans
from .pretty import pretty
from .reach import Kinds, Walk
from .sleep import Swap

PREVIEW = 120
MOMENT, ALL = 0.25, 2.0  # seconds for one question about one variable, and for all together
MANY = 10_000  # values; for larger arrays, the preview has only their number and type
SAMPLES = 100

T = TypeVar("T")


class _TooSlow(BaseException):
    """A BaseException, so that a `__repr__` that catches Exception does not catch it."""


def describe(namespace: dict[str, object]) -> list[dict[str, object]]:
    """Name, type, size and a preview of each variable, in the order of creation."""
    kinds = Kinds()
    asleep = Swap.current.asleep() if Swap.current else Spans([])
    patience = _Patience(ALL)
    return [
        _describe(name, value, _Look(kinds, asleep, Walk(namespace, kinds)), patience)
        for name, value in list(namespace.items())
        if _is_variable(name, value)
    ]


def _is_variable(name: str, value: object) -> bool:
    special = name == "_" or (name.startswith("__") and name.endswith("__"))
    return not special and not isinstance(value, ModuleType)


def _describe(name: str, value: object, look: _Look, patience: _Patience) -> dict[str, object]:
    asleep = patience.ask(lambda: look.sleeps(value), False)
    kind = type_name(type(value))
    return {
        "name": name,
        "type": kind,
        "shape": patience.ask(lambda: _shape(value), None),
        "length": patience.ask(lambda: _length(value), None),
        "bytes": patience.ask(lambda: look.weight(value, asleep), None),
        "preview": _cut(patience.ask(lambda: look.preview(value, asleep), f"<{kind}>")),
        "asleep": asleep,
    }


def type_name(kind: type) -> str:
    """A type as in code: `int`, `Point` of a cell, `pandas.DataFrame`."""
    module, name = str(kind.__module__), kind.__qualname__
    if module in ("builtins", "__main__"):
        return name
    package = module.partition(".")[0]
    public = getattr(sys.modules.get(package), name, None) is kind
    return f"{package if public else module}.{name}"


def _shape(value: object) -> list[int] | None:
    shape: Any = getattr(value, "shape", None)
    whole = isinstance(shape, tuple) and all(type(size) is int for size in shape)
    return list(shape) if whole and not isinstance(value, type) else None


def _length(value: Any) -> int | None:
    return len(value) if hasattr(type(value), "__len__") else None


class _Look:
    """Answers questions about a value. Tables and arrays are special."""

    def __init__(self, kinds: Kinds, asleep: Spans, walk: Walk) -> None:
        self._kinds = kinds
        self._asleep = asleep
        self._walk = walk

    def sleeps(self, value: object) -> bool:
        """Whether most of its memory is on disk."""
        if not self._asleep or not isinstance(value, self._kinds.arrays + self._kinds.tables):
            return False
        memory = {buffer.address: buffer.size for buffer, _ in self._walk.buffers(value)}
        there = sum(n for at, n in memory.items() if self._asleep.meet((at, at + n)))
        return 2 * there > sum(memory.values())

    def weight(self, value: object, asleep: bool) -> int:
        if isinstance(value, self._kinds.frames):
            columns = [value.iloc[:, at] for at in range(value.shape[1])]
            inside = sum(self._objects(column) for column in columns if not asleep)
            return int(value.memory_usage(deep=False).sum()) + inside
        if isinstance(value, self._kinds.series):
            return int(value.memory_usage(deep=False)) + (0 if asleep else self._objects(value))
        if isinstance(value, self._kinds.arrays + self._kinds.tables):
            return int(value.nbytes if hasattr(value, "nbytes") else value.size)
        return sys.getsizeof(value)

    def _objects(self, column: Any) -> int:
        """The size of the Python objects of a column, estimated from samples."""
        if not getattr(column.dtype, "hasobject", False) or not len(column):
            return 0
        step = max(1, len(column) // SAMPLES)
        sizes = [sys.getsizeof(value) for value in column.to_numpy()[::step]]
        return sum(sizes) * len(column) // len(sizes)

    def preview(self, value: Any, asleep: bool) -> str:
        if isinstance(value, self._kinds.frames):
            rows, columns = value.shape
            names = ", ".join(str(name) for name in value.columns[:PREVIEW])
            return f"{rows} rows, {columns} columns: {names}"
        if isinstance(value, self._kinds.series):
            return f"{len(value)} values of type {value.dtype}"
        if isinstance(value, self._kinds.arrays) and (asleep or value.size > MANY):
            return f"{value.size} values of type {value.dtype}"
        if isinstance(value, self._kinds.tables) and asleep:
            return f"{len(value)} values"
        return pretty(value, PREVIEW)


def _cut(text: str) -> str:
    line = re.sub(r"\s*\n\s*", " ", text)
    return line if len(line) <= PREVIEW else line[: PREVIEW - 1] + "…"


class _Patience:
    """Runs code that is not ours, with a time limit."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        began = time.monotonic()
        try:
            with _for_at_most(min(MOMENT, self._left)):
                return question()
        except BaseException:  # even SystemExit: it affects this variable only
            return otherwise
        finally:
            self._left -= time.monotonic() - began


@contextmanager
def _for_at_most(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in what takes longer. An alarm of the user continues afterwards."""
    if seconds <= 0:
        raise _TooSlow
    before = signal.getsignal(signal.SIGALRM)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # a handler that is not Python's could not be put back
        return
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _raise_too_slow)
    # Repeated, as the first may come in a place that ignores exceptions.
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            left = max(left - (time.monotonic() - began), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, every)


def _raise_too_slow(number: int, frame: FrameType | None) -> None:
    raise _TooSlow
