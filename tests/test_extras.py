"""How to install an optional part, as it is told to people."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from hutch import extras
from hutch.extras import install_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'hutch[mcp]'"),
        ({"url": "file:///src/my%20hutch", "dir_info": {}}, "pip install '/src/my hutch[mcp]'"),
        (
            {"url": "file:///src/hutch", "dir_info": {"editable": True}},
            "pip install -e '/src/hutch[mcp]'",
        ),
        (
            {"url": "https://host/hutch.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'hutch[mcp] @ git+https://host/hutch.git@abc'",
        ),
        (
            {"url": "file:///tmp/hutch-0.1.whl", "archive_info": {}},
            "pip install 'hutch[mcp] @ file:///tmp/hutch-0.1.whl'",
        ),
        (
            {"url": "file:///it's", "dir_info": {}},
            """pip install '/it'"'"'s[mcp]'""",
        ),
    ],
)
def test_the_command_names_what_was_installed(
    record: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(record) if record else None

    monkeypatch.setattr(extras, "distribution", lambda name: Installed())
    assert install_command("mcp") == command


def test_without_an_installation_it_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert install_command("mcp") == f"pip install '{ROOT}[mcp]'"


def test_nothing_tells_people_to_install_what_is_not_published() -> None:
    """Neither a page, nor a message, nor the code that the dashboard writes for people."""
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*"),
        *(ROOT / "src/hutch").rglob("*.py"),
        *(ROOT / "packages").glob("*/src/**/*.ts*"),
        *(ROOT / "packages").glob("*/README.md"),
    ]
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in texts
        if path.is_file()
        for line in path.read_text().splitlines()
        if re.search(r"(pip|npm) (install|i|add) (-\w+ )?['\"]?hutch\b", line)
    ]
    assert wrong == []
