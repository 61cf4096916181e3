"""Adapters where their frameworks are missing, as here; and what is loaded of them, and when."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hutch import Sandbox
from hutch.adapters.boxes import DualToolbox, async_box
from hutch.extras import install_command

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "src" / "hutch" / "adapters"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NEEDS = {
    file.stem: found[1]
    for file in sorted(FOLDER.glob("*.py"))
    if (found := re.search(r'^with needs\("(.+)"\):', file.read_text(), re.MULTILINE))
}


def test_every_adapter_names_an_extra_that_there_is() -> None:
    assert len(NEEDS) >= 16
    assert not {name for name in NEEDS.values() if name not in EXTRAS}


@pytest.mark.parametrize("name", NEEDS)
def test_an_adapter_without_its_framework_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    _, _, wanted = source.partition("\nwith needs(")
    imported = re.findall(r"^    (?:from|import) (\w+)", wanted, re.MULTILINE)
    assert imported
    for framework in imported:  # also where it is installed
        monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"hutch.adapters.{name}", raising=False)
    with pytest.raises(ImportError, match=re.escape(install_command(NEEDS[name]))):
        __import__(f"hutch.adapters.{name}")


def test_importing_hutch_loads_no_adapter_and_no_tool() -> None:
    code = "import sys, hutch; print(*(name for name in sys.modules if name.startswith('hutch.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"adapters", "tools", "mcp"} & {name.split(".")[1] for name in done.stdout.split()}


def test_every_framework_that_is_tested_has_its_line_in_the_table() -> None:
    tested = [
        found[1]
        for path in (ROOT / "tests" / "integrations").glob("test_*.py")
        if (found := re.search(r'^FRAMEWORK = "(.+)"$', path.read_text(), re.MULTILINE))
    ]
    table = (ROOT / "docs" / "integrations.md").read_text()
    assert len(tested) > 15
    assert [name for name in tested if f"\n| {name} | " not in table] == []


def test_the_tools_of_a_box_work_in_a_thread_without_an_event_loop() -> None:
    with Sandbox.create() as box, ThreadPoolExecutor(1) as thread:
        tools = DualToolbox(box, ["python", "bash"], condense=False)
        for name, arguments in (("python", {"code": "6 * 7"}), ("bash", {"command": "echo 42"})):
            answer = thread.submit(
                tools.run, lambda toolbox, n=name, a=arguments: toolbox.call(n, a)
            ).result()
            assert "42" in str(answer)


def test_cancelling_an_awaited_call_of_a_plain_box_kills_its_command() -> None:
    async def main(box: Sandbox) -> None:
        calls = async_box(box)
        running = asyncio.create_task(calls.shell.run("touch began; sleep 1000; touch over"))
        while not box.files.list("."):
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert box.shell.run("pgrep sleep").exit_code == 1

    with Sandbox.create() as box:
        asyncio.run(main(box))
