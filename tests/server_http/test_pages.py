"""The dashboard's files, and the headers that keep what a box wrote from acting as its page."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_of_tests import Answer, Running

from hutch.server.http.pages import DashboardPages

SCRIPT = b"console.log('a dashboard');" * 200
INDEX = (
    b'<!doctype html><html><head><title>Hutch</title><script type="module" '
    b'src="./assets/index-abc.js"></script></head><body></body></html>'
)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build leaves, and what must not be served beside it."""
    folder = tmp_path_factory.mktemp("built") / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_bytes(INDEX)
    (folder / "sources.sha256").write_text("secret of the build\n")
    (folder.parent / "outside.js").write_text("secret beside it")
    assets = folder / "assets"
    (assets / "index-abc.js").write_bytes(SCRIPT)
    (assets / "index-abc.js.gz").write_bytes(gzip.compress(SCRIPT, mtime=0))
    (assets / "icon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (assets / "notes.txt").write_text("of no known kind")
    (assets / ".hidden.js").write_text("hidden")
    (assets / "link.js").symlink_to(folder.parent / "outside.js")
    (assets / "folder.js").mkdir()
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, static: Path) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("data"), pages=DashboardPages(static))
    yield running
    running.close()


def get(server: Running, path: str, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("GET", path, key=None, headers=named)


def policy(answer: Answer) -> dict[str, str]:
    parts = [part.strip() for part in answer.headers["content-security-policy"].split(";")]
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


def test_a_link_leads_to_the_dashboard_and_to_nothing_else(pages: Running) -> None:
    # As a browser says it for a link of another site, or in the file of `hutch dashboard`.
    link = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    assert get(pages, "/", **link).status == 200
    for path in ("/frame", "/assets/index-abc.js", "/docs", "/v1/me"):
        assert get(pages, path, **link).status == 403
    for other in ({"Sec_Fetch_Dest": "iframe"}, {"Sec_Fetch_Mode": "no-cors"}, {"Origin": "null"}):
        assert get(pages, "/", **link | other).status == 403


def test_the_page_runs_only_scripts_of_this_server(pages: Running) -> None:
    page = get(pages, "/")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    said = policy(page)
    assert said["default-src"] == "'none'" and said["script-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert said["frame-ancestors"] == said["base-uri"] == said["form-action"] == "'none'"
    assert said["frame-src"] == said["font-src"] == "'self'"
    assert said["require-trusted-types-for"] == "'script'"
    host = f"127.0.0.1:{pages.port}"
    assert said["connect-src"] == f"'self' ws://{host} wss://{host}"


def test_the_page_tells_other_pages_nothing_and_is_kept_nowhere(pages: Running) -> None:
    headers = get(pages, "/").headers
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert "camera=()" in headers["permissions-policy"]
    assert "access-control-allow-origin" not in headers and "set-cookie" not in headers


def test_each_page_has_a_nonce_of_its_own_for_styles(pages: Running) -> None:
    def nonce(answer: Answer) -> str:
        (found,) = re.findall(rb'<meta name="style-nonce" content="([\w-]{22,})">', answer.body)
        assert f"'nonce-{found.decode()}'" in policy(answer)["style-src"]
        return str(found)

    assert nonce(get(pages, "/")) != nonce(get(pages, "/"))


def test_a_file_never_changes_and_may_be_kept_for_good(pages: Running) -> None:
    answer = get(pages, "/assets/index-abc.js")
    assert (answer.status, answer.body) == (200, SCRIPT)
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["vary"] == "Accept-Encoding"
    assert "content-encoding" not in answer.headers
    # Opened by itself, a drawing is a page: it may do nothing.
    drawing = get(pages, "/assets/icon.svg")
    assert drawing.headers["content-type"] == "image/svg+xml"
    assert policy(drawing)["default-src"] == "'none'" and "sandbox" in policy(drawing)


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5", "*"])
def test_a_file_is_sent_compressed_to_who_takes_it(pages: Running, accepted: str) -> None:
    answer = get(pages, "/assets/index-abc.js", Accept_Encoding=accepted)
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == SCRIPT and len(answer.body) < len(SCRIPT)
    plain = get(pages, "/assets/icon.svg", Accept_Encoding=accepted)
    assert plain.status == 200 and "content-encoding" not in plain.headers


@pytest.mark.parametrize("accepted", ["", "identity", "gzip;q=0", "br", "gzippy"])
def test_a_file_is_sent_as_it_is_to_who_takes_nothing_else(pages: Running, accepted: str) -> None:
    answer = get(pages, "/assets/index-abc.js", Accept_Encoding=accepted)
    assert answer.body == SCRIPT and "content-encoding" not in answer.headers


@pytest.mark.parametrize(
    "name",
    [
        "none.js", "notes.txt", ".hidden.js", "link.js", "folder.js", "index-abc.js.gz", "",
        "..%2Foutside.js", "%2e%2e%2foutside.js", "..%2f..%2foutside.js", "..%5coutside.js",
        "%2e%2e%2findex.html", "..%2fsources.sha256", "%00.js", "index-abc.js%00", "a%0d%0ab.js",
        "%2Fetc%2Fpasswd", "%252e%252e%252foutside.js", "x" * 200 + ".js", "%c3%a9.js",
    ],
)  # fmt: skip
def test_nothing_but_built_files_is_served(pages: Running, name: str) -> None:
    answer = get(pages, f"/assets/{name}")
    assert answer.status in (400, 401, 404) and b"secret" not in answer.body


@pytest.mark.parametrize("path", ["/assets/../outside.js", "/../outside.js", "/assets/a/b.js"])
def test_no_path_leads_out_of_the_folder(pages: Running, path: str) -> None:
    raw = pages.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert raw.split(b" ")[1] in (b"400", b"401", b"404") and b"secret" not in raw


@pytest.mark.parametrize("path", ["/", "/frame", "/assets/index-abc.js"])
def test_pages_can_be_read_and_nothing_else(pages: Running, path: str) -> None:
    head = pages.ask("HEAD", path, key=None)
    assert (head.status, head.body) == (200, b"") and int(head.headers["content-length"]) > 0
    for verb in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert pages.ask(verb, path).status == 405


@pytest.mark.parametrize("path", ["/", "/frame", "/assets/index-abc.js"])
def test_pages_of_other_sites_cannot_load_or_embed_any_of_it(pages: Running, path: str) -> None:
    for site in ("cross-site", "same-site"):
        assert get(pages, path, Sec_Fetch_Site=site).status == 403
    assert get(pages, path, Origin="https://evil.example").status == 403
    assert get(pages, path, Host="evil.example").status == 421
    assert get(pages, path, Sec_Fetch_Site="same-origin").status == 200


def test_unknown_paths_look_like_others_without_a_key(pages: Running) -> None:
    assert get(pages, "/index.html").status == 401
    assert pages.ask("GET", "/index.html").status == 404


def test_html_of_a_box_gets_a_frame_without_origin_and_network(pages: Running) -> None:
    frame = get(pages, "/frame")
    said = policy(frame)
    # As a header, this holds however the frame is opened: also in a tab of its own.
    assert said["sandbox"] == "allow-scripts"
    assert said["default-src"] == "'none'" and "connect-src" not in said
    assert said["frame-ancestors"] == "'self'" and said["form-action"] == "'none'"
    assert said["script-src"] == "'unsafe-inline' 'unsafe-eval'"
    assert frame.headers["cross-origin-resource-policy"] == "same-origin"
    assert b"event.source !== parent" in frame.body


def test_the_page_knows_whether_this_server_needs_a_key(
    pages: Running, static: Path, tmp_path: Path
) -> None:
    said = b'<meta name="needs-key" content="yes">'
    assert said in get(pages, "/").body
    server = Running(tmp_path / "data", key=None, pages=DashboardPages(static))
    try:
        assert said not in get(server, "/").body
    finally:
        server.close()


def test_without_a_build_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    server = Running(tmp_path / "data", pages=DashboardPages(tmp_path / "nothing"))
    try:
        page = get(server, "/")
        assert page.status == 200 and "unsafe" not in page.headers["content-security-policy"]
        assert b"Node.js 20" in page.body and b'<a href="/docs">' in page.body
        (nonce,) = re.findall(rb'<style nonce="([\w-]+)">', page.body)
        assert f"'nonce-{nonce.decode()}'" in policy(page)["style-src"]
        assert get(server, "/assets/index-abc.js").status == 404
        assert server.ask("GET", "/v1/info").status == 200
    finally:
        server.close()


def test_switched_off_there_is_only_the_api(tmp_path: Path, static: Path) -> None:
    server = Running(tmp_path / "data", pages=DashboardPages(static, is_enabled=False))
    try:
        home = get(server, "/")
        assert (home.status, home.headers["location"]) == (307, "/docs")
        for path in ("/frame", "/assets/index-abc.js"):
            assert server.ask("GET", path).status == 404
    finally:
        server.close()
