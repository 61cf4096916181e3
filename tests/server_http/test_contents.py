"""Files over HTTP: whole, in ranges, streamed, and never shown as a page."""

from __future__ import annotations

import hashlib
import resource
import socket
from collections.abc import Iterator

import pytest
from http_of_tests import Running


def put(server: Running, session: str, path: str, data: object) -> None:
    answer = server.ask("PUT", f"/v1/sessions/{session}/files/content", data=data, path=path)
    assert answer.status == 200, answer.body


def test_a_file_comes_back_as_it_was_written(server: Running, session: str) -> None:
    data = bytes(range(256)) * 1000
    put(server, session, "all bytes", data)
    answer = server.ask("GET", f"/v1/sessions/{session}/files/content", path="all bytes")
    assert answer.body == data
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''all%20bytes"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    head = server.ask("HEAD", f"/v1/sessions/{session}/files/content", path="all bytes")
    assert (head.status, head.headers["content-length"], head.body) == (200, "256000", b"")


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=8-", 206, b"89"),
        ("bytes=-3", 206, b"789"),
        ("bytes=5-100", 206, b"56789"),
        ("bytes=10-", 416, None),
        ("bytes=5-4", 416, None),
        ("bytes=0-1,3-4", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ],
)
def test_a_range_of_a_file(
    server: Running, session: str, asked: str, status: int, body: bytes | None
) -> None:
    put(server, session, "digits", b"0123456789")
    path = f"/v1/sessions/{session}/files/content"
    answer = server.ask("GET", path, headers={"Range": asked}, path="digits")
    assert answer.status == status
    if status == 206:
        assert answer.headers["content-range"].endswith("/10")
        assert answer.headers["content-length"] == str(len(answer.body))
    if status == 416:
        assert answer.headers["content-range"] == "bytes */10"
    if body is not None:
        assert answer.body == body


def test_names_that_are_not_utf_8_go_both_ways(server: Running, session: str) -> None:
    server.run(session, r"mkdir odd; printf hi > $(printf 'odd/\377x')")
    (entry,) = server.ask("GET", f"/v1/sessions/{session}/files", path="odd").json
    assert entry["path"] == "/workspace/odd/\udcffx"
    answer = server.ask("GET", f"/v1/sessions/{session}/files/content?path=odd/%FFx")
    assert answer.body == b"hi"
    moved = {"path": entry["path"], "to": "odd/plain"}
    assert server.ask("POST", f"/v1/sessions/{session}/files/move", moved).json == {"ok": True}


def test_a_large_file_is_never_whole_in_memory(server: Running) -> None:
    session = server.session(limits={"memory": 1 << 30})
    size, piece = 200, b"\0\1\2\3" * (1 << 18)

    def pieces() -> Iterator[bytes]:
        for _ in range(size):
            yield piece

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    put(server, session, "large", pieces())
    # This process holds the client and the server, and neither has the 200 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 * 1024
    expected = hashlib.sha256(piece * size).hexdigest()
    assert server.run(session, "sha256sum large")["stdout"].split()[0] == expected
    more = (piece for _ in range(512 - size + 20))
    full = server.ask("PUT", f"/v1/sessions/{session}/files/content", data=more, path="x")
    assert (full.status, full.error) == (507, "NO_SPACE")
    assert server.ask("DELETE", f"/v1/sessions/{session}").status == 200


def test_a_file_that_is_not_there_is_not_found(server: Running, session: str) -> None:
    for verb in ("GET", "HEAD"):
        answer = server.ask(verb, f"/v1/sessions/{session}/files/content", path="nowhere")
        assert answer.status == 404
    twice = server.ask("GET", f"/v1/sessions/{session}/files/content?path=a&path=b")
    assert twice.status == 400
    assert server.ask("GET", f"/v1/sessions/{session}/files/content").status == 400


def test_a_workspace_has_the_same_routes_without_a_session(server: Running) -> None:
    base = "/v1/workspaces/data/files"
    assert server.ask("PUT", f"{base}/content", data=b"hello", path="a/b").json == {"value": 5}
    assert server.ask("GET", f"{base}/content", path="a/b").body == b"hello"
    edited = {"path": "a/b", "old": "hello", "new": "bye"}
    assert server.ask("POST", f"{base}/edit", edited).json == {"value": 1}
    assert [e["path"] for e in server.ask("GET", base, path="a").json] == ["/workspace/a/b"]
    tar = server.ask("GET", "/v1/workspaces/data/export")
    assert tar.headers["content-type"] == "application/x-tar"
    into = server.ask("PUT", "/v1/workspaces/other/import", data=tar.body)
    assert into.json["value"] >= 1
    assert server.ask("GET", "/v1/workspaces/other/files/content", path="a/b").body == b"bye"
    for name in ("data", "other"):
        assert server.ask("DELETE", f"/v1/workspaces/{name}").json == {"ok": True}
    gone = server.ask("DELETE", "/v1/workspaces/data")
    assert (gone.status, gone.error) == (404, "WORKSPACE_NOT_FOUND")


def test_an_upload_that_says_it_does_not_fit_into_a_workspace_is_refused_at_once(
    server: Running,
) -> None:
    server.ask("POST", "/v1/workspaces", {"id": "tiny", "quota": 1 << 20})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        path = "/v1/workspaces/tiny/files/content?path=big"
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n"
            f"Content-Length: {1 << 30}\r\n\r\n"
        )
        sock.sendall(head.encode())  # and nothing of the file
        answer = b""
        while b"more than fits" not in answer and (piece := sock.recv(65536)):
            answer += piece
    assert b" 507 " in answer.split(b"\r\n")[0] and b"more than fits" in answer, answer
    assert server.ask("GET", "/v1/workspaces/tiny/files").json == []
