"""Every example in the documentation runs, and says what it claims."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_runs(code: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "error", str(example)], tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr


# Commands that set this very machine up, or need a person or the reader's own files.
NOT_HERE = ("scripts/test", "hutch shell", "-m unittest", "big.log", "report.py", "hutch doctor")


@pytest.mark.parametrize("text", blocks("console"))
def test_a_console_block_prints_what_it_shows(text: str, tmp_path: Path) -> None:
    hutch = f"{shlex.quote(sys.executable)} -m hutch"
    for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        command = command.removeprefix("pip install . && ")
        if not any(word in command for word in NOT_HERE):
            command = re.sub(r"\bhutch\b(?= (run|python|image))", lambda _: hutch, command)
            assert run(["sh", "-c", command], tmp_path).stdout == shown


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "```python" in lines[:22]


def test_every_public_name_has_a_docstring() -> None:
    import hutch

    silent = [name for name in hutch.__all__ if not (getattr(hutch, name).__doc__ or "").strip()]
    assert not silent
