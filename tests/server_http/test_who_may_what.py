"""Every operation, asked by everybody who may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from http_of_tests import Answer, Running
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from hutch import operations as op
from hutch import serving
from hutch.codec import request_of
from hutch.server.keys import Caller
from hutch.server.rules import Rules
from hutch.serving import Quota

assert serving  # its operations are in the table, too

SAMPLE: dict[str, Any] = {
    "command": "true", "argv": ("true",), "code": "1", "path": "x", "to": "y", "old": "a",
    "new": "b", "pattern": "x", "data": b"", "shell": "main", "context": "main", "process": "p1",
    "output": "o1", "columns": 1, "rows": 1, "ttl_seconds": 60.0, "workspace": "of-alice",
    "id": "of-alice", "image": "host", "size": 0, "owner": "alice", "key": "k", "name": "zzz",
    "call": "0123456789abcdef", "a": "x", "b": "y", "expires": "1d",
    "port": "80", "sessions": "00000000-000", "changes": {}, "digest": "",
    "reference": "127.0.0.1:9/x",
}  # fmt: skip


@dataclass(frozen=True)
class World:
    server: Running
    session: str  # Alice's
    keys: dict[str, str]


@pytest.fixture(scope="module")
def world(server: Running) -> Iterator[World]:
    def key(owner: str, scope: str) -> tuple[str, str]:
        made = server.ask("POST", "/v1/keys", {"owner": owner, "scope": scope}).json
        return made["id"], made["key"]

    alice, reader, bob, old = (
        key("alice", "run"), key("alice", "read"), key("bob", "run"), key("alice", "admin")
    )  # fmt: skip
    assert server.ask("DELETE", f"/v1/keys/{old[0]}").status == 200
    made = server.ask("POST", "/v1/sessions", {}, key=alice[1])
    assert server.ask("POST", "/v1/workspaces", {"id": "of-alice"}, key=alice[1]).status == 200
    gone, monitor = key("alice", "admin"), key("alice", "metrics")
    # Its last second is its first: it has expired before anybody uses it.
    assert server.ask("POST", f"/v1/keys/{gone[0]}/extend", {"expires": "0s"}).status == 200
    keys = {
        "alice": alice[1],
        "reader": reader[1],
        "bob": bob[1],
        "revoked": old[1],
        "expired": gone[1],
        "metrics": monitor[1],
    }
    yield World(server, made.json["id"], keys)


def sample(cls: type[op.Operation], session: str) -> op.Operation:
    given = {}
    for field in fields(cls):
        if field.name == "session":
            given["session"] = session
        elif field.default is MISSING and field.default_factory is MISSING:
            given[field.name] = SAMPLE[field.name]
    return cls(**given)


def ask(world: World, operation: op.Operation, key: str | None) -> Answer:
    request = request_of(operation)
    body = None if request.body is None else json.loads(request.body)
    headers = {"Accept": "application/json"}
    return world.server.ask(
        request.verb, request.path, body, data=request.stream, key=key, headers=headers,
        **request.query,
    )  # fmt: skip


# Public ones are tested by what they check themselves: tests/server_http/test_tickets.py.
OPERATIONS = sorted(name for name, cls in op.TABLE.items() if not cls.is_public)
FOR_ANY_KEY = {"WhoAmI"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_a_key_that_is_good_now_nothing_is_done(world: World, name: str) -> None:
    operation = sample(op.TABLE[name], world.session)
    wrong = [None, "wrong", "hutch_abcdefgh_" + "x" * 40]
    for key in (*wrong, world.keys["revoked"], world.keys["expired"]):
        answer = ask(world, operation, key)
        assert (answer.status, answer.error) == (401, "UNAUTHORIZED")


@pytest.mark.parametrize("name", sorted({*OPERATIONS} - FOR_ANY_KEY))
def test_a_metrics_key_performs_no_operation(world: World, name: str) -> None:
    answer = ask(world, sample(op.TABLE[name], world.session), world.keys["metrics"])
    assert (answer.status, answer.error) == (403, "NOT_PERMITTED")
    assert 'key; this key has scope "metrics"' in answer.json["message"]


def test_a_metrics_key_reads_the_metrics(world: World) -> None:
    answer = world.server.ask("GET", "/metrics", key=world.keys["metrics"])
    # Those of the whole server: it is for a monitor, not for its owner's own sessions.
    assert answer.status == 200 and b"hutch_audit_dropped 0.0" in answer.body
    own = world.server.ask("GET", "/metrics", key=world.keys["reader"])
    assert own.status == 200 and b"hutch_audit_dropped" not in own.body
    assert world.server.ask("POST", "/mcp", {}, key=world.keys["metrics"]).status in (403, 404)


def test_only_who_knows_the_whole_key_is_told_that_it_expired(world: World) -> None:
    key = world.keys["expired"]
    told = world.server.ask("GET", "/v1/sessions", key=key)
    assert told.status == 401 and "this key expired at 20" in told.json["message"]
    assert "hutch key extend" in told.json["message"]
    for near in (key[:-1] + ("a" if key[-1] != "a" else "b"), key[: len("hutch_abcdefgh_")]):
        other = world.server.ask("GET", "/v1/sessions", key=near)
        assert (other.status, "expired" in other.json["message"]) == (401, False)


@dataclass(frozen=True)
class Limited:
    """Alice's key for one workspace, and what she has beside it."""

    server: Running
    key: str
    reachable: tuple[str, ...]
    hidden: str

    def ask(self, verb: str, path: str, body: Any = None) -> Answer:
        return self.server.ask(verb, path, body, key=self.key)


