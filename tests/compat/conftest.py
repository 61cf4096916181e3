"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Served

from hutch import BackendUnavailable, Sandbox


@pytest.fixture(scope="session", autouse=True)
def _boxes() -> None:
    """For tests that are about nothing where boxes cannot be made."""
    try:
        Sandbox.create().close()
    except BackendUnavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of one's own."""
    with Served(tmp_path) as server:
        assert server.said, server.complaint()
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of a module that leave it as they found it."""
    with Served(tmp_path_factory.mktemp("project")) as server:
        assert server.said, server.complaint()
        yield server
