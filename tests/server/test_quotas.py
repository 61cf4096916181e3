"""How much one owner may have, and how often they may ask."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.errors import InvalidRequest, QuotaReached
from hutch.server import quotas as module
from hutch.server.quotas import (
    MAX_IN_BUDGET,
    Bucket,
    Budget,
    Quotas,
    RateLimited,
    burst_of,
    in_units,
)
from hutch.server.store import Store
from hutch.serving import Quota, Usage
from hutch.types import GiB, Limits, MiB


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(folder: Path, default: Quota, test: Callable[[Quotas, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        store, clock = await Store.open(folder / "hutch.db"), Clock()
        try:
            await test(await Quotas.open(store, default, clock), clock)
        finally:
            await store.close()

    asyncio.run(main())


def usage(sessions: int = 0, memory: int = 0, cpus: float = 0.0) -> Usage:
    return Usage("ada", Quota(), sessions, memory, cpus)


def test_what_is_allowed_is_allowed_to_the_last_byte_and_not_beyond(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        small = Limits(memory=GiB, cpus=0.1)
        quotas.check_open("ada", usage(1, 3 * GiB, 0.2), small)
        with pytest.raises(QuotaReached, match="sessions: 2 used and 1 asked for, of 2 "):
            quotas.check_open("ada", usage(2), small)
        with pytest.raises(QuotaReached, match=r"memory: 3\.5 GiB used and 1 GiB asked .* 4 GiB"):
            quotas.check_open("ada", usage(0, 3 * GiB + 512 * MiB), small)
        with pytest.raises(QuotaReached, match=r"cpus: 0\.25 used and 0\.1 asked for, of 0\.3 "):
            quotas.check_open("ada", usage(0, 0, 0.25), small)

    run(tmp_path, Quota(sessions=2, memory=4 * GiB, cpus=0.3), test)


def test_without_a_quota_there_is_none(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        assert quotas.disk_of("ada") is None
        quotas.check_open("ada", usage(10**6, 1 << 60, 1e6), Limits())
        for _ in range(1000):
            quotas.check_rate("ada")

    run(tmp_path, Quota(), test)


def test_a_quota_of_ones_own_is_kept_and_takes_the_place_of_the_default(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        await quotas.set("bob", Quota(sessions=0))
        with pytest.raises(QuotaReached):
            quotas.check_open("bob", usage(), Limits())
        assert quotas.of("ada") == Quota(sessions=5)

    async def again(quotas: Quotas, clock: Clock) -> None:
        assert quotas.of("bob") == Quota(sessions=0)

    run(tmp_path, Quota(sessions=5), test)
    run(tmp_path, Quota(sessions=5), again)


def test_what_another_server_has_set_counts_here_too(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        quotas.learn("bob", Quota(sessions=0))
        with pytest.raises(QuotaReached):
            quotas.check_open("bob", usage(), Limits())

    run(tmp_path, Quota(sessions=5), test)


@pytest.mark.parametrize(
    "wrong",
    [
        Quota(sessions=-1), Quota(memory=True), Quota(cpus=math.nan), Quota(rate=math.inf),
        Quota(rate=0), Quota(rate=1e-9), Quota(disk="1"), Quota(disk=1 << 62),  # type: ignore[arg-type]
    ],
    ids=str,
)  # fmt: skip
def test_a_quota_that_cannot_be_meant_is_refused(tmp_path: Path, wrong: Quota) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        with pytest.raises(InvalidRequest):
            await quotas.set("ada", wrong)
        assert quotas.of("ada") == Quota()

    run(tmp_path, Quota(), test)


def test_who_asks_too_often_is_told_when_to_come_again(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        for _ in range(40):  # two seconds' worth
            quotas.check_rate("ada")
        for _ in range(3):  # being refused costs nothing
            with pytest.raises(RateLimited, match="20 requests per second") as caught:
                quotas.check_rate("ada")
            assert caught.value.retry_after == pytest.approx(0.05)
            assert caught.value.code == "quota_reached" and caught.value.status == 429
        quotas.check_rate("bob")  # others do not notice
        clock.now += caught.value.retry_after + 1e-9
        quotas.check_rate("ada")
        with pytest.raises(RateLimited):
            quotas.check_rate("ada")
        clock.now -= 50  # a clock that went back gives nothing, and takes nothing
        with pytest.raises(RateLimited):
            quotas.check_rate("ada")

    run(tmp_path, Quota(rate=20), test)


def test_a_slow_rate_still_allows_a_few_at_once(tmp_path: Path) -> None:
    async def test(quotas: Quotas, clock: Clock) -> None:
        for _ in range(10):
            quotas.check_rate("ada")
        with pytest.raises(RateLimited):
            quotas.check_rate("ada")

    run(tmp_path, Quota(rate=0.5), test)


def test_only_so_many_owners_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BUCKETS", 100)

    async def test(quotas: Quotas, clock: Clock) -> None:
        for n in range(1000):
            quotas.check_rate(f"owner{n}")
            quotas.check_rate("ada")
        assert len(quotas._buckets) == 100 and "ada" in quotas._buckets

    run(tmp_path, Quota(rate=10_000), test)


@given(
    rate=st.floats(0.01, 10_000),
    steps=st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=200),
)
def test_nobody_gets_more_than_the_burst_and_the_rate(rate: float, steps: list[float]) -> None:
    bucket, now, given_out = Bucket(burst_of(rate), 0.0), 0.0, 0
    for step in steps:
        now += step
        wait = bucket.take(rate, now)
        given_out += not wait
        assert 0 <= wait <= 1 / rate + 1e-9
        assert given_out <= burst_of(rate) + now * rate + 1e-6


def test_sizes_are_said_as_people_say_them() -> None:
    assert [in_units(n) for n in (0, 1023, 1536, 512 * MiB, 3 * GiB)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "512 MiB", "3 GiB",
    ]  # fmt: skip


def test_a_budget_gives_each_stranger_a_few_tries_and_counts_the_rest() -> None:
    budget = Budget(each=(2, 0), together=(100, 0))
    assert [budget.take("one address") for _ in range(4)] == [True, True, False, False]
    assert budget.take("another address")
    assert (budget.take_suppressed(), budget.take_suppressed()) == (2, 0)


def test_strangers_together_get_no_more_than_the_whole_budget() -> None:
    budget = Budget(each=(10, 0), together=(3, 0))
    assert sum(budget.take(f"address {n}") for n in range(10)) == 3
    assert budget.suppressed == 7


def test_a_budget_forgets_the_strangers_that_came_first_not_those_that_are_back() -> None:
    budget = Budget(each=(1, 0), together=(10 * MAX_IN_BUDGET, 0))
    budget.take("comes back")
    budget.take("comes once")
    assert not budget.take("comes back")
    for n in range(MAX_IN_BUDGET - 1):
        budget.take(f"address {n}")
    assert not budget.take("comes back")
    assert budget.take("comes once")  # it is new again: memory is bounded