@pytest.fixture
def limited(world: World) -> Iterator[Limited]:
    server, alice = world.server, world.keys["alice"]
    made = server.ask("POST", "/v1/keys", {"owner": "alice", "workspaces": ["notes"]}).json
    assert made["workspaces"] == ["notes"]
    opened = [
        server.ask("POST", "/v1/sessions", {"workspace_id": name}, key=alice).json["id"]
        for name in ("notes", "private")
    ]
    yield Limited(server, made["key"], (world.session, opened[0]), opened[1])
    for id in opened:
        server.ask("DELETE", f"/v1/sessions/{id}", key=alice)


def test_a_key_limited_to_a_workspace_reaches_no_other(limited: Limited) -> None:
    for id in limited.reachable:
        assert limited.ask("GET", f"/v1/sessions/{id}").status == 200
    for name in [n for n in OPERATIONS if "{session}" in op.TABLE[n].route]:
        world = World(limited.server, limited.hidden, {})
        answer = ask(world, sample(op.TABLE[name], limited.hidden), limited.key)
        assert (answer.status, answer.error) == (404, "SESSION_NOT_FOUND"), name
    port = limited.ask("GET", f"/v1/sessions/{limited.hidden}/ports/80/http/")
    assert port.status == 404
    shown = [each["id"] for each in limited.ask("GET", "/v1/sessions").json]
    assert set(limited.reachable) <= set(shown) and limited.hidden not in shown
    found = limited.ask("GET", "/v1/workspaces").json["workspaces"]
    assert [each["id"] for each in found] == ["notes"]
    refused = [
        limited.ask("POST", "/v1/sessions", {"workspace_id": "private"}),
        limited.ask("POST", "/v1/workspaces", {"id": "more"}),
        limited.ask("GET", "/v1/workspaces/private"),
        limited.ask("DELETE", "/v1/workspaces/private"),
        limited.ask("GET", "/v1/workspaces/private/export"),
        limited.ask("GET", "/v1/workspaces/private/files"),
        limited.ask("GET", "/v1/workspaces/private/fs"),
        limited.ask("PUT", "/v1/workspaces/private/import"),
        limited.ask("PUT", "/v1/workspaces/private/files/content?path=x"),
    ]
    assert [answer.status for answer in refused] == [403] * len(refused)
    assert "limited to workspace notes" in refused[0].json["message"]


def test_a_key_limited_to_an_image_opens_and_sees_no_other(world: World) -> None:
    body = {"owner": "alice", "images": ["python"]}
    key = world.server.ask("POST", "/v1/keys", body).json["key"]
    for image in ("host", ""):  # which the server makes `host`
        refused = world.server.ask("POST", "/v1/sessions", {"image": image}, key=key)
        assert refused.status == 403 and "limited to image python" in refused.json["message"]
    assert world.server.ask("GET", f"/v1/sessions/{world.session}", key=key).status == 404
    assert world.server.ask("GET", "/v1/sessions", key=key).json == []
    # As the docs say: which data it reaches is another limit.
    assert world.server.ask("GET", "/v1/workspaces/of-alice/files", key=key).status == 200
    both = world.server.ask("POST", "/v1/keys", body | {"workspaces": ["notes"]}).json["key"]
    assert world.server.ask("GET", "/v1/workspaces/of-alice/files", key=both).status == 403


