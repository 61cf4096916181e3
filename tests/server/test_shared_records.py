"""What servers share: the same promises of the records in a cluster, and of those of our tests."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from replicas_of_tests import MemoryRecords
from services import in_loop

from cluster_of_tests import namespace
from hutch.backends.base import SharedChange, SharedRecord, SharedRecords
from hutch.backends.kubernetes import address
from hutch.backends.kubernetes.cluster import ApiAnswer, KubernetesCluster
from hutch.backends.kubernetes.records import MAX_TEXT, ClusterRecords
from hutch.engine.sealing import SIZE, Sealer
from hutch.errors import BackendUnavailable, Conflict, InvalidRequest, NoSession, NoSpace
from hutch.server.shared_store import SharedStore
from hutch.server.store import HeldElsewhere, SessionRecord, row_of
from hutch.server.workspaces import WorkspaceName, Workspaces
from hutch.serving import Key, Quota, Workspace
from hutch.types import BoxInfo, Limits

Make = Callable[[], Awaitable[SharedRecords]]


@pytest.fixture(params=["memory", "cluster"])
def using(request: pytest.FixtureRequest) -> Callable[[], AsyncIterator[SharedRecords]]:
    """A context with records that nobody else has."""
    if request.param == "memory":
        return asynccontextmanager(in_memory)
    made = request.getfixturevalue("cluster")
    path = request.node.callspec.params.get("path") or f"records-{secrets.token_hex(4)}"

    @asynccontextmanager
    async def in_cluster() -> AsyncIterator[SharedRecords]:
        with namespace(made, path):
            where = address.find({"KUBECONFIG": str(made.kubeconfig)}, namespace=path)
            cluster = KubernetesCluster(where)
            try:
                yield ClusterRecords(cluster)
            finally:
                await cluster.close()

    return in_cluster


async def in_memory() -> AsyncIterator[SharedRecords]:
    yield MemoryRecords()


Using = Callable[[], AsyncIterator[SharedRecords]]


async def until(is_so: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.02)


def test_of_two_who_change_a_record_one_is_told_that_it_came_too_late(using: Using) -> None:
    async def main() -> None:
        async with using() as records:
            first = await records.create("session", "../x\0 y/ü", "one")
            assert first.text == "one" and await records.get("session", "../x\0 y/ü") == first
            with pytest.raises(Conflict):
                await records.create("session", first.key, "two")
            second = await records.replace(first, "two")
            assert second.version > first.version
            for late in ("three", ""):
                with pytest.raises(Conflict):
                    await records.replace(first, late)
            with pytest.raises(Conflict):
                await records.remove(first)
            results = await asyncio.gather(
                *(records.replace(second, f"by {n}") for n in range(8)), return_exceptions=True
            )
            assert sum(isinstance(result, SharedRecord) for result in results) == 1
            third = await records.get("session", first.key)
            assert third and third.text.startswith("by ")
            await records.remove(third)
            await records.remove(third)  # it is gone, which is what was wanted
            assert await records.get("session", first.key) is None
            with pytest.raises(Conflict):
                await records.replace(third, "four")

    asyncio.run(main())


def test_who_follows_is_told_of_all_that_is_there_and_of_each_change(using: Using) -> None:
    async def main() -> None:
        async with using() as records:
            old = await records.create("quota", "ada", "1")
            seen: list[SharedChange | None] = []

            async def follow() -> None:
                async with aclosing(records.follow()) as changes:
                    async for change in changes:
                        seen.append(change)

            following = asyncio.create_task(follow())
            await until(lambda: None in seen)
            assert [change and change.record for change in seen] == [old, None]
            key = await records.create("key", "k1", "a secret")  # another kind of object
            new = await records.replace(old, "2")
            await until(lambda: {SharedChange(key), SharedChange(new)} <= set(seen))
            await records.remove(key)
            await until(lambda: seen[-1] and seen[-1].is_gone)
            assert seen[-1] and seen[-1].record.key == "k1"
            following.cancel()

    asyncio.run(main())


def test_one_leads_until_it_is_silent_or_resigns(using: Using) -> None:
    async def main() -> None:
        async with using() as records:
            assert await records.lead("hutch-test", "a", 2)
            assert not await records.lead("hutch-test", "b", 2)
            assert await records.lead("hutch-test", "a", 2)
            await asyncio.sleep(1)
            assert not await records.lead("hutch-test", "b", 2)
            await asyncio.sleep(2.5)
            assert await records.lead("hutch-test", "b", 2)
            assert not await records.lead("hutch-test", "a", 2)
            await records.resign("hutch-test", "a")  # it has nothing to resign from
            assert not await records.lead("hutch-test", "a", 2)
            await records.resign("hutch-test", "b")
            assert await records.lead("hutch-test", "a", 2)
            assert abs(records.now() - time.time()) < 5

    asyncio.run(main())


# --- the store on top of them ---------------------------------------------------------------


def record(id: str, status: str = "running", **more: object) -> SessionRecord:
    info = BoxInfo(id, "fake", "host", "none", Limits(), "/workspace", "user", 1.0, owner="ada")
    return SessionRecord(replace(info, status=status, **more), box=f"box-{id}")


def session_text(**damaged: object) -> str:
    row = {**row_of(record("s0"), Sealer(bytes(SIZE))), **damaged}
    return msgspec.json.encode({"holder": "http://c#1", "row": row}).decode()


def test_a_store_knows_what_another_one_wrote_and_what_was_there_before(
    using: Using, tmp_path: Path
) -> None:
    async def main() -> None:
        async with using() as records:
            a = await SharedStore.join(folder(tmp_path, "a"), records, "http://a#1")
            secret = {"env": {"TOKEN": "hush"}}
            await a.insert(replace(record("s1", labels={"x": "1"}), request=secret))
            await a.insert_key(Key("k1", "ada", "run", "p", "l", 5.0), b"digest")
            await a.set_quota("ada", Quota(sessions=3))
            await a.set_quota("ada", Quota(sessions=4))
            await a.insert_workspace(Workspace("docs", "ada", 1.0, {"a": "b"}))
            with pytest.raises(Conflict):
                await a.insert_workspace(Workspace("docs", "ada", 1.0))
            b = await SharedStore.join(folder(tmp_path, "b"), records, "http://b#1")
            try:
                assert b.sealer.unseal(a.sealer.seal(b"x")) == b"x"
                assert "hush" not in (tmp_path / "b/shared.db").read_bytes().decode("latin-1")
                assert await b.get("s1") == await a.get("s1")
                assert [r.info.id for r in await b.list(label="x=1")] == ["s1"]
                assert [info.id for info in b.held_by_others("ada")] == ["s1"] and not b.mine()
                assert [(key.id, digest) for key, digest in await b.list_keys()] == [
                    ("k1", b"digest")
                ]
                assert await b.quotas() == {"ada": Quota(sessions=4)}
                assert await b.get_workspace("ada", "docs") == await a.get_workspace("ada", "docs")
                use = {"exclusive": True}
                await a.insert(replace(record("s3", workspace_id="docs"), request=use))
                await until(lambda: b.workspace_users("ada", "docs") == {"s3": True})
                uses = Workspaces(tmp_path / "workspaces", b)
                assert uses.in_use("ada", "docs") == ("s3",)
                for name in ("s4", "s5"):
                    with pytest.raises(Conflict, match="session s3 has exclusive use"):
                        uses._claim(WorkspaceName("ada", "docs"), name, exclusive=False)
                await a.update("s3", status="destroyed")
                await until(lambda: not b.workspace_users("ada", "docs"))
                assert await b.mark_workspace("ada", "docs")
                assert not await b.mark_workspace("ada", "docs")
                assert await b.revoke_key("k1", 9.0) and not await b.revoke_key("k1", 9.0)
                await a.insert(record("s2"))
                assert await b.get("s2")  # also before b was told of it
                await a.update("s1", status="crashed", why="gone")
                await until(lambda: not b.is_live("s1"))
                assert (await b.get("s1") or record("")).info.why == "gone"
                revoked: list[Key] = []
                a.key_changed = lambda key, digest: revoked.append(key)
                await b.delete_keys(["k1"])
                await until(lambda: revoked)
            finally:
                await b.close()
                await a.close()

    asyncio.run(main())


def test_only_the_holder_changes_a_session_and_one_can_become_it(
    using: Using, tmp_path: Path
) -> None:
    async def main() -> None:
        async with using() as records:
            a, b, c = [
                await SharedStore.join(folder(tmp_path, name), records, f"http://{name}#1")
                for name in "abc"
            ]
            try:
                await a.insert(record("s1"))
                with pytest.raises(NoSession):
                    await b.update("s0", box=None)
                await until(lambda: b.holder_of("s1"))
                with pytest.raises(HeldElsewhere):
                    await b.update("s1", box=None)
                assert a._following
                a._following.cancel()  # so that it is not told
                taken = await asyncio.gather(b.take("s1", a.me), c.take("s1", a.me))
                assert sum(record is not None for record in taken) == 1
                winner = b if taken[0] else c
                assert winner.holder_of("s1") == winner.me and await winner.confirm("s1")
                assert a.holder_of("s1") == a.me
                with pytest.raises(HeldElsewhere):
                    await a.update("s1", status="crashed")
                assert not await a.confirm("s1")
                await asyncio.gather(
                    *(winner.update("s1", labels={str(n): "x"}) for n in range(5)),
                    winner.update("s1", box="box-2"),
                )
                assert (await winner.get("s1") or record("")).box == "box-2"
                winner.leads = True
                await winner.update("s1", status="destroyed", ended_at=1.0)
                assert await winner.purge(2.0, 10) == ["s1"]
                loser = c if taken[0] else b
                async with asyncio.timeout(20):  # so that its files go there, too
                    while not (purged := await loser.purge(2.0, 10)):
                        await asyncio.sleep(0.02)
                assert purged == ["s1"] and loser.holder_of("s1") is None
            finally:
                for store in (a, b, c):
                    await store.close()

    asyncio.run(main())


def folder(path: Path, name: str) -> Path:
    made = path / name
    made.mkdir()
    return made


@in_loop
async def test_a_record_that_is_too_large_is_refused_before_it_is_sent() -> None:
    records = ClusterRecords(KubernetesCluster.__new__(KubernetesCluster))
    with pytest.raises(InvalidRequest, match="too large"):
        await records.create("session", "s1", "x" * (MAX_TEXT + 1))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("session", '{"holder": "http://c#1", "row": {"id": "s0"}}'),
        ("session", "{}"),
        ("session", session_text(request="not JSON")),
        ("key", '{"key": {"id": "k", "owner": "o", "scope": "run", "prefix": ""}, "digest": "x"}'),
        ("quota", "[]"),
        ("workspace", '{"workspace": 1}'),
    ],
)
@in_loop
async def test_a_damaged_record_is_left_out_and_hides_none_of_the_others(
    kind: str, text: str, tmp_path: Path
) -> None:
    records = MemoryRecords()
    await records.create(kind, "damaged", text)
    await records.create("key", "k1", key_text("k1"))
    store = await SharedStore.join(folder(tmp_path, "a"), records, "http://a#1")
    try:
        assert [key.id for key, _ in await store.list_keys()] == ["k1"]
        await records.create(kind, "another", text)
        await records.create("quota", "ada", '{"sessions": 3}')
        await until(lambda: ("quota", "ada") in store._versions)
        assert await store.quotas() == {"ada": Quota(sessions=3)}
    finally:
        await store.close()


@in_loop
async def test_what_could_not_be_written_to_the_index_is_learned_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.shared_store.PAUSE", 0.01)
    records = MemoryRecords()
    known = await records.create("key", "k1", key_text("k1"))
    store = await SharedStore.join(folder(tmp_path, "a"), records, "http://a#1")
    try:
        told: list[Key] = []
        store.key_changed = lambda key, digest: told.append(key)
        transact, failed = store._database._transact, asyncio.Event()
        loop = asyncio.get_running_loop()

        def full(work: Callable[[sqlite3.Connection], object], durable: bool) -> object:
            def until_the_last_step(db: sqlite3.Connection) -> object:
                work(db)
                loop.call_soon_threadsafe(failed.set)
                raise NoSpace("the disk is full")

            return transact(until_the_last_step, durable)

        monkeypatch.setattr(store._database, "_transact", full)
        await records.replace(known, key_text("k1", revoked_at=5.0))
        await failed.wait()
        monkeypatch.undo()
        await until(lambda: told)
        assert told[0].revoked_at == 5.0
    finally:
        await store.close()


@in_loop
async def test_a_key_whose_record_went_unseen_is_told_as_gone(tmp_path: Path) -> None:
    records = MemoryRecords()
    known = await records.create("key", "k1", key_text("k1"))
    store = await SharedStore.join(folder(tmp_path, "a"), records, "http://a#1")
    try:
        told: list[tuple[str, bytes | None]] = []
        store.key_changed = lambda key, digest: told.append((key.id, digest))
        # As a list says it: all that is known is which one it was.
        records._tell(SharedChange(replace(known, text=""), is_gone=True))
        await until(lambda: told)
        assert told == [("k1", None)] and not await store.list_keys()
    finally:
        await store.close()


def key_text(id: str, revoked_at: float | None = None) -> str:
    key = Key(id, "ada", "run", "p", revoked_at=revoked_at)
    return msgspec.json.encode({"key": key, "digest": "00"}).decode()


class EmptyCluster(KubernetesCluster):
    """It has nothing any more, as of version 9."""

    def __init__(self) -> None:
        self.namespace = "boxes"

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        *,
        verb: str,
        what: str,
    ) -> ApiAnswer:
        return ApiAnswer(200, b'{"metadata": {"resourceVersion": "9"}, "items": []}')


@in_loop
async def test_what_is_gone_from_a_list_is_gone_whatever_version_was_seen_of_it() -> None:
    changes: asyncio.Queue[SharedChange | BackendUnavailable | None] = asyncio.Queue()
    known = {"hutch-key-1": SharedRecord("key", "k1", "", 5)}
    await ClusterRecords(EmptyCluster())._list("secrets", known, changes)
    assert changes.get_nowait() == SharedChange(SharedRecord("key", "k1", "", 9), is_gone=True)
