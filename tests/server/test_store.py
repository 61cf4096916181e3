"""What the daemon remembers: whole or not at all, and never in the way."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from must_work import need

from hutch.errors import Conflict, NoSession, NoSpace, ServerUnavailable, SessionEnded
from hutch.server import store as store_module
from hutch.server.database import Database, DatabaseLocked, DatabaseUnusable
from hutch.server.store import LIVE, SCRIPTS, SessionRecord, Store
from hutch.server.stored_requests import environment_in
from hutch.serving import Key, Quota, Workspace
from hutch.types import BoxInfo, Limits

Test = Callable[[Store], Awaitable[None]]


def info(id: str, **more: Any) -> BoxInfo:
    made: dict[str, Any] = {
        "backend": "namespaces", "image": "host", "isolation": "ns", "limits": Limits(),
        "workdir": "/workspace", "user": "user", "created_at": 1.0, "owner": "ada",
    }  # fmt: skip
    return BoxInfo(id=id, **{**made, **more})


def record(id: str, **more: Any) -> SessionRecord:
    return SessionRecord(info(id, **more), box=f"box-{id}")


def run(path: Path, test: Test, **options: Any) -> None:
    """With a store at `path` that is closed after."""

    async def main() -> None:
        store = await Store.open(path, **options)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hutch.db"


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process has the file for itself, until it is told to let go."""
    script = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process


def ids(records: list[SessionRecord]) -> list[str]:
    return [found.info.id for found in records]


def test_a_record_comes_back_as_it_went_in(path: Path) -> None:
    whole = SessionRecord(
        info(
            "s1", labels={"task": "7", "ü": "✓"}, workspace_id="docs", expires_at=99.5, idle=3.0,
            on_idle="hibernate", last_used_at=2.0, degraded=("cgroup",), limits=Limits(cpus=0.5),
            acquire_source="pool", status="saving", cwd="/workspace",
        ),
        "box-1", {"image": "host", "env": {"A": "b"}}, {"manifest": "m"}, 12.25, "boot-1", "k", "d",
    )  # fmt: skip

    async def test(store: Store) -> None:
        await store.insert(whole)
        assert await unsealed(store, "s1") == whole
        assert await store.get("s2") is None

    async def unsealed(store: Store, id: str) -> SessionRecord:
        found = await store.get(id)
        assert found
        env = environment_in(found.request, store.sealer)
        return replace(found, request={**found.request, "env": env})

    async def again(store: Store) -> None:
        assert await unsealed(store, "s1") == whole

    run(path, test)
    run(path, again)


def test_fields_of_the_record_and_of_its_info_are_updated_alike(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("s1", labels={"a": "1"}))
        new = await store.update("s1", status="asleep", box=None, saved={"manifest": "x"})
        assert (new.info.status, new.box, new.saved) == ("asleep", None, {"manifest": "x"})
        assert new == await store.get("s1")
        await store.update("s1", info=replace(new.info, labels={"b": "2"}), box="box-2")
        assert not await store.list(label="a") and ids(await store.list(label="b=2")) == ["s1"]
        with pytest.raises(NoSession):
            await store.update("s2", box=None)
        with pytest.raises(TypeError):
            await store.update("s1", colour="red")
        assert (await store.get("s1") or new).box == "box-2"

    run(path, test)


def test_a_session_that_ends_has_a_time_at_which_it_did(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("s1"))
        before = time.time()
        ended = await store.update("s1", status="destroyed", box=None)
        assert ended.info.ended_at is not None and ended.info.ended_at >= before
        assert not await store.live()

    run(path, test)


def test_a_change_that_comes_too_late_does_not_make_a_session_live_again(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("s1"))
        await store.update("s1", status="destroying")
        with pytest.raises(SessionEnded, match="s1 is destroying: too late"):
            await store.update("s1", status="asleep", box=None)
        await store.update("s1", status="expired", box=None)
        for late in ("running", "destroyed", "destroying"):
            with pytest.raises(SessionEnded):
                await store.update("s1", status=late, box="box-2")
        kept = await store.update("s1", why="its deadline passed")
        assert (kept.info.status, kept.box) == ("expired", None)

    run(path, test)


