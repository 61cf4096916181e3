"""What a pool should do next: a pure function, and what it is about.

A box is fresh, then due (its replacement is started; until that one is there it is still given
out), then too old (it is given to nobody, and goes). The same for all: there is never more than
one box of an image above its target, and nothing is started while its breaker is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DUE = 0.9  # of the greatest age: from here on a box is replaced
FIRST_PAUSE = 1.0  # seconds, after a failure; doubled with each that follows
LONGEST_PAUSE = 60.0
STEADY = 5.0  # seconds: a box that dies younger than this counts as one that did not start


@dataclass(frozen=True)
class PooledBox:
    """A pristine box that waits for somebody."""

    number: int
    image: str
    born: float
    alive: bool = True


@dataclass(frozen=True)
class Breaker:
    """How the starts of one image went. Open after a failure, until `retry` has come."""

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
    """Whether somebody may have this box."""
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
