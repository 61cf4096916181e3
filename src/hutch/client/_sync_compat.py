"""Parts of the sync client that are not generated; `_async_compat.py` is the async twin."""

from __future__ import annotations

import atexit
import contextvars
import inspect
import os
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Mapping, Sequence
from threading import Lock, Thread
from time import sleep
from typing import Generic, TypeVar

from .parse import bytes_of, iterable_of

V = TypeVar("V")


def pieces_of(source: Iterable[bytes] | AsyncIterable[bytes]) -> Generator[bytes, None, None]:
    """The body of a request, piece by piece. Raises InvalidRequest if it is an async one."""
    for piece in iterable_of(source):
        yield bytes_of(piece)


def outcome(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[object, BaseException | None]:
    """What a function returned, and what it raised."""
    try:
        value = function(*args, **kwargs)
    except BaseException as exc:  # in our own thread, where even SystemExit is only an answer
        return None, exc
    if inspect.iscoroutine(value):
        value.close()
        return None, TypeError("this function is async: only AsyncSandbox can call it")
    return value, None


class BackgroundTasks:
    """Background threads. A thread cannot be stopped: it ends when its work is done."""

    def start(self, work: Callable[..., None], *args: object) -> None:
        context = contextvars.copy_context()
        Thread(target=context.run, args=(work, *args), name="hutch call", daemon=True).start()

    def stop(self) -> None:
        pass


class PerProcess(Generic[V]):
    """One value for this process and all its threads, closed at its end."""

    def __init__(self, make: Callable[[], V], close: Callable[[V], None]) -> None:
        self._make, self._close = make, close
        self._value: V | None = None
        self._of_parent: list[V | None] = []
        self._lock = Lock()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def get(self) -> V:
        """The value. Made again after `close`, and in a fork."""
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    def close(self) -> None:
        with self._lock:
            value, self._value = self._value, None
        if value is not None:
            self._close(value)

    def _forget(self) -> None:
        self._of_parent.append(self._value)  # kept alive: closing it would end it for the parent
        self._value, self._lock = None, Lock()


__all__ = ["BackgroundTasks", "Lock", "PerProcess", "outcome", "pieces_of", "sleep"]
