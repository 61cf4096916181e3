"""Listening ports of the box, and connections to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

from hutch import wire

from .agent import READ_SIZE, RequestError, Responder

LISTENS = "0A"  # the state TCP_LISTEN in /proc/net/tcp
MAX_PORTS = 1000
TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}
HERE = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


async def list_ports(request: wire.Ports, responder: Responder) -> dict[str, object]:
    ports: set[tuple[int, str]] = set()
    for path, family in TABLES.items():
        with contextlib.suppress(FileNotFoundError), open(path) as table:
            next(table, None)
            ports.update(_listeners(family, table.read(1 << 20)))
    return {"ports": sorted(ports)[:MAX_PORTS]}


def _listeners(family: socket.AddressFamily, text: str) -> list[tuple[int, str]]:
    rows = [line.split() for line in text.splitlines()]
    sockets = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == LISTENS]
    return [(int(port, 16), _address(family, raw)) for raw, port in sockets]


def _address(family: socket.AddressFamily, raw: str) -> str:
    """An address of /proc/net: hexadecimal words in the byte order of the machine."""
    words = [int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)]
    return socket.inet_ntop(family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


async def dial(request: wire.Connect, responder: Responder) -> dict[str, object]:
    """Copy bytes both ways until both have ended. Raises RequestError if nothing listens."""
    loop = asyncio.get_running_loop()
    with await _connect(request.port) as sock:
        await responder.note(connected=True)
        giving = asyncio.create_task(_give(responder, sock))
        try:
            while data := await _receive(loop, sock):
                await responder.send(data)
            await responder.note(eof=True)
            await giving
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)
    return {}


async def _connect(port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    if not 0 < port < 1 << 16:
        raise RequestError("invalid_request", f"invalid port: {port}")
    for family, address in HERE:
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            await loop.sock_connect(sock, (address, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError:
            if sock:
                sock.close()
        except BaseException:
            if sock:
                sock.close()
            raise
    raise RequestError("not_found", f"nothing listens on port {port} of this box")


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    try:
        return await loop.sock_recv(sock, READ_SIZE)
    except OSError:
        return b""  # a reset is an end too


async def _give(responder: Responder, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # the program reads no more, but may still write
        async for data in responder.incoming():
            await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
