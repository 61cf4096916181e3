"""Who may log in, and where the key is then: in one tab, and nowhere else."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from browser_of_tests import Dashboard, ask, make_key
from daemon_of_tests import Daemon

GONE = re.compile("revoked|expired")


def ticket_of(daemon: Daemon, key: str) -> str:
    made = ask(daemon, "POST", "/v1/tickets", None, key)
    assert isinstance(made, dict)
    return str(made["ticket"])


def test_a_wrong_key_is_told_and_a_right_one_opens_the_dashboard(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.expect_problem("401")
    dashboard.open()
    page.get_by_label("API key").fill("hutch_not-a-key")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    dashboard.log_in()
    expect(page.get_by_role("link", name="Administration")).to_be_visible()


def test_a_key_stays_in_its_tab(dashboard: Dashboard) -> None:
    key = dashboard.daemon.key
    assert key
    dashboard.log_in()
    dashboard.page.reload()
    expect(dashboard.page.get_by_role("button", name="Log out")).to_be_visible()
    assert key not in dashboard.storage()
    other = dashboard.context.new_page()
    other.goto(dashboard.daemon.url)
    expect(other.get_by_label("API key")).to_be_visible()
    assert other.evaluate("sessionStorage.length") == 0


def test_no_request_has_the_key_in_its_address(dashboard: Dashboard) -> None:
    seen = list[str]()
    dashboard.context.on("request", lambda request: seen.append(request.url))
    dashboard.page.on("websocket", lambda socket: seen.append(socket.url))
    dashboard.log_in()
    dashboard.make_box()
    dashboard.terminal()
    key = dashboard.daemon.key
    assert key and len(seen) > 5
    assert not [url for url in seen if key in url]


def test_logging_out_forgets_the_key(dashboard: Dashboard) -> None:
    dashboard.log_in()
    dashboard.button("Log out").click()
    expect(dashboard.page.get_by_label("API key")).to_be_visible()
    dashboard.page.reload()
    expect(dashboard.page.get_by_label("API key")).to_be_visible()
    assert dashboard.page.evaluate("sessionStorage.length") == 0


def test_a_link_with_a_ticket_logs_in_once(dashboard: Dashboard) -> None:
    _, key = make_key(dashboard.daemon, "tessa")
    ticket = ticket_of(dashboard.daemon, key)
    link = f"{dashboard.daemon.url}/#ticket={ticket}"
    dashboard.page.goto(link)
    expect(dashboard.page.get_by_text("tessa · run")).to_be_visible()
    expect(dashboard.page.get_by_text("This link logged you in as tessa.")).to_be_visible()
    assert ticket not in dashboard.page.url
    assert key not in dashboard.page.evaluate("JSON.stringify(Object.entries(sessionStorage))")

    dashboard.expect_problem("401")
    thief = dashboard.context.new_page()
    thief.goto(link)
    expect(thief.get_by_text("This link was used already")).to_be_visible()
    expect(thief.get_by_label("API key")).to_be_visible()
    assert ticket not in thief.url
    assert thief.evaluate("sessionStorage.length") == 0


def test_logging_out_revokes_a_temporary_key(dashboard: Dashboard) -> None:
    dashboard.expect_problem("401|INCOMPLETE|WebSocket")
    page = dashboard.page
    _, own = make_key(dashboard.daemon, "lena")
    page.goto(f"{dashboard.daemon.url}/#ticket={ticket_of(dashboard.daemon, own)}")
    expect(page.get_by_text("lena · run")).to_be_visible()
    temporary = page.evaluate("sessionStorage.getItem('hutch-key')")
    assert ask(dashboard.daemon, "GET", "/v1/me", key=temporary)
    dashboard.make_box()
    dashboard.terminal()
    dashboard.button("Log out").click()
    expect(page.locator(".notice")).to_contain_text("temporary key of this tab is revoked")
    assert page.evaluate("sessionStorage.length") == 0
    with pytest.raises(RuntimeError, match="401"):
        ask(dashboard.daemon, "GET", "/v1/me", key=temporary)
    # A key that was pasted is its owner's: it stays.
    dashboard.log_in(own)
    dashboard.button("Log out").click()
    expect(page.locator(".notice")).to_contain_text("the key itself stays valid")
    assert ask(dashboard.daemon, "GET", "/v1/me", key=own)


def test_logging_out_says_if_a_temporary_key_could_not_be_revoked(dashboard: Dashboard) -> None:
    dashboard.expect_problem("Failed to load resource|ERR_FAILED")
    page = dashboard.page
    _, own = make_key(dashboard.daemon, "olga")
    page.goto(f"{dashboard.daemon.url}/#ticket={ticket_of(dashboard.daemon, own)}")
    expect(page.get_by_text("olga · run")).to_be_visible()
    page.route("**/v1/keys/*", lambda route: route.abort())
    dashboard.button("Log out").click()
    expect(page.locator(".notice")).to_contain_text("hutch key revoke")
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_ticket_gives_no_more_rights_than_its_maker_has(dashboard: Dashboard) -> None:
    _, key = make_key(dashboard.daemon, "reader", "read")
    dashboard.page.goto(f"{dashboard.daemon.url}/#ticket={ticket_of(dashboard.daemon, key)}")
    expect(dashboard.page.get_by_text("reader · read")).to_be_visible()
    expect(dashboard.page.get_by_text("Your key may only look")).to_be_visible()
    expect(dashboard.page.get_by_role("button", name="Make a sandbox")).to_have_count(0)


def test_a_key_that_is_revoked_under_the_page_leads_to_the_login(dashboard: Dashboard) -> None:
    dashboard.expect_problem("401")
    id, key = make_key(dashboard.daemon, "rita")
    dashboard.log_in(key)
    dashboard.make_box()
    dashboard.terminal()
    dashboard.expect_problem("WebSocket|INCOMPLETE")
    ask(dashboard.daemon, "DELETE", f"/v1/keys/{id}")
    expect(dashboard.page.get_by_role("status").filter(has_text=GONE)).to_be_visible()
    expect(dashboard.page.get_by_label("API key")).to_be_visible()
    assert dashboard.page.evaluate("sessionStorage.length") == 0


def test_owners_see_their_own_sessions_and_no_administration(dashboard: Dashboard) -> None:
    daemon = dashboard.daemon
    _, anna = make_key(daemon, "anna")
    _, bert = make_key(daemon, "bert")
    ids = {}
    for name, key in (("anna", anna), ("bert", bert)):
        made = ask(daemon, "POST", "/v1/sessions", {"labels": {"of": name}}, key)
        assert isinstance(made, dict)
        ids[name] = str(made["id"])
    dashboard.log_in(anna)
    page = dashboard.page
    expect(page.get_by_role("link", name=ids["anna"])).to_be_visible()
    expect(page.get_by_text(ids["bert"])).to_have_count(0)
    expect(page.get_by_role("link", name="Administration")).to_have_count(0)
    dashboard.go("admin/keys")
    expect(page.get_by_text("There is no such page")).to_be_visible()
    dashboard.expect_problem("404|403")
    dashboard.go(f"sandboxes/{ids['bert']}")
    expect(page.get_by_text("There is no such sandbox")).to_be_visible()
    for id in ids.values():
        ask(daemon, "DELETE", f"/v1/sessions/{id}")
