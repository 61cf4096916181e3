"""`hutch dashboard`, with a browser that notes what it is told to open."""

from __future__ import annotations

import http.client
import json
import shutil
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from must_work import need
from prompt import Served, boxes, hutch  # noqa: F401

import hutch as hutch_package
from hutch.server.http.pages import is_built

pytestmark = pytest.mark.usefixtures("boxes")


@pytest.fixture(autouse=True)
def built() -> None:
    if not is_built():
        need("dashboard", "it was not built")


@pytest.fixture
def browser(tmp_path: Path) -> Path:
    """A program for BROWSER; what it is told to open is in `opened` beside it."""
    program = tmp_path / "browser"
    program.write_text(f"#!/bin/sh\nprintf %s \"$1\" > '{tmp_path}/opened'\n")
    program.chmod(0o755)
    return program


def redeem(address: str) -> dict[str, str]:
    """What the page at this address does with its ticket."""
    parts = urlsplit(address)
    name, _, ticket = parts.fragment.partition("=")
    assert (name, parts.path, parts.query) == ("ticket", "/", "")
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    body = json.dumps({"ticket": ticket})
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/tickets/redeem", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        made: dict[str, str] = json.loads(answer.read())
        return made
    finally:
        connection.close()


def test_the_browser_is_opened_logged_in_as_the_servers_user(served: Served, browser: Path) -> None:
    own = {"BROWSER": str(browser), "XDG_RUNTIME_DIR": str(browser.parent)}
    said = served("dashboard", env=served.env | own)
    opened = (browser.parent / "opened").read_text()
    # Other users of the machine can read the arguments of a browser: the ticket is in a file.
    assert opened.startswith("file://") and "ticket" not in opened
    page = Path(unquote(urlsplit(opened).path))
    assert page == browser.parent / "hutch" / "dashboard.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    address = said.strip()
    assert address.startswith(f"{served.url}/#ticket=")
    assert f'content="0; url={address}"' in page.read_text()
    made = redeem(address)
    assert (made["scope"], made["owner"], made["label"]) == ("admin", "local", "dashboard")
    # On the command line, the key of a page is one among others.
    assert made["id"] in served("key", "ls")
    assert "a temporary one" in served("key", "extend", made["id"], "--expires", "never", code=125)
    served("key", "revoke", made["id"])


def test_no_ticket_is_put_where_others_can_exchange_the_page(served: Served, browser: Path) -> None:
    (browser.parent / "hutch").mkdir()
    (browser.parent / "hutch").chmod(0o777)
    own = {"BROWSER": str(browser), "XDG_RUNTIME_DIR": str(browser.parent)}
    said = served("dashboard", env=served.env | own, code=125)
    assert "other users can write there" in said and "use --print" in said
    assert not (browser.parent / "opened").exists()


@pytest.mark.parametrize("option", ["--print", "--no-browser"])
def test_the_address_can_be_printed_only(served: Served, browser: Path, option: str) -> None:
    address = served("dashboard", option, env=served.env | {"BROWSER": str(browser)}).strip()
    assert address.startswith(f"{served.url}/#ticket=") and "\n" not in address
    assert not (browser.parent / "opened").exists()


def test_without_a_browser_it_says_what_to_do_with_the_address(served: Served) -> None:
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    env = {name: value for name, value in served.env.items() if name not in screens}
    done = hutch("dashboard", env=env)
    assert done.returncode == 0 and done.stdout.startswith(f"{served.url}/#ticket=".encode())
    port = served.url.rpartition(":")[2]
    assert b"no browser here" in done.stderr and f"ssh -L {port}:".encode() in done.stderr


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    said = Served(tmp_path)("dashboard", "--print", code=125)
    assert "no server is running here" in said and "hutch serve --detach" in said


def test_a_key_of_the_environment_gives_the_page_no_more_than_it_has(served: Served) -> None:
    key = json.loads(served("key", "create", "--owner", "ada", "--scope", "read", "--json"))
    env = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": key["key"]}
    made = redeem(served("dashboard", "--print", env=env).strip())
    assert (made["scope"], made["owner"], made["parent"]) == ("read", "ada", key["id"])
    wrong = env | {"HUTCH_API_KEY": "wrong"}
    assert "unknown or revoked key" in served("dashboard", "--print", env=wrong, code=125)


@pytest.fixture
def switched_off(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path / "off", HUTCH_DASHBOARD_ENABLED="false")
    server.data.mkdir(mode=0o700)
    server.begin()
    yield server
    server.end()


def test_a_dashboard_that_is_switched_off_is_not_opened(switched_off: Served) -> None:
    said = switched_off("dashboard", "--print", code=125)
    assert "switched off (dashboard.enabled)" in said


def test_a_server_says_how_to_open_its_dashboard(tmp_path: Path) -> None:
    server = Served(tmp_path / "other")
    done = hutch("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "other"),
                 "--detach", env=server.env)  # fmt: skip
    try:
        assert done.returncode == 0, done.stderr
        naming = f"HUTCH_DATA_DIR={tmp_path / 'other'}"
        assert f"`{naming} hutch dashboard` opens its dashboard".encode() in done.stderr
    finally:
        server.end()


def test_a_server_without_a_built_dashboard_says_so_and_offers_none(tmp_path: Path) -> None:
    # As an installation from sources on a machine without Node.js is.
    shutil.copytree(
        Path(hutch_package.__file__).parent,
        tmp_path / "lib/hutch",
        ignore=shutil.ignore_patterns("__pycache__", "static"),
    )
    server = Served(tmp_path / "data", PYTHONPATH=str(tmp_path / "lib"))
    done = hutch("serve", "--listen", "127.0.0.1:0", "--detach", env=server.env)
    try:
        assert done.returncode == 0, done.stderr
        said, url = done.stderr.decode(), done.stdout.decode().split()[-1]
        assert "it has no dashboard" in said and f"{url}/ says how to get it" in said
        assert "hutch dashboard" not in said
        assert "was not built when Hutch was installed" in server("dashboard", code=125)
        with urllib.request.urlopen(f"{url}/", timeout=60) as page:
            assert b"This server runs, without its dashboard" in page.read()
    finally:
        server.end()
