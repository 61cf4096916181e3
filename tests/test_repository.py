"""What a visitor finds beside the code works: hooks, templates and workflows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_hooks_run_programs_of_this_repository() -> None:
    repositories = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = hook["entry"].split()[0]
        assert program == ".venv/bin/ruff" or os.access(ROOT / program, os.X_OK), program


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_form_for_issues_has_what_the_code_host_asks_for(path: Path) -> None:
    form = load(path)
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"].get("label") or field["type"] == "markdown"


def test_the_way_to_report_a_vulnerability_has_deadlines() -> None:
    text = (ROOT / "SECURITY.md").read_text().split("\n## ")[1]
    assert text.startswith("Reporting a vulnerability")
    assert all(f"| within {days} days |" in text for days in (3, 10, 90))
