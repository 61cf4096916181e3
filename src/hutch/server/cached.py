"""A value that is expensive to compute, shared by concurrent callers and kept for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedValue(Generic[T]):
    """`get` runs `make` at most once at a time, and keeps its value for `seconds`.

    Errors are not kept: current callers get the error, and the next one tries again.
    """

    def __init__(self, make: Callable[[], Coroutine[object, object, T]], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._task: asyncio.Task[T] | None = None
        self._done_at = 0.0

    async def get(self) -> T:
        if self._task is None or (self._task.done() and not self._is_fresh(self._task)):
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_retrieve)
        # A caller that is cancelled must not cancel it for the others.
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        value = await self._make()
        self._done_at = time.monotonic()
        return value

    def _is_fresh(self, task: asyncio.Task[T]) -> bool:
        failed = task.cancelled() or task.exception() is not None
        return not failed and time.monotonic() - self._done_at < self._seconds

    async def close(self) -> None:
        """Cancel `make` if it is running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _retrieve(task: asyncio.Task[object]) -> None:
    """Mark an error as seen: asyncio logs one that no caller is left to receive."""
    if not task.cancelled():
        task.exception()
