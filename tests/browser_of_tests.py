"""A real browser for tests of the dashboard, and a watch over what its pages do."""

from __future__ import annotations

import base64
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Playwright,
    Request,
    WebError,
    expect,
)

from daemon_of_tests import Daemon, wait_for

PATIENCE = 90  # seconds for a page to show something; a busy machine takes long
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}

expect.set_options(timeout=PATIENCE * 1000)


def program() -> str | None:
    """The path of the browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def launch(playwright: Playwright, path: str) -> Browser:
    # As root, which tests may be, Chromium's own sandbox does not start.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def ask(
    daemon: Daemon, method: str, path: str, body: object = None, key: str | None = None
) -> object:
    """The answer of the API, decoded. RuntimeError, with the answer, if it is an error."""
    request = urllib.request.Request(
        daemon.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {key or daemon.key}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            text = response.read()
    except urllib.error.HTTPError as exc:
        raise RuntimeError(f"{exc.code}: {exc.read().decode(errors='replace')}") from exc
    return json.loads(text) if text else None


def make_key(daemon: Daemon, owner: str, scope: str = "run") -> tuple[str, str]:
    """A new key: its id, and the key itself."""
    made = ask(daemon, "POST", "/v1/keys", {"owner": owner, "scope": scope})
    assert isinstance(made, dict)
    return str(made["id"]), str(made["key"])


class Dashboard:
    """A page of the dashboard in a browser window of its own, and all that it should not do."""

    def __init__(self, browser: Browser, daemon: Daemon) -> None:
        self.daemon = daemon
        self.context: BrowserContext = browser.new_context(
            viewport=WIDE, reduced_motion="reduce", accept_downloads=True
        )
        self.context.set_default_timeout(PATIENCE * 1000)
        self.problems: list[str] = []
        self._expected = [
            # The page asks once whether it needs a key at all: the browser notes the refusal.
            re.compile(r"status of 401 .*/v1/me\)"),
            # A word for the browsers that know it.
            re.compile(r"Unrecognized Content-Security-Policy directive 'webrtc'"),
        ]
        self._origin = urlsplit(daemon.url).netloc
        self.context.on("console", self._on_console)
        self.context.on("weberror", self._on_error)
        self.context.on("request", self._on_request)
        self.page: Page = self.context.new_page()

    def expect_problem(self, pattern: str) -> None:
        """A line of the console that this test brings about. Others fail it."""
        self._expected.append(re.compile(pattern))

    def check(self) -> None:
        """AssertionError if a page did what none may."""
        wrong = [each for each in self.problems if not any(e.search(each) for e in self._expected)]
        assert not wrong, "\n".join(wrong)

    def close(self) -> None:
        self.context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" or "Content Security Policy" in message.text:
            self.problems.append(f"console: {message.text} ({message.location['url']})")

    def _on_error(self, error: WebError) -> None:
        self.problems.append(f"script error: {error.error}")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != self._origin:
            self.problems.append(f"request to another host: {request.url}")

    # --- what users do --------------------------------------------------------------------

    def open(self, route: str = "") -> None:
        """A page by its route: `sandboxes`, or `admin/keys`."""
        self.page.goto(f"{self.daemon.url}/#/{route}")

    def log_in(self, key: str | None = None, route: str = "") -> None:
        self.open(route)
        self.page.get_by_label("API key").fill(key or self.daemon.key or "")
        self.page.get_by_role("button", name="Log in").click()
        expect(self.page.get_by_role("navigation", name="Pages")).to_be_visible()

    def go(self, route: str) -> None:
        """To another route, without loading the page again."""
        self.page.evaluate("route => { location.hash = `#/${route}` }", route)

    def button(self, name: str | re.Pattern[str], exact: bool = True) -> Locator:
        return self.page.get_by_role("button", name=name, exact=exact)

    def make_box(self) -> str:
        """With one click on the page of sandboxes. The id; the page of that one is open then."""
        self.button(re.compile("^(New sandbox|Make a sandbox)$")).click()
        self.page.wait_for_url(re.compile("#/sandboxes/."))
        return self.page.url.rpartition("/sandboxes/")[2].partition("/")[0]

    def terminal(self) -> Locator:
        """The lines of the terminal that is shown, when its shell is ready."""
        lines = self.page.locator(".terminal-view:not([hidden]) .xterm-rows")
        expect(lines).to_contain_text(re.compile(r"[$#%>] *"))
        return lines

    def type_line(self, text: str) -> None:
        self.page.locator(".terminal-view:not([hidden]) textarea").focus()
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def run_cell(self, code: str) -> Locator:
        """Run code in the last cell of the notebook. The cell, when it has run."""
        cell = self.page.get_by_role("region", name="Code cell").last
        self.set_text(cell, code)
        cell.get_by_role("button", name="Run this cell").click()
        expect(cell.locator(".run")).to_have_attribute("aria-busy", "false")
        return cell

    def set_text(self, place: Locator, text: str) -> None:
        """Replace what an editor has, as pasting does: nothing is indented or closed by it."""
        place.locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(text)

    def drop(self, onto: Locator, name: str, content: bytes) -> None:
        """Drop a file, as from a file manager."""
        transfer = self.page.evaluate_handle(
            """([name, base64]) => {
              const transfer = new DataTransfer();
              const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
              transfer.items.add(new File([bytes], name));
              return transfer;
            }""",
            [name, base64.b64encode(content).decode()],
        )
        for event in ("dragenter", "dragover", "drop"):
            onto.dispatch_event(event, {"dataTransfer": transfer})

    # --- what must hold -------------------------------------------------------------------

    def wait(self, is_so: Callable[[], object]) -> None:
        """Until something holds, while the browser goes on."""

        def look() -> object:
            self.page.evaluate("0")  # lets events of the browser arrive
            return is_so()

        assert wait_for(look, PATIENCE)

    def storage(self) -> str:
        """All that the browser keeps beyond this tab, and the addresses that it has seen."""
        kept = self.page.evaluate("JSON.stringify(Object.entries(localStorage)) + document.cookie")
        return f"{kept} {self.context.cookies()} {self.page.url}"

    def assert_no_sideways_scroll(self) -> None:
        wide = self.page.evaluate(
            """() => {
              const room = document.documentElement.clientWidth;
              const inside = element => {
                for (let each = element.parentElement; each; each = each.parentElement)
                  if (/auto|scroll|hidden|clip/.test(getComputedStyle(each).overflowX)) return true;
                return false;
              };
              return document.scrollingElement.scrollWidth > room
                ? [...document.body.querySelectorAll('*')]
                    .filter(each => each.getBoundingClientRect().right > room + 1 && !inside(each))
                    .slice(0, 5).map(each => each.outerHTML.slice(0, 120))
                    .concat(`${document.scrollingElement.scrollWidth} > ${room}`)
                : [];
            }"""
        )
        assert not wide, wide


def violations(page: Page, axe: str) -> list[str]:
    """What axe-core finds wrong for those who do not see, or do not use a mouse."""
    page.evaluate(axe)
    found = page.evaluate(
        """async () => {
          // What a box wrote, in its frame, is not ours; all around it is.
          const { violations } = await axe.run(document, { iframes: false, resultTypes: ['violations'] });
          return violations.flatMap(rule => rule.nodes.map(node =>
            `${rule.id}: ${node.html.slice(0, 160)}: ${node.failureSummary.replace(/\\n/g, ' ')}`));
        }"""  # noqa: E501
    )
    return [str(each) for each in found]


def folder_of_pictures(root: Path) -> Path:
    folder = root / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
