"""A server for the tests of the SDK."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from must_work import need

from daemon_of_tests import Daemon
from hutch import BackendUnavailable, Sandbox


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One server for all tests that leave it as they found it."""
    try:
        Sandbox.create().close()
    except BackendUnavailable as exc:
        need("namespaces", str(exc))
    with Daemon(tmp_path_factory.mktemp("daemon"), mounts=tempfile.gettempdir()) as made:
        yield made
