"""The server's end of a connection. No client is waited for without an end."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .frames import HEAD, BadMessage, length_of, pack


async def receive(client: socket.socket) -> bytes:
    """The body of a request; "{}" where KernelLite saw none."""
    head = await _exactly(client, HEAD)
    if not head:
        return b"{}"
    length = length_of(head) if len(head) == HEAD else HEAD
    body = await _exactly(client, length) if len(head) == HEAD else head
    if len(body) < length or len(head) < HEAD:
        raise BadMessage(f"the request broke off after {len(body)} of {length} bytes")
    return body or b"{}"


async def _exactly(client: socket.socket, size: int) -> bytes:
    """This many bytes, however small the pieces; fewer if there are no more."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(client, min(size - len(data), 1 << 20))
        if not piece:
            break
        data += piece
    return bytes(data)


@contextmanager
def hangup(client: socket.socket) -> Iterator[asyncio.Future[None]]:
    """Done when the other end is closed for good.

    Not when it only has nothing more to say: a client may shut down its sending side, and wait.
    An epoll that waits for nothing is told of exactly this one thing.
    """
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    with select.epoll() as watch:
        watch.register(client, 0)
        loop.add_reader(watch, _settle, gone)
        try:
            yield gone
        finally:
            loop.remove_reader(watch)
            gone.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def say(client: socket.socket, answer: Mapping[str, object]) -> None:
    """Without waiting: it is a few bytes, and there is no more time."""
    try:
        client.send(pack(answer))
    except OSError:
        pass
