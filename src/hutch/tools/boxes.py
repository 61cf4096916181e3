"""One box per conversation: made when it is first needed, found again, and gone at the end."""

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


IDLE = 3600  # seconds, of a box that nobody is sure to close


class AsyncBoxes:
    """Boxes by the name of their conversation. Two who ask at once for the same get the same.

    `order` is what `AsyncSandbox.create` takes. A box that died raises BoxLost from then on: a
    conversation is never given another box behind its back; `forget` it, to begin anew. At a
    server, a box that nobody used for an hour ends by itself, unless `idle` is in the order.
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
        """The tools of its box; `.box` is the box."""
        return await self._boxes.setdefault(conversation, Once(self._open)).get()

    async def forget(self, conversation: str = "") -> None:
        """Close its box. Nothing, if it has none."""
        if opening := self._boxes.pop(conversation, None):
            if not opening.has_begun:  # or it failed, and there is nothing to close
                return
            try:
                toolbox = await opening.get()
            except Exception:
                return  # its caller has the error
            with suppress(BoxLost):
                await toolbox.box.__aexit__(None, None, None)

    async def close(self) -> None:
        """Close all. One that cannot be closed does not keep the others, and is told then."""
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
