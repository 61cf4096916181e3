"""Each page as it looks: pictures of it, in light and dark and narrow, and what axe-core says.

The pictures are written to build/pictures: look at them when a page was changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from browser_of_tests import NARROW, WIDE, Dashboard, ask, folder_of_pictures, make_key, violations
from daemon_of_tests import Daemon
from npm_of_tests import packages_of

ROOT = Path(__file__).parents[2]
# These quote the server: its settings, its report, its logs.
OF_THE_SERVER = ("admin-settings", "admin-report", "admin-log", "admin-audit")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
NOTEBOOK = """\
import sys
print("measuring…")
print("\\x1b[33mone of the sensors is late\\x1b[0m", file=sys.stderr)
show = next(m for m in list(sys.modules.values()) if hasattr(m, "show_open_figures"))
show.publish({"text/plain": "a table"}, data={
    "columns": ["city", "rain", "sun"], "dtypes": ["object", "float64", "int64"],
    "index": [0, 1, 2], "shape": [3, 3], "truncated": False,
    "rows": [["Bergen", 2250.5, 1187], ["Lisbon", 774.0, 2806], ["Nairobi", 869.3, 2525]],
})
show.publish({"text/html": "<h3>Rich output</h3><p>in a frame</p>"})
"""
ADMIN = ["images", "workspaces", "keys", "settings", "report", "log", "audit"]
PARTS = ["terminal", "notebook", "files", "programs", "ports", "journal", "info"]


@pytest.fixture(scope="module")
def axe() -> str:
    return (packages_of(ROOT / "packages/dashboard") / "axe-core/axe.min.js").read_text()


@pytest.fixture(scope="module")
def session(daemon: Daemon) -> Iterator[str]:
    """One in which something was done."""
    made = ask(daemon, "POST", "/v1/sessions", {"labels": {"name": "weather", "env": "prod"}})
    assert isinstance(made, dict)
    path = f"/v1/sessions/{made['id']}"
    start = "cd /workspace && mkdir -p data && echo 'city,rain' > data/rain.csv && "
    start += "printf 'def rain():\\n    return 42\\n' > model.py && ls -l; "
    start += "(python3 -m http.server 8200 >/dev/null 2>&1 &)"
    ask(daemon, "POST", f"{path}/shells/main/run", {"command": start})
    ask(daemon, "POST", f"{path}/contexts/main/run", {"code": "rain = [2250.5, 774.0]\nsum(rain)"})
    yield str(made["id"])
    ask(daemon, "DELETE", path)


@pytest.fixture(scope="module")
def window(browser: Browser, daemon: Daemon) -> Iterator[Dashboard]:
    """One for all pages, logged in; what it may not do is looked at after each."""
    dashboard = Dashboard(browser, daemon)
    dashboard.log_in()
    yield dashboard
    dashboard.close()


def look(dashboard: Dashboard, axe: str, name: str) -> None:
    """Take pictures of the page, and assert what holds for each page."""
    page, folder = dashboard.page, folder_of_pictures(ROOT)
    wrong = list[str]()
    try:
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.screenshot(path=folder / f"{name}-{scheme}.png")
            wrong += [f"{scheme}: {each}" for each in violations(page, axe)]
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        page.set_viewport_size(NARROW)
        page.screenshot(path=folder / f"{name}-400.png")
        dashboard.assert_no_sideways_scroll()
        assert page.evaluate(CUT_OFF) == []
    finally:
        page.set_viewport_size(WIDE)
    assert not wrong, "\n".join(wrong)
    assert_one_word_for_a_sandbox(page, name)
    dashboard.check()


# In a narrow window: what can be pressed in tables, names of files, and where one is.
CUT_OFF = """() => [
  ...document.querySelectorAll('.page table.plain :is(button, a, td)'),
  ...document.querySelectorAll('.open-file header *, [role=tab][aria-selected=true]'),
  ...document.querySelectorAll('[aria-current=page]'),
].filter(element => {
  const { left, right, width } = element.getBoundingClientRect();
  return width && (left < -1 || right > innerWidth + 1 ||
    element.matches('.ellipsis') && element.scrollWidth > element.clientWidth + 1);
}).map(element => element.outerHTML.slice(0, 160))"""


def assert_one_word_for_a_sandbox(page: Page, name: str) -> None:
    """ARCHITECTURE.md has three words for what is one thing to a user, who is shown one."""
    if name not in OF_THE_SERVER:
        shown = str(page.evaluate(WORDS_OF_PAGE))
        assert not re.findall(r"[^\n]*(?<!@)\b(?:session|sessions|box|boxes)\b[^\n]*", shown, re.I)


# Also what is read out, or shown when the mouse rests.
WORDS_OF_PAGE = """() => [document.title, document.body.innerText].concat(
  ...[...document.querySelectorAll('[aria-label], [title], [placeholder]')].map(element =>
    ['aria-label', 'title', 'placeholder'].map(name => element.getAttribute(name) ?? ''))
).join('\\n')"""


def settled(dashboard: Dashboard) -> None:
    """Until nothing on the page is being loaded."""
    expect(dashboard.page.locator(".loading, .center")).to_have_count(0)


def test_the_login_page_is_accessible(dashboard: Dashboard, axe: str) -> None:
    dashboard.open()
    expect(dashboard.page.get_by_label("API key")).to_be_visible()
    look(dashboard, axe, "login")


def test_the_first_screen_is_accessible(dashboard: Dashboard, axe: str) -> None:
    dashboard.log_in(make_key(dashboard.daemon, "beginner")[1])
    expect(dashboard.button("Make a sandbox")).to_be_visible()
    look(dashboard, axe, "first")


def test_the_overview_is_accessible(window: Dashboard, session: str, axe: str) -> None:
    window.go("sandboxes")
    expect(window.page.get_by_role("link", name=session)).to_be_visible()
    look(window, axe, "overview")
    window.page.keyboard.press("?")
    expect(window.page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    look(window, axe, "keys-of-the-keyboard")
    window.page.keyboard.press("Escape")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_session_is_accessible(
    window: Dashboard, session: str, axe: str, part: str
) -> None:
    window.go(f"sandboxes/{session}/{part}")
    page = window.page
    expect(page.locator(f".part-{part}")).to_be_visible()
    settled(window)
    if part == "terminal":
        lines = window.terminal()
        window.type_line("ls -la --color /workspace; echo en''d")
        expect(lines).to_contain_text("end")
    elif part == "notebook":
        cell = window.run_cell(NOTEBOOK)
        expect(cell.frame_locator("iframe").get_by_text("in a frame")).to_be_visible()
        window.button("Code").click()
        window.run_cell("rain = [2250.5, 774.0]\nrain[2]")
        window.button("Variables").click()
        expect(page.get_by_role("listitem").filter(has_text="rain")).to_be_visible()
    elif part == "files":
        page.get_by_role("treeitem", name=re.compile("^model.py")).click()
        expect(page.locator(".files-open .cm-content")).to_contain_text("return 42")
    elif part == "journal":
        expect(page.locator(".part-journal").get_by_text("rain = [2250.5").first).to_be_visible()
    look(window, axe, f"session-{part}")


@pytest.mark.parametrize("part", ADMIN)
def test_a_part_of_the_administration_is_accessible(window: Dashboard, axe: str, part: str) -> None:
    daemon = window.daemon
    if part == "workspaces":
        ask(daemon, "POST", "/v1/workspaces", {"id": "thesis"})
    window.go(f"admin/{part}")
    expect(window.page.get_by_role("heading", level=1)).to_be_visible()
    settled(window)
    look(window, axe, f"admin-{part}")


def test_the_playground_is_accessible(window: Dashboard, axe: str) -> None:
    window.go("playground")
    expect(window.button("Create a sandbox")).to_be_visible()
    settled(window)
    look(window, axe, "playground")
    window.button("Create a sandbox").click()
    command = window.page.get_by_label("Command")
    command.fill("uname -s && echo $((6 * 7))")
    command.press("Enter")
    expect(window.page.locator(".shell-log .output")).to_contain_text("42")
    expect(window.page.locator(".code-panel pre")).to_contain_text("uname")
    look(window, axe, "playground-used")
