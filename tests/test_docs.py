"""Every example in the documentation runs, and says what it claims.

What stands after the language of a block says what it needs: nothing, a `server`, which is one
real `hutch serve` for all of them, a `docker` engine, or a machine where nothing was set up yet
(`setup`). Each block has a folder of its own. In what a command prints, `…` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from benchmarks.docker_engine import Client
from must_work import need

from daemon_of_tests import Daemon
from docker_of_tests import DEBIAN
from hutch import errors, serving
from hutch.backends.docker import DockerBackend
from hutch.operations import TABLE
from hutch.server.http import sandkasten, terminals
from hutch.settings import FIELDS
from hutch.types import STATES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
BLOCK = re.compile(r"^```([\w ]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("python", "python server", "python docker", "console", "console server", "console docker",
       "console setup", "sh server")  # fmt: skip
# Not run, or elsewhere: "ts" by tests/sdk_typescript, integrations where their framework is.
SHOWN = ("text", "json", "toml", "http", "python integration", "ts", "typescript")

# Commands that set this very machine up, or need a person or the reader's own files.
NOT_HERE = ("scripts/test", "hutch shell", "-m unittest", "big.log", "report.py", "hutch doctor",
            "pip install '.[", "-- pytest", "-m venv .venv")  # fmt: skip


PATIENCE = 600  # seconds, for a machine that has much else to do


def blocks(kind: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()))
        if found == kind
    ]


def run(
    argv: list[str], cwd: Path, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(more or {})}
    for name in ("HUTCH_URL", "HUTCH_API_KEY", "HUTCH_DATA_DIR", "HUTCH_CONFIG"):
        if more is not None and name not in more:
            env.pop(name, None)
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, env=env, check=False
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `hutch` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "hutch").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hutch "$@"\n')
    (folder / "hutch").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, programs: str) -> Iterator[dict[str, str]]:
    """The variables of a user of a server."""
    with Daemon(tmp_path_factory.mktemp("docs") / "data") as daemon:
        assert daemon.key
        yield {
            "HUTCH_URL": daemon.url, "HUTCH_API_KEY": daemon.key,
            "HUTCH_DATA_DIR": str(daemon.folder), "PATH": programs,
        }  # fmt: skip


@pytest.fixture
def docker(docker_engine: Client) -> None:
    """An engine that has our default image."""
    docker_engine.tag(DEBIAN, DockerBackend.default_image)


def test_every_block_says_whether_it_is_run() -> None:
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {*RUN, *SHOWN}


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_runs(code: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("python server"))
def test_a_python_block_runs_with_a_server(
    code: str, tmp_path: Path, server: dict[str, str]
) -> None:
    done = run([sys.executable, "-W", "error", "-c", code], tmp_path, server)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("python docker"))
def test_a_python_block_runs_with_containers(code: str, tmp_path: Path, docker: None) -> None:
    done = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", blocks("console"))
def test_a_console_block_prints_what_it_shows(text: str, tmp_path: Path, programs: str) -> None:
    for command, shown in steps(text):
        command = command.removeprefix("pip install . && ")
        if not any(word in command for word in NOT_HERE):
            done = run(["sh", "-c", command], tmp_path, {**os.environ, "PATH": programs})
            assert done.stdout == shown, done.stderr


@pytest.mark.parametrize("text", blocks("console server"))
def test_a_console_block_prints_what_it_shows_with_a_server(
    text: str, tmp_path: Path, server: dict[str, str]
) -> None:
    need_curl(text)
    follow(text, tmp_path, server)


@pytest.mark.parametrize("text", blocks("console docker"))
def test_a_console_block_prints_what_it_shows_with_containers(
    text: str, tmp_path: Path, programs: str, docker: None
) -> None:
    kept = [f"$ {command}\n{shown}" for command, shown in steps(text)
            if not any(word in command for word in NOT_HERE)]  # fmt: skip
    follow("".join(kept), tmp_path, {**os.environ, "PATH": programs})


@pytest.mark.parametrize("text", blocks("sh server"))
def test_a_script_runs_with_a_server(text: str, tmp_path: Path, server: dict[str, str]) -> None:
    need_curl(text)
    # What a client cannot make of an answer is a failure, too: `curl -f`, by its own file.
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    done = run(
        ["bash", "-euo", "pipefail", "-c", text], tmp_path, {**server, "CURL_HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", blocks("console setup"))
def test_the_way_from_nothing_to_a_server_is_as_it_is_shown(
    text: str, tmp_path: Path, programs: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "XDG_DATA_HOME": "", "PATH": programs}
    try:
        follow(text.replace("127.0.0.1:8080", address), tmp_path, {**home, "HUTCH_LISTEN": address})
    finally:
        done = run(["hutch", "stop", "--kill"], tmp_path, home)
    assert done.returncode == 0, done.stderr


def test_the_guide_to_keys_works_where_the_readme_has_led(tmp_path: Path, programs: str) -> None:
    (setup,) = (text for kind, text in BLOCK.findall(PAGES[0].read_text()) if "setup" in kind)
    guide = (ROOT / "docs/guides/keys-and-quotas.md").read_text()
    need_curl(guide)
    typed = [setup]
    for kind, text in BLOCK.findall(guide):
        if kind == "console server":
            typed.append(text)
        elif kind == "sh server":
            script = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
            typed.append(f"$ (set -e; eval $'{script}')\n…\n")
    test_the_way_from_nothing_to_a_server_is_as_it_is_shown("".join(typed), tmp_path, programs)


def steps(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it is said to print."""
    found = []
    for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"\\\n", "\0", step).partition("\n")
        found.append((command.replace("\0", "\\\n"), shown.replace("\0", "\\\n")))
    return found


