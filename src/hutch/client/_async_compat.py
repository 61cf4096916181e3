"""Parts of the async client from which no sync twin can be generated: see `_sync_compat.py`."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from asyncio import AbstractEventLoop, Lock, sleep
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from .parse import bytes_of, iterable_of

V = TypeVar("V")
Outcome = tuple[object, BaseException | None]


async def pieces_of(source: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The body of a request, piece by piece."""
    if isinstance(source, AsyncIterable):
        async for piece in source:
            yield bytes_of(piece)
    else:
        for piece in iterable_of(source):
            yield bytes_of(piece)


async def outcome(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Outcome:
    """What a function returned, and what it raised. One that blocks does not block the loop."""
    if inspect.iscoroutinefunction(function):
        return await _in_task(lambda: function(*args, **kwargs))
    value, error = await _in_thread(function, args, kwargs)
    return await _in_task(lambda: value) if inspect.isawaitable(value) else (value, error)


async def _in_task(work: Callable[[], Awaitable[object]]) -> Outcome:
    """In a task of its own: a function may cancel its task, which must not cancel ours."""

    async def run() -> Outcome:
        try:
            return await work(), None
        except BaseException as exc:  # SystemExit would end the event loop
            return None, exc

    ended = await asyncio.create_task(run())
    task = asyncio.current_task()
    if task and task.cancelling():
        raise asyncio.CancelledError
    return ended


def _in_thread(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> asyncio.Future[Outcome]:
    """In a daemon thread of its own: calls run side by side, and a stuck one delays no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()
    context = contextvars.copy_context()

    def settle(ended: Outcome) -> None:
        if not future.done():  # not cancelled
            future.set_result(ended)

    def run() -> None:
        ended: Outcome
        try:
            ended = context.run(function, *args, **kwargs), None
        except BaseException as exc:
            ended = None, exc
        try:
            loop.call_soon_threadsafe(settle, ended)
        except RuntimeError:
            pass  # the loop is closed, so nothing waits for this

    threading.Thread(target=run, name="hutch call", daemon=True).start()
    return future


class BackgroundTasks:
    """Background tasks that end with their owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        task = asyncio.create_task(work(*args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel them, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:  # `gather` needs an event loop, and code that is stepped by hand has none
            await asyncio.gather(*tasks, return_exceptions=True)


class PerLoop(Generic[V]):
    """One value for each event loop, closed at the end of the loop."""

    def __init__(self, make: Callable[[], V], close: Callable[[V], Awaitable[None]]) -> None:
        self._make, self._close = make, close
        self._values: WeakKeyDictionary[AbstractEventLoop, V] = WeakKeyDictionary()
        self._closers: WeakKeyDictionary[AbstractEventLoop, AsyncGenerator[None, None]]
        self._closers = WeakKeyDictionary()

    async def get(self) -> V:
        """The value of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            self._values[loop] = self._make()
            closer = self._closers[loop] = self._close_with(loop)
            await anext(closer)
        return self._values[loop]

    async def _close_with(self, loop: AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield  # asyncio.run closes unfinished generators
        finally:
            await self._close(self._values.pop(loop))


__all__ = ["BackgroundTasks", "Lock", "PerLoop", "outcome", "pieces_of", "sleep"]
