"""A burst of starts: few at once, in turns, and without a clock for those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from must_work import need

from hutch import operations as op
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine.engine import Engine
from hutch.engine.starts import Starts
from hutch.errors import BackendUnavailable, ServerBusy, ServerUnavailable, SessionEnded
from hutch.images.held_images import HeldImages
from hutch.server.http.request import headers_of
from hutch.server.keys import OPERATOR, Caller
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.types import BoxInfo

ADMIN = Caller(OPERATOR, "admin")
ALICE, BOB = Caller("alice", "run"), Caller("bob", "run")


class Held(NamespacesBackend):
    """Says who started what, and starts it when it is told to."""

    def __init__(self, lasting: str | None = None) -> None:
        super().__init__(lasting=lasting)
        self.begun: list[Spec] = []
        self.running = self.most = 0
        self.go = asyncio.Event()

    async def start(self, spec: Spec, id: str | None = None) -> Box:
        self.begun.append(spec)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            return await super().start(spec, id)
        except BackendUnavailable as exc:
            need("namespaces", str(exc))
        finally:
            self.running -= 1


class Turns:
    """Those who wanted a turn, and how far each has come."""

    def __init__(self, starts: Starts) -> None:
        self.starts = starts
        self.had: list[str] = []
        self.over: dict[str, asyncio.Event] = {}

    async def take(self, name: str) -> None:
        async with self.starts.turn(name[0]):
            self.had.append(name)
            await self.over.setdefault(name, asyncio.Event()).wait()

    def ask(self, *names: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.take(name)) for name in names]

    async def end(self, name: str) -> None:
        self.over[name].set()
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(main())


# --- the queue ----------------------------------------------------------------------------


def test_owners_take_turns_however_many_one_asks_for() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1))
        tasks = turns.ask("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        await settled()
        for number in range(7):
            assert len(turns.had) == number + 1
            await turns.end(turns.had[-1])
        assert turns.had == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        assert (turns.starts.running, turns.starts.waiting) == (0, 0)
        await asyncio.gather(*tasks)

    run(work)


def test_a_turn_passes_by_thousands_who_were_cancelled_at_once() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1))
        first, *others, last = turns.ask("a1", *(f"a{n}" for n in range(2, 3000)), "az")
        await settled()
        turns.over["a1"].set()
        for task in others:
            task.cancel()
        await settled()
        assert turns.had == ["a1", "az"]
        await turns.end("az")
        await asyncio.gather(first, last)
        assert (turns.starts.running, turns.starts.waiting) == (0, 0)

    run(work)


def test_who_goes_away_leaves_the_queue_and_takes_no_turn_along() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1))
        first, second, third = turns.ask("a1", "a2", "a3")
        await settled()
        second.cancel()
        await settled()
        assert turns.starts.waiting == 1
        third.cancel()  # in the moment in which it gets its turn
        turns.over["a1"].set()
        await settled()
        assert first.done() and third.cancelled()
        assert (turns.starts.running, turns.starts.waiting) == (0, 0)
        turns.ask("a4")[0].cancel()
        last = turns.ask("a5")[0]
        await settled()
        assert turns.had == ["a1", "a5"]
        last.cancel()
        await settled()
        assert turns.starts.running == 0

    run(work)


def test_the_turn_of_one_who_was_cancelled_as_it_came_goes_to_the_next() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1))
        _, second, third = turns.ask("a1", "a2", "a3")
        await settled()
        turns.over["a1"].set()
        while turns.starts.waiting == 2:  # the turn is given, and not yet taken
            await asyncio.sleep(0)
        second.cancel()
        await settled()
        assert turns.had == ["a1", "a3"]
        await turns.end("a3")
        assert third.done() and turns.starts.running == 0

    run(work)


def test_past_the_bound_the_newest_of_whoever_has_the_most_is_refused() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1, most_waiting=3))
        many = turns.ask("a1", "a2", "a3", "a4", "a5")
        await settled()
        with pytest.raises(ServerBusy, match="Nothing was done") as caught:
            await many[4]
        assert caught.value.retry_after >= 1
        other = turns.ask("b1")[0]
        await settled()
        with pytest.raises(ServerBusy):
            await many[3]
        assert turns.starts.waiting == 3
        for name in ("a1", "a2", "b1", "a3"):
            await turns.end(name)
        assert turns.had == ["a1", "a2", "b1", "a3"] and other.done()

    run(work)


def test_when_it_is_closed_those_who_wait_are_told_and_those_who_run_go_on() -> None:
    async def work() -> None:
        turns = Turns(Starts(at_once=1))
        first, second = turns.ask("a1", "a2")
        await settled()
        turns.starts.close()
        with pytest.raises(ServerUnavailable, match="shutting down"):
            await second
        with pytest.raises(ServerUnavailable):
            await turns.take("b1")
        await turns.end("a1")
        assert first.done() and turns.starts.running == 0

    run(work)


# --- boxes --------------------------------------------------------------------------------


def with_service(
    folder: Path, rules: Rules, work: Callable[[Service, Held], Awaitable[None]]
) -> None:
    async def main() -> None:
        (folder / "run").mkdir(0o700)
        backend = Held(str(folder / "run"))
        made = await Service.open(folder, backend, HeldImages(), rules)
        try:
            await work(made, backend)
        finally:
            await made.close(kill=True)

    run(main)


def create(made: Service, caller: Caller = ADMIN, **more: Any) -> asyncio.Task[BoxInfo]:
    return asyncio.ensure_future(made.perform(op.OpenSession(**more), caller))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_of_a_burst_few_are_started_at_once_and_all_come_up(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        creating = [create(made) for _ in range(60)]
        await until(lambda: made._sessions.boxes.starts.waiting == 57)
        # The backend's clock starts when it is asked: it was asked for three.
        assert len(backend.begun) == 3
        assert (
            made.watching.metrics()["starts_waiting"] == 57
            and made.watching.metrics()["starts_running"] == 3
        )
        backend.go.set()
        infos = await asyncio.gather(*creating)
        assert len({info.id for info in infos}) == 60 and backend.most == 3

    with_service(tmp_path, Rules(max_starts=3), work)


def test_past_the_bound_a_create_is_refused_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        creating = [create(made) for _ in range(3)]
        await until(lambda: made._sessions.boxes.starts.waiting == 2)
        with pytest.raises(ServerBusy, match="try again in 1 s"):
            await create(made)
        assert len(made._sessions._opening) == 3
        busy = ServerBusy("busy", 2.5)
        assert (busy.status, headers_of(busy)) == (503, [(b"retry-after", b"3")])
        backend.go.set()
        await asyncio.gather(*creating)
        await create(made)

    with_service(tmp_path, Rules(max_starts=1, max_waiting=2), work)


def test_another_owner_does_not_wait_for_all_of_a_burst(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        burst = [create(made, ALICE) for _ in range(5)]
        await until(lambda: made._sessions.boxes.starts.waiting == 4)
        other = create(made, BOB)
        await until(lambda: made._sessions.boxes.starts.waiting == 5)
        backend.go.set()
        await other
        assert len(backend.begun) <= 4  # the first two of Alice's, Bob's, and the one after it
        await asyncio.gather(*burst)

    with_service(tmp_path, Rules(max_starts=1), work)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_caller_who_goes_away_leaves_the_queue(tmp_path: Path, key: str | None) -> None:
    async def work(made: Service, backend: Held) -> None:
        first = create(made)
        await until(lambda: made._sessions.boxes.starts.running == 1)
        waiting = [create(made, idempotency_key=key) for _ in range(2)]
        await until(lambda: made._sessions.boxes.starts.waiting == (1 if key else 2))
        waiting[0].cancel()
        await settled()
        # With a key, the second may not have joined the first yet: then it waits by itself.
        await until(lambda: made._sessions.boxes.starts.waiting == 1)
        waiting[1].cancel()
        await until(lambda: made._sessions.boxes.starts.waiting == 0)
        again = create(made, idempotency_key=key)
        backend.go.set()
        assert (await first).id != (await again).id
        assert len(backend.begun) == 2

    with_service(tmp_path, Rules(max_starts=1), work)


def test_a_session_that_waits_to_be_woken_can_be_closed(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        backend.go.set()
        info = await create(made)
        await made.perform(op.Hibernate(info.id), ADMIN)
        backend.go.clear()
        first = create(made)
        await until(lambda: made._sessions.boxes.starts.running == 1)
        waking = asyncio.ensure_future(made.perform(op.Wake(info.id), ADMIN))
        await until(lambda: made._sessions.boxes.starts.waiting == 1)
        await made.perform(op.CloseSession(info.id), ADMIN)
        with pytest.raises(Exception, match="was closed"):
            await waking
        with pytest.raises(SessionEnded):
            await made.perform(op.Wake(info.id), ADMIN)
        assert made._sessions.boxes.starts.waiting == 0
        backend.go.set()
        await first

    with_service(tmp_path, Rules(max_starts=1), work)


def test_those_who_wait_are_told_when_the_server_stops(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        creating = [create(made) for _ in range(3)]
        await until(lambda: made._sessions.boxes.starts.waiting == 2)
        stopping = asyncio.ensure_future(made._sessions.leave(drain=60, kill=True))
        for waiting in creating[1:]:
            with pytest.raises(ServerUnavailable, match="shutting down"):
                await waiting
        backend.go.set()
        await stopping
        assert (await creating[0]).status == "running"

    with_service(tmp_path, Rules(max_starts=1), work)


def test_what_takes_long_before_a_start_takes_nobodys_turn(tmp_path: Path) -> None:
    async def work(made: Service, backend: Held) -> None:
        backend.go.set()
        fetched = asyncio.Event()

        async def prepare(spec: Spec) -> None:
            if spec.user == "root":
                await fetched.wait()

        backend.prepare = prepare  # type: ignore[method-assign]
        slow = create(made, user="root")
        await create(made)
        fetched.set()
        await slow

    with_service(tmp_path, Rules(max_starts=1), work)


def test_boxes_of_one_process_wait_for_each_other_and_none_is_refused() -> None:
    async def work() -> None:
        backend = Held()
        engine = Engine(backend)
        engine._starts = Starts(at_once=2)
        opening = [asyncio.ensure_future(engine.perform(op.OpenSession())) for _ in range(20)]
        await until(lambda: engine._starts.waiting == 18)
        assert len(backend.begun) == 2
        backend.go.set()
        assert len(await asyncio.gather(*opening)) == 20 and backend.most == 2
        await engine.close()

    run(work)
