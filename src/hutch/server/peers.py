"""The way to another server that shares our sessions: over HTTP, as any client would go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from hutch import codec
from hutch.client._async_http import AsyncHttpTransport
from hutch.client.http import NotReached, address_of
from hutch.client.transport import Server
from hutch.errors import Unauthorized
from hutch.operations import Operation, StreamOperation

from .replicas import PeerLost

T = TypeVar("T")
ItemT = TypeVar("ItemT")
CONNECT = 1.0  # seconds to reach another server
HANDSHAKE = 30.0  # seconds for it to reach a port in a box


class HttpPeer:
    """A way to another server that shares our sessions. A Peer."""

    def __init__(self, url: str, key: str) -> None:
        self._at, self._key = address_of(url), key
        self._transport = AsyncHttpTransport(Server(url, key), patience=CONNECT)

    async def perform(self, operation: Operation[T]) -> T:
        with _as_lost():
            return await self._transport.perform(operation)

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        with _as_lost():
            items = await self._transport.stream(operation)
            async with contextlib.aclosing(items):
                if operation.items is bytes:
                    yield cast(ItemT, b"")
                async for item in items:
                    yield item

    async def dial(self, session: str, port: int) -> PortTunnel:
        """A TCP connection to a port in a box. Raises PeerLost, and what the server answers."""
        scheme = self._at.scheme.replace("http", "ws")
        url = f"{scheme}://{self._at.authority}{self._at.prefix}"
        try:
            return PortTunnel(
                await connect(
                    f"{url}/v1/sessions/{session}/ports/{port}/tcp",
                    additional_headers={"Authorization": f"Bearer {self._key}"},
                    user_agent_header="hutch",
                    compression=None,
                    max_size=None,
                    proxy=None,
                    open_timeout=HANDSHAKE,
                )
            )
        except InvalidStatus as exc:
            answer = exc.response
            with _as_lost():
                raise codec.error_from_json(answer.status_code, bytes(answer.body or b"")) from None
        except (OSError, TimeoutError, InvalidHandshake) as exc:
            raise PeerLost from exc


class PortTunnel:
    """A ByteStream over the WebSocket of a port."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._unread = socket, b""

    async def read(self, at_most: int) -> bytes:
        while not self._unread:
            try:
                message = await self._socket.recv()
            except ConnectionClosed:
                return b""
            if isinstance(message, bytes):
                self._unread = message
        data, self._unread = self._unread[:at_most], self._unread[at_most:]
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self._socket.send(data)
        except ConnectionClosed:
            raise ConnectionResetError(104, "the port hung up") from None

    def close(self) -> None:
        self._socket.transport.abort()


@contextlib.contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except (NotReached, Unauthorized) as exc:  # to a request of ours, the latter says just that
        raise PeerLost from exc
