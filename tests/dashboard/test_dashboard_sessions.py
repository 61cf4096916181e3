"""Sessions in the dashboard: made, watched, used, and there again after a crash."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser_of_tests import Dashboard, ask, make_key

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
FIGURE = f"""
class Figure:
    def _repr_png_(self):
        return {PICTURE!r}
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


# As a library of tables would return it: the image of the tests has no such library.
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


def test_several_sessions_are_put_to_sleep_woken_and_extended_at_once(
    dashboard: Dashboard,
) -> None:
    daemon, page = dashboard.daemon, dashboard.page
    _, key = make_key(daemon, "dreamer")
    for _ in range(3):
        ask(daemon, "POST", "/v1/sessions", {"ttl_seconds": 600}, key)

    def listed() -> list[dict[str, str]]:
        found = ask(daemon, "GET", "/v1/sessions", None, key)
        assert isinstance(found, list)
        return found

    def states() -> set[str]:
        return {each["status"] for each in listed()}

    def do_to_all(act: str, button: str) -> None:
        page.get_by_role("toolbar", name="With those selected").get_by_role(
            "button", name=act, exact=True
        ).click()
        dashboard.button(button).click()
        expect(page.get_by_role("dialog")).to_have_count(0)

    deadlines = {each["expires_at"] for each in listed()}
    dashboard.log_in(key)
    page.get_by_label("Select all").check()
    do_to_all("Sleep", "Put to sleep 3 sandboxes")
    assert states() == {"asleep"}
    do_to_all("Wake", "Wake 3 sandboxes")
    assert states() == {"running"}
    do_to_all("Extend", "Extend 3 sandboxes")
    assert min(each["expires_at"] for each in listed()) > max(deadlines)
    expect(page.get_by_text("3 live sandboxes")).to_be_visible()


def test_a_sandbox_is_put_to_sleep_and_woken_where_one_looks_at_it(
    dashboard: Dashboard, box: str
) -> None:
    page = dashboard.page
    dashboard.expect_problem("410|WebSocket")  # what the terminal showed ends
    dashboard.terminal()
    terminal = page.get_by_role("tab", name="Terminal")
    dashboard.button("Sleep").click()
    expect(page.get_by_role("heading", name="This sandbox is asleep")).to_be_visible()
    expect(terminal).to_have_attribute("aria-selected", "true")
    dashboard.button("Wake it").click()
    dashboard.terminal()
    expect(terminal).to_have_attribute("aria-selected", "true")
    dashboard.button("End").click()
    dashboard.button("End sandbox").click()
    expect(page.get_by_role("heading", name="This sandbox has ended")).to_be_visible()
    # In the words of the list, and not in those of the API.
    expect(page.locator(".session-head .badge")).to_have_text("ended")
    expect(page.get_by_text("It was closed.")).to_be_visible()


def test_text_is_copied_out_of_the_terminal_and_pasted_into_it(
    dashboard: Dashboard, box: str
) -> None:
    dashboard.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page, lines = dashboard.page, dashboard.terminal()
    dashboard.type_line("clear; echo co''pied")
    line = lines.locator("div", has_text=re.compile("^copied"))
    expect(line).to_be_visible()
    place = line.bounding_box()
    assert place
    page.mouse.dblclick(place["x"] + 10, place["y"] + place["height"] / 2)
    page.keyboard.press("Control+Shift+C")
    dashboard.wait(lambda: page.evaluate("navigator.clipboard.readText()") == "copied")
    page.evaluate("navigator.clipboard.writeText('echo pa$((1))sted')")
    page.keyboard.press("Control+v")
    expect(lines).to_contain_text("echo pa$((1))sted")
    page.keyboard.press("Enter")
    expect(lines).to_contain_text("pa1sted")


def test_a_program_shows_what_it_prints_as_it_does(dashboard: Dashboard, box: str) -> None:
    page = dashboard.page
    dashboard.go(f"sandboxes/{box}/programs")
    page.get_by_label("Command to start in the background").fill(
        "echo ready; while read line; do echo heard-$line; done; echo over; exit 3"
    )
    dashboard.button("Start").click()
    output = page.locator(".program .output")
    expect(output).to_contain_text("ready")
    page.get_by_label("Line of input").fill("one")
    dashboard.button("Send").click()
    expect(output).to_contain_text("heard-one")
    dashboard.button("End of input").click()
    expect(output).to_contain_text("over")
    expect(page.locator(".program-list")).to_contain_text("exit 3")


def test_pictures_and_tables_of_files_are_shown(dashboard: Dashboard, box: str) -> None:
    page = dashboard.page
    dashboard.go(f"sandboxes/{box}/files")
    tree = page.get_by_role("tree")
    dashboard.expect_problem("404 .*files/stat")  # is there such a file already?
    dashboard.drop(tree, "dot.png", PICTURE)
    dashboard.drop(tree, "fruit.csv", b"fruit,count\npear,3\napple,10\n")
    tree.get_by_role("treeitem", name=re.compile("^dot.png")).click()
    picture = page.locator(".files-open").get_by_role("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") == 1
    tree.get_by_role("treeitem", name=re.compile("^fruit.csv")).click()
    table = page.locator(".files-open").get_by_role("table")
    expect(table.get_by_role("cell")).to_have_text(["pear", "3", "apple", "10"])
    dashboard.button("Text").click()
    expect(page.locator(".files-open .cm-content")).to_contain_text("pear,3")


def test_a_chart_of_a_cell_can_be_read_and_its_lines_hidden(dashboard: Dashboard, box: str) -> None:
    dashboard.go(f"sandboxes/{box}/notebook")
    cell = dashboard.run_cell(SHOW_CHART)
    drawing = cell.locator(".figure svg")
    place = drawing.bounding_box()
    assert place
    dashboard.page.mouse.move(place["x"] + place["width"] * 0.95, place["y"] + 30)
    expect(cell.locator(".figure-tip")).to_contain_text(re.compile("rain: 3, 9"))
    lines = drawing.locator("path[stroke^='var(--series']")
    before = lines.count()
    cell.get_by_role("button", name="rain").click()
    dashboard.wait(lambda: lines.count() < before)


SHOW_CHART = """
import sys
show = next(m for m in list(sys.modules.values()) if hasattr(m, "show_open_figures") and hasattr(m, "publish"))
show.publish({"text/plain": "a chart"}, chart={"type": "line", "title": "Weather", "series": [
    {"type": "line", "label": "rain", "x": [1, 2, 3], "y": [1, 4, 9]},
    {"type": "line", "label": "sun", "x": [1, 2, 3], "y": [3, 2, 1]},
]})
"""  # noqa: E501


def test_the_journal_has_the_whole_of_a_long_output(dashboard: Dashboard, box: str) -> None:
    command = {"command": "seq 1 60000"}  # far more than a result has
    ask(dashboard.daemon, "POST", f"/v1/sessions/{box}/shells/main/run", command)
    dashboard.go(f"sandboxes/{box}/journal")
    dashboard.button(re.compile("seq 1 60000"), exact=False).click()
    dashboard.button("Show the whole output").click()
    whole = dashboard.page.get_by_label("Whole output")
    more = dashboard.button(re.compile("^Show more"))
    expect(more).to_be_visible()
    more.click()
    expect(more).to_have_count(0)
    everything = dashboard.button("Show all")
    if everything.count():
        everything.click()
    expect(whole).to_contain_text("1\n2\n3\n")
    text = whole.text_content() or ""
    assert text == "".join(f"{number}\n" for number in range(1, 60001))
