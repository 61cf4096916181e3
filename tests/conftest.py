"""Fixtures that every test may use, and the watch over what tests leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from must_work import need

from hutch import BackendUnavailable, Sandbox, local


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A fresh box."""
    try:
        made = Sandbox.create()
    except BackendUnavailable as exc:
        need("namespaces", str(exc))
    with made:
        yield made


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Sandbox]:
    """One box for all tests of a module that leave it as they found it."""
    try:
        made = Sandbox.create()
    except BackendUnavailable as exc:
        need("namespaces", str(exc))
    with made:
        yield made


def left_over() -> set[str]:
    """What Hutch left on this machine: control groups and mounts whose owner is dead."""
    found = {f"mount {m}" for m in Path("/proc/mounts").read_text().splitlines() if "hutch" in m}
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            owner = name.removeprefix("hutch-").partition("-")[0]
            if name.startswith("hutch-") and owner.isdigit() and not Path("/proc", owner).exists():
                found.add(f"cgroup {folder}/{name}")
    return found


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = left_over()
    yield
    if local._portal:
        local._portal.close()
    deadline = time.monotonic() + 3
    while (left := left_over() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
