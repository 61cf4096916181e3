"""Several servers for one set of sessions: any of them answers, and one has each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest
from replicas_of_tests import ADMIN, ServersOverHTTP, SharingBackend, opened, run, servers
from services import ALICE, BOB, in_loop

from hutch import operations as op
from hutch import serving
from hutch.client._async_http import POOLS
from hutch.errors import (
    BackendUnavailable,
    BoxError,
    HutchError,
    NotFound,
    NotPermitted,
    ServerUnavailable,
    SessionEnded,
    Unauthorized,
)
from hutch.operations import Operation
from hutch.server.keys import OPERATOR
from hutch.server.recorder import NotYours
from hutch.server.replicas import TOKEN, Peer, PeerLost
from hutch.server.rules import Rules
from hutch.server.shared_store import SharedStore
from hutch.serving import Quota
from hutch.types import Chunk, Result

T = TypeVar("T")


async def until(is_so: object, seconds: float = 20) -> None:
    assert callable(is_so)
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.02)


@in_loop
async def test_any_server_answers_for_a_session_and_one_has_it(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(a, info.id, "A=1; cd /tmp")
        assert (await run(b, info.id, "echo $A $PWD")).stdout == "1 /tmp\n"
        assert [o for o in made.forwarded if isinstance(o, op.RunShell)]
        assert info.id in a._sessions.lives and info.id not in b._sessions.lives
        assert [one.id for one in await b.perform(op.ListSessions(), ADMIN)] == [info.id]
        await b.perform(op.WriteFile(info.id, f"{tmp_path}/x", b"hi"), ADMIN)
        read = await b.stream(op.ReadFile(info.id, f"{tmp_path}/x"), ADMIN)
        assert b"".join([piece async for piece in read]) == b"hi"
        assert any(
            e.kind == "command" for e in await b.perform(serving.ReadJournal(info.id), ADMIN)
        )
        await b.perform(op.CloseSession(info.id), ADMIN)
        assert not a._sessions.lives
        for service in (a, b):
            await until(lambda s=service: s._store.holder_of(info.id))
            with pytest.raises(SessionEnded):
                await run(service, info.id, "true")


@in_loop
async def test_a_session_goes_on_elsewhere_when_its_server_is_gone(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(a, info.id, "A=1")
        made.away.add("http://a")
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        assert info.id in b._sessions.lives
        # The first one still lives, and finds out: it ends nothing, and asks the second from now.
        await until(lambda: info.id not in a._sessions.lives)
        assert (await run(a, info.id, "A=2; echo $A")).stdout == "2\n"
        assert (await run(b, info.id, "echo $A")).stdout == "2\n"
        assert (await b.perform(op.GetSession(info.id), ADMIN)).status == "running"


@in_loop
async def test_a_server_that_is_told_nothing_leaves_a_session_when_its_link_is_replaced(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(a, info.id, "A=1")
        made.away.add("http://a")
        assert isinstance(a._store, SharedStore) and a._store._following
        a._store._following.cancel()
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        await until(lambda: info.id not in a._sessions.lives)
        await asyncio.sleep(0.5)
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"


@in_loop
async def test_a_server_that_hangs_fails_what_is_under_way_and_loses_its_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.replicas.ANSWER", 0.3)
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(b, info.id, "A=1")  # so that its answer is fresh
        made.hung.add("http://a")
        with pytest.raises(ServerUnavailable, match="http://a has the session, and stopped"):
            await run(b, info.id, "true")
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        made.hung.clear()
        assert (await run(a, info.id, "echo $A")).stdout == "1\n"
        # One that takes its time, and answers otherwise, is let do so.
        assert (await run(a, info.id, "sleep 1; echo late")).stdout == "late\n"


@in_loop
async def test_a_key_of_servers_is_for_one_server_and_cannot_be_made_up(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        assert a._replicas and isinstance(b._store, SharedStore)
        key = a._replicas._key_for(b._store.me, ALICE)
        caller = b.authenticate(key, local=False, peer="10.0.0.7")
        assert caller == ALICE and caller.is_forwarded and caller.peer == "10.0.0.7"
        body = key.removeprefix(TOKEN).partition(".")[0]
        other = a._replicas._key_for(b._store.me, ADMIN).removeprefix(TOKEN).partition(".")
        made_up = [f"{TOKEN}{other[0]}.{key.rpartition('.')[2]}", f"{TOKEN}{body}.", TOKEN]
        for text in (*made_up, f"{TOKEN}{body}.\udcff", f"{key}x"):
            with pytest.raises(Unauthorized):
                b.authenticate(text, local=False)
        with pytest.raises(Unauthorized, match="another server"):
            a.authenticate(key, local=False)  # nor is it for one that was there before


@in_loop
async def test_a_server_that_lost_a_session_cannot_end_it(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        stale = a._sessions.lives[info.id]
        made.away.add("http://a")
        await run(b, info.id, "A=1")
        a._sessions.lives[info.id] = stale  # as if it had not noticed
        await a._sessions.end(info.id, "expired", "its deadline passed (ttl)")
        assert info.id not in a._sessions.lives
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"


@in_loop
async def test_of_two_servers_that_want_a_session_one_gets_it(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b, c = [await made.start(name) for name in "abc"]
        infos = [await opened(a) for _ in range(5)]
        made.away.add("http://a")
        results = await asyncio.gather(
            *(run(service, info.id, "echo hi") for info in infos for service in (b, c) * 3)
        )
        assert {result.stdout for result in results} == {"hi\n"}
        for info in infos:
            assert (info.id in b._sessions.lives) != (info.id in c._sessions.lives)


@in_loop
async def test_an_idempotency_key_opens_one_session_whichever_server_it_comes_to(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        infos = await asyncio.gather(
            *(opened(service, ALICE, idempotency_key="k") for service in (a, b) * 3)
        )
        assert len({info.id for info in infos}) == 1
        assert len(a._sessions.lives) + len(b._sessions.lives) == 1
        assert (await opened(b, BOB, idempotency_key="k")).id != infos[0].id


@in_loop
async def test_keys_and_quotas_of_one_server_hold_at_the_others(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        key = await a.perform(serving.MakeKey("alice", "run"), ADMIN)
        await until(lambda: b._keys.get(key.id))
        assert b.authenticate(key.key, local=False).owner == "alice"
        assert not b.is_open
        await b.perform(serving.RevokeKey(key.id), ADMIN)
        await until(lambda: a._keys.find(key.key or "") is None)
        await a.perform(serving.SetQuota("alice", sessions=1), ADMIN)
        await until(lambda: b._quotas.of("alice") == Quota(sessions=1))
        await opened(a, ALICE)
        await until(lambda: b._store.held_by_others("alice"))
        with pytest.raises(HutchError, match="sessions"):
            await opened(b, ALICE)


@in_loop
async def test_a_stranger_neither_reaches_nor_moves_a_session_of_another_owner(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a, ALICE)
        for is_away in (False, True):
            if is_away:
                made.away.add("http://a")
            with pytest.raises(NotYours):
                await run(b, info.id, "true", BOB)
            assert info.id in a._sessions.lives and not b._sessions.lives
        with pytest.raises(HutchError):
            b.authenticate("hutch-replica.eyJ0byI6IngifQ.0", local=False)


@in_loop
async def test_the_reaper_keeps_the_limits_of_sessions_whose_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.replicas.SILENCE", 0.0)
    monkeypatch.setattr("hutch.server.service.REAP", 0.05)
    async with servers(tmp_path) as made:
        b = await made.start("b")
        await until(lambda: b._store.leads)
        a = await made.start("a")
        brief = await a.perform(op.OpenSession(min_isolation="none", ttl_seconds=3), ADMIN)
        made.away.add("http://a")
        await until(lambda: brief.id in b._sessions.lives)
        await until(lambda: not b._store.is_live(brief.id))
        await until(lambda: not b._sessions._ending)
        assert (await b.perform(op.GetSession(brief.id), ADMIN)).status == "expired"


@in_loop
async def test_a_server_that_is_started_again_finds_what_sleeps_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.service.REAP", 0.05)
    async with servers(tmp_path) as made:
        b, a = await made.start("b"), await made.start("a")
        info = await opened(a)
        await run(a, info.id, "A=1")
        await a.perform(op.Hibernate(info.id), ADMIN)
        again = await made.start("a")  # with its folder, and a name of its own
        await until(lambda: info.id in again._sessions.lives)
        assert (await again.perform(op.GetSession(info.id), ADMIN)).status == "asleep"
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        await a.close()


@in_loop
async def test_a_reaper_that_is_not_let_lead_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hutch.server.service.REAP", 0.01)
    async with servers(tmp_path) as made:
        asked = 0

        async def refuse(name: str, who: str, seconds: int) -> bool:
            nonlocal asked
            asked += 1
            raise BackendUnavailable("a Role has to allow the verb 'get' for leases")

        monkeypatch.setattr(made.records, "lead", refuse)
        await made.start("a")
        await until(lambda: asked > 5)
    assert caplog.text.count("a Role has to allow the verb 'get' for leases") == 1


@in_loop
async def test_a_sleeping_session_stays_while_its_files_are_away(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(a, info.id, "A=1")
        await a.perform(op.Hibernate(info.id), ADMIN)
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"  # it woke where its files are
        await a.perform(op.Hibernate(info.id), ADMIN)
        made.away.add("http://a")
        with pytest.raises(HutchError, match="its files are at http://a"):
            await run(b, info.id, "true")
        made.away.clear()
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        await a.perform(op.Hibernate(info.id), ADMIN)
        made.away.add("http://a")
        await b.perform(op.CloseSession(info.id), ADMIN)
        assert (await b.perform(op.GetSession(info.id), ADMIN)).status == "destroyed"


@in_loop
async def test_a_box_that_is_gone_is_told_by_whoever_is_asked(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b", Rules())
        info = await opened(a)
        made.away.add("http://a")
        await a._sessions.lives[info.id]._open_session().box.kill()
        with pytest.raises((SessionEnded, BoxError)):
            await run(b, info.id, "true")
        await until(lambda: b._store.mine() == [])


@in_loop
async def test_what_one_server_forwards_to_another_crosses_http_and_comes_back(
    tmp_path: Path,
) -> None:
    made = ServersOverHTTP(tmp_path)
    try:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        items = await b.stream(op.RunShell(info.id, "echo one; sleep 0.3; echo two"), ADMIN)
        pieces = [item async for item in items]
        assert isinstance(pieces[0], Chunk) and isinstance(pieces[-1], Result)
        assert pieces[-1].stdout == "one\ntwo\n"
        name = f"{tmp_path}/x"

        async def body() -> AsyncGenerator[bytes, None]:
            for _ in range(50):
                yield b"x" * 100_000

        await b.perform(op.WriteFile(info.id, name, body()), ADMIN)
        read = await b.stream(op.ReadFile(info.id, name), ADMIN)
        assert sum([len(piece) async for piece in read]) == 5_000_000
        with pytest.raises(NotFound):
            await b.stream(op.ReadFile(info.id, f"{name}-not"), ADMIN)
        # Leaving the stream here ends the command there.
        items = await b.stream(op.RunShell(info.id, f"echo $$; touch {name}-on; sleep 60"), ADMIN)
        await anext(items)
        await items.aclose()
        assert (await run(b, info.id, "echo free")).stdout == "free\n"
        listener = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        listener += "print(s.getsockname()[1], flush=True); c, _ = s.accept(); "
        listener += "c.sendall(c.recv(9).upper())"
        program = await a.perform(op.StartProgram(info.id, (sys.executable, "-c", listener)), ADMIN)
        follow = await b.stream(op.FollowProgram(info.id, program.id), ADMIN)
        first = await anext(follow)
        assert isinstance(first, Chunk)
        tunnel = await b.dial(info.id, int(first.data), ADMIN)
        await tunnel.write(b"hello")
        assert await tunnel.read(100) == b"HELLO" and await tunnel.read(100) == b""
        tunnel.close()
        await follow.aclose()
        with pytest.raises(NotFound):
            await b.dial(info.id, int(first.data), ADMIN)
        await run(b, info.id, "A=1")
        await made.shut("a")
        assert (await run(b, info.id, "echo $A")).stdout == "1\n"
        assert info.id in b._sessions.lives
    finally:
        await made.stop()


@in_loop
async def test_a_stranger_at_the_address_of_a_server_is_told_nothing(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        told: list[object] = []

        class Stranger:
            """It answers whatever it is asked, as a box may that got the address of a Pod."""

            async def perform(self, operation: Operation[T]) -> T:
                told.append(operation)
                return cast(T, serving.Identity(OPERATOR, "admin", label="\udcff"))

        assert b._replicas
        keys: list[str] = []

        def connect(url: str, key: str) -> Peer:
            keys.append(key)
            return cast(Peer, Stranger())

        b._replicas._connect = connect
        assert (await run(b, info.id, "echo mine")).stdout == "mine\n"
        assert told == [serving.WhoAmI()] and info.id in b._sessions.lives
        assert a._replicas
        assert a._replicas.caller_of(keys[0]).scope == "metrics"


@in_loop
async def test_a_server_does_for_another_only_what_is_about_a_session(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        assert a._replicas and isinstance(b._store, SharedStore)
        key = a._replicas._key_for(b._store.me, ADMIN)
        forwarded = b.authenticate(key, local=False)
        for operation in (serving.MakeKey("eve", "admin"), serving.ListKeys(), op.ListSessions()):
            with pytest.raises(NotPermitted, match="about one session"):
                await b.perform(operation, forwarded)


@in_loop
async def test_what_was_forwarded_with_a_key_ends_with_that_key(tmp_path: Path) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        made_key = await a.perform(serving.MakeKey("alice", "run"), ADMIN)
        caller = a.authenticate(made_key.key, local=False)
        assert a._replicas and isinstance(b._store, SharedStore)
        passed = a._replicas._key_for(b._store.me, caller)
        await until(lambda: b._keys.get(made_key.id))
        assert b.authenticate(passed, local=False) == caller
        await b.perform(serving.RevokeKey(made_key.id), ADMIN)
        with pytest.raises(NotPermitted, match="revoked"):
            b.authenticate(passed, local=False)
        # One that b was not told of yet is no reason, and stops nothing that b does by itself.
        unknown = replace(caller, key="unknown1")
        other = a._replicas._key_for(b._store.me, unknown)
        assert b.authenticate(other, local=False) == unknown
        stop = b.watch(unknown, lambda: None)
        b._keys.end_expired()
        stop()


@in_loop
async def test_an_upload_that_was_partly_read_elsewhere_is_not_written_without_its_start(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as made:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a)
        await run(b, info.id, "true")  # so that its answer is fresh

        class Restarted:
            async def perform(self, operation: Operation[T]) -> T:
                if isinstance(operation, op.WriteFile) and not isinstance(operation.data, bytes):
                    await anext(aiter(cast(AsyncIterable[bytes], operation.data)))
                raise PeerLost from Unauthorized("this key is for one that was here before")

        assert b._replicas
        b._replicas._connect = lambda url, key: cast(Peer, Restarted())

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"first"
            yield b"second"

        path = tmp_path / "file"
        with pytest.raises(ServerUnavailable, match="send it again"):
            await b.perform(op.WriteFile(info.id, str(path), pieces()), ADMIN)
        assert not path.exists()
        await b.perform(op.WriteFile(info.id, str(path), b"whole"), ADMIN)
        assert path.read_bytes() == b"whole"


@in_loop
async def test_only_the_last_sessions_that_ended_are_kept_in_the_store_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.shared_store.KEPT", 1)
    async with servers(tmp_path) as made:
        a = await made.start("a")
        ids = [(await opened(a)).id for _ in range(3)]
        for id in ids[1:]:
            await a.perform(op.CloseSession(id), ADMIN)
        assert a._replicas
        await a._replicas.reap()
        await a._sessions.purge()
        assert {key for kind, key in made.records.records if kind == "session"} == {
            ids[0],
            ids[2],
        }


@in_loop
async def test_servers_share_connections_however_many_keys_they_forward_for(
    tmp_path: Path,
) -> None:
    made = ServersOverHTTP(tmp_path)
    try:
        a, b = await made.start("a"), await made.start("b")
        info = await opened(a, ALICE)
        before = set(await POOLS.get())
        for number in range(5):
            caller = replace(ALICE, images=(info.image, f"other-{number}"))
            assert (await run(b, info.id, "echo hi", caller)).stdout == "hi\n"
        assert len(set(await POOLS.get()) - before) == 1
    finally:
        await made.stop()


@in_loop
async def test_what_changes_while_a_server_starts_holds_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(tmp_path) as made:
        a = await made.start("a")
        key = await a.perform(serving.MakeKey("alice", "run"), ADMIN)

        async def keep_files(backend: SharingBackend) -> None:
            await a.perform(serving.RevokeKey(key.id), ADMIN)
            await a.perform(serving.SetQuota("alice", sessions=1), ADMIN)
            await asyncio.sleep(0.2)  # so that the one that starts has been told of both

        monkeypatch.setattr(SharingBackend, "keep_files", keep_files)
        b = await made.start("b")
        with pytest.raises(Unauthorized):
            b.authenticate(key.key, local=False)
        assert b._quotas.of("alice") == Quota(sessions=1)
