"""The audit log of a server: what of its requests is in it, and what never is."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_of_tests import Answer, Running
from websockets.sync.client import connect

from hutch.server.audit import verify

SECRET = "a-word-that-nobody-else-uses"


class Audited(Running):
    """A server, and what is new in its log."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, socket_path=True)
        self.folder = folder
        self._seen = 0

    def new(self) -> list[Any]:
        answer = self.ask("GET", "/v1/audit", after=self._seen)
        assert answer.status == 200, answer.body
        if answer.json:
            self._seen = answer.json[-1]["number"]
        return list(answer.json)

    def make_key(self, owner: str, scope: str = "run", **more: Any) -> Any:
        return self.ask("POST", "/v1/keys", {"owner": owner, "scope": scope, **more}).json


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    running = Audited(tmp_path_factory.mktemp("audited"))
    yield running
    running.close()
    assert not verify(running.folder / "audit").problem


@pytest.fixture
def server(audited: Audited) -> Audited:
    audited.new()
    return audited


def test_each_change_is_a_line_with_who_what_when_and_from_where(server: Audited) -> None:
    key = server.make_key("ada", expires="30d", workspaces=["notes"])
    (line,) = server.new()
    assert (line["event"], line["owner"], line["operation"]) == ("request", "local", "MakeKey")
    assert line["target"] == key["id"] and line["outcome"] == "ok" and line["peer"] == "127.0.0.1"
    assert line["detail"]["owner"] == "ada" and line["detail"]["scope"] == "run"
    assert line["detail"]["workspaces"] == "notes" and line["detail"]["expires"] > "2026"
    body = {"workspace_id": "notes", "env": {"TOKEN": SECRET}}
    opened = server.ask(
        "POST", "/v1/sessions", body, key=key["key"], headers={"X-Request-Id": "req-7"}
    )
    id = opened.json["id"]
    run = {"command": f"echo {SECRET}"}
    server.ask("POST", f"/v1/sessions/{id}/shells/main/run", run, key=key["key"])
    path = f"/v1/sessions/{id}/files/content?path={SECRET}"
    server.ask("PUT", path, data=SECRET.encode(), key=key["key"])
    server.ask("DELETE", f"/v1/sessions/{id}", key=key["key"])
    lines = server.new()
    assert [(line["operation"], line["outcome"]) for line in lines] == [
        ("OpenSession", "ok"), ("RunShell", "started"), ("WriteFile", "ok"), ("CloseSession", "ok"),
    ]  # fmt: skip
    assert {(line["owner"], line["key"], line["target"]) for line in lines} == {
        ("ada", key["id"], id)
    }
    assert lines[0]["request"] == "req-7"
    assert lines[0]["detail"] == {"image": "host", "workspace": "notes"}


def test_neither_keys_nor_commands_nor_contents_are_in_it(server: Audited) -> None:
    secrets = [server.make_key("ada")["key"], SECRET, server.key or ""]
    id = server.session(env={"TOKEN": SECRET}, labels={"note": SECRET})
    server.run(id, f"echo {SECRET}")
    server.ask("PUT", f"/v1/sessions/{id}/files/content?path=x", data=SECRET.encode())
    server.ask("GET", "/v1/sessions", key=SECRET)
    server.ask("DELETE", f"/v1/sessions/{id}")
    for path in (server.folder / "audit").iterdir():
        data = path.read_bytes()
        assert data and not [secret for secret in secrets if secret.encode() in data]


def test_reading_is_not_recorded_unless_it_is_denied(server: Audited) -> None:
    ada, bob = server.make_key("ada")["key"], server.make_key("bob")
    id = server.ask("POST", "/v1/sessions", {}, key=ada).json["id"]
    server.new()
    for path in ("/v1/sessions", f"/v1/sessions/{id}", f"/v1/sessions/{id}/files"):
        assert server.ask("GET", path, key=ada).status == 200
    assert server.ask("GET", "/v1/sessions/00000000-000", key=ada).status == 404
    assert server.new() == []
    theirs = server.ask("GET", f"/v1/sessions/{id}/files", key=bob["key"])
    keys = server.ask("GET", "/v1/keys", key=bob["key"])
    server.ask("DELETE", f"/v1/sessions/{id}", key=ada)
    assert (theirs.status, keys.status) == (404, 403)
    lines = server.new()
    assert [(e["event"], e["operation"], e["outcome"], e["key"]) for e in lines[:2]] == [
        ("denied", "ListFiles", "not_yours", bob["id"]),
        ("denied", "ListKeys", "not_permitted", bob["id"]),
    ]
    assert lines[0]["target"] == id


