"""Sessions in the dashboard: made, watched, used, and there again after a crash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser_of_tests import Dashboard, ask, make_key

FIGURE = """
import base64
class Figure:
    def _repr_png_(self):
        return base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
            "rkJggg=="
        )
Figure()
"""


@pytest.fixture
def box(dashboard: Dashboard) -> Iterator[str]:
    """A session that was made with a click; its page is open."""
    dashboard.log_in()
    id = dashboard.make_box()
    yield id
    if not dashboard.page.is_closed():
        ask(dashboard.daemon, "DELETE", f"/v1/sessions/{id}")


def test_the_first_screen_of_an_empty_server_makes_a_box_in_one_click(dashboard: Dashboard) -> None:
    _, key = make_key(dashboard.daemon, "newcomer")  # who has as little as an empty server
    dashboard.log_in(key)
    expect(dashboard.page.get_by_role("heading", name="You have no sandboxes yet")).to_be_visible()
    dashboard.button("Make a sandbox").click()
    dashboard.terminal()
    dashboard.go("sandboxes")
    expect(dashboard.page.get_by_text("1 live sandbox")).to_be_visible()


def test_what_is_typed_in_the_terminal_runs_in_the_box(dashboard: Dashboard, box: str) -> None:
    lines = dashboard.terminal()
    dashboard.type_line("echo $((6 * 7))-done; stty size")
    expect(lines).to_contain_text("42-done")
    # The size of the window, not that of a default.
    expect(lines).not_to_contain_text("24 80")
    dashboard.page.set_viewport_size({"width": 700, "height": 600})
    dashboard.type_line("clear; stty size | sed s/^/now-/")
    expect(lines).to_contain_text(re.compile(r"now-\d+ \d+"))


def test_the_terminal_comes_back_after_the_server_was_killed(
    dashboard: Dashboard, box: str
) -> None:
    dashboard.expect_problem("ERR_|WebSocket|Failed to load resource")
    lines = dashboard.terminal()
    dashboard.type_line("name=kept; echo before-$((1 + 1))")
    expect(lines).to_contain_text("before-2")
    dashboard.daemon.crash()
    banner = dashboard.page.get_by_role("alert").filter(has_text="The server does not answer")
    expect(banner).to_be_visible()
    dashboard.daemon.start()
    expect(banner).to_have_count(0)
    expect(lines).to_contain_text("connected again")
    dashboard.type_line("echo after-$name")
    expect(lines).to_contain_text("after-kept")


def test_a_cell_shows_a_figure(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.run_cell(FIGURE)
    picture = cell.get_by_role("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") == 1


def test_a_cell_shows_a_table_that_can_be_sorted(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.run_cell(SHOW_TABLE)
    table = cell.get_by_role("table")
    expect(table.get_by_role("cell")).to_have_text(["pear", "3", "apple", "10"])
    table.get_by_role("button", name="fruit").click()
    expect(table.get_by_role("cell")).to_have_text(["apple", "10", "pear", "3"])


# As a library of tables would hand it over: there is none in the image of the tests.
SHOW_TABLE = """
import sys
show = next(m for m in list(sys.modules.values()) if hasattr(m, "show_open_figures") and hasattr(m, "publish"))
show.publish({"text/plain": "a table"}, data={
    "columns": ["fruit", "count"], "dtypes": ["object", "int64"], "index": [0, 1],
    "rows": [["pear", 3], ["apple", 10]], "shape": [2, 2], "truncated": False,
})
"""  # noqa: E501


def test_a_result_that_cannot_be_drawn_does_not_break_the_page(
    dashboard: Dashboard, box: str
) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.run_cell(SHOW_ODD_CHART)
    expect(cell.locator(".result")).to_be_visible()
    cell.get_by_role("button", name="Text").click()
    expect(cell).to_contain_text("an odd chart")
    expect(dashboard.run_cell("6 * 7").locator(".run")).to_contain_text("42")


# Times, of which one is no time that there is.
SHOW_ODD_CHART = """
import sys
show = next(m for m in list(sys.modules.values()) if hasattr(m, "show_open_figures") and hasattr(m, "publish"))
show.publish({"text/plain": "an odd chart"}, chart={
    "type": "line", "series": [{"type": "line", "x": ["2026-01-01", 1e300], "y": [1, 2]}],
})
"""  # noqa: E501


def test_an_error_of_a_cell_leads_to_its_line(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.run_cell("x = 1\nx += 1\nx / 0")
    alert = cell.get_by_role("alert")
    expect(alert).to_contain_text("ZeroDivisionError")
    alert.get_by_role("button", name="Go to line 3").click()
    expect(cell.locator(".cm-activeLine")).to_have_text("x / 0")


def test_a_cell_that_runs_forever_can_be_interrupted(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.page.get_by_role("region", name="Code cell").last
    dashboard.set_text(
        cell, "import time\nprint('it runs', flush=True)\nwhile True: time.sleep(0.1)"
    )
    cell.get_by_role("button", name="Run this cell").click()
    expect(cell.locator(".run")).to_contain_text("it runs")
    dashboard.button("Interrupt").click()
    expect(cell.locator(".run")).to_contain_text("interrupted")
    expect(cell.locator(".run")).to_have_attribute("aria-busy", "false")
    cell = dashboard.run_cell("6 * 7")
    expect(cell.locator(".run")).to_contain_text("42")


def test_variables_are_listed(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    dashboard.run_cell("answer = 42")
    dashboard.button("Variables").click()
    names = dashboard.page.get_by_role("complementary", name="Variables")
    expect(names.get_by_role("listitem").filter(has_text="answer")).to_contain_text("42")


def test_files_are_uploaded_edited_downloaded_renamed_and_deleted(
    dashboard: Dashboard, box: str, tmp_path: Path
) -> None:
    page = dashboard.page
    dashboard.expect_problem("404 .*files/stat")  # is there such a file already?
    dashboard.go(f"sandboxes/{box}/files")
    tree = page.get_by_role("tree")
    expect(tree).to_be_visible()
    dashboard.drop(tree, "notes.txt", b"first line\n")
    entry = tree.get_by_role("treeitem", name=re.compile("^notes.txt"))
    expect(entry).to_be_visible()
    entry.click()
    editor = page.locator(".files-open")
    expect(editor.locator(".cm-content")).to_contain_text("first line")
    dashboard.set_text(editor, "second line")
    page.keyboard.press("Control+s")
    path = f"/v1/sessions/{box}/files?path=notes.txt"
    expect(editor.get_by_role("button", name="Save")).to_be_disabled()

    with page.expect_download() as download:
        entry.hover()
        entry.get_by_role("button", name="Download notes.txt").click()
    kept = tmp_path / "kept"
    download.value.save_as(kept)
    assert kept.read_text() == "second line", path
    assert download.value.suggested_filename == "notes.txt"

    entry.hover()
    entry.get_by_role("button", name="Rename notes.txt").click()
    page.get_by_label("New name").fill("words.txt")
    dashboard.button("Rename").click()
    renamed = tree.get_by_role("treeitem", name=re.compile("^words.txt"))
    expect(renamed).to_be_visible()
    expect(entry).to_have_count(0)

    renamed.hover()
    renamed.get_by_role("button", name="Delete words.txt").click()
    dashboard.button("Delete file").click()
    expect(renamed).to_have_count(0)


def test_a_session_of_another_client_appears_and_goes_by_itself(dashboard: Dashboard) -> None:
    daemon = dashboard.daemon
    dashboard.log_in()
    dashboard.make_box()
    dashboard.go("sandboxes")
    made = ask(daemon, "POST", "/v1/sessions", {"labels": {"by": "another-client"}})
    assert isinstance(made, dict)
    link = dashboard.page.get_by_role("link", name=str(made["id"]))
    expect(link).to_be_visible()
    expect(dashboard.page.get_by_text("by=another-client")).to_be_visible()
    ask(daemon, "DELETE", f"/v1/sessions/{made['id']}")
    expect(link).to_have_count(0)


def test_several_sessions_are_ended_at_once(dashboard: Dashboard) -> None:
    daemon = dashboard.daemon
    _, key = make_key(daemon, "many")
    for _ in range(3):
        ask(daemon, "POST", "/v1/sessions", {}, key)
    dashboard.log_in(key)
    page = dashboard.page
    expect(page.get_by_text("3 live sandboxes")).to_be_visible()
    page.get_by_label("Select all").check()
    page.get_by_role("toolbar", name="With those selected").get_by_role(
        "button", name="End", exact=True
    ).click()
    dashboard.button("End 3 sandboxes").click()
    expect(page.get_by_text("0 live sandboxes")).to_be_visible()


def test_the_journal_shows_a_command_with_its_output(dashboard: Dashboard, box: str) -> None:
    daemon = dashboard.daemon
    ask(daemon, "POST", f"/v1/sessions/{box}/shells/main/run", {"command": "echo seen-$((40 + 2))"})
    dashboard.go(f"sandboxes/{box}/journal")
    head = dashboard.button(re.compile("echo seen"), exact=False)
    head.click()
    expect(dashboard.page.locator(".output").filter(has_text="seen-42")).to_be_visible()


def test_a_port_is_opened_in_a_sandbox_of_the_browser(dashboard: Dashboard, box: str) -> None:
    daemon = dashboard.daemon
    serve = "cd /tmp && echo '<h1>hello from the box</h1>' > index.html && "
    serve += "(python3 -m http.server 8123 >/dev/null 2>&1 &)"
    ask(daemon, "POST", f"/v1/sessions/{box}/shells/main/run", {"command": serve})
    dashboard.go(f"sandboxes/{box}/ports")
    page = dashboard.page
    row = page.get_by_role("row").filter(has_text="8123")

    def look() -> int:
        with page.expect_response(re.compile("/ports")):
            dashboard.button("Look again").click()
        return row.count()

    dashboard.wait(look)
    with dashboard.context.expect_page() as opened:
        row.get_by_role("button", name="Open").click()
    tab = opened.value
    # In a frame, so that it cannot lead the tab elsewhere.
    body = tab.frame_locator("iframe").locator("body")
    expect(body.get_by_role("heading", name="hello from the box")).to_be_visible()
    assert body.evaluate("window.origin") == "null"
    assert tab.evaluate("window.opener") is None
