"""A pool: what it decides, and that it does it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from must_work import need

from hutch import BackendUnavailable, InvalidRequest, StartFailed
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine.link import Link
from hutch.server.pool import (
    AT_ONCE,
    LONGEST_PAUSE,
    Breaker,
    DropBox,
    Pool,
    PooledBox,
    PoolPlan,
    StartBox,
    plan,
)

# --- what it decides ----------------------------------------------------------------------


def planned(
    targets: dict[str, int],
    ready: list[PooledBox] | None = None,
    starting: dict[str, int] | None = None,
    breakers: dict[str, Breaker] | None = None,
    now: float = 0.0,
) -> PoolPlan:
    return plan(
        targets, ready or [], starting or {}, breakers or {}, now=now, max_age=100, at_once=2
    )


def test_what_is_missing_is_started_but_not_all_at_once() -> None:
    assert planned({"a": 5}) == PoolPlan((StartBox("a"), StartBox("a")), None)
    assert planned({"a": 5}, starting={"a": 1}).actions == (StartBox("a"),)
    assert planned({"a": 5}, starting={"a": 2}).actions == ()


def test_a_box_that_is_still_starting_counts() -> None:
    assert planned({"a": 1}, starting={"a": 1}).actions == ()


def test_the_emptiest_image_is_filled_first() -> None:
    ready = [PooledBox(n, "a", 0) for n in range(3)]
    assert planned({"a": 9, "b": 2}, ready).actions == (StartBox("b"), StartBox("a"))


def test_a_dead_box_is_dropped_and_replaced() -> None:
    ready = [PooledBox(1, "a", 0), PooledBox(2, "a", 0, alive=False)]
    assert planned({"a": 2}, ready).actions == (DropBox(2), StartBox("a"))


def test_of_too_many_the_oldest_go() -> None:
    ready = [PooledBox(1, "a", 5), PooledBox(2, "a", 3), PooledBox(3, "a", 4)]
    assert planned({"a": 1}, ready, now=6).actions == (DropBox(3), DropBox(2))
    assert set(planned({}, ready, now=6).actions) == {DropBox(1), DropBox(2), DropBox(3)}


def test_a_box_that_grows_old_goes_when_its_successor_is_there() -> None:
    old = PooledBox(1, "a", 0)
    assert planned({"a": 1}, [old], now=89) == PoolPlan((), 90)
    assert planned({"a": 1}, [old], now=90) == PoolPlan((StartBox("a"),), 100)
    assert planned({"a": 1}, [old], {"a": 1}, now=91) == PoolPlan((), 100)
    assert planned({"a": 1}, [old, PooledBox(2, "a", 92)], now=92).actions == (DropBox(1),)


def test_a_box_that_is_too_old_goes_even_if_there_is_no_other() -> None:
    assert planned({"a": 1}, [PooledBox(1, "a", 0)], now=100).actions == (DropBox(1), StartBox("a"))


def test_old_boxes_are_replaced_one_by_one() -> None:
    ready = [PooledBox(n, "a", 0) for n in range(4)]
    assert planned({"a": 4}, ready, now=95).actions == (StartBox("a"),)


def test_nothing_is_started_while_a_breaker_is_open_and_one_when_it_may_be_tried() -> None:
    broken = {"a": Breaker(failures=3, retry=10.0)}
    assert planned({"a": 4}, breakers=broken, now=9.9) == PoolPlan((), 10.0)
    assert planned({"a": 4}, breakers=broken, now=10).actions == (StartBox("a"),)
    assert planned({"a": 4}, starting={"a": 1}, breakers=broken, now=10).actions == ()
    assert planned({"a": 4, "b": 1}, breakers=broken, now=9).actions == (StartBox("b"),)


def test_pauses_grow_to_a_minute_and_no_further() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(12):
        breaker = breaker.failed("no", now=now, luck=0.5)
        pauses.append(breaker.retry - now)
        now = breaker.retry
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE and breaker.failures == 12


def test_ten_boxes_that_die_at_once_are_one_failure() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker = breaker.died("gone", age=1, now=7.0, luck=0.5)
    assert (breaker.failures, breaker.retry) == (1, 8.0)
    assert Breaker().died("gone", age=600, now=7.0, luck=0.5) == Breaker(), "it had lived"


IMAGES = ("a", "b", "c")
COUNTS = st.dictionaries(st.sampled_from(IMAGES), st.integers(0, 5))
TARGETS = st.dictionaries(st.sampled_from(IMAGES), st.integers(1, 5))
READY = st.lists(
    st.builds(PooledBox, st.just(0), st.sampled_from(IMAGES), st.floats(0, 200), st.booleans()),
    max_size=12,
).map(lambda found: [PooledBox(n, b.image, b.born, b.alive) for n, b in enumerate(found)])
BREAKERS = st.dictionaries(
    st.sampled_from(IMAGES), st.builds(Breaker, st.integers(0, 5), st.floats(0, 300))
)


@given(TARGETS, READY, COUNTS, BREAKERS, st.floats(0, 300))
def test_no_plan_exceeds_its_target_by_more_than_one_or_starts_against_a_breaker(
    targets: dict[str, int],
    ready: list[PooledBox],
    starting: dict[str, int],
    breakers: dict[str, Breaker],
    now: float,
) -> None:
    made = planned(targets, ready, starting, breakers, now)
    dropped = {action.number for action in made.actions if isinstance(action, DropBox)}
    started = [action.image for action in made.actions if isinstance(action, StartBox)]
    assert len(started) + sum(starting.values()) <= max(2, sum(starting.values()))
    for image in started:
        kept = [box for box in ready if box.image == image and box.number not in dropped]
        all_of_it = len(kept) + starting.get(image, 0) + started.count(image)
        assert all_of_it <= targets[image] + 1
        assert now >= breakers.get(image, Breaker()).retry
    for box in ready:
        if box.number not in dropped:
            assert box.alive and now - box.born < 100
    assert made.wake is None or made.wake > now


@settings(max_examples=50)
@given(TARGETS, READY, st.lists(st.booleans(), max_size=30))
def test_done_again_and_again_a_plan_comes_to_rest_with_every_image_at_its_target(
    targets: dict[str, int], ready: list[PooledBox], fails: list[bool]
) -> None:
    now, numbers, breakers = 200.0, iter(range(1000, 9999)), dict[str, Breaker]()
    for _ in range(200):
        made = planned(targets, ready, {}, breakers, now)
        if not made.actions and all(b.retry <= now for b in breakers.values()):
            break
        gone = {action.number for action in made.actions if isinstance(action, DropBox)}
        ready = [box for box in ready if box.number not in gone]
        for image in [action.image for action in made.actions if isinstance(action, StartBox)]:
            if fails and fails.pop():
                breakers[image] = breakers.get(image, Breaker()).failed("no", now=now, luck=0)
            else:
                breakers.pop(image, None)
                ready.append(PooledBox(next(numbers), image, now))
        if not made.actions and made.wake is not None:
            now = made.wake
    counts = {image: sum(box.image == image for box in ready) for image in IMAGES}
    assert counts == {image: targets.get(image, 0) for image in IMAGES}


# --- that it does it ----------------------------------------------------------------------


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


@dataclass
class Ended:
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Thing:
    """As much of a box as a pool looks at."""

    image: str
    link: Any = field(default_factory=Ended)
    closed: int = 0

    @property
    def alive(self) -> bool:
        return not self.link.over.is_set()

    def die(self) -> None:
        self.link.over.set()

    async def close(self) -> None:
        self.die()
        await asyncio.sleep(0)
        self.closed += 1


class Maker:
    """Makes things, fails when told to, and remembers all of them."""

    def __init__(self) -> None:
        self.things: list[Thing] = []
        self.tries = 0
        self.at_once = self.most_at_once = 0
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, image: str) -> Thing:
        self.tries += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self.fails:
                raise StartFailed("no room")
            self.things.append(Thing(image))
            return self.things[-1]
        finally:
            self.at_once -= 1


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.001)


def counts(pool: Pool[Any], image: str = "a") -> tuple[int, int]:
    state = next((state for state in pool.states() if state.image == image), None)
    return (state.ready, state.starting) if state else (0, 0)


@asynccontextmanager
async def opened(
    start: Callable[[str], Awaitable[Any]], sizes: dict[str, int], **more: Any
) -> AsyncIterator[Pool[Any]]:
    pool = Pool(start, sizes, **{"max_age": 3600, **more})
    pool.fill()
    try:
        yield pool
    finally:
        async with asyncio.timeout(120):
            await pool.close()


@in_a_loop
async def test_it_fills_gives_the_newest_and_refills() -> None:
    maker = Maker()
    async with opened(maker, {"a": 3}) as pool:
        await until(lambda: counts(pool) == (3, 0))
        assert maker.most_at_once <= AT_ONCE
        newest = maker.things[-1]
        assert pool.take("a") == (newest, None)
        await until(lambda: counts(pool) == (3, 0))
        assert len(maker.things) == 4
    assert [thing.closed for thing in maker.things] == [1, 1, 0, 1], "what was taken is not ours"


@in_a_loop
async def test_one_that_is_drained_says_so_at_once_and_nobody_waits() -> None:
    maker = Maker()
    async with opened(maker, {"a": 1}) as pool:
        assert pool.take("a") == (None, "pool_empty")
        assert pool.take("b") == (None, None), "there is no pool of this image"
        await until(lambda: counts(pool) == (1, 0))
        maker.gate.clear()
        taken = [pool.take("a") for _ in range(5)]
        assert taken == [(maker.things[0], None)] + [(None, "pool_empty")] * 4


@in_a_loop
async def test_a_box_that_does_not_fit_is_left_for_somebody_else() -> None:
    maker = Maker()
    async with opened(maker, {"a": 2}) as pool:
        await until(lambda: counts(pool) == (2, 0))
        assert pool.take("a", lambda warm: False) == (None, "pool_spec_mismatch")
        assert counts(pool) == (2, 0)
        oldest = maker.things[0]
        assert pool.take("a", lambda warm: warm is oldest) == (oldest, None)


@in_a_loop
async def test_many_takers_at_once_never_get_the_same_box() -> None:
    maker = Maker()
    taken: list[Thing] = []

    async def taker(pool: Pool[Thing]) -> None:
        for _ in range(10):
            warm, _ = pool.take("a")
            if warm:
                taken.append(warm)
            await asyncio.sleep(0)

    async with opened(maker, {"a": 5}) as pool:
        await until(lambda: counts(pool) == (5, 0))
        takers = [asyncio.create_task(taker(pool)) for _ in range(20)]
        await asyncio.sleep(0)
        for task in takers[::2]:
            task.cancel()
        await asyncio.gather(*takers, return_exceptions=True)
        assert len(set(map(id, taken))) == len(taken) >= 5
    given_out = set(map(id, taken))
    assert all(thing.closed == (id(thing) not in given_out) for thing in maker.things)


@in_a_loop
async def test_a_box_that_dies_in_the_pool_is_noticed_and_given_to_nobody() -> None:
    maker = Maker()
    now = [0.0]
    async with opened(maker, {"a": 2}, clock=lambda: now[0]) as pool:
        await until(lambda: counts(pool) == (2, 0))
        now[0] = 60.0
        maker.things[1].die()
        assert counts(pool) == (1, 0)
        assert pool.take("a") == (maker.things[0], None)
        await until(lambda: counts(pool) == (2, 0))
        assert maker.things[1].closed == 1
        assert pool.states()[0].failures == 0


@in_a_loop
async def test_boxes_that_die_as_soon_as_they_are_up_make_no_busy_loop() -> None:
    maker = Maker()
    clock = [0.0]

    async def start(image: str) -> Thing:
        thing = await maker(image)
        asyncio.get_running_loop().call_soon(thing.die)
        return thing

    async with opened(start, {"a": 1}, clock=lambda: clock[0]) as pool:
        await until(lambda: pool.states()[0].failures == 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert maker.tries <= 2
        assert pool.states()[0].error == "a box died while it waited"


@in_a_loop
async def test_starts_that_fail_are_tried_later_and_told_and_hurt_no_other_image() -> None:
    broken, maker = Maker(), Maker()
    broken.fails = True
    now = [0.0]

    async def start(image: str) -> Thing:
        return await (broken if image == "bad" else maker)(image)

    async with opened(start, {"bad": 3, "a": 2}, clock=lambda: now[0]) as pool:
        await until(lambda: counts(pool) == (2, 0) and broken.tries >= 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert broken.tries <= AT_ONCE
        assert pool.take("bad") == (None, "pool_empty")
        state = next(state for state in pool.states() if state.image == "bad")
        assert state.failures and state.retry_at and state.error == "StartFailed: no room"

        broken.fails = False
        now[0] = 100.0
        pool._changed.set()  # the clock is ours, so nothing else wakes it
        await until(lambda: counts(pool, "bad") == (3, 0))
        state = next(state for state in pool.states() if state.image == "bad")
        assert (state.failures, state.retry_at, state.error) == (0, None, None)


@in_a_loop
async def test_a_box_past_its_age_is_replaced_and_never_given_out() -> None:
    maker = Maker()
    now = [0.0]
    async with opened(maker, {"a": 1}, max_age=100, clock=lambda: now[0]) as pool:
        await until(lambda: counts(pool) == (1, 0))
        maker.gate.clear()
        now[0] = 95.0
        pool._changed.set()
        await until(lambda: counts(pool) == (1, 1))
        maker.gate.set()
        await until(lambda: maker.things[0].closed == 1)
        assert pool.take("a") == (maker.things[1], None)
        await until(lambda: counts(pool) == (1, 0))
        now[0] = 300.0
        assert counts(pool) == (0, 0) and pool.take("a") == (None, "pool_empty")


@in_a_loop
async def test_age_passes_by_itself() -> None:
    maker = Maker()
    async with opened(maker, {"a": 1}, max_age=0.2):
        await until(lambda: len(maker.things) >= 3)
        assert maker.things[0].closed == 1


@in_a_loop
async def test_a_pool_can_be_made_larger_and_smaller_and_be_ended() -> None:
    maker = Maker()
    async with opened(maker, {}) as pool:
        assert pool.states() == []
        assert pool.size("a", 3).target == 3
        await until(lambda: counts(pool) == (3, 0))
        pool.size("a", 1)
        await until(lambda: counts(pool) == (1, 0))
        assert [thing.closed for thing in maker.things] == [1, 1, 0]
        assert pool.size("a", 0).target == 0
        assert pool.take("a") == (None, None)
        await until(lambda: pool.states() == [])
        for wrong in (-1, 1001, True, 1.5):
            with pytest.raises(InvalidRequest, match="0 to 1000"):
                pool.size("a", wrong)  # type: ignore[arg-type]


@in_a_loop
async def test_a_start_that_ends_after_its_pool_was_made_smaller_is_dropped() -> None:
    maker = Maker()
    maker.gate.clear()
    async with opened(maker, {"a": 1}) as pool:
        await until(lambda: counts(pool) == (0, 1))
        pool.size("a", 0)
        maker.gate.set()
        await until(lambda: bool(maker.things) and maker.things[0].closed == 1)


@in_a_loop
async def test_closing_ends_those_that_wait_and_those_that_are_being_started() -> None:
    maker = Maker()
    async with opened(maker, {"a": 2, "b": 2}) as pool:
        await until(lambda: counts(pool) == (2, 0) and counts(pool, "b") == (2, 0))
        maker.gate.clear()
        pool.take("a")
        await until(lambda: counts(pool) == (1, 1))
        assert repr(pool) == "<Pool open, 3 ready, 1 starting>"
        await pool.close()
        assert maker.at_once == 0
        assert pool.take("a") == (None, None)
        pool.fill()
        assert repr(pool) == "<Pool closed, 0 ready, 0 starting>"
    assert sum(thing.closed for thing in maker.things) == 3


@in_a_loop
async def test_a_start_that_does_not_heed_its_cancellation_is_killed_when_it_is_up() -> None:
    maker = Maker()
    begun, go = asyncio.Event(), asyncio.Event()

    async def start(image: str) -> Thing:
        begun.set()
        try:
            await go.wait()
        except asyncio.CancelledError:
            pass
        return await maker(image)

    async with opened(start, {"a": 1}) as pool:
        await begun.wait()
        await pool.close()
    assert [thing.closed for thing in maker.things] == [1]


# --- with boxes ---------------------------------------------------------------------------


@dataclass(eq=False)
class WarmBox:
    box: Box
    link: Link

    @property
    def alive(self) -> bool:
        return self.link.failure is None

    async def close(self) -> None:
        await self.link.close()
        await self.box.kill()


@in_a_loop
async def test_real_boxes_are_taken_die_and_go() -> None:
    backend = NamespacesBackend()

    async def start(image: str) -> WarmBox:
        box = await backend.start(Spec(image))
        try:
            return WarmBox(box, await Link.open(await box.connect()))
        except BaseException:
            await box.kill()
            raise

    try:
        try:
            await (await start("host")).close()
        except BackendUnavailable as exc:
            need("namespaces", str(exc))
        async with opened(start, {"host": 3}) as pool:
            await until(lambda: counts(pool, "host") == (3, 0))
            assert len(await backend.list()) == 3
            taken, _ = pool.take("host")
            assert taken is not None
            await next(iter(pool._waiting.values())).warm.box.kill()
            await until(lambda: counts(pool, "host") == (3, 0))
            assert taken.alive
        assert await backend.list() == [taken.box.id]
        await taken.close()
        assert await backend.list() == []
    finally:
        await backend.close()
