"""Who comes in, how, and how fast: browsers, smugglers, and those who take their time."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_of_tests import KEY, Running, eventually, read_all

from hutch.errors import Conflict, InvalidRequest
from hutch.server.http.http_protocol import ConnectionLimits
from hutch.server.http.server import HTTPServer

PUBLIC = ["/healthz", "/readyz", "/docs", "/openapi.json", "/metrics", "/v1/sessions", "/nothing"]


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with short patience, few connections and a socket."""
    limits = ConnectionLimits(max_connections=20, head_time=0.5, body_window=0.5, write_stall=1.0)
    folder = tmp_path_factory.mktemp("hurried")
    running = Running(folder, limits=limits, hosts=("box.example",), socket_path=True)
    yield running
    running.close()


# --- W01: the name that was asked for ------------------------------------------------------


@pytest.mark.parametrize("path", PUBLIC)
@pytest.mark.parametrize("host", ["evil.example", "localhost.evil", "127.0.0.1.evil", "10.1.2.3"])
def test_a_name_that_is_not_ours_is_refused_everywhere(
    server: Running, path: str, host: str
) -> None:
    for name in (host, f"{host}:{server.port}"):
        assert server.ask("GET", path, headers={"Host": name}).status == 421


@pytest.mark.parametrize("host", ["", "a b", "localhost:x", "[::1", "localhost/"])
def test_a_host_that_is_no_name_is_refused(server: Running, host: str) -> None:
    assert server.ask("GET", "/healthz", headers={"Host": host}).status == 400