def test_an_admin_reaches_the_files_of_any_workspace_and_nobody_else_does(world: World) -> None:
    server, alice = world.server, world.keys["alice"]
    body = b"of alice"
    path = "/v1/workspaces/of-alice/files"
    written = server.ask("PUT", f"{path}/content", data=body, key=alice, path="notes")
    assert written.status == 200
    admin = server.ask("GET", f"{path}/content", path="notes", owner="alice")
    assert (admin.status, admin.body) == (200, body)
    assert server.ask("GET", f"{path}/content", path="notes").status == 404  # the admin's own
    own = server.ask("GET", f"{path}/content", key=alice, path="notes", owner="alice")
    assert own.body == body
    for key in ("bob", "reader", "metrics"):
        for verb in ("GET", "DELETE"):
            other = "bob" if key == "reader" else "alice"  # the reader is Alice's
            refused = server.ask(verb, path, key=world.keys[key], path="notes", owner=other)
            assert (refused.status, refused.error) == (403, "NOT_PERMITTED"), (key, verb)
    # A slash in the name is no way around that.
    for name in ("alice%2Fof-alice", "..%2Falice%2Fof-alice", "%2Fof-alice"):
        answer = server.ask("GET", f"/v1/workspaces/{name}/files", key=world.keys["bob"])
        assert answer.status in (400, 403, 404), name
    for odd in ("..", "a/b", "../alice", "ALICE"):
        assert server.ask("GET", path, owner=odd).status == 400


@pytest.mark.parametrize("name", [n for n in OPERATIONS if op.TABLE[n].needs in ("run", "admin")])
def test_a_key_that_may_read_changes_nothing(world: World, name: str) -> None:
    answer = ask(world, sample(op.TABLE[name], world.session), world.keys["reader"])
    assert (answer.status, answer.error) == (403, "NOT_PERMITTED")


@pytest.mark.parametrize("name", [n for n in OPERATIONS if op.TABLE[n].needs == "admin"])
def test_a_key_that_may_run_is_no_operators(world: World, name: str) -> None:
    answer = ask(world, sample(op.TABLE[name], world.session), world.keys["alice"])
    assert answer.status == 403


OF_SOMEBODY = [
    name for name in OPERATIONS
    if ("{session}" in op.TABLE[name].route or "{workspace}" in op.TABLE[name].route)
    and op.TABLE[name].needs != "admin"  # those are refused before anything is looked for
]  # fmt: skip


@pytest.mark.parametrize("name", OF_SOMEBODY)
def test_what_is_somebody_elses_does_not_exist(world: World, name: str) -> None:
    if name == "ImportWorkspace":
        pytest.skip("it makes a workspace of this name for any caller")
    operation = sample(op.TABLE[name], world.session)
    theirs = ask(world, operation, world.keys["bob"])
    nobodys = ask(world, sample(op.TABLE[name], "00000000-000"), world.keys["bob"])
    assert theirs.status == 404
    if "{session}" in op.TABLE[name].route:
        # Nor is there a word in it by which one could tell.
        said = theirs.json["message"].replace(world.session, "00000000-000")
        assert (nobodys.status, nobodys.json["message"]) == (404, said)


def test_lists_have_only_what_is_ones_own(world: World) -> None:
    for key, mine in (("alice", True), ("reader", True), ("bob", False)):
        sessions = world.server.ask("GET", "/v1/sessions", key=world.keys[key]).json
        assert (world.session in [each["id"] for each in sessions]) is mine
        owned = world.server.ask("GET", "/v1/sessions", key=world.keys[key], owner="alice").json
        assert (world.session in [each["id"] for each in owned]) is mine
        spaces = world.server.ask("GET", "/v1/workspaces", key=world.keys[key]).json["workspaces"]
        assert ("of-alice" in [each["id"] for each in spaces]) is mine
    assert world.server.ask("GET", "/v1/quotas/alice", key=world.keys["bob"]).status == 403


ROUTES = [
    ("POST", "/v1/sessions/{}/exec", {"cmd": "true"}),
    ("POST", "/v1/sessions/{}/exec/stream", {"cmd": "true"}),
    ("POST", "/v1/sessions/{}/fs/write", {"path": "x", "text": ""}),
    ("GET", "/v1/sessions/{}/fs/read?path=x", None),
    ("GET", "/v1/sessions/{}/ports/80/http/", None),
    ("POST", "/v1/sessions/{}/ports/80/http/", None),
    ("GET", "/v1/workspaces/of-alice/fs", None),
    ("GET", "/v1/workspaces/of-alice/fs/read?path=x", None),
]


@pytest.mark.parametrize(("verb", "path", "body"), ROUTES)
def test_the_routes_that_are_no_operations_ask_the_same(
    world: World, verb: str, path: str, body: Any
) -> None:
    path = path.format(world.session)
    for key, status in ((None, 401), (world.keys["revoked"], 401), (world.keys["bob"], 404)):
        assert world.server.ask(verb, path, body, key=key).status == status
    if verb == "POST":
        assert world.server.ask(verb, path, body, key=world.keys["reader"]).status == 403


