"""What comes back from a box that says what is not so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from hutch import operations as op
from hutch.client._async_stream import AsyncItems
from hutch.errors import GuestMisbehaved
from hutch.projects.results import Fetched, Fetcher
from hutch.types import Entry

T = TypeVar("T")
ItemT = TypeVar("ItemT")


class Liar:
    """Carries out operations as a box would that has been taken over."""

    def __init__(self, *found: str, called: str = "") -> None:
        self._found, self._called = found, called
        self.read: list[str] = []

    async def perform(self, operation: op.Operation[T]) -> T:
        answer: Any
        if isinstance(operation, op.GlobFiles):
            answer = list(self._found)
        else:
            assert isinstance(operation, op.StatFile)
            answer = Entry(self._called or operation.path, "file", 5, 0o644, 0.0, 0, 0)
        return cast(T, answer)

    async def stream(self, operation: op.StreamOperation[ItemT, T]) -> AsyncItems[ItemT]:
        assert isinstance(operation, op.ReadFile)
        self.read.append(operation.path)
        return cast("AsyncItems[ItemT]", self._content())

    async def _content(self) -> AsyncIterator[bytes]:
        yield b"owned"


def fetch(box: Liar, top: Path, word: str) -> Fetched:
    return asyncio.run(Fetcher(box, "s", top, 1000).fetch([word]))


def test_a_file_goes_where_it_was_asked_for_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("mine")
    fetch(Liar(called="/workspace/Makefile"), tmp_path, "dist.whl")
    assert (tmp_path / "Makefile").read_text() == "mine"
    assert (tmp_path / "dist.whl").read_text() == "owned"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("build/*.whl", "/workspace/.git/hooks/post-checkout"), ("*.whl", "/workspace/a/b.whl"),
     ("*.whl", "/workspace/Makefile"), ("*", "/workspace/../x"), ("*", "/etc/passwd"),
     ("a/**/b", "/workspace/a/x/c"), ("**/b", "/workspace/c"), ("build/**", "/workspace/build")],
)  # fmt: skip
def test_what_does_not_fit_the_pattern_is_not_taken(
    tmp_path: Path, pattern: str, found: str
) -> None:
    box = Liar(found)
    with pytest.raises(GuestMisbehaved):
        fetch(box, tmp_path, pattern)
    assert box.read == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("*.whl", "a.whl"), ("build/*", "build/.x"), ("a/**/b", "a/b"), ("a/**/b", "a/x/y/b"),
     ("**", "a/b"), ("**/*.x", "1.x"), ("[!a]?", "bc")],
)  # fmt: skip
def test_what_fits_the_pattern_is_taken(tmp_path: Path, pattern: str, found: str) -> None:
    assert fetch(Liar(f"/workspace/{found}"), tmp_path, pattern).files == 1
    assert (tmp_path / found).read_text() == "owned"
