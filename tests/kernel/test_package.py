"""The kernel runs in any image: old Pythons, no packages, and under another name."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels_of_tests import SOURCE, Kernel

FILES = sorted(SOURCE.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_module_is_python_three_nine(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(level, module) for each import in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_module_imports_the_standard_library_and_its_siblings(path: Path) -> None:
    for level, module in imported(path):
        assert level == 1 or (not level and module.split(".")[0] in sys.stdlib_module_names), module


def test_what_a_kernel_has_loaded_before_its_first_cell_is_little(kernel: Kernel) -> None:
    loaded = set(kernel.value("[*__import__('sys').modules]"))
    assert not loaded & {"asyncio", "multiprocessing", "email", "http", "urllib.request", "ssl"}


def test_a_context_goes_on_in_another_kernel(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Kernel(tmp_path / "a") as kernel:
        kernel.run("x = [1, 2]\n7")
        saved, report = kernel.save()
        assert "x" in report["kept"]
    with Kernel(tmp_path / "b") as kernel:
        assert kernel.load(saved)["count"] == 1
        assert kernel.run("x.append(_); x").text == "[1, 2, 7]"
        ran = kernel.run("_")
        assert (ran.count, ran.text) == (3, "[1, 2, 7]")


def test_interrupts_while_a_state_arrives_lose_nothing(kernel: Kernel) -> None:
    kernel.run("x = bytes(range(256)) * 200_000")
    saved, _ = kernel.save()
    kernel.run("del x")
    over = threading.Event()

    def storm() -> None:
        while not over.wait(0.0003):
            kernel.interrupt()

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        for _ in range(3):
            assert "x" in kernel.load(saved)["kept"]
    finally:
        over.set()
        thread.join()
    assert kernel.run("x == bytes(range(256)) * 200_000").text == "True"


def test_a_state_that_is_no_state_is_refused_and_survived(kernel: Kernel) -> None:
    answer = kernel.load(b"nonsense" * 1_000_000)
    assert answer["kept"] == [] and answer["lost"]
    assert kernel.run("1").text == "1"
