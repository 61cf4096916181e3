"""Requests sent without waiting for answers: all are answered in turn, and none piles up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from http_of_tests import KEY, Running, eventually, read_all

from hutch.server.http.http_protocol import (
    MAX_PIPELINED,
    SLICE,
    ConnectionLimits,
    HTTPProtocol,
)

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
FLOOD = HEALTH * 20_000  # 840 KB
OK = b"HTTP/1.1 200 OK"


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("impatient"), limits=ConnectionLimits(head_time=0.5))
    yield running
    running.close()


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        pass  # the server hung up, or reads no more


def post(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def guards(server: Running) -> list[HTTPProtocol]:
    return [
        each for each in list(server.server._state.connections) if isinstance(each, HTTPProtocol)
    ]


def read_answers(sock: socket.socket, count: int) -> bytes:
    got = b""
    while got.count(b'{"status":"ok"}') < count:
        piece = sock.recv(65536)
        assert piece, got[-300:]
        got += piece
    return got


def test_a_flood_of_requests_is_answered_up_to_a_limit_and_ended(server: Running) -> None:
    with connect(server) as sock:
        writer = threading.Thread(target=send, args=(sock, FLOOD))
        writer.start()
        answers = read_all(sock)
        writer.join()
    assert answers.count(OK) <= MAX_PIPELINED
    metrics = server.ask("GET", "/metrics").body.decode()
    assert 'hutch_connections_ended_total{reason="pipelining"}' in metrics


def test_requests_behind_one_that_takes_long_do_not_pile_up(server: Running, session: str) -> None:
    first = post(f"/v1/sessions/{session}/shells/main/run", b'{"command": "sleep 60"}')
    small = b"GET / HTTP/1.1\r\n\r\n" * 50_000
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" * 20_000
    for flood in (FLOOD, small, chunked):
        eventually(lambda: not guards(server))  # of a test before, or of the flood before
        with connect(server) as sock:
            writer = threading.Thread(target=send, args=(sock, first + flood), daemon=True)
            writer.start()
            # Reading has stopped, for parsed requests wait: nothing more comes into memory.
            [guard] = eventually(
                lambda: [g for g in guards(server) if g.flow.read_paused and g.pipeline]
            )
            # The smallest has 18 bytes, and no slice is parsed while one waits.
            assert len(guard.pipeline) <= SLICE // 18 + 1
            assert len(guard._unparsed) <= 256 * 1024
            assert server.ask("GET", "/healthz").status == 200
            sock.shutdown(socket.SHUT_RDWR)
            writer.join(30)
        guard_gone = guard
        server.do(_cut(guard_gone))
        eventually(lambda: not guards(server))
        assert not guard_gone.pipeline and not guard_gone._unparsed


async def _cut(guard: HTTPProtocol) -> None:
    guard.cut()


def test_others_are_answered_before_a_flood_is(server: Running) -> None:
    socks = [connect(server) for _ in range(8)]
    writers = []
    for sock in socks:
        writers.append(threading.Thread(target=send, args=(sock, FLOOD), daemon=True))
        writers[-1].start()
    for _ in range(5):
        assert server.ask("GET", "/healthz").status == 200
        assert sum(len(guard.pipeline) for guard in guards(server)) <= 8 * MAX_PIPELINED
    for sock in socks:
        assert read_all(sock).count(OK) <= MAX_PIPELINED
        sock.close()
    for writer in writers:
        writer.join()


def test_a_hundred_pipelined_requests_are_all_answered_again_and_again(server: Running) -> None:
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(HEALTH * MAX_PIPELINED)
            assert read_answers(sock, MAX_PIPELINED).count(OK) == MAX_PIPELINED


def test_pipelined_bodies_reach_the_request_that_they_belong_to(
    server: Running, session: str
) -> None:
    path = f"/v1/sessions/{session}/shells/main/run"
    padding = b" " * 100_000
    requests = [
        post(path, b'{"command": "echo %d"%s}' % (number, padding if number % 3 else b""))
        for number in range(20)
    ]
    with connect(server) as sock:
        writer = threading.Thread(target=send, args=(sock, b"".join([*requests, HEALTH])))
        writer.start()
        answers = read_answers(sock, 1)
        writer.join()
    assert answers.count(OK) == 21
    said = [b'"stdout":"%d\\n"' % number for number in range(20)]
    places = [answers.index(line) for line in said]
    assert places == sorted(places)


def test_half_a_request_behind_one_that_takes_long_does_not_end_it(impatient: Running) -> None:
    session = impatient.session()
    first = post(f"/v1/sessions/{session}/shells/main/run", b'{"command": "sleep 1; echo done"}')
    with connect(impatient) as sock:
        sock.sendall(first + HEALTH + HEALTH[:20])
        got = b""
        while b'"stdout":"done' not in got:
            piece = sock.recv(65536)
            assert piece, got
            got += piece
        # From now on the rest of the last one is waited for, as long as for any other.
        rest = got + read_all(sock)
    assert rest.count(OK) == 2 and b"HTTP/1.1 408" in rest
