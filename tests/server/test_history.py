"""What happened lately: right, bounded, cheap, and of each owner their own only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from services import ADMIN, ALICE, BOB, in_loop, opened, run, service

from hutch import operations as op
from hutch import serving
from hutch.errors import InvalidRequest, NotPermitted, QuotaReached
from hutch.server.history import DAY, HOUR, MAX_FAILURES, MAX_OWNERS, BoxUsage, History
from hutch.server.rules import Rules
from hutch.serving import Quota
from hutch.types import State


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[History, Clock]:
    clock = Clock()
    return History(clock, clock), clock


def states(**owners: dict[State, int]) -> dict[str, Counter[State]]:
    return {owner: Counter(counts) for owner, counts in owners.items()}


def test_a_sample_says_what_happened_since_the_one_before() -> None:
    history, clock = made()
    assert not history.is_due
    for seconds in (0.010, 0.020, 0.030):
        history.opened("alice", seconds)
    history.ran("alice", 2.0, is_cell=False)
    history.ran("alice", 4.0, is_cell=True)
    history.erred("alice")
    clock.now += 10
    assert history.is_due
    history.sample(states(alice={"running": 2, "asleep": 1}))
    (sample,) = history.samples("hour", "alice")
    assert (sample.taken_at, sample.seconds) == (clock.now, 10)
    assert (sample.opened, sample.commands, sample.cells, sample.errors) == (3, 1, 1, 1)
    assert sample.states == {"running": 2, "asleep": 1}
    assert sample.open_p50 == pytest.approx(0.020, rel=0.05)
    assert sample.open_p95 == pytest.approx(0.030, rel=0.05)
    assert sample.run_p95 == pytest.approx(4, rel=0.05)
    assert (sample.memory, sample.cpus) == (None, None)
    assert history.samples("hour") == [sample]
    clock.now += 10
    history.sample({})
    assert [one.opened for one in history.samples("hour", "alice")] == [3, 0]
    assert history.samples("hour", "alice")[1].open_p50 is None


def test_five_minutes_become_one_sample_of_the_day() -> None:
    history, clock = made()
    for number in range(60):
        history.ran("alice", 0.001 * (number + 1), is_cell=False)
        clock.now += 10
        history.sample(states(alice={"running": 1}), {"alice": BoxUsage(100, number % 2)})
    day = history.samples("day", "alice")
    assert [sample.commands for sample in day] == [30, 30]
    assert [sample.seconds for sample in day] == [300, 300]
    assert day[1].run_p50 == pytest.approx(0.045, rel=0.06)
    assert (day[1].memory, day[1].cpus) == (100, 0.5)
    assert history.samples("day") == day


def test_nothing_of_another_owner_is_in_an_owners_samples() -> None:
    history, clock = made()
    history.opened("bob", 1)
    history.failed("bob", "open", "bob's secret", image="bobs-image")
    clock.now += 10
    usage = {"bob": BoxUsage(5, 5.0), "alice": BoxUsage(1, 0.5)}
    history.sample(states(bob={"running": 7}, alice={"asleep": 1}), usage)
    (mine,) = history.samples("hour", "alice")
    assert (mine.opened, mine.states, mine.memory, mine.cpus) == (0, {"asleep": 1}, 1, 0.5)
    assert history.failures("alice") == []
    (everything,) = history.samples("hour")
    assert (everything.states, everything.memory) == ({"running": 7, "asleep": 1}, 6)
    (nothing,) = history.samples("hour", "carol")
    assert (nothing.opened, nothing.states) == (0, {})


def test_it_is_of_bounded_size() -> None:
    history, clock = made()
    for number in range(1000):
        owner = f"owner-{number}"
        history.opened(owner, 10.0 ** (number % 40 - 20))
        history.failed(owner, "open", "x" * 10_000, image="y" * 10_000, workspace_id="z" * 10_000)
        clock.now += 300
        history.sample(states(**{owner: {"running": 1}}))
    assert len(history.samples("hour")) == HOUR
    assert len(history.samples("day")) == DAY
    assert len(history.failures()) == MAX_FAILURES
    failure = history.failures()[0]
    assert (len(failure.why), len(failure.image)) == (1000, 256)
    assert len(failure.workspace_id or "") == 256
    assert len(history._owners) == MAX_OWNERS
    assert history.samples("hour", "owner-0")[0].opened == 0  # forgotten
    assert history.samples("hour", "owner-999")[-1].opened == 1


def test_an_owner_who_is_active_is_not_forgotten_for_others() -> None:
    history, clock = made()
    for number in range(MAX_OWNERS * 3):
        history.opened("alice", 1)
        history.opened(f"owner-{number}", 1)
    clock.now += 10
    history.sample({})
    assert history.samples("hour", "alice")[0].opened == MAX_OWNERS * 3


def test_more_owners_with_sessions_than_are_kept_harm_nobody() -> None:
    history, clock = made()
    many = {f"owner-{number}": Counter[State](running=1) for number in range(MAX_OWNERS * 2)}
    clock.now += 10
    history.sample(many)
    assert history.samples("hour")[0].states == {"running": MAX_OWNERS * 2}
    assert len(history._owners) == MAX_OWNERS


def test_boxes_are_measured_only_while_someone_looks() -> None:
    history, clock = made()
    assert not history.is_looked_at
    history.samples("hour")
    assert history.is_looked_at
    clock.now += 61
    assert not history.is_looked_at


# --- of a server ---------------------------------------------------------------------------


@in_loop
async def test_what_owners_do_is_counted_as_theirs(tmp_path: Path) -> None:
    async with service(tmp_path, Rules(quota=Quota(sessions=1))) as server:
        box = await opened(server, ALICE)
        await run(server, box.id, "true", ALICE)
        await server.perform(op.RunProgram(box.id, ("true",)), ALICE)
        await server.perform(op.RunCode(box.id, "1"), ALICE)
        with pytest.raises(QuotaReached):
            await opened(server, ALICE, image="host")
        await server.watching.sample()
        mine = (await server.perform(serving.GetHistory(), ALICE))[-1]
        assert (mine.opened, mine.commands, mine.cells, mine.errors) == (1, 2, 1, 1)
        assert mine.states == {"running": 1}
        assert mine.open_p50 and mine.run_p50
        (failure,) = await server.perform(serving.ListFailures(), ALICE)
        assert (failure.kind, failure.code, failure.session) == ("open", "quota_reached", "")
        assert "session" in failure.why
        theirs = (await server.perform(serving.GetHistory(), BOB))[-1]
        assert (theirs.opened, theirs.commands, theirs.errors, theirs.states) == (0, 0, 0, {})
        assert await server.perform(serving.ListFailures(), BOB) == []
        assert len(await server.perform(serving.ListFailures(), ADMIN)) == 1
        assert len(await server.perform(serving.ListFailures("alice"), ADMIN)) == 1
        assert len(await server.perform(serving.ListFailures("alice"), ALICE)) == 1
        for asked in (serving.GetHistory(owner="alice"), serving.ListFailures("alice")):
            with pytest.raises(NotPermitted):
                await server.perform(asked, BOB)


@in_loop
async def test_memory_is_in_the_samples_once_someone_has_looked(tmp_path: Path) -> None:
    async with service(tmp_path) as server:
        box = await opened(server, ALICE)
        await run(server, box.id, "true", ALICE)
        known = (await server.perform(op.GetStats(box.id), ALICE)).memory
        await server.perform(serving.GetHistory(), ALICE)
        await server.watching.sample()
        mine = (await server.perform(serving.GetHistory(), ALICE))[-1]
        assert (mine.memory or 0) > 0 if known else mine.memory == 0
        theirs = (await server.perform(serving.GetHistory(), BOB))[-1]
        assert theirs.memory in (0, None)


@in_loop
async def test_figures_of_many_sessions_come_in_one_answer(tmp_path: Path) -> None:
    async with service(tmp_path) as server:
        first, second, sleeping, gone = [await opened(server, ALICE) for _ in range(4)]
        foreign = await opened(server, BOB)
        await server.perform(op.Hibernate(sleeping.id), ALICE)
        await server.perform(op.CloseSession(gone.id), ALICE)
        ids = [first.id, second.id, sleeping.id, gone.id, foreign.id, "00000000-000", first.id]
        answer = await server.perform(serving.ListStats(",".join(ids)), ALICE)
        assert [one.session for one in answer] == [first.id, second.id]
        assert answer[0].stats.pids != 0
        assert server._sessions.lives[sleeping.id].status == "asleep"
        everything = await server.perform(serving.ListStats(",".join(ids)), ADMIN)
        assert [one.session for one in everything] == [first.id, second.id, foreign.id]
        for odd in ("", ",", "\x00", "../..", "é" * 1000):
            assert await server.perform(serving.ListStats(odd), ALICE) == []
        with pytest.raises(InvalidRequest, match="200"):
            await server.perform(serving.ListStats(",".join(map(str, range(201)))), ALICE)
