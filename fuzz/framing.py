"""Fuzz HTTP framing with pipelining: what is one request to us is one to others, and none piles up.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/framing.py -max_total_time=60 corpus

The first byte of an input says in what pieces the rest is received, the second how the requests
are answered: at once or late, with their body read or not. Promised:

- nothing is raised, and nothing is logged;
- few requests are queued, and nothing is received while they are;
- the same bytes in other pieces are the same requests, up to where one of the two was refused;
- h11, which reads HTTP as proxies and clients do, sees the same requests with the same bodies;
- when the connection is gone, nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

try:
    import atheris
except ImportError:  # the target itself is still checked by tests/test_fuzzing.py
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.server.http", "uvicorn.protocols"]):
        from hutch.server.http import http_protocol
else:
    from hutch.server.http import http_protocol

import h11
from uvicorn.config import Config
from uvicorn.server import ServerState

from hutch.server.http.limits import ConnectionLimits

LATE, LEAVES_BODY = 1, 2  # bits of the second byte
Request = tuple[bytes, bytes, bytes]  # method, target, body


class Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


COMPLAINTS = Complaints()
for _name in ("uvicorn.error", "asyncio", "websockets"):
    logging.getLogger(_name).addHandler(COMPLAINTS)


class Transport(asyncio.Transport):
    """A connection in memory, whose peer reads everything."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.protocol: Any = None
        self.written = bytearray()
        self.is_paused = self.is_lost = False
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self.written += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.is_lost = True
        self.protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class Answers:
    """The ASGI application: notes each request that it has got whole."""

    def __init__(self, how: int) -> None:
        self.how = how
        self.requests: list[Request] = []
        self.gate = asyncio.Event()  # for those that are answered late
        if not how & LATE:
            self.gate.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
            return
        body, more = b"", not self.how & LEAVES_BODY
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        target = scope["raw_path"] + b"?" + scope["query_string"]
        self.requests.append((scope["method"].encode(), target, body))
        await self.gate.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def served(data: bytes, step: int, how: int) -> list[Request]:
    """What the application got of these bytes."""
    app, limits, state = Answers(how), ConnectionLimits(), ServerState()
    config = Config(app, http="httptools", ws="websockets-sansio", lifespan="off", log_config=None)
    config.load()
    transport = Transport()
    protocol = http_protocol.HTTPProtocol(config, state, limits, local=False)
    transport.protocol = protocol
    protocol.connection_made(transport)
    for at in range(0, len(data), step):
        if transport.is_closing():
            break
        transport.protocol.data_received(data[at : at + step])
        # The smallest has 18 bytes, and no slice is parsed while one waits.
        assert len(protocol.pipeline) <= http_protocol.SLICE // 18 + 1, len(protocol.pipeline)
        assert len(protocol._unparsed) <= step
        for _ in range(100_000):
            if transport.is_closing() or not transport.is_paused:
                break
            app.gate.set()  # nothing is received any more: so whatever waits is answered
            await asyncio.sleep(0)
        else:
            raise AssertionError("reading was paused, and is not resumed")
        if how & LATE:
            app.gate.clear()
    app.gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    transport.abort()
    for _ in range(100_000):
        if not state.tasks and transport.is_lost:
            break
        await asyncio.sleep(0)
    assert not state.tasks
    assert not limits.count and not state.connections
    return app.requests


def read_by_h11(data: bytes) -> list[Request]:
    """What another parser makes of them, until it refuses something or the connection ends."""
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    peer.receive_data(data)
    found: list[Request] = []
    method = target = body = b""
    try:
        while True:
            event = peer.next_event()
            if isinstance(event, h11.Request):
                method, target, body = event.method, event.target, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                path, _, query = target.partition(b"?")
                found.append((method, path + b"?" + query, body))
                peer.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                peer.send(h11.EndOfMessage())
                if peer.our_state is not h11.DONE or peer.their_state is not h11.DONE:
                    return found
                peer.start_next_cycle()
            else:
                return found
    except h11.ProtocolError:
        return found


def one_input(data: bytes) -> None:
    if len(data) < 3:
        return
    step, how, data = data[0] or len(data), data[1] & 3, data[2:]
    COMPLAINTS.lines.clear()
    whole = asyncio.run(served(data, len(data), how & ~LATE))
    split = asyncio.run(served(data, step, how))
    assert not COMPLAINTS.lines, COMPLAINTS.lines
    assert all(one == other for one, other in zip(whole, split, strict=False)), (whole, split)
    if not how & LEAVES_BODY:
        for ours, theirs in zip(whole, read_by_h11(data), strict=False):
            assert ours == theirs, (ours, theirs)


def seeds() -> Iterator[bytes]:
    """Requests of all forms, one after the other, received whole and in pieces."""
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = b"POST /v1/x?a=b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
    chunked = (
        b"PUT /y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\nTrailer: z\r\n\r\n"
    )
    last = b"DELETE /z HTTP/1.0\r\nHost: a\r\nConnection: close\r\n\r\n"
    socket = (
        b"GET /s HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDAwMDAwMDAwMDAwMDAwMA==\r\n\r\n"
    )
    large = b"POST /l HTTP/1.1\r\nHost: a\r\nContent-Length: 3000\r\n\r\n" + b"x" * 3000
    expecting = (
        b"POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"
    )
    both = b"POST /b HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    for talk in (
        get + post + chunked + get + last,
        chunked * 3 + post,
        large + get + large,
        expecting + get,
        get + socket,
        socket + b"\x81\x82\0\0\0\0ab",
        get * 150,  # more than may be sent ahead
        b"GET / HTTP/1.1\r\n\r\n" * 300,
        post + both + get,
        b"\r\n" + get,
    ):
        for step, how in ((0, 0), (1, LATE), (7, 0), (100, LATE), (50, LEAVES_BODY)):
            yield bytes((step, how)) + talk


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
