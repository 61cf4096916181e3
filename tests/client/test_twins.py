"""The sync client is made from the async one, and says what it promises."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hutch
from hutch.client import (
    _async,
    _async_code,
    _async_files,
    _async_http,
    _async_stream,
    _async_workspace,
    _sync,
    _sync_code,
    _sync_files,
    _sync_http,
    _sync_stream,
    _sync_workspace,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "unasync"
PAIRS = [
    (_async, _sync), (_async_code, _sync_code), (_async_files, _sync_files),
    (_async_http, _sync_http), (_async_stream, _sync_stream),
    (_async_workspace, _sync_workspace),
]  # fmt: skip


def classes(module) -> list[type]:
    found = [cls for _, cls in inspect.getmembers(module, inspect.isclass)
             if cls.__module__ == module.__name__]  # fmt: skip
    return sorted(found, key=lambda cls: cls.__name__.removeprefix("Async"))


def methods(cls: type) -> dict[str, object]:
    return {name: each for name, each in vars(cls).items() if not name.startswith("_")}


def test_the_sync_client_is_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_class_and_method_has_its_twin():
    for source, twin in PAIRS:
        assert [c.__name__.removeprefix("Async") for c in classes(source)] == [
            c.__name__ for c in classes(twin)
        ]
        for one, other in zip(classes(source), classes(twin), strict=True):
            names = [name.replace("aclose", "close") for name in methods(one)]
            assert names == list(methods(other))


def test_the_twin_of_a_coroutine_is_a_function():
    for _, twin in PAIRS:
        for cls in classes(twin):
            for each in vars(cls).values():
                assert (
                    not inspect.iscoroutinefunction(inspect.unwrap(each))
                    if callable(each)
                    else True
                )
        assert not re.search(r"\b(async|await|asyncio|Async\w+)\b", inspect.getsource(twin))


def test_everything_public_says_what_it_promises():
    for name in hutch.__all__:
        thing = getattr(hutch, name)
        if name.startswith("Async") or issubclass(thing, Exception):
            continue
        assert inspect.getdoc(thing), name
        for method, each in methods(thing).items():
            function = (
                each.fget if isinstance(each, property) else inspect.unwrap(getattr(thing, method))
            )
            if inspect.isfunction(function) and not isinstance(each, property):
                assert inspect.getdoc(function), f"{name}.{method}"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("async with await f() as x:\n    pass\n", "with f() as x:\n    pass\n"),
        ("async def f() -> AsyncX[int]:\n    pass\n", "def f() -> X[int]:\n    pass\n"),
        ("x = [y async for y in z]\n", "x = [y for y in z]\n"),
        ("x = (await f()).y\n", "x = (f()).y\n"),
        ('"""Use `async with await X()`; AsyncX waits."""\n', '"""Use `with X()`; X waits."""\n'),
        ("# AsyncFoo awaits nothing\n", "# Foo awaits nothing\n"),
        ("awaited = asynchronous = NotAsync\n", "awaited = asynchronous = NotAsync\n"),
        ("x = f(\n    await a,\n    \\\n    b,\n)\n", "x = f(\n    a,\n    \\\n    b,\n)\n"),
        ("if x:\n    await y\n\nz = 1\n", "if x:\n    y\n\nz = 1\n"),
    ],
)  # fmt: skip
def test_only_what_is_asynchronous_is_changed(source, expected):
    script: dict[str, object] = {"__name__": "unasync", "__file__": str(SCRIPT)}
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), script)
    assert script["sync"](source) == expected


def test_user_code_passes_the_strictest_type_checker():
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing_check.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
