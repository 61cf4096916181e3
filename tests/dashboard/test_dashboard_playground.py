"""The playground: a box in a second, and code that does again what was done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Route, expect

from browser_of_tests import PATIENCE, Dashboard
from npm_of_tests import ROOT, build_sdk, packages_of, run


def test_the_code_beside_the_playground_does_the_same_again(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").mkdir()
    build_sdk(tmp_path / "node_modules")
    page = dashboard.page
    dashboard.log_in(route="playground")
    dashboard.button("Create a sandbox").click()
    command = page.get_by_label("Command")
    command.fill("""echo "it's $((6 * 7))" 'and `this`'""")
    command.press("Enter")
    expect(page.locator(".shell-log .output")).to_contain_text("it's 42 and `this`")
    page.get_by_role("tab", name="Python", exact=True).first.click()
    expect(dashboard.run_cell("print('a' * 3)").locator(".run")).to_contain_text("aaa")
    environment = {
        **os.environ,
        "HUTCH_URL": dashboard.daemon.url,
        "HUTCH_API_KEY": dashboard.daemon.key or "",
    }
    languages = page.get_by_role("tablist", name="Language")
    # What it writes as TypeScript has no types of its own: Node.js runs it as it is.
    for language, name, argv in (
        ("Python", "again.py", [sys.executable]),
        ("TypeScript", "again.mjs", ["node"]),
        ("curl", "again.sh", ["bash"]),
    ):
        languages.get_by_role("tab", name=language).click()
        program = tmp_path / name
        program.write_text(page.locator(".code-panel pre").text_content() or "")
        done = subprocess.run(
            [*argv, str(program)],
            env=environment,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{program.read_text()}\n{done.stderr}"
        assert "it's 42 and `this`" in done.stdout, done.stdout
        assert "aaa" in done.stdout
    dashboard.button("End").click()
    dashboard.button("End it").click()
    expect(page.get_by_text("This sandbox has ended")).to_be_visible()


def test_a_network_can_be_chosen_where_the_operator_allows_it(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.log_in(route="playground")
    network = page.get_by_label("Network")
    expect(network.locator("option")).to_have_text(["none"])

    def allow(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "relax": ["network"]})

    page.route("**/v1/info", allow)
    page.reload()
    network.select_option("that of the engine")
    expect(page.locator(".code-panel pre")).to_contain_text('relax=["network"]')
    with page.expect_request(
        lambda request: request.method == "POST" and request.url.endswith("/v1/sessions")
    ) as sent:
        dashboard.button("Create a sandbox").click()
    assert sent.value.post_data_json["relax"] == ["network"]
    # The server has the last word.
    dashboard.expect_problem(r"status of 400 .*/v1/sessions")
    expect(page.get_by_role("alert")).to_contain_text("relax")


def test_the_pages_can_be_used_with_the_keyboard_alone(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.open()
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(dashboard.daemon.key or "")
    page.keyboard.press("Enter")
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_contain_text(
        "Go to Playground"
    )
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.locator("body").press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/#/sandboxes")
    page.keyboard.press("n")
    dashboard.terminal()
    expect(page.locator(".terminal-view textarea")).to_be_focused()
    page.keyboard.type("echo key''board")
    page.keyboard.press("Enter")
    expect(page.locator(".xterm-rows")).to_contain_text("keyboard")
    page.keyboard.press("Control+Shift+Escape")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/#/sandboxes")
    row = page.locator(".table-row.cursor")
    expect(page.get_by_role("heading", name="Sandboxes", level=1)).to_be_visible()
    page.keyboard.press("j")
    expect(row).to_be_visible()
    page.keyboard.press("x")
    expect(row.get_by_role("checkbox")).to_be_checked()
    page.keyboard.press("/")
    expect(page.get_by_label("Search sandboxes")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/sandboxes/*")


def test_the_code_beside_the_playground_is_right_whatever_was_typed(tmp_path: Path) -> None:
    page = ROOT / "packages/dashboard"
    (tmp_path / "node_modules").symlink_to(packages_of(page))
    for name in ("src/session/codegen.ts", "tests/codegen.test.mjs"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(page / name, tmp_path / name)
    run("node", "--test", "--test-reporter=tap", "tests/codegen.test.mjs", cwd=tmp_path)
