# Generated from _async_stream.py by scripts/unasync. Change that file, and run the script.
"""Iterators that can be closed early."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Items(Protocol[T_co]):
    """An iterator that can be closed, which stops its source."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __next__(self) -> T_co: ...
    def close(self) -> None: ...


class Stream(Generic[T]):
    """An iterator that can be left early: closing it stops the command, cell or watch behind it.

    Use it with `with`, or call `close()`, unless you read it to its end.
    """

    def __init__(self, source: Items[T]) -> None:
        self._source = source

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        return next(self._source)

    def close(self) -> None:
        """End it. Idempotent, and does nothing after the end."""
        self._source.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
