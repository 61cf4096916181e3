"""Pristine boxes that are kept warm, so that whoever wants one need not wait for its start.

The newest is given out first: its memory is the warmest, and what is not needed grows old and
goes. A box that was given out never comes back. When there is none, nobody waits for one: the
caller starts a box of its own. What to do next is decided in `pool_plan`; here it is done.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hutch.engine.link import Link
from hutch.errors import InvalidRequest
from hutch.serving import PoolState

from .pool_plan import CLOSED, Breaker, DropBox, PooledBox, is_given, plan

AT_ONCE = 2  # starts of the pool's own: the machine's other core is for callers
LARGEST = 1000  # boxes of one image
# Seconds before a box that was given out is replaced: a start takes a whole core, and whoever has
# the box is about to use it.
REST = 0.05


class WarmBox(Protocol):
    """A box that was started and can be talked to, and has run nothing."""

    @property
    def alive(self) -> bool: ...

    @property
    def link(self) -> Link: ...

    async def close(self) -> None:
        """Kill it. Never raises, and may be called twice."""


W = TypeVar("W", bound=WarmBox)


@dataclass
class _Waiting(Generic[W]):
    image: str
    born: float
    warm: W
    watch: asyncio.Task[None]


class Pool(Generic[W]):
    """`start` makes one box of an image; if it fails or is cancelled, nothing is left of it."""

    def __init__(
        self,
        start: Callable[[str], Awaitable[W]],
        sizes: Mapping[str, int],
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._max_age, self._clock = start, max_age, clock
        self._targets = {image: _checked(size) for image, size in sizes.items() if size}
        self._waiting: dict[int, _Waiting[W]] = {}
        self._starting: Counter[str] = Counter()
        self._breakers: dict[str, Breaker] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._was_given = False  # one, just now
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._keeper else "not filled"
        return f"<Pool {state}, {len(self._waiting)} ready, {self._starting.total()} starting>"

    def fill(self) -> None:
        """From now on there are as many boxes as were asked for, or they are on their way."""
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.create_task(self._keep())

    def has(self, image: str) -> bool:
        """Whether boxes of this image are kept."""
        return image in self._targets and not self._closed

    def take(
        self, image: str, fits: Callable[[W], bool] = lambda warm: True
    ) -> tuple[W | None, str | None]:
        """A box that is the caller's from here on; or None, and why (for `acquire_detail`).

        Does not wait and cannot be interrupted: so no box is given twice, and none gets lost.
        """
        if not self.has(image):
            return None, None
        others = False
        ready = [box for box in self._ready() if box.image == image]
        for box in sorted(ready, key=lambda box: (box.born, box.number), reverse=True):
            if is_given(box, now=self._clock(), max_age=self._max_age):
                if not fits(self._waiting[box.number].warm):
                    others = True
                    continue
                self._was_given = True
                self._changed.set()
                return self._forget(box.number), None
        return None, "pool_spec_mismatch" if others else "pool_empty"

    def size(self, image: str, count: int) -> PoolState:
        """How many boxes of an image to keep from now on. Failures so far are forgiven."""
        _checked(count)
        if count:
            self._targets[image] = count
        else:
            self._targets.pop(image, None)
        self._breakers.pop(image, None)
        self._changed.set()
        return self._state(image)

    def states(self) -> list[PoolState]:
        images = {*self._targets, *self._starting, *(w.image for w in self._waiting.values())}
        return [self._state(image) for image in sorted(images)]

    async def close(self) -> None:
        """When this returns, every box that was not given out is gone, also half started ones."""
        self._closed = True
        under_way = [*self._starts, *([self._keeper] if self._keeper else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._starting.clear()  # a task that is cancelled before it ran does not count itself out
        for number in list(self._waiting):
            self._drop(number)
        await asyncio.gather(*self._ends, return_exceptions=True)

    # --- doing --------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            now = self._clock()
            # Before anything is planned: a death may open a breaker.
            for box in self._ready():
                if not box.alive:
                    self._note_death(box, now)
                    self._drop(box.number)
            todo = plan(
                self._targets,
                self._ready(),
                self._starting,
                self._breakers,
                now=now,
                max_age=self._max_age,
                at_once=AT_ONCE,
            )
            for action in todo.actions:
                if isinstance(action, DropBox):
                    self._drop(action.number)
                else:
                    self._starting[action.image] += 1
                    _spawn(self._begin(action.image), self._starts)
            try:
                async with asyncio.timeout(None if todo.wake is None else todo.wake - now):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if self._was_given:
                self._was_given = False
                await asyncio.sleep(REST)

    async def _begin(self, image: str) -> None:
        try:
            warm = await self._start(image)
        except Exception as exc:
            # Whatever it was, an image that does not start must not end the pool of the others.
            now, error = self._clock(), f"{type(exc).__name__}: {exc}"[:500]
            breaker = self._breakers.get(image, CLOSED)
            self._breakers[image] = breaker.failed(error, now=now, luck=random.random())
        else:
            self._breakers.pop(image, None)
            watch = asyncio.create_task(self._watch(warm))
            born = self._clock()
            self._waiting[next(self._numbers)] = _Waiting(image, born, warm, watch)
        finally:
            self._starting[image] -= 1
            self._starting += Counter()  # without those at 0
            self._changed.set()

    async def _watch(self, warm: W) -> None:
        await warm.link.over.wait()
        self._changed.set()

    def _note_death(self, box: PooledBox, now: float) -> None:
        breaker, error = self._breakers.get(box.image, CLOSED), "a box died while it waited"
        self._breakers[box.image] = breaker.died(
            error, age=now - box.born, now=now, luck=random.random()
        )

    def _drop(self, number: int) -> None:
        _spawn(self._forget(number).close(), self._ends)

    def _forget(self, number: int) -> W:
        waiting = self._waiting.pop(number)
        waiting.watch.cancel()
        return waiting.warm

    # --- telling ------------------------------------------------------------------------

    def _ready(self) -> list[PooledBox]:
        return [
            PooledBox(number, waiting.image, waiting.born, waiting.warm.alive)
            for number, waiting in self._waiting.items()
        ]

    def _state(self, image: str) -> PoolState:
        now, breaker = self._clock(), self._breakers.get(image, CLOSED)
        ready = [box for box in self._ready() if box.image == image]
        return PoolState(
            image=image,
            target=self._targets.get(image, 0),
            ready=sum(is_given(box, now=now, max_age=self._max_age) for box in ready),
            starting=self._starting[image],
            failures=breaker.failures,
            retry_at=time.time() + breaker.retry - now if breaker.retry > now else None,
            error=breaker.error,
        )


def _spawn(work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)


def _checked(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= LARGEST:
        raise InvalidRequest(f"a pool has 0 to {LARGEST} boxes of an image, not {size!r}")
    return size
