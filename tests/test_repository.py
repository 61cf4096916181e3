"""What a visitor finds beside the code works: hooks, templates and workflows."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_exist_here(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    called = re.findall(r"(?<![\w/.-])((?:scripts|benchmarks|\.ci)/[\w-]+)", "\n".join(commands))
    assert called, "it does what cannot be done at home"
    assert not [name for name in called if not os.access(ROOT / name, os.X_OK)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_takes_no_rights_it_does_not_need(path: Path) -> None:
    workflow = load(path)
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used and not [action for action in used if not re.search(r"@v\d+(\.\d+)*$", action)]
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    # Names of branches are written by strangers: a script gets them as variables, never as text.
    runs = "\n".join(step["run"] for step in steps(path) if "run" in step)
    assert not re.search(r"\$\{\{[^}]*(head_ref|base_ref|ref_name|event\.(?!_)\w+\.)", runs)


def test_the_tests_run_on_every_python_that_is_supported() -> None:
    matrix = load(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == named


def test_a_benchmark_that_got_worse_has_a_ratio_above_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compare = runpy.run_path(str(ROOT / "scripts/compare-benchmarks"))["compare"]

    def measured(milliseconds: float, per_second: float) -> dict[str, Any]:
        return {
            "scenarios": [
                {"key": key, "unit": "", "more_is_better": more, "contenders": [{"values": values}]}
                for key, more, values in [
                    ("time", False, [milliseconds]),
                    ("rate", True, [per_second]),
                    ("absent", False, []),
                ]
            ]
        }

    assert compare([measured(3, 10)], [measured(2, 10)]) == 1.5
    assert compare([measured(2, 5)], [measured(2, 10)]) == 2
    assert compare([measured(1, 20)], [measured(2, 10)]) == 0.5
    assert "| absent | | | not measured |" in capsys.readouterr().out


def test_fuzzing_runs_each_target_for_the_given_time(tmp_path: Path) -> None:
    """With a stand-in for Python that says what it was asked to run."""
    shutil.copytree(ROOT / "fuzz", tmp_path / "fuzz")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/fuzz", tmp_path / "scripts/fuzz")
    (tmp_path / "python").write_text(
        '#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n[ "$1" != fuzz/tar.py ]'
    )
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(
        [tmp_path / "scripts/fuzz", "7"], env=env, capture_output=True, text=True, timeout=60
    )
    ran = re.findall(r"^fuzz/(\w+)\.py -max_total_time=7 ", done.stdout, re.MULTILINE)
    assert ran == sorted(path.stem for path in (ROOT / "fuzz").glob("[!_]*.py"))
    assert (done.returncode, done.stderr) == (1, "=== broke a promise: tar\n")
