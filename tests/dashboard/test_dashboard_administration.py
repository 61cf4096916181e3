"""What an operator does in the dashboard: settings and keys."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

from browser_of_tests import Dashboard, ask, make_key
from oci_of_tests import Registry, make_image


def test_a_setting_is_shown_as_a_difference_before_it_is_written(dashboard: Dashboard) -> None:
    page = dashboard.page
    file = Path(dashboard.daemon.folder.parent, "hutch.toml")
    dashboard.log_in(route="admin/settings")
    before = file.read_text()
    page.get_by_label("Search settings").fill("audit")
    field = page.get_by_label(re.compile("audit.*days"))
    field.fill("not a number")
    expect(page.get_by_role("alert")).to_be_visible()
    show = dashboard.button("Show the difference")
    expect(show).to_be_disabled()
    field.fill("12")
    show.click()
    difference = page.get_by_role("dialog", name="Write these changes?")
    expect(difference.locator(".added").filter(has_text="12")).to_be_visible()
    assert file.read_text() == before
    dashboard.button("Write the file").click()
    expect(page.get_by_text("Restart the server for")).to_be_visible()
    assert "# what the operator wrote" in file.read_text()
    assert re.search(r"days = 12\b", file.read_text())


def test_a_key_is_made_used_and_revoked(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.log_in(route="admin/keys")
    # There is a word for no keys at all, and a button in it.
    dashboard.button("Make a key").first.click()
    form = page.get_by_role("dialog", name="Make a key")
    form.get_by_role("textbox", name="Owner").fill("carla")
    form.get_by_role("textbox", name="Label").fill("for the tests")
    form.get_by_role("button", name="Make the key").click()
    made = page.get_by_role("dialog", name="The new key")
    key = (made.locator("pre, code").first.text_content() or "").strip()
    who = ask(dashboard.daemon, "GET", "/v1/me", key=key)
    assert isinstance(who, dict) and who["owner"] == "carla"
    dashboard.button("I have copied it").click()
    expect(page.get_by_text(key)).to_have_count(0)
    row = page.get_by_role("row").filter(has_text="for the tests")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    try:
        ask(dashboard.daemon, "GET", "/v1/me", key=key)
    except RuntimeError as exc:
        assert "401" in str(exc)
    else:
        raise AssertionError("the key works")


def test_an_admin_looks_into_the_workspace_of_another_owner(dashboard: Dashboard) -> None:
    page, daemon = dashboard.page, dashboard.daemon
    _, key = make_key(daemon, "wanda")
    # Of the same name as one of the admin's own, whose files are others.
    ask(daemon, "POST", "/v1/workspaces", {"id": "notes"})
    ask(daemon, "POST", "/v1/workspaces", {"id": "notes"}, key)
    path = "/v1/workspaces/notes/files"
    ask(daemon, "POST", f"{path}/dir", {"path": "deep"}, key)
    made = ask(daemon, "POST", "/v1/sessions", {"workspace_id": "notes"}, key)
    assert isinstance(made, dict)
    command = {"command": "echo of-wanda > /workspace/deep/hers.txt"}
    ask(daemon, "POST", f"/v1/sessions/{made['id']}/shells/main/run", command, key)
    ask(daemon, "DELETE", f"/v1/sessions/{made['id']}", None, key)
    dashboard.log_in(route="admin/workspaces")
    row = page.get_by_role("row").filter(has_text="wanda")
    row.get_by_role("link", name="Browse").click()
    expect(page.get_by_text("It belongs to wanda")).to_be_visible()
    dashboard.button("deep").click()
    dashboard.button("hers.txt").click()
    expect(page.get_by_label("File deep/hers.txt")).to_contain_text("of-wanda")
    with page.expect_download() as download:
        dashboard.button("Download").click()
    assert download.value.path().read_text() == "of-wanda\n"
    dashboard.button("Remove").click()
    dashboard.button("Remove it").click()
    expect(page.get_by_text("This folder is empty")).to_be_visible()
    assert ask(daemon, "GET", f"{path}?path=deep", None, key) == []


def test_an_image_is_pulled_listed_and_removed(dashboard: Dashboard, tmp_path: Path) -> None:
    page = dashboard.page
    with Registry(tmp_path) as registry:
        name = registry.push("team/tools", "1", make_image({"hello": b"1"}))
        dashboard.log_in(route="admin/images")
        dashboard.button("Pull an image").click()
        form = page.get_by_role("dialog", name="Pull an image")
        dashboard.expect_problem(r"status of 404 .*/v1/images/pull\)")
        form.get_by_role("textbox", name="Reference").fill(f"{registry.host}/nothing:1")
        form.get_by_role("button", name="Pull").click()
        expect(form.get_by_role("alert")).to_contain_text("The image was not pulled.")
        form.get_by_role("textbox", name="Reference").fill(name)
        form.get_by_role("button", name="Try again").click()
        expect(form.get_by_text(f"{name} is ready")).to_be_visible()
        form.get_by_role("button", name="Close").last.click()
    row = page.get_by_role("row").filter(has_text="team/tools")
    expect(row).to_contain_text("ready")
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)
