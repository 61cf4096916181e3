"""One box per conversation: made when it is first needed, found again, and gone at the end."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from types import TracebackType
from typing import Any

import hutch
from hutch.errors import BoxLost

from .once import Once
from .toolbox import AsyncToolbox

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
