"""What peers can make a server write into its log: nothing without a key, and never much."""

from __future__ import annotations

import io
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from http_of_tests import KEY, Running, eventually, read_all

from hutch.server.http.http_protocol import ConnectionLimits
from hutch.server.log import KINDS, LINES, LogLimit, limit_logs

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
PTY = b"v1/sessions/00000000-000/pty"
HANDSHAKE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDAwMDAwMDAwMDAwMDAwMA==\r\n"
)
NONSENSE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    bytes(range(256)),
    b"\xff" * 70_000,
    GET % (b"healthz", b"Authorization: \xff\r\n"),
    GET % (b"v1/info", b"X-API-Key: \xff\xfe\r\n"),
    GET % (b"%ff%00?%ff", b""),
    GET % (PTY, HANDSHAKE) + b"\x81\x82\0\0\0\0\xff\xff",
    GET % (PTY, HANDSHAKE + b"Sec-WebSocket-Protocol: a b, ,\r\n"),
    GET % (PTY, HANDSHAKE + b"Sec-WebSocket-Protocol: hutch, hutch.key._-_-\r\n"),
    GET % (PTY, HANDSHAKE + b'Sec-WebSocket-Extensions: permessage-deflate; a="\r\n'),
    GET % (PTY, HANDSHAKE + b"Origin: \xff\r\n"),
    GET % (PTY, HANDSHAKE + b"Sec-WebSocket-Version: 99999999999999999999\r\n"),
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nab",
    b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("data"), limits=ConnectionLimits(write_stall=0.5))
    yield running
    running.close()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def reset(sock: socket.socket) -> None:
    """Hang up as rudely as TCP can."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_nonsense_without_a_key_is_no_line_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    for is_rude in (False, True):
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        with suppress(OSError):
            sock.sendall(NONSENSE[number])
            sock.shutdown(socket.SHUT_WR)
        if not is_rude:
            read_all(sock)
        reset(sock)
    eventually(lambda: not server.server._limits.count)
    assert complaints(caplog) == []


def test_a_stranger_who_does_not_read_is_no_line_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(GET % (b"openapi.json", b"") * 90)
        eventually(lambda: server.server._limits.count == 1)
        eventually(lambda: not server.server._limits.count)
        eventually(lambda: not server.server._state.tasks)
    assert complaints(caplog) == []


def test_text_that_is_no_text_is_no_line_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    session = server.session()
    path = PTY.replace(b"00000000-000", session.encode())
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(GET % (path, HANDSHAKE + f"Authorization: Bearer {KEY}\r\n".encode()))
        assert sock.recv(12) == b"HTTP/1.1 101"
        sock.sendall(b"\x81\x82\0\0\0\0\xff\xff")
        assert b"\x88" in read_all(sock)  # it is closed
    assert complaints(caplog) == []


def test_what_loggers_below_the_limited_ones_write_is_limited() -> None:
    out = io.StringIO()
    handler, root = logging.StreamHandler(out), logging.getLogger()
    root.addHandler(handler)
    before = {each: each.filters[:] for each in root.handlers}
    try:
        limit_logs()
        for _ in range(LINES + 5):
            logging.getLogger("websockets.server").error("opening handshake failed")
            logging.getLogger("hutch").error("a line of the server itself")
    finally:
        for each, filters in before.items():
            each.filters = filters
        root.removeHandler(handler)
    written = out.getvalue().splitlines()
    assert written.count("opening handshake failed") == LINES
    assert written.count("a line of the server itself") == LINES + 5


def test_an_error_is_not_hidden_because_there_were_many_others_before() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)

    def is_written(text: str) -> bool:
        return limit.filter(logging.LogRecord("asyncio", logging.ERROR, "", 0, text, (), None))

    for number in range(KINDS + 2 * LINES):
        is_written(f"error {number}")
    assert not is_written("new")
    now = 61.0
    assert all(is_written(f"new {number}") for number in range(KINDS - 1))


def test_of_lines_that_are_alike_only_some_are_written() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)

    def log(text: str) -> str | None:
        record = logging.LogRecord(
            "uvicorn.error", logging.ERROR, "", 0, "%s failed", (text,), None
        )
        return record.getMessage() if limit.filter(record) else None

    written = [log(f"request {number}") for number in range(LINES + 7)]
    assert written[:LINES] == [f"request {number} failed" for number in range(LINES)]
    assert written[LINES:] == [None] * 7
    now = 61.0
    assert log("another") == "another failed (7 more like this were left out)"
    assert log("another") == "another failed"
