"""What a program printed and the host may still ask for.

It grows to a window's worth: past that, nothing more is read from the program until the host has
said that some of it is safe. So nothing is lost if a host dies, and nothing grows without one.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right

from hutch import wire

from .agent import READ_SIZE

RUN = 64  # bytes, about, that it takes to know where a run of bytes ends and whose it is


class Backlog:
    """A Sink that keeps what it gets, by offset."""

    def __init__(self) -> None:
        self.base = 0  # the offset of the oldest byte that is kept
        self._data = bytearray()
        self._ends: list[int] = []  # offsets, of runs of bytes that came on one channel
        self._channels = bytearray()  # of these
        self._is_abandoned = False
        self._room = asyncio.Event()
        self.stirred = asyncio.Event()  # there is more to read, or never will be

    def __repr__(self) -> str:
        return f"<Backlog {self.base}-{self.total}>"

    @property
    def total(self) -> int:
        """Bytes that came so far."""
        return self.base + len(self._data)

    @property
    def _is_full(self) -> bool:
        return len(self._data) + RUN * len(self._ends) >= wire.WINDOW

    def send_now(self, data: bytes, channel: int) -> bool:
        if self._is_full:
            return False
        self._add(data, channel)
        return True

    async def send(self, data: bytes, channel: int) -> None:
        while self._is_full:
            self._room.clear()
            await self._room.wait()
        self._add(data, channel)

    def _add(self, data: bytes, channel: int) -> None:
        if self._is_abandoned:
            return
        self._data += data
        if self._ends and self._channels[-1] == channel:
            self._ends[-1] = self.total
        else:
            self._ends.append(self.total)
            self._channels.append(channel)
        self.stirred.set()

    def read(self, offset: int) -> tuple[bytes, int] | None:
        """Some bytes from there on, and their channel; None if they are yet to come."""
        run = bisect_right(self._ends, offset)
        if run == len(self._ends):
            return None
        start, end = offset - self.base, self._ends[run] - self.base
        return bytes(self._data[start : min(end, start + READ_SIZE)]), self._channels[run]

    def forget(self, until: int) -> None:
        """All before this offset is safe elsewhere."""
        if until > self.base:
            runs = bisect_right(self._ends, until)
            del self._data[: until - self.base], self._ends[:runs], self._channels[:runs]
            self.base = until
            self._room.set()

    def abandon(self) -> None:
        """Nobody will ask for any of it, nor for what is yet to come."""
        self._is_abandoned = True
        self.forget(self.total)
        self._room.set()
