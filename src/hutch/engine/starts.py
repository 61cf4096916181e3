"""A queue for the starts of boxes: a few at a time, and owners take turns.

A start keeps a processor busy for a moment. If a burst of them began at once, each would take as
long as all together, and its deadline would start at once. So a few run at a time, and the others
wait without a deadline. An owner who opens a hundred boxes delays only their own.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hutch.errors import HutchError, ServerBusy, ServerUnavailable

LONGEST_PAUSE = 30  # seconds that a refused caller is asked to wait


def fitting_this_machine() -> int:
    """How many concurrent starts give the most boxes per second."""
    # More than one for each processor: a start also waits for the kernel and for the launcher.
    return max(8, 4 * len(os.sched_getaffinity(0)))


@dataclass(eq=False)
class _Waiter:
    task: asyncio.Task[object] | None
    turn: asyncio.Future[None]


class Starts:
    def __init__(self, at_once: int | None = None, most_waiting: int | None = None) -> None:
        """`at_once`: None for what fits this machine. `most_waiting`: None for no bound."""
        self._at_once = at_once or fitting_this_machine()
        self._most_waiting = most_waiting
        self._running = 0
        self._waiting: dict[str, deque[_Waiter]] = {}  # by owner; the next one comes first
        self._seconds = 0.0  # a start takes, on average
        self._closed = False

    def __repr__(self) -> str:
        return f"<Starts {self._running} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_waiting(self, task: asyncio.Task[object]) -> bool:
        """Whether this task still waits for its turn."""
        return any(waiter.task is task for queue in self._waiting.values() for waiter in queue)

    @asynccontextmanager
    async def turn(self, owner: str = "", *, may_be_refused: bool = True) -> AsyncIterator[None]:
        """Wait until this owner may start a box. A cancelled caller leaves the queue.

        Raises ServerBusy if too many are waiting, and ServerUnavailable once it is closed.
        """
        if self._closed:
            raise _going_away()
        if self._running < self._at_once:  # then the queue is empty
            self._running += 1
        else:
            await self._wait(owner, may_be_refused)
        began = time.monotonic()
        try:
            yield
            self._note(time.monotonic() - began)
        finally:
            self._pass_on()

    def close(self) -> None:
        """Refuse those who wait, and new ones. Starts that have begun continue."""
        self._closed = True
        for queue in self._waiting.values():
            for waiter in queue:
                _refuse(waiter, _going_away())
        self._waiting.clear()

    async def _wait(self, owner: str, may_be_refused: bool) -> None:
        if may_be_refused and self._is_full:
            self._make_room(owner)
        waiter = _Waiter(asyncio.current_task(), asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                self._pass_on()  # we got our turn just when we were cancelled
            else:
                self._remove(owner, waiter)
            raise

    @property
    def _is_full(self) -> bool:
        return self._most_waiting is not None and self.waiting >= self._most_waiting

    def _make_room(self, owner: str) -> None:
        """Refuse the newest of the owner with most in the queue; or this one, if that is fairer."""
        mine = len(self._waiting.get(owner, ()))
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=owner)
        if not self._waiting or len(self._waiting[longest]) <= mine + 1:
            raise self._busy()
        waiter = self._waiting[longest][-1]
        self._remove(longest, waiter)
        _refuse(waiter, self._busy())

    def _busy(self) -> ServerBusy:
        seconds = min(LONGEST_PAUSE, math.ceil(self.waiting * self._seconds / self._at_once)) or 1
        return ServerBusy(
            f"too many starts: {self.waiting} boxes wait already. Nothing was done; try again in "
            f"{seconds} s",
            seconds,
        )

    def _remove(self, owner: str, waiter: _Waiter) -> None:
        if owner in self._waiting and waiter in self._waiting[owner]:
            self._waiting[owner].remove(waiter)
            if not self._waiting[owner]:
                del self._waiting[owner]

    def _pass_on(self) -> None:
        """Give the finished turn to the first of the next owner."""
        while self._waiting:
            owner = next(iter(self._waiting))
            mine = self._waiting.pop(owner)
            waiter = mine.popleft()
            if mine:
                self._waiting[owner] = mine  # at the end: the others come first
            if not waiter.turn.done():  # otherwise it was cancelled, and is not removed yet
                waiter.turn.set_result(None)
                return
        self._running -= 1

    def _note(self, seconds: float) -> None:
        self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds


def _refuse(waiter: _Waiter, error: HutchError) -> None:
    if not waiter.turn.done():
        waiter.turn.set_exception(error)


def _going_away() -> ServerUnavailable:
    return ServerUnavailable("this server is shutting down: no session can be opened")
