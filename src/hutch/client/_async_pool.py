"""Connections to one server: each request takes one that is free, or makes one.

httpcore has a pool for many servers and with limits. For each request it looks at every
connection, and for each of these at every other: a hundred calls at once are seconds of work.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpcore

Make = Callable[[], httpcore.AsyncHTTPConnection]


class AsyncLines:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._free: list[httpcore.AsyncHTTPConnection] = []
        self._all: set[httpcore.AsyncHTTPConnection] = set()

    async def send(self, request: httpcore.Request) -> httpcore.Response:
        """When the response is closed, its connection is free for the next one, or closed."""
        line = await self._take()
        self._all.add(line)
        try:
            response = await line.handle_async_request(request)
        except BaseException:
            self._all.discard(line)
            await line.aclose()
            raise
        response.stream = AsyncBody(response.stream, lambda: self._give_back(line))
        return response

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        """The one that was used last: the others grow old, and are closed."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                line = self._free.pop()
                if line.is_idle() and not line.has_expired():
                    return line
                self._all.discard(line)
                await line.aclose()
        return self._make()

    def _give_back(self, line: httpcore.AsyncHTTPConnection) -> None:
        if line.is_idle():
            self._free.append(line)
        else:
            self._all.discard(line)

    async def aclose(self) -> None:
        self._free.clear()
        with contextlib.suppress(KeyError):
            while True:
                await self._all.pop().aclose()


class AsyncBody:
    """The body of a response; `freed` is called when it is closed."""

    def __init__(self, body: Any, freed: Callable[[], None]) -> None:
        self._body, self._freed = body, freed
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._body.aclose()
        finally:
            self._freed()
