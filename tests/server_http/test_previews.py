"""Previews: a browser opens a port of a box without a key, and a box gets no further than that."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_of_tests import Answer, Running, eventually

from hutch.server.keys import LOCAL, OPEN, OPERATOR, Caller, Keys
from hutch.server.store import Store
from hutch.server.tickets import (
    MAX_PREVIEWS,
    MAX_PREVIEWS_OF_OWNER,
    PREVIEW_SECONDS,
    Previews,
)

SITE = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("content-length") or 0)
        body = json.dumps({
            "path": self.path, "verb": self.command, "body": self.rfile.read(length).decode(),
            "headers": {name.lower(): value for name, value in self.headers.items()},
        }).encode()
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
        else:
            self.send_response(200)
        for name, value in (
            ("Set-Cookie", "a=b"), ("Content-Security-Policy", "default-src *"),
            ("Access-Control-Allow-Origin", "*"), ("X-Frame-Options", "DENY"), ("NEL", "{}"),
            ("Report-To", "{}"), ("Reporting-Endpoints", "x=y"), ("WWW-Authenticate", "Basic"),
            ("Referrer-Policy", "unsafe-url"), ("Clear-Site-Data", "*"), ("X-Own", "kept"),
            ("Content-Length", str(len(body))),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_PUT = do_OPTIONS = do_GET
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8126), Handler).serve_forever()
"""


def serve(server: Running, session: str) -> None:
    base = f"/v1/sessions/{session}"
    server.ask("PUT", f"{base}/files/content", data=SITE.encode(), path="site.py")
    server.ask("POST", f"{base}/processes", {"argv": ["python3", "site.py"]})
    eventually(lambda: 8126 in [e["port"] for e in server.ask("GET", f"{base}/ports").json])


@pytest.fixture(scope="module")
def site(server: Running) -> Iterator[str]:
    """A session of the operator's with a website."""
    session = server.session()
    serve(server, session)
    yield session


def preview(server: Running, session: str, key: str | None = "") -> str:
    answer = server.ask("POST", f"/v1/sessions/{session}/ports/8126/preview", key=key)
    assert answer.status == 200, answer.body
    assert answer.json["expires_at"].endswith("Z")
    return str(answer.json["path"])


def opened(server: Running, path: str, verb: str = "GET", **more: Any) -> Answer:
    return server.ask(verb, path, key=None, **more)


def test_a_port_is_opened_without_a_key(server: Running, site: str) -> None:
    path = preview(server, site)
    answer = opened(server, f"{path}a/b%20c?d=e")
    assert (answer.status, answer.json["path"]) == (200, "/a/b%20c?d=e")
    assert opened(server, path).json["path"] == "/"
    posted = opened(server, path, "POST", data=b"hello")
    assert (posted.json["verb"], posted.json["body"]) == ("POST", "hello")


