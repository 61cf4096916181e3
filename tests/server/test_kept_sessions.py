"""Sessions of a server: deadlines, owners, races, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
import subprocess
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from services import ADMIN, ALICE, BOB, opened, place, run, service

from hutch import operations as op
from hutch import serving
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine import lifecycle
from hutch.engine.hibernate import Saved
from hutch.engine.session import Session
from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    InvalidRequest,
    NoImage,
    NoSession,
    NoSpace,
    NotFound,
    NotPermitted,
    QuotaReached,
    ServerUnavailable,
    SessionEnded,
    Unauthorized,
)
from hutch.images.held_images import HeldImages
from hutch.server.database import Database
from hutch.server.keys import Caller
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.server.sessions import Sessions
from hutch.server.store import Store
from hutch.serving import Quota
from hutch.types import BoxInfo, Limits, MiB

PATIENCE = 60


def go(folder: Path, work: Any, rules: Rules | None = None, **more: Any) -> None:
    async def main() -> None:
        async with service(folder, rules, **more) as made:
            await work(made)

    asyncio.run(main())


# --- deadlines --------------------------------------------------------------------------


def test_a_session_ends_when_its_time_is_over(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made, ttl_seconds=5)
        await run(made, info.id, "true")  # being used does not reset it
        assert (await made.perform(op.GetSession(info.id), ADMIN)).expires_at == info.expires_at
        await asyncio.sleep(5.1)
        with pytest.raises(SessionEnded, match="ttl"):
            await run(made, info.id, "true")
        ended = await made.perform(op.GetSession(info.id), ADMIN)
        assert ended.status == "expired"
        assert ended.ended_at
        kinds = [e.kind for e in await made.perform(serving.ReadJournal(info.id), ADMIN)]
        assert kinds == ["start", "command", "deadline", "end"]

    go(tmp_path, work)


def test_a_command_that_runs_does_not_keep_a_session_beyond_its_time(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made, ttl_seconds=0.5)
        with pytest.raises(Exception, match=r"closed|hung up|died"):
            await run(made, info.id, "sleep 30")

    go(tmp_path, work)


def test_a_session_is_extended_and_never_shortened(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made, ttl_seconds=5)
        later = await made.perform(op.ExtendSession(info.id, 60), ADMIN)
        assert later.expires_at > info.expires_at + 50
        same = await made.perform(op.ExtendSession(info.id, 1), ADMIN)
        assert same.expires_at == later.expires_at
        await asyncio.sleep(5.1)
        assert (await run(made, info.id, "echo on")).stdout == "on\n"
        with pytest.raises(InvalidRequest, match=r"at most 86400 \(1d\) here"):
            await made.perform(op.ExtendSession(info.id, 1e6), ADMIN)
        with pytest.raises(InvalidRequest, match="must be more than 0 seconds, not -1"):
            await made.perform(op.ExtendSession(info.id, -1), ADMIN)

    go(tmp_path, work)


def test_a_renewal_that_races_the_end_either_counts_or_is_refused(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        async def race(wait: float) -> None:
            info = await opened(made, ttl_seconds=0.3)
            await asyncio.sleep(wait)
            try:
                later = await made.perform(op.ExtendSession(info.id, 30), ADMIN)
            except SessionEnded:
                assert (await made.perform(op.GetSession(info.id), ADMIN)).status in (
                    "expired", "destroying",
                )  # fmt: skip
                return
            assert later.expires_at > time.time() + 20
            await asyncio.sleep(0.2)
            assert (await run(made, info.id, "echo alive")).stdout == "alive\n"

        await asyncio.gather(*(race(0.28 + i * 0.004) for i in range(12)))

    go(tmp_path, work)


def test_an_idle_session_sleeps_and_comes_back(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made, idle=0.3, on_idle="hibernate")
        await run(made, info.id, "A=1")
        for _ in range(100):
            if (await made.perform(op.GetSession(info.id), ADMIN)).status == "asleep":
                break
            await asyncio.sleep(0.05)
        assert await made._backend.list() == []
        assert (await run(made, info.id, "echo $A")).stdout == "1\n"

    go(tmp_path, work)


def test_a_clock_that_is_set_moves_no_deadline(tmp_path: Path, monkeypatch: Any) -> None:
    async def work(made: Service) -> None:
        soon = await opened(made, ttl_seconds=1)
        late = await opened(made, ttl_seconds=60)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        await asyncio.sleep(0.1)
        assert (await run(made, late.id, "echo on")).stdout == "on\n"
        monkeypatch.setattr(time, "time", lambda: real() - 86_400)
        await asyncio.sleep(1.2)
        with pytest.raises(SessionEnded):
            await run(made, soon.id, "true")

    go(tmp_path, work)


# --- races ------------------------------------------------------------------------------


def test_two_closes_at_once_both_find_it_gone(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        both = (made.perform(op.CloseSession(info.id), ADMIN) for _ in range(2))
        assert await asyncio.gather(*both) == [None, None]
        assert await made._backend.list() == []
        await made.perform(op.CloseSession(info.id), ADMIN)  # and once more
        with pytest.raises(NoSession):
            await made.perform(op.CloseSession("00000000-000"), ADMIN)

    go(tmp_path, work)


def test_a_close_whose_caller_goes_away_is_carried_out(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        closing = asyncio.ensure_future(made.perform(op.CloseSession(info.id), ADMIN))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await made.perform(op.CloseSession(info.id), ADMIN)
        assert (await made.perform(op.GetSession(info.id), ADMIN)).status == "destroyed"
        assert await made._backend.list() == []

    go(tmp_path, work)


def test_200_sessions_are_opened_at_once(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        infos = await asyncio.gather(*(opened(made) for _ in range(200)))
        assert len({info.id for info in infos}) == 200
        results = await asyncio.gather(*(run(made, info.id, "echo ok") for info in infos))
        assert {result.stdout for result in results} == {"ok\n"}

    go(tmp_path, work)


def test_creates_with_one_key_make_one_session(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        each = [opened(made, idempotency_key="same") for _ in range(5)]
        infos = await asyncio.gather(*each)
        assert len({info.id for info in infos}) == 1
        assert len(await made._backend.list()) == 1
        with pytest.raises(Conflict, match="another request"):
            await opened(made, idempotency_key="same", ttl_seconds=77)
        other = await opened(made, ALICE, idempotency_key="same")  # keys are an owner's own
        assert other.id != infos[0].id

    go(tmp_path, work)


def test_a_key_for_another_request_is_refused_also_while_the_first_is_opened(
    tmp_path: Path,
) -> None:
    async def work(made: Service) -> None:
        first = asyncio.create_task(opened(made, idempotency_key="same"))
        while not made._sessions._once:
            await asyncio.sleep(0)
        with pytest.raises(Conflict, match="another request"):
            await opened(made, idempotency_key="same", env={"A": "1"})
        assert (await first).status == "running"

    go(tmp_path, work)


def test_a_session_that_ends_while_its_last_use_is_written_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        sessions = made._sessions
        with held(sessions.store, "touch") as (called, go_on):
            writing = asyncio.create_task(sessions.write_down())
            await called.wait()
            await sessions.close(info.id, None)
            go_on.set()
            await writing
        assert info.id not in sessions._used

    go(tmp_path, work)


@pytest.mark.parametrize("pool", [0, 2])
def test_a_create_whose_caller_goes_away_leaves_no_box(tmp_path: Path, pool: int) -> None:
    async def work(made: Service) -> None:
        for step in range(30):
            if pool:
                await filled(made, pool)
            creating = asyncio.ensure_future(opened(made, env={"A": "1"}))
            await asyncio.sleep(step / 1000 / (10 if pool else 1))
            creating.cancel()
            answers = await asyncio.gather(creating, return_exceptions=True)
            if isinstance(answers[0], BoxInfo):
                await made.perform(op.CloseSession(answers[0].id), ADMIN)
        if pool:
            with pytest.raises(InvalidRequest):
                await opened(made, env={"A": "x" * 400_000})
            await filled(made, pool)
        await settled(made)
        assert len(await made._backend.list()) == pool
        assert await made.perform(op.ListSessions(status="live"), ADMIN) == []

    go(tmp_path, work, Rules(pool={"host": pool}))


def test_a_caller_that_leaves_while_the_box_is_closed_leaves_no_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        closing, goes_on = asyncio.Event(), asyncio.Event()
        real = Session._hang_up

        async def slow(session: Session) -> None:
            closing.set()
            await goes_on.wait()
            await real(session)

        monkeypatch.setattr(Session, "_hang_up", slow)
        hibernating = asyncio.ensure_future(made.perform(op.Hibernate(info.id), ADMIN))
        await closing.wait()
        hibernating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hibernating
        goes_on.set()
        async with asyncio.timeout(60):
            while await made._backend.list():
                await asyncio.sleep(0.02)
        assert (await made.perform(op.GetSession(info.id), ADMIN)).status == "asleep"

    go(tmp_path, work)


async def settled(made: Service) -> None:
    """Returns when the launcher has answered everything, and what was to be killed is dead.

    A box that is not up yet is not listed, so a list without it proves nothing.
    """
    backend = made._backend
    assert isinstance(backend, NamespacesBackend)
    async with asyncio.timeout(300):
        while backend._errands or (backend._control and backend._control._answers):
            await asyncio.sleep(0.02)


def test_a_create_during_the_stop_is_refused_or_whole(tmp_path: Path) -> None:
    async def main() -> None:
        backend = NamespacesBackend(lasting=str(place(tmp_path) / "run"))
        made = await Service.open(tmp_path, backend, HeldImages(), Rules())
        creating = [asyncio.ensure_future(opened(made)) for _ in range(4)]
        await asyncio.sleep(0.002)
        stopping = asyncio.ensure_future(made.close(kill=True))
        await asyncio.sleep(0)
        with pytest.raises(ServerUnavailable, match="shutting down"):
            await opened(made)
        await stopping
        answers = await asyncio.gather(*creating, return_exceptions=True)
        assert all(not isinstance(a, Exception) or isinstance(a, ServerUnavailable)
                   for a in answers)  # fmt: skip
        async with service(tmp_path) as after:
            assert (after.adoption.adopted, after.adoption.swept) == (0, 0)

    asyncio.run(main())


@contextlib.contextmanager
def held(module: Any, name: str) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """A function that says when it is called, and goes on when it is told to."""
    called, go_on, real = asyncio.Event(), asyncio.Event(), getattr(module, name)

    async def slow(*arguments: Any, **more: Any) -> Any:
        called.set()
        await go_on.wait()
        return await real(*arguments, **more)

    setattr(module, name, slow)
    try:
        yield called, go_on
    finally:
        setattr(module, name, real)


async def row_of(made: Service, id: str) -> Any:
    return await made._store.get(id)


def test_a_renewal_while_a_box_is_being_saved_does_not_lose_it(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        await run(made, info.id, "A=1")
        with held(lifecycle, "save") as (saving, go_on):
            sleeping = asyncio.ensure_future(made.perform(op.Hibernate(info.id), ADMIN))
            await saving.wait()
            renewing = asyncio.ensure_future(made.perform(op.ExtendSession(info.id, 7200), ADMIN))
            await asyncio.sleep(0.05)
            go_on.set()
            await asyncio.gather(sleeping, renewing)
        row = await row_of(made, info.id)
        assert (row.info.status, row.box, bool(row.saved)) == ("asleep", None, True)
        assert row.info.expires_at > info.expires_at + 1000
        assert (await run(made, info.id, "echo $A")).stdout == "1\n"
        row = await row_of(made, info.id)
        assert (row.info.status, row.saved) == ("running", None)
        assert [row.box] == await made._backend.list()

    go(tmp_path, work)


def test_a_save_that_fails_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        await run(made, info.id, "A=1")
        with held(lifecycle, "save") as (saving, _):
            sleeping = asyncio.ensure_future(made.perform(op.Hibernate(info.id), ADMIN))
            await saving.wait()
            renewing = asyncio.ensure_future(made.perform(op.ExtendSession(info.id, 7200), ADMIN))
            await asyncio.sleep(0.05)
            sleeping.cancel()
            await asyncio.gather(sleeping, renewing, return_exceptions=True)
        row = await row_of(made, info.id)
        assert (row.info.status, [row.box]) == ("running", await made._backend.list())
        assert (await run(made, info.id, "echo $A")).stdout == "1\n"

    go(tmp_path, work)


def test_a_box_that_dies_while_it_is_being_saved_is_known_to_have_crashed(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        with held(lifecycle, "save") as (saving, go_on):
            sleeping = asyncio.ensure_future(made.perform(op.Hibernate(info.id), ADMIN))
            await saving.wait()
            row = await row_of(made, info.id)
            await (await made._backend.adopt(row.box)).kill()
            await asyncio.sleep(0.1)
            go_on.set()
            answers = await asyncio.gather(sleeping, return_exceptions=True)
            assert isinstance(answers[0], HutchError)
        for _ in range(100):
            if (await made.perform(op.GetSession(info.id), ADMIN)).status == "crashed":
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it is said to be running")

    go(tmp_path, work)


@pytest.mark.parametrize("name", ["save", "restore"])
def test_closing_one_that_falls_asleep_or_wakes_up_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        await run(made, info.id, "A=1")
        if name == "restore":
            await made.perform(op.Hibernate(info.id), ADMIN)
        operation = op.Wake(info.id) if name == "restore" else op.Hibernate(info.id)
        with held(lifecycle, name) as (called, go_on):
            doing = asyncio.ensure_future(made.perform(operation, ADMIN))
            await called.wait()
            closing = asyncio.ensure_future(made.perform(op.CloseSession(info.id), ADMIN))
            await asyncio.sleep(0.05)
            go_on.set()
            answers = await asyncio.gather(doing, closing, return_exceptions=True)
            assert isinstance(answers[0], HutchError), answers
            assert answers[1] is None
        assert await made._backend.list() == []
        row = await row_of(made, info.id)
        assert (row.info.status, row.box, row.saved) == ("destroyed", None, None)
        left = {path.name for path in made._sessions.folder_of(info.id).iterdir()}
        assert left == {"journal.jsonl"}

    go(tmp_path, work)


def test_a_wake_that_is_cancelled_when_its_box_is_ready_leaves_no_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        await made.perform(op.Hibernate(info.id), ADMIN)
        life = made._sessions.lives[info.id]
        start = life._start

        async def start_and_cancel(info: BoxInfo) -> Session:
            session = await start(info)
            asyncio.get_running_loop().call_soon(waking.cancel)
            return session

        with monkeypatch.context() as patch:
            patch.setattr(life, "_start", start_and_cancel)
            waking = asyncio.ensure_future(life.wake())
            with pytest.raises(asyncio.CancelledError):
                await waking
        assert await made._backend.list() == []
        assert (await run(made, info.id, "echo awake")).stdout == "awake\n"

    go(tmp_path, work)


# The steps of a session that falls asleep or wakes at which it is held: before a function, or in a
# thread before or after one.
STEPS = [
    (op.Hibernate, lifecycle, "save", ""),
    (op.Hibernate, Saved, "write_down", "before"),
    (op.Hibernate, Saved, "write_down", "after"),
    (op.Hibernate, Sessions, "note_denied", ""),
    (op.Hibernate, Database, "_transact", "before"),
    (op.Hibernate, Database, "_transact", "after"),
    (op.Wake, lifecycle, "restore", ""),
    (op.Wake, Sessions, "keep", ""),
    (op.Wake, Database, "_transact", "before"),
    (op.Wake, Database, "_transact", "after"),
]


@pytest.mark.parametrize(
    ("operation", "place", "name", "when"),
    STEPS,
    ids=[f"{operation.__name__} {name} {when}" for operation, _, name, when in STEPS],
)
def test_a_loop_torn_down_at_any_step_leaves_a_session_awake_or_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    operation: Any, place: Any, name: str, when: str,
) -> None:  # fmt: skip
    """A second Ctrl-C cancels every task. What is left is one of the two, and nothing else."""
    is_asleep = (name == "_transact") == (operation is op.Hibernate)

    async def interrupted() -> str:
        async with service(tmp_path, kill=False) as made:
            id = (await opened(made)).id
            await run(made, id, "A=1")
            if operation is op.Wake:
                await made.perform(op.Hibernate(id), ADMIN)
            loop, reached = asyncio.get_running_loop(), asyncio.Event()
            go_on, has_ended = threading.Event(), threading.Event()
            real = getattr(place, name)

            async def hold(*arguments: Any) -> None:
                reached.set()
                await asyncio.Event().wait()

            def hold_thread(*arguments: Any) -> Any:
                try:
                    answer = real(*arguments) if when == "after" else None
                    loop.call_soon_threadsafe(reached.set)
                    assert go_on.wait(PATIENCE)
                    return answer if when == "after" else real(*arguments)
                finally:
                    has_ended.set()

            with monkeypatch.context() as patch:
                patch.setattr(place, name, hold_thread if when else hold)
                doing = asyncio.ensure_future(made.perform(operation(id), ADMIN))
                await reached.wait()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                for _ in range(20):  # enough for whatever does not wait for the thread
                    await asyncio.sleep(0)
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await doing
            # What a thread does that was not waited for counts, too.
            assert not when or await asyncio.to_thread(has_ended.wait, PATIENCE)
            life = made._sessions.lives[id]
            assert life.info.status == ("asleep" if is_asleep else "running")
            assert {*(tmp_path / "sessions" / id).glob("asleep-*")} == life.saved_files
            assert bool(life.saved_files) is is_asleep
            assert len(await made._backend.list()) == (not is_asleep)
        return id

    async def main() -> None:
        id = await interrupted()
        async with service(tmp_path) as made:
            assert (made.adoption.lost, made.adoption.swept) == (0, 0)
            assert (await run(made, id, "echo $A")).stdout == "1\n"
            assert [(await row_of(made, id)).box] == await made._backend.list()

    asyncio.run(main())


def test_who_comes_while_an_idle_box_is_looked_at_is_not_killed(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        with held(lifecycle, "_is_active") as (looking, go_on):
            info = await opened(made, idle=0.3)
            await looking.wait()
            running = asyncio.ensure_future(run(made, info.id, "sleep 0.5; echo whole"))
            await asyncio.sleep(0.1)
            go_on.set()
            assert (await running).stdout == "whole\n"

    go(tmp_path, work)


# --- owners -----------------------------------------------------------------------------


def test_another_owners_session_does_not_exist(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        hers = await opened(made, ALICE)
        for operation in (
            op.GetSession(hers.id), op.CloseSession(hers.id), op.RunShell(hers.id, "id"),
            op.ExtendSession(hers.id, 60), op.Hibernate(hers.id), op.GetStats(hers.id),
            op.ReadFile(hers.id, "x"), serving.ReadJournal(hers.id), serving.ListPorts(hers.id),
        ):  # fmt: skip
            with pytest.raises(NoSession, match=f"no session {hers.id}"):
                await made.perform(operation, BOB)
        assert await made.perform(op.ListSessions(), BOB) == []
        assert await made.perform(op.ListSessions(owner="alice"), BOB) == []
        assert [i.id for i in await made.perform(op.ListSessions(), ADMIN)] == [hers.id]
        assert (await run(made, hers.id, "echo mine", ALICE)).stdout == "mine\n"

    go(tmp_path, work)


def test_a_key_may_do_what_its_scope_says(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        key = await made.perform(serving.MakeKey("carol", "read"), ADMIN)
        carol = made.authenticate(key.key, local=False)
        assert carol == Caller("carol", "read", key.id)
        assert await made.perform(op.ListSessions(), carol) == []
        with pytest.raises(NotPermitted, match="needs a run key"):
            await opened(made, carol)
        with pytest.raises(NotPermitted, match="needs an admin key"):
            await made.perform(serving.ListKeys(), ALICE)
        await made.perform(serving.RevokeKey(key.id), ADMIN)
        for wrong in (key.key, "hutch_00000000_" + "a" * 40, "", "x"):
            with pytest.raises(Unauthorized):
                made.authenticate(wrong, local=False)
        with pytest.raises(Unauthorized, match="needs a key"):
            made.authenticate(None, local=False)
        assert made.authenticate(None, local=True).scope == "admin"

    go(tmp_path, work)


def test_an_owner_gets_no_more_than_its_quota(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.SetQuota("alice", sessions=2, memory=3 << 30), ADMIN)
        each = [opened(made, ALICE) for _ in range(6)]
        answers = await asyncio.gather(*each, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QuotaReached)]
        assert len(refused) == 4
        assert "sessions: 2 used" in str(refused[0])
        await opened(made, BOB)
        usage = await made.perform(serving.GetQuota("alice"), ALICE)
        assert (usage.sessions, usage.memory) == (2, 2 << 30)
        with pytest.raises(NotPermitted):
            await made.perform(serving.GetQuota("alice"), BOB)

    go(tmp_path, work)


def test_an_owner_who_asks_too_often_waits_and_others_do_not(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        refused = 0
        for _ in range(200):
            try:
                made.check_rate(ALICE)
            except QuotaReached as exc:
                assert exc.retry_after > 0
                refused += 1
        assert refused > 100
        made.check_rate(BOB)

    go(tmp_path, work, Rules(quota=Quota(rate=0.01)))  # the next one may ask in 100 s


# --- rules ------------------------------------------------------------------------------


def test_what_the_operator_does_not_allow_is_refused_with_what_is(tmp_path: Path) -> None:
    rules = Rules(
        allowed_images=("host",), max_ttl=100, default_ttl=50,
        max_limits=Limits(memory=512 * MiB, cpus=2, pids=1000, open_files=8192),
        default_limits=Limits(memory=256 * MiB),
    )  # fmt: skip

    async def work(made: Service) -> None:
        info = await opened(made)
        assert info.limits.memory == 256 * MiB
        assert info.expires_at == pytest.approx(info.created_at + 50, abs=0.01)
        for wrong, words in (
            ({"image": "nowhere"}, "not allowed here: host"),
            ({"ttl_seconds": 101}, "at most 100"),
            ({"limits": Limits(memory=600 * MiB)}, "memory can be at most"),
            ({"mounts": (op.Mount("/etc", "/mnt/etc"),)}, "may not be mounted"),
        ):
            with pytest.raises((InvalidRequest, NoImage), match=words):
                await opened(made, **wrong)

    go(tmp_path, work, rules)


def test_folders_are_mounted_only_from_below_those_that_are_allowed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "inner").mkdir(parents=True)
    (shared / "inner" / "note").write_text("here")
    (shared / "way-out").symlink_to("/etc")

    async def work(made: Service) -> None:
        mount = op.Mount(str(shared / "inner"), "/mnt/inner")
        info = await opened(made, mounts=(mount,))
        assert (await run(made, info.id, "cat /mnt/inner/note")).stdout == "here"
        for outside in (shared / "way-out", shared / ".." / "data", tmp_path):
            with pytest.raises(InvalidRequest, match="may not be mounted"):
                await opened(made, mounts=(op.Mount(str(outside), "/mnt/x"),))

    go(tmp_path / "data", work, Rules(mounts=(str(shared),)))


def test_a_folder_that_is_not_allowed_any_more_is_not_mounted_when_a_session_wakes(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()

    async def main() -> None:
        async with service(tmp_path / "data", Rules(mounts=(str(shared),)), kill=False) as made:
            info = await opened(made, mounts=(op.Mount(str(shared), "/mnt/shared"),))
            await made.perform(op.Hibernate(info.id), ADMIN)
        async with service(tmp_path / "data") as made:
            with pytest.raises(InvalidRequest, match="may not be mounted"):
                await made.perform(op.Wake(info.id), ADMIN)
            assert (await made.perform(op.GetSession(info.id), ADMIN)).status == "asleep"

    asyncio.run(main())


def test_the_folder_of_a_server_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")

    async def work(made: Service) -> None:
        info = await opened(made, workspace_id="thesis")
        assert (await run(made, info.id, "echo x > /workspace/note; pwd")).exit_code == 0
        await made.perform(op.CloseSession(info.id), ADMIN)

    go(tmp_path / "data", work)


def test_sessions_are_listed_in_pages_and_by_filters(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        infos = [await opened(made, labels={"n": str(i % 2)}) for i in range(6)]
        await made.perform(op.CloseSession(infos[0].id), ADMIN)
        newest_first = [info.id for info in reversed(infos)]

        async def ids(**filters: Any) -> list[str]:
            return [i.id for i in await made.perform(op.ListSessions(**filters), ADMIN)]

        assert await ids() == newest_first
        assert await ids(limit=2) == newest_first[:2]
        assert await ids(limit=2, before=newest_first[1]) == newest_first[2:4]
        assert await ids(status="live") == newest_first[:5]
        assert await ids(status="destroyed") == [infos[0].id]
        assert await ids(label="n=1") == [infos[5].id, infos[3].id, infos[1].id]
        with pytest.raises(InvalidRequest, match="no status 'x'"):
            await ids(status="running,x")

    go(tmp_path, work)


# --- the pool ---------------------------------------------------------------------------


async def filled(made: Service, count: int) -> None:
    for _ in range(200):
        states = await made.perform(serving.GetPool(), ADMIN)
        if states and states[0].ready == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(states)


def test_boxes_come_from_the_pool_and_never_go_back(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await filled(made, 2)
        first = await opened(made)
        assert (first.acquire_source, first.acquire_detail) == ("pool", None)
        await run(made, first.id, "touch /tmp/mark; A=1")
        await made.perform(op.CloseSession(first.id), ADMIN)
        await filled(made, 2)
        for _ in range(2):
            info = await opened(made)
            said = await run(made, info.id, "ls /tmp; echo A=$A; pwd")
            assert (info.acquire_source, said.stdout) == ("pool", "A=\n/workspace\n")
        third = await opened(made)
        assert (third.acquire_source, third.acquire_detail) in (
            ("cold", "pool_empty"), ("pool", None),
        )  # fmt: skip

    go(tmp_path, work, Rules(pool={"host": 2}))


def test_a_box_of_the_pool_gets_the_variables_of_its_session(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await filled(made, 1)
        info = await opened(made, env={"TOKEN": "t1"})
        assert info.acquire_source == "pool"
        assert (await run(made, info.id, "echo $TOKEN")).stdout == "t1\n"
        await filled(made, 1)
        other = await opened(made, limits=Limits(memory=128 * MiB))
        assert (other.acquire_source, other.acquire_detail) == ("cold", "pool_spec_mismatch")
        third = await opened(made, workspace_id="proj-1")
        assert third.acquire_detail == "pool_workspace_mismatch"

    go(tmp_path, work, Rules(pool={"host": 1}))


# --- workspaces -------------------------------------------------------------------------


async def read(made: Service, id: str, path: str, caller: Caller = ADMIN) -> bytes:
    pieces = [piece async for piece in await made.stream(op.ReadFile(id, path), caller)]
    return b"".join(pieces)


def test_a_workspace_outlives_sessions_and_can_be_used_without_one(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        first = await opened(made, workspace_id="proj-1")
        await run(made, first.id, "echo one > a.txt")
        second = await opened(made, workspace_id="proj-1")
        assert (await run(made, second.id, "cat a.txt")).stdout == "one\n"
        files = "workspace/proj-1"
        assert await read(made, files, "a.txt") == b"one\n"
        await made.perform(op.WriteFile(files, "dir/b.bin", b"\xff\x00"), ADMIN)
        assert (await run(made, second.id, "od -An -tx1 dir/b.bin")).stdout == " ff 00\n"
        on_host = tmp_path / "workspaces" / "local" / "proj-1"
        assert {p.stat().st_uid for p in on_host.rglob("*")} == {os.getuid()}
        with pytest.raises(Conflict, match="used by session"):
            await made.perform(serving.RemoveWorkspace("proj-1"), ADMIN)
        for info in (first, second):
            await made.perform(op.CloseSession(info.id), ADMIN)
        found = await made.perform(serving.GetWorkspace("proj-1"), ADMIN)
        assert found.size
        await made.perform(serving.RemoveWorkspace("proj-1"), ADMIN)
        assert await made.perform(serving.ListWorkspaces(), ADMIN) == []
        assert not on_host.exists()

    go(tmp_path, work)


def test_a_workspace_belongs_to_its_owner(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(op.WriteFile("workspace/proj-1", "a", b"hers"), ALICE)
        await made.perform(op.WriteFile("workspace/proj-1", "a", b"his"), BOB)
        assert await read(made, "workspace/proj-1", "a", ALICE) == b"hers"
        assert [w.owner for w in await made.perform(serving.ListWorkspaces(), BOB)] == ["bob"]
        info = await opened(made, BOB, workspace_id="proj-1", exclusive=True)
        with pytest.raises(Conflict, match="exclusive use of"):
            await opened(made, BOB, workspace_id="proj-1")
        await opened(made, ALICE, workspace_id="proj-1")
        await made.perform(op.CloseSession(info.id), BOB)
        await opened(made, BOB, workspace_id="proj-1")

    go(tmp_path, work)


def test_a_workspace_is_exported_and_imported_as_a_tar(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(op.WriteFile("workspace/from", "x/y.txt", b"text"), ADMIN)
        pieces = [p async for p in await made.stream(serving.ExportWorkspace("from"), ADMIN)]
        tar = b"".join(pieces)
        (tmp_path / "w.tar").write_bytes(tar)
        listed = subprocess.run(
            ["tar", "tf", str(tmp_path / "w.tar")], capture_output=True, text=True, check=True
        )
        assert "x/y.txt" in listed.stdout.replace("./", "")
        count = await made.perform(serving.ImportWorkspace("to-1", tar), ADMIN)
        assert count >= 1
        assert await read(made, "workspace/to-1", "x/y.txt") == b"text"

    go(tmp_path, work)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_server_without_a_free_inode_says_that_there_is_no_room(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made)
        full = tmp_path / "full"
        full.mkdir()
        with contextlib.suppress(OSError):
            for number in range(2000):
                (full / f"{number}").touch()
        for operation in (
            op.OpenSession(workspace_id="another"),
            serving.MakeWorkspace("third"),
            op.WriteFile("workspace/fourth", "a", b"x"),
            op.OpenSession(),
        ):
            with pytest.raises(NoSpace):
                await made.perform(operation, ADMIN)
        assert (await run(made, info.id, "echo on")).stdout == "on\n"
        with pytest.raises(NoSpace):
            await made.perform(op.Hibernate(info.id), ADMIN)
        assert (await run(made, info.id, "head -c 3000000 /dev/zero")).exit_code == 0
        for number in range(20):
            (full / f"{number}").unlink()
        assert (await run(made, (await opened(made)).id, "echo on")).stdout == "on\n"

    options = ["-t", "tmpfs", "-o", "size=64m,nr_inodes=1000"]
    subprocess.run(["mount", *options, "hutch-test", str(tmp_path)], check=True)
    try:
        go(tmp_path, work)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("held", ["descriptor", "mapping"])
def test_files_that_are_removed_and_still_open_count_for_the_quota(
    tmp_path: Path, held: str
) -> None:
    code = (
        "import mmap, os, time\nfile = open('hidden', 'w+b')\nos.unlink('hidden')\n"
        "file.write(os.urandom(4 << 20))\nfile.flush()\n"
    )
    if held == "mapping":
        # The module keeps a descriptor of its own, which goes as well.
        code += "kept = mmap.mmap(file.fileno(), 0)\nos.closerange(3, 100)\n"
    code += "time.sleep(99)\n"

    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=1 << 20), ADMIN)
        info = await opened(made, workspace_id="small")
        await run(made, info.id, f"python3 -c {shlex.quote(code)} >/dev/null 2>&1 &")
        await until_ended(made, info)
        with pytest.raises(SessionEnded, match="its workspace has 41"):
            await run(made, info.id, "true")

    go(tmp_path, work)


def test_the_record_of_a_session_says_that_its_quota_is_measured(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=1 << 20), ADMIN)
        info = await opened(made, workspace_id="small")
        assert [why for why in info.degraded if "measured" in why and "quota" in why]
        for other in (await opened(made), await opened(made, workspace_id="free")):
            assert not [why for why in other.degraded if "quota" in why]

    go(tmp_path, work)


async def until_ended(made: Service, info: BoxInfo) -> None:
    async with asyncio.timeout(60):
        while (await made.perform(op.GetSession(info.id), ADMIN)).status != "destroyed":
            await asyncio.sleep(0.1)


def test_an_upload_that_does_not_fit_into_a_workspace_leaves_nothing(tmp_path: Path) -> None:
    class Known:
        length = 2 << 20

        async def __aiter__(self) -> AsyncIterator[bytes]:
            raise AssertionError("refused before it is read")
            yield b""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(32):
            yield bytes(1 << 16)

    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=1 << 20), ADMIN)
        place = "workspace/small"
        await made.perform(op.WriteFile(place, "kept", b"as before"), ADMIN)
        for data in (pieces(), Known(), bytes(2 << 20)):
            with pytest.raises(NoSpace, match="more than fits: remove files from it"):
                await made.perform(op.WriteFile(place, "kept", data), ADMIN)
        with pytest.raises(NoSpace, match="more than fits"):
            await made.perform(serving.ImportWorkspace("small", Known()), ADMIN)
        with pytest.raises(NoSpace, match="more than fits"):
            await made.perform(serving.ImportWorkspace("small", pieces()), ADMIN)
        assert await read(made, place, "kept") == b"as before"
        names = [entry.path for entry in await made.perform(op.ListFiles(place), ADMIN)]
        assert [name.rsplit("/", 1)[-1] for name in names] == ["kept"]
        # Two at once do not fit where each of them would alone.
        both = [op.WriteFile(place, name, bytes(600_000)) for name in ("a", "b")]
        done = await asyncio.gather(
            *(made.perform(write, ADMIN) for write in both), return_exceptions=True
        )
        assert [type(each) for each in done].count(NoSpace) == 1, done

    go(tmp_path, work)


def test_a_small_archive_that_unpacks_to_more_than_fits_is_stopped(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 8 << 20
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    assert len(packed.getvalue()) < 1 << 15

    async def without_end() -> AsyncIterator[bytes]:
        yield packed.getvalue()[:-100]
        await asyncio.Event().wait()

    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=1 << 20), ADMIN)
        for data in (without_end(), packed.getvalue()):
            async with asyncio.timeout(120):
                with pytest.raises(NoSpace, match=r"more than fits .what was unpacked before"):
                    await made.perform(serving.ImportWorkspace("small", data), ADMIN)
            # A file that was not whole yet, when the import was stopped, is gone already.
            with contextlib.suppress(NotFound):
                await made.perform(op.RemoveFile("workspace/small", "zeros"), ADMIN)

    go(tmp_path, work)


def test_uploads_to_two_workspaces_share_what_is_left_to_their_owner(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        both = asyncio.Barrier(2)

        async def pieces() -> AsyncIterator[bytes]:
            await both.wait()  # neither has sent anything when the other begins
            for _ in range(10):
                yield bytes(60_000)

        writes = [op.WriteFile(f"workspace/{name}", "x", pieces()) for name in ("one", "two")]
        done = await asyncio.gather(
            *(made.perform(write, ALICE) for write in writes), return_exceptions=True
        )
        refused = [each for each in done if isinstance(each, NoSpace)]
        assert "the workspaces and sleeping sessions of alice have" in str(refused[0])

    go(tmp_path, work, Rules(quota=Quota(disk=1 << 20)))


def test_a_workspace_over_its_quota_ends_its_sessions_and_takes_no_more(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=1 << 20), ADMIN)
        info = await opened(made, workspace_id="small")
        await run(made, info.id, "head -c 3000000 /dev/zero > big")
        for _ in range(100):  # the server looks now and then
            if (await made.perform(op.GetSession(info.id), ADMIN)).status == "destroyed":
                break
            await asyncio.sleep(0.3)
        with pytest.raises(SessionEnded, match="its workspace has"):
            await run(made, info.id, "true")
        with pytest.raises(NoSpace, match="remove files"):
            await opened(made, workspace_id="small")
        with pytest.raises(NoSpace):
            await made.perform(op.WriteFile("workspace/small", "more", b"x"), ADMIN)
        await made.perform(op.RemoveFile("workspace/small", "big"), ADMIN)
        await made.perform(op.WriteFile("workspace/small", "more", b"x"), ADMIN)

    go(tmp_path, work)


def test_the_files_of_many_workspaces_take_few_boxes(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        for number in range(10):
            await made.perform(op.WriteFile(f"workspace/many-{number}", "x", b"1"), ALICE)
            assert len(await made._backend.list()) <= 4
        assert await read(made, "workspace/many-0", "x", ALICE) == b"1"

    go(tmp_path, work)


def test_only_who_may_admin_gives_a_workspace_more_than_the_operator(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        with pytest.raises(NotPermitted, match="1048576"):
            await made.perform(serving.MakeWorkspace("huge", quota=1 << 50), ALICE)
        await made.perform(serving.MakeWorkspace("small", quota=1 << 10), ALICE)
        await made.perform(serving.MakeWorkspace("huge", quota=1 << 50), ADMIN)

    go(tmp_path, work, Rules(workspace_quota=1 << 20))


@pytest.mark.parametrize(
    "package",
    ["x @ http://127.0.0.1:9/x-1-py3-none-any.whl", "/tmp/x-1-py3-none-any.whl", "file:x", "a.whl"],
)
def test_a_server_fetches_and_reads_nothing_that_a_caller_names(
    tmp_path: Path, package: str
) -> None:
    async def work(made: Service) -> None:
        with pytest.raises(NotPermitted, match="admin key"):
            await opened(made, ALICE, packages=(package,))
        with pytest.raises(NotPermitted, match="admin key"):
            await opened(made, ALICE, image="python", preload=("json",))
        with pytest.raises(InvalidRequest, match="by name and version"):
            await opened(made, ADMIN, packages=(package,))
        with pytest.raises(InvalidRequest, match="by name and version"):
            await made.perform(serving.BuildImage("mine", (package,)), ADMIN)

    go(tmp_path, work)


# --- a machine that is full, or in use --------------------------------------------------


def test_a_full_disk_refuses_what_is_new_and_loses_nothing(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("making a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], check=True)
    try:

        async def work(made: Service) -> None:
            info = await opened(made)
            await run(made, info.id, "A=kept")
            (disk / "filler").write_bytes(b"")
            with open(disk / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(b"\0" * 4096)
            with pytest.raises((NoSpace, ServerUnavailable)):
                for _ in range(50):
                    await opened(made)
            boxes = len(await made._backend.list())
            lives = await made.perform(op.ListSessions(status="live"), ADMIN)
            assert boxes == len(lives)
            assert (await run(made, info.id, "echo $A")).stdout == "kept\n"
            await made.perform(op.CloseSession(info.id), ADMIN)
            with pytest.raises(SessionEnded):
                await run(made, info.id, "true")
            (disk / "filler").unlink()
            await made._sessions.write_down()
            assert (await made.perform(op.GetSession(info.id), ADMIN)).status == "destroyed"
            await opened(made)

        go(disk / "data", work)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_backend_that_cannot_start_boxes_says_so(tmp_path: Path) -> None:
    class Broken(NamespacesBackend):
        async def start(self, spec: Any, id: str | None = None) -> Any:
            raise BackendUnavailable("no boxes today")

    async def main() -> None:
        backend = Broken(lasting=str(place(tmp_path) / "run"))
        made = await Service.open(tmp_path, backend, HeldImages(), Rules(pool={"host": 1}))
        try:
            with pytest.raises(BackendUnavailable, match="today"):
                await opened(made)
            assert await made.perform(op.ListSessions(), ADMIN) == []
            for _ in range(100):
                state = (await made.perform(serving.GetPool(), ADMIN))[0]
                if state.failures:
                    break
                await asyncio.sleep(0.02)
            assert "no boxes today" in (state.error or "")
        finally:
            await made.close(kill=True)

    asyncio.run(main())


def test_a_sleeping_session_whose_files_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> Saved:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with service(tmp_path, kill=False) as made:
            id = (await opened(made)).id
            await run(made, id, "echo kept > /tmp/note")
            await made.perform(op.Hibernate(id), ADMIN)
        with monkeypatch.context() as patch:
            patch.setattr(Saved, "found", fails)
            async with service(tmp_path, kill=False) as made:
                info = await made.perform(op.GetSession(id), ADMIN)
                assert info.status == "asleep" and "Input/output error" in info.why
                with pytest.raises(BackendUnavailable, match="next start of the server"):
                    await run(made, id, "true")
        async with service(tmp_path) as made:
            assert (await run(made, id, "cat /tmp/note")).stdout == "kept\n"

    asyncio.run(main())


def test_a_session_that_takes_more_asleep_than_its_owner_may_have_stays_awake(
    tmp_path: Path,
) -> None:
    async def work(made: Service) -> None:
        small, large = await opened(made, ALICE), await opened(made, ALICE)
        await run(made, small.id, "head -c 1m /dev/urandom > /tmp/small", ALICE)
        await run(made, large.id, "head -c 8m /dev/urandom > /tmp/large", ALICE)
        report = await made.perform(op.Hibernate(small.id), ALICE)
        assert report.size > MiB
        assert (await made.perform(serving.GetQuota("alice"), ALICE)).disk == report.size
        with pytest.raises(NoSpace, match="sleeping sessions of alice have"):
            await made.perform(op.Hibernate(large.id), ALICE)
        assert not [*(tmp_path / "sessions" / large.id).glob("asleep-*")]
        assert (await made.perform(op.GetSession(large.id), ALICE)).status == "running"
        # What wakes, or ends, takes nothing any more.
        assert (await run(made, small.id, "wc -c < /tmp/small", ALICE)).stdout == "1048576\n"
        assert (await made.perform(serving.GetQuota("alice"), ALICE)).disk == 0
        await run(made, large.id, "truncate -s 2m /tmp/large", ALICE)
        await made.perform(op.Hibernate(large.id), ALICE)

    go(tmp_path, work, Rules(quota=Quota(disk=4 * MiB)))


def test_a_start_does_other_things_while_it_reads_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = Saved.found, []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def slow(*args: Any) -> Saved:
            others = threading.Event()
            loop.call_soon_threadsafe(others.set)
            told.append(others.wait(20))
            return real(*args)

        async with service(tmp_path, kill=False) as made:
            id = (await opened(made)).id
            await made.perform(op.Hibernate(id), ADMIN)
        monkeypatch.setattr(Saved, "found", slow)
        async with service(tmp_path) as made:
            assert (await run(made, id, "echo awake")).stdout == "awake\n"

    asyncio.run(main())
    assert told == [True]


@pytest.mark.parametrize("act", ["hibernate", "wake"])
def test_who_goes_away_while_a_session_falls_asleep_or_wakes_costs_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    real = Store.update

    async def main() -> None:
        written = asyncio.Event()

        async def slow(store: Store, id: str, **changes: Any) -> Any:
            record = await real(store, id, **changes)
            written.set()
            await asyncio.sleep(0.3)  # it is on disk, and the answer is on its way
            return record

        async with service(tmp_path, kill=False) as made:
            id = (await opened(made)).id
            await run(made, id, "echo kept > /tmp/note")
            if act == "wake":
                await made.perform(op.Hibernate(id), ADMIN)
            with monkeypatch.context() as patch:
                patch.setattr(Store, "update", slow)
                wanted = op.Hibernate(id) if act == "hibernate" else op.Wake(id)
                asking = asyncio.ensure_future(made.perform(wanted, ADMIN))
                await written.wait()
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            status = (await made.perform(op.GetSession(id), ADMIN)).status
            assert status == ("asleep" if act == "hibernate" else "running")
        async with service(tmp_path) as made:
            assert (made.adoption.lost, made.adoption.swept) == (0, 0)
            assert (await run(made, id, "cat /tmp/note")).stdout == "kept\n"

    asyncio.run(main())


def test_what_was_saved_is_removed_after_the_record_of_the_wake_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its box may be on another machine, and outlive a power cut of this one."""
    done: list[str] = []
    transact, remove = Database._transact, Saved.remove

    def noted_transact(database: Database, work: Any, durable: bool) -> Any:
        answer = transact(database, work, durable)
        done.extend(["synced"] if durable else [])
        return answer

    def noted_remove(saved: Saved) -> None:
        done.append("removed")
        remove(saved)

    async def work(made: Service) -> None:
        id = (await opened(made)).id
        await made.perform(op.Hibernate(id), ADMIN)
        monkeypatch.setattr(Database, "_transact", noted_transact)
        monkeypatch.setattr(Saved, "remove", noted_remove)
        await made.perform(op.Wake(id), ADMIN)
        assert done == ["synced", "removed"]

    go(tmp_path, work)


def test_a_kept_session_that_sleeps_leaves_nothing_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> Saved:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with service(tmp_path, kill=False) as made:
            id = (await opened(made)).id
            await made.perform(op.Hibernate(id), ADMIN)
        monkeypatch.setattr(Saved, "found", fails)
        async with service(tmp_path) as made:
            folder = tmp_path / "sessions" / id
            assert [*folder.glob("asleep-*")]
            await made.perform(op.CloseSession(id), ADMIN)
            assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]
            assert made._sessions.journal(id).read()[-1].kind == "end"

    asyncio.run(main())
