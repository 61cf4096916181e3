"""Parts of the sync client that cannot be generated: `_async_compat.py` is the async twin."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from threading import Lock, Thread
from time import sleep
from typing import Any

from .parse import bytes_of, iterable_of


def pieces_of(source: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The body of a request, piece by piece."""
    for piece in iterable_of(source):
        yield bytes_of(piece)


def outcome(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """What a function gives, and what it raised."""
    try:
        value = function(*args, **kwargs)
    except BaseException as exc:  # this is a thread of ours: none of them is for anybody else
        return None, exc
    if inspect.iscoroutine(value):
        value.close()
        return None, TypeError("this function is async, which only an AsyncSandbox can call")
    return value, None


class Helpers:
    """What goes on beside us. Nobody can stop a thread: it ends when what it does is done."""

    def start(self, work: Callable[..., None], *args: Any) -> None:
        context = contextvars.copy_context()
        Thread(target=context.run, args=(work, *args), name="hutch call", daemon=True).start()

    def stop(self) -> None:
        pass


__all__ = ["Helpers", "Lock", "outcome", "pieces_of", "sleep"]
