"""How large folders are: measured in a thread, one after another, and remembered for a while."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from hutch.errors import ServerUnavailable

from .open_files import deleted_size
from .trees import WalkStopped, size_of

RECENT = 1.0  # seconds for which a size is as good as new
SHARE = 20  # what took a second to measure is measured every 20 seconds, at most


@dataclass(frozen=True)
class _Size:
    bytes: int
    measured: float  # on the monotonic clock
    took: float  # seconds


class FolderSizes:
    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._known: dict[Path, _Size] = {}
        self._forgotten = 0  # how often
        # Together they would only fight for the disk; but no owner waits for another's.
        self._turns: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)

    def known(self, folder: Path) -> int | None:
        """As it was when it was measured last."""
        found = self._known.get(folder)
        return found.bytes if found else None

    def forget(self, folder: Path) -> None:
        self._forgotten += 1
        self._known.pop(folder, None)

    async def recent(self, folder: Path) -> int:
        """As it was a moment ago; longer ago if it takes long to measure, lest that be all that
        is ever done."""
        found = self._known.get(folder)
        if found and time.monotonic() - found.measured < max(RECENT, found.took * SHARE):
            return found.bytes
        return await self.now(folder)

    async def now(self, folder: Path) -> int:
        asked = time.monotonic()
        async with self._turns[folder.parent]:
            found = self._known.get(folder)
            if found and found.measured >= asked:
                return found.bytes  # somebody else wanted to know, too
            begun, forgotten = time.monotonic(), self._forgotten
            try:
                size = await asyncio.to_thread(_measured, folder, self._stop)
            except WalkStopped:
                raise ServerUnavailable("the server is going away") from None
            if forgotten == self._forgotten:
                # As of when it began: what was written since may not be in it.
                self._known[folder] = _Size(size, begun, time.monotonic() - begun)
            return size


def _measured(folder: Path, stop: Event) -> int:
    # Removed files first: one that is removed in between is then in neither, but not the next time.
    return deleted_size(folder, stop) + size_of(folder, stop)
