"""Connections to one server.

Two things that httpcore does otherwise:

- Its pool is for many servers and has limits. For each request it looks at every connection, and
  for each of these at every other: a hundred calls at once are seconds of work.
- It writes the head of a request, then its body. The first write wakes the server, which finds
  half of what it needs: on a busy machine that is a millisecond of each call.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpcore

ENOUGH = 64 * 1024


class AsyncConnectionPool:
    """Gives each request a connection that is free, or a new one."""

    def __init__(self, make: Callable[[], httpcore.AsyncHTTPConnection]) -> None:
        self._make = make
        self._free: list[httpcore.AsyncHTTPConnection] = []
        self._all: set[httpcore.AsyncHTTPConnection] = set()

    async def send(self, request: httpcore.Request) -> httpcore.Response:
        """When the response is closed, its connection is free for the next one, or closed."""
        connection = await self._take()
        self._all.add(connection)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._all.discard(connection)
            await connection.aclose()
            raise
        response.stream = AsyncPooledBody(response.stream, lambda: self._give_back(connection))
        return response

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        """The one that was used last: the others grow old, and are closed."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                connection = self._free.pop()
                if connection.is_idle() and not connection.has_expired():
                    return connection
                self._all.discard(connection)
                await connection.aclose()
        return self._make()

    def _give_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        if connection.is_idle():
            self._free.append(connection)
        else:
            self._all.discard(connection)

    async def aclose(self) -> None:
        self._free.clear()
        with contextlib.suppress(KeyError):
            while True:
                await self._all.pop().aclose()


class AsyncPooledBody:
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


class AsyncBufferedStream(httpcore.AsyncNetworkStream):
    """Keeps what is written until there is enough of it, or until an answer is wanted."""

    def __init__(self, real: httpcore.AsyncNetworkStream) -> None:
        self._real = real
        self._held = bytearray()

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._held += buffer
        if len(self._held) >= ENOUGH:
            await self._flush(timeout)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._held:
            try:
                await self._flush(timeout)
            except httpcore.WriteError:
                pass  # it does not listen any more, and perhaps said why
        return await self._real.read(max_bytes, timeout)

    async def _flush(self, timeout: float | None) -> None:
        data = bytes(self._held)
        self._held.clear()
        await self._real.write(data, timeout)

    async def aclose(self) -> None:
        await self._real.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return AsyncBufferedStream(
            await self._real.start_tls(ssl_context, server_hostname, timeout)
        )

    def get_extra_info(self, info: str) -> Any:
        return self._real.get_extra_info(info)


class AsyncBufferedBackend(httpcore.AsyncNetworkBackend):
    """Makes connections that send a request in one piece."""

    def __init__(self) -> None:
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return AsyncBufferedStream(
            await self._real.connect_tcp(host, port, timeout, local_address, socket_options)
        )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        return AsyncBufferedStream(
            await self._real.connect_unix_socket(path, timeout, socket_options)
        )