def test_two_sessions_have_neither_an_id_nor_an_idempotency_key_in_common(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(replace(record("s1"), idempotency_key="k", digest="d"))
        for other in (record("s1"), replace(record("s2"), idempotency_key="k")):
            with pytest.raises(Conflict):
                await store.insert(other)
        await store.insert(replace(record("s3", owner="bob"), idempotency_key="k"))
        found = await store.by_idempotency_key("ada", "k")
        assert found and found.info.id == "s1" and found.digest == "d"
        assert await store.by_idempotency_key("ada", "other") is None
        assert ids(await store.list()) == ["s3", "s1"]

    run(path, test)


def test_a_list_is_filtered_and_paged_newest_first(path: Path) -> None:
    async def test(store: Store) -> None:
        for n in range(12):
            await store.insert(
                record(
                    f"s{n}",
                    created_at=100.0 - n,  # the clock went back
                    owner="ada" if n % 2 else "bob",
                    image="host" if n % 3 else "data",
                    workspace_id="docs" if n == 5 else None,
                    labels={"n": str(n)},
                    status="running" if n < 10 else "destroyed",
                )
            )
        assert ids(await store.list(limit=3)) == ["s11", "s10", "s9"]
        assert ids(await store.list(limit=3, before="s9")) == ["s8", "s7", "s6"]
        assert ids(await store.list(owner="ada", limit=2)) == ["s11", "s9"]
        assert ids(await store.list(owner="ada", statuses=LIVE, limit=2)) == ["s9", "s7"]
        assert ids(await store.list(statuses=["destroyed", "running"], limit=3)) == [
            "s11", "s10", "s9",
        ]  # fmt: skip
        assert ids(await store.list(image="data")) == ["s9", "s6", "s3", "s0"]
        assert ids(await store.list(workspace_id="docs", owner="ada")) == ["s5"]
        assert ids(await store.list(label="n=4")) == ["s4"]
        assert len(await store.list(label="n")) == 12
        assert ids(await store.live()) == [f"s{n}" for n in range(9, -1, -1)]
        assert not await store.list(statuses=[]) and not await store.list(limit=0)
        with pytest.raises(NoSession):
            await store.list(before="s99")

    run(path, test)


def test_use_is_written_down_for_many_at_once(path: Path) -> None:
    async def test(store: Store) -> None:
        for n in range(3):
            await store.insert(record(f"s{n}", last_used_at=1.0))
        await store.touch({"s0": (5.5, 55.0), "s2": (6.5, 65.0), "never": (7.0, 70.0)})
        found = await store.list()
        assert [each.info.last_used_at for each in found] == [6.5, 1.0, 5.5]
        assert [each.used for each in found] == [65.0, None, 55.0]
        assert (await store.update("s0", cwd="/tmp")).info.last_used_at == 5.5

    run(path, test)


def test_what_ended_long_ago_is_forgotten_and_what_lives_never(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("old", labels={"a": "b"}))
        for n in range(1200):
            at = float(n)
            await store.insert(record(f"s{n}", status="expired", ended_at=at, labels={"a": "b"}))
        gone = await store.purge(ended_before=700.0, keep=10_000)
        assert sorted(gone) == sorted(f"s{n}" for n in range(700))
        gone = await store.purge(ended_before=0.0, keep=2)
        assert len(gone) == 498
        assert ids(await store.list(label="a")) == ["s1199", "s1198", "old"]

    run(path, test)


def test_a_workspace_is_its_owners(path: Path) -> None:
    async def test(store: Store) -> None:
        docs = Workspace("docs", "ada", 1.5, {"a": "b"}, quota=1000)
        await store.insert_workspace(docs)
        await store.insert_workspace(Workspace("docs", "bob", 2.0))
        await store.insert_workspace(Workspace("code", "ada", 3.0))
        with pytest.raises(Conflict):
            await store.insert_workspace(Workspace("docs", "ada", 9.0))
        assert await store.get_workspace("ada", "docs") == docs
        assert [w.id for w in await store.list_workspaces("ada")] == ["code", "docs"]
        assert len(await store.list_workspaces()) == 3

    run(path, test)


def test_a_workspace_whose_removal_was_begun_is_not_found_and_not_forgotten(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert_workspace(Workspace("docs", "ada", 1.5))
        assert await store.mark_workspace("ada", "docs")
        assert not await store.mark_workspace("ada", "docs")
        assert await store.get_workspace("ada", "docs") is None
        assert not await store.list_workspaces("ada")
        with pytest.raises(Conflict):
            await store.insert_workspace(Workspace("docs", "ada", 9.0))
        assert await store.marked_workspaces() == [("ada", "docs")]
        assert await store.remove_workspace("ada", "docs")
        assert not await store.remove_workspace("ada", "docs")
        await store.insert_workspace(Workspace("docs", "ada", 9.0))

    run(path, test)


def test_keys_and_quotas_are_kept(path: Path) -> None:
    key = Key("k1", "ada", "run", "hutch_k1", "laptop", 5.0)
    key = replace(key, expires_at=8.0, images=("host", "python"), workspaces=("notes",))

    async def test(store: Store) -> None:
        await store.insert_key(replace(key, expires_at=None), b"digest")
        await store.set_key_expiry("k1", 8.0)
        await store.touch_keys({"k1": 7.0})
        assert await store.revoke_key("k1", 9.0)
        assert not await store.revoke_key("k1", 10.0)
        await store.set_quota("ada", Quota(sessions=1))
        await store.set_quota("ada", Quota(sessions=3, rate=2.5))

    async def again(store: Store) -> None:
        assert await store.list_keys() == [
            (replace(key, last_used_at=7.0, revoked_at=9.0), b"digest")
        ]
        assert await store.quotas() == {"ada": Quota(sessions=3, rate=2.5)}

    run(path, test)
    run(path, again)


def test_nobody_else_on_the_machine_may_read_it(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("s1"))
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    old = os.umask(0)
    try:
        run(path, test)
    finally:
        os.umask(old)


# --- a long history ---------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {},
    {"owner": "ada"},
    {"statuses": ["running"]},
    {"owner": "ada", "statuses": LIVE},
    {"image": "data"},
    {"workspace_id": "docs"},
    {"owner": "ada", "workspace_id": "docs"},
    {"label": "task"},
    {"label": "task=7", "owner": "ada"},
    {"before": "s5", "owner": "ada", "statuses": ["crashed"]},
]


def plans(path: Path, filters: dict[str, Any]) -> list[str]:
    """What SQLite says of each query that a list with these filters makes."""
    found: list[str] = []

    async def test(store: Store) -> None:
        await store.insert(record("s5"))
        asked: list[str] = []
        await store._database.read(lambda db: db.set_trace_callback(asked.append))
        await store.list(**filters)
        await store._database.read(lambda db: db.set_trace_callback(None))
        for sql in asked:
            if sql.startswith("SELECT"):
                plan = await store._database.read(
                    lambda db, sql=sql: db.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall()
                )
                found.extend(step[-1] for step in plan)

    run(path, test)
    return found


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "+".join(f) or "none")
def test_every_filter_of_a_list_has_an_index(path: Path, filters: dict[str, Any]) -> None:
    steps = plans(path, filters)
    assert steps
    for step in steps:
        # Without filters, the newest are read from the end of the table, in order.
        assert "SCAN" not in step or (not filters and step == "SCAN sessions"), steps
        assert "TEMP B-TREE" not in step or "label" in filters, steps


