"""One box per conversation, made when it is first needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

import hutch
from hutch.errors import BoxLost

from .toolbox import AsyncToolbox

T = TypeVar("T")


class Once(Generic[T]):
    """Makes a value on the first call of `get`. Calls in the meantime wait for the same value.

    A caller that is cancelled does not cancel it for the others. If it fails, every waiting caller
    gets the error, and the next call tries again.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._making: asyncio.Task[T] | None = None

    @property
    def has_begun(self) -> bool:
        return self._making is not None

    @property
    def value(self) -> T | None:
        """The value, or None if it has not been made."""
        task = self._making
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self) -> T:
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            # Retrieve the exception: if all callers have left, asyncio would log it.
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        making = self._making
        try:
            return await asyncio.shield(making)
        except Exception:
            if self._making is making:
                self._making = None
            raise

    async def cancel(self) -> None:
        """Stop making it. A value that has been made stays."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])


IDLE = 3600  # seconds; at a server, a box outlives a process that did not close it


class AsyncBoxes:
    """One box for each conversation, by name. Concurrent calls for the same name share a box.

    `order` is what `AsyncSandbox.create` takes. A box that died raises BoxLost from then on and is
    never replaced silently; call `forget` to start over with a new one. At a server, a box that is
    idle for an hour ends, unless the order has its own `idle`.
    """

    def __init__(self, **order: Any) -> None:
        if order.get("url") or os.environ.get("HUTCH_URL"):
            order = {"idle": IDLE, **order}
        self._order = order
        self._boxes: dict[str, Once[AsyncToolbox]] = {}

    def __repr__(self) -> str:
        count = sum(opening.has_begun for opening in self._boxes.values())
        return f"<{type(self).__name__} with {count}>"

    async def get(self, conversation: str = "") -> AsyncToolbox:
        """The tools of its box, which is created if needed; `.box` is the box."""
        return await self._boxes.setdefault(conversation, Once(self._open)).get()

    async def forget(self, conversation: str = "") -> None:
        """Close its box. Does nothing if it has none."""
        if opening := self._boxes.pop(conversation, None):
            if not opening.has_begun:  # not opened yet, or it failed: nothing to close
                return
            try:
                toolbox = await opening.get()
            except Exception:
                return  # its caller has the error
            with suppress(BoxLost):
                await toolbox.box.__aexit__(None, None, None)

    async def close(self) -> None:
        """Close all boxes. If one cannot be closed, its error is raised after the others."""
        forgetting = (self.forget(conversation) for conversation in list(self._boxes))
        for outcome in await asyncio.gather(*forgetting, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def __aenter__(self) -> AsyncBoxes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self) -> AsyncToolbox:
        return AsyncToolbox(await hutch.AsyncSandbox.create(**self._order))
