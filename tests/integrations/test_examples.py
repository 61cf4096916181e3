"""Examples with a framework run in the environment that has it: those of its page, and programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS, PAGES = ROOT / "examples", ROOT / "docs" / "integrations"
BLOCK = re.compile(r"^```python integration\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What the programs in examples/ print, among other things, and in this order.
SAYS = {
    "agent_langchain.py": ["ZeroDivisionError", "exit code 124", "exit code 0: 1366", "answer: "],
    "agent_openai_agents.py": ["exited with code 2", "wc -w", "output: .*3\n", "answer: There"],
    "agent_pydantic_ai.py": ["SyntaxError", ": 144", "timed out", "output: fib.py", "answer: Yes"],
    "agent_smolagents.py": ["KeyError: 'plums'", "stopped after 5 seconds", "answer: 16.0"],
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--adapter` names those whose framework is in this environment; without it, all run."""
    here = metafunc.config.getoption("--adapter")
    if "text" in metafunc.fixturenames:
        found = [
            pytest.param(text, id=f"{page.stem}-{number}")
            for page in sorted(PAGES.glob("*.md"))
            for number, text in enumerate(BLOCK.findall(page.read_text()))
            if not here or _adapter(text) in here
        ]
        metafunc.parametrize("text", found)
    if "name" in metafunc.fixturenames:
        texts = {path.name: path.read_text() for path in sorted(PROGRAMS.glob("*.py"))}
        names = [name for name, text in texts.items() if "hutch.adapters." in text]
        found = [name for name in names if not here or _adapter(texts[name]) in here]
        metafunc.parametrize("name", found)


def _adapter(text: str) -> str:
    found = re.search(r"^from hutch\.adapters\.(\w+) import", text, re.MULTILINE)
    assert found, f"an example that imports no adapter: {text[:200]}"
    return found[1]


def test_an_example_runs(text: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"  # some frameworks look for the source of what they are given
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_program_prints_what_it_is_about(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / name], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(".*".join(SAYS[name]), done.stdout, re.DOTALL), done.stdout
    assert list(tmp_path.iterdir()) == []
