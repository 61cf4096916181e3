"""Transports to servers that find the right connection pool: of this event loop, or process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from typing import TypeVar

from hutch.operations import Operation, StreamOperation

from ._async_http import AsyncHttpTransport
from ._async_stream import AsyncItems
from ._sync_http import HttpTransport
from ._sync_stream import Items
from .address import address_of
from .transport import Server

T = TypeVar("T")
ItemT = TypeVar("ItemT")
Loop = asyncio.AbstractEventLoop
_in_loop: weakref.WeakKeyDictionary[Loop, dict[Server, AsyncHttpTransport]]
_in_loop = weakref.WeakKeyDictionary()
_keepers: weakref.WeakKeyDictionary[Loop, AsyncGenerator[None, None]] = weakref.WeakKeyDictionary()
_in_process: dict[Server, HttpTransport] = {}
_lock = threading.Lock()
_of_parent: list[dict[Server, HttpTransport]] = []


class AsyncRemoteTransport:
    """To one server, from any event loop."""

    def __init__(self, server: Server) -> None:
        address_of(server.url)  # reports a wrong one now
        self._server = server

    async def perform(self, operation: Operation[T]) -> T:
        return await (await self._reach()).perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncItems[ItemT]:
        return await (await self._reach()).stream(operation)

    async def _reach(self) -> AsyncHttpTransport:
        loop = asyncio.get_running_loop()
        if loop not in _keepers:
            _in_loop[loop] = {}
            _keepers[loop] = _keep(loop)
            await anext(_keepers[loop])
        transports = _in_loop[loop]
        if self._server not in transports:
            transports[self._server] = AsyncHttpTransport(self._server)
        return transports[self._server]


async def _keep(loop: Loop) -> AsyncGenerator[None, None]:
    """Closes the connections of a loop at its end: asyncio.run closes unfinished generators."""
    try:
        yield
    finally:
        _keepers.pop(loop, None)
        for transport in _in_loop.pop(loop, {}).values():
            await transport.aclose()


class RemoteTransport:
    """To one server, from any thread, also after a fork."""

    def __init__(self, server: Server) -> None:
        address_of(server.url)
        self._server = server

    def perform(self, operation: Operation[T]) -> T:
        return self._reach().perform(operation)

    def stream(self, operation: StreamOperation[ItemT, T]) -> Items[ItemT]:
        return self._reach().stream(operation)

    def _reach(self) -> HttpTransport:
        with _lock:
            if self._server not in _in_process:
                _in_process[self._server] = HttpTransport(self._server)
            return _in_process[self._server]


def _after_fork() -> None:
    """Forget the connections of the parent: reading from one would take its answers."""
    global _in_process, _lock
    _of_parent.append(_in_process)  # kept alive: closing one would end it for the parent
    _in_process, _lock = {}, threading.Lock()


@atexit.register
def close() -> None:
    """Close all connections of this process. The next call makes new ones."""
    with _lock:
        transports = [*_in_process.values()]
        _in_process.clear()
    for transport in transports:
        transport.close()


os.register_at_fork(after_in_child=_after_fork)
