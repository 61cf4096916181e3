"""Sends changes of sessions to those who follow them. It costs nothing without followers.

A slow follower skips outdated records: only the newest record of each session waits for it. So the
queue is bounded by the number of sessions. If thousands of them come and go, and even that is too
much, the follower is ended with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from hutch.errors import ServerBusy
from hutch.types import BoxInfo

MAX_WAITING = 20_000  # sessions whose newest record one follower has not read
TURN = 100  # records that are handed out before other tasks have a turn


class SessionFeed:
    """Changes of all sessions, for those who follow some of them."""

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._followers: set[_Follower] = set()

    @property
    def is_followed(self) -> bool:
        return bool(self._followers)

    def add(self, info: BoxInfo) -> None:
        """A session is new, has changed, or has ended."""
        for follower in self._followers:
            follower.add(info)

    async def follow(
        self, may_see: Callable[[BoxInfo], bool], current: Callable[[], Iterable[BoxInfo]]
    ) -> AsyncGenerator[BoxInfo | None, None]:
        """`current` first, then None, then each record as it changes.

        Raises ServerBusy if more sessions change than can wait for this reader.
        """
        follower = _Follower(may_see, self._most)
        self._followers.add(follower)
        try:
            for count, info in enumerate(current(), 1):
                if may_see(info):
                    # If it has changed since, send the newer record now, and not again later.
                    yield follower.take(info.id) or info
                if count % TURN == 0:
                    await asyncio.sleep(0)
            yield None
            count = 0
            while True:
                yield await follower.next()
                count += 1
                if count % TURN == 0:
                    await asyncio.sleep(0)
        finally:
            self._followers.discard(follower)


class _Follower:
    def __init__(self, may_see: Callable[[BoxInfo], bool], most: int) -> None:
        self._may_see, self._most = may_see, most
        self._waiting: dict[str, BoxInfo] = {}  # in order of the first change
        self._is_behind = False
        self._added = asyncio.Event()

    def add(self, info: BoxInfo) -> None:
        if self._is_behind or not self._may_see(info):
            return
        self._waiting[info.id] = info
        if len(self._waiting) > self._most:
            self._waiting.clear()
            self._is_behind = True
        self._added.set()

    def take(self, id: str) -> BoxInfo | None:
        """What waits for it of one session."""
        self._check()
        return self._waiting.pop(id, None)

    async def next(self) -> BoxInfo:
        while not self._waiting:
            self._check()
            self._added.clear()
            await self._added.wait()
        return self._waiting.pop(next(iter(self._waiting)))

    def _check(self) -> None:
        if self._is_behind:
            raise ServerBusy(
                f"more than {self._most} sessions changed that this follower has not read: follow "
                "again, with `current`"
            )
