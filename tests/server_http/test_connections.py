"""How many connections each may have, and what is answered when there are too many."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_of_tests import KEY, Running, eventually, read_all
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from hutch.server.http.http_protocol import ConnectionLimits
from hutch.server.http.limits import MAX_RESERVE
from hutch.types import Report

HEALTH = ("/healthz", "/readyz")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with few connections for each address and each owner."""
    limits = ConnectionLimits(max_connections=4, max_per_owner=5)
    running = Running(tmp_path_factory.mktemp("small"), limits=limits)
    yield running
    running.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with few connections for all together."""
    running = Running(tmp_path_factory.mktemp("full"), limits=ConnectionLimits(max_total=6))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def nobody_is_there(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("small", "full"):
        if name in request.fixturenames:
            running: Running = request.getfixturevalue(name)
            eventually(lambda running=running: not running.server._limits.count)


def key_of(server: Running, owner: str, scope: str = "run") -> str:
    made = server.ask("POST", "/v1/keys", {"owner": owner, "scope": scope})
    return str(made.json["key"])


def ask(server: Running, path: str, key: str = KEY) -> socket.socket:
    """A connection on which this was asked for, and its answer has begun."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    sock.sendall(head.encode() + b"Accept: text/event-stream\r\n\r\n")
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def stream(server: Running, session: str, key: str = KEY) -> socket.socket:
    return ask(server, f"/v1/sessions/{session}/journal/follow", key)


def close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def test_an_owner_with_many_connections_keeps_no_other_owner_out(small: Running) -> None:
    alice, bob = key_of(small, "alice"), key_of(small, "bob")
    session = small.ask("POST", "/v1/sessions", {}, key=alice).json["id"]
    held = [stream(small, session, alice) for _ in range(5)]
    try:
        refused = small.ask("GET", "/v1/sessions", key=alice)
        assert (refused.status, refused.json["code"]) == (429, "quota_reached")
        assert refused.headers["retry-after"] == "1"
        assert small.ask("GET", "/v1/sessions", key=bob).status == 200
        for path in HEALTH:
            assert small.ask("GET", path, key=None).status == 200
        with pytest.raises(InvalidStatus) as caught:
            connect(
                f"ws://127.0.0.1:{small.port}/v1/sessions/{session}/pty", proxy=None,
                additional_headers={"Authorization": f"Bearer {alice}"},
            )  # fmt: skip
        assert caught.value.response.status_code == 429
    finally:
        close(held)
    eventually(lambda: small.ask("GET", "/v1/sessions", key=alice).status == 200)


def test_a_connection_that_waits_makes_room_for_another_of_its_owner(small: Running) -> None:
    alice = key_of(small, "alice")
    held = [ask(small, "/v1/sessions", alice) for _ in range(5)]
    try:
        assert small.ask("GET", "/v1/sessions", key=alice).status == 200
        assert read_all(held[0]).count(b"HTTP/1.1") == 0  # the rest of its answer, and the end
    finally:
        close(held)


def test_strangers_are_not_kept_out_by_strangers_who_do_not_read(small: Running) -> None:
    many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    held = []
    try:
        for _ in range(4):
            sock = socket.socket()
            held.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", small.port))
            sock.sendall(many)
        eventually(lambda: _writes_are_paused(small) == 4)
        for path in HEALTH:
            assert small.ask("GET", path, key=None).status == 200
        assert small.ask("GET", "/v1/sessions").status == 200
    finally:
        close(held)


def _writes_are_paused(server: Running) -> int:
    connections: Any = list(server.server._state.connections)
    return sum(each.flow.write_paused for each in connections)


def test_who_asks_at_once_is_answered_before_a_crowd_pushes_it_out(server: Running) -> None:
    eventually(lambda: not server.server._limits.count)
    busy, done = threading.Event(), threading.Event()

    async def block() -> None:
        busy.set()
        done.wait(30)

    blocked = threading.Thread(target=server.do, args=(block(),))
    blocked.start()
    busy.wait(30)
    crowd = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            for _ in range(400):
                crowd.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            done.set()  # all of them are accepted now
            assert sock.recv(12) == b"HTTP/1.1 200"
        finally:
            done.set()
            blocked.join()
            close(crowd)
    eventually(lambda: not server.server._limits.count)


def test_a_server_that_is_full_still_says_how_it_is(full: Running) -> None:
    session = full.session()
    eventually(lambda: not full.server._limits.count)
    held = [stream(full, session) for _ in range(6)]
    waiting = []
    try:
        for path in HEALTH:
            answer = full.ask("GET", path, key=None)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        refused = full.ask("GET", "/v1/sessions")
        assert (refused.status, refused.json["code"]) == (503, "server_unavailable")
        assert refused.headers["retry-after"] == "1"
        for _ in range(MAX_RESERVE + 10):  # who take the places of the reserve
            waiting.append(socket.create_connection(("127.0.0.1", full.port), timeout=30))
        assert full.ask("GET", "/healthz", key=None).status == 200
        assert full.server._limits.count <= 6 + MAX_RESERVE
        assert len(full.server._limits.owners["local"]) == 6  # who works is left alone
    finally:
        close(held + waiting)


def test_a_full_server_makes_room_for_requests_first(full: Running) -> None:
    held = [ask(full, "/v1/sessions") for _ in range(6)]  # they wait for the next one
    try:
        assert full.ask("GET", "/v1/sessions").status == 200
    finally:
        close(held)


def test_metrics_show_others_to_admins_only(small: Running) -> None:
    alice, bob = key_of(small, "alice"), key_of(small, "bob", "read")
    session = small.ask("POST", "/v1/sessions", {}, key=alice).json["id"]
    try:
        of_alice = small.ask("GET", "/metrics", key=alice).body.decode()
        assert "hutch_sessions_running 0.0" not in of_alice
        everything = small.ask("GET", "/metrics").body.decode()
        assert "hutch_sessions_running 0.0" not in everything
        assert "hutch_requests_total" in everything and "hutch_connections " in everything
        of_bob = small.ask("GET", "/metrics", key=bob).body.decode()
        assert "hutch_sessions_running 0.0" in of_bob
        names = {line.split()[0] for line in of_bob.splitlines() if not line.startswith("#")}
        assert all(name.startswith("hutch_sessions_") for name in names)
    finally:
        small.ask("DELETE", f"/v1/sessions/{session}", key=alice)


def test_a_report_is_made_once_for_everybody_who_asks(small: Running) -> None:
    reader = key_of(small, "reader", "read")
    made = 0
    real = small.service.watching._reports._make

    async def counted() -> Report:
        nonlocal made
        made += 1
        return await real()

    small.service.watching._reports._make = counted
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: small.ask("GET", "/v1/report", key=reader), range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    assert len({answer.body for answer in answers}) == 1
    assert small.ask("GET", "/v1/info", key=reader).status == 200
    assert made == 1