def steps(path: Path, history: int) -> tuple[int, int]:
    """What SQLite's virtual machine does to list an owner's live sessions, and to insert one."""
    counted: list[int] = []

    async def test(store: Store) -> None:
        def fill(db: sqlite3.Connection) -> None:
            for n in range(history):
                ended = record(f"e{n}", status="destroyed", ended_at=1.0)
                db.execute(store_module._INSERT, store_module.row_of(ended, store.sealer))

        step = 0

        def count() -> int:
            nonlocal step
            step += 1
            return 0

        await store._database.write(fill)
        for n in range(10):
            await store.insert(record(f"first{n}"))
        await store._database.read(lambda db: db.set_progress_handler(count, 1))
        assert len(await store.list(owner="ada", statuses=LIVE)) == 10
        counted.append(step)
        await store.insert(record("last", owner="bob"))
        counted.append(step - counted[0])

    run(path, test)
    listing, inserting = counted
    return listing, inserting


def test_ten_thousand_ended_sessions_slow_nobody(tmp_path: Path) -> None:
    empty = steps(tmp_path / "empty.db", 0)
    full = steps(tmp_path / "full.db", 10_000)
    for before, after in zip(empty, full, strict=True):
        assert 0 < after < 2 * before, (empty, full)


# --- versions ---------------------------------------------------------------------------


