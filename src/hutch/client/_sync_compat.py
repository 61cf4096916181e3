"""Parts of the sync client that are not generated; `_async_compat.py` is the async twin."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from threading import Lock, Thread
from time import sleep

from .parse import bytes_of, iterable_of


def pieces_of(source: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The body of a request, piece by piece."""
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


class Helpers:
    """Background threads. A thread cannot be stopped: it ends when its work is done."""

    def start(self, work: Callable[..., None], *args: object) -> None:
        context = contextvars.copy_context()
        Thread(target=context.run, args=(work, *args), name="hutch call", daemon=True).start()

    def stop(self) -> None:
        pass


__all__ = ["Helpers", "Lock", "outcome", "pieces_of", "sleep"]
