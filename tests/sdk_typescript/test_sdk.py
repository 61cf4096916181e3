"""The TypeScript SDK: built as npm would, then run by Node, Deno and Bun against a real server.

What is tested is in `packages/sdk/tests`. Packages come once from npm, into a cache outside of the
checkout; the SDK is built in a folder of the test.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import is_dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import get_annotations, getsource, isfunction, ismethod, signature
from pathlib import Path

import pytest

import hutch
from daemon_of_tests import Daemon
from hutch import errors
from hutch.client._async import (
    AsyncCommands,
    AsyncHandle,
    AsyncShell,
    AsyncShells,
    AsyncTerminal,
    AsyncTerminals,
)
from hutch.client._async_files import AsyncFiles
from hutch.tools import AsyncToolbox
from npm_of_tests import ROOT, SDK, build_sdk, packages_of, run

HERE = Path(__file__).parent
EXAMPLES = sorted(path.stem for path in (SDK / "examples").glob("*.ts"))

pytestmark = [
    pytest.mark.skipif(not shutil.which("npm"), reason="there is no npm"),
    pytest.mark.namespaces("clients are the same whatever makes boxes"),
]


def blocks_of_pages() -> list[str]:
    """Each block of the guide and of the READMEs that is TypeScript: a program of its own."""
    pages = (ROOT / "docs/guides/typescript.md", ROOT / "README.md", SDK / "README.md")
    parts = [part for page in pages for part in page.read_text().split("```ts\n")[1:]]
    return [part.split("\n```")[0] for part in parts]


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built, with its tests compiled."""
    folder = build_sdk(tmp_path_factory.mktemp("sdk"))
    for number, block in enumerate(blocks_of_pages()):
        (folder / "examples" / f"block{number}.ts").write_text(block + "\nexport {};\n")
    run("node", "node_modules/typescript/bin/tsc", "-p", "tsconfig.json", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a client: a server, its key, and a way to kill and start it."""
    with Daemon(tmp_path_factory.mktemp("served") / "data") as daemon, control(daemon) as url:
        yield {
            "HUTCH_URL": daemon.url,
            "HUTCH_API_KEY": daemon.key or "",
            "HUTCH_TEST_CONTROL": url,
            "HUTCH_TEST_SOCKET": daemon.socket.removeprefix("unix:"),
        }


class control:
    """An address at which `POST /crash` and `POST /start` do that to a server."""

    def __init__(self, daemon: Daemon) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                {"/crash": daemon.crash, "/start": daemon.start}[self.path]()
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def names_of(cls: type) -> dict[str, list[str]]:
    """The public names of a class, with the parameters of those that are called."""
    names: dict[str, list[str]] = {}
    for base in reversed(cls.__mro__[:-1]):
        if (init := vars(base).get("__init__")) and not is_dataclass(base):
            names |= {name: [] for name in re.findall(r"self\.([a-z]\w*)\b", getsource(init))}
        names |= {name: [] for name in vars(base) | get_annotations(base)}
    for name in names:
        member = getattr(cls, name, None)
        if isfunction(member) or ismethod(member):
            parameters = [p for p in signature(member).parameters if p != "self"]
            names[name] = [p for p in parameters if not p.startswith("_")]
    return {name: names[name] for name in sorted(names) if not name.startswith("_")}


def names_of_python() -> dict[str, dict[str, list[str]]]:
    """What users of the Python SDK hold and call, by the name that it has in TypeScript."""
    classes = {
        "Sandbox": hutch.AsyncSandbox, "Shells": AsyncShells, "Shell": AsyncShell,
        "Commands": AsyncCommands, "Handle": AsyncHandle, "Terminal": AsyncTerminal,
        "Terminals": AsyncTerminals, "Files": AsyncFiles, "Workspace": hutch.AsyncWorkspace,
        "Toolbox": AsyncToolbox, "Result": hutch.Result, "Chunk": hutch.Chunk,
        "Piece": hutch.Piece, "Execution": hutch.Execution, "CellResult": hutch.CellResult,
    }  # fmt: skip
    return {name: names_of(cls) for name, cls in classes.items()}


def node_test(sdk: Path, name: str, env: dict[str, str]) -> None:
    said = run("node", "--test", "--test-reporter=tap", f"build/tests/{name}.js", env=env, cwd=sdk)
    assert "\n# fail 0" in said and "\n# pass 0" not in said, said


@pytest.mark.parametrize("name", ["offline", "hostile"])
def test_what_needs_no_server(sdk: Path, name: str) -> None:
    tree = {cls.__name__: (cls.code, cls.__mro__[1].__name__) for cls in errors.BY_CODE.values()}
    env = {
        "HUTCH_OPENAPI": str(ROOT / "openapi.json"),
        "HUTCH_ERRORS": json.dumps(tree),
        "HUTCH_NAMES": json.dumps(names_of_python()),
    }
    node_test(sdk, f"{name}.test", env)


@pytest.mark.parametrize("name", ["sandbox", "streams", "tools", "node"])
def test_against_a_server(sdk: Path, environment: dict[str, str], name: str) -> None:
    node_test(sdk, f"{name}.test", environment)


def test_terminals_over_websockets_and_without(sdk: Path, environment: dict[str, str]) -> None:
    """Node 20 has WebSockets only if it is asked for them; later ones take the option, too."""
    node_test(sdk, "terminals.test", {**environment, "NODE_OPTIONS": "--experimental-websocket"})


def test_the_code_that_the_playground_shows(sdk: Path, environment: dict[str, str]) -> None:
    codegen = ROOT / "packages/dashboard/src/session/codegen.ts"
    node_test(sdk, "playground.test", {**environment, "HUTCH_CODEGEN": str(codegen)})


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(sdk: Path, environment: dict[str, str], name: str) -> None:
    said = run("node", f"build/examples/{name}.js", env=environment, cwd=sdk)
    assert {"hello": "sum: 6\nstep 1", "agent-loop": "bash: 42"}[name] in said


def test_the_guide_and_the_readmes_run(sdk: Path, environment: dict[str, str]) -> None:
    for number in range(len(blocks_of_pages())):
        run("node", f"build/examples/block{number}.js", env=environment, cwd=sdk)


@pytest.mark.parametrize("runtime", ["node", "deno", "bun"])
def test_it_works_in(sdk: Path, environment: dict[str, str], runtime: str) -> None:
    """Deno and Bun come as binaries in packages of npm: no script has to be run to get them."""
    command: list[object] = ["node"]
    if runtime != "node":
        packages = packages_of(HERE / "runtimes")
        pattern = {"deno": "@deno/linux-*/deno", "bun": "@oven/bun-linux-*/bin/bun"}[runtime]
        binary = next((path for path in packages.glob(pattern) if "musl" not in str(path)), None)
        if binary is None:
            pytest.skip(f"npm has no {runtime} for this machine")
        command = [binary, "run", *(["-A", "--no-config"] if runtime == "deno" else [])]
    said = run(*command, "tests/smoke.mjs", env=environment, cwd=sdk)
    assert said.splitlines()[-1] == "works"


@pytest.mark.parametrize(
    "lib", ["es2022", "es2022,dom"], ids=["without the names of browsers", "with them"]
)
@pytest.mark.parametrize(
    "module", ["nodenext", "esnext --moduleResolution bundler"], ids=["for Node", "for a bundler"]
)
def test_a_strict_program_takes_its_types(sdk: Path, tmp_path: Path, lib: str, module: str) -> None:
    """As a project that has Node's types and this package, and skips no check."""
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules/hutch").symlink_to(sdk)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.ts").write_text(blocks_of_pages()[0])
    run(
        "node", sdk / "node_modules/typescript/bin/tsc", "--noEmit", "--strict",
        "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--target", "es2022",
        "--lib", lib, "--types", "node", "--typeRoots", sdk / "node_modules/@types",
        "--module", *module.split(), "program.ts", cwd=tmp_path,
    )  # fmt: skip


def test_the_lock_files_name_no_registry() -> None:
    for folder in (SDK, HERE / "runtimes"):
        lock = json.loads((folder / "package-lock.json").read_text())
        assert not [name for name, package in lock["packages"].items() if "resolved" in package]
        assert "omit-lockfile-registry-resolved=true" in (folder / ".npmrc").read_text()
    dependencies = json.loads((SDK / "package.json").read_text()).get("dependencies", {})
    assert not dependencies
