"""Terminals, programs and ports of a box, over WebSockets; and HTTP to what a box serves."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_of_tests import KEY, Running, eventually
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

AUTH = {"Authorization": f"Bearer {KEY}"}


def dial(server: Running, path: str, **options: Any) -> ClientConnection:
    options.setdefault("additional_headers", AUTH)
    return connect(f"ws://127.0.0.1:{server.port}{path}", compression=None, proxy=None, **options)


def until(ws: ClientConnection, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        message = ws.recv(20)
        if isinstance(message, bytes):
            got += message
    return got


def test_a_terminal_is_a_shell_with_a_size(server: Running, session: str) -> None:
    with dial(server, f"/v1/sessions/{session}/pty?columns=93&rows=31") as ws:
        assert "process" in json.loads(ws.recv(20))
        ws.send(b"stty size; tty; echo $TERM\n")
        until(ws, b"31 93")
        ws.send(json.dumps({"resize": [71, 17]}))
        ws.send(b"stty size\n")
        until(ws, b"17 71")
        ws.send(json.dumps({"resize": "large"}))
        ws.send(b"exit 7\n")
        texts = []
        with contextlib.suppress(ConnectionClosed):
            while True:
                message = ws.recv(20)
                if isinstance(message, str):
                    texts.append(json.loads(message))
    assert "resize" in texts[0]["error"]
    assert texts[-1] == {"exit_code": 7}
    assert ws.close_code == 1000


def test_who_leaves_a_terminal_hangs_up(server: Running, session: str) -> None:
    with dial(server, f"/v1/sessions/{session}/pty?command=echo+up;sleep+1002") as ws:
        until(ws, b"up")
    assert eventually(lambda: server.run(session, "pgrep -f 'sleep 100[2]'")["exit_code"] == 1)


def test_a_program_is_attached_to_and_left_alone(server: Running, session: str) -> None:
    base = f"/v1/sessions/{session}/processes"
    id = server.ask("POST", base, {"argv": ["cat"]}).json["id"]
    for word in (b"one\n", b"two\n"):
        with dial(server, f"{base}/{id}/attach") as ws:
            ws.send(word)
            until(ws, word)
    with dial(server, f"{base}/{id}/attach") as ws:
        ws.send(json.dumps({"signal": 15}))
        with contextlib.suppress(ConnectionClosed):
            while True:
                last = ws.recv(20)
    assert json.loads(last) == {"exit_code": 143}


LONG = "yes abcdefg | head -c 3000000; echo end; read x; echo more"


def test_attaching_again_goes_on_where_the_last_connection_ended(
    server: Running, session: str
) -> None:
    base = f"/v1/sessions/{session}/processes"
    id = server.ask("POST", base, {"argv": ["sh", "-c", LONG]}).json["id"]
    whole = b"abcdefg\n" * 375_000 + b"end\n"
    with dial(server, f"{base}/{id}/attach?offset=0") as ws:
        begun = len(until(ws, b"abc"))
    with dial(server, f"{base}/{id}/attach?offset={begun}") as ws:
        assert until(ws, b"end\n") == whole[begun:]
    with dial(server, f"{base}/{id}/attach?offset={len(whole)}") as ws:
        ws.send(b"\n")
        assert until(ws, b"more\n") == b"more\n"


def test_a_window_holds_back_both_sides(server: Running, session: str) -> None:
    base = f"/v1/sessions/{session}/processes"
    id = server.ask("POST", base, {"argv": ["cat"]}).json["id"]
    piece, count = b"x" * 1024, 4096
    with dial(server, f"{base}/{id}/attach?offset=0&window=2048") as ws:
        assert json.loads(ws.recv(20)) == {"process": id}
        sent = taken = got = told = 0
        while got < count * len(piece):
            while sent - taken < 2048 and sent < count * len(piece):
                ws.send(piece)
                sent += len(piece)
            message = ws.recv(60)
            if isinstance(message, str):
                taken = json.loads(message)["taken"]
                continue
            got += len(message)
            assert got - told <= 2048
            if got - told > 1024:  # what was printed is taken late, and input is heard all the same
                ws.send(json.dumps({"taken": got}))
                told = got
        ws.send(json.dumps({"taken": got + 1}))
        assert "cannot be taken" in ws.recv(20)
    with dial(server, f"{base}/{id}/attach?offset={got}&window=1024") as ws:
        server.ask("POST", f"{base}/{id}/signal", {"signal": 19})
        with contextlib.suppress(ConnectionClosed):
            while True:
                ws.send(b"x" * 1025)
                ws.recv(20)
        assert ws.close_code == 1008


@pytest.mark.parametrize("query", ["offset=-1", "window=1", "window=1048577", "offset=x", "more=1"])
def test_a_strange_way_to_attach_is_refused(server: Running, session: str, query: str) -> None:
    base = f"/v1/sessions/{session}/processes"
    id = server.ask("POST", base, {"argv": ["true"]}).json["id"]
    with pytest.raises(InvalidStatus) as caught:
        dial(server, f"{base}/{id}/attach?{query}")
    assert caught.value.response.status_code == 400


def test_a_key_may_come_as_a_subprotocol(server: Running, session: str) -> None:
    key = base64.urlsafe_b64encode(KEY.encode()).decode().rstrip("=")
    path = f"/v1/sessions/{session}/pty?command=true"
    with dial(
        server, path, additional_headers={}, subprotocols=["hutch", f"hutch.key.{key}"]
    ) as ws:  # fmt: skip
        assert ws.subprotocol == "hutch"


@pytest.mark.parametrize(
    ("status", "query", "headers"),
    [
        (401, "", {}),
        (401, f"?api_key={KEY}", {}),
        (401, "", {"Authorization": "Bearer wrong"}),
        (403, "", {**AUTH, "Origin": "https://evil.example"}),
        (403, "", {**AUTH, "Origin": "null"}),
        (403, "", {**AUTH, "Sec-Fetch-Mode": "websocket", "Sec-Fetch-Site": "same-origin"}),
        (403, "", {**AUTH, "Sec-Fetch-Site": "none"}),
        (400, "?columns=0", AUTH),
        (400, "?rows=x", AUTH),
        (400, "?more=1", AUTH),
    ],
)
def test_a_handshake_is_refused(
    server: Running, session: str, status: int, query: str, headers: dict[str, str]
) -> None:
    path = f"/v1/sessions/{session}/pty{query}"
    with pytest.raises(InvalidStatus) as caught:
        dial(server, path, additional_headers=headers)
    assert caught.value.response.status_code == status
    assert "error_code" in json.loads(caught.value.response.body)


def test_a_handshake_of_node_is_not_taken_for_one_of_a_page(server: Running, session: str) -> None:
    """Its WebSocket is that of browsers, and sends part of what they send."""
    headers = {**AUTH, "Sec-Fetch-Mode": "websocket", "User-Agent": "node"}
    path = f"/v1/sessions/{session}/pty?command=echo+in"
    with dial(server, path, additional_headers=headers) as ws:
        until(ws, b"in")


def test_a_handshake_for_a_foreign_name_is_refused(server: Running, session: str) -> None:
    head = (
        f"GET /v1/sessions/{session}/pty HTTP/1.1\r\nHost: evil\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer {KEY}\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(b'0' * 16).decode()}\r\n\r\n"
    )
    assert server.raw(head.encode()).startswith(b"HTTP/1.1 421")


def test_no_session_no_terminal(server: Running) -> None:
    for path, status in (("00000000-000/pty", 404), ("x/pty", 400), ("00000000-000/x", 404)):
        with pytest.raises(InvalidStatus) as caught:
            dial(server, f"/v1/sessions/{path}")
        assert caught.value.response.status_code == status


def test_a_message_has_a_limit_also_in_pieces(server: Running, session: str) -> None:
    path = f"/v1/sessions/{session}/pty?command=cat+>/dev/null"
    with dial(server, path) as ws:
        with contextlib.suppress(ConnectionClosed):
            ws.send(b"x" * ((1 << 20) + 1))
            while True:
                ws.recv(20)
        assert ws.close_code in (1009, 1006)  # the latter if it was still sending
    with dial(server, path) as ws:
        with contextlib.suppress(ConnectionClosed):
            ws.send(b"x" * 65536 for _ in range(1000))
            while True:
                ws.recv(20)
        assert ws.close_code in (1009, 1006)  # the latter if it was still sending


def test_many_pings_cost_no_memory(server: Running, session: str) -> None:
    with dial(server, f"/v1/sessions/{session}/pty?command=sleep+1003") as ws:
        ping = b"\x89\xfd" + b"\0" * 4 + b"x" * 125
        raw = ws.socket
        raw.settimeout(60)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                raw.sendall(ping * 100)  # 25 MB, and the answers are not read
    assert server.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    ("first", "frame", "code"),
    [
        (b"\x02\x80\0\0\0\0", b"\x00\x80\0\0\0\0", 1008),  # pieces with nothing in them
        (b"\x02\x81\0\0\0\0x", b"\x00\x81\0\0\0\0x", 1009),  # pieces of one byte
        (b"", b"\x8a\x80\0\0\0\0", 1008),  # pongs
        (b"", b"\x82\x80\0\0\0\0", 1008),  # messages with nothing in them
    ],
)
def test_frames_without_end_are_not_read_without_end(
    server: Running, session: str, first: bytes, frame: bytes, code: int
) -> None:
    with dial(server, f"/v1/sessions/{session}/pty?command=sleep+1005") as ws:
        ws.socket.sendall(first + frame * 2000)
        with contextlib.suppress(ConnectionClosed):
            while True:
                ws.recv(20)
        assert ws.close_code == code
    look = "pgrep -f 'sleep 100[5]'"
    assert eventually(lambda: server.run(session, look)["exit_code"] == 1)


# --- ports -----------------------------------------------------------------------------------

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"chunked"
        said = f"{self.command} {self.path}\\n{self.headers}".encode() + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.send_header("Content-Type", "text/html")
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Connection", "X-Secret")
        self.send_header("X-Secret", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)
    do_GET = do_POST = do_HEAD = do_DELETE = answer
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def web(server: Running, session: str) -> Iterator[str]:
    base = f"/v1/sessions/{session}"
    server.ask("PUT", f"{base}/files/content", data=SERVER.encode(), path="web.py")
    started = server.ask("POST", f"{base}/processes", {"argv": ["python3", "web.py"]}).json
    ports = f"{base}/ports"
    eventually(lambda: 8123 in [each["port"] for each in server.ask("GET", ports).json])
    yield f"{ports}/8123"
    signal = f"{base}/processes/{started['id']}/signal"
    server.ask("POST", signal, {"tree": True})


def test_what_a_box_serves_can_be_asked_for(server: Running, web: str) -> None:
    answer = server.ask("GET", f"{web}/http/a%2Fb/c?d=e&d=f", headers={"X-Mine": "yes"})
    assert answer.status == 200
    text = answer.body.decode()
    assert text.startswith("GET /a%2Fb/c?d=e&d=f\n")
    assert "X-Mine: yes" in text.title().replace("X-Mine: Yes", "X-Mine: yes")
    assert KEY not in text and "uthorization" not in text
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for dropped in ("set-cookie", "access-control-allow-origin", "x-secret"):
        assert dropped not in answer.headers


def test_bodies_go_in_and_verbs_are_kept(server: Running, web: str) -> None:
    posted = server.ask("POST", f"{web}/http/", data=b"hello").body
    assert posted.startswith(b"POST /\n") and posted.endswith(b"hello")
    chunks = server.ask("POST", f"{web}/http/", data=(b"x" for _ in range(3))).body
    assert chunks.endswith(b"chunked")
    assert server.ask("HEAD", f"{web}/http/x").body == b""
    assert server.ask("DELETE", f"{web}/http/x").body.startswith(b"DELETE /x")


def test_headers_for_one_hop_do_not_go_further(server: Running, web: str) -> None:
    head = (
        f"GET {web}/http/ HTTP/1.1\r\nHost: localhost\r\nConnection: close, X-Api-Key, X-Hop\r\n"
        f"X-Api-Key: {KEY}\r\nX-Hop: 1\r\nTE: trailers\r\nCookie: a=b\r\n\r\n"
    )
    answer = server.raw(head.encode())
    assert answer.startswith(b"HTTP/1.1 200"), answer
    for dropped in (b"X-Hop: 1", b"trailers", b"a=b\n", KEY.encode()):
        assert dropped not in answer.partition(b"\r\n\r\n")[2]


def test_nobody_listens_is_told_so(server: Running, session: str) -> None:
    answer = server.ask("GET", f"/v1/sessions/{session}/ports/9/http/")
    assert (answer.status, answer.error) == (404, "NOT_FOUND")
    for wrong in ("0", "65536", "x", "-1"):
        assert server.ask("GET", f"/v1/sessions/{session}/ports/{wrong}/http/").status == 400


def test_an_answer_that_is_no_http_is_told_so(server: Running, session: str) -> None:
    base = f"/v1/sessions/{session}"
    code = (
        "import socket; s=socket.socket(); s.bind(('127.0.0.1', 8124)); s.listen()\n"
        "while 1: c=s.accept()[0]; c.recv(999); c.sendall(b'hello' * 20000); c.close()"
    )
    started = server.ask("POST", f"{base}/processes", {"argv": ["python3", "-c", code]}).json
    eventually(lambda: 8124 in [e["port"] for e in server.ask("GET", f"{base}/ports").json])
    answer = server.ask("GET", f"{base}/ports/8124/http/")
    assert (answer.status, answer.error) == (502, "BOX_ERROR")
    server.ask("POST", f"{base}/processes/{started['id']}/signal", {"tree": True})


FLOOD = """
import socketserver
ANSWERS = {
    b"wait": (b"", b"HTTP/1.1 100 C\\r\\n\\r\\n"),
    b"drip": (b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n", b"1\\r\\nx\\r\\n"),
}
class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        head, rest = ANSWERS[self.request.recv(65536)[5:9]]
        try:
            self.request.sendall(head)
            while True:
                self.request.sendall(rest * 10000)
        except OSError:
            pass
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
Server(("127.0.0.1", 8125), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def flood(server: Running, session: str) -> Iterator[str]:
    base = f"/v1/sessions/{session}"
    server.ask("PUT", f"{base}/files/content", data=FLOOD.encode(), path="flood.py")
    started = server.ask("POST", f"{base}/processes", {"argv": ["python3", "flood.py"]}).json
    eventually(lambda: 8125 in [e["port"] for e in server.ask("GET", f"{base}/ports").json])
    yield f"{base}/ports/8125/http"
    server.ask("POST", f"{base}/processes/{started['id']}/signal", {"tree": True})


def test_a_box_that_only_says_to_wait_is_not_waited_for(server: Running, flood: str) -> None:
    answer = server.ask("GET", f"{flood}/wait")
    assert (answer.status, answer.error) == (502, "BOX_ERROR")


def test_a_box_that_drips_keeps_nobody_else_waiting(
    server: Running, flood: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"GET {flood}/drip HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n\r\n"
    socks = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(4)]
    leave = threading.Event()

    def read(sock: socket.socket) -> None:
        while not leave.is_set() and sock.recv(65536):
            pass
        sock.close()

    for sock in socks:
        sock.sendall(head.encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
    readers = [threading.Thread(target=read, args=(sock,)) for sock in socks]
    for reader in readers:
        reader.start()
    try:
        for _ in range(10):
            assert server.ask("GET", "/healthz").status == 200
    finally:
        leave.set()
        for reader in readers:
            reader.join()
    eventually(lambda: not server.server._limits.count)
    eventually(lambda: not server.server._state.tasks)
    assert len(caplog.records) < 20


def test_a_port_can_be_tunnelled(server: Running, web: str) -> None:
    with dial(server, f"{web}/tcp") as ws:
        ws.send(b"GET /tunnel HTTP/1.0\r\n\r\n")
        assert b"GET /tunnel" in until(ws, b"GET /tunnel")


def test_hanging_up_ends_the_tunnel(server: Running, web: str) -> None:
    with dial(server, f"{web}/tcp") as ws:
        ws.socket.shutdown(socket.SHUT_RDWR)
    assert server.ask("GET", f"{web}/http/").status == 200
