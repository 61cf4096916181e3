"""The bridge between sync and async code, in both directions.

Sync code waits for a coroutine in the event loop of another thread: `run_in_loop`. Async code uses
a sync transport, and blocks its own thread (`call_here`) or another one (`call_in_thread`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import wait
from typing import Protocol, TypeVar, cast

from hutch.operations import Operation, StreamOperation, last_of

from ._async_compat import outcome
from ._sync_stream import Items
from .transport import Transport

T = TypeVar("T")
ItemT = TypeVar("ItemT")
_END = object()


def run_in_loop(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[object, object, T],
    *,
    check: Callable[[], object] | None = None,
    every: float = 1.0,
) -> T:
    """Run a coroutine in the event loop of another thread, and wait for its result.

    `check` is called every so many seconds while this waits. The coroutine is cancelled if `check`
    raises, or if the wait is interrupted (Ctrl-C).
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        if check:
            while not wait([future], every).done:
                check()
        return future.result()
    except BaseException:
        future.cancel()
        raise


def run_without_loop(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine that never suspends, such as one that uses `call_here` only.

    Raises RuntimeError if it does suspend.
    """
    try:
        work.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    work.close()
    raise RuntimeError("a tool awaited something other than its box")


class CallBlocking(Protocol):
    """Makes a blocking call in async code."""

    async def __call__(self, work: Callable[..., T], /, *args: object) -> T: ...


async def call_here(work: Callable[..., T], /, *args: object) -> T:
    """Block in this thread. Never suspends."""
    return work(*args)


async def call_in_thread(work: Callable[..., T], /, *args: object) -> T:
    """Call it in a thread that does not keep the program from exiting."""
    value, error = await outcome(work, args, {})
    if error is not None:
        raise error
    return cast("T", value)


class BlockingTransport:
    """A sync transport for async code. `call` makes its blocking calls: here, or in threads."""

    def __init__(self, inner: Transport, call: CallBlocking) -> None:
        self._inner, self._call = inner, call

    async def perform(self, operation: Operation[T]) -> T:
        if self._call is call_in_thread and isinstance(operation, StreamOperation):
            # Item by item, so that it can be cancelled: a thread that blocks on the whole answer
            # cannot be stopped.
            return await last_of(operation, await self.stream(operation))
        return await self._call(self._inner.perform, operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        return stepped(await self._call(self._inner.stream, operation), self._call)


async def stepped(source: Items[ItemT], call: CallBlocking) -> AsyncGenerator[ItemT, None]:
    """The items of a sync stream, for async code. Closing it closes the stream."""
    try:
        while (item := await call(next, source, _END)) is not _END:
            yield item
    finally:
        # Also while a thread still waits for the next item: closing ends the wait.
        await call(source.close)
