"""A box for each conversation, and all of them gone at the end."""

from __future__ import annotations

import asyncio

import pytest

import hutch
from hutch.errors import InvalidRequest
from hutch.tools import AsyncBoxes, AsyncToolbox


class Failing(AsyncBoxes):
    """The second box of it cannot be made."""

    async def _open(self) -> AsyncToolbox:
        if len(self._boxes) == 2:
            raise InvalidRequest("no such box")
        return await super()._open()


def test_a_box_that_was_not_made_does_not_keep_the_others_open() -> None:
    async def main() -> None:
        async with Failing() as boxes:
            first = (await boxes.get("first")).box
            asked = asyncio.ensure_future(boxes.get("second"))
            await asyncio.sleep(0)  # it has been requested, and the caller was cancelled
            asked.cancel()
            assert [found.id for found in await hutch.AsyncSandbox.list()] == [first.id]
        assert await hutch.AsyncSandbox.list() == []

    asyncio.run(main())


def test_those_who_ask_at_once_get_the_same_box_and_the_next_one_another() -> None:
    async def main() -> None:
        async with AsyncBoxes() as boxes:
            one, same = await asyncio.gather(boxes.get("a"), boxes.get("a"))
            assert one is same
            await boxes.forget("a")
            assert (await boxes.get("a")).box.id != one.box.id

    asyncio.run(main())


def test_at_a_server_a_box_that_was_forgotten_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HUTCH_URL", raising=False)
    assert AsyncBoxes()._order == {}
    assert AsyncBoxes(url="http://a")._order["idle"] == 3600
    assert AsyncBoxes(url="http://a", idle=None)._order["idle"] is None
    monkeypatch.setenv("HUTCH_URL", "http://b")
    assert AsyncBoxes()._order["idle"] == 3600
