"""Who follows sessions gets each change of those that they may see, and nothing of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from services import ADMIN, ALICE, BOB, in_loop, opened, service

from hutch import operations as op
from hutch import serving
from hutch.engine.lifecycle import Lifecycle
from hutch.engine.outputs import Outputs
from hutch.errors import HutchError, NotPermitted, ServerBusy
from hutch.server.feed import SessionFeed
from hutch.server.keys import Caller
from hutch.server.service import Service
from hutch.types import BoxInfo, Limits

PATIENCE = 120


def info(number: int, owner: str = "alice", status: str = "running") -> BoxInfo:
    return BoxInfo(
        f"{number:08x}-abc", "namespaces", "host", "ns", Limits(), "/workspace", "user",
        float(number), owner=owner, status=status,  # type: ignore[arg-type]
    )  # fmt: skip


async def next_of(stream: AsyncGenerator[BoxInfo | None, None]) -> BoxInfo | None:
    async with asyncio.timeout(PATIENCE):
        return await anext(stream)


@in_loop
async def test_a_follower_sees_what_is_there_and_then_what_changes() -> None:
    feed = SessionFeed()
    follower = feed.follow(lambda info: True, lambda: [info(2), info(1)])
    assert not feed.is_followed  # it has not begun
    assert await next_of(follower) == info(2)
    assert await next_of(follower) == info(1)
    assert await next_of(follower) is None
    feed.add(info(3))
    assert await next_of(follower) == info(3)
    await follower.aclose()
    assert not feed.is_followed


@in_loop
async def test_what_changes_while_the_list_is_read_comes_once_and_up_to_date() -> None:
    feed = SessionFeed()
    follower = feed.follow(lambda info: True, lambda: [info(2), info(1)])
    assert await next_of(follower) == info(2)
    feed.add(info(1, status="asleep"))
    feed.add(info(2, status="asleep"))
    assert await next_of(follower) == info(1, status="asleep")
    assert await next_of(follower) is None
    assert await next_of(follower) == info(2, status="asleep")
    feed.add(info(9))
    assert await next_of(follower) == info(9)
    await follower.aclose()


@in_loop
async def test_a_slow_follower_gets_the_newest_record_of_each_session() -> None:
    feed = SessionFeed()
    follower = feed.follow(lambda info: True, list)
    assert await next_of(follower) is None
    for number in range(1000):
        for status in ("running", "saving", "asleep"):
            feed.add(info(number, status=status))
    for number in range(1000):
        assert await next_of(follower) == info(number, status="asleep")
    await follower.aclose()


@in_loop
async def test_a_follower_that_falls_too_far_behind_is_told_to_begin_again() -> None:
    feed = SessionFeed(most=3)
    slow, quick = (feed.follow(lambda info: True, list) for _ in range(2))
    assert (await next_of(slow), await next_of(quick)) == (None, None)
    for number in range(10):
        feed.add(info(number))
        assert await next_of(quick) == info(number)
    with pytest.raises(ServerBusy, match="follow again"):
        await next_of(slow)
    await quick.aclose()
    assert not feed.is_followed


@in_loop
async def test_a_follower_that_falls_behind_in_the_list_is_told_so() -> None:
    feed = SessionFeed(most=2)
    follower = feed.follow(lambda info: True, lambda: [info(1), info(2)])
    await next_of(follower)
    for number in range(10, 20):
        feed.add(info(number))
    with pytest.raises(ServerBusy):
        await next_of(follower)


@in_loop
async def test_what_a_follower_may_not_see_takes_no_room_in_its_queue() -> None:
    feed = SessionFeed(most=2)
    follower = feed.follow(lambda info: info.owner == "alice", lambda: [info(1, "bob")])
    assert await next_of(follower) is None
    for number in range(10):
        feed.add(info(number, "bob"))
    feed.add(info(77))
    assert await next_of(follower) == info(77)
    await follower.aclose()


# --- of a server ---------------------------------------------------------------------------


async def follow(
    made: Service, caller: Caller, **fields: object
) -> AsyncGenerator[BoxInfo | None, None]:
    return await made.stream(serving.FollowSessions(**fields), caller)  # type: ignore[arg-type]


@in_loop
async def test_each_step_of_a_session_is_told_until_its_end(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        mine = await follow(made, ALICE)
        assert await next_of(mine) is None
        box = await opened(made, ALICE, labels={"a": "b"}, ttl_seconds=60)
        new = await next_of(mine)
        assert new and (new.id, new.status, new.labels) == (box.id, "running", {"a": "b"})
        await made.perform(op.ExtendSession(box.id, 600), ALICE)
        later = await next_of(mine)
        assert later and later.expires_at and box.expires_at
        assert later.expires_at > box.expires_at + 100
        seen: list[str] = []
        for operation in (op.Hibernate(box.id), op.Wake(box.id), op.CloseSession(box.id)):
            await made.perform(operation, ALICE)
            change = await next_of(mine)
            assert change and change.id == box.id
            seen.append(change.status)
        assert seen == ["asleep", "running", "destroyed"]
        assert change and change.ended_at and change.why
        await mine.aclose()


@in_loop
async def test_an_owner_follows_their_own_sessions_and_an_admin_all(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        boxes = {caller: await opened(made, caller) for caller in (BOB, ALICE)}
        mine = await follow(made, ALICE, current=True)
        everything = await follow(made, ADMIN, current=True)
        of_bob = await follow(made, ADMIN, current=True, owner="bob")
        got = await next_of(mine)
        assert got and got.id == boxes[ALICE].id
        assert await next_of(mine) is None
        both = [await next_of(everything), await next_of(everything)]
        assert [one and one.id for one in both] == [boxes[ALICE].id, boxes[BOB].id]  # newest first
        his = await next_of(of_bob)
        assert his and his.id == boxes[BOB].id
        with pytest.raises(NotPermitted):
            await follow(made, ALICE, owner="bob")
        await made.perform(op.CloseSession(boxes[BOB].id), BOB)
        await made.perform(op.CloseSession(boxes[ALICE].id), ALICE)
        end = await next_of(mine)
        assert end and end.id == boxes[ALICE].id  # and nothing of bob's before it
        for stream in (mine, everything, of_bob):
            await stream.aclose()


@in_loop
async def test_a_key_for_some_images_follows_no_others(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        await opened(made, ALICE)
        limited = replace(ALICE, images=("python",))
        mine = await follow(made, limited, current=True)
        assert await next_of(mine) is None
        await mine.aclose()


@in_loop
async def test_a_session_whose_box_dies_is_told_as_lost(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        box = await opened(made, ALICE)
        mine = await follow(made, ALICE)
        assert await next_of(mine) is None
        life = made._sessions.lives[box.id]
        assert life._session
        await life._session._box.kill()
        while (change := await next_of(mine)) and change.status == "destroying":
            pass
        assert change and change.status == "crashed"
        await mine.aclose()
        (failure,) = await made.perform(serving.ListFailures(), ALICE)
        assert (failure.kind, failure.session, failure.owner) == ("lost", box.id, "alice")
        assert await made.perform(serving.ListFailures(), BOB) == []


@in_loop
async def test_ten_thousand_sessions_are_listed_and_followed(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        lives = made._sessions.lives

        async def start(info: BoxInfo) -> None:
            raise HutchError("none of these is woken")

        for number in range(10_000):
            owner = "alice" if number % 2 else "bob"
            one = info(number, owner, "asleep")
            outputs = Outputs(tmp_path / "none", 1)
            lives[one.id] = Lifecycle(one, start, outputs, made._sessions)  # type: ignore[arg-type]
        try:
            mine = await follow(made, ALICE, current=True)
            got = []
            while one := await next_of(mine):
                got.append(one.id)
            assert len(got) == 5000 and got[0] > got[-1]
            for number in range(10_000):
                made._sessions._tell_change(f"{number:08x}-abc")
            changed = [await next_of(mine) for _ in range(5000)]
            assert {one and one.owner for one in changed} == {"alice"}
            await mine.aclose()
            await made.watching.sample()
            now = (await made.perform(serving.GetHistory(), ALICE))[-1]
            assert now.states == {"asleep": 5000}
            assert (await made.perform(serving.GetHistory(), ADMIN))[-1].states["asleep"] == 10_000
        finally:
            lives.clear()
