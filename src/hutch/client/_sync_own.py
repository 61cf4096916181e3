"""What the synchronous client has of its own. `_async_own.py` is its twin."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from threading import Lock
from time import sleep

from .parse import bytes_of, iterable_of


def pieces_of(source: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The body of a request, piece by piece."""
    for piece in iterable_of(source):
        yield bytes_of(piece)


__all__ = ["Lock", "pieces_of", "sleep"]
