"""A value that is made once, when it is first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Makes a value when it is first asked for. Callers that come while it is made wait for it.

    A caller that is cancelled does not cancel it for the others. If it fails, every caller that
    waits gets the error, and the next one tries again.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._making: asyncio.Task[T] | None = None

    @property
    def has_begun(self) -> bool:
        return self._making is not None

    @property
    def value(self) -> T | None:
        """None while there is none."""
        task = self._making
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self) -> T:
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            # All callers may have left by the time it fails; asyncio would log that.
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        making = self._making
        try:
            return await asyncio.shield(making)
        except Exception:
            if self._making is making:
                self._making = None
            raise

    async def cancel(self) -> None:
        """Stop making it. A value that was made stays."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
