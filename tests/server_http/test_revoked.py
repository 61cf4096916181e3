"""A key that is revoked: what it has open ends then, and not when it likes to."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from http_of_tests import Answer, Running, eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect


@dataclass
class Lent:
    """A session, and the key that was lent to its user."""

    server: Running
    session: str
    id: str
    key: str

    def revoke(self) -> Answer:
        return self.server.ask("DELETE", f"/v1/keys/{self.id}")

    def let_expire(self) -> Answer:
        return self.server.ask("POST", f"/v1/keys/{self.id}/extend", {"expires": "1s"})

    def dial(self, path: str) -> ClientConnection:
        url = f"ws://127.0.0.1:{self.server.port}/v1/sessions/{self.session}/{path}"
        headers = {"Authorization": f"Bearer {self.key}"}
        return connect(url, compression=None, proxy=None, additional_headers=headers)

    def is_running(self, command: str) -> bool:
        found = self.server.run(self.session, f"pgrep -fx '{command}'")
        return bool(found["exit_code"] == 0)


@pytest.fixture
def lent(server: Running) -> Iterator[Lent]:
    made = server.ask("POST", "/v1/keys", {"owner": "ada"}).json
    opened = server.ask("POST", "/v1/sessions", {}, key=made["key"])
    yield Lent(server, opened.json["id"], made["id"], made["key"])
    server.ask("DELETE", f"/v1/sessions/{opened.json['id']}")


def is_over(ws: ClientConnection) -> bool:
    with contextlib.suppress(ConnectionClosed):
        while True:
            ws.recv(20)
    return True


def test_its_terminal_ends_and_what_ran_in_it(lent: Lent) -> None:
    with lent.dial("pty?command=echo+up;sleep+1006") as ws:
        while ws.recv(20) != b"up\r\n":
            pass
        assert lent.revoke().status == 200
        assert is_over(ws)
    eventually(lambda: not lent.is_running("sleep 1006"))


def test_its_tunnel_ends_even_if_the_box_reads_nothing(lent: Lent) -> None:
    code = (
        "import socket,time; s=socket.socket(); s.bind(('127.0.0.1', 8126)); s.listen()\n"
        "c=s.accept()[0]; time.sleep(1000)"
    )
    base = f"/v1/sessions/{lent.session}"
    lent.server.ask("POST", f"{base}/processes", {"argv": ["python3", "-c", code]})
    eventually(lambda: 8126 in [e["port"] for e in lent.server.ask("GET", f"{base}/ports").json])
    with lent.dial("ports/8126/tcp") as ws:
        stop = threading.Event()

        def fill() -> None:
            with contextlib.suppress(ConnectionClosed):
                while not stop.is_set():
                    ws.send(b"x" * 500_000)

        filler = threading.Thread(target=fill)
        filler.start()
        try:
            assert lent.revoke().status == 200
            assert is_over(ws)
        finally:
            stop.set()
            filler.join(60)
    eventually(lambda: not lent.server.server._state.tasks)


def open_request(lent: Lent, verb: str, path: str, body: Any = None) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", lent.server.port, timeout=20)
    headers = {"Authorization": f"Bearer {lent.key}", "Content-Type": "application/json"}
    if verb == "GET":
        headers["Accept"] = "text/event-stream"
    data = None if body is None else json.dumps(body)
    connection.request(verb, f"/v1/sessions/{lent.session}/{path}", data, headers)
    return connection


def test_what_it_follows_is_not_shown_any_more(lent: Lent) -> None:
    base = f"/v1/sessions/{lent.session}/processes"
    argv = ["sh", "-c", "echo one; sleep 1007"]
    process = lent.server.ask("POST", base, {"argv": argv}).json["id"]
    with contextlib.closing(open_request(lent, "GET", f"processes/{process}/follow")) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"event: chunk")
        assert lent.revoke().status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
        answer.close()


def test_its_command_dies(lent: Lent) -> None:
    shell = lent.server.ask("POST", f"/v1/sessions/{lent.session}/shells", {"shell": "other"})
    assert shell.status == 200, shell.body
    command = {"command": "sleep 1008"}
    with contextlib.closing(open_request(lent, "POST", "shells/other/run", command)) as connection:
        eventually(lambda: lent.is_running("sleep 1008"))
        assert lent.revoke().status == 200
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            connection.getresponse()
    eventually(lambda: not lent.is_running("sleep 1008"))


def test_what_a_key_has_open_ends_when_it_expires(lent: Lent) -> None:
    base = f"/v1/sessions/{lent.session}/processes"
    argv = ["sh", "-c", "echo one; sleep 1009"]
    process = lent.server.ask("POST", base, {"argv": argv}).json["id"]
    path = f"processes/{process}/follow"
    with (
        lent.dial("pty?command=echo+up;sleep+1010") as ws,
        contextlib.closing(open_request(lent, "GET", path)) as connection,
    ):
        while ws.recv(20) != b"up\r\n":
            pass
        answer = connection.getresponse()
        assert answer.readline().startswith(b"event: chunk")
        assert lent.let_expire().status == 200
        assert is_over(ws)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
        answer.close()
    eventually(lambda: not lent.is_running("sleep 1010"))
    assert lent.server.ask("GET", "/v1/sessions", key=lent.key).status == 401


def test_who_revokes_their_own_key_is_told_that_it_is_done(server: Running) -> None:
    made = server.ask("POST", "/v1/keys", {"owner": "ada", "scope": "admin"}).json
    assert server.ask("DELETE", f"/v1/keys/{made['id']}", key=made["key"]).status == 200
    assert server.ask("GET", "/v1/sessions", key=made["key"]).status == 401
