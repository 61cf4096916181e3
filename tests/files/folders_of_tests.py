"""A plugin for the tests here. Not a conftest.py: others import from the one above by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hutch import Sandbox


@pytest.fixture
def folder(shared_box: Sandbox, request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of its own for each test, in a box that the tests of a module share."""
    path = f"/workspace/{abs(hash(request.node.nodeid)):x}"
    shared_box.files.make_dir(path)
    yield path
    shared_box.files.remove(path, recursive=True)