@pytest.mark.parametrize("path", ["pty", "processes/p1/attach", "ports/80/tcp"])
def test_so_do_websockets(world: World, path: str) -> None:
    url = f"ws://127.0.0.1:{world.server.port}/v1/sessions/{world.session}/{path}"
    for key, status in (("", 401), (world.keys["revoked"], 401), (world.keys["bob"], 404)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with pytest.raises(InvalidStatus) as caught:
            connect(url, additional_headers=headers, proxy=None).close()
        assert caught.value.response.status_code == status


HOSTILE = [";$(id)", "-rf", "a\nb", "%n%s", "../..", "a\0b", "`id`", "'\"", "x" * 5000, "é"]


@pytest.mark.parametrize("odd", HOSTILE)
def test_odd_names_are_refused_or_are_just_names(world: World, odd: str) -> None:
    for body in ({"image": odd}, {"workspace_id": odd}, {"user": odd}, {"workdir": "/" + odd}):
        answer = world.server.ask("POST", "/v1/sessions", body)
        if answer.status == 201:
            world.server.ask("DELETE", f"/v1/sessions/{answer.json['id']}")
        assert answer.status in (201, 400, 404), answer.body
    for operation in (
        op.RunShell(world.session, "true", shell=odd),
        op.WaitProgram(world.session, odd),
        serving.GetWorkspace(odd),
        serving.RemoveImage(odd),
        serving.SizePool(odd, 0),
        serving.GetQuota(odd),
        serving.RevokeKey(odd),
        op.StartProgram(world.session, (odd,)),
    ):
        answer = ask(world, operation, "")
        assert answer.status < 500, (operation, answer.body)


def test_one_owner_who_asks_too_often_does_not_slow_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rules = Rules(quota=Quota(rate=5))
    server = Running(tmp_path_factory.mktemp("rate"), rules=rules)
    try:
        keys = [
            server.ask("POST", "/v1/keys", {"owner": name, "scope": "run"}).json["key"]
            for name in ("greedy", "modest")
        ]
        found = [server.ask("GET", "/v1/sessions", key=keys[0]).status for _ in range(60)]
        assert 429 in found
        many = server.ask("GET", "/v1/sessions", key=keys[0])
        assert many.status == 200 or many.headers["retry-after"]
        assert server.ask("GET", "/v1/sessions", key=keys[1]).status == 200
    finally:
        server.close()


def test_a_request_counts_once_however_much_it_does(tmp_path: Path) -> None:
    server = Running(tmp_path / "data", rules=Rules(quota=Quota(rate=0.01)))
    session: str = server.ask("POST", "/v1/sessions", {}).json["id"]
    try:
        base = f"/v1/sessions/{session}"
        path = f"{base}/files/content"
        form = (
            b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nabc\r\n"
            b"--x\r\nContent-Disposition: form-data; name=file; filename=b\r\n\r\nabc\r\n--x--\r\n"
        )
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        found = [
            server.ask("POST", f"{base}/fs/upload", data=form, headers=kind).status,
            server.ask("GET", path, path="a", headers={"Range": "bytes=1-1"}).status,
            server.ask("GET", f"{base}/stats").status,
            *(server.ask("GET", path, path="b").status for _ in range(6)),
        ]
        assert found == [200, 206, *[200] * 7]  # with the session, ten: as many as it may at once
        refused = server.ask("GET", "/v1/no-such-path")
        assert (refused.status, refused.error) == (429, "QUOTA_REACHED")
        assert int(refused.headers["retry-after"]) > 1
        assert server.ask("GET", "/healthz").status == 200
    finally:
        server.close()


def test_a_terminal_counts_once_and_is_cleaned_up_after_whatever_the_rate(tmp_path: Path) -> None:
    server = Running(tmp_path / "data", rules=Rules(quota=Quota(rate=0.01)))
    auth = {"Authorization": f"Bearer {server.key}"}
    try:
        session: str = server.ask("POST", "/v1/sessions", {}).json["id"]
        url = f"ws://127.0.0.1:{server.port}/v1/sessions/{session}/pty?command=cat"
        with connect(url, additional_headers=auth, proxy=None) as ws:
            process = json.loads(ws.recv(20))["process"]
            got = b""
            for number in range(40):
                ws.send(b"%d,\n" % number)
            while b"39," not in got:
                message = ws.recv(20)
                assert isinstance(message, bytes), message
                got += message
            while server.ask("GET", "/v1/sessions").status == 200:
                pass  # until nothing more is allowed
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers=auth, proxy=None)
            assert refused.value.response.status_code == 429
            assert "retry-after" in refused.value.response.headers
        asked = op.WaitProgram(session, process, ended=True, timeout=20)
        ended = server.do(server.service.perform(asked, Caller("local", "admin")))
        assert ended.exit_code == 137
    finally:
        server.close()