def test_a_page_of_a_box_is_shown_in_a_sandbox_and_loads_nothing_else(
    server: Running, site: str
) -> None:
    path = preview(server, site)
    headers = opened(server, path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["sandbox"] == "allow-scripts allow-forms"  # not allow-same-origin
    own = f"127.0.0.1:{server.port}{path}"
    assert policy["default-src"] == f"{own} data: blob: 'unsafe-inline' 'unsafe-eval'"
    assert policy["form-action"] == policy["base-uri"] == own
    assert policy["frame-ancestors"] == "'self'"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-own"] == "kept"
    for name in (
        "set-cookie", "nel", "report-to", "reporting-endpoints", "www-authenticate",
        "x-frame-options", "clear-site-data", "access-control-allow-origin",
    ):  # fmt: skip
        assert name not in headers


# As a browser asks for what fills a tab: over HTTPS and to its own machine, and over plain HTTP.
TAB = {"Sec-Fetch-Dest": "document"}
PLAIN_TAB = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("asked", [TAB, TAB | PLAIN_TAB, PLAIN_TAB])
def test_a_page_in_a_tab_of_its_own_cannot_lead_it_elsewhere(
    server: Running, site: str, asked: dict[str, str]
) -> None:
    path = preview(server, site)
    framed_path = path.replace("/preview/", "/preview/in-frame.")
    # The page of the box comes in a frame, whose navigation our policy bounds.
    tab = opened(server, f"{path}a%22b?c=%3E&d='", headers=asked)
    assert tab.status == 200 and tab.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in tab.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["frame-src"] == f"127.0.0.1:{server.port}{framed_path}"
    assert "script-src" not in policy and tab.headers["cache-control"] == "no-store"
    framed = re.search(rb'<iframe[^>]* src="([^"]*)"></iframe>', tab.body)
    assert framed and html.unescape(framed[1].decode()) == f"{framed_path}a%22b?c=%3E&d='"
    assert b'sandbox="allow-scripts allow-forms"' in framed[0]
    in_frame = asked | ({"Sec-Fetch-Dest": "iframe"} if asked != PLAIN_TAB else {})
    inner = opened(server, framed_path, headers=in_frame)
    assert inner.json["path"] == "/" and inner.headers["vary"] == "Sec-Fetch-Dest, Accept"
    assert (
        f"form-action 127.0.0.1:{server.port}{framed_path};"
        in (inner.headers["content-security-policy"])
    )
    # Nor does a form fill it, no matter who sends it.
    assert opened(server, path, "POST", data=b"a=b", headers=asked).status == 403
    for wrong in ("/preview/x/", "/preview/in-frame.x/", framed_path.replace("in-", "In-")):
        assert opened(server, wrong, headers=asked).status == 404
    again = opened(server, path.replace("/preview/", "/preview/in-frame.in-frame."), headers=asked)
    assert again.status == 404


def test_a_frames_address_in_a_tab_is_framed_where_the_browser_says_that_it_is_a_tab(
    server: Running, site: str
) -> None:
    path = preview(server, site).replace("/preview/", "/preview/in-frame.")
    tab = opened(server, path, headers=TAB)
    assert b"<iframe" in tab.body and f'src="{path}"'.encode() in tab.body


def test_what_a_browser_knows_of_us_does_not_go_into_the_box(server: Running, site: str) -> None:
    path = preview(server, site)
    told = opened(
        server, path,
        headers={"Cookie": "a=b", "Authorization": "Bearer x", "X-API-Key": "y",
                 "Origin": "null", "Referer": f"http://127.0.0.1{path}", "X-Mine": "z"},
    ).json["headers"]  # fmt: skip
    assert told["x-mine"] == "z" and told["host"] == "localhost:8126"
    assert not {"cookie", "authorization", "x-api-key", "origin", "referer"} & told.keys()
    assert path.split("/")[2] not in json.dumps(told)


def test_a_page_may_ask_its_own_box_and_pages_of_others_may_not(server: Running, site: str) -> None:
    path = preview(server, site)
    crossing = {"Sec-Fetch-Site": "cross-site"}
    asked = opened(server, path, headers={"Origin": "null", **crossing})
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, "null")
    assert "access-control-allow-credentials" not in asked.headers
    before = opened(
        server, f"{path}api", "OPTIONS",
        headers={"Origin": "null", "Access-Control-Request-Method": "PUT", **crossing},
    )  # fmt: skip
    assert (before.status, before.body) == (200, b"")
    assert before.headers["access-control-allow-methods"] == "*"
    own = opened(server, path, "OPTIONS", headers={"Origin": "null"})
    assert own.json["verb"] == "OPTIONS"  # no preflight: the box answers
    foreign = opened(server, path, headers={"Origin": "https://evil.example"})
    assert foreign.status == 403
    assert opened(server, path, headers={"Host": "evil.example"}).status == 421
    # What a page in a sandbox sends to anything else of ours is refused, as before.
    for headers in ({"Origin": "null"}, crossing):
        assert server.ask("GET", "/v1/sessions", headers=headers).status == 403


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/login?next=/", "{path}login?next=/"),
        ("http://localhost:8126/x", "{path}x"),
        ("http://127.0.0.1:8126", "{path}"),
        ("relative", "relative"),
        ("https://elsewhere.example/", "https://elsewhere.example/"),
        ("//elsewhere.example/", "//elsewhere.example/"),
        ("/\\elsewhere.example/", "/\\elsewhere.example/"),
    ],
)
def test_a_redirect_stays_in_the_preview(
    server: Running, site: str, location: str, shown: str
) -> None:
    path = preview(server, site)
    answer = opened(server, f"{path}moved?{location}")
    assert (answer.status, answer.headers["location"]) == (302, shown.format(path=path))


def test_a_path_that_is_wrong_opens_nothing(server: Running, site: str) -> None:
    path = preview(server, site)
    token = path.split("/")[2]
    assert len(token) == 43
    for wrong in (token[:-1], token + "A", token.swapcase(), "x", "%00", "..", "\udcff"):
        answer = opened(server, f"/preview/{wrong.encode('utf-8', 'surrogateescape').hex()}/")
        assert answer.status == 404
    for wrong in (token[:-1], token + "A", token.swapcase(), "%00", "%ff"):
        assert opened(server, f"/preview/{wrong}/").status == 404
    # It is no key, and climbing out of it leads nowhere.
    assert server.ask("GET", "/v1/sessions", key=token).status == 401
    climbed = opened(server, f"{path}../../v1/sessions")
    assert climbed.json["path"] == "/../../v1/sessions"  # the box was asked, and not the API


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "%ef%bc%91", "1" * 5000])
def test_a_port_that_is_none_is_told_so(server: Running, site: str, port: str) -> None:
    answer = server.ask("POST", f"/v1/sessions/{site}/ports/{port}/preview")
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


