"""Runs the examples of the documentation, and writes down what each framework came to.

`--table FILE` adds a line per framework to a file, from which docs/integrations.md is made.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

_outcomes: dict[str, Counter[str]] = {}
_modules: dict[str, ModuleType] = {}

os.environ.setdefault("HUTCH_GAIN", "off")  # what tests save is not what their user saved


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="write what came out to this file")
    parser.addoption("--adapter", action="append", help="run the examples of this adapter only")


def pytest_itemcollected(item: pytest.Item) -> None:
    module = getattr(item, "module", None)
    if module is not None:
        _modules[item.nodeid.split("::")[0]] = module


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        _outcomes.setdefault(report.nodeid.split("::")[0], Counter())[outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    table = session.config.getoption("--table")
    if table is None:
        return
    with table.open("a") as file:
        for path, outcomes in sorted(_outcomes.items()):
            module = _modules[path]
            if not hasattr(module, "FRAMEWORK"):
                continue
            row = {
                "framework": module.FRAMEWORK,
                "package": module.PACKAGE,
                "version": getattr(module, "VERSION", None) or version(module.PACKAGE),
                "plugged": module.PLUGGED,
                "suite": getattr(module, "SUITE", ""),
                "outcomes": dict(outcomes),
            }
            file.write(json.dumps(row) + "\n")