def test_two_hosts_or_none_are_refused(server: Running) -> None:
    for head in (b"Host: localhost\r\nHost: localhost\r\n", b""):
        answer = server.raw(b"GET /healthz HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "localhost."])
def test_our_own_names_are_taken(server: Running, host: str) -> None:
    assert server.ask("GET", "/healthz", headers={"Host": host}).status == 200


def test_a_configured_name_is_taken(hurried: Running) -> None:
    assert hurried.ask("GET", "/healthz", headers={"Host": "box.example:80"}).status == 200


# --- W02, W03: browsers --------------------------------------------------------------------


@pytest.mark.parametrize("path", PUBLIC)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_of_others_may_not_ask(server: Running, path: str, headers: dict[str, str]) -> None:
    answer = server.ask("GET", path, headers=headers)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_our_own_page_may_ask(server: Running) -> None:
    host = f"127.0.0.1:{server.port}"
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert server.ask("GET", "/openapi.json", headers=headers).status == 200


def test_a_form_of_another_page_changes_nothing(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = server.ask("POST", "/v1/sessions", data=b"{}", headers={"Content-Type": kind})
        assert answer.status == 415


def test_there_is_no_preflight(server: Running) -> None:
    headers = {"Origin": "https://evil", "Access-Control-Request-Method": "POST"}
    answer = server.ask("OPTIONS", "/v1/sessions", headers=headers)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_key_in_the_query_is_no_key(server: Running) -> None:
    assert server.ask("GET", "/v1/sessions", key=None, api_key=KEY).status == 401


def test_a_key_comes_in_either_of_two_headers(server: Running) -> None:
    given = server.ask("GET", "/v1/sessions", key=None, headers={"X-API-Key": KEY})
    assert given.status == 200
    for wrong in ("Basic abc", "Bearer", KEY, f"Bearer {KEY}x"):
        answer = server.ask("GET", "/v1/sessions", headers={"Authorization": wrong})
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


# --- W10: smuggling --------------------------------------------------------------------------

SMUGGLED = {
    "two lengths": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two different lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a list of lengths": b"Content-Length: 5, 5\r\n\r\nhello",
    "a length with a sign": b"Content-Length: +5\r\n\r\nhello",
    "a length that is too long": b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a tab before chunked": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"A: b\r\n c\r\n\r\n",
    "a bare line feed": b"A: b\nB: c\r\n\r\n",
    "a bare return": b"A: b\rB: c\r\n\r\n",
    "a space before the colon": b"A : b\r\n\r\n",
    "a zero": b"A: b\0c\r\n\r\n",
    "a chunk with a line feed": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "a chunk of 0x5": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a large chunk extension": b"Transfer-Encoding: chunked\r\n\r\n5;"
    + b"x" * 1_000_000
    + b"\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("what", SMUGGLED)
def test_what_two_readers_could_read_differently_is_refused(server: Running, what: str) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = server.raw(head + f"Authorization: Bearer {KEY}\r\n".encode() + SMUGGLED[what])
    assert answer.startswith(b"HTTP/1.1 400") or answer == b"", answer[:200]
    assert answer.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize(
    "line",
    [
        b"GET http://evil.example/healthz HTTP/1.1",
        b"GET /healthz#x HTTP/1.1",
        b"CONNECT localhost:80 HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET /healthz HTTP/1.2",
        b"GET /healthz HTTP/0.9",
        b"GET /healthz",
        b"GET /heal\xc3\xa9 HTTP/1.1",
        b"PRI * HTTP/2.0",
    ],
)
def test_a_request_line_that_is_not_plain_is_refused(server: Running, line: bytes) -> None:
    answer = server.raw(line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400"), answer


def test_trailers_are_nobodys_headers(server: Running) -> None:
    answer = server.raw(
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\n"
        + f"Authorization: Bearer {KEY}\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 401")


def test_requests_in_one_go_are_answered_in_order(server: Running) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    answer = server.raw(one + b"\r\n" + one + b"X-Request-ID: b\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.rindex(b"x-request-id: b") > answer.index(b'{"status":"ok"}')


def test_a_head_has_a_limit(server: Running) -> None:
    for more in (b"A: " + b"x" * 70_000, b"".join(b"A%d: b\r\n" % n for n in range(20_000))):
        answer = server.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431") or answer == b""
    assert server.raw(b"GET /" + b"x" * 100_000)[:12] in (b"HTTP/1.1 431", b"")


# --- W08: those who take their time ----------------------------------------------------------


def test_a_head_that_does_not_come_is_not_waited_for(hurried: Running) -> None:
    for began in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
        answer = hurried.raw(began)
        assert answer.startswith(b"HTTP/1.1 408")
    second = hurried.raw(
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nHo"
    )
    assert second.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in second


def test_a_body_that_drips_is_cut_off(hurried: Running) -> None:
    with socket.create_connection(("127.0.0.1", hurried.port), timeout=20) as sock:
        sock.sendall(
            b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            b"Content-Type: application/json\r\n" + f"Authorization: Bearer {KEY}\r\n\r\n".encode()
        )
        assert read_all(sock) == b""  # it is being answered, so there is nothing to say


def test_many_who_send_nothing_do_not_keep_others_out(hurried: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", hurried.port)) for _ in range(15)]
    assert hurried.ask("GET", "/healthz").status == 200
    for sock in idle:
        sock.close()


LOOK = f"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"


def known(running: Running) -> socket.socket:
    """A connection that has shown a key, and waits."""
    sock = socket.create_connection(("127.0.0.1", running.port), timeout=20)
    sock.sendall(LOOK.encode())
    assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    return sock


def test_strangers_who_wait_make_room_for_others_and_never_a_friend(server: Running) -> None:
    eventually(lambda: not server.server._limits.count)
    friend = known(server)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(256)]
    try:
        eventually(lambda: len(server.server._limits.peers.get("127.0.0.1", ())) == 256)
        for _ in range(3):
            assert server.ask("GET", "/v1/sessions").status == 200
        strangers[0].settimeout(60)
        assert read_all(strangers[0]) == b""  # the oldest went
        friend.sendall(LOOK.encode())
        assert friend.recv(65536).startswith(b"HTTP/1.1 200")
    finally:
        for sock in (friend, *strangers):
            sock.close()
    eventually(lambda: not server.server._limits.count)


HANDSHAKE = (
    b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDAwMDAwMDAwMDAwMDAwMA==\r\n"
)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /healthz HTTP/1.1\r\n" + HANDSHAKE + b"Content-Length: 5\r\n\r\nab",
        b"POST /healthz HTTP/1.1\r\n" + HANDSHAKE + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE + b"Content-Length: 5\r\n\r\nab",
        b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE + b"Transfer-Encoding: chunked\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n" + HANDSHAKE + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE.replace(b"13", b"12") + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE.replace(b"==", b"") + b"\r\n",
    ],
)
def test_what_is_no_handshake_is_refused(server: Running, request_: bytes) -> None:
    assert server.raw(request_).startswith(b"HTTP/1.1 400")


def test_a_handshake_that_cannot_be_read_is_cut_off(server: Running) -> None:
    many = b"".join(b"X-%d: y\r\n" % n for n in range(500))
    assert server.raw(b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE + many + b"\r\n") == b""
    eventually(lambda: not server.server._limits.count)


def test_a_handshake_while_another_request_is_answered_ends_both(
    server: Running, session: str
) -> None:
    body = b'{"command": "sleep 1004"}'
    run = (
        f"POST /v1/sessions/{session}/shells/main/run HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {KEY}\r\n\r\n"
    ).encode()
    assert server.raw(run + body + b"GET /healthz HTTP/1.1\r\n" + HANDSHAKE + b"\r\n") == b""
    look = "pgrep -f 'sleep 100[4]'"
    assert eventually(lambda: server.run(session, look)["exit_code"] == 1)


def test_another_protocol_is_not_offered_and_the_request_answered(server: Running) -> None:
    head = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    answer = server.raw(b"GET /healthz HTTP/1.1\r\n" + head)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer


def test_one_who_does_not_read_holds_the_program_back_and_is_cut_off(hurried: Running) -> None:
    session = hurried.session()
    body = b'{"command": "yes | head -c 500000000; touch all"}'
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", hurried.port))
        sock.sendall(
            f"POST /v1/sessions/{session}/shells/main/run HTTP/1.1\r\nHost: localhost\r\n"
            f"Accept: text/event-stream\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        eventually(lambda: _is_paused(hurried))
        eventually(lambda: not hurried.server._limits.count, 30)  # it was cut off
    result = hurried.run(session, "[ -e all ] && echo all; pgrep -x yes || echo none")
    assert result["stdout"] == "none\n"
    hurried.ask("DELETE", f"/v1/sessions/{session}")


def _is_paused(running: Running) -> bool:
    return any(c.flow.write_paused for c in list(running.server._state.connections))


@pytest.mark.parametrize("close", [b"close", b"keep-alive"])
def test_an_answer_that_nobody_takes_is_not_held_for_ever(hurried: Running, close: bytes) -> None:
    session = hurried.session()
    hurried.run(session, "head -c 4000000 /dev/zero | tr '\\0' x > large")
    eventually(lambda: not hurried.server._limits.count)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", hurried.port))
        sock.sendall(
            f"GET /v1/sessions/{session}/fs/read?path=large HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {KEY}\r\nConnection: ".encode()
            + close
            + b"\r\n\r\n"
        )
        assert sock.recv(12) == b"HTTP/1.1 200"

        def is_cut_off() -> bool:
            time.sleep(0.2)
            with contextlib.suppress(ConnectionResetError):
                sock.recv(100)  # some, but not enough
            return not hurried.server._limits.count

        eventually(is_cut_off)
    hurried.ask("DELETE", f"/v1/sessions/{session}")


def test_a_slow_reader_gets_everything(server: Running, session: str) -> None:
    size = 3_000_000
    body = f'{{"command": "head -c {size} /dev/zero | tr \'\\\\0\' x"}}'.encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(
            f"POST /v1/sessions/{session}/shells/main/run HTTP/1.1\r\nHost: localhost\r\n"
            f"Accept: text/event-stream\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        got = sum(1 for _ in range(20) if sock.recv(1))
        eventually(lambda: _is_paused(server))
        rest = read_all(sock)
    assert got == 20
    assert rest.rstrip().endswith(b"0") and b"event: done" in rest
    assert rest.count(b"x") > size


# --- W07: the socket -------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_and_needs_no_key(hurried: Running) -> None:
    info = os.stat(hurried.socket_path)
    assert stat.S_IMODE(info.st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(hurried.socket_path))
        sock.sendall(b"GET /v1/sessions HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_another_user_is_sent_away_from_the_socket(hurried: Running) -> None:
    # As another user who was let into the folder by mistake.
    code = f"""
import os, socket
sock = socket.socket(socket.AF_UNIX)
os.chdir({str(hurried.socket_path.parent)!r})
os.setuid(65534)
try:
    sock.connect("hutch.sock")
    sock.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print(sock.recv(100)[:12].decode())
except OSError as exc:
    print(type(exc).__name__)
"""
    os.chmod(hurried.socket_path, 0o666)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
        )
    finally:
        os.chmod(hurried.socket_path, 0o600)
    assert ran.stdout.strip() in ("HTTP/1.1 403", "PermissionError"), ran


def test_a_socket_is_not_put_where_others_could_put_one(server: Running, tmp_path: Path) -> None:
    async def start(path: Path) -> None:
        await HTTPServer.start(None, None, path)

    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    link = tmp_path / "link"
    tmp_path.chmod(0o700)
    link.symlink_to(tmp_path)
    for folder in (loose, link):
        with pytest.raises(InvalidRequest, match="chmod 700"):
            server.do(start(folder / "s"))
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(Conflict, match="not a socket"):
            server.do(start(tmp_path / name))