def test_a_preview_ends_with_its_session_and_with_its_key(server: Running) -> None:
    made = server.ask("POST", "/v1/keys", {"owner": "alice", "scope": "run"}).json
    session = server.ask("POST", "/v1/sessions", {}, key=made["key"]).json["id"]
    serve(server, session)
    first = preview(server, session, made["key"])
    other = preview(server, session)  # the operator's
    assert opened(server, first).status == opened(server, other).status == 200
    assert server.ask("DELETE", f"/v1/keys/{made['id']}").status == 200
    assert opened(server, first).status == 404
    assert opened(server, other).status == 200
    assert server.ask("DELETE", f"/v1/sessions/{session}").status == 200
    assert opened(server, other).status == 404


def test_a_preview_of_an_open_server_ends_with_its_first_key(tmp_path: Path) -> None:
    server = Running(tmp_path, key=None)
    try:
        session = server.session()
        serve(server, session)
        path = preview(server, session)
        assert opened(server, path).status == 200
        made = server.ask("POST", "/v1/keys", {"owner": "alice", "scope": "admin"})
        assert made.status == 200
        assert opened(server, path).status == 404
    finally:
        server.close()


def test_another_owners_port_cannot_be_previewed(server: Running, site: str) -> None:
    bob = server.ask("POST", "/v1/keys", {"owner": "bob"}).json["key"]
    reader = server.ask("POST", "/v1/keys", {"owner": "local", "scope": "read"}).json["key"]
    path = f"/v1/sessions/{site}/ports/8126/preview"
    assert server.ask("POST", path, key=bob).status == 404
    assert server.ask("POST", path, key=reader).status == 403


def test_previews_do_not_open_a_server_to_those_whose_rate_is_used_up(
    tmp_path: Path,
) -> None:
    server = Running(tmp_path)
    try:
        session = server.session()
        serve(server, session)
        path = preview(server, session)
        server.ask("PUT", "/v1/quotas/local", {"rate": 0.01})
        statuses = {opened(server, path).status for _ in range(50)}
        assert 429 in statuses
    finally:
        server.close()


# --- what is remembered --------------------------------------------------------------------


class World:
    """Previews with a clock that the test moves."""

    def __init__(self, keys: Keys) -> None:
        self.now, self.live, self.keys = 1000.0, {"a"}, keys
        self.previews = Previews(keys, lambda id: id in self.live, lambda: self.now)

    def make(self, owner: str = "alice", peer: str = "10.0.0.1", session: str = "a") -> str:
        caller = Caller(owner, "run", peer=peer)
        return self.previews.make(session, 80, caller).path.split("/")[2]

    def opens(self, token: str, peer: str = "10.0.0.1") -> bool:
        try:
            return self.previews.find(token, peer).port == 80
        except Exception as exc:
            assert type(exc).__name__ == "NotFound"
            return False


@pytest.fixture
def world(tmp_path: Path, server: Running) -> Iterator[World]:
    store = server.do(Store.open(tmp_path / "hutch.db"))
    yield World(server.do(Keys.open(store)))
    server.do(store.close())


def test_a_preview_ends_after_an_hour(world: World) -> None:
    token = world.make()
    world.now += PREVIEW_SECONDS - 1
    assert world.opens(token)
    world.now += 1
    assert not world.opens(token)


def test_a_stolen_path_gives_nothing_elsewhere(world: World) -> None:
    token = world.make()
    assert not world.opens(token, "10.0.0.2") and not world.opens(token, "127.0.0.1")
    local = world.make(peer="local")
    assert world.opens(local, "127.0.0.1") and world.opens(local, "::1")
    assert not world.opens(local, "10.0.0.1") and not world.opens(local, "")


def test_a_preview_of_an_open_server_ends_when_that_gets_its_first_key(
    world: World, server: Running
) -> None:
    def make(root: str) -> str:
        caller = Caller(OPERATOR, "admin", root=root, peer="10.0.0.1")
        return world.previews.make("a", 80, caller).path.split("/")[2]

    anyones, the_operators = make(OPEN), make(LOCAL)
    assert world.opens(anyones) and world.opens(the_operators)
    server.do(world.keys.make("alice"))
    assert not world.opens(anyones) and world.opens(the_operators)


def test_previews_are_bounded_and_one_owner_takes_no_others_away(world: World) -> None:
    bobs = world.make("bob")
    tokens = [world.make() for _ in range(MAX_PREVIEWS_OF_OWNER * 2)]
    assert world.opens(bobs)
    assert [world.opens(token) for token in tokens] == (
        [False] * MAX_PREVIEWS_OF_OWNER + [True] * MAX_PREVIEWS_OF_OWNER
    )
    for number in range(MAX_PREVIEWS * 2):
        world.make(f"owner-{number}")
    assert len(world.previews._ports) == MAX_PREVIEWS
    world.live.clear()
    world.make()
    assert len(world.previews._ports) == 1  # those that are over were forgotten
