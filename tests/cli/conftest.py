"""A server for the commands that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prompt import Served


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    request.getfixturevalue("boxes")
    server = Served(tmp_path_factory.mktemp("served"))
    server.begin()
    yield server
    server.end()
