"""One expensive value for everybody who asks at once."""

from __future__ import annotations

import asyncio

import pytest

from hutch.server.watching import CachedValue


class Source:
    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.may_end = asyncio.Event()

    async def make(self) -> int:
        self.calls += 1
        await self.may_end.wait()
        if self.error:
            raise self.error
        return self.calls


def test_those_who_ask_at_once_wait_for_one_value_and_later_ones_get_it() -> None:
    async def main() -> None:
        source = Source()
        shared = CachedValue(source.make, 1000)
        waiting = [asyncio.create_task(shared.get()) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who leaves takes nothing away from the others
        source.may_end.set()
        assert await asyncio.gather(*waiting[1:]) == [1] * 4
        assert await shared.get() == 1

    asyncio.run(main())


def test_an_old_value_and_an_error_are_not_kept() -> None:
    async def main() -> None:
        source = Source()
        source.may_end.set()
        shared = CachedValue(source.make, 0)
        assert [await shared.get(), await shared.get()] == [1, 2]
        source.error = ValueError("no")
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await shared.get()
        source.error = None
        assert await shared.get() == 5

    asyncio.run(main())


def test_what_is_under_way_ends_with_it() -> None:
    async def main() -> None:
        shared = CachedValue(Source().make, 0)
        waiting = asyncio.create_task(shared.get())
        await asyncio.sleep(0)
        await shared.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
