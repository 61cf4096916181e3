"""Every operation has its route, and answers as it is declared."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import threading

import pytest
from http_of_tests import Running, eventually

from hutch import codec, serving
from hutch import operations as op
from hutch.server.http import streams
from hutch.types import BoxInfo, Execution

NOBODY = "00000000-000"


def test_it_says_that_it_is_alive_without_a_key(server: Running) -> None:
    answer = server.ask("GET", "/healthz", key=None)
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert server.ask("GET", "/readyz", key=None).json == {"status": "ready"}


def test_a_session_is_made_and_found_and_closed(server: Running) -> None:
    made = server.ask("POST", "/v1/sessions", {"labels": {"for": "me"}, "ttl_seconds": 60})
    assert made.status == 201
    info = codec.from_json(BoxInfo, made.body)
    assert made.headers["location"] == f"/v1/sessions/{info.id}"
    assert info.labels == {"for": "me"}
    assert info.expires_at - info.created_at == pytest.approx(60, abs=2)
    assert server.ask("GET", f"/v1/sessions/{info.id}").json["status"] == "running"
    assert info.id in [each["id"] for each in server.ask("GET", "/v1/sessions").json]
    assert server.ask("DELETE", f"/v1/sessions/{info.id}").json == {"ok": True}
    gone = server.ask("POST", f"/v1/sessions/{info.id}/shells/main/run", {"command": "true"})
    assert (gone.status, gone.error) == (410, "SESSION_EXPIRED")


def test_a_command_is_answered_with_its_result(server: Running, session: str) -> None:
    result = server.run(session, "echo out; echo err >&2; exit 3")
    assert (result["exit_code"], result["stdout"], result["stderr"]) == (3, "out\n", "err\n")


def test_a_cell_is_answered_with_its_execution(server: Running, session: str) -> None:
    answer = server.ask("POST", f"/v1/sessions/{session}/contexts/main/run", {"code": "6*7"})
    assert codec.from_json(Execution, answer.body).text == "42"


def test_output_arrives_while_the_command_runs(server: Running, session: str) -> None:
    path = f"/v1/sessions/{session}/shells/main/run"
    command = "echo first; while [ ! -e /workspace/go ]; do sleep 0.05; done; echo last"
    events = server.events("POST", path, {"command": command})
    assert next(events) == ("chunk", {"stream": "stdout", "text": "first\n"})
    put = server.ask("PUT", f"/v1/sessions/{session}/files/content", data=b"", path="go")
    assert put.status == 200
    assert next(events) == ("chunk", {"stream": "stdout", "text": "last\n"})
    name, body = next(events)
    assert (name, body["stdout"]) == ("done", "first\nlast\n")
    assert list(events) == []
    server.run(session, "rm go")


def test_a_stream_that_cannot_begin_has_a_status_of_its_own(server: Running) -> None:
    answer = server.ask(
        "POST", f"/v1/sessions/{NOBODY}/shells/main/run", {"command": "true"},
        headers={"Accept": "text/event-stream"},
    )  # fmt: skip
    assert (answer.status, answer.error) == (404, "SESSION_NOT_FOUND")


def test_who_hangs_up_stops_the_command(server: Running, session: str) -> None:
    path = f"/v1/sessions/{session}/shells/main/run"
    events = server.events("POST", path, {"command": "echo begun; exec -a wanted sleep 1000"})
    assert next(events)[1]["text"] == "begun\n"
    events.close()
    eventually(lambda: not _runs(server, session, "wanted"))


def test_who_hangs_up_stops_a_command_whose_answer_is_not_streamed(
    server: Running, session: str
) -> None:
    server.ask("POST", f"/v1/sessions/{session}/shells", {"shell": "aside"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(
        "POST", f"/v1/sessions/{session}/shells/aside/run",
        json.dumps({"command": "sleep 1001"}),
        {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
    )  # fmt: skip
    eventually(lambda: _runs(server, session, "sleep 1001"))
    connection.close()
    eventually(lambda: not _runs(server, session, "sleep 1001"))


def _runs(server: Running, session: str, what: str) -> bool:
    pattern = f"[{what[0]}]{what[1:]}"
    argv = [
        "sh",
        "-c",
        f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q '{pattern}'",
    ]
    answer = server.ask("POST", f"/v1/sessions/{session}/run", {"argv": argv})
    return bool(answer.json["exit_code"] == 0)


def test_a_program_goes_on_by_itself_and_can_be_followed(server: Running, session: str) -> None:
    base = f"/v1/sessions/{session}/processes"
    started = server.ask("POST", base, {"argv": ["sh", "-c", "read x; echo got $x"]}).json
    assert started["id"] in [each["id"] for each in server.ask("GET", base).json]
    assert started["started_at"].endswith("Z")
    answer = server.ask("POST", f"{base}/{started['id']}/stdin", data=b"this\n")
    assert answer.json == {"ok": True}
    result = server.ask("GET", f"{base}/{started['id']}/follow").json
    assert result["stdout"] == "got this\n"
    piece = server.ask("GET", f"{base}/{started['id']}/logs", offset=4).json
    assert (piece["start"], piece["total"]) == (4, 9)


def test_a_watch_says_ready_and_then_what_changed(server: Running, session: str) -> None:
    events = server.events("GET", f"/v1/sessions/{session}/files/watch", path=".")
    assert next(events)[0] == "ready"
    server.run(session, "touch watched; rm watched")
    name, change = next(events)
    assert (name, change["kind"], change["path"]) == ("change", "created", "/workspace/watched")
    events.close()


def test_a_slash_in_a_name_stays_in_it(server: Running, session: str) -> None:
    request = codec.request_of(op.RunShell(session, "true", shell="a/b c"))
    answer = server.ask("POST", request.path, json.loads(request.body))
    assert "'a/b c'" in answer.json["message"]  # it is no name, but it arrived whole


@pytest.mark.parametrize("id", ["x", "0000", "..%2Fetc", "%2e%2e", "0" * 100, "workspace%2Fdata"])
def test_what_is_no_id_of_a_session_is_told_so(server: Running, id: str) -> None:
    answer = server.ask("GET", f"/v1/sessions/{id}")
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


def test_an_unknown_path_or_verb_is_told_so(server: Running) -> None:
    assert server.ask("GET", "/v1/nothing").status == 404
    answer = server.ask("PATCH", "/v1/sessions")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")
    assert server.ask("GET", "/v1/nothing", key=None).status == 401


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "invalid JSON"),
        (b"[1]", "a JSON object"),
        (b'{"command": 1}', "command must be text"),
        (b'{"command": "x", "timeout": NaN}', "invalid JSON"),
        (b'{"command": "x", "timeout": 1e999}', "invalid JSON"),
        (b'{"command": "x", "more": 1}', "unknown field"),
        (b'{"command": "\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "invalid JSON"),
        (b'{"command": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "too deeply"),
        (b'{"command": ' + b'{"a":' * 100_000, "too deeply"),
    ],
)
def test_a_body_that_is_wrong_is_told_how(
    server: Running, session: str, body: bytes, said: str
) -> None:
    answer = server.ask(
        "POST", f"/v1/sessions/{session}/shells/main/run", data=body,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")
    assert said in answer.json["message"]


def test_a_json_body_has_a_limit_and_a_type(server: Running, session: str) -> None:
    path = f"/v1/sessions/{session}/shells/main/run"
    large = server.ask("POST", path, {"command": "x" * (3 << 20)})
    assert large.status == 413
    chunked = server.ask(
        "POST", path, data=(b"x" * 65536 for _ in range(64)),
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert chunked.status == 413
    plain = server.ask("POST", path, data=b"{}", headers={"Content-Type": "text/plain"})
    assert plain.status == 415
    packed = server.ask("POST", path, {"command": "true"}, headers={"Content-Encoding": "gzip"})
    assert packed.status == 415


def test_a_request_gets_an_id_or_keeps_its_own(server: Running) -> None:
    kept = server.ask("GET", "/healthz", headers={"X-Request-ID": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    for odd in ("a b", "x" * 200, "<script>"):
        made = server.ask("GET", "/healthz", headers={"X-Request-ID": odd})
        assert len(made.headers["x-request-id"]) == 8


def test_there_is_a_page_and_a_document_of_it_all(server: Running) -> None:
    paths = server.ask("GET", "/openapi.json", key=None).json["paths"]
    for cls in op.TABLE.values():
        assert cls.verb.lower() in paths[cls.route], cls
    page = server.ask("GET", "/docs", key=None)
    assert b"<script src=" in page.body and b"http" not in page.body
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.ask("GET", "/docs.js", key=None).status == 200


def test_figures_need_a_key_and_name_routes_not_paths(server: Running, session: str) -> None:
    assert server.ask("GET", "/metrics", key=None).status == 401
    server.ask("GET", f"/v1/sessions/{session}")
    text = server.ask("GET", "/metrics").body.decode()
    assert 'route="/v1/sessions/{session}"' in text
    assert session not in text
    assert "hutch_sessions_running" in text


def test_what_a_server_is_can_be_asked(server: Running) -> None:
    info = codec.from_json(serving.ServerInfo, server.ask("GET", "/v1/info").body)
    assert info.backend == "namespaces"
    assert info.relax == ()  # nothing of such a box can be left out


def test_a_quiet_stream_shows_that_it_lives(
    server: Running, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT", 0.05)
    answer = server.ask(
        "POST", f"/v1/sessions/{session}/shells/main/run", {"command": "sleep 1"},
        headers={"Accept": "text/event-stream"},
    )  # fmt: skip
    assert answer.body.count(b":\n\n") > 2
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("shells/main/run", {"command": "seq 1 20000"}),
        ("contexts/main/run", {"code": "for n in range(1, 20001): print(n)"}),
    ],
)
def test_what_a_journal_shows_the_ends_of_can_be_read_whole(
    server: Running, session: str, path: str, body: dict[str, str]
) -> None:
    whole = "".join(f"{number}\n" for number in range(1, 20001))
    base = f"/v1/sessions/{session}"
    result = server.ask("POST", f"{base}/{path}", body).json
    assert not result.get("truncated") and result["kept"]
    entry = server.ask("GET", f"{base}/journal").json[-1]["body"]
    assert entry["kept"] == result["kept"]
    assert len(entry.get("output") or entry["stdout"]) < len(whole)
    piece = server.ask("GET", f"{base}/outputs/{entry['kept']}", length=1 << 20).json
    assert base64.b64decode(piece["data"]).decode() == whole
    server.ask("POST", f"{base}/shells/main/run", {"command": "seq 1 1000"})
    assert "kept" not in server.ask("GET", f"{base}/journal").json[-1]["body"]


def test_browsers_and_proxies_keep_no_answer(server: Running, session: str) -> None:
    path = f"/v1/sessions/{session}"
    server.ask("PUT", f"{path}/files/content", data=b"x", path="kept")
    for answer in (
        server.ask("GET", path),
        server.ask("GET", f"{path}/journal"),
        server.ask("GET", f"{path}/files/content", path="kept"),
        server.ask("GET", f"{path}/nothing"),
        server.ask("GET", "/v1/me", key="wrong"),
    ):
        assert answer.headers["cache-control"] == "no-store", answer.status


def test_a_server_that_stops_answers_what_runs_and_leaves_who_looks_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = Running(tmp_path_factory.mktemp("stopping"))
    session = server.session()
    watching = server.events("GET", f"/v1/sessions/{session}/files/watch")
    assert next(watching)[0] == "ready"
    path = f"/v1/sessions/{session}/shells/main/run"
    running = server.events("POST", path, {"command": "echo begun; sleep 0.5; echo ended"})
    assert next(running)[1]["text"] == "begun\n"
    stopping = threading.Thread(target=server.close)
    stopping.start()
    with contextlib.suppress(http.client.IncompleteRead, ConnectionResetError):
        assert list(watching) == []
    assert [event for event, _ in running] == ["chunk", "done"]
    stopping.join(30)
    assert not stopping.is_alive()
