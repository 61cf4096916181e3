"""What a command prints while it runs, as progress for the client that waits."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import TypeVar

from hutch import operations as op
from hutch.client._async_stream import AsyncItems
from hutch.client.transport import AsyncTransport
from hutch.operations import Operation, StreamOperation, last_of
from hutch.types import Chunk

T = TypeVar("T")
ItemT = TypeVar("ItemT")
_RUNS = (op.RunShell, op.RunProgram, op.RunCode)
_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)|[\x00-\x08\x7f]"
)
MAX_LINE = 200  # characters
MAX_TAIL = 4096  # characters of output that are searched for the last line

# Set during one call, in the task that makes it. Tools know nothing of it.
listener: ContextVar[Callable[[str], object] | None] = ContextVar("listener", default=None)


class ProgressTransport:
    """A transport that passes what commands print to the listener of the current call."""

    def __init__(self, inner: AsyncTransport) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"<ProgressTransport {self._inner!r}>"

    async def perform(self, operation: Operation[T]) -> T:
        hear = listener.get()
        if hear and isinstance(operation, StreamOperation) and type(operation) in _RUNS:
            return await last_of(operation, _heard(await self._inner.stream(operation), hear))
        return await self._inner.perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncItems[ItemT]:
        items = await self._inner.stream(operation)
        hear = listener.get()
        return _heard(items, hear) if hear and type(operation) in _RUNS else items


async def _heard(
    source: AsyncItems[ItemT], hear: Callable[[str], object]
) -> AsyncGenerator[ItemT, None]:
    async with aclosing(source):
        async for item in source:
            if isinstance(item, Chunk):
                hear(item.text)
            yield item


class LastLine:
    """The last line of text that arrives in pieces, without control characters."""

    def __init__(self) -> None:
        self._tail = ""

    def feed(self, text: str) -> None:
        self._tail = (self._tail + text[-MAX_TAIL:])[-MAX_TAIL:]

    def __str__(self) -> str:
        lines = re.split(r"[\r\n]+", _CONTROL.sub("", self._tail))
        return next((line.strip()[:MAX_LINE] for line in reversed(lines) if line.strip()), "")
