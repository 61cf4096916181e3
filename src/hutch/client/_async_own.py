"""What the asynchronous client has of its own. `_sync_own.py` is its twin, written by hand."""

from __future__ import annotations

from asyncio import Lock, sleep
from collections.abc import AsyncGenerator, AsyncIterable, Iterable

from .parse import bytes_of, iterable_of


async def pieces_of(source: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The body of a request, piece by piece."""
    if isinstance(source, AsyncIterable):
        async for piece in source:
            yield bytes_of(piece)
    else:
        for piece in iterable_of(source):
            yield bytes_of(piece)


__all__ = ["Lock", "pieces_of", "sleep"]
