"""Connections to guests, as backends make them."""

from __future__ import annotations

import asyncio
import socket


class SocketStream:
    """A ByteStream over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, at_most: int) -> bytes:
        return await self._loop.sock_recv(self._sock, at_most)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
