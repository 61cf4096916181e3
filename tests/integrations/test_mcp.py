"""Other people's clients of the protocol, and its conformance suite, against our server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_of_tests import Daemon
from hutch.tools import TOOLS

FRAMEWORK = "MCP"
PACKAGE = "mcp"
PLUGGED = "`hutch mcp` and `/mcp` of a server, for Python and TypeScript clients of both eras"
SUITE = (
    "conformance suite, for 2025-11-25 and 2026-07-28, against a server to which we add the tools, "
    "resources and prompts that the suite calls by name; of those scenarios, 8 and 10 need none "
    "and also pass against `hutch serve` as it is"
)

HERE = Path(__file__).parent
CLIENTS = HERE / "mcp_clients"
HOME = Path(os.environ.get("HUTCH_INTEGRATIONS", HERE.parents[1] / ".integrations"))
HUTCH = [sys.executable, "-m", "hutch", "mcp"]


def _names(text: str) -> list[str]:
    return text.split()


OLDER = _names("""
server-initialize logging-set-level ping completion-complete tools-list tools-call-simple-text
tools-call-image tools-call-audio tools-call-embedded-resource tools-call-mixed-content
tools-call-with-logging tools-call-error tools-call-with-progress tools-call-sampling
tools-call-elicitation json-schema-2020-12 elicitation-sep1034-defaults
server-sse-multiple-streams elicitation-sep1330-enums resources-list resources-read-text
resources-read-binary resources-templates-read resources-subscribe resources-unsubscribe
prompts-list prompts-get-simple prompts-get-with-args prompts-get-embedded-resource
prompts-get-with-image dns-rebinding-protection
""")
# Not here: what a server asks back (input-required-result-...), which ours never does, and tasks,
# an extension that it does not have.
NEWER = _names("""
server-stateless completion-complete tools-list tools-call-simple-text tools-call-image
tools-call-audio tools-call-embedded-resource tools-call-mixed-content tools-call-error
tools-call-with-progress server-sse-multiple-streams resources-list resources-read-text
resources-read-binary resources-templates-read sep-2164-resource-not-found prompts-list
prompts-get-simple prompts-get-with-args prompts-get-embedded-resource prompts-get-with-image
dns-rebinding-protection caching json-schema-2020-12 http-header-validation
http-custom-header-server-validation
""")
# What the suite can ask of any server, without tools and prompts that it knows by name.
OLDER_OF_ANY = _names("""
server-initialize ping completion-complete tools-list server-sse-multiple-streams resources-list
prompts-list dns-rebinding-protection
""")
NEWER_OF_ANY = _names("""
completion-complete tools-list server-sse-multiple-streams resources-list
sep-2164-resource-not-found prompts-list dns-rebinding-protection caching http-header-validation
http-custom-header-server-validation
""")

Checks = dict[str, tuple[int, int]]


def run(*command: Any, **more: Any) -> str:
    done = subprocess.run(
        [str(word) for word in command], text=True, capture_output=True, timeout=180,
        check=False, **more,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def node() -> Path:
    """A folder with the clients, and what they need; made once."""
    home = HOME / "mcp-clients"
    home.mkdir(parents=True, exist_ok=True)
    wanted = (CLIENTS / "package.json").read_text()
    is_new = not (home / "done").exists() or (home / "done").read_text() != wanted
    for path in [*CLIENTS.glob("*.js"), CLIENTS / "package.json"]:
        shutil.copy(path, home)
    if is_new:
        run("npm", "install", "--no-audit", "--no-fund", cwd=home)
        (home / "done").write_text(wanted)
    return home


@pytest.fixture(scope="module")
def older_python() -> Path:
    """mcp 1.x, which cannot be where 2.x is; made once."""
    home = HOME / "mcp-older"
    python = home / "bin" / "python"
    if not (home / "done").exists():
        uv = shutil.which("uv") or HERE.parents[1] / ".venv" / "bin" / "uv"
        run(uv, "venv", "-q", "--clear", "--python", sys.executable, home)
        run(uv, "pip", "install", "-q", "--python", python, "mcp>=1.28,<2")
        (home / "done").touch()
    return python


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """/mcp of a server without keys, with what the suite wants to find."""
    server = subprocess.Popen(
        [sys.executable, HERE / "mcp_fixtures.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert server.stdin and server.stdout
    try:
        yield server.stdout.readline().strip() + "/mcp"
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """/mcp of `hutch serve`, as it is. Without keys, for the suite cannot send one."""
    with Daemon(tmp_path_factory.mktemp("served") / "data", key=None) as daemon:
        yield daemon.url + "/mcp"


def has_all(said: str) -> None:
    seen = json.loads(said.splitlines()[-1])
    assert set(TOOLS) <= set(seen["tools"]) and "create_box" in seen["tools"]
    assert "42" in seen["first"] and "box" in seen["first"]
    assert seen["kept"].startswith("kept") and seen["read"] == "data\n"
    assert seen["told"][0] == "step"
    assert seen["apart"] and seen["cancelled"] and seen["left"] == "0"
    assert "solve" in seen["prompts"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_typescript_client_over_stdio(node: Path, version: int) -> None:
    has_all(run(node_22(node), f"typescript{version}.js", *HUTCH, cwd=node))


@pytest.mark.parametrize("version", [1, 2])
def test_a_typescript_client_over_http(node: Path, url: str, version: int) -> None:
    has_all(run(node_22(node), f"typescript{version}.js", url, cwd=node))


def test_an_older_python_client_over_stdio(older_python: Path) -> None:
    has_all(run(older_python, CLIENTS / "python1.py", *HUTCH))


def test_an_older_python_client_over_http(older_python: Path, url: str) -> None:
    has_all(run(older_python, CLIENTS / "python1.py", url))


def node_22(node: Path) -> Path:
    """The suite and the newer client want it."""
    return node / "node_modules" / ".bin" / "node"


def conformance(node: Path, package: str, url: str, *options: str) -> Checks:
    """Of each scenario, how many checks passed and failed."""
    suite = node / "node_modules" / package / "dist" / "index.js"
    done = subprocess.run(
        [node_22(node), suite, "server", "--url", url, *options], text=True, capture_output=True,
        timeout=180, check=False,
    )  # fmt: skip
    rows = re.findall(r"^[✓✗] ([a-z0-9-]+): (\d+) passed, (\d+) failed$", done.stdout, re.M)
    return {name: (int(passed), int(failed)) for name, passed, failed in rows}


def conformance_2025(node: Path, url: str) -> Checks:
    return conformance(node, "@modelcontextprotocol/conformance", url, "--suite", "all")


def conformance_2026(node: Path, url: str) -> Checks:
    return conformance(node, "conformance-next", url, "--requirements", "2026-07-28")


@pytest.fixture(scope="module")
def older(node: Path, url: str) -> Checks:
    return conformance_2025(node, url)


@pytest.fixture(scope="module")
def newer(node: Path, url: str) -> Checks:
    return conformance_2026(node, url)


def conforms(checks: Checks, scenario: str) -> None:
    passed, failed = checks[scenario]
    assert passed and not failed, scenario


@pytest.mark.parametrize("scenario", OLDER)
def test_it_conforms_to_2025(older: Checks, scenario: str) -> None:
    conforms(older, scenario)


@pytest.mark.parametrize("scenario", NEWER)
def test_it_conforms_to_2026(newer: Checks, scenario: str) -> None:
    conforms(newer, scenario)


def test_hutch_serve_conforms_to_2025_in_what_any_server_has(node: Path, served: str) -> None:
    checks = conformance_2025(node, served)
    for scenario in OLDER_OF_ANY:
        conforms(checks, scenario)


def test_hutch_serve_conforms_to_2026_in_what_any_server_has(node: Path, served: str) -> None:
    checks = conformance_2026(node, served)
    for scenario in NEWER_OF_ANY:
        conforms(checks, scenario)
