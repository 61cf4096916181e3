"""What operators look at and change over HTTP, as clients see it."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_of_tests import KEY, Running, eventually

from hutch.settings.reading import load
from hutch.settings.writing import SettingsFile


@pytest.fixture(scope="module")
def keys(server: Running) -> dict[str, str]:
    def key(owner: str, scope: str) -> str:
        made = server.ask("POST", "/v1/keys", {"owner": owner, "scope": scope}).json
        return str(made["key"])

    return {"alice": key("alice", "run"), "bob": key("bob", "run"), "reader": key("alice", "read")}


@pytest.fixture(scope="module")
def file(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The config file of the server."""
    folder = tmp_path_factory.mktemp("config")
    file = folder / "hutch.toml"
    file.write_text(f'# mine\napi_key = "{KEY}"\nmax_sessions = 10\n')
    server.service.watching.settings = SettingsFile(
        load(folder, None, file, {}), folder, None, file, {}
    )
    yield file
    server.service.watching.settings = None


# --- sessions -----------------------------------------------------------------------------


def test_sessions_are_followed_as_events(server: Running, session: str) -> None:
    events = server.events("GET", "/v1/sessions/follow", current="true")
    name, info = next(events)
    seen = [info["id"]]
    while name == "session":
        assert info["created_at"].endswith("Z")
        name, info = next(events)
        seen.append(info.get("id"))
    assert name == "ready" and session in seen
    made = server.session(labels={"new": "one"})
    name, info = next(events)
    assert (name, info["id"], info["labels"]) == ("session", made, {"new": "one"})
    server.ask("DELETE", f"/v1/sessions/{made}")
    while info["status"] != "destroyed":
        name, info = next(events)
        assert (name, info["id"]) == ("session", made)
    events.close()


def test_a_revoked_key_follows_nothing_any_more(server: Running) -> None:
    made = server.ask("POST", "/v1/keys", {"owner": "carol"}).json
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "GET", "/v1/sessions/follow",
        headers={"Authorization": f"Bearer {made['key']}", "Accept": "text/event-stream"},
    )  # fmt: skip
    answer = connection.getresponse()
    assert answer.readline() == b"event: ready\n"
    server.ask("DELETE", f"/v1/keys/{made['id']}")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        while answer.readline():
            pass
        raise ConnectionError("it was ended")
    connection.close()
    eventually(lambda: not server.service._sessions.feed.is_followed)


def test_who_leaves_does_not_follow_any_more(server: Running) -> None:
    events = server.events("GET", "/v1/sessions/follow")
    assert next(events)[0] == "ready"
    assert server.service._sessions.feed.is_followed
    events.close()
    eventually(lambda: not server.service._sessions.feed.is_followed)


def test_figures_of_the_last_hour_are_told_to_those_they_are_about(
    server: Running, keys: dict[str, str]
) -> None:
    made = server.ask("POST", "/v1/sessions", {}, key=keys["alice"]).json["id"]
    server.do(server.service.watching.sample())
    mine = server.ask("GET", "/v1/history", key=keys["reader"]).json[-1]
    assert mine["states"] == {"running": 1} and mine["taken_at"].endswith("Z")
    theirs = server.ask("GET", "/v1/history", key=keys["bob"]).json[-1]
    assert (theirs["states"], theirs["opened"]) == ({}, 0)
    assert server.ask("GET", "/v1/history", key=keys["bob"], owner="alice").status == 403
    assert server.ask("GET", "/v1/history", period="year").status == 400
    assert server.ask("GET", "/v1/history", period="day").json == []
    refused = server.ask("POST", "/v1/sessions", {"image": "no-such"}, key=keys["alice"])
    assert refused.status >= 400
    (failure,) = server.ask("GET", "/v1/failures", key=keys["reader"]).json
    assert (failure["kind"], failure["image"], failure["owner"]) == ("open", "no-such", "alice")
    assert failure["code"] == refused.json["code"]
    assert server.ask("GET", "/v1/failures", key=keys["bob"]).json == []
    stats = server.ask("GET", "/v1/stats", key=keys["reader"], sessions=f"{made},x").json
    assert [one["session"] for one in stats] == [made]
    assert server.ask("GET", "/v1/stats", key=keys["bob"], sessions=made).json == []
    server.ask("DELETE", f"/v1/sessions/{made}")


