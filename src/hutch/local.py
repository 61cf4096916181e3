"""Composes the embedded Hutch: the client, an engine in this process, and its backend.

An engine belongs to one event loop. Async code uses one in its own loop; sync code shares
one in a thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import CancelledError
from importlib import import_module
from types import ModuleType
from typing import Generic, TypeVar

from . import factory
from .client import transport
from .client._async import (
    AsyncCommands,
    AsyncHandle,
    AsyncSandbox,
    AsyncShell,
    AsyncTerminal,
)
from .client._async_compat import PerLoop
from .client._async_files import AsyncFiles
from .client._sync import Commands, Handle, Sandbox, Shell, Terminal
from .client._sync_files import Files
from .client.bridge import run_in_loop
from .engine.engine import Engine, Engines
from .errors import BoxLost
from .operations import Operation, StreamOperation

T = TypeVar("T")
ItemT = TypeVar("ItemT")


def _make_engines() -> Engines:
    """Engines for one event loop, one for each backend."""
    return Engines(_make_engine, factory.default())


def _make_engine(backend: str) -> Engine:
    return Engine(factory.backend(backend), factory.image_source(backend), factory.data_folder)


async def _close_engines(engines: Engines) -> None:
    # The loop is shutting down, and would warn about each async generator started from here.
    sys.set_asyncgen_hooks(firstiter=None)
    await engines.close()


ENGINES = PerLoop(_make_engines, _close_engines)


class AsyncEmbeddedTransport:
    """To the engines of the running event loop."""

    async def perform(self, operation: Operation[T]) -> T:
        return await (await ENGINES.get()).perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        return await (await ENGINES.get()).stream(operation)


class EmbeddedTransport:
    """To engines in a thread with an event loop, which all sync code shares."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hutch", daemon=True)
        self._thread.start()
        self._engines = _make_engines()
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def is_ours(self) -> bool:
        return self._owner == os.getpid()

    def perform(self, operation: Operation[T]) -> T:
        # One round trip between threads, instead of one for each piece of output.
        return self.run(self._engines.perform(operation))

    def stream(self, operation: StreamOperation[ItemT, T]) -> EmbeddedStream[ItemT]:
        return EmbeddedStream(self, self.run(self._engines.stream(operation)))

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Wait for `work`. An interrupt (Ctrl-C) cancels it. Raises BoxLost in a fork."""
        if not self.is_ours:
            work.close()
            raise BoxLost("this box belongs to the process that made it, and this is a fork of it")
        return run_in_loop(self._loop, work)

    def close(self) -> None:
        if not self.is_ours:
            return
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._engines.close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)


class EmbeddedStream(Generic[ItemT]):
    """Steps through an async iterator in the thread of the engines.

    It may be closed while another thread waits for the next item: there it ends.
    """

    def __init__(self, transport: EmbeddedTransport, source: AsyncGenerator[ItemT, None]) -> None:
        self._transport, self._source = transport, source
        self._steps: set[asyncio.Task[object]] = set()  # several threads may wait for an item
        self._turn = asyncio.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        try:
            return self._transport.run(self._advance())
        except StopAsyncIteration:
            raise StopIteration from None
        except CancelledError:
            if not self._closed:
                raise
            raise StopIteration from None

    def close(self) -> None:
        self._transport.run(self._finish())

    async def _advance(self) -> ItemT:
        step = asyncio.current_task()
        assert step
        self._steps.add(step)
        try:
            async with self._turn:
                return await anext(self._source)
        finally:
            self._steps.discard(step)

    async def _finish(self) -> None:
        self._closed = True
        steps = set(self._steps)
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)
        async with self._turn:
            await self._source.aclose()


_embedded: EmbeddedTransport | None = None
_embedded_lock = threading.Lock()


def embedded() -> EmbeddedTransport:
    """The one of this process. A fork gets a new one, since it has no thread of ours."""
    global _embedded
    with _embedded_lock:
        if _embedded is None or not _embedded.is_ours:
            _embedded = EmbeddedTransport()
        return _embedded


def _tools() -> ModuleType:
    # Loaded late: most programs do not use the tools of agents.
    return import_module(".tools", __package__)


transport.embedded_async = AsyncEmbeddedTransport
transport.embedded = embedded
transport.tools = _tools

__all__ = [
    "AsyncCommands",
    "AsyncFiles",
    "AsyncHandle",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncTerminal",
    "Commands",
    "Files",
    "Handle",
    "Sandbox",
    "Shell",
    "Terminal",
]
