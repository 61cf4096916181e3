"""What takes operations to an engine: in this process, or, later, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hutch.operations import Operation


class AsyncCarrier(Protocol):
    async def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an async iterator if it streams."""

    async def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


class Carrier(Protocol):
    def perform(self, operation: Operation) -> Any:
        """The operation's answer: a value, or an iterator with `close` if it streams."""

    def last(self, operation: Operation) -> Any:
        """Of an operation that streams, the last item, for whom the others are of no interest."""


def _none() -> Any:
    raise RuntimeError("import Sandbox and AsyncSandbox from `hutch`, not from `hutch.client`")


# Set by `hutch.local`, which knows the engine; this package does not.
async_carrier: Callable[[], AsyncCarrier] = _none
carrier: Callable[[], Carrier] = _none