# --- settings -----------------------------------------------------------------------------


def test_settings_are_shown_without_secrets(server: Running, file: Path) -> None:
    answer = server.ask("GET", "/v1/settings")
    report = answer.json
    assert answer.status == 200 and KEY.encode() not in answer.body
    known = {one["key"]: one for one in report["settings"]}
    assert known["api_key"]["value"] == "(set)" and known["api_key"]["secret"]
    assert known["max_sessions"]["origin"] == f"{file}:3"
    assert report["file"] == str(file) and not report["editable"]
    assert "own socket" in report["why_not"]


def test_a_change_is_checked_and_not_made_over_the_network(server: Running, file: Path) -> None:
    before = file.read_text()
    check = server.ask("POST", "/v1/settings/check", {"changes": {"max_sessions": 20}}).json
    assert "+max_sessions = 20" in check["diff"] and check["needs_restart"] == ["max_sessions"]
    wrong = server.ask("POST", "/v1/settings/check", {"changes": {"max_sessions": None, "x": 1}})
    assert set(wrong.json["problems"]) == {"x"}
    body = {"changes": {"mounts": ["/"]}, "digest": check["digest"]}
    refused = server.ask("PUT", "/v1/settings", body)
    assert (refused.status, refused.error) == (403, "NOT_PERMITTED")
    assert "dashboard.edit_settings" in refused.json["message"]
    assert file.read_text() == before


def test_the_servers_own_user_changes_settings_over_its_socket(tmp_path: Path) -> None:
    server = Running(tmp_path, socket_path=True)
    try:
        file = tmp_path / "hutch.toml"
        file.write_text("max_sessions = 10 # ten\n")
        editor = SettingsFile(load(tmp_path, None, file, {}), tmp_path, None, file, {})
        server.service.watching.settings = editor
        digest = server.ask("GET", "/v1/settings").json["digest"]
        change = {"changes": {"max_sessions": 20}, "digest": digest}
        assert server.ask("PUT", "/v1/settings", change).status == 403  # with the operator's key
        answer = over(server.socket_path, "PUT", "/v1/settings", change)
        assert answer["problems"] == {} and answer["digest"] != digest
        assert file.read_text() == "max_sessions = 20 # ten\n"
        again = over(server.socket_path, "PUT", "/v1/settings", change)
        assert again["code"] == "conflict"
        report = over(server.socket_path, "GET", "/v1/settings")
        assert report["editable"]
        (line,) = [
            one
            for one in server.ask("GET", "/v1/audit").json
            if one["operation"] == "ChangeSettings" and one["outcome"] == "ok"
        ]
        assert line["detail"] == {"keys": "max_sessions"} and line["peer"] == "local"
    finally:
        server.close()


def over(path: Path, verb: str, route: str, body: dict[str, Any] | None = None) -> Any:
    """An answer over the Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    try:
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(verb, route, json.dumps(body) if body else None, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_a_server_without_settings_says_so(server: Running) -> None:
    kept, server.service.watching.settings = server.service.watching.settings, None
    try:
        assert server.ask("GET", "/v1/settings").status == 404
        assert server.ask("POST", "/v1/settings/check", {"changes": {}}).status == 404
    finally:
        server.service.watching.settings = kept


# --- the log ------------------------------------------------------------------------------


def test_the_log_is_read_and_followed(server: Running) -> None:
    logger = logging.Logger("of.tests")
    logger.addHandler(server.service.watching.log)
    logger.warning("first\x1b[2J")
    (record,) = server.ask("GET", "/v1/logs", level="warning").json
    assert record["message"] == "first\\x1b[2J" and record["happened_at"].endswith("Z")
    events = server.events("GET", "/v1/logs/follow", after=record["number"])
    logger.error("second")
    name, record = next(events)
    assert (name, record["level"], record["message"]) == ("log", "error", "second")
    events.close()
    assert server.ask("GET", "/v1/logs", level="loud").status == 400
    assert server.ask("GET", "/v1/logs", limit=2001).status == 400
