"""Unused boxes that are kept ready, so that a session need not wait for a start.

The newest box is given out first: its memory is the warmest, and boxes that are not needed grow old
and are dropped. A box that was given out never comes back. If none is ready, the caller starts a
box of its own instead of waiting.

`plan` decides what to do next and touches nothing; `Pool` does it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hutch.engine.link import Link
from hutch.errors import InvalidRequest
from hutch.serving import PoolState

# A box is fresh, then due (its replacement is started; until that is ready, the box is still given
# out), then too old (it is dropped). There is never more than one box of an image above its target,
# and nothing is started while the image's breaker is open.

DUE = 0.9  # of the greatest age: from here on a box is replaced
FIRST_PAUSE = 1.0  # seconds, after a failure; doubled with each that follows
LONGEST_PAUSE = 60.0
STEADY = 5.0  # seconds: a box that dies younger than this counts as one that did not start


@dataclass(frozen=True)
class PooledBox:
    """An unused box that waits to be given out."""

    number: int
    image: str
    born: float
    alive: bool = True


@dataclass(frozen=True)
class Breaker:
    """How the starts of one image went. Open after a failure, until the moment `retry`."""

    failures: int = 0  # in a row
    retry: float = 0.0
    error: str | None = None

    def failed(self, error: str, *, now: float, luck: float) -> Breaker:
        """After one more failure. `luck` (0 to 1) keeps images that failed together apart."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures, 10))
        return Breaker(self.failures + 1, now + pause * (0.75 + luck / 2), error)

    def died(self, error: str, *, age: float, now: float, luck: float) -> Breaker:
        """After a box died in the pool. All of them at once are one failure, not many."""
        if age >= STEADY or now < self.retry:
            return self
        return Breaker().failed(error, now=now, luck=luck)


CLOSED = Breaker()


@dataclass(frozen=True)
class StartBox:
    image: str


@dataclass(frozen=True)
class DropBox:
    number: int


@dataclass(frozen=True)
class PoolPlan:
    actions: tuple[StartBox | DropBox, ...]
    wake: float | None  # when to plan again, if nothing happens before


def is_given(box: PooledBox, *, now: float, max_age: float) -> bool:
    """Whether this box may be given out."""
    return box.alive and now < box.born + max_age


def _due_at(box: PooledBox, max_age: float) -> float:
    return box.born + max_age * DUE


def plan(
    targets: Mapping[str, int],
    ready: Iterable[PooledBox],
    starting: Mapping[str, int],
    breakers: Mapping[str, Breaker],
    *,
    now: float,
    max_age: float,
    at_once: int,
) -> PoolPlan:
    """What to start and what to drop now. Touches nothing.

    `at_once`: how many may be starting together, so that callers' own boxes start, too.
    """
    actions: list[StartBox | DropBox] = []
    kept: dict[str, list[PooledBox]] = {image: [] for image in targets}
    for box in sorted(ready, key=lambda box: (box.born, box.number), reverse=True):
        boxes = kept.get(box.image, [])
        wanted = is_given(box, now=now, max_age=max_age) and len(boxes) < targets.get(box.image, 0)
        if wanted:
            boxes.append(box)
        else:
            actions.append(DropBox(box.number))  # dead, too old, or the oldest of too many

    begun = Counter(starting)
    while begun.total() < at_once:
        open_to = [
            i for i in targets if _may_start(i, targets, kept, begun, breakers, now, max_age)
        ]
        if not open_to:
            break
        image = min(open_to, key=lambda image: (len(kept[image]) + begun[image]) / targets[image])
        begun[image] += 1
        actions.append(StartBox(image))

    moments = [breaker.retry for image, breaker in breakers.items() if image in targets]
    for box in (box for boxes in kept.values() for box in boxes):
        moments += [_due_at(box, max_age), box.born + max_age]
    return PoolPlan(tuple(actions), min((m for m in moments if m > now), default=None))


def _may_start(
    image: str,
    targets: Mapping[str, int],
    kept: Mapping[str, list[PooledBox]],
    begun: Counter[str],
    breakers: Mapping[str, Breaker],
    now: float,
    max_age: float,
) -> bool:
    breaker = breakers.get(image, CLOSED)
    if now < breaker.retry or (breaker.failures and begun[image]):
        return False  # open; or half open, and the one try is under way
    fresh = sum(now < _due_at(box, max_age) for box in kept[image])
    spare = fresh < len(kept[image])  # one to replace: its successor comes before it goes
    return (
        fresh + begun[image] < targets[image]
        and len(kept[image]) + begun[image] < targets[image] + spare
    )


AT_ONCE = 2  # starts of the pool's own: the machine's other core is for callers
LARGEST = 1000  # boxes of one image
# Seconds before a box that was given out is replaced: a start takes a whole core, and the caller is
# about to use the box.
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
        """Start to keep the pool at its target sizes."""
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.create_task(self._keep())

    def has(self, image: str) -> bool:
        """Whether boxes of this image are kept."""
        return image in self._targets and not self._closed

    def take(
        self, image: str, fits: Callable[[W], bool] = lambda warm: True
    ) -> tuple[W | None, str | None]:
        """A box, which now belongs to the caller; or None, and why (for `acquire_detail`).

        Does not await, so it cannot be cancelled: no box is given out twice, and none gets lost.
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
        """Set how many boxes of an image to keep, and reset its breaker. Raises InvalidRequest."""
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
        """Kill every box that was not given out, including those that are being started."""
        self._closed = True
        under_way = [*self._starts, *([self._keeper] if self._keeper else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._starting.clear()  # a task that was cancelled before it ran does not decrement it
        for number in list(self._waiting):
            self._drop(number)
        await asyncio.gather(*self._ends, return_exceptions=True)

    # --- carrying out the plan ----------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            now = self._clock()
            # Before planning, because a death may open a breaker.
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
            # Any error: an image that does not start must not end the pool of the others.
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
            self._starting += Counter()  # removes entries that are 0
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

    # --- reporting ----------------------------------------------------------------------

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


def _spawn(work: Coroutine[object, object, None], among: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)


def _checked(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= LARGEST:
        raise InvalidRequest(f"a pool can have 0 to {LARGEST} boxes of an image, not {size!r}")
    return size
