"""Sends operations to one server over HTTP.

`codec` encodes operations and decodes answers; `Attempts` decides what is sent again. A stream has
a connection of its own: leaving it closes the connection, and the server then stops the command.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, cast
from uuid import uuid4

import httpcore

from hutch import codec
from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest, ServerUnavailable, Unauthorized
from hutch.operations import Operation, StreamOperation
from hutch.types import Execution, Result

from ._async_compat import Lock, PerLoop, pieces_of, sleep
from ._async_stream import AsyncItems
from .http import KEEPALIVE, Attempts, Events, address_of
from .transport import Server

ENOUGH = 64 * 1024


class AsyncConnectionPool:
    """Gives each request an idle connection, or a new one.

    httpcore's own pool takes more CPU, above all with many requests at once: docs/decisions/009.
    """

    def __init__(self, make: Callable[[], httpcore.AsyncHTTPConnection]) -> None:
        self._make = make
        self.reached = False  # the server has answered once
        self._free: list[httpcore.AsyncHTTPConnection] = []
        self._all: set[httpcore.AsyncHTTPConnection] = set()

    async def send(self, request: httpcore.Request) -> httpcore.Response:
        """Send a request. Closing the response frees its connection, or closes it."""
        connection = await self._take()
        self._all.add(connection)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._all.discard(connection)
            await connection.aclose()
            raise
        body = cast(AsyncItems[bytes], response.stream)
        response.stream = AsyncPooledBody(body, lambda: self._give_back(connection))
        return response

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        """The one used last, so that the others expire and are closed."""
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

    def __init__(self, body: AsyncItems[bytes], freed: Callable[[], None]) -> None:
        self._body, self._freed = body, freed
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._body.__aiter__()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._body.aclose()
        finally:
            self._freed()


class AsyncBufferedStream(httpcore.AsyncNetworkStream):
    """Buffers writes until there is enough to send, or until something is read.

    httpcore writes head and body separately, which would be two packets.
    """

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
                pass  # the server closed its side, and may have sent an error before
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
    """Opens connections that send a request in one piece."""

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


T = TypeVar("T")
ItemT = TypeVar("ItemT")

CONNECT = 10.0
FIRST_CONNECT = 3.0  # to a server that has not answered yet
# On a stream, the server sends a heartbeat every 15 seconds.
SILENCE = 60.0
# Shorter than servers and proxies wait, so that none closes a connection that we are about to use.
IDLE = 15.0
PIECE = 1024 * 1024  # of a program's input
MAX_ANSWER = 64 * 1024 * 1024
NO_CONNECTION = (httpcore.ConnectError, httpcore.ConnectTimeout)
LOST = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
JSON, EVENTS, ANY = "application/json", "text/event-stream", "*/*"


async def _close_all(pools: dict[Server, AsyncConnectionPool]) -> None:
    for pool in pools.values():
        await pool.aclose()


POOLS: PerLoop[dict[Server, AsyncConnectionPool]] = PerLoop(dict, _close_all)


class AsyncHttpTransport:
    """Sends operations to a server.

    All transports to one server share connections: those of one event loop; or, in the sync twin,
    those of one process.
    """

    def __init__(self, server: Server, *, patience: float | None = None) -> None:
        """`patience`: seconds for a connection, and nothing is tried twice; None: be patient.

        Impatient ones share connections whatever their keys are, for they may have any number.
        Raises InvalidRequest if the url is wrong.
        """
        self._server, self._patience = server, patience
        self._pooled = server if patience is None else Server(server.url)
        self._at = address_of(server.url)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._at.url}>"

    async def perform(self, operation: Operation[T]) -> T:
        """Carry out one operation, and return its answer; of a stream, only the result."""
        if isinstance(operation, StreamOperation) and operation.answer is None:
            async with contextlib.aclosing(await self.stream(operation)) as items:
                async for _ in items:
                    pass
            return cast(T, None)
        body = b""
        for request in _requests_for(operation):
            body = await self._value(request)
        with self._understood():
            return codec.answer_from_json(operation, body)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncHttpStream[ItemT]:
        """Carry out one operation, item by item. It is sent when the first item is requested.

        A stream of bytes is sent at once, so that a missing file is reported by this call.
        """
        stream = AsyncHttpStream(self, operation)
        if operation.items is bytes:
            await anext(stream)  # an empty piece: the response has begun
        return stream

    async def aclose(self) -> None:
        """Close its connections. The next request makes new ones."""
        pools = await POOLS.get()
        pool = pools.pop(self._pooled, None)
        if pool is not None:
            await pool.aclose()

    async def _pool(self) -> AsyncConnectionPool:
        pools = await POOLS.get()
        pool = pools.get(self._pooled)
        if pool is None:
            at = self._at
            make = partial(
                httpcore.AsyncHTTPConnection,
                httpcore.Origin(at.scheme.encode(), at.host.encode(), at.port),
                ssl_context=ssl.create_default_context() if at.scheme == "https" else None,
                keepalive_expiry=IDLE,
                uds=at.socket,
                network_backend=AsyncBufferedBackend(),
                socket_options=None if at.socket else KEEPALIVE,
            )
            # Another thread may have made one by now.
            pool = pools.setdefault(self._pooled, AsyncConnectionPool(make))
        return pool

    def _attempts(self, operation: Operation[object], pool: AsyncConnectionPool) -> Attempts:
        patient = self._patience is None
        return Attempts(operation, self._at.url, reached=pool.reached, patient=patient)

    # --- answers ------------------------------------------------------------------------

    async def _value(self, operation: Operation[object]) -> bytes:
        pool = await self._pool()
        attempts = self._attempts(operation, pool)
        while True:
            response = await self._send(pool, operation, JSON, attempts)
            try:
                return await self._body(response)
            except LOST:
                pause = attempts.after_loss()
            finally:
                await response.aclose()
            await sleep(pause)

    async def _send(
        self,
        pool: AsyncConnectionPool,
        operation: Operation[object],
        accept: str,
        attempts: Attempts,
    ) -> httpcore.Response:
        """A successful response, which the caller must close."""
        encoded = codec.request_of(operation)
        while True:
            try:
                connect = self._patience or (CONNECT if pool.reached else FIRST_CONNECT)
                response = await pool.send(self._request(encoded, accept, connect))
            except NO_CONNECTION as exc:
                pause = attempts.after_no_connection(exc)
            except LOST:
                pause = attempts.after_loss()
            else:
                pool.reached = True
                if 200 <= response.status < 300:
                    return response
                error = await self._error(response, attempts)
                pause = attempts.after_refusal(error, _retry_after(response))
            await sleep(pause)

    def _request(
        self, encoded: codec.EncodedRequest, accept: str, connect: float
    ) -> httpcore.Request:
        headers = [("Host", self._at.authority), ("Accept", accept), ("User-Agent", "hutch")]
        if self._server.api_key is not None:
            headers.append(("Authorization", f"Bearer {self._server.api_key}"))
        content: codec.Data | None = encoded.body
        if encoded.body is not None:
            headers.append(("Content-Type", "application/json"))
        elif encoded.stream is not None:
            headers.append(("Content-Type", "application/octet-stream"))
            content = encoded.stream
        if content is None or isinstance(content, bytes):
            if content is not None or encoded.verb in ("POST", "PUT"):
                headers.append(("Content-Length", str(len(content or b""))))
        else:
            headers.append(("Transfer-Encoding", "chunked"))
            content = pieces_of(content)
        url = httpcore.URL(
            scheme=self._at.scheme,
            host=self._at.host,
            port=self._at.port,
            target=self._at.target(encoded),
        )
        silence = SILENCE if accept == EVENTS else None
        extensions = {"timeout": {"connect": connect, "read": silence}}
        return httpcore.Request(
            encoded.verb, url, headers=headers, content=content, extensions=extensions
        )

    async def _body(self, response: httpcore.Response) -> bytes:
        pieces, size = [], 0
        async for piece in response.aiter_stream():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER:
                raise ServerUnavailable(f"{self._at.url} sent more than {MAX_ANSWER} bytes")
        return b"".join(pieces)

    async def _error(self, response: httpcore.Response, attempts: Attempts) -> HutchError:
        try:
            body = await self._body(response)
        except LOST:
            return attempts.lost()
        finally:
            await response.aclose()
        if response.status == 401 and self._server.api_key is None:
            return Unauthorized(f"{self._at.url} needs a key: set HUTCH_API_KEY, or api_key=")
        with self._understood():
            error = codec.error_from_json(response.status, body)
        if isinstance(error, Unauthorized):
            return Unauthorized(f"{error}: set a valid key in HUTCH_API_KEY, or pass api_key=")
        return error

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """An answer that the codec refuses is the server's fault, not the caller's."""
        try:
            yield
        except InvalidRequest as exc:
            message = f"{self._at.url} sent an answer that is not one of Hutch: {exc}"
            raise ServerUnavailable(message) from None

    # --- streams ------------------------------------------------------------------------

    async def items(
        self, operation: StreamOperation[ItemT, T], connection: StreamConnection
    ) -> AsyncGenerator[ItemT, None]:
        """Each item as it arrives. The result comes last, once the connection is free again."""
        pool = await self._pool()
        attempts = self._attempts(operation, pool)
        raw = operation.items is bytes
        response = await self._send(pool, operation, ANY if raw else EVENTS, attempts)
        connection.response = response
        done: ItemT | None = None
        try:
            if connection.is_cut:
                return
            source = response.aiter_stream()
            if raw:
                yield cast(ItemT, b"")
                async for piece in source:
                    yield cast(ItemT, piece)
                return
            events = Events()
            async for piece in source:
                for name, data in events.feed(piece):
                    with self._understood():
                        item = codec.item_from(operation, name, data)
                    if isinstance(item, HutchError):
                        raise item
                    if isinstance(item, Result | Execution):
                        done = item
                    else:
                        yield item
        except LOST:
            if done is None:
                raise attempts.lost() from None
        finally:
            connection.response = None
            await response.aclose()
        if done is not None:
            yield done
        elif operation.answer is not None:
            raise attempts.lost()


class StreamConnection:
    """The connection of a stream, which one thread can cut while another reads from it."""

    response: httpcore.Response | None = None
    is_cut = False

    def cut(self) -> None:
        """End the stream for its reader: now, or when the response begins."""
        self.is_cut = True
        if self.response is not None:
            stream = self.response.extensions["network_stream"]
            with contextlib.suppress(OSError, AttributeError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class AsyncHttpStream(Generic[ItemT]):
    """The items of an operation.

    It may be closed while another thread or task waits for the next item: there it ends.
    """

    def __init__(self, transport: AsyncHttpTransport, operation: StreamOperation[ItemT, T]) -> None:
        self._connection = StreamConnection()
        self._source = transport.items(operation, self._connection)
        self._turn = Lock()

    def __aiter__(self) -> AsyncHttpStream[ItemT]:
        return self

    async def __anext__(self) -> ItemT:
        async with self._turn:
            try:
                return await anext(self._source)
            except ServerUnavailable:
                if self._connection.is_cut:
                    raise StopAsyncIteration from None
                raise

    async def aclose(self) -> None:
        """End it, and the operation. Idempotent."""
        if self._turn.locked():
            self._connection.cut()
        async with self._turn:
            await self._source.aclose()


def _requests_for(operation: Operation[object]) -> Iterator[Operation[object]]:
    """The requests to send: long input in pieces, and an OpenSession that can be sent again."""
    match operation:
        case op.SendInput(data=data) if len(data) > PIECE:
            for start in range(0, len(data), PIECE):
                yield replace(operation, data=data[start : start + PIECE])
        case op.OpenSession(idempotency_key=None):
            yield replace(operation, idempotency_key=uuid4().hex)
        case _:
            yield operation


def _retry_after(response: httpcore.Response) -> float | None:
    for name, value in response.headers:
        if name.lower() == b"retry-after" and value.strip().isdigit():
            return float(value)
    return None
