"""Shapes that a slow pattern would choke on: every family takes them in its stride.

What is bounded is processor time, as a multiple of what a harmless pattern takes here, and
a hundred times more generously than it is needed; a pattern that looks at each place of a line
again and again takes longer still.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache, partial

import pytest

from hutch.tools.condense import FAMILIES, Family, condense
from hutch.tools.condense.detect import calls
from hutch.tools.condense.family import CommandLine

UNITS = (
    " ", "\t", "1", "1 ", "1:", "a", "a.", "a./", "a:1", "a-1-", "-", "=", "= ", "==", "(", "(x ",
    " (use ", "[1", "] 1", "@", "| ", "│   ", ".py::", "PASSED (", " > ", "xerror ", "Error ", "İ",
    '{"a":', "━", " b/", "--:-- ",
)  # fmt: skip
# Where a pattern wants a beginning before it looks any further.
PAIRS = (
    ("ok", " "), ("+ ", "=="), ("abcdef1 ", "(x "), ("abcdef1 (", " 1"), ("#1 [", "1"), ("a ", " "),
    ("warning ", " > "), ("a.py::a[", "] PASSED ("), ("a.py", ".py::"), ("test a", " ... "),
    ("test ", "... ok "), ("a", " (use "), (" a", " | 1 "), ("\t", "a "), ("1 ", " "),
    ("a.py:1:", " "), ("1 passed", " in 1"), ("= ", " ="), ("diff --git a/", " b/"), ("a", "@"),
    ("-rw-r--r--", " 1"), ("2024-01-02 12:00:00", " "), ("PASS ", "a."), ("gcc", "-1"), ("/", "a/"),
)  # fmt: skip
# What some want to see first.
BEFORE = {
    "curl": "  % Total    % Received", "json": "  % Total    % Received", "npm ls": "├── x",
    "git log": "commit abcdef1", "git show": "commit abcdef1", "git log -p": "commit abcdef1",
    "git status": "Untracked files:", "pytest": "=== test session starts ===",
    "go test": "--- PASS: x (0.0s)", "cargo test": "test result: ok. 1 passed; 0 failed",
}  # fmt: skip


def processor_time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@cache
def reference() -> float:
    """What a harmless pattern takes for a megabyte on this machine, with no match in it."""
    pattern, text = re.compile(r"[a-z]\d+x"), "a1234567 " * 110_000
    return min(processor_time(lambda: pattern.findall(text)) for _ in range(5))


def is_quick(work: Callable[[], object], times: float) -> bool:
    """One time of three: the others may have had to wait for a collection of garbage."""
    return any(processor_time(work) < times * reference() for _ in range(3))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_quick_whatever_the_shape_of_lines(family: Family) -> None:
    before = [BEFORE[family.name]] if family.name in BEFORE else []
    call = CommandLine(family.programs[:1], 1)

    def look(lines: list[str]) -> None:
        family.shorten(call, before + lines)
        if family.looks_like:
            family.looks_like(before + lines)

    for start, unit in (*(("", unit) for unit in UNITS), *PAIRS):
        lines = [(start + unit * 2000)[:1990] + end for end in ("x", "!", " x")] * 6
        assert is_quick(partial(look, lines), 16), (start, unit)
        line = start + unit * (60_000 // len(unit))
        assert is_quick(partial(look, [line, "x"]), 16), (start, unit)


@pytest.mark.parametrize(
    "unit", ["a./", "xerror ", "(x ", "[", "\x1b]", "a\r", "a\b", " ", "1 a  "]
)
def test_a_line_of_300_kilobytes_is_quick(unit: str) -> None:
    data = (unit * (300_000 // len(unit)) + "\n" + "1\n" * 3000).encode()
    for command in ("grep x f", "git blame x", "docker ps", "./run"):
        assert is_quick(partial(condense, command, data), 160)


@pytest.mark.parametrize("unit", ["<<E\n", "<<EEEEEEEE\n", "'", "$(", "sh -c ", "A=", "`", "\\"])
def test_a_command_line_as_long_as_a_file_is_quick(unit: str) -> None:
    assert is_quick(lambda: calls(unit * 300_000 + "x"), 80)


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_json_of_any_depth_is_taken(depth: int) -> None:
    text = "[" * depth + "1," * 20_000 + "1" + "]" * depth
    assert is_quick(lambda: condense("jq . x", text), 160)
