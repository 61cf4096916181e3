"""Iterators that can be closed early."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncItems(Protocol[T_co]):
    """An iterator that can be closed, which stops its source."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...
    async def __anext__(self) -> T_co: ...
    async def aclose(self) -> None: ...


class AsyncStream(Generic[T]):
    """An iterator that can be left early: closing it stops the command, cell or watch behind it.

    Use it with `async with`, or call `aclose()`, unless you read it to its end.
    """

    def __init__(self, source: AsyncItems[T]) -> None:
        self._source = source

    def __aiter__(self) -> AsyncStream[T]:
        return self

    async def __anext__(self) -> T:
        return await anext(self._source)

    async def aclose(self) -> None:
        """End it. Idempotent, and does nothing after the end."""
        await self._source.aclose()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
