"""What listens in a box can be seen, and talked to, from outside."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import wire
from hutch.engine.session import Tunnel
from hutch.errors import InvalidRequest, NotFound

MiB = 1024 * 1024


async def _all(tunnel: Tunnel) -> bytes:
    whole = b""
    while data := await tunnel.read(65536):
        whole += data
    return whole


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says it all again, but only once it has heard the end."""
    data = await reader.read()
    writer.write(data[::-1])
    await writer.drain()
    writer.close()


async def _listen(handler: object, host: str = "127.0.0.1") -> tuple[asyncio.Server, int]:
    # Outside a box, the guest has the test's own network.
    server = await asyncio.start_server(handler, host, 0)  # type: ignore[arg-type]
    return server, server.sockets[0].getsockname()[1]


def test_ports_are_listed_with_the_address_they_are_bound_to(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("0.0.0.0", 0)) as two,
            socket.create_server(("::1", 0), family=socket.AF_INET6) as three,
            socket.socket() as silent,
        ):
            silent.bind(("127.0.0.1", 0))
            found = {tuple(p) for p in (await guest.link.ask(wire.Ports()))["ports"]}
            for sock, address in ((one, "127.0.0.1"), (two, "0.0.0.0"), (three, "::1")):
                assert (sock.getsockname()[1], address) in found
            assert silent.getsockname()[1] not in {port for port, _ in found}

    with_guest(tmp_path, work)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_go_both_ways_and_each_way_ends_by_itself(tmp_path: Path, host: str) -> None:
    async def work(guest: Guest) -> None:
        server, port = await _listen(_echo, host)
        async with server:
            data = bytes(range(256)) * (3 * MiB // 256)
            tunnel = await Tunnel.open(guest.link, port)
            await tunnel.write(data)
            tunnel.end()
            assert await _all(tunnel) == data[::-1]
            tunnel.close()

    with_guest(tmp_path, work)


def test_where_nothing_listens_there_is_nothing_to_be_had(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(NotFound, match="nothing listens"):
                await Tunnel.open(guest.link, bound.getsockname()[1])
        with pytest.raises(InvalidRequest):
            await Tunnel.open(guest.link, 70_000)

    with_guest(tmp_path, work)


def test_a_connection_that_is_closed_here_ends_there_and_leaves_nothing(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.put_nowait(await reader.readexactly(2))
            heard.put_nowait(await reader.read())
            writer.close()

        server, port = await _listen(listen)
        async with server:
            before = guest.open_files()
            for _ in range(20):
                tunnel = await Tunnel.open(guest.link, port)
                await tunnel.write(b"hi")
                assert await heard.get() == b"hi"
                tunnel.close()
                assert await heard.get() == b""
            while guest.open_files() != before:
                await asyncio.sleep(0.02)

    with_guest(tmp_path, work)


def test_who_does_not_read_stops_who_writes_and_nobody_else(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        sent = 0

        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            try:
                while sent < 256 * MiB:
                    writer.write(bytes(65536))
                    sent += 65536
                    await writer.drain()
            except ConnectionError:
                writer.close()

        server, port = await _listen(flood)
        async with server:
            tunnel = await Tunnel.open(guest.link, port)
            before = -1
            while sent != before:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 32 * MiB
            assert await guest.shell("echo free") == (0, "free\n")
            tunnel.close()

    with_guest(tmp_path, work)
