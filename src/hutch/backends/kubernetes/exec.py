"""A program in a container, started through the cluster, and its standard streams.

The cluster carries them over a WebSocket (v5.channel.k8s.io). The first byte of a message says
which stream it belongs to; a message on channel 3 says how the program ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .address import Access, ClusterAddress

if TYPE_CHECKING:
    from websockets.client import ClientProtocol  # loaded with the first program

PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, CLOSED = 0, 1, 2, 3, 255
READ_SIZE = 1 << 18
PIECE = 1 << 16  # bytes of one message
PING = 20.0  # seconds: what balances the load before a cluster hangs up on the silent
LOST = 60_000  # milliseconds without an acknowledgement, after which a connection has ended


class HandshakeRefused(Exception):
    """The answer to the request for a program."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.content = status, content


class ProgramStatus(msgspec.Struct):
    status: str = ""
    message: str = ""


async def open_exec(address: ClusterAddress, access: Access, path: str) -> PodStreams:
    """Raises HandshakeRefused for any answer but a WebSocket, and OSError without one."""
    from websockets.client import ClientProtocol
    from websockets.typing import Subprotocol
    from websockets.uri import parse_uri

    server_name = address.server_name if access.tls else None
    reader, writer = await asyncio.open_connection(
        address.host,
        address.port,
        ssl=access.tls,
        server_hostname=server_name,
        limit=1 << 20,
    )
    try:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        uri = parse_uri("ws" + address.server.removeprefix("http") + path)
        protocol = ClientProtocol(uri, subprotocols=[Subprotocol(PROTOCOL)], max_size=None)
        request = protocol.connect()
        for name, value in access.headers:
            request.headers[name] = value
        protocol.send_request(request)
        streams = PodStreams(reader, writer, protocol)
        await streams.shake_hands()
    except BaseException:
        writer.transport.abort()
        raise
    return streams


class PodStreams:
    """The standard streams of one program. A ProgramStreams."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: ClientProtocol
    ) -> None:
        self._reader, self._writer, self._protocol = reader, writer, protocol
        self._received: list[tuple[bytes, bool]] = []
        self._part = bytearray()  # of a message that comes in several frames
        self._is_over = False
        self._pinging: asyncio.Task[None] | None = None

    async def shake_hands(self) -> None:
        from websockets.exceptions import InvalidStatus

        self._flush()
        while True:
            data = await self._reader.read(READ_SIZE)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            if (refused := self._protocol.handshake_exc) is not None:
                if isinstance(refused, InvalidStatus):
                    response = refused.response
                    raise HandshakeRefused(response.status_code, bytes(response.body or b""))
                raise ConnectionError(f"not a WebSocket: {refused}") from None
            if not data:
                raise ConnectionError("hung up")
            events = self._protocol.events_received()
            if events:
                break
        if self._protocol.subprotocol != PROTOCOL:
            raise ConnectionError(f"the cluster does not speak {PROTOCOL}: it is older than 1.30")
        self._take(events)
        self._flush()
        self._pinging = asyncio.create_task(self._ping())

    async def receive(self) -> tuple[bytes, bool] | None:
        while not self._received:
            if self._is_over:
                return None
            try:
                data = await self._reader.read(READ_SIZE)
            except OSError:
                data = b""
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
                self._is_over = True
            self._take(self._protocol.events_received())
            self._flush()
        return self._received.pop(0)

    def _take(self, events: Sequence[object]) -> None:
        from websockets.frames import Frame, Opcode

        for event in events:
            if not isinstance(event, Frame):
                continue  # the answer to our request
            if event.opcode is Opcode.CLOSE:
                self._is_over = True
            elif event.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
                self._part += event.data
                if event.fin and self._part:
                    message, self._part = bytes(self._part), bytearray()
                    self._take_message(message[0], message[1:])

    def _take_message(self, channel: int, data: bytes) -> None:
        if channel == STDOUT and data:
            self._received.append((data, False))
        elif channel == STDERR and data:
            self._received.append((data, True))
        elif channel == STATUS:
            self._is_over = True
            with contextlib.suppress(msgspec.DecodeError, ValueError):
                found = msgspec.json.decode(data, type=ProgramStatus)
                if found.status != "Success":
                    self._received.append((found.message.encode(), True))

    async def send(self, data: bytes) -> None:
        from websockets.exceptions import InvalidState

        view = memoryview(data)
        try:
            while view:
                piece, view = view[:PIECE], view[PIECE:]
                self._protocol.send_binary(bytes([STDIN]) + piece)
                self._flush()
                await self._writer.drain()
        except InvalidState:
            raise ConnectionResetError(104, "the program has ended") from None

    def close(self) -> None:
        self._is_over = True
        if self._pinging:
            self._pinging.cancel()
        self._writer.transport.abort()

    async def _ping(self) -> None:
        from websockets.exceptions import InvalidState

        # What acknowledges them is TCP (see LOST), for not every connection is read all the time.
        with contextlib.suppress(OSError, InvalidState):
            while not self._writer.transport.is_closing():
                await asyncio.sleep(PING)
                self._protocol.send_ping(b"")
                self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._writer.write(data)
            elif self._writer.can_write_eof():
                self._writer.write_eof()