def test_an_older_file_is_brought_up_and_a_copy_of_it_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(store: Store) -> None:
        await store.insert(record("s1"))

    run(path, fill)
    newer = (*SCRIPTS, "ALTER TABLE sessions ADD COLUMN colour TEXT DEFAULT 'red'")
    monkeypatch.setattr(store_module, "SCRIPTS", newer)

    async def test(store: Store) -> None:
        assert ids(await store.live()) == ["s1"]
        found = await store._database.read(
            lambda db: db.execute("SELECT colour FROM sessions").fetchall()
        )
        assert found == [("red",)]

    run(path, test)
    run(path, test)  # it is brought up once
    copy = path.with_name(f"hutch.db.v{len(SCRIPTS)}.bak")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    monkeypatch.undo()

    async def old(store: Store) -> None:
        assert ids(await store.live()) == ["s1"]

    run(copy, old)


def test_keys_of_a_file_from_before_keys_expired_never_do(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(SCRIPTS[0] + "; PRAGMA user_version = 1")
        db.execute(
            "INSERT INTO keys (id, owner, scope, prefix, label, created_at, digest)"
            " VALUES ('k1', 'ada', 'run', 'hutch_k1', '', 5.0, x'00')"
        )
    db.close()

    async def test(store: Store) -> None:
        assert await store.list_keys() == [(Key("k1", "ada", "run", "hutch_k1", "", 5.0), b"\0")]

    run(path, test)


def test_a_step_that_fails_leaves_the_older_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(store: Store) -> None:
        await store.insert(record("s1"))

    run(path, fill)
    broken = (*SCRIPTS, "ALTER TABLE sessions ADD COLUMN colour TEXT; DROP TABLE nothing")
    monkeypatch.setattr(store_module, "SCRIPTS", broken)
    with pytest.raises(DatabaseUnusable, match="nothing"):
        run(path, fill)
    monkeypatch.undo()

    async def test(store: Store) -> None:
        assert ids(await store.live()) == ["s1"]

    run(path, test)


def test_a_newer_file_is_refused_and_not_touched(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1000")
    db.close()
    before = path.read_bytes()

    async def never(store: Store) -> None:
        raise AssertionError

    with pytest.raises(
        DatabaseUnusable, match=rf"newer Hutch: its version is 1000.*up to {len(SCRIPTS)}"
    ):
        run(path, never)
    assert path.read_bytes() == before


# --- when the world is against it -------------------------------------------------------


def test_a_file_that_another_process_holds_is_waited_for(path: Path) -> None:
    async def test(store: Store) -> None:
        with held(path) as process:
            inserting = asyncio.create_task(store.insert(record("s1")))
            await asyncio.sleep(0)  # it waits in its thread; the loop goes on
            assert process.stdin
            process.stdin.close()
            await asyncio.wait_for(inserting, 120)
        assert ids(await store.live()) == ["s1"]

    run(path, test)


def test_a_file_that_stays_held_is_an_error_in_words_for_all_who_wait(path: Path) -> None:
    async def test(store: Store) -> None:
        with held(path):
            t0 = time.monotonic()
            every = await asyncio.gather(
                *(store.insert(record(f"s{n}")) for n in range(2000)), return_exceptions=True
            )
            # Patience is counted once: for each, this would take a thousand seconds.
            assert time.monotonic() - t0 < 500
            for exc in every:
                assert isinstance(exc, DatabaseLocked) and isinstance(exc, ServerUnavailable)
                assert exc.status == 503
                assert f"locked by another process: {path}" in str(exc)
        await store.insert(record("s1"))
        assert ids(await store.live()) == ["s1"]

    run(path, test, patience=0.5)


def test_the_loop_does_not_wait_for_the_disk(path: Path) -> None:
    async def test(store: Store) -> None:
        with held(path):
            inserting = asyncio.create_task(store.insert(record("s1")))
            turns = 0
            while not inserting.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 100
            with pytest.raises(DatabaseLocked):
                await inserting

    run(path, test, patience=0.3)


def test_a_damaged_file_is_named(path: Path) -> None:
    path.write_bytes(random.Random(7).randbytes(8192))

    async def never(store: Store) -> None:
        raise AssertionError

    with pytest.raises(DatabaseUnusable, match=f"{path} is damaged"):
        run(path, never)


def test_a_page_that_is_damaged_is_told_when_it_is_read(path: Path) -> None:
    async def fill(store: Store) -> None:
        for n in range(200):
            await store.insert(record(f"s{n}"))

    run(path, fill)
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(7).randbytes(len(data) - 4096)
    path.write_bytes(data)

    async def test(store: Store) -> None:
        with pytest.raises(DatabaseUnusable, match=f"{path} is damaged"):
            await store.live()

    run(path, test)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def never(store: Store) -> None:
        raise AssertionError

    with pytest.raises(DatabaseUnusable, match=r"none/hutch\.db cannot be opened: No such file"):
        run(tmp_path / "none" / "hutch.db", never)


def test_a_full_disk_loses_nothing_and_is_told(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "hutch-test", str(place)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        need("mount", "a small file system cannot be mounted here")

    async def test(store: Store) -> None:
        await store.insert(record("first"))
        filler = place / "filler"
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        kept = 1
        with pytest.raises(NoSpace, match=f"is full: {place}"):
            for n in range(1000):
                await store.insert(record(f"s{n}", labels={"x": "y" * 3000}))
                kept += 1
        assert len(await store.live()) == kept
        filler.unlink()
        await store.insert(record("last"))
        assert len(await store.live()) == kept + 1

    try:
        run(place / "hutch.db", test)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_who_stops_waiting_leaves_no_half_of_it(path: Path) -> None:
    async def test(store: Store) -> None:
        waiting = [
            asyncio.create_task(store.insert(record(f"s{n}", labels={"n": str(n)})))
            for n in range(200)
        ]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await store.insert(record("last"))
        found = await store.live()
        assert {f"s{n}" for n in range(1, 200, 2)} <= set(ids(found))
        for each in found[1:]:
            assert ids(await store.list(label=f"n={each.info.labels['n']}")) == [each.info.id]

    run(path, test)


def test_a_process_that_is_killed_while_it_writes_loses_nothing_that_it_was_told_of(
    path: Path,
) -> None:
    script = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_store import Store, record\n"
        "async def main():\n"
        "    store = await Store.open(Path(sys.argv[1]))\n"
        "    for n in range(1_000_000):\n"
        "        await store.insert(record(f's{n}'))\n"
        "        print(n, flush=True)\n"
        "asyncio.run(main())\n"
    )
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(here)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(here.parent)},
    ) as process:  # fmt: skip
        assert process.stdout
        told = 0
        while told < 300:
            told = int(process.stdout.readline())
        process.kill()
        told = max(told, *(int(line) for line in process.stdout.read().splitlines() or ["0"]))

    async def test(store: Store) -> None:
        found = set(ids(await store.live()))
        assert {f"s{n}" for n in range(told + 1)} <= found and len(found) <= told + 2

    run(path, test)


def test_a_store_that_is_closed_says_so_and_closing_twice_is_no_error(path: Path) -> None:
    async def test(store: Store) -> None:
        await store.insert(record("s1"))
        await store.close()
        await store.close()
        with pytest.raises(ServerUnavailable, match="shutting down"):
            await store.get("s1")

    run(path, test)


def test_what_was_asked_before_it_was_closed_is_done(path: Path) -> None:
    async def test(store: Store) -> None:
        waiting = [asyncio.create_task(store.insert(record(f"s{n}"))) for n in range(50)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*waiting)

    async def again(store: Store) -> None:
        assert len(await store.live()) == 50

    run(path, test)
    run(path, again)


def test_work_that_raises_is_undone(path: Path) -> None:
    async def main() -> None:
        database = await Database.open(path, SCRIPTS)

        def half(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO quotas VALUES ('ada', '{}')")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await database.write(half)
        rows = await database.read(lambda db: db.execute("SELECT * FROM quotas").fetchall())
        await database.close()
        assert rows == []

    asyncio.run(main())
