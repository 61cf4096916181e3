"""One browser and one server for all tests of the dashboard; each test has a window of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from must_work import need

from daemon_of_tests import Daemon

ROOT = Path(__file__).parents[2]

try:
    from playwright.sync_api import Browser, sync_playwright

    import browser_of_tests
    from browser_of_tests import Dashboard
except ModuleNotFoundError:  # it is not for each machine
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.namespaces("a page is the same whatever makes boxes"))


# Of the package, not of the session: while the browser is driven, no other test can have an event
# loop in the main thread.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = browser_of_tests.program()
    if path is None:
        need("dashboard", "there is no Chromium")
    with sync_playwright() as playwright:
        browser = browser_of_tests.launch(playwright, path)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def assets() -> None:
    """The dashboard, built from these sources. It is, if Hutch was installed from them."""
    if not shutil.which("npm"):
        need("dashboard", "there is no npm")
    sys.path.insert(0, str(ROOT))
    import hatch_build

    try:
        hatch_build.make(ROOT)
    except hatch_build.CannotBuild as exc:
        need("dashboard", str(exc))


@pytest.fixture(scope="package")
def daemon(assets: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("dashboard")
    config = folder / "hutch.toml"
    config.write_text("# what the operator wrote\n[dashboard]\nedit_settings = true\n")
    with Daemon(folder / "data", config=str(config)) as daemon:
        yield daemon


@pytest.fixture
def dashboard(browser: Browser, daemon: Daemon) -> Iterator[Dashboard]:
    """A window at the shared server, not logged in."""
    opened = Dashboard(browser, daemon)
    yield opened
    try:
        opened.check()
    finally:
        opened.close()
