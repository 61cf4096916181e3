"""The example of each page about a framework runs, in the environment that has it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES, SCRIPT = ROOT / "docs" / "integrations", ROOT / "scripts" / "integrations"
# The frameworks of the second environment, as scripts/integrations has them.
MORE = ast.literal_eval(
    re.search(r"^MORE = (\[.*?\])$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[1]
)
IS_MORE = find_spec("strands") is not None
BLOCK = re.compile(r"^```python integration\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    return [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in sorted(PAGES.glob("*.md"))
        for number, text in enumerate(BLOCK.findall(page.read_text()))
        if _is_here(text)
    ]


def _is_here(text: str) -> bool:
    """Whether this is the environment in which the adapter of an example is tested."""
    adapter = re.search(r"^from hutch\.adapters\.(\w+) import", text, re.MULTILINE)
    assert adapter, f"an example that imports no adapter: {text[:200]}"
    return (adapter[1] in MORE) == IS_MORE


@pytest.mark.parametrize("text", examples())
def test_an_example_runs(text: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"  # some frameworks look for the source of what they are given
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