MARK = "--8<-- "


def follow(text: str, cwd: Path, env: Mapping[str, str]) -> None:
    """Type the commands into one shell. Each must succeed, and print what is shown."""
    wanted = steps(text)
    script = "".join(f"{command}\necho {shlex.quote(MARK)}$?\n" for command, _ in wanted)
    done = run(["bash", "-c", script], cwd, env)
    said = re.split(f"^{MARK}(.*)\n", done.stdout, flags=re.MULTILINE)
    for (command, shown), printed, code in zip(wanted, said[::2], said[1::2], strict=False):
        assert code == "0", f"{command}: exit code {code}: {printed}{done.stderr}"
        pattern = ".*".join(re.escape(part) for part in shown.split("…"))
        assert re.fullmatch(pattern, printed, re.DOTALL), f"{command} printed:\n{printed}"
    assert len(said) == 2 * len(wanted) + 1, done.stderr


def need_curl(text: str) -> None:
    if "curl" in text and not shutil.which("curl"):
        need("curl", "there is no curl here")


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\((?!https:)([^)#:]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_can_be_found_from_the_list_of_pages() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    pages = {os.path.relpath(page, ROOT / "docs") for page in PAGES} - {"README.md", "../README.md"}
    pages -= {f"decisions/{page.name}" for page in DECISIONS}  # they have a list of their own
    assert not {page for page in pages if f"({page})" not in listed}


def test_every_decision_is_in_the_list_of_decisions_under_its_number_and_title() -> None:
    listed = (ROOT / "docs/decisions/README.md").read_text()
    for page in DECISIONS:
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert f"| {page.name[:3]} | [{title}]({page.name}) | " in listed


def test_every_decision_says_what_follows_from_it_and_what_would_change_it() -> None:
    parts = ("Decision", "Context", "Consequences", "What would change our mind")
    for page in DECISIONS:
        text = page.read_text()
        assert not [part for part in parts if f"\n**{part}.**" not in text], page.name


def test_every_operation_is_in_the_reference_of_the_http_api() -> None:
    assert serving  # what only a server can be asked is in the table, too
    page = (ROOT / "docs/reference/http.md").read_text()
    missing = [
        f"{cls.verb} {cls.route} ({needs})"
        for cls in TABLE.values()
        for needs in ["no key" if cls.is_public else cls.needs]
        if not re.search(rf"`{cls.verb} {re.escape(cls.route)}` \|.*\| {needs} \|", page)
    ]
    missing += [
        f for verb, path, _ in sandkasten.routes(0) if (f := f"`{verb} {path}`") not in page
    ]
    missing += [path for path, _ in terminals.ROUTES if f"`{path}`" not in page]
    assert not missing, "\n".join(missing)


def test_the_reference_of_the_http_api_has_no_route_that_is_not_there() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    known = {(cls.verb, cls.route) for cls in TABLE.values()}
    known |= {(verb, path) for verb, path, _ in sandkasten.routes(0)}
    named = set(re.findall(r"`(GET|POST|PUT|DELETE) (/v1/[^`?]*)`", page))
    assert named - known == set()


def test_every_field_of_an_operation_is_in_the_reference_of_the_http_api() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    missing = []
    for cls in TABLE.values():
        row = next(
            line for line in page.splitlines() if line.startswith(f"| `{cls.verb} {cls.route}`")
        )
        fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
        missing += [
            f"{cls.__name__}.{name}"
            for name in fields
            if f"{{{name}}}" not in cls.route and not re.search(rf"`{name}[`=]", row)
        ]
    assert not missing, "\n".join(missing)


def test_every_error_is_in_the_page_about_errors() -> None:
    page = (ROOT / "docs/concepts/errors.md").read_text()
    classes = [cls for cls in errors.BY_CODE.values() if cls is not errors.HutchError]
    assert not [cls.__name__ for cls in classes if f"`{cls.__name__}`" not in page]
    wrong = [
        cls.__name__
        for cls in classes
        if not cls.__subclasses__()
        and not re.search(rf"`{cls.__name__}`.*\| {cls.status} \|", page)
    ]
    assert not wrong, "the status is another"


def test_every_state_is_in_the_page_about_sessions() -> None:
    page = (ROOT / "docs/concepts/sessions.md").read_text()
    assert not [state for state in STATES if f"\n| `{state}` |" not in page]


def test_every_setting_is_in_the_reference_of_settings() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    assert not [key for key in FIELDS if f"\n| `{key}` |" not in page]


def test_the_readme_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "```python" in lines[:22]


def test_every_public_name_has_a_docstring() -> None:
    import hutch

    silent = [name for name in hutch.__all__ if not (getattr(hutch, name).__doc__ or "").strip()]
    assert not silent
