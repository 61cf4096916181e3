"""10,000 sessions: the list is searched and scrolled, and the page stays small."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from browser_of_tests import Dashboard, ask
from daemon_of_tests import Daemon

MANY = 10_000
# Whether there are rows where one looks.
HAS_ROWS = """table => {
  const { left, top, width, height } = table.getBoundingClientRect();
  const y = top + Math.min(height, innerHeight - top) / 2;
  return document.elementFromPoint(left + width / 2, y)?.closest('.table-body .table-row') !== null;
}"""


def multiply(folder: Path, id: str) -> None:
    """Let a session that sleeps be 10,000, in the store of a server that does not run."""
    store = next(folder.glob("*.db"))
    place = next(path for path in folder.rglob(id) if path.is_dir())
    with sqlite3.connect(store) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM sessions WHERE id = ?", (id,)).fetchone())
        del row["number"]
        for number in range(1, MANY):
            other = f"{number:08x}-abc"
            info = {
                **json.loads(row["info"]),
                "id": other,
                "labels": {"lot": f"lot-{number}", "part": f"{number % 4}"},
            }
            copy = {**row, "id": other, "info": json.dumps(info), "idempotency_key": None}
            names, marks = ", ".join(copy), ", ".join("?" * len(copy))
            connection.execute(
                f"INSERT INTO sessions ({names}) VALUES ({marks})", list(copy.values())
            )
            shutil.copytree(place, place.with_name(other), copy_function=os.link)
    connection.close()


@pytest.fixture(scope="module")
def crowded(assets: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A server with 10,000 sessions that sleep."""
    with Daemon(tmp_path_factory.mktemp("many") / "data") as daemon:
        made = ask(daemon, "POST", "/v1/sessions", {"ttl_seconds": 86400})
        assert isinstance(made, dict)
        ask(daemon, "POST", f"/v1/sessions/{made['id']}/hibernate")
        daemon.stop()
        multiply(daemon.folder, str(made["id"]))
        daemon.start()
        yield daemon
        daemon.stop()  # they sleep: nothing has to be ended one by one


def test_10000_sessions_are_searched_and_scrolled_in_a_small_page(
    browser: Browser, crowded: Daemon
) -> None:
    dashboard = Dashboard(browser, crowded)
    try:
        dashboard.log_in()
        page = dashboard.page
        expect(page.get_by_text("10,000 live sandboxes")).to_be_visible()
        table = page.get_by_role("region", name="Sandboxes", exact=True)
        rows = table.locator(".table-body .table-row")
        expect(table.get_by_role("table")).to_have_attribute("aria-rowcount", str(MANY + 1))
        for place in (0.5, 1, 0):
            table.evaluate("(table, part) => table.scrollTop = table.scrollHeight * part", place)
            dashboard.wait(lambda: table.evaluate(HAS_ROWS))
            assert page.evaluate("document.querySelectorAll('*').length") < 3000
        first = rows.and_(page.locator("[aria-rowindex='2']"))
        # Sorted by a column, once in each direction: those that were multiplied.
        search = page.get_by_label("Search sandboxes")
        search.fill("label:lot")
        expect(page.get_by_text("9,999 shown")).to_be_visible()
        for name in ("00000001-abc", f"{MANY - 1:08x}-abc"):
            table.get_by_role("button", name="Sandbox").click()
            expect(first.get_by_role("link", name=name)).to_be_visible()
        # Searched: anywhere, and for a label.
        search.fill("lot-1234")
        expect(rows).to_have_count(1)
        expect(page.get_by_role("link", name="000004d2-abc")).to_be_visible()
        search.fill("label:part=3")
        expect(page.get_by_text("2,500 shown")).to_be_visible()
        assert rows.count() < 100
        # Filtered by state.
        search.fill("")
        page.get_by_label("State", exact=True).select_option("running")
        expect(page.get_by_text("No sandbox matches")).to_be_visible()
        dashboard.button("Show all live sandboxes").click()
        expect(page.get_by_text("shown")).to_have_count(0)
        assert rows.count() < 100
        page.get_by_label("Select all").check()
        expect(page.get_by_text("10,000 selected")).to_be_visible()
        dashboard.check()
    finally:
        dashboard.close()