def test_a_quota_that_is_reached_is_a_denial(server: Audited) -> None:
    key = server.make_key("carol")["key"]
    server.ask("PUT", "/v1/quotas/carol", {"sessions": 0})
    assert server.ask("POST", "/v1/sessions", {}, key=key).status == 429
    lines = server.new()
    assert (lines[-2]["operation"], lines[-2]["target"]) == ("SetQuota", "carol")
    assert lines[-2]["detail"]["sessions"] == "0"
    assert (lines[-1]["event"], lines[-1]["outcome"]) == ("denied", "quota_reached")


def test_failed_authentications_name_a_key_only_if_all_of_it_was_shown(tmp_path: Path) -> None:
    server = Audited(tmp_path / "data")
    try:
        old, late = server.make_key("ada"), server.make_key("ada")
        server.ask("DELETE", f"/v1/keys/{old['id']}")
        server.ask("POST", f"/v1/keys/{late['id']}/extend", {"expires": "0s"})
        server.new()
        for key in (None, old["key"], old["key"][:-1] + "?", late["key"]):
            assert server.ask("GET", "/v1/sessions", key=key).status == 401
        basic = {"Authorization": "Basic YTpi"}
        assert server.ask("GET", "/v1/sessions", headers=basic).status == 401
        lines = server.new()
        assert [(e["event"], e["outcome"], e["key"]) for e in lines] == [
            ("auth_failed", "no key", ""),
            ("auth_failed", "revoked", old["id"]),
            ("auth_failed", "unknown key", ""),
            ("auth_failed", "expired", late["id"]),
            ("auth_failed", "malformed", ""),
        ]
        assert {e["peer"] for e in lines} == {"127.0.0.1"}
        # A client without a key cannot fill the disk with this.
        for _ in range(100):
            server.ask("GET", "/v1/sessions", key="wrong")
        assert len(server.new()) <= 20
    finally:
        server.close()


def test_a_server_that_cannot_write_its_log_answers_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "audit").write_text("in the way")
    server = Audited(tmp_path)
    try:
        assert server.ask("POST", "/v1/workspaces", {"id": "lost"}).status == 200
        assert b"hutch_audit_dropped 1.0" in server.ask("GET", "/metrics").body
        (tmp_path / "audit").unlink()
        assert server.ask("POST", "/v1/workspaces", {"id": "kept"}).status == 200
        lines = server.new()
        assert [(e["event"], e["target"]) for e in lines] == [("dropped", ""), ("request", "kept")]
        assert lines[0]["detail"] == {"lines": "1"}
    finally:
        server.close()


def test_typing_into_a_terminal_is_one_line(server: Audited) -> None:
    id = server.session()
    server.new()
    auth = {"Authorization": f"Bearer {server.key}"}
    url = f"ws://127.0.0.1:{server.port}/v1/sessions/{id}/pty?command=cat"
    with connect(url, additional_headers=auth, proxy=None) as ws:
        for _ in range(20):
            ws.send(b"x\n")
        got = b""
        while got.count(b"x") < 40:  # what was typed, and what cat said
            message = ws.recv(20)
            got += message if isinstance(message, bytes) else b""
    server.ask("DELETE", f"/v1/sessions/{id}")
    operations = [line["operation"] for line in server.new()]
    assert operations.count("SendInput") == 1 and operations[0] == "StartProgram"


def test_only_admins_read_it_by_filter_and_in_pages(server: Audited) -> None:
    ada = server.make_key("dora", "run")
    server.ask("POST", "/v1/workspaces", {"id": "of-dora"}, key=ada["key"])
    for scope in ("metrics", "read", "run"):
        key = server.make_key("dora", scope)["key"]
        assert server.ask("GET", "/v1/audit", key=key).status == 403

    def ask(**query: Any) -> Answer:
        return server.ask("GET", "/v1/audit", **query)

    (line,) = server.ask("GET", f"/v1/audit?key={ada['id']}").json
    assert (line["operation"], line["target"]) == ("MakeWorkspace", "of-dora")
    assert {e["event"] for e in ask(owner="dora", event="denied").json} == {"denied"}
    first, second = ask(limit=2).json
    assert [first["number"], second["number"]] == [1, 2]
    assert ask(after=second["number"], limit=1).json[0]["number"] == 3
    assert ask(since="2100-01-01").json == []
    assert ask(since="1h", limit=1).json[0]["number"] == 1
    wrong = ({"since": "soon"}, {"limit": 0}, {"limit": 10_001}, {"after": -1}, {"event": "typo"})
    for query in wrong:
        assert ask(**query).status == 400
    for query in ({"since": "soon"}, {"after": -1}, {"event": "typo"}):
        assert server.ask("GET", "/v1/audit/follow", **query).status == 400


def test_what_comes_by_the_socket_is_local(server: Audited) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(server.socket_path))
        body = json.dumps({"id": "by-socket"}).encode()
        head = (
            "POST /v1/workspaces HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        assert b" 200 " in sock.recv(65536)
    (line,) = server.new()
    assert (line["peer"], line["owner"], line["key"]) == ("local", "local", "")
